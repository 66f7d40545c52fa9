"""AutoCVI: the posterior as a Pyro autoguide. It holds the blocks; `CVI` moves them."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_cvi.errors import CVIError, message
from pyro_cvi.families import log_jacobian
from pyro_cvi.graph.blocks import Form
from pyro_cvi.graph.chain import Chain
from pyro_cvi.graph.initial import initial_belief, located_points
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.pointed import MOST_SCALARS
from pyro_cvi.graph.prepared import Prepared, prepare
from pyro_cvi.graph.process import Process
from pyro_cvi.graph.sampling import draw, scatter
from pyro_cvi.graph.symbolic import Latent, plain_trace, subsample_values
from pyro_cvi.graph.validation import check_model
from pyro_cvi.graph.windows import Part, Window, whole_latent
from pyro_cvi.laws import (
    StructuredLaw,
    as_belief,
    draw_chain,
    joint,
    marginal,
    median,
    quantile,
)
from pyro_cvi.linalg import broadcast_shapes
from pyro_cvi.modes import public_call
from pyro_cvi.structured import ChainBelief, ProcessBelief, StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["AutoCVI"]

_SEPARATOR = ":"
_FRESH: dict[str, Any] = {"master": None, "plates": {}, "_beliefs": {}}
"""What a copy of a guide does not take over."""
_JOINT = "joint:sites"
"""The buffer that names the sites of the joint block, for a guide that is loaded before it sees data."""
_SHARED = {"_model", "_prepared", "prototype_trace", "init_loc_fn", "create_plates"}
"""What a deep copy shares with the original: functions, and analyses that never change."""


class AutoCVI(AutoGuide):
    """q(z) = prod_blocks q_b(z_b): the posterior that `CVI` fits, as an autoguide.

    Gaussian sites that meet in a factor share one block with full covariance; Gamma, Beta, Dirichlet
    and finite discrete sites have a block each. The guide can be called, used in `Predictive`, asked
    for `median` and `quantiles`, saved and loaded, like Pyro's own autoguides.

    Arguments:
        model: a Pyro model.
        max_dense_dim: largest number of scalars of Gaussian sites that share one dense covariance.
        max_joint_dim: largest number of scalars of sites that share one Gaussian of their unconstrained
            values: of those in factors that can only be averaged over points, and of blocks that meet,
            where `CVI.run` finds a higher bound for it. 0 keeps all sites in blocks of their own.
        init_loc_fn: where sites start, as in Pyro's autoguides; near the prior by default. A site
            starts narrow around its point. Of discrete sites only those that the function means:
            the ones that `init_to_value` names, and all of a function of your own.
        create_plates: as in Pyro's autoguides.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import CVI, AutoCVI
        >>> def model(x):
        ...     p = pyro.sample("p", dist.Beta(10.0, 10.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("x", dist.Bernoulli(p), obs=x)
        >>> guide = AutoCVI(model)
        >>> _ = CVI(model, guide).step(torch.tensor([1.0] * 6 + [0.0] * 4))
        >>> q = guide.posterior("p")
        >>> float(q.concentration1), float(q.concentration0)
        (16.0, 14.0)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        max_dense_dim: int = 1000,
        max_joint_dim: int = MOST_SCALARS,
        init_loc_fn: Callable[..., Any] | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(max_dense_dim, int) or max_dense_dim < 1:
            raise CVIError(f"max_dense_dim is {max_dense_dim!r}; expected a positive integer")
        check_model(model)
        super().__init__(model, create_plates=create_plates)
        if not isinstance(max_joint_dim, int) or max_joint_dim < 0:
            raise CVIError(
                f"max_joint_dim is {max_joint_dim!r}; expected zero or a positive integer"
            )
        self.max_dense_dim, self.max_joint_dim = max_dense_dim, max_joint_dim
        self.init_loc_fn = init_loc_fn
        self._model: tuple[Callable[..., Any] | None]  # set by AutoGuide
        self._prepared: Prepared | None = None
        self._fitted = False
        self._start: dict[str, Tensor] = {}
        self._beliefs: dict[str, tuple[Belief, list[tuple[Tensor, int]]]] = {}

    # --- copies and pickles ------------------------------------------------------------------------

    @property
    def model(self) -> Callable[..., Any]:
        """The model; a guide that was unpickled gets it back from the first CVI it is given to."""
        if self._model[0] is None:
            raise CVIError(
                "AutoCVI",
                "a guide that was unpickled does not hold its model",
                "the model beside it",
                "CVI(model, guide).step(*args) goes on fitting; posterior, median, quantiles and "
                "sampling work as they are",
            )
        model: Callable[..., Any] = self._model[0]
        return model

    def __getstate__(self) -> dict[str, Any]:
        """The posterior, and of the model what sampling needs; this guide itself is not touched."""
        kept = None if self._prepared is None else _without_model(self._prepared)
        state = {**self.__dict__, **_FRESH, "_model": (None,), "_prepared": kept}
        if kept is not None:
            state |= {"prototype_trace": kept.trace, "init_loc_fn": None}
        return state

    def without_model(self) -> AutoCVI:
        """A copy of the posterior that holds neither model nor data: what a pickle would give back."""
        new = type(self).__new__(type(self))
        for name, value in self.__getstate__().items():
            new.__dict__[name] = value if name in _SHARED else copy.deepcopy(value)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoCVI:
        """A guide with its own copy of the posterior, over the same model.

        The model is not the guide's own and is shared, unless the same call has copied it already:
        then the copies belong together.
        """
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        model = self._model[0]
        for name, value in {**self.__dict__, **_FRESH}.items():
            new.__dict__[name] = value if name in _SHARED else copy.deepcopy(value, memo)
        new.__dict__["_model"] = (memo.get(id(model), model),)
        return new

    def saved(self) -> dict[str, Any]:
        """The posterior and what asking it needs; `resume` takes it into a guide of the same model."""
        known = None if self._prepared is None else _without_model(self._prepared)
        return {
            "buffers": dict(self.state_dict()),
            "prepared": known,
            "frames": dict(self._prototype_frames),
            "start": self._start,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Be the guide that was `saved`, before any data is seen."""
        prepared = saved["prepared"]
        self._prepared, self._prototype_frames = prepared, dict(saved["frames"])
        self._start = saved["start"]
        self.prototype_trace = None if prepared is None else prepared.trace
        self._buffers.clear()
        for name, value in saved["buffers"].items():
            self.register_buffer(name, value.clone())
        self._beliefs.clear()
        self._fitted = prepared is not None

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A guide that has not seen data takes its buffers from the state dict."""
        if self._prepared is None:
            for key, value in state_dict.items():
                name = key.removeprefix(prefix)
                if key.startswith(prefix) and _SEPARATOR in name and "." not in name:
                    self._buffers[name] = torch.empty_like(value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._fitted = self._fitted or self._prepared is not None

    # --- state -------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the last model and data this guide was fitted to."""
        return self._need("its plan").plan

    def _need(self, what: str) -> Prepared:
        if self._prepared is None:
            raise CVIError(
                "AutoCVI",
                f"{what} was asked for before the guide has seen data",
                "one call of CVI.step, CVI.run or the guide first",
                "cvi.step(*args) before this",
            )
        return self._prepared

    @public_call
    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        if self._prepared is None:
            with torch.enable_grad():
                self.prepare(self.model, args, kwargs)

    def prepare(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chosen: Window | None = None,
        *,
        unchanged: bool = False,
        fitting: bool = True,
        beside: Mapping[str, Tensor] | None = None,
        spread: frozenset[str] = frozenset(),
    ) -> Prepared:
        """Analyse `model` on its arguments, or find that the last analysis still holds.

        `chosen` are the elements for subsampled plates that would draw theirs. With `unchanged` the
        caller vouches for model and arguments. Without `fitting` the posterior has to stay what it is.
        `beside` are the parameters of other guides, of whose sites `model` has draws; `spread` the
        plates of which other processes have other elements.
        """
        old = self._prepared
        fixed = old is not None and not old.plan.learns and not old.plan.stochastic
        if old is not None and unchanged and fixed:
            return old
        if old is not None and old.still_holds(model, args, kwargs):
            return old
        new = prepare(
            model,
            args,
            kwargs,
            self.max_dense_dim,
            old,
            chosen=chosen,
            beside=beside,
            spread=spread,
            joint=joint_of(self._buffers.get(_JOINT)),
            max_joint_dim=self.max_joint_dim,
            init_loc_fn=self.init_loc_fn if old is None else None,
        )
        if old is None:
            self._adopt(new, model, args, kwargs)
        else:
            self._follow(new, fitting)
        if self._model[0] is None and beside is None:
            self._model = (model,)
        self._prepared = new
        return new

    def _adopt(
        self,
        new: Prepared,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """First sight of the model: prototype, frames, and starting beliefs unless some were loaded."""
        if self.master is not None:
            self._check_part(new)
        latents = new.plan.latents
        if self.init_loc_fn is not None:
            self._start = located_points(latents, self.init_loc_fn, model, args, kwargs)
        if self._buffers:
            self._check_loaded(self._starting_buffers(new))
            for block in new.plan.blocks:
                form = block.form
                if form is not None and int(self._buffers[_mark_name(block)]) != mark_of(form):
                    raise _other_data(block)
            self._fitted = True
        else:
            self._begin(new)
        self.prototype_trace = new.trace
        self._prototype_frames = {
            frame.name: frame
            for name in latents
            for frame in new.trace.nodes[name]["cond_indep_stack"]
            if frame.vectorized  # latents of a sequential plate are sites of their own
        }

    def _follow(self, new: Prepared, fitting: bool) -> None:
        """Of other data a process has other predictors: its pseudo-observations start anew.

        Where only its prior has changed, by parameters that were learnt, they stay and the mean follows.
        """
        for block in new.plan.blocks:
            if block.form is None or self._is_as_before(block):
                continue
            if not fitting:
                raise _other_data(block)
            names = _buffer_names(block)
            fresh = new.start(block, self._start).tensors
            kept = dict(zip(names, fresh, strict=True))
            if isinstance(block.form, Process) and _same_shape(
                self._buffers.get(names[0]), fresh[0]
            ):
                kept[names[0]] = self._buffers[names[0]]
            stem = names[0].removesuffix("loc")
            for n in [n for n in self._buffers if n.startswith(stem)]:
                del self._buffers[n]
            kept[_mark_name(block)] = torch.tensor(mark_of(block.form), device="cpu")
            for n, tensor in kept.items():
                self.register_buffer(n, tensor.detach().clone().contiguous())

    def _is_as_before(self, block: Block) -> bool:
        """Whether a block has the form that it had; a process adapts to another prior."""
        before = None if self._prepared is None else self._prepared.plan
        old = next((b for b in before.blocks if b.name == block.name), None) if before else None
        if old is None:
            return False
        if isinstance(old.form, Chain) and isinstance(block.form, Chain):
            return mark_of(old.form) == mark_of(block.form)
        if not isinstance(old.form, Process) or not isinstance(block.form, Process):
            return False
        was, now = old.form.predictors, block.form.predictors
        same = [was.design, was.open, was.closed]
        others = [now.design, now.open, now.closed]
        if any(
            a.shape != b.shape or not torch.equal(a, b) for a, b in zip(same, others, strict=True)
        ):
            return False
        if (was.widths, was.counts) != (now.widths, now.counts):
            return False
        known = [was.prior_loc, was.prior_tril]
        if all(
            torch.equal(a, b) for a, b in zip(known, [now.prior_loc, now.prior_tril], strict=True)
        ):
            return True
        belief = self.belief(old)
        assert isinstance(belief, ProcessBelief)
        with torch.no_grad():
            moved = belief.on(now)
        for name, tensor in zip(_buffer_names(block), moved.tensors, strict=True):
            self.register_buffer(name, tensor.detach().clone().contiguous())
        return True

    def _begin(self, new: Prepared) -> None:
        for name, tensor in self._starting_buffers(new).items():
            self.register_buffer(name, tensor.detach().clone().contiguous())

    def _starting_buffers(self, new: Prepared, *, again: bool = False) -> dict[str, Tensor]:
        """The tensors of all blocks at the start; at another one, if they start again."""
        buffers: dict[str, Tensor] = {}
        if new.joint:
            buffers[_JOINT] = mark_of_joint(new.joint)
        plan, moved = new.beginning(self._start, again=again)
        for block in plan.blocks:
            tensors = initial_belief(plan, block, self._start, moved).tensors
            if block.placement is not None:
                tensors = block.placement.spread(tensors)
                if block.moves:
                    buffers[_seen_name(block)] = _none_seen(block)
            buffers |= dict(zip(_buffer_names(block), tensors, strict=True))
            if block.form is not None:
                buffers[_mark_name(block)] = torch.tensor(mark_of(block.form), device="cpu")
        return buffers

    @contextmanager
    def undone_on_error(self, *, always: bool = False) -> Iterator[None]:
        """Restore what this guide knew of its model if the block fails (or in any case).

        A guide that had not seen data before the block has not seen any after it.
        """
        kept, fresh, buffers = self._prepared, not self._buffers, dict(self._buffers)
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed or always:
                if kept is None:
                    self.prototype_trace, self._prototype_frames = None, {}
                    self._beliefs.clear()
                    if fresh:
                        self._buffers.clear()
                else:
                    self._buffers.clear()
                    self._buffers.update(buffers)
                self._prepared = kept

    def _check_part(self, new: Prepared) -> None:
        """In an AutoGuideList: the sites are those of the whole model."""
        whole = self.master().prototype_trace
        for name, latent in new.plan.latents.items():
            found = (
                tuple(whole.nodes[name]["value"].shape) if name in whole.nodes else "no such site"
            )
            if found != latent.shape:
                raise CVIError(
                    f"latent site '{name}'",
                    f"shape {latent.shape} in this part of the AutoGuideList, {found} in its model",
                    "parts of one model",
                    "AutoCVI(poutine.block(model, expose=[...])) with the model of the list",
                )

    def _check_loaded(self, buffers: Mapping[str, Tensor]) -> None:
        loaded = {n: tuple(t.shape) for n, t in self._buffers.items()}
        wanted = {n: tuple(t.shape) for n, t in buffers.items()}
        if loaded != wanted:
            raise CVIError(
                "AutoCVI",
                f"the state that was loaded holds {loaded}",
                f"{wanted}, which is the posterior of this model",
                "load it into a guide of the same model, max_dense_dim and size of data",
            )

    @property
    def prepared(self) -> Prepared | None:
        """The last analysis of the model, if it has seen data."""
        return self._prepared

    def adopt(self, prepared: Prepared, frames: Mapping[str, Any]) -> None:
        """Take an analysis made elsewhere; `frames` are the plates with all their elements."""
        if self._prepared is None:
            self._begin(prepared)
            self.prototype_trace = prepared.trace
            used = {name for x in prepared.plan.latents.values() for name, *_ in x.plates}
            self._prototype_frames = {n: f for n, f in frames.items() if n in used}
        self._prepared = prepared

    @public_call
    def draw(self, sites: Sequence[str]) -> dict[str, Tensor]:
        """One draw from the posterior of some sites, jointly within each block."""
        result: dict[str, Tensor] = {}
        for block in dict.fromkeys(self.block_of(s) for s in sites):
            belief = self.belief(block)
            if block.layout is not None:
                result |= scatter(block, draw(block, belief))
            elif block.is_chain:
                latents = {s: self._whole.latents[s] for s in block.sites}
                with poutine.block():
                    result |= _chain_draw(_Drawn(block, latents, belief, {}))
            else:
                result[block.sites[0]] = self.posterior(block.sites[0]).sample()
        latents = self._whole.latents
        return {s: latents[s].constrained(result[s].to(latents[s].value.dtype)) for s in sites}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the posterior, for `restore`."""
        return {n: t.clone() for n, t in self._buffers.items() if t is not None}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Go back to the posterior of a snapshot."""
        with torch.no_grad():
            for name, tensor in snapshot.items():
                self._buffers[name].copy_(tensor)
        self._fitted = True

    def reset(self) -> None:
        """Back to a start, another one for every block, but for sites that `init_loc_fn` placed."""
        prepared = self._need("reset")
        with torch.no_grad():
            for name, tensor in self._starting_buffers(prepared, again=True).items():
                self._buffers[name].copy_(tensor)
        self._fitted = False

    @property
    def state(self) -> dict[str, Tensor]:
        """The posterior's buffers themselves."""
        return {n: t for n, t in self._buffers.items() if t is not None}

    def kept(self) -> dict[str, Any]:
        """All that `back_to` needs to undo `rejoin` and what follows it."""
        names = ("_prepared", "prototype_trace", "_prototype_frames", "_fitted")
        return {"buffers": self.snapshot(), **{n: getattr(self, n) for n in names}}

    def back_to(self, kept: Mapping[str, Any]) -> None:
        """Be what `kept` says again."""
        self._buffers.clear()
        self._beliefs.clear()
        for name, value in kept.items():
            if name == "buffers":
                self._buffers.update(value)
            else:
                setattr(self, name, value)

    def rejoin(self, prepared: Prepared) -> None:
        """Take an analysis with other blocks; the posterior begins where that says."""
        self._buffers.clear()
        self._beliefs.clear()
        self._begin(prepared)
        self.prototype_trace, self._prepared = prepared.trace, prepared
        self._fitted = True

    def replan(self, plan: Plan) -> None:
        """Go on with a plan of the same blocks."""
        self._prepared = replace(self._need("its plan"), plan=plan)

    @property
    def located(self) -> frozenset[str]:
        """The sites that `init_loc_fn` placed."""
        return frozenset(self._start)

    @property
    def is_fitted(self) -> bool:
        """Whether the posterior has been moved, or loaded."""
        loaded = self._prepared is None and bool(self._buffers)
        return self._fitted or loaded

    @property
    def _whole(self) -> Plan:
        """The plan's latents and blocks, with all elements of the subsampled plates."""
        return self.plan.whole

    def _buffers_of(self, block: Block) -> tuple[Tensor, ...]:
        return tuple(self._buffers[n] for n in _buffer_names(block))

    def belief(self, block: Block) -> Belief:
        """The belief held in the block's buffers, with what was derived from it."""
        tensors = self._buffers_of(block)
        known = self._beliefs.get(block.name)
        if known is not None and _is_unchanged(known[1], tensors) and _is_of(known[0], block):
            return known[0]
        belief = as_belief(block, tuple(t.detach().clone() for t in tensors))
        self._beliefs[block.name] = (belief, [(t, t._version) for t in tensors])
        return belief

    def set_belief(self, block: Block, belief: Belief) -> None:
        """Write a belief into the block's buffers, in place; of a local block, that of the window."""
        if block.held:
            return
        tensors = self._buffers_of(block)
        self._fitted = True
        if block.placement is not None:
            window = self._need("its posterior").window
            with torch.no_grad():
                block.placement.put(tensors, belief.tensors, window)
                self._buffers[_seen_name(block)][_elements(block, window)] = True
            return
        with torch.no_grad():
            for buffer, value in zip(tensors, belief.tensors, strict=True):
                buffer.copy_(value)
        self._beliefs[block.name] = (belief, [(t, t._version) for t in tensors])

    def beliefs(self) -> dict[str, Belief]:
        """All blocks' beliefs by name; of local blocks, for the elements of the present window."""
        return {
            b.name: self.belief(b) if b.placement is None else self._windowed(b)
            for b in self.plan.blocks
        }

    def has_unseen(self) -> bool:
        """Whether the present minibatch holds elements that none before it held."""
        window = self._need("its posterior").window
        return any(
            not bool(self._buffers[_seen_name(b)][_elements(b, window)].all())
            for b in self.plan.blocks
            if b.placement is not None and b.moves
        )

    def _windowed(self, block: Block) -> Belief:
        """The belief about the window's elements; those never seen start as all did."""
        place, window = block.placement, self._need("its posterior").window
        assert place is not None
        kept = place.take(self._buffers_of(block), window)
        if not block.moves:
            return as_belief(block, kept)
        here = self._buffers[_seen_name(block)][_elements(block, window)]
        if not bool(here.all()):
            prepared = self._need("its posterior")
            latents = prepared.plan.latents
            start = {s: x for s, x in self._start.items() if x.shape == latents[s].value.shape}
            new = prepared.start(block, start).tensors
            new = tuple(n.to(k.dtype) for n, k in zip(new, kept, strict=True))
            kept = place.fresh(new, kept, here)
        return as_belief(block, kept)

    # --- the posterior -----------------------------------------------------------------------------

    @public_call
    def posterior(self, site: str) -> Any:
        """q(z) of one site, a Pyro distribution in the model's space.

        Batch and event shape are those of the site in the model (`to_event` dims included). A dense
        Gaussian site that is a vector comes with its full covariance; one of higher rank, or one in a
        plate, gives its marginals.
        """
        return marginal(*self._entry(site))

    def _entry(self, site: str) -> tuple[Latent, Block, Belief]:
        """A site, its block, and what is believed about it."""
        block = self.block_of(site)
        if block.placement is not None and block.moves:
            self._warn_unseen(site, block, self._buffers[_seen_name(block)])
        return self._whole.latents[site], block, self.belief(block)

    def _warn_unseen(self, site: str, block: Block, seen: Tensor) -> None:
        """Elements that no minibatch has held are at the start of a fit."""
        missing = int((~seen).sum())
        if missing:
            assert block.placement is not None
            plates = ", ".join(f"'{p.name}'" for p in block.placement.parts)
            warnings.warn(
                message(
                    f"latent site '{site}'",
                    f"{missing} of {seen.numel()} elements of plate {plates} have been in no minibatch "
                    "yet: what is said of these is the start, and not a posterior",
                    "steps over all elements that are asked for",
                    "go on with minibatches, or ask CVI.local_posteriors for the elements",
                ),
                stacklevel=4,
            )

    @public_call
    def joint(self, sites: Sequence[str]) -> Any:
        """The joint Gaussian of sites of one block, flattened and concatenated in this order.

        In a plated block, elements are independent of each other.
        """
        names = [sites] if isinstance(sites, str) else list(sites)
        blocks = list(dict.fromkeys(self.block_of(s).name for s in names))
        block = self.block_of(names[0]) if names else None
        if block is None or block.layout is None or len(blocks) != 1:
            kinds = {s: self.block_of(s).structure for s in names}
            raise CVIError(
                f"joint({names!r})",
                f"these sites have the structures {kinds} in {len(blocks)} blocks",
                "sites of one Gaussian block",
                "ask for each site's own marginal with posterior(name); explain() lists the blocks",
            )
        if len(set(names)) != len(names):
            raise CVIError(f"joint({names!r}): a site is named twice; name each once")
        belief = self.belief(block)
        assert isinstance(belief, GaussianBelief | StructuredBelief)
        return joint(block, belief, names)

    def block_of(self, site: str) -> Block:
        """The posterior block that a site is in."""
        plan = self._need(f"the posterior of '{site}'").plan.whole
        if site not in plan.latents:
            raise CVIError(
                f"site '{site}'",
                "no such latent",
                f"one of {sorted(plan.latents)}",
                "check the name in the model's pyro.sample statements",
            )
        return plan.block_of(site)

    @public_call
    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The marginal median of every latent.

        Of a discrete site the most probable value, of a Wishart matrix the mean; of a vector or matrix
        that is transformed as a whole (simplex, correlation matrix), the transform of the median.
        """
        plan = self._need("median").plan.whole
        return {n: median(*self._entry(n)) for n in plan.latents}

    @public_call
    @torch.no_grad()
    def quantiles(
        self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Marginal quantiles of every latent, with a leading quantile dim.

        Those of a discrete site follow the order of its support. Of vectors and matrices that are
        transformed as a whole (simplexes, correlation matrices) they are those of 10,000 draws.
        """
        plan = self._need("quantiles").plan.whole
        wanted = [float(q) for q in quantiles]
        if not all(0 <= q <= 1 for q in wanted):
            raise CVIError(f"quantiles({wanted}): expected probabilities between 0 and 1")
        return {
            n: torch.stack([quantile(*self._entry(n), q) for q in wanted]) for n in plan.latents
        }

    # --- sampling ----------------------------------------------------------------------------------

    @public_call
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent, inside its plates; called through `guide(...)`."""
        if self._prepared is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._plates_now(args, kwargs)
        result: dict[str, Tensor] = {}
        for whole in self._whole.blocks:
            block, belief = whole, self.belief(whole)
            latents = {s: self._whole.latents[s] for s in block.sites}
            if block.placement is not None:
                window = {p.name: _indices(plates[p.name], p) for p in block.placement.parts}
                if block.moves:
                    here = self._buffers[_seen_name(block)][_elements(block, window)]
                    self._warn_unseen(block.sites[0], block, here)
                sizes = {n: len(index) for n, index in window.items()}
                belief = as_belief(block, block.placement.take(belief.tensors, window))
                block = block.sized(sizes)
                latents = {s: _resized(x, sizes) for s, x in latents.items()}
            drawn = _Drawn(block, latents, belief, plates)
            if block.layout is not None:
                result.update(self._sample_gaussian(drawn))
            elif block.is_chain:
                result.update(_chain_draw(drawn))
            else:
                (site,) = block.sites
                law = marginal(latents[site], block, belief)
                result[site] = drawn.in_plates(site, law)
        return {n: result[n] for n in self._whole.latents}

    def _plates_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The guide's plates, with the elements that the model names itself (`subsample=indices`).

        Pyro lets a guide's indices silently replace those of the model; here they agree, or it is an
        error.
        """
        prepared = self._need("a sample")
        given = [n for n in prepared.given if n in prepared.parts]
        if not given or self._model[0] is None:
            plates: dict[str, Any] = self._create_plates(*args, **kwargs)
            return plates
        with torch.no_grad(), poutine.block():
            trace = plain_trace(self._model[0], args, kwargs, {}, one_state=True)
        indices = {n: x for n, x in subsample_values(trace).items() if n in given}
        if self.__dict__["create_plates"] is not None or self.master is not None:
            plates = self._create_plates(*args, **kwargs)
            for name, index in indices.items():
                if name in plates:
                    _check_indices(name, plates[name], index)
            return plates
        parts = prepared.parts
        own = [
            pyro.plate(n, parts[n].full, subsample=x, dim=parts[n].dim) for n, x in indices.items()
        ]
        self.__dict__["create_plates"] = lambda *args, **kwargs: own
        try:
            plates = self._create_plates(*args, **kwargs)
        finally:
            self.__dict__["create_plates"] = None
        return plates

    def _sample_gaussian(self, drawn: _Drawn) -> dict[str, Tensor]:
        block, belief, layout = drawn.block, drawn.belief, drawn.block.layout
        assert layout is not None
        if isinstance(belief, StructuredBelief):
            joint: Any = StructuredLaw(belief)
        else:
            assert isinstance(belief, GaussianBelief)
            # Not validated: of an empty block there is no least element to look at.
            joint = dist.MultivariateNormal(
                belief.loc, scale_tril=belief.scale_tril, validate_args=False
            ).to_event(1)
        name = f"_{type(self).__name__}_{block.name}"
        z = pyro.sample(name, joint, infer={"is_auxiliary": True})
        lead = z.shape[:-2]
        result = {}
        for site in block.sites:
            latent = drawn.latents[site]
            flat = z[..., layout.element[site], layout.position[site]]
            shape = broadcast_shapes(latent.shape, (*lead, *([1] * latent.event_dim)))
            value = flat.reshape(shape).to(latent.value.dtype)
            result[site] = drawn.in_plates(site, site_given(latent, value))
        return result

    @public_call
    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """One draw of all Gaussian blocks, flattened."""
        parts = [
            draw(b, self.belief(b)).reshape(-1) for b in self._whole.blocks if b.layout is not None
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device="cpu")


# --- helpers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """A block to be drawn, with the elements that the plates hold now."""

    block: Block
    latents: Mapping[str, Latent]
    belief: Belief
    plates: Mapping[str, Any]

    def in_plates(self, site: str, fn: Any) -> Tensor:
        """One sample statement inside the site's plates."""
        return in_plates(self.latents[site], self.plates, fn)


def _chain_draw(drawn: _Drawn) -> dict[str, Tensor]:
    """Sample statements of a discrete chain's states."""
    assert isinstance(drawn.belief, FamilyBelief)
    return draw_chain(drawn.latents, drawn.block, drawn.belief, drawn.in_plates)


def in_plates(latent: Latent, plates: Mapping[str, Any], fn: Any) -> Tensor:
    """One sample statement of a site, inside those of its plates that are given."""
    with ExitStack() as stack:
        for name, *_ in latent.plates:
            if name in plates:  # without plates, all elements at once
                stack.enter_context(plates[name])
        value: Tensor = pyro.sample(latent.name, fn)
    return value


def site_given(latent: Latent, u: Tensor) -> Any:
    """The law of a Gaussian site given its block's draw: a point; its density is the Jacobian's."""
    t = latent.transform
    if t is None:
        return dist.Delta(u, event_dim=latent.event_dim)
    x = t(u)
    event_dim = latent.event_dim - t.domain.event_dim + t.codomain.event_dim
    log_density = -log_jacobian(t, u, x, latent.event_dim)
    return dist.Delta(x, log_density=log_density, event_dim=event_dim)


def _check_indices(name: str, plate: Any, index: Tensor) -> None:
    found, wanted = torch.as_tensor(plate.indices), torch.as_tensor(index)
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise CVIError(
            f"plate '{name}'",
            "create_plates gave other indices than the model's own `subsample=`",
            "the same indices in model and guide",
            "pass the same index tensor to both, or leave create_plates out",
        )


def _indices(plate: Any, part: Part) -> Tensor:
    index = plate.indices
    return torch.arange(part.full, device="cpu") if index is None else torch.as_tensor(index).cpu()


def _resized(latent: Latent, sizes: Mapping[str, int]) -> Latent:
    """The latent when its plates hold this many elements."""
    parts = [Part(n, d, s, sizes[n]) for n, d, s, _ in latent.plates if n in sizes]
    return whole_latent(latent, parts)


def _seen_name(block: Block) -> str:
    """The buffer that tells which elements of the plates around a local block have been seen."""
    assert block.placement is not None
    names = [p.name.replace(".", "$$$") for p in block.placement.parts]
    return "+".join(names) + _SEPARATOR + "seen"


def _none_seen(block: Block) -> Tensor:
    assert block.placement is not None
    return torch.zeros([p.full for p in block.placement.parts], dtype=torch.bool, device="cpu")


def _elements(block: Block, window: Window) -> tuple[Tensor, ...]:
    """The window's elements as an index into the buffer of those seen."""
    assert block.placement is not None
    indices = [window[p.name] for p in block.placement.parts]
    n = len(indices)
    return tuple(x.reshape(-1, *[1] * (n - 1 - i)).cpu() for i, x in enumerate(indices))


def _buffer_names(block: Block) -> list[str]:
    """State dict keys such as `w+b:loc`; a dot, which torch reserves, is written as Pyro does."""
    parts = ("loc", "precision") if block.layout is not None else block.family.statistics
    if isinstance(block.form, Chain):
        parts = (
            "loc",
            "loc_shared",
            "precision",
            "precision_step",
            "precision_edge",
            "precision_shared",
        )
    elif isinstance(block.form, Process):
        widths = block.form.predictors.widths
        parts = ("loc", "precision", "coefficients", *(f"curvature_{w}" for w in widths))
    return [block.name.replace(".", "$$$") + _SEPARATOR + part for part in parts]


def mark_of(form: Form) -> int:
    """A checksum of what the numbers of a process or chain are about: its predictors, or its places."""
    parts = [form.pattern.place] if isinstance(form, Chain) else [form.predictors.design]
    if isinstance(form, Chain) and form.pattern.coordinates is not None:
        parts.append(form.pattern.coordinates.before)
    mark = 0
    for x in parts:
        mark = zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes(), mark)
    return mark


def _mark_name(block: Block) -> str:
    return block.name.replace(".", "$$$") + _SEPARATOR + "of"


def _other_data(block: Block) -> CVIError:
    return CVIError(
        f"block '{block.name}'",
        f"its posterior is held as a {block.structure} over the data of the fit; these are others",
        "the data of the fit",
        "use CVI.log_predictive or pyro.infer.Predictive for other rows, and give a loaded guide "
        "the data that it was fitted to first; step and run adapt it to new data",
    )


def _same_shape(known: Tensor | None, new: Tensor) -> bool:
    return known is not None and known.shape == new.shape


def _is_of(belief: Belief, block: Block) -> bool:
    """Whether a belief has the block's present predictors and prior."""
    if isinstance(belief, ChainBelief):
        return isinstance(block.form, Chain) and belief.pattern is block.form.pattern
    if isinstance(belief, ProcessBelief):
        return isinstance(block.form, Process) and belief.spec is block.form.predictors
    return True


def mark_of_joint(sites: frozenset[str]) -> Tensor:
    """Names as a tensor of bytes, for a state dict holds nothing else."""
    return torch.tensor(list("\n".join(sorted(sites)).encode()), dtype=torch.uint8, device="cpu")


def joint_of(mark: Tensor | None) -> frozenset[str]:
    """The names that a mark holds."""
    return frozenset() if mark is None else frozenset(bytes(mark.tolist()).decode().split("\n"))


def _is_unchanged(known: list[tuple[Tensor, int]], tensors: tuple[Tensor, ...]) -> bool:
    return all(
        old is new and version == new._version
        for (old, version), new in zip(known, tensors, strict=True)
    )


def _without_model(prepared: Prepared) -> Prepared:
    """Blocks and latents without factors, priors and trace; no model matches its fingerprint."""
    plan = prepared.plan
    latents = {
        n: replace(latent, prior=None, own_support=None, value=latent.value.detach())
        for n, latent in plan.latents.items()
    }
    plan = replace(plan, latents=latents, factors=(), structure=plan.structure.fresh())
    return replace(
        prepared,
        plan=plan,
        subsample={},
        point={},
        fingerprint=(),
        trace=poutine.Trace(),
        parameters={},
        call=None,
        priors={},
    )
