"""Each start of a fit is another one, in every block, and none is absurd."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_value

from pyro_cvi import CVI, AutoCVI

Y = torch.tensor([0.5, 1.5, 2.0, 0.7])


def all_families(y):
    a = pyro.sample("a", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    b = pyro.sample("b", dist.Gamma(2.0, 1.0))
    c = pyro.sample("c", dist.Beta(2.0, 3.0))
    d = pyro.sample("d", dist.Dirichlet(torch.ones(3)))
    e = pyro.sample("e", dist.HalfCauchy(1.0))
    f = pyro.sample("f", dist.Wishart(torch.tensor(4.0), torch.eye(2)))
    g = pyro.sample("g", dist.InverseGamma(3.0, 1.0))
    pyro.sample("h", dist.Bernoulli(c), obs=torch.tensor(1.0))
    pyro.sample("i", dist.Categorical(d), obs=torch.tensor(1))
    pyro.sample("j", dist.MultivariateNormal(a, precision_matrix=f), obs=torch.zeros(2))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(a.sum(), b.rsqrt()), obs=y)
        pyro.sample("z", dist.Exponential(e), obs=y)
        pyro.sample("k", dist.Exponential(1 / g), obs=y)


def starts(model, *args, count=3, **options):
    """The medians at the first start and at some more."""
    guide = AutoCVI(model, **options)
    guide(*args)
    found = [guide.median()]
    for _ in range(count - 1):
        guide.reset()
        found.append(guide.median())
    return found


def test_every_block_moves():
    first, second, third = starts(all_families, Y)
    for name in first:
        for one, other in ((first, second), (first, third), (second, third)):
            assert not torch.allclose(one[name], other[name], rtol=1e-3), name


def test_the_first_start_is_the_same_whatever_is_drawn():
    def model(y):
        m = pyro.sample("m", dist.Normal(0.0, 1e3))
        s = pyro.sample("s", dist.Gamma(2.0, 1.0))
        with pyro.plate("groups", len(y)):
            z = pyro.sample("z", dist.Normal(m, s))
            r = pyro.sample("r", dist.Gamma(2.0, s))
            pyro.sample("y", dist.Normal(z, r.rsqrt()), obs=y)

    found = []
    for seed in range(3):
        pyro.set_rng_seed(seed)
        found.append(starts(model, Y, count=1)[0])
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)
        assert torch.equal(found[2][name], value)
    assert bool((found[0]["z"] == 0).all())


def test_placed_sites_stay():
    place = init_to_value(values={"a": torch.tensor([1.0, -1.0]), "b": torch.tensor(2.5)})
    first, second = starts(all_families, Y, count=2, init_loc_fn=place)
    assert torch.equal(first["a"], second["a"])
    assert torch.equal(first["b"], second["b"])


def test_restarts_find_both_signs_of_a_square():
    def model(y):
        z = pyro.sample("z", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(z.square(), 0.5), obs=y)

    found = {float(x["z"]) > 0 for x in starts(model, 3 + Y, count=12)[1:]}
    assert found == {True, False}


def test_a_further_start_is_not_absurd():
    """Rates of exp(500) at the prior's standard deviation."""
    x = 10 * torch.randn(40, 3)
    y = torch.poisson(torch.ones(40) * 3)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 50.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    cvi = CVI(model, AutoCVI(model))
    result = cvi.run(x, y, num_restarts=4)
    best = min(result.restarts)
    assert all(loss == pytest.approx(best, abs=0.01) for loss in result.restarts)
    for _ in range(5):
        cvi.guide.reset()
        w = cvi.guide.median()["w"]
        assert 0 < float(w.abs().max()) < 3
        assert math.isfinite(cvi.evaluate_loss(x, y))


def test_a_seed_makes_all_starts_the_same():
    def model(y):
        with pyro.plate("components", 2):
            m = pyro.sample("m", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            pyro.sample("y", dist.Normal(m[z].square(), 1.0), obs=y)

    y = torch.cat([Y, Y + 3, Y + 5])
    found = []
    for state in (1, 2):
        pyro.set_rng_seed(state)
        cvi = CVI(model, AutoCVI(model), seed=7)
        found.append(cvi.run(y, num_steps=5, num_restarts=4).restarts)
    assert found[0] == found[1]
