"""Doors that work in `torch.inference_mode`: loops of training validate and predict in it.

What is made in that mode cannot be differentiated ever after, and much that is made is kept: buffers of
the guide, beliefs, parameters of a model that has not run before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["outside_inference_mode"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_inference_mode(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function as it is without that mode, with copies of arguments that were made in it."""

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*_ordinary(args), **_ordinary(kwargs))

    return wrapped


def _ordinary(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.clone() if x.is_inference() else x
    if type(x) in (tuple, list):
        return type(x)(_ordinary(v) for v in x)
    if type(x) is dict:
        return {k: _ordinary(v) for k, v in x.items()}
    return x
