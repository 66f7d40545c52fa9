"""Discrete chains: forward-backward against sums over all paths, and models against brute force."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_value

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.families import MARKOV_CHAIN


def random_chain(t, k, batch=(2,), scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    unary = scale * torch.randn(*batch, t, k, generator=g, dtype=torch.float64)
    pair = scale * torch.randn(*batch, t - 1, k, k, generator=g, dtype=torch.float64)
    return unary, pair


def paths(natural):
    """All paths and their log weights, (paths, T) and (*batch, paths)."""
    unary, pair = natural
    t, k = unary.shape[-2:]
    every = torch.tensor(list(itertools.product(range(k), repeat=t)))
    weight = sum(unary[..., i, every[:, i]] for i in range(t))
    for i in range(t - 1):
        weight = weight + pair[..., i, every[:, i], every[:, i + 1]]
    return every, weight


@pytest.mark.parametrize(("t", "k"), [(1, 3), (2, 2), (5, 3)])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_partition_marginals_entropy_and_divergence_equal_sums_over_all_paths(t, k, scale):
    natural, other = random_chain(t, k, scale=scale), random_chain(t, k, seed=1)
    every, weight = paths(natural)
    log_z = weight.logsumexp(-1)
    torch.testing.assert_close(MARKOV_CHAIN.log_partition(natural), log_z)
    p = (weight - log_z[..., None]).exp()
    state, pair = MARKOV_CHAIN.to_mean(natural)
    hot = torch.nn.functional.one_hot(every, k).to(p)
    torch.testing.assert_close(state, torch.einsum("bp,ptk->btk", p, hot))
    both = torch.einsum("bp,pti,ptj->btij", p, hot[:, :-1], hot[:, 1:])
    torch.testing.assert_close(pair, both)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    torch.testing.assert_close(MARKOV_CHAIN.entropy(natural), entropy, atol=1e-9, rtol=1e-9)
    other_log = paths(other)[1] - paths(other)[1].logsumexp(-1, keepdim=True)
    kl = (torch.special.xlogy(p, p) - p * other_log).sum(-1)
    torch.testing.assert_close(MARKOV_CHAIN.kl(natural, other), kl, atol=1e-9, rtol=1e-9)


def test_a_path_is_not_lost_where_float32_underflows_on_the_way():
    unary = torch.tensor(
        [[0.0, -80.0], [-110.0, 0.0], [0.0, -80.0]]
    )  # state 0, but for one outlier
    pair = torch.tensor([[0.0, -60.0], [-60.0, 0.0]]).expand(2, 2, 2)  # that does not pay a change
    found = MARKOV_CHAIN.to_mean((unary.float(), pair.float()))
    exact = MARKOV_CHAIN.to_mean((unary, pair))
    assert float(exact[0][1, 0]) > 0.99
    for f, e in zip(found, exact, strict=True):
        torch.testing.assert_close(f.double(), e, atol=1e-6, rtol=1e-5)


def test_mean_is_the_gradient_of_the_partition_and_round_trips():
    natural = tuple(n.requires_grad_() for n in random_chain(4, 3))
    value = MARKOV_CHAIN.log_partition(natural).sum()
    found = torch.autograd.grad(value, natural)
    mean = MARKOV_CHAIN.to_mean(tuple(n.detach() for n in natural))
    for g, m in zip(found, mean, strict=True):
        torch.testing.assert_close(g, m)
    again = MARKOV_CHAIN.to_mean(MARKOV_CHAIN.to_natural(mean))
    for a, m in zip(again, mean, strict=True):
        torch.testing.assert_close(a, m)


def test_fisher_solve_turns_a_gradient_in_naturals_into_one_in_means():
    natural = random_chain(4, 3)
    target = random_chain(4, 3, seed=5)  # L(q) = <mean, target>, so dL/dmean = target
    leaves = tuple(n.clone().requires_grad_() for n in natural)
    value = MARKOV_CHAIN.inner(MARKOV_CHAIN.to_mean(leaves), target).sum()
    solved = MARKOV_CHAIN.fisher_solve(natural, torch.autograd.grad(value, leaves))
    mean = MARKOV_CHAIN.to_mean(natural)
    step = tuple(1e-6 * x for x in random_chain(4, 3, seed=6))
    moved = MARKOV_CHAIN.to_mean(tuple(a + b for a, b in zip(natural, step, strict=True)))
    difference = tuple(a - b for a, b in zip(moved, mean, strict=True))
    torch.testing.assert_close(
        MARKOV_CHAIN.inner(difference, solved), MARKOV_CHAIN.inner(difference, target),
        atol=1e-10, rtol=1e-4,
    )  # fmt: skip


# --- models ----------------------------------------------------------------------------------------

K = 3
MU = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
A = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
PI = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


def known_hmm(x, markov=True, mask=None):
    n, t_max = x.shape
    with pyro.plate("sequences", n):
        z = None
        steps = pyro.markov(range(t_max)) if markov else range(t_max)
        for t in steps:
            on = torch.ones(n, dtype=torch.bool) if mask is None else mask[:, t]
            with poutine.mask(mask=on):
                p = PI if z is None else A[z]
                z = pyro.sample(f"z_{t}", dist.Categorical(p))
                pyro.sample(f"x_{t}", dist.Normal(MU[z], 0.8), obs=x[:, t])


def exact_posterior(x):
    """log evidence and state marginals of one sequence, over all paths."""
    t = len(x)
    every = torch.tensor(list(itertools.product(range(K), repeat=t)))
    w = PI.log()[every[:, 0]] + sum(A.log()[every[:, i], every[:, i + 1]] for i in range(t - 1))
    w = w + sum(dist.Normal(MU[every[:, i]], 0.8).log_prob(x[i]) for i in range(t))
    p = (w - w.logsumexp(0)).exp()
    hot = torch.nn.functional.one_hot(every, K).to(p)
    return w.logsumexp(0), torch.einsum("p,ptk->tk", p, hot)


@pytest.mark.parametrize("markov", [True, False])
def test_a_chain_with_known_parameters_is_exact_after_one_step(markov):
    x = torch.randn(4, 5)
    guide = AutoCVI(known_hmm)
    loss = CVI(known_hmm, guide).step(x, markov)
    oracle = [exact_posterior(row) for row in x]
    assert loss == pytest.approx(-float(sum(e for e, _ in oracle)), abs=1e-9)
    for t in range(5):
        p = guide.posterior(f"z_{t}").probs
        torch.testing.assert_close(p, torch.stack([m[t] for _, m in oracle]))


def test_variable_lengths_by_mask_equal_shorter_chains():
    x, lengths = torch.randn(3, 6), [2, 6, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    x = torch.where(mask, x, torch.nan)
    guide = AutoCVI(known_hmm)
    loss = CVI(known_hmm, guide).step(x, True, mask)
    evidence = 0.0
    for i, n in enumerate(lengths):
        e, marginals = exact_posterior(x[i, :n])
        evidence += float(e)
        for t in range(n):
            torch.testing.assert_close(guide.posterior(f"z_{t}").probs[i], marginals[t])
    assert loss == pytest.approx(-evidence, abs=1e-9)


def test_draws_of_a_chain_have_its_density():
    """E log q of the guide's own draws, and the ELBO by Pyro, agree with the engine."""
    x = torch.randn(2, 4)
    guide = AutoCVI(known_hmm)
    loss = CVI(known_hmm, guide).step(x)
    elbos = Trace_ELBO(num_particles=50).loss(known_hmm, guide, x)
    assert elbos == pytest.approx(loss, abs=1e-8)  # exact posterior: every draw gives the evidence
    vectorised = Trace_ELBO(num_particles=50, vectorize_particles=True, max_plate_nesting=1)
    assert vectorised.loss(known_hmm, guide, x) == pytest.approx(loss, abs=1e-8)


def bayesian_hmm(x):
    n, t_max = x.shape
    with pyro.plate("states", 2):
        trans = pyro.sample("trans", dist.Dirichlet(torch.tensor([2.0, 1.0])))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0))
    init = pyro.sample("init", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("sequences", n):
        z = None
        for t in pyro.markov(range(t_max)):
            z = pyro.sample(f"z_{t}", dist.Categorical(init if z is None else trans[z]))
            pyro.sample(f"x_{t}", dist.Normal(mu[z], tau[z].rsqrt()), obs=x[:, t])


def oracle_sweeps(x, r, xi, sweeps):
    """VB-EM of `bayesian_hmm` by sums over all paths, in the package's block order."""
    n, t_max = x.shape
    every = torch.tensor(list(itertools.product(range(2), repeat=t_max)))
    hot = torch.nn.functional.one_hot(every, 2).double()
    e_tau = torch.full((2,), 2.0)
    e_log_tau = torch.digamma(torch.tensor(2.0)) - 0.0
    e_log_tau = e_log_tau.expand(2)
    for _ in range(sweeps):
        alpha = torch.tensor([2.0, 1.0]) + xi
        weight = e_tau * r.sum((0, 1))
        precision = 0.25 + weight
        m = e_tau * torch.einsum("ntk,nt->k", r, x) / precision
        v = 1 / precision
        a = 2.0 + r.sum((0, 1)) / 2
        square = (x[..., None] - m) ** 2 + v
        b = 1.0 + (r * square).sum((0, 1)) / 2
        e_tau, e_log_tau = a / b, torch.digamma(a) - b.log()
        start = 1.0 + r[:, 0].sum(0)
        log_start = torch.digamma(start) - torch.digamma(start.sum())
        log_trans = torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))
        emission = 0.5 * e_log_tau - 0.5 * e_tau * square
        w = log_start[every[:, 0]] + sum(
            log_trans[every[:, t], every[:, t + 1]] for t in range(t_max - 1)
        )
        w = w + sum(emission[:, t][:, every[:, t]] for t in range(t_max))
        p = w.softmax(-1)
        r = torch.einsum("np,ptk->ntk", p, hot)
        xi = torch.einsum("np,pti,ptj->ij", p, hot[:, :-1], hot[:, 1:])
    return m, a, b, alpha, r


def test_a_bayesian_hmm_follows_brute_force_sweep_by_sweep():
    x = torch.tensor([[-1.0, -0.8, 1.0, 1.2, 0.9], [1.1, 0.7, -1.2, -0.9, -1.0]])
    values = {f"z_{t}": (x[:, t] > 0).long() for t in range(5)}
    guide = AutoCVI(bayesian_hmm, init_loc_fn=init_to_value(values=values))
    cvi = CVI(bayesian_hmm, guide)
    losses = [cvi.step(x) for _ in range(200)]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(losses))
    hot = torch.stack([torch.nn.functional.one_hot(v, 2).double() for v in values.values()], 1)
    m, a, b, alpha, r = oracle_sweeps(x, hot, torch.zeros(2, 2), 200)
    torch.testing.assert_close(guide.posterior("mu").loc, m, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(guide.posterior("tau").concentration, a, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(guide.posterior("tau").rate, b, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(guide.posterior("trans").concentration, alpha, atol=1e-7, rtol=1e-7)
    for t in range(5):
        torch.testing.assert_close(guide.posterior(f"z_{t}").probs, r[:, t], atol=1e-7, rtol=1e-7)


def test_a_long_chain_needs_two_dims_and_one_expectation_for_all_steps():
    x = torch.randn(3, 60)
    guide = AutoCVI(bayesian_hmm)
    CVI(bayesian_hmm, guide).step(x)
    plan = guide.plan
    assert len({x.enum_dim for x in plan.latents.values() if x.enum_dim is not None}) == 2
    assert len(plan.factors) < 15  # four parameters, the start, and four stacks of steps
    (chain,) = [b for b in guide.plan.blocks if b.is_chain]
    assert len(chain.sites) == 60


def test_sites_coupled_beyond_neighbours_are_not_a_chain():
    """A second-order chain: no pairs are claimed to be exact; the bound stays below the evidence."""
    table = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.2, 0.8]]])

    def model(x):
        z = [pyro.sample(f"z_{t}", dist.Categorical(torch.ones(2) / 2)) for t in range(2)]
        for t in range(2, 5):
            z.append(pyro.sample(f"z_{t}", dist.Categorical(table[z[-2], z[-1]])))
        pyro.sample("x", dist.Normal(1.0 * z[-1], 0.5), obs=x)

    x = torch.tensor(0.8)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    losses = [cvi.step(x) for _ in range(30)]
    assert not any(b.is_chain for b in guide.plan.blocks)
    evidence = []
    for z in itertools.product(range(2), repeat=5):
        p = 0.25 * torch.stack([table[z[t - 2], z[t - 1], z[t]] for t in range(2, 5)]).prod()
        evidence.append(p.log() + dist.Normal(float(z[-1]), 0.5).log_prob(x))
    assert -losses[-1] <= float(torch.stack(evidence).logsumexp(0)) + 1e-12
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(losses))


def test_two_chains_that_share_observations_are_two_blocks():
    def model(x):
        a = b = None
        for t in range(len(x)):
            a = pyro.sample(f"a_{t}", dist.Categorical(PI if a is None else A[a]))
            b = pyro.sample(f"b_{t}", dist.Categorical(PI if b is None else A[b]))
            pyro.sample(f"x_{t}", dist.Normal(MU[a] - 2 * MU[b], 1.0), obs=x[t])

    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    x = torch.tensor([0.5, -3.0, 2.0, 1.0])
    losses = [cvi.step(x) for _ in range(20)]
    assert sorted(b.sites[0] for b in guide.plan.blocks if b.is_chain) == ["a_0", "b_0"]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(losses))
    particles = Trace_ELBO(num_particles=4000, vectorize_particles=True, max_plate_nesting=0)
    assert particles.loss(model, guide, x) == pytest.approx(losses[-1], abs=0.1)


def test_states_that_pass_through_lists_are_still_seen():
    """Two steps share a dim only if no density depends on both; reading a value hides nothing."""

    def model(x):
        first = pyro.sample("z_0", dist.Categorical(PI))
        kept = torch.tensor(first.tolist())
        z = pyro.sample("z_1", dist.Categorical(A[first]))
        z = pyro.sample("z_2", dist.Categorical(A[z]))
        pyro.sample("x", dist.Normal(MU[z] + MU[kept], 1.0), obs=x)

    x = torch.tensor(0.3)
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    losses = [cvi.step(x) for _ in range(50)]
    joint = (
        PI.log()[:, None, None]
        + A.log()[:, :, None]
        + A.log()[None]
        + dist.Normal(MU[:, None, None] + MU, 1.0).log_prob(x)
    )
    evidence = float(joint.logsumexp((0, 1, 2)))
    assert -evidence - 1e-12 <= losses[-1] <= -evidence + 1.0


def test_a_printed_report_puts_the_steps_of_a_loop_together():
    guide = AutoCVI(bayesian_hmm)
    cvi = CVI(bayesian_hmm, guide)
    cvi.step(torch.randn(2, 50))
    report = cvi.explain()
    assert len(report.edges) > 200
    text = str(report)
    assert len(text.splitlines()) < 30
    assert "x_0 ... x_49 (50)" in text.replace("  ", " ") or "x_0 ... x_48 (25)" in text
    assert len(report._repr_html_()) < 6000
