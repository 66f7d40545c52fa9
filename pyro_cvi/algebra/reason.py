"""Why a message, or a block, is what it is: a sentence for the report, beside what code acts on.

No code reads the sentence: it may be reworded, and no fit changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Cause", "Reason"]


class Cause(Enum):
    """What code asks of a reason."""

    PLAIN = auto()
    """Nothing."""
    NO_GRADIENT = auto()
    """No pathwise gradient comes through, so that only the score function serves."""
    EXPONENTIAL = auto()
    """The exponential of a predictor, which overflows under a wide belief."""
    TOO_LARGE = auto()
    """Correlations were given up, for a covariance of all scalars would be too large."""


@dataclass(frozen=True)
class Reason:
    """A sentence, and its cause."""

    text: str
    cause: Cause = Cause.PLAIN
