"""Designs for a log density without a model, and what lies between their points."""

import math

import pytest
import torch

from pyro_cvi.exploration import Design, Point, explore
from pyro_cvi.interpolation import Between, Interpolant, calibrated
from pyro_cvi.mixture import tabulate


def design_of(log_density, size, num_points=64, **kwargs):
    def evaluate(at, state, rough=False):
        return float(log_density(at)), True

    return explore(evaluate, torch.zeros(size), torch.ones(size), num_points, **kwargs)


def nothing(at):
    return torch.zeros(len(at))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_points_and_what_lies_between_them(size):
    """A product of log-Gamma laws, whose moments are polygammas."""
    shapes = torch.tensor([2.0, 5.0, 9.0])[:size]
    design = design_of(lambda u: (shapes * u - u.exp()).sum(), size)
    fine = (Interpolant(design, nothing)(design.fine) + design.fine_log_volume).softmax(0)
    mean = fine @ design.fine
    sd = (fine @ (design.fine - mean).square()).sqrt()
    exact = torch.polygamma(1, shapes).sqrt()
    slack = 0.01 if size < 3 else 0.05
    assert bool(((mean - torch.digamma(shapes)).abs() < slack * exact).all())
    assert bool(((sd / exact - 1).abs() < slack).all())
    at = torch.stack([p.at for p in design.points])
    rule = Between(design)
    assert torch.allclose(rule(at), torch.eye(len(at)), atol=1e-6)
    near = design.fine[fine > 1e-3 * fine.max()]
    a = rule(near)
    assert torch.allclose(a.sum(1), torch.ones(len(near)), atol=1e-6)
    if size < 3:
        assert torch.allclose(a @ at, near, atol=1e-6)
        error = a @ (0.5 * at).exp() - (0.5 * near).exp()
        assert float(error.abs().max() / (0.5 * near).exp().max()) < 0.03


def test_far_from_all_points_the_nearest_one_serves():
    at = [torch.tensor([float(x)]) for x in range(4)]
    design = Design(
        [Point(x, 0.0, True) for x in at], torch.zeros(4), at[0], torch.eye(1), torch.stack(at),
        torch.zeros(4), 0.0,
    )  # fmt: skip
    rule = Between(design)
    far = torch.tensor([[-50.0], [80.0]])
    assert float(rule(far).abs().sum(1).max()) < 4 + 1e-9
    assert rule.nearest(far).tolist() == [0, 3]
    assert torch.allclose(rule(far).sum(1), torch.ones(2))


def test_a_second_mode_is_found_where_it_is_likely():
    """Two normal laws of widths 0.1 and 0.02, far apart, beside the integral in closed form."""
    centres, widths, shares = torch.tensor([0.0, 3.0]), torch.tensor([0.1, 0.02]), [0.3, 0.7]

    def log_density(u):
        parts = -0.5 * ((u - centres) / widths) ** 2 - widths.log() + torch.tensor(shares).log()
        return parts.logsumexp(0)

    alone = design_of(log_density, 1)
    assert len(alone.points) < 20
    both = design_of(log_density, 1, likely=[torch.linspace(-4.0, 4.0, 9) + 0.1])
    w = (both.heights + both.log_volumes).softmax(0)
    at = torch.stack([p.at for p in both.points])[:, 0]
    assert abs(float(w[at > 1.5].sum()) - 0.7) < 1e-3
    total = (both.heights + both.log_volumes).logsumexp(0)
    assert abs(float(total) - 0.5 * math.log(2 * math.pi)) < 1e-3


def test_the_density_of_a_heavy_tail_takes_few_points():
    """Logistic laws fall like exp(-|u|): the steps grow, and moments and evidence stay right."""
    design = design_of(lambda u: (-u - 2 * torch.nn.functional.softplus(-u)).sum(), 1)
    assert design.ends and len(design.points) < 20
    logs = design.heights + design.log_volumes
    assert abs(float(logs.logsumexp(0))) < 1e-3
    w, at = logs.softmax(0), torch.stack([p.at for p in design.points])[:, 0]
    assert abs(float((w @ at**2).sqrt()) / (math.pi / math.sqrt(3)) - 1) < 5e-3
    table = tabulate(design.fine[:, 0], design.fine_log_volume.exp() * _logistic(design.fine), 0.0)
    for p in (0.01, 0.3, 0.9):
        found = table.icdf(torch.tensor([p]))
        assert abs(float(found) - math.log(p / (1 - p))) < 0.01


def _logistic(u):
    return (-u - 2 * torch.nn.functional.softplus(-u)).exp()[:, 0]


def test_weights_are_moved_to_given_means():
    w = torch.tensor([0.2, 0.5, 0.3])
    features = torch.tensor([[-1.0], [0.0], [2.0]])
    new = calibrated(w, features, torch.tensor([0.5]))
    assert abs(float(new.sum()) - 1) < 1e-12
    assert abs(float(new @ features[:, 0]) - 0.5) < 1e-8
    ratio = (new / w).log()
    assert abs(float((ratio[1] - ratio[0]) - (ratio[2] - ratio[1]) / 2)) < 1e-8
