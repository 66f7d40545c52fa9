"""Models of the contract tests, each with data drawn at the default dtype: name -> (model, args)."""

import pyro
import pyro.distributions as dist
import torch

from pyro_cvi import CVI, AutoCVI


def scalars(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a + b * x, 0.5), obs=y)


def events(y):
    """A vector and a matrix, which a particle plate on the left must not disturb."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    m = pyro.sample("m", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w + m.sum(-2), 1.0).to_event(1), obs=y)


def nested(y):
    top = pyro.sample("top", dist.Normal(0.0, 1.0))
    with pyro.plate("outer", y.shape[1], dim=-2):
        mid = pyro.sample("mid", dist.Normal(top, 1.0))
        with pyro.plate("inner", y.shape[2], dim=-1):
            low = pyro.sample("low", dist.Normal(mid, 1.0))
            pyro.sample("y", dist.Normal(low, 1.0), obs=y[0])


def families(y, n):
    p = pyro.sample("p", dist.Beta(2.0, 3.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("on", dist.Bernoulli(p), obs=(y > 0).to(y.dtype))
        pyro.sample("n", dist.Poisson(rate), obs=n)
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)


def labels(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        loc = pyro.sample("loc", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(weights))
        if loc.dim() == 1:
            mean = loc[k]
        else:  # with particles on the left
            mean = torch.where(k == 0, loc[..., :1], loc[..., 1:])
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def zoo():
    y = torch.randn(7)
    return {
        "scalars": (scalars, (torch.randn(7), y)),
        "events": (events, (torch.randn(7, 3),)),
        "nested": (nested, (torch.randn(1, 2, 4),)),
        "families": (families, (y, torch.randint(0, 5, (7,)).to(y.dtype))),
        "labels": (labels, (2 * y,)),
    }


NAMES = ["scalars", "events", "nested", "families", "labels"]
CONTINUOUS = ["scalars", "events", "nested", "families"]


def fitted(name, steps=3):
    model, args = zoo()[name]
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for _ in range(steps):
        cvi.step(*args)
    return model, args, guide, cvi


def latents_of(model, args):
    trace = pyro.poutine.trace(model).get_trace(*args)
    return {
        n: s for n, s in trace.iter_stochastic_nodes() if type(s["fn"]).__name__ != "_Subsample"
    }
