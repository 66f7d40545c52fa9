"""A model with its arguments, analysed: the plan, and what tells whether it still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.algebra.reason import Reason
from pyro_cvi.densities import sites_inside
from pyro_cvi.errors import CVIError
from pyro_cvi.families import BETA, DIRICHLET, Unconstrained
from pyro_cvi.graph.beginning import Beginning, begun
from pyro_cvi.graph.check import (
    all_opaque,
    checked,
    checked_pairs,
    factor_values,
    fingerprint,
    opaque_sites,
)
from pyro_cvi.graph.discrete import (
    Dependence,
    check_branches,
    check_plates,
    shares_dims,
    with_dims,
)
from pyro_cvi.graph.initial import initial_belief
from pyro_cvi.graph.pins import jacobian_factors, pin_factors
from pyro_cvi.graph.plan import Block, Plan, make_plan
from pyro_cvi.graph.pointed import MOST_SCALARS, joinable, with_points
from pyro_cvi.graph.points import centre, check_run, first_line, first_run, middle_run, towards
from pyro_cvi.graph.symbolic import (
    Call,
    Joined,
    Known,
    Latent,
    Symbolic,
    describe_latents,
    enumerated_values,
    full_size,
    is_factor_site,
    plain_trace,
    plate_frames,
    signature,
    subsample_values,
)
from pyro_cvi.graph.validation import (
    check_batch,
    check_data,
    check_local_data,
    check_same_sites,
    check_windows,
)
from pyro_cvi.graph.windows import Part, Window, whole_latent
from pyro_cvi.updates import Belief

__all__ = ["Prepared", "first_run", "is_stream", "prepare"]

Model = Callable[..., Any]
Values = dict[str, Tensor]
_SHRINK = (0.1, 0.01)
"""How far from the prior's mean the second and third point of the self-check lie."""
_ELSEWHERE = 0.5
"""How far from the middle, in draws, a second run on symbols is."""
_TRIES = 3
"""How often other indices are tried before rows are taken for a stream."""
_CHEAP = 1 << 24
"""Elements of a discrete site times scalars of the largest latent up to which all states are tried."""
_INSIDE = 0.5
"""The same of the first point for sites in a simplex: at its edge, densities have no digits."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """The plan for one model and one set of arguments.

    `parts` are the plates that hold some of their elements, `window` the elements; `given` names the
    plates whose indices came with the model. `age` counts the analyses of a subsampled model; `sizes`
    are those of all plates. `lost` are the factors that failed the self-check, with the reason.

    `key` says what a symbolic run must have in common with this one for its latents to be the same; None
    where that cannot be told. Of latents whose prior depends on others, it is not known after such a
    run: `begun` finds it out. `priors` are those that are constant.
    """

    plan: Plan
    nesting: int
    subsample: Mapping[str, Tensor]
    point: Mapping[str, Tensor]
    fingerprint: tuple[Any, ...]
    trace: poutine.Trace
    parameters: Mapping[str, Tensor]
    parts: Mapping[str, Part] = field(default_factory=dict)
    window: Window = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    depends: Dependence | None = None
    age: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, Reason] = field(default_factory=dict)
    key: tuple[Any, ...] | None = None
    call: Call | None = None
    priors: Mapping[str, Known] = field(default_factory=dict)
    joint: frozenset[str] = frozenset()

    def start(self, block: Block, located: Mapping[str, Tensor] | None = None) -> Belief:
        """Where the posterior of a block starts; what is said of states asks for no priors."""
        plan = self.plan if block.is_discrete else self._with_priors
        return initial_belief(plan, block, located)

    @cached_property
    def _with_priors(self) -> Plan:
        """The plan with the priors of all latents."""
        return begun(self.plan, self.call, self.priors, {}, tested=False).plan

    def beginning(self, located: Mapping[str, Tensor], *, again: bool = False) -> Beginning:
        """Where a fit of the whole plan begins."""
        return begun(self.plan, self.call, self.priors, located, again=again)

    @property
    def observed_cells(self) -> int:
        """How many observed numbers the model has; at least one."""
        sites = [s for s in self.trace.nodes.values() if is_factor_site(s) and s["is_observed"]]
        return max(1, sum(s["value"].numel() for s in sites if isinstance(s["value"], Tensor)))

    @property
    def has_local(self) -> bool:
        """Whether some latents are seen through a window."""
        return any(b.placement is not None for b in self.plan.blocks)

    def still_holds(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """One plain run at the check's point: same sites, same densities, hence the same plan."""
        if self.plan.learns or self.plan.stochastic:
            return False
        try:
            with torch.no_grad(), pyro.validation_enabled(False):
                trace = plain_trace(_joined(model, self.joint), args, kwargs, self.point)
                if trace.changed:  # another minibatch
                    return False
                key = fingerprint(trace)
        except Exception:
            return False
        return _same(key, self.fingerprint)


def _joined(model: Model, sites: frozenset[str]) -> Model:
    return Joined(model, sites) if sites else model


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return repr(a) == repr(b)  # NaN equals NaN here


def prepare(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_dense_dim: int,
    previous: Prepared | None = None,
    *,
    chosen: Window | None = None,
    chunk: Mapping[str, tuple[int, Tensor]] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    spread: frozenset[str] = frozenset(),
    joint: frozenset[str] = frozenset(),
    max_joint_dim: int = MOST_SCALARS,
    init_loc_fn: Callable[..., Any] | None = None,
) -> Prepared:
    """Trace, analyse, compile and check the model; reuse the blocks of a previous plan.

    `chosen` are the elements for plates that would draw theirs. With `chunk` (plate: full size and
    elements) the arguments are a part of larger data. `beside` are the parameters of other guides, whose
    sites the model is given draws of: others at each analysis, and perhaps with a gradient. Of plates
    that are `spread` other processes have other elements. The sites of `joint` share one Gaussian of
    their unconstrained values; so do those of factors that would be sampled, up to `max_joint_dim`
    scalars. The model is first seen where `init_loc_fn` places its sites.
    """
    options: dict[str, Any] = {
        "chosen": chosen, "chunk": chunk, "beside": beside, "spread": spread,
        "init_loc_fn": init_loc_fn,
    }  # fmt: skip
    if previous is not None:
        return _prepare(model, args, kwargs, max_dense_dim, previous, previous.joint, **options)
    found = plain = _prepare(model, args, kwargs, max_dense_dim, None, joint, **options)
    tried: set[frozenset[str]] = set()
    while not spread and found.plan.sampled_sites():
        most = min(max_joint_dim, max_dense_dim)
        sets = joinable(found.plan, most) + joinable(plain.plan, most)
        further = next((s for s in sets if s not in tried), None)
        if further is None:
            return plain
        tried.add(further)
        found = _prepare(model, args, kwargs, max_dense_dim, None, further, **options)
    return found


def _prepare(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_dense_dim: int,
    previous: Prepared | None,
    joint: frozenset[str],
    *,
    chosen: Window | None,
    chunk: Mapping[str, tuple[int, Tensor]] | None,
    beside: Mapping[str, Tensor] | None,
    spread: frozenset[str],
    init_loc_fn: Callable[..., Any] | None,
) -> Prepared:
    """`prepare` with the sites of `joint` in one block."""
    model = _joined(model, joint)
    checks = previous is None or _is_power_of_two(previous.age + 1)
    if previous is not None and not checks and _is_analysed_often(previous, beside):
        like = _prepared_like(
            previous, model, args, kwargs, max_dense_dim, chosen, chunk, beside, spread
        )
        if like is not None:
            return like
    trace = first_run(model, args, kwargs, chosen, init_loc_fn)
    latents, nesting = describe_latents(trace)
    if not latents:
        raise CVIError(
            "model",
            "no latent sample site",
            "at least one pyro.sample without obs",
            "remove obs= or poutine.condition from the sites to infer",
        )
    windowed = spread if previous is None else frozenset(previous.parts)
    parts = _parts(trace, chunk or {}, windowed)
    around = {n: _parts_around(x, parts) for n, x in latents.items()}
    if previous is not None:
        now = {n: whole_latent(x, around[n]) for n, x in latents.items()}
        check_same_sites(previous.plan.whole.latents, now)
        check_windows(previous.plan, around)
    indices = subsample_values(trace)
    window = {n: chunk[n][1] if chunk and n in chunk else indices[n] for n in parts}
    call = Call(model, args, kwargs, latents, nesting, indices)
    names = [n for n, s in trace.nodes.items() if is_factor_site(s)]
    call = with_dims(call, names, None if previous is None else previous.depends)
    latents = dict(call.latents)
    again = previous is not None and (bool(parts) or _is_analysed_often(previous, beside))
    age = previous.age + 1 if again and previous is not None else 0
    unchecked, is_read = _run(call)
    if age == 0 or _is_power_of_two(age):
        symbolic, point = _verified(call, unchecked, trace.is_drawn)
        lost: Mapping[str, Reason] = _made_opaque(unchecked, symbolic)
    else:  # a minibatch, or parameters, like those before: they were checked
        assert previous is not None
        lost = previous.lost
        symbolic, point = _lose(unchecked, lost), {n: x.value for n, x in latents.items()}
    old = None if previous is None else previous.plan
    plan = _planned(symbolic, trace, max_dense_dim, around, old, beside is not None, bool(spread))
    plan = with_points(plan, call)
    check_local_data(plan, parts)
    learnt = {**_parameters(trace), **(beside or {})}
    key = signature(unchecked.trace, latents) if is_read else None
    found = Prepared(
        plan, nesting, indices, {}, (), trace, learnt, parts, window, trace.given, call.depends, age,
        _sizes(trace), lost, key, call, unchecked.priors, joint,
    )  # fmt: skip
    if plan.stochastic or plan.learns:  # analysed afresh at each step
        return found
    # The fingerprint is taken near the prior's mean, where no density overflows or is clamped.
    point, near = _near_the_middle(call, point, trace.is_drawn)
    return replace(found, point={**point, **indices}, fingerprint=fingerprint(near))


def _near_the_middle(
    call: Call, point: Mapping[str, Tensor], is_drawn: bool
) -> tuple[dict[str, Tensor], poutine.Trace]:
    """A run at a point nearer to the priors' middle, or to the first run where the model fails there."""
    latents = call.latents
    nearer = {n: _nearer(latents[n], v, _SHRINK[0], is_drawn) for n, v in point.items()}
    try:
        return nearer, call.plain(nearer)
    except (RuntimeError, ValueError):  # as that a matrix is not positive definite
        first = {n: latents[n].value.detach() if n in latents else v for n, v in point.items()}
        return first, call.plain(first)


def _is_analysed_often(previous: Prepared, beside: Mapping[str, Tensor] | None) -> bool:
    """Whether a model is analysed at each step: of minibatches, parameters, draws of other guides."""
    return bool(previous.parts) or beside is not None or previous.plan.learns


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _prepared_like(
    previous: Prepared,
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_dense_dim: int,
    chosen: Window | None,
    chunk: Mapping[str, tuple[int, Tensor]] | None,
    beside: Mapping[str, Tensor] | None,
    spread: frozenset[str],
) -> Prepared | None:
    """The analysis of a minibatch, or of parameters, like those before, from a symbolic run alone.

    None where its sites are others, or have other shapes, plates or laws: then all is to be found anew.
    """
    if previous.key is None:
        return None
    latents = {n: replace(x, value=x.value.detach()) for n, x in previous.plan.latents.items()}
    call = Call(model, args, kwargs, latents, previous.nesting, {}, previous.depends)
    try:
        symbolic = call.symbolic(chosen=chosen, known=previous.priors)
    except Exception:  # the ordinary run will say what is wrong
        return None
    trace = symbolic.trace
    if signature(trace, latents) != previous.key:
        return None
    indices, chunk = subsample_values(trace), chunk or {}
    parts, drawn = _parts(trace, chunk, frozenset(previous.parts)), beside is not None
    learnt = {**_parameters(trace), **(beside or {})}
    if parts != previous.parts:
        return None
    if not (drawn or learnt or chunk or _is_subsampled(trace)):
        return None  # whole data: the plan may serve again, by a fingerprint of its own
    check_data(trace)
    latents = {n: _with_prior(x, trace.nodes[n]["fn"]) for n, x in latents.items()}
    symbolic = _lose(replace(symbolic, latents=latents), previous.lost)
    around = {n: _parts_around(x, parts) for n, x in latents.items()}
    plan = _planned(symbolic, trace, max_dense_dim, around, previous.plan, drawn, bool(spread))
    check_local_data(plan, parts)
    return replace(
        previous,
        plan=plan,
        subsample=indices,
        point={},
        fingerprint=(),
        trace=trace,
        parameters=learnt,
        window={n: chunk[n][1] if n in chunk else indices[n] for n in parts},
        given=symbolic.given,
        age=previous.age + 1,
        call=replace(call, latents=latents, subsample=indices),
        priors=symbolic.priors,
    )


def _with_prior(latent: Latent, fn: Any) -> Latent:
    """The latent with its prior in a symbolic run, if no other latent enters that."""
    is_known = tuple(fn.batch_shape) == latent.batch_shape and not sites_inside(fn)
    support = fn.constrained.support if isinstance(fn, Unconstrained) else None
    return replace(latent, prior=fn if is_known else None, own_support=support)


def is_stream(
    prepared: Prepared, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the plates that draw their elements do so in vain: other indices, same data.

    Such rows have no identity: what was stored for an index would be of another row.
    """
    drawn = [p for p in prepared.parts.values() if p.scale != 1 and p.name not in prepared.given]
    if not drawn:
        return False
    values = {n: x.value for n, x in prepared.plan.latents.items()}
    seen = None
    for i in range(1 + _TRIES):
        others = {p.name: (prepared.window[p.name] + i * p.size) % p.full for p in drawn}
        with torch.no_grad(), pyro.validation_enabled(False):
            found = fingerprint(plain_trace(model, args, kwargs, values, others))
        seen = found if seen is None else seen
        if not _same(seen, found):
            return False
    return True


def _parts(
    trace: poutine.Trace, chunk: Mapping[str, tuple[int, Tensor]], windowed: frozenset[str]
) -> dict[str, Part]:
    """The plates that hold some of their elements, or did so before (`windowed`)."""
    found = {}
    for f in plate_frames(trace):
        if not f.vectorized:
            continue
        full = full_size(f)
        scale = full / max(f.size, 1) if full > 0 else 1.0
        if f.name in chunk:
            found[f.name] = Part(f.name, f.dim, f.size, chunk[f.name][0], scale)
        elif scale != 1 or f.name in windowed:
            found[f.name] = Part(f.name, f.dim, f.size, full, scale)
    return found


def _sizes(trace: poutine.Trace) -> dict[str, int]:
    """How many elements each plate holds."""
    return {f.name: f.size for f in plate_frames(trace) if f.vectorized}


def _parts_around(latent: Latent, parts: Mapping[str, Part]) -> tuple[Part, ...]:
    around = [parts[name] for name, *_ in latent.plates if name in parts]
    return tuple(sorted(around, key=lambda p: p.dim))


def _planned(
    symbolic: Symbolic,
    trace: poutine.Trace,
    max_dense_dim: int,
    around: Mapping[str, tuple[Part, ...]],
    previous: Plan | None,
    drawn: bool,
    spread: bool,
) -> Plan:
    """The plan, with the factors that masks and scales of latent sites call for.

    With `drawn` some of the model's values are draws of other guides, with `spread` some of the data are
    those of other processes.
    """
    options: dict[str, Any] = {
        "parts": around,
        "stochastic": drawn or _is_subsampled(trace),
        "learns": drawn or bool(_parameters(trace)),
        "spread": spread,
    }
    plan = make_plan(symbolic, max_dense_dim, previous, **options)
    pins = pin_factors(plan, trace) + jacobian_factors(plan, trace)
    if not pins:
        return plan
    pinned = replace(symbolic, factors=[*symbolic.factors, *pins])
    return make_plan(pinned, max_dense_dim, previous, **options)


def _verified(call: Call, symbolic: Symbolic, is_drawn: bool) -> tuple[Symbolic, Values]:
    """The symbolic run after the self-check, and the random point of the check."""
    latents = call.latents
    fresh, found = check_run(call, is_drawn)
    check_batch(fresh, found)
    point = {n: fresh.nodes[n]["value"] for n in latents}
    edge = [n for n, x in latents.items() if x.family in (BETA, DIRICHLET)]
    inner = {n: _nearer(latents[n], point[n], _INSIDE, is_drawn) for n in edge}
    point |= inner
    discrete = enumerated_values(latents)
    if discrete:  # every branch counts, not only the one that this draw took
        check_plates(call, symbolic)
        if shares_dims(latents) or _is_small(latents):
            near = {n: _nearer(x, point[n], _SHRINK[0], is_drawn) for n, x in latents.items()}
            run = call.plain({n: near[n] for n in near if n not in discrete})
            lost = {n for f in symbolic.factors for n in f.forced if n not in discrete}
            held = call.symbolic({n: run.nodes[n]["value"] for n in lost}) if lost else symbolic
            check_branches(held, run, factor_values(run))
        point |= discrete
    if discrete or inner:
        fresh = call.plain(point)
        found = factor_values(fresh)
    return _checked_at(symbolic, call, point, (fresh, found), is_drawn), point


def _checked_at(
    symbolic: Symbolic,
    call: Call,
    point: Values,
    far: tuple[poutine.Trace, Values],
    is_drawn: bool,
) -> Symbolic:
    """The run with all factors opaque that disagree with plain runs at a far and at nearer points.

    Far out a density may overflow or be clamped. So a factor that agrees only nearer to the middle
    passes, if it does so in a symbolic run at another point as well: that tells one that has lost a
    dependence, and whose point was by chance where its density is flat.
    """
    runs, values = [far[0]], [far[1]]
    first = result = checked(symbolic, runs, values)
    nearer = _nearer_runs(call, point, is_drawn)
    while _made_opaque(symbolic, result) and (run := next(nearer, None)) is not None:
        runs.append(run)
        values.append(factor_values(run))
        result = checked(symbolic, runs, values)
    lost = _made_opaque(symbolic, result)
    suspects = _made_opaque(symbolic, first)
    if suspects.keys() - lost.keys():
        again = _run_elsewhere(call, point)
        if again is not None:
            found = _made_opaque(again, checked(again, runs[1:], values[1:]))
            lost |= {n: why for n, why in suspects.items() if n in found}
    return _checked_where_opaque(_lose(symbolic, lost), call, runs, values)


def _nearer_runs(call: Call, point: Values, is_drawn: bool) -> Iterator[poutine.Trace]:
    """Plain runs nearer to the middle of the priors, then to that of each given those before it."""
    for shrink in _SHRINK:
        yield call.plain(
            {n: _nearer(call.latents[n], v, shrink, is_drawn) for n, v in point.items()}
        )
    for shrink in () if enumerated_values(call.latents) else _SHRINK:
        run = middle_run(call, shrink)
        if run is not None:
            yield run


def _run_elsewhere(call: Call, point: Values) -> Symbolic | None:
    """A run on symbols with latents at another point, not too far out; None where the model fails."""
    run = None if enumerated_values(call.latents) else middle_run(call, _ELSEWHERE)
    if run is not None:
        point = {n: run.nodes[n]["value"] for n in call.latents}
    latents = {
        n: x if x.support is not None else replace(x, value=point[n].detach())
        for n, x in call.latents.items()
    }
    try:
        return replace(call, latents=latents).symbolic()
    except Exception:  # far out anything may happen
        return None


def _is_small(latents: Mapping[str, Latent]) -> bool:
    """Whether a run with a state of its own for every element of the discrete sites is cheap."""
    sizes = [x.value.numel() for x in latents.values()]
    states = max(x.value.numel() for x in latents.values() if x.support is not None)
    return states * max(sizes) <= _CHEAP


def _checked_where_opaque(
    symbolic: Symbolic, call: Call, runs: list[poutine.Trace], values: list[Values]
) -> Symbolic:
    """Check what an opaque part hides: with its sites held at the points, all else must agree."""
    hidden = {n for f in symbolic.factors for n in opaque_sites(f.expression)}
    hidden |= {n for f in symbolic.factors for n in f.forced}
    if not hidden:
        return symbolic
    held = [call.symbolic({n: run.nodes[n]["value"] for n in hidden}) for run in runs]
    return checked_pairs(symbolic, held, runs, values)


def _parameters(trace: poutine.Trace) -> dict[str, Tensor]:
    """The unconstrained leaves of the model's pyro.param sites, as SVI finds them."""
    found = {}
    for name, site in trace.nodes.items():
        if site["type"] == "param" and site["value"].requires_grad:
            found[name] = site["value"].unconstrained()
    return found


def _run(call: Call) -> tuple[Symbolic, bool]:
    """The symbolic run; a model that cannot run on symbols (False) is sampled as a whole."""
    try:
        return call.symbolic(), True
    except CVIError:
        raise
    except Exception as error:
        fixed = {n: x.value for n, x in call.latents.items() if x.enum_dim is None}
        try:
            symbolic = call.symbolic(fixed)
        except Exception as again:
            discrete = [n for n, x in call.latents.items() if x.enum_dim is not None]
            if not discrete:
                raise
            raise CVIError(
                f"discrete site '{discrete[0]}'",
                f"the model raised {type(again).__name__} ({first_line(again)}) when all values "
                "of its discrete sites were tried at once",
                "a model that broadcasts over an enumeration dim left of its plates",
                "use torch.where or indexing in place of Python branches, .item() and loops over "
                "a discrete value",
            ) from again
        reason = Reason(f"the model raised {type(error).__name__} on symbolic values")
        factors = [all_opaque(f, symbolic, reason) for f in symbolic.factors]
        return replace(symbolic, factors=factors), False


def _made_opaque(before: Symbolic, after: Symbolic) -> dict[str, Reason]:
    """The factors that a check made opaque, and why."""
    pairs = zip(before.factors, after.factors, strict=True)
    return {b.name: next(iter(b.forced.values()), Reason("")) for a, b in pairs if a is not b}


def _lose(symbolic: Symbolic, lost: Mapping[str, Reason]) -> Symbolic:
    """The run with those factors opaque that failed the self-check before."""
    factors = [
        all_opaque(f, symbolic, lost[f.name]) if f.name in lost else f for f in symbolic.factors
    ]
    return replace(symbolic, factors=factors)


def _nearer(latent: Latent, value: Tensor, share: float, is_drawn: bool) -> Tensor:
    """A point near the middle of the prior, or near where the first run was; of states the same."""
    if latent.enum_dim is not None:
        return value
    return towards(centre(latent.prior) if is_drawn else latent.value.detach(), value, share)


def _is_subsampled(trace: poutine.Trace) -> bool:
    """Whether any factor stands in a plate that holds part of its elements."""
    return any(f.full_size not in (None, f.size) for f in plate_frames(trace))
