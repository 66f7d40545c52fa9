"""What a model must satisfy before it is analysed; every error names the site and a remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pyro
from pyro import poutine
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.graph.plan import Plan
from pyro_cvi.graph.symbolic import Latent, is_factor_site
from pyro_cvi.graph.windows import Part
from pyro_cvi.linalg import all_finite

__all__ = [
    "check_batch",
    "check_data",
    "check_local_data",
    "check_model",
    "check_same_sites",
    "check_windows",
]


def check_model(model: Callable[..., Any]) -> None:
    """A callable, and no Gaussian process that samples its latent in vain: the prior would come back."""
    if not callable(model):
        raise CVIError(
            "model",
            f"the model is a {type(model).__name__}",
            "a callable with pyro.sample statements",
            "pass the function itself, as in CVI(model, AutoCVI(model))",
        )
    module, owner = sys.modules.get("pyro.contrib.gp.models"), getattr(model, "__self__", None)
    kinds = () if module is None else (module.VariationalGP, module.VariationalSparseGP)
    if isinstance(owner, kinds):
        kind = type(owner).__name__
        raise CVIError(
            "model",
            f"{kind}.model, whose likelihood reads the guide's moments and not the value it samples",
            "a model whose data depend on its latents",
            f"pyro_cvi.gp.GaussianProcess(gp) is the model of a {kind}",
        )


def check_same_sites(old: Mapping[str, Latent], new: Mapping[str, Latent]) -> None:
    """The latents are those of the first call, with the same shapes, families and states."""
    if set(old) != set(new):
        gone, came = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        raise CVIError(
            "model",
            f"its latent sites changed between calls (gone: {gone}, new: {came})",
            "the same latent sites at every step",
            "build a new AutoCVI for the other model, or condition on the same sites each time",
        )
    for name, latent in new.items():
        if latent.shape != old[name].shape or latent.family is not old[name].family:
            raise CVIError(
                f"latent site '{name}'",
                f"shape {latent.shape} ({latent.family.name})",
                f"shape {old[name].shape} ({old[name].family.name}), as at the first call",
                "build a new AutoCVI for data of another size (its local latents are fitted to "
                "the rows seen first)",
            )
        states, before = latent.support, old[name].support
        if states is not None and before is not None and not _same_states(states, before):
            raise CVIError(
                f"latent site '{name}'",
                f"{len(states)} states",
                f"the {len(before)} states that it had at the first call",
                "give it the most states from the first call on, or build a new AutoCVI",
            )


def _same_states(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def check_windows(plan: Plan, around: Mapping[str, tuple[Part, ...]]) -> None:
    """A site that was fitted on all elements of a plate is not seen in part now."""
    for name, parts in around.items():
        if parts and plan.block_of(name).placement is None:
            raise CVIError(
                f"latent site '{name}'",
                f"it was fitted on all elements of plate '{parts[0].name}', which now holds "
                f"{parts[0].size} of {parts[0].full}",
                "minibatches from the first step on, or never",
                "build a new AutoCVI and fit it by minibatches (all elements at once may follow)",
            )


def check_local_data(plan: Plan, parts: Mapping[str, Part]) -> None:
    """A local latent sees all of its data: its factors are in no other subsampled plate."""
    subsampled = {p.name for p in parts.values() if p.scale != 1}
    for block in plan.blocks:
        if block.placement is None:
            continue
        own = {p.name for p in block.placement.parts}
        for f in plan.factors_of(block.name):
            other = (f.plates & subsampled) - own
            if other and own & subsampled:
                raise CVIError(
                    f"latent site '{block.sites[0]}'",
                    f"it is local in the subsampled plate '{min(own & subsampled)}', and its data "
                    f"in factor '{f.name}' are in the subsampled plate '{min(other)}' as well",
                    "all data of the elements that a step sees",
                    "subsample one of the two plates, and let the other hold all its elements",
                )


def check_data(trace: poutine.Trace) -> None:
    """Observed values are finite wherever the mask is on."""
    for name, site in trace.nodes.items():
        if not is_factor_site(site):
            continue
        mask = site["mask"]
        if site["is_observed"] and isinstance(site["value"], Tensor) and mask is not False:
            _check_finite(name, site["value"], mask, site["fn"])


def _check_finite(name: str, value: Tensor, mask: Any, fn: Any) -> None:
    if not value.dtype.is_floating_point or hasattr(fn, "log_factor"):
        return
    if all_finite(value):
        return
    bad = ~value.isfinite()
    if isinstance(mask, Tensor):
        event = (1,) * fn.event_dim
        bad = bad & mask.reshape((*mask.shape, *event))
    inner = fn
    while hasattr(inner, "base_dist") and not hasattr(inner, "_mask"):
        inner = inner.base_dist
    if isinstance(getattr(inner, "_mask", None), Tensor):
        event = (1,) * (bad.ndim - inner._mask.ndim)
        bad = bad & inner._mask.reshape((*inner._mask.shape, *event))
    if bool(bad.any()):
        count = int(bad.sum())
        raise CVIError(
            f"observed site '{name}'",
            f"{count} of {value.numel()} values are NaN or infinite",
            "finite data wherever the mask is on",
            "drop these rows, or mask them with poutine.mask or obs_mask",
        )


def check_batch(trace: poutine.Trace, values: Mapping[str, Tensor]) -> None:
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
                f"site '{name}'",
                f"a log density of shape {shape}, of which dim {extra[0]} is in no plate",
                "every batch dim declared by pyro.plate, or made part of the event",
                f"put the statement in `with pyro.plate('data', {shape[extra[0]]}):`, or add "
                f".to_event({-extra[0]}) to its distribution",
            )
