"""The value of an expression at a point: the plain meaning that every rule must keep."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import (
    Axes,
    Const,
    Expression,
    Group,
    Link,
    Operand,
    Stat,
    contract,
)

__all__ = ["OpaqueError", "apply_statistic", "evaluate", "operand_value", "point_reader"]

Reader = Callable[[Stat], Tensor]


class OpaqueError(ValueError):
    """The expression has a part whose value is not known from the sites."""


def evaluate(
    e: Expression, read: Reader, leaf: Callable[[Expression], Tensor | None] | None = None
) -> Tensor:
    """E with every statistic replaced by read(stat); right-aligned, size one where constant.

    `leaf(expression)` may give the value of a sub-expression at once (the nodes of a quadrature).
    """
    if leaf is not None:
        known = leaf(e)
        if known is not None:
            return known
    total: Tensor | None = None
    for t in e.terms:
        pieces = [(operand_value(o, read, leaf), o.axes) for o in t.operands]
        value = contract(_ragged(pieces), e.ndim) if leaf is None else _elementwise(pieces, e.ndim)
        value = value * t.coefficient if t.coefficient != 1 else value
        total = value if total is None else total + value
    if total is None:
        return e.constant if isinstance(e.constant, Tensor) else torch.tensor(e.constant)
    return total + e.constant if e.has_constant else total


def operand_value(
    o: Operand, read: Reader, leaf: Callable[[Expression], Tensor | None] | None = None
) -> Tensor:
    """The value of one operand, shaped as its axes (with leading node axes when `leaf` adds them)."""
    if isinstance(o, Const):
        return o.tensor
    if isinstance(o, Stat):
        return read(o)
    if isinstance(o, Group):
        return _full(evaluate(o.expression, read, leaf), o.expression.ndim, o.shape, leaf)
    if isinstance(o, Link):
        n = len(o.shape)
        values = [_pad(evaluate(a, read, leaf), n) for a in o.arguments]
        return _full(o.function(*values), n, o.shape, leaf)
    raise OpaqueError(o.reason)


def _pad(value: Tensor, ndim: int) -> Tensor:
    return value if value.ndim >= ndim else value.reshape((1,) * (ndim - value.ndim) + value.shape)


def _full(value: Tensor, ndim: int, shape: tuple[int, ...], leaf: object) -> Tensor:
    if leaf is None:
        return value.expand(shape)
    lead = value.shape[: max(value.ndim - ndim, 0)]
    return value.expand(*lead, *shape)


def _ragged(pieces: list[tuple[Tensor, Axes]]) -> list[tuple[Tensor, Axes]]:
    return pieces


def _elementwise(pieces: list[tuple[Tensor, Axes]], ndim: int) -> Tensor:
    """Products with a leading node axis: operands without contracted labels only."""
    result: Tensor | None = None
    for tensor, axes in pieces:
        lead = tensor.ndim - len(axes)
        order = sorted(range(len(axes)), key=lambda i: axes[i])
        tensor = tensor.permute(*range(lead), *(lead + i for i in order))
        sizes = iter(tensor.shape[lead:])
        shape = [next(sizes) if a in axes else 1 for a in range(-ndim, 0)]
        tensor = tensor.reshape(*tensor.shape[:lead], *shape)
        result = tensor if result is None else result * tensor
    assert result is not None
    return result


def apply_statistic(stat: Stat, values: Tensor) -> Tensor:
    """T(values) for one statistic."""
    kind, power = stat.statistic
    if kind == "log":
        return values.log()
    if kind == "log1m":
        return torch.log1p(-values)
    return values if power == 1 else values**power


def point_reader(values: dict[str, Tensor]) -> Reader:
    """Read statistics of the given site values."""

    def read(stat: Stat) -> Tensor:
        flat = values[stat.site.name].reshape(-1)
        return apply_statistic(stat, flat[stat.index])

    return read
