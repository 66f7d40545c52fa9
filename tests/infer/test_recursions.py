"""Recursions in a few latents: what would be multiplied out without end is kept whole, and fitted."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI, explain
from pyro_cvi.graph.prepared import prepare


def moving_average(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    theta = pyro.sample("theta", dist.Normal(0.0, 0.5))
    err, errs = 0.0, []
    for t in range(len(y)):
        err = y[t] - mu - theta * err
        errs.append(err)
    with pyro.plate("time", len(y)):
        pyro.sample("err", dist.Normal(torch.stack(errs, -1), 1.0), obs=torch.zeros(len(y)))


def growth(y):
    """Logistic growth by Euler steps."""
    r = pyro.sample("r", dist.LogNormal(-1.0, 0.5))
    k = pyro.sample("k", dist.LogNormal(2.0, 0.5))
    n, found = 1.0, []
    for _ in range(len(y)):
        n = n + r * n * (1 - n / k)
        found.append(n)
    with pyro.plate("time", len(y)):
        pyro.sample("y", dist.Normal(torch.stack(found, -1), 0.3), obs=y)


def series(T):
    e = torch.randn(T + 1)
    return 0.5 + e[1:] + 0.4 * e[:-1]


def terms(e):
    """How many terms an expression has, with those inside of its operands."""
    inner = [x for t in e.terms for o in t.operands for x in getattr(o, "arguments", ())]
    inner += [o.expression for t in e.terms for o in t.operands if hasattr(o, "expression")]
    return len(e.terms) + sum(terms(x) for x in inner)


@pytest.mark.parametrize("model", [moving_average, growth])
def test_the_size_of_an_expression_does_not_grow_without_end(model):
    y = series(60)
    prepared = prepare(model, (y,), {}, 1000)
    symbolic = prepared.call.symbolic()
    assert max(terms(f.expression) for f in symbolic.factors) < 2000


@pytest.mark.parametrize("model", [moving_average, growth])
def test_what_is_kept_whole_is_averaged_over_points_and_the_report_says_why(model):
    edges = [e for e in explain(model, series(60)).edges if e.how == "points"]
    assert edges
    assert all("fixed points" in e.reason for e in edges)


def grid_moments(y):
    """Mean and sd of theta by brute force over (mu, theta)."""
    mu = torch.linspace(-0.5, 1.5, 241)[:, None]
    theta = torch.linspace(-0.8, 1.2, 321)[None]
    err, log_p = torch.zeros(241, 321), -(mu**2) / 2 - theta**2 / 0.5
    for t in range(len(y)):
        err = y[t] - mu - theta * err
        log_p = log_p - err**2 / 2
    w = (log_p - log_p.max()).exp()
    w = w / w.sum()
    mean = float((w * theta).sum())
    return mean, math.sqrt(float((w * (theta - mean) ** 2).sum()))


@pytest.mark.parametrize("T", [80, 150])
def test_a_moving_average_has_the_posterior_of_a_grid(T):
    torch.manual_seed(2)
    y = series(T)
    cvi = CVI(moving_average, AutoCVI(moving_average), seed=0)
    assert cvi.run(y).converged
    mean, sd = grid_moments(y)
    q = cvi.guide.posterior("theta")
    assert abs(float(q.mean) - mean) < 0.2 * sd
    assert float(q.stddev) == pytest.approx(sd, rel=0.15)
