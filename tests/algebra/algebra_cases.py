"""Sites, constants and, for every rule of the algebra, the calling forms that users write."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_cvi.algebra import Expression, LatentTensor, SiteRef, site_expression
from pyro_cvi.algebra.evaluate import evaluate, point_reader
from pyro_cvi.algebra.expression import Group, Link, Opaque

Function = Callable[[SimpleNamespace], Any]

SITES = {
    ref.name: ref
    for ref in (
        SiteRef("w", (3, 4), 0, "real"),
        SiteRef("m", (4, 4), 0, "real"),
        SiteRef("c3", (2, 3, 4), 0, "real"),
        SiteRef("u", (4,), 0, "real"),
        SiteRef("s", (), 0, "real"),
        SiteRef("one", (1,), 0, "real"),
        SiteRef("none", (0,), 0, "real"),
        SiteRef("tau", (4,), 0, "positive"),
        SiteRef("b", (4,), 0, "unit"),
        SiteRef("th", (2, 3), 1, "simplex"),
        SiteRef("Q", (3, 3, 3), 2, "positive_definite"),
        SiteRef("q1", (2, 1, 1), 2, "positive_definite"),
    )
}


def site_values(dtype: torch.dtype) -> dict[str, Tensor]:
    """A random point in every site's support, away from its boundary."""

    def draw(ref: SiteRef) -> Tensor:
        x = torch.randn(ref.shape, dtype=dtype)
        if ref.kind == "positive":
            return x.abs() + 0.3
        if ref.kind == "unit":
            return 0.1 + 0.8 * torch.sigmoid(x)
        if ref.kind == "positive_definite":
            return x @ x.mT + 0.5 * torch.eye(ref.shape[-1], dtype=dtype)
        return torch.softmax(x, -1) if ref.kind == "simplex" else x

    return {name: draw(ref) for name, ref in SITES.items()}


def constants(dtype: torch.dtype) -> dict[str, Any]:
    """Data as a model has it: floats, indices, masks, learnt layers' weights."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    other = torch.float32 if dtype == torch.float64 else torch.float64
    layer = torch.nn.Linear(4, 2).to(dtype).requires_grad_(False)
    return {
        "X": normal(5, 4), "X3": normal(2, 5, 4), "Y": normal(2, 4, 5), "c": normal(4),
        "M": normal(4, 4), "d": normal(3, 1), "zero_d": normal(), "p": normal(4).abs() + 0.5,
        "layer": layer, "dtype": dtype, "other": other,
        "i": torch.tensor([2, 0, 1, 1, 3]), "j": torch.tensor([[0, 1], [2, 2]]),
        "mask": torch.tensor([True, False, True, True]),
        "mask2": torch.arange(12).reshape(3, 4) % 5 != 0,
        "nothing": torch.tensor([], dtype=torch.long),
    }  # fmt: skip


def namespaces(dtype: torch.dtype) -> tuple[SimpleNamespace, SimpleNamespace, dict[str, Tensor]]:
    """The same model inputs twice: as latents at one point, and plain at a fresh point."""
    fixed = constants(dtype)
    latents = {
        name: LatentTensor.make(value, site_expression(SITES[name]))
        for name, value in site_values(dtype).items()
    }
    fresh = site_values(dtype)
    return SimpleNamespace(**fixed, **latents), SimpleNamespace(**fixed, **fresh), fresh


def outputs(result: Any) -> list[Tensor]:
    """The tensors of a result, which may be a tuple of them."""
    return list(result) if isinstance(result, tuple | list) else [result]


def is_opaque(e: Expression) -> bool:
    """Whether any part of the expression is unknown."""
    return any(
        isinstance(o, Opaque)
        or (isinstance(o, Group) and is_opaque(o.expression))
        or (isinstance(o, Link) and any(is_opaque(a) for a in o.arguments))
        for t in e.terms
        for o in t.operands
    )


def links(e: Expression) -> list[str]:
    """Names of the links at the top of the expression."""
    return [o.name for t in e.terms for o in t.operands if isinstance(o, Link)]


def at(e: Expression, values: dict[str, Tensor]) -> Tensor:
    """The value of an expression at a point, in its full shape."""
    return evaluate(e, point_reader(values)).expand(e.shape)


def assert_same(got: Tensor, expected: Tensor, digits_lost: float = 200.0) -> None:
    """Equal up to `digits_lost` roundings of the largest magnitude: sums have another order."""
    assert got.shape == expected.shape
    eps = torch.finfo(expected.dtype).eps
    size = float(expected.detach().abs().max()) if expected.numel() else 0.0
    rtol = digits_lost * eps
    torch.testing.assert_close(got.to(expected.dtype), expected, rtol=rtol, atol=rtol * (1 + size))


def _inplace(x: Tensor, *steps: Callable[[Tensor], Any]) -> Tensor:
    for step in steps:
        step(x)
    return x


def _read_forms() -> dict[str, list[str]]:
    forms: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "calling_forms.txt").read_text().splitlines():
        if line.startswith("    "):
            forms[next(reversed(forms))] += line.strip().split(" ; ")
        elif not line.startswith("#"):
            forms[line] = []
    return forms


CASES = _read_forms()
"""Rule name -> expressions in the names of the sites and constants above."""


def run(form: str, inputs: SimpleNamespace) -> Any:
    """The value of one calling form."""
    return eval(form, {"torch": torch, "F": F, "inplace": _inplace, **vars(inputs)})


def random_program(seed: int, length: int = 6) -> Function:
    """A seeded composition of about `length` ops over the sites, as a function of the inputs."""
    rng = random.Random(seed)
    steps = [(rng.choice(_STEPS), rng.randrange(4), rng.randrange(4)) for _ in range(length)]

    def run(k: SimpleNamespace) -> Tensor:
        pool = [k.w, k.u.expand(3, 4), k.tau + k.d, k.s * k.c.expand(3, 4)]
        for step, i, j in steps:
            made = step(k, pool[i], pool[j])
            pool[i] = made if made.shape == (3, 4) else made.expand(3, 4)
        return pool[steps[-1][1]]

    return run


_STEPS: list[Callable[[SimpleNamespace, Tensor, Tensor], Tensor]] = [
    lambda k, x, y: x + y,
    lambda k, x, y: x - 2 * y,
    lambda k, x, y: x * y,
    lambda k, x, y: x * k.c,
    lambda k, x, y: k.d * x + 1,
    lambda k, x, y: x / k.p,
    lambda k, x, y: x @ k.M,
    lambda k, x, y: (x @ y.T) @ k.w / 3,
    lambda k, x, y: x.flip(-1),
    lambda k, x, y: x[:, k.i[:4]],
    lambda k, x, y: x[torch.tensor([2, 0, 1])],
    lambda k, x, y: x.T.reshape(3, 4),
    lambda k, x, y: x.reshape(4, 3).T,
    lambda k, x, y: x.sum(0),
    lambda k, x, y: x.mean(-1, keepdim=True),
    lambda k, x, y: (x - y).square(),
    lambda k, x, y: torch.cat([x[:1], y[1:]]),
    lambda k, x, y: torch.stack([x[:, 0], y[:, 1], x[:, 2], k.d[:, 0]], -1),
    lambda k, x, y: torch.where(k.mask, x, y),
    lambda k, x, y: x.tril(),
    lambda k, x, y: x.cumsum(1),
    lambda k, x, y: torch.sigmoid(x),
    lambda k, x, y: F.softplus(x) - y,
    lambda k, x, y: torch.tanh(x),
    lambda k, x, y: (1 + x.square()).rsqrt() * y,
    lambda k, x, y: (0.5 * torch.sin(x)).exp(),
    lambda k, x, y: torch.log1p(x.square()),
    lambda k, x, y: k.tau.log() * x,
    lambda k, x, y: k.tau.rsqrt() + x,
    lambda k, x, y: torch.einsum("ij,kj->ik", x, y) @ k.w / 3,
    lambda k, x, y: torch.roll(x, 1, 0) - y.diagonal().sum(),
    lambda k, x, y: x.unsqueeze(0).expand(2, 3, 4)[1],
    lambda k, x, y: x.gather(1, k.i[:4].expand(3, 4)),
]
