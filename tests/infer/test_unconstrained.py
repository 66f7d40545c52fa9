"""Priors without a family: a Gaussian on the unconstrained value, against direct optimisation."""

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_value
from scipy.optimize import minimize
from torch.distributions import biject_to, constraints

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import CVIError

PRIORS = {
    "HalfCauchy": lambda: dist.HalfCauchy(2.0),
    "HalfNormal": lambda: dist.HalfNormal(1.5),
    "LogNormal": lambda: dist.LogNormal(0.3, 0.8),
    "Weibull": lambda: dist.Weibull(1.2, 1.5),
    "Pareto": lambda: dist.Pareto(0.3, 1.5),
    "FisherSnedecor": lambda: dist.FisherSnedecor(3.0, 5.0),
    "exp of a Normal": lambda: dist.TransformedDistribution(
        dist.Normal(0.2, 0.7), [dist.transforms.ExpTransform()]
    ),
    "Uniform": lambda: dist.Uniform(-0.5, 2.0),
    "Kumaraswamy": lambda: dist.Kumaraswamy(2.0, 3.0),
    "ContinuousBernoulli": lambda: dist.ContinuousBernoulli(0.3),
    "logit of a Normal": lambda: dist.TransformedDistribution(
        dist.Normal(0.2, 0.7), [dist.transforms.SigmoidTransform()]
    ),
    "AffineBeta": lambda: dist.AffineBeta(2.0, 3.0, -1.0, 4.0),
    "StudentT": lambda: dist.StudentT(4.0, 0.5, 1.5),
    "Cauchy": lambda: dist.Cauchy(0.5, 1.5),
    "Laplace": lambda: dist.Laplace(0.3, 1.2),
    "SoftLaplace": lambda: dist.SoftLaplace(0.3, 1.2),
    "AsymmetricLaplace": lambda: dist.AsymmetricLaplace(0.3, 1.2, 1.5),
    "Gumbel": lambda: dist.Gumbel(0.2, 1.5),
    "Logistic": lambda: dist.Logistic(0.2, 1.5),
    "VonMises": lambda: dist.VonMises(0.5, 2.0),
    "SkewLogistic": lambda: dist.SkewLogistic(0.2, 1.5, torch.tensor(2.0)),
    "improper on the half line": lambda: dist.ImproperUniform(constraints.positive, (), ()),
    "improper below": lambda: dist.ImproperUniform(constraints.less_than(3.0), (), ()),
    "improper on the line": lambda: dist.ImproperUniform(constraints.real, (), ()),
}
Y = torch.tensor([0.9, 0.2, 1.4], dtype=torch.float64)
KINKED = {"Laplace", "AsymmetricLaplace"}


def seen(prior, y):
    x = pyro.sample("x", prior())
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x, 0.8), obs=y)


def best_gaussian(prior, y):
    """(m, s) of the Gaussian on u that maximises the bound, and the bound, on a fine grid."""
    d = prior()
    transform = biject_to(d.support)
    nodes = torch.linspace(-9.0, 9.0, 20001)
    weight = (-0.5 * nodes**2).exp()
    weight = weight / weight.sum()
    improper = isinstance(d, dist.ImproperUniform)

    def loss(m, log_s):
        u = m + nodes * log_s.exp()
        x = transform(u)
        log_p = dist.Normal(x[:, None], 0.8).log_prob(y).sum(-1)
        log_p = log_p + transform.log_abs_det_jacobian(u, x)
        if not improper:
            log_p = log_p + d.log_prob(x)
        return -(weight * log_p).sum() - log_s - 0.5 * math.log(2 * math.pi * math.e)

    def both(point):
        p = torch.tensor(point, requires_grad=True)
        value = loss(p[0], p[1])
        (g,) = torch.autograd.grad(value, p)
        return float(value.detach()), g.numpy()

    best = min(
        (minimize(both, [m, -1.0], jac=True, tol=1e-13) for m in (-1.0, 0.0, 1.0)),
        key=lambda r: r.fun,
    )
    return best.x[0], math.exp(best.x[1]), best.fun


@pytest.mark.parametrize("name", PRIORS)
def test_one_site_reaches_the_best_gaussian_on_the_unconstrained_value(name):
    prior = PRIORS[name]

    def model(y):
        seen(prior, y)

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    losses = cvi.run(Y, num_steps=200, tol=1e-12).losses
    m, s, bound = best_gaussian(prior, Y)
    u = guide.joint(["x"])
    tolerance = 1e-3 if name in KINKED else 1e-4
    assert losses[-1] == pytest.approx(bound, abs=tolerance)
    assert float(u.mean) == pytest.approx(m, abs=10 * tolerance)
    assert float(u.stddev) == pytest.approx(s, rel=10 * tolerance)
    assert all(b <= a + 1e-9 for a, b in zip(losses, losses[1:], strict=False))
    assert next(i for i, x in enumerate(losses) if x < bound + 1e-3) <= 30
    x = biject_to(prior().support)(torch.tensor(m))
    assert float(guide.median()["x"]) == pytest.approx(float(x), abs=10 * tolerance)
    low, high = guide.quantiles([0.1, 0.9])["x"].tolist()
    draws = guide.posterior("x").sample((20000,))
    assert low < high
    mean = float(guide.posterior("x").mean)
    spread = float(guide.posterior("x").stddev)
    assert mean == pytest.approx(float(draws.mean()), abs=5 * spread / 20000**0.5)
    assert spread == pytest.approx(float(draws.std()), rel=0.1)
    assert float((draws < low).double().mean()) == pytest.approx(0.1, abs=0.012)
    assert float((draws < high).double().mean()) == pytest.approx(0.9, abs=0.012)


def scales(y):
    """Hyperpriors as users write them, beside Gaussian sites in the same block."""
    mu = pyro.sample("mu", dist.StudentT(3.0, 0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta.unsqueeze(-1), sigma).expand(y.shape).to_event(1), obs=y)


def masked(y):
    """A masked cell that nothing informs, one that data inform, and one as usual."""
    with pyro.plate("groups", 3):
        with poutine.mask(mask=torch.tensor([True, False, False])):
            s = pyro.sample("s", dist.HalfCauchy(2.0))
        with poutine.mask(mask=torch.tensor([True, True, False])):
            pyro.sample("y", dist.Normal(1.0, s.unsqueeze(-1)).expand(y.shape).to_event(1), obs=y)


def scaled(y):
    with poutine.scale(scale=0.5):
        s = pyro.sample("s", dist.Uniform(0.1, 5.0))
    pyro.sample("y", dist.Normal(1.0, s).expand(y.shape).to_event(2), obs=y)


def simplex(y):
    p = pyro.sample("p", dist.LogisticNormal(torch.zeros(2), torch.ones(2)))
    pyro.sample(
        "count", dist.Multinomial(probs=p, total_count=9), obs=torch.tensor([4.0, 3.0, 2.0])
    )


def correlation(y):
    half = pyro.sample("half", dist.LKJCholesky(3, 2.0))
    scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(3)).to_event(1))
    with pyro.plate("rows", y.shape[1]):
        tril = scale.unsqueeze(-1) * half
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), scale_tril=tril), obs=y.T)


@pytest.fixture
def y():
    return 1 + torch.randn(3, 1) + 1.5 * torch.randn(3, 25)


def partly_masked(y):
    """Of `masked` what Pyro has a posterior for."""
    with pyro.plate("groups", 3):
        with poutine.mask(mask=torch.tensor([True, False, True])):
            s = pyro.sample("s", dist.HalfCauchy(2.0))
        with poutine.mask(mask=torch.tensor([True, True, False])):
            pyro.sample("y", dist.Normal(1.0, s.unsqueeze(-1)).expand(y.shape).to_event(1), obs=y)


@pytest.mark.parametrize("model", [scales, partly_masked, scaled, simplex, correlation])
def test_the_loss_is_that_of_pyro_with_this_guide(model, y):
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.run(y, num_steps=40)
    elbo = Trace_ELBO()
    with torch.no_grad():
        losses = torch.tensor([elbo.loss(model, guide, y) for _ in range(400)])
    error = float(losses.std()) / 20
    if guide.plan.sampled_sites():
        ours = torch.tensor([cvi.evaluate_loss(y) for _ in range(10)])
        error = math.hypot(error, float(ours.std()) / math.sqrt(10))
        assert abs(float(losses.mean() - ours.mean())) < 4.5 * error
    else:
        assert abs(float(losses.mean()) - cvi.evaluate_loss(y)) < 4.5 * error


def test_a_masked_cell_goes_back_to_its_prior(y):
    guide = AutoCVI(masked)
    CVI(masked, guide).run(y, tol=1e-12)

    def prior_only():
        pyro.sample("s", dist.HalfCauchy(2.0))

    alone = AutoCVI(prior_only)
    CVI(prior_only, alone).run(tol=1e-12)
    found, expected = guide.posterior("s").base_dist, alone.posterior("s").base_dist
    assert float(found.loc[2]) == pytest.approx(float(expected.loc), abs=1e-4)
    assert float(found.scale[2]) == pytest.approx(float(expected.scale), rel=1e-3)


@pytest.mark.parametrize("model", [scales, simplex, correlation])
def test_values_have_the_shapes_and_supports_of_the_model(model, y):
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    cvi.run(y, num_steps=5)
    trace = poutine.trace(model).get_trace(y)
    drawn = guide(y)
    for name, value in guide.median().items():
        site = trace.nodes[name]
        assert value.shape == site["value"].shape == drawn[name].shape
        assert guide.quantiles([0.2, 0.8])[name].shape == (2, *value.shape)
        law = guide.posterior(name)
        assert law.batch_shape + law.event_shape == value.shape
        for x in (value, drawn[name], law.sample()):
            assert bool(site["fn"].support.check(x).all())
    many = Predictive(model, guide=guide, num_samples=4)(y)
    assert all(many[n].shape[0] == 4 for n in drawn)


def test_a_guide_is_saved_and_loaded(y):
    guide = AutoCVI(scales)
    CVI(scales, guide).run(y, num_steps=10)
    other = AutoCVI(scales)
    other.load_state_dict(guide.state_dict())
    other(y)
    torch.testing.assert_close(other.median()["tau"], guide.median()["tau"])
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    torch.testing.assert_close(again.median(), guide.median())
    torch.testing.assert_close(again.posterior("tau").mean, guide.posterior("tau").mean)


def test_a_start_is_a_value_of_the_model(y):
    start = {"tau": torch.tensor(0.7), "sigma": torch.tensor(1.3)}
    guide = AutoCVI(scales, init_loc_fn=init_to_value(values=start))
    guide(y)
    assert float(guide.median()["tau"]) == pytest.approx(0.7)
    assert float(guide.median()["sigma"]) == pytest.approx(1.3)
    guide = AutoCVI(scales, init_loc_fn=init_to_value(values={"tau": torch.tensor(-0.7)}))
    with pytest.raises(CVIError, match="'tau'.*outside of the support"):
        CVI(scales, guide).step(y)


def test_new_groups_get_local_posteriors(y):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("groups", len(y)):
            s = pyro.sample("s", dist.HalfNormal(2.0))
            law = dist.Normal(mu, s.unsqueeze(-1)).expand(y.shape).to_event(1)
            pyro.sample("y", law, obs=y)

    guide = AutoCVI(model, max_dense_dim=1)  # mu apart from the groups, as for new ones
    cvi = CVI(model, guide)
    cvi.run(y, num_steps=400, tol=1e-12)
    again = cvi.local_posteriors(torch.cat([y, y[:1]]), plates=["groups"])
    found = again.posterior("s").base_dist
    fitted = guide.posterior("s").base_dist
    torch.testing.assert_close(found.loc[:3], fitted.loc, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.loc[3], fitted.loc[0], atol=1e-4, rtol=1e-4)


def test_minibatches_of_local_scales_end_where_all_rows_do():
    def model(y, size):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("groups", len(y), subsample_size=size) as i:
            s = pyro.sample("s", dist.HalfNormal(2.0))
            law = dist.Normal(mu, s.unsqueeze(-1)).expand([len(i), y.shape[1]]).to_event(1)
            pyro.sample("y", law, obs=y[i])

    y = 1 + torch.randn(6, 30)
    whole, parts = AutoCVI(model), AutoCVI(model)
    CVI(model, whole).run(y, 6, num_steps=200, tol=1e-10)
    cvi = CVI(model, parts)
    for _ in range(90):
        cvi.step(y, 2)
    found, expected = parts.posterior("s").base_dist, whole.posterior("s").base_dist
    torch.testing.assert_close(found.loc, expected.loc, atol=2e-3, rtol=2e-3)
    assert float(parts.posterior("mu").loc) == pytest.approx(
        float(whole.posterior("mu").loc), abs=1e-3
    )


@pytest.mark.parametrize(
    ("prior", "said"),
    [
        (
            lambda: dist.Uniform(0.0, pyro.sample("high", dist.Gamma(3.0, 1.0))),
            "'x'.*support depends on the latent 'high'",
        ),
        (lambda: dist.Delta(torch.tensor(1.0)), "pyro.deterministic"),
        (lambda: dist.Poisson(3.0), "finite support"),
        (lambda: dist.ProjectedNormal(torch.ones(3)), "'x'.*ProjectedNormal prior.*Instead: "),
    ],
)
def test_what_cannot_be_held_is_refused_with_a_remedy(prior, said):
    def model():
        pyro.sample("x", prior())

    with pytest.raises(CVIError, match=said):
        CVI(model, AutoCVI(model)).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_kept(dtype, y):
    y = y.to(dtype)

    def model(y):
        s = pyro.sample("s", dist.HalfCauchy(torch.ones((), dtype=dtype)))
        pyro.sample(
            "y", dist.Normal(torch.zeros((), dtype=dtype), s).expand(y.shape).to_event(2), obs=y
        )

    guide = AutoCVI(model)
    CVI(model, guide).run(y)
    assert (
        guide.posterior("s").mean.dtype == dtype if hasattr(guide.posterior("s"), "mean") else True
    )
    assert guide.median()["s"].dtype == dtype
    assert float(guide.median()["s"]) == pytest.approx(float(y.square().mean().sqrt()), rel=0.05)


# --- eight schools ---------------------------------------------------------------------------------

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def schools(effects, errors):
    """Non-centred: the scale times the effect is a product of an exp and a Gaussian of one block."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", 8):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, errors), obs=effects)


def exact_schools():
    """Means and standard deviations of mu and eta, by integration over (mu, log tau)."""
    mu, log_tau = torch.meshgrid(
        torch.linspace(-20, 30, 501), torch.linspace(-8, 5, 501), indexing="ij"
    )
    tau = log_tau.exp()
    v = tau[..., None] ** 2 + ERRORS**2
    log_p = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau) + log_tau
    log_p = log_p + dist.Normal(mu[..., None], v.sqrt()).log_prob(EFFECTS).sum(-1)
    w = (log_p - log_p.logsumexp((0, 1))).exp()
    m = (EFFECTS - mu[..., None]) / v * tau[..., None]
    second = 1 - tau[..., None] ** 2 / v + m**2
    mean = (w[..., None] * m).sum((0, 1))
    sd = ((w[..., None] * second).sum((0, 1)) - mean**2).sqrt()
    mu_mean = (w * mu).sum()
    return (mu_mean, ((w * mu**2).sum() - mu_mean**2).sqrt()), (mean, sd)


def test_eight_schools_without_centring_is_fitted_without_sampling():
    guide = AutoCVI(schools)
    result = CVI(schools, guide).run(EFFECTS, ERRORS, num_steps=200)
    assert not guide.plan.sampled_sites()
    assert result.converged and result.num_steps < 60
    assert all(b <= a + 1e-9 for a, b in zip(result.losses, result.losses[1:], strict=False))
    (mean, sd), (eta_mean, eta_sd) = exact_schools()
    mu, eta = guide.posterior("mu"), guide.posterior("eta")
    assert float(mu.mean) == pytest.approx(float(mean), abs=0.1 * float(sd))
    assert float(mu.stddev) == pytest.approx(float(sd), rel=0.1)
    assert float(((eta.mean - eta_mean) / eta_sd).abs().max()) < 0.1
    torch.testing.assert_close(eta.stddev, eta_sd, rtol=0.1, atol=0)


TRANSFORMED = {
    "stretched Uniform": (dist.Uniform(0.0, 1.0), (0.0, 2.0), (0.0, 2.0)),
    "shifted Exponential": (dist.Exponential(1.0), (0.2, 2.0), (0.2, 30.0)),
    "mirrored Gamma": (dist.Gamma(2.0, 1.0), (1.0, -0.5), (-30.0, 1.0)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_support_of_a_transformed_prior_is_that_of_its_base(name):
    """torch says that it is real: q is inside all the same, and near the posterior on a grid."""
    base, (loc, scale), (low, high) = TRANSFORMED[name]
    prior = dist.TransformedDistribution(base, [dist.transforms.AffineTransform(loc, scale)])
    y = torch.tensor([0.4, 0.9, 0.7, 0.1])

    def model(y):
        x = pyro.sample("x", prior)
        pyro.sample("y", dist.Normal(x, 0.8).expand([4]).to_event(1), obs=y)

    guide = AutoCVI(model)
    assert CVI(model, guide).run(y).converged
    draws = guide.posterior("x").sample((2000,))
    assert bool(((draws > low) & (draws < high)).all())
    x = torch.linspace(low + 1e-9, high - 1e-9, 200_001)
    log_p = prior.log_prob(x) + dist.Normal(x[:, None], 0.8).log_prob(y).sum(-1)
    weight = log_p.softmax(0)
    mean = float((weight * x).sum())
    sd = float((weight * (x - mean) ** 2).sum().sqrt())
    q = guide.posterior("x")
    assert abs(float(q.mean) - mean) < 0.1 * sd
    assert float(q.variance.sqrt()) == pytest.approx(sd, rel=0.15)


def test_quantiles_of_a_simplex_are_those_of_draws():
    def model():
        s = pyro.sample("s", dist.LogisticNormal(torch.zeros(2), torch.ones(2)))
        pyro.sample("y", dist.Normal(s[..., 0], 0.3), obs=torch.tensor(0.6))

    guide = AutoCVI(model)
    CVI(model, guide, seed=0).run()
    draws = torch.stack([guide()["s"] for _ in range(3000)])
    levels = [0.05, 0.5, 0.95]
    found = guide.quantiles(levels)["s"]
    torch.testing.assert_close(
        found, draws.quantile(torch.tensor(levels), dim=0), atol=0.04, rtol=0
    )
    torch.testing.assert_close(guide.median()["s"].sum(), torch.tensor(1.0))
