"""The one- and two-predictor rule: its accuracy over five decades of width, and its gradient."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, special, stats
from torch import Tensor

from pyro_cvi.estimators import quadrature
from pyro_cvi.estimators.quadrature import gaussian_expectation, tolerance

WIDTHS = [1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 40.0, 150.0]
CENTRES = [-3.0, 0.0, 2.0]
Pair = tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray], float]


def _student(x: Tensor) -> Tensor:
    return torch.distributions.StudentT(4.0, x, 1.0, validate_args=False).log_prob(
        torch.tensor(0.5)
    )


UNDERFLOWS_IN_FLOAT32 = {"Poisson through softplus"}
"""softplus(-104) is zero in float32, and its log is infinite."""
FUNCTIONS: dict[str, Pair] = {  # torch, numpy, largest standard deviation
    "softplus": (F.softplus, lambda f: np.logaddexp(0, f), 150.0),
    "sigmoid": (torch.sigmoid, special.expit, 150.0),
    "logsigmoid": (F.logsigmoid, lambda f: -np.logaddexp(0, -f), 150.0),
    "log probit": (torch.special.log_ndtr, special.log_ndtr, 150.0),
    "StudentT": (_student, lambda f: stats.t.logpdf(0.5, 4.0, f, 1.0), 150.0),
    "exp": (torch.exp, np.exp, 3.0),
    "Poisson through softplus": (
        lambda f: 3 * F.softplus(f).log(),
        lambda f: 3 * np.log(np.logaddexp(0, f)), 40.0,
    ),
    "lgamma of 1 + softplus": (
        lambda f: torch.lgamma(1 + F.softplus(f)),
        lambda f: special.gammaln(1 + np.logaddexp(0, f)), 150.0,
    ),
    "lgamma of exp": (lambda f: torch.lgamma(f.exp()), lambda f: special.gammaln(np.exp(f)), 3.0),
    "a square": (torch.square, np.square, 150.0),
    "sine": (torch.sin, np.sin, 10.0),
}  # fmt: skip


def exact(f: Callable[[np.ndarray], np.ndarray], m: float, s: float) -> float:
    """E f(m + s x) by adaptive quadrature, split where f bends."""
    edges = sorted({-12.0, 12.0, *np.clip([-m / s + t / s for t in (-20, -4, 0, 4, 20)], -12, 12)})
    total = 0.0
    for a, b in itertools.pairwise(edges):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", integrate.IntegrationWarning)  # at rounding level
            part = integrate.quad(
                lambda x: f(m + s * x) * np.exp(-0.5 * x * x), a, b, limit=400, epsabs=1e-13
            )
        total += part[0]
    return total / np.sqrt(2 * np.pi)


def rule(f: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, *, learn: bool = False) -> Tensor:
    return gaussian_expectation(
        lambda z, _: f(z[0]), m[None], v[None, None], differentiate_constants=learn
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rule_keeps_its_promise_from_narrow_to_wide(name: str) -> None:
    f, g, widest = FUNCTIONS[name]
    points = [(m, s) for m in CENTRES for s in WIDTHS if s <= widest]
    m, s = (torch.tensor(c) for c in zip(*points, strict=True))
    got = rule(f, m, s**2)
    want = torch.tensor([exact(g, *p) for p in points])
    # The stated tolerance is on the difference of two orders; the higher one is nearer.
    torch.testing.assert_close(got, want, rtol=tolerance(m.dtype), atol=tolerance(m.dtype))


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - UNDERFLOWS_IN_FLOAT32))
def test_float32_keeps_the_promise_of_its_own_precision(name: str) -> None:
    f, g, widest = FUNCTIONS[name]
    points = [(m, s) for m in CENTRES for s in WIDTHS if s <= widest]
    m, s = (torch.tensor(c, dtype=torch.float32) for c in zip(*points, strict=True))
    got = rule(lambda x: f(x).to(x.dtype), m, s**2)
    want = torch.tensor([exact(g, *p) for p in points])
    # Rounding of v = s ** 2 and of exp at 30 adds to the rule's tolerance.
    bound = 5 * tolerance(torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_that_of_the_rule(name: str) -> None:
    f, _, widest = FUNCTIONS[name]
    points = [(m, s) for m in CENTRES for s in WIDTHS if 1e-2 <= s <= widest]
    m, s = (torch.tensor(c) for c in zip(*points, strict=True))
    v = s**2
    m_leaf, v_leaf = m.clone().requires_grad_(), v.clone().requires_grad_()
    gm, gv = torch.autograd.grad(rule(f, m_leaf, v_leaf).sum(), (m_leaf, v_leaf))
    # Steps in units of the width; a cell may change its order between the two ends, which moves
    # the difference by the rule's tolerance over the step.
    h = 1e-3
    dm = (rule(f, m + h * s, v) - rule(f, m - h * s, v)) / (2 * h)
    dv = (rule(f, m, v * (1 + h)) - rule(f, m, v * (1 - h))) / (2 * h)
    size = 1 + rule(f, m, v).abs()
    assert bool(((gm * s - dm).abs() <= 2e-4 * size).all())
    assert bool(((gv * v - dv).abs() <= 2e-4 * size).all())


def test_the_gradient_is_exact_where_the_order_is_fixed() -> None:
    m, v = torch.tensor([0.3, -1.0]), torch.tensor([0.2, 0.5])
    h = 1e-5
    f = F.softplus
    leaves = m.clone().requires_grad_(), v.clone().requires_grad_()
    gm, gv = torch.autograd.grad(rule(f, *leaves).sum(), leaves)
    torch.testing.assert_close(
        gm, (rule(f, m + h, v) - rule(f, m - h, v)) / (2 * h), rtol=1e-8, atol=1e-9
    )
    torch.testing.assert_close(
        gv, (rule(f, m, v + h) - rule(f, m, v - h)) / (2 * h), rtol=1e-8, atol=1e-9
    )


TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "heteroscedastic": lambda a, b: (1 - a) ** 2 * torch.exp(-b),
    "a link of a sum": lambda a, b: F.softplus(a + b),
    "logaddexp": torch.logaddexp,
    "a product of links": lambda a, b: torch.tanh(a) * torch.sigmoid(b),
    "one of two": lambda a, b: torch.sigmoid(a),
}  # fmt: skip


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", TWO)
def test_two_predictors_agree_with_a_grid_of_high_order(name: str, correlation: float) -> None:
    f = TWO[name]
    mean = torch.randn(2, 6)
    s, t = (
        torch.tensor([0.01, 0.3, 1.0, 0.3, 1.0, 1.5]),
        torch.tensor([0.5, 0.3, 1.0, 0.01, 0.1, 1.0]),
    )
    cov = torch.stack(
        [torch.stack([s * s, correlation * s * t]), torch.stack([correlation * s * t, t * t])]
    )
    mean, cov = mean.requires_grad_(), cov.requires_grad_()
    got = gaussian_expectation(lambda z, _: f(*z), mean, cov)
    x, w = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(100))
    w = w / w.sum()
    a = mean[0] + s * x[:, None, None]
    # As the rule has it, perfect correlation leaves a second direction of no width.
    slope = cov[0, 1] / cov[0, 0]
    rest = (cov[1, 1] - cov[0, 1] * slope).clamp(min=1e-300).sqrt()
    b = mean[1] + slope * s * x[:, None, None] + rest * x[:, None]
    want = torch.einsum("i,j,ijn->n", w, w, f(a.expand(100, 100, 6), b))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    (g_mean,) = torch.autograd.grad(got.sum(), mean, retain_graph=True)
    (h_mean,) = torch.autograd.grad(want.sum(), mean, retain_graph=True)
    torch.testing.assert_close(g_mean, h_mean, rtol=1e-5, atol=1e-5)
    assert bool(torch.autograd.grad(got.sum(), cov)[0].isfinite().all())


def test_a_point_mass_is_the_function_itself() -> None:
    m = torch.tensor([-1.0, 0.0, 2.0])
    leaf = torch.zeros(3, requires_grad=True)
    value = rule(torch.sigmoid, m, leaf)
    torch.testing.assert_close(value, torch.sigmoid(m), rtol=1e-12, atol=1e-12)
    assert bool(torch.autograd.grad(value.sum(), leaf)[0].isfinite().all())


def test_cells_are_independent_of_each_other_and_of_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, v = torch.randn(40), torch.rand(40) * torch.logspace(-4, 4, 40)
    scale = torch.rand(40)

    def one(i: int) -> tuple[Tensor, Tensor]:
        return m[None, i : i + 1], v[None, None, i : i + 1]

    def f(z: list[Tensor], cells: Tensor | None) -> Tensor:
        return F.softplus(z[0] * (scale if cells is None else scale[cells]))

    together = gaussian_expectation(f, m[None], v[None, None])
    monkeypatch.setattr(quadrature, "_BUDGET", 300)
    torch.testing.assert_close(
        gaussian_expectation(f, m[None], v[None, None]), together, rtol=1e-12, atol=1e-12
    )
    for i in (0, 20, 39):
        alone = gaussian_expectation(lambda z, _, a=scale[i]: F.softplus(z[0] * a), *one(i))
        torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-12, atol=1e-12)


def test_no_cells_give_no_values() -> None:
    assert rule(torch.exp, torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_constants_inside_the_function_get_the_gradient_of_the_rule() -> None:
    m, v = torch.tensor([0.3, -1.0, 5.0]), torch.tensor([0.2, 2.0, 1e4])
    a = torch.tensor(1.3, requires_grad=True)

    def value(slope: Tensor, learn: bool) -> Tensor:
        return rule(lambda x: F.softplus(slope * x), m, v, learn=learn)

    got = value(a, True)
    torch.testing.assert_close(got, value(a.detach(), False), rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(got.sum(), a)
    h = 1e-4
    low, high = value(a.detach() - h, False).sum(), value(a.detach() + h, False).sum()
    torch.testing.assert_close(slope, (high - low) / (2 * h), rtol=1e-6, atol=1e-6)


def test_an_overflowing_function_is_infinite_and_never_hangs() -> None:
    value = rule(torch.exp, torch.tensor([0.0, 0.5]), torch.tensor([1e6, 0.1]))
    assert not bool(value[0].isfinite())
    torch.testing.assert_close(value[1], torch.tensor(0.55).exp())
