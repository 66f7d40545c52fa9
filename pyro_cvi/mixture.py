"""Laws that are averages: of the same site in several posteriors, and of scalars given by a table.

p(x)  =  sum_k w_k q_k(x)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.families import WISHART
from pyro_cvi.graph.symbolic import Latent
from pyro_cvi.guide import AutoCVI
from pyro_cvi.laws import Transformed, finite_law, is_falling, quantile, scalar_transform

__all__ = [
    "Mixture",
    "Place",
    "Table",
    "Tabulated",
    "check_quantiles",
    "event_dim_of",
    "mixture_law",
    "mixture_quantile",
    "shares",
    "tabulate",
]

_HALVINGS = 80
"""Of an interval, when a quantile is looked for: to the last digit in float64."""
_LOGITS = torch.linspace(-14.0, 14.0, 57, dtype=torch.float64, device="cpu")
"""Where the quantile function of a law without a distribution function is tabulated."""
_DRAWS = 10_000
"""For quantiles of vectors that are transformed as a whole."""
_NODES = 257
"""Least nodes of a table; about 0.04 standard deviations apart."""
_WIDEST = 0.3
"""Most standard deviations that points are smeared over."""
_NOTHING = 1e-6
"""Points of a smaller share of the largest weight are beyond a table's ends."""


class Mixture(dist.TorchDistribution):
    """sum_k w_k q_k(x) for laws q_k of one shape; all elements of a draw come from the same q_k.

    Shapes: weights (K,); `mean` and `variance` those of the components. `log_prob` is that of each
    batch element by itself.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's attribute)
    has_rsample = False

    def __init__(self, weights: Tensor, components: Sequence[Any]) -> None:
        self.weights, self.components = weights, list(components)
        first = self.components[0]
        super().__init__(first.batch_shape, first.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the components."""
        return self.components[0].support

    def _average(self, values: Sequence[Tensor]) -> Tensor:
        return torch.tensordot(self.weights, torch.stack(list(values)), dims=1)

    @property
    def mean(self) -> Tensor:
        """sum_k w_k E_k x."""
        return self._average([c.mean for c in self.components])

    @property
    def variance(self) -> Tensor:
        """sum_k w_k (Var_k x + (E_k x - E x)^2)."""
        mean = self.mean
        return self._average([c.variance + (c.mean - mean).square() for c in self.components])

    @property
    def stddev(self) -> Tensor:
        """The root of the variance."""
        return self.variance.sqrt()

    def log_prob(self, value: Tensor) -> Tensor:
        """log sum_k w_k q_k(x), for each batch element."""
        parts = [
            w.log() + c.log_prob(value)
            for w, c in zip(self.weights.unbind(), self.components, strict=True)
        ]
        return torch.stack(parts).logsumexp(0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws: a component each, and then one of it."""
        shape = torch.Size(sample_shape)
        chosen = torch.multinomial(self.weights, max(math.prod(shape), 1), replacement=True)
        values = torch.stack([self.components[k].sample() for k in chosen.tolist()])
        return values.reshape((*shape, *self.batch_shape, *self.event_shape))


# --- tables ----------------------------------------------------------------------------------------


class Table:
    """A distribution function of one scalar u, linear between its nodes."""

    def __init__(self, nodes: Tensor, cdf: Tensor) -> None:
        self.nodes, self.values = nodes, cdf

    def cdf(self, u: Tensor) -> Tensor:
        """P(U <= u)."""
        return _interpolated(u, self.nodes, self.values)

    def icdf(self, p: Tensor) -> Tensor:
        """The p-quantile."""
        return _interpolated(p, self.values, self.nodes)

    def log_density(self, u: Tensor) -> Tensor:
        """log of the slope of the distribution function, linear between the middles of its parts."""
        middles = (self.nodes[1:] + self.nodes[:-1]) / 2
        slope = _interpolated(u, middles, self.values.diff() / self.nodes.diff())
        inside = (u >= self.nodes[0]) & (u <= self.nodes[-1])
        return torch.where(inside, slope, torch.zeros_like(slope)).log()


def tabulate(u: Tensor, weights: Tensor, width: float) -> Table:
    """The table of weighted points (M,), each smeared by a normal law of standard deviation `width`.

    Before that they are drawn together, so that mean and variance stay what they are. Without a width
    every point's mass is spread evenly over its cell of the line.
    """
    w = weights / weights.sum()
    if not width:
        nodes, order = u.sort()
        middles = (nodes[1:] + nodes[:-1]) / 2
        ends = [2 * nodes[:1] - middles[:1], 2 * nodes[-1:] - middles[-1:]]
        cdf = torch.cat([w.new_zeros(1), w[order].cumsum(0)])
        return Table(torch.cat([ends[0], middles, ends[1]]), cdf / cdf[-1])
    mean = w @ u
    sd = (w @ (u - mean).square()).sqrt().clamp(min=1e-300)
    blur = float((width / sd).clamp(max=_WIDEST))
    z = (u - mean) / sd * math.sqrt(1 - blur**2)
    seen = z[w > _NOTHING * w.max()]
    low, high = float(seen.min()) - 4 * blur, float(seen.max()) + 4 * blur
    count = min(max(_NODES, int(4 * (high - low) / blur)), 16 * _NODES)
    nodes = torch.linspace(low, high, count, device=u.device).to(u)
    cdf = torch.stack([w @ torch.special.ndtr((x - z) / blur) for x in nodes])
    cdf = (cdf - cdf[0]) / (cdf[-1] - cdf[0])
    return Table(mean + sd * nodes, cdf)


def _interpolated(x: Tensor, nodes: Tensor, values: Tensor) -> Tensor:
    i = (torch.searchsorted(nodes, x.contiguous(), right=True) - 1).clamp(0, len(nodes) - 2)
    width = (nodes[i + 1] - nodes[i]).clamp(min=1e-300)
    share = ((x - nodes[i]) / width).clamp(0, 1)
    return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True, eq=False)
class Place:
    """x = T(u) of one site, from its unconstrained scalars: (*, scalars) to (*, *site shape)."""

    site: str
    bijection: Any
    shape: tuple[int, ...]
    event_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """How many scalars."""
        return math.prod(self.shape)

    @property
    def is_joint(self) -> bool:
        """Whether elements of x depend on several scalars."""
        return self.bijection is not None and scalar_transform(self.bijection) is None

    def unconstrained(self, u: Tensor) -> Tensor:
        """The scalars in the shape of the unconstrained value."""
        return u.reshape((*u.shape[:-1], *self.shape)).to(dtype=self.dtype, device=self.device)

    def __call__(self, u: Tensor) -> Tensor:
        """T(u)."""
        value = self.unconstrained(u)
        return value if self.bijection is None else self.bijection(value)

    def inverse(self, x: Tensor) -> Tensor:
        """The scalars of values, (*, scalars) in float64."""
        u = x if self.bijection is None else self.bijection.inv(x)
        return u.reshape((*u.shape[: u.ndim - len(self.shape)], -1)).double().cpu()

    def log_jacobian(self, u: Tensor) -> Tensor:
        """log |dT/du|, (*, scalars) to (*)."""
        if self.bijection is None:
            return u.new_zeros(u.shape[:-1])
        value = u.reshape((*u.shape[:-1], *self.shape))
        found = self.bijection.log_abs_det_jacobian(value, self.bijection(value))
        return found.reshape((*u.shape[:-1], -1)).sum(-1)


class Tabulated(dist.TorchDistribution):
    """The law of a site of which every unconstrained scalar has a table, and all have joint points.

    Arguments:
        place: the site's value from its unconstrained scalars.
        tables: one for each of these scalars.
        points, weights: (M, scalars) and (M,), their joint law.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (torch's attribute)
    has_rsample = False

    def __init__(
        self, place: Place, tables: Sequence[Table], points: Tensor, weights: Tensor
    ) -> None:
        self.place, self.tables = place, list(tables)
        self._points, self.weights = points, weights
        low, high = zip(*[shares(u, weights) for u in points.unbind(-1)], strict=True)
        self._low, self._high = torch.stack(low, -1), torch.stack(high, -1)
        shape = place(points[0]).shape
        split = len(shape) - place.event_dim
        super().__init__(shape[:split], shape[split:], validate_args=False)

    def _scalars(self, p: Tensor) -> Tensor:
        """The unconstrained scalars at these levels (*, scalars) of their tables."""
        columns = zip(self.tables, p.unbind(-1), strict=True)
        return torch.stack([t.icdf(x.contiguous()) for t, x in columns], -1)

    def near(self, chosen: Tensor) -> Tensor:
        """The unconstrained scalars (n, scalars) of a draw near each of these points (n,).

        Of points that were chosen by weight, every scalar has the law of its table.
        """
        low, high = self._low[chosen], self._high[chosen]
        return self._scalars(low + torch.rand_like(low) * (high - low))

    def _moment(self, power: int, centre: Tensor | float = 0.0) -> Tensor:
        values = (self.place(self._points).to(torch.float64) - centre) ** power
        return torch.tensordot(self.weights, values, dims=1)

    @property
    def mean(self) -> Tensor:
        """E x, from the joint points."""
        return self._moment(1).to(self.place.dtype)

    @property
    def variance(self) -> Tensor:
        """E (x - E x)^2."""
        return self._moment(2, self._moment(1)).to(self.place.dtype)

    @property
    def stddev(self) -> Tensor:
        """The root of the variance."""
        return self.variance.sqrt()

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile of every scalar; of a vector that is transformed as a whole, of each element."""
        p = torch.as_tensor(value, dtype=torch.float64)
        if self.place.is_joint:
            x, order = self.place(self._points).sort(0)
            total = self.weights.reshape(-1, *[1] * (x.ndim - 1)).expand(x.shape).gather(0, order)
            at = (total.cumsum(0) < p).sum(0, keepdim=True).clamp(max=len(x) - 1)
            return x.gather(0, at)[0]
        p = 1 - p if is_falling(self.place.bijection) else p
        return self.place(self._scalars(p.expand(len(self.tables))))

    def log_prob(self, value: Tensor) -> Tensor:
        """log p of each scalar by itself; sites of vectors have none here."""
        if len(self.event_shape):
            raise NotImplementedError(
                f"the joint density of the vector '{self.place.site}' is known at points only; its "
                "mean, variance, quantiles and draws are there"
            )
        x = torch.as_tensor(value)
        t = self.place.bijection
        u = x if t is None else t.inv(x)
        slope: Any = 0.0 if t is None else t.log_abs_det_jacobian(u, x)
        flat = u.to(torch.float64).expand(torch.broadcast_shapes(u.shape, self.batch_shape))
        columns = flat.reshape(*flat.shape[: flat.ndim - len(self.batch_shape)], -1).unbind(-1)
        found = [t.log_density(c) for t, c in zip(self.tables, columns, strict=True)]
        return torch.stack(found, -1).reshape(flat.shape).to(x.dtype) - slope

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Joint draws: a point each, moved inside its cell."""
        shape = torch.Size(sample_shape)
        n = max(math.prod(shape), 1)
        chosen = torch.multinomial(self.weights, n, replacement=True)
        values = self.place(self.near(chosen))
        return values.reshape((*shape, *self.batch_shape, *self.event_shape))


def shares(u: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of probabilities, (low, high), that each of M weighted points stands for.

    Points of (nearly) equal value share one. A uniform number in the interval of a point that is drawn
    by weight is uniform on (0, 1), so that its quantile has the right marginal law, and is near the
    point.
    """
    scale = (u.max() - u.min()).clamp(min=1e-300)
    unique, index = ((u - u.min()) / scale * 2**30).round().unique(return_inverse=True)
    mass = torch.zeros(len(unique), dtype=u.dtype, device=u.device).index_add_(
        0, index, weights / weights.sum()
    )
    high = mass.cumsum(0)
    return (high - mass)[index], high[index]


def event_dim_of(latent: Latent) -> int:
    """The event dims of a site's value in the model."""
    t = latent.transform
    if t is None:
        return latent.event_dim
    return int(latent.event_dim - t.domain.event_dim + t.codomain.event_dim)


# --- one site of several guides --------------------------------------------------------------------


def mixture_law(guides: Sequence[AutoCVI], weights: Tensor, site: str) -> Any:
    """sum_k w_k q_k(x) of one site; of a discrete one its own class, with averaged probabilities."""
    latent = guides[0].plan.whole.latents[site]
    laws = [g.posterior(site) for g in guides]
    if latent.enum_dim is not None:
        return finite_law(latent, _probabilities(latent, laws, weights).log())
    return Mixture(weights.to(latent.value.dtype), laws)


def _probabilities(latent: Latent, laws: Sequence[Any], weights: Tensor) -> Tensor:
    tables = []
    for law in laws:
        p = law.probs
        tables.append(torch.stack([1 - p, p], -1) if isinstance(law, dist.Bernoulli) else p)
    return torch.tensordot(weights.to(tables[0].dtype), torch.stack(tables), dims=1)


def mixture_quantile(
    guides: Sequence[AutoCVI], weights: Tensor, site: str, q: float, *, center: bool = False
) -> Tensor:
    """The q-quantile of one site in the average of the guides; `center` as in `laws.quantile`."""
    latent = guides[0].plan.whole.latents[site]
    block = guides[0].block_of(site)
    laws = [g.posterior(site) for g in guides]
    if latent.enum_dim is not None:
        assert latent.support is not None
        p = _probabilities(latent, laws, weights)
        if center:
            return latent.support[p.argmax(-1)]
        below = p.cumsum(-1) < q - len(latent.support) * torch.finfo(p.dtype).eps
        return latent.support[below.sum(-1).clamp(max=len(latent.support) - 1)]
    if block.layout is None:
        if block.family is WISHART and center:
            return Mixture(weights.to(latent.value.dtype), laws).mean
        return _tabulated_quantile(guides, weights, latent, q)
    if latent.transform is not None and scalar_transform(latent.transform) is None and not center:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            draws = Mixture(weights.to(latent.value.dtype), laws).sample((_DRAWS,)).sort(0).values
        return draws[min(int(q * _DRAWS), _DRAWS - 1)]
    base = [x.base_dist if isinstance(x, Transformed) else x for x in laws]
    loc, scale = (torch.stack([getattr(b, n) for b in base]).double() for n in ("mean", "stddev"))
    q = 1 - q if is_falling(latent.transform) else q
    w = weights.double().reshape(-1, *[1] * (loc.ndim - 1))
    u = _bisected(
        lambda x: (w * torch.special.ndtr((x - loc) / scale)).sum(0),
        *_bracket(loc + scale * torch.special.ndtri(scale.new_tensor(q))),
        q,
    )
    return latent.constrained(u.to(latent.value.dtype))


def _tabulated_quantile(
    guides: Sequence[AutoCVI], weights: Tensor, latent: Latent, q: float
) -> Tensor:
    """By tables of the components' quantile functions, linear in the logit between levels."""
    entries = [(g.block_of(latent.name), g.belief(g.block_of(latent.name))) for g in guides]
    levels = [float(p) for p in torch.sigmoid(_LOGITS)]
    tables = torch.stack(
        [torch.stack([quantile(latent, b, q_k, p) for p in levels], -1) for b, q_k in entries]
    ).double()  # (K, *shape, levels)
    w = weights.double().reshape(-1, *[1] * (tables.ndim - 2))

    def cdf(x: Tensor) -> Tensor:
        at = x.expand(tables.shape[:-1]).unsqueeze(-1).contiguous()
        i = (torch.searchsorted(tables, at, right=True) - 1).clamp(0, len(levels) - 2)
        low, high = tables.gather(-1, i), tables.gather(-1, i + 1)
        share = ((at - low) / (high - low).clamp(min=1e-300)).clamp(0, 1)
        logit = _LOGITS[i] + share * (_LOGITS[i + 1] - _LOGITS[i])
        return (w * torch.sigmoid(logit.squeeze(-1))).sum(0)

    found = _bisected(
        cdf, *_bracket(torch.stack([quantile(latent, b, q_k, q) for b, q_k in entries])), q
    )
    return found.to(latent.value.dtype)


def _bracket(quantiles: Tensor) -> tuple[Tensor, Tensor]:
    """The quantile of an average lies between those of its parts."""
    return quantiles.double().amin(0), quantiles.double().amax(0)


def _bisected(cdf: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, q: float) -> Tensor:
    if not 0 < q < 1:
        return low if q <= 0 else high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = cdf(middle) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def check_quantiles(quantiles: Sequence[float] | Tensor) -> list[float]:
    """Probabilities as floats, or an error."""
    wanted = [float(q) for q in quantiles]
    if not all(0 <= q <= 1 for q in wanted):
        raise CVIError(f"quantiles({wanted}): expected probabilities between 0 and 1")
    return wanted
