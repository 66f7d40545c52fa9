"""Peels the wrappers that change a distribution's shape or mask but not what it is."""

import pyro.distributions as dist
import torch

__all__ = ["peel"]

_WRAPPERS = (
    torch.distributions.Independent,
    dist.ExpandedDistribution,
    dist.MaskedDistribution,
)


def peel(distribution: torch.distributions.Distribution) -> torch.distributions.Distribution:
    """The core of a distribution: `Independent`, `Expanded` and `Masked` wrappers removed.

    A `TransformedDistribution` is not a wrapper: it is another distribution. The core's batch shape
    can be smaller than the original's; `AbstractFamily.from_distribution` restores it.

    >>> import pyro.distributions as dist, torch
    >>> peel(dist.Normal(torch.zeros(3), 1.0).to_event(1).mask(False))
    Normal(loc: torch.Size([3]), scale: torch.Size([3]))
    """
    while isinstance(distribution, _WRAPPERS):
        distribution = distribution.base_dist
    return distribution
