"""The laws of single sites under a block's belief, as Pyro distributions, quantiles and medians."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_cvi.errors import CVIError
from pyro_cvi.families import WISHART
from pyro_cvi.families.quantiles import quantile as family_quantile
from pyro_cvi.gaussians.chain import Blocks
from pyro_cvi.graph.chain import Chain
from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.symbolic import Latent
from pyro_cvi.linalg import broadcast_shapes
from pyro_cvi.structured import ChainBelief, ProcessBelief, StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

_JOINT = 4000
"""Most scalars of a site in a large block that is given with its covariance, not by its marginals."""
_DRAWS = 10_000
"""For quantiles that have no other way."""
_NODES = 80
"""Gauss-Hermite nodes for the moments of a transformed Gaussian."""

__all__ = [
    "FiniteSupport",
    "StructuredLaw",
    "as_belief",
    "draw_chain",
    "finite_law",
    "index_of",
    "is_falling",
    "joint",
    "marginal",
    "median",
    "quantile",
    "scalar_transform",
]


def as_belief(block: Block, tensors: tuple[Tensor, ...]) -> Belief:
    """The belief of a block from its tensors."""
    if isinstance(block.form, Chain):
        nodes, border, *blocks = tensors
        return ChainBelief(block.form.pattern, nodes, border, Blocks(*blocks))
    if block.form is not None:
        loc, precision, coefficients, *curvature = tensors
        return ProcessBelief(block.form.predictors, loc, precision, coefficients, curvature)
    if block.layout is not None:
        return GaussianBelief(*tensors)
    return FamilyBelief(block.family, tensors)


def marginal(latent: Latent, block: Block, belief: Belief) -> Any:
    """q(z) of one site, in the model's space and with the site's batch and event shape."""
    if isinstance(belief, GaussianBelief | StructuredBelief):
        law = _gaussian(latent, block, belief)
        if latent.transform is None:
            return law
        result = Transformed(law, [latent.transform])
        result.own_support = latent.own_support
        return result
    assert isinstance(belief, FamilyBelief)
    if block.is_chain:
        return finite_law(latent, _probabilities(latent, block, belief).log())
    if latent.enum_dim is not None:
        return finite_law(latent, belief.natural[0])
    d: Any = belief.family.to_distribution(belief.natural)
    extra = latent.event_dim - d.event_dim
    return d.to_event(extra) if extra > 0 else d


class Transformed(dist.TransformedDistribution):
    """The law of T(u) for Gaussian u; mean and variance by quadrature where T is one of scalars.

    `own_support` is that of the site, where it is known: torch's bijection to positive values ends in an
    affine map, and says that it goes to all real numbers.
    """

    own_support: Any = None

    @property
    def support(self) -> Any:
        """The support of the site."""
        return super().support if self.own_support is None else self.own_support

    def expand(self, batch_shape: Any, _instance: Any = None) -> Transformed:
        new: Transformed = super().expand(batch_shape, _instance)
        new.own_support = self.own_support
        return new

    def _moment(self, power: int) -> Tensor:
        (transform,) = self.transforms
        if (scalar := scalar_transform(transform)) is None:
            raise NotImplementedError(
                "mean and variance of a vector that is transformed as a whole: take those of draws, "
                "posterior(site).sample([1000]).mean(0)"
            )
        normal = self.base_dist
        loc, scale = normal.mean, normal.stddev
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        x, w = (torch.as_tensor(a).to(loc) for a in (nodes, weights / weights.sum()))
        values = scalar(loc + scale * x.reshape(-1, *[1] * loc.ndim))
        return torch.tensordot(w, values**power, dims=1)

    @property
    def mean(self) -> Tensor:
        """E T(u), element by element."""
        return self._moment(1)

    @property
    def variance(self) -> Tensor:
        """E T(u)^2 - (E T(u))^2."""
        return (self._moment(2) - self._moment(1) ** 2).clamp(min=0)


def scalar_transform(transform: Any) -> Any:
    """The transform of single scalars that T consists of, if it does."""
    while isinstance(transform, dist.transforms.IndependentTransform):
        transform = transform.base_transform
    return transform if transform.domain.event_dim == transform.codomain.event_dim == 0 else None


def _gaussian(latent: Latent, block: Block, belief: GaussianBelief | StructuredBelief) -> Any:
    layout = block.layout
    assert layout is not None
    if isinstance(belief, StructuredBelief):
        return _structured(latent, layout.flat(latent.name), belief)
    element, position = layout.element[latent.name], layout.position[latent.name]
    loc = belief.loc[element, position].reshape(latent.shape)
    event = latent.shape[-1] if latent.event_dim == 1 else 1
    if event > 1 and layout.width > 1:
        rows, places = element.reshape(-1, event), position.reshape(-1, event)
        if bool((rows == rows[:, :1]).all()):
            half = belief.scale_tril[rows, places].reshape(*latent.shape, layout.width)
            return dist.MultivariateNormal(loc, scale_tril=_triangular(half))
    scale = belief.scale_tril[element, position].square().sum(-1).sqrt()
    d = dist.Normal(loc, scale.reshape(latent.shape))
    return d.to_event(latent.event_dim) if latent.event_dim else d


def _structured(latent: Latent, index: Tensor, belief: StructuredBelief) -> Any:
    """Of a large block: a vector with its covariance, unless that is too large itself."""
    means, variances = belief.marginals()
    loc = means[index].reshape(latent.shape)
    if latent.event_dim == 1 and 1 < latent.shape[-1] <= _JOINT:
        rows = index.reshape(-1, latent.shape[-1])
        if len(rows) * latent.shape[-1] <= _JOINT:
            trils = torch.stack([_cholesky(belief.covariance(r)) for r in rows])
            return dist.MultivariateNormal(loc, scale_tril=trils.reshape(*latent.shape, -1))
    d = dist.Normal(loc, variances[index].clamp(min=0).sqrt().reshape(latent.shape))
    return d.to_event(latent.event_dim) if latent.event_dim else d


class StructuredLaw(dist.TorchDistribution):
    """All scalars of a large Gaussian block, event shape (1, D)."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's attribute)
    support = constraints.independent(constraints.real, 2)
    has_rsample = False

    def __init__(self, belief: StructuredBelief, batch_shape: Any = ()) -> None:
        self.belief = belief
        self._mean = belief.marginals()[0]
        event = torch.Size((1, len(self._mean)))
        super().__init__(torch.Size(batch_shape), event, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> StructuredLaw:
        return StructuredLaw(self.belief, batch_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        lead = (*sample_shape, *self.batch_shape)
        draws = [self.belief.draw() for _ in range(math.prod(lead))]
        return torch.stack(draws).reshape(*lead, 1, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """-1/2 (z - m)^T S (z - m) + 1/2 log det S - D/2 log 2 pi."""
        change = value.squeeze(-2) - self._mean
        squares = self.belief.quadratic(change)
        constant = len(self._mean) * math.log(2 * math.pi)
        return 0.5 * (self.belief.log_det() - squares - constant)


def _cholesky(cov: Tensor) -> Tensor:
    """A lower triangular T with T T^T = V, for a V that may be singular to rounding."""
    found = torch.linalg.cholesky_ex(cov)
    if not bool(found.info):
        return found.L
    values, vectors = torch.linalg.eigh(cov)
    tiny = torch.finfo(cov.dtype).eps * values[-1].clamp(min=torch.finfo(cov.dtype).tiny)
    return _triangular(vectors * values.clamp(min=float(tiny)).sqrt())


def joint(block: Block, belief: GaussianBelief | StructuredBelief, sites: Sequence[str]) -> Any:
    """The Gaussian of several sites of one block (their unconstrained values), concatenated."""
    assert block.layout is not None
    index = torch.cat([block.layout.flat(s) for s in sites])
    if isinstance(belief, StructuredBelief):
        cov = belief.covariance(index)
        return dist.MultivariateNormal(belief.marginals()[0][index], scale_tril=_cholesky(cov))
    tril = _triangular(torch.block_diag(*belief.scale_tril)[index])
    return dist.MultivariateNormal(belief.loc.reshape(-1)[index], scale_tril=tril)


def median(latent: Latent, block: Block, belief: Belief) -> Tensor:
    """The marginal median; of a discrete site the most probable value, of a Wishart matrix the mean."""
    if latent.enum_dim is not None:
        assert latent.support is not None
        return latent.support[_probabilities(latent, block, belief).argmax(-1)]
    if isinstance(belief, FamilyBelief) and belief.family is WISHART:
        return belief.mean[0]
    return quantile(latent, block, belief, 0.5, center=True)


def quantile(
    latent: Latent, block: Block, belief: Belief, q: float, *, center: bool = False
) -> Tensor:
    """The marginal q-quantile; of a discrete site, in the order of its support.

    As the `center` of a site that is transformed as a whole it is the transform of the quantile.
    """
    if isinstance(belief, GaussianBelief | StructuredBelief):
        assert block.layout is not None
        if (
            latent.transform is not None
            and scalar_transform(latent.transform) is None
            and not center
        ):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                draws = marginal(latent, block, belief).sample((_DRAWS,)).sort(0).values
            return draws[min(int(q * _DRAWS), _DRAWS - 1)]
        q = 1 - q if is_falling(latent.transform) else q
        if isinstance(belief, StructuredBelief):
            means, variances = (x[block.layout.flat(latent.name)] for x in belief.marginals())
            loc, scale = means, variances.clamp(min=0).sqrt()
        else:
            at = (block.layout.element[latent.name], block.layout.position[latent.name])
            loc, scale = belief.loc[at], belief.scale_tril[at].square().sum(-1).sqrt()
        value = loc + scale * torch.special.ndtri(scale.new_tensor(q))
        return latent.constrained(value.reshape(latent.shape))
    if latent.enum_dim is not None:
        assert latent.support is not None
        cumulative = _probabilities(latent, block, belief).cumsum(-1)
        slack = len(latent.support) * torch.finfo(cumulative.dtype).eps
        index = (cumulative < q - slack).sum(-1)
        return latent.support[index.clamp(max=len(latent.support) - 1)]
    assert isinstance(belief, FamilyBelief)
    if belief.family is WISHART:
        raise CVIError(
            f"quantiles of site '{latent.name}'",
            "a Wishart matrix, whose elements have no quantiles in closed form",
            "scalars, vectors or discrete sites",
            f"take those of draws, posterior('{latent.name}').sample([1000]).quantile(q, dim=0), "
            "or of what you compute from them",
        )
    return family_quantile(
        belief.family,
        belief.natural,
        torch.tensor(q, dtype=torch.float64, device=belief.natural[0].device),
    )


def is_falling(transform: Any) -> bool:
    """Whether x falls with the unconstrained value; said of scalar transforms only."""
    try:
        return bool(transform is not None and transform.sign == -1)
    except NotImplementedError:
        return False


def _probabilities(latent: Latent, block: Block, belief: Belief) -> Tensor:
    """The marginal of a discrete site, (*batch, K)."""
    assert isinstance(belief, FamilyBelief)
    return belief.mean[0][..., block.step(latent.name), :] if block.is_chain else belief.mean[0]


class FiniteSupport(dist.Categorical):
    """A categorical law on 0, 1, ..., K-1 with values of a floating dtype, as a Binomial has them."""

    dtype: torch.dtype

    def expand(self, batch_shape: Any, _instance: Any = None) -> FiniteSupport:
        new: FiniteSupport = super().expand(batch_shape, _instance)
        new.dtype = self.dtype
        return new

    def sample(self, sample_shape: Any = ()) -> Tensor:
        value: Tensor = super().sample(torch.Size(sample_shape))
        return value.to(self.dtype)


def finite_law(latent: Latent, logits: Tensor) -> Any:
    """The law of a discrete site, of the class that has the site's kind of values."""
    support = latent.support
    assert support is not None
    if support.ndim > 1:
        return dist.OneHotCategorical(logits=logits)
    if not support.is_floating_point():
        return dist.Categorical(logits=logits)
    if len(support) == 2:
        return dist.Bernoulli(logits=logits[..., 1] - logits[..., 0])
    law = FiniteSupport(logits=logits)
    law.dtype = support.dtype
    return law


def index_of(latent: Latent, value: Tensor) -> Tensor:
    """Which of the K values of a discrete site each element of `value` is."""
    assert latent.support is not None
    flat = latent.support.reshape(len(latent.support), -1)
    own = value.reshape(*value.shape[: value.ndim - latent.event_dim], 1, -1)
    return (own == flat).all(-1).to(torch.long).argmax(-1)


def draw_chain(
    latents: Mapping[str, Latent],
    block: Block,
    belief: FamilyBelief,
    sample: Callable[[str, Any], Tensor],
) -> dict[str, Tensor]:
    """The states of a discrete chain in order, each given the one before it.

    `sample` draws a site from a law.
    """
    first, *others = block.sites
    moves = belief.family.transitions(belief.natural).log()  # type: ignore[attr-defined]
    result = {first: sample(first, marginal(latents[first], block, belief))}
    for t, site in enumerate(others):
        before = latents[block.sites[t]]
        origin = index_of(before, result[before.name])
        table = moves[..., t, :, :]
        shape = broadcast_shapes(origin.shape, table.shape[:-2])
        where = origin.expand(shape)[..., None, None].expand(*shape, 1, table.shape[-1])
        logits = table.expand(*shape, *table.shape[-2:]).gather(-2, where).squeeze(-2)
        result[site] = sample(site, finite_law(latents[site], logits))
    return result


def _triangular(half: Tensor) -> Tensor:
    """The lower triangular T with T T^T = H H^T, for (..., n, k), n <= k; no product is formed."""
    n = half.shape[-2]
    if not bool(half.triu(1).any()):
        return half[..., :n]
    r = torch.linalg.qr(half.mT, mode="r").R
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(r)
    return (r * sign.unsqueeze(-1)).mT.tril()
