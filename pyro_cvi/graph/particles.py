"""Several draws of other guides at once: the mean of the bounds of one model given each of them.

    E_q(r) [bound given r]  ~  1/K sum_k [bound given r_k],   and so are messages and gradients.

Blocks outside of the plates of the draws have one belief, which sees the mean of the messages. Those
inside are at an optimum of their own given each draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_cvi.graph.evaluator import Evaluator
from pyro_cvi.graph.plan import Block
from pyro_cvi.updates import Belief

__all__ = ["Particles"]


class Particles(Evaluator):
    """The mean of evaluators whose plans differ in constants only; `beliefs` are the first one's."""

    def __init__(self, parts: Sequence[Evaluator]) -> None:
        super().__init__(parts[0].plan, parts[0].beliefs, parts[0].shards)
        self._parts = list(parts)
        self.beliefs, self.leaves = parts[0].beliefs, parts[0].leaves

    @property
    def parts(self) -> list[Evaluator]:
        return self._parts

    def with_weights(self, plate: str, dim: int, weights: Tensor) -> Evaluator:
        return Particles([e.with_weights(plate, dim, weights) for e in self._parts])

    def set(self, block: str, belief: Belief) -> None:
        for e in self._parts:
            e.set(block, belief)

    def weight_of(self, block: Block) -> float:
        return self._parts[0].weight_of(block)

    def message(
        self, block: Block, inside: str | None = None, outside: str | None = None
    ) -> list[Tensor | None]:
        found = [e.message(block, inside, outside) for e in self._parts]
        return [_mean(same) for same in zip(*found, strict=True)]

    def expected(self, block: Block) -> Tensor:
        return torch.stack([e.expected(block) for e in self._parts]).mean()

    def expected_again(self, block: Block, like: Tensor) -> Tensor:
        return torch.stack([e.expected_again(block, like) for e in self._parts]).mean()

    def rounding(self, block: Block) -> float:
        return max(e.rounding(block) for e in self._parts)

    def elbo(self) -> float:
        return sum(e.elbo() for e in self._parts) / len(self._parts)

    def split_expectations(self) -> tuple[Tensor, Tensor]:
        spread, rest = zip(*(e.split_expectations() for e in self._parts), strict=True)
        return torch.stack(spread).mean(), torch.stack(rest).mean()


def _mean(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The mean, where None stands for zero."""
    found = [g for g in gradients if g is not None]
    return torch.stack(found).sum(0) / len(gradients) if found else None
