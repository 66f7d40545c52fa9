"""Anderson acceleration of sweeps that creep: x' = sum_j a_j T(x_j), safeguarded by the bound.

A sweep is a fixed-point map x -> T(x) of all beliefs. With residuals f_j = T(x_j) - x_j of the last few
sweeps, the weights minimise |sum_j a_j f_j| subject to sum_j a_j = 1. The mixture is taken if it is
proper and its bound is higher than that of the plain sweep. Of several processes, the inner products of
residuals are summed over blocks that are each one's own, so that all take the same weights.

Rows of a map that do not meet have weights of their own each: `RowMixing`.

Source: H. F. Walker, P. Ni (2011), Anderson acceleration for fixed-point iterations, SIAM J. Numer.
Anal. 49.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from pyro_cvi.distributed import Shards
from pyro_cvi.updates import Belief

__all__ = ["Anderson", "Mixing", "RowMixing"]

_MEMORY = 7
_LARGEST = 1 << 20
"""Most scalars of all beliefs that move: those of the last sweeps are held in memory."""
_CREEPING = 0.05
"""A sweep that gains less than this share of the one before it converges fast enough by itself."""
_RIDGE = 1e-10
"""Relative ridge of the least squares: residuals of a converged run are nearly parallel."""


_ROW_MEMORY, _ROW_RIDGE = 3, 1e-10
"""The same for rows, which are solved by themselves."""


class Mixing(Enum):
    """When a sweep is mixed with those before it.

    Single steps are not even remembered: they would hold several posteriors in memory, and a fit that
    was saved between two of them, without these, would not go on as the other does.
    """

    NEVER = "never"
    REMEMBERED = "not now, but those after it may be mixed with it"
    WHERE_IT_CREEPS = "where sweeps creep, and the bound is higher for it"
    NOW = "if no more than rounding speaks against it"


class Anderson:
    """The last sweeps, and what they would have come to undamped.

    Blocks of `own` are those of one of several processes.
    """

    def __init__(self, shards: Shards | None = None, own: frozenset[str] = frozenset()) -> None:
        self._shards, self._own = shards or Shards(), own
        self._pairs: list[tuple[dict[str, Belief], dict[str, Belief]]] = []
        self._bounds: list[float] = []
        self._wait = 0
        self._refusals = 0

    def propose(
        self,
        before: Mapping[str, Belief],
        targets: Mapping[str, Belief],
        bound: float,
        mixing: Mixing = Mixing.WHERE_IT_CREEPS,
    ) -> dict[str, Belief] | None:
        """The accelerated beliefs of those that moved, or None where it is not the time for a try.

        `targets` are the beliefs after a full step each, `bound` is that of the plain sweep.
        """
        moved = {n: b for n, b in targets.items() if b is not before[n]}
        size = sum(t.numel() for b in moved.values() for t in b.tensors)
        if self._shards.any(size > _LARGEST):
            return None
        if self._pairs and self._shards.any(moved.keys() != self._pairs[-1][1].keys()):
            self._pairs.clear()
        self._pairs.append(({n: before[n] for n in moved}, moved))
        self._bounds.append(bound)
        del self._pairs[: -_MEMORY - 1], self._bounds[:-3]
        if mixing is Mixing.REMEMBERED:
            return None
        if mixing is Mixing.WHERE_IT_CREEPS and self._wait > 0:
            self._wait -= 1
            return None
        is_time = mixing is Mixing.NOW or self._creeps()
        if len(self._pairs) < 2 or not is_time or not self._shards.any(bool(moved)):
            return None
        weights = self._weights(moved)
        if weights is None:
            return None
        mixed: dict[str, Belief] | None = self._mixed(moved, weights)
        return None if self._shards.any(mixed is None) else mixed

    def _mixed(self, moved: Mapping[str, Belief], weights: list[float]) -> dict[str, Belief] | None:
        """The weighted sums of the sweeps' ends, if all are proper."""
        mixed = {}
        for name, belief in moved.items():
            parts = [y[name].tensors for _, y in self._pairs]
            tensors = [
                torch.stack([w * t for w, t in zip(weights, same, strict=True)]).sum(0)
                for same in zip(*parts, strict=True)
            ]
            new = belief.like(tensors)
            if new is None:
                return None
            mixed[name] = new
        return mixed

    def _creeps(self) -> bool:
        """Whether the last sweep gained a good part of what the one before it did."""
        if len(self._bounds) < 3:
            return False
        first, second, third = self._bounds
        return third - second > _CREEPING * (second - first) > 0

    def judged(self, taken: bool) -> None:
        """Whether the proposal was an improvement; after refusals the next try waits for longer."""
        self._refusals = 0 if taken else self._refusals + 1
        self._wait = 0 if taken else min(2**self._refusals - 1, 15)

    def _weights(self, moved: Mapping[str, Belief]) -> list[float] | None:
        products = self._products({n: b for n, b in moved.items() if n not in self._own})
        if self._own:
            own = self._products({n: b for n, b in moved.items() if n in self._own})
            products = products + self._shards.total(own)
        gram, slope = products[:, :-1], products[:, -1]
        size = float(gram.diagonal().mean())
        if not size > 0:
            return None
        ridge = _RIDGE * size * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        a = -torch.linalg.solve(gram + ridge, slope)
        if not bool(a.isfinite().all()):
            return None
        return [*a.tolist(), 1 - float(a.sum())]

    def _products(self, moved: Mapping[str, Belief]) -> Tensor:
        """Inner products of the differences from the last residual: with each other, and with it."""
        if not moved:
            return torch.zeros(
                len(self._pairs) - 1, len(self._pairs), dtype=torch.float64, device="cpu"
            )
        residuals = torch.stack([_residual(x, y, moved) for x, y in self._pairs])
        last = residuals[-1]
        steps = residuals[:-1] - last
        return steps @ torch.cat([steps, last[None]]).mT


def _residual(
    x: Mapping[str, Belief], y: Mapping[str, Belief], scale: Mapping[str, Belief]
) -> Tensor:
    """T(x) - x in coordinates in which the present beliefs' Fisher metric is roughly the identity."""
    parts = [p for n, b in scale.items() for p in b.standardised(x[n], y[n])]
    return torch.cat([p.reshape(-1).double() for p in parts])


class RowMixing:
    """Anderson mixing of a map of many rows that do not meet: x' = sum_j a_j T(x_j) for each by itself.

    A row's weights are those of its own residuals, so that a few slow rows need not hold up the rest. A
    row whose residual has grown begins anew. Tensors have the rows as their first axes.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._ends: list[Tensor] = []
        self._residuals: list[Tensor] = []

    def mixed(self, ends: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
        """Where to go on after a round that has ended in `ends`.

        `residuals` are its lengths, in coordinates in which all count alike.
        """
        end, residual = self._flat(ends), self._flat(residuals).double()
        if self._ends:
            grown = residual.square().sum(-1) > self._residuals[-1].square().sum(-1)
            for old, far in zip(self._ends, self._residuals, strict=True):
                old[grown], far[grown] = end[grown], residual[grown]  # of no weight after this
        self._ends.append(end.clone())
        self._residuals.append(residual)
        del self._ends[: -_ROW_MEMORY - 1], self._residuals[: -_ROW_MEMORY - 1]
        if len(self._ends) == 1:
            return list(ends)
        steps = torch.stack([r - residual for r in self._residuals[:-1]], 1)
        gram = steps @ steps.mT
        size = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        ridge = _ROW_RIDGE * size + torch.finfo(size.dtype).tiny
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        weights = -torch.linalg.solve(
            gram + ridge[:, None, None] * eye, steps @ residual[..., None]
        )
        moves = torch.stack([e - end for e in self._ends[:-1]], 1)
        found = end + (weights.to(moves.dtype) * moves).sum(1)
        found = torch.where(found.isfinite().all(-1, keepdim=True), found, end)
        parts = found.split([t.numel() // self._rows for t in ends], -1)
        return [p.reshape(t.shape) for p, t in zip(parts, ends, strict=True)]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.reshape(self._rows, -1) for t in tensors], -1)
