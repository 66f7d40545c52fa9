"""Whether a function of a predictor has a valley on a grid: then a log density has several maxima.

A log density that rises to one maximum, or rises or falls throughout, leads up from anywhere. One with
a valley (a square of a sine, a peak that may be anywhere) holds a fit on the side where it starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["has_valley"]

_FLAT = 1e-3
"""Steps below this share of a function's range are none: rounding, and ripples that hold nothing up."""


def has_valley(values: Tensor, sign: float) -> bool:
    """Whether sign * g has an inner minimum for any cell, from `values` (nodes, cells) along a line.

    With sign 0, which cells differ in, whether g turns more than once.
    """
    low, high = values.amin(0), values.amax(0)
    steps = values.diff(dim=0)
    steps = torch.where(steps.abs() > _FLAT * (high - low), steps, 0.0).sign().nan_to_num(0.0)
    last, turns, found = steps[0].clone(), torch.zeros_like(low), torch.zeros_like(low)
    for step in steps[1:]:
        turned = step * last < 0
        turns = turns + turned
        found = found + (turned & (step * sign > 0))
        last = torch.where(step == 0, last, step)
    return bool((turns > 1).any() if sign == 0 else (found > 0).any())
