"""Bad input gets an early, clear error that names the site and leaves the fitted state as it was."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import JitTrace_ELBO, RenyiELBO, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_cvi import CVI, AutoCVI, CVIError, explain


def regression(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def data(n=20):
    return torch.randn(n, 2), torch.randint(0, 2, (n,)).to(torch.get_default_dtype())


def new(model):
    return CVI(model, AutoCVI(model))


def test_a_model_without_latents():
    with pytest.raises(CVIError, match="no latent sample site"):
        explain(lambda: pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0)))


def test_a_latent_without_any_factor():
    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0).mask(False))

    with pytest.raises(CVIError, match="'z'.*no factor depends on it"):
        explain(model)


def test_a_latent_whose_value_is_fixed_by_another_handler():
    guide = AutoCVI(regression)
    args = data()
    CVI(regression, guide).step(*args)
    conditioned = pyro.poutine.condition(regression, data={"w": torch.zeros(2)})
    with pytest.raises(CVIError, match="latent sites changed|no latent"):
        CVI(conditioned, guide).step(*args)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_data_that_are_not_finite(bad):
    def model(y):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    with pyro.validation_enabled(False), pytest.raises(CVIError, match="'y'.*1 of 3.*NaN or inf"):
        new(model).step(torch.tensor([1.0, bad, 2.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_covariates_that_are_not_finite_leave_the_state_alone(bad):
    x, y = data()
    guide = AutoCVI(regression)
    cvi = CVI(regression, guide)
    cvi.step(x, y)
    before = {k: v.clone() for k, v in guide.named_buffers()}
    broken = x.clone()
    broken[3, 1] = bad
    with pyro.validation_enabled(False), pytest.raises(CVIError, match="not finite|NaN"):
        cvi.step(broken, y)
    assert all(torch.equal(before[k], v) for k, v in guide.named_buffers())
    good = cvi.step(x, y)
    assert math.isfinite(good)


def test_a_mix_of_dtypes_says_where_and_what_to_do():
    x, y = data()
    with pytest.raises(CVIError, match="at or after site 'w'.*dtype.*convert the data") as caught:
        new(regression).step(x.float(), y)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_shapes_that_do_not_broadcast():
    x, _ = data()
    with pytest.raises(CVIError, match="after site 'y'.*broadcast.*compare the shapes"):
        new(regression).step(x, torch.zeros(7))


def test_a_plate_missing_around_batched_data():
    def model(y):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    with pytest.raises(CVIError, match=r"'y'.*\(5,\).*no plate.*pyro.plate"):
        new(model).step(torch.zeros(5))


def test_sites_that_change_between_calls():
    def model(extra):
        pyro.sample("a", dist.Normal(0.0, 1.0))
        if extra:
            pyro.sample("b", dist.Normal(0.0, 1.0))

    cvi = new(model)
    cvi.step(False)
    before = cvi.guide.posterior("a").loc.clone()
    with pytest.raises(CVIError, match=r"changed between calls.*new: \['b'\]"):
        cvi.step(True)
    assert torch.equal(before, cvi.guide.posterior("a").loc)


def test_local_latents_of_another_size():
    def model(y):
        with pyro.plate("data", len(y)):
            m = pyro.sample("m", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    cvi = new(model)
    cvi.step(torch.zeros(3))
    with pytest.raises(CVIError, match=r"'m'.*\(4,\).*\(3,\)"):
        cvi.step(torch.zeros(4))


@pytest.mark.parametrize("loss", [RenyiELBO(alpha=0.5), JitTrace_ELBO()])
def test_an_unsupported_loss(loss):
    with pytest.raises(CVIError, match=f"loss is {type(loss).__name__}"):
        CVI(regression, AutoCVI(regression), loss=loss)


@pytest.mark.parametrize("loss", [None, Trace_ELBO(), TraceEnum_ELBO()])
def test_a_supported_loss(loss):
    cvi = CVI(regression, AutoCVI(regression), None, loss)
    x, y = data()
    assert cvi.step(x, y) == pytest.approx(cvi.evaluate_loss(x, y))
    if not isinstance(loss, TraceEnum_ELBO):  # which warns that nothing is enumerated
        assert math.isfinite(cvi.loss(regression, cvi.guide, x, y))


def test_a_plain_torch_optimiser():
    p = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CVIError, match="optim is a Adam.*pyro.optim"):
        CVI(regression, AutoCVI(regression), optim=torch.optim.Adam([p]))


def test_another_guide():
    with pytest.raises(CVIError, match="guide is a AutoNormal.*AutoCVI"):
        CVI(regression, AutoNormal(regression))


def test_step_without_the_models_arguments():
    with pytest.raises(TypeError):
        new(regression).step()
    with pytest.raises(TypeError):
        new(regression).run()


def test_asking_for_the_posterior_before_data():
    guide = AutoCVI(regression)
    for ask in (lambda: guide.posterior("w"), guide.median, lambda: guide.quantiles([0.5])):
        with pytest.raises(CVIError, match="before the guide has seen data.*cvi.step"):
            ask()


def test_asking_for_a_site_that_is_not_there():
    cvi = new(regression)
    cvi.step(*data())
    with pytest.raises(CVIError, match=r"'v'.*no such latent.*\['w'\]"):
        cvi.guide.posterior("v")


def test_a_model_that_raises_leaves_the_state_alone():
    x, y = data()
    fail = []

    def model(x, y):
        regression(x, y)
        if fail:
            raise KeyError("from the model")

    cvi = new(model)
    cvi.step(x, y)
    before = cvi.guide.posterior("w").loc.clone()
    fail.append(True)
    with pytest.raises(KeyError, match="from the model"):
        cvi.step(x, y)
    fail.clear()
    assert torch.equal(before, cvi.guide.posterior("w").loc)
    assert math.isfinite(cvi.step(x, y))


def test_a_discrete_latent_with_infinite_support():
    def model():
        n = pyro.sample("n", dist.Poisson(3.0))
        pyro.sample("y", dist.Normal(n, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(CVIError, match="'n'.*Poisson prior.*marginalise"):
        explain(model)


def test_elements_of_a_subsampled_plate_that_a_factor_joins():
    def model(y):
        with pyro.plate("data", 10, subsample_size=5):
            m = pyro.sample("m", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(m.sum(), 1.0), obs=y.sum())

    with pytest.raises(CVIError, match="'m'.*different elements of the subsampled plate 'data'"):
        new(model).step(torch.zeros(10))


def test_parameters_without_an_optimiser():
    def model():
        s = pyro.param("s", torch.tensor(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z + s, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(CVIError, match="pyro.param.*optim=pyro.optim.Adam"):
        new(model).step()


@pytest.mark.parametrize("kwargs", [{"max_dense_dim": 0}, {"max_dense_dim": 2.5}])
def test_bad_options_of_the_guide(kwargs):
    with pytest.raises(CVIError, match=next(iter(kwargs))):
        AutoCVI(regression, **kwargs)


@pytest.mark.parametrize("kwargs", [{"num_samples": 1}, {"fisher": "exact"}, {"seed": 0.5}])
def test_bad_options_of_sampling(kwargs):
    with pytest.raises(CVIError, match=next(iter(kwargs))):
        CVI(regression, AutoCVI(regression), **kwargs)


def test_an_improper_posterior():
    def model(y):
        m = pyro.sample("m", dist.Normal(0.0, 1.0).mask(False))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).mask(False))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m + b, 1.0), obs=y)

    with pytest.raises(CVIError, match="improper.*proper prior"):
        new(model).step(torch.zeros(3))


def test_an_error_has_four_fields_and_can_be_pickled() -> None:
    error = CVIError("site 'z'", "shape (3,)", "shape (2,)", "z.reshape(2)")
    assert (error.where, error.found) == ("site 'z'", "shape (3,)")
    assert (error.expected, error.instead) == ("shape (2,)", "z.reshape(2)")
    said = "site 'z': shape (3,). Expected: shape (2,). Instead: z.reshape(2)."
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == said
    assert str(CVIError("a sentence")) == "a sentence"
