"""The plan: blocks, compiled factors and, for every edge, how its message is found and why.

A plan is immutable. It holds all choices; nothing is decided while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor

from pyro_cvi.algebra.cumulate import in_innovations
from pyro_cvi.algebra.expression import Const, Expression, Group, Link, Operand
from pyro_cvi.errors import CVIError
from pyro_cvi.estimators import Expectation, How, Moments, Structure, compile_expectation
from pyro_cvi.families import CATEGORICAL, GAUSSIAN, MARKOV_CHAIN, AbstractFamily
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.blocks import Form, block_label, gaussian_blocks
from pyro_cvi.graph.chain import Chain, chain_of
from pyro_cvi.graph.discrete import chains
from pyro_cvi.graph.joining import multiplied
from pyro_cvi.graph.likeness import Foes, Turns, turns_of, with_foes
from pyro_cvi.graph.process import process_of
from pyro_cvi.graph.separating import to_separate
from pyro_cvi.graph.stacking import alike, roles, stack, with_blocks_as_sites
from pyro_cvi.graph.symbolic import Factor, Latent, Symbolic
from pyro_cvi.graph.views import Viewed
from pyro_cvi.graph.windows import (
    FamilyPlacement,
    GaussianPlacement,
    Part,
    Placement,
    whole_latent,
)
from pyro_cvi.linalg import broadcast_shapes

__all__ = ["Block", "CompiledFactor", "Plan", "compile_factors", "make_blocks", "make_plan"]


@dataclass(frozen=True, eq=False)
class Block:
    """Sites updated together under one family; `layout` for Gaussian blocks only.

    A discrete block of several sites is a chain, in their order. With a `form` the factors see the
    block through views.
    """

    name: str
    sites: tuple[str, ...]
    family: AbstractFamily
    layout: Layout | None
    reason: str
    size: int
    placement: Placement | None = None
    form: Form | None = None
    held: bool = False

    @property
    def moves(self) -> bool:
        """Whether there is anything to fit: not in an empty block, nor in one that keeps its prior."""
        return self.size > 0 and not self.held

    @property
    def scale(self) -> float:
        """How many elements each element of a window stands for; 1 outside of subsampled plates."""
        parts = self.placement.parts if self.placement is not None else ()
        return math.prod(p.scale for p in parts)

    def sized(self, sizes: Mapping[str, int]) -> Block:
        """The block when the plates of its placement hold this many elements."""
        if self.placement is None:
            return self
        parts = tuple(
            replace(p, size=sizes[p.name], scale=p.scale * p.size / max(sizes[p.name], 1))
            if p.scale != 1
            else replace(p, size=sizes[p.name])
            for p in self.placement.parts
        )
        before = math.prod(p.size for p in self.placement.parts)
        size = self.size // max(before, 1) * math.prod(p.size for p in parts)
        placement = replace(self.placement, parts=parts)
        layout = self.layout
        if isinstance(placement, GaussianPlacement):
            layout = placement.layout(sizes)
        return replace(self, size=size, placement=placement, layout=layout)

    @property
    def is_chain(self) -> bool:
        """Whether the sites are the steps of a discrete chain."""
        return self.family is MARKOV_CHAIN

    @property
    def is_discrete(self) -> bool:
        """Whether its sites are enumerated."""
        return self.family in (CATEGORICAL, MARKOV_CHAIN)

    @property
    def structure(self) -> str:
        """The layout's structure (dense, plated, sliced or diagonal), chain, or the family's name."""
        if self.is_chain:
            return "chain"
        return self.layout.structure if self.layout is not None else self.family.name

    def step(self, site: str) -> int:
        """The place of a site among those of the block."""
        return self._steps[site]

    @cached_property
    def _steps(self) -> dict[str, int]:
        return {s: i for i, s in enumerate(self.sites)}


@dataclass(frozen=True, eq=False)
class Weighting:
    """The probabilities of one or two discrete sites of a block, along their enumeration dims.

    `leaf` is 0 for states and 1 for pairs of a chain; `steps` selects along a chain (one for each of
    the factors that were stacked; None for all steps in order). The last axes of what is read go to the
    dims `targets`.
    """

    block: str
    leaf: int
    steps: int | Tensor | None
    targets: tuple[int, ...]

    def __call__(self, probabilities: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        p = probabilities[self.block][self.leaf]
        own = 1 + self.leaf
        if isinstance(self.steps, int):
            p = p.select(-1 - own, self.steps)
        elif self.steps is not None:
            p = p.index_select(p.ndim - 1 - own, self.steps)
        return to_dims(p, self.targets)

    def adjoint(
        self, g: Tensor, f: CompiledFactor, probabilities: Mapping[str, tuple[Tensor, ...]]
    ) -> Tensor:
        """d/dp of sum over cells of p * g: `g`, which broadcasts to the cells, summed over the rest."""
        leaves = probabilities[self.block]
        p = leaves[self.leaf].detach().requires_grad_()
        with torch.enable_grad():
            placed = self({self.block: (*leaves[: self.leaf], p)})
        cells = broadcast_shapes(f.expectation.shape, g.shape, placed.shape)
        (result,) = torch.autograd.grad(placed, p, _sum_to(g, tuple(placed.shape), cells))
        return result


def _sum_to(g: Tensor, shape: tuple[int, ...], cells: tuple[int, ...]) -> Tensor:
    """Sum over the cells that `shape` does not tell apart."""
    n = len(cells)
    g = g.reshape([1] * (n - g.ndim) + list(g.shape))
    own = [1] * (n - len(shape)) + list(shape)
    dims = [d for d in range(n) if own[d] == 1 and g.shape[d] > 1]
    repeats = math.prod(cells[d] for d in range(n) if own[d] == 1 and g.shape[d] == 1)
    if dims:
        g = g.sum(dims, keepdim=True)
    if repeats != 1:
        g = g * repeats
    return g.expand(own).reshape(shape)


def to_dims(p: Tensor, targets: tuple[int, ...]) -> Tensor:
    """(*batch, *own) with the own axes at the negative dims `targets`, left of the batch."""
    n = len(targets)
    batch = p.ndim - n
    order = sorted(range(n), key=lambda i: targets[i])
    shape = [1] * -min(targets)
    for i in range(batch):
        shape[i - batch] = p.shape[i]
    for i, t in enumerate(targets):
        shape[t] = p.shape[batch + i]
    return p.permute([*(batch + i for i in order), *range(batch)]).reshape(shape)


@dataclass(frozen=True, eq=False)
class CompiledFactor:
    """E_q[log p] of one factor, or of several that differ in their data only.

    `edges` has (factor, site, how) for each factor and each of its sites. Where another plan of the same
    blocks may use it as it is, `source` is the factor, and whether constants were to have gradients.
    """

    name: str
    expectation: Expectation
    weight: Tensor | float
    weightings: tuple[Weighting, ...]
    blocks: frozenset[str]
    how: Mapping[str, How]
    edges: tuple[tuple[str, str, How], ...]
    observed: bool
    plates: frozenset[str] = frozenset()
    source: tuple[Factor, bool] | None = None

    @property
    def sampled(self) -> frozenset[str]:
        """Sites of which this factor needs samples."""
        return frozenset(s for s, h in self.how.items() if h.kind == "sampled")

    @property
    def is_whole(self) -> bool:
        """Whether the factor is a function of all moments at once, of which nothing is summed before."""
        return False

    @property
    def cells(self) -> int:
        """How many numbers the factor is a density of; 0 where that is not known."""
        return math.prod(self.expectation.shape)

    def magnitude(
        self, moments: Moments, probabilities: Mapping[str, tuple[Tensor, ...]]
    ) -> Tensor:
        """The sum of the sizes of all terms, which may cancel each other in the value."""
        value = self.expectation.magnitude(moments) * self.weight_with(
            self.weightings, probabilities
        )
        shape = broadcast_shapes(self.expectation.shape, value.shape)
        return value.abs().sum() * (math.prod(shape) / max(value.numel(), 1))

    def __call__(self, moments: Moments, probabilities: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        """sum over cells of weight * E_q[log p]; `probabilities` of the discrete blocks."""
        value = self.expectation(moments)
        weight = self.weight_with(self.weightings, probabilities)
        shape = self.expectation.shape
        if isinstance(weight, Tensor):
            value = value * weight
            shape = broadcast_shapes(shape, weight.shape)
        elif weight != 1.0:
            value = value * weight
        repeats = math.prod(shape) // max(value.numel(), 1)
        total = value.sum()
        return total if repeats == 1 else total * repeats

    def weighted(
        self,
        table: Tensor,
        others: Sequence[Weighting],
        probabilities: Mapping[str, tuple[Tensor, ...]],
    ) -> Tensor:
        """E_q[log p] cell by cell, times the weight and the probabilities of some discrete sites."""
        with torch.no_grad():
            weight = self.weight_with(others, probabilities)
            if isinstance(weight, Tensor) or weight != 1.0:
                table = table * weight
            return table

    def weight_with(
        self, weightings: Sequence[Weighting], probabilities: Mapping[str, tuple[Tensor, ...]]
    ) -> Tensor | float:
        """The weight times the probabilities of some discrete sites, cell by cell."""
        weight: Tensor | float = self.weight
        for w in weightings:
            p = w(probabilities)
            weight = p if isinstance(weight, float) and weight == 1.0 else weight * p
        return weight


@dataclass(frozen=True, eq=False)
class Plan:
    """Blocks in update order, factors, and the structure of the posterior.

    `learns` says that the model has parameters for the user's optimiser; a `stochastic` plan sees
    part of a plate's elements at a time.

    `scattered` sites start at a draw from the prior, for their prior mean may be a saddle. `apart` has
    for a Gaussian site those that it multiplies, which are therefore in other blocks.
    """

    latents: dict[str, Latent]
    blocks: tuple[Block, ...]
    factors: tuple[CompiledFactor, ...]
    structure: Structure
    stochastic: bool
    learns: bool
    scattered: frozenset[str] = frozenset()
    apart: Foes = field(default_factory=dict)

    @cached_property
    def _by_block(self) -> dict[str, list[CompiledFactor]]:
        found: dict[str, list[CompiledFactor]] = {b.name: [] for b in self.blocks}
        for f in self.factors:
            for b in f.blocks:
                found[b].append(f)
        return found

    def factors_of(self, block: str) -> list[CompiledFactor]:
        """The factors that touch a block."""
        return self._by_block[block]

    def block_named(self, name: str) -> Block:
        return self._block_by_name[name]

    def block_of(self, site: str) -> Block:
        return self._block_by_name[self.structure.block_of(site)]

    @cached_property
    def _block_by_name(self) -> dict[str, Block]:
        return {b.name: b for b in self.blocks}

    def is_exact(self, block: Block) -> bool:
        """Whether every message to the block is exact."""
        return block.name not in self._inexact

    @cached_property
    def _inexact(self) -> frozenset[str]:
        owner = self.structure.block_of
        return frozenset(
            owner(s) for f in self.factors for s, h in f.how.items() if h.kind != "exact"
        )

    @cached_property
    def drawn(self) -> frozenset[str]:
        """The blocks whose sites are to have a diagonal posterior, from draws."""
        return frozenset(b.name for b in self.blocks if self.latents[b.sites[0]].diagonal)

    @cached_property
    def joint(self) -> frozenset[str]:
        """The sites of the joint block."""
        return frozenset(n for n, x in self.latents.items() if x.joint)

    def noisy(self) -> frozenset[str]:
        """The blocks that sampled factors touch."""
        return frozenset().union(*(f.blocks for f in self.factors if f.sampled))

    def sampled_sites(self) -> frozenset[str]:
        return _sampled(self.factors)

    @property
    def is_deterministic(self) -> bool:
        """Whether sweeps climb one bound without noise: of all rows, with nothing drawn or learnt."""
        return not (self.sampled_sites() or self.stochastic or self.learns)

    @cached_property
    def whole(self) -> Plan:
        """Latents and blocks with all elements of the subsampled plates, without factors."""
        if not any(b.placement for b in self.blocks):
            return self
        latents = dict(self.latents)
        blocks = []
        for b in self.blocks:
            parts = b.placement.parts if b.placement is not None else ()
            for s in b.sites:
                latents[s] = whole_latent(latents[s], parts)
            blocks.append(b.sized({p.name: p.full for p in parts}))
        return replace(
            self,
            latents=latents,
            blocks=tuple(blocks),
            factors=(),
            structure=_structure(latents, blocks),
        )


def make_blocks(
    symbolic: Symbolic,
    max_dense_dim: int,
    parts: Mapping[str, tuple[Part, ...]],
    plain: frozenset[str],
    drawn: frozenset[str],
    foes: Foes,
    turns: Sequence[Turns],
) -> tuple[tuple[Block, ...], list[Viewed], list[Factor]]:
    """Blocks for the latents of a symbolic run, their views, and the factors as they see them."""
    blocks: list[Block] = []
    gaussian, factors = gaussian_blocks(
        symbolic.latents, symbolic.factors, turns, max_dense_dim, parts, plain, drawn, foes
    )
    by_first = {g.sites[0]: g for g in gaussian}
    chain = {sites[0]: sites for sites in chains(symbolic.latents, symbolic.factors)}
    covered = {s for g in gaussian for s in g.sites} | {s for c in chain.values() for s in c}
    for name, latent in symbolic.latents.items():
        if name in by_first:
            g = by_first[name]
            size = g.layout.size
            blocks.append(
                Block(
                    block_label(g.sites, symbolic.latents),
                    g.sites,
                    GAUSSIAN,
                    g.layout,
                    g.reason.text,
                    size,
                    g.placement,
                    g.form,
                    latent.held,
                )
            )
        elif name in chain:
            sites = chain[name]
            size = sum(symbolic.latents[s].value.numel() for s in sites)
            reason = "neighbours joined by a factor: forward-backward"
            place = _placement(MARKOV_CHAIN, parts.get(name))
            blocks.append(
                Block(
                    block_label(sites, symbolic.latents),
                    sites,
                    MARKOV_CHAIN,
                    None,
                    reason,
                    size,
                    place,
                )
            )
        elif name not in covered:
            size = latent.value.numel()
            extra = 0 if latent.enum_dim is not None else latent.event_dim - latent.family.event_dim
            place = _placement(latent.family, parts.get(name), extra)
            blocks.append(Block(name, (name,), latent.family, None, "one per site", size, place))
    # Discrete blocks last: their start breaks symmetry only when the continuous blocks look at them
    # first.
    blocks.sort(key=lambda b: b.is_discrete)
    return tuple(blocks), [g.viewed for g in gaussian if g.viewed is not None], factors


def _placement(
    family: AbstractFamily, parts: tuple[Part, ...] | None, extra: int = 0
) -> FamilyPlacement | None:
    """Where the plates stand in a block's tensors; `extra` batch dims of the family are event dims."""
    return FamilyPlacement(parts, tuple(n + extra for n in family.event_dims)) if parts else None


def _structure(
    latents: Mapping[str, Latent], blocks: Sequence[Block], viewed: Sequence[Viewed] = ()
) -> Structure:
    """The structure of the posterior; of blocks with views, that of the parts they are seen in."""
    family = {n: latent.family for n, latent in latents.items()}
    block = {s: b.name for b in blocks for s in b.sites}
    layout = {b.name: b.layout for b in blocks if b.layout is not None and b.form is None}
    owner: dict[str, str] = {}
    for b in blocks:
        if b.form is not None:
            owner |= dict.fromkeys(b.form.parts, b.name)
    for v in viewed:
        layout |= v.layouts
        views = [n for n in v.layouts if n not in v.layouts[n].shapes or n not in latents]
        family |= {n: GAUSSIAN for n in views}
        block |= {n: n for n in views}
    return Structure(family, block, layout, owner)


def _blocks_again(
    before: Sequence[Block], symbolic: Symbolic
) -> tuple[tuple[Block, ...], list[Viewed], list[Factor]]:
    """The same blocks for another run of the model: with its data, or with its parameters."""
    blocks, viewed, factors = [], [], list(symbolic.factors)
    for b in before:
        if b.form is not None:
            b, v = _viewed_again(b, symbolic, factors)
            viewed.append(v)
            factors = v.seen(factors)
        blocks.append(b)
    return tuple(blocks), viewed, factors


def _viewed_again(
    block: Block, symbolic: Symbolic, factors: Sequence[Factor]
) -> tuple[Block, Viewed]:
    again = chain_of if isinstance(block.form, Chain) else process_of
    found = again(block.name, block.sites, symbolic.latents, factors, kept=True)
    if found is None:
        raise CVIError(
            f"block '{block.name}'",
            "the model now reads it in a way that its structure does not serve",
            "the model that the guide was made for",
            "make a new AutoCVI for the changed model",
        )
    return replace(block, form=found[0]), found[1]


def _kept_priors(blocks: Sequence[Block], viewed: Sequence[Viewed]) -> Iterator[CompiledFactor]:
    """The priors that a block's own form stands for: nothing to evaluate, an entry for the report."""
    how = How("exact", "Gaussian prior, kept as it is")
    by_site = {s: b.name for b in blocks for s in b.sites}
    for v in viewed:
        for site in v.priors:
            yield CompiledFactor(
                site, Expectation((), 0.0), 1.0, (), frozenset({by_site[site]}), {site: how},
                ((site, site, how),), False,
            )  # fmt: skip


def compile_factors(
    symbolic: Symbolic,
    blocks: Sequence[Block],
    structure: Structure,
    *,
    stacked: bool = True,
    known: Sequence[CompiledFactor] = (),
) -> list[CompiledFactor]:
    """Compile the expectation of every factor; factors that differ in data only become one.

    Those that are `known`, from a plan of the same blocks, are used again.
    """
    learns = _constants_require_grad(symbolic)
    ready = {id(f.source[0]): f for f in known if f.source is not None and f.source[1] == learns}
    written = [replace(f, expression=in_innovations(f.expression)) for f in symbolic.factors]
    sources = {id(w): f for w, f in zip(written, symbolic.factors, strict=True)}
    symbolic = replace(symbolic, factors=written)
    by_site = {s: b for b in blocks for s in b.sites}
    order = {n: i for i, n in enumerate(symbolic.latents)}
    result = []
    groups = [[f] for f in symbolic.factors]
    if stacked:
        structure = with_blocks_as_sites(structure)
        groups = alike(symbolic.factors, by_site, symbolic.latents, structure)
    for group in groups:
        source = sources[id(group[0])] if len(group) == 1 else None
        if id(source) in ready:
            result.append(ready[id(source)])
            continue
        one, pooled = stack(group, structure), structure.pooled
        expectation = compile_expectation(one.expression, structure, learn_constants=learns)
        if expectation.sampled and len(group) > 1:
            groups += [[f] for f in group]
            continue
        compiled = _compiled(group, one, expectation, symbolic, by_site, structure, order)
        placed = any(by_site[s].placement is not None for _, s, _ in compiled.edges)
        if source is not None and not (placed or compiled.sampled or structure.pooled != pooled):
            compiled = replace(compiled, source=(source, learns))
        result.append(compiled)
    return result


def _compiled(
    group: list[Factor],
    one: Factor,
    expectation: Expectation,
    symbolic: Symbolic,
    by_site: Mapping[str, Block],
    structure: Structure,
    order: Mapping[str, int],
) -> CompiledFactor:
    edges = []
    how: dict[str, How] = {}
    blocks = {structure.block_of(s) for s in expectation.how}
    if len(group) == 1:
        unread = {s for t in one.expression.terms for s in t.sites} - set(expectation.how)
        if unread and one.expression.shape != (0,):
            raise AssertionError(f"factor '{one.name}' sends no message to {sorted(unread)}")
    for f, seen in ((m, x) for x in group for m in x.members or (x,)):
        own = _how_by_site(f, seen, expectation.how, structure)
        own = {s: own[s] for s in sorted(own, key=order.__getitem__)}
        own |= {
            s: How("sampled", why.text, why.cause)
            for s, why in f.forced.items()
            if s in structure.block
        }
        blocks |= {structure.block_of(s) for s in own}
        discrete = {s: _how_discrete(by_site[s]) for s in f.enumerated}
        edges += [(f.name, s, h) for s, h in {**own, **discrete}.items()]
        blocks |= {structure.block[s] for s in discrete}
        how |= own
    if len(group) == 1:
        how |= discrete
    return CompiledFactor(
        one.name,
        expectation,
        one.weight,
        tuple(_weightings(group, one, symbolic, by_site)),
        frozenset(blocks),
        how,
        tuple(edges),
        one.observed,
        one.plates,
    )


def _how_by_site(
    f: Factor, seen: Factor, how: Mapping[str, How], structure: Structure
) -> dict[str, How]:
    """How each of the factor's own sites was treated, be it read by its own name or by its block's.

    `seen` is the factor that stands for this one, which reads some sites in views.
    """
    own: dict[str, How] = {}
    for s in f.expression.sites:
        views = [v for v, sites in seen.behind.items() if f is not seen and s in sites]
        found = [how.get(v) or how.get(structure.block[v]) for v in views or (s,)]
        for site in f.behind.get(s, (s,)):
            for h in found:
                if h is not None and (site not in own or h.rank > own[site].rank):
                    own[site] = h
    return own


def _how_discrete(block: Block) -> How:
    if block.is_chain:
        return How("exact", f"chain of {len(block.sites)}, enumerated")
    return How("exact", f"{block.family.name}, enumerated")


def _weightings(
    group: list[Factor], one: Factor, symbolic: Symbolic, by_site: Mapping[str, Block]
) -> Iterator[Weighting]:
    """How the probabilities of a group's discrete sites enter."""
    lead = () if len(group) == 1 else (-len(one.expression.shape),)
    columns = roles(group[0], by_site)
    for i, sites in enumerate(columns):
        block = by_site[sites[0]]
        dims = tuple(symbolic.latents[s].enum_dim or 0 for s in sites)
        if not block.is_chain:
            yield Weighting(block.name, 0, None, dims)
            continue
        steps = [block.step(roles(f, by_site)[i][0]) for f in group]
        at: int | Tensor | None = steps[0]
        if len(group) > 1:
            every = steps == list(range(len(block.sites) + 1 - len(sites)))
            at = None if every else torch.tensor(steps, device=_device(symbolic, sites))
        yield Weighting(block.name, len(sites) - 1, at, (*lead, *dims))


def _device(symbolic: Symbolic, sites: Sequence[str]) -> torch.device:
    return symbolic.latents[sites[0]].value.device


def make_plan(
    symbolic: Symbolic,
    max_dense_dim: int,
    previous: Plan | None = None,
    *,
    parts: Mapping[str, tuple[Part, ...]] | None = None,
    stochastic: bool = False,
    learns: bool = False,
    drawn: frozenset[str] = frozenset(),
    spread: bool = False,
    foes: Foes = MappingProxyType({}),
    turns: Sequence[Turns] = (),
) -> Plan:
    """Compile a plan; the blocks of `previous` are kept (its posterior lives in them).

    `parts` names the subsampled plates around each latent; blocks with sites of `drawn`, which are
    sampled, are dense, plated or diagonal. With `spread` other processes have other data. `foes` are
    to be in different blocks, as are those that multiply each other. `turns` are the factors by form.
    """
    parts, unseen = parts or {}, symbolic
    turns = turns or turns_of(symbolic.factors)
    again = partial(
        make_plan, symbolic, max_dense_dim,
        parts=parts, stochastic=stochastic, learns=learns, spread=spread, turns=turns,
    )  # fmt: skip
    plain = drawn
    if stochastic or spread:  # the predictors are others each time, or elsewhere
        plain = frozenset(symbolic.latents)
    if previous is None:
        blocks, viewed, seen = make_blocks(
            symbolic, max_dense_dim, parts, plain, drawn, foes, turns
        )
    else:
        sizes = {p.name: p.size for ps in parts.values() for p in ps}
        before = [b.sized(sizes) for b in previous.blocks] if sizes else previous.blocks
        blocks, viewed, seen = _blocks_again(before, symbolic)
    structure = _structure(symbolic.latents, blocks, viewed)
    symbolic = replace(symbolic, factors=seen)
    known = () if previous is None or viewed else previous.factors
    factors = compile_factors(symbolic, blocks, structure, known=known)
    factors += _kept_priors(blocks, viewed)
    if previous is None and any(f.sampled for f in factors):
        names = {name for f in factors if f.sampled for name, *_ in f.edges}
        found = [f for f in unseen.factors if f.name in names]
        structure = _structure(symbolic.latents, blocks)
        apart = to_separate(found, turns, structure, symbolic.latents)
        if any(found - foes.get(s, set()) for s, found in apart.items()):
            return again(drawn=drawn, foes=with_foes(foes, apart))
        sampled = frozenset().union(*(f.blocks for f in factors if f.sampled))
        special = [b for b in blocks if b.form is not None or b.structure == "sliced"]
        more = frozenset(s for b in special if b.name in sampled for s in b.sites)
        if more:
            return again(drawn=drawn | more, foes=foes)
    _check_factors(unseen, factors)
    products = multiplied(symbolic.latents, turns)
    return Plan(
        symbolic.latents,
        blocks,
        tuple(factors),
        structure,
        stochastic,
        learns,
        frozenset(products) | _sampled(factors),
        with_foes(products, foes) if previous is None else previous.apart,
    )


def _sampled(factors: Sequence[CompiledFactor]) -> frozenset[str]:
    return frozenset().union(*(f.sampled for f in factors))


def _check_factors(symbolic: Symbolic, factors: Sequence[CompiledFactor]) -> None:
    touched = {s for f in factors for _, s, _ in f.edges}
    for f in symbolic.factors:
        latent = symbolic.latents.get(f.name)
        above = f.expression.sites - {f.name}
        if latent is not None and latent.held and above:
            raise CVIError(
                f"latent site '{f.name}'",
                f"it keeps its prior, and that depends on '{min(above)}'",
                "a prior with constant parameters",
                "sample Normal(0, 1) noise, and shift and scale it after that",
            )
    for name in symbolic.latents:
        if name not in touched:
            raise CVIError(
                f"latent site '{name}'",
                "no factor depends on it, not even its own prior",
                "a proper prior or a likelihood for every latent",
                "remove poutine.mask(mask=False) around it, or give it a proper prior",
            )


def _constants_require_grad(symbolic: Symbolic) -> bool:
    """Whether constants of the factors carry gradients (parameters, or draws of sampled sites)."""
    return any(_requires_grad(f.expression) for f in symbolic.factors)


def _requires_grad(e: Expression) -> bool:
    if isinstance(e.constant, Tensor) and e.constant.requires_grad:
        return True
    return any(_operand_requires_grad(o) for t in e.terms for o in t.operands)


def _operand_requires_grad(o: Operand) -> bool:
    if isinstance(o, Const):
        return o.tensor.requires_grad
    if isinstance(o, Group):
        return _requires_grad(o.expression)
    if isinstance(o, Link):
        return any(_requires_grad(a) for a in o.arguments)
    return False
