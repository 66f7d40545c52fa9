"""The guide as an AutoGuide: lists, nesting, starts, copies, modules, replay and subsampling."""

import copy
import io
import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract_models import NAMES, fitted, latents_of, scalars, zoo
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoGuideList,
    AutoNormal,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from pyro.infer.reparam import NeuTraReparam
from pyro.nn import PyroModule, PyroSample

from pyro_cvi import CVI, AutoCVI, CVIError


@pytest.fixture
def quiet():
    """Pyro warns that parts of a list lack the sites of the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# --- median and quantiles --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_median_and_quantiles_take_the_arguments_of_the_model_or_none(name):
    model, args, guide, _ = fitted(name)
    median, quantiles = guide.median(), guide.quantiles([0.1, 0.5, 0.9])
    again = guide.median(*args)
    assert all(torch.equal(again[n], v) for n, v in median.items())
    again = guide.quantiles([0.1, 0.5, 0.9], *args)
    assert all(torch.equal(again[n], v) for n, v in quantiles.items())
    for site, node in latents_of(model, args).items():
        assert median[site].shape == node["value"].shape
        assert quantiles[site].shape == (3, *node["value"].shape)
        assert bool(node["fn"].support.check(median[site]).all())
    tensor = guide.quantiles(torch.tensor([0.1, 0.5, 0.9]))
    assert all(torch.allclose(tensor[n].to(v.dtype), v) for n, v in quantiles.items())


def test_quantiles_of_a_transformed_site_are_transformed_quantiles():
    _, _, guide, _ = fitted("families")
    q = guide.posterior("scale")
    found = guide.quantiles([0.1, 0.9])["scale"]
    draws = q.sample((4000,))
    for level, value in zip([0.1, 0.9], found, strict=True):
        share = float((draws < value).double().mean())
        assert share == pytest.approx(level, abs=5 * (0.09 / 4000) ** 0.5)


# --- lists of guides -------------------------------------------------------------------------------


def test_a_list_of_two_parts_by_expose_and_hide(quiet):
    model, args = zoo()["families"]
    guide = AutoGuideList(model)
    guide.append(AutoCVI(poutine.block(model, expose=["p", "rate"])))
    guide.append(AutoCVI(poutine.block(model, hide=["p", "rate"])))
    drawn = guide(*args)
    assert set(drawn) == {"p", "rate", "scale"}
    assert set(guide.median(*args)) == set(drawn)
    assert guide.quantiles([0.2, 0.8], *args)["rate"].shape == (2,)
    trace = poutine.trace(guide).get_trace(*args)
    trace.compute_log_prob()
    assert math.isfinite(float(trace.log_prob_sum()))
    assert math.isfinite(Trace_ELBO(num_particles=3).loss(model, guide, *args))
    draws = Predictive(model, guide=guide, num_samples=4)(*args)
    assert draws["scale"].shape[0] == 4


def test_parts_of_a_list_in_one_plate_share_it(quiet):
    def model(y):
        with pyro.plate("data", len(y)):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            b = pyro.sample("b", dist.Gamma(2.0, 2.0))
            pyro.sample("y", dist.Normal(a, b), obs=y)

    y = torch.randn(5)
    guide = AutoGuideList(model)
    guide.append(AutoCVI(poutine.block(model, expose=["a"])))
    guide.append(AutoCVI(poutine.block(model, expose=["b"])))
    assert {n: v.shape for n, v in guide(y).items()} == {"a": (5,), "b": (5,)}
    trace = poutine.trace(guide).get_trace(y)
    assert trace.nodes["a"]["cond_indep_stack"] == trace.nodes["b"]["cond_indep_stack"]


@pytest.mark.parametrize("kind", ["normal", "diagonal", "delta", "callable"])
def test_a_part_beside_another_guide(kind, quiet):
    model, args = zoo()["families"]

    def by_hand(y, n):
        loc = pyro.param("loc", torch.tensor(0.0))
        return {"scale": pyro.sample("scale", dist.LogNormal(loc, 0.2))}

    guide = AutoGuideList(model)
    guide.append(AutoCVI(poutine.block(model, hide=["scale"])))
    rest = poutine.block(model, expose=["scale"])
    kinds = {"normal": AutoNormal, "diagonal": AutoDiagonalNormal, "delta": AutoDelta}
    guide.append(kinds[kind](rest) if kind in kinds else by_hand)
    assert set(guide(*args)) == {"p", "rate", "scale"}
    median = guide.median(*args)
    assert set(median) >= {"p", "rate"}
    if kind in ("normal", "diagonal"):
        assert guide.quantiles([0.5], *args)["scale"].numel() == 1
    if kind != "diagonal":  # of which Predictive does not know that its latent is auxiliary
        assert Predictive(model, guide=guide, num_samples=3)(*args)["p"].shape[0] == 3
    before = {k: v.clone() for k, v in guide[0].state_dict().items()}
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    assert all(math.isfinite(svi.step(*args)) for _ in range(3))
    assert all(torch.equal(v, before[k]) for k, v in guide[0].state_dict().items())


def test_a_list_within_a_list(quiet):
    model, args = zoo()["families"]
    inner = AutoGuideList(poutine.block(model, hide=["scale"]))
    inner.append(AutoCVI(poutine.block(model, expose=["p"])))
    inner.append(AutoCVI(poutine.block(model, expose=["rate"])))
    guide = AutoGuideList(model)
    guide.append(inner)
    guide.append(AutoCVI(poutine.block(model, expose=["scale"])))
    assert set(guide(*args)) == {"p", "rate", "scale"}
    assert set(guide.median(*args)) == {"p", "rate", "scale"}


def test_the_state_of_a_list_goes_into_another(quiet):
    def new():
        guide = AutoGuideList(model)
        guide.append(AutoCVI(poutine.block(model, expose=["p", "rate"])))
        guide.append(AutoCVI(poutine.block(model, expose=["scale"])))
        return guide

    model, args = zoo()["families"]
    first, second = new(), new()
    first(*args)
    second.load_state_dict(first.state_dict())
    second(*args)
    a, b = first.median(*args), second.median(*args)
    assert all(torch.equal(b[n], v) for n, v in a.items())


class Holder(PyroModule):
    """A guide with a guide inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return {n: 1 * v for n, v in self.inner(*args).items()}


def test_a_guide_inside_of_a_module():
    model, args, inner, cvi = fitted("scalars")
    holder = Holder(AutoCVI(model))
    holder.inner.load_state_dict(inner.state_dict())
    assert set(holder(*args)) == {"a", "b"}
    assert Trace_ELBO().loss(model, holder, *args) == pytest.approx(cvi.evaluate_loss(*args))
    assert {k.split(".")[0] for k in holder.state_dict()} == {"inner"}
    other = Holder(AutoCVI(model))
    other.load_state_dict(holder.state_dict())
    assert torch.equal(other.inner(*args)["a"], other.inner(*args)["a"]) is False
    a, b = holder.inner.median(), other.inner.median()
    assert all(torch.equal(b[n], v) for n, v in a.items())


def test_neutra_takes_the_guide_or_says_why_not():
    """Sampling in the guide's coordinates needs a transform, which only Pyro's AutoContinuous has."""
    _, _, guide, _ = fitted("scalars")
    with pytest.raises(TypeError, match="AutoContinuous"):
        NeuTraReparam(guide)


# --- models of every form --------------------------------------------------------------------------


def test_a_model_without_latents_is_refused_by_guide_and_step():
    def model(y):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    guide = AutoCVI(model)
    with pytest.raises(CVIError, match="no latent sample site"):
        guide(torch.tensor(0.0))
    with pytest.raises(CVIError, match="no latent sample site"):
        CVI(model, guide).step(torch.tensor(0.0))


class Layered(PyroModule):
    """Two layers of which one has priors, and a prior that depends on another."""

    def __init__(self):
        super().__init__()
        self.net = PyroModule[torch.nn.Sequential](PyroModule[torch.nn.Linear](3, 1))
        self.net[0].weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        self.net[0].bias = PyroSample(lambda self: dist.Normal(torch.zeros(1), 2.0).to_event(1))

    def forward(self, x, y=None):
        mean = self.net(x).squeeze(-1)
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def test_dotted_names_everywhere():
    x, model = torch.randn(20, 3), Layered()
    y = x.sum(-1) + 0.5 * torch.randn(20)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    loss = cvi.step(x, y)
    names = {"net.0.weight", "net.0.bias"}
    assert set(guide(x, y)) == set(guide.median()) == names
    assert guide.joint(sorted(names)).event_shape == (4,)
    design = torch.cat([2 * torch.ones(20, 1), x], 1)
    cov = design @ design.mT + 0.25 * torch.eye(20)
    evidence = dist.MultivariateNormal(torch.zeros(20), cov).log_prob(y)
    assert loss == pytest.approx(-float(evidence))
    assert Trace_ELBO().loss(model, guide, x, y) == pytest.approx(loss)
    draws = Predictive(model, guide=guide, num_samples=3)(torch.randn(4, 3))
    assert draws["y"].shape == (3, 4)
    copied = pickle.loads(pickle.dumps(guide))
    assert torch.equal(copied.median()["net.0.bias"], guide.median()["net.0.bias"])


def test_a_sequential_plate_around_data():
    def model(y):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", len(y)):
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y[i])

    y = torch.randn(4)
    guide = AutoCVI(model)
    loss = CVI(model, guide).step(y)
    assert float(guide.posterior("z").mean) == pytest.approx(float(y.sum()) / 5)
    assert Trace_ELBO().loss(model, guide, y) == pytest.approx(loss)


def test_a_sequential_plate_around_latents():
    def model(y):
        for i in pyro.plate("data", len(y)):
            z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y[i])

    y = torch.randn(3)
    guide = AutoCVI(model)
    loss = CVI(model, guide).step(y)
    assert {n: float(v) for n, v in guide.median().items()} == pytest.approx(
        {f"z_{i}": float(y[i]) / 2 for i in range(3)}
    )
    assert Trace_ELBO().loss(model, guide, y) == pytest.approx(loss)


@pytest.mark.parametrize("change", ["more", "fewer", "shape"])
def test_a_model_that_changes_between_calls(change):
    def model(n, size):
        for i in range(n):
            pyro.sample(f"z_{i}", dist.Normal(torch.zeros(size), 1.0).to_event(1))

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    loss = cvi.step(2, 3)
    other = {"more": (3, 3), "fewer": (1, 3), "shape": (2, 4)}[change]
    with pytest.raises(CVIError, match=r"z_[0-2]"):
        cvi.step(*other)
    assert cvi.step(2, 3) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (dist.Poisson(2.0), "Poisson"),
        (dist.Geometric(torch.tensor(0.5)), "Geometric"),
        (dist.ProjectedNormal(torch.ones(3)), "ProjectedNormal"),
        (dist.Delta(torch.tensor(1.0)), "Delta"),
    ],
)
def test_sites_without_a_posterior_family_are_refused_by_name(fn, said):
    def model():
        pyro.sample("z", fn)

    for act in (lambda g: g(), lambda g: CVI(model, g).step()):
        with pytest.raises(CVIError, match=f"'z'.*{said}.*Instead"):
            act(AutoCVI(model))


# --- starts ----------------------------------------------------------------------------------------

INITS = [
    init_to_feasible, init_to_median, init_to_mean, init_to_sample, init_to_uniform,
    init_to_median(num_samples=3), init_to_mean(fallback=init_to_sample),
    init_to_value(values={}), init_to_value(values={}, fallback=init_to_mean),
    lambda site: site["fn"].sample().detach(),
]  # fmt: skip


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("name", ["scalars", "nested", "families", "labels"])
def test_every_strategy_starts_a_fit(init, name):
    model, args = zoo()[name]
    guide = AutoCVI(model, init_loc_fn=init)
    start = {n: v.clone() for n, v in guide(*args).items()}
    for site, node in latents_of(model, args).items():
        assert start[site].shape == node["value"].shape
        assert bool(node["fn"].support.check(guide.median()[site]).all())
    assert math.isfinite(CVI(model, guide).run(*args, num_steps=3).losses[-1])


def test_a_function_of_ones_own_gets_name_and_distribution():
    seen = {}

    def init(site):
        seen[site["name"]] = site["fn"]
        return torch.full(site["fn"].shape(), 0.25)

    model, args = zoo()["nested"]
    guide = AutoCVI(model, init_loc_fn=init)
    guide(*args)
    assert set(seen) == {"top", "mid", "low"}
    assert all(bool((v == 0.25).all()) for v in guide.median().values())


@pytest.mark.parametrize("value", ["0", None, math.inf, torch.tensor(math.nan), torch.zeros(2)])
def test_a_start_that_cannot_be_one_is_refused(value):
    guide = AutoCVI(scalars, init_loc_fn=lambda site: value)
    with pytest.raises(CVIError, match=r"site 'a': init_loc_fn gave a .*shape \(\)"):
        guide(*zoo()["scalars"][1])


def test_the_mean_of_a_law_that_has_none_is_no_start():
    def model(y):
        loc = pyro.sample("loc", dist.Cauchy(0.0, 1.0))
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    y = 3 + torch.randn(20)
    losses = [
        CVI(model, AutoCVI(model, init_loc_fn=init)).run(y).losses[-1]
        for init in (None, init_to_mean)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# --- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["state_dict", "torch", "pickle", "deepcopy"])
def test_a_saved_guide_draws_like_the_original_which_is_as_before(name, how):
    model, args, guide, cvi = fitted(name)
    loss = cvi.evaluate_loss(*args)
    file = io.BytesIO()
    if how == "state_dict":
        torch.save(guide.state_dict(), file)
        file.seek(0)
        other = AutoCVI(model)
        other.load_state_dict(torch.load(file, weights_only=True))
    elif how == "torch":
        torch.save(guide, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = pickle.loads(pickle.dumps(guide)) if how == "pickle" else copy.deepcopy(guide)
    rng = torch.get_rng_state()
    drawn = guide(*args)
    torch.set_rng_state(rng)
    # The first call of a guide that holds nothing but a state analyses its model.
    again = other(*args)
    if how != "state_dict":
        assert all(torch.equal(again[n], v) for n, v in drawn.items())
    assert all(torch.equal(other.median()[n], v) for n, v in guide.median().items())
    assert guide.model is model
    assert cvi.evaluate_loss(*args) == loss
    assert isinstance(other, AutoGuide)
    assert CVI(model, other).evaluate_loss(*args) == pytest.approx(loss, rel=1e-12)


def test_a_cvi_object_is_pickled_with_its_posterior():
    model, args, guide, cvi = fitted("scalars")
    copied = copy.deepcopy(cvi)
    assert copied.evaluate_loss(*args) == cvi.evaluate_loss(*args)
    again = pickle.loads(pickle.dumps(cvi))
    assert again.guide.median().keys() == guide.median().keys()
    assert again.evaluate_loss(*args) == cvi.evaluate_loss(*args)


# --- plates, replay, subsampling -------------------------------------------------------------------


def test_replayed_plates_hold_the_indices_of_the_guide():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=3) as index:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])

    y = torch.randn(9)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for _ in range(6):
        cvi.step(y)
    trace = poutine.trace(guide).get_trace(y)
    replayed = poutine.trace(poutine.replay(model, trace=trace)).get_trace(y)
    index = trace.nodes["data"]["value"]
    assert torch.equal(replayed.nodes["data"]["value"], index)
    assert torch.equal(replayed.nodes["y"]["value"], y[index])
    assert torch.equal(replayed.nodes["z"]["value"], trace.nodes["z"]["value"])
    assert trace.nodes["z"]["scale"] == 3.0
    assert math.isfinite(Trace_ELBO().loss(model, guide, y))


@pytest.mark.parametrize("by_user", [False, True])
def test_local_latents_are_held_for_all_elements(by_user):
    def model(y, index=None):
        plate = pyro.plate(
            "data", len(y), subsample_size=4 if index is None else None, subsample=index
        )
        with plate as i:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[i])

    y = torch.randn(12)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for i in range(3):
        cvi.step(y, *([torch.arange(12).split(4)[i]] if by_user else []))
    assert torch.allclose(guide.posterior("z").mean, y / 2)
    assert guide.median()["z"].shape == (12,)
    if by_user:
        index = torch.tensor([7, 2, 11, 0])
        drawn = torch.stack([guide(y, index)["z"] for _ in range(400)])
        assert torch.allclose(drawn.mean(0), y[index] / 2, atol=0.2)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(3, marks=pytest.mark.xfail(
            strict=True, raises=ValueError,
            reason="a guide whose create_plates subsamples a plate that the model holds whole",
        )),
        6,
    ],
)  # fmt: skip
def test_plates_of_create_plates_subsample_guide_and_model(size):
    y = torch.randn(6)

    def model(y):
        with pyro.plate("data", len(y)) as index:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])

    def create_plates(y):
        return pyro.plate("data", len(y), subsample_size=size)

    guide = AutoCVI(model, create_plates=create_plates)
    cvi = CVI(model, guide)
    cvi.step(y)
    assert guide(y)["z"].shape == (size,)
    assert math.isfinite(Trace_ELBO().loss(model, guide, y))
    assert torch.allclose(guide.posterior("z").mean, y / 2)


def test_slices_in_turn_of_sequences_with_the_same_plate_in_model_and_guide():
    def model(batch, subsample, full_size):
        drift = pyro.sample("drift", dist.Gamma(2.0, 2.0))
        with pyro.plate("data", full_size, subsample=subsample):
            z = torch.zeros(())
            for t in range(len(batch)):
                z = pyro.sample(f"state_{t}", dist.Normal(z, drift.rsqrt()))
                pyro.sample(f"obs_{t}", dist.Bernoulli(logits=z), obs=batch[t])

    def create_plates(batch, subsample, full_size):
        return pyro.plate("data", full_size, subsample=subsample)

    data = torch.bernoulli(torch.full((3, 50), 0.5))
    guide = AutoCVI(model, create_plates=create_plates)
    cvi = CVI(model, guide)
    for _ in range(2):
        for index in torch.arange(50).split(20):
            assert math.isfinite(cvi.step(data[:, index], index, full_size=50))
            drawn = guide(data[:, index], index, full_size=50)
            assert drawn["state_0"].shape == (len(index),)
    median = guide.median()
    assert median["state_2"].shape == (50,)
    assert float(median["drift"]) > 0
    # The state leans to the side of its own datum.
    one = data[2] == 1
    assert bool(median["state_2"][one].mean() > median["state_2"][~one].mean())


def test_global_latents_beside_a_subsampled_plate():
    y = torch.randn(40) + 2

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=10) as index:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[index])

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for _ in range(8):
        cvi.step(y)
    assert float(guide.posterior("mu").mean) == pytest.approx(float(y.sum()) / 41)
    assert float(guide.posterior("mu").variance) == pytest.approx(1 / 41)
    losses = torch.tensor([Trace_ELBO().loss(model, guide, y) for _ in range(100)])
    cov = torch.ones(40, 40) + torch.eye(40)
    evidence = dist.MultivariateNormal(torch.zeros(40), cov).log_prob(y)
    assert abs(float(losses.mean() + evidence)) < 5 * float(losses.std()) / 10


def test_the_inference_of_a_subclass_and_its_name():
    class Mine(AutoCVI):
        """Nothing of its own."""

    model, args = zoo()["scalars"]
    guide = Mine(model)
    assert math.isfinite(CVI(model, guide).step(*args))
    assert set(copy.deepcopy(guide).median()) == {"a", "b"}
    assert isinstance(pickle.loads(pickle.dumps(AutoCVI(scalars))), AutoCVI)
