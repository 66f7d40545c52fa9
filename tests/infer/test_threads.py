"""Public calls of several threads: each fit has its own posterior, and a guide serves all of them.

Oracle: the closed form of a Normal mean with known noise.
"""

from concurrent.futures import ThreadPoolExecutor

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI, explain

THREADS, FITS = 4, 60


def model(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


def logistic(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def test_fits_in_threads_are_those_of_one():
    torch.manual_seed(0)
    data = [torch.randn(5 + i % 7) + i for i in range(FITS)]

    def fit(y):
        guide = AutoCVI(model)
        CVI(model, guide).run(y, tol=1e-9)
        explain(model, y)
        return guide.posterior("mu").mean

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(fit, data))
    for y, mean in zip(data, found, strict=True):
        precision = len(y) / 2 + 0.01
        assert mean.item() == pytest.approx(float(y.sum() / 2 / precision), abs=1e-4)


def test_one_guide_serves_threads():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = (x[:, 0] > 0).double()
    cvi = CVI(logistic, AutoCVI(logistic))
    cvi.run(x, y)
    wanted = cvi.guide.median()["w"]

    def ask(i):
        draw = cvi.guide(x, y)["w"]
        value = cvi.log_predictive(x, y, plates=["rows"], num_samples=2)
        return cvi.guide.median()["w"], draw.shape, value.shape

    with ThreadPoolExecutor(THREADS) as pool:
        for median, draw, value in pool.map(ask, range(FITS)):
            assert torch.equal(median, wanted)
            assert draw == (2,)
            assert value == (60,)
