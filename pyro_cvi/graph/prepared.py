"""A model with its arguments, analysed: the plan, and what tells whether it still holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.errors import CVIError, ModelError, message
from pyro_cvi.graph.check import (
    all_opaque,
    checked,
    checked_pairs,
    factor_values,
    fingerprint,
    opaque_sites,
)
from pyro_cvi.graph.pins import pin_factors
from pyro_cvi.graph.plan import Plan, make_plan
from pyro_cvi.graph.symbolic import (
    Latent,
    Symbolic,
    describe_latents,
    enumerated_values,
    is_factor_site,
    plain_trace,
    run_symbolic,
    subsample_values,
)

__all__ = ["Prepared", "prepare"]

Model = Callable[..., Any]
_SHRINK = (0.1, 0.01)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The plan for one model and one set of arguments."""

    plan: Plan
    nesting: int
    subsample: Mapping[str, Tensor]
    point: Mapping[str, Tensor]
    fingerprint: tuple[Any, ...]
    trace: poutine.Trace
    parameters: Mapping[str, Tensor]

    def still_holds(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """One plain run at the check's point: same sites, same densities, hence the same plan."""
        if self.plan.learns or self.plan.stochastic:
            return False
        try:
            with torch.no_grad(), pyro.validation_enabled(False):
                trace = plain_trace(model, args, kwargs, self.point)
                key = fingerprint(trace, factor_values(trace))
        except Exception:
            return False
        return _same(key, self.fingerprint)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return repr(a) == repr(b)  # NaN equals NaN here


def prepare(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_dense_dim: int,
    previous: Prepared | None = None,
) -> Prepared:
    """Trace, analyse, compile and check the model; reuse the blocks of a previous plan."""
    trace = _first_run(model, args, kwargs)
    latents, nesting = describe_latents(trace)
    if not latents:
        raise CVIError(
            message(
                "model",
                "no latent sample site",
                "at least one pyro.sample without obs",
                "remove obs= or poutine.condition from the sites to infer",
            )
        )
    if previous is not None:
        _check_same_sites(previous.plan.latents, latents)
    subsample = subsample_values(trace)
    _check_plates(latents, trace)
    symbolic = _run(model, args, kwargs, latents, nesting, subsample)
    fresh = plain_trace(model, args, kwargs, subsample)
    values = factor_values(fresh)
    _check_batch(fresh, values)
    point = {n: fresh.nodes[n]["value"] for n in latents}
    discrete = enumerated_values(latents)
    if discrete:  # every branch counts, not only the one that this draw took
        point |= discrete
        fresh = plain_trace(model, args, kwargs, {**subsample, **point})
        values = factor_values(fresh)
    runs, all_values = [fresh], [values]
    symbolic_checked = checked(symbolic, runs, all_values)
    for shrink in _SHRINK:
        if symbolic_checked is symbolic or not _made_opaque(symbolic, symbolic_checked):
            break
        closer = {n: _towards_mean(latents[n], v, shrink) for n, v in point.items()}
        runs.append(plain_trace(model, args, kwargs, {**subsample, **closer}))
        all_values.append(factor_values(runs[-1]))
        symbolic_checked = checked(symbolic, runs, all_values)
    symbolic = _checked_where_opaque(
        symbolic_checked, model, args, kwargs, nesting, subsample, runs, all_values
    )
    # The fingerprint is taken near the prior's mean, where no density overflows or is clamped.
    point = {n: _towards_mean(latents[n], v, _SHRINK[0]) for n, v in point.items()}
    fresh = plain_trace(model, args, kwargs, {**subsample, **point})
    values = factor_values(fresh)
    before = None if previous is None else previous.plan
    parameters = _parameters(trace)

    def planned(symbolic: Symbolic) -> Plan:
        return make_plan(
            symbolic,
            max_dense_dim,
            before,
            stochastic=_is_subsampled(trace),
            learns=bool(parameters),
        )

    plan = planned(symbolic)
    pins = pin_factors(plan, trace)
    if pins:
        plan = planned(replace(symbolic, factors=[*symbolic.factors, *pins]))
    key = fingerprint(fresh, values)
    return Prepared(plan, nesting, subsample, {**point, **subsample}, key, trace, parameters)


def _checked_where_opaque(
    symbolic: Symbolic,
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nesting: int,
    subsample: Mapping[str, Tensor],
    runs: list[poutine.Trace],
    values: list[dict[str, Tensor]],
) -> Symbolic:
    """Check what an opaque part hides: with its sites held at the points, all else must agree."""
    hidden = {n for f in symbolic.factors for n in opaque_sites(f.expression)}
    hidden |= {n for f in symbolic.factors for n in f.forced}
    if not hidden:
        return symbolic
    held = []
    for run in runs:
        fixed = {n: run.nodes[n]["value"] for n in hidden}
        held.append(run_symbolic(model, args, kwargs, symbolic.latents, nesting, subsample, fixed))
    return checked_pairs(symbolic, held, runs, values)


def _parameters(trace: poutine.Trace) -> dict[str, Tensor]:
    """The unconstrained leaves of the model's pyro.param sites, as SVI finds them."""
    found = {}
    for name, site in trace.nodes.items():
        if site["type"] == "param" and site["value"].requires_grad:
            found[name] = site["value"].unconstrained()
    return found


def _first_run(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> poutine.Trace:
    """An ordinary run; what torch says about dtypes and shapes is given a site and a remedy."""
    try:
        trace = plain_trace(model, args, kwargs, {})
        _check_data(trace)
        factor_values(trace)
        return trace
    except CVIError:
        raise
    except (RuntimeError, ValueError) as error:
        said = _first_line(error)
        if "dtype" in said:
            expected, remedy = "one floating dtype", "convert the data, as by x.to(torch.float32)"
        elif any(word in said for word in ("size", "shape", "broadcast")):
            expected = "shapes that broadcast"
            remedy = "compare the shapes of data, plates and parameters at that statement"
        else:
            raise
        where = getattr(error, "last_site", None)
        place = f"model, at or after site '{where}'" if where else "model, before its first site"
        raise ModelError(message(place, said.rstrip("."), expected, remedy)) from error


def _run(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: Mapping[str, Latent],
    nesting: int,
    subsample: Mapping[str, Tensor],
) -> Symbolic:
    """The symbolic run; a model that cannot run on symbols is sampled as a whole."""
    try:
        return run_symbolic(model, args, kwargs, latents, nesting, subsample)
    except Exception as error:
        fixed = {n: x.value for n, x in latents.items() if x.enum_dim is None}
        try:
            symbolic = run_symbolic(model, args, kwargs, latents, nesting, subsample, fixed)
        except Exception as again:
            discrete = [n for n, x in latents.items() if x.enum_dim is not None]
            if not discrete:
                raise
            raise CVIError(
                message(
                    f"discrete site '{discrete[0]}'",
                    f"the model raised {type(again).__name__} ({_first_line(again)}) when all values "
                    "of its discrete sites were tried at once",
                    "a model that broadcasts over an enumeration dim left of its plates",
                    "use torch.where or indexing in place of Python branches, .item() and loops over "
                    "a discrete value",
                )
            ) from again
        reason = f"the model raised {type(error).__name__} on symbolic values"
        return replace(
            symbolic, factors=[all_opaque(f, symbolic, reason) for f in symbolic.factors]
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:120]


def _made_opaque(before: Symbolic, after: Symbolic) -> bool:
    return any(a is not b for a, b in zip(before.factors, after.factors, strict=True))


def _towards_mean(latent: Latent, value: Tensor, shrink: float) -> Tensor:
    """A point near the prior's mean, for sites whose support is convex."""
    if latent.enum_dim is not None:
        return value
    try:
        mean = latent.prior.mean
    except (NotImplementedError, AttributeError):
        return value
    moved = mean + shrink * (value - mean)
    return torch.where(moved.isfinite(), moved, value)


def _is_subsampled(trace: poutine.Trace) -> bool:
    """Whether any factor stands in a plate that holds part of its elements."""
    return any(
        f.full_size is not None and f.full_size != f.size
        for s in trace.nodes.values()
        if is_factor_site(s)
        for f in s["cond_indep_stack"]
    )


def _check_same_sites(old: Mapping[str, Latent], new: Mapping[str, Latent]) -> None:
    if set(old) != set(new):
        gone, came = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        raise CVIError(
            message(
                "model",
                f"its latent sites changed between calls (gone: {gone}, new: {came})",
                "the same latent sites at every step",
                "build a new AutoCVI for the other model, or condition on the same sites each time",
            )
        )
    for name, latent in new.items():
        if latent.shape != old[name].shape or latent.family is not old[name].family:
            raise CVIError(
                message(
                    f"latent site '{name}'",
                    f"shape {latent.shape} ({latent.family.name})",
                    f"shape {old[name].shape} ({old[name].family.name}), as at the first call",
                    "build a new AutoCVI for data of another size (its local latents are fitted to "
                    "the rows seen first)",
                )
            )


def _check_data(trace: poutine.Trace) -> None:
    for name, site in trace.nodes.items():
        if not is_factor_site(site):
            continue
        mask = site["mask"]
        if site["is_observed"] and isinstance(site["value"], Tensor) and mask is not False:
            _check_finite(name, site["value"], mask, site["fn"])


def _check_finite(name: str, value: Tensor, mask: Any, fn: Any) -> None:
    if not value.dtype.is_floating_point or hasattr(fn, "log_factor"):
        return
    bad = ~value.isfinite()
    if isinstance(mask, Tensor):
        event = (1,) * fn.event_dim
        bad = bad & mask.reshape(*mask.shape, *event)
    inner = fn
    while hasattr(inner, "base_dist") and not hasattr(inner, "_mask"):
        inner = inner.base_dist
    if isinstance(getattr(inner, "_mask", None), Tensor):
        event = (1,) * (bad.ndim - inner._mask.ndim)
        bad = bad & inner._mask.reshape(*inner._mask.shape, *event)
    if bool(bad.any()):
        count = int(bad.sum())
        raise CVIError(
            message(
                f"observed site '{name}'",
                f"{count} of {value.numel()} values are NaN or infinite",
                "finite data wherever the mask is on",
                "drop these rows, or mask them with poutine.mask or obs_mask",
            )
        )


def _check_batch(trace: poutine.Trace, values: Mapping[str, Tensor]) -> None:
    """Batch dims outside of plates: the density would be summed over them by accident."""
    if not pyro.settings.get("validate_infer"):
        return
    for name, site in trace.nodes.items():
        if not is_factor_site(site):
            continue
        shape = tuple(values[name].shape)
        declared = {f.dim for f in site["cond_indep_stack"] if f.vectorized}
        extra = [d for d in range(-len(shape), 0) if shape[d] > 1 and d not in declared]
        if extra and not hasattr(site["fn"], "log_factor"):
            raise CVIError(
                message(
                    f"site '{name}'",
                    f"a log density of shape {shape}, of which dim {extra[0]} is in no plate",
                    "every batch dim declared by pyro.plate, or made part of the event",
                    f"put the statement in `with pyro.plate('data', {shape[extra[0]]}):`, or add "
                    f".to_event({-extra[0]}) to its distribution",
                )
            )


def _check_plates(latents: Mapping[str, Latent], trace: poutine.Trace) -> None:
    for name in latents:
        for frame in trace.nodes[name]["cond_indep_stack"]:
            plate, size, full = frame.name, frame.size, frame.full_size
            if full is not None and size != full:
                raise CVIError(
                    message(
                        f"latent site '{name}'",
                        f"it lives in plate '{plate}', which holds {size} of {full} elements at a time",
                        "subsampled plates around observed sites only, in this version",
                        "run on all elements at once, or marginalise the local site",
                    )
                )
