"""Colours, and matplotlib where it is installed."""

from __future__ import annotations

from typing import Any

from pyro_cvi.errors import message

__all__ = ["COLOURS", "pyplot"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Blue, vermilion, green, purple, orange, light blue, black and yellow of Okabe and Ito (2008), which
people can tell apart who do not see red and green apart."""


def pyplot() -> Any:
    """`matplotlib.pyplot`, or an error that names the extra."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            message(
                "pyro_cvi.plots", "matplotlib is not installed", "the extra 'plots'",
                "python3 -m pip install 'pyro_cvi[plots]'",
            )
        ) from error  # fmt: skip
    return plt
