"""Regressions of one level: robust, censored, bounded, counted, ordered, sparse."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from _problem import Problem, problem
from pyro.distributions import transforms
from torch import Tensor

# --- real responses ---------------------------------------------------------------------------------


def _line(count: int = 100) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2.0, 2.0, count)
    return x, 1.0 + 2.0 * x + 0.5 * torch.randn(count)


@problem("Student t regression, df unknown")
def student_t() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 10.0))
        b = pyro.sample("b", dist.Normal(0.0, 10.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
        df = pyro.sample("df", dist.Gamma(2.0, 0.1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.StudentT(df, a + b * x, sigma), obs=y)

    x, y = _line()
    y[::13] += 6.0
    return Problem(model, (x, y))


@problem("outliers as a mixture of noises")
def outliers() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 5.0))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 5.0))
        fraction = pyro.sample("fraction", dist.Beta(1.0, 5.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        wide = pyro.sample("wide", dist.HalfNormal(10.0))
        loc = (intercept + slope * x).unsqueeze(-1)
        noise = dist.Normal(loc, torch.stack([scale, scale + wide], -1))
        weights = dist.Categorical(torch.stack([1 - fraction, fraction], -1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.MixtureSameFamily(weights, noise), obs=y)

    x, y = _line()
    y[::9] += 5.0 * torch.randn(len(y[::9]))
    return Problem(model, (x, y))


STACKS = torch.tensor(
    [
        [80, 80, 75, 62, 62, 62, 62, 62, 58, 58, 58, 58, 58, 58, 50, 50, 50, 50, 50, 56, 70],
        [27, 27, 25, 24, 22, 23, 24, 24, 23, 18, 18, 17, 18, 19, 18, 18, 19, 19, 20, 20, 20],
        [89, 88, 90, 87, 87, 87, 93, 93, 87, 80, 89, 88, 82, 93, 89, 86, 72, 79, 80, 82, 91],
        [42, 37, 37, 28, 18, 18, 19, 20, 15, 14, 14, 13, 11, 12, 8, 7, 8, 8, 9, 15, 15],
    ]
)


@problem("stack loss, Laplace noise and ridge")
def stacks() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        phi = pyro.sample("phi", dist.Gamma(0.1, 0.1))
        b0 = pyro.sample("b0", dist.Normal(0.0, 100.0))
        b = pyro.sample("b", dist.Normal(0.0, phi.rsqrt()).expand([3]).to_event(1))
        scale = pyro.sample("scale", dist.HalfCauchy(5.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Laplace(b0 + X @ b, scale), obs=y)

    X, y = STACKS[:3].T.to(torch.get_default_dtype()), STACKS[3].to(torch.get_default_dtype())
    return Problem(model, ((X - X.mean(0)) / X.std(0), y))


@problem("quantile regression, 0.9")
def quantile() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        residual = y - (a + b * x)
        check = torch.maximum(0.9 * residual, -0.1 * residual) / sigma
        with pyro.plate("rows", len(x)):
            pyro.factor("y", torch.log(0.09 / sigma) - check)

    x = torch.rand(120) * 4
    return Problem(model, (x, 1.0 + 0.5 * x + (0.2 + 0.3 * x) * torch.randn(120)))


@problem("heteroscedastic line")
def heteroscedastic() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
        v = pyro.sample("v", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w[0] + w[1] * x, (v[0] + v[1] * x).exp()), obs=y)

    x = torch.rand(150) * 3
    return Problem(model, (x, 1.0 - 0.5 * x + (-1.0 + 0.5 * x).exp() * torch.randn(150)))


@problem("Tobit regression")
def tobit() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 5.0))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.Exponential(1.0))
        loc = a + b * x
        seen = dist.Normal(loc, sigma).log_prob(y)
        below = torch.special.log_ndtr((0.0 - loc) / sigma)
        with pyro.plate("rows", len(x)):
            pyro.factor("y", torch.where(y > 0, seen, below))

    x, y = _line(120)
    return Problem(model, (x, y.clamp(min=0.0)))


@problem("allometry")
def allometry() -> Problem:
    """Mass as a power of length with multiplicative noise, exponent and factor unknown."""

    def model(length: Tensor, mass: Tensor) -> None:
        factor = pyro.sample("factor", dist.LogNormal(0.0, 1.0))
        power = pyro.sample("power", dist.Normal(3.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
        with pyro.plate("rows", len(length)):
            loc = torch.log(factor * length**power)
            pyro.sample("mass", dist.LogNormal(loc, sigma), obs=mass)

    length = 1.0 + 4.0 * torch.rand(80)
    return Problem(model, (length, 0.8 * length**2.7 * (0.2 * torch.randn(80)).exp()))


@problem("cubic with Exponential noise")
def cubic() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(10.0, 10.0))
        b1 = pyro.sample("b1", dist.LogNormal(0.0, 1.0))
        b2 = pyro.sample("b2", dist.Normal(0.0, 5.0))
        b3 = pyro.sample("b3", dist.Normal(0.0, 5.0))
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 50.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(a + b1 * x + b2 * x**2 + b3 * x**3, sigma), obs=y)

    x = torch.randn(150)
    return Problem(model, (x, 12.0 + 3.0 * x - 1.5 * x**2 + 0.3 * x**3 + 1.2 * torch.randn(150)))


# --- sparse coefficients ----------------------------------------------------------------------------


def _sparse(columns: int = 12) -> tuple[Tensor, Tensor]:
    X = torch.randn(80, columns)
    w = torch.zeros(columns)
    w[:3] = torch.tensor([2.0, -1.5, 0.8])
    return X, X @ w + 0.7 * torch.randn(80)


@problem("horseshoe regression")
def horseshoe() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        tau = pyro.sample("tau", dist.HalfCauchy(0.3))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        with pyro.plate("columns", X.shape[1]):
            local = pyro.sample("local", dist.HalfCauchy(1.0))
            raw = pyro.sample("raw", dist.Normal(0.0, 1.0))
        w = raw * local * tau
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)

    return Problem(model, _sparse())


@problem("coefficients times relaxed inclusions")
def inclusions() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        share = pyro.sample("share", dist.Beta(1.0, 3.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        with pyro.plate("columns", X.shape[1]):
            inside = pyro.sample("inside", dist.Beta(2.0 * share, 2.0 - 2.0 * share))
            w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Normal(X @ (inside * w), sigma), obs=y)

    return Problem(model, _sparse(8))


@problem("lasso, penalty unknown")
def lasso() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        penalty = pyro.sample("penalty", dist.Gamma(1.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfCauchy(2.0))
        with pyro.plate("columns", X.shape[1]):
            w = pyro.sample("w", dist.Laplace(0.0, 1.0 / penalty))
        with pyro.plate("rows", len(X)):
            pyro.sample("y", dist.Normal(X @ w, sigma), obs=y)

    return Problem(model, _sparse())


# --- bounded, positive, ordered ---------------------------------------------------------------------


@problem("Beta regression")
def beta_regression() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        b0 = pyro.sample("b0", dist.Normal(0.0, 2.0))
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        phi = pyro.sample("phi", dist.HalfCauchy(10.0))
        mu = torch.sigmoid(b0 + X @ b)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Beta(mu * phi, (1 - mu) * phi), obs=y)

    X = torch.randn(150, 2)
    mu = torch.sigmoid(0.3 + X @ torch.tensor([0.7, -0.4]))
    y = dist.Beta(12 * mu, 12 * (1 - mu)).sample().clamp(1e-4, 1 - 1e-4)
    return Problem(model, (X, y))


@problem("Gamma regression, log link")
def gamma_regression() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        shape = pyro.sample("shape", dist.Exponential(0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Gamma(shape, shape * torch.exp(-(X @ w))), obs=y)

    X = torch.cat([torch.ones(120, 1), torch.randn(120, 2)], 1)
    mean = torch.exp(X @ torch.tensor([1.0, 0.4, -0.6]))
    return Problem(model, (X, dist.Gamma(3.0, 3.0 / mean).sample()))


@problem("ordered logit, ordered cut points")
def ordinal() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        base = dist.Normal(0.0, 3.0).expand([3]).to_event(1)
        ordered = dist.TransformedDistribution(base, [transforms.OrderedTransform()])
        cuts = pyro.sample("cuts", ordered)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.OrderedLogistic(X @ w, cuts), obs=y)

    X = torch.randn(200, 2)
    score = X @ torch.tensor([1.0, -0.7])
    y = dist.OrderedLogistic(score, torch.tensor([-1.0, 0.3, 1.5])).sample()
    return Problem(model, (X, y))


DOSE = [1.6907, 1.7242, 1.7552, 1.7842, 1.8113, 1.8369, 1.8610, 1.8839]
BEETLES = [59.0, 60.0, 62.0, 56.0, 63.0, 59.0, 62.0, 60.0]
KILLED = [6.0, 13.0, 18.0, 28.0, 52.0, 53.0, 61.0, 60.0]


def _beetles(link: str) -> Problem:
    def model(x: Tensor, n: Tensor, killed: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 30.0))
        b = pyro.sample("b", dist.Normal(0.0, 30.0))
        f = a + b * (x - x.mean())
        if link == "probit":
            p = 0.5 * (1 + torch.erf(f / 2**0.5))
        else:
            p = 1 - torch.exp(-torch.exp(f))
        with pyro.plate("doses", len(x)):
            pyro.sample("killed", dist.Binomial(n, p.clamp(1e-6, 1 - 1e-6)), obs=killed)

    return Problem(model, (torch.tensor(DOSE), torch.tensor(BEETLES), torch.tensor(KILLED)))


@problem("beetles, probit")
def probit() -> Problem:
    return _beetles("probit")


@problem("beetles, complementary log-log")
def cloglog() -> Problem:
    return _beetles("cloglog")


@problem("softmax regression")
def softmax() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        W = pyro.sample("W", dist.Normal(0.0, 2.0).expand([X.shape[1], 3]).to_event(2))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Categorical(logits=X @ W), obs=y)

    X = torch.cat([torch.ones(150, 1), torch.randn(150, 3)], 1)
    return Problem(model, (X, dist.Categorical(logits=X @ (1.5 * torch.randn(4, 3))).sample()))


# --- counts -----------------------------------------------------------------------------------------


def _counts(rows: int = 200) -> tuple[Tensor, Tensor]:
    X = torch.randn(rows, 2)
    return X, torch.exp(0.8 + X @ torch.tensor([0.5, -0.4]))


@problem("negative binomial by logits")
def negative_binomial() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        phi = pyro.sample("phi", dist.HalfNormal(5.0))
        with pyro.plate("rows", len(y)):
            logits = b + X @ w - phi.log()
            pyro.sample("y", dist.NegativeBinomial(phi, logits=logits), obs=y)

    X, mean = _counts()
    return Problem(model, (X, dist.GammaPoisson(2.0, 2.0 / mean).sample()))


@problem("zero-inflated negative binomial")
def zero_inflated_negative_binomial() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        v = pyro.sample("v", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
        phi = pyro.sample("phi", dist.LogNormal(0.0, 1.0))
        gate = torch.sigmoid(v[0] + v[1] * X[:, 1])
        with pyro.plate("rows", len(y)):
            rate = phi * torch.exp(-(b + X @ w))
            zero = phi * torch.log(rate / (1 + rate))
            count = dist.GammaPoisson(phi, rate).log_prob(y)
            at_zero = torch.logaddexp(gate.log(), torch.log1p(-gate) + zero)
            pyro.factor("y", torch.where(y == 0, at_zero, torch.log1p(-gate) + count))

    X, mean = _counts(300)
    y = dist.GammaPoisson(2.0, 2.0 / mean).sample() * (torch.rand(300) > torch.sigmoid(X[:, 1] - 1))
    return Problem(model, (X, y))


@problem("hurdle Poisson regression")
def hurdle() -> Problem:
    def model(X: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.5).to_event(1))
        v = pyro.sample("v", dist.Normal(torch.zeros(3), 1.5).to_event(1))
        rate, passed = torch.exp(X @ w), X @ v
        positive = y * rate.log() - rate - torch.lgamma(y + 1) - torch.log(-torch.expm1(-rate))
        with pyro.plate("rows", len(y)):
            pyro.sample("any", dist.Bernoulli(logits=passed), obs=(y > 0).to(y.dtype))
            pyro.factor("count", torch.where(y > 0, positive, torch.zeros(())))

    X, mean = _counts()
    y = torch.poisson(mean) * (torch.rand(200) > 0.3)
    return Problem(model, (torch.cat([torch.ones(200, 1), X], 1), y))


POPULATION = [1100.0, 1500.0, 3600.0, 4791.0, 7400.0, 8000.0, 9200.0, 13000.0, 17500.0, 275000.0]
TOOLS = [13.0, 22.0, 24.0, 43.0, 33.0, 19.0, 40.0, 28.0, 55.0, 71.0]
CONTACT = [0, 0, 0, 1, 1, 1, 1, 0, 1, 0]


@problem("tools of islands by innovation and loss")
def tools() -> Problem:
    """The expected count is where a b-th power of the population balances a loss."""

    def model(population: Tensor, contact: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(1.0, 1.0).expand([2]).to_event(1))
        b = pyro.sample("b", dist.Exponential(1.0).expand([2]).to_event(1))
        loss = pyro.sample("loss", dist.Exponential(1.0))
        rate = a[contact].exp() * population ** b[contact] / loss
        with pyro.plate("islands", len(y)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    return Problem(model, (torch.tensor(POPULATION), torch.tensor(CONTACT), torch.tensor(TOOLS)))


TEMPERATURE = [
    66, 70, 69, 68, 67, 72, 73, 70, 57, 63, 70, 78, 67, 53, 67, 75, 70, 81, 76, 79, 75, 76, 58,
]  # fmt: skip
DAMAGE = [0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1]


@problem("O-rings, raw temperature and wide priors")
def o_rings() -> Problem:
    def model(x: Tensor, y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 30.0))
        b = pyro.sample("b", dist.Normal(0.0, 30.0))
        with pyro.plate("flights", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)

    dtype = torch.get_default_dtype()
    return Problem(model, (torch.tensor(TEMPERATURE).to(dtype), torch.tensor(DAMAGE).to(dtype)))
