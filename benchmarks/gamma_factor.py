"""Gamma factor model on mass cytometry: the same held-out log-likelihood, how much sooner than SVI?

Model (paper, appendix "Details of the Gamma Factor Model"), with s2 = 0.1, a = b = 1, K = D:

    Z_jk ~ Gamma(a, b);    y_i ~ N(0, Z Z^T + s2 I),

on standardised markers. Rows enter through their scatter matrix S = Y^T Y, which is all that the
likelihood sees of them: the cost of a step does not grow with the number of rows. The model says so
itself, so both methods have the same cost per draw of the model.

Both have the posterior of independent Gammas. SVI has one draw a step and learns means and shapes
through softplus, as Pyro's own Gamma guides do; Adam and Adadelta, four rates each. Both start at the
prior's mean times the same noise, SVI with standard deviations of a tenth of it, as CVI does.

Score: mean over held-out rows of E_q[log p(y | Z)], from 50 draws, off the clock. The clock of CVI
includes guide, plan and start. Float64.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Curve, Row, arguments, arrays, follow, machine, report, run, warm_up
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adadelta, Adam
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

NOISE = 0.1
RATES = {"Adam": (0.003, 0.01, 0.03, 0.1), "Adadelta": (0.1, 0.3, 1.0, 3.0)}
OPTIMISERS: dict[str, Any] = {"Adam": Adam, "Adadelta": Adadelta}
WITHIN = 0.1
"""Nats a row below the best score of all at which a method has arrived."""
DRAWS = 50
POINTS = {"first": 0.2, "growth": 1.1}


def data(name: str, rows: int | None) -> tuple[Tensor, int, Tensor]:
    """Scatter matrix and number of the fitted rows, mean scatter of the held-out fifth."""
    d = arrays(name)
    if "Y" in d:
        y = torch.from_numpy(d["Y"]).double()
    else:
        keep = [i for i, m in enumerate(d["markers"]) if not str(m).startswith("CD45BC")]
        y = (torch.from_numpy(d["counts"]).double()[:, keep] / 5).asinh()
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:rows]]
    cut = len(y) // 5
    held, fitted = y[:cut], y[cut:]
    loc, scale = fitted.mean(0), fitted.std(0)
    held, fitted = (held - loc) / scale, (fitted - loc) / scale
    return fitted.mT @ fitted, len(fitted), held.mT @ held / cut


def log_density(Z: Tensor, scatter: Tensor, rows: float) -> Tensor:
    """sum_i log N(y_i; 0, Z Z^T + s2 I) of rows with this scatter matrix."""
    factor = torch.linalg.cholesky(Z @ Z.mT + NOISE * torch.eye(len(Z), dtype=Z.dtype))
    whole = len(Z) * math.log(2 * math.pi) + 2 * factor.diagonal().log().sum()
    spread = torch.cholesky_solve(scatter, factor).diagonal().sum()
    return -0.5 * (rows * whole + spread)


def model(scatter: Tensor, rows: int) -> None:
    one = scatter.new_ones(len(scatter), len(scatter))
    Z = pyro.sample("Z", dist.Gamma(one, one).to_event(2))
    pyro.factor("y", log_density(Z, scatter, rows))


def score(q: Any, held: Tensor) -> float:
    """From the same draws at every point; torch's random state is left as it was."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        return sum(float(log_density(q.sample(), held, 1.0)) for _ in range(DRAWS)) / DRAWS


def with_cvi(scatter: Tensor, rows: int, held: Tensor, cap: float) -> Curve:
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    guide = AutoCVI(model)
    cvi = CVI(model, guide)

    def advance() -> int:
        cvi.step(scatter, rows)
        return 1

    return follow("CVI", start, cap, advance, lambda: score(guide.posterior("Z"), held), **POINTS)


def with_svi(
    scatter: Tensor, rows: int, held: Tensor, cap: float, optimiser: str, rate: float
) -> Curve:
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    D = len(scatter)
    noise = torch._standard_gamma(torch.full((D, D), 4.0, dtype=scatter.dtype)) / 4
    raw_mean = pyro.param("mean", (noise.expm1()).clamp(min=1e-6).log())
    raw_shape = pyro.param("shape", torch.full((D, D), 100.0, dtype=scatter.dtype))

    def q() -> Any:
        mean = torch.nn.functional.softplus(pyro.param("mean"))
        shape = torch.nn.functional.softplus(pyro.param("shape"))
        return dist.Gamma(shape, shape / mean).to_event(2)

    def guide(scatter: Tensor, rows: int) -> None:
        pyro.sample("Z", q())

    assert raw_mean.shape == raw_shape.shape
    start = time.perf_counter()
    svi = SVI(model, guide, OPTIMISERS[optimiser]({"lr": rate}), Trace_ELBO())

    def advance() -> int:
        for _ in range(10):
            svi.step(scatter, rows)
        return 10

    name = f"{optimiser}, rate {rate:g}"
    return follow(name, start, cap, advance, lambda: score(q(), held), **POINTS)


def compare(name: str, rows: int | None, cap: float) -> tuple[list[Row], dict[str, Any]]:
    scatter, n, held = data(name, rows)
    curves = [with_cvi(scatter, n, held, cap)]
    for optimiser, rates in RATES.items():
        for rate in rates:
            curve = with_svi(scatter, n, held, cap, optimiser, rate)
            if curve.scores and all(math.isfinite(s) for s in curve.scores):
                curves.append(curve)
    ours, theirs = curves[0], curves[1:]
    case = f"{name}, {n} x {len(scatter)}"
    best = max(max(c.scores) for c in theirs)
    level = best - WITHIN
    arrivals = {c.name: c.arrival(level) for c in theirs}
    first = min((t, c) for c, t in arrivals.items() if not math.isnan(t))
    mine = ours.arrival(level)
    table = [
        Row(case, "held-out score to reach: SVI's best less 0.1 nats a row", level),
        Row(case, f"SVI ({first[1]}), the fastest: seconds until then", first[0]),
        Row(case, "CVI: seconds until then", mine),
        Row(case, "SVI / CVI", first[0] / mine, ">=", 4.0),
        Row(case, "SVI: best score at the end of its time", max(c.scores[-1] for c in theirs)),
        Row(case, "CVI: score at the end of its time", ours.scores[-1]),
        Row(case, "CVI: seconds per step", ours.seconds[-1] / ours.work),
        Row(case, "SVI: seconds per step", theirs[0].seconds[-1] / theirs[0].work),
    ]
    return table, {c.name: {"seconds": c.seconds, "scores": c.scores} for c in curves}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cap", type=float, default=30.0, help="seconds a method")
    options = parser.parse_args()
    at = machine()
    warm_up()
    torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])  # torch imports much for its first one
    rows: list[Row] = []
    details: dict[str, Any] = {}
    cap = 1.0 if options.small else options.cap
    for name in ("cytof_samusik10k", "cytof_himc160k"):
        more, details[name] = compare(name, 500 if options.small else None, cap)
        rows += more
        if options.small:
            break
    report(__file__, rows, at, options.small, cap=cap, curves=details)


if __name__ == "__main__":
    run(main)
