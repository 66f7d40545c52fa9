"""Fixed points and weights for averages over N(0, I): nodes x_s (S, d) and w_s (S,), with sum w_s = 1.

    sum_s w_s x_s = 0,    sum_s w_s x_s x_s^T = I,

so that functions up to the second degree are averaged exactly. One or two dimensions have products of
Gauss-Hermite rules, more have points of a scrambled Sobol sequence, each with its mirror image, made to
have unit covariance.

Sources: J. Dick, F. Kuo, I. Sloan (2013), High-dimensional integration: the quasi-Monte Carlo way, for
the points; J. Burroni, J. Domke, D. Sheldon (2024), Sample average approximation for black-box
variational inference, for the growth of their number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["CENTRE", "Nodes", "fixed_nodes", "sobol_normal"]

CENTRE = -1
_HERMITE = {1: 24, 2: 14}
"""Order of the rule along each dimension at level 0; each level has half as many again."""
_FEW_HERMITE = {1: 7, 2: 5}
"""The same where each node is a run of the model of its own, ..."""
_FEWEST, _EACH = 128, 16
"""Sobol points at level 0: so many, and so many for each dimension; each level has twice as many."""
_FEWER = 4
"""... and the share of Sobol points there."""
_EDGE = 1e-7
"""Least probability of a point on either side: 5.2 standard deviations."""


class Nodes(NamedTuple):
    """Points (S, d) in base space, and their weights (S,)."""

    points: Tensor
    weights: Tensor


def fixed_nodes(dims: int, level: int, seed: int = 0, *, few: bool = False) -> Nodes:
    """The nodes of a level, in float64; `seed` scrambles those of three and more dimensions.

    Level `CENTRE` is one node at zero. Where a node is dear, there may be `few`.
    """
    if level == CENTRE:
        origin = torch.zeros(1, dims, dtype=torch.float64, device="cpu")
        return Nodes(origin, origin.new_ones(1))
    if dims in _HERMITE:
        order = (_FEW_HERMITE if few else _HERMITE)[dims]
        return _hermite_product(dims, int(order * 1.5**level))
    count = max(_FEWEST, _EACH * dims) // (_FEWER if few else 1)
    count = 1 << (count - 1).bit_length()
    points = sobol_normal(dims, count << level, seed)
    return Nodes(points, points.new_full((len(points),), 1 / len(points)))


@lru_cache(maxsize=32)
def _hermite_product(dims: int, order: int) -> Nodes:
    x, w = np.polynomial.hermite_e.hermegauss(order)
    grids = np.meshgrid(*[x] * dims, indexing="ij")
    weights = np.prod(np.meshgrid(*[w / w.sum()] * dims, indexing="ij"), axis=0)
    points = np.stack([g.ravel() for g in grids], -1)
    kept = weights.ravel() > 1e-12 * weights.max()  # corners that count for nothing
    weights = weights.ravel()[kept] / weights.ravel()[kept].sum()
    return Nodes(
        torch.as_tensor(points[kept], device="cpu"), torch.as_tensor(weights, device="cpu")
    )


@lru_cache(maxsize=32)
def sobol_normal(dims: int, count: int, seed: int) -> Tensor:
    """(count, dims) points of a scrambled Sobol sequence under N(0, I), mirrored, of unit covariance."""
    engine = torch.quasirandom.SobolEngine(dims, scramble=True, seed=seed)
    u = engine.draw(max(count // 2, 2 * dims), dtype=torch.float64)
    half = torch.special.ndtri(u.clamp(_EDGE, 1 - _EDGE))
    factor = torch.linalg.cholesky(half.mT @ half / len(half))
    half = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
    return torch.cat([half, -half])
