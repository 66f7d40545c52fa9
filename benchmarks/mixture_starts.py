"""Does the default start of a mixture end where the best of twenty does?

    c_k ~ N(0, 4^2),  s_k ~ U(0.3, 1.3),  100 + 50 K points in D dimensions,  K = 2 to 10,  D = 1 to 3

Components have independent columns, with Gamma precisions (conjugate) or HalfNormal scales (by
quadrature). The rival is the lowest loss of the default start, one at the truth, and, of conjugate
components, the best of `num_restarts=20`: fits by quadrature take ten times as long. Dimensions take
turns among the data sets of each K.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Row, arguments, machine, report, run, warm_up
from pyro.infer.autoguide import init_to_value
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

KINDS = {"Gamma precisions": dist.Gamma(2.0, 1.0), "HalfNormal scales": dist.HalfNormal(2.0)}
NATS = 1.0


def mixture(kind: str) -> Callable[[Tensor, int], None]:
    def model(x: Tensor, k: int) -> None:
        columns = torch.arange(x.shape[1]).unsqueeze(-1)
        weights = pyro.sample("weights", dist.Dirichlet(x.new_ones(k)))
        with pyro.plate("columns", x.shape[1], dim=-2), pyro.plate("components", k, dim=-1):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            spread = pyro.sample("spread", KINDS[kind])
            scale = spread.rsqrt() if kind == "Gamma precisions" else spread
        with pyro.plate("rows", len(x), dim=-1):
            z = pyro.sample("z", dist.Categorical(weights))
            law = dist.Normal(Vindex(mu)[columns, z], Vindex(scale)[columns, z])
            with pyro.plate("cells", x.shape[1], dim=-2):
                pyro.sample("x", law, obs=x.T)

    return model


def data(k: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centres and scales of the components, and the points."""
    generator = torch.Generator().manual_seed(1000 * k + 100 * d + seed)
    centre = 4 * torch.randn(k, d, generator=generator)
    scale = 0.3 + torch.rand(k, d, generator=generator)
    z = torch.randint(k, (100 + 50 * k,), generator=generator)
    return centre, scale, centre[z] + scale[z] * torch.randn(len(z), d, generator=generator)


def fitted(model: Any, x: Tensor, k: int, init: Any = None, **options: Any) -> float:
    pyro.set_rng_seed(0)
    guide = AutoCVI(model, init_loc_fn=init) if init else AutoCVI(model)
    return CVI(model, guide).run(x, k, **options).losses[-1]


def behind(kind: str, k: int, d: int, seed: int, restarts: int) -> tuple[float, float]:
    """By how many nats the default start is behind the best, and the seconds that it took."""
    centre, scale, x = data(k, d, seed)
    model = mixture(kind)
    start = time.process_time()
    own = fitted(model, x, k)
    seconds = time.process_time() - start
    spread = scale**-2 if kind == "Gamma precisions" else scale
    truth = {"mu": centre.T, "spread": spread.T, "weights": x.new_full((k,), 1 / k)}
    best = min(own, fitted(model, x, k, init_to_value(values=truth)))
    if restarts > 1:
        best = min(best, fitted(model, x, k, num_restarts=restarts))
    return own - best, seconds


def options_of() -> Any:
    parser = arguments(__doc__)
    parser.add_argument("--sets", type=int, default=10, help="data sets of each K")
    parser.add_argument(
        "--restarts", type=int, default=20, help="starts of the rival of conjugate components"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--components", type=int, nargs="+", default=list(range(2, 11)))
    return parser.parse_args()


def main() -> None:
    options = options_of()
    at = machine()
    warm_up()
    sets = 1 if options.small else options.sets
    restarts = 2 if options.small else options.restarts
    rows = []
    for kind in options.kinds:
        starts = restarts if kind == "Gamma precisions" else 1
        everything: list[tuple[float, float]] = []
        for k in [2, 3] if options.small else options.components:
            found = [behind(kind, k, s % 3 + 1, s, starts) for s in range(sets)]
            near = sum(gap <= NATS for gap, _ in found) / len(found)
            rows.append(Row(f"{kind}, K = {k}", "within a nat of the best, share", near, ">=", 0.9))
            rows.append(Row(f"{kind}, K = {k}", "furthest behind, nats", max(g for g, _ in found)))
            rows.append(
                Row(f"{kind}, K = {k}", "seconds, mean", sum(s for _, s in found) / len(found))
            )
            everything += found
            print(kind, k, f"{near:.2f}", flush=True)
        share = sum(gap <= NATS for gap, _ in everything) / len(everything)
        rows.append(Row(f"{kind}, all", "within a nat of the best, share", share, ">=", 0.9))
    report(__file__, rows, at, options.small)


if __name__ == "__main__":
    run(main)
