"""When a sampled fit has come as near to its optimum as its steps let it, and the average from there on.

With d = target - present, the full natural-gradient step, and two independent estimates d_1, d_2 of it,

    E[d_1^T F d_2] = d^T F d,        E[(d_1 - d_2)^T F (d_1 - d_2)] / 4 = noise of their mean,

both in nats: the former is the squared distance that is left (twice a KL), without the bias that noise
gives to d_1^T F d_1. Under steps of size rho the iterates end up in a cloud around the optimum with
d^T F d = rho noise / (2 - rho), and no longer come nearer. Their average does: after M steps of the
cloud its squared distance is about noise / M.

References: B. T. Polyak, A. B. Juditsky (1992), Acceleration of stochastic approximation by averaging;
M. Welandawe et al. (2022), arXiv 2203.15945, for stopping by stationarity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_cvi.linalg import matvec, solve_precision
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["ERROR", "Averaging"]

_WINDOW = 10
"""Fewest steps over which residual and noise are averaged."""
_SLACK = 4.0
"""How much farther from the optimum than a cloud the steps have to be before an average is given up."""
ERROR = 1e-3
"""Squared distance in nats for every scalar of the sampled blocks at which an average is good enough:
0.03 standard deviations of a mean."""


@dataclass
class Averaging:
    """Residuals and noise of the steps so far, and the average of the stationary ones."""

    residuals: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)
    scalars: int = 1
    count: int = 0
    _sums: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    _origins: dict[str, Tensor] = field(default_factory=dict)

    def observe(self, residual: float, noise: float, rho: float) -> bool:
        """Take note of a step; whether the iterates are a cloud that comes no nearer."""
        self.residuals.append(residual)
        self.noises.append(noise)
        window = max(_WINDOW, len(self.residuals) // 3)
        if len(self.residuals) < window:
            return False
        slack = _SLACK if self.count else 1.0  # an average is not given up for a fluctuation
        return sum(self.residuals[-window:]) <= slack * rho * sum(self.noises[-window:])

    @property
    def is_near(self) -> bool:
        """Whether the last iterates themselves are within `ERROR`, by two standard errors.

        Residuals of a few steps may agree by accident, or be clearly negative where draws have heavy
        tails: the standard error is at least what the noise of the halves makes it, and the mean has to
        be near zero on both sides.
        """
        window = max(_WINDOW, len(self.residuals) // 3)
        last = torch.tensor(self.residuals[-window:], dtype=torch.float64, device="cpu")
        if len(last) < window:
            return False
        noise = 2 * sum(self.noises[-window:]) / window / self.scalars**0.5
        error = max(float(last.std()), noise) / window**0.5
        return abs(float(last.mean())) + 2 * error <= ERROR * self.scalars

    def add(self, beliefs: Mapping[str, Belief]) -> None:
        """Put the beliefs of a stationary step into the average."""
        self.count += 1
        for name, belief in beliefs.items():
            values = belief.tensors
            if isinstance(belief, GaussianBelief):  # S m has no digits left far from zero
                origin = self._origins.setdefault(name, belief.loc)
                values = (matvec(belief.precision, belief.loc - origin), belief.precision)
            old = self._sums.get(name)
            self._sums[name] = (
                values if old is None else tuple(a + b for a, b in zip(old, values, strict=True))
            )

    def restart(self) -> None:
        """Forget the average: the steps were not stationary after all."""
        self.count = 0
        self._sums.clear()
        self._origins.clear()

    @property
    def error(self) -> float:
        """Expected squared distance of the average, in nats; infinite where there is none."""
        if self.count == 0:
            return float("inf")
        recent = self.noises[-self.count :]
        return sum(recent) / len(recent) / self.count

    @property
    def is_enough(self) -> bool:
        """Whether the average is as good as is asked for."""
        return self.count >= _WINDOW and self.error <= ERROR * self.scalars

    @property
    def verdict(self) -> str:
        """Why a run may end here."""
        what = "the last steps are"
        if not self.is_near:
            what = f"the average of {self.count} steps is"
        return f"{what} within {ERROR:g} nats of the optimum for each sampled scalar"

    def beliefs(self, like: Mapping[str, Belief]) -> dict[str, Belief]:
        """The average, in natural parameters: these are convex, so it is proper."""
        found: dict[str, Belief] = {}
        for name, sums in self._sums.items():
            mean = tuple(s / self.count for s in sums)
            old = like[name]
            if isinstance(old, GaussianBelief):
                factor = torch.linalg.cholesky(mean[1])
                loc = self._origins[name] + solve_precision(factor, mean[0])
                found[name] = GaussianBelief(loc, mean[1])
            elif isinstance(old, FamilyBelief):
                found[name] = FamilyBelief(old.family, mean)
        return found
