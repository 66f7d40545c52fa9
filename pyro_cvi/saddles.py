"""A stationary point that is no maximum is left: what the data see through an even function of z.

Between the modes of z * z or cosh z the bound is stationary, and steps stay there by symmetry. Such a
point shows itself where the belief is made narrow: the log density curves upwards at its mean,

    -2 d E_q[log p] / dV  has a negative eigenvalue,        q = N(m, V / 100).

Along that direction, on both sides and at several lengths, the block is started anew, takes a few steps
of its own, and stays where the bound is higher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import START_SPREAD, prior_spread
from pyro_cvi.graph.plan import Block
from pyro_cvi.linalg import or_zeros, symmetrise
from pyro_cvi.updates import GaussianBelief, Step

__all__ = ["leave_saddle"]

_LENGTHS = (0.3, 1.0, 2.0)
"""How far away the block starts anew, in standard deviations of the prior along the direction."""
_STEPS = 8
"""Most steps of its own before its bound is compared."""
_NARROWER = 100.0
_ROUNDING = 1e3
"""Units of rounding of the largest eigenvalue within which a negative one is none."""


class Steps(Protocol):
    """What takes the step of one block: `Sweeper`."""

    counts: dict[str, Step]

    def deterministic(self, evaluator: Evaluator, block: Block) -> None: ...


def leave_saddle(evaluator: Evaluator, steps: Steps, least: float) -> list[str]:
    """The blocks that were moved to where the bound is higher by more than `least` nats.

    Only blocks whose targets were improper at some step can be at a saddle: the others have seen the
    log density curve downwards wherever they were.
    """
    moved = []
    for block in evaluator.plan.blocks:
        met = steps.counts.get(block.name, Step()).improper > 0
        met = met or bool(evaluator.plan.scattered & set(block.sites))
        belief = evaluator.beliefs[block.name]
        if not (met and block.moves and isinstance(belief, GaussianBelief)):
            continue
        if block.placement is None and _left(evaluator, steps, block, belief, least):
            moved.append(block.name)
    return moved


def _left(
    evaluator: Evaluator, steps: Steps, block: Block, belief: GaussianBelief, least: float
) -> bool:
    spread = prior_spread(evaluator.plan, block).to(belief.loc)
    direction = _upwards(evaluator, block, belief, spread)
    if direction is None:
        return False
    kept = evaluator.kept(block.name)
    best, highest = None, float(evaluator.local(block)) + least
    narrow = torch.diag_embed(spread.clamp(max=START_SPREAD).pow(-2))
    for start in _starts(belief.loc, direction):
        evaluator.set(block.name, GaussianBelief(start, narrow))
        for _ in range(_STEPS):
            here = float(evaluator.local(block))
            steps.deterministic(evaluator, block)
            if not float(evaluator.local(block)) - here > least:
                break
        value = float(evaluator.local(block))
        if value > highest:
            best, highest = evaluator.beliefs[block.name], value
    if best is None:
        evaluator.restore(block.name, kept)
        return False
    evaluator.set(block.name, best)
    return True


def _upwards(
    evaluator: Evaluator, block: Block, belief: GaussianBelief, spread: Tensor
) -> Tensor | None:
    """The direction of each element in which the log density curves upwards most; None if it never does.

    In units of the prior: of length one standard deviation. Elements that curve downwards stay.
    """
    kept = evaluator.kept(block.name)
    evaluator.set(block.name, GaussianBelief(belief.loc, _NARROWER * belief.precision))
    curvature = or_zeros(evaluator.message(block)[1], belief.precision)
    evaluator.restore(block.name, kept)
    if not bool(curvature.isfinite().all()):
        return None
    target = -2 * symmetrise(curvature) * spread[..., :, None] * spread[..., None, :]
    values, vectors = torch.linalg.eigh(target)
    noise = _ROUNDING * torch.finfo(values.dtype).eps * values.abs().amax(-1)
    up = values[..., 0] < -noise
    if not bool(up.any()):
        return None
    return vectors[..., :, 0] * spread * up[..., None]


def _starts(loc: Tensor, direction: Tensor) -> Iterator[Tensor]:
    """On both sides, at several lengths; elements of a plate take sides of their own."""
    side = torch.ones_like(loc[:, :1])
    if len(loc) > 1:
        side = 2 * torch.randint_like(side, 2) - 1
    for length in _LENGTHS:
        for sign in (1.0, -1.0):
            yield loc + sign * length * side * direction
