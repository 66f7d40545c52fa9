"""Rules of the LatentTensor: for each torch function the expression of its result.

Four kinds: sums and products, contractions, moves of elements (one rule for all), and elementwise
functions. Whatever is not here makes its result opaque, never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.algebra import functions as fn
from pyro_cvi.algebra.cumulate import cumulated
from pyro_cvi.algebra.expression import (
    Expression,
    Link,
    Stat,
    Statistic,
    add,
    as_expression,
    einsum,
    expand,
    multiply,
    negate,
    permute_axes,
    sum_axes,
)
from pyro_cvi.algebra.latent import LatentTensor, expression_of, plain, register_rule
from pyro_cvi.algebra.moves import concatenate, masked, move

__all__: list[str] = []

E = expression_of
_SMALL = 1 << 16
_LONGEST_CUMSUM = 4096
"""A cumulative sum is a triangular matrix here; beyond this length it is opaque."""
_LONG_CUMSUM = 16
"""Scalars above which a cumulative sum stays one: the block may be a chain in its coordinates,
also where `max_dense_dim` is small. Fewer are one small group of any chain."""


def _constant(x: Any) -> bool:
    return not isinstance(x, LatentTensor)


def _operand(x: Any, out: Tensor) -> Expression:
    """An argument as an expression; constants take the dtype of the result."""
    if isinstance(x, Tensor) and not isinstance(x, LatentTensor):
        return as_expression(x.to(out.dtype))
    return E(x)


# --- sums and products -----------------------------------------------------------------------------


@register_rule("add")
def _add(out: Tensor, x: Any, y: Any, *, alpha: float = 1) -> Expression:
    return add(_operand(x, out), multiply(_operand(y, out), as_expression(float(alpha))))


@register_rule("sub", "subtract")
def _sub(out: Tensor, x: Any, y: Any, *, alpha: float = 1) -> Expression:
    return add(_operand(x, out), multiply(_operand(y, out), as_expression(-float(alpha))))


@register_rule("rsub")
def _rsub(out: Tensor, x: Any, y: Any, *, alpha: float = 1) -> Expression:
    return _sub(out, y, x, alpha=alpha)


@register_rule("neg", "negative")
def _neg(out: Tensor, x: Any) -> Expression:
    return negate(E(x))


@register_rule("positive", "clone", "contiguous", "detach", "property_data")
def _identity(out: Tensor, x: Any, *args: Any, **kwargs: Any) -> Expression:
    return E(x)


@register_rule("to", "type", "type_as", "double", "float", "half", "bfloat16", "cpu", "cuda")
def _to(out: Tensor, x: Any, *args: Any, **kwargs: Any) -> Expression | None:
    source = plain(x)
    if source.dtype == out.dtype and source.device == out.device:
        return E(x)
    return _converted(E(x), out)


def _converted(e: Expression, out: Tensor) -> Expression:
    """A conversion multiplies by one: the constants keep their type, the result takes the new one."""
    one = torch.ones((1,) * e.ndim, dtype=out.dtype, device=out.device)
    return multiply(e, as_expression(one))


@register_rule("mul", "multiply")
def _mul(out: Tensor, x: Any, y: Any) -> Expression:
    if x is y:
        return fn.power(E(x), 2.0)
    return multiply(_operand(x, out), _operand(y, out))


@register_rule("div", "divide", "true_divide")
def _div(out: Tensor, x: Any, y: Any, *, rounding_mode: str | None = None) -> Expression | None:
    if rounding_mode is not None:
        return None
    if isinstance(y, Tensor):
        if _constant(y) and y.numel() <= _SMALL and bool((y == 1).all()):  # a simplex's own sum
            return expand(_operand(x, out), tuple(out.shape))
        return multiply(_operand(x, out), fn.power(_operand(y, out), -1.0))
    return multiply(_operand(x, out), as_expression(1.0 / float(y)))


@register_rule("rdiv")
def _rdiv(out: Tensor, x: Any, y: Any) -> Expression | None:
    return _div(out, y, x)


@register_rule("pow", "float_power")
def _pow(out: Tensor, x: Any, y: Any) -> Expression:
    if _constant(y):
        if not isinstance(y, Tensor):
            return fn.power(E(x), float(y))
        if y.numel() == 1 and not y.requires_grad:
            return expand(fn.power(E(x), float(y)), tuple(out.shape))
        of_exp = fn.power_of_exp(E(x), _operand(y, out))
        return fn.link("pow", torch.pow, E(x), _operand(y, out)) if of_exp is None else of_exp
    return fn.link("pow", torch.pow, _operand(x, out), E(y))


@register_rule("rpow")
def _rpow(out: Tensor, x: Any, y: Any) -> Expression:
    if isinstance(y, int | float) and y > 0:
        return fn.exp(multiply(E(x), as_expression(math.log(y))))
    return fn.link("pow", torch.pow, _operand(y, out), E(x))


@register_rule("square")
def _square(out: Tensor, x: Any) -> Expression:
    return fn.power(E(x), 2.0)


@register_rule("sqrt")
def _sqrt(out: Tensor, x: Any) -> Expression:
    return fn.power(E(x), 0.5)


@register_rule("rsqrt")
def _rsqrt(out: Tensor, x: Any) -> Expression:
    return fn.power(E(x), -0.5)


@register_rule("reciprocal")
def _reciprocal(out: Tensor, x: Any) -> Expression:
    return fn.power(E(x), -1.0)


@register_rule("addcmul")
def _addcmul(out: Tensor, x: Any, a: Any, b: Any, *, value: float = 1) -> Expression:
    product = multiply(_operand(a, out), _operand(b, out))
    return add(_operand(x, out), multiply(product, as_expression(float(value))))


@register_rule("lerp")
def _lerp(out: Tensor, x: Any, y: Any, w: Any) -> Expression:
    step = add(_operand(y, out), negate(_operand(x, out)))
    return add(_operand(x, out), multiply(step, _operand(w, out)))


# --- reductions and contractions -------------------------------------------------------------------


def _dims(x: Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, tuple | list) and len(dim) == 0):
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


@register_rule("sum")
def _sum(out: Tensor, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Expression:
    dims = _dims(plain(x), kwargs.get("axis", dim))
    e = E(x)
    if _sums_to_one(e, dims) or _is_softmax(e, out):
        return expand(Expression((), 1.0), tuple(out.shape))
    return sum_axes(e, dims, keepdim)


def _is_softmax(e: Expression, total: Tensor) -> bool:
    """Whether a sum that is one is that of a softmax: exp(x_k) exp(-log sum exp x), by one term.

    That it is one elsewhere too, the self-check of the model's densities finds.
    """
    if e.has_constant or len(e.terms) != 1:
        return False
    exps = [o for o in e.terms[0].operands if isinstance(o, Link) and o.name == "exp"]
    inside = [p for o in exps for t in o.arguments[0].terms for p in t.operands]
    if not any(isinstance(p, Link) and p.name == "logsumexp" for p in inside):
        return False
    eps = torch.finfo(total.dtype).eps
    return bool(((total - 1).abs() < 100 * eps).all())


def _sums_to_one(e: Expression, dims: Sequence[int]) -> bool:
    """A site on the simplex sums to one over its event axis."""
    if e.has_constant or len(e.terms) != 1 or len(dims) != 1 or len(e.terms[0].operands) != 1:
        return False
    (o,) = e.terms[0].operands
    if not (isinstance(o, Stat) and o.site.kind == "simplex" and o.statistic == Statistic()):
        return False
    axis = dims[0] % e.ndim - e.ndim
    k = o.site.shape[-1]
    if e.terms[0].coefficient != 1 or axis not in o.axes or e.shape[axis] != k:
        return False
    index = o.index.movedim(o.axes.index(axis), -1)
    return bool((index == index[..., :1] // k * k + torch.arange(k, device=index.device)).all())


_MOST_SLICES = 32
"""Classes of a softmax that are told apart; more of them are sampled."""


@register_rule("logsumexp", "special_logsumexp")
def _logsumexp(out: Tensor, x: Any, dim: Any, keepdim: bool = False) -> Expression | None:
    """Zero for the logs of a simplex, as `Categorical(logits=theta.log())` takes them.

    Else a function of the slices along that axis, each of which may be a predictor.
    """
    e, dims = E(x), _dims(plain(x), dim)
    if _sums_to_one(fn.exp(e), dims):
        shape = [1 if i in dims else n for i, n in enumerate(e.shape)] if keepdim else out.shape
        return expand(Expression((), 0.0), tuple(shape))
    n = e.shape[dims[0]] if len(dims) == 1 else 0
    if not 1 <= n <= _MOST_SLICES:
        return None
    slices = [move(e, partial(torch.select, dim=dims[0], index=i)) for i in range(n)]
    value = fn.link("logsumexp", fn.log_sum_exp, *slices)
    return move(value, partial(torch.unsqueeze, dim=dims[0])) if keepdim else value


@register_rule("log_softmax", "special_log_softmax")
def _log_softmax(out: Tensor, x: Any, dim: Any = None, **kwargs: Any) -> Expression | None:
    total = None if dim is None else _logsumexp(out, x, dim, keepdim=True)
    return None if total is None else add(E(x), negate(total))


@register_rule("softmax", "special_softmax")
def _softmax(out: Tensor, x: Any, dim: Any = None, **kwargs: Any) -> Expression | None:
    e = _log_softmax(out, x, dim)
    return None if e is None else fn.exp(e)


@register_rule("mean")
def _mean(out: Tensor, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Expression:
    dims = _dims(plain(x), kwargs.get("axis", dim))
    count = plain(x).numel() // max(out.numel(), 1)
    return multiply(sum_axes(E(x), dims, keepdim), as_expression(1.0 / count))


@register_rule("cumsum")
def _cumsum(out: Tensor, x: Any, dim: int = 0, **kwargs: Any) -> Expression | None:
    dim = kwargs.get("axis", dim)
    n = out.shape[dim]
    if out.numel() > _LONG_CUMSUM:
        kept = cumulated(E(x), dim)
        if kept is not None:
            return kept
    if n > _LONGEST_CUMSUM:
        return None
    return _along(E(x), dim, torch.ones(n, n, dtype=out.dtype, device=out.device).tril())


@register_rule("diff")
def _diff(out: Tensor, x: Any, n: int = 1, dim: int = -1) -> Expression:
    e = E(x)
    for _ in range(n):
        size = e.shape[dim]
        later = move(e, lambda t, size=size: t.narrow(dim, 1, size - 1))  # type: ignore[misc]
        sooner = move(e, lambda t, size=size: t.narrow(dim, 0, size - 1))  # type: ignore[misc]
        e = add(later, negate(sooner))
    return e


def _along(e: Expression, dim: int, matrix: Tensor) -> Expression:
    """Multiply by a matrix along one axis."""
    names = [f"a{i}" for i in range(e.ndim)]
    dim %= e.ndim
    out = [*names[:dim], "out", *names[dim + 1 :]]
    sizes = dict(zip(names, e.shape, strict=True)) | {"out": matrix.shape[0]}
    return einsum([(e, names), (as_expression(matrix), ["out", names[dim]])], out, sizes)


def _contract(out: Tensor, x: Any, y: Any, xs: str, ys: str, zs: str) -> Expression:
    a, b = _operand(x, out), _operand(y, out)
    extra = max(a.ndim - len(xs), b.ndim - len(ys), 0)
    batch = [f"b{i}" for i in range(extra)]
    na = batch[extra - (a.ndim - len(xs)) :] + list(xs)
    nb = batch[extra - (b.ndim - len(ys)) :] + list(ys)
    sizes: dict[str, int] = {}
    for e, names in ((a, na), (b, nb)):
        for size, name in zip(e.shape, names, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    return einsum([(a, na), (b, nb)], batch + list(zs), sizes)


@register_rule("matmul", "mm", "mv", "bmm", "dot", "vdot")
def _matmul(out: Tensor, x: Any, y: Any) -> Expression | None:
    nx, ny = plain(x).ndim, plain(y).ndim
    if nx == 0 or ny == 0:
        return _mul(out, x, y)
    xs = "k" if nx == 1 else "ik"
    ys = "k" if ny == 1 else "kj"
    return _contract(out, x, y, xs, ys, ("i" if nx > 1 else "") + ("j" if ny > 1 else ""))


@register_rule("linalg_vecdot")
def _vecdot(out: Tensor, x: Any, y: Any, *, dim: int = -1) -> Expression:
    product = multiply(_operand(x, out), _operand(y, out))
    return sum_axes(product, [dim], keepdim=False)


@register_rule("embedding")
def _embedding(out: Tensor, indices: Any, weight: Any, *rest: Any, **kwargs: Any) -> Any:
    if isinstance(indices, LatentTensor) or kwargs.get("max_norm") is not None:
        return None
    return move(E(weight), lambda t: t[indices])


@register_rule("linalg_cholesky")
def _cholesky(out: Tensor, x: Any, *args: Any, upper: bool = False) -> Expression | None:
    """The factor of c A is sqrt(c) times that of A, for a constant A and positive c of latents."""
    parts = fn.scaled_matrix(E(x))
    if parts is None or args or upper:
        return None
    factor = torch.linalg.cholesky(parts[1])
    return multiply(fn.power(parts[0], 0.5), as_expression(factor))


@register_rule("inner")
def _inner(out: Tensor, x: Any, y: Any) -> Expression | None:
    if plain(x).ndim == 0 or plain(y).ndim == 0:
        return _mul(out, x, y)
    return _tensordot(out, x, y, ([-1], [-1]))


@register_rule("rmatmul")
def _rmatmul(out: Tensor, x: Any, y: Any) -> Expression | None:
    return _matmul(out, y, x)


@register_rule("outer", "ger")
def _outer(out: Tensor, x: Any, y: Any) -> Expression:
    return _contract(out, x, y, "i", "j", "ij")


@register_rule("linear")
def _linear(out: Tensor, x: Any, weight: Any, bias: Any = None) -> Expression:
    product = (
        _contract(out, x, weight, "k", "jk", "j")
        if plain(weight).ndim == 2
        else _contract(out, x, weight, "k", "k", "")
    )
    return product if bias is None else add(product, _operand(bias, out))


@register_rule("addmm", "addmv", "baddbmm")
def _addmm(
    out: Tensor, c: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1
) -> Expression | None:
    product = _matmul(out, x, y)
    if product is None:
        return None
    scaled = multiply(product, as_expression(float(alpha)))
    return add(multiply(_operand(c, out), as_expression(float(beta))), scaled)


@register_rule("einsum")
def _einsum(out: Tensor, equation: Any, *operands: Any) -> Expression | None:
    if not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "")
    left, _, right = equation.partition("->")
    parts = left.split(",")
    if "->" not in equation:
        letters = sorted(c for c in left if c.isalpha())
        right = ("..." if "..." in left else "") + "".join(
            c for c in letters if letters.count(c) == 1
        )
    widest = max(
        (plain(x).ndim - (len(p) - 3) if "..." in p else 0)
        for p, x in zip(parts, operands, strict=True)
    )
    inputs: list[tuple[Expression, list[str]]] = []
    sizes: dict[str, int] = {}
    for p, x in zip(parts, operands, strict=True):
        e = _operand(x, out)
        names = _expand_ellipsis(p, e.ndim - (len(p) - 3) if "..." in p else 0, widest)
        e, names = _diagonals(e, names)
        for size, name in zip(e.shape, names, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
        inputs.append((e, names))
    return einsum(inputs, _expand_ellipsis(right, widest, widest), sizes)


def _diagonals(e: Expression, names: list[str]) -> tuple[Expression, list[str]]:
    """A letter that one operand repeats is its diagonal."""
    while len(set(names)) < len(names):
        name = next(n for n in names if names.count(n) > 1)
        i = names.index(name)
        j = names.index(name, i + 1)
        e = move(e, partial(torch.diagonal, dim1=i, dim2=j))
        names = [n for k, n in enumerate(names) if k not in (i, j)] + [name]
    return e, names


def _expand_ellipsis(letters: str, count: int, widest: int) -> list[str]:
    if "..." not in letters:
        return list(letters)
    before, after = letters.split("...")
    return [*before, *(f"b{i}" for i in range(widest - count, widest)), *after]


@register_rule("tensordot")
def _tensordot(out: Tensor, x: Any, y: Any, dims: Any = 2, **kwargs: Any) -> Expression:
    a, b = _operand(x, out), _operand(y, out)
    if isinstance(dims, int):
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        left, right = [[d] if isinstance(d, int) else list(d) for d in dims]
    left, right = [d % a.ndim for d in left], [d % b.ndim for d in right]
    na, nb = [f"a{i}" for i in range(a.ndim)], [f"b{i}" for i in range(b.ndim)]
    for i, j in zip(left, right, strict=True):
        nb[j] = na[i]
    kept = [n for i, n in enumerate(na) if i not in left] + [
        n for j, n in enumerate(nb) if j not in right
    ]
    sizes = dict(zip(na, a.shape, strict=True)) | dict(zip(nb, b.shape, strict=True))
    return einsum([(a, na), (b, nb)], kept, sizes)


# --- axes: relabelling only ------------------------------------------------------------------------


def _permuted(e: Expression, order: Sequence[int]) -> Expression:
    order = [d % e.ndim for d in order]
    n = e.ndim
    mapping = {old - n: new - n for new, old in enumerate(order)}
    constant = e.constant
    if isinstance(constant, Tensor):
        constant = constant.expand(e.shape).permute(order)
    return permute_axes(e, mapping, [e.shape[d] for d in order], constant)


@register_rule("permute")
def _permute(out: Tensor, x: Any, *dims: Any, **kwargs: Any) -> Expression:
    dims = kwargs.get("dims", dims)
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return _permuted(E(x), order)


def _swapped(e: Expression, a: int, b: int) -> Expression:
    order = list(range(e.ndim))
    if e.ndim:
        order[a], order[b] = order[b], order[a]
    return _permuted(e, order) if e.ndim else e


@register_rule("transpose", "swapaxes", "swapdims")
def _transpose(out: Tensor, x: Any, *dims: int, **kwargs: int) -> Expression:
    a, b = (*dims, *(kwargs[k] for k in sorted(kwargs)))  # dim0, dim1 or axis0, axis1
    return _swapped(E(x), a, b)


@register_rule("t", "property_T")
def _t(out: Tensor, x: Any) -> Expression:
    return _permuted(E(x), range(E(x).ndim - 1, -1, -1)) if E(x).ndim else E(x)


@register_rule("property_mT", "adjoint", "property_mH", "property_H")
def _mt(out: Tensor, x: Any) -> Expression:
    return _swapped(E(x), -1, -2)


@register_rule("unsqueeze")
def _unsqueeze(out: Tensor, x: Any, dim: int) -> Expression:
    e = E(x)
    dim %= e.ndim + 1
    n = e.ndim + 1
    mapping = {a: (a + e.ndim + (a + e.ndim >= dim)) - n for a in range(-e.ndim, 0)}
    constant = e.constant
    if isinstance(constant, Tensor):
        constant = constant.expand(e.shape).unsqueeze(dim)
    return permute_axes(e, mapping, tuple(out.shape), constant)


@register_rule("expand", "broadcast_to", "expand_as")
def _expand(out: Tensor, x: Any, *args: Any, **kwargs: Any) -> Expression:
    return expand(E(x), tuple(out.shape))


@register_rule("broadcast_tensors")
def _broadcast_tensors(out: Any, *tensors: Any) -> tuple[Expression, ...]:
    if len(tensors) == 1 and isinstance(tensors[0], tuple | list):
        tensors = tuple(tensors[0])
    return tuple(expand(E(x), tuple(o.shape)) for x, o in zip(tensors, out, strict=True))


# --- moves of elements: one rule -------------------------------------------------------------------


def _moved(name: str) -> Callable[..., Any]:
    def rule(out: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        method: Callable[..., Any] = _MOVES[name]
        latent_arguments = any(isinstance(a, LatentTensor) for a in _flat((args, kwargs)))
        if latent_arguments and name not in ("view_as", "reshape_as"):  # those take only its shape
            return None
        e = E(x)
        if isinstance(out, tuple | list):
            return tuple(move(e, partial(_part, method, i, args, kwargs)) for i in range(len(out)))
        return move(e, lambda t: method(t, *args, **kwargs))

    return rule


def _part(
    method: Callable[..., Any], i: int, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor
) -> Tensor:
    """The i-th of the tensors that an op such as split returns."""
    part: Tensor = method(t, *args, **kwargs)[i]
    return part


def _flat(x: Any) -> list[Any]:
    if isinstance(x, tuple | list):
        return [leaf for v in x for leaf in _flat(v)]
    if isinstance(x, dict):
        return [leaf for v in x.values() for leaf in _flat(v)]
    return [x]


_MOVES: dict[str, Callable[..., Any]] = {
    "getitem": lambda t, index: t[index],
    "reshape": torch.Tensor.reshape,
    "view": lambda t, *shape, size=None: t.reshape(*shape) if size is None else t.reshape(size),
    "view_as": lambda t, other: t.reshape(other.shape),
    "reshape_as": lambda t, other: t.reshape(other.shape),
    "property_real": lambda t: t,
    **{
        name: getattr(torch.Tensor, name)
        for name in [
            "flatten", "unflatten", "squeeze", "movedim", "moveaxis", "ravel", "select", "narrow",
            "index_select", "gather", "masked_select", "take", "repeat", "repeat_interleave", "tile",
            "flip", "fliplr", "flipud", "roll", "rot90", "diagonal", "split", "chunk", "unbind",
            "unfold", "tensor_split", "split_with_sizes", "hsplit", "vsplit",
        ]
    },
    "take_along_dim": lambda t, indices, dim=None: (
        t.reshape(-1)[indices.reshape(-1)]
        if dim is None
        else torch.take_along_dim(t, indices, dim)
    ),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
}  # fmt: skip
for _key in _MOVES:
    register_rule(_key)(_moved(_key))


@register_rule("cat", "concat", "concatenate")
def _cat(out: Tensor, tensors: Any, dim: int = 0, **kwargs: Any) -> Expression:
    return concatenate([_operand(x, out) for x in tensors], kwargs.get("axis", dim), out)


@register_rule("stack")
def _stack(out: Tensor, tensors: Any, dim: int = 0, **kwargs: Any) -> Expression:
    dim %= out.ndim
    one = out.narrow(dim, 0, 1)
    parts = [_unsqueeze(one, _as_latent(x, out), dim) for x in tensors]
    return concatenate(parts, dim, out)


@register_rule("hstack")
def _hstack(out: Tensor, tensors: Any) -> Expression:
    parts = [move(_operand(x, out), torch.atleast_1d) for x in tensors]
    return concatenate(parts, 0 if out.ndim == 1 else 1, out)


@register_rule("vstack", "row_stack")
def _vstack(out: Tensor, tensors: Any) -> Expression:
    parts = [_operand(x, out) for x in tensors]
    return concatenate([p if p.ndim > 1 else _row(p) for p in parts], 0, out)


@register_rule("column_stack")
def _column_stack(out: Tensor, tensors: Any) -> Expression:
    parts = [_operand(x, out) for x in tensors]
    return concatenate([p if p.ndim > 1 else _swapped(_row(p), 0, 1) for p in parts], 1, out)


def _row(e: Expression) -> Expression:
    return move(e, lambda t: t.reshape(1, -1))


def _as_latent(x: Any, out: Tensor) -> LatentTensor:
    return x if isinstance(x, LatentTensor) else LatentTensor.make(x, _operand(x, out))


@register_rule("tril")
def _tril(out: Tensor, x: Any, diagonal: int = 0) -> Expression:
    mask = torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device).tril(diagonal)
    return masked(E(x), mask)


@register_rule("triu")
def _triu(out: Tensor, x: Any, diagonal: int = 0) -> Expression:
    mask = torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device).triu(diagonal)
    return masked(E(x), mask)


@register_rule("where")
def _where(out: Tensor, condition: Any, x: Any = None, y: Any = None) -> Expression | None:
    if isinstance(x, Tensor) and x.dtype == torch.bool and not isinstance(condition, Tensor):
        return None
    if isinstance(condition, Tensor) and condition.dtype != torch.bool:  # x.where(condition, y)
        condition, x = x, condition
    if not _constant(condition) or x is None or y is None:
        return None
    kept = masked(_operand(x, out), condition)
    other = masked(_operand(y, out), ~condition)
    return expand(add(kept, other), tuple(out.shape))


@register_rule("masked_fill")
def _masked_fill(out: Tensor, x: Any, mask: Any, value: Any) -> Expression | None:
    if not _constant(mask):
        return None
    return add(masked(E(x), ~mask), masked(_operand(value, out), mask))


@register_rule("setitem")
def _setitem(out: Tensor, x: Any, index: Any, value: Any) -> Expression | None:
    """x[index] = value: the cells written read the value, the others keep what they had."""
    if any(isinstance(i, LatentTensor) for i in _flat(index)):
        return None
    cells = torch.arange(out.numel(), device=out.device).reshape(out.shape)[index]
    source = torch.full((out.numel(),), -1, device=out.device)
    source[cells.reshape(-1)] = torch.arange(cells.numel(), device=out.device)
    source = source.reshape(out.shape)  # which element of the value each cell reads
    written = source >= 0
    if not cells.numel():
        return E(x)
    put = expand(_operand(value, out), tuple(cells.shape))
    if put.ndim > cells.ndim:
        return None
    moved = move(put, lambda t: t.reshape(-1)[source.clamp(min=0)])
    return add(masked(E(x), ~written), masked(moved, written))


@register_rule("diag_embed", "diag")
def _diag(out: Tensor, x: Any, diagonal: int = 0, *rest: Any) -> Expression | None:
    e = E(x)
    if rest or diagonal or (out.ndim != e.ndim + 1):
        return move(e, lambda t: torch.diagonal(t, diagonal)) if out.ndim < e.ndim else None
    n = out.shape[-1]
    wide = move(e, lambda t: t.unsqueeze(-1).expand(*t.shape, n))
    return masked(wide, torch.eye(n, dtype=torch.bool, device=out.device))


# --- elementwise functions -------------------------------------------------------------------------


@register_rule("exp")
def _exp(out: Tensor, x: Any) -> Expression:
    return fn.exp(E(x))


@register_rule("log")
def _log(out: Tensor, x: Any) -> Expression:
    return fn.log(E(x))


@register_rule("logdet")
def _logdet(out: Tensor, x: Any) -> Expression | None:
    return fn.logdet(E(x))


@register_rule("slogdet", "linalg_slogdet")
def _slogdet(out: Any, x: Any) -> tuple[Expression, Expression] | None:
    """(1, log det P) of positive definite matrices."""
    e = fn.logdet(E(x))
    return None if e is None else (expand(Expression((), 1.0), e.shape), e)


@register_rule("det", "linalg_det")
def _det(out: Tensor, x: Any) -> Expression | None:
    """exp(log det P): its log, and its powers, are what can be averaged."""
    e = fn.logdet(E(x))
    return None if e is None else fn.exp(e)


@register_rule("log1p", "special_log1p")
def _log1p(out: Tensor, x: Any) -> Expression:
    return fn.log1p(E(x))


@register_rule("xlogy", "special_xlogy")
def _xlogy(out: Tensor, x: Any, y: Any) -> Expression:
    if _constant(x) and isinstance(x, Tensor) and bool((x == 0).any()):
        product = multiply(_operand(x, out), fn.log(_operand(y, out)))
        return masked(product, x != 0)
    return multiply(_operand(x, out), fn.log(_operand(y, out)))


@register_rule("sigmoid", "special_expit")
def _sigmoid(out: Tensor, x: Any) -> Expression:
    return fn.sigmoid(E(x))


@register_rule("clamp", "clip")
def _clamp(out: Tensor, x: Any, min: Any = None, max: Any = None) -> Expression | None:
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        return None
    return fn.link("clamp", _Curried(torch.clamp, (min, max), {}), E(x))


@register_rule("clamp_min")
def _clamp_min(out: Tensor, x: Any, min: Any) -> Expression | None:
    return _clamp(out, x, min=min)


@register_rule("clamp_max")
def _clamp_max(out: Tensor, x: Any, max: Any) -> Expression | None:
    return _clamp(out, x, max=max)


class _Curried:
    """function(x, *args, **kwargs) of x alone; a class so that plans can be pickled."""

    def __init__(
        self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.args, **self.kwargs)


_F = torch.nn.functional


def _unary(name: str, function: Callable[..., Tensor]) -> None:
    def rule(out: Tensor, x: Any, *args: Any, **kwargs: Any) -> Expression | None:
        if any(isinstance(a, Tensor) for a in _flat((args, kwargs))):
            return None
        kwargs.pop("inplace", None)
        f = _Curried(function, args, kwargs) if args or kwargs else function
        return fn.link(name, f, E(x))

    if any(hasattr(space, name) for space in (torch, torch.Tensor, _F)):
        register_rule(name)(rule)
    if hasattr(torch.special, name):
        register_rule(f"special_{name}")(rule)


for _unary_name, _function in {
    "softplus": _F.softplus, "tanh": torch.tanh, "relu": torch.relu, "sin": torch.sin,
    "cos": torch.cos, "erf": torch.erf, "erfc": torch.erfc, "ndtr": torch.special.ndtr,
    "log_ndtr": torch.special.log_ndtr, "sinh": torch.sinh, "cosh": torch.cosh,
    "atan": torch.atan, "arctan": torch.atan, "abs": torch.abs, "absolute": torch.abs,
    "expm1": torch.expm1, "asinh": torch.asinh, "gelu": _F.gelu, "silu": _F.silu, "elu": _F.elu,
    "leaky_relu": _F.leaky_relu, "selu": _F.selu, "celu": _F.celu, "mish": _F.mish,
    "softsign": _F.softsign, "hardtanh": _F.hardtanh, "exp2": torch.exp2, "log2": torch.log2,
    "log10": torch.log10, "tan": torch.tan, "erfinv": torch.erfinv, "digamma": torch.digamma,
}.items():  # fmt: skip
    _unary(_unary_name, _function)


@register_rule("lgamma", "special_gammaln")
def _lgamma(out: Tensor, x: Any) -> Expression:
    return fn.lgamma(E(x))


@register_rule("log_sigmoid")
def _logsigmoid(out: Tensor, x: Any) -> Expression:
    return fn.link("logsigmoid", _F.logsigmoid, E(x))


def _binary(name: str, function: Callable[..., Tensor]) -> None:
    def rule(out: Tensor, x: Any, y: Any) -> Expression:
        return fn.link(name, function, _operand(x, out), _operand(y, out))

    register_rule(name)(rule)


for _binary_name, _function in {
    "logaddexp": torch.logaddexp, "maximum": torch.maximum, "minimum": torch.minimum,
    "hypot": torch.hypot, "atan2": torch.atan2,
}.items():  # fmt: skip
    _binary(_binary_name, _function)


@register_rule("logit", "special_logit")
def _logit(out: Tensor, x: Any, eps: float | None = None) -> Expression:
    if eps is None:
        return add(fn.log(E(x)), negate(fn.log1p(negate(E(x)))))
    return fn.link("logit", _Curried(torch.logit, (), {"eps": eps}), E(x))
