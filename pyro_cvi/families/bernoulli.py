"""Bernoulli(x | logit), T(x) = (x,), natural = (logit,)."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_cvi.families.family import AbstractFamily, Mean, Natural
from pyro_cvi.families.registry import register_family

__all__ = ["BERNOULLI", "Bernoulli"]


@register_family(dist.Bernoulli)
class Bernoulli(AbstractFamily):
    """q(x) = exp(n x - A), A = log(1 + exp n), for x in {0, 1}."""

    name = "Bernoulli"
    statistics = ("identity",)
    event_dims = (0,)

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(x,)."""
        return (x,)

    def log_partition(self, natural: Natural) -> Tensor:
        """A = log(1 + exp n); torch's softplus drops half of the digits in float64 above 20."""
        return -logsigmoid(-natural[0])

    def to_mean(self, natural: Natural) -> Mean:
        """(1 / (1 + exp(-n)),)."""
        return (natural[0].sigmoid(),)

    def to_natural(self, mean: Mean) -> Natural:
        """(log m - log(1 - m),)."""
        return (mean[0].logit(),)

    def to_distribution(self, natural: Natural) -> dist.Bernoulli:
        """Bernoulli(logits=n)."""
        return dist.Bernoulli(logits=natural[0])

    def natural_of_core(self, core: Any) -> Natural:
        """(logit,); torch keeps a probability of exactly 0 or 1 finite by clamping it."""
        return (core.logits,)

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 g = g / (m (1 - m)).

        A variance that underflows counts as the smallest normal number, so that 0 / 0 is 0.
        """
        (n,) = natural
        variance = n.sigmoid() * (-n).sigmoid()
        return (gradient[0] / variance.clamp(min=torch.finfo(n.dtype).tiny),)

    def is_proper(self, natural: Natural) -> Tensor:
        """Every finite logit."""
        return natural[0].isfinite()

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """Infinite."""
        return torch.full_like(natural[0] + direction[0], torch.inf)

    def entropy(self, natural: Natural) -> Tensor:
        """-m log m - (1 - m) log(1 - m)."""
        (n,) = natural
        return -n.sigmoid() * logsigmoid(n) - (-n).sigmoid() * logsigmoid(-n)

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """m_p log(m_p / m_q) + (1 - m_p) log((1 - m_p) / (1 - m_q))."""
        n = p[0]
        up, down = logsigmoid(n) - logsigmoid(q[0]), logsigmoid(-n) - logsigmoid(-q[0])
        return n.sigmoid() * up + (-n).sigmoid() * down


BERNOULLI = Bernoulli()
