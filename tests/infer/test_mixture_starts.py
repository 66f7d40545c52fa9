"""Mixtures of families without conjugate scales part by themselves, as from a start at the truth."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_mean, init_to_value

from pyro_cvi import CVI, AutoCVI

SCALES = {
    "HalfNormal": lambda: dist.HalfNormal(2.0),
    "LogNormal": lambda: dist.LogNormal(0.0, 1.0),
    "HalfCauchy": lambda: dist.HalfCauchy(1.0),
}


def mixture(prior):
    def model(y):
        theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            sigma = pyro.sample("sigma", prior())
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Bernoulli(theta)).long()
            pyro.sample("y", dist.Normal(mu[z], sigma[z]), obs=y)

    return model


@pytest.mark.parametrize("name", SCALES)
def test_components_with_scales_part(name):
    torch.manual_seed(0)
    y = torch.cat([torch.randn(240) - 2.75, torch.randn(160) + 2.85])
    model = mixture(SCALES[name])
    truth = init_to_value(values={"mu": torch.tensor([-2.7, 2.8])}, fallback=init_to_mean)
    wanted = CVI(model, AutoCVI(model, init_loc_fn=truth), seed=0).run(y).losses[-1]
    for seed in range(3):
        cvi = CVI(model, AutoCVI(model), seed=seed)
        result = cvi.run(y)
        assert result.converged
        assert result.losses[-1] < wanted + 1.0


def counts(y):
    with pyro.plate("components", 3):
        rate = pyro.sample("rate", dist.LogNormal(1.0, 1.5))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
        pyro.sample("y", dist.Poisson(rate[z]), obs=y)


def test_components_of_counts_part():
    torch.manual_seed(1)
    rates = torch.tensor([1.0, 10.0, 60.0])
    y = torch.poisson(rates[torch.arange(300) % 3])
    truth = init_to_value(values={"rate": rates}, fallback=init_to_mean)
    wanted = CVI(counts, AutoCVI(counts, init_loc_fn=truth), seed=0).run(y).losses[-1]
    for seed in range(3):
        assert CVI(counts, AutoCVI(counts), seed=seed).run(y).losses[-1] < wanted + 1.0
