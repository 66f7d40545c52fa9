"""E[a b] of two multilinear expressions of Gaussian blocks, and its form for data that meets components.

    E[a b] = E a E b + Cov(a, b),        E a^2 = (E a)^2 + Var a.

In a mixture a = x_n - mu_k: the data varies along n, the mean along k, and the cells are all pairs. The
square is then taken apart, with the data centred (x' = x - s, m' = s - m),

    E a^2 = x'^2 + 2 x' m' + (m'^2 + Var a),

so that no tensor over all pairs of n, k and the coordinates is formed: with a precision P_kd, the sum
over coordinates is a matrix product. Centred and in float64 this loses no digits that matter: x' is as
large as the data's spread, not as its distance from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import Axes, contract_to
from pyro_cvi.estimators.affine import Affine, Covariance
from pyro_cvi.estimators.moments import Moments
from pyro_cvi.estimators.squares import FEW_CELLS, SquareOfMean

__all__ = ["Component", "Piece", "Product", "bilinear", "separated"]

_WORTH_IT = 1.5
"""How many times more cells there must be than data and components together."""
_MOST_SCALARS = 1 << 24
"""Largest product of two constants that is kept instead of being formed at each call."""


class Component(Protocol):
    """The expectation of some operands of a term, with the labels of its axes."""

    axes: Axes

    def __call__(self, moments: Moments) -> Tensor: ...


Piece = tuple[float, list[Component]]
"""coefficient * product of components; an expectation is a sum of these."""


class Product:
    """E[a b], cell by cell; squares are (E a)^2 + Var a, so they never lose their digits."""

    def __init__(
        self, a: Affine, b: Affine, cov: Covariance | None, axes: Axes, shape: tuple[int, ...]
    ) -> None:
        self.a, self.b, self.cov, self.axes, self.shape = a, b, cov, axes, shape

    def __call__(self, moments: Moments) -> Tensor:
        if self.cov is None:
            mean = self.a.mean(moments)
            return (mean * mean + self.a.variance(moments)).expand(self.shape)
        product = self.a.mean(moments) * self.b.mean(moments)
        return (product + self.cov(moments)).expand(self.shape)


def separated(product: Product) -> list[Piece] | None:
    """The product as pieces that vary along the data's axes or the components', None if it is no use."""
    ndim = len(product.axes)
    sides = [_Side.of(x, ndim) for x in (product.a, product.b)]
    if any(s is None for s in sides):
        return None
    a, b = (s for s in sides if s is not None)
    data, parts = a.data | b.data, a.parts | b.parts
    cells = _count(product.shape, data | parts)
    apart = _count(product.shape, data) + _count(product.shape, parts)
    if data <= parts or parts <= data or cells < _WORTH_IT * apart or cells < FEW_CELLS:
        return None
    axes = product.axes
    rest = _Rest(product.cov, a, b, axes, product.shape)
    first, second = a.constant(axes), b.constant(axes)
    if product.cov is None:
        square = _Fixed(first.tensor.square(), first.axes)
        return [(1.0, [square]), (2.0, [first, a.mean(axes)]), (1.0, [rest])]
    both: list[Component] = [first, second]
    labels = tuple(sorted({*first.axes, *second.axes}))
    if _count(product.shape, {x - ndim for x in map(axes.index, labels)}) <= _MOST_SCALARS:
        pieces = [(first.tensor, first.axes), (second.tensor, second.axes)]
        both = [_Fixed(contract_to(pieces, labels), labels)]
    return [
        (1.0, both),
        (1.0, [first, b.mean(axes)]),
        (1.0, [a.mean(axes), second]),
        (1.0, [rest]),
    ]


def bilinear(product: Product) -> list[Piece] | None:
    """The square of products of blocks (z @ W), with its variance left as contractions.

    sum_nd w_nd Var(sum_k z_nk w_dk) is a sum over small factors: which of them are multiplied first is
    for the contraction to choose, and cells of n and d need never be formed where the weight is
    constant.
    """
    if product.cov is not None or math.prod(product.shape) < FEW_CELLS:
        return None
    pairs = product.a.pairs()
    if not any(a > 0 for pair in pairs for _, axes in pair.pieces for a in axes):
        return None
    result: list[Piece] = [(1.0, [SquareOfMean(product.a, product.axes, product.shape)])]
    for pair in pairs:
        parts: list[Component] = [_Part(p, axes, product.axes) for p, axes in pair.pieces]
        result.append((pair.coefficient, parts))
    return result


class _Part:
    """One factor of a covariance, with the product's labels for its cells."""

    def __init__(self, piece: object, axes: Axes, labels: Axes) -> None:
        self.piece = piece
        self.axes = tuple(labels[a] if a < 0 else a for a in axes)

    def __call__(self, moments: Moments) -> Tensor:
        piece = self.piece
        return piece if isinstance(piece, Tensor) else piece(moments)  # type: ignore[operator]


def _count(shape: tuple[int, ...], dims: set[int] | frozenset[int]) -> int:
    return math.prod(shape[d] for d in dims)


class _Fixed:
    """A constant component."""

    def __init__(self, tensor: Tensor, axes: Axes) -> None:
        self.tensor, self.axes = tensor, axes

    def __call__(self, moments: Moments) -> Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class _Side:
    """a = x' + m' with x' the centred constant, along dims `data`, and m' along dims `parts`."""

    affine: Affine
    centred: Tensor
    centre: Tensor
    data: frozenset[int]
    parts: frozenset[int]
    ndim: int

    @staticmethod
    def of(affine: Affine, ndim: int) -> _Side | None:
        constant = affine.expression.constant
        if not isinstance(constant, Tensor) or constant.requires_grad or not constant.numel():
            return None
        wide = constant.reshape([1] * (ndim - constant.ndim) + list(constant.shape)).double()
        data = frozenset(d for d in range(-ndim, 0) if wide.shape[d] > 1)
        parts = affine.varying
        over = tuple(data - parts)
        centre = wide.mean(over, keepdim=True) if over else torch.zeros_like(wide)
        return _Side(affine, wide - centre, centre, data, parts, ndim)

    def constant(self, axes: Axes) -> _Fixed:
        """x' as a component."""
        kept = sorted(self.data)
        shape = [self.centred.shape[d] for d in kept]
        return _Fixed(self.centred.reshape(shape), tuple(axes[d] for d in kept))

    def mean(self, axes: Axes) -> _Mean:
        """E m' as a component."""
        return _Mean(self, axes)

    def values(self, moments: Moments) -> Tensor:
        """E m', with all of the product's dims."""
        m = self.affine.mean(moments, without_constant=True).double()
        return m.reshape([1] * (self.ndim - m.ndim) + list(m.shape)) + self.centre


class _Mean:
    def __init__(self, side: _Side, axes: Axes) -> None:
        self.side = side
        self.kept = sorted(side.parts | {d for d in side.data if side.centre.shape[d] > 1})
        self.axes = tuple(axes[d] for d in self.kept)

    def __call__(self, moments: Moments) -> Tensor:
        m = self.side.values(moments)
        return m.reshape([m.shape[d] for d in self.kept])


class _Rest:
    """E[m'_a m'_b] = E m'_a E m'_b + Cov(a, b)."""

    def __init__(
        self, cov: Covariance | None, a: _Side, b: _Side, axes: Axes, shape: tuple[int, ...]
    ) -> None:
        self.cov, self.a, self.b = cov, a, b
        self.kept = sorted({d for s in (a, b) for d in _Mean(s, axes).kept})
        self.axes = tuple(axes[d] for d in self.kept)
        self.shape = [shape[d] for d in self.kept]

    def __call__(self, moments: Moments) -> Tensor:
        m = self.a.values(moments)
        if self.cov is None:
            spread = self.a.affine.variance(moments)
            value = m * m + spread
        else:
            value = m * self.b.values(moments) + self.cov(moments)
        return value.reshape([value.shape[d] for d in self.kept]).expand(self.shape)
