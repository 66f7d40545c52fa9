"""One rule for every op that only moves elements: out[j] = in[coordinates(j)].

Reshape, index, expand, flip, cat, gather and the rest need no rule of their own. The op is applied to
the coordinate of each input axis; a coordinate that varies along one output axis alone keeps the
operands separable (no index of the size of the output is ever built for a view).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pyro_cvi.algebra.collect import rows_of_scalars
from pyro_cvi.algebra.expression import (
    Axes,
    Const,
    Expression,
    Operand,
    Term,
    add,
    align,
    const_operand,
    merge_operands,
)
from pyro_cvi.linalg import broadcast_shapes

__all__ = ["concatenate", "masked", "move"]

Op = Callable[[Tensor], Tensor]


def move(e: Expression, op: Op) -> Expression:
    """Op applied to the expression; `op` must only move (drop, repeat) elements."""
    constant = e.constant
    if isinstance(constant, Tensor):
        constant = op(constant.expand(e.shape))
        shape = tuple(constant.shape)
    else:
        shape = tuple(op(torch.empty((), device=_device(e)).expand(e.shape)).shape)
    if not e.terms:
        return Expression(shape, constant)
    used = sorted({a for t in e.terms for a in t.labels if a < 0})
    coordinates = {a: _coordinate(e.shape, a, op, _device(e)) for a in used}
    terms = tuple(_move_term(t, coordinates, e.shape) for t in e.terms)
    return Expression(shape, constant, terms)


def _device(e: Expression) -> torch.device:
    for t in e.terms:
        for o in t.operands:
            tensor = getattr(o, "index", None)
            if tensor is None:
                tensor = getattr(o, "tensor", None)
            if isinstance(tensor, Tensor):
                return tensor.device
            nested = getattr(o, "expression", None)
            if nested is not None:
                return _device(nested)
            for argument in getattr(o, "arguments", ()):
                return _device(argument)
    return e.constant.device if isinstance(e.constant, Tensor) else torch.device("cpu")


def _coordinate(
    shape: tuple[int, ...], axis: int, op: Op, device: torch.device
) -> tuple[Tensor, Axes]:
    """The input coordinate along `axis` of every output cell, reduced to the axes it varies along."""
    n = shape[axis]
    view = [1] * len(shape)
    view[axis] = n
    c = op(torch.arange(n, device=device).reshape(view).expand(shape))
    axes: list[int] = []
    for b in range(-c.ndim, 0):
        size = c.shape[b]
        if size == 0:
            axes.append(b)
        elif size == 1 or c.stride(b) == 0 or bool((c.narrow(b, 0, 1) == c).all()):
            c = c.narrow(b, 0, 1)
        else:
            axes.append(b)
    return c.reshape([c.shape[b] for b in axes]), tuple(axes)


def _move_term(
    t: Term, coordinates: dict[int, tuple[Tensor, Axes]], shape: tuple[int, ...]
) -> Term:
    return Term(t.coefficient, tuple(_move_operand(o, coordinates, shape) for o in t.operands))


def _move_operand(
    o: Operand, coordinates: dict[int, tuple[Tensor, Axes]], shape: tuple[int, ...]
) -> Operand:
    outer = [a for a in o.axes if a < 0]
    if not outer:
        return o
    new_axes = sorted({b for a in outer for b in coordinates[a][1]})
    mapped = [coordinates[a][1] for a in outer]
    if all(len(m) == 1 for m in mapped) and len({m[0] for m in mapped}) == len(outer):
        return _select(o, coordinates, shape)
    inner = [a for a in o.axes if a > 0]
    target = (*new_axes, *inner)
    index = []
    for position, a in enumerate(o.axes):
        if a < 0:
            c, axes = coordinates[a]
        else:
            c, axes = torch.arange(o.shape[position], device=coordinates[outer[0]][0].device), (a,)
        sizes = iter(c.shape)
        index.append(c.reshape([next(sizes) if b in axes else 1 for b in target]))
    return o.moved(lambda x: x[tuple(index)], target)


def _select(
    o: Operand, coordinates: dict[int, tuple[Tensor, Axes]], shape: tuple[int, ...]
) -> Operand:
    """Each axis goes to one axis of its own: rename it, and select along it where needed."""
    picks: list[tuple[int, Tensor]] = []
    axes: list[int] = []
    for position, a in enumerate(o.axes):
        if a > 0:
            axes.append(a)
            continue
        c, (b,) = coordinates[a]
        axes.append(b)
        if c.numel() != shape[a] or not _is_arange(c):
            picks.append((position, c))

    def op(x: Tensor) -> Tensor:
        for position, c in picks:
            x = _take(x, position, c)
        return x

    if not picks:
        return o.moved(_same, tuple(axes))
    return o.moved(op, tuple(axes))


def _same(x: Tensor) -> Tensor:
    return x


def _is_arange(c: Tensor) -> bool:
    return c.numel() == 0 or bool((c == torch.arange(c.numel(), device=c.device)).all())


def _take(x: Tensor, dim: int, c: Tensor) -> Tensor:
    """Select along `dim`, as a slice where the coordinates are evenly spaced (no copy)."""
    if c.numel() > 1:
        step = int(c[1] - c[0])
        if step > 0 and bool((c[1:] - c[:-1] == step).all()):
            index = [slice(None)] * x.ndim
            index[dim] = slice(int(c[0]), int(c[-1]) + 1, step)
            return x[tuple(index)]
    return x.index_select(dim, c)


def masked(e: Expression, mask: Tensor) -> Expression:
    """E where mask else 0, without touching the values of e that are masked out."""
    operand = const_operand(mask)
    terms = []
    for t in e.terms:
        terms.append(Term(t.coefficient, _masked_operands(t, operand)))
    constant = e.constant
    if isinstance(constant, Tensor):
        constant = torch.where(mask, constant, torch.zeros_like(constant))
    elif constant != 0.0:
        number = torch.tensor(constant, dtype=_widest(e.terms), device=mask.device)
        constant = torch.where(mask, number, torch.zeros_like(number))
    shape = broadcast_shapes(e.shape, mask.shape)
    return Expression(shape, constant, tuple(terms))


def _masked_operands(t: Term, mask: Const) -> tuple[Operand, ...]:
    """The operands times the mask; a constant that it covers loses what is hidden (NaN too)."""
    for i, o in enumerate(t.operands):
        if isinstance(o, Const) and set(mask.axes) <= set(o.axes):
            kept = torch.where(align(mask.tensor, mask.axes, o.axes), o.tensor, 0.0)
            return (*t.operands[:i], Const(kept, o.axes), *t.operands[i + 1 :])
    ones = Const(mask.tensor.to(_dtype_of(t)), mask.axes)
    return merge_operands((*t.operands, ones))


def _widest(terms: Sequence[Term]) -> torch.dtype:
    """The dtype of an expression's constants (its statistics have that of the model)."""
    result = torch.get_default_dtype()
    for t in terms:
        result = torch.promote_types(result, _dtype_of(t))
    return result


def _dtype_of(t: Term) -> torch.dtype:
    for o in t.operands:
        if isinstance(o, Const):
            return o.tensor.dtype
    return torch.get_default_dtype()


def _index_select(dim: int, index: Tensor, x: Tensor) -> Tensor:
    return x.index_select(dim, index)


def concatenate(parts: Sequence[Expression], dim: int, like: Tensor) -> Expression:
    """Cat along `dim`; `like` is the concatenated value (its shape, dtype and device).

    Every part is read at a clamped position and weighted by one inside its range, zero outside.
    """
    ndim = like.ndim
    dim %= ndim
    total = like.shape[dim]
    position = torch.arange(total, device=like.device)
    result: Expression | None = None
    start = 0
    view = [total if d == dim else 1 for d in range(ndim)]
    constants = []
    terms, parts = rows_of_scalars(parts, dim - ndim, like)
    for e in parts:
        if e.ndim != ndim and e.shape != (0,):  # torch lets an empty vector stand anywhere
            raise ValueError("tensors of different ranks")
        size = e.shape[dim] if e.ndim == ndim else 0
        if size:
            own = e.constant if isinstance(e.constant, Tensor) else like.new_tensor(e.constant)
            constants.append(own.expand(e.shape))
        if size and e.terms:
            clamped = (position - start).clamp(0, size - 1)
            bare = Expression(e.shape, 0.0, e.terms)
            inside = ((position >= start) & (position < start + size)).reshape(view)
            placed = masked(move(bare, partial(_index_select, dim, clamped)), inside)
            result = placed if result is None else add(result, placed)
        start += size
    shape = tuple(like.shape)
    constant: Tensor | float = torch.cat(constants, dim) if constants else 0.0
    if isinstance(constant, Tensor) and not constant.requires_grad and not constant.any():
        constant = 0.0
    return Expression(shape, constant, (*terms, *(() if result is None else result.terms)))
