"""Where the algebra ends: opaque results, numbers read out of torch, writes, printing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import algebra_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pyro_cvi.algebra import LatentTensor, Recorder, expression_of, plain, recording
from pyro_cvi.algebra.evaluate import OpaqueError
from pyro_cvi.algebra.reason import Cause

WITHOUT_RULE: dict[str, Callable[[SimpleNamespace], Any]] = {
    "sort": lambda k: k.u.sort().values,
    "topk": lambda k: torch.topk(k.u, 2)[0],
    "max": lambda k: k.w.max(),
    "max along a dim": lambda k: k.w.max(0).values,
    "amin": lambda k: k.w.amin(0),
    "median": lambda k: k.u.median(),
    "argmax": lambda k: k.u.argmax(),
    "logsumexp along two dims": lambda k: torch.logsumexp(k.w, (0, 1)),
    "logsumexp of many": lambda k: torch.logsumexp(k.u[torch.zeros(40, dtype=torch.long)], 0),
    "cholesky": lambda k: torch.linalg.cholesky(k.m @ k.m.T + torch.eye(4, dtype=k.dtype)),
    "inverse": lambda k: torch.inverse(k.m),
    "solve": lambda k: torch.linalg.solve(k.m, k.c),
    "det": lambda k: k.m.det(),
    "logdet of a real site": lambda k: k.m.logdet(),
    "logdet of a sum": lambda k: torch.logdet(k.Q + torch.eye(3, dtype=k.dtype)),
    "logdet of a cut": lambda k: torch.logdet(k.Q[:, :2, :2]),
    "logdet of rows put together": lambda k: torch.logdet(k.Q[torch.tensor([0, 1, 0]), [0, 1, 2]]),
    "logdet of permuted rows": lambda k: torch.logdet(k.Q[:, [1, 0, 2]]),
    "logdet of a matrix times a vector": lambda k: torch.logdet(k.Q * k.p[:3]),
    "logdet of a negative multiple": lambda k: torch.logdet(-2 * k.Q),
    "logdet of a product": lambda k: torch.logdet(k.Q[0] @ k.Q[1]),
    "slogdet of a sum": lambda k: torch.slogdet(k.Q + 1).logabsdet,
    "norm": lambda k: k.w.norm(),
    "prod": lambda k: k.tau.prod(),
    "var": lambda k: k.w.var(0),
    "cumprod": lambda k: k.tau.cumprod(0),
    "nansum": lambda k: k.w.nansum(),
    "floor": lambda k: k.w.floor(),
    "rounding division": lambda k: torch.div(k.w, 2, rounding_mode="floor"),
    "floor division": lambda k: k.w // 2,
    "remainder": lambda k: k.w % 2,
    "division by zero": lambda k: k.w / 0,
    "comparison": lambda k: k.w > 0,
    "where with a latent condition": lambda k: torch.where(k.w > 0, k.w, 0.0),
    "index by a latent": lambda k: k.c[k.u.argsort()],
    "mask by a latent": lambda k: k.u[k.u > -10],
    "clamp by a tensor": lambda k: k.u.clamp(min=k.c),
    "integer conversion": lambda k: k.w.long(),
    "complex": lambda k: torch.complex(k.u, k.c),
    "convolution": lambda k: F.conv1d(k.c3, torch.ones(1, 3, 2, dtype=k.dtype)),
    "an out= argument": lambda k: torch.add(k.u, 1, out=torch.empty_like(k.c)),
    "a custom cumsum": lambda k: torch.logcumsumexp(k.u, 0),
    "bilinear layer": lambda k: F.bilinear(k.w, k.w, torch.ones(2, 4, 4, dtype=k.dtype)),
    "interpolation by a latent weight tensor's sort": lambda k: torch.lerp(k.c, k.u.sort()[0], 0.5),
}


@pytest.mark.parametrize("op", WITHOUT_RULE)
def test_an_op_without_a_rule_is_opaque_and_names_its_sites(op: str) -> None:
    symbols, _, fresh = cases.namespaces(torch.float64)
    out = WITHOUT_RULE[op](symbols)
    assert isinstance(out, LatentTensor)
    assert cases.is_opaque(out.expression)
    assert out.expression.sites
    assert out.expression.shape == out.shape
    with pytest.raises(OpaqueError, match="no rule|constant in steps, so that only the score"):
        cases.at(out.expression, fresh)


@pytest.mark.parametrize(
    "op",
    [
        "comparison",
        "where with a latent condition",
        "floor",
        "index by a latent",
        "integer conversion",
    ],
)
def test_what_is_constant_in_steps_says_that_it_has_no_gradient(op: str) -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    out = 2 * WITHOUT_RULE[op](symbols) + symbols.s.exp()
    parts = out.expression.opaque
    assert any(o.reason.cause is Cause.NO_GRADIENT for o in parts)


def test_what_follows_an_opaque_part_stays_opaque_with_all_sites() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    out = (symbols.X @ symbols.u.sort().values + symbols.s)[1:] * symbols.tau[0]
    assert out.expression.sites == {"u", "s", "tau"}
    assert cases.is_opaque(out.expression)


def test_one_opaque_argument_does_not_make_its_neighbours_opaque() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    first, second = torch.broadcast_tensors(symbols.u.sort().values, symbols.w)
    assert cases.is_opaque(first.expression)
    assert not cases.is_opaque(second.expression)


READS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "item": lambda k: k.s.item(),
    "float": lambda k: float(k.s),
    "int": lambda k: int(k.s),
    "tolist": lambda k: k.s.tolist(),
    "numpy": lambda k: k.s.detach().numpy(),
    "asarray": lambda k: np.asarray(k.s),
    "math": lambda k: math.exp(k.s),
    "a branch": lambda k: 1 if k.s > 0 else 2,
    "min of Python": lambda k: min(k.s, k.s + 1),
    "torch.tensor": lambda k: torch.tensor([k.s, 1.0]),
    "equal": lambda k: torch.equal(k.s, k.zero_d),
    "allclose": lambda k: torch.allclose(k.s, k.zero_d),
    "membership": lambda k: 1.0 in k.s.reshape(1),
    "new_full": lambda k: k.u.new_full((3,), k.s),
}  # fmt: skip


@pytest.mark.parametrize("way", READS)
def test_a_value_that_leaves_torch_is_recorded(way: str) -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    with recording(Recorder()) as recorder:
        out = READS[way](symbols)
    assert "s" in recorder.read or (isinstance(out, LatentTensor) and out.expression.sites == {"s"})


def test_shapes_and_types_are_not_reads() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    with recording(Recorder()) as recorder:
        w = symbols.w
        assert (len(w), w.shape, w.dim(), w.numel()) == (3, (3, 4), 2, 12)
        assert w.dtype == torch.float64
        assert w.is_floating_point()
        assert not isinstance(torch.zeros_like(w), LatentTensor)
        assert not isinstance(w.new_zeros(2), LatentTensor)
    assert not recorder.read
    assert not recorder.written


def test_printing_is_not_a_read() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    with recording(Recorder()) as recorder:
        assert "tensor" in repr(symbols.w)
        assert str(symbols.w + 1)
        assert f"{symbols.s:.2f}" == f"{plain(symbols.s):.2f}"
        print(symbols.w)
    assert not recorder.read


WRITES: dict[str, Callable[[SimpleNamespace, torch.Tensor], Any]] = {
    "assignment": lambda k, f: f.__setitem__(slice(1, None), k.u[1:]),
    "copy_": lambda k, f: f.copy_(k.u),
    "add_": lambda k, f: f.add_(k.u),
    "index_put_": lambda k, f: f.index_put_((torch.arange(4),), k.u),
    "fill_": lambda k, f: f.fill_(k.u[0]),
    "out=": lambda k, f: torch.add(k.u, 1, out=f),
    "scatter_": lambda k, f: f.scatter_(0, torch.arange(4), k.u),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_write_into_a_plain_tensor_is_recorded(way: str) -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    with recording(Recorder()) as recorder:
        WRITES[way](symbols, torch.zeros(4))
    assert "u" in recorder.written


def test_an_in_place_op_that_cancels_the_latent_leaves_no_stale_expression() -> None:
    symbols, _, fresh = cases.namespaces(torch.float64)
    x = symbols.tau * 1
    x /= symbols.tau
    cases.assert_same(cases.at(expression_of(x), fresh), torch.ones(4))


def test_an_augmented_assignment_to_a_constant_gives_a_latent() -> None:
    symbols, _, fresh = cases.namespaces(torch.float64)
    f = torch.ones(4)
    f *= symbols.u
    cases.assert_same(cases.at(f.expression, fresh), fresh["u"])


def test_a_copy_of_a_latent_is_the_same_symbol() -> None:
    symbols, _, _ = cases.namespaces(torch.float64)
    assert copy.deepcopy(symbols.w).expression is symbols.w.expression


def test_gradients_reach_constants_through_the_expression() -> None:
    symbols, _, fresh = cases.namespaces(torch.float64)
    scale = torch.tensor(2.0, requires_grad=True)
    exponent = torch.tensor(1.5, requires_grad=True)
    value = cases.at((symbols.u * scale + symbols.tau**exponent).expression, fresh).sum()
    for_scale, for_exponent = torch.autograd.grad(value, (scale, exponent))
    cases.assert_same(for_scale, fresh["u"].sum())
    cases.assert_same(for_exponent, (fresh["tau"] ** exponent * fresh["tau"].log()).sum())
