"""Steps leave nothing behind: the number of live tensors does not grow with them.

Counted by the garbage collector after the first passes over the batches, and again after many steps.
"""

import gc

import pyro.distributions as dist
import pytest
import torch
from pyro import module as torch_module
from pyro import param, plate, sample
from pyro.optim import Adam
from pyro.poutine import block as hidden
from torch import nn

from pyro_cvi import CVI, AutoCVI, HybridGuide

N, B = 60, 20


def live_tensors():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def logistic(x):
    w = sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with plate("rows", N, subsample_size=B) as i:
        sample("y", dist.Bernoulli(logits=x[i] @ w), obs=(x[i, 0] > 0).float())


def mixture(x):
    with plate("components", 2):
        mu = sample("mu", dist.Normal(0.0, 3.0))
    with plate("rows", N, subsample_size=B) as i:
        c = sample("c", dist.Categorical(torch.ones(2)))
        sample("x", dist.Normal(mu[c], 1.0), obs=x[i, 0])


def sampled(x):
    """A network of two hidden units: more predictors than quadrature takes."""
    scale = param("scale", torch.tensor(1.0))
    v = sample("v", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    u = sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with plate("rows", N, subsample_size=B) as i:
        logits = scale * ((x[i] @ v).tanh() @ u)
        sample("y", dist.Bernoulli(logits=logits), obs=(x[i, 0] > 0).float())


def alone(model):
    return CVI(model, AutoCVI(model), Adam({"lr": 1e-3}), num_samples=4)


def hybrid():
    encoder, decoder = nn.Linear(2, 2), nn.Linear(1, 2)

    def model(x):
        torch_module("decoder", decoder)
        mu = sample("mu", dist.Normal(0.0, 1.0))
        with plate("rows", N, subsample_size=len(x)):
            z = sample("z", dist.Normal(mu, 1.0).expand([len(x)]))
            sample("x", dist.Normal(decoder(z[:, None]), 1.0).to_event(1), obs=x)

    def encode(x):
        torch_module("encoder", encoder)
        loc, log_scale = encoder(x).unbind(-1)
        with plate("rows", N, subsample_size=len(x)):
            sample("z", dist.Normal(loc, log_scale.exp()))

    guide = HybridGuide(model)
    guide.append(AutoCVI(hidden(model, hide=["z"])))
    guide.append(encode)
    return CVI(model, guide, Adam({"lr": 1e-3}))


KINDS = {
    "logistic": (lambda: alone(logistic), 30),
    "mixture": (lambda: alone(mixture), 30),
    "sampled": (lambda: alone(sampled), 15),
    "hybrid": (hybrid, 25),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_leave_no_tensors_behind(kind):
    make, steps = KINDS[kind]
    cvi, x = make(), torch.randn(N, 2)
    batch = x[:B] if kind == "hybrid" else x
    for _ in range(10):
        cvi.step(batch)
    assert (kind == "sampled") == any(e.how == "sampled" for e in cvi.explain().edges)
    before = live_tensors()
    for _ in range(steps):
        cvi.step(batch)
    assert live_tensors() - before < steps / 10
