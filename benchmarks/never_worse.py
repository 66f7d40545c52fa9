"""Is CVI ever worse than SVI? Many unlike models by its defaults, against the best of four fits by SVI.

SVI has AutoNormal and AutoMultivariateNormal, Adam at two rates, each for ten times what CVI took, at
least `--seconds` and at most `--cap`. The bound of both is the mean of Trace_ELBO over 1,000 draws of
the guide (fewer where these take longer than `--draw-seconds`), discrete sites summed out by
TraceEnum_ELBO: the estimator of `drop_in.py`. A loss is a negative bound above the best SVI's by more
than 3 standard errors and 0.2 nats; a fit that ends in an error or not within `--limit` has lost, too,
where SVI has an answer. A second verdict is `converged=True` beside a loss. `--further` goes on from
where a fit converged, with tol=1e-12 and 500 steps: that may gain 0.02 nats, and move a mean by 0.02 of
its sd.

Each model and seed is a process of its own; seconds are the processor's, one thread each. What the
results file has already is not run again, unless `--fresh`; `--only` adds to the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyro
import torch
from _common import RESULTS, Row, arguments, machine, run, table, warm_up
from _models import everything
from _problem import Problem, negative_bounds
from _watched import TimeOutError, Watched, brief, fit, in_children, limited, lines
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam

from pyro_cvi import CVI

RATES = (0.01, 0.05)
GUIDES = {"AutoNormal": AutoNormal, "AutoMVN": AutoMultivariateNormal}
NATS, ERRORS = 0.2, 3.0
GAIN, MOVE = 0.02, 0.02
SMALL = 4
ABSURD = 1e12
"""Nats of a bound that is none: draws that underflow to zero have a density of infinity."""


# --- one model --------------------------------------------------------------------------------------


def enumerated(p: Problem) -> Problem:
    """The problem with its discrete sites marked, as SVI and the estimate of the bound need it."""
    if not p.discrete:
        return p
    return dataclasses.replace(p, model=config_enumerate(p.model, "parallel"))


def bound(p: Problem, guide: Any, draws: int, seconds: float) -> dict[str, Any]:
    """Mean and standard error of the negative bound, and from how many draws."""
    pyro.set_rng_seed(1)
    values, start = [], time.process_time()
    while sum(map(len, values)) < draws:
        values.append(negative_bounds(p, guide, min(50, draws)))
        if time.process_time() - start > seconds:
            break
    found = torch.cat(values)
    return {
        "loss": float(found.mean()), "error": float(found.std() / math.sqrt(len(found))),
        "draws": len(found),
    }  # fmt: skip


def by_svi(p: Problem, seed: int, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """The best of the fits by SVI, by a hundred draws of each; then its bound."""
    best: dict[str, Any] = {"loss": math.inf}
    store: tuple[Any, Any] | None = None
    tried = {}
    for name, kind in GUIDES.items():
        for rate in RATES:
            which = f"{name} {rate}"
            try:
                guide, steps = _svi(p, kind, rate, seed, seconds)
                found = bound(p, guide, 100, options.draw_seconds)
            except (Exception, TimeOutError) as error:
                tried[which] = brief(error)
                continue
            tried[which] = found["loss"]
            if found["loss"] < best["loss"]:
                best = {"which": which, "steps": steps, **found}
                store = guide, pyro.get_param_store().get_state()
    if store is not None:
        pyro.get_param_store().set_state(store[1])
        best |= bound(p, store[0], options.draws, options.draw_seconds)
    return best | {"tried": tried, "seconds": seconds}


def _svi(
    p: Problem, kind: Callable[..., Any], rate: float, seed: int, seconds: float
) -> tuple[Any, int]:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = kind(poutine.block(p.shown, hide=list(p.discrete)))
    loss = TraceEnum_ELBO(max_plate_nesting=p.nesting) if p.discrete else Trace_ELBO()
    svi = SVI(p.model, guide, Adam({"lr": rate}), loss)
    start, steps = time.process_time(), 0
    with limited(2 * seconds + 30):  # a single step may be long
        while time.process_time() - start < seconds:
            svi.step(*p.args)
            steps += 1
    return guide, steps


def further(p: Problem, cvi: CVI, watched: Watched, options: argparse.Namespace) -> dict[str, Any]:
    """What 500 steps more gain, and by how many sds they move a mean."""
    places, draws = _places(cvi), watched.sampled > 0
    before = bound(p, cvi.guide, options.draws, options.draw_seconds) if draws else {}
    with limited(4 * options.limit):
        result = cvi.run(*p.args, tol=1e-12, num_steps=500)
    found = {"gain": watched.loss - result.losses[-1], "error": 0.0}
    if draws:
        after = bound(p, cvi.guide, options.draws, options.draw_seconds)
        found["gain"] = before["loss"] - after["loss"]
        found["error"] = math.hypot(before["error"], after["error"])
    now = _places(cvi)
    moves = {s: float(((now[s][0] - m).abs() / sd).max()) for s, (m, sd) in places.items()}
    site = max(moves, key=lambda s: moves[s], default="")
    return {**found, "moved": moves.get(site, 0.0), "site": site, "steps": result.num_steps}


def _places(cvi: CVI) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Mean and sd of every continuous site; of the three quartiles where a law has no moments."""
    found = {}
    guide: Any = cvi.guide
    for site in guide.plan.latents:
        q = guide.posterior(site)
        if q.has_enumerate_support:
            continue
        try:
            found[site] = q.mean, q.variance.sqrt()
        except NotImplementedError:
            low, middle, high = guide.quantiles([0.16, 0.5, 0.84])[site]
            found[site] = middle, (high - low) / 2
    return found


def one(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fit one model by both; the record."""
    torch.set_default_dtype(torch.float64)
    warm_up()
    torch.set_default_dtype(getattr(torch, options.dtype))
    p = everything()[name]()
    optim = Adam({"lr": 0.01}) if p.learns else None
    cvi, watched = fit(p.shown, p.args, seed, options.limit, optim)
    record: dict[str, Any] = {"cvi": dataclasses.asdict(watched)}
    marked = enumerated(p)
    if not watched.error:
        try:
            record["bound"] = bound(marked, cvi.guide, options.draws, options.draw_seconds)
        except Exception as error:
            record["cvi"]["error"] = "bound: " + brief(error)
    if options.further and watched.converged:
        try:
            record["further"] = further(marked, cvi, watched, options)
        except (Exception, TimeOutError) as error:
            record["further"] = {"failed": brief(error)}
    seconds = min(options.cap, max(options.seconds, 10 * watched.seconds))
    seconds = options.seconds if watched.error else seconds
    if not options.alone:
        record["svi"] = by_svi(marked, seed, seconds, options)
    return record


# --- verdicts and tables ----------------------------------------------------------------------------


def difference(r: dict[str, Any]) -> tuple[float, float]:
    """CVI's negative bound less the best SVI's, and the standard error of both together."""
    ours, theirs = r["bound"], r["svi"]
    return ours["loss"] - theirs["loss"], math.hypot(ours["error"], theirs["error"])


def verdict(r: dict[str, Any]) -> str:
    """Of one record; it is a loss, too, where only SVI has an answer."""
    if r["cvi"]["error"]:
        return "time-out" if r["cvi"]["error"] == "time-out" else "error"
    if "svi" not in r:
        return "alone"
    if not -ABSURD < r["svi"]["loss"] < math.inf:
        return "no SVI"
    if not math.isfinite(r["bound"]["loss"]):
        return "LOSS"
    d, noise = difference(r)
    if abs(d) <= NATS or abs(d) <= ERRORS * noise:
        return "even"
    return "LOSS" if d > 0 else "better"


def holds(r: dict[str, Any]) -> bool:
    """Whether the further run found the fit at its optimum."""
    f = r["further"]
    return "failed" not in f and f["gain"] - ERRORS * f["error"] < GAIN and f["moved"] < MOVE


HEADER = [
    "model", "seed", "CVI", "best SVI", "which", "verdict", "converged", "steps", "seconds", "says",
    "further",
]  # fmt: skip


def line(r: dict[str, Any]) -> list[str]:
    """A record as text."""

    def shown(found: dict[str, Any] | None) -> str:
        if not found or not math.isfinite(found["loss"]):
            return "none" if not found else str(found["loss"])
        return f"{found['loss']:.6g} +- {found['error']:.2g}"

    c, svi, more = r["cvi"], r.get("svi"), r.get("further")
    says = [c["error"], *c["warnings"], "sampled" * bool(c["sampled"]), c["reason"]]
    what = ""
    if more is not None:
        what = (
            more.get("failed") or f"{more['gain']:.3g} nats, {more['moved']:.2g} sd {more['site']}"
        )
        what = what if holds(r) else f"NOT AT ITS END: {what}"
    return [
        r["name"], str(r["seed"]), shown(r.get("bound")), shown(svi), (svi or {}).get("which", ""),
        r["verdict"], str(c["converged"]), str(c["steps"]), f"{c['seconds']:.1f}",
        "; ".join(s[:100] for s in says if s), what,
    ]  # fmt: skip


def rows_of(records: list[dict[str, Any]]) -> list[Row]:
    """The counts, and a row for each loss."""
    count = len(records)
    bad = [r for r in records if r["verdict"] in ("LOSS", "error", "time-out")]
    rows = []
    for what in ("LOSS", "error", "time-out"):
        found = sum(r["verdict"] == what for r in bad)
        rows.append(Row("all", f"{what.lower()}, of {count}", found, "<=", 0))
    promised = sum(r["cvi"]["converged"] for r in bad)
    rows.append(Row("all", f"converged=True beside a loss, of {count}", promised, "<=", 0))
    more = [r for r in records if "further" in r]
    if more:
        rows.append(
            Row("all", f"converged, not at the end, of {len(more)}",
                sum(not holds(r) for r in more), "<=", 0)
        )  # fmt: skip
    for what in ("better", "even", "no SVI"):
        rows.append(Row("all", what, sum(r["verdict"] == what for r in records)))
    for r in bad:
        d = difference(r)[0] if r["verdict"] == "LOSS" else None
        case = f"{r['name']}, seed {r['seed']}: {r['verdict'].lower()}"
        rows.append(Row(case, "CVI's negative bound less SVI's", d, "<=", NATS))
    return rows


def save(path: Path, records: list[dict[str, Any]], at: dict[str, Any]) -> None:
    """The file, in the form that all benchmarks have."""
    rows = [{**dataclasses.asdict(r), "verdict": r.verdict} for r in rows_of(records)]
    content = {
        "benchmark": "never_worse",
        "machine": at,
        "rows": rows,
        "details": {"fits": records},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _known(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["details"]["fits"] if path.exists() else []


def compared(todo: list[tuple[str, int]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for each model and seed, as they are done."""
    longest = 5 * options.limit + 6 * options.cap + 8 * options.draw_seconds + 120
    tasks = [(name, seed, options) for name, seed in todo]
    for (name, seed, _), found in in_children(one, tasks, options.jobs, 3 * longest):
        if "cvi" not in found:
            found = {"cvi": dataclasses.asdict(Watched(error=found["error"]))}
        r = {"name": name, "seed": seed, "dtype": options.dtype, **found}
        yield {**r, "verdict": verdict(r)}


def options_of() -> argparse.Namespace:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--only", default="", help="models whose name contains this")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--further", action="store_true", help="go on where a fit has converged")
    add("--alone", action="store_true", help="without SVI")
    add("--fresh", action="store_true", help="run again what the file has")
    add("--list", action="store_true", help="names, and nothing else")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--limit", type=float, default=60.0, help="seconds for CVI")
    add("--seconds", type=float, default=4.0, help="least for each fit by SVI")
    add("--cap", type=float, default=40.0, help="most for each fit by SVI")
    add("--draws", type=int, default=1000)
    add("--draw-seconds", type=float, default=20.0, help="most for the draws of a bound")
    add("--results", type=Path, default=RESULTS / "never_worse.json")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    at = machine()
    names = [n for n in everything() if options.only in n][: SMALL if options.small else None]
    if options.list:
        print(*names, sep="\n")
        return
    wanted = [(n, s) for n in names for s in options.seeds]
    records = {} if options.small else {_key(r): r for r in _known(options.results)}
    todo = [w for w in wanted if options.fresh or (*w, options.dtype) not in records]
    for r in compared(todo, options):
        records[_key(r)] = r
        print(" | ".join(line(r)), flush=True)
        if not options.small:
            save(options.results, list(records.values()), at)
    shown = [records[k] for k in ((*w, options.dtype) for w in wanted) if k in records]
    print(*lines(HEADER, [line(r) for r in shown]), "", sep="\n")
    text = table(rows_of(shown))
    print(*lines(list(text[0]), [list(t) for t in text[1:]]), sep="\n")
    print("not written: this was a small run" if options.small else f"written: {options.results}")


def _key(r: dict[str, Any]) -> tuple[str, int, str]:
    return r["name"], r["seed"], r["dtype"]


if __name__ == "__main__":
    run(main)
