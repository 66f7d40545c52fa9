"""Messages of factors that must be sampled: draw those sites, average everything else exactly.

The sites a factor cannot average are drawn from q and given to the model as plain tensors; what is left
of the factor is an expression of the other sites, averaged exactly given the draw. Gaussian blocks use
Stein's lemma, E[grad f] and 1/2 E[precision (z - loc) grad f^T]; other families differentiate their
implicit reparameterisation and solve with the Fisher matrix. Both estimate only the residual
log p - <m, T> against the block's last message m (a control variate), whose mean-gradient is known:

    m_new = m + F^-1 d/dnatural E[log p - <m, T>],

which is unbiased for every m, and the noise falls as q converges.

A site whose value left torch (`.item()`, a branch) has no pathwise gradient; the score function with a
leave-one-out baseline serves it.

Where factors are spread over processes, all draw the sites that they share alike, and the gradients of
every draw are summed before anything is made of them; each counts its part of the other factors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.algebra.reason import Cause
from pyro_cvi.distributed import Shards
from pyro_cvi.families import Natural
from pyro_cvi.graph.draws import Base, bases, transformed
from pyro_cvi.graph.evaluator import Evaluator, is_own, moments_of
from pyro_cvi.graph.plan import Block, Plan, compile_factors
from pyro_cvi.graph.symbolic import Call
from pyro_cvi.linalg import matvec, or_zeros, symmetrise
from pyro_cvi.structured import StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["Estimate", "Sampler", "Sampling", "draw", "noise_by_site", "scatter"]


_FULL_ROUND = 64
"""Blocks up to this width get an antithetic pair for every direction, ..."""
_FULL_HALVES = 32
"""... and those up to this one in each half of the draws: halves are to be independent."""


_PARAMETERS = "parameters of the model"


Messages = dict[str, list[Tensor | None]]
"""Per block, gradients in its leaves."""


@dataclass(frozen=True)
class Sampling:
    """How factors are sampled that neither algebra nor quadrature can average.

    Attributes:
        num_samples: draws a step, rounded up to an even number of at least 4 (or 2, where sites are to
            have a diagonal posterior). A Gaussian block gets four for each of its scalars up to 32 of
            them, and two up to 64.
        antithetic: draws come in pairs that mirror each other (not those of Wishart blocks).
        fisher: "analytic", or "sampled": the matrix d mean / d natural of a Gamma, inverse Gamma, Beta
            or Dirichlet block is then estimated from the draws of the gradient (the paper's way).
    """

    num_samples: int = 16
    antithetic: bool = True
    fisher: str = "analytic"


@dataclass
class Estimate:
    """The sampled factors' part of the ELBO, and their messages.

    `parts` are the messages that each of several groups of draws gives alone.
    """

    value: float
    messages: Messages = field(default_factory=dict)
    parts: list[Messages] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The standard error of `value`, as if draws were independent."""
        values = torch.tensor(self.values, dtype=torch.float64, device="cpu")
        return float(values.std()) / len(values) ** 0.5


@dataclass(frozen=True, eq=False)
class Draw:
    """One draw of a block: what gradients are taken in, and the values of its sites."""

    leaf: Tensor | tuple[Tensor, ...]
    values: dict[str, Tensor]
    raw: Tensor
    statistics: tuple[Tensor, ...] = ()
    jacobian: Jacobian | None = None


Jacobian = list[list[Tensor]]
"""d T_i / d natural_j of one draw, summed over the entries of T_i: row i of the Fisher matrix."""


class Sampler:
    """Draws and gradients for the sampled factors of a plan.

    Blocks of `own` are this process's alone, by `shards`.
    """

    def __init__(
        self, plan: Plan, call: Call, options: Sampling, shards: Shards | None = None
    ) -> None:
        self.plan, self.call, self.options = plan, call, options
        self.shards = shards or Shards()
        self.own = frozenset(b.name for b in plan.blocks if is_own(plan, self.shards, b))
        self._share = 1 / self.shards.count  # of factors that all processes have
        least = 2 if plan.drawn else 4  # two halves of pairs, where steps are judged by them
        self.count = max(least, options.num_samples + options.num_samples % 2)
        self.names = frozenset(f.name for f in plan.factors if f.sampled)
        sites = plan.sampled_sites()
        self.blocks = [b for b in plan.blocks if sites & set(b.sites)]
        width = max((b.layout.width for b in self.blocks if b.layout is not None), default=0)
        if 1 < width <= _FULL_ROUND:
            self.count = max(self.count, 4 * width if width <= _FULL_HALVES else 2 * width)
        self.by_score = {
            s
            for f in plan.factors
            for s, h in f.how.items()
            if h.kind == "sampled" and h.cause is Cause.NO_GRADIENT
        }

    def share_of(self, block: Block) -> float:
        """What this process counts of the parts of a sum that are a block's own."""
        return 1.0 if block.name in self.own else self._share

    def estimate(
        self,
        evaluator: Evaluator,
        control: Mapping[str, tuple[Tensor, ...]],
        gradient: bool = True,
        seed: int | None = None,
        parameters: Sequence[Tensor] = (),
        groups: int = 1,
        only: Collection[str] | None = None,
        local: Collection[int] = (),
    ) -> Estimate:
        """Average over draws; with `groups`, the averages over so many parts of them as well.

        Messages are those to the blocks of `only`, or to all. Of the `parameters`, those of these
        indices are of this process's own elements.

        With a `seed` the draws are common random numbers: two estimates at different beliefs then
        differ by the beliefs alone. The seed does not disturb Pyro's own random state.
        """
        if seed is None and self.shards.plates:
            seed = self.shards.seed(int(torch.randint(2**31, (), device="cpu")))
        if seed is None:
            return self._estimate(evaluator, control, gradient, parameters, groups, only, local)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self._estimate(evaluator, control, gradient, parameters, groups, only, local)

    def _estimate(
        self,
        evaluator: Evaluator,
        control: Mapping[str, tuple[Tensor, ...]],
        gradient: bool,
        parameters: Sequence[Tensor],
        groups: int,
        only: Collection[str] | None,
        local: Collection[int],
    ) -> Estimate:
        draws: list[dict[str, Draw]] = []
        values: list[float] = []
        grads: list[dict[str, Any]] = []
        with torch.enable_grad():
            for current in self._draws(evaluator, max(groups, 1)):
                value, g = self._one(evaluator, current, gradient, parameters, control, only)
                draws.append(current)
                values.append(value)
                grads.append(g)
        here = values
        if self.shards.plates and (only is None or not self.own.issuperset(only)):
            values = self.shards.numbers(values)
            if gradient:
                grads = self._summed(evaluator, draws, grads, parameters, only, local)
        result = Estimate(sum(values) / self.count, values=values)
        for i, p in enumerate(parameters):
            parts = [g[_PARAMETERS][i] for g in grads if g.get(_PARAMETERS)]
            mean = _average(tuple(parts), self.count)
            result.parameters.append(torch.zeros_like(p) if mean is None else mean)
        if gradient:
            whole = slice(self.count)
            result.messages = self._messages(
                evaluator, control, draws, values, here, grads, only, whole
            )
            for i in range(groups if groups > 1 else 0):
                part = slice(i * self.count // groups, (i + 1) * self.count // groups)
                result.parts.append(
                    self._messages(evaluator, control, draws, values, here, grads, only, part)
                )
        return result

    def _summed(
        self,
        evaluator: Evaluator,
        draws: list[dict[str, Draw]],
        grads: list[dict[str, Any]],
        parameters: Sequence[Tensor],
        only: Collection[str] | None,
        local: Collection[int],
    ) -> list[dict[str, Any]]:
        """The gradients of each draw over all processes; those in what is this one's alone stay."""
        leaves = {
            b.name: _leaves(evaluator, draws[0], b)
            for b in self.plan.blocks
            if b.name not in self.own and (only is None or b.name in only)
        }
        leaves[_PARAMETERS] = tuple(parameters)
        names = [(n, i) for n, parts in leaves.items() for i in range(len(parts))]
        names = [(n, i) for n, i in names if n != _PARAMETERS or i not in local]
        sums = self.shards.sums(
            [
                torch.stack([or_zeros(g[n][i] if n in g else None, leaves[n][i]) for g in grads])
                for n, i in names
            ]
        )
        result: list[dict[str, Any]] = [
            {n: list(g.get(n, [None] * len(parts))) for n, parts in leaves.items()}
            | {n: g[n] for n in g if n in self.own}
            for g in grads
        ]
        for (n, i), x in zip(names, sums, strict=True):
            for found, own in zip(result, x.unbind(0), strict=True):
                found[n][i] = own
        return result

    def _messages(
        self,
        evaluator: Evaluator,
        control: Mapping[str, tuple[Tensor, ...]],
        draws: list[dict[str, Draw]],
        values: list[float],
        here: list[float],
        grads: list[dict[str, Any]],
        only: Collection[str] | None,
        part: slice,
    ) -> Messages:
        """From a part of the draws; of the values of all processes, or those `here`, as they matter."""
        result: Messages = {}
        for b in self.plan.blocks:
            if only is not None and b.name not in only:
                continue
            held, seen = control.get(b.name), here if b.name in self.own else values
            found = self._combine(
                b, evaluator.beliefs[b.name], draws[part], seen[part], grads[part], held
            )
            result[b.name] = [None if g is None else g / b.scale for g in found]
        return result

    def _draws(self, evaluator: Evaluator, groups: int) -> Iterator[dict[str, Draw]]:
        """Draws of all blocks: first, and alike, of those that the processes share."""
        if not self.shards.plates:
            yield from self._drawn(evaluator, self.blocks, groups)
            return
        shared = [b for b in self.blocks if b.name not in self.own]
        alike = list(self._drawn(evaluator, shared, groups))
        with self.shards.own_randomness():
            others = [b for b in self.blocks if b.name in self.own]
            own = list(self._drawn(evaluator, others, groups))
        yield from ({**a, **b} for a, b in zip(alike, own, strict=True))

    def _drawn(
        self, evaluator: Evaluator, blocks: Sequence[Block], groups: int
    ) -> Iterator[dict[str, Draw]]:
        noise = self._noise(evaluator, blocks, groups)
        for i in range(self.count):
            yield {
                b.name: self._draw(b, evaluator.beliefs[b.name], noise[b.name][i]) for b in blocks
            }

    def _noise(
        self, evaluator: Evaluator, blocks: Sequence[Block], groups: int
    ) -> dict[str, Sequence[Tensor | Base | None]]:
        noise: dict[str, Sequence[Tensor | Base | None]] = {}
        paired = self.options.antithetic
        for b in blocks:
            belief = evaluator.beliefs[b.name]
            if isinstance(belief, GaussianBelief):
                both: list[Tensor] = []
                for i in range(groups):  # directions are orthogonal within a group, not across
                    n = (i + 1) * self.count // groups - i * self.count // groups
                    if paired:
                        half = _orthogonal(-(-n // 2), belief.loc)
                        both += torch.stack([half, -half], 1).reshape(-1, *belief.loc.shape)[:n]
                    else:
                        both += _orthogonal(n, belief.loc)
                noise[b.name] = both
            else:
                assert isinstance(belief, FamilyBelief)
                found = bases(belief.family, belief.natural, self.count, paired)
                noise[b.name] = [None] * self.count if found is None else found
        return noise

    def _draw(self, block: Block, belief: Belief, base: Tensor | Base | None) -> Draw:
        if isinstance(belief, GaussianBelief):
            assert isinstance(base, Tensor) and block.layout is not None
            z = belief.loc + matvec(belief.scale_tril, base)
            # A site that is read as a number has no gradient to give, and may go through numpy.
            leaf = z.detach().requires_grad_(not self.by_score & set(block.sites))
            values = {
                s: v.to(self.plan.latents[s].value.dtype) for s, v in scatter(block, leaf).items()
            }
            return Draw(leaf, values, leaf.detach())
        assert isinstance(belief, FamilyBelief) and not isinstance(base, Tensor)
        natural = tuple(n.detach().requires_grad_() for n in belief.natural)
        shape = self.plan.latents[block.sites[0]].shape
        if self.by_score & set(block.sites):
            value: Tensor = belief.family.to_distribution(natural).sample()
            return Draw(value, {block.sites[0]: value.reshape(shape)}, value)
        if base is None:
            value = belief.family.to_distribution(natural).rsample()
            statistics = belief.family.sufficient_statistics(value)
        else:
            value, statistics = transformed(belief.family, natural, base)
        jacobian = None
        if self.options.fisher == "sampled":
            jacobian = _jacobian(belief, natural, statistics)
        values = {block.sites[0]: value.reshape(shape)}
        return Draw(natural, values, value, statistics, jacobian)

    def _one(
        self,
        evaluator: Evaluator,
        draws: Mapping[str, Draw],
        gradient: bool,
        parameters: Sequence[Tensor],
        control: Mapping[str, tuple[Tensor, ...]],
        only: Collection[str] | None,
    ) -> tuple[float, dict[str, Any]]:
        total = self._value(evaluator, draws)
        if not gradient or not total.requires_grad:
            return float(total.detach()), {}
        inputs: list[Tensor] = []
        owners: list[str] = []
        for b in self.plan.blocks:
            if only is not None and b.name not in only:
                continue
            parts = _leaves(evaluator, draws, b)
            inputs += parts
            owners += [b.name] * len(parts)
        inputs += parameters
        owners += [_PARAMETERS] * len(parameters)
        wanted = [i for i, x in enumerate(inputs) if x.requires_grad]
        found: list[Tensor | None] = [None] * len(inputs)
        residual = total
        for b in self.blocks:
            if b.name in control and self._is_pathwise(b) and (only is None or b.name in only):
                known = b.family.inner(control[b.name], draws[b.name].statistics).sum()
                residual = residual - (known if self._share == 1 else self.share_of(b) * known)
        some = torch.autograd.grad(residual, [inputs[i] for i in wanted], allow_unused=True)
        for i, g in zip(wanted, some, strict=True):
            found[i] = g
        grads: dict[str, Any] = {}
        for owner, part in zip(owners, found, strict=True):
            grads.setdefault(owner, []).append(part)
        return float(total.detach()), grads

    def _value(self, evaluator: Evaluator, draws: Mapping[str, Draw]) -> Tensor:
        """The sampled factors given the draws, the other sites averaged: this process's part of them."""
        fixed = {s: v for d in draws.values() for s, v in d.values.items()}
        symbolic = self.call.symbolic(fixed, self.names)
        factors = compile_factors(
            symbolic, self.plan.blocks, self.plan.structure.fresh(), stacked=False
        )
        moments, probabilities = moments_of(self.plan, evaluator.leaves, evaluator.beliefs)
        total = torch.zeros((), device="cpu")
        for f in factors:
            value = f(moments, probabilities)
            if self._share != 1 and not self.shards.hold(f.plates):
                value = self._share * value
            total = value + total
        return total

    def at_points(self, evaluator: Evaluator, points: Mapping[str, Tensor]) -> Tensor:
        """The sampled factors with some blocks at points, the other sampled ones at their means."""
        draws = {}
        for b in self.blocks:
            belief = evaluator.beliefs[b.name]
            if isinstance(belief, GaussianBelief):
                draws[b.name] = Draw(belief.loc, scatter(b, belief.loc), belief.loc)
            else:
                assert isinstance(belief, FamilyBelief)
                x = points.get(b.name)
                if x is None:
                    x = belief.family.to_distribution(belief.natural).mean
                shape = self.plan.latents[b.sites[0]].shape
                draws[b.name] = Draw(x, {b.sites[0]: x.reshape(shape)}, x)
        return self._value(evaluator, draws)

    def _combine(
        self,
        block: Block,
        belief: Belief,
        draws: list[dict[str, Draw]],
        values: list[float],
        grads: list[dict[str, Any]],
        control: tuple[Tensor, ...] | None,
    ) -> list[Tensor | None]:
        if block not in self.blocks:
            per_leaf = [g[block.name] for g in grads if block.name in g]
            return [_average(parts, len(draws)) for parts in zip(*per_leaf, strict=True)]
        if isinstance(belief, GaussianBelief):
            z = torch.stack([d[block.name].raw for d in draws])
            if self.by_score & set(block.sites):
                return _score(belief, z, torch.tensor(values, dtype=z.dtype, device=z.device))
            g = torch.stack([_leaf_grad(g, block.name, z[0]) for g in grads])
            return _stein(belief, z, g, control)
        assert isinstance(belief, FamilyBelief)
        if self.by_score & set(block.sites):
            drawn = torch.stack([d[block.name].raw for d in draws])
            return _family_score(
                belief, drawn, torch.tensor(values, dtype=drawn.dtype, device=drawn.device)
            )
        per_leaf = [g[block.name] for g in grads if block.name in g]
        raw = [_average(parts, len(draws)) for parts in zip(*per_leaf, strict=True)]
        gradient = tuple(
            torch.zeros_like(n) if r is None else r
            for r, n in zip(raw or [None] * len(belief.natural), belief.natural, strict=True)
        )
        solved = belief.family.fisher_solve(belief.natural, gradient)
        jacobians = [d[block.name].jacobian for d in draws]
        if jacobians[0] is not None:
            solved = _sampled_solve(belief, [j for j in jacobians if j], gradient, solved)
        if control is None:
            return list(solved)
        return [c + s for c, s in zip(control, solved, strict=True)]

    def _is_pathwise(self, block: Block) -> bool:
        """Whether a block of another family than the Gaussian has gradients of draws."""
        return block.layout is None and not self.by_score & set(block.sites)


def _leaves(evaluator: Evaluator, draws: Mapping[str, Draw], block: Block) -> tuple[Tensor, ...]:
    """What gradients are taken in: a draw, or what it is made of, or the block's mean parameters."""
    if block.name not in draws:
        return evaluator.leaves[block.name]
    leaf = draws[block.name].leaf
    return (leaf,) if isinstance(leaf, Tensor) else leaf


def _jacobian(
    belief: FamilyBelief, natural: tuple[Tensor, ...], statistics: tuple[Tensor, ...]
) -> Jacobian:
    """Rows d T_i / d natural, one for each scalar of T of an element; shapes (*batch, *event)."""
    family = belief.family
    rows = []
    for t, n in zip(statistics, family.event_dims, strict=True):
        scalars = t.flatten(-n).unbind(-1) if n else (t,)
        for x in scalars:
            found = torch.autograd.grad(x.sum(), natural, retain_graph=True, allow_unused=True)
            rows.append(
                [
                    torch.zeros_like(m) if g is None else g
                    for g, m in zip(found, natural, strict=True)
                ]
            )
    return rows


def _sampled_solve(
    belief: FamilyBelief, jacobians: list[Jacobian], gradient: Natural, otherwise: Natural
) -> Natural:
    """J^-T g with J = E_draws[dT / d natural]; where J is singular, `otherwise`."""
    dims = belief.family.event_dims
    rows = [
        torch.cat(
            [
                _flat(torch.stack([j[i][k] for j in jacobians]).mean(0), n)
                for k, n in enumerate(dims)
            ],
            -1,
        )
        for i in range(len(jacobians[0]))
    ]
    matrix = torch.stack(rows, -2)
    g = torch.cat([_flat(x, n) for x, n in zip(gradient, dims, strict=True)], -1)
    found, info = torch.linalg.solve_ex(matrix.mT, g.unsqueeze(-1))
    found = found.squeeze(-1)
    good = (info == 0) & found.isfinite().all(-1)
    sizes = [_flat(x, n).shape[-1] for x, n in zip(gradient, dims, strict=True)]
    parts = found.split(sizes, -1)
    return tuple(
        torch.where(good.reshape(good.shape + (1,) * n), p.reshape(x.shape), x)
        for p, x, n in zip(parts, otherwise, dims, strict=True)
    )


def _flat(x: Tensor, event_dims: int) -> Tensor:
    """(*batch, *event) as (*batch, scalars)."""
    return x.flatten(-event_dims) if event_dims else x.unsqueeze(-1)


def noise_by_site(
    evaluator: Evaluator, messages: Sequence[Messages], sites: Collection[str]
) -> dict[str, float]:
    """The variance of independent estimates of the messages, in the Fisher metric."""
    found: dict[str, float] = {}
    n = len(messages)
    for block in evaluator.plan.blocks:
        mine = [s for s in block.sites if s in sites]
        if not mine:
            continue
        belief = evaluator.beliefs[block.name]
        parts = [
            tuple(or_zeros(g, like) for g, like in zip(p[block.name], belief.tensors, strict=True))
            for p in messages
        ]
        mean = [torch.stack(x).mean(0) for x in zip(*parts, strict=True)]
        for site in mine:
            total = 0.0
            for part in parts:
                apart = tuple(a - m for a, m in zip(part, mean, strict=True))
                if block.layout is not None:
                    own = torch.zeros_like(apart[0])
                    own[block.layout.element[site], block.layout.position[site]] = 1.0
                    apart = (own * apart[0], own.unsqueeze(-1) * apart[1] * own.unsqueeze(-2))
                total += float(belief.inner(apart, apart).sum())
            found[site] = total / (n - 1)
    return found


def scatter(block: Block, z: Tensor) -> dict[str, Tensor]:
    """Values of a Gaussian block's sites from (..., B, d) draws."""
    assert block.layout is not None
    layout = block.layout
    lead = z.shape[:-2]
    return {
        s: z[..., layout.element[s], layout.position[s]].reshape((*lead, *layout.shapes[s]))
        for s in block.sites
    }


def draw(block: Block, belief: Belief, shape: tuple[int, ...] = ()) -> Tensor:
    """Draws of a Gaussian block, (*shape, B, d)."""
    if isinstance(belief, StructuredBelief):
        draws = [belief.draw() for _ in range(math.prod(shape))]
        return torch.stack(draws).reshape(*shape, 1, -1)
    assert isinstance(belief, GaussianBelief)
    noise = torch.randn(*shape, *belief.loc.shape, dtype=belief.loc.dtype, device=belief.loc.device)
    return belief.loc + matvec(belief.scale_tril, noise)


def _orthogonal(count: int, like: Tensor) -> Tensor:
    """Standard normal vectors (count, B, d), orthogonal within each run of d of them.

    Each is marginally N(0, I), so averages stay unbiased; for d of them sum u u^T is nearly I, which
    takes most of the noise out of Stein's estimate of the curvature.
    """
    d = like.shape[-1]
    if d == 1:
        return torch.randn(count, *like.shape, dtype=like.dtype, device=like.device)
    rounds = []
    for _ in range(-(-count // d)):
        g = torch.randn(*like.shape[:-1], d, d, dtype=like.dtype, device=like.device)
        q, r = torch.linalg.qr(g)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        radius = torch.randn_like(g).square().sum(-1, keepdim=True).sqrt()
        rounds.append((q * radius).movedim(-2, 0))
    return torch.cat(rounds)[:count]


def _leaf_grad(g: dict[str, Any], name: str, like: Tensor) -> Tensor:
    found = g.get(name, [None])[0]
    return torch.zeros_like(like) if found is None else found


def _average(parts: tuple[Tensor | None, ...], count: int) -> Tensor | None:
    present = [p for p in parts if p is not None]
    return torch.stack(present).sum(0) / count if present else None


def _stein(
    belief: GaussianBelief, z: Tensor, g: Tensor, control: tuple[Tensor, ...] | None
) -> list[Tensor | None]:
    """m_t + E[r'], with r = log p - <m_t, T>: shapes z, g (S, B, d)."""
    if control is None:
        first = torch.zeros_like(belief.loc)
        second = torch.zeros_like(belief.precision)
    else:
        first, second = control
    residual = g - first - 2 * matvec(second, z)
    centred = matvec(belief.precision, z - belief.loc)
    curvature = 0.5 * (centred.unsqueeze(-1) * residual.unsqueeze(-2)).mean(0)
    g_cov = second + symmetrise(curvature)
    g_loc = first + 2 * matvec(second, belief.loc) + residual.mean(0)
    return [g_loc, g_cov]


def _family_score(belief: FamilyBelief, drawn: Tensor, values: Tensor) -> list[Tensor | None]:
    """F^-1 Cov(f, T): the score function in natural parameters, turned into a mean-gradient."""
    n = values.numel()
    advantage = ((values - values.mean()) / (n - 1)).to(drawn.device)
    statistics = belief.family.sufficient_statistics(drawn)
    gradient = tuple((advantage.reshape(-1, *[1] * (t.ndim - 1)) * t).sum(0) for t in statistics)
    return list(belief.family.fisher_solve(belief.natural, gradient))


def _score(belief: GaussianBelief, z: Tensor, values: Tensor) -> list[Tensor | None]:
    """Cov(f, grad log q): the score function with a leave-one-out baseline."""
    n = values.numel()
    advantage = (values - values.mean()) * n / (n - 1)
    centred = matvec(belief.precision, z - belief.loc)
    weight = advantage.reshape(-1, 1, 1) / n
    g_loc = (weight * centred).sum(0)
    outer = centred.unsqueeze(-1) * centred.unsqueeze(-2) - belief.precision
    g_cov = 0.5 * (weight.unsqueeze(-1) * outer).sum(0)
    return [g_loc, g_cov]
