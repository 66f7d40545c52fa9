"""Rules of continuous distributions."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.algebra.functions import scaled_matrix
from pyro_cvi.algebra.latent import LatentTensor, expression_of, plain
from pyro_cvi.densities.registry import density, log_density, x_log_y
from pyro_cvi.families import Unconstrained, log_jacobian
from pyro_cvi.linalg import broadcast_shapes, inverse_precision

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def _normal(x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    precision = scale**-2
    return -0.5 * precision * (x - loc).square() + 0.5 * precision.log() - _HALF_LOG_2PI


@density(torch.distributions.Normal)
def normal(d: Any, x: Tensor) -> Tensor:
    """-P/2 (x - loc)^2 + 1/2 log P - 1/2 log 2 pi, with P = scale^-2."""
    return _normal(x, d.loc, d.scale)


@density(torch.distributions.LogNormal)
def log_normal(d: Any, x: Tensor) -> Tensor:
    """Normal(log x | loc, scale) - log x."""
    log_x = x.log()
    return _normal(log_x, d.loc, d.scale) - log_x


@density(torch.distributions.MultivariateNormal)
def multivariate_normal(d: Any, x: Tensor) -> Tensor:
    """-1/2 |L^-1 (x - loc)|^2 - log |L| - n/2 log 2 pi: squares of whitened residuals.

    For a latent precision P it is -1/2 r^T P r + 1/2 log det P - n/2 log 2 pi with r = x - loc, which
    is affine in (P, log det P).
    """
    if isinstance(d.__dict__.get("precision_matrix"), LatentTensor):
        precision, residual = _as_given(d, d.precision_matrix), x - d.loc
        quadratic = torch.einsum("...i,...ij,...j->...", residual, precision, residual)
        constant = plain(precision).shape[-1] * _HALF_LOG_2PI
        return 0.5 * torch.logdet(precision) - 0.5 * quadratic - constant
    factor, c = d._unbroadcasted_scale_tril, None
    n = plain(factor).shape[-1]
    parts = scaled_matrix(expression_of(factor)) if isinstance(factor, LatentTensor) else None
    if parts is not None:  # c L with a constant L: squares of residuals, times c^-2
        size = plain(factor)[..., :1, :1] / parts[1][..., :1, :1]
        c = LatentTensor.make(size, parts[0]).squeeze(-1).squeeze(-1)
        factor = parts[1]
    eye = torch.eye(n, dtype=plain(factor).dtype, device=plain(factor).device)
    whiten = torch.linalg.solve_triangular(factor, eye, upper=False)
    squares = (whiten @ (x - d.loc).unsqueeze(-1)).squeeze(-1).square().sum(-1)
    constant = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1) + n * _HALF_LOG_2PI
    if c is None:
        return -0.5 * squares - constant
    precision = c**-2
    return 0.5 * (n * precision.log() - precision * squares) - constant


def _as_given(d: Any, matrix: Tensor) -> Tensor:
    """A matrix parameter without the batch dims that the distribution has expanded it by."""
    shape = plain(d._unbroadcasted_scale_tril).shape
    matrix = matrix[(0,) * (plain(matrix).ndim - len(shape))]
    for dim, size in enumerate(shape[:-2]):
        matrix = matrix.narrow(dim, 0, 1) if size == 1 else matrix
    return matrix


@density(torch.distributions.Wishart)
def wishart(d: Any, x: Tensor) -> Tensor:
    """(nu-n-1)/2 log det X - 1/2 tr(P X) + nu/2 log det P/2 - log Gamma_n(nu/2), with P = V^-1."""
    n = d.event_shape[-1]
    if isinstance(d.__dict__.get("precision_matrix"), LatentTensor):
        precision = d.precision_matrix
        log_det = torch.logdet(precision)
    else:
        factor = d._unbroadcasted_scale_tril
        precision = inverse_precision(factor)
        log_det = -2 * torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    halves = torch.arange(n, dtype=plain(precision).dtype, device=plain(precision).device) / 2
    log_gamma = torch.lgamma(0.5 * d.df.unsqueeze(-1) - halves).sum(-1)
    return (
        0.5 * (d.df - n - 1) * torch.logdet(x)
        - 0.5 * (precision * x).sum((-2, -1))
        + 0.5 * d.df * (log_det - n * math.log(2))
        - log_gamma
        - n * (n - 1) / 4 * math.log(math.pi)
    )


def _gamma(x: Tensor, concentration: Tensor, rate: Tensor) -> Tensor:
    return (
        concentration * rate.log()
        + x_log_y(concentration - 1, x)
        - rate * x
        - torch.lgamma(concentration)
    )


@density(torch.distributions.Gamma, torch.distributions.Chi2)
def gamma(d: Any, x: Tensor) -> Tensor:
    """a log b + (a - 1) log x - b x - log Gamma(a)."""
    return _gamma(x, d.concentration, d.rate)


@density(dist.InverseGamma)
def inverse_gamma(d: Any, x: Tensor) -> Tensor:
    """a log b - (a + 1) log x - b / x - log Gamma(a)."""
    return (
        d.concentration * d.rate.log()
        - (d.concentration + 1) * x.log()
        - d.rate * x.reciprocal()
        - torch.lgamma(d.concentration)
    )


@density(torch.distributions.Exponential)
def exponential(d: Any, x: Tensor) -> Tensor:
    """log b - b x."""
    return d.rate.log() - d.rate * x


@density(torch.distributions.Beta)
def beta(d: Any, x: Tensor) -> Tensor:
    """(a - 1) log x + (b - 1) log(1 - x) - log B(a, b)."""
    a, b = d.concentration1, d.concentration0
    log_b = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
    return x_log_y(a - 1, x) + x_log_y(b - 1, 1 - x) - log_b


@density(torch.distributions.Dirichlet)
def dirichlet(d: Any, x: Tensor) -> Tensor:
    """sum_k (a_k - 1) log x_k - log B(a)."""
    a = d.concentration
    log_b = torch.lgamma(a).sum(-1) - torch.lgamma(a.sum(-1))
    return x_log_y(a - 1, x).sum(-1) - log_b


@density(torch.distributions.TransformedDistribution)
def transformed(d: Any, y: Tensor) -> Tensor:
    """log p(x) - log |det dT/dx| of y = T(x), step by step through the transforms."""
    event_dim, like = len(d.event_shape), plain(y)
    result = torch.zeros((), dtype=like.dtype, device=like.device)
    for t in reversed(d.transforms):
        x = t.inv(y)
        event_dim += t.domain.event_dim - t.codomain.event_dim
        result = result - log_jacobian(t, x, y, event_dim)
        y = x
    extra = event_dim - len(d.base_dist.event_shape)
    inner = log_density(d.base_dist, y)
    return result + (inner.sum(tuple(range(-extra, 0))) if extra > 0 else inner)


@density(dist.ImproperUniform)
def improper_uniform(d: Any, x: Tensor) -> Tensor:
    """Zero, on the whole support."""
    own = plain(x).shape[: plain(x).ndim - len(d.event_shape)]
    return plain(x).new_zeros(broadcast_shapes(own, d.batch_shape))


@density(Unconstrained)
def unconstrained(d: Any, u: Tensor) -> Tensor:
    """log p(T(u)) + log |det dT/du|."""
    x = d.transform(u)
    value: Tensor = log_density(d.constrained, x) + d.jacobian(u, x)
    return value


@density(dist.Delta)
def delta(d: Any, x: Tensor) -> Tensor:
    """The density that the Delta carries at its point; a latent value is always there."""
    value: Tensor = d.log_density.expand(d.batch_shape)
    if isinstance(x, LatentTensor) or isinstance(d.v, LatentTensor):
        return value
    here = (x == d.v).to(plain(value).dtype).log()
    return value + here.sum(tuple(range(-d.event_dim, 0))) if d.event_dim else value + here
