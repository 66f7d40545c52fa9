"""The report: for every factor and every site, how the message was found and why."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyro_cvi.estimators import KINDS
from pyro_cvi.graph.plan import Plan
from pyro_cvi.graph.pointed import MOST_SCALARS
from pyro_cvi.graph.prepared import prepare
from pyro_cvi.hints import hints
from pyro_cvi.modes import public_call
from pyro_cvi.updates import Step

__all__ = ["BlockEntry", "Edge", "Product", "Report", "explain", "make_report"]


_MANY = 40
"""A printed report of more lines puts statements of a loop together."""
_INTEGRATED = 6
"""Most scalars that can be integrated over."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Edge:
    """One (factor, latent site): `how` is "exact", "quadrature", "points" or "sampled"."""

    factor: str
    site: str
    how: str
    reason: str


@dataclass(frozen=True)
class BlockEntry:
    """One posterior block: its sites, structure, number of scalars, and what its steps met."""

    sites: tuple[str, ...]
    structure: str
    size: int
    reason: str
    family: str
    step: Step = field(default_factory=Step)


@dataclass(frozen=True)
class Product:
    """A coefficient of a few scalars, and the sites that it multiplies, which are in other blocks.

    What ties them is not in the posterior, and the coefficient's intervals are too narrow for it.
    `integrate` over the coefficient mends that.
    """

    site: str
    size: int
    others: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Report:
    """What CVI does in a model. Print it; `edges`, `blocks`, `hints`, `products` hold the same as data.

    Hints and products name sites whose intervals this kind of posterior makes too narrow.
    """

    edges: tuple[Edge, ...]
    blocks: tuple[BlockEntry, ...]
    hints: tuple[str, ...] = ()
    products: tuple[Product, ...] = ()

    def __str__(self) -> str:
        counts = {h: sum(e.how == h for e in self.edges) for h in KINDS}
        head = ", ".join(f"{n} {h}" for h, n in counts.items() if n)
        rows = [("factor", "site", "how", "why")]
        rows += self._rows()
        lines = [f"messages: {head}", "", *_table(rows), "", "blocks:"]
        table = [("sites", "family", "structure", "scalars", "why")]
        table += [
            (_short(b.sites), b.family, b.structure, f"{b.size:,}", b.reason) for b in self.blocks
        ]
        lines += _table(table)
        for b in self.blocks:
            if b.step.improper:
                lines.append(
                    f"{_short(b.sites)}: {b.step.improper} improper targets, {b.step.shortened} "
                    f"steps shortened, {b.step.retracted} retracted"
                )
        if self.hints or self.products:
            lines += ["", *self.hints, *self._advice()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = dict(zip(KINDS, ("#1a7f37", "#9a6700", "#bc4c00", "#cf222e"), strict=True))
        cells = "".join(
            f"<tr><td>{html.escape(factor)}</td><td>{html.escape(site)}</td>"
            f"<td style='color:{colour[how]}'>{how}</td><td>{html.escape(why)}</td></tr>"
            for factor, site, how, why in self._rows()
        )
        blocks = "".join(
            f"<tr><td>{html.escape(_short(b.sites))}</td><td>{b.family}</td>"
            f"<td>{b.structure}, {b.size:,} scalars</td><td>{html.escape(b.reason)}</td></tr>"
            for b in self.blocks
        )
        edge_head = "<tr><th>factor</th><th>site</th><th>message</th><th>why</th></tr>"
        block_head = "<tr><th>block</th><th>family</th><th>structure</th><th>why</th></tr>"
        advice = "".join(f"<p>{html.escape(line)}</p>" for line in (*self.hints, *self._advice()))
        return f"<table>{edge_head}{cells}</table><table>{block_head}{blocks}</table>{advice}"

    def _advice(self) -> list[str]:
        lines = [
            f"'{p.site}' multiplies {_short(p.others)}, which {_are(p.others)} in another block"
            for p in self.products
        ]
        sites: list[str] = []
        size = 0
        for p in self.products:
            if size + p.size <= _INTEGRATED:
                sites.append(p.site)
                size += p.size
        if sites:
            lines.append(
                "what ties them is not in the posterior, and the coefficients' intervals may be much "
                f"too narrow: integrate(cvi, {sites}, ...) mends that"
            )
        return lines

    def _rows(self) -> list[tuple[str, str, str, str]]:
        if len(self.edges) > _MANY:
            return _merged(self.edges)
        return [(e.factor, e.site, e.how, e.reason) for e in self.edges]


def _merged(edges: Sequence[Edge]) -> list[tuple[str, str, str, str]]:
    """One row for names that differ in their numbers only (`y_0`, `y_1`, ...) and are treated alike."""
    groups: dict[tuple[str, ...], list[Edge]] = {}
    for e in edges:
        key = (_NUMBER.sub("#", e.factor), _NUMBER.sub("#", e.site), e.how, e.reason)
        groups.setdefault(key, []).append(e)
    return [
        (_span([e.factor for e in g]), _span([e.site for e in g]), g[0].how, g[0].reason)
        for g in groups.values()
    ]


def _span(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    if len(different) < 3:
        return ", ".join(different)
    return f"{different[0]} ... {different[-1]} ({len(different)})"


def _short(sites: tuple[str, ...]) -> str:
    return ", ".join(sites[:4]) + (f", ... ({len(sites)})" if len(sites) > 4 else "")


def _are(sites: tuple[str, ...]) -> str:
    return "is" if len(sites) == 1 else "are"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]).rstrip()
        for r in rows
    ]


def make_report(plan: Plan, steps: Mapping[str, Step] | None = None) -> Report:
    """The report of a plan; `steps` are the counts of a run by block name."""
    edges = tuple(
        Edge(factor, site, how.kind, how.reason)
        for f in plan.factors
        for factor, site, how in f.edges
    )
    blocks = tuple(
        BlockEntry(
            b.sites, b.structure, b.size, b.reason, b.family.name, (steps or {}).get(b.name, Step())
        )
        for b in plan.blocks
    )
    return Report(edges, blocks, hints(plan), _products(plan))


def _products(plan: Plan) -> tuple[Product, ...]:
    """The sites that multiply others, on the side of fewer scalars of each pair of blocks."""
    between: dict[tuple[str, str], list[str]] = {}  # the sites of one block that multiply the other
    for site in (s for s in plan.latents if s in plan.apart):
        own = plan.block_of(site)
        for other in dict.fromkeys(plan.block_of(s).name for s in plan.apart[site]):
            if other != own.name:
                between.setdefault((own.name, other), []).append(site)
    size = {s: math.prod(latent.shape) for s, latent in plan.latents.items()}
    total = {pair: sum(size[s] for s in sites) for pair, sites in between.items()}
    fewer = [(a, b) for a, b in between if total[a, b] <= min(total[b, a], _INTEGRATED)]
    few = {s for pair in fewer for s in between[pair]}
    found = []
    for site in (s for s in plan.latents if s in few):
        own = plan.block_of(site)
        others = [s for s in plan.latents if s in plan.apart[site] and plan.block_of(s) is not own]
        found.append(Product(site, size[site], tuple(others)))
    return tuple(found)


@public_call
def explain(
    model: Callable[..., Any],
    *args: Any,
    max_dense_dim: int = 1000,
    max_joint_dim: int = MOST_SCALARS,
    **kwargs: Any,
) -> Report:
    """How CVI would treat a model: one entry per (factor, latent site). Fits nothing.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import explain
        >>> def model(x):
        ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("x", dist.Poisson(rate), obs=x)
        >>> [(e.factor, e.how) for e in explain(model, torch.tensor([1.0, 3.0])).edges]
        [('rate', 'exact'), ('x', 'exact')]
    """
    prepared = prepare(model, args, kwargs, max_dense_dim, max_joint_dim=max_joint_dim)
    return make_report(prepared.plan)
