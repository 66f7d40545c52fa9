"""What lies between points: a log density, and whatever else is known at points only.

    f(u)  ~  sum_k a_k(u) f(u_k)

with a_k of cubic radial splines. In one dimension they are cubic splines.

Reference: H. Wendland (2005), Scattered data approximation, chapter 8 (polyharmonic splines).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_cvi.exploration import Design

__all__ = ["Between", "Interpolant", "calibrated"]

_USED = 32.0
"""How far below the top, in nats, a point may be and still count for the interpolation."""
_ABOVE = 0.5
"""How much higher than all points, in nats, the interpolation may be."""
_ROUNDS = 50
"""Most Newton steps of the calibration of weights."""
_SPREAD = 4.0
"""Most sum_k |a_k|, by which errors at the points are magnified between them."""


class Interpolant:
    """L(u) ~ known(u) + sum_k c_k |z - z_k|^3 + a quadratic in z, equal to L at the points.

    What is known in closed form (priors, Jacobians) is what makes tails bend; the rest, the likelihood
    of theta, is nearly linear there.
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


class Between:
    """f(u) ~ sum_k a_k(u) f(u_k): exact at the points u_k and for affine f.

    Where u is so far from all points that sum_k |a_k| > _SPREAD, so much of the nearest point is mixed
    in that it is no more.
    """

    def __init__(self, design: Design) -> None:
        self._centre, self._axes = design.centre, design.axes
        z = self._nodes = self._coordinates(torch.stack([p.at for p in design.points]))
        affine = _affine(z)
        zeros = affine.new_zeros(affine.shape[1], affine.shape[1])
        system = torch.cat([torch.cat([_cubes(z, z), affine], 1), torch.cat([affine.T, zeros], 1)])
        # A pseudo-inverse: of few points on a line, say, not all affine functions can be told apart.
        self._solution = torch.linalg.pinv(system, rtol=1e-12)[:, : len(z)]

    def _coordinates(self, at: Tensor) -> Tensor:
        return torch.linalg.solve(self._axes, (at - self._centre).T).T

    def __call__(self, at: Tensor) -> Tensor:
        """a(u) for points (n, d), of shape (n, K)."""
        z = self._coordinates(at)
        a = torch.cat([_cubes(z, self._nodes), _affine(z)], 1) @ self._solution
        size = a.abs().sum(1, keepdim=True)
        share = ((size - _SPREAD) / (size - 1).clamp(min=1e-300)).clamp(min=0)
        nearest = torch.nn.functional.one_hot(self.nearest(at), len(self._nodes)).to(a)
        return (1 - share) * a + share * nearest

    def nearest(self, at: Tensor) -> Tensor:
        """The index of the nearest point, (n,)."""
        return torch.cdist(self._coordinates(at), self._nodes).argmin(1)


def _cubes(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") ** 3


def _quadratics(z: Tensor) -> Tensor:
    """1, z_i and z_i z_j, (n, 1 + d + d (d + 1) / 2)."""
    i, j = torch.tril_indices(z.shape[1], z.shape[1], device=z.device)
    return torch.cat([torch.ones_like(z[:, :1]), z, z[:, i] * z[:, j]], 1)


def _affine(z: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(z[:, :1]), z], 1)


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
