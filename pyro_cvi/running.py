"""What a run gives back, and what it says where it has not found the optimum."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pyro_cvi.ascent import ABSURD
from pyro_cvi.errors import ConvergenceWarning, message
from pyro_cvi.graph.prepared import Prepared
from pyro_cvi.stopping import Progress
from pyro_cvi.updates import Step

__all__ = ["MORE", "USUAL", "Best", "RunResult", "apart", "complaint", "still_gains", "warn_of"]

USUAL, MORE = 100, 1000
"""Steps of a run that is not told how many: so many, and up to this number for as long as it gains."""
_STILL = 1e-3
"""Share of the first bound that a run has to gain, where that bound is absurd."""
_MOSTLY = 0.5
"""Share of the steps of a block that were retracted from which on that is worth a warning."""
_APART = 1.0
"""Nats by which the bounds of restarts differ from which on that is worth a warning."""
_WINDOW = 10
"""Sampled steps whose losses are averaged to tell which state was best."""


@dataclass
class RunResult:
    """What `CVI.run` did: the loss after each step, how many, and why it stopped.

    With several starts this is the best one's; `restarts` has the last loss of each, or where the loss
    is an estimate the mean of its last tenth. `times` are the seconds from the start of the run (of this
    start) to the end of each step. `errors` are the standard errors of the losses, zero where they are
    not estimates; where points stand in the place of draws, the last one is what other points differ by.
    `left` is what the run expects that more steps would gain, in nats; infinite where it cannot tell.
    """

    losses: list[float] = field(default_factory=list)
    num_steps: int = 0
    converged: bool = False
    reason: str = ""
    seconds: float = 0.0
    restarts: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    left: float = math.inf
    warning: str | None = None

    def add(self, loss: float, error: float, seconds: float) -> int:
        """Take note of a step; how many there are."""
        self.losses.append(loss)
        self.errors.append(error)
        self.times.append(seconds)
        self.num_steps += 1
        return self.num_steps

    def followed_by(self, other: RunResult) -> RunResult:
        """This run and another one after it, which says how it ended."""
        before = self.times[-1] if self.times else 0.0
        return replace(
            other,
            losses=self.losses + other.losses,
            errors=self.errors + other.errors,
            times=self.times + [before + t for t in other.times],
            num_steps=self.num_steps + other.num_steps,
        )

    def note_check(self, loss: float, error: float) -> None:
        """Other points say this of the last loss: it is not reported better than they find it."""
        self.losses[-1] = max(self.losses[-1], loss)
        self.errors[-1] = error


class Best:
    """The best state that a fit with noisy losses has seen, by the mean of `_WINDOW` losses.

    A state is kept in the middle of its window, which then is about it.
    """

    def __init__(self) -> None:
        self.loss, self.state = math.inf, None  # type: float, dict[str, torch.Tensor] | None

    def offer(self, losses: Sequence[float], state: Mapping[str, torch.Tensor]) -> None:
        """Keep the present state if its window is the best so far."""
        if len(losses) < _WINDOW:
            return
        mean = sum(losses[-_WINDOW:]) / _WINDOW
        if mean < self.loss:
            self.loss, self.state = mean, {n: t.clone() for n, t in state.items()}

    def is_better(self, losses: Sequence[float], error: float) -> bool:
        """Whether the present window is worse, by more than noise can explain."""
        if self.state is None:
            return False
        last = torch.tensor(losses[-_WINDOW:], dtype=torch.float64, device="cpu")
        noise = max(float(last.std()) / math.sqrt(_WINDOW), error)
        return float(last.mean()) > self.loss + 3 * noise + 0.2


def still_gains(losses: Sequence[float]) -> bool:
    """Whether noisy losses fall: those of the last fifth, beside the fifth before, by three errors."""
    window = max(_WINDOW, len(losses) // 5)
    if len(losses) < 2 * window:
        return False
    pair = torch.tensor(losses[-2 * window :], dtype=torch.float64, device="cpu").reshape(2, -1)
    before, last = pair.mean(1).tolist()
    return before - last > 3 * math.sqrt(float(pair.var(1).sum()) / window)


def complaint(
    result: RunResult, prepared: Prepared, counts: Mapping[str, Step], progress: Progress
) -> str | None:
    """What is wrong with the end of a run, as a sentence for a warning; None if nothing is."""
    if not result.losses or prepared.plan.stochastic or prepared.plan.learns:
        return None
    first, last = result.losses[0], result.losses[-1]
    absurd = abs(last) > ABSURD * prepared.observed_cells
    if absurd and not result.converged and abs(first - last) <= _STILL * abs(first):
        return f"the loss is {last:.4g}, as at the start: no step gains anything there"
    if not result.converged and progress.tol > 0:
        if prepared.plan.sampled_sites():
            return "sampled steps have come no nearer to an optimum than their noise lets them"
        return f"it was not at its optimum after {result.num_steps} steps: {what_is_left(progress)}"
    many = [n for n, s in counts.items() if s.retracted > _MOSTLY * result.num_steps > 5]
    if many:
        return f"most steps of block '{many[0]}' were retracted, for their targets were improper"
    return None


def what_is_left(progress: Progress) -> str:
    """The last gain, and what it leaves."""
    gains = progress.gains
    if not gains:
        return "one step says nothing of what is left"
    if progress.left <= progress.allowed and progress.left_to_move <= progress.tol:
        return "no step gains anything there, and yet it is no maximum"
    if math.isfinite(progress.left):
        rest = f"about {progress.left:.2g} nats are left"
        if progress.left <= progress.allowed:
            rest = f"a mean has {progress.left_to_move:.2g} standard deviations to go"
    else:
        rest = "nobody knows how many are left"
    return f"the last one gained {gains[-1]:.2g} nats, {rest}"


def apart(restarts: Sequence[float]) -> str | None:
    """Whether restarts end at different bounds."""
    finite = sorted(x for x in restarts if math.isfinite(x))
    if len(finite) < 2 or finite[1] - finite[0] <= _APART:
        return None
    return (
        f"the best of {len(restarts)} starts ended at {finite[0]:.6g}, the next at {finite[1]:.6g}"
    )


def warn_of(found: str, *, restarts: bool = False) -> None:
    """Say it, with what to try."""
    remedy = "more steps (num_steps), another start (init_loc_fn), or other units of the data"
    if restarts:
        remedy = "more starts (num_restarts), or a start near the answer (init_loc_fn)"
    warnings.warn(
        message("CVI.run", found, "a fit at its optimum", remedy), ConvergenceWarning, stacklevel=4
    )
