"""Fits of every kind, small and with a seed: what a change of the trunk must leave as it is, bit by bit.

    python tests/golden/golden_fits.py      # records them anew, in golden.npz beside this file

To be done on purpose only: after a change of arithmetic that is wanted, stated, and bounded.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, HybridGuide, Recognition

GOLDEN = Path(__file__).with_name("golden.npz")
STEPS = 10
N = 60
X = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] - X[:, 1] + 0.3 * X[:, 2] > 0).double()
COUNTS = (2 * X[:, 0].abs()).floor()
GROUP = torch.arange(N) % 6
TIMES = torch.linspace(0, 4, 40, dtype=torch.float64)


def linear() -> None:
    """Conjugate throughout."""
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("groups", 6):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(X @ w + a[GROUP], tau.rsqrt()), obs=X.sum(-1) + Y)


def logistic(size: int | None = None) -> None:
    """One predictor, by quadrature."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", N, subsample_size=size) as i:
        pyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=Y[i])


def wide() -> None:
    """More columns than rows, and a block that is kept diagonal."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    law = dist.Normal(torch.zeros(N), 1.0).to_event(1)
    v = pyro.sample("v", law, infer={"posterior": "diagonal"})
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Poisson((0.3 * X @ w + 0.3 * v).exp()), obs=COUNTS)


def varying(size: int | None = None) -> None:
    """Latents of single rows."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", N, subsample_size=size) as i:
        z = pyro.sample("z", dist.Normal(mu, tau.rsqrt()))
        pyro.sample("y", dist.Poisson(z.exp()), obs=COUNTS[i])


def shrunk() -> None:
    """A scale and its groups, which may be one Gaussian."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(2.0))
    with pyro.plate("groups", 6):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(mu + tau * eta[GROUP], 1.0), obs=X.sum(-1))


def pointed() -> None:
    """A few scalars that no rule reaches: fixed points stand for them."""
    rate, height = (
        pyro.sample("rate", dist.LogNormal(0.0, 1.0)),
        pyro.sample("height", dist.Normal(0.0, 2.0)),
    )
    mean, found = torch.zeros(()), []
    for y in X[:20, 0]:
        mean = torch.tanh(rate * mean) + 0.1 * height + 0.1 * y
        found.append(mean)
    with pyro.plate("rows", 20):
        pyro.sample("y", dist.Normal(torch.stack(found), 0.5), obs=X[:20, 1])


def sampled() -> None:
    """Factors that are drawn."""
    w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    v = pyro.sample("v", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    with pyro.plate("rows", N):
        mean = torch.tanh(torch.outer(X[:, 0], w) + torch.outer(X[:, 1], v)).prod(-1)
        pyro.sample("y", dist.StudentT(3.0, mean, 0.3), obs=X[:, 2])


def gammas() -> None:
    """Sums of Gamma sites: draws, and a Fisher solve."""
    with pyro.plate("parts", 3):
        w = pyro.sample("w", dist.Gamma(2.0, 2.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Poisson((w * X.abs()).sum(-1)), obs=COUNTS)


def chain() -> None:
    """A Gaussian chain with counts, its noise and its damping."""
    q = pyro.sample("q", dist.Gamma(2.0, 0.1))
    z = pyro.sample("z_0", dist.Normal(0.0, 1.0))
    for t in range(30):
        if t:
            z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, q.rsqrt()))
        pyro.sample(f"y_{t}", dist.Poisson(z.exp()), obs=COUNTS[t])


def process() -> None:
    """A Gaussian process kept by its predictors."""
    kernel = torch.exp(-0.5 * (TIMES[:, None] - TIMES) ** 2 / 0.3) + 1e-6 * torch.eye(40)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(40), kernel))
    with pyro.plate("rows", 40):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=Y[:40])


def mixture(size: int | None = None) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", N, subsample_size=size) as i:
        z = pyro.sample("z", dist.Categorical(p))
        pyro.sample("x", dist.Normal(mu[z], tau[z].rsqrt()), obs=4 * Y[i] + X[i, 0])


def states() -> None:
    """A discrete chain."""
    with pyro.plate("states", 2):
        move = pyro.sample("move", dist.Dirichlet(torch.ones(2)))
        level = pyro.sample("level", dist.Normal(0.0, 3.0))
    z: Any = torch.tensor(0)
    for t in pyro.markov(range(25)):
        z = pyro.sample(f"z_{t}", dist.Categorical(move[z]), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Normal(level[z], 1.0), obs=3 * Y[t] + X[t, 1])


def topics() -> None:
    with pyro.plate("topics", 3):
        table = pyro.sample("table", dist.Dirichlet(torch.full((5,), 0.2)))
    with pyro.plate("documents", 12):
        shares = pyro.sample("shares", dist.Dirichlet(torch.full((3,), 0.2)))
        with pyro.plate("words", 5):
            z = pyro.sample("z", dist.Categorical(shares))
            pyro.sample("w", dist.Categorical(table[z]), obs=COUNTS.long().clamp(max=4).view(5, 12))


def learnt() -> None:
    """A parameter beside the posterior."""
    scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
    kernel = torch.exp(-0.5 * (TIMES[:, None] - TIMES) ** 2 / scale**2) + 1e-4 * torch.eye(40)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(40), kernel))
    with pyro.plate("rows", 40):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=Y[:40])


def alone(model: Callable[..., None], **options: Any) -> Callable[[], CVI]:
    own = {"max_dense_dim": options.pop("max_dense_dim")} if "max_dense_dim" in options else {}
    optim = pyro.optim.Adam({"lr": 0.05}) if model is learnt else None
    return lambda: CVI(model, AutoCVI(model, **own), optim, **options)


def hybrid() -> CVI:
    """A network that draws the latents of a minibatch, beside exact messages."""
    encoder = torch.nn.Linear(3, 2)

    def encode(size: int | None = None) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("rows", N, subsample_size=size) as i:
            loc, log_scale = encoder(X[i]).unbind(-1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()))

    guide = HybridGuide(varying)
    guide.append(AutoCVI(poutine.block(varying, hide=["z"])))
    guide.append(encode)
    return CVI(varying, guide, pyro.optim.Adam({"lr": 0.05}))


def codes() -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.full((2,), 2.0)))
    with pyro.plate("clusters", 2):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", N):
        c = pyro.sample("c", dist.Categorical(p))
        z = pyro.sample("z", dist.Normal(mu[c], 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z, 0.5).to_event(1), obs=X + 2 * Y[:, None])


def recognised() -> CVI:
    """A network that gives potentials, beside messages from the graph."""
    bias = torch.zeros(3, requires_grad=True)

    def recognise() -> dict[str, Any]:
        b = pyro.param("bias", bias)
        return {"z": dist.Normal(X + 2 * Y[:, None] + b, (0.1 * b).exp()).to_event(1)}

    own = AutoCVI(poutine.block(codes, hide=["z"]))
    guide = HybridGuide(codes)
    guide.append(own)
    guide.append(Recognition(codes, recognise, own))
    return CVI(codes, guide, pyro.optim.Adam({"lr": 0.01}), seed=0)


class Fit(NamedTuple):
    """How a fit is made, the arguments of its steps, and whether a `run` comes before the last ones."""

    make: Callable[[], CVI]
    args: tuple[Any, ...] = ()
    runs: bool = False


FITS: dict[str, Fit] = {
    "exact": Fit(alone(linear)),
    "quadrature": Fit(alone(logistic)),
    "diagonal": Fit(alone(wide)),
    "split": Fit(alone(linear, max_dense_dim=4)),
    "split, in a view": Fit(alone(chain, max_dense_dim=8)),
    "local latents": Fit(alone(varying)),
    "points": Fit(alone(pointed)),
    "sampled": Fit(alone(sampled)),
    "sampled with a seed": Fit(alone(sampled, seed=3)),
    "Gamma sums": Fit(alone(gammas)),
    "minibatches, stored": Fit(alone(logistic), (20,)),
    "minibatches, stochastic": Fit(alone(logistic, minibatch="stochastic"), (20,)),
    "minibatches of local latents": Fit(alone(varying), (20,)),
    "minibatches of a mixture": Fit(alone(mixture), (20,)),
    "chain": Fit(alone(chain)),
    "process": Fit(alone(process)),
    "mixture": Fit(alone(mixture)),
    "discrete chain": Fit(alone(states)),
    "learnt parameter": Fit(alone(learnt)),
    "hybrid": Fit(hybrid, (20,)),
    "recognition": Fit(recognised),
    "run: quadrature": Fit(alone(logistic), runs=True),
    "run: joint": Fit(alone(shrunk), runs=True),
    "run: points": Fit(alone(pointed), runs=True),
    "run: sampled": Fit(alone(gammas), runs=True),
    "run: mixture": Fit(alone(mixture), runs=True),
    "run: topics": Fit(alone(topics), runs=True),
    "run: chain": Fit(alone(chain), runs=True),
}
MOST = {"run: topics": 60, "run: sampled": 40}


def fitted(name: str, *, saved: bool = False) -> dict[str, Tensor]:
    """The losses and the final state of a fit; of one that was saved and loaded half-way, if `saved`."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    fit = FITS[name]
    cvi = fit.make()
    if fit.runs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = cvi.run(*fit.args, num_steps=MOST.get(name)).losses
    else:
        losses = [cvi.step(*fit.args) for _ in range(STEPS // 2)]
    if saved:
        file = io.BytesIO()
        cvi.save(file)
        file.seek(0)
        pyro.clear_param_store()
        cvi = fit.make()
        cvi.load(file)
    losses += [cvi.step(*fit.args) for _ in range(STEPS - STEPS // 2)]
    store = pyro.get_param_store()
    found = {n: t.detach().clone() for n, t in cvi.guide.state_dict().items()}
    found |= {n: store[n].detach().clone() for n in store}
    return found | {"losses": torch.tensor(losses)}


def record() -> None:
    """Write all fits into golden.npz."""
    torch.set_default_dtype(torch.float64)
    found = {f"{f}/{n}": t.numpy() for f in FITS for n, t in fitted(f).items()}
    np.savez_compressed(GOLDEN, **{"where": np.array(machine())}, **found)  # type: ignore[arg-type]


def machine() -> str:
    """What bits depend on beside the code."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    torch.set_num_threads(1)
    record()
