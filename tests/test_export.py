"""What goes to ArviZ is what Pyro's own handlers compute, under names of plates."""

import sys
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal

from pyro_cvi import CVI, AutoCVI, CVIError, HybridGuide, integrate
from pyro_cvi.export import to_arviz

az = pytest.importorskip("arviz", reason="the export needs arviz: pip install 'pyro_cvi[arviz]'")

GROUP = torch.arange(12) % 3


def model(x, y=None):
    sd = pyro.sample("sd", dist.HalfCauchy(1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("groups", 3):
        u = pyro.sample("u", dist.Normal(0.0, sd))
    pyro.deterministic("largest", u.max())
    with pyro.plate("rows", len(x)):
        mean = (x * b).sum(-1) + u[GROUP]
        return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


@pytest.fixture
def fit():
    x = torch.randn(12, 2)
    y = x.sum(-1) + 0.3 * torch.randn(12)
    cvi = CVI(model, AutoCVI(model))
    return cvi, (x, y), cvi.run(x, y)


def test_groups_and_dims(fit):
    cvi, args, result = fit
    data = to_arviz(
        cvi.guide, *args, num_samples=20, result=result,
        coords={"groups": list("abc"), "column": ["left", "right"]}, dims={"b": ["column"]},
    )  # fmt: skip
    assert set(data.groups()) == {
        "posterior", "posterior_predictive", "log_likelihood", "observed_data", "sample_stats",
    }  # fmt: skip
    assert data.posterior["u"].dims == ("chain", "draw", "groups")
    assert data.posterior["u"].sel(groups="b").shape == (1, 20)
    assert data.posterior["b"].dims == ("chain", "draw", "column")
    assert data.posterior["sd"].shape == data.posterior["largest"].shape == (1, 20)
    assert data.posterior_predictive["y"].dims == ("chain", "draw", "rows")
    assert data.log_likelihood["y"].dims == ("chain", "draw", "rows")
    assert data.observed_data["y"].dims == ("rows",)
    assert data.sample_stats.attrs["loss"] == result.losses[-1]


def test_numbers_are_those_of_the_model_at_each_draw(fit):
    cvi, (x, y), _ = fit
    data = to_arviz(cvi.guide, x, y, num_samples=5)
    for s in range(5):
        draw = {n: torch.as_tensor(data.posterior[n].values[0, s]) for n in ("sd", "b", "u")}
        mean = (x * draw["b"]).sum(-1) + draw["u"][GROUP]
        own = torch.as_tensor(data.log_likelihood["y"].values[0, s])
        torch.testing.assert_close(own, dist.Normal(mean, 0.5).log_prob(y))
        trace = poutine.trace(poutine.condition(model, data=draw)).get_trace(x, y)
        lp = torch.as_tensor(data.sample_stats["lp"].values[0, s])
        torch.testing.assert_close(lp, trace.log_prob_sum())
        assert data.posterior["largest"].values[0, s] == draw["u"].max()
    torch.testing.assert_close(torch.as_tensor(data.observed_data["y"].values), y)


def test_the_bound_is_the_mean_of_lp_minus_log_q(fit):
    cvi, args, result = fit
    stats = to_arviz(
        cvi.guide, *args, num_samples=400, posterior_predictive=False, log_likelihood=False
    ).sample_stats
    difference = torch.as_tensor((stats["lp"] - stats["log_q"]).values)
    error = difference.std() / 20
    assert abs(difference.mean() + result.losses[-1]) < 5 * error


def test_predictions_are_draws_and_not_the_data(fit):
    cvi, (x, y), _ = fit
    data = to_arviz(cvi.guide, x, y, num_samples=300)
    drawn = torch.as_tensor(data.posterior_predictive["y"].values[0])
    assert not bool((drawn == y).any())
    mean = (x * cvi.guide.posterior("b").mean).sum(-1) + cvi.guide.posterior("u").mean[GROUP]
    deviation = drawn.std(0) / 300**0.5
    assert bool(((drawn.mean(0) - mean).abs() < 5 * deviation).all())


def test_arviz_compares_models_by_it(fit):
    cvi, args, _ = fit
    data = to_arviz(cvi.guide, *args, num_samples=200, posterior_predictive=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 12 rows have Pareto shapes that are not all small
        assert bool(torch.isfinite(torch.tensor(float(az.loo(data).elpd_loo))))


def test_an_integrated_posterior_needs_its_model_and_has_no_density(fit):
    cvi, args, _ = fit
    posterior = integrate(cvi, "sd", *args)
    with pytest.raises(CVIError, match="does not hold its model"):
        to_arviz(posterior, *args)
    data = to_arviz(posterior, *args, model=model, num_samples=10)
    assert data.posterior["u"].shape == (1, 10, 3)
    assert set(data.sample_stats.data_vars) == {"lp"}


def test_masked_observations_count_nothing_and_names_of_plates_give_way_to_arviz():
    def masked(x):
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("draw", len(x)), poutine.mask(mask=torch.tensor([True, False, True])):
            pyro.sample("x", dist.Bernoulli(p), obs=x)

    x = torch.tensor([1.0, 0.0, 1.0])
    cvi = CVI(masked, AutoCVI(masked))
    cvi.step(x)
    data = to_arviz(cvi.guide, x, num_samples=4)
    assert data.log_likelihood["x"].dims == ("chain", "draw", "draw_plate")
    values = torch.as_tensor(data.log_likelihood["x"].values[0])
    assert bool((values[:, 1] == 0).all())
    assert bool((values[:, 0] < 0).all())


def test_discrete_latents_and_minibatches():
    def mixture(y):
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(y), subsample_size=4) as index:
            z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            pyro.sample("y", dist.Normal(mu[z], 1.0), obs=y[index])

    y = torch.cat([torch.randn(6) - 4, torch.randn(6) + 4])
    cvi = CVI(mixture, AutoCVI(mixture))
    for _ in range(9):
        cvi.step(y)
    data = to_arviz(cvi.guide, y, num_samples=6)
    assert data.posterior["z"].shape == (1, 6, 4)
    assert data.posterior["z"].dtype.kind == "i"
    assert data.log_likelihood["y"].shape == (1, 6, 4)


def test_a_list_of_guides_and_pyros_own(fit):
    _, args, _ = fit
    both = HybridGuide(model)
    both.append(AutoCVI(poutine.block(model, hide=["sd"])))
    both.append(AutoNormal(poutine.block(model, expose=["sd"])))
    cvi = CVI(model, both, optim=pyro.optim.Adam({"lr": 0.01}))
    cvi.step(*args)
    for guide in (both, AutoNormal(model)):
        data = to_arviz(guide, *args, num_samples=3)
        assert set(data.posterior.data_vars) == {"sd", "b", "u", "largest"}
        assert bool(torch.isfinite(torch.as_tensor(data.sample_stats["log_q"].values)).all())


def test_errors_say_what_is_missing(fit, monkeypatch):
    cvi, args, _ = fit
    with pytest.raises(CVIError, match="positive integer"):
        to_arviz(cvi.guide, *args, num_samples=0)
    with pytest.raises(CVIError, match="HybridGuide or IntegratedPosterior"):
        to_arviz(cvi, *args)
    monkeypatch.setitem(sys.modules, "arviz", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pyro_cvi\[arviz\]"):
        to_arviz(cvi.guide, *args)
