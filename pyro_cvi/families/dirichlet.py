"""Dirichlet(x | alpha), T(x) = (log x,), natural = (alpha - 1,), all of shape (*batch, K).

The functions below the class act on alpha itself; `Beta` uses them with K = 2.
"""

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
    inverse_digamma,
    log_gamma,
    ratio_excess,
    trigamma,
    trigamma_excess,
)

__all__ = [
    "DIRICHLET",
    "Dirichlet",
    "dirichlet_concentration",
    "dirichlet_entropy",
    "dirichlet_fisher_solve",
    "dirichlet_kl",
    "dirichlet_log_partition",
    "dirichlet_mean",
]


@register_family(dist.Dirichlet)
class Dirichlet(AbstractFamily):
    """q(x) = exp(sum_k (alpha_k - 1) log x_k - A), with alpha_0 = sum_k alpha_k."""

    name = "Dirichlet"
    statistics = ("log",)
    event_dims = (1,)
    event_dim = 1

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(log x,)."""
        return (x.log(),)

    def log_partition(self, natural: Natural) -> Tensor:
        """A = sum_k log Gamma(alpha_k) - log Gamma(alpha_0)."""
        return dirichlet_log_partition(natural[0] + 1)

    def to_mean(self, natural: Natural) -> Mean:
        """psi(alpha_k) - psi(alpha_0)."""
        return (dirichlet_mean(natural[0] + 1),)

    def to_natural(self, mean: Mean) -> Natural:
        """`dirichlet_concentration` less one."""
        return self.attach_gradient((dirichlet_concentration(mean[0]) - 1,), mean)

    def to_distribution(self, natural: Natural) -> dist.Dirichlet:
        """Dirichlet(alpha)."""
        return dist.Dirichlet(natural[0] + 1)

    def natural_of_core(self, core: Any) -> Natural:
        """(alpha - 1,)."""
        return (core.concentration - 1,)

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """`dirichlet_fisher_solve`."""
        return (dirichlet_fisher_solve(natural[0] + 1, gradient[0]),)

    def is_proper(self, natural: Natural) -> Tensor:
        """alpha_k > 0 for every k."""
        return (natural[0].isfinite() & (natural[0] > -1)).all(-1)

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """The smallest of the steps at which some alpha_k reaches zero."""
        return positive_step(natural[0] + 1, direction[0]).amin(-1)

    def entropy(self, natural: Natural) -> Tensor:
        """`dirichlet_entropy`."""
        return dirichlet_entropy(natural[0] + 1)

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """`dirichlet_kl`."""
        return dirichlet_kl(p[0] + 1, q[0] + 1)


def dirichlet_log_partition(alpha: Tensor) -> Tensor:
    """sum_k log Gamma(alpha_k) - log Gamma(alpha_0), with alpha_0 = sum_k alpha_k."""
    return log_gamma(alpha).sum(-1) - log_gamma(alpha.sum(-1))


def dirichlet_mean(alpha: Tensor) -> Tensor:
    """E[log x_k] = psi(alpha_k) - psi(alpha_0)."""
    return digamma(alpha) - digamma(alpha.sum(-1, keepdim=True))


def dirichlet_entropy(alpha: Tensor) -> Tensor:
    """H = sum_k e(alpha_k) - e(alpha_0) - (K - 1) psi(alpha_0), with e the `entropy_term`."""
    total, others = alpha.sum(-1), alpha.shape[-1] - 1
    return entropy_term(alpha).sum(-1) - entropy_term(total) - others * digamma(total)


def dirichlet_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL = sum_k q_k E(t_k) + sum_k bregman(p_k, q_k) - bregman(p_0, q_0).

    With E(t) = t - 1 - log t and t_k = (p_k / p_0) / (q_k / q_0). It is the sum of the Bregman
    divergences of log Gamma for each k, less that of the totals; their leading parts, which would
    cancel for large concentrations, combine into the first sum of positive terms.
    """
    p_total, q_total = p.sum(-1, keepdim=True), q.sum(-1, keepdim=True)
    leading = q * ratio_excess(p * q_total / (q * p_total))
    rest = bregman_log_gamma(p, q).sum(-1) - bregman_log_gamma(p_total, q_total).squeeze(-1)
    return leading.sum(-1) + rest


def dirichlet_fisher_solve(alpha: Tensor, gradient: Tensor) -> Tensor:
    """F^-1 g for F = diag psi'(alpha) - psi'(alpha_0) 1 1^T, by Sherman-Morrison.

    With v = 1/psi' it is v g + v <v, g> / (v_0 - sum_k v_k). The denominator cancels for large
    alpha, where v(a) = a - 1/2 + ...; with w(a) = a - v(a), which lies between 0 and 1/2, it is
    also sum_k w_k - w_0, and each form serves where its terms are the smaller ones. If one alpha_k
    dominates, the result is as uncertain as rounding of alpha - 1 makes the small ones.
    """
    total = alpha.sum(-1, keepdim=True)
    slope, slope_total = trigamma(alpha), trigamma(total)
    v = 1 / slope
    small = 1 / slope_total - v.sum(-1, keepdim=True)
    w, w_total = trigamma_excess(alpha) / slope, trigamma_excess(total) / slope_total
    large = w.sum(-1, keepdim=True) - w_total
    denominator = torch.where(total < 1, small, large)
    return v * (gradient + (v * gradient).sum(-1, keepdim=True) / denominator)


def dirichlet_concentration(mean: Tensor) -> Tensor:
    """The alpha with psi(alpha_k) - psi(alpha_0) = mean_k, without a gradient.

    Given s = alpha_0, alpha_k(s) = psi^-1(psi(s) + mean_k), and H(s) = sum_k alpha_k(s) - s is
    concave with H(0) = 0. Its asymptote (S - 1) s + (K - S)/2, S = sum_k exp(mean_k) < 1, lies
    above it, so that Newton's method from the asymptote's root descends monotonically to the root
    of H. It needs about five steps, and up to thirty when all alpha_k are tiny and one is much
    larger than the others. NaN where exp(mean) sums to one in this precision.
    """
    with torch.no_grad():
        power_sum = mean.exp().sum(-1, keepdim=True)
        shortfall = -torch.expm1(torch.logsumexp(mean, -1, keepdim=True))
        total = (mean.shape[-1] - power_sum) / (2 * shortfall)
        for _ in range(64):
            alpha = inverse_digamma(digamma(total) + mean)
            value = alpha.sum(-1, keepdim=True) - total
            # -H'(s) = psi'(s) (sum_k w(alpha_k) - w(s) - H), as in `dirichlet_fisher_solve`.
            w = (trigamma_excess(alpha) / trigamma(alpha)).sum(-1, keepdim=True)
            change = value / (trigamma(total) * (w - value) - trigamma_excess(total))
            total = total + change
            if not (change.abs() > torch.finfo(mean.dtype).eps ** 0.75 * total).any():
                break
        return inverse_digamma(digamma(total) + mean)


DIRICHLET = Dirichlet()
