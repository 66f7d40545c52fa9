"""Where a fit starts whose first bound is absurd, or whose factors are averaged over points of sites.

Natural-gradient steps are Newton's in kind. At a rate of exp(50) one undoes a nat of the exponent, and
on a density that nothing is known of it may go anywhere. So the means of all Gaussian blocks climb
first, with narrow beliefs around them, by L-BFGS in units of the prior's standard deviations:

    max_m  -log(1 - F(m))  while F(m), the bound, is far below zero,    then  max_m F(m).

The logarithm makes a slope of what an exponential has blown up. Of a few starts (the prior's mean, and
draws from it) the one with the best bound goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import START_SPREAD, prior_spread
from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.pointed import PointFactor
from pyro_cvi.linalg import or_zeros
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
_WIDEST = 1e3
"""Largest unit of a climb: flat priors say nothing of scales."""


def ascend(evaluator: Evaluator, cells: int, located: Collection[str] = ()) -> None:
    """Move the Gaussian blocks to a better start, if the present one is absurd, or stands for points."""
    plan = evaluator.plan
    blocks = [
        b
        for b in plan.blocks
        if b.moves and b.placement is None and isinstance(evaluator.beliefs[b.name], GaussianBelief)
    ]
    pointed = any(isinstance(f, PointFactor) for f in plan.factors)
    first = evaluator.elbo()
    if evaluator.shards.plates or not blocks or not (pointed or not first > -ABSURD * cells):
        return
    best = first
    kept: dict[str, AbstractBelief] = {b.name: evaluator.beliefs[b.name] for b in blocks}
    climb = _Climb(evaluator, blocks, cells)
    for i, start in enumerate(climb.starts(_DRAWS)):
        placed = any(s in located for b in blocks for s in b.sites)
        if i > 0 and (placed or not (pointed or not best > -ABSURD * cells)):
            break
        found = climb.climbed(start, _STEPS if i == 0 else _STEPS // 2)
        for name, belief in found.items():
            evaluator.set(name, belief)
        value = evaluator.elbo()
        if value > best or (math.isnan(best) and not math.isnan(value)):
            best, kept = value, {**found}
    for name, old in kept.items():
        evaluator.set(name, old)


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

    def starts(self, draws: int) -> Iterator[dict[str, Tensor]]:
        """Where the means are, or nearer to zero where the bound is finite; and draws around it."""
        given = {b.name: self.evaluator.beliefs[b.name].tensors[0] for b in self.blocks}
        nearer = ({n: share * m for n, m in given.items()} for share in _SHARES)
        present = next((m for m in nearer if math.isfinite(self._at(m)[0])), given)
        yield present
        for _ in range(draws):
            yield {
                n: m + _SHRUNK * self.unit[n].clamp(max=2.0) * torch.randn_like(m)
                for n, m in present.items()
            }

    def climbed(self, start: dict[str, Tensor], steps: int) -> dict[str, GaussianBelief]:
        """Narrow beliefs around where a climb from these means ends."""
        found = start
        if not self._at(start)[0] > -ABSURD * self.cells:
            found = self._highest(start, steps, compressed=True)
        found = self._highest(found, steps, compressed=False)
        return {n: GaussianBelief(m, self.precision[n]) for n, m in found.items()}

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
