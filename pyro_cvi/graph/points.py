"""At which values of its latents a model is run, before anything is known of their posterior.

    z  =  c + r (z' - c),        z' a draw from the prior of z given the sites before it, c its middle

with r = 1, a draw, wherever that will do. Covariates of scale 10 under weights of N(0, 10) overflow at
such a point, and no density there is of use: then r falls until they are finite. The first run takes
the place that `init_loc_fn` gives to a site, if it does.

Such values are provisional. What they do to a distribution's parameters is no fault of the user's,
unless the middle of the priors does it as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.errors import CVIError, ModelError
from pyro_cvi.families import Unconstrained
from pyro_cvi.graph.check import factor_values
from pyro_cvi.graph.initial import is_by_strategy
from pyro_cvi.graph.symbolic import Call, Choose, plain_trace
from pyro_cvi.graph.validation import check_data
from pyro_cvi.graph.windows import Window

__all__ = [
    "centre",
    "check_run",
    "first_line",
    "first_run",
    "is_continuous",
    "middle_run",
    "towards",
]

Model = Callable[..., Any]
Values = dict[str, Tensor]
_SHARES = (0.1, 0.01, 1e-4, 1e-6)
"""How far from the middle of the priors a run is tried where a draw does not serve, in draws."""
_HUGE = 1e8
"""Log densities above this have too few digits to tell a lost dependence by."""
_LONGEST = 300
"""Characters of what torch says of a value outside of its domain."""


def centre(fn: Any) -> Tensor | None:
    """The mean of a continuous law, or of x = T(u) the image of the median; None if unknown."""
    try:
        middle: Tensor = fn.mean.expand(fn.batch_shape + fn.event_shape)
    except (NotImplementedError, AttributeError, RuntimeError):
        middle = (
            torch.zeros(fn.shape(), device=None)  # a bijection does not say where it is
            if isinstance(fn, Unconstrained)
            else torch.tensor(math.nan, device="cpu")
        )
    return middle if bool(middle.isfinite().all()) else None


def towards(middle: Tensor | None, value: Tensor, share: float) -> Tensor:
    """A point near the middle of a law with convex support, that share of the way to `value`."""
    if middle is None:
        return value
    moved = middle + share * (value - middle)
    return torch.where(moved.isfinite(), moved, value)


def is_continuous(fn: Any) -> bool:
    """Whether a law is one of real numbers."""
    return not (getattr(fn, "has_enumerate_support", False) or fn.support.is_discrete)


def _near(share: float) -> Choose:
    """Of a latent site the value near the middle of its prior, given the sites before it."""

    def choose(site: Any) -> Tensor | None:
        fn = site["fn"]
        return towards(centre(fn), fn.sample(), share) if is_continuous(fn) else None

    return choose


def _placed(init_loc_fn: Callable[..., Any]) -> Choose:
    """Of a latent site the value that `init_loc_fn` gives it, if that can be one."""

    def choose(site: Any) -> Tensor | None:
        fn = site["fn"]
        if not is_continuous(fn) and is_by_strategy(init_loc_fn, site["name"]):
            return None
        own = fn.constrained if isinstance(fn, Unconstrained) else fn
        try:
            point = torch.as_tensor(init_loc_fn({**site, "fn": own})).detach()
            point = point.expand(own.batch_shape + own.event_shape)
            if point.is_floating_point() and not bool(own.support.check(point).all()):
                return None
        except (TypeError, RuntimeError):  # what is wrong with it is said when it is asked again
            return None
        u: Tensor = fn.transform.inv(point) if isinstance(fn, Unconstrained) else point
        return u if bool(u.isfinite().all()) else None

    return choose


def first_run(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Window | None = None,
    init_loc_fn: Callable[..., Any] | None = None,
) -> poutine.Trace:
    """An ordinary run, whose log densities are finite if they are so anywhere near the priors' middle.

    The trace's `is_drawn` says that its values are a draw from the prior. What torch says about dtypes,
    shapes and domains is given a site and a remedy.
    """
    ways: list[Choose | None] = [None, *(_near(s) for s in _SHARES)]
    if init_loc_fn is not None:
        ways.insert(0, _placed(init_loc_fn))
    best, fewest, said = None, math.inf, None
    for choose in ways:
        try:
            trace = _run(model, args, kwargs, chosen, choose)
            lost = _lost(trace, factor_values(trace))
        except CVIError:
            raise
        except Exception as error:
            said = error
            if _is_about_form(error):
                break
            continue
        if lost < fewest:
            best, fewest, trace.is_drawn = trace, lost, choose is None
        if lost == 0:
            break
    if best is not None and not (said is not None and _is_about_form(said)):
        return best
    assert said is not None
    explained = _explained(said)
    if explained is said:
        raise said
    raise explained from said


def _run(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Window | None,
    choose: Choose | None,
) -> poutine.Trace:
    """An ordinary run, with values of latents that are drawn, or chosen."""
    try:
        trace = plain_trace(model, args, kwargs, {}, chosen, one_state=True, choose=choose)
    except Exception as error:
        if "Simplex" in str(error):  # float32 draws of a long Dirichlet sum to one to 1e-6 only
            with pyro.validation_enabled(False):
                trace = plain_trace(model, args, kwargs, {}, chosen, one_state=True, choose=choose)
        else:  # perhaps the model needs a state for every element
            trace = plain_trace(model, args, kwargs, {}, chosen, choose=choose)
    check_data(trace)
    return trace


def check_run(call: Call, is_drawn: bool) -> tuple[poutine.Trace, Values]:
    """A run at new random values, and its log densities; these have digits to compare if any have.

    Where the first run was not at a draw from the prior, its values are the middle that others are near.
    """
    run = values = said = None
    fewest, random = math.inf, torch.get_rng_state()
    for share in (1.0, *_SHARES):
        try:
            found = call.plain({}, one_state=True, choose=_around(call, share, is_drawn))
            here = factor_values(found)
        except (RuntimeError, ValueError) as error:  # as that a matrix is not positive definite
            said = said or error
            continue
        finally:
            if share == 1:
                random = torch.get_rng_state()
        lost = _lost(found, here, _HUGE)
        if lost < fewest:
            run, values, fewest = found, here, lost
        if lost == 0:
            break
    torch.set_rng_state(random)  # how often it was tried must not be seen in later draws
    if run is None or values is None:
        assert said is not None
        raise said
    return run, values


def _around(call: Call, share: float, is_drawn: bool) -> Choose | None:
    """Of a latent site a value around the middle."""
    if share == 1 or is_drawn:
        return None if share == 1 else _near(share)

    def choose(site: Any) -> Tensor | None:
        fn, latent = site["fn"], call.latents.get(site["name"])
        if latent is None or not is_continuous(fn):
            return None
        return towards(latent.value.detach(), fn.sample(), share)

    return choose


def middle_run(call: Call, share: float) -> poutine.Trace | None:
    """A run with each latent near the middle of its prior given those before it; None if it fails.

    A child of a parent that is nearly zero, or infinite, may be anywhere; given its middle it is not.
    """
    try:
        return call.plain({}, one_state=True, choose=_near(share))
    except (RuntimeError, ValueError):
        return None


def _is_about_form(error: Exception) -> bool:
    """Whether torch speaks of a dtype or a shape, which no other value of the latents mends."""
    if not isinstance(error, RuntimeError | ValueError) or _is_about_domain(error):
        return False
    return any(word in first_line(error) for word in ("dtype", "size", "shape", "broadcast"))


def _is_about_domain(error: Exception) -> bool:
    """Whether torch's validation of a parameter or a value has failed."""
    return isinstance(error, ValueError) and "found invalid values" in str(error)


def _explained(error: Exception) -> Exception:
    """What torch says about dtypes, shapes and domains, with a site and a remedy; or the error."""
    said = first_line(error)
    if _is_about_domain(error):
        said = " ".join(str(error).strip().split("\n")[:2])[:_LONGEST]
        expected, remedy = "a value in that domain", "look for a sign or an overflow there"
        if "to be within the support" in said:
            expected, remedy = "data in the support of their law", "compare the data with that law"
    elif not _is_about_form(error):
        return error
    elif "dtype" in said:
        expected, remedy = "one floating dtype", "convert the data, as by x.to(torch.float32)"
    else:
        expected = "shapes that broadcast"
        remedy = "compare the shapes of data, plates and parameters at that statement"
    where = getattr(error, "last_site", None)
    place = f"model, at or after site '{where}'" if where else "model, before its first site"
    return ModelError(place, said.rstrip("."), expected, remedy)


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return str(error).strip().split("\n")[0][:120]


def _lost(trace: poutine.Trace, values: Mapping[str, Tensor], most: float = math.inf) -> int:
    """How many log densities are not finite, or not below `most` in size, where masks are on.

    Those of states that cannot be are minus infinity at any point.
    """
    total = 0
    for name, value in values.items():
        mask = trace.nodes[name]["mask"]
        if mask is False:
            continue
        bad = ~(value.abs() < most)
        total += int((bad & mask if isinstance(mask, Tensor) else bad).sum())
    return total
