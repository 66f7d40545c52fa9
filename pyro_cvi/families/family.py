"""The interface of an exponential family, q(x) = h(x) exp(<T(x), natural> - A(natural)).

Natural and mean parameters are tuples with one tensor per sufficient statistic. A tensor has the
shape `(*batch, *event)`, where `event` has the length that `event_dims` gives for its statistic.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from pyro_cvi.families.wrappers import peel

__all__ = ["AbstractFamily", "Mean", "Natural", "positive_step"]

Natural = tuple[Tensor, ...]
Mean = tuple[Tensor, ...]

_Family = TypeVar("_Family", bound="AbstractFamily")


class AbstractFamily(ABC):
    """q(x) = h(x) exp(<T(x), natural> - A(natural)).

    A family is a collection of functions without state, so a class has exactly one instance:
    `Gamma() is GAMMA`, also after copying or unpickling. No method checks its arguments;
    `is_proper` is there to be asked.
    """

    name: ClassVar[str]
    statistics: ClassVar[tuple[str, ...]]  # names of the entries of T(x)
    event_dims: ClassVar[tuple[int, ...]]  # number of trailing dimensions of each entry of T(x)
    event_dim: ClassVar[int] = 0  # number of trailing dimensions of x itself

    _instance: ClassVar["AbstractFamily"]

    def __new__(cls: type[_Family]) -> _Family:
        """The one instance of this class."""
        if "_instance" not in cls.__dict__:
            cls._instance = super().__new__(cls)
        return cast(_Family, cls._instance)

    def __repr__(self) -> str:
        """The family's name, as a call."""
        return f"{self.name}()"

    @abstractmethod
    def sufficient_statistics(self, x: Tensor) -> Mean:
        """T(x)."""

    def log_base_measure(self, x: Tensor) -> Tensor:
        """Log h(x), which is zero for every family of this package."""
        return torch.zeros(x.shape[: x.dim() - self.event_dim], dtype=x.dtype, device=x.device)

    @abstractmethod
    def log_partition(self, natural: Natural) -> Tensor:
        """A(natural) = log int h(x) exp(<T(x), natural>) dx, convex, of shape `(*batch,)`."""

    @abstractmethod
    def to_mean(self, natural: Natural) -> Mean:
        """E[T(x)] = grad A(natural); differentiable."""

    @abstractmethod
    def to_natural(self, mean: Mean) -> Natural:
        """The inverse of `to_mean`; differentiable once, with Jacobian F^-1."""

    @abstractmethod
    def to_distribution(self, natural: Natural) -> torch.distributions.Distribution:
        """The Pyro distribution with these natural parameters and with batch shape `(*batch,)`."""

    @abstractmethod
    def natural_of_core(self, core: Any) -> Natural:
        """The natural parameters of a distribution without wrappers, for `from_distribution`."""

    @abstractmethod
    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """F^-1 gradient, with F = grad^2 A = d mean / d natural: from dL/dnatural to dL/dmean."""

    @abstractmethod
    def is_proper(self, natural: Natural) -> Tensor:
        """Whether `natural` and A(natural) are finite, as a bool tensor of shape `(*batch,)`."""

    @abstractmethod
    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """sup{t >= 0: natural + t direction is proper}, perhaps inf, of shape `(*batch,)`.

        `natural` itself has to be proper.
        """

    def retract(self, natural: Natural, direction: Natural, step: Tensor | float) -> Natural:
        """A point natural + step direction + O(step^2), proper for every direction and step.

        The plain step, shortened per element to .9 of the largest feasible one. Families with a
        formula of their own replace this method.
        """
        feasible = 0.9 * self.max_step(natural, direction)
        return self.keep_proper(self.advance(natural, direction, feasible.clamp(max=step)), natural)

    def trusted(self, candidate: Natural, natural: Natural, factor: float) -> Natural:
        """`candidate`, changed where it lies too far from `natural` for a noisy step to be trusted.

        Families whose natural parameters range over orders of magnitude let location and shape change
        by no more than `factor` at once; for the others this does nothing.
        """
        return candidate

    def around(self, point: Tensor, spread: float) -> Natural | None:
        """A narrow member near `point`, with a relative standard deviation of about `spread`, or None.

        A fit starts there where `init_loc_fn` has placed a site. The families of this package need no
        such method; sites of another that has none cannot be placed, and start at their prior.
        """
        return None

    def keep_proper(self, candidate: Natural, natural: Natural) -> Natural:
        """`candidate` where it is proper, else `natural`: the step of size zero.

        A retraction is proper in exact arithmetic; this covers the elements that rounding takes to
        the boundary.
        """
        proper = self.is_proper(candidate)
        return tuple(
            torch.where(_lift(proper, n), c, old)
            for c, old, n in zip(candidate, natural, self.event_dims, strict=True)
        )

    def advance(self, natural: Natural, direction: Natural, step: Tensor | float) -> Natural:
        """The plain step natural + step direction; `step` is one for all or of shape `(*batch,)`."""
        sizes = torch.as_tensor(step, dtype=natural[0].dtype, device=natural[0].device)
        return tuple(
            a + _lift(sizes, n) * b
            for a, b, n in zip(natural, direction, self.event_dims, strict=True)
        )

    def from_distribution(self, distribution: torch.distributions.Distribution) -> Natural:
        """The inverse of `to_distribution`, with wrappers peeled and their batch shape kept.

        Dimensions that `to_event` has moved from the batch into the event come back as batch
        dimensions here.
        """
        core = peel(distribution)
        shape = distribution.batch_shape + distribution.event_shape
        return self.expand(self.natural_of_core(core), shape[: len(shape) - len(core.event_shape)])

    def expand(self, natural: Natural, batch_shape: torch.Size) -> Natural:
        """The same parameters with batch shape `batch_shape`."""
        return tuple(
            a.expand(batch_shape + a.shape[a.dim() - n :])
            for a, n in zip(natural, self.event_dims, strict=True)
        )

    def inner(self, left: Natural | Mean, right: Natural | Mean) -> Tensor:
        """<left, right>, summed over statistics and event dimensions, of shape `(*batch,)`."""
        products = [
            (a * b).sum(tuple(range(-n, 0))) if n else a * b
            for a, b, n in zip(left, right, self.event_dims, strict=True)
        ]
        total = products[0]
        for product in products[1:]:
            total = total + product
        return total

    def entropy(self, natural: Natural) -> Tensor:
        """-E[log q] = A(natural) - <natural, mean>, for log h = 0.

        Families replace it where this cancels.
        """
        return self.log_partition(natural) - self.inner(natural, self.to_mean(natural))

    def mean_and_entropy(self, natural: Natural) -> tuple[Mean, Tensor | None]:
        """`to_mean`, with the entropy for families where that is a by-product."""
        return self.to_mean(natural), None

    def entropy_of_mean(self, mean: Mean) -> Tensor | None:
        """The entropy as a function of the mean parameters, for families where that is simple."""
        return None

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """KL(p || q) = A(q) - A(p) - <q - p, mean(p)>.

        Families replace it where this cancels.
        """
        difference = tuple(b - a for a, b in zip(p, q, strict=True))
        return (
            self.log_partition(q) - self.log_partition(p) - self.inner(difference, self.to_mean(p))
        )

    def log_prob(self, natural: Natural, x: Tensor) -> Tensor:
        """Log q(x) = <T(x), natural> - A(natural) + log h(x)."""
        value = self.inner(natural, self.sufficient_statistics(x)) - self.log_partition(natural)
        return value + self.log_base_measure(x)

    def attach_gradient(self, natural: Natural, mean: Mean) -> Natural:
        """`natural` unchanged, with d natural / d mean = F^-1 by the implicit function theorem.

        For `to_natural` by iteration: the iterations run without a graph, and this adds F^-1 (mean
        - mean) = 0.
        """
        fixed = tuple(n.detach() for n in natural)
        zero = tuple(m - m.detach() for m in mean)
        return tuple(n + c for n, c in zip(fixed, self.fisher_solve(fixed, zero), strict=True))


def positive_step(value: Tensor, direction: Tensor) -> Tensor:
    """sup{t >= 0: value + t direction > 0}, elementwise, for a positive `value`."""
    down = direction < 0
    return torch.where(down, value / -torch.where(down, direction, -1.0), torch.inf)


def _lift(per_element: Tensor, event_dim: int) -> Tensor:
    return per_element.reshape(per_element.shape + (1,) * event_dim)
