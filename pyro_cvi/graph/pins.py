"""Masked latent cells that nothing informs are pinned to their prior.

Under `poutine.mask` (padding, `obs_mask`) the prior of a cell does not count. A cell that another factor
still informs has a flat prior, as in Pyro; one that no factor touches would have no posterior at all.
Such a cell gets the prior it was traced with as a factor of its own: it sends nothing to its parents,
and E_q[log p] - E_q[log q] = 0 for it, so that padding changes neither posterior nor bound.

A mask or scale is about the prior's density in the model's own space. Where a site stands for its
unconstrained value, the Jacobian must count once in spite of it: another factor of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.algebra.expression import site_expression
from pyro_cvi.algebra.latent import LatentTensor, expression_of
from pyro_cvi.densities import log_density
from pyro_cvi.errors import CVIError
from pyro_cvi.families import Unconstrained, log_jacobian
from pyro_cvi.graph.check import opaque_sites
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import initial_beliefs
from pyro_cvi.graph.plan import Plan
from pyro_cvi.graph.symbolic import Factor, Latent, enumerated_values, parameter_dtype
from pyro_cvi.structured import StructuredBelief

__all__ = ["jacobian_factors", "pin_factors"]

_ROUNDING = 1e3
"""Units of rounding by which a constant message may vary."""


def pin_factors(plan: Plan, trace: poutine.Trace) -> list[Factor]:
    """One factor for every latent with masked cells that no message reaches."""
    masked = {n: trace.nodes[n]["mask"] for n in plan.latents}
    masked = {n: m for n, m in masked.items() if m is False or isinstance(m, Tensor)}
    if not masked:
        return []
    evaluator = _asymmetric(plan)
    factors = []
    for name, mask in masked.items():
        if name in plan.sampled_sites():
            continue
        latent = plan.latents[name]
        off = torch.ones(latent.batch_shape, dtype=torch.bool, device=latent.value.device)
        if isinstance(mask, Tensor):
            off = ~mask.expand(latent.batch_shape)
        dead = off & ~_informed(evaluator, plan, latent)
        if bool(dead.any()):
            factors.append(_pin(latent, dead, plan.block_of(name).scale))
    return factors


def _asymmetric(plan: Plan) -> Evaluator:
    """An evaluator at which no two components are alike by accident of the start.

    Only whether messages vary is read from it, so any numbers serve for the moments.
    """
    evaluator = Evaluator(plan, initial_beliefs(plan))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in plan.blocks:
            if block.is_discrete:
                continue
            first, *others = (x.detach() for x in evaluator.leaves[block.name])
            if block.layout is None:
                others = [x + 0.1 * torch.randn_like(x) for x in others]
            evaluator.hold(block.name, (first + 0.1 * torch.randn_like(first), *others))
    return evaluator


def _informed(evaluator: Evaluator, plan: Plan, latent: Latent) -> Tensor:
    """Whether any message reaches a cell, shape batch_shape."""
    block = plan.block_of(latent.name)
    gradient = evaluator.message(block)
    belief = evaluator.beliefs[block.name]
    if block.layout is not None and isinstance(belief, StructuredBelief):
        touched = belief.touched(gradient)[block.layout.flat(latent.name)].reshape(latent.shape)
    elif block.layout is not None:
        at = (block.layout.element[latent.name], block.layout.position[latent.name])
        touched = torch.zeros(latent.shape, dtype=torch.bool, device=latent.value.device)
        if gradient[0] is not None:
            touched |= (gradient[0][at] != 0).reshape(latent.shape)
        if gradient[1] is not None:
            touched |= (gradient[1][at[0], at[1], at[1]] != 0).reshape(latent.shape)
    elif block.is_chain:
        return _informed_step(gradient, block.step(latent.name), latent)
    else:
        touched = torch.zeros((), dtype=torch.bool, device=latent.value.device)
        for g, event in zip(gradient, block.family.event_dims, strict=True):
            if g is not None:
                hit = g != 0 if latent.support is None else _tells_apart(g)
                touched = touched | (hit.flatten(-event).any(-1) if event else hit)
        extra = touched.ndim - len(latent.batch_shape)
        return touched.flatten(-extra).any(-1) if extra > 0 else touched.expand(latent.batch_shape)
    event = latent.event_dim
    return touched.flatten(-event).any(-1) if event else touched


def _informed_step(gradient: list[Tensor | None], step: int, latent: Latent) -> Tensor:
    """Whether a message reaches one step of a chain, as a state or in a pair with a neighbour."""
    touched = torch.zeros(latent.batch_shape, dtype=torch.bool, device=latent.value.device)
    states, pairs = gradient
    if states is not None:
        touched = touched | _tells_apart(states[..., step, :]).any(-1)
    if pairs is not None and step > 0:
        touched = touched | _tells_apart(pairs[..., step - 1, :, :]).flatten(-2).any(-1)
    if pairs is not None and step < pairs.shape[-3]:
        touched = touched | _tells_apart(pairs[..., step, :, :].mT).flatten(-2).any(-1)
    return touched


def _tells_apart(g: Tensor) -> Tensor:
    """Where a message is not constant over a site's states (its last axis): a constant says nothing."""
    first = g[..., :1]
    return (g - first).abs() > _ROUNDING * torch.finfo(g.dtype).eps * (1 + first.abs())


def jacobian_factors(plan: Plan, trace: poutine.Trace) -> list[Factor]:
    """What the masked or scaled priors of unconstrained sites lack of the log Jacobian."""
    factors = []
    for name, latent in plan.latents.items():
        if latent.transform is None:
            continue
        site, scale = trace.nodes[name], plan.block_of(name).scale
        weight = site["scale"]
        if site["mask"] is not None and site["mask"] is not True:
            weight = torch.as_tensor(site["mask"], device=latent.value.device) * weight
        missing = scale - weight
        if isinstance(missing, Tensor) and not bool((missing != 0).any()):
            continue
        if not isinstance(missing, Tensor) and missing == 0:
            continue
        u = _symbol(latent)
        x = latent.transform(u)
        e = expression_of(log_jacobian(latent.transform, u, x, latent.event_dim))
        if opaque_sites(e):
            raise CVIError(
                f"latent site '{name}'",
                "it is masked or scaled, and its support is mapped to the real line as a whole",
                "poutine.mask and poutine.scale on sites whose elements are mapped one by one",
                "leave the mask or scale off this site",
            )
        plates = frozenset(n for n, *_ in latent.plates)
        factors.append(Factor(f"{name} (Jacobian)", e, missing, (), False, plates=plates))
    return factors


def _symbol(latent: Latent) -> LatentTensor:
    return LatentTensor.make(latent.value, site_expression(latent.ref, latent.value.device))


def _pin(latent: Latent, dead: Tensor, scale: float) -> Factor:
    if latent.enum_dim is None:
        value: Any = _symbol(latent)
        enumerated: tuple[str, ...] = ()
    else:
        value = enumerated_values({latent.name: latent})[latent.name]
        dtype = parameter_dtype(latent.prior)
        value = value.to(dtype) if dtype is not None else value
        enumerated = (latent.name,)
    prior = latent.prior
    if isinstance(prior, Unconstrained):  # its Jacobian is a factor of its own
        value, prior = prior.transform(value), prior.constrained
    while hasattr(prior, "_mask"):
        prior = prior.base_dist
    e = expression_of(log_density(prior, value))
    weight = dead.to(parameter_dtype(prior) or torch.get_default_dtype()) * scale
    plates = frozenset(name for name, *_ in latent.plates)
    return Factor(f"{latent.name} (masked cells)", e, weight, enumerated, False, plates=plates)
