"""What `posteriordb.py` and `never_worse.py` share: a fit under watch, in a process with a limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import pyro
import torch

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.errors import CVIWarning


@dataclass
class Watched:
    """A fit by the defaults: what it said, how long it took, and what ended it before its time.

    `seconds` are the processor's; `runs` are those of ten plain runs of the model, `first` those of the
    first step, the analysis among them, by the clock on the wall. `error` is the type of what was
    raised, with the beginning of its message, or "time-out".
    """

    loss: float = float("nan")
    converged: bool = False
    reason: str = ""
    steps: int = 0
    seconds: float = float("nan")
    first: float = float("nan")
    runs: float = float("nan")
    sampled: int = 0
    points: bool = False
    warnings: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def is_silent(self) -> bool:
        """Converged, without a warning, and without a pointer to `integrate` in the report."""
        return self.converged and not self.warnings and not self.points and not self.error


class TimeOutError(BaseException):
    """The limit of a piece of work has passed; no `except Exception` on the way holds it up."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A TimeOutError where the work takes longer, in time of the processor.

    It comes between two operations of Python. A machine that is busy with other things costs nothing.
    """

    def stop(*_: Any) -> None:
        raise TimeOutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def brief(error: BaseException) -> str:
    """The type, the first line of the message, and where it was raised."""
    text = str(error).strip().split("\n")[0][:160]
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {text} [{where}]"


@contextlib.contextmanager
def caught(into: list[str]) -> Iterator[None]:
    """The warnings of this package, one of a kind, added to a list; others are left unseen."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            texts = [str(w.message) for w in found if issubclass(w.category, CVIWarning)]
            into += [t for t in dict.fromkeys(texts) if t not in into]


def fit(
    model: Callable[..., Any], args: tuple[Any, ...], seed: int, limit: float, optim: Any = None
) -> tuple[CVI, Watched]:
    """A run with the defaults, from a seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    cvi, found = CVI(model, AutoCVI(model), optim, seed=seed), Watched()
    with caught(found.warnings):
        start = time.process_time()
        try:
            with limited(limit):
                result = cvi.run(*args)
        except TimeOutError:
            found.error = "time-out"
        except Exception as error:
            found.error = brief(error)
        else:
            found.loss, found.steps = result.losses[-1], result.num_steps
            found.converged, found.reason = result.converged, result.reason
            found.first = result.times[0]
        found.seconds = time.process_time() - start
    if not found.error:
        report = cvi.explain()
        found.points = "integrate" in str(report)
        found.sampled = sum(e.how == "sampled" for e in report.edges)
    found.runs = _plain_runs(model, args)
    return cvi, found


def _plain_runs(model: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Seconds of ten runs of the model; nan where it refuses a draw from its own prior."""
    start = time.process_time()
    try:
        with torch.no_grad(), limited(30.0):
            for _ in range(10):
                model(*args)
    except (Exception, TimeOutError):
        return float("nan")
    return time.process_time() - start


def in_children(
    work: Callable[..., dict[str, Any]], todo: Sequence[tuple[Any, ...]], jobs: int, longest: float
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each task with what `work(*task)` returns, as they are done; `{"error": ...}` where it does not.

    Every task is a process of its own, forked from one that has imported everything, and is killed after
    `longest` seconds. The work has limits of its own, of the processor's time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch._dynamo"])
    waiting, running = list(reversed(todo)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(theirs, work, task))
            process.start()
            theirs.close()
            running[ours] = process, task, time.monotonic() + longest
        for pipe in [*wait(list(running), timeout=1.0), *_overdue(running)]:
            if pipe in running:
                process, task, end = running.pop(pipe)
                yield task, _received(pipe, late=time.monotonic() > end)
                process.kill()
                process.join()


def _overdue(running: dict[Any, Any]) -> list[Any]:
    return [pipe for pipe, (_, _, end) in running.items() if time.monotonic() > end]


def _answer(pipe: Any, work: Callable[..., dict[str, Any]], task: tuple[Any, ...]) -> None:
    """In the child."""
    torch.set_num_threads(1)
    try:
        pipe.send(work(*task))
    except Exception as error:
        pipe.send({"error": brief(error)})


def _received(pipe: Any, late: bool) -> dict[str, Any]:
    try:
        result: dict[str, Any] = pipe.recv() if not late else {"error": "time-out"}
    except EOFError:
        return {"error": "the process has died"}
    return result


def lines(header: list[str], body: list[list[str]]) -> Iterator[str]:
    """A table of text, in columns."""
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]
    for row in [header, *body]:
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
