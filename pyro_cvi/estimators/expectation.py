"""E_q[expression], compiled once per plan: exact where the algebra allows, else by quadrature.

A term is a product of operands. Operands that share no block are independent under q, so the
expectation of a term is the product over its connected components:

- one sufficient statistic of a site: its mean parameter (exact);
- a multilinear expression of Gaussian blocks, or a product of two: E a E b + Cov(a, b) (exact);
- a function of one or two affine Gaussian predictors: closed form or quadrature;
- anything else cannot be averaged here, and its sites have to be sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_cvi.algebra.evaluate import operand_value
from pyro_cvi.algebra.expression import (
    Axes,
    Const,
    Expression,
    Group,
    Link,
    Operand,
    Stat,
    Statistic,
    Term,
    add,
    contract,
    merge_operands,
    negate,
)
from pyro_cvi.algebra.moves import move
from pyro_cvi.algebra.reason import Cause, Reason
from pyro_cvi.estimators.affine import Affine, Covariance, NotAffine, compile_affine, flatten
from pyro_cvi.estimators.collected import collected
from pyro_cvi.estimators.moments import Moments, Structure, statistic_position
from pyro_cvi.estimators.pieces import (
    MOST_PIECES,
    MOST_PREDICTORS,
    MOST_RULES,
    all_operands,
    all_terms,
    count_pieces,
    why_sampled,
)
from pyro_cvi.estimators.products import Component, Piece, Product, bilinear, separated
from pyro_cvi.estimators.quadrature import gaussian_expectation
from pyro_cvi.estimators.statistics import Gather, Summed, summed
from pyro_cvi.estimators.univariate import Points, family_expectation, has_rule
from pyro_cvi.estimators.valleys import has_valley

__all__ = ["KINDS", "Expectation", "Function", "How", "compile_expectation"]

KINDS = ("exact", "quadrature", "points", "sampled")
"""How a message may be found, the best first."""
_NODES, _MOST_NODES = 20, 512
"""Nodes for each predictor of a function, and of all of them."""
_GRID, _SEEN = 33, 256
"""Points of a line on which a valley is looked for, and about how many cells are."""


@dataclass(frozen=True)
class How:
    """How one site's message from one factor is found, and why.

    Kinds: "exact", "quadrature" (of a predictor), "points" (fixed ones, of whole sites), "sampled".
    """

    kind: str
    reason: str
    cause: Cause = Cause.PLAIN

    @property
    def rank(self) -> int:
        return KINDS.index(self.kind)


class Function(NamedTuple):
    """A function of one Gaussian predictor in cells of a shape, of which `axes` are the labels.

    `moments` has mean and variance of the predictor in the shape `cells`.
    """

    predictor: Affine
    axes: Axes
    shape: tuple[int, ...]
    cells: tuple[int, ...]


@dataclass(eq=False)
class Expectation:
    """E_q of an expression; call it with moments. `how` says per site how it was done.

    Sites whose entry is "sampled" cannot be averaged: the expectation must then not be called.
    """

    shape: tuple[int, ...]
    constant: Tensor | float
    terms: list[tuple[float, list[tuple[Tensor, Axes]], list[Component]]] = field(
        default_factory=list
    )
    how: dict[str, How] = field(default_factory=dict)
    couples: bool = False
    """Whether a product joins elements that are held independent: it is not affine in theirs."""

    @property
    def sampled(self) -> frozenset[str]:
        return frozenset(s for s, h in self.how.items() if h.kind == "sampled")

    def __call__(self, moments: Moments) -> Tensor:
        """Right-aligned to `shape`, with axes of size one where it is constant."""
        ndim = len(self.shape)
        total: Tensor | float = self.constant
        for coefficient, consts, components in self.terms:
            pieces = [*consts, *((c(moments), c.axes) for c in components)]
            value = contract(pieces, ndim)
            if coefficient != 1:
                value = coefficient * value
            first = not isinstance(total, Tensor) and total == 0
            total = value if first else value + total  # tables of a large plate are not copied
        return total if isinstance(total, Tensor) else torch.tensor(total, device="cpu")

    def has_valley(self, moments: Moments) -> bool:
        """Whether a term by quadrature, along one of its predictors, leads up on two sides."""
        for coefficient, consts, components in self.terms:
            signs = {s for t, _ in consts for s in t.sign().unique().tolist()} - {0.0}
            sign = math.copysign(1.0, coefficient) * (signs.pop() if len(signs) == 1 else not signs)
            if any(isinstance(c, _Quadrature) and c.has_valley(moments, sign) for c in components):
                return True
        return False

    def magnitude(self, moments: Moments) -> Tensor:
        """Like the value, with the size of each term in the place of the term."""
        ndim = len(self.shape)
        constant = self.constant
        total = (
            constant.abs()
            if isinstance(constant, Tensor)
            else torch.tensor(abs(constant), device="cpu")
        )
        for coefficient, consts, components in self.terms:
            pieces = [*consts, *((c(moments), c.axes) for c in components)]
            total = (coefficient * contract(pieces, ndim)).abs() + total
        return total

    def summed(self, weight: Tensor | float, shape: tuple[int, ...]) -> Summed:
        """sum over the cells `shape` of weight * E_q[expression], the weight contracted beforehand."""
        return summed(self.constant, self.terms, weight, shape)

    @property
    def evaluations(self) -> int:
        """About how many values of functions quadrature needs at each call."""
        count = 0
        for c in (c for _, _, components in self.terms for c in components):
            if isinstance(c, _Quadrature):
                count += c.cells * min(_NODES ** len(c.affines), _MOST_NODES)
            elif isinstance(c, _Nested):
                count += c.inner.evaluations
        return count

    def functions(self) -> list[Function] | None:
        """The components that are functions of one Gaussian predictor; None if others are not exact."""
        found: list[Function] = []
        if self.couples:
            return None
        for c in (c for _, _, components in self.terms for c in components):
            if isinstance(c, _ExpMean):
                found.append(Function(c.affine, c.axes, c.shape, c.shape))
            elif isinstance(c, _Quadrature) and len(c.affines) == 1:
                found.append(Function(c.affines[0], c.axes, c.shape, (c.cells,)))
            elif isinstance(c, _Quadrature | _FamilyQuadrature | _Tilted | _Nested):
                return None
        return found

    def note(
        self, sites: frozenset[str] | set[str], kind: str, reason: str, cause: Cause = Cause.PLAIN
    ) -> None:
        """Record the worst treatment seen for each site."""
        new = How(kind, reason, cause)
        for site in sites:
            old = self.how.get(site)
            jumps = new.kind == "sampled" and cause is Cause.NO_GRADIENT
            if old is None or new.rank > old.rank or (new.rank == old.rank and jumps):
                self.how[site] = new


def compile_expectation(
    e: Expression, structure: Structure, *, learn_constants: bool = False
) -> Expectation:
    """Compile E_q[e] for a posterior of the given structure."""
    constant = e.constant
    if isinstance(constant, Tensor) and not constant.requires_grad and not bool(constant.any()):
        constant = 0.0  # of the size of the data, it would cost a pass over them in every sweep
    result = Expectation(e.shape, constant)
    for t in e.terms:
        _compile_term(t, structure, result, learn_constants)
    return result


def _compile_term(t: Term, structure: Structure, result: Expectation, learn: bool) -> None:
    consts, groups = _components(t, structure)
    compiled: list[list[Piece]] = []
    opaque_groups: list[list[Operand]] = []
    for operands in groups:
        known = not Term(1.0, tuple(operands)).opaque
        component = _compile_component(operands, structure, result, learn) if known else None
        if component is None:
            opaque_groups.append(operands)
            continue
        apart: list[Piece] | None = None
        if isinstance(component, Product):
            apart = separated(component) or bilinear(component)
        compiled.append([(1.0, [component])] if apart is None else apart)
    if opaque_groups:  # the other components stay noted: given draws of these, they are averaged so
        failure = _compile_multiplied_out(t, structure, result, learn)
        if failure is not None:
            for operands in opaque_groups:
                _note_sampled(operands, result, failure)
        return
    for choice in itertools.product(*compiled):
        coefficient = t.coefficient * math.prod(c for c, _ in choice)
        result.terms.append((coefficient, consts, [p for _, parts in choice for p in parts]))


def _note_sampled(operands: list[Operand], result: Expectation, failure: str) -> None:
    for o in operands:
        why = Reason(failure) if failure else why_sampled(o)
        result.note(o.sites, "sampled", why.text, why.cause)
        for part in Term(1.0, (o,)).opaque:
            result.note(part.sites, "sampled", part.reason.text, part.reason.cause)


def _compile_multiplied_out(
    t: Term, structure: Structure, result: Expectation, learn: bool
) -> str | None:
    """Try again with the term's groups multiplied out: None if every piece then has an expectation.

    Else the reason why it was not tried, or nothing.
    """
    if not any(isinstance(o, Group) for o in t.operands) or t.opaque:
        return ""
    if count_pieces(t) > MOST_PIECES:
        return f"multiplied out it has more than {MOST_PIECES} terms: kept whole"
    together = collected(t, structure)
    if together is not None and _compile_all(together, 0.0, structure, result, learn) is None:
        return None
    try:
        labels = sorted(a for a in t.labels if a < 0)
        whole = flatten(Expression((1,) * (-min(labels, default=0)), 0.0, (t,)))
    except NotAffine:
        return ""
    terms = [Term(s.coefficient, merge_operands(s.operands)) for s in whole.terms]
    if any(isinstance(o, Group) for s in terms for o in s.operands):
        return ""
    return _compile_all(terms, whole.constant, structure, result, learn)


def _compile_all(
    terms: Sequence[Term],
    constant: Tensor | float,
    structure: Structure,
    result: Expectation,
    learn: bool,
) -> str | None:
    """Compile these terms in the place of one: None if all of them have an expectation."""
    trial, by_rule = Expectation(result.shape, constant), 0
    for t in terms:
        before = len(trial.terms)
        _compile_term(t, structure, trial, learn)
        if trial.sampled:
            return ""
        components = [c for _, _, found in trial.terms[before:] for c in found]
        by_rule += sum(isinstance(c, _Quadrature | _FamilyQuadrature) for c in components)
        if by_rule > MOST_RULES:
            return f"multiplied out it takes more than {MOST_RULES} quadratures: kept whole"
    result.constant = result.constant + trial.constant
    result.terms += trial.terms
    result.couples = result.couples or trial.couples
    for site, how in trial.how.items():
        result.note({site}, how.kind, how.reason, how.cause)
    return None


def _components(
    t: Term, structure: Structure
) -> tuple[list[tuple[Tensor, Axes]], list[list[Operand]]]:
    """Constants, and the other operands grouped by shared blocks."""
    consts = [(o.tensor, o.axes) for o in t.operands if isinstance(o, Const)]
    groups: list[tuple[set[str], list[Operand]]] = []
    for o in t.operands:
        if isinstance(o, Const):
            continue
        if not o.sites:
            value = evaluate_constant(o)
            consts.append((value, o.axes))
            continue
        blocks = {structure.block[s] for s in o.sites}
        members: list[Operand] = [o]
        for g in [g for g in groups if g[0] & blocks]:
            groups.remove(g)
            blocks |= g[0]
            members = g[1] + members
        groups.append((blocks, members))
    return consts, [members for _, members in groups]


def evaluate_constant(o: Operand) -> Tensor:
    """The value of an operand without sites."""

    def read(stat: Stat) -> Tensor:
        raise AssertionError(stat)

    return operand_value(o, read)


def _compile_component(
    operands: list[Operand], structure: Structure, result: Expectation, learn: bool
) -> Component | None:
    if len(operands) == 1:
        (o,) = operands
        if isinstance(o, Stat) and not structure.is_gaussian(o.site.name):
            statistic = _statistic(o, structure, result)
            if statistic is not None:
                return statistic
        if isinstance(o, Group):
            nested = _nested(o, structure, result, learn)
            if nested is not None:
                return nested
    exact = _multilinear(operands, structure)
    if exact is not None:
        sites = frozenset().union(*(o.sites for o in operands))
        result.note(sites, "exact", "Gaussian, quadratic in the log density")
        if isinstance(exact, Product):
            coupled = exact.a.coupled | exact.b.coupled
            inside = {s for s in sites if structure.block[s] in coupled}
            result.note(inside, "quadrature", "closed form, but it joins elements held independent")
            result.couples = result.couples or bool(inside)
        return exact
    tilted = _tilted(operands, structure)
    if tilted is not None:
        sites = frozenset().union(*(o.sites for o in operands))
        why = "closed form of E exp times a product, not conjugate"
        result.note(sites, "quadrature", why, Cause.EXPONENTIAL)
        return tilted
    return _quadrature(operands, structure, result, learn)


def _statistic(o: Stat, structure: Structure, result: Expectation) -> Component | None:
    family = structure.family[o.site.name]
    position = statistic_position(family, o.statistic)
    if position is None:
        return None
    result.note(o.sites, "exact", f"{family.name}, affine in its sufficient statistics")
    shape = o.site.shape
    if family.event_dims[position] < family.event_dim:  # one value for a whole matrix
        shape = shape[: len(shape) - family.event_dim]
    return Gather(o, position, shape)


class _Nested:
    def __init__(self, inner: Expectation, o: Group) -> None:
        self.inner, self.shape, self.axes = inner, o.shape, o.axes

    def __call__(self, moments: Moments) -> Tensor:
        return self.inner(moments).expand(self.shape)


def _nested(o: Group, structure: Structure, result: Expectation, learn: bool) -> Component | None:
    inner = compile_expectation(o.expression, structure, learn_constants=learn)
    if inner.sampled:
        return None
    for site, how in inner.how.items():
        result.note({site}, how.kind, how.reason, how.cause)
    return _Nested(inner, o)


class _AffineMean:
    def __init__(self, affine: Affine, axes: Axes, shape: tuple[int, ...]) -> None:
        self.affine, self.axes, self.shape = affine, axes, shape

    def __call__(self, moments: Moments) -> Tensor:
        return self.affine.mean(moments).expand(self.shape)


def _multilinear(operands: list[Operand], structure: Structure) -> Component | None:
    if len(operands) > 2:
        return None
    axes = tuple(sorted({a for o in operands for a in o.axes}))
    shape = _sizes(operands, axes)
    try:
        first = compile_affine(_as_cells(operands[0], axes, shape), structure)
        if len(operands) == 1:
            return _AffineMean(first, axes, shape)
        if _same_factor(operands[0], operands[1]):
            return Product(first, first, None, axes, shape)
        second = compile_affine(_as_cells(operands[1], axes, shape), structure)
        return Product(first, second, Covariance(first, second), axes, shape)
    except NotAffine:
        return None


def _sizes(operands: list[Operand], axes: Axes) -> tuple[int, ...]:
    sizes = {a: n for o in operands for a, n in zip(o.axes, o.shape, strict=True)}
    return tuple(sizes[a] for a in axes)


def _as_cells(o: Operand, axes: Axes, shape: tuple[int, ...]) -> Expression:
    """An operand as an expression over cells: the given labels become its output axes."""
    mapping = {a: i - len(axes) for i, a in enumerate(axes)}
    return Expression(shape, 0.0, (Term(1.0, (o,)).relabelled(mapping),))


# --- quadrature ------------------------------------------------------------------------------------


class _ExpMean:
    """E exp(f) = exp(m + v / 2)."""

    def __init__(self, affine: Affine, axes: Axes, shape: tuple[int, ...]) -> None:
        self.affine, self.axes, self.shape = affine, axes, shape

    def __call__(self, moments: Moments) -> Tensor:
        mean, variance = moments.predictor(self.affine, self.shape)
        return (mean + 0.5 * variance).exp()


class _Tilted:
    """E e^f g h = E e^f ((E g + Cov(f, g)) (E h + Cov(f, h)) + Cov(g, h)), jointly Gaussian."""

    def __init__(
        self, exponent: Affine, factors: list[Affine], axes: Axes, shape: tuple[int, ...]
    ) -> None:
        self.exponent, self.factors, self.axes, self.shape = exponent, factors, axes, shape
        self.cross = [Covariance(exponent, g) for g in factors]
        self.between = Covariance(*factors) if len(factors) == 2 else None

    def __call__(self, moments: Moments) -> Tensor:
        half = 0.5 * self.exponent.variance(moments)
        value = (self.exponent.mean(moments) + half).exp()
        moved = [
            g.mean(moments) + c(moments) for g, c in zip(self.factors, self.cross, strict=True)
        ]
        if len(moved) == 1:
            value = value * moved[0]
        elif self.between is not None:
            value = value * (moved[0] * moved[1] + self.between(moments))
        return value.expand(self.shape)


def _tilted(operands: list[Operand], structure: Structure) -> Component | None:
    """exp of an affine predictor, or several, times one or two affine ones."""
    exps = [o for o in operands if isinstance(o, Link) and o.name == "exp"]
    others = [o for o in operands if o not in exps]
    if not exps or len(others) > 2 or len(operands) == 1:
        return None
    axes = tuple(sorted({a for o in operands for a in o.axes}))
    shape = _sizes(operands, axes)
    exponent = _argument_cells(exps[0], axes, shape)
    for o in exps[1:]:
        exponent = add(exponent, _argument_cells(o, axes, shape))
    try:
        f = compile_affine(exponent, structure)
        factors = [compile_affine(_as_cells(o, axes, shape), structure) for o in others]
    except NotAffine:
        return None
    if all(_is_gaussian(a) for a in (f, *factors)):
        return _Tilted(f, factors, axes, shape)
    return None


def _is_gaussian(affine: Affine) -> bool:
    """Whether an affine expression is a Gaussian, and no product of independent ones."""
    terms = affine.expression.terms
    return all(sum(isinstance(o, Stat) for o in t.operands) == 1 for t in terms)


def _argument_cells(o: Link, axes: Axes, shape: tuple[int, ...]) -> Expression:
    """The argument of a one-argument link as an expression over cells."""
    (e,) = o.arguments
    order = {a: i - len(axes) for i, a in enumerate(axes)}
    renamed = {i - len(o.shape): order[a] for i, a in enumerate(o.axes)}
    constant = e.constant
    if isinstance(constant, Tensor) and constant.ndim:
        wide = constant.expand(o.shape)
        kept = sorted(range(len(o.axes)), key=lambda i: order[o.axes[i]])
        view = [1] * len(axes)
        for i, a in enumerate(o.axes):
            view[order[a]] = o.shape[i]
        constant = wide.permute(kept).reshape(view)
    return Expression(shape, constant, tuple(t.relabelled(renamed) for t in e.terms))


class _Quadrature:
    """E g(f_1, ..., f_p) cell by cell, with g the component's operands multiplied."""

    def __init__(
        self,
        whole: Expression,
        predictors: list[tuple[Expression, Affine]],
        structure: Structure,
        axes: Axes,
        shape: tuple[int, ...],
        learn: bool,
    ) -> None:
        self.whole, self.axes, self.shape, self.learn = whole, axes, shape, learn
        self.affines = [a for _, a in predictors]
        self.position = {id(e): i for i, (e, _) in enumerate(predictors)}
        pairs = itertools.combinations(range(len(self.affines)), 2)
        self.cross = {(i, j): Covariance(self.affines[i], self.affines[j]) for i, j in pairs}
        self.cells = whole.shape[0] if whole.shape else 1

    def __call__(self, moments: Moments) -> Tensor:
        n = self.cells
        found = [moments.predictor(a, (n,)) for a in self.affines]
        mean = torch.stack([m for m, _ in found])
        like = mean[0]
        entries = {(i, i): v for i, (_, v) in enumerate(found)}
        for (i, j), cross in self.cross.items():
            entries[i, j] = entries[j, i] = _vector(cross(moments), like)
        each = range(len(self.affines))
        cov = torch.stack([torch.stack([entries[i, j] for j in each]) for i in each])
        value = gaussian_expectation(self._cells, mean, cov, differentiate_constants=self.learn)
        return value.reshape(self.shape)

    def has_valley(self, moments: Moments, sign: float) -> bool:
        """Whether sign * g has an inner minimum along a predictor, three deviations to both sides.

        The others stay half a deviation off their means, where a product with them is not flat.
        """
        index = torch.arange(0, self.cells, max(1, self.cells // _SEEN), device="cpu")
        found = [tuple(x[index] for x in moments.predictor(a, (self.cells,))) for a in self.affines]
        grid = torch.linspace(-3.0, 3.0, _GRID, device="cpu")[:, None]
        for i, (mean, variance) in enumerate(found):
            others = [m + 0.5 * v.sqrt() for m, v in found]
            line = mean + grid.to(mean) * variance.sqrt()
            z = [line if j == i else x.expand_as(line) for j, x in enumerate(others)]
            if has_valley(self._cells(z, index), sign):
                return True
        return False

    def _cells(self, z: list[Tensor], index: Tensor | None) -> Tensor:
        nodes = {k: z[i] for k, i in self.position.items()}
        value = _nodes_value(self.whole, _At(nodes, None, z[0], index))
        return value.expand(z[0].shape) if value.shape != z[0].shape else value


def _vector(value: Tensor | float, like: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return like.new_full(like.shape, value)
    return value.expand(like.shape)


class _FamilyQuadrature:
    """E g(x) cell by cell, where each cell sees one scalar of a Gamma, inverse Gamma or Beta site."""

    def __init__(
        self, whole: Expression, stat: Stat, structure: Structure, axes: Axes,
        shape: tuple[int, ...], learn: bool,
    ) -> None:  # fmt: skip
        self.whole, self.axes, self.shape, self.learn = whole, axes, shape, learn
        self.site = stat.site.name
        self.family = structure.family[self.site]
        self.index = stat.index.reshape(-1)
        self.cells = whole.shape[0] if whole.shape else 1

    def __call__(self, moments: Moments) -> Tensor:
        means = moments.other[self.site]
        natural = moments.natural.get(self.site)
        if natural is None:
            natural = self.family.to_natural(tuple(m.detach() for m in means))
        value = family_expectation(
            self.family,
            [n.reshape(-1)[self.index] for n in natural],
            [m.reshape(-1)[self.index] for m in means],
            self._cells,
            self.cells,
            differentiate_constants=self.learn,
        )
        return value.reshape(self.shape)

    def _cells(self, points: Points, index: Tensor | None) -> Tensor:
        return _nodes_value(self.whole, _At({}, points, points.x, index))


class _At(NamedTuple):
    """Quadrature nodes (nodes, cells): of predictors by their id, or of one scalar's statistics."""

    predictors: dict[int, Tensor]
    scalar: Points | None
    like: Tensor
    cells: Tensor | None


def _nodes_value(e: Expression, at: _At) -> Tensor:
    """A one-axis expression at quadrature nodes, for the selected cells: (nodes, cells)."""
    if id(e) in at.predictors:
        return at.predictors[id(e)]
    total: Tensor | None = None
    for t in e.terms:
        value: Tensor | None = None
        for o in t.operands:
            factor = _nodes_operand(o, at)
            value = factor if value is None else value * factor
        assert value is not None
        value = value if t.coefficient == 1 else value * t.coefficient
        total = value if total is None else total + value
    constant = e.constant
    if isinstance(constant, Tensor) and at.cells is not None and constant.numel() > 1:
        constant = constant[at.cells]
    if total is None:
        return constant if isinstance(constant, Tensor) else at.like.new_tensor(constant)
    return total + constant if e.has_constant else total


def _nodes_operand(o: Operand, at: _At) -> Tensor:
    if isinstance(o, Const):
        return o.tensor[at.cells] if o.axes and at.cells is not None else o.tensor
    if isinstance(o, Group):
        return _nodes_value(o.expression, at)
    if isinstance(o, Link):
        return o.function(*(_nodes_value(a, at) for a in o.arguments))
    if isinstance(o, Stat) and at.scalar is not None:
        kind, power = o.statistic
        if kind == "log":
            return at.scalar.log
        return at.scalar.log1m if kind == "log1m" else at.scalar.power(power)
    raise AssertionError("a predictor was not recognised")


def _quadrature(
    operands: list[Operand], structure: Structure, result: Expectation, learn: bool
) -> Component | None:
    axes = tuple(sorted({a for o in operands for a in o.axes}))
    shape = _sizes(operands, axes)
    mapping = {a: i - len(axes) for i, a in enumerate(axes)}
    whole = Expression(shape, 0.0, (Term(1.0, tuple(operands)).relabelled(mapping),))
    if len(operands) == 1 and isinstance(operands[0], Link) and operands[0].name == "exp":
        closed = _closed_form(operands[0], axes, shape, structure)
        if closed is not None:
            sites = operands[0].sites
            why = "closed form of E exp, not conjugate"
            result.note(sites, "quadrature", why, Cause.EXPONENTIAL)
            return closed
    flat = move(whole, _flatten_cells)
    one = _one_scalar(flat, structure)
    if one is not None:
        names = ", ".join(sorted({o.name for o in all_operands(whole) if isinstance(o, Link)}))
        family = structure.family[one.site.name].name
        what = f"a function ({names})" if names else "a power"
        result.note(whole.sites, "quadrature", f"{what} of one {family} scalar")
        return _FamilyQuadrature(flat, one, structure, axes, shape, learn)
    found: list[tuple[Expression, Affine]] = []
    canonical = _find_predictors(flat, structure, found)
    links = {o.name for o in all_operands(whole) if isinstance(o, Link)}
    most = MOST_PREDICTORS if "logsumexp" in links else 2
    if canonical is None or not 1 <= len(found) <= most:
        return None
    counts = {1: "one scalar predictor", 2: "two scalar predictors"}
    count = counts.get(len(found), f"{len(found)} predictors, by quasi Monte Carlo")
    names = ", ".join(sorted(links))
    reason = f"a function ({names}) of {count}" if names else f"a polynomial of {count}"
    result.note(whole.sites, "quadrature", reason)
    return _Quadrature(canonical, found, structure, axes, shape, learn)


def _one_scalar(flat: Expression, structure: Structure) -> Stat | None:
    """The statistic through which every cell sees the same one scalar, if that is all it sees."""
    if any(t.contracted for t in all_terms(flat)):
        return None
    stats = [o for o in all_operands(flat) if isinstance(o, Stat)]
    if not stats or len({o.site.name for o in stats}) > 1:
        return None
    name = stats[0].site.name
    if structure.is_gaussian(name) or not has_rule(structure.family[name]):
        return None
    wide = max(stats, key=lambda o: o.index.numel())
    if all(bool((o.index == wide.index).all()) for o in stats):
        return wide
    return None


def _flatten_cells(x: Tensor) -> Tensor:
    return x.reshape(-1)


def _closed_form(
    o: Link, axes: Axes, shape: tuple[int, ...], structure: Structure
) -> Component | None:
    try:
        affine = compile_affine(_argument_cells(o, axes, shape), structure)
    except NotAffine:
        return None
    if affine.expression.terms and _is_gaussian(affine):
        return _ExpMean(affine, axes, shape)
    return None


def _find_predictors(
    e: Expression, structure: Structure, found: list[tuple[Expression, Affine]]
) -> Expression | None:
    """Replace maximal affine Gaussian parts by canonical predictors; None where that is impossible."""
    if not e.terms:
        return e
    affine = _linear_predictor(e, structure)
    if affine is not None:
        return _canonical(e, affine, structure, found)
    terms = []
    for t in e.terms:
        if t.contracted:
            return None
        operands: list[Operand] = []
        for o in t.operands:
            replaced = _find_in_operand(o, structure, found)
            if replaced is None:
                return None
            operands.append(replaced)
        terms.append(Term(t.coefficient, tuple(operands)))
    return Expression(e.shape, e.constant, tuple(terms))


def _find_in_operand(
    o: Operand, structure: Structure, found: list[tuple[Expression, Affine]]
) -> Operand | None:
    if isinstance(o, Const):
        return o
    if isinstance(o, Stat):
        if o.statistic != Statistic() or not structure.is_gaussian(o.site.name):
            return None
        single = Expression(o.shape if o.axes else (), 0.0, (Term(1.0, (o,)),))
        inner = _find_predictors(single, structure, found)
        return None if inner is None else Group(inner, o.axes)
    if isinstance(o, Group):
        inner = _find_predictors(o.expression, structure, found)
        return None if inner is None else Group(inner, o.axes)
    if isinstance(o, Link):
        arguments = [_find_predictors(a, structure, found) for a in o.arguments]
        if any(a is None for a in arguments):
            return None
        return Link(o.name, o.function, tuple(a for a in arguments if a), o.shape, o.axes)
    return None


def _linear_predictor(e: Expression, structure: Structure) -> Affine | None:
    """An affine expression with constant coefficients, or None."""
    try:
        flat = flatten(e)
    except NotAffine:
        return None
    for t in flat.terms:
        stats = [o for o in t.operands if isinstance(o, Stat)]
        if len(stats) != 1 or len(stats) + sum(isinstance(o, Const) for o in t.operands) != len(
            t.operands
        ):
            return None
    try:
        return compile_affine(flat, structure)
    except NotAffine:
        return None


def _canonical(
    e: Expression, whole: Affine, structure: Structure, found: list[tuple[Expression, Affine]]
) -> Expression:
    """The affine part of a function in terms of the predictors found so far: c + known, or c - known.

    `whole` is `e`, compiled.
    """
    base = Expression(e.shape, 0.0, _without_masks(e.terms))
    for known, _ in found:
        for sign in (1.0, -1.0):
            other = base if sign == 1 else negate(base)
            if known.shape == e.shape and same_expression(known, other):
                return _shifted(e, known, sign)
    pairs = itertools.zip_longest(e.terms, base.terms)
    is_whole = not e.has_constant and all(a is b for a, b in pairs)
    affine = whole if is_whole else _linear_predictor(base, structure)
    assert affine is not None
    found.append((base, affine))
    return _shifted(e, base, 1.0)


def _is_one_number(x: Tensor) -> bool:
    fixed = not x.requires_grad and x.numel() > 0
    return fixed and bool((x == x.reshape(-1)[0]).all())


def _without_masks(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Without constants that are the same in every cell: slices of a stack come with ones and zeros."""
    result = []
    for t in terms:
        coefficient, operands = t.coefficient, []
        for o in t.operands:
            if isinstance(o, Const) and not t.contracted and _is_one_number(o.tensor):
                coefficient *= float(o.tensor.reshape(-1)[0])
            else:
                operands.append(o)
        if coefficient != 0:
            same = len(operands) == len(t.operands)
            result.append(t if same else Term(coefficient, tuple(operands)))
    return tuple(result) or terms


def _shifted(e: Expression, predictor: Expression, sign: float) -> Expression:
    """e = constant + sign * predictor."""
    if sign == 1 and not e.has_constant:
        return predictor
    whole = Group(predictor, tuple(range(-predictor.ndim, 0)))
    return Expression(e.shape, e.constant, (Term(sign, (whole,)),))


def same_expression(a: Expression, b: Expression) -> bool:
    """Structural equality: the same operands term by term (tensors compared by value)."""
    if a is b:
        return True
    if (
        a.shape != b.shape
        or len(a.terms) != len(b.terms)
        or not _same_value(a.constant, b.constant)
    ):
        return False
    return all(_same_term(s, t) for s, t in zip(a.terms, b.terms, strict=True))


def _same_term(s: Term, t: Term) -> bool:
    if s.coefficient != t.coefficient or len(s.operands) != len(t.operands):
        return False
    names: dict[int, int] = {}
    for p, q in zip(s.operands, t.operands, strict=True):
        if type(p) is not type(q) or len(p.axes) != len(q.axes):
            return False
        if any(names.setdefault(i, j) != j for i, j in zip(p.axes, q.axes, strict=True)):
            return False
        if not _same_operand(p, q):
            return False
    return all(i == j for i, j in names.items() if i < 0 or j < 0)


def _same_operand(p: Operand, q: Operand) -> bool:
    if isinstance(p, Const) and isinstance(q, Const):
        return _same_value(p.tensor, q.tensor)
    if isinstance(p, Stat) and isinstance(q, Stat):
        return (
            p.site.name == q.site.name
            and p.statistic == q.statistic
            and _same_value(p.index, q.index)
        )
    return False


def _same_factor(p: Operand, q: Operand) -> bool:
    """Whether a product of two operands is a square."""
    if p is q:
        return True
    if p.axes != q.axes:
        return False
    if isinstance(p, Group) and isinstance(q, Group):
        return same_expression(p.expression, q.expression)
    return isinstance(p, Stat) and _same_operand(p, q)


def _same_value(x: Tensor | float, y: Tensor | float) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y
