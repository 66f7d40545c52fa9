"""Beside other guides: q(z, r) = q(z | r) q(r), with r the sites of guides that are not CVI's.

    ELBO  =  E_q(r) [ E_q(z) [log p(y, z, r)] + H[q(z)] - log q(r) ]

The others (amortised encoders, flows, point estimates, Pyro's own autoguides) are drawn. Given a draw
the model is one of z alone, which CVI fits as any other; its expectation over z is a differentiable
function of the draw, and so the user's optimiser trains the others, and what the model learns, on the
same bound.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoCallable, AutoGuide, AutoGuideList
from pyro.poutine import runtime
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_cvi.distributed import Shards
from pyro_cvi.errors import CVIError
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.prepared import prepare
from pyro_cvi.graph.symbolic import frames_around, full_size, plates_around
from pyro_cvi.graph.windows import Window
from pyro_cvi.guide import AutoCVI
from pyro_cvi.modes import public_call
from pyro_cvi.prediction import carried
from pyro_cvi.recognition import OnePlate, Recognition, rows_of
from pyro_cvi.sweep import Sweeper

__all__ = ["Draw", "HybridGuide", "Others", "of_elements", "split"]


_ROUNDS, _SETTLED = 50, 1e-6
"""Rounds over several local blocks of CVI, and nats per scalar below which they have settled."""


class HybridGuide(AutoGuideList):
    """An `AutoGuideList` whose parts may open plates of their own.

    One part is an `AutoCVI` of the sites that no other part has; the others are guides of any kind. In
    Pyro's list a part takes its plates from the list, and these have the size of the first minibatch.
    Here a function that opens `pyro.plate("data", ...)` is a part as it is, minibatches may differ in
    size, and the part of CVI follows the plates of the others. Its own sites in these plates (the
    cluster of a row) are drawn from their posterior given what the others have drawn, for any rows.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro import poutine
        >>> from pyro_cvi import CVI, AutoCVI, HybridGuide
        >>> encoder = torch.nn.Linear(2, 2)
        >>> def model(x):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", 100, subsample_size=len(x)):
        ...         z = pyro.sample("z", dist.Normal(mu, 1.0))
        ...         law = dist.Normal(z.unsqueeze(-1), 1.0).expand([len(x), 2])
        ...         pyro.sample("x", law.to_event(1), obs=x)
        >>> def encode(x):
        ...     pyro.module("encoder", encoder)
        ...     loc, scale = encoder(x).unbind(-1)
        ...     with pyro.plate("data", 100, subsample_size=len(x)):
        ...         pyro.sample("z", dist.Normal(loc, scale.exp()))
        >>> guide = HybridGuide(model)
        >>> guide.append(AutoCVI(poutine.block(model, hide=["z"])))
        >>> guide.append(encode)
        >>> cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01}))
        >>> loss = cvi.step(torch.randn(10, 2))
        >>> sorted(guide(torch.randn(7, 2)))
        ['mu', 'z']
    """

    @public_call
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample all parts: those of others first, and CVI's in the same plates."""
        own, _ = split(self)
        outside = _plates_outside()
        with OnePlate() as plates:
            with poutine.trace() as handler, OnePlate():  # parts may share a plate
                _run_others(self, own, args, kwargs)
            result = _values(handler.trace)
            around = _named_rows(self) or _plates_of(handler.trace, own)
            _analyse(self, own, result, plates.seen, args, kwargs)
            _open_plates(self, own, plates.seen)
            if any(around & {n for n, *_ in x.plates} for x in own.plan.latents.values()):
                known = {n: x.detach() for n, x in result.items()}
                if self.model is None:
                    raise CVIError(
                        "HybridGuide",
                        "it was loaded without a model, and draws sites of rows given the others",
                        "the model",
                        "make a CVI(model, guide) first",
                    )
                _check_single(own, outside)
                given = poutine.condition(self.model, data=known)
                own = _settled(own, given, around, args, kwargs, plates.seen)
            result.update(own(*args, **kwargs))
        return result

    def append(self, part: Any) -> None:
        """Add a guide of some of the sites; a function or module that is no autoguide is wrapped."""
        super().append(part if isinstance(part, AutoGuide) else _Part(self.model, part))

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which this guide keeps: Pyro's own method takes it away from both."""
        return {**self.__dict__, "_model": (None,), "master": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridGuide:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new.take(self.model)
        return new

    def take(self, model: Callable[..., Any]) -> None:
        """Have this model, if there is none: it does not travel in a pickle."""
        if self.model is None:
            self._model = (model,)


class _Part(AutoCallable):
    """A function or module as a part, which can be pickled if it can: Pyro's own holds a lambda."""

    def __init__(self, model: Any, guide: Callable[..., Any]) -> None:
        super().__init__(model, guide, _no_median)

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, as Pyro's, and without what Pyro's store ties to parameters."""
        if not isinstance(self._guide, torch.nn.Module):
            _check_pickled(self._guide)
        for p in self.parameters():
            p.__dict__.pop("unconstrained", None)  # a weak reference, made anew by each pyro.param
        return self._state()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        """A function is shared by copies, and need not be one that can be pickled."""
        new: _Part = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self._state(), memo))
        return new

    def _state(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "master": None}


def _no_median(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """A function has none that is known."""
    return {}


def _check_pickled(function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise CVIError(
            "HybridGuide",
            f"a part that cannot be pickled, '{name}' ({e})",
            "a function at the top level of a module, or a torch.nn.Module",
            "move it there, or save the fit by CVI.save, or the guide's state_dict()",
        ) from e


def _plates_outside() -> frozenset[str]:
    """The plates that are open around a call, with a dim of their own."""
    plates = (h for h in runtime._PYRO_STACK if isinstance(h, pyro.plate) and h.dim is not None)
    return frozenset(p.name for p in plates)


def _check_single(own: AutoCVI, outside: frozenset[str]) -> None:
    """Sites of rows have an optimum for each draw of the others: one draw in a call."""
    known = {n for x in own.plan.latents.values() for n, *_ in x.plates}
    if outside - known:
        raise CVIError(
            "HybridGuide",
            f"a call inside of plate '{min(outside - known)}', for many draws at once, where sites "
            "of AutoCVI in the plates of other guides are fitted to each draw",
            "one draw in each call",
            "Predictive(model, guide=guide, num_samples=..., parallel=False)",
        )


def split(guide: Any) -> tuple[AutoCVI, AutoGuideList | None]:
    """The AutoCVI that a guide is, or has for a part; and the list, if it is one."""
    if isinstance(guide, AutoCVI):
        return guide, None
    if not isinstance(guide, AutoGuideList):
        raise CVIError(
            "CVI",
            f"the guide is a {type(guide).__name__}",
            "an AutoCVI, or an AutoGuideList with one for some of the sites",
            "CVI(model, AutoCVI(model)), or a pyro_cvi.HybridGuide to which it and the others are "
            "appended; pyro.infer.SVI serves other guides",
        )
    own = [p for p in guide if isinstance(p, AutoCVI)]
    if len(own) != 1:
        raise CVIError(
            "CVI",
            f"an AutoGuideList with {len(own)} parts that are AutoCVI",
            "one such part, for all sites that no other part has",
            'AutoCVI(poutine.block(model, hide=["names", "of", "the", "others"]))',
        )
    return own[0], guide


class Density(NamedTuple):
    """log q(r) of some sites of the other guides.

    `entropy` is the part of `log_q` whose gradient counts, `score` the log density of sites through
    whose draws none comes.
    """

    log_q: Tensor
    entropy: Tensor
    score: Tensor

    def plus(self, site: Any) -> Density:
        """With a site of a trace more."""
        parts = site["score_parts"]
        for_score, for_entropy = (
            x.sum() if isinstance(x, Tensor) else x
            for x in (parts.score_function, parts.entropy_term)
        )
        return Density(
            self.log_q + site["log_prob_sum"], self.entropy + for_entropy, self.score + for_score
        )


@dataclass(frozen=True)
class Draw:
    """One draw of the other guides.

    `own` is the density of sites in plates that are spread over processes, `common` that of the others.
    `parameters` are unconstrained leaves, of which the `local` are of elements of this process;
    `plates` those of the rows around the sites, and `shared` says that some site is in none. `along`
    are mean parameters of CVI's blocks that the values are functions of, one mapping for each
    `Recognition`.
    """

    values: Mapping[str, Tensor]
    own: Density
    common: Density
    parameters: Mapping[str, Tensor]
    local: frozenset[str]
    indices: Window
    plates: frozenset[str]
    shared: bool
    along: tuple[Mapping[str, tuple[Tensor, ...]], ...]

    def given(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """The model with these sites at these values."""
        given: Callable[..., Any] = poutine.condition(model, data=dict(self.values))
        return given


class Others:
    """The parts of a list that are not CVI's."""

    def __init__(self, guide: AutoGuideList, own: AutoCVI) -> None:
        self._guide, self._own = guide, own

    def draw(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Window, shards: Shards
    ) -> Draw:
        """Sample them, with the elements `chosen` for plates that would draw theirs.

        All processes draw the sites alike that are in no plate that is spread.
        """
        shards.align()
        handler, plates = poutine.trace(), OnePlate()
        with poutine.block(), _Streams(shards), _Chosen(chosen), handler, plates:
            _run_others(self._guide, self._own, args, kwargs)
        trace = handler.trace
        trace.compute_score_parts()
        zero = torch.zeros((), device="cpu")
        own = common = Density(zero, zero, zero)
        values, shared = _values(trace), False
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if name in values and not plates_around(site):
                shared = True
            if shards.hold(plates_around(site)):
                own = own.plus(site)
            else:
                common = common.plus(site)
        leaves = {
            n: s["value"].unconstrained() for n, s in trace.nodes.items() if s["type"] == "param"
        }
        leaves = {n: p for n, p in leaves.items() if p.requires_grad}
        return Draw(
            values, own, common, leaves, of_elements(trace, shards), dict(plates.seen),
            _named_rows(self._guide) or _plates_of(trace, self._own), shared, self._along(),
        )  # fmt: skip

    def _along(self) -> tuple[Mapping[str, tuple[Tensor, ...]], ...]:
        """The mean parameters of CVI's blocks that the last draw is a function of."""
        return tuple(p.shared for p in _recognitions(self._guide) if p.shared)


class _Streams(Messenger):
    """In plates that are spread each process draws with its own numbers, elsewhere with common ones."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self._shards, self._stack = shards, ExitStack()

    def _pyro_sample(self, msg: Any) -> None:
        if self._shards.hold(plates_around(msg) | {msg["name"]}):
            self._stack.enter_context(self._shards.own_randomness())

    def _pyro_post_sample(self, msg: Any) -> None:
        self._stack.close()


def of_elements(trace: Any, shards: Shards) -> frozenset[str]:
    """The parameters of elements of a spread plate: those that are read inside, with an event_dim."""
    return frozenset(
        n
        for n, s in trace.nodes.items()
        if s["type"] == "param"
        and s["kwargs"].get("event_dim") is not None
        and shards.hold(plates_around(s))
    )


def _values(trace: Any) -> dict[str, Tensor]:
    """What a run of guides has sampled, without what only helped to sample it."""
    return {
        name: site["value"]
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and not site_is_subsample(site)
        and not site["is_observed"]
        and not site["infer"].get("is_auxiliary", False)
    }


def _recognitions(guide: AutoGuideList) -> list[Recognition]:
    parts = [p._guide for p in guide if isinstance(p, AutoCallable)]
    return [p for p in parts if isinstance(p, Recognition)]


def _named_rows(guide: AutoGuideList) -> frozenset[str]:
    """The plates of rows that some `Recognition` names."""
    return frozenset().union(*(p.rows for p in _recognitions(guide)))


def _plates_of(trace: Any, own: AutoCVI) -> frozenset[str]:
    """The plates of the rows around what a run of guides has sampled."""
    sites = (trace.nodes[n] for n in _values(trace))
    plates = {f.name: (f.size, full_size(f)) for s in sites for f in frames_around(s)}
    return rows_of(plates, {} if own.prepared is None else own.prepared.sizes)


@torch.enable_grad()
def _settled(
    own: AutoCVI, given: Callable[..., Any], around: frozenset[str],
    args: tuple[Any, ...], kwargs: dict[str, Any], indices: Window,
) -> AutoCVI:  # fmt: skip
    """CVI's part with the sites in these plates at their optimum given a draw of the others.

    The others keep the fitted posterior; `own` itself is not touched.
    """
    new = AutoCVI(given, max_dense_dim=own.max_dense_dim)
    with poutine.block():
        prepared = prepare(given, args, kwargs, own.max_dense_dim, chosen=dict(indices), beside={})
    plan = prepared.plan
    new.adopt(prepared, {})
    evaluator, sweeper = Evaluator(plan, new.beliefs()), Sweeper("stochastic", 1.0, 0.7)
    sweeper.beside = around
    local = [b for b in plan.blocks if sweeper.is_local(plan, b)]
    noisy = plan.noisy() & {b.name for b in local}
    if noisy:
        raise CVIError(
            f"latent site '{min(noisy)}'",
            "given the other guides its message can only be sampled",
            "sites of AutoCVI with exact messages or quadrature in the plates of other guides",
            "leave this site to another guide",
        )
    for block in plan.blocks:
        if block not in local:
            evaluator.set(block.name, carried(own, block))
    sweeper.settle(evaluator, rounds=_ROUNDS, settled=_SETTLED)
    for block in plan.blocks:
        new.set_belief(block, evaluator.beliefs[block.name])
    new._update_master(own.master)
    return new


class _Chosen(Messenger):
    """Plates that would draw their elements take these, if there are as many."""

    def __init__(self, chosen: Window) -> None:
        super().__init__()
        self._chosen = chosen

    def _pyro_sample(self, msg: Any) -> None:
        wanted = self._chosen.get(msg["name"]) if site_is_subsample(msg) else None
        if wanted is not None and msg["value"] is None and len(wanted) == msg["fn"].subsample_size:
            msg["value"], msg["done"] = wanted, True


def _run_others(
    guide: AutoGuideList, own: AutoCVI, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run the other parts, in the plates of the list where they take them from there."""
    if guide.prototype_trace is None:
        guide._setup_prototype(*args, **kwargs)
    parts = [p for p in guide if p is not own]
    guide.plates = {}
    if not isinstance(guide, HybridGuide) and any(isinstance(p, AutoCallable) for p in parts):
        guide._create_plates(*args, **kwargs)
    for part in parts:
        if isinstance(part, AutoGuide) and not isinstance(part, AutoCallable):
            if part.prototype_trace is None:
                part._setup_prototype(*args, **kwargs)
            for name, frame in part._prototype_frames.items():
                if name not in guide.plates:
                    full = frame.full_size or frame.size
                    guide.plates[name] = pyro.plate(
                        name, full, dim=frame.dim, subsample_size=frame.size
                    )
        part(*args, **kwargs)


@torch.enable_grad()
def _analyse(
    guide: AutoGuideList,
    own: AutoCVI,
    drawn: Mapping[str, Tensor],
    seen: Window,
    args: Any,
    kwargs: Any,
) -> None:
    """The first sight of the model, given a draw of the others, as a step has it."""
    if own.prepared is None:
        model = own.model if guide.model is None else guide.model
        given = poutine.condition(model, data={n: x.detach() for n, x in drawn.items()})
        with poutine.block():
            own.prepare(given, args, kwargs, dict(seen), beside={})


def _open_plates(guide: AutoGuideList, own: AutoCVI, seen: Mapping[str, Tensor]) -> None:
    """The plates of CVI's own sites, with the elements that the others have."""
    for latent in own.plan.whole.latents.values():
        for name, dim, size, full in latent.plates:
            if name not in guide.plates:
                index = seen.get(name)
                window = own.plan.block_of(latent.name).placement
                n = next((p.size for p in window.parts if p.name == name), size) if window else size
                options = {"subsample_size": n} if index is None else {"subsample": index}
                guide.plates[name] = pyro.plate(name, full, dim=dim, **options)
