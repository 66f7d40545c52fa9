"""Marginal quantiles: F(x) = q solved by bisection on sampled-free cumulative functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_cvi.families.beta import BETA
from pyro_cvi.families.dirichlet import DIRICHLET
from pyro_cvi.families.family import AbstractFamily, Natural
from pyro_cvi.families.gamma import GAMMA
from pyro_cvi.families.inverse_gamma import INVERSE_GAMMA

__all__ = ["quantile"]

_STEPS = {torch.float64: 200, torch.float32: 100}


def quantile(family: AbstractFamily, natural: Natural, q: Tensor) -> Tensor:
    """x with P(X <= x) = q, elementwise; for a Dirichlet the quantiles of its Beta marginals.

    Shapes: natural `(*batch, *event)`, q a scalar; returns the shape of x. Families without a
    cumulative function use 4096 draws.
    """
    q = q.to(natural[0])
    if family is GAMMA:
        shape, rate = natural[0] + 1, -natural[1]
        return _gamma_quantile(shape, q) / rate
    if family is INVERSE_GAMMA:
        shape, rate = -natural[0] - 1, -natural[1]
        return rate / _gamma_quantile(shape, 1 - q)
    if family is BETA:
        return _beta_quantile(natural[0] + 1, natural[1] + 1, q)
    if family is DIRICHLET:
        a = natural[0] + 1
        return _beta_quantile(a, a.sum(-1, keepdim=True) - a, q)
    draws = family.to_distribution(natural).sample(torch.Size((4096,)))
    return torch.quantile(draws, float(q), dim=0)


def _gamma_quantile(shape: Tensor, q: Tensor) -> Tensor:
    """Bisection on log x for the regularised incomplete gamma function."""
    low = ((q.clamp(min=1e-300).log() + torch.lgamma(shape + 1)) / shape).clamp(min=-700) - 1
    high = (shape + 40 * shape.sqrt() + 750).log()
    return _bisect(lambda t: torch.special.gammainc(shape, t.exp()), low, high, q).exp()


def _beta_quantile(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """Bisection on the logit for the regularised incomplete beta function."""
    low, high = torch.full_like(a, -700.0), torch.full_like(a, 700.0)
    return torch.sigmoid(_bisect(lambda t: incomplete_beta(a, b, t), low, high, q))


def _bisect(cdf: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, q: Tensor) -> Tensor:
    low, high = low.clone(), high.clone()
    for _ in range(_STEPS.get(q.dtype, 60)):
        middle = (low + high) / 2
        below = cdf(middle) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def incomplete_beta(a: Tensor, b: Tensor, logit: Tensor) -> Tensor:
    """I_x(a, b) at x = sigmoid(logit), by the continued fraction of Lentz on the side that converges.

    Reference: W. H. Press et al., Numerical Recipes, 6.4 (the continued fraction is DLMF 8.17.22).
    """
    x = torch.sigmoid(logit)
    swap = x > (a + 1) / (a + b + 2)
    p, r = torch.where(swap, b, a), torch.where(swap, a, b)
    t = torch.where(swap, -logit, logit)
    y = torch.sigmoid(t)
    front = (
        p * torch.nn.functional.logsigmoid(t)
        + r * torch.nn.functional.logsigmoid(-t)
        - (torch.lgamma(p) + torch.lgamma(r) - torch.lgamma(p + r))
    ).exp() / p
    value = front * _fraction(p, r, y)
    return torch.where(swap, 1 - value, value)


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny * 1e10
    c = torch.ones_like(x)
    d = 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    h = d
    for m in range(1, 200):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away(1 + even * d, tiny)
        c = _away(1 + even / c, tiny)
        h = h * d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away(1 + odd * d, tiny)
        c = _away(1 + odd / c, tiny)
        change = d * c
        h = h * change
        if bool(((change - 1).abs() < 4 * torch.finfo(x.dtype).eps).all()):
            break
    return h


def _away(value: Tensor, tiny: float) -> Tensor:
    return torch.where(value.abs() < tiny, torch.full_like(value, tiny), value)
