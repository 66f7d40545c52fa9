"""Loops of sample statements: one expectation for all of them, with the values of many."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI, explain
from pyro_cvi.graph import plan

N = 12


def walk(x):
    """A random walk, one site for each time, seen with noise."""
    z = None
    for t in range(len(x)):
        z = pyro.sample(f"z_{t}", dist.Normal(0.0 if z is None else 0.9 * z, 1.0))
        pyro.sample(f"x_{t}", dist.Normal(2 * z + 1, 0.5), obs=x[t])


def walk_covariance(n):
    step = torch.eye(n) - 0.9 * torch.diag(torch.ones(n - 1), -1)
    prior = torch.linalg.inv(step.T @ step)
    return prior, 4 * prior + 0.25 * torch.eye(n)


def test_a_walk_in_a_loop_is_the_joint_gaussian():
    x = torch.randn(N)
    guide = AutoCVI(walk)
    cvi = CVI(walk, guide)
    loss = cvi.step(x)
    assert len(guide.plan.factors) == 3  # the first state, the others, the data
    prior, marginal = walk_covariance(N)
    evidence = dist.MultivariateNormal(torch.ones(N), marginal).log_prob(x)
    assert cvi.evaluate_loss(x) == pytest.approx(-float(evidence), rel=1e-10)
    assert loss >= -float(evidence) - 1e-9
    gain = 2 * prior @ torch.linalg.inv(marginal)
    found = torch.stack([guide.posterior(f"z_{t}").loc for t in range(N)])
    torch.testing.assert_close(found, gain @ (x - 1))
    joint = guide.joint([f"z_{t}" for t in range(N)])
    torch.testing.assert_close(joint.covariance_matrix, prior - 2 * gain @ prior)
    report = explain(walk, x)
    assert {e.how for e in report.edges} == {"exact"}
    assert len(report.edges) == 1 + 2 * (N - 1) + N


def vectors(y, X):
    """Coefficients of every group around common ones, all in one block, and a common precision."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    for j in range(len(y)):
        w = pyro.sample(f"w_{j}", dist.Normal(mean, 0.5).to_event(1))
        with pyro.plate(f"rows_{j}", len(y[j])):
            pyro.sample(f"y_{j}", dist.Normal(X[j] @ w, tau.rsqrt()), obs=y[j])


def logistic(y, X):
    """Non-conjugate factors of different sites: quadrature."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    for j in range(len(y)):
        a = pyro.sample(f"a_{j}", dist.Normal(mu, 1.0))
        pyro.sample(
            f"y_{j}", dist.Bernoulli(logits=a + X[j, :, 0]).to_event(1), obs=1.0 * (y[j] > 1)
        )


def products(y, X):
    """Bilinear: the sites of one block times those of another."""
    u = pyro.sample("u", dist.Normal(1.0, 1.0))
    v = pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    for j in range(len(y)):
        a = pyro.sample(f"a_{j}", dist.Normal(u, 1.0))
        b = pyro.sample(f"b_{j}", dist.Normal(v + X[j, 0], 1.0).to_event(1))
        pyro.sample(f"y_{j}", dist.Normal((a * b).sum(-1), 0.5).expand([4]).to_event(1), obs=y[j])


@pytest.mark.parametrize("limit", [1000, 5])
@pytest.mark.parametrize("model", [vectors, logistic, products])
def test_a_loop_is_what_its_statements_are_one_by_one(model, limit, monkeypatch):
    X = torch.randn(6, 4, 2)
    y = torch.randn(6, 4) + 1
    found = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(plan, "alike", lambda factors, *args: [[f] for f in factors])
        pyro.set_rng_seed(0)
        guide = AutoCVI(model, max_dense_dim=limit)
        cvi = CVI(model, guide)
        losses = [cvi.step(y, X) for _ in range(6)]
        report = sorted((e.factor, e.site, e.how) for e in cvi.explain().edges)
        found.append((torch.tensor(losses), guide.median(), report, len(guide.plan.factors)))
    together, apart = found
    torch.testing.assert_close(together[0], apart[0], rtol=1e-9, atol=1e-9)
    for site, value in together[1].items():
        torch.testing.assert_close(value, apart[1][site], rtol=1e-6, atol=1e-7)
    assert together[2] == apart[2]
    assert together[3] < apart[3]


def test_a_site_with_the_name_of_a_block_is_read_as_itself():
    def model(x):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(a, 1.0))
        pyro.sample("a+b", dist.Gamma(1.0, 1.0))
        for i in range(3):
            pyro.sample(f"x_{i}", dist.Normal(a if i == 1 else b, 1.0), obs=x[i])

    x = torch.tensor([1.0, 2.0, 3.0])
    guide = AutoCVI(model)
    CVI(model, guide).step(x)
    precision = torch.tensor([[3.0, -1.0], [-1.0, 3.0]])
    mean = torch.linalg.solve(precision, torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(guide.posterior("a").loc, mean[0])
    torch.testing.assert_close(guide.posterior("b").loc, mean[1])
    assert math.isclose(float(guide.posterior("a+b").mean), 1.0)
