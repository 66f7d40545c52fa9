"""Series: autoregressions, moving averages, volatility, levels, seasons, points of change."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from _common import arrays
from _problem import Problem, problem
from torch import Tensor

# --- observed recursions ----------------------------------------------------------------------------


def _ar(count: int, first: float, second: float = 0.0) -> Tensor:
    y = [torch.zeros(()), torch.zeros(())]
    for _ in range(count):
        y.append(first * y[-1] + second * y[-2] + 0.5 * torch.randn(()))
    return torch.stack(y[2:])


@problem("AR(2) with bounded coefficients")
def ar2() -> Problem:
    def model(y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 5.0))
        phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        mean = level + phi[0] * (y[1:-1] - level) + phi[1] * (y[:-2] - level)
        with pyro.plate("time", len(y) - 2):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y[2:])

    return Problem(model, (3.0 + _ar(120, 0.5, 0.3),))


@problem("GARCH(1,1)")
def garch() -> Problem:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        omega = pyro.sample("omega", dist.HalfNormal(0.5))
        alpha = pyro.sample("alpha", dist.Beta(2.0, 8.0))
        beta = pyro.sample("beta", dist.Beta(8.0, 2.0))
        variance, variances = y.var(), []
        for t in range(len(y)):
            if t:
                variance = omega + alpha * (y[t - 1] - mu) ** 2 + beta * variance
            variances.append(variance)
        with pyro.plate("time", len(y)):
            pyro.sample("y", dist.Normal(mu, torch.stack(variances, -1).sqrt()), obs=y)

    y, variance = [torch.zeros(())], torch.ones(())
    for _ in range(100):
        variance = 0.1 + 0.15 * y[-1] ** 2 + 0.75 * variance
        y.append(variance.sqrt() * torch.randn(()))
    return Problem(model, (torch.stack(y[1:]),))


@problem("exponential smoothing")
def smoothing() -> Problem:
    def model(y: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Uniform(0.0, 1.0))
        level = pyro.sample("level", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        means = []
        for t in range(len(y)):
            means.append(level)
            level = level + alpha * (y[t] - level)
        with pyro.plate("time", len(y)):
            pyro.sample("y", dist.Normal(torch.stack(means, -1), sigma), obs=y)

    return Problem(model, ((0.4 * torch.randn(60)).cumsum(0) + 0.8 * torch.randn(60),))


# --- latent levels ----------------------------------------------------------------------------------


@problem("Nile, local level by innovations")
def nile() -> Problem:
    def model(y: Tensor) -> None:
        start = pyro.sample("start", dist.Normal(0.0, 5.0))
        step = pyro.sample("step", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        with pyro.plate("innovations", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        level = start + step * z.cumsum(-1)
        with pyro.plate("time", len(y)):
            pyro.sample("y", dist.Normal(level, sigma), obs=y)

    y = torch.as_tensor(arrays("nile")["flow"]).to(torch.get_default_dtype())
    return Problem(model, ((y - y.mean()) / y.std(),))


@problem("stochastic volatility, not centred")
def volatility() -> Problem:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(-1.0, 2.0))
        phi = pyro.sample("phi", dist.Beta(20.0, 1.5))
        s = pyro.sample("s", dist.HalfNormal(0.5))
        with pyro.plate("innovations", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        h = [z[0] * s / (1 - phi**2).sqrt()]
        for t in range(1, len(y)):
            h.append(phi * h[-1] + s * z[t])
        with pyro.plate("time", len(y)):
            pyro.sample("y", dist.Normal(0.0, ((mu + torch.stack(h, -1)) / 2).exp()), obs=y)

    return Problem(model, ((-0.5 + _ar(60, 0.95) / 2).exp() * torch.randn(60),))


@problem("random walk of volatility, Student t returns")
def volatility_walk() -> Problem:
    def model(y: Tensor) -> None:
        step = pyro.sample("step", dist.Exponential(10.0))
        df = pyro.sample("df", dist.Exponential(0.1))
        first = pyro.sample("first", dist.Normal(0.0, 2.0))
        with pyro.plate("time", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        h = first + step * z.cumsum(-1)
        with pyro.plate("returns", len(y)):
            pyro.sample("y", dist.StudentT(df, 0.0, h.exp()), obs=y)

    return Problem(model, ((0.15 * torch.randn(100)).cumsum(0).exp() * torch.randn(100),))


@problem("counts over a latent AR(1)")
def latent_counts() -> Problem:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        x = pyro.sample("x_0", dist.Normal(mu, 1.0))
        for t in pyro.markov(range(len(y))):
            if t:
                x = pyro.sample(f"x_{t}", dist.Normal(mu + phi * (x - mu), s))
            pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=y[t])

    return Problem(model, (torch.poisson((1.0 + _ar(30, 0.8)).exp()),))


@problem("trend, season and level")
def season() -> Problem:
    def model(y: Tensor) -> None:
        n = len(y)
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        level = pyro.sample("level", dist.Normal(0.0, 5.0))
        waves = pyro.sample("waves", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        step = pyro.sample("step", dist.HalfNormal(0.5))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        drift = pyro.sample("drift", dist.Normal(torch.zeros(n), 1.0).to_event(1))
        t = torch.arange(n) / 12.0
        angle = 2 * math.pi * t
        basis = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], -1)
        mean = level + slope * t + basis @ waves + step * drift.cumsum(-1)
        with pyro.plate("time", n):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    t = torch.arange(60) / 12.0
    wave = (2 * math.pi * t).sin() + 0.4 * (4 * math.pi * t).cos()
    y = 2.0 + 0.3 * t + wave + (0.1 * torch.randn(60)).cumsum(0) + 0.3 * torch.randn(60)
    return Problem(model, (y,))


@problem("coefficients that walk")
def walking_coefficients() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        step = pyro.sample("step", dist.HalfCauchy(0.2).expand([2]).to_event(1))
        b = pyro.sample("b_0", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        for t in pyro.markov(range(len(y))):
            if t:
                b = pyro.sample(f"b_{t}", dist.Normal(b, step).to_event(1))
            pyro.sample(f"y_{t}", dist.Normal(b[..., 0] + b[..., 1] * x[t], sigma), obs=y[t])

    x = torch.randn(40)
    b = torch.tensor([1.0, -1.0]) + (0.2 * torch.randn(40, 2)).cumsum(0)
    return Problem(model, (x, b[:, 0] + b[:, 1] * x + 0.3 * torch.randn(40)))


# --- points of change -------------------------------------------------------------------------------


def _disasters() -> Tensor:
    return torch.cat([torch.poisson(torch.full((40,), 3.1)), torch.poisson(torch.full((70,), 0.9))])


@problem("point of change by a sigmoid")
def change_smooth() -> Problem:
    def model(y: Tensor) -> None:
        early = pyro.sample("early", dist.Exponential(0.5))
        late = pyro.sample("late", dist.Exponential(0.5))
        when = pyro.sample("when", dist.Uniform(0.0, 110.0))
        weight = torch.sigmoid(2.0 * (torch.arange(110) - when))
        with pyro.plate("years", len(y)):
            pyro.sample("y", dist.Poisson(early * (1 - weight) + late * weight), obs=y)

    return Problem(model, (_disasters(),))


@problem("point of change summed out")
def change_marginal() -> Problem:
    def model(y: Tensor) -> None:
        early = pyro.sample("early", dist.Gamma(1.0, 0.5))
        late = pyro.sample("late", dist.Gamma(1.0, 0.5))
        a, b = dist.Poisson(early).log_prob(y), dist.Poisson(late).log_prob(y)
        before = torch.cat([torch.zeros(1), a.cumsum(-1)[:-1]])
        after = b.sum() - torch.cat([torch.zeros(1), b.cumsum(-1)[:-1]])
        pyro.factor("y", torch.logsumexp(before + after - math.log(len(y)), -1))

    return Problem(model, (_disasters(),))


@problem("point of change as a latent")
def change_latent() -> Problem:
    def model(y: Tensor) -> None:
        rates = pyro.sample("rates", dist.Gamma(1.0, 0.5).expand([2]).to_event(1))
        when = pyro.sample("when", dist.Categorical(torch.ones(len(y))))
        late = (torch.arange(len(y)) >= when.unsqueeze(-1)).long()
        pyro.sample("y", dist.Poisson(rates[late]).to_event(1), obs=y)

    return Problem(model, (_disasters(),), ("when",), 0)


@problem("broken line")
def broken_line() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        slopes = pyro.sample("slopes", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        where = pyro.sample("where", dist.Normal(5.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        bend = torch.nn.functional.softplus(4.0 * (x - where)) / 4.0
        with pyro.plate("rows", len(x)):
            mean = a + slopes[0] * x + slopes[1] * bend
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    x = torch.linspace(0.0, 10.0, 60)
    return Problem(model, (x, 1 + 0.8 * x - 1.2 * (x - 6).clamp(min=0.0) + 0.4 * torch.randn(60)))


# --- hidden states ----------------------------------------------------------------------------------


@problem("regimes of volatility, hidden Markov")
def regimes() -> Problem:
    def model(y: Tensor) -> None:
        moves = pyro.sample("moves", dist.Dirichlet(torch.eye(2) * 8 + 1).to_event(1))
        with pyro.plate("states", 2):
            sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        z = torch.tensor(0)
        for t in pyro.markov(range(len(y))):
            z = pyro.sample(f"z_{t}", dist.Categorical(moves[..., z, :]))
            pyro.sample(f"y_{t}", dist.Normal(0.0, sigma[..., z]), obs=y[t])

    state = (torch.arange(40) // 10) % 2
    y = torch.where(state == 0, 0.3, 2.0) * torch.randn(40)
    return Problem(model, (y,), tuple(f"z_{t}" for t in range(40)), 1)


@problem("animals seen again, states by month")
def recapture() -> Problem:
    """Survival changes with a covariate of the month; states that are hidden after the last sight."""

    def model(x: Tensor, seen: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
        rho = pyro.sample("rho", dist.Beta(1.0, 1.0))
        with pyro.plate("animals", len(seen)):
            z = torch.ones(len(seen))
            for t in pyro.markov(range(seen.shape[1])):
                if t:
                    alive = torch.sigmoid(b[0] + b[1] * x[t])
                    law = dist.Bernoulli(z * alive)
                    z = pyro.sample(f"z_{t}", law, infer={"enumerate": "parallel"})
                    pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=seen[:, t])

    x, seen, alive = torch.randn(6), torch.ones(60, 6), torch.ones(60)
    for t in range(1, 6):
        alive = alive * torch.bernoulli(torch.sigmoid(1.0 + 0.5 * x[t]).expand(60))
        seen[:, t] = alive * (torch.rand(60) < 0.7)
    return Problem(model, (x, seen), tuple(f"z_{t}" for t in range(1, 6)), 1)
