"""Where sampled positive sites start: at the mode of their logarithm, given the other sites.

A natural-gradient step is Newton's in kind. Far from the optimum, where a density is convex in some
directions, its targets lie outside of the domain and its draws are all noise. So the sites of sampled
factors first climb, as points and without draws, the log joint density of u = log x,

    sum_a log p_a(e^u)  +  <message of the other factors, T(e^u)>  +  u,

which has a mode where that of x itself would be at zero (a Gamma prior of shape below one). The beliefs
then begin around it, narrow; what they are to become is for the steps to find.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_cvi.families import GAMMA, INVERSE_GAMMA
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import around
from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.sampling import Sampler
from pyro_cvi.linalg import or_zeros
from pyro_cvi.updates import FamilyBelief

__all__ = ["climb"]

_STEPS = 300
_RATE = 0.05
"""Of Adam in log x: a step changes a value by at most about 5 %."""
_PATIENCE = 20
_SETTLED = 1e-4
"""Relative gain in so many steps below which the climb ends."""


def climb(evaluator: Evaluator, sampler: Sampler, blocks: list[Block]) -> None:
    """Move the Gamma and inverse Gamma blocks among `blocks` to narrow beliefs at the mode."""
    blocks = [
        b
        for b in blocks
        if b.family in (GAMMA, INVERSE_GAMMA) and not sampler.by_score & set(b.sites)
    ]
    if not blocks:
        return
    logs = {b.name: _middle(evaluator, b).log().requires_grad_() for b in blocks}
    optimiser = torch.optim.Adam(logs.values(), lr=_RATE, betas=(0.9, 0.99))
    best, found = -torch.inf, {n: u.detach().clone() for n, u in logs.items()}
    history: list[float] = []
    for i in range(_STEPS):
        value = _log_joint(evaluator, sampler, blocks, logs)
        now = float(value.detach())
        if now > best:
            best, found = now, {n: u.detach().clone() for n, u in logs.items()}
        history.append(now)
        settled = _SETTLED * (abs(best) + 1)
        if i >= _PATIENCE and best - max(history[:-_PATIENCE]) < settled:
            break
        grads = torch.autograd.grad(-value, list(logs.values()), allow_unused=True)
        for u, g in zip(logs.values(), grads, strict=True):
            u.grad = or_zeros(g, u).nan_to_num(0.0)
        optimiser.step()
    for b in blocks:
        latent = evaluator.plan.latents[b.sites[0]]
        natural = around(latent, found[b.name].exp().reshape(latent.shape))
        assert natural is not None
        evaluator.set(b.name, FamilyBelief(b.family, natural))


def _middle(evaluator: Evaluator, block: Block) -> Tensor:
    """A point of a belief: its mean, where there is one."""
    belief = evaluator.beliefs[block.name]
    assert isinstance(belief, FamilyBelief)
    d = belief.family.to_distribution(belief.natural)
    mean: Tensor = d.mean
    return torch.where(mean.isfinite() & (mean > 0), mean, torch.ones_like(mean)).detach()


def _log_joint(
    evaluator: Evaluator, sampler: Sampler, blocks: list[Block], logs: dict[str, Tensor]
) -> Tensor:
    points = {n: u.exp() for n, u in logs.items()}
    total = sampler.at_points(evaluator, points)
    for b in blocks:
        message = tuple(
            or_zeros(g, n)
            for g, n in zip(evaluator.message(b), evaluator.beliefs[b.name].tensors, strict=True)
        )
        statistics = b.family.sufficient_statistics(points[b.name])
        total = total + b.family.inner(message, statistics).sum() + logs[b.name].sum()
    return total
