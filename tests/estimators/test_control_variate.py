"""The control variate of sampled messages: no bias, and less noise as the fit converges."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.families import AbstractFamily


def rates() -> None:
    """Counts whose rate is a sum of Gamma sites: log of the sum is what has to be sampled."""
    g = torch.Generator().manual_seed(1)
    w = torch.rand(30, 4, generator=g, dtype=torch.float64) + 0.1
    y = torch.poisson(w @ torch.tensor([3.0, 0.5, 6.0, 1.5], dtype=torch.float64), generator=g)
    with pyro.plate("parts", 4):
        z = pyro.sample("z", dist.Gamma(0.7, 0.3))
    with pyro.plate("rows", 30):
        pyro.sample("y", dist.Poisson(w @ z), obs=y)


def affine() -> None:
    """What the algebra cannot see through, and is affine in the statistics all the same."""
    with pyro.plate("parts", 4):
        z = pyro.sample("z", dist.Gamma(0.7, 0.3))
    ordered = torch.sort(z).values
    pyro.factor("f", 3 * ordered.log().sum() - 2 * ordered.sum())


def single() -> None:
    """One scalar, through an operation without a rule."""
    z = pyro.sample("z", dist.Gamma(2.0, 1.0))
    hidden = torch.sort(z.reshape(1)).values[0]
    pyro.sample("y", dist.Poisson(1 + hidden), obs=torch.tensor(4.0))


def fisher_norm(
    family: AbstractFamily, natural: tuple[Tensor, ...], d: tuple[Tensor, ...]
) -> Tensor:
    """<d, F d>, with F d the derivative of the mean along d."""
    _, moved = torch.func.jvp(lambda *n: tuple(family.to_mean(n)), natural, d)
    return family.inner(d, moved).sum()


@pytest.mark.parametrize(("model", "factor"), [(affine, 1e20), (single, 3.0), (rates, 1.0)])
def test_the_control_leaves_the_mean_and_lowers_the_noise_at_convergence(
    model: object, factor: float
) -> None:
    """Where sites meet in a factor, as in `rates`, what no product of statistics can follow remains."""
    site = "z"
    guide = AutoCVI(model, max_joint_dim=0)
    cvi = CVI(model, guide)
    cvi.run(num_steps=150, tol=0.0)
    prepared = guide.prepared
    assert prepared is not None
    sampler = cvi._sampler(prepared, (), {})
    evaluator = cvi._evaluator_for(prepared)
    control = cvi._sweeper.control
    assert site in control
    sampler.count = 2
    found = {}
    for name, held in {"with": control, "without": {}}.items():
        draws = [sampler.estimate(evaluator, held).messages[site] for _ in range(400)]
        found[name] = [torch.stack([d[k] for d in draws]) for k in range(len(draws[0]))]
    belief = evaluator.beliefs[site]
    noise = {}
    for name, messages in found.items():
        norms = [
            fisher_norm(belief.family, belief.natural, tuple(m[i] - m.mean(0) for m in messages))
            for i in range(400)
        ]
        noise[name] = float(torch.stack(norms).mean())
    assert noise["without"] > factor * noise["with"]
    for a, b in zip(found["with"], found["without"], strict=True):
        error = ((a.var(0) + b.var(0)) / 400).sqrt()
        assert bool(((a.mean(0) - b.mean(0)).abs() < 5 * error + 1e-9).all())
