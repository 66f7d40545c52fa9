"""The report as a graph: factors, latent sites in their blocks, and an arrow for each message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyro_cvi.errors import CVIError
from pyro_cvi.explain import BlockEntry, Edge, Report
from pyro_cvi.infer import CVI
from pyro_cvi.plots.palette import COLOURS, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["report"]

_HOW: dict[str, tuple[str, Any]] = {
    "exact": (COLOURS[0], "-"),
    "quadrature": (COLOURS[4], (0, (5, 1.5))),
    "sampled": (COLOURS[1], (0, (1.2, 1.2))),
}
"""Colour and dashes of an arrow, so that a print in grey can be read too."""
_MERGED = 40
"""A graph of more edges puts names together that differ in their numbers only."""


def report(report: Report | CVI, ax: Axes | None = None) -> Axes:
    """The report as a graph: an arrow for each message, from its factor to its latent site.

    Latent sites stand in the middle, those of one block in one box. A site's own prior is the factor to
    the left of it; factors of data stand on the right. The colour and dashes of an arrow say how the
    message is found: exactly, by quadrature or by sampling. Of more than 40 messages, those of names
    that differ in numbers only (`y_0`, `y_1`, ...) are drawn as one.

    Arguments:
        report: that of `explain(model, *args)`, or a `CVI` that has made a step.
        ax: where to draw; it should be about 0.45 inches high for each site.

    Raises:
        CVIError: something else than a report, or a `CVI` before its first step.
        ImportError: matplotlib is not installed.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import explain
        >>> from pyro_cvi.plots import report
        >>> def model(x):
        ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("x", dist.Poisson(rate), obs=x)
        >>> ax = report(explain(model, torch.tensor([1.0, 3.0])))
        >>> ax.get_title()
        '2 messages: 2 exact'
    """
    if isinstance(report, CVI):
        report = report.explain()
    if not isinstance(report, Report):
        raise CVIError(
            "plots.report",
            f"a {type(report).__name__}",
            "a Report or a CVI",
            "plots.report(cvi), or plots.report(explain(model, *args))",
        )
    graph = _arranged(report.edges, report.blocks)
    plt = pyplot()
    if ax is None:
        height = max(2.2, 0.42 * graph.height + 1.0)
        _, ax = plt.subplots(figsize=(8, height), layout="constrained")
    _draw(ax, graph)
    counts = {how: sum(e.how == how for e in report.edges) for how in _HOW}
    found = ", ".join(f"{n} {how}" for how, n in counts.items() if n) or "none"
    ax.set_title(f"{len(report.edges)} messages: {found}", fontsize="medium", pad=12)
    return ax


@dataclass(frozen=True)
class _Graph:
    """Heights of the nodes (y grows downwards), boxes of blocks, and arrows (factor, site, how)."""

    sites: dict[str, float]
    priors: dict[str, float]
    data: dict[str, float]
    boxes: list[tuple[float, float, str]]
    edges: list[tuple[str, str, str]]
    height: float


def _arranged(edges: Sequence[Edge], blocks: Sequence[BlockEntry]) -> _Graph:
    """Sites in the order of their blocks, priors beside their sites, data near what they see."""
    latent = {s for b in blocks for s in b.sites} | {e.site for e in edges}
    name = _labels([*latent, *(e.factor for e in edges)], len(edges) > _MERGED)
    sites: dict[str, float] = {}
    boxes: list[tuple[float, float, str]] = []
    seen: dict[tuple[str, ...], list[BlockEntry]] = {}
    for b in blocks:
        seen.setdefault(tuple(dict.fromkeys(name[s] for s in b.sites)), []).append(b)
    y = 0.0
    for group, alike in seen.items():
        new = [s for s in group if s not in sites]
        if not new:
            continue
        top = y
        for s in new:
            sites[s] = y + 0.5
            y += 1.0
        boxes.append((top, y, _caption(alike)))
        y += 0.75
    for e in edges:
        if name[e.site] not in sites:  # a site without a block of its own
            sites[name[e.site]] = y + 0.5
            y += 1.0
    arrows = list(dict.fromkeys((name[e.factor], name[e.site], e.how) for e in edges))
    factors = list(dict.fromkeys(f for f, _, _ in arrows))
    own = {name[s] for s in latent}
    priors = {f: sites[f] for f in factors if f in own}
    wanted = {f: _mean([sites[s] for g, s, _ in arrows if g == f]) for f in factors if f not in own}
    return _Graph(sites, priors, _spread(wanted, y), boxes, arrows, max(y, len(wanted)))


def _labels(names: Sequence[str], merged: bool) -> dict[str, str]:
    if not merged:
        return {n: n for n in names}
    groups: dict[str, list[str]] = {}
    for n in dict.fromkeys(names):
        groups.setdefault(re.sub(r"\d+", "#", n), []).append(n)
    result: dict[str, str] = {}
    for pattern, group in groups.items():
        label = f"{pattern} ({len(group)})" if len(group) > 2 else None
        result |= {n: label or n for n in group}
    return result


def _caption(alike: Sequence[BlockEntry]) -> str:
    b = alike[0]
    kind = b.structure if b.structure == b.family else f"{b.family}, {b.structure}"
    size = sum(x.size for x in alike)
    many = f"{len(alike)} blocks: " if len(alike) > 1 else ""
    return f"{many}{kind}, {size:,} scalar{'s' if size != 1 else ''}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(wanted: Mapping[str, float], height: float) -> dict[str, float]:
    """As near to the wanted heights as a distance of one between neighbours allows."""
    order = sorted(wanted, key=lambda f: wanted[f])
    # Pool adjacent violators: groups of touching nodes sit at the mean of what they want.
    pools: list[list[str]] = []
    for f in order:
        pools.append([f])
        while len(pools) > 1 and _top(pools[-1], wanted) < _top(pools[-2], wanted) + len(pools[-2]):
            last = pools.pop()
            pools[-1] += last
    result = {f: _top(pool, wanted) + i for pool in pools for i, f in enumerate(pool)}
    if not result:
        return {}
    low = min(result.values())
    shift = max(0.0, 0.5 - low) if len(result) <= height else 0.0
    return {f: v + shift for f, v in result.items()}


def _top(pool: Sequence[str], wanted: Mapping[str, float]) -> float:
    return _mean([wanted[f] - i for i, f in enumerate(pool)])


def _draw(ax: Any, graph: _Graph) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    left, middle, right = 0.0, 4.0, 8.0
    half = 1.25  # of a site's oval
    for top, bottom, caption in graph.boxes:
        ax.add_patch(
            FancyBboxPatch(
                (middle - half - 0.2, top + 0.04), 2 * half + 0.4, bottom - top - 0.08,
                boxstyle="round,pad=0,rounding_size=0.18", facecolor="0.94", edgecolor="0.75", zorder=0,
            )
        )  # fmt: skip
        ax.text(
            middle,
            bottom + 0.28,
            caption,
            ha="center",
            va="center",
            fontsize="x-small",
            color="0.35",
        )
    used = set()
    for factor, site, how in graph.edges:
        used.add(how)
        from_left = factor in graph.priors
        start = (
            (left + 0.14, graph.priors[factor]) if from_left else (right - 0.14, graph.data[factor])
        )
        end = (middle - half if from_left else middle + half, graph.sites[site])
        colour, dashes = _HOW[how]
        ax.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linestyle=dashes,
                linewidth=1.4, shrinkA=0, shrinkB=1, zorder=1,
            )
        )  # fmt: skip
    for place, factors in ((left, graph.priors), (right, graph.data)):
        side = -1 if place == left else 1
        ax.plot(
            [place] * len(factors),
            list(factors.values()),
            "s",
            color="0.25",
            markersize=6,
            zorder=3,
        )
        for factor, y in factors.items():
            ax.text(
                place + side * 0.25, y, _short(factor), ha="right" if side < 0 else "left",
                va="center", fontsize="small",
            )  # fmt: skip
    for site, y in graph.sites.items():
        ax.add_patch(
            FancyBboxPatch(
                (middle - half, y - 0.34), 2 * half, 0.68, boxstyle="round,pad=0,rounding_size=0.34",
                facecolor="white", edgecolor="0.25", zorder=2,
            )
        )  # fmt: skip
        ax.text(middle, y, _short(site, 16), ha="center", va="center", fontsize="small", zorder=4)
    heights = [
        *graph.sites.values(),
        *graph.data.values(),
        *(b + 0.5 for _, b, _ in graph.boxes),
    ] or [0.0]
    ax.set(xlim=(left - 2.6, right + 2.6), ylim=(max(heights) + 0.3, min(heights) - 0.9))
    ax.axis("off")
    for x, head in ((left, "priors"), (middle, "latent sites, by block"), (right, "data")):
        if x != right or graph.data:
            ax.text(
                x,
                min(heights) - 0.85,
                head,
                ha="center",
                va="bottom",
                fontsize="small",
                color="0.35",
            )
    handles = [
        Line2D([], [], color=c, linestyle=d, linewidth=1.6, label=how)
        for how, (c, d) in _HOW.items()
        if how in used
    ]
    ax.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False,
        fontsize="small", handlelength=3.5,
    )  # fmt: skip


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 9] + "…" + name[-8:]
