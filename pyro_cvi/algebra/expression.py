"""Expressions: e[out] = constant[out] + sum_t c_t * einsum(operands_t -> out).

An operand is a constant, a statistic of a latent site read through an index, a nested expression
(kept whole, so that a square stays a square), an elementwise link of expressions, or an opaque
piece of which only the sites are known. Every operand names its axes by integers:

- a negative label -k is the k-th output axis from the right, so broadcasting needs no relabelling;
- a positive label is summed over (it is unique to its term).

Axes of size one are never stored: an operand without an output axis is constant along it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyro_cvi.algebra.budget import Size, size_of_sum, size_of_term
from pyro_cvi.algebra.contraction import Axes, align, contract, contract_to
from pyro_cvi.algebra.reason import Reason
from pyro_cvi.linalg import broadcast_shapes

__all__ = [
    "Axes",
    "Const",
    "Expression",
    "Group",
    "Link",
    "Opaque",
    "Operand",
    "SiteRef",
    "Stat",
    "Statistic",
    "Term",
    "add",
    "align",
    "as_expression",
    "const_operand",
    "contract",
    "contract_to",
    "einsum",
    "expand",
    "fresh_label",
    "inside",
    "multiply",
    "negate",
    "opaque",
    "permute_axes",
    "site_expression",
    "sum_axes",
]

_labels = itertools.count(1)
FOLD_LIMIT = 1 << 16
"""Constants are multiplied together while tracing only below this size; larger products would copy
the user's data."""


def fresh_label() -> int:
    """A contracted-axis label that no other term uses."""
    return next(_labels)


@dataclass(frozen=True, eq=False)
class SiteRef:
    """A latent site as the algebra sees it: its name, shape and the kind of its support.

    `kind` is "real", "positive", "unit", "simplex", "positive_definite" or "other" and decides which
    statistics keep a closed algebra: powers and logs of positive values, log(1 - x) on the unit
    interval, sums to one on the simplex, log-determinants of positive definite matrices.
    """

    name: str
    shape: tuple[int, ...]
    event_dim: int
    kind: str

    @property
    def numel(self) -> int:
        """How many scalars it has."""
        return math.prod(self.shape)

    @property
    def is_positive(self) -> bool:
        """Whether powers and logs of its values multiply out."""
        return self.kind in ("positive", "unit", "simplex")


class Statistic(NamedTuple):
    """z ** power, log(z) or log(1 - z) of one scalar of a site, or log det of one of its matrices.

    Or the sum of all scalars up to one along the axis `power` (see `cumulate`): for a plan to rewrite.
    """

    kind: str = "power"
    power: float = 1.0

    def __str__(self) -> str:
        if self.kind == "power":
            return "z" if self.power == 1 else f"z^{self.power:g}"
        names = {"log": "log z", "log1m": "log(1 - z)", "logdet": "log det z"}
        return names.get(self.kind, "cumulative sum of z")


IDENTITY = Statistic()
LOG = Statistic("log")
LOG1M = Statistic("log1m")
LOGDET = Statistic("logdet")


@dataclass(frozen=True, eq=False)
class Const:
    """A constant tensor; `tensor.shape` follows `axes`."""

    tensor: Tensor
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def sites(self) -> frozenset[str]:
        return frozenset()

    def moved(self, op: Callable[[Tensor], Tensor], axes: Axes) -> Const:
        return Const(op(self.tensor), axes)


@dataclass(frozen=True, eq=False)
class Stat:
    """statistic(site.reshape(-1)[index]); `index.shape` follows `axes`.

    For log-determinants the index counts matrices: log det site.reshape(-1, d, d)[index].
    """

    site: SiteRef
    statistic: Statistic
    index: Tensor
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.index.shape)

    @property
    def sites(self) -> frozenset[str]:
        return frozenset((self.site.name,))

    def moved(self, op: Callable[[Tensor], Tensor], axes: Axes) -> Stat:
        return replace(self, index=op(self.index), axes=axes)


@dataclass(frozen=True, eq=False)
class Group:
    """A whole expression used as one operand; its output axes carry the labels `axes`."""

    expression: Expression
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.expression.shape

    @property
    def sites(self) -> frozenset[str]:
        return self.expression.sites

    def moved(self, op: Callable[[Tensor], Tensor], axes: Axes) -> Group:
        from pyro_cvi.algebra.moves import move

        return Group(move(self.expression, op), axes)


@dataclass(frozen=True, eq=False)
class Link:
    """function(*arguments), elementwise over the arguments broadcast to `shape`."""

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[Expression, ...]
    shape: tuple[int, ...]
    axes: Axes

    @property
    def sites(self) -> frozenset[str]:
        return frozenset().union(*(a.sites for a in self.arguments))

    def moved(self, op: Callable[[Tensor], Tensor], axes: Axes) -> Link:
        from pyro_cvi.algebra.moves import move

        arguments = tuple(move(expand(a, self.shape), op) for a in self.arguments)
        shape = broadcast_shapes(*(a.shape for a in arguments))
        return replace(self, arguments=arguments, shape=tuple(shape), axes=axes)


@dataclass(frozen=True, eq=False)
class Opaque:
    """A value whose dependence on `sites` is unknown, and the reason why."""

    names: frozenset[str]
    reason: Reason
    shape: tuple[int, ...]
    axes: Axes

    @property
    def sites(self) -> frozenset[str]:
        return self.names

    def moved(self, op: Callable[[Tensor], Tensor], axes: Axes) -> Opaque:
        shape = tuple(op(torch.empty(self.shape, device="meta")).shape) if axes else ()
        return replace(self, shape=shape, axes=axes)


Operand: TypeAlias = Const | Stat | Group | Link | Opaque


@dataclass(frozen=True, eq=False)
class Term:
    """coefficient * einsum(operands)."""

    coefficient: float
    operands: tuple[Operand, ...]

    @property
    def sites(self) -> frozenset[str]:
        return frozenset().union(*(o.sites for o in self.operands))

    @cached_property
    def size(self) -> Size:
        """How many operands it has, with those inside of them, by level."""
        return size_of_term(len(self.operands), [e.size for o in self.operands for e in inside(o)])

    @cached_property
    def opaque(self) -> tuple[Opaque, ...]:
        """Its opaque operands, however deep."""
        found: list[Opaque] = []
        for o in self.operands:
            found += (o,) if isinstance(o, Opaque) else [p for e in inside(o) for p in e.opaque]
        return tuple(found)

    @cached_property
    def reads(self) -> tuple[object, ...] | None:
        """What it reads, and in which cells, if it can be added up with terms that read the same."""
        names: dict[int, int] = {}
        found: list[object] = []
        consts = []
        for o in self.operands:
            if isinstance(o, Const):
                consts.append(o)
                continue
            if isinstance(o, Opaque):
                return None
            axes = tuple([a if a < 0 else names.setdefault(a, len(names) + 1) for a in o.axes])
            found.append((_identity(o), axes))
        if len(consts) > 1 or any(a > 0 and a not in names for o in consts for a in o.axes):
            return None
        return tuple(found)

    @property
    def labels(self) -> frozenset[int]:
        return frozenset(a for o in self.operands for a in o.axes)

    @property
    def contracted(self) -> frozenset[int]:
        return frozenset(a for o in self.operands for a in o.axes if a > 0)

    def relabelled(self, mapping: Mapping[int, int]) -> Term:
        return Term(self.coefficient, tuple(_relabelled(o, mapping) for o in self.operands))


def inside(o: Operand) -> tuple[Expression, ...]:
    """The expressions that an operand is made of."""
    if isinstance(o, Group):
        return (o.expression,)
    return o.arguments if isinstance(o, Link) else ()


def _identity(o: Stat | Group | Link) -> tuple[object, ...]:
    """What tells operands apart, but for their axes; as long as they live."""
    if isinstance(o, Stat):
        is_scalar = o.index.numel() == 1 and o.index.device.type == "cpu"
        return o.site, o.statistic, int(o.index) if is_scalar else id(o.index)
    if isinstance(o, Group):
        return (id(o.expression),)
    return (o.name, id(o.function), *map(id, o.arguments))


def _relabelled(o: Operand, mapping: Mapping[int, int]) -> Operand:
    """The operand with other labels; written out, for this is the inner loop of all rules."""
    axes = tuple([mapping.get(a, a) for a in o.axes])
    if axes == o.axes:
        return o
    if isinstance(o, Const):
        return Const(o.tensor, axes)
    if isinstance(o, Stat):
        return Stat(o.site, o.statistic, o.index, axes)
    if isinstance(o, Group):
        return Group(o.expression, axes)
    return replace(o, axes=axes)


@dataclass(frozen=True, eq=False)
class Expression:
    """constant + sum of terms, broadcast to `shape`. Immutable; the functions below build new ones."""

    shape: tuple[int, ...]
    constant: Tensor | float = 0.0
    terms: tuple[Term, ...] = ()
    known_sites: frozenset[str] | None = None

    @cached_property
    def sites(self) -> frozenset[str]:
        """The sites that it depends on."""
        if self.known_sites is not None:
            return self.known_sites
        return frozenset().union(*(t.sites for t in self.terms))

    @cached_property
    def size(self) -> Size:
        """How many operands it has by level, counted as often as they are walked."""
        return size_of_sum([t.size for t in self.terms])

    @cached_property
    def opaque(self) -> tuple[Opaque, ...]:
        """All opaque operands, however deep."""
        return tuple(itertools.chain.from_iterable([t.opaque for t in self.terms]))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def has_constant(self) -> bool:
        return isinstance(self.constant, Tensor) or self.constant != 0.0


def site_expression(site: SiteRef, device: torch.device | None = None) -> Expression:
    """The value of a site: one statistic read through the identity index."""
    index = torch.arange(math.prod(site.shape), device=device).reshape(site.shape)
    return Expression(site.shape, 0.0, (Term(1.0, (_squeezed_stat(site, IDENTITY, index),)),))


def _squeezed_stat(site: SiteRef, statistic: Statistic, index: Tensor) -> Stat:
    kept, axes = _squeeze(tuple(index.shape))
    return Stat(site, statistic, index.reshape(kept), axes)


def _squeeze(shape: Sequence[int]) -> tuple[tuple[int, ...], Axes]:
    n = len(shape)
    kept = [(size, i - n) for i, size in enumerate(shape) if size != 1]
    return tuple(size for size, _ in kept), tuple(axis for _, axis in kept)


def const_operand(tensor: Tensor) -> Const:
    """A constant aligned with the output axes, axes of size one dropped."""
    kept, axes = _squeeze(tuple(tensor.shape))
    return Const(tensor.reshape(kept), axes)


def opaque(sites: Iterable[str], reason: Reason, shape: Sequence[int]) -> Expression:
    """An expression of which only the sites are known."""
    kept, axes = _squeeze(tuple(shape))
    return Expression(
        tuple(shape), 0.0, (Term(1.0, (Opaque(frozenset(sites), reason, kept, axes),)),)
    )


def as_expression(value: Tensor | float) -> Expression:
    """A constant as an expression."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    return Expression(shape, value)


def expand(e: Expression, shape: Sequence[int]) -> Expression:
    """Broadcast to `shape`: the labels stay, for an absent axis already means constant along it."""
    return e if e.shape == tuple(shape) else Expression(tuple(shape), e.constant, e.terms)


def add(a: Expression, b: Expression) -> Expression:
    """a + b, with the constants added up and the terms side by side."""
    shape = broadcast_shapes(a.shape, b.shape)
    if not a.has_constant:
        constant = b.constant
    elif not b.has_constant:
        constant = a.constant
    else:
        constant = a.constant + b.constant
    return Expression(shape, constant, a.terms + b.terms, a.sites | b.sites)


def negate(e: Expression) -> Expression:
    """-e."""
    return scale(e, -1.0)


def scale(e: Expression, factor: float) -> Expression:
    """Factor * e for a Python number."""
    terms = tuple(Term(t.coefficient * factor, t.operands) for t in e.terms)
    return Expression(e.shape, e.constant * factor, terms)


def multiply(a: Expression, b: Expression) -> Expression:
    """The elementwise product. Sums are not multiplied out: they become groups."""
    shape = broadcast_shapes(a.shape, b.shape)
    if not b.terms:
        a, b = b, a
    if not a.terms:
        if not isinstance(a.constant, Tensor):
            return expand(scale(b, a.constant), shape)
        return expand(_times_constant(b, a.constant), shape)
    ca, oa = as_operands(a)
    cb, ob = as_operands(b)
    operands = merge_operands(oa + ob)
    if not operands:  # z * z ** -1
        return Expression(shape, ca * cb)
    return Expression(shape, 0.0, (Term(ca * cb, operands),))


def _times_constant(e: Expression, tensor: Tensor) -> Expression:
    if tensor.ndim == 0 and not tensor.requires_grad and tensor.device.type == "cpu":
        return scale(e, float(tensor))
    operand = const_operand(tensor)
    terms = tuple(Term(t.coefficient, merge_operands((*t.operands, operand))) for t in e.terms)
    constant = e.constant * tensor if e.has_constant else 0.0
    return Expression(broadcast_shapes(e.shape, tensor.shape), constant, terms)


def as_operands(e: Expression) -> tuple[float, tuple[Operand, ...]]:
    """(c, operands) with e = c * product of operands: a lone uncontracted term as is, else a group."""
    if not e.has_constant and len(e.terms) == 1 and not e.terms[0].contracted:
        return e.terms[0].coefficient, e.terms[0].operands
    return 1.0, (group(e),)


def group(e: Expression) -> Group:
    """The expression as one operand, its axes of size one dropped."""
    kept, axes = _squeeze(e.shape)
    mapping = {axis: i - len(axes) for i, axis in enumerate(axes)}
    constant = e.constant
    if isinstance(constant, Tensor) and constant.ndim:
        pad = (1,) * (e.ndim - constant.ndim) + tuple(constant.shape)
        constant = constant.reshape([pad[a] for a in axes])
    return Group(Expression(kept, constant, tuple(t.relabelled(mapping) for t in e.terms)), axes)


def merge_operands(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Multiply small constants together and add the powers of equal statistics of positive sites."""
    consts: list[Const] = []
    others: list[Operand] = []
    for o in operands:
        if isinstance(o, Const):
            _merge_const(consts, o)
        elif not _merge_power(others, o):
            others.append(o)
    return (*consts, *others)


def _merge_const(consts: list[Const], new: Const) -> None:
    for i, old in enumerate(consts):
        wide, narrow = (old, new) if len(old.axes) >= len(new.axes) else (new, old)
        if set(narrow.axes) <= set(wide.axes) and (
            wide.tensor.numel() <= FOLD_LIMIT or narrow.axes == wide.axes
        ):
            aligned = align(narrow.tensor, narrow.axes, wide.axes)
            consts[i] = Const(wide.tensor * aligned, wide.axes)
            return
    consts.append(new)


def _merge_power(others: list[Operand], new: Operand) -> bool:
    if not (isinstance(new, Stat) and new.site.is_positive and new.statistic.kind == "power"):
        return False
    for i, old in enumerate(others):
        if (
            isinstance(old, Stat)
            and old.site is new.site
            and old.statistic.kind == "power"
            and same_index(old, new)
        ):
            power = old.statistic.power + new.statistic.power
            others[i : i + 1] = (
                [replace(old, statistic=Statistic("power", power))] if power != 0 else []
            )
            return True
    return False


def same_index(a: Stat, b: Stat) -> bool:
    """Whether two statistics read the same scalars cell by cell."""
    return a.axes == b.axes and (a.index is b.index or torch.equal(a.index, b.index))


def permute_axes(
    e: Expression, mapping: Mapping[int, int], shape: Sequence[int], constant: Tensor | float
) -> Expression:
    """Rename output axes: squeeze, unsqueeze and permute are all this."""
    return Expression(tuple(shape), constant, tuple(t.relabelled(mapping) for t in e.terms))


def sum_axes(e: Expression, dims: Sequence[int], keepdim: bool) -> Expression:
    """Sum over output axes: their labels become contracted ones."""
    n = e.ndim
    summed = {d % n - n for d in dims} if n else set()
    kept = [a for a in range(-n, 0) if a not in summed]
    shape = tuple(e.shape[a] for a in kept)
    mapping = {a: i - len(kept) for i, a in enumerate(kept)}
    if keepdim:
        shape = tuple(1 if a in summed else e.shape[a] for a in range(-n, 0))
        mapping = {}
    terms = []
    for t in e.terms:
        present = t.labels
        missing = math.prod(e.shape[a] for a in summed if a not in present)
        fresh = {a: fresh_label() for a in summed if a in present}
        renamed = t.relabelled({**mapping, **fresh})
        terms.append(Term(t.coefficient * missing, renamed.operands))
    constant = e.constant
    if isinstance(constant, Tensor):
        constant = constant.expand(e.shape)
        constant = constant.sum(tuple(summed), keepdim=keepdim) if summed else constant
    else:
        constant = constant * math.prod(e.shape[a] for a in summed)
    return Expression(shape, constant, tuple(terms))


def einsum(
    inputs: Sequence[tuple[Expression, Sequence[str]]],
    output: Sequence[str],
    sizes: Mapping[str, int],
) -> Expression:
    """Einsum over expressions; every input names its axes by strings.

    A sum is distributed only when it is the one factor that is not constant.
    """
    out = {name: i - len(output) for i, name in enumerate(output)}
    label = {name: out[name] if name in out else fresh_label() for name in sizes}
    shape = tuple(sizes[name] for name in output)
    varying = [(e, names) for e, names in inputs if e.terms]
    device = device_of(*(e for e, _ in inputs))
    fixed = [(_full(e, device), names) for e, names in inputs if not e.terms]
    consts = tuple(_labelled_const(t, [label[n] for n in names]) for t, names in fixed)
    if len(varying) == 1:
        (e, names), terms = varying[0], []
        mapping = {i - e.ndim: label[n] for i, n in enumerate(names)}
        for t in e.terms:
            operands = (*t.relabelled(mapping).operands, *consts)
            terms.append(_with_missing(Term(t.coefficient, operands), label, sizes))
        constant: Tensor | float = 0.0
        if e.has_constant:
            pieces = [(c.tensor, c.axes) for c in consts]
            whole = _labelled_const(_full(e, device), [label[n] for n in names])
            pieces.append((whole.tensor, whole.axes))
            missing = math.prod(
                sizes[n] for n, a in label.items() if a > 0 and all(a not in ax for _, ax in pieces)
            )
            constant = missing * contract(pieces, len(shape))
        return Expression(shape, constant, tuple(terms))
    coefficient = 1.0
    factors: list[Operand] = list(consts)
    for e, names in varying:
        c, ops = as_operands(e)
        mapping = {i - e.ndim: label[n] for i, n in enumerate(names)}
        coefficient *= c
        factors.extend(Term(1.0, ops).relabelled(mapping).operands)
    term = _with_missing(Term(coefficient, tuple(factors)), label, sizes)
    return Expression(shape, 0.0, (term,))


def _full(e: Expression, device: torch.device | None) -> Tensor:
    constant = e.constant
    if not isinstance(constant, Tensor):
        constant = torch.tensor(constant, device=device)
    return constant.expand(e.shape)


def device_of(*expressions: Expression) -> torch.device | None:
    """Where what is in them is; None if that is numbers alone."""
    for e in expressions:
        if isinstance(e.constant, Tensor) and e.constant.ndim > 0:
            return e.constant.device
        for o in (o for t in e.terms for o in t.operands):
            if isinstance(o, Stat):
                return o.index.device
            if isinstance(o, Const) and o.tensor.ndim > 0:
                return o.tensor.device
            parts = o.arguments if isinstance(o, Link) else ()
            found = device_of(*((o.expression,) if isinstance(o, Group) else parts))
            if found is not None:
                return found
    return None


def _labelled_const(tensor: Tensor, labels: Sequence[int]) -> Const:
    kept = [i for i, size in enumerate(tensor.shape) if size != 1]
    return Const(
        tensor.reshape([tensor.shape[i] for i in kept]) if len(kept) < tensor.ndim else tensor,
        tuple(labels[i] for i in kept),
    )


def _with_missing(term: Term, label: Mapping[str, int], sizes: Mapping[str, int]) -> Term:
    """Summing over an axis that no operand has multiplies by its size."""
    present = term.labels
    missing = math.prod(sizes[n] for n, a in label.items() if a > 0 and a not in present)
    return Term(term.coefficient * missing, term.operands) if missing != 1 else term
