"""Two discrete parents of one datum: what holds whether their posterior is joint or mean-field.

The bound rises and stays below the log evidence (by enumeration); the other blocks get the counts that
the posterior of the discrete sites says. Where both sites are one block and all else is known, the bound
is the log evidence.
"""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pair_cases import close, fit_to_the_end, hows
from pyro.ops.indexing import Vindex

P1, P2 = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
P3 = torch.tensor([0.25, 0.5, 0.25])


def values(*shape):
    pool = torch.tensor([0.5, -1.25, 2.125, 3.0, -0.25, 1.75, 0.875, -2.5])
    return pool[: math.prod(shape)].reshape(shape).to(torch.get_default_dtype())


def normal_log_prob(y, mean, sd):
    return -0.5 * ((y - mean) / sd) ** 2 - math.log(sd) - 0.5 * math.log(2 * math.pi)


def rose(cvi, guide, loss, evidence, dtype):
    """The bound stays below the log evidence; `fit_to_the_end` has seen it rise at every step."""
    assert -loss <= float(evidence) + (1e-8 if dtype == torch.float64 else 1e-3)
    assert hows(cvi) == {"exact"}, cvi.explain()


def in_one_block(cvi, *sites):
    return any(set(sites) <= set(b.sites) for b in cvi.explain().blocks)


LOOKS = {
    "table": lambda t, a, b: t[a, b],
    "Vindex": lambda t, a, b: Vindex(t)[a, b],
    "flat": lambda t, a, b: t.reshape(-1)[t.shape[1] * a + b],
    "rows": lambda t, a, b: Vindex(t[a])[..., b],
}


@pytest.mark.parametrize("second", [P2, P3], ids=["2 by 2", "2 by 3"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_known_table_of_two_parents(look, second, dtype):
    """y ~ Normal(T[z1, z2], 1): all but the two sites is known."""
    y, k = values(6), len(second)
    table = 2 * values(2, k)

    def model():
        with pyro.plate("data", 6):
            a = pyro.sample("a", dist.Categorical(P1.to(dtype)))
            b = pyro.sample("b", dist.Categorical(second.to(dtype)))
            pyro.sample("y", dist.Normal(LOOKS[look](table, a, b), 1.0), obs=y)

    log_joint = (
        P1.double().log()[:, None]
        + second.double().log()
        + normal_log_prob(y.double()[:, None, None], table.double(), 1.0)
    )
    evidence = log_joint.flatten(1).logsumexp(1).sum()
    guide, cvi, loss = fit_to_the_end(model)
    rose(cvi, guide, loss, evidence, dtype)
    if in_one_block(cvi, "a", "b"):
        close(-loss, evidence, dtype, "log evidence")
        joint = log_joint.flatten(1).softmax(1).reshape(6, 2, k)
        close(guide.posterior("a").probs, joint.sum(2), dtype, "marginal of a")
        close(guide.posterior("b").probs, joint.sum(1), dtype, "marginal of b")


def test_an_exclusive_or_of_two_bits(dtype):
    """Two Bernoulli sites of which only the parity matters."""
    y = values(6)

    def model():
        with pyro.plate("data", 6):
            a = pyro.sample("a", dist.Bernoulli(0.25))
            b = pyro.sample("b", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(3 * (a + b - 2 * a * b), 1.0), obs=y)

    means = torch.tensor([[0.0, 3.0], [3.0, 0.0]]).double()
    prior = torch.tensor([[0.375, 0.375], [0.125, 0.125]]).double().log()
    log_joint = prior + normal_log_prob(y.double()[:, None, None], means, 1.0)
    evidence = log_joint.flatten(1).logsumexp(1).sum()
    guide, cvi, loss = fit_to_the_end(model)
    rose(cvi, guide, loss, evidence, dtype)
    if in_one_block(cvi, "a", "b"):
        close(-loss, evidence, dtype, "log evidence")


def assignments(n, *sizes):
    """All values of n rows of discrete sites."""
    rows = list(itertools.product(*(range(k) for k in sizes)))
    return itertools.product(rows, repeat=n)


def log_dirichlet_multinomial(prior, counts):
    """log p(labels) with their probabilities integrated out."""
    a = prior.double()
    total = torch.lgamma(a.sum()) - torch.lgamma(a.sum() + counts.sum())
    return total + (torch.lgamma(a + counts) - torch.lgamma(a)).sum()


def gaussian_cells(y, cell, size, sd0, sd):
    """log p(y | cells) with the mean of each cell ~ Normal(0, sd0) integrated out."""
    total = torch.zeros((), dtype=torch.float64)
    for c in range(size):
        x = y[cell == c].double()
        if len(x):
            cov = sd0**2 * torch.ones(len(x), len(x)) + sd**2 * torch.eye(len(x))
            total = total + dist.MultivariateNormal(
                torch.zeros(len(x)).double(), cov.double()
            ).log_prob(x)
    return total


@pytest.mark.parametrize("tied", [False, True], ids=["independent", "second given first"])
def test_a_table_of_latent_means(tied, dtype):
    """y ~ Normal(T[z1, z2], 1/2), T Gaussian; z2 independent of z1, or from theta[z1]."""
    n, y = 3, 2 * values(3)
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])

    def model():
        pi = pyro.sample("pi", dist.Dirichlet(one.to(dtype)))
        with pyro.plate("rows", 2, dim=-2), pyro.plate("columns", 2, dim=-1):
            t = pyro.sample("T", dist.Normal(0.0, 3.0))
        if tied:
            with pyro.plate("k", 2):
                theta = pyro.sample("theta", dist.Dirichlet(two.to(dtype)))
        else:
            theta = pyro.sample("theta", dist.Dirichlet(two.to(dtype)))
        with pyro.plate("data", n):
            a = pyro.sample("a", dist.Categorical(pi))
            b = pyro.sample("b", dist.Categorical(theta[a] if tied else theta))
            pyro.sample("y", dist.Normal(Vindex(t)[a, b], 0.5), obs=y)

    parts = []
    for rows in assignments(n, 2, 2):
        z = torch.tensor(rows)
        ab = torch.nn.functional.one_hot(2 * z[:, 0] + z[:, 1], 4).sum(0).reshape(2, 2).double()
        log_p = log_dirichlet_multinomial(one, ab.sum(1))
        counts = ab if tied else ab.sum(0, keepdim=True)
        log_p = log_p + sum(log_dirichlet_multinomial(two, c) for c in counts)
        parts.append(log_p + gaussian_cells(y, 2 * z[:, 0] + z[:, 1], 4, 3.0, 0.5))
    evidence = torch.stack(parts).logsumexp(0)
    guide, cvi, loss = fit_to_the_end(model)
    rose(cvi, guide, loss, evidence, dtype)

    r1, r2 = guide.posterior("a").probs, guide.posterior("b").probs
    close(guide.posterior("pi").concentration, one + r1.sum(0), dtype, "counts of z1")
    counts = guide.posterior("theta").concentration - two.to(dtype)
    if tied:
        close(counts.sum(1), r1.sum(0), dtype, "rows of the counts of pairs")
        close(counts.sum(0), r2.sum(0), dtype, "columns of the counts of pairs")
    else:
        close(counts, r2.sum(0), dtype, "counts of z2")
    q = guide.posterior("T")
    seen = (1 / q.variance - 1 / 9) * 0.25
    close(seen.sum(), float(n), dtype, "the cells share all rows")
    close((q.mean / q.variance * 0.25).sum(), y.sum(), dtype, "the cells share all data")


def test_two_effects_that_add(dtype):
    """y ~ Normal(u[z1] + v[z2], 1/2): the two tables are one Gaussian block."""
    n, y = 3, 2 * values(3)
    p = P1.to(dtype)

    def model():
        with pyro.plate("k", 2):
            u = pyro.sample("u", dist.Normal(0.0, 2.0))
            v = pyro.sample("v", dist.Normal(1.0, 2.0))
        with pyro.plate("data", n):
            a = pyro.sample("a", dist.Categorical(p))
            b = pyro.sample("b", dist.Categorical(p))
            pyro.sample("y", dist.Normal(u[a] + v[b], 0.5), obs=y)

    parts = []
    for rows in assignments(n, 2, 2):
        z = torch.tensor(rows)
        design = torch.cat([torch.eye(2)[z[:, 0]], torch.eye(2)[z[:, 1]]], 1).double()
        cov = 4 * design @ design.T + 0.25 * torch.eye(n).double()
        parts.append(
            dist.MultivariateNormal(torch.ones(n).double(), cov).log_prob(y.double())
            + P1.double().log()[z].sum()
        )
    evidence = torch.stack(parts).logsumexp(0)
    guide, cvi, loss = fit_to_the_end(model)
    rose(cvi, guide, loss, evidence, dtype)
    # each row adds the precision 4 to one u and to one v
    joint = torch.linalg.inv(guide.joint(["u", "v"]).covariance_matrix.double())
    counts = (joint.diagonal() - 0.25) / 4
    r = torch.cat([guide.posterior("a").probs.sum(0), guide.posterior("b").probs.sum(0)])
    close(counts, r, dtype, "counts of each effect")


@pytest.mark.parametrize("length", [2, 4])
def test_a_chain_of_discrete_sites(length, dtype):
    """z_t from a table at z_{t-1}, y_t from a table at z_t: all known but the states."""
    y = values(length)
    step = torch.tensor([[0.75, 0.25], [0.125, 0.875]])
    means = torch.tensor([-1.0, 1.5])

    def model():
        z = None
        for t in range(length):
            p = P1.to(dtype) if z is None else step.to(dtype)[z]
            z = pyro.sample(f"z_{t}", dist.Categorical(p))
            pyro.sample(f"y_{t}", dist.Normal(means.to(dtype)[z], 1.0), obs=y[t])

    paths = torch.tensor(list(itertools.product(range(2), repeat=length)))
    log_p = P1.double().log()[paths[:, 0]] + normal_log_prob(
        y.double(), means.double()[paths], 1.0
    ).sum(1)
    for t in range(1, length):
        log_p = log_p + step.double().log()[paths[:, t - 1], paths[:, t]]
    guide, cvi, loss = fit_to_the_end(model)
    rose(cvi, guide, loss, log_p.logsumexp(0), dtype)
    if in_one_block(cvi, *(f"z_{t}" for t in range(length))):
        close(-loss, log_p.logsumexp(0), dtype, "log evidence")
        q = log_p.softmax(0)
        for t in range(length):
            marginal = torch.stack([q[paths[:, t] == k].sum() for k in range(2)])
            close(guide.posterior(f"z_{t}").probs, marginal, dtype, f"marginal of z_{t}")


def test_a_mixture_of_mixtures(dtype):
    """A class for each group of rows, and a component for each row given its group's class."""
    groups, rows = 2, 2
    y = 2 * values(groups, rows)
    theta = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    means = torch.tensor([[-3.0, 0.0], [1.0, 4.0]])

    def model():
        with pyro.plate("groups", groups, dim=-2):
            a = pyro.sample("a", dist.Categorical(P1.to(dtype)))
            with pyro.plate("rows", rows, dim=-1):
                b = pyro.sample("b", dist.Categorical(theta.to(dtype)[a]))
                pyro.sample("y", dist.Normal(means.to(dtype)[a, b], 1.0), obs=y)

    inner = (
        theta.double().log() + normal_log_prob(y.double()[..., None, None], means.double(), 1.0)
    ).logsumexp(-1)  # group, row, class
    evidence = (P1.double().log() + inner.sum(1)).logsumexp(-1).sum()
    guide, cvi, loss = fit_to_the_end(model)
    rose(cvi, guide, loss, evidence, dtype)
    assert tuple(guide.posterior("a").probs.shape) == (groups, 1, 2)
