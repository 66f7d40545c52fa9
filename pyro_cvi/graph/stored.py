"""Stored site messages of minibatches: natural = prior part + sum over batches of their messages.

    total = (N / covered) * sum_b (live_b / count_b) S_b

A batch b that was visited last with `count_b` elements keeps its message S_b; an element counts for the
batch that it was seen in last, so `live_b` of them are left. Every element counts once, whatever the
batches are; with batches that come back unchanged this is incremental variational inference, and there
is no step size. Until all N elements have been seen, those seen stand for all.

A Gaussian message is kept as (gradient at a fixed point c, curvature), not about zero: with data far
from zero that would have no digits left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block, CompiledFactor
from pyro_cvi.graph.rows import (
    MOST_SCALARS,
    Rows,
    RowSites,
    natural_gradient,
    row_functions,
    shifted,
)
from pyro_cvi.graph.windows import Part
from pyro_cvi.updates import Belief, GaussianBelief

__all__ = ["Batches", "SiteMessages"]

Tensors = tuple[Tensor, ...]


class Batches:
    """Which elements a subsampled plate sees next: a fixed partition in random order, again and again.

    The last batch of a pass is filled up with elements of the first, which do not count there again.
    """

    def __init__(self, full: int, first: Tensor) -> None:
        rest = torch.ones(full, dtype=torch.bool, device="cpu")
        rest[first.cpu()] = False
        others = rest.nonzero().reshape(-1)
        self._order = torch.cat([first.cpu(), others[torch.randperm(len(others), device="cpu")]])
        self._next = 0

    def next(self, size: int) -> Tensor:
        """The elements of the batch that is due."""
        here = self._order[self._next : self._next + size]
        return torch.cat([here, self._order[: size - len(here)]])

    def own(self, size: int) -> int:
        """How many of the batch that is due, from its first on, are not there to fill it up."""
        return min(size, len(self._order) - self._next)

    def done(self, size: int) -> None:
        """Go on to the next batch."""
        self._next += size
        if self._next >= len(self._order):
            self._next = 0


@dataclass(frozen=True)
class _Slot:
    count: int
    live: int
    messages: Mapping[str, Tensors] = field(default_factory=dict)


class SiteMessages:
    """The messages of the batches of one plate to the blocks outside of it.

    With `fitted` the present posterior counts as the outcome of an earlier pass over all elements.
    It `is_mixed` when batches come that are not those of the pass before: what is left of an old batch
    is then only a share of its message. If this one was in the pass before, it `returns`.
    """

    def __init__(self, full: int, *, fitted: bool) -> None:
        self.full, self.fitted = full, fitted
        self._index = self._counted = torch.zeros(0, dtype=torch.long, device="cpu")
        self._rows: dict[str, RowSites] = {}
        self._owner = torch.full((full,), 0 if fitted else -1, device="cpu")
        self._slots: dict[int, _Slot] = {0: _Slot(full, full)} if fitted else {}
        self._sums: dict[str, Tensors] = {}
        self._centre: dict[str, Tensor] = {}
        self._covered = full if fitted else 0
        self._current = 0
        self.is_mixed, self.returns = False, fitted
        self._undo: tuple[Tensor, Tensor, dict[int, _Slot], dict[str, Tensors], int] | None = None

    def begin(self, window: Tensor, own: int | None = None) -> Tensor:
        """The elements of this batch no longer count for the batches they were in.

        Says which of the window count, (elements,): its first `own`, and each of them once.
        """
        window = window.cpu()
        self._counted = _first(window, len(window) if own is None else own)
        self._index = index = window[self._counted]
        for sites in self._rows.values():
            sites.begin()
        old = self._owner[index]
        self._undo = (index, old, dict(self._slots), dict(self._sums), self._covered)
        keys, counts = old.unique(return_counts=True)
        complete = self._covered == self.full
        self.is_mixed = self.is_mixed or (complete and len(keys) > 1)
        self.returns = complete and not self.is_mixed
        for key, n in zip(keys.tolist(), counts.tolist(), strict=True):
            if key < 0:
                self._covered += n
                continue
            slot = self._slots[key]
            for block, m in slot.messages.items():
                self._add(block, m, -n / slot.count)
            if slot.live == n:
                del self._slots[key]
            else:
                self._slots[key] = replace(slot, live=slot.live - n)
        self._current += 1
        self._owner[index] = self._current
        self._slots[self._current] = _Slot(len(index), len(index))
        return self._counted

    @property
    def is_whole(self) -> bool:
        """Whether the stored messages are those of one pass over all elements, each seen once."""
        whole = all(slot.live == slot.count for slot in self._slots.values())
        return whole and self._covered == self.full

    def undo(self) -> None:
        """Forget the batch that was begun last."""
        if self._undo is not None:
            index, old, self._slots, self._sums, self._covered = self._undo
            self._owner[index] = old
            self._undo = None
        for sites in self._rows.values():
            sites.undo()

    def put(self, block: str, belief: Belief, gradient: Tensors, rest: Tensors) -> Tensors:
        """Store this batch's message to a block and give the block's whole gradient.

        `gradient` is of the batch alone, unscaled; `rest` is that of all factors outside of the plate.
        """
        first = self._slots.get(0)
        if first is not None and block not in first.messages:  # what an earlier pass has left
            whole = self._as_message(block, belief, natural_gradient(belief))
            own = self._as_message(block, belief, rest)
            message = tuple(a - b for a, b in zip(whole, own, strict=True))
            self._slots[0] = replace(first, messages={**first.messages, block: message})
            self._add(block, message, first.live / first.count)
        slot = self._slots[self._current]
        if block in slot.messages:
            self._add(block, slot.messages[block], -1.0)
        message = self._as_message(block, belief, gradient)
        self._slots[self._current] = replace(slot, messages={**slot.messages, block: message})
        self._add(block, message, 1.0)
        total = tuple(s * (self.full / self._covered) for s in self._sums[block])
        total = tuple(t.to(g.dtype) for t, g in zip(total, gradient, strict=True))
        back = self._as_gradient(block, belief, total)
        return tuple(a + b for a, b in zip(rest, back, strict=True))

    def by_row(
        self, evaluator: Evaluator, block: Block, factors: Sequence[CompiledFactor], part: Part,
        gradient: Tensors, rest: Tensors,
    ) -> Tensors | None:  # fmt: skip
        """As `put`, with a message of each row; None where rows see more than one predictor."""
        functions = row_functions(factors, block.name, part)
        if functions is None or not isinstance(evaluator.beliefs[block.name], GaussianBelief):
            return None
        if block.name not in self._rows:
            self._rows[block.name] = RowSites(self.full, fitted=self.fitted)
        sites = self._rows[block.name]
        rows = Rows(part, self._index, self._counted)
        return sites.exchange(evaluator, block, functions, rows, gradient, rest)

    def has_rows(self, block: str) -> bool:
        """Whether messages of all rows to a block are known."""
        return self._rows[block].is_whole

    def fits(self, scalars: int, batch: int) -> bool:
        """Whether messages of this many scalars for each batch of a pass can be kept."""
        return scalars * (-(-self.full // max(batch, 1)) + len(self._slots)) <= MOST_SCALARS

    def _add(self, block: str, message: Tensors, weight: float) -> None:
        old = self._sums.get(block)
        scaled = tuple(weight * m.double() for m in message)  # sums and differences by the thousand
        self._sums[block] = (
            scaled if old is None else tuple(a + b for a, b in zip(old, scaled, strict=True))
        )

    def _as_message(self, block: str, belief: Belief, gradient: Tensors) -> Tensors:
        if not isinstance(belief, GaussianBelief):
            return gradient
        return shifted(gradient, self._centre.setdefault(block, belief.loc.clone()) - belief.loc)

    def _as_gradient(self, block: str, belief: Belief, message: Tensors) -> Tensors:
        if not isinstance(belief, GaussianBelief):
            return message
        return shifted(message, belief.loc - self._centre[block])


def _first(window: Tensor, own: int) -> Tensor:
    """Which elements of a window are among its first `own`, and not there before."""
    order = torch.arange(len(window), device=window.device)
    places = order.new_full((int(window.max()) + 1,), len(window))
    places = places.scatter_reduce(0, window, order, "amin")
    return (places[window] == order) & (order < own)
