"""Probabilistic PCA with and without missing data: the same bound as BayesPy, and how much faster?

Model, the same in both:

    z_n ~ N(0, I_K);  W_d ~ N(0, I_K);  tau ~ Gamma(1e-3, 1e-3);  x_nd ~ N(z_n . W_d, 1/tau)

with the same posterior q(Z) q(W) q(tau): a full K x K covariance for every row of Z and of W. A missing
entry is masked (`dist.mask` here, `observe(mask=...)` there). BayesPy starts from the beliefs that our
guide starts with, parameter by parameter, and updates its nodes in the order of our blocks; so the
bounds agree sweep by sweep, and no convergence is needed to compare them. BayesPy's optional rotations
(parameter expansion), which save sweeps, are left out: this package has none.

All in float64. BayesPy computes its bound in every iteration too. Its clock is that of `VB.update`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Fit, Row, arguments, fit, machine, report, run, sweep_seconds, versions, warm_up
from torch import Tensor

SWEEPS = 20
PRIOR = 1e-3


def data(N: int, D: int, K: int) -> tuple[Tensor, Tensor]:
    """Rows of rank K with noise of standard deviation 0.5, and which entries are seen (4 of 5)."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, K)) @ rng.normal(size=(K, D)) + 0.5 * rng.normal(size=(N, D))
    return torch.from_numpy(x), torch.from_numpy(rng.random((N, D)) < 0.8)


def model(x: Tensor, K: int, seen: Tensor | None = None) -> None:
    """Without `seen` nothing is missing."""
    N, D = x.shape
    zeros, ones = x.new_zeros(K), x.new_ones(K)
    tau = pyro.sample("tau", dist.Gamma(x.new_tensor(PRIOR), x.new_tensor(PRIOR)))
    rows, columns = pyro.plate("rows", N, dim=-2), pyro.plate("columns", D, dim=-1)
    with columns:
        W = pyro.sample("W", dist.Normal(zeros, ones).to_event(1))
    with rows:
        z = pyro.sample("z", dist.Normal(zeros, ones).to_event(1))
    noise = dist.Normal(z.squeeze(-2) @ W.mT, tau.rsqrt())
    with rows, columns:
        pyro.sample("x", noise if seen is None else noise.mask(seen), obs=x)


def start_of(args: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """The guide as it starts, and its sites in the order in which a sweep moves them."""
    pyro.set_rng_seed(0)
    f = fit(args, 0, model)
    f.guide(*args)
    return f.guide, [site for block in f.guide.plan.blocks for site in block.sites]


def with_cvi(args: tuple[Any, ...], start: Any, sweeps: int) -> Fit:
    """From the beliefs of the guide `start`."""
    return fit(args, sweeps, model, state=start.state_dict())


def with_bayespy(
    args: tuple[Any, ...], start: Any, order: list[str], sweeps: int
) -> tuple[list[float], list[float]]:
    """Negative bounds and seconds of each iteration."""
    from bayespy.inference import VB
    from bayespy.nodes import Gamma, GaussianARD, SumMultiply

    x, K, *seen = args
    N, D = x.shape
    nodes: dict[str, Any] = {
        "z": GaussianARD(0, 1, shape=(K,), plates=(N, 1), name="z"),
        "W": GaussianARD(0, 1, shape=(K,), plates=(1, D), name="W"),
        "tau": Gamma(PRIOR, PRIOR, name="tau"),
    }
    Y = GaussianARD(SumMultiply("i,i", nodes["z"], nodes["W"]), nodes["tau"], name="Y")
    Y.observe(x.numpy(), mask=seen[0].numpy() if seen else True)
    for name, lead in (("z", (N, 1)), ("W", (1, D))):
        q = start.posterior(name)
        loc, variance = (t.numpy().reshape(*lead, K) for t in (q.mean, q.variance))
        nodes[name].initialize_from_parameters(loc, 1 / variance)
    q = start.posterior("tau")
    nodes["tau"].initialize_from_parameters(float(q.concentration), float(q.rate))
    Q = VB(Y, *nodes.values())
    seconds = []
    for _ in range(sweeps):
        begin = time.perf_counter()
        Q.update(*order, repeat=1, verbose=False)
        seconds.append(time.perf_counter() - begin)
    return [-float(b) for b in Q.L[:sweeps]], seconds


def noise_of(guide: Any) -> float:
    return float(guide.posterior("tau").mean) ** -0.5


def compare(case: str, args: tuple[Any, ...], sweeps: int, timed: int) -> tuple[list[Row], Any]:
    """Bounds and seconds of both."""
    start, order = start_of(args)
    ours = with_cvi(args, start, sweeps)
    theirs, seconds = with_bayespy(args, start, order, sweeps)
    apart = [abs(a / b - 1) for a, b in zip(ours.losses, theirs, strict=True)]
    sweep = sweep_seconds(ours, args, timed)
    median = float(np.median(seconds[1:]))
    rows = [
        Row(case, "bound: largest relative difference, any sweep", max(apart), "<=", 1e-6),
        Row(case, f"the same after {sweeps} sweeps", apart[-1], "<=", 1e-6),
        Row(case, "negative bound", ours.losses[-1]),
        Row(case, "standard deviation of the noise (true: 0.5)", noise_of(ours.guide)),
        Row(case, "plan, seconds", ours.plan_seconds),
        Row(case, "step(), seconds", ours.step_seconds),
        Row(case, "sweep inside of run(), seconds", sweep),
        Row(case, "iteration of BayesPy, seconds", median),
        Row(case, "BayesPy's iteration / sweep", median / sweep, ">=", 3.0),
    ]
    return rows, {"losses": ours.losses, "theirs": theirs, "seconds": seconds, "order": order}


def growth(sizes: tuple[int, ...], D: int, K: int, masked: bool, timed: int) -> list[Row]:
    """Seconds a sweep over the number of rows."""
    name = "a fifth missing" if masked else "complete"
    times = []
    for N in sizes:
        x, seen = data(N, D, K)
        args = (x, K, seen) if masked else (x, K)
        times.append(sweep_seconds(fit(args, 1, model), args, timed))
    power = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
    case = f"rows, {name}"
    return [
        *(Row(case, f"{N} x {D}: sweep inside of run(), seconds", t)
          for N, t in zip(sizes, times, strict=True)),
        Row(case, "cost grows as rows to the power", power, "<=", 1.1),
    ]  # fmt: skip


def main() -> None:
    options = arguments(__doc__).parse_args()
    small = options.small
    at = machine()
    warm_up()
    N, D, K = (400, 12, 3) if small else (20_000, 100, 10)
    sizes = (200, 400, 800) if small else (10_000, 20_000, 40_000)
    timed = 4 if small else 8
    x, seen = data(N, D, K)
    tiny = (x[:50, :7], 2, seen[:50, :7])
    compare("", tiny, 3, 2)  # what the first use costs
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for name, args in (("complete", (x, K)), ("a fifth missing", (x, K, seen))):
        case = f"{N} x {D}, K = {K}, {name}"
        more, details[case] = compare(case, args, 5 if small else SWEEPS, timed)
        rows += more
    for masked in (False, True):
        rows += growth(sizes, D, K, masked, timed)
    report(__file__, rows, at, small, versions=versions("bayespy"), **details)


if __name__ == "__main__":
    run(main)
