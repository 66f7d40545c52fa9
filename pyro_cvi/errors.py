"""Errors that say which site, what was found, what was expected, and what to write instead."""

from __future__ import annotations

__all__ = ["CVIError", "CVIWarning", "message"]


class CVIError(ValueError):
    """Something in the model, its data or the call cannot be used; the fitted state is unchanged."""


class CVIWarning(UserWarning):
    """Something is probably not what was meant."""


def message(where: str, found: str, expected: str, remedy: str) -> str:
    """One sentence a part: where, what was found, what was expected, what to write instead."""
    return f"{where}: {found}. Expected: {expected}. Instead: {remedy}."
