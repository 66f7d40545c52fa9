"""Softmax regression of MNIST, 60,000 x 784 and ten classes: how good and how calibrated, how soon?

Model: W ~ Normal(0, 1), 785 x 10 with the intercepts; y_n ~ Categorical(logits = x_n W), pixels in
0 ... 1. The 7,850 weights are ten Gaussians of 785, one for each class; the softmax of ten predictors
is averaged by quasi Monte Carlo. In minibatches of 2,000 rows, two passes and the defaults.

Beside it, on the same prior and in float32: the MAP by L-BFGS on all rows, and Pyro's `SVI` with
`AutoNormal` and Adam in the same minibatches, two rates, for as long as CVI took. The score is the
log-loss of the 10,000 test images, in nats, of the predictive probabilities E_q[softmax(x W)] by 200
draws of W (MAP: softmax at the mode), and the expected calibration error in 15 bins of
the probability of the most probable class. Both are computed off the clock.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, arrays, machine, report, run, warm_up
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor
from torch.nn.functional import cross_entropy

from pyro_cvi import CVI, AutoCVI

CLASSES = 10
BATCH = 2000
PASSES = 2
RATES = (0.003, 0.01)
DRAWS = 200
BINS = 15
PRIOR = 1.0


def model(x: Tensor, y: Tensor, size: int) -> None:
    zero = x.new_zeros(x.shape[1], CLASSES)
    W = pyro.sample("W", dist.Normal(zero, PRIOR).to_event(2))
    with pyro.plate("rows", len(x), subsample_size=size) as index:
        pyro.sample("y", dist.Categorical(logits=x[index] @ W), obs=y[index])


def scores(p: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Log-loss, expected calibration error and share of errors of probabilities (rows, classes)."""
    loss = -p[torch.arange(len(y)), y].log().mean()
    top, guess = p.max(-1)
    hit = (guess == y).to(p.dtype)
    bins = (top * BINS).long().clamp(max=BINS - 1)
    apart = [((hit - top)[bins == b]).sum().abs() for b in range(BINS)]
    return float(loss), float(torch.stack(apart).sum() / len(y)), float(1 - hit.mean())


@torch.no_grad()
def predictive(guide: Any, args: tuple[Any, ...], test: Tensor) -> Tensor:
    """E softmax(x W) by draws of W, (rows, classes)."""
    pyro.set_rng_seed(0)
    total = torch.zeros(len(test), CLASSES)
    for _ in range(DRAWS):
        total += torch.softmax(test @ guide(*args)["W"], -1)
    return total / DRAWS


def with_cvi(x: Tensor, y: Tensor, test: Tensor, size: int) -> tuple[float, Tensor]:
    """Seconds, and probabilities of the test rows."""
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    cvi = CVI(model, AutoCVI(model))
    for i in range(PASSES * math.ceil(len(x) / size)):
        loss = cvi.step(x, y, size)
        if i % 10 == 9:
            print(
                f"CVI step {i + 1}: {time.perf_counter() - start:.1f} s, loss {loss:.0f}",
                flush=True,
            )
    seconds = time.perf_counter() - start
    return seconds, predictive(cvi.guide, (x, y, size), test)


def with_svi(
    x: Tensor, y: Tensor, test: Tensor, size: int, rate: float, cap: float
) -> tuple[float, Tensor]:
    """Seconds, and probabilities of the test rows."""
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    guide = AutoNormal(model, init_scale=0.01)
    svi = SVI(model, guide, Adam({"lr": rate}), Trace_ELBO())
    start = time.perf_counter()
    while time.perf_counter() - start < cap:
        svi.step(x, y, size)
    seconds = time.perf_counter() - start
    return seconds, predictive(guide, (x, y, size), test)


def with_map(x: Tensor, y: Tensor, test: Tensor) -> tuple[float, Tensor]:
    """Seconds, and probabilities of the test rows."""
    start = time.perf_counter()
    W = torch.zeros(x.shape[1], CLASSES, requires_grad=True)
    optimiser = torch.optim.LBFGS([W], max_iter=500, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(x @ W, y, reduction="sum") + 0.5 * W.square().sum() / PRIOR**2
        loss = loss / len(x)
        loss.backward()
        return loss

    optimiser.step(objective)
    return time.perf_counter() - start, torch.softmax(test @ W.detach(), -1)


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = machine()
    warm_up()
    d = arrays("mnist")
    x, test = (_with_ones(torch.from_numpy(d[n]).float() / 255) for n in ("X_train", "X_test"))
    y, y_test = (torch.from_numpy(d[n]).long() for n in ("y_train", "y_test"))
    size, rates = BATCH, RATES
    if options.small:
        some = [i for i in range(784) if i // 28 % 4 == 0 and i % 4 == 0] + [784]
        x, y, test, y_test = x[:600, some], y[:600], test[:500, some], y_test[:500]
        size, rates = 200, RATES[-1:]
    seconds, p = with_cvi(x, y, test, size)
    ours = scores(p, y_test)
    mode_seconds, p = with_map(x, y, test)
    mode = scores(p, y_test)
    theirs = {r: with_svi(x, y, test, size, r, seconds) for r in rates}
    svi = {r: scores(p, y_test) for r, (_, p) in theirs.items()}
    best = min(s[0] for s in svi.values())
    rows = [
        Row("CVI", "seconds, two passes", seconds, "<=", 600.0),
        Row("CVI", "test log-loss, nats", ours[0], "<=", mode[0]),
        Row("CVI", "the same less that of the best SVI", ours[0] - best, "<=", 0.0),
        Row("CVI", "expected calibration error", ours[1], "<=", mode[1]),
        Row("CVI", "test error", ours[2]),
        Row("MAP, L-BFGS", "seconds", mode_seconds),
        Row("MAP, L-BFGS", "test log-loss, nats", mode[0]),
        Row("MAP, L-BFGS", "expected calibration error", mode[1]),
        Row("MAP, L-BFGS", "test error", mode[2]),
    ]
    for r, s in svi.items():
        rows.append(Row(f"SVI, rate {r:g}", "test log-loss, nats", s[0]))
        rows.append(Row(f"SVI, rate {r:g}", "expected calibration error", s[1]))
    report(__file__, rows, at, options.small)


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], -1)


if __name__ == "__main__":
    run(main)
