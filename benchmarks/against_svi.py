"""How long until a1a is within 1 % of the optimum: CVI, Pyro's SVI and NumPyro's compiled SVI?

All have the same full-covariance Gaussian, all start at the prior's mean, all in float64. SVI is
judged by the exact bound of its Gaussian, in between chunks of steps and off the clock; NumPyro's
compilation is off the clock too. CVI's clock includes guide, plan and all.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import torch
from _common import (
    DataMissingError,
    Problem,
    Row,
    exact_negative_bound,
    load,
    machine,
    model,
    report,
    warm_up,
)
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from pyro.optim import Adam

from pyro_cvi import CVI, AutoCVI

RATES = (0.001, 0.003, 0.01, 0.03)
WITHIN = 1.01
CHUNK = 25
COMPILED_CHUNK = 100
REPEATS = 5
SEEDS = 3


@dataclass
class Run:
    """Until the bound came near enough (or the cap): seconds, steps, and the best bound seen."""

    rate: float
    seconds: float = 0.0
    steps: int = 0
    best: float = math.inf
    arrived: bool = False


def advance(
    run: Run, goal: float, cap: float, steps: int,
    chunk: Callable[[], None], bound: Callable[[], float],
) -> Run:  # fmt: skip
    """Chunks of steps until the bound of the Gaussian they leave is below the goal."""
    while run.seconds < cap and not run.arrived:
        start = time.perf_counter()
        chunk()
        run.seconds += time.perf_counter() - start
        run.steps += steps
        run.best = min(run.best, bound())
        run.arrived = run.best <= goal
    return run


def with_cvi(p: Problem, goal: float) -> Run:
    """Fresh objects; every step returns its bound, so nothing else is evaluated."""
    start = time.perf_counter()
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    steps, loss = 0, math.inf
    while loss > goal and steps < 100:
        loss = cvi.step(*p.args)
        steps += 1
    seconds = time.perf_counter() - start
    q = guide.posterior("w")
    exact = exact_negative_bound(p, q.loc, q.scale_tril)
    assert abs(exact - loss) < 1e-6 * loss, f"CVI says {loss}, the exact bound is {exact}"
    return Run(0.0, seconds, steps, loss, loss <= goal)


def with_pyro(p: Problem, goal: float, rate: float, cap: float) -> Run:
    """Pyro's SVI as its tutorials use it: one sample, Adam."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    guide = AutoMultivariateNormal(model, init_loc_fn=init_to_mean)
    svi = SVI(model, guide, Adam({"lr": rate}), Trace_ELBO())

    def chunk() -> None:
        for _ in range(CHUNK):
            svi.step(*p.args)

    def bound() -> float:
        q = guide.get_posterior()
        return exact_negative_bound(p, q.loc.detach(), q.scale_tril.detach())

    return advance(Run(rate, time.perf_counter() - start), goal, cap, CHUNK, chunk, bound)


def with_numpyro(p: Problem, goal: float, cap: float) -> list[Run]:
    """NumPyro's SVI, each chunk one compiled loop; per rate the median of a few seeds."""
    import jax
    import numpyro
    import numpyro.distributions as ndist
    from jax import lax, random
    from numpyro.infer import SVI as NumSVI
    from numpyro.infer import Trace_ELBO as NumTrace
    from numpyro.infer.autoguide import AutoMultivariateNormal as NumGuide
    from numpyro.infer.initialization import init_to_mean as num_init

    jax.config.update("jax_enable_x64", True)
    data = tuple(jax.numpy.asarray(t.numpy()) for t in p.args)

    def num_model(X: jax.Array, y: jax.Array, precision: jax.Array) -> None:
        w = numpyro.sample("w", ndist.Normal(0.0, precision**-0.5).to_event(1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", ndist.Bernoulli(logits=X @ w), obs=y)

    def at_rate(rate: float) -> Run:
        guide = NumGuide(num_model, init_loc_fn=num_init)
        svi = NumSVI(num_model, guide, numpyro.optim.Adam(rate), NumTrace())

        @jax.jit
        def loop(state: Any, data: Any) -> Any:
            return lax.fori_loop(0, COMPILED_CHUNK, lambda _, s: svi.update(s, *data)[0], state)

        def from_seed(seed: int) -> Run:
            state = svi.init(random.PRNGKey(seed), *data)
            jax.block_until_ready(loop(state, data))  # compiles at the first seed

            def chunk() -> None:
                nonlocal state
                state = jax.block_until_ready(loop(state, data))

            def bound() -> float:
                q = guide.get_posterior(svi.get_params(state))
                loc, tril = (torch.as_tensor(np.array(a)) for a in (q.loc, q.scale_tril))
                return exact_negative_bound(p, loc, tril)

            return advance(Run(rate), goal, cap, COMPILED_CHUNK, chunk, bound)

        runs = sorted(map(from_seed, range(SEEDS)), key=lambda r: (not r.arrived, r.seconds))
        return runs[SEEDS // 2]

    return [at_rate(rate) for rate in RATES]


def rows_of(label: str, runs: list[Run], ours: float, target: float) -> list[Row]:
    """The seconds of every rate, and the best in units of ours; a cap is a lower bound."""
    rows = []
    for r in runs:
        outcome = "seconds" if r.arrived else f"given up at {r.seconds:.0f} s, best {r.best:.1f}"
        what = f"Adam {r.rate:g}: {r.steps} steps, {outcome}"
        rows.append(Row(label, what, r.seconds if r.arrived else None))
    arrived = [r.seconds for r in runs if r.arrived]
    best = min(arrived) if arrived else max(r.seconds for r in runs)
    what = "its best / CVI" if arrived else "more than (none arrived) / CVI"
    return [*rows, Row(label, what, best / ours, ">=", target)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cap", type=float, default=120.0, help="seconds per Pyro run")
    parser.add_argument("--compiled-cap", type=float, default=20.0, help="per NumPyro run")
    options = parser.parse_args()
    cap, compiled_cap = options.cap, options.compiled_cap
    at = machine()
    try:
        p = load("a1a")
    except DataMissingError as e:
        print(f"skipped: {e}")
        return
    warm_up()
    goal = WITHIN * p.reference.negative_bound
    ours = sorted((with_cvi(p, goal) for _ in range(REPEATS)), key=lambda r: r.seconds)
    cvi = ours[REPEATS // 2]
    rows = [
        Row("CVI", f"{cvi.steps} steps with guide and plan, median seconds", cvi.seconds),
        Row("CVI", f"slowest of {REPEATS}, seconds", ours[-1].seconds),
    ]
    runs = {"CVI": ours, "Pyro": [with_pyro(p, goal, rate, cap) for rate in RATES]}
    rows += rows_of("Pyro SVI", runs["Pyro"], cvi.seconds, 100)
    try:
        runs["NumPyro"] = with_numpyro(p, goal, compiled_cap)
    except ImportError as e:
        print(f"NumPyro is left out ({e}): pip install -e '.[bench]' brings it")
    else:
        rows += rows_of("NumPyro SVI, compiled", runs["NumPyro"], cvi.seconds, 20)
    report(__file__, rows, at, cap=cap, runs={k: [vars(r) for r in v] for k, v in runs.items()})


if __name__ == "__main__":
    main()
