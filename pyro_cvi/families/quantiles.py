"""Marginal quantiles: F(x) = q solved by bisection on cumulative functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.families.beta import BETA
from pyro_cvi.families.dirichlet import DIRICHLET
from pyro_cvi.families.family import AbstractFamily, Natural
from pyro_cvi.families.gamma import GAMMA
from pyro_cvi.families.inverse_gamma import INVERSE_GAMMA

__all__ = ["quantile"]

_STEPS = 64
_BELL = 50.0
"""From this size of both concentrations on, the density of a Beta's logit is a plain bell."""
_NODES = 64


def quantile(family: AbstractFamily, natural: Natural, q: Tensor) -> Tensor:
    """x with P(X <= x) = q, elementwise; for a Dirichlet the quantiles of its Beta marginals.

    Shapes: natural `(*batch, *event)`, q a scalar; returns the shape of x. All is done in float64.
    Other families give their `icdf`, or the quantiles of 4096 draws of a fixed seed.
    """
    like = natural[0]
    natural, q = tuple(n.detach().double() for n in natural), q.to(like.device).double()
    if family is GAMMA:
        result = _gamma_quantile(natural[0] + 1, q, 1 - q) / -natural[1]
    elif family is INVERSE_GAMMA:
        result = -natural[1] / _gamma_quantile(-natural[0] - 1, 1 - q, q)
    elif family is BETA:
        result = _beta_quantile(natural[0] + 1, natural[1] + 1, q)
    elif family is DIRICHLET:
        a = natural[0] + 1
        result = _beta_quantile(a, a.sum(-1, keepdim=True) - a, q)
    else:
        result = _any_quantile(family.to_distribution(natural), q)
    return result.to(like.dtype)


def _any_quantile(d: Any, q: Tensor) -> Tensor:
    try:
        value: Tensor = d.icdf(q)
    except NotImplementedError:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            draws = d.sample(torch.Size((4096,))).double()
        value = torch.quantile(draws, q, dim=0)
    return value


def _gamma_quantile(shape: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Bisection on log x for P(X <= x) = lower = 1 - upper, by the smaller of the two."""
    low = ((lower.log() + torch.lgamma(shape + 1)) / shape).clamp(min=-700) - 1
    high = (shape + 40 * shape.sqrt() + 750).log()

    def is_below(t: Tensor) -> Tensor:
        if bool(upper < lower):
            return torch.special.gammaincc(shape, t.exp()) > upper
        return torch.special.gammainc(shape, t.exp()) < lower

    value = _bisect(is_below, low, high).exp()
    value = torch.where(lower == 0, torch.zeros_like(value), value)
    return torch.where(upper == 0, torch.full_like(value, torch.inf), value)


def _beta_quantile(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """Bisection on the logit for I_x(a, b) = q."""
    bell = (a > _BELL) & (b > _BELL)
    c, d = torch.where(bell, torch.ones_like(a), a), torch.where(bell, torch.ones_like(b), b)
    wide = torch.full_like(a, 745.0)
    value = torch.sigmoid(_bisect(lambda t: incomplete_beta(c, d, t) < q, -wide, wide))
    if bool(bell.any()):
        value = value.masked_scatter(bell, _bell_quantile(a[bell], b[bell], q))
    return torch.where((q == 0) | (q == 1), q.expand_as(value), value)


def _bell_quantile(a: Tensor, b: Tensor, q: Tensor) -> Tensor:
    """The same for large a and b, by Gauss-Legendre quadrature of the density of the logit."""
    nodes, weights = (torch.as_tensor(v, device=a.device) for v in _legendre(_NODES))
    mode, spread = (a / b).log(), (1 / a + 1 / b).sqrt()
    low, high = mode - 12 * spread, mode + 12 * spread

    def below(t: Tensor) -> Tensor:
        half = ((t - low) / 2).unsqueeze(-1)
        at = low.unsqueeze(-1) + half * (nodes + 1)
        step = at - mode.unsqueeze(-1)
        x = torch.sigmoid(mode).unsqueeze(-1)
        a_, b_ = a.unsqueeze(-1), b.unsqueeze(-1)
        # log f(t) - log f(mode), without the cancellation of the two
        log_f = a_ * step - (a_ + b_) * torch.log1p(x * torch.expm1(step))
        return (log_f.exp() * weights * half).sum(-1)

    whole = below(high)
    return torch.sigmoid(_bisect(lambda t: below(t) < q * whole, low, high))


def _legendre(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], from the eigenvectors of the Jacobi matrix."""
    k = torch.arange(1, n, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()


def _bisect(is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = is_below(middle)
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
