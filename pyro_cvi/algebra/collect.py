"""Like terms are added up, and sums over single scalars of a site become one product.

A loop

    x_t = 0.9 x_{t-1} + mu + z_t    =    sum_s 0.9^(t-s) (mu + z_s)

would have t terms of mu and t of scalars of z, and T^2 when its turns are stacked. Terms that read the
same in the same cells are one, with the sum of their weights; many scalars of one site are the one term
sum_k w_k z[i_k]. Stacked rows of such sums are w_t z[i_t], where each row reads a few scalars, and
else sum_k W_tk z[i_k].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_cvi.algebra.contraction import Axes, align, contract_to
from pyro_cvi.algebra.expression import (
    FOLD_LIMIT,
    Const,
    Expression,
    SiteRef,
    Stat,
    Statistic,
    Term,
    fresh_label,
)

__all__ = ["collected", "rows_of_scalars"]

_MANY = 16
"""Scalars of a site, or rows of a stack, from which they are put together."""
_SMALL = 1 << 10
"""Most weights of a term that its constants are multiplied out to."""
_FEW = 4
"""Scalars of a site in a row, up to which each row has an index of its own."""
_MOST = 1 << 22
"""Most weights that are put together, cells by scalars."""

Source = tuple[SiteRef, Statistic]
Read = tuple[Stat, float, Const | None]
"""A term sum_k w_k z[i_k]: z, and what its weights are made of."""


def collected(e: Expression, like: Tensor) -> Expression:
    """The same with like terms added up; `like` is the value."""
    terms = _added(_with_one_weight(e.terms))
    if len(terms) >= _MANY:
        terms = _gathered(terms, e.shape, like)
    return e if terms is e.terms else Expression(e.shape, e.constant, terms, e.sites)


# --- like terms ------------------------------------------------------------------------------------


def _with_one_weight(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Terms with their constants multiplied together, and summed, where what comes of it is small.

    Without it, matrices that a recursion multiplies by would pile up, and no two terms be alike.
    """
    found = tuple([_one_weight(t) if len(t.operands) > 2 else t for t in terms])
    same = all(a is b for a, b in zip(found, terms, strict=True))
    return terms if same else found


def _one_weight(t: Term) -> Term:
    consts = [o for o in t.operands if isinstance(o, Const)]
    others = [o for o in t.operands if not isinstance(o, Const)]
    if len(consts) < 2 or not others:
        return t
    sizes = {a: n for o in consts for a, n in zip(o.axes, o.shape, strict=True)}
    read = {a for o in others for a in o.axes}
    axes = tuple(sorted(a for a in sizes if a < 0 or a in read))
    if math.prod(sizes[a] for a in axes) > _SMALL or math.prod(sizes.values()) > FOLD_LIMIT:
        return t
    tensor = contract_to([(o.tensor, o.axes) for o in consts], axes)
    return Term(t.coefficient, (Const(tensor, axes), *others))


def _added(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    groups: dict[object, list[Term]] = {}
    for t in terms:
        groups.setdefault(t if t.reads is None else t.reads, []).append(t)
    if len(groups) == len(terms):
        return terms
    return tuple(t for alike in groups.values() for t in _as_one(alike))


def _as_one(alike: Sequence[Term]) -> Sequence[Term]:
    """Terms that read the same, with the sum of their weights; as they are where that is large."""
    if len(alike) == 1:
        return alike
    first = alike[0]
    weights = [_weight(t, first) for t in alike]
    sizes = {a: n for w in weights if w is not None for a, n in zip(w.axes, w.shape, strict=True)}
    if all(w is None for w in weights):
        return [Term(sum(t.coefficient for t in alike), first.operands)]
    if math.prod(sizes.values()) > FOLD_LIMIT:
        return alike
    axes = tuple(sorted(sizes))
    total: Tensor | float = 0.0
    for t, w in zip(alike, weights, strict=True):
        own = 1.0 if w is None else align(w.tensor, w.axes, axes)
        total = total + t.coefficient * own
    assert isinstance(total, Tensor)
    others = (o for o in first.operands if not isinstance(o, Const))
    return [Term(1.0, (Const(total, axes), *others))]


def _weight(t: Term, like: Term) -> Const | None:
    """The constant of a term, with the labels of a term that reads the same."""
    names = dict(zip(_labels_in_order(t), _labels_in_order(like), strict=True))
    for o in t.operands:
        if isinstance(o, Const):
            return Const(o.tensor, tuple(names.get(a, a) for a in o.axes))
    return None


def _labels_in_order(t: Term) -> list[int]:
    """The contracted labels, in the order in which what is no constant has them."""
    read = (o for o in t.operands if not isinstance(o, Const))
    return list(dict.fromkeys(a for o in read for a in o.axes if a > 0))


# --- single scalars --------------------------------------------------------------------------------


def _read(t: Term, cells: Axes) -> Read | None:
    """What a term reads, if it is a sum over scalars of one site, weighted in these cells."""
    if len(t.operands) > 2:
        return None
    stat, const = t.operands[-1], t.operands[0]
    if not isinstance(stat, Stat) or len(stat.axes) > 1 or not all(a > 0 for a in stat.axes):
        return None
    if len(t.operands) == 1:
        return stat, t.coefficient, None
    if not isinstance(const, Const) or const.tensor.requires_grad:
        return None
    return (stat, t.coefficient, const) if {*const.axes} <= {*stat.axes, *cells} else None


def _weights(read: Read, cells: Axes, sizes: Sequence[int], like: Tensor) -> Tensor:
    """The weights of each scalar in each cell, (scalars, cells)."""
    stat, coefficient, const = read
    one = torch.full((), coefficient, dtype=like.dtype, device=like.device)
    if const is not None:
        one = one * align(const.tensor.to(like.dtype), const.axes, (*stat.axes, *cells))
    return one.expand((*stat.shape, *sizes)).reshape(stat.index.numel(), math.prod(sizes))


def _gathered(terms: tuple[Term, ...], shape: tuple[int, ...], like: Tensor) -> tuple[Term, ...]:
    """The terms, with those of many scalars of one site as few."""
    cells = tuple(a for a in range(-len(shape), 0) if shape[a] != 1)
    sizes = [shape[a] for a in cells]
    found: dict[Source, list[tuple[Term, Read]]] = {}
    rest = []
    for t in terms:
        read = _read(t, cells)
        if read is None:
            rest.append(t)
        else:
            found.setdefault((read[0].site, read[0].statistic), []).append((t, read))
    changed = False
    for source, members in found.items():
        reads = sum(r[0].index.numel() for _, r in members)
        if len(members) < _MANY or reads * math.prod(sizes) > _MOST:
            rest += [t for t, _ in members]
            continue
        changed = True
        scalars = torch.cat([r[0].index.reshape(-1) for _, r in members])
        weights = torch.cat([_weights(r, cells, sizes, like) for _, r in members])
        scalars, where = torch.unique(scalars, return_inverse=True)
        table = weights.new_zeros(len(scalars), weights.shape[1]).index_add(0, where, weights)
        rest += _from_table(source, scalars, table, cells, sizes)
    return tuple(rest) if changed else terms


def rows_of_scalars(
    parts: Sequence[Expression], axis: int, like: Tensor
) -> tuple[list[Term], list[Expression]]:
    """The sums over scalars in the rows of a stack, along `axis`, and what else is in the rows.

    None where the rows are few, or no scalars.
    """
    if len(parts) < _MANY or any(math.prod(e.shape) != 1 for e in parts):
        return [], list(parts)
    found: dict[Source, list[tuple[int, Read]]] = {}
    rest = []
    for row, e in enumerate(parts):
        others = []
        for t in e.terms:
            read = _read(t, ())
            if read is None:
                others.append(t)
            else:
                found.setdefault((read[0].site, read[0].statistic), []).append((row, read))
        rest.append(Expression(e.shape, e.constant, tuple(others)))
    terms: list[Term] = []
    for source, members in found.items():
        each = [r[0].index.reshape(-1) for _, r in members]
        rows = torch.tensor([row for row, _ in members], device=like.device)
        rows = rows.repeat_interleave(torch.tensor([len(x) for x in each], device=like.device))
        scalars, where = torch.unique(torch.cat(each), return_inverse=True)
        if len(scalars) * len(parts) > _MOST:
            return [], list(parts)
        weights = torch.cat([_weights(r, (), (), like).reshape(-1) for _, r in members])
        table = weights.new_zeros(len(scalars), len(parts))
        table = table.index_put((where, rows), weights, accumulate=True)
        terms += _from_table(source, scalars, table, (axis,), [len(parts)])
    return terms, rest


def _from_table(
    source: Source, scalars: Tensor, table: Tensor, cells: Axes, sizes: Sequence[int]
) -> list[Term]:
    """sum_k table_kc z[scalars_k] in each cell c, with an index of its own where a cell reads few."""
    is_read = table != 0
    most = int(is_read.sum(0).max())
    if not cells or most > _FEW:
        label = fresh_label()
        weights = table.reshape(len(scalars), *sizes)
        stat = Stat(*source, scalars, (label,))
        return [Term(1.0, (Const(weights, (label, *cells)), stat))]
    order = is_read.to(torch.int8).argsort(dim=0, descending=True, stable=True)[: max(most, 1)]
    weights, index = table.gather(0, order), scalars[order]
    index = torch.where(
        weights != 0, index, index[0]
    )  # a cell that reads fewer reads one once more
    terms = []
    for w, i in zip(weights, index, strict=True):
        same = bool((i == i[0]).all())
        stat = Stat(*source, i[0] if same else i.reshape(sizes), () if same else cells)
        terms.append(Term(1.0, (Const(w.reshape(sizes), cells), stat)))
    return terms
