"""AutoCVI is a Pyro autoguide: sites, plates, ELBOs, Predictive, handlers, other guides beside it."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from guide_cases import NAMES, dense, zoo
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroSample

from pyro_cvi import CVI, AutoCVI, CVIError


def fitted(name, steps=2):
    model, args = zoo()[name]
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for _ in range(steps):
        cvi.step(*args)
    return model, args, guide, cvi


def latents_of(model, args):
    trace = poutine.trace(model).get_trace(*args)
    return {
        n: s for n, s in trace.iter_stochastic_nodes() if type(s["fn"]).__name__ != "_Subsample"
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_call_draws_every_latent_with_its_shape_inside_its_plates(name):
    model, args, guide, _ = fitted(name)
    trace = poutine.trace(guide).get_trace(*args)
    result = trace.nodes["_RETURN"]["value"]
    expected = latents_of(model, args)
    assert list(result) == list(expected)
    for site, node in expected.items():
        mine = trace.nodes[site]
        assert result[site].shape == node["value"].shape
        assert result[site].dtype == node["value"].dtype
        assert mine["fn"].event_shape == node["fn"].event_shape
        assert mine["fn"].batch_shape == node["fn"].batch_shape
        assert set(mine["cond_indep_stack"]) == set(node["cond_indep_stack"])
        assert bool(node["fn"].support.check(result[site]).all())


@pytest.mark.parametrize("name", NAMES)
def test_whatever_else_a_guide_trace_holds_is_auxiliary(name):
    model, args, guide, _ = fitted(name)
    trace = poutine.trace(guide).get_trace(*args)
    extra = {
        n for n, s in trace.iter_stochastic_nodes()
        if n not in latents_of(model, args) and type(s["fn"]).__name__ != "_Subsample"
    }  # fmt: skip
    assert all(trace.nodes[n]["infer"]["is_auxiliary"] for n in extra)


@pytest.mark.parametrize("name", NAMES)
def test_trace_elbo_of_the_guide_agrees_with_evaluate_loss(name):
    model, args, guide, cvi = fitted(name)
    elbo = Trace_ELBO(max_plate_nesting=2)
    losses = torch.tensor([elbo.loss(model, guide, *args) for _ in range(100)])
    error = losses.std() / math.sqrt(len(losses)) + 1e-9 * losses.mean().abs()
    assert abs(losses.mean() - cvi.evaluate_loss(*args)) < 4 * error


@pytest.mark.parametrize("name", ["dense", "logistic", "gammas", "variance", "coins"])
def test_vectorised_particles_agree_with_evaluate_loss(name):
    model, args = zoo()[name]
    model = {"dense": batch_safe_dense, "logistic": batch_safe_logistic}.get(name, model)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.step(*args)
    kwargs = {"num_particles": 400, "vectorize_particles": True, "max_plate_nesting": 2}
    losses = torch.tensor([Trace_ELBO(**kwargs).loss(model, guide, *args) for _ in range(8)])
    error = losses.std() / math.sqrt(len(losses)) + 1e-9 * losses.mean().abs()
    assert abs(losses.mean() - cvi.evaluate_loss(*args)) < 5 * error


def batch_safe_dense(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x * w).sum(-1) + b, 0.5), obs=y)


def batch_safe_logistic(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=(x * w).sum(-1)), obs=y)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dense", Trace_ELBO),
        ("dense", TraceMeanField_ELBO),  # it refuses guides with discrete sites
        ("mixture", Trace_ELBO),
        ("mixture", TraceGraph_ELBO),
    ],
)
def test_svi_accepts_the_guide_and_leaves_the_posterior_alone(name, loss):
    model, args, guide, _ = fitted(name)
    before = {k: v.clone() for k, v in guide.state_dict().items()}
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss())
    assert math.isfinite(svi.step(*args))
    assert math.isfinite(svi.evaluate_loss(*args))
    assert not list(guide.parameters())
    assert all(torch.equal(v, before[k]) for k, v in guide.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_looking_at_the_posterior_changes_nothing(name):
    model, args, guide, cvi = fitted(name, 1)
    before = {k: v.clone() for k, v in guide.state_dict().items()}
    rng, loss = torch.get_rng_state(), cvi.evaluate_loss(*args)
    guide.median()
    guide.quantiles([0.1, 0.9])
    for site in latents_of(model, args):
        torch.set_rng_state(rng)
        guide.posterior(site)
    cvi.explain()
    assert cvi.evaluate_loss(*args) == loss
    assert torch.equal(torch.get_rng_state(), rng)
    guide(*args)
    guide.call(*args)
    Predictive(model, guide=guide, num_samples=2)(*args)
    Trace_ELBO().loss(model, guide, *args)
    assert all(torch.equal(v, before[k]) for k, v in guide.state_dict().items())
    assert cvi.evaluate_loss(*args) == loss
    left = cvi.step(*args)
    guide.load_state_dict(before)
    assert CVI(model, guide).step(*args) == pytest.approx(left, rel=1e-12)


def test_parallel_predictive_draws_latents_and_new_data():
    # Scalars only: of a guide without plates Pyro's parallel Predictive misplaces vector sites.
    def model(x, y):
        a, b = pyro.sample("a", dist.Normal(0.0, 1.0)), pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(a * x + b, 0.5), obs=y)

    guide = AutoCVI(model)
    CVI(model, guide).step(torch.randn(8), torch.randn(8))
    draws = Predictive(model, guide=guide, num_samples=300, parallel=True)(torch.randn(5), None)
    assert draws["y"].shape == (300, 5)
    assert draws["a"].shape == draws["b"].shape == (300, 1)
    mean, sd = guide.posterior("a").mean, guide.posterior("a").stddev
    assert abs(draws["a"].mean() - mean) < 5 * sd / math.sqrt(300)


def test_sequential_predictive_draws_latents_and_new_data():
    model = batch_safe_dense
    x, y = torch.randn(8, 3), torch.randn(8)
    guide = AutoCVI(model)
    CVI(model, guide).step(x, y)
    new = torch.randn(5, 3)
    draws = Predictive(model, guide=guide, num_samples=300)(new, None)
    assert draws["y"].shape == (300, 5)
    assert draws["w"].reshape(300, -1).shape == (300, 3)
    mean = new @ guide.posterior("w").mean + guide.posterior("b").mean
    sd = draws["y"].std(0)
    assert bool(((draws["y"].mean(0) - mean).abs() < 5 * sd / math.sqrt(300)).all())


@pytest.mark.parametrize("name", ["mixture", "coins", "diagonal", "switches", "local_vectors"])
def test_predictive_replays_discrete_and_local_sites(name):
    model, args, guide, _ = fitted(name)
    draws = Predictive(model, guide=guide, num_samples=3)(*args)
    for site, node in latents_of(model, args).items():
        assert draws[site].numel() == 3 * node["value"].numel()


def test_predictive_before_any_step_draws_from_the_initial_posterior():
    model, args = zoo()["dense"]
    guide = AutoCVI(model)
    draws = Predictive(model, guide=guide, num_samples=4)(*args)
    assert draws["w"].reshape(4, -1).shape == (4, 3)
    assert math.isfinite(CVI(model, guide).step(*args))


def test_a_call_before_any_step_draws_and_does_not_disturb_the_fit():
    model, args = zoo()["logistic"]
    called, fresh = AutoCVI(model), AutoCVI(model)
    called(*args)
    assert set(called.median()) == {"w"}
    assert CVI(model, called).step(*args) == pytest.approx(CVI(model, fresh).step(*args), rel=1e-12)


@pytest.mark.parametrize(
    "ask",
    [
        lambda g: g.median(),
        lambda g: g.quantiles([0.5]),
        lambda g: g.posterior("w"),
        lambda g: g.joint(["w"]),
        lambda g: g.plan,
    ],
)
def test_questions_before_any_data_are_refused_with_the_remedy(ask):
    with pytest.raises(CVIError, match=r"before the guide has seen data.*cvi\.step\(\*args\)"):
        ask(AutoCVI(dense))


def test_call_returns_values_sorted_by_name():
    _, args, guide, _ = fitted("dense")
    b, w = guide.call(*args)
    assert b.shape == ()
    assert w.shape == (3,)


# --- other guides beside it, several at once -------------------------------------------------------


def test_guide_list_samples_its_parts_in_the_plates_of_the_list():
    model, args = zoo()["plated"]
    guide = AutoGuideList(model)
    guide.append(AutoCVI(poutine.block(model, expose=["a"])))
    guide.append(AutoNormal(poutine.block(model, expose=["mu"])))
    assert {n: v.shape for n, v in guide(*args).items()} == {"a": (3,), "mu": ()}
    assert set(guide.median(*args)) == {"a", "mu"}
    assert guide.quantiles([0.1, 0.9], *args)["a"].shape == (2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
        assert math.isfinite(svi.step(*args))


def test_a_part_that_was_fitted_keeps_its_posterior_in_the_list():
    model, args = zoo()["plated"]
    given = poutine.condition(model, data={"mu": torch.tensor(0.3)})
    part = AutoCVI(poutine.block(model, hide=["mu"]))
    CVI(given, part).step(*args)
    median = part.median()["a"]
    guide = AutoGuideList(model)
    guide.append(part)
    guide.append(AutoNormal(poutine.block(model, expose=["mu"])))
    guide(*args)
    assert torch.equal(guide.median(*args)["a"], median)


def test_a_part_of_another_model_is_refused():
    model, args = zoo()["plated"]
    guide = AutoGuideList(model)
    guide.append(AutoCVI(lambda group, y: pyro.sample("other", dist.Normal(0.0, 1.0))))
    with pytest.raises(CVIError, match="'other'.*no such site"):
        guide(*args)


def test_cvi_refuses_a_guide_list_by_name():
    with pytest.raises(CVIError, match="AutoGuideList"):
        CVI(dense, AutoGuideList(dense))


def test_two_objects_over_one_guide_share_its_state():
    model, args = zoo()["logistic"]
    guide = AutoCVI(model)
    a, b, alone = CVI(model, guide), CVI(model, guide), CVI(model, AutoCVI(model))
    for one in (a, b, a, b):
        shared = one.step(*args)
        assert shared == pytest.approx(alone.step(*args), rel=1e-12)
    assert a.evaluate_loss(*args) == b.evaluate_loss(*args) == shared


def test_two_guides_never_collide():
    model, args = zoo()["dense"]
    first, second = AutoCVI(model), AutoCVI(model)
    CVI(model, first).step(*args)
    CVI(model, second).step(args[0], -args[1])
    assert not torch.allclose(first.posterior("w").mean, second.posterior("w").mean)
    fresh = AutoCVI(model)
    fresh(*args)
    assert torch.equal(fresh.posterior("w").mean, torch.zeros(3))


@pytest.mark.parametrize("local", [False, True])
def test_the_param_store_holds_nothing_of_the_guide(local):
    with pyro.settings.context(module_local_params=local):
        model, args, guide, cvi = fitted("dense")
        loss = cvi.evaluate_loss(*args)
        assert len(pyro.get_param_store()) == 0
        pyro.clear_param_store()
        guide(*args)
        assert cvi.evaluate_loss(*args) == loss


# --- handlers and modules --------------------------------------------------------------------------


def chain(y=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    z = pyro.sample("z", dist.Normal(mu, 0.5))
    pyro.deterministic("twice", 2 * z)
    with pyro.plate("data", 4):
        return pyro.sample("y", dist.Normal(z, 1.0), obs=y)


Y = torch.tensor([0.5, 1.0, -0.2, 0.9])


def fit(model, *args):
    guide = AutoCVI(model)
    return guide, CVI(model, guide).step(*args)


def test_conditioned_sites_are_data():
    y = Y.double()
    guide, _ = fit(poutine.condition(chain, data={"mu": torch.tensor(1.0), "y": y}))
    q = guide.posterior("z")
    precision = 1 / 0.25 + 4
    assert float(q.mean) == pytest.approx((1 / 0.25 + float(y.sum())) / precision, rel=1e-9)
    assert set(guide()) == {"z"}


def test_intervened_sites_keep_their_prior():
    guide, _ = fit(poutine.do(chain, data={"z": torch.tensor(1.0)}), Y.double())
    mu, z = guide.posterior("mu"), guide.posterior("z")
    assert float(mu.mean) == pytest.approx(0.0, abs=1e-12)
    assert float(z.mean) == pytest.approx(0.0, abs=1e-12)
    assert float(mu.variance) == pytest.approx(1.0, rel=1e-9)
    assert float(z.variance) == pytest.approx(1.25, rel=1e-9)


def test_a_reparameterised_model_has_the_same_bound():
    _, loss = fit(chain, Y.double())
    decentred = poutine.reparam(chain, config={"z": LocScaleReparam(0.0)})
    guide, other = fit(decentred, Y.double())
    assert other == pytest.approx(loss, rel=1e-10)
    assert set(guide(Y.double())) == {"mu", "z_decentered"}
    draws = Predictive(decentred, guide=guide, num_samples=3)(Y.double())
    assert draws["z"].shape[0] == 3


def test_a_lifted_parameter_is_a_latent():
    def model(y):
        mu = pyro.param("mu", torch.tensor(0.0))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    guide, _ = fit(poutine.lift(model, prior={"mu": dist.Normal(0.0, 1.0)}), Y.double())
    assert float(guide.posterior("mu").mean) == pytest.approx(float(Y.sum()) / 5, rel=1e-6)


def test_deterministic_sites_and_factors_fit():
    def model(y):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("pull", -0.5 * (z - 2) ** 2)
        pyro.deterministic("double", 2 * z)
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide, _ = fit(model, Y.double())
    assert float(guide.posterior("z").mean) == pytest.approx((2 + float(Y.sum())) / 6, rel=1e-6)
    draws = Predictive(model, guide=guide, num_samples=5)(Y.double())
    assert torch.allclose(draws["double"].reshape(-1), 2 * draws["z"].reshape(-1))


class BayesianRegression(PyroModule):
    """The form of Pyro's tutorial `bayesian_regression`, with a Gamma prior on the noise."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](inputs, outputs)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([outputs, inputs]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([outputs]).to_event(1))

    def forward(self, x, y=None):
        tau = pyro.sample("tau", dist.Gamma(2.0, 2.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, tau.rsqrt()), obs=y)
        return mean


def test_the_tutorials_bayesian_regression_with_dotted_names():
    x = torch.randn(30, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 3 + 0.1 * torch.randn(30)
    model = BayesianRegression(3, 1)
    guide = AutoCVI(model)
    CVI(model, guide).run(x, y, num_steps=30)
    assert guide.posterior("linear.weight").event_shape == (1, 3)
    assert guide.median()["linear.bias"].shape == (1,)
    assert float(guide.median()["linear.bias"]) == pytest.approx(3.0, abs=0.2)
    joint = guide.joint(["linear.bias", "linear.weight"])
    assert joint.event_shape == (4,)
    names = ("linear.weight", "obs", "_RETURN")
    draws = Predictive(model, guide=guide, num_samples=6, return_sites=names)(x)
    assert draws["linear.weight"].reshape(6, -1).shape == (6, 3)
    assert draws["obs"].shape == draws["_RETURN"].shape == (6, 30)
    other = AutoCVI(model)
    other.load_state_dict(guide.state_dict())
    other(x, y)
    assert torch.equal(other.median()["linear.weight"], guide.median()["linear.weight"])


def test_module_models_stay_outside_of_the_guides_modules():
    guide = AutoCVI(BayesianRegression(3, 1))
    assert [m for m in guide.modules() if m is not guide] == []


def test_create_plates_is_used_where_it_names_a_plate():
    model, args = zoo()["plated"]
    made = []

    def create_plates(*_):
        made.append(pyro.plate("groups", 3, dim=-1))
        return made[-1]

    guide = AutoCVI(model, create_plates=create_plates)
    CVI(model, guide).step(*args)
    guide(*args)
    assert guide.plates["groups"] is made[-1]


def test_empty_and_one_element_sites_are_drawn():
    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(0), 1.0).to_event(1))
        one = pyro.sample("one", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(w.sum() + one[0], 1.0), obs=y)

    guide, _ = fit(model, Y.double())
    assert {n: v.shape for n, v in guide(Y.double()).items()} == {"w": (0,), "one": (1,)}
    assert guide.median()["w"].shape == (0,)
    assert guide.posterior("w").event_shape == (0,)


# --- dtypes ----------------------------------------------------------------------------------------


def both_kinds(y, dtype):
    one = torch.ones((), dtype=dtype)
    loc = pyro.sample("loc", dist.Normal(0 * one, one))
    rate = pyro.sample("rate", dist.Gamma(2 * one, one))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2, dtype=dtype)))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(p))
        on = pyro.sample("on", dist.Bernoulli(0.5 * one))
        mean = loc * k.to(dtype) + on
        pyro.sample("y", dist.Normal(mean, rate.rsqrt()), obs=y)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_posterior_has_the_dtype_of_the_sites_not_the_default(default, dtype):
    torch.set_default_dtype(default)
    y = torch.randn(6, dtype=dtype)
    guide = AutoCVI(both_kinds)
    CVI(both_kinds, guide).step(y, dtype)
    assert {v.dtype for v in guide.state_dict().values()} == {dtype}
    values, medians, quantiles = guide(y, dtype), guide.median(), guide.quantiles([0.25])
    for site in ("loc", "rate", "p", "on"):
        assert values[site].dtype == medians[site].dtype == dtype
        assert quantiles[site].dtype == dtype
    assert values["k"].dtype == medians["k"].dtype == torch.long
    assert math.isfinite(Trace_ELBO().loss(both_kinds, guide, y, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_every_model_works_at_either_default_dtype(name, dtype):
    torch.set_default_dtype(dtype)
    model, args, guide, cvi = fitted(name)
    assert {v.dtype for v in guide.state_dict().values()} == {dtype}
    assert math.isfinite(Trace_ELBO().loss(model, guide, *args))
    assert all(bool(torch.isfinite(v).all()) for v in guide.median().values())
    assert math.isfinite(cvi.evaluate_loss(*args))
