"""Several processes, each with some of the data: sums of messages over all of them.

    message to a block  =  sum over ranks of [messages of factors in spread plates]  +  the others', once

Blocks outside of these plates get the same message on every rank and take the same step; those inside
are each rank's own. Nothing else is sent, so that the fit is that of one process with all data, up to
the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_cvi.errors import CVIError, message

__all__ = ["Shards"]


@dataclass(frozen=True)
class Shards:
    """The plates whose elements are spread over the processes of torch.distributed's default group."""

    plates: frozenset[str] = frozenset()

    @staticmethod
    def of(plates: Sequence[str]) -> Shards:
        """For plates of these names; an error where there is no process group."""
        names = [plates] if isinstance(plates, str) else list(plates)
        if names and not (dist.is_available() and dist.is_initialized()):
            raise CVIError(
                message(
                    f"shards={names}", "torch.distributed has no process group",
                    "one process for each part of the data, in a group",
                    'call torch.distributed.init_process_group("gloo") first, and start by torchrun',
                )
            )  # fmt: skip
        return Shards(frozenset(names))

    def hold(self, plates: frozenset[str]) -> bool:
        """Whether something in these plates is spread."""
        return bool(self.plates & plates)

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's sum over all processes; one call for all of one dtype."""
        if not self.plates:
            return list(tensors)
        result = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            index = [i for i, t in enumerate(tensors) if t.dtype is dtype]
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in index])
            dist.all_reduce(flat)
            parts = flat.split([tensors[i].numel() for i in index])
            for i, part in zip(index, parts, strict=True):
                result[i] = part.reshape(tensors[i].shape)
        return result

    def total(self, x: Tensor) -> Tensor:
        """The sum of one tensor over all processes."""
        (result,) = self.sums([x])
        return result

    def from_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first process's tensors, on all of them."""
        result = [t.detach().clone().contiguous() for t in tensors]
        if self.plates:
            for t in result:
                dist.broadcast(t, 0)
        return result
