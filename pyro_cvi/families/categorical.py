"""Categorical(x | logits), T(x) = (one-hot indicators,), natural = (logits,), of shape (*batch, K).

The coordinates are over-complete: adding a constant to the logits changes nothing. Every function
accepts any representative; `to_natural` returns the one with A = 0, the log-probabilities.
"""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families.family import AbstractFamily, Mean, Natural
from pyro_cvi.families.registry import register_family

__all__ = ["CATEGORICAL", "Categorical"]


@register_family(dist.Categorical)
class Categorical(AbstractFamily):
    """q(x) = exp(n_x - A), A = log sum_k exp n_k, for x in {0, ..., K-1}."""

    name = "Categorical"
    statistics = ("indicator",)
    event_dims = (1,)

    def sufficient_statistics(self, x: Tensor, *, categories: int | None = None) -> Mean:
        """(one-hot x,), of integer labels and the number of `categories`.

        Floating x is taken to be one-hot already.
        """
        if x.is_floating_point():
            return (x,)
        if categories is None:
            raise ValueError(
                "Categorical.sufficient_statistics: integer labels do not say how many categories "
                "there are; pass categories=K, or one-hot x of a floating dtype"
            )
        return (torch.nn.functional.one_hot(x, categories).to(torch.get_default_dtype()),)

    def log_partition(self, natural: Natural) -> Tensor:
        """A = log sum_k exp n_k."""
        return natural[0].logsumexp(-1)

    def to_mean(self, natural: Natural) -> Mean:
        """The probabilities, exp(n_k - A)."""
        return (natural[0].softmax(-1),)

    def to_natural(self, mean: Mean) -> Natural:
        """The log-probabilities."""
        return (mean[0].log(),)

    def to_distribution(self, natural: Natural) -> dist.Categorical:
        """Categorical(logits=n), which normalises them."""
        return dist.Categorical(logits=natural[0])

    def natural_of_core(self, core: Any) -> Natural:
        """The normalised logits; torch keeps a probability of exactly 0 finite by clamping it."""
        return (core.logits,)

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 g = g_k / m_k - sum_j g_j, the v with (diag m - m m^T) v = g and <m, v> = 0.

        F is singular along constants; gradients of functions of the distribution sum to zero, and
        any constant may be added to v. A gradient that does not sum to zero is first projected, g -
        m sum_j g_j. A probability that underflows counts as the smallest normal number: 0 / 0 is
        then 0.
        """
        (mean,) = self.to_mean(natural)
        scaled = gradient[0] / mean.clamp(min=torch.finfo(mean.dtype).tiny)
        return (scaled - gradient[0].sum(-1, keepdim=True),)

    def is_proper(self, natural: Natural) -> Tensor:
        """All logits finite."""
        return natural[0].sum(-1).isfinite()

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """Infinite."""
        return torch.full_like((natural[0] + direction[0])[..., 0], torch.inf)

    def entropy(self, natural: Natural) -> Tensor:
        """-sum_k m_k log m_k."""
        log_mean = natural[0].log_softmax(-1)
        return -(log_mean.exp() * log_mean).sum(-1)

    def entropy_of_mean(self, mean: Mean) -> Tensor:
        """-sum_k m_k log m_k."""
        result: Tensor = torch.special.entr(mean[0]).sum(-1)
        return result

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """sum_k p_k log(p_k / q_k)."""
        log_p, log_q = p[0].log_softmax(-1), q[0].log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    def log_prob(self, natural: Natural, x: Tensor) -> Tensor:
        """n_x - A, for integer labels or one-hot x."""
        if x.is_floating_point():
            return (x * natural[0].log_softmax(-1)).sum(-1)
        value: Tensor = dist.Categorical(logits=natural[0]).log_prob(x)
        return value


CATEGORICAL = Categorical()
