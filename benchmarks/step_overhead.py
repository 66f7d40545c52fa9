"""What does a step cost where there is next to nothing to compute: CVI and SVI on tiny models?

SVI has AutoNormal, Trace_ELBO and Adam. The two take turns, so that a busy moment of the machine
hits both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, machine, report, warm_up
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

Model = Callable[[Tensor], None]


def coin(x: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(10.0, 10.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Bernoulli(p), obs=x)


def coin_in_a_loop(x: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(10.0, 10.0))
    for i in range(len(x)):
        pyro.sample(f"x_{i}", dist.Bernoulli(p), obs=x[i])


def two_scalars(x: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(a + b * torch.arange(len(x)), 1.0), obs=x)


def gamma_poisson(x: Tensor) -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Poisson(rate), obs=x)


def many_sites(x: Tensor) -> None:
    for i in range(len(x)):
        z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
        pyro.sample(f"x_{i}", dist.Normal(z, 1.0), obs=x[i])


FLIPS = torch.tensor([1.0] * 6 + [0.0] * 4)
COUNTS = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0])

# name, model, data, rounds, steps a round, target of the ratio
CASES: list[tuple[str, Model, Tensor, int, int, float | None]] = [
    ("coin, plate of 10", coin, FLIPS, 15, 20, 3.0),
    ("coin, loop of 10 sites", coin_in_a_loop, FLIPS, 15, 20, 3.0),
    ("two scalars, 10 data", two_scalars, COUNTS, 15, 20, 3.0),
    ("Gamma-Poisson, 10 data", gamma_poisson, COUNTS, 15, 20, 3.0),
    ("200 scalar sites", many_sites, torch.linspace(-2.0, 2.0, 200), 5, 2, None),
]


def _timed(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def compare(
    name: str, model: Model, x: Tensor, rounds: int, steps: int, target: float | None
) -> tuple[list[Row], dict[str, list[float]]]:
    """First step and median step of both."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    cvi = CVI(model, AutoCVI(model))
    cvi.step(x)
    plan = time.perf_counter() - start
    start = time.perf_counter()
    svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(x)
    first = time.perf_counter() - start
    ours, theirs = [], []
    for _ in range(rounds):
        ours += [_timed(lambda: cvi.step(x)) for _ in range(steps)]
        theirs += [_timed(lambda: svi.step(x)) for _ in range(steps)]
    a, b = float(np.median(ours)), float(np.median(theirs))
    rows = [
        Row(name, "CVI, first step with the plan, ms", 1e3 * plan),
        Row(name, "SVI, first step, ms", 1e3 * first),
        Row(name, "CVI, median step, ms", 1e3 * a),
        Row(name, "SVI, median step, ms", 1e3 * b),
        Row(name, "CVI step / SVI step", a / b, "<=" if target else "", target),
    ]
    tenths = (0.1, 0.5, 0.9)
    return rows, {
        "cvi": np.quantile(ours, tenths).tolist(),
        "svi": np.quantile(theirs, tenths).tolist(),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    at = machine()
    warm_up()
    for model in (coin, gamma_poisson):  # what each family, and SVI, costs at its first use
        compare("", model, FLIPS, 1, 1, None)
    rows: list[Row] = []
    seconds = {}
    for case in CASES:
        more, seconds[case[0]] = compare(*case)
        rows += more
    report(__file__, rows, at, seconds_at_10_50_90_percent=seconds)


if __name__ == "__main__":
    main()
