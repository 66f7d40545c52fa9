"""A million rows in minibatches: how many passes, how much time and memory until the closed form?

    w ~ N(0, I_10);  tau ~ Gamma(1, 1);  y_n ~ N(x_n . w, 1/tau),  n = 1..1,000,000

The posterior q(w) q(tau) has a closed form but for one number: given E tau, q(w) is a Gaussian of X'X
and X'y, and E tau is the fixed point of the two updates, found in numpy to the last digit. A fit has
arrived where every mean is within 0.1 standard deviations of it, every standard deviation within 5 %,
and E tau within 0.1 of its own standard deviations. The ways to fit:

    all rows         one plate, no subsampling; a pass is a sweep
    subsample_size   `plate("rows", N, subsample_size=B)`; the package chooses the rows
    loader           `plate("rows", N, subsample=idx)`: a loop over all rows, shuffled anew in each pass,
                     B at a time, as with a DataLoader; the model gets the batch alone

the last two with the default minibatch rule of `CVI` and with the stochastic one. Each fit runs in a
process of its own, which reads the data from disk; its memory is the peak less what it had with data
and libraries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, in_child, machine, peak_gb, report, run, warm_up
from numpy.typing import NDArray
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

Array = NDArray[np.float64]

NEAR = 0.1
NEAR_SD = 0.05
PASSES = 10
WAYS = ("all rows", "subsample_size", "loader", "subsample_size, stochastic", "loader, stochastic")


def data(N: int, D: int) -> tuple[Array, Array]:
    """Correlated columns, an effect each, noise of standard deviation 2."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(N, D)) @ (np.eye(D) + 0.3 * rng.normal(size=(D, D)))
    w = rng.normal(size=D)
    return X, X @ w + 2 * rng.normal(size=N)


def closed_form(X: Array, y: Array) -> dict[str, Any]:
    """Mean and covariance of q(w), shape and rate of q(tau)."""
    XX, Xy, yy = X.T @ X, X.T @ y, float(y @ y)
    shape, tau = 1 + len(y) / 2, 1.0
    for _ in range(200):
        cov = np.linalg.inv(np.eye(len(XX)) + tau * XX)
        mean = tau * cov @ Xy
        square = yy - 2 * mean @ Xy + mean @ XX @ mean + np.trace(cov @ XX)
        tau = shape / (1 + 0.5 * square)
    return {"mean": mean, "sd": np.sqrt(np.diag(cov)), "tau": tau, "tau_sd": tau / np.sqrt(shape)}


def _priors(X: Tensor) -> tuple[Any, Any]:
    one = X.new_tensor(1.0)
    tau = pyro.sample("tau", dist.Gamma(one, one))
    return pyro.sample("w", dist.Normal(0 * one, one).expand([X.shape[1]]).to_event(1)), tau


def whole(X: Tensor, y: Tensor, size: int | None) -> None:
    """All rows, or as many as `size` of them at a time."""
    w, tau = _priors(X)
    with pyro.plate("rows", len(y), subsample_size=size) as i:
        rows, values = (X, y) if size is None else (X[i], y[i])
        pyro.sample("y", dist.Normal(rows @ w, tau.rsqrt()), obs=values)


def batch(X: Tensor, y: Tensor, N: int, index: Tensor) -> None:
    """The rows `index` of N."""
    w, tau = _priors(X)
    with pyro.plate("rows", N, subsample=index):
        pyro.sample("y", dist.Normal(X @ w, tau.rsqrt()), obs=y)


def batches(N: int, size: int) -> Iterator[Tensor]:
    """One pass over all rows, in random order."""
    yield from torch.randperm(N).split(size)


def distance(guide: AutoCVI, exact: dict[str, Any]) -> dict[str, float]:
    """How far a posterior is from the closed form."""
    w, tau = guide.posterior("w"), guide.posterior("tau")
    return {
        "mean": float(np.max(np.abs(w.mean.numpy() - exact["mean"]) / exact["sd"])),
        "sd": float(np.max(np.abs(w.variance.sqrt().numpy() / exact["sd"] - 1))),
        "tau": abs(float(tau.mean) - exact["tau"]) / exact["tau_sd"],
    }


def is_near(d: dict[str, float]) -> bool:
    return d["mean"] <= NEAR and d["sd"] <= NEAR_SD and d["tau"] <= NEAR


def child(way: str, folder: Path, size: int) -> None:
    """One way to fit, alone; prints its figures as one line of JSON."""
    warm_up()
    X, y = (torch.from_numpy(np.load(folder / f"{n}.npy")) for n in ("X", "y"))
    exact = json.loads((folder / "exact.json").read_text())
    exact = {k: np.asarray(v) for k, v in exact.items()}
    name, _, rule = way.partition(", ")
    N = len(y)
    before = peak_gb()
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    model = batch if name == "loader" else whole
    guide = AutoCVI(model)
    cvi = CVI(model, guide, **({"minibatch": rule} if rule else {}))
    passes, seconds, steps = [], 0.0, 0
    for _ in range(PASSES):
        if name == "all rows":
            cvi.step(X, y, None)
            steps += 1
        elif name == "subsample_size":
            count = -(-N // size)
            cvi.run(X, y, size, num_steps=count)
            steps += count
        else:
            for index in batches(N, size):
                cvi.step(X[index], y[index], N, index)
                steps += 1
        seconds += time.perf_counter() - start
        passes.append({**distance(guide, exact), "seconds": seconds, "steps": steps})
        start = time.perf_counter()
    print(json.dumps({"passes": passes, "more_gb": peak_gb() - before, "before_gb": before}))


def rows_of(way: str, f: dict[str, Any]) -> list[Row]:
    passes = f["passes"]
    near = next((i for i, d in enumerate(passes, 1) if is_near(d)), None)
    last = passes[-1]
    rows = [Row(way, f"passes until near the closed form (of {PASSES})", near)]
    if near is not None:
        rows.append(Row(way, "seconds until then, plan included", passes[near - 1]["seconds"]))
    for i in (1, PASSES):
        d, after = passes[i - 1], f"after {i} pass{'es' if i > 1 else ''}"
        rows += [
            Row(way, f"means {after}: worst error in standard deviations", d["mean"]),
            Row(way, f"standard deviations {after}: worst relative error", d["sd"]),
            Row(way, f"E tau {after}: error in standard deviations", d["tau"]),
        ]
    return [
        *rows,
        Row(way, "seconds per pass", last["seconds"] / PASSES),
        Row(way, "seconds per step", last["seconds"] / last["steps"]),
        Row(way, "peak memory beyond libraries and data, GB", f["more_gb"]),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, help="rows of a minibatch")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    N, D = (2000, 4) if options.small else (1_000_000, 10)
    size = options.batch or (200 if options.small else 10_000)
    if options.child:
        child(options.child[0], Path(options.child[1]), size)
        return
    at = machine()
    X, y = data(N, D)
    exact = closed_form(X, y)
    rows = []
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "X.npy", X)
        np.save(folder / "y.npy", y)
        plain = {k: np.asarray(v).tolist() for k, v in exact.items()}
        (folder / "exact.json").write_text(json.dumps(plain))
        gb = (X.nbytes + y.nbytes) / 1e9
        for way in WAYS:
            found[way] = in_child(__file__, way, name, "--batch", str(size))
            rows += rows_of(way, found[way])
    case = f"{N} x {D}, batches of {size}"
    rows.insert(0, Row(case, "size of the data, GB", gb))
    report(__file__, rows, at, options.small, **found)


if __name__ == "__main__":
    run(main)
