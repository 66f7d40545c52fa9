"""The value of an expression at a point: the plain meaning that every rule must keep."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import (
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


def evaluate(e: Expression, read: Reader) -> Tensor:
    """E with every statistic replaced by read(stat); right-aligned, size one where constant."""
    total: Tensor | None = None
    for t in e.terms:
        value = contract([(operand_value(o, read), o.axes) for o in t.operands], e.ndim)
        value = value * t.coefficient if t.coefficient != 1 else value
        total = value if total is None else total + value
    if total is None:
        return (
            e.constant if isinstance(e.constant, Tensor) else torch.tensor(e.constant, device="cpu")
        )
    return total + e.constant if e.has_constant else total


def operand_value(o: Operand, read: Reader) -> Tensor:
    """The value of one operand, shaped as its axes."""
    if isinstance(o, Const):
        return o.tensor
    if isinstance(o, Stat):
        return read(o)
    if isinstance(o, Group):
        return evaluate(o.expression, read).expand(o.shape)
    if isinstance(o, Link):
        return o.function(*(evaluate(a, read) for a in o.arguments)).expand(o.shape)
    raise OpaqueError(o.reason.text)


def apply_statistic(stat: Stat, values: Tensor) -> Tensor:
    """T(values) for one statistic; the log-determinant is that of matrices (..., d, d)."""
    kind, power = stat.statistic
    if kind == "logdet":
        return torch.logdet(values)
    if kind == "log":
        return values.log()
    if kind == "log1m":
        return torch.log1p(-values)
    return values if power == 1 else values**power


def point_reader(values: dict[str, Tensor]) -> Reader:
    """Read statistics of the given site values."""

    def read(stat: Stat) -> Tensor:
        value = values[stat.site.name]
        if stat.statistic.kind == "cumulated":
            sums = value.reshape(stat.site.shape).cumsum(int(stat.statistic.power))
            return sums.reshape(-1)[stat.index]
        if stat.statistic.kind == "logdet":
            return apply_statistic(stat, value.reshape(-1, *value.shape[-2:]))[stat.index]
        flat = value.reshape(-1)
        if stat.index.numel() > flat.numel():
            return apply_statistic(stat, flat)[stat.index]
        return apply_statistic(stat, flat[stat.index])

    return read
