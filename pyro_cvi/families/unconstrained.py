"""Priors without a family of their own: a Gaussian on the unconstrained value.

    x ~ p,  x = T(u)    =>    p(u) = p(T(u)) |det dT/du|,        q(u) = N(m, V),

with T torch's bijection from the real line (or space) to the support of p: exp for positive values,
sigmoid for an interval, stick-breaking for a simplex.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.utils import _sum_rightmost

from pyro_cvi.families.gaussian import GAUSSIAN
from pyro_cvi.families.registry import family_of
from pyro_cvi.families.wrappers import peel

__all__ = ["Unconstrained", "has_bijection", "log_jacobian", "of_one"]

_TRANSFORMED = torch.distributions.TransformedDistribution
_SPREAD = 2.0
"""Where a prior cannot be sampled, draws are uniform within this of zero."""
_LOW = 0.15865525
"""The probability of what lies a standard deviation below a Gaussian's mean."""
_ANY_SIZE, _RAISED = 2.5, 4.0


class Unconstrained(dist.TorchDistribution):
    """The law of u = T^-1(x) for x ~ `constrained`; real, with the batch shape of that.

    The event shape is that of u; for simplexes, correlation matrices and the like x has another.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's attribute)

    def __init__(self, constrained: Any, transform: Any = None) -> None:
        self.constrained = constrained
        self.transform = bijection(constrained) if transform is None else transform
        whole = constrained.batch_shape + constrained.event_shape
        shape = torch.Size(self.transform.inverse_shape(whole))
        batch = constrained.batch_shape
        super().__init__(batch, shape[len(batch) :], validate_args=False)

    @property
    def support(self) -> Any:
        """All real numbers."""
        n = len(self.event_shape)
        return constraints.independent(constraints.real, n) if n else constraints.real

    def expand(self, batch_shape: Any, _instance: Any = None) -> Unconstrained:
        """The same law for a larger batch."""
        return Unconstrained(self.constrained.expand(batch_shape))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """T^-1 of a draw of x; where x lies on the boundary to rounding, zero."""
        sample_shape = torch.Size(sample_shape)
        if isinstance(peel(self.constrained), dist.ImproperUniform):
            shape = self.shape(sample_shape)
            # it has no parameter that would tell where it is
            return torch.empty(shape, device=None).uniform_(-_SPREAD, _SPREAD)
        with torch.no_grad():
            u: Tensor = self.transform.inv(self.constrained.sample(sample_shape))
            return torch.where(u.isfinite(), u, torch.zeros_like(u))

    def jacobian(self, u: Any, x: Any) -> Any:
        """log |det dT/du|, of the batch shape."""
        return log_jacobian(self.transform, u, x, len(self.event_shape))

    def log_prob(self, u: Tensor) -> Tensor:
        """log p(T(u)) + log |det dT/du|."""
        x = self.transform(u)
        value: Tensor = self.constrained.log_prob(x) + self.jacobian(u, x)
        return value

    @property
    def mean(self) -> Tensor:
        """Where to start: T^-1 of the prior's median or mean; where that is next to nothing, above.

        A scale that is all but zero switches off what it multiplies, and no slope leads back; from above
        a scale finds its way. So where a positive site may have any size (deviation of its logarithm
        `_ANY_SIZE` or more) and a median below one, it starts at one, at most `_RAISED` deviations up.
        """
        for center in (lambda d: _quantile(d, 0.5), _mean):
            u = self._at(center)
            if u is not None:
                return self._raised(u)
        raise NotImplementedError("neither the median nor the mean of the prior is known")

    def _raised(self, u: Tensor) -> Tensor:
        if not _is_positive(self.constrained.support):
            return u
        low, high = (self._at(partial(_quantile, p=p)) for p in (_LOW, 1 - _LOW))
        if low is None or high is None:
            return u
        spread = (high - low) / 2
        return torch.where(spread < _ANY_SIZE, u, u.maximum((u + _RAISED * spread).clamp(max=0.0)))

    def _at(self, center: Callable[[Any], Tensor]) -> Tensor | None:
        """T^-1 of a point of the prior; None where that is not known or not finite."""
        like = self.constrained.batch_shape + self.constrained.event_shape
        try:
            u: Tensor = self.transform.inv(center(self.constrained).expand(like))
        except (NotImplementedError, AttributeError, RuntimeError, ValueError):
            return None
        return u if bool(u.isfinite().all()) else None


def log_jacobian(transform: Any, u: Any, x: Any, event_dim: int) -> Any:
    """log |det dx/du| of x = T(u), summed over the `event_dim` last dims of u."""
    value = transform.log_abs_det_jacobian(u, x)
    return _sum_rightmost(value, event_dim - transform.domain.event_dim)


def _quantile(d: Any, p: float) -> Tensor:
    value: Tensor = peel(d).icdf(torch.tensor(p, device="cpu"))
    return value


def _mean(d: Any) -> Tensor:
    value: Tensor = d.mean
    return value


def has_bijection(d: Any, *, families_too: bool = False) -> bool:
    """Whether a law can be held by a Gaussian on the real line, and has no family of its own.

    With `families_too`, laws whose family is another than the Gaussian count as well.
    """
    family = family_of(d)
    if family is GAUSSIAN or getattr(d, "has_enumerate_support", False):
        return False
    if family is not None and not families_too:
        return False
    if isinstance(peel(d), Unconstrained | dist.Delta) or getattr(d.support, "is_discrete", True):
        return False
    try:
        bijection(d)
    except NotImplementedError:
        return False
    return True


def bijection(d: Any) -> Any:
    """torch's bijection from the real line to the support of d.

    A TransformedDistribution states the codomain of its last transform: all real numbers for a shifted
    Exponential. If the support of what it transforms is smaller, the bijection to that comes first.
    """
    core: Any = peel(d)
    if type(core) is dist.TransformedDistribution or type(core) is _TRANSFORMED:
        base = core.base_dist.support
        if not _is_real(base) and all(t.bijective for t in core.transforms):
            extra = len(core.event_shape) - base.event_dim
            first = biject_to(constraints.independent(base, extra) if extra > 0 else base)
            whole = dist.transforms.ComposeTransform([first, *core.transforms])
            more = len(d.event_shape) - whole.codomain.event_dim
            return dist.transforms.IndependentTransform(whole, more) if more > 0 else whole
    return biject_to(d.support)


def _is_positive(support: Any) -> bool:
    return of_one(support) in (constraints.positive, constraints.nonnegative)


def of_one(support: Any) -> Any:
    """The support of one event, without the dims that `to_event` has added."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _is_real(support: Any) -> bool:
    support = of_one(support)
    return support is constraints.real or support is constraints.real_vector
