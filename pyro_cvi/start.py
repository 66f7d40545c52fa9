"""Where mixtures start: components at single data points that lie apart, and not at random mixtures.

Random responsibilities put every component near the mean of all data, from which coordinate ascent
takes long, or never gets. Instead a few elements are picked, one for each component; the component's
posterior given that element alone is one exact step, and the next elements are drawn in proportion to
how badly the components so far predict them:

    P(n) ~ max_m s_m - s_n,        s_n = max_k E_q[log p(x_n | z_n = k)],

which for Gaussian components is the D^2 rule of k-means++, in the model's own likelihood.

References: D. Arthur, S. Vassilvitskii (2007), k-means++; B. Bahmani et al. (2012), arXiv 1203.6402,
for drawing several at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.families import DIRICHLET
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, Plan

__all__ = ["seeded_blocks", "start"]

_ROUNDS = 6
"""Passes over the data in which the elements are drawn."""

BlockStep = Callable[[Evaluator, Block], None]


def seeded_blocks(plan: Plan, located: Collection[str] = ()) -> list[Block]:
    """Discrete blocks of more elements than states that pick among components.

    Not those whose states, or whose components, start where the user said (`located`). Blocks that
    meet Dirichlet sites only (topics of single words) start at random: one element says next to
    nothing about its component.
    """
    found = []
    for block in plan.blocks:
        latent = plan.latents[block.sites[0]]
        if latent.support is None or plan.sampled_sites() & set(block.sites):
            continue
        states = len(latent.support)
        near = _components(plan, block)
        if any(s in located for b in (block, *near) for s in b.sites):
            continue
        if states > 1 and block.size >= 4 * states and any(b.family is not DIRICHLET for b in near):
            found.append(block)
    return found


def _components(plan: Plan, block: Block) -> list[Block]:
    """The continuous blocks that share a factor with a discrete one, but not those in its plates."""
    names = {b for f in plan.factors_of(block.name) for b in f.blocks}
    around = _plates(plan, block)
    return [
        b
        for b in plan.blocks
        if b.name in names and not b.is_discrete and not (around and around <= _plates(plan, b))
    ]


def _plates(plan: Plan, block: Block) -> set[str]:
    """The plates around all of a block's sites."""
    return set.intersection(*({n for n, *_ in plan.latents[s].plates} for s in block.sites))


def start(evaluator: Evaluator, step: BlockStep, located: Collection[str] = ()) -> None:
    """Try the seeded start of every discrete block that has one; keep it where the bound is better.

    Where the user placed the components, and not the states, these look at the components first.
    """
    plan = evaluator.plan
    for block in plan.blocks:
        if not block.is_discrete:
            continue
        near = _components(plan, block)
        if any(
            s in located for s in block.sites
        ):  # the components twice: each sees all others moved
            for b in (*near, *near):
                if b.size and not any(s in located for s in b.sites):
                    step(evaluator, b)
        elif any(s in located for b in near for s in b.sites):
            step(evaluator, block)
    blocks = seeded_blocks(plan, located)
    if not blocks:
        return
    kept = dict(evaluator.beliefs)
    try:
        for block in blocks:
            _seed(evaluator, block, step)
        seeded = _after_one_sweep(evaluator, blocks, step)
    except CVIError:  # a component that one element does not determine
        seeded = -math.inf
    beliefs = dict(evaluator.beliefs)
    for name, belief in kept.items():
        evaluator.set(name, belief)
    if seeded > -math.inf and _after_one_sweep(evaluator, blocks, step) < seeded:
        for name, belief in beliefs.items():
            evaluator.set(name, belief)


def _after_one_sweep(evaluator: Evaluator, blocks: Sequence[Block], step: BlockStep) -> float:
    plan = evaluator.plan
    near = {b.name for z in blocks for b in _components(plan, z)}
    for b in plan.blocks:
        if b.name in near:
            step(evaluator, b)
    for b in blocks:
        step(evaluator, b)
    return evaluator.elbo()


def _seed(evaluator: Evaluator, block: Block, step: BlockStep) -> None:
    """Responsibilities of `block` from components that have seen one element each."""
    plan = evaluator.plan
    support = plan.latents[block.sites[0]].support
    assert support is not None
    states = len(support)
    p = torch.zeros_like(evaluator.leaves[block.name][0])
    elements = p.shape[:-1].numel()
    flat = p.view(elements, states)
    order = torch.randperm(states, device=p.device)
    picked = 0
    likely: Tensor | None = None
    while picked < states:
        count = 1 if likely is None else -(-(states - picked) // max(1, _ROUNDS - 1))
        if likely is None:
            rows = torch.randint(elements, (1,), device=p.device)
        else:
            rows = _draw(likely, min(count, states - picked))
        for row in rows.tolist():
            flat[row] = 0.0
            flat[row, order[picked]] = 1 / block.scale
            picked += 1
        others = [torch.zeros_like(t) for t in evaluator.leaves[block.name][1:]]
        evaluator.hold(block.name, (p.clone(), *others))
        for b in _components(plan, block):
            step(evaluator, b)
        table = evaluator.message(block)[0]
        if table is None:
            break
        scores = table.detach().reshape(elements, states)[:, order[:picked]].amax(-1)
        likely = (scores.max() - scores).clamp(min=0)
    evaluator.set(block.name, evaluator.beliefs[block.name])
    step(evaluator, block)


def _draw(weights: Tensor, count: int) -> Tensor:
    """`count` different elements in proportion to their weights, by the Gumbel trick."""
    noise = -torch.empty_like(weights).exponential_().log()
    keys = torch.where(weights > 0, weights.log() + noise, -torch.inf)
    if not bool((weights > 0).any()):
        keys = noise
    return keys.topk(count).indices
