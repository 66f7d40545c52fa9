"""CVI in the place of SVI: what may be passed, what comes back, and what is left as it was."""

import copy
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract_models import NAMES, fitted, scalars, zoo
from pyro import poutine
from pyro.infer import (
    SVI,
    EnergyDistance,
    JitTraceEnum_ELBO,
    JitTraceMeanField_ELBO,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    TraceTMC_ELBO,
)
from pyro.nn import PyroModule, PyroParam

from pyro_cvi import CVI, AutoCVI, CVIError

LOSSES = [Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO, TraceGraph_ELBO]


def state(guide):
    return {k: v.clone() for k, v in guide.state_dict().items()}


def same_state(guide, before):
    now = guide.state_dict()
    return now.keys() == before.keys() and all(torch.equal(v, before[k]) for k, v in now.items())


# --- the constructor -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_the_four_arguments_of_svi_by_position(loss):
    model, args = zoo()["scalars"]
    guide, optim, loss = AutoCVI(model), pyro.optim.Adam({"lr": 0.01}), loss()
    cvi = CVI(model, guide, optim, loss)
    assert (cvi.model, cvi.guide, cvi.optim, cvi.loss) == (model, guide, optim, loss.loss)
    plain = CVI(model, AutoCVI(model))
    assert cvi.step(*args) == plain.step(*args)


@pytest.mark.parametrize("loss", LOSSES)
def test_options_of_an_elbo_are_accepted(loss):
    model, args = zoo()["scalars"]
    given = loss(num_particles=3, max_plate_nesting=1, vectorize_particles=True)
    cvi = CVI(model, AutoCVI(model), pyro.optim.ClippedAdam({"lr": 0.01}), loss=given)
    assert math.isfinite(cvi.step(*args))


@pytest.mark.parametrize(
    "loss",
    [
        RenyiELBO(alpha=0.5), JitTraceEnum_ELBO(), JitTraceMeanField_ELBO(), TraceTMC_ELBO(),
        TraceTailAdaptive_ELBO(num_particles=2), ReweightedWakeSleep(),
        EnergyDistance(), Trace_ELBO().differentiable_loss, Trace_ELBO, lambda m, g, *a: 0.0,
    ],
)  # fmt: skip
def test_other_objectives_are_refused_by_name(loss):
    with pytest.raises(CVIError, match=rf"loss is {type(loss).__name__}.*leave loss out"):
        CVI(scalars, AutoCVI(scalars), None, loss)


@pytest.mark.parametrize("optim", [torch.optim.SGD, {"lr": 0.1}, pyro.optim.Adam, "adam"])
def test_what_is_no_pyro_optimiser_is_refused(optim):
    if optim is torch.optim.SGD:
        optim = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(CVIError, match=r"optim is a .*pyro\.optim"):
        CVI(scalars, AutoCVI(scalars), optim)


def test_a_scheduler_is_an_optimiser_that_the_user_steps():
    def model(y):
        shift = pyro.param("shift", torch.tensor(0.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=y)

    options = {"optimizer": torch.optim.SGD, "optim_args": {"lr": 0.1}, "gamma": 0.5}
    scheduler = pyro.optim.ExponentialLR(options)
    cvi = CVI(model, AutoCVI(model), scheduler)
    y = torch.full((4,), 3.0)
    cvi.step(y)
    before = pyro.param("shift").item()
    assert before > 0
    cvi.step(y)
    (inner,) = scheduler.optim_objs.values()
    assert inner.get_last_lr() == [0.1]  # two steps, and still the first rate
    scheduler.step()
    assert inner.get_last_lr() == [0.05]


# --- step and loss ---------------------------------------------------------------------------------


def test_the_loss_is_a_python_float_summed_over_the_data():
    def model(y):
        z = pyro.sample("z", dist.Normal(0.0, 1e-6))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    y = torch.randn(50)
    cvi = CVI(model, AutoCVI(model))
    loss = cvi.step(y)
    assert type(loss) is float
    assert type(cvi.evaluate_loss(y)) is float
    assert loss == pytest.approx(-float(dist.Normal(0.0, 1.0).log_prob(y).sum()), rel=1e-6)
    twice = CVI(model, AutoCVI(model)).step(torch.cat([y, y]))
    assert twice == pytest.approx(2 * loss, rel=1e-6)


@pytest.mark.parametrize("loss", [None, *LOSSES])
def test_the_loss_attribute_is_called_with_model_and_guide(loss):
    model, args = zoo()["scalars"]
    cvi = CVI(model, AutoCVI(model), None, None if loss is None else loss())
    cvi.step(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TraceEnum_ELBO finds nothing that is enumerated
        found = cvi.loss(cvi.model, cvi.guide, *args)
    assert found == pytest.approx(cvi.evaluate_loss(*args))  # the posterior is exact: no variance


def test_the_loss_attribute_may_be_called_as_that_of_svi():
    """`svi.loss(model, guide, *args)`, as the mixture tutorial does to choose its start."""
    model, args = zoo()["scalars"]
    cvi = CVI(model, AutoCVI(model))
    cvi.step(*args)
    svi = SVI(model, cvi.guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    assert cvi.loss(cvi.model, cvi.guide, *args) == pytest.approx(
        svi.loss(svi.model, svi.guide, *args)
    )


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_loss_changes_neither_state_nor_random_numbers(name):
    model, args, guide, cvi = fitted(name)
    before, store = state(guide), len(pyro.get_param_store())
    plan, rng = guide.plan, torch.get_rng_state()
    first = cvi.evaluate_loss(*args)
    assert cvi.evaluate_loss(*args) == first
    assert torch.equal(torch.get_rng_state(), rng)
    assert same_state(guide, before)
    assert guide.plan is plan
    assert len(pyro.get_param_store()) == store
    with torch.no_grad():
        assert cvi.evaluate_loss(*args) == first


def test_evaluate_loss_before_any_step_is_the_loss_of_the_start():
    model, args = zoo()["scalars"]
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    start = cvi.evaluate_loss(*args)
    assert math.isfinite(start)
    assert not guide.state_dict()
    assert cvi.step(*args) < start


def test_evaluate_loss_of_other_data_is_a_validation_loss():
    model, (x, y), guide, cvi = fitted("scalars")
    before = state(guide)
    held_out = cvi.evaluate_loss(x[:3], y[:3])
    losses = [Trace_ELBO(num_particles=200).loss(model, guide, x[:3], y[:3]) for _ in range(5)]
    assert held_out == pytest.approx(sum(losses) / 5, rel=0.05)
    assert same_state(guide, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_calls_between_steps_leave_the_fit_as_it_is(name):
    model, args = zoo()[name]
    rng, fits = torch.get_rng_state(), []
    for calls in (0, 100):
        torch.set_rng_state(rng)
        guide = AutoCVI(model)
        cvi = CVI(model, guide)
        cvi.step(*args)
        between = torch.get_rng_state()
        for _ in range(calls):
            guide(*args)
        torch.set_rng_state(between)
        losses = [cvi.step(*args) for _ in range(2)]
        fits.append((losses, state(guide)))
    assert fits[0][0] == fits[1][0]
    assert all(torch.equal(v, fits[1][1][k]) for k, v in fits[0][1].items())


@pytest.mark.parametrize("name", NAMES)
def test_two_fits_of_one_seed_are_equal_to_the_bit(name):
    model, args = zoo()[name]
    rng, fits = torch.get_rng_state(), []
    for _ in range(2):
        torch.set_rng_state(rng)
        guide = AutoCVI(model)
        losses = CVI(model, guide).run(*args, num_steps=5).losses
        fits.append((losses, state(guide)))
    assert fits[0][0] == fits[1][0]
    assert all(torch.equal(v, fits[1][1][k]) for k, v in fits[0][1].items())


def test_steps_work_under_no_grad_and_inference_code():
    model, args = zoo()["families"]
    plain = CVI(model, AutoCVI(model)).step(*args)
    with torch.no_grad():
        assert CVI(model, AutoCVI(model)).step(*args) == pytest.approx(plain, rel=1e-12)


def test_keywords_and_positions_are_the_same():
    model, (x, y) = zoo()["scalars"]
    losses = []
    for args, kwargs in [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})]:
        guide = AutoCVI(model)
        cvi = CVI(model, guide)
        losses.append(cvi.step(*args, **kwargs))
        assert cvi.evaluate_loss(*args, **kwargs) == pytest.approx(losses[-1])
        assert set(guide(*args, **kwargs)) == {"a", "b"}
        assert cvi.run(*args, **kwargs, num_steps=1).losses[0] == pytest.approx(losses[-1])
    assert losses[0] == losses[1] == losses[2]


def test_lists_and_dicts_of_arguments_reach_the_model():
    def model(batch, *rest, scale, **options):
        z = pyro.sample("z", dist.Normal(options["loc"], scale))
        for i, y in enumerate([*batch["y"], *rest]):
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y)

    one = torch.tensor(1.0)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    call = ({"y": [one, 2 * one]}, 3 * one), {"scale": 2.0, "loc": 0.5}
    loss = cvi.step(*call[0], **call[1])
    assert float(guide.posterior("z").mean) == pytest.approx((0.125 + 6) / 3.25)
    assert Trace_ELBO().loss(model, guide, *call[0], **call[1]) == pytest.approx(loss)


# --- several models, guides and objects ------------------------------------------------------------


def test_several_objects_over_one_guide_and_unequal_data_share_one_posterior():
    """Supervised and other terms of one model, each with an object of its own."""

    def model(y, noise):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, noise), obs=y)

    guide = AutoCVI(model)
    a, b = CVI(model, guide), CVI(model, guide)
    y = torch.ones(3)
    a.step(y, 1.0)
    assert float(guide.posterior("z").mean) == pytest.approx(3 / 4)
    b.step(torch.ones(8), 0.5)
    assert float(guide.posterior("z").mean) == pytest.approx(32 / 33)
    assert b.evaluate_loss(y, 1.0) == pytest.approx(a.evaluate_loss(y, 1.0))
    a.step(y, 1.0)
    assert float(guide.posterior("z").mean) == pytest.approx(3 / 4)


@pytest.mark.parametrize("local", [False, True])
def test_two_models_in_one_process_with_the_same_names_do_not_meet(local):
    def other(x, y):
        scalars(x, -y)

    with pyro.settings.context(module_local_params=local):
        args = zoo()["scalars"][1]
        first, second = AutoCVI(scalars), AutoCVI(other)
        one, two = CVI(scalars, first), CVI(other, second)
        for _ in range(2):
            one.step(*args)
            two.step(*args)
        assert torch.allclose(first.posterior("a").mean, -second.posterior("a").mean)
        loss = one.evaluate_loss(*args)
        pyro.clear_param_store()
        assert one.evaluate_loss(*args) == loss
        assert one.step(*args) == pytest.approx(loss)


class Shifted(PyroModule):
    """A model with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.shift = PyroParam(torch.tensor(0.0))

    def forward(self, y):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z + self.shift, 1.0), obs=y)


@pytest.mark.parametrize("local", [False, True])
def test_parameters_of_module_models_are_learnt(local):
    with pyro.settings.context(module_local_params=local):
        model = Shifted()
        y = torch.full((6,), 4.0)
        cvi = CVI(model, AutoCVI(model), pyro.optim.Adam({"lr": 0.3}))
        cvi.run(y, num_steps=150)
        assert model.shift.item() == pytest.approx(4.0, abs=0.05)
        assert ("shift" in pyro.get_param_store()) is (not local)
        other = Shifted()
        CVI(other, AutoCVI(other), pyro.optim.Adam({"lr": 0.3})).step(-y)
        assert (abs(other.shift.item()) < 1) is local  # else they share the name, as in Pyro


def test_the_optimiser_gets_the_parameters_as_from_svi():
    seen = []

    def optim_args(name):
        seen.append(name)
        return {"lr": 0.1}

    def model(y):
        loc = pyro.param("loc.of.y", torch.tensor(0.0))
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        z = pyro.sample("z", dist.Normal(loc, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, scale), obs=y)

    y = torch.randn(5)
    cvi = CVI(model, AutoCVI(model), pyro.optim.SGD(optim_args))
    cvi.step(y)
    assert sorted(seen) == ["loc.of.y", "scale"]
    store = pyro.get_param_store()
    for name in store:
        grad = store[name].unconstrained().grad
        assert torch.equal(grad, torch.zeros(()))
    assert set(cvi.optim.get_state()) == {"loc.of.y", "scale"}


# --- minibatches -----------------------------------------------------------------------------------


def streamed(x, y, size):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", size, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def test_unequal_last_minibatches():
    x = torch.randn(50)
    y = 2 * x + torch.randn(50)
    guide = AutoCVI(streamed)
    cvi = CVI(streamed, guide)
    for _ in range(30):
        for batch in torch.randperm(50).split(16):
            assert math.isfinite(cvi.step(x[batch], y[batch], 50))
    exact = float(x @ y) / (1 + float(x @ x))
    sd = (1 + float(x @ x)) ** -0.5
    assert float(guide.posterior("w").mean) == pytest.approx(exact, abs=sd)
    assert float(guide.posterior("w").stddev) == pytest.approx(sd, rel=0.3)


def test_a_data_loader():
    x = torch.randn(40)
    y = -x + 0.5 * torch.randn(40)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=12, shuffle=True
    )
    guide = AutoCVI(streamed)
    cvi = CVI(streamed, guide)
    for _ in range(20):
        total = sum(cvi.step(*batch, 40) for batch in loader)
        assert math.isfinite(total)
    assert float(guide.posterior("w").mean) == pytest.approx(-1.0, abs=0.6)


# --- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_everything_follows_the_default_dtype(name, dtype):
    torch.set_default_dtype(dtype)
    model, args, guide, cvi = fitted(name)
    for value in [*guide.median().values(), *guide.quantiles([0.3]).values()]:
        assert value.dtype in (dtype, torch.long)
    loss = Trace_ELBO(max_plate_nesting=2).loss(model, guide, *args)
    assert math.isfinite(loss)
    copied = copy.deepcopy(guide)
    assert CVI(model, copied).evaluate_loss(*args) == cvi.evaluate_loss(*args)


def test_the_guide_under_a_handler_of_the_user():
    model, args, guide, _ = fitted("scalars")
    with poutine.trace() as trace, poutine.block(hide=["b"]):
        guide(*args)
    assert "a" in trace.trace
    assert "b" not in trace.trace
    fixed = poutine.condition(guide, data={"a": torch.tensor(3.0)})(*args)
    assert float(fixed["a"]) == 3.0
    replayed = poutine.replay(guide, trace=poutine.trace(guide).get_trace(*args))(*args)
    assert set(replayed) == {"a", "b"}
