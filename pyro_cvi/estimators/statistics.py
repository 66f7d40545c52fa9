"""sum over cells of W * E_q[expression], with W contracted beforehand: expected sufficient statistics.

    sum_cells W prod_i const_i prod_j component_j  =  < S, prod_j component_j >,
    S = the contraction of W and the constants over all axes that no component has.

With W the responsibilities of a mixture, S are the counts and weighted sums of the data; they change
only when the responsibilities do, so the continuous blocks never look at single data points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import Axes, Stat, const_operand, contract_to
from pyro_cvi.estimators.moments import Moments
from pyro_cvi.estimators.products import Component
from pyro_cvi.estimators.squares import SquareOfMean

__all__ = ["Gather", "Summed", "summed"]

Labelled = tuple[Tensor, Axes]
Terms = tuple[float, list[Labelled], list[Component]]
"""coefficient * product of constants and components."""


class Gather:
    """E_q of one statistic of a site outside of the Gaussian blocks, read through an index.

    Where every axis of the index selects along one axis of the site (`phi[z][:, word]`), only these
    selections are kept, and rows are moved as a whole.
    """

    def __init__(self, stat: Stat, position: int, shape: tuple[int, ...]) -> None:
        self.site, self.position, self.axes = stat.site.name, position, stat.axes
        self.cells = stat.shape
        self.shape = shape
        self.selections = _selections(stat.index, shape)
        self.index = stat.index if self.selections is None else None
        self.device = stat.index.device

    def flat(self, moments: Moments) -> Tensor:
        """All of the statistic, flattened."""
        return moments.other[self.site][self.position].reshape(-1)

    def __call__(self, moments: Moments) -> Tensor:
        flat = self.flat(moments)
        if self.index is not None:
            if flat.numel() == 1 and self.index.ndim == 0:
                return flat[0]
            return flat[self.index]
        assert self.selections is not None
        x = flat.reshape(self.shape)
        order = list(range(x.ndim))
        for d, (axis, select) in enumerate(self.selections):
            if select is not None:
                where = order.index(d)
                x = x.movedim(where, 0)
                order.insert(0, order.pop(where))
                x = x.select(0, int(select)) if axis is None else x.index_select(0, select)
                if axis is None:
                    order.pop(0)
            elif axis is None:
                where = order.index(d)
                x = x.squeeze(where)
                order.pop(where)
        axes = {self.selections[d][0]: i for i, d in enumerate(order)}
        return x.permute([axes[i] for i in range(len(self.cells))])

    def scattered(self, s: Tensor) -> Tensor:
        """The adjoint: sum of s over all cells that read each scalar; `s` has this component's axes."""
        size = math.prod(self.shape)
        if self.selections is None:
            assert self.index is not None
            values = s.expand(self.index.shape).reshape(-1)
            return s.new_zeros(size).index_add(0, self.index.reshape(-1), values)
        s = s.expand(self.cells)
        kept = [(d, a, c) for d, (a, c) in enumerate(self.selections) if a is not None]
        x = s.permute([a for _, a, _ in kept])
        for where, (d, _, select) in enumerate(kept):
            if select is not None:
                rows = x.movedim(where, 0)
                zeros = rows.new_zeros(self.shape[d], *rows.shape[1:])
                x = zeros.index_add_(0, select, rows).movedim(0, where)
        fixed = [0 if c is None else int(c) for a, c in self.selections if a is None]
        dims = [d for d, (a, _) in enumerate(self.selections) if a is None]
        if not any(self.shape[d] > 1 for d in dims):
            return x.reshape(-1) if not dims else _with_ones(x, dims).reshape(-1)
        result = x.new_zeros(self.shape)
        at: list[slice | int] = [slice(None)] * len(self.shape)
        for d, i in zip(dims, fixed, strict=True):
            at[d] = i
        result[tuple(at)] = x
        return result.reshape(-1)


def _with_ones(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in dims:
        x = x.unsqueeze(d)
    return x


Selection = tuple[int | None, Tensor | None]
"""For one axis of the site: the index's axis that moves along it (None: it stands still), and the
coordinates (None: all, in order)."""


def _selections(index: Tensor, shape: tuple[int, ...]) -> list[Selection] | None:
    """One selection for each axis of the site, or None where the index does not fall into them."""
    if index.numel() == 0 or not shape:
        return None
    n = index.ndim
    lines = [index[(0,) * i + (slice(None),) + (0,) * (n - 1 - i)] for i in range(n)]
    base = index.reshape(-1)[0].clone() if n == 0 else lines[0][0].clone()
    whole = base
    for i, line in enumerate(lines):
        whole = whole + (line - base).reshape([-1 if k == i else 1 for k in range(n)])
    if not torch.equal(whole, index):
        return None
    found: list[Selection] = []
    used: set[int] = set()
    stride = math.prod(shape)
    for size in shape:
        stride //= size
        coordinates = [line // stride % size for line in lines]
        moving = [i for i, c in enumerate(coordinates) if bool((c != c[0]).any())]
        if len(moving) > 1 or used & set(moving):
            return None
        if not moving:
            found.append((None, None if size == 1 else base // stride % size))
            continue
        (axis,) = moving
        used.add(axis)
        line = coordinates[axis].clone()
        every = line.numel() == size and bool(
            (line == torch.arange(size, device=line.device)).all()
        )
        found.append((axis, None if every else line))
    return found if all(i in used or index.shape[i] == 1 for i in range(n)) else None


@dataclass(frozen=True, eq=False)
class Summed:
    """constant + sum of < S, product of components >; an S that is None is one."""

    constant: Tensor
    terms: list[tuple[float, Labelled | None, list[Component]]]

    def __call__(self, moments: Moments) -> Tensor:
        total = self.constant
        for coefficient, s, components in self.terms:
            if s is not None and len(components) == 1 and isinstance(components[0], Gather):
                flat = components[0].flat(moments)
                dtype = torch.promote_types(flat.dtype, s[0].dtype)
                value = torch.dot(s[0].to(dtype), flat.to(dtype))
            else:
                pieces = [(c(moments), c.axes) for c in components]
                value = to_scalar(pieces if s is None else [s, *pieces])
            total = total + coefficient * value
        return total


def summed(
    constant: Tensor | float,
    terms: Sequence[Terms],
    weight: Tensor | float,
    shape: tuple[int, ...],
) -> Summed:
    """Contract the weight (right-aligned to `shape`) with the constants of every term."""
    factor, labelled = 1.0, []
    if isinstance(weight, Tensor):
        labelled = [_squeezed(weight)]
    else:
        factor = weight
    whole = [*labelled, *([_squeezed(constant)] if isinstance(constant, Tensor) else [])]
    number = factor if isinstance(constant, Tensor) else factor * constant
    total = _contracted(whole, (), number * _repeats(shape, _labels(whole)))
    result = []
    for coefficient, consts, components in _multiplied_out(terms, labelled):
        pieces = [*labelled, *consts]
        present, wanted = _labels(pieces), {a for c in components for a in c.axes}
        number = coefficient * factor * _repeats(shape, present | wanted)
        if not components:
            total = total + _contracted(pieces, (), number)
            continue
        axes = tuple(sorted(present & wanted))
        s = (contract_to(pieces, axes), axes) if pieces else None
        if len(components) == 1 and isinstance(components[0], Gather):
            s = _scattered(s, components[0])
        result.append((number, s, components))
    return Summed(total, result)


def _multiplied_out(terms: Sequence[Terms], weight: Sequence[Labelled]) -> Iterator[Terms]:
    """The terms, with squares as contractions where their cells need not be formed."""
    for term in terms:
        coefficient, consts, components = term
        squares = [c for c in components if isinstance(c, SquareOfMean)]
        rest = [c for c in components if not isinstance(c, SquareOfMean)]
        others = [*(axes for _, axes in (*weight, *consts)), *(c.axes for c in rest)]
        pieces = squares[0].multiplied_out(others) if len(squares) == 1 else None
        if pieces is None:
            yield term
            continue
        (square,) = squares
        for p in pieces:
            present = {a for axes in others for a in axes} | _labels(p.consts)
            present |= {a for c in p.components for a in c.axes}
            sizes = zip(square.axes, square.shape, strict=True)
            times = math.prod(n for a, n in sizes if a > 0 and a not in present)
            yield times * coefficient * p.coefficient, [*consts, *p.consts], [*rest, *p.components]


def _scattered(s: Labelled | None, gather: Gather) -> Labelled:
    """S over the cells of a gather as one over the scalars that it reads."""
    device = gather.device
    tensor, axes = (torch.ones((), dtype=torch.float64, device=device), ()) if s is None else s
    shape = [1 if a not in axes else tensor.shape[axes.index(a)] for a in gather.axes]
    order = [axes.index(a) for a in gather.axes if a in axes]
    return gather.scattered(tensor.permute(order).reshape(shape)), ()


def _squeezed(x: Tensor) -> Labelled:
    c = const_operand(x)
    return c.tensor, c.axes


def _labels(pieces: Sequence[Labelled]) -> set[int]:
    return {a for _, axes in pieces for a in axes}


def _contracted(pieces: Sequence[Labelled], target: Axes, number: float) -> Tensor:
    if not pieces or number == 0:
        return torch.tensor(number if not pieces else 0.0, dtype=torch.float64, device="cpu")
    return contract_to(pieces, target) * number


def _repeats(shape: tuple[int, ...], present: set[int]) -> float:
    """How often a value counts that is constant along some axes of the cells."""
    return float(math.prod(shape[d] for d in range(-len(shape), 0) if d not in present))


def to_scalar(pieces: Sequence[Labelled]) -> Tensor:
    """The full contraction."""
    if not any(axes for _, axes in pieces):
        result = pieces[0][0]
        for tensor, _ in pieces[1:]:
            result = result * tensor
        return result
    return contract_to(pieces, ())
