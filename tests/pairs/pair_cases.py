"""An oracle for conjugate models that knows nothing of pyro_cvi, and the conjugate pairs as a table.

A family is its log-partition A(natural), with constant base measure 1: means are its gradient, the
entropy is A - <natural, mean>. A pair states log p(x | z) = <message(x), T(z)> + constant(x). Then, with
scales s, the optimum is natural = s_p prior + sum_i s_i message_i, and

    ELBO = A(natural) - s_p A(prior) + sum_i s_i constant_i,

the log evidence where all scales are 1. All of it is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
LOG_2PI = math.log(2 * math.pi)
Natural = tuple[Tensor, ...]


def close(actual, expected, dtype, what=""):
    """Equal to 1e-8 in float64 and 1e-4 in float32, relative to max(1, |value|)."""
    actual = torch.as_tensor(actual, dtype=torch.float64).detach()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach()
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    error = (actual - expected).abs() / expected.abs().clamp(min=1.0)
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= TOLERANCE[dtype], f"{what}: off by {worst:.2e}\n{actual}\n{expected}"


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Log-partition, natural parameters of a torch distribution, and their event dims."""

    name: str
    log_partition: Callable[..., Tensor]
    natural_of: Callable[[object], Natural]
    event_dims: tuple[int, ...]

    def mean(self, natural: Natural) -> Natural:
        """E T(z), the gradient of the log-partition (in closed form where that saves much time)."""
        if self.name == "Gamma":
            a, b = natural[0] + 1, -natural[1]
            return torch.digamma(a) - b.log(), a / b
        if self.name == "Categorical":
            return (natural[0].softmax(-1),)
        if self.event_dims == (1, 2):
            cov = torch.linalg.inv(-2 * natural[1])
            loc = (cov @ natural[0].unsqueeze(-1)).squeeze(-1)
            return loc, cov + loc.unsqueeze(-1) * loc.unsqueeze(-2)
        with torch.enable_grad():
            leaves = tuple(n.detach().clone().requires_grad_() for n in natural)
            return torch.autograd.grad(self.log_partition(*leaves).sum(), leaves)

    def entropy(self, natural: Natural) -> Tensor:
        """A - <natural, mean>, summed over everything."""
        inner = sum((n * m).sum() for n, m in zip(natural, self.mean(natural), strict=True))
        return self.log_partition(*natural).sum() - inner


def peeled(d):
    """The distribution inside to_event."""
    while isinstance(d, dist.Independent):
        d = d.base_dist
    return d


def _log_beta(*concentrations):
    total = sum(concentrations)
    return sum(torch.lgamma(c) for c in concentrations) - torch.lgamma(total)


def _gamma_natural(d):
    if isinstance(d, torch.distributions.Exponential):
        return torch.zeros_like(d.rate), -d.rate
    return d.concentration - 1, -d.rate


def _mvn_partition(h, j):
    precision = -2 * j
    quadratic = (h * torch.linalg.solve(precision, h.unsqueeze(-1)).squeeze(-1)).sum(-1)
    return 0.5 * quadratic - 0.5 * torch.logdet(precision) + 0.5 * h.shape[-1] * LOG_2PI


def _mvn_natural(d):
    precision = torch.linalg.inv(d.covariance_matrix.double())
    return (precision @ d.loc.double().unsqueeze(-1)).squeeze(-1), -0.5 * precision


BETA = Family(
    "Beta",
    lambda a, b: _log_beta(a + 1, b + 1),
    lambda d: (d.concentration1 - 1, d.concentration0 - 1),
    (0, 0),
)
DIRICHLET = Family(
    "Dirichlet",
    lambda a: torch.lgamma(a + 1).sum(-1) - torch.lgamma((a + 1).sum(-1)),
    lambda d: (d.concentration - 1,),
    (1,),
)
GAMMA = Family(
    "Gamma",
    lambda a, b: torch.lgamma(a + 1) - (a + 1) * (-b).log(),
    _gamma_natural,
    (0, 0),
)
INVERSE_GAMMA = Family(
    "InverseGamma",
    lambda a, b: torch.lgamma(-a - 1) - (-a - 1) * (-b).log(),
    lambda d: (-d.concentration - 1, -d.rate),
    (0, 0),
)
NORMAL = Family(
    "Normal",
    lambda h, j: -(h**2) / (4 * j) - 0.5 * (-2 * j).log() + 0.5 * LOG_2PI,
    lambda d: (d.loc / d.scale**2, -0.5 / d.scale**2),
    (0, 0),
)
MVN = Family("MultivariateNormal", _mvn_partition, _mvn_natural, (1, 2))
CATEGORICAL = Family(
    "Categorical", lambda logits: logits.logsumexp(-1), lambda d: (d.logits,), (1,)
)


def natural_of(family: Family, d) -> Natural:
    """Natural parameters of a distribution of a family, in float64."""
    d = peeled(d)
    return tuple(n.double() for n in family.natural_of(d))


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A prior and a likelihood that are conjugate.

    `prior(k)` has the batch shape of `k`, with parameters that differ with `k`. `finite` is the support
    of x if it is finite; `missing` gives (message, constant, entropy) of a cell that is not observed,
    expected under the best q(x) given E T(z); None where such a cell has no posterior family.
    """

    name: str
    family: Family
    prior: Callable[[Tensor], object]
    likelihood: Callable[[Tensor], object]
    data: Callable[[tuple[int, ...]], Tensor]
    message: Callable[[Tensor], Natural]
    constant: Callable[[Tensor], Tensor]
    finite: Tensor | None = None
    missing: Callable[[Natural], tuple[Natural, Tensor, Tensor]] | None = None
    data_event_dim: int = 0


def zeros_like_cells(x: Tensor, event_dim: int = 0) -> Tensor:
    return torch.zeros(x.shape[: x.ndim - event_dim], dtype=torch.float64)


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.get_default_dtype())


_POOL = {
    "bits": [1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1],
    "counts": [2, 0, 5, 1, 3, 7, 4, 0, 2, 6, 1],
    "small": [2, 0, 5, 1, 3, 7, 4, 0, 2, 6, 1],
    "labels": [2, 0, 1, 2, 2, 1, 2, 0, 2, 2, 1],
    "positive": [0.5, 2.25, 1.125, 3.0, 0.25, 1.75, 0.875, 2.5, 4.0, 0.625, 1.375],
    "real": [0.5, -1.25, 2.125, 3.0, -0.25, 1.75, 0.875, -2.5, 4.0, 0.625, -1.375],
}


def pool(kind: str) -> Callable[[tuple[int, ...]], Tensor]:
    """Data of any shape: the numbers of a pool in turn (all exact in float32)."""

    def make(shape):
        n = math.prod(shape)
        values = (_POOL[kind] * (n // 11 + 1))[:n]
        if kind == "labels":
            return torch.tensor(values, dtype=torch.long).reshape(shape)
        return tensor(values).reshape(shape)

    return make


def one_hot(shape):
    return torch.eye(3, dtype=torch.get_default_dtype())[pool("labels")(shape)]


def rolls(shape):
    """Three counts that sum to seven."""
    first, second = pool("counts")(shape), pool("bits")(shape)
    first = first.clamp(max=6)
    return torch.stack([first, second, 7 - first - second], -1)


def plane(shape):
    return torch.stack([pool("real")(shape), pool("positive")(shape)], -1)


def _log_choose(n, x):
    return torch.lgamma(n + 1.0) - torch.lgamma(x + 1.0) - torch.lgamma(n - x + 1.0)


def _imputed_normal(precision_of, sign):
    """A Normal cell of which only E[precision] is known: variance 1 / E[precision]."""

    def missing(mean):
        variance = 1 / precision_of(mean)
        message = (torch.full_like(variance, 0.5 * sign), -0.5 * variance)
        constant = torch.full_like(variance, -0.5 * LOG_2PI)
        return message, constant, 0.5 * (LOG_2PI + 1 + variance.log())

    return missing


def _imputed_gamma(shape, rate_of, sign):
    """A Gamma cell with known shape, of which only E[rate] is known."""

    def missing(mean):
        b, k = rate_of(mean), torch.tensor(shape, dtype=torch.float64)
        message = (torch.full_like(b, sign * shape), -k / b)
        constant = (k - 1) * (torch.digamma(k) - b.log()) - torch.lgamma(k)
        entropy = k - b.log() + torch.lgamma(k) + (1 - k) * torch.digamma(k)
        return message, constant, entropy

    return missing


def _imputed_inverse_gamma(mean):
    """An inverse Gamma cell with concentration 5/2, of which only E[rate] is known."""
    b, k = mean[1], torch.tensor(2.5, dtype=torch.float64)
    log_x = b.log() - torch.digamma(k)
    entropy = k + b.log() + torch.lgamma(k) - (1 + k) * torch.digamma(k)
    return (torch.full_like(b, 2.5), -k / b), -3.5 * log_x - torch.lgamma(k), entropy


def _nothing(like):
    """A missing cell that is Gaussian given z shares its block, and says nothing of z."""

    def missing(mean):
        zero = torch.zeros_like(mean[0][..., 0] if like is MVN else mean[0])
        return tuple(torch.zeros_like(m) for m in mean), zero, zero

    return missing


def _pairs() -> list[Pair]:
    found = []

    def add(name, family, prior, likelihood, data, message, constant=None, **more):
        if constant is None:
            event = more.get("data_event_dim", 0)
            constant = lambda x: zeros_like_cells(x, event)  # noqa: E731
        found.append(Pair(name, family, prior, likelihood, data, message, constant, **more))

    # Beta
    beta = lambda k: dist.Beta(2.0 + k, 3.0 + 0.5 * k)  # noqa: E731
    bits, seven = torch.tensor([0.0, 1.0]), torch.arange(8.0)
    up, down = lambda x: (x, 1 - x), lambda x: (1 - x, x)
    for name, likelihood, message in (
        ("bernoulli", lambda p: dist.Bernoulli(p), up),
        ("bernoulli_probs", lambda p: dist.Bernoulli(probs=p), up),
        ("bernoulli_complement", lambda p: dist.Bernoulli(1 - p), down),
    ):
        add(f"beta-{name}", BETA, beta, likelihood, pool("bits"), message, finite=bits)
    for name, likelihood, message in (
        ("binomial", lambda p: dist.Binomial(7, p), lambda x: (x, 7 - x)),
        ("binomial_complement", lambda p: dist.Binomial(7, 1 - p), lambda x: (7 - x, x)),
        (
            "binomial_tensor_count",
            lambda p: dist.Binomial(torch.full(p.shape, 7.0), probs=p),
            lambda x: (x, 7 - x),
        ),
    ):
        add(f"beta-{name}", BETA, beta, likelihood, pool("counts"), message,
            lambda x: _log_choose(7.0 + 0 * x, x), finite=seven)  # fmt: skip
    add("beta-geometric", BETA, beta, lambda p: dist.Geometric(p), pool("counts"),
        lambda x: (torch.ones_like(x), x))  # fmt: skip
    add("beta-negative_binomial", BETA, beta, lambda p: dist.NegativeBinomial(4.0, p),
        pool("counts"), lambda x: (x, torch.full_like(x, 4.0)),
        lambda x: torch.lgamma(x + 4) - torch.lgamma(x + 1) - math.lgamma(4))  # fmt: skip

    # Dirichlet
    base = torch.tensor([1.0, 2.0, 3.5])
    dirichlet = lambda k: dist.Dirichlet(base.to(k) + k.unsqueeze(-1))  # noqa: E731
    eye = torch.eye(3, dtype=torch.float64)
    add("dirichlet-categorical", DIRICHLET, dirichlet, lambda p: dist.Categorical(p),
        pool("labels"), lambda x: (eye[x.long()],), finite=torch.arange(3))  # fmt: skip
    add("dirichlet-one_hot", DIRICHLET, dirichlet, lambda p: dist.OneHotCategorical(p), one_hot,
        lambda x: (x,), finite=torch.eye(3), data_event_dim=1)  # fmt: skip
    add("dirichlet-multinomial", DIRICHLET, dirichlet, lambda p: dist.Multinomial(7, p), rolls,
        lambda x: (x,),
        lambda x: torch.lgamma(x.sum(-1) + 1) - torch.lgamma(x + 1).sum(-1),
        data_event_dim=1)  # fmt: skip

    # Gamma
    gamma = lambda k: dist.Gamma(2.0 + k, 1.5 + 0.25 * k)  # noqa: E731
    priors = {
        "gamma": gamma,
        "exponential": lambda k: dist.Exponential(1.5 + 0.25 * k),
        "chi2": lambda k: dist.Chi2(3.0 + k),
    }
    factorial = lambda x: -torch.lgamma(x + 1)  # noqa: E731
    for name, prior in priors.items():
        add(f"{name}-poisson", GAMMA, prior, lambda z: dist.Poisson(z), pool("counts"),
            lambda x: (x, -torch.ones_like(x)), factorial)  # fmt: skip
    for name, likelihood, c in (
        ("poisson_times_3", lambda z: dist.Poisson(3 * z), 3.0),
        ("poisson_half", lambda z: dist.Poisson(z / 2), 0.5),
    ):
        add(f"gamma-{name}", GAMMA, gamma, likelihood, pool("counts"),
            lambda x, c=c: (x, torch.full_like(x, -c)),
            lambda x, c=c: factorial(x) + x * math.log(c))  # fmt: skip
    add("gamma-exponential", GAMMA, gamma, lambda z: dist.Exponential(z), pool("positive"),
        lambda x: (torch.ones_like(x), -x),
        missing=_imputed_gamma(1.0, lambda m: m[1], 1))  # fmt: skip
    add("gamma-exponential_times_2", GAMMA, gamma, lambda z: dist.Exponential(2.0 * z),
        pool("positive"), lambda x: (torch.ones_like(x), -2 * x),
        lambda x: torch.full_like(x, math.log(2.0)))  # fmt: skip
    gamma_constant = lambda x: 1.5 * x.log() - math.lgamma(2.5)  # noqa: E731
    add("gamma-gamma_rate", GAMMA, gamma, lambda z: dist.Gamma(2.5, z), pool("positive"),
        lambda x: (torch.full_like(x, 2.5), -x), gamma_constant,
        missing=_imputed_gamma(2.5, lambda m: m[1], 1))  # fmt: skip
    add("gamma-inverse_gamma_rate", GAMMA, gamma, lambda z: dist.InverseGamma(2.5, z),
        pool("positive"), lambda x: (torch.full_like(x, 2.5), -1 / x),
        lambda x: -3.5 * x.log() - math.lgamma(2.5), missing=_imputed_inverse_gamma)  # fmt: skip

    spellings = {
        "tau.rsqrt()": lambda t: t.rsqrt(),
        "torch.rsqrt(tau)": lambda t: torch.rsqrt(t),
        "1 / tau.sqrt()": lambda t: 1 / t.sqrt(),
        "1.0 / torch.sqrt(tau)": lambda t: 1.0 / torch.sqrt(t),
        "tau ** -0.5": lambda t: t**-0.5,
        "1 / tau ** 0.5": lambda t: 1 / t**0.5,
        "(1 / tau).sqrt()": lambda t: (1 / t).sqrt(),
        "(1 / tau) ** 0.5": lambda t: (1 / t) ** 0.5,
        "tau.pow(-0.5)": lambda t: t.pow(-0.5),
        "torch.pow(tau, -0.5)": lambda t: torch.pow(t, -0.5),
        "tau.reciprocal().sqrt()": lambda t: t.reciprocal().sqrt(),
        "tau.sqrt().reciprocal()": lambda t: t.sqrt().reciprocal(),
        "tau.pow(-1).sqrt()": lambda t: t.pow(-1).sqrt(),
    }
    square = lambda x: 0.5 * (x - 1) ** 2  # noqa: E731
    normal_constant = lambda x: torch.full_like(x, -0.5 * LOG_2PI)  # noqa: E731
    for text, spell in spellings.items():
        add(f"gamma-normal[{text}]", GAMMA, gamma,
            lambda t, spell=spell: dist.Normal(1.0, spell(t)), pool("real"),
            lambda x: (torch.full_like(x, 0.5), -square(x)), normal_constant,
            missing=_imputed_normal(lambda m: m[1], 1))  # fmt: skip
    for text in ("tau.rsqrt()", "1 / tau.sqrt()"):
        add(f"gamma-log_normal[{text}]", GAMMA, gamma,
            lambda t, spell=spellings[text]: dist.LogNormal(1.0, spell(t)), pool("positive"),
            lambda x: (torch.full_like(x, 0.5), -square(x.log())),
            lambda x: normal_constant(x) - x.log())  # fmt: skip

    plane_message = lambda x: (  # noqa: E731
        torch.ones_like(x[..., 0]), -0.5 * ((x - centre.double()) ** 2).sum(-1)
    )  # fmt: skip
    centre = torch.tensor([0.5, 1.0])
    unit = lambda t: torch.eye(2).to(t)  # noqa: E731
    wide = lambda t: t[..., None, None]  # noqa: E731
    mvn = {
        "covariance eye / tau": lambda t: {"covariance_matrix": unit(t) / wide(t)},
        "scale_tril eye * tau.rsqrt()": lambda t: {"scale_tril": unit(t) * wide(t).rsqrt()},
        "precision_matrix eye * tau": lambda t: {"precision_matrix": unit(t) * wide(t)},
        "covariance diag_embed": lambda t: {
            "covariance_matrix": torch.diag_embed((1 / t).unsqueeze(-1).expand(*t.shape, 2))
        },
    }
    for text, scale in mvn.items():
        add(f"gamma-mvn[{text}]", GAMMA, gamma,
            lambda t, scale=scale: dist.MultivariateNormal(centre.to(t), **scale(t)), plane,
            plane_message, lambda x: torch.full_like(x[..., 0], -LOG_2PI),
            data_event_dim=1)  # fmt: skip
    correlated = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    inside = torch.linalg.inv(correlated.double())
    add("gamma-mvn[covariance known / tau]", GAMMA, gamma,
        lambda t: dist.MultivariateNormal(torch.zeros(2).to(t), correlated.to(t) / wide(t)), plane,
        lambda x: (torch.ones_like(x[..., 0]), -0.5 * ((x @ inside) * x).sum(-1)),
        lambda x: torch.full_like(x[..., 0], -LOG_2PI + 0.5 * float(torch.logdet(inside))),
        data_event_dim=1)  # fmt: skip

    # inverse Gamma
    inverse = lambda k: dist.InverseGamma(3.0 + k, 2.0 + 0.5 * k)  # noqa: E731
    variances = {
        "v.sqrt()": lambda v: v.sqrt(),
        "torch.sqrt(v)": lambda v: torch.sqrt(v),
        "v ** 0.5": lambda v: v**0.5,
        "v.pow(0.5)": lambda v: v.pow(0.5),
        "(1 / v).rsqrt()": lambda v: (1 / v).rsqrt(),
    }
    for text, spell in variances.items():
        add(f"inverse_gamma-normal[{text}]", INVERSE_GAMMA, inverse,
            lambda v, spell=spell: dist.Normal(1.0, spell(v)), pool("real"),
            lambda x: (torch.full_like(x, -0.5), -square(x)), normal_constant,
            missing=_imputed_normal(lambda m: m[1], -1))  # fmt: skip
    add("inverse_gamma-log_normal", INVERSE_GAMMA, inverse,
        lambda v: dist.LogNormal(1.0, v.sqrt()), pool("positive"),
        lambda x: (torch.full_like(x, -0.5), -square(x.log())),
        lambda x: normal_constant(x) - x.log())  # fmt: skip
    add("inverse_gamma-mvn[covariance eye * v]", INVERSE_GAMMA, inverse,
        lambda v: dist.MultivariateNormal(centre.to(v), unit(v) * wide(v)), plane,
        lambda x: (-torch.ones_like(x[..., 0]), plane_message(x)[1]),
        lambda x: torch.full_like(x[..., 0], -LOG_2PI), data_event_dim=1)  # fmt: skip
    add("inverse_gamma-exponential_scale", INVERSE_GAMMA, inverse,
        lambda v: dist.Exponential(1 / v), pool("positive"), lambda x: (-torch.ones_like(x), -x),
        missing=_imputed_gamma(1.0, lambda m: m[1], -1))  # fmt: skip
    add("inverse_gamma-poisson", INVERSE_GAMMA, inverse, lambda v: dist.Poisson(2 / v),
        pool("counts"), lambda x: (-x, torch.full_like(x, -2.0)),
        lambda x: factorial(x) + x * math.log(2))  # fmt: skip
    add("inverse_gamma-gamma_scale", INVERSE_GAMMA, inverse,
        lambda v: dist.Gamma(2.5, v.reciprocal()), pool("positive"),
        lambda x: (torch.full_like(x, -2.5), -x), gamma_constant,
        missing=_imputed_gamma(2.5, lambda m: m[1], -1))  # fmt: skip

    # Normal
    normal = lambda k: dist.Normal(0.5 + k, 1.5 + 0.25 * k)  # noqa: E731
    for name, loc, a, c in (
        ("z", lambda z: z, 1.0, 0.0),
        ("2 z - 1", lambda z: 2 * z - 1, 2.0, -1.0),
        ("3 - z / 2", lambda z: 3 - z / 2, -0.5, 3.0),
    ):
        moved = lambda x, a=a, c=c: (4 * a * (x - c), torch.full_like(x, -2 * a * a))  # noqa: E731
        ends = lambda x, c=c: -2 * (x - c) ** 2 - 0.5 * LOG_2PI + math.log(2)  # noqa: E731
        add(f"normal-normal[{name}]", NORMAL, normal,
            lambda z, loc=loc: dist.Normal(loc(z), 0.5), pool("real"), moved, ends,
            missing=_nothing(NORMAL))  # fmt: skip
        add(f"normal-log_normal[{name}]", NORMAL, normal,
            lambda z, loc=loc: dist.LogNormal(loc(z), 0.5), pool("positive"),
            lambda x, moved=moved: moved(x.log()),
            lambda x, ends=ends: ends(x.log()) - x.log())  # fmt: skip
    prior_cov = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    noise = torch.tensor([[1.0, -0.25], [-0.25, 0.5]], dtype=torch.float64)
    weight = torch.linalg.inv(noise)
    mvn_prior = lambda k: dist.MultivariateNormal(  # noqa: E731
        torch.tensor([0.5, -1.0]).to(k) + k.unsqueeze(-1), prior_cov.to(k)
    )
    wide_mvn = lambda k: dist.MultivariateNormal(  # noqa: E731
        torch.tensor([0.5, -1.0]).to(k) + k.unsqueeze(-1),
        precision_matrix=torch.linalg.inv(prior_cov.double()).to(k),
    )
    gaussian = lambda x: (  # noqa: E731
        x @ weight, -0.5 * weight.expand(*x.shape[:-1], 2, 2)
    )  # fmt: skip
    gaussian_constant = lambda x: (  # noqa: E731
        -0.5 * ((x @ weight) * x).sum(-1) - LOG_2PI + 0.5 * torch.logdet(weight)
    )
    for name, prior, likelihood in (
        ("covariance", mvn_prior, lambda z: dist.MultivariateNormal(z, noise.to(z))),
        (
            "scale_tril",
            wide_mvn,
            lambda z: dist.MultivariateNormal(z, scale_tril=torch.linalg.cholesky(noise).to(z)),
        ),
        (
            "precision",
            mvn_prior,
            lambda z: dist.MultivariateNormal(z, precision_matrix=weight.to(z)),
        ),
    ):
        add(f"mvn-mvn[{name}]", MVN, prior, likelihood, plane, gaussian, gaussian_constant,
            data_event_dim=1, missing=_nothing(MVN))  # fmt: skip
    add("mvn-normal", MVN, mvn_prior, lambda z: dist.Normal(z, 0.5).to_event(1), plane,
        lambda x: (4 * x, -2 * torch.eye(2, dtype=torch.float64).expand(*x.shape, 2)),
        lambda x: (-2 * x**2 - 0.5 * LOG_2PI + math.log(2)).sum(-1), data_event_dim=1,
        missing=_nothing(MVN))  # fmt: skip
    return found


PAIRS = {p.name: p for p in _pairs()}
CANONICAL = [
    "beta-bernoulli", "beta-binomial", "beta-geometric", "beta-negative_binomial",
    "dirichlet-categorical", "dirichlet-one_hot", "dirichlet-multinomial",
    "gamma-poisson", "gamma-exponential", "gamma-gamma_rate",
    "gamma-normal[tau.rsqrt()]", "gamma-log_normal[tau.rsqrt()]",
    "inverse_gamma-normal[v.sqrt()]", "inverse_gamma-exponential_scale",
    "normal-normal[2 z - 1]", "normal-log_normal[z]", "mvn-mvn[covariance]", "mvn-normal",
]  # fmt: skip
"""One spelling of each pair: it is tested in every structure, its other spellings in some."""
OPAQUE_COVARIANCE = [n for n in PAIRS if n.startswith(("gamma-mvn", "inverse_gamma-mvn"))]
"""A latent precision inside the matrix of a MultivariateNormal."""


# --- the oracle for one block ---------------------------------------------------------------------


def summed(cells: Tensor, batch: tuple[int, ...], event_dim: int) -> Tensor:
    """Sum of cell values over the plates that the latent is not in."""
    n = cells.ndim - event_dim
    event = cells.shape[n:]
    cells = cells.sum(tuple(range(n - len(batch)))) if n > len(batch) else cells
    for i, size in enumerate(batch):
        if size == 1 and cells.shape[i] > 1:
            cells = cells.sum(i, keepdim=True)
    return cells.expand(torch.Size((*batch, *event)))


def exact_posterior(
    pair: Pair, prior: Natural, x: Tensor, weight: Tensor, batch: tuple[int, ...], prior_scale=1.0
) -> tuple[Natural, Tensor]:
    """Natural parameters and ELBO of the exact (tempered) posterior."""
    x = x if x.dtype == torch.long else x.double()
    weight = torch.as_tensor(weight, dtype=torch.float64)
    weight = weight.expand(x.shape[: x.ndim - pair.data_event_dim])
    prior_scale = torch.as_tensor(prior_scale, dtype=torch.float64)
    used = []
    for n, m, e in zip(prior, pair.message(x), pair.family.event_dims, strict=True):
        lift = (..., *([None] * e))
        m = torch.where(weight[lift] != 0, m * weight[lift], torch.zeros_like(m))
        used.append(prior_scale[lift] * n + summed(m, batch, e))
    constant = torch.where(weight != 0, pair.constant(x) * weight, torch.zeros_like(weight))
    a = pair.family.log_partition
    elbo = a(*used).sum() - (prior_scale * a(*prior)).sum() + constant.sum()
    return tuple(used), elbo


def posterior_with_missing(
    pair: Pair, prior: Natural, x: Tensor, keep: Tensor, batch: tuple[int, ...]
) -> tuple[Natural, Tensor]:
    """Mean-field q(z) prod q(x_i) over the cells that are not kept: iterated to its fixed point."""
    lift = (..., *([None] * pair.data_event_dim))
    x = torch.where(keep[lift], x, x[tuple(keep.nonzero()[0])])
    natural, elbo = exact_posterior(pair, prior, x, keep.double(), batch)
    seen = tuple(n.clone() for n in natural)
    for _ in range(5000):
        message, rest = _missing_cells(pair, pair.family.mean(natural), keep.shape)
        rest = torch.where(keep, torch.zeros(()), rest).sum()
        new = []
        for n, m, e in zip(seen, message, pair.family.event_dims, strict=True):
            m = torch.where(keep[(..., *([None] * e))], torch.zeros_like(m), m)
            new.append(n + summed(m, batch, e))
        change = max(float((a - b).abs().max()) for a, b in zip(new, natural, strict=True))
        natural = tuple(new)
        if change < 1e-12:
            break
    a = pair.family.log_partition
    return natural, elbo - a(*seen).sum() + a(*natural).sum() + rest


def _missing_cells(pair: Pair, mean: Natural, shape: torch.Size) -> tuple[Natural, Tensor]:
    """For each cell the expected message, and the expected constant plus entropy."""
    dims = pair.family.event_dims
    mean = tuple(
        m.expand(torch.Size((*shape, *m.shape[m.ndim - e :])))
        for m, e in zip(mean, dims, strict=True)
    )
    if pair.finite is None:
        message, constant, entropy = pair.missing(mean)
        return message, constant + entropy
    support = pair.finite if pair.finite.dtype == torch.long else pair.finite.double()
    message, constant = pair.message(support), pair.constant(support)
    # one row per value of x, in front of the cells
    message = tuple(
        m.reshape(len(support), *([1] * len(shape)), *m.shape[1:]).to(torch.float64)
        for m in message
    )
    logits = constant.reshape(-1, *([1] * len(shape)))
    for m, t, e in zip(message, mean, dims, strict=True):
        inner = m * t
        logits = logits + (inner.sum(tuple(range(-e, 0))) if e else inner)
    r = logits.softmax(0)
    rest = (r * (constant.reshape(-1, *([1] * len(shape))) - logits.log_softmax(0))).sum(0)
    expected = tuple(
        (r[(..., *([None] * e))] * m).sum(0) for m, e in zip(message, dims, strict=True)
    )
    return expected, rest


# --- fits of the package --------------------------------------------------------------------------


def fit_to_the_end(model, *args, **kwargs):
    """Guide, CVI and loss at the fixed point."""
    guide = AutoCVI(model, **kwargs)
    cvi = CVI(model, guide)
    return guide, cvi, converged(guide, cvi, [], *args)


def converged(guide, cvi, losses, *args):
    """The loss at the fixed point: `run`, then steps until no number in the guide moves.

    A loss is flat where it is least: `run` alone knows the posterior to the root of its `tol` only.
    """
    double = torch.get_default_dtype() == torch.float64
    losses += cvi.run(*args, num_steps=500, tol=1e-13 if double else 1e-6).losses
    before = _state(guide)
    for _ in range(200):
        losses.append(cvi.step(*args))
        after = _state(guide)
        change = (after - before).abs() / after.abs().clamp(min=1.0)
        if float(change.max()) <= (1e-9 if double else 1e-5):
            break
        before = after
    slack = 1e-10 if double else 1e-4
    for a, b in zip(losses, losses[1:], strict=False):
        assert b <= a + slack * max(1.0, abs(a)), f"the bound falls from {-a} to {-b}"
    return losses[-1]


def _state(guide):
    return torch.cat([v.detach().double().reshape(-1) for v in guide.state_dict().values()])


def fitted(model, *args, steps=1, **kwargs):
    """Guide, CVI and losses after some steps."""
    guide = AutoCVI(model, **kwargs)
    cvi = CVI(model, guide)
    return guide, cvi, [cvi.step(*args) for _ in range(steps)]


def hows(cvi) -> set[str]:
    """How the messages were found."""
    return {e.how for e in cvi.explain().edges}


def check_posterior(guide, site, family, expected, dtype):
    """The guide's posterior of a site has the expected natural parameters."""
    if family in (NORMAL, MVN):
        check_gaussian(guide, site, family, expected, dtype)
        return
    actual = natural_of(family, guide.posterior(site))
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        close(a, e, dtype, f"natural parameter {i} of '{site}'")


def check_gaussian(guide, site, family, expected, dtype):
    """Mean and covariance of a site, the latter over all its elements at once."""
    if family is NORMAL:
        cov, mean = (-0.5 / expected[1]), (-0.5 * expected[0] / expected[1])
        whole, variance = torch.diag(cov.reshape(-1)), cov
    else:
        cov = torch.linalg.inv(-2 * expected[1])
        mean = (cov @ expected[0].unsqueeze(-1)).squeeze(-1)
        variance = cov.diagonal(dim1=-2, dim2=-1)
        whole = torch.block_diag(*cov.reshape(-1, *cov.shape[-2:]))
    marginal, joint = guide.posterior(site), guide.joint([site])
    close(marginal.mean, mean, dtype, f"mean of '{site}'")
    close(marginal.variance, variance, dtype, f"variance of '{site}'")
    close(joint.mean, mean.reshape(-1), dtype, f"joint mean of '{site}'")
    close(joint.covariance_matrix, whole, dtype, f"covariance of '{site}'")
