"""How much of a model is taken apart: what would be more is kept whole, to be integrated or sampled.

A recursion reads in a product what it has made before, so that its expression is a sum of products of
sums of products, one level deeper at each turn. Every rule walks all of it, as often as it is read, and
what it could be averaged by is multiplied out. The size of an expression counts its operands by level,

    size(e) = sum over terms (operands, 0, ...) + sum over their parts (0, size(part)),

and those below the first few levels weigh double at each further one. Sums and squares of sums, however
long, have few levels: their size is that of what the model says, and has another limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Size", "excess", "size_of_sum", "size_of_term"]

Size = tuple[int, ...]
"""Operands at levels 0, 1, ..., and the weight of those below."""

_LEVELS = 4
"""Levels that are counted and not weighed: a density adds two or three to those of its parameters."""
_DEEP = 1 << 10
"""The most weight of operands below these levels. Densities of transformed priors have up to 30."""
_MOST = 1 << 18
"""The most operands on all levels: minutes of analysis."""
_NONE: Size = (0,) * (_LEVELS + 1)


def size_of_term(operands: int, parts: Sequence[Size]) -> Size:
    """The size of a product of so many operands, with these expressions inside of them."""
    if not parts:
        return (operands, *_NONE[1:])
    inside = size_of_sum(parts)
    return (operands, *inside[: _LEVELS - 1], inside[_LEVELS - 1] + 2 * inside[_LEVELS])


def size_of_sum(sizes: Iterable[Size]) -> Size:
    """The size of a sum."""
    return tuple(map(sum, zip(_NONE, *sizes, strict=True)))


def excess(sizes: Sequence[Size]) -> str | None:
    """Why what is made of expressions of these sizes would be too large; None where it is not."""
    size = sizes[0] if len(sizes) == 1 else size_of_sum(sizes)
    if size[_LEVELS] > _DEEP:
        return "its sums and products lie too deep in each other to be taken apart: kept whole"
    if sum(size) > _MOST:
        return f"its expression would have more than {_MOST:,} parts: kept whole"
    return None
