"""Sites that have to be apart, for together they would make a factor be sampled that need not be.

That two sites multiply each other is seen from the expression; what a function makes of sites in one
block is not. So where a factor has to be sampled, its sites are tried by themselves, and where that
helps, pair by pair. Small blocks are left as they are: draws serve a few scalars as well, and keep what
ties them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pyro_cvi.estimators import Expectation, Structure, compile_expectation
from pyro_cvi.estimators.affine import NotAffine, flatten
from pyro_cvi.families import GAUSSIAN
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.joining import by_loss
from pyro_cvi.graph.likeness import Turns, classes, places
from pyro_cvi.graph.symbolic import Factor, Latent

__all__ = ["to_separate"]

_MOST_SITES = 12
"""Sites of one factor beyond which not every pair is tried."""
_FEW_SCALARS = 10
"""Scalars of the factor's blocks up to which these are left as they are, ..."""
_MOST_TERMS = 512
"""... terms of the factor, multiplied out, beyond which they are, ..."""
_MOST_EVALUATIONS = 1 << 20
"""... and values of functions, of all factors, that are too many for a step."""
_MOST_COLUMNS = 1000
"""Scalars of a trial's block that are held as one Gaussian."""

Pairs = set[tuple[str, str]]


def to_separate(
    factors: Iterable[Factor],
    turns: Sequence[Turns],
    structure: Structure,
    latents: Mapping[str, Latent],
) -> dict[str, set[str]]:
    """For each site those that may not share its block, for the sake of these factors that are sampled.

    All factors, by their form, say which pairs would rather stay together.
    """
    gaussian = {n: x for n, x in latents.items() if x.family is GAUSSIAN and not x.held}
    order = by_loss(gaussian, turns, classes(gaussian, turns, {}))
    foes: dict[str, set[str]] = {}
    known: dict[Hashable, set[tuple[int, int]]] = {}
    tried = [f for f in factors if not f.forced and not f.expression.opaque]
    most = _MOST_EVALUATIONS // max(len(tried), 1)
    for f in tried:
        kind, names = places(f)
        key = (kind, *(structure.block_of(s) for s in names))
        if key not in known:
            at = {s: i for i, s in enumerate(names)}
            found = _Trial(f, structure, gaussian).pairs(order, most)
            known[key] = {(at[a], at[b]) for a, b in found}
        for i, j in known[key]:
            foes.setdefault(names[i], set()).add(names[j])
            foes.setdefault(names[j], set()).add(names[i])
    return foes


class _Trial:
    """A factor under other blocks of its Gaussian sites."""

    def __init__(self, f: Factor, structure: Structure, latents: Mapping[str, Latent]) -> None:
        self.f, self.structure, self.latents = f, structure, latents
        self.names = sorted(s for s in f.expression.sites if s in latents)

    def pairs(self, order: Iterable[tuple[str, str]], most: int) -> Pairs:
        """Pairs of one block because of which the factor is sampled; the first in order last.

        None where without them more than so many values of functions would be needed.
        """
        owner, own = self.structure.block_of, set(self.names)
        every = [(a, b) for a, b in order if a in own and b in own and owner(a) == owner(b)]
        if not every or self._is_small() or self._is_long():
            return set()
        blocks: dict[str, list[str]] = {}
        for s in self.names:
            blocks.setdefault(owner(s), []).append(s)
        by_themselves = self._compiled([])
        alone = len(by_themselves.sampled)
        if by_themselves.evaluations > most or alone >= self._sampled(list(blocks.values())):
            return set()
        if len(self.names) > _MOST_SITES:
            return set(every)
        found = {p for p in every if self._sampled([p]) > alone}
        return found or self._added_up(every, alone)

    def _is_small(self) -> bool:
        owner = self.structure.block_of
        blocks = {owner(s) for s in self.names}
        inside = [x for s, x in self.latents.items() if owner(s) in blocks]
        return sum(math.prod(x.shape) for x in inside) <= _FEW_SCALARS

    def _is_long(self) -> bool:
        try:
            return len(flatten(self.f.expression).terms) > _MOST_TERMS
        except NotAffine:
            return True

    def _added_up(self, every: Sequence[tuple[str, str]], alone: int) -> Pairs:
        """Pairs that cannot be put together after those before them have been."""
        group: dict[str, tuple[str, ...]] = {s: (s,) for s in self.names}
        found = set()
        for a, b in every:
            together = group[a] if group[a] is group[b] else (*group[a], *group[b])
            others = {g for g in group.values() if a not in g and b not in g}
            if self._sampled([together, *others]) > alone:
                found.add((a, b))
            else:
                group |= dict.fromkeys(together, together)
        return found

    def _sampled(self, groups: Iterable[Sequence[str]]) -> int:
        return len(self._compiled(groups).sampled)

    def _compiled(self, groups: Iterable[Sequence[str]]) -> Expectation:
        """The factor's expectation where these sites share blocks, and no others do."""
        structure = self.structure.fresh()
        block, layout = dict(structure.block), dict(structure.layout)
        rest = [[s] for s in self.names if not any(s in g for g in groups)]
        for g in [*groups, *rest]:
            name = "\0".join(g)
            block |= dict.fromkeys(g, name)
            layout[name] = self._layout(g)
        structure = replace(structure, block=block, layout=layout)
        return compile_expectation(self.f.expression, structure)

    def _layout(self, sites: Sequence[str]) -> Layout:
        """One Gaussian of all scalars; of many, which would be as many columns, one for each of them."""
        shapes = {s: self.latents[s].shape for s in sites}
        device = self.latents[sites[0]].value.device
        count = sum(math.prod(n) for n in shapes.values())
        single = torch.arange(count, device=device)
        split = Layout.from_components(shapes, single) if count > _MOST_COLUMNS else None
        return split or Layout.dense(shapes, device)
