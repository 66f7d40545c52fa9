"""What an expression is made of, in how many terms when multiplied out, and what has no average."""

from __future__ import annotations

import math

from pyro_cvi.algebra.expression import Expression, Group, Link, Opaque, Operand, Stat, Term, inside
from pyro_cvi.algebra.reason import Reason

__all__ = [
    "MOST_PIECES",
    "MOST_PREDICTORS",
    "all_operands",
    "all_terms",
    "count_pieces",
    "why_sampled",
]

MOST_PREDICTORS = 16
"""Scalar predictors of a softmax beyond which it is sampled; of other functions, two."""
MOST_PIECES = 256
"""Terms that a product of sums may have when it is multiplied out; one of more is kept whole."""
MOST_RULES = 8
"""Of these, those that take a quadrature each."""


def count_pieces(t: Term) -> int:
    """The number of terms when all sums in a term are multiplied out."""
    return math.prod(_count(o.expression) for o in t.operands if isinstance(o, Group))


def _count(e: Expression) -> int:
    return int(e.has_constant) + sum(count_pieces(t) for t in e.terms)


def all_operands(e: Expression) -> list[Operand]:
    """All operands of an expression, and those inside of them."""
    result: list[Operand] = []
    for t in e.terms:
        for o in t.operands:
            result.append(o)
            for part in inside(o):
                result += all_operands(part)
    return result


def all_terms(e: Expression) -> list[Term]:
    """All terms of an expression and of those inside of it."""
    result = list(e.terms)
    for o in all_operands(e):
        result += [t for part in inside(o) for t in part.terms]
    return result


def why_sampled(o: Operand) -> Reason:
    """What it is in an operand that has no expectation."""
    if isinstance(o, Opaque):
        return o.reason
    if isinstance(o, Link):
        parts = [p for a in o.arguments for p in all_operands(a)]
        for p in parts:
            if isinstance(p, Opaque):
                return p.reason
        others = sorted(
            {p.site.name for p in parts if isinstance(p, Stat) and p.site.kind != "real"}
        )
        if others:
            return Reason(f"'{o.name}' of '{others[0]}', which is not Gaussian")
        most = MOST_PREDICTORS if o.name == "logsumexp" else "two"
        return Reason(f"'{o.name}' of more than {most} scalar predictors")
    if isinstance(o, Group):
        for t in o.expression.terms:
            for p in t.operands:
                if isinstance(p, Opaque | Link):
                    return why_sampled(p)
    return Reason("enters the density in a way that is not conjugate")
