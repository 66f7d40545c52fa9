"""Every structure of a Gaussian block, masked and scaled, in both dtypes, against dense linear algebra.

    S = P + A^T diag(w / sigma^2) A,    m = S^-1 A^T diag(w / sigma^2) y,    w = mask * scale.

Rounding is bounded by that of a Cholesky factorisation, width eps cond(S) times a small constant, with
the numbers that meet in one entry for the width and S in the coordinates in which it is factorised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

T, SIGMA, SCALE = 220, 0.5, 0.7
LEVELS = 8
"""Of the parallel elimination of a chain: log2 T."""


@dataclass(frozen=True)
class Problem:
    """A model of one site z, with y ~ Normal(A z, SIGMA); and the prior precision and design of z."""

    model: Callable[[Tensor, Tensor], None]
    precision: Tensor
    design: Tensor
    structure: str
    width: int
    coordinates: Tensor
    slices: tuple[Tensor, ...] = ()
    most: int = 1000

    def condition(self, precision: Tensor, mean: Tensor, variance: Tensor) -> tuple[float, float]:
        """Of mean and variance, relative to their largest: both are differences of the coordinates."""
        c = self.coordinates.double()
        inverse = torch.linalg.inv(c)
        number = float(torch.linalg.cond(inverse.T @ precision @ inverse))
        spread = (c @ torch.linalg.inv(precision) @ c.T).diagonal().max()
        larger = float((c @ mean).abs().max() / mean.abs().max())
        return number * larger, number * max(float(spread / variance.max()), 1.0)


def observed(loc: Tensor, mask: Tensor, y: Tensor) -> None:
    with poutine.scale(scale=SCALE):
        pyro.sample("y", dist.Normal(loc, SIGMA).mask(mask).to_event(loc.ndim), obs=y)


def chain() -> Problem:
    def model(mask: Tensor, y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 3.0).expand([T]).to_event(1))
        steps = dist.Normal(z[1:] - z[:-1], 0.3).to_event(1)
        pyro.sample("steps", steps, obs=torch.zeros(T - 1))
        observed(z, mask, y)

    difference = torch.eye(T)[1:] - torch.eye(T)[:-1]
    prior = torch.eye(T) / 9 + difference.T @ difference / 0.09
    return Problem(model, prior.double(), torch.eye(T), "chain", 2 + LEVELS, torch.eye(T))


def cumulated() -> Problem:
    def model(mask: Tensor, y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 0.3).expand([T]).to_event(1))
        observed(z.cumsum(0), mask, y)

    sums = torch.ones(T, T).tril()
    return Problem(model, torch.eye(T) / 0.09, sums, "chain", 2 + LEVELS, sums)


def process() -> Problem:
    t = torch.linspace(0, 5, T, dtype=torch.float64)
    kernel = 2 * torch.exp(-0.5 * (t[:, None] - t) ** 2) + 0.05 * torch.eye(T, dtype=torch.float64)

    def model(mask: Tensor, y: Tensor) -> None:
        z = pyro.sample("z", dist.MultivariateNormal(torch.zeros(T), kernel.to(y.dtype)))
        observed(z, mask, y)

    return Problem(model, torch.linalg.inv(kernel), torch.eye(T), "process", T, torch.eye(T))


def sliced() -> Problem:
    x, mixing = torch.randn(T, 3), torch.tensor([[1.0, 0.5], [-0.3, 1.0]])

    def model(mask: Tensor, y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(3, 2), 2.0).to_event(2))
        rows = mixing.to(y.dtype)[torch.arange(T) % 2]
        observed(((x.to(y.dtype) @ z) * rows).sum(-1), mask, y)

    design = torch.einsum("ni,nk->nik", x, mixing[torch.arange(T) % 2]).reshape(T, 6)
    slices = (torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5]))
    return Problem(model, torch.eye(6) / 4, design, "sliced", 6, torch.eye(6), slices, most=3)


PROBLEMS = {f.__name__: f for f in (chain, cumulated, process, sliced)}


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_structure_has_the_moments_of_the_dense_posterior(name: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name]()
    mask, y = torch.rand(T) < 0.7, 3 * torch.randn(T)
    weight = mask.double() * SCALE / SIGMA**2
    precision = problem.precision.double() + (problem.design.T * weight) @ problem.design
    mean = torch.linalg.solve(precision, problem.design.T @ (weight * y))
    variance = torch.linalg.inv(precision).diagonal()
    for (
        part
    ) in problem.slices:  # independent slices have the joint mean and conditional covariances
        variance = variance.index_copy(
            0, part, torch.linalg.inv(precision[part[:, None], part]).diagonal()
        )
    torch.set_default_dtype(dtype)
    guide = AutoCVI(problem.model, max_dense_dim=problem.most)
    CVI(problem.model, guide).run(mask, y.to(dtype), num_steps=200, tol=1e-14)
    assert guide.block_of("z").structure == problem.structure
    q = guide.posterior("z")
    unit = 4 * problem.width * torch.finfo(dtype).eps
    of_mean, of_variance = problem.condition(precision, mean, variance)
    # Slices come nearer in steps, until the rounding of the bound hides what is left: the root of eps.
    most = 10 * torch.finfo(dtype).eps ** 0.5 if problem.slices else unit * of_mean
    assert float((q.mean.reshape(-1) - mean).abs().max() / mean.abs().max()) < most
    assert (
        float((q.variance.reshape(-1) - variance).abs().max() / variance.max()) < unit * of_variance
    )


def test_a_held_site_adds_its_variance_to_the_predictor(dtype: torch.dtype) -> None:
    """E exp(a + e) = E exp(a + s^2 / 2) for e ~ Normal(0, s) that keeps its prior."""
    torch.set_default_dtype(dtype)
    y, mask, s = torch.poisson(torch.full((T,), 4.0)), torch.rand(T) < 0.7, 0.6

    def model(held: bool) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", T):
            infer = {"posterior": "prior"}
            e = pyro.sample("e", dist.Normal(0.0, s), infer=infer) if held else s**2 / 2
            with poutine.scale(scale=SCALE), poutine.mask(mask=mask):
                pyro.sample("y", dist.Poisson((a + e).exp()), obs=y)

    found = []
    for held in (True, False):
        guide = AutoCVI(model)
        CVI(model, guide).run(held, num_steps=60, tol=1e-12)
        found.append(guide.posterior("a"))
    one, other = found
    # An acceptance test stops the steps where the bound's rounding hides them: the root of eps.
    tolerance = 10 * torch.finfo(dtype).eps ** 0.5
    assert float((one.loc - other.loc).abs() / other.scale) < tolerance
    assert float((one.scale / other.scale).log().abs()) < tolerance
