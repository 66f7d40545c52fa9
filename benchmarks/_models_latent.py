"""Latent structure: items and persons, factors, mixtures, occupancy, processes, small networks."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from _problem import Problem, problem
from torch import Tensor

# --- items, persons, players ------------------------------------------------------------------------


def _answers(persons: int, items: int) -> Tensor:
    ability, difficulty = torch.randn(persons, 1), torch.randn(items)
    slope = (0.3 * torch.randn(items)).exp()
    return torch.bernoulli(torch.sigmoid(slope * (ability - difficulty)))


@problem("item response, one parameter")
def rasch() -> Problem:
    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        s = pyro.sample("s", dist.HalfNormal(2.0))
        with pyro.plate("items", y.shape[1], dim=-1):
            b = pyro.sample("b", dist.Normal(mean, s))
        with pyro.plate("persons", len(y), dim=-2):
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            with pyro.plate("answers", y.shape[1], dim=-1):
                pyro.sample("y", dist.Bernoulli(logits=theta - b), obs=y)

    return Problem(model, (_answers(40, 12),))


@problem("item response, two parameters")
def two_parameters() -> Problem:
    def model(y: Tensor) -> None:
        persons, items = y.shape
        theta = pyro.sample("theta", dist.Normal(torch.zeros(persons), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(torch.zeros(items), 2.0).to_event(1))
        a = pyro.sample("a", dist.LogNormal(torch.zeros(items), 0.5).to_event(1))
        logits = a * (theta.unsqueeze(-1) - b)
        with pyro.plate("persons", persons, dim=-2), pyro.plate("items", items, dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    return Problem(model, (_answers(40, 10),))


@problem("ideal points of votes")
def ideal_points() -> Problem:
    def model(y: Tensor) -> None:
        members, bills = y.shape
        with pyro.plate("members", members, dim=-2):
            x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("bills", bills, dim=-1):
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
            b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", members, dim=-2), pyro.plate("columns", bills, dim=-1):
            pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    x = torch.randn(25, 1)
    return Problem(
        model, (torch.bernoulli(torch.sigmoid(torch.randn(20) + 2 * torch.randn(20) * x)),)
    )


@problem("Bradley-Terry")
def bradley_terry() -> Problem:
    def model(home: Tensor, away: Tensor, won: Tensor) -> None:
        s = pyro.sample("s", dist.HalfNormal(1.0))
        at_home = pyro.sample("at_home", dist.Normal(0.0, 1.0))
        with pyro.plate("teams", 10):
            skill = pyro.sample("skill", dist.Normal(0.0, s))
        with pyro.plate("games", len(won)):
            logits = at_home + skill[home] - skill[away]
            pyro.sample("won", dist.Bernoulli(logits=logits), obs=won)

    skill, home, away = torch.randn(10), torch.arange(150) % 10, torch.randint(1, 10, (150,))
    away = (home + away) % 10
    won = torch.bernoulli(torch.sigmoid(0.3 + skill[home] - skill[away]))
    return Problem(model, (home, away, won))


@problem("goals of football, attack and defence")
def football() -> Problem:
    def model(home: Tensor, away: Tensor, goals: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        at_home = pyro.sample("at_home", dist.Normal(0.0, 1.0))
        sds = pyro.sample("sds", dist.Gamma(2.0, 4.0).expand([2]).to_event(1))
        with pyro.plate("teams", 10):
            attack = pyro.sample("attack", dist.Normal(0.0, sds[0]))
            defence = pyro.sample("defence", dist.Normal(0.0, sds[1]))
        with pyro.plate("games", len(home)):
            first = (level + at_home + attack[home] - defence[away]).exp()
            second = (level + attack[away] - defence[home]).exp()
            pyro.sample("first", dist.Poisson(first), obs=goals[0])
            pyro.sample("second", dist.Poisson(second), obs=goals[1])

    a, d = 0.3 * torch.randn(10), 0.3 * torch.randn(10)
    home, away = torch.cartesian_prod(torch.arange(10), torch.arange(10)).unbind(-1)
    home, away = home[home != away], away[home != away]
    rates = torch.stack([0.3 + a[home] - d[away], a[away] - d[home]]).exp()
    return Problem(model, (home, away, torch.poisson(rates)))


@problem("annotators who err")
def annotators() -> Problem:
    def model(y: Tensor) -> None:
        pi = pyro.sample("pi", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("annotators", y.shape[1], dim=-1):
            prior = (torch.eye(3) * 4 + 1).expand(y.shape[1], 3, 3)
            beta = pyro.sample("beta", dist.Dirichlet(prior).to_event(1))
        with pyro.plate("items", len(y), dim=-2):
            z = pyro.sample("z", dist.Categorical(pi), infer={"enumerate": "parallel"})
            with pyro.plate("votes", y.shape[1], dim=-1):
                law = dist.Categorical(beta[torch.arange(y.shape[1]), z])
                pyro.sample("y", law, obs=y)

    z = torch.randint(3, (40, 1))
    wrong = torch.rand(40, 4) < torch.tensor([0.1, 0.2, 0.3, 0.4])
    return Problem(model, (torch.where(wrong, torch.randint(3, (40, 4)), z),), ("z",), 2)


# --- factors ----------------------------------------------------------------------------------------


@problem("factor analysis")
def factors() -> Problem:
    def model(y: Tensor) -> None:
        W = pyro.sample("W", dist.Normal(torch.zeros(2, y.shape[1]), 1.0).to_event(2))
        psi = pyro.sample("psi", dist.InverseGamma(torch.full((y.shape[1],), 2.0), 1.0).to_event(1))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(z @ W, psi.sqrt()).to_event(1), obs=y)

    y = torch.randn(60, 2) @ torch.randn(2, 6) + 0.5 * torch.randn(60, 6)
    return Problem(model, (y,))


@problem("factorisation of ratings, biases and gaps")
def ratings() -> Problem:
    def model(user: Tensor, film: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(3.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("users", 20):
            a = pyro.sample("a", dist.Normal(0.0, 0.5))
            u = pyro.sample("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("films", 15):
            b = pyro.sample("b", dist.Normal(0.0, 0.5))
            v = pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("ratings", len(y)):
            mean = mu + a[user] + b[film] + (u[user] * v[film]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    user, film = torch.randint(20, (200,)), torch.randint(15, (200,))
    mean = 3 + (torch.randn(20, 2)[user] * torch.randn(15, 2)[film]).sum(-1)
    return Problem(model, (user, film, mean + 0.4 * torch.randn(200)))


@problem("covariance of a table, LKJ")
def covariance() -> Problem:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfCauchy(torch.full((3,), 2.0)).to_event(1))
        L = pyro.sample("L", dist.LKJCholesky(3, 1.0))
        with pyro.plate("rows", len(y)):
            law = dist.MultivariateNormal(mu, scale_tril=sd.unsqueeze(-1) * L)
            pyro.sample("y", law, obs=y)

    root = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.5, 0.9]])
    return Problem(model, (torch.randn(80, 3) @ root.T + torch.tensor([1.0, -2.0, 0.5]),))


@problem("counts by positive factors")
def positive_factors() -> Problem:
    def model(y: Tensor) -> None:
        with pyro.plate("columns", y.shape[1], dim=-1):
            H = pyro.sample("H", dist.Gamma(torch.full((3,), 0.5), 0.5).to_event(1))
        with pyro.plate("rows", len(y), dim=-2):
            W = pyro.sample("W", dist.Gamma(torch.full((3,), 0.5), 0.5).to_event(1))
            with pyro.plate("cells", y.shape[1], dim=-1):
                pyro.sample("y", dist.Poisson((W * H).sum(-1)), obs=y)

    W, H = dist.Gamma(0.7, 0.5).sample((20, 3)), dist.Gamma(0.7, 0.5).sample((3, 10))
    return Problem(model, (torch.poisson(W @ H),))


# --- mixtures ---------------------------------------------------------------------------------------

GALAXIES = [
    9.172, 9.350, 9.483, 9.558, 9.775, 10.227, 10.406, 16.084, 16.170, 18.419, 18.552, 18.600,
    18.927, 19.052, 19.070, 19.330, 19.343, 19.349, 19.440, 19.473, 19.529, 19.541, 19.547, 19.663,
    19.846, 19.856, 19.863, 19.914, 19.918, 19.973, 19.989, 20.166, 20.175, 20.179, 20.196, 20.215,
    20.221, 20.415, 20.629, 20.795, 20.821, 20.846, 20.875, 20.986, 21.137, 21.492, 21.701, 21.814,
    21.921, 21.960, 22.185, 22.209, 22.242, 22.249, 22.314, 22.374, 22.495, 22.746, 22.747, 22.888,
    22.914, 23.206, 23.241, 23.263, 23.484, 23.538, 23.542, 23.666, 23.706, 23.711, 24.129, 24.285,
    24.289, 24.366, 24.717, 24.990, 25.633, 26.960, 26.995, 32.065, 32.789, 34.279,
]  # fmt: skip


@problem("galaxies, marginal mixture of three")
def galaxies() -> Problem:
    def model(y: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        mu = pyro.sample("mu", dist.Normal(torch.full((3,), 20.0), 10.0).to_event(1))
        sigma = pyro.sample("sigma", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
        law = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mu, sigma))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", law, obs=y)

    return Problem(model, (torch.tensor(GALAXIES),))


@problem("galaxies, components as latents")
def galaxies_latent() -> Problem:
    def model(y: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("components", 3):
            mu = pyro.sample("mu", dist.Normal(20.0, 10.0))
            sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("y", dist.Normal(mu[z], sigma[z]), obs=y)

    return Problem(model, (torch.tensor(GALAXIES),), ("z",), 1)


@problem("mixture of two regressions")
def regressions() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("lines", 2):
            a = pyro.sample("a", dist.Normal(0.0, 3.0))
            b = pyro.sample("b", dist.Normal(0.0, 3.0))
            s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Bernoulli(p)).long()
            pyro.sample("y", dist.Normal(a[z] + b[z] * x, s[z]), obs=y)

    x, z = torch.randn(150), torch.rand(150) < 0.4
    y = torch.where(z, 2.0 - 1.5 * x, -1.0 + x) + 0.4 * torch.randn(150)
    return Problem(model, (x, y), ("z",), 1)


@problem("mixture of Poissons")
def poissons() -> Problem:
    def model(y: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("components", 3):
            rate = pyro.sample("rate", dist.Gamma(1.0, 0.1))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("y", dist.Poisson(rate[z]), obs=y)

    return Problem(model, (torch.poisson(torch.tensor([1.0, 6.0, 20.0]).repeat(60)),), ("z",), 1)


# --- presence and detection -------------------------------------------------------------------------


@problem("occupancy, presence summed out")
def occupancy() -> Problem:
    def model(x: Tensor, seen: Tensor, visits: int) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        psi = torch.sigmoid(b[0] + b[1] * x)
        present = psi.log() + seen * p.log() + (visits - seen) * torch.log1p(-p)
        absent = torch.log1p(-psi)
        with pyro.plate("sites", len(x)):
            log_p = torch.where(seen > 0, present, torch.logaddexp(present, absent))
            pyro.factor("seen", log_p)

    x = torch.randn(120)
    z = torch.bernoulli(torch.sigmoid(0.4 + 0.9 * x))
    return Problem(model, (x, dist.Binomial(4, 0.4 * z).sample(), 4))


@problem("abundance from repeated counts, summed out")
def abundance() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        p = pyro.sample("p", dist.Uniform(0.0, 1.0))
        rate = torch.exp(b[0] + b[1] * x)
        n = torch.arange(40.0)
        prior = dist.Poisson(rate.unsqueeze(-1)).log_prob(n)
        counts = y.unsqueeze(-1)
        choose = (
            torch.lgamma(n + 1)
            - torch.lgamma(counts + 1)
            - torch.lgamma((n - counts).clamp(min=0.0) + 1)
        )
        seen = choose + counts * p.log() + (n - counts) * torch.log1p(-p)
        seen = torch.where(n >= counts, seen, torch.full((), -1e6))
        with pyro.plate("sites", len(x)):
            pyro.factor("y", torch.logsumexp(prior + seen.sum(-2), -1))

    x = torch.randn(40)
    N = torch.poisson(torch.exp(1.5 + 0.5 * x))
    return Problem(model, (x, torch.stack([dist.Binomial(N, 0.5).sample() for _ in range(3)], -1)))


@problem("closed population, chances by occasion")
def closed_population() -> Problem:
    """Animals that were never seen are added; whether they exist is summed out."""

    def model(y: Tensor) -> None:
        omega = pyro.sample("omega", dist.Uniform(0.0, 1.0))
        with pyro.plate("occasions", y.shape[1]):
            p = pyro.sample("p", dist.Beta(1.0, 1.0))
        log_p = (y * p.log() + (1 - y) * torch.log1p(-p)).sum(-1)
        exists = omega.log() + log_p
        never = torch.logaddexp(exists, torch.log1p(-omega))
        with pyro.plate("animals", len(y)):
            pyro.factor("y", torch.where(y.sum(-1) > 0, exists, never))

    y = torch.bernoulli(torch.tensor([0.2, 0.3, 0.4, 0.3, 0.2]).expand(80, 5))
    return Problem(model, (torch.cat([y, torch.zeros(70, 5)]),))


# --- processes --------------------------------------------------------------------------------------


def _kernel(x: Tensor, scale: Tensor, length: Tensor) -> Tensor:
    square = ((x[:, None] - x) / length) ** 2
    return scale**2 * torch.exp(-0.5 * square) + 1e-4 * torch.eye(len(x))


@problem("Gaussian process, three hyperparameters")
def process() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        length = pyro.sample("length", dist.InverseGamma(5.0, 5.0))
        scale = pyro.sample("scale", dist.HalfNormal(2.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        cov = _kernel(x, scale, length) + noise**2 * torch.eye(len(x))
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)

    x = torch.linspace(-3.0, 3.0, 35)
    return Problem(model, (x, (1.5 * x).sin() + 0.3 * torch.randn(35)))


@problem("Gaussian process of classes, whitened")
def process_classes() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        length = pyro.sample("length", dist.LogNormal(0.0, 0.5))
        scale = pyro.sample("scale", dist.LogNormal(0.5, 0.5))
        z = pyro.sample("z", dist.Normal(torch.zeros(len(x)), 1.0).to_event(1))
        f = torch.linalg.cholesky(_kernel(x, scale, length)) @ z
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    x = torch.linspace(-3.0, 3.0, 40)
    return Problem(model, (x, torch.bernoulli(torch.sigmoid(3.0 * (1.5 * x).sin()))))


@problem("intensity of a log-Gaussian Cox process")
def cox_process() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(1.0, 1.0))
        length = pyro.sample("length", dist.Gamma(4.0, 4.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        f = pyro.sample("f", dist.MultivariateNormal(mu.expand(len(x)), _kernel(x, scale, length)))
        with pyro.plate("bins", len(x)):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    x = torch.linspace(0.0, 6.0, 30)
    return Problem(model, (x, torch.poisson((1.5 + 0.8 * (1.2 * x).sin()).exp())))


# --- networks ---------------------------------------------------------------------------------------


@problem("network of one input, regression")
def network() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        w1 = pyro.sample("w1", dist.Normal(torch.zeros(1, 4), 2.0).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(torch.zeros(4), 2.0).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(torch.zeros(4, 1), 1.0).to_event(2))
        b2 = pyro.sample("b2", dist.Normal(0.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
        hidden = torch.tanh(x.unsqueeze(-1) @ w1 + b1)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal((hidden @ w2).squeeze(-1) + b2, sigma), obs=y)

    x = torch.linspace(-2.0, 2.0, 50)
    return Problem(model, (x, (2.0 * x).sin() + 0.15 * torch.randn(50)))


@problem("network of two inputs, classes")
def network_classes() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        w1 = pyro.sample("w1", dist.Normal(torch.zeros(2, 5), 1.5).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(torch.zeros(5), 1.0).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(torch.zeros(5), 1.5).to_event(1))
        b2 = pyro.sample("b2", dist.Normal(0.0, 1.5))
        with pyro.plate("rows", len(X)):
            logits = torch.relu(X @ w1 + b1) @ w2 + b2
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    X = torch.randn(80, 2)
    return Problem(model, (X, (X.square().sum(-1) > 1.4).to(X.dtype)))
