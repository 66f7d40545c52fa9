"""Sums with functions of other sites in a product: few terms, and the value of a brute-force grid."""

from __future__ import annotations

import estimator_cases as cases
import pytest
import torch

from pyro_cvi.estimators import compile_expectation

SHAPES = {"a": (), "b": (), "s": (), "u": (), "v": (2,)}
STATE = {"ab": ("a", "b"), "s": ("s",), "u": ("u",), "v": ("v",)}
"""The states by themselves."""
SCALED = {"abs": ("a", "b", "s"), "u": ("u",), "v": ("v",)}
"""The states and their scale."""
COEFFICIENTS = {"ab": ("a", "b"), "su": ("s", "u"), "v": ("v",)}
"""The scale beside the coefficient."""


def autoregression(z):
    g = 2 * torch.sigmoid(z.u) - 1
    return (z.a - 0.3 - g * (z.b - 0.3)).square() * (-2 * z.s).exp()


def scaled_sum(z):
    """Noise times a scale, many times over: one function of it, and one sum."""
    return (z.y - z.s.exp() * (z.a + 0.5 * z.b) - z.s.exp() * 0.3 * z.a).square()


def coefficient(z):
    """A Gaussian coefficient outside of the block that the weight reads."""
    return (z.a - z.u * z.b).square() * (-2 * z.s).exp()


def two_functions(z):
    return (z.a + torch.tanh(z.u) * z.b + z.u.square() * z.y).square()


def linear(z):
    return z.c * (z.a - torch.sigmoid(z.u) * (z.b - z.y))


def by_row(z):
    """Functions that vary along the rows."""
    return (z.a - torch.sigmoid(z.u + z.y) * (z.b + z.c)).square() * (-2 * z.s).exp()


CASES = {
    "autoregression": (autoregression, STATE, 3),
    "its scale in the block": (autoregression, SCALED, 3),
    "its scale beside the coefficient": (autoregression, COEFFICIENTS, 3),
    "scaled sum": (scaled_sum, STATE, 3),
    "scaled sum in the block": (scaled_sum, SCALED, 3),
    "coefficient": (coefficient, SCALED, 3),
    "two functions": (two_functions, STATE, 6),
    "linear": (linear, STATE, 2),
    "by row": (by_row, SCALED, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_collected_sum_has_the_value_and_the_gradient_of_a_grid(name, monkeypatch):
    monkeypatch.setattr(cases, "SHAPES", SHAPES)
    f, blocks, most = CASES[name]
    sites = cases.symbolic(f, SHAPES, cases.data()).sites
    shapes = {n: s for n, s in SHAPES.items() if n in sites}
    blocks = {b: tuple(n for n in ns if n in sites) for b, ns in blocks.items()}
    inputs, s = cases.data(), cases.structure({b: n for b, n in blocks.items() if n}, shapes)
    q = cases.leaves(cases.gaussians(s, 0.3))
    expected = cases.oracle(f, s, q, inputs, 14)
    expectation = compile_expectation(cases.symbolic(f, shapes, inputs), s)
    assert not expectation.sampled
    assert len(expectation.terms) <= most
    value = expectation(cases.moments(q)).expand(expectation.shape)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn(value.shape)
    got, want = cases.gradients(value, cotangent, q), cases.gradients(expected, cotangent, q)
    for g, h in zip(got, want, strict=True):
        torch.testing.assert_close(g, h, rtol=1e-5, atol=1e-5)
