"""Where a posterior of this kind is known to be too narrow, and that `integrate` mends it.

Lost, whatever the messages, is the skewness of a scale that few numbers tell of, whose logarithm has a
Gaussian or which has a block of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyro_cvi.families import GAMMA, INVERSE_GAMMA
from pyro_cvi.families.unconstrained import of_one
from pyro_cvi.graph.plan import Plan
from pyro_cvi.graph.symbolic import Latent

__all__ = ["hints"]

_FEW = 60
"""Numbers that a scale is seen by, below which its posterior is clearly skewed."""
_MOST = 6
"""Scalars that `integrate` takes at a time."""


def hints(plan: Plan) -> tuple[str, ...]:
    """One sentence for each such site."""
    if plan.stochastic or plan.learns:
        return ()
    return tuple(_scales(plan))


def _scales(plan: Plan) -> Iterator[str]:
    """Positive sites that spread few other numbers."""
    for name, latent in plan.latents.items():
        if not _is_scale(latent):
            continue
        seen = [f for f in plan.factors if name in f.how and f.name != name]
        count, size = sum(f.cells for f in seen), latent.value.numel()
        if not 0 < count <= _FEW * size:
            continue
        each = "" if size == 1 else " for each element"
        yield _mended(
            name, f"a scale that {count // size} numbers tell of{each}, its interval may be"
        )


def _mended(name: str, found: str) -> str:
    return f"{name}: {found} too narrow; integrate(cvi, '{name}', *args) gives it as it is"


def _is_scale(latent: Latent) -> bool:
    if latent.value.numel() > _MOST:
        return False
    if latent.family in (GAMMA, INVERSE_GAMMA):
        return True
    support = of_one(latent.own_support)
    lower = getattr(support, "lower_bound", None)
    return (
        latent.transform is not None
        and isinstance(lower, int | float)
        and lower == 0
        and not hasattr(support, "upper_bound")
    )
