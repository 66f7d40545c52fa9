"""1000 scalar sites, each with a name of its own: what do the plan and a step cost?

A model of the shape of radon.py, written as a loop. Each of J groups has one latent sample statement,
and one observed statement for its 5 rows:

    mu ~ N(0, 10^2);  tau_a ~ Gamma(2, 0.2);  tau_y ~ Gamma(2, 1)
    a_j ~ N(mu, 1/tau_a);  y_j ~ N(a_j, 1/tau_y), 5 rows                          for j = 1..J

The same model with a plate of groups says what the loop costs; with a `max_dense_dim` of J + 1, which
keeps mu and all effects in one block, it has the bound that the others should reach. Where J + 1 scalars
exceed the default of `max_dense_dim`, the blocks are others, and so may be the bounds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Fit, Row, arguments, fit, machine, report, run, sweep_seconds, warm_up
from torch import Tensor

ROWS = 5


def data(J: int) -> Tensor:
    """(J, 5), with effects of standard deviation 0.3 and noise of 0.8."""
    generator = torch.Generator().manual_seed(4)
    a, e = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((J, 1), (J, ROWS)))
    return 1.3 + 0.3 * a + 0.8 * e


def _common_sites(y: Tensor) -> tuple[Any, Any, Any]:
    one = y.new_tensor(1.0)
    mu = pyro.sample("mu", dist.Normal(0 * one, 10 * one))
    tau_a = pyro.sample("tau_a", dist.Gamma(2 * one, 0.2 * one))
    tau_y = pyro.sample("tau_y", dist.Gamma(2 * one, one))
    return mu, tau_a, tau_y


def loop(y: Tensor) -> None:
    mu, tau_a, tau_y = _common_sites(y)
    for j, row in enumerate(y):
        a = pyro.sample(f"a_{j}", dist.Normal(mu, tau_a.rsqrt()))
        pyro.sample(f"y_{j}", dist.Normal(a, tau_y.rsqrt()).expand([ROWS]).to_event(1), obs=row)


def plated(y: Tensor) -> None:
    mu, tau_a, tau_y = _common_sites(y)
    with pyro.plate("groups", len(y)):
        a = pyro.sample("a", dist.Normal(mu, tau_a.rsqrt()))
        noise = dist.Normal(a.unsqueeze(-1), tau_y.rsqrt()).expand([len(y), ROWS])
        pyro.sample("y", noise.to_event(1), obs=y)


def blocks_of(f: Fit) -> str:
    """Such as "Gaussian dense 1001, Gamma 1 (2 times)"."""
    kinds = Counter(
        f"{b.family.name if b.layout is None else f'Gaussian {b.structure}'} of {b.size}"
        for b in f.guide.plan.blocks
    )
    return ", ".join(k if n == 1 else f"{n} x {k}" for k, n in kinds.most_common(4))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sites", type=int)
    options = parser.parse_args()
    small = options.small
    at = machine()
    warm_up()
    J = options.sites or (20 if small else 1000)
    sweeps = 10
    for model in (loop, plated):
        fit((data(5),), 2, model)  # what the first use costs
    y = data(J)
    pyro.set_rng_seed(0)
    named = fit((y,), sweeps, loop)
    pyro.set_rng_seed(0)
    vector = fit((y,), sweeps, plated)
    best = fit((y,), 200, plated, 1e-12, max_dense_dim=J + 1).losses[-1]
    case, other = f"{J} sites in a loop", f"a plate of {J}"
    rows = [
        Row(case, "first step with guide and plan, seconds", named.seconds[0]),
        Row(case, "plan (that less a step), seconds", named.plan_seconds, "<=", 5.0),
        Row(case, "step(), seconds", named.step_seconds, "<=", 1.0),
        Row(case, "sweep inside of run(), seconds", sweep_seconds(named, (y,), 8, 1)),
        Row(other, "plan, seconds", vector.plan_seconds),
        Row(other, "step(), seconds", vector.step_seconds),
        Row("one block", "negative bound", best),
        Row(
            case, f"negative bound after {sweeps} sweeps: relative difference from that",
            named.losses[sweeps - 1] / best - 1, "<=", 1e-4,
        ),
        Row(
            other, f"negative bound after {sweeps} sweeps: relative difference from that",
            vector.losses[-1] / best - 1, "<=", 1e-4,
        ),
    ]  # fmt: skip
    blocks = {"loop": blocks_of(named), "plate": blocks_of(vector)}
    print(*(f"{k}: {v}" for k, v in blocks.items()), sep="\n")
    report(
        __file__, rows, at, small or options.sites is not None, blocks=blocks,
        losses={"loop": named.losses, "plate": vector.losses},
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
