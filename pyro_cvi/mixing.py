"""A discrete block that picks among components, and how these are tried out: weights that are held.

    W_nk  given,    components:  q_k  =  argmax  E_q[ sum_n W_nk log p(x_n | k) ]  -  KL(q_k || prior)

With W one element per component this is the component's posterior given that element alone. It is an
optimum, by as many steps as it takes: one step of a scale is nowhere near what an element says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from pyro_cvi.distributed import Shards
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.structured import StructuredBelief
from pyro_cvi.updates import Belief, GaussianBelief

__all__ = ["BlockStep", "Mixture", "Outlook", "components_of", "sweeps", "tops"]

BlockStep = Callable[[Evaluator, Block], None]
_MOST = 10
"""Rounds in which components come to their optimum."""
_INNER = 3
"""The same within a sweep."""
_LEFT = 3.0
"""What is left to gain, in gains of the last sweep."""
_NARROW = 100.0
"""Factor of precisions."""
_POOLED, _FEW = 20, 4.0
"""Rounds in which components come to all elements, and how many of these `unit` stands for."""
_SETTLED = 0.1
"""Nats by which a round moves them below which they are there."""


def components_of(plan: Plan, block: Block) -> list[Block]:
    """The continuous blocks that share a factor with a discrete one, but not those in its plates."""
    around = _plates(plan, block)
    near = _beside(plan, block)
    return [b for b in near if not (around and around <= _plates(plan, b))]


def _beside(plan: Plan, block: Block) -> list[Block]:
    """The continuous blocks that share a factor with a discrete one."""
    names = {b for f in plan.factors_of(block.name) for b in f.blocks}
    return [b for b in plan.blocks if b.name in names and not b.is_discrete and b.moves]


def _plates(plan: Plan, block: Block) -> set[str]:
    """The plates around all of a block's sites."""
    return set.intersection(*({n for n, *_ in plan.latents[s].plates} for s in block.sites))


class Mixture:
    """A discrete block with the blocks of its components, and those of single elements between them."""

    def __init__(self, evaluator: Evaluator, block: Block, step: BlockStep) -> None:
        plan = evaluator.plan
        self.evaluator, self.block, self.step = evaluator, block, step
        self.components = components_of(plan, block)
        self.inner = [b for b in _beside(plan, block) if b not in self.components]
        support = plan.latents[block.sites[0]].support
        assert support is not None
        self.states = len(support)
        self.shards = evaluator.shards if evaluator.is_own(block) else Shards()

    @property
    def shape(self) -> torch.Size:
        """Of the probabilities of states: (*batch, states)."""
        return self.evaluator.leaves[self.block.name][0].shape

    @property
    def is_exact(self) -> bool:
        """Whether a step of a component is its optimum given all else."""
        return all(self.evaluator.plan.is_exact(b) for b in self.components)

    def probabilities(self) -> Tensor:
        """Of every element and state, (elements, states)."""
        p = self.evaluator.leaves[self.block.name][0].detach() * self.block.scale
        return p.reshape(-1, self.states)

    def table(self) -> Tensor:
        """E_q log p of every element in every state, (elements, states)."""
        found = self.evaluator.message(self.block)[0]
        zero = self.evaluator.leaves[self.block.name][0]
        table = torch.zeros_like(zero) if found is None else found
        return table.detach().reshape(-1, self.states)

    def hold(self, weights: Tensor) -> None:
        """Let the elements count by these weights, (elements, states), until the block steps."""
        own = weights.reshape(self.shape) / self.block.scale
        others = []
        for leaf in self.evaluator.leaves[self.block.name][1:]:  # of a chain: pairs of neighbours
            pairs = own[..., :-1, :, None] * own[..., 1:, None, :]
            others.append(pairs.expand(leaf.shape).clone())
        self.evaluator.hold(self.block.name, (own.clone(), *others))

    def settle(self, most: int = _MOST) -> None:
        """Bring the components to their optimum given what is held."""
        for _ in range(most):
            moved = 0.0
            for b in self.components:
                old = self.evaluator.beliefs[b.name]
                self.step(self.evaluator, b)
                moved += _moved(self.evaluator, b, old)
            if not moved > _SETTLED * self.states:
                return

    def sharpen(self, beliefs: Mapping[str, Belief]) -> None:
        """Put components with quadrature at these beliefs, none wider than `unit`.

        Wide ones mislead their steps, and narrow ones do not move: a step at most halves a precision.
        """
        for b in self.components:
            if b.name in self.unit:
                self.evaluator.set(b.name, narrower(beliefs[b.name], self.unit[b.name]))

    @cached_property
    def unit(self) -> dict[str, Belief]:
        """What a few elements say of components with quadrature, where these are at all elements."""
        inexact = [b for b in self.components if not self.evaluator.plan.is_exact(b)]
        if not inexact:
            return {}
        kept = dict(self.evaluator.beliefs)
        weights = torch.full_like(self.probabilities(), 1 / self.states)
        self.hold(weights)
        self.settle(_POOLED)
        ratio = _FEW / float(self.total(weights).mean())
        found = {b.name: _wider(self.evaluator.beliefs[b.name], ratio) for b in inexact}
        for b in (*self.components, self.block):
            self.evaluator.set(b.name, kept[b.name])
        return found

    def release(self) -> None:
        """Let the block's own belief count again, after its step."""
        self.evaluator.set(self.block.name, self.evaluator.beliefs[self.block.name])
        self.step(self.evaluator, self.block)

    def cost(self) -> float:
        """KL(q || prior) of the components in nats, for one of them."""
        evaluator, names = self.evaluator, {b.name for b in self.components}
        priors = [f for f in evaluator.plan.factors if f.blocks <= names and not f.sampled]
        own = sum(float(evaluator.factor(f).detach()) for f in priors)
        own += sum(float(evaluator.beliefs[n].entropy()) for n in names)
        return max(-own / self.states, 0.0)

    def most(self, x: Tensor) -> Tensor:
        """The largest over the elements, of all processes."""
        own = x.amax(0) if len(x) else x.new_full(x.shape[1:], -math.inf)
        return self.shards.gathered(own).amax(0)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the elements, of all processes."""
        return self.shards.total(x.sum(0))


def narrower(belief: Belief, unit: Belief) -> Belief:
    """This belief, with `unit` in the place of wider elements, which have seen next to nothing."""
    if isinstance(belief, GaussianBelief) and isinstance(unit, GaussianBelief):
        sizes = [x.precision.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (belief, unit)]
        wide = (sizes[0] < sizes[1])[..., None]
        precision = torch.where(wide[..., None], unit.precision, belief.precision)
        return GaussianBelief(torch.where(wide, unit.loc, belief.loc), precision)
    return belief.narrowed(_NARROW) if isinstance(belief, StructuredBelief) else belief


def _wider(belief: Belief, ratio: float) -> Belief:
    """The belief with this share of its precision, if it is one of independent Gaussians."""
    if isinstance(belief, GaussianBelief):
        return GaussianBelief(belief.loc, ratio * belief.precision)
    return belief


def _moved(evaluator: Evaluator, block: Block, old: Belief) -> float:
    """By how many nats a block has moved, in the process where it moved most."""
    new = evaluator.beliefs[block.name]
    moved = 0.0 if new is old else float(old.kl(new))
    return evaluator.shards.number(moved) if evaluator.is_own(block) else moved


class Outlook:
    """Where bounds may end: gains that shrink by a quarter each time add up to three more."""

    def __init__(self, bound: float) -> None:
        self.bound, self.gain = bound, math.inf

    def see(self, bound: float) -> None:
        """The bound after one more sweep."""
        self.gain, self.bound = bound - self.bound, bound

    @property
    def end(self) -> float:
        """The last bound and what is left to gain."""
        return self.bound + _LEFT * max(self.gain, 0.0)


def sweeps(mixtures: Sequence[Mixture], count: int) -> float:
    """Move everything that the mixtures are made of so many times; the bound after it.

    Components with quadrature come near their optimum each time: else the states settle before them.
    """
    evaluator, step = mixtures[0].evaluator, mixtures[0].step
    for _ in range(count):
        for m in mixtures:
            m.settle(1 if m.is_exact else _INNER)
            for b in m.inner:
                step(evaluator, b)
        for m in mixtures:
            step(evaluator, m.block)
    return evaluator.elbo()


def tops(mixture: Mixture, weights: Tensor, count: int) -> Tensor:
    """`count` different elements for each column, in proportion to its weights, (count, columns).

    By the Gumbel trick. Elements of other processes are -1.
    """
    shards = mixture.shards
    with shards.own_randomness():
        noise = -torch.empty_like(weights).exponential_().log()
    found = mixture.most((weights > 0).to(weights.dtype)) > 0
    keys = torch.where(weights > 0, weights.log() + noise, -torch.inf)
    keys = torch.where(found, keys, noise)
    values, rows = keys.topk(min(count, len(keys)), 0)
    missing = count - len(values)
    values = torch.nn.functional.pad(values, (0, 0, 0, missing), value=-math.inf)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, missing), value=-1)
    best = shards.gathered(values).reshape(-1, weights.shape[1]).topk(count, 0).indices
    mine = best // count == shards.rank
    return torch.where(mine, rows.gather(0, best % count), -1)
