"""Two ways to one number: factors cell by cell, and through statistics contracted beforehand."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.algebra.expression import IDENTITY, SiteRef, Stat
from pyro_cvi.estimators import Moments
from pyro_cvi.estimators.products import Product
from pyro_cvi.estimators.squares import SquareOfMean
from pyro_cvi.estimators.statistics import Gather
from pyro_cvi.graph import Evaluator
from pyro_cvi.graph.evaluator import moments_of

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WORDS = torch.tensor([0, 3, 1, 1, 2, 0, 3])
DOCS = torch.tensor([0, 0, 1, 1, 1, 2, 2])


def diagonal_mixture(n=2000):
    x = X.repeat(-(-n // 7), 1)[:n]
    with pyro.plate("k", 4):
        mu = pyro.sample("mu", dist.Normal(X.mean(0), 2.0).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(2.0 * torch.ones(3), 1.0).to_event(1))
    with pyro.plate("n", n):
        z = pyro.sample("z", dist.Categorical(torch.ones(4) / 4))
        with poutine.scale(scale=1.5):
            pyro.sample("x", dist.Normal(mu[z], tau[z].rsqrt()).to_event(1), obs=x)


def full_mixture(n=2000):
    x = X.repeat(-(-n // 7), 1)[:n]
    with pyro.plate("k", 4):
        p = pyro.sample("p", dist.Wishart(torch.tensor(5.0), covariance_matrix=torch.eye(3)))
        mu = pyro.sample("mu", dist.MultivariateNormal(X.mean(0), torch.eye(3)))
    with pyro.plate("n", n):
        z = pyro.sample("z", dist.Categorical(torch.ones(4) / 4))
        pyro.sample("x", dist.MultivariateNormal(mu[z], precision_matrix=p[z]), obs=x)


def topics():
    with pyro.plate("docs", 3):
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("topics", 2):
        phi = pyro.sample("phi", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("words", 7):
        z = pyro.sample("z", dist.Categorical(theta[DOCS]))
        pyro.sample("w", dist.Categorical(phi[z]), obs=WORDS)


def factor_analysis(n=500, mask=None):
    x = X.repeat(-(-n // 7), 4)[:n]
    with pyro.plate("d", 12, dim=-1):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("n", n, dim=-2):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with (
            pyro.plate("d2", 12, dim=-1),
            poutine.mask(mask=torch.ones(()).bool() if mask is None else mask),
        ):
            pyro.sample("x", dist.Normal(z.squeeze(-2) @ w.T + b, tau.rsqrt()), obs=x)


def masked_factor_analysis():
    factor_analysis(mask=torch.arange(500 * 12).reshape(500, 12) % 5 != 0)


def factor_analysis_of_events(n=600):
    """Rows as events, their own level, a regression, a constant noise; one axis has no intercept."""
    x = 50.0 + X.repeat(-(-n // 7), 4)[:n]
    w = pyro.sample("w", dist.Normal(torch.zeros(12, 2), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(12), 50.0).to_event(1))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("n", n):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        mean = z @ w.T - 0.5 * b + level.unsqueeze(-1) + slope * x[:, :1]
        with poutine.scale(scale=0.5):
            pyro.sample("x", dist.Normal(mean, 1.5).to_event(1), obs=x)


def two_factors(n=400):
    """Two products in one mean, three sites in one of them, and a weight for each row."""
    x = X.repeat(-(-n // 7), 4)[:n]
    w = pyro.sample("w", dist.Normal(torch.zeros(12, 2), 1.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(12), 1.0).to_event(1))
    s = pyro.sample("s", dist.Normal(1.0, 0.1))
    with pyro.plate("n", n):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.Gamma(2.0, 2.0))
        mean = 3.0 + z @ w.T + s * u[:, None] * v
        noise = dist.Normal(mean, tau.rsqrt().unsqueeze(-1)).to_event(1)
        with poutine.mask(mask=torch.arange(n) % 3 != 0):
            pyro.sample("x", noise, obs=x)


def two_parents():
    with pyro.plate("a", 2, dim=-1), pyro.plate("b", 3, dim=-2):
        m = pyro.sample("m", dist.Normal(0.0, 3.0))
    with pyro.plate("n", 7, dim=-1):
        z1 = pyro.sample("z1", dist.Categorical(torch.ones(3) / 3))
        z2 = pyro.sample("z2", dist.Categorical(torch.ones(2) / 2))
        pyro.sample("x", dist.Normal(m[z1, z2], 1.0), obs=X[:, 0])


def switching_regression():
    with pyro.plate("k", 2):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("n", 7):
        z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
        pyro.sample("y", dist.Normal((X * w[z]).sum(-1), tau.rsqrt()), obs=X[:, 0])


def logistic_mixture():
    with pyro.plate("k", 2):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("n", 7):
        z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
        pyro.sample("y", dist.Bernoulli(logits=(X * w[z]).sum(-1)), obs=(X[:, 0] > 0).double())


def hidden_markov():
    with pyro.plate("k", 2):
        a = pyro.sample("a", dist.Dirichlet(torch.ones(2)))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with pyro.plate("n", 3):
        z = None
        for t in pyro.markov(range(7)):
            z = pyro.sample(f"z_{t}", dist.Categorical(torch.ones(2) / 2 if z is None else a[z]))
            with poutine.mask(mask=torch.arange(3) != t):
                pyro.sample(f"x_{t}", dist.Normal(mu[z], 1.0), obs=X[t])


MODELS = [
    diagonal_mixture, full_mixture, topics, factor_analysis, masked_factor_analysis,
    factor_analysis_of_events, two_factors, two_parents, switching_regression, logistic_mixture,
    hidden_markov,
]  # fmt: skip


def evaluator_of(model):
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi._sweeper.seeded = False
    for _ in range(2):
        cvi.step()
    return Evaluator(guide.plan, guide.beliefs())


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_statistics_give_the_value_and_the_gradient_of_the_cells(model):
    e = evaluator_of(model)
    for f in e.plan.factors:
        value = e.factor(f)
        moments, probabilities = moments_of(e.plan, e.leaves, e.beliefs)
        direct = f(moments, probabilities)
        torch.testing.assert_close(value, direct, atol=1e-9, rtol=1e-9)
        leaves = [x for b in e.plan.blocks if not b.is_discrete for x in e.leaves[b.name]]
        if not leaves or not value.requires_grad:
            continue
        mine = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
        other = torch.autograd.grad(direct, leaves, allow_unused=True)
        for a, b in zip(mine, other, strict=True):
            assert (a is None or not a.any()) if b is None else a is not None or not b.any()
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_messages_to_discrete_blocks_are_gradients_in_their_probabilities(model):
    e = evaluator_of(model)
    for block in e.plan.blocks:
        if e.plan.latents[block.sites[0]].support is None:
            continue
        moments, probabilities = moments_of(e.plan, e.leaves, e.beliefs)
        total = sum(f(moments, probabilities) for f in e.plan.factors_of(block.name))
        expected = torch.autograd.grad(total, e.leaves[block.name])
        for mine, other in zip(e.message(block), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("model", [diagonal_mixture, full_mixture], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_data_far_from_zero_keeps_its_digits_when_squares_are_taken_apart(
    model, dtype, monkeypatch
):
    torch.set_default_dtype(dtype)
    far = X.to(dtype) + 1e4
    monkeypatch.setitem(model.__globals__, "X", far)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi._sweeper.seeded = False
    for _ in range(3):
        loss = cvi.step()
    # The same in float64, with every square left whole.
    torch.set_default_dtype(torch.float64)
    monkeypatch.setitem(model.__globals__, "X", far.double())
    monkeypatch.setattr("pyro_cvi.estimators.expectation.separated", lambda product: None)
    other = AutoCVI(model)
    fresh = CVI(model, other)
    fresh._sweeper.seeded = False
    fresh.step()
    with torch.no_grad():
        for name, buffer in other.state_dict().items():
            buffer.copy_(guide.state_dict()[name].double())
    exact = fresh.evaluate_loss()
    assert loss == pytest.approx(exact, rel=1e-9 if dtype == torch.float64 else 1e-4)


# --- reading through an index ----------------------------------------------------------------------


def gathers():
    site = SiteRef("s", (3, 4), 0, "positive")
    every = torch.arange(12).reshape(3, 4)
    words = torch.tensor([1, 1, 3, 0, 2])
    yield "all of it", Gather(Stat(site, IDENTITY, every, (-2, -1)), 0, (3, 4))
    yield "columns", Gather(Stat(site, IDENTITY, every[:, words], (-2, -1)), 0, (3, 4))
    yield "transposed", Gather(Stat(site, IDENTITY, every[:, words].T, (-2, -1)), 0, (3, 4))
    yield (
        "rows and columns",
        Gather(Stat(site, IDENTITY, every[[2, 0]][:, words], (-2, -1)), 0, (3, 4)),
    )
    yield "one row", Gather(Stat(site, IDENTITY, every[1], (-1,)), 0, (3, 4))
    yield "one element", Gather(Stat(site, IDENTITY, every[1, 2], ()), 0, (3, 4))
    yield "a diagonal", Gather(Stat(site, IDENTITY, every[[0, 1, 2], [3, 1, 1]], (-1,)), 0, (3, 4))
    yield (
        "repeats",
        Gather(
            Stat(site, IDENTITY, every[:, words][None].expand(2, -1, -1), (-3, -2, -1)), 0, (3, 4)
        ),
    )
    one = SiteRef("s", (1, 4), 0, "positive")
    yield "an axis of one", Gather(Stat(one, IDENTITY, torch.arange(4), (-1,)), 0, (1, 4))


@pytest.mark.parametrize(("name", "gather"), list(gathers()), ids=[n for n, _ in gathers()])
def test_scattering_is_the_adjoint_of_reading(name, gather):
    size = torch.Size(gather.shape).numel()
    values = torch.randn(size)
    moments = Moments({}, {"s": (values.reshape(gather.shape),)})
    read = gather(moments)
    assert read.shape == gather.cells
    s = torch.randn(gather.cells)
    torch.testing.assert_close((s * read).sum(), (gather.scattered(s) * values).sum())
    thin = torch.randn([n if i == 0 else 1 for i, n in enumerate(gather.cells)])
    torch.testing.assert_close((thin * read).sum(), (gather.scattered(thin) * values).sum())


def test_large_squares_are_taken_apart_and_products_of_blocks_contracted():
    """The fast paths are in use: no component of a mixture has rows, states and coordinates."""
    for model, most in ((diagonal_mixture, 2000 * 4), (factor_analysis, 500 * 12)):
        e = evaluator_of(model)
        moments, _ = moments_of(e.plan, e.leaves, e.beliefs)
        (likelihood,) = [f for f in e.plan.factors if f.name == "x"]
        parts = [c for _, _, components in likelihood.expectation.terms for c in components]
        assert not any(isinstance(c, Product) for c in parts)
        assert max(c(moments).numel() for c in parts) <= most


# --- loops -----------------------------------------------------------------------------------------


def in_a_loop(y, x, how):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    if how == "plate":
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)
    else:
        for i in range(len(y)):
            pyro.sample(f"y_{i}", dist.Normal(x[i] @ w, tau.rsqrt()), obs=y[i])


def counts_in_a_loop(y, x, how):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    if how == "plate":
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Poisson((x @ w + b).exp()), obs=y.abs().round())
    else:
        for i in range(len(y)):
            rate = (x[i] @ w + b).exp()
            pyro.sample(f"y_{i}", dist.Poisson(rate), obs=y[i].abs().round())


def classes_in_a_loop(y, x, how):
    with pyro.plate("groups", 3):
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
    group = torch.arange(len(y)) % 3
    if how == "plate":
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Bernoulli(p[group]), obs=(y > 0).double())
    else:
        for i in range(len(y)):
            pyro.sample(f"y_{i}", dist.Bernoulli(p[group[i]]), obs=(y[i] > 0).double())


def censored_in_a_loop(y, x, how):
    """Every third statement is another distribution: it makes a stack of its own."""
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    odd = torch.arange(len(y)) % 3 == 0
    if how == "plate":
        with pyro.plate("a", int(odd.sum())):
            pyro.sample("a_y", dist.Normal(m, 2.0), obs=y[odd])
        with pyro.plate("b", int((~odd).sum())):
            pyro.sample("b_y", dist.LogNormal(m, 0.5), obs=y[~odd].exp())
    else:
        for i in range(len(y)):
            if odd[i]:
                pyro.sample(f"y_{i}", dist.Normal(m, 2.0), obs=y[i])
            else:
                pyro.sample(f"y_{i}", dist.LogNormal(m, 0.5), obs=y[i].exp())


def masked_in_a_loop(y, x, how):
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    kept = torch.arange(len(y)) % 4 != 1
    if how == "plate":
        with pyro.plate("n", len(y)), poutine.mask(mask=kept), poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(m, 2.0), obs=y)
    else:
        for i in range(len(y)):
            with poutine.mask(mask=kept[i]), poutine.scale(scale=0.5):
                pyro.sample(f"y_{i}", dist.Normal(m, 2.0), obs=y[i])


@pytest.mark.parametrize(
    "model",
    [in_a_loop, counts_in_a_loop, classes_in_a_loop, censored_in_a_loop, masked_in_a_loop],
    ids=lambda m: m.__name__,
)
def test_a_loop_of_statements_is_the_plate(model):
    y, x = torch.randn(12), torch.randn(12, 2)
    losses, guides = [], []
    for how in ("plate", "loop"):
        guide = AutoCVI(model)
        result = CVI(model, guide).run(y, x, how, num_steps=60, tol=1e-13)
        losses.append(result.losses[-1])
        guides.append(guide)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9, abs=1e-9)
    for a, b in itertools.pairwise([g.median() for g in guides]):
        for name in a:
            torch.testing.assert_close(a[name], b[name], atol=1e-7, rtol=1e-7)
    assert len(guides[1].plan.factors) <= 5  # the statements of the loop are one or two factors
    assert len([e for e in CVI(model, guides[1]).explain().edges]) > 10


@pytest.mark.parametrize("model", [factor_analysis, two_factors])
def test_the_square_of_a_product_forms_no_cells(model, monkeypatch):
    """Where no weight varies along rows and columns both."""
    e = evaluator_of(model)
    (f,) = [f for f in e.plan.factors if f.name == "x"]
    monkeypatch.setattr(SquareOfMean, "__call__", lambda *_: pytest.fail("cells were formed"))
    Evaluator(e.plan, e.beliefs).factor(f)


def test_squares_of_products_keep_their_digits_in_float32():
    """Data of mean 1e4 and unit noise: the intercept takes up the centre."""
    generator = torch.Generator().manual_seed(3)
    z, w = torch.randn(500, 2, generator=generator), torch.randn(12, 2, generator=generator)
    noise = torch.randn(500, 12, generator=generator)
    x = 1e4 + torch.arange(12.0) + z @ w.T + noise

    def model(x):
        one = x.new_ones(())
        with pyro.plate("d", 12, dim=-1):
            w = pyro.sample("w", dist.Normal(x.new_zeros(2), one).to_event(1))
            b = pyro.sample("b", dist.Normal(1e4 * one, 100 * one))
        tau = pyro.sample("tau", dist.Gamma(one, one))
        with pyro.plate("n", len(x), dim=-2):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), one).to_event(1))
            with pyro.plate("d2", 12, dim=-1):
                pyro.sample("x", dist.Normal(z.squeeze(-2) @ w.T + b, tau.rsqrt()), obs=x)

    found = []
    for dtype in (torch.float32, torch.float64):
        pyro.set_rng_seed(0)
        guide = AutoCVI(model)
        CVI(model, guide).run(x.to(dtype), num_steps=60, tol=0.0)
        found.append(guide.posterior("tau").mean.double())
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=0.0)
    assert 0.9 < float(found[1]) < 1.1
