"""Posteriors and evidences known in closed form, in every shape in which a model can state them."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from scipy import special

from pyro_cvi import CVI, AutoCVI


def once(model, *args):
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    return guide, cvi.step(*args), cvi


# --- one latent: normal, Bernoulli and Poisson data ------------------------------------------------


def test_normal_data_with_a_normal_mean():
    y = torch.tensor([-0.1, 0.3, 1.0, 2.2])

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, torch.tensor(0.2).rsqrt()))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, torch.tensor(0.5).rsqrt()), obs=y)

    guide, loss, cvi = once(model, y)
    precision = 0.2 + 4 * 0.5
    q = guide.posterior("mean")
    assert float(q.mean) == pytest.approx(0.5 * float(y.sum()) / precision, rel=1e-12)
    assert float(q.variance) == pytest.approx(1 / precision, rel=1e-12)
    cov = torch.full((4, 4), 5.0) + 2 * torch.eye(4)
    evidence = dist.MultivariateNormal(torch.zeros(4), cov).log_prob(y)
    assert loss == pytest.approx(-float(evidence), rel=1e-12)
    assert cvi.step(y) == pytest.approx(loss, rel=1e-12)


def test_coins_with_a_beta_prior():
    y = torch.tensor([0.0, 1.0, 1.0, 1.0])

    def model(y):
        p = pyro.sample("p", dist.Beta(1.5, 2.5))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(p), obs=y)

    guide, loss, _ = once(model, y)
    q = guide.posterior("p")
    assert (float(q.concentration1), float(q.concentration0)) == (4.5, 3.5)
    assert loss == pytest.approx(special.betaln(1.5, 2.5) - special.betaln(4.5, 3.5), rel=1e-10)


def test_counts_with_a_gamma_rate():
    y = torch.tensor([1.0, 2.0, 0.0])

    def model(y):
        rate = pyro.sample("rate", dist.Gamma(1.0, 2.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide, loss, _ = once(model, y)
    q = guide.posterior("rate")
    assert (float(q.concentration), float(q.rate)) == pytest.approx((4.0, 5.0))
    evidence = math.log(2) + math.lgamma(4) - 4 * math.log(5) - math.log(2)
    assert loss == pytest.approx(-evidence, rel=1e-10)


@pytest.mark.parametrize("how", ["to_event", "plate", "loop", "expand"])
def test_the_same_model_in_other_shapes_has_the_same_bound(how):
    y = torch.tensor([0.3, -1.0, 2.0])

    def model(y):
        if how == "loop":
            z = torch.stack([pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0)) for i in range(3)])
        elif how == "plate":
            with pyro.plate("z_plate", 3):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
        elif how == "to_event":
            z = pyro.sample("z", dist.Normal(torch.zeros(3), torch.ones(3)).to_event(1))
        else:
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    _, loss, _ = once(model, y)
    assert loss == pytest.approx(
        -float(dist.Normal(0.0, math.sqrt(2)).log_prob(y).sum()), rel=1e-12
    )


# --- ELBO values: one datum, a batch, a tree -------------------------------------------------------


@pytest.mark.parametrize("is_exact", [True, False])
def test_one_datum_and_a_joint_prior(is_exact):
    """Correlated means are one block; in two plates' places the bound is the evidence all the same."""

    def model(x):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        w = z if is_exact else pyro.sample("w", dist.Normal(z, 1.0))
        pyro.sample("x", dist.Normal(w, 1.0), obs=x)

    x = torch.tensor(1.7)
    _, loss, cvi = once(model, x)
    scale = math.sqrt(2.0 if is_exact else 3.0)
    assert loss == pytest.approx(-float(dist.Normal(0.0, scale).log_prob(x)), rel=1e-12)
    assert Trace_ELBO().loss(model, cvi.guide, x) == pytest.approx(loss)  # at every draw


def test_a_batch_of_pairs():
    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            w = pyro.sample("w", dist.Normal(z, 2.0))
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    y = torch.randn(6)
    guide, loss, _ = once(model, y)
    assert loss == pytest.approx(
        -float(dist.Normal(0.0, math.sqrt(6)).log_prob(y).sum()), rel=1e-12
    )
    assert torch.allclose(guide.posterior("z").mean, y / 6)
    assert torch.allclose(guide.posterior("w").mean, 5 * y / 6)
    assert Trace_ELBO().loss(model, guide, y) == pytest.approx(loss)


def test_a_tree_of_plates():
    def model(y):
        root = pyro.sample("root", dist.Normal(0.0, 1.0))
        with pyro.plate("branches", 3, dim=-2):
            branch = pyro.sample("branch", dist.Normal(root, 1.0))
            with pyro.plate("leaves", 2, dim=-1):
                pyro.sample("y", dist.Normal(branch, 1.0), obs=y)

    y = torch.randn(3, 2)
    guide, loss, _ = once(model, y)
    same = torch.kron(torch.eye(3), torch.ones(2, 2))
    prior = torch.ones(6, 6) + same
    cov = prior + torch.eye(6)
    flat = y.reshape(-1)
    evidence = dist.MultivariateNormal(torch.zeros(6), cov).log_prob(flat)
    assert loss == pytest.approx(-float(evidence), rel=1e-11)
    mean = torch.ones(1, 6) @ torch.linalg.solve(cov, flat)
    assert float(guide.posterior("root").mean) == pytest.approx(float(mean), rel=1e-9)
    assert Trace_ELBO().loss(model, guide, y) == pytest.approx(loss)


# --- Gaussian chains and pyramids ------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("learn_top_only", [False, True])
def test_a_chain_of_means(depth, learn_top_only):
    """Means above means; the deepest has the data. `learn_top_only`: what is below is integrated out."""
    scales = [1.0 + 0.2 * k for k in range(depth)]
    y = torch.randn(5, 2) + 1

    def model(y):
        z = torch.zeros(2)
        for k, s in enumerate(scales):
            z = pyro.sample(f"z_{k}", dist.Normal(z, s).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, 0.9).to_event(1), obs=y)

    guide, loss, _ = once(model, y)
    total = torch.tensor(scales).square().cumsum(0)
    data, noise = y.mean(0), 0.81 / 5
    k = 0 if learn_top_only else depth - 1
    gain = total[k] / (total[-1] + noise)
    q = guide.posterior(f"z_{k}")
    assert torch.allclose(q.mean, gain * data, rtol=1e-9)
    assert torch.allclose(q.variance, (total[k] - gain * total[k]).expand(2), rtol=1e-8)
    cov = total[-1] * torch.ones(5, 5) + 0.81 * torch.eye(5)
    evidence = dist.MultivariateNormal(torch.zeros(5), cov).log_prob(y.mT).sum()
    assert loss == pytest.approx(-float(evidence), rel=1e-10)


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_a_pyramid_of_means(layers):
    y = torch.randn(2 ** (layers - 1), 3)

    def model(y):
        means = [pyro.sample("z_1", dist.Normal(0.0, 1.0))]
        while len(means) < len(y):
            n = 2 * len(means)
            means = [
                pyro.sample(f"z_{n + j}", dist.Normal(means[j // 2], 0.5 + 0.1 * j))
                for j in range(n)
            ]
        for j, m in enumerate(means):
            with pyro.plate(f"data_{j}", y.shape[1]):
                pyro.sample(f"y_{j}", dist.Normal(m, 0.8), obs=y[j])

    guide, loss, _ = once(model, y)
    cov = torch.ones(1, 1)
    lift = torch.ones(1)
    for _ in range(1, layers):
        n = 2 * len(cov)
        parent = torch.arange(n) // 2
        own = (0.5 + 0.1 * torch.arange(n, dtype=y.dtype)).square()
        cov, lift = cov[parent][:, parent] + torch.diag(own), lift[parent]
    full = torch.kron(cov, torch.ones(3, 3)) + 0.64 * torch.eye(3 * len(cov))
    flat = y.reshape(-1)
    evidence = dist.MultivariateNormal(torch.zeros(len(flat)), full).log_prob(flat)
    assert loss == pytest.approx(-float(evidence), rel=1e-10)
    # Every site below shares the root's value, whose prior variance is one.
    cross = lift.repeat_interleave(3)
    assert float(guide.posterior("z_1").mean) == pytest.approx(
        float(cross @ torch.linalg.solve(full, flat)), rel=1e-9
    )


def test_a_chain_with_a_link_that_is_not_reparameterised():
    """Whether draws could be differentiated matters to estimators, and not to algebra."""

    class Rough(dist.Normal):
        has_rsample = False

    def model(y, kind):
        a = pyro.sample("a", kind(torch.tensor(0.0), torch.tensor(1.0)))
        b = pyro.sample("b", dist.Normal(a, 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=y)

    y = torch.tensor(0.7)
    _, smooth, _ = once(model, y, dist.Normal)
    _, rough, _ = once(model, y, Rough)
    assert rough == pytest.approx(smooth, rel=0.05)
