"""Colours, and matplotlib where it is installed."""

from __future__ import annotations

from typing import Any

from pyro_cvi.errors import imported

__all__ = ["COLOURS", "pyplot"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Blue, vermilion, green, purple, orange, light blue, black and yellow of Okabe and Ito (2008), which
people can tell apart who do not see red and green apart."""


def pyplot() -> Any:
    """`matplotlib.pyplot`, or an error that names the extra."""
    return imported("matplotlib.pyplot", "plots", "pyro_cvi.plots")
