"""Is memory flat over 10,000 minibatch steps?

Resident memory and live tensors after a tenth of the steps and after all of them, each kind of fit in a
process of its own:

    logistic          rows that a plate draws, messages of all batches stored
    shuffled          the same by a loop over all rows, mixed anew in each pass
    mixture           a state for every row, of which each step sees some
    hybrid            a VAE with a learnt mixture for its prior: encoder, decoder and exact messages
    sampled           weights of a small network
    sampled, whole    the same with all rows, where the steps are averaged

Growth that would matter is a tensor or a few hundred bytes for every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, in_child, machine, report, run
from pyro import poutine
from pyro.optim import Adam
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, HybridGuide

ROWS, COLUMNS, BATCH = 2000, 5, 100
Step = Callable[[], float]


def logistic(x: Tensor, y: Tensor, index: Tensor | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(COLUMNS), 1.0).to_event(1))
    with pyro.plate("rows", len(x), subsample_size=BATCH, subsample=index) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def mixture(x: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(COLUMNS), 3.0).to_event(1))
    with pyro.plate("rows", len(x), subsample_size=BATCH) as i:
        c = pyro.sample("c", dist.Categorical(p))
        pyro.sample("x", dist.Normal(mu[c], 1.0).to_event(1), obs=x[i])


def network(x: Tensor, y: Tensor, size: int) -> None:
    v = pyro.sample("v", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    u = pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x), subsample_size=size) as i:
        pyro.sample("y", dist.Bernoulli(logits=(x[i, :2] @ v).tanh() @ u), obs=y[i])


def vae() -> tuple[Callable[[Tensor], None], HybridGuide]:
    encoder, decoder = torch.nn.Linear(COLUMNS, 4), torch.nn.Linear(2, COLUMNS)

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        w = pyro.sample("w", dist.Dirichlet(torch.full((3,), 20.0)))
        with pyro.plate("components", 3):
            mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=len(x)):
            c = pyro.sample("c", dist.Categorical(w))
            z = pyro.sample("z", dist.Normal(mu[c], 0.5).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def encode(x: Tensor) -> None:
        pyro.module("encoder", encoder)
        loc, log_scale = encoder(x).chunk(2, -1)
        with pyro.plate("rows", ROWS, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    guide = HybridGuide(model)
    guide.append(AutoCVI(poutine.block(model, hide=["z"])))
    guide.append(encode)
    return model, guide


def shuffled() -> Iterator[Tensor]:
    """The batches of one pass after the other."""
    return chain.from_iterable(torch.randperm(ROWS).split(BATCH) for _ in count())


def fit(kind: str) -> Step:
    """A step of a fit of that kind."""
    pyro.set_rng_seed(0)
    x = torch.randn(ROWS, COLUMNS)
    y = (x[:, 0] > 0).float()
    batches = shuffled()
    if kind == "hybrid":
        model, guide = vae()
        learning = CVI(model, guide, Adam({"lr": 1e-3}))
        return lambda: learning.step(x[next(batches)])
    of: Callable[..., None] = {"logistic": logistic, "shuffled": logistic, "mixture": mixture}.get(
        kind, network
    )
    cvi = CVI(of, AutoCVI(of), num_samples=4)
    if kind == "shuffled":
        return lambda: cvi.step(x, y, next(batches))
    if kind == "mixture":
        return lambda: cvi.step(x)
    size = [ROWS if "whole" in kind else BATCH] if of is network else []
    return lambda: cvi.step(x, y, *size)


KINDS = ("logistic", "shuffled", "mixture", "hybrid", "sampled", "sampled, whole")


def resident_mb() -> float:
    """Of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def child(kind: str, steps: int) -> None:
    """One kind of fit; prints its figures as one line of JSON."""
    torch.set_num_threads(1)
    step, found = fit(kind), {}
    start = time.perf_counter()
    for i in range(1, steps + 1):
        step()
        if i in (steps // 10, steps):
            found[i] = {"tensors": live_tensors(), "mb": resident_mb()}
    print(json.dumps({"after": found, "seconds": time.perf_counter() - start}))


def rows_of(kind: str, f: dict[str, Any], steps: int) -> list[Row]:
    early, late = (f["after"][str(i)] for i in (steps // 10, steps))
    return [
        Row(kind, f"live tensors after {steps // 10} steps", early["tensors"]),
        Row(kind, f"more of them after {steps}", late["tensors"] - early["tensors"], "<=", 0),
        Row(kind, f"resident MB after {steps // 10} steps", early["mb"]),
        Row(kind, f"more of it after {steps}", late["mb"] - early["mb"], "<=", 10),
        Row(kind, "ms per step", 1e3 * f["seconds"] / steps),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="some of the fits")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]))
        return
    steps = 400 if options.small else 10_000
    at, rows, found = machine(), [], {}
    for kind in options.kinds:
        found[kind] = in_child(__file__, kind, str(steps))
        rows += rows_of(kind, found[kind], steps)
    report(__file__, rows, at, options.small, **found)


if __name__ == "__main__":
    run(main)
