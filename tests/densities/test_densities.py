"""Every density rule is its distribution's log_prob, for plain tensors and for latents."""

from __future__ import annotations

from collections.abc import Callable

import density_cases as cases
import pyro.distributions as dist
import pytest
import torch
from density_cases import CASES, Case
from torch import Tensor

from pyro_cvi.algebra import (
    Expression,
    LatentTensor,
    Recorder,
    SiteRef,
    expression_of,
    plain,
    recording,
    site_expression,
)
from pyro_cvi.algebra.evaluate import OpaqueError, evaluate, point_reader
from pyro_cvi.algebra.expression import Group, Link, Opaque
from pyro_cvi.densities import log_density, registered_densities

DTYPES = [torch.float64, torch.float32]
WRAPPERS: dict[str, Callable[[dist.TorchDistribution], dist.TorchDistribution]] = {
    "as it is": lambda d: d,
    "expand": lambda d: d.expand((2, *d.batch_shape)),
    "to_event": lambda d: d.to_event(1),
    "masked by True": lambda d: d.mask(True),
    "masked by False": lambda d: d.mask(False),
    "masked by a tensor": lambda d: d.mask(torch.tensor([True, False, True, True])),
    "masked wider": lambda d: d.mask(torch.arange(8).reshape(2, 4) % 3 == 0),
    "ExpandedDistribution": lambda d: dist.ExpandedDistribution(d, (2, *d.batch_shape)),
    "mask, to_event": lambda d: d.mask(torch.tensor([True, False, True, True])).to_event(1),
    "expand, to_event, mask": lambda d: d.expand((2, *d.batch_shape)).to_event(1).mask(
        torch.tensor([True, False])
    ),
    "Independent": lambda d: dist.Independent(d, 1),
}  # fmt: skip
BATCH = (4,)


def noise(case: Case, dtype: torch.dtype, batch: tuple[int, ...] = BATCH) -> dict[str, Tensor]:
    return {n: torch.randn((*batch, *case.event), dtype=dtype) for n in case.parameters}


def parameters(case: Case, dtype: torch.dtype, batch: tuple[int, ...] = BATCH) -> dict[str, Tensor]:
    made = noise(case, dtype, batch)
    return {n: domain(made[n]) for n, domain in case.parameters.items()}


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Up to 500 roundings of the largest magnitude (lgamma of a count, squares of residuals)."""
    assert got.shape == expected.shape
    rtol = 500 * torch.finfo(expected.dtype).eps
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * (1 + size))


def operands(e: Expression) -> list[object]:
    found: list[object] = []
    for t in e.terms:
        for o in t.operands:
            found.append(o)
            if isinstance(o, Group):
                found += operands(o.expression)
            elif isinstance(o, Link):
                found += [p for a in o.arguments for p in operands(a)]
    return found


def is_opaque(e: Expression) -> bool:
    return any(isinstance(o, Opaque) for o in operands(e))


def latent(name: str, value: Tensor, kind: str, event_dim: int = 0) -> LatentTensor:
    ref = SiteRef(name, tuple(value.shape), event_dim, kind)
    return LatentTensor.make(value, site_expression(ref))


def at(log_p: Tensor, point: dict[str, Tensor]) -> Tensor:
    e = expression_of(log_p)
    return evaluate(e, point_reader(point)).expand(e.shape)


def test_every_registered_rule_has_a_case() -> None:
    ours = {
        c
        for c in registered_densities()
        if c.__module__.startswith(("torch.", "pyro.", "pyro_cvi."))
    }
    missing = ours - {case.key for case in CASES.values()}
    assert not missing, f"density rules without a case: {missing}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", CASES)
def test_the_rule_is_log_prob(name: str, wrapper: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    d = WRAPPERS[wrapper](case.build(**parameters(case, dtype)))
    x = d.sample()
    # Pyro's zeros of a factor masked by False have the default dtype.
    assert_same(log_density(d, x).to(dtype), d.log_prob(x).to(dtype))


@pytest.mark.parametrize(
    ("name", "batch"),
    # torch's own constructors of Beta and of vectors reject an empty batch
    [(n, b) for n, c in CASES.items() for b in [(), (1,), (2, 3)]]
    + [(n, (0,)) for n, c in CASES.items() if not c.event and n != "Beta"],
    ids=str,
)
def test_the_rule_is_log_prob_for_every_batch_shape(name: str, batch: tuple[int, ...]) -> None:
    case = CASES[name]
    d = case.build(**parameters(case, torch.float64, batch))
    x = d.sample()
    assert_same(log_density(d, x), d.log_prob(x))


@pytest.mark.parametrize("name", sorted(set(CASES) - {"Delta", "Delta event"}))
def test_a_value_with_more_dims_than_the_batch_broadcasts(name: str) -> None:
    case = CASES[name]
    d = case.build(**parameters(case, torch.float64))
    x = d.sample((5,))
    assert_same(log_density(d, x), d.log_prob(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("name", "which"), [(n, p) for n, c in CASES.items() for p in c.parameters if p not in c.fixed]
)
def test_the_expression_in_a_latent_parameter_is_log_prob_at_fresh_values(
    name: str, which: str, wrapper: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    here, fresh = parameters(case, dtype), parameters(case, dtype)
    fixed = {n: v for n, v in here.items() if n != which}
    kind = cases.KIND[case.parameters[which]]
    event_dim = 1 if kind == "simplex" else 0
    symbol = latent("site", here[which], kind, event_dim)
    wrap = WRAPPERS[wrapper]
    x = wrap(case.build(**fixed, **{which: fresh[which]})).sample()
    expected = wrap(case.build(**fixed, **{which: fresh[which]})).log_prob(x)
    log_p = log_density(wrap(case.build(**fixed, **{which: symbol})), x)
    e = expression_of(log_p)
    assert e.shape == expected.shape
    assert not is_opaque(e)
    assert_same(at(log_p, {"site": fresh[which]}).to(dtype), expected.to(dtype))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.value != "sample"])
def test_the_expression_in_a_latent_value_is_log_prob_at_fresh_values(name: str) -> None:
    case = CASES[name]
    d = case.build(**parameters(case, torch.float64))
    domain = cases.DOMAIN[case.value]
    here, fresh = (domain(torch.randn(*BATCH, *case.event)) for _ in range(2))
    log_p = log_density(d, latent("site", here, case.value, len(case.event)))
    assert not is_opaque(expression_of(log_p))
    assert_same(at(log_p, {"site": fresh}), d.log_prob(fresh))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.value != "sample"])
def test_value_and_parameters_may_be_latent_together(name: str) -> None:
    case = CASES[name]
    here, fresh = parameters(case, torch.float64), parameters(case, torch.float64)
    for n in case.fixed:
        fresh[n] = here[n]
    domain = cases.DOMAIN[case.value]
    x, fresh_x = (domain(torch.randn(*BATCH, *case.event)) for _ in range(2))
    symbols = {
        n: v if n in case.fixed else latent(n, v, cases.KIND[case.parameters[n]])
        for n, v in here.items()
    }
    log_p = log_density(case.build(**symbols), latent("x", x, case.value, len(case.event)))
    expected = case.build(**fresh).log_prob(fresh_x)
    assert_same(at(log_p, {**fresh, "x": fresh_x}), expected)


BOUNDARY: dict[str, tuple[Callable[[], dist.TorchDistribution], float]] = {
    "Gamma(1, b) at zero": (lambda: dist.Gamma(1.0, 2.0), 0.0),
    "Beta(1, 1) at zero": (lambda: dist.Beta(1.0, 1.0), 0.0),
    "Beta(1, 1) at one": (lambda: dist.Beta(1.0, 1.0), 1.0),
    "Exponential at zero": (lambda: dist.Exponential(2.0), 0.0),
    "Poisson(0) at zero": (lambda: dist.Poisson(0.0), 0.0),
    "Bernoulli(0) at zero": (lambda: dist.Bernoulli(0.0), 0.0),
    "Bernoulli(1) at one": (lambda: dist.Bernoulli(1.0), 1.0),
    "Bernoulli(0) at one": (lambda: dist.Bernoulli(0.0), 1.0),
    "Binomial(5, 1) at five": (lambda: dist.Binomial(5, 1.0), 5.0),
    "Geometric(1) at zero": (lambda: dist.Geometric(1.0), 0.0),
    "Categorical with a zero": (lambda: dist.Categorical(torch.tensor([0.0, 0.5, 0.5])), 0.0),
    "Delta elsewhere": (lambda: dist.Delta(torch.tensor(1.0)), 2.0),
}


@pytest.mark.parametrize("where", BOUNDARY)
def test_the_boundary_of_a_support_is_as_torch_has_it(where: str) -> None:
    build, point = BOUNDARY[where]
    d, x = build(), torch.tensor(point)
    # torch clamps probabilities at one rounding from 0 and 1: where log p is that far from zero
    # the order of the sums shows.
    torch.testing.assert_close(log_density(d, x), d.log_prob(x), rtol=1e-12, atol=1e-14)


WITHOUT_RULE: dict[str, Callable[[Tensor, Tensor], dist.TorchDistribution]] = {
    "StudentT loc": lambda u, p: dist.StudentT(4.0, u, 1.5),
    "StudentT scale": lambda u, p: dist.StudentT(4.0, 0.5, p),
    "StudentT df": lambda u, p: dist.StudentT(p, u, p),
    "Laplace": lambda u, p: dist.Laplace(u, p),
    "Cauchy": lambda u, p: dist.Cauchy(u, 2.0),
    "HalfNormal": lambda u, p: dist.HalfNormal(p),
    "HalfCauchy": lambda u, p: dist.HalfCauchy(p),
    "VonMises": lambda u, p: dist.VonMises(u, p),
    "Uniform": lambda u, p: dist.Uniform(-p, p),
    "Gumbel": lambda u, p: dist.Gumbel(u, p),
    "Weibull": lambda u, p: dist.Weibull(p, 2.0),
    "Pareto": lambda u, p: dist.Pareto(torch.tensor(0.01), p),
    "Logistic": lambda u, p: dist.Logistic(u, p),
    "AsymmetricLaplace": lambda u, p: dist.AsymmetricLaplace(u, p, 1.5),
    "ContinuousBernoulli": lambda u, p: dist.ContinuousBernoulli(logits=u),
    "BetaBinomial": lambda u, p: dist.BetaBinomial(p, 2.0, total_count=5),
    "GammaPoisson": lambda u, p: dist.GammaPoisson(p, 2.0),
    "ZeroInflatedPoisson": lambda u, p: dist.ZeroInflatedPoisson(p, gate=torch.tensor(0.3)),
    "ZeroInflatedNegativeBinomial": lambda u, p: dist.ZeroInflatedNegativeBinomial(
        p, logits=u, gate=torch.tensor(0.3)
    ),
    "MixtureSameFamily": lambda u, p: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(4, 2)), dist.Normal(torch.stack([u, -u], -1), 1.0)
    ),
    "RelaxedBernoulli": lambda u, p: dist.RelaxedBernoulli(torch.tensor(0.7), logits=u),
    "TransformedDistribution": lambda u, p: dist.TransformedDistribution(
        dist.Normal(u, 1.0), [dist.transforms.SigmoidTransform()]
    ),
    "FoldedDistribution": lambda u, p: dist.FoldedDistribution(dist.Normal(u, 1.0)),
    "NanMaskedNormal": lambda u, p: dist.NanMaskedNormal(u, 1.0),
    "MultivariateStudentT": lambda u, p: dist.MultivariateStudentT(3.0, u, torch.eye(4)),
    "LowRankMultivariateNormal": lambda u, p: dist.LowRankMultivariateNormal(
        u, torch.ones(4, 1), torch.ones(4)
    ),
    "MVN with a latent covariance": lambda u, p: dist.MultivariateNormal(
        torch.zeros(4), torch.diag_embed(p)
    ),
    "RelaxedOneHotCategorical": lambda u, p: dist.RelaxedOneHotCategorical(
        torch.tensor(0.5), logits=u
    ),
    "LKJCholesky": lambda u, p: dist.LKJCholesky(3, p),
    "DirichletMultinomial": lambda u, p: dist.DirichletMultinomial(p, total_count=5),
    "ProjectedNormal": lambda u, p: dist.ProjectedNormal(u[:2]),
    "masked Laplace": lambda u, p: dist.Laplace(u, p).mask(torch.tensor([True, False, True, True])),
    "Laplace to_event": lambda u, p: dist.Laplace(u, p).to_event(1),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_a_distribution_without_a_rule_gives_a_link_or_is_opaque_never_wrong(name: str) -> None:
    build = WITHOUT_RULE[name]
    here = {"u": torch.randn(4), "p": torch.rand(4) + 0.5}
    fresh = {"u": torch.randn(4), "p": torch.rand(4) + 0.5}
    reference = build(fresh["u"], fresh["p"])
    x = build(here["u"], here["p"]).sample() * 0.5 if name == "Uniform" else reference.sample()
    expected = reference.log_prob(x)
    log_p = log_density(
        build(latent("u", here["u"], "real"), latent("p", here["p"], "positive")), x
    )
    assert isinstance(log_p, LatentTensor), "the dependence on the latents is lost"
    try:
        value = at(log_p, fresh)
    except OpaqueError:
        assert log_p.expression.sites <= {"u", "p"}
        assert log_p.expression.shape == expected.shape
        return
    finite = expected.isfinite()
    torch.testing.assert_close(value[finite], expected[finite])


class _Padded(dist.Normal):  # type: ignore[misc]
    """Writes its parameter into a tensor."""

    def __init__(self, loc: torch.Tensor) -> None:
        wide = torch.zeros(5)
        wide[1:] = loc
        super().__init__(wide, 1.0)


def test_a_distribution_that_writes_its_parameters_into_a_tensor_is_recorded() -> None:
    with recording(Recorder()) as recorder:
        _Padded(latent("u", torch.randn(4), "real"))
    assert "u" in recorder.written


def test_the_table_that_an_ordered_logistic_fills_is_not_read() -> None:
    with recording(Recorder()) as recorder:
        dist.OrderedLogistic(latent("u", torch.randn(4), "real"), torch.tensor([-1.0, 1.0]))
    assert not recorder.written


def test_a_latent_value_of_a_distribution_without_a_rule_is_a_link() -> None:
    d = dist.StudentT(3.0, 0.5, 2.0)
    log_p = log_density(d, latent("z", torch.randn(4), "real"))
    fresh = torch.randn(4)
    assert_same(at(log_p, {"z": fresh}), d.log_prob(fresh))


def test_a_subclass_with_its_own_density_does_not_get_the_rule_of_its_base() -> None:
    class Tempered(dist.Normal):
        def log_prob(self, value: Tensor) -> Tensor:
            return 0.5 * super().log_prob(value)

    here, fresh = torch.randn(4), torch.randn(4)
    x = torch.randn(4)
    log_p = log_density(Tempered(latent("u", here, "real"), torch.ones(4)), x)
    assert_same(plain(log_p), Tempered(here, torch.ones(4)).log_prob(x))
    assert_same(at(log_p, {"u": fresh}), Tempered(fresh, torch.ones(4)).log_prob(x))


def test_a_constructor_argument_that_is_no_tensor_is_not_forgotten() -> None:
    class Tempered(dist.Laplace):
        def __init__(
            self, loc: Tensor, scale: Tensor, power: float = 1.0, validate_args: bool | None = None
        ) -> None:
            self.power = power
            super().__init__(loc, scale, validate_args=validate_args)

        def log_prob(self, value: Tensor) -> Tensor:
            return self.power * super().log_prob(value)

    log_p = log_density(
        Tempered(latent("u", torch.randn(4), "real"), torch.ones(4), 0.5), torch.zeros(4)
    )
    assert is_opaque(expression_of(log_p))
