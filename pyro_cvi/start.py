"""Where mixtures start: components at single data points that lie apart, then moved to where they serve.

Random responsibilities put every component near the mean of all data, from which coordinate ascent
takes long, or never gets. Instead a few elements are picked, one for each component, whose posterior
given that element alone is an optimum; the next elements are drawn in proportion to how badly the
components so far predict them:

    P(n) ~ max_m s_m - s_n,        s_n = max_k E_q[log p(x_n | z_n = k)],

which for Gaussian components is the D^2 rule of k-means++, in the model's own likelihood. Where priors
tell the components apart, states that follow from them are another start, else random states are one.
Each takes a few sweeps, and the best bound goes on: see `relocation`.

References: D. Arthur, S. Vassilvitskii (2007), k-means++; B. Bahmani et al. (2012), arXiv 1203.6402,
for drawing several at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

from pyro_cvi.errors import CVIError
from pyro_cvi.families import DIRICHLET
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.mixing import BlockStep, Mixture, Outlook, components_of, sweeps, tops
from pyro_cvi.relocation import go_to, relocate

__all__ = ["TOPICS", "has_topics", "seeded_blocks", "start"]

_ROUNDS = 4
"""Passes over the data in which the elements are drawn."""
_SWEEPS = 5
"""Of each start, before their bounds are compared."""
_FEWEST = 4
"""Elements for every state below which a block is no mixture."""
_APART = 1e-3
"""Nats by which priors let the states of elements differ where they tell components apart."""


TOPICS = (1.4, 80)
"""Temperature and steps of the annealing that topics start with. From random states alone fits of 4, 8
and 15 topics ended 60 to 120, 900 to 1,500 and 4,700 to 7,200 nats lower than from the truth, with it
-1 to 1, -80 to 140 and -200 to 1,100."""


def seeded_blocks(evaluator: Evaluator, located: Collection[str] = ()) -> list[Block]:
    """Discrete blocks of more elements than states that pick among components.

    Not those whose states, or whose components, start where the user said (`located`), nor those that
    sampled factors touch. Blocks that meet Dirichlet sites only, with weights of their own for every
    part of their elements (topics of the words of a document), start at random: one element says next
    to nothing about its component.
    """
    plan, found = evaluator.plan, []
    noisy = plan.noisy()
    for block in plan.blocks:
        latent = plan.latents[block.sites[0]]
        near = components_of(plan, block)
        if latent.support is None or any(b.name in noisy for b in (block, *near)):
            continue
        states = len(latent.support)
        if any(s in located for b in (block, *near) for s in b.sites):
            continue
        size = float(block.size)
        if evaluator.is_own(block):
            size = evaluator.shards.number(size)
        if states > 1 and size >= _FEWEST * states and not _are_topics(plan, block, near):
            found.append(block)
    return found


def has_topics(plan: Plan, located: Collection[str] = ()) -> bool:
    """Whether a block of topics starts at random: no site of it, nor of its components, is `located`."""
    for block in plan.blocks:
        near = components_of(plan, block) if block.is_discrete else []
        free = not any(s in located for b in (block, *near) for s in b.sites)
        tables = [b for b in near if not _weights(plan, block) & set(b.sites)]
        if tables and free and _are_topics(plan, block, near):
            return True
    return False


def _are_topics(plan: Plan, block: Block, near: Sequence[Block]) -> bool:
    """Whether the components are Dirichlet sites only, and elements differ in the weights of states."""
    if block.is_chain or any(b.family is not DIRICHLET for b in near):
        return False
    weights = _weights(plan, block)
    if len(near) < 2 or any(math.prod(plan.latents[s].batch_shape) > 1 for s in weights):
        return True
    tables = {b.name for b in near if not weights & set(b.sites)}
    others = {n for f in plan.factors if tables & set(f.blocks) for n in f.blocks} - {block.name}
    near_by = [b for b in plan.blocks if b.name in others and b.is_discrete]
    return any(_weights(plan, b) - weights for b in near_by)


def _weights(plan: Plan, block: Block) -> set[str]:
    """The Dirichlet sites that the prior of a discrete block is about, if no other states are."""
    prior = [f for f in plan.factors if f.name in block.sites]
    names = {b for f in prior for b in f.blocks} - {block.name}
    found = [b for b in plan.blocks if b.name in names]
    if any(b.family is not DIRICHLET for b in found):
        return set()
    return {s for b in found for s in b.sites}


def start(evaluator: Evaluator, step: BlockStep, located: Collection[str] = ()) -> None:
    """Start every mixture where its bound is best after a few sweeps.

    Where the user placed the components, and not the states, these look at the components first.
    """
    evaluator.shards.align()
    _follow(evaluator, step, located)
    mixtures = [Mixture(evaluator, b, step) for b in seeded_blocks(evaluator, located)]
    if not mixtures:
        return
    kept, best, beliefs = dict(evaluator.beliefs), -math.inf, None
    for way in _ways(mixtures):
        go_to(mixtures, kept)
        try:
            for m in mixtures:
                way(m)
            bound = _after_sweeps(mixtures, best)
        except CVIError:  # a component that one element does not determine
            continue
        if bound > best:
            best, beliefs = bound, dict(evaluator.beliefs)
    go_to(mixtures, beliefs or kept)
    if beliefs is not None:
        relocate(mixtures, best)


def _after_sweeps(mixtures: Sequence[Mixture], best: float) -> float:
    """The bound after some sweeps; fewer, if it is not going to be better than `best`."""
    outlook = Outlook(sweeps(mixtures, 1))
    for _ in range(_SWEEPS - 1):
        outlook.see(sweeps(mixtures, 1))
        if not outlook.end > best:
            break
    return outlook.bound


def _follow(evaluator: Evaluator, step: BlockStep, located: Collection[str]) -> None:
    """Let what the user did not place look at what he placed."""
    plan = evaluator.plan
    noisy = plan.noisy()
    for block in plan.blocks:
        if not block.is_discrete or block.name in noisy:
            continue
        near = [b for b in components_of(plan, block) if b.name not in noisy]
        if any(s in located for s in block.sites):
            for b in (*near, *near):  # twice: each sees all others moved
                if not any(s in located for s in b.sites):
                    step(evaluator, b)
        elif any(s in located for b in near for s in b.sites):
            step(evaluator, block)


def _ways(mixtures: Sequence[Mixture]) -> list[Callable[[Mixture], None]]:
    """Seeds; and the states that follow from the priors, or random ones where none do."""
    apart = [_are_apart(m) for m in mixtures]  # each is asked, in every process
    return [seed, Mixture.release if any(apart) else _as_it_is]


def _as_it_is(mixture: Mixture) -> None:
    """Random states, which the components look at first."""


def _are_apart(mixture: Mixture) -> bool:
    """Whether components at their priors say different things of the states of different elements."""
    table = mixture.table()
    if not bool(table.isfinite().all()):
        return mixture.shards.any(False)
    own = table - table.mean(-1, keepdim=True)
    between = mixture.most(own) + mixture.most(-own)
    return float(between.max()) > _APART


def seed(mixture: Mixture) -> None:
    """Responsibilities from components that have seen one element each."""
    states, calm = mixture.states, dict(mixture.evaluator.beliefs)
    p = torch.zeros_like(mixture.probabilities())
    order = torch.randperm(states, device="cpu").tolist()
    likely = torch.ones_like(p[:, :1])
    picked = 0
    while picked < states:
        rest = states - picked
        count = 1 if picked == 0 else min(rest, -(-(states - 1) // (_ROUNDS - 1)))
        for row in tops(mixture, likely, count).squeeze(-1).tolist():
            if row >= 0:
                p[row] = 0.0
                p[row, order[picked]] = 1.0
            picked += 1
        mixture.hold(p)
        mixture.sharpen(mixture.unit or calm)
        mixture.settle()
        scores = mixture.table()[:, order[:picked]].amax(-1, keepdim=True)
        likely = (mixture.most(scores) - scores).clamp(min=0)
    mixture.release()
    mixture.sharpen(mixture.evaluator.beliefs)
