"""Posteriors averaged over hyperparameters, beside dense Gaussian algebra on grids, and quadrature."""

import math
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from scipy import stats

from pyro_cvi import CVI, AutoCVI, CVIError, IntegratedPosterior, integrate
from pyro_cvi.errors import CVIWarning

# --- linear mixed models: given the scales all is Gaussian, and the bound is log p(y, theta) -------

NOISE = 0.7
GROUPS, ROWS = 8, 40
COARSE = 3
rng = np.random.default_rng(3)
WHICH = rng.integers(0, GROUPS, ROWS)
OTHER = rng.integers(0, COARSE, ROWS)
X = np.stack([np.ones(ROWS), rng.normal(size=ROWS)], 1)
Y = X @ [0.5, -1.0] + 0.8 * rng.normal(size=GROUPS)[WHICH] + NOISE * rng.normal(size=ROWS)


def linear(prior, two=False, transform=None, y=None):
    """`prior` of the site tau, whose `transform` is the scale of the groups."""
    dtype = torch.get_default_dtype()
    scale = pyro.sample("tau", prior)
    scale = scale if transform is None else transform(scale)
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    mean = torch.tensor(X, dtype=dtype) @ beta
    with pyro.plate("groups", GROUPS):
        u = pyro.sample("u", dist.Normal(0.0, scale))
    mean = mean + u[torch.tensor(WHICH)]
    if two:
        other = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("others", COARSE):
            v = pyro.sample("v", dist.Normal(0.0, other))
        mean = mean + v[torch.tensor(OTHER)]
    with pyro.plate("rows", ROWS):
        obs = torch.tensor(Y, dtype=dtype) if y is None else y
        return pyro.sample("y", dist.Normal(mean, NOISE), obs=obs)


def exact(scales):
    """log p(y | scales), mean and variance of (beta, u, v) given scales, by dense algebra in numpy."""
    design = [X, np.eye(GROUPS)[WHICH]]
    prior = [np.full(2, 4.0), np.full(GROUPS, scales[0] ** 2)]
    if len(scales) == 2:
        design.append(np.eye(COARSE)[OTHER])
        prior.append(np.full(COARSE, scales[1] ** 2))
    A, prior = np.concatenate(design, 1), np.concatenate(prior)
    cov_y = (A * prior) @ A.T + NOISE**2 * np.eye(ROWS)
    gain = (A * prior).T @ np.linalg.inv(cov_y)
    value = stats.multivariate_normal(np.zeros(ROWS), cov_y).logpdf(Y)
    return value, gain @ Y, prior - np.einsum("ij,ji->i", gain, A * prior)


def exact_posterior(grid, scale_of, log_prior):
    """Moments of the site and of the effects, and log p(y), by the trapezoid rule on a grid."""
    found = [exact([s]) for s in scale_of(grid)]
    logs = np.array([f[0] for f in found]) + log_prior(grid)
    steps = np.gradient(grid)
    evidence = np.log(np.sum(np.exp(logs - logs.max()) * steps)) + logs.max()
    w = np.exp(logs - evidence) * steps
    m, v = np.stack([f[1] for f in found]), np.stack([f[2] for f in found])
    mean = w @ m
    site = w @ grid, math.sqrt(w @ grid**2 - (w @ grid) ** 2)
    cdf = np.cumsum(w) - w / 2
    return (
        evidence,
        site,
        mean,
        np.sqrt(w @ (v + m**2) - mean**2),
        lambda q: np.interp(q, cdf, grid),
    )


def fitted(model, *args, **kwargs):
    cvi = CVI(model, AutoCVI(model))
    cvi.run(*args, **kwargs)
    return cvi


def check(posterior, expected, atol):
    """Site and effects, in units of their exact standard deviations; the evidence in nats."""
    evidence, (mean, sd), means, sds, quantile = expected
    q = posterior.posterior("tau")
    assert abs(float(q.mean.reshape(-1)[0]) - mean) < atol * sd
    assert abs(float(q.stddev.reshape(-1)[0]) / sd - 1) < atol
    for site, part in (("beta", slice(0, 2)), ("u", slice(2, None))):
        q = posterior.posterior(site)
        assert np.abs((q.mean.double().numpy() - means[part]) / sds[part]).max() < atol
        assert np.abs(q.stddev.double().numpy() / sds[part] - 1).max() < atol
    assert abs(posterior.log_evidence - evidence) < atol
    found = posterior.quantiles([0.05, 0.5, 0.95])["tau"].double().reshape(3, -1)[:, 0]
    for level, value in zip((0.05, 0.5, 0.95), found, strict=True):
        assert abs(float(value) - quantile(level)) < 3 * atol * sd


GRID = np.exp(np.linspace(-8.0, 4.0, 1001))
LINE = np.linspace(1e-4, 4 - 1e-4, 1333)
PRIORS = {
    "half-normal": (lambda: dist.HalfNormal(1.0), GRID, None, stats.halfnorm()),
    "half-Cauchy": (lambda: dist.HalfCauchy(1.0), GRID, None, stats.halfcauchy()),
    "log-normal": (lambda: dist.LogNormal(0.0, 0.7), GRID, None, stats.lognorm(0.7)),
    "uniform": (lambda: dist.Uniform(0.0, 3.0), LINE[LINE < 3], None, stats.uniform(0, 3)),
    "gamma precision": (lambda: dist.Gamma(2.0, 1.0), GRID, lambda t: t**-0.5, stats.gamma(2.0)),
    "log scale": (lambda: dist.Normal(0.0, 1.0), np.log(GRID), lambda t: math.e**t, stats.norm()),
}  # fmt: skip


@pytest.mark.parametrize("name", PRIORS)
def test_one_scale_of_a_linear_mixed_model_is_exact(name):
    make, grid, transform, law = PRIORS[name]
    cvi = fitted(linear, make(), transform=transform)
    posterior = integrate(cvi, "tau", make(), transform=transform)
    expected = exact_posterior(grid, transform or (lambda t: t), law.logpdf)
    check(posterior, expected, 1e-3)
    assert abs(float(posterior.weights.sum()) - 1) < 1e-12


def test_in_float32():
    torch.set_default_dtype(torch.float32)
    prior = dist.HalfNormal(1.0)
    posterior = integrate(fitted(linear, prior), ["tau"], prior)
    check(posterior, exact_posterior(GRID, lambda t: t, stats.halfnorm.logpdf), 5e-3)
    assert posterior.posterior("tau").mean.dtype == torch.float32
    assert posterior.posterior("tau").sample((3,)).dtype == torch.float32
    assert posterior.posterior("u").mean.dtype == torch.float32


def test_two_scales_of_a_linear_mixed_model_are_exact():
    prior = dist.HalfNormal(1.0)
    cvi = fitted(linear, prior, two=True)
    posterior = integrate(cvi, ["tau", "sigma"], prior, two=True)
    a, b = np.linspace(-6.5, 1.6, 55), np.linspace(-7.5, 1.6, 60)
    s, t = (x.reshape(-1) for x in np.meshgrid(np.exp(a), np.exp(b), indexing="ij"))
    found = [exact(pair) for pair in zip(s, t, strict=True)]
    logs = np.array([f[0] for f in found])
    logs += stats.halfnorm.logpdf(s) + stats.halfnorm.logpdf(t) + np.log(s * t)
    w = np.exp(logs - logs.max())
    evidence = np.log(w.sum() * (a[1] - a[0]) * (b[1] - b[0])) + logs.max()
    w /= w.sum()
    assert abs(posterior.log_evidence - evidence) < 5e-3
    m, v = np.stack([f[1] for f in found]), np.stack([f[2] for f in found])
    parts = {"beta": slice(0, 2), "u": slice(2, 2 + GROUPS), "v": slice(2 + GROUPS, None)}
    for site, part in parts.items():
        q, mean = posterior.posterior(site), w @ m[:, part]
        sd = np.sqrt(w @ (v + m**2)[:, part] - mean**2)
        assert np.abs((q.mean.numpy() - mean) / sd).max() < 5e-3
        assert np.abs(q.stddev.numpy() / sd - 1).max() < 5e-3
    for site, x in (("tau", s), ("sigma", t)):
        q, mean = posterior.posterior(site), w @ x
        sd = math.sqrt(w @ x**2 - mean**2)
        assert abs(float(q.mean) - mean) < 5e-3 * sd
        assert abs(float(q.stddev) / sd - 1) < 1e-2


def test_a_scale_of_two_elements():
    def model(y, which):
        tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
        with pyro.plate("groups", 12):
            u = pyro.sample("u", dist.Normal(0.0, tau[torch.arange(12) % 2]))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(u[which], 0.5), obs=y)

    which = torch.arange(36) % 12
    y = torch.tensor([0.3, 1.5]).repeat(6)[which] * torch.randn(12)[which] + 0.5 * torch.randn(36)
    posterior = integrate(fitted(model, y, which), "tau", y, which)
    q = posterior.posterior("tau")
    assert q.event_shape == (2,) and q.sample((5,)).shape == (5, 2)
    assert posterior.points["tau"].shape == (len(posterior.weights), 2)
    # Even and odd groups have nothing in common, so that each scale has a posterior of its own.
    grid = np.exp(np.linspace(-8, 3, 1001))
    means = y.reshape(3, 12).mean(0).numpy()
    for i in range(2):
        sd = np.sqrt(grid[:, None] ** 2 + 0.25 / 3)
        logs = stats.norm.logpdf(means[i::2], 0, sd).sum(1) + stats.halfnorm.logpdf(grid)
        w = np.exp(logs - logs.max()) * np.gradient(grid)
        w /= w.sum()
        mean = w @ grid
        assert abs(float(q.mean[i]) - mean) < 5e-3 * mean
        assert abs(float(q.stddev[i]) / math.sqrt(w @ grid**2 - mean**2) - 1) < 1e-2
    with pytest.raises(NotImplementedError, match="'tau'"):
        q.log_prob(torch.ones(2))


# --- likelihoods that are not Gaussian ---------------------------------------------------------------


def test_poisson_groups_beside_quadrature_over_everything():
    """Given the scale, groups are independent: p(y, s) is a product of integrals of one dimension."""

    def model(y):
        s = pyro.sample("s", dist.HalfCauchy(1.0))
        with pyro.plate("groups", len(y)):
            u = pyro.sample("u", dist.Normal(0.0, s))
            pyro.sample("y", dist.Poisson(u.exp()), obs=y)

    y = np.array([0, 0, 1, 1, 2, 4, 7, 1, 0, 3])
    posterior = integrate(fitted(model, torch.tensor(y).double()), "s", torch.tensor(y).double())
    grid = np.exp(np.linspace(-7, 3.5, 401))
    nodes = np.linspace(-9, 9, 801)
    u = grid[:, None] * nodes  # (s, nodes)
    prior = stats.norm.pdf(nodes) * (nodes[1] - nodes[0])
    like = stats.poisson.pmf(y[:, None, None], np.exp(u))  # (groups, s, nodes)
    each = like @ prior
    logs = np.log(each).sum(0) + stats.halfcauchy.logpdf(grid)
    w = np.exp(logs - logs.max()) * np.gradient(grid)
    evidence = np.log(w.sum()) + logs.max()
    w /= w.sum()
    mean = w @ grid
    sd = math.sqrt(w @ grid**2 - mean**2)
    q = posterior.posterior("s")
    # What is left is the gap of the bound at fixed s, which grows with s, and a Gaussian for the skew
    # effects of groups without a count: 0.08 standard deviations of a mean, 7 % of one.
    assert abs(float(q.mean) - mean) < 0.1 * sd
    assert abs(float(q.stddev) / sd - 1) < 0.08
    assert 0 < evidence - posterior.log_evidence < 0.2
    effect = (like * u * prior).sum(-1) / each
    square = (like * u**2 * prior).sum(-1) / each
    means = effect @ w
    sds = np.sqrt(square @ w - means**2)
    u = posterior.posterior("u")
    assert np.abs((u.mean.numpy() - means) / sds).max() < 0.05
    assert np.abs(u.stddev.numpy() / sds - 1).max() < 0.08


def test_three_scales_by_quasi_random_points():
    """Three sets of groups that have nothing in common, beside their own integrals in one dimension."""
    sizes = (6, 8, 10)

    def model(y):
        for i, n in enumerate(sizes):
            s = pyro.sample(f"s{i}", dist.HalfNormal(1.0))
            with pyro.plate(f"groups{i}", n):
                u = pyro.sample(f"u{i}", dist.Normal(0.0, s))
                pyro.sample(f"y{i}", dist.Normal(u, 0.3), obs=y[i])

    y = [scale * torch.randn(n) for scale, n in zip((0.3, 0.7, 1.2), sizes, strict=True)]
    cvi = fitted(model, y)
    posterior = integrate(cvi, [f"s{i}" for i in range(3)], y)
    grid = np.exp(np.linspace(-8, 2.5, 1001))
    for i in range(3):
        logs = stats.norm.logpdf(y[i].numpy(), 0, np.sqrt(grid[:, None] ** 2 + 0.09)).sum(1)
        logs += stats.halfnorm.logpdf(grid)
        w = np.exp(logs - logs.max()) * np.gradient(grid)
        w /= w.sum()
        mean = w @ grid
        sd = math.sqrt(w @ grid**2 - mean**2)
        q = posterior.posterior(f"s{i}")
        assert abs(float(q.mean) - mean) < 0.05 * sd
        assert abs(float(q.stddev) / sd - 1) < 0.05
    with pytest.raises(CVIError, match="num_points"):
        integrate(cvi, "s0", y, num_points=31)


def test_the_length_scale_of_a_kernel_beside_its_evidence():
    """Sampled in the joint fit, of which a few steps will do; given it the process is exact."""
    t = torch.linspace(0.0, 8.0, 50)

    def kernel(length):
        return torch.exp(-0.5 * ((t[:, None] - t) / length) ** 2) + 1e-6 * torch.eye(50)

    def model(y):
        length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(50), kernel(length)))
        with pyro.plate("data", 50):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    y = t.sin() + 0.3 * torch.randn(50)
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(y, num_steps=3)
    posterior = integrate(cvi, "length", y)
    assert posterior.posterior("f").mean.shape == (50,)
    grid = torch.linspace(-2.0, 2.5, 401).exp()
    prior = dist.LogNormal(0.0, 1.0).log_prob(grid) + grid.log()
    noise = 0.09 * torch.eye(50)
    laws = [dist.MultivariateNormal(torch.zeros(50), kernel(x) + noise) for x in grid]
    w = (torch.stack([law.log_prob(y) for law in laws]) + prior).softmax(0)
    mean = w @ grid
    sd = (w @ (grid - mean) ** 2).sqrt()
    q = posterior.posterior("length")
    assert abs(q.mean - mean) < 5e-3 * sd
    assert abs(q.stddev / sd - 1) < 5e-3


def test_a_mixture_of_gammas_and_states_has_means_and_quantiles():
    def model(y):
        shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        with pyro.plate("kinds", 2):
            rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            pyro.sample("y", dist.Gamma(shape, rate[z]), obs=y)

    y = torch.cat([dist.Gamma(3.0, 0.5).sample((15,)), dist.Gamma(3.0, 10.0).sample((15,))])
    cvi = fitted(model, y)
    posterior = integrate(cvi, "shape", y)
    assert posterior.posterior("shape").stddev > cvi.guide.posterior("shape").stddev
    q = posterior.posterior("rate")
    draws = q.sample((4000,))
    error = q.stddev / math.sqrt(4000)
    assert bool(((draws.mean(0) - q.mean).abs() < 5 * error).all())
    levels = torch.tensor([0.1, 0.5, 0.9])
    found = posterior.quantiles(levels)["rate"]
    share = (draws < found[:, None]).double().mean(1)
    assert bool(((share - levels[:, None]).abs() < 0.03).all())
    assert posterior.posterior("z").probs.shape == (30, 2)
    assert set(posterior.median()["z"].tolist()) == {0, 1}
    assert set(posterior()) == {"shape", "rate", "z"}


# --- as a guide --------------------------------------------------------------------------------------


def hierarchy(y, broken=False):
    s = pyro.sample("s", dist.HalfNormal(2.0))
    if broken and abs(math.log(s) - math.log(2.0)) > 1:
        raise RuntimeError("interrupted")
    m = pyro.sample("m", dist.Normal(0.0, 3.0))
    with pyro.plate("groups", len(y)):
        u = pyro.sample("u", dist.Normal(m, s))
        pyro.sample("y", dist.Normal(u, 1.0), obs=y)


GROUP_MEANS = (-2.0, 0.5, 1.0, 3.0)


@pytest.mark.parametrize("parallel", [False, True])
def test_draws_have_the_moments_of_the_posterior(parallel):
    y = torch.tensor(GROUP_MEANS)
    posterior = integrate(fitted(hierarchy, y), "s", y)
    n = 2000 if parallel else 500
    draws = Predictive(hierarchy, guide=posterior, num_samples=n, parallel=parallel)(y)
    assert draws["u"].reshape(n, -1).shape == (n, 4)
    for site in ("s", "m", "u"):
        x, q = draws[site].reshape(n, -1), posterior.posterior(site)
        assert bool(((x.mean(0) - q.mean).abs() < 5 * q.stddev / math.sqrt(n)).all())
        # Five standard errors, for tails a little heavier than a normal law's.
        assert bool(((x.std(0) / q.stddev - 1).abs() < 5 / math.sqrt(n)).all())
    assert len(draws["s"].unique()) > n - 10  # and not only at the points
    low, high = posterior.quantiles([0.1, 0.9])["u"]
    inside = ((draws["u"].reshape(n, 4) > low) & (draws["u"].reshape(n, 4) < high)).double().mean(0)
    assert bool(((inside - 0.8).abs() < 5 * math.sqrt(0.16 / n)).all())


def test_draws_keep_what_sites_have_in_common():
    """Effects and their mean are correlated given s, and their spread follows s."""
    y = torch.tensor(GROUP_MEANS)
    posterior = integrate(fitted(hierarchy, y), "s", y)
    draws = Predictive(hierarchy, guide=posterior, num_samples=3000, parallel=True)(y)
    s, m, u = (draws[k].reshape(3000, -1) for k in ("s", "m", "u"))
    small = s[:, 0] < s.median()
    spread = u.std(1)
    assert spread[small].mean() < spread[~small].mean()
    assert np.corrcoef(m[small, 0], u[small, 1])[0, 1] > 0.15
    assert torch.equal((u.mean(0) - u.mean()).sign(), (y - y.mean()).sign())


def test_the_law_of_a_hyperparameter_is_one_law():
    """Density, distribution function, quantiles, moments and draws of the table agree."""
    y = torch.tensor(GROUP_MEANS)
    q = integrate(fitted(hierarchy, y), "s", y).posterior("s")
    x = torch.linspace(1e-3, 15.0, 4001)
    density = q.log_prob(x).exp()
    assert abs(float(torch.trapezoid(density, x)) - 1) < 5e-3
    assert abs(float(torch.trapezoid(density * x, x)) - float(q.mean)) < 1e-2
    below = torch.trapezoid(density[x <= q.icdf(0.7)], x[x <= q.icdf(0.7)])
    assert abs(float(below) - 0.7) < 1e-2
    assert abs(float(q.sample((5000,)).mean() - q.mean)) < 5 * float(q.stddev) / math.sqrt(5000)


def test_it_can_be_pickled():
    y = torch.tensor(GROUP_MEANS)
    posterior = integrate(fitted(hierarchy, y), "s", y)
    again = pickle.loads(pickle.dumps(posterior))
    assert isinstance(again, IntegratedPosterior)
    for a, b in zip(posterior.median().values(), again.median().values(), strict=True):
        assert torch.equal(a, b)
    assert Predictive(hierarchy, guide=again, num_samples=3)(y)["u"].shape == (3, 4)
    assert "effective" in repr(again)


# --- what it leaves alone, and what it refuses -------------------------------------------------------


def test_the_fit_and_the_random_state_stay_as_they_are():
    y = torch.tensor(GROUP_MEANS)
    cvi = fitted(hierarchy, y)
    before, prepared = cvi.guide.snapshot(), cvi.guide.prepared
    random = torch.get_rng_state()
    first = integrate(cvi, "s", y)
    assert torch.equal(torch.get_rng_state(), random)
    second = integrate(cvi, "s", y)
    assert torch.equal(first.weights, second.weights)
    with pytest.raises(CVIError):
        integrate(cvi, "nothing", y)
    with pytest.raises(RuntimeError, match="interrupted"):
        integrate(cvi, "s", y, broken=True)
    assert cvi.guide.prepared is prepared
    assert all(torch.equal(before[k], v) for k, v in cvi.guide.snapshot().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_errors_say_what_to_write_instead():
    def model(y):
        s = pyro.sample("s", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([7]).to_event(1))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(w.sum() + z, s), obs=y)

    y = torch.randn(6)
    cvi = fitted(model, y)
    with pytest.raises(CVIError, match="'z': a discrete site.*'s', 'w'"):
        integrate(cvi, "z", y)
    with pytest.raises(CVIError, match="'y': an observed site"):
        integrate(cvi, "y", y)
    with pytest.raises(CVIError, match="'q': no such site"):
        integrate(cvi, ["s", "q"], y)
    with pytest.raises(CVIError, match=r"7 unconstrained scalars.*at most 6"):
        integrate(cvi, "w", y)
    with pytest.raises(CVIError, match="each once"):
        integrate(cvi, ["s", "s"], y)
    with pytest.raises(CVIError, match="each once"):
        integrate(cvi, [], y)
    with pytest.raises(CVIError, match="AutoCVI"):
        integrate(cvi.guide, "s", y)
    with pytest.raises(CVIError, match="no such latent.*'s', 'w', 'z'"):
        integrate(cvi, "s", y).posterior("q")


def test_minibatches_are_refused():
    def model(y):
        s = pyro.sample("s", dist.HalfNormal(1.0))
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y), subsample_size=5) as index:
            pyro.sample("y", dist.Normal(m, s), obs=y[index])

    y = torch.randn(20)
    cvi = CVI(model, AutoCVI(model))
    cvi.run(y, num_steps=4)
    with pytest.raises(CVIError, match=r"integrate\(\['s'\]\).*subsampled"):
        integrate(cvi, "s", y)


def test_parameters_to_learn_are_refused():
    def model(y):
        a = pyro.param("a", torch.tensor(0.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        m = pyro.sample("m", dist.Normal(a, 1.0))
        pyro.sample("y", dist.Normal(m, s), obs=y)

    cvi = CVI(model, AutoCVI(model), pyro.optim.Adam({"lr": 0.01}))
    cvi.run(torch.tensor(0.3), num_steps=2)
    with pytest.raises(CVIError, match=r"pyro\.param"):
        integrate(cvi, "s", torch.tensor(0.3))


# --- where the mass is at zero -------------------------------------------------------------------------


def test_a_scale_that_may_be_zero():
    """Groups without any differences: the density of log s falls like s, and no further."""
    y = torch.tensor([0.1, -0.1, 0.05, -0.05])
    posterior = integrate(fitted(hierarchy, y), "s", y)
    assert float(posterior.points["s"].min()) < 1e-3
    assert len(posterior.weights) < 40
    grid = np.exp(np.linspace(-12, 4, 2001))
    deviations = ((y - y.mean()) ** 2).sum().item()
    v = grid**2 + 1
    logs = -1.5 * np.log(v) - deviations / (2 * v) - 0.5 * np.log(v / 4 + 9)
    logs += -(y.mean().item() ** 2) / (2 * (v / 4 + 9)) + stats.halfnorm.logpdf(grid, scale=2.0)
    w = np.exp(logs - logs.max()) * np.gradient(grid)
    w /= w.sum()
    q = posterior.posterior("s")
    assert abs(float(q.mean) / (w @ grid) - 1) < 5e-3
    assert abs(float(posterior.posterior("u").stddev[0])) < 1.0


def test_scales_near_zero_in_float32_and_in_a_plate():
    """Where precisions of 1e10 have no Cholesky factor there is no mass, and no warning."""
    torch.set_default_dtype(torch.float32)

    def model(y):
        with pyro.plate("kinds", 2):
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 12):
            u = pyro.sample("u", dist.Normal(m, tau[..., torch.arange(12) % 2]))
            pyro.sample("y", dist.Normal(u, 0.5), obs=y)

    y = 0.3 * torch.randn(12)
    posterior = integrate(fitted(model, y), "tau", y)
    q = posterior.posterior("tau")
    assert q.batch_shape == (2,) and q.log_prob(torch.ones(2)).shape == (2,)
    assert all(bool(x.isfinite().all()) for x in posterior.median().values())
    draws = Predictive(model, guide=posterior, num_samples=5, parallel=True)(y)
    assert draws["tau"].shape == (5, 2)


def test_a_prior_without_mass_is_said():
    """1 / s on the scale of differences that are not there: the posterior is improper at zero.

    The lattice ends where the density has not died out, or where exp(-300) has no fit any more.
    """

    def model(y):
        log_s = pyro.sample("log_s", dist.Normal(0.0, 1000.0))
        with pyro.plate("groups", len(y)):
            u = pyro.sample("u", dist.Normal(0.0, log_s.exp()))
            pyro.sample("y", dist.Normal(u, 1.0), obs=y)

    y = torch.tensor([0.1, -0.1, 0.05, -0.05])
    cvi = fitted(model, y)
    with pytest.raises((CVIError, CVIWarning), match="does not die out|no fit at"):
        integrate(cvi, "log_s", y)
