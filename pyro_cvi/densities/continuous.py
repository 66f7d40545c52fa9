"""Rules of continuous distributions."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.algebra.latent import LatentTensor, plain
from pyro_cvi.densities.registry import density, x_log_y

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
    """-1/2 |L^-1 (x - loc)|^2 - log |L| - n/2 log 2 pi: squares of whitened residuals."""
    factor = d._unbroadcasted_scale_tril
    n = plain(factor).shape[-1]
    eye = torch.eye(n, dtype=plain(factor).dtype, device=plain(factor).device)
    whiten = torch.linalg.solve_triangular(factor, eye, upper=False)
    residual = (whiten @ (x - d.loc).unsqueeze(-1)).squeeze(-1)
    log_det = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * residual.square().sum(-1) - log_det - n * _HALF_LOG_2PI


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


@density(dist.Delta)
def delta(d: Any, x: Tensor) -> Tensor:
    """The density that the Delta carries at its point; a latent value is always there."""
    value: Tensor = d.log_density.expand(d.batch_shape)
    if isinstance(x, LatentTensor) or isinstance(d.v, LatentTensor):
        return value
    here = (x == d.v).to(plain(value).dtype).log()
    return value + here.sum(tuple(range(-d.event_dim, 0))) if d.event_dim else value + here
