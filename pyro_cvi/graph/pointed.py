"""Factors that nothing averages in closed form, averaged over fixed points of their sites.

    E_q[log p]  =  sum_s w_s log p(z_s),        z_s = m + L x_s,    L L^T = V,

with nodes x_s of N(0, I) that never change. It is one deterministic function of (m, V): its gradients
by autograd are messages, and steps, acceptance tests and stopping are those of quadrature. All points
are evaluated at once, by `torch.vmap` over an ordinary run of the model; a model that cannot be
vectorised runs once for each point.

A rule over points is too good where it was maximised. `PointFactor.checked` is the same average over
other points, and `refined` has more of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi.algebra.reason import Cause
from pyro_cvi.estimators import Expectation, How, Moments
from pyro_cvi.estimators.nodes import CENTRE, Nodes, fixed_nodes
from pyro_cvi.families import DIRICHLET, WISHART
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.check import site_density
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, CompiledFactor, Plan, compile_factors
from pyro_cvi.graph.symbolic import Call, Latent, plain_trace
from pyro_cvi.linalg import matvec, or_zeros

__all__ = [
    "MOST_SCALARS",
    "LogDensity",
    "PointFactor",
    "Refined",
    "at_points",
    "joinable",
    "levels",
    "points_of",
    "refine",
    "with_points",
]

MOST_SCALARS = 128
"""Scalars of sites that share one Gaussian and are averaged over points by default; more are drawn."""
_FEW = 2
"""Scalars of points at each of which a model runs on symbols."""
_HIGHEST = 4
"""Levels of refinement: each has twice the points of the one before."""
_TOLERATED = 0.05
"""Nats, and standard deviations, by which other points may differ."""

Values = Mapping[str, Tensor]
Leaves = Mapping[str, tuple[Tensor, ...]]


class LogDensity:
    """The sum of log p of some factors, at values of the latents on their unconstrained scale.

    Called with values that have a leading axis of S points; gives (S,).
    """

    def __init__(self, call: Call, names: frozenset[str]) -> None:
        self.call, self.names = call, names
        self._vectorises = True
        self._cells = 0

    @property
    def cells(self) -> int:
        """How many numbers the factors are densities of."""
        _ = self.vectorises  # it has run the model
        return self._cells

    @cached_property
    def vectorises(self) -> bool:
        """Whether many points cost little more than one; found out by a try at two."""
        latents = self.call.latents.items()
        twice = {n: torch.stack([x.value.detach()] * 2) for n, x in latents if x.support is None}
        with torch.no_grad():
            self(twice)
        return self._vectorises

    def at(self, values: Values) -> Tensor:
        """At one point, a scalar."""
        rest = {n: x.value.detach() for n, x in self.call.latents.items() if n not in values}
        given = {**self.call.subsample, **rest, **values}
        with pyro.validation_enabled(False):  # at a point far out a value may leave its support
            trace = plain_trace(self.call.model, self.call.args, self.call.kwargs, given)
            return self._sum(trace)

    def _sum(self, trace: poutine.Trace) -> Tensor:
        """The sum over all factors, with their weights, where they are not masked."""
        total, self._cells = None, 0
        for name in self.names:
            site = trace.nodes[name]
            value, weight, mask = site_density(name, site), site["scale"], site["mask"]
            self._cells += site["value"].numel()
            if mask is False:
                continue
            if isinstance(mask, Tensor):
                value = torch.where(mask, value, torch.zeros_like(value))
            part = (value * weight).sum()
            total = part if total is None else total + part
        assert total is not None
        return total

    def __call__(self, values: Values) -> Tensor:
        count = len(next(iter(values.values())))
        if self._vectorises and count > 1:
            try:
                with (
                    warnings.catch_warnings()
                ):  # where a rule is missing, vmap says that it is slow
                    warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                    return self.at_once(values)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                raise
            except RuntimeError:
                self._vectorises = False
        return torch.stack([self.at({n: v[i] for n, v in values.items()}) for i in range(count)])

    def at_once(self, values: Values) -> Tensor:
        """The same in one vectorised run; a RuntimeError where it fails at any of the points."""
        found: Tensor = torch.vmap(self.at, randomness="different")(dict(values))
        return found


class AveragedGiven:
    """The sum of E log p of some factors given values of some sites, over the beliefs about the others.

    The model runs on symbols for each point: what is left is averaged as in any plan.
    """

    def __init__(self, call: Call, names: frozenset[str], plan: Plan) -> None:
        self.call, self.names = call, names
        self.blocks, self.structure = plan.blocks, plan.structure
        self.vectorises, self.cells = False, 0

    def __call__(self, values: Values, moments: Moments, probabilities: Leaves) -> Tensor:
        """For values with a leading axis of S points, (S,)."""
        count = len(next(iter(values.values())))
        found = [
            self.at({n: v[i] for n, v in values.items()}, moments, probabilities)
            for i in range(count)
        ]
        return torch.stack(found)

    def serves(self, block: Block) -> bool:
        """Whether nothing is to be sampled given the sites of a block."""
        given = {s: self.call.latents[s].value.detach() for s in block.sites}
        return not any(f.sampled for f in self._given(given))

    def _given(self, values: Values) -> list[CompiledFactor]:
        symbolic = self.call.symbolic(values, self.names)
        return compile_factors(symbolic, self.blocks, self.structure.fresh(), stacked=False)

    def at(self, values: Values, moments: Moments, probabilities: Leaves) -> Tensor:
        """At one point, a scalar."""
        factors = self._given(values)
        parts = [f(moments, probabilities).reshape(()) for f in factors]
        return torch.stack([p.to(parts[0]) for p in parts]).sum()


@dataclass(frozen=True, eq=False)
class PointFactor(CompiledFactor):
    """Several factors, averaged over fixed points of sites of one Gaussian block that they read.

    `density` is log p at such points, or its average over the beliefs about other sites.
    """

    density: LogDensity | AveragedGiven | None = None
    block: str = ""
    sites: tuple[str, ...] = ()
    layout: Layout | None = None
    few: bool = False
    level: int = 0
    seed: int = 0

    def __call__(self, moments: Moments, probabilities: Leaves) -> Tensor:
        values = self._values(moments, probabilities)
        return (values * self._nodes.weights.to(values)).sum()

    def magnitude(self, moments: Moments, probabilities: Leaves) -> Tensor:
        values = self._values(moments, probabilities).abs()
        return (values * self._nodes.weights.to(values)).sum()

    @property
    def is_whole(self) -> bool:
        return True

    @cached_property
    def _nodes(self) -> Nodes:
        return fixed_nodes(self.dims, self.level, self.seed, few=self.few)

    @cached_property
    def _positions(self) -> Tensor:
        """Where the sites' scalars are in the block."""
        assert self.layout is not None
        return torch.cat([self.layout.position[s].reshape(-1) for s in self.sites])

    @property
    def cells(self) -> int:
        return 0 if self.density is None else self.density.cells

    @property
    def count(self) -> int:
        """How many points there are."""
        return len(self._nodes.weights)

    @property
    def dims(self) -> int:
        """How many scalars a point has."""
        return len(self._positions)

    def _values(self, moments: Moments, probabilities: Leaves) -> Tensor:
        """log p at every point, shape (S,)."""
        loc, cov = (x[0] for x in moments.gaussian[self.block])
        at = self._positions
        scale = torch.linalg.cholesky_ex(cov[at[:, None], at])[0]
        z = loc[at] + matvec(scale, self._nodes.points.to(loc))
        assert self.layout is not None and self.density is not None
        latents = self.density.call.latents
        sizes = [self.layout.position[s].numel() for s in self.sites]
        parts = zip(self.sites, z.split(sizes, -1), strict=True)
        values = {s: x.reshape(-1, *latents[s].shape).to(latents[s].value.dtype) for s, x in parts}
        try:
            if isinstance(self.density, LogDensity):
                return self.density(values)
            return self.density(values, moments, probabilities)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # a matrix that is not positive definite at some point
            return (0 * z).sum(-1) - torch.inf

    def centred(self) -> PointFactor:
        """The same at the mean alone."""
        return replace(self, level=CENTRE)

    def refined(self) -> PointFactor | None:
        """The same with more points; None at the highest level."""
        return replace(self, level=self.level + 1) if self.level < _HIGHEST else None

    def checked(self) -> PointFactor:
        """The same with other and more points."""
        return replace(self, level=self.level + 1, seed=self.seed + 1)


def joinable(plan: Plan, most: int) -> list[frozenset[str]]:
    """Sets of sites that might share a joint Gaussian, so that nothing is sampled: the best first.

    All sites of the factors that are to be sampled, if they are at most `most` scalars; else those that
    cannot be averaged, and the smallest of them, given which the others perhaps can be. All are
    continuous, their gradients flow, and none stands in a subsampled plate, keeps its prior or is to be
    diagonal. Simplexes and matrices that conjugacy serves keep their families.
    """
    if plan.stochastic or plan.learns:
        return []
    sampled = [f for f in plan.factors if f.sampled]
    if any(h.cause is Cause.NO_GRADIENT for f in sampled for h in f.how.values()):
        return []
    size = {n: x.value.numel() for n, x in plan.latents.items()}
    every = {s for f in sampled for s in f.how}
    hidden = sorted({s for f in sampled for s in f.sampled}, key=lambda s: (size[s], s))
    few = [
        hidden[: i + 1] for i in range(len(hidden)) if sum(size[s] for s in hidden[: i + 1]) <= _FEW
    ]
    kept = {s for s in every - set(hidden) if plan.latents[s].family in (DIRICHLET, WISHART)}
    found = []
    for sites in (hidden if kept else every, hidden, *reversed(few)):
        wanted = frozenset(sites) | plan.joint
        fits = sum(size[s] for s in wanted) <= most
        free = all(_may_join(plan, plan.latents[s]) for s in wanted)
        if fits and free and wanted != plan.joint and wanted not in found:
            found.append(wanted)
    return found


def _may_join(plan: Plan, latent: Latent) -> bool:
    free = latent.support is None and not latent.held and not latent.diagonal
    free = free and latent.family is not WISHART  # torch maps no batch of these to the real line
    return free and plan.block_of(latent.name).placement is None


def with_points(plan: Plan, call: Call) -> Plan:
    """The plan with its sampled factors averaged over fixed points of the joint block.

    Points are of all sites that these factors read. Where some of these are in other blocks, and a
    point has at most `_FEW` scalars, points are of the joint ones, and the others are averaged given
    them. Else the plan is as it was.
    """
    sampled = [f for f in plan.factors if f.sampled]
    joint = [b for b in plan.blocks if all(plan.latents[s].joint for s in b.sites)]
    if not sampled or len(joint) != 1:
        return plan
    (block,), names = joint, frozenset(f.name for f in sampled)
    whole = all(f.blocks == {block.name} for f in sampled)
    read = {s for f in sampled for s in f.how} if whole else set(block.sites)
    density: LogDensity | AveragedGiven = LogDensity(call, names)
    if not whole:
        density = AveragedGiven(call, names, plan)
        if block.size > _FEW or not density.serves(block):
            return plan
    sites = tuple(s for s in block.sites if s in read)
    one = _point_factor(block, sites, sampled, density)
    return replace(plan, factors=(*(f for f in plan.factors if not f.sampled), one))


def _point_factor(
    block: Block,
    sites: tuple[str, ...],
    sampled: Sequence[CompiledFactor],
    density: LogDensity | AveragedGiven,
) -> PointFactor:
    blocks = frozenset().union(*(f.blocks for f in sampled))
    one = PointFactor(
        "points of " + ", ".join(sites[:3]) + (", ..." if len(sites) > 3 else ""),
        Expectation((), 0.0), 1.0, (), blocks, {}, (), any(f.observed for f in sampled),
        frozenset.intersection(*(f.plates for f in sampled)),
        density=density, block=block.name, sites=sites, layout=block.layout,
        few=not density.vectorises,
    )  # fmt: skip
    edges = tuple(
        (f.name, s, _how(how, s in sites, one.count)) for f in sampled for _, s, how in f.edges
    )
    return replace(one, edges=edges, how={s: how for _, s, how in edges})


def _how(how: How, pointed: bool, count: int) -> How:
    if pointed:
        return How("points", f"{count} fixed points: {how.reason}", how.cause)
    return How("quadrature", f"{how.reason}, given {count} points of others", how.cause)


def levels(plan: Plan) -> list[int]:
    """How often the points of each factor have been doubled; none without points."""
    return [f.level for f in plan.factors if isinstance(f, PointFactor)]


def points_of(plan: Plan) -> dict[str, tuple[int, int]]:
    """Of each factor with points, by name, how often they have been doubled, and which ones they are."""
    return {f.name: (f.level, f.seed) for f in plan.factors if isinstance(f, PointFactor)}


def at_points(plan: Plan, points: Mapping[str, tuple[int, int]]) -> Plan:
    """The plan with points as `points_of` another plan of the same model says."""
    factors = tuple(
        replace(f, level=points[f.name][0], seed=points[f.name][1])
        if isinstance(f, PointFactor) and f.name in points
        else f
        for f in plan.factors
    )
    return replace(plan, factors=factors)


class Refined(NamedTuple):
    """What other points say of a fit: loss, error, and a plan with more points if they differ."""

    loss: float
    error: float
    plan: Plan | None


def refine(evaluator: Evaluator) -> Refined | None:
    """Compare bound and messages with those at other points; None where the plan has no points.

    With S points the optimum is too good by its own fit to them. Where other points differ by more than
    `_TOLERATED` nats in the bound, or by more than that many standard deviations in where they would
    move a mean, there are to be twice as many points.
    """
    plan = evaluator.plan
    own = [f for f in plan.factors if isinstance(f, PointFactor)]
    if not own:
        return None
    change, apart, again = 0.0, 0.0, []
    for f in own:
        other = f.checked()
        value, message = _with_message(evaluator, f)
        more, differently = _with_message(evaluator, other)
        change += value - more
        belief = evaluator.beliefs[f.block]
        difference = [a - b for a, b in zip(message, differently, strict=True)]
        apart = max(apart, float(belief.inner(difference, difference).max()) / f.dims)
        again.append(f.refined())
    loss = change - evaluator.elbo()
    fine = abs(change) <= _TOLERATED and math.sqrt(apart) <= _TOLERATED
    if fine or any(f is None for f in again):
        return Refined(loss, abs(change), None)
    rest = [f for f in plan.factors if not isinstance(f, PointFactor)]
    return Refined(loss, abs(change), replace(plan, factors=(*rest, *(f for f in again if f))))


def _with_message(evaluator: Evaluator, f: PointFactor) -> tuple[float, list[Tensor]]:
    """The factor's value, and its gradient in the leaves of its block."""
    leaves = evaluator.leaves[f.block]
    with torch.enable_grad():
        value = f(*evaluator.moments)
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return float(value.detach()), [or_zeros(g, x) for g, x in zip(found, leaves, strict=True)]
