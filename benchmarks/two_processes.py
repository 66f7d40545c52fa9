"""Rows spread over two processes: the same fit as that of one, and how much sooner?

    logistic    w ~ N(0, I/tau), tau ~ Gamma(2, 1);  y_n ~ Bernoulli(sigmoid(x_n . w)),  1,000,000 x 20
    mixture     pi ~ Dirichlet(1);  z_n ~ Categorical(pi);  x_nd ~ N(mu[z_n]_d, 1/tau[z_n]_d),
                500,000 x 5, five components

Each fit is STEPS calls of `step` in float64, one thread to a process: by one process with all rows, and
by two that torchrun has started, each with half of them (`CVI(shards=["rows"])`, gloo). The mixture
starts at given labels, as seeds are not looked for in several processes. What is compared is the
posterior of everything outside of the rows, the responsibilities of the first process's rows, and the
loss of every step: absolute differences, and relative ones of numbers above one. They are those of the
order of summation. A step is timed between barriers, with the data in memory. Other work on the two
cores slows two processes down more than one; the processor time of the busier process does not see it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from _common import Row, arguments, machine, report, run, warm_up
from numpy.typing import NDArray
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

Array = NDArray[np.float64]
Model = Callable[[Tensor, Tensor], None]

STEPS = 12
CLUSTERS = 5
CASES = ("logistic", "mixture")
SIZES = {"logistic": (1_000_000, 20), "mixture": (500_000, 5)}
SMALL = {"logistic": (2000, 4), "mixture": (1000, 3)}


def data(case: str, N: int, D: int) -> tuple[Array, Array]:
    """Rows, and their outcomes or the labels to start from."""
    rng = np.random.default_rng(7)
    if case == "logistic":
        X = rng.normal(size=(N, D)) @ (np.eye(D) + 0.2 * rng.normal(size=(D, D)))
        p = 1 / (1 + np.exp(-X @ (0.5 * rng.normal(size=D))))
        return X, (rng.random(N) < p).astype(float)
    means = rng.normal(0, 3, (CLUSTERS, D))
    X = means[rng.integers(CLUSTERS, size=N)] + rng.normal(size=(N, D))
    square = ((X[:, None] - X[:CLUSTERS]) ** 2).sum(-1)  # the nearest of the first few rows
    return X, square.argmin(1).astype(float)


def logistic(X: Tensor, y: Tensor) -> None:
    one = X.new_tensor(1.0)
    tau = pyro.sample("tau", dist.Gamma(2 * one, one))
    w = pyro.sample("w", dist.Normal(0 * one, tau.rsqrt()).expand([X.shape[1]]).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def mixture(X: Tensor, labels: Tensor) -> None:
    one, D = X.new_tensor(1.0), X.shape[1]
    pi = pyro.sample("pi", dist.Dirichlet(X.new_ones(CLUSTERS)))
    with pyro.plate("components", CLUSTERS):
        tau = pyro.sample("tau", dist.Gamma(2 * one, one).expand([D]).to_event(1))
        mu = pyro.sample("mu", dist.Normal(0 * one, 10 * one).expand([D]).to_event(1))
    with pyro.plate("rows", len(X)):
        z = pyro.sample("z", dist.Categorical(pi))
        pyro.sample("x", dist.Normal(mu[z], tau[z].rsqrt()).to_event(1), obs=X)


def start_of(case: str, folder: Path, labels: Tensor) -> Callable[..., Any]:
    """The prior's mean; of a mixture the labels, and the means of all rows that have each of them."""
    if case == "logistic":
        return init_to_mean
    means = torch.from_numpy(np.load(folder / "means.npy"))
    values = {"z": labels.long(), "mu": means}
    return init_to_value(values=values, fallback=init_to_mean)


# --- one process of a fit -----------------------------------------------------------------------


def child(case: str, folder: Path) -> None:
    """A fit, alone or as one of several processes; the first writes what it found."""
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    warm_up()
    X, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("X", "y"))
    share = slice(rank * len(X) // size, (rank + 1) * len(X) // size)
    args = (torch.tensor(X[share]), torch.tensor(y[share]))
    model = {"logistic": logistic, "mixture": mixture}[case]
    guide = AutoCVI(model, init_loc_fn=start_of(case, folder, args[1]))
    cvi = CVI(model, guide, shards=["rows"] if size > 1 else [])
    losses, seconds, busy = [], [], []
    for _ in range(STEPS):
        together(size)
        start, begin = time.perf_counter(), time.process_time()
        losses.append(cvi.step(*args))
        busy.append(time.process_time() - begin)
        together(size)
        seconds.append(time.perf_counter() - start)
    most = torch.tensor(busy)
    if size > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        times = {"losses": losses, "seconds": seconds, "busy": most.tolist()}
        found = {**times, **moments(case, guide)}
        torch.save(found, folder / f"by_{size}.pt")
    if size > 1:
        torch.distributed.destroy_process_group()


def together(size: int) -> None:
    if size > 1:
        torch.distributed.barrier()


def moments(case: str, guide: AutoCVI) -> dict[str, Any]:
    """Means and standard deviations of the sites that processes share; q(z) of this one's rows."""
    shared = ("w", "tau") if case == "logistic" else ("pi", "mu", "tau")
    q = {s: guide.posterior(s) for s in shared}
    found = {s: (d.mean.clone(), d.variance.sqrt()) for s, d in q.items()}
    local = guide.posterior("z").probs.clone() if case == "mixture" else None
    return {"shared": found, "local": local}


# --- the comparison -----------------------------------------------------------------------------


def launch(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """The fit of that many processes."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [__file__, "--child", case, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=900)
    result: dict[str, Any] = torch.load(folder / f"by_{processes}.pt")
    return result


def apart(one: dict[str, Any], two: dict[str, Any]) -> dict[str, float]:
    """Worst differences between two fits."""
    pairs = [(one["shared"][s], two["shared"][s]) for s in one["shared"]]
    moments = [(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)]
    losses = [torch.tensor(f["losses"], dtype=torch.float64) for f in (one, two)]
    result = {
        "moments": max(float(((a - b) / a.abs().clamp(min=1)).abs().max()) for a, b in moments),
        "in_sd": max(float(((a - b) / sd).abs().max()) for (a, sd), (b, _) in pairs),
        "loss": float((losses[0] / losses[1] - 1).abs().max()),
    }
    if one["local"] is not None:
        mine = two["local"]
        result["local"] = float((one["local"][: len(mine)] - mine).abs().max())
    return result


def rows_of(case: str, one: dict[str, Any], two: dict[str, Any]) -> list[Row]:
    d = apart(one, two)
    step = [float(np.median(f["seconds"][1:])) for f in (one, two)]
    busy = [float(np.median(f["busy"][1:])) for f in (one, two)]
    rows = [
        Row(case, "means, standard deviations: worst difference", d["moments"], "<=", 1e-10),
        Row(case, "means: the same, in units of the standard deviations", d["in_sd"]),
        Row(case, f"loss of any of {STEPS} steps: relative difference", d["loss"], "<=", 1e-10),
    ]
    if "local" in d:
        rows.append(Row(case, "responsibilities: worst difference", d["local"], "<=", 1e-10))
    return [
        *rows,
        Row(case, "one process, seconds per step", step[0]),
        Row(case, "two processes, seconds per step", step[1]),
        Row(case, "one / two", step[0] / step[1], ">=", 1.6),
        Row(case, "one / two, processor time of the busier process", busy[0] / busy[1]),
        Row(
            case, "the same of all steps, plan included", sum(one["seconds"]) / sum(two["seconds"])
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    torch.set_num_threads(1)
    at = machine()
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for case in CASES:
        N, D = (SMALL if options.small else SIZES)[case]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            X, y = data(case, N, D)
            np.save(folder / "X.npy", X)
            np.save(folder / "y.npy", y)
            if case == "mixture":
                means = [X[y == k].mean(0) for k in range(CLUSTERS)]
                np.save(folder / "means.npy", np.stack(means))
            del X, y
            one, two = (launch(case, folder, n) for n in (1, 2))
        label = f"{case}, {N} x {D}"
        rows += rows_of(label, one, two)
        details[label] = {
            f"{n} processes": {k: f[k] for k in ("losses", "seconds", "busy")}
            for n, f in (("1", one), ("2", two))
        }
    report(__file__, rows, at, options.small, **details)


if __name__ == "__main__":
    run(main)
