"""Minibatches: the stochastic rule is SVI, stored messages are exact, elements keep their latents."""

import copy
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import CVIError
from pyro_cvi.graph.stored import Batches, SiteMessages
from pyro_cvi.updates import FamilyBelief

N, K = 60, 3


def mixture(x, idx=None, size=None):
    """Known noise: given the states, means and weights are independent of each other."""
    pi = pyro.sample("pi", dist.Dirichlet(torch.full((K,), 2.0)))
    with pyro.plate("components", K):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with pyro.plate("data", len(x), subsample=idx, subsample_size=size) as i:
        z = pyro.sample("z", dist.Categorical(pi))
        pyro.sample("x", dist.Normal(mu[z], 0.7), obs=x[i])


def data():
    return torch.cat([torch.randn(N // 3) * 0.7 + m for m in (-4.0, 0.0, 4.0)])[torch.randperm(N)]


def svi_step(x, total, alpha, m, v, rho):
    """Hoffman et al. (2013), figure 4: local optimum, intermediate global parameters, average."""
    log_pi = torch.digamma(alpha) - torch.digamma(alpha.sum())
    logits = log_pi - 0.5 * ((x[:, None] - m) ** 2 + v) / 0.49
    r = logits.softmax(-1)
    scale = total / len(x)
    alpha_hat = 2.0 + scale * r.sum(0)
    precision_hat = 1 / 9 + scale * r.sum(0) / 0.49
    first_hat = scale * (r * x[:, None]).sum(0) / 0.49
    precision = (1 - rho) / v + rho * precision_hat
    first = (1 - rho) * m / v + rho * first_hat
    return (1 - rho) * alpha + rho * alpha_hat, first / precision, 1 / precision


def test_the_stochastic_rule_is_svi_step_by_step():
    x = data()
    guide = AutoCVI(mixture)
    cvi = CVI(mixture, guide, minibatch="stochastic", delay=2.0, forget=0.8)
    order = torch.randperm(N)
    cvi.step(x, order[:12])  # the start, which breaks the symmetry, is not part of the rule
    q = guide.posterior("mu")
    state = (guide.posterior("pi").concentration, q.loc, q.scale**2)
    for t, batch in enumerate([*order[12:].split(14), order[:9]], start=1):
        cvi.step(x, batch)
        state = svi_step(x[batch], N, *state, (t + 2.0) ** -0.8)
        q = guide.posterior("mu")
        torch.testing.assert_close(guide.posterior("pi").concentration, state[0])
        torch.testing.assert_close(q.loc, state[1])
        torch.testing.assert_close(q.scale**2, state[2])


def regression(x, y, idx=None, size=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 2.0).to_event(1))
    with pyro.plate("rows", len(x), subsample=idx, subsample_size=size) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


def regression_data(n=50, d=3, far=0.0):
    x = torch.randn(n, d)
    return x, x @ torch.randn(d) + 0.5 * torch.randn(n) + far


def closed_form(x, y):
    precision = torch.eye(x.shape[1], dtype=x.dtype) / 4 + x.T @ x / 0.25
    return torch.linalg.solve(precision, x.T @ y / 0.25), precision


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_pass_with_stored_messages_is_the_exact_posterior(dtype):
    torch.set_default_dtype(dtype)
    x, y = regression_data()
    guide = AutoCVI(regression)
    cvi = CVI(regression, guide)
    for batch in torch.randperm(50).split(12):  # the last one has two rows
        cvi.step(x, y, batch)
    q, (m, precision) = guide.posterior("w"), closed_form(x, y)
    tol = 1e-8 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(q.loc, m, atol=tol, rtol=tol)
    torch.testing.assert_close(q.precision_matrix, precision, atol=tol, rtol=tol)


@pytest.mark.parametrize("size", [10, 12])
def test_a_plate_that_draws_its_rows_sees_every_row_in_a_pass(size):
    x, y = regression_data()
    guide = AutoCVI(regression)
    CVI(regression, guide).run(x, y, None, size, num_steps=-(-50 // size))
    q, (m, precision) = guide.posterior("w"), closed_form(x, y)
    torch.testing.assert_close(q.loc, m, atol=1e-9, rtol=1e-9)  # of 12, the last batch has repeats
    torch.testing.assert_close(q.precision_matrix, precision)


def test_batches_that_overlap_count_every_row_once():
    x, y = regression_data()
    guide = AutoCVI(regression)
    cvi = CVI(regression, guide)
    for _ in range(7):
        cvi.step(x, y, torch.randperm(50)[:20])
    for batch in torch.randperm(50).split(10):  # a pass without overlap: nothing old is left
        cvi.step(x, y, batch)
    q, (m, precision) = guide.posterior("w"), closed_form(x, y)
    torch.testing.assert_close(q.loc, m, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(q.precision_matrix, precision)


def noisy_regression(x, y, idx=None):
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 2.0).to_event(1))
    with pyro.plate("rows", len(x), subsample=idx) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, tau.rsqrt()), obs=y[i])


def test_passes_over_the_same_batches_end_at_the_optimum_of_all_rows():
    x, y = regression_data()
    full, batched = AutoCVI(noisy_regression), AutoCVI(noisy_regression)
    CVI(noisy_regression, full).run(x, y, num_steps=200, tol=1e-14)
    cvi = CVI(noisy_regression, batched)
    for _ in range(40):
        for batch in torch.arange(50).split(13):
            cvi.step(x, y, batch)
    torch.testing.assert_close(
        batched.posterior("w").loc, full.posterior("w").loc, atol=1e-8, rtol=1e-8
    )
    torch.testing.assert_close(
        batched.posterior("tau").rate, full.posterior("tau").rate, atol=1e-8, rtol=1e-8
    )


def logistic(x, y, idx=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 2.0).to_event(1))
    with pyro.plate("rows", len(x), subsample=idx) as i:
        pyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def test_stored_messages_of_quadrature_factors_reach_the_full_optimum():
    x = torch.randn(200, 4)
    y = (torch.rand(200) < torch.sigmoid(x @ torch.tensor([1.0, -1.0, 0.5, 2.0]))).double()
    full, batched = AutoCVI(logistic), AutoCVI(logistic)
    CVI(logistic, full).run(x, y, num_steps=100, tol=1e-14)
    cvi = CVI(logistic, batched)
    batches = torch.randperm(200).split(40)
    for _ in range(25):
        for i in torch.randperm(5).tolist():
            cvi.step(x, y, batches[i])
    a, b = batched.posterior("w"), full.posterior("w")
    torch.testing.assert_close(a.loc, b.loc, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, atol=1e-5, rtol=1e-4)


def test_quadrature_in_batches_that_are_mixed_anew_goes_over_to_the_stochastic_rule():
    x = torch.randn(200, 4)
    y = (torch.rand(200) < torch.sigmoid(x @ torch.tensor([1.0, -1.0, 0.5, 2.0]))).double()
    full, batched = AutoCVI(logistic), AutoCVI(logistic)
    CVI(logistic, full).run(x, y, num_steps=100, tol=1e-14)
    cvi = CVI(logistic, batched)
    for _ in range(25):
        for batch in torch.randperm(200).split(40):
            cvi.step(x, y, batch)
    a, b = batched.posterior("w"), full.posterior("w")
    sd = b.covariance_matrix.diagonal().sqrt()
    assert float(((a.loc - b.loc) / sd).abs().max()) < 0.1


@pytest.mark.parametrize("size", [10, 12, 30])
def test_a_last_batch_with_repeats_ends_at_the_optimum_of_all_rows(size):
    def model(x, y, size):
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        with pyro.plate("rows", len(x), subsample_size=size) as i:
            pyro.sample("y", dist.Normal(x[i] @ w, tau.rsqrt()), obs=y[i])

    x, y = regression_data()
    full, batched = AutoCVI(model), AutoCVI(model)
    CVI(model, full).run(x, y, len(x), num_steps=200, tol=1e-14)
    CVI(model, batched).run(x, y, size, num_steps=60 * math.ceil(50 / size))
    a, b = batched.posterior("tau"), full.posterior("tau")
    torch.testing.assert_close(a.concentration, b.concentration)
    torch.testing.assert_close(a.rate, b.rate, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_are_mixed_anew_or_without_identity_get_the_stochastic_rule(stream):
    def model(x, y, idx, size):
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(10), 2.0).to_event(1))
        with pyro.plate("rows", 200, subsample=idx, subsample_size=size):
            pyro.sample("y", dist.Normal(x @ w, tau.rsqrt()), obs=y)

    x = torch.randn(200, 10)
    y = x @ torch.randn(10) + 0.5 * torch.randn(200)
    found = []
    for minibatch in ("stored", "stochastic"):
        pyro.set_rng_seed(0)
        guide = AutoCVI(model)
        cvi = CVI(model, guide, minibatch=minibatch)
        for _ in range(40):
            for i in torch.randperm(200).split(40):
                cvi.step(x[i], y[i], *((None, 40) if stream else (i, None)))
        found.append(guide.posterior("tau"))
    full = AutoCVI(model)
    CVI(model, full).run(x, y, None, 200, num_steps=200, tol=1e-14)
    best = full.posterior("tau")
    for q in found:
        assert float((q.mean - best.mean).abs() / best.stddev) < 0.25
    if stream:
        torch.testing.assert_close(found[0].mean, found[1].mean)


def test_sampled_local_latents_in_batches_of_unequal_size():
    def model(y, idx):
        with pyro.plate("rows", len(y), subsample=idx) as i:
            z = pyro.sample("z", dist.Gamma(2.0, 1.0).expand([len(i), 2]).to_event(1))
            pyro.sample("y", dist.Poisson(z.sum(-1)), obs=y[i])

    y = torch.tensor([3.0, 0.0, 7.0, 2.0, 5.0])
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    assert all(math.isfinite(cvi.step(y, b)) for _ in range(5) for b in torch.arange(5).split(3))
    means = guide.posterior("z").mean.sum(-1)
    assert float(means[2]) > float(means[1])


def test_local_sites_with_events_are_kept_by_element():
    def model(y, p, idx):
        with pyro.plate("rows", len(y), subsample=idx) as i:
            z = pyro.sample("z", dist.Gamma(2.0, 1.0).expand([len(i), 3]).to_event(1))
            pyro.sample("y", dist.Poisson(z).to_event(1), obs=y[i])
            b = pyro.sample("b", dist.Beta(1.0, 1.0).expand([len(i), 3]).to_event(1))
            pyro.sample("p", dist.Bernoulli(b).to_event(1), obs=p[i])

    y = torch.arange(15.0).reshape(5, 3)
    p = (torch.arange(15.0).reshape(5, 3) % 2).flip(0)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for batch in (torch.tensor([4, 0, 2]), torch.tensor([3, 1])):
        cvi.step(y, p, batch)
    z, b = guide.posterior("z").base_dist, guide.posterior("b").base_dist
    torch.testing.assert_close(z.concentration, 2 + y)
    torch.testing.assert_close(z.rate, torch.full((5, 3), 2.0))
    torch.testing.assert_close(b.concentration1, 1 + p)
    torch.testing.assert_close(b.concentration0, 2 - p)


def test_elements_that_were_in_no_batch_are_told_of():
    def model(x, idx):
        with pyro.plate("rows", 30, subsample=idx) as i:
            u = pyro.sample("u", dist.Normal(0.0, 2.0))
            pyro.sample("x", dist.Normal(u, 1.0), obs=x[i])

    x = torch.randn(30)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.step(x, torch.arange(10))
    cvi.step(x, torch.arange(10, 20))
    for ask in (lambda: guide.posterior("u"), guide.median, lambda: guide(x, torch.arange(15, 25))):
        with pytest.warns(UserWarning, match="'u'.* elements of plate 'rows' .* no minibatch"):
            ask()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guide(x, torch.arange(5, 15))
        cvi.step(x, torch.arange(20, 30))
        torch.testing.assert_close(guide.posterior("u").mean, 0.8 * x)


def test_local_latents_with_data_in_another_subsampled_plate_are_refused():
    def model(x, sizes):
        with pyro.plate("a", 6, dim=-2, subsample_size=sizes[0]) as i:
            u = pyro.sample("u", dist.Normal(0.0, 1.0))
            with pyro.plate("b", 8, dim=-1, subsample_size=sizes[1]) as j:
                pyro.sample("x", dist.Normal(u, 1.0), obs=x[i][:, j])

    x = torch.randn(6, 8)
    for sizes in ((3, 8), (6, 4)):
        CVI(model, AutoCVI(model)).step(x, sizes)
    with pytest.raises(CVIError, match="'u'.*subsampled plate 'a'.*'x'.*plate 'b' as well"):
        CVI(model, AutoCVI(model)).step(x, (3, 4))


def test_rows_far_from_zero_keep_their_digits_in_float32():
    torch.set_default_dtype(torch.float32)

    def model(y, idx=None):
        m = pyro.sample("m", dist.Normal(10000.0, 10.0))
        with pyro.plate("rows", len(y), subsample=idx) as i:
            pyro.sample("y", dist.Normal(m, 1.0), obs=y[i])

    y = 10003.0 + torch.randn(40)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for batch in torch.arange(40).split(8):
        cvi.step(y, batch)
    precision = 0.01 + 40
    expected = 10000.0 + float((y.double() - 10000.0).sum()) / precision
    assert float(guide.posterior("m").loc) == pytest.approx(expected, abs=2e-3)


# --- local latents ---------------------------------------------------------------------------------


def test_a_mixture_in_minibatches_ends_where_the_whole_data_does():
    x = data()
    full, batched = AutoCVI(mixture), AutoCVI(mixture)
    CVI(mixture, full).run(x, num_steps=200, tol=1e-14)
    cvi = CVI(mixture, batched)
    for _ in range(30):
        for batch in torch.arange(N).split(17):
            cvi.step(x, batch)
    a, order_a = batched.posterior("mu").loc.sort()
    b, order_b = full.posterior("mu").loc.sort()
    torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-7)
    p, q = batched.posterior("z").probs[:, order_a], full.posterior("z").probs[:, order_b]
    torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


def factor_model(x, idx=None, size=None):
    """Local Gaussians of two sites in one plate, beside a shared weight and a shared offset."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    c = pyro.sample("c", dist.Normal(0.0, 5.0))
    with pyro.plate("rows", len(x), subsample=idx, subsample_size=size, dim=-1) as i:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 0.5).to_event(1))
        m = torch.stack([c + a + w[0] * 0, a + b[..., 0], w[1] + b[..., 1]], -1)
        pyro.sample("x", dist.Normal(m, 1.0).to_event(1), obs=x[i])


def test_local_gaussians_of_several_sites_are_kept_by_element():
    x = torch.randn(20, 3) + 2
    batched = AutoCVI(factor_model)
    cvi = CVI(factor_model, batched)
    for _ in range(60):
        for batch in torch.arange(20).split(6):
            cvi.step(x, batch)
    assert [b.structure for b in batched.plan.blocks] == ["dense", "plated"]
    # the same mean field, by hand: rows given (w, c), and (w, c) given rows
    w1, c, pw, pc = 0.0, 0.0, 1.0, 0.04
    for _ in range(500):
        first = x[:, 0] - c
        # a, b0 jointly; b1 on its own
        precision = torch.tensor([[3.0, 1.0], [1.0, 5.0]])
        rhs = torch.stack([first + x[:, 1], x[:, 1]], -1)
        ab = torch.linalg.solve(precision, rhs.T).T
        b1 = (x[:, 2] - w1) / 5
        pc, pw = 20.04, 21.0
        c = float((x[:, 0] - ab[:, 0]).sum() / pc)
        w1 = float((x[:, 2] - b1).sum() / pw)
    torch.testing.assert_close(batched.posterior("a").loc, ab[:, 0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(batched.posterior("b").loc[:, 1], b1, atol=1e-6, rtol=1e-6)
    assert float(batched.posterior("c").loc) == pytest.approx(c, abs=1e-6)
    assert float(batched.posterior("c").scale) == pytest.approx(pc**-0.5, rel=1e-6)
    assert batched.posterior("a").batch_shape == (20,)


def test_a_chain_of_states_in_subsampled_sequences():
    mu = torch.tensor([-2.0, 2.0])
    table = torch.tensor([[0.8, 0.2], [0.3, 0.7]])

    def model(x, idx=None):
        with pyro.plate("sequences", len(x), subsample=idx) as i:
            z = None
            for t in pyro.markov(range(x.shape[1])):
                p = torch.ones(2) / 2 if z is None else table[z]
                z = pyro.sample(f"z_{t}", dist.Categorical(p))
                pyro.sample(f"x_{t}", dist.Normal(mu[z], 1.0), obs=x[i, t])

    x = torch.randn(7, 4)
    full, batched = AutoCVI(model), AutoCVI(model)
    CVI(model, full).step(x)
    cvi = CVI(model, batched)
    for batch in torch.arange(7).split(3):
        cvi.step(x, batch)
    for t in range(4):
        torch.testing.assert_close(
            batched.posterior(f"z_{t}").probs, full.posterior(f"z_{t}").probs
        )


def test_the_average_loss_of_a_partition_is_the_loss_of_all_rows():
    x, y = regression_data(48)
    guide = AutoCVI(regression)
    cvi = CVI(regression, guide)
    cvi.step(x, y)
    whole = cvi.evaluate_loss(x, y)
    parts = [cvi.evaluate_loss(x, y, batch) for batch in torch.randperm(48).split(8)]
    assert sum(parts) / 6 == pytest.approx(whole, rel=1e-12)


def test_the_loss_of_a_minibatch_is_that_of_pyro():
    """Scales of local latents: the guide's own ELBO by Pyro, on the same elements."""
    x = data()
    guide = AutoCVI(mixture)
    cvi = CVI(mixture, guide)
    batch = torch.arange(N)[::4]
    for _ in range(3):
        cvi.step(x, batch)
    found = cvi.evaluate_loss(x, batch)
    values = torch.tensor([Trace_ELBO().loss(mixture, guide, x, batch) for _ in range(300)])
    assert abs(float(values.mean()) - found) < 4 * float(values.std()) / 300**0.5


def nested_topics(words, mask, idx=None):
    with pyro.plate("topics", 2):
        phi = pyro.sample("phi", dist.Dirichlet(torch.full((6,), 0.5)))
    with pyro.plate("docs", len(words), subsample=idx, dim=-2) as i:
        theta = pyro.sample("theta", dist.Dirichlet(torch.full((2,), 0.7)))
        with pyro.plate("words", words.shape[1], dim=-1), poutine.mask(mask=mask[i]):
            z = pyro.sample("z", dist.Categorical(theta))
            pyro.sample("w", dist.Categorical(phi[z]), obs=words[i])


def random_slopes(x, y, idx=None):
    m = pyro.sample("m", dist.Normal(torch.zeros(2), 5.0).to_event(1))
    t = pyro.sample("t", dist.Gamma(2.0 * torch.ones(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.Gamma(2.0, 1.0))
    with pyro.plate("groups", len(x), subsample=idx, dim=-2) as i:
        u = pyro.sample("u", dist.Normal(m, t.rsqrt()).to_event(1))
        with pyro.plate("rows", x.shape[1], dim=-1):
            pyro.sample("y", dist.Normal(u[..., 0] + u[..., 1] * x[i], s.rsqrt()), obs=y[i])


def rates(y, _, idx=None):
    b = pyro.sample("b", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(y), subsample=idx, dim=-2) as i:
        r = pyro.sample("r", dist.Gamma(3.0, b))
        with pyro.plate("columns", y.shape[1], dim=-1):
            pyro.sample("y", dist.Poisson(r), obs=y[i])


def proportions(k, n, idx=None):
    with pyro.plate("states", 2):
        a = pyro.sample("a", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", len(k), subsample=idx) as i:
        z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
        p = pyro.sample("p", dist.Beta(1.0, 3.0))
        pyro.sample("k", dist.Binomial(n[i], a[z]), obs=k[i])
        pyro.sample("k2", dist.Binomial(n[i], p), obs=k[i])


def some_data(model):
    if model is nested_topics:
        lengths = torch.randint(3, 9, (10,))
        return torch.randint(6, (10, 9)), torch.arange(9) < lengths[:, None]
    if model is random_slopes:
        x = torch.randn(11, 6)
        return x, 1 + x * (2 + 0.5 * torch.randn(11, 1)) + 0.3 * torch.randn(11, 6)
    if model is rates:
        return torch.poisson(10 * torch.rand(12, 3)), None
    n = torch.randint(5, 20, (13,)).double()
    return torch.binomial(n, torch.rand(13)), n


@pytest.mark.parametrize(
    "model", [nested_topics, random_slopes, rates, proportions], ids=lambda m: m.__name__
)
def test_passes_end_at_a_fixed_point_of_all_elements_at_once(model):
    args = some_data(model)
    cvi = CVI(model, AutoCVI(model))
    for _ in range(30):
        for batch in torch.arange(len(args[0])).split(5):
            cvi.step(*args, batch)
    everything = torch.arange(len(args[0]))
    before = cvi.evaluate_loss(*args, everything)
    assert cvi.step(*args, everything) == pytest.approx(before, rel=1e-5)


# --- what can go wrong -----------------------------------------------------------------------------


def test_a_batch_that_fails_leaves_everything_as_it_was():
    x, y = regression_data()
    guide, clean = AutoCVI(regression), AutoCVI(regression)
    cvi, other = CVI(regression, guide), CVI(regression, clean)
    batches = list(torch.arange(50).split(10))
    bad = y.clone()
    bad[15] = torch.nan
    for k, batch in enumerate(batches):
        if k == 1:
            with pytest.raises(CVIError, match="NaN"):
                cvi.step(x, bad, batch)
        cvi.step(x, y, batch)
        other.step(x, y, batch)
    assert torch.equal(guide.posterior("w").loc, clean.posterior("w").loc)


def test_a_new_cvi_goes_on_from_a_fitted_posterior():
    x, y = regression_data()
    guide = AutoCVI(regression)
    CVI(regression, guide).step(x, y)
    before = copy.deepcopy(guide.state_dict())
    CVI(regression, guide).step(x, y, torch.arange(10))
    q, (m, _) = guide.posterior("w"), closed_form(x, y)
    sd = q.covariance_matrix.diagonal().sqrt()
    assert float(((q.loc - m) / sd).abs().max()) < 2.0
    assert set(guide.state_dict()) == set(before)


def test_local_posteriors_survive_a_state_dict():
    x = data()
    guide = AutoCVI(mixture)
    cvi = CVI(mixture, guide)
    for batch in torch.arange(N).split(20):
        cvi.step(x, batch)
    other = AutoCVI(mixture)
    other.load_state_dict(guide.state_dict())
    CVI(mixture, other).evaluate_loss(x, torch.arange(20))
    other(x, torch.arange(5))
    torch.testing.assert_close(other.posterior("z").probs, guide.posterior("z").probs)
    torch.testing.assert_close(other.posterior("mu").loc, guide.posterior("mu").loc)


def test_a_guide_draws_the_elements_that_the_model_names():
    x = data()
    guide = AutoCVI(mixture)
    cvi = CVI(mixture, guide)
    for batch in torch.arange(N).split(20):
        cvi.step(x, batch)
    batch = torch.tensor([3, 40, 11])
    p = guide.posterior("z").probs[batch]
    drawn = torch.stack([guide(x, batch)["z"] for _ in range(400)])
    frequency = torch.nn.functional.one_hot(drawn, K).double().mean(0)
    assert float((frequency - p).abs().max()) < 4 * 0.5 / 400**0.5


def test_indices_of_model_and_guide_that_differ_are_an_error():
    x = data()
    guide = AutoCVI(
        mixture, create_plates=lambda x, idx=None: pyro.plate("data", N, subsample=idx.flip(0))
    )
    CVI(mixture, guide).step(x, torch.arange(6))
    with pytest.raises(CVIError, match="plate 'data'.*other indices"):
        guide(x, torch.arange(6))


def test_a_minibatch_after_all_rows_is_not_taken_for_them():
    """The plan of the last step holds all rows; other indices are another step."""
    x, y = regression_data()
    guide = AutoCVI(regression)
    cvi = CVI(regression, guide)
    whole = cvi.step(x, y)
    part = torch.arange(10)
    w = guide.posterior("w")
    residual = y[part] - x[part] @ w.loc
    spread = (x[part] @ w.covariance_matrix * x[part]).sum(-1)
    log_p = -0.5 * (residual**2 + spread) / 0.25 - 0.5 * torch.log(
        torch.tensor(2 * torch.pi * 0.25)
    )
    prior = dist.MultivariateNormal(torch.zeros(3), 4 * torch.eye(3))
    kl = torch.distributions.kl_divergence(w, prior)
    assert cvi.evaluate_loss(x, y, part) == pytest.approx(float(kl - 5 * log_p.sum()), rel=1e-9)
    assert cvi.evaluate_loss(x, y) == pytest.approx(whole, rel=1e-12)


def test_minibatches_after_a_fit_of_all_elements_are_refused():
    x = data()
    cvi = CVI(mixture, AutoCVI(mixture))
    cvi.step(x)
    with pytest.raises(CVIError, match="'z'.*fitted on all elements of plate 'data'"):
        cvi.step(x, torch.arange(6))


def test_what_failed_the_self_check_stays_sampled_in_the_batches_after():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        shift = torch.tensor(a.item())  # torch does not see this
        with pyro.plate("data", len(y), subsample_size=10) as rows:
            pyro.sample("y", dist.Normal(b + shift, 1.0), obs=y[rows])

    cvi = CVI(model, AutoCVI(model))
    for _ in range(6):  # checked in steps 0, 1, 2 and 4
        cvi.step(torch.ones(40))
        assert cvi.guide.plan.sampled_sites() == {"a", "b"}


def test_options_are_checked():
    guide = AutoCVI(mixture)
    with pytest.raises(CVIError, match="minibatch is 'saga'"):
        CVI(mixture, guide, minibatch="saga")
    with pytest.raises(CVIError, match="forget"):
        CVI(mixture, guide, forget=0.3)


# --- the parts -------------------------------------------------------------------------------------


def test_batches_visit_every_element_in_every_pass():
    batches = Batches(10, torch.tensor([4, 1, 7]))
    for _ in range(3):
        seen = []
        for _ in range(4):
            seen.append(batches.next(3))
            batches.done(3)
        assert set(torch.cat(seen).tolist()) == set(range(10))
        assert seen[0].tolist() == [4, 1, 7]


def test_stored_messages_are_a_weighted_sum_and_can_be_undone():
    from pyro_cvi.families import GAMMA

    belief = FamilyBelief(GAMMA, (torch.tensor(1.0), torch.tensor(-1.0)))
    rest = (torch.tensor(0.5), torch.tensor(-0.5))
    memory = SiteMessages(6, fitted=False)
    memory.begin(torch.tensor([0, 1]))
    one = (torch.tensor(2.0), torch.tensor(-1.0))
    total = memory.put("a", belief, one, rest)
    assert float(total[0]) == 0.5 + 3 * 2.0  # two of six elements stand for all
    memory.begin(torch.tensor([1, 2, 3, 4, 5]))
    two = (torch.tensor(10.0), torch.tensor(-5.0))
    total = memory.put("a", belief, two, rest)
    assert float(total[0]) == 0.5 + 1.0 + 10.0  # one element of the first batch is left
    memory.undo()
    memory.begin(torch.tensor([0, 1]))
    total = memory.put("a", belief, (torch.tensor(4.0), torch.tensor(-1.0)), rest)
    assert float(total[0]) == 0.5 + 3 * 4.0


@pytest.mark.parametrize("minibatch", ["stored", "stochastic"])
def test_minibatches_of_a_likelihood_that_is_not_log_concave(minibatch):
    """Far from the data a Student t's curvature is negative, and a full step ends anywhere."""
    X = torch.randn(300, 5)
    y = dist.StudentT(3.0, X @ torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0]), 0.1).sample()

    def model(X, y, size=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(5), 10.0).to_event(1))
        with pyro.plate("rows", len(y), subsample_size=size) as i:
            pyro.sample("y", dist.StudentT(3.0, X[i] @ w, 0.1), obs=y[i])

    whole = CVI(model, AutoCVI(model))
    whole.run(X, y)
    cvi = CVI(model, AutoCVI(model), minibatch=minibatch)
    for _ in range(120):
        cvi.step(X, y, 60)
    q, wanted = cvi.guide.posterior("w"), whole.guide.posterior("w")
    apart = (q.mean - wanted.mean).abs() / wanted.variance.sqrt()
    assert float(apart.max()) < (0.01 if minibatch == "stored" else 1.0)
    ratio = (q.variance / wanted.variance).sqrt()
    assert float((ratio - 1).abs().max()) < (0.01 if minibatch == "stored" else 0.3)


@pytest.mark.parametrize("minibatch", ["stored", "stochastic"])
def test_sampled_factors_in_minibatches_come_to_rest_at_the_optimum_of_all_rows(minibatch):
    """A step that is judged on its own batch alone is never too long for it, and follows it for ever."""
    x = torch.randn(150, 2)
    y = dist.StudentT(4.0, x @ torch.tensor([1.0, -1.0]), 0.5).sample()

    def model(x, y, idx=None):
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        with pyro.plate("rows", len(y), subsample=idx) as i:
            pyro.sample("y", dist.StudentT(4.0, x[i] @ w, tau.rsqrt()), obs=y[i])

    whole, cvi = CVI(model, AutoCVI(model)), CVI(model, AutoCVI(model), minibatch=minibatch)
    whole.run(x, y)  # within 0.03 standard deviations, by its own test
    for _ in range(20):
        for batch in torch.randperm(150).split(30):
            cvi.step(x, y, batch)
    assert cvi.guide.plan.sampled_sites() == {"tau", "w"}
    for site in ("tau", "w"):
        q, wanted = cvi.guide.posterior(site), whole.guide.posterior(site)
        apart = (q.mean - wanted.mean).abs() / wanted.variance.sqrt()
        # rho is 0.04 at the end: noise of (5 batches * rho / 2)^0.5 = 0.3 if rows came at random. Each
        # comes once in a pass, which cancels most: 0.06 at most, from six seeds. It was 0.1 to 0.7.
        assert float(apart.max()) < 0.1


def test_a_stochastic_rule_without_delay_takes_its_first_batches_for_all_rows():
    """rho_t = t^-forget, and one at t = 0: mean = 3 sum y / (1 + 12) after each of the first two."""
    y = torch.arange(12.0)

    def model(i):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 12, subsample=i):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])

    cvi = CVI(model, AutoCVI(model), minibatch="stochastic", delay=0.0)
    for rows in (torch.arange(4), torch.arange(4, 8)):
        cvi.step(rows)
        torch.testing.assert_close(cvi.guide.posterior("mu").mean, 3 * y[rows].sum() / 13)
