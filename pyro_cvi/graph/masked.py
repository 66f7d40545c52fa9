"""Values for cells that a mask hides: they may hold anything, and densities are evaluated everywhere."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.algebra.latent import LatentTensor
from pyro_cvi.families.unconstrained import of_one
from pyro_cvi.linalg import broadcast_shapes

__all__ = ["fill_masked"]


def _inner_value(support: Any) -> Any:
    """A value inside of a support that may differ from cell to cell, as that of counts out of n."""
    support = of_one(support)
    low, high = (getattr(support, n, None) for n in ("lower_bound", "upper_bound"))
    if low is None or support.is_discrete:
        return low
    return None if high is None else (low + high) / 2


def fill_masked(value: Any, mask: Tensor, fn: Any) -> Any:
    """Masked cells may hold NaN: give them the value of a cell that counts, or one of their support."""
    if isinstance(value, LatentTensor) or not isinstance(value, Tensor):
        return value
    if bool(mask.all()) or not bool(mask.any()):
        number = 0.0 if getattr(fn.support, "is_discrete", False) else 0.5
        return value if bool(mask.any()) else torch.nan_to_num(value, number, number, number)
    event_dim = fn.event_dim
    batch = broadcast_shapes(mask.shape, value.shape[: value.ndim - event_dim])
    event = value.shape[value.ndim - event_dim :]
    wide, where = value.expand(*batch, *event), mask.expand(batch)
    first = int(where.reshape(-1).nonzero()[0])
    filler = wide.reshape(math.prod(batch), *event)[first]
    filled = torch.where(where.reshape(*batch, *([1] * event_dim)), wide, filler)
    try:
        inside = fn.support.check(filled)
    except (NotImplementedError, RuntimeError):
        return filled
    own = _inner_value(fn.support)
    if bool(inside.all()) or own is None:
        return filled
    drawn = torch.as_tensor(own, dtype=filled.dtype, device=filled.device)
    kept = (
        inside.expand(batch) | where
    )  # a value of the data outside of the support is an error elsewhere
    return torch.where(kept.reshape(*batch, *([1] * event_dim)), filled, drawn)
