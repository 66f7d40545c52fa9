"""Structured recognition: a network speaks in conjugate potentials, exact messages do the rest.

    q(z, c)  =  argmax  E_q [ E_q(theta) log p(z, c | theta) + log psi(z; x) ] + H[q]

The posterior of the local sites z that an encoder serves is that of the model in which the encoder's
potential psi stands for the likelihood: it follows what is learnt of theta (a mixture, a dynamical
system) at once, and the encoder need only say what a row says by itself. The optimum is found by exact
messages; its derivative is that of the fixed point, and not of the last round alone:

    q* = T(q*, phi)   gives   d q* / d phi  =  (1 - dT/dq)^-1 dT/dphi,

in theta as in the encoder's parameters phi, so that gradients are those of the bound.

Sources: M. J. Johnson et al. (2016), Composing graphical models with neural networks, arXiv 1603.06277;
H. Bendekgey et al. (2023), arXiv 2306.08230, for the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_cvi.acceleration import RowMixing
from pyro_cvi.errors import CVIError, check_names
from pyro_cvi.families import CATEGORICAL, GAUSSIAN, MARKOV_CHAIN
from pyro_cvi.graph.evaluator import Evaluator, Leaves, moments_of
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.prepared import Prepared, prepare
from pyro_cvi.graph.symbolic import (
    frames_around,
    full_size,
    is_factor_site,
    plates_around,
    without_false_alarms,
)
from pyro_cvi.guide import AutoCVI, in_plates, site_given
from pyro_cvi.laws import marginal
from pyro_cvi.linalg import or_zeros
from pyro_cvi.modes import public_call
from pyro_cvi.prediction import carried, carried_moments
from pyro_cvi.sweep import Sweeper
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["OnePlate", "Recognition", "rows_of"]

_ROUNDS, _SETTLED = 50, 1e-6
"""Rounds over several local blocks, and nats per scalar below which they have settled."""
_TERMS, _NEGLIGIBLE = 50, 1e-4
"""Rounds for (1 - dT/dq)^-1, and the relative change below which they end."""
_STUCK = 0.1
"""Change in a last round, relative to what was given, of rows whose derivative has not been found."""
_SIZES = 16
"""Shapes of the latent sites (minibatches, lengths of sequences) whose analyses are remembered."""

Potentials = Mapping[str, Any]
Recognise = Callable[..., Potentials]


class OnePlate(Messenger):
    """A plate that is opened twice is the same plate: one set of indices, and one site outside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg) or msg["name"] not in self.seen:
            return
        known, given = self.seen[msg["name"]], msg["value"]
        if given is not None and not torch.equal(torch.as_tensor(given).cpu(), known.cpu()):
            raise CVIError(
                f"plate '{msg['name']}'",
                "two parts of the guide open it with different indices",
                "the same elements in all parts",
                "pass the same `subsample=` to both, or the same size",
            )
        msg["value"], msg["done"], msg["stop"] = known, True, True

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            self.seen.setdefault(msg["name"], msg["value"])


def rows_of(plates: Mapping[str, tuple[int, int]], fitted: Mapping[str, int]) -> frozenset[str]:
    """Which of the plates around drawn sites, given as (size, full size), hold rows.

    Those that have some of their elements only, or another size than in the fit; else all. A site in the
    others alone (a mean of each column) is shared by all rows.
    """
    some = {n for n, (size, full) in plates.items() if size != full or fitted.get(n, size) != size}
    return frozenset(some or plates)


class Recognition:
    """A part of a `HybridGuide`: q(z) from an encoder's potentials and the messages of the model.

    Arguments:
        model: the whole model.
        recognise: a function of the model's arguments that gives {site: potential}, the potential a
            distribution over the site's values with the site's shapes, whose density at z stands for the
            likelihood of z: `{"z": dist.Normal(*encoder(x)).to_event(1)}`. It must be conjugate to the
            site's conditional prior. None for a site that is drawn along with the others and about
            which a row says nothing by itself, as a time step that is missing. Networks in it are
            registered by `pyro.module`.
        own: the `AutoCVI` of the other sites, whose posterior enters the messages.
        keep: observed sites that stay, with exact messages, beside the potentials (labels of some
            rows); all other observed sites are what the potentials stand for.
        rows: the plates of the rows, where the sites are in several and it does not show: those of which
            a run holds some elements only, or others than before, are rows.

    The sites must be in a plate. Other latents of that plate (the cluster of a row) take part in finding
    q(z), and then are CVI's given the draw of z. A scale or mask around a site holds for its potential
    too; an element that is masked out is drawn from its prior, and that draw's density is in the bound.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro import poutine
        >>> from pyro_cvi import CVI, AutoCVI, HybridGuide, Recognition
        >>> encoder, decoder = torch.nn.Linear(4, 4), torch.nn.Linear(2, 4)
        >>> def model(x):
        ...     pyro.module("decoder", decoder)
        ...     w = pyro.sample("w", dist.Dirichlet(torch.ones(3)))
        ...     with pyro.plate("clusters", 3):
        ...         mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        ...     with pyro.plate("rows", 100, subsample_size=len(x)):
        ...         c = pyro.sample("c", dist.Categorical(w))
        ...         z = pyro.sample("z", dist.Normal(mu[c], 0.5).to_event(1))
        ...         pyro.sample("x", dist.Normal(decoder(z), 0.1).to_event(1), obs=x)
        >>> def recognise(x):
        ...     pyro.module("encoder", encoder)
        ...     loc, log_scale = encoder(x).chunk(2, -1)
        ...     return {"z": dist.Normal(loc, log_scale.exp()).to_event(1)}
        >>> own = AutoCVI(poutine.block(model, hide=["z"]))
        >>> guide = HybridGuide(model)
        >>> guide.append(own)
        >>> guide.append(Recognition(model, recognise, own))
        >>> cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01}))
        >>> loss = cvi.step(torch.randn(10, 4))
    """

    def __init__(
        self,
        model: Callable[..., Any],
        recognise: Recognise,
        own: AutoCVI,
        keep: Sequence[str] = (),
        rows: Sequence[str] = (),
    ) -> None:
        if not isinstance(own, AutoCVI):
            raise CVIError(
                "Recognition",
                f"own is a {type(own).__name__}",
                "the AutoCVI of the other sites",
                "own = AutoCVI(poutine.block(model, hide=[...])), a part of the same HybridGuide",
            )
        self.model, self.recognise, self.own = model, recognise, own
        self.keep, self.rows = frozenset(keep), frozenset(rows)
        self.shared: Leaves = {}
        """The mean parameters of the blocks of `own` that the last draw is a function of."""
        self._known: dict[tuple[tuple[str, torch.Size], ...], Prepared] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed at each call."""
        return {**self.__dict__, "shared": {}, "_known": {}}

    @public_call
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the sites, in their plates."""
        potentials = self.recognise(*args, **kwargs)
        if not isinstance(potentials, Mapping) or not potentials:
            raise CVIError(
                "Recognition",
                f"recognise gives {potentials!r}",
                "a potential for each site",
                '{"z": dist.Normal(*encoder(x)).to_event(1)}, say',
            )
        with OnePlate():
            trace = _run(self.model, args, kwargs)
            local = _plates(potentials, trace)
            _check_observed(self.keep, trace)
            with poutine.block(), torch.enable_grad():
                found = self._found(potentials, local, trace, args, kwargs)
            return _drawn(found, frozenset(potentials), local)

    def _found(
        self, potentials: Potentials, local: Mapping[str, _Plate], trace: poutine.Trace,
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> _Found:  # fmt: skip
        """The local optimum, with its graph."""
        surrogate = _Surrogate(self.model, potentials, self.keep)
        fitted = self.own.prepared.sizes if self.own.prepared is not None else {}
        rows = self.rows or rows_of({n: (p.size, p.full) for n, p in local.items()}, fitted)
        _check_rows(rows, local, frozenset(potentials), trace)
        chunk = {
            n: (p.size, torch.arange(p.size, device="cpu")) for n, p in local.items() if n in rows
        }
        chosen = {n: p.indices for n, p in local.items()}
        key = tuple((n, s["value"].shape) for n, s in trace.nodes.items() if _is_latent(s))
        random = torch.get_rng_state()
        prepared = prepare(
            surrogate, args, kwargs, self.own.max_dense_dim, self._known.get(key),
            chosen=chosen, chunk=chunk, beside={},
        )  # fmt: skip
        torch.set_rng_state(random)  # whether it was analysed before must not be seen in the draws
        if len(self._known) >= _SIZES:
            self._known.clear()
        self._known[key] = prepared
        plan = prepared.plan
        blocks = [b for b in plan.blocks if b.placement is not None]
        _check_blocks(plan, blocks, frozenset(potentials))
        beliefs = {b.name: _start(prepared, b, potentials) for b in blocks}
        shared = [b for b in plan.blocks if b.placement is None]
        leaves = self._shared(prepared, shared, beliefs)
        settled = _settled(plan, beliefs)
        fixed = _Fixed(plan, blocks, settled, leaves)
        return _Found(plan, blocks, fixed.beliefs())

    def _shared(
        self, prepared: Prepared, blocks: Sequence[Block], beliefs: dict[str, Belief]
    ) -> Leaves:
        """Put the posterior of `own` into `beliefs`; its mean parameters, laid out as these blocks."""
        self.shared = {}
        if self.own.prepared is None:  # the first draw of all: the prior serves
            beliefs |= {b.name: prepared.start(b) for b in blocks}
            return {b.name: beliefs[b.name].leaves() for b in blocks}
        found: Leaves = {}
        for b in blocks:
            beliefs[b.name] = carried(self.own, b)
            for site in b.sites:
                fitted = self.own.block_of(site)
                if fitted.name not in self.shared:
                    self.shared[fitted.name] = self.own.belief(fitted).leaves()
            if b.layout is None:
                found[b.name] = self.shared[self.own.block_of(b.sites[0]).name]
            else:
                found[b.name] = carried_moments(self.own, b, self._moments)
        return found

    def _moments(self, fitted: Block) -> tuple[Tensor, Tensor]:
        loc, cov = self.shared[fitted.name]
        return loc, cov


@dataclass(frozen=True)
class _Plate:
    """A plate of the rows, and its elements."""

    name: str
    dim: int
    size: int
    full: int
    indices: Tensor


@dataclass(frozen=True)
class _Found:
    """The local blocks and their beliefs, functions of the potentials and of the shared posterior."""

    plan: Plan
    blocks: list[Block]
    beliefs: dict[str, Belief]


class _Surrogate:
    """The model with potentials in the place of its likelihood."""

    def __init__(
        self, model: Callable[..., Any], potentials: Potentials, keep: frozenset[str]
    ) -> None:
        self.model, self.potentials, self.keep = model, potentials, keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Potentials(self.potentials, self.keep):
            return self.model(*args, **kwargs)


class _Potentials(Messenger):
    """Observed sites do not count, and each site with a potential is observed through it."""

    def __init__(self, potentials: Potentials, keep: frozenset[str]) -> None:
        super().__init__()
        self.potentials, self.keep = potentials, keep
        self._own = {_name(n) for n in potentials}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and msg["name"] not in self.keep | self._own:
            msg["infer"] = {**(msg["infer"] or {}), "_deterministic": True}

    def _pyro_post_sample(self, msg: Any) -> None:
        potential = self.potentials.get(msg["name"])
        if potential is not None:
            pyro.sample(_name(msg["name"]), potential, obs=msg["value"])


def _name(site: str) -> str:
    return f"{site}_potential"


def _is_latent(site: Any) -> bool:
    return is_factor_site(site) and not site["is_observed"]


def _run(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> poutine.Trace:
    """A run of the model, of which handlers outside see the plates only."""
    plates_only = poutine.block(hide_fn=lambda m: not site_is_subsample(m))
    with plates_only, torch.no_grad(), without_false_alarms():
        return poutine.trace(model).get_trace(*args, **kwargs)


def _plates(potentials: Potentials, trace: poutine.Trace) -> dict[str, _Plate]:
    """The plates around the sites, with the elements that they hold in a run of the model."""
    found: dict[str, _Plate] = {}
    for name in potentials:
        site = trace.nodes.get(name)
        if site is None or site["type"] != "sample" or site["is_observed"]:
            latents = [n for n, s in trace.nodes.items() if _is_latent(s)]
            raise CVIError(
                f"potential of '{name}'",
                "the model has no such latent site",
                f"one of {latents}",
                "name the sites that the encoder serves",
            )
        _check_shapes(name, site, potentials[name])
        frames = frames_around(site)
        if not frames:
            raise CVIError(
                f"latent site '{name}'",
                "it is in no plate, and has one posterior with the sites of AutoCVI",
                "sites of single rows",
                "open a pyro.plate around the rows, of size one if there is one row",
            )
        for f in frames:
            indices = trace.nodes[f.name]["value"]
            found[f.name] = _Plate(f.name, f.dim, f.size, full_size(f), indices)
    return found


def _is_finite(potential: Any) -> bool:
    """Whether all tensors that a distribution, or what it wraps, is made of are finite."""
    inner = getattr(potential, "base_dist", None)
    own = [v for v in vars(potential).values() if isinstance(v, Tensor) and v.is_floating_point()]
    return all(bool(v.isfinite().all()) for v in own) and (inner is None or _is_finite(inner))


def _check_observed(keep: frozenset[str], trace: poutine.Trace) -> None:
    observed = [n for n, s in trace.nodes.items() if s["type"] == "sample" and s["is_observed"]]
    remedy = "name the observed sites that stay"
    check_names(f"keep={sorted(keep)}", keep, observed, "the model has no observed site", remedy)


def _check_rows(
    rows: frozenset[str], local: Mapping[str, _Plate], sites: frozenset[str], trace: poutine.Trace
) -> None:
    """Where all plates count as rows, no other site may be in some of them only.

    It could be shared by all rows, or a row's own.
    """
    where, remedy = f"rows={sorted(rows)}", "name plates around the recognised sites"
    check_names(where, rows, local, "no recognised site is in a plate", remedy)
    if rows != set(local):
        return
    for name, site in trace.nodes.items():
        if not _is_latent(site) or name in sites:
            continue
        around = plates_around(site) & set(local)
        if around and around != set(local):
            raise CVIError(
                f"latent site '{name}'",
                f"it is in {sorted(around)} of the plates {sorted(local)} of the recognised sites, "
                "all of whose elements are there: whether rows share it cannot be told",
                "the plates of the rows",
                f"Recognition(model, recognise, own, rows=[...]) with some of {sorted(local)}",
            )


def _check_shapes(name: str, site: Any, potential: Any) -> None:
    if potential is None:
        return
    if not isinstance(potential, torch.distributions.Distribution):
        found = f"a {type(potential).__name__}"
    elif potential.event_shape != site["fn"].event_shape:
        found = f"a potential of event shape {tuple(potential.event_shape)}"
    elif potential.batch_shape != site["fn"].batch_shape:
        found = f"a potential of batch shape {tuple(potential.batch_shape)}"
    elif not _is_finite(potential):
        raise CVIError(
            f"latent site '{name}'",
            "its potential has parameters that are not finite",
            "finite ones",
            "look at what the encoder gives, and at its rate of learning",
        )
    else:
        return
    fn = site["fn"]
    raise CVIError(
        f"latent site '{name}'",
        found,
        f"a distribution of batch shape {tuple(fn.batch_shape)} and event shape "
        f"{tuple(fn.event_shape)}",
        "give the potential the shape of the site, by to_event or expand",
    )


def _check_blocks(plan: Plan, blocks: Sequence[Block], sites: frozenset[str]) -> None:
    """What has a fixed point of exact messages, and nothing drawn that is not the guide's."""
    for b in blocks:
        if not plan.is_exact(b) or b.name in plan.noisy():
            raise CVIError(
                f"latent site '{b.sites[0]}'",
                "its message from the potentials and the model's prior is not exact",
                "a potential that is conjugate to the prior: Normal or MultivariateNormal for a "
                "Gaussian site, Categorical for a discrete one, Gamma for a Gamma one",
                "see explain() of an AutoCVI of the model without its likelihood; an encoder of a "
                "site's own posterior serves any prior",
            )
        inside = sites & set(b.sites)
        if inside and b.layout is None and len(b.sites) > 1:
            raise CVIError(
                f"latent site '{b.sites[0]}'",
                f"it is in a chain of discrete sites with '{b.sites[1]}', and not drawn jointly",
                "continuous sites, or discrete ones that do not meet",
                "leave the chain to AutoCVI: its messages take part all the same",
            )
        if inside and inside != set(b.sites):
            missing = min(set(b.sites) - sites)
            raise CVIError(
                f"latent site '{missing}'",
                f"it has one posterior with '{min(inside)}', and no potential",
                "all sites of that posterior",
                f"add {{'{missing}': None}} to the potentials, if a row says nothing about it",
            )


def _start(prepared: Prepared, block: Block, potentials: Potentials) -> Belief:
    """Gaussian sites start at their potentials, all others where a fit starts."""
    moved = [s for s in block.sites if prepared.plan.latents[s].transform is not None]
    if block.layout is None or moved or any(potentials.get(s) is None for s in block.sites):
        return prepared.start(block)
    layout = block.layout
    moments = {
        s: (x.mean.detach(), x.variance.detach()) for s, x in potentials.items() if s in block.sites
    }
    loc = moments[block.sites[0]][0].new_zeros(layout.count, layout.width)
    precision = torch.ones_like(loc)
    for site, (mean, variance) in moments.items():
        variance = variance.clamp(min=torch.finfo(variance.dtype).tiny ** 0.5)
        where = (layout.element[site], layout.position[site])
        loc[where] = mean.reshape(-1).to(loc.dtype)
        precision[where] = 1 / variance.reshape(-1).to(loc.dtype)
    return GaussianBelief(loc, torch.diag_embed(precision))


def _settled(plan: Plan, beliefs: dict[str, Belief]) -> dict[str, Belief]:
    """The local blocks at their optimum given the others.

    States start at what their sites' potentials say, and at random about it: a row between two clusters
    would else rest at the saddle between them.
    """
    evaluator, sweeper = Evaluator(plan, beliefs), Sweeper("stochastic", 1.0, 0.7)
    first, *others = local = [b for b in plan.blocks if b.placement is not None]
    for b in [b for b in reversed(others) if b.is_discrete]:
        sweeper.deterministic(evaluator, b)
        pairs = zip(evaluator.beliefs[b.name].tensors, beliefs[b.name].tensors, strict=True)
        noisy = evaluator.beliefs[b.name].like([found + noise for found, noise in pairs])
        evaluator.set(b.name, beliefs[b.name] if noisy is None else noisy)
    for b in local:  # an ordinary round, with its checks
        sweeper.deterministic(evaluator, b)
    if not others:
        return evaluator.beliefs
    mixing = RowMixing(_rows(evaluator.beliefs, others))
    for _ in range(_ROUNDS):
        before = [evaluator.beliefs[b.name] for b in others]
        for b in local:
            evaluator.set(b.name, evaluator.beliefs[b.name].moved(evaluator.message(b), 1.0)[0])
        after = [evaluator.beliefs[b.name] for b in others]
        moved = [float(x.kl(y)) for x, y in zip(before, after, strict=True)]
        if sum(moved) < _SETTLED * sum(b.size for b in others):
            break
        residuals = [t for x, y in zip(before, after, strict=True) for t in _residuals(x, y)]
        tensors = mixing.mixed([t for y in after for t in y.tensors], residuals)
        for b, y in zip(others, after, strict=True):
            mine, tensors = tensors[: len(y.tensors)], tensors[len(y.tensors) :]
            mixed = y.like(mine)
            if mixed is not None:
                evaluator.set(b.name, mixed)
    return evaluator.beliefs


def _rows(beliefs: Mapping[str, Belief], blocks: Sequence[Block]) -> int:
    """How many rows the tensors of blocks have in common; 1 where it cannot be told."""
    counts = set()
    for b in blocks:
        assert b.placement is not None
        rows = math.prod(p.size for p in b.placement.parts)
        sizes = [math.prod(t.shape[: t.ndim - n]) for t, n in _with_event_dims(beliefs[b.name])]
        cells = 1 if b.layout is None else b.layout.count // max(rows, 1)
        counts.add(rows if all(n == rows * cells for n in sizes) else 1)
    return counts.pop() if len(counts) == 1 else 1


def _with_event_dims(belief: Belief) -> Iterator[tuple[Tensor, int]]:
    family = belief.family if isinstance(belief, FamilyBelief) else GAUSSIAN
    yield from zip(belief.tensors, family.event_dims, strict=True)


def _residuals(x: Belief, y: Belief) -> tuple[Tensor, ...]:
    """y - x, in coordinates in which nats count: of states by the roots of their probabilities."""
    if isinstance(y, FamilyBelief) and y.family in (CATEGORICAL, MARKOV_CHAIN):
        pairs = zip(x.tensors, y.tensors, y.mean, strict=True)
        return tuple((b - a) * p.sqrt() for a, b, p in pairs)
    return y.standardised(x, y)


class _Fixed:
    """One round T of exact messages at its fixed point, with the fixed point's derivative."""

    def __init__(
        self, plan: Plan, blocks: Sequence[Block], settled: Mapping[str, Belief], shared: Leaves
    ) -> None:
        self.plan, self.blocks = plan, blocks
        self.before = [t.detach().requires_grad_() for b in blocks for t in settled[b.name].tensors]
        self._counts = [len(settled[b.name].tensors) for b in blocks]
        here = {**settled, **self._beliefs(self.before, settled)}
        self._round(here, {**shared, **{b.name: _means(here[b.name]) for b in blocks}})
        self.after = [t for b in blocks for t in here[b.name].tensors]
        self._last = here
        self._solved: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None

    def _round(self, beliefs: dict[str, Belief], leaves: Leaves) -> None:
        """Move every local block to its optimum in turn, keeping the graph."""
        for b in self.blocks:
            # A message is a partial derivative: other blocks may already be functions of this one.
            own = tuple(x.clone() for x in leaves[b.name])
            moments, probabilities = moments_of(self.plan, {**leaves, b.name: own}, beliefs)
            factors = self.plan.factors_of(b.name)
            total = torch.stack([f(moments, probabilities).reshape(()) for f in factors]).sum()
            found = torch.autograd.grad(total / b.scale, own, create_graph=True, allow_unused=True)
            beliefs[b.name] = beliefs[b.name].moved(found, 1.0)[0]
            leaves[b.name] = _means(beliefs[b.name])

    def _beliefs(self, tensors: Sequence[Tensor], like: Mapping[str, Belief]) -> dict[str, Belief]:
        found: dict[str, Belief] = {}
        at = 0
        for b, n in zip(self.blocks, self._counts, strict=True):
            own = tuple(tensors[at : at + n])
            old = like[b.name]
            if isinstance(old, FamilyBelief):
                found[b.name] = FamilyBelief(old.family, own)
            else:
                found[b.name] = GaussianBelief(*own)
            at += n
        return found

    def beliefs(self) -> dict[str, Belief]:
        """The local beliefs; gradients go through the fixed point."""
        joined = _ImplicitGradient.apply(self._solve, *self.after)
        return self._beliefs(joined, self._last)

    def _solve(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """u = (1 - dT/dq)^-T g, the fixed point of u = g + dT/dq^T u.

        A step asks twice, before and after the shared posterior has moved a little: the second begins
        where the first has ended. The first block does not enter its own round.
        """
        given = [or_zeros(g, t) for g, t in zip(grads, self.after, strict=True)]
        if len(self.blocks) == 1:  # nothing that its own state enters
            return tuple(given)
        size, total, first = _norm(given), given, self._counts[0]
        if self._solved is not None:
            known = zip(self._solved[1], given, self._solved[0], strict=True)
            total = [u + g - h for u, g, h in known]
        live = [i for i, t in enumerate(self.after) if t.requires_grad]
        rows = _rows(self._last, self.blocks[1:])
        mixing = RowMixing(rows)
        for _ in range(_TERMS):
            with torch.enable_grad():
                moved = torch.autograd.grad(
                    [self.after[i] for i in live], self.before[first:], [total[i] for i in live],
                    retain_graph=True, allow_unused=True,
                )  # fmt: skip
            pairs = zip(moved, given[first:], strict=True)
            end = [g if m is None else g + m for m, g in pairs]
            change = [a - b for a, b in zip(end, total[first:], strict=True)]
            if not _norm(change) > _NEGLIGIBLE * size:
                total = [*given[:first], *end]
                break
            total = [*given[:first], *mixing.mixed(end, change)]
        else:  # rows at a point that rounds lead away from have the derivative of one round
            stuck = ~(_lengths(change, rows) <= _STUCK * _lengths(given[first:], rows))
            pairs = zip(given[first:], total[first:], strict=True)
            total = [*given[:first], *(_rowwise(stuck, g, u) for g, u in pairs)]
        self._solved = given, total
        return tuple(total)


class _ImplicitGradient(torch.autograd.Function):
    """The identity, with `solve` applied to the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, solve: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.solve = solve
        return tuple(v.clone() for v in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.solve(grads)


def _norm(tensors: Sequence[Tensor]) -> float:
    """Over all rows: gradients are sums over them, and a few slow ones need not hold up the rest."""
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def _lengths(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """The norm of each row; infinite where it is not finite."""
    squares = torch.stack([t.reshape(rows, -1).square().sum(-1) for t in tensors]).sum(0)
    return squares.sqrt().nan_to_num(nan=math.inf)


def _rowwise(here: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rows of `a` where `here`, else those of `b`."""
    rows = len(here)
    return torch.where(here[:, None], a.reshape(rows, -1), b.reshape(rows, -1)).reshape(a.shape)


def _means(belief: Belief) -> tuple[Tensor, ...]:
    """The mean parameters as functions of what is stored."""
    if isinstance(belief, GaussianBelief):
        return belief.loc, belief.cov
    assert isinstance(belief, FamilyBelief)
    return belief.mean


def _drawn(found: _Found, sites: frozenset[str], local: Mapping[str, _Plate]) -> dict[str, Tensor]:
    """A draw of the sites, as sample statements in their plates."""
    plates = {n: pyro.plate(n, p.full, subsample=p.indices, dim=p.dim) for n, p in local.items()}
    result: dict[str, Tensor] = {}
    for block in found.blocks:
        if not sites & set(block.sites):
            continue
        latents = {s: found.plan.latents[s] for s in block.sites}
        belief = found.beliefs[block.name]
        if isinstance(belief, FamilyBelief):
            (site,) = block.sites
            law = marginal(latents[site], block, belief)
            result[site] = in_plates(latents[site], plates, law)
            continue
        assert isinstance(belief, GaussianBelief) and block.layout is not None
        z = _joint_draw(block, belief, plates)
        for site, latent in latents.items():
            flat = z[block.layout.element[site], block.layout.position[site]]
            value = flat.reshape(latent.shape).to(latent.value.dtype)
            result[site] = in_plates(latent, plates, site_given(latent, value))
    return result


def _joint_draw(block: Block, belief: GaussianBelief, plates: Mapping[str, Any]) -> Tensor:
    """All scalars of the cells, (cells * count, width), from an auxiliary site in the block's plates."""
    assert block.placement is not None
    parts = block.placement.parts
    shape = [1] * max(-p.dim for p in parts)
    for p in parts:
        shape[p.dim] = p.size
    count, width = belief.loc.shape
    rows = (*shape, count // max(math.prod(shape), 1))
    law = dist.MultivariateNormal(
        belief.loc.reshape(*rows, width), scale_tril=belief.scale_tril.reshape(*rows, width, width)
    ).to_event(1)
    with ExitStack() as stack:
        for p in parts:
            stack.enter_context(plates[p.name])
        z = pyro.sample(f"_Recognition_{block.name}", law, infer={"is_auxiliary": True})
    return z.reshape(-1, width)
