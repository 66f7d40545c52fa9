"""log p(x | parameters) as torch code that runs on plain tensors and on LatentTensors alike.

A rule names no posterior family and no message: conjugacy is read off the expression it builds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.algebra.evaluate import OpaqueError
from pyro_cvi.algebra.expression import opaque
from pyro_cvi.algebra.functions import link
from pyro_cvi.algebra.latent import LatentTensor, expression_of, latents_in, plain
from pyro_cvi.algebra.reason import Reason
from pyro_cvi.linalg import broadcast_shapes

__all__ = [
    "density",
    "log_density",
    "plain_log_prob",
    "registered_densities",
    "sites_inside",
    "unexpanded",
]

DensityRule = Callable[[Any, Tensor], Tensor]
_RULES: dict[type, DensityRule] = {}


def density(*classes: type) -> Callable[[DensityRule], DensityRule]:
    """Register rule(d, x) = log p(x | d) for distribution classes; the most specific class wins.

    The rule is ordinary torch code over `d`'s parameters and `x` (either may hold latents), and
    returns one value per batch element of `d`. Write the density in terms of what a posterior can
    average: powers and logs of parameters, and squares of residuals rather than their expansion.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from pyro_cvi import density
        >>> class Maxwell(dist.TorchDistribution):
        ...     arg_constraints = {"precision": dist.constraints.positive}
        ...     support = dist.constraints.positive
        ...     def __init__(self, precision, validate_args=None):
        ...         self.precision = precision
        ...         super().__init__(precision.shape, validate_args=validate_args)
        ...     def expand(self, batch_shape, _instance=None):
        ...         return Maxwell(self.precision.expand(batch_shape))
        ...     def log_prob(self, x):
        ...         return maxwell(self, x)
        >>> @density(Maxwell)
        ... def maxwell(d, x):
        ...     return 1.5 * d.precision.log() - 0.5 * d.precision * x ** 2 + 2 * x.log() - 0.2258
    """

    def decorate(rule: DensityRule) -> DensityRule:
        for cls in classes:
            _RULES[cls] = rule
        return rule

    return decorate


def registered_densities() -> dict[type, DensityRule]:
    """All rules by distribution class."""
    return dict(_RULES)


def log_density(d: Any, x: Tensor) -> Tensor:
    """log p(x) of a Pyro distribution whose parameters or value may be LatentTensors.

    Wrappers keep their meaning: `Independent` sums, `MaskedDistribution` zeroes, expansion
    broadcasts. A distribution without a rule is a function of its parameters where it is elementwise,
    else opaque.
    """
    if isinstance(d, torch.distributions.Independent):
        value = log_density(d.base_dist, x)
        n = d.reinterpreted_batch_ndims
        return value.sum(tuple(range(-n, 0))) if n else value
    if isinstance(d, dist.MaskedDistribution):
        inner = log_density(d.base_dist, x)
        if isinstance(d._mask, bool):
            return inner if d._mask else torch.zeros_like(plain(inner))
        return torch.where(
            d._mask, inner, torch.zeros((), dtype=plain(inner).dtype, device=plain(inner).device)
        )
    if isinstance(d, dist.ExpandedDistribution):
        return log_density(d.base_dist, x).expand(d.batch_shape)
    rule = _lookup(type(d))
    if rule is not None:
        value = rule(d, x)
        return value.expand(broadcast_shapes(value.shape, d.batch_shape))
    return _without_rule(d, x)


def _lookup(cls: type) -> DensityRule | None:
    """The rule of the nearest base, unless a class below that base has a log_prob of its own."""
    for base in cls.__mro__:
        if base in _RULES:
            return _RULES[base]
        if "log_prob" in base.__dict__ and base.__module__ != "pyro.distributions.torch":
            return None  # Pyro's versions of torch's distributions keep the density
    return None


def x_log_y(x: Tensor, y: Tensor) -> Tensor:
    """x log y, and zero where x is: at the boundary of a support as torch has it."""
    if isinstance(x, LatentTensor) or isinstance(y, LatentTensor):
        return x * y.log()
    return torch.xlogy(x, y)


class _LogProb:
    """log_prob of a univariate distribution as a function of its value and parameters."""

    def __init__(self, cls: type, names: tuple[str, ...]) -> None:
        self.cls, self.names = cls, names

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        arguments = dict(zip(self.names, parameters, strict=True))
        value: Tensor = self.cls(**arguments, validate_args=False).log_prob(x)
        return value


def _without_rule(d: Any, x: Tensor) -> Tensor:
    names = _parameter_names(d)
    parameters = [getattr(d, name) for name in names] if names is not None else []
    value = plain(_plain_log_prob(d, x))
    if names is not None and len(d.event_shape) == 0:
        function = _LogProb(type(d), names)
        if torch.equal(function(plain(x), *plain(parameters)).expand(value.shape), value):
            e = link(type(d).__name__, function, *(expression_of(v) for v in (x, *parameters)))
            return LatentTensor.make(value, e) if e.sites else value
    sites = frozenset().union(*(v.expression.sites for v in latents_in([x, *d.__dict__.values()])))
    sites |= sites_inside(d)
    if not sites:
        return value
    reason = Reason(f"{type(d).__name__} has no density rule")
    return LatentTensor.make(value, opaque(sites, reason, tuple(value.shape)))


def sites_inside(d: Any, depth: int = 4) -> frozenset[str]:
    """Sites in the parameters of nested distributions (mixtures, transforms)."""
    found: frozenset[str] = frozenset()
    if depth == 0:
        return found
    for v in getattr(d, "__dict__", {}).values():
        found |= frozenset().union(*(t.expression.sites for t in latents_in(v)))
        children = v if isinstance(v, list | tuple) else [v]
        for child in children:
            if hasattr(child, "__dict__") and not isinstance(child, Tensor | type):
                found |= sites_inside(child, depth - 1)
    return found


def _plain_log_prob(d: Any, x: Tensor) -> Tensor:
    value: Tensor = d.log_prob(x)
    return value


def _parameter_names(d: Any) -> tuple[str, ...] | None:
    """The constructor's tensor arguments, when rebuilding from them is certain to work."""
    try:
        names = [n for n in d.arg_constraints if isinstance(getattr(d, n), Tensor)]
    except (AttributeError, NotImplementedError):
        return None
    if "probs" in names and "logits" in names:
        names.remove("logits" if is_probs(d) else "probs")
    try:
        arguments = {n: plain(getattr(d, n)) for n in names}
        rebuilt = type(d)(**arguments, validate_args=False)
        if tuple(rebuilt.batch_shape) == tuple(d.batch_shape):
            return tuple(names)
    except (TypeError, ValueError, OpaqueError):
        pass
    return None


def unexpanded(x: Tensor) -> Tensor:
    """The tensor with size one along axes that it only repeats.

    A table `phi[z]` of enumerated topics in a plate of words repeats itself for every word.
    """
    for dim, (size, stride) in enumerate(zip(plain(x).shape, plain(x).stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(dim, 0, 1)
    return x


def plain_log_prob(d: Any, x: Tensor) -> Tensor:
    """d.log_prob(x), without forming what a plate only repeats."""
    if isinstance(d, torch.distributions.Categorical):
        name = "probs" if is_probs(d) else "logits"
        table = getattr(d, name)
        small = unexpanded(table)
        if small is not table:
            value: Tensor = type(d)(**{name: small}, validate_args=False).log_prob(x)
            return value.expand(broadcast_shapes(value.shape, d.batch_shape))
    return _plain_log_prob(d, x)


def is_probs(d: Any) -> bool:
    """Whether a distribution was given `probs` (and not `logits`)."""
    return "probs" in d.__dict__ and d.__dict__.get("_param") is d.__dict__["probs"]
