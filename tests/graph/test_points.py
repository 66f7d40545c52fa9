"""Where models first run, before anything is known of their posterior: on no draw of the prior."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_value

from pyro_cvi import CVI, AutoCVI, CVIError
from pyro_cvi.graph.check import factor_values
from pyro_cvi.graph.points import check_run, first_run
from pyro_cvi.graph.symbolic import Call, describe_latents

TRUE = (0.5, 0.03, -0.02)


def covariates(n=60):
    return torch.cat([torch.ones(n, 1), 10 * torch.randn(n, 2)], 1)


def exponential(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 10.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Exponential((x @ w).exp()), obs=y)


def best_gaussian(x, y):
    """The largest bound of a Gaussian posterior: E log p(y | f) = E f - y exp(E f + Var f / 2)."""
    loc = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    root = (0.01 * torch.eye(3, dtype=torch.float64)).requires_grad_()
    x, y = x.double(), y.double()

    def loss():
        tril = root.tril()
        mean, variance = x @ loc, (x @ tril).square().sum(-1)
        likelihood = (mean - y * (mean + variance / 2).exp()).sum()
        q = dist.MultivariateNormal(loc, scale_tril=tril.tril(-1) + tril.diagonal().abs().diag())
        prior = dist.Normal(torch.zeros(3).double(), 10.0).to_event(1)
        return torch.distributions.kl_divergence(q, prior_as_mvn(prior)) - likelihood

    optimiser = torch.optim.LBFGS([loc, root], max_iter=500, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(5):
        optimiser.step(closure)
    return float(loss().detach())


def prior_as_mvn(prior):
    return torch.distributions.MultivariateNormal(prior.mean, torch.diag(prior.variance))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_prior_that_overflows_is_no_reason_to_refuse(seed, dtype):
    torch.set_default_dtype(dtype)
    pyro.set_rng_seed(seed)
    x = covariates()
    y = dist.Exponential((x @ torch.tensor(TRUE)).exp()).sample()
    result = CVI(exponential, AutoCVI(exponential)).run(x, y)
    assert result.losses[-1] == pytest.approx(best_gaussian(x, y), abs=0.05)


SCALES = {
    "wide": dist.Normal(0.0, 1e3),
    "half_cauchy": dist.HalfCauchy(1e6),
    "far_below": dist.LogNormal(-20.0, 5.0),
    "improper": dist.ImproperUniform(dist.constraints.positive, (), ()),
    "vague": dist.Gamma(1e-3, 1e-3),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_prior_of_huge_scale_is_no_reason_to_refuse(name):
    def model(y):
        s = pyro.sample("s", SCALES[name])
        with pyro.plate("rows", len(y)):
            rate = s.exp() if name == "wide" else s
            pyro.sample("y", dist.Poisson(rate), obs=y)

    y = torch.tensor([2.0, 3.0, 1.0, 4.0])
    guide = AutoCVI(model)
    assert math.isfinite(CVI(model, guide).run(y, num_steps=30).losses[-1])
    s = guide.median()["s"]
    rate = float(s.exp() if name == "wide" else s)
    assert 1.0 < rate < 4.5


def seen_values(model, guide, *args):
    """The values of z in every plain run, in their order."""
    seen = []

    def spied():
        z = model(*args)
        if type(z) is torch.Tensor:
            seen.append(float(z))

    CVI(spied, AutoCVI(spied, init_loc_fn=guide)).step()
    return seen


def test_init_loc_fn_is_honoured_from_the_first_run_on():
    """At a draw from the prior the scale is zero or infinite."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1e4))
        scale = (z - 7000).exp()
        pyro.sample("y", dist.Normal(0.0, scale), obs=torch.tensor(1.5))
        return z

    seen = seen_values(model, init_to_value(values={"z": torch.tensor(7001.0)}))
    assert seen[0] == 7001.0


def test_a_site_of_the_real_line_is_placed_in_the_first_run_too():
    def model():
        z = pyro.sample("z", dist.HalfCauchy(1e-30))
        pyro.sample("y", dist.Normal(0.0, z * 1e-10), obs=torch.tensor(1.5))
        return z

    assert seen_values(model, lambda site: torch.tensor(2.5))[0] == pytest.approx(2.5)


def test_a_wrong_init_loc_fn_is_an_error_of_its_own():
    def model():
        pyro.sample("z", dist.Gamma(1.0, 1.0))

    for bad in (torch.tensor(-1.0), torch.zeros(3), "here"):
        with pytest.raises(CVIError, match="init_loc_fn gave"):
            CVI(model, AutoCVI(model, init_loc_fn=lambda site, bad=bad: bad)).step()


def test_what_is_wrong_at_any_point_is_said_with_its_cause():
    def scale():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, torch.tensor(-1.0)), obs=torch.tensor(0.0))

    def data():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Poisson(z.exp()), obs=torch.tensor(-3.0))

    for model, match in ((scale, r"'z'.*scale.*invalid.*-1"), (data, r"'y'.*support.*-3.*data in")):
        with pytest.raises(ValueError, match=match):
            CVI(model, AutoCVI(model)).step()


def test_a_self_check_is_done_where_densities_have_digits():
    torch.set_default_dtype(torch.float32)
    for seed in range(5):
        pyro.set_rng_seed(seed)
        x = covariates()
        args = (x, dist.Exponential((x @ torch.tensor(TRUE)).exp()).sample())
        trace = first_run(exponential, args, {})
        assert all(bool(v.isfinite().all()) for v in factor_values(trace).values())
        latents, nesting = describe_latents(trace)
        call = Call(exponential, args, {}, latents, nesting, {})
        run, values = check_run(call, trace.is_drawn)
        assert all(bool((v.abs() < 1e8).all()) for v in values.values())
        assert float(run.nodes["w"]["value"].abs().max()) > 1e-6  # and not at the middle itself


def test_ordinary_models_are_traced_at_a_draw_from_the_prior():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(1.0))

    pyro.set_rng_seed(5)
    expected = torch.randn(())
    pyro.set_rng_seed(5)
    trace = first_run(model, (), {})
    assert trace.is_drawn
    assert float(trace.nodes["z"]["value"]) == float(expected)
