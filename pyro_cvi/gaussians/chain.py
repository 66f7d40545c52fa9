"""Precisions that are block tridiagonal with a border: chains of small nodes, and scalars all share.

        [ D_1  E_1            F_1 ]
        [ E_1' D_2  E_2       F_2 ]         B such chains of T nodes with d scalars each; g shared
    S = [      E_2' D_3  ...  F_3 ]         scalars in the border, whose own block is G.
        [           ...           ]
        [ F_1' F_2' F_3  ...  G   ]

Odd nodes are eliminated at once, then every second of those that are left, and so on: log2(T) batched
steps, O(B T (d + g)^3) operations. The covariances of neighbours and with the border come back in the
opposite order. With T = 1 the chains are single nodes, and S is an arrow.

Source: R. A. Sweet (1974) for block cyclic reduction; for the covariances of a sparse precision
K. Takahashi et al. (1973), by elimination in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Blocks", "Cumulation", "Factorised", "Pattern"]


@dataclass(frozen=True, eq=False)
class Cumulation:
    """The scalars z of some sites held as their cumulative sums s along an axis: z = D s, s = D^-1 z.

    `before` (D,) is the scalar that is subtracted from each, -1 for none; `parts` has the scalars of
    each site in the order of its shape, and the axis.
    """

    before: Tensor
    parts: tuple[tuple[Tensor, int], ...]

    @staticmethod
    def of(size: int, sites: Sequence[tuple[Tensor, tuple[int, ...], int]]) -> Cumulation:
        """For sites given by their scalars, shape and axis, among so many scalars in all."""
        parts = tuple((flat.reshape(shape), axis) for flat, shape, axis in sites)
        before = torch.full((size,), -1, device=sites[0][0].device)
        for at, axis in parts:
            n = at.shape[axis] - 1
            before[at.narrow(axis, 1, n)] = at.narrow(axis, 0, n)
        return Cumulation(before, parts)

    def sums(self, z: Tensor) -> Tensor:
        """D^-1 z along the last axis."""
        s = z.clone()
        for at, axis in self.parts:
            s[..., at] = z[..., at].cumsum(axis - at.ndim)
        return s

    def values(self, s: Tensor) -> Tensor:
        """D s along the last axis."""
        has = self.before >= 0
        z = s.clone()
        z[..., has] -= s[..., self.before[has]]
        return z

    def later(self, u: Tensor) -> Tensor:
        """D^-T u along the last axis: of each scalar, what the sums from it on have."""
        z = u.clone()
        for at, axis in self.parts:
            own = axis - at.ndim
            z[..., at] = u[..., at].flip(own).cumsum(own).flip(own)
        return z

    def dual(self, u: Tensor) -> Tensor:
        """D^T u along the last axis: u^T z = (D^T u)^T s."""
        has = self.before >= 0
        return u.index_add(-1, self.before[has], -u[..., has])


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where the scalars of a block stand: `count` chains of `steps` nodes of width `node`, and a border.

    `place` (D,) is (chain * steps + step) * node + position, or -1 - its place in the border. Nodes with
    fewer scalars than others are filled up. A view is two consecutive nodes (one, in chains of one
    step) and the border. With `coordinates` what stands there are cumulative sums of the scalars.
    """

    count: int
    steps: int
    node: int
    border: int
    place: Tensor
    coordinates: Cumulation | None = None

    @property
    def views(self) -> int:
        """The number of views."""
        return self.count * max(self.steps - 1, 1)

    @property
    def width(self) -> int:
        """The scalars of a view."""
        return (2 if self.steps > 1 else 1) * self.node + self.border

    @property
    def cost(self) -> float:
        """Operations of a factorisation and of its covariances, roughly."""
        return 8.0 * self.views * self.width**3 + float(self.border) ** 3

    @cached_property
    def filled(self) -> Tensor:
        """1 for places that no scalar has, (count, steps, node)."""
        free = torch.ones(self.count * self.steps * self.node, device=self.place.device)
        free[self.place[self.place >= 0]] = 0.0
        return free.reshape(self.count, self.steps, self.node)

    def view_of(self, scalars: Tensor) -> Tensor:
        """The view that holds all scalars of each row (cells, k), shape (cells,)."""
        place = self.place[scalars]
        node = torch.where(place >= 0, place // self.node, torch.iinfo(torch.long).max).amin(1)
        chain, step = node // self.steps, node % self.steps
        view = chain * max(self.steps - 1, 1) + step.clamp(max=max(self.steps - 2, 0))
        return torch.where((place >= 0).any(1), view, torch.zeros_like(view))

    def position_in(self, view: Tensor, scalars: Tensor) -> Tensor:
        """The position of scalars in views that hold them."""
        place = self.place[scalars]
        per_chain = max(self.steps - 1, 1)
        first = (view // per_chain) * self.steps + view % per_chain
        inside = place - first * self.node
        return torch.where(place >= 0, inside, self.width - self.border - 1 - place)

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Values (*lead, D) in block order as (*lead, count, steps, node) and (*lead, border)."""
        return self.placed(z if self.coordinates is None else self.coordinates.sums(z))

    def dual(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients (*lead, D) of the values, as coefficients of what stands in the nodes."""
        return self.placed(u if self.coordinates is None else self.coordinates.dual(u))

    def values(self, nodes: Tensor, border: Tensor) -> Tensor:
        """The inverse of `split`."""
        s = self.taken(nodes, border)
        return s if self.coordinates is None else self.coordinates.values(s)

    def placed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(*lead, D), one number for what each scalar stands for, in its place."""
        lead = x.shape[:-1]
        nodes = x.new_zeros(*lead, self.count * self.steps * self.node)
        inside = self.place >= 0
        nodes[..., self.place[inside]] = x[..., inside]
        border = x.new_zeros(*lead, self.border)
        border[..., -1 - self.place[~inside]] = x[..., ~inside]
        return nodes.reshape(*lead, self.count, self.steps, self.node), border

    def taken(self, nodes: Tensor, border: Tensor) -> Tensor:
        """The inverse of `placed`."""
        flat = nodes.reshape(*nodes.shape[:-3], -1)
        inside = self.place >= 0
        result = flat.new_empty(*flat.shape[:-1], len(self.place))
        result[..., inside] = flat[..., self.place[inside]]
        result[..., ~inside] = border[..., -1 - self.place[~inside]]
        return result


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a symmetric matrix of this form, or of its inverse: those on the pattern.

    Shapes: `node` (B, T, d, d), `step` (B, T - 1, d, d), `edge` (B, T, d, g), `border` (g, g).
    """

    node: Tensor
    step: Tensor
    edge: Tensor
    border: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All four."""
        return self.node, self.step, self.edge, self.border

    def towards(self, other: Blocks, rho: float) -> Blocks:
        """self + rho (other - self)."""
        if rho == 1:
            return other
        return Blocks(
            *(a + rho * (b - a) for a, b in zip(self.tensors, other.tensors, strict=True))
        )

    def trace(self, other: Blocks) -> Tensor:
        """sum of the products of all entries on the pattern: tr(S V) of a precision and a covariance."""
        twice = (self.step * other.step).sum() + (self.edge * other.edge).sum()
        return (self.node * other.node).sum() + 2 * twice + (self.border * other.border).sum()

    def between(self, node: Tensor, at: Tensor, earlier: Tensor, there: Tensor) -> Tensor:
        """Entries of positions `at` of nodes with positions of the same nodes, or of those before them.

        Nodes are counted through all chains.
        """
        steps = self.node.shape[1]
        chain, t, s = node // steps, node % steps, earlier % steps
        same = self.node[chain, t, at, there]
        if not self.step.shape[1]:
            return same
        return torch.where(t == s, same, self.step[chain, s.clamp(max=steps - 2), there, at])

    def times(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """S (x, b), for (*lead, B, T, d) and (*lead, g)."""
        y = (self.node @ x.unsqueeze(-1)).squeeze(-1)
        y = y + torch.einsum("btdg,...g->...btd", self.edge, b)
        if self.step.shape[1]:
            right = (self.step @ x[..., 1:, :].unsqueeze(-1)).squeeze(-1)
            left = (self.step.mT @ x[..., :-1, :].unsqueeze(-1)).squeeze(-1)
            y = torch.cat([y[..., :-1, :] + right, y[..., -1:, :]], -2)
            y = torch.cat([y[..., :1, :], y[..., 1:, :] + left], -2)
        own = torch.einsum("btdg,...btd->...g", self.edge, x)
        return y, own + (self.border @ b.unsqueeze(-1)).squeeze(-1)


class _Level(NamedTuple):
    """What eliminating the odd nodes of one level leaves: factors, and weights on their neighbours."""

    factor: Tensor
    inverse: Tensor
    left: Tensor
    right: Tensor
    edge: Tensor
    nodes: int


class Factorised:
    """The elimination of a precision, if it is positive definite."""

    def __init__(self, precision: Blocks) -> None:
        self.levels: list[_Level] = []
        self.proper = True
        node, step, edge, border = precision.tensors
        while node.shape[1] > 1:
            node, step, edge, border = self._halved(node, step, edge, border)
        factor = self._cholesky(node)
        inverse = _inverse(factor)
        weight = inverse @ edge
        border = border - (edge.mT @ weight).sum((0, 1))
        self.last = _Level(factor, inverse, weight, weight, weight, 1)
        self.border = self._cholesky(border)

    def _cholesky(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 1 and x.ndim > 2:  # scalars by the hundred thousand: no calls of LAPACK
            self.proper = self.proper and bool((x > 0).all()) and bool(x.isfinite().all())
            return x.clamp(min=0).sqrt()
        found = torch.linalg.cholesky_ex(x)
        self.proper = self.proper and not bool(found.info.any()) and bool(found.L.isfinite().all())
        return found.L

    def _halved(
        self, node: Tensor, step: Tensor, edge: Tensor, border: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = node.shape[1]
        factor = self._cholesky(node[:, 1::2])
        to_left = step[:, ::2].mT  # S between an odd node and the one before it
        to_right = step[:, 1::2]
        if count % 2 == 0:  # the last odd node has no right neighbour
            to_right = torch.cat([to_right, torch.zeros_like(to_left[:, :1])], 1)
        own = edge[:, 1::2]
        inverse = _inverse(factor)
        left, right, rest = inverse @ to_left, inverse @ to_right, inverse @ own
        self.levels.append(_Level(factor, inverse, left, right, rest, count))
        n = (count + 1) // 2
        new_node, new_edge = node[:, ::2].clone(), edge[:, ::2].clone()
        k = left.shape[1]  # odd nodes; those with a right neighbour are the first n - 1
        new_node[:, :k] -= to_left.mT @ left
        new_node[:, 1:] -= to_right[:, : n - 1].mT @ right[:, : n - 1]
        new_edge[:, :k] -= to_left.mT @ rest
        new_edge[:, 1:] -= to_right[:, : n - 1].mT @ rest[:, : n - 1]
        new_step = -(to_left.mT @ right)[:, : n - 1]
        return new_node, new_step, new_edge, border - (own.mT @ rest).sum((0, 1))

    @cached_property
    def log_det(self) -> Tensor:
        """log det S."""
        factors = [*(level.factor for level in self.levels), self.last.factor, self.border]
        return 2 * torch.stack([f.diagonal(dim1=-2, dim2=-1).log().sum() for f in factors]).sum()

    def solve(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """S^-1 (x, b), for (B, T, d, k) and (g, k)."""
        odd = []
        for level in self.levels:
            own, n = x[:, 1::2], (level.nodes + 1) // 2
            odd.append(own)
            k = own.shape[1]
            b = b - (level.edge.mT @ own).sum((0, 1))
            x = x[:, ::2].clone()
            x[:, :k] -= level.left.mT @ own
            x[:, 1:] -= level.right[:, : n - 1].mT @ own[:, : n - 1]
        b = b - (self.last.edge.mT @ x).sum((0, 1))
        b = torch.cholesky_solve(b, self.border)
        x = self.last.inverse @ x - self.last.edge @ b
        for level, own in zip(reversed(self.levels), reversed(odd), strict=True):
            value = level.inverse @ own
            x = _interleaved(x, value - _weighted(level, x) - level.edge @ b)
        return x, b

    def covariance(self) -> Blocks:
        """The blocks of S^-1 on the pattern."""
        border = torch.cholesky_inverse(self.border)
        edge = -self.last.edge @ border
        node = self.last.inverse - edge @ self.last.edge.mT
        step = node[:, :0]
        for level in reversed(self.levels):
            k, n = level.left.shape[1], node.shape[1]
            some = slice(0, n - 1)
            to_left = level.left @ node[:, :k]
            to_left[:, some] += level.right[:, some] @ step.mT
            to_right = level.left[:, some] @ step + level.right[:, some] @ node[:, 1:]
            own_edge = _weighted(level, edge)
            if border.numel():
                to_left += level.edge @ edge[:, :k].mT
                to_right += level.edge[:, some] @ edge[:, 1:].mT
                own_edge += level.edge @ border
            own = level.inverse + to_left @ level.left.mT
            own[:, some] += to_right @ level.right[:, some].mT
            if border.numel():
                own += own_edge @ level.edge.mT
            to_left, to_right, own_edge = -to_left, -to_right, -own_edge
            node, edge = _interleaved(node, own), _interleaved(edge, own_edge)
            step = _interleaved(to_left.mT, to_right)
        return Blocks((node + node.mT) / 2, step, edge, border)

    def draw(self) -> tuple[Tensor, Tensor]:
        """One draw from N(0, S^-1): (B, T, d) and (g,)."""
        b = _noise(self.border)
        x = _noise(self.last.factor) - (self.last.edge @ b)
        for level in reversed(self.levels):
            value = _noise(level.factor)
            mean = _weighted(level, x.unsqueeze(-1)).squeeze(-1) + level.edge @ b
            x = _interleaved(x, value - mean)
        return x, b


def _inverse(factor: Tensor) -> Tensor:
    """(L L^T)^-1 of small matrices."""
    if factor.shape[-1] == 1:
        return factor.square().reciprocal()
    result: Tensor = torch.cholesky_inverse(factor)
    return result


def _noise(factor: Tensor) -> Tensor:
    """N(0, (L L^T)^-1)."""
    noise = torch.randn(*factor.shape[:-1], 1, dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor.mT, noise, upper=True).squeeze(-1)


def _weighted(level: _Level, x: Tensor) -> Tensor:
    """left x_(i-1) + right x_(i+1) of the odd nodes i, for the even nodes' (B, n, d, k)."""
    k, n = level.left.shape[1], x.shape[1]
    total = level.left @ x[:, :k]
    total[:, : n - 1] += level.right[:, : n - 1] @ x[:, 1:]
    return total


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Along axis 1: even_0, odd_0, even_1, ..."""
    shape = (even.shape[0], even.shape[1] + odd.shape[1], *even.shape[2:])
    result = even.new_empty(shape)
    result[:, ::2], result[:, 1::2] = even, odd
    return result
