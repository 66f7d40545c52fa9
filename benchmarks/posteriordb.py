"""Posteriors of known moments: is a fit with the defaults right, and where it is not, does it say so?

The models and reference moments of posteriordb's posteriors (long runs of NUTS) lie in the folder named
by PYRO_CVI_POSTERIORDB, else in `../shared/posteriordb`. Each is fitted by `CVI(model, AutoCVI(model))`
with nothing but a seed, in a process of its own with a time limit; draws of the guide give the moments,
and by the entry's own function those of derived quantities. `--integrate` adds `integrate` over each
list of sites that the entry names (or `LISTS`). Two figures for each: the worst error of a mean, in sds
of the reference, and the sd of which the ratio to the reference's is farthest from 1.

Verdicts: "good" within the targets; "wrong, said" beside a warning, `converged=False`, or a pointer to
`integrate` in the report; "wrong in silence" without any of these; "time-out" and "error".
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _common import ROOT, DataMissingError, Row, arguments, machine, report, run, warm_up
from _watched import TimeOutError, brief, caught, fit, in_children, limited, lines
from pyro.infer import Predictive
from torch import Tensor

from pyro_cvi import integrate

DEFAULTS = "defaults"
TARGETS = {DEFAULTS: (0.1, 0.1), "integrate": (0.05, 0.05)}
NEEDED = {DEFAULTS: 35, "integrate": 39}
LISTS = {
    "kilpisjarvi_mod-kilpisjarvi": (["sigma"],),
    "hudson_lynx_hare-lotka_volterra": (["sigma"],),
}
"""Sites to integrate over where the entry names none."""
SMALL = ("kidiq-kidscore_momiq", "eight_schools-eight_schools_noncentered")


def load(dtype: torch.dtype) -> ModuleType:
    """The module of models, whose own tensors get the dtype of the run."""
    shared = ROOT.parent / "shared" / "posteriordb"
    folder = Path(os.environ.get("PYRO_CVI_POSTERIORDB", shared))
    path = folder / "models.py"
    if not path.exists():
        raise DataMissingError(
            f"models.py is not in {folder}: set PYRO_CVI_POSTERIORDB to the folder of the posteriors"
        )
    spec = importlib.util.spec_from_file_location("posteriordb_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The module asks for float64 as it is imported; a run in float32 has to be one from there on.
    chosen, torch.set_default_dtype = torch.set_default_dtype, lambda _: None
    try:
        chosen(dtype)
        spec.loader.exec_module(module)
    finally:
        torch.set_default_dtype = chosen
    return module


def arguments_of(module: ModuleType, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """The model's arguments, in the dtype of the run."""
    entry = module.POSTERIORS[name]
    data = {
        k: v.to(dtype) if isinstance(v, Tensor) else v
        for k, v in module.data(entry.of or name).items()
    }
    return tuple(entry.args(data))


# --- moments ----------------------------------------------------------------------------------------


def draws_of(guide: Any, args: tuple[Any, ...], count: int) -> dict[str, Tensor]:
    """Draws of every site in float64, all at once where the guide allows it."""
    with torch.no_grad():
        try:
            found = Predictive(guide, num_samples=count, parallel=True)(*args)
        except Exception:  # of whatever kind: then one by one
            found = Predictive(guide, num_samples=count // 2)(*args)
    return {k: v.double() for k, v in found.items() if not k.startswith("_")}


def moments(draws: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Mean and sd of every scalar, under Stan's names."""
    found = {}
    for site, values in draws.items():
        flat = values.reshape(len(values), -1)
        for i, column in enumerate(flat.unbind(-1)):
            pair = float(column.mean()), float(column.std())
            found[f"{site}[{i + 1}]"] = pair
            if flat.shape[1] == 1:
                found[site] = pair
    return found


def errors(found: dict[str, tuple[float, float]], reference: dict[str, Any]) -> dict[str, Any]:
    """The worst mean and the worst sd, with the names of their scalars."""
    off = {n: abs(found[n][0] - r["mean"]) / r["sd"] for n, r in reference.items()}
    ratio = {n: found[n][1] / r["sd"] for n, r in reference.items()}
    off = {n: v if math.isfinite(v) else math.inf for n, v in off.items()}
    ratio = {n: v if math.isfinite(v) and v > 0 else math.inf for n, v in ratio.items()}
    worst_mean = max(off, key=lambda n: off[n])
    worst_sd = max(ratio, key=lambda n: abs(math.log(ratio[n])))
    return {
        "mean_error": off[worst_mean], "of_mean": worst_mean,
        "sd_ratio": ratio[worst_sd], "of_sd": worst_sd,
    }  # fmt: skip


def is_good(record: dict[str, Any], by: str) -> bool:
    """Within the targets of the defaults, or those of `integrate`."""
    if record.get("error"):
        return False
    mean, sd = TARGETS[by]
    return bool(record["mean_error"] <= mean and abs(record["sd_ratio"] - 1) <= sd)


def verdict(record: dict[str, Any], by: str) -> str:
    """What a record of a fit and its moments comes to."""
    if record.get("error"):
        return "time-out" if record["error"] == "time-out" else "error"
    if is_good(record, by):
        return "good"
    return "wrong in silence" if record["silent"] else "wrong, said"


# --- one posterior -------------------------------------------------------------------------------------


def one(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fit one posterior; a record for the defaults, and for each list of sites."""
    dtype = getattr(torch, options.dtype)
    module = load(dtype)
    warm_up()
    entry, args = module.POSTERIORS[name], arguments_of(module, name, dtype)
    reference = module.REFERENCE[entry.of or name]["parameters"]

    def judged(guide: Any) -> dict[str, Any]:
        draws = draws_of(guide, args, options.draws)
        return errors(moments({**draws, **entry.stan(draws)}), reference)

    cvi, watched = fit(entry.model, args, seed, options.limit)
    record = dataclasses.asdict(watched)
    if not watched.error:
        record |= {"silent": watched.is_silent, **_tried(judged, cvi.guide)}
    found = {DEFAULTS: record}
    lists = entry.integrate or LISTS.get(name, ())
    for sites in lists if options.integrate and not watched.error else ():
        found["integrate " + ", ".join(sites)] = _integrated(
            cvi, sites, args, judged, 5 * options.limit
        )
    return found


def _tried(judged: Any, guide: Any) -> dict[str, Any]:
    try:
        result: dict[str, Any] = judged(guide)
    except Exception as error:
        return {"error": "moments: " + brief(error)}
    return result


def _integrated(
    cvi: Any, sites: list[str], args: tuple[Any, ...], judged: Any, limit: float
) -> dict[str, Any]:
    said: list[str] = []
    record: dict[str, Any] = {"error": ""}
    start = time.process_time()
    with caught(said):
        try:
            with limited(limit):
                posterior = integrate(cvi, sites, *args)
        except TimeOutError:
            record["error"] = "time-out"
        except Exception as error:
            record["error"] = brief(error)
        record["seconds"] = time.process_time() - start
    record |= {"warnings": said, "silent": not said}
    return record if record["error"] else record | _tried(judged, posterior)


# --- the table --------------------------------------------------------------------------------------

HEADER = [
    "posterior", "seed", "by", "verdict", "mean off", "of", "sd ratio", "of", "loss", "converged",
    "steps", "seconds", "first", "ten runs", "says",
]  # fmt: skip


def line(r: dict[str, Any]) -> list[str]:
    """A record as text."""

    def number(key: str, form: str) -> str:
        value = r.get(key)
        return "" if value is None or value != value else format(value, form)

    says = [
        r.get("error", ""),
        *r.get("warnings", []),
        "points to integrate" * r.get("points", False),
    ]
    return [
        r["name"], str(r["seed"]), r["by"], r["verdict"], number("mean_error", ".3f"),
        r.get("of_mean", ""), number("sd_ratio", ".3f"), r.get("of_sd", ""), number("loss", ".2f"),
        str(r.get("converged", "")), str(r.get("steps", "")), number("seconds", ".2f"),
        number("first", ".2f"), number("runs", ".3f"), "; ".join(s[:120] for s in says if s),
    ]  # fmt: skip


def count_good(records: list[dict[str, Any]], by: str) -> int:
    """How many posteriors are good in every variant.

    By `integrate`, that is by some list of sites; by the defaults, where an entry names no list.
    """
    good: dict[str, bool] = {}
    for name in {r["name"] for r in records}:
        mine = [r for r in records if r["name"] == name]
        tried = mine[:1] if by == DEFAULTS else mine[1:] or mine[:1]
        if by != DEFAULTS and mine[0].get("error"):
            tried = mine[:1]
        of = mine[0]["of"]
        good[of] = good.get(of, True) and any(is_good(r, by) for r in tried)
    return sum(good.values())


def rows_of(records: list[dict[str, Any]]) -> list[Row]:
    """The counts by seed, and each fit that is not good."""
    rows = []
    for seed in sorted({r["seed"] for r in records}):
        mine = [r for r in records if r["seed"] == seed]
        kinds = [DEFAULTS, "integrate"] if any(r["by"] != DEFAULTS for r in mine) else [DEFAULTS]
        for by in kinds:
            of = len({r["of"] for r in mine})
            what = (
                f"good by {by}, of {of}" if by != DEFAULTS else f"good with the defaults, of {of}"
            )
            rows.append(Row(f"seed {seed}", what, count_good(mine, by), ">=", NEEDED[by]))
        for what in ("wrong in silence", "time-out", "error"):
            count = sum(r["verdict"] == what for r in mine)
            rows.append(Row(f"seed {seed}", f"{what}, of {len(mine)} fits", count, "<=", 0))
    for r in records:
        if r["verdict"] != "good":
            mean, sd = TARGETS[DEFAULTS if r["by"] == DEFAULTS else "integrate"]
            case = f"{r['name']}, seed {r['seed']}, {r['by']}: {r['verdict']}"
            rows.append(Row(case, "worst error of a mean, sds", r.get("mean_error"), "<=", mean))
            off = abs(r["sd_ratio"] - 1) if "sd_ratio" in r else None
            rows.append(Row(case, "worst |ratio of sds - 1|", off, "<=", sd))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="posteriors whose name contains this; no file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--integrate", action="store_true", help="and by integrate")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="seconds for each fit; five times that for `integrate`",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--draws", type=int, default=10_000)
    options = parser.parse_args()
    at = machine()
    module = load(getattr(torch, options.dtype))
    names = [n for n in module.POSTERIORS if options.only in n]
    names = [n for n in names if n in SMALL] if options.small else names
    tasks = [(name, seed, options) for seed in options.seeds for name in names]
    longest = 12 * options.limit + 300.0
    records = []
    for (name, seed, _), found in in_children(one, tasks, options.jobs, longest):
        found = {DEFAULTS: found} if "error" in found else found
        for by, r in found.items():
            of = module.POSTERIORS[name].of or name
            records.append({"name": name, "of": of, "seed": seed, "by": by, **r})
            records[-1]["verdict"] = verdict(r, DEFAULTS if by == DEFAULTS else "integrate")
            print(" | ".join(line(records[-1])), flush=True)
    print(*lines(HEADER, [line(r) for r in records]), sep="\n")
    report(__file__, rows_of(records), at, options.small or bool(options.only), fits=records)


if __name__ == "__main__":
    run(main)
