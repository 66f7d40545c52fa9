"""`linalg` against explicit inverses, values and forward derivatives, on a prescribed spectrum."""

import pytest
import torch

from pyro_cvi import linalg


def spd(n: int = 4) -> torch.Tensor:
    basis = torch.linalg.qr(torch.randn(2, n, n)).Q
    return linalg.symmetrise(basis @ torch.diag(torch.logspace(-2, 2, n)) @ basis.mT)


def test_solves_are_products_with_the_inverse() -> None:
    matrix, vector, inner = spd(), torch.randn(2, 4), spd()
    factor, inverse = torch.linalg.cholesky(matrix), torch.linalg.inv(matrix)
    lower = torch.linalg.inv(factor)
    for actual, expected in [
        (linalg.matvec(matrix, vector), torch.einsum("bij,bj->bi", matrix, vector)),
        (linalg.outer(vector, vector), torch.einsum("bi,bj->bij", vector, vector)),
        (linalg.solve_lower(factor, vector), linalg.matvec(lower, vector)),
        (linalg.solve_precision(factor, vector), linalg.matvec(inverse, vector)),
        (linalg.inverse_precision(factor), inverse),
        (linalg.whiten(factor, inner), lower @ inner @ lower.mT),
        (2 * linalg.log_diagonal_sum(factor), torch.logdet(matrix)),
    ]:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_scale_tril_is_lower_and_squares_to_the_covariance() -> None:
    matrix = spd()
    scale_tril = linalg.precision_to_scale_tril(matrix)
    assert torch.equal(scale_tril, scale_tril.tril())
    covariance = scale_tril @ scale_tril.mT
    torch.testing.assert_close(covariance, torch.linalg.inv(matrix), rtol=1e-10, atol=1e-10)


def test_inverse_has_the_right_forward_derivative() -> None:
    # That of torch.cholesky_inverse is wrong.
    matrix, change = spd(), spd()

    def inverse(m: torch.Tensor) -> torch.Tensor:
        return linalg.inverse_precision(torch.linalg.cholesky(m))

    value, tangent = torch.func.jvp(inverse, (matrix,), (change,))
    torch.testing.assert_close(tangent, -value @ change @ value, rtol=1e-9, atol=1e-9)


def test_matrices_of_one_scalar_are_treated_as_any_other() -> None:
    """Against the same scalars in 2 x 2 diagonal matrices."""
    a, m, v = torch.rand(5, 1, 1) + 0.5, torch.randn(5, 1, 1), torch.randn(5, 1)
    wide = [torch.diag_embed(x.reshape(5, 1).expand(5, 2)) for x in (a, m)]
    for f in (linalg.cholesky, linalg.inverse_precision, linalg.precision_to_scale_tril):
        torch.testing.assert_close(f(a)[:, 0, 0], f(wide[0])[:, 0, 0])
    torch.testing.assert_close(linalg.whiten(a, m)[:, 0, 0], linalg.whiten(*wide)[:, 0, 0])
    for g in (linalg.matvec, linalg.solve_precision):
        torch.testing.assert_close(g(a, v)[:, 0], g(wide[0], v.expand(5, 2))[:, 0])
    with pytest.raises(RuntimeError, match="positive"):
        linalg.cholesky(-a)
