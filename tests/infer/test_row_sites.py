"""Messages kept row by row: the optimum of all rows, however these are dealt out to batches."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import CVIError, CVIWarning

Law = Callable[[Tensor], dist.Distribution]
Model = Callable[..., None]
N, D = 120, 3
LAWS: dict[str, Law] = {
    "poisson": lambda eta: dist.Poisson(eta.exp()),
    "negative binomial": lambda eta: dist.NegativeBinomial(torch.tensor(5.0), logits=eta - 1.6),
    "gamma": lambda eta: dist.Gamma(2.0, 2.0 * (-eta).exp()),
    "exponential": lambda eta: dist.Exponential(eta.exp()),
    "binomial": lambda eta: dist.Binomial(1000, logits=eta),
    "student": lambda eta: dist.StudentT(3.0, eta, 0.1),
}
EQUAL, UNEQUAL = [40, 40, 40], [5, 70, 1, 44]


def problem(name: str, spread: float = 1.5) -> tuple[Model, Tensor, Tensor]:
    x, w = spread * torch.randn(N, D), torch.randn(D)
    y = LAWS[name](x @ w).sample()

    def model(x: Tensor, y: Tensor, rows: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 3.0).to_event(1))
        with pyro.plate("rows", N, subsample=rows) as i:
            pyro.sample("y", LAWS[name](x[i] @ w), obs=y[i])

    return model, x, y


def optimum(model: Model, *args: Tensor, **options: int) -> dist.Distribution:
    guide = AutoCVI(model, **options)
    CVI(model, guide).run(*args, num_steps=500, tol=1e-13)
    return guide.posterior("w")


def distance(q: dist.Distribution, best: dist.Distribution) -> float:
    """Of means in standard deviations, and of standard deviations in logarithms; the largest."""
    means = ((q.mean - best.mean) / best.stddev).abs().max()
    return float(torch.maximum(means, (q.stddev / best.stddev).log().abs().max()))


def fit(cvi: CVI, batches: Iterable[Tensor], *args: Tensor) -> dist.Distribution:
    for rows in batches:
        cvi.step(*args, rows)
    return cvi.guide.posterior("w")


def shuffled(passes: int, sizes: list[int]) -> Iterable[Tensor]:
    for _ in range(passes):
        yield from torch.randperm(N).split(sizes)


@pytest.mark.parametrize("name", LAWS)
def test_batches_that_are_mixed_anew_end_at_the_optimum_of_all_rows(name: str) -> None:
    model, x, y = problem(name)
    q = fit(CVI(model, AutoCVI(model)), shuffled(10, UNEQUAL), x, y)
    assert distance(q, optimum(model, x, y)) < 1e-3


def test_a_poisson_fit_that_starts_far_off_comes_back() -> None:
    """Counts up to 10^5, the start at a rate of one: the first steps overshoot by many deviations."""
    model, x, _ = problem("poisson", 2.0)
    eta = x @ torch.tensor([1.5, -1.5, 1.0])
    y = torch.poisson((eta - eta.max() + math.log(1e5)).exp())
    best, batches = optimum(model, x, y), list(shuffled(15, EQUAL))
    assert distance(fit(CVI(model, AutoCVI(model)), batches, x, y), best) < 1e-6
    torch.set_default_dtype(torch.float32)
    q = fit(CVI(model, AutoCVI(model)), batches, x.float(), y.float())
    # The slope of a row is a difference of counts of 1e5, rounded by 1e-7 each, in deviations of 300.
    assert distance(q, best) < 1e5 * 1e-7 * N / 300


def towards(
    q: dist.MultivariateNormal, x: Tensor, sites: Tensor, rho: float
) -> dist.MultivariateNormal:
    """A step of this size from q to the Gaussian of the prior and sites exp(xi eta + h eta^2)."""
    xi, h = sites.unbind(-1)
    target = torch.eye(D) / 9 - 2 * (x.T * h) @ x
    precision = q.precision_matrix + rho * (target - q.precision_matrix)
    slope = x.T @ (xi + 2 * h * (x @ q.mean)) - q.mean / 9
    loc = q.mean + rho * torch.linalg.solve(precision, slope)
    return dist.MultivariateNormal(loc, precision_matrix=precision)


def test_a_step_goes_where_the_last_messages_of_all_rows_say() -> None:
    """Poisson: h = -exp(m + v/2) / 2 and dE/dm = y - exp(m + v/2), with m and v of the last visit."""
    x = 0.5 * torch.randn(N, D)
    y = torch.poisson((x @ torch.tensor([0.3, -0.2, 0.1])).exp())
    model, *_ = problem("poisson")
    cvi, sites = CVI(model, AutoCVI(model)), torch.full((N, 2), torch.nan)
    q = dist.MultivariateNormal(torch.zeros(D), 0.01 * torch.eye(D))
    full = 0
    for t, rows in enumerate([*shuffled(3, EQUAL), torch.arange(3), torch.arange(90)]):
        own = x[rows]
        rate = (own @ q.mean + 0.5 * ((own @ q.covariance_matrix) * own).sum(-1)).exp()
        sites[rows] = torch.stack([y[rows] - rate + rate * (own @ q.mean), -0.5 * rate], -1)
        cvi.step(x, y, rows)
        new = cvi.guide.posterior("w")
        if t >= 2:  # the bend of these rows may have halved the step
            steps = [towards(q, x, sites, 0.5**k) for k in range(4)]
            apart = [max_difference(s, new) for s in steps]
            assert min(apart) < 1e-10
            full += apart[0] < 1e-10
        q = new
    assert full > 3


def max_difference(p: dist.MultivariateNormal, q: dist.MultivariateNormal) -> float:
    locs, precisions = p.loc - q.loc, p.precision_matrix - q.precision_matrix
    return float(torch.cat([locs, precisions.reshape(-1) / N]).abs().max())


def test_rows_that_come_twice_in_a_batch_and_batches_that_overlap() -> None:
    model, x, y = problem("poisson", 1.0)
    cvi = CVI(model, AutoCVI(model))
    fit(cvi, shuffled(1, EQUAL), x, y)
    q = fit(cvi, (torch.randint(N, (60,)) for _ in range(40)), x, y)
    assert distance(q, optimum(model, x, y)) < 1e-3


def test_an_intercept_an_offset_a_mask_and_a_second_plate() -> None:
    """Cells of rows by columns, some hidden; an exposure that is one number in some batches only."""
    x, exposure = torch.randn(N, 1), torch.ones(N, 1)
    exposure[40:] = 1 + torch.rand(N - 40, 1)
    mask = torch.rand(N, 4) < 0.8
    y = torch.poisson((exposure * (0.5 + x * torch.tensor([0.5, -0.5, 0.2, 0.0]))).exp())

    def model(rows: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 2.0).to_event(1))
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", N, subsample=rows, dim=-2) as i, pyro.plate("columns", 4, dim=-1):
            rate = (exposure[i] * (a + x[i] * w) + 0.3).exp()
            pyro.sample("y", dist.Poisson(rate).mask(mask[i]), obs=y[i])

    best = optimum(model)
    assert distance(fit(CVI(model, AutoCVI(model)), shuffled(8, [40, 80])), best) < 1e-3
    assert distance(fit(CVI(model, AutoCVI(model)), torch.arange(N).split(60) * 8), best) < 1e-3


def test_groups_keep_rows_too() -> None:
    """One small Gaussian for each group: a row informs its own."""
    x, group = torch.randn(N), torch.arange(N) % 4
    y = torch.poisson((0.5 + x * torch.linspace(-0.5, 0.5, 4)[group]).exp())

    def model(rows: Tensor | None = None) -> None:
        with pyro.plate("groups", 4):
            w = pyro.sample("w", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", N, subsample=rows) as i:
            pyro.sample("y", dist.Poisson((0.5 + x[i] * w[group[i]]).exp()), obs=y[i])

    cvi = CVI(model, AutoCVI(model))
    q = fit(cvi, shuffled(8, EQUAL))
    assert [(b.layout.count, b.layout.width) for b in cvi.guide.plan.blocks] == [(4, 1)]
    assert distance(q, optimum(model)) < 1e-4


def test_a_posterior_of_an_earlier_fit_stands_for_rows_not_seen_again() -> None:
    model, x, y = problem("gamma")
    guide = AutoCVI(model)
    CVI(model, guide).run(x, y, num_steps=100, tol=1e-13)
    best = guide.posterior("w")
    cvi = CVI(model, guide)
    for rows in shuffled(1, EQUAL):  # a batch is off its share by about a standard deviation
        assert distance(fit(cvi, [rows], x, y), best) < 2.0
    assert distance(fit(cvi, shuffled(4, EQUAL), x, y), best) < 1e-3


def test_a_batch_that_fails_leaves_the_rows_as_they_were() -> None:
    model, x, y = problem("poisson", 1.0)
    batches = list(shuffled(3, EQUAL))
    guides = AutoCVI(model), AutoCVI(model)
    one, other = (CVI(model, g) for g in guides)
    for k, rows in enumerate(batches):
        if k in (1, 5):
            with pytest.raises(CVIError):
                one.step(x, torch.full_like(y, torch.nan), rows.flip(0))
        one.step(x, y, rows)
        other.step(x, y, rows)
    assert torch.equal(guides[0].posterior("w").loc, guides[1].posterior("w").loc)


def test_a_saved_fit_goes_on_with_its_rows() -> None:
    model, x, y = problem("student")
    batches = list(shuffled(3, EQUAL))
    cvi, again = CVI(model, AutoCVI(model)), CVI(model, AutoCVI(model))
    fit(cvi, batches[:5], x, y)
    file = io.BytesIO()
    cvi.save(file)
    file.seek(0)
    again.load(file)
    assert torch.equal(fit(cvi, batches[5:], x, y).mean, fit(again, batches[5:], x, y).mean)


def test_rows_whose_predictor_changes_are_not_exchanged() -> None:
    """Covariates drawn anew: what a row said is unknown, and the decreasing steps serve."""
    model, x, y = problem("poisson", 0.5)
    cvi = CVI(model, AutoCVI(model))
    for rows in shuffled(10, EQUAL):
        cvi.step(x + 0.01 * torch.randn_like(x), y, rows)
    assert distance(cvi.guide.posterior("w"), optimum(model, x, y)) < 0.5


def test_elements_that_a_row_joins_keep_messages_by_batch() -> None:
    """A diagonal posterior: what a row says of one weight depends on the others."""
    x = torch.randn(N, D)
    y = x @ torch.tensor([1.0, -1.0, 0.5]) + 0.5 * torch.randn(N)

    def model(rows: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 3.0).to_event(1))
        with pyro.plate("rows", N, subsample=rows) as i:
            pyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])

    cvi = CVI(model, AutoCVI(model, max_dense_dim=2))
    ordered, mixed = fit(cvi, torch.arange(N).split(40) * 30), fit(cvi, shuffled(10, EQUAL))
    precision = torch.eye(D) / 9 + x.T @ x / 0.25  # the mean of a mean-field Gaussian is exact
    mean = torch.linalg.solve(precision, x.T @ y / 0.25)
    for q, tolerance in ((ordered, 1e-6), (mixed, 0.5)):
        assert float(((q.mean - mean) * precision.diagonal().sqrt()).abs().max()) < tolerance
        torch.testing.assert_close(q.variance, 1 / precision.diagonal(), rtol=2 * tolerance, atol=0)


def test_rows_with_two_observations_of_which_one_is_gaussian() -> None:
    x, w = torch.randn(N, D), torch.tensor([0.5, -0.5, 0.2])
    y, z = torch.poisson((x @ w).exp()), x @ w + torch.randn(N)

    def model(rows: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(D), 3.0).to_event(1))
        with pyro.plate("rows", N, subsample=rows) as i:
            pyro.sample("y", dist.Poisson((x[i] @ w).exp()), obs=y[i])
            pyro.sample("z", dist.Normal(x[i] @ w, 1.0), obs=z[i])

    assert distance(fit(CVI(model, AutoCVI(model)), shuffled(8, UNEQUAL)), optimum(model)) < 1e-4


def test_a_posterior_that_is_worse_than_the_start_is_told_of() -> None:
    """Steps that hardly move any more, and data that turn round in the last batch of the fourth pass."""

    def model(x: Tensor, rows: Tensor) -> None:
        m = pyro.sample("m", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", 60, subsample=rows) as i:
            pyro.sample("x", dist.Normal(m, 1.0), obs=x[i])

    x, batches = 5 + torch.randn(60), list(torch.arange(60).split(20)) * 4
    steady, turned = (
        CVI(model, AutoCVI(model), minibatch="stochastic", forget=1.0) for _ in range(2)
    )
    for rows in batches[:-1]:
        steady.step(x, rows)
        turned.step(x, rows)
    steady.step(x, batches[-1])  # a warning is an error
    with pytest.warns(CVIWarning, match="after 4 passes the bound of a minibatch .* at the start"):
        turned.step(-x, batches[-1])
