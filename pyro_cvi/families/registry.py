"""Which posterior family a site gets: a table from the class of its prior to a family.

A family of your own needs nothing but the decorator. Here a site whose prior is `Geometric`, with
mass p(x) = exp(x n) (1 - exp(n)) on x = 0, 1, 2, ...:

>>> import pyro.distributions as dist
>>> import torch
>>> from pyro_cvi.families import AbstractFamily, family_of, positive_step, register_family
>>> @register_family(dist.Geometric)
... class Geometric(AbstractFamily):
...     name, statistics, event_dims = "Geometric", ("identity",), (0,)
...     def sufficient_statistics(self, x): return (x,)
...     def log_partition(self, natural): return -torch.log1p(-natural[0].exp())
...     def to_mean(self, natural): return (1 / torch.expm1(-natural[0]),)
...     def to_natural(self, mean): return (-torch.log1p(1 / mean[0]),)
...     def to_distribution(self, natural): return dist.Geometric(-torch.expm1(natural[0]))
...     def natural_of_core(self, core): return (torch.log1p(-core.probs),)
...     def fisher_solve(self, natural, gradient):
...         (mean,) = self.to_mean(natural)
...         return (gradient[0] / (mean * (1 + mean)),)
...     def is_proper(self, natural): return natural[0].isfinite() & (natural[0] < 0)
...     def max_step(self, natural, direction): return positive_step(-natural[0], -direction[0])
>>> family = family_of(dist.Geometric(torch.tensor([0.25, 0.5])).mask(False))
>>> family
Geometric()
>>> family.to_mean(family.from_distribution(dist.Geometric(torch.tensor([0.25, 0.5]))))
(tensor([3., 1.]),)
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from pyro_cvi.families.family import AbstractFamily
from pyro_cvi.families.wrappers import peel

__all__ = ["family_of", "peel", "register_family", "registered_families"]

F = TypeVar("F", bound=type[AbstractFamily])

_FAMILIES: dict[type[torch.distributions.Distribution], AbstractFamily] = {}


def register_family(*priors: type[torch.distributions.Distribution]) -> Callable[[F], F]:
    """Makes the decorated class the posterior family of every site with one of these priors.

    A prior's subclasses are included, unless they are registered themselves.
    """
    for prior in priors:
        if not (isinstance(prior, type) and issubclass(prior, torch.distributions.Distribution)):
            raise TypeError(
                f"register_family: {prior!r} is not a distribution class; "
                "pass the class, not an instance of it"
            )
        if prior in _FAMILIES:
            raise ValueError(
                f"register_family: {prior.__qualname__} already has the family {_FAMILIES[prior]}; "
                "register a subclass of it for a different family"
            )

    def register(family: F) -> F:
        _FAMILIES.update((prior, family()) for prior in priors)
        return family

    return register


def family_of(distribution: torch.distributions.Distribution) -> AbstractFamily | None:
    """The family of the most specific registered class of the peeled distribution, or None."""
    for cls in type(peel(distribution)).__mro__:
        if cls in _FAMILIES:
            return _FAMILIES[cls]
    return None


def registered_families() -> tuple[AbstractFamily, ...]:
    """Every registered family once, in order of registration."""
    return tuple(dict.fromkeys(_FAMILIES.values()))
