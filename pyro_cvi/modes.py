"""Public calls work in `torch.inference_mode`, and in threads.

Loops of training validate and predict in that mode. What is made in it cannot be differentiated ever
after, and much that is made is kept: buffers of the guide, beliefs, parameters of a new model.

Pyro's stack of handlers, its parameter store and torch's random state belong to the process. Two threads
that run models at a time see each other's handlers: one lock lets them in one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["public_call"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


_LOCK = RLock()


def public_call(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function for one thread at a time, outside of `torch.inference_mode`.

    Arguments that were made in that mode are copied.
    """

    @wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _LOCK:
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
