"""Likelihoods of a latent Gaussian by quadrature: the bound against draws, and it never falls."""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

N = 40
T = torch.linspace(0, 4, N, dtype=torch.float64)
CUTS = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
phi = torch.special.ndtr

LIKELIHOODS: dict[str, Callable[[Tensor], dist.TorchDistribution]] = {
    "logit": lambda f: dist.Bernoulli(logits=f),
    "probit": lambda f: dist.Bernoulli(phi(f)),
    "cloglog": lambda f: dist.Bernoulli(-torch.expm1(-f.exp())),
    "binomial": lambda f: dist.Binomial(10, logits=f),
    "Poisson": lambda f: dist.Poisson(f.exp()),
    "Poisson, softplus": lambda f: dist.Poisson(torch.nn.functional.softplus(f)),
    "negative binomial": lambda f: dist.NegativeBinomial(3.0, logits=f),
    "Gamma-Poisson": lambda f: dist.GammaPoisson(3.0, 3.0 / f.exp()),
    "Student t": lambda f: dist.StudentT(4.0, f, 0.3),
    "Cauchy": lambda f: dist.Cauchy(f, 0.3),
    "Laplace": lambda f: dist.Laplace(f, 0.3),
    "Gamma": lambda f: dist.Gamma(2.0, 2.0 / f.exp()),
    "Exponential": lambda f: dist.Exponential(f.exp()),
    "Weibull": lambda f: dist.Weibull(f.exp(), 2.0),
    "Beta": lambda f: dist.Beta(5 * torch.sigmoid(f), 5 * torch.sigmoid(-f)),
    "von Mises": lambda f: dist.VonMises(f, 4.0),
    "ordinal": lambda f: dist.OrderedLogistic(f, CUTS),
    "zero-inflated Poisson": lambda f: dist.ZeroInflatedPoisson(
        f.exp(), gate=torch.tensor(0.3, dtype=torch.float64)
    ),
    "zero-inflated negative binomial": lambda f: dist.ZeroInflatedNegativeBinomial(
        3.0, logits=f, gate_logits=torch.tensor(-1.0, dtype=torch.float64)
    ),
    "mixture of signs": lambda f: dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.7, 0.3], dtype=torch.float64).expand(N, 2)),
        dist.Normal(torch.stack([f, -f], -1), 0.3),
    ),
    "softmax": lambda f: dist.Categorical(logits=torch.stack([f, -f, 0.5 * f + 1], -1)),
    "softmax in probabilities": lambda f: dist.Categorical(
        torch.softmax(torch.stack([f, -f, 0.5 * f + 1], -1), -1)
    ),
    "multinomial": lambda f: dist.Multinomial(
        5, torch.softmax(torch.stack([f, torch.zeros_like(f)], -1), -1)
    ),
}


def bound(
    model: Callable[[Tensor], None], guide: AutoCVI, y: Tensor, draws: int
) -> tuple[float, float]:
    """The negative bound and its standard error, from draws of the guide."""
    values = []
    for _ in range(draws):
        q = poutine.trace(guide).get_trace(y)
        p = poutine.trace(poutine.replay(model, q)).get_trace(y)
        values.append(float(q.log_prob_sum() - p.log_prob_sum()))
    found = torch.tensor(values)
    return float(found.mean()), float(found.std()) / draws**0.5


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_bound_is_that_of_draws(name: str) -> None:
    likelihood = LIKELIHOODS[name]
    kernel = torch.exp(-0.5 * (T[:, None] - T) ** 2 / 0.5) + 1e-6 * torch.eye(N)
    with torch.no_grad():
        y = likelihood(torch.sin(2 * T)).sample()

    def model(y: Tensor) -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(N), kernel))
        with pyro.plate("data", N):
            pyro.sample("y", likelihood(f), obs=y)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    result = cvi.run(y)
    assert {e.how for e in cvi.explain().edges} <= {"exact", "quadrature"}
    assert result.converged
    assert result.num_steps <= 20
    pairs = zip(result.losses, result.losses[1:], strict=False)
    assert max(b - a for a, b in pairs) <= 1e-9 * abs(result.losses[-1])
    mean, error = bound(model, guide, y, 400)
    assert abs(mean - result.losses[-1]) < 4 * error + 1e-3


def test_softmax_regression_reaches_the_bound_of_draws() -> None:
    x = torch.randn(200, 4)
    y = dist.Categorical(logits=x @ torch.randn(4, 3)).sample()

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", 200):
            pyro.sample("y", dist.Categorical(logits=x @ w + b), obs=y)

    guide = AutoCVI(model)
    result = CVI(model, guide).run(y)
    assert result.converged
    assert guide.plan.blocks[0].structure == "dense"
    mean, error = bound(model, guide, y, 1000)
    assert abs(mean - result.losses[-1]) < 4 * error + 1e-3
    # No draw of a Gaussian elsewhere does better: the slope of the bound in the mean is zero.
    q = guide.joint(["w", "b"])
    z = q.sample((4000,)).requires_grad_()
    w, b = z[:, :12].reshape(-1, 4, 3), z[:, 12:]
    logits = torch.einsum("nd,sdk->snk", x, w) + b[:, None, :]
    log_p = dist.Categorical(logits=logits).log_prob(y).sum(-1) - 0.5 * z.square().sum(-1)
    (g,) = torch.autograd.grad(log_p.sum(), z)
    slope = g.mean(0) * q.variance.sqrt()
    assert float(slope.abs().max()) < 5 * float((g * q.variance.sqrt()).std(0).max()) / math.sqrt(
        4000
    )
