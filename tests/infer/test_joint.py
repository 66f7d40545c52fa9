"""Sites that meet share one Gaussian where its bound is higher: against dense quadrature and NUTS."""

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

from pyro_cvi import CVI, AutoCVI, explain
from pyro_cvi.errors import CVIError


def product(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(a * b + x, 1.0), obs=y)


def measured(x, y):
    """Measurement error in a covariate: intercept, slope, and the covariates themselves."""
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    with pyro.plate("n", len(x)):
        z = pyro.sample("z", dist.Normal(2.0, 1.5))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)
        pyro.sample("y", dist.Normal(a + b * z, 0.3), obs=y)


def measurements(n=40):
    torch.manual_seed(0)
    z = 1.5 * torch.randn(n) + 2
    return z + 0.5 * torch.randn(n), 1 + 0.8 * z + 0.3 * torch.randn(n)


def slope_moments(x, y):
    """Posterior mean and sd of the slope, with z integrated out: (x, y) is Gaussian given a and b."""
    a = torch.linspace(-1, 3, 241)[:, None]
    b = torch.linspace(0.3, 1.4, 441)[None]
    log_p = -(a**2 + b**2) / 50
    v = torch.tensor(1.5**2)
    for xi, yi in zip(x, y, strict=True):
        mean = torch.stack([torch.full_like(a + b, 2.0), a + 2 * b], -1)
        cov = torch.stack(
            [
                torch.stack([(v + 0.25).expand_as(b), v * b], -1),
                torch.stack([v * b, v * b**2 + 0.09], -1),
            ],
            -2,
        )
        d = torch.stack([xi, yi]) - mean
        log_p = log_p - 0.5 * (d * torch.linalg.solve(cov.expand(len(a), -1, 2, 2), d)).sum(-1)
        log_p = log_p - 0.5 * torch.logdet(cov)
    w = (log_p - log_p.max()).exp()
    w = w / w.sum()
    mean = float((w * b).sum())
    return mean, math.sqrt(float((w * (b - mean) ** 2).sum()))


def fitted(model, *args, **options):
    cvi = CVI(model, AutoCVI(model, **options), seed=0)
    return cvi, cvi.run(*args)


def test_a_slope_beside_the_covariates_it_multiplies_has_its_width():
    x, y = measurements()
    mean, sd = slope_moments(x, y)
    apart, first = fitted(measured, x, y, max_joint_dim=0)
    cvi, result = fitted(measured, x, y)
    q = cvi.guide.posterior("b")
    assert result.converged
    assert result.losses[-1] < first.losses[-1] - 0.2
    assert float(apart.guide.posterior("b").stddev) < 0.85 * sd
    assert float(q.stddev) == pytest.approx(sd, rel=0.1)
    assert abs(float(q.mean) - mean) < 0.1 * sd
    assert len(cvi.guide.plan.blocks) == 1


def test_the_bound_decides():
    """One row of data: two factors of it are as good in blocks of their own."""
    cvi, result = fitted(product, torch.zeros(1), torch.zeros(1))
    assert result.converged
    assert len(cvi.guide.plan.blocks) == (1 if cvi.guide.plan.joint else 2)
    _, apart = fitted(product, torch.zeros(1), torch.zeros(1), max_joint_dim=0)
    assert result.losses[-1] <= apart.losses[-1] + 1e-6


def test_no_site_is_joined_where_the_limit_is_zero():
    x, y = measurements()
    cvi, _ = fitted(measured, x, y, max_joint_dim=0)
    assert not cvi.guide.plan.joint


def test_exact_models_keep_their_families():
    def model(y):
        tau = pyro.sample("tau", dist.Gamma(1.0, 1.0))
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(mu, tau.rsqrt()), obs=y)

    cvi, result = fitted(model, torch.randn(10))
    assert isinstance(cvi.guide.posterior("tau"), dist.Gamma)
    assert result.converged


def test_a_joint_guide_draws_predicts_saves_and_goes_on():
    x, y = measurements(12)
    cvi, result = fitted(measured, x, y)
    assert cvi.guide.plan.joint == {"a", "b", "z"}
    draws = [cvi.guide(x, y) for _ in range(400)]
    b = torch.stack([d["b"] for d in draws])
    q = cvi.guide.posterior("b")
    assert abs(float(b.mean() - q.mean)) < 4 * float(q.stddev) / 20
    assert Predictive(measured, guide=cvi.guide, num_samples=3)(x, None)["y"].shape == (3, 12)

    file = io.BytesIO()
    cvi.save(file)
    file.seek(0)
    again = CVI(measured, AutoCVI(measured), seed=0)
    again.load(file)
    assert again.step(x, y) == cvi.step(x, y)

    loaded = AutoCVI(measured)
    loaded.load_state_dict(cvi.guide.state_dict())
    loaded(x, y)
    other = CVI(measured, loaded, seed=0)
    assert other.evaluate_loss(x, y) == pytest.approx(result.losses[-1], abs=0.1)
    torch.testing.assert_close(loaded.posterior("b").mean, cvi.guide.posterior("b").mean)


def test_new_rows_see_the_joint_posterior_of_what_they_share():
    x, y = measurements(12)
    cvi, _ = fitted(measured, x, y)
    new = cvi.local_posteriors(x[:5], y[:5], plates=["n"])
    near = (new.posterior("z").mean - cvi.guide.posterior("z").mean[:5]).abs()
    assert bool((near < 0.5 * new.posterior("z").stddev).all())
    assert cvi.log_predictive(x[:5], y[:5], plates=["n"], num_samples=20).shape == (5,)


def test_a_site_may_ask_for_it():
    def model(y):
        s = pyro.sample("s", dist.Gamma(2.0, 1.0), infer={"posterior": "joint"})
        m = pyro.sample("m", dist.Normal(0.0, 10.0), infer={"posterior": "joint"})
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(m, s.rsqrt()), obs=y)

    report = explain(model, torch.randn(5))
    (block,) = report.blocks
    assert set(block.sites) == {"s", "m"}
    assert all(e.how != "sampled" for e in report.edges)


def test_a_discrete_site_cannot_ask_for_it():
    def model(y):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer={"posterior": "joint"})
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(CVIError, match="joint"):
        explain(model, torch.tensor(0.0))


def lasso(x, y):
    penalty = pyro.sample("penalty", dist.Gamma(1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.0))
    with pyro.plate("columns", x.shape[1]):
        w = pyro.sample("w", dist.Laplace(0.0, 1.0 / penalty))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def test_a_joint_gaussian_that_is_losing_is_given_up():
    """In float32 its sweeps go to and fro over the kinks of the prior, and never come to rest."""
    torch.manual_seed(0)
    x = torch.randn(60, 12)
    y = x[:, :3] @ torch.tensor([2.0, -1.5, 1.0]) + 0.5 * torch.randn(60)
    apart = CVI(lasso, AutoCVI(lasso, max_joint_dim=0), seed=0).run(x, y)
    cvi = CVI(lasso, AutoCVI(lasso))
    taken, run_once = [], cvi._run_once

    def counted(*args):
        result = run_once(*args)
        taken.append(result.num_steps)
        return result

    cvi._run_once = counted
    result = cvi.run(x, y)
    assert result.converged
    assert result.losses[-1] < apart.losses[-1] + 0.2  # whose last loss is of draws
    assert len(taken) == 2
    assert taken[1] <= 80
