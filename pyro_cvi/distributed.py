"""Several processes, each with some of the data: sums of messages over all of them.

    message to a block  =  sum over ranks of [messages of factors in spread plates]  +  the others', once

Blocks outside of these plates get the same message on every rank and take the same step; those inside
are each rank's own. Nothing else is sent, so that the fit is that of one process with all data, up to
the order of summation. What is drawn outside of these plates is drawn alike on every rank, from the
first one's random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_cvi.errors import CVIError

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
                f"shards={names}",
                "torch.distributed has no process group",
                "one process for each part of the data, in a group",
                'call torch.distributed.init_process_group("gloo") first, and start by torchrun',
            )
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

    @property
    def count(self) -> int:
        """How many processes there are; one, if nothing is spread."""
        return dist.get_world_size() if self.plates else 1

    def number(self, x: float) -> float:
        """The sum of one number over all processes."""
        return self.numbers([x])[0]

    def numbers(self, x: Sequence[float]) -> list[float]:
        """The sum of each number over all processes."""
        if not self.plates:
            return list(x)
        found: list[float] = self.total(
            torch.tensor(x, dtype=torch.float64, device=_device())
        ).tolist()
        return found

    @property
    def rank(self) -> int:
        """Which of the processes this one is."""
        return dist.get_rank() if self.plates else 0

    def gathered(self, x: Tensor) -> Tensor:
        """A tensor of the same shape from every process, stacked in their order."""
        every = x.new_zeros(self.count, *x.shape)
        every[self.rank] = x
        return self.total(every)

    def any(self, fact: bool) -> bool:
        """Whether something holds in any process."""
        return self.number(float(fact)) > 0

    def largest(self, x: float) -> float:
        """The largest of each process's number."""
        if not self.plates:
            return x
        found = torch.tensor(x, dtype=torch.float64, device=_device())
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def seed(self, seed: int) -> int:
        """The first process's seed."""
        if not self.plates:
            return seed
        (result,) = self.from_first([torch.tensor(seed, device=_device())])
        return int(result)

    def differ(self, mark: int) -> bool:
        """Whether a checksum is not the same in all processes."""
        return bool(self.plates) and self.any(self.seed(mark) != mark)

    def align(self) -> None:
        """Let every process draw next what the first one would."""
        if not self.plates:
            return
        (state,) = self.from_first([torch.get_rng_state().to(_device())])
        torch.set_rng_state(state.cpu())
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(int(torch.randint(2**31, (), device="cpu")))

    @contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Inside, each process draws random numbers of its own; their common ones go on after it."""
        if not self.plates:
            yield
            return
        seed = int(torch.randint(2**31, (), device="cpu"))
        with torch.random.fork_rng():
            torch.manual_seed(seed + 2**31 * (1 + dist.get_rank()))
            yield

    def from_first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The first process's tensors, on all of them."""
        result = [t.detach().clone().contiguous() for t in tensors]
        if self.plates:
            for t in result:
                dist.broadcast(t, 0)
        return result


def _device() -> torch.device:
    """Where tensors are that the process group sends."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
