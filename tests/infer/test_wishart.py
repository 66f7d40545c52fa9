"""Wishart precisions against closed forms and hand-written CAVI."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.autoguide import init_to_value
from torch import Tensor

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import CVIError

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
LOG_2PI = math.log(2 * math.pi)
D = 3


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    torch.set_default_dtype(request.param)
    return request.param


def fit(model, *args, steps=1, **kwargs):
    guide = AutoCVI(model, **kwargs)
    cvi = CVI(model, guide)
    losses = [cvi.step(*args) for _ in range(steps)]
    return guide, cvi, losses


def close(actual, expected):
    expected = torch.as_tensor(expected)
    tol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(torch.as_tensor(actual), expected, rtol=tol, atol=tol)


def spd(*batch: int) -> Tensor:
    root = torch.randn(*batch, D, D)
    return root @ root.mT / D + torch.eye(D)


def outer(x: Tensor) -> Tensor:
    """sum_n x x^T."""
    return torch.einsum("...ni,...nj->...ij", x, x)


def quadratic(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("...i,...ij,...j->...", x, matrix, x)


def hows(cvi: CVI) -> set[str]:
    return {e.how for e in cvi.explain().edges}


class Law:
    """A Wishart by nu and V^-1, from torch's formulas."""

    def __init__(self, df: Tensor | float, inverse: Tensor) -> None:
        self.df = torch.as_tensor(df, dtype=inverse.dtype).expand(inverse.shape[:-2])
        self.inverse = inverse
        self.mean = self.df[..., None, None] * torch.linalg.inv(inverse)
        halves = torch.arange(D) / 2
        psi = torch.digamma(self.df.unsqueeze(-1) / 2 - halves).sum(-1)
        self.log_det = psi + D * math.log(2) - torch.logdet(inverse)

    def expected_log_prob(self, prior: "Law") -> Tensor:
        """E log p(X) under this law, for p = prior."""
        constant = torch.mvlgamma(prior.df / 2, D) + prior.df * D / 2 * math.log(2)
        linear = (prior.df - D - 1) * self.log_det - (prior.inverse * self.mean).sum((-2, -1))
        return (linear + prior.df * torch.logdet(prior.inverse)) / 2 - constant

    def entropy(self) -> Tensor:
        return dist.Wishart(self.df, precision_matrix=self.inverse).entropy()

    def check(self, q) -> None:
        assert isinstance(q, dist.Wishart)
        assert q.batch_shape == self.df.shape
        assert q.event_shape == (D, D)
        close(q.df, self.df)
        close(q.precision_matrix, self.inverse)


PARAMETERS = {
    "covariance_matrix": lambda v: v,
    "precision_matrix": torch.linalg.inv,
    "scale_tril": torch.linalg.cholesky,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_mean_is_exact_after_one_step(name, dtype):
    scale, loc, x = spd(), torch.randn(D), torch.randn(20, D) + 1
    df = 4.5

    def model(x):
        p = pyro.sample("p", dist.Wishart(df, **{name: PARAMETERS[name](scale)}))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MultivariateNormal(loc, precision_matrix=p), obs=x)

    guide, cvi, losses = fit(model, x, steps=2)
    prior = torch.linalg.inv(scale)
    expected = Law(df + 20, prior + outer(x - loc))
    expected.check(guide.posterior("p"))
    assert hows(cvi) == {"exact"}
    evidence = torch.mvlgamma(expected.df / 2, D) - torch.mvlgamma(torch.tensor(df / 2), D)
    evidence = evidence - 20 * D / 2 * math.log(math.pi) + df / 2 * torch.logdet(prior)
    evidence = evidence - expected.df / 2 * torch.logdet(expected.inverse)
    close(-losses[0], evidence)
    close(losses[1], losses[0])


def test_mean_and_precision_are_those_of_cavi(dtype):
    loc0, cov0, prior = torch.randn(D), spd(), Law(5.0, spd())
    x = torch.randn(30, D) @ torch.randn(D, D) + 2

    def model(x):
        mu = pyro.sample("mu", dist.MultivariateNormal(loc0, cov0))
        p = pyro.sample("p", dist.Wishart(prior.df, precision_matrix=prior.inverse))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MultivariateNormal(mu, precision_matrix=p), obs=x)

    guide, cvi, losses = fit(model, x, steps=6)
    assert hows(cvi) == {"exact"}
    inverse0, q = torch.linalg.inv(cov0), prior
    for loss in losses:
        precision = inverse0 + 30 * q.mean
        cov = torch.linalg.inv(precision)
        loc = cov @ (inverse0 @ loc0 + q.mean @ x.sum(0))
        second = outer(x - loc) + 30 * cov
        q = Law(prior.df + 30, prior.inverse + second)
        elbo = 15 * (q.log_det - D * LOG_2PI) - (q.mean * second).sum() / 2
        spread = cov + torch.outer(loc - loc0, loc - loc0)
        elbo = elbo - (torch.logdet(cov0) + (inverse0 * spread).sum()) / 2
        elbo = elbo + D / 2 + torch.logdet(cov) / 2 + q.expected_log_prob(prior) + q.entropy()
        close(loss, -elbo)
    close(guide.posterior("mu").mean, loc)
    close(guide.posterior("mu").covariance_matrix, cov)
    q.check(guide.posterior("p"))


@pytest.mark.parametrize("latent_beta", [False, True])
def test_mean_whose_prior_precision_is_a_multiple_of_the_matrix(latent_beta, dtype):
    loc0, prior, x = torch.randn(D), Law(5.0, spd()), torch.randn(12, D) + 1

    def model(x):
        p = pyro.sample("p", dist.Wishart(prior.df, precision_matrix=prior.inverse))
        beta = pyro.sample("beta", dist.Gamma(3.0, 2.0)) if latent_beta else 0.5
        mu = pyro.sample("mu", dist.MultivariateNormal(loc0, precision_matrix=beta * p))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MultivariateNormal(mu, precision_matrix=p), obs=x)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.step(x)
    assert hows(cvi) == {"exact"}
    for _ in range(4):
        loc, cov = guide.posterior("mu").mean, guide.posterior("mu").covariance_matrix
        beta = guide.posterior("beta").mean if latent_beta else 0.5
        cvi.step(x)
        spread = cov + torch.outer(loc - loc0, loc - loc0)
        q = Law(prior.df + 13, prior.inverse + outer(x - loc) + 12 * cov + beta * spread)
        q.check(guide.posterior("p"))
        if latent_beta:
            gamma = guide.posterior("beta")
            close(gamma.concentration, torch.tensor(3 + D / 2))
            close(gamma.rate, 2 + (q.mean * spread).sum() / 2)
            beta = gamma.mean
        close(guide.posterior("mu").precision_matrix, (beta + 12) * q.mean)
        close(guide.posterior("mu").mean, (beta * loc0 + x.sum(0)) / (beta + 12))


def test_mixture_with_a_matrix_each(dtype):
    k, n = 3, 40
    weights = torch.tensor([0.5, 0.3, 0.2])
    loc0, cov0, prior = torch.zeros(D), 4 * torch.eye(D), Law(5.0, spd(k))
    x = torch.randn(n, D) + 3 * torch.randn(k, D)[torch.arange(n) % k]

    def model(x):
        with pyro.plate("components", k):
            mu = pyro.sample("mu", dist.MultivariateNormal(loc0, cov0))
            p = pyro.sample("p", dist.Wishart(prior.df, precision_matrix=prior.inverse))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("x", dist.MultivariateNormal(mu[z], precision_matrix=p[z]), obs=x)

    guide, cvi, _ = fit(model, x)
    assert hows(cvi) == {"exact"}
    for _ in range(3):
        r, q = guide.posterior("z").probs, guide.posterior("p")
        mean = q.df[:, None, None] * q.covariance_matrix
        cvi.step(x)
        count = r.sum(0)
        precision = torch.linalg.inv(cov0) + count[:, None, None] * mean
        cov = torch.linalg.inv(precision)
        loc = torch.einsum("kij,kjl,nk,nl->ki", cov, mean, r, x)
        rows = x - loc.unsqueeze(1)
        second = torch.einsum("nk,kni,knj->kij", r, rows, rows) + count[:, None, None] * cov
        law = Law(prior.df + count, prior.inverse + second)
        close(guide.posterior("mu").mean, loc)
        close(guide.posterior("mu").covariance_matrix, cov)
        law.check(guide.posterior("p"))
        logits = weights.log().unsqueeze(-1) + 0.5 * law.log_det.unsqueeze(-1)
        traces = (law.mean * cov).sum((-2, -1)).unsqueeze(-1)
        logits = logits - 0.5 * (quadratic(law.mean.unsqueeze(1), rows) + traces)
        close(guide.posterior("z").probs, logits.softmax(0).T)


def test_a_matrix_for_each_group(dtype):
    groups, x = torch.arange(24) % 4, torch.randn(24, D)
    prior = Law(torch.tensor([4.0, 5.0, 6.0, 7.0]), spd(4))

    def model(x):
        with pyro.plate("groups", 4):
            p = pyro.sample("p", dist.Wishart(prior.df, precision_matrix=prior.inverse))
        with pyro.plate("data", 24):
            pyro.sample(
                "x", dist.MultivariateNormal(torch.ones(D), precision_matrix=p[groups]), obs=x
            )

    guide, cvi, _ = fit(model, x)
    assert hows(cvi) == {"exact"}
    second = torch.stack([outer(x[groups == g] - 1) for g in range(4)])
    Law(prior.df + 6, prior.inverse + second).check(guide.posterior("p"))


def test_random_effects_with_a_common_matrix(dtype):
    prior, design, y = Law(5.0, spd()), torch.randn(8, D), torch.randn(6, 8)

    def model(y):
        p = pyro.sample("p", dist.Wishart(prior.df, precision_matrix=prior.inverse))
        with pyro.plate("groups", 6, dim=-2):
            b = pyro.sample("b", dist.MultivariateNormal(torch.zeros(D), precision_matrix=p))
            with pyro.plate("rows", 8, dim=-1):
                pyro.sample("y", dist.Normal((b * design).sum(-1), 0.5), obs=y)

    guide, cvi, _ = fit(model, y)
    assert hows(cvi) == {"exact"}
    for _ in range(3):
        b = guide.posterior("b")
        cvi.step(y)
        second = outer(b.mean.squeeze(1)) + b.covariance_matrix.sum((0, 1))
        q = Law(prior.df + 6, prior.inverse + second)
        q.check(guide.posterior("p"))
        cov = torch.linalg.inv(q.mean + 4 * design.mT @ design)
        close(guide.posterior("b").covariance_matrix, cov.expand(6, 1, D, D))
        close(guide.posterior("b").mean, (4 * y @ design @ cov).unsqueeze(1))


def test_a_wishart_whose_scale_is_a_wishart(dtype):
    prior, k, data = Law(5.0, spd()), 4, torch.randn(4, 10, D)

    def model(data):
        top = pyro.sample("top", dist.Wishart(prior.df, precision_matrix=prior.inverse))
        with pyro.plate("groups", k):
            p = pyro.sample("p", dist.Wishart(6.0, precision_matrix=top))
            with pyro.plate("rows", 10, dim=-2):
                x = dist.MultivariateNormal(torch.zeros(D), precision_matrix=p)
                pyro.sample("x", x, obs=data.transpose(0, 1))

    guide, cvi, _ = fit(model, data)
    assert hows(cvi) == {"exact"}
    for _ in range(3):
        p = guide.posterior("p")
        cvi.step(data)
        inverse = prior.inverse + (p.df[:, None, None] * p.covariance_matrix).sum(0)
        top = Law(prior.df + 6 * k, inverse)
        top.check(guide.posterior("top"))
        Law(torch.tensor(16.0).expand(k), top.mean + outer(data)).check(guide.posterior("p"))


def test_one_dimension_is_a_gamma(dtype):
    x = torch.randn(15, 1)

    def model(x, wishart):
        if wishart:
            p = pyro.sample("p", dist.Wishart(3.0, torch.tensor([[2.0]])))
        else:
            p = pyro.sample("p", dist.Gamma(1.5, 0.25)).reshape(1, 1)
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MultivariateNormal(torch.ones(1), precision_matrix=p), obs=x)

    def scalar(x):
        p = pyro.sample("p", dist.Gamma(1.5, 0.25))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(1.0, p.rsqrt()), obs=x[:, 0])

    guide, _, losses = fit(lambda x: model(x, True), x)
    gamma, _, gamma_losses = fit(scalar, x)
    close(losses[0], torch.tensor(gamma_losses[0]))
    close(guide.posterior("p").df, 2 * gamma.posterior("p").concentration)
    close(guide.posterior("p").precision_matrix.squeeze(), 2 * gamma.posterior("p").rate)


def test_a_mask_over_the_plate_of_a_matrix():
    # As everywhere: a masked cell with data has a flat prior, one without is pinned to its prior.
    mask = torch.tensor([True, False, False])
    x = torch.randn(7, D)

    def model(x):
        with pyro.plate("groups", 3), poutine.mask(mask=mask):
            p = pyro.sample("p", dist.Wishart(5.0, torch.eye(D)))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MultivariateNormal(torch.zeros(D), precision_matrix=p[2]), obs=x)

    guide, _, _ = fit(model, x)
    inverse = torch.stack([torch.eye(D), torch.eye(D), outer(x)])
    Law(torch.tensor([5.0, 5.0, 4.0 + 7.0]), inverse).check(guide.posterior("p"))


def test_an_element_in_a_square_is_sampled():
    def model(x):
        p = pyro.sample("p", dist.Wishart(20.0, torch.eye(D) / 20))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(p[0, 1], 0.1), obs=x)

    x = 0.4 + 0.1 * torch.randn(50)
    guide, cvi, _ = fit(model, x, steps=40)
    assert [e.how for e in cvi.explain().edges] == ["exact", "sampled"]
    assert float(guide.median()["p"][0, 1]) == pytest.approx(0.4, abs=0.1)


def test_a_covariance_is_sampled_and_one_df_serves_a_batch():
    x = 0.5 * torch.randn(200, D)
    scale = torch.stack([torch.eye(D), 2 * torch.eye(D)])

    def model(x):
        with pyro.plate("two", 2):
            p = pyro.sample("p", dist.Wishart(8.0, scale / 8))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.MultivariateNormal(torch.zeros(D), covariance_matrix=p[0]), obs=x)

    guide, cvi, _ = fit(model, x, steps=30, max_joint_dim=0)
    assert {(e.factor, e.how) for e in cvi.explain().edges} == {("p", "exact"), ("x", "sampled")}
    q = guide.posterior("p")
    mean = q.df[:, None, None] * q.covariance_matrix
    torch.testing.assert_close(mean[0], outer(x) / 200, rtol=0.3, atol=0.1)
    close(mean[1], 2 * torch.eye(D))


def test_the_guide_draws_and_says_what_a_matrix_has_not():
    x = torch.randn(10, D)

    def model(x):
        with pyro.plate("groups", 2):
            p = pyro.sample("p", dist.Wishart(5.0, torch.eye(D)))
        with pyro.plate("data", 10):
            pyro.sample("x", dist.MultivariateNormal(torch.zeros(D), precision_matrix=p[0]), obs=x)

    start = torch.stack([spd(), spd()])
    located = AutoCVI(model, init_loc_fn=init_to_value(values={"p": start}))
    located(x)
    close(located.median()["p"], start)
    guide, _, _ = fit(model, x)
    q = guide.posterior("p")
    close(guide.median()["p"], q.df[:, None, None] * q.covariance_matrix)
    assert guide(x)["p"].shape == (2, D, D)
    draws = Predictive(model, guide=guide, num_samples=500)(x)["p"]
    error = (draws.mean(0) - guide.median()["p"]) / (q.variance / 500).sqrt()
    assert error.abs().max() < 5
    with pytest.raises(CVIError, match=r"site 'p': a Wishart matrix.*posterior\('p'\)\.sample"):
        guide.quantiles([0.1, 0.9])
    other = AutoCVI(model)
    other.load_state_dict(guide.state_dict())
    other(x)
    close(other.posterior("p").precision_matrix, q.precision_matrix)
