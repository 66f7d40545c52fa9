"""Ways in which a posterior could be wrong without a word; each was found by an adversary once."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_cvi import CVI, AutoCVI, CVIError, explain
from pyro_cvi.algebra.latent import plain


def fit(model, *args, steps=60, num_samples=16, **kwargs):
    guide = AutoCVI(model, **kwargs)
    cvi = CVI(model, guide, num_samples=num_samples)
    return guide, cvi, [cvi.step(*args) for _ in range(steps)]


@pytest.mark.parametrize("likelihood", ["normal", "cumsum"])
def test_coupled_scalars_past_max_dense_dim_still_descend(likelihood):
    x, y = torch.randn(100, 20), torch.randn(100)

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, torch.ones(20)).to_event(1))
        with pyro.plate("data", len(y)):
            mean = x @ w if likelihood == "normal" else x[:, 0] * w.cumsum(0).sum()
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    guide, _, losses = fit(model, x, y, max_dense_dim=5)
    assert guide.plan.blocks[0].structure == "diagonal"
    assert all(b <= a + 1e-9 * abs(a) for a, b in zip(losses, losses[1:], strict=False))
    assert "quadrature" in {e.how for e in explain(model, x, y, max_dense_dim=5).edges}
    if likelihood == "normal":  # the mean-field optimum has the exact mean, and 1 / diagonal
        precision = torch.eye(20) + x.T @ x
        q = guide.posterior("w")
        mean = torch.linalg.solve(precision, x.T @ y)
        torch.testing.assert_close(q.mean, mean, atol=1e-3, rtol=0)
        torch.testing.assert_close(q.variance, 1 / precision.diagonal(), rtol=1e-4, atol=0)


def test_small_sites_keep_their_correlation_when_a_large_one_is_split_off():
    group = torch.arange(300) % 30

    def model(x, y):
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        w = pyro.sample("w", dist.Normal(0.0, 5.0))
        with pyro.plate("groups", 30):
            u = pyro.sample("u", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 300):
            pyro.sample("y", dist.Normal(b + w * x + u[group], 1.0), obs=y)

    guide, _, _ = fit(model, torch.randn(300) + 2, torch.randn(300), steps=2, max_dense_dim=10)
    assert [b.sites for b in guide.plan.blocks] == [("b", "w"), ("u",)]
    assert guide.joint(["b", "w"]).covariance_matrix[0, 1] != 0


def test_a_lost_dependence_is_found_behind_an_opaque_part():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        f = torch.zeros(2)
        f[1:] = w
        mean = f[1] + 0.1 * torch.special.i0(z)
        pyro.sample("y", dist.Normal(mean, 0.2), obs=torch.tensor(3.0))

    edges = {(e.factor, e.site): e.how for e in explain(model).edges}
    assert edges["y", "w"] == edges["y", "z"] == "points"
    guide, _, _ = fit(model, steps=80)
    assert float(guide.posterior("w").loc) > 2


def test_a_small_lost_dependence_in_float32_is_found():
    torch.set_default_dtype(torch.float32)
    x = torch.randn(2000)
    y = 1 + 0.009 * x + torch.randn(2000)

    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 0.003))
        buffer = torch.zeros(1)
        buffer[0] = b
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a + x * buffer, 1.0), obs=y)

    assert ("y", "b") in {(e.factor, e.site) for e in explain(model, y).edges}


@pytest.mark.parametrize("local", ["categorical", "bernoulli"])
def test_permuted_rows_are_new_data(local):
    y = torch.tensor([-5.0, -5.1, -4.9, 5.0, 5.1, 4.9])
    table = torch.tensor([-5.0, 5.0])

    def model(y):
        with pyro.plate("data", 6):
            if local == "categorical":
                z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            else:
                z = pyro.sample("z", dist.Bernoulli(0.5)).long()
            pyro.sample("y", dist.Normal(table[z], 1.0), obs=y)

    guide, cvi, _ = fit(model, y, steps=2)
    first = guide.posterior("z").probs.clone()
    loss = cvi.run(y.flip(0)).losses[-1]
    torch.testing.assert_close(guide.posterior("z").probs, first.flip(0))
    assert cvi.evaluate_loss(y.flip(0)) == loss
    assert cvi.evaluate_loss(y) > loss + 100


def test_counts_that_overflow_at_prior_draws_are_still_compared():
    x = torch.linspace(0.1, 1, 20)

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1000.0))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Poisson((w * x).exp()), obs=y)

    y = torch.poisson(torch.exp(2 * x))
    guide, cvi, _ = fit(model, y, steps=15)
    before = float(guide.posterior("w").loc)
    cvi.run(y + 30)
    assert float(guide.posterior("w").loc) > before + 0.5


STEPS = {
    "changepoint": lambda z, t: torch.where(t < z, 0.0, 3.0),
    "comparison": lambda z, t: 3 * (t >= z).to(t.dtype),
    "sign": lambda z, t: 1.5 * (1 + torch.sign(t - z)),
}


@pytest.mark.parametrize("way", STEPS)
def test_functions_that_are_constant_in_steps_move_the_posterior(way):
    t = torch.arange(40.0)
    y = torch.cat([torch.zeros(25), 3 * torch.ones(15)]) + 0.5 * torch.randn(40)

    def model(y):
        z = pyro.sample("z", dist.Normal(20.0, 8.0))
        with pyro.plate("data", 40):
            pyro.sample("y", dist.Normal(STEPS[way](z, t), 0.5), obs=y)

    edge = next(e for e in explain(model, y).edges if e.factor == "y")
    assert edge.how == "sampled"
    assert "score function" in edge.reason
    guide, _, losses = fit(model, y, steps=150, num_samples=64)
    assert float(guide.posterior("z").loc) == pytest.approx(24.5, abs=1.0)
    assert float(guide.posterior("z").scale) < 2
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["gamma", "beta"])
def test_a_positive_site_that_leaves_torch_moves_by_the_score_function(family):
    y = 3 * torch.randn(50)
    heads = torch.cat([torch.ones(40), torch.zeros(2)])

    def gamma(data):
        z = pyro.sample("z", dist.Gamma(2.0, 2.0))
        with pyro.plate("data", len(data)):
            pyro.sample("y", dist.Normal(0.0, 1 / math.sqrt(z.item())), obs=data)

    def beta(data):
        z = pyro.sample("z", dist.Beta(2.0, 2.0))
        with pyro.plate("data", len(data)):
            pyro.sample("y", dist.Bernoulli(float(z)), obs=data)

    model, data = (gamma, y) if family == "gamma" else (beta, heads)
    exact = 27 / (2 + 0.5 * float(y.square().sum())) if family == "gamma" else 42 / 46
    guide, _, _ = fit(model, data, steps=150, num_samples=64)
    assert float(guide.posterior("z").mean) == pytest.approx(exact, rel=0.15)


def test_a_mask_on_a_latent_is_a_flat_prior_where_data_inform_it():
    x = torch.randn(30)
    y = 2 * x + torch.randn(30)

    def model(y):
        with pyro.poutine.mask(mask=False):
            w = pyro.sample("w", dist.Normal(0.0, 0.1))
        with pyro.plate("data", 30):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    guide, _, _ = fit(model, y, steps=1)
    assert float(guide.posterior("w").loc) == pytest.approx(float(x @ y / (x @ x)))
    assert float(guide.posterior("w").scale) == pytest.approx(float(x @ x) ** -0.5)


def test_padding_under_a_mask_changes_neither_posterior_nor_bound():
    def model(y, mask):
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        with pyro.plate("g", len(y)), pyro.poutine.mask(mask=mask):
            e = pyro.sample("e", dist.Normal(0.0, tau.rsqrt()))
            pyro.sample("y", dist.Normal(e, 1.0), obs=y)

    y = torch.randn(8)
    short, _, a = fit(model, y, torch.ones(8, dtype=torch.bool), steps=40)
    padded = torch.cat([y, torch.zeros(92)])
    mask = torch.arange(100) < 8
    long, _, b = fit(model, padded, mask, steps=40)
    assert float(long.posterior("tau").rate) == pytest.approx(float(short.posterior("tau").rate))
    assert float(long.posterior("tau").concentration) == pytest.approx(6.0)
    assert b[-1] == pytest.approx(a[-1])
    torch.testing.assert_close(long.posterior("e").loc[:8], short.posterior("e").loc)


def test_a_sampled_predictor_shares_a_block_with_what_is_added_to_it():
    x = torch.randn(200, 3) * 0.3 + 2
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0, 0.5]) - 0.5))

    def model(y, opaque):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        f = torch.nansum(x * w, -1) if opaque else x @ w
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=f + b), obs=y)

    guide, _, losses = fit(model, y, True, steps=60)
    assert len(guide.plan.blocks) == 1
    _, _, exact = fit(model, y, False, steps=15)
    assert losses[-1] == pytest.approx(exact[-1], abs=2.5)


def test_distributions_without_a_rule_that_see_no_latent_are_constants():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("o", dist.Normal(w, 1.0), obs=torch.tensor(2.0))
        mixture = dist.MixtureSameFamily(
            dist.Categorical(torch.ones(5, 2)), dist.Normal(torch.zeros(5, 2), 1.0)
        )
        with pyro.plate("data", 5):
            pyro.sample("y", mixture, obs=torch.zeros(5))

    guide, _, losses = fit(model, steps=1)
    assert float(guide.posterior("w").loc) == pytest.approx(1.0)
    assert math.isfinite(losses[0])


def test_a_zero_inflated_count_with_a_latent_rate_is_sampled():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            rate = w.exp().expand(len(y))
            pyro.sample("y", dist.ZeroInflatedPoisson(rate, gate=torch.tensor(0.3)), obs=y)

    _, _, losses = fit(model, torch.tensor([0.0, 3.0, 0.0, 5.0, 2.0]), steps=30)
    assert losses[-1] < losses[0]


def test_a_category_without_alternative_is_a_legal_latent():
    def model():
        z = pyro.sample("z", dist.Categorical(torch.ones(1)))
        pyro.sample("y", dist.Normal(torch.tensor([2.0])[z], 1.0), obs=torch.tensor(1.0))

    _, _, losses = fit(model, steps=1)
    assert losses[0] == pytest.approx(-float(dist.Normal(2.0, 1.0).log_prob(torch.tensor(1.0))))


def test_python_control_flow_on_a_discrete_site_is_refused_with_a_remedy():
    def model():
        z = pyro.sample("z", dist.Bernoulli(0.5))
        loc = 1.0 if z > 0 else -1.0
        pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(CVIError, match="'z'.*all values.*torch.where"):
        explain(model)


@pytest.mark.parametrize("size", [1.0, 200.0, 300.0, 1000.0, 3000.0])
def test_an_exp_link_with_large_covariates_starts(size):
    x = torch.randn(50) * size
    y = torch.poisson(torch.exp(0.5 * x / size))

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 50):
            pyro.sample("y", dist.Poisson((w * x + b).exp()), obs=y)

    guide, cvi, _ = fit(model, y, steps=1)
    result = cvi.run(y)
    assert result.converged
    assert float(guide.posterior("w").loc) * size == pytest.approx(0.5, abs=0.5)


def test_a_failed_first_call_leaves_a_guide_that_has_seen_nothing():
    def model(y, loc):
        with pyro.plate("data", len(y)):
            m = pyro.sample("m", dist.Normal(loc, 1.0))
            pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    with pyro.validation_enabled(False), pytest.raises(CVIError):
        cvi.step(torch.zeros(2), torch.tensor(float("nan")))
    assert not dict(guide.named_buffers())
    cvi.evaluate_loss(torch.zeros(3), torch.tensor(0.0))
    assert not dict(guide.named_buffers())
    assert math.isfinite(cvi.step(torch.zeros(5), torch.tensor(0.0)))
    assert guide.posterior("m").loc.shape == (5,)


def test_a_gradient_that_is_not_finite_does_not_reach_the_parameters():
    def model(bad):
        s = pyro.param("s", torch.tensor(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        noise = (s - 1).abs().sqrt() if bad else s * 0
        pyro.sample("y", dist.Normal(z + noise, 1.0), obs=torch.tensor(1.0))

    cvi = CVI(model, AutoCVI(model), optim=pyro.optim.Adam({"lr": 0.1}))
    cvi.step(False)
    with pytest.raises(CVIError, match="parameter 's'.*not finite"):
        cvi.step(True)
    assert np.isfinite(float(pyro.param("s").detach()))


def test_an_integer_total_count_keeps_the_logits_by_quadrature():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            n = torch.full((len(y),), 9)
            pyro.sample("y", dist.Binomial(n, logits=w.expand(len(y))), obs=y)

    edges = {(e.factor, e.site): e.how for e in explain(model, torch.tensor([3.0, 5.0])).edges}
    assert edges["y", "w"] == "quadrature"


def test_the_complement_of_a_probability_is_conjugate():
    def model(y):
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Binomial(7, 1 - p), obs=y)

    guide, _, _ = fit(model, torch.tensor([3.0, 5.0]), steps=1)
    assert float(guide.posterior("p").concentration1) == pytest.approx(2 + 14 - 8)
    assert float(guide.posterior("p").concentration0) == pytest.approx(3 + 8)


def test_sites_of_two_dtypes_share_the_wider_one():
    def model(y):
        a = pyro.sample("a", dist.Normal(torch.tensor(0.0, dtype=torch.float32), 1.0))
        b = pyro.sample("b", dist.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a + b, 1.0), obs=y)

    guide, _, _ = fit(model, torch.tensor([1.0, 3.0]), steps=2)
    draw = guide(torch.tensor([1.0, 3.0]))
    assert draw["a"].dtype == torch.float32
    assert draw["b"].dtype == torch.float64
    assert float(guide.posterior("b").loc) == pytest.approx(4 / 5, rel=1e-6)


def test_a_latent_delta_is_refused_with_the_statement_to_use():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("d", dist.Delta(2 * z))

    with pytest.raises(CVIError, match="'d'.*Delta.*pyro.deterministic"):
        explain(model)


def test_the_joint_of_a_plated_block_has_independent_elements():
    x, group = torch.randn(60), torch.arange(60) % 3

    def model(y):
        with pyro.plate("groups", 3):
            a = pyro.sample("a", dist.Normal(0.0, 2.0))
            b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with pyro.plate("data", 60):
            pyro.sample("y", dist.Normal(a[group] + b[group] * x, 1.0), obs=y)

    y = torch.randn(60)
    guide, _, _ = fit(model, y, steps=1)
    assert guide.plan.blocks[0].structure == "plated"
    joint = guide.joint(["a", "b"])
    design = torch.zeros(60, 6)
    design[torch.arange(60), group] = 1
    design[torch.arange(60), 3 + group] = x
    precision = torch.eye(6) / 4 + design.T @ design
    torch.testing.assert_close(joint.covariance_matrix, torch.linalg.inv(precision))
    torch.testing.assert_close(joint.mean, torch.linalg.solve(precision, design.T @ y))


def test_many_small_sites_share_blocks_of_max_dense_dim():
    def model():
        total = sum(pyro.sample(f"z{i}", dist.Normal(0.0, 1.0)) for i in range(25))
        pyro.sample("y", dist.Normal(total, 1.0), obs=torch.tensor(1.0))

    guide, _, losses = fit(model, steps=30, max_dense_dim=10)
    assert [b.size for b in guide.plan.blocks] == [10, 10, 5]
    assert all(b <= a + 1e-9 for a, b in zip(losses, losses[1:], strict=False))


def test_a_site_past_max_dense_dim_is_split_into_its_widest_slices():
    """One Gaussian for each class, independent of the others: the covariances of a direct optimum."""
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    guide, cvi, _ = fit(model, x, y, steps=60, max_dense_dim=5)
    assert guide.block_of("w").structure == "sliced"
    dense, reference, _ = fit(model, x, y, steps=60)
    assert dense.block_of("w").structure == "dense"
    # The optimum over block-diagonal Gaussians lies below the dense one, and above independent scalars.
    apart, scalars, _ = fit(model, x, y, steps=60, max_dense_dim=2)
    assert apart.block_of("w").structure == "diagonal"
    losses = [c.evaluate_loss(x, y) for c in (reference, cvi, scalars)]
    assert losses[0] < losses[1] < losses[2]
    torch.testing.assert_close(guide.median()["w"], dense.median()["w"], atol=0.05, rtol=0)


def test_slices_are_those_of_a_dense_fit_where_nothing_joins_them():
    """Ten regressions at once: a large matrix of inputs takes its rows x^T V x one class at a time."""
    x, true = torch.randn(3000, 30), torch.randn(30, 4)
    y = dist.Bernoulli(logits=0.5 * x @ true).sample()

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(30, 4), 1.0).to_event(2))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w).to_event(1), obs=y)

    def single(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(30), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    guide, _, _ = fit(model, x, y, steps=12)
    alone, _, _ = fit(single, x, y[:, 2], steps=12)
    cov = guide.joint(["w"]).covariance_matrix.reshape(30, 4, 30, 4)[:, 2, :, 2]
    torch.testing.assert_close(guide.median()["w"][:, 2], alone.median()["w"])
    torch.testing.assert_close(cov, alone.joint(["w"]).covariance_matrix)


@pytest.mark.parametrize("likelihood", ["normal", "bernoulli"])
def test_elements_of_an_event_that_only_a_sum_joins_are_independent(likelihood):
    """A regression for each element: one small Gaussian each, and the posterior of plates."""
    x, y = torch.randn(40, 3), torch.randn(40, 5)

    def model(x, y, plates):
        w = pyro.sample("w", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
        f = x @ w.mT
        law, data = dist.Normal(f, 1.0), y
        if likelihood == "bernoulli":
            law, data = dist.Bernoulli(logits=f), (y > 0).double()
        if plates:
            with pyro.plate("rows", 40, dim=-2), pyro.plate("columns", 5, dim=-1):
                pyro.sample("y", law, obs=data)
        else:
            with pyro.plate("rows", 40):
                pyro.sample("y", law.to_event(1), obs=data)

    guide, _, losses = fit(model, x, y, False, steps=20)
    other, _, others = fit(model, x, y, True, steps=20)
    assert guide.block_of("w").structure == "plated"
    assert losses[-1] == pytest.approx(others[-1])
    torch.testing.assert_close(guide.median()["w"], other.median()["w"])
    torch.testing.assert_close(
        guide.joint(["w"]).covariance_matrix, other.joint(["w"]).covariance_matrix
    )


def test_exponential_family_pca_passes_a_mean_field_guide_with_a_learning_rate():
    """z_n w_d inside of a sigmoid, sampled: a better bound than SVI's after twenty times its steps."""
    torch.manual_seed(0)
    z, w = torch.randn(80, 2), 2 * torch.randn(15, 2)
    x = dist.Bernoulli(logits=z @ w.mT).sample()

    def model(x):
        with pyro.plate("columns", 15):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with pyro.plate("rows", 80):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=z @ w.mT).to_event(1), obs=x)

    def negative_elbo(guide):
        loss = Trace_ELBO()
        return np.mean([loss.loss(model, guide, x) for _ in range(300)])

    guide = AutoCVI(model)
    CVI(model, guide, seed=0).run(x, num_steps=60)
    assert {guide.block_of(s).structure for s in ("w", "z")} == {"plated"}
    pyro.clear_param_store()
    normal = AutoNormal(model, init_scale=0.1)
    svi = SVI(model, normal, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
    for _ in range(1200):
        svi.step(x)
    assert negative_elbo(guide) < negative_elbo(normal)


@pytest.mark.parametrize("seed", range(3))
def test_float64_data_beside_float32_latents_keep_the_algebra(seed):
    """Their log densities agree to the digits of the latents, and not to those of the data."""

    def model(y):
        with pyro.plate("groups", len(y), dim=-1):
            mu = pyro.sample("mu", dist.Normal(0.0, 50.0))
            sigma = pyro.sample("sigma", dist.LogNormal(0.0, 3.0))
            with pyro.plate("rows", y.shape[1], dim=-2):
                pyro.sample("y", dist.Normal(mu, sigma), obs=y.T)

    torch.manual_seed(seed)
    scale = (3 * torch.randn(40)).exp().double()
    y = scale.unsqueeze(-1) * torch.randn(40, 3).double() + 10 * torch.randn(40, 1).double()
    assert y.dtype == torch.float64
    assert {e.how for e in explain(model, y).edges} <= {"exact", "quadrature"}
    cvi = CVI(model, AutoCVI(model))
    wide = cvi.run(y).losses[-1]
    narrow = CVI(model, AutoCVI(model)).run(y.float()).losses[-1]
    assert wide == pytest.approx(narrow, abs=0.1)


def correlated(y):
    """Pyro writes the Cholesky factor row by row into a new tensor, inside of the site's own density."""
    L = pyro.sample("L", dist.LKJCholesky(2, 2.0))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=L), obs=y)


def test_what_a_density_writes_into_a_tensor_is_not_taken_for_a_constant():
    """At the seeds 2 and 8 the self-check agreed by chance, and the posterior was 37 % too narrow."""
    torch.manual_seed(0)
    root = torch.linalg.cholesky(torch.tensor([[1.0, 0.9], [0.9, 1.0]]))
    y = torch.randn(8, 2) @ root.T
    ends = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        for seed in (0, 2, 8):
            pyro.set_rng_seed(seed)
            cvi = CVI(correlated, AutoCVI(correlated))
            ends.append(cvi.run(y.to(dtype)).losses[-1])
            assert {e.how for e in cvi.explain().edges} == {"points"}
    assert ends == pytest.approx([ends[-1]] * len(ends), abs=1e-3)


def test_a_dependence_that_is_flat_at_a_point_is_not_lost():
    """cosh(u) is flat at zero: where the run on symbols is near it, no point near it tells.

    Without a second run on symbols 18 of 400 seeds miss it; with it, 3.
    """

    def model(y):
        u = pyro.sample("u", dist.Normal(0.0, 1.0))
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(v + torch.cosh(plain(u)), 1.0), obs=y)

    y, missed = torch.randn(20), 0
    for seed in range(100):
        pyro.set_rng_seed(seed)
        missed += ("y", "u") not in {(e.factor, e.site) for e in explain(model, y).edges}
    assert missed <= 2


def test_a_point_that_leaves_the_support_is_no_error():
    """In float32 a correlation of one to rounding is not in the support of its law."""
    torch.set_default_dtype(torch.float32)

    def model(y):
        sd = pyro.sample("sd", dist.Exponential(torch.ones(2)).to_event(1))
        L = pyro.sample("L", dist.LKJCholesky(2, 2.0))
        with pyro.plate("n", len(y)):
            pyro.sample(
                "y", dist.MultivariateNormal(torch.zeros(2), scale_tril=sd[:, None] * L), obs=y
            )

    torch.manual_seed(0)
    y = torch.randn(30, 1) * torch.tensor([1.0, -0.5]) + 0.01 * torch.randn(30, 2)
    ends = []
    for seed in range(8):
        pyro.set_rng_seed(seed)
        ends.append(CVI(model, AutoCVI(model)).run(y).losses[-1])
    assert max(ends) - min(ends) < 0.05


def detection(hits):
    """Signal detection with the priors of BUGS, under which a draw of d is 1e17 or infinite."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    precision = pyro.sample("precision", dist.Gamma(0.001, 0.001))
    with pyro.plate("people", len(hits)):
        d = pyro.sample("d", dist.Normal(mean, precision.rsqrt()))
        p = 0.5 * (1 + torch.erf(d / math.sqrt(2.0)))
        pyro.sample("hits", dist.Binomial(30, p), obs=hits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_priors_under_which_all_probabilities_are_clamped_are_no_reason_to_sample(dtype):
    torch.set_default_dtype(dtype)
    hits = torch.tensor([25.0, 20.0, 28.0, 22.0, 17.0])
    for seed in range(5):
        pyro.set_rng_seed(seed)
        edges = explain(detection, hits).edges
        assert [e.how for e in edges if e.factor == "hits"] == ["quadrature"]
