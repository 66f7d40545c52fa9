"""For every density rule: constructors, parameters within their domain, the value's support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.families import Unconstrained


@dataclass(frozen=True)
class Case:
    """`build` makes the distribution from parameters, each made from standard normal noise."""

    key: type  # the class that the rule is registered for
    build: Callable[..., dist.TorchDistribution]
    parameters: dict[str, Callable[[Tensor], Tensor]]
    event: tuple[int, ...] = ()  # event shape of each parameter that has one
    fixed: tuple[str, ...] = ()  # parameters that no latent may enter
    value: str = "sample"  # support of the value when it is latent: a key of DOMAIN


def real(x: Tensor) -> Tensor:
    return x


def positive(x: Tensor) -> Tensor:
    return x.exp() + 0.1


def unit(x: Tensor) -> Tensor:
    return 0.05 + 0.9 * torch.sigmoid(x)


def simplex(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def tril(x: Tensor) -> Tensor:
    """A Cholesky factor from noise of a vector's shape, (*batch, n) -> (*batch, n, n)."""
    n = x.shape[-1]
    lower = (x.unsqueeze(-1) * x.unsqueeze(-2)).tril(-1)
    return lower + torch.diag_embed(x.abs() + 0.5) + 0 * torch.eye(n, dtype=x.dtype)


def spd(x: Tensor) -> Tensor:
    root = tril(x)
    return root @ root.mT


def degrees(x: Tensor) -> Tensor:
    """Degrees of freedom of a Wishart in n dimensions, (*batch, n) -> (*batch,)."""
    return x.shape[-1] + x[..., 0].exp()


class Improper(dist.ImproperUniform):  # type: ignore[misc]
    """One that can be drawn from, for the tests."""

    def sample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.rand((*sample_shape, *self.batch_shape))


td = torch.distributions
CASES = {
    "Normal": Case(td.Normal, dist.Normal, {"loc": real, "scale": positive}, value="real"),
    "LogNormal": Case(
        td.LogNormal, dist.LogNormal, {"loc": real, "scale": positive}, value="positive"
    ),
    "MVN covariance": Case(
        td.MultivariateNormal,
        lambda loc, m: dist.MultivariateNormal(loc, covariance_matrix=m),
        {"loc": real, "m": spd}, (3,), ("m",), "real",
    ),
    "MVN precision": Case(
        td.MultivariateNormal,
        lambda loc, m: dist.MultivariateNormal(loc, precision_matrix=m),
        {"loc": real, "m": spd}, (3,), value="real",
    ),
    "MVN scale_tril": Case(
        td.MultivariateNormal,
        lambda loc, m: dist.MultivariateNormal(loc, scale_tril=m),
        {"loc": real, "m": tril}, (3,), ("m",), "real",
    ),
    "Wishart covariance": Case(
        td.Wishart, lambda df, m: dist.Wishart(df, covariance_matrix=m),
        {"df": degrees, "m": spd}, (3,), ("df", "m"), "positive_definite",
    ),
    "Wishart precision": Case(
        td.Wishart, lambda df, m: dist.Wishart(df, precision_matrix=m),
        {"df": degrees, "m": spd}, (3,), ("df",), "positive_definite",
    ),
    "Wishart scale_tril": Case(
        td.Wishart, lambda df, m: dist.Wishart(df, scale_tril=m),
        {"df": degrees, "m": tril}, (3,), ("df", "m"), "positive_definite",
    ),
    "Gamma": Case(
        td.Gamma, dist.Gamma, {"concentration": positive, "rate": positive}, value="positive"
    ),
    "Chi2": Case(td.Chi2, dist.Chi2, {"df": positive}, value="positive"),
    "InverseGamma": Case(
        dist.InverseGamma, dist.InverseGamma, {"concentration": positive, "rate": positive},
        value="positive",
    ),
    "Exponential": Case(td.Exponential, dist.Exponential, {"rate": positive}, value="positive"),
    "Beta": Case(
        td.Beta, dist.Beta, {"concentration1": positive, "concentration0": positive}, value="unit"
    ),
    "Dirichlet": Case(
        td.Dirichlet, dist.Dirichlet, {"concentration": positive}, (3,), value="simplex"
    ),
    "Transformed, exp": Case(
        td.TransformedDistribution,
        lambda loc, scale: dist.TransformedDistribution(
            dist.Normal(loc, scale), [dist.transforms.ExpTransform()]
        ),
        {"loc": real, "scale": positive}, value="positive",
    ),
    "Transformed, logit": Case(
        td.TransformedDistribution,
        lambda loc, scale: dist.TransformedDistribution(
            dist.Normal(loc, scale),
            [dist.transforms.AffineTransform(0.5, 2.0), dist.transforms.SigmoidTransform()],
        ),
        {"loc": real, "scale": positive}, value="unit",
    ),
    "Transformed, events": Case(
        td.TransformedDistribution,
        lambda loc, scale: dist.TransformedDistribution(
            dist.Normal(loc, scale).to_event(1),
            [dist.transforms.AffineTransform(torch.tensor([0.0, 1.0, 2.0]), 0.5, event_dim=1)],
        ),
        {"loc": real, "scale": positive}, (3,), value="real",
    ),
    "ImproperUniform": Case(
        dist.ImproperUniform, lambda like: Improper(td.constraints.positive, like.shape, ()),
        {"like": real}, fixed=("like",), value="positive",
    ),
    "Unconstrained, half line": Case(
        Unconstrained, lambda scale: Unconstrained(dist.HalfCauchy(scale)), {"scale": positive},
        value="real",
    ),
    "Unconstrained, interval": Case(
        Unconstrained,
        lambda a, b: Unconstrained(dist.TransformedDistribution(
            dist.Normal(a, b), [dist.transforms.SigmoidTransform()]
        )),
        {"a": real, "b": positive}, value="real",
    ),
    "Unconstrained, events": Case(
        Unconstrained, lambda scale: Unconstrained(dist.HalfNormal(scale).to_event(1)),
        {"scale": positive}, (3,), value="real",
    ),
    "Delta": Case(dist.Delta, lambda v: dist.Delta(v, log_density=v.new_tensor(0.3)), {"v": real}),
    "Delta event": Case(
        dist.Delta, lambda v: dist.Delta(v, event_dim=1), {"v": real}, (3,)
    ),
    "Bernoulli probs": Case(td.Bernoulli, lambda p: dist.Bernoulli(p), {"p": unit}),
    "Bernoulli logits": Case(td.Bernoulli, lambda f: dist.Bernoulli(logits=f), {"f": real}),
    "Binomial probs": Case(td.Binomial, lambda p: dist.Binomial(7, p), {"p": unit}),
    "Binomial logits": Case(td.Binomial, lambda f: dist.Binomial(7, logits=f), {"f": real}),
    "Geometric probs": Case(td.Geometric, lambda p: dist.Geometric(p), {"p": unit}),
    "Geometric logits": Case(td.Geometric, lambda f: dist.Geometric(logits=f), {"f": real}),
    "NegativeBinomial probs": Case(
        td.NegativeBinomial, lambda r, p: dist.NegativeBinomial(r, p), {"r": positive, "p": unit}
    ),
    "NegativeBinomial logits": Case(
        td.NegativeBinomial, lambda r, f: dist.NegativeBinomial(r, logits=f),
        {"r": positive, "f": real},
    ),
    "Categorical probs": Case(td.Categorical, lambda p: dist.Categorical(p), {"p": simplex}, (3,)),
    "Categorical logits": Case(
        td.Categorical, lambda f: dist.Categorical(logits=f), {"f": real}, (3,)
    ),
    "OneHotCategorical probs": Case(
        td.OneHotCategorical, lambda p: dist.OneHotCategorical(p), {"p": simplex}, (3,)
    ),
    "OneHotCategorical logits": Case(
        td.OneHotCategorical, lambda f: dist.OneHotCategorical(logits=f), {"f": real}, (3,)
    ),
    "Multinomial probs": Case(
        td.Multinomial, lambda p: dist.Multinomial(6, p), {"p": simplex}, (3,)
    ),
    "Multinomial logits": Case(
        td.Multinomial, lambda f: dist.Multinomial(6, logits=f), {"f": real}, (3,)
    ),
    "Poisson": Case(td.Poisson, dist.Poisson, {"rate": positive}),
    "OrderedLogistic": Case(
        dist.OrderedLogistic,
        lambda f: dist.OrderedLogistic(f, torch.tensor([-1.0, 0.3, 1.1], dtype=f.dtype)),
        {"f": real},
    ),
    "ZeroInflatedPoisson gate": Case(
        dist.ZeroInflatedDistribution,
        lambda rate, gate: dist.ZeroInflatedPoisson(rate, gate=gate),
        {"rate": positive, "gate": unit},
    ),
    "ZeroInflatedPoisson gate_logits": Case(
        dist.ZeroInflatedDistribution,
        lambda rate, f: dist.ZeroInflatedPoisson(rate, gate_logits=f),
        {"rate": positive, "f": real},
    ),
    "ZeroInflatedNegativeBinomial": Case(
        dist.ZeroInflatedDistribution,
        lambda f, gate: dist.ZeroInflatedNegativeBinomial(3.0, logits=f, gate=gate),
        {"f": real, "gate": unit},
    ),
    "MixtureSameFamily": Case(
        td.MixtureSameFamily,
        lambda w, loc: dist.MixtureSameFamily(dist.Categorical(w), dist.Normal(loc, 0.7)),
        {"w": simplex, "loc": real},
        (3,),
    ),
}  # fmt: skip

KIND = {
    real: "real", positive: "positive", unit: "unit", simplex: "simplex", spd: "positive_definite"
}  # fmt: skip
DOMAIN = {kind: domain for domain, kind in KIND.items()}
