"""Groups: rats, pumps, hospitals, trials, varying slopes, crossed effects; survival."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from _problem import Problem, problem
from torch import Tensor

# --- classics of BUGS -------------------------------------------------------------------------------

RATS = [
    [151, 199, 246, 283, 320], [145, 199, 249, 293, 354], [147, 214, 263, 312, 328],
    [155, 200, 237, 272, 297], [135, 188, 230, 280, 323], [159, 210, 252, 298, 331],
    [141, 189, 231, 275, 305], [159, 201, 248, 297, 338], [177, 236, 285, 350, 376],
    [134, 182, 220, 260, 296], [160, 208, 261, 313, 352], [143, 188, 220, 273, 314],
    [154, 200, 244, 289, 325], [171, 221, 270, 326, 358], [163, 216, 242, 281, 312],
    [160, 207, 248, 288, 324], [142, 187, 234, 280, 316], [156, 203, 243, 283, 317],
    [157, 212, 259, 307, 336], [152, 203, 246, 286, 321], [154, 205, 253, 298, 334],
    [139, 190, 225, 267, 302], [146, 191, 229, 272, 302], [157, 211, 250, 285, 323],
    [132, 185, 237, 286, 331], [160, 207, 257, 303, 345], [169, 216, 261, 295, 333],
    [157, 205, 248, 289, 316], [137, 180, 219, 258, 291], [153, 200, 244, 286, 324],
]  # fmt: skip


@problem("rats")
def rats() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        mu_a = pyro.sample("mu_a", dist.Normal(0.0, 1000.0))
        mu_b = pyro.sample("mu_b", dist.Normal(0.0, 1000.0))
        tau_a = pyro.sample("tau_a", dist.Gamma(0.1, 0.1))
        tau_b = pyro.sample("tau_b", dist.Gamma(0.1, 0.1))
        tau = pyro.sample("tau", dist.Gamma(0.1, 0.1))
        with pyro.plate("rats", len(y), dim=-2):
            a = pyro.sample("a", dist.Normal(mu_a, tau_a.rsqrt()))
            b = pyro.sample("b", dist.Normal(mu_b, tau_b.rsqrt()))
            with pyro.plate("weeks", len(x), dim=-1):
                pyro.sample("y", dist.Normal(a + b * x, tau.rsqrt()), obs=y)

    x = torch.tensor([8.0, 15.0, 22.0, 29.0, 36.0]) - 22.0
    return Problem(model, (x, torch.tensor(RATS).to(x.dtype)))


FAILURES = [5.0, 1.0, 5.0, 14.0, 3.0, 19.0, 1.0, 1.0, 4.0, 22.0]
HOURS = [94.3, 15.7, 62.9, 126.0, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5]


@problem("pumps")
def pumps() -> Problem:
    def model(t: Tensor, x: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Exponential(1.0))
        beta = pyro.sample("beta", dist.Gamma(0.1, 1.0))
        with pyro.plate("pumps", len(x)):
            theta = pyro.sample("theta", dist.Gamma(alpha, beta))
            pyro.sample("x", dist.Poisson(theta * t), obs=x)

    return Problem(model, (torch.tensor(HOURS), torch.tensor(FAILURES)))


OPERATIONS = [47, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360]
DEATHS = [0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24]


@problem("surgical")
def surgical() -> Problem:
    def model(n: Tensor, r: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
        var = pyro.sample("var", dist.InverseGamma(0.1, 0.1))
        with pyro.plate("hospitals", len(n)):
            b = pyro.sample("b", dist.Normal(mu, var.sqrt()))
            pyro.sample("r", dist.Binomial(n, logits=b), obs=r)

    dtype = torch.get_default_dtype()
    return Problem(model, (torch.tensor(OPERATIONS).to(dtype), torch.tensor(DEATHS).to(dtype)))


TREATED = [3, 7, 5, 102, 28, 4, 98, 60, 25, 138, 64, 45, 9, 57, 25, 33, 28, 8, 6, 32, 27, 22]
OF_TREATED = [
    38, 114, 69, 1533, 355, 59, 945, 632, 278, 1916, 873, 263, 291, 858, 154, 207, 251, 151, 174,
    209, 391, 680,
]  # fmt: skip
CONTROL = [3, 14, 11, 127, 27, 6, 152, 48, 37, 188, 52, 47, 16, 45, 31, 38, 12, 6, 3, 40, 43, 39]
OF_CONTROL = [
    39, 116, 93, 1520, 365, 52, 939, 471, 282, 1921, 583, 266, 293, 883, 147, 213, 122, 154, 134,
    218, 364, 674,
]  # fmt: skip


@problem("blocker")
def blocker() -> Problem:
    def model(rt: Tensor, nt: Tensor, rc: Tensor, nc: Tensor) -> None:
        d = pyro.sample("d", dist.Normal(0.0, 10.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        with pyro.plate("trials", len(rt)):
            mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
            delta = pyro.sample("delta", dist.StudentT(4.0, d, sigma))
            pyro.sample("rc", dist.Binomial(nc, logits=mu), obs=rc)
            pyro.sample("rt", dist.Binomial(nt, logits=mu + delta), obs=rt)

    data = (TREATED, OF_TREATED, CONTROL, OF_CONTROL)
    return Problem(model, tuple(torch.tensor(d).to(torch.get_default_dtype()) for d in data))


APPLIED = [825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341]
ADMITTED = [512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24]


@problem("admissions, beta-binomial")
def admissions() -> Problem:
    def model(n: Tensor, male: Tensor, admitted: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.5))
        b = pyro.sample("b", dist.Normal(0.0, 1.5))
        theta = pyro.sample("theta", dist.Exponential(1.0)) + 2.0
        p = torch.sigmoid(a + b * male)
        with pyro.plate("rows", len(n)):
            law = dist.BetaBinomial(p * theta, (1 - p) * theta, n)
            pyro.sample("admitted", law, obs=admitted)

    dtype = torch.get_default_dtype()
    male = torch.tensor([1.0, 0.0] * 6)
    return Problem(model, (torch.tensor(APPLIED).to(dtype), male, torch.tensor(ADMITTED).to(dtype)))


# --- varying effects --------------------------------------------------------------------------------


def _slopes(groups: int = 12, rows: int = 180) -> tuple[Tensor, Tensor, Tensor]:
    group, x = torch.arange(rows) % groups, torch.randn(rows)
    own = torch.randn(groups, 2) @ torch.tensor([[0.8, -0.3], [0.0, 0.4]])
    return group, x, 1.0 + own[group, 0] + (0.5 + own[group, 1]) * x + 0.6 * torch.randn(rows)


@problem("varying slopes, LKJ, centred")
def slopes_centred() -> Problem:
    def model(group: Tensor, x: Tensor, y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(torch.ones(2)).to_event(1))
        L = pyro.sample("L", dist.LKJCholesky(2, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("groups", 12):
            own = pyro.sample("own", dist.MultivariateNormal(mean, scale_tril=sd.unsqueeze(-1) * L))
        with pyro.plate("rows", len(y)):
            mu = own[..., group, 0] + own[..., group, 1] * x
            pyro.sample("y", dist.Normal(mu, sigma), obs=y)

    return Problem(model, _slopes())


@problem("varying slopes, LKJ, not centred")
def slopes() -> Problem:
    def model(group: Tensor, x: Tensor, y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sd = pyro.sample("sd", dist.Exponential(torch.ones(2)).to_event(1))
        L = pyro.sample("L", dist.LKJCholesky(2, 2.0))
        sigma = pyro.sample("sigma", dist.Exponential(1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(2, 12), 1.0).to_event(2))
        own = mean.unsqueeze(-1) + (sd.unsqueeze(-1) * L) @ z
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(own[0, group] + own[1, group] * x, sigma), obs=y)

    return Problem(model, _slopes())


@problem("varying slopes without correlation, HalfCauchy")
def slopes_apart() -> Problem:
    def model(group: Tensor, x: Tensor, y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        sds = pyro.sample("sds", dist.HalfCauchy(torch.ones(2)).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        with pyro.plate("groups", 12):
            a = pyro.sample("a", dist.Normal(mean[0], sds[0]))
            b = pyro.sample("b", dist.Normal(mean[1], sds[1]))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(a[group] + b[group] * x, sigma), obs=y)

    return Problem(model, _slopes())


@problem("radon, level of the county by soil")
def radon() -> Problem:
    def model(county: Tensor, floor: Tensor, soil: Tensor, y: Tensor) -> None:
        g = pyro.sample("g", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("counties", len(soil)):
            raw = pyro.sample("raw", dist.Normal(0.0, 1.0))
        a = g[0] + g[1] * soil + tau * raw
        with pyro.plate("houses", len(y)):
            pyro.sample("y", dist.Normal(a[county] + b * floor, sigma), obs=y)

    county, soil = torch.randint(20, (200,)), torch.randn(20)
    floor = (torch.rand(200) < 0.2).to(soil.dtype)
    a = 1.5 + 0.7 * soil + 0.3 * torch.randn(20)
    return Problem(model, (county, floor, soil, a[county] - 0.6 * floor + 0.7 * torch.randn(200)))


@problem("crossed effects, logistic")
def crossed() -> Problem:
    def model(row: Tensor, column: Tensor, x: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        t = pyro.sample("t", dist.HalfNormal(1.0))
        with pyro.plate("subjects", 15):
            u = pyro.sample("u", dist.Normal(0.0, s))
        with pyro.plate("items", 10):
            v = pyro.sample("v", dist.Normal(0.0, t))
        with pyro.plate("rows", len(y)):
            logits = b[0] + b[1] * x + u[row] + v[column]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    row, column = torch.arange(300) % 15, torch.randint(10, (300,))
    x = torch.randn(300)
    f = 0.3 + 0.8 * x + torch.randn(15)[row] + 0.7 * torch.randn(10)[column]
    return Problem(model, (row, column, x, torch.bernoulli(torch.sigmoid(f))))


@problem("Poisson with effects of rows, epilepsy")
def overdispersed() -> Problem:
    def model(X: Tensor, patient: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(1.0, 0.1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        with pyro.plate("patients", 30):
            b = pyro.sample("b", dist.Normal(0.0, tau.rsqrt()))
        with pyro.plate("rows", len(y)):
            e = pyro.sample("e", dist.Normal(0.0, sigma))
            pyro.sample("y", dist.Poisson(torch.exp(X @ w + b[patient] + e)), obs=y)

    patient = torch.arange(120) // 4
    X = torch.cat([torch.ones(120, 1), torch.randn(120, 2)], 1)
    f = X @ torch.tensor([1.5, 0.4, -0.3]) + 0.5 * torch.randn(30)[patient] + 0.3 * torch.randn(120)
    return Problem(model, (X, patient, torch.poisson(f.exp())))


@problem("variances of groups from a common law")
def variances() -> Problem:
    def model(group: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        level = pyro.sample("level", dist.Normal(0.0, 2.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        with pyro.plate("groups", 10):
            log_sd = pyro.sample("log_sd", dist.Normal(level, spread))
            theta = pyro.sample("theta", dist.Normal(mu, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(theta[group], log_sd.exp()[group]), obs=y)

    group = torch.arange(100) % 10
    sd = (0.5 * torch.randn(10)).exp()
    return Problem(model, (group, (3 + torch.randn(10))[group] + sd[group] * torch.randn(100)))


@problem("proportions of groups, Dirichlet with unknown concentration")
def dirichlet_multinomial() -> Problem:
    def model(y: Tensor) -> None:
        centre = pyro.sample("centre", dist.Dirichlet(torch.ones(4)))
        kappa = pyro.sample("kappa", dist.LogNormal(2.0, 1.0))
        with pyro.plate("groups", len(y)):
            p = pyro.sample("p", dist.Dirichlet(centre * kappa + 1e-3))
            pyro.sample("y", dist.Multinomial(40, p), obs=y)

    p = dist.Dirichlet(8.0 * torch.tensor([0.4, 0.3, 0.2, 0.1])).sample((15,))
    y = torch.stack([dist.Multinomial(40, row).sample() for row in p])
    return Problem(model, (y,))


@problem("Dirichlet-multinomial, marginal")
def dirichlet_multinomial_marginal() -> Problem:
    def model(y: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Exponential(0.2).expand([4]).to_event(1))
        with pyro.plate("groups", len(y)):
            pyro.sample("y", dist.DirichletMultinomial(alpha, 40), obs=y)

    p = dist.Dirichlet(8.0 * torch.tensor([0.4, 0.3, 0.2, 0.1])).sample((15,))
    return Problem(model, (torch.stack([dist.Multinomial(40, row).sample() for row in p]),))


# --- survival ---------------------------------------------------------------------------------------


def _censored(t: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    end = torch.rand(len(t)) * limit
    return torch.minimum(t, end), (t > end).to(t.dtype)


@problem("log-normal survival, censored")
def log_normal_survival() -> Problem:
    def model(X: Tensor, t: Tensor, censored: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        loc = X @ b
        z = (t.log() - loc) / sigma
        log_seen = dist.LogNormal(loc, sigma).log_prob(t)
        with pyro.plate("rows", len(t)):
            tail = torch.special.log_ndtr(-z)
            pyro.factor("t", censored * tail + (1 - censored) * log_seen)

    X = torch.cat([torch.ones(150, 1), torch.randn(150, 2)], 1)
    t = torch.exp(X @ torch.tensor([1.0, 0.5, -0.4]) + 0.8 * torch.randn(150))
    return Problem(model, (X, *_censored(t, 12.0)))


@problem("log-logistic survival, censored")
def log_logistic_survival() -> Problem:
    def model(x: Tensor, t: Tensor, censored: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
        u = shape * (t.log() - a - b * x)
        tail = -torch.nn.functional.softplus(u)
        with pyro.plate("rows", len(t)):
            pyro.factor("t", tail + (1 - censored) * (shape.log() - t.log() + u + tail))

    x = torch.randn(150)
    noise = torch.logit(torch.rand(150).clamp(0.01, 0.99)) / 2.0
    return Problem(model, (x, *_censored(torch.exp(1.0 + 0.6 * x + noise), 10.0)))


@problem("exponential survival with Gamma frailty")
def frailty() -> Problem:
    def model(x: Tensor, clinic: Tensor, t: Tensor, seen: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        shape = pyro.sample("shape", dist.LogNormal(1.0, 1.0))
        with pyro.plate("clinics", 12):
            w = pyro.sample("w", dist.Gamma(shape, shape))
        rate = w[clinic] * torch.exp(a + b * x)
        with pyro.plate("rows", len(t)):
            pyro.factor("t", seen * rate.log() - rate * t)

    x, clinic = torch.randn(180), torch.arange(180) % 12
    rate = dist.Gamma(3.0, 3.0).sample((12,))[clinic] * torch.exp(-0.5 + 0.7 * x)
    t, censored = _censored(dist.Exponential(rate).sample(), 8.0)
    return Problem(model, (x, clinic, t, 1 - censored))


REMISSION = [
    [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35],
    [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23],
]


def _remission() -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.get_default_dtype()
    t = torch.tensor(REMISSION).reshape(-1).to(dtype)
    seen = torch.ones(42)
    seen[9:21] = 0.0
    return t, seen, torch.cat([torch.ones(21), torch.zeros(21)])


@problem("remission, Weibull by its distribution")
def remission_weibull() -> Problem:
    def model(t: Tensor, seen: Tensor, drug: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
        law = dist.Weibull(torch.exp(a + b * drug), shape)
        tail = -((t / torch.exp(a + b * drug)) ** shape)
        with pyro.plate("patients", len(t)):
            pyro.factor("t", torch.where(seen > 0, law.log_prob(t), tail))

    return Problem(model, _remission())


@problem("remission, piecewise constant hazard")
def remission_cox() -> Problem:
    def model(exposure: Tensor, events: Tensor, drug: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(0.0, 5.0))
        step = pyro.sample("step", dist.HalfNormal(1.0))
        first = pyro.sample("first", dist.Normal(-2.0, 2.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        log_hazard = first + step * z.cumsum(-1)
        rate = exposure * torch.exp(log_hazard + beta * drug.unsqueeze(-1)) + 1e-9
        with pyro.plate("patients", len(drug), dim=-2), pyro.plate("intervals", 6, dim=-1):
            pyro.sample("events", dist.Poisson(rate), obs=events)

    t, seen, drug = _remission()
    cuts = torch.tensor([0.0, 4.0, 8.0, 12.0, 16.0, 22.0, 36.0])
    exposure = (t.unsqueeze(-1).clamp(max=cuts[1:]) - cuts[:-1]).clamp(min=0.0)
    inside = (t.unsqueeze(-1) > cuts[:-1]) & (t.unsqueeze(-1) <= cuts[1:])
    return Problem(model, (exposure, inside * seen.unsqueeze(-1), drug))


@problem("a share is cured")
def cured() -> Problem:
    def model(x: Tensor, t: Tensor, censored: Tensor) -> None:
        v = pyro.sample("v", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
        scale = pyro.sample("scale", dist.LogNormal(1.0, 0.7))
        cure = torch.sigmoid(v[0] + v[1] * x)
        z = (t / scale) ** shape
        density = (
            torch.log1p(-cure) + torch.log(shape / scale) + (shape - 1) * (t / scale).log() - z
        )
        tail = torch.logaddexp(cure.log(), torch.log1p(-cure) - z)
        with pyro.plate("rows", len(t)):
            pyro.factor("t", torch.where(censored > 0, tail, density))

    x = torch.randn(200)
    never = torch.rand(200) < torch.sigmoid(-0.5 + 0.8 * x)
    t = dist.Weibull(torch.full((200,), 2.5), torch.full((200,), 1.4)).sample()
    t, censored = _censored(torch.where(never, torch.full((200,), 1e3), t), 10.0)
    return Problem(model, (x, t, censored))
