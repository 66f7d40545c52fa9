"""Means and covariances of affine expressions of Gaussian blocks.

    e = c + A z    =>    E e = c + A m,    Cov(e, f) = A V B^T, cell by cell.

An expression with constant coefficients of one dense block is compiled to its design matrix A (the
user's own matrix where it already is one); everything else, products of independent blocks among
them, goes through pairs of terms:

    Cov(s, t) = sum over non-empty S of the shared blocks of  prod_S Cov * prod_rest (mean * mean).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyro_cvi.algebra.expression import (
    Axes,
    Const,
    Expression,
    Group,
    Stat,
    Statistic,
    Term,
    align,
    contract,
    contract_to,
    fresh_label,
)
from pyro_cvi.estimators.moments import Moments, Pool, Structure
from pyro_cvi.gaussians import Layout, row_quadratic
from pyro_cvi.linalg import broadcast_shapes, without_repeats

__all__ = [
    "Affine",
    "Design",
    "NotAffine",
    "Reader",
    "Selection",
    "TermMean",
    "compile_affine",
    "covariance",
    "design_of",
    "flatten",
    "read_loc",
]

_DESIGN_LIMIT = 1 << 25
"""Largest design matrix, in scalars, that is built when the user's tensors are not one already."""
_MASK_LIMIT = 1 << 24
_POOL_LIMIT = 1 << 14
"""A design of fewer scalars, over the whole block, is stacked with others of its block."""


class NotAffine(ValueError):
    """The expression is not multilinear in Gaussian blocks; the message says why."""


def flatten(e: Expression, whole: Callable[[Group], bool] = lambda g: False) -> Expression:
    """The same expression with nested groups multiplied out into terms of constants and statistics.

    Groups that are to stay `whole` do.
    """
    terms: list[Term] = []
    constant = e.constant
    for t in e.terms:
        for flat in _distribute(t, whole):
            terms.append(flat)
    if any(all(isinstance(o, Const) for o in t.operands) for t in terms):
        fixed = [t for t in terms if all(isinstance(o, Const) for o in t.operands)]
        terms = [t for t in terms if t not in fixed]
        for t in fixed:
            pieces = [(o.tensor, o.axes) for o in t.operands if isinstance(o, Const)]
            value = contract(pieces, e.ndim) if pieces else torch.tensor(1.0, device="cpu")
            constant = constant + t.coefficient * value
    return Expression(e.shape, constant, tuple(terms))


def _distribute(t: Term, whole: Callable[[Group], bool]) -> list[Term]:
    parts: list[list[Term]] = []
    for o in t.operands:
        if not isinstance(o, Group) or whole(o):
            parts.append([Term(1.0, (o,))])
            continue
        inner = flatten(o.expression, whole)
        mapping = {i - len(o.axes): a for i, a in enumerate(o.axes)}
        choices = []
        for s in inner.terms:
            fresh = {a: fresh_label() for a in s.contracted}
            choices.append(s.relabelled({**mapping, **fresh}))
        if inner.has_constant:
            choices.append(_constant_term(inner, mapping))
        parts.append(choices)
    count = math.prod(len(p) for p in parts)
    if count > 4096:
        raise NotAffine("a product of sums with too many terms")
    result = []
    for choice in itertools.product(*parts):
        coefficient = t.coefficient * math.prod(c.coefficient for c in choice)
        result.append(Term(coefficient, tuple(o for c in choice for o in c.operands)))
    # An output axis that only a dropped piece of a group carried is constant along it: nothing to do.
    # A contracted axis that a choice lost is summed over, hence a factor of its size.
    sizes = {a: n for o in t.operands for a, n in zip(o.axes, o.shape, strict=True) if a > 0}
    return [_restore(r, sizes) for r in result]


def _restore(t: Term, sizes: dict[int, int]) -> Term:
    present = t.labels
    missing = math.prod(n for a, n in sizes.items() if a not in present)
    return Term(t.coefficient * missing, t.operands)


def _constant_term(e: Expression, mapping: dict[int, int]) -> Term:
    if not isinstance(e.constant, Tensor):
        return Term(float(e.constant), ())
    kept = [i for i, n in enumerate(e.constant.shape) if n != 1]
    labels = [i - e.constant.ndim for i in kept]
    tensor = e.constant.reshape([e.constant.shape[i] for i in kept])
    return Term(1.0, (Const(tensor, tuple(mapping.get(a, a) for a in labels)),))


def _check(e: Expression, structure: Structure) -> None:
    for t in e.terms:
        blocks = []
        for o in t.operands:
            if isinstance(o, Const):
                continue
            if not isinstance(o, Stat):
                raise NotAffine(getattr(o, "reason", "an elementwise function of a latent"))
            name = o.site.name
            if not structure.is_gaussian(name) or o.statistic != Statistic():
                raise NotAffine(f"'{name}' is not Gaussian")
            blocks.append(structure.block[name])
        if len(set(blocks)) < len(blocks):
            raise NotAffine("a product of two values of one block")


def read_loc(stat: Stat, structure: Structure) -> Reader:
    """A reader of the posterior mean of a Gaussian statistic."""
    layout = structure.layout[structure.block[stat.site.name]]
    return Reader(structure.block[stat.site.name], layout.flat(stat.site.name)[stat.index])


class Reader:
    """loc.reshape(-1)[flat], as a slice where the positions are consecutive."""

    def __init__(self, block: str, flat: Tensor) -> None:
        self.block, self.flat = block, flat
        self.start: int | None = None
        if flat.numel():
            start = int(flat.reshape(-1)[0])
            steps = torch.arange(start, start + flat.numel(), device=flat.device)
            if bool((flat.reshape(-1) == steps).all()):
                self.start = start

    def __call__(self, moments: Moments) -> Tensor:
        loc = moments.gaussian[self.block][0].reshape(-1)
        if self.start is not None:
            return loc.narrow(0, self.start, self.flat.numel()).reshape(self.flat.shape)
        return loc[self.flat]


@dataclass(frozen=True, eq=False)
class Design:
    """coefficient * A z over one dense block; A is (*cells, active), cells labelled by `axes`."""

    block: str
    coefficient: float
    matrix: Tensor
    columns: Tensor
    start: int | None
    axes: Axes
    pool: Pool | None = None
    slot: int = 0

    def pooled(self, structure: Structure) -> Design:
        """The same design, stacked with the block's other small ones where that is cheaper."""
        rows = self.matrix.numel() // max(self.matrix.shape[-1], 1)
        width = structure.layout[self.block].width
        if self.matrix.requires_grad or rows * width > _POOL_LIMIT:
            return self
        pool = structure.pool(self.block)
        flat = self.coefficient * self.matrix.reshape(rows, self.matrix.shape[-1])
        return replace(self, pool=pool, slot=pool.add(flat, self.columns))

    def _from_pool(self, stacked: Tensor) -> Tensor:
        shape = self.matrix.shape[:-1]
        return stacked.narrow(0, self.slot, math.prod(shape)).reshape(shape)

    def dense(self) -> Design:
        return self

    def loc(self, moments: Moments) -> Tensor:
        if self.pool is not None:
            return self._from_pool(moments.pooled(self.pool)[0])
        loc = moments.gaussian[self.block][0].reshape(-1)
        part = (
            loc[self.columns]
            if self.start is None
            else loc.narrow(0, self.start, len(self.columns))
        )
        return self.coefficient * (self.matrix.to(loc.dtype) @ part)

    def cov(self, moments: Moments) -> Tensor:
        cov = moments.gaussian[self.block][1][0]
        if self.start is None:
            return cov[self.columns[:, None], self.columns]
        n = len(self.columns)
        return cov if n == cov.shape[0] else cov.narrow(0, self.start, n).narrow(1, self.start, n)

    def variance(self, moments: Moments) -> Tensor:
        if self.pool is not None:
            return self._from_pool(moments.pooled(self.pool)[1])
        matrix = self.matrix.reshape(-1, self.matrix.shape[-1])
        v = row_quadratic(matrix, self.cov(moments))
        return self.coefficient**2 * v.reshape(self.matrix.shape[:-1])


@dataclass(frozen=True, eq=False)
class Selection:
    """weight * z[columns] of one block, one scalar a cell: only marginal variances are read."""

    block: str
    weight: Tensor | float
    columns: Tensor
    axes: Axes

    def loc(self, moments: Moments) -> Tensor:
        return self.weight * moments.gaussian[self.block][0].reshape(-1)[self.columns]

    def variance(self, moments: Moments) -> Tensor:
        return self.weight * self.weight * moments.diagonal(self.block)[self.columns]

    def dense(self) -> Design:
        """The same as a design matrix, for covariances with another expression."""
        columns = torch.unique(self.columns)
        weight = torch.as_tensor(self.weight)
        where = torch.searchsorted(columns, self.columns.contiguous())
        hot = where.unsqueeze(-1) == torch.arange(len(columns), device=columns.device)
        dtype = weight.dtype if isinstance(self.weight, Tensor) else torch.get_default_dtype()
        matrix = hot.to(dtype) * weight.unsqueeze(-1)
        return Design(self.block, 1.0, matrix, columns, _consecutive(columns), self.axes)


class Affine:
    """E e and Var e of an expression that is multilinear in Gaussian blocks."""

    def __init__(self, e: Expression, structure: Structure) -> None:
        flat = flatten(e)
        _check(flat, structure)
        self.expression, self.structure = flat, structure
        self.ndim = e.ndim
        self.blocks = frozenset(structure.block[s] for s in flat.sites)
        self.designs: list[Design | Selection] = []
        self.terms: list[Term] = []
        by_block: dict[str, list[Term]] = {}
        for t in flat.terms:
            if _is_empty_sum(t):
                continue
            names = [structure.block[o.site.name] for o in t.operands if isinstance(o, Stat)]
            dense = len(names) == 1 and structure.layout[names[0]].count == 1
            if dense:
                by_block.setdefault(names[0], []).append(t)
            else:
                self.terms.append(t)
        for block, terms in by_block.items():
            mixed = any(block in _blocks(t, structure) for t in self.terms)
            design = None if mixed else design_of(terms, structure, block)
            if design is None:
                self.terms += terms
            else:
                self.designs.append(design)
        self._pairs: list[_Pair] | None = None

    @cached_property
    def coupled(self) -> frozenset[str]:
        """Blocks of which one cell reads several independent elements.

        The square of such a cell is not affine in the block's mean parameters: its expectation is
        exact, but the block's optimum is not one step away.
        """
        elements: dict[str, list[tuple[Tensor, Axes]]] = {}
        for t in self.expression.terms:
            for o in t.operands:
                if isinstance(o, Stat):
                    block = self.structure.block[o.site.name]
                    layout = self.structure.layout[block]
                    if layout.count > 1:
                        index = layout.element[o.site.name][o.index]
                        elements.setdefault(block, []).append((index, o.axes))
        return frozenset(b for b, reads in elements.items() if _reads_several(reads))

    @property
    def varying(self) -> frozenset[int]:
        """The axes along which the terms vary."""
        found = {a for d in self.designs for a in d.axes}
        return frozenset(found | {a for t in self.terms for a in t.labels if a < 0})

    def mean(self, moments: Moments, *, without_constant: bool = False) -> Tensor:
        """E e, right-aligned to the expression's shape."""
        total: Tensor | float = 0.0 if without_constant else self.expression.constant
        for d in self.designs:
            total = contract([(d.loc(moments), d.axes)], self.ndim) + total
        for t in self._means:
            total = t(moments, self.ndim) + total
        assert isinstance(total, Tensor) or not self.expression.terms
        return total if isinstance(total, Tensor) else torch.tensor(total, device="cpu")

    @cached_property
    def _means(self) -> list[TermMean]:
        return [TermMean(t, self.structure) for t in self.terms]

    def variance(self, moments: Moments, *, without_pairs: bool = False) -> Tensor | float:
        """Var e, right-aligned to the expression's shape."""
        total: Tensor | float = 0.0
        for d in self.designs:
            total = contract([(d.variance(moments), d.axes)], self.ndim) + total
        for pair in () if without_pairs else self.pairs():
            total = pair(moments, self.ndim) + total
        return total

    def pairs(self) -> list[_Pair]:
        """Covariances of the terms that have no design; compiled once."""
        if self._pairs is None:
            self._pairs = _compile_pairs(self.terms, self.terms, self.structure, symmetric=True)
        return self._pairs


def compile_affine(e: Expression, structure: Structure) -> Affine:
    """An `Affine`, or NotAffine with the reason."""
    affine = Affine(e, structure)
    affine.pairs()
    return affine


def covariance(a: Affine, b: Affine) -> Covariance:
    """Cov(a, b) cell by cell."""
    return Covariance(a, b)


class Covariance:
    """Cov(a, b) of two affine expressions over the same cells."""

    def __init__(self, a: Affine, b: Affine) -> None:
        self.ndim = max(a.ndim, b.ndim)
        self.designs = [(x, y) for x in a.designs for y in b.designs if x.block == y.block]
        used = {x.block for x, _ in self.designs}
        loose_a, loose_b = list(a.terms), list(b.terms)
        if any(d.block not in used and d.block in b.blocks for d in a.designs) or any(
            d.block not in used and d.block in a.blocks for d in b.designs
        ):
            # One side has a design where the other has loose terms: go through terms on both sides.
            self.designs = []
            loose_a, loose_b = list(a.expression.terms), list(b.expression.terms)
        self.pairs = _compile_pairs(loose_a, loose_b, a.structure, symmetric=False)

    def __call__(self, moments: Moments) -> Tensor | float:
        total: Tensor | float = 0.0
        for x, y in self.designs:
            total = self._design_pair(x, y, moments) + total
        for pair in self.pairs:
            total = pair(moments, self.ndim) + total
        return total

    def _design_pair(
        self, x: Design | Selection, y: Design | Selection, moments: Moments
    ) -> Tensor:
        x, y = x.dense(), y.dense()
        cov = moments.gaussian[x.block][1][0][x.columns[:, None], y.columns]
        k, j = fresh_label(), fresh_label()
        pieces = [(x.matrix.to(cov.dtype), (*x.axes, k)), (cov, (k, j))]
        left = contract_to(pieces, (*x.axes, j))
        axes = tuple(sorted({*x.axes, *y.axes}))
        product = contract_to([(left, (*x.axes, j)), (y.matrix.to(cov.dtype), (*y.axes, j))], axes)
        return x.coefficient * y.coefficient * contract([(product, axes)], self.ndim)


def _reads_several(reads: list[tuple[Tensor, Axes]]) -> bool:
    """Whether some cell (fixed negative labels) sees more than one element."""
    cells = tuple(sorted({a for _, axes in reads for a in axes if a < 0}))
    first: Tensor | None = None
    for index, axes in reads:
        inner = [i for i, a in enumerate(axes) if a > 0]
        low = index.amin(inner) if inner and index.numel() else index
        high = index.amax(inner) if inner and index.numel() else index
        if not torch.equal(low, high):
            return True
        here = align(low, tuple(a for a in axes if a < 0), cells)
        first = here if first is None else first
        if not bool((first == here).all()):
            return True
    return False


def _is_empty_sum(t: Term) -> bool:
    """A sum over an axis without elements is zero."""
    return any(n == 0 and a > 0 for o in t.operands for a, n in zip(o.axes, o.shape, strict=True))


def _blocks(t: Term, structure: Structure) -> set[str]:
    return {structure.block[o.site.name] for o in t.operands if isinstance(o, Stat)}


class TermMean:
    """E of one term: the product of its constants and of its blocks' means."""

    def __init__(self, t: Term, structure: Structure) -> None:
        self.coefficient = t.coefficient
        self.pieces: list[tuple[Tensor | Reader, Axes]] = [
            (o.tensor, o.axes) if isinstance(o, Const) else (read_loc(o, structure), o.axes)
            for o in t.operands
            if isinstance(o, Const | Stat)
        ]

    def __call__(self, moments: Moments, ndim: int) -> Tensor:
        pieces = [(p(moments) if isinstance(p, Reader) else p, axes) for p, axes in self.pieces]
        return self.coefficient * contract(pieces, ndim)


def design_of(
    terms: list[Term], structure: Structure, block: str, limit: int = _DESIGN_LIMIT
) -> Design | Selection | None:
    """Terms of one statistic each of one dense block as one matrix; None where it would be too large."""
    layout = structure.layout[block]
    if len(terms) == 1:
        ready = _selection(terms[0], layout, block) or _ready_design(terms[0], layout, block)
        if ready is not None:
            return ready.pooled(structure) if isinstance(ready, Design) else ready
    sizes: dict[int, int] = {}
    reads = []
    for t in terms:
        (stat,) = [o for o in t.operands if isinstance(o, Stat)]
        for o in t.operands:
            sizes.update({a: n for a, n in zip(o.axes, o.shape, strict=True)})
        reads.append((t, stat, layout.flat(stat.site.name)[stat.index]))
    cells = tuple(sorted({a for t in terms for a in t.labels if a < 0}))
    columns = torch.unique(torch.cat([flat.reshape(-1) for _, _, flat in reads]))
    shape = [sizes[a] for a in cells]
    if math.prod(shape) * columns.numel() > limit:
        return None
    matrix: Tensor | None = None
    for t, stat, flat in reads:
        column = torch.searchsorted(columns, flat)
        part = _scatter(t, stat, column, cells, shape, columns.numel())
        matrix = part if matrix is None else matrix + part
    assert matrix is not None
    whole = Design(block, 1.0, matrix, columns, _consecutive(columns), cells)
    return whole.pooled(structure)


def _selection(t: Term, layout: Layout, block: str) -> Selection | None:
    """A term that reads one scalar a cell."""
    if t.contracted:
        return None
    (stat,) = [o for o in t.operands if isinstance(o, Stat)]
    axes = tuple(sorted(t.labels))
    columns = align(layout.flat(stat.site.name)[stat.index], stat.axes, axes)
    weight: Tensor | float = t.coefficient
    for o in t.operands:
        if isinstance(o, Const):
            weight = weight * align(o.tensor, o.axes, axes)
    if isinstance(weight, Tensor):
        columns, weight = torch.broadcast_tensors(columns, weight)
    return Selection(block, weight, columns, axes)


def _consecutive(columns: Tensor) -> int | None:
    if columns.numel() == 0:
        return 0
    start = int(columns[0])
    steps = torch.arange(start, start + columns.numel(), device=columns.device)
    return start if bool((columns == steps).all()) else None


def _ready_design(t: Term, layout: Layout, block: str) -> Design | None:
    """X @ w: the user's own matrix is the design."""
    consts = [o for o in t.operands if isinstance(o, Const)]
    (stat,) = [o for o in t.operands if isinstance(o, Stat)]
    if len(consts) != 1 or len(stat.axes) != 1 or stat.axes[0] < 0:
        return None
    (const,) = consts
    (k,) = stat.axes
    columns = layout.flat(stat.site.name)[stat.index]
    if k not in const.axes or any(a > 0 for a in const.axes if a != k):
        return None
    if torch.unique(columns).numel() != columns.numel():
        return None
    cells = tuple(sorted(a for a in const.axes if a != k))
    matrix = const.tensor.permute([const.axes.index(a) for a in (*cells, k)])
    return Design(block, t.coefficient, matrix, columns, _consecutive(columns), cells)


def _scatter(
    t: Term, stat: Stat, column: Tensor, cells: Axes, shape: list[int], width: int
) -> Tensor:
    """The matrix of one term: sum its coefficients into the columns it reads."""
    consts = [(o.tensor, o.axes) for o in t.operands if isinstance(o, Const)]
    dtype, device = _dtype(consts), column.device
    stat_inner = [a for a in stat.axes if a > 0]
    inner = sorted({*stat_inner})
    target = (*cells, *inner)
    labels = {a for _, axes in consts for a in axes}
    kept = tuple(a for a in target if a in labels)
    if consts:
        value = contract_to(consts, kept) * t.coefficient
    else:
        value = torch.tensor(t.coefficient, dtype=dtype, device=device)
    full = [
        *shape,
        *(n for a in inner for b, n in zip(stat.axes, stat.shape, strict=True) if a == b),
    ]
    sizes = iter(value.shape)
    value = value.reshape([next(sizes) if a in kept else 1 for a in target])
    order = [stat.axes.index(a) for a in target if a in stat.axes]
    where = column.permute(order)
    sizes = iter(where.shape)
    where = where.reshape([next(sizes) if a in stat.axes else 1 for a in target])
    rows, each = math.prod(shape), math.prod(full[len(shape) :])
    matrix = value.new_zeros(rows, width)
    if all(a > 0 for a in stat.axes):
        # Every cell reads the same columns: add along the last axis, no index of the matrix's size.
        flat_value = value.expand(full).reshape(rows, each)
        return matrix.index_add(1, where.reshape(-1), flat_value).reshape(*shape, width)
    index = where.expand(full).reshape(rows, each)
    flat_value = value.expand(full).reshape(rows, each)
    return matrix.scatter_add(1, index, flat_value).reshape(*shape, width)


def _dtype(consts: Sequence[tuple[Tensor, Axes]]) -> torch.dtype:
    return consts[0][0].dtype if consts else torch.get_default_dtype()


# --- pairs of terms --------------------------------------------------------------------------------


_QUADRATIC = 1 << 16
"""Scalars of a matrix from which rows x^T V x are formed one covariance at a time."""


class _Pair:
    """coefficient * one product of constants, means and covariances."""

    def __init__(self, coefficient: float, pieces: list[tuple[object, Axes]]) -> None:
        self.coefficient, self.pieces = coefficient, pieces

    def __call__(self, moments: Moments, ndim: int) -> Tensor:
        pieces = [
            (p if isinstance(p, Tensor) else p(moments), axes)  # type: ignore[operator]
            for p, axes in self.pieces
        ]
        return self.coefficient * contract(pieces, ndim)


class _Rows(_Pair):
    """coefficient * x_n^T V_c x_n for the rows of one matrix and some elements c of a plated block.

    Cell by cell a contraction would form, and keep for its gradient, rows by elements by columns.
    """

    def __init__(
        self, coefficient: float, consts: list[Const], column: int, reader: _CovReader
    ) -> None:
        pieces: list[tuple[object, Axes]] = [(o.tensor, o.axes) for o in consts]
        super().__init__(coefficient, [*pieces, (reader, reader.axes)])
        self.reader = reader
        x = next(o for o in consts if column in o.axes)
        self.cells = tuple(a for a in x.axes if a != column)
        matrix = x.tensor.permute([x.axes.index(a) for a in (*self.cells, column)])
        self.shape = matrix.shape[:-1]
        self.matrix = matrix.reshape(-1, matrix.shape[-1])

    def __call__(self, moments: Moments, ndim: int) -> Tensor:
        cov = self.reader.elements(moments)
        rows = [row_quadratic(self.matrix, v).reshape(self.shape) for v in cov.unbind(0)]
        element = (self.reader.whole or (None,))[0]
        if element is None:
            return self.coefficient * contract([(rows[0], self.cells)], ndim)
        return self.coefficient * contract([(torch.stack(rows), (element, *self.cells))], ndim)


def _rows(coefficient: float, consts: list[Const], reader: _CovReader) -> _Rows | None:
    """The pair as rows of one large matrix, if it is x_n^T V_c x_n for whole covariances V_c."""
    if len(consts) != 2 or reader.whole is None or consts[0].tensor is not consts[1].tensor:
        return None
    x, y = consts
    element, left, right = reader.whole
    if left is None or right is None or x.tensor.numel() < _QUADRATIC or x.tensor.requires_grad:
        return None
    if left not in x.axes:
        left, right = right, left
    cells = [a for a in x.axes if a != left]
    mirrored = tuple(right if a == left else a for a in x.axes)
    if left not in x.axes or element in cells or right in cells or y.axes != mirrored:
        return None
    return _Rows(coefficient, consts, left, reader)


class _CovReader:
    """V[element, position, position'], with the axes of both statistics."""

    def __init__(self, block: str, layout: Layout, a: Stat, b: Stat) -> None:
        self.block = block
        self.axes = tuple(sorted({*a.axes, *b.axes}))
        ea, pa = _spread(layout.element, a, self.axes), _spread(layout.position, a, self.axes)
        eb, pb = _spread(layout.element, b, self.axes), _spread(layout.position, b, self.axes)
        same = ea == eb
        self.mask: Tensor | None = None
        if not bool(same.all()):
            if same.numel() > _MASK_LIMIT:
                raise NotAffine("a sum over many elements of a plate inside a square")
            self.mask = same
        self.element, self.left, self.right = (without_repeats(x, x.ndim) for x in (ea, pa, pb))
        self.shape = broadcast_shapes(ea.shape, pa.shape, eb.shape, pb.shape)
        self.whole = self._whole(layout)

    @property
    def is_zero(self) -> bool:
        """Whether no cell reads twice from one element."""
        return self.mask is not None and not bool(self.mask.any())

    def _whole(self, layout: Layout) -> tuple[int | None, int | None, int | None] | None:
        """The axes of element, left and right where covariances are read whole: nothing is gathered.

        None stands for one element of a plated block, and for a width of one.
        """
        if self.mask is not None or len(self.axes) > 3:
            return None
        axes: list[int | None] = []
        reads = (
            (self.element, layout.count),
            (self.left, layout.width),
            (self.right, layout.width),
        )
        for index, size in reads:
            axis = None
            if size > 1 and not (index is self.element and index.numel() == 1):
                axis = self._arange_axis(index, size)
                if axis is None or axis in axes:
                    return None
            axes.append(axis)
        element, left, right = axes
        return (element, left, right) if set(axes) - {None} == set(self.axes) else None

    def _arange_axis(self, index: Tensor, size: int) -> int | None:
        """The one axis along which the index runs over 0 ... size - 1, if it does."""
        long = [i for i, n in enumerate(index.shape) if n > 1]
        if len(long) != 1 or index.numel() != size:
            return None
        steps = torch.arange(size, device=index.device)
        return self.axes[long[0]] if bool((index.reshape(-1) == steps).all()) else None

    def elements(self, moments: Moments) -> Tensor:
        """The covariances that are read whole, (elements, width, width)."""
        cov = moments.gaussian[self.block][1]
        assert self.whole is not None
        return cov if self.whole[0] is not None else cov[self.element.reshape(-1)]

    def __call__(self, moments: Moments) -> Tensor:
        if self.whole is not None:
            cov = self.elements(moments)
            present = [a for a in self.whole if a is not None]
            sizes = [n for n, a in zip(cov.shape, self.whole, strict=True) if a is not None]
            return cov.reshape(sizes).permute([present.index(a) for a in self.axes])
        cov = moments.gaussian[self.block][1]
        value = cov[self.element, self.left, self.right]
        value = value.expand(self.shape)
        if self.mask is not None:
            value = value * self.mask
        return value


def _spread(table: dict[str, Tensor], stat: Stat, axes: Axes) -> Tensor:
    index = table[stat.site.name][stat.index]
    index = index.permute([stat.axes.index(a) for a in axes if a in stat.axes])
    sizes = iter(index.shape)
    return index.reshape([next(sizes) if a in stat.axes else 1 for a in axes])


def _compile_pairs(
    left: list[Term], right: list[Term], structure: Structure, *, symmetric: bool
) -> list[_Pair]:
    pairs: list[_Pair] = []
    for i, s in enumerate(left):
        for j, t in enumerate(right):
            if symmetric and j < i:
                continue
            weight = 2.0 if symmetric and j > i else 1.0
            pairs += _pair(s, t, weight, structure)
    return pairs


def _pair(s: Term, t: Term, weight: float, structure: Structure) -> list[_Pair]:
    t = t.relabelled({a: fresh_label() for a in t.contracted})
    stats_s = {structure.block[o.site.name]: o for o in s.operands if isinstance(o, Stat)}
    stats_t = {structure.block[o.site.name]: o for o in t.operands if isinstance(o, Stat)}
    shared = [b for b in stats_s if b in stats_t]
    if not shared:
        return []
    t, stats_t = _unify(s, t, stats_s, stats_t, shared, structure)
    consts = [o for o in (*s.operands, *t.operands) if isinstance(o, Const)]
    fixed: list[tuple[object, Axes]] = [(o.tensor, o.axes) for o in consts]
    result: list[_Pair] = []
    for n in range(1, len(shared) + 1):
        for chosen in itertools.combinations(shared, n):
            pieces = list(fixed)
            readers = [_CovReader(b, structure.layout[b], stats_s[b], stats_t[b]) for b in chosen]
            if any(r.is_zero for r in readers):
                continue
            scale = weight * s.coefficient * t.coefficient
            if {*stats_s, *stats_t} == {*chosen} and len(readers) == 1:
                rows = _rows(scale, consts, readers[0])
                if rows is not None:
                    result.append(rows)
                    continue
            pieces += [(r, r.axes) for r in readers]
            for block in {*stats_s, *stats_t} - {*chosen}:
                for stats in (stats_s, stats_t):
                    if block in stats:
                        stat = stats[block]
                        pieces.append((read_loc(stat, structure), stat.axes))
            result.append(_Pair(scale, pieces))
    return result


def _unify(
    s: Term,
    t: Term,
    stats_s: dict[str, Stat],
    stats_t: dict[str, Stat],
    shared: list[str],
    structure: Structure,
) -> tuple[Term, dict[str, Stat]]:
    """Sums over the elements of a plate on both sides meet only in equal elements: one label serves."""
    if len(shared) != 1:
        return t, stats_t
    (block,) = shared
    layout = structure.layout[block]
    if layout.count == 1:
        return t, stats_t
    a, b = _element_label(stats_s[block], layout), _element_label(stats_t[block], layout)
    if a is None or b is None or not torch.equal(a[1], b[1]):
        return t, stats_t
    renamed = t.relabelled({b[0]: a[0]})
    return renamed, {
        structure.block[o.site.name]: o for o in renamed.operands if isinstance(o, Stat)
    }


def _element_label(stat: Stat, layout: Layout) -> tuple[int, Tensor] | None:
    """The one contracted label that the element depends on, when different values differ."""
    element = layout.element[stat.site.name][stat.index]
    if element.numel() == 0:
        return None
    varying = [
        i for i in range(element.ndim) if not bool((element == element.narrow(i, 0, 1)).all())
    ]
    if len(varying) != 1 or stat.axes[varying[0]] < 0:
        return None
    (i,) = varying
    line = element.movedim(i, 0).reshape(element.shape[i], -1)[:, 0]
    return (stat.axes[i], line) if torch.unique(line).numel() == line.numel() else None
