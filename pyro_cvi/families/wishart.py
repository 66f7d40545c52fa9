"""Wishart(X | nu, V), T(X) = (X, log det X), natural = (-V^-1/2, (nu - d - 1)/2).

It is the Gamma of matrices, q(X) = exp(s log det X - tr(B X) - A), with the rate B = V^-1/2, the shape
a = nu/2 and s = a - (d + 1)/2; at d = 1 it is the Gamma itself. What sums over a dimension is written
in the arguments c_k = a - h_k of log Gamma_d(a) = sum_k log Gamma(c_k) + d (d - 1)/4 log pi, with h_k =
(d - 1 - k)/2 and k = 0 ... d - 1. The smallest is c_0 = s + 1, which has to be positive.

First coordinates are symmetric matrices: inner products with them count both triangles, and so do
gradients; of a matrix that is not symmetric only the symmetric part counts. Shapes: (*batch, d, d) and
(*batch,).
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families.family import AbstractFamily, Mean, Natural, positive_step
from pyro_cvi.families.registry import register_family
from pyro_cvi.families.special import (
    bregman_log_gamma,
    digamma,
    entropy_term,
    log_gamma,
    log_minus_digamma,
    ratio_excess,
    stirling_remainder,
    trigamma,
    trigamma_excess,
)
from pyro_cvi.linalg import inverse_precision, log_diagonal_sum, symmetrise, whiten

__all__ = ["WISHART", "BartlettWishart", "Wishart", "wishart_shape"]

_LOG_PI = math.log(math.pi)


class BartlettWishart(dist.Wishart):
    """Pyro's Wishart, drawn once.

    torch (2.13 and before) takes its check for proper draws for one for singular draws: it warns of
    every proper draw, and draws again.
    """

    def rsample(self, sample_shape: Any = (), max_try_correction: int | None = None) -> Tensor:
        """L A A^T L^T with V = L L^T and Bartlett's triangular A."""
        draw: Tensor = self._bartlett_sampling(torch.Size(sample_shape))
        return draw


@register_family(dist.Wishart)
class Wishart(AbstractFamily):
    """q(X) = exp(s log det X - tr(B X) - A), with s + 1 > 0 and B positive definite."""

    name = "Wishart"
    statistics = ("identity", "logdet")
    event_dims = (2, 0)
    event_dim = 2

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(X, log det X)."""
        return x, torch.linalg.slogdet(x).logabsdet

    def log_partition(self, natural: Natural) -> Tensor:
        """A = log Gamma_d(a) - a log det B."""
        rate, a, c, _ = _parts(natural)
        d = rate.shape[-1]
        return log_gamma(c).sum(-1) + d * (d - 1) / 4 * _LOG_PI - a * _log_det(_factor(rate))

    def to_mean(self, natural: Natural) -> Mean:
        """(a B^-1, sum_k psi(c_k) - log det B), which is (nu V, psi_d(nu/2) + log det 2V)."""
        rate, a, c, _ = _parts(natural)
        factor = _factor(rate)
        return _lift(a) * inverse_precision(factor), digamma(c).sum(-1) - _log_det(factor)

    def to_natural(self, mean: Mean) -> Natural:
        """Solves d log a - psi_d(a) = log det E[X] - E[log det X], then B = a E[X]^-1.

        The right side is a difference of order d (d + 1)/(4 a): see `Gamma.to_natural`.
        """
        with torch.no_grad():
            factor = _factor(symmetrise(mean[0]))
            d = mean[0].shape[-1]
            smallest = wishart_shape(_log_det(factor) - mean[1], d)
            rate = _lift(smallest + (d - 1) / 2) * inverse_precision(factor)
        return self.attach_gradient((-rate, smallest - 1), mean)

    def to_distribution(self, natural: Natural) -> dist.Wishart:
        """Wishart(2 a, precision_matrix = 2 B)."""
        rate, a, _, _ = _parts(natural)
        return BartlettWishart(2 * a, precision_matrix=2 * rate)

    def natural_of_core(self, core: Any) -> Natural:
        """(-V^-1/2, (nu - d - 1)/2), from the precision where the distribution was given that."""
        if "precision_matrix" in core.__dict__:
            precision = symmetrise(core.precision_matrix)
        else:
            precision = inverse_precision(core._unbroadcasted_scale_tril)
        d = precision.shape[-1]
        df = core.df.to(precision.dtype).expand(core.batch_shape)
        return -precision.expand(*core.batch_shape, d, d) / 2, (df - d - 1) / 2

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 (G, g) = ((B G B - x B) / a, x), with x = (a g - tr(B G)) / (a psi_d'(a) - d).

        For F (X, x) = (a B^-1 X B^-1 + x B^-1, psi_d'(a) x + tr(B^-1 X)).
        """
        rate, a, c, h = _parts(natural)
        matrix = symmetrise(gradient[0])
        trace = (rate * matrix).sum((-2, -1))
        scalar = (a * gradient[1] - trace) / _excess(c, h)
        return symmetrise(rate @ matrix @ rate - _lift(scalar) * rate) / _lift(a), scalar

    def is_proper(self, natural: Natural) -> Tensor:
        """Whether nu > d - 1 and B has a Cholesky factor, in the precision at hand."""
        rate, scalar = -symmetrise(natural[0]), natural[1]
        finite = rate.isfinite().all(-1).all(-1) & scalar.isfinite()
        info: Tensor = torch.linalg.cholesky_ex(rate).info
        return finite & (scalar > -1) & (info == 0)

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """The smaller of the steps at which s + 1 reaches zero, and the least eigenvalue of B."""
        rate, _, c, _ = _parts(natural)
        least = torch.linalg.eigvalsh(whiten(_factor(rate), -symmetrise(direction[0])))[..., 0]
        for_matrix = torch.where(least < 0, -1 / least, torch.inf)
        return torch.minimum(for_matrix, positive_step(c[..., 0], direction[1]))

    def retract(self, natural: Natural, direction: Natural, step: Tensor | float) -> Natural:
        """e' = e (1 + u + u^2/2), R' = L (1 + U + U^2/2) L^T with e = s + 1, R = B/a = L L^T.

        u and U are the relative changes t d / x of the two, and the Fisher matrix is block diagonal
        in them. Both stay above half of what they were. For the Christoffel symbol of e, which is
        close to -1/e, stands that value: it keeps e positive. The step is cut to keep changes below
        eps^(-1/4): beyond, B' could not be told from a singular matrix.

        References: W. Lin, M. Schmidt, M. E. Khan (2020), Handling the positive-definite constraint
        in the Bayesian learning rule, arXiv 2002.10060.
        """
        rate, a, c, _ = _parts(natural)
        factor, smallest, d = _factor(rate), c[..., 0], rate.shape[-1]
        eye = torch.eye(d, dtype=rate.dtype, device=rate.device)
        change = whiten(factor, -symmetrise(direction[0])) - _lift(direction[1] / a) * eye
        u = direction[1] / smallest
        size = torch.maximum(torch.linalg.matrix_norm(change, ord=torch.inf), u.abs())
        limit = torch.finfo(rate.dtype).eps ** -0.25
        t = (limit / size.clamp(min=torch.finfo(rate.dtype).tiny)).clamp(max=step)
        moved = smallest * (1 + t * u + (t * u).square() / 2)
        half = factor @ (eye + _lift(t) * change)
        growth = (moved + (d - 1) / 2) / a
        candidate = _lift(growth / 2) * (rate + half @ half.mT)
        return self.keep_proper((-candidate, moved - 1), natural)

    def entropy(self, natural: Natural) -> Tensor:
        """sum_k [e(c_k) + k/2 psi(c_k)] + d (d - 1)/4 (1 + log pi) - (d + 1)/2 log det B.

        With e the `entropy_term`.
        """
        rate, _, c, _ = _parts(natural)
        d = rate.shape[-1]
        terms = entropy_term(c) + _halves(c) * digamma(c)
        constant = d * (d - 1) / 4 * (1 + _LOG_PI)
        return terms.sum(-1) + constant - (d + 1) / 2 * _log_det(_factor(rate))

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """KL = a_q [tr T - d - log det T] + sum_k bregman(p_k, q_k) + r_k.

        With T = (a_p / a_q) B_q B_p^-1 and r_k = a_q log[(a_p / p_k) / (a_q / q_k)] + h_k log(p_k /
        q_k), where p_k, q_k are the arguments c_k of the two. As for `gamma_kl`, which it is at d =
        1, nothing of the size of the shapes is left to cancel.
        """
        (p_rate, p_a, p_c, h), (q_rate, q_a, q_c, _) = _parts(p), _parts(q)
        p_factor, q_factor = _factor(p_rate), _factor(q_rate)
        ratio = p_a / q_a
        relative = whiten(p_factor, _lift(ratio) * q_rate - p_rate)
        log_det = _log_det(q_factor) - _log_det(p_factor) + p_rate.shape[-1] * ratio.log()
        rest = q_a.unsqueeze(-1) * (torch.log1p(h / p_c) - torch.log1p(h / q_c))
        rest = rest + h * (p_c / q_c).log() + bregman_log_gamma(p_c, q_c)
        return q_a * _matrix_excess(relative, log_det) + rest.sum(-1)

    def log_prob(self, natural: Natural, x: Tensor) -> Tensor:
        """-a [tr T - d - log det T] - (d + 1)/2 log det X + constant, with T = L^T X L / a, B = L L^T.

        The constant is sum_k [a log(a / c_k) - h_k + (h_k + 1/2) log c_k - R(c_k)] - d/2 log 2 pi - d
        (d - 1)/4 log pi, with Stirling's remainder R.
        """
        rate, a, c, h = _parts(natural)
        factor, d = _factor(rate), rate.shape[-1]
        eye = torch.eye(d, dtype=rate.dtype, device=rate.device)
        relative = symmetrise(factor.mT @ x @ factor) / _lift(a) - eye
        log_det_x = torch.linalg.slogdet(x).logabsdet
        excess = _matrix_excess(relative, log_det_x + _log_det(factor) - d * a.log())
        terms = a.unsqueeze(-1) * torch.log1p(h / c) - h + (h + 0.5) * c.log()
        constant = (terms - stirling_remainder(c)).sum(-1)
        constant = constant - d / 2 * math.log(2 * math.pi) - d * (d - 1) / 4 * _LOG_PI
        return constant - a * excess - (d + 1) / 2 * log_det_x


def wishart_shape(gap: Tensor, d: int) -> Tensor:
    """c_0 = a - (d - 1)/2 for the shape a with d log a - psi_d(a) = gap, without a gradient.

    The left side f is convex and decreasing in c_0. It lies above d (d + 1)/(4 a) and 1/(2 c_0),
    which gives a start below the root, from where Newton's steps never overshoot. It also lies below
    d (d + 3)/(4 c_0), so that they need about log2(d^2/2) steps more than close to the root. NaN
    where no a gives this gap, as when rounding makes it zero.
    """
    with torch.no_grad():
        smallest = torch.maximum(0.5 / gap, d * (d + 1) / (4 * gap) - (d - 1) / 2)
        for _ in range(64):
            c, h = _arguments(smallest, d)
            value = (log_minus_digamma(c) + torch.log1p(h / c)).sum(-1) - gap
            change = value * (smallest + (d - 1) / 2) / _excess(c, h)
            smallest = smallest + change
            if not (change.abs() > torch.finfo(gap.dtype).eps ** 0.75 * smallest).any():
                break
        return smallest


def _parts(natural: Natural) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, a, c, h)."""
    smallest, d = natural[1] + 1, natural[0].shape[-1]
    return -symmetrise(natural[0]), smallest + (d - 1) / 2, *_arguments(smallest, d)


def _arguments(smallest: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """c_k = c_0 + k/2 and h_k = (d - 1 - k)/2 along a new last dimension."""
    k = torch.arange(d, dtype=smallest.dtype, device=smallest.device)
    return smallest.unsqueeze(-1) + k / 2, (d - 1 - k) / 2


def _halves(c: Tensor) -> Tensor:
    return torch.arange(c.shape[-1], dtype=c.dtype, device=c.device) / 2


def _excess(c: Tensor, h: Tensor) -> Tensor:
    """a psi_d'(a) - d = sum_k [c_k psi'(c_k) - 1] + h_k psi'(c_k), a sum of positive terms."""
    return (trigamma_excess(c) + h * trigamma(c)).sum(-1)


def _matrix_excess(relative: Tensor, log_det: Tensor) -> Tensor:
    """tr T - d - log det T for T = 1 + E, given log det T; from the spectrum where E is small.

    There the trace and the logarithm cancel, and what is left is multiplied by the shape.
    """
    near = torch.linalg.matrix_norm(relative) < 0.5
    spectrum = torch.linalg.eigvalsh(torch.where(_lift(near), relative, 0.0))
    far = relative.diagonal(dim1=-2, dim2=-1).sum(-1) - log_det
    return torch.where(near, ratio_excess(1 + spectrum).sum(-1), far)


def _factor(matrix: Tensor) -> Tensor:
    factor: Tensor = torch.linalg.cholesky(matrix)
    return factor


def _log_det(factor: Tensor) -> Tensor:
    return 2 * log_diagonal_sum(factor)


def _lift(per_element: Tensor) -> Tensor:
    return per_element[..., None, None]


WISHART = Wishart()
