"""Small dense linear algebra on the trailing dimensions of batched tensors.

Matrices of one scalar, of which a diagonal posterior has 100,000s, are treated as scalars.

Nothing here adds jitter: a matrix that has no Cholesky factor is reported by
`torch.linalg.cholesky`, not repaired.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "all_finite",
    "broadcast_shapes",
    "cholesky",
    "inverse_precision",
    "log_diagonal_sum",
    "matvec",
    "or_zeros",
    "outer",
    "precision_to_scale_tril",
    "solve_lower",
    "solve_precision",
    "sum_gradients",
    "sum_to_dims",
    "symmetrise",
    "whiten",
    "without_repeats",
]


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape, by the usual rules; torch's own takes 0.5 ms a call and imports sympy."""
    ndim = max((len(s) for s in shapes), default=0)
    result = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape, ndim - len(shape)):
            if size != 1 and result[i] not in (1, size):
                raise ValueError(f"shapes {[tuple(s) for s in shapes]} do not broadcast")
            if size != 1:
                result[i] = size
    return tuple(result)


def all_finite(x: Tensor) -> bool:
    """Whether all elements are: told by their sum, in one pass over them, unless that overflows."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient as autograd returns it, where None stands for zero."""
    return torch.zeros_like(like) if gradient is None else gradient


def sum_gradients(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, where None stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def sum_to_dims(x: Tensor, dims: set[int]) -> Tensor:
    """Sum over all axes but `dims` (negative); these stay, in order."""
    others = [d for d in range(-x.ndim, 0) if d not in dims]
    return x.sum(others) if others else x


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """A x, for `matrix` of shape (*batch, n, k) and `vector` of shape (*batch, k)."""
    if matrix.shape[-2:] == (1, 1):
        return matrix.squeeze(-1) * vector
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def cholesky(matrix: Tensor) -> Tensor:
    """The lower triangular L with L L^T = M; an error if M is not positive definite."""
    if matrix.shape[-1] == 1 and bool((matrix > 0).all()):
        return matrix.sqrt()
    result: Tensor = torch.linalg.cholesky(matrix)
    return result


def outer(left: Tensor, right: Tensor) -> Tensor:
    """The matrix x y^T, for vectors of shapes (*batch, n) and (*batch, k)."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def symmetrise(matrix: Tensor) -> Tensor:
    """(M + M^T) / 2."""
    return (matrix + matrix.mT) / 2


def solve_lower(factor: Tensor, vector: Tensor) -> Tensor:
    """L^-1 x, for a lower triangular `factor` and a `vector` of shape (*batch, n)."""
    solution: Tensor = torch.linalg.solve_triangular(factor, vector.unsqueeze(-1), upper=False)
    return solution.squeeze(-1)


def solve_precision(factor: Tensor, vector: Tensor) -> Tensor:
    """(L L^T)^-1 x, for a Cholesky `factor` and a `vector` of shape (*batch, n)."""
    if factor.shape[-1] == 1:
        return vector / factor.squeeze(-1).square()
    return torch.cholesky_solve(vector.unsqueeze(-1), factor).squeeze(-1)


def inverse_precision(factor: Tensor) -> Tensor:
    """(L L^T)^-1 = T^T T with T = L^-1, for a Cholesky `factor`; symmetric to the last digit.

    Not `torch.cholesky_inverse`, whose forward-mode derivative is wrong in torch 2.13.
    """
    if factor.shape[-1] == 1:
        return factor.square().reciprocal()
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
    return inverse.mT @ inverse


def whiten(factor: Tensor, matrix: Tensor) -> Tensor:
    """L^-1 M L^-T, for a lower triangular `factor` and a symmetric `matrix`."""
    if factor.shape[-1] == 1:
        return matrix / factor.square()
    half = torch.linalg.solve_triangular(factor, matrix, upper=False)
    return symmetrise(torch.linalg.solve_triangular(factor, half.mT, upper=False))


def log_diagonal_sum(factor: Tensor) -> Tensor:
    """sum_i log L_ii, which is half the log-determinant of L L^T."""
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def precision_to_scale_tril(precision: Tensor) -> Tensor:
    """The lower triangular T with T T^T = P^-1, from one factorisation and no inverse of P.

    With J the exchange matrix and J P J = L L^T, the matrix J L J is upper triangular and P = (J L
    J)(J L J)^T, so that T = (J L J)^-T.
    """
    if precision.shape[-1] == 1:
        return cholesky(precision).reciprocal()
    upper: Tensor = torch.linalg.cholesky(precision.flip(-2, -1)).flip(-2, -1)
    identity = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    scale_tril: Tensor = torch.linalg.solve_triangular(upper.mT, identity, upper=False)
    return scale_tril


def without_repeats(x: Tensor, ndim: int) -> Tensor:
    """A view of size one along those of the first `ndim` axes along which all values are the same.

    Of a tensor with a gradient only expanded axes count: equal values may be of different origins.
    """
    for d in range(ndim):
        n = x.shape[d]
        if n < 2 or not x.numel():
            continue
        first = x.narrow(d, 0, 1)
        if x.stride(d) == 0 or (
            not x.requires_grad
            and torch.equal(x.narrow(d, n - 1, 1), first)
            and torch.equal(x, first.expand_as(x))
        ):
            x = first
    return x
