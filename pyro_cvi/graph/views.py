"""Factors rewritten to read a Gaussian block through views: small groups of its linear forms.

A *coupling* is what one cell of a factor reads of the block at once: the affine expressions (*roots*)
inside one square, link or product. Its scalars need a joint covariance; those of different couplings do
not. The two structures differ in what a view is: a root's value (processes), or the scalars themselves
(chains).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pyro_cvi.algebra.expression import (
    IDENTITY,
    Axes,
    Const,
    Expression,
    Group,
    Link,
    Opaque,
    Operand,
    Stat,
    Term,
    expand,
)
from pyro_cvi.estimators.affine import NotAffine, flatten
from pyro_cvi.gaussians import Layout
from pyro_cvi.graph.symbolic import Factor

__all__ = [
    "Coupling",
    "NoViewError",
    "Root",
    "Viewed",
    "couplings",
    "labels_of",
    "rewritten",
    "stat_of",
    "touching",
    "view_layout",
]


class NoViewError(ValueError):
    """A factor reads the block in a way that small views do not serve; the message says which."""


@dataclass(frozen=True, eq=False)
class Root:
    """The terms of one expression that are linear in the block, each one statistic and constants.

    `labels` are the names that the expression's axes have in the coupling; None where a statistic
    stands in a product by itself, and its axes have these names already.
    """

    terms: tuple[Term, ...]
    labels: Axes | None = None

    @property
    def varying(self) -> tuple[int, ...]:
        """The axes along which the value varies."""
        axes = {a for t in self.terms for a in t.labels}
        return tuple(sorted(a for a in axes if self.labels is None or a < 0))

    def outer(self, axis: int) -> int:
        """The name of an axis in the coupling."""
        return axis if self.labels is None else self.labels[axis]

    def inner(self, label: int) -> int:
        """The axis that has this name."""
        if self.labels is None:
            return label
        if label not in self.labels:
            raise NoViewError("parts of a product that vary along different axes")
        return self.labels.index(label) - len(self.labels)


@dataclass(frozen=True, eq=False)
class Viewed:
    """A block as its factors see it.

    `layouts` are those of the parts that its leaves are in, by name; `factors` the rewritten ones,
    each by the name of the first that it stands for, and `absorbed` the names of the others; `priors`
    those that the block's own form stands for.
    """

    layouts: dict[str, Layout]
    factors: dict[str, Factor]
    priors: tuple[str, ...] = ()
    absorbed: frozenset[str] = frozenset()

    def seen(self, factors: Sequence[Factor]) -> list[Factor]:
        """The factors as they read this block, and without the priors that it stands for."""
        gone = self.absorbed.union(self.priors)
        return [self.factors.get(f.name, f) for f in factors if f.name not in gone]


Coupling = list[Root]


def stat_of(t: Term) -> Stat:
    """The one statistic of a linear term."""
    (stat,) = [o for o in t.operands if isinstance(o, Stat)]
    return stat


def labels_of(coupling: Coupling) -> Axes:
    """The axes along which anything in a coupling varies."""
    return tuple(sorted({r.outer(a) for r in coupling for a in r.varying}))


def touching(factors: Sequence[Factor], sites: frozenset[str]) -> list[Factor]:
    """The factors that read these sites; NoViewError if one does so by a value that left the algebra."""
    found = [f for f in factors if f.expression.sites & sites or set(f.forced) & sites]
    if any(set(f.forced) & sites for f in found):
        raise NoViewError("a value that left the algebra")
    return found


def view_layout(name: str, count: int, width: int, device: torch.device) -> Layout:
    """The layout of a made-up site that stands for so many views of that width."""
    index = torch.arange(count * width, device=device)
    element, position = index // width, index % width
    return Layout((name,), {name: (count, width)}, {name: element}, {name: position}, count, width)


Replace = Callable[[Root], tuple[Term, ...]]


def couplings(e: Expression, sites: frozenset[str]) -> Iterator[Coupling]:
    """What the terms of a log density read of these sites, term by term."""
    for t in e.terms:
        if t.sites & sites:
            found: Coupling = []

            def note(root: Root, found: Coupling = found) -> tuple[Term, ...]:
                found.append(root)
                return root.terms

            _term(t, sites, note)
            yield found


def rewritten(
    e: Expression, sites: frozenset[str], answers: Iterator[list[tuple[Term, ...]]]
) -> Expression:
    """The expression with the roots of each coupling replaced by the next of the answers."""
    terms = []
    for t in e.terms:
        if t.sites & sites:
            given = iter(next(answers))
            t = _term(t, sites, lambda root, given=given: next(given))  # type: ignore[misc]
        terms.append(t)
    return Expression(e.shape, e.constant, tuple(terms))


def _term(t: Term, sites: frozenset[str], fn: Replace) -> Term:
    new: dict[int, Operand] = {}  # a square is the same operand twice, and stays it
    reading = {id(o): o for o in t.operands if o.sites & sites}.values()
    sizes: dict[int, int] = {}
    if len(reading) > 1:  # each cell of their product is one coupling
        for o in reading:
            sizes |= dict(zip(o.axes, o.shape, strict=True))
    for o in t.operands:
        if id(o) not in new:
            new[id(o)] = _operand(_widened(o, sizes) if o.sites & sites else o, sites, fn)
    return Term(t.coefficient, tuple(new[id(o)] for o in t.operands))


def _widened(o: Operand, sizes: dict[int, int]) -> Operand:
    """A group or link with all of these axes, along which it may be constant."""
    more = tuple(a for a in sizes if a not in o.axes)
    if not more or isinstance(o, Stat | Const | Opaque):
        return o
    shape, axes = (*(sizes[a] for a in more), *o.shape), (*more, *o.axes)
    if isinstance(o, Link):
        return replace(o, shape=shape, axes=axes)
    return Group(expand(o.expression, shape), axes)


def _operand(o: Operand, sites: frozenset[str], fn: Replace) -> Operand:
    if not o.sites & sites:
        return o
    if isinstance(o, Stat):
        return _bare(o, fn)
    if isinstance(o, Group):
        return Group(_inside(o.expression, o.axes, sites, fn), o.axes)
    if isinstance(o, Link):
        arguments = tuple(_inside(expand(a, o.shape), o.axes, sites, fn) for a in o.arguments)
        return replace(o, arguments=arguments)
    raise NoViewError(getattr(o, "reason", "an opaque part"))


def _bare(o: Stat, fn: Replace) -> Stat:
    """A statistic that stands in a product by itself."""
    if o.statistic != IDENTITY:
        raise NoViewError(f"{o.statistic} of '{o.site.name}'")
    (term,) = fn(Root((Term(1.0, (o,)),)))
    (new,) = term.operands
    assert isinstance(new, Stat) and term.coefficient == 1
    return new


def _inside(e: Expression, labels: Axes, sites: frozenset[str], fn: Replace) -> Expression:
    if not e.sites & sites:
        return e
    if any(isinstance(o, Group) and o.sites & sites for t in e.terms for o in t.operands):
        try:
            e = flatten(e, lambda g: not g.sites & sites)
        except NotAffine as error:
            raise NoViewError(str(error)) from error
    linear, others = [], []
    for t in e.terms:
        if not t.sites & sites:
            others.append(t)
        elif _is_linear(t, sites):
            linear.append(t)
        else:
            others.append(_product(t, labels, sites, fn))
    if linear:
        linear = list(fn(Root(tuple(linear), labels)))
    return Expression(e.shape, e.constant, tuple(linear + others))


def _is_linear(t: Term, sites: frozenset[str]) -> bool:
    stats = [o for o in t.operands if not isinstance(o, Const)]
    return len(stats) == 1 and isinstance(stats[0], Stat) and stats[0].statistic == IDENTITY


def _product(t: Term, labels: Axes, sites: frozenset[str], fn: Replace) -> Term:
    """A product inside of a sum: each part reads the block by itself."""
    for o in t.operands:
        if o.sites & sites and any(a > 0 for a in o.axes):
            raise NoViewError("a sum of products inside of a function")
    back = {label: i - len(labels) for i, label in enumerate(labels)}
    outer = t.relabelled({a: label for label, a in back.items()})
    return _term(outer, sites, fn).relabelled(back)
