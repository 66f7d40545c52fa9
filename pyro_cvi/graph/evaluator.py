"""The ELBO of a plan at given beliefs, with every block's message from one autograd graph.

    ELBO = sum_factors E_q[log p] + sum_blocks H[q],    message of a block = d E_q[log p] / d mean.

Each factor is evaluated once per state of its blocks; the graph of that evaluation then gives the
messages to all of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_cvi.distributed import Shards
from pyro_cvi.estimators import Function, Moments
from pyro_cvi.estimators.statistics import Summed
from pyro_cvi.graph.plan import Block, CompiledFactor, Plan
from pyro_cvi.graph.process import Process
from pyro_cvi.linalg import broadcast_shapes, matvec, or_zeros, sum_gradients
from pyro_cvi.structured import ProcessBelief, StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief

__all__ = ["Evaluator", "Slope", "is_own", "moments_of"]

Leaves = dict[str, tuple[Tensor, ...]]


def moments_of(plan: Plan, leaves: Leaves, beliefs: Mapping[str, Belief]) -> tuple[Moments, Leaves]:
    """Moments of all sites, and the probabilities of the discrete blocks, from the blocks' leaves.

    The leaves are those of `beliefs`, or near them.
    """
    gaussian: dict[str, tuple[Tensor, Tensor]] = {}
    other, natural = {}, {}
    probabilities: Leaves = {}
    for block in plan.blocks:
        values = leaves[block.name]
        if block.form is not None:
            pairs = zip(values[::2], values[1::2], strict=True)
            gaussian |= dict(zip(block.form.parts, pairs, strict=True))
        elif block.layout is not None:
            gaussian[block.name] = (values[0], values[1])
        elif block.is_discrete:
            probabilities[block.name] = values
        else:
            other[block.sites[0]] = values
            belief = beliefs[block.name]
            assert isinstance(belief, FamilyBelief)
            natural[block.sites[0]] = belief.natural
    return Moments(gaussian, other, natural), probabilities


def is_own(plan: Plan, shards: Shards, block: Block) -> bool:
    """Whether a block is of elements that this process has and no other."""
    return all(shards.hold(frozenset(n for n, *_ in plan.latents[s].plates)) for s in block.sites)


class Cached(NamedTuple):
    """The value of a factor, the state of its blocks, and the moments that it was computed from."""

    version: tuple[int, ...]
    value: Tensor
    moments: Moments


class Slope(NamedTuple):
    """Mean and variance of a predictor, with their graph, and the derivatives of a factor in them."""

    mean: Tensor
    variance: Tensor
    by_mean: Tensor
    by_variance: Tensor


class Kept(NamedTuple):
    """What `Evaluator.restore` needs."""

    belief: Belief
    leaves: tuple[Tensor, ...]
    version: int
    cache: dict[str, Cached]


class Evaluator:
    """Factor values at the current beliefs, cached per state of their blocks.

    At a `temperature` T above one, steps maximise E_q[log p] + T H[q]: an annealed fit.
    """

    def __init__(
        self, plan: Plan, beliefs: Mapping[str, Belief], shards: Shards | None = None
    ) -> None:
        self.plan, self.shards = plan, shards or Shards()
        self.temperature = 1.0
        self.beliefs = dict(beliefs)
        self.leaves: Leaves = {n: b.leaves() for n, b in self.beliefs.items()}
        self._version = dict.fromkeys(self.beliefs, 0)
        self._cache: dict[str, Cached] = {}
        self._bare: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._count = 0
        self._moments: tuple[Moments, Leaves] | None = None
        self._plain: tuple[Moments, Leaves] | None = None
        self._statistics: dict[str, tuple[tuple[int, ...], Summed]] = {}
        self._blocks = {f.name: tuple(sorted(f.blocks)) for f in plan.factors}
        self._factors = {
            b.name: [f for f in plan.factors_of(b.name) if not f.sampled] for b in plan.blocks
        }

    @property
    def parts(self) -> list[Evaluator]:
        """The evaluators of single draws of other guides: this one, or several (see `particles`)."""
        return [self]

    def with_weights(self, plate: str, dim: int, weights: Tensor) -> Evaluator:
        """Another evaluator, for which the elements of a plate count by these weights, (elements,)."""
        like = next(iter(self.beliefs.values())).tensors[0]
        w = weights.to(like.device).reshape(-1, *[1] * (-dim - 1))
        factors = tuple(
            replace(f, weight=f.weight * w) if plate in f.plates else f for f in self.plan.factors
        )
        other = Evaluator(replace(self.plan, factors=factors), self.beliefs, self.shards)
        other.temperature = self.temperature
        return other

    def set(self, block: str, belief: Belief) -> None:
        """Change one block; the factors that touch it become stale."""
        self.beliefs[block] = belief
        self._renew(block, belief.leaves())

    def hold(self, block: str, leaves: tuple[Tensor, ...]) -> None:
        """Give a discrete block weights that need not be probabilities, until its belief is set."""
        self._renew(block, tuple(x.requires_grad_() for x in leaves))

    def _renew(self, block: str, leaves: tuple[Tensor, ...]) -> None:
        self._count += 1
        self.leaves[block] = leaves
        self._version[block] = self._count
        self._moments = self._plain = None

    def _now(self) -> tuple[Moments, Leaves]:
        """Moments and probabilities at the present leaves, with their graph."""
        if self._moments is None:
            self._moments = moments_of(self.plan, self.leaves, self.beliefs)
        return self._moments

    @property
    def moments(self) -> tuple[Moments, Leaves]:
        """Moments of the sites and probabilities of the discrete blocks, with their graph."""
        return self._now()

    def factor(self, f: CompiledFactor) -> Tensor:
        """E_q[log p] of a factor, with the graph to the leaves of its continuous blocks.

        (And to those of its discrete blocks where the factor has learnt constants.)
        """
        return self._at(f).value

    def _at(self, f: CompiledFactor) -> Cached:
        key = self._key(f)
        cached = self._cache.get(f.name)
        if cached is None or cached.version != key:
            with torch.enable_grad():
                moments, probabilities = self._now()
                if self.plan.learns or f.is_whole:
                    value = f(moments, probabilities)
                else:
                    value = self._statistics_of(f)(moments)
                cached = Cached(key, value, moments)
            self._cache[f.name] = cached
        return cached

    def slopes(self, f: CompiledFactor, functions: Sequence[Function]) -> list[Slope]:
        """The predictors of some functions of a factor, and how its value changes with them."""
        known = self._at(f)
        flat = [t for x in functions for t in known.moments.predictor(x.predictor, x.cells)]
        wanted = [t for t in flat if t.requires_grad]
        found = iter(torch.autograd.grad(known.value, wanted, retain_graph=True, allow_unused=True))
        grads = [or_zeros(next(found) if t.requires_grad else None, t) for t in flat]
        quadruples = zip(flat[::2], flat[1::2], grads[::2], grads[1::2], strict=True)
        return [
            Slope(*(t.reshape(x.shape) for t in four))
            for x, four in zip(functions, quadruples, strict=True)
        ]

    def at_a_probe(self, block: Block, functions: Sequence[Function]) -> list[Tensor]:
        """The predictors of some functions where the block's mean is a probe; constants left out."""
        gaussian = {
            n: (torch.zeros_like(m), v) for n, (m, v) in self._without_graph()[0].gaussian.items()
        }
        loc, cov = gaussian[block.name]
        probe = torch.arange(1, loc.numel() + 1, dtype=loc.dtype, device=loc.device).cos()
        moments = Moments({**gaussian, block.name: (probe.reshape(loc.shape), cov)}, {})
        with torch.no_grad():
            means = [x.predictor.mean(moments, without_constant=True) for x in functions]
        return [m.expand(x.cells).reshape(x.shape) for m, x in zip(means, functions, strict=True)]

    def _key(self, f: CompiledFactor) -> tuple[int, ...]:
        """The state of a factor's blocks."""
        version = self._version
        return tuple([version[b] for b in self._blocks[f.name]])

    def _statistics_of(self, f: CompiledFactor) -> Summed:
        """The factor with the present probabilities of its discrete sites summed over."""
        key = tuple(self._version[w.block] for w in f.weightings)
        known = self._statistics.get(f.name)
        if known is None or known[0] != key:
            with torch.no_grad():
                weight = f.weight_with(f.weightings, self.leaves)
                own = tuple(weight.shape) if isinstance(weight, Tensor) else ()
                shape = broadcast_shapes(f.expectation.shape, own)
                known = (key, f.expectation.summed(weight, shape))
            self._statistics[f.name] = known
        return known[1]

    def _without_graph(self) -> tuple[Moments, Leaves]:
        """Moments and probabilities at the present leaves, without their graph."""
        if self._plain is None:
            leaves = {n: tuple(x.detach() for x in ls) for n, ls in self.leaves.items()}
            self._plain = moments_of(self.plan, leaves, self.beliefs)
        return self._plain

    def _discrete_message(
        self, block: Block, factors: Sequence[CompiledFactor]
    ) -> list[Tensor | None]:
        """The expected log density of every state, from tables of E_q[log p]."""
        moments = self._without_graph()[0]
        result: list[Tensor | None] = [None] * len(self.leaves[block.name])
        for f in factors:
            if f.is_whole:
                leaves = self.leaves[block.name]
                grads = torch.autograd.grad(
                    self.factor(f), leaves, retain_graph=True, allow_unused=True
                )
                result = [sum_gradients(a, b) for a, b in zip(result, grads, strict=True)]
                continue
            with torch.no_grad():
                table = f.expectation(moments)
            for w in f.weightings:
                if w.block == block.name:
                    others = [v for v in f.weightings if v is not w]
                    found = w.adjoint(f.weighted(table, others, self.leaves), f, self.leaves)
                    old = result[w.leaf]
                    result[w.leaf] = found if old is None else old + found
        return result

    def kept(self, block: str) -> Kept:
        """A block's belief and the cached values of its factors: `set` can be undone at no cost."""
        names = [f.name for f in self.plan.factors_of(block) if f.name in self._cache]
        cache = {n: self._cache[n] for n in names}
        return Kept(self.beliefs[block], self.leaves[block], self._version[block], cache)

    def restore(self, block: str, kept: Kept) -> None:
        """Undo `set`."""
        self.beliefs[block], self.leaves[block] = kept.belief, kept.leaves
        self._version[block] = kept.version
        self._moments = self._plain = None
        self._cache.update(kept.cache)

    def local(self, block: Block) -> Tensor:
        """The part of the ELBO that changes with one block."""
        return self.local_parts(block).sum()

    def local_parts(self, block: Block) -> Tensor:
        """The summands of `local`: the block's entropy and its factors."""
        entropy = self.beliefs[block.name].entropy() * self.weight_of(block)
        values = [self.factor(f).detach() for f in self._factors[block.name]]
        return self._stacked(block, entropy, values)

    def _stacked(self, block: Block, first: Tensor, values: Sequence[Tensor]) -> Tensor:
        """A number and those of the block's factors, summed over processes where these are spread."""
        dtype = first.dtype
        for v in values:
            if v.dtype is not dtype:
                dtype = torch.promote_types(dtype, v.dtype)
        result = torch.stack([v.to(dtype).reshape(()) for v in (first, *values)])
        if self.shards.plates and not self.is_own(block):
            spread = [self.shards.hold(f.plates) for f in self._factors[block.name]]
            at = torch.tensor([False, *spread], device=result.device)
            if bool(at.any()):
                result[at] = self.shards.total(result[at])
        return result

    def is_own(self, block: Block) -> bool:
        """Whether a block is of elements that this process has and no other."""
        return is_own(self.plan, self.shards, block)

    def message(
        self, block: Block, inside: str | None = None, outside: str | None = None
    ) -> list[Tensor | None]:
        """d sum_factors E_q[log p] / d leaves of the block, without the sampled factors.

        All factors of a local block carry the scale of its plates, as its entropy does: it cancels.
        With `inside` only the factors in that plate count, with `outside` only the others. Messages of
        other processes are added where the block is theirs too.
        """
        near = self._factors[block.name]
        factors = [f for f in near if inside is None or inside in f.plates]
        factors = [f for f in factors if outside is None or outside not in f.plates]
        spread = [f for f in factors if self.shards.hold(f.plates)]
        if not spread or self.is_own(block):
            return self._message(block, factors)
        mine = self._message(block, spread)
        rest = self._message(block, [f for f in factors if f not in spread])
        leaves = self.leaves[block.name]
        sums = self.shards.sums([or_zeros(g, x) for g, x in zip(mine, leaves, strict=True)])
        return [sum_gradients(a, b) for a, b in zip(rest, sums, strict=True)]

    def _message(self, block: Block, factors: Sequence[CompiledFactor]) -> list[Tensor | None]:
        """What some of the block's factors say in this process."""
        weight = self.weight_of(block)
        if block.is_discrete and not self.plan.learns:
            table = self._discrete_message(block, factors)
            return [g if g is None or weight == 1 else g / weight for g in table]
        total: Tensor | None = None
        for f in factors:
            value = self.factor(f)
            if value.requires_grad:
                total = value if total is None else total + value
        leaves = self.leaves[block.name]
        if total is None:
            return [None] * len(leaves)
        found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        if weight == 1:
            return list(found)
        return [None if g is None else g / weight for g in found]

    def rounding(self, block: Block) -> float:
        """One unit of rounding of all terms of the block's factors, which may cancel each other."""
        moments = self._now()[0]
        sizes = []
        for f in self._factors[block.name]:
            with torch.no_grad():
                sizes.append(f.magnitude(moments, self.leaves))
        zero = self.beliefs[block.name].tensors[0].new_zeros(())
        total = float(self._stacked(block, zero, sizes).sum())
        return total * torch.finfo(self.beliefs[block.name].tensors[0].dtype).eps

    def cells(self, f: CompiledFactor) -> Tensor:
        """weight * E_q[log p] cell by cell, weighted by the probabilities of the discrete sites."""
        table = f.expectation(self._now()[0]).detach()
        value = f.weighted(table, f.weightings, self.leaves)
        return value.expand(broadcast_shapes(f.expectation.shape, value.shape))

    def expected(self, block: Block) -> Tensor:
        """sum of E_q[log p] over the block's factors that are not sampled."""
        return self.local_parts(block)[1:].sum()

    def factors(self, block: Block) -> list[CompiledFactor]:
        """The factors of a block that are not sampled."""
        return self._factors[block.name]

    def slope(self, f: CompiledFactor, block: Block, origin: Belief) -> float:
        """<message of a factor, mean - mean at `origin`>: what an affine factor changes by."""
        value = self.factor(f)
        if not value.requires_grad or block.is_discrete:
            return 0.0
        leaves = self.leaves[block.name]
        found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        return -self._linear(block, found, leaves, origin.leaves())

    def bend(
        self, block: Block, message: Sequence[Tensor | None], before: Tensor, old: Belief
    ) -> float:
        """E(now) - E(old) - <message, mean now - mean then>: zero for factors with exact messages.

        E is the sum of the block's factors, `before` its value at the belief `old` and `message` its
        gradient there, as `message` returns it.
        """
        now = self.expected_again(block, before)
        change = self._linear(block, message, old.leaves(), self.leaves[block.name])
        return float(now - before) - self.weight_of(block) * change

    def expected_again(self, block: Block, like: Tensor) -> Tensor:
        """As `expected`, without a graph where the next step sees other data."""
        values = self._values(self._factors[block.name])
        return self._stacked(block, like.new_zeros(()), values).sum()

    def _linear(
        self, block: Block, gradient: Sequence[Tensor | None], at: Sequence[Tensor],
        to: Sequence[Tensor],
    ) -> float:  # fmt: skip
        """<gradient, mean parameters of `to` less those of `at`>, for a gradient in the leaves `at`."""
        parts = [
            (torch.zeros_like(x) if g is None else g, (y - x).detach())
            for g, x, y in zip(gradient, at, to, strict=True)
        ]
        change = sum(float((g * d).sum()) for g, d in parts)
        if block.layout is not None:  # E z z^T = V + m m^T is what a message is affine in
            for (_, step), (g, _) in zip(parts[::2], parts[1::2], strict=True):
                change += float((step * matvec(g, step)).sum())
        return change

    def distance_left(self) -> float:
        """1/2 d^T F d of the full step d of all blocks that are not exact: nats, near the optimum.

        Blocks with a structure of their own, which have no metric, are left out.
        """
        total = 0.0
        for block in self.plan.blocks:
            belief = self.beliefs[block.name]
            special = block.is_discrete or isinstance(belief, StructuredBelief)
            if special or not block.moves or self.plan.is_exact(block):
                continue
            d = belief.direction(self.message(block))
            total += 0.5 * block.scale * float(belief.inner(d, d).sum())
        return total

    def weight_of(self, block: Block) -> float:
        """What the block's entropy counts for: the scale of its plates, times the temperature."""
        return block.scale * self.temperature

    def version(self, block: str) -> int:
        return self._version[block]

    def with_learnt_priors(self) -> Tensor:
        """Let processes follow the parameters of their priors, with their pseudo-observations held.

        Returns the part of the bound that their own form stands for, with its graph.
        """
        total = torch.zeros((), device="cpu")
        for block in self.plan.blocks:
            if isinstance(block.form, Process) and block.form.learnt is not None:
                belief = self.beliefs[block.name]
                assert isinstance(belief, ProcessBelief)
                with torch.enable_grad():
                    moved = belief.with_prior(*block.form.learnt)
                    self._renew(block.name, tuple(x for pair in moved.views() for x in pair))
                    total = moved.entropy() + total
        return total

    def entropy(self) -> Tensor:
        total = torch.zeros((), device="cpu")
        for b in self.plan.blocks:
            total = self.beliefs[b.name].entropy() * b.scale + total
        return total

    def rounding_of_bound(self) -> float:
        """One unit of rounding of the summands of the bound, in nats; they may cancel each other."""
        values = self._values([f for f in self.plan.factors if not f.sampled])
        parts = [v.reshape(()) for v in values] + [b.entropy() for b in self.beliefs.values()]
        units = [abs(float(x)) * torch.finfo(x.dtype).eps for x in parts]
        return self.shards.number(sum(units))

    def elbo(self) -> float:
        """The ELBO without the sampled factors' part."""
        if not self.shards.plates:
            values = self._values([f for f in self.plan.factors if not f.sampled])
            entropy = self.entropy()  # some value may be a number, which is nowhere
            total = (
                torch.stack([v.reshape(()).to(entropy.device) for v in values]).sum()
                if values
                else 0.0
            )
            return float(entropy + total)
        spread, rest = self.split_expectations()
        for b in self.plan.blocks:
            entropy = self.beliefs[b.name].entropy() * b.scale
            spread, rest = (spread + entropy, rest) if self.is_own(b) else (spread, rest + entropy)
        return float(self.shards.total(spread.detach().double()) + rest.detach())

    def _values(self, factors: Sequence[CompiledFactor]) -> list[Tensor]:
        """E_q[log p] of some factors; without a graph where the next step sees other data anyway."""
        if not self.plan.stochastic or self.plan.learns:
            return [self.factor(f).detach() for f in factors]
        return [self._value(f) for f in factors]

    def _value(self, f: CompiledFactor) -> Tensor:
        """E_q[log p] of a factor, without a graph unless there is one."""
        key = self._key(f)
        for known in (self._cache.get(f.name), self._bare.get(f.name)):
            if known is not None and known[0] == key:
                return known[1].detach()
        with torch.no_grad():
            value = f(*self._without_graph())
        self._bare[f.name] = (key, value)
        return value

    def split_expectations(self) -> tuple[Tensor, Tensor]:
        """Sums of E_q[log p] with their graphs: of factors that are spread, and of the others."""
        parts = [torch.zeros((), device="cpu"), torch.zeros((), device="cpu")]
        for f in self.plan.factors:
            if not f.sampled:
                i = 0 if self.shards.hold(f.plates) else 1
                parts[i] = self.factor(f).reshape(()) + parts[i]
        return parts[0], parts[1]
