"""Models that AutoCVI must serve as a guide, each with data: (model, args)."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine


def dense(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + b, 0.5), obs=y)


def plated(group, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", 3):
        a = pyro.sample("a", dist.Normal(mu, 0.7))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a[group], 0.5), obs=y)


def local_vectors(y):
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(z.sum(-1), 0.5), obs=y)


def diagonal(y):
    with pyro.plate("left", 2, dim=-2), pyro.plate("right", 4, dim=-1):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def gammas(y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)


def variance(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    s2 = pyro.sample("s2", dist.InverseGamma(3.0, 2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, s2.sqrt()), obs=y)


def coins(y):
    with pyro.plate("coins", 2, dim=-1):
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        with pyro.plate("flips", len(y), dim=-2):
            pyro.sample("y", dist.Bernoulli(p), obs=y)


def dice(y):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Categorical(p), obs=y)


def switches(y):
    with pyro.plate("data", len(y)):
        on = pyro.sample("on", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(2.0 * on, 0.8), obs=y)


def mixture(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0))
    precision = pyro.sample("precision", dist.Gamma(2.0, 2.0))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(loc[k], precision.rsqrt()), obs=y)


def logistic(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def masked_and_scaled(y, mask):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)), poutine.scale(scale=2.5), poutine.mask(mask=mask):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def zoo():
    """Every model with data drawn at the default dtype."""
    x, y = torch.randn(8, 3), torch.randn(8)
    two = torch.cat([torch.randn(6) - 2, torch.randn(6) + 2])
    return {
        "dense": (dense, (x, y)),
        "plated": (plated, (torch.tensor([0, 0, 1, 1, 2, 2, 2, 0]), y)),
        "local_vectors": (local_vectors, (y[:4],)),
        "diagonal": (diagonal, (torch.randn(2, 4),)),
        "gammas": (gammas, (torch.randint(0, 5, (6, 3)).to(y.dtype),)),
        "variance": (variance, (1 + y,)),
        "coins": (coins, ((torch.rand(9, 2) < 0.4).to(y.dtype),)),
        "dice": (dice, (torch.randint(0, 4, (9,)),)),
        "switches": (switches, (1 + y,)),
        "mixture": (mixture, (two,)),
        "logistic": (logistic, (x, (y > 0).to(y.dtype))),
        "masked_and_scaled": (masked_and_scaled, (y, y > -0.5)),
    }


NAMES = [
    "dense", "plated", "local_vectors", "diagonal", "gammas", "variance", "coins", "dice",
    "switches", "mixture", "logistic", "masked_and_scaled",
]  # fmt: skip
GAUSSIAN_ONLY = ["dense", "plated", "local_vectors", "diagonal", "logistic", "masked_and_scaled"]
