"""New data: local posteriors and predictive densities of rows that the fit has not seen.

The sites outside of the rows' plate keep their fitted posterior; the local ones are brought to their
optimum given it, for as many rows as there are, in chunks. The predictive density of a row is

    log p(x) ~ log 1/S sum_s exp L(x; theta_s),        theta_s ~ q(theta),

with L the log density of the row with its local latents integrated out: exact where their posterior
given theta is in its family (one discrete site or chain, or Gaussians), else a lower bound. Sites that
keep their prior are drawn with theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.families import peel
from pyro_cvi.graph.check import factor_values
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.prepared import Prepared, first_run, prepare
from pyro_cvi.graph.sampling import Sampler, Sampling
from pyro_cvi.graph.symbolic import Call, plate_frames
from pyro_cvi.guide import AutoCVI
from pyro_cvi.linalg import broadcast_shapes, sum_to_dims
from pyro_cvi.structured import StructuredBelief
from pyro_cvi.sweep import Sweeper
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["forecast", "local_posteriors", "log_predictive"]

_ROUNDS, _SETTLED = 200, 1e-8
SAMPLED_ROUNDS, SAMPLED_SETTLED = 150, 1e-4
_SYMMETRIC = 1e-8
"""Logits that differ by less are those of components that are still alike."""

Model = Callable[..., Any]
Args = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


def local_posteriors(
    model: Model,
    guide: AutoCVI,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    plates: Sequence[str] | None,
    chunk_size: int | None,
    sampling: Sampling,
    seed: int | None,
) -> AutoCVI:
    """A guide for new rows: the shared sites as they were fitted, the local ones for these rows."""
    rows = _Rows.of(model, guide, args, kwargs, plates)
    new = AutoCVI(model, max_dense_dim=guide.max_dense_dim)
    joint = frozenset(s for s in guide.plan.joint if not rows.is_local(guide, s))
    prepared: Prepared | None = None
    for (part_args, part_kwargs), chunk in rows.chunks(chunk_size):
        prepared = prepare(
            model, part_args, part_kwargs, guide.max_dense_dim, prepared, chunk=chunk, joint=joint,
            max_joint_dim=0,
        )  # fmt: skip
        _check_local(prepared.plan, rows.plates)
        new.adopt(prepared, rows.frames)
        for block in prepared.plan.blocks:
            if block.placement is None:
                new.set_belief(block, carried(guide, block))
        evaluator = Evaluator(prepared.plan, new.beliefs())
        noisy = prepared.plan.noisy()
        settle(evaluator, noisy)
        if noisy:
            call = Call(
                model, part_args, part_kwargs, prepared.plan.latents, prepared.nesting,
                prepared.subsample,
            )  # fmt: skip
            sampler = Sampler(prepared.plan, call, sampling)
            Sweeper("stochastic", 1.0, 0.7, seed).settle_sampled(
                evaluator, sampler, noisy, SAMPLED_ROUNDS, SAMPLED_SETTLED
            )
        for block in prepared.plan.blocks:
            if block.placement is not None:
                new.set_belief(block, evaluator.beliefs[block.name])
    return new


def log_predictive(
    model: Model,
    guide: AutoCVI,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    plates: Sequence[str] | None,
    num_samples: int,
    chunk_size: int | None,
) -> Tensor:
    """log p(row | data) for every row, shape (rows,)."""
    if num_samples < 1:
        raise CVIError(f"num_samples is {num_samples}; expected at least one draw")
    rows = _Rows.of(model, guide, args, kwargs, plates)
    if len(rows.plates) != 1:
        raise CVIError(
            "log_predictive",
            f"the new rows are in the plates {sorted(rows.plates)}",
            "one plate, whose elements the result has one value for",
            "name it with plates=[...]",
        )
    held = {n for n, x in guide.plan.latents.items() if x.held}
    shared = [n for n in guide.plan.latents if not rows.is_local(guide, n) and n not in held]
    seeds = torch.randint(
        2**31, (num_samples,), device="cpu"
    ).tolist()  # the same draws for all chunks
    result = []
    prepared: Prepared | None = None
    for (part_args, part_kwargs), chunk in rows.chunks(chunk_size):
        ((plate, (_, index)),) = chunk.items()
        values = []
        for seed in seeds:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                given = poutine.condition(_Drawn(model), data=guide.draw(shared))
            if len(shared) + len(held) == len(guide.plan.latents):
                values.append(_without_locals(given, part_args, part_kwargs, plate, len(index)))
            else:
                limit = guide.max_dense_dim
                prepared = prepare(given, part_args, part_kwargs, limit, prepared, chunk=chunk)
                values.append(_local_evidence(prepared, plate))
        result.append(torch.stack(values).logsumexp(0) - math.log(num_samples))
    return torch.cat(result)


class _Drawn:
    """The model with one draw of every site that keeps its prior, as a constant."""

    def __init__(self, model: Model) -> None:
        self._model, self._values = model, dict[str, Tensor]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _HeldAt(self._values):
            return self._model(*args, **kwargs)


class _HeldAt(Messenger):
    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self._values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["infer"].get("posterior") != "prior" or msg["is_observed"]:
            return
        known = self._values.get(msg["name"])
        if known is None or known.shape != msg["fn"].shape():
            known = self._values[msg["name"]] = msg["fn"].sample()
        msg["value"], msg["is_observed"], msg["mask"] = known, True, False


class _Prefix(Messenger):
    """Latent sites begin with the given values, and go on as the model draws them.

    A site that is as large as the given value is that value; `used` has the names of those met.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.used = values, set[str]()

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self.values or msg["is_observed"]:
            return
        known, drawn = self.values[msg["name"]], msg["value"]
        self.used.add(msg["name"])
        fits = known.ndim == drawn.ndim and all(
            a <= b for a, b in zip(known.shape, drawn.shape, strict=True)
        )
        if not fits:
            raise CVIError(
                f"latent site '{msg['name']}'",
                f"shape {tuple(drawn.shape)} in the model, {tuple(known.shape)} in the fit",
                "at least the elements of the fit, along every axis",
                "forecast with arguments that span the time of the fit and what comes after it",
            )
        core: Any = peel(msg["fn"])
        grown = [i - known.ndim for i in range(known.ndim) if known.shape[i] < drawn.shape[i]]
        if any(-axis <= core.event_dim for axis in grown):
            raise CVIError(
                f"latent site '{msg['name']}'",
                f"it grows along an axis whose elements a {type(core).__name__} joins, so that the "
                "new ones depend on the old",
                "new elements that the model draws by themselves, or from those before them",
                "fit on all elements at once, with the likelihood on those that are observed",
            )
        value = drawn.clone()
        value[tuple(slice(0, n) for n in known.shape)] = known
        msg["value"] = value


@torch.no_grad()
def forecast(
    model: Model, guide: AutoCVI, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int
) -> dict[str, Tensor]:
    """Draws of all sites of a model that goes on where the fitted one ended, (num_samples, *shape)."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise CVIError(f"num_samples is {num_samples!r}; expected a positive integer")
    draws: list[dict[str, Tensor]] = []
    for i in range(num_samples):
        known = guide.draw(list(guide.plan.latents))
        prefix = _Prefix(known)
        with poutine.block(), prefix:
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        if i == 0:
            with poutine.block(), _Prefix(known):
                _check_tail(trace, poutine.trace(model).get_trace(*args, **kwargs))
        gone = sorted(set(guide.plan.latents) - prefix.used)
        if gone:
            raise CVIError(
                f"latent site '{gone[0]}'",
                "the model does not sample it with these arguments",
                "all latent sites of the fit, and perhaps others after them",
                "forecast with arguments that span the time of the fit and what comes after it",
            )
        draws.append(
            {
                n: s["value"]
                for n, s in trace.nodes.items()
                if s["type"] == "sample" and not site_is_subsample(s)
            }
        )
    return {n: torch.stack([d[n] for d in draws]) for n in draws[0]}


def _check_tail(one: poutine.Trace, two: poutine.Trace) -> None:
    """No observed site sees what comes after the fit: it would have to inform it."""
    values, again = factor_values(one), factor_values(two)
    for name, value in values.items():
        if one.nodes[name]["is_observed"] and not torch.equal(value, again[name]):
            raise CVIError(
                f"observed site '{name}'",
                "it depends on latent elements that come after the fit, whose draws it would inform",
                "latents that go on by themselves: in a loop, or as sums of innovations",
                "write a step as a sample site of its own, x = pyro.sample('x', Normal(before, s)), "
                "and give no data for what is to be forecast",
            )


def _local_evidence(prepared: Prepared, plate: str) -> Tensor:
    """L(x; theta) of every row, its local latents integrated out."""
    plan = prepared.plan
    _check_averaged(plan)
    beliefs = {b.name: prepared.start(b) for b in plan.blocks}
    evaluator = Evaluator(plan, beliefs)
    settle(evaluator)
    part = prepared.parts[plate]
    total: Tensor | None = None
    for f in plan.factors:
        if plate in f.plates:
            value = sum_to_dims(evaluator.cells(f), {part.dim}).reshape(-1).expand(part.size)
            value = value / part.scale
            total = value if total is None else total + value
    for block in plan.blocks:
        own = _entropies(evaluator.beliefs[block.name], block)
        total = own if total is None else total + own
    if total is None:
        raise CVIError(f"log_predictive: no factor of the model stands in plate '{plate}'")
    return total.detach()


def _without_locals(
    given: Model, args: tuple[Any, ...], kwargs: dict[str, Any], plate: str, rows: int
) -> Tensor:
    """The rows' log densities, where every latent is shared."""
    trace = first_run(given, args, kwargs)
    total = torch.zeros(rows, device="cpu")
    for name, value in factor_values(trace).items():
        site = trace.nodes[name]
        frames = [f for f in site["cond_indep_stack"] if f.name == plate]
        if frames:
            if isinstance(site["mask"], Tensor):
                value = torch.where(site["mask"], value, torch.zeros_like(value))
            elif site["mask"] is False:
                continue
            cells = value.expand(broadcast_shapes(value.shape, site["fn"].batch_shape))
            scale = site["scale"] * frames[0].size / (frames[0].full_size or frames[0].size)
            total = total.to(cells.device) + scale * sum_to_dims(cells, {frames[0].dim}).reshape(-1)
    return total


def _entropies(belief: Belief, block: Block) -> Tensor:
    """The entropy of a local block, row by row."""
    assert block.placement is not None
    (part,) = block.placement.parts
    if isinstance(belief, GaussianBelief):
        return belief.entropies().reshape(part.size, -1).sum(-1)
    assert isinstance(belief, FamilyBelief)
    return sum_to_dims(belief.family.entropy(belief.natural), {part.dim}).reshape(-1)


class _Rows:
    """The plates that hold new rows, and how to cut the arguments into chunks."""

    def __init__(self, args: Args, plates: dict[str, int], frames: dict[str, Any]) -> None:
        self.args, self.plates, self.frames = args, plates, frames

    @staticmethod
    def of(
        model: Model,
        guide: AutoCVI,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plates: Sequence[str] | None,
    ) -> _Rows:
        fitted = guide.prepared
        if fitted is None or not guide.is_fitted:
            loaded = fitted is None and guide.is_fitted
            raise CVIError(
                "new data",
                "the guide was loaded, and does not know the sizes of its data"
                if loaded
                else "the guide has not been fitted",
                "a fitted posterior of the sites outside of the rows",
                f"call {'guide' if loaded else 'CVI.run'}(*training_args) first",
            )
        trace = first_run(model, args, kwargs)
        frames = {f.name: f for f in plate_frames(trace) if f.vectorized}
        before = fitted.sizes
        if plates is None:
            plates = [n for n, f in frames.items() if f.size != before.get(n)]
        unknown = [n for n in plates if n not in frames]
        if unknown or not plates:
            found = (
                f"no such plate: {unknown}" if unknown else "all plates have the sizes of the fit"
            )
            raise CVIError(
                "new data",
                found,
                f"plates of new rows, out of {sorted(frames)}",
                "say which plates hold the new rows, as plates=['data']",
            )
        sizes = {n: frames[n].size for n in plates}
        return _Rows((args, kwargs), sizes, frames)

    def is_local(self, guide: AutoCVI, site: str) -> bool:
        """Whether a fitted site stands in a plate of new rows."""
        return any(name in self.plates for name, *_ in guide.plan.latents[site].plates)

    def chunks(self, size: int | None) -> Iterator[tuple[Args, dict[str, tuple[int, Tensor]]]]:
        """Arguments of every chunk, and which rows of how many they are."""
        if size is None:
            everything = {
                n: (full, torch.arange(full, device="cpu")) for n, full in self.plates.items()
            }
            yield self.args, everything
            return
        if len(self.plates) != 1 or size < 1:
            raise CVIError(
                f"chunk_size={size} with new rows in the plates {sorted(self.plates)}: expected a "
                "positive size and one plate"
            )
        ((name, full),) = self.plates.items()
        args, kwargs = self.args
        if not any(_has_rows(x, full) for x in (*args, *kwargs.values())):
            raise CVIError(
                "new data",
                f"no argument is a tensor of {full} rows",
                f"the rows of plate '{name}' along the first axis of the arguments",
                "leave chunk_size out, or call once for every chunk",
            )
        for rows in torch.arange(full, device="cpu").split(size):
            part = tuple(_cut(x, full, rows) for x in args)
            named = {k: _cut(x, full, rows) for k, x in kwargs.items()}
            yield (part, named), {name: (full, rows)}


def _has_rows(x: Any, full: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == full


def _cut(x: Any, full: int, rows: Tensor) -> Any:
    return x[rows.to(x.device)] if _has_rows(x, full) else x


def settle(evaluator: Evaluator, noisy: frozenset[str] = frozenset()) -> None:
    """Bring the local blocks of new rows to their optimum; discrete ones look at the shared sites first.

    If those tell nothing about the states (all components are local), the start is random instead.
    """
    sweeper = Sweeper("stored", 1.0, 0.7)
    for block in evaluator.plan.blocks:
        if block.placement and block.is_discrete and block.name not in noisy:
            old = evaluator.beliefs[block.name]
            sweeper.deterministic(evaluator, block)
            logits = evaluator.beliefs[block.name].tensors[0]
            if bool((logits - logits.mean(-1, keepdim=True)).abs().max() < _SYMMETRIC):
                evaluator.set(block.name, old)
    sweeper.settle(evaluator, noisy, rounds=_ROUNDS, settled=_SETTLED)


def _check_local(plan: Plan, plates: Mapping[str, int]) -> None:
    if not any(b.placement for b in plan.blocks):
        raise CVIError(
            "new data",
            f"no latent site stands in the plates {sorted(plates)}",
            "latents of the rows, whose posterior is wanted",
            "use log_predictive, or pyro.infer.Predictive with this guide",
        )


def _check_averaged(plan: Plan) -> None:
    sampled = plan.sampled_sites()
    local = [s for b in plan.blocks if b.placement for s in b.sites if s in sampled]
    if local:
        raise CVIError(
            f"latent site '{local[0]}'",
            "its messages can only be sampled",
            "local latents with exact messages or quadrature: the evidence of a row is their bound",
            "use local_posteriors, and average the density over draws of what it returns",
        )


def carried(guide: AutoCVI, block: Block) -> Belief:
    """The fitted posterior of a block's sites, laid out as this block."""
    if block.layout is None:
        fitted = guide.block_of(block.sites[0])
        if fitted.sites != block.sites:
            raise CVIError(
                f"latent site '{block.sites[0]}'",
                f"its block had the sites {fitted.sites} in the fit and has {block.sites} here",
                "the same blocks outside of the new rows",
                "use the same model for new rows",
            )
        return guide.belief(fitted)
    loc, cov = carried_moments(guide, block, lambda fitted: _moments(guide.belief(fitted)))
    return GaussianBelief(loc, torch.linalg.inv(cov))


def carried_moments(
    guide: AutoCVI, block: Block, moments: Callable[[Block], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Means and covariances of a Gaussian block's sites, laid out as this block.

    `moments` gives those of a block of the guide, (elements, width) and (elements, width, width).
    """
    layout = block.layout
    assert layout is not None
    loc, cov = _zeros_like_fitted(guide, block)
    for site in block.sites:
        fitted = guide.block_of(site)
        assert fitted.layout is not None
        element, position = fitted.layout.element[site], fitted.layout.position[site]
        means = moments(fitted)[0]
        loc[layout.element[site], layout.position[site]] = means[element, position]
    for name in dict.fromkeys(guide.block_of(s).name for s in block.sites):
        sites = [s for s in block.sites if guide.block_of(s).name == name]
        cov = cov + _covariance(guide, block, sites, moments)
    return loc, cov


def _zeros_like_fitted(guide: AutoCVI, block: Block) -> tuple[Tensor, Tensor]:
    assert block.layout is not None
    like = guide.belief(guide.block_of(block.sites[0])).tensors[0]
    loc = like.new_zeros(block.layout.count, block.layout.width)
    return loc, torch.diag_embed(torch.zeros_like(loc))


def _moments(belief: Belief) -> tuple[Tensor, Tensor]:
    """Means and covariances of a Gaussian block, (elements, width) and (elements, width, width)."""
    if isinstance(belief, StructuredBelief):
        loc = belief.marginals()[0]
        return loc[None], belief.covariance(torch.arange(len(loc), device=loc.device))[None]
    assert isinstance(belief, GaussianBelief)
    return belief.loc, belief.cov


def _covariance(
    guide: AutoCVI, block: Block, sites: Sequence[str],
    moments: Callable[[Block], tuple[Tensor, Tensor]],
) -> Tensor:  # fmt: skip
    """Covariances within one fitted block, for pairs of scalars of one new element."""
    fitted = guide.block_of(sites[0])
    new, old = block.layout, fitted.layout
    assert new is not None and old is not None
    known = moments(fitted)[1]
    e_old = torch.full((new.count, new.width), -1, device=known.device)
    p_old = torch.zeros_like(e_old)
    for s in sites:
        e_old[new.element[s], new.position[s]] = old.element[s]
        p_old[new.element[s], new.position[s]] = old.position[s]
    same = (e_old[:, :, None] == e_old[:, None, :]) & (e_old[:, :, None] >= 0)
    values = known[e_old[:, :, None].clamp(min=0), p_old[:, :, None], p_old[:, None, :]]
    return torch.where(same, values, torch.zeros_like(values))
