"""Cumulative sums as a statistic: the same values in every coordinates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_cvi.algebra.cumulate import cumulated_axes, in_innovations, in_sums
from pyro_cvi.algebra.evaluate import evaluate, point_reader
from pyro_cvi.algebra.expression import SiteRef, site_expression
from pyro_cvi.algebra.latent import LatentTensor, expression_of

SHAPE = (40, 3, 6)
C = torch.randn(40, 1, 6)
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first axis": lambda z, s: z.cumsum(0),
    "last axis": lambda z, s: torch.cumsum(z, dim=-1),
    "middle axis": lambda z, s: z.cumsum(1),
    "scaled by a constant": lambda z, s: (2.0 * z).cumsum(0),
    "scaled along other axes": lambda z, s: (C[:1] * z).cumsum(0),
    "scaled by a latent": lambda z, s: (s * z).cumsum(0),
    "with a drift": lambda z, s: (0.3 + s + z).cumsum(0),
    "with data": lambda z, s: (C + z).cumsum(0),
    "read at the end": lambda z, s: z.cumsum(0)[-1],
    "read at some": lambda z, s: z.cumsum(0)[torch.tensor([3, 3, 7]), :, 2],
    "reversed after": lambda z, s: z.cumsum(0).flip(0),
    "times itself": lambda z, s: z.cumsum(0).square() * z,
    "inside of a function": lambda z, s: (z.cumsum(0) + s * z).sigmoid(),
    "summed over others": lambda z, s: z.cumsum(0).sum((1, 2)),
    "transposed before": lambda z, s: z.transpose(0, 2).cumsum(2),
}
WRITTEN = {
    "scaled along it": lambda z, s: (C * z).cumsum(0),
    "twice": lambda z, s: z.cumsum(0).cumsum(0),
}
WRITTEN["of a part"] = lambda z, s: z[5:].cumsum(0)
WRITTEN["reversed before"] = lambda z, s: z.flip(0).cumsum(0)
WRITTEN["along a diagonal"] = lambda z, s: z[torch.arange(40), torch.arange(40) % 3].cumsum(0)


def values() -> dict[str, Tensor]:
    return {"z": torch.randn(SHAPE), "s": torch.randn(())}


def traced(f: Callable[[Tensor, Tensor], Tensor], point: dict[str, Tensor]) -> LatentTensor:
    refs = [SiteRef(n, tuple(v.shape), v.ndim, "real") for n, v in point.items()]
    symbols = [
        LatentTensor.make(v, site_expression(r)) for r, v in zip(refs, point.values(), strict=True)
    ]
    result = f(*symbols)
    assert isinstance(result, LatentTensor)
    return result


@pytest.mark.parametrize("name", CASES | WRITTEN)
def test_a_sum_has_its_value_in_all_coordinates(name: str) -> None:
    point = values()
    f = (CASES | WRITTEN)[name]
    e = expression_of(traced(f, point))
    real = f(*point.values())
    other = values()  # another point than that of the run
    wanted = f(*other.values())
    for here, result in ((point, real), (other, wanted)):
        torch.testing.assert_close(evaluate(e, point_reader(here)).expand(result.shape), result)
        written = in_innovations(e)
        assert not cumulated_axes(written)
        torch.testing.assert_close(
            evaluate(written, point_reader(here)).expand(result.shape), result
        )
    found = cumulated_axes(e)
    assert bool(found) == (name in CASES or name == "twice")
    for axis in found.get("z", ()):
        sums = {**other, "z": other["z"].cumsum(axis)}
        moved = in_sums(e, {"z": axis})
        assert not cumulated_axes(moved)
        torch.testing.assert_close(evaluate(moved, point_reader(sums)).expand(wanted.shape), wanted)


def test_an_expression_without_sums_is_left_alone() -> None:
    e = expression_of(traced(lambda z, s: z * s, values()))
    assert in_innovations(e) is e
