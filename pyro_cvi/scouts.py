"""Many starts at once, where a log density may have several maxima: which of them leads up furthest?

    F(m)  =  ( log p(y, m + s e) + log p(y, m - s e) ) / 2,

on the unconstrained scale, s the spread of narrow beliefs and e a draw that each start keeps. A pair of
points on both sides of m keeps what a single one would lose: log p has no maximum where a scale that
groups share goes to zero. All starts are evaluated in one vectorised run of the model, and climb by the
signs of their slopes (Rprop), which needs no common unit of the densities and no line search.

Reference: M. Riedmiller, H. Braun (1993), A direct adaptive method for faster backpropagation learning:
the RPROP algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_cvi.families import GAUSSIAN, WISHART
from pyro_cvi.graph.check import factor_values
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.initial import START_SPREAD, around, prior_spread
from pyro_cvi.graph.pointed import LogDensity, levels
from pyro_cvi.graph.symbolic import Call, Latent
from pyro_cvi.updates import AbstractBelief, FamilyBelief, GaussianBelief

__all__ = ["Scouts"]

_STEPS = 25
_SHARES = (0.0, *(0.5,) * 23, *(1.0,) * 24)
"""How far from the middle starts are, in draws of units of at most `_WIDEST`."""
_BEST, _OF = 16, 1024
"""Further starts: the best of so many draws with the prior's own deviations, which may find a needle."""
_FIRST, _LARGEST = 0.1, 1.0
"""Steps of a scalar, in units of the prior's standard deviation."""
_FASTER, _SLOWER = 1.2, 0.5
"""What becomes of a step where the slope keeps its sign, and where it turns."""
_WIDEST = 2.0
"""Largest unit of a draw: flat priors say nothing of scales."""
_MOST_VALUES = 1 << 22
"""Log densities of all starts that are held at a time; where there are more, none is scouted."""

Points = Mapping[str, Tensor]


class Scouts:
    """Starts around the present beliefs, and where they come to."""

    def __init__(self, evaluator: Evaluator, density: LogDensity, draws: int) -> None:
        plan = evaluator.plan
        self._plan, self._density, self._draws = plan, density, draws
        self._middle: dict[str, Tensor] = {}
        self._unit: dict[str, Tensor] = {}
        for block in plan.blocks:
            belief = evaluator.beliefs[block.name]
            spread = None if block.layout is None else prior_spread(plan, block).reshape(-1)
            for site in block.sites:
                latent = plan.latents[site]
                if block.layout is not None and spread is not None:
                    at = block.layout.flat(site)
                    self._middle[site] = belief.tensors[0].reshape(-1)[at].reshape(latent.shape)
                    self._unit[site] = spread[at].reshape(latent.shape).to(self._middle[site])
                else:
                    assert isinstance(belief, FamilyBelief)
                    mean = belief.family.to_distribution(belief.natural).mean
                    u = biject_to(latent.prior.support).inv(mean.reshape(latent.shape))
                    self._middle[site], self._unit[site] = u, torch.ones_like(u)

    @staticmethod
    def of(evaluator: Evaluator, call: Call | None, cells: int) -> Scouts | None:
        """Scouts, where there may be several maxima, of sites that are all continuous and free.

        None where the model cannot be vectorised, or is too large for that.
        """
        plan = evaluator.plan
        free = all(_is_free(x) for x in plan.latents.values())
        whole = all(b.placement is None and b.moves for b in plan.blocks)
        simple = all(
            isinstance(evaluator.beliefs[b.name], GaussianBelief | FamilyBelief)
            for b in plan.blocks
        )
        count = len(_SHARES) + _BEST
        if call is None or not (free and whole and simple) or 2 * count * cells > _MOST_VALUES:
            return None
        if not (levels(plan) or _may_have_valleys(evaluator)):
            return None
        values = {n: x.value.detach() for n, x in plan.latents.items()}
        density = LogDensity(call, frozenset(factor_values(call.plain(values))))
        draws = max(_BEST, min(_OF, _MOST_VALUES // (2 * cells)))
        return Scouts(evaluator, density, draws) if density.vectorises else None

    def highest(self) -> dict[str, Tensor] | None:
        """Unconstrained values of all sites where the highest of the climbs ends.

        They end where the model fails at one of the points, as with a matrix that is not positive
        definite; None where that is so from the first.
        """
        units = {n: u.clamp(max=_WIDEST) for n, u in self._unit.items()}
        first = self._starts(units)
        noise = self._noise(first)
        like = next(iter(first.values()))
        best = like.new_full((len(like),), -math.inf)
        found = {n: m.clone() for n, m in first.items()}
        here = {n: m.clone().requires_grad_() for n, m in first.items()}
        steps = {n: _FIRST * units[n].expand_as(m) for n, m in first.items()}
        signs = {n: torch.zeros_like(m) for n, m in first.items()}
        for _ in range(_STEPS):
            try:
                values = self._values(here, noise)
            except RuntimeError:
                break
            value = values.detach().to(best).nan_to_num(-math.inf, -math.inf, -math.inf)
            better = value > best
            best = torch.where(better, value, best)
            slopes = torch.autograd.grad(values.sum(), list(here.values()))
            for (n, m), slope in zip(here.items(), slopes, strict=True):
                found[n][better] = m.detach()[better]
                sign = slope.sign().nan_to_num(0.0)
                turned = sign * signs[n]
                change = torch.where(turned > 0, _FASTER, torch.where(turned < 0, _SLOWER, 1.0))
                steps[n] = torch.clamp(steps[n] * change, max=_LARGEST * units[n])
                signs[n] = torch.where(turned < 0, 0.0, sign)
                here[n] = (m.detach() + steps[n] * signs[n]).requires_grad_()
        if not bool(best.isfinite().any()):
            return None
        return {n: m[int(best.argmax())] for n, m in found.items()}

    def _starts(self, units: Points) -> dict[str, Tensor]:
        """Where the climbs begin."""
        near, far = {}, {}
        shares = torch.tensor(_SHARES, device="cpu")
        for n, m in self._middle.items():
            share = shares.to(m).reshape(-1, *[1] * m.ndim)
            near[n] = m + share * units[n] * torch.randn(len(shares), *m.shape, device="cpu").to(m)
            far[n] = m + self._unit[n] * torch.randn(self._draws, *m.shape, device="cpu").to(m)
        try:
            with torch.no_grad():
                values = self._values(far, self._noise(far))
        except RuntimeError:
            return near
        top = values.nan_to_num(-math.inf, -math.inf, -math.inf).topk(_BEST).indices
        return {n: torch.cat([m, far[n][top]]) for n, m in near.items()}

    def _noise(self, points: Points) -> dict[str, Tensor]:
        units = self._unit
        return {
            n: units[n].clamp(max=START_SPREAD) * torch.randn_like(m) for n, m in points.items()
        }

    def _values(self, points: Points, noise: Points) -> Tensor:
        """F of each start."""
        total: Tensor | float = 0.0
        values = {}
        for n, m in points.items():
            latent = self._plan.latents[n]
            u = torch.cat([m + noise[n], m - noise[n]])
            if latent.family is GAUSSIAN:
                values[n] = u.to(latent.value.dtype)
                continue
            transform = biject_to(latent.prior.support)
            values[n] = x = transform(u)
            slope = transform.log_abs_det_jacobian(u, x)
            total = total + slope.reshape(len(u), -1).sum(-1)
        return (self._density.at_once(values) + total).reshape(2, -1).mean(0)

    def beliefs(self, points: Points, share: float) -> dict[str, AbstractBelief]:
        """Narrow beliefs about all blocks at these points, of that share of the usual width."""
        found: dict[str, AbstractBelief] = {}
        for block in self._plan.blocks:
            latent = self._plan.latents[block.sites[0]]
            if block.layout is None:
                natural = around(latent, biject_to(latent.prior.support)(points[latent.name]))
                if natural is not None:
                    found[block.name] = FamilyBelief(block.family, natural)
                continue
            like = self._middle[latent.name]
            loc = like.new_zeros(block.layout.size)
            spread = torch.full_like(loc, START_SPREAD)
            for site in block.sites:
                at = block.layout.flat(site)
                loc[at] = points[site].reshape(-1).to(loc)
                spread[at] = self._unit[site].reshape(-1).clamp(max=START_SPREAD).to(loc)
            shape = block.layout.count, block.layout.width
            precision = torch.diag_embed((share * spread.reshape(shape)).pow(-2))
            found[block.name] = GaussianBelief(loc.reshape(shape), precision)
        return found


def _is_free(latent: Latent) -> bool:
    fixed = latent.held or latent.diagonal or latent.support is not None
    known = latent.family is GAUSSIAN or (latent.prior is not None and latent.family is not WISHART)
    return known and not fixed


def _may_have_valleys(evaluator: Evaluator) -> bool:
    """Whether a factor by quadrature has a valley where the prior goes: a fit may be caught there."""
    plan, beliefs = evaluator.plan, dict(evaluator.beliefs)
    for b in plan.blocks:
        old = beliefs[b.name]
        if isinstance(old, GaussianBelief):
            spread = prior_spread(plan, b).to(old.loc).clamp(max=_WIDEST)
            beliefs[b.name] = GaussianBelief(old.loc, torch.diag_embed(spread.pow(-2)))
    moments = Evaluator(plan, beliefs).moments[0]
    return any(f.expectation.has_valley(moments) for f in plan.factors if not f.sampled)
