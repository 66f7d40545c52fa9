"""Block tridiagonal precisions with a border, against dense linear algebra."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_cvi.gaussians.chain import Blocks, Factorised, Pattern
from pyro_cvi.structured import ChainBelief

SIZES = [
    (1, 1, 2, 3), (1, 2, 1, 0), (1, 7, 2, 0), (2, 8, 1, 2), (3, 13, 2, 1), (1, 64, 1, 1), (2, 1, 3, 2),
    (5, 3, 2, 4),
]  # fmt: skip


def random_blocks(count: int, steps: int, node: int, border: int) -> Blocks:
    g = torch.randn(border, border)
    x = torch.randn(count, steps, node, node)
    return Blocks(
        x @ x.mT + 2.5 * torch.eye(node),
        0.3 * torch.randn(count, steps - 1, node, node),
        0.2 * torch.randn(count, steps, node, border),
        g @ g.T + (1 + 0.3 * count * steps) * torch.eye(border),
    )


def dense(p: Blocks) -> Tensor:
    count, steps, d, g = p.edge.shape
    n = count * steps * d
    s = torch.zeros(n + g, n + g)
    for b in range(count):
        for t in range(steps):
            here = slice((b * steps + t) * d, (b * steps + t + 1) * d)
            s[here, here] = p.node[b, t]
            s[here, n:], s[n:, here] = p.edge[b, t], p.edge[b, t].T
            if t < steps - 1:
                after = slice(here.stop, here.stop + d)
                s[here, after], s[after, here] = p.step[b, t], p.step[b, t].T
    s[n:, n:] = p.border
    return s


def pattern(count: int, steps: int, node: int, border: int) -> Pattern:
    """Scalars in a random order."""
    n = count * steps * node
    place = torch.cat([torch.arange(n), -1 - torch.arange(border)])
    return Pattern(count, steps, node, border, place[torch.randperm(len(place))])


@pytest.mark.parametrize("size", SIZES)
def test_elimination_is_dense_linear_algebra(size: tuple[int, int, int, int]) -> None:
    p = random_blocks(*size)
    s = dense(p)
    n = s.shape[0] - size[3]
    found = Factorised(p)
    assert found.proper
    torch.testing.assert_close(found.log_det, torch.logdet(s))
    x = torch.randn(len(s))
    y, b = p.times(x[:n].reshape(*size[:3]), x[n:])
    torch.testing.assert_close(torch.cat([y.reshape(-1), b]), s @ x)
    r = torch.randn(len(s), 2)
    y, b = found.solve(r[:n].reshape(*size[:3], 2), r[n:])
    torch.testing.assert_close(torch.cat([y.reshape(-1, 2), b]), torch.linalg.solve(s, r))
    v = torch.linalg.inv(s)
    mine = dense(found.covariance())
    torch.testing.assert_close(mine, torch.where(dense(p) != 0, v, torch.zeros_like(v)))
    torch.testing.assert_close(p.trace(found.covariance()), torch.tensor(float(len(s))))


def test_a_matrix_that_is_not_positive_definite_is_found() -> None:
    p = random_blocks(1, 9, 1, 1)
    bad = Blocks(p.node, 40 * p.step, p.edge, p.border)
    assert float(torch.linalg.eigvalsh(dense(bad))[0]) < 0
    assert not Factorised(bad).proper


@pytest.mark.parametrize("size", SIZES)
def test_a_belief_is_the_dense_gaussian(size: tuple[int, int, int, int]) -> None:
    where = pattern(*size)
    order = torch.where(where.place >= 0, where.place, len(where.place) - size[3] - 1 - where.place)

    def belief() -> tuple[ChainBelief, MultivariateNormal]:
        p = random_blocks(*size)
        nodes, border = torch.randn(*size[:3]), torch.randn(size[3])
        s = dense(p)[order[:, None], order]
        loc = torch.cat([nodes.reshape(-1), border])[order]
        return ChainBelief(where, nodes, border, p), MultivariateNormal(loc, precision_matrix=s)

    (q, law), (r, other) = belief(), belief()
    loc, variance = q.marginals()
    torch.testing.assert_close(loc, law.mean)
    torch.testing.assert_close(variance, law.variance)
    some = torch.randperm(len(loc))[:5]
    torch.testing.assert_close(q.covariance(some), law.covariance_matrix[some[:, None], some])
    torch.testing.assert_close(q.entropy(), law.entropy())
    torch.testing.assert_close(q.kl(r), kl_divergence(law, other))
    z = torch.randn(3, len(loc))
    value = 0.5 * (q.log_det() - q.quadratic(z - loc) - len(loc) * 1.8378770664093453)
    torch.testing.assert_close(value, law.log_prob(z))
    ((views, covs),) = q.views()
    scalars = torch.randint(
        len(loc), (20, 1)
    )  # a scalar and, where there is one, one of the border
    if size[3]:
        inside = (where.place < 0).nonzero()[0]
        scalars = torch.cat([scalars, inside.expand(20, 1)], 1)
    view = where.view_of(scalars)
    at = where.position_in(view[:, None], scalars)
    torch.testing.assert_close(views[view[:, None], at], loc[scalars])
    expected = law.covariance_matrix[scalars[:, :, None], scalars[:, None, :]]
    torch.testing.assert_close(covs[view[:, None, None], at[:, :, None], at[:, None, :]], expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_and_draws_are_those_of_the_dense_gaussian(size: tuple[int, int, int, int]) -> None:
    where = pattern(*size)
    p = random_blocks(*size)
    nodes, border = torch.randn(*size[:3]), torch.randn(size[3])
    q = ChainBelief(where, nodes, border, p)
    ((loc, cov),) = q.views()
    x = torch.randn(*cov.shape)
    g, h = torch.randn_like(loc), -(x @ x.mT) - torch.eye(cov.shape[-1])
    new, step = q.moved([g, h], 0.4)
    assert step.improper == 0
    # The gradient of <g, m> + <h, V> in the dense mean and covariance, through the views.
    mean = torch.zeros(len(where.place), requires_grad=True)
    full = torch.zeros(len(where.place), len(where.place), requires_grad=True)
    of_view = _members(where)
    total = (g * mean[of_view]).sum() + (h * full[of_view[:, :, None], of_view[:, None, :]]).sum()
    d_mean, d_cov = torch.autograd.grad(total, (mean, full))
    order = torch.where(where.place >= 0, where.place, len(where.place) - size[3] - 1 - where.place)
    s = dense(p)[order[:, None], order]
    after = s + 0.4 * (-(d_cov + d_cov.T) - s)
    loc, variance = new.marginals()
    expected = q.marginals()[0] + 0.4 * torch.linalg.solve(after, d_mean)
    torch.testing.assert_close(loc, expected)
    torch.testing.assert_close(variance, torch.linalg.inv(after).diagonal())
    z, v = torch.stack([q.draw() for _ in range(6000)]), torch.linalg.inv(s)
    error = (v.diagonal()[:, None] * v.diagonal() + v**2).sqrt() / 6000**0.5
    assert bool(((torch.cov(z.T).reshape(v.shape) - v).abs() < 6 * error).all())


@pytest.mark.parametrize("size", SIZES)
def test_float32_loses_what_its_conditioning_says(size: tuple[int, int, int, int]) -> None:
    """Against dense linear algebra in float64 of the same numbers: (node + log2 T) eps cond(S)."""
    where, blocks = pattern(*size), random_blocks(*size)
    p, nodes, border = (
        Blocks(*(t.float() for t in blocks.tensors)),
        torch.randn(*size[:3]),
        torch.randn(size[3]),
    )
    q = ChainBelief(where, nodes.float(), border.float(), p)
    order = torch.where(where.place >= 0, where.place, len(where.place) - size[3] - 1 - where.place)
    s = dense(Blocks(*(t.double() for t in p.tensors)))[order[:, None], order]
    v = torch.linalg.inv(s)
    levels = math.ceil(math.log2(size[1])) + 1
    numbers = 3 * size[2] + levels + size[3] + size[0]
    unit = 4 * numbers * torch.finfo(torch.float32).eps * float(torch.linalg.cond(s))
    loc, variance = q.marginals()
    assert loc.dtype == variance.dtype == q.log_det().dtype == torch.float32
    assert float((variance - v.diagonal()).abs().max()) < unit * float(v.diagonal().max())
    some = torch.randperm(len(loc))[:4]
    assert float((q.covariance(some) - v[some[:, None], some]).abs().max()) < unit * float(
        v.diagonal().max()
    )
    assert abs(float(q.log_det()) - float(torch.logdet(s))) < unit * len(loc)
    z = torch.randn(3, len(loc)).float()
    expected = ((z.double() @ s) * z).sum(-1)
    assert float((q.quadratic(z) - expected).abs().max()) < unit * float(expected.max())
    ((m, c),) = q.views()
    g, h = torch.randn_like(m), -torch.eye(c.shape[-1]).float().expand_as(c)
    new = q.moved([g, h], 0.5)[0]
    twin = ChainBelief(
        where,
        nodes.float().double(),
        border.float().double(),
        Blocks(*(t.double() for t in p.tensors)),
    )
    wanted = twin.moved([g.double(), h.double()], 0.5)[
        0
    ]  # which other tests hold to the dense step
    apart = (new.marginals()[0] - wanted.marginals()[0]).abs().max()
    assert float(apart) < unit * float(wanted.marginals()[0].abs().max())


def _members(where: Pattern) -> Tensor:
    """The scalar at each position of each view."""
    inverse = torch.argsort(torch.where(where.place >= 0, where.place, 10**6 - where.place))
    n = where.count * where.steps * where.node
    nodes = inverse[:n].reshape(where.count, where.steps, where.node)
    shared = inverse[n:].expand(where.count, max(where.steps - 1, 1), where.border)
    parts = [nodes, shared] if where.steps == 1 else [nodes[:, :-1], nodes[:, 1:], shared]
    return torch.cat(parts, -1).reshape(where.views, where.width)
