"""The self-check: every factor's expression against its real log_prob at a fresh random point.

In-place writes, `.item()`, numpy and branches on values can lose a dependence silently. A plain run of
the model at values it has not seen tells: a factor that disagrees is opaque in all sites upstream.
The same run gives the fingerprint by which a later step knows that model and data are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.algebra.evaluate import OpaqueError, evaluate, point_reader
from pyro_cvi.algebra.expression import Expression, opaque
from pyro_cvi.algebra.latent import SCORE_ONLY
from pyro_cvi.algebra.reason import Cause, Reason
from pyro_cvi.densities import digest, law, plain_log_prob
from pyro_cvi.graph.masked import fill_masked
from pyro_cvi.graph.symbolic import Factor, Symbolic, is_factor_site

__all__ = [
    "agree",
    "all_opaque",
    "checked",
    "checked_pairs",
    "factor_values",
    "fingerprint",
    "opaque_sites",
    "site_density",
]

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-4}


def factor_values(trace: poutine.Trace) -> dict[str, Tensor]:
    """log p of every factor in a plain run, before scale and mask."""
    return {n: _factor_value(n, s) for n, s in trace.nodes.items() if is_factor_site(s)}


@torch.no_grad()
def _factor_value(name: str, site: Any) -> Tensor:
    return site_density(name, site)


def site_density(name: str, site: Any) -> Tensor:
    """log p of one site of a plain run, before scale and mask."""
    fn, value = site["fn"], site["value"]
    if hasattr(fn, "log_factor"):
        result: Tensor = fn.log_factor
        return result
    if isinstance(site["mask"], Tensor) and not bool(site["mask"].any()):
        return torch.zeros(fn.batch_shape, device=value.device)  # nothing of it counts
    if site["is_observed"] and isinstance(site["mask"], Tensor):
        value = fill_masked(value, site["mask"], fn)
    try:
        return plain_log_prob(fn, value)
    except Exception as error:
        error.last_site = name  # type: ignore[attr-defined]
        raise


def fingerprint(trace: poutine.Trace) -> tuple[Any, ...]:
    """What must be the same for a plan to hold.

    Per factor: whether it is observed, its law, its data, scale and mask. The law is the parameters of a
    distribution that has no others, else its density cell by cell; sums would not do, for permuted rows
    have the same. A table over states, rows and columns is thus never formed.
    """
    entries = []
    for name, site in trace.nodes.items():
        if is_factor_site(site):
            data = site["value"] if site["is_observed"] else None
            entries.append(
                (
                    name,
                    site["is_observed"],
                    known if (known := law(site["fn"])) else digest(_factor_value(name, site)),
                    digest(data),
                    digest(site["scale"]),
                    digest(site["mask"]),
                )
            )
    return tuple(entries)


def checked(
    symbolic: Symbolic, runs: Sequence[poutine.Trace], values: Sequence[Mapping[str, Tensor]]
) -> Symbolic:
    """The symbolic run with every factor that fails the check made opaque in its upstream sites.

    `runs` are plain runs at random points ever closer to the prior's mean: far out a density may
    overflow or be clamped (probabilities of one), so agreement at one of the points is enough. A lost
    dependence disagrees at all of them.
    """
    factors = []
    points = [_point(symbolic, run) for run in runs]
    for f in symbolic.factors:
        agrees = any(
            _agrees(f, symbolic, run.nodes[f.name], point, real[f.name])
            for run, point, real in zip(runs, points, values, strict=True)
        )
        factors.append(f if agrees else _made_opaque(f, symbolic))
    return replace(symbolic, factors=factors)


def checked_pairs(
    symbolic: Symbolic,
    held: Sequence[Symbolic],
    runs: Sequence[poutine.Trace],
    values: Sequence[Mapping[str, Tensor]],
) -> Symbolic:
    """As `checked`, for factors with opaque parts: `held[i]` has their sites fixed at `runs[i]`."""
    factors = []
    for i, f in enumerate(symbolic.factors):
        if opaque_sites(f.expression) or f.forced:
            agrees = any(
                _agrees(h.factors[i], symbolic, r.nodes[f.name], _point(symbolic, r), v[f.name])
                for h, r, v in zip(held, runs, values, strict=True)
            )
            f = f if agrees else _made_opaque(f, symbolic)
        factors.append(f)
    return replace(symbolic, factors=factors)


def opaque_sites(e: Expression) -> frozenset[str]:
    """The sites of all opaque parts of an expression."""
    return frozenset().union(*(o.sites for o in e.opaque))


def _point(symbolic: Symbolic, run: poutine.Trace) -> dict[str, Tensor]:
    return {n: run.nodes[n]["value"] for n in symbolic.latents}


def _agrees(
    f: Factor, symbolic: Symbolic, site: Any, point: Mapping[str, Tensor], real: Tensor
) -> bool:
    try:
        with torch.no_grad():
            own = {s: point[s] for s in f.expression.sites}
            mine = evaluate(f.expression, point_reader(own)).expand(f.expression.shape)
    except OpaqueError:
        return True  # what is opaque is sampled: there is no claim to check
    return agree(mine, real, site["mask"], own.values())


def _made_opaque(f: Factor, symbolic: Symbolic) -> Factor:
    found = "the self-check found a dependence that torch operations did not show"
    reason = Reason(f"{found}, {SCORE_ONLY}", Cause.NO_GRADIENT)
    written = [n for n in _upstream(f, symbolic) if n in symbolic.recorder.written]
    if written:
        how = symbolic.recorder.written[written[0]]
        reason = Reason(
            f"the self-check found that '{written[0]}' was written into a tensor by {how}"
        )
    return all_opaque(f, symbolic, reason)


def all_opaque(f: Factor, symbolic: Symbolic, reason: Reason) -> Factor:
    """The factor as an unknown function of every continuous site up to it."""
    sites = _upstream(f, symbolic)
    e = opaque(sites, reason, f.expression.shape)
    return replace(f, expression=e, forced={**dict.fromkeys(sites, reason), **f.forced})


def _upstream(f: Factor, symbolic: Symbolic) -> list[str]:
    upstream = symbolic.order[: symbolic.order.index(f.name) + 1]
    return [n for n in upstream if n in symbolic.latents and symbolic.latents[n].enum_dim is None]


def agree(mine: Tensor, real: Tensor, mask: Any, at: Iterable[Tensor] = ()) -> bool:
    """Whether two log densities are equal to rounding, wherever the mask is on.

    Rounding is that of the coarsest of their dtypes and of those of the values `at` which they are:
    float64 data beside float32 latents have the digits of these.
    """
    if mask is False:
        return True
    try:
        mine, real = torch.broadcast_tensors(mine, real)
    except RuntimeError:
        return False
    floating = [x.dtype for x in (mine, real, *at) if x.is_floating_point()]
    tol = max(_TOLERANCE.get(d, 1e-2) for d in floating)
    # A density is a difference of large numbers when the point is far out: compare on their scale.
    if bool(((mine - real).abs_() <= real.abs().add_(1).mul_(tol)).all()):
        return True
    keep = real.isfinite()
    if isinstance(mask, Tensor):
        keep = keep & mask.expand(keep.shape)
    bound = tol * (1 + real.abs())
    bad = keep & ~((mine - real).abs() <= bound)
    # Where the density is zero or overflows, the expression must say so too.
    lost = ~real.isfinite() & mine.isfinite()
    if isinstance(mask, Tensor):
        lost = lost & mask.expand(lost.shape)
    return not bool(bad.any()) and not bool(lost.any())
