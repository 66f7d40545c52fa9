"""Where sampled positive sites start: at the mode of their logarithm, given the other sites.

A natural-gradient step is Newton's in kind. Far from the optimum, where a density is convex in some
directions, its targets lie outside of the domain and its draws are all noise. So the sites of sampled
factors first climb, as points and without draws, the log joint density of u = log x,

    sum_a log p_a(e^u)  +  <message of the other factors, T(e^u)>  +  u,

which has a mode where that of x itself would be at zero (a Gamma prior of shape below one). The beliefs
then begin around it, narrow; what they are to become is for the steps to find. Of several processes the
sites that they share and those of each climb in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.distributed import Shards
from pyro_cvi.families import GAMMA, INVERSE_GAMMA
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import apart, around
from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.sampling import Sampler
from pyro_cvi.linalg import or_zeros
from pyro_cvi.updates import FamilyBelief

__all__ = ["climb"]

_ROUNDS, _STEPS = 20, 100
"""Of L-BFGS; after each round it is asked whether the climb still gains."""
_HISTORY = 20
_FAR = 15.0
"""How far log x may move: a factor of three million."""
_LOST = 10.0
"""What a point without a finite density counts for, in units of the best value's size."""
_TURNS = 5
"""Climbs of the sites that processes share, and of their own, where there are both."""
_GAIN = 0.01
"""Nats for every scalar in a round below which the climb ends."""


def climb(
    evaluator: Evaluator,
    sampler: Sampler,
    blocks: list[Block],
    *,
    rounds: int = _ROUNDS,
    steps: int = _STEPS,
) -> None:
    """Move the Gamma and inverse Gamma blocks among `blocks` to narrow beliefs at the mode."""
    blocks = [
        b
        for b in blocks
        if b.family in (GAMMA, INVERSE_GAMMA) and not sampler.by_score & set(b.sites)
    ]
    if not blocks:
        return
    first = _first(evaluator, sampler, blocks)
    logs = {n: torch.zeros_like(u) for n, u in first.items()}
    messages = {b.name: _message(evaluator, b) for b in blocks}

    def log_joint(moved: Mapping[str, Tensor]) -> Tensor:
        now = {**logs, **moved}
        points = {n: (first[n] + u.clamp(-_FAR, _FAR)).exp() for n, u in now.items()}
        total = sampler.at_points(evaluator, points)
        for b in blocks:
            statistics = b.family.sufficient_statistics(points[b.name])
            exact = b.family.inner(messages[b.name], statistics).sum() + now[b.name].sum()
            total = total + exact * sampler.share_of(b)
        return total

    shared = [n for n in logs if n not in sampler.own]
    groups = [g for g in (shared, [n for n in logs if n in sampler.own]) if g]
    for _ in range(_TURNS if len(groups) > 1 else 1):
        for names in groups:
            shards = sampler.shards if names is shared else Shards()
            start = {n: logs[n] for n in names}
            logs |= _highest(log_joint, start, shards, rounds=rounds, steps=steps)
    for b in blocks:
        latent = evaluator.plan.latents[b.sites[0]]
        point = (first[b.name] + logs[b.name].clamp(-_FAR, _FAR)).exp()
        natural = around(latent, point.reshape(latent.shape))
        assert natural is not None
        evaluator.set(b.name, FamilyBelief(b.family, natural))


def _highest(
    log_joint: Callable[[Mapping[str, Tensor]], Tensor],
    start: Mapping[str, Tensor],
    shards: Shards,
    *,
    rounds: int,
    steps: int,
) -> dict[str, Tensor]:
    """Where a function, summed over processes, is highest; by L-BFGS."""
    logs = {n: u.clone().requires_grad_() for n, u in start.items()}
    best, found = -torch.inf, dict(start)

    def closure() -> Tensor:
        nonlocal best, found
        here = log_joint(logs)
        own = torch.autograd.grad(-here, list(logs.values()), allow_unused=True)
        grads = [or_zeros(g, u) for g, u in zip(own, logs.values(), strict=True)]
        value, *grads = shards.sums([here.detach(), *grads])
        now = float(value)
        if now > best:
            best, found = now, {n: u.detach().clone() for n, u in logs.items()}
        elif not now > -torch.inf:  # too far along a line: a loss from which the search comes back
            for u in logs.values():
                u.grad = torch.zeros_like(u)
            return torch.tensor(_LOST * (abs(best) + 1), dtype=value.dtype, device=value.device)
        for u, g in zip(logs.values(), grads, strict=True):
            u.grad = g.nan_to_num(0.0, 0.0, 0.0)
        return -value

    least = _GAIN * sum(u.numel() for u in logs.values())
    optimiser = torch.optim.LBFGS(
        list(logs.values()), max_iter=steps, history_size=_HISTORY, line_search_fn="strong_wolfe"
    )
    for _ in range(rounds):
        before = best
        with suppress(RuntimeError):  # what L-BFGS says where its steps overflow
            optimiser.step(closure)
        if not best - before > least:
            break
    return found


def _first(evaluator: Evaluator, sampler: Sampler, blocks: list[Block]) -> dict[str, Tensor]:
    """log x where the climb begins: near the prior's mean given the sites before it, these at theirs.

    A prior that a run with draws has shown, with a rate of 1e-12 perhaps, is nowhere near.
    """
    plan = evaluator.plan
    names = {b.sites[0] for b in blocks}
    known: dict[str, Tensor] = {}
    for b in plan.blocks:
        belief, site = evaluator.beliefs[b.name], b.sites[0]
        if site not in names and isinstance(belief, FamilyBelief) and not b.is_discrete:
            mean = belief.family.to_distribution(belief.natural).mean
            known[site] = mean.detach().reshape(plan.latents[site].shape)

    def choose(name: str, prior: Any) -> Tensor | None:
        if name in known:
            return known[name]
        try:
            mean: Tensor = prior.mean
        except (NotImplementedError, AttributeError):
            return None
        if name in names:
            return apart(torch.where(mean.isfinite() & (mean > 0), mean, torch.ones_like(mean)))
        real = plan.latents[name].support is None
        return mean if real and bool(mean.isfinite().all()) else None

    values = sampler.call.ancestral(choose)
    found = {
        b.name: values[b.sites[0]].log().reshape(evaluator.beliefs[b.name].tensors[0].shape)
        for b in blocks
    }
    shared = [n for n in found if n not in sampler.own]
    alike = sampler.shards.from_first([found[n] for n in shared])
    return {**found, **dict(zip(shared, alike, strict=True))}


def _message(evaluator: Evaluator, block: Block) -> tuple[Tensor, ...]:
    """Of the factors that are not sampled."""
    like = evaluator.beliefs[block.name].tensors
    return tuple(or_zeros(g, n) for g, n in zip(evaluator.message(block), like, strict=True))
