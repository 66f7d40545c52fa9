"""Where a fit starts: near the prior's mean, with little spread, so that the first step is Newton's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import (
    InitMessenger,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_uniform,
    init_to_value,
)
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.families import BETA, DIRICHLET, GAMMA, GAUSSIAN, INVERSE_GAMMA, WISHART
from pyro_cvi.gaussians.chain import Blocks, Pattern
from pyro_cvi.gaussians.process import Predictors
from pyro_cvi.graph.chain import Chain
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.process import Process
from pyro_cvi.graph.symbolic import Latent
from pyro_cvi.structured import ChainBelief, ProcessBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = [
    "START_SPREAD",
    "apart",
    "around",
    "initial_belief",
    "initial_beliefs",
    "is_by_strategy",
    "located_points",
    "prior_spread",
]

START_SPREAD = 0.1
"""Largest standard deviation of a Gaussian scalar at the start (Pyro's own `init_scale`), and relative
one of a site of another family that starts at a point."""
_PARTING = 4.0
"""Shape of the Gamma noise of mean one in the start of positive sites that are sampled."""
_LEAST = 0.5
"""Concentration of Beta and Dirichlet sites beside sampled factors, at least, where they start."""
_GENERIC = (init_to_feasible, init_to_mean, init_to_median, init_to_uniform)
"""Ways to start that mean nothing for a discrete site."""


def initial_beliefs(plan: Plan, located: Mapping[str, Tensor] | None = None) -> dict[str, Belief]:
    """One belief per block; `located` gives the starting point of some sites."""
    return {b.name: initial_belief(plan, b, located) for b in plan.blocks}


def initial_belief(
    plan: Plan,
    block: Block,
    located: Mapping[str, Tensor] | None = None,
    moved: frozenset[str] = frozenset(),
) -> Belief:
    """The starting belief of one block; sites that are `moved` start at their value, narrow."""
    latents = plan.latents
    own = {n: latents[n].value for n in block.sites if n in moved and latents[n].support is None}
    located = {**own, **(located or {})}
    belief = _usual(plan, block, located)
    if block.layout is not None:
        return belief
    tensors = belief.tensors
    for name in block.sites:
        if name in located:
            found = around(plan.latents[name], located[name])
            if block.is_chain:
                assert found is not None
                tensors[0][..., block.step(name), :] = found[0]
            else:
                tensors = found or tensors
    return FamilyBelief(block.family, tensors)


def _usual(plan: Plan, block: Block, located: Mapping[str, Tensor]) -> Belief:
    if block.layout is not None:
        return _gaussian(plan, block, located)
    latent = plan.latents[block.sites[0]]
    if latent.enum_dim is not None:
        assert latent.support is not None
        dtype = latent.dtype or torch.get_default_dtype()
        shape = (*latent.batch_shape, latent.support.shape[0])
        if block.is_chain:
            return _chain(block, shape, dtype, latent.support.device)
        logits = torch.randn(shape, dtype=dtype, device=latent.support.device)
        return FamilyBelief(latent.family, (logits,))
    natural = latent.family.from_distribution(latent.prior)
    if latent.name in plan.sampled_sites() and latent.family in (GAMMA, INVERSE_GAMMA):
        # Under the prior itself, wide and perhaps without a mean, a sampled factor would be all noise.
        middle = _moment(latent.prior, "mean", latent.value).expand(latent.shape)
        found = around(latent, apart(middle))
        assert found is not None
        natural = found
    if block.name in plan.noisy() and latent.family in (BETA, DIRICHLET):
        # Steps that are not tested do not come back from where drawn parents have put it, at an edge.
        natural = tuple(n.clamp(min=_LEAST - 1) for n in natural)
    shape = latent.shape[: len(latent.shape) - latent.family.event_dim]
    natural = latent.family.expand(natural, torch.Size(shape))
    return FamilyBelief(latent.family, tuple(n.detach().clone() for n in natural))


def apart(middle: Tensor) -> Tensor:
    """Points near positive ones, by factors of .5 to 1.6: parts of a sum must be able to part."""
    noise: Tensor = torch._standard_gamma(torch.full_like(middle, _PARTING))
    return (middle * noise / _PARTING).clamp(min=torch.finfo(middle.dtype).tiny)


def _chain(
    block: Block, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FamilyBelief:
    """Random states, no preference among transitions."""
    *batch, k = shape
    steps = len(block.sites)
    states = torch.randn(*batch, steps, k, dtype=dtype, device=device)
    pairs = torch.zeros(*batch, steps - 1, k, k, dtype=dtype, device=device)
    return FamilyBelief(block.family, (states, pairs))


def _gaussian(plan: Plan, block: Block, located: Mapping[str, Tensor]) -> Belief:
    layout = block.layout
    assert layout is not None
    like = plan.latents[block.sites[0]].value
    for site in block.sites[1:]:  # sites of two dtypes share the wider one
        wider = torch.promote_types(like.dtype, plan.latents[site].value.dtype)
        like = like.to(wider)
    loc = like.new_zeros(layout.count, layout.width)
    variance = torch.ones_like(loc)
    for site in block.sites:
        latent = plan.latents[site]
        where = (layout.element[site], layout.position[site])
        start = _moment(latent.prior, "mean", latent.value)
        if not latent.held:
            drawn = site in plan.scattered and not latent.joint
            start = located.get(site, latent.value if drawn else start)
        spread = _moment(latent.prior, "variance", torch.ones_like(latent.value))
        loc[where] = start.detach().expand(latent.shape).reshape(-1).to(loc.dtype)
        flat = spread.detach().expand(latent.shape).reshape(-1).to(loc.dtype)
        variance[where] = flat if latent.held else flat.clamp(max=START_SPREAD**2)
    if isinstance(block.form, Process):
        return _process(block.form.predictors, loc[0], variance[0])
    if isinstance(block.form, Chain):
        return _chain_of_nodes(block.form.pattern, loc[0], variance[0])
    return GaussianBelief(loc, torch.diag_embed(1 / variance))


def prior_spread(plan: Plan, block: Block) -> Tensor:
    """Standard deviations of the scalars of a Gaussian block under their priors, one where unknown."""
    layout = block.layout
    assert layout is not None
    found = torch.ones(layout.count, layout.width, device=plan.latents[block.sites[0]].value.device)
    for site in block.sites:
        latent = plan.latents[site]
        variance = _moment(latent.prior, "variance", torch.ones_like(latent.value))
        flat = variance.detach().expand(latent.shape).reshape(-1).to(found.dtype)
        found[layout.element[site], layout.position[site]] = flat.sqrt()
    return found


def _chain_of_nodes(p: Pattern, loc: Tensor, variance: Tensor) -> ChainBelief:
    """Independent scalars."""
    nodes, border = p.split(loc)
    precision, own = p.placed(1 / variance)
    node = torch.diag_embed(precision + p.filled.to(precision))
    step = node.new_zeros(p.count, p.steps - 1, p.node, p.node)
    edge = node.new_zeros(p.count, p.steps, p.node, p.border)
    return ChainBelief(p, nodes, border, Blocks(node, step, edge, torch.diag_embed(own)))


def _process(spec: Predictors, loc: Tensor, variance: Tensor) -> ProcessBelief:
    """Open scalars near their prior means and predictors with standard deviations of at most 0.1.

    Where the prior is kept as a covariance, the start is that prior: from a narrow one, a Gaussian
    process with a large variance takes half as many steps again.
    """
    pseudo = 0.0 if len(spec.closed) else START_SPREAD**-2
    curvature = [
        pseudo * torch.eye(w, dtype=loc.dtype, device=loc.device).expand(c, w, w)
        for c, w in zip(spec.counts, spec.widths, strict=True)
    ]
    open_loc, precision = loc[spec.open], 1 / variance[spec.open]
    return ProcessBelief(spec, open_loc, precision, loc.new_zeros(spec.rows), curvature)


def _moment(prior: Any, name: str, default: Tensor) -> Tensor:
    try:
        value = getattr(prior, name)
    except (NotImplementedError, AttributeError):
        return default
    if isinstance(value, Tensor) and bool(value.isfinite().all()):
        return value
    return default


# --- starting points -------------------------------------------------------------------------------


def located_points(
    latents: Mapping[str, Latent],
    init_loc_fn: Callable[..., Any],
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Tensor]:
    """Where `init_loc_fn` puts the sites, in one run in which each site sees those before it."""
    found: dict[str, Tensor] = {}

    def start(site: Any) -> Any:
        name = site["name"]
        by_strategy = is_by_strategy(init_loc_fn, name)
        if name not in latents or (by_strategy and latents[name].enum_dim is not None):
            return site["fn"].sample()
        value = init_loc_fn(site)
        if by_strategy and not bool(value.isfinite().all()):  # the mean of a law that has none
            return latents[name].constrained(latents[name].value.detach())
        point = _checked_point(latents[name], value, site["fn"])
        if not by_strategy:
            _check_startable(latents[name], point)
        found[name] = latents[name].unconstrained(point)
        return point

    with poutine.block(), InitMessenger(start):
        poutine.trace(model).get_trace(*args, **kwargs)
    return found


def is_by_strategy(init_loc_fn: Any, site: str) -> bool:
    """Whether a start comes from one of Pyro's strategies, which say nothing about particular sites."""
    core = getattr(init_loc_fn, "func", init_loc_fn)
    if core is init_to_value:
        return site not in (getattr(init_loc_fn, "keywords", None) or {}).get("values", {})
    return core in _GENERIC


def _checked_point(latent: Latent, value: Any, prior: Any) -> Tensor:
    inside, found = False, f"a {type(value).__name__}"
    if isinstance(value, Tensor | float | int):
        point = torch.as_tensor(value, device=latent.value.device).detach().to(latent.value.dtype)
        shape = tuple(point.shape)
        found = f"a value of shape {shape} that does not fit, or lies outside of the support"
        try:
            point = point.expand(prior.batch_shape + prior.event_shape)
            inside = bool(prior.support.check(point).all() and point.isfinite().all())
        except RuntimeError:
            inside = False
    if not inside:
        raise CVIError(
            f"latent site '{latent.name}'",
            f"init_loc_fn gave {found}",
            f"a value of shape {tuple(prior.batch_shape + prior.event_shape)} in the support "
            f"{prior.support}",
            "check the values that init_loc_fn returns for this site",
        )
    return point


def _check_startable(latent: Latent, point: Tensor) -> None:
    """A Gaussian, or a family with narrow members around a point."""
    if latent.family is GAUSSIAN or around(latent, point) is not None:
        return
    name = latent.family.name
    raise CVIError(
        f"latent site '{latent.name}'",
        f"init_loc_fn places it, and its family {name} does not say what lies near a point",
        "a family with the method `around(point, spread)`, or a site that is not placed",
        f"give {name} that method, or leave the site out of init_loc_fn: it starts at its prior",
    )


def around(latent: Latent, point: Tensor) -> tuple[Tensor, ...] | None:
    """A narrow member of the site's family around a point; None if the family has no rule for that.

    Gamma, inverse Gamma: mean `point`. Beta, Dirichlet: mean `point`, but for what is next to zero or
    one: a member at the edge says that the rest is impossible. Discrete: 9/10 on `point`.
    """
    n = START_SPREAD**-2
    if latent.support is not None:
        values = latent.support.reshape(len(latent.support), -1)
        same = (point.reshape(*latent.batch_shape, 1, -1) == values).all(-1)
        same = same.to(latent.dtype)
        return ((0.9 * same + 0.1 / len(values)).log(),)
    laws = {
        GAMMA: lambda: dist.Gamma(n, n / point),
        INVERSE_GAMMA: lambda: dist.InverseGamma(n + 1, n * point),
        BETA: lambda: dist.Beta((n * point).clamp(min=1), (n * (1 - point)).clamp(min=1)),
        DIRICHLET: lambda: dist.Dirichlet((n * point).clamp(min=1)),
        WISHART: lambda: dist.Wishart(n + point.shape[-1], point / (n + point.shape[-1])),
    }
    law = laws.get(latent.family)
    if law is None:
        return latent.family.around(point, START_SPREAD)
    return latent.family.from_distribution(law())
