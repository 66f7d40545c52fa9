"""Steps of beliefs of several elements, each of a size of its own."""

import pytest
import torch
from family_cases import CASES

from pyro_cvi.families import GAUSSIAN
from pyro_cvi.updates import FamilyBelief, GaussianBelief

PARTS = [c for c in CASES if c.family is not GAUSSIAN and c.family.name != "Categorical"]


def gaussian(seed=0, count=4, d=2):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(count, d, d, generator=generator, dtype=torch.float64)
    loc = torch.randn(count, d, generator=generator, dtype=torch.float64)
    return GaussianBelief(loc, root @ root.mT + 0.5 * torch.eye(d, dtype=torch.float64))


def beliefs():
    yield pytest.param(gaussian(), gaussian(1), id="Gaussian")
    for case in PARTS:
        old = FamilyBelief(case.family, case.natural())
        target = FamilyBelief(case.family, case.natural(seed=1))
        yield pytest.param(old, target, id=f"{case.family.name}-{case.degrees}")


def towards(target, old):
    """Gradients in the leaves of `old` whose full step is `target`."""
    if isinstance(target, GaussianBelief):
        slope = (target.precision @ (target.loc - old.loc).unsqueeze(-1)).squeeze(-1)
        return [slope, -0.5 * target.precision]
    return list(target.natural)


@pytest.mark.parametrize(("old", "target"), list(beliefs()))
def test_every_element_takes_the_step_of_its_own_size(old, target):
    gradient = towards(target, old)
    sizes = torch.tensor([1.0, 0.5, 0.25, 0.1], dtype=torch.float64)
    together, _ = old.moved(gradient, sizes)
    for i, size in enumerate(sizes.tolist()):
        alone, _ = old.moved(gradient, size)
        for a, b in zip(together.tensors, alone.tensors, strict=True):
            torch.testing.assert_close(a[i], b[i])


@pytest.mark.parametrize(("old", "target"), list(beliefs()))
def test_divergences_of_elements_add_up(old, target):
    each = old.kls(target)
    assert each.shape == (4,)
    torch.testing.assert_close(each.sum(), old.kl(target))


@pytest.mark.parametrize(("old", "target"), list(beliefs()))
def test_the_slope_at_the_end_of_a_step_is_that_of_the_divergence(old, target):
    """For E[log p] = <target, mean> it is <target - natural', mean' - mean>."""
    step = old.moved(towards(target, old), 0.5)[0]
    found = step.ends(towards(target, step), old)
    # d/dt of -KL(q_t || target) with mean_t = mean + t (mean' - mean), at t = 1, by the three-point
    # identity: KL(q || target) - KL(q' || target) - KL(q || q').
    expected = old.kls(target) - step.kls(target) - old.kls(step)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
