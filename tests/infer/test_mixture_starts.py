"""Mixtures of families without conjugate scales part by themselves, as from a start at the truth."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import init_to_mean, init_to_value
from pyro.ops.indexing import Vindex

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


def cells(y, k):
    """Means and scales of every component and column, joined in no plate with the rows."""
    columns = torch.arange(y.shape[1]).unsqueeze(-1)
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(k)))
    with pyro.plate("columns", y.shape[1], dim=-2), pyro.plate("components", k, dim=-1):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("rows", len(y), dim=-1):
        z = pyro.sample("z", dist.Categorical(weights))
        law = dist.Normal(Vindex(mu)[columns, z], Vindex(sigma)[columns, z])
        with pyro.plate("cells", y.shape[1], dim=-2):
            pyro.sample("y", law, obs=y.T)


@pytest.mark.parametrize(
    ("width", "k", "seed"), [(1, 3, 100), (2, 5, 100), (2, 5, 101), (3, 8, 104)]
)
def test_many_components_with_scales_part(width, k, seed):
    """Data whose components a start from single elements alone leaves together, by up to 186 nats."""
    generator = torch.Generator().manual_seed(seed)
    centre = 4 * torch.randn(k, width, generator=generator)
    scale = 0.3 + torch.rand(k, width, generator=generator)
    z = torch.randint(k, (100 + 50 * k,), generator=generator)
    y = centre[z] + scale[z] * torch.randn(len(z), width, generator=generator)
    truth = init_to_value(
        values={"mu": centre.T, "sigma": scale.T, "weights": torch.full((k,), 1 / k)}
    )
    wanted = CVI(cells, AutoCVI(cells, init_loc_fn=truth), seed=0).run(y, k).losses[-1]
    pyro.set_rng_seed(0)
    assert CVI(cells, AutoCVI(cells)).run(y, k).losses[-1] < wanted + 1.0
