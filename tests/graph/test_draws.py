"""Draws made of Gammas: their law, their mirrored pairs, their gradients, and the smallest shapes."""

import math

import pyro.distributions as dist
import pytest
import torch

from pyro_cvi.families import BETA, DIRICHLET, GAMMA, INVERSE_GAMMA, WISHART
from pyro_cvi.graph.draws import bases, transformed

SHAPES = (0.05, 0.6, 1.0, 3.0, 200.0)
COUNT = 6000


def natural_of(family, a):
    """A member of which one Gamma has shape a."""
    one = torch.tensor(a)
    law = {
        GAMMA: lambda: dist.Gamma(one, torch.tensor(2.0)),
        INVERSE_GAMMA: lambda: dist.InverseGamma(one, torch.tensor(2.0)),
        BETA: lambda: dist.Beta(one, torch.tensor(1.5)),
        DIRICHLET: lambda: dist.Dirichlet(torch.tensor([a, 0.7, 2.0])),
    }[family]
    return family.from_distribution(law())


def flat(parts, family):
    """T of one element as a vector."""
    return torch.cat([p.reshape(-1) for p in parts])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [GAMMA, INVERSE_GAMMA, BETA, DIRICHLET], ids=lambda f: f.name)
@pytest.mark.parametrize("paired", [True, False])
def test_draws_have_the_mean_parameters_and_the_fisher_matrix_of_their_law(family, shape, paired):
    """E T = d A and E dT/dnatural = d^2 A: the gradients are those of the law."""
    natural = natural_of(family, shape)
    wide = tuple(n.expand(COUNT, *n.shape).clone().requires_grad_() for n in natural)
    pair = bases(family, wide, 2, paired)
    mean = flat(family.to_mean(natural), family)
    per_draw = []
    for base in pair:
        x, statistics = transformed(family, wide, base)
        direct = family.sufficient_statistics(x)
        for s, t in zip(statistics, direct, strict=True):
            inside = t.isfinite() & (t.abs() < 300)  # elsewhere x has no float
            torch.testing.assert_close(s[inside], t[inside], rtol=1e-5, atol=1e-6)
        rows = torch.cat([s.reshape(COUNT, -1) for s in statistics], -1)
        error = rows.std(0) / math.sqrt(COUNT)
        assert bool(((rows.mean(0) - mean).abs() < 5 * error + 1e-9).all())
        jacobian = []
        for i in range(rows.shape[-1]):
            grads = torch.autograd.grad(rows[:, i].sum(), wide, retain_graph=True)
            jacobian.append(torch.cat([g.reshape(COUNT, -1) for g in grads], -1))
        found = torch.stack(jacobian, -2)
        fisher = torch.func.jacfwd(lambda v: flat(family.to_mean(_split(v, natural)), family))(
            flat(natural, family)
        )
        noise = found.std(0) / math.sqrt(COUNT)
        assert bool(((found.mean(0) - fisher).abs() < 5 * noise + 1e-6 * fisher.abs()).all())
        per_draw.append(rows.detach())
    if paired:
        centred = [r - mean for r in per_draw]
        together = (centred[0] * centred[1]).mean(0)
        assert bool((together < 0.0).all())


def _split(v, like):
    parts = v.split([n.numel() for n in like])
    return tuple(p.reshape(n.shape) for p, n in zip(parts, like, strict=True))


def test_the_slope_at_the_centre_cancels_out_of_the_curvature_of_narrow_gammas():
    """For f = x the message is (0, 1); a pair finds it with a tenth of the noise of two single draws."""
    noise = {}
    for paired in (True, False):
        shape = torch.full((4000,), 400.0)
        natural = tuple(n.requires_grad_() for n in (shape - 1, -shape.clone()))
        draws = [transformed(GAMMA, natural, b)[0] for b in bases(GAMMA, natural, 2, paired)]
        value = sum(d.log() for d in draws) / 2
        grads = torch.autograd.grad(value.sum(), natural)
        solved = GAMMA.fisher_solve(tuple(n.detach() for n in natural), grads)
        noise[paired] = float((solved[0] - 1).std())
    assert noise[True] < 0.1 * noise[False]


@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
@pytest.mark.parametrize("family", [GAMMA, INVERSE_GAMMA, BETA, DIRICHLET], ids=lambda f: f.name)
def test_the_smallest_shapes_have_finite_draws_and_gradients(family, dtype, smallest):
    a = torch.full((50,), smallest, dtype=dtype)
    one = torch.ones(50, dtype=dtype)
    natural = {
        GAMMA: (a - 1, -one),
        INVERSE_GAMMA: (-a - 1, -one),
        BETA: (a - 1, a - 1),
        DIRICHLET: (torch.stack([a, a, one], -1) - 1,),
    }[family]
    natural = tuple(n.requires_grad_() for n in natural)
    for base in bases(family, natural, 2, True):
        x, statistics = transformed(family, natural, base)
        assert bool(x.isfinite().all()) and bool((x > 0).all())
        total = (
            sum(s.sum() for s in statistics) if family is not INVERSE_GAMMA else statistics[0].sum()
        )
        grads = torch.autograd.grad(total, natural, allow_unused=True)
        assert all(g is None or bool(g.isfinite().all()) for g in grads)
        assert bool(x.log().isfinite().all())


def test_families_of_matrices_have_no_base():
    natural = WISHART.from_distribution(dist.Wishart(torch.tensor(4.0), torch.eye(2)))
    assert bases(WISHART, natural, 2, True) is None
