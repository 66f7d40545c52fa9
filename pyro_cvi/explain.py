"""The report: for every factor and every site, how the message was found and why."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyro_cvi.graph.plan import Plan
from pyro_cvi.graph.prepared import prepare
from pyro_cvi.updates import Step

__all__ = ["BlockEntry", "Edge", "Report", "explain", "make_report"]


_MANY = 40
"""A printed report of more lines puts statements of a loop together."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Edge:
    """One (factor, latent site): `how` is "exact", "quadrature" or "sampled"."""

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


@dataclass(frozen=True, repr=False)
class Report:
    """What CVI does in a model. Print it; `edges` and `blocks` hold the same as data."""

    edges: tuple[Edge, ...]
    blocks: tuple[BlockEntry, ...]

    def __str__(self) -> str:
        counts = {
            h: sum(e.how == h for e in self.edges) for h in ("exact", "quadrature", "sampled")
        }
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
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = {"exact": "#1a7f37", "quadrature": "#9a6700", "sampled": "#cf222e"}
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
        return f"<table>{edge_head}{cells}</table><table>{block_head}{blocks}</table>"

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
    return Report(edges, blocks)


def explain(
    model: Callable[..., Any], *args: Any, max_dense_dim: int = 1000, **kwargs: Any
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
    return make_report(prepare(model, args, kwargs, max_dense_dim).plan)
