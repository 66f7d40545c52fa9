"""Which sites play one role: the states of a chain, the effects of a loop.

Statements of a loop have factors of one form, and what stands at one place of it, in one turn and the
next, is one thing to the reader of the model: `h` in Normal(phi * h, s), whichever its number. A loop of
scalar sites should be treated as the vector that it could be.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyro_cvi.algebra.expression import Stat
from pyro_cvi.graph.stacking import form
from pyro_cvi.graph.symbolic import Factor

__all__ = ["Foes", "Turns", "classes", "places", "turns_of", "with_foes"]

Foes = Mapping[str, set[str]]
"""For each site those that may not share a block with it."""


def with_foes(some: Foes, others: Foes) -> dict[str, set[str]]:
    """The foes that a site has by either."""
    return {s: {*some.get(s, ()), *others.get(s, ())} for s in {**some, **others}}


@dataclass(frozen=True, eq=False)
class Turns:
    """Factors of one form, as of the turns of a loop: the first of them, and the sites of each.

    A factor that has no form, for a part of it is opaque, is by itself; its `names` are in any order.
    """

    first: Factor
    names: list[tuple[str, ...]]
    has_form: bool

    def each(self, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Pairs of the first factor's sites, and of those in their places in the others."""
        at = {s: i for i, s in enumerate(self.names[0])}
        places = [(at[a], at[b]) for a, b in pairs]
        return ((names[i], names[j]) for names in self.names for i, j in places)


def turns_of(factors: Iterable[Factor]) -> list[Turns]:
    """The factors by their form."""
    found: dict[Hashable, Turns] = {}
    for i, f in enumerate(factors):
        kind, names = places(f)
        key = i if kind is None else (kind, f.observed, f.plates)
        known = found.setdefault(key, Turns(f, [], kind is not None))
        known.names.append(names)
    return list(found.values())


def places(f: Factor) -> tuple[Hashable, tuple[str, ...]]:
    """The form of a factor up to the names of its sites, and these in their order."""
    order: dict[str, int] = {}

    def name(o: Stat) -> Hashable:
        return order.setdefault(o.site.name, len(order)), o.site.shape, o.site.kind

    kind = None if f.forced else form(f.expression, name)
    if kind is None:
        return None, tuple(sorted(f.expression.sites))
    return kind, tuple(order)


def classes(sites: Iterable[str], turns: Iterable[Turns], foes: Foes) -> dict[str, str]:
    """The role of each site, named by the first site that has it; foes have no role in common.

    Two factors of one form are turns of one loop if they share a site. One that stands at two places,
    the state of the last turn and of the next, says so best; of what is alike only because it hangs on
    the same site, as two walks of one scale do, foes may be part.
    """
    several = [t.names for t in turns if t.has_form and len(t.names) > 1 and len(t.names[0]) > 1]
    role = _united({s: s for s in sites}, _sharing(several, chained=True), foes)
    return _united(role, _sharing(several, chained=False), foes)


def _sharing(turns: Sequence[list[tuple[str, ...]]], chained: bool) -> Iterator[tuple[str, str]]:
    """Sites at one place of two factors that have a site in common; if `chained`, at unlike places."""
    for members in turns:
        seen: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        for names in members:
            for i, s in enumerate(names):
                seen.setdefault(s, []).append((i, names))
        for found in seen.values():
            if len({i for i, _ in found}) > 1 or not chained:
                for (_, a), (_, b) in itertools.pairwise(found):
                    yield from ((x, y) for x, y in zip(a, b, strict=True) if x != y)


def _united(role: dict[str, str], same: Iterable[tuple[str, str]], foes: Foes) -> dict[str, str]:
    """Roles put together where they are the same, but for those that foes would then share."""
    parent = {r: r for r in role.values()}

    def find(r: str) -> str:
        while parent[r] != r:
            parent[r] = r = parent[parent[r]]
        return r

    for a, b in same:
        if a in role and b in role:
            parent[find(role[a])] = find(role[b])
    whole = {s: find(r) for s, r in role.items()}
    broken = {whole[s] for s in role if any(whole.get(t) == whole[s] for t in foes.get(s, ()))}
    joined = {s: role[s] if whole[s] in broken else whole[s] for s in role}
    first: dict[str, str] = {}
    return {s: first.setdefault(r, s) for s, r in joined.items()}
