"""Which models are valid: what fits without a word, and what warns or raises, and says what to write."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam

from pyro_cvi import CVI, AutoCVI, CVIError

ONE = torch.tensor(1.0)


def fits(model, *args, steps=2, **options):
    """The losses, after a check that the guide and the model go together in Pyro's ELBO."""
    guide = AutoCVI(model)
    cvi = CVI(model, guide, **options)
    losses = [cvi.step(*args) for _ in range(steps)]
    assert all(math.isfinite(x) for x in losses)
    assert math.isfinite(Trace_ELBO(max_plate_nesting=3).loss(model, guide, *args))
    return guide, losses


def refused(model, said, *args):
    with pytest.raises(CVIError, match=said) as caught:
        CVI(model, AutoCVI(model)).step(*args)
    return caught.value


# --- plates: valid ---------------------------------------------------------------------------------


def test_nested_plates_in_any_order_of_dims():
    def model(flip):
        outer, inner = (-1, -2) if flip else (-2, -1)
        with pyro.plate("outer", 3, dim=outer):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with pyro.plate("inner", 2, dim=inner):
                b = pyro.sample("b", dist.Normal(a, 1.0))
                pyro.sample("y", dist.Normal(b, 1.0), obs=torch.zeros(b.shape))

    losses = [fits(model, flip)[1][-1] for flip in (False, True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_crossed_plates_used_together_and_alone():
    def model(y):
        rows, columns = pyro.plate("rows", 3, dim=-2), pyro.plate("columns", 4, dim=-1)
        with rows:
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with columns:
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with rows, columns:
            pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)

    guide, losses = fits(model, torch.randn(3, 4))
    assert guide.posterior("a").batch_shape == (3, 1)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_crossed_plates_both_subsampled_scale_by_both():
    y = torch.randn(6, 8)

    def model():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        rows = pyro.plate("rows", 6, subsample_size=3, dim=-2)
        columns = pyro.plate("columns", 8, subsample_size=4, dim=-1)
        with rows as i, columns as j:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[i][:, j])

    guide, _ = fits(model, steps=1, minibatch="stochastic")
    assert float(guide.posterior("mu").variance) == pytest.approx(1 / 49)


def test_a_plate_object_used_twice():
    def model(y):
        plate = pyro.plate("data", 3)
        with plate:
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with plate:
            pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    guide, _ = fits(model, torch.randn(3))
    assert guide.posterior("a").batch_shape == (3,)


def test_a_plate_without_a_size_and_a_plate_of_one():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("unsized"):
            pyro.sample("y", dist.Normal(a, 1.0), obs=y)
        with pyro.plate("one", 1):
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("x", dist.Normal(b, 1.0), obs=y[:1])

    guide, _ = fits(model, torch.randn(4))
    assert guide.posterior("b").batch_shape == (1,)


def test_a_plate_stack():
    def model(y):
        with pyro.plate_stack("stack", (2, 3)):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    guide, _ = fits(model, torch.randn(2, 3))
    assert guide.posterior("a").batch_shape == (2, 3)


def test_a_latent_of_batch_shape_one_becomes_one_for_each_element():
    def model(y):
        with pyro.plate("data", 4):
            a = pyro.sample("a", dist.Normal(torch.zeros(1), torch.ones(1)))
            pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    y = torch.randn(4)
    guide, _ = fits(model, y)
    assert torch.allclose(guide.posterior("a").mean, y / 2)


def test_sequential_plates_one_in_the_other():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        outer, inner = pyro.plate("outer", 2), pyro.plate("inner", 3)
        for i in outer:
            for j in inner:
                pyro.sample(f"y_{i}_{j}", dist.Normal(a, 1.0), obs=y[i, j])

    y = torch.randn(2, 3)
    guide, _ = fits(model, y)
    assert float(guide.posterior("a").mean) == pytest.approx(float(y.sum()) / 7)


def test_a_subsampled_sequential_plate_is_scaled():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", 10, subsample_size=2):
            pyro.sample(f"y_{i}", dist.Normal(a, 1.0), obs=ONE)

    guide, _ = fits(model, steps=4)  # the names of the data's sites change from step to step
    assert float(guide.posterior("a").mean) == pytest.approx(10 / 11)


# --- plates: invalid -------------------------------------------------------------------------------


def test_a_batch_dim_outside_of_a_plate():
    def latent():
        a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0))
        pyro.sample("y", dist.Normal(a.sum(), 1.0), obs=ONE)

    def data():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=torch.zeros(3))

    refused(latent, r"site 'a'.*no plate.*to_event")
    refused(data, r"site 'y'.*no plate.*pyro\.plate")


def test_without_validation_a_batch_dim_outside_of_a_plate_is_an_event():
    def model():
        a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0))
        pyro.sample("y", dist.Normal(a, 1.0).to_event(1), obs=torch.ones(3))

    with pyro.validation_enabled(False):
        guide = AutoCVI(model)
        CVI(model, guide).step()
    assert torch.allclose(guide.posterior("a").mean, torch.full((3,), 0.5))


def test_two_sites_of_one_name():
    def model():
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("a", dist.Normal(0.0, 1.0))

    with pytest.raises((CVIError, RuntimeError), match=r"[Mm]ultiple sample sites named 'a'"):
        CVI(model, AutoCVI(model)).step()


def test_a_site_with_the_name_of_a_parameter():
    def model():
        pyro.param("a", ONE)
        pyro.sample("a", dist.Normal(0.0, 1.0))

    with pytest.raises((CVIError, RuntimeError), match="a is already in the trace"):
        CVI(model, AutoCVI(model)).step()


@pytest.mark.parametrize("names", [("p", "p"), ("p", "q")])
def test_one_dim_for_two_plates(names):
    def model():
        with pyro.plate(names[0], 2, dim=-1), pyro.plate(names[1], 2, dim=-1):
            pyro.sample("a", dist.Normal(0.0, 1.0))

    with pytest.raises((ValueError, RuntimeError), match=r"collide|named 'p'"):
        CVI(model, AutoCVI(model)).step()


@pytest.mark.parametrize("vectorised", [False, True])
def test_a_plate_that_does_not_have_the_size_of_its_data(vectorised):
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        if vectorised:
            with pyro.plate("data", 5):
                pyro.sample("y", dist.Normal(a, 1.0), obs=torch.zeros(4))
        else:
            with pyro.plate("data", 5):
                pyro.sample("y", dist.Normal(a, torch.ones(4)), obs=torch.zeros(4))

    with pytest.raises(ValueError, match="y"):
        CVI(model, AutoCVI(model)).step()


def test_a_model_with_a_python_side_effect_is_not_run_more_often_than_needed():
    count = []

    def model():
        count.append(1)
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=ONE)

    cvi = CVI(model, AutoCVI(model))
    cvi.step()
    first = len(count)
    cvi.step()
    assert len(count) == first + 1
    assert first <= 6


# --- guide and model -------------------------------------------------------------------------------


def pair():
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(a, 1.0), obs=ONE)


def test_a_guide_of_another_model_is_refused_and_keeps_its_posterior():
    def other():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=ONE)

    guide = AutoCVI(pair)
    CVI(pair, guide).step()
    with pytest.raises(CVIError, match=r"changed.*'b'"):
        CVI(other, guide).step()
    assert float(guide.posterior("a").mean) == pytest.approx(0.5)


def test_pyros_elbo_warns_of_a_guide_that_lacks_a_site():
    def larger():
        pair()
        pyro.sample("c", dist.Normal(0.0, 1.0))

    guide = AutoCVI(pair)
    CVI(pair, guide).step()
    with pytest.warns(UserWarning, match=r"Found vars in model but not guide: \{'c'\}"):
        Trace_ELBO().loss(larger, guide)


@pytest.mark.parametrize("model", [lambda: pair(), pair])
def test_models_of_every_callable_kind(model):
    class Call:
        def __call__(self):
            return pair()

        def method(self):
            return pair()

    for one in (model, Call(), Call().method, poutine.scale(pair, 1.0)):
        guide = AutoCVI(one)
        CVI(one, guide).step()
        assert float(guide.posterior("a").mean) == pytest.approx(0.5)


@pytest.mark.parametrize("model", [None, 3, "model"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(CVIError, match=r"model is a \w+.*callable"):
        AutoCVI(model)
    with pytest.raises(CVIError, match=r"model is a \w+.*callable"):
        CVI(model, AutoCVI(pair))


# --- values ----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_raises_and_changes_nothing():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(a.exp()), obs=y)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    y = torch.tensor([1.0, 3.0])
    loss = cvi.step(y)
    before = {k: v.clone() for k, v in guide.state_dict().items()}
    with pyro.validation_enabled(False), pytest.raises(CVIError, match="'y'"):
        cvi.step(torch.tensor([1.0, math.nan]))
    with pytest.raises((CVIError, ValueError)):
        cvi.step(torch.tensor([1.0, -2.0]))
    assert all(torch.equal(v, before[k]) for k, v in guide.state_dict().items())
    assert cvi.evaluate_loss(y) == pytest.approx(loss)


def test_a_parameter_outside_of_its_domain_is_said_by_the_distribution():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, torch.tensor(-1.0)), obs=ONE)

    with pytest.raises(ValueError, match=r"scale|invalid"):
        CVI(model, AutoCVI(model)).step()


def test_a_value_outside_of_the_support():
    def model():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        pyro.sample("y", dist.Bernoulli(p), obs=torch.tensor(3.0))

    with pytest.raises(ValueError, match=r"support|'y'"):
        CVI(model, AutoCVI(model)).step()


def test_masked_rows_may_hold_anything():
    def model(y, mask):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), poutine.mask(mask=mask):
            pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    y = torch.tensor([2.0, math.nan, 4.0])
    mask = torch.tensor([True, False, True])
    with pyro.validation_enabled(False):
        guide = AutoCVI(model)
        CVI(model, guide).step(y, mask)
    assert float(guide.posterior("a").mean) == pytest.approx(2.0)


# --- enumeration, markov, handlers -----------------------------------------------------------------


def states(y):
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(2.0 * z, 1.0), obs=y)


@pytest.mark.parametrize("how", [None, "parallel", "sequential"])
def test_enumeration_hints_change_nothing(how):
    y = torch.randn(5)
    model = states if how is None else config_enumerate(states, default=how)
    guide = AutoCVI(model)
    CVI(model, guide).step(y)
    logits = torch.tensor([0.3, 0.7]).log() + dist.Normal(torch.tensor([0.0, 2.0]), 1.0).log_prob(
        y[:, None]
    )
    assert torch.allclose(guide.posterior("z").probs, logits.softmax(-1))


def test_a_guide_without_the_discrete_sites_serves_an_enumerating_elbo():
    def model(y):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc + 2 * z, 1.0), obs=y)

    y = torch.randn(6)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.run(y)
    continuous = poutine.block(guide, hide=["z"])
    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    summed = sum(elbo.loss(model, continuous, y) for _ in range(200)) / 200
    assert summed < cvi.evaluate_loss(y) + 0.05  # states summed out are a tighter bound
    marginal = elbo.compute_marginals(model, continuous, y)["z"].probs
    assert float((marginal - guide.posterior("z").probs).abs().max()) < 0.5


def test_a_markov_chain_of_latents_and_data():
    def model(y):
        x = torch.tensor(0)
        p = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
        for t in pyro.markov(range(len(y))):
            x = pyro.sample(f"x_{t}", dist.Categorical(p[x]))
            pyro.sample(f"y_{t}", dist.Normal(x.to(y.dtype), 0.5), obs=y[t])

    y = torch.tensor([0.1, 0.9, 1.2, -0.3])
    guide = AutoCVI(model)
    loss = CVI(model, guide).step(y)
    p = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    alpha = p[0].log()
    for t in range(4):
        if t:
            alpha = (alpha[:, None] + p.log()).logsumexp(0)
        alpha = alpha + dist.Normal(torch.tensor([0.0, 1.0]), 0.5).log_prob(y[t])
    assert loss == pytest.approx(-float(alpha.logsumexp(0)))


def test_a_state_dependent_branch_is_refused_or_right():
    def model(y):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        loc = 3.0 if z.item() > 0.5 else -3.0
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    with pytest.raises(CVIError, match="'z'.*branches"):
        CVI(model, AutoCVI(model)).step(ONE)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_a_scaled_model_has_a_tempered_posterior(scale):
    guide = AutoCVI(pair)
    loss = CVI(pair, guide).step()
    tempered = poutine.scale(pair, scale)
    other = AutoCVI(tempered)
    CVI(tempered, other).step()
    q, p = guide.posterior("a"), other.posterior("a")
    assert math.isfinite(loss)
    assert float(p.mean) == pytest.approx(float(q.mean))
    # The guide is not scaled, as in Pyro, so that the prior's and the likelihood's precision are.
    assert float(p.variance) == pytest.approx(float(q.variance) / scale)


def test_svi_with_an_ordinary_guide_runs_beside_a_fit_of_the_same_model():
    guide = AutoCVI(pair)
    cvi = CVI(pair, guide)
    svi = SVI(pair, AutoNormal(pair), pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            svi.step()
            cvi.step()
    assert float(guide.posterior("a").mean) == pytest.approx(0.5)
    assert set(pyro.get_param_store()) == {"AutoNormal.locs.a", "AutoNormal.scales.a"}


@pytest.mark.parametrize("centred", [None, 0.5])
def test_a_scale_to_a_learnt_power_is_not_sampled(centred):
    """LocScaleReparam() learns how far a site is centred; the parameter is an exponent of the scale."""

    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(-2.0, 1.0))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        given = None if centred is None else torch.tensor(centred)
        with pyro.plate("time", len(y)), poutine.reparam(config={"drift": LocScaleReparam(given)}):
            drift = pyro.sample("drift", dist.Normal(0.0, scale))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(drift.cumsum(-1), noise), obs=y)

    y = (0.2 * torch.randn(12)).cumsum(0) + 0.3 * torch.randn(12)
    cvi = CVI(model, AutoCVI(model), pyro.optim.Adam({"lr": 0.01}))
    losses = [cvi.step(y) for _ in range(5)]
    assert {e.how for e in cvi.explain().edges} == {"exact", "quadrature"}
    assert losses[-1] < losses[0]
    if centred is None:
        assert pyro.param("drift_centered").item() != 0.5


def test_a_random_walk_finds_its_scale_from_the_priors_of_the_forecasting_tutorial():
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(-20.0, 5.0))
        noise = pyro.sample("noise", dist.LogNormal(-5.0, 5.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
        with pyro.plate("time", len(y)):
            pyro.sample("y", dist.Normal(scale * z.cumsum(-1), noise), obs=y)

    y = (0.3 * torch.randn(40)).cumsum(0) + 0.1 * torch.randn(40)
    guide = AutoCVI(model)
    CVI(model, guide).run(y, num_steps=60)
    assert float(guide.median()["scale"]) > 0.01
