"""E_q[f(x)] of one Gamma, inverse Gamma or Beta scalar, and its gradient in the mean parameters.

    E = sum_i w_i f(x_i), w_i ~ q(x(s_i)) dx/ds;  dE/dnatural_k = sum_i w_i (f_i - E) (T_k(x_i) - E T_k),

the trapezoid rule in a coordinate s in which q is about as wide as one on both sides. The derivative is
that of the rule at fixed nodes; the Fisher matrix of the family turns it into dE/dmean (Khan and Lin,
2017, the equation for the gradient in mean parameters).

The coordinate: t = log x (or the logit) has the density exp(a t) to the left of its mode, which is
wide where a < 1, and falls like exp(-e^t) to the right. t = t0 + r s - (l - r) softplus(-s) has slope l
on the left and r on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from pyro_cvi.families import BETA, GAMMA, INVERSE_GAMMA, AbstractFamily

__all__ = ["Points", "family_expectation", "has_rule"]

_FAR = 38.0
"""How far the nodes reach: where q falls like exp(-|s|), what lies beyond is below rounding."""
_STEP, _FINE = 1 / 4, 1 / 16
"""Distance of the nodes; the finer one where q has a cut-off at the end of a long tail."""
_LEAST = 1e-6
"""Share of an integral that may lie at its last nodes."""
_HUGE = 1e200
_BUDGET = 1 << 20
"""Function values held at a time."""


class Points(NamedTuple):
    """Nodes of one scalar: x, log x and log(1 - x), without underflow in the logarithms."""

    x: Tensor
    log: Tensor
    log1m: Tensor

    def power(self, p: float) -> Tensor:
        """x ** p."""
        return self.x if p == 1 else (p * self.log).exp()


CellFunction = Callable[[Points, Tensor | None], Tensor]
"""f(points, cells): values (nodes, cells) for the selected cells (None: all)."""


def has_rule(family: AbstractFamily) -> bool:
    """Whether a family's scalars can be integrated here."""
    return family in (GAMMA, INVERSE_GAMMA, BETA)


def family_expectation(
    family: AbstractFamily,
    natural: Sequence[Tensor],
    mean: Sequence[Tensor],
    function: CellFunction,
    cells: int,
    *,
    differentiate_constants: bool = False,
) -> Tensor:
    """E f per cell, (cells,), with its gradient to `mean`; natural and mean are (cells,) or (1,).

    With `differentiate_constants` the result also carries gradients to tensors inside `function`.
    """
    inner = [n.detach().double() for n in natural]
    shared = inner[0].numel() == 1
    nodes = 2 * int(_FAR / _FINE)
    results = []
    for part in torch.arange(cells, device=inner[0].device).split(max(1, _BUDGET // nodes)):
        own = inner if shared else [n[part] for n in inner]
        here = mean if shared else [m[part] for m in mean]
        points, weight = _nodes(family, own)
        live = weight > 0
        with torch.set_grad_enabled(differentiate_constants and torch.is_grad_enabled()):
            f = function(points, None if part.numel() == cells else part)
            f = torch.where(live, f, torch.zeros((), dtype=f.dtype, device=f.device))
            parts = weight * f.clamp(-_HUGE, _HUGE)
            value = parts.sum(0).expand(part.shape)
            # What has not died out at the last nodes has no expectation, or none to be trusted.
            size = parts.detach().abs()
            ends = torch.maximum(size[0], size[-1]) > _LEAST * (size.sum(0) + _LEAST)
            lost = (ends | (size.amax(0) > _HUGE * _LEAST)).expand(part.shape)
        with torch.no_grad():
            centred = parts - weight * value
            gradient = []
            for t in _statistics(family, points):
                t = torch.where(live, t, torch.zeros_like(t))
                gradient.append((centred * (t - (weight * t).sum(0))).sum(0))
            slopes = family.fisher_solve(tuple(own), tuple(gradient))
        result = torch.where(lost, value.sign() * torch.inf, value).to(mean[0].dtype)
        for m, slope in zip(here, slopes, strict=True):
            result = result + slope.to(m.dtype) * (m - m.detach())  # zero, with this gradient
        results.append(result)
    return torch.cat(results)


def _nodes(family: AbstractFamily, natural: Sequence[Tensor]) -> tuple[Points, Tensor]:
    """Nodes (nodes, n) and their weights, which add up to one."""
    if family is BETA:
        a, b = natural[0] + 1, natural[1] + 1
        center = a.clamp(min=1).log() - b.clamp(min=1).log()
        width = (1 / a.clamp(min=1) + 1 / b.clamp(min=1)).sqrt()
        t, jacobian = _coordinate(center, torch.maximum(1 / a, width), torch.maximum(1 / b, width))
        log, log1m = logsigmoid(t), logsigmoid(-t)
        weight = a * log + b * log1m + jacobian
        return Points(torch.sigmoid(t), log, log1m), weight.softmax(0)
    a = natural[0] + 1 if family is GAMMA else -natural[0] - 1
    rate = -natural[1]
    center = a.clamp(min=1).log() - rate.log()
    right = a.clamp(min=1).rsqrt()
    t, jacobian = _coordinate(center, torch.maximum(1 / a, right), right)
    weight = (a * t - rate * t.exp() + jacobian).softmax(0)
    log = t if family is GAMMA else -t
    x = log.exp()
    return Points(x, log, torch.log1p(-x)), weight


def _coordinate(center: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """T(s) on the grid and log dt/ds, (nodes, n)."""
    long = torch.maximum(left, right) > 1
    step = _FINE if bool(long.any()) else _STEP
    s = torch.arange(-_FAR, _FAR + step, step, dtype=center.dtype, device=center.device)
    s = s.unsqueeze(-1)
    bend = left - right
    t = center + right * s - bend * softplus(-s)
    return t, (right + bend * torch.sigmoid(-s)).log()


def _statistics(family: AbstractFamily, points: Points) -> tuple[Tensor, Tensor]:
    if family is BETA:
        return points.log, points.log1m
    return points.log, points.x if family is GAMMA else (-points.log).exp()
