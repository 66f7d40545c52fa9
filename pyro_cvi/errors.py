"""Errors that say which site, what was found, what was expected, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

__all__ = [
    "CVIError",
    "CVIWarning",
    "ConvergenceWarning",
    "ModelError",
    "check_names",
    "imported",
    "message",
]


def message(where: str, found: str, expected: str, remedy: str) -> str:
    """One sentence a part: where, what was found, what was expected, what to write instead."""
    return f"{where}: {found}. Expected: {expected}. Instead: {remedy}."


class CVIError(ValueError):
    """Something in the model, its data or the call cannot be used; the fitted state is unchanged.

    Arguments:
        where: the site, argument or call; alone, a whole sentence about an argument.
        found: what was there.
        expected: what would have served.
        instead: what to write.
    """

    def __init__(self, where: str, found: str = "", expected: str = "", instead: str = "") -> None:
        super().__init__(message(where, found, expected, instead) if found else where)
        self.where, self.found, self.expected, self.instead = where, found, expected, instead


class ModelError(CVIError, RuntimeError):
    """The model itself raised, about dtypes or shapes; the original error is the cause."""


class CVIWarning(UserWarning):
    """Something is probably not what was meant."""


class ConvergenceWarning(CVIWarning):
    """A run has ended, and not, or not for sure, at an optimum."""


def check_names(
    where: str, names: Iterable[str], known: Iterable[str], what: str, remedy: str
) -> None:
    """An error for names that are not among those known; `what` says what is missing."""
    among = set(known)
    unknown = sorted(set(names) - among)
    if unknown:
        raise CVIError(where, f"{what} '{unknown[0]}'", f"some of {sorted(among)}", remedy)


def imported(module: str, extra: str, where: str) -> Any:
    """A module that an extra brings, or an ImportError that names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            message(
                where, f"{package} is not installed", f"the extra '{extra}'",
                f"python3 -m pip install 'pyro_cvi[{extra}]'",
            )
        ) from error  # fmt: skip
