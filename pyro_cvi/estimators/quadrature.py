"""Q(m, v) = sum_i w_i f(m + sqrt(v) x_i), a rule that checks itself and is differentiated as it is.

The gradient is that of the rule, dQ/dm = sum w f', dQ/dv = sum w f' x / (2 sqrt v), because it is the
gradient of the bound a line search sees (a quadrature of f'' is not). Two Gauss-Hermite orders are
compared cell by cell, in Q and in sum_i w_i x_i f = sqrt(v) dQ/dm: a narrow feature of a wide
predictor, such as the step of a sigmoid at its centre, leaves Q right by symmetry and the gradient
wrong. Where they differ the trapezoid rule on 8.5 standard deviations is doubled until it settles:
it converges exponentially for smooth f however wide the Gaussian is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_cvi.linalg import or_zeros

__all__ = ["CellFunction", "gaussian_expectation", "tolerance"]

CellFunction = Callable[[list[Tensor], Tensor | None], Tensor]
"""f(z, cells): z holds one tensor (nodes, n) per predictor, `cells` selects the n cells (None: all)."""

_ORDER, _CHECK = 20, 13
"""One even and one odd order: nodes at the same side of the centre would agree on a step there."""
_RADIUS = 8.5
_TRAPEZOID = (65, 129, 257, 513, 1025, 2049, 4097, 8193, 16385, 32769)
_TRAPEZOID_2D = (65, 129, 257)
_ENOUGH, _LARGEST = 513, 1 << 24
"""A function with a kink never settles to the tolerance; doubling then ends when a level would take
more than `_LARGEST` function values. At 513 nodes a kink costs about 1e-4 of its jump in slope."""
_POINTS = 512
"""Quasi Monte Carlo points for more than two predictors: errors of about 1e-3 of a function's spread."""
_LOW, _MORE_POINTS = 4, 2048
"""Beyond so many predictors there are more points. The bound is maximised over them, so its error has a
sign: with 16 classes and prior standard deviations of 30 it was four nats too high with 512 points."""
_RIDGE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Relative, on the covariance of predictors that may be linearly dependent."""
_BUDGET = 1 << 19
"""Function values held at a time."""


def tolerance(dtype: torch.dtype) -> float:
    """Difference of two orders, relative to 1 + |Q|, below which the higher one is taken."""
    return 1e-7 if dtype == torch.float64 else 2e-5


@lru_cache(maxsize=64)
def _hermite(order: int, predictors: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.hermite_e.hermegauss(order)
    return _grid(x, w / w.sum(), predictors)


@lru_cache(maxsize=64)
def _trapezoid(order: int, predictors: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-_RADIUS, _RADIUS, order)
    w = np.exp(-0.5 * x * x)
    return _grid(x, w / w.sum(), predictors)


def _grid(x: np.ndarray, w: np.ndarray, predictors: int) -> tuple[np.ndarray, np.ndarray]:
    if predictors == 1:
        return x[None], w
    a, b = np.meshgrid(x, x, indexing="ij")
    return np.stack([a.ravel(), b.ravel()]), np.outer(w, w).ravel()


@lru_cache(maxsize=256)
def _nodes(
    kind: str, order: int, predictors: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    x, w = (_hermite if kind == "hermite" else _trapezoid)(order, predictors)
    return (
        torch.as_tensor(x, dtype=dtype, device=device),
        torch.as_tensor(w, dtype=dtype, device=device),
    )


@lru_cache(maxsize=64)
def _quasi_random(predictors: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Points (p, nodes) of a scrambled Sobol sequence under N(0, I), mirrored, with unit covariance."""
    engine = torch.quasirandom.SobolEngine(predictors, scramble=True, seed=0)
    points = _POINTS if predictors <= _LOW else _MORE_POINTS
    u = engine.draw(points // 2, dtype=torch.float64)
    half = torch.special.ndtri(u.clamp(1e-7, 1 - 1e-7))
    factor = torch.linalg.cholesky(half.mT @ half / len(half))
    half = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    return torch.cat([half, -half], 1).to(dtype=dtype, device=device)


def _quasi_monte_carlo(
    function: CellFunction, mean: Tensor, cov: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradients per cell for more than two predictors; the points are always the same."""
    p, n = mean.shape
    x = _quasi_random(p, mean.dtype, mean.device)
    value, gm, gc = mean.new_zeros(n), torch.zeros_like(mean), torch.zeros_like(cov)
    everything = torch.arange(n, device=mean.device)
    for part in everything.split(max(1, _BUDGET // (p * x.shape[1]))):
        m = mean[:, part].detach().requires_grad_(gradient)
        c = cov[:, :, part].detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            q = _averaged(function, m, c, x, part)
            total = q.sum()
        if gradient and total.requires_grad:
            pm, pc = torch.autograd.grad(total, (m, c), allow_unused=True)
            gm[:, part] = or_zeros(pm, m)
            gc[:, :, part] = or_zeros(pc, c)
        value[part] = q.detach()
    return value, gm, gc


def _averaged(function: CellFunction, m: Tensor, c: Tensor, x: Tensor, part: Tensor) -> Tensor:
    """The mean of f over the points m + L x of every cell."""
    matrix = c.movedim(-1, 0)
    eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
    size = matrix.diagonal(dim1=-2, dim2=-1).amax(-1).detach().clamp(min=torch.finfo(m.dtype).tiny)
    ridge = (_RIDGE[m.dtype] * size)[:, None, None] * eye
    factor = torch.linalg.cholesky((matrix + matrix.mT) / 2 + ridge)
    z = m[:, None, :] + torch.einsum("nij,jk->ikn", factor, x)
    return function(list(z.unbind(0)), part).to(m.dtype).mean(0)


def gaussian_expectation(
    function: CellFunction, mean: Tensor, cov: Tensor, *, differentiate_constants: bool = False
) -> Tensor:
    """E f(z) per cell for z ~ N(mean, cov), f elementwise over cells.

    Shapes: `mean` (p, n), `cov` (p, p, n); returns (n,). For p > 2 by quasi Monte Carlo. With
    `differentiate_constants` the result also carries gradients to tensors inside `function`.
    """
    if differentiate_constants and len(mean) > 2:
        x = _quasi_random(len(mean), mean.dtype, mean.device)
        everything = torch.arange(mean.shape[1], device=mean.device)
        parts = everything.split(max(1, _BUDGET // (len(mean) * x.shape[1])))
        return torch.cat([_averaged(function, mean[:, i], cov[:, :, i], x, i) for i in parts])
    if differentiate_constants:
        _, _, _, levels = _integrate(function, mean.detach(), cov.detach(), gradient=False)
        return _differentiable(function, mean, cov, levels)
    result: Tensor = _Rule.apply(mean, cov, function)
    return result


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, cov: Tensor, function: CellFunction) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if len(mean) > 2:
            value, gm, gc = _quasi_monte_carlo(function, mean.detach(), cov.detach(), wanted)
        else:
            value, gm, gc, _ = _integrate(function, mean.detach(), cov.detach(), gradient=wanted)
        if wanted:
            ctx.save_for_backward(gm, gc)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gm, gc = ctx.saved_tensors
        return gm * gradient, gc * gradient, None


Level = tuple[str, int, Tensor]


def _integrate(
    function: CellFunction, mean: Tensor, cov: Tensor, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, list[Level]]:
    """Value and gradients per cell, and which rule served which cells."""
    p, n = mean.shape
    value, gm, gc = mean.new_zeros(n), torch.zeros_like(mean), torch.zeros_like(cov)
    differs = torch.ones(n, dtype=torch.bool, device=mean.device)
    everything = torch.arange(n, device=mean.device)
    _fill(function, mean, cov, "hermite", _ORDER, everything, value, gm, gc, gradient, differs)
    todo = everything[differs]
    done = torch.ones(n, dtype=torch.bool, device=mean.device)
    done[todo] = False
    levels: list[Level] = [("hermite", _ORDER, everything[done])]
    orders = _TRAPEZOID if p == 1 else _TRAPEZOID_2D
    for i, order in enumerate(orders):
        if todo.numel() == 0:
            break
        _fill(function, mean, cov, "trapezoid", order, todo, value, gm, gc, gradient, differs)
        affordable = todo.numel() * (2 * order) ** p <= _LARGEST
        last = i == len(orders) - 1 or (order**p >= _ENOUGH and not affordable)
        good = torch.ones_like(todo, dtype=torch.bool) if last else ~differs[todo]
        levels.append(("trapezoid", order, todo[good]))
        todo = todo[~good]
    return value, gm, gc, levels


def _differ(fine: Tensor, rough: Tensor) -> Tensor:
    """Cells where two orders disagree, in the value (row 0) or in the first moments (the others)."""
    bound = tolerance(fine.dtype) * (1 + fine.abs())
    bound[1:] += bound[0]
    apart = ~((fine - rough).abs() <= bound)
    infinite = fine[0].isinf() & (fine[0] == rough[0])
    return apart.any(0) & ~infinite


def _fill(
    function: CellFunction,
    mean: Tensor,
    cov: Tensor,
    kind: str,
    order: int,
    cells: Tensor,
    value: Tensor,
    gm: Tensor,
    gc: Tensor,
    gradient: bool,
    differs: Tensor,
) -> None:
    """One rule on some cells, in chunks; `differs` tells where a cheaper one of its kind disagrees."""
    p, n = mean.shape
    x, w = _nodes(kind, order, p, mean.dtype, mean.device)
    whole = cells.numel() == n
    for part in cells.split(max(1, _BUDGET // w.numel())):
        index = None if whole and part.numel() == n else part
        m = (mean if index is None else mean[:, part]).detach().requires_grad_(gradient)
        c = (cov if index is None else cov[:, :, part]).detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            z = _points(m, c, x)
            f = function(z, index).to(w.dtype)  # data may be of a wider dtype than the latents
            q = w @ f
            total = q.sum()
        if gradient and total.requires_grad:  # a constant has none, as the density of a Uniform
            pm, pc = torch.autograd.grad(total, (m, c), allow_unused=True)
            gm[:, part] = or_zeros(pm, m)
            gc[:, :, part] = or_zeros(pc, c)
        value[part] = q.detach()
        with torch.no_grad():
            rough = _rough(function, m.detach(), c.detach(), kind, order, index)
            differs[part] = _differ(_moments(f.detach(), x, w), rough)


def _rough(
    function: CellFunction, m: Tensor, c: Tensor, kind: str, order: int, index: Tensor | None
) -> Tensor:
    lower = _CHECK if kind == "hermite" else order // 2 + 1
    x, w = _nodes(kind, lower, m.shape[0], m.dtype, m.device)
    return _moments(function(_points(m, c, x), index).to(w.dtype), x, w)


def _moments(f: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """sum_i w_i f, and sum_i w_i x_i f for each predictor, cell by cell."""
    return torch.cat([w[None], w * x]) @ f


def _points(m: Tensor, c: Tensor, x: Tensor) -> list[Tensor]:
    """m + L x at every node, with L the Cholesky factor of each cell's covariance."""
    tiny = torch.finfo(m.dtype).tiny
    s = c[0, 0].clamp(min=tiny).sqrt()
    first = m[0] + x[0][:, None] * s
    if m.shape[0] == 1:
        return [first]
    slope = c[0, 1] / s
    rest = (c[1, 1] - slope * slope).clamp(min=tiny).sqrt()
    return [first, m[1] + x[0][:, None] * slope + x[1][:, None] * rest]


def _differentiable(
    function: CellFunction, mean: Tensor, cov: Tensor, levels: list[Level]
) -> Tensor:
    value = mean.new_zeros(mean.shape[1])
    for kind, order, cells in levels:
        for part in _parts(cells, order ** mean.shape[0]):
            x, w = _nodes(kind, order, mean.shape[0], mean.dtype, mean.device)
            q = w @ function(_points(mean[:, part], cov[:, :, part], x), part).to(w.dtype)
            value = value.index_put((part,), q)
    return value


def _parts(cells: Tensor, nodes: int) -> Iterator[Tensor]:
    if cells.numel():
        yield from cells.split(max(1, _BUDGET // nodes))
