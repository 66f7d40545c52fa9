"""Gamma-function combinations that keep their digits where psi^(n) and log Gamma cancel.

Two facts about torch, measured against mpmath in `tests/families`, make this file necessary.

`torch.polygamma(1, x)` has a relative error of 5e-10 in float64 for x between .1 and 10. The
Hurwitz zeta function, psi^(n)(x) = (-1)^(n+1) n! zeta(n + 1, x), is good to a few roundings.

log x - psi(x), x psi'(x) - 1 and Stirling's remainder are small differences of large numbers as x
grows. For x >= 12 they are summed as series in the Bernoulli numbers B_2, ..., B_14; what that
leaves out is below 1e-15 of the result.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bregman_log_gamma",
    "curvature_ratio",
    "digamma",
    "entropy_term",
    "inverse_digamma",
    "log_gamma",
    "log_minus_digamma",
    "ratio_excess",
    "stirling_remainder",
    "tetragamma",
    "trigamma",
    "trigamma_excess",
]

_Function = Callable[[Tensor], Tensor]

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
_LARGE = 12.0
_HALF_LOG_2PI = math.log(2 * math.pi) / 2


class _Polygamma(torch.autograd.Function):
    """psi^(n)(x) with derivative psi^(n+1)(x); psi^(-1) is log Gamma and psi^(0) digamma.

    torch's own chain lgamma -> digamma -> polygamma(1) would put the inaccurate trigamma into every
    Hessian.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(order: int, x: Tensor) -> Tensor:
        if order == -1:
            return torch.lgamma(x)
        if order == 0:
            return torch.digamma(x)
        zeta: Tensor = torch.special.zeta(order + 1.0, x)
        return zeta * (math.factorial(order) if order % 2 else -math.factorial(order))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[int, Tensor], output: Tensor) -> None:
        ctx.order, x = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, grads[0] * _polygamma(ctx.order + 1, x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        tangent: Tensor = tangents[1]
        return tangent * _polygamma(ctx.order + 1, x)


def _polygamma(order: int, x: Tensor) -> Tensor:
    if not x.requires_grad and not torch._C._are_functorch_transforms_active():
        return _Polygamma.forward(order, x)  # the wrapper of Function costs more than the value
    apply: Callable[[int, Tensor], Tensor] = _Polygamma.apply
    return apply(order, x)


def log_gamma(x: Tensor) -> Tensor:
    """Log Gamma(x), whose derivatives of every order are those of this file."""
    return _polygamma(-1, x)


def digamma(x: Tensor) -> Tensor:
    """psi(x) = d/dx log Gamma(x)."""
    return _polygamma(0, x)


def trigamma(x: Tensor) -> Tensor:
    """psi'(x) = zeta(2, x)."""
    return _polygamma(1, x)


def tetragamma(x: Tensor) -> Tensor:
    """psi''(x) = -2 zeta(3, x)."""
    return _polygamma(2, x)


def stirling_remainder(x: Tensor) -> Tensor:
    """R(x) = log Gamma(x) - [(x - 1/2) log x - x + 1/2 log 2 pi]

    = sum_k B_2k / (2k (2k-1) x^(2k-1)), which tends to zero.
    """
    return _branch(
        x,
        lambda x: x * _tail(x, lambda n: 1 / (n * (n - 1))),
        lambda x: log_gamma(x) - (x - 0.5) * x.log() + x - _HALF_LOG_2PI,
    )


def log_minus_digamma(x: Tensor) -> Tensor:
    """L(x) = log x - psi(x) = 1/(2x) + sum_k B_2k / (2k x^2k) > 0."""
    return _branch(
        x,
        lambda x: 0.5 / x + _tail(x, lambda n: 1 / n),
        lambda x: x.log() - digamma(x),
    )


def trigamma_excess(x: Tensor) -> Tensor:
    """D(x) = x psi'(x) - 1 = 1/(2x) + sum_k B_2k / x^2k > 0."""
    return _branch(
        x,
        lambda x: 0.5 / x + _tail(x, lambda n: 1.0),
        lambda x: x * trigamma(x) - 1,
    )


def curvature_ratio(x: Tensor) -> Tensor:
    """c(x) = -(x^2 psi''(x) + 1) / (2 D(x)) = (1 - x D'(x) / D(x)) / 2.

    It lies between 1 and 1.0945 for every x > 0, and is -x times the Christoffel symbol of a
    Gamma's shape. References: W. Lin, M. Schmidt, M. E. Khan (2020), arXiv 2002.10060.
    """
    return _branch(
        x,
        lambda x: (1 + (0.5 / x + _tail(x, lambda n: float(n))) / trigamma_excess(x)) / 2,
        lambda x: -(x * x * tetragamma(x) + 1) / (2 * trigamma_excess(x)),
    )


def ratio_excess(t: Tensor) -> Tensor:
    """E(t) = t - 1 - log t >= 0, with full relative accuracy at its zero t = 1.

    Near 1, with w = (t-1)/(t+1) = tanh(1/2 log t): t - 1 = 2w/(1-w) and log t = 2 (w + w^3/3 +
    w^5/5 + ...).
    """
    near = (t - 1).abs() < 0.1
    inside = torch.where(near, t, 1.0)
    w = (inside - 1) / (inside + 1)
    odd = w * _horner([1 / n for n in range(3, 15, 2)], w * w)
    outside = torch.where(near, 2.0, t)
    return torch.where(near, 2 * w * w * (1 / (1 - w) - odd), outside - 1 - outside.log())


def entropy_term(x: Tensor) -> Tensor:
    """e(x) = log Gamma(x) - (x - 1) psi(x) + x = 1/2 log 2 pi x + R(x) + (x - 1) L(x)."""
    return _HALF_LOG_2PI + 0.5 * x.log() + stirling_remainder(x) + (x - 1) * log_minus_digamma(x)


def bregman_log_gamma(p: Tensor, q: Tensor) -> Tensor:
    """-1/2 log(q/p) + R(q) - R(p) + (q - p) L(p), with R and L as above.

    It is log Gamma(q) - log Gamma(p) - (q - p) psi(p) less its leading part q (p/q - 1 - log p/q).
    The leading part grows with the arguments and is left to the caller, who can combine it with
    others of its kind before anything cancels.
    """
    remainders = stirling_remainder(q) - stirling_remainder(p)
    return 0.5 * (p / q).log() + remainders + (q - p) * log_minus_digamma(p)


def inverse_digamma(y: Tensor) -> Tensor:
    """The x > 0 with psi(x) = y, by five Newton steps from Minka's start; not differentiable.

    References: T. Minka (2000), Estimating a Dirichlet distribution, appendix C.
    """
    with torch.no_grad():
        x = torch.where(y >= -2.22, y.exp() + 0.5, -1 / (y.clamp(max=-2.22) + 0.5772156649015329))
        for _ in range(5):
            x = x - (digamma(x) - y) / trigamma(x)
    return x


def _branch(x: Tensor, series: _Function, direct: _Function) -> Tensor:
    """`series` where x >= 12 and `direct` elsewhere.

    Each sees only arguments of its own range, so that no gradient meets 0 times infinity.
    """
    large = x >= _LARGE
    above, below = torch.where(large, x, _LARGE), torch.where(large, 1.0, x)
    return torch.where(large, series(above), direct(below))


def _tail(x: Tensor, weight: Callable[[int], float]) -> Tensor:
    """sum_k weight(2k) B_2k / x^2k over the Bernoulli numbers kept."""
    z = (1 / x).square()
    return z * _horner([weight(2 * k) * b for k, b in enumerate(_BERNOULLI, start=1)], z)


def _horner(coefficients: list[float], z: Tensor) -> Tensor:
    total = torch.zeros_like(z)
    for coefficient in reversed(coefficients):
        total = total * z + coefficient
    return total
