"""Products of tensors whose axes have labels: negative for output axes, positive for what is summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Axes", "align", "contract", "contract_to"]

Axes = tuple[int, ...]


def align(tensor: Tensor, axes: Axes, target: Axes) -> Tensor:
    """Permute and unsqueeze `tensor` so that its axes follow `target` (a superset of `axes`)."""
    if axes == target:
        return tensor
    order = [axes.index(a) for a in target if a in axes]
    tensor = tensor.permute(order)
    sizes = iter(tensor.shape)
    return tensor.reshape([next(sizes) if a in axes else 1 for a in target])


def contract_to(pieces: Sequence[tuple[Tensor, Axes]], target: Axes) -> Tensor:
    """Einsum of labelled tensors, with the axes `target` in this order; all others are summed over."""
    if len(pieces) == 1:
        tensor, axes = pieces[0]
        dims = [i for i, a in enumerate(axes) if a not in target]
        kept = [a for a in axes if a in target]
        total = tensor.sum(dims) if dims else tensor
        return total.permute([kept.index(a) for a in target])
    names: dict[int, int] = {}
    flat: list[object] = []
    dtype = pieces[0][0].dtype
    for tensor, _ in pieces[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    for tensor, axes in pieces:
        flat += [tensor.to(dtype), [names.setdefault(a, len(names)) for a in axes]]
    result: Tensor = torch.einsum(*flat, [names[a] for a in target])
    return result


def contract(pieces: Sequence[tuple[Tensor, Axes]], ndim: int) -> Tensor:
    """Einsum of labelled tensors, returned with output axes right-aligned and size one where absent."""
    labels = sorted({a for _, axes in pieces for a in axes if a < 0})
    if not any(a > 0 for _, axes in pieces for a in axes):
        result = None
        for tensor, axes in pieces:
            aligned = align(tensor, axes, tuple(labels))
            result = aligned if result is None else result * aligned
        assert result is not None
    else:
        result = contract_to(pieces, tuple(labels))
    if len(labels) == ndim:
        return result
    sizes = iter(result.shape)
    return result.reshape([next(sizes) if a in labels else 1 for a in range(-ndim, 0)])
