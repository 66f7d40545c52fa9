"""Draws of Gamma, inverse Gamma, Beta and Dirichlet blocks, in mirrored pairs, with gradients.

All are made of Gammas. Marsaglia and Tsang's transform of a normal variate e, x = d (1 + c e)^3, is that
of Gamma(a) if it passes their test, which it nearly always does; e and -e then give two draws that lie
on opposite sides. In a pair the slope of a function at the centre cancels out of the estimate of its
curvature, which is what a message to a narrow posterior mostly is. A draw that fails the test is
replaced by an independent one, so that each draw alone has exactly its law.

Gradients are implicit ones, dx/da = -(dF/da) / p(x). A shape a below one is drawn as that of a + 1 times
u^(1/a), on the log scale: x itself may be too small for any float, its logarithm is not.

References: G. Marsaglia, W. W. Tsang (2000), A simple method for generating gamma variables; M. Figurnov
et al. (2018), arXiv 1805.08498; C. Naesseth et al. (2017), arXiv 1610.05683, section 3.3.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_cvi.families import BETA, DIRICHLET, GAMMA, INVERSE_GAMMA, AbstractFamily, Natural

__all__ = ["Base", "bases", "transformed"]


class Base(NamedTuple):
    """What a draw is made of: standard Gammas of shape max(a, a + 1 where a < 1), and log u."""

    gamma: Tensor
    log_u: Tensor


def bases(family: AbstractFamily, natural: Natural, count: int, paired: bool) -> list[Base] | None:
    """Bases of `count` draws; None for a family that is not made of Gammas."""
    shape = _shapes(family, natural)
    if shape is None:
        return None
    shape = shape.detach()
    boosted = torch.where(shape < 1, shape + 1, shape)
    if not paired:
        return [_independent(boosted) for _ in range(count)]
    found: list[Base] = []
    while len(found) < count:
        found += _pair(boosted)
    return found[:count]


def _independent(shape: Tensor) -> Base:
    return Base(torch._standard_gamma(shape), _log_uniform(torch.rand_like(shape)))


def _pair(shape: Tensor) -> list[Base]:
    d = shape - 1 / 3
    c = (9 * d).rsqrt()
    e = torch.randn_like(shape)
    u = torch.rand_like(shape)
    result = []
    for sign, v in ((1.0, u), (-1.0, 1 - u)):
        root = 1 + sign * c * e
        cube = root.clamp(min=1e-12) ** 3
        passes = _log_uniform(torch.rand_like(shape)) < 0.5 * e * e + d * (1 - cube + cube.log())
        x = torch.where(passes & (root > 0), d * cube, torch._standard_gamma(shape))
        result.append(Base(x, _log_uniform(v)))
    return result


def _log_uniform(u: Tensor) -> Tensor:
    return u.clamp(min=torch.finfo(u.dtype).tiny).log()


class _StandardGamma(torch.autograd.Function):
    """x ~ Gamma(a, 1) as given, with its implicit derivative in a."""

    @staticmethod
    def forward(ctx: Any, shape: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(shape, x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shape, x = ctx.saved_tensors
        return grad * torch._standard_gamma_grad(shape, x), None


def transformed(
    family: AbstractFamily, natural: Natural, base: Base
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The draw x of a base, with gradients in `natural`, and T(x)."""
    shape = _shapes(family, natural)
    assert shape is not None
    small = shape < 1
    x = _StandardGamma.apply(torch.where(small, shape + 1, shape), base.gamma)
    log_x = x.log() + torch.where(small, base.log_u / shape, 0.0)
    if family is GAMMA:
        log_x = log_x - (-natural[1]).log()
        value = _exp(log_x)
        return value, (log_x, value)
    if family is INVERSE_GAMMA:
        log_x = (-natural[1]).log() - log_x
        return _exp(log_x), (log_x, _exp(-log_x))
    log_p = log_x - log_x.logsumexp(-1, keepdim=True)
    if family is BETA:
        p, q = log_p.unbind(-1)
        eps = torch.finfo(p.dtype).eps / 2
        return _exp(p).clamp(max=1 - eps), (p, q)
    return _exp(log_p), (log_p,)


def _shapes(family: AbstractFamily, natural: Natural) -> Tensor | None:
    """The shapes of the Gammas that a member is made of."""
    if family is GAMMA:
        return natural[0] + 1
    if family is INVERSE_GAMMA:
        return -natural[0] - 1
    if family is BETA:
        return torch.stack([natural[0] + 1, natural[1] + 1], -1)
    if family is DIRICHLET:
        return natural[0] + 1
    return None


def _exp(log_x: Tensor) -> Tensor:
    """exp, kept where the model may take a logarithm or divide."""
    info = torch.finfo(log_x.dtype)
    return log_x.clamp(math.log(info.tiny), math.log(info.max) - 1).exp()
