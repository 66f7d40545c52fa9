"""Fixed nodes: weights of sum one, mean zero, unit covariance; exact polynomials; errors that fall."""

import math

import pytest
import torch

from pyro_cvi.estimators.nodes import CENTRE, fixed_nodes

DIMS = [1, 2, 3, 5, 13, 40, 128]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dims", DIMS)
def test_moments_up_to_the_second_are_those_of_the_normal(dims, level):
    x, w = fixed_nodes(dims, level)
    assert x.shape == (len(w), dims)
    torch.testing.assert_close(w.sum(), torch.tensor(1.0))
    torch.testing.assert_close(w @ x, torch.zeros(dims))
    torch.testing.assert_close((w[:, None] * x).mT @ x, torch.eye(dims))


@pytest.mark.parametrize("dims", DIMS)
def test_points_come_with_their_mirror_images(dims):
    x, w = fixed_nodes(dims, 0)
    odd = x.sum(-1) ** 3 + x.sum(-1).sin()
    assert abs(float(w @ odd)) < 1e-9


@pytest.mark.parametrize("dims", [3, 13, 40])
def test_seeds_give_other_points_and_the_same_seed_the_same(dims):
    a, b = fixed_nodes(dims, 0, seed=0).points, fixed_nodes(dims, 0, seed=1).points
    assert not torch.allclose(a, b)
    torch.testing.assert_close(a, fixed_nodes(dims, 0, seed=0).points)


@pytest.mark.parametrize("dims", [1, 2])
def test_few_dimensions_are_exact_for_polynomials(dims):
    x, w = fixed_nodes(dims, 0)
    for n in (4, 6, 8):
        moment = math.prod(range(1, n, 2))  # (n - 1)!!
        assert float(w @ x[:, 0] ** n) == pytest.approx(moment, rel=1e-8)


@pytest.mark.parametrize("dims", [3, 5, 13, 40])
def test_more_points_come_nearer(dims):
    """E exp(a^T x) = exp(|a|^2 / 2)."""
    a = torch.full((dims,), 0.8 / math.sqrt(dims))
    truth = math.exp(0.32)
    errors = []
    for level in (0, 2, 4):
        found = []
        for seed in range(6):
            x, w = fixed_nodes(dims, level, seed)
            found.append(float(w @ (x @ a).exp()) - truth)
        errors.append(math.sqrt(sum(e * e for e in found) / len(found)))
    assert errors[2] < 0.6 * errors[0]
    assert errors[2] < 0.01 * truth


def test_the_centre_is_one_node():
    x, w = fixed_nodes(7, CENTRE)
    assert x.shape == (1, 7)
    assert not bool(x.any())
    assert float(w) == 1.0
