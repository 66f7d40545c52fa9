"""Where a log density of a few scalars has its mass, from as few evaluations as will do.

    integral f(u) exp L(u) du  =  sum_k exp(L(u_k)) volume_k f(u_k)

For one or two scalars the points u_k are a lattice along the eigen-axes of the Hessian at the mode,
grown from the mode outwards while L is near its top: the trapezoid rule, which converges exponentially
for smooth densities that die out. For more scalars they are mirrored quasi-random points under a
normal law whose axes are as wide on either side as L says (split), and volume_k is one over its density.

Reference: H. Rue, S. Martino, N. Chopin (2009), Approximate Bayesian inference for latent Gaussian
models by using integrated nested Laplace approximations, sections 3.1 and 6.5 (mode, axes, grid,
skewness).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Design", "Interpolant", "Point", "Surface", "calibrated", "explore"]

_DEPTH = {1: 12.0, 2: 9.0}
"""How far below its top, in nats, the lattice follows a density: 9 are 4.2 standard deviations."""
_USED = 32.0
"""How far below the top, in nats, a point may be and still count for the interpolation."""
_SPACING = {1: 1.0, 2: 1.25}
"""Of the lattice, in standard deviations at the mode; see docs/design.md for what was measured."""
_TOO_FEW = 0.8
"""A lattice of which a smaller share of the points counts than under a normal density is too coarse."""
_REFINEMENTS = 3
"""How often it is made finer."""
_REACH = {1: 40, 2: 14}
"""Most steps from the mode along an axis of the lattice: a density that does not die out ends there."""
_CLIMBS = 12
"""Most rounds of the search for the mode."""
_PROBE = 2.5
"""Where the widths of either side are measured, in standard deviations: far out, for the tail counts."""
_WIDER = 1.3
"""By how much a split normal law is wider than the density, so that no importance weight is large."""
_FINE = {1: 32, 2: 8}
"""Parts into which a step of the lattice is divided where the density is interpolated."""
_BLUR = {1: 0.04, 2: 0.12, 3: 0.2}
"""Over how many standard deviations the masses of these are smeared in a marginal; 3 stands for more."""
_FINE_POINTS = 1 << 12
"""Points at which the density of three or more scalars is interpolated."""

_ABOVE = 0.5
"""How much higher than all points, in nats, the interpolation may be."""

_ROUNDS = 50
"""Most Newton steps of the calibration of weights."""

Evaluation = Callable[[Tensor, Any], tuple[float, Any]]


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

    def __call__(self, at: Tensor, axes: Tensor | None = None) -> Point:
        """The point at `at`; `axes` say how distances are measured."""
        known = [p for p in self.points if p.state is not None]
        nearest = None
        if known:
            change = torch.stack([p.at for p in known]) - at
            if axes is not None:
                change = torch.linalg.solve(axes, change.T).T
            distance = change.square().sum(-1)
            nearest = known[int(distance.argmin())]
            if torch.equal(nearest.at, at):
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


def explore(evaluate: Evaluation, start: Tensor, scale: Tensor, num_points: int) -> Design:
    """The design for L, from a start (d,) with rough standard deviations (d,).

    Arguments:
        evaluate: L at a point, and the state that it leaves, from the state of a point near it or None.
        num_points: of the quasi-random design of three or more scalars.
    """
    surface, d = Surface(evaluate), len(start)
    centre, axes = _mode_and_axes(surface, start, scale)
    if d > 2:
        return _quasi_random(surface, centre, axes, num_points)
    design = _lattice(surface, centre, axes)
    # Of a normal density so many points count: 1 / sum w^2 = (2 sqrt(pi) / spacing)^d.
    normal = (2 * math.sqrt(math.pi) / _SPACING[d]) ** d
    for _ in range(_REFINEMENTS):
        at = torch.stack([p.at for p in design.points])
        weights = torch.tensor(
            [p.height for p in design.points], dtype=at.dtype, device=at.device
        ).softmax(0)
        share = float(1 / weights.square().sum()) / normal
        if share > _TOO_FEW:
            break
        design = _lattice(surface, surface.top.at, _narrower(design.axes, at, weights, share))
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


# --- one or two scalars: a lattice -----------------------------------------------------------------


def _lattice(surface: Surface, centre: Tensor, axes: Tensor) -> Design:
    """Points of a lattice of which a neighbour is within _DEPTH of the top, from the centre outwards."""
    d = len(centre)
    spacing, reach = _SPACING[d], _REACH[d]
    steps = spacing * axes
    origin = (0,) * d
    found = {origin: surface(centre, axes)}
    top, ends = found[origin].height, True
    waiting = [origin]
    while waiting:
        waiting.sort(key=lambda n: found[n].height)
        n = waiting.pop()
        if not found[n].height > top - _DEPTH[d]:
            continue
        for i in range(d):
            for sign in (-1, 1):
                m = (*n[:i], n[i] + sign, *n[i + 1 :])
                if m in found:
                    continue
                if abs(m[i]) > reach:
                    ends = False
                    continue
                at = centre + steps @ torch.tensor(m, dtype=centre.dtype, device=centre.device)
                found[m] = surface(at, axes)
                top = max(top, found[m].height)
                waiting.append(m)
    kept = {n: p for n, p in found.items() if p.height > -math.inf}
    points = list(kept.values())
    volume = float(torch.linalg.slogdet(steps).logabsdet)
    cells = torch.tensor(list(kept), dtype=centre.dtype, device=centre.device)
    high = (
        torch.tensor([p.height for p in points], dtype=centre.dtype, device=centre.device)
        > top - _DEPTH[d]
    )
    fine = _refined(cells[high], _FINE[d])
    return Design(
        points,
        torch.full((len(points),), volume, dtype=centre.dtype, device=centre.device),
        centre,
        axes,
        centre + fine @ steps.T,
        torch.zeros(len(fine), dtype=centre.dtype, device=centre.device),
        _BLUR[d],
        ends,
        surface.points,
    )


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
        [points[i] for i in good], log_volume[good], centre, axes, fine, fine_log_volume, _BLUR[3], True,
        surface.points,
    )  # fmt: skip


def _normal_points(d: int, num_points: int) -> Tensor:
    """(n, d) points of a scrambled Sobol sequence under N(0, I), mirrored, with unit covariance."""
    engine = torch.quasirandom.SobolEngine(d, scramble=True, seed=0)
    u = engine.draw(num_points // 2, dtype=torch.float64)
    half = torch.special.ndtri(u.clamp(1e-7, 1 - 1e-7))
    factor = torch.linalg.cholesky(half.T @ half / len(half))
    half = torch.linalg.solve_triangular(factor, half.T, upper=False).T
    return torch.cat([half, -half])


# --- between the points ----------------------------------------------------------------------------


class Interpolant:
    """L(u) ~ known(u) + sum_k c_k |z - z_k|^3 + a quadratic in z, equal to L at the points.

    In one dimension the sum is a cubic spline. What is known in closed form (priors, Jacobians) is
    what makes tails bend; the rest, the likelihood of theta, is nearly linear there.

    Reference: H. Wendland (2005), Scattered data approximation, chapter 8 (polyharmonic splines).
    """

    def __init__(self, design: Design, known: Callable[[Tensor], Tensor]) -> None:
        self._known = known
        self._centre, self._axes = design.centre, design.axes
        top = max(p.height for p in design.evaluated)
        used = [p for p in design.evaluated if p.height > top - _USED]
        at = torch.stack([p.at for p in used])
        z = self._nodes = self._coordinates(at)
        values = torch.tensor(
            [p.height - top for p in used], dtype=z.dtype, device=z.device
        ) - known(at)
        quadratic = _quadratics(z)
        n, m = quadratic.shape
        zeros = quadratic.new_zeros(m, m)
        rows = [torch.cat([_cubes(z, z), quadratic], 1), torch.cat([quadratic.T, zeros], 1)]
        right = torch.cat([values, values.new_zeros(m)])[:, None]
        # Least squares: a point may be there twice, to rounding.
        found = torch.linalg.lstsq(torch.cat(rows), right, driver="gelsd").solution[:, 0]
        self._cubic, self._quadratic = found[:n], found[n:]

    def _coordinates(self, at: Tensor) -> Tensor:
        return torch.linalg.solve(self._axes, (at - self._centre).T).T

    def __call__(self, at: Tensor) -> Tensor:
        """L at (M, d) points, relative to the highest point; above that by no more than _ABOVE."""
        z = self._coordinates(at)
        rest = _cubes(z, self._nodes) @ self._cubic + _quadratics(z) @ self._quadratic
        return (rest + self._known(at)).clamp(max=_ABOVE)


def _cubes(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") ** 3


def _quadratics(z: Tensor) -> Tensor:
    """1, z_i and z_i z_j, (n, 1 + d + d (d + 1) / 2)."""
    i, j = torch.tril_indices(z.shape[1], z.shape[1], device=z.device)
    return torch.cat([torch.ones_like(z[:, :1]), z, z[:, i] * z[:, j]], 1)


def calibrated(weights: Tensor, features: Tensor, targets: Tensor) -> Tensor:
    """The weights (K,) nearest to these, in relative entropy, under which features have given means.

        w_k'  proportional to  w_k exp(lambda^T (phi_k - target))

    Features are (K, f). Where no such weights are near, the weights stay.

    Reference: J. Hainmueller (2012), Entropy balancing for causal effects.
    """
    mean = weights @ features
    scale = (weights @ (features - mean).square()).sqrt()
    live = scale > 1e-9 * mean.abs()
    centred = ((features - targets) / scale)[:, live]
    slopes = centred.new_zeros(centred.shape[1])
    logs = weights.log()
    for _ in range(_ROUNDS):
        new = (logs + centred @ slopes).softmax(0)
        off = new @ centred
        if float(off.abs().max()) < 1e-9:
            effective, before = 1 / new.square().sum(), 1 / weights.square().sum()
            return new if bool(effective > before / 2) else weights
        cov = (centred.T * new) @ centred - torch.outer(off, off)
        cov = cov + 1e-9 * torch.eye(len(off), dtype=cov.dtype, device=cov.device)
        slopes = slopes - torch.linalg.solve(cov, off).clamp(-1.0, 1.0)
    return weights
