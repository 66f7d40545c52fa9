"""Sites of single rows, where a row sees a Gaussian block z through functions of one predictor x_n^T z.

    E log p(y_n | z)  ~  (what is affine in z)  +  xi_n E eta_n + h_n E eta_n^2,     eta_n = x_n^T z,
    h_n = dE/dv_n,  xi_n = dE/dm_n - 2 h_n m_n,        message = sum_n (xi_n x_n, h_n x_n x_n^T).

Two numbers a row, for x_n comes with the row: when it is seen again, what it said before is made of them
and exchanged for what it says now. The sum over rows is that of each row's last message, whatever the
batches are, and has no noise from how they are mixed. What is affine in z says the same every time.

The sum is built anew in each pass: early messages, from where `exp` was huge, leave no rounding behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_cvi.estimators import Function
from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, CompiledFactor
from pyro_cvi.graph.windows import Part
from pyro_cvi.linalg import matvec, or_zeros
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["MOST_SCALARS", "RowSites", "Rows", "natural_gradient", "row_functions", "shifted"]

MOST_SCALARS = 1 << 26
"""Beyond this many scalars of stored messages the stochastic rule serves, which stores none."""

_PROBE = 2
"""Where the probe stands beside xi and h."""

_Key = tuple[str, int]
Tensors = tuple[Tensor, ...]
Functions = list[tuple[CompiledFactor, list[Function]]]


def row_functions(factors: Sequence[CompiledFactor], block: str, part: Part) -> Functions | None:
    """The functions of one predictor in each factor; None where rows have no sites of this form."""
    found, scalars = [], 0
    for f in factors:
        functions = f.expectation.functions()
        if functions is None or f.weightings:
            return None
        for x in functions:
            if block in x.predictor.coupled or (part.dim not in x.axes and part.size > 1):
                return None
            scalars += 3 * part.full * math.prod(x.shape) // max(part.size, 1)
        if functions:
            found.append((f, functions))
    return found if found and scalars <= MOST_SCALARS else None


class Rows(NamedTuple):
    """The rows of a batch: their indices, and which elements of the plate they are.

    The scale of `part` is of those that are `counted`, (elements,).
    """

    part: Part
    indices: Tensor
    counted: Tensor

    def first(self, x: Tensor, function: Function) -> Tensor:
        """Cells with these rows along the first axis."""
        if self.part.dim in function.axes:
            return x.movedim(function.axes.index(self.part.dim), 0)[self.counted]
        return x.unsqueeze(0)


@dataclass(frozen=True, eq=False)
class _Sum:
    """Of the messages of the `known` rows, as gradients at a fixed centre, in float64."""

    known: Tensor
    message: Tensors | None = None

    def plus(self, message: Tensors, index: Tensor) -> _Sum:
        known = self.known.index_fill(0, index, True)
        wide = tuple(m.double() for m in message)
        if self.message is not None:
            wide = tuple(a + b for a, b in zip(self.message, wide, strict=True))
        return _Sum(known, wide)


class RowSites:
    """The sites of all rows of a plate for one Gaussian block.

    It `is_lost` when a row comes back with another predictor: what it said before cannot be told then.
    With `fitted` the present posterior stands for rows that have not been seen.
    """

    def __init__(self, full: int, *, fitted: bool) -> None:
        self.full, self.fitted = full, fitted
        self.is_lost = False
        self._sites: dict[_Key, Tensor] = {}
        self._earlier: Tensors | None = None
        self._centre: Tensor | None = None
        self._sum = self._next = _Sum(torch.zeros(full, dtype=torch.bool, device="cpu"))
        self._undo: tuple[Tensor, dict[_Key, Tensor], _Sum, _Sum] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether something is known of every row."""
        return self.fitted or bool(self._sum.known.all())

    def begin(self) -> None:
        """A new batch, which can be undone."""
        self._undo = None

    def undo(self) -> None:
        """Forget the last batch."""
        if self._undo is not None:
            index, old, self._sum, self._next = self._undo
            self._sites = {k: self._sites[k] for k in old}
            for k, site in old.items():
                self._sites[k][index] = site
            self._undo = None

    def exchange(
        self, evaluator: Evaluator, block: Block, functions: Functions, rows: Rows, batch: Tensors,
        rest: Tensors,
    ) -> Tensors | None:  # fmt: skip
        """The block's whole gradient, once these rows' sites are exchanged; None if they cannot be.

        `batch` is the gradient of these rows, unscaled, `rest` that of all factors outside of the plate.
        """
        belief = evaluator.beliefs[block.name]
        assert isinstance(belief, GaussianBelief)
        if self.is_lost:
            return None
        seen = _Seen.of(evaluator, block, functions, rows)
        old = {k: self._sites[k][rows.indices] for k in seen.sites if k in self._sites}
        if not self._match(seen, old, rows.indices):
            self.is_lost = True
            return None
        self._undo = (rows.indices, old, self._sum, self._next)
        if self._centre is None:
            self._centre = belief.loc.clone()
            if self.fitted:
                whole = natural_gradient(belief)
                self._earlier = tuple((a - b).double() for a, b in zip(whole, rest, strict=True))
        here = self._centre - belief.loc
        add = partial(self._plus, evaluator, block, rows, seen, old, batch, here)
        self._sum, self._next = add(self._sum), add(self._next)
        if bool(self._next.known.all()):
            self._sum, self._next = self._next, _Sum(torch.zeros_like(self._sum.known))
        for k, site in seen.sites.items():
            table = self._sites.setdefault(k, site.new_zeros(self.full, *site.shape[1:]))
            table[rows.indices] = site
        total = tuple(t.to(g.dtype) for t, g in zip(self._total(), batch, strict=True))
        return tuple(a + b for a, b in zip(rest, shifted(total, -here), strict=True))

    def _plus(
        self, evaluator: Evaluator, block: Block, rows: Rows, seen: _Seen, old: Mapping[_Key, Tensor],
        batch: Tensors, here: Tensor, total: _Sum,
    ) -> _Sum:  # fmt: skip
        """A sum with this batch: new rows are added, known ones exchanged."""
        known, gradient = total.known[rows.indices], batch
        if bool(known.any()):
            gradient = seen.change(evaluator, block, old, known)
            if not bool(known.all()):
                part, new = rows.part, rows.counted.clone()
                new[rows.counted] = ~known
                inside = evaluator.with_weights(part.name, part.dim, new.to(here.dtype))
                own = zip(inside.message(block, part.name), gradient, strict=True)
                gradient = tuple(or_zeros(g, x) / part.scale + x for g, x in own)
        return total.plus(shifted(gradient, here), rows.indices)

    def _total(self) -> Tensors:
        """The sum over all rows, of which those that have been seen stand for the others."""
        known = float(self._sum.known.sum())
        assert self._sum.message is not None
        if self._earlier is None:
            return tuple(t * (self.full / known) for t in self._sum.message)
        left = 1 - known / self.full
        return tuple(t + left * e for t, e in zip(self._sum.message, self._earlier, strict=True))

    def _match(self, seen: _Seen, old: Mapping[_Key, Tensor], index: Tensor) -> bool:
        """Whether rows that come back have the predictors that they had."""
        if self._sites and set(self._sites) != set(seen.sites):
            return False
        known = self._sum.known[index]
        for k, before in old.items():
            now = seen.sites[k]
            if now.shape != before.shape:
                return False
            a, b = before[known][..., _PROBE], now[known][..., _PROBE]
            near = torch.finfo(a.dtype).eps ** 0.5 * (1 + b.abs())
            if bool(((a - b).abs() > near).any()):
                return False
        return True


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a batch says now: (xi, h, probe) of each function, (rows, ..., 3), and its predictors.

    The probe is the predictor at a fixed point: a row is the same only if that is.
    """

    sites: dict[_Key, Tensor]
    moments: dict[_Key, tuple[Tensor, Tensor]]

    @staticmethod
    def of(evaluator: Evaluator, block: Block, functions: Functions, rows: Rows) -> _Seen:
        sites, moments, scale = {}, {}, rows.part.scale
        for f, found in functions:
            probes = evaluator.at_a_probe(block, found)
            pairs = zip(evaluator.slopes(f, found), probes, strict=True)
            for i, ((slope, probe), x) in enumerate(zip(pairs, found, strict=True)):
                mean, variance, g, h, p = (rows.first(t, x) for t in (*slope, probe))
                g, h = g / scale, h / scale
                sites[f.name, i] = torch.stack([g - 2 * h * mean.detach(), h, p], -1)
                moments[f.name, i] = (mean, variance)
        return _Seen(sites, moments)

    def change(
        self, evaluator: Evaluator, block: Block, old: Mapping[_Key, Tensor], which: Tensor
    ) -> Tensors:
        """The gradient of what some rows say now less what they said before."""
        leaves = evaluator.leaves[block.name]
        total: Tensor | None = None
        for k, (mean, variance) in self.moments.items():
            xi, h, _ = (self.sites[k][which] - old[k][which]).unbind(-1)
            m, v = mean[which], variance[which]
            value = (xi * m + h * (v + m.square())).sum()
            total = value if total is None else total + value
        if total is None:
            return tuple(torch.zeros_like(x) for x in leaves)
        found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        return tuple(or_zeros(g, x) for g, x in zip(found, leaves, strict=True))


def shifted(gradient: Tensors, change: Tensor) -> Tensors:
    """The gradient (in loc and cov) of the same quadratic function where loc is changed by this."""
    first, second = gradient
    return first + 2 * matvec(second, change), second


def natural_gradient(belief: Belief) -> Tensors:
    """The gradient under which the belief would stay where it is: its own natural parameters."""
    if isinstance(belief, GaussianBelief):
        return torch.zeros_like(belief.loc), -0.5 * belief.precision
    assert isinstance(belief, FamilyBelief)
    return belief.natural
