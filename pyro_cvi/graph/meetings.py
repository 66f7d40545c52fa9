"""What the cells of factors read at once: the scalars that meet there, and how much sites meet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pyro_cvi.algebra.expression import (
    Expression,
    Group,
    Link,
    Opaque,
    Operand,
    SiteRef,
    Stat,
    Statistic,
    Term,
    fresh_label,
)
from pyro_cvi.graph.likeness import Turns
from pyro_cvi.graph.symbolic import Factor

__all__ = ["Coupling", "Meetings", "couplings", "opaque_sites", "operands_of"]

_MANY = 40
"""Sites of one cell beyond which only neighbours in its sum are counted as pairs."""

Coupling = list[Stat]


def couplings(factors: Sequence[Factor], refs: Mapping[str, SiteRef]) -> list[Coupling]:
    """What meets in the cells of the factors, of these sites."""
    sums = [c for f in factors for c in _additive_sums(_with_all_cells(f.expression), refs)]
    return [[s for s in c if s.site.name in refs] for c in sums]


def opaque_sites(turns: Iterable[Turns]) -> list[frozenset[str]]:
    """The sites of each part of the factors of which nothing else is known."""
    hidden = [t.first.expression for t in turns if not t.has_form]
    return [o.sites for e in hidden for _, o in operands_of(e) if isinstance(o, Opaque)]


def operands_of(e: Expression) -> Iterator[tuple[Term, Operand]]:
    """All operands, however deep, each with its term."""
    for t in e.terms:
        for o in t.operands:
            yield t, o
            if isinstance(o, Group):
                yield from operands_of(o.expression)
            elif isinstance(o, Link):
                for a in o.arguments:
                    yield from operands_of(a)


def _with_all_cells(e: Expression) -> Expression:
    """The expression without the sums of its terms: one over an event's elements joins nothing."""
    terms = []
    for t in e.terms:
        summed = sorted(t.contracted)
        terms.append(t.relabelled({a: -1 - e.ndim - i for i, a in enumerate(summed)}))
    return Expression(e.shape, e.constant, tuple(terms))


def _additive_sums(e: Expression, refs: Mapping[str, SiteRef]) -> Iterator[Coupling]:
    """Statistics that meet in one cell of a group, of a link, or of a product inside a term.

    The sum at the top of a log density does not couple its terms; what is inside a square does.
    """
    for t in e.terms:
        for o in t.operands:
            if isinstance(o, Group):
                yield from _additive_sums(o.expression, refs)
            elif isinstance(o, Link):
                for a in o.arguments:
                    yield from _additive_sums(a, refs)
        direct = sum(isinstance(o, Stat) for o in t.operands)
        if any(isinstance(o, Group | Link | Opaque) for o in t.operands) or direct > 1:
            yield _stats(t, refs)


def _stats(t: Term, refs: Mapping[str, SiteRef]) -> Coupling:
    """The statistics of a term, in its axes; those of a square once."""
    distinct = {id(o): o for o in t.operands}.values()
    found: Coupling = [o for o in distinct if isinstance(o, Stat)]
    return found + [s for o in distinct for s in _inner_stats(o, refs)]


def _inner_stats(o: Operand, refs: Mapping[str, SiteRef]) -> Coupling:
    """The statistics inside a group or link, relabelled into the surrounding term's axes.

    Every cell of an opaque part may read every scalar of its sites.
    """
    if isinstance(o, Opaque):
        return [_whole(refs[n]) for n in sorted(o.sites) if n in refs]
    if isinstance(o, Group):
        parts, shape = [o.expression], o.axes
    elif isinstance(o, Link):
        parts, shape = list(o.arguments), o.axes
    else:
        return []
    found: Coupling = []
    for part in parts:
        offset = len(shape) - part.ndim
        mapping = {i - part.ndim: shape[offset + i] for i in range(part.ndim)}
        for t in part.terms:
            found += _stats(t.relabelled(mapping), refs)
    return found


def _whole(ref: SiteRef) -> Stat:
    return Stat(
        ref, Statistic(), torch.arange(math.prod(ref.shape), device="cpu"), (fresh_label(),)
    )


# --- how much sites meet ---------------------------------------------------------------------------


@dataclass
class _Pair:
    """Cells in which scalars of two sites meet, and how many different pairs of scalars do so."""

    cells: float = 0.0
    distinct: float = 0.0


@dataclass
class Meetings:
    """How often the scalars of sites are read, and how often those of two sites meet.

    Were every factor a sum of squares with coefficients of size one, scalars i and j that are read n_i
    and n_j times and meet n_ij times would have the partial correlation n_ij / sqrt(n_i n_j). The
    information between two sites is half the sum of its squares, whether they are vectors or so many
    single sites.
    """

    size: dict[str, int]
    reads: dict[str, float] = field(default_factory=dict)
    pairs: dict[tuple[str, str], _Pair] = field(default_factory=dict)

    @staticmethod
    def of(turns: Iterable[Turns], refs: Mapping[str, SiteRef]) -> Meetings:
        """The meetings of these sites."""
        result = Meetings({n: math.prod(r.shape) for n, r in refs.items()})
        for t in turns:
            result._add(t, refs)
        return result

    def loss(self, a: str, b: str) -> float:
        """sum_ij n_ij^2 / (n_i n_j): what is lost where two sites do not share a block."""
        met = self.pairs[a, b]
        each = self.reads[a] / self.size[a] * self.reads[b] / self.size[b]
        distinct = min(met.distinct, self.size[a] * self.size[b])
        return met.cells**2 / distinct / each

    def _add(self, turns: Turns, refs: Mapping[str, SiteRef]) -> None:
        e = turns.first.expression
        reads: dict[str, float] = {}
        pairs: dict[tuple[str, str], _Pair] = {}
        for t in _with_all_cells(e).terms:
            # A term of the log density counts as often as the factor has cells, though it may be
            # constant along some of them; another one of the same sites is the same meeting.
            found = [s for s in _stats(t, refs) if s.index.numel()]
            own, met = _counted(found, math.prod(e.shape), e.ndim)
            reads |= {n: max(k, reads.get(n, 0.0)) for n, k in own.items()}
            pairs |= {k: max(p, pairs.get(k, p), key=lambda x: x.cells) for k, p in met.items()}
        at = {s: i for i, s in enumerate(turns.names[0])}
        for names in turns.names:
            for n, k in reads.items():
                site = names[at[n]]
                self.reads[site] = self.reads.get(site, 0.0) + k
            for (a, b), p in pairs.items():
                a, b = sorted((names[at[a]], names[at[b]]))
                if a in refs and b in refs:
                    whole = self.pairs.setdefault((a, b), _Pair())
                    whole.cells += p.cells
                    whole.distinct = max(whole.distinct, p.distinct)


def _counted(
    stats: Coupling, cells: int, ndim: int
) -> tuple[dict[str, float], dict[tuple[str, str], _Pair]]:
    """How often sites are read in the cells of a term, and how often they meet."""
    stats = list({(s.site.name, s.axes, id(s.index)): s for s in stats}.values())
    sizes = {a: n for s in stats for a, n in zip(s.axes, s.shape, strict=True)}
    cells *= math.prod(n for a, n in sizes.items() if a < -ndim)
    inner = [math.prod(sizes[a] for a in s.axes if a > 0) for s in stats]
    reads: dict[str, float] = {}
    for s, k in zip(stats, inner, strict=True):
        reads[s.site.name] = reads.get(s.site.name, 0.0) + cells * k
    pairs: dict[tuple[str, str], _Pair] = {}
    many = len(reads) > _MANY
    numbered = list(enumerate(stats))
    every = itertools.pairwise(numbered) if many else itertools.combinations(numbered, 2)
    for (i, p), (j, q) in every:
        a, b = sorted((p.site.name, q.site.name))
        if a == b:
            continue
        met = pairs.setdefault((a, b), _Pair())
        met.cells += cells * inner[i] * inner[j]
        met.distinct += min(
            math.prod(sizes[x] for x in {*p.axes, *q.axes}),
            math.prod(p.site.shape) * math.prod(q.site.shape),
        )
    return reads, pairs
