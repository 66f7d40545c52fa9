"""Which Gaussian sites share a block: those that meet, and do not multiply each other.

Sites that multiply each other are foes: in one block their factor would not be conjugate for either.
What is lost by keeping sites apart is their correlation, and the blocks should lose little of it. Sites
of one role are put together first, for a foe of some of them would tear them apart: the last state of a
chain does not multiply the coefficient that all others do, and belongs to them all the same. Then come
the roles that have most to do with each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from pyro_cvi.algebra.expression import Group, Stat, Term
from pyro_cvi.families import GAUSSIAN
from pyro_cvi.graph.likeness import Foes, Turns, classes, with_foes
from pyro_cvi.graph.meetings import Meetings, opaque_sites, operands_of
from pyro_cvi.graph.symbolic import Factor, Latent
from pyro_cvi.graph.windows import Part

__all__ = ["by_loss", "joined", "multiplied"]


def foes_of(turns: Iterable[Turns]) -> dict[str, set[str]]:
    """For each site those that it multiplies inside a sum."""
    foes: dict[str, set[str]] = {}
    for x, y in itertools.chain.from_iterable(t.each(_multiplied(t.first)) for t in turns):
        foes.setdefault(x, set()).add(y)
        foes.setdefault(y, set()).add(x)
    return foes


def multiplied(latents: Mapping[str, Latent], turns: Iterable[Turns]) -> dict[str, set[str]]:
    """For each Gaussian site the others that it multiplies: zero for both is a saddle of the ELBO."""
    gaussian = {n for n, latent in latents.items() if latent.family is GAUSSIAN}
    foes = foes_of(turns)
    return {
        n: others & gaussian for n, others in foes.items() if n in gaussian and others & gaussian
    }


def _multiplied(f: Factor) -> set[tuple[str, str]]:
    pairs = set()
    for t in {id(t): t for t, _ in operands_of(f.expression)}.values():
        for a, b in itertools.combinations(_factor_sites(t), 2):
            pairs |= {(x, y) for x, y in itertools.product(a, b) if x != y}
    return pairs


def _factor_sites(t: Term) -> list[frozenset[str]]:
    """Site sets of a term's operands, counting a square (the same group twice) once."""
    operands: list[Stat | Group] = []
    for o in t.operands:
        if isinstance(o, Stat | Group) and not any(o.sites == p.sites for p in operands):
            operands.append(o)
    return [o.sites for o in operands]


def joined(
    gaussian: Mapping[str, Latent],
    turns: Sequence[Turns],
    foes: Foes,
    parts: Mapping[str, tuple[Part, ...]],
) -> list[list[str]]:
    """The sites of each block, in the order of the model; `foes` more that may not share one.

    Nor do sites in different subsampled plates.
    """
    foes = with_foes(foes_of(turns), foes)
    role = classes(gaussian, turns, foes)
    wanted = by_loss(gaussian, turns, role)
    for names in opaque_sites(turns):
        wanted += itertools.pairwise(sorted(names & set(gaussian)))
    wanted = [(a, b) for a, b in wanted if parts.get(a, ()) == parts.get(b, ())]
    groups = _Groups(gaussian, _foes_of_roles(role, foes))
    for a, b in wanted:
        groups.join(a, b)
    groups = _Groups(gaussian, foes, groups)  # where only others of their role are foes
    for a, b in wanted:
        groups.join(a, b)
    return groups.members()


def by_loss(
    sites: Mapping[str, Latent], turns: Iterable[Turns], role: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Pairs of sites that meet: those of one role first, then those whose roles have most to lose."""
    meetings = Meetings.of(turns, {n: latent.ref for n, latent in sites.items()})
    losses = {p: meetings.loss(*p) for p in meetings.pairs}
    roles = {p: tuple(sorted((role[p[0]], role[p[1]]))) for p in losses}
    total: dict[tuple[str, ...], float] = {}
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    for p, loss in losses.items():
        total[roles[p]] = total.get(roles[p], 0.0) + loss
        first[roles[p]] = min(first.get(roles[p], p), p)

    def place(p: tuple[str, str]) -> tuple[bool, float, tuple[str, str], float, tuple[str, str]]:
        a, b = roles[p]
        return a != b, -round(total[a, b], 9), first[a, b], -round(losses[p], 9), p

    return sorted(losses, key=place)


def _foes_of_roles(role: Mapping[str, str], foes: Foes) -> dict[str, set[str]]:
    """The foes of each site, and of all that have its role, with all that have theirs."""
    of: dict[str, list[str]] = {}
    for s, r in role.items():
        of.setdefault(r, []).append(s)
    between: dict[str, set[str]] = {}
    for s, r in role.items():
        between.setdefault(r, set()).update(role[t] for t in foes.get(s, ()) if t in role)
    every = {r: {s for x in rs for s in of[x]} for r, rs in between.items()}
    return {s: every[r] for s, r in role.items()}


class _Groups:
    """Sets of sites that grow together where no two foes would meet."""

    def __init__(self, sites: Iterable[str], foes: Foes, start: _Groups | None = None) -> None:
        self._sites = list(sites)
        self._of: dict[str, list[str]] = {}
        self._foes: dict[int, set[str]] = {}
        for group in [[n] for n in self._sites] if start is None else start.members():
            self._of |= dict.fromkeys(group, group)
            self._foes[id(group)] = {x for n in group for x in foes.get(n, ())}

    def join(self, a: str, b: str) -> None:
        """Put the groups of two sites together, if they may be."""
        large, small = self._of[a], self._of[b]
        if large is small:
            return
        if len(small) > len(large):
            large, small = small, large
        if not self._foes[id(large)].isdisjoint(small):
            return
        large += small
        self._foes[id(large)] |= self._foes[id(small)]
        self._of |= dict.fromkeys(small, large)

    def members(self) -> list[list[str]]:
        """The groups, each and all in the order of the sites."""
        found = {id(self._of[n]): self._of[n] for n in self._sites}.values()
        place = {n: i for i, n in enumerate(self._sites)}
        return [sorted(g, key=place.__getitem__) for g in found]
