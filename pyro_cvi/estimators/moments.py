"""Which family holds each site, and the moments E_q[T] that expressions are averaged with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import Statistic
from pyro_cvi.families import AbstractFamily
from pyro_cvi.gaussians import Layout, row_quadratic

__all__ = ["Moments", "Pool", "Structure", "statistic_position"]

_STATISTIC = {
    "identity": Statistic(),
    "reciprocal": Statistic("power", -1.0),
    "log": Statistic("log"),
    "log_complement": Statistic("log1m"),
    "square": Statistic("power", 2.0),
    "sqrt": Statistic("power", 0.5),
    "logdet": Statistic("logdet"),
}
"""The names that a family's `statistics` may use; conjugacy is found through them."""


def statistic_position(family: AbstractFamily, statistic: Statistic) -> int | None:
    """Where a statistic stands among the family's sufficient statistics, None if it is not one."""
    for i, name in enumerate(family.statistics):
        if _STATISTIC.get(name) == statistic:
            return i
    return None


class Predictor(Protocol):
    """What has a mean and a variance under Gaussian blocks: see `affine.Affine`."""

    def mean(self, moments: Moments) -> Tensor: ...

    def variance(self, moments: Moments) -> Tensor | float: ...


class Pool:
    """The small designs of one dense block, stacked: one product serves a thousand small factors.

    Without it every factor's gradient is a d x d matrix of its own.
    """

    def __init__(self, block: str, width: int) -> None:
        self.block, self.width = block, width
        self._rows: list[Tensor] = []
        self._count = 0

    def add(self, matrix: Tensor, columns: Tensor) -> int:
        """Stack the rows of `matrix` (n, len(columns)); returns where they start."""
        wide = matrix.new_zeros(matrix.shape[0], self.width)
        wide[:, columns] = matrix
        start = self._count
        self._rows.append(wide)
        self._count += matrix.shape[0]
        return start

    def __len__(self) -> int:
        return self._count

    @property
    def matrix(self) -> Tensor:
        """All rows, (n, d)."""
        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        return self._rows[0]


@dataclass(frozen=True, eq=False)
class Structure:
    """The posterior's shape: each site's family and block, and the layout of each Gaussian block.

    A block that is seen through views has several parts, each a block here with its own layout; `owner`
    has the whole block of each part.
    """

    family: dict[str, AbstractFamily]
    block: dict[str, str]
    layout: dict[str, Layout]
    owner: dict[str, str] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)

    def fresh(self) -> Structure:
        """The same structure with empty pools, for another compilation."""
        return replace(self, pools={})

    @property
    def pooled(self) -> int:
        """How many rows all pools have."""
        return sum(len(p) for p in self.pools.values())

    def pool(self, block: str) -> Pool:
        """The pool of a dense block."""
        return self.pools.setdefault(block, Pool(block, self.layout[block].width))

    def block_of(self, site: str) -> str:
        """The block that a site, or a view, belongs to as a whole."""
        part = self.block[site]
        return self.owner.get(part, part)

    def is_gaussian(self, site: str) -> bool:
        return self.block[site] in self.layout


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean parameters of all blocks: (loc, cov) of Gaussian blocks, E_q[T] of the other sites.

    Shapes: loc (B, d), cov (B, d, d); statistics as in the family, site shape first. `natural` are the
    natural parameters of other sites, where they are known.
    """

    gaussian: dict[str, tuple[Tensor, Tensor]]
    other: dict[str, tuple[Tensor, ...]]
    natural: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    _pooled: dict[Pool, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _diagonal: dict[str, Tensor] = field(default_factory=dict)
    _predictors: dict[Predictor, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def predictor(self, x: Predictor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a predictor in cells of this shape; the same tensors at every call."""
        if x not in self._predictors:
            mean, variance = x.mean(self), x.variance(self)
            wide = variance if isinstance(variance, Tensor) else mean.new_tensor(variance)
            self._predictors[x] = (mean.expand(shape), wide.expand(shape))
        return self._predictors[x]

    def pooled(self, pool: Pool) -> tuple[Tensor, Tensor]:
        """A m and diag(A V A^T) for the stacked rows of a pool; computed once."""
        if pool not in self._pooled:
            loc, cov = self.gaussian[pool.block]
            matrix = pool.matrix.to(loc.dtype)
            self._pooled[pool] = (matrix @ loc[0], row_quadratic(matrix, cov[0]))
        return self._pooled[pool]

    def diagonal(self, block: str) -> Tensor:
        """Marginal variances of a block, flattened as (element, position); computed once."""
        if block not in self._diagonal:
            cov = self.gaussian[block][1]
            self._diagonal[block] = cov.diagonal(dim1=-2, dim2=-1).reshape(-1)
        return self._diagonal[block]
