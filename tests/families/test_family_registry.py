"""Which family a prior gets, through wrappers and subclasses, and how a user adds one."""

import doctest
import math

import pyro.distributions as dist
import pytest
import torch

from pyro_cvi.families import (
    BERNOULLI,
    BETA,
    CATEGORICAL,
    DIRICHLET,
    GAMMA,
    GAUSSIAN,
    INVERSE_GAMMA,
    WISHART,
    Categorical,
    Gamma,
    family_of,
    from_loc_cov,
    loc_cov,
    peel,
    register_family,
    registered_families,
    registry,
    wrappers,
)

ONE, EYE = torch.tensor(1.0), torch.eye(2)

KNOWN = [
    (dist.Normal(0.0, ONE), GAUSSIAN),
    (dist.MultivariateNormal(torch.zeros(2), EYE), GAUSSIAN),
    (dist.Gamma(ONE, ONE), GAMMA),
    (dist.Exponential(ONE), GAMMA),
    (dist.Chi2(ONE), GAMMA),
    (dist.InverseGamma(ONE, ONE), INVERSE_GAMMA),
    (torch.distributions.InverseGamma(ONE, ONE), INVERSE_GAMMA),
    (dist.Beta(ONE, ONE), BETA),
    (dist.Dirichlet(torch.ones(3)), DIRICHLET),
    (dist.Wishart(3.0, EYE), WISHART),
    (dist.Wishart(3 * ONE, precision_matrix=EYE), WISHART),
    (dist.Categorical(torch.ones(3)), CATEGORICAL),
    (dist.Bernoulli(ONE / 2), BERNOULLI),
]

UNKNOWN = [
    dist.LogNormal(0.0, ONE),
    dist.HalfNormal(ONE),
    dist.HalfCauchy(ONE),
    dist.StudentT(ONE),
    dist.TransformedDistribution(dist.Normal(0.0, ONE), dist.transforms.AffineTransform(1.0, 2.0)),
    dist.TransformedDistribution(dist.Gamma(ONE, ONE), dist.transforms.ExpTransform()),
    dist.Uniform(0.0, ONE),
    dist.Delta(ONE),
    dist.Poisson(ONE),
    dist.LowRankMultivariateNormal(torch.zeros(2), torch.ones(2, 1), torch.ones(2)),
]


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))


@pytest.mark.parametrize(("prior", "family"), KNOWN, ids=lambda v: type(v).__name__)
def test_prior_has_family_also_when_wrapped(prior, family) -> None:
    assert family_of(prior) is family
    if isinstance(prior, dist.Distribution):
        wide = prior.expand([3, 2])
        assert family_of(wide.to_event(1).mask(torch.tensor(True))) is family
        assert family_of(dist.ExpandedDistribution(prior, torch.Size([4])).to_event(1)) is family


@pytest.mark.parametrize("prior", UNKNOWN, ids=lambda v: type(v).__name__)
def test_prior_of_another_shape_has_none(prior) -> None:
    assert family_of(prior) is None


def test_peel_leaves_the_core() -> None:
    core = dist.Gamma(ONE, ONE)
    assert peel(core) is core
    assert peel(dist.ExpandedDistribution(core.mask(False), torch.Size([2])).to_event(1)) is core


def test_naturals_of_the_special_cases() -> None:
    half = torch.tensor([0.5, 2.0])
    assert [a.tolist() for a in GAMMA.from_distribution(dist.Exponential(half))] == [
        [0.0, 0.0],
        [-0.5, -2.0],
    ]
    chi2 = GAMMA.from_distribution(dist.Chi2(torch.tensor(6.0)))
    assert [a.item() for a in chi2] == [2.0, -0.5]
    h, n = GAUSSIAN.from_distribution(dist.Normal(half, 0.5).to_event(1))
    assert h.tolist() == [[2.0], [8.0]]
    assert n.tolist() == [[[-2.0]], [[-2.0]]]
    expanded = dist.ExpandedDistribution(dist.Beta(ONE, ONE), torch.Size([3]))
    assert [tuple(a.shape) for a in BETA.from_distribution(expanded)] == [(3,), (3,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_naturals_of_a_wishart_from_each_of_its_parameters(dtype: torch.dtype) -> None:
    root = torch.randn(2, 3, 3, dtype=dtype)
    covariance = root @ root.mT + torch.eye(3, dtype=dtype)
    precision = torch.linalg.inv(covariance)
    tolerance = 1e3 * torch.finfo(dtype).eps
    for df in (5.0, torch.tensor(5), torch.tensor(5.0, dtype=dtype)):
        for parameter in (
            {"covariance_matrix": covariance},
            {"precision_matrix": precision},
            {"scale_tril": torch.linalg.cholesky(covariance)},
        ):
            natural = WISHART.from_distribution(dist.Wishart(df, **parameter).expand([4, 2]))
            for actual, expected in zip(
                natural,
                (-precision.expand(4, 2, 3, 3) / 2, torch.full((4, 2), 0.5, dtype=dtype)),
                strict=True,
            ):
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_gaussian_conversions_agree() -> None:
    loc, root = torch.randn(5, 3), torch.randn(5, 3, 3)
    cov = root @ root.mT + torch.eye(3)
    for actual, expected in zip(loc_cov(from_loc_cov(loc, cov)), (loc, cov), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        GAUSSIAN.to_distribution(from_loc_cov(loc, cov)).covariance_matrix, cov
    )


def test_categorical_labels_need_a_number_of_categories() -> None:
    labels = torch.tensor([0, 2])
    (one_hot,) = CATEGORICAL.sufficient_statistics(labels, categories=3)
    assert one_hot.tolist() == [[1, 0, 0], [0, 0, 1]]
    logits = (torch.randn(2, 3),)
    torch.testing.assert_close(
        Categorical().log_prob(logits, labels), Categorical().log_prob(logits, one_hot)
    )
    with pytest.raises(ValueError, match="pass categories=K"):
        CATEGORICAL.sufficient_statistics(labels)


def test_probabilities_that_underflow_give_a_finite_fisher_solve() -> None:
    logits = torch.tensor([0.0, -1e4])
    (solved,) = CATEGORICAL.fisher_solve((logits,), (torch.tensor([0.0, 0.0]),))
    assert solved.tolist() == [0.0, 0.0]
    (solved,) = BERNOULLI.fisher_solve((logits,), (torch.tensor([0.25, 0.0]),))
    assert solved.tolist() == [1.0, 0.0]
    torch.testing.assert_close(
        BERNOULLI.log_partition((torch.tensor(25.0),)).item(),
        25 + math.exp(-25),
        rtol=1e-15,
        atol=0,
    )


def test_most_specific_class_wins() -> None:
    class Narrow(dist.Gamma):
        pass

    class Other(Gamma):
        name = "Other"

    assert family_of(Narrow(ONE, ONE)) is GAMMA
    register_family(Narrow)(Other)
    assert repr(family_of(Narrow(ONE, ONE))) == "Other()"
    assert family_of(dist.Gamma(ONE, ONE)) is GAMMA
    assert registered_families()[-1] is Other()
    assert Other() is not GAMMA


def test_registration_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"Gamma already has the family Gamma\(\)"):
        register_family(dist.Gamma)
    with pytest.raises(TypeError, match="pass the class, not an instance"):
        register_family(dist.Gamma(ONE, ONE))
    with pytest.raises(TypeError, match="not a distribution class"):
        register_family(int)


@pytest.mark.parametrize("module", [registry, wrappers], ids=lambda m: m.__name__)
def test_documented_examples_run(module) -> None:
    torch.set_default_dtype(torch.float32)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
