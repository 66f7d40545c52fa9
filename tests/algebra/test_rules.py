"""Every rule: the expression of f(latents), at fresh values, is f(fresh values)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import algebra_cases as cases
import pytest
import torch
from algebra_cases import assert_same, at
from torch import Tensor

from pyro_cvi.algebra import LatentTensor, SiteRef, latent, site_expression
from pyro_cvi.algebra.expression import Group, Link, Opaque
from pyro_cvi.algebra.latent import rules

NEEDS_A_GPU = {"cuda"}
THROUGH = {"to": torch.float32, "type": torch.float32, "double": torch.float32}
"""Conversions that round on their way: an expression keeps the digits of its parts."""
FORMS = [(name, form) for name, forms in cases.CASES.items() for form in forms]
DTYPES = [torch.float64, torch.float32]


def test_every_registered_rule_has_a_case_and_every_case_a_rule() -> None:
    without = set(rules()) - NEEDS_A_GPU - {n for n, group in cases.CASES.items() if group}
    assert not without, f"rules without a case: {sorted(without)}"
    assert not set(cases.CASES) - set(rules()), "cases of rules that do not exist"


@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{n}: {f}" for n, f in FORMS])
def test_the_expression_at_fresh_values_is_the_function_at_fresh_values(
    name: str, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols, plain, fresh = cases.namespaces(dtype)
    called = []
    rule = rules()[name]

    def spy(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return rule(*args, **kwargs)

    monkeypatch.setitem(latent._RULES, name, spy)
    results = cases.outputs(cases.run(form, symbols))
    expected = cases.outputs(cases.run(form, plain))
    assert called, "the case does not run the rule it stands for"
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        if not isinstance(got, LatentTensor):  # constant: then it must not depend on the values
            eps = torch.finfo(want.dtype).eps if want.is_floating_point() else 0
            torch.testing.assert_close(got, want, atol=20 * eps, rtol=20 * eps)
            continue
        assert not cases.is_opaque(got.expression)
        assert got.expression.shape == want.shape
        eps = max(torch.finfo(d).eps for d in (dtype, want.dtype, THROUGH.get(name, dtype)))
        digits_lost = 200 * eps / torch.finfo(want.dtype).eps
        cases.assert_same(cases.at(got.expression, fresh), want, digits_lost)


@pytest.mark.parametrize("seed", range(200))
def test_random_programs_obey_the_same_law(seed: int) -> None:
    program = cases.random_program(seed)
    symbols, plain, fresh = cases.namespaces(torch.float64)
    result, want = program(symbols), program(plain)
    assert isinstance(result, LatentTensor)
    assert not cases.is_opaque(result.expression)
    # Six ops of matrix products may grow the values by 1e4 before they cancel.
    cases.assert_same(cases.at(result.expression, fresh), want, 1e5)


def test_the_value_of_a_latent_is_what_torch_computes() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    here = {n: latent.plain(getattr(symbols, n)) for n in cases.SITES}
    out = torch.exp(symbols.X @ symbols.u + symbols.s)
    assert torch.equal(latent.plain(out), torch.exp(symbols.X @ here["u"] + here["s"]))


Claim = Callable[[Any], torch.Tensor]
EXACT: dict[str, Claim] = {
    "a power of a positive site": lambda k: k.tau**-0.5,
    "the scale of a precision": lambda k: 1 / k.tau.sqrt(),
    "back from the scale": lambda k: (2 * k.tau).rsqrt() ** -2,
    "the log of a monomial": lambda k: (2 * k.tau * k.b).log(),
    "exp of a log": lambda k: (2 * k.tau.log()).exp(),
    "log of an exp": lambda k: torch.log(k.u.exp() * k.w.exp()),
    "log(1 - b)": lambda k: torch.log(1 - k.b) + torch.log1p(-k.b),
    "division by a simplex site's sum": lambda k: (k.th / k.th.sum(-1, keepdim=True)).log(),
    "a square of a predictor": lambda k: (k.X @ k.u + k.s - 1) ** 2,
    "the log-determinant of scaled matrices": lambda k: torch.logdet(2 * k.tau[0] * k.Q[k.j]),
    "the log of a determinant": lambda k: torch.det(k.Q).log(),
    "an index of a power": lambda k: k.tau.rsqrt()[k.i],
}


@pytest.mark.parametrize("claim", EXACT)
def test_no_link_hides_what_the_algebra_knows(claim: str) -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    assert not cases.links(EXACT[claim](symbols).expression)


def test_the_sum_over_a_simplex_site_is_the_constant_one() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    assert not isinstance(symbols.th.sum(-1), LatentTensor)
    assert not isinstance(symbols.th[torch.tensor([1, 0, 1])].sum(-1), LatentTensor)
    assert isinstance(symbols.th.T.sum(-1), LatentTensor)


@pytest.mark.parametrize("name", ["log", "rsqrt", "square", "log1p", "power of a product"])
def test_functions_of_sites_that_are_put_together_are_those_of_each(name: str) -> None:
    functions = {
        "log": torch.log,
        "rsqrt": torch.rsqrt,
        "square": torch.square,
        "log1p": lambda x: torch.log1p(-0.5 * x / (0.5)),
        "power of a product": lambda x: (3.0 * x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])) ** -0.5,
    }
    refs = {n: SiteRef(n, (), 0, "unit") for n in "pqr"}
    point = {n: torch.tensor(v) for n, v in zip("pqr", (0.2, 0.5, 0.9), strict=True)}
    which = torch.tensor([2, 0, 0, 1, 2])

    def build(values: dict[str, Tensor]) -> Tensor:
        return functions[name](torch.stack(list(values.values()))[which])

    symbols = {n: LatentTensor.make(torch.tensor(0.4), site_expression(r)) for n, r in refs.items()}
    e = build(symbols).expression
    assert not any(isinstance(o, Link | Group | Opaque) for t in e.terms for o in t.operands)
    assert_same(at(e, point), build(point))


def test_where_terms_meet_a_function_is_not_split() -> None:
    p, q = (
        LatentTensor.make(torch.tensor(0.4), site_expression(SiteRef(n, (), 0, "positive")))
        for n in "pq"
    )
    half = torch.tensor([1.0, 0.0, 1.0])
    e = torch.log(p * half + q * half.flip(0)).expression  # the ends have both, the middle none
    point = {"p": torch.tensor(0.3), "q": torch.tensor(2.0)}
    expected = torch.log(0.3 * half + 2.0 * half.flip(0))
    torch.testing.assert_close(at(e, point), expected)
    assert any(isinstance(o, Link) for t in e.terms for o in t.operands)
