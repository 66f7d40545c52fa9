"""Where a fit starts: near the prior's mean, with little spread, so that the first step is Newton's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.symbolic import parameter_dtype
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["initial_belief", "initial_beliefs"]

_SPREAD = 0.1
"""Largest standard deviation of a Gaussian scalar at the start (Pyro's own `init_scale`)."""


def initial_beliefs(plan: Plan, located: dict[str, Tensor] | None = None) -> dict[str, Belief]:
    """One belief per block; `located` gives the starting point of some sites."""
    return {b.name: initial_belief(plan, b, located) for b in plan.blocks}


def initial_belief(plan: Plan, block: Block, located: dict[str, Tensor] | None = None) -> Belief:
    """The starting belief of one block."""
    located = located or {}
    if block.layout is not None:
        return _gaussian(plan, block, located)
    latent = plan.latents[block.sites[0]]
    if latent.enum_dim is not None:
        assert latent.support is not None
        dtype = parameter_dtype(latent.prior) or torch.get_default_dtype()
        shape = (*latent.batch_shape, latent.support.shape[0])
        if block.is_chain:
            return _chain(block, shape, dtype, latent.support.device)
        logits = torch.randn(shape, dtype=dtype, device=latent.support.device)
        return FamilyBelief(latent.family, (logits,))
    natural = latent.family.from_distribution(latent.prior)
    shape = latent.shape[: len(latent.shape) - latent.family.event_dim]
    natural = latent.family.expand(natural, torch.Size(shape))
    return FamilyBelief(latent.family, tuple(n.detach().clone() for n in natural))


def _chain(
    block: Block, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FamilyBelief:
    """Random states, no preference among transitions."""
    *batch, k = shape
    steps = len(block.sites)
    states = torch.randn(*batch, steps, k, dtype=dtype, device=device)
    pairs = torch.zeros(*batch, steps - 1, k, k, dtype=dtype, device=device)
    return FamilyBelief(block.family, (states, pairs))


def _gaussian(plan: Plan, block: Block, located: dict[str, Tensor]) -> GaussianBelief:
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
        usual = (
            latent.value if site in plan.scattered else _moment(latent.prior, "mean", latent.value)
        )
        start = located.get(site, usual)
        spread = _moment(latent.prior, "variance", torch.ones_like(latent.value))
        loc[where] = start.detach().expand(latent.shape).reshape(-1).to(loc.dtype)
        flat = spread.detach().expand(latent.shape).reshape(-1).to(loc.dtype)
        variance[where] = flat.clamp(max=_SPREAD**2)
    return GaussianBelief(loc, torch.diag_embed(1 / variance))


def _moment(prior: Any, name: str, default: Tensor) -> Tensor:
    try:
        value = getattr(prior, name)
    except (NotImplementedError, AttributeError):
        return default
    if isinstance(value, Tensor) and bool(value.isfinite().all()):
        return value
    return default
