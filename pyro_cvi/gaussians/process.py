"""Gaussians whose precision is a prior's plus a low-rank part: S = C^-1 + A^T Lambda A.

z has M predictors eta = A z. C is the covariance of the prior, kept as it is and never inverted:
diagonal, 1 / P, for *open* scalars, and K = L L^T for *closed* ones. With the predictors' prior
covariance G = A C A^T = R R^T and one small symmetric matrix of pseudo-precisions a predictor group,

    B = I + R^T Lambda R,    Cov(eta) = R B^-1 R^T,    log det S = log det B - log det C,
    Q = (Lambda^-1 + G)^-1 = Lambda - Lambda Cov(eta) Lambda,    V = C - C A^T Q A C.

S is positive definite just if B is, whatever the signs in Lambda (and P > 0). Nothing of size D x D is
formed for open scalars.

Source: C. E. Rasmussen, C. K. I. Williams (2006), Gaussian Processes for Machine Learning, section 3.4,
for Lambda > 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_cvi.linalg import solve_lower

__all__ = ["LowRank", "Predictors", "root_of"]

_COLUMNS = 1 << 24
"""Scalars of a slice of the design that is handled at a time."""


@dataclass(frozen=True, eq=False)
class Predictors:
    """The predictors eta = A z of a block, in groups: `counts[g]` elements of `widths[g]` rows each.

    Shapes: `design` (M, D), `prior_loc` (D_c,), `prior_tril` (D_c, D_c). `open` and `closed` are the
    positions of the scalars with a diagonal prior and of those with the prior N(prior_loc, L L^T).
    """

    design: Tensor
    widths: tuple[int, ...]
    counts: tuple[int, ...]
    open: Tensor
    closed: Tensor
    prior_loc: Tensor
    prior_tril: Tensor

    @property
    def rows(self) -> int:
        """M, the number of predictors."""
        return self.design.shape[0]

    @property
    def size(self) -> int:
        """D, the number of scalars."""
        return self.design.shape[1]

    @cached_property
    def open_design(self) -> Tensor:
        """A's columns of the open scalars."""
        return self._columns(self.open)

    @cached_property
    def closed_design(self) -> Tensor:
        """A's columns of the closed scalars."""
        return self._columns(self.closed)

    def _columns(self, index: Tensor) -> Tensor:
        return self.design if len(index) == self.size else self.design[:, index]

    @cached_property
    def closed_root(self) -> Tensor:
        """A_c L, (M, D_c)."""
        return self.closed_design @ self.prior_tril

    @cached_property
    def closed_kernel(self) -> Tensor:
        """The part of G that the closed scalars have."""
        return self.closed_root @ self.closed_root.mT

    @cached_property
    def offset(self) -> Tensor:
        """A_c prior_loc, (M,)."""
        return self.closed_design @ self.prior_loc

    def split(self, rows: Tensor) -> list[Tensor]:
        """(M, ...) as one tensor (count, width, ...) a group."""
        sizes = [c * w for c, w in zip(self.counts, self.widths, strict=True)]
        return [
            part.reshape(c, w, *rows.shape[1:])
            for part, c, w in zip(rows.split(sizes), self.counts, self.widths, strict=True)
        ]

    def times(self, blocks: Sequence[Tensor], rows: Tensor) -> Tensor:
        """blockdiag(blocks) @ rows, for rows (M,) or (M, k)."""
        wide = rows.reshape(len(rows), -1)
        parts = [
            (b @ x).reshape(-1, wide.shape[1])
            for b, x in zip(blocks, self.split(wide), strict=True)
        ]
        return torch.cat(parts).reshape(rows.shape)


def root_of(kernel: Tensor) -> Tensor:
    """R with R R^T = kernel, which may be singular: the Cholesky factor, or else from eigenvalues."""
    found = torch.linalg.cholesky_ex(kernel)
    if not bool(found.info) and bool(found.L.isfinite().all()):
        return found.L
    values, vectors = torch.linalg.eigh(kernel)
    return vectors * values.clamp(min=0).sqrt()


class LowRank:
    """What one S = C^-1 + A^T Lambda A is made of; `precision` is P of the open scalars, (D_o,).

    `kernel` and `root` are G and R, if they are known from another one with the same P.
    """

    def __init__(
        self, spec: Predictors, precision: Tensor, curvature: Sequence[Tensor],
        known: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.precision, self.curvature = spec, precision, tuple(curvature)
        if known is not None:
            self.__dict__["kernel"], self.__dict__["root"] = known

    @cached_property
    def kernel(self) -> Tensor:
        """G = A C A^T, (M, M)."""
        spec = self.spec
        total = spec.closed_kernel if len(spec.closed) else None
        if len(spec.open):
            a = spec.open_design
            own = (a / self.precision) @ a.mT
            total = own if total is None else total + own
        assert total is not None
        return total

    @cached_property
    def root(self) -> Tensor:
        """R, (M, r)."""
        spec = self.spec
        if not len(spec.open) and len(spec.closed) <= spec.rows:
            return spec.closed_root
        return root_of(self.kernel)

    @cached_property
    def _factorised(self) -> tuple[Tensor, bool]:
        r = self.root
        b = r.mT @ self.spec.times(self.curvature, r)
        b = (b + b.mT) / 2 + torch.eye(b.shape[0], dtype=b.dtype, device=b.device)
        found = torch.linalg.cholesky_ex(b)
        return found.L, not bool(found.info) and bool(found.L.isfinite().all())

    @property
    def is_proper(self) -> bool:
        """Whether S is positive definite."""
        return bool((self.precision > 0).all()) and self._factorised[1]

    @property
    def factor(self) -> Tensor:
        """The Cholesky factor of B."""
        return self._factorised[0]

    @cached_property
    def half(self) -> Tensor:
        """H with Cov(eta) = H^T H, (r, M)."""
        result: Tensor = torch.linalg.solve_triangular(self.factor, self.root.mT, upper=False)
        return result

    @cached_property
    def log_det(self) -> Tensor:
        """log det S + log det K: of the open precision and of B."""
        return self.precision.log().sum() + 2 * self.factor.diagonal().log().sum()

    def covariances(self) -> list[Tensor]:
        """Cov(eta) within each element, (count, width, width) a group."""
        halves = self.spec.split(self.half.mT)
        return [h @ h.mT for h in halves]

    @cached_property
    def _outer(self) -> Tensor | None:
        """T with Q = T^T T, (M, M), where no pseudo-precision is negative; free of cancellation."""
        spec, roots = self.spec, []
        for block in self.curvature:
            if block.shape[-1] == 1:
                values, vectors = block[..., 0], torch.ones_like(block)
            else:
                values, vectors = torch.linalg.eigh(block)
            if bool((values < 0).any()):
                return None
            roots.append(vectors * values.sqrt()[..., None, :])
        eye = torch.eye(spec.rows, dtype=self.kernel.dtype, device=self.kernel.device)
        lifted = spec.times(roots, eye)  # W, block diagonal
        b = eye + lifted.mT @ self.kernel @ lifted
        found = torch.linalg.cholesky_ex(b)
        if bool(found.info):
            return None
        result: Tensor = torch.linalg.solve_triangular(found.L, lifted.mT, upper=False)
        return result

    def shrink(self, rows: Tensor) -> Tensor:
        """Q rows, for rows (M,) or (M, k)."""
        if self._outer is not None:
            return self._outer.mT @ (self._outer @ rows)
        moved = self.spec.times(self.curvature, rows)
        return moved - self.spec.times(self.curvature, self.half.mT @ (self.half @ moved))

    def quadratics(self, columns: Tensor) -> Tensor:
        """diag(X^T Q X) of the columns X (M, k), shape (k,)."""
        if self._outer is not None:
            return (self._outer @ columns).square().sum(0)
        return (columns * self.shrink(columns)).sum(0)

    @cached_property
    def open_variances(self) -> Tensor:
        """The marginal variances of the open scalars, (D_o,)."""
        a, p = self.spec.open_design, self.precision
        step = max(1, _COLUMNS // max(self.spec.rows, 1))
        parts = [self.quadratics(columns) for columns in a.split(step, dim=1)]
        return 1 / p - torch.cat(parts) / p.square()

    @cached_property
    def closed_half(self) -> Tensor | None:
        """H_c with V_c = H_c^T H_c, where R is A L itself; (D_c, D_c)."""
        spec = self.spec
        if len(spec.open) or self.root is not spec.closed_root:
            return None
        result: Tensor = torch.linalg.solve_triangular(self.factor, spec.prior_tril.mT, upper=False)
        return result

    @cached_property
    def closed_variances(self) -> Tensor:
        """The marginal variances of the closed scalars, (D_c,)."""
        if self.closed_half is not None:
            return self.closed_half.square().sum(0)
        spec = self.spec
        prior = spec.prior_tril.square().sum(-1)
        return prior - self.quadratics(spec.closed_root @ spec.prior_tril.mT)

    def carried(self, index: Tensor) -> Tensor:
        """Rows of A C^T for some scalars of the block: Cov(eta, z[index]) under the prior, (M, k)."""
        spec = self.spec
        result = self.kernel.new_zeros(spec.rows, len(index))
        place = self._places
        is_open = place[index] >= 0
        if bool(is_open.any()):
            at = place[index[is_open]]
            result[:, is_open] = spec.open_design[:, at] / self.precision[at]
        if not bool(is_open.all()):
            at = -place[index[~is_open]] - 1
            result[:, ~is_open] = spec.closed_root @ spec.prior_tril[at].mT
        return result

    @cached_property
    def _places(self) -> Tensor:
        """For each scalar its place among the open ones, or -1 - its place among the closed ones."""
        spec = self.spec
        place = torch.empty(spec.size, dtype=torch.long, device=spec.open.device)
        place[spec.open] = torch.arange(len(spec.open), device=place.device)
        place[spec.closed] = -1 - torch.arange(len(spec.closed), device=place.device)
        return place

    def covariance(self, index: Tensor) -> Tensor:
        """The covariance of some scalars, (k, k)."""
        place = self._places[index]
        if self.closed_half is not None:
            half = self.closed_half[:, -place - 1]
            return half.mT @ half
        spec, k = self.spec, len(index)
        prior = self.kernel.new_zeros(k, k)
        is_open = place >= 0
        same = index[:, None] == index
        variance = self.kernel.new_zeros(k)
        variance[is_open] = 1 / self.precision[place[is_open]]
        prior += torch.where(same, variance, torch.zeros_like(variance))
        closed = (~is_open).nonzero().squeeze(-1)
        if len(closed):
            half = spec.prior_tril[-place[closed] - 1]
            prior[closed[:, None], closed] = half @ half.mT
        across = self.carried(index)
        if self._outer is not None:
            moved = self._outer @ across
            return prior - moved.mT @ moved
        return prior - across.mT @ self.shrink(across)

    def draw(self) -> Tensor:
        """One draw of z - E z, (D,)."""
        spec = self.spec
        result = self.kernel.new_zeros(spec.size)
        if self.closed_half is not None:
            noise = torch.randn(len(spec.closed), dtype=result.dtype, device=result.device)
            result[spec.closed] = self.closed_half.mT @ noise
            return result
        # A draw from the prior, of which only the predictors are moved (Matheron's rule).
        result[spec.open] = torch.randn_like(self.precision) / self.precision.sqrt()
        if len(spec.closed):
            noise = torch.randn_like(spec.prior_loc)
            result[spec.closed] = spec.prior_tril @ noise
        before = spec.design @ result
        noise = torch.randn_like(self.half[:, 0])
        wanted = self.half.mT @ noise
        change = self._solve_kernel(wanted - before)
        result[spec.open] += (spec.open_design.mT @ change) / self.precision
        if len(spec.closed):
            result[spec.closed] += spec.prior_tril @ (spec.closed_root.mT @ change)
        return result

    def _solve_kernel(self, rows: Tensor) -> Tensor:
        """G^-1 rows, for rows in the range of G."""
        root = self.root
        if root.shape[0] == root.shape[1] and not bool(root.triu(1).any()):
            return torch.linalg.solve_triangular(
                root.mT, solve_lower(root, rows).unsqueeze(-1), upper=True
            ).squeeze(-1)
        inverse = torch.linalg.pinv(root)
        return inverse.mT @ (inverse @ rows)
