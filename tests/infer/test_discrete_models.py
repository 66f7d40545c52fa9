"""Discrete models with known parameters: the bound is the evidence, summed over all states."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.indexing import Vindex

from pyro_cvi import CVI, AutoCVI, CVIError

D = torch.float64
A = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=D)
B = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]], dtype=D)
MU = torch.tensor([-1.0, 1.5], dtype=D)
PI = torch.tensor([0.6, 0.4], dtype=D)
X = torch.tensor([0.3, -1.2, 0.8, 2.0], dtype=D)
ROWS = torch.tensor([[0.3, -1.2, 0.8], [1.5, 0.1, -0.7], [-0.2, 2.2, 1.1]], dtype=D)
LABELS = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 1]])
KNOWN = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])
COVARIATE = torch.tensor([0.2, 0.9, 0.5], dtype=D)
TABLE = torch.tensor(
    [[[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]], [[0.6, 0.2, 0.2], [0.3, 0.3, 0.4]]], dtype=D
)


def chain(z):
    """log p of a path of the two-state chain."""
    return PI[z[0]].log() + sum(A[a, b].log() for a, b in itertools.pairwise(z))


def normal(m, x):
    return dist.Normal(torch.as_tensor(m, dtype=D), 1.0).log_prob(x)


def partly_observed_states():
    with pyro.plate("sequences", 3):
        z = None
        for t in pyro.markov(range(3)):
            p = PI if z is None else A[z]
            z = pyro.sample(f"z_{t}", dist.Categorical(p), obs=LABELS[:, t], obs_mask=KNOWN[:, t])
            pyro.sample(f"x_{t}", dist.Normal(MU[z], 1.0), obs=ROWS[:, t])


def log_partly_observed(states):
    total = torch.zeros((), dtype=D)
    for s in range(3):
        z = states[3 * s : 3 * s + 3]
        total = total + chain(z) + sum(normal(MU[z[t]], ROWS[s, t]) for t in range(3))
        if any(KNOWN[s, t] and z[t] != LABELS[s, t] for t in range(3)):
            return torch.tensor(-torch.inf, dtype=D)
    return total


def bernoulli_states():
    z = None
    for t in range(4):
        z = pyro.sample(f"z_{t}", dist.Bernoulli(0.4 if z is None else 0.2 + 0.5 * z))
        pyro.sample(f"x_{t}", dist.Normal(2 * z - 1, 1.0), obs=X[t])


def log_bernoulli_states(z):
    p = [0.4] + [0.2 + 0.5 * a for a in z[:-1]]
    prior = sum(torch.tensor(q if a else 1 - q, dtype=D).log() for a, q in zip(z, p, strict=True))
    return prior + sum(normal(2.0 * z[t] - 1, X[t]) for t in range(4))


def one_hot_states():
    z = None
    for t in range(4):
        z = pyro.sample(f"z_{t}", dist.OneHotCategorical(PI if z is None else z @ A))
        pyro.sample(f"x_{t}", dist.Normal(z @ MU, 1.0), obs=X[t])


def log_one_hot_states(z):
    return chain(z) + sum(normal(MU[z[t]], X[t]) for t in range(4))


def emissions_of_two_neighbours():
    z = None
    for t in pyro.markov(range(4)):
        before = z
        z = pyro.sample(f"z_{t}", dist.Categorical(PI if z is None else A[z]))
        mean = MU[z] + (0.5 * X[t - 1] + 0.3 * before * z if t else 0.0)
        pyro.sample(f"x_{t}", dist.Normal(mean, 1.0), obs=X[t])


def log_two_neighbours(z):
    total = chain(z)
    for t in range(4):
        mean = MU[z[t]] + (0.5 * X[t - 1] + 0.3 * z[t - 1] * z[t] if t else 0.0)
        total = total + normal(mean, X[t])
    return total


def transitions_with_covariates():
    z = None
    with pyro.plate("sequences", 2):
        for t in pyro.markov(range(3)):
            p = torch.sigmoid(COVARIATE[t] + (0.0 if z is None else z))
            z = pyro.sample(f"z_{t}", dist.Bernoulli(p))
            pyro.sample(f"x_{t}", dist.Poisson(1 + 2 * z), obs=torch.tensor([1.0, 3.0]))


def log_covariates(states):
    total = torch.zeros((), dtype=D)
    for s, y in enumerate([1.0, 3.0]):
        z = states[3 * s : 3 * s + 3]
        for t in range(3):
            p = torch.sigmoid(COVARIATE[t] + (z[t - 1] if t else 0.0))
            total = total + (p if z[t] else 1 - p).log()
            rate = torch.tensor(1 + 2.0 * z[t], dtype=D)
            total = total + dist.Poisson(rate).log_prob(torch.tensor(y))
    return total


def table_of_two_parents():
    with pyro.plate("n", 2):
        a = pyro.sample("a", dist.Categorical(PI))
        b = pyro.sample("b", dist.Categorical(PI))
        pyro.sample("y", dist.Categorical(Vindex(TABLE)[a, b]), obs=torch.tensor([0, 2]))


def log_table(z):
    return sum(
        PI[z[2 * s]].log() + PI[z[2 * s + 1]].log() + TABLE[z[2 * s], z[2 * s + 1], y].log()
        for s, y in enumerate([0, 2])
    )


def switch_over_a_chain():
    c = pyro.sample("c", dist.Categorical(PI))
    z = None
    for t in pyro.markov(range(4)):
        z = pyro.sample(f"z_{t}", dist.Categorical(PI if z is None else A[z]))
        pyro.sample(f"x_{t}", dist.Normal(MU[z] * (1 + c), 1.0), obs=X[t])


def log_switch(z):
    return (
        PI[z[0]].log()
        + chain(z[1:])
        + sum(normal(MU[z[t + 1]] * (1 + z[0]), X[t]) for t in range(4))
    )


def two_and_three_states():
    a = pyro.sample("a", dist.Categorical(PI))
    b = pyro.sample("b", dist.Categorical(B[a]))
    pyro.sample("x", dist.Normal(1.0 * b, 1.0), obs=X[0])


def log_two_and_three(z):
    return PI[z[0]].log() + B[z[0], z[1]].log() + normal(1.0 * z[1], X[0])


EXACT = [
    (partly_observed_states, log_partly_observed, [2] * 9),
    (bernoulli_states, log_bernoulli_states, [2] * 4),
    (one_hot_states, log_one_hot_states, [2] * 4),
    (emissions_of_two_neighbours, log_two_neighbours, [2] * 4),
    (transitions_with_covariates, log_covariates, [2] * 6),
    (table_of_two_parents, log_table, [2] * 4),
]
BOUNDS = [
    (switch_over_a_chain, log_switch, [2] * 5),
    (two_and_three_states, log_two_and_three, [2, 3]),
]


def evidence(log_joint, states):
    every = itertools.product(*[range(k) for k in states])
    return float(torch.stack([log_joint(z) for z in every]).logsumexp(0))


@pytest.mark.parametrize(
    ("model", "log_joint", "states"), EXACT, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_chain_with_known_parameters_gives_the_evidence(model, log_joint, states):
    cvi = CVI(model, AutoCVI(model))
    cvi.step()
    assert -cvi.step() == pytest.approx(evidence(log_joint, states), abs=1e-9)


@pytest.mark.parametrize(
    ("model", "log_joint", "states"), BOUNDS, ids=lambda x: getattr(x, "__name__", "")
)
def test_coupled_sites_that_are_no_chain_give_a_bound(model, log_joint, states):
    cvi = CVI(model, AutoCVI(model))
    losses = [cvi.step() for _ in range(40)]
    exact = evidence(log_joint, states)
    assert exact - 0.5 < -losses[-1] <= exact + 1e-12
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda z: z.sum(), lambda z: z.sum(-1, keepdim=True), lambda z: z.max(), lambda z: z.mean(),
        lambda z: z @ torch.arange(4.0), lambda z: z.cumsum(0)[..., -1],
    ],
)  # fmt: skip
def test_elements_of_a_plate_that_meet_outside_of_it_are_an_error(reduce):
    def model(y):
        with pyro.plate("p", 4):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])))
        pyro.sample("y", dist.Normal(reduce(z.double()), 1.0), obs=y)

    with pytest.raises(CVIError, match="'z'"):
        CVI(model, AutoCVI(model)).step(torch.tensor(8.0))


def test_elements_of_a_plate_that_meet_inside_of_it_are_an_error():
    def model(y):
        with pyro.plate("p", 4):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])))
            total = z.double().sum(-1, keepdim=True)
            pyro.sample("y", dist.Normal(total, 1.0), obs=y)

    with pytest.raises(CVIError, match="all states are tried at once"):
        CVI(model, AutoCVI(model)).step(torch.full((4,), 8.0))


def test_a_density_that_only_the_self_check_can_judge_beside_a_discrete_site():
    """LKJCholesky's transform writes in place: its factors are sampled, b keeps its exact message."""
    data, label = torch.tensor([1.4, 0.3, 1.1]), torch.tensor([0.9, 0.4])

    def model():
        L = pyro.sample("L", dist.LKJCholesky(3, 1.0))
        b = pyro.sample("b", dist.Bernoulli(0.3))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(L[1, 0], 0.5), obs=data)
        with pyro.plate("labels", 2):
            pyro.sample("v", dist.Normal(b, 0.5), obs=label)

    cvi = CVI(model, AutoCVI(model), seed=0)
    cvi.run(num_steps=60)
    log_p = [dist.Normal(b, 0.5).log_prob(label).sum() for b in (0.0, 1.0)]
    odds = math.log(0.3 / 0.7) + log_p[1] - log_p[0]
    assert float(cvi.guide.posterior("b").probs) == pytest.approx(float(odds.sigmoid()), rel=1e-6)
    # r = L[1, 0] has the prior (1 - r^2)^(1/2) under three dimensions.
    r = torch.linspace(-0.9999, 0.9999, 4001)
    log_r = dist.Normal(r, 0.5).log_prob(data[:, None]).sum(0) + 0.5 * (1 - r**2).log()
    mean = float((log_r.softmax(0) * r).sum())
    draws = torch.stack([cvi.guide()["L"][1, 0] for _ in range(2000)])
    assert float(draws.mean()) == pytest.approx(mean, abs=0.06)


def test_a_branch_that_is_lost_is_still_found():
    def model():
        b = pyro.sample("b", dist.Bernoulli(0.5))
        shift = 1.0 if float(b.reshape(-1)[0]) > 0.5 else 0.0
        pyro.sample("y", dist.Normal(shift, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(CVIError, match=r"torch\.where"):
        CVI(model, AutoCVI(model)).step()
