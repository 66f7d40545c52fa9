"""Mixing of the rows of a fixed-point map: each by itself, to the fixed point that plain rounds have."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_cvi.acceleration import RowMixing

ROWS, WIDTH = 40, 6


def _map(seed: int) -> tuple[Tensor, Tensor]:
    """x -> A x + b of every row, A symmetric with eigenvalues up to 0.97."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(ROWS, WIDTH, WIDTH, generator=generator).double())
    values = torch.rand(ROWS, WIDTH, generator=generator).double() * 0.97
    b = torch.randn(ROWS, WIDTH, generator=generator).double()
    return (basis * values[:, None, :]) @ basis.mT, b


def _rounds(A: Tensor, b: Tensor, rounds: int, mixes: bool = True) -> Tensor:
    """Where so many rounds of the map end, from zero; the state in two tensors."""
    x, mixing = torch.zeros_like(b), RowMixing(len(b))
    for _ in range(rounds):
        y = (A @ x[..., None])[..., 0] + b
        ends, change = [y[:, :2], y[:, 2:]], [(y - x)[:, :2], (y - x)[:, 2:]]
        x = torch.cat(mixing.mixed(ends, change), -1) if mixes else y
    return x


def test_mixed_rounds_come_to_the_fixed_point_long_before_plain_ones() -> None:
    A, b = _map(0)
    wanted = torch.linalg.solve(torch.eye(WIDTH).double() - A, b)
    mixed = (_rounds(A, b, 25) - wanted).norm(dim=-1)
    plain = (_rounds(A, b, 25, mixes=False) - wanted).norm(dim=-1)
    assert float(mixed.median()) < 1e-6 * float(plain.median())
    assert float(mixed.max()) < 0.01 * float(plain.max())


def test_a_row_goes_its_way_whatever_the_others_do() -> None:
    A, b = _map(1)
    alone = torch.cat([_rounds(A[i : i + 1], b[i : i + 1], 9) for i in range(ROWS)])
    torch.testing.assert_close(_rounds(A, b, 9), alone, rtol=1e-6, atol=1e-8)


def test_a_row_whose_residual_grows_begins_anew() -> None:
    mixing = RowMixing(2)
    mixing.mixed([torch.tensor([[1.0], [1.0]])], [torch.tensor([[1.0], [1.0]])])
    end, change = torch.tensor([[3.0], [3.0]]), torch.tensor([[2.0], [0.5]])
    (found,) = mixing.mixed([end], [change])
    assert float(found[0]) == 3.0  # plain: the residual grew from 1 to 2
    # Secant: the residual fell from 1 to 1/2 as the end went from 1 to 3, and is zero at 5.
    torch.testing.assert_close(found[1], torch.tensor([5.0]), rtol=1e-6, atol=0.0)


def test_where_the_residual_does_not_change_the_end_is_taken_as_it_is() -> None:
    mixing = RowMixing(1)
    for value in (1.0, 2.0, 3.0):
        (found,) = mixing.mixed([torch.tensor([[value]])], [torch.tensor([[1.0]])])
        assert float(found) == value
