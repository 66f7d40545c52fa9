"""Gamma(x | shape, rate), T(x) = (log x, x), natural = (shape - 1, -rate).

Storing shape - 1 limits the shape itself to an absolute accuracy of one rounding: shapes below
1e-16 (float64) or 6e-8 (float32) do not exist. All functions are accurate for the shape that the
stored number stands for.
"""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families.family import AbstractFamily, Mean, Natural, positive_step
from pyro_cvi.families.registry import register_family
from pyro_cvi.families.special import (
    bregman_log_gamma,
    curvature_ratio,
    digamma,
    entropy_term,
    log_gamma,
    log_minus_digamma,
    ratio_excess,
    stirling_remainder,
    trigamma,
    trigamma_excess,
)

__all__ = [
    "GAMMA",
    "Gamma",
    "gamma_kl",
    "gamma_log_prob",
    "gamma_retract",
    "gamma_shape",
    "gamma_trusted",
]


@register_family(dist.Gamma, dist.Exponential, dist.Chi2)
class Gamma(AbstractFamily):
    """q(x) = exp((a-1) log x - b x - A), with shape a > 0 and rate b > 0."""

    name = "Gamma"
    statistics = ("log", "identity")
    event_dims = (0, 0)

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(log x, x)."""
        return x.log(), x

    def log_partition(self, natural: Natural) -> Tensor:
        """A = log Gamma(a) - a log b."""
        a, b = _shape_rate(natural)
        return log_gamma(a) - a * b.log()

    def to_mean(self, natural: Natural) -> Mean:
        """(psi(a) - log b, a / b)."""
        a, b = _shape_rate(natural)
        return digamma(a) - b.log(), a / b

    def to_natural(self, mean: Mean) -> Natural:
        """Solves log a - psi(a) = log E[x] - E[log x], then b = a / E[x].

        The right side is a difference of order 1/(2a), so the shape has a relative error of about a
        times that of the mean parameters: a matter of these coordinates, not of the solver.
        """
        with torch.no_grad():
            a = gamma_shape(mean[1].log() - mean[0])
            natural = a - 1, -a / mean[1]
        return self.attach_gradient(natural, mean)

    def to_distribution(self, natural: Natural) -> dist.Gamma:
        """Gamma(a, b)."""
        return dist.Gamma(*_shape_rate(natural))

    def natural_of_core(self, core: Any) -> Natural:
        """(a - 1, -b), where an Exponential has a = 1."""
        shape = getattr(core, "concentration", None)
        return torch.zeros_like(core.rate) if shape is None else shape - 1, -core.rate

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 g = 1/D [[a, -b], [-b, b^2 psi'(a)]] g, with D = a psi'(a) - 1."""
        a, b = _shape_rate(natural)
        g_shape, g_rate = gradient[0], b * gradient[1]
        excess = trigamma_excess(a)
        return (a * g_shape - g_rate) / excess, b * (trigamma(a) * g_rate - g_shape) / excess

    def is_proper(self, natural: Natural) -> Tensor:
        """Whether a > 0 and b > 0."""
        shape, rate = natural
        return shape.isfinite() & rate.isfinite() & (shape > -1) & (rate < 0)

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """The smaller of the steps at which the shape and the rate reach zero."""
        a, b = _shape_rate(natural)
        return torch.minimum(positive_step(a, direction[0]), positive_step(b, -direction[1]))

    def retract(self, natural: Natural, direction: Natural, step: Tensor | float) -> Natural:
        """`gamma_retract` along this direction."""
        a, b = gamma_retract(_shape_rate(natural), (direction[0], -direction[1]), step)
        return self.keep_proper((a - 1, -b), natural)

    def trusted(self, candidate: Natural, natural: Natural, factor: float) -> Natural:
        """Shape and mean within `factor` of what they were."""
        a, b = gamma_trusted(_shape_rate(candidate), _shape_rate(natural), factor)
        return a - 1, -b

    def entropy(self, natural: Natural) -> Tensor:
        """H = a - log b + log Gamma(a) + (1 - a) psi(a), by Stirling's remainder."""
        a, b = _shape_rate(natural)
        return entropy_term(a) - b.log()

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """KL(p || q), accurate to a few roundings of its largest term also for large shapes."""
        return gamma_kl(*_shape_rate(p), *_shape_rate(q))

    def log_prob(self, natural: Natural, x: Tensor) -> Tensor:
        """Log q(x) = a log b - log Gamma(a) + (a - 1) log x - b x, for x > 0."""
        a, b = _shape_rate(natural)
        return gamma_log_prob(a, b * x / a) - x.log()


def gamma_shape(gap: Tensor) -> Tensor:
    """The shape a with log a - psi(a) = gap, by Newton's method on 1/a.

    The left side is almost linear in 1/a: between 1/(2a) and 1/a.     References: T. Minka (2002),
    Estimating a Gamma distribution, for the closed-form start.
    """
    inverse = 12 * gap / (3 - gap + ((gap - 3).square() + 24 * gap).sqrt())
    for _ in range(5):
        a = 1 / inverse
        inverse = inverse + (gap - log_minus_digamma(a)) * inverse / trigamma_excess(a)
    return 1 / inverse


def gamma_kl(a_p: Tensor, b_p: Tensor, a_q: Tensor, b_q: Tensor) -> Tensor:
    """KL = a_q (t - 1 - log t) + bregman(a_p, a_q), with t = (a_p / b_p) / (a_q / b_q)."""
    return a_q * ratio_excess(a_p * b_q / (a_q * b_p)) + bregman_log_gamma(a_p, a_q)


def gamma_log_prob(a: Tensor, t: Tensor) -> Tensor:
    """Log q(log x) = -a (t - 1 - log t) + 1/2 log(a / 2 pi) - R(a), with t = x b / a."""
    return 0.5 * (a / (2 * torch.pi)).log() - stirling_remainder(a) - a * ratio_excess(t)


def gamma_trusted(
    candidate: tuple[Tensor, Tensor], point: tuple[Tensor, Tensor], factor: float
) -> tuple[Tensor, Tensor]:
    """(shape, rate) with shape and rate / shape cut to within `factor` of those of the point."""
    (a, b), (a_old, b_old) = candidate, point
    shape = torch.minimum(torch.maximum(a, a_old / factor), a_old * factor)
    ratio, old = b / a, b_old / a_old
    return shape, shape * torch.minimum(torch.maximum(ratio, old / factor), old * factor)


def gamma_retract(
    point: tuple[Tensor, Tensor], direction: tuple[Tensor, Tensor], step: Tensor | float
) -> tuple[Tensor, Tensor]:
    """The point x + t d - (t^2/2) Gamma_x d^2 in the coordinates x = (a, r = b/a).

    The Fisher matrix is diagonal in them.     With u = t d / x this is r (1 + u + u^2/2) and a (1 +
    u + c(a) u^2/2), both at least about half of what they were. Relative changes u beyond
    eps^(-1/2) are cut there, so that nothing overflows.

    References: W. Lin, M. Schmidt, M. E. Khan (2020), Handling the positive-definite constraint in
    the Bayesian learning rule, arXiv 2002.10060.
    """
    (a, b), (d_a, d_b) = point, direction
    limit = torch.finfo(a.dtype).eps ** -0.5
    u_a = step * d_a / a
    u_r = step * d_b / b - u_a
    cut = limit / torch.maximum(u_a.abs(), u_r.abs()).clamp(min=limit)
    u_a, u_r = u_a * cut, u_r * cut
    shape = a * (1 + u_a + curvature_ratio(a) * u_a.square() / 2)
    return shape, shape * (b / a) * (1 + u_r + u_r.square() / 2)


def _shape_rate(natural: Natural) -> tuple[Tensor, Tensor]:
    return natural[0] + 1, -natural[1]


GAMMA = Gamma()
