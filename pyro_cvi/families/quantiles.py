"""Marginal quantiles: F(x) = q solved from cumulative functions, by bisection or Newton steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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
    """x with I_x(a, b) = q, from the smaller of the two tails."""
    far = bool(q > 0.5)
    left, right, p = (b, a, 1 - q) if far else (a, b, q)
    bell = (a > _BELL) & (b > _BELL)
    p = p.clamp(min=torch.finfo(p.dtype).tiny)
    one = torch.ones_like(a)
    logit = _newton(_ByFraction(torch.where(bell, one, left), torch.where(bell, one, right)), p)
    if bool(bell.any()):
        logit = logit.masked_scatter(bell, _newton(_ByQuadrature(left[bell], right[bell]), p))
    value = torch.sigmoid(-logit if far else logit)
    return torch.where((q == 0) | (q == 1), q.expand_as(value), value)


def _newton(law: _ByFraction | _ByQuadrature, p: Tensor) -> Tensor:
    """Root of log F(t) = log p, for a log-concave F: from the left Newton's steps never overshoot."""
    t, target = law.start, p.log()
    for _ in range(_STEPS):
        log_cdf, ratio = law(t)
        step = ratio * (log_cdf - target)
        t = t - step
        if bool((step.abs() <= 1e-10 * (1 + t.abs())).all()):
            break
    return t


class _ByFraction:
    """log F and F / f of the logit of a Beta(a, b), by Lentz's continued fraction.

    Reference: W. H. Press et al., Numerical Recipes, 6.4 (the continued fraction is DLMF 8.17.22).
    """

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b, self.start = a, b, (a / b).log()
        self.log_beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    def __call__(self, t: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.a, self.b
        swap = torch.sigmoid(t) > (a + 1) / (a + b + 2)  # there the other side's fraction converges
        p, r = torch.where(swap, b, a), torch.where(swap, a, b)
        s = torch.where(swap, -t, t)
        log_density = p * logsigmoid(s) + r * logsigmoid(-s) - self.log_beta
        ratio = _fraction(p, r, torch.sigmoid(s)) / p
        rest = 1 - log_density.exp() * ratio
        log_cdf = torch.where(swap, rest.log(), log_density + ratio.log())
        return log_cdf, torch.where(swap, rest / log_density.exp(), ratio)


class _ByQuadrature:
    """The same for large a and b, by Gauss-Legendre quadrature of the density of the logit."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a.unsqueeze(-1), b.unsqueeze(-1)
        self.start = (a / b).log()
        self.width = 12 * (1 / a + 1 / b).sqrt()
        self.nodes, self.weights = (v.to(a.device) for v in _legendre(_NODES))
        half = self._tail(self.start, 1.0), self._tail(self.start, -1.0)
        self.log_whole = (half[0] + half[1]).log()

    def _log_density(self, t: Tensor) -> Tensor:
        """log f(t) - log f(start), without the cancellation of the two."""
        step = t - self.start.unsqueeze(-1)
        x = torch.sigmoid(self.start).unsqueeze(-1)
        log_f: Tensor = self.a * step - (self.a + self.b) * torch.log1p(x * torch.expm1(step))
        return log_f

    def _tail(self, t: Tensor, side: float) -> Tensor:
        """The integral of f / f(t) to the left of t, or to the right for side = -1."""
        half = self.width.unsqueeze(-1) / 2
        at = t.unsqueeze(-1)
        log_f = self._log_density(at - side * half * (self.nodes + 1)) - self._log_density(at)
        return (log_f.exp() * self.weights * half).sum(-1)

    def __call__(self, t: Tensor) -> tuple[Tensor, Tensor]:
        ratio = self._tail(t, 1.0)
        return self._log_density(t.unsqueeze(-1)).squeeze(-1) + ratio.log() - self.log_whole, ratio


def _legendre(n: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], from the eigenvectors of the Jacobi matrix."""
    k = torch.arange(1, n, dtype=torch.float64, device="cpu")
    off = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()


def _bisect(is_below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    for _ in range(_STEPS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


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
