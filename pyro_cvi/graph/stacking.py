"""Factors that differ in their data only become one, with a new leading axis over them.

A Python loop of a thousand sample statements is then one expectation of a thousand rows, and not a
thousand small ones. Factors may also read different sites of one Gaussian block: these are then read as
one site, the block, which has all scalars of its sites in the order of its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import (
    IDENTITY,
    Const,
    Expression,
    Group,
    Link,
    Operand,
    SiteRef,
    Stat,
    Term,
    device_of,
)
from pyro_cvi.estimators.moments import Structure
from pyro_cvi.families import GAUSSIAN
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.symbolic import Factor, Latent

__all__ = ["alike", "as_site", "form", "roles", "stack", "with_blocks_as_sites"]


def with_blocks_as_sites(structure: Structure) -> Structure:
    """The structure with every Gaussian block of several sites as a site of its own, of its name."""
    layouts = {
        name: as_site(name, layout)
        for name, layout in structure.layout.items()
        if len(layout.sites) > 1 and name not in structure.block
    }
    return replace(
        structure,
        family={**structure.family, **dict.fromkeys(layouts, GAUSSIAN)},
        block={**structure.block, **{n: n for n in layouts}},
        layout={**structure.layout, **layouts},
    )


def as_site(name: str, layout: Layout) -> Layout:
    """The layout with one more site, of all scalars in their order."""
    device = layout.element[layout.sites[0]].device
    flat = torch.arange(layout.size, device=device)
    return replace(
        layout,
        element={**layout.element, name: flat // layout.width},
        position={**layout.position, name: flat % layout.width},
    )


def roles(f: Factor, by_site: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The discrete sites of a factor: alone, or as two neighbours of a chain in their order."""
    found: dict[str, list[str]] = {}
    for s in f.enumerated:
        found.setdefault(by_site[s].name, []).append(s)
    return [
        tuple(sorted(sites, key=by_site[sites[0]].step)) if len(sites) > 1 else tuple(sites)
        for sites in found.values()
    ]


def alike(
    factors: Sequence[Factor],
    by_site: Mapping[str, Any],
    latents: Mapping[str, Latent],
    structure: Structure,
) -> list[list[Factor]]:
    """Factors grouped by their form: all but constants, indices, steps of chains, sites of a block."""
    groups: dict[Any, list[Factor]] = {}
    for i, f in enumerate(factors):
        key = _key(f, by_site, latents, structure)
        groups.setdefault(i if key is None else key, []).append(f)
    return list(groups.values())


def _key(
    f: Factor, by_site: Mapping[str, Any], latents: Mapping[str, Latent], structure: Structure
) -> Any:
    def name(o: Stat) -> str:
        own = o.site.name
        block = structure.block.get(own)
        in_one = block in structure.layout and block in structure.family
        return block if block and in_one and o.statistic == IDENTITY else own  # any of its sites

    kind = None if f.forced else form(f.expression, name)
    if kind is None:
        return None
    discrete = []
    for sites in roles(f, by_site):
        block = by_site[sites[0]]
        dims = tuple(latents[s].enum_dim for s in sites)
        discrete.append((block.name, dims, None if block.is_chain else sites))
    w = f.weight
    weight = (tuple(w.shape), w.dtype, w.device) if isinstance(w, Tensor) else w
    return kind, tuple(discrete), weight, f.observed, f.plates


def form(e: Expression, name: Callable[[Stat], Hashable]) -> Any:
    """A hashable description of an expression without its numbers; None if it cannot be stacked.

    `name` says what stands for the site of a statistic.
    """
    terms = []
    for t in e.terms:
        labels: dict[int, int] = {}
        operands = [_operand_form(o, labels, name) for o in t.operands]
        if None in operands:
            return None
        terms.append(tuple(operands))
    return e.shape, _constant_form(e.constant), tuple(terms)


def _constant_form(c: Tensor | float) -> Any:
    if not isinstance(c, Tensor):
        return "number"
    return tuple(c.shape), c.dtype, c.device, c.requires_grad


def _operand_form(o: Operand, labels: dict[int, int], name: Callable[[Stat], Hashable]) -> Any:
    axes = tuple(a if a < 0 else labels.setdefault(a, len(labels) + 1) for a in o.axes)
    if isinstance(o, Const):
        return ("const", axes, _constant_form(o.tensor))
    if isinstance(o, Stat):
        return ("stat", axes, name(o), o.statistic, o.shape)
    if isinstance(o, Group):
        inner = form(o.expression, name)
        return None if inner is None else ("group", axes, inner)
    if isinstance(o, Link):
        inside = tuple(form(a, name) for a in o.arguments)
        return None if None in inside else ("link", axes, o.shape, _function_form(o), inside)
    return None


def _function_form(o: Link) -> Any:
    known = getattr(o.function, "__dict__", None)
    return (o.name, type(o.function), repr(known)) if known else (o.name, id(o.function))


# --- stacking --------------------------------------------------------------------------------------


def stack(group: Sequence[Factor], structure: Structure) -> Factor:
    """One factor with the group's members along a new leading axis; a group of one is left as it is."""
    first = group[0]
    if len(group) == 1:
        return first
    weight = _stacked_weight([f.weight for f in group], first.expression.ndim)
    name = f"{first.name} ... {group[-1].name}"
    expression = _stacked([f.expression for f in group], structure)
    members = tuple(m for f in group for m in f.members or (f,))
    behind: dict[str, frozenset[str]] = {}
    for view, sites in (item for f in group for item in f.behind.items()):
        behind[view] = behind.get(view, frozenset()) | sites
    return replace(
        first, name=name, expression=expression, weight=weight, members=members, behind=behind
    )


def _stacked_weight(weights: Sequence[Tensor | float], ndim: int) -> Tensor | float:
    if not isinstance(weights[0], Tensor):
        return weights[0]
    tensors = [w for w in weights if isinstance(w, Tensor)]
    if _all_same(tensors):
        return tensors[0]
    whole = torch.stack(tensors)
    return whole.reshape(len(tensors), *[1] * (ndim - tensors[0].ndim), *tensors[0].shape)


def _stacked(parts: Sequence[Expression], structure: Structure) -> Expression:
    first = parts[0]
    terms = tuple(
        _stacked_term([e.terms[i] for e in parts], first.ndim, structure)
        for i in range(len(first.terms))
    )
    constant = _stacked_constant([e.constant for e in parts], first)
    return Expression((len(parts), *first.shape), constant, terms)


def _stacked_constant(constants: Sequence[Tensor | float], like: Expression) -> Tensor | float:
    if not isinstance(constants[0], Tensor):
        if all(c == constants[0] for c in constants):
            return constants[0]
        tensors = [torch.tensor(c, dtype=_dtype(like), device=device_of(like)) for c in constants]
    else:
        tensors = [c for c in constants if isinstance(c, Tensor)]
        if _all_same(tensors):
            return tensors[0]
    shape = tensors[0].shape
    return torch.stack(tensors).reshape(len(tensors), *[1] * (like.ndim - len(shape)), *shape)


def _dtype(e: Expression) -> torch.dtype:
    for t in e.terms:
        for o in t.operands:
            if isinstance(o, Const):
                return o.tensor.dtype
    return torch.get_default_dtype()


def _stacked_term(parts: Sequence[Term], ndim: int, structure: Structure) -> Term:
    """The members' terms as one; `ndim` is that of one member's expression."""
    first = parts[0]
    new = -(ndim + 1)
    operands = []
    for k, o in enumerate(first.operands):
        members = [t.operands[k] for t in parts]
        operands.append(_stacked_operand(members, o.axes, new, structure))
    coefficients = [t.coefficient for t in parts]
    if all(c == coefficients[0] for c in coefficients):
        return Term(first.coefficient, tuple(operands))
    like = Expression((), 0.0, (first,))
    values = torch.tensor(coefficients, dtype=_dtype(like), device=device_of(like))
    varying = Const(values, (new,))
    return Term(1.0, (varying, *operands))


def _stacked_operand(
    members: Sequence[Operand], axes: tuple[int, ...], new: int, structure: Structure
) -> Operand:
    """One operand for all members; it has the new axis only if the members differ."""
    o = members[0]
    if isinstance(o, Const):
        tensors = [m.tensor for m in members if isinstance(m, Const)]
        return o if _all_same(tensors) else Const(torch.stack(tensors), (new, *axes))
    if isinstance(o, Stat):
        return _stacked_stat([m for m in members if isinstance(m, Stat)], axes, new, structure)
    if isinstance(o, Group):
        inner = _stacked([m.expression for m in members if isinstance(m, Group)], structure)
        if not _varies(inner):
            return o
        return Group(inner, (new, *axes))
    assert isinstance(o, Link)
    count = len(o.arguments)
    arguments = tuple(
        _stacked([m.arguments[i] for m in members if isinstance(m, Link)], structure)
        for i in range(count)
    )
    if not any(_varies(a) for a in arguments):
        return o
    # Every argument of a link is aligned from the right; those that do not vary broadcast.
    wide = tuple(_aligned(a, len(o.shape)) for a in arguments)
    return replace(o, arguments=wide, shape=(len(members), *o.shape), axes=(new, *axes))


def _stacked_stat(
    members: Sequence[Stat], axes: tuple[int, ...], new: int, structure: Structure
) -> Stat:
    o = members[0]
    indices = [m.index for m in members]
    if any(m.site.name != o.site.name for m in members):
        block = structure.block[o.site.name]
        layout = structure.layout[block]
        indices = [layout.flat(m.site.name)[m.index] for m in members]
        o = replace(o, site=SiteRef(block, (layout.size,), 0, o.site.kind))
    if _all_same(indices):
        return replace(o, index=indices[0])
    return replace(o, index=torch.stack(indices), axes=(new, *axes))


def _varies(e: Expression) -> bool:
    """Whether anything in a stacked expression has the leading axis."""
    lead = -e.ndim
    if isinstance(e.constant, Tensor) and e.constant.ndim == e.ndim and e.constant.shape[0] > 1:
        return True
    return any(lead in o.axes for t in e.terms for o in t.operands)


def _aligned(e: Expression, ndim: int) -> Expression:
    """A stacked argument of fewer dims than its link, with the stack's axis moved to the link's."""
    own = e.ndim - 1
    if own == ndim:
        return e
    shape = (e.shape[0], *[1] * (ndim - own), *e.shape[1:])
    terms = tuple(t.relabelled({-e.ndim: -(ndim + 1)}) for t in e.terms)
    constant = e.constant
    if isinstance(constant, Tensor) and constant.ndim == e.ndim:
        constant = constant.reshape(shape)
    return Expression(shape, constant, terms)


def _all_same(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(t is first or torch.equal(t, first) for t in tensors[1:])
