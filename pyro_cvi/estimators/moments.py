"""Which family holds each site, and the moments E_q[T] that expressions are averaged with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyro_cvi.algebra.expression import Stat, Statistic
from pyro_cvi.families import AbstractFamily
from pyro_cvi.gaussians import Layout

__all__ = ["Moments", "Structure", "statistic_position"]

_STATISTIC = {
    "identity": Statistic(),
    "reciprocal": Statistic("power", -1.0),
    "log": Statistic("log"),
    "log_complement": Statistic("log1m"),
}


def statistic_position(family: AbstractFamily, statistic: Statistic) -> int | None:
    """Where a statistic stands among the family's sufficient statistics, None if it is not one."""
    for i, name in enumerate(family.statistics):
        if _STATISTIC.get(name) == statistic:
            return i
    return None


@dataclass(frozen=True, eq=False)
class Structure:
    """The posterior's shape: each site's family and block, and the layout of each Gaussian block."""

    family: dict[str, AbstractFamily]
    block: dict[str, str]
    layout: dict[str, Layout]

    def is_gaussian(self, site: str) -> bool:
        return self.block[site] in self.layout


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean parameters of all blocks: (loc, cov) of Gaussian blocks, E_q[T] of the other sites.

    Shapes: loc (B, d), cov (B, d, d); statistics as in the family, site shape first.
    """

    gaussian: dict[str, tuple[Tensor, Tensor]]
    other: dict[str, tuple[Tensor, ...]]

    def read(self, stat: Stat, position: int) -> Tensor:
        """E_q of a statistic of a site outside the Gaussian blocks, cell by cell."""
        values = self.other[stat.site.name][position].reshape(-1)
        if values.numel() == 1 and stat.index.ndim == 0:
            return values[0]
        return values[stat.index]
