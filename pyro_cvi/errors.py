"""Errors that say which site, what was found, what was expected, and what to write instead."""

from __future__ import annotations

__all__ = ["CVIError", "CVIWarning", "ModelError", "message"]


class CVIError(ValueError):
    """Something in the model, its data or the call cannot be used; the fitted state is unchanged."""


class ModelError(CVIError, RuntimeError):
    """The model itself raised, about dtypes or shapes; the original error is the cause."""


class CVIWarning(UserWarning):
    """Something is probably not what was meant."""


def message(where: str, found: str, expected: str, remedy: str) -> str:
    """One sentence a part: where, what was found, what was expected, what to write instead."""
    return f"{where}: {found}. Expected: {expected}. Instead: {remedy}."
