"""What a fit begins with: the priors of all latents given the middle of those they hang on.

A prior that a draw of its parents has shown may be anywhere. So the model runs once more, each latent at
the middle of its prior given those before it; sites whose middle may be a saddle (factors that multiply
each other), and all sites of a further start, are moved away from it,

    z  =  c + r s e,        e a draw of unit size,  s the prior's standard deviation, or less,

with r = 1 unless the log joint density falls far below that of the middle: then r is smaller.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_cvi.families import BETA, DIRICHLET, GAMMA, INVERSE_GAMMA, WISHART, family_of
from pyro_cvi.graph.check import factor_values
from pyro_cvi.graph.plan import Plan
from pyro_cvi.graph.points import centre, is_continuous, towards
from pyro_cvi.graph.symbolic import Call, Latent, describe_latents

__all__ = ["Beginning", "begun"]

_SHARES = (1.0, 0.3, 0.1, 0.03)
_LEAST = 0.01
"""How far sites are moved from their middle, at most and at least."""
_FURTHEST = 2.0
"""Largest standard deviation of a move of a further start, on the real line."""
_WIDEST = 3.0
"""The largest move, in standard deviations."""
_HALFWAY = 0.5
"""The part of the way to a draw that probabilities and matrices are moved."""
_ABSURD, _ROOM = 10.0, 1e3
"""A log density that is lower than the middle's by so many times its size, and so many nats."""


class Beginning(NamedTuple):
    """The plan with priors and values of its latents at a start; the sites that were moved to these."""

    plan: Plan
    moved: frozenset[str]


def begun(
    plan: Plan,
    call: Call | None,
    constant: Collection[str],
    located: Mapping[str, Tensor],
    *,
    again: bool = False,
    tested: bool = True,
) -> Beginning:
    """Where a fit begins.

    The priors of the sites named in `constant` hang on no other. `located` are sites that stay where
    they are. With `again` all others are moved, by new random numbers; without, none are used up, and
    what is known is used where nothing is to be `tested`.
    """
    latents = plan.latents
    placed = {n: x for n, x in located.items() if n in latents and x.shape == latents[n].shape}
    moved = frozenset(latents) if again else plan.scattered
    moved = frozenset(n for n in moved - placed.keys() if not latents[n].held)
    known = {n for n, x in latents.items() if x.support is not None} | {*constant, *placed}
    is_known = all(n in known and (x.prior or x.support) is not None for n, x in latents.items())
    if call is None or (is_known and not (moved and tested)):
        return Beginning(plan, moved if again else frozenset())
    start = _Start(call, placed, moved, frozenset(constant), again, _seed(again))
    found, least = start.at(_LEAST), -math.inf
    if tested and found is not None:
        least = found.total - _ABSURD * abs(found.total) - _ROOM
    for share in _SHARES if moved else ():
        here = start.at(share)
        if here is not None and here.total >= least:
            found = here
            break
    if found is None:  # the first run, which did not fail, is the start
        free = frozenset(n for n, x in latents.items() if not (x.held or n in placed))
        return Beginning(plan, free)
    fresh = {n: _like(x, found.latents[n]) for n, x in latents.items()}
    return Beginning(replace(plan, latents=fresh), moved if again else frozenset())


def _like(latent: Latent, found: Latent) -> Latent:
    """A latent with the prior and value of another run; of states nothing is asked."""
    if latent.support is not None:
        return latent
    return replace(latent, prior=found.prior, value=found.value.detach().to(latent.value.dtype))


def _seed(again: bool) -> int:
    """Of the moves of all sites: new, or one that follows from the random state and leaves it alone."""
    if again:
        return int(torch.randint(2**31, (), device="cpu"))
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


class _At(NamedTuple):
    """Latents of one run, and the sum of all log densities."""

    latents: Mapping[str, Latent]
    total: float


class _Start(NamedTuple):
    """How the model runs for its start."""

    call: Call
    placed: Mapping[str, Tensor]
    moved: frozenset[str]
    constant: frozenset[str]
    again: bool
    seed: int

    def at(self, share: float) -> _At | None:
        """A run in which sites are moved by that share; None if the model fails there."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed)
            try:
                trace = self.call.plain(
                    self.placed, one_state=True, choose=lambda site: self._value(site, share)
                )
                values = [v.sum() for v in factor_values(trace).values()]
            except (RuntimeError, ValueError):  # as that a matrix is not positive definite
                return None
        total = sum(float(v) for v in values)
        latents, _ = describe_latents(trace)
        return _At(latents, total if math.isfinite(total) else -math.inf)

    def _value(self, site: Any, share: float) -> Tensor | None:
        name, fn = site["name"], site["fn"]
        latent = self.call.latents.get(name)
        if latent is None or not is_continuous(fn):
            return None
        middle = centre(fn)
        if name not in self.moved:
            return middle
        if not self.again and name in self.constant:
            return towards(middle, latent.value.detach(), share)
        return _moved(fn, middle, share) if self.again else towards(middle, fn.sample(), share)


def _moved(fn: Any, middle: Tensor | None, share: float) -> Tensor:
    """A point that a further start may have, away from the middle of a law."""
    family, draw = family_of(fn), fn.sample()
    if middle is None:
        return draw
    if family in (GAMMA, INVERSE_GAMMA):
        spread = (fn.variance.sqrt() / middle).nan_to_num(1.0, 1.0, 1.0).clamp(max=1.0)
        return middle * (share * spread * torch.randn_like(middle)).exp()
    if family in (BETA, DIRICHLET, WISHART):
        return towards(middle, draw, share * _HALFWAY)
    try:
        size = fn.variance.sqrt().nan_to_num(_FURTHEST, _FURTHEST, _FURTHEST)
    except (NotImplementedError, AttributeError):
        size = torch.full_like(middle, _FURTHEST)
    unit = ((draw - middle) / size).clamp(-_WIDEST, _WIDEST)
    return towards(middle, middle + size.clamp(max=_FURTHEST) * unit, share)
