"""The model with its hyperparameters at one value: L(theta), and the fit that it is the bound of.

theta is a vector u of real scalars, theta = T(u), and

    L(u)  =  max_q ELBO(q | theta)  +  log |dT/du|   <=   log p(y, u).

Where nothing else is latent, L is log p(y, u) itself.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.errors import CVIError, CVIWarning, message
from pyro_cvi.explain import make_report
from pyro_cvi.exploration import Design
from pyro_cvi.families import DIRICHLET, GAUSSIAN, bijection
from pyro_cvi.guide import AutoCVI
from pyro_cvi.infer import CVI
from pyro_cvi.mixture import Place, event_dim_of
from pyro_cvi.updates import GaussianBelief

__all__ = ["Coordinates", "Heights", "heights"]

_ERROR = 1e-3
"""To how many nats the bound is maximised at each point, and to how many of their sd the means."""
_STEPS = 200
"""Most sweeps at a point."""
_ROUGH_STEPS = 5
"""Sweeps where no more is asked than whether there may be another mode."""
_SAMPLED_STEPS = 20
"""Sweeps at a point after the first, where factors are sampled: such fits go on long for little."""
_DRAWS = 1000
"""Draws of the joint fit that tell where the hyperparameters are."""
_LEVELS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
"""Of the prior, where other modes are looked for."""
_NO_MASS = 5.0
"""Nats below the top from which on it does not matter that points cannot be fitted."""
_REPEATS = 8
"""How often a bound is estimated that has a sampled part, with the same draws at every point."""
_NOISE = 0.05
"""Standard error of a log weight, in nats, above which there is a warning."""
_HEAVY = 0.01
"""Share of the weight from which on the error of a point's weight matters."""


class Coordinates:
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

    def likely(self) -> list[Tensor]:
        """Quantiles of each scalar's prior, or none where it depends on other sites."""
        found = []
        for site in self.sites:
            u = torch.zeros(0, self.places[site].size, dtype=torch.float64, device="cpu")
            if site in self._priors:
                draws = self.places[site].inverse(self._priors[site].sample((_DRAWS,)))
                u = draws.nan_to_num().quantile(draws.new_tensor(_LEVELS), dim=0)
            found += list(u.unbind(1))
        return found

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


class Heights(ABC):
    """L at points, with notes of what went wrong at some."""

    def __init__(
        self, cvi: CVI, coordinates: Coordinates, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._coordinates, self._args, self._kwargs = coordinates, args, kwargs
        self._model = _Conditioned(cvi.model)
        self._where = f"integrate({list(coordinates.sites)})"
        self._failures: list[tuple[Tensor, Exception]] = []

    def __call__(self, at: Tensor, state: Any, rough: bool = False) -> tuple[float, Any]:
        """L at `at`, and the fit; minus infinity and None where there is none."""
        try:
            bound, fit = self._bound(self._coordinates.values(at), state, rough)
        except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            if state is None:
                raise
            if not rough:
                self._failures.append((at, error))
            return -math.inf, None
        return bound + float(self._coordinates.log_jacobian(at)), fit

    @abstractmethod
    def _bound(self, values: dict[str, Tensor], state: Any, rough: bool) -> tuple[float, Any]:
        """The bound on log p(y, theta), and the fit, from where another one ended."""

    def warn(self, design: Design) -> None:
        """Say what was not as it should be."""
        if not design.ends:
            raise CVIError(
                self._where,
                "their density does not die out where the lattice had to end",
                "a proper posterior on the unconstrained scale",
                "give them proper priors; a scale whose prior is 1 / s has no posterior near zero",
            )
        good = [p for p in design.evaluated if p.state is not None]
        top = max(p.height for p in good)
        places = torch.stack([p.at for p in good])
        serious = []
        for at, error in self._failures:
            change = torch.linalg.solve(design.axes, (places - at).T)
            nearest = good[int(change.square().sum(0).argmin())]
            if nearest.height > top - _NO_MASS:
                serious.append(error)
        if serious:
            self._say(
                f"no fit at {len(serious)} of {len(design.evaluated)} points, which count for "
                f"nothing; the first error was: {serious[0]}",
                "a model that can be fitted wherever its hyperparameters have mass",
                "bound their priors away from such values",
            )

    def _say(self, found: str, expected: str, remedy: str) -> None:
        text = message(self._where, found, expected, remedy)
        warnings.warn(text, CVIWarning, stacklevel=5)


class _Densities(Heights):
    """log p(y, theta), where theta is all that is latent."""

    def _bound(self, values: dict[str, Tensor], state: Any, rough: bool) -> tuple[float, Any]:
        with poutine.block():
            trace = poutine.trace(self._model).get_trace(values, *self._args, **self._kwargs)
        return float(trace.log_prob_sum()), values


class _Fits(Heights):
    """The bound of one fit of the conditioned model, from where another one ended."""

    def __init__(
        self, cvi: CVI, coordinates: Coordinates, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(cvi, coordinates, args, kwargs)
        known = cvi.guide.median()
        for site in known:
            if cvi.guide.block_of(site).family is DIRICHLET:  # its medians do not sum to one
                known[site] = cvi.guide.posterior(site).mean
        guide = AutoCVI(
            self._model,
            max_dense_dim=cvi.guide.max_dense_dim,
            max_joint_dim=cvi.guide.max_joint_dim,
            init_loc_fn=lambda site: known[site["name"]],
        )
        options = cvi.sampling
        self._cvi = CVI(
            self._model, guide, num_samples=options.num_samples, antithetic=options.antithetic,
            fisher=options.fisher,
        )  # fmt: skip
        self._unfinished: set[int] = set()
        self._estimates: dict[int, Tensor] = {}
        self._errors: dict[int, float] = {}

    def _bound(self, values: dict[str, Tensor], state: Any, rough: bool) -> tuple[float, Any]:
        guide = self._cvi.guide
        if state is not None:
            guide.restore(state.snapshot())
        steps = _STEPS
        if state is not None and guide.plan.sampled_sites():
            steps = _SAMPLED_STEPS
        steps = _ROUGH_STEPS if rough else steps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CVIWarning)  # `warn` speaks of all points at once
            result = self._cvi.run(values, *self._args, num_steps=steps, tol=_ERROR, **self._kwargs)
        guide.max_joint_dim = 0  # what shares a block at the first point does so at all
        if rough:
            return -result.losses[-1], None
        fit = guide.without_model()
        for block in fit.plan.blocks:
            belief = fit.belief(block)
            if isinstance(belief, GaussianBelief):  # a scale of 1e-5 may be too small for float32
                _ = belief.scale_tril
        if not result.converged:
            self._unfinished.add(id(fit))
        bound, self._errors[id(fit)] = -result.losses[-1], result.errors[-1]
        if guide.plan.sampled_sites():
            estimates = self._estimated(values)
            self._estimates[id(fit)] = estimates
            bound = float(estimates.mean())
        return bound, fit

    def _estimated(self, values: dict[str, Tensor]) -> Tensor:
        """Estimates of the bound, (_REPEATS,), each by draws that are the same at every point."""
        found = []
        for seed in range(_REPEATS):
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                found.append(-self._cvi.evaluate_loss(values, *self._args, **self._kwargs))
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def warn(self, design: Design) -> None:
        super().warn(design)
        error = self._error(design)
        if error > _NOISE:
            self._say(
                "the bounds at the points are estimates, and the weights that follow have standard "
                f"errors of {error:.2g} nats",
                f"at most {_NOISE:g} nats",
                "give CVI a larger num_samples, or write what is sampled in operations of explain()'s "
                "table",
            )
        if self._estimates:
            rise = self._rise(design)
            loose = f"more steps at the best point gain {rise:.2g} nats" if rise > _NOISE else None
        else:
            top = max(p.height for p in design.points)
            used = [p for p in design.points if p.height > top - _NO_MASS]
            count = sum(id(p.state) in self._unfinished for p in used)
            loose = f"{count} of {len(used)} fits had not ended after {_STEPS} steps"
            loose = loose if count else None
        if loose is not None:
            self._say(
                loose, "fits that settle", "check with CVI.run on the model with these sites fixed"
            )

    def _rise(self, design: Design) -> float:
        """What the bound at the highest point gains by more steps, with the draws of its estimate."""
        top = max(design.points, key=lambda p: p.height)
        before = self._estimates[id(top.state)]
        with torch.random.fork_rng(), torch.no_grad():
            _, fit = self(top.at, top.state)
        return 0.0 if fit is None else float((self._estimates[id(fit)] - before).mean())

    def _error(self, design: Design) -> float:
        """The largest standard error of a log weight that matters, from what estimates of it differ by.

        The same draws, or points in their place, serve all points: what errors have in common is none.
        """
        states = [id(p.state) for p in design.points]
        weights = (design.heights + design.log_volumes).softmax(0).cpu()
        if self._estimates:
            logs = torch.stack([self._estimates[i] for i in states])
            spread = (logs - weights @ logs).std(1) / _REPEATS**0.5
        else:
            errors = torch.tensor(
                [self._errors[i] for i in states], dtype=weights.dtype, device="cpu"
            )
            spread = (errors - weights @ errors).abs()
        return float(spread[weights > _HEAVY * weights.max()].max())


def heights(
    cvi: CVI, coordinates: Coordinates, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Heights:
    """L of a model, by fits of what is latent beside the hyperparameters."""
    rest = set(cvi.guide.plan.whole.latents) - set(coordinates.sites)
    kind = _Fits if rest else _Densities
    return kind(cvi, coordinates, args, kwargs)
