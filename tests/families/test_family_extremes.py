"""Extreme shapes against mpmath, with the tolerance that the stored numbers allow."""

import math
from collections.abc import Callable

import mpmath
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_cvi.families import (
    BETA,
    DIRICHLET,
    GAMMA,
    GAUSSIAN,
    INVERSE_GAMMA,
    WISHART,
    Natural,
    Unconstrained,
    from_loc_precision,
    special,
)
from pyro_cvi.families.wishart import wishart_shape

mpf = mpmath.mpf

ARGUMENTS = {
    torch.float64: [1e-8, 1e-4, 0.1, 0.5, 1.0, 1.5, 2.0, 5.0, 11.99, 12.0, 30.0, 1e3, 1e5, 1e8],
    torch.float32: [1e-4, 1e-2, 0.1, 0.5, 1.0, 1.5, 2.0, 5.0, 11.99, 12.0, 30.0, 1e3, 1e6],
}
shapes = pytest.mark.parametrize(
    ("dtype", "shape"), [(dtype, x) for dtype, row in ARGUMENTS.items() for x in row], ids=str
)


@pytest.fixture(autouse=True)
def sixty_digits():
    with mpmath.workdps(60):
        yield


def relative_error(actual: Tensor, expected: mpmath.mpf) -> float:
    return float(abs(mpf(actual.item()) - expected) / abs(expected))


def excess(x: mpmath.mpf) -> mpmath.mpf:
    return x * mpmath.polygamma(1, x) - 1


REFERENCES: dict[str, Callable[[mpmath.mpf], mpmath.mpf]] = {
    "trigamma": lambda x: mpmath.polygamma(1, x),
    "tetragamma": lambda x: mpmath.polygamma(2, x),
    "log_minus_digamma": lambda x: mpmath.log(x) - mpmath.digamma(x),
    "trigamma_excess": excess,
    "curvature_ratio": lambda x: -(x * x * mpmath.polygamma(2, x) + 1) / (2 * excess(x)),
    "entropy_term": lambda x: mpmath.loggamma(x) - (x - 1) * mpmath.digamma(x) + x,
}


@pytest.mark.parametrize("name", REFERENCES)
@shapes
def test_special_functions_keep_their_digits(name: str, dtype: torch.dtype, shape: float) -> None:
    x = torch.tensor(shape, dtype=dtype)
    error = relative_error(getattr(special, name)(x), REFERENCES[name](mpf(x.item())))
    assert error < 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize("offset", [1e-12, -1e-9, 1e-5, 0.0999, 0.1001, -0.5, 3.0, 1e6])
def test_ratio_excess_keeps_its_digits_near_one(offset: float) -> None:
    t = torch.tensor(1 + offset, dtype=torch.float64)
    exact = mpf(t.item())
    error = relative_error(special.ratio_excess(t), exact - 1 - mpmath.log(exact))
    assert error < 1e-14


def test_torch_trigamma_is_the_one_that_is_inaccurate() -> None:
    # The reason for `special.trigamma`. Should this fail, torch's own serves as well.
    x = torch.tensor(1.0, dtype=torch.float64)
    expected = mpmath.pi**2 / 6
    assert relative_error(torch.polygamma(1, x), expected) > 1e-11
    assert relative_error(special.trigamma(x), expected) < 1e-15


def test_derivatives_of_log_gamma_chain_to_every_order() -> None:
    x = torch.tensor([0.3, 2.0, 40.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(special.log_gamma, x.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(special.log_gamma, x.clone().requires_grad_())
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(special.digamma))(x), special.trigamma(x)
    )
    _, tangent = torch.func.jvp(special.trigamma, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, special.tetragamma(x))


@pytest.mark.parametrize("family", [GAMMA, INVERSE_GAMMA], ids=repr)
@shapes
def test_gamma_fisher_solve_at_extreme_shapes(family, dtype: torch.dtype, shape: float) -> None:
    rate, gradient = 2.5, (0.7, -0.3)
    sign = 1 if family is GAMMA else -1
    natural = tuple(
        torch.tensor(v, dtype=dtype) for v in (sign * (shape - 1) - (sign < 0) * 2, -rate)
    )
    # The shape that the stored number stands for.
    a, b = sign * mpf(natural[0].item()) + sign, -mpf(natural[1].item())
    g1, g2 = (mpf(torch.tensor(v, dtype=dtype).item()) for v in gradient)
    terms = (a * g1, -sign * b * g2), (-sign * b * g1, b * b * mpmath.polygamma(1, a) * g2)
    solved = family.fisher_solve(natural, tuple(torch.tensor(v, dtype=dtype) for v in gradient))
    for actual, (left, right) in zip(solved, terms, strict=True):
        # Relative to the terms: their sum cancels only if the gradient is chosen so.
        error = abs(mpf(actual.item()) - (left + right) / excess(a))
        scale = (abs(left) + abs(right)) / excess(a)
        assert float(error / scale) < 50 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "alpha",
    [(1e-8, 3e-8, 2e-8), (1e-3, 2.0, 30.0), (1e8, 2e8, 5e7), (1e6, 1.0, 1e-2), (0.3, 0.3, 0.3)],
    ids=str,
)
def test_dirichlet_fisher_solve_at_extreme_shapes(alpha: tuple[float, ...]) -> None:
    natural = torch.tensor(alpha, dtype=torch.float64) - 1
    gradient = torch.tensor([0.7, -0.3, 1.1], dtype=torch.float64)
    exact = [mpf(n.item()) + 1 for n in natural]
    total = mpmath.polygamma(1, sum(exact))
    matrix = mpmath.matrix(3, 3)
    for i in range(3):
        for j in range(3):
            matrix[i, j] = (mpmath.polygamma(1, exact[i]) if i == j else 0) - total
    expected = mpmath.lu_solve(matrix, mpmath.matrix([mpf(g.item()) for g in gradient]))
    # alpha - 1 is stored to one rounding of 1, the total to one of itself.
    (solved,) = DIRICHLET.fisher_solve((natural,), (gradient,))
    scale = max(abs(e) for e in expected)
    error = max(abs(mpf(s.item()) - e) for s, e in zip(solved, expected, strict=True))
    assert float(error / scale) < 2e-12
    (beta,) = torch.stack(BETA.fisher_solve(tuple(natural[:2]), tuple(gradient[:2])))[None]
    torch.testing.assert_close(beta, DIRICHLET.fisher_solve((natural[:2],), (gradient[:2],))[0])


@pytest.mark.parametrize("shape", [1e-8, 1e-3, 1.0, 1e3, 1e7])
def test_gamma_to_natural_loses_no_more_than_the_mean_does(shape: float) -> None:
    natural = tuple(torch.tensor([v], dtype=torch.float64) for v in (shape - 1, -2.5))
    back = GAMMA.to_natural(GAMMA.to_mean(natural))
    # log E[x] - E[log x] is 1/(2a): one rounding of the logarithms is 2a of it.
    tolerance = 1e-15 * (10 + 20 * shape)
    for a, b in zip(back, natural, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-14)


def gamma_kl(p: tuple[mpmath.mpf, ...], q: tuple[mpmath.mpf, ...]) -> mpmath.mpf:
    (a, b), (c, d) = p, q
    logs = c * mpmath.log(b / d) + mpmath.loggamma(c) - mpmath.loggamma(a)
    return logs + (a - c) * mpmath.digamma(a) + a * (d - b) / b


@pytest.mark.parametrize("shape", [1e-3, 1.0, 50.0, 1e4, 1e7])
@pytest.mark.parametrize("relative", [1e-6, 1e-3, 1.0])
def test_gamma_kl_and_entropy_do_not_cancel(shape: float, relative: float) -> None:
    p = tuple(torch.tensor(v, dtype=torch.float64) for v in (shape - 1, -2.5))
    q = tuple(torch.tensor(v, dtype=torch.float64) for v in (shape * (1 + relative) - 1, -2.6))
    exact_p, exact_q = ((mpf(n[0].item()) + 1, -mpf(n[1].item())) for n in (p, q))
    expected = gamma_kl(exact_p, exact_q)
    for family, (left, right) in [
        (GAMMA, (p, q)),
        (INVERSE_GAMMA, ((-p[0] - 2, p[1]), (-q[0] - 2, q[1]))),
    ]:
        error = abs(mpf(family.kl(left, right).item()) - expected)
        assert float(error) < 1e-13 * (1 + float(expected) + shape**0.5)
    a, b = exact_p
    entropy = a - mpmath.log(b) + mpmath.loggamma(a) + (1 - a) * mpmath.digamma(a)
    assert float(abs(mpf(GAMMA.entropy(p).item()) - entropy)) < 1e-13 * (1 + abs(float(entropy)))


def test_dirichlet_kl_and_entropy_do_not_cancel() -> None:
    p = torch.tensor([1e7, 2e7, 3e6], dtype=torch.float64)
    q = p * torch.tensor([0.5, 0.5001, 0.5], dtype=torch.float64)
    a, c = ([mpf((x - 1).item()) + 1 for x in row] for row in (p, q))
    expected = mpmath.loggamma(sum(a)) - mpmath.loggamma(sum(c))
    for x, y in zip(a, c, strict=True):
        expected += mpmath.loggamma(y) - mpmath.loggamma(x)
        expected += (x - y) * (mpmath.digamma(x) - mpmath.digamma(sum(a)))
    assert float(abs(mpf(DIRICHLET.kl((p - 1,), (q - 1,)).item()) - expected)) < 1e-12
    entropy = -mpmath.loggamma(sum(a)) + (sum(a) - 3) * mpmath.digamma(sum(a))
    entropy += sum(mpmath.loggamma(x) - (x - 1) * mpmath.digamma(x) for x in a)
    assert float(abs(mpf(DIRICHLET.entropy((p - 1,)).item()) - entropy)) < 1e-13


@pytest.mark.parametrize("scale", [1e-8, 1e-5, 1e-2, 1.0])
def test_gaussian_kl_keeps_twelve_digits_in_ten_dimensions(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    d = 10
    root, change = torch.randn((2, d, d), generator=generator, dtype=torch.float64)
    # A prescribed spectrum, on which log-determinants of P and Q lose what cancels here.
    basis = torch.linalg.qr(root).Q
    precision = basis @ torch.diag(torch.logspace(0, 6, d, dtype=torch.float64)) @ basis.mT
    precision = (precision + precision.mT) / 2
    loc = torch.randn(d, generator=generator, dtype=torch.float64)
    p = from_loc_precision(loc, precision)
    other = precision + scale * (change @ change.mT)
    q = from_loc_precision(loc + scale, (other + other.mT) / 2)

    def exact(natural: tuple[Tensor, ...]) -> tuple[mpmath.matrix, mpmath.matrix]:
        matrix = mpmath.matrix((-2 * natural[1]).tolist())
        return matrix, mpmath.lu_solve(matrix, mpmath.matrix(natural[0].tolist()))

    (P, m), (Q, n) = exact(p), exact(q)
    ratio = Q * P**-1
    quadratic = ((n - m).T * Q * (n - m))[0]
    trace = sum(ratio[i, i] for i in range(d))
    expected = (trace - d - mpmath.log(mpmath.det(ratio)) + quadratic) / 2
    error = float(abs(mpf(GAUSSIAN.kl(p, q).item()) - expected))
    assert error < 1e-13 * (1 + 10 * float(expected))


class ExactWishart:
    """Textbook formulas with sixty digits, of the numbers that are stored."""

    def __init__(self, natural: Natural) -> None:
        self.d = d = natural[0].shape[-1]
        self.rate = -mpmath.matrix(natural[0].tolist())
        self.a = mpf(natural[1].item()) + mpf(d + 1) / 2
        halves = [mpf(j) / 2 for j in range(d)]
        self.log_gamma = d * (d - 1) / mpf(4) * mpmath.log(mpmath.pi)
        self.log_gamma += sum(mpmath.loggamma(self.a - h) for h in halves)
        self.digamma = sum(mpmath.digamma(self.a - h) for h in halves)
        self.log_det = mpmath.log(mpmath.det(self.rate))

    def kl(self, other: "ExactWishart") -> mpmath.mpf:
        ratio = other.rate * self.rate**-1
        trace = sum(ratio[i, i] for i in range(self.d))
        value = other.log_gamma - self.log_gamma - (other.a - self.a) * self.digamma
        return value - other.a * (other.log_det - self.log_det) + self.a * (trace - self.d)

    def entropy(self) -> mpmath.mpf:
        half = mpf(self.d + 1) / 2
        value = self.log_gamma + self.a * self.d - (self.a - half) * self.digamma
        return value - half * self.log_det

    def log_prob(self, x: Tensor) -> mpmath.mpf:
        matrix = mpmath.matrix(x.tolist())
        product = self.rate * matrix
        trace = sum(product[i, i] for i in range(self.d))
        logs = (self.a - mpf(self.d + 1) / 2) * mpmath.log(mpmath.det(matrix))
        return logs - trace - self.log_gamma + self.a * self.log_det


@pytest.mark.parametrize("d", [1, 3, 8])
@pytest.mark.parametrize("shape", [1e-8, 1e-3, 1.0, 50.0, 1e4, 1e7])
@pytest.mark.parametrize("relative", [1e-6, 1e-3, 1.0])
def test_wishart_does_not_cancel(d: int, shape: float, relative: float) -> None:
    root = torch.randn(d, d)
    rate = root @ root.mT + torch.eye(d)
    p = (-rate * (shape + d), torch.tensor(shape - 1))
    changed = rate * (shape * (1 + relative) + d) + shape**0.5 * relative * torch.eye(d)
    q = (-changed, torch.tensor(shape * (1 + relative) - 1))
    exact = ExactWishart(p)
    kl, entropy = exact.kl(ExactWishart(q)), exact.entropy()
    bound = 1e-13 * d * (1 + float(kl) + shape**0.5)
    assert float(abs(mpf(WISHART.kl(p, q).item()) - kl)) < bound
    assert float(abs(mpf(WISHART.entropy(p).item()) - entropy)) < 1e-13 * (1 + abs(float(entropy)))
    if shape >= 1:  # else draws are singular
        x = WISHART.to_distribution(p).sample()
        log_prob = exact.log_prob(x)
        error = float(abs(mpf(WISHART.log_prob(p, x).item()) - log_prob))
        assert error < 1e-14 * d * (10 + abs(float(log_prob)) + 10 * shape**0.5)
    # The gap log det E[X] - E[log det X] is d (d + 1)/(4 a), of logarithms of a few units each.
    back = WISHART.to_natural(WISHART.to_mean(p))
    tolerance = 1e-15 * (10 + 20 * shape)
    torch.testing.assert_close(back[1] + 1, p[1] + 1, rtol=tolerance, atol=0)
    torch.testing.assert_close(back[0], p[0], rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("d", [1, 2, 5, 50])
def test_wishart_shape_is_found_at_every_size(d: int) -> None:
    smallest = torch.logspace(-12, 6, 200)
    k = torch.arange(d) / 2
    c, h = smallest.unsqueeze(-1) + k, (d - 1) / 2 - k
    gap = (special.log_minus_digamma(c) + torch.log1p(h / c)).sum(-1)
    torch.testing.assert_close(wishart_shape(gap, d), smallest, rtol=1e-11, atol=0)
    single = wishart_shape(gap[60:].float(), d)
    torch.testing.assert_close(single, smallest[60:].float(), rtol=1e-3, atol=0)


def test_wishart_of_one_dimension_is_the_gamma() -> None:
    a, b = torch.rand(6) * 5 + 0.1, torch.rand(6) + 0.1
    gamma, wishart = (a - 1, -b), (-b[:, None, None], a - 1)
    direction = torch.randn(2, 6)
    other = direction[1][:, None, None], direction[0]
    pairs = [
        (WISHART.max_step(wishart, other), GAMMA.max_step(gamma, tuple(direction))),
        (WISHART.entropy(wishart), GAMMA.entropy(gamma)),
        (WISHART.log_partition(wishart), GAMMA.log_partition(gamma)),
        *zip(WISHART.to_mean(wishart), GAMMA.to_mean(gamma)[::-1], strict=True),
        *zip(
            WISHART.fisher_solve(wishart, other),
            GAMMA.fisher_solve(gamma, tuple(direction))[::-1],
            strict=True,
        ),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.reshape(6), theirs, rtol=1e-12, atol=1e-12)


def test_wishart_reads_the_symmetric_part_of_a_matrix() -> None:
    root, skew = torch.randn(2, 3, 3)
    natural = -(root @ root.mT) - torch.eye(3), torch.tensor(0.7)
    tilted = natural[0] + skew - skew.mT, natural[1]
    gradient, direction = (torch.randn(3, 3), torch.tensor(0.3)), (skew, torch.tensor(0.1))
    for function in (
        lambda n: WISHART.to_mean(n),
        lambda n: WISHART.fisher_solve(n, gradient),
        lambda n: WISHART.retract(n, direction, 1.0),
        lambda n: WISHART.natural_of_core(WISHART.to_distribution(n)),
    ):
        for ours, theirs in zip(function(tilted), function(natural), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.dim() == 0 or torch.equal(ours, ours.mT)
    assert WISHART.is_proper(tilted)


def test_retraction_of_a_gamma_never_reaches_zero() -> None:
    # 1 + u + c u^2/2 has no real root because c > 1/2: Lin, Schmidt & Khan's bound, with room.
    x = torch.logspace(-8, 8, 400, dtype=torch.float64)
    c = special.curvature_ratio(x)
    assert (c > 1 - 1e-15).all()
    assert (c < 1.0945).all()


@pytest.mark.parametrize(
    ("prior", "wanted"),
    [
        (dist.LogNormal(-20.0, 5.0), 0.0),
        (dist.LogNormal(-20.0, 3.0), -8.0),
        (dist.LogNormal(-20.0, 1.0), -20.0),
        (dist.LogNormal(5.0, 6.0), 5.0),
        (dist.HalfCauchy(1e-6), math.log(1e-6)),
    ],
)
def test_a_scale_of_any_size_starts_near_one(prior, wanted):
    """From nothing no slope leads back to a scale; from above it finds its way."""
    for law in (prior, prior.expand([2]).to_event(1)):
        found = Unconstrained(law).mean
        assert found.tolist() == pytest.approx(
            [wanted] * 2 if law.event_shape else wanted, abs=0.05
        )
