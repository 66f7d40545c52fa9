"""Sites that meet, and have blocks of their own, in one Gaussian instead: the bound decides.

A product of blocks loses the correlation between them, as between a slope and the covariates it
multiplies. Where few scalars are concerned, one Gaussian of all their unconstrained values holds it. It
begins as the product that was fitted,

    q(u) = N(u; m, V),    m and V the moments of u under the blocks, zero between them,

so that its bound begins where that of the product ended, and rises from there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_cvi.families import DIRICHLET, WISHART
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.structured import StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["begun", "candidates"]

_DRAWS = 4000
"""Draws that tell the moments of an unconstrained value under a family's member."""
_INFLATED = 1e-9
"""Least variance of an unconstrained value, relative to the square of its mean."""


def candidates(plan: Plan, most: int) -> frozenset[str]:
    """The sites that a joint Gaussian may serve better: of several blocks, at most `most` scalars.

    Sites whose messages are all exact and that do not multiply each other have the family that
    conjugacy gives them, and keep it.
    """
    if not plan.is_deterministic:
        return frozenset()
    movable = {b.name: b for b in plan.blocks if _may_join(plan, b)}
    if len(movable) < 2:
        return frozenset()
    found: frozenset[str] = frozenset()
    for names in _components(plan):
        if not names <= movable.keys() or len(names) < 2:
            continue
        sites = frozenset(s for n in names for s in movable[n].sites)
        if sum(movable[n].size for n in names) > most:
            continue
        inexact = not all(plan.is_exact(movable[n]) for n in names)
        if inexact or sites & plan.scattered:
            found |= sites
    total = sum(plan.latents[s].value.numel() for s in found)
    return found if total <= most else frozenset()


def _may_join(plan: Plan, block: Block) -> bool:
    latents = [plan.latents[s] for s in block.sites]
    free = not any(x.held or x.diagonal or x.support is not None for x in latents)
    kept = block.family in (DIRICHLET, WISHART)  # a Gaussian is a poor posterior of these
    return free and block.moves and block.placement is None and not kept


def _components(plan: Plan) -> list[set[str]]:
    """The blocks that factors join, directly or through others."""
    found = [{b.name} for b in plan.blocks]
    for f in plan.factors:
        touched = [c for c in found if c & f.blocks]
        if len(touched) > 1:
            found = [c for c in found if not c & f.blocks] + [set().union(*touched)]
    return found


def begun(block: Block, plan: Plan, before: Plan, beliefs: Mapping[str, Belief]) -> GaussianBelief:
    """The joint belief of `block` that has the moments of the beliefs of another plan."""
    layout = block.layout
    assert layout is not None
    like = plan.latents[block.sites[0]].value
    loc = torch.zeros(layout.width, dtype=like.dtype, device=like.device)
    cov = torch.zeros(layout.width, layout.width, dtype=like.dtype, device=like.device)
    for old in before.blocks:
        sites = [s for s in old.sites if s in layout.position]
        if not sites:
            continue
        at = torch.cat([layout.position[s].reshape(-1) for s in sites])
        mean, own = _moments(old, sites, before, plan, beliefs[old.name])
        loc[at] = mean.to(loc)
        cov[at[:, None], at] = own.to(cov)
    least = _INFLATED * (1 + loc.square())
    cov = cov + torch.diag_embed((least - cov.diagonal()).clamp(min=0))
    return GaussianBelief(loc[None], torch.linalg.inv(cov)[None])


def _moments(
    old: Block, sites: list[str], before: Plan, plan: Plan, belief: Belief
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the sites' unconstrained values, in this order."""
    if old.layout is not None:
        flat = torch.cat([old.layout.flat(s) for s in sites])
        if isinstance(belief, StructuredBelief):
            return belief.marginals()[0][flat], belief.covariance(flat)
        assert isinstance(belief, GaussianBelief)
        return belief.loc.reshape(-1)[flat], torch.block_diag(*belief.cov)[flat][:, flat]
    assert isinstance(belief, FamilyBelief)
    (site,) = sites
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = belief.family.to_distribution(belief.natural).sample((_DRAWS,))
    x = drawn.reshape(_DRAWS, *before.latents[site].shape)
    u = plan.latents[site].unconstrained(x).reshape(_DRAWS, -1)
    return u.mean(0), torch.diag_embed(u.var(0))
