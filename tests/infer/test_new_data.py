"""New rows: local posteriors given the fitted sites, and predictive densities, against direct sums."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import CVIError

K = 3


def mixture(x):
    pi = pyro.sample("pi", dist.Dirichlet(torch.ones(K)))
    with pyro.plate("components", K):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Categorical(pi))
        pyro.sample("x", dist.Normal(mu[z], tau[z].rsqrt()), obs=x)


@pytest.fixture
def fitted():
    x = torch.cat([torch.randn(40) + m for m in (-5.0, 0.0, 5.0)])
    guide = AutoCVI(mixture)
    cvi = CVI(mixture, guide)
    cvi.run(x, num_steps=100)
    return x, cvi


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_states_of_new_rows_are_the_fitted_responsibilities(fitted, chunk):
    x, cvi = fitted
    new = cvi.local_posteriors(x[:25], chunk_size=chunk)
    p = new.posterior("z").probs
    torch.testing.assert_close(p, cvi.guide.posterior("z").probs[:25], atol=1e-6, rtol=1e-6)
    assert torch.equal(new.posterior("mu").loc, cvi.guide.posterior("mu").loc)
    assert new(x[:25])["z"].shape == (25,)
    drawn = Predictive(mixture, guide=new, num_samples=3)(x[:25])
    assert drawn["z"].shape == (3, 25)


def test_the_fit_is_not_touched(fitted):
    x, cvi = fitted
    before = {k: v.clone() for k, v in cvi.guide.state_dict().items()}
    loss = cvi.evaluate_loss(x)
    cvi.local_posteriors(x[:10])
    cvi.log_predictive(x[:10], num_samples=3)
    assert all(torch.equal(v, before[k]) for k, v in cvi.guide.state_dict().items())
    assert cvi.evaluate_loss(x) == loss


@pytest.mark.parametrize("chunk", [None, 4])
def test_predictive_density_of_a_mixture_is_the_sum_over_states(fitted, chunk):
    _, cvi = fitted
    rows = torch.tensor([-5.0, -2.5, 0.3, 4.0, 9.0])
    found = cvi.log_predictive(rows, num_samples=1000, chunk_size=chunk)
    q = cvi.guide
    mu, tau = q.posterior("mu").sample((20000,)), q.posterior("tau").sample((20000,))
    pi = q.posterior("pi").sample((20000,))
    terms = pi.log() + dist.Normal(mu, tau.rsqrt()).log_prob(rows[:, None, None])
    each = terms.logsumexp(-1)
    expected = each.logsumexp(-1) - math.log(20000)
    relative = (each - expected[:, None]).exp()
    error = (relative.std(-1) / 1000**0.5) * 1.5
    assert bool(((found - expected).abs() < 5 * error + 1e-3).all())


def test_chunks_see_the_same_draws(fitted):
    _, cvi = fitted
    rows, found = torch.linspace(-6, 6, 11), []
    for chunk in (None, 4, 1):
        pyro.set_rng_seed(3)
        found.append(cvi.log_predictive(rows, num_samples=5, chunk_size=chunk))
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found[2], found[0], atol=1e-10, rtol=1e-10)


def test_predictive_density_without_local_latents_is_closed_form():
    def model(y):
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(m, 0.5), obs=y)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.step(torch.randn(20) + 1)
    rows = torch.tensor([0.0, 1.0, 3.0])
    q = guide.posterior("m")
    expected = dist.Normal(q.loc, (q.scale**2 + 0.25).sqrt()).log_prob(rows)
    found = cvi.log_predictive(rows, num_samples=5000)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
    with pytest.raises(CVIError, match="no latent site stands in the plates"):
        cvi.local_posteriors(rows)


def factors(x, w=None):
    with pyro.plate("features", 4, dim=-1):
        weights = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z @ weights.T, 0.5).to_event(1), obs=x)


def test_scores_of_a_factor_model_are_the_gaussian_conditional():
    x = torch.randn(30, 2) @ torch.randn(2, 4) + 0.5 * torch.randn(30, 4)
    guide = AutoCVI(factors)
    cvi = CVI(factors, guide)
    cvi.run(x, num_steps=300)
    rows = torch.randn(9, 4)
    new = cvi.local_posteriors(rows)
    q = guide.posterior("w")
    m, v = q.loc, q.covariance_matrix
    precision = torch.eye(2) + (m.T @ m + v.sum(0)) / 0.25
    expected = torch.linalg.solve(precision, m.T @ rows.T / 0.25).T
    torch.testing.assert_close(new.posterior("z").loc, expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(
        new.posterior("z").precision_matrix[0], precision, atol=1e-8, rtol=1e-8
    )
    found = cvi.log_predictive(rows, num_samples=2000)
    w = q.sample((2000,))
    covariance = w @ w.mT + 0.25 * torch.eye(4)
    each = dist.MultivariateNormal(torch.zeros(4), covariance).log_prob(rows[:, None])
    direct = each.logsumexp(-1) - math.log(2000)
    torch.testing.assert_close(found, direct, atol=0.15, rtol=0.05)


def grouped(y, group, groups):
    """Weights and group effects share one dense block in the fit; new groups must not."""
    m = pyro.sample("m", dist.Normal(0.0, 10.0))
    with pyro.plate("groups", groups):
        u = pyro.sample("u", dist.Normal(m, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(u[group], 0.5), obs=y)


def test_a_new_group_of_a_hierarchical_model():
    group = torch.arange(5).repeat_interleave(8)
    y = torch.randn(5)[group] + 3 + 0.5 * torch.randn(40)
    guide = AutoCVI(grouped)
    cvi = CVI(grouped, guide)
    cvi.run(y, group, 5)
    rows, which = torch.tensor([4.0, 4.5, 2.0]), torch.tensor([0, 0, 1])
    new = cvi.local_posteriors(rows, which, 2, plates=["groups"])
    m = guide.posterior("m")
    torch.testing.assert_close(new.posterior("m").loc, m.loc)
    torch.testing.assert_close(new.posterior("m").scale, m.scale)
    precision = torch.tensor([1 + 2 / 0.25, 1 + 1 / 0.25])
    expected = (m.loc + torch.tensor([8.5, 2.0]) / 0.25) / precision
    torch.testing.assert_close(new.posterior("u").loc, expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(new.posterior("u").scale, precision.rsqrt())


def hmm(x):
    with pyro.plate("states", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        trans = pyro.sample("trans", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("sequences", len(x)):
        z = None
        for t in pyro.markov(range(x.shape[1])):
            z = pyro.sample(
                f"z_{t}", dist.Categorical(torch.ones(2) / 2 if z is None else trans[z])
            )
            pyro.sample(f"x_{t}", dist.Normal(mu[z], 0.5), obs=x[:, t])


def test_states_of_new_sequences_and_their_evidence():
    state = torch.tensor([0, 0, 0, 1, 1, 1]).repeat(6, 1)
    x = 4.0 * state - 2 + 0.5 * torch.randn(6, 6)
    guide = AutoCVI(hmm)
    cvi = CVI(hmm, guide)
    cvi.run(x, num_steps=100)
    new = cvi.local_posteriors(x[:2])
    for t in range(6):
        p, q = new.posterior(f"z_{t}").probs, guide.posterior(f"z_{t}").probs[:2]
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
    found = cvi.log_predictive(x[:2], num_samples=500)
    mu, trans = guide.posterior("mu").sample((500,)), guide.posterior("trans").sample((500,))
    log_p = dist.Normal(mu[:, None, None], 0.5).log_prob(x[:2, :, None])
    alpha = log_p[:, :, 0] - math.log(2)
    for t in range(1, 6):
        alpha = (alpha[..., None] + trans.log()[:, None]).logsumexp(-2) + log_p[:, :, t]
    direct = alpha.logsumexp(-1).logsumexp(0) - math.log(500)
    torch.testing.assert_close(found, direct, atol=0.3, rtol=0.1)


def test_a_fit_by_minibatches_serves_new_rows():
    def model(x, idx=None):
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("rows", len(x), subsample=idx) as i:
            z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
            pyro.sample("x", dist.Normal(mu[z], 1.0), obs=x[i])

    x = torch.cat([torch.randn(20) - 4, torch.randn(20) + 4])
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    for _ in range(5):
        for batch in torch.randperm(40).split(10):
            cvi.step(x, batch)
    new = cvi.local_posteriors(x[:8], plates=["rows"])
    torch.testing.assert_close(
        new.posterior("z").probs, guide.posterior("z").probs[:8], atol=1e-2, rtol=1e-2
    )


def test_misuse_is_explained(fitted):
    x, cvi = fitted
    with pytest.raises(CVIError, match="all plates have the sizes of the fit"):
        cvi.local_posteriors(x)
    assert cvi.local_posteriors(x, plates=["rows"]).posterior("z").batch_shape == (120,)
    with pytest.raises(CVIError, match="no such plate"):
        cvi.local_posteriors(x, plates=["row"])
    with pytest.raises(CVIError, match="has not been fitted"):
        CVI(mixture, AutoCVI(mixture)).log_predictive(x[:3])


# --- forecasts -------------------------------------------------------------------------------------


def local_level(T, y=None):
    """A local level by its innovations: level_t has variance t * 0.25."""
    z = pyro.sample("z", dist.Normal(torch.zeros(T), 0.5).to_event(1))
    with pyro.plate("time", T):
        pyro.sample("y", dist.Normal(z.cumsum(0), 1.0), obs=y)


def autoregression(T, y=None):
    """An AR(1) in a loop, with a name for every step."""
    x = torch.zeros(())
    for t in pyro.markov(range(T)):
        x = pyro.sample(f"x_{t}", dist.Normal(0.9 * x, 0.5))
        pyro.sample(f"y_{t}", dist.Normal(x, 1.0), obs=None if y is None or t >= len(y) else y[t])


def exact_forecast(kind, y, h):
    """Mean and covariance of the next h levels given y, by a dense Gaussian."""
    T = len(y) + h
    if kind == "level":
        root = 0.5 * torch.ones(T, T).tril()
    else:
        lag = (torch.arange(T)[:, None] - torch.arange(T)).double()
        root = 0.5 * (0.9**lag).tril()
    cov = root @ root.mT
    n = len(y)
    gain = cov[n:, :n] @ torch.linalg.inv(cov[:n, :n] + torch.eye(n))
    return gain @ y, cov[n:, n:] - gain @ cov[:n, n:]


@pytest.mark.parametrize("T", [60, 300])
@pytest.mark.parametrize("kind", ["level", "loop"])
def test_forecasts_have_the_exact_law(kind, T):
    if kind == "loop" and T > 60:
        pytest.skip("a loop of 300 steps says no more than one of 60")
    y = (0.5 * torch.randn(T)).cumsum(0) + torch.randn(T)
    model = local_level if kind == "level" else autoregression
    cvi = CVI(model, AutoCVI(model))
    cvi.run(T, y)
    S, h = 1500 if kind == "level" else 300, 5
    draws = cvi.forecast(T + h, num_samples=S)
    mean, cov = exact_forecast(kind, y, h)
    if kind == "level":
        found = draws["z"].cumsum(-1)[:, T:]
        new = draws["y"][:, T:]
    else:
        found = torch.stack([draws[f"x_{t}"] for t in range(T, T + h)], -1)
        new = torch.stack([draws[f"y_{t}"] for t in range(T, T + h)], -1)
    error = (cov.diagonal() / S).sqrt()
    assert float(((found.mean(0) - mean) / error).abs().max()) < 4
    assert float((found.var(0) / cov.diagonal() - 1).abs().max()) < 4 * (2 / S) ** 0.5
    assert float(((new - found).var(0) - 1).abs().max()) < 4 * (2 / S) ** 0.5


def test_a_discrete_chain_is_forecast():
    """States move on by the transition matrix, from the last one's posterior."""
    matrix = torch.tensor([[0.9, 0.1], [0.3, 0.7]])

    def model(T, y=None):
        z = torch.tensor(0)
        for t in pyro.markov(range(T)):
            z = pyro.sample(f"z_{t}", dist.Categorical(matrix[z]))
            data = None if y is None or t >= len(y) else y[t]
            pyro.sample(f"y_{t}", dist.Normal(2.0 * z, 1.0), obs=data)

    y = torch.tensor([0.1, 1.8, 2.2, 0.4, 1.1])
    cvi = CVI(model, AutoCVI(model))
    cvi.run(5, y)
    draws = cvi.forecast(7, num_samples=2000)
    last = torch.stack([cvi.guide.posterior("z_4").probs[..., 1 - i] for i in (1, 0)])
    wanted = last @ matrix @ matrix
    share = float((draws["z_6"] == 1).double().mean())
    assert share == pytest.approx(float(wanted[1]), abs=4 * (0.25 / 2000) ** 0.5)


def by_differences(T, y=None):
    x = pyro.sample("x", dist.Normal(0.0, 3.0).expand([T]).to_event(1))
    steps = dist.Normal(x[1:] - x[:-1], 0.1).to_event(1)
    pyro.sample("steps", steps, obs=torch.zeros(T - 1))
    with pyro.plate("time", T):
        pyro.sample("y", dist.Normal(x, 0.2), obs=y)


def gaussian_process(T, y=None):
    t = torch.arange(float(T))
    K = torch.exp(-((t[:, None] - t) ** 2) / 50) + 1e-6 * torch.eye(T)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(T), K))
    with pyro.plate("time", T):
        pyro.sample("y", dist.Normal(f, 0.2), obs=y)


@pytest.mark.parametrize(
    ("model", "said"), [(by_differences, "'steps'"), (gaussian_process, "MultivariateNormal")]
)
def test_what_the_model_does_not_draw_from_the_past_is_not_forecast(model, said):
    """New elements would come from the prior, whatever the old ones are."""
    cvi = CVI(model, AutoCVI(model))
    cvi.run(30, torch.full((30,), 2.0))
    with pytest.raises(CVIError, match=said):
        cvi.forecast(33)


def test_noise_that_keeps_its_prior_is_integrated_out_of_new_rows():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            e = pyro.sample("e", dist.Normal(0.0, 2.0), infer={"posterior": "prior"})
            pyro.sample("y", dist.Normal(w + e, 0.5), obs=y)

    cvi = CVI(model, AutoCVI(model))
    cvi.run(2.5 * torch.randn(50))
    q = cvi.guide.posterior("w")
    new = torch.tensor([0.0, 3.0])
    exact = dist.Normal(q.mean, (q.variance + 4.25).sqrt()).log_prob(new)
    found = cvi.log_predictive(new, num_samples=4000)
    torch.testing.assert_close(found, exact, atol=0.15, rtol=0)


def test_forecasts_say_what_is_wrong():
    y = torch.randn(20)
    cvi = CVI(local_level, AutoCVI(local_level))
    with pytest.raises(CVIError, match="before"):
        cvi.forecast(25)
    cvi.run(20, y)
    with pytest.raises(CVIError, match="at least the elements of the fit"):
        cvi.forecast(10)
    with pytest.raises(CVIError, match="num_samples"):
        cvi.forecast(25, num_samples=0)
    loop = CVI(autoregression, AutoCVI(autoregression))
    loop.run(10, y[:10])
    with pytest.raises(CVIError, match="does not sample it"):
        loop.forecast(5)


def test_new_rows_beside_a_block_that_is_seen_through_views():
    """A regression of more columns than rows, and a local effect of each row."""
    X, new = torch.randn(12, 400), torch.randn(5, 400)
    y = X[:, 0] + 0.1 * torch.randn(12)

    def model(X, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(400), 0.1).to_event(1))
        with pyro.plate("rows", len(X)):
            e = pyro.sample("e", dist.Beta(2.0, 2.0))
            pyro.sample("c", dist.Bernoulli(e), obs=torch.ones(len(X)))
            pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    cvi = CVI(model, AutoCVI(model))
    cvi.run(X, y)
    assert cvi.guide.block_of("w").structure == "process"
    rows = cvi.local_posteriors(new, new[:, 0], plates=["rows"])
    torch.testing.assert_close(rows.posterior("w").mean, cvi.guide.posterior("w").mean)
    torch.testing.assert_close(
        rows.joint(["w"]).covariance_matrix, cvi.guide.joint(["w"]).covariance_matrix
    )
    torch.testing.assert_close(rows.posterior("e").mean, torch.full((5,), 3 / 5))
