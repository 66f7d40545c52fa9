"""Where a log density of a few scalars has its mass, from as few evaluations as will do.

    integral f(u) exp L(u) du  =  sum_k exp(L(u_k)) volume_k f(u_k)

For one or two scalars the points u_k are a lattice along the eigen-axes of the Hessian at the mode,
grown from the mode outwards while L is near its top: the trapezoid rule, which converges exponentially
for smooth densities that die out. It is grown from other modes too, if a look at some values that are
likely a priori finds any. For more scalars they are mirrored quasi-random points under a
normal law whose axes are as wide on either side as L says (split), and volume_k is one over its density.

Reference: H. Rue, S. Martino, N. Chopin (2009), Approximate Bayesian inference for latent Gaussian
models by using integrated nested Laplace approximations, sections 3.1 and 6.5 (mode, axes, grid,
skewness).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Design", "Point", "Surface", "explore"]

_DEPTH = {1: 12.0, 2: 9.0}
"""How far below its top, in nats, the lattice follows a density: 9 are 4.2 standard deviations."""
_SPACING = {1: 1.0, 2: 1.25}
"""Of the lattice, in standard deviations at the mode; see docs/design.md for what was measured."""
_STRETCH = {1: 0.15, 2: 0.0}
"""With 0.15 steps are 1.7 times as wide 9 standard deviations from the mode, 4.6 times at 30. In a plane
a bent ridge has its width along no axis, and would be met too coarsely."""
_WIDE, _SEEN, _SHARP = 1.2, 7.0, 2.5
"""Where steps are so much wider, and the density less than so many nats below its top, no bend may be
sharper than so many times that of the mode."""
_TOO_FEW = 0.8
"""A lattice of which a smaller share of the points counts than under a normal density is too coarse."""
_REFINEMENTS = 3
"""How often it is made finer."""
_REACH = 40.0
"""Most standard deviations from a mode along an axis: a density that does not die out ends there."""
_CLIMBS = 12
"""Most rounds of the search for the mode."""
_HOPE = 50.0
"""How far below the top, in nats, a point may be for the search of another mode to begin there."""
_PROBE = 2.5
"""Where the widths of either side are measured, in standard deviations: far out, for the tail counts."""
_WIDER = 1.3
"""By how much a split normal law is wider than the density, so that no importance weight is large."""
_FINE = {1: 32, 2: 16}
"""Parts into which a step of the lattice is divided where the density is interpolated, ..."""
_MOST_FINE = 20_000
"""... or fewer where these would be more points in all."""
_BLUR = 0.75
"""Over how many of these parts the masses of points in a plane are smeared in a marginal."""
_FINE_BLUR = 0.2
"""The same for three or more scalars, in standard deviations."""
_FINE_POINTS = 1 << 12
"""Points at which the density of three or more scalars is interpolated."""


class Evaluation(Protocol):
    """L at a point, and the state that it leaves, from the state of a point near it or None.

    Where there is none, minus infinity and None. A rough one may be cheaper and too low.
    """

    def __call__(self, at: Tensor, state: Any, rough: bool = False) -> tuple[float, Any]: ...


@dataclass(frozen=True, eq=False)
class Point:
    """L at one point, with the state that the evaluation left: the start of evaluations near it."""

    at: Tensor
    height: float
    state: Any


class Surface:
    """L: R^d -> R, evaluated once at every point, from the state of the nearest point before."""

    def __init__(self, evaluate: Evaluation) -> None:
        self._evaluate = evaluate
        self.points: list[Point] = []

    def _nearest(self, at: Tensor, axes: Tensor | None) -> Point | None:
        known = [p for p in self.points if p.state is not None]
        if not known:
            return None
        change = torch.stack([p.at for p in known]) - at
        if axes is not None:
            change = torch.linalg.solve(axes, change.T).T
        return known[int(change.square().sum(-1).argmin())]

    def rough(self, at: Tensor, axes: Tensor) -> float:
        """L there, roughly, and not kept."""
        nearest = self._nearest(at, axes)
        height, _ = self._evaluate(at, None if nearest is None else nearest.state, rough=True)
        return height if math.isfinite(height) else -math.inf

    def __call__(self, at: Tensor, axes: Tensor | None = None) -> Point:
        """The point at `at`; `axes` say how distances are measured."""
        nearest = self._nearest(at, axes)
        if nearest is not None and torch.equal(nearest.at, at):
            return nearest
        height, state = self._evaluate(at, None if nearest is None else nearest.state)
        point = Point(at, height if math.isfinite(height) else -math.inf, state)
        self.points.append(point)
        return point

    @property
    def top(self) -> Point:
        """The highest point so far."""
        return max(self.points, key=lambda p: p.height)


@dataclass(frozen=True, eq=False)
class Design:
    """Points and the logarithms of their volumes.

    `centre` and `axes` (d, d), a column for each axis, one standard deviation long, are the
    coordinates z with u = centre + axes z. `fine` (M, d) are many more points, with `fine_log_volume`
    (M,) of theirs (up to a constant), for an interpolated density. `ends` tells whether the density died
    out on all sides.
    """

    points: list[Point]
    log_volumes: Tensor
    centre: Tensor
    axes: Tensor
    fine: Tensor
    fine_log_volume: Tensor
    blur: float
    ends: bool = True
    evaluated: list[Point] = field(default_factory=list)

    @property
    def heights(self) -> Tensor:
        """L at the points, (K,)."""
        values = [p.height for p in self.points]
        return torch.tensor(values, dtype=self.axes.dtype, device=self.axes.device)


def explore(
    evaluate: Evaluation,
    start: Tensor,
    scale: Tensor,
    num_points: int,
    likely: Sequence[Tensor] = (),
) -> Design:
    """The design for L, from a start (d,) with rough standard deviations (d,).

    Arguments:
        evaluate: L at a point.
        num_points: of the quasi-random design of three or more scalars.
        likely: of each scalar, values between which there may be another mode.
    """
    surface, d = Surface(evaluate), len(start)
    centre, axes = _mode_and_axes(surface, start, scale)
    if d > 2:
        return _quasi_random(surface, centre, axes, num_points)
    modes = [(centre, axes), *_other_modes(surface, centre, axes, likely)]
    axes = min((a for _, a in modes), key=lambda a: float(torch.linalg.slogdet(a).logabsdet))
    grid = _Grid(centre, axes, _SPACING[d], 0.0 if len(modes) > 1 else _STRETCH[d])
    seeds = [c for c, _ in modes]
    design, coarse = _lattice(surface, grid, seeds)
    if coarse:
        grid = replace(grid, stretch=0.0)
        design, _ = _lattice(surface, grid, seeds)
    # Of a normal density so many points count: 1 / sum w^2 = (2 sqrt(pi) / spacing)^d.
    normal = (2 * math.sqrt(math.pi) / _SPACING[d]) ** d
    for _ in range(_REFINEMENTS):
        at = torch.stack([p.at for p in design.points])
        weights = (design.heights + design.log_volumes).softmax(0)
        share = float(1 / weights.square().sum()) / normal
        if share > _TOO_FEW:
            break
        axes = _narrower(design.axes, at, weights, share)
        grid = replace(grid, centre=surface.top.at, axes=axes)
        design, _ = _lattice(surface, grid, seeds)
    return design


def _narrower(axes: Tensor, at: Tensor, weights: Tensor, share: float) -> Tensor:
    """Axes of the points' covariance, of `share` of the volume of these."""
    change = at - weights @ at
    cov = (change.T * weights) @ change
    values, vectors = torch.linalg.eigh(cov)
    found = vectors * values.clamp(min=1e-4 * float(values.max())).sqrt()
    volumes = [torch.linalg.slogdet(a).logabsdet for a in (axes, found)]
    return found * (share * (volumes[0] - volumes[1]).exp()) ** (1 / len(axes))


# --- the mode ----------------------------------------------------------------------------------------


def _mode_and_axes(surface: Surface, start: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Near the mode of L, and the eigen-axes of its negative Hessian there, scaled to one sd.

    Differences are taken over about one standard deviation, so that they say how wide the density is and
    not how it is curved at one point; so the mode need be met to a fraction of that only.
    """
    centre, scale = surface(start), scale.clone()
    for _ in range(_CLIMBS):
        up, down = _neighbours(surface, centre, scale)
        slope = (up - down) / (2 * scale)
        curvature = (2 * centre.height - up - down) / scale**2
        bent = curvature > (0.5 / scale) ** 2 / 4  # else wider than four times what was thought
        wide = torch.where(bent, curvature.clamp(min=1e-300).rsqrt(), 2 * scale)
        step = torch.where(bent, slope / curvature, slope.sign() * 2 * scale)
        step = step.clamp(-2 * scale, 2 * scale)
        settled = bool((step.abs() < 0.4 * wide).all() & bent.all())
        settled = settled and bool(((wide / scale - 1).abs() < 0.5).all())
        if settled:
            break
        new = surface(centre.at + step)
        top = surface.top
        centre = new if new.height > centre.height else top
        scale = wide.clamp(scale / 4, 4 * scale)
    return _newton(surface, centre, scale)


def _neighbours(surface: Surface, centre: Point, scale: Tensor) -> tuple[Tensor, Tensor]:
    """L one scale up and down each coordinate; where it is not finite, far below."""
    moves = torch.diag(scale)
    up = [surface(centre.at + m).height for m in moves]
    down = [surface(centre.at - m).height for m in moves]
    low = centre.height - 50.0
    both = torch.tensor([up, down], dtype=scale.dtype, device=scale.device).clamp(min=low)
    return both[0], both[1]


def _newton(surface: Surface, centre: Point, scale: Tensor) -> tuple[Tensor, Tensor]:
    """One Newton step with all second differences, kept if it rises; the axes."""
    d = len(scale)
    up, down = _neighbours(surface, centre, scale)
    slope = (up - down) / 2
    negative = torch.diag(2 * centre.height - up - down)
    moves = torch.diag(scale)
    for i in range(d):
        for j in range(i):
            both = surface(centre.at + moves[i] + moves[j]).height
            negative[i, j] = negative[j, i] = -(both - float(up[i]) - float(up[j]) + centre.height)
    if not bool(negative.isfinite().all()):
        negative = torch.diag(negative.diagonal())
    values, vectors = torch.linalg.eigh(negative)  # in units of `scale`
    values = values.clamp(min=1 / 16)  # at most four scales wide
    axes = scale[:, None] * vectors * values.rsqrt()
    step = vectors @ ((vectors.T @ slope) / values)
    if d > 1 and bool((step.abs() > 0.2).any()):
        new = surface(centre.at + scale * step.clamp(-2, 2))
        centre = new if new.height > centre.height else centre
    return centre.at, axes


def _other_modes(
    surface: Surface, centre: Tensor, axes: Tensor, likely: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Modes, with their axes, that are reached from a value higher than both its neighbours on a line.

    The lines are those through the mode along each coordinate; what is within reach of a lattice from
    the mode need not be looked at.
    """
    found: list[tuple[Tensor, Tensor]] = []
    least = surface.top.height - _HOPE
    for j, values in enumerate(likely):
        far = (values - centre[j]).abs() > _PROBE * axes[j].norm()
        line = torch.cat([values[far], centre[j : j + 1]]).sort().values
        if len(line) < 2:
            continue
        places = centre.repeat(len(line), 1)
        places[:, j] = line
        heights = [surface.rough(at, axes) for at in places]
        for i, height in enumerate(heights):
            beside = [heights[k] for k in (i - 1, i + 1) if 0 <= k < len(line)]
            if float(line[i]) == float(centre[j]) or not height > max(*beside, least):
                continue
            width = (line[max(i - 1, 0)] - line[min(i + 1, len(line) - 1)]).abs() / 8
            scale = axes.norm(dim=1)
            scale[j] = width.clamp(min=scale[j])
            found.append(_mode_and_axes(surface, places[i], scale))
    return found


# --- one or two scalars: a lattice -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Grid:
    """u = centre + axes z with z = sinh(s t) / s: a lattice in t, wider in u far from the centre.

    The trapezoid rule in t meets densities that fall like an exponential with few points.
    """

    centre: Tensor
    axes: Tensor
    spacing: float
    stretch: float

    def scaled(self, n: Tensor) -> Tensor:
        """z of whole numbers or fractions (*, d)."""
        t = self.spacing * n
        return (self.stretch * t).sinh() / self.stretch if self.stretch else t

    def __call__(self, n: Tensor) -> Tensor:
        """The points of these numbers."""
        return self.centre + self.scaled(n) @ self.axes.T

    def cell(self, at: Tensor) -> tuple[int, ...]:
        """The numbers of the point nearest to `at`."""
        z = torch.linalg.solve(self.axes, at - self.centre)
        if self.stretch:
            z = (self.stretch * z).asinh() / self.stretch
        return tuple((z / self.spacing).round().long().tolist())

    def wider(self, n: Tensor) -> Tensor:
        """By how much steps are wider along each axis than at the centre, (*, d)."""
        return (self.stretch * self.spacing * n).cosh()

    def log_volume(self, n: Tensor) -> Tensor:
        """That of a cell, (*, d) to (*)."""
        first = torch.linalg.slogdet(self.axes).logabsdet + n.shape[-1] * math.log(self.spacing)
        return first + self.wider(n).log().sum(-1)


_Cell = tuple[int, ...]


def _lattice(surface: Surface, grid: _Grid, seeds: Sequence[Tensor]) -> tuple[Design, bool]:
    """Points of a lattice of which a neighbour is within _DEPTH of the top, from the seeds outwards.

    And whether it is too coarse somewhere.
    """
    d = len(grid.centre)
    found, ends = _grown(surface, grid, seeds)
    kept = {n: p for n, p in found.items() if p.height > -math.inf}
    points = list(kept.values())
    cells = torch.tensor(list(kept), dtype=grid.centre.dtype, device=grid.centre.device)
    heights = torch.tensor([p.height for p in points], dtype=cells.dtype, device=cells.device)
    high = heights > heights.max() - _DEPTH[d]
    parts = _FINE[d]
    while parts > 4 and int(high.sum()) * parts**d > _MOST_FINE:
        parts //= 2
    fine = _refined(cells[high], parts)
    design = Design(
        points,
        grid.log_volume(cells),
        grid.centre,
        grid.axes,
        grid(fine),
        grid.log_volume(fine),
        0.0 if d == 1 else _BLUR * grid.spacing / parts,
        ends,
        surface.points,
    )
    return design, _is_coarse(kept, grid)


def _grown(
    surface: Surface, grid: _Grid, seeds: Sequence[Tensor]
) -> tuple[dict[_Cell, Point], bool]:
    """The points of the lattice, and whether the density died out before their number did."""
    d = len(grid.centre)
    waiting = list(dict.fromkeys(grid.cell(at) for at in seeds))

    def number(n: _Cell) -> Tensor:
        return torch.tensor(n, dtype=grid.centre.dtype, device=grid.centre.device)

    found = {n: surface(grid(number(n)), grid.axes) for n in waiting}
    origins, ends = torch.stack([grid.scaled(number(n)) for n in waiting]), True
    top = max(p.height for p in found.values())
    while waiting:
        waiting.sort(key=lambda n: found[n].height)
        n = waiting.pop()
        if not found[n].height > top - _DEPTH[d]:
            continue
        for i, sign in itertools.product(range(d), (-1, 1)):
            m = (*n[:i], n[i] + sign, *n[i + 1 :])
            if m in found:
                continue
            away = (grid.scaled(number(m)) - origins)[:, i].abs()
            if bool((away > _REACH).all()):
                ends = False
                continue
            found[m] = surface(grid(number(m)), grid.axes)
            top = max(top, found[m].height)
            waiting.append(m)
    return found, ends


def _is_coarse(points: Mapping[_Cell, Point], grid: _Grid) -> bool:
    """Whether the density has bends, where the lattice is wide, that are sharper than at the mode."""
    top = max(p.height for p in points.values())
    for n, p in points.items():
        wider = grid.wider(torch.tensor(n, dtype=grid.centre.dtype, device="cpu")).tolist()
        for i in range(len(n)):
            beside = [points.get((*n[:i], n[i] + sign, *n[i + 1 :])) for sign in (-1, 1)]
            if p.height < top - _SEEN or max(wider) < _WIDE or None in beside:
                continue
            bend = 2 * p.height - sum(b.height for b in beside if b is not None)
            if bend > _SHARP * grid.spacing**2:
                return True
    return False


def _refined(cells: Tensor, parts: int) -> Tensor:
    """A finer lattice on the cells around these whole numbers (n, d), each point once."""
    d = cells.shape[1]
    offsets = torch.arange(-parts // 2, parts // 2, dtype=cells.dtype, device=cells.device)
    grid = torch.cartesian_prod(*[offsets] * d).reshape(-1, d)
    all_points = (cells[:, None] * parts + grid).reshape(-1, d)
    return all_points.unique(dim=0) / parts


# --- three or more: quasi-random points ------------------------------------------------------------


def _quasi_random(surface: Surface, centre: Tensor, axes: Tensor, num_points: int) -> Design:
    """Importance points of a split normal law along the axes."""
    d = len(centre)
    top = surface(centre, axes).height
    widths = torch.ones(2, d, dtype=centre.dtype, device=centre.device)
    for side, sign in enumerate((1.0, -1.0)):
        for i in range(d):
            fall = top - surface(centre + sign * _PROBE * axes[:, i], axes).height
            widths[side, i] = _PROBE / math.sqrt(2 * max(fall, 0.02))
    widths = _WIDER * widths.clamp(0.3, 3.0)

    def place(normal: Tensor) -> tuple[Tensor, Tensor]:
        """Points of the split law and minus their log density, from those of a standard normal."""
        w = torch.where(normal > 0, widths[0], widths[1])
        # Each side has the mass of its width, so that the density is continuous at the centre.
        shares = widths[0] / widths.sum(0)
        u = torch.special.ndtr(normal)
        upper = u > 1 - shares
        inner = torch.where(upper, (u - 1 + shares) / shares, (1 - shares - u) / (1 - shares))
        t = torch.special.ndtri(0.5 + 0.5 * inner.clamp(0, 1 - 1e-12))
        w = torch.where(upper, widths[0], -widths[1])
        log_density = (-0.5 * t**2 - 0.5 * math.log(math.pi / 2) - widths.sum(0).log()).sum(-1)
        z = w * t
        return centre + z @ axes.T, -log_density + torch.linalg.slogdet(axes).logabsdet

    at, log_volume = place(_normal_points(d, num_points).to(centre.device))
    order = (at - centre).square().sum(-1).argsort()
    points = [surface(at[i], axes) for i in order]
    log_volume = log_volume[order] - math.log(len(points))
    good = [i for i, p in enumerate(points) if p.height > -math.inf]
    fine, fine_log_volume = place(_normal_points(d, _FINE_POINTS).to(centre.device))
    return Design(
        [points[i] for i in good], log_volume[good], centre, axes, fine, fine_log_volume,
        _FINE_BLUR, True, surface.points,
    )  # fmt: skip


def _normal_points(d: int, num_points: int) -> Tensor:
    """(n, d) points of a scrambled Sobol sequence under N(0, I), mirrored, with unit covariance."""
    engine = torch.quasirandom.SobolEngine(d, scramble=True, seed=0)
    u = engine.draw(num_points // 2, dtype=torch.float64)
    half = torch.special.ndtri(u.clamp(1e-7, 1 - 1e-7))
    factor = torch.linalg.cholesky(half.T @ half / len(half))
    half = torch.linalg.solve_triangular(factor, half.T, upper=False).T
    return torch.cat([half, -half])
