"""A torch function that the algebra does not know, written by others that it knows."""

from collections.abc import Callable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d

from pyro_cvi import CVI, AutoCVI, explain
from pyro_cvi.algebra import SiteRef, latent, register_rewrite, site_expression

KERNEL = torch.tensor([0.5, 0.3, -0.2])


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(latent, "_RULES", dict(latent._RULES))


def by_windows(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("nctk,ock->not", x.unfold(-1, weight.shape[-1], 1), weight)


def model(y: Tensor) -> None:
    """Rows of a signal, each seen through the same convolution."""
    n, t = y.shape
    kernel = KERNEL.to(y).reshape(1, 1, 3)
    with pyro.plate("rows", n):
        x = pyro.sample("x", dist.Normal(y.new_zeros(t + 2), 2.0).to_event(1))
        seen = conv1d(x.unsqueeze(-2), kernel).squeeze(-2)
        pyro.sample("y", dist.Normal(seen, 0.1).to_event(1), obs=y)


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def y(request: pytest.FixtureRequest) -> Iterator[Tensor]:
    torch.set_default_dtype(request.param)
    yield torch.randn(4, 6)
    torch.set_default_dtype(torch.float64)


def hows(y: Tensor) -> set[str]:
    return {e.how for e in explain(model, y).edges if e.factor == "y"}


def test_without_a_rewrite_the_function_is_sampled(y: Tensor) -> None:
    assert hows(y) == {"points"}


def test_the_posterior_is_that_of_the_dense_joint(y: Tensor) -> None:
    register_rewrite("conv1d")(by_windows)
    assert hows(y) == {"exact"}
    cvi = CVI(model, AutoCVI(model))
    loss = cvi.step(y)
    design = conv1d(torch.eye(8).unsqueeze(1), KERNEL.to(y).reshape(1, 1, 3)).squeeze(1).T
    cov = torch.linalg.inv(torch.eye(8) / 4 + design.T @ design / 0.01)
    law = cvi.guide.posterior("x")
    eps = torch.finfo(y.dtype).eps
    close = {
        "rtol": 1e4 * eps,
        "atol": 1e4 * eps,
    }  # condition number of the precision: a few hundred
    torch.testing.assert_close(law.mean, y @ design @ cov / 0.01, **close)
    torch.testing.assert_close(law.covariance_matrix, cov.expand(4, 8, 8), **close)
    marginal = dist.MultivariateNormal(torch.zeros(6), 4 * design @ design.T + 0.01 * torch.eye(6))
    assert loss == pytest.approx(-float(marginal.log_prob(y).sum()), rel=1e4 * eps)


def mirrored(x: Tensor, weight: Tensor) -> Tensor:
    return by_windows(x, weight.flip(-1))


def misshapen(x: Tensor, weight: Tensor) -> Tensor:
    return by_windows(x, weight)[..., 1:]


def itself(x: Tensor, weight: Tensor) -> Tensor:
    return conv1d(x, weight)


def declines(x: Tensor, weight: Tensor) -> None:
    return None


def other_arguments(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("bad", [mirrored, misshapen, itself, declines, other_arguments])
def test_a_rewrite_that_does_not_serve_leaves_the_factor_sampled(
    bad: Callable[..., Any], y: Tensor
) -> None:
    register_rewrite("conv1d")(bad)
    assert hows(y) <= {"points", "sampled"}


def test_values_stay_those_of_torch() -> None:
    register_rewrite("conv1d")(mirrored)
    x, weight = torch.randn(2, 1, 7), KERNEL.double().reshape(1, 1, 3)
    symbol = latent.LatentTensor.make(x, site_expression(SiteRef("x", (2, 1, 7), 3, "real")))
    out = conv1d(symbol, weight)
    assert isinstance(out, latent.LatentTensor)
    torch.testing.assert_close(latent.plain(out), by_windows(x, weight))
