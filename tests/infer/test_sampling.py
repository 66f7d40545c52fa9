"""Sampled fits: the estimate of how far it is to the optimum, when they stop, and what can be chosen."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import digamma, gammaln
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, CVIError, CVIWarning
from pyro_cvi.averaging import ERROR, Averaging
from pyro_cvi.families import GAMMA
from pyro_cvi.graph import Evaluator
from pyro_cvi.sweep import _distance
from pyro_cvi.updates import FamilyBelief, GaussianBelief

Y = torch.tensor([1.3, 0.2, 2.5, 1.9], dtype=torch.float64)
COUNTS = torch.tensor([3.0, 1.0, 6.0, 2.0], dtype=torch.float64)


def hidden(z: Tensor) -> Tensor:
    """The value itself, by an operation that the algebra does not know: what comes after is sampled."""
    return torch.sort(torch.stack([z, z + 1], -1), -1).values[..., 0]


def normals() -> None:
    """Posterior N(y_i / 1.25, 1 / 1.25 * 0.25): conjugate, though nobody sees it."""
    with pyro.plate("n", 4):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(hidden(z), 0.5), obs=Y)


def gammas() -> None:
    """Posterior Gamma(2 + y_i, 2)."""
    with pyro.plate("n", 4):
        z = pyro.sample("z", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(hidden(z)), obs=COUNTS)


def simplexes() -> None:
    """Posterior Dirichlet(1 + counts)."""
    p = pyro.sample("z", dist.Dirichlet(torch.ones(4, dtype=torch.float64)))
    pyro.factor("y", (COUNTS * hidden(p).log()).sum())


def logistic() -> None:
    """Nothing is conjugate here."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)
    with pyro.plate("k", 3):
        w = pyro.sample("z", dist.Normal(0.0, 2.0))
    logits = torch.stack([hidden(x * w[0] + w[1]), w[2] * x.square(), 0 * x], -1)
    with pyro.plate("n", 20):
        pyro.sample("y", dist.Categorical(logits=logits), obs=torch.arange(20) % 3)


EXACT = {normals: (Y / 1.25, 0.2), gammas: ((2 + COUNTS) / 2, None), simplexes: None}


def fitted(model: object, steps: int, **options: object) -> tuple[CVI, AutoCVI]:
    guide = AutoCVI(model, max_joint_dim=0)
    cvi = CVI(model, guide, **options)
    for _ in range(steps):
        cvi.step()
    return cvi, guide


# --- residual and noise ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [normals, gammas, simplexes])
def test_two_halves_estimate_the_distance_without_bias(model):
    """E[d1^T F d2] = d^T F d, which a conjugate model behind an unknown operation knows exactly."""
    cvi, guide = fitted(model, 1)
    prepared = guide.prepared
    evaluator = Evaluator(prepared.plan, guide.beliefs())
    (block,) = prepared.plan.blocks
    belief = evaluator.beliefs[block.name]
    if model is normals:
        precision = 5.0 * torch.eye(4, dtype=torch.float64)
        slope = 5.0 * (Y / 1.25 - belief.loc)
        exact = belief.direction([slope, -0.5 * precision.unsqueeze(0)])
    elif model is gammas:
        exact = tuple(
            t - n
            for t, n in zip(
                belief.family.from_distribution(dist.Gamma(2 + COUNTS, torch.full((4,), 2.0).double())),
                belief.natural, strict=True,
            )
        )  # fmt: skip
    else:
        (n,) = belief.natural
        (t,) = belief.family.from_distribution(dist.Dirichlet(1 + COUNTS))
        exact = (t - n,)
    sampler = cvi._sampler(prepared, (), {})
    pairs = [
        _distance(
            evaluator.beliefs,
            cvi._sweeper._directions(
                evaluator, [block], sampler.estimate(evaluator, {}, seed=i, groups=2)
            ),
        )
        for i in range(200)
    ]
    residual = torch.tensor([r for r, _ in pairs])
    expected = float(belief.inner(exact, exact).sum())
    error = float(residual.std()) / math.sqrt(len(residual))
    # Orthogonal directions make the halves of a Gaussian's draws a little dependent: not here, d = 1.
    assert abs(float(residual.mean()) - expected) < 4 * error
    assert all(noise >= 0 for _, noise in pairs)


def test_noise_of_the_messages_is_that_of_repeated_estimates():
    cvi, guide = fitted(logistic, 3, num_samples=64)
    prepared = guide.prepared
    evaluator = Evaluator(prepared.plan, guide.beliefs())
    (block,) = prepared.plan.blocks
    belief = evaluator.beliefs[block.name]
    sampler = cvi._sampler(prepared, (), {})
    control = cvi._sweeper.control
    draws = [sampler.estimate(evaluator, control, seed=i).messages[block.name] for i in range(60)]
    mean = [torch.stack(x).mean(0) for x in zip(*draws, strict=True)]
    squares = [
        float(belief.inner(*[tuple(a - m for a, m in zip(d, mean, strict=True))] * 2).sum())
        for d in draws
    ]
    direct = sum(squares) / 59
    reported = [cvi.message_noise()["z"] for _ in range(10)]
    assert direct / 2 < sum(reported) / 10 < 2 * direct


def test_noise_falls_with_the_number_of_draws_and_needs_two_groups():
    few, _ = fitted(logistic, 5)
    many, _ = fitted(logistic, 5, num_samples=256)
    assert sum(many.message_noise()["z"] for _ in range(5)) < sum(
        few.message_noise()["z"] for _ in range(5)
    )
    with pytest.raises(CVIError, match="num_groups"):
        few.message_noise(num_groups=1)


# --- stopping and averaging ------------------------------------------------------------------------


@pytest.mark.parametrize("model", [normals, gammas, simplexes])
def test_a_sampled_run_stops_by_itself_at_the_optimum(model):
    guide = AutoCVI(model, max_joint_dim=0)
    result = CVI(model, guide).run(num_steps=400)
    assert result.converged and "within 0.001 nats" in result.reason
    assert 10 <= result.num_steps < 60
    q = guide.posterior("z")
    if model is normals:
        mean, sd = Y / 1.25, math.sqrt(0.2)
    elif model is gammas:
        mean, sd = (2 + COUNTS) / 2, ((2 + COUNTS) / 4).sqrt()
    else:
        exact = dist.Dirichlet(1 + COUNTS)
        mean, sd = exact.mean, exact.variance.sqrt()
    # Squared distance ERROR a scalar is 0.03 standard deviations of a mean; four times that is a bound.
    assert float(((q.mean - mean) / sd).abs().max()) < 4 * math.sqrt(ERROR)


def sums() -> None:
    """The rate is a function of the sum of five Gammas."""
    with pyro.plate("k", 5):
        z = pyro.sample("z", dist.Gamma(1.0, 1.0))
    with pyro.plate("n", 3):
        rate = 3 * torch.log1p(z.sum())
        pyro.sample("y", dist.Poisson(rate), obs=torch.tensor([4.0, 6.0, 5.0]))


def optimum_of_sums() -> tuple[float, float]:
    """The best q(z) = Gamma(a, b)^5: then the sum is Gamma(5 a, b), and the bound one integral."""

    def negative_bound(p: np.ndarray) -> float:
        a, b = np.exp(p)
        u = np.linspace(-12, 6, 4001)  # log of the sum
        x = np.exp(u)
        density = np.exp(5 * a * (np.log(b) + u) - b * x - gammaln(5 * a))
        rate = 3 * np.log1p(x)
        likelihood = np.trapezoid(density * (15 * np.log(rate) - 3 * rate), u)
        entropy = a - np.log(b) + gammaln(a) + (1 - a) * digamma(a)
        return float(-likelihood + 5 * (a / b - entropy))

    found = minimize(negative_bound, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9})
    return float(np.exp(found.x[0])), float(np.exp(found.x[1]))


def test_the_average_is_nearer_to_the_optimum_than_the_last_step():
    """Of fits of a fixed length, on a model whose noise does not vanish."""
    a, b = (torch.full((5,), x) for x in optimum_of_sums())
    best = FamilyBelief(GAMMA, GAMMA.from_distribution(dist.Gamma(a, b)))
    last, mean = [], []
    for seed in range(8):
        guide = AutoCVI(sums, max_joint_dim=0)
        cvi = CVI(sums, guide, num_samples=4, antithetic=False, seed=seed)
        kept = {}
        average = cvi._average
        cvi._average = lambda *a, g=guide, k=kept, f=average: (k.update(g.beliefs()), f(*a))
        cvi.run(num_steps=200, tol=0.0)
        last.append(float(best.kl(kept["z"])))
        mean.append(float(best.kl(guide.beliefs()["z"])))
    assert sum(mean) < 0.5 * sum(last)


def test_a_run_that_stops_by_its_average_is_as_near_as_it_says():
    a, b = (torch.full((5,), x) for x in optimum_of_sums())
    best = FamilyBelief(GAMMA, GAMMA.from_distribution(dist.Gamma(a, b)))
    left = []
    for seed in range(5):
        guide = AutoCVI(sums, max_joint_dim=0)
        result = CVI(sums, guide, seed=seed).run(num_steps=400)
        assert result.converged
        left.append(2 * float(best.kl(guide.beliefs()["z"])))
    assert sum(left) / 5 < 3 * ERROR * 5


def test_tol_zero_takes_all_steps():
    assert (
        CVI(normals, AutoCVI(normals, max_joint_dim=0)).run(num_steps=60, tol=0.0).num_steps == 60
    )


def test_an_average_far_from_zero_keeps_its_digits():
    """Locations of 1e6 with unit spread, in float32."""
    averaging = Averaging()
    for i in range(4):
        loc = torch.tensor([[1e6 + i]])
        averaging.add({"z": GaussianBelief(loc, torch.ones(1, 1, 1))})
    found = averaging.beliefs({"z": GaussianBelief(loc, torch.ones(1, 1, 1))})["z"]
    assert float(found.loc) == pytest.approx(1e6 + 1.5, abs=0.1)


# --- options ---------------------------------------------------------------------------------------


def test_a_seed_makes_fits_repeatable_and_leaves_the_global_state_alone():
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        guide = AutoCVI(normals, max_joint_dim=0, init_loc_fn=pyro.infer.autoguide.init_to_mean)
        cvi = CVI(normals, guide, seed=5)
        cvi.step()
        before = torch.get_rng_state()
        for _ in range(5):
            cvi.step()
        cvi.message_noise()
        assert torch.equal(before, torch.get_rng_state())
        found.append((guide.posterior("z").mean, cvi.evaluate_loss()))
    torch.testing.assert_close(found[0], found[1])
    other = CVI(normals, AutoCVI(normals, max_joint_dim=0), seed=6)
    other.run(num_steps=6)
    assert not torch.equal(other.guide.posterior("z").mean, found[0][0])


@pytest.mark.parametrize("model", [gammas, simplexes])
def test_the_sampled_fisher_matrix_agrees_with_the_analytic_one(model):
    """From the same draws an affine factor's message has no noise at all (the paper's way)."""
    exact, _ = fitted(model, 1, seed=1)
    sampled, guide = fitted(model, 1, seed=1, fisher="sampled")
    prepared = guide.prepared
    (block,) = prepared.plan.blocks
    evaluator = Evaluator(prepared.plan, guide.beliefs())
    messages = {
        name: cvi._sampler(prepared, (), {}).estimate(evaluator, {}, seed=3).messages[block.name]
        for name, cvi in (("exact", exact), ("sampled", sampled))
    }
    if model is gammas:
        wanted = (COUNTS, -torch.ones(4, dtype=torch.float64))
    else:
        wanted = (COUNTS,)
    for got, want in zip(messages["sampled"], wanted, strict=True):
        free = got - got.mean() + want.mean() if model is simplexes else got
        torch.testing.assert_close(free, want, rtol=1e-6, atol=1e-6)
    assert any(
        float((a - b).abs().max()) > 1e-3
        for a, b in zip(messages["exact"], messages["sampled"], strict=True)
    )


def test_draws_without_antithetic_pairs_have_the_same_mean_and_more_noise():
    noises = {}
    for antithetic in (True, False):
        cvi, guide = fitted(normals, 1, seed=2, antithetic=antithetic)
        evaluator = Evaluator(guide.plan, guide.beliefs())
        sampler = cvi._sampler(guide.prepared, (), {})
        draws = [sampler.estimate(evaluator, {}, seed=i).messages["z"][0] for i in range(200)]
        values = torch.stack(draws)
        noises[antithetic] = values.std(0).mean()
        expected = (Y - evaluator.beliefs["z"].loc) / 0.25
        error = values.std(0) / math.sqrt(200)
        assert bool(((values.mean(0) - expected).abs() <= 4 * error + 1e-9).all())
    assert noises[True] < 1e-6 < noises[False]


def test_gradients_that_are_never_finite_are_an_error():
    """sqrt(0 z) has the value 0 and no slope: without a word the site would keep its start."""

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("f", -((hidden(z) - 2).square()) + (0 * hidden(z)).sqrt())

    with pytest.raises(CVIError, match="'z'.*not finite"):
        CVI(model, AutoCVI(model, max_joint_dim=0)).run(num_steps=50)


def test_residuals_that_are_clearly_negative_are_not_near() -> None:
    """Draws with heavy tails may make them so; near is near zero on both sides."""
    clouds = {"near": (0.0, True), "far above": (1.0, False), "far below": (-1.0, False)}
    for shift, expected in clouds.values():
        averaging = Averaging(scalars=3)
        for i in range(12):
            averaging.observe(shift + 1e-5 * (-1) ** i, 1e-5, 0.5)
        assert averaging.is_near is expected


def test_few_residuals_that_agree_by_accident_are_not_near() -> None:
    averaging = Averaging(scalars=2)
    for _ in range(12):
        averaging.observe(1e-5, 0.02, 0.5)  # the noise says that they are known to 0.01 only
    assert not averaging.is_near


def test_a_wide_gaussian_block_has_independent_halves() -> None:
    """Of 12 scalars the residual has no bias either: directions are orthogonal within a half only."""
    x = torch.randn(40, 12)
    y = (x @ torch.randn(12) > 0).double()

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(12), 1.0).to_event(1))
        logits = (x @ w).sort().values[(x @ w).argsort().argsort()]  # no rule follows a sort
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    def same(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(12), 1.0).to_event(1))
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    exact = AutoCVI(same, max_joint_dim=0)
    steps = CVI(same, exact)
    steps.step(y)
    guide = AutoCVI(model, max_joint_dim=0)
    cvi = CVI(model, guide)
    guide.prepare(model, (y,), {})
    belief = exact.belief(exact.plan.blocks[0])
    guide.set_belief(guide.plan.blocks[0], belief)
    # The true distance, by quadrature.
    evaluator = Evaluator(exact.plan, exact.beliefs())
    d = belief.direction(evaluator.message(exact.plan.blocks[0]))
    true = float(belief.inner(d, d).sum())
    sampled = Evaluator(guide.plan, guide.beliefs())
    sampler = cvi._sampler(guide.prepared, (y,), {})
    found = []
    for _ in range(60):
        estimate = sampler.estimate(sampled, {}, groups=2)
        directions = cvi._sweeper._directions(sampled, list(guide.plan.blocks), estimate)
        found.append(_distance(sampled.beliefs, directions)[0])
    mean, error = np.mean(found), np.std(found) / len(found) ** 0.5
    assert abs(mean - true) < 4 * error
    assert error < 0.5 * true + 0.1


def test_a_prior_behind_what_is_sampled_still_counts() -> None:
    """z ~ Normal(0, a + b): the sum is sampled, and z hears of it."""
    y = torch.randn(40) * 0.5

    def model(y: Tensor) -> None:
        a = pyro.sample("a", dist.Gamma(2.0, 20.0))
        b = pyro.sample("b", dist.Gamma(2.0, 20.0))
        with pyro.plate("data", 40):
            z = pyro.sample("z", dist.Normal(0.0, a + b))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = AutoCVI(model, max_joint_dim=0)
    cvi = CVI(model, guide, seed=0)
    cvi.run(y, num_steps=200)
    assert ("z", "z") in {(e.factor, e.site) for e in cvi.explain().edges}
    q, c = guide.posterior("z"), {n: guide.posterior(n) for n in "ab"}
    draws = c["a"].sample((20000,)) + c["b"].sample((20000,))
    precision = 1 + float((draws**-2).mean())
    torch.testing.assert_close(q.variance, torch.full((40,), 1 / precision), rtol=0.1, atol=0)
    torch.testing.assert_close(q.mean, y / precision, rtol=0.1, atol=1e-3)


def test_a_dirichlet_whose_concentration_is_a_multiple_of_a_latent_counts_it() -> None:
    counts = torch.tensor([[3.0, 5.0, 12.0], [1.0, 9.0, 10.0]])

    def model(c: Tensor) -> None:
        b = pyro.sample("b", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("data", 2):
            t = pyro.sample("t", dist.Dirichlet(10 * b))
            pyro.sample("c", dist.Multinomial(20, probs=t, validate_args=False), obs=c)

    guide = AutoCVI(model, max_joint_dim=0)
    CVI(model, guide, seed=0).run(counts)
    expected = counts + 10 * guide.posterior("b").mean
    torch.testing.assert_close(guide.posterior("t").concentration, expected, rtol=0.02, atol=0)


def test_a_seed_fixes_the_fit_whatever_the_global_state() -> None:
    x = dist.Poisson(torch.ones(12, 5)).sample()

    def model(x: Tensor) -> None:
        w = pyro.sample("w", dist.Gamma(0.5 * torch.ones(2, 5), 0.5).to_event(2))
        with pyro.plate("rows", 12):
            z = pyro.sample("z", dist.Gamma(0.5 * torch.ones(2), 0.5).to_event(1))
            pyro.sample("x", dist.Poisson(z @ w).to_event(1), obs=x)

    found = []
    for s in (0, 1):
        pyro.set_rng_seed(s)
        guide = AutoCVI(model, max_joint_dim=0)
        cvi = CVI(model, guide, seed=3)
        state = torch.get_rng_state()
        cvi.run(x, num_steps=8)
        assert torch.equal(state, torch.get_rng_state())
        found.append(guide.median()["w"])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_local_posteriors_of_sampled_sites_are_at_their_optimum() -> None:
    """Those of the rows of the fit are the fitted ones, to a small part of a nat for each."""
    w = torch.tensor([1.0, 2.0, 0.5])
    x = dist.Poisson(dist.Gamma(1.0, 1.0).sample((30, 3)) @ w).sample()

    def model(x: Tensor) -> None:
        t = pyro.sample("t", dist.Gamma(20.0, 20.0))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Gamma(torch.ones(3), 1.0).to_event(1))
            pyro.sample("x", dist.Poisson(t * (z * w).sum(-1)), obs=x)

    guide = AutoCVI(model, max_joint_dim=0)
    cvi = CVI(model, guide, seed=0)
    cvi.run(x, num_steps=300)
    local = cvi.local_posteriors(x, plates=["rows"])
    q, p = (g.posterior("z").base_dist for g in (guide, local))
    assert float(torch.distributions.kl_divergence(p, q).sum()) / x.numel() < 0.05
    whole, again = cvi.evaluate_loss(x), CVI(model, local).evaluate_loss(x)
    assert again == pytest.approx(whole, abs=0.1 * x.numel())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"seed": True}, "seed"), ({"seed": 2**70}, "seed"), ({"seed": -1}, "seed"),
        ({"antithetic": "no"}, "antithetic"), ({"num_samples": 2.5}, "num_samples"),
    ],
)  # fmt: skip
def test_options_of_the_wrong_kind_are_named(options: dict, what: str) -> None:
    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(CVIError, match=what):
        CVI(model, AutoCVI(model, max_joint_dim=0), **options)


@pytest.mark.parametrize("options", [{"num_steps": 2.5}, {"num_restarts": 1.5}, {"tol": math.nan}])
def test_arguments_of_a_run_of_the_wrong_kind_are_named(options: dict) -> None:
    def model() -> None:
        pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(CVIError, match=next(iter(options))):
        CVI(model, AutoCVI(model, max_joint_dim=0)).run(**options)


def test_a_trusted_step_is_positive_definite_to_rounding() -> None:
    """In float32, where the least eigenvalue of a precision is lost in the rounding of the largest."""

    def precision(basis: Tensor, least: float) -> Tensor:
        values = torch.logspace(1.5, 3, 12)
        values[0] = least
        return ((basis * values) @ basis.mT).float().unsqueeze(0)

    for seed in range(30):
        torch.manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(12, 12)).Q
        zero = torch.zeros(1, 12, dtype=torch.float32)
        old = GaussianBelief(zero, precision(basis, 3e-5)).like((zero, precision(basis, 3e-5)))
        if old is not None and old.like((zero, old.precision.flip(-2, -1))) is not None:
            moved = GaussianBelief(zero, precision(basis, 1e-6)).trusted(old, 4.0)
            torch.testing.assert_close(moved.factor, torch.linalg.cholesky(moved.precision))
            assert bool(moved.scale_tril.isfinite().all())


@pytest.mark.parametrize(
    ("width", "draws", "warns"), [(70, 16, True), (70, 140, False), (60, 16, False)]
)
def test_wide_blocks_from_few_draws_are_warned_of(width, draws, warns):
    """A covariance of 70 scalars is not known from 16 draws: such a fit may end anywhere."""

    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(width), 1.0).to_event(1))
        pyro.sample("y", dist.Normal((w * w.flip(0)).cumsum(0).cos().sum(), 1.0), obs=y)

    cvi = CVI(model, AutoCVI(model, max_joint_dim=0), num_samples=draws)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cvi.step(torch.tensor(1.0))
    told = [str(w.message) for w in found if issubclass(w.category, CVIWarning)]
    assert [bool("diagonal" in t and "'w'" in t) for t in told] == ([True] if warns else [])
