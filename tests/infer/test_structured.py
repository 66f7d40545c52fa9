"""Structured Gaussian blocks: the same posterior as a dense block, and everything a guide can do."""

import io
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, CVIError, CVIWarning, explain
from pyro_cvi.graph import blocks


def kernel(t: Tensor, scale: float = 1.0) -> Tensor:
    return scale**2 * torch.exp(-0.5 * (t[:, None] - t) ** 2 / 0.3) + 1e-6 * torch.eye(len(t))


T = torch.linspace(0, 4, 60)


def classification(y: Tensor) -> None:
    f = pyro.sample("f", dist.MultivariateNormal(0.3 * torch.ones(60), kernel(T)))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=(y > 0).double())


def on_a_subset(y: Tensor) -> None:
    """Observed at some points, some of them twice, through an affine map."""
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
    at = torch.arange(0, 60, 4)
    with pyro.plate("data", len(at)):
        pyro.sample("y", dist.Poisson((0.5 + 2 * f[at]).exp()), obs=(10 * y[at].abs()).floor())
        pyro.sample("z", dist.Normal(f[at], 0.5), obs=y[at])


def heteroscedastic(y: Tensor) -> None:
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
    g = pyro.sample("g", dist.MultivariateNormal(-torch.ones(60), kernel(T, 0.5)))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Normal(f, g.exp()), obs=y)


def process_with_noise(y: Tensor) -> None:
    """A latent precision beside it, updated in turn."""
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Normal(f, tau.rsqrt()), obs=y)


def wide_regression(y: Tensor) -> None:
    x = torch.sin(torch.arange(20.0)[:, None] * torch.arange(1.0, 241.0))
    with pyro.plate("features", 240):
        w = pyro.sample("w", dist.Normal(0.0, 0.2))
    b = pyro.sample("b", dist.Normal(0.0, 3.0))
    with pyro.plate("data", 20):
        pyro.sample("y", dist.Bernoulli(logits=b + x @ w), obs=(y[:20] > 0).double())


def relevance(y: Tensor) -> None:
    """A latent precision for each weight, of more weights than rows."""
    x = torch.sin(torch.arange(20.0)[:, None] * torch.arange(1.0, 241.0))
    with pyro.plate("features", 240):
        tau = pyro.sample("tau", dist.Gamma(2.0, 0.1))
        w = pyro.sample("w", dist.Normal(0.0, tau.rsqrt()))
    with pyro.plate("data", 20):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y[:20])


def markov(y: Tensor) -> None:
    x: Any = None
    for t in pyro.markov(range(210)):
        x = pyro.sample(f"x_{t}", dist.Normal(0.0 if x is None else x, 0.3))
        if t % 3:  # missing time points
            pyro.sample(f"y_{t}", dist.Poisson(x.exp()), obs=(3 * y[t % 60].abs()).floor())


def second_order(y: Tensor) -> None:
    """An autoregression of order two, with its noise level and a regression beside it."""
    n = 240
    z = pyro.sample("z", dist.Normal(0.0, 2.0).expand([n]).to_event(1))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(3.0, 1.0))
    pyro.sample(
        "d", dist.Normal(z[2:] - 1.2 * z[1:-1] + 0.4 * z[:-2], tau.rsqrt()).to_event(1),
        obs=torch.zeros(n - 2),
    )  # fmt: skip
    s = torch.linspace(-1, 1, n)
    predictor = z + torch.stack([s, s**2], -1) @ beta
    with pyro.plate("time", n):
        pyro.sample("y", dist.StudentT(4.0, predictor, 0.5), obs=y.repeat(4))


def trend(y: Tensor) -> None:
    """A state of two dimensions, in two sites."""
    n = 120
    level = pyro.sample("level", dist.Normal(0.0, 5.0).expand([n]).to_event(1))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([n]).to_event(1))
    zero = torch.zeros(n - 1)
    moved = level[1:] - level[:-1] - slope[:-1]
    pyro.sample("dl", dist.Normal(moved, 0.1).to_event(1), obs=zero)
    pyro.sample("ds", dist.Normal(slope[1:] - slope[:-1], 0.05).to_event(1), obs=zero)
    with pyro.plate("time", n):
        pyro.sample("y", dist.Normal(level, 0.5), obs=y.repeat(2))


def many_series(y: Tensor) -> None:
    """Several series with a common drift."""
    drift = pyro.sample("drift", dist.Normal(0.0, 1.0))
    with pyro.plate("series", 8):
        x = pyro.sample("x", dist.Normal(0.0, 2.0).expand([40]).to_event(1))
        step = x[..., 1:] - x[..., :-1] - drift
        pyro.sample("d", dist.Normal(step, 0.2).to_event(1), obs=torch.zeros(39))
        data = (y[:40] + torch.arange(8.0)[:, None] > 3).double()
        pyro.sample("y", dist.Bernoulli(logits=x).to_event(1), obs=data)


def crossed(y: Tensor) -> None:
    """Many groups crossed with a few, global effects, and a latent precision."""
    n = 900
    g, h = torch.arange(n) * 7 % 300, torch.arange(n) * 5 % 4
    x = torch.stack([torch.sin(torch.arange(float(n))), torch.cos(3 * torch.arange(float(n)))], -1)
    a = pyro.sample("a", dist.Normal(0.0, 5.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.Gamma(2.0, 2.0))
    with pyro.plate("few", 4):
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
    with pyro.plate("many", 300):
        u = pyro.sample("u", dist.Normal(0.0, tau.rsqrt()))
    with pyro.plate("data", n):
        rate = (0.3 * a + (x * beta).sum(-1) + u[g] + v[h]).exp()
        pyro.sample("y", dist.Poisson(rate), obs=(2 * y.repeat(15).abs()).floor())


def slopes(y: Tensor) -> None:
    """Intercepts and slopes with means and scales of their own: products of shared and local scalars."""
    n = 480
    g = torch.arange(n) % 120
    x = torch.sin(1.7 * torch.arange(float(n)))
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    s = pyro.sample("s", dist.Normal(-1.0, 0.5))
    with pyro.plate("groups", 120):
        u = pyro.sample("u", dist.Normal(mu, s.exp()))
        w = pyro.sample("w", dist.Normal(0.0, 0.5))
    with pyro.plate("data", n):
        pyro.sample("y", dist.Normal(u[g] + x * w[g], 0.8), obs=y.repeat(8))


def masked_and_scaled(y: Tensor) -> None:
    """Missing rows, rows that count for several, and a prior that is tempered."""
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
    keep, weight = torch.arange(60) % 4 > 0, 1.0 + torch.arange(60) % 3
    with pyro.plate("data", 60), poutine.mask(mask=keep), poutine.scale(scale=weight):
        pyro.sample("y", dist.Poisson(f.exp()), obs=(3 * y.abs()).floor())


def masked_series(y: Tensor) -> None:
    """A chain with gaps in its data, cells whose prior does not count, and a scale around all."""
    n = 240
    with poutine.scale(scale=0.5):
        z = pyro.sample("z", dist.Normal(0.0, 2.0).expand([n]).to_event(1))
        zero = torch.zeros(n - 1)
        with pyro.plate("steps", n - 1), poutine.mask(mask=torch.arange(n - 1) % 50 > 0):
            pyro.sample("d", dist.Normal(z[1:] - z[:-1], 0.3), obs=zero)
        with pyro.plate("time", n):
            pyro.sample(
                "y", dist.Bernoulli(logits=z).mask(torch.arange(n) % 5 > 0),
                obs=(y.repeat(4) > 0).double(),
            )  # fmt: skip


MODELS: dict[str, tuple[Callable[..., None], str, tuple[str, ...]]] = {
    "classification": (classification, "process", ("f",)),
    "on_a_subset": (on_a_subset, "process", ("f",)),
    "heteroscedastic": (heteroscedastic, "process", ("f", "g")),
    "process_with_noise": (process_with_noise, "process", ("f", "tau")),
    "wide_regression": (wide_regression, "process", ("w", "b")),
    "relevance": (relevance, "process", ("w", "tau")),
    "markov": (markov, "chain", ("x_0", "x_3", "x_209")),
    "second_order": (second_order, "chain", ("z", "beta", "tau")),
    "trend": (trend, "chain", ("level", "slope")),
    "many_series": (many_series, "chain", ("drift", "x")),
    "crossed": (crossed, "chain", ("a", "beta", "v", "u", "tau")),
    "slopes": (slopes, "chain", ("mu", "s", "u", "w")),
    "masked_and_scaled": (masked_and_scaled, "process", ("f",)),
    "masked_series": (masked_series, "chain", ("z",)),
}


def data() -> Tensor:
    return torch.sin(2 * T) + 0.3 * torch.cos(37 * torch.arange(60.0))


def fitted(model: Callable[..., None], **options: Any) -> tuple[AutoCVI, float]:
    guide = AutoCVI(model, max_dense_dim=2000)
    cvi = CVI(model, guide)
    losses = cvi.run(data(), num_steps=200, tol=1e-12, **options).losses
    assert all(b <= a + 1e-8 * abs(a) for a, b in zip(losses, losses[1:], strict=False))
    return guide, losses[-1]


@pytest.mark.parametrize("name", MODELS)
def test_the_posterior_is_that_of_a_dense_block(name: str, monkeypatch: Any) -> None:
    model, structure, sites = MODELS[name]
    guide, loss = fitted(model)
    assert structure in {b.structure for b in guide.plan.blocks}
    monkeypatch.setattr(blocks, "_viewed", lambda *args: None)
    dense, other = fitted(model)
    assert structure not in {b.structure for b in dense.plan.blocks}
    assert loss == pytest.approx(other, rel=1e-7, abs=1e-7)
    for s in sites:
        spread = dense.posterior(s).variance.sqrt()
        apart = (guide.median()[s] - dense.median()[s]).abs() / spread
        assert float(apart.max()) < 2e-3, s
        ratio = guide.posterior(s).variance.sqrt() / spread
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["classification", "relevance", "second_order", "crossed"])
def test_a_guide_with_structured_blocks_does_what_guides_do(name: str) -> None:
    model, _, sites = MODELS[name]
    guide, loss = fitted(model)
    first = sites[0]
    assert CVI(model, guide).evaluate_loss(data()) == pytest.approx(loss, abs=1e-8)
    # Draws, their density, quantiles.
    draws = torch.stack([guide(data())[first] for _ in range(1500)])
    q = guide.posterior(first)
    spread = q.variance.sqrt()
    assert draws.shape[1:] == q.mean.shape
    assert float(((draws.mean(0) - q.mean) / spread).abs().max()) < 5 / math.sqrt(1500)
    low, high = guide.quantiles([0.1, 0.9])[first]
    inside = ((draws > low) & (draws < high)).double().mean()
    assert float(inside) == pytest.approx(0.8, abs=0.03)
    trace = pyro.poutine.trace(guide).get_trace(data())
    assert math.isfinite(float(trace.log_prob_sum()))
    predictive = Predictive(model, guide=guide, num_samples=5)(data())
    assert predictive[first].shape[0] == 5
    # Copies.
    import copy

    again = copy.deepcopy(guide)
    torch.testing.assert_close(again.median()[first], guide.median()[first])
    new = AutoCVI(model, max_dense_dim=2000)
    new.load_state_dict(guide.state_dict())
    assert CVI(model, new).evaluate_loss(data()) == pytest.approx(loss, abs=1e-8)
    file = io.BytesIO()
    torch.save(guide, file)
    file.seek(0)
    kept = torch.load(file, weights_only=False)
    torch.testing.assert_close(kept.median()[first], guide.median()[first])
    torch.testing.assert_close(kept.quantiles([0.3])[first], guide.quantiles([0.3])[first])


def test_joint_covariances_across_sites() -> None:
    guide, _ = fitted(crossed)
    q = guide.joint(["a", "v"])
    assert q.covariance_matrix.shape == (5, 5)
    torch.testing.assert_close(q.variance[0], guide.posterior("a").variance)
    assert float(q.covariance_matrix[0, 1]) != 0


def test_new_data_of_the_same_and_of_another_size() -> None:
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 0.2).expand([300]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    x = torch.randn(30, 300)
    y = (x[:, 0] > 0).double()
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.run(x[:10], y[:10])
    for rows in (slice(10, 20), slice(0, 30)):
        cvi.run(x[rows], y[rows], tol=1e-10)
        fresh = AutoCVI(model)
        CVI(model, fresh).run(x[rows], y[rows], tol=1e-10)
        torch.testing.assert_close(guide.median()["w"], fresh.median()["w"], atol=1e-5, rtol=1e-4)
    before = guide.median()["w"].clone()
    with pytest.raises(ValueError, match="shapes"):
        cvi.step(x, y[:3])
    torch.testing.assert_close(guide.median()["w"], before)
    torch.testing.assert_close(cvi.evaluate_loss(x, y), CVI(model, fresh).evaluate_loss(x, y))


def test_kernel_parameters_are_learnt() -> None:
    """Of a Gaussian likelihood the bound is the evidence: its maximum in closed form by a fine grid."""
    y = data()

    def model(y: Tensor) -> None:
        s = pyro.param("s", torch.tensor(0.5), constraint=dist.constraints.positive)
        k = s**2 * kernel(T)
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), k))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def evidence(s: float) -> float:
        cov = s**2 * kernel(T) + 0.09 * torch.eye(60)
        return float(dist.MultivariateNormal(torch.zeros(60), cov).log_prob(y))

    guide = AutoCVI(model)
    cvi = CVI(model, guide, pyro.optim.Adam({"lr": 0.05}))
    losses = [cvi.step(y) for _ in range(120)]
    assert guide.plan.blocks[0].structure == "process"
    best = max((evidence(s), s) for s in torch.linspace(0.3, 2.0, 341).tolist())
    assert float(pyro.param("s").detach()) == pytest.approx(best[1], abs=0.02)
    assert -losses[-1] == pytest.approx(best[0], abs=1e-3)


def test_what_samples_a_block_makes_it_dense() -> None:
    """A function without a rule needs draws of the whole block."""

    def model(y: Tensor) -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
        pyro.sample("y", dist.Normal(f.sort().values, 1.0).to_event(1), obs=y)

    assert {b.structure for b in explain(model, data()).blocks} == {"dense"}


def test_other_data_do_not_change_what_a_process_says() -> None:
    """Its numbers are about the predictors of the fit: other rows are an error, or a new fit."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([240]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    x, z = torch.randn(30, 240), torch.randn(30, 240)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    loss = cvi.run(x, x[:, 0]).losses[-1]
    before = guide.posterior("w")
    for other in (z, z[:5]):
        with pytest.raises(CVIError, match="log_predictive"):
            cvi.evaluate_loss(other, other[:, 0])
    assert cvi.evaluate_loss(x, x[:, 0]) == pytest.approx(loss)
    torch.testing.assert_close(guide.posterior("w").mean, before.mean, rtol=0, atol=0)
    loaded = AutoCVI(model)
    loaded.load_state_dict(guide.state_dict())
    with pytest.raises(CVIError, match="data of the fit"):
        loaded(z, z[:, 0])
    loaded(x, x[:, 0])
    torch.testing.assert_close(loaded.posterior("w").variance, before.variance)
    # The exact predictive density of other rows, one by one, against draws.
    prior = torch.eye(240) + x.T @ x / 0.25
    cov = torch.linalg.inv(prior)
    scale = ((z @ cov * z).sum(-1) + 0.25).sqrt()
    exact = dist.Normal(z @ before.mean, scale).log_prob(z[:, 0])
    found = cvi.log_predictive(z, z[:, 0], plates=["data"], num_samples=3000)
    assert float((found - exact).abs().mean()) < 0.2


def joined_priors(kind: str) -> Callable[..., None]:
    """Open scalars whose priors join them to others: no process."""

    def mean(y: Tensor) -> None:
        x = torch.sin(torch.arange(20.0)[:, None] * torch.arange(1.0, 241.0))
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(a, 1.0))
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([240]).to_event(1))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(x @ w + b, 0.5), obs=y[:20])

    def process_on_process(y: Tensor) -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
        g = pyro.sample("g", dist.MultivariateNormal(f, kernel(T, 0.3)))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.StudentT(3.0, g, 0.3), obs=y)

    return mean if kind == "mean" else process_on_process


@pytest.mark.parametrize("kind", ["mean", "process_on_process"])
def test_priors_that_join_scalars_make_no_process(kind: str, monkeypatch: Any) -> None:
    model = joined_priors(kind)
    guide, loss = fitted(model)
    assert "process" not in {b.structure for b in guide.plan.blocks}
    monkeypatch.setattr(blocks, "_viewed", lambda *args: None)
    assert loss == pytest.approx(fitted(model)[1], rel=1e-7)


def test_a_small_multivariate_prior_beside_a_process() -> None:
    def model(y: Tensor) -> None:
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
        cov = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        b = pyro.sample("b", dist.MultivariateNormal(torch.zeros(2), cov))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Bernoulli(logits=f + b[0] + T * b[1]), obs=(y > 0).double())

    guide, loss = fitted(model)
    assert guide.plan.blocks[0].structure == "process"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_viewed", lambda *args: None)
        assert loss == pytest.approx(fitted(model)[1], rel=1e-7)


def test_a_plate_of_processes_stays_a_plate() -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("series", 30):
            f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel(T)))
            pyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y.expand(30, 60))

    assert {b.structure for b in explain(model, data()).blocks} <= {"plated", "chain"}


def test_another_likelihood_and_other_rows_in_one_guide() -> None:
    """What an accelerated run remembers of one plan is not used in the next."""
    x = torch.randn(40, 240)

    def model(x: Tensor, gaussian: bool) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 0.5).expand([240]).to_event(1))
        a = pyro.sample("a", dist.Gamma(2.0, 2.0))
        with pyro.plate("data", len(x)):
            m = x @ w
            law = dist.Normal(m, a.rsqrt()) if gaussian else dist.StudentT(3.0, m, 1.0)
            pyro.sample("y", law, obs=x[:, 0])

    cvi = CVI(model, AutoCVI(model))
    cvi.run(x[:30], False)
    loss = cvi.run(x, True, tol=1e-10).losses[-1]
    assert loss == pytest.approx(
        CVI(model, AutoCVI(model)).run(x, True, tol=1e-10).losses[-1], rel=1e-6
    )


@pytest.mark.parametrize("name", ["wide_regression", "crossed"])
def test_float32(name: str) -> None:
    model, structure, sites = MODELS[name]
    reference, loss = fitted(model)
    torch.set_default_dtype(torch.float32)

    def cast(y: Tensor) -> None:
        model(y)

    global T
    kept, T = T, T.float()
    try:
        guide = AutoCVI(cast, max_dense_dim=2000)
        y = data().float()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "double", Tensor.float)
            result = CVI(cast, guide).run(y, num_steps=100, tol=1e-5)
    finally:
        T = kept
    assert structure in {b.structure for b in guide.plan.blocks}
    assert result.losses[-1] == pytest.approx(loss, rel=1e-3)
    for s in sites:
        q, r = guide.posterior(s), reference.posterior(s)
        assert float(((q.mean - r.mean) / r.variance.sqrt()).abs().max()) < 0.05


def test_two_kernels_are_learnt_without_losing_the_posterior() -> None:
    """After the parameters have moved, the posterior is that of the same pseudo-observations."""
    y = data() + torch.exp(-1 + 0.5 * T) * torch.cos(53 * torch.arange(60.0))

    def model(y: Tensor) -> None:
        values = {}
        for name, level in (("f", 0.0), ("g", -1.0)):
            s = pyro.param(f"s_{name}", torch.tensor(1.0), constraint=dist.constraints.positive)
            k = s**2 * torch.exp(-0.5 * (T[:, None] - T) ** 2 / 0.3) + 1e-6 * torch.eye(60)
            values[name] = pyro.sample(name, dist.MultivariateNormal(level * torch.ones(60), k))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(values["f"], values["g"].exp()), obs=y)

    cvi = CVI(model, AutoCVI(model), pyro.optim.Adam({"lr": 0.1, "betas": (0.8, 0.9)}))
    losses = [cvi.step(y) for _ in range(60)]
    assert all(b < a + 0.5 for a, b in zip(losses[3:], losses[4:], strict=False))
    with torch.no_grad():
        held = {n: pyro.param(n).detach() for n in ("s_f", "s_g")}

    def fixed(y: Tensor) -> None:
        values = {}
        for name, level in (("f", 0.0), ("g", -1.0)):
            k = held[f"s_{name}"] ** 2 * torch.exp(-0.5 * (T[:, None] - T) ** 2 / 0.3)
            law = dist.MultivariateNormal(level * torch.ones(60), k + 1e-6 * torch.eye(60))
            values[name] = pyro.sample(name, law)
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(values["f"], values["g"].exp()), obs=y)

    best = CVI(fixed, AutoCVI(fixed)).run(y).losses[-1]
    assert losses[-1] == pytest.approx(best, abs=0.05)


def test_masked_counts_out_of_different_totals() -> None:
    n, y = torch.tensor([10.0, 3.0, 25.0]), torch.tensor([8.0, 1.0, 20.0])
    mask = torch.tensor([True, False, True])

    def model(n: Tensor, y: Tensor, mask: Tensor) -> None:
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)), pyro.poutine.mask(mask=mask):
            pyro.sample("y", dist.Binomial(n, logits=b.expand(len(y))), obs=y)

    guides = []
    for rows in (torch.arange(3), torch.tensor([0, 2])):
        guide = AutoCVI(model)
        CVI(model, guide).run(n[rows], y[rows], mask[rows], tol=1e-12)
        guides.append(guide.posterior("b"))
    torch.testing.assert_close(guides[0].mean, guides[1].mean)
    torch.testing.assert_close(guides[0].variance, guides[1].variance)


def test_a_correlated_topic_model_needs_no_draws() -> None:
    """Softmax of a Gaussian with a latent mean and a latent Wishart precision, and enumerated words."""
    k, terms, docs, words = 3, 12, 30, 20
    topics = dist.Dirichlet(0.2 * torch.ones(terms)).sample((k,))
    z = dist.Categorical(torch.randn(docs, k).softmax(-1)).sample((words,))
    w = dist.Categorical(topics[z]).sample()

    def model(w: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([k]).to_event(1))
        p = pyro.sample("P", dist.Wishart(torch.tensor(k + 2.0), torch.eye(k) / (k + 2)))
        with pyro.plate("topics", k):
            beta = pyro.sample("beta", dist.Dirichlet(0.2 * torch.ones(terms)))
        with pyro.plate("docs", docs):
            eta = pyro.sample("eta", dist.MultivariateNormal(mu, precision_matrix=p))
            with pyro.plate("words", words):
                z = pyro.sample("z", dist.Categorical(logits=eta))
                pyro.sample("w", dist.Categorical(beta[z]), obs=w)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    result = cvi.run(w, num_steps=60)
    assert {e.how for e in cvi.explain().edges} == {"exact", "quadrature"}
    pairs = zip(result.losses, result.losses[1:], strict=False)
    assert max(b - a for a, b in pairs) <= 1e-7
    values = []
    for _ in range(300):
        q = pyro.poutine.trace(guide).get_trace(w)
        p = pyro.poutine.trace(pyro.poutine.replay(model, q)).get_trace(w)
        values.append(float(q.log_prob_sum() - p.log_prob_sum()))
    found = torch.tensor(values)
    assert (
        abs(float(found.mean()) - result.losses[-1])
        < 4 * float(found.std()) / math.sqrt(300) + 1e-2
    )


def test_kernels_of_pyro_are_learnt() -> None:
    """`pyro.contrib.gp.kernels` are modules: their parameters come through `pyro.module`."""
    from pyro.contrib.gp.kernels import Matern52

    kernel = Matern52(input_dim=1, variance=torch.tensor(0.2), lengthscale=torch.tensor(2.0))

    def model(y: Tensor) -> None:
        pyro.module("kernel", kernel)
        cov = kernel(T) + 1e-6 * torch.eye(60)
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), cov))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def evidence() -> float:
        with torch.no_grad():
            cov = kernel(T) + (0.09 + 1e-6) * torch.eye(60)
            return float(dist.MultivariateNormal(torch.zeros(60), cov).log_prob(data()))

    before = evidence()
    cvi = CVI(model, AutoCVI(model), pyro.optim.Adam({"lr": 0.05}))
    losses = [cvi.step(data()) for _ in range(80)]
    assert -losses[-1] == pytest.approx(evidence(), abs=0.01)
    assert evidence() > before + 3


# --- cumulative sums -------------------------------------------------------------------------------


def random_walk(y, kind="plain"):
    T = y.shape[-1]
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    scale = 0.2
    if kind == "scale":
        scale = pyro.sample("scale", dist.Gamma(5.0, 25.0)).rsqrt()
    if kind == "many":
        with pyro.plate("series", len(y), dim=-2), pyro.plate("time", T, dim=-1):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Poisson((mu + (scale * z).cumsum(-1)).exp()), obs=y)
        return
    if kind == "vector":
        z = pyro.sample("z", dist.Normal(torch.zeros(T, 2), 1.0).to_event(2))
        level = (z * torch.tensor([0.2, 0.1])).cumsum(0) @ torch.tensor([1.0, -1.0])
    elif kind == "two":
        z = pyro.sample("z", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        x = pyro.sample("x", dist.Normal(torch.zeros(T), 0.3).to_event(1))
        level = 0.2 * z.cumsum(0) + x
    elif kind == "drift":
        b = pyro.sample("b", dist.Normal(0.0, 0.01))
        z = pyro.sample("z", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        level = (b + 0.2 * z).cumsum(0)
    else:
        z = pyro.sample("z", dist.Normal(torch.zeros(T), 1.0).to_event(1))
        level = torch.cumsum(scale * z, dim=-1)
    with pyro.plate("time", T):
        law = dist.Normal(mu + level, 1.0) if kind == "scale" else dist.Poisson((mu + level).exp())
        pyro.sample("y", law, obs=y)


@pytest.mark.parametrize("kind", ["plain", "many", "vector", "two", "drift", "scale"])
def test_sums_of_innovations_are_chains_and_the_posterior_of_a_dense_block(kind, monkeypatch):
    T = 260 if kind != "many" else 130
    walk = 0.1 * torch.randn(2, T).cumsum(-1) if kind == "many" else 0.1 * torch.randn(T).cumsum(0)
    y = dist.Poisson(walk.clamp(max=2).exp()).sample()
    guide = AutoCVI(random_walk, max_dense_dim=2000)
    result = CVI(random_walk, guide).run(y, kind, tol=1e-12, num_steps=300)
    assert guide.block_of("z").structure == "chain"
    assert "cumulative sums" in str(guide.block_of("z").reason)
    monkeypatch.setattr(blocks, "_viewed", lambda *args: None)
    dense = AutoCVI(random_walk, max_dense_dim=2000)
    reference = CVI(random_walk, dense).run(y, kind, tol=1e-12, num_steps=300)
    assert dense.block_of("z").structure == "dense"
    assert result.losses[-1] == pytest.approx(reference.losses[-1], rel=1e-8)
    for site in guide.plan.latents:
        q, wanted = guide.posterior(site), dense.posterior(site)
        tolerance = 1e-4 * float(wanted.variance.sqrt().max())
        torch.testing.assert_close(q.mean, wanted.mean, atol=tolerance, rtol=0)
        torch.testing.assert_close(q.variance, wanted.variance, rtol=1e-3, atol=0)
        torch.testing.assert_close(
            guide.quantiles([0.1])[site], dense.quantiles([0.1])[site], atol=1e-3, rtol=1e-3
        )
    cov, wanted = (g.joint(["z"]).covariance_matrix for g in (guide, dense))
    torch.testing.assert_close(cov, wanted, atol=1e-5, rtol=1e-3)


def test_draws_of_innovations_have_the_law_that_the_guide_scores():
    y = dist.Poisson(torch.ones(250)).sample()
    guide = AutoCVI(random_walk)
    cvi = CVI(random_walk, guide)
    cvi.run(y)
    q = guide.joint(["mu", "z"])
    draws = [poutine.trace(guide).get_trace(y) for _ in range(20)]
    for trace in draws:
        whole = torch.cat([trace.nodes["mu"]["value"].reshape(1), trace.nodes["z"]["value"]])
        assert float(trace.log_prob_sum()) == pytest.approx(float(q.log_prob(whole)), rel=1e-6)
    root = torch.linalg.inv(torch.linalg.cholesky(q.covariance_matrix))
    values = torch.stack(
        [torch.cat([d["mu"].reshape(1), d["z"]]) for d in (guide(y) for _ in range(400))]
    )
    white = (values - q.mean) @ root.mT
    assert abs(float(white.square().mean()) - 1) < 4 * (2 / white.numel()) ** 0.5


def test_a_chain_of_sums_is_saved_and_loaded():
    y = dist.Poisson(torch.ones(250)).sample()
    cvi = CVI(random_walk, AutoCVI(random_walk))
    loss = cvi.run(y).losses[-1]
    new = AutoCVI(random_walk)
    new.load_state_dict(cvi.guide.state_dict())
    assert CVI(random_walk, new).evaluate_loss(y) == pytest.approx(loss)


def test_sums_of_sums_stay_dense():
    y = torch.randn(220)

    def model(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(220), 0.1).to_event(1))
        level = z.cumsum(0).cumsum(0)
        with pyro.plate("time", 220):
            pyro.sample("y", dist.Normal(level, 1.0), obs=y)

    cvi = CVI(model, AutoCVI(model))
    cvi.run(y)
    assert cvi.guide.block_of("z").structure == "dense"
    A = torch.ones(220, 220).tril() @ torch.ones(220, 220).tril()
    precision = 100 * torch.eye(220) + A.mT @ A
    q = cvi.guide.posterior("z")
    torch.testing.assert_close(q.mean, torch.linalg.solve(precision, A.mT @ y))


def test_a_long_sum_under_minibatches_and_in_a_sampled_factor_is_written_out():
    y = torch.randn(300)

    def model(y, size, opaque):
        z = pyro.sample("z", dist.Normal(torch.zeros(300), 0.3).to_event(1))
        level = z.cumsum(0)
        mean = torch.special.erfcx(level * 0.01) if opaque else level
        with pyro.plate("time", 300, subsample_size=size) as i:
            pyro.sample("y", dist.Normal(mean[i], 1.0), obs=y[i])

    cvi = CVI(model, AutoCVI(model))
    for _ in range(20):
        cvi.step(y, 100, False)
    A = torch.ones(300, 300).tril()
    precision = torch.eye(300) / 0.09 + A.mT @ A
    q = cvi.guide.posterior("z")
    torch.testing.assert_close(q.mean, torch.linalg.solve(precision, A.mT @ y), atol=1e-6, rtol=0)
    sampled = CVI(model, AutoCVI(model))
    with pytest.warns(CVIWarning, match="300 scalars with one covariance"):
        sampled.run(y, None, True, num_steps=3)
    assert sampled.guide.block_of("z").structure in ("dense", "diagonal")


@pytest.mark.parametrize("kind", ["sums", "differences"])
def test_padding_in_a_chain_is_pinned_to_its_prior(kind, monkeypatch):
    """Masked cells that nothing informs have their prior, the others the posterior of a dense block."""
    length = torch.tensor([80, 50, 30, 70])
    mask = torch.arange(80) < length[:, None]
    y = torch.randn(4, 80)

    def model(y):
        series, time = pyro.plate("series", 4, dim=-2), pyro.plate("time", 80, dim=-1)
        with series, time, poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Normal(0.0, 0.3))
            level = z.cumsum(-1) if kind == "sums" else z
            if kind == "differences":
                before = torch.cat([torch.zeros(4, 1), z[:, :-1]], -1)
                pyro.sample("d", dist.Normal(z - before, 0.3), obs=torch.zeros(4, 80))
            pyro.sample("y", dist.Normal(level, 0.5), obs=y)

    guide = AutoCVI(model)
    loss = CVI(model, guide).run(y).losses[-1]
    assert guide.block_of("z").structure == "chain"
    monkeypatch.setattr(blocks, "_viewed", lambda *args: None)
    dense = AutoCVI(model)
    assert loss == pytest.approx(CVI(model, dense).run(y).losses[-1], rel=1e-9)
    q, wanted = guide.posterior("z"), dense.posterior("z")
    torch.testing.assert_close(q.mean, wanted.mean, atol=1e-8, rtol=0)
    torch.testing.assert_close(q.variance, wanted.variance)
    torch.testing.assert_close(q.variance[~mask], torch.full_like(q.variance[~mask], 0.09))


@pytest.mark.parametrize("centered", [0.0, 0.5])
def test_reparameterised_innovations_stay_a_chain(centered):
    y = torch.randn(300)

    @poutine.reparam(config={"x": LocScaleReparam(centered)})
    def model(y):
        with pyro.plate("time", 300):
            x = pyro.sample("x", dist.Normal(1.0, 0.3))
            pyro.sample("y", dist.Normal(x.cumsum(-1), 1.0), obs=y)

    guide = AutoCVI(model)
    CVI(model, guide).run(y)
    assert guide.block_of("x_decentered").structure == "chain"


@pytest.mark.parametrize("length", [30, 150])
@pytest.mark.parametrize("sums", [True, False])
def test_a_short_sequence_that_may_not_be_dense_is_a_chain(length, sums):
    """By sums of innovations, and by differences: the posterior of a dense block, which is exact."""

    def model(y):
        c = pyro.sample("c", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(len(y)), 0.3 if sums else 3.0).to_event(1))
        if not sums:
            pyro.sample(
                "steps", dist.Normal(z.diff(), 0.3).to_event(1), obs=torch.zeros(len(y) - 1)
            )
        pyro.sample("y", dist.Normal(c + (z.cumsum(0) if sums else z), 1.0).to_event(1), obs=y)

    y, found = torch.randn(length), []
    for limit in (5, 1000):
        guide = AutoCVI(model, max_dense_dim=limit)
        CVI(model, guide).step(y)
        found.append(guide)
    assert [[b.structure for b in g.plan.blocks] for g in found] == [["chain"], ["dense"]]
    for site in ("c", "z"):
        a, b = (g.posterior(site) for g in found)
        torch.testing.assert_close(
            a.mean, b.mean, rtol=1e-9, atol=1e-9
        )  # float64, conditioning 1e4
        torch.testing.assert_close(a.variance, b.variance, rtol=1e-9, atol=1e-9)
