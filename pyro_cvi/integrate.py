"""integrate: the posterior averaged over a few hyperparameters, in the manner of INLA.

    p(x | y)  ~  sum_k w_k q(x | theta_k),        w_k  proportional to  exp(L(theta_k)) volume_k

with q(x | theta) the fit of the model conditioned on theta, L(theta) its bound on log p(y, theta), and
theta on the real line: the logarithm of its Jacobian is part of L. Where the points are is the matter of
`exploration`.

Reference: H. Rue, S. Martino, N. Chopin (2009), Approximate Bayesian inference for latent Gaussian
models by using integrated nested Laplace approximations, JRSS B 71; the bound stands for their Laplace
approximation of p(theta | y), and q(x | theta) for theirs of p(x | theta, y).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from pyro import poutine

from pyro_cvi.conditional import Conditional
from pyro_cvi.conditioned import Coordinates, heights
from pyro_cvi.errors import CVIError, CVIWarning, message
from pyro_cvi.exploration import Design, explore
from pyro_cvi.guide import AutoCVI
from pyro_cvi.infer import CVI
from pyro_cvi.integrated import IntegratedPosterior
from pyro_cvi.interpolation import Between, Interpolant, calibrated
from pyro_cvi.mixture import Tabulated, tabulate
from pyro_cvi.modes import public_call

__all__ = ["IntegratedPosterior", "integrate"]

_MOST = 6
"""Scalars that can be integrated over."""
_LEAST = 1e-5
"""Points of a smaller share than this of the largest weight are left out of the mixture."""
_FEW = 0.1
"""Share of the quasi-random points that should count."""


@public_call
def integrate(
    cvi: CVI, sites: str | Sequence[str], *args: Any, num_points: int = 64, **kwargs: Any
) -> IntegratedPosterior:
    """p(x | y) = integral p(x | y, theta) p(theta | y) dtheta over the sites theta, by fits at points.

    At each point the model is conditioned on theta and fitted, from where the fit of the point next to
    it ended: a few sweeps. Over one or two scalars the points are a lattice grown from the mode, 10 to
    60 of them; over three to six they are `num_points` quasi-random ones about it, after some 6 to 40
    that find it. The guide of `cvi` is read and not changed, and neither is torch's random state.

    Arguments:
        cvi: a CVI of the whole model, whose fit says where theta is; one that has not been run is, in a
            copy.
        sites: the hyperparameters, continuous latents of at most six unconstrained scalars in all:
            scales, precisions, correlations.
        args, kwargs: the model's arguments, as in `run`.
        num_points: of a design over three or more scalars; an even number.

    Raises:
        CVIError: for sites that are discrete, observed or not there, too many scalars, subsampled plates
            and learnt parameters.

    Warns (CVIWarning) where fits fail or do not settle, and where factors are sampled and the bounds at
    the points are so noisy that weights are off by a twentieth.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import CVI, AutoCVI, integrate
        >>> def model(y):
        ...     s = pyro.sample("s", dist.HalfCauchy(1.0))
        ...     with pyro.plate("groups", len(y)):
        ...         u = pyro.sample("u", dist.Normal(0.0, s))
        ...         pyro.sample("y", dist.Normal(u, 1.0), obs=y)
        >>> y = torch.tensor([-2.0, 0.5, 1.0, 3.0])
        >>> cvi = CVI(model, AutoCVI(model))
        >>> result = cvi.run(y)
        >>> posterior = integrate(cvi, "s", y)
        >>> bool(posterior.posterior("s").stddev > cvi.guide.posterior("s").stddev)
        True
    """
    if not isinstance(sites, str | Sequence):
        raise CVIError(f"integrate({sites!r}): expected the name of a site, or a list of names")
    names = (sites,) if isinstance(sites, str) else tuple(sites)
    _check_call(cvi, names, num_points)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        cvi = _run(cvi, args, kwargs)
        _check_fit(cvi, names)
        with poutine.block():
            trace = poutine.trace(cvi.model).get_trace(*args, **kwargs)
        _check_sites(cvi, names, trace)
        coordinates = Coordinates(cvi.guide, names, trace)
        _check_size(coordinates)
        surface = heights(cvi, coordinates, args, kwargs)
        start, scale = coordinates.start(cvi.guide)
        design = explore(surface, start, scale, num_points, coordinates.likely())
    surface.warn(design)
    return _posterior(cvi.guide, coordinates, design)


# --- the result --------------------------------------------------------------------------------------


def _posterior(guide: AutoCVI, coordinates: Coordinates, design: Design) -> IntegratedPosterior:
    bounds = torch.tensor(
        [p.height for p in design.points], dtype=torch.float64, device=design.log_volumes.device
    )
    logs = bounds + design.log_volumes
    at = torch.stack([p.at for p in design.points])
    weights = logs.softmax(0)
    effective = float(1 / weights.square().sum())
    if coordinates.size > 2 and effective < _FEW * len(at):
        _warn(
            f"integrate({list(coordinates.sites)})",
            f"{effective:.1f} of {len(at)} points carry the weight",
            "a posterior of the hyperparameters that is near to a split normal one",
            "give num_points a larger value, or integrate over fewer sites",
        )
    fine_weights = (
        Interpolant(design, coordinates.known)(design.fine) + design.fine_log_volume
    ).softmax(0)
    kept = weights > _LEAST * weights.max()
    at, weights = at[kept], weights[kept] / weights[kept].sum()
    x, fine = coordinates.features(at), coordinates.features(design.fine)
    weights = calibrated(weights, x, fine_weights @ fine)
    laws = {}
    for site, own in coordinates.slices.items():
        columns = range(own.start, own.stop)
        widths = (design.blur * design.axes.norm(dim=1)).tolist()
        tables = [tabulate(design.fine[:, j], fine_weights, widths[j]) for j in columns]
        laws[site] = Tabulated(coordinates.places[site], tables, design.fine[:, own], fine_weights)
    fits: list[AutoCVI] = [p.state for p in design.points if isinstance(p.state, AutoCVI)]
    return IntegratedPosterior(
        guide.without_model(),
        [f for f, keep in zip(fits, kept.tolist(), strict=False) if keep],
        coordinates.values(at),
        weights,
        bounds[kept],
        float(logs.logsumexp(0)),
        laws,
        Conditional(fits, Between(design)) if fits else None,
    )


# --- what is refused -------------------------------------------------------------------------------


def _warn(where: str, found: str, expected: str, remedy: str) -> None:
    warnings.warn(message(where, found, expected, remedy), CVIWarning, stacklevel=4)


def _check_call(cvi: CVI, sites: tuple[str, ...], num_points: int) -> None:
    where = f"integrate({list(sites)})"
    if not isinstance(cvi, CVI):
        raise CVIError(
            where,
            f"the first argument is a {type(cvi).__name__}",
            "a CVI",
            "cvi = CVI(model, AutoCVI(model)); cvi.run(*args); integrate(cvi, sites, *args)",
        )
    if (
        isinstance(num_points, bool)
        or not isinstance(num_points, int)
        or num_points < 16
        or num_points % 2
    ):
        raise CVIError(f"num_points is {num_points!r}; expected an even integer of at least 16")
    if not isinstance(cvi.guide, AutoCVI):
        raise CVIError(
            where,
            f"the guide is a {type(cvi.guide).__name__}",
            "one AutoCVI of all sites",
            "integrate a model that has no other guides",
        )
    if not sites or len(set(sites)) != len(sites) or not all(isinstance(s, str) for s in sites):
        raise CVIError(f"{where}: expected the names of one or more sites, each once")


def _run(cvi: CVI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CVI:
    """A CVI that was run: this one, or a copy."""
    if cvi.guide.prepared is not None and cvi.guide.is_fitted:
        return cvi
    new = copy.deepcopy(cvi)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CVIWarning)  # it need only say where to begin
        new.run(*args, **kwargs)
    return new


def _check_fit(cvi: CVI, sites: tuple[str, ...]) -> None:
    where, prepared = f"integrate({list(sites)})", cvi.guide.prepared
    assert prepared is not None
    if prepared.plan.stochastic or prepared.parts:
        raise CVIError(
            where,
            f"plates {sorted(prepared.parts) or 'of the model'} are subsampled",
            "a bound over all of the data, of which the weights are made",
            "fit without subsampling",
        )
    if prepared.plan.learns:
        raise CVIError(
            where,
            "the model has pyro.param values that require gradients",
            "a model without parameters to learn",
            "switch requires_grad off to hold them, or give them priors",
        )


def _check_sites(cvi: CVI, sites: tuple[str, ...], trace: poutine.Trace) -> None:
    latents = cvi.guide.plan.whole.latents
    continuous = sorted(n for n, x in latents.items() if x.enum_dim is None)
    for site in sites:
        node = trace.nodes.get(site)
        found = None
        if site in latents and latents[site].enum_dim is not None:
            found = "a discrete site"
        elif site not in latents and node is not None and node["type"] == "sample":
            found = "an observed site"
        elif site not in latents:
            found = "no such site"
        if found is not None:
            raise CVIError(
                f"site '{site}'",
                found,
                f"continuous latents: {continuous}",
                "name a few of these, scales or precisions above all",
            )


def _check_size(coordinates: Coordinates) -> None:
    if coordinates.size > _MOST:
        sizes = {s: p.size for s, p in coordinates.places.items()}
        raise CVIError(
            f"integrate({list(coordinates.sites)})",
            f"{coordinates.size} unconstrained scalars ({sizes})",
            f"at most {_MOST} in all",
            "integrate over those whose posterior is least Gaussian or that others depend on",
        )
