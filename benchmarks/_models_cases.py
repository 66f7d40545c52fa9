"""Models on which fits once stopped too early, exploded, merged, or never ended; each with its data."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from _problem import Problem, problem
from torch import Tensor

# --- starts and stops -------------------------------------------------------------------------------


@problem("overlapping mixture")
def overlapping_mixture() -> Problem:
    def model(y: Tensor) -> None:
        p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Categorical(p))
            pyro.sample("y", dist.Normal(mu[z], tau[z].rsqrt()), obs=y)

    y = torch.cat([torch.randn(500) - 1.2, torch.randn(500) + 1.2])
    return Problem(model, (y,), ("z",), 1)


@problem("mixture with HalfNormal scales")
def mixture_of_scales() -> Problem:
    def model(y: Tensor) -> None:
        theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Bernoulli(theta)).long()
            pyro.sample("y", dist.Normal(mu[z], sigma[z]), obs=y)

    return Problem(
        model, (torch.cat([torch.randn(310) - 2.75, torch.randn(190) + 2.85]),), ("z",), 1
    )


def _far(mean: float, sd: float) -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.full((3,), mean), sd).to_event(1))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Poisson((X @ w).exp()), obs=y)

    X = torch.cat([torch.ones(100, 1), torch.randn(100, 2)], 1)
    return Problem(model, (X, torch.poisson((X @ torch.tensor([1.0, 0.3, 0.1])).exp())))


@problem("Poisson regression, prior at 10")
def far_start() -> Problem:
    return _far(10.0, 10.0)


@problem("Poisson regression, prior at -20")
def farther_start() -> Problem:
    return _far(-20.0, 20.0)


def _saddle(mean: float) -> Problem:
    def model(data: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(mean, 5.0))
        with pyro.plate("data", len(data)):
            pyro.sample("x", dist.Normal(z * z, 0.1), obs=data)

    return Problem(model, (4.0 + 0.1 * torch.randn(20),))


@problem("a square seen, prior at 0")
def symmetric_saddle() -> Problem:
    return _saddle(0.0)


@problem("a square seen, prior at 1")
def asymmetric_saddle() -> Problem:
    return _saddle(1.0)


@problem("even in a sum of squares")
def sum_of_squares() -> Problem:
    def model(data: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(data)):
            pyro.sample("x", dist.Normal(a * a + b * b, 1.0), obs=data)

    return Problem(model, (9.0 + torch.randn(30),))


@problem("a scale with a Normal prior")
def signed_scale() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        s = pyro.sample("s", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", 12):
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(s * eta[x], 0.5), obs=y)

    group = torch.arange(96) % 12
    return Problem(model, (group, 1.5 * torch.randn(12)[group] + 0.5 * torch.randn(96)))


# --- what is not conjugate --------------------------------------------------------------------------


@problem("Weibull regression, censored")
def weibull_censored() -> Problem:
    def model(X: Tensor, t: Tensor, censored: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        k = pyro.sample("k", dist.HalfNormal(3.0))
        scale = torch.exp(b + X @ w)
        with pyro.plate("rows", len(X)):
            z = (t / scale) ** k
            seen = torch.log(k / scale) + (k - 1) * torch.log(t / scale) - z
            pyro.factor("likelihood", torch.where(censored, -z, seen))

    X = torch.randn(200, 2)
    scale = torch.exp(1.0 + X @ torch.tensor([0.5, -0.3]))
    t = dist.Weibull(scale, torch.full((200,), 1.7)).sample()
    end = torch.rand(200) * 6
    return Problem(model, (X, torch.minimum(t, end), t > end))


@problem("zero-inflated Poisson regression")
def zero_inflated_poisson() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.ZeroInflatedPoisson((b + X @ w).exp(), gate=gate), obs=y)

    X = torch.randn(400, 3)
    mean = torch.exp(0.5 + X @ torch.tensor([0.4, -0.3, 0.2]))
    return Problem(model, (X, torch.poisson(mean) * (torch.rand(400) > 0.35)))


def _wide(law: str) -> Problem:
    """Covariates of scale 10 under wide priors: rates of inf at a draw from the prior."""

    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 10.0).to_event(1))
        a = pyro.sample("a", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", laws[law](X @ w, a), obs=y)

    laws = {
        "Weibull": lambda f, a: dist.Weibull(f.exp(), a),
        "Gamma": lambda f, a: dist.Gamma(a, a / f.exp()),
        "GammaPoisson": lambda f, a: dist.GammaPoisson(a, a / f.exp()),
        "Beta": lambda f, a: dist.Beta(a * f.sigmoid(), a * (1 - f.sigmoid())),
    }
    X = torch.cat([torch.ones(100, 1), 10 * torch.randn(100, 2)], 1)
    y = laws[law](X @ torch.tensor([0.5, 0.03, -0.02]), torch.tensor(2.0)).sample()
    return Problem(model, (X, y.clamp(1e-6, 1 - 1e-6) if law == "Beta" else y))


for _law in ("Weibull", "Gamma", "GammaPoisson", "Beta"):
    problem(f"{_law} regression, wide covariates")(lambda law=_law: _wide(law))


@problem("MA(1) by recursion")
def recursion() -> Problem:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        theta = pyro.sample("theta", dist.Normal(0.0, 0.5))
        error, errors = torch.zeros(()), []
        for t in range(len(y)):
            error = y[t] - mu - theta * error
            errors.append(error)
        with pyro.plate("time", len(y)):
            pyro.sample("error", dist.Normal(torch.stack(errors, -1), 1.0), obs=torch.zeros(len(y)))

    e = torch.randn(101)
    return Problem(model, (0.5 + e[1:] + 0.4 * e[:-1],))


@problem("measurement error")
def measurement_error() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 5.0))
        t = pyro.sample("t", dist.HalfCauchy(2.0))
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        s = pyro.sample("s", dist.HalfCauchy(1.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(m, t))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)
            pyro.sample("y", dist.Normal(a + b * z, s), obs=y)

    z = torch.randn(100) * 1.5 + 2
    return Problem(model, (z + 0.5 * torch.randn(100), 1 + 0.8 * z + 0.3 * torch.randn(100)))


@problem("stochastic volatility in a loop")
def volatility_loop() -> Problem:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(-1.0, 2.0))
        phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
        s = pyro.sample("s", dist.HalfCauchy(0.5))
        h = pyro.sample("h0", dist.Normal(mu, s / (1 - phi**2).sqrt()))
        for t in pyro.markov(range(len(y))):
            if t:
                h = pyro.sample(f"h{t}", dist.Normal(mu + phi * (h - mu), s))
            pyro.sample(f"y{t}", dist.Normal(0.0, (h / 2).exp()), obs=y[t])

    h = -1.0 + (0.3 * torch.randn(40)).cumsum(0)
    return Problem(model, ((h / 2).exp() * torch.randn(40),))
