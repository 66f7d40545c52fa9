"""`converged` is a promise: a further run gains nothing and moves nothing. What is not, is said."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import optimize

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import ConvergenceWarning


def linear(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), 10.0).to_event(1))
    s = pyro.sample("s", dist.HalfCauchy(x.new_tensor(1.0)))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def conjugate(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), 10.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(x.new_tensor(1.0), x.new_tensor(1.0)))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)


def poisson(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), 5.0).to_event(1))
    with pyro.plate("n", len(x)):
        pyro.sample("k", dist.Poisson((x @ w).exp()), obs=(2 * y).abs().round())


def dispersed(x, y):
    """A dispersion beside a regression: its Gamma prior gives way to the unconstrained scale."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), 2.0).to_event(1))
    r = pyro.sample("r", dist.Gamma(x.new_tensor(2.0), x.new_tensor(1.0)))
    with pyro.plate("n", len(x)):
        law = dist.GammaPoisson(r, r / (x @ w).exp())
        pyro.sample("k", law, obs=(2 * y).abs().round())


def varying(x, y):
    g = torch.arange(len(x)) % 5
    m = pyro.sample("m", dist.Normal(x.new_tensor(0.0), 5.0))
    t = pyro.sample("t", dist.HalfNormal(x.new_tensor(2.0)))
    with pyro.plate("g", 5):
        a = pyro.sample("a", dist.Normal(m, t))
    s = pyro.sample("s", dist.HalfNormal(x.new_tensor(2.0)))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(a[g] + x[:, 1], s), obs=y)


def mixture(x, y):
    p = pyro.sample("p", dist.Dirichlet(x.new_ones(2)))
    with pyro.plate("k", 2):
        mu = pyro.sample("mu", dist.Normal(x.new_tensor(0.0), 5.0))
        tau = pyro.sample("tau", dist.Gamma(x.new_tensor(2.0), x.new_tensor(1.0)))
    with pyro.plate("n", len(y)):
        z = pyro.sample("z", dist.Categorical(p))
        pyro.sample("y", dist.Normal(mu[z], tau[z].rsqrt()), obs=y)


def factors(x, y):
    """Sites that multiply each other: blocks that creep against each other."""
    with pyro.plate("d", 3):
        a = pyro.sample("a", dist.Normal(x.new_tensor(0.0), 1.0))
    b = pyro.sample("b", dist.Normal(x.new_tensor(0.0), 1.0))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(b * (x @ a), 0.5), obs=y)


def wave(x, y):
    """A frequency, an amplitude and a noise: averaged over points."""
    f = pyro.sample("f", dist.LogNormal(x.new_tensor(0.0), 0.3))
    a = pyro.sample("a", dist.HalfNormal(x.new_tensor(2.0)))
    s = pyro.sample("s", dist.HalfCauchy(x.new_tensor(1.0)))
    with pyro.plate("n", len(x)):
        pyro.sample("y", dist.Normal(a * torch.sin(f * x[:, 1]) + x[:, 2], s), obs=y)


MODELS = [linear, conjugate, poisson, dispersed, varying, mixture, factors, wave]


def data(dtype):
    g = torch.Generator().manual_seed(4)
    x = torch.cat([torch.ones(60, 1), torch.randn(60, 2, generator=g, dtype=torch.float64)], 1)
    y = x @ torch.tensor([0.5, 1.0, -0.7], dtype=torch.float64)
    y = y + 0.5 * torch.randn(60, generator=g, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def moments(cvi):
    """Mean and sd of all scalars that the blocks hold, on their unconstrained scale."""
    found = []
    for b in cvi.guide.plan.blocks:
        belief = cvi.guide.belief(b)
        if b.layout is not None:
            found.append(torch.stack([m.reshape(-1).double() for m in belief.marginals()]))
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", MODELS)
def test_a_further_run_gains_nothing_and_moves_nothing(model, dtype):
    torch.set_default_dtype(dtype)
    args = data(dtype)
    cvi = CVI(model, AutoCVI(model), seed=1)
    result = cvi.run(*args)
    assert result.converged, result.reason
    before, blocks = moments(cvi), len(cvi.guide.plan.blocks)
    further = cvi.run(*args, tol=1e-12, num_steps=200)
    after = moments(cvi)
    assert len(cvi.guide.plan.blocks) == blocks
    assert result.losses[-1] - min(further.losses) < 0.02
    assert float(((after[0] - before[0]).abs() / before[1].sqrt()).max()) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_the_same_optimum_from_every_seed(seed):
    x, y = data(torch.float64)
    found = CVI(wave, AutoCVI(wave), seed=seed).run(x, y)
    assert found.converged
    assert found.losses[-1] == pytest.approx(
        CVI(wave, AutoCVI(wave), seed=7).run(x, y).losses[-1], abs=0.05
    )


def test_a_dispersion_beside_a_regression_is_at_the_optimum_of_its_bound():
    """Against a direct optimisation over (m, L) of the bound by 40,000 draws of numpy's."""
    x, y = data(torch.float64)
    k = (2 * y).abs().round()
    cvi = CVI(dispersed, AutoCVI(dispersed), seed=0)
    result = cvi.run(x, y)
    u = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    u = torch.cat([u, -u])

    def loss(theta):
        theta = torch.tensor(theta, requires_grad=True)
        m, tril = theta[:4], torch.zeros(4, 4)
        rows, cols = torch.tril_indices(4, 4)
        tril = torch.zeros(4, 4).index_put((rows, cols), theta[4:])
        z = m + u @ tril.mT
        w, r = z[:, :3], z[:, 3].exp()
        rate = (w @ x.mT).exp()
        log_p = dist.GammaPoisson(r[:, None], r[:, None] / rate).log_prob(k).sum(-1)
        log_p = log_p + dist.Normal(0.0, 2.0).log_prob(w).sum(-1)
        log_p = log_p + dist.Gamma(2.0, 1.0).log_prob(r) + z[:, 3]
        entropy = tril.diagonal().abs().log().sum() + 2 * (1 + math.log(2 * math.pi))
        value = -(log_p.mean() + entropy)
        (g,) = torch.autograd.grad(value, theta)
        return float(value.detach()), g.numpy()

    q = cvi.guide.joint(["w", "r"])
    rows, cols = torch.tril_indices(4, 4)
    start = torch.cat([q.mean, torch.linalg.cholesky(q.covariance_matrix)[rows, cols]])
    start = start + 0.05 * torch.randn(len(start), generator=torch.Generator().manual_seed(1))
    best = optimize.minimize(loss, start.detach().numpy(), jac=True, method="L-BFGS-B")
    assert result.losses[-1] == pytest.approx(best.fun, abs=0.03)
    apart = (torch.tensor(best.x[:4]) - q.mean) / q.covariance_matrix.diagonal().sqrt()
    assert float(apart.abs().max()) < 0.03


def test_a_run_that_ends_early_says_what_is_left():
    args = data(torch.float64)
    cvi = CVI(linear, AutoCVI(linear))
    with pytest.warns(ConvergenceWarning, match="gained .* nats"):
        result = cvi.run(*args, num_steps=3)
    assert not result.converged
    assert "after 3 steps" in result.reason
    assert result.left > 0


def test_a_run_that_is_not_told_how_many_steps_goes_on_while_it_gains():
    """Two components on top of each other part slowly."""
    torch.manual_seed(1)
    y = torch.cat([torch.randn(500) - 1.2, torch.randn(500) + 1.2])
    result = CVI(mixture, AutoCVI(mixture), seed=1).run(y, y)
    assert result.converged


def test_restarts_that_end_apart_are_said():
    def two_peaks(x):  # beside a discrete site, where starts are not scouted
        z = pyro.sample("z", dist.Normal(0.0, 3.0))
        wide = pyro.sample("wide", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(torch.sin(3 * z) + 0.3 * z, 0.05 + 0.01 * wide), obs=x)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cvi = CVI(two_peaks, AutoCVI(two_peaks), seed=0)
        result = cvi.run(torch.tensor(1.0), num_restarts=8)
    different = max(result.restarts) - min(result.restarts) > 1.0
    apart = sorted(result.restarts)[1] - sorted(result.restarts)[0] > 1.0
    assert different
    assert apart == any("starts ended at" in str(w.message) for w in said)
    assert result.losses[-1] == pytest.approx(min(result.restarts))


def test_losses_of_sampled_fits_carry_a_standard_error():
    x, y = data(torch.float64)
    result = CVI(wave, AutoCVI(wave, max_joint_dim=0), seed=0).run(x, y, num_steps=8)
    assert len(result.errors) == len(result.losses) == 8
    assert all(e > 0 for e in result.errors)
    assert all(e == 0 for e in CVI(linear, AutoCVI(linear)).run(x, y).errors)


def test_the_loss_over_points_is_not_better_than_other_points_find_it():
    x, y = data(torch.float64)
    cvi = CVI(wave, AutoCVI(wave), seed=0)
    result = cvi.run(x, y)
    draws = torch.tensor([float(cvi.loss(wave, cvi.guide, x, y)) for _ in range(600)])
    error = float(draws.std()) / math.sqrt(len(draws))
    assert float(draws.mean()) < result.losses[-1] + 4 * error + result.errors[-1]
    assert result.losses[-1] < float(draws.mean()) + 4 * error + 0.05
