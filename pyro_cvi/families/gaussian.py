"""Gaussian N(x | m, V), T(x) = (x, x x^T), natural = (P m, -P/2) with the precision P = V^-1.

Mean parameters are (m, V + m m^T). The second coordinates are symmetric matrices; inner products
with them count both triangles, and so do gradients. Shapes: (*batch, d) and (*batch, d, d), with d
= 1 for a scalar `Normal`.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families.family import AbstractFamily, Mean, Natural
from pyro_cvi.families.registry import register_family
from pyro_cvi.linalg import (
    inverse_precision,
    log_diagonal_sum,
    matvec,
    outer,
    precision_to_scale_tril,
    solve_lower,
    solve_precision,
    symmetrise,
    whiten,
)

__all__ = ["GAUSSIAN", "Gaussian", "from_loc_cov", "from_loc_precision", "loc_cov"]

_LOG_2PI = math.log(2 * math.pi)


def loc_cov(natural: Natural) -> tuple[Tensor, Tensor]:
    """(m, V) = (P^-1 natural_1, P^-1), from one Cholesky factorisation."""
    factor = _factor(natural)
    return solve_precision(factor, natural[0]), inverse_precision(factor)


def from_loc_cov(loc: Tensor, cov: Tensor) -> Natural:
    """(V^-1 m, -V^-1 / 2)."""
    return from_loc_precision(loc, inverse_precision(torch.linalg.cholesky(cov)))


def from_loc_precision(loc: Tensor, precision: Tensor) -> Natural:
    """(P m, -P / 2)."""
    return matvec(precision, loc), -precision / 2


@register_family(dist.Normal, dist.MultivariateNormal)
class Gaussian(AbstractFamily):
    """q(x) = exp(m^T P x - 1/2 x^T P x - A), A = 1/2 m^T P m - 1/2 log det P + d/2 log 2 pi."""

    name = "Gaussian"
    statistics = ("identity", "outer")
    event_dims = (1, 2)
    event_dim = 1

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(x, x x^T)."""
        return x, outer(x, x)

    def log_partition(self, natural: Natural) -> Tensor:
        """1/2 |L^-1 natural_1|^2 - sum_i log L_ii + d/2 log 2 pi, with P = L L^T."""
        factor = _factor(natural)
        quadratic = solve_lower(factor, natural[0]).square().sum(-1)
        return quadratic / 2 - log_diagonal_sum(factor) + natural[0].shape[-1] / 2 * _LOG_2PI

    def to_mean(self, natural: Natural) -> Mean:
        """(m, V + m m^T)."""
        loc, cov = loc_cov(natural)
        return loc, cov + outer(loc, loc)

    def to_natural(self, mean: Mean) -> Natural:
        """(V^-1 m, -V^-1/2) with V = E[x x^T] - m m^T.

        If |m| is k times the standard deviation, V has k^2 times the rounding error of E[x x^T].
        """
        loc, second = mean
        return from_loc_cov(loc, second - outer(loc, loc))

    def to_distribution(self, natural: Natural) -> dist.MultivariateNormal:
        """MultivariateNormal(m, scale_tril), also for d = 1."""
        loc = solve_precision(_factor(natural), natural[0])
        return dist.MultivariateNormal(loc, scale_tril=precision_to_scale_tril(-2 * natural[1]))

    def natural_of_core(self, core: Any) -> Natural:
        """(P m, -P/2) of a MultivariateNormal, or of a Normal as one of d = 1 per batch element."""
        if isinstance(core, torch.distributions.Normal):
            precision = core.scale**-2
            return (precision * core.loc).unsqueeze(-1), -precision[..., None, None] / 2
        return from_loc_precision(core.loc, core.precision_matrix)

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 g = (P g_1 - P W P m, P W P / 2), with W = g_2 - g_1 m^T - m g_1^T.

        It is the derivative of `to_natural` along g: read as a change of mean parameters,
        g is dm = g_1 and dV = W, and dP = -P W P.
        """
        loc, precision = solve_precision(_factor(natural), natural[0]), -2 * natural[1]
        cross = outer(gradient[0], loc)
        change = symmetrise(precision @ (symmetrise(gradient[1]) - cross - cross.mT) @ precision)
        return matvec(precision, gradient[0]) - matvec(change, loc), change / 2

    def is_proper(self, natural: Natural) -> Tensor:
        """Whether P has a Cholesky factor, in the precision at hand."""
        finite = natural[0].isfinite().all(-1) & natural[1].isfinite().all(-1).all(-1)
        info: Tensor = torch.linalg.cholesky_ex(-2 * natural[1]).info
        return finite & (info == 0)

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """-1/e for the least eigenvalue e < 0 of L^-1 D L^-T; D is the direction of P = L L^T."""
        least = torch.linalg.eigvalsh(whiten(_factor(natural), -2 * direction[1]))[..., 0]
        return torch.where(least < 0, -1 / least, torch.inf)

    def retract(self, natural: Natural, direction: Natural, step: Tensor | float) -> Natural:
        """P' = 1/2 [P + (P + t D) P^-1 (P + t D)], P' m' = P' m + t (d_1 - D m).

        P' - P - t D = t^2/2 D P^-1 D, and P' > P/2 for every D. The step is cut to keep the norm
        of t L^-1 D L^-T below eps^(-1/4): beyond, P' could not be told from a singular matrix.

        References: W. Lin, M. Schmidt, M. E. Khan (2020), Handling the positive-definite constraint
        in the Bayesian learning rule, arXiv 2002.10060; with P'^-1 for their P^-1 in the mean.
        """
        factor, change = _factor(natural), -2 * symmetrise(direction[1])
        size = torch.linalg.matrix_norm(whiten(factor, change), ord=torch.inf)
        limit = torch.finfo(factor.dtype).eps ** -0.25
        t = (limit / size.clamp(min=torch.finfo(factor.dtype).tiny)).clamp(max=step)
        t_vector, t_matrix = t[..., None], t[..., None, None]
        plain = -2 * natural[1] + t_matrix * change
        half = torch.linalg.solve_triangular(factor, plain, upper=False)
        precision = half.mT @ half / 2 - natural[1]
        loc = solve_precision(factor, natural[0])
        gradient = direction[0] - matvec(change, loc)
        candidate = matvec(precision, loc) + t_vector * gradient, -precision / 2
        return self.keep_proper(candidate, natural)

    def entropy(self, natural: Natural) -> Tensor:
        """d/2 (1 + log 2 pi) - sum_i log L_ii."""
        return natural[0].shape[-1] / 2 * (1 + _LOG_2PI) - log_diagonal_sum(_factor(natural))

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """1/2 [tr E - log det(1 + E) + r^T Q^-1 r], E = L^-1 (Q - P) L^-T, r = Q (m_q - m_p).

        P = L L^T and Q are the two precisions. Both E and r are taken from differences of natural
        parameters, so the error is relative to what differs, not to the parameters themselves.
        """
        p_factor, q_factor = _factor(p), _factor(q)
        precision_change = -2 * (q[1] - p[1])
        relative = whiten(p_factor, precision_change)
        trace = relative.diagonal(dim1=-2, dim2=-1).sum(-1)
        shift = q[0] - p[0] - matvec(precision_change, solve_precision(p_factor, p[0]))
        quadratic = solve_lower(q_factor, shift).square().sum(-1)
        return (trace + quadratic) / 2 - _half_log_det(relative, p_factor, q_factor)

    def log_prob(self, natural: Natural, x: Tensor) -> Tensor:
        """-1/2 |L^T (x - m)|^2 + sum_i log L_ii - d/2 log 2 pi."""
        factor = _factor(natural)
        whitened = matvec(factor.mT, x - solve_precision(factor, natural[0]))
        return log_diagonal_sum(factor) - (whitened.square().sum(-1) + x.shape[-1] * _LOG_2PI) / 2


def _half_log_det(relative: Tensor, p_factor: Tensor, q_factor: Tensor) -> Tensor:
    """1/2 log det(1 + E), with 1 + E = L^-1 Q L^-T.

    Taken from the factor of 1 + E where E is small, else from the factors of P and Q. The first
    keeps the digits that cancel against the trace; the second does not mind an
    ill-conditioned one.
    """
    near = torch.linalg.matrix_norm(relative) < 0.5
    identity = torch.eye(relative.shape[-1], dtype=relative.dtype, device=relative.device)
    small = torch.where(near[..., None, None], relative, 0.0)
    close = log_diagonal_sum(torch.linalg.cholesky(identity + small))
    return torch.where(near, close, log_diagonal_sum(q_factor) - log_diagonal_sum(p_factor))


def _factor(natural: Natural) -> Tensor:
    factor: Tensor = torch.linalg.cholesky(-2 * natural[1])
    return factor


GAUSSIAN = Gaussian()
