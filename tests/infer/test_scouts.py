"""Log densities with many maxima end where a fit from the truth ends, from any seed."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_value

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.scouts import Scouts

N = 40
TRUTH = {"w": 2.3, "at": 7.3, "a": 1.5, "phase": 0.4, "sigma": 0.2, "tau": 25.0}


def times():
    return torch.linspace(0.0, 10.0, N)


def sine(t, y):
    """One scalar, by quadrature."""
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(1.5 * torch.sin(w * t), 0.2), obs=y)


def sine_with_precision(t, y):
    """Beside a conjugate site."""
    w = pyro.sample("w", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(1.5 * torch.sin(w * t), tau.rsqrt()), obs=y)


def sine_with_effects(t, y):
    """Two predictors, and a site in the plate of the rows."""
    w = pyro.sample("w", dist.LogNormal(0.0, 0.7))
    with pyro.plate("rows", N):
        e = pyro.sample("e", dist.Normal(0.0, 0.1))
        pyro.sample("y", dist.Normal(1.5 * torch.sin(w * t) + e, 0.2), obs=y)


def whole_sine(t, y):
    """Four scalars, over fixed points."""
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    w = pyro.sample("w", dist.LogNormal(0.0, 0.7))
    phase = pyro.sample("phase", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(a * torch.sin(w * t + phase), sigma), obs=y)


def needle(t, y):
    """A peak that no slope points to from most places."""
    at = pyro.sample("at", dist.Normal(0.0, 5.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(torch.exp(-20 * (t - at).square()), 0.05), obs=y)


def data(model):
    torch.manual_seed(0)
    t = times()
    if model is needle:
        return t, torch.exp(-20 * (t - 7.3).square()) + 0.05 * torch.randn(N)
    phase = 0.4 if model is whole_sine else 0.0
    return t, 1.5 * torch.sin(2.3 * t + phase) + 0.2 * torch.randn(N)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "model", [sine, sine_with_precision, sine_with_effects, whole_sine, needle]
)
def test_a_fit_ends_where_one_from_the_truth_does(model, dtype, seed):
    t, y = (x.to(dtype) for x in data(model))
    torch.set_default_dtype(dtype)
    try:
        values = {n: torch.tensor(v, dtype=dtype) for n, v in TRUTH.items()}
        placed = AutoCVI(model, init_loc_fn=init_to_value(values=values))
        expected = CVI(model, placed, seed=0).run(t, y).losses[-1]
        pyro.set_rng_seed(seed)
        found = CVI(model, AutoCVI(model), seed=seed).run(t, y)
    finally:
        torch.set_default_dtype(torch.float64)
    assert found.converged
    assert found.losses[-1] < expected + 0.02


def test_a_site_that_is_placed_stays_where_it_is():
    t, y = data(needle)
    guide = AutoCVI(needle, init_loc_fn=init_to_value(values={"at": torch.tensor(2.0)}))
    CVI(needle, guide, seed=0).run(t, y)
    assert abs(float(guide.posterior("at").mean) - 7.3) > 1


def glm(likelihood):
    def model(X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("rows", N):
            pyro.sample("y", likelihood(X @ w), obs=y)

    return model


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda f: dist.Bernoulli(logits=f),
        lambda f: dist.Poisson(f.exp()),
        lambda f: dist.StudentT(4.0, f, 1.0),
        lambda f: dist.Gamma(2.0, (-f).exp()),
        lambda f: dist.Laplace(f, 1.0),
    ],
)
def test_regressions_have_one_maximum_and_are_not_scouted(likelihood, monkeypatch):
    X = torch.randn(N, 2)
    y = likelihood(X @ torch.tensor([1.0, -0.5])).sample()
    made = []
    monkeypatch.setattr(Scouts, "__init__", lambda self, *_: made.append(self))
    model = glm(likelihood)
    loss = CVI(model, AutoCVI(model)).step(X, y)
    assert math.isfinite(loss)
    assert not made


def test_a_model_that_fails_at_some_draws_is_fitted_all_the_same():
    """Its matrix is not positive definite in float32 where the length scale is long."""
    x = torch.linspace(0.0, 1.0, 12, dtype=torch.float32)

    def model(y):
        length = pyro.sample("length", dist.LogNormal(-1.0, 1.5))
        e = pyro.sample("e", dist.Normal(torch.zeros(12), 1.0).to_event(1))
        gaps = (x[:, None] - x) / length
        kernel = torch.exp(-gaps.square() / 2) + 1e-5 * torch.eye(12)
        f = torch.linalg.cholesky(kernel) @ e
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    torch.set_default_dtype(torch.float32)
    try:
        y = torch.poisson(torch.exp(torch.sin(6 * x)))
        losses = [CVI(model, AutoCVI(model), seed=s).run(y).losses[-1] for s in range(3)]
    finally:
        torch.set_default_dtype(torch.float64)
    assert all(math.isfinite(v) for v in losses)
    assert max(losses) < min(losses) + 0.05
