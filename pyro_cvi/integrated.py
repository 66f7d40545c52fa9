"""IntegratedPosterior: a posterior averaged over hyperparameters, as a guide.

    p(x, theta | y)  ~  p(theta | y) q(x | theta)

p(theta | y) is known on a fine set of points and q(x | theta) by interpolation between fits; see
`integrate` for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.conditional import Conditional
from pyro_cvi.errors import CVIError
from pyro_cvi.guide import AutoCVI
from pyro_cvi.mixture import (
    Tabulated,
    check_quantiles,
    event_dim_of,
    mixture_law,
    mixture_quantile,
)
from pyro_cvi.modes import public_call

__all__ = ["IntegratedPosterior"]


class IntegratedPosterior:
    """p(x, theta | y) ~ p(theta | y) q(x | theta): a guide that draws theta, and the rest given it.

    What `AutoCVI` cannot have, it has: hyperparameters of any shape of posterior, and coefficients
    that depend on them. What it does not mend: given theta_k the other sites have the posterior of
    CVI, a Gaussian (or other family) of each block, and log p(y, theta_k) is replaced by its lower
    bound.

    It can be called and used as the guide of `Predictive`. In a draw the hyperparameters come from
    their joint law, so that each scalar has its interpolated marginal, and all other sites from the fit
    at them, whose means and covariances are interpolated between the K points: what is computed from
    both has the right law too. Draws are point masses to Pyro: for ELBOs and importance weights the
    guide has no density.

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
        conditional: Conditional | None,
    ) -> None:
        self.hyperparameters = tuple(laws)
        self.points, self.weights, self.bounds = dict(points), weights, bounds
        self.log_evidence = log_evidence
        self._joint, self._components = joint, list(components)
        self._laws, self._conditional = dict(laws), conditional

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
                f"site '{site}'",
                "no such latent",
                f"one of {sorted(self.sites)}",
                "check the name in the model's pyro.sample statements",
            )

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
    @public_call
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent, inside its plates; in an outer plate, once for each element."""
        # One number for each draw: a Categorical of thousands of points would be expanded to all draws.
        level = pyro.sample(
            f"_{type(self).__name__}_level",
            dist.Uniform(*torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")),
            infer={"is_auxiliary": True},
        )
        below = next(iter(self._laws.values())).weights.cumsum(0)
        chosen = torch.searchsorted(below, level.to(below.device)).clamp(max=len(below) - 1)
        draws = self._draw(chosen.reshape(-1))
        plates = self._joint._create_plates(*args, **kwargs)
        result: dict[str, Tensor] = {}
        for name, latent in self._joint.plan.whole.latents.items():
            value = draws[name]
            event_dim = event_dim_of(latent)
            batch_dim = value.ndim - 1 - event_dim
            lead = chosen.shape[: max(chosen.ndim - batch_dim, 0)]
            value = value.reshape((*lead, *value.shape[1:]))
            with ExitStack() as stack:
                for plate, *_ in latent.plates:
                    stack.enter_context(plates[plate])
                result[name] = pyro.sample(name, dist.Delta(value, event_dim=event_dim))
        return result

    def _draw(self, chosen: Tensor) -> dict[str, Tensor]:
        """A draw of everything near each of these points of the hyperparameters, (n, *site shape)."""
        scalars = {s: law.near(chosen) for s, law in self._laws.items()}
        values = {s: law.place(scalars[s]) for s, law in self._laws.items()}
        if self._conditional is None:
            return values
        return values | self._conditional.draw(torch.cat(list(scalars.values()), -1))

    # --- as a table ----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        sites = ", ".join(self.hyperparameters)
        return (
            f"IntegratedPosterior over {sites}: {len(self.weights)} points, "
            f"{float(1 / self.weights.square().sum()):.1f} of them effective, "
            f"log evidence {self.log_evidence:.4f}"
        )
