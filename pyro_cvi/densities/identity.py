"""When two distributions or tensors are the same: by class, shapes and a checksum of the numbers."""

from __future__ import annotations

import zlib
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.algebra.latent import LatentTensor
from pyro_cvi.densities.registry import is_probs, unexpanded

__all__ = ["constant_law", "digest", "law"]

_MOST = 1 << 12
"""Most elements of a parameter whose checksum is cheaper than what it may spare."""

_PARAMETERS = {
    dist.Normal: ("loc", "scale"),
    dist.Gamma: ("concentration", "rate"),
    dist.Exponential: ("rate",),
    dist.Dirichlet: ("concentration",),
    dist.Poisson: ("rate",),
    dist.Bernoulli: ("_param",),
    dist.Categorical: ("_param",),
    dist.MultivariateNormal: ("loc", "_unbroadcasted_scale_tril"),
    dist.Wishart: ("df", "_unbroadcasted_scale_tril"),
}
"""Distributions that are what these attributes say, and nothing else."""


def law(fn: Any) -> tuple[Any, ...] | None:
    """The class and parameters of a distribution of `_PARAMETERS`, perhaps wrapped, else None."""
    inner: Any = None
    if isinstance(fn, torch.distributions.Independent):
        inner = fn.base_dist, fn.reinterpreted_batch_ndims
    elif isinstance(fn, dist.ExpandedDistribution):
        inner = fn.base_dist, tuple(fn.batch_shape)
    if inner is not None:
        base = law(inner[0])
        return None if base is None else (type(fn).__name__, inner[1], base)
    names = _PARAMETERS.get(type(fn))
    if names is None:
        return None
    parameters = tuple(digest(unexpanded(fn.__dict__[n])) for n in names)
    kind = is_probs(fn) if names == ("_param",) else None
    return type(fn).__name__, kind, tuple(fn.batch_shape), parameters


def constant_law(fn: Any) -> tuple[Any, ...] | None:
    """The same, where all parameters are small constants that nobody learns; else None."""
    core = fn
    while isinstance(core, torch.distributions.Independent | dist.ExpandedDistribution):
        core = core.base_dist
    for name in _PARAMETERS.get(type(core), ()):
        value = core.__dict__[name]
        if isinstance(value, LatentTensor) or value.requires_grad or value.numel() > _MOST:
            return None
    return law(fn)


def digest(x: Any) -> Any:
    """Shape, dtype and a checksum of a tensor's bytes; anything else as it is."""
    if not isinstance(x, Tensor):
        return repr(x)
    flat = x.detach().reshape(-1).contiguous().cpu()
    # One element of a column counts as contiguous, with the stride of the column.
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    bits = flat.view(torch.uint8) if flat.numel() else flat
    return tuple(x.shape), x.dtype, zlib.crc32(bits.numpy().tobytes())
