"""Expectations of one Gamma, inverse Gamma or Beta scalar, against multi-precision integrals."""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.estimators.univariate import Points, family_expectation
from pyro_cvi.families import BETA, GAMMA, INVERSE_GAMMA, AbstractFamily

mp.mp.dps = 30
FUNCTIONS: dict[str, tuple[Callable[[Points], Tensor], Callable[[mp.mpf], mp.mpf]]] = {
    "lgamma(1 + x)": (lambda p: torch.lgamma(1 + p.x), lambda x: mp.loggamma(1 + x)),
    "log(1 + x)": (lambda p: torch.log1p(p.x), lambda x: mp.log(1 + x)),
    "sqrt(x)": (lambda p: p.power(0.5), mp.sqrt),
    "tanh(x)": (lambda p: torch.tanh(p.x), mp.tanh),
}
SHAPES = [1e-3, 0.02, 0.3, 1.0, 2.5, 40.0, 3000.0]


def gamma_integral(h: Callable[[mp.mpf], mp.mpf], a: float, b: float) -> mp.mpf:
    """E h(x) for x ~ Gamma(a, b), in t = log x, in pieces around where the density is."""
    a, b = mp.mpf(a), mp.mpf(b)
    top, width = mp.log(max(a, 1) / b), 1 / mp.sqrt(max(a, 1))
    cuts = [top - 60 / a - 40 * width, top - 20 / a - 20 * width, top - 5 / a - 8 * width]
    cuts += [top - 3 * width, top, top + 3 * width, top + 8 * width]
    cuts = sorted(cuts)

    def density(t: mp.mpf) -> mp.mpf:
        return mp.exp(a * (t - top) - b * mp.exp(t) + b * mp.exp(top))

    weight = mp.quad(density, cuts)
    return mp.quad(lambda t: h(mp.exp(t)) * density(t), cuts) / weight


def beta_integral(h: Callable[[mp.mpf], mp.mpf], a: float, b: float) -> mp.mpf:
    """E h(x) for x ~ Beta(a, b), in the logit."""
    a, b = mp.mpf(a), mp.mpf(b)
    top = mp.log(max(a, 1) / max(b, 1))
    width = mp.sqrt(1 / max(a, 1) + 1 / max(b, 1))
    cuts = [top - 60 / a - 40 * width, top - 12 / a - 10 * width, top - 3 * width, top]
    cuts += [top + 3 * width, top + 12 / b + 10 * width, top + 60 / b + 40 * width]

    def density(t: mp.mpf) -> mp.mpf:
        return mp.exp(-a * mp.log1p(mp.exp(-t)) - b * mp.log1p(mp.exp(t)))

    weight = mp.quad(density, cuts)
    return mp.quad(lambda t: h(1 / (1 + mp.exp(-t))) * density(t), cuts) / weight


def evaluate(
    family: AbstractFamily, natural: tuple[Tensor, ...], f: Callable[[Points], Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    mean = tuple(m.detach().requires_grad_() for m in family.to_mean(natural))
    value = family_expectation(family, natural, mean, lambda p, _: f(p), natural[0].numel())
    return value.detach(), torch.autograd.grad(value.sum(), mean)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("a", SHAPES)
def test_values_are_those_of_multi_precision_integrals(a: float, name: str) -> None:
    f, h = FUNCTIONS[name]
    one = torch.ones(1)
    cases = {
        "Gamma": (GAMMA, (a * one - 1, -0.7 * one), gamma_integral(h, a, 0.7)),
        "Beta": (BETA, (a * one - 1, 1.7 * one), beta_integral(h, a, 2.7)),
        "Beta turned": (BETA, (0.4 * one, a * one - 1), beta_integral(h, 1.4, a)),
    }
    if a > 1:
        inverse = gamma_integral(lambda x: h(1 / x), a, 0.7)
        cases["InverseGamma"] = (INVERSE_GAMMA, (-a * one - 1, -0.7 * one), inverse)
    for case, (family, natural, expected) in cases.items():
        value, _ = evaluate(family, natural, f)
        assert float(value) == pytest.approx(float(expected), rel=1e-9, abs=1e-12), case


@pytest.mark.parametrize("family", [GAMMA, INVERSE_GAMMA, BETA], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_that_of_the_value_in_mean_parameters(
    family: AbstractFamily, name: str
) -> None:
    f, _ = FUNCTIONS[name]
    a, b = torch.tensor([0.3, 2.0, 30.0]), torch.tensor([0.5, 1.5, 20.0])
    natural = {"Gamma": (a - 1, -b), "Beta": (a - 1, b - 1), "InverseGamma": (-a - 5, -b)}
    n = natural[family.name]
    _, gradient = evaluate(family, n, f)
    for k in range(2):
        step = 1e-5 * n[k].abs().clamp(min=0.1)
        up, down = (
            tuple(x + s * step if i == k else x for i, x in enumerate(n)) for s in (1.0, -1.0)
        )
        change = evaluate(family, up, f)[0] - evaluate(family, down, f)[0]
        moved = tuple(x - y for x, y in zip(family.to_mean(up), family.to_mean(down), strict=True))
        expected = sum(g * m for g, m in zip(gradient, moved, strict=True))
        torch.testing.assert_close(change, expected, rtol=1e-5, atol=1e-12)


def test_statistics_are_their_means_for_all_shapes() -> None:
    a = torch.logspace(-6, 7, 40)
    value, (g_log, g_x) = evaluate(GAMMA, (a - 1, -2 * a), lambda p: p.log)
    torch.testing.assert_close(value, GAMMA.to_mean((a - 1, -2 * a))[0], rtol=1e-9, atol=1e-9)
    small = a < 1e4  # beyond, the Fisher matrix is singular to the rounding of the nodes
    torch.testing.assert_close(g_log[small], torch.ones_like(a[small]), rtol=1e-5, atol=0)
    torch.testing.assert_close(g_x[small], torch.zeros_like(a[small]), rtol=0, atol=1e-4)


def test_an_expectation_that_does_not_exist_is_infinite() -> None:
    a = torch.tensor([1.0, 1.9, 4.0])
    value, _ = evaluate(GAMMA, (a - 1, -torch.ones(3)), lambda p: p.power(-2.0))
    assert value[:2].isinf().all()
    assert float(value[2]) == pytest.approx(1 / 6)  # 1 / ((a - 1) (a - 2))


# --- models ----------------------------------------------------------------------------------------


def best_member(log_joint: Callable[[Tensor], Tensor], family: str, start: list[float]) -> float:
    """The lowest -ELBO over the family, on a fine grid in log x or the logit."""
    from scipy.optimize import minimize

    t = torch.linspace(-36, 36, 60001) if family == "Beta" else torch.linspace(-36, 12, 60001)
    x = torch.sigmoid(t) if family == "Beta" else t.exp()
    jacobian = x.log() + torch.log1p(-x) if family == "Beta" else t
    target = log_joint(x) + jacobian

    def both(point: list[float]) -> tuple[float, object]:
        p = torch.tensor(point, requires_grad=True)
        a, b = p.exp()
        if family == "Beta":
            log_q = dist.Beta(a, b).log_prob(x) + jacobian
        elif family == "Gamma":
            log_q = dist.Gamma(a, b).log_prob(x) + t
        else:
            log_q = dist.InverseGamma(a, b).log_prob(x) + t
        weight = log_q.exp()
        terms = torch.where(weight > 1e-290, weight * (log_q - target), torch.zeros_like(weight))
        loss = terms.sum() * (t[1] - t[0])
        (g,) = torch.autograd.grad(loss, p)
        return float(loss.detach()), g.numpy()

    return float(minimize(both, start, jac=True, tol=1e-12).fun)


@pytest.mark.parametrize("y", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("prior", [(1.0, 1.0), (0.01, 0.01), (5.0, 0.5)])
def test_a_gamma_shape_reaches_the_best_gamma(y: float, prior: tuple[float, float]) -> None:
    """The paper's shape model, y ~ Gamma(z, 1) and z ~ Gamma(a, b)."""

    def model() -> None:
        z = pyro.sample("z", dist.Gamma(*prior))
        pyro.sample("y", dist.Gamma(z, 1.0), obs=torch.tensor(y))

    guide = AutoCVI(model)
    result = CVI(model, guide).run(tol=1e-12, num_steps=100)
    q = guide.posterior("z")
    start = [float(q.concentration.log()) + 0.1, float(q.rate.log()) - 0.1]

    def log_joint(x: Tensor) -> Tensor:
        return dist.Gamma(*prior).log_prob(x) + dist.Gamma(x, 1.0).log_prob(torch.tensor(y))

    assert result.losses[-1] == pytest.approx(best_member(log_joint, "Gamma", start), abs=1e-7)
    assert all(b <= a + 1e-9 for a, b in zip(result.losses, result.losses[1:], strict=False))
    assert result.num_steps < 40


def scale(x: Tensor) -> Tensor:
    """A scale with a Gamma prior, as many write it; 1/x^2 has no mean under the prior."""
    y = torch.tensor([0.5, -1.2, 2.0])
    return dist.Gamma(2.0, 1.0).log_prob(x) + dist.Normal(0.0, x[..., None]).log_prob(y).sum(-1)


def odds(x: Tensor) -> Tensor:
    return dist.Beta(2.0, 2.0).log_prob(x) + dist.Normal(x, 0.3).log_prob(torch.tensor(0.9))


def inverse(x: Tensor) -> Tensor:
    y = torch.tensor([0.5, 1.2])
    return dist.InverseGamma(3.0, 2.0).log_prob(x) + dist.Gamma(x[..., None], 1.0).log_prob(y).sum(
        -1
    )


def as_scale() -> None:
    x = pyro.sample("x", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(0.0, x), obs=torch.tensor([0.5, -1.2, 2.0]))


def as_odds() -> None:
    x = pyro.sample("x", dist.Beta(2.0, 2.0))
    pyro.sample("y", dist.Normal(x, 0.3), obs=torch.tensor(0.9))


def as_inverse() -> None:
    x = pyro.sample("x", dist.InverseGamma(3.0, 2.0))
    with pyro.plate("rows", 2):
        pyro.sample("y", dist.Gamma(x, 1.0), obs=torch.tensor([0.5, 1.2]))


@pytest.mark.parametrize(
    ("model", "log_joint", "family"),
    [(as_scale, scale, "Gamma"), (as_odds, odds, "Beta"), (as_inverse, inverse, "InverseGamma")],
)
def test_other_factors_of_one_scalar_reach_the_best_member(
    model: Callable[[], None], log_joint: Callable[[Tensor], Tensor], family: str
) -> None:
    guide = AutoCVI(model)
    result = CVI(model, guide).run(tol=1e-12, num_steps=200)
    assert not guide.plan.sampled_sites()
    q = guide.posterior("x")
    names = ("concentration1", "concentration0") if family == "Beta" else ("concentration", "rate")
    start = [float(getattr(q, n).log()) + 0.1 for n in names]
    assert result.losses[-1] == pytest.approx(best_member(log_joint, family, start), abs=1e-6)


def test_many_cells_of_many_sites_equal_each_on_its_own() -> None:
    y = torch.rand(40) * 5 + 0.1
    group = torch.arange(40) % 4

    def plated(y: Tensor) -> None:
        with pyro.plate("groups", 4):
            z = pyro.sample("z", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", 40):
            pyro.sample("y", dist.Gamma(z[group], 2.0), obs=y)

    def single(y: Tensor) -> None:
        z = pyro.sample("z", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", 10):
            pyro.sample("y", dist.Gamma(z, 2.0), obs=y)

    guide = AutoCVI(plated)
    CVI(plated, guide).run(y, tol=1e-13, num_steps=200)
    for k in range(4):
        alone = AutoCVI(single)
        CVI(single, alone).run(y[group == k], tol=1e-13, num_steps=200)
        found, expected = guide.posterior("z"), alone.posterior("z")
        torch.testing.assert_close(
            found.concentration[k], expected.concentration, rtol=1e-4, atol=0
        )
        torch.testing.assert_close(found.rate[k], expected.rate, rtol=1e-4, atol=0)
