"""A heteroscedastic Gaussian process and two robust regressions: how near to NUTS?

    motorcycle     y ~ N(f(t), exp g(t)),   f, g Gaussian processes (squared exponential)
    german_credit  y ~ Bernoulli(Phi(x^T w)),  w ~ N(0, 1) and w ~ StudentT(4, 0, 1)

with times, accelerations and features standardised. NumPyro's NUTS samples the same models, the
processes through their Cholesky factors.
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


def kernel(t: np.ndarray, variance: float, scale: float) -> np.ndarray:
    squares = (t[:, None] - t) ** 2
    return variance * np.exp(-0.5 * squares / scale**2) + 1e-6 * variance * np.eye(len(t))


def motorcycle(y: Tensor, which: Tensor, K_f: Tensor, K_g: Tensor) -> None:
    n = len(K_f)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(n), K_f))
    g = pyro.sample("g", dist.MultivariateNormal(-torch.ones(n), K_g))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(f[which], g[which].exp()), obs=y)


def probit(X: Tensor, y: Tensor, heavy: bool) -> None:
    columns = X.shape[1]
    prior = dist.StudentT(4.0, 0.0, 1.0) if heavy else dist.Normal(0.0, 1.0)
    w = pyro.sample("w", prior.expand([columns]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(torch.special.ndtr(X @ w)), obs=y)


def compared(name: str, site: str, q: Any, draws: np.ndarray, sd_target: float) -> list[Row]:
    mean, sd = apart(q, draws)
    return [
        Row(name, f"{site}: mean's difference in NUTS's standard deviations, worst",
            mean, "<=", 0.1),
        Row(name, f"{site}: |ratio of standard deviations - 1|, worst",
            sd, "<=", sd_target),
    ]  # fmt: skip


def main() -> None:
    small = arguments(__doc__).parse_args().small
    at = machine()
    torch.set_default_dtype(torch.float64)
    warm_up()
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as ndist
    from jax.scipy.special import ndtr

    jax.config.update("jax_enable_x64", True)
    warmup, samples = (50, 100) if small else (1000, 4000)
    rows = []
    d = arrays("motorcycle")
    t, y = d["times"], d["accel"] / d["accel"].std()
    points, which = np.unique((t - t.mean()) / t.std(), return_inverse=True)
    K_f, K_g = kernel(points, 1.0, 0.35), kernel(points, 1.0, 0.5)
    start = time.perf_counter()
    guide = AutoCVI(motorcycle)
    args = [torch.as_tensor(a) for a in (y, which, K_f, K_g)]
    result = CVI(motorcycle, guide).run(*args, num_steps=200, tol=1e-8)
    ours = time.perf_counter() - start
    L_f, L_g = (jnp.asarray(np.linalg.cholesky(K)) for K in (K_f, K_g))

    def process() -> None:
        size = len(points)
        a = numpyro.sample("a", ndist.Normal(0.0, 1.0).expand([size]).to_event(1))
        b = numpyro.sample("b", ndist.Normal(0.0, 1.0).expand([size]).to_event(1))
        f = numpyro.deterministic("f", L_f @ a)
        g = numpyro.deterministic("g", -1.0 + L_g @ b)
        numpyro.sample("y", ndist.Normal(f[which], jnp.exp(g[which])), obs=jnp.asarray(y))

    draws, theirs = nuts(process, warmup, samples)
    rows += [
        Row("motorcycle", f"CVI, {result.num_steps} steps, {guide.plan.blocks[0].structure}: seconds",
            ours),
        Row("motorcycle", "NUTS: seconds, some of them for compilation", theirs),
    ]  # fmt: skip
    for site in ("f", "g"):
        rows += compared("motorcycle", site, guide.posterior(site), draws[site], 0.1)

    d = arrays("german_credit")
    X = d["X"].astype(float)
    X = np.concatenate([np.ones((len(X), 1)), (X - X.mean(0)) / X.std(0)], 1)
    y = d["y"].astype(float)
    for heavy in (False, True):
        name = "german credit, probit, " + ("Student t prior" if heavy else "normal prior")
        start = time.perf_counter()
        guide = AutoCVI(probit)
        result = CVI(probit, guide).run(torch.as_tensor(X), torch.as_tensor(y), heavy, tol=1e-8)
        ours = time.perf_counter() - start

        def regression(heavy: bool = heavy) -> None:
            prior = ndist.StudentT(4.0, 0.0, 1.0) if heavy else ndist.Normal(0.0, 1.0)
            w = numpyro.sample("w", prior.expand([X.shape[1]]).to_event(1))
            p = jnp.clip(ndtr(jnp.asarray(X) @ w), 1e-12, 1 - 1e-12)
            numpyro.sample("y", ndist.Bernoulli(p), obs=jnp.asarray(y))

        draws, theirs = nuts(regression, warmup, samples)
        rows += [
            Row(name, f"CVI, {result.num_steps} steps: seconds", ours),
            Row(name, "NUTS: seconds, some of them for compilation", theirs),
            Row(name, "NUTS's seconds over CVI's", theirs / ours, ">=", 50.0),
            *compared(name, "w", guide.posterior("w"), draws["w"], 0.05),
        ]
    report(__file__, rows, at, small, versions=versions("numpyro"))


if __name__ == "__main__":
    run(main)
