"""Beliefs of large Gaussian blocks, seen by the factors through small groups of their scalars.

A dense Gaussian of D scalars costs D^2 numbers and D^3 operations a step. Here the factors read a
block through *views*: small groups of linear forms whose means and covariances are the leaves of the
belief. Messages are gradients in these, so they are as small; what remains is to assemble the precision
from them and to find the views' moments again, which is each structure's own matter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_cvi.gaussians.chain import Blocks, Factorised, Pattern
from pyro_cvi.gaussians.process import LowRank, Predictors
from pyro_cvi.linalg import or_zeros, symmetrise
from pyro_cvi.updates import AbstractBelief, Step, marginal_shift

__all__ = ["ChainBelief", "ProcessBelief", "StructuredBelief"]

_HALVINGS = 30


class StructuredBelief(AbstractBelief):
    """A joint Gaussian of D scalars with a structured precision.

    Leaves are (loc, cov) of each group of views: (count, width) and (count, width, width).
    """

    @abstractmethod
    def marginals(self) -> tuple[Tensor, Tensor]:
        """Means and variances of all scalars, (D,) and (D,)."""

    @abstractmethod
    def covariance(self, index: Tensor) -> Tensor:
        """The covariance matrix of some scalars, (k, k)."""

    @abstractmethod
    def draw(self) -> Tensor:
        """One draw of all scalars, (D,)."""

    @abstractmethod
    def quadratic(self, change: Tensor) -> Tensor:
        """d^T S d of rows d, (..., D)."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """log det S."""

    @abstractmethod
    def narrowed(self, factor: float) -> StructuredBelief:
        """The same means with all precisions (of scalars and views) times the factor."""

    @abstractmethod
    def touched(self, gradient: Sequence[Tensor | None]) -> Tensor:
        """Whether a gradient in the leaves says anything about each scalar, (D,)."""

    @abstractmethod
    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and covariance of each group of views."""

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x.detach().requires_grad_() for pair in self.views() for x in pair)

    def shift(self, other: AbstractBelief) -> Tensor:
        """Of the views' scalars, which factors see, and not of all."""
        assert isinstance(other, StructuredBelief)
        pairs = zip(self.views(), other.views(), strict=True)
        shifts = [
            marginal_shift((m, v.diagonal(dim1=-2, dim2=-1)), (n, w.diagonal(dim1=-2, dim2=-1)))
            for (m, v), (n, w) in pairs
        ]
        return torch.stack(shifts).max()

    def is_finite(self) -> bool:
        return all(bool(t.isfinite().all()) for t in self.tensors)

    def direction(self, gradient: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        raise NotImplementedError("blocks with sampled factors are dense or diagonal")

    def inner(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError("blocks with sampled factors are dense or diagonal")


class ProcessBelief(StructuredBelief):
    """N(m, S^-1) with S = C^-1 + A^T Lambda A: a prior, and pseudo-observations of M predictors.

    Open scalars: loc and P are held. Closed scalars: m = prior_loc + K A_c^T a with the coefficients a
    (M,), so that K is never inverted; their prior's density is part of `entropy`.

    Shapes: loc, precision (D_o,), coefficients (M,), curvature (count, width, width) a group.
    """

    def __init__(
        self, spec: Predictors, loc: Tensor, precision: Tensor, coefficients: Tensor,
        curvature: Sequence[Tensor], known: LowRank | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.loc, self.precision, self.coefficients = loc, precision, coefficients
        self.curvature = tuple(curvature)
        if known is not None:
            self.__dict__["parts"] = known

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.loc, self.precision, self.coefficients, *self.curvature

    @cached_property
    def parts(self) -> LowRank:
        """The factorisation."""
        return LowRank(self.spec, self.precision, self.curvature)

    @cached_property
    def predictors(self) -> Tensor:
        """E eta, (M,)."""
        spec = self.spec
        total = spec.offset
        if len(spec.open):
            total = total + spec.open_design @ self.loc
        if len(spec.closed):
            total = total + spec.closed_kernel @ self.coefficients
        return total

    def views(self) -> list[tuple[Tensor, Tensor]]:
        found = []
        if len(self.spec.open):
            found.append((self.loc[:, None], self.parts.open_variances[:, None, None]))
        means = self.spec.split(self.predictors)
        return found + list(zip(means, self.parts.covariances(), strict=True))

    def marginals(self) -> tuple[Tensor, Tensor]:
        spec = self.spec
        loc = self.coefficients.new_zeros(spec.size)
        variance = torch.zeros_like(loc)
        if len(spec.open):
            loc[spec.open], variance[spec.open] = self.loc, self.parts.open_variances
        if len(spec.closed):
            weights = spec.closed_root.mT @ self.coefficients
            loc[spec.closed] = spec.prior_loc + spec.prior_tril @ weights
            variance[spec.closed] = self.parts.closed_variances
        return loc, variance

    def covariance(self, index: Tensor) -> Tensor:
        return self.parts.covariance(index)

    def draw(self) -> Tensor:
        return self.marginals()[0] + self.parts.draw()

    def touched(self, gradient: Sequence[Tensor | None]) -> Tensor:
        """All of them: what a prior of a process joins is informed as a whole."""
        return torch.ones(self.spec.size, dtype=torch.bool, device=self.coefficients.device)

    def like(self, tensors: Sequence[Tensor]) -> ProcessBelief | None:
        loc, precision, coefficients, *curvature = tensors
        same = torch.equal(precision, self.precision)
        known = (self.parts.kernel, self.parts.root) if same else None
        parts = LowRank(self.spec, precision, curvature, known)
        if not parts.is_proper:
            return None
        return ProcessBelief(self.spec, loc, precision, coefficients, curvature, parts)

    def standardised(self, x: AbstractBelief, y: AbstractBelief) -> tuple[Tensor, ...]:
        """(P^1/2 d loc, dP / P, L_B^T R^T da, Cov(eta) d Lambda / sqrt 2), element by element."""
        assert isinstance(x, ProcessBelief) and isinstance(y, ProcessBelief)
        root = self.precision.sqrt()
        a = self.parts.factor.mT @ (self.parts.root.mT @ (y.coefficients - x.coefficients))
        pairs = zip(self.parts.covariances(), x.curvature, y.curvature, strict=True)
        widths = [v @ (c - b) / math.sqrt(2) for v, b, c in pairs]
        return root * (y.loc - x.loc), (y.precision - x.precision) / self.precision, a, *widths

    def quadratic(self, change: Tensor) -> Tensor:
        spec = self.spec
        rows = change.reshape(-1, spec.size)
        total = (rows[:, spec.open].square() * self.precision).sum(-1)
        if len(spec.closed):
            half = torch.linalg.solve_triangular(
                spec.prior_tril, rows[:, spec.closed].mT, upper=False
            )
            total = total + half.square().sum(0)
        predictors = spec.design @ rows.mT
        total = total + (predictors * spec.times(self.curvature, predictors)).sum(0)
        return total.reshape(change.shape[:-1])

    def log_det(self) -> Tensor:
        return self.parts.log_det - 2 * self.spec.prior_tril.diagonal().log().sum()

    def narrowed(self, factor: float) -> ProcessBelief:
        return ProcessBelief(
            self.spec, self.loc, factor * self.precision, self.coefficients,
            [factor * c for c in self.curvature],
        )  # fmt: skip

    def with_prior(self, loc: Tensor, tril: Tensor) -> ProcessBelief:
        """The belief that the same pseudo-observations make with another prior of the closed scalars.

        These are N(xi | eta), of natural parameters xi = a + Lambda E eta and Lambda; open scalars, if
        there are any, keep loc and P. Source: V. Adam et al. (2021), arXiv 2111.03412.
        """
        return self.on(replace(self.spec, prior_loc=loc, prior_tril=tril))

    def on(self, spec: Predictors) -> ProcessBelief:
        """The same pseudo-observations with another prior, and of other predictors: see `with_prior`."""
        parts = LowRank(spec, self.precision, self.curvature)
        first = self.coefficients + self.spec.times(self.curvature, self.predictors)
        known = spec.offset
        if len(spec.open):
            known = known + spec.open_design @ self.loc
        rest = first - spec.times(self.curvature, known)
        # a = xi - Lambda eta with eta = known + G_c a
        system = torch.eye(spec.rows, dtype=rest.dtype, device=rest.device)
        system = system + spec.times(self.curvature, spec.closed_kernel)
        a = torch.linalg.solve(system, rest)
        return ProcessBelief(spec, self.loc, self.precision, a, self.curvature, parts)

    def entropy(self) -> Tensor:
        """H[q] + E_q[log p(closed scalars)].

        = D_o/2 (1 + log 2 pi) - 1/2 log det P - 1/2 log det B + 1/2 tr(Q G_c) - 1/2 a^T G_c a.
        """
        return self._entropy

    @cached_property
    def _entropy(self) -> Tensor:
        spec, parts = self.spec, self.parts
        total = 0.5 * len(spec.open) * (1 + math.log(2 * math.pi)) - 0.5 * parts.log_det
        if not len(spec.closed):
            return total
        kernel = spec.closed_kernel
        if len(spec.open):
            trace = (parts.shrink(kernel)).diagonal().sum()
        else:  # tr(Q G) = tr(Lambda Cov(eta))
            pairs = zip(self.curvature, parts.covariances(), strict=True)
            trace = torch.stack([(c * v).sum() for c, v in pairs]).sum()
        a = self.coefficients
        return total + 0.5 * trace - 0.5 * (a * (kernel @ a)).sum()

    def moved(
        self, gradient: Sequence[Tensor | None], rho: float | Tensor
    ) -> tuple[ProcessBelief, Step]:
        rho = float(rho)
        found = list(gradient)
        g_loc, precision = torch.zeros_like(self.loc), self.precision
        if len(self.spec.open):
            g_loc = or_zeros(found[0], self.loc[:, None])[:, 0]
            precision = -2 * or_zeros(found[1], self.precision[:, None, None])[:, 0, 0]
            found = found[2:]
        curvature, slopes = [], []
        for (loc, _), old, g, h in zip(
            self.views()[-len(self.curvature) :],
            self.curvature,
            found[::2],
            found[1::2],
            strict=True,
        ):
            slopes.append(or_zeros(g, loc).reshape(-1))
            curvature.append(-2 * symmetrise(or_zeros(h, old)))
        parts, step, rho = self._inside(precision, curvature, rho)
        if parts is None:
            return self, step
        d_loc, d_coefficients = self._solved(parts, g_loc, torch.cat(slopes))
        new = ProcessBelief(
            self.spec, self.loc + rho * d_loc, parts.precision,
            self.coefficients + rho * d_coefficients, parts.curvature, parts,
        )  # fmt: skip
        return new, step

    def _inside(
        self, precision: Tensor, curvature: list[Tensor], rho: float
    ) -> tuple[LowRank | None, Step, float]:
        """The longest step towards the target, up to rho, that leaves S positive definite."""
        proper = True
        for i in range(_HALVINGS):
            here = rho * 0.5**i
            p = self.precision + here * (precision - self.precision) if here != 1 else precision
            c = [
                old + here * (new - old) if here != 1 else new
                for old, new in zip(self.curvature, curvature, strict=True)
            ]
            same = p is self.precision or torch.equal(p, self.precision)
            known = (self.parts.kernel, self.parts.root) if same else None
            parts = LowRank(self.spec, self.precision if same else p, c, known)
            if parts.is_proper:
                step = Step() if proper else Step(1, 1, 0)
                return parts, step, here
            proper = False
        return None, Step(1, 1, 0), 0.0

    def _solved(self, parts: LowRank, g_loc: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """S^-1 (gradient in z): the step of loc, and that of the coefficients."""
        spec = self.spec
        across = torch.zeros_like(slopes)
        rest = slopes - self.coefficients
        if not len(spec.open):  # (I + Lambda G)^-1 = I - Lambda Cov(eta)
            seen = parts.half.mT @ (parts.half @ rest)
            return g_loc, rest - spec.times(parts.curvature, seen)
        if len(spec.open):
            u = (g_loc + spec.open_design.mT @ slopes) / parts.precision
            across = across + spec.open_design @ u
        if len(spec.closed):
            across = across + spec.closed_kernel @ rest
        back = parts.shrink(across)
        d_loc = g_loc
        if len(spec.open):
            d_loc = u - (spec.open_design.mT @ back) / parts.precision
        return d_loc, (rest - back if len(spec.closed) else torch.zeros_like(rest))

    def kl(self, other: AbstractBelief) -> Tensor:
        """1/2 [tr(S' V) - D + d^T S' d + log det S - log det S'], the prior of closed scalars shared."""
        assert isinstance(other, ProcessBelief)
        spec = self.spec
        total = self.parts.log_det - other.parts.log_det
        views = self.views()
        if len(spec.open):
            change = other.loc - self.loc
            (_, variance), *views = views
            total = total + ((other.precision - self.precision) * variance[:, 0, 0]).sum()
            total = total + (other.precision * change.square()).sum()
        if len(spec.closed):
            a = other.coefficients - self.coefficients
            total = total + (a * (spec.closed_kernel @ a)).sum()
        moved = spec.split(other.predictors - self.predictors)
        for (_, cov), old, new, d in zip(
            views, self.curvature, other.curvature, moved, strict=True
        ):
            total = total + ((new - old) * cov).sum()
            total = total + (d[:, None, :] @ new @ d[:, :, None]).sum()
        return 0.5 * total


class ChainBelief(StructuredBelief):
    """N(m, S^-1) with S block tridiagonal with a border: (loc, precision) as in dense blocks.

    Shapes: nodes (count, steps, node) and border (g,) of loc, and the precision's blocks.
    """

    def __init__(
        self, pattern: Pattern, nodes: Tensor, border: Tensor, precision: Blocks,
        known: Factorised | None = None,
    ) -> None:  # fmt: skip
        self.pattern, self.nodes, self.border, self.precision = pattern, nodes, border, precision
        if known is not None:
            self.__dict__["factorised"] = known

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.nodes, self.border, *self.precision.tensors

    @cached_property
    def factorised(self) -> Factorised:
        """The elimination of the precision."""
        return Factorised(self.precision)

    @cached_property
    def cov(self) -> Blocks:
        """The covariance on the pattern."""
        return self.factorised.covariance()

    def views(self) -> list[tuple[Tensor, Tensor]]:
        p, v = self.pattern, self.cov
        x, b = self.nodes, self.border.expand(p.count, max(p.steps - 1, 1), p.border)
        corner = v.border.expand(*b.shape[:2], p.border, p.border)
        if p.steps == 1:
            loc = torch.cat([x, b], -1)
            rows = [[v.node, v.edge], [v.edge.mT, corner]]
        else:
            loc = torch.cat([x[:, :-1], x[:, 1:], b], -1)
            one, two = v.edge[:, :-1], v.edge[:, 1:]
            rows = [
                [v.node[:, :-1], v.step, one],
                [v.step.mT, v.node[:, 1:], two],
                [one.mT, two.mT, corner],
            ]
        cov = torch.cat([torch.cat(r, -1) for r in rows], -2)
        return [(loc.reshape(p.views, p.width), cov.reshape(p.views, p.width, p.width))]

    def _assembled(self, loc: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Blocks]:
        """Sums over the views of a gradient in their means and covariances."""
        p, d, k = self.pattern, self.pattern.node, max(self.pattern.steps - 1, 1)
        g = loc.reshape(p.count, k, p.width)
        h = symmetrise(cov).reshape(p.count, k, p.width, p.width)
        wide = p.width - p.border
        x, edge = torch.zeros_like(self.nodes), torch.zeros_like(self.precision.edge)
        node, step = torch.zeros_like(self.precision.node), torch.zeros_like(self.precision.step)
        x[:, :k] += g[..., :d]
        node[:, :k] += h[..., :d, :d]
        edge[:, :k] += h[..., :d, wide:]
        if p.steps > 1:
            x[:, 1:] += g[..., d:wide]
            node[:, 1:] += h[..., d:wide, d:wide]
            edge[:, 1:] += h[..., d:wide, wide:]
            step += h[..., :d, d:wide]
        return (
            x,
            g[..., wide:].sum((0, 1)),
            Blocks(node, step, edge, h[..., wide:, wide:].sum((0, 1))),
        )

    def moved(
        self, gradient: Sequence[Tensor | None], rho: float | Tensor
    ) -> tuple[ChainBelief, Step]:
        rho = float(rho)
        ((loc, cov),) = self.views()
        g_loc, g_cov = or_zeros(gradient[0], loc), or_zeros(gradient[1], cov)
        x, b, h = self._assembled(g_loc, g_cov)
        target = Blocks(*(-2 * t for t in h.tensors))
        filled = torch.diag_embed(self.pattern.filled.to(target.node))
        target = Blocks(target.node + filled, target.step, target.edge, target.border)
        proper = True
        for i in range(_HALVINGS):
            here = rho * 0.5**i
            precision = self.precision.towards(target, here)
            found = Factorised(precision)
            if found.proper:
                dx, db = found.solve(x.unsqueeze(-1), b.unsqueeze(-1))
                nodes, border = self.nodes + here * dx[..., 0], self.border + here * db[..., 0]
                new = ChainBelief(self.pattern, nodes, border, precision, found)
                return new, Step() if proper else Step(1, 1, 0)
            proper = False
        return self, Step(1, 1, 0)

    def entropy(self) -> Tensor:
        n = len(self.pattern.place)
        return 0.5 * n * (1 + math.log(2 * math.pi)) - 0.5 * self.factorised.log_det

    def kl(self, other: AbstractBelief) -> Tensor:
        """1/2 [tr(S' V) - D + d^T S' d + log det S - log det S']."""
        assert isinstance(other, ChainBelief)
        x, b = other.nodes - self.nodes, other.border - self.border
        y, c = other.precision.times(x, b)
        change = Blocks(
            *(n - o for n, o in zip(other.precision.tensors, self.precision.tensors, strict=True))
        )
        squares = (x * y).sum() + (b * c).sum()
        logs = self.factorised.log_det - other.factorised.log_det
        return 0.5 * (change.trace(self.cov) + squares + logs)

    def marginals(self) -> tuple[Tensor, Tensor]:
        p, v = self.pattern, self.cov
        nodes = v.node.diagonal(dim1=-2, dim2=-1)
        variance = p.taken(nodes, v.border.diagonal(dim1=-2, dim2=-1))
        if p.coordinates is not None:
            before, own = p.coordinates.before, p.coordinates.before >= 0
            here, there = p.place[own], p.place[before[own]]
            cross = v.between(here // p.node, here % p.node, there // p.node, there % p.node)
            difference = variance[own] + variance[before[own]] - 2 * cross
            variance = variance.index_put((own,), difference)
        return p.values(self.nodes, self.border), variance

    def covariance(self, index: Tensor) -> Tensor:
        if len(index) == 1:
            return self.marginals()[1][index][:, None]
        p = self.pattern
        unit = self.nodes.new_zeros(len(index), len(p.place))
        unit[torch.arange(len(index), device=index.device), index] = 1.0
        x, b = p.dual(unit)
        x, b = self.factorised.solve(x.movedim(0, -1), b.mT)
        return symmetrise(p.values(x.movedim(-1, 0), b.mT)[:, index])

    def touched(self, gradient: Sequence[Tensor | None]) -> Tensor:
        ((loc, cov),) = self.views()
        g_loc, g_cov = or_zeros(gradient[0], loc), or_zeros(gradient[1], cov)
        own = (g_loc != 0) | (g_cov.diagonal(dim1=-2, dim2=-1) != 0)
        x, b, _ = self._assembled(own.to(loc.dtype), torch.zeros_like(cov))
        found = self.pattern.taken(x, b)
        if self.pattern.coordinates is not None:
            found = self.pattern.coordinates.later(found)
        return found > 0

    def draw(self) -> Tensor:
        x, b = self.factorised.draw()
        return self.pattern.values(self.nodes + x, self.border + b)

    def quadratic(self, change: Tensor) -> Tensor:
        x, b = self.pattern.split(change)
        y, c = self.precision.times(x, b)
        return (x * y).sum((-3, -2, -1)) + (b * c).sum(-1)

    def log_det(self) -> Tensor:
        return self.factorised.log_det

    def narrowed(self, factor: float) -> ChainBelief:
        scaled = Blocks(*(factor * t for t in self.precision.tensors))
        kept = torch.diag_embed((1 - factor) * self.pattern.filled.to(scaled.node))
        scaled = Blocks(scaled.node + kept, scaled.step, scaled.edge, scaled.border)
        return ChainBelief(self.pattern, self.nodes, self.border, scaled)

    def like(self, tensors: Sequence[Tensor]) -> ChainBelief | None:
        nodes, border, *blocks = tensors
        precision = Blocks(*blocks)
        found = Factorised(precision)
        return ChainBelief(self.pattern, nodes, border, precision, found) if found.proper else None

    def standardised(self, x: AbstractBelief, y: AbstractBelief) -> tuple[Tensor, ...]:
        """Changes in units of each scalar's standard deviation: a diagonal Fisher metric."""
        assert isinstance(x, ChainBelief) and isinstance(y, ChainBelief)
        v = self.cov
        s = v.node.diagonal(dim1=-2, dim2=-1).sqrt()
        r = v.border.diagonal(dim1=-2, dim2=-1).sqrt()
        change = [b - a for a, b in zip(x.precision.tensors, y.precision.tensors, strict=True)]
        node = s[..., :, None] * change[0] * s[..., None, :] / math.sqrt(2)
        step = s[:, :-1, :, None] * change[1] * s[:, 1:, None, :]
        edge = s[..., None] * change[2] * r
        border = r[:, None] * change[3] * r / math.sqrt(2)
        return (y.nodes - x.nodes) / s, (y.border - x.border) / r, node, step, edge, border
