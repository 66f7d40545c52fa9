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
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, init_to_feasible, init_to_value
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, CVIError, HybridGuide

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


def network(x: Tensor, y: Tensor) -> None:
    """Weights of a network, and a scale of theirs of which the prior is sampled too."""
    h = pyro.sample("h", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = (h[0] * h[1] * h[2]).tanh().exp()
    v = pyro.sample("v", dist.Normal(torch.zeros(3), scale).to_event(1))
    u = pyro.sample("u", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal((x @ v).tanh() * u, tau.rsqrt()), obs=y)


def rates(x: Tensor, y: Tensor) -> None:
    """Positive sites that climb, a parameter, and the Fisher matrix from draws."""
    offset = pyro.param("offset", torch.tensor(0.3), constraint=dist.constraints.positive)
    a = pyro.sample("a", dist.Gamma(1.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson(x.abs() @ a + offset), obs=y)


def steps(x: Tensor, y: Tensor) -> None:
    """Sites without gradients: the score function."""
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal((z > 0) * x[:, 0] + (p > 0.5) * x[:, 1], 0.5), obs=y)


def sums_of_gammas(x: Tensor, y: Tensor) -> None:
    """Sampled sites inside and outside of the plate."""
    with pyro.plate("columns", 2):
        a = pyro.sample("a", dist.Gamma(2.0 * torch.ones(3), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Gamma(2.0 * torch.ones(2), 1.0).to_event(1))
        pyro.sample("x", dist.Poisson(z @ a).to_event(1), obs=(4 * x.abs()).round())


def two_modes(x: Tensor, y: Tensor) -> None:
    g = pyro.sample("g", dist.Categorical(torch.ones(2)))
    with pyro.plate("components", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with pyro.plate("rows", len(x)):
        c = pyro.sample("c", dist.Categorical(torch.ones(2)))
        pyro.sample("x", dist.Normal(mu[c] + 0.1 * g, 0.7), obs=3 * y + x[:, 2])


def shared_guide() -> CVI:
    """Another guide draws sites that all rows share, one of them without a gradient."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        k = pyro.sample("k", dist.Bernoulli(0.5))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w + b + k, 1.0), obs=y)

    def draw(x: Tensor, y: Tensor) -> None:
        loc = pyro.param("loc", torch.tensor(0.1))
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        pyro.sample("b", dist.Normal(loc, scale))
        pyro.sample("k", dist.Bernoulli(logits=pyro.param("logit", torch.tensor(0.2))))

    return beside(model, ["b", "k"], draw, Trace_ELBO(num_particles=2))


def points() -> CVI:
    """Parameters of the rows themselves: each process has its own."""

    def model(x: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])

    part = AutoDelta(poutine.block(model, expose=["z"]), init_loc_fn=init_to_feasible)
    return beside(model, ["z"], part)


def wrapped() -> CVI:
    """A network in a DistributedDataParallel, that begins otherwise in each process."""
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    encoder = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    network: torch.nn.Module = encoder
    if torch.distributed.is_initialized():
        network = torch.nn.parallel.DistributedDataParallel(encoder)
        for p in encoder.parameters():  # it has just made them alike
            p.data += 0.1 * torch.randn_like(p) * torch.distributed.get_rank()
    torch.manual_seed(1)

    def model(x: Tensor, y: Tensor) -> None:
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(z[:, 0], tau.rsqrt()), obs=y)

    def encode(x: Tensor, y: Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Delta(network(x), event_dim=1))

    return beside(model, ["z"], encode)


def beside(
    model: Callable[..., None], sites: list[str], other: Any, loss: Trace_ELBO | None = None
) -> CVI:
    guide = HybridGuide(model)
    guide.append(AutoCVI(poutine.block(model, hide=sites)))
    guide.append(other)
    guide._setup_prototype(X[rows()], Y[rows()])  # draws, once, before the first step
    optim = pyro.optim.Adam({"lr": 0.02, "eps": 1e-3})  # gradients that are rounding move nothing
    return CVI(model, guide, optim, loss, shards=shards(), seed=3)


def rows() -> slice:
    """Those of this process: shares of different size."""
    if not torch.distributed.is_initialized():
        return slice(0, 60)
    return slice(0, 25) if torch.distributed.get_rank() == 0 else slice(25, 60)


def shards() -> list[str]:
    return ["rows"] if torch.distributed.is_initialized() else []


def alone(
    model: Callable[..., None], seed: int | None = None, num_samples: int = 16, **start: Tensor
) -> CVI:
    init = init_to_value(values=start) if start else None
    guide = AutoCVI(
        model, init_loc_fn=init, max_joint_dim=0
    )  # several processes have no joint block
    optim = pyro.optim.Adam({"lr": 0.02})
    return CVI(model, guide, optim, shards=shards(), seed=seed, num_samples=num_samples)


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
    "network": lambda: alone(network, 3),
    "rates": lambda: alone(rates, 3),
    "steps": lambda: alone(steps, 3),
    "sums_of_gammas": lambda: alone(sums_of_gammas, num_samples=8),
    "two_modes": lambda: alone(two_modes),
    "shared_guide": shared_guide,
    "points": points,
    "wrapped": wrapped,
}
STEPS = {"network": 4, "rates": 4, "steps": 4, "sums_of_gammas": 6}
LOCAL = {"z", "c", "rows"}
"""Names at which the posterior of single rows is kept."""


def fitted(case: str, rank: int) -> dict[str, Any]:
    """Losses of some steps and what all processes share of the posterior after them."""
    data = (X[rows()], Y[rows()])
    pyro.set_rng_seed(1)
    pyro.clear_param_store()
    cvi = CASES[case]()
    losses = []
    for i in range(min(12, STEPS.get(case, 30))):
        if os.environ.get("DIES") == str(rank) and i == 5:
            os._exit(3)
        losses.append(cvi.step(*data))
    if case != "sums_of_gammas":
        losses.append(cvi.evaluate_loss(*data))
    guide = cvi.guide if isinstance(cvi.guide, AutoCVI) else cvi.guide[0]
    names = [n for n in guide.state_dict() if case == "steps" or n.split(":")[0] not in LOCAL]
    state = {n: guide.state_dict()[n].clone() for n in names}
    store = pyro.get_param_store()
    own = {n: store[n].detach()[:25].clone() for n in store if n.endswith(".z")}
    state |= {n: store[n].detach().clone() for n in store if n not in own}
    check_alike(state)
    restarts, hot = (2, (1.5, 6)) if case == "two_modes" else (1, None)
    run = cvi.run(*data, num_steps=STEPS.get(case, 30), num_restarts=restarts, annealing=hot)
    check_alike({n: guide.state_dict()[n] for n in names})
    return {"losses": losses, "state": {**state, **own}, "run": run.losses}


def refused() -> dict[str, str]:
    """What several processes cannot do, and what is said about it."""

    def joined(x: Tensor, y: Tensor) -> None:
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)
        pyro.factor("total", -z.sum())

    def other_plan(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        law = dist.Poisson((x @ w).exp()) if len(x) == 25 else dist.Normal(x @ w, 1.0)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", law, obs=y)

    def other_shape(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        shift = pyro.param("shift", torch.zeros(len(x)))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w + shift, 1.0), obs=y)

    def no_plate(x: Tensor, y: Tensor) -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))

    said = {}
    for model in (joined, other_plan, other_shape, no_plate):
        pyro.clear_param_store()
        try:
            alone(model).step(X[rows()], Y[rows()])
        except CVIError as error:
            said[model.__name__] = str(error)
    return said


def check_alike(state: dict[str, Tensor]) -> None:
    """What the processes share is the same in all of them, to the last bit."""
    for name, value in state.items():
        first = value.clone()
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(first, 0)
        assert torch.equal(first, value), name


def main(path: str, *cases: str) -> None:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    found: dict[str, Any] = {case: fitted(case, rank) for case in cases if case != "refused"}
    if "refused" in cases:
        found["refused"] = refused()
    if rank == 0:
        torch.save(found, path)
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
