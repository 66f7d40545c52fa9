"""Where a fit starts whose first bound is absurd, or whose factors are averaged over points of sites.

Natural-gradient steps are Newton's in kind. At a rate of exp(50) one undoes a nat of the exponent, and
on a density that nothing is known of it may go anywhere. So the means of all Gaussian blocks climb
first, with narrow beliefs around them, by L-BFGS in units of the prior's standard deviations:

    max_m  -log(1 - F(m))  while F(m), the bound, is far below zero,    then  max_m F(m).

The logarithm makes a slope of what an exponential has blown up. Of a few starts (the prior's mean, and
draws from it, or the best of many: see `scouts`) the one with the best bound goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import START_SPREAD, prior_spread
from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.pointed import PointFactor, levels
from pyro_cvi.graph.symbolic import Call
from pyro_cvi.linalg import or_zeros
from pyro_cvi.mixing import BlockStep, Outlook
from pyro_cvi.scouts import Scouts
from pyro_cvi.updates import AbstractBelief, GaussianBelief

__all__ = ["ABSURD", "ascend"]

ABSURD = 1e3
"""Nats for every observed cell: a bound that far down is that of no fit."""
_STEPS, _HISTORY = 30, 20
_DRAWS = 2
"""Starts at draws from the prior, beside the one at its mean, where points stand for sites."""
_SHRUNK = 0.5
"""How far from the prior's mean these draws are, in units of a whole one."""
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)
"""How far from zero means begin, of where they are, until the bound is finite."""
_SWEEPS = 5
"""After which starts are compared, at most."""
_SETTLED = 0.1
"""Nats that a sweep gains, below which a start has shown what it is worth."""
_WIDTHS = (1.0, 0.3, 0.1)
"""Widths of the beliefs that averages over points are tried with: a sharp optimum is no lower one."""
_WIDEST = 1e3
"""Largest unit of a climb: flat priors say nothing of scales."""


def ascend(
    evaluator: Evaluator,
    cells: int,
    call: Call | None,
    step: BlockStep,
    located: Collection[str] = (),
) -> None:
    """Move blocks to a better start: an absurd one, points in the place of sites, several maxima.

    `call` runs the model, `step` moves a block; sites that are `located` stay where they are.
    """
    plan = evaluator.plan
    blocks = [
        b
        for b in plan.blocks
        if b.moves and b.placement is None and isinstance(evaluator.beliefs[b.name], GaussianBelief)
    ]
    if evaluator.shards.plates or not blocks:
        return
    placed = any(s in located for b in plan.blocks for s in b.sites)
    pointed = bool(levels(plan))
    is_absurd = not evaluator.elbo() > -ABSURD * cells
    scouts = None if placed else Scouts.of(evaluator, call, cells)
    if pointed or is_absurd:
        _climb(evaluator, blocks, cells, scouts if pointed else None, placed=placed)
    if scouts is not None and not pointed:
        _compare(evaluator, scouts, step)


def _compare(evaluator: Evaluator, scouts: Scouts, step: BlockStep) -> None:
    """Go to where scouts have come, if a few sweeps from there end higher than from here."""
    here = dict(evaluator.beliefs)
    points = scouts.highest()
    if points is None:
        return
    there = [{**here, **scouts.beliefs(points, share)} for share in _WIDTHS]
    best, kept = -math.inf, here
    for start in (max(there, key=lambda x: _bound_at(evaluator, x)), here):
        outlook = Outlook(_bound_at(evaluator, start))
        with suppress(CVIError):  # an improper target, far from any fit
            for _ in range(_SWEEPS):
                for block in evaluator.plan.blocks:
                    step(evaluator, block)
                outlook.see(evaluator.elbo())
                if not outlook.end > best or abs(outlook.gain) < _SETTLED:
                    break
        if outlook.bound > best:
            best, kept = outlook.bound, dict(evaluator.beliefs)
    _bound_at(evaluator, kept)


def _bound_at(evaluator: Evaluator, beliefs: Mapping[str, AbstractBelief]) -> float:
    """The bound with these beliefs, which are set."""
    for name, belief in beliefs.items():
        evaluator.set(name, belief)
    return evaluator.elbo()


def _climb(
    evaluator: Evaluator,
    blocks: list[Block],
    cells: int,
    scouts: Scouts | None,
    *,
    placed: bool,
) -> None:
    """Let the means of Gaussian blocks climb from a few starts, and keep where the bound is best."""
    pointed = bool(levels(evaluator.plan))
    best = evaluator.elbo()
    kept: dict[str, AbstractBelief] = {b.name: evaluator.beliefs[b.name] for b in blocks}
    climb = _Climb(evaluator, blocks, cells)
    for i, start in enumerate(climb.starts(scouts)):
        if i > 0 and (placed or not (pointed or not best > -ABSURD * cells)):
            break
        means = climb.climbed(start, _STEPS if i == 0 else _STEPS // 2)
        for share in _WIDTHS if pointed else _WIDTHS[:1]:
            found = climb.around(means, share)
            value = _bound_at(evaluator, found)
            if value > best or (math.isnan(best) and not math.isnan(value)):
                best, kept = value, {**found}
    _bound_at(evaluator, kept)


class _Climb:
    """The bound as a function of the means of some blocks, with narrow beliefs around them."""

    def __init__(self, evaluator: Evaluator, blocks: list[Block], cells: int) -> None:
        plan, self.cells = evaluator.plan, cells
        centred = [f.centred() if isinstance(f, PointFactor) else f for f in plan.factors]
        self.evaluator = Evaluator(
            replace(plan, factors=tuple(centred)), evaluator.beliefs, evaluator.shards
        )
        self.blocks = blocks
        self.unit: dict[str, Tensor] = {}
        self.precision: dict[str, Tensor] = {}
        for b in blocks:
            loc = evaluator.beliefs[b.name].tensors[0]
            spread = prior_spread(plan, b).to(loc)
            self.unit[b.name] = spread.clamp(max=_WIDEST)
            self.precision[b.name] = torch.diag_embed(spread.clamp(max=START_SPREAD).pow(-2))

    def starts(self, scouts: Scouts | None) -> Iterator[dict[str, Tensor]]:
        """Where the means are, or nearer to zero where the bound is finite; and others around it.

        The others are draws, or where the best of many draws has climbed to.
        """
        given = {b.name: self.evaluator.beliefs[b.name].tensors[0] for b in self.blocks}
        nearer = ({n: share * m for n, m in given.items()} for share in _SHARES)
        present = next((m for m in nearer if math.isfinite(self._at(m)[0])), given)
        yield present
        points = None if scouts is None else scouts.highest()
        if scouts is not None and points is not None:
            found = scouts.beliefs(points, 1.0)
            yield {n: found[n].tensors[0] for n in present}
            return
        for _ in range(_DRAWS):
            yield {
                n: m + _SHRUNK * self.unit[n].clamp(max=2.0) * torch.randn_like(m)
                for n, m in present.items()
            }

    def around(self, means: dict[str, Tensor], share: float) -> dict[str, GaussianBelief]:
        """Narrow beliefs around these means, of that share of the usual width."""
        return {n: GaussianBelief(m, self.precision[n] / share**2) for n, m in means.items()}

    def climbed(self, start: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
        """Where a climb from these means ends."""
        found = start
        if not self._at(start)[0] > -ABSURD * self.cells:
            found = self._highest(start, steps, compressed=True)
        return self._highest(found, steps, compressed=False)

    def _highest(
        self, start: dict[str, Tensor], steps: int, *, compressed: bool
    ) -> dict[str, Tensor]:
        moved = {n: torch.zeros_like(m, requires_grad=True) for n, m in start.items()}
        best, found = -math.inf, start
        seen: list[float] = []

        def closure() -> Tensor:
            nonlocal best, found
            here = {n: start[n] + self.unit[n] * x.detach() for n, x in moved.items()}
            value, slopes = self._at(here)
            if value > best:
                best, found = value, here
            scale = 1.0
            if compressed and value < 0:
                scale = 1 / (1 - value)
                value = -math.log1p(-value)
            seen.append(value)
            for n, x in moved.items():
                x.grad = (-scale * self.unit[n] * slopes[n]).nan_to_num(0.0, 0.0, 0.0)
            like = next(iter(moved.values()))
            lost = 10 * (abs(max(seen, default=0.0)) + 1)
            return like.new_tensor(-value if math.isfinite(value) else lost).detach()

        optimiser = torch.optim.LBFGS(
            list(moved.values()), max_iter=steps, history_size=_HISTORY, max_eval=steps + steps // 2,
            tolerance_change=1e-4, line_search_fn="strong_wolfe",
        )  # fmt: skip
        with suppress(RuntimeError, IndexError):  # what L-BFGS says where its steps overflow
            optimiser.step(closure)
        return found

    def _at(self, means: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The bound but for entropies, which stay what they are, and its slopes in the means."""
        e = self.evaluator
        for n, m in means.items():
            e.set(n, GaussianBelief(m, self.precision[n]))
        with torch.enable_grad():
            total = sum(e.split_expectations())
        assert isinstance(total, Tensor)
        leaves = [e.leaves[n][0] for n in means]
        found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        slopes = {n: or_zeros(g, m) for (n, m), g in zip(means.items(), found, strict=True)}
        return float(total.detach()), slopes
