"""The plan: blocks, compiled factors and, for every edge, how its message is found and why.

A plan is immutable. It holds all choices; nothing is decided while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from pyro_cvi.algebra.expression import Const, Expression, Group, Link, Operand
from pyro_cvi.errors import CVIError, message
from pyro_cvi.estimators import Expectation, How, Moments, Structure, compile_expectation
from pyro_cvi.families import GAUSSIAN, AbstractFamily
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.blocks import gaussian_blocks, multiplied_sites
from pyro_cvi.graph.symbolic import Latent, Symbolic
from pyro_cvi.linalg import broadcast_shapes

__all__ = ["Block", "CompiledFactor", "Plan", "compile_factors", "make_plan", "make_structure"]


@dataclass(frozen=True, eq=False)
class Block:
    """Sites updated together under one family; `layout` for Gaussian blocks only."""

    name: str
    sites: tuple[str, ...]
    family: AbstractFamily
    layout: Layout | None
    reason: str
    size: int

    @property
    def structure(self) -> str:
        """The layout's structure (dense, plated or diagonal), or the family's name."""
        return self.layout.structure if self.layout is not None else self.family.name


@dataclass(frozen=True, eq=False)
class CompiledFactor:
    """E_q[log p] of one factor: weight, enumeration and the compiled expectation."""

    name: str
    expectation: Expectation
    weight: Tensor | float
    enumerated: tuple[tuple[str, int], ...]
    blocks: frozenset[str]
    how: Mapping[str, How]
    observed: bool

    @property
    def sampled(self) -> frozenset[str]:
        """Sites of which this factor needs samples."""
        return frozenset(s for s, h in self.how.items() if h.kind == "sampled")

    def __call__(self, moments: Moments, probabilities: Mapping[str, Tensor]) -> Tensor:
        """sum over cells of weight * E_q[log p]; `probabilities` of enumerated sites, (*batch, K)."""
        value = self.expectation(moments)
        shape = self.expectation.shape
        weight: Tensor | float = self.weight
        for site, dim in self.enumerated:
            p = probabilities[site].movedim(-1, 0)
            lead = -dim - 1 - (p.ndim - 1)
            weight = weight * p.reshape(p.shape[0], *([1] * lead), *p.shape[1:])
        if isinstance(weight, Tensor):
            value = value * weight
            shape = broadcast_shapes(shape, weight.shape)
            return value.expand(shape).sum()
        total = value.expand(shape).sum()
        return total if weight == 1.0 else total * weight


@dataclass(frozen=True, eq=False)
class Plan:
    """Blocks in update order, factors, and the structure of the posterior.

    `learns` says that the model has parameters for the user's optimiser; a `stochastic` plan sees
    part of a plate's elements at a time.

    `scattered` sites start at a draw from the prior, for their prior mean may be a saddle.
    """

    latents: dict[str, Latent]
    blocks: tuple[Block, ...]
    factors: tuple[CompiledFactor, ...]
    structure: Structure
    stochastic: bool
    learns: bool
    scattered: frozenset[str] = frozenset()

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

    def block_of(self, site: str) -> Block:
        name = self.structure.block[site]
        return next(b for b in self.blocks if b.name == name)

    def is_exact(self, block: Block) -> bool:
        """Whether every message to the block is exact."""
        return all(
            f.how[s].kind == "exact"
            for f in self.factors_of(block.name)
            for s in block.sites
            if s in f.how
        )

    def sampled_sites(self) -> frozenset[str]:
        return _sampled(self.factors)


def make_structure(symbolic: Symbolic, max_dense_dim: int) -> tuple[tuple[Block, ...], Structure]:
    """Blocks and structure for the latents of a symbolic run."""
    blocks: list[Block] = []
    gaussian = gaussian_blocks(symbolic.latents, symbolic.factors, max_dense_dim)
    by_first = {g.sites[0]: g for g in gaussian}
    covered = {s for g in gaussian for s in g.sites}
    for name, latent in symbolic.latents.items():
        if name in by_first:
            g = by_first[name]
            label = "+".join(g.sites[:3]) + ("+..." if len(g.sites) > 3 else "")
            blocks.append(Block(label, g.sites, GAUSSIAN, g.layout, g.reason, g.layout.size))
        elif name not in covered:
            size = latent.value.numel()
            blocks.append(Block(name, (name,), latent.family, None, "one per site", size))
    # Discrete blocks last: they start from random responsibilities, which break symmetry only when
    # the continuous blocks look at them first.
    blocks.sort(key=lambda b: symbolic.latents[b.sites[0]].enum_dim is not None)
    structure = Structure(
        {n: latent.family for n, latent in symbolic.latents.items()},
        {s: b.name for b in blocks for s in b.sites},
        {b.name: b.layout for b in blocks if b.layout is not None},
    )
    return tuple(blocks), structure


def compile_factors(symbolic: Symbolic, structure: Structure) -> list[CompiledFactor]:
    """Compile the expectation of every factor."""
    learns = _constants_require_grad(symbolic)
    result = []
    for f in symbolic.factors:
        expectation = compile_expectation(f.expression, structure, learn_constants=learns)
        order = list(symbolic.latents)
        how = {s: expectation.how[s] for s in sorted(expectation.how, key=order.index)}
        for site, reason in f.forced.items():
            if site in structure.block:
                how[site] = How("sampled", reason)
        for site in f.enumerated:
            how[site] = How("exact", f"{structure.family[site].name}, enumerated")
        enumerated = tuple((s, symbolic.latents[s].enum_dim or 0) for s in f.enumerated)
        blocks = frozenset(structure.block[s] for s in how)
        result.append(
            CompiledFactor(f.name, expectation, f.weight, enumerated, blocks, how, f.observed)
        )
    return result


def make_plan(
    symbolic: Symbolic,
    max_dense_dim: int,
    previous: Plan | None = None,
    *,
    stochastic: bool = False,
    learns: bool = False,
) -> Plan:
    """Compile a plan; the blocks of `previous` are kept (its posterior lives in them)."""
    if previous is None:
        blocks, structure = make_structure(symbolic, max_dense_dim)
    else:
        blocks, structure = previous.blocks, previous.structure.fresh()
    factors = compile_factors(symbolic, structure)
    _check_factors(symbolic, factors)
    return Plan(
        symbolic.latents,
        blocks,
        tuple(factors),
        structure,
        stochastic,
        learns,
        multiplied_sites(symbolic.latents, symbolic.factors) | _sampled(factors),
    )


def _sampled(factors: Sequence[CompiledFactor]) -> frozenset[str]:
    return frozenset().union(*(f.sampled for f in factors))


def _check_factors(symbolic: Symbolic, factors: Sequence[CompiledFactor]) -> None:
    touched = {s for f in factors for s in f.how}
    for name in symbolic.latents:
        if name not in touched:
            raise CVIError(
                message(
                    f"latent site '{name}'",
                    "no factor depends on it, not even its own prior",
                    "a proper prior or a likelihood for every latent",
                    "remove poutine.mask(mask=False) around it, or give it a proper prior",
                )
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
