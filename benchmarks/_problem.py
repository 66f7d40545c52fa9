"""A model with its data, built when it is asked for: what the `_models_*.py` are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from torch import Tensor

Builder = Callable[[], "Problem"]
REGISTRY: dict[str, Builder] = {}


@dataclass(frozen=True)
class Problem:
    """A model and its arguments.

    `discrete` are the sites that SVI and the estimate of the bound have enumerated, at most `nesting`
    plates deep; `hidden` those that no guide is to have; a model that `learns` has parameters.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    discrete: tuple[str, ...] = ()
    nesting: int | None = None
    hidden: tuple[str, ...] = ()
    learns: bool = False

    @property
    def shown(self) -> Callable[..., Any]:
        """The model without the sites that no guide is to have."""
        return poutine.block(self.model, hide=list(self.hidden)) if self.hidden else self.model


def problem(name: str) -> Callable[[Builder], Builder]:
    """Enter a function under this name; its data are the same at every call, in the default dtype."""

    def entered(build: Builder) -> Builder:
        def built() -> Problem:
            with torch.random.fork_rng():
                pyro.set_rng_seed(20)
                return build()

        assert name not in REGISTRY, name
        REGISTRY[name] = built
        return build

    return entered


def negative_bounds(case: Any, guide: Any, particles: int) -> Tensor:
    """Values of the negative bound at draws of a guide, the case's discrete sites summed out."""
    loss: Any = Trace_ELBO()
    if case.discrete:
        loss = TraceEnum_ELBO(max_plate_nesting=case.nesting)
        guide = poutine.block(guide, hide=list(case.discrete))
    with torch.no_grad():
        values = [loss.loss(case.model, guide, *case.args) for _ in range(particles)]
    return torch.tensor(values, dtype=torch.float64)
