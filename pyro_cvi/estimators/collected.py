"""Sums in a product, multiplied out no further than into functions and what is affine.

    (h_t - mu - g (h_s - mu))^2  =  A^2 + 2 g A B + g^2 B^2,   A = h_t - mu,  B = -(h_s - mu),

with g a function of other sites: three terms, where all scalars multiplied out are sixteen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyro_cvi.algebra.expression import (
    IDENTITY,
    Const,
    Expression,
    Group,
    Link,
    Opaque,
    Operand,
    Stat,
    Term,
    merge_operands,
)
from pyro_cvi.estimators.affine import NotAffine, flatten
from pyro_cvi.estimators.moments import Structure

__all__ = ["collected"]

Pieces = list[tuple[tuple[Operand, ...], Group]]
"""Each a product of functions, and the affine sum that they multiply."""


def collected(t: Term, structure: Structure) -> list[Term] | None:
    """The term with its sums taken apart by the functions in them; None if there is nothing to do.

    Where a sum is multiplied by a function of its own block, values of other blocks in it are to be
    outside like functions.
    """
    groups = {id(o): o for o in t.operands if isinstance(o, Group)}
    for reader in (_Reader(structure, frozenset()), _Reader(structure, _others(t, structure))):
        mixed = {i: o for i, o in groups.items() if reader.kind(o) == "mixed"}
        if mixed:
            return _taken_apart(t, mixed, reader)
    return None


def _others(t: Term, structure: Structure) -> frozenset[str]:
    """The blocks of a term's sums that nothing else in it reads."""
    outside = {structure.block[s] for o in t.operands if not isinstance(o, Group) for s in o.sites}
    inside = {structure.block[s] for o in t.operands if isinstance(o, Group) for s in o.sites}
    return frozenset(inside - outside) if inside & outside else frozenset()


def _taken_apart(t: Term, groups: Mapping[int, Group], reader: _Reader) -> list[Term] | None:
    parts: dict[int, Pieces] = {}
    for i, o in groups.items():
        pieces = reader.pieces(o)
        if pieces is None:
            return None
        parts[i] = pieces
    whole = [o for o in t.operands if id(o) not in parts]
    sums = [o for o in t.operands if id(o) in parts]
    count: dict[tuple[tuple[int, int], ...], int] = {}
    for choice in itertools.product(*(range(len(parts[id(o)])) for o in sums)):
        key = tuple(sorted((id(o), i) for o, i in zip(sums, choice, strict=True)))
        count[key] = count.get(key, 0) + 1  # a square has each product of two pieces twice
    terms = []
    for key, n in count.items():
        chosen = [parts[which][i] for which, i in key]
        functions = [f for fs, _ in chosen for f in fs]
        operands = merge_operands((*whole, *functions, *(a for _, a in chosen)))
        terms.append(Term(t.coefficient * n, operands))
    return terms


@dataclass(frozen=True, eq=False)
class _Reader:
    """What is affine under a posterior's structure; values of the blocks `apart` count as functions."""

    structure: Structure
    apart: frozenset[str]

    def kind(self, o: Operand) -> str:
        """What there is of latent sites: "affine", "function" (none of it affine), "mixed", "opaque"."""
        if isinstance(o, Opaque):
            return "opaque"
        if isinstance(o, Link):
            return "function"
        if isinstance(o, Stat):
            name = o.site.name
            affine = self.structure.is_gaussian(name) and o.statistic == IDENTITY
            return (
                "affine" if affine and self.structure.block[name] not in self.apart else "function"
            )
        if not isinstance(o, Group):
            return ""
        kinds = {self.kind(p) for t in o.expression.terms for p in t.operands} - {""}
        if "opaque" in kinds:
            return "opaque"
        return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else ""

    def pieces(self, o: Group) -> Pieces | None:
        """The sum by its functions; None if one of them is summed over with what it multiplies."""
        try:
            flat = flatten(o.expression, lambda g: self.kind(g) != "mixed")
        except NotAffine:
            return None
        found: list[tuple[tuple[Operand, ...], list[Term]]] = []
        for t in flat.terms:
            kinds = [self.kind(p) for p in t.operands]
            pairs = list(zip(t.operands, kinds, strict=True))
            functions = tuple(p for p, kind in pairs if kind == "function")
            if "opaque" in kinds or any(a > 0 for p in functions for a in p.axes):
                return None
            rest = Term(t.coefficient, tuple(p for p, kind in pairs if kind != "function"))
            same = [terms for known, terms in found if _same_functions(known, functions)]
            if same:
                same[0].append(rest)
            else:
                found.append((functions, [rest]))
        if flat.has_constant and not any(fs == () for fs, _ in found):
            found.append(((), []))
        outer = {i - len(o.axes): a for i, a in enumerate(o.axes)}
        result = []
        for functions, terms in found:
            constant = 0.0 if functions else flat.constant
            own = flatten(Expression(flat.shape, constant, tuple(terms)))
            moved = Term(1.0, functions).relabelled(outer).operands
            result.append((moved, Group(own, o.axes)))
        return result


def _same_functions(p: Sequence[Operand], q: Sequence[Operand]) -> bool:
    rest = list(q)
    for a in p:
        at = next((i for i, b in enumerate(rest) if _same(a, b)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _same(a: Operand, b: Operand) -> bool:
    """Whether two operands are known to be the same function of the same values."""
    if a is b:
        return True
    if a.axes != b.axes or type(a) is not type(b):
        return False
    if isinstance(a, Stat) and isinstance(b, Stat):
        same = a.site.name == b.site.name and a.statistic == b.statistic
        return same and a.index.equal(b.index)
    if isinstance(a, Const) and isinstance(b, Const):
        return a.tensor is b.tensor or (not a.tensor.requires_grad and a.tensor.equal(b.tensor))
    if isinstance(a, Group) and isinstance(b, Group):
        return _same_sum(a.expression, b.expression)
    if isinstance(a, Link) and isinstance(b, Link):
        if a.name != b.name or a.function is not b.function or len(a.arguments) != len(b.arguments):
            return False
        return all(_same_sum(x, y) for x, y in zip(a.arguments, b.arguments, strict=True))
    return False


def _same_sum(a: Expression, b: Expression) -> bool:
    if a is b:
        return True
    constants = isinstance(a.constant, float) and isinstance(b.constant, float)
    if not constants or a.constant != b.constant or a.shape != b.shape:
        return False
    return len(a.terms) == len(b.terms) and all(
        s.coefficient == t.coefficient
        and len(s.operands) == len(t.operands)
        and all(_same(p, q) for p, q in zip(s.operands, t.operands, strict=True))
        for s, t in zip(a.terms, b.terms, strict=True)
    )
