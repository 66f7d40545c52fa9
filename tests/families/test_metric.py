"""The Fisher metric of beliefs, which noise and distance of sampled fits are measured in."""

import pytest
import torch
from family_cases import CASES

from pyro_cvi.updates import FamilyBelief, GaussianBelief


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family.name != "Gaussian"], ids=lambda c: c.family.name
)
def test_the_metric_of_a_family_is_its_fisher_matrix(case):
    """<F^-1 g, F^-1 g>_F = <F^-1 g, g>, and d^T F d is 2 KL of a small step."""
    natural, d = case.natural(), case.direction()
    belief = FamilyBelief(case.family, natural)
    step = 1e-4
    moved = case.family.advance(natural, d, step)
    kl = case.family.kl(natural, moved) + case.family.kl(moved, natural)
    torch.testing.assert_close(belief.inner(d, d) * step**2, kl, rtol=1e-3, atol=1e-13)
    other = case.direction(seed=3)
    torch.testing.assert_close(belief.inner(d, other), belief.inner(other, d))


def test_the_metric_of_a_gaussian_is_its_fisher_matrix():
    g = torch.Generator().manual_seed(2)
    root = torch.randn(3, 2, 2, generator=g, dtype=torch.float64)
    precision = root @ root.mT + torch.eye(2, dtype=torch.float64)
    belief = GaussianBelief(torch.randn(3, 2, generator=g, dtype=torch.float64), precision)
    a = torch.randn(3, 2, generator=g, dtype=torch.float64)
    half = torch.randn(3, 2, 2, generator=g, dtype=torch.float64)
    d = belief.direction([a, half])
    rho = 1e-4
    moved, _ = belief.moved([a, half], rho)
    kl = float(belief.kl(moved) + moved.kl(belief))
    assert float(belief.inner(d, d).sum()) * rho**2 == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.family.name)
def test_a_trusted_step_is_proper_near_and_otherwise_the_step_itself(case):
    natural = case.natural()
    near = case.family.advance(natural, case.direction(), 1e-3)
    same = case.family.trusted(near, natural, 4.0)
    for a, b in zip(same, near, strict=True):
        torch.testing.assert_close(a, b)
    far = case.family.trusted(tuple(100 * n for n in natural), natural, 4.0)
    if case.family.name in ("Gamma", "InverseGamma"):
        assert bool(case.family.is_proper(far).all())
        shape = (far[0] + 1) / (natural[0] + 1)
        if case.family.name == "InverseGamma":
            shape = (-far[0] - 1) / (-natural[0] - 1)
        assert bool((shape <= 4.0 + 1e-9).all()) and bool((shape >= 0.25 - 1e-9).all())
