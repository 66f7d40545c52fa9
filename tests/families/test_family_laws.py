"""The laws that the docstrings of `AbstractFamily` state, for every registered family."""

import copy
import pickle

import pytest
import scipy.stats
import torch
from family_cases import CASES, Case
from torch import Tensor

from pyro_cvi.families import AbstractFamily, Natural, registered_families

cases = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family.name}-{c.degrees}")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])


def assert_close(actual: Natural, expected: Natural, tolerance: float) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def leaves(natural: Natural) -> Natural:
    return tuple(a.clone().requires_grad_() for a in natural)


def tolerance_of(dtype: torch.dtype) -> float:
    # The cases have condition numbers up to about a hundred.
    return 1e3 * torch.finfo(dtype).eps


def minimal(family: AbstractFamily, natural: Natural) -> Natural:
    """The representative that `to_natural` and `fisher_solve` return, where there is a choice."""
    return (natural[0].log_softmax(-1),) if family.name == "Categorical" else natural


def test_every_registered_family_has_a_case() -> None:
    assert set(registered_families()) == {case.family for case in CASES}


@cases
def test_a_family_has_one_instance(case: Case) -> None:
    family = case.family
    assert type(family)() is family
    assert copy.deepcopy(family) is family
    assert pickle.loads(pickle.dumps(family)) is family
    assert repr(family) == f"{type(family).__name__}()"
    assert len(family.statistics) == len(family.event_dims) == len(case.natural())


@cases
@dtypes
def test_gradient_of_log_partition_is_mean(case: Case, dtype: torch.dtype) -> None:
    natural = leaves(case.natural(dtype))
    gradient = torch.autograd.grad(case.family.log_partition(natural).sum(), natural)
    assert_close(gradient, case.family.to_mean(natural), tolerance_of(dtype))


def fisher_product(family: AbstractFamily, natural: Natural, vector: Natural) -> Natural:
    natural = leaves(natural)
    value = family.log_partition(natural).sum()
    gradient = torch.autograd.grad(value, natural, create_graph=True)
    return torch.autograd.grad(family.inner(gradient, vector).sum(), natural)


@cases
@dtypes
def test_fisher_solve_inverts_hessian_of_log_partition(case: Case, dtype: torch.dtype) -> None:
    family, natural, vector = case.family, case.natural(dtype), case.direction(dtype)
    if family.name == "Categorical":
        vector = (vector[0] - (natural[0].softmax(-1) * vector[0]).sum(-1, keepdim=True),)
    product = fisher_product(family, natural, vector)
    assert_close(family.fisher_solve(natural, product), vector, 30 * tolerance_of(dtype))


@cases
def test_fisher_is_symmetric_and_positive(case: Case) -> None:
    family, natural = case.family, case.natural()
    u, v = case.direction(seed=1), case.direction(seed=2)
    fu, fv = (fisher_product(family, natural, w) for w in (u, v))
    torch.testing.assert_close(family.inner(u, fv), family.inner(v, fu))
    assert (family.inner(u, fu) > 0).all()


@cases
def test_derivative_of_to_mean_is_the_hessian(case: Case) -> None:
    family, natural, vector = case.family, case.natural(), case.direction()
    _, tangent = torch.func.jvp(lambda *n: family.to_mean(n), natural, vector)
    assert_close(tangent, fisher_product(family, natural, vector), 1e-10)


@cases
@dtypes
def test_to_natural_inverts_to_mean(case: Case, dtype: torch.dtype) -> None:
    natural = case.natural(dtype)
    back = case.family.to_natural(case.family.to_mean(natural))
    assert_close(back, minimal(case.family, natural), tolerance_of(dtype))


@cases
def test_gradient_of_to_natural_is_fisher_solve(case: Case) -> None:
    family, vector = case.family, case.direction()
    mean = leaves(family.to_mean(case.natural()))
    natural = family.to_natural(mean)
    gradient = torch.autograd.grad(family.inner(natural, vector).sum(), mean)
    if family.name == "Categorical":  # log-probabilities, whose Jacobian is that of the logarithm
        assert_close(gradient, (vector[0] / mean[0],), 1e-10)
    else:
        assert_close(gradient, family.fisher_solve(natural, vector), 1e-9)


@cases
@dtypes
def test_distribution_round_trip(case: Case, dtype: torch.dtype) -> None:
    natural = case.natural(dtype)
    distribution = case.family.to_distribution(natural)
    assert distribution.batch_shape == (4,)
    back = case.family.from_distribution(distribution)
    assert all(a.dtype == dtype for a in back)
    assert_close(back, minimal(case.family, natural), tolerance_of(dtype))


@cases
def test_from_distribution_keeps_the_shape_that_wrappers_made(case: Case) -> None:
    family, natural = case.family, case.natural()
    distribution = family.to_distribution(natural).expand([2, 4]).to_event(1).mask(False)
    back = family.from_distribution(distribution)
    expanded = family.expand(minimal(family, natural), torch.Size([2, 4]))
    assert_close(back, expanded, 1e-12)


@cases
@dtypes
def test_log_prob_is_that_of_the_distribution(case: Case, dtype: torch.dtype) -> None:
    family, natural = case.family, case.natural(dtype)
    distribution = family.to_distribution(natural)
    x = distribution.sample((5,))
    expected = distribution.log_prob(x)
    tolerance = tolerance_of(dtype) * (1 + expected.abs().max().item())
    assert_close((family.log_prob(natural, x),), (expected,), tolerance)
    # and the definition, which families may replace by a form that cancels less
    defined = AbstractFamily.log_prob
    if family.name != "Categorical":
        assert_close((defined(family, natural, x),), (expected,), tolerance)


@cases
def test_samples_have_the_mean_statistics(case: Case) -> None:
    # n err' F^-1 err is chi-squared in the limit; the bound has a false-alarm rate of 1e-6.
    family, natural, n = case.family, case.natural(), 20_000
    x = family.to_distribution(natural).sample((n,))
    labels = {} if x.is_floating_point() else {"categories": 3}
    statistics = family.sufficient_statistics(x, **labels)
    mean = family.to_mean(natural)
    error = tuple(s.to(m.dtype).mean(0) - m for s, m in zip(statistics, mean, strict=True))
    whitened = n * family.inner(error, family.fisher_solve(natural, error))
    assert (whitened < scipy.stats.chi2(case.degrees).isf(1e-6)).all()


@cases
def test_entropy_is_that_of_the_distribution_and_of_the_definition(case: Case) -> None:
    family, natural = case.family, case.natural()
    value = family.entropy(natural)
    assert value.shape == (4,)
    assert_close((value,), (AbstractFamily.entropy(family, natural),), 1e-12)
    if family.name != "InverseGamma":  # a transformed distribution, for which Pyro has no entropy
        assert_close((value,), (family.to_distribution(natural).entropy(),), 1e-12)


@cases
def test_kl_and_its_gradient_are_torchs_and_the_bregman_divergence(case: Case) -> None:
    family = case.family
    p, q = leaves(case.natural(seed=1)), leaves(case.natural(seed=2))
    distributions = family.to_distribution(p), family.to_distribution(q)
    ours, definition = family.kl(p, q), AbstractFamily.kl(family, p, q)
    torchs = torch.distributions.kl_divergence(*distributions)
    assert ours.shape == (4,)
    assert (ours >= 0).all()

    def gradients(value: Tensor) -> Natural:
        found = torch.autograd.grad(value.sum(), (*p, *q), retain_graph=True)
        # torch's own gradient of a matrix parameter counts one triangle only in some of its forms
        return tuple((g + g.mT) / 2 if g.dim() == 3 else g for g in found)

    assert_close((ours, definition), (torchs, torchs), 1e-11)
    # torch's trigamma has a relative error of 5e-10
    assert_close(gradients(ours), gradients(torchs), 1e-8)
    assert_close(gradients(ours), gradients(definition), 1e-10)


@cases
def test_kl_to_itself_is_zero_with_zero_gradient(case: Case) -> None:
    p = leaves(case.natural())
    value = case.family.kl(p, p)
    assert_close((value,), (torch.zeros(4),), 1e-14)
    gradient = torch.autograd.grad(value.sum(), p)
    assert_close(gradient, tuple(torch.zeros_like(a) for a in p), 1e-12)


@cases
def test_batch_elements_do_not_see_each_other(case: Case) -> None:
    family, natural, direction = case.family, case.natural(), case.direction()
    one, along = tuple(a[2] for a in natural), tuple(a[2] for a in direction)
    wide = family.expand(natural, torch.Size([3, 4]))
    for single, batched in [
        (family.log_partition(one), family.log_partition(wide)),
        (family.is_proper(one), family.is_proper(wide)),
        (family.max_step(one, along), family.max_step(wide, direction)),
        (family.entropy(one), family.entropy(wide)),
    ]:
        assert single.shape == ()
        assert batched.shape == (3, 4)
        torch.testing.assert_close(batched[1, 2], single)
    for map_ in (family.to_mean, lambda n: family.retract(n, direction, 2.0)):
        assert_close(tuple(a[1] for a in map_(wide)), map_(natural), 1e-13)


@cases
@dtypes
def test_is_proper_on_both_sides_of_the_boundary(case: Case, dtype: torch.dtype) -> None:
    natural = case.natural(dtype)
    assert case.family.is_proper(natural).tolist() == [True] * 4
    for outside in case.improper:
        cast = tuple(a.to(dtype) for a in outside)
        assert case.family.is_proper(cast).tolist() == [False]


@cases
def test_max_step_is_the_last_proper_step(case: Case) -> None:
    family, natural = case.family, case.natural()
    left = 0
    for seed in range(6):
        direction = case.direction(seed=seed)
        last = family.max_step(natural, direction)
        inside = family.advance(natural, direction, last.clamp(max=1e3) * (1 - 1e-6))
        outside = family.advance(natural, direction, last.clamp(max=1e3) * (1 + 1e-6))
        assert family.is_proper(inside).all()
        assert (family.is_proper(outside) == last.isinf()).all()
        left += int(last.isfinite().sum())
    assert (left > 0) == case.bounded


@cases
@dtypes
@pytest.mark.parametrize("size", [1.0, 1e3, 1e8, 1e30])
def test_retract_stays_proper(case: Case, dtype: torch.dtype, size: float) -> None:
    family, natural = case.family, case.natural(dtype)
    for seed in range(3):
        direction = tuple(size * a for a in case.direction(dtype, seed))
        for step in (1.0, torch.tensor([0.0, 0.1, 1.0, 10.0], dtype=dtype)):
            moved = family.retract(natural, direction, step)
            assert all(a.dtype == dtype for a in moved)
            assert family.is_proper(moved).all()


@cases
def test_repeated_retractions_stay_proper(case: Case) -> None:
    family, natural = case.family, case.natural(torch.float32)
    for seed in range(60):
        direction = tuple(100 * a for a in case.direction(torch.float32, seed))
        natural = family.retract(natural, direction, 1.0)
        assert family.is_proper(natural).all()


@cases
def test_retract_is_the_plain_step_to_first_order(case: Case) -> None:
    family, natural, direction = case.family, case.natural(), case.direction()
    assert_close(family.retract(natural, direction, 0.0), natural, 1e-13)
    for step in (1e-3, 1e-4):
        retracted = family.retract(natural, direction, step)
        plain = family.advance(natural, direction, step)
        assert_close(retracted, plain, 300 * step**2)


@cases
def test_every_function_stays_on_the_device(case: Case, device: torch.device) -> None:
    family = case.family
    natural = tuple(a.to(device) for a in case.natural())
    direction = tuple(a.to(device) for a in case.direction())
    mean = family.to_mean(natural)
    results = [
        *mean,
        *family.to_natural(mean),
        *family.fisher_solve(natural, direction),
        *family.retract(natural, direction, 1.0),
        *family.from_distribution(family.to_distribution(natural)),
        family.max_step(natural, direction),
        family.is_proper(natural),
        family.entropy(natural),
        family.kl(natural, natural),
        family.log_prob(natural, family.to_distribution(natural).sample()),
    ]
    assert {a.device.type for a in results} == {device.type}
