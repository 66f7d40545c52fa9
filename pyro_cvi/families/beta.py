"""Beta(x | a, b), T(x) = (log x, log(1 - x)), natural = (a - 1, b - 1).

It is the Dirichlet of (x, 1 - x), and shares that family's functions.
"""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families.dirichlet import (
    dirichlet_concentration,
    dirichlet_entropy,
    dirichlet_fisher_solve,
    dirichlet_kl,
    dirichlet_log_partition,
    dirichlet_mean,
)
from pyro_cvi.families.family import AbstractFamily, Mean, Natural, positive_step
from pyro_cvi.families.registry import register_family

__all__ = ["BETA", "Beta"]


@register_family(dist.Beta)
class Beta(AbstractFamily):
    """q(x) = exp((a-1) log x + (b-1) log(1-x) - A), with A the logarithm of the Beta function."""

    name = "Beta"
    statistics = ("log", "log_complement")
    event_dims = (0, 0)

    def sufficient_statistics(self, x: Tensor) -> Mean:
        """(log x, log(1 - x))."""
        return x.log(), torch.log1p(-x)

    def log_partition(self, natural: Natural) -> Tensor:
        """A = log Gamma(a) + log Gamma(b) - log Gamma(a + b)."""
        return dirichlet_log_partition(_alpha(natural))

    def to_mean(self, natural: Natural) -> Mean:
        """(psi(a) - psi(a + b), psi(b) - psi(a + b))."""
        return dirichlet_mean(_alpha(natural)).unbind(-1)

    def to_natural(self, mean: Mean) -> Natural:
        """`dirichlet_concentration` of two, less one."""
        natural = dirichlet_concentration(_join(mean)) - 1
        return self.attach_gradient(natural.unbind(-1), mean)

    def to_distribution(self, natural: Natural) -> dist.Beta:
        """Beta(a, b)."""
        return dist.Beta(natural[0] + 1, natural[1] + 1)

    def natural_of_core(self, core: Any) -> Natural:
        """(a - 1, b - 1)."""
        return core.concentration1 - 1, core.concentration0 - 1

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """`dirichlet_fisher_solve` of two."""
        return dirichlet_fisher_solve(_alpha(natural), _join(gradient)).unbind(-1)

    def is_proper(self, natural: Natural) -> Tensor:
        """Whether a > 0 and b > 0."""
        joined = _join(natural)
        return (joined.isfinite() & (joined > -1)).all(-1)

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """The smaller of the steps at which a and b reach zero."""
        return positive_step(_alpha(natural), _join(direction)).amin(-1)

    def entropy(self, natural: Natural) -> Tensor:
        """`dirichlet_entropy` of two."""
        return dirichlet_entropy(_alpha(natural))

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """`dirichlet_kl` of two."""
        return dirichlet_kl(_alpha(p), _alpha(q))


def _join(pair: Natural) -> Tensor:
    return torch.stack(pair, -1)


def _alpha(natural: Natural) -> Tensor:
    return _join(natural) + 1


BETA = Beta()
