"""(E a)^2 of a sum of products of blocks, summed over cells that are never formed.

    sum_nd (x_nd - sum_k z_nk w_dk)^2 = sum x^2 - 2 <x, z w^T> + <z^T z, w^T w>,

a cost of N D K in matrix products, against several passes over N x D numbers. This is a sum of all
cells alike: it serves where no weight and no other factor varies along two of the square's axes.

Multiplied out a square loses the digits of (distance from zero / residual)^2. The data is therefore
centred, where the sum holds an intercept that takes the centre up, and all is done in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import Axes, Const, Stat, Term, contract, fresh_label
from pyro_cvi.estimators.affine import Affine, Design, Reader, Selection, TermMean, read_loc
from pyro_cvi.estimators.moments import Moments

__all__ = ["FEW_CELLS", "Piece", "SquareOfMean"]

FEW_CELLS = 4096
"""A square of fewer cells is formed cell by cell."""
_WORTH_IT = 1.5
"""How many times more cells there must be than numbers in the factors of a product."""

Labelled = tuple[Tensor, Axes]


class SquareOfMean:
    """(E a)^2, and the variance that comes from designs, over labelled cells."""

    def __init__(self, affine: Affine, axes: Axes, shape: tuple[int, ...]) -> None:
        self.affine, self.axes, self.shape = affine, axes, shape

    def __call__(self, moments: Moments) -> Tensor:
        mean = self.affine.mean(moments)
        square = mean * mean + self.affine.variance(moments, without_pairs=True)
        return square.expand(self.shape)

    def multiplied_out(self, others: Iterable[Axes]) -> list[Piece] | None:
        """The square as a sum of contractions; None where that would not be cheaper.

        `others` are the axes of all that the square is multiplied by.
        """
        cells = set(self.axes)
        if any(len(cells & set(axes)) > 1 for axes in others):
            return None
        return self._pieces

    @cached_property
    def _pieces(self) -> list[Piece] | None:
        affine, cells = self.affine, math.prod(self.shape)
        constant = affine.expression.constant
        if _is_learnt(affine):
            return None
        products: list[Piece] = []
        flat: dict[Axes, _Flat] = {}
        for d in affine.designs:
            axes = self._labels(d.axes)
            flat.setdefault(axes, _Flat(self, axes)).designs.append(d)
        for t in affine.terms:
            axes = self._labels(a for a in t.labels if a < 0)
            if self._size(axes) > _WORTH_IT * sum(math.prod(o.shape) for o in t.operands):
                products.append(self._product(t))
            else:
                part = flat.setdefault(axes, _Flat(self, axes))
                part.means.append(TermMean(t, affine.structure))
        if not products or any(_WORTH_IT * self._size(axes) > cells for axes in flat):
            return None
        parts = products + [Piece(1.0, [], [f]) for f in flat.values()]
        data = self._centred(constant, flat.values())
        if data is not None:
            parts.append(data)
        result = [
            s.times(t, 1.0 if s is t else 2.0, self.axes)
            for i, s in enumerate(parts)
            for t in parts[i:]
        ]
        spread = [_Spread(d, self._labels(d.axes)) for d in affine.designs]
        return result + [Piece(1.0, [], [v]) for v in spread]

    def _labels(self, axes: Iterable[int]) -> Axes:
        """The labels of some output axes of the affine expression."""
        return tuple(self.axes[a] for a in sorted(axes))

    def _size(self, axes: Axes) -> int:
        return math.prod(n for a, n in zip(self.axes, self.shape, strict=True) if a in axes)

    def _product(self, t: Term) -> Piece:
        consts: list[Labelled] = []
        components: list[Any] = []
        for o in t.operands:
            axes = tuple(self.axes[a] if a < 0 else a for a in o.axes)
            if isinstance(o, Const):
                consts.append((o.tensor.double(), axes))
            elif isinstance(o, Stat):
                components.append(_Read(read_loc(o, self.affine.structure), axes))
        return Piece(t.coefficient, consts, components)

    def _centred(self, constant: Tensor | float, flat: Iterable[_Flat]) -> Piece | None:
        """The constant; its means along the axes that a flat part lacks go over to that part."""
        if not isinstance(constant, Tensor):
            return None if constant == 0 else Piece(constant, [], [])
        wide = constant.double()
        wide = wide.reshape([1] * (len(self.axes) - wide.ndim) + list(wide.shape))
        for part in flat:
            over = [i for i, a in enumerate(self.axes) if a not in part.axes]
            part.centre = wide.mean(over, keepdim=True) if over else 0.0
            wide = wide - part.centre
        kept = tuple(a for a, n in zip(self.axes, wide.shape, strict=True) if n > 1)
        return Piece(1.0, [(wide.reshape([n for n in wide.shape if n > 1]), kept)], [])


def _is_learnt(affine: Affine) -> bool:
    """Whether some constant has a gradient."""
    found = [affine.expression.constant]
    found += [d.matrix if isinstance(d, Design) else d.weight for d in affine.designs]
    found += [o.tensor for t in affine.terms for o in t.operands if isinstance(o, Const)]
    return any(isinstance(x, Tensor) and x.requires_grad for x in found)


class _Component:
    """Some numbers at given moments, with the labels of their axes."""

    axes: Axes

    def __call__(self, moments: Moments) -> Tensor:
        raise NotImplementedError

    def relabelled(self, mapping: dict[int, int]) -> _Component:
        """The same with other labels."""
        found = copy.copy(self)
        found.axes = tuple(mapping.get(a, a) for a in self.axes)
        return found


class _Read(_Component):
    """E of one Gaussian statistic."""

    def __init__(self, read: Reader, axes: Axes) -> None:
        self.read, self.axes = read, axes

    def __call__(self, moments: Moments) -> Tensor:
        return self.read(moments).double()


class _Flat(_Component):
    """The part of E a that varies along `axes` only."""

    def __init__(self, square: SquareOfMean, axes: Axes) -> None:
        self.square, self.axes = square, axes
        self.designs: list[Design | Selection] = []
        self.means: list[TermMean] = []
        self.centre: Tensor | float = 0.0

    def __call__(self, moments: Moments) -> Tensor:
        labels, ndim = self.square.axes, self.square.affine.ndim
        total: Tensor | float = 0.0
        for d in self.designs:
            total = contract([(d.loc(moments).double(), d.axes)], ndim) + total
        for t in self.means:
            total = t(moments, ndim).double() + total
        value = torch.as_tensor(total, dtype=torch.float64) + self.centre
        return value.reshape(
            [n for a, n in zip(labels, value.shape, strict=True) if a in self.axes]
        )


class _Spread(_Component):
    """The variance of a design."""

    def __init__(self, design: Design | Selection, axes: Axes) -> None:
        self.design, self.axes = design, axes

    def __call__(self, moments: Moments) -> Tensor:
        value = self.design.variance(moments)
        return value.permute(sorted(range(value.ndim), key=self.design.axes.__getitem__))


class Piece(NamedTuple):
    """coefficient * product of constants and components."""

    coefficient: float
    consts: list[Labelled]
    components: list[Any]

    def times(self, other: Piece, weight: float, cells: Axes) -> Piece:
        """weight * self * other; what `other` sums over itself gets labels of its own."""
        labels = {a for _, axes in other.consts for a in axes}
        labels |= {a for c in other.components for a in c.axes}
        mapping = {a: fresh_label() for a in labels if a not in cells}
        consts = [(t, tuple(mapping.get(a, a) for a in axes)) for t, axes in other.consts]
        return Piece(
            weight * self.coefficient * other.coefficient,
            self.consts + consts,
            self.components + [c.relabelled(mapping) for c in other.components],
        )
