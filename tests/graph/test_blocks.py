"""Which sites share a block: chains stay whole, coefficients apart, whatever the order and the names."""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI, explain, integrate
from pyro_cvi.graph import blocks
from pyro_cvi.graph import chain as chains

T = 12
Y = torch.sin(1.3 * torch.arange(40.0)) + 0.4 * torch.cos(5 * torch.arange(40.0))


def blocks_of(model, *args):
    return {frozenset(b.sites) for b in explain(model, *args).blocks}


def states(name, count=T, first=0):
    return {f"{name}{t}" for t in range(first, count)}


# --- models: each gives its blocks -------------------------------------------------------------------


def volatility(order=("mu", "phi", "s"), name=lambda n: n):
    """Stochastic volatility: the last state adds up with phi, all others multiply it."""
    priors = {
        "mu": dist.Normal(-1.0, 2.0),
        "phi": dist.Uniform(-1.0, 1.0),
        "s": dist.HalfCauchy(0.5),
    }
    z = {n: pyro.sample(name(n), priors[n]) for n in order}
    mu, phi, s = z["mu"], z["phi"], z["s"]
    h = pyro.sample(name("h0"), dist.Normal(mu, s / (1 - phi**2).sqrt()))
    for t in pyro.markov(range(T)):
        if t:
            h = pyro.sample(name(f"h{t}"), dist.Normal(mu + phi * (h - mu), s))
        pyro.sample(name(f"y{t}"), dist.Normal(0.0, (h / 2).exp()), obs=Y[t])


def damped_trend(order=("phi", "c"), name=lambda n: n):
    priors = {"phi": dist.Normal(0.5, 0.5), "c": dist.Normal(0.0, 1.0)}
    z = {n: pyro.sample(name(n), priors[n]) for n in order}
    level = slope = torch.tensor(0.0)
    for t in range(T):
        level, slope = (
            pyro.sample(name(f"l{t}"), dist.Normal(level + slope, 0.2)),
            pyro.sample(name(f"b{t}"), dist.Normal(z["phi"] * slope, 0.1)),
        )
        pyro.sample(name(f"y{t}"), dist.Normal(level + z["c"] * Y[t + 5], 0.5), obs=Y[t])


def factor_model(order=("load", "phi", "mu"), name=lambda n: n):
    priors = {
        "load": dist.Normal(torch.zeros(3), 1.0).to_event(1),
        "phi": dist.Normal(0.5, 0.5),
        "mu": dist.Normal(torch.zeros(3), 1.0).to_event(1),
    }
    z = {n: pyro.sample(name(n), priors[n]) for n in order}
    f = torch.tensor(0.0)
    for t in range(T):
        f = pyro.sample(name(f"f{t}"), dist.Normal(z["phi"] * f, 1.0))
        law = dist.Normal(z["mu"] + z["load"] * f, 0.5).to_event(1)
        pyro.sample(name(f"y{t}"), law, obs=Y[t : t + 3])


def time_varying(order=("a",), name=lambda n: n):
    """Two walks that multiply each other where there are data."""
    a = pyro.sample(name("a"), dist.Normal(0.0, 1.0))
    x = beta = torch.tensor(0.0)
    for t in range(T):
        x = pyro.sample(name(f"x{t}"), dist.Normal(x, 1.0))
        beta = pyro.sample(name(f"w{t}"), dist.Normal(beta, 1.0))
        if t not in (0, 1, 5, T - 1):
            pyro.sample(name(f"y{t}"), dist.Normal(a + x * beta, 0.5), obs=Y[t])


def errors_in_variables(order=("a", "b", "m"), name=lambda n: n):
    z = {n: pyro.sample(name(n), dist.Normal(0.0, 3.0)) for n in order}
    for i in range(T):
        x = pyro.sample(name(f"z{i}"), dist.Normal(z["m"], 1.0))
        pyro.sample(name(f"x{i}"), dist.Normal(x, 0.5), obs=Y[i])
        if i not in (3, T - 1):
            pyro.sample(name(f"y{i}"), dist.Normal(z["a"] + z["b"] * x, 0.5), obs=Y[i])


def moving_average(order=("mu", "theta"), name=lambda n: n):
    priors = {"mu": dist.Normal(0.0, 1.0), "theta": dist.Normal(0.5, 0.5)}
    z = {n: pyro.sample(name(n), priors[n]) for n in order}
    before = torch.tensor(0.0)
    for t in range(T):
        e = pyro.sample(name(f"e{t}"), dist.Normal(0.0, 1.0))
        pyro.sample(name(f"y{t}"), dist.Normal(z["mu"] + z["theta"] * before + e, 0.1), obs=Y[t])
        before = e


def interventions(order=("c", "d", "phi"), name=lambda n: n):
    """Effects at one time each, which multiply each other elsewhere: neither takes its state along."""
    priors = {"c": dist.Normal(0.0, 1.0), "d": dist.Normal(0.0, 1.0), "phi": dist.Normal(0.5, 0.5)}
    z = {n: pyro.sample(name(n), priors[n]) for n in order}
    pyro.sample(name("cd"), dist.Normal(z["c"] * z["d"], 1.0), obs=torch.tensor(0.3))
    h = torch.tensor(0.0)
    for t in range(T):
        h = pyro.sample(name(f"h{t}"), dist.Normal(z["phi"] * h, 0.3))
        more = {3: z["c"], 5: z["d"]}.get(t, 0.0)
        pyro.sample(name(f"y{t}"), dist.Normal(h + more, 0.5), obs=Y[t])


EXPECTED = {
    volatility: [{"mu", *states("h")}, {"phi", "s"}],
    damped_trend: [{"c", *states("l"), *states("b")}, {"phi"}],
    factor_model: [{"load", "mu"}, {"phi"}, states("f")],
    errors_in_variables: [{"a", "b"}, {"m", *states("z")}],
    moving_average: [{"mu", *states("e")}, {"theta"}],
}


@pytest.mark.parametrize("model", EXPECTED, ids=lambda m: m.__name__)
def test_a_chain_is_whole_and_coefficients_are_apart(model):
    assert blocks_of(model) == {frozenset(b) for b in EXPECTED[model]}


def test_no_state_of_two_chains_is_torn_from_its_own():
    found = blocks_of(time_varying)
    assert {b - {"a"} for b in found} == {frozenset(states("x")), frozenset(states("w"))}
    found = blocks_of(interventions)
    assert {b - {"c", "d"} for b in found} == {
        frozenset(states("h")),
        frozenset({"phi"}),
        frozenset(),
    }


@pytest.mark.parametrize(
    "model",
    [*EXPECTED, time_varying, interventions],
    ids=lambda m: m.__name__,
)
def test_the_order_of_a_program_changes_nothing(model):
    order = model.__defaults__[0]
    before = blocks_of(model)
    for other in itertools.permutations(order):
        assert blocks_of(lambda other=other: model(order=other)) == before


@pytest.mark.parametrize("model", EXPECTED, ids=lambda m: m.__name__)
def test_names_change_nothing(model):
    def name(n):  # in the other order of the alphabet
        return "".join(chr(219 - ord(c)) if c.islower() else c for c in n)

    renamed = {frozenset(map(name, b)) for b in EXPECTED[model]}
    assert blocks_of(lambda: model(name=name)) == renamed


@pytest.mark.parametrize("in_a_loop", [True, False])
@pytest.mark.parametrize("noise", ["half-normal", "gamma"])
def test_a_loop_has_the_blocks_of_the_vector(in_a_loop, noise):
    def model():
        mu, phi = (
            pyro.sample("mu", dist.Normal(0.0, 1.0)),
            pyro.sample("phi", dist.Normal(0.5, 0.5)),
        )
        law = dist.HalfNormal(1.0) if noise == "half-normal" else dist.Gamma(2.0, 1.0)
        s = pyro.sample("s", law)
        s = s if noise == "half-normal" else s.rsqrt()
        if in_a_loop:
            h = [pyro.sample("h0", dist.Normal(0.0, 10.0))]
            for t in range(1, T):
                h.append(pyro.sample(f"h{t}", dist.Normal(mu + phi * (h[-1] - mu), s)))
            for t in range(T):
                pyro.sample(f"y{t}", dist.Normal(h[t], 0.5), obs=Y[t])
        else:
            h = pyro.sample("h", dist.Normal(0.0, 10.0).expand([T]).to_event(1))
            step = dist.Normal(h[1:] - mu - phi * (h[:-1] - mu), s).to_event(1)
            pyro.sample("d", step, obs=torch.zeros(T - 1))
            pyro.sample("y", dist.Normal(h, 0.5).to_event(1), obs=Y[:T])

    found = {frozenset(n[0] for n in b) for b in blocks_of(model)}
    apart = [{"m", "h", "s"}, {"p"}] if noise == "half-normal" else [{"m", "h"}, {"p"}, {"s"}]
    assert found == {frozenset(b) for b in apart}


# --- factors that are sampled only where their sites share a block -----------------------------------


def squashed():
    """A coefficient behind a function: that it multiplies the states is not seen in the expression."""
    phi = torch.sigmoid(pyro.sample("a", dist.Normal(0.0, 1.0)))
    h = pyro.sample("h0", dist.Normal(0.0, 1.0))
    for t in range(1, T):
        h = pyro.sample(f"h{t}", dist.Normal(phi * h, 0.5))
        pyro.sample(f"y{t}", dist.Poisson(h.exp()), obs=torch.tensor(1.0 + t % 2))


def soft_scale():
    r, phi = pyro.sample("r", dist.Normal(0.0, 1.0)), pyro.sample("phi", dist.Normal(0.5, 0.5))
    h = pyro.sample("h0", dist.Normal(0.0, 1.0))
    for t in range(1, T):
        h = pyro.sample(f"h{t}", dist.Normal(phi * h, torch.nn.functional.softplus(r)))
        pyro.sample(f"y{t}", dist.Normal(h, 1.0), obs=Y[t])


def neighbours():
    """A spatial autoregression: each cell about rho times the mean of its neighbours."""
    w = torch.diag(torch.ones(T - 1), 1) + torch.diag(torch.ones(T - 1), -1)
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    u = pyro.sample("u", dist.Normal(0.0, 10.0).expand([T]).to_event(1))
    mean = rho * (w @ u) / w.sum(1)
    pyro.sample("d", dist.Normal(u - mean, 0.5).to_event(1), obs=torch.zeros(T))
    pyro.sample("y", dist.Poisson((mu + u).exp()).to_event(1), obs=(3 * Y[:T].abs()).floor())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (squashed, [{"a"}, states("h")]),
        (soft_scale, [{"r", "phi"}, states("h")]),
        (neighbours, [{"rho"}, {"mu", "u"}]),
    ],
)
def test_nothing_is_sampled_because_of_how_blocks_are_formed(model, expected):
    report = explain(model)
    assert {e.how for e in report.edges} <= {"exact", "quadrature"}
    assert {frozenset(b.sites) for b in report.blocks} == {frozenset(b) for b in expected}
    losses = CVI(model, AutoCVI(model)).run(num_steps=6, tol=0.0).losses
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(losses))


# --- the posterior, against the dense joint ----------------------------------------------------------


def autoregression(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
    tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    h = pyro.sample("h0", dist.Normal(mu, 1.0))
    for t in pyro.markov(range(len(y))):
        if t:
            h = pyro.sample(f"h{t}", dist.Normal(mu + phi * (h - mu), tau.rsqrt()))
        pyro.sample(f"y{t}", dist.Normal(h, 0.5), obs=y[t])


def moments_of_phi(block_belief):
    """E phi and E phi^2 of phi = 2 sigmoid(u) - 1 by 80 nodes."""
    x, w = np.polynomial.hermite_e.hermegauss(80)
    x, w = torch.as_tensor(x), torch.as_tensor(w / w.sum())
    u = block_belief.loc.reshape(()) + x / block_belief.precision.reshape(()).sqrt()
    phi = 2 * torch.sigmoid(u) - 1
    log_prior = torch.nn.functional.logsigmoid(u) + torch.nn.functional.logsigmoid(-u)
    return [float((w * f).sum()) for f in (phi, phi**2, log_prior)]


@pytest.mark.parametrize("structure", ["dense", "chain"])
def test_the_states_are_the_dense_joint_given_the_coefficients(structure, monkeypatch):
    count = 30
    if structure == "chain":
        monkeypatch.setattr(chains, "_SMALLEST", 10)
    y = Y[:count]
    guide = AutoCVI(autoregression, max_joint_dim=0)
    cvi = CVI(autoregression, guide)
    loss = cvi.run(y, num_steps=40, tol=1e-13).losses[-1]
    by_name = {b.sites: b for b in guide.plan.blocks}
    chain = guide.plan.block_of("h0")
    assert chain.structure == structure
    assert set(chain.sites) == {"mu", *states("h", count)}
    assert len(guide.plan.factors) <= 7
    phi = guide.belief(by_name[("phi",)])
    first, second, log_prior = moments_of_phi(phi)
    gamma = guide.posterior("tau")
    tau, log_tau = gamma.mean, gamma.concentration.digamma() - gamma.rate.log()
    # E of tau (h_t - mu - phi (h_s - mu))^2 = z' S z, and so on, with z = (mu, h)
    n = count + 1
    precision, pull = torch.zeros(n, n), torch.zeros(n)
    precision[0, 0] += 1 / 4
    precision += outer({0: -1.0, 1: 1.0}, n)
    for t in range(1, count):
        a, b = {0: -1.0, t + 1: 1.0}, {0: -1.0, t: 1.0}
        precision += tau * (outer(a, n) + second * outer(b, n))
        precision -= tau * first * (outer(a, n, b) + outer(b, n, a))
    precision[range(1, n), range(1, n)] += 4.0
    pull[1:] = 4 * y
    joint = guide.joint(["mu", *(f"h{t}" for t in range(count))])
    cov = torch.linalg.inv(precision)
    torch.testing.assert_close(joint.loc, cov @ pull, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(joint.covariance_matrix, cov, atol=1e-6, rtol=1e-5)
    # the bound, put together from the same moments
    m, v = joint.loc, joint.covariance_matrix
    two_pi = math.log(2 * math.pi)
    squares = ((v + torch.outer(m, m)) * precision).sum() - 2 * pull @ m + 4 * y @ y
    free = -0.5 * (squares + (2 * n - 1) * two_pi) + 0.5 * (count - 1) * log_tau
    free = free - math.log(2.0) + count * math.log(2.0)
    free = free + (2 - 1) * log_tau - tau + log_prior
    entropy = joint.entropy() + gamma.entropy() + 0.5 * (1 + two_pi - phi.precision.log().sum())
    assert loss == pytest.approx(-float(free + entropy), rel=1e-7)


def outer(a, n, b=None):
    x, y = torch.zeros(n), torch.zeros(n)
    for i, k in a.items():
        x[i] = k
    for i, k in (b or a).items():
        y[i] = k
    return torch.outer(x, y)


def long_products():
    """Two long chains that multiply each other: a factor that is seen through the views of both."""
    x = beta = torch.tensor(0.0)
    for t in range(30):
        x = pyro.sample(f"x{t}", dist.Normal(x, 0.3))
        beta = pyro.sample(f"w{t}", dist.Normal(beta, 0.3))
        pyro.sample(f"o{t}", dist.Normal(x, 0.5), obs=Y[t])
        if t % 3:
            pyro.sample(f"y{t}", dist.Normal(x * beta, 0.5), obs=Y[t + 3])


def test_a_factor_may_be_seen_through_views_of_two_blocks(monkeypatch):
    monkeypatch.setattr(chains, "_SMALLEST", 10)

    def fit():
        pyro.set_rng_seed(0)
        guide = AutoCVI(long_products)
        loss = CVI(long_products, guide).run(num_steps=8, tol=0.0).losses[-1]
        return guide, loss

    guide, loss = fit()
    assert [b.structure for b in guide.plan.blocks] == ["chain", "chain"]
    assert {e.how for e in explain(long_products).edges} == {"exact"}
    assert len(explain(long_products).edges) == 29 * 4 + 2 + 30 + 20 * 2
    monkeypatch.setattr(blocks, "_viewed", lambda *args: None)
    dense, other = fit()
    assert loss == pytest.approx(other, rel=1e-9)
    torch.testing.assert_close(guide.median()["w17"], dense.median()["w17"], rtol=1e-3, atol=1e-3)


# --- what the report says of products ----------------------------------------------------------------


def test_the_report_names_the_coefficients_that_multiply_other_blocks():
    report = explain(errors_in_variables)
    (product,) = report.products
    assert product.site == "b" and product.size == 1
    assert set(product.others) == states("z") - {"z3", f"z{T - 1}"}
    assert "integrate(cvi, ['b'], ...)" in str(report) and "multiplies z0" in report._repr_html_()
    assert {p.site for p in explain(volatility).products} == {"phi", "s"}
    assert not explain(time_varying).products  # as many on either side


def test_what_the_report_advises_holds_what_ties_them():
    """The slope's marginal law, with the latent values integrated out, on a grid."""
    x, y = Y, 0.5 + 0.8 * Y.flip(0) + 0.3 * Y

    def model():
        b = pyro.sample("b", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", 40):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)
            pyro.sample("y", dist.Normal(b * z, 0.5), obs=y)

    b = torch.linspace(-3, 4, 4001)
    cov = torch.stack([torch.full_like(b, 1.25), b, b, b**2 + 0.25], -1).reshape(-1, 1, 2, 2)
    log_p = dist.MultivariateNormal(torch.zeros(2), cov).log_prob(torch.stack([x, y], -1)).sum(-1)
    weight = (log_p - b**2 / 18).softmax(0)
    mean = float(weight @ b)
    deviation = float((weight @ (b - mean) ** 2).sqrt())
    cvi = CVI(model, AutoCVI(model, max_joint_dim=0))
    cvi.run()
    (product,) = cvi.explain().products
    assert float(cvi.guide.posterior("b").stddev) < 0.9 * deviation
    mixed = integrate(cvi, [product.site]).posterior("b")
    assert float(mixed.mean) == pytest.approx(mean, abs=0.01)
    assert float(mixed.stddev) == pytest.approx(deviation, rel=0.02)
