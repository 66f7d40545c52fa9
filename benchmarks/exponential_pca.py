"""Exponential-family PCA of binary images: the bound after how much time?

    w_d, z_n ~ N(0, I_K),   b_d ~ N(0, 9),   x_nd ~ Bernoulli(logit = z_n w_d + b_d)

for 2,000 digits of 14 x 14 pixels (those that are on in more than 2 % of the images), K = 10. CVI
samples its messages, for a predictor that is a product of two Gaussians has no quadrature in two
dimensions; everything is at its default. Beside it Pyro's `SVI` with `AutoNormal`, Adam at four
rates, one draw a step. The score is the ELBO in nats a pixel by 100 draws of the posterior, off the
clock; both posteriors start near the prior's mean. Float32.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Curve, Row, arguments, arrays, follow, machine, report, run, warm_up
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor
from torch.nn.functional import avg_pool2d

from pyro_cvi import CVI, AutoCVI

RATES = (0.01, 0.03, 0.1, 0.3)
TIMES = (5, 10, 20, 30)
DRAWS = 100


def model(x: Tensor, K: int) -> None:
    zero = x.new_zeros(K)
    with pyro.plate("pixels", x.shape[1], dim=-1):
        W = pyro.sample("W", dist.Normal(zero, 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(x.new_zeros(()), 3.0))
    with pyro.plate("images", len(x), dim=-1):
        z = pyro.sample("z", dist.Normal(zero, 1.0).to_event(1))
        pyro.sample("x", dist.Bernoulli(logits=z @ W.mT + b).to_event(1), obs=x)


def elbo(guide: Any, x: Tensor, K: int) -> float:
    """The ELBO in nats a pixel, by draws."""
    state = torch.get_rng_state()
    pyro.set_rng_seed(1)
    loss = Trace_ELBO(num_particles=1)
    total = sum(loss.loss(model, guide, x, K) for _ in range(DRAWS)) / DRAWS
    torch.set_rng_state(state)
    return -total / x.numel()


def with_cvi(x: Tensor, K: int, cap: float) -> Curve:
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    cvi = CVI(model, AutoCVI(model))

    def advance() -> int:
        cvi.step(x, K)
        return 1

    return follow("CVI", start, cap, advance, lambda: elbo(cvi.guide, x, K), first=1.0, growth=1.4)


def with_svi(x: Tensor, K: int, cap: float, rate: float) -> Curve:
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    start = time.perf_counter()
    guide = AutoNormal(model, init_scale=0.1)
    svi = SVI(model, guide, Adam({"lr": rate}), Trace_ELBO())

    def advance() -> int:
        svi.step(x, K)
        return 1

    name = f"SVI, rate {rate:g}"
    return follow(name, start, cap, advance, lambda: elbo(guide, x, K), first=1.0, growth=1.4)


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = machine()
    warm_up()
    count, K, cap, rates = 2000, 10, 32.0, RATES
    if options.small:
        count, K, cap, rates = 200, 3, 3.0, RATES[1:2]
    images = torch.from_numpy(arrays("mnist")["X_train"][:count]).float().reshape(count, 1, 28, 28)
    x = (avg_pool2d(images / 255, 2).reshape(count, -1) > 0.4).float()
    x = x[:, x.mean(0) > 0.02]
    ours = with_cvi(x, K, cap)
    theirs = [with_svi(x, K, cap, r) for r in rates]
    rows = []
    for c in (ours, *theirs):
        for t in TIMES:
            rows.append(Row(c.name, f"ELBO after {t} s, nats a pixel", c.at(t)))
    best = max(c.scores[-1] for c in theirs)
    for t in TIMES:
        other = max((c.at(t) for c in theirs), default=math.nan)
        rows.append(
            Row("CVI", f"its ELBO less SVI's best after {t} s", ours.at(t) - other, ">=", 0.0)
        )
    rows.append(
        Row("CVI", "seconds to the end of SVI's best rate", ours.arrival(best), "<=", cap / 4)
    )
    report(__file__, rows, at, options.small)


if __name__ == "__main__":
    run(main)
