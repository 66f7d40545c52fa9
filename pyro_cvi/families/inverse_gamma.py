"""InverseGamma(x | shape, rate), T(x) = (log x, 1/x), natural = (-shape - 1, -rate).

x = 1/y with y ~ Gamma(shape, rate): every function is the Gamma's, with the sign of the first
coordinate changed. `rate` is Pyro's name for what is otherwise called the scale of an inverse
Gamma.
"""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families.family import AbstractFamily, Mean, Natural, positive_step
from pyro_cvi.families.gamma import (
    gamma_kl,
    gamma_log_prob,
    gamma_retract,
    gamma_shape,
    gamma_trusted,
)
from pyro_cvi.families.registry import register_family
from pyro_cvi.families.special import digamma, entropy_term, log_gamma, trigamma, trigamma_excess

__all__ = ["INVERSE_GAMMA", "InverseGamma"]


@register_family(dist.InverseGamma, torch.distributions.InverseGamma)
class InverseGamma(AbstractFamily):
    """q(x) = exp(-(a+1) log x - b / x - A), A = log Gamma(a) - a log b, with a > 0 and b > 0."""

    name = "InverseGamma"
    statistics = ("log", "reciprocal")
    event_dims = (0, 0)

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(log x, 1/x)."""
        return x.log(), x.reciprocal()

    def log_partition(self, natural: Natural) -> Tensor:
        """A = log Gamma(a) - a log b."""
        a, b = _shape_rate(natural)
        return log_gamma(a) - a * b.log()

    def to_mean(self, natural: Natural) -> Mean:
        """(log b - psi(a), a / b)."""
        a, b = _shape_rate(natural)
        return b.log() - digamma(a), a / b

    def to_natural(self, mean: Mean) -> Natural:
        """Solves log a - psi(a) = log E[1/x] + E[log x], then b = a / E[1/x], as `Gamma` does."""
        with torch.no_grad():
            a = gamma_shape(mean[1].log() + mean[0])
            natural = -a - 1, -a / mean[1]
        return self.attach_gradient(natural, mean)

    def to_distribution(self, natural: Natural) -> dist.InverseGamma:
        """InverseGamma(a, b)."""
        return dist.InverseGamma(*_shape_rate(natural))

    def natural_of_core(self, core: Any) -> Natural:
        """(-a - 1, -b)."""
        return -core.concentration - 1, -core.rate

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 g = 1/D [[a, b], [b, b^2 psi'(a)]] g, with D = a psi'(a) - 1."""
        a, b = _shape_rate(natural)
        g_shape, g_rate = gradient[0], b * gradient[1]
        excess = trigamma_excess(a)
        return (a * g_shape + g_rate) / excess, b * (trigamma(a) * g_rate + g_shape) / excess

    def is_proper(self, natural: Natural) -> Tensor:
        """Whether a > 0 and b > 0."""
        shape, rate = natural
        return shape.isfinite() & rate.isfinite() & (shape < -1) & (rate < 0)

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """The smaller of the steps at which the shape and the rate reach zero."""
        a, b = _shape_rate(natural)
        return torch.minimum(positive_step(a, -direction[0]), positive_step(b, -direction[1]))

    def retract(self, natural: Natural, direction: Natural, step: Tensor | float) -> Natural:
        """`gamma_retract` along this direction."""
        a, b = gamma_retract(_shape_rate(natural), (-direction[0], -direction[1]), step)
        return self.keep_proper((-a - 1, -b), natural)

    def trusted(self, candidate: Natural, natural: Natural, factor: float) -> Natural:
        """Shape and scale within `factor` of what they were."""
        a, b = gamma_trusted(_shape_rate(candidate), _shape_rate(natural), factor)
        return -a - 1, -b

    def entropy(self, natural: Natural) -> Tensor:
        """H = a + log b + log Gamma(a) - (1 + a) psi(a), by Stirling's remainder."""
        a, b = _shape_rate(natural)
        return entropy_term(a) + b.log() - 2 * digamma(a)

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """The Gammas' KL(p || q), since x -> 1/x is one-to-one."""
        return gamma_kl(*_shape_rate(p), *_shape_rate(q))

    def log_prob(self, natural: Natural, x: Tensor) -> Tensor:
        """Log q(x) = a log b - log Gamma(a) - (a + 1) log x - b / x, for x > 0."""
        a, b = _shape_rate(natural)
        return gamma_log_prob(a, b / (a * x)) - x.log()


def _shape_rate(natural: Natural) -> tuple[Tensor, Tensor]:
    return -natural[0] - 1, -natural[1]


INVERSE_GAMMA = InverseGamma()
