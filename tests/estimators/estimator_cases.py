"""Functions of Gaussian sites, and an oracle that knows nothing of expressions.

The oracle is a product Gauss-Hermite grid over all scalars of all blocks, whitened by the Cholesky
factors: exact for polynomials, and differentiable in (loc, cov) by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_cvi.algebra import Expression, LatentTensor, SiteRef, expression_of, site_expression
from pyro_cvi.estimators import Moments, Structure
from pyro_cvi.families import GAUSSIAN
from pyro_cvi.gaussians import Layout

Function = Callable[[SimpleNamespace], Tensor]
Gaussian = dict[str, tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"w": (2,), "u": (), "v": (2,)}
BLOCKS = {"wu": ("w", "u"), "v": ("v",)}


def data(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    drawn = {"X": (3, 2), "Y": (2, 2), "y": (3,), "c": (3,), "d": (2,)}
    made = {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for n, s in drawn.items()}
    return {**made, "i": torch.tensor([1, 0, 1]), "mask": torch.tensor([True, False])}


def structure(
    blocks: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> Structure:
    layout = {b: Layout.dense({s: shapes[s] for s in names}, CPU) for b, names in blocks.items()}
    block = {s: b for b, names in blocks.items() for s in names}
    return Structure(dict.fromkeys(shapes, GAUSSIAN), block, layout)


def random_gaussian(
    layout: Layout, scale: float = 0.4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """(loc, cov) with correlations, marginal sd about `scale`."""
    d = layout.width
    root = torch.randn(layout.count, d, d) / math.sqrt(d) + 0.3 * torch.eye(d)
    cov = scale**2 * root @ root.mT
    return torch.randn(layout.count, d).to(dtype), cov.to(dtype)


def gaussians(s: Structure, scale: float = 0.4, dtype: torch.dtype = torch.float64) -> Gaussian:
    return {b: random_gaussian(layout, scale, dtype) for b, layout in s.layout.items()}


def leaves(q: Gaussian) -> Gaussian:
    return {b: (m.clone().requires_grad_(), v.clone().requires_grad_()) for b, (m, v) in q.items()}


def symbolic(
    f: Function, shapes: Mapping[str, tuple[int, ...]], inputs: dict[str, Tensor]
) -> Expression:
    latents = {
        n: LatentTensor.make(torch.randn(s), site_expression(SiteRef(n, s, 0, "real")))
        for n, s in shapes.items()
    }
    return expression_of(f(SimpleNamespace(**inputs, **latents)))


def grid(dims: int, order: int) -> tuple[Tensor, Tensor]:
    x, w = np.polynomial.hermite_e.hermegauss(order)
    axes = np.meshgrid(*[x] * dims, indexing="ij")
    weights = np.array(1.0)
    for _ in range(dims):
        weights = np.multiply.outer(weights, w / w.sum())
    return torch.as_tensor(np.stack([a.ravel() for a in axes], -1)), torch.as_tensor(
        weights.ravel()
    )


def oracle(f: Function, s: Structure, q: Gaussian, inputs: dict[str, Tensor], order: int) -> Tensor:
    """E_q f by brute force over a grid of order ** (number of scalars of the blocks it uses) points."""
    used = {s.block[n] for n in symbolic(f, {n: SHAPES[n] for n in s.family}, inputs).sites}
    x, weight = grid(sum(s.layout[b].size for b in used), order)
    values, start = {}, 0
    for block, layout in s.layout.items():
        if block not in used:
            values |= {n: q[block][0].new_zeros(len(x), *layout.shapes[n]) for n in layout.sites}
            continue
        noise = x[:, start : start + layout.size].reshape(-1, layout.count, layout.width)
        start += layout.size
        loc, cov = q[block]
        z = loc + torch.einsum("bij,nbj->nbi", torch.linalg.cholesky(cov), noise)
        for site in layout.sites:
            read = z.reshape(len(x), -1)[:, layout.flat(site)]
            values[site] = read.reshape(len(x), *layout.shapes[site])
    at_nodes = torch.func.vmap(lambda v: f(SimpleNamespace(**inputs, **v)))(values)
    return torch.tensordot(weight, at_nodes, 1)


def gradients(value: Tensor, cotangent: Tensor, q: Gaussian) -> list[Tensor]:
    """d <cotangent, value> / d (loc, cov) of every block; the covariance's part symmetrised."""
    flat = [t for pair in q.values() for t in pair]
    if not value.requires_grad:
        return [torch.zeros_like(t) for t in flat]
    found = torch.autograd.grad((cotangent * value).sum(), flat, allow_unused=True)
    made = [torch.zeros_like(t) if g is None else g for t, g in zip(flat, found, strict=True)]
    return [g if i % 2 == 0 else 0.5 * (g + g.mT) for i, g in enumerate(made)]


def moments(q: Gaussian) -> Moments:
    return Moments(dict(q), {})


EXACT: dict[str, Function] = {
    "affine": lambda k: k.X @ k.w + k.u,
    "a square of a predictor": lambda k: (k.y - k.X @ k.w - k.u) ** 2,
    "a square of a site": lambda k: k.w**2,
    "a site times itself": lambda k: k.w[:, None] * k.w,
    "a product of two predictors of one block": lambda k: (k.X @ k.w + 1) * (k.u - k.w[0]),
    "a product across blocks": lambda k: k.w * k.v,
    "an inner product across blocks": lambda k: k.w @ k.v,
    "a square of an inner product": lambda k: (k.y - k.w @ k.v) ** 2,
    "a square of an outer product": lambda k: (k.Y - k.w[:, None] * k.v) ** 2,
    "a square of a bilinear form plus an offset": lambda k: (k.Y - k.w[:, None] * k.v - k.u) ** 2,
    "a square of a sum of bilinear forms": lambda k: (k.w * k.v + k.v.sum() * k.w[0] - k.u) ** 2,
    "a sum inside a square": lambda k: (k.w.sum() + k.u - 1) ** 2,
    "a square of an index": lambda k: (k.y - k.w[k.i]) ** 2,
    "repeated reads": lambda k: (k.w[k.i] + k.w[k.i.flip(0)] - k.w.sum()) ** 2,
    "a sum of squares": lambda k: ((k.w - k.v) ** 2).sum(),
    "a square times an independent factor": lambda k: (k.w - k.u) ** 2 * (k.v + 1),
    "a product of products": lambda k: (k.w - k.u) * (k.v + 1) * (k.w + 2),
    "squares in both blocks": lambda k: (k.w - k.u) ** 2 * (k.v - 0.5) ** 2,
    "where": lambda k: torch.where(k.mask, (k.w - 1) ** 2, k.u),
    "cumsum": lambda k: (k.w.cumsum(0) - k.u) ** 2,
    "cat": lambda k: (torch.cat([k.w, k.u[None]]) - k.c) ** 2,
    "stack": lambda k: (torch.stack([k.w[1], k.u, k.v[0]]) - k.c) ** 2,
    "a mean of squares": lambda k: ((k.X @ k.w)[:, None] - k.v).square().mean(),
    "einsum": lambda k: torch.einsum("ni,i,j->nj", k.X, k.w, k.v),
    "a difference of equals": lambda k: (k.w - k.w) * k.u,
    "a constant factor in a square": lambda k: ((k.y - k.X @ k.w) * k.c) ** 2 / 3,
    "a group in a group": lambda k: ((k.w + 1) * k.d + k.u) ** 2 - (k.w + k.u) * k.d,
}  # fmt: skip
"""Multilinear or quadratic in every block: E is exact."""

POLYNOMIALS: dict[str, Function] = {
    "a quartic": lambda k: (k.w**2 - 1) ** 2,
    "a cubic": lambda k: k.u**3,
    "a cubic in two predictors": lambda k: k.w**2 * k.u,
    "a quartic in a predictor": lambda k: (k.y - k.X @ k.w) ** 4,
}  # fmt: skip
"""Polynomials in one or two predictors: quadrature, exact to rounding."""

LINKS: dict[str, Function] = {
    "exp": lambda k: torch.exp(k.X @ k.w + k.u),
    "exp times data": lambda k: k.y * (k.X @ k.w) - torch.exp(k.X @ k.w),
    "a scale times a site": lambda k: (k.y - k.u - torch.exp(k.w[0]) * k.w[1]) ** 2,
    "a scale times a predictor": lambda k: (k.y - torch.exp(k.u) * (k.X @ k.w + 1)) ** 2,
    "a scale of another block": lambda k: (k.y[:2] - k.u - torch.exp(k.v) * k.w) ** 2,
    "two scales": lambda k: torch.exp(k.w[0]) * torch.exp(-k.u) * (k.w[1] - k.d) * (k.u + k.d),
    "a scale, transposed": lambda k: (torch.exp(k.w)[:, None] * k.u - k.Y).square().T * k.d,
    "a precision with a square": lambda k: torch.exp(-2 * k.u) * (k.y - k.X @ k.w - k.u) ** 2,
    "softplus": lambda k: k.y * (k.X @ k.w + k.u) - F.softplus(k.X @ k.w + k.u),
    "sigmoid of a site": lambda k: torch.sigmoid(k.w),
    "probit": lambda k: torch.log(0.5 * torch.erfc(k.u - k.w)),
    "two predictors": lambda k: (k.y - k.X @ k.w) ** 2 * torch.exp(-k.u),
    "two links": lambda k: torch.tanh(k.w) * torch.tanh(k.u),
    "a link of two": lambda k: torch.logaddexp(k.w, k.u),
    "predictors of two blocks": lambda k: F.softplus(k.w + k.v),
    "a link times another block": lambda k: torch.exp(k.w) * k.v,
    "a link times a square of another block": lambda k: torch.sigmoid(k.w - k.u) * (k.v - 1) ** 2,
    "links of two blocks": lambda k: torch.tanh(k.w) * torch.sin(k.v),
    "a link of a chain": lambda k: torch.log1p(F.softplus(k.w) ** 2),
    "a square of a link": lambda k: (k.d - torch.tanh(k.w)) ** 2,
    "a link of a cell": lambda k: F.softplus(k.w[k.i]).sum(),
    "a link of an outer sum": lambda k: torch.sigmoid(k.w[:, None] + k.v),
    "a transposed link": lambda k: torch.sigmoid(k.w[:, None] + k.v).T * k.d,
    "exp of an outer sum, transposed": lambda k: torch.exp(k.w[:, None] + k.v + k.Y).T[k.i],
}  # fmt: skip
"""Functions of one or two predictors per cell."""
