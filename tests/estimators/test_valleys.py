"""A function has a valley on a grid if it falls and rises again, for any cell."""

import pytest
import torch

from pyro_cvi.estimators.valleys import has_valley

X = torch.linspace(-3.0, 3.0, 33)


@pytest.mark.parametrize(
    ("function", "sign", "expected"),
    [
        (lambda x: -torch.nn.functional.softplus(x), 1.0, False),
        (lambda x: x.exp(), 1.0, False),
        (lambda x: -(x - 0.5).square(), 1.0, False),
        (lambda x: (x - 0.5).square(), -1.0, False),
        (lambda x: (x - 0.5).square(), 1.0, True),
        (lambda x: -(-20 * x.square()).exp(), 1.0, True),
        (lambda x: torch.sin(2 * x), 1.0, True),
        (lambda x: torch.sin(2 * x), 0.0, True),
        (lambda x: x.square(), 0.0, False),
        (lambda x: torch.ones_like(x), 1.0, False),
        (lambda x: -x.square() + 1e-4 * torch.sin(20 * x), 1.0, False),
        (lambda x: (100 * x).exp() * 1e300, 1.0, False),
    ],
)
def test_a_valley_is_an_inner_minimum_that_is_no_ripple(function, sign, expected):
    assert has_valley(function(X)[:, None], sign) is expected


def test_one_cell_is_enough():
    values = torch.stack([-X.square(), X.square()], -1)
    assert has_valley(values, 1.0)
    assert not has_valley(values[:, :1], 1.0)
