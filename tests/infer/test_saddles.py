"""Stationary points that are no maximum are left; maxima are not."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI


def seen_through(f, noise=0.1, prior=(0.0, 2.0), n=20):
    """z ~ N(prior), x ~ N(f(z), noise): the model of one even function."""

    def model(x):
        z = pyro.sample("z", dist.Normal(*prior))
        with pyro.plate("n", len(x)):
            pyro.sample("x", dist.Normal(f(z), noise), obs=x)

    return model


EVEN = {
    "square": (lambda z: z * z, 4.0, 2.0),
    "fourth power": (lambda z: z**4, 16.0, 2.0),
    "cosh": (torch.cosh, 4.0, math.acosh(4.0)),
    "absolute value": (torch.abs, 1.5, 1.5),
}


def laplace(f, x, at, noise, sd):
    """The standard deviation at a mode, from the second derivative of the log joint there."""
    z = torch.tensor(at, requires_grad=True)
    log_p = dist.Normal(0.0, sd).log_prob(z) + dist.Normal(f(z), noise).log_prob(x).sum()
    (g,) = torch.autograd.grad(log_p, z, create_graph=True)
    (h,) = torch.autograd.grad(g, z)
    return float(h.neg().rsqrt())


@pytest.mark.parametrize("noise", [0.1, 2.0])
@pytest.mark.parametrize("name", EVEN)
def test_an_even_function_is_fitted_at_one_of_its_modes(name, noise):
    f, mean, mode = EVEN[name]
    x = mean + 0.1 * torch.randn(20)
    cvi = CVI(seen_through(f, noise), AutoCVI(seen_through(f, noise)), seed=0)
    result = cvi.run(x)
    q = cvi.guide.posterior("z")
    assert result.converged
    assert abs(float(q.mean)) == pytest.approx(mode, rel=0.15)
    if noise == 0.1:
        wanted = laplace(f, x, abs(float(q.mean)), noise, 2.0)
        assert float(q.stddev) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_every_restart_ends_at_a_mode(seed):
    f, mean, mode = EVEN["square"]
    model = seen_through(f, prior=(0.0, 5.0))
    cvi = CVI(model, AutoCVI(model), seed=seed)
    result = cvi.run(mean + 0.1 * torch.randn(20), num_restarts=3)
    assert max(result.restarts) - min(result.restarts) < 0.2
    assert abs(float(cvi.guide.posterior("z").mean)) == pytest.approx(mode, rel=0.05)


def test_two_sites_whose_squares_add_up():
    def model(x):
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("n", len(x)):
            pyro.sample("x", dist.Normal(a * a + b * b, 0.5), obs=x)

    cvi = CVI(model, AutoCVI(model), seed=0)
    assert cvi.run(4 + 0.5 * torch.randn(20)).converged
    a, b = (float(cvi.guide.posterior(s).mean) for s in "ab")
    assert a * a + b * b == pytest.approx(4.0, rel=0.2)


def test_a_scale_with_a_normal_prior():
    def model(x):
        s = pyro.sample("s", dist.Normal(0.0, 2.0))
        with pyro.plate("n", len(x)):
            pyro.sample("x", dist.Normal(0.0, (s * s + 1e-6).sqrt()), obs=x)

    x = 1.5 * torch.randn(50)
    cvi = CVI(model, AutoCVI(model), seed=0)
    assert cvi.run(x).converged
    wanted = float(x.square().mean().sqrt())
    assert abs(float(cvi.guide.posterior("s").mean)) == pytest.approx(wanted, rel=0.1)


def test_elements_of_a_plate_leave_each_by_itself():
    def model(x):
        with pyro.plate("n", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 2.0))
            pyro.sample("x", dist.Normal(z * z, 0.1), obs=x)

    x = torch.tensor([0.0, 1.0, 4.0, 9.0, -1.0])
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(x)
    found = cvi.guide.posterior("z").mean.abs()
    torch.testing.assert_close(found[1:4], torch.tensor([1.0, 2.0, 3.0]), rtol=0.02, atol=0)
    assert float(found[4]) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_maximum_is_not_left(dtype):
    torch.set_default_dtype(dtype)
    X = torch.randn(50, 3)
    y = torch.bernoulli(torch.sigmoid(X.sum(-1)))

    def model(X, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("n", len(X)):
            pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    cvi = CVI(model, AutoCVI(model))
    result = cvi.run(X, y)
    assert result.converged
    assert all(b <= a + 1e-3 for a, b in zip(result.losses, result.losses[1:], strict=False))
    assert result.num_steps < 12


@pytest.mark.parametrize("name", EVEN)
def test_single_steps_leave_a_saddle_too(name):
    f, mean, mode = EVEN[name]
    model = seen_through(f)
    x = mean + 0.1 * torch.randn(20)
    cvi = CVI(model, AutoCVI(model, init_loc_fn=lambda site: torch.tensor(0.0)), seed=0)
    losses = [cvi.step(x) for _ in range(60)]
    assert abs(float(cvi.guide.posterior("z").mean)) == pytest.approx(mode, rel=0.15)
    assert losses[-1] == pytest.approx(cvi.evaluate_loss(x), rel=1e-9)
    assert all(b <= a + 1e-9 * abs(a) for a, b in itertools.pairwise(losses))
