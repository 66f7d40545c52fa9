"""E_q of an expression against a brute-force grid, closed forms and samples; value and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import estimator_cases as cases
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_cvi.algebra import Expression, LatentTensor, SiteRef, expression_of, site_expression
from pyro_cvi.densities import log_density
from pyro_cvi.estimators import Moments, Structure, compile_expectation
from pyro_cvi.families import BETA, DIRICHLET, GAMMA, GAUSSIAN, INVERSE_GAMMA, AbstractFamily
from pyro_cvi.gaussians import Layout


def compare(f: cases.Function, order: int, rtol: float, atol: float, scale: float = 0.4) -> None:
    inputs, s = cases.data(), cases.structure(cases.BLOCKS, cases.SHAPES)
    q = cases.leaves(cases.gaussians(s, scale))
    expected = cases.oracle(f, s, q, inputs, order)
    expectation = compile_expectation(cases.symbolic(f, cases.SHAPES, inputs), s)
    value = expectation(cases.moments(q)).expand(expectation.shape)
    torch.testing.assert_close(value, expected, rtol=rtol, atol=atol)
    cotangent = torch.randn(value.shape)
    got = cases.gradients(value, cotangent, q)
    want = cases.gradients(expected, cotangent, q)
    for g, h in zip(got, want, strict=True):
        torch.testing.assert_close(g, h, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", cases.EXACT)
def test_a_multilinear_expectation_is_exact_with_its_gradient(name: str) -> None:
    inputs, s = cases.data(), cases.structure(cases.BLOCKS, cases.SHAPES)
    expectation = compile_expectation(cases.symbolic(cases.EXACT[name], cases.SHAPES, inputs), s)
    assert {h.kind for h in expectation.how.values()} <= {"exact"}
    # Degree at most 4 in any scalar: a rule of order 4 is exact to degree 7.
    compare(cases.EXACT[name], order=4, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", cases.POLYNOMIALS)
def test_a_polynomial_of_two_predictors_is_exact_to_rounding(name: str) -> None:
    compare(cases.POLYNOMIALS[name], order=4, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", cases.LINKS)
def test_a_link_is_averaged_to_the_tolerance_of_the_rule(name: str) -> None:
    # The rule promises 1e-7 of 1 + |Q|, and its gradients lose a digit. The grid has three or five
    # dimensions: at these standard deviations its own error is below 1e-8.
    sites = cases.symbolic(cases.LINKS[name], cases.SHAPES, cases.data()).sites
    order, scale = (12, 0.15) if "v" in sites else (30, 0.4)
    compare(cases.LINKS[name], order, rtol=2e-6, atol=2e-6, scale=scale)


@pytest.mark.parametrize("name", [*cases.EXACT, *cases.POLYNOMIALS, *cases.LINKS])
def test_float32_agrees_with_float64(name: str) -> None:
    f = {**cases.EXACT, **cases.POLYNOMIALS, **cases.LINKS}[name]
    values = []
    s = cases.structure(cases.BLOCKS, cases.SHAPES)
    q = cases.gaussians(s, dtype=torch.float32)
    for dtype in (torch.float32, torch.float64):
        inputs = {
            n: t.to(dtype) if t.is_floating_point() else t
            for n, t in cases.data(torch.float32).items()
        }
        torch.set_default_dtype(dtype)
        e = cases.symbolic(f, cases.SHAPES, inputs)
        here = {b: (m.to(dtype), v.to(dtype)) for b, (m, v) in q.items()}
        s = cases.structure(cases.BLOCKS, cases.SHAPES)
        values.append(compile_expectation(e, s)(cases.moments(here)))
    assert values[0].dtype == torch.float32
    # Magnitudes up to 100 within a sum, and the float32 tolerance of the rule, 2e-5.
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-4, atol=1e-4)


# --- layouts ---------------------------------------------------------------------------------------

PLATE = {"w": (3,), "u": (3,)}
ON_PLATES: dict[str, cases.Function] = {
    "a sum of two effects": lambda k: (k.y - k.w - k.u) ** 2,
    "an index of effects": lambda k: (k.y[k.i] - k.w[k.i] - k.u[k.i]) ** 2,
    "a sum over the plate inside a square": lambda k: (k.w.sum() - 2) ** 2,
    "two sums over the plate inside a square": lambda k: (k.c @ k.w + k.u.sum() - 1) ** 2,
    "a matrix times the plate inside a square": lambda k: (k.y - k.Z @ k.w - k.u) ** 2,
    "products of sums": lambda k: (k.Z @ k.w) * (k.Z @ k.u),
    "pairs across the plate": lambda k: (k.w[:, None] - k.u) ** 2,
    "a product of all pairs": lambda k: k.w[:, None] * k.w,
    "an inner product within": lambda k: (k.w - 1) @ (k.u + k.c),
    "cumsum": lambda k: (k.w.cumsum(0) - k.u) ** 2,
    "softplus of a predictor": lambda k: torch.nn.functional.softplus(k.Z @ k.w + k.u),
    "exp": lambda k: torch.exp(k.w + k.u - k.w[0]),
    "two predictors": lambda k: torch.sigmoid(k.w) * torch.tanh(k.u),
    "a scale times an effect": lambda k: (k.y - k.w[0] - torch.exp(k.w) * k.u) ** 2,
}  # fmt: skip


def layouts(component: Tensor) -> tuple[Structure, Structure]:
    """The block with one element per component, and as one dense Gaussian."""
    parted = Layout.from_components(PLATE, component)
    assert parted is not None
    block = dict.fromkeys(PLATE, "b")
    family = dict.fromkeys(PLATE, GAUSSIAN)
    dense = Layout.dense(PLATE, cases.CPU)
    return Structure(family, block, {"b": parted}), Structure(family, block, {"b": dense})


@pytest.mark.parametrize("structure", ["plated", "diagonal"])
@pytest.mark.parametrize("name", ON_PLATES)
def test_a_plated_or_diagonal_block_is_the_dense_one_without_correlations(
    name: str, structure: str
) -> None:
    component = torch.tensor([0, 1, 2, 0, 1, 2]) if structure == "plated" else torch.arange(6)
    parted, dense = layouts(component)
    small, wide = parted.layout["b"], dense.layout["b"]
    assert small.structure == structure
    where = torch.cat([small.flat(s) for s in PLATE])  # dense position -> (element, position)
    q = cases.leaves(cases.gaussians(parted))
    loc, cov = q["b"]
    full = torch.block_diag(*cov.detach())[where][:, where]
    q_dense = cases.leaves({"b": (loc.detach().reshape(1, -1)[:, where], full[None])})
    inputs = {**cases.data(), "Z": torch.randn(3, 3)}
    e = cases.symbolic(ON_PLATES[name], PLATE, inputs)
    got = compile_expectation(e, parted)(cases.moments(q)).expand(e.shape)
    want = compile_expectation(e, dense)(cases.moments(q_dense)).expand(e.shape)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    cotangent = torch.randn(e.shape)
    g_loc, g_cov = cases.gradients(got, cotangent, q)
    d_loc, d_cov = cases.gradients(want, cotangent, q_dense)
    torch.testing.assert_close(g_loc.reshape(1, -1)[:, where], d_loc, rtol=1e-5, atol=1e-6)
    inside = torch.block_diag(*torch.ones_like(cov))[where][:, where].bool()
    spread = torch.block_diag(*g_cov)[where][:, where]
    torch.testing.assert_close(spread[inside], d_cov[0][inside], rtol=1e-5, atol=1e-6)
    assert wide.size == small.size


@pytest.mark.parametrize("rows", ["dense", "plated"])
def test_squares_of_a_factor_model_have_their_closed_form(rows: str) -> None:
    n, d, k = 5, 4, 3
    shapes = {"z": (n, k), "W": (d, k)}
    z = Layout.from_components({"z": (n, k)}, torch.arange(n).repeat_interleave(k))
    plated = Layout.from_components({"W": (d, k)}, torch.arange(d).repeat_interleave(k))
    w = plated if rows == "plated" else Layout.dense({"W": (d, k)}, cases.CPU)
    assert z is not None
    assert w is not None
    s = Structure(dict.fromkeys(shapes, GAUSSIAN), {"z": "z", "W": "W"}, {"z": z, "W": w})
    q = cases.leaves(cases.gaussians(s))
    inputs = {"y": torch.randn(n, d)}
    e = cases.symbolic(lambda x: (x.y - x.z @ x.W.T) ** 2, shapes, inputs)
    expectation = compile_expectation(e, s)
    assert {h.kind for h in expectation.how.values()} == {"exact"}
    value = expectation(cases.moments(q)).expand(n, d)
    mz, vz = q["z"]
    mw, vw = q["W"]
    if rows == "dense":
        mw = mw.reshape(d, k)
        vw = torch.stack([vw[0, i * k : (i + 1) * k, i * k : (i + 1) * k] for i in range(d)])
    variance = (
        torch.einsum("nk,dkl,nl->nd", mz, vw, mz)
        + torch.einsum("dk,nkl,dl->nd", mw, vz, mw)
        + torch.einsum("nkl,dkl->nd", vz, vw)
    )
    expected = (inputs["y"] - mz @ mw.T) ** 2 + variance
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn(n, d)
    for g, h in zip(
        cases.gradients(value, cotangent, q), cases.gradients(expected, cotangent, q), strict=True
    ):
        torch.testing.assert_close(g, h, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_squares_of_data_far_from_zero_keep_their_digits_in_float32(offset: float) -> None:
    shapes = {"u": (), "w": (2,)}
    s = cases.structure({"b": ("u", "w")}, shapes)
    y = (offset + torch.randn(50)).float()
    x = torch.randn(50, 2).float()
    loc = torch.cat([y.mean()[None], 0.1 * torch.randn(2).float()])[None]
    cov = cases.random_gaussian(s.layout["b"], 0.1, torch.float32)[1]

    def mean(dtype: torch.dtype) -> Tensor:
        torch.set_default_dtype(dtype)
        inputs = {"y": y.to(dtype), "X": x.to(dtype)}
        e = cases.symbolic(lambda k: (k.y - k.X @ k.w - k.u) ** 2, shapes, inputs)
        q = Moments({"b": (loc.to(dtype), cov.to(dtype))}, {})
        return compile_expectation(e, cases.structure({"b": ("u", "w")}, shapes))(q)

    exact, rounded = mean(torch.float64), mean(torch.float32)
    # Three sums at the data's magnitude, hence four roundings of it in a residual; expanding the
    # square would leave roundings of its square, eight units here.
    residual = 4 * torch.finfo(torch.float32).eps * (1 + offset)
    assert bool(((rounded - exact).abs() <= 2 * exact.sqrt() * residual + residual**2 + 1e-6).all())


# --- the other families ----------------------------------------------------------------------------


def other(
    family: AbstractFamily, kind: str, shape: tuple[int, ...], event_dim: int = 0
) -> tuple[LatentTensor, Structure]:
    ref = SiteRef("x", shape, event_dim, kind)
    value = torch.full(shape, 1.0 / shape[-1] if kind == "simplex" else 0.5)
    return LatentTensor.make(value, site_expression(ref)), Structure({"x": family}, {"x": "x"}, {})


def _normalised(x: Tensor, c: Tensor) -> Tensor:
    return (c * (x / x.sum(-1, keepdim=True)).log()).sum(-1)


STATISTICS = {
    "Gamma": (GAMMA, "positive", (4,), 0, lambda x, c: c * x - 2 * x.log() + (3 * x).log() + 1),
    "Gamma scale": (GAMMA, "positive", (4,), 0, lambda x, c: x.rsqrt() ** -2 * c + x.sqrt().log()),
    "InverseGamma": (INVERSE_GAMMA, "positive", (4,), 0, lambda x, c: c / x - x.sqrt().log()),
    "Beta": (BETA, "unit", (4,), 0, lambda x, c: c * x.log() + torch.log1p(-x) + (1 - x).log()),
    "Dirichlet": (DIRICHLET, "simplex", (2, 4), 1, _normalised),
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_a_family_are_read_from_its_mean_parameters(name: str) -> None:
    family, kind, shape, event_dim, f = STATISTICS[name]
    x, s = other(family, kind, shape, event_dim)
    c = torch.randn(4)
    build = {
        "Gamma": dist.Gamma, "InverseGamma": dist.InverseGamma, "Beta": dist.Beta,
        "Dirichlet": lambda a, _: dist.Dirichlet(a),
    }[family.name]  # fmt: skip
    q = build(torch.rand(shape) + 2, torch.rand(shape) + 2)
    natural = family.from_distribution(q)
    mean = tuple(m.requires_grad_() for m in family.to_mean(natural))
    expectation = compile_expectation(expression_of(f(x, c)), s)
    assert expectation.how["x"].kind == "exact"
    value = expectation(Moments({}, {"x": mean})).expand(expectation.shape)
    draws = f(q.sample((100_000,)), c)
    # Four or two cells, five standard errors: one false alarm in 400,000.
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((value - draws.mean(0)).abs() <= 5 * error).all())
    gradient = torch.autograd.grad(value.sum(), mean, allow_unused=True)
    moved = tuple(m + 1.0 for m in mean)
    shifted = expectation(Moments({}, {"x": moved})).expand(value.shape).sum() - value.sum()
    slope = sum(g.sum() for g in gradient if g is not None)
    torch.testing.assert_close(shifted, slope)  # affine in the mean parameters


def test_what_is_no_statistic_is_sampled_with_a_reason() -> None:
    for f in (
        lambda x: x.sum().exp(),
        lambda x: (x[0] + x[1]).sqrt(),
        lambda x: (x[0] + 2 * x[1:]) ** 2,
        lambda x: torch.lgamma(x[0] + x[1]),
        lambda x: (1 + x @ x).log(),
    ):
        x, s = other(GAMMA, "positive", (4,))
        how = compile_expectation(expression_of(f(x)), s).how["x"]
        assert how.kind == "sampled"
        assert how.reason


def test_an_opaque_part_is_sampled_and_names_the_op() -> None:
    s = cases.structure(cases.BLOCKS, cases.SHAPES)
    e = cases.symbolic(lambda k: torch.amax(k.w, 0) + k.v.sum(), cases.SHAPES, {})
    how = compile_expectation(e, s).how
    assert (how["w"].kind, how["v"].kind) == ("sampled", "exact")
    assert "amax" in how["w"].reason


def test_a_softmax_of_three_is_averaged_over_fixed_points() -> None:
    """E log sum_k exp(x_k) of 3 independent Gaussians, against a tensor product of Hermite rules."""
    shapes = {"a": (2,), "b": (2,), "c": (2,)}
    s = cases.structure({"a": ("a",), "b": ("b",), "c": ("c",)}, shapes)
    e = cases.symbolic(lambda k: torch.logsumexp(torch.stack([k.a, k.b, k.c]), 0), shapes, {})
    expectation = compile_expectation(e, s)
    assert not expectation.sampled
    assert "quasi Monte Carlo" in expectation.how["a"].reason
    q = cases.gaussians(s, 1.0)
    value = expectation(cases.moments(q))
    grid, weight = cases.grid(3, 30)
    loc = torch.stack([q[n][0].reshape(-1) for n in "abc"], -1)
    sd = torch.stack([q[n][1].diagonal(dim1=-2, dim2=-1).reshape(-1).sqrt() for n in "abc"], -1)
    exact = torch.logsumexp(loc[:, None] + sd[:, None] * grid, -1) @ weight
    torch.testing.assert_close(value, exact, atol=3e-3, rtol=0)


def test_three_predictors_in_a_cell_are_sampled() -> None:
    shapes = {"a": (2,), "b": (2,), "c": (2,)}
    s = cases.structure({"a": ("a",), "b": ("b",), "c": ("c",)}, shapes)
    e = cases.symbolic(
        lambda k: torch.tanh(k.a) * torch.logaddexp(torch.sin(k.a * k.b), k.c), shapes, {}
    )
    assert compile_expectation(e, s).sampled == {"a", "b", "c"}


def likelihood(k: SimpleNamespace, y: Tensor, x: Tensor) -> Tensor:
    return log_density(dist.Normal(x @ k.w + k.u, k.tau.rsqrt()), y)


def test_the_expected_log_density_of_a_regression_is_the_average_over_samples() -> None:
    inputs = cases.data()
    s = cases.structure({"wu": ("w", "u")}, {"w": (2,), "u": ()})
    s = Structure({**s.family, "tau": GAMMA}, {**s.block, "tau": "tau"}, s.layout)
    symbols = {
        n: LatentTensor.make(torch.ones(shape), site_expression(SiteRef(n, shape, 0, kind)))
        for n, shape, kind in (("w", (2,), "real"), ("u", (), "real"), ("tau", (), "positive"))
    }
    e: Expression = expression_of(likelihood(SimpleNamespace(**symbols), inputs["y"], inputs["X"]))
    (loc, cov), noise = cases.random_gaussian(s.layout["wu"]), dist.Gamma(3.0, 2.0)
    expectation = compile_expectation(e, s)
    assert {h.kind for h in expectation.how.values()} == {"exact"}
    statistics = GAMMA.to_mean(GAMMA.from_distribution(noise))
    value = expectation(Moments({"wu": (loc, cov)}, {"tau": statistics})).expand(e.shape)
    count = 200_000
    z = dist.MultivariateNormal(loc[0], cov[0]).sample((count,))
    tau = noise.sample((count, 1))
    location = z[:, :2] @ inputs["X"].T + z[:, 2:]
    draws = dist.Normal(location, tau.rsqrt()).log_prob(inputs["y"])
    error = draws.std(0) / count**0.5
    assert bool(((value - draws.mean(0)).abs() <= 5 * error).all())


def test_constants_with_gradients_receive_them() -> None:
    s = cases.structure(cases.BLOCKS, cases.SHAPES)
    q = cases.gaussians(s)
    inputs = cases.data()
    for f in (
        lambda k: (k.a * k.w + k.a) ** 2,
        lambda k: torch.nn.functional.softplus(k.a * k.w + k.u) * k.a,
        lambda k: torch.exp(k.a * k.w),
        lambda k: torch.tanh(k.a * k.w) * torch.sin(k.v + k.a),
    ):
        a = torch.tensor(0.7, requires_grad=True)
        e = cases.symbolic(f, cases.SHAPES, {**inputs, "a": a})
        got = compile_expectation(e, s.fresh(), learn_constants=True)(cases.moments(q)).sum()
        want = cases.oracle(f, s, q, {**inputs, "a": a}, 11).sum()
        for_got, for_want = (torch.autograd.grad(v, a)[0] for v in (got, want))
        torch.testing.assert_close(for_got, for_want, rtol=1e-5, atol=1e-6)
