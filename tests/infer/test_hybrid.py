"""CVI beside other guides: the same bound, unbiased gradients, and the posterior given their draws.

Oracles: closed forms of linear Gaussian models, enumeration, Pyro's own ELBO of model and guide.
"""

import copy
import io
import math
import pickle
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from torch import nn

from pyro_cvi import CVI, AutoCVI, CVIError, HybridGuide, integrate

N = 40


def model(x, full=None):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", full or len(x), subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 2)

    def forward(self, x):
        loc, log_scale = self.line(x.unsqueeze(-1)).unbind(-1)
        return loc, log_scale.exp()


def beside(the_model, site, other):
    """CVI for all sites but one, which the other guide has."""
    guide = HybridGuide(the_model)
    guide.append(AutoCVI(poutine.block(the_model, hide=[site])))
    guide.append(other)
    return guide


def held_still(the_model, guide, optim, loss=None):
    """Steps of size 1e-9: the posterior of CVI stays where it is."""
    return CVI(the_model, guide, optim, loss, delay=1e9, forget=1.0, memory=math.inf)


def amortised(the_model=model, encoder=None):
    encoder = encoder or Encoder()

    def encode(x, full=None):
        pyro.module("encoder", encoder)
        loc, scale = encoder(x)
        with pyro.plate("data", full or len(x), subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, scale))

    return beside(the_model, "z", encode), encoder


def data():
    return 1.4 * torch.randn(N) + 1.5


@pytest.mark.parametrize("size", [N, 10, 16])
def test_an_amortised_guide_and_an_exact_block_reach_their_common_optimum(size):
    """z_n | x_n has mean (mu + x_n) / 2, variance 1/2; mu has precision 1 + N, mean sum x / (2 + N)."""
    x = data()
    guide, encoder = amortised()
    cvi = CVI(model, guide, optim=pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.997}))
    for _ in range(1200 // math.ceil(N / size)):
        for rows in torch.randperm(N).split(size):
            cvi.step(x[rows], N)
    q = guide[0].posterior("mu")
    exact = float(x.sum() / (2 + N))
    assert float(q.mean) == pytest.approx(exact, abs=0.1)
    assert float(q.variance) == pytest.approx(1 / (1 + N), rel=1e-5)
    weight, bias = encoder.line.weight[:, 0].detach(), encoder.line.bias.detach()
    assert float(weight[0]) == pytest.approx(0.5, abs=0.06)
    assert float(bias[0]) == pytest.approx(exact / 2, abs=0.1)
    assert float(bias[1] + weight[1]) == pytest.approx(-0.5 * math.log(2), abs=0.1)


class Note(torch.optim.SGD):
    """Moves nothing and keeps the gradients."""

    seen: dict = {}  # noqa: RUF012

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.seen.setdefault(p, []).append(p.grad.clone())
        return super().step(closure)


def gradients(cvi, args, steps):
    """Mean gradient of each parameter over steps that all begin in the same state, and its error."""
    Note.seen = {}
    state = copy.deepcopy(cvi.guide[0].state_dict())
    for _ in range(steps):
        cvi.step(*args)
        cvi.guide[0].load_state_dict(state)
    values = {p: torch.stack(g) for p, g in Note.seen.items()}
    return {p: (g.mean(0), g.std(0) / math.sqrt(steps)) for p, g in values.items()}


def test_gradients_of_an_encoder_are_those_of_the_bound():
    """At a fixed q(mu): E log N(z; mu, 1) + E log N(x; z, 1) + H in closed form."""
    x = data()
    guide, encoder = amortised()
    cvi = held_still(model, guide, pyro.optim.PyroOptim(Note, {"lr": 0.0}))
    cvi.step(x)  # with steps of size 1e-9, q(mu) stays where it is
    q = guide[0].posterior("mu")
    found = gradients(cvi, (x,), 600)
    loc, scale = encoder(x)
    expected = -0.5 * ((loc - q.mean) ** 2 + scale**2 + q.variance)
    expected = expected - 0.5 * ((x - loc) ** 2 + scale**2) + scale.log()
    wanted = torch.autograd.grad(-expected.sum(), list(encoder.parameters()))
    for p, g in zip(encoder.parameters(), wanted, strict=True):
        mean, error = found[p]
        assert float(((mean - g).abs() / error.clamp(min=1e-9)).max()) < 4.5


def lifted(x):
    """A site that another guide draws and through whose draw there is no gradient."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Bernoulli(0.3))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mu + b, 1.0), obs=x)


def drawn_lift(x):
    pyro.sample("b", dist.Bernoulli(logits=pyro.param("logit", torch.tensor(0.4))))


def gradient_in_the_logit(x, q):
    """Of the negative bound of `lifted`, b enumerated, at the logit 0.4 of q(b)."""
    logit = torch.tensor(0.4, requires_grad=True)
    p = logit.sigmoid()

    def log_joint(b):
        fit = -0.5 * ((x - q.mean - b) ** 2 + q.variance).sum()
        return fit + math.log(0.3 if b else 0.7)

    bound = p * (log_joint(1) - p.log()) + (1 - p) * (log_joint(0) - (1 - p).log())
    (wanted,) = torch.autograd.grad(-bound, logit)
    return wanted


@pytest.mark.parametrize(("particles", "steps", "most"), [(1, 1500, 0.3), (4, 150, 0.2)])
def test_a_discrete_site_of_another_guide_has_the_score_function(particles, steps, most):
    """b ~ Bernoulli(p): its mean over the draws of a step is the gradient of the enumerated bound."""
    x = torch.tensor([0.3, 1.2, 0.7])
    guide = beside(lifted, "b", drawn_lift)
    optim = pyro.optim.PyroOptim(Note, {"lr": 0.0})
    cvi = held_still(lifted, guide, optim, loss=Trace_ELBO(num_particles=particles))
    cvi.step(x)
    q = guide[0].posterior("mu")
    ((mean, error),) = gradients(cvi, (x,), steps).values()
    assert abs(float(mean - gradient_in_the_logit(x, q))) < 4 * float(error)
    assert float(error) < most


def spread_over(values):
    """Variance of some values, and its standard error."""
    values = torch.as_tensor(values, dtype=torch.float64)
    square = (values - values.mean()) ** 2
    return float(values.var()), float(square.std() / len(values) ** 0.5)


def test_messages_and_gradients_are_means_over_particles():
    """With full steps the mean of q(mu) is that of sum_n z_n / (1 + N) over K draws of z.

    It has mean sum_n loc_n / (1 + N) and variance sum_n scale_n^2 / (1 + N)^2 / K; the gradient's
    variance falls by K too.
    """
    x, K = data(), 4
    found = {}
    guide, encoder = amortised()
    for particles in (1, K):
        pyro.clear_param_store()
        loss = Trace_ELBO(num_particles=particles, vectorize_particles=particles > 1)
        optim = pyro.optim.PyroOptim(Note, {"lr": 0.0})
        cvi = CVI(model, guide, optim=optim, loss=loss, memory=1.0, minibatch="stochastic")
        cvi.step(x)
        Note.seen, means = {}, []
        for _ in range(100):
            cvi.step(x)
            means.append(float(guide[0].posterior("mu").mean))
        found[particles] = means, torch.stack(Note.seen[encoder.line.bias])[:, 0]
    loc, scale = (t.detach() for t in encoder(x))
    means, _ = found[K]
    error = float(scale.square().sum().sqrt()) / (1 + N) / K**0.5
    assert abs(np.mean(means) - float(loc.sum()) / (1 + N)) < 4 * error / len(means) ** 0.5
    variance, doubt = spread_over(means)
    assert abs(variance - error**2) < 4 * doubt < 3 * error**2
    (one, one_doubt), (many, many_doubt) = (spread_over(found[k][1]) for k in (1, K))
    assert abs(one - K * many) < 4 * math.hypot(one_doubt, K * many_doubt) < 3 * one


def test_particles_have_local_sites_of_their_own():
    """Clusters given each draw of the codes: the same loss on average, with a third of the variance."""
    x, _, _ = clusters(30)
    guide, _ = mixture_guide()
    CVI(mixture, guide, optim=pyro.optim.Adam({"lr": 0.01})).run(x, num_steps=5)
    losses = {}
    for particles in (1, 3):
        loss = Trace_ELBO(num_particles=particles)
        cvi = CVI(mixture, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        losses[particles] = torch.tensor([cvi.evaluate_loss(x) for _ in range(40)])
    one, many = losses[1], losses[3]
    error = float(((one.var() + many.var()) / 40).sqrt())
    assert abs(float(one.mean() - many.mean())) < 4 * error
    (first, doubt), (second, other) = spread_over(one), spread_over(many)
    assert abs(first - 3 * second) < 4 * math.hypot(doubt, 3 * other)
    start = guide[0].posterior("mu").mean.clone()
    for _ in range(5):
        assert math.isfinite(cvi.step(x))
    assert not torch.equal(guide[0].posterior("mu").mean, start)


def test_all_particles_see_the_same_elements():
    seen = []

    def model(x):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", N, subsample_size=8) as i:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[i])

    def other(x):
        with pyro.plate("data", N, subsample_size=8) as i:
            seen.append(i)
            pyro.sample("z", dist.Normal(0.5 * x[i], 1.0))

    cvi = CVI(model, beside(model, "z", other), loss=Trace_ELBO(num_particles=3))
    for _ in range(6):
        seen.clear()
        cvi.step(data())
        assert len(seen) >= 3
        assert all(torch.equal(seen[-3], i) for i in seen[-2:])


def test_particles_beside_sites_that_are_sampled_are_refused():
    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal((w[0] * w[1] * w[2]).cos() + b, 1.0), obs=x)

    other = AutoNormal(poutine.block(model, expose=["b"]))
    loss = Trace_ELBO(num_particles=2)
    cvi = CVI(model, beside(model, "b", other), pyro.optim.Adam({"lr": 0.01}), loss)
    with pytest.raises(CVIError, match="num_samples"):
        cvi.step(data())


def test_the_loss_is_pyros_own_of_model_and_guide():
    x = data()
    guide, _ = amortised()
    cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01}))
    for _ in range(20):
        cvi.step(x)
    before = copy.deepcopy(guide.state_dict())
    ours = np.array([cvi.evaluate_loss(x) for _ in range(300)])
    theirs = np.array([Trace_ELBO().loss(model, guide, x) for _ in range(600)])
    error = math.hypot(ours.std() / 300**0.5, theirs.std() / 600**0.5)
    assert abs(ours.mean() - theirs.mean()) < 4 * error
    after = guide.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_state_dict_serves_a_guide_that_has_seen_no_data():
    """mu in two columns: given the codes they are two blocks, and without them one prior of two."""

    def columns(x):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", N, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0).to_event(1))
            pyro.sample("x", dist.Normal(z, 1.0).to_event(1), obs=x)

    def other(x):
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.7).to_event(1))

    x, fits = torch.randn(N, 2) + 1.0, []
    for _ in range(2):
        guide = beside(columns, "z", other)
        fits.append(CVI(columns, guide))
    for rows in x.split(10):
        fits[0].step(rows)
    known, fresh = (f.guide for f in fits)
    fresh.load_state_dict(known.state_dict())
    fresh(x[:3])  # the first call draws numbers more, to see the model
    draws = []
    for guide in (known, fresh):
        pyro.set_rng_seed(1)
        draws.append(guide(x[:3]))
    assert all(torch.equal(draws[1][n], v) for n, v in draws[0].items())
    assert torch.equal(fresh[0].posterior("mu").mean, known[0].posterior("mu").mean)
    fits[1].step(x[:10])
    # It goes on from there: the prior and the rows of the step give mu the precision 1 + N.
    assert fresh[0].posterior("mu").variance == pytest.approx(1 / (1 + N), rel=1e-6)


def mixture(x, full=None):
    w = pyro.sample("w", dist.Dirichlet(torch.full((3,), 20.0)))
    with pyro.plate("components", 3):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        tau = pyro.sample("tau", dist.Gamma(torch.full((2,), 2.0), 1.0).to_event(1))
    with pyro.plate("data", full or len(x), subsample_size=len(x)):
        c = pyro.sample("c", dist.Categorical(w))
        z = pyro.sample("z", dist.Normal(mu[c], tau[c].rsqrt()).to_event(1))
        pyro.sample("x", dist.Normal(z, 0.3).to_event(1), obs=x)


def clusters(rows=150):
    centres = torch.tensor([[-4.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
    label = torch.arange(rows) % 3
    return centres[label] + 0.5 * torch.randn(rows, 2), label, centres


def mixture_guide():
    encoder = nn.Linear(2, 4)

    def encode(x, full=None):
        pyro.module("encoder", encoder)
        loc, log_scale = encoder(x).chunk(2, -1)
        with pyro.plate("data", full or len(x), subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))

    return beside(mixture, "z", encode), encoder


@pytest.mark.parametrize("size", [None, 50])
def test_a_mixture_prior_over_amortised_codes(size):
    """Clusters are found; the state of a row is that given its code, also for rows never seen.

    A start at which codes overlap may end with two clusters in one; from this seed they part.
    """
    torch.manual_seed(2)
    x, label, centres = clusters()
    guide, _ = mixture_guide()
    cvi = CVI(mixture, guide, optim=pyro.optim.Adam({"lr": 0.03}))
    for _ in range(150):
        for rows in torch.randperm(len(x)).split(size or len(x)):
            cvi.step(x[rows], len(x))
    means = guide[0].posterior("mu").mean
    nearest = (centres[:, None] - means).norm(dim=-1).min(1).values
    assert float(nearest.max()) < 0.5
    new, label, _ = clusters(30)
    draws = [guide(new, len(x)) for _ in range(3)]
    order = (centres[:, None] - means).norm(dim=-1).argmin(1)
    for draw in draws:
        assert sorted(draw) == ["c", "mu", "tau", "w", "z"]
        assert float((draw["c"] == order[label]).double().mean()) > 0.95
    predictive = Predictive(mixture, guide=guide, num_samples=3)(new, len(x))
    assert predictive["c"].shape == (3, 30) and predictive["z"].shape == (3, 30, 2)
    trace = poutine.trace(guide).get_trace(new, len(x))
    assert math.isfinite(float(trace.log_prob_sum().detach()))


def test_pyros_autoguides_beside_cvi():
    """A point estimate and a normal guide of other sites; the exact block given them."""
    inputs = torch.randn(50, 2)
    y = inputs @ torch.tensor([1.0, -2.0]) + 0.3 * torch.randn(50)

    def model(inputs, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(inputs @ w + b, scale), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoCVI(poutine.block(model, expose=["w"])))
    guide.append(AutoNormal(poutine.block(model, expose=["b"])))
    guide.append(AutoDelta(poutine.block(model, expose=["scale"])))
    cvi = CVI(model, guide, optim=pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.998}))
    cvi.run(inputs, y, num_steps=1200)
    scale = float(guide.median(inputs, y)["scale"])
    assert scale == pytest.approx(0.3, abs=0.1)
    precision = torch.eye(2) / 4 + inputs.mT @ inputs / scale**2
    q = guide[0].posterior("w")
    torch.testing.assert_close(
        torch.linalg.inv(precision), q.covariance_matrix, rtol=0.15, atol=1e-4
    )
    mean = torch.linalg.solve(precision, inputs.mT @ (y - guide.median(inputs, y)["b"]) / scale**2)
    sd = q.variance.sqrt()
    assert float(((q.mean - mean).abs() / sd).max()) < 0.5
    torch.testing.assert_close(guide.median(inputs, y)["w"], q.mean)


def test_annealing_by_scales_in_model_and_guide():
    """poutine.scale around z on both sides weighs its KL: with weight zero the encoder fits x alone."""

    def scaled(weight):
        pyro.clear_param_store()

        def model(x, full=None):
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(x)):
                with poutine.scale(scale=weight):
                    z = pyro.sample("z", dist.Normal(mu, 1.0))
                pyro.sample("x", dist.Normal(z, 1.0), obs=x)

        encoder = Encoder()

        def encode(x, full=None):
            pyro.module("encoder", encoder)
            loc, scale = encoder(x)
            with pyro.plate("data", len(x)), poutine.scale(scale=weight):
                pyro.sample("z", dist.Normal(loc, scale))

        guide = beside(model, "z", encode)
        cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.05}))
        x = data()
        for _ in range(400):
            cvi.step(x)
        return encoder.line.weight.detach()[0, 0]

    assert float(scaled(1e-3)) == pytest.approx(1.0, abs=0.06)
    assert float(scaled(1.0)) == pytest.approx(0.5, abs=0.08)


def test_a_hybrid_guide_is_saved_and_loaded():
    x = data()
    guide, encoder = amortised()
    cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.02}))
    for _ in range(30):
        cvi.step(x)
    other, _ = amortised(encoder=encoder)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    q = guide[0].posterior("mu")
    second = held_still(model, other, pyro.optim.Adam({"lr": 0.0}))
    second.step(x)
    torch.testing.assert_close(other[0].posterior("mu").mean, q.mean)


def test_a_pickled_guide_gets_its_model_from_cvi():
    def two(y):
        with pyro.plate("rows", len(y)):
            c = pyro.sample("c", dist.Bernoulli(0.5))
            z = pyro.sample("z", dist.Normal(2 * c - 1, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide, file, y = HybridGuide(two), io.BytesIO(), torch.randn(4)
    guide.append(AutoCVI(poutine.block(two, hide=["z"])))
    guide.append(AutoNormal(poutine.block(two, expose=["z"])))
    CVI(two, guide, optim=pyro.optim.Adam({"lr": 0.01})).step(y)
    torch.save(guide, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(CVIError, match="without a model"):
        loaded(y)
    CVI(two, loaded, optim=pyro.optim.Adam({"lr": 0.01}))
    for each in (guide, loaded):
        assert set(each(y)) == {"c", "z"}


def encode_rows(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x / 2, pyro.param("width", torch.tensor(0.3))))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, self.width))


@pytest.mark.parametrize(
    "part", [encode_rows, Rows(), partial(encode_rows)], ids=["function", "module", "partial"]
)
def test_functions_and_modules_are_parts_that_pickle_and_copy(part):
    x, guide = data(), beside(model, "z", part)
    CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01})).step(x)
    found = [pickle.loads(pickle.dumps(guide)), copy.deepcopy(guide)]
    CVI(model, found[0], optim=pyro.optim.Adam({"lr": 0.01}))  # has the model again
    for each in (guide, *found):
        assert torch.equal(each[0].posterior("mu").mean, guide[0].posterior("mu").mean)
        pyro.set_rng_seed(5)
        drawn = each(x)
        pyro.set_rng_seed(5)
        assert torch.equal(drawn["z"], guide(x)["z"])


def test_a_part_that_cannot_be_pickled_is_named_and_can_be_copied():
    x = data()
    guide, _ = amortised()
    CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01})).step(x)
    with pytest.raises(CVIError, match="cannot be pickled, 'amortised.<locals>.encode'"):
        pickle.dumps(guide)
    assert set(copy.deepcopy(guide)(x)) == {"mu", "z"} == set(guide(x))


@pytest.mark.parametrize("count", [1, 3])
def test_many_draws_at_once_of_sites_given_the_others_are_refused(count):
    x, _, _ = clusters()
    guide, _ = mixture_guide()
    CVI(mixture, guide, optim=pyro.optim.Adam({"lr": 0.03})).step(x)
    with pytest.raises(CVIError, match="HybridGuide.*many draws.*parallel=False"):
        Predictive(mixture, guide=guide, num_samples=count, parallel=True)(x)
    draws = Predictive(mixture, guide=guide, num_samples=count)(x)
    assert draws["c"].shape == (count, len(x))


def test_what_is_wrong_is_said():
    x = data()
    guide, _ = amortised()
    with pytest.raises(CVIError, match="optimiser"):
        CVI(model, guide).step(x)
    empty = HybridGuide(model)
    empty.append(AutoNormal(model))
    with pytest.raises(CVIError, match="0 parts"):
        CVI(model, empty)
    two = HybridGuide(model)
    two.append(AutoCVI(poutine.block(model, expose=["mu"])))
    two.append(AutoCVI(poutine.block(model, expose=["z"])))
    with pytest.raises(CVIError, match="2 parts"):
        CVI(model, two)
    with pytest.raises(CVIError, match="HybridGuide"):
        CVI(model, AutoNormal(model))
    cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01}))
    cvi.step(x)
    for call in (cvi.local_posteriors, cvi.log_predictive, cvi.forecast):
        with pytest.raises(CVIError, match="other guides"):
            call(x)
    with pytest.raises(CVIError, match="one AutoCVI of all sites"):
        integrate(cvi, "mu", x)


def test_an_error_leaves_the_posterior_as_it_was():
    x = data()
    guide, _ = amortised()
    cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01}))
    cvi.step(x)
    before = guide[0].posterior("mu").mean
    with pytest.raises(ValueError, match="nan"):
        cvi.step(torch.full((N,), math.nan))
    torch.testing.assert_close(guide[0].posterior("mu").mean, before, rtol=0, atol=0)


# --- deep Kalman filters: z_t | z_t-1 by a network, q(z_t | z_t-1, x_t:T) by another ----------------

STEP, NOISE = 0.6, 0.5


class Smoother(nn.Module):
    """The mean and scale of q(z_t | z_t-1, x_t:T): a network that reads the sequence backwards."""

    def __init__(self, outputs=1, hidden=6):
        super().__init__()
        self.rnn, self.line = nn.GRU(outputs, hidden), nn.Linear(hidden + 1, 2)

    def states(self, x, lengths):
        """(T, n, hidden), from sequences (T, n, outputs) of which the first `lengths` cells are read."""
        order = (lengths - 1 - torch.arange(len(x)).unsqueeze(-1)).clamp(min=0).unsqueeze(-1)
        h, _ = self.rnn(x.gather(0, order.expand_as(x)))
        return h.gather(0, order.expand_as(h))

    def forward(self, h, z):
        loc, log_scale = self.line(torch.cat([h, z.unsqueeze(-1)], -1)).unbind(-1)
        return loc, (log_scale - 1).exp()


def deep_kalman_filter(transition, smoother, total, outputs=1):
    """Model and guide of scalar states and several outputs with unknown levels, for CVI."""

    def model(x, lengths, weight=1.0):
        pyro.module("transition", transition)
        with pyro.plate("outputs", outputs):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("sequences", total, subsample_size=x.shape[1]):
            z = torch.zeros(x.shape[1])
            for t in pyro.markov(range(len(x))):
                with poutine.mask(mask=t < lengths):
                    loc = transition(z.unsqueeze(-1)).squeeze(-1)
                    with poutine.scale(scale=weight):
                        z = pyro.sample(f"z_{t}", dist.Normal(loc, STEP))
                    law = dist.Normal(z.unsqueeze(-1) + b, NOISE)
                    pyro.sample(f"x_{t}", law.to_event(1), obs=x[t])

    def smooth(x, lengths, weight=1.0):
        pyro.module("smoother", smoother)
        h = smoother.states(x, lengths)
        with pyro.plate("sequences", total, subsample_size=x.shape[1]):
            z = torch.zeros(x.shape[1])
            for t in pyro.markov(range(len(x))):
                law = dist.Normal(*smoother(h[t], z))
                with poutine.mask(mask=t < lengths), poutine.scale(scale=weight):
                    z = pyro.sample(f"z_{t}", law)

    guide = HybridGuide(model)
    hide = poutine.block(model, hide_fn=lambda site: site["name"].startswith("z_"))
    guide.append(AutoCVI(hide))
    guide.append(smooth)
    return model, guide


def sequences(steps=3, count=20, outputs=1):
    """Autoregressive sequences of unequal length, padded with zeros."""
    lengths = torch.randint(2, steps + 1, (count,))
    z, x = torch.zeros(count), []
    for _ in range(steps):
        z = 0.9 * z + STEP * torch.randn(count)
        x.append(z.unsqueeze(-1) + 0.7 + NOISE * torch.randn(count, outputs))
    inside = torch.arange(steps).unsqueeze(-1) < lengths
    return torch.stack(x) * inside.unsqueeze(-1), lengths


def best_bound(x, lengths):
    """The evidence of a linear model as a dense Gaussian, and the largest bound of q(b) q(z).

    KL(q || p) of two Gaussian blocks is half the log ratio of b's precision given z to that without.
    """
    T = len(x)
    power = torch.arange(T).unsqueeze(-1) - torch.arange(T)
    path = STEP * torch.where(power >= 0, 0.9 ** power.clamp(min=0).double(), 0.0)
    inside = (torch.arange(T) < lengths.unsqueeze(-1)).reshape(-1)
    one = path @ path.mT + NOISE**2 * torch.eye(T)
    cov = torch.block_diag(*[one] * x.shape[1])[inside][:, inside]
    data, ones = x[..., 0].mT.reshape(-1)[inside], torch.ones(int(inside.sum()))
    evidence = dist.MultivariateNormal(0 * ones, cov + 1.0).log_prob(data)
    given, alone = 1 + len(ones) / NOISE**2, 1 + ones @ torch.linalg.solve(cov, ones)
    return float(evidence), float(evidence - 0.5 * (given / alone).log())


def test_a_linear_deep_kalman_filter_reaches_the_exact_likelihood():
    """Unequal lengths, minibatches, annealing: the bound stays below the evidence, and comes near."""
    torch.manual_seed(0)
    x, lengths = sequences()
    transition = nn.Linear(1, 1, bias=False).eval().requires_grad_(False)
    transition.weight.fill_(0.9)
    model, guide = deep_kalman_filter(transition, Smoother(), 20)
    cvi = CVI(model, guide, optim=pyro.optim.ClippedAdam({"lr": 0.06, "lrd": 0.98}))
    for i in range(100):
        rows = torch.randperm(20)[:10]
        cvi.step(x[:, rows], lengths[rows], min(1.0, 0.3 + i / 40))
    evidence, best = best_bound(x, lengths)
    bounds = torch.tensor([-cvi.evaluate_loss(x, lengths) for _ in range(30)])
    mean, error = float(bounds.mean()), float(bounds.std() / 30**0.5)
    assert best < evidence
    assert mean - 3 * error < best < mean + 2.0 + 3 * error


def test_padding_is_not_read_and_batches_may_be_shorter():
    x, lengths = sequences(outputs=2)
    model, guide = deep_kalman_filter(nn.Linear(1, 1), Smoother(2), 20, outputs=2)
    cvi = CVI(model, guide, optim=pyro.optim.Adam({"lr": 0.01}))
    cvi.step(x, lengths)
    assert {e.how for e in cvi.explain().edges} == {"exact"}
    losses = []
    for padding in (0.0, 1e3):
        pyro.set_rng_seed(1)
        inside = (torch.arange(3).unsqueeze(-1) < lengths).unsqueeze(-1)
        losses.append(cvi.evaluate_loss(torch.where(inside, x, padding), lengths))
    assert losses[0] == losses[1]
    short = lengths < 3
    cvi.step(x[:2, short], lengths[short])
    assert sorted(guide(x[:2, short], lengths[short])) == ["b", "z_0", "z_1"]
