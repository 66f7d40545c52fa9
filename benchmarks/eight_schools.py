"""Eight schools, centred and not: how near to NUTS?

    mu ~ N(0, 5);    tau ~ HalfCauchy(5);    y_j ~ N(theta_j, sigma_j);
    theta_j ~ N(mu, tau), or theta_j = mu + tau eta_j with eta_j ~ N(0, 1)

tau has a Gaussian on log tau; in the non-centred form it shares one block with mu and all eta. Compared
with NUTS (NumPyro, 4 chains, non-centred in both cases, for the centred form has no other posterior).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, apart, arguments, arrays, machine, nuts, report, run, versions, warm_up
from torch import Tensor

from pyro_cvi import CVI, AutoCVI


def centred(y: Tensor, sigma: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def non_centred(y: Tensor, sigma: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, sigma), obs=y)


def with_nuts(y: Any, sigma: Any, warmup: int, samples: int) -> tuple[dict[str, Any], float]:
    import numpyro
    import numpyro.distributions as ndist

    def model() -> None:
        mu = numpyro.sample("mu", ndist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", ndist.HalfCauchy(5.0))
        with numpyro.plate("schools", len(y)):
            eta = numpyro.sample("eta", ndist.Normal(0.0, 1.0))
            numpyro.sample("y", ndist.Normal(mu + tau * eta, sigma), obs=y)

    draws, seconds = nuts(model, warmup, samples, chains=4, accept=0.95)
    draws["theta"] = draws["mu"][:, None] + draws["tau"][:, None] * draws["eta"]
    return draws, seconds


def main() -> None:
    small = arguments(__doc__).parse_args().small
    at = machine()
    warm_up()
    torch.set_default_dtype(torch.float64)
    d = arrays("eight_schools")
    y, sigma = (torch.tensor(np.asarray(d[n], dtype=float)) for n in ("y", "sigma"))
    draws, seconds = with_nuts(
        y.numpy(), sigma.numpy(), 100 if small else 1000, 200 if small else 10_000
    )
    rows = [Row("NUTS", "seconds, some of them for compilation", seconds)]
    for model in (centred, non_centred):
        name = model.__name__.replace("_", "-")
        start = time.perf_counter()
        guide = AutoCVI(model)
        result = CVI(model, guide).run(y, sigma, num_steps=200, tol=1e-9)
        rows.append(
            Row(name, f"CVI, {result.num_steps} steps: seconds", time.perf_counter() - start)
        )
        target = ("<=", 0.1) if model is non_centred else ()
        for site in ("mu", "tau", "eta" if model is non_centred else "theta"):
            mean, sd = apart(guide.posterior(site), draws[site])
            rows += [
                Row(name, f"{site}: mean's difference in NUTS's standard deviations, worst",
                    mean, *target),
                Row(name, f"{site}: |ratio of standard deviations - 1|, worst",
                    sd, *target),
            ]  # fmt: skip
    report(__file__, rows, at, small, versions=versions("numpyro"))


if __name__ == "__main__":
    run(main)
