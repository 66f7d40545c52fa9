"""Messages to Gamma sites: do they lead to the optimum of the bound, and how noisy are sampled ones?

1. The shape model of the paper, y ~ Gamma(a, 1) with a ~ Gamma(a0, b0): the parameters that CVI finds by
   quadrature against the optimum of the bound by direct optimisation (scipy, the expectation by a fine
   trapezoid rule in log a), and the same from sampled messages, the likelihood hidden from the algebra:
   the mean of ten fits against the optimum, in its standard errors. The distance of the best Gamma from
   the true posterior is there for information.
2. The noise of a message, E (m' - m)^T F (m' - m) in nats, at the start and at the optimum: with the
   analytic Fisher matrix, or one sampled from the same draws (the paper's way); with the last message as
   control variate, or none.

Float64, 16 draws a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, machine, report, run
from scipy.optimize import minimize
from scipy.special import digamma, gammaln
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

PRIORS = ((1.0, 0.1), (2.0, 1.0), (0.5, 0.5))
DATA = (0.1, 1.0, 5.0, 100.0)
FITS = 10
REPEATS = 60


def hidden(x: Tensor) -> Tensor:
    """x itself, by an operation without an algebra."""
    return torch.sort(torch.stack([x, x + 1], -1), -1).values[..., 0]


def shape_model(y: Tensor, prior: tuple[float, float], sampled: bool = False) -> None:
    a = pyro.sample("a", dist.Gamma(*y.new_tensor(prior)))
    pyro.sample("y", dist.Gamma(hidden(a) if sampled else a, y.new_ones(())), obs=y)


def rates(y: Tensor) -> None:
    """Counts whose rate is a sum of four Gammas."""
    weights = torch.rand(30, 4, generator=torch.Generator().manual_seed(1), dtype=y.dtype) + 0.1
    with pyro.plate("parts", 4):
        z = pyro.sample("z", dist.Gamma(y.new_tensor(0.7), y.new_tensor(0.3)))
    with pyro.plate("rows", 30):
        pyro.sample("y", dist.Poisson(weights @ z), obs=y)


def groups(counts: Tensor) -> None:
    """A Dirichlet whose concentration is latent."""
    one = counts.new_ones(counts.shape[1])
    a = pyro.sample("a", dist.Gamma(one, one).to_event(1))
    with pyro.plate("groups", len(counts)):
        p = pyro.sample("p", dist.Dirichlet(a))
        pyro.sample("counts", dist.Multinomial(50, p), obs=counts)


def optimum(y: float, prior: tuple[float, float]) -> tuple[float, float, float]:
    """Shape and rate of the best Gamma, and KL(q || p) there."""
    u = np.linspace(-40, 12, 400_001)
    a0, b0 = prior
    joint = (a0 - 1) * u - b0 * np.exp(u) + a0 * np.log(b0) - gammaln(a0)
    joint += (np.exp(u) - 1) * np.log(y) - y - gammaln(np.exp(u))

    def negative(p: Any) -> float:
        s, r = np.exp(p)
        density = np.exp(s * np.log(r) + s * u - r * np.exp(u) - gammaln(s))
        entropy = s - np.log(r) + gammaln(s) + (1 - s) * digamma(s)
        return -float(np.trapezoid(density * joint, u) + entropy)

    start = [np.log(max(y, 1.0)), 0.0]
    found = minimize(
        negative, start, method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-13, "maxiter": 4000},
    )  # fmt: skip
    top = (joint + u).max()
    evidence = top + np.log(np.trapezoid(np.exp(joint + u - top), u))
    return float(np.exp(found.x[0])), float(np.exp(found.x[1])), float(evidence + found.fun)


def shapes(fits: int) -> list[Row]:
    rows = []
    for y in DATA:
        for prior in PRIORS:
            best = optimum(y, prior)
            args = (torch.tensor(y, dtype=torch.float64), prior)
            guide = AutoCVI(shape_model)
            CVI(shape_model, guide).run(*args, num_steps=200, tol=1e-12)
            q = guide.posterior("a")
            apart = max(abs(float(q.concentration) / best[0] - 1), abs(float(q.rate) / best[1] - 1))
            means = []
            for seed in range(fits):
                guide = AutoCVI(shape_model)
                CVI(shape_model, guide, seed=seed).run(*args, True, num_steps=200)
                means.append(float(guide.posterior("a").mean))
            error = float(np.std(means, ddof=1)) / len(means) ** 0.5
            off = abs(float(np.mean(means)) - best[0] / best[1])
            case = f"shape model, y = {y:g}, prior Gamma({prior[0]:g}, {prior[1]:g})"
            rows += [
                Row(case, "quadrature: relative difference of shape and rate, worst", apart, "<=", 1e-4),
                Row(case, "sampled: error of the mean, in standard errors", off / max(error, 1e-12),
                    "<=", 3.0),
                Row(case, "KL(best Gamma || true posterior), nats", best[2]),
            ]  # fmt: skip
    return rows


def noise_table(name: str, model: Callable[..., None], args: tuple[Any, ...], site: str,
                repeats: int) -> list[Row]:  # fmt: skip
    pyro.set_rng_seed(0)
    rows = []
    guide = AutoCVI(model)
    guide(*args)
    fitted = CVI(model, guide)
    for when in ("start", "optimum"):
        if when == "optimum":
            fitted.run(*args, num_steps=200, tol=0.0)
        found = {}
        for fisher in ("analytic", "sampled"):
            for control in (False, True) if when == "optimum" else (False,):
                trial = CVI(model, guide, fisher=fisher)
                if control:
                    trial._sweeper.control = dict(fitted._sweeper.control)
                noises = [trial.message_noise(*args, num_groups=2)[site] for _ in range(repeats)]
                found[fisher, control] = float(np.mean(noises))
        case = f"{name}, {when}"
        for (fisher, control), value in found.items():
            how = "with" if control else "without"
            rows.append(Row(case, f"noise in nats, {fisher} Fisher, {how} control variate", value))
        if when == "optimum":
            ratio = found["analytic", False] / max(found["analytic", True], 1e-300)
            rows.append(Row(case, "control variate: noise without / with", ratio, ">=", 3.0))
    return rows


def main() -> None:
    small = arguments(__doc__).parse_args().small
    at = machine()
    torch.set_default_dtype(torch.float64)
    repeats = 4 if small else REPEATS
    rows = shapes(3 if small else FITS)
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(30, 4, generator=torch.Generator().manual_seed(1)) + 0.1
    y = torch.poisson(weights @ torch.tensor([3.0, 0.5, 6.0, 1.5]), generator=generator)
    pyro.set_rng_seed(3)
    p = dist.Dirichlet(torch.tensor([0.5, 1.0, 2.0, 4.0])).sample((10,))
    counts = dist.Multinomial(50, p).sample()
    one = (torch.tensor(5.0), (1.0, 0.1), True)
    rows += noise_table("shape model, hidden", shape_model, one, "a", repeats)
    rows += noise_table("Dirichlet with latent concentration", groups, (counts,), "a", repeats)
    rows += noise_table("Poisson with a sum of Gammas", rates, (y,), "z", repeats)
    report(__file__, rows, at, small)


if __name__ == "__main__":
    run(main)
