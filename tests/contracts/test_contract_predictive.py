"""Predictive over the guide: sequential and parallel, chosen sites, new data, weights."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract_models import NAMES, fitted, latents_of, zoo
from pyro.infer import Predictive
from pyro.infer.predictive import WeighedPredictive
from pyro.nn import PyroModule, PyroSample
from pyro.ops.stats import quantile as quantile_of_draws

from pyro_cvi import CVI, AutoCVI


def line(x, y=None):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    mean = pyro.deterministic("mean", a + b * x, event_dim=0)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


@pytest.fixture
def fit():
    x = torch.randn(30)
    y = 0.5 - x + 0.5 * torch.randn(30)
    guide = AutoCVI(line)
    cvi = CVI(line, guide)
    cvi.step(x, y)
    return x, y, guide, cvi


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("length", [1, 4, 30, 50])
def test_new_rows_of_any_number_have_the_exact_predictive_law(fit, parallel, length):
    x, _, guide, _ = fit
    new = torch.linspace(-1.0, 2.0, length)
    draws = Predictive(line, guide=guide, num_samples=400, parallel=parallel)(new)["y"]
    assert draws.shape == (400, length)
    q = guide.joint(["a", "b"])
    design = torch.stack([torch.ones(length), new], -1)
    mean = design @ q.mean
    variance = ((design @ q.covariance_matrix) * design).sum(-1) + 0.25
    assert bool(((draws.mean(0) - mean).abs() < 5 * (variance / 400).sqrt()).all())
    assert bool((draws.var(0) / variance - 1).abs().max() < 5 * (2 / 400) ** 0.5)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_sites_that_are_returned(fit, parallel):
    x, y, guide, _ = fit
    everything = Predictive(line, guide=guide, num_samples=5, parallel=parallel)(x)
    assert set(everything) >= {"a", "b", "mean", "y"}
    some = Predictive(
        line, guide=guide, num_samples=5, parallel=parallel, return_sites=("mean", "_RETURN")
    )(x)
    assert set(some) == {"mean", "_RETURN"}
    assert some["mean"].shape == some["_RETURN"].shape == (5, 30)
    kept = Predictive(line, guide=guide, num_samples=5, parallel=parallel)(x, y)
    assert torch.equal(kept["y"], y.expand(5, 30))


def test_deterministic_sites_belong_to_their_draw(fit):
    x, _, guide, _ = fit
    draws = Predictive(line, guide=guide, num_samples=6)(x)
    expected = draws["a"].reshape(6, 1) + draws["b"].reshape(6, 1) * x
    assert torch.allclose(draws["mean"].reshape(6, -1), expected)


def test_draws_of_the_guide_as_posterior_samples(fit):
    x, _, guide, _ = fit
    drawn = [guide(x) for _ in range(7)]
    samples = {n: torch.stack([d[n] for d in drawn]) for n in ("a", "b")}
    draws = Predictive(line, posterior_samples=samples)(x[:3])
    assert draws["y"].shape == (7, 3)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_predictive_leaves_the_fit_as_it_is(name, parallel):
    if parallel and name == "events":
        pytest.skip("Pyro misplaces vectors of guides whose plates it cannot see")
    model, args, guide, cvi = fitted(name)
    loss, before = cvi.evaluate_loss(*args), {k: v.clone() for k, v in guide.state_dict().items()}
    draws = Predictive(model, guide=guide, num_samples=3, parallel=parallel)(*args)
    for site, node in latents_of(model, args).items():
        assert draws[site].numel() == 3 * node["value"].numel()
        assert draws[site].shape[0] == 3
    assert all(torch.equal(v, before[k]) for k, v in guide.state_dict().items())
    assert cvi.evaluate_loss(*args) == loss


def test_predictive_as_the_first_thing_that_a_guide_sees():
    """Under no_grad and without densities, with the latents at draws from the prior."""
    model, args = zoo()["families"]
    guide, fresh = AutoCVI(model), AutoCVI(model)
    Predictive(model, guide=guide, num_samples=2)(*args)
    assert CVI(model, guide).step(*args) == pytest.approx(CVI(model, fresh).step(*args), rel=1e-12)


def test_predictive_without_data_does_not_spoil_a_later_fit():
    x = torch.randn(9)
    y = x + torch.randn(9)
    guide, fresh = AutoCVI(line), AutoCVI(line)
    CVI(line, guide).step(x, y)
    Predictive(line, guide=guide, num_samples=2)(torch.randn(4))
    assert CVI(line, guide).step(x, y) == pytest.approx(CVI(line, fresh).step(x, y), rel=1e-12)


def test_discrete_observations_and_predictions_of_classes():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Bernoulli(logits=(x * w).sum(-1)), obs=y)

    x = torch.randn(80, 2)
    y = (x[:, 0] > 0).to(x.dtype)
    guide = AutoCVI(model)
    CVI(model, guide).run(x, y)
    share = Predictive(model, guide=guide, num_samples=200)(x)["y"].mean(0)
    assert float(((share > 0.5) == (y > 0.5)).double().mean()) > 0.9


def test_summaries_of_draws_agree_with_those_of_the_guide(fit):
    x, _, guide, _ = fit
    draws = Predictive(line, guide=guide, num_samples=2000)(x[:1])
    for site in ("a", "b"):
        q = guide.posterior(site)
        found = quantile_of_draws(draws[site].reshape(-1), [0.05, 0.95])
        wanted = guide.quantiles([0.05, 0.95])[site]
        assert torch.allclose(found, wanted, atol=0.2 * float(q.stddev))


def test_weighed_predictive_has_even_weights_where_the_posterior_is_exact(fit):
    x, y, guide, cvi = fit
    weighed = WeighedPredictive(line, guide=guide, num_samples=50)(x, y, model_guide=line)
    expected = torch.tensor(-cvi.evaluate_loss(x, y))
    assert torch.allclose(weighed.log_weights, expected)
    assert weighed.samples["a"].shape[0] == 50


class Network(PyroModule):
    """A layer whose weights are drawn anew in each call."""

    def __init__(self):
        super().__init__()
        self.layer = PyroModule[torch.nn.Linear](2, 1)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        mean = self.layer(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)
        return mean


def test_the_return_value_of_a_module_is_a_draw_of_its_function():
    x, model = torch.randn(40, 2), Network()
    y = x.sum(-1) + 0.5 * torch.randn(40)
    guide = AutoCVI(model)
    CVI(model, guide).step(x, y)
    new = torch.randn(6, 2)
    draws = Predictive(model, guide=guide, num_samples=300, return_sites=("_RETURN",))(new)
    q = guide.joint(["layer.bias", "layer.weight"])
    design = torch.cat([torch.ones(6, 1), new], 1)
    sd = ((design @ q.covariance_matrix) * design).sum(-1).sqrt()
    off = (draws["_RETURN"].mean(0) - design @ q.mean).abs() / sd
    assert float(off.max()) < 5 / math.sqrt(300)


def test_local_latents_of_the_same_rows_and_of_others_by_local_posteriors():
    def model(x):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    x = torch.randn(12)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.step(x)
    assert Predictive(model, guide=guide, num_samples=3)(x)["z"].shape == (3, 12)
    new = cvi.local_posteriors(torch.randn(5))
    assert Predictive(model, guide=new, num_samples=3)(torch.randn(5))["z"].shape == (3, 5)
