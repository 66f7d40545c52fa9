"""Radon in Minnesota, varying intercepts and slopes: how near is the fit to NUTS, and how much faster?

919 homes in 85 counties; floor is 0 (basement) or 1:

    y_i ~ N(a[county_i] + b[county_i] floor_i, 1/tau_y)
    a_c ~ N(mu_a, 1/tau_a);  b_c ~ N(mu_b, 1/tau_b);  mu_a, mu_b ~ N(0, 10^2)
    tau_a, tau_b ~ Gamma(2, 0.2);  tau_y ~ Gamma(2, 1)

Every prior is conjugate, so all messages are exact. NumPyro's NUTS samples the same posterior in float64
with 4 chains in parallel (county effects written as mu + eta / sqrt(tau), which mixes better here); its
figures are the truth up to Monte Carlo error. A parameter is missed where the mean differs by more than
0.1, or the standard deviation by more than 10 %. This package has q(mu_a, mu_b, a, b) q(tau_a) q(tau_b)
q(tau_y): what correlation there is between a precision and the effects, it leaves out, and where that
counts (tau_a, tau_b, and effects of counties with few homes) it is overconfident. Precisions are
compared as they are, and as scales sigma = tau^-1/2, which have the size of the data.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, arrays, fit, machine, report, run, versions, warm_up
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

PRECISIONS = ("tau_a", "tau_b", "tau_y")
SETTLED = 1e-9


def model(y: Tensor, floor: Tensor, county: Tensor, counties: int) -> None:
    one = y.new_tensor(1.0)
    mu_a = pyro.sample("mu_a", dist.Normal(0 * one, 10 * one))
    mu_b = pyro.sample("mu_b", dist.Normal(0 * one, 10 * one))
    tau_a = pyro.sample("tau_a", dist.Gamma(2 * one, 0.2 * one))
    tau_b = pyro.sample("tau_b", dist.Gamma(2 * one, 0.2 * one))
    tau_y = pyro.sample("tau_y", dist.Gamma(2 * one, one))
    with pyro.plate("counties", counties):
        a = pyro.sample("a", dist.Normal(mu_a, tau_a.rsqrt()))
        b = pyro.sample("b", dist.Normal(mu_b, tau_b.rsqrt()))
    with pyro.plate("homes", len(y)):
        pyro.sample("y", dist.Normal(a[county] + b[county] * floor, tau_y.rsqrt()), obs=y)


def data() -> tuple[Tensor, Tensor, Tensor, int]:
    d = arrays("radon_mn")
    county = d["county"].astype(np.int64) - 1
    y, floor = (torch.from_numpy(d[n].astype(np.float64)) for n in ("log_radon", "floor"))
    return y, floor, torch.from_numpy(county), int(county.max()) + 1


Moments = dict[str, tuple[Array, Array]]


def with_cvi(args: tuple[Any, ...]) -> tuple[Moments, dict[str, float]]:
    """Mean and standard deviation of each parameter; the fit is made twice, the second counts."""
    for _ in range(2):
        start = time.perf_counter()
        f = fit(args, 500, model, SETTLED)
        seconds = time.perf_counter() - start
    found: Moments = {}
    for name in ("mu_a", "mu_b", "a", "b", *PRECISIONS):
        q = f.guide.posterior(name)
        found[name] = q.mean.numpy(), q.variance.sqrt().numpy()
        if name in PRECISIONS:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                scale = q.sample((200_000,)).rsqrt()
            found[_scale_of(name)] = scale.mean(0).numpy(), scale.std(0).numpy()
    return found, {"seconds": seconds, "steps": len(f.losses), "step": f.step_seconds}


def _scale_of(name: str) -> str:
    return name.replace("tau", "sigma")


def with_nuts(args: tuple[Any, ...], warmup: int, samples: int) -> tuple[Moments, dict[str, float]]:
    """The same from draws; their worst R-hat and effective size."""
    import numpyro

    numpyro.set_host_device_count(4)
    numpyro.enable_x64()
    import jax
    import jax.numpy as jnp
    import numpyro.distributions as ndist
    from numpyro.diagnostics import effective_sample_size, gelman_rubin
    from numpyro.infer import MCMC, NUTS

    y, floor, county, counties = (x.numpy() if isinstance(x, Tensor) else x for x in args)

    def num_model() -> None:
        mu_a = numpyro.sample("mu_a", ndist.Normal(0.0, 10.0))
        mu_b = numpyro.sample("mu_b", ndist.Normal(0.0, 10.0))
        tau_a = numpyro.sample("tau_a", ndist.Gamma(2.0, 0.2))
        tau_b = numpyro.sample("tau_b", ndist.Gamma(2.0, 0.2))
        tau_y = numpyro.sample("tau_y", ndist.Gamma(2.0, 1.0))
        with numpyro.plate("counties", counties):
            eta_a = numpyro.sample("eta_a", ndist.Normal(0.0, 1.0))
            eta_b = numpyro.sample("eta_b", ndist.Normal(0.0, 1.0))
        a = numpyro.deterministic("a", mu_a + eta_a / jnp.sqrt(tau_a))
        b = numpyro.deterministic("b", mu_b + eta_b / jnp.sqrt(tau_b))
        with numpyro.plate("homes", len(y)):
            loc = a[county] + b[county] * floor
            numpyro.sample("y", ndist.Normal(loc, 1 / jnp.sqrt(tau_y)), obs=y)

    mcmc = MCMC(
        NUTS(num_model), num_warmup=warmup, num_samples=samples, num_chains=4, progress_bar=False,
        chain_method="parallel",
    )  # fmt: skip
    start = time.perf_counter()
    mcmc.run(jax.random.PRNGKey(0))
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}
    seconds = time.perf_counter() - start
    for name in PRECISIONS:
        draws[_scale_of(name)] = draws[name] ** -0.5
    names = ("mu_a", "mu_b", "a", "b", *PRECISIONS, *map(_scale_of, PRECISIONS))
    found = {n: (draws[n].mean((0, 1)), draws[n].std((0, 1))) for n in names}
    diagnosis = {
        "seconds": seconds,
        "r_hat": max(float(np.max(gelman_rubin(draws[n]))) for n in names),
        "ess": min(float(np.min(effective_sample_size(draws[n]))) for n in names),
    }
    return found, diagnosis


def rows_of(ours: Moments, theirs: Moments) -> list[Row]:
    """Worst difference of each parameter (of each vector of them), and how many are missed."""
    rows = []
    missed = count = 0
    for name, (mean, sd) in theirs.items():
        loc, scale = ours[name]
        apart = np.abs(loc - mean)
        ratio = scale / sd - 1
        if name in PRECISIONS or not name.startswith("sigma"):
            count += apart.size
            missed += int(((apart > 0.1) | (np.abs(ratio) > 0.1)).sum())
        case = f"{name} (worst of {apart.size})" if apart.size > 1 else name
        worst = float(ratio.flat[np.abs(ratio).argmax()])
        low, high = float(np.min(mean)), float(np.max(mean))
        value = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        rows += [
            Row(case, f"mean (NUTS: {value}): difference", float(apart.max()), "<=", 0.1),
            Row(case, "standard deviation: |ratio - 1|", abs(worst), "<=", 0.1),
        ]
        if apart.size > 1:
            over = int((np.abs(ratio) > 0.1).sum())
            rows.append(Row(case, "how many standard deviations miss", over))
            rows.append(Row(case, "how many means miss", int((apart > 0.1).sum())))
    return [*rows, Row("all", f"parameters missed, of {count}", missed, "<=", 0)]


def main() -> None:
    options = arguments(__doc__).parse_args()
    small = options.small
    at = machine()
    args = data()
    warm_up()
    pyro.set_rng_seed(0)
    ours, cvi = with_cvi(args)
    theirs, nuts = with_nuts(args, *((150, 150) if small else (1000, 2000)))
    rows = [
        *rows_of(ours, theirs),
        Row("NUTS", "largest R-hat", nuts["r_hat"]),
        Row("NUTS", "least effective sample size", nuts["ess"]),
        Row("NUTS", "seconds, some of them for compilation", nuts["seconds"]),
        Row("CVI", f"{cvi['steps']:.0f} steps with guide and plan, seconds", cvi["seconds"]),
        Row("CVI", "seconds per step", cvi["step"]),
        Row("both", "NUTS / CVI", nuts["seconds"] / cvi["seconds"]),
    ]
    details = {
        n: {
            key: [np.asarray(v).tolist() for v in pair]
            for key, pair in (("cvi", ours[n]), ("nuts", theirs[n]))
        }
        for n in theirs
    }
    report(
        __file__,
        rows,
        at,
        small,
        versions=versions("numpyro", "jax"),
        cvi=cvi,
        nuts=nuts,
        **details,
    )


if __name__ == "__main__":
    run(main)
