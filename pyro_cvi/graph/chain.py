"""When a Gaussian block is a chain with a border: time series, and small groups beside global effects.

Scalars that meet in a cell of a factor are neighbours. A few sites (the border) may meet all others; the
rest has to fall into small groups, or into a sequence of small nodes of which only consecutive ones are
neighbours. The posterior's precision then has the same pattern, for messages only join what a factor
joins, and it is exact: nothing is left out. A view is a pair of consecutive nodes with the border.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pyro_cvi.algebra.cumulate import cumulated_axes, in_sums
from pyro_cvi.algebra.expression import Axes, SiteRef, Stat, Term, align
from pyro_cvi.estimators import Structure
from pyro_cvi.families import GAUSSIAN, AbstractFamily
from pyro_cvi.gaussians import Layout
from pyro_cvi.gaussians.chain import Cumulation, Pattern
from pyro_cvi.graph.stacking import alike, stack, with_blocks_as_sites
from pyro_cvi.graph.symbolic import Factor, Latent
from pyro_cvi.graph.views import (
    Coupling,
    NoViewError,
    Root,
    Viewed,
    couplings,
    labels_of,
    rewritten,
    stat_of,
    touching,
    view_layout,
)

__all__ = ["Chain", "chain_of"]

_SMALLEST = 200
"""Fewest scalars of a block for which the form is looked for: smaller ones are dense at no cost."""
_BORDER = 300
"""Most scalars of the border."""
_GROUP = 16
"""Most scalars of a group that is a node by itself, ..."""
_NODE = 64
"""... and of a node of a sequence."""
_NARROW = 4
"""Scalars of a step that are few enough for no other order to be looked for."""
_SEARCHED = 20_000
"""Most scalars for which a sequence is searched breadth first; longer ones must follow an index."""
_READS = 1 << 27
"""Most indices of scalars that the cells of one factor read."""
_VIEWS = 1 << 26
"""Most scalars of all views' covariances."""
_PATIENCE = 8
"""Sites tried for the border in vain before the search ends."""
_GAIN = 4.0
"""How many times cheaper than a dense factorisation the form has to be."""


@dataclass(frozen=True, eq=False)
class Chain:
    """The pattern of a block's precision, and the names of the parts of its leaves."""

    kind: ClassVar[str] = "chain"
    pattern: Pattern
    parts: tuple[str, ...]
    reason: str


def chain_of(
    name: str,
    sites: Sequence[str],
    latents: Mapping[str, Latent],
    factors: Sequence[Factor],
    kept: bool = False,
    widest: int | None = None,
) -> tuple[Chain, Viewed] | None:
    """The block as a chain and its factors rewritten, or None where that is not possible, or no gain.

    `kept` says that the block has been one before, `widest` that it may not be dense: a sequence of any
    length is then a gain, if no two neighbours have more than so many scalars.
    """
    if not kept and widest is None and sum(math.prod(latents[s].shape) for s in sites) <= _SMALLEST:
        return None
    try:
        found = _Builder(name, sites, latents).build(factors, kept or widest is not None)
    except NoViewError:
        return None
    if found is not None and widest is not None:
        pattern = found[0].pattern
        return found if pattern.steps > 1 and pattern.width <= widest else None
    return found


@dataclass
class _Cells:
    """What the cells of a coupling read: scalars (cells, k), and the shape and names of the cells."""

    scalars: Tensor
    labels: Axes
    shape: tuple[int, ...]


class _Builder:
    def __init__(self, name: str, sites: Sequence[str], latents: Mapping[str, Latent]) -> None:
        self.name, self.sites, self.latents = name, list(sites), latents
        self.device = latents[sites[0]].value.device
        self.layout = Layout.dense({s: latents[s].shape for s in sites}, self.device)
        self.size = self.layout.width
        family: dict[str, AbstractFamily] = dict.fromkeys(sites, GAUSSIAN)
        block = dict.fromkeys(sites, name)
        self.structure = with_blocks_as_sites(Structure(family, block, {name: self.layout}))
        self.layout = self.structure.layout[name]
        self.names = frozenset(self.structure.block)

    def build(self, factors: Sequence[Factor], kept: bool) -> tuple[Chain, Viewed] | None:
        near = touching(factors, self.names)
        near, axes = _in_sums(near, self.names)
        self.cumulated = frozenset(axes)
        groups = self._turns(near)
        near = [stack(group, self.structure) for group in groups]
        read = [[self._cells(c) for c in couplings(f.expression, self.names)] for f in near]
        joined = [c.scalars.cpu().numpy() for each in read for c in each if c.scalars.shape[1] > 1]
        pattern = self._pattern(joined, kept)
        if pattern is None:
            return None
        if axes:
            pattern = replace(pattern, coordinates=self._coordinates(axes))
        part = f"{self.name}: neighbours"
        ref = SiteRef(part, (pattern.views, pattern.width), 0, "real")
        rewrite = {}
        for group, f, each in zip(groups, near, read, strict=True):
            roots = couplings(f.expression, self.names)
            answers = [
                [self._answer(r, cells, pattern, ref) for r in coupling]
                for coupling, cells in zip(roots, each, strict=True)
            ]
            new = rewritten(f.expression, self.names, iter(answers))
            own = frozenset(self.sites) & _sites_of(f)
            rewrite[group[0].name] = replace(f, expression=new, behind={**f.behind, part: own})
        layout = view_layout(part, pattern.views, pattern.width, self.device)
        absorbed = frozenset(f.name for group in groups for f in group[1:])
        chain = Chain(pattern, (part,), _reason(pattern))
        return chain, Viewed({part: layout}, rewrite, absorbed=absorbed)

    def _turns(self, factors: Sequence[Factor]) -> list[list[Factor]]:
        """The factors by turns of loops: what is read of thousands of them is read at once."""
        apart = [[f] for f in factors if f.enumerated]
        rest = [f for f in factors if not f.enumerated]
        return apart + alike(rest, {}, self.latents, self.structure)

    def _coordinates(self, axes: Mapping[str, int]) -> Cumulation:
        places = {s: (self.layout.flat(s), self.latents[s].shape, axis) for s, axis in axes.items()}
        return Cumulation.of(self.size, list(places.values()))

    # --- what is read ------------------------------------------------------------------------------

    def _cells(self, coupling: Coupling) -> _Cells:
        labels = labels_of(coupling)
        sizes: dict[int, int] = {}
        reads = []
        for root in coupling:
            for t in root.terms:
                stat = stat_of(t)
                axes = tuple(root.outer(a) if a in root.varying else a for a in stat.axes)
                inner = tuple(
                    a for a, b in zip(axes, stat.axes, strict=True) if b not in root.varying
                )
                flat = self.layout.flat(stat.site.name)[stat.index]
                sizes |= dict(zip(axes, stat.shape, strict=True))
                reads.append((flat, axes, inner))
        for label in labels:
            sizes.setdefault(label, 1)
        shape = tuple(sizes[a] for a in labels)
        total = math.prod(shape) * sum(math.prod(sizes[a] for a in inner) for *_, inner in reads)
        if total > _READS:
            raise NoViewError("cells that read too many scalars")
        columns = []
        for flat, axes, inner in reads:
            whole = align(flat, axes, (*labels, *inner))
            k = [sizes[a] for a in inner]
            columns.append(whole.expand((*shape, *k)).reshape(math.prod(shape), math.prod(k)))
        return _Cells(torch.cat(columns, 1), labels, shape)

    def _answer(self, root: Root, cells: _Cells, p: Pattern, ref: SiteRef) -> tuple[Term, ...]:
        """The root's terms, with each scalar read in the view that its cell looks at."""
        view = p.view_of(cells.scalars).reshape(cells.shape)
        terms = []
        for t in root.terms:
            stat = stat_of(t)
            varying = tuple(a for a, n in zip(cells.labels, cells.shape, strict=True) if n > 1)
            mine = tuple(root.inner(a) for a in varying)
            extra = tuple(a for a in stat.axes if a not in mine)
            axes = (*mine, *extra)
            where = view.reshape([n for n in cells.shape if n > 1])
            where = where.reshape((*where.shape, *[1] * len(extra)))
            flat = align(self.layout.flat(stat.site.name)[stat.index], stat.axes, axes)
            index = where * p.width + p.position_in(where, flat)
            new = Stat(
                ref,
                stat.statistic,
                index.expand((*where.shape[: len(mine)], *flat.shape[len(mine) :])),
                axes,
            )
            terms.append(Term(t.coefficient, tuple(new if o is stat else o for o in t.operands)))
        return tuple(terms)

    # --- the pattern -------------------------------------------------------------------------------

    def _pattern(self, joined: list[np.ndarray], kept: bool) -> Pattern | None:
        """The cheapest pattern over the borders made of the smallest sites, if it is cheap enough."""
        order = [s for s in self.sites if s not in self.cumulated]
        order = sorted(order, key=lambda s: math.prod(self.latents[s].shape))
        best: Pattern | None = None
        since = 0
        is_border = np.zeros(self.size, dtype=bool)
        for i in range(len(order) + bool(self.cumulated)):
            if i > 0:
                is_border[self.layout.flat(order[i - 1]).cpu().numpy()] = True
            if is_border.sum() > _BORDER or is_border.all():
                break
            found = self._with_border(joined, is_border)
            if found is not None and (best is None or found.cost < best.cost):
                best, since = found, 0
            else:
                since += 1
            if since > (_PATIENCE if best is None else 1):
                break
        if best is None or (not kept and best.cost * _GAIN > float(self.size) ** 3):
            return None
        return best if best.views * best.width**2 <= _VIEWS else None

    def _with_border(self, joined: list[np.ndarray], is_border: np.ndarray) -> Pattern | None:
        free = ~is_border
        cells = [_without(m, is_border) for m in joined]
        group = _components(self.size, cells)
        names, group = np.unique(group[free], return_inverse=True)
        sizes = np.bincount(group)
        if sizes.max() <= _GROUP:
            return self._made(is_border, group, np.zeros_like(group), len(names))
        time = self._times(cells, free)
        if time is None:
            return None
        time = time[free]
        first = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(first, group, time)
        time = time - first[group]
        last = np.zeros(len(names), dtype=np.int64)
        np.maximum.at(last, group, time)
        if (
            len(names) * (last.max() + 1) > 2 * (last + 1).sum()
        ):  # of very different lengths: one by one
            start = np.concatenate([[0], np.cumsum(last + 1)[:-1]])
            time, group = time + start[group], np.zeros_like(group)
        return self._made(is_border, group, time, int(group.max()) + 1)

    def _made(
        self, is_border: np.ndarray, group: np.ndarray, time: np.ndarray, count: int
    ) -> Pattern | None:
        steps = int(time.max()) + 1
        node = group * steps + time
        order = np.argsort(node, kind="stable")
        sizes = np.bincount(node, minlength=count * steps)
        width = int(sizes.max())
        if width > _NODE:
            return None
        begin = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        place = np.empty(len(node), dtype=np.int64)
        place[order] = np.arange(len(node)) - begin[node[order]]
        where = np.empty(self.size, dtype=np.int64)
        where[~is_border] = node * width + place
        where[is_border] = -1 - np.arange(int(is_border.sum()))
        return Pattern(
            count, steps, width, int(is_border.sum()), torch.as_tensor(where, device=self.device)
        )

    def _times(self, cells: list[np.ndarray], free: np.ndarray) -> np.ndarray | None:
        """A time for each scalar such that cells reach over one step at most."""
        found = _grouped(self._by_index(), cells, free)
        if (found is None or found[0] > _NARROW) and free.sum() <= _SEARCHED:
            searched = _grouped(_levels(self.size, cells), cells, free)
            if found is None or (searched is not None and searched[0] < found[0]):
                found = searched
        return None if found is None else found[1]

    def _by_index(self) -> np.ndarray:
        """The coordinate along each site's longest axis."""
        time = np.zeros(self.size, dtype=np.int64)
        for s in self.sites:
            shape = self.latents[s].shape
            if shape and max(shape) > 1:
                axis = int(np.argmax(shape))
                at = np.arange(shape[axis]).reshape(
                    [-1 if i == axis else 1 for i in range(len(shape))]
                )
                time[self.layout.flat(s).cpu().numpy()] = np.broadcast_to(at, shape).reshape(-1)
        return time


def _in_sums(
    factors: Sequence[Factor], names: frozenset[str]
) -> tuple[list[Factor], dict[str, int]]:
    """The factors in the coordinates of cumulative sums, for sites that are summed along one axis."""
    axes: dict[str, set[int]] = {}
    for f in factors:
        for site, found in cumulated_axes(f.expression).items():
            axes.setdefault(site, set()).update(found)
    if any(len(found) > 1 for s, found in axes.items() if s in names):
        raise NoViewError("cumulative sums along two axes")
    one = {s: next(iter(found)) for s, found in axes.items() if s in names}
    if not one:
        return list(factors), {}
    return [replace(f, expression=in_sums(f.expression, one)) for f in factors], one


def _sites_of(f: Factor) -> frozenset[str]:
    return frozenset().union(*(m.expression.sites for m in f.members or (f,)))


def _reason(p: Pattern) -> str:
    if p.steps == 1:
        what = f"{p.count:,} groups of {p.node}"
    else:
        what = f"{p.steps:,} steps of {p.node}" + (f", {p.count:,} times" if p.count > 1 else "")
    what += f", and {p.border} that all share" if p.border else ""
    return what + ("; in cumulative sums" if p.coordinates else "")


def _without(scalars: np.ndarray, is_border: np.ndarray) -> np.ndarray:
    """The cells' scalars, with a free one of the same cell in the place of those of the border."""
    at = is_border[scalars]
    if not at.any():
        return scalars
    some = scalars[~at.all(1)]
    at = is_border[some]
    first = some[np.arange(len(some)), np.argmin(at, 1)]
    return np.where(at, first[:, None], some)


def _components(size: int, cells: list[np.ndarray]) -> np.ndarray:
    """The least member of each scalar's connected component."""
    label = np.arange(size)
    while True:
        before = label.copy()
        for m in cells:
            least = label[m].min(1)
            np.minimum.at(label, m.reshape(-1), np.repeat(least, m.shape[1]))
        label = label[label]
        if np.array_equal(before, label):
            return label


def _grouped(
    time: np.ndarray, cells: list[np.ndarray], free: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """Times put together so that cells reach over one step at most, and the most scalars of a step."""
    reach = max((_reach(m, time) for m in cells), default=0)
    if reach > _NODE:
        return None
    grouped = time // max(reach, 1)
    return int(np.unique(grouped[free], return_counts=True)[1].max()), grouped


def _reach(scalars: np.ndarray, time: np.ndarray) -> int:
    if not scalars.size:
        return 0
    t = time[scalars]
    return int((t.max(1) - t.min(1)).max())


def _levels(size: int, cells: list[np.ndarray]) -> np.ndarray:
    """Distances from an end of each component: only equal or consecutive ones are neighbours."""
    members = (
        np.concatenate([m.reshape(-1) for m in cells]) if cells else np.zeros(0, dtype=np.int64)
    )
    counts = np.concatenate([np.full(len(m), m.shape[1]) for m in cells]) if cells else members
    start = np.concatenate([[0], np.cumsum(counts)])
    cell = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(members, kind="stable")
    owner = np.concatenate([[0], np.cumsum(np.bincount(members, minlength=size))])
    by_scalar = cell[order]
    label = _components(size, cells)
    roots = np.flatnonzero(label == np.arange(size))

    def search(sources: np.ndarray) -> np.ndarray:
        level = np.full(size, -1)
        seen = np.zeros(len(counts), dtype=bool)
        front, depth = sources, 0
        while len(front):
            level[front] = depth
            near = np.unique(_ranges(by_scalar, owner, front))
            near = near[~seen[near]]
            seen[near] = True
            front = np.unique(_ranges(members, start, near))
            front = front[level[front] < 0]
            depth += 1
        return level

    first = search(roots)
    far = np.lexsort((-first, label))
    ends = far[np.searchsorted(label[far], roots)]
    return search(ends)


def _ranges(values: np.ndarray, start: np.ndarray, which: np.ndarray) -> np.ndarray:
    """values[start[i] : start[i + 1]] for all i in `which`, one after the other."""
    lengths = start[which + 1] - start[which]
    if not lengths.sum():
        return values[:0]
    offset = np.repeat(start[which] - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return values[offset + np.arange(lengths.sum())]
