"""Coordinate ascent by brute force, in float64, for models whose expected log joint is written by hand.

An example gives the model and `expected(m)`, the expected log joint in terms of the moments m of its
blocks. If it is affine in each block's E T(z) and equals the model's log joint at points, it is right:
both are tested. The update of a block is then its gradient,

    natural  <-  d expected / d E T(z),        ELBO = expected + sum_blocks (A - <natural, E T(z)>).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from pair_cases import (
    CATEGORICAL,
    DIRICHLET,
    GAMMA,
    LOG_2PI,
    MVN,
    Family,
    Natural,
    close,
    natural_of,
)
from torch import Tensor

State = dict[str, Natural]


@dataclass(frozen=True)
class Block:
    """Sites with their shapes; several only if they are Gaussian.

    `categories` of a discrete one; `cells` picks elements of a flattened site (of `obs_mask`, say): the
    others are no part of the oracle.
    """

    family: Family
    sites: Mapping[str, tuple[int, ...]]
    categories: int = 0
    cells: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "+".join(self.sites)

    def place(self, site: str) -> slice:
        """Where the flattened scalars of a Gaussian site are."""
        start = 0
        for n, shape in self.sites.items():
            if n == site:
                return slice(start, start + math.prod(shape))
            start += math.prod(shape)
        raise KeyError(site)

    @property
    def size(self) -> int:
        return sum(math.prod(s) for s in self.sites.values())

    def pick(self, site: str, value: Tensor, event: tuple[int, ...] = ()) -> Tensor:
        """The elements of a site's value that are part of the oracle, in its shape."""
        if site in self.cells:
            value = value.reshape(-1, *event)[self.cells[site]]
        if self.family is DIRICHLET:
            return value.reshape(torch.Size(self.sites[site]))
        return value.reshape(torch.Size((*self.sites[site], *event)))

    def statistics(self, values: Mapping[str, Tensor]) -> Natural:
        """T(z) at a point."""
        parts = [self.pick(n, values[n].detach().double()) for n in self.sites]
        if self.family is MVN:
            z = torch.cat([p.reshape(-1) for p in parts])
            return z, torch.outer(z, z)
        (z,) = parts
        if self.family is CATEGORICAL:
            return (torch.nn.functional.one_hot(z.long(), self.categories).double(),)
        logs = {"Dirichlet": (z.log(),), "Gamma": (z.log(), z), "InverseGamma": (z.log(), 1 / z),
                "Beta": (z.log(), torch.log1p(-z))}  # fmt: skip
        return logs[self.family.name]


def gaussian(cells=None, /, **sites) -> Block:
    return Block(MVN, sites, cells=cells or {})


def discrete(site, shape, categories, cells=None) -> Block:
    return Block(CATEGORICAL, {site: shape}, categories, {} if cells is None else {site: cells})


class Moments:
    """Expectations of functions of the sites, given E T(z) of every block."""

    def __init__(self, blocks: list[Block], means: Mapping[str, Natural]) -> None:
        self.block = {n: b for b in blocks for n in b.sites}
        self.means = means

    def mean(self, site: str) -> Tensor:
        """E z, in the site's shape (of a Gamma: the second statistic)."""
        b = self.block[site]
        if b.family is MVN:
            return self.means[b.name][0][b.place(site)].reshape(torch.Size(b.sites[site]))
        assert b.family.name == "Gamma"
        return self.means[b.name][1]

    def reciprocal(self, site: str) -> Tensor:
        """E 1/z of an inverse Gamma."""
        assert self.block[site].family.name == "InverseGamma"
        return self.means[site][1]

    def log(self, site: str) -> Tensor:
        """E log z."""
        return self.means[site][0]

    def log_complement(self, site: str) -> Tensor:
        """E log(1 - z) of a Beta."""
        return self.means[site][1]

    def probs(self, site: str) -> Tensor:
        """Probabilities of a discrete site."""
        return self.means[site][0]

    def outer(self, a: str, b: str) -> Tensor:
        """E vec(a) vec(b)^T of two Gaussian sites."""
        x, y = self.block[a], self.block[b]
        if x is y:
            return self.means[x.name][1][x.place(a), y.place(b)]
        return torch.outer(self.mean(a).reshape(-1), self.mean(b).reshape(-1))

    def square(self, constant, **designs) -> Tensor:
        """E (constant + sum_s D_s vec(z_s))^2 by rows; a number stands for that times the identity."""
        d = {n: self._matrix(n, x) for n, x in designs.items()}
        c = torch.as_tensor(constant, dtype=torch.float64)
        total = c**2
        for n, x in d.items():
            total = total + 2 * c * (x @ self.mean(n).reshape(-1))
            for k, y in d.items():
                total = total + ((x @ self.outer(n, k)) * y).sum(-1)
        return total

    def _matrix(self, site: str, design) -> Tensor:
        if isinstance(design, Tensor):
            return design.double()
        return design * torch.eye(math.prod(self.block[site].sites[site]), dtype=torch.float64)


def normal(square, precision=None, log_precision=None, *, sd=None, weight=1.0) -> Tensor:
    """sum weight (log P - P square - log 2 pi) / 2."""
    if sd is not None:
        sd = torch.as_tensor(sd, dtype=torch.float64)
        precision, log_precision = sd**-2, -2 * sd.log()
    return (weight * 0.5 * (log_precision - precision * square - LOG_2PI)).sum()


def gamma(log_z, z, a, b, log_b=None) -> Tensor:
    """The expected log density of Gamma(a, b), with E log b given if b is random."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    log_b = b.log() if log_b is None else log_b
    return (a * log_b - torch.lgamma(a) + (a - 1) * log_z - b * z).sum()


def inverse_gamma(log_v, reciprocal, a, b) -> Tensor:
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return (a * b.log() - torch.lgamma(a) - (a + 1) * log_v - b * reciprocal).sum()


def dirichlet(log_z, a) -> Tensor:
    """sum over rows of the expected log density of Dirichlet(a)."""
    a = torch.as_tensor(a, dtype=torch.float64).expand(log_z.shape)
    log_b = torch.lgamma(a).sum(-1) - torch.lgamma(a.sum(-1))
    return (((a - 1) * log_z).sum(-1) - log_b).sum()


def beta(log_z, log_1_z, a, b) -> Tensor:
    log_b = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return ((a - 1) * log_z + (b - 1) * log_1_z - log_b).sum()


# --- what the examples are made of ------------------------------------------------------------------

EXAMPLES: dict[str, Callable[[], Example]] = {}


def example(build):
    """Register a model; it is built anew in the default dtype of each test."""
    EXAMPLES[build.__name__] = build
    return build


def numbers(*shape, seed=0):
    """Numbers that float32 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float32)
    return ((x * 64).round() / 64).to(torch.get_default_dtype())


def counts(*shape, seed=0, rate=3.0):
    g = torch.Generator().manual_seed(seed)
    mean = torch.full(shape, rate, dtype=torch.float32)
    return torch.poisson(mean, generator=g).to(torch.get_default_dtype())


def one_hot(index, n):
    return torch.nn.functional.one_hot(index, n).double()


def index(shape, dim):
    """For each cell of a shape its index along one dim."""
    lift = [1] * len(shape)
    lift[dim] = shape[dim]
    return torch.arange(shape[dim]).reshape(lift).expand(shape)


def gammas(site, *shape):
    return Block(GAMMA, {site: shape})


# --- coordinate ascent ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A model, its blocks, and its expected log joint.

    `init` are starting points of the fit (for `init_to_value`). `free` marks models whose fixed points
    form a continuum (rotations of factors).
    """

    model: Callable[..., object]
    blocks: list[Block]
    expected: Callable[[Moments], Tensor]
    args: tuple = ()
    init: Mapping[str, Tensor] | None = None
    free: bool = False

    def means(self, state: State) -> State:
        return {b.name: b.family.mean(state[b.name]) for b in self.blocks}

    def swept(self, state: State, order: list[str] | None = None) -> State:
        """One update of every block in turn."""
        state = dict(state)
        blocks = {b.name: b for b in self.blocks}
        means = self.means(state)
        for name in order or list(blocks):
            leaves = tuple(t.detach().clone().requires_grad_() for t in means[name])
            with torch.enable_grad():
                value = self.expected(Moments(self.blocks, {**means, name: leaves}))
                grads = torch.autograd.grad(value, leaves, allow_unused=True)
            natural = tuple(
                torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)
            )
            if blocks[name].family is MVN:
                natural = (natural[0], 0.5 * (natural[1] + natural[1].mT))
            state[name], means[name] = natural, blocks[name].family.mean(natural)
        return state

    def elbo(self, state: State) -> Tensor:
        entropy = sum(b.family.entropy(state[b.name]) for b in self.blocks)
        return self.expected(Moments(self.blocks, self.means(state))) + entropy

    def start(self, seed: int) -> State:
        """A random state; the discrete sites, and the sites in `init`, near where the fit starts."""
        g = torch.Generator().manual_seed(seed)
        init = self.init or {}
        state = {}
        for b in self.blocks:
            if b.family is MVN:
                loc = torch.randn(b.size, generator=g, dtype=torch.float64)
                for n in b.sites:
                    if n in init:
                        at = b.pick(n, init[n].double()).reshape(-1)
                        loc[b.place(n)] = at + 0.01 * loc[b.place(n)]
                precision = torch.eye(b.size, dtype=torch.float64) * 10.0 ** (1 + seed % 2)
                state[b.name] = (precision @ loc, -0.5 * precision)
                continue
            (shape,) = b.sites.values()
            u = torch.rand(shape, generator=g, dtype=torch.float64)
            if b.family is CATEGORICAL:
                u = torch.rand((*shape, b.categories), generator=g, dtype=torch.float64)
                one = torch.zeros_like(u)
                if b.name in init:
                    one = torch.nn.functional.one_hot(
                        b.pick(b.name, init[b.name].long()), b.categories
                    ).double()
                state[b.name] = ((2.0 + seed) * one + 0.1 * u,)
            elif b.family is DIRICHLET:
                state[b.name] = (0.5 + u,)
            elif b.family.name == "Gamma":
                state[b.name] = (1 + u, -(0.5 + 2 * u))
            elif b.family.name == "InverseGamma":
                state[b.name] = (-3 - u, -(0.5 + 2 * u))
            else:
                state[b.name] = (1 + u, 2 - u)
        return state

    def fixed_point(self, state: State, limit: int = 4000) -> State:
        """Sweeps until no natural parameter moves."""
        for _ in range(limit):
            new = self.swept(state)
            change = max(
                float(((a - b).abs() / b.abs().clamp(min=1.0)).max())
                for n in state
                for a, b in zip(new[n], state[n], strict=True)
            )
            state = new
            if change < 1e-10:
                return state
        raise AssertionError(f"the oracle has not converged: {change:.1e}")


# --- the package beside the oracle -----------------------------------------------------------------


def read_state(example: Example, guide) -> State:
    """The guide's posterior as a state of the oracle."""
    state = {}
    for b in example.blocks:
        if b.family is MVN:
            state[b.name] = _gaussian_state(b, guide)
        else:
            ((site, _),) = b.sites.items()
            natural = natural_of(b.family, as_categorical(guide.posterior(site)))
            event = (b.categories,) if b.family is CATEGORICAL else ()
            state[b.name] = tuple(b.pick(site, n.detach(), event) for n in natural)
    return state


def as_categorical(q):
    """A Bernoulli as the Categorical of two."""
    if isinstance(q, torch.distributions.Bernoulli):
        logits = torch.stack([torch.zeros_like(q.logits), q.logits], -1)
        return torch.distributions.Categorical(logits=logits)
    return q


def _gaussian_state(b: Block, guide) -> Natural:
    """Mean and covariance of an oracle's block from the joints of the guide's blocks."""
    loc = torch.zeros(b.size, dtype=torch.float64)
    cov = torch.zeros(b.size, b.size, dtype=torch.float64)
    groups: dict[str, list[str]] = {}
    for n in b.sites:
        groups.setdefault(guide.plan.block_of(n).name, []).append(n)
    for names in groups.values():
        at = torch.cat([torch.arange(b.size)[b.place(n)] for n in names])
        joint, inside, start = guide.joint(names), [], 0
        for n in names:
            whole = torch.arange(guide.posterior(n).mean.numel())
            inside.append(start + (whole[b.cells[n]] if n in b.cells else whole))
            start += len(whole)
        inside = torch.cat(inside)
        loc[at] = joint.mean.detach().double()[inside]
        cov[at[:, None], at] = joint.covariance_matrix.detach().double()[inside[:, None], inside]
    precision = torch.linalg.inv(cov)
    return precision @ loc, -0.5 * precision


def ordinary(block: Block, natural: Natural) -> dict[str, Tensor]:
    """What is compared of a block: means and covariances, concentrations, probabilities."""
    if block.family is MVN:
        cov = torch.linalg.inv(-2 * natural[1])
        return {"mean": cov @ natural[0], "covariance": cov}
    if block.family is CATEGORICAL:
        return {"probs": natural[0].softmax(-1)}
    return {f"natural parameter {i}": n for i, n in enumerate(natural)}


def check_state(example: Example, guide, expected: State, dtype) -> None:
    """The guide's blocks are the oracle's."""
    actual = read_state(example, guide)
    for b in example.blocks:
        want = ordinary(b, expected[b.name])
        for what, value in ordinary(b, actual[b.name]).items():
            close(value, want[what], dtype, f"{what} of '{b.name}'")


def check_marginals(example: Example, guide, expected: State, dtype) -> None:
    """`posterior(site)` of every Gaussian site has the oracle's mean and variance."""
    for b in example.blocks:
        if b.family is MVN:
            known = ordinary(b, expected[b.name])
            for n in b.sites:
                q = guide.posterior(n)
                at = b.place(n)
                mean, variance = b.pick(n, q.mean), b.pick(n, q.variance)
                close(mean.reshape(-1), known["mean"][at], dtype, f"mean of '{n}'")
                known_variance = known["covariance"].diagonal()[at]
                close(variance.reshape(-1), known_variance, dtype, f"variance of '{n}'")
