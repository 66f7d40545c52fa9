"""Conjugate models against closed forms, hand-written CAVI and the dense joint Gaussian."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def fit(model, *args, steps=1):
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    losses = [cvi.step(*args) for _ in range(steps)]
    return guide, cvi, losses


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    torch.set_default_dtype(request.param)
    return request.param


def close(actual, expected, dtype):
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=dtype), rtol=tol, atol=tol, check_dtype=True
    )


def test_beta_bernoulli_is_exact_after_one_step(dtype):
    def model(x):
        p = pyro.sample("p", dist.Beta(10.0, 10.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Bernoulli(p), obs=x)

    x = torch.tensor([1.0] * 6 + [0.0] * 4)
    guide, _, losses = fit(model, x)
    q = guide.posterior("p")
    close(q.concentration1, 16.0, dtype)
    close(q.concentration0, 14.0, dtype)
    log_b = [math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b) for a, b in ((16, 14), (10, 10))]
    close(torch.tensor(-losses[0]), log_b[0] - log_b[1], dtype)


@pytest.mark.parametrize(
    ("likelihood", "posterior"),
    [
        (lambda p: dist.Geometric(p), (2 + 5, 3 + 11)),
        (lambda p: dist.Binomial(7, p), (2 + 11, 3 + 5 * 7 - 11)),
        (lambda p: dist.NegativeBinomial(4.0, p), (2 + 11, 3 + 5 * 4)),
    ],
)
def test_beta_with_other_counts(likelihood, posterior, dtype):
    def model(x):
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", likelihood(p), obs=x)

    guide, _, _ = fit(model, torch.tensor([0.0, 3.0, 2.0, 5.0, 1.0]))
    close(guide.posterior("p").concentration1, float(posterior[0]), dtype)
    close(guide.posterior("p").concentration0, float(posterior[1]), dtype)


@pytest.mark.parametrize(
    ("likelihood", "shape", "rate"),
    [
        (lambda z: dist.Poisson(3 * z), 2 + 11, 1.5 + 15),
        (lambda z: dist.Exponential(z), 2 + 5, 1.5 + 11),
        (lambda z: dist.Gamma(2.5, z), 2 + 12.5, 1.5 + 11),
        (lambda z: dist.Normal(1.0, z.rsqrt()), 2 + 2.5, 1.5 + 0.5 * 22),
        (lambda z: dist.Normal(1.0, 1 / z.sqrt()), 2 + 2.5, 1.5 + 0.5 * 22),
        (lambda z: dist.Normal(1.0, (1 / z).sqrt()), 2 + 2.5, 1.5 + 0.5 * 22),
        (lambda z: dist.Normal(1.0, z**-0.5), 2 + 2.5, 1.5 + 0.5 * 22),
        (lambda z: dist.LogNormal(0.0, z.rsqrt()), 2 + 2.5, None),
    ],
)
def test_gamma_pairs(likelihood, shape, rate, dtype):
    x = torch.tensor([1.0, 3.0, 2.0, 5.0, 0.0])
    if isinstance(likelihood(torch.tensor(1.0)), dist.LogNormal):
        x = x + 1
        rate = 1.5 + 0.5 * float(x.log().square().sum())
    elif not isinstance(likelihood(torch.tensor(1.0)), dist.Poisson | dist.Normal):
        x = x.clamp(min=0.5) * 11 / 11.5

    def model(x):
        z = pyro.sample("z", dist.Gamma(2.0, 1.5))
        with pyro.plate("data", len(x)):
            pyro.sample("x", likelihood(z), obs=x)

    if isinstance(likelihood(torch.tensor(1.0)), dist.Normal):
        rate = 1.5 + 0.5 * float((x - 1).square().sum())
    guide, _, _ = fit(model, x)
    close(guide.posterior("z").concentration, float(shape), dtype)
    close(guide.posterior("z").rate, float(rate), dtype)


def test_inverse_gamma_variance(dtype):
    def model(x):
        v = pyro.sample("v", dist.InverseGamma(3.0, 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(1.0, v.sqrt()), obs=x)

    x = torch.tensor([1.0, 3.0, 2.0, 5.0])
    guide, _, _ = fit(model, x)
    close(guide.posterior("v").concentration, 5.0, dtype)
    close(guide.posterior("v").rate, 2 + 0.5 * float((x - 1).square().sum()), dtype)


def test_dirichlet_multinomial_and_categorical(dtype):
    def model(counts, labels):
        theta = pyro.sample("theta", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
        pyro.sample("counts", dist.Multinomial(10, theta), obs=counts)
        with pyro.plate("data", len(labels)):
            pyro.sample("labels", dist.Categorical(theta), obs=labels)

    guide, _, _ = fit(model, torch.tensor([1.0, 4.0, 5.0]), torch.tensor([0, 2, 2]))
    close(guide.posterior("theta").concentration, [3.0, 6.0, 10.0], dtype)


def test_normal_with_known_noise(dtype):
    def model(x):
        m = pyro.sample("m", dist.Normal(1.0, 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(m, 0.5), obs=x)

    x = torch.tensor([1.0, 2.0, 4.0])
    precision = 0.25 + 12
    guide, _, losses = fit(model, x)
    close(guide.posterior("m").loc, (0.25 + 4 * 7) / precision, dtype)
    close(guide.posterior("m").scale, precision**-0.5, dtype)
    cov = 4 * torch.ones(3, 3) + 0.25 * torch.eye(3)
    evidence = dist.MultivariateNormal(torch.ones(3), cov).log_prob(x)
    close(torch.tensor(-losses[0]), float(evidence), dtype)


def test_normal_chain_equals_the_dense_joint(dtype):
    y = torch.tensor([0.3, -0.2, 1.1, 0.7, 2.0, 1.5])

    def model(y):
        x = pyro.sample("x_0", dist.Normal(0.0, 1.0))
        for t in range(len(y)):
            x = pyro.sample(f"x_{t + 1}", dist.Normal(0.9 * x + 0.1, 0.5))
            pyro.sample(f"y_{t}", dist.Normal(2 * x, 0.3), obs=y[t])

    guide, _, losses = fit(model, y)
    n = len(y) + 1
    # x = L e + c with independent e: the joint of states and observations by linear algebra.
    step = torch.eye(n) - 0.9 * torch.diag(torch.ones(n - 1), -1)
    inverse = torch.linalg.inv(step)
    noise = torch.diag(torch.tensor([1.0] + [0.25] * (n - 1)))
    mean = inverse @ torch.tensor([0.0] + [0.1] * (n - 1))
    cov = inverse @ noise @ inverse.T
    read = 2 * torch.eye(n)[1:]
    s = read @ cov @ read.T + 0.09 * torch.eye(n - 1)
    gain = cov @ read.T @ torch.linalg.inv(s)
    joint = guide.joint([f"x_{t}" for t in range(n)])
    close(joint.loc, mean + gain @ (y - read @ mean), dtype)
    close(joint.covariance_matrix, cov - gain @ read @ cov, dtype)
    evidence = dist.MultivariateNormal(read @ mean, s).log_prob(y)
    close(torch.tensor(-losses[0]), float(evidence), dtype)


def regression_data(n=50, d=3):
    x = torch.randn(n, d)
    return x, x @ torch.arange(1.0, d + 1) + 0.5 + 0.3 * torch.randn(n)


def cavi(x, y, steps, alpha, rate, a0=2.0, b0=1.0, sd=2.0):
    """Mean-field q(w) q(tau) for y ~ N(X w, 1/tau), written out."""
    n, d = x.shape
    for _ in range(steps):
        precision = torch.eye(d) / sd**2 + alpha / rate * x.T @ x
        cov = torch.linalg.inv(precision)
        loc = cov @ (alpha / rate * x.T @ y)
        alpha = a0 + n / 2
        residual = (y - x @ loc).square().sum() + torch.trace(x.T @ x @ cov)
        rate = b0 + 0.5 * residual
    return loc, cov, alpha, rate


def test_linear_regression_with_gamma_noise_is_cavi(dtype):
    x, y = regression_data()

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)

    guide, _, losses = fit(model, x, y, steps=3)
    loc, cov, alpha, rate = cavi(x, y, 3, 2.0, 1.0)
    close(guide.posterior("w").loc, loc, dtype)
    close(guide.posterior("w").covariance_matrix, cov, dtype)
    close(guide.posterior("tau").concentration, alpha, dtype)
    torch.testing.assert_close(guide.posterior("tau").rate, rate, rtol=TOLERANCE[dtype], atol=0)
    assert losses[0] >= losses[1] >= losses[2]


def test_four_scalar_sites_equal_one_vector_site():
    x, y = regression_data()

    def vector(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w + b, 0.3), obs=y)

    def scalars(x, y):
        w = [pyro.sample(f"w{i}", dist.Normal(0.0, 2.0)) for i in range(3)]
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        mean = b + w[0] * x[:, 0] + x[:, 1] * w[1] + w[2] * x[:, 2]
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    one, _, loss_one = fit(vector, x, y)
    four, _, loss_four = fit(scalars, x, y)
    assert len(four.plan.blocks) == 1
    a, b = one.joint(["w", "b"]), four.joint(["w0", "w1", "w2", "b"])
    torch.testing.assert_close(a.loc, b.loc)
    torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix)
    assert loss_one[0] == pytest.approx(loss_four[0], rel=1e-12)


def test_data_near_ten_thousand_in_float32_keep_their_digits():
    torch.set_default_dtype(torch.float32)
    y64 = 1e4 + torch.randn(200, dtype=torch.float64)

    def model(y):
        m = pyro.sample("m", dist.Normal(0.0, 1e5))
        tau = pyro.sample("tau", dist.Gamma(1.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(m, tau.rsqrt()), obs=y)

    guide, _, _ = fit(model, y64.float(), steps=20)
    exact = y64.mean()
    sd = guide.posterior("m").scale
    # float32 resolves 1e-3 at 1e4: the mean must be right to that, the spread to a per cent
    assert abs(float(guide.posterior("m").loc) - float(exact)) < 2e-3
    assert float(sd) == pytest.approx(float(y64.std()) / 200**0.5, rel=0.02)
    assert float(guide.posterior("tau").mean) == pytest.approx(float(y64.var()) ** -1, rel=0.02)


def test_hierarchical_gamma_chain_is_cavi():
    counts = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0])

    def model(counts):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("cells", 5):
            z = pyro.sample("z", dist.Gamma(2.0, rate))
            pyro.sample("x", dist.Poisson(3 * z), obs=counts)

    guide, _, _ = fit(model, counts, steps=4)
    shape, b = 2.0, 1.0
    q_rate, q_z = guide.posterior("rate"), guide.posterior("z")
    # each factor's equation given the other one; z was updated last
    torch.testing.assert_close(q_z.concentration, 2.0 + counts)
    torch.testing.assert_close(q_z.rate, (q_rate.mean + 3).expand(5))
    assert float(q_rate.concentration) == pytest.approx(shape + 10)
    fit_more = CVI(model, guide)
    for _ in range(60):
        fit_more.step(counts)
    q_rate, q_z = guide.posterior("rate"), guide.posterior("z")
    assert float(q_rate.rate) == pytest.approx(b + float(q_z.mean.sum()), rel=1e-10)


def test_a_point_of_poutine_scale_counts_twice():
    x = torch.tensor([1.0, 2.0, 4.0])

    def scaled(x):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), pyro.poutine.scale(scale=2.0):
            pyro.sample("x", dist.Normal(m, 1.0), obs=x)

    guide, _, _ = fit(scaled, x)
    assert float(guide.posterior("m").loc) == pytest.approx(14 / 7)
    assert float(guide.posterior("m").scale) == pytest.approx(7**-0.5)


def test_masked_cells_send_no_message_even_when_nan():
    x = torch.tensor([1.0, float("nan"), 4.0])

    def model(x):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3), pyro.poutine.mask(mask=~x.isnan()):
            pyro.sample("x", dist.Normal(m, 1.0), obs=x)

    guide, _, losses = fit(model, x)
    assert float(guide.posterior("m").loc) == pytest.approx(5 / 3)
    assert math.isfinite(losses[0])


def test_obs_mask_cells_go_back_to_their_prior():
    x = torch.tensor([1.0, 100.0, 4.0])
    keep = torch.tensor([True, False, True])

    def model(x):
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            return pyro.sample("x", dist.Normal(m, 1.0), obs=x, obs_mask=keep)

    guide, cvi, losses = fit(model, x, steps=3)
    assert float(guide.posterior("m").loc) == pytest.approx(5 / 3)
    cov = torch.ones(2, 2) + torch.eye(2)
    evidence = dist.MultivariateNormal(torch.zeros(2), cov).log_prob(x[keep])
    assert losses[-1] == pytest.approx(-float(evidence))
