"""Networks all of whose weights have posteriors: the test log-likelihood after how much time?

    logits = W_2 tanh(W_1 x + b_1) + b_2,   W ~ N(0, 1 / columns),   b ~ N(0, 1),   y ~ Categorical

on USPS digits 2 to 5 (1,651 rows, 13,054 weights) and on 10,000 digits of MNIST (79,510 weights), in
shuffled minibatches of 100. CVI with `infer={"posterior": "diagonal"}` for all weights and two draws a
step; on USPS also as it is without (the large site diagonal, 16 draws). Beside it Pyro's `SVI` with
`AutoNormal`, Adam, one draw a step, at several constant rates. All start at a draw from the prior with
standard deviations of at most 0.1. The score is the mean of log p(y | x, data) over test rows, by 50
draws of the weights, off the clock. Float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Curve, Row, arguments, arrays, follow, machine, report, run, warm_up
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_sample
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_cvi import CVI, AutoCVI

RATES = (0.001, 0.003, 0.01)
BATCH, DRAWS = 100, 50
Data = tuple[Tensor, Tensor, Tensor, Tensor]


class Network(PyroModule):  # type: ignore[misc]
    """One hidden layer of tanh units; every weight is a latent."""

    def __init__(self, inputs: int, hidden: int, classes: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.first = bayesian(inputs, hidden)
        self.second = bayesian(hidden, classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.second(self.first(x).tanh())
        with pyro.plate("rows", self.rows, subsample_size=len(x)):
            value: Tensor = pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return value


def bayesian(inputs: int, outputs: int) -> Any:
    """A linear layer with a prior."""
    layer = PyroModule[nn.Linear](inputs, outputs)
    prior = dist.Normal(0.0, inputs**-0.5).expand([outputs, inputs]).to_event(2)
    layer.weight = PyroSample(prior)
    layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([outputs]).to_event(1))
    return layer


def score(net: Network, guide: Callable[..., Any], x: Tensor, y: Tensor) -> float:
    """The mean log predictive probability of test rows."""
    state = torch.get_rng_state()
    pyro.set_rng_seed(1)
    total = []
    with torch.no_grad():
        for _ in range(DRAWS):
            w = guide(x[:BATCH], y[:BATCH])
            hidden = (x @ w["first.weight"].mT + w["first.bias"]).tanh()
            logits = hidden @ w["second.weight"].mT + w["second.bias"]
            total.append(dist.Categorical(logits=logits).log_prob(y))
    torch.set_rng_state(state)
    mean = torch.stack(total).logsumexp(0) - math.log(DRAWS)
    return float(mean.mean())


def curve(name: str, net: Network, fit: Any, data: Data, cap: float) -> Curve:
    """Steps of `fit` on shuffled minibatches."""
    x, y, *test = data
    batches: list[Tensor] = []

    def advance() -> int:
        if not batches:
            whole = len(x) // BATCH * BATCH
            batches.extend(torch.randperm(len(x))[:whole].split(BATCH))
        rows = batches.pop()
        fit.step(x[rows], y[rows])
        return 1

    start = time.perf_counter()
    return follow(
        name, start, cap, advance, lambda: score(net, fit.guide, *test), first=1.0, growth=1.5
    )


def with_cvi(data: Data, hidden: int, classes: int, cap: float, *, diagonal: bool) -> Curve:
    pyro.set_rng_seed(0)
    net = Network(data[0].shape[1], hidden, classes, len(data[0]))
    model: Any = net
    if diagonal:
        model = poutine.infer_config(net, lambda site: {"posterior": "diagonal"})
    cvi = CVI(model, AutoCVI(model), num_samples=2 if diagonal else 16)
    return curve("CVI, diagonal" if diagonal else "CVI, as it is", net, cvi, data, cap)


def with_svi(data: Data, hidden: int, classes: int, cap: float, rate: float) -> Curve:
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    net = Network(data[0].shape[1], hidden, classes, len(data[0]))
    guide = AutoNormal(net, init_scale=0.1, init_loc_fn=init_to_sample)
    svi = SVI(net, guide, Adam({"lr": rate}), Trace_ELBO())
    return curve(f"SVI, rate {rate:g}", net, svi, data, cap)


def usps() -> Data:
    d = arrays("usps_2345")
    x, t = torch.from_numpy(d["X_train"]).float(), torch.from_numpy(d["X_test"]).float()
    y, u = (torch.from_numpy(d[f"digit_{part}"]).long() - 2 for part in ("train", "test"))
    return x, y, t, u


def mnist() -> Data:
    d = arrays("mnist")
    x, t = (torch.from_numpy(d[f"X_{part}"][:10_000]).float() / 255 for part in ("train", "test"))
    y, u = (torch.from_numpy(d[f"y_{part}"][:10_000]).long() for part in ("train", "test"))
    return x, y, t, u


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = machine()
    warm_up()
    rates, cases = RATES, [("USPS", usps(), 50, 4, 30.0), ("MNIST", mnist(), 100, 10, 60.0)]
    if options.small:
        rates, cases = RATES[1:2], [("USPS", usps(), 5, 4, 2.0)]
    rows, details = [], {}
    for name, data, hidden, classes, cap in cases:
        ours = [with_cvi(data, hidden, classes, cap, diagonal=True)]
        if name == "USPS":
            ours.append(with_cvi(data, hidden, classes, cap, diagonal=False))
        theirs = [with_svi(data, hidden, classes, cap, r) for r in rates]
        for c in (*ours, *theirs):
            what = "test log-likelihood of a row after"
            for t in (cap / 4, 1.5 * cap):
                rows.append(Row(f"{name}: {c.name}", f"{what} {min(t, cap):.3g} s", c.at(t)))
            rows.append(Row(f"{name}: {c.name}", "ms a step", 1e3 * c.seconds[-1] / c.work))
        best = max(c.at(1.5 * cap) for c in theirs)
        gain = ours[0].at(1.5 * cap) - best
        rows.append(Row(name, "CVI, diagonal, less the best SVI, at the end", gain, ">=", 0.0))
        details[name] = {c.name: [c.seconds, c.scores, c.work] for c in (*ours, *theirs)}
    report(__file__, rows, at, options.small, curves=details)


if __name__ == "__main__":
    run(main)
