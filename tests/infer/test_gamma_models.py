"""The paper's Gamma models, and others in which Gamma, Beta and Dirichlet sites meet without conjugacy.

The oracle is the gradient of the bound itself: with the posterior written as torch distributions, and
draws of its own, d ELBO / d (log of its parameters) has to vanish at the fit, in units of its noise and
of the posterior's own information.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi import CVI, AutoCVI

KEYS = {
    dist.Gamma: ("concentration", "rate"),
    dist.InverseGamma: ("concentration", "rate"),
    dist.Beta: ("concentration1", "concentration0"),
    dist.Dirichlet: ("concentration",),
    dist.Normal: ("loc", "scale"),
}


def core(q: Any) -> Any:
    while isinstance(q, torch.distributions.Independent):
        q = q.base_dist
    return q


def moved_by_the_gradient(
    model: Callable[..., None], args: tuple[Any, ...], guide: AutoCVI, draws: int = 1600
) -> dict[str, Tensor]:
    """For each site, |natural gradient| of the bound in log parameters: F^-1 d ELBO, with F diagonal.

    F is that of the law in the log of each parameter, from finite differences of KL.
    """
    laws = {n: core(guide.posterior(n)) for n in guide.plan.latents}
    logs = {
        n: [getattr(d, k).detach().clone().log().requires_grad_() for k in KEYS[type(d)]]
        for n, d in laws.items()
    }
    total = torch.zeros(())
    for _ in range(draws):
        q = {n: type(d)(*[u.exp() for u in logs[n]]) for n, d in laws.items()}
        values = {n: d.rsample() for n, d in q.items()}
        shaped = {n: v.reshape(guide.plan.latents[n].shape) for n, v in values.items()}
        trace = poutine.trace(poutine.condition(model, data=shaped)).get_trace(*args)
        entropy = sum(d.entropy().sum() for d in q.values())
        total = total + (trace.log_prob_sum() + entropy) / draws
    found = {}
    for n, us in logs.items():
        grads = torch.autograd.grad(total, us, retain_graph=True)
        rates = []
        for i, g in enumerate(grads):
            here = type(laws[n])(*[u.detach().exp() for u in us])
            near = type(laws[n])(*[(u.detach() + 0.01 * (k == i)).exp() for k, u in enumerate(us)])
            fisher = 2 * torch.distributions.kl_divergence(here, near) / 0.01**2
            rates.append(
                (
                    g / (fisher + 1e-9).sqrt().reshape(fisher.shape + (1,) * (g.ndim - fisher.ndim))
                ).abs()
            )
        found[n] = torch.stack([r.reshape(-1).max() for r in rates])
    return found


def shapes(y: Tensor) -> None:
    a = pyro.sample("a", dist.Gamma(2.0, 1.0))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Gamma(a, 1.0), obs=y)


def counts_of_groups(c: Tensor) -> None:
    """Dirichlet whose concentration is latent."""
    a = pyro.sample("a", dist.Gamma(torch.ones(3), 1.0).to_event(1))
    with pyro.plate("g", len(c)):
        p = pyro.sample("p", dist.Dirichlet(a))
        pyro.sample("c", dist.Multinomial(30, p), obs=c)


def rates_of_groups(k: Tensor) -> None:
    """Beta with latent mean and concentration."""
    m = pyro.sample("m", dist.Beta(2.0, 2.0))
    kappa = pyro.sample("kappa", dist.Gamma(2.0, 0.1))
    with pyro.plate("g", len(k)):
        p = pyro.sample("p", dist.Beta(m * kappa, (1 - m) * kappa))
        pyro.sample("k", dist.Binomial(20, p), obs=k)


def negative_binomial(y: Tensor) -> None:
    """As Gamma-Poisson, with latent shape and mean."""
    r = pyro.sample("r", dist.Gamma(2.0, 1.0))
    mu = pyro.sample("mu", dist.Gamma(2.0, 0.4))
    with pyro.plate("n", len(y)):
        rate = pyro.sample("rate", dist.Gamma(r, r / mu))
        pyro.sample("y", dist.Poisson(rate), obs=y)


def factor_model(scatter: Tensor, rows: int) -> None:
    """The rows enter through their scatter matrix, which is Wishart."""
    D = len(scatter)
    Z = pyro.sample("Z", dist.Gamma(torch.ones(D, 2), 1.0).to_event(2))
    cov = Z @ Z.mT + 0.5 * torch.eye(D)
    pyro.sample("S", dist.Wishart(torch.tensor(float(rows)), covariance_matrix=cov), obs=scatter)


def scatter_of_rows() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    Z = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.1, 1.5], [0.0, 1.0]])
    y = torch.randn(60, 2, generator=generator) @ Z.mT
    y = y + 0.5**0.5 * torch.randn(60, 4, generator=generator)
    return y.mT @ y


def cases() -> dict[str, tuple[Callable[..., None], tuple[Any, ...]]]:
    y = torch.tensor([0.4, 2.0, 1.1, 3.0, 0.8])
    c = torch.tensor([[20.0, 8.0, 2.0], [15.0, 13.0, 2.0], [25.0, 1.0, 4.0], [10.0, 18.0, 2.0]])
    k = torch.tensor([12.0, 9.0, 15.0, 17.0, 11.0, 14.0])
    n = torch.tensor([0.0, 3.0, 7.0, 1.0, 2.0, 5.0, 12.0])
    return {
        "shapes": (shapes, (y,)),
        "counts_of_groups": (counts_of_groups, (c,)),
        "rates_of_groups": (rates_of_groups, (k,)),
        "negative_binomial": (negative_binomial, (n,)),
        "factor_model": (factor_model, (scatter_of_rows(), 60)),
    }


@pytest.mark.parametrize("name", cases())
def test_the_fit_is_a_stationary_point_of_the_bound(name: str) -> None:
    model, args = cases()[name]
    pyro.set_rng_seed(1)
    guide = AutoCVI(model, max_joint_dim=0)
    result = CVI(model, guide, num_samples=32).run(*args, num_steps=400)
    assert result.converged, result.reason
    left = moved_by_the_gradient(model, args, guide)
    # In units of the posterior's own standard deviation; the noise of 1600 draws is up to .2
    assert all(float(x.max()) < 0.3 for x in left.values()), left


# --- Poisson-Gamma matrix factorisation ------------------------------------------------------------


def parts(x: Tensor, size: int | None = None) -> None:
    with pyro.plate("k", 3, dim=-1):
        W = pyro.sample("W", dist.Gamma(0.5, 0.3).expand([8]).to_event(1))
    with pyro.plate("rows", len(x), subsample_size=size, dim=-1) as index:
        z = pyro.sample("z", dist.Gamma(0.5, 0.5).expand([3]).to_event(1))
        pyro.sample("x", dist.Poisson(z @ W).to_event(1), obs=x[index])


def counts(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    W = torch.zeros(3, 8)
    W[0, :3], W[1, 2:6], W[2, 5:] = 3.0, 2.0, 4.0
    z = torch._standard_gamma(torch.full((rows, 3), 0.8), generator=generator) * 3
    return torch.poisson(z @ W + 0.05, generator=generator)


def divergence(x: Tensor, rate: Tensor) -> float:
    return float((torch.special.xlogy(x, x / rate) - x + rate).mean())


def test_minibatches_of_a_factorisation_end_where_all_rows_do() -> None:
    x = counts(120, 0)
    losses = {}
    for size, steps in ((None, 60), (30, 60)):
        pyro.set_rng_seed(2)
        guide = AutoCVI(parts, max_joint_dim=0)
        cvi = CVI(parts, guide, num_samples=8)
        for _ in range(steps):
            cvi.step(x, size)
        losses[size] = divergence(x, guide.posterior("z").mean @ guide.posterior("W").mean)
    baseline = divergence(x, x.mean(0).expand_as(x))
    assert losses[None] < 0.25 * baseline
    assert losses[30] < 1.15 * losses[None]


def test_factors_of_unseen_rows_come_in_one_call() -> None:
    pyro.set_rng_seed(2)
    guide = AutoCVI(parts, max_joint_dim=0)
    cvi = CVI(parts, guide, num_samples=8)
    for _ in range(60):
        cvi.step(counts(120, 0))
    x = counts(50, 1)
    new = cvi.local_posteriors(x)
    W = guide.posterior("W").mean
    torch.testing.assert_close(new.posterior("W").mean, W)
    found = divergence(x, new.posterior("z").mean @ W)
    z = torch.ones(50, 3)
    for _ in range(500):
        z = z * ((x / (z @ W)) @ W.mT) / W.sum(1)
    assert found < 1.3 * divergence(x, z @ W) + 0.02
    again = cvi.local_posteriors(x, chunk_size=20)
    torch.testing.assert_close(
        again.posterior("z").mean, new.posterior("z").mean, rtol=0.15, atol=0.15
    )


def test_the_loss_of_a_minibatch_is_that_at_its_local_optimum() -> None:
    """And looking at it changes nothing."""
    x = counts(120, 0)
    pyro.set_rng_seed(2)
    guide = AutoCVI(parts, max_joint_dim=0)
    cvi = CVI(parts, guide, num_samples=16, seed=1)
    for _ in range(40):
        cvi.step(x, 30)
    before = {n: [t.clone() for t in b.tensors] for n, b in guide.beliefs().items()}
    losses = [cvi.evaluate_loss(x, 30) for _ in range(4)]
    whole = cvi.evaluate_loss(x)
    assert all(abs(v / whole - 1) < 0.15 for v in losses)
    for n, b in guide.beliefs().items():
        assert n == "z" or all(torch.equal(s, t) for s, t in zip(before[n], b.tensors, strict=True))


def deep(x: Tensor) -> None:
    """Gammas above Gammas: a prior that one run shows, of rate 1e-12 perhaps, is no place to start."""
    with pyro.plate("w_plate", 12):
        w = pyro.sample("w", dist.Gamma(0.1, 0.3)).reshape(4, 3)
    with pyro.plate("v_plate", 24):
        v = pyro.sample("v", dist.Gamma(0.1, 0.3)).reshape(3, 8)
    with pyro.plate("rows", len(x)):
        top = pyro.sample("top", dist.Gamma(0.1, 0.1).expand([4]).to_event(1))
        low = pyro.sample("low", dist.Gamma(0.1, 0.1 / (top @ w)).to_event(1))
        pyro.sample("x", dist.Poisson(low @ v).to_event(1), obs=x)


def test_a_deep_family_of_sparse_gammas_starts_and_stays_finite() -> None:
    x = counts(60, 3)
    for seed in range(3):
        pyro.set_rng_seed(seed)
        guide = AutoCVI(deep, max_joint_dim=0)
        cvi = CVI(deep, guide)
        losses = [cvi.step(x) for _ in range(15)]
        assert all(torch.isfinite(torch.tensor(losses)))
        found = divergence(x, guide.posterior("low").mean @ guide.posterior("v").mean.reshape(3, 8))
        assert found < 0.5 * divergence(x, x.mean(0).expand_as(x))


def test_a_large_shape_in_float32_is_no_defect() -> None:
    """n a log a and n log Gamma(a) cancel: what the bound then loses in a step is rounding."""
    z = dist.Gamma(300.0, 100.0).sample((5000,))

    def model(z: Tensor) -> None:
        one = torch.ones((), dtype=z.dtype)
        a = pyro.sample("a", dist.Gamma(one, one / 300))
        mu = pyro.sample("mu", dist.InverseGamma(2 * one, 3 * one))
        with pyro.plate("n", len(z)):
            pyro.sample("z", dist.Gamma(a, a / mu), obs=z)

    found = []
    for dtype in (torch.float64, torch.float32):
        guide = AutoCVI(model, max_joint_dim=0)
        CVI(model, guide).run(z.to(dtype))
        found.append(guide.posterior("a"))
    exact, rough = found
    assert abs(float(rough.mean) - float(exact.mean)) < 0.2 * float(exact.stddev)
