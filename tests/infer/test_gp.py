"""Gaussian processes of pyro.contrib.gp, and sites that keep their prior.

Oracles: the bound of Hensman et al. (2015), written out with Gauss-Hermite quadrature and maximised by
L-BFGS; a dense Gaussian; Pyro's own loss at the posterior that `store` has written.
"""

import numpy as np
import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch.distributions import kl_divergence

from pyro_cvi import CVI, AutoCVI, CVIError, explain
from pyro_cvi.gp import GaussianProcess

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
NODES, WEIGHTS = torch.tensor(NODES), torch.tensor(WEIGHTS / WEIGHTS.sum())
N, M = 120, 9


def data():
    X = torch.linspace(-3, 3, N)
    y = dist.Bernoulli(logits=3 * torch.sin(2 * X)).sample()
    return X, y


def sparse(X, y, likelihood=None, **kwargs):
    kernel = gp.kernels.RBF(1, variance=torch.tensor(2.0), lengthscale=torch.tensor(0.7))
    likelihood = likelihood or gp.likelihoods.Binary()
    inducing = torch.linspace(-3, 3, M)
    return gp.models.VariationalSparseGP(X, y, kernel, inducing, likelihood, **kwargs)


def negative_bound(process, X, y, m, tril):
    """KL(q(v) || N(0, I)) - sum_n E log p(y_n | f_n), with q(f | v) the prior's."""
    factor = torch.linalg.cholesky(process.kernel(process.Xu) + process.jitter * torch.eye(M))
    W = torch.linalg.solve_triangular(factor, process.kernel(process.Xu, X), upper=False)
    rest = process.kernel(X, diag=True) - W.square().sum(0)
    sd = ((W.mT @ tril).square().sum(-1) + rest).sqrt()
    f = (W.mT @ m)[:, None] + sd[:, None] * NODES
    expected = dist.Bernoulli(logits=f).log_prob(y[:, None]) @ WEIGHTS
    prior = dist.MultivariateNormal(torch.zeros(M), torch.eye(M))
    return kl_divergence(dist.MultivariateNormal(m, scale_tril=tril), prior) - expected.sum()


def direct(process, X, y):
    """The optimum of that bound over all Gaussians q(v)."""
    m, raw = torch.zeros(M, requires_grad=True), torch.eye(M, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [m, raw], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9,
        tolerance_change=1e-14,
    )  # fmt: skip

    def loss():
        optimiser.zero_grad()
        value = negative_bound(process, X, y, m, raw.tril())
        value.backward()
        return value

    optimiser.step(loss)
    return float(loss().detach()), m.detach(), raw.tril().detach()


@pytest.mark.parametrize("batch_size", [None, 40])
def test_a_sparse_process_reaches_the_optimum_of_its_bound(batch_size):
    X, y = data()
    process = sparse(X, y)
    best, m, tril = direct(process, X, y)
    model = GaussianProcess(process, batch_size=batch_size, learn=False)
    cvi = CVI(model, AutoCVI(model))
    for _ in range(8 if batch_size is None else 60):
        loss = cvi.step()
    q = cvi.guide.joint(["v"])
    torch.testing.assert_close(q.mean, m, atol=1e-4, rtol=0)
    torch.testing.assert_close(q.covariance_matrix, tril @ tril.mT, atol=1e-4, rtol=0)
    if batch_size is None:
        assert loss == pytest.approx(best, rel=1e-7)
    else:
        value = negative_bound(process, X, y, q.mean, q.scale_tril).detach()
        assert float(value) == pytest.approx(best)


@pytest.mark.parametrize("whiten", [False, True])
def test_the_process_predicts_with_what_was_stored(whiten):
    X, y = data()
    process = sparse(X, y, whiten=whiten)
    model = GaussianProcess(process, learn=False)
    cvi = CVI(model, AutoCVI(model))
    loss = cvi.run().losses[-1]
    model.store(cvi.guide)
    new = torch.tensor([-2.5, -0.3, 1.1])
    factor = torch.linalg.cholesky(process.kernel(process.Xu) + process.jitter * torch.eye(M))
    W = torch.linalg.solve_triangular(factor, process.kernel(process.Xu, new), upper=False)
    q = cvi.guide.joint(["v"])
    loc, variance = process(new)
    torch.testing.assert_close(loc, W.mT @ q.mean)
    exact = (W.mT @ q.scale_tril).square().sum(-1) + 2.0 - W.square().sum(0)
    torch.testing.assert_close(variance, exact, atol=1e-5, rtol=0)
    theirs = TraceMeanField_ELBO(num_particles=400, vectorize_particles=False)
    values = torch.tensor([theirs.loss(process.model, process.guide) for _ in range(5)])
    error = float(values.std() / 5**0.5)
    assert abs(float(values.mean()) - loss) < 4 * error + 1e-3


def test_a_full_process_is_a_process_block_and_the_posterior_of_a_regression():
    X = torch.linspace(-3, 3, N)
    y = torch.sin(X) + 0.3 * torch.randn(N)
    kernel = gp.kernels.Matern52(1, variance=torch.tensor(1.5), lengthscale=torch.tensor(0.8))
    noise = gp.likelihoods.Gaussian(torch.tensor(0.09))
    process = gp.models.VariationalGP(X, y, kernel, noise, whiten=True)
    model = GaussianProcess(process, learn=False)
    cvi = CVI(model, AutoCVI(model))
    cvi.run()
    assert cvi.guide.block_of("f").structure == "process"
    K = kernel(X) + process.jitter * torch.eye(N)
    gain = torch.linalg.solve(K + 0.09 * torch.eye(N), K).mT
    q = cvi.guide.joint(["f"])
    torch.testing.assert_close(q.mean, gain @ y)
    torch.testing.assert_close(q.covariance_matrix, K - gain @ K)
    model.store(cvi.guide)
    new = torch.tensor([-2.5, 0.3, 4.0])
    cross = kernel(new, X)
    loc, cov = process(new, full_cov=True)
    inverse = torch.linalg.inv(K + 0.09 * torch.eye(N))
    torch.testing.assert_close(loc, cross @ inverse @ y, atol=1e-6, rtol=0)
    torch.testing.assert_close(cov, kernel(new) - cross @ inverse @ cross.mT, atol=1e-6, rtol=0)


def test_kernel_and_inducing_inputs_are_learnt_on_the_sparse_bound():
    """The first gradient is that of the bound written out, at the posterior of the step."""
    X, y = data()
    process = sparse(X, y)
    model = GaussianProcess(process)
    seen = {}

    class Note(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    seen[p] = p.grad.clone()
            return super().step(closure)

    optim = pyro.optim.PyroOptim(Note, {"lr": 0.0})
    cvi = CVI(model, AutoCVI(model), optim=optim)
    cvi.step()
    q = cvi.guide.joint(["v"])
    leaves = [process.kernel.lengthscale_unconstrained, process.kernel.variance_unconstrained]
    leaves.append(process.Xu)
    wanted = torch.autograd.grad(
        negative_bound(process, X, y, q.mean, q.scale_tril), leaves, allow_unused=True
    )
    for leaf, g in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(seen[leaf], g, atol=1e-5, rtol=1e-4)


def test_learning_raises_the_bound_and_minibatches_follow():
    X, y = data()
    losses = {}
    for batch_size in (None, 40):
        pyro.clear_param_store()
        process = sparse(X, y)
        model = GaussianProcess(process, batch_size=batch_size)
        cvi = CVI(model, AutoCVI(model), optim=pyro.optim.Adam({"lr": 0.02}))
        first = cvi.step()
        for _ in range(100 if batch_size is None else 300):
            cvi.step()
        q = cvi.guide.joint(["v"])
        losses[batch_size] = float(negative_bound(process, X, y, q.mean, q.scale_tril).detach())
        if batch_size is None:
            assert losses[None] < first - 1
    assert losses[40] == pytest.approx(losses[None], rel=0.01)


@pytest.mark.parametrize(
    "name", ["Poisson", "MultiClass", "Gaussian", "own", "two outputs", "probit"]
)
def test_likelihoods(name):
    X, y = data()
    f = torch.sin(2 * X)
    options, likelihood = {}, None
    observe = None
    if name == "Poisson":
        y, likelihood = dist.Poisson(f.exp()).sample(), gp.likelihoods.Poisson()
    elif name == "MultiClass":
        y = (f > 0.5).double() + (f > -0.5).double()
        likelihood, options = gp.likelihoods.MultiClass(3), {"latent_shape": torch.Size([3])}
    elif name == "Gaussian":
        y, likelihood = f + 0.1 * torch.randn(N), gp.likelihoods.Gaussian(torch.tensor(0.01))
    elif name == "own":
        y = dist.StudentT(3.0, f, 0.1).sample()

        def observe(f):
            return dist.StudentT(3.0, f, 0.1)
    elif name == "two outputs":
        y = torch.stack([y, 1 - y])
    else:
        likelihood = gp.likelihoods.Binary(dist.Normal(0.0, 1.0).cdf)
    process = sparse(X, y, likelihood, **options)
    model = GaussianProcess(process, batch_size=60, observe=observe, learn=False)
    cvi = CVI(model, AutoCVI(model))
    for _ in range(40):
        cvi.step()
    assert "sampled" not in {e.how for e in cvi.explain().edges}
    model.store(cvi.guide)
    loc = process(X)[0].detach()
    if name == "MultiClass":
        assert float((loc.argmax(0) == y).double().mean()) > 0.9
    elif name == "two outputs":
        torch.testing.assert_close(loc[0], -loc[1], atol=2e-3, rtol=0)
    elif name == "probit":
        assert float(((loc > 0) == (f > 0)).double().mean()) > 0.9
    else:
        assert float((loc - f).abs().mean()) < 0.3


def test_a_prior_on_a_kernel_parameter():
    X, y = data()
    process = sparse(X, y)
    process.kernel.lengthscale = pyro.nn.PyroSample(dist.LogNormal(0.0, 0.5))
    model = GaussianProcess(process, learn=False)
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(num_steps=60)
    assert {e.how for e in cvi.explain().edges if e.site == "kernel.lengthscale"} == {
        "exact",
        "points",
    }
    model.store(cvi.guide)
    median = cvi.guide.median()["kernel.lengthscale"]
    assert 0.2 < float(median) < 2
    assert float(process.kernel.lengthscale.detach()) == pytest.approx(float(median))


def test_singular_kernels_raise_the_jitter():
    torch.set_default_dtype(torch.float32)
    X = torch.linspace(0, 1, 60)
    y = (X > 0.5).float()
    kernel = gp.kernels.RBF(1, lengthscale=torch.tensor(3.0))
    process = gp.models.VariationalGP(X, y, kernel, gp.likelihoods.Binary(), jitter=0.0)
    model = GaussianProcess(process, learn=False)
    cvi = CVI(model, AutoCVI(model))
    cvi.run(num_steps=10)
    assert 0 < process.jitter < 1e-2
    model.store(cvi.guide)
    loc = process(torch.tensor([0.1, 0.9]))[0].detach()
    assert float(loc[0]) < 0 < float(loc[1])


def test_a_stream_of_minibatches_given_as_arguments():
    X, y = data()
    process = sparse(X[:40], y[:40], num_data=N)
    _, m, _ = direct(sparse(X, y), X, y)
    pyro.clear_param_store()
    model = GaussianProcess(process, learn=False)
    cvi = CVI(model, AutoCVI(model))
    for _ in range(60):
        order = torch.randperm(N)
        for rows in order.split(40):
            cvi.step(X[rows], y[rows])
    assert float((cvi.guide.joint(["v"]).mean - m).abs().max()) < 0.1


# --- sites that keep their prior -------------------------------------------------------------------


def noisy(y, options, scale=0.5):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        e = pyro.sample("e", dist.Normal(0.0, 1.0), infer=options)
        pyro.sample("y", dist.Bernoulli(logits=mu + scale * e), obs=y)


def test_a_held_site_is_integrated_out_and_never_moves():
    y = torch.tensor([1.0, 1.0, 0.0, 1.0])
    cvi = CVI(noisy, AutoCVI(noisy))
    loss = cvi.run(y, {"posterior": "prior"}, tol=1e-12).losses[-1]
    q = cvi.guide.posterior("e")
    assert bool((q.mean == 0).all()) and bool((q.variance == 1).all())

    def bound(m, s):
        f = m + (s * s + 0.25).sqrt() * NODES
        expected = sum(WEIGHTS @ dist.Bernoulli(logits=f).log_prob(v) for v in y)
        return kl_divergence(dist.Normal(m, s), dist.Normal(0.0, 1.0)) - expected

    q = cvi.guide.posterior("mu")
    m, s = q.mean.clone().requires_grad_(), q.variance.sqrt().requires_grad_()
    value = bound(m, s)
    assert loss == pytest.approx(float(value.detach()), rel=1e-9)
    for g in torch.autograd.grad(value, (m, s)):
        assert abs(float(g)) < 1e-5
    assert "held at its prior" in str(explain(noisy, y, {"posterior": "prior"}))


def test_a_held_site_beside_a_sampled_factor():
    """The draws of a sampled factor are draws of the prior."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(y)):
            e = pyro.sample("e", dist.Normal(0.0, 1.0), infer={"posterior": "prior"})
            hidden = torch.sigmoid(torch.outer(x, w)).prod(-1)
            pyro.sample("y", dist.Normal(hidden + 0.1 * e, 0.1), obs=y)

    x = torch.linspace(-1, 1, 30)
    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(x, 0.3 + 0.1 * x, num_steps=30)
    q = cvi.guide.posterior("e")
    assert bool((q.mean == 0).all()) and bool((q.variance == 1).all())


@pytest.mark.parametrize(
    ("prior", "options", "said"),
    [
        (lambda m: dist.Normal(0.0, 1.0), {"posterior": "exact"}, "infer"),
        (lambda m: dist.HalfNormal(1.0), {"posterior": "prior"}, "HalfNormal"),
        (lambda m: dist.Normal(m, 1.0), {"posterior": "prior"}, "depends on 'm'"),
        (lambda m: dist.Normal(0.0, 1.0).mask(False), {"posterior": "prior"}, "mask"),
    ],
)
def test_sites_that_cannot_be_held(prior, options, said):
    def model():
        m = pyro.sample("m", dist.Normal(0.0, 1.0))
        e = pyro.sample("e", prior(m), infer=options)
        pyro.sample("y", dist.Normal(m + e, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(CVIError, match=said):
        CVI(model, AutoCVI(model)).step()


def test_the_models_of_pyro_are_refused():
    X, y = data()
    process, guide = sparse(X, y), AutoCVI(lambda: None)
    with pytest.raises(CVIError, match=r"pyro_cvi\.gp\.GaussianProcess"):
        AutoCVI(process.model)
    with pytest.raises(CVIError, match=r"pyro_cvi\.gp\.GaussianProcess"):
        CVI(process.model, guide)


def test_two_processes_of_one_name_are_refused():
    """Pyro would give the second one the parameters of the first."""
    X, y = data()
    first = GaussianProcess(sparse(X, y))
    CVI(first, AutoCVI(first), pyro.optim.Adam({"lr": 0.1})).step()
    second = sparse(X, y)
    with pytest.raises(CVIError, match="clear_param_store"):
        GaussianProcess(second)
    pyro.clear_param_store()
    GaussianProcess(second)


def test_errors():
    X, y = data()
    kernel = gp.kernels.RBF(1)
    with pytest.raises(CVIError, match="GPRegression"):
        GaussianProcess(gp.models.GPRegression(X, y, kernel))
    full = gp.models.VariationalGP(X, y, kernel, gp.likelihoods.Binary())
    with pytest.raises(CVIError, match="batch_size"):
        GaussianProcess(full, batch_size=3)

    class Mine(gp.likelihoods.Likelihood):
        pass

    with pytest.raises(CVIError, match="observe="):
        GaussianProcess(sparse(X, y, Mine()))
    with pytest.raises(CVIError, match="no data"):
        GaussianProcess(sparse(X, None, latent_shape=torch.Size([])))()
    process = sparse(X, y)
    process.kernel.lengthscale = pyro.nn.PyroSample(dist.LogNormal(0.0, 0.5))
    process.kernel.autoguide("lengthscale", dist.Normal)
    with pytest.raises(CVIError, match="autoguide"):
        GaussianProcess(process)
