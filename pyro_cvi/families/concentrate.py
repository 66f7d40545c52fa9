"""Narrower members of a family around the same place."""

from __future__ import annotations

from pyro_cvi.families.beta import BETA
from pyro_cvi.families.dirichlet import DIRICHLET
from pyro_cvi.families.family import AbstractFamily, Natural
from pyro_cvi.families.gamma import GAMMA
from pyro_cvi.families.inverse_gamma import INVERSE_GAMMA

__all__ = ["concentrated"]


def concentrated(family: AbstractFamily, natural: Natural, factor: float) -> Natural | None:
    """Shapes and rates times `factor`: the same mean (of 1/x for InverseGamma), its variance over it.

    None for other families.
    """
    if family in (GAMMA, INVERSE_GAMMA):
        return factor * (natural[0] + 1) - 1, factor * natural[1]
    if family in (BETA, DIRICHLET):
        return tuple(factor * (n + 1) - 1 for n in natural)
    return None
