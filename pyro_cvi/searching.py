"""A mirror step of one block whose factors are not conjugate: as long as the bound supports it.

    q' = argmax  <gradient, mu> - KL(. || q) / rho,      taken if  rise of the ELBO >= KL(q || q') / rho

Each element of a block has a step size of its own, for one that overshoots need not hold up the others.
Which ones do is read off the slopes s_0, s_1 of the bound along the step, at its ends: an element has
risen by about (s_0 + s_1) / 2, where s_0 = (KL(q || q') + KL(q' || q)) / rho.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block
from pyro_cvi.updates import Belief, Step

__all__ = ["NOTICED", "SLACK", "Found", "Rho", "searched"]

Rho = float | Tensor
"""A step size, or one for each element of a block."""
_HALVINGS = 40
_STEEP = 0.6
"""A full step that rises by this share of what a linear bound would is tried at twice its length."""
_LONGEST = 64.0
NOTICED = 1e-3
"""Relative shortfall of a step below which rounding may be the cause."""
SLACK = {torch.float64: 1e-12, torch.float32: 2e-6}
_AT_FAULT = 1e-3
"""Elements that fall short by this share of the worst one halve their steps."""


class Found(NamedTuple):
    """The step size to try next, what the step met (None: there was none), and where a full one goes."""

    rho: Rho
    step: Step | None
    target: Belief | None


def searched(evaluator: Evaluator, block: Block, rho: Rho, accelerated: bool) -> Found:
    """Step the block, trying `rho` first; `accelerated` steps go on where the bound stays steep."""
    name = block.name
    old = evaluator.beliefs[name]
    kept = evaluator.kept(name)
    before = evaluator.local(block)
    gradient = evaluator.message(block)
    slack = SLACK.get(old.tensors[0].dtype, 1e-6) * float(before.abs() + 1)
    weight, enlarged = evaluator.weight_of(block), False
    rho = _fitting(rho, old)
    full = old.moved(gradient, 1.0) if accelerated or _is_full(rho) else None
    target = None if full is None else full[0]
    for _ in range(_HALVINGS):
        belief, step = full if _is_full(rho) and full is not None else old.moved(gradient, rho)
        slower: Rho = rho / 2
        if belief.is_finite():
            evaluator.set(name, belief)
            rise = float(evaluator.local(block) - before)
            needed = weight * _over(old, belief, rho)
            short = needed - slack - rise
            if 0 < short <= NOTICED * float(before.abs() + 1) and not enlarged:
                evaluator.restore(name, kept)
                slack, enlarged = max(slack, evaluator.rounding(block)), True
                evaluator.set(name, belief)
            if rise >= needed - slack:
                steep = needed + weight * float(belief.kl(old))
                if accelerated and _is_full(rho) and rise > _STEEP * steep:
                    _extend(evaluator, block, old, gradient)
                return Found(_faster(rho), step, target)
            slower = _slower(evaluator, block, old, belief, rho)
            evaluator.restore(name, kept)
        rho = slower
    return Found(
        1.0, None, target
    )  # no step rises: this is the optimum as far as rounding can tell


def _is_full(rho: Rho) -> bool:
    return not isinstance(rho, Tensor) and rho == 1


def _fitting(rho: Rho, belief: Belief) -> Rho:
    """Step sizes for this belief's elements: those of other elements say little about them."""
    if isinstance(rho, Tensor):
        own = belief.kls(belief)
        return rho if own is not None and own.shape == rho.shape else float(rho.min())
    return rho


def _over(old: Belief, new: Belief, rho: Rho) -> float:
    """KL(old || new) / rho, summed over the elements."""
    if isinstance(rho, Tensor):
        each = old.kls(new)
        assert each is not None
        return float((each / rho).sum())
    return float(old.kl(new)) / rho


def _faster(rho: Rho) -> Rho:
    if not isinstance(rho, Tensor):
        return min(1.0, 2 * rho)
    twice = (2 * rho).clamp(max=1.0)
    return 1.0 if bool((twice == 1).all()) else twice


def _slower(evaluator: Evaluator, block: Block, old: Belief, new: Belief, rho: Rho) -> Rho:
    """Half the step sizes of the elements that have not risen by what they should; of all, if none."""
    each = old.kls(new)
    if each is None or each.numel() < 2:
        return rho / 2
    end = new.ends(evaluator.message(block), old)
    back = new.kls(old)
    assert end is not None and back is not None
    short = each / rho - ((each + back) / rho + end) / 2
    if not bool(short.isfinite().all()):
        faulty = ~short.isfinite()
    else:
        faulty = short > _AT_FAULT * short.max().clamp(min=0)
    if bool(faulty.all()) or not bool(faulty.any()):
        return rho / 2
    sizes = rho if isinstance(rho, Tensor) else torch.full_like(each, rho)
    return torch.where(faulty, sizes / 2, sizes)


def _extend(
    evaluator: Evaluator, block: Block, old: Belief, gradient: Sequence[Tensor | None]
) -> None:
    """Go on in the direction of a full step for as long as the bound rises.

    A full step rises by the two KLs between its ends if the bound is linear along it, and by half of
    that at the optimum of a parabola; in between it was short.
    """
    rho = 2.0
    while rho <= _LONGEST:
        kept = evaluator.kept(block.name)
        here = evaluator.local(block)
        belief, step = old.moved(gradient, rho)
        if step.improper or not belief.is_finite():
            return
        evaluator.set(block.name, belief)
        if not float(evaluator.local(block) - here) > 0:
            evaluator.restore(block.name, kept)
            return
        rho *= 2
