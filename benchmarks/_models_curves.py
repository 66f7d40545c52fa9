"""Curves: growth, oscillation, decay, dose and response, drugs in a body, epidemics by Euler steps."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from _problem import Problem, problem
from torch import Tensor

# --- growth -----------------------------------------------------------------------------------------


@problem("logistic growth")
def logistic_growth() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        capacity = pyro.sample("capacity", dist.LogNormal(math.log(100.0), 0.5))
        rate = pyro.sample("rate", dist.LogNormal(-0.5, 0.5))
        middle = pyro.sample("middle", dist.Normal(5.0, 3.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
        with pyro.plate("times", len(t)):
            mean = capacity * torch.sigmoid(rate * (t - middle))
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    t = torch.linspace(0.0, 12.0, 40)
    return Problem(model, (t, 80.0 * torch.sigmoid(0.9 * (t - 6.0)) + 3.0 * torch.randn(40)))


@problem("Gompertz growth, multiplicative noise")
def gompertz() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        top = pyro.sample("top", dist.LogNormal(2.0, 1.0))
        lag = pyro.sample("lag", dist.LogNormal(1.0, 0.7))
        rate = pyro.sample("rate", dist.LogNormal(-1.0, 0.7))
        sigma = pyro.sample("sigma", dist.Exponential(5.0))
        with pyro.plate("times", len(t)):
            loc = top.log() - lag * torch.exp(-rate * t)
            pyro.sample("y", dist.LogNormal(loc, sigma), obs=y)

    t = torch.linspace(0.0, 15.0, 35)
    return Problem(model, (t, 10 * torch.exp(-4.0 * torch.exp(-0.35 * t) + 0.1 * torch.randn(35))))


@problem("von Bertalanffy growth of fish")
def von_bertalanffy() -> Problem:
    def model(age: Tensor, length: Tensor) -> None:
        limit = pyro.sample("limit", dist.Normal(60.0, 20.0))
        k = pyro.sample("k", dist.Uniform(0.0, 2.0))
        origin = pyro.sample("origin", dist.Normal(0.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(3.0))
        with pyro.plate("fish", len(age)):
            mean = limit * (1 - torch.exp(-k * (age - origin)))
            pyro.sample("length", dist.Normal(mean, sigma), obs=length)

    age = torch.randint(1, 13, (90,)).to(torch.get_default_dtype())
    length = 55.0 * (1 - torch.exp(-0.3 * (age + 0.4))) + 2.5 * torch.randn(90)
    return Problem(model, (age, length))


AGE = [
    1.0, 1.5, 1.5, 1.5, 2.5, 4.0, 5.0, 5.0, 7.0, 8.0, 8.5, 9.0, 9.5, 9.5, 10.0, 12.0, 12.0, 13.0,
    13.0, 14.5, 15.5, 15.5, 16.5, 17.0, 22.5, 29.0, 31.5,
]  # fmt: skip
LENGTH = [
    1.80, 1.85, 1.87, 1.77, 2.02, 2.27, 2.15, 2.26, 2.47, 2.19, 2.26, 2.40, 2.39, 2.41, 2.50, 2.32,
    2.32, 2.43, 2.47, 2.56, 2.65, 2.47, 2.64, 2.56, 2.70, 2.72, 2.57,
]  # fmt: skip


@problem("dugongs")
def dugongs() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        alpha = pyro.sample("alpha", dist.Normal(0.0, 100.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 100.0))
        gamma = pyro.sample("gamma", dist.Uniform(0.5, 1.0))
        tau = pyro.sample("tau", dist.Gamma(0.1, 0.1))
        with pyro.plate("animals", len(x)):
            pyro.sample("y", dist.Normal(alpha - beta * gamma**x, tau.rsqrt()), obs=y)

    return Problem(model, (torch.tensor(AGE), torch.tensor(LENGTH)))


TREES = [
    [30.0, 58.0, 87.0, 115.0, 120.0, 142.0, 145.0],
    [33.0, 69.0, 111.0, 156.0, 172.0, 203.0, 203.0],
    [30.0, 51.0, 75.0, 108.0, 115.0, 139.0, 140.0],
    [32.0, 62.0, 112.0, 167.0, 179.0, 209.0, 214.0],
    [30.0, 49.0, 81.0, 125.0, 142.0, 174.0, 177.0],
]
DAYS = [118.0, 484.0, 664.0, 1004.0, 1231.0, 1372.0, 1582.0]


@problem("orange trees")
def orange_trees() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(5.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(0.5))
        middle = pyro.sample("middle", dist.Normal(7.0, 3.0))
        scale = pyro.sample("scale", dist.LogNormal(1.0, 0.5))
        sigma = pyro.sample("sigma", dist.HalfNormal(20.0))
        with pyro.plate("trees", len(y), dim=-2):
            top = pyro.sample("top", dist.Normal(mu, tau))
            with pyro.plate("times", len(t), dim=-1):
                mean = top.exp() / (1 + torch.exp(-(t / 100 - middle) / scale))
                pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    return Problem(model, (torch.tensor(DAYS), torch.tensor(TREES)))


# --- oscillation and decay --------------------------------------------------------------------------


@problem("sine, frequency unknown")
def sine() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        frequency = pyro.sample("frequency", dist.Normal(1.0, 0.1))
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        angle = 2 * math.pi * frequency * t
        with pyro.plate("times", len(t)):
            pyro.sample("y", dist.Normal(a * angle.sin() + b * angle.cos(), sigma), obs=y)

    t = torch.linspace(0.0, 4.0, 60)
    y = 1.5 * (2 * math.pi * 1.05 * t + 0.6).sin() + 0.4 * torch.randn(60)
    return Problem(model, (t, y))


@problem("damped oscillation, amplitude and phase")
def damped() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        amplitude = pyro.sample("amplitude", dist.HalfNormal(3.0))
        phase = pyro.sample("phase", dist.Normal(0.0, 1.0))
        omega = pyro.sample("omega", dist.LogNormal(math.log(2.0), 0.2))
        decay = pyro.sample("decay", dist.Exponential(3.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
        with pyro.plate("times", len(t)):
            mean = amplitude * torch.exp(-decay * t) * torch.cos(omega * t + phase)
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    t = torch.linspace(0.0, 8.0, 70)
    y = 2.0 * torch.exp(-0.25 * t) * torch.cos(2.2 * t + 0.4) + 0.2 * torch.randn(70)
    return Problem(model, (t, y))


@problem("biexponential decay")
def biexponential() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        amplitudes = pyro.sample("amplitudes", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        fast = pyro.sample("fast", dist.LogNormal(0.5, 0.5))
        slow = pyro.sample("slow", dist.LogNormal(-2.0, 0.5))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
        with pyro.plate("times", len(t)):
            mean = amplitudes[0] * torch.exp(-fast * t) + amplitudes[1] * torch.exp(-slow * t)
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    t = torch.linspace(0.0, 12.0, 60)
    y = 3.0 * torch.exp(-1.5 * t) + 1.5 * torch.exp(-0.12 * t) + 0.1 * torch.randn(60)
    return Problem(model, (t, y))


@problem("radioactive counts over a background")
def background() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        level = pyro.sample("level", dist.Gamma(2.0, 0.05))
        half_life = pyro.sample("half_life", dist.LogNormal(1.0, 0.7))
        base = pyro.sample("base", dist.Exponential(0.1))
        with pyro.plate("times", len(t)):
            pyro.sample("y", dist.Poisson(level * 2.0 ** (-t / half_life) + base), obs=y)

    t = torch.linspace(0.0, 20.0, 50)
    return Problem(model, (t, torch.poisson(60.0 * 2.0 ** (-t / 4.0) + 5.0)))


# --- dose and response ------------------------------------------------------------------------------

CONCENTRATION = [0.02, 0.02, 0.06, 0.06, 0.11, 0.11, 0.22, 0.22, 0.56, 0.56, 1.10, 1.10]
VELOCITY = [76.0, 47.0, 97.0, 107.0, 123.0, 139.0, 159.0, 152.0, 191.0, 201.0, 207.0, 200.0]


@problem("Michaelis-Menten, puromycin")
def michaelis_menten() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        top = pyro.sample("top", dist.HalfNormal(300.0))
        km = pyro.sample("km", dist.HalfCauchy(0.1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(10.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(top * x / (km + x), sigma), obs=y)

    return Problem(model, (torch.tensor(CONCENTRATION), torch.tensor(VELOCITY)))


@problem("Emax with a placebo effect")
def emax() -> Problem:
    def model(dose: Tensor, y: Tensor) -> None:
        e0 = pyro.sample("e0", dist.Normal(0.0, 5.0))
        most = pyro.sample("most", dist.Normal(0.0, 10.0))
        log_ed50 = pyro.sample("log_ed50", dist.Normal(2.0, 1.0))
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 1.0))
        with pyro.plate("patients", len(dose)):
            mean = e0 + most * dose / (dose + log_ed50.exp())
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    dose = torch.tensor([0.0, 3.0, 10.0, 30.0, 100.0]).repeat(16)
    return Problem(model, (dose, 1.0 + 6.0 * dose / (dose + 12.0) + 1.5 * torch.randn(80)))


@problem("Hill curve of four parameters")
def hill() -> Problem:
    def model(dose: Tensor, y: Tensor) -> None:
        low = pyro.sample("low", dist.Normal(0.0, 0.5))
        high = pyro.sample("high", dist.Normal(1.0, 0.5))
        middle = pyro.sample("middle", dist.Normal(0.0, 2.0))
        steep = pyro.sample("steep", dist.LogNormal(0.0, 0.7))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.3))
        with pyro.plate("rows", len(dose)):
            mean = low + (high - low) / (1 + torch.exp(-steep * (dose.log() - middle)))
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)

    dose = 10.0 ** torch.linspace(-2.0, 2.0, 48)
    mean = 0.1 + 0.9 * torch.sigmoid(1.6 * (dose.log() - 0.5))
    return Problem(model, (dose, mean + 0.07 * torch.randn(48)))


# --- drugs ------------------------------------------------------------------------------------------


@problem("one compartment, first-order absorption")
def compartment() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        ka = pyro.sample("ka", dist.LogNormal(0.3, 0.5))
        ke = pyro.sample("ke", dist.LogNormal(-1.5, 0.5))
        volume = pyro.sample("volume", dist.LogNormal(2.0, 0.7))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
        with pyro.plate("times", len(t)):
            course = torch.exp(-ke * t) - torch.exp(-ka * t)
            mean = 100.0 / volume * ka / (ka - ke) * course
            pyro.sample("y", dist.Normal(mean, sigma * 5.0), obs=y)

    t = torch.linspace(0.25, 20.0, 30)
    mean = 100.0 / 8.0 * 1.4 / (1.4 - 0.2) * (torch.exp(-0.2 * t) - torch.exp(-1.4 * t))
    return Problem(model, (t, mean + 0.4 * torch.randn(30)))


@problem("absorption of many patients")
def compartments() -> Problem:
    def model(t: Tensor, y: Tensor) -> None:
        mean = torch.tensor([0.3, -1.5, 2.0])
        centre = pyro.sample("centre", dist.Normal(mean, 0.5).to_event(1))
        spread = pyro.sample("spread", dist.HalfNormal(0.5).expand([3]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.3))
        with pyro.plate("patients", len(y), dim=-2):
            eta = pyro.sample("eta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            ka, ke, volume = (centre + spread * eta).exp().unbind(-1)
            with pyro.plate("times", len(t), dim=-1):
                course = torch.exp(-ke * t) - torch.exp(-(ka + ke) * t)
                loc = torch.log(100.0 / volume * (ka + ke) / ka * course)
                pyro.sample("y", dist.LogNormal(loc, sigma), obs=y)

    t = torch.tensor([0.5, 1.0, 2.0, 4.0, 6.0, 9.0, 12.0, 24.0])
    own = torch.tensor([0.3, -1.6, 2.1]) + 0.25 * torch.randn(10, 1, 3)
    ka, ke, volume = own.exp().unbind(-1)
    course = torch.exp(-ke * t) - torch.exp(-(ka + ke) * t)
    y = 100.0 / volume * (ka + ke) / ka * course * (0.1 * torch.randn(10, 8)).exp()
    return Problem(model, (t, y))


# --- steps of Euler ---------------------------------------------------------------------------------


def _sir(beta: Tensor, gamma: Tensor, first: Tensor, days: int) -> Tensor:
    """New cases each day among 1000 people."""
    susceptible, infected, cases = 1000.0 - first, first, []
    for _ in range(days):
        new = beta * susceptible * infected / 1000.0
        susceptible = susceptible - new
        infected = infected + new - gamma * infected
        cases.append(new)
    return torch.stack(cases, -1)


@problem("SIR by Euler steps, Poisson counts")
def sir() -> Problem:
    def model(y: Tensor) -> None:
        beta = pyro.sample("beta", dist.LogNormal(-0.7, 0.3))
        gamma = pyro.sample("gamma", dist.LogNormal(-1.6, 0.3))
        first = pyro.sample("first", dist.LogNormal(1.0, 0.5))
        with pyro.plate("days", len(y)):
            pyro.sample("y", dist.Poisson(_sir(beta, gamma, first, len(y)) + 1e-3), obs=y)

    rate = _sir(torch.tensor(0.5), torch.tensor(0.2), torch.tensor(3.0), 30)
    return Problem(model, (torch.poisson(rate),))


@problem("SIR, negative binomial and a share reported")
def sir_reported() -> Problem:
    def model(y: Tensor) -> None:
        r0 = pyro.sample("r0", dist.LogNormal(0.8, 0.3))
        recovery = pyro.sample("recovery", dist.Beta(4.0, 16.0))
        share = pyro.sample("share", dist.Beta(8.0, 4.0))
        phi = pyro.sample("phi", dist.Exponential(0.1))
        mean = share * _sir(r0 * recovery, recovery, torch.tensor(3.0), len(y)) + 1e-3
        with pyro.plate("days", len(y)):
            pyro.sample("y", dist.GammaPoisson(phi, phi / mean), obs=y)

    rate = 0.6 * _sir(torch.tensor(0.5), torch.tensor(0.2), torch.tensor(3.0), 30)
    return Problem(model, (dist.GammaPoisson(10.0, 10.0 / rate).sample(),))


@problem("Ricker recruitment")
def ricker() -> Problem:
    def model(stock: Tensor, recruits: Tensor) -> None:
        a = pyro.sample("a", dist.LogNormal(1.0, 1.0))
        b = pyro.sample("b", dist.Exponential(1.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(0.5))
        with pyro.plate("years", len(stock)):
            loc = torch.log(a * stock) - b * stock
            pyro.sample("recruits", dist.LogNormal(loc, sigma), obs=recruits)

    stock = 0.2 + 3.0 * torch.rand(40)
    recruits = 4.0 * stock * torch.exp(-0.7 * stock + 0.3 * torch.randn(40))
    return Problem(model, (stock, recruits))


@problem("predators and prey by Euler steps")
def predators() -> Problem:
    def model(y: Tensor) -> None:
        centre = torch.tensor([-0.7, -3.5, -0.5, -3.5])
        theta = pyro.sample("theta", dist.LogNormal(centre, 0.3).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
        a, b, c, d = theta.unbind(-1)
        with pyro.plate("times", len(y)):
            loc = _prey(a, b, c, d, len(y)).log()
            pyro.sample("y", dist.LogNormal(loc, sigma).to_event(1), obs=y)

    truth = torch.tensor([0.55, 0.028, 0.6, 0.026])
    y = _prey(*truth.unbind(-1), 20) * (0.15 * torch.randn(20, 2)).exp()
    return Problem(model, (y,))


def _prey(a: Tensor, b: Tensor, c: Tensor, d: Tensor, years: int) -> Tensor:
    prey, predator, seen = torch.tensor(30.0), torch.tensor(8.0), []
    for _ in range(years):
        for _ in range(4):
            growth = (a - b * predator) * prey
            predator = (predator + 0.25 * (d * prey - c) * predator).clamp(1e-3, 1e6)
            prey = (prey + 0.25 * growth).clamp(min=1e-3)
        seen.append(torch.stack([prey.expand(predator.shape), predator], -1))
    return torch.stack(seen, -2)
