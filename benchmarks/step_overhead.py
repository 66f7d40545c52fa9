"""What does a step cost where there is next to nothing to compute: CVI and SVI on small models?

SVI has Adam, and what one would take for the model: AutoNormal with Trace_ELBO, TraceEnum_ELBO where
there are discrete sites, the same encoder in the VAE. Where CVI samples, SVI has as many particles as
CVI has draws, for a step of CVI averages over them. The two take turns in short blocks, and what counts
is time of the processor, so that a busy machine hits neither; medians of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, machine, report
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, HybridGuide

Model = Callable[..., Any]
Step = Callable[[], float]
TARGET = 3.0

FLIPS = torch.tensor([1.0] * 6 + [0.0] * 4)
COUNTS = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0])
X = torch.stack([torch.linspace(-1.0, 1.0, 40), torch.linspace(-2.0, 2.0, 40).cos()], 1)
Y = (X[:, 0] > 0.2).float()


# --- models -----------------------------------------------------------------------------------


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


def logistic(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def minibatch(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x), subsample_size=10) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def learnt(x: Tensor, y: Tensor) -> None:
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def hierarchical(x: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("groups", 8):
        effect = pyro.sample("effect", dist.Normal(mu, tau.rsqrt()))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(effect[torch.arange(len(x)) % 8], 1.0), obs=x[:, 0])


@config_enumerate
def mixture(x: Tensor) -> None:
    w = pyro.sample("w", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Categorical(w))
        pyro.sample("x", dist.Normal(mu[z], 1.0), obs=x)


@config_enumerate
def hmm(x: Tensor) -> None:
    with pyro.plate("states", 2):
        move = pyro.sample("move", dist.Dirichlet(torch.ones(2)))
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    z: Any = 0
    for t in pyro.markov(range(len(x))):
        z = pyro.sample(f"z_{t}", dist.Categorical(move[z]))
        pyro.sample(f"x_{t}", dist.Normal(mu[z], 1.0), obs=x[t])


@config_enumerate
def topics(words: Tensor) -> None:
    with pyro.plate("topics", 3):
        phi = pyro.sample("phi", dist.Dirichlet(torch.ones(8)))
    with pyro.plate("documents", words.shape[1]):
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("words", words.shape[0]):
            z = pyro.sample("z", dist.Categorical(theta))
            pyro.sample("w", dist.Categorical(phi[z]), obs=words)


def network(x: Tensor, y: Tensor) -> None:
    v = pyro.sample("v", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    u = pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=(x @ v).tanh() @ u), obs=y)


# --- cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A step of either method on one model, fresh."""

    cvi: Step
    svi: Step


def plain(model: Model, *args: Any, discrete: bool = False, particles: int = 1) -> Pair:
    cvi = CVI(model, AutoCVI(model), optim=Adam({"lr": 0.01}))
    continuous: Model = poutine.block(model, hide_fn=_is_discrete) if discrete else model
    loss = TraceEnum_ELBO(max_plate_nesting=2) if discrete else Trace_ELBO(num_particles=particles)
    svi = SVI(model, AutoNormal(continuous), Adam({"lr": 0.01}), loss)
    return Pair(lambda: cvi.step(*args), lambda: svi.step(*args))


def _is_discrete(site: Any) -> bool:
    return site["name"].startswith("z")


def vae(x: Tensor) -> Pair:
    encoder, decoder = torch.nn.Linear(2, 2), torch.nn.Linear(1, 2)

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0).expand([len(x)]))
            pyro.sample("x", dist.Normal(decoder(z[..., None]), 1.0).to_event(1), obs=x)

    def encode(x: Tensor) -> None:
        pyro.module("encoder", encoder)
        loc, log_scale = encoder(x).unbind(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()))

    ours = HybridGuide(model)
    ours.append(AutoCVI(poutine.block(model, hide=["z"])))
    ours.append(encode)
    cvi = CVI(model, ours, Adam({"lr": 0.01}))
    theirs = AutoNormal(poutine.block(model, hide=["z"]))

    def both(x: Tensor) -> None:
        theirs(x)
        encode(x)

    svi = SVI(model, both, Adam({"lr": 0.01}), Trace_ELBO())
    return Pair(lambda: cvi.step(x), lambda: svi.step(x))


WORDS = torch.arange(40).reshape(8, 5) % 8
DRAWS = 24
"""Of CVI in `network`: four for each of its six scalars."""

CASES: dict[str, tuple[Callable[[], Pair], int, float | None]] = {
    # name: (both steps, steps a block, target of the ratio)
    "conjugate (coin, plate of 10)": (lambda: plain(coin, FLIPS), 20, TARGET),
    "conjugate (coin, loop of 10 sites)": (lambda: plain(coin_in_a_loop, FLIPS), 20, TARGET),
    "conjugate (two scalars, 10 data)": (lambda: plain(two_scalars, COUNTS), 20, TARGET),
    "conjugate (Gamma-Poisson, 10 data)": (lambda: plain(gamma_poisson, COUNTS), 20, TARGET),
    "logistic regression, 40 x 2": (lambda: plain(logistic, X, Y), 20, TARGET),
    "hierarchical, 8 groups": (lambda: plain(hierarchical, X, Y), 20, TARGET),
    "mixture of two, 10 data": (lambda: plain(mixture, COUNTS, discrete=True), 10, TARGET),
    "hidden Markov model, 10 steps": (lambda: plain(hmm, COUNTS, discrete=True), 5, TARGET),
    "topics, 5 documents of 8 words": (lambda: plain(topics, WORDS, discrete=True), 10, TARGET),
    "hybrid VAE, 40 rows": (lambda: vae(X), 5, TARGET),
    f"sampled (network), {DRAWS} draws": (
        lambda: plain(network, X, Y, particles=DRAWS), 2, TARGET,
    ),
    "minibatch logistic, 10 of 40": (lambda: plain(minibatch, X, Y), 5, TARGET),
    "pyro.param, 40 x 2": (lambda: plain(learnt, X, Y), 5, TARGET),
    "200 scalar sites": (lambda: plain(many_sites, torch.linspace(-2.0, 2.0, 200)), 2, None),
}  # fmt: skip


def timed(f: Step) -> float:
    start = time.process_time()
    f()
    return time.process_time() - start


def compare(name: str, rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    """First step and median step of both."""
    make, steps, target = CASES[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    pair = make()
    plan, first = timed(pair.cvi), timed(pair.svi)
    ours, theirs = [], []
    for _ in range(rounds):
        ours += [timed(pair.cvi) for _ in range(steps)]
        theirs += [timed(pair.svi) for _ in range(steps)]
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
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=[], help="parts of names, for some of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    at = machine()
    names = [n for n in CASES if not options.cases or any(c in n for c in options.cases)]
    for name in names[:2]:  # what torch, Pyro and the package cost at their first use
        compare(name, 1)
    rows: list[Row] = []
    seconds = {}
    for name in names:
        more, seconds[name] = compare(name, 2 if options.small else 15)
        rows += more
    small = options.small or bool(options.cases)
    report(__file__, rows, at, small, seconds_at_10_50_90_percent=seconds)


if __name__ == "__main__":
    main()
