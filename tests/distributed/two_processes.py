"""Fits of one process or of several: `python two_processes.py FILE CASE ...`, alone or by torchrun.

Each process takes its share of the rows; the first one writes posterior and losses to FILE.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from pyro import poutine
from pyro.infer.autoguide import init_to_value
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, HybridGuide

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.set_rng_seed(0)
X = torch.randn(60, 3)
Y = (X[:, 0] - X[:, 1] + 0.3 * torch.randn(60) > 0).double()


ONE = torch.ones(1, 2)


def logistic(x: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), tau.rsqrt()).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def factors(x: Tensor, y: Tensor) -> None:
    """Local Gaussians and a shared matrix, with a noise level."""
    with pyro.plate("columns", 3):
        W = pyro.sample("W", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z @ W.mT, tau.rsqrt()).to_event(1), obs=x)


def mixture(x: Tensor, y: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(x)):
        c = pyro.sample("c", dist.Categorical(p))
        pyro.sample("x", dist.Normal(mu[c], 0.7), obs=3 * y + x[:, 2])


def learnt(x: Tensor, y: Tensor) -> None:
    offset = pyro.param("offset", torch.tensor(0.3))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson((x @ w + offset).exp()), obs=y)


def hybrid() -> CVI:
    encoder = torch.nn.Linear(3, 2)

    def model(x: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])

    def encode(x: Tensor, y: Tensor) -> None:
        pyro.module("encoder", encoder)
        loc, _ = encoder(x).unbind(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample(
                "z", dist.Normal(loc, 1e-6)
            )  # as good as a point: the same in all processes

    guide = HybridGuide(model)
    guide.append(AutoCVI(poutine.block(model, hide=["z"])))
    guide.append(encode)
    return CVI(model, guide, pyro.optim.Adam({"lr": 0.02}), shards=shards())


def shards() -> list[str]:
    return ["rows"] if torch.distributed.is_initialized() else []


def alone(model: Callable[..., None], **start: Tensor) -> CVI:
    guide = AutoCVI(model, init_loc_fn=init_to_value(values=start)) if start else AutoCVI(model)
    return CVI(model, guide, pyro.optim.Adam({"lr": 0.02}), shards=shards())


CASES: dict[str, Callable[[], CVI]] = {
    "logistic": lambda: alone(logistic),
    "factors": lambda: alone(
        factors, W=torch.tensor([[1.0, 0.2], [0.1, -1.0], [0.5, 0.5]]), z=ONE, tau=ONE[0, 0]
    ),
    "mixture": lambda: alone(
        mixture, mu=torch.tensor([-1.0, 4.0]), c=torch.tensor(1), p=ONE[0] / 2
    ),
    "learnt": lambda: alone(learnt),
    "hybrid": hybrid,
}


def fitted(case: str, rank: int, size: int) -> dict[str, Any]:
    """Losses of some steps and what all processes share of the posterior after them."""
    rows = slice(0, 60)
    if size > 1:  # shares of different size
        rows = slice(0, 25) if rank == 0 else slice(25, 60)
    pyro.set_rng_seed(1)
    pyro.clear_param_store()
    cvi = CASES[case]()
    losses = []
    for i in range(12):
        if os.environ.get("DIES") == str(rank) and i == 5:
            os._exit(3)
        losses.append(cvi.step(X[rows], Y[rows]))
    losses.append(cvi.evaluate_loss(X[rows], Y[rows]))
    guide = cvi.guide if isinstance(cvi.guide, AutoCVI) else cvi.guide[0]
    state = {n: t.clone() for n, t in guide.state_dict().items() if n[0] not in "zcr"}
    store = pyro.get_param_store()
    state |= {n: store[n].detach().clone() for n in store}
    after = cvi.run(X[rows], Y[rows], num_steps=30).losses[-1]
    assert case == "hybrid" or after <= losses[-1] + 1e-9
    return {"losses": losses, "state": state}


def main(path: str, *cases: str) -> None:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found = {case: fitted(case, rank, size) for case in cases}
    if rank == 0:
        torch.save(found, path)
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
