"""Local levels with Gaussian and Poisson observations: right, and linear in time?

    x_1 ~ N(0, s_1),    x_t ~ N(x_(t-1), s),    y_t ~ N(x_t, r)  or  Poisson(exp x_t)

Nile (Gaussian; an exact Kalman smoother), coal mining and a synthetic Poisson series. At T = 500 the
same model with a dense block; at T = 100,000 dynamax's conditional-moments Gaussian filter and smoother
(compiled, iterated once), which solves the same smoothing problem by local approximations.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, arrays, machine, report, run, versions, warm_up
from torch import Tensor

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.graph import blocks


def poisson(y: Tensor, s: float) -> None:
    x = pyro.sample("x", dist.Normal(0.0, 3.0).expand([len(y)]).to_event(1))
    zero = torch.zeros(len(y) - 1)
    pyro.sample("steps", dist.Normal(x[1:] - x[:-1], s).to_event(1), obs=zero)
    with pyro.plate("time", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def local_level(y: Tensor, s: float, r: float) -> None:
    """A Python loop over time."""
    x: Any = None
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Normal(1000.0, 500.0) if x is None else dist.Normal(x, s))
        pyro.sample(f"y_{t}", dist.Normal(x, r), obs=y[t])


def kalman(y: np.ndarray, s: float, r: float) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the smoother, forwards and backwards."""
    n = len(y)
    m, v = np.zeros(n), np.zeros(n)
    mean, variance = 1000.0, 500.0**2
    for t in range(n):
        gain = variance / (variance + r**2)
        m[t], v[t] = mean + gain * (y[t] - mean), variance * (1 - gain)
        mean, variance = m[t], v[t] + s**2
    for t in range(n - 2, -1, -1):
        gain = v[t] / (v[t] + s**2)
        m[t] += gain * (m[t + 1] - m[t])
        v[t] += gain**2 * (v[t + 1] - v[t] - s**2)
    return m, np.sqrt(v)


def fit(model: Any, *args: Any, dense: bool = False) -> tuple[AutoCVI, Any, float]:
    kept = blocks._viewed
    if dense:
        blocks._viewed = lambda *args: None
    try:
        start = time.perf_counter()
        guide = AutoCVI(model)
        result = CVI(model, guide).run(*args, num_steps=100, tol=1e-9)
        return guide, result, time.perf_counter() - start
    finally:
        blocks._viewed = kept


def with_dynamax(y: np.ndarray, s: float) -> tuple[np.ndarray, float]:
    """The smoothed means, and the seconds after compilation."""
    import jax
    import jax.numpy as jnp
    from dynamax.generalized_gaussian_ssm import EKFIntegrals, ParamsGGSSM
    from dynamax.generalized_gaussian_ssm import conditional_moments_gaussian_smoother as smoother
    from tensorflow_probability.substrates.jax.distributions import (
        MultivariateNormalFullCovariance as MultivariateNormal,
    )

    jax.config.update("jax_enable_x64", True)
    one = jnp.ones((1, 1))
    params = ParamsGGSSM(
        initial_mean=jnp.zeros(1),
        initial_covariance=9.0 * one,
        dynamics_function=lambda x: x,
        dynamics_covariance=s**2 * one,
        emission_mean_function=jnp.exp,
        emission_cov_function=lambda x: jnp.diag(jnp.exp(x)),
        emission_dist=lambda mean, cov: MultivariateNormal(mean, cov),
    )
    go = jax.jit(lambda data: smoother(params, EKFIntegrals(), data).smoothed_means)
    data = jnp.asarray(y)[:, None]
    go(data).block_until_ready()
    start = time.perf_counter()
    means = go(data).block_until_ready()
    return np.asarray(means)[:, 0], time.perf_counter() - start


def synthetic(steps: int) -> np.ndarray:
    rng = np.random.RandomState(0)
    x = (
        1.5
        + np.sin(np.arange(steps) / 150.0)
        + 0.02 * rng.randn(steps).cumsum() / np.sqrt(steps / 500)
    )
    return rng.poisson(np.exp(x)).astype(float)


def main() -> None:
    small = arguments(__doc__).parse_args().small
    at = machine()
    torch.set_default_dtype(torch.float64)
    warm_up()
    rows = []
    nile = arrays("nile")["flow"]
    guide, result, seconds = fit(local_level, torch.tensor(nile), 38.3, 122.9)
    mean, sd = kalman(nile, 38.3, 122.9)
    q = [guide.posterior(f"x_{t}") for t in range(len(nile))]
    off = max(abs(float(a.mean) - m) / s for a, m, s in zip(q, mean, sd, strict=True))
    wide = max(abs(float(a.stddev) / s - 1) for a, s in zip(q, sd, strict=True))
    rows += [
        Row("Nile, T = 100", f"{result.num_steps} steps, {guide.plan.blocks[0].structure}: seconds",
            seconds),
        Row("Nile, T = 100", "means against the Kalman smoother, in standard deviations", off,
            "<=", 1e-6),
        Row("Nile, T = 100", "standard deviations against the Kalman smoother, relative", wide,
            "<=", 1e-6),
    ]  # fmt: skip
    coal = torch.tensor(arrays("coal_mining")["count"].astype(float))
    series = {"coal mining, T = 112": (coal, 0.15)}
    series["synthetic, T = 500"] = (torch.tensor(synthetic(500)), 0.03)
    for name, (y, s) in series.items():
        chain, result, seconds = fit(poisson, y, s)
        full, other, theirs = fit(poisson, y, s, dense=True)
        a, b = chain.posterior("x"), full.posterior("x")
        spread = b.variance.sqrt()
        rows += [
            Row(name, f"{result.num_steps} steps, {chain.plan.blocks[0].structure}: seconds", seconds),
            Row(name, f"{other.num_steps} steps, {full.plan.blocks[0].structure}: seconds", theirs),
            Row(name, "negative bound against the dense block's, relative",
                abs(result.losses[-1] / other.losses[-1] - 1), "<=", 1e-6),
            Row(name, "means, in standard deviations, worst",
                float(((a.mean - b.mean) / spread).abs().max()), "<=", 1e-3),
        ]  # fmt: skip
    times = {}
    for steps in (1000, 3000) if small else (10_000, 100_000):
        y = synthetic(steps)
        chain, result, seconds = fit(poisson, torch.tensor(y), 0.03)
        times[steps] = result.seconds / result.num_steps
        name = f"synthetic, T = {steps:,}"
        means, theirs = with_dynamax(y, 0.03)
        q = chain.posterior("x")
        apart = np.abs(q.mean.numpy() - means) / q.variance.sqrt().numpy()
        rows += [
            Row(name, f"{result.num_steps} steps: seconds, with guide and plan", seconds),
            Row(name, "seconds of one step", times[steps]),
            Row(name, "dynamax, one pass, compiled: seconds", theirs),
            Row(name, "CVI's seconds over dynamax's", seconds / theirs, "<=", 2.0),
            Row(name, "dynamax's means, in standard deviations, root mean square",
                float(np.sqrt((apart**2).mean()))),
        ]  # fmt: skip
    a, b = times
    power = np.log(times[b] / times[a]) / np.log(b / a)
    rows.append(
        Row("synthetic", "seconds of one step grow as T to the power", float(power), "<=", 1.1)
    )
    report(__file__, rows, at, small, versions=versions("dynamax", "jax"))


if __name__ == "__main__":
    run(main)
