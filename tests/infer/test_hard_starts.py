"""Fits that begin far from their optimum, or where a prior draw is no start, end at it all the same."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import optimize

from pyro_cvi import CVI, AutoCVI


def poisson(X, y, mean, sd):
    w = pyro.sample("w", dist.Normal(torch.full((3,), mean), sd).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Poisson((X @ w).exp()), obs=y)


def counts(seed):
    torch.manual_seed(seed)
    X = torch.cat([torch.ones(100, 1), torch.randn(100, 2)], 1)
    return X, torch.poisson((X @ torch.tensor([1.0, 0.3, 0.1])).exp())


def bound(X, y, mean, sd, m, V):
    """The bound of N(m, V) in closed form: E exp(x^T w) = exp(x^T m + x^T V x / 2)."""
    prior = dist.MultivariateNormal(torch.full((3,), mean), sd**2 * torch.eye(3))
    eta, var = X @ m, ((X @ V) * X).sum(-1)
    value = (y * eta - (eta + var / 2).exp() - torch.lgamma(y + 1)).sum()
    kl = torch.distributions.kl_divergence(dist.MultivariateNormal(m, V), prior)
    return value - kl


def optimum(X, y, mean, sd):
    """The best N(m, L L^T), by L-BFGS from the truth."""
    rows, cols = torch.tril_indices(3, 3)

    def loss(theta):
        theta = torch.tensor(theta, requires_grad=True)
        tril = torch.zeros(3, 3).index_put((rows, cols), theta[3:])
        value = -bound(X, y, mean, sd, theta[:3], tril @ tril.mT + 1e-12 * torch.eye(3))
        (g,) = torch.autograd.grad(value, theta)
        return float(value.detach()), g.numpy()

    start = torch.cat([torch.tensor([1.0, 0.3, 0.1]), 0.05 * torch.eye(3)[rows, cols]])
    return optimize.minimize(loss, start.numpy(), jac=True, method="L-BFGS-B").fun


FAR = [(10.0, 10.0), (-20.0, 20.0), (30.0, 30.0), (-50.0, 30.0)]


@pytest.mark.parametrize(
    ("mean", "sd", "dtype"),
    # At -50 the rates of the prior are zero in float32: nothing can be checked there.
    [(*f, torch.float64) for f in FAR] + [(*f, torch.float32) for f in FAR[:-1]],
)
def test_a_prior_that_is_far_away(mean, sd, dtype):
    X, y = counts(1)
    wanted = optimum(X, y, mean, sd)
    torch.set_default_dtype(dtype)
    result = CVI(poisson, AutoCVI(poisson)).run(X.to(dtype), y.to(dtype), mean, sd)
    assert result.converged
    assert result.losses[-1] == pytest.approx(wanted, abs=0.02)


def survival(X, t, censored, shape_prior):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    k = pyro.sample("k", shape_prior)
    scale = torch.exp(b + X @ w)
    with pyro.plate("n", len(X)):
        z = (t / scale) ** k
        seen = torch.log(k / scale) + (k - 1) * torch.log(t / scale) - z
        pyro.factor("lik", torch.where(censored, -z, seen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "prior", [dist.HalfNormal(3.0), dist.LogNormal(0.0, 0.5), dist.Gamma(2.0, 1.0)]
)
def test_censored_weibull_regression(prior, dtype):
    torch.manual_seed(0)
    X = torch.randn(200, 2)
    t = dist.Weibull(
        torch.exp(1.0 + X @ torch.tensor([0.5, -0.3])), torch.full((200,), 1.7)
    ).sample()
    end = 6 * torch.rand(200)
    torch.set_default_dtype(dtype)
    args = X.to(dtype), torch.minimum(t, end).to(dtype), t > end, prior
    found = []
    for seed in range(2):
        cvi = CVI(survival, AutoCVI(survival), seed=seed)
        assert cvi.run(*args).converged
        found.append(cvi.guide.median()["k"].item())
        assert cvi.guide.median()["b"].item() == pytest.approx(1.0, abs=0.2)
    assert found[0] == pytest.approx(1.7, abs=0.25)
    assert found[1] == pytest.approx(found[0], abs=0.02)


def inflated(X, y):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    with pyro.plate("n", len(X)):
        pyro.sample("y", dist.ZeroInflatedPoisson((b + X @ w).exp(), gate=gate), obs=y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_inflated_counts(dtype):
    torch.manual_seed(0)
    X = torch.randn(400, 3)
    rate = torch.exp(0.5 + X @ torch.tensor([0.4, -0.3, 0.2]))
    y = torch.poisson(rate) * (torch.rand(400) > 0.35)
    torch.set_default_dtype(dtype)
    losses = []
    for seed in range(3):
        pyro.set_rng_seed(seed)
        cvi = CVI(inflated, AutoCVI(inflated))
        result = cvi.run(X.to(dtype), y.to(dtype))
        assert result.converged
        losses.append(result.losses[-1])
        q = cvi.guide.posterior("w")
        off = (q.mean - torch.tensor([0.4, -0.3, 0.2], dtype=dtype)) / q.stddev
        assert float(off.abs().max()) < 3.5
    assert max(losses) - min(losses) < 0.05


def test_a_latent_kernel_whose_matrix_is_singular_at_some_points():
    """Points at which a Cholesky factorisation fails count as a density of zero."""
    x = torch.linspace(-1, 1, 8)

    def model(y):
        r = pyro.sample("r", dist.LogNormal(0.0, 1.5))
        cov = torch.exp(-((x[:, None] - x) ** 2) / r**2) + 1e-9 * torch.eye(8)
        f = torch.linalg.cholesky(cov) @ pyro.sample(
            "e", dist.Normal(torch.zeros(8), 1.0).to_event(1)
        )
        with pyro.plate("n", 8):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    cvi = CVI(model, AutoCVI(model), seed=0)
    result = cvi.run(torch.sin(3 * x))
    assert result.converged
    assert result.losses[-1] < 10
