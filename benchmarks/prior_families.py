"""Every family of priors, one latent each: how near is the posterior to the truth?

    x ~ prior;    y_n ~ N(x, 0.8), Poisson(x) or Bernoulli(x), by the prior's support

30 priors of a continuous latent; each is fitted with nothing but the defaults and held against
quadrature on a fine grid of the unconstrained value: mean, standard deviation and log evidence of the
true posterior. log evidence - bound is KL(q || posterior), what the family of the posterior cannot
follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, machine, report, run, warm_up
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_cvi import CVI, AutoCVI

Prior = Callable[[], dist.Distribution]


def _of(base: dist.Distribution, *transforms: torch.distributions.Transform) -> Prior:
    return lambda: dist.TransformedDistribution(base, list(transforms))


REAL: dict[str, Prior] = {
    "Normal": lambda: dist.Normal(0.5, 1.5),
    "StudentT": lambda: dist.StudentT(4.0, 0.5, 1.5),
    "Cauchy": lambda: dist.Cauchy(0.5, 1.5),
    "Laplace": lambda: dist.Laplace(0.3, 1.2),
    "SoftLaplace": lambda: dist.SoftLaplace(0.3, 1.2),
    "AsymmetricLaplace": lambda: dist.AsymmetricLaplace(0.3, 1.2, 1.5),
    "Gumbel": lambda: dist.Gumbel(0.2, 1.5),
    "Logistic": lambda: dist.Logistic(0.2, 1.5),
    "SkewLogistic": lambda: dist.SkewLogistic(0.2, 1.5, torch.tensor(2.0)),
    "VonMises": lambda: dist.VonMises(0.5, 2.0),
    "Uniform": lambda: dist.Uniform(-0.5, 2.0),
    "AffineBeta": lambda: dist.AffineBeta(2.0, 3.0, -1.0, 4.0),
    "ImproperUniform, real": lambda: dist.ImproperUniform(constraints.real, (), ()),
    "ImproperUniform, below 3": lambda: dist.ImproperUniform(constraints.less_than(3.0), (), ()),
}
POSITIVE: dict[str, Prior] = {
    "Gamma": lambda: dist.Gamma(2.0, 1.0),
    "Exponential": lambda: dist.Exponential(0.7),
    "Chi2": lambda: dist.Chi2(3.0),
    "InverseGamma": lambda: dist.InverseGamma(2.0, 2.0),
    "HalfCauchy": lambda: dist.HalfCauchy(2.0),
    "HalfNormal": lambda: dist.HalfNormal(1.5),
    "LogNormal": lambda: dist.LogNormal(0.3, 0.8),
    "Weibull": lambda: dist.Weibull(1.2, 1.5),
    "Pareto": lambda: dist.Pareto(0.3, 1.5),
    "FisherSnedecor": lambda: dist.FisherSnedecor(3.0, 5.0),
    "exp of a Gumbel": _of(dist.Gumbel(0.2, 0.7), dist.transforms.ExpTransform()),
    "ImproperUniform, positive": lambda: dist.ImproperUniform(constraints.positive, (), ()),
}
UNIT: dict[str, Prior] = {
    "Beta": lambda: dist.Beta(2.0, 1.5),
    "Kumaraswamy": lambda: dist.Kumaraswamy(2.0, 3.0),
    "ContinuousBernoulli": lambda: dist.ContinuousBernoulli(0.3),
    "sigmoid of a Normal": _of(dist.Normal(0.2, 0.7), dist.transforms.SigmoidTransform()),
}
GROUPS: list[tuple[dict[str, Prior], Callable[[Tensor], dist.Distribution], list[float]]] = [
    (REAL, lambda x: dist.Normal(x, 0.8), [0.9, 0.2, 1.4]),
    (POSITIVE, dist.Poisson, [2.0, 4.0, 1.0, 3.0, 2.0]),
    (UNIT, dist.Bernoulli, [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
]


def _truth(
    prior: dist.Distribution, likelihood: Callable[[Tensor], dist.Distribution], y: Tensor
) -> tuple[float, float, float]:
    """Mean, standard deviation and log evidence, by the trapezoid rule in the unconstrained value."""
    transform = biject_to(prior.support)
    u = torch.linspace(-40.0, 40.0, 400_001)
    x = transform(u)
    log_p = transform.log_abs_det_jacobian(u, x)
    if not isinstance(prior, dist.ImproperUniform):
        log_p = log_p + prior.log_prob(x)
    log_p = log_p + sum(likelihood(x).log_prob(cell) for cell in y)
    log_p = torch.where(log_p.isfinite(), log_p, -math.inf)
    evidence = float(log_p.logsumexp(0) + math.log(80.0 / 400_000))
    weight = log_p.softmax(0)
    weight, x = weight[weight > 0], x[weight > 0]
    mean = float((weight * x).sum())
    return mean, float((weight * (x - mean).square()).sum().sqrt()), evidence


def _rows(
    name: str, prior: Prior, likelihood: Callable[[Tensor], dist.Distribution], y: Tensor
) -> list[Row]:
    def model(y: Tensor) -> None:
        x = pyro.sample("x", prior())
        with pyro.plate("data", len(y)):
            pyro.sample("y", likelihood(x), obs=y)

    start = time.perf_counter()
    guide = AutoCVI(model)
    result = CVI(model, guide).run(y)
    seconds = time.perf_counter() - start
    mean, sd, evidence = _truth(prior(), likelihood, y)
    q = guide.posterior("x")
    pairs = zip(result.losses, result.losses[1:], strict=False)
    return [
        Row(name, f"seconds, {result.num_steps} steps", seconds),
        Row(name, "largest rise of the loss", max(0.0, *(b - a for a, b in pairs)), "<=", 1e-9),
        Row(name, "KL(q || posterior)", evidence + result.losses[-1], "<=", 0.05),
        Row(name, "mean's difference in true standard deviations",
            abs(float(q.mean) - mean) / sd, "<=", 0.1),
        Row(name, "|ratio of standard deviations - 1|",
            abs(float(q.variance.sqrt()) / sd - 1), "<=", 0.1),
    ]  # fmt: skip


def main() -> None:
    small = arguments(__doc__).parse_args().small
    at = machine()
    torch.set_default_dtype(torch.float64)
    warm_up()
    rows = []
    for group, likelihood, y in GROUPS:
        for name, prior in list(group.items())[: 2 if small else None]:
            rows += _rows(name, prior, likelihood, torch.tensor(y))
    report(__file__, rows, at, small)


if __name__ == "__main__":
    run(main)
