"""The bound of one or several runs, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pyro_cvi.errors import CVIError
from pyro_cvi.infer import RunResult
from pyro_cvi.plots.palette import COLOURS, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bound"]


def bound(
    results: RunResult | Sequence[float] | Mapping[str, RunResult | Sequence[float]],
    ax: Axes | None = None,
    *,
    against: Literal["steps", "seconds"] = "steps",
    distance: bool | float = False,
) -> Axes:
    """The negative bound after each step, against steps or seconds; one curve for each run.

    Arguments:
        results: a `RunResult`, a sequence of losses (those of `svi.step`, say), or a mapping of labels
            to these. `RunResult(losses=..., times=...)` makes one of any other fit that was timed.
        ax: where to draw.
        against: "steps", or "seconds", for which a `RunResult` with `times` is needed.
        distance: draw loss - reference on a logarithmic axis: True for the smallest of the last losses
            of all runs, or a number, such as the loss at the optimum. What is not above it is left
            out.

    Raises:
        CVIError: no losses, losses without times against seconds, or another `against`.
        ImportError: matplotlib is not installed.

    Example:
        >>> from pyro_cvi.plots import bound
        >>> ax = bound({"a": [3.0, 2.0, 1.5], "b": [4.0, 1.4]}, distance=1.0)
        >>> ax.get_ylabel()
        'negative bound − 1'
    """
    runs = dict(results) if isinstance(results, Mapping) else {"": results}
    if against not in ("steps", "seconds"):
        raise CVIError(f"bound(against={against!r}): expected 'steps' or 'seconds'")
    curves = {label: _curve(label, run, against) for label, run in runs.items()}
    if not curves:
        raise CVIError("bound: no runs; pass a RunResult, losses, or a mapping of labels to these")
    plt = pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    least = min(y[-1] for _, y in curves.values())
    reference = 0.0
    if distance is not False:
        reference = least if distance is True else float(distance)
    for i, (label, (x, y)) in enumerate(curves.items()):
        shown = [v - reference for v in y]
        if distance is not False:
            shown = [v if v > 0 else math.nan for v in shown]
        few = len(x) <= 40
        ax.plot(
            x, shown, color=COLOURS[i % len(COLOURS)], linewidth=1.5,
            marker="o" if few else None, markersize=4, label=label or None,
        )  # fmt: skip
    ax.set_xlabel("step" if against == "steps" else "seconds")
    if distance is False:
        ax.set_ylabel("negative bound")
    else:
        ax.set_yscale("log")
        name = "smallest last value" if distance is True else f"{reference:g}"
        ax.set_ylabel(f"negative bound − {name}")
    if any(runs):
        ax.legend(frameon=False)
    return ax


def _curve(
    label: str, run: RunResult | Sequence[float], against: str
) -> tuple[list[float], list[float]]:
    losses = [float(v) for v in (run.losses if isinstance(run, RunResult) else run)]
    where = f"bound, run '{label}'" if label else "bound"
    if not losses:
        raise CVIError(where, "no losses", "at least one step", "run it first")
    if against == "steps":
        return [float(i) for i in range(1, len(losses) + 1)], losses
    times = run.times if isinstance(run, RunResult) else []
    if len(times) != len(losses):
        raise CVIError(
            where,
            f"{len(losses)} losses and {len(times)} times",
            "a time for each loss",
            "RunResult(losses=losses, times=times), or against='steps'",
        )
    return [float(t) for t in times], losses
