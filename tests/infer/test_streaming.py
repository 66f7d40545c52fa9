"""Posterior as prior: fits of one batch after the other against one fit of all data."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_cvi import CVI, AutoCVI, CVIError, posterior_as_prior

X = torch.linspace(-2.0, 2.0, 24)


def regression(x, y):
    b = pyro.sample("b", dist.Normal(1.0, 2.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.5).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(b + w[0] * x + w[1] * x**2, 0.7), obs=y)


def rates(x, y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 0.5))
    p = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Poisson(rate), obs=y.abs().round())
        pyro.sample("k", dist.Categorical(p), obs=(y.abs().round() % 3).long())


def groups(x, y):
    with pyro.plate("groups", 4):
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        s = pyro.sample("s", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        g = torch.arange(len(x)) % 4
        pyro.sample("y", dist.Normal(a[g] + s[g, 0] * x + s[g, 1] * x**2, 0.7), obs=y)


def log_scale(x, y):
    w = pyro.sample("w", dist.LogNormal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w.log() + b * x, 0.7), obs=y)


def tempered(x, y):
    with poutine.scale(scale=0.1):
        w = pyro.sample("w", dist.Normal(torch.ones(2), 0.5).to_event(1))
        rate = pyro.sample("rate", dist.Gamma(2.0, 3.0))
    with pyro.plate("two", 2), poutine.mask(mask=torch.tensor([True, False])):
        u = pyro.sample("u", dist.Normal(0.0, 0.3))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w[0] + w[1] * x, 0.7), obs=y)
        pyro.sample("v", dist.Normal(u[0] + u[1] * x, 0.7), obs=y)
        pyro.sample("k", dist.Poisson(rate), obs=y.abs().round())


@pytest.mark.parametrize("model", [regression, rates, groups, log_scale, tempered])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_batch_after_the_other_is_all_at_once(model, dtype):
    torch.set_default_dtype(dtype)
    x = X.to(dtype)
    y = 1.0 + x - 0.5 * x**2 + 0.7 * torch.randn(len(x))
    whole = AutoCVI(model)
    CVI(model, whole).run(x, y, tol=1e-12)
    now = model
    for rows in torch.arange(24).split(8):
        guide = AutoCVI(now)
        CVI(now, guide).run(x[rows], y[rows], tol=1e-12)
        now = posterior_as_prior(now, guide)
    exact = 1e-7 if dtype is torch.float64 else 2e-3
    for site in whole.plan.latents:
        p, q = whole.posterior(site), guide.posterior(site)
        torch.testing.assert_close(q.mean, p.mean, rtol=exact, atol=exact)
        torch.testing.assert_close(q.variance, p.variance, rtol=exact, atol=exact)
    sites = [s for s in whole.plan.latents if whole.block_of(s).layout is not None]
    for name in {whole.block_of(s).name for s in sites}:
        own = [s for s in sites if whole.block_of(s).name == name]
        p, q = whole.joint(own), guide.joint(own)
        torch.testing.assert_close(q.covariance_matrix, p.covariance_matrix, rtol=exact, atol=exact)


def test_a_fit_that_is_not_conjugate_stays_near():
    """Logistic regression in four batches, against all rows at once, in posterior deviations."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w[0] + w[1] * x), obs=y)

    x = torch.randn(400)
    y = torch.bernoulli(torch.sigmoid(0.5 + x))
    whole = AutoCVI(model)
    CVI(model, whole).run(x, y)
    now = model
    for rows in torch.arange(400).split(100):
        guide = AutoCVI(now)
        CVI(now, guide).run(x[rows], y[rows])
        now = posterior_as_prior(now, guide)
    p, q = whole.posterior("w"), guide.posterior("w")
    assert float(((q.mean - p.mean) / p.stddev).abs().max()) < 0.1
    torch.testing.assert_close(q.stddev, p.stddev, rtol=0.1, atol=0.0)


def test_the_prior_is_that_of_the_call_and_a_bounded_site_comes_along():
    def model(x, y):
        p = pyro.sample("p", dist.Uniform(-1.0, 1.0))
        s = pyro.sample("s", dist.HalfCauchy(1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(p * x, s), obs=y)

    x = torch.randn(60)
    y = 0.4 * x + 0.5 * torch.randn(60)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.run(x[:30], y[:30])
    assert float(guide.posterior("s").support.lower_bound) == 0.0
    then = posterior_as_prior(model, guide)
    mean = float(guide.posterior("p").mean)
    cvi.run(10 + 0 * x[:30], y[:30])  # goes elsewhere
    again = AutoCVI(then)
    CVI(then, again).run(x[30:31] * 0, y[30:31], num_steps=30)  # says nothing of p
    assert float(again.posterior("p").mean) == pytest.approx(mean, abs=0.02)
    second = AutoCVI(then)
    CVI(then, second).run(x[30:], y[30:])
    whole = AutoCVI(model)
    CVI(model, whole).run(x, y)
    for site in ("p", "s"):
        p, q = whole.posterior(site), second.posterior(site)
        assert float((q.mean - p.mean).abs() / p.stddev) < 0.15
        assert math.isclose(float(q.stddev), float(p.stddev), rel_tol=0.1)


def test_rows_keep_their_prior_and_other_shapes_are_refused():
    def model(x, y, groups=3):
        w = pyro.sample("w", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("groups", groups):
            m = pyro.sample("m", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(x)):
            c = pyro.sample("c", dist.Categorical(w))
            pyro.sample("y", dist.Normal(m[c], 1.0), obs=y)

    y = torch.randn(20) + 4 * (torch.arange(20) % 2)
    guide = AutoCVI(model)
    CVI(model, guide).run(X[:20], y)
    then = posterior_as_prior(model, guide)
    CVI(then, AutoCVI(then)).run(X[:7], y[:7])
    with pytest.raises(CVIError, match="'m'.*those of the fit"):
        CVI(then, AutoCVI(then)).run(X[:7], y[:7], 4)
    with pytest.raises(CVIError, match="no latent site 'z'"):
        posterior_as_prior(model, guide, ["z"])


def test_part_of_a_joint_posterior_and_a_chain_are_refused():
    y = X + torch.randn(len(X))
    guide = AutoCVI(regression)
    CVI(regression, guide).run(X, y)
    with pytest.raises(CVIError, match="joint one with"):
        posterior_as_prior(regression, guide, ["b"])

    def walk(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(len(y)), 0.1).to_event(1))
        pyro.sample("y", dist.Normal(z.cumsum(0), 1.0).to_event(1), obs=y)

    guide = AutoCVI(walk)
    CVI(walk, guide).run(torch.randn(600))
    with pytest.raises(CVIError, match="held as a chain"):
        posterior_as_prior(walk, guide)
