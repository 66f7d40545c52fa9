"""Run an ordinary Pyro model on LatentTensors and read its factors: the only reader of traces.

Continuous latents become LatentTensors. Finite discrete latents are enumerated as Pyro does it, along
a dim to the left of all plates, so that `mu[z]` is an ordinary index; their probabilities enter later
as weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    IndependentTransform,
    Transform,
)

from pyro_cvi.algebra.expression import Expression, SiteRef, site_expression
from pyro_cvi.algebra.latent import (
    SCORE_ONLY,
    LatentTensor,
    Recorder,
    expression_of,
    hidden,
    plain,
    recording,
)
from pyro_cvi.algebra.reason import Cause, Reason
from pyro_cvi.densities import constant_law, digest, log_density, sites_inside
from pyro_cvi.errors import CVIError, message
from pyro_cvi.families import (
    BERNOULLI,
    CATEGORICAL,
    GAUSSIAN,
    AbstractFamily,
    Unconstrained,
    family_of,
    has_bijection,
    peel,
)
from pyro_cvi.families.unconstrained import of_one
from pyro_cvi.graph.masked import fill_masked

__all__ = [
    "Call",
    "Factor",
    "Joined",
    "Latent",
    "Symbolic",
    "describe_latents",
    "frames_around",
    "full_size",
    "plain_trace",
    "plates_around",
    "signature",
    "traced",
    "without_false_alarms",
]

Model = Callable[..., Any]
Choose = Callable[[Any], Tensor | None]
"""A value for a site of a run, from the message about it."""
DIAGONAL = "its posterior is to be diagonal, and its messages are sampled"


@dataclass(frozen=True, eq=False)
class Latent:
    """One latent sample site: its posterior family, its shapes and where it stands.

    `batch_shape` has the plates (no enumeration dims). `enum_dim` is the dim (negative) along which a
    discrete site is enumerated, and `support` its values, (K, *event). A site whose prior has no family
    stands for its unconstrained value u: shapes, prior and value are those of u, and x = `transform`(u).
    A site that is `held` keeps its prior for its posterior: `infer={"posterior": "prior"}`. One that is
    `diagonal`, `infer={"posterior": "diagonal"}`, is hidden from the algebra after its own prior. All
    that are `joint`, `infer={"posterior": "joint"}`, share one Gaussian of their unconstrained values.
    `own_support` is that of x where x = T(u), `dtype` that of a discrete site's log density; `prior` is
    None where it is not known (see `Prepared.start`).
    """

    name: str
    family: AbstractFamily
    ref: SiteRef
    batch_shape: tuple[int, ...]
    event_dim: int
    prior: Any
    value: Tensor
    plates: tuple[tuple[str, int, int, int], ...]
    enum_dim: int | None = None
    support: Tensor | None = None
    transform: Any = None
    held: bool = False
    diagonal: bool = False
    joint: bool = False
    own_support: Any = None
    dtype: torch.dtype | None = None

    def constrained(self, value: Tensor) -> Tensor:
        """The site's value in the model, from the one that its posterior is about."""
        return value if self.transform is None else self.transform(value)

    def unconstrained(self, value: Tensor) -> Tensor:
        """The inverse of `constrained`."""
        return value if self.transform is None else self.transform.inv(value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape


@dataclass(frozen=True, eq=False)
class Factor:
    """One log-density term of the joint: log p of a sample site, with its scale and mask as weight.

    `enumerated` lists the discrete sites along whose dims `expression` varies. `forced` maps sites
    whose value left the algebra before this factor to the reason. `plates` names those around it.
    `behind` has the latent sites of each view that the expression reads. One that stands for several
    statements of a loop has these as its `members`, as they were before views.
    """

    name: str
    expression: Expression
    weight: Tensor | float
    enumerated: tuple[str, ...]
    observed: bool
    forced: Mapping[str, Reason] = field(default_factory=dict)
    position: int = 0
    plates: frozenset[str] = frozenset()
    behind: Mapping[str, frozenset[str]] = field(default_factory=dict)
    members: tuple[Factor, ...] = ()


Known = tuple[tuple[Any, ...], Factor]
"""The law of a latent, and the factor that it is."""


@dataclass(frozen=True, eq=False)
class Symbolic:
    """What one symbolic run found: latents and factors in program order, the recorder, and the trace.

    `given` names the plates whose indices came with the model. `priors` are the factors of latents whose
    law is constant, with that law.
    """

    latents: dict[str, Latent]
    factors: list[Factor]
    order: list[str]
    nesting: int
    recorder: Recorder
    trace: poutine.Trace
    given: frozenset[str] = frozenset()
    priors: Mapping[str, Known] = field(default_factory=dict)


class _Prior(Messenger):
    """Replay given values at latent and subsample sites."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        chosen: Mapping[str, Tensor] | None = None,
        *,
        one_state: bool = False,
    ) -> None:
        super().__init__()
        self.values, self.chosen = values, chosen or {}
        self.one_state = one_state
        self.given: set[str] = set()
        self.held: set[str] = set()
        self.changed = False
        self.last: str | None = None

    def _pyro_param(self, msg: Any) -> None:
        value = msg["args"][1] if len(msg["args"]) > 1 else None
        if isinstance(value, torch.nn.Parameter) and not value.requires_grad:
            self.held.add(msg["name"])

    def _pyro_post_param(self, msg: Any) -> None:
        """A parameter that is held stays so: Pyro's store switches the gradient on at first sight."""
        if msg["name"] in self.held:
            msg["args"][1].requires_grad_(False)

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self.last = msg["name"]
        elif msg["value"] is not None:  # plate(..., subsample=indices)
            self.given.add(msg["name"])
            replayed = self.values.get(msg["name"])
            self.changed |= replayed is not None and not _same_indices(replayed, msg["value"])
        elif _fits(self.chosen.get(msg["name"]), msg["fn"]):
            msg["value"], msg["done"] = self.chosen[msg["name"]], True
        if msg["name"] in self.values and (not msg["is_observed"] or site_is_subsample(msg)):
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True
        elif self.one_state and not msg["done"] and not msg["is_observed"]:
            state = _one_state(msg["fn"])
            if state is not None:
                msg["value"], msg["done"] = state, True


def _one_state(fn: Any) -> Tensor | None:
    """A random state of a finite discrete site, one for all its elements, with batch dims of size one.

    Where `phi[z]` would be a matrix of every word by every term, this is one row.
    """
    if not getattr(fn, "has_enumerate_support", False):
        return None
    try:
        support = fn.enumerate_support(expand=False)
    except NotImplementedError:
        return None
    state: Tensor = support[int(torch.randint(len(support), (), device="cpu"))]
    return state


def _same_indices(a: Any, b: Any) -> bool:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return a.shape == b.shape and bool((a == b.to(a.device)).all())


def _fits(chosen: Tensor | None, fn: Any) -> bool:
    """Whether indices are as many as a plate will hold, out of its range."""
    if chosen is None:
        return False
    return bool(len(chosen) == fn.subsample_size and int(chosen.max()) < fn.size)


class _OnRealLine(Messenger):
    """Latent sites without a family are sites of their unconstrained value; the model gets T of it.

    It stands inside of the trace, which records the value before it is transformed. In the same way the
    prior of a site with a diagonal posterior is read, and nothing else is that comes of it.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if is_factor_site(msg) and not msg["is_observed"]:
            joint = msg["infer"].get("posterior") == "joint"
            if has_bijection(msg["fn"], families_too=joint):
                msg["fn"] = Unconstrained(msg["fn"])

    def _pyro_post_sample(self, msg: Any) -> None:
        if is_factor_site(msg) and isinstance(msg["fn"], Unconstrained):
            msg["value"] = msg["fn"].transform(msg["value"])
        if is_factor_site(msg) and msg["infer"].get("posterior") == "diagonal":
            msg["value"] = hidden(msg["value"], DIAGONAL)


class Joined:
    """A model of which some sites are to have one joint posterior, unless they ask for another."""

    def __init__(self, model: Model, sites: frozenset[str]) -> None:
        self.model, self.sites = model, sites

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Joint(self.sites):
            return self.model(*args, **kwargs)


class _Joint(Messenger):
    """Say of some sites that their posterior is to be joint."""

    def __init__(self, sites: frozenset[str]) -> None:
        super().__init__()
        self.sites = sites

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.sites:
            msg["infer"] = {"posterior": "joint", **msg["infer"]}


def traced(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> poutine.Trace:
    """The trace of a run, in which latents without a family stand by their unconstrained values."""
    return poutine.trace(_OnRealLine()(model)).get_trace(*args, **kwargs)


class _Symbols(Messenger):
    """Give every latent a LatentTensor, an enumerated value, or a fixed tensor."""

    def __init__(
        self,
        latents: Mapping[str, Latent],
        fixed: Mapping[str, Tensor],
        recorder: Recorder,
        *,
        enumerate_discrete: bool = True,
    ) -> None:
        super().__init__()
        self.latents, self.fixed, self.recorder = latents, fixed, recorder
        self.enumerate_discrete = enumerate_discrete
        self.forced: dict[str, dict[str, Reason]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["type"] != "sample" or site_is_subsample(msg):
            return
        self.forced[msg["name"]] = {
            site: Reason(
                f"its value was read by {how}() before this factor, {SCORE_ONLY}", Cause.NO_GRADIENT
            )
            for site, how in self.recorder.read.items()
        }
        written = _by_writing(self.recorder.written, "before")
        self.forced[msg["name"]] = {**written, **self.forced[msg["name"]]}
        if msg["is_observed"] or msg["name"] not in self.latents:
            return
        latent = self.latents[msg["name"]]
        if isinstance(msg["fn"], Unconstrained):
            _check_support(msg["name"], msg["fn"])
        if msg["name"] in self.fixed:
            msg["value"] = self.fixed[msg["name"]]
        elif latent.enum_dim is not None and self.enumerate_discrete:
            msg["value"] = _enumerated_value(latent)
        else:
            e = site_expression(latent.ref, latent.value.device)
            msg["value"] = LatentTensor.make(latent.value, e)
        msg["done"] = True


def _check_support(name: str, fn: Unconstrained) -> None:
    sites = sites_inside(fn.transform)
    if sites:
        raise CVIError(
            f"latent site '{name}'",
            f"its support depends on the latent '{min(sites)}'",
            "a support that is the same for all values of other sites",
            "sample on a fixed support and move the value: low + (high - low) * Uniform(0, 1)",
        )


def enumerated_values(latents: Mapping[str, Latent]) -> dict[str, Tensor]:
    """The values at which the discrete sites are enumerated."""
    return {n: _enumerated_value(x) for n, x in latents.items() if x.enum_dim is not None}


def _enumerated_value(latent: Latent) -> Tensor:
    assert latent.support is not None and latent.enum_dim is not None
    k, event = latent.support.shape[0], latent.support.shape[1:]
    return latent.support.reshape(k, *([1] * (-latent.enum_dim - 1)), *event)


def plain_trace(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor] | None = None,
    *,
    one_state: bool = False,
    choose: Choose | None = None,
) -> poutine.Trace:
    """One ordinary run with some site values given; hidden from handlers outside.

    `chosen` are indices for plates that would draw theirs. The trace's `given` names the plates whose
    indices came from the model, and `changed` says that these were not the ones replayed. With
    `one_state` all elements of a finite discrete site share a state, of batch dims of size one. Other
    latents take the value that `choose` finds for their site, or a draw where that is None.
    """
    seen = _Prior(values, chosen, one_state=one_state)
    try:
        with poutine.block(), _Chooser(choose), seen, without_false_alarms():
            trace = traced(model, args, kwargs)
            trace.given, trace.changed = frozenset(seen.given), seen.changed
            return trace
    except Exception as error:
        error.last_site = seen.last  # type: ignore[attr-defined]
        raise


def subsample_values(trace: poutine.Trace) -> dict[str, Tensor]:
    """The indices that the plates of a run drew."""
    return {n: s["value"] for n, s in trace.nodes.items() if _is_subsample(s)}


def _is_subsample(site: Any) -> bool:
    return site["type"] == "sample" and site_is_subsample(site)


def is_factor_site(site: Any) -> bool:
    """Sample sites that contribute a density: not plates' indices, not pyro.deterministic."""
    return (
        site["type"] == "sample"
        and not site_is_subsample(site)
        and not site["infer"].get("_deterministic", False)
    )


def plate_frames(trace: poutine.Trace) -> Iterator[Any]:
    """The plates around every factor of a run; a plate comes once for each of its sites."""
    for site in trace.nodes.values():
        if is_factor_site(site):
            yield from site["cond_indep_stack"]


def frames_around(site: Any) -> list[Any]:
    """The plates around a site that are dims of it."""
    return [f for f in site["cond_indep_stack"] if f.vectorized]


def plates_around(site: Any) -> frozenset[str]:
    """Their names."""
    return frozenset(f.name for f in frames_around(site))


def full_size(frame: Any) -> int:
    """How many elements a plate stands for."""
    return int(frame.size if frame.full_size is None else frame.full_size)


@contextmanager
def without_false_alarms() -> Iterator[None]:
    """Without what torch's Wishart says of proper draws: that it draws again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Singular sample detected", UserWarning)
        yield


def describe_latents(trace: poutine.Trace) -> tuple[dict[str, Latent], int]:
    """The latents of an ordinary run, and the number of dims that plates (or batches) occupy."""
    sites = [s for s in trace.nodes.values() if is_factor_site(s)]
    nesting = max((len(s["fn"].batch_shape) for s in sites), default=0)
    latents = [_describe(s, nesting) for s in sites if not s["is_observed"]]
    return {x.name: x for x in latents}, nesting


def _describe(site: Any, nesting: int) -> Latent:
    name, fn, value = site["name"], site["fn"], site["value"]
    if not isinstance(value, Tensor):
        raise CVIError(
            f"site '{name}'",
            f"its value is a {type(value).__name__}",
            "a tensor",
            "sample it from a pyro.distributions distribution",
        )
    family = GAUSSIAN if isinstance(fn, Unconstrained) else family_of(fn)
    wanted = _wanted_posterior(site, family)
    plates = tuple((f.name, f.dim, f.size, full_size(f)) for f in frames_around(site))
    batch, event_dim = tuple(fn.batch_shape), fn.event_dim
    if getattr(fn, "has_enumerate_support", False):
        support = _finite_support(name, fn)
        value = value.expand(fn.batch_shape + fn.event_shape)
        ref = SiteRef(name, tuple(value.shape), event_dim, "discrete")
        dim = -1 - nesting  # until it is known which sites may share it
        dtype = parameter_dtype(fn) or torch.get_default_dtype()
        return Latent(
            name, CATEGORICAL, ref, batch, event_dim, fn, value, plates, dim, support, dtype=dtype
        )
    if family in (None, CATEGORICAL, BERNOULLI) or not value.dtype.is_floating_point:
        raise CVIError(_no_family(name, fn))
    kind = "real" if family is GAUSSIAN else _kind(fn.support)
    ref = SiteRef(name, tuple(value.shape), event_dim, kind)
    latent = Latent(
        name, family, ref, batch, event_dim, fn, value, plates,
        held=wanted == "prior", diagonal=wanted == "diagonal", joint=wanted == "joint",
    )  # fmt: skip
    if not isinstance(fn, Unconstrained):
        return latent
    return replace(latent, transform=fn.transform, own_support=fn.constrained.support)


def signature(trace: poutine.Trace, latents: Mapping[str, Latent]) -> tuple[Any, ...] | None:
    """What latents are described by, as a symbolic run shows it: two runs that share it share them.

    None where a latent is masked, for what that leaves of it depends on more; where it is new; and where
    its bijection has parameters that are not known. Classes go by their names, so that it can be saved.
    """
    entries: list[Any] = []
    for name, site in trace.nodes.items():
        if not is_factor_site(site):
            continue
        fn, value, mask = site["fn"], site["value"], site["mask"]
        is_latent = not site["is_observed"]
        if is_latent and (name not in latents or (mask is not None and mask is not True)):
            return None
        core = peel(fn.constrained if isinstance(fn, Unconstrained) else fn)
        frames = tuple((f.name, f.dim, f.size, full_size(f)) for f in site["cond_indep_stack"])
        entries.append((name, is_latent, _class_of(fn), _class_of(core), frames))
        entries.append((tuple(fn.batch_shape), tuple(fn.event_shape)))
        if isinstance(value, Tensor):
            entries.append((tuple(value.shape), value.dtype, value.device))
        if is_latent:
            bijection = _key_of(fn.transform) if isinstance(fn, Unconstrained) else ()
            if bijection is None:
                return None
            entries.append((site["infer"].get("posterior"), bijection))
            entries.append(_values_of(name, fn))
    return tuple(entries)


def _class_of(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _key_of(transform: Any) -> tuple[Any, ...] | None:
    """What a bijection is made of; None where that is not known."""
    parts: list[Any] = []
    own: tuple[Any, ...] = ()
    if isinstance(transform, IndependentTransform):
        parts, own = [transform.base_transform], (transform.reinterpreted_batch_ndims,)
    elif isinstance(transform, ComposeTransform):
        parts = transform.parts
    elif isinstance(transform, AffineTransform):
        own = transform.event_dim, digest(transform.loc), digest(transform.scale)
    elif any(not _is_cache(n, v) for n, v in vars(transform).items() if v is not None):
        return None
    inner = [_key_of(part) for part in parts]
    return None if None in inner else (_class_of(transform), *own, *inner)


def _is_cache(name: str, value: Any) -> bool:
    """Whether an attribute of a bijection says nothing of it, as a weak reference to its inverse."""
    return name.startswith("_cache") or (name == "_inv" and not isinstance(value, Transform))


def _values_of(name: str, fn: Any) -> Any:
    """The values a site can take, as far as the algebra asks."""
    if getattr(fn, "has_enumerate_support", False):
        support = _finite_support(name, fn)
        return support.dtype, support.cpu().numpy().tobytes()
    return None if isinstance(fn, Unconstrained) else _kind(fn.support)


def _wanted_posterior(site: Any, family: AbstractFamily | None) -> str | None:
    """What `infer` says of the posterior: that it is the prior (a Normal one), diagonal or joint."""
    wanted: str | None = site["infer"].get("posterior")
    if wanted is None or (wanted in ("diagonal", "joint") and family is GAUSSIAN):
        return wanted
    found, fn = f"infer={{'posterior': {wanted!r}}}", site["fn"]
    core = peel(fn.constrained if isinstance(fn, Unconstrained) else fn)
    if wanted in ("diagonal", "joint"):
        found += f" on a {type(core).__name__}"
        remedy = "leave it out for this site; its scalars have no Gaussian posterior"
    elif wanted != "prior":
        remedy = "leave it out; CVI chooses the posterior's family"
    elif not isinstance(core, torch.distributions.Normal):
        found += f" on a {type(core).__name__}"
        remedy = "sample Normal(0, 1) noise, and make what you need of it"
    elif (site["mask"] is not None and site["mask"] is not True) or _is_masked(fn):
        found += " under a mask"
        remedy = "leave the mask to the sites that are to be fitted"
    else:
        return wanted
    expected = (
        '"prior", on a Normal site without a mask, or "diagonal" or "joint", on one with a Gaussian '
        "posterior"
    )
    raise CVIError(f"latent site '{site['name']}'", found, expected, remedy)


def _is_masked(fn: Any) -> bool:
    while hasattr(fn, "base_dist") and not hasattr(fn, "_mask"):
        fn = fn.base_dist
    return hasattr(fn, "_mask")


def _kind(support: Any) -> str:
    """What the algebra may do with a value of this support."""
    support = of_one(support)
    if support in (constraints.positive, constraints.nonnegative):
        return "positive"
    if isinstance(support, constraints.greater_than | constraints.greater_than_eq):
        return "positive" if bool(torch.as_tensor(support.lower_bound >= 0).all()) else "other"
    if support is constraints.simplex:
        return "simplex"
    if support is constraints.positive_definite:
        return "positive_definite"
    if isinstance(support, constraints.interval):
        low, high = torch.as_tensor(support.lower_bound), torch.as_tensor(support.upper_bound)
        return "unit" if bool((low == 0).all()) and bool((high == 1).all()) else "other"
    return "real" if support is constraints.real else "other"


def _finite_support(name: str, fn: Any) -> Tensor:
    try:
        support = plain(fn.enumerate_support(expand=False))
    except NotImplementedError:
        raise CVIError(_no_family(name, fn)) from None
    k, event = support.shape[0], fn.event_shape
    reduced: Tensor = support.reshape(k, -1, *event)[:, 0]
    return reduced


def _no_family(name: str, fn: Any) -> str:
    core = type(peel(fn)).__name__
    discrete = bool(getattr(fn.support, "is_discrete", False))
    remedy = (
        "marginalise it by hand, bound its support (Categorical), or declare its elements in a plate "
        "rather than by to_event"
        if discrete
        else "write it as a function of a site on the real line, or hold it fixed with poutine.condition"
    )
    if core == "Delta":
        remedy = f"write pyro.deterministic('{name}', ...) for a value that is not random"
    return message(
        f"latent site '{name}'",
        f"a {core} prior, for which there is no posterior family",
        "a discrete distribution with finite support, or a continuous one with a support that torch's "
        "biject_to knows",
        remedy,
    )


class _Chooser(Messenger):
    """Latent sites that have no value yet take the one that a function finds for them."""

    def __init__(self, choose: Choose | None) -> None:
        super().__init__()
        self.choose = choose

    def _pyro_sample(self, msg: Any) -> None:
        is_latent = is_factor_site(msg) and not msg["is_observed"]
        if self.choose is not None and is_latent and not msg["done"]:
            value = self.choose(msg)
            if value is not None:
                msg["value"], msg["done"] = value, True


@dataclass(frozen=True, eq=False)
class Call:
    """One model with its arguments, and what the first run told of its latents and plates."""

    model: Model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    latents: Mapping[str, Latent]
    nesting: int
    subsample: Mapping[str, Tensor]
    depends: Mapping[str, frozenset[str]] | None = None

    def plain(
        self,
        values: Mapping[str, Tensor],
        *,
        one_state: bool = False,
        choose: Choose | None = None,
    ) -> poutine.Trace:
        """An ordinary run on the same minibatch, with some site values given.

        Not validated: draws of a prior may lie on a boundary to rounding.
        """
        given = {**self.subsample, **values}
        with pyro.validation_enabled(False):
            return plain_trace(
                self.model, self.args, self.kwargs, given, one_state=one_state, choose=choose
            )

    def ancestral(self, choose: Callable[[str, Any], Tensor | None]) -> dict[str, Tensor]:
        """Values of the latents, each `choose(name, prior)`, with the prior given those before it.

        Where that is None the value is a draw.
        """
        chooser = _Chooser(
            lambda site: choose(site["name"], site["fn"]) if site["name"] in self.latents else None
        )
        with (
            poutine.block(),
            pyro.validation_enabled(False),
            torch.no_grad(),
            chooser,
            _Prior(self.subsample, one_state=True),
        ):
            trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        return {n: trace.nodes[n]["value"] for n in self.latents}

    def dependence(self, *, one_state: bool) -> dict[str, frozenset[str]]:
        """For each factor the discrete sites it depends on; the continuous ones are held."""
        discrete = {n: x for n, x in self.latents.items() if x.support is not None}
        if one_state:
            discrete = {n: _narrowed(x) for n, x in discrete.items()}
        held = {n: x.value.detach() for n, x in self.latents.items() if x.support is None}
        recorder = Recorder()
        symbols = _Symbols(discrete, {}, recorder, enumerate_discrete=False)
        with (
            poutine.block(),
            pyro.validation_enabled(False),
            recording(recorder),
            _Prior({**self.subsample, **held}),
            symbols,
        ):
            trace = traced(self.model, self.args, self.kwargs)
            found = {}
            for name, site in trace.nodes.items():
                if is_factor_site(site):
                    with recorder.written_in() as inside:
                        read = _sites_of_density(site)
                    found[name] = read | {*symbols.forced.get(name, {}), *inside}
            return found

    def symbolic(
        self,
        fixed: Mapping[str, Tensor] | None = None,
        only: frozenset[str] | None = None,
        chosen: Mapping[str, Tensor] | None = None,
        known: Mapping[str, Known] | None = None,
    ) -> Symbolic:
        """Run the model on symbols; `fixed` latents are constants of the run instead.

        With `only` the factors of these names alone are read. `chosen` are indices for plates that would
        draw theirs. The factors of a latent that are `known` serve again where its law is the same.
        """
        recorder = Recorder()
        symbols = _Symbols(self.latents, fixed or {}, recorder)
        plates = _Prior(self.subsample, chosen)
        with (
            poutine.block(),
            pyro.validation_enabled(False),
            recording(recorder),
            plates,
            symbols,
        ):
            trace = traced(self.model, self.args, self.kwargs)
            factors, priors = [], {}
            for position, (name, site) in enumerate(trace.nodes.items()):
                if not is_factor_site(site) or (only is not None and name not in only):
                    continue
                forced = symbols.forced.get(name, {})
                law = None if forced or fixed or site["is_observed"] else _constant_law(site)
                before = None if known is None else known.get(name)
                if (
                    before is not None
                    and law is not None
                    and _is_known(before, law, position, site)
                ):
                    factor = before[1]
                else:
                    depends = None if self.depends is None else self.depends.get(name)
                    with recorder.written_in() as inside:
                        factor = _factor(site, self.latents, position, forced, fixed or {}, depends)
                    factor = replace(factor, forced={**_by_writing(inside, "in"), **factor.forced})
                if law is not None:
                    priors[name] = law, factor
                factors.append(factor)
        order = [n for n, s in trace.nodes.items() if is_factor_site(s)]
        given = frozenset(plates.given)
        latents = dict(self.latents)
        return Symbolic(latents, factors, order, self.nesting, recorder, trace, given, priors)


def _by_writing(written: Mapping[str, str], when: str) -> dict[str, Reason]:
    """Why the sites that were written into a tensor, where no rule follows them, are not known."""
    return {
        site: Reason(f"it was written into a tensor by {how} {when} this factor")
        for site, how in written.items()
    }


def _constant_law(site: Any) -> tuple[Any, ...] | None:
    """The law of a latent whose prior is a constant, and not masked."""
    unmasked = site["mask"] is None or site["mask"] is True
    return constant_law(site["fn"]) if unmasked else None


def _is_known(before: Known, law: tuple[Any, ...], position: int, site: Any) -> bool:
    known, factor = before
    is_number = not isinstance(site["scale"], Tensor) and not isinstance(factor.weight, Tensor)
    same = is_number and site["scale"] == factor.weight and position == factor.position
    return same and law == known


def _factor(
    site: Any,
    latents: Mapping[str, Latent],
    position: int,
    forced: Mapping[str, Reason],
    fixed: Mapping[str, Tensor],
    depends: frozenset[str] | None,
) -> Factor:
    name, mask = site["name"], site["mask"]
    is_latent = name in latents and not site["is_observed"]
    log_p = _log_density(site, is_latent)
    e = expression_of(log_p)
    weight: Tensor | float = site["scale"]
    if mask is False:
        weight = 0.0
    elif isinstance(mask, Tensor):
        weight = mask.to(plain(log_p).dtype) * weight
    enumerated = tuple(
        n
        for n, latent in latents.items()
        if latent.enum_dim is not None
        and n not in fixed
        and (depends is None or n in depends)
        and (
            (e.ndim >= -latent.enum_dim and e.shape[latent.enum_dim] > 1)
            or (n == name and latent.support is not None and len(latent.support) == 1)
        )
    )
    plates = frozenset(f.name for f in site["cond_indep_stack"])
    return Factor(name, e, weight, enumerated, not is_latent, dict(forced), position, plates)


def _narrowed(latent: Latent) -> Latent:
    """The latent with batch dims of size one."""
    value = latent.value[(slice(0, 1),) * len(latent.batch_shape)]
    return replace(latent, value=value, ref=replace(latent.ref, shape=tuple(value.shape)))


def _sites_of_density(site: Any) -> frozenset[str]:
    return expression_of(_log_density(site, not site["is_observed"])).sites


def _log_density(site: Any, is_latent: bool) -> Any:
    """log p of a site, before scale and mask."""
    fn, value, mask = site["fn"], site["value"], site["mask"]
    if hasattr(fn, "log_factor"):
        return fn.log_factor
    if isinstance(mask, Tensor) and not is_latent:
        value = fill_masked(value, mask, fn)
    if isinstance(value, Tensor) and not isinstance(value, LatentTensor):
        dtype = parameter_dtype(fn)
        if dtype is not None and (is_latent or not value.dtype.is_floating_point):
            value = value.to(dtype)  # counts, labels and enumerated values
    return log_density(fn, value)


def parameter_dtype(fn: Any) -> torch.dtype | None:
    """The floating dtype of a distribution's parameters."""
    core = peel(fn)
    for v in core.__dict__.values():
        if isinstance(v, Tensor) and v.dtype.is_floating_point:
            return v.dtype
    for v in core.__dict__.values():
        if isinstance(v, torch.distributions.Distribution):
            inner = parameter_dtype(v)
            if inner is not None:
                return inner
    return None
