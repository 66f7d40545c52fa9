"""Draws of posteriors averaged over hyperparameters, beside closed forms and dense algebra on grids."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import special, stats

from pyro_cvi import CVI, AutoCVI, CVIWarning, conditioned, integrate


def fitted(model, *args, **kwargs):
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(*args, **kwargs)
    return cvi


def drawn(posterior, count, *args):
    """Draws of every site, (count, scalars)."""
    with torch.no_grad(), pyro.plate("draws", count, dim=-4):
        values = posterior(*args)
    return {s: x.reshape(count, -1).double().numpy() for s, x in values.items()}


def check_moments(x, mean, sd, count, slack=0.0):
    """Mean and standard deviation of draws, by five standard errors of them and `slack` deviations."""
    close = 5 / math.sqrt(count) + slack
    assert np.abs((x.mean(0) - mean) / sd).max() < close
    assert np.abs(x.std(0) / sd - 1).max() < close


# --- a normal sample of unknown mean and precision: all in closed form -------------------------------

N, SUM, SQUARES = 6, 6.2, 11.64
"""Size, sum and sum of squares of the data."""
KAPPA, SHAPE, RATE = 0.3, 1.5, 1.0


def normal_gamma(y):
    tau = pyro.sample("tau", dist.Gamma(SHAPE, RATE))
    mu = pyro.sample("mu", dist.Normal(0.0, (KAPPA * tau) ** -0.5))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu, tau**-0.5), obs=y)


def data():
    y = torch.tensor([1.2, 0.3, 2.5, 1.7, -0.4, 0.9])
    assert abs(float(y.sum()) - SUM) < 1e-5 and abs(float(y.square().sum()) - SQUARES) < 1e-5
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mean_and_precision_of_a_normal_sample(dtype):
    torch.set_default_dtype(dtype)
    posterior = integrate(fitted(normal_gamma, data()), "tau", data())
    k, a = KAPPA + N, SHAPE + N / 2
    m = SUM / k
    b = RATE + 0.5 * (SQUARES - SUM**2 / N) + 0.5 * KAPPA * N * (SUM / N) ** 2 / k
    student = stats.t(2 * a, m, math.sqrt(b / (a * k)))
    count = 40_000
    x = drawn(posterior, count, data())
    tau, mu = x["tau"][:, 0], x["mu"][:, 0]
    check_moments(mu, student.mean(), student.std(), count, 2e-3)
    check_moments(tau, a / b, math.sqrt(a) / b, count, 2e-3)
    # mu sqrt(tau) given tau is N(m sqrt(tau), 1 / k).
    root = math.exp(special.gammaln(a + 0.5) - special.gammaln(a)) / math.sqrt(b)
    variance = 1 / k + m**2 * (a / b - root**2)
    check_moments(mu * np.sqrt(tau), m * root, math.sqrt(variance), count, 2e-3)
    # Deviations in units of their own scale are standard normal, and tell nothing of tau.
    z = (mu - m) * np.sqrt(k * tau)
    check_moments(z, 0.0, 1.0, count, 2e-3)
    assert abs(np.corrcoef(z**2, tau)[0, 1]) < 0.03
    levels = [0.01, 0.05, 0.5, 0.95, 0.99]
    for q, found in zip(levels, posterior.quantiles(levels)["mu"], strict=True):
        assert abs(float(found) - student.ppf(q)) < 0.01 * student.std()
        assert abs((mu < float(found)).mean() - q) < 5 * math.sqrt(q * (1 - q) / count)
    evidence = special.gammaln(a) - special.gammaln(SHAPE) + SHAPE * math.log(RATE)
    evidence += -a * math.log(b) + 0.5 * math.log(KAPPA / k) - N / 2 * math.log(2 * math.pi)
    assert abs(posterior.log_evidence - evidence) < 1e-3


def test_a_cvi_that_was_not_run_is_run_in_a_copy():
    cvi = CVI(normal_gamma, AutoCVI(normal_gamma), seed=0)
    posterior = integrate(cvi, "tau", data())
    assert not cvi.guide.is_fitted
    again = integrate(fitted(normal_gamma, data()), "tau", data())
    assert abs(posterior.log_evidence - again.log_evidence) < 1e-4


def test_nothing_is_latent_beside_the_hyperparameters():
    posterior = integrate(fitted(normal_gamma, data()), ["mu", "tau"], data())
    k, a = KAPPA + N, SHAPE + N / 2
    m = SUM / k
    b = RATE + 0.5 * (SQUARES - SUM**2 / N) + 0.5 * KAPPA * N * (SUM / N) ** 2 / k
    sd = math.sqrt(b / ((a - 1) * k))
    x = drawn(posterior, 20_000, data())
    check_moments(x["mu"][:, 0], m, sd, 20_000, 5e-3)
    check_moments(x["tau"][:, 0], a / b, math.sqrt(a) / b, 20_000, 5e-3)
    assert abs(float(posterior.posterior("mu").mean) - m) < 0.015 * sd


# --- functions of hyperparameters and of what turns with them ------------------------------------------


def test_a_whitened_process_is_not_too_wide():
    """f = L(length) z: given the length both are Gaussian."""
    t = torch.linspace(0.0, 4.0, 12)

    def factor(length):
        kernel = torch.exp(-0.5 * ((t[:, None] - t) / length[..., None, None]) ** 2)
        return torch.linalg.cholesky(kernel + 1e-8 * torch.eye(len(t)))

    def model(y):
        length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([len(t)]).to_event(1))
        with pyro.plate("rows", len(t)):
            pyro.sample("y", dist.Normal(factor(length) @ z, 0.3), obs=y)

    y = t.sin() + 0.3 * torch.randn(len(t))
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(y, num_steps=2)
    posterior = integrate(cvi, "length", y)
    grid = torch.linspace(-2.5, 2.0, 301).exp()
    kernels = factor(grid) @ factor(grid).mT
    noisy = kernels + 0.09 * torch.eye(len(t))
    logs = dist.MultivariateNormal(torch.zeros(len(t)), noisy).log_prob(y)
    w = (logs + dist.LogNormal(0.0, 0.5).log_prob(grid) + grid.log()).softmax(0)
    gain = torch.linalg.solve(noisy, kernels).mT
    means = gain @ y
    variances = (kernels - gain @ kernels).diagonal(dim1=-2, dim2=-1)
    mean = w @ means
    sd = (w @ (variances + means**2) - mean**2).sqrt()
    count = 10_000
    x = {s: torch.as_tensor(v) for s, v in drawn(posterior, count, y).items()}
    f = (factor(x["length"][:, 0]) @ x["z"].unsqueeze(-1)).squeeze(-1)
    check_moments(f.numpy(), mean.numpy(), sd.numpy(), count, 0.01)


def test_a_rate_moves_with_its_shape():
    """The data fix shape / rate; a rate drawn at a neighbouring shape would not."""

    def model(y):
        shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Gamma(shape, rate), obs=y)

    y = dist.Gamma(3.0, 0.5).sample((30,))
    posterior = integrate(fitted(model, y), "shape", y)
    grid = np.exp(np.linspace(-2.0, 3.0, 2001))
    a, b = 2 + 30 * grid, 1 + float(y.sum())
    logs = (grid - 1) * float(y.log().sum()) - 30 * special.gammaln(grid)
    logs += special.gammaln(a) - a * math.log(b) + stats.lognorm(1).logpdf(grid)
    w = np.exp(logs - logs.max()) * np.gradient(grid)
    w /= w.sum()
    x = drawn(posterior, 10_000, y)
    for value, first, second in (
        (x["rate"], a / b, a * (a + 1) / b**2),
        (x["shape"] / x["rate"], grid * b / (a - 1), (grid * b) ** 2 / ((a - 1) * (a - 2))),
    ):
        mean = w @ first
        check_moments(value[:, 0], mean, math.sqrt(w @ second - mean**2), 10_000, 0.01)


@pytest.mark.parametrize("max_dense_dim", [1000, 4])
def test_a_random_walk_and_its_innovations(max_dense_dim):
    """Dense and as a chain, of which standard deviations are interpolated and correlations are not."""
    size, noise = 24, 0.5

    def model(y):
        step = pyro.sample("step", dist.HalfNormal(1.0))
        z = None
        for t in range(size):
            z = pyro.sample(f"z{t}", dist.Normal(0.0 if z is None else z, step if t else 2.0))
            pyro.sample(f"y{t}", dist.Normal(z, noise), obs=y[t])

    y = 0.6 * torch.randn(size).cumsum(0) + noise * torch.randn(size)
    cvi = CVI(model, AutoCVI(model, max_dense_dim=max_dense_dim), seed=0)
    cvi.run(y)
    structure = cvi.guide.block_of("z0").structure
    assert structure == ("chain" if max_dense_dim == 4 else "dense")
    posterior = integrate(cvi, "step", y)
    grid = np.exp(np.linspace(-7, 2, 301))
    i = np.arange(size)
    found = []
    for s in grid:
        prior = 4 + s**2 * np.minimum.outer(i, i)
        noisy = prior + noise**2 * np.eye(size)
        gain = np.linalg.solve(noisy, prior).T
        value = stats.multivariate_normal(np.zeros(size), noisy).logpdf(y.numpy())
        found.append((value, gain @ y.numpy(), prior - gain @ prior))
    logs = np.array([f[0] for f in found]) + stats.halfnorm.logpdf(grid) + np.log(grid)
    w = np.exp(logs - logs.max())
    w /= w.sum()
    m, v = np.stack([f[1] for f in found]), np.stack([f[2] for f in found])
    change = np.eye(size)[1:] - np.eye(size)[:-1]
    x = drawn(posterior, 4000, y)
    z = np.concatenate([x[f"z{t}"] for t in range(size)], 1)
    for value, by, scale in ((z, np.eye(size), grid**0), (np.diff(z) / x["step"], change, grid)):
        means = (m @ by.T) / scale[:, None]
        variances = np.einsum("ai,kij,aj->ka", by, v, by) / scale[:, None] ** 2
        mean = w @ means
        check_moments(value, mean, np.sqrt(w @ (variances + means**2) - mean**2), 4000, 0.02)


def test_states_of_a_chain_are_drawn_given_the_hyperparameter():
    """Beside forward sums over all paths."""
    move, levels, size = torch.tensor([[0.8, 0.2], [0.3, 0.7]]), torch.tensor([0.0, 2.0]), 6

    def model(y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        z = None
        for t in pyro.markov(range(size)):
            p = torch.full((2,), 0.5) if z is None else move[z]
            z = pyro.sample(f"z{t}", dist.Categorical(p))
            pyro.sample(f"y{t}", dist.Normal(levels[z], s), obs=y[t])

    y = torch.tensor([0.2, -0.5, 1.4, 2.2, 1.1, 0.3])
    posterior = integrate(fitted(model, y), "s", y)
    grid = np.exp(np.linspace(-3, 3, 301))
    paths = np.array(list(np.ndindex(*[2] * size)))
    logs = np.log(move.numpy())[paths[:, :-1], paths[:, 1:]].sum(1) + math.log(0.5)
    logs = logs + stats.norm.logpdf(y.numpy(), 2.0 * paths, grid[:, None, None]).sum(-1)
    logs = logs + stats.lognorm(0.5).logpdf(grid)[:, None] + np.log(grid)[:, None]
    w = np.exp(logs - logs.max())
    w /= w.sum()
    count = 4000
    x = drawn(posterior, count, y)
    z = np.concatenate([x[f"z{t}"] for t in range(size)], 1)
    stays = paths[:, :-1] == paths[:, 1:]
    for found, exact in (
        (z.mean(0), w.sum(0) @ paths),
        ((z[:, :-1] == z[:, 1:]).mean(0), w.sum(0) @ stays),
    ):
        assert np.abs(found - exact).max() < 5 * 0.5 / math.sqrt(count)


# --- what the joint fit cannot hold ------------------------------------------------------------------


def test_measurement_error():
    """Slopes and covariates multiply, and are apart in the joint fit; given the slope all is exact."""
    noise, spread = 0.3, 1.5
    truth = spread * torch.randn(30) + 2
    x, y = truth + 0.5 * torch.randn(30), 1 + 0.8 * truth + noise * torch.randn(30)

    def model(x, y):
        m = pyro.sample("m", dist.Normal(0.0, 5.0))
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(m, spread))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)
            pyro.sample("y", dist.Normal(a + b * z, noise), obs=y)

    cvi = fitted(model, x, y)
    posterior = integrate(cvi, "b", x, y)
    grid = np.linspace(0.3, 1.6, 401)
    pair = np.stack([x.numpy(), y.numpy()], 1)
    w, means, variances = (np.empty(len(grid)) for _ in range(3))
    for i, b in enumerate(grid):
        # Rows are N(A (m, a), C), and (m, a) has a Gaussian prior.
        cov = spread**2 * np.array([[1, b], [b, b**2]]) + np.diag([0.25, noise**2])
        A, P = np.array([[1.0, 0.0], [b, 1.0]]), np.linalg.inv(cov)
        precision = np.eye(2) / 25 + len(x) * A.T @ P @ A
        score = A.T @ P @ pair.sum(0)
        mean = np.linalg.solve(precision, score)
        w[i] = -0.5 * (len(x) * np.linalg.slogdet(cov)[1] + np.linalg.slogdet(precision)[1])
        w[i] += -0.5 * np.einsum("ni,ij,nj->", pair, P, pair) + 0.5 * score @ mean - b**2 / 50
        means[i], variances[i] = mean[1], np.linalg.inv(precision)[1, 1]
    w = np.exp(w - w.max())
    w /= w.sum()
    slope = w @ grid, math.sqrt(w @ grid**2 - (w @ grid) ** 2)
    a = w @ means
    draws = drawn(posterior, 10_000, x, y)
    for site, mean, width in (
        ("b", *slope),
        ("a", a, math.sqrt(w @ (variances + means**2) - a**2)),
    ):
        q = posterior.posterior(site)
        assert abs(float(q.mean) - mean) < 0.01 * width
        assert abs(float(q.stddev) / width - 1) < 0.01
        check_moments(draws[site][:, 0], mean, width, 10_000, 0.01)


@pytest.mark.parametrize("seed", range(2))
def test_two_modes(seed):
    """y ~ N(h(theta) + m, s): theta is on either side, in unequal shares, and m is exact given it."""
    y, s, prior, width = torch.tensor([1.6, 2.5, 2.1, 1.9, 2.4]), 0.6, 3.0, 0.3

    def h(theta):
        return (theta + 1) ** 2 * torch.where(theta > -1, 1.0, 0.3)

    def model(y):
        theta = pyro.sample("theta", dist.Normal(0.0, prior))
        m = pyro.sample("m", dist.Normal(0.0, width))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(h(theta) + m, s), obs=y)

    pyro.set_rng_seed(seed)
    cvi = CVI(model, AutoCVI(model), seed=seed)
    cvi.run(y)
    posterior = integrate(cvi, "theta", y)
    grid = torch.linspace(-8.0, 4.0, 4001)
    noise = s**2 * torch.eye(5) + width**2
    logs = dist.MultivariateNormal(torch.zeros(5), noise).log_prob(y - h(grid)[:, None])
    logs = logs + dist.Normal(0.0, prior).log_prob(grid)
    w = logs.softmax(0)
    left = float(w[grid < -1].sum())
    assert 0.2 < left < 0.8
    q = posterior.posterior("theta")
    mean = w @ grid
    sd = (w @ (grid - mean) ** 2).sqrt()
    assert abs(q.mean - mean) < 0.01 * sd and abs(q.stddev / sd - 1) < 0.01
    draws = drawn(posterior, 4000, y)["theta"]
    assert abs((draws < -1).mean() - left) < 5 * 0.5 / math.sqrt(4000)
    evidence = float(logs.logsumexp(0) + math.log(12.0 / 4000))
    assert abs(posterior.log_evidence - evidence) < 0.01


# --- bounds that are estimates ----------------------------------------------------------------------


def sampled(y):
    """The covariance of the rows is no function of the noise that is averaged exactly."""
    length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    t = torch.linspace(0.0, 3.0, len(y))
    kernel = torch.exp(-0.5 * ((t[:, None] - t) / length[..., None, None]) ** 2)
    cov = kernel + (0.05 + noise) * torch.eye(len(y))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(y)), cov), obs=y)


def test_what_no_algebra_averages_beside_a_hyperparameter():
    y = torch.linspace(0.0, 3.0, 8).sin() + 0.4 * torch.randn(8)
    cvi = CVI(sampled, AutoCVI(sampled, max_joint_dim=0), seed=0)
    cvi.run(y, num_steps=20)
    posterior = integrate(cvi, "length", y)
    length, noise = (torch.linspace(a, b, 60).exp() for a, b in ((-2.0, 2.0), (-6.0, 1.0)))
    a, b = torch.meshgrid(length, noise, indexing="ij")
    t = torch.linspace(0.0, 3.0, 8)
    kernel = torch.exp(-0.5 * ((t[:, None] - t) / a[..., None, None]) ** 2)
    cov = kernel + (0.05 + b)[..., None, None] * torch.eye(8)
    logs = dist.MultivariateNormal(torch.zeros(8), cov).log_prob(y) + a.log() + b.log()
    logs = logs + dist.LogNormal(0.0, 0.5).log_prob(a) + dist.HalfNormal(0.5).log_prob(b)
    w = logs.reshape(-1).softmax(0)
    mean = w @ a.reshape(-1)
    sd = (w @ (a.reshape(-1) - mean) ** 2).sqrt()
    q = posterior.posterior("length")
    assert abs(q.mean - mean) < 0.05 * sd and abs(q.stddev / sd - 1) < 0.05


def test_bounds_by_draws_have_errors(monkeypatch):
    """A value that leaves torch is drawn. Given s, y is one of two normal laws, by the sign of w."""

    def model(y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.3))
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        centre = 0.2 if w.mean().item() > 0 else -0.2
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(centre, s), obs=y)

    monkeypatch.setattr(conditioned, "_STEPS", 40)
    monkeypatch.setattr(conditioned, "_SAMPLED_STEPS", 6)
    monkeypatch.setattr(conditioned, "_NOISE", 1e-9)
    y = torch.tensor([0.5, -0.8, 1.1, 0.1, -0.2, 0.7])
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.step(y)
    assert cvi.guide.plan.sampled_sites() == {"w"}
    with pytest.warns(CVIWarning) as record:
        posterior = integrate(cvi, "s", y)
    assert any("estimates" in str(w.message) for w in record)
    grid = torch.linspace(-2.0, 2.0, 401).exp()
    sides = [dist.Normal(c, grid[:, None]).log_prob(y).sum(1) for c in (0.2, -0.2)]
    logs = torch.stack(sides).logsumexp(0) + dist.LogNormal(0.0, 0.3).log_prob(grid) + grid.log()
    w = logs.softmax(0)
    mean = w @ grid
    q = posterior.posterior("s")
    assert abs(q.mean - mean) < 0.1 * (w @ (grid - mean) ** 2).sqrt()
