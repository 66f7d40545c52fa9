"""Row-wise quadratic forms v_n = a_n^T V b_n, without an N x D x D or a saved N x D intermediate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["row_quadratic"]

_CHUNK = 1 << 20
"""Scalars of `A` handled at a time, so that the intermediate A V stays in cache."""


def row_quadratic(a: Tensor, cov: Tensor) -> Tensor:
    """v_n = a_n^T V a_n for the rows of A, and dL/dV = A^T diag(dL/dv) A.

    Shapes: `a` (N, D), `cov` (D, D) symmetric; returns (N,). When `a` itself requires a gradient
    (learnt inputs) the plain differentiable product is used.
    """
    if a.requires_grad:
        return ((a @ cov) * a).sum(-1)
    result: Tensor = _RowQuadratic.apply(a, cov)
    return result


class _RowQuadratic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, cov: Tensor) -> Tensor:
        ctx.save_for_backward(a, cov)
        out = a.new_empty(a.shape[0], dtype=torch.promote_types(a.dtype, cov.dtype))
        for rows, target in _chunks(a, out):
            chunk = rows.to(cov.dtype)
            torch.sum((chunk @ cov).mul_(chunk), -1, out=target)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        a, cov = ctx.saved_tensors
        result = torch.zeros_like(cov, memory_format=torch.contiguous_format)
        for rows, g in _chunks(a, gradient):
            chunk = rows.to(cov.dtype)
            result.addmm_((chunk * g[:, None]).T, chunk)
        return None, result


def _chunks(a: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(1, _CHUNK // max(a.shape[1], 1))
    return list(zip(a.split(size), v.split(size), strict=True))
