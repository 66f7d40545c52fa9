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

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.errors import CVIError, CVIWarning, message
from pyro_cvi.explain import make_report
from pyro_cvi.exploration import Design, Interpolant, calibrated, explore
from pyro_cvi.families import DIRICHLET, GAUSSIAN, bijection
from pyro_cvi.guide import AutoCVI
from pyro_cvi.infer import CVI
from pyro_cvi.mixture import (
    Place,
    Tabulated,
    check_quantiles,
    event_dim_of,
    mixture_law,
    mixture_quantile,
    shares,
    tabulate,
)
from pyro_cvi.modes import outside_inference_mode
from pyro_cvi.updates import GaussianBelief

__all__ = ["IntegratedPosterior", "integrate"]

_MOST = 6
"""Scalars that can be integrated over."""
_ERROR = 1e-4
"""To how many nats the bound is maximised at each point."""
_STEPS = 200
"""Most sweeps at a point."""
_DRAWS = 1000
"""Draws of the joint fit that tell where the hyperparameters are."""
_LEAST = 1e-5
"""Points of a smaller share than this of the largest weight are left out of the mixture."""
_NO_MASS = 5.0
"""Nats below the top from which on it does not matter that points cannot be fitted."""
_FEW = 0.1
"""Share of the quasi-random points that should count."""


class IntegratedPosterior:
    """p(x | y) ~ sum_k w_k q_k(x): a guide whose draws come from the fit at one of the points each.

    What `AutoCVI` cannot have, it has: hyperparameters of any shape of posterior, and coefficients
    that depend on them. What it does not mend: given theta_k the other sites have the posterior of
    CVI, a Gaussian (or other family) of each block, and log p(y, theta_k) is replaced by its lower
    bound.

    It can be called and used as the guide of `Predictive`. In a draw a component k is chosen by weight
    and its q_k sampled, with whatever covariance it has; hyperparameters are near theta_k, spread so
    that each scalar has its interpolated marginal law. Draws are point masses to Pyro: for ELBOs and
    importance weights the guide has no density.

    Attributes:
        hyperparameters: the sites that were integrated over.
        points: their values, `(K, *site shape)` each.
        weights: (K,), which sum to one.
        bounds: (K,), L at the points: log p(y, theta) plus the log Jacobian, from below.
        log_evidence: log of the integral of exp L, an estimate of log p(y). The integrand is a lower
            bound; the integral is by a rule, so it is no strict bound itself.
    """

    def __init__(
        self,
        joint: AutoCVI,
        components: Sequence[AutoCVI],
        points: Mapping[str, Tensor],
        weights: Tensor,
        bounds: Tensor,
        log_evidence: float,
        laws: Mapping[str, Tabulated],
        levels: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        self.hyperparameters = tuple(laws)
        self.points, self.weights, self.bounds = dict(points), weights, bounds
        self.log_evidence = log_evidence
        self._joint, self._components = joint, list(components)
        self._laws, self._levels = dict(laws), dict(levels)

    @property
    def sites(self) -> list[str]:
        """All latent sites, in the order of the model."""
        return list(self._joint.plan.whole.latents)

    def posterior(self, site: str) -> Any:
        """p(site | y), a distribution in the model's space with the site's shape.

        Of a hyperparameter it is interpolated between the points (mean, stddev, icdf, draws, and
        log_prob of scalars); of another site the mixture of the K fits (mean, stddev, log_prob, draws).
        """
        self._check(site)
        if site in self._laws:
            return self._laws[site]
        return mixture_law(self._components, self.weights, site)

    def _check(self, site: str) -> None:
        if site not in self.sites:
            raise CVIError(
                message(
                    f"site '{site}'", "no such latent", f"one of {sorted(self.sites)}",
                    "check the name in the model's pyro.sample statements",
                )
            )  # fmt: skip

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The marginal median of every latent; of a discrete site the most probable value."""
        return {s: self._quantile(s, 0.5, center=True) for s in self.sites}

    @torch.no_grad()
    def quantiles(
        self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Marginal quantiles of every latent, with a leading quantile dim."""
        wanted = check_quantiles(quantiles)
        return {s: torch.stack([self._quantile(s, q) for q in wanted]) for s in self.sites}

    def _quantile(self, site: str, q: float, *, center: bool = False) -> Tensor:
        if site in self._laws:
            return self._laws[site].icdf(q)
        return mixture_quantile(self._components, self.weights, site, q, center=center)

    # --- draws ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent, inside its plates; in an outer plate, once for each element."""
        chosen = pyro.sample(
            f"_{type(self).__name__}_component",
            dist.Categorical(self.weights),
            infer={"is_auxiliary": True},
        )
        draws = [self._draw(k, args, kwargs) for k in chosen.reshape(-1).tolist()]
        plates = self._joint._create_plates(*args, **kwargs)
        result: dict[str, Tensor] = {}
        for name, latent in self._joint.plan.whole.latents.items():
            value = torch.stack([d[name] for d in draws])
            event_dim = event_dim_of(latent)
            batch_dim = value.ndim - 1 - event_dim
            lead = chosen.shape[: max(chosen.ndim - batch_dim, 0)]
            value = value.reshape((*lead, *value.shape[1:]))
            with ExitStack() as stack:
                for plate, *_ in latent.plates:
                    stack.enter_context(plates[plate])
                result[name] = pyro.sample(name, dist.Delta(value, event_dim=event_dim))
        return result

    def _draw(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """One draw of everything from a component, unseen by handlers."""
        with poutine.block():
            values: dict[str, Tensor] = dict(self._components[k](*args, **kwargs))
        for site, (low, high) in self._levels.items():
            p = low[k] + torch.rand(low.shape[1:], dtype=low.dtype, device=low.device) * (
                high[k] - low[k]
            )
            values[site] = self._laws[site].at(p)
        return values

    # --- as a table ----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        sites = ", ".join(self.hyperparameters)
        return (
            f"IntegratedPosterior over {sites}: {len(self.weights)} points, "
            f"{float(1 / self.weights.square().sum()):.1f} of them effective, "
            f"log evidence {self.log_evidence:.4f}"
        )


@outside_inference_mode
def integrate(
    cvi: CVI, sites: str | Sequence[str], *args: Any, num_points: int = 64, **kwargs: Any
) -> IntegratedPosterior:
    """p(x | y) = integral p(x | y, theta) p(theta | y) dtheta over the sites theta, by fits at points.

    At each point the model is conditioned on theta and fitted, from where the fit of the point next to
    it ended: a few sweeps. Over one or two scalars the points are a lattice grown from the mode, 10 to
    60 of them; over three to six they are `num_points` quasi-random ones about it, after some 6 to 40
    that find it. The guide of `cvi` is read and not changed, and neither is torch's random state.

    Arguments:
        cvi: a fitted CVI of the whole model; it says where theta is.
        sites: the hyperparameters, continuous latents of at most six unconstrained scalars in all:
            scales, precisions, correlations.
        args, kwargs: the model's arguments, as in `run`.
        num_points: of a design over three or more scalars; an even number.

    Raises:
        CVIError: for sites that are discrete, observed or not there, too many scalars, a `cvi` that
            has not been run, subsampled plates, learnt parameters, and factors that would have to be
            sampled.

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
    _check_cvi(cvi, names, num_points)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        with poutine.block():
            trace = poutine.trace(cvi.model).get_trace(*args, **kwargs)
        _check_sites(cvi, names, trace)
        coordinates = _Coordinates(cvi.guide, names, trace)
        _check_size(coordinates)
        fits = _Fits(cvi, coordinates, args, kwargs)
        start, scale = coordinates.start(cvi.guide)
        design = explore(fits, start, scale, num_points)
    fits.warn(design)
    return _posterior(cvi.guide, coordinates, design)


# --- what is fitted ----------------------------------------------------------------------------------


class _Coordinates:
    """theta as a vector of real scalars."""

    def __init__(self, guide: AutoCVI, sites: tuple[str, ...], trace: poutine.Trace) -> None:
        self.sites = sites
        self._priors = {s: trace.nodes[s]["fn"] for s in sites if _has_fixed_prior(guide, s, trace)}
        self.places: dict[str, Place] = {}
        self.slices: dict[str, slice] = {}
        self.size = 0
        for site in sites:
            latent = guide.plan.whole.latents[site]
            t, shape = latent.transform, latent.shape
            if t is None and latent.family is not GAUSSIAN:
                t = bijection(trace.nodes[site]["fn"])
                shape = tuple(t.inverse_shape(torch.Size(shape)))
            x = latent.value
            place = Place(site, t, shape, event_dim_of(latent), x.dtype, x.device)
            self.places[site] = place
            self.slices[site] = slice(self.size, self.size + place.size)
            self.size += place.size

    def values(self, at: Tensor) -> dict[str, Tensor]:
        """The sites' values at a point."""
        return {s: self.places[s](at[..., own]) for s, own in self.slices.items()}

    def log_jacobian(self, at: Tensor) -> Tensor:
        """That of all sites, (*, size) to (*)."""
        parts = [self.places[s].log_jacobian(at[..., own]) for s, own in self.slices.items()]
        return torch.stack(parts).sum(0)

    def known(self, at: Tensor) -> Tensor:
        """The part of L that is there in closed form, (M, size) to (M): Jacobians, and fixed priors."""
        result = self.log_jacobian(at)
        for site, prior in self._priors.items():
            value = self.places[site](at[:, self.slices[site]])
            result = result + prior.log_prob(value).double().cpu().reshape(len(at), -1).sum(-1)
        return result

    def features(self, at: Tensor) -> Tensor:
        """x and x^2 of all sites, (M, size) to (M, 2 elements)."""
        x = [v.double().cpu().reshape(len(at), -1) for v in self.values(at).values()]
        return torch.cat([torch.cat(x, 1), torch.cat(x, 1).square()], 1)

    def start(self, guide: AutoCVI) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each scalar in the joint fit, from draws of it."""
        means, scales = [], []
        for site in self.sites:
            u = self.places[site].inverse(guide.posterior(site).sample((_DRAWS,)))
            low, middle, high = u.nan_to_num().quantile(u.new_tensor([0.16, 0.5, 0.84]), dim=0)
            means.append(middle)
            scales.append(((high - low) / 2).clamp(min=1e-6))
        return torch.cat(means), torch.cat(scales)


def _has_fixed_prior(guide: AutoCVI, site: str, trace: poutine.Trace) -> bool:
    """Whether a site's prior depends on no latent, and stands in the model as it is."""
    node = trace.nodes[site]
    if node["scale"] != 1.0 or node["mask"] is not None:
        return False
    edges = {e.site for e in make_report(guide.plan).edges if e.factor == site}
    return edges == {site}


class _Conditioned:
    """The model with the hyperparameters at the values of its first argument."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model

    def __call__(self, values: dict[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        return poutine.condition(self._model, data=values)(*args, **kwargs)


class _Fits:
    """L at a point: one fit of the conditioned model, from where another one ended."""

    def __init__(
        self, cvi: CVI, coordinates: _Coordinates, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._coordinates, self._args, self._kwargs = coordinates, args, kwargs
        known = cvi.guide.median()
        for site in known:
            if cvi.guide.block_of(site).family is DIRICHLET:  # its medians do not sum to one
                known[site] = cvi.guide.posterior(site).mean
        model = _Conditioned(cvi.model)
        guide = AutoCVI(
            model,
            max_dense_dim=cvi.guide.max_dense_dim,
            init_loc_fn=lambda site: known[site["name"]],
        )
        self._cvi = CVI(model, guide)
        self._tol = 1e-6
        self.failures: list[tuple[Tensor, Exception]] = []
        self.unfinished = 0

    def __call__(self, at: Tensor, state: AutoCVI | None) -> tuple[float, AutoCVI | None]:
        """L at `at`, and the fit; minus infinity and None where no fit was possible."""
        guide, values = self._cvi.guide, self._coordinates.values(at)
        try:
            if state is not None:
                guide.restore(state.snapshot())
            result = self._cvi.run(
                values, *self._args, num_steps=_STEPS, tol=self._tol, **self._kwargs
            )
            fit = guide.without_model()
            for block in fit.plan.blocks:
                belief = fit.belief(block)
                if isinstance(
                    belief, GaussianBelief
                ):  # a scale of 1e-5 may be too small for float32
                    _ = belief.scale_tril
        except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            if state is None:
                raise
            self.failures.append((at, error))
            return -math.inf, None
        if state is None:
            self._check(guide)
        self.unfinished += not result.converged
        loss = result.losses[-1]
        eps = torch.finfo(next(iter(values.values())).dtype).eps
        self._tol = max(_ERROR / max(abs(loss), 1.0), 4 * eps)
        return -loss + float(self._coordinates.log_jacobian(at)), fit

    def _check(self, guide: AutoCVI) -> None:
        sampled = sorted(guide.plan.sampled_sites())
        if sampled:
            raise CVIError(
                message(
                    f"integrate({list(self._coordinates.sites)})",
                    f"factors of {sampled[:3]} are sampled, so that the bound is an estimate and its "
                    "exponential no weight",
                    "a model whose factors are exact or by quadrature once the sites are fixed",
                    "see explain() for what is sampled, and write that part in operations of its table",
                )
            )  # fmt: skip

    def warn(self, design: Design) -> None:
        """Say what was not as it should be."""
        where = f"integrate({list(self._coordinates.sites)})"
        good = [p for p in design.evaluated if p.state is not None]
        top = max(p.height for p in good)
        places = torch.stack([p.at for p in good])
        serious = []
        for at, error in self.failures:
            change = torch.linalg.solve(design.axes, (places - at).T)
            nearest = good[int(change.square().sum(0).argmin())]
            if nearest.height > top - _NO_MASS:
                serious.append(error)
        if serious:
            _warn(
                where,
                f"no fit at {len(serious)} of {len(design.evaluated)} points, which count for "
                f"nothing; the first error was: {serious[0]}",
                "a model that can be fitted wherever its hyperparameters have mass",
                "bound their priors away from such values",
            )
        if self.unfinished:
            _warn(
                where,
                f"{self.unfinished} of {len(design.evaluated)} fits had not ended after {_STEPS} steps",
                "fits that settle",
                "check with CVI.run on the model with these sites fixed",
            )
        if not design.ends:
            raise CVIError(
                message(
                    where,
                    "their density does not die out where the lattice had to end",
                    "a proper posterior on the unconstrained scale",
                    "give them proper priors; a scale whose prior is 1 / s has no posterior near zero",
                )
            )


# --- the result --------------------------------------------------------------------------------------


def _posterior(guide: AutoCVI, coordinates: _Coordinates, design: Design) -> IntegratedPosterior:
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
    laws, levels = {}, {}
    for site, own in coordinates.slices.items():
        columns = range(own.start, own.stop)
        tables = [tabulate(design.fine[:, j], fine_weights, design.blur) for j in columns]
        laws[site] = Tabulated(coordinates.places[site], tables, design.fine[:, own], fine_weights)
        low, high = zip(*[shares(at[:, j], weights) for j in columns], strict=True)
        levels[site] = (torch.stack(low, -1), torch.stack(high, -1))
    return IntegratedPosterior(
        guide.without_model(),
        [p.state for p, keep in zip(design.points, kept.tolist(), strict=True) if keep],
        coordinates.values(at),
        weights,
        bounds[kept],
        float(logs.logsumexp(0)),
        laws,
        levels,
    )


# --- what is refused -------------------------------------------------------------------------------


def _warn(where: str, found: str, expected: str, remedy: str) -> None:
    warnings.warn(message(where, found, expected, remedy), CVIWarning, stacklevel=4)


def _check_cvi(cvi: CVI, sites: tuple[str, ...], num_points: int) -> None:
    where = f"integrate({list(sites)})"
    if not isinstance(cvi, CVI):
        raise CVIError(
            message(where, f"the first argument is a {type(cvi).__name__}", "a CVI that was run",
                    "cvi = CVI(model, AutoCVI(model)); cvi.run(*args); integrate(cvi, sites, *args)")
        )  # fmt: skip
    if (
        isinstance(num_points, bool)
        or not isinstance(num_points, int)
        or num_points < 16
        or num_points % 2
    ):
        raise CVIError(f"num_points is {num_points!r}; expected an even integer of at least 16")
    if not isinstance(cvi.guide, AutoCVI):
        raise CVIError(
            message(where, f"the guide is a {type(cvi.guide).__name__}", "one AutoCVI of all sites",
                    "integrate a model that has no other guides")
        )  # fmt: skip
    prepared = cvi.guide.prepared
    if prepared is None or not cvi.guide.is_fitted:
        raise CVIError(
            message(where, "the guide has not been fitted", "a fit of the whole model, which says "
                    "where the hyperparameters are", "cvi.run(*args) before this")
        )  # fmt: skip
    if prepared.plan.stochastic or prepared.parts:
        raise CVIError(
            message(where, f"plates {sorted(prepared.parts) or 'of the model'} are subsampled",
                    "a bound over all of the data, of which the weights are made",
                    "fit without subsampling")
        )  # fmt: skip
    if prepared.plan.learns:
        raise CVIError(
            message(where, "the model has pyro.param values that require gradients",
                    "a model without parameters to learn",
                    "switch requires_grad off to hold them, or give them priors")
        )  # fmt: skip
    if not sites or len(set(sites)) != len(sites) or not all(isinstance(s, str) for s in sites):
        raise CVIError(f"{where}: expected the names of one or more sites, each once")


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
                message(f"site '{site}'", found, f"continuous latents: {continuous}",
                        "name a few of these, scales or precisions above all")
            )  # fmt: skip
    if set(sites) == set(latents):
        raise CVIError(
            message(f"integrate({list(sites)})", "all latent sites are named", "sites that are left "
                    "to be fitted", "name the hyperparameters only")
        )  # fmt: skip


def _check_size(coordinates: _Coordinates) -> None:
    if coordinates.size > _MOST:
        sizes = {s: p.size for s, p in coordinates.places.items()}
        raise CVIError(
            message(f"integrate({list(coordinates.sites)})",
                    f"{coordinates.size} unconstrained scalars ({sizes})", f"at most {_MOST} in all",
                    "integrate over those whose posterior is least Gaussian or that others depend on")
        )  # fmt: skip
