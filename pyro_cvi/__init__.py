"""Conjugate-computation variational inference for Pyro."""
