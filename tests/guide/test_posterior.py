"""What the guide holds: marginals, joints, quantiles, starting points, saving, loading, copying."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from guide_cases import GAUSSIAN_ONLY, NAMES, variance, zoo
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide.initialization import (
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_value,
)

from pyro_cvi import CVI, AutoCVI, CVIError
from pyro_cvi.families import BETA, DIRICHLET, GAMMA, INVERSE_GAMMA
from pyro_cvi.families.quantiles import quantile


def fitted(name, steps=2):
    model, args = zoo()[name]
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for _ in range(steps):
        cvi.step(*args)
    return model, args, guide, cvi


# --- marginals, joints -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_posterior_has_the_shapes_and_support_of_its_site(name):
    model, args, guide, _ = fitted(name)
    trace = poutine.trace(model).get_trace(*args)
    for site, latent in guide.plan.latents.items():
        q, fn = guide.posterior(site), trace.nodes[site]["fn"]
        assert q.batch_shape == fn.batch_shape
        assert q.event_shape == fn.event_shape
        assert q.sample().shape == latent.shape
        assert bool(fn.support.check(q.sample()).all())


@pytest.mark.parametrize("name", NAMES)
def test_calls_draw_from_the_marginals(name):
    _, args, guide, _ = fitted(name)
    draws = [guide(*args) for _ in range(120)]
    for site in guide.plan.latents:
        q = guide.posterior(site)
        if isinstance(q, dist.Categorical):
            continue  # no mean; Bernoulli sites stand for it
        values = torch.stack([d[site] for d in draws])
        error = (q.variance / len(draws)).sqrt() + 1e-12
        assert bool(((values.mean(0) - q.mean).abs() < 5 * error).all())


def test_a_vector_site_comes_with_its_covariance():
    _, _, guide, _ = fitted("dense")
    assert isinstance(guide.posterior("w"), dist.MultivariateNormal)
    joint = guide.joint(["b", "w"])
    w = guide.posterior("w")
    assert torch.allclose(joint.covariance_matrix[1:, 1:], w.covariance_matrix)
    assert torch.allclose(joint.mean[1:], w.mean)
    assert joint.variance[0] == pytest.approx(float(guide.posterior("b").variance))


def test_the_joint_is_the_closed_form_in_the_order_asked_for():
    (model, (x, y)), sites = zoo()["dense"], ["b", "w"]
    guide = AutoCVI(model)
    CVI(model, guide).step(x, y)
    design = torch.cat([torch.ones(len(x), 1), x], 1)
    precision = design.mT @ design / 0.25 + torch.diag(torch.tensor([0.25, 1, 1, 1]))
    joint = guide.joint(sites)
    assert torch.allclose(joint.precision_matrix, precision, rtol=1e-8)
    assert torch.allclose(joint.mean, torch.linalg.solve(precision, design.mT @ y / 0.25))
    swapped = guide.joint(["w", "b"]).covariance_matrix
    assert torch.allclose(swapped, joint.covariance_matrix[[1, 2, 3, 0]][:, [1, 2, 3, 0]])
    assert guide.joint("w").event_shape == (3,)


@pytest.mark.parametrize(
    ("name", "sites", "said"),
    [
        ("variance", ["mu", "s2"], "2 blocks"),
        ("mixture", ["k"], "Categorical"),
        ("dense", [], "0 blocks"),
        ("dense", ["w", "w"], "named twice"),
        ("dense", ["w", "nope"], r"site 'nope': no such latent.*\['b', 'w'\]"),
    ],
)
def test_a_joint_that_is_not_one_gaussian_is_refused(name, sites, said):
    _, _, guide, _ = fitted(name, 1)
    with pytest.raises(CVIError, match=said):
        guide.joint(sites)


def test_an_ill_conditioned_marginal_in_float32_has_no_jitter_and_no_failure():
    torch.set_default_dtype(torch.float32)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1e3).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1e3))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w + b, 0.1), obs=y)

    x = torch.randn(20, 1).expand(20, 2) + 1e-3 * torch.randn(20, 2)
    guide = AutoCVI(model)
    CVI(model, guide).step(x, x.sum(1))
    assert bool(guide.posterior("w").scale_tril.isfinite().all())
    assert bool(guide.joint(["b", "w"]).scale_tril.isfinite().all())


def test_a_binomial_latent_keeps_its_values_and_dtype():
    def model(y):
        n = pyro.sample("n", dist.Binomial(3, torch.tensor(0.4)))
        pyro.sample("y", dist.Normal(n, 1.0), obs=y)

    y = torch.tensor(2.0)
    guide = AutoCVI(model)
    CVI(model, guide).step(y)
    prior = scipy.stats.binom.pmf(range(4), 3, 0.4)
    weights = torch.tensor(prior) * dist.Normal(torch.arange(4.0), 1.0).log_prob(y).exp()
    assert torch.allclose(guide.posterior("n").probs, weights / weights.sum())
    assert guide(y)["n"].dtype == guide.median()["n"].dtype == torch.float64
    assert guide.posterior("n").expand([2]).sample().dtype == torch.float64


# --- quantiles -------------------------------------------------------------------------------------

LEVELS = (1e-6, 0.5, 0.9999)
SIZES = (0.05, 1.0, 8.0, 49.0, 51.0, 1e6)


@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_of_every_family_are_scipys(q):
    a = torch.tensor(SIZES)
    level, b = torch.tensor(q), torch.tensor(3.0)
    got = quantile(GAMMA, (a - 1, -b.expand_as(a)), level)
    assert torch.allclose(
        got, torch.tensor(scipy.stats.gamma.ppf(q, a, scale=1 / 3)), rtol=1e-8, atol=0
    )
    got = quantile(INVERSE_GAMMA, (-a - 1, -b.expand_as(a)), level)
    assert torch.allclose(
        got, torch.tensor(scipy.stats.invgamma.ppf(q, a, scale=3)), rtol=1e-8, atol=0
    )
    a, b = torch.cartesian_prod(a, a).unbind(-1)
    got = quantile(BETA, (a - 1, b - 1), level)
    assert torch.allclose(got, torch.tensor(scipy.stats.beta.ppf(q, a, b)), rtol=1e-7, atol=1e-300)
    got = quantile(DIRICHLET, (torch.tensor([1.0, 2.0, 3.5]),), level)
    want = torch.tensor(scipy.stats.beta.ppf(q, [2.0, 3.0, 4.5], [7.5, 6.5, 5.0]))
    assert torch.allclose(got, want, rtol=1e-8)


@pytest.mark.parametrize(
    ("family", "end"), [(GAMMA, torch.inf), (INVERSE_GAMMA, torch.inf), (BETA, 1.0)]
)
def test_the_extreme_quantiles_are_the_ends_of_the_support(family, end):
    sign = -1.0 if family is not BETA else 1.0
    natural = (torch.tensor([-4.0 if family is INVERSE_GAMMA else 2.0]), torch.tensor([3.0 * sign]))
    assert quantile(family, natural, torch.tensor(0.0)) == 0
    assert quantile(family, natural, torch.tensor(1.0)) == end


def test_float32_quantiles_are_as_good_as_float32():
    a = torch.tensor([0.3, 5.0, 1e4, 1e6], dtype=torch.float32)
    got = quantile(BETA, (a - 1, a - 1), torch.tensor(0.9))
    assert got.dtype == torch.float32
    want = torch.tensor(scipy.stats.beta.ppf(0.9, a.double(), a.double()))
    assert torch.allclose(got.double(), want, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_quantiles_have_a_leading_dim_and_invert_the_cdf(name):
    _, _, guide, _ = fitted(name)
    levels = [0.1, 0.5, 0.8]
    found, median = guide.quantiles(levels), guide.median()
    assert list(found) == list(median) == list(guide.plan.latents)
    for site, latent in guide.plan.latents.items():
        assert found[site].shape == (3, *latent.shape)
        assert median[site].shape == latent.shape
        assert bool((found[site].diff(dim=0) >= 0).all())
        if latent.enum_dim is None:
            assert torch.equal(found[site][1], median[site])


@pytest.mark.parametrize("name", GAUSSIAN_ONLY)
def test_gaussian_quantiles_are_scipys(name):
    _, _, guide, _ = fitted(name)
    for site, value in guide.quantiles([0.05, 0.7]).items():
        q = guide.posterior(site)
        want = scipy.stats.norm.ppf([[0.05], [0.7]], q.mean.reshape(-1), q.stddev.reshape(-1))
        assert torch.allclose(value.reshape(2, -1), torch.tensor(want))


def test_of_a_discrete_site_the_median_is_its_most_probable_value():
    _, _, guide, _ = fitted("mixture")
    assert torch.equal(guide.median()["k"], guide.posterior("k").logits.argmax(-1))
    _, _, guide, _ = fitted("switches")
    assert torch.equal(guide.median()["on"], (guide.posterior("on").probs > 0.5).double())
    assert bool((guide.quantiles([1.0])["on"] == 1).all())


@pytest.mark.parametrize("bad", [[-0.1], [0.5, 1.5], [float("nan")]])
def test_quantiles_outside_of_the_unit_interval_are_refused(bad):
    with pytest.raises(CVIError, match="between 0 and 1"):
        fitted("dense", 1)[2].quantiles(bad)


# --- starting points -------------------------------------------------------------------------------


def hierarchy(y):
    mu = pyro.sample("mu", dist.Normal(5.0, 1.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Normal(mu, tau.rsqrt()))
        pyro.sample("y", dist.Bernoulli(logits=z), obs=y)


def test_init_to_value_is_where_sites_start():
    values = {"mu": torch.tensor(-1.0), "z": torch.arange(4.0), "tau": torch.tensor(7.0)}
    guide = AutoCVI(hierarchy, init_loc_fn=init_to_value(values=values))
    guide(torch.ones(4))
    assert torch.equal(guide.median()["z"], values["z"])
    assert torch.equal(guide.median()["mu"], values["mu"])
    assert float(guide.posterior("tau").mean) == pytest.approx(7.0)


def test_init_to_mean_follows_the_points_upstream():
    guide = AutoCVI(hierarchy, init_loc_fn=init_to_mean)
    guide(torch.ones(4))
    assert torch.equal(guide.median()["z"], torch.full((4,), 5.0))
    assert float(guide.posterior("tau").mean) == pytest.approx(2.0)


@pytest.mark.parametrize("init", [init_to_sample, init_to_sample(), init_to_median(num_samples=5)])
@pytest.mark.parametrize("name", ["dense", "mixture", "coins", "variance"])
def test_other_strategies_start_a_fit_as_well(init, name):
    model, args = zoo()[name]
    guide = AutoCVI(model, init_loc_fn=init)
    cvi = CVI(model, guide)
    assert cvi.step(*args) >= cvi.run(*args, num_steps=3).losses[-1] - 1e-9


def test_discrete_sites_start_where_the_user_says_and_at_random_otherwise():
    model, (y,) = zoo()["mixture"]
    labels = (y > 0).long()
    guide = AutoCVI(model, init_loc_fn=init_to_value(values={"k": labels}))
    guide(y)
    assert torch.equal(guide.median()["k"], labels)
    assert torch.allclose(guide.posterior("k").probs.max(-1).values, torch.tensor(0.95))
    loose = AutoCVI(model, init_loc_fn=init_to_mean)
    loose(y)
    assert loose.posterior("k").probs.std() > 0


@pytest.mark.parametrize(
    "value", [torch.zeros(3, 3), torch.tensor(-1.0), torch.tensor(float("nan"))]
)
def test_a_starting_point_that_does_not_fit_is_refused(value):
    guide = AutoCVI(variance, init_loc_fn=init_to_value(values={"s2": value}))
    with pytest.raises(CVIError, match="latent site 's2'.*init_loc_fn"):
        guide(torch.randn(4))


# --- saving, loading, copying ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_goes_into_a_guide_that_has_seen_nothing(name):
    model, args, guide, cvi = fitted(name)
    saved = io.BytesIO()
    torch.save(guide.state_dict(), saved)
    saved.seek(0)
    other = AutoCVI(model)
    other.load_state_dict(torch.load(saved, weights_only=True))
    continued = CVI(model, other)
    assert continued.evaluate_loss(*args) == pytest.approx(cvi.evaluate_loss(*args), rel=1e-12)
    assert continued.step(*args) == pytest.approx(cvi.step(*args), rel=1e-9)
    again = AutoCVI(model)
    again(*args)
    again.load_state_dict(guide.state_dict())
    found = again.median()
    for site, value in guide.median().items():
        assert torch.equal(found[site], value)


def test_the_state_dict_names_the_sites():
    _, _, guide, _ = fitted("variance", 1)
    names = {key.split(":")[0] for key in guide.state_dict()}
    assert names == {"mu", "s2"}
    assert {"mu:loc", "mu:precision"} < set(guide.state_dict())


def test_a_state_of_another_model_or_size_is_refused():
    _, _, guide, _ = fitted("dense")
    model, args = zoo()["plated"]
    other = AutoCVI(model)
    other.load_state_dict(guide.state_dict())
    with pytest.raises(CVIError, match="state that was loaded"):
        other(*args)
    seen = AutoCVI(model)
    seen(*args)
    with pytest.raises(RuntimeError):
        seen.load_state_dict(guide.state_dict())


@pytest.mark.parametrize("name", ["dense", "plated", "mixture", "coins", "logistic"])
def test_a_deep_copy_goes_on_by_itself_and_the_original_too(name):
    model, args, guide, cvi = fitted(name, 1)
    twin = AutoCVI(model)
    twin.load_state_dict(guide.state_dict())
    reference = CVI(model, twin)
    before = {k: v.clone() for k, v in guide.state_dict().items()}
    copied = copy.deepcopy(guide)
    assert copied.model is guide.model is model
    continued = CVI(model, copied)
    losses = [continued.step(*args) for _ in range(2)]
    assert all(torch.equal(v, before[k]) for k, v in guide.state_dict().items())
    assert [cvi.step(*args) for _ in range(2)] == pytest.approx(losses, rel=1e-9)
    assert [reference.step(*args) for _ in range(2)] == pytest.approx(losses, rel=1e-9)
    assert set(copied(*args)) == set(guide(*args)) == set(copied.median())


def test_a_deep_copy_before_any_data_fits_like_the_original():
    model, args = zoo()["logistic"]
    guide = AutoCVI(model)
    copied = copy.deepcopy(guide)
    assert CVI(model, copied).step(*args) == pytest.approx(CVI(model, guide).step(*args), rel=1e-12)


def test_a_deep_copy_of_model_and_guide_together_stays_together():
    model = torch.nn.Module()
    model.forward = None
    guide = AutoCVI(model)
    twin, copied = copy.deepcopy((model, guide))
    assert copied.model is twin
    assert guide.model is model


@pytest.mark.parametrize("save", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["dense", "plated", "mixture", "switches", "dice", "variance"])
def test_pickling_leaves_the_original_alone_and_the_copy_complete(name, save):
    model, args, guide, cvi = fitted(name, 1)
    if save == "pickle":
        copied = pickle.loads(pickle.dumps(guide))
    else:
        file = io.BytesIO()
        torch.save(guide, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert guide.model is model
    found = [g.quantiles([0.3, 0.5]) for g in (guide, copied)]
    for site, value in found[0].items():
        assert torch.equal(found[1][site], value)
        assert copied.posterior(site).event_shape == guide.posterior(site).event_shape
    assert set(copied.median()) == set(found[0])
    assert set(copied(*args)) == set(guide(*args))
    Predictive(model, guide=copied, num_samples=2)(*args)
    with pytest.raises(CVIError, match="unpickled does not hold its model"):
        _ = copied.model
    assert CVI(model, copied).step(*args) == pytest.approx(cvi.step(*args), rel=1e-9)
    assert copied.model is model


def test_moving_the_guide_to_another_dtype_is_seen():
    _, _, guide, _ = fitted("dense")
    guide.to(torch.float32)
    assert guide.posterior("w").mean.dtype == torch.float32
    assert guide.median()["b"].dtype == torch.float32
