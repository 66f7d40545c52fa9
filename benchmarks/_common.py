"""What the benchmarks share: data, the model, the machine, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

INTERCEPT_PRECISION = 1e-4


@dataclass(frozen=True)
class Reference:
    """Optimum of the Gaussian bound, found by direct methods (../shared/reference)."""

    prior_precision: float
    negative_bound: float
    log_loss_bits: float


REFERENCE = {
    "a1a": Reference(2.8072, 594.7263, 0.48837),
    "a7a": Reference(5.0, 5419.249, 0.46562),
    "breast_cancer_scale": Reference(1.0, 38.6126, 0.13790),
    "australian_scale": Reference(1e-5, 195.2064, 0.47592),
    "colon_cancer": Reference(596.3623, 22.8538, 0.69382),
    "covtype": Reference(0.002, 149590.6057, 0.7403),
}


# --- data -------------------------------------------------------------------------------------


class DataMissingError(Exception):
    """The data file is nowhere; the message says where it was looked for."""


@dataclass(frozen=True)
class Problem:
    """One logistic regression: the intercept is column 0 of X."""

    name: str
    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    precision: Tensor
    reference: Reference

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of the model."""
        return self.X, self.y, self.precision


def model(X: Tensor, y: Tensor, precision: Tensor) -> None:
    """Bayesian logistic regression."""
    w = pyro.sample("w", dist.Normal(0.0, precision.rsqrt()).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def load(name: str) -> Problem:
    """The data set of that name, with the split of the reference values."""
    with np.load(find(name), allow_pickle=False) as d:
        if name == "covtype":
            split = _covtype(d)
        elif "X_train" in d:
            split = d["X_train"], d["y_train"], d["X_test"], d["y_test"]
        else:
            X, y, train, test = d["X"], d["y"], d["train_idx_seed1"], d["test_idx_seed1"]
            split = X[train], y[train], X[test], y[test]
    X, y, X_test, y_test = split
    reference = REFERENCE[name]
    precision = torch.full((X.shape[1] + 1,), reference.prior_precision, dtype=torch.float64)
    precision[0] = INTERCEPT_PRECISION
    return Problem(
        name, _with_intercept(X), _double(y), _with_intercept(X_test), _double(y_test),
        precision, reference,
    )  # fmt: skip


def arrays(name: str) -> dict[str, np.ndarray]:
    """All arrays of the data set of that name."""
    with np.load(find(name), allow_pickle=False) as d:
        return dict(d)


def find(name: str) -> Path:
    """Where the data set of that name is."""
    folders = [Path(os.environ.get("PYRO_CVI_DATA", ROOT.parent / "shared" / "data"))]
    folders.append(ROOT / "tutorials" / "data")
    for folder in folders:
        if (folder / f"{name}.npz").exists():
            return folder / f"{name}.npz"
    where = " or ".join(str(f) for f in folders)
    raise DataMissingError(
        f"{name}.npz is not in {where}: set PYRO_CVI_DATA to the folder of the data sets"
    )


def _covtype(d: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The 54 columns of the LIBSVM file, class 2 against the rest, first half of the shuffle."""
    n = len(d["cover_type"])
    order = np.argsort(np.random.RandomState(1).random_sample(n), kind="stable")
    low, high = d["numeric_min"], d["numeric_max"].astype(float)
    numeric, wilderness, soil = d["numeric"], d["wilderness"], d["soil"]
    labels = d["cover_type"] == 2

    def rows(index: np.ndarray) -> np.ndarray:
        scaled = (numeric[index] - low) / (high - low)
        return np.concatenate([scaled, np.eye(4)[wilderness[index]], np.eye(40)[soil[index]]], 1)

    train, test = order[: n // 2], order[n // 2 :]
    return rows(train), labels[train], rows(test), labels[test]


def _double(x: np.ndarray) -> Tensor:
    return torch.as_tensor(x.astype(np.float64))


def _with_intercept(X: np.ndarray) -> Tensor:
    result = torch.ones(X.shape[0], X.shape[1] + 1, dtype=torch.float64)
    result[:, 1:] = _double(X)
    return result


# --- exact values of a Gaussian q(w), by a rule of our own ------------------------------------


def _rule() -> tuple[Tensor, Tensor]:
    """Trapezoid, 401 nodes on 8.5 standard deviations: exact in float64 up to a sd of about 15."""
    x = torch.linspace(-8.5, 8.5, 401, dtype=torch.float64)
    weights = torch.exp(-0.5 * x * x)
    return x, weights / weights.sum()


def exact_negative_bound(p: Problem, loc: Tensor, scale_tril: Tensor) -> float:
    """KL(q || prior) - sum_n E log sigmoid(s_n x_n^T w) of q = N(loc, L L^T)."""
    x, weights = _rule()
    mean = (2 * p.y - 1) * (p.X @ loc)
    sd = (p.X @ scale_tril).square().sum(-1).sqrt()
    expected = sum(
        float((torch.nn.functional.logsigmoid(m[:, None] + s[:, None] * x) @ weights).sum())
        for m, s in zip(mean.split(1 << 11), sd.split(1 << 11), strict=True)
    )
    trace = (p.precision * (scale_tril.square().sum(-1) + loc.square())).sum()
    log_det = p.precision.log().sum() + 2 * scale_tril.diagonal().abs().log().sum()
    return float(0.5 * (trace - len(loc) - log_det)) - expected


def test_log_loss_bits(p: Problem, loc: Tensor, cov: Tensor) -> float:
    """-mean log2 of the posterior predictive probability of the test labels."""
    x, weights = _rule()
    total = 0.0
    for X, y in zip(p.X_test.split(1 << 11), p.y_test.split(1 << 11), strict=True):
        mean = (2 * y - 1) * (X @ loc)
        sd = ((X @ cov) * X).sum(-1).sqrt()
        total -= float((torch.sigmoid(mean[:, None] + sd[:, None] * x) @ weights).log2().sum())
    return total / len(p.y_test)


# --- the fit ----------------------------------------------------------------------------------


@dataclass
class Fit:
    """Losses and seconds of each step; the first step contains the plan."""

    guide: AutoCVI
    cvi: CVI
    losses: list[float]
    seconds: list[float]

    def steps_to(self, optimum: float, relative: float) -> int | None:
        """Number of steps after which the loss is that close to the optimum."""
        near = (i for i, loss in enumerate(self.losses, 1) if abs(loss / optimum - 1) < relative)
        return next(near, None)

    @property
    def step_seconds(self) -> float:
        """Median over the steps after the first."""
        return float(np.median(self.seconds[1:]))

    @property
    def plan_seconds(self) -> float:
        """Guide, plan and what else the first step has to do that a later one has not."""
        return max(self.seconds[0] - self.step_seconds, 0.0)

    @property
    def rises(self) -> float:
        """Largest rise of the loss between two steps, relative; zero for a monotone run."""
        pairs = zip(self.losses, self.losses[1:], strict=False)
        return max(0.0, *((b - a) / abs(a) for a, b in pairs))


def fit(
    args: Sequence[Any],
    num_steps: int,
    of: Callable[..., Any] = model,
    settled: float | None = None,
    state: dict[str, Tensor] | None = None,
    **options: Any,
) -> Fit:
    """A fresh guide of the model `of`, with these options, and a fixed number of steps.

    Or fewer: no more are taken when one changes the loss by less than `settled`, relatively. `state` is
    where to start, the `state_dict` of another guide: from there a mixture is not seeded.
    """
    start = time.perf_counter()
    guide = AutoCVI(of, **options)
    if state is not None:
        guide.load_state_dict(state)
    result = Fit(guide, CVI(of, guide), [], [])
    more(result, args, num_steps, start, settled)
    return result


def more(
    result: Fit,
    args: Sequence[Any],
    num_steps: int,
    start: float | None = None,
    settled: float | None = None,
) -> None:
    """That many steps more; the clock of the first of them may have been started before."""
    start = time.perf_counter() if start is None else start
    for _ in range(num_steps):
        result.losses.append(result.cvi.step(*args))
        now = time.perf_counter()
        result.seconds.append(now - start)
        start = now
        if settled is not None and is_settled(result.losses, settled):
            return


def sweep_seconds(f: Fit, args: Sequence[Any], num_steps: int, repeats: int = 3) -> float:
    """Seconds of one sweep inside of `run`, which compares model and plan less often than `step`.

    The median of a few runs that go on where the fit is.
    """
    runs = [f.cvi.run(*args, num_steps=num_steps, tol=-1.0) for _ in range(repeats)]
    return float(np.median([r.seconds / r.num_steps for r in runs]))


@dataclass
class Curve:
    """Seconds on the clock and score of each point; the work done, and what ended it before its time."""

    name: str
    seconds: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    work: int = 0
    failed: str = ""

    def at(self, t: float) -> float:
        """The score of the last point before t, or nan."""
        found = [v for s, v in zip(self.seconds, self.scores, strict=True) if s <= t]
        return found[-1] if found else math.nan

    def arrival(self, level: float) -> float:
        """The first time at which the score was at the level, or nan."""
        found = [t for t, s in zip(self.seconds, self.scores, strict=True) if s >= level]
        return found[0] if found else math.nan


def follow(
    name: str, start: float, cap: float, advance: Callable[[], int], score: Callable[[], float],
    *, first: float, growth: float,
) -> Curve:  # fmt: skip
    """Score a method off the clock, first after so many seconds, then at times that grow by a factor.

    `advance` does some work and returns how much; `start` is when the clock began.
    """
    curve = Curve(name)
    clock = time.perf_counter() - start
    while clock < cap:
        begin = time.perf_counter()
        try:
            while clock + time.perf_counter() - begin < max(first, growth * clock):
                curve.work += advance()
        except ValueError as error:  # NaN among the parameters of a guide
            curve.failed = str(error).split("\n")[0]
            break
        clock += time.perf_counter() - begin
        curve.seconds.append(clock)
        curve.scores.append(score())
        print(f"{name}: {clock:.1f} s, {curve.scores[-1]:.4f}", flush=True)
    return curve


def shuffled(rows: int, batch: int) -> Iterator[Tensor]:
    """Minibatches of indices without end, mixed anew in each pass."""
    while True:
        yield from torch.randperm(rows).split(batch)


def nuts(
    model: Callable[[], None], warmup: int, samples: int, *, chains: int = 1, accept: float = 0.8
) -> tuple[dict[str, np.ndarray], float]:
    """Draws of a NumPyro model, and the seconds, some of them for compilation."""
    import jax
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    start = time.perf_counter()
    mcmc = MCMC(
        NUTS(model, target_accept_prob=accept), num_warmup=warmup, num_samples=samples,
        num_chains=chains, chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.PRNGKey(0))
    draws = {n: np.asarray(v) for n, v in mcmc.get_samples().items()}
    return draws, time.perf_counter() - start


def apart(q: Any, draws: np.ndarray) -> tuple[float, float]:
    """Worst difference of means in the draws' standard deviations, worst |ratio of these - 1|."""
    mean, sd = draws.mean(0), draws.std(0)
    off = np.abs(q.mean.numpy() - mean) / sd
    wide = np.abs(q.variance.sqrt().numpy() / sd - 1)
    return float(off.max()), float(wide.max())


def is_settled(losses: Sequence[float], relative: float) -> bool:
    """Whether the last step changed the loss by less than that."""
    return len(losses) > 1 and abs(losses[-1] - losses[-2]) < relative * abs(losses[-1])


def warm_up() -> None:
    """What the first use of torch, Pyro and this package costs, paid before any clock runs.

    The first optimiser of a process makes torch import its compiler, for a second or two.
    """
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    X = torch.randn(20, 3, dtype=torch.float64)
    y = (X[:, 0] > 0).double()
    fit((X, y, torch.ones(3, dtype=torch.float64)), 2)


# --- the script -------------------------------------------------------------------------------

COMPETITORS = {
    "bayespy": "bayespy", "dynamax": "dynamax", "gpytorch": "gpytorch", "hmmlearn": "hmmlearn",
    "jax": "jax", "numpyro": "numpyro", "scipy": "scipy", "sklearn": "scikit-learn",
}  # fmt: skip
"""Packages of the extra `bench`, by the name under which they are imported."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the option `--small`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "tiny sizes, to see that the script works: seconds, and no file is written"
    parser.add_argument("--small", action="store_true", help=what)
    return parser


def run(main: Callable[[], None]) -> None:
    """`main`, skipped with a message where its data or its competitors are missing."""
    try:
        main()
    except DataMissingError as e:
        print(f"skipped: {e}")
    except ModuleNotFoundError as e:
        name = (e.name or "").partition(".")[0]
        if name not in COMPETITORS:
            raise
        print(f"skipped: {COMPETITORS[name]} is missing; pip install -e '.[bench]' brings it")


def versions(*packages: str) -> dict[str, str]:
    """Of the competitors."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def peak_gb() -> float:
    """Of this process alone: on Linux `ru_maxrss` remembers the parent that forked it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024 / 1e9
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def in_child(script: str, *words: str) -> dict[str, Any]:
    """What `script --child words` prints as its last line, JSON, from a process of its own."""
    command = [sys.executable, script, "--child", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- the table and the file -------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One figure. `sense` is "<=" or ">=" beside a target, and empty where there is none."""

    case: str
    what: str
    value: float | None
    sense: str = ""
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Pass or miss; nothing without a target."""
        if not self.sense or self.target is None:
            return ""
        if self.value is None or math.isnan(self.value):
            return "miss"
        met = self.value <= self.target if self.sense == "<=" else self.value >= self.target
        return "pass" if met else "miss"


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def show(value: float | None) -> str:
    """Four digits; whole numbers as they are."""
    if value is None:
        return "never"
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def table(rows: Iterable[Row]) -> list[tuple[str, str, str, str, str]]:
    """The rows as text, header first."""
    body = [
        (r.case, r.what, show(r.value), f"{r.sense} {show(r.target)}" if r.sense else "", r.verdict)
        for r in rows
    ]
    return [("case", "what", "value", "target", ""), *body]


def report(
    script: str, rows: Sequence[Row], at: dict[str, Any], small: bool = False, **details: Any
) -> None:
    """Print the table, write benchmarks/results/<name>.json; `at` is `machine()` at the start."""
    name = Path(script).stem
    text = table(rows)
    widths = [max(len(line[i]) for line in text) for i in range(len(text[0]))]
    for line in text:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    if small:
        print("not written: these were tiny sizes\n")
        return
    content = {
        "benchmark": name,
        "machine": at,
        "rows": [{**asdict(r), "verdict": r.verdict} for r in rows],
        "details": details,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {os.path.relpath(path, ROOT)}\n")
