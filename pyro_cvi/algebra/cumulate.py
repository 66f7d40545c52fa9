"""Cumulative sums along an axis of a site, kept as a statistic of their own.

    s_t = z_1 + ... + z_t    <=>    z_t = s_t - s_{t-1}

A sum over time as a matrix product takes T x T numbers, and every s_t reads all innovations before it.
In the coordinates s a factor of s_t reads one scalar and one of z_t two neighbours: a chain. Which of
the two coordinates serve is for the plan to decide; while the model runs, a sum stays a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import (
    IDENTITY,
    Const,
    Expression,
    Group,
    Link,
    Operand,
    Stat,
    Statistic,
    Term,
    device_of,
    expand,
    fresh_label,
)

__all__ = ["cumulated", "cumulated_axes", "in_innovations", "in_sums"]

_KIND = "cumulated"


def cumulated(e: Expression, dim: int) -> Expression | None:
    """The cumulative sum along one axis; None where that is no sum along an axis of each site."""
    label, n = dim % e.ndim - e.ndim, e.shape[dim]
    terms = [_cumulated_term(t, label, n) for t in e.terms]
    if any(t is None for t in terms):
        return None
    constant = e.constant
    if e.has_constant:
        if not isinstance(constant, Tensor):
            constant = torch.tensor(constant, device=device_of(e))
        like = constant
        wide = like.expand(e.shape) if like.ndim < e.ndim or like.shape[label] < n else like
        constant = wide.cumsum(label)
    return Expression(e.shape, constant, tuple(t for t in terms if t is not None))


def _cumulated_term(t: Term, label: int, n: int) -> Term | None:
    operands = [_along_less(o, label) for o in t.operands]
    along = [i for i, o in enumerate(operands) if label in o.axes]
    if not along:
        kinds = (o.tensor.dtype for o in operands if isinstance(o, Const))
        dtype, device = next(kinds, torch.get_default_dtype()), device_of(Expression((), 0.0, (t,)))
        steps = torch.arange(1, n + 1, dtype=dtype, device=device)
        return Term(t.coefficient, (*operands, Const(steps, (label,))))
    if len(along) > 1:
        return None
    (i,) = along
    o = operands[i]
    at = o.axes.index(label)
    if isinstance(o, Const):
        operands[i] = Const(o.tensor.cumsum(at), o.axes)
    elif isinstance(o, Stat):
        axis = _axis_of(o, at)
        if o.statistic != IDENTITY or axis is None:
            return None
        operands[i] = replace(o, statistic=Statistic(_KIND, float(axis)))
    elif isinstance(o, Group):
        inner = cumulated(expand(o.expression, o.shape), at)
        if inner is None:
            return None
        operands[i] = Group(inner, o.axes)
    else:
        return None
    return Term(t.coefficient, tuple(operands))


def _along_less(o: Operand, label: int) -> Operand:
    """A constant without an axis along which it is the same, as a scale that was expanded."""
    if not isinstance(o, Const) or label not in o.axes:
        return o
    at = o.axes.index(label)
    first = o.tensor.narrow(at, 0, 1)
    if not bool((o.tensor == first).all()):
        return o
    return Const(first.squeeze(at), tuple(a for a in o.axes if a != label))


def _axis_of(o: Stat, at: int) -> int | None:
    """The axis of the site along which the index runs from the first element on, whole."""
    n = o.index.shape[at]
    for axis, size in enumerate(o.site.shape):
        if size == n:
            where = _coordinate(o, axis)
            steps = torch.arange(n, device=where.device)
            origin = o.index - _stride(o, axis) * where
            along = bool((where.movedim(at, -1) == steps).all())
            if along and bool((origin == origin.narrow(at, 0, 1)).all()):  # not along a diagonal
                return axis
    return None


def _stride(o: Stat, axis: int) -> int:
    return math.prod(o.site.shape[axis + 1 :])


def _coordinate(o: Stat, axis: int) -> Tensor:
    return (o.index // _stride(o, axis)) % o.site.shape[axis]


def cumulated_axes(e: Expression) -> dict[str, set[int]]:
    """The sites of which cumulative sums are read, and the axes of the sums."""
    found: dict[str, set[int]] = {}

    def note(o: Stat) -> Operand:
        if o.statistic.kind == _KIND:
            found.setdefault(o.site.name, set()).add(int(o.statistic.power))
        return o

    _mapped(e, note)
    return found


def in_innovations(e: Expression) -> Expression:
    """The same with every cumulative sum written out as a sum."""
    return _mapped(e, lambda o: _written_out(o) if o.statistic.kind == _KIND else o)


def in_sums(e: Expression, axes: Mapping[str, int]) -> Expression:
    """The same in other coordinates: these sites stand for their cumulative sums along the axes."""

    def read(o: Stat) -> Operand:
        if o.site.name not in axes:
            return o
        if o.statistic.kind == _KIND:
            return replace(o, statistic=IDENTITY)
        return _difference(o, axes[o.site.name])

    return _mapped(e, read)


def _mapped(e: Expression, read: Callable[[Stat], Operand]) -> Expression:
    """Every statistic replaced; an operand that stands twice in a term (a square) stays one."""
    terms, changed = [], False
    for t in e.terms:
        new: dict[int, Operand] = {}
        for o in t.operands:
            if id(o) not in new:
                new[id(o)] = _operand(o, read)
        operands = tuple(new[id(o)] for o in t.operands)
        same = all(a is b for a, b in zip(operands, t.operands, strict=True))
        changed = changed or not same
        terms.append(t if same else Term(t.coefficient, operands))
    return Expression(e.shape, e.constant, tuple(terms)) if changed else e


def _operand(o: Operand, read: Callable[[Stat], Operand]) -> Operand:
    if isinstance(o, Stat):
        return read(o)
    if isinstance(o, Group):
        inner = _mapped(o.expression, read)
        return o if inner is o.expression else Group(inner, o.axes)
    if isinstance(o, Link):
        arguments = tuple(_mapped(a, read) for a in o.arguments)
        same = all(a is b for a, b in zip(arguments, o.arguments, strict=True))
        return o if same else replace(o, arguments=arguments)
    return o


def _difference(o: Stat, axis: int) -> Operand:
    """s_t - s_{t-1}, and s_1 at the first time."""
    own = tuple(range(-len(o.axes), 0))
    first = _coordinate(o, axis) == 0
    before = replace(o, index=torch.where(first, o.index, o.index - _stride(o, axis)), axes=own)
    here = Term(1.0, (replace(o, axes=own),))
    there = Term(-1.0, (Const((~first).to(torch.get_default_dtype()), own), before))
    terms = (here,) if bool(first.all()) else (here, there)
    if not bool(first.any()):
        terms = (here, Term(-1.0, (before,)))
    return Group(Expression(o.shape, 0.0, terms), o.axes)


def _written_out(o: Stat) -> Operand:
    """The sum of z over all times up to the one that is read."""
    axis = int(o.statistic.power)
    n, stride, own = o.site.shape[axis], _stride(o, axis), tuple(range(-len(o.axes), 0))
    where = _coordinate(o, axis)
    origin = o.index - stride * where
    steps, label = torch.arange(n, device=o.index.device), fresh_label()
    # Times and origins mostly vary along different axes: neither is repeated along the other's.
    time, time_axes = _without_constant(where, own)
    origin, origin_axes = _without_constant(origin, own)
    mask = (steps <= time.unsqueeze(-1)).to(torch.get_default_dtype())
    index = origin.unsqueeze(-1) + stride * steps
    z = Stat(o.site, IDENTITY, index, (*origin_axes, label))
    term = Term(1.0, (Const(mask, (*time_axes, label)), z))
    return Group(Expression(o.shape, 0.0, (term,)), o.axes)


def _without_constant(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Without the axes along which it does not vary."""
    kept = list(axes)
    for a in axes:
        i = kept.index(a)
        if bool((x == x.narrow(i, 0, 1)).all()):
            x = x.select(i, 0)
            kept.pop(i)
    return x, tuple(kept)
