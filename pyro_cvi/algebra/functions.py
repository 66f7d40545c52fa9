"""Powers, logs and links of expressions.

A monomial c * z1^p1 * z2^p2 ... keeps a closed algebra under powers and logs when its sites are
positive; any other elementwise function becomes a link: its arguments and the function are kept, for
quadrature in the arguments' marginals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import (
    LOG,
    LOG1M,
    LOGDET,
    Const,
    Expression,
    Group,
    Link,
    Operand,
    Stat,
    Statistic,
    Term,
    _squeeze,
    add,
    as_operands,
    contract,
    expand,
    group,
    merge_operands,
    multiply,
    negate,
    scale,
)
from pyro_cvi.algebra.moves import masked
from pyro_cvi.linalg import broadcast_shapes

__all__ = [
    "clamp_link",
    "exp",
    "lgamma",
    "link",
    "log",
    "log1p",
    "logdet",
    "power",
    "scaled_matrix",
    "sigmoid",
]

_MOST_CELLS = 1 << 22
"""Cells of an expression that are looked through for terms that never meet."""


def link(name: str, function: Callable[..., Tensor], *arguments: Expression) -> Expression:
    """`function(*arguments)`, elementwise, with the arguments kept."""
    shape = broadcast_shapes(*(a.shape for a in arguments))
    kept, axes = _squeeze(shape)
    squeezed = tuple(group(expand(a, shape)).expression for a in arguments)
    return Expression(shape, 0.0, (Term(1.0, (Link(name, function, squeezed, kept, axes),)),))


def log_sum_exp(*parts: Tensor) -> Tensor:
    """log sum_k exp(x_k)."""
    return torch.logsumexp(torch.stack(torch.broadcast_tensors(*parts)), 0)


def _monomial(e: Expression) -> Term | None:
    """The one term of an expression that is a product without constant or contraction."""
    if e.has_constant or len(e.terms) != 1 or e.terms[0].contracted:
        return None
    return e.terms[0]


def power(e: Expression, p: float) -> Expression:
    """E ** p for a Python number p."""
    if p == 1:
        return e
    if p == 0:
        return Expression(e.shape, 1.0)
    if not e.terms:
        return Expression(e.shape, e.constant**p)
    term = _monomial(e)
    if term is not None and (term.coefficient > 0 or p == int(p)):
        operands: list[Operand] = []
        for o in term.operands:
            raised = _power_operand(o, p)
            if raised is None:
                break
            operands += raised
        else:
            return Expression(
                e.shape, 0.0, (Term(term.coefficient**p, merge_operands(tuple(operands))),)
            )
    by_cases = _by_cases(e, partial(power, p=p), f"pow({p:g})")
    if by_cases is not None:
        return by_cases
    if p == 2:
        whole = group(e)
        return Expression(e.shape, 0.0, (Term(1.0, (whole, whole)),))
    return link(f"pow({p:g})", _Power(p), e)


def power_of_exp(e: Expression, p: Expression) -> Expression | None:
    """exp(a) ** p = exp(p a), for an exponent that may be learnt; None where e is no product of exps."""
    term = _monomial(e)
    if term is None or term.coefficient <= 0:
        return None
    if not all(isinstance(o, Link) and o.name == "exp" for o in term.operands):
        return None
    return exp(multiply(p, log(e)))


def _by_cases(
    e: Expression, function: Callable[[Expression], Expression], fallback: str
) -> Expression | None:
    """f(e) where every cell has at most one of the terms, as in `torch.stack([p, q])[which]`.

    None where terms meet, or where f of a single term is no more than the link `fallback`.
    """
    if len(e.terms) < 2 or not all(_is_positive(t) for t in e.terms):
        return None
    count = torch.zeros((), dtype=torch.int8, device="cpu")
    cases = []
    for t in e.terms:
        holes = [o for o in t.operands if isinstance(o, Const) and bool((o.tensor == 0).any())]
        if not holes or t.contracted:
            return None
        here = contract([((o.tensor != 0).to(torch.int8), o.axes) for o in holes], e.ndim) != 0
        count = count.to(here.device) + here
        if count.numel() > _MOST_CELLS:
            return None
        filled = tuple(f for o in t.operands if (f := _without_zeros(o)) is not None)
        value = function(Expression(e.shape, e.constant, (Term(t.coefficient, filled),)))
        if any(isinstance(o, Link) and o.name == fallback for s in value.terms for o in s.operands):
            return None
        cases.append(masked(value, here))
    if bool((count > 1).any()):
        return None
    nowhere = count == 0
    if bool(nowhere.any()):
        cases.append(masked(function(Expression(e.shape, e.constant)), nowhere))
    result = cases[0]
    for case in cases[1:]:
        result = add(result, case)
    return expand(result, e.shape)


def _without_zeros(o: Operand) -> Operand | None:
    """A constant with ones in place of its zeros; None if nothing but ones is left."""
    if not isinstance(o, Const):
        return o
    tensor = torch.where(o.tensor == 0, torch.ones_like(o.tensor), o.tensor)
    return None if bool((tensor == 1).all()) else Const(tensor, o.axes)


def _is_positive(t: Term) -> bool:
    """Whether a term's sites are positive, so that its powers and logs are those of its parts."""
    return all(
        isinstance(o, Const)
        or (isinstance(o, Stat) and o.site.is_positive)
        or (isinstance(o, Link) and o.name in ("exp", "sigmoid"))
        for o in t.operands
    )


class _Power:
    """x ** p; a class so that plans can be pickled."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, x: Tensor) -> Tensor:
        return x**self.p


def _power_operand(o: Operand, p: float) -> list[Operand] | None:
    if isinstance(o, Const):
        return [Const(o.tensor**p, o.axes)] if p == int(p) or _nonnegative(o) else None
    if isinstance(o, Stat) and o.site.is_positive and o.statistic.kind == "power":
        return [replace(o, statistic=Statistic("power", o.statistic.power * p))]
    if isinstance(o, Link) and o.name == "exp":
        coefficient, raised = as_operands(exp(scale(o.arguments[0], p)))
        factor = [] if coefficient == 1 else [Const(torch.tensor(coefficient, device="cpu"), ())]
        return factor + [replace(r, axes=tuple(o.axes[a] for a in r.axes)) for r in raised]
    if p == 2:
        return [o, o]
    return None


def _nonnegative(o: Const) -> bool:
    """Whether a root or log of the factor alone is that of the product: two negatives make one."""
    return not bool((o.tensor < 0).any())


def log(e: Expression) -> Expression:
    """Log e: a sum over the operands of a positive monomial; log(1 - z) on the unit interval."""
    if not e.terms:
        constant = e.constant.log() if isinstance(e.constant, Tensor) else math.log(e.constant)
        return Expression(e.shape, constant)
    complement = _complement(e)
    if complement is not None:
        return expand(complement, e.shape)
    probit = _normal_cdf(e)
    if probit is not None:
        return expand(probit, e.shape)
    by_cases = _by_cases(e, log, "log")
    if by_cases is not None:
        return by_cases
    term = _monomial(e)
    if term is None or term.coefficient <= 0:
        return link("log", torch.log, e)
    parts = [_log_operand(o) for o in term.operands]
    if any(part is None for part in parts):
        return link("log", torch.log, e)
    result = Expression(e.shape, math.log(term.coefficient))
    for part in parts:
        assert part is not None
        result = add(result, part)
    return expand(result, e.shape)


def _single(o: Operand) -> Expression:
    """An operand with output labels as an expression of its own."""
    ndim = -min(o.axes, default=0)
    shape = [1] * ndim
    for size, a in zip(o.shape, o.axes, strict=True):
        shape[a] = size
    return Expression(tuple(shape), 0.0, (Term(1.0, (o,)),))


def _log_operand(o: Operand) -> Expression | None:
    if isinstance(o, Const):
        if not _nonnegative(o):
            return None
        e = _single(o)
        tensor = o.tensor.log()
        order = sorted(range(len(o.axes)), key=lambda i: o.axes[i])
        return Expression(e.shape, tensor.permute(order).reshape(e.shape))
    if isinstance(o, Stat) and o.site.is_positive and o.statistic.kind == "power":
        return scale(_single(replace(o, statistic=LOG)), o.statistic.power)
    if isinstance(o, Link):
        if o.name == "exp":
            return _lift(o.arguments[0], o)
        if o.name == "sigmoid":
            return _lift(link("logsigmoid", torch.nn.functional.logsigmoid, o.arguments[0]), o)
        return _lift(link("log", torch.log, *[_lift_free(o)]), o)
    return None


def _lift_free(o: Link) -> Expression:
    n = len(o.shape)
    return Expression(o.shape, 0.0, (Term(1.0, (replace(o, axes=tuple(range(-n, 0))),)),))


def _lift(e: Expression, o: Link) -> Expression:
    """Give an expression over a link's own shape the link's axes in the surrounding expression."""
    ndim = -min(o.axes, default=0)
    shape = [1] * ndim
    for size, a in zip(o.shape, o.axes, strict=True):
        shape[a] = size
    e = expand(e, o.shape)
    mapping = {i - e.ndim: a for i, a in enumerate(o.axes)}
    constant = e.constant
    if isinstance(constant, Tensor):
        constant = constant.expand(o.shape)
        order = sorted(range(len(o.axes)), key=lambda i: o.axes[i])
        constant = constant.permute(order).reshape(shape)
    return Expression(tuple(shape), constant, tuple(t.relabelled(mapping) for t in e.terms))


def _complement(e: Expression) -> Expression | None:
    """log(1 - z) for one scalar of a site on the unit interval, or for a sigmoid, else None."""
    if len(e.terms) != 1 or e.terms[0].coefficient != -1 or e.terms[0].contracted:
        return None
    if not bool(torch.as_tensor(e.constant == 1).all()):
        return None
    return _log1m(e.terms[0])


def _normal_cdf(e: Expression) -> Expression | None:
    """log Phi(f) for e = 1/2 + 1/2 erf(f / sqrt 2), as Normal.cdf writes it, or its complement.

    Taken whole it keeps its digits in the tails, where 1/2 + 1/2 erf is clamped to zero.
    """
    if len(e.terms) != 1 or isinstance(e.constant, Tensor) or e.terms[0].contracted:
        return None
    (t,) = e.terms
    if len(t.operands) != 1:
        return None
    (o,) = t.operands
    if not isinstance(o, Link):
        return None
    sign = 2 * t.coefficient if o.name == "erf" else t.coefficient
    if o.name == "erf" and e.constant == 0.5 and abs(sign) == 1:
        argument = scale(o.arguments[0], sign * math.sqrt(2))
    elif o.name == "ndtr" and (e.constant, sign) in ((0.0, 1.0), (1.0, -1.0)):
        argument = scale(o.arguments[0], sign)
    else:
        return None
    return _lift(link("log_ndtr", torch.special.log_ndtr, argument), o)


def _log1m(term: Term) -> Expression | None:
    if len(term.operands) != 1:
        return None
    (o,) = term.operands
    if isinstance(o, Stat) and o.site.kind == "unit" and o.statistic == Statistic():
        return _single(replace(o, statistic=LOG1M))
    if isinstance(o, Link) and o.name == "sigmoid":
        return _lift(
            link("logsigmoid", torch.nn.functional.logsigmoid, scale(o.arguments[0], -1.0)), o
        )
    return None


def logdet(e: Expression) -> Expression | None:
    """log det(c P) = d log c + log det P for whole matrices P of one positive definite site.

    c is a product of positive factors that are scalars for each matrix. None for other matrices.
    """
    term = _monomial(e)
    if term is None or term.coefficient <= 0 or e.ndim < 2:
        return None
    d = e.shape[-1]
    parts = scaled_matrix(e)
    if parts is not None:
        c, fixed = parts
        log_c = scale(log(_without_matrix_axes(c)), float(d))
        return expand(add(log_c, Expression(fixed.shape[:-2], torch.logdet(fixed))), e.shape[:-2])
    whole = [o for o in term.operands if isinstance(o, Stat) and o.site.kind == "positive_definite"]
    if len(whole) != 1 or e.shape[-2] != d:
        return None
    (matrix,) = whole
    index = _matrix_index(matrix, d)
    if index is None:
        return None
    axes = tuple(a + 2 for a in matrix.axes if a < -2)
    determinant = _single(replace(matrix, statistic=LOGDET, index=index, axes=axes))
    result = add(Expression(e.shape[:-2], d * math.log(term.coefficient)), determinant)
    for o in term.operands:
        if o is matrix:
            continue
        if any(a >= -2 for a in o.axes):
            return None
        part = _log_operand(replace(o, axes=tuple(a + 2 for a in o.axes)))
        if part is None:
            return None
        result = add(result, scale(part, float(d)))
    return expand(result, e.shape[:-2])


def scaled_matrix(e: Expression) -> tuple[Expression, Tensor] | None:
    """(c, A) with e = c A: a constant matrix A, and a positive product c of scalars for each matrix.

    Shapes: c (*batch, 1, 1). None for other expressions.
    """
    term = _monomial(e)
    if term is None or term.coefficient <= 0 or e.ndim < 2 or e.shape[-1] < 2:
        return None
    matrices = [o for o in term.operands if {-2, -1} & set(o.axes)]
    matrix = matrices[0] if len(matrices) == 1 else None
    if not isinstance(matrix, Const):
        return None
    others = tuple(o for o in term.operands if o is not matrix)
    if not {-2, -1} <= set(matrix.axes) or not others:
        return None
    positive = all(
        (isinstance(o, Stat) and o.site.is_positive and o.statistic.kind == "power")
        or (isinstance(o, Const) and bool((o.tensor > 0).all()))
        for o in others
    )
    if not positive:
        return None
    tensor = matrix.tensor
    order = sorted(range(len(matrix.axes)), key=lambda i: matrix.axes[i])
    shape = [1] * -min(matrix.axes)
    for size, a in zip(matrix.shape, matrix.axes, strict=True):
        shape[a] = size
    fixed = tensor.permute(order).reshape(shape)
    c = Expression((*e.shape[:-2], 1, 1), 0.0, (Term(term.coefficient, others),))
    return c, fixed


def _without_matrix_axes(c: Expression) -> Expression:
    """(*batch, 1, 1) as (*batch,)."""
    mapping = {a: a + 2 for a in range(-c.ndim, -2)}
    return Expression(c.shape[:-2], c.constant, tuple(t.relabelled(mapping) for t in c.terms))


def _matrix_index(o: Stat, d: int) -> Tensor | None:
    """Which matrices of the site (*batch, d, d) an operand reads whole, or transposed."""
    if o.statistic != Statistic() or o.site.shape[-2:] != (d, d):
        return None
    if d == 1:  # axes of size one have no label
        return o.index
    if not {-2, -1} <= set(o.axes):
        return None
    batch = [i for i, a in enumerate(o.axes) if a < -2]
    index = o.index.permute([*batch, o.axes.index(-2), o.axes.index(-1)])
    first = index[..., :1, :1]
    cell = torch.arange(d * d, device=index.device).reshape(d, d)
    if bool((first % (d * d) != 0).any()):
        return None
    if not (torch.equal(index, first + cell) or torch.equal(index, first + cell.mT)):
        return None
    return index[..., 0, 0] // (d * d)


def log1p(e: Expression) -> Expression:
    """log(1 + e)."""
    one = add(Expression((), 1.0), e)
    complement = _complement(one) or _normal_cdf(one)
    if complement is not None:
        return expand(complement, e.shape)
    if _monomial(one) is not None:  # log1p(-(1 - z)) = log z
        return log(one)
    by_cases = _by_cases(e, log1p, "log1p")
    return link("log1p", torch.log1p, e) if by_cases is None else by_cases


def lgamma(e: Expression) -> Expression:
    """log Gamma(e); of a positive monomial, log Gamma(1 + e) - log e: the pole at zero is then exact."""
    term = _monomial(e)
    if term is not None and term.coefficient > 0 and _is_positive(term):
        return add(link("lgamma1p", _lgamma1p, e), negate(log(e)))
    return link("lgamma", torch.lgamma, e)


def _lgamma1p(x: Tensor) -> Tensor:
    return torch.lgamma(1 + x)


def sigmoid(e: Expression) -> Expression:
    """1 / (1 + exp(-e)); its log, and the log of its complement, stay stable."""
    return link("sigmoid", torch.sigmoid, e)


def exp(e: Expression) -> Expression:
    """Exp e: a monomial when e is a sum of logs, else a link."""
    result = Expression(e.shape, 1.0)
    if isinstance(e.constant, Tensor):
        result = Expression(e.shape, e.constant.exp())
    elif e.constant != 0:
        result = Expression(e.shape, math.exp(e.constant))
    for t in e.terms:
        factor = _exp_term(t)
        if factor is None:
            return link("exp", torch.exp, e)
        result = multiply(result, factor)
    return expand(result, e.shape)


def _exp_term(t: Term) -> Expression | None:
    """exp(c log z) = z ** c, exp(log f(x)) = f(x)."""
    if len(t.operands) != 1 or t.contracted:
        return None
    (o,) = t.operands
    if isinstance(o, Stat) and o.statistic.kind == "log":
        return _single(replace(o, statistic=Statistic("power", t.coefficient)))
    if isinstance(o, Link) and o.name == "logsigmoid" and t.coefficient == 1:
        return _lift(sigmoid(o.arguments[0]), o)
    if isinstance(o, Link) and o.name == "log" and t.coefficient == 1:
        return _lift(o.arguments[0], o)
    return None


def clamp_link(e: Expression, low: float, high: float) -> Expression:
    """E clamped to [low, high] where that can matter (a link); statistics of sites are left alone."""
    if _normal_cdf(e) is not None:
        return e
    _, operands = as_operands(e)
    if all(isinstance(o, Const | Stat) for o in operands):
        return e
    if len(operands) == 1:
        (o,) = operands
        if isinstance(o, Link) and o.name == "sigmoid":
            return e
        if isinstance(o, Group) and _complement(o.expression) is not None:
            return e
    by_cases = _by_cases(e, partial(clamp_link, low=low, high=high), "clamp")
    return link("clamp", _Clamp(low, high), e) if by_cases is None else by_cases


class _Clamp:
    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)
