"""Beliefs and their steps: natural <- natural + rho (target - natural), never leaving the domain.

The target of a block is the sum of its messages, target = grad_mean E_q[log p]. A proper target makes
every rho in (0, 1] safe (the domain is convex). Else, per plate element, the largest feasible step is
taken, and where even that is tiny the second-order retraction of Lin, Schmidt & Khan (2020).

A Gaussian belief is held as (loc, precision), a chart of the same natural parameters in which the
step reads loc' = loc + rho precision'^-1 grad_loc: far from zero the product precision @ loc has no
digits left in float32, this has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_cvi.families import GAUSSIAN, AbstractFamily, Natural, from_loc_precision
from pyro_cvi.linalg import (
    cholesky,
    inverse_precision,
    log_diagonal_sum,
    matvec,
    or_zeros,
    precision_to_scale_tril,
    solve_precision,
    symmetrise,
    whiten,
    without_repeats,
)

__all__ = ["Belief", "FamilyBelief", "GaussianBelief", "Step", "marginal_shift"]

_TINY_STEP = 0.1
"""A feasible step shorter than this fraction of the wanted one gives way to the retraction."""


@dataclass(frozen=True)
class Step:
    """How many elements of a block had an improper target, a shortened step, or a retraction."""

    improper: int = 0
    shortened: int = 0
    retracted: int = 0


class AbstractBelief(ABC):
    """A block's posterior: immutable tensors, with everything derived from them computed once."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored, in the guide's buffers."""

    @abstractmethod
    def leaves(self) -> tuple[Tensor, ...]:
        """Fresh mean parameters that require gradients: messages are gradients in these."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """sum over elements of -E log q."""

    @abstractmethod
    def moved(
        self, gradient: Sequence[Tensor | None], rho: float | Tensor
    ) -> tuple[AbstractBelief, Step]:
        """The belief after a step of size rho, given dE[log p] / d leaves.

        Beliefs of `kls` may step each element by a size of its own, of the shape of `kls`.
        """

    @abstractmethod
    def direction(self, gradient: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """What a full step changes, target - present, in coordinates of `inner`."""

    @abstractmethod
    def inner(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """left^T F right = Cov_q(<left, T>, <right, T>) of every element, in nats.

        Both are directions, or differences of gradients in `leaves`. d^T F d is 2 KL of the step d, to
        second order.
        """

    @abstractmethod
    def kl(self, other: AbstractBelief) -> Tensor:
        """KL(self || other), summed over elements."""

    def kls(self, other: AbstractBelief) -> Tensor | None:
        """KL(self || other) of every element; None where a block is one element."""
        return None

    def ends(self, gradient: Sequence[Tensor | None], old: AbstractBelief) -> Tensor | None:
        """<gradient - natural, mean - mean of `old`> of every element: the bound's slope at its end.

        With dE[log p] / d leaves at this belief. A parabola's is negative where the step was longer than
        the way to its top.
        """
        return None

    @abstractmethod
    def shift(self, other: AbstractBelief) -> Tensor:
        """How far `other` is from this belief: of all scalars the largest change, a number.

        Of a Gaussian scalar it is |m' - m| / sd, or |log sd' - log sd| where that is larger; of an
        element of another family sqrt(2 KL), which is the same for a small step.
        """

    def trusted(self, old: AbstractBelief, factor: float) -> AbstractBelief:
        """This belief, or one on the way from `old` that changes less: see `AbstractFamily.trusted`."""
        return self

    def turned(self, gradient: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient with curvatures of the wrong sign turned round; the same for other families."""
        return list(gradient)

    @abstractmethod
    def like(self, tensors: Sequence[Tensor]) -> AbstractBelief | None:
        """A belief of this kind from other tensors; None if they are not proper."""

    @abstractmethod
    def standardised(self, x: AbstractBelief, y: AbstractBelief) -> tuple[Tensor, ...]:
        """y - x in coordinates in which this belief's Fisher metric is roughly the identity."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether the stored tensors are all finite."""


class GaussianBelief(AbstractBelief):
    """B independent d-dimensional Gaussians; leaves are (loc, cov).

    Shapes: loc (B, d), precision (B, d, d).
    """

    def __init__(self, loc: Tensor, precision: Tensor) -> None:
        self.loc, self.precision = loc, precision

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.loc, self.precision

    @cached_property
    def factor(self) -> Tensor:
        """Cholesky factor of the precision."""
        return cholesky(self.precision)

    @cached_property
    def cov(self) -> Tensor:
        return inverse_precision(without_repeats(self.factor, 1)).expand_as(self.precision)

    @cached_property
    def scale_tril(self) -> Tensor:
        return precision_to_scale_tril(self.precision)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.loc.detach().requires_grad_(), self.cov.detach().requires_grad_()

    def entropy(self) -> Tensor:
        return self.entropies().sum()

    def entropies(self) -> Tensor:
        """The entropy of every element, shape (B,)."""
        half_d = 0.5 * self.loc.shape[-1] * (1 + math.log(2 * math.pi))
        return half_d - log_diagonal_sum(self.factor)

    def is_finite(self) -> bool:
        precision = without_repeats(self.precision, 1)
        return bool(self.loc.isfinite().all()) and bool(precision.isfinite().all())

    def moved(
        self, gradient: Sequence[Tensor | None], rho: float | Tensor
    ) -> tuple[GaussianBelief, Step]:
        g_loc = or_zeros(gradient[0], self.loc)
        full = not isinstance(rho, Tensor) and rho == 1
        curvature = without_repeats(or_zeros(gradient[1], self.precision), 1)
        target = -2 * symmetrise(curvature)
        if full and len(target) < len(self.loc):  # elements with one precision factor it once
            found = torch.linalg.cholesky_ex(target)
            change = torch.cholesky_solve(g_loc.mT, found.L[0]).mT
            if not bool(found.info.any()) and bool(change.isfinite().all()):
                moved = GaussianBelief(self.loc + change, target.expand_as(self.precision))
                moved.__dict__["factor"] = found.L.expand_as(self.precision)
                return moved, Step()
        target = target.expand_as(self.precision)
        by = rho[:, None] if isinstance(rho, Tensor) else rho
        share = rho[:, None, None] if isinstance(rho, Tensor) else rho
        precision = target if full else self.precision + share * (target - self.precision)
        found = torch.linalg.cholesky_ex(target)
        bad = found.info != 0
        step = Step()
        if bool(bad.any()):
            precision, step = self._stay_inside(precision, target, bad, rho)
        if precision is not target:
            found = torch.linalg.cholesky_ex(precision)
        factor = found.L
        loc = self.loc + by * solve_precision(factor, g_loc)
        lost = (found.info != 0) | ~loc.isfinite().all(-1)
        if bool(lost.any()):  # proper, but not to rounding: these elements stay where they are
            loc = torch.where(lost[..., None], self.loc, loc)
            precision = torch.where(lost[..., None, None], self.precision, precision)
            factor = torch.where(lost[..., None, None], self.factor, factor)
        moved = GaussianBelief(loc, precision)
        moved.__dict__["factor"] = factor
        return moved, step

    def bent(
        self, gradient: Sequence[Tensor | None], rho: float, most: float
    ) -> tuple[GaussianBelief, Step]:
        """A step of independent scalars on a noisy message, S' = S + rho D + (rho^2 / 2) D^2 / S > 0.

        D = target - S. Whatever the noise in the target, S' is positive and no step is shortened: that
        would let precisions fall further than they may rise. No precision changes by more than the
        factor `most`, and no mean by more than that many standard deviations.

        Reference: W. Lin, M. Schmidt, M. E. Khan (2020), arXiv 2002.10060; Y. Shen et al. (2024), arXiv
        2402.17641, for weights of networks.
        """
        change = rho * (-2 * or_zeros(gradient[1], self.precision) / self.precision - 1)
        ratio = (1 + change + change.square() / 2).clamp(1 / most, most)
        precision = self.precision * ratio
        scale = self.precision.squeeze(-1).rsqrt()
        step = rho * or_zeros(gradient[0], self.loc) / precision.squeeze(-1)
        loc = self.loc + torch.minimum(torch.maximum(step, -most * scale), most * scale)
        return GaussianBelief(loc, precision), Step(int((change < -rho).sum()))

    def like(self, tensors: Sequence[Tensor]) -> GaussianBelief | None:
        loc, precision = tensors
        found = torch.linalg.cholesky_ex(precision)
        if bool(found.info.any()) or not bool(found.L.isfinite().all()):
            return None
        new = GaussianBelief(loc, precision)
        new.__dict__["factor"] = found.L
        return new

    def standardised(self, x: AbstractBelief, y: AbstractBelief) -> tuple[Tensor, ...]:
        """(L^T dm, L^-1 dP L^-T / sqrt 2), with P = L L^T."""
        assert isinstance(x, GaussianBelief) and isinstance(y, GaussianBelief)
        change = whiten(self.factor, y.precision - x.precision)
        return matvec(self.factor.mT, y.loc - x.loc), change / math.sqrt(2)

    def trusted(self, old: AbstractBelief, factor: float) -> GaussianBelief:
        """No direction's precision changes by more than the factor.

        And no mean by more than that many standard deviations, as a root mean square over scalars.
        """
        assert isinstance(old, GaussianBelief)
        d = self.loc.shape[-1]
        change = self.loc - old.loc
        length = matvec(old.factor.mT, change).square().sum(-1, keepdim=True).sqrt() / math.sqrt(d)
        change = change * (factor / length.clamp(min=factor))
        ratio, basis = torch.linalg.eigh(whiten(old.factor, self.precision))
        held = ratio.clamp(1 / factor, factor)
        precision = self.precision
        if not torch.equal(held, ratio):
            lifted = old.factor @ basis
            precision = symmetrise((lifted * held[..., None, :]) @ lifted.mT)
        # Positive definite, but perhaps not to rounding: in the order of its factor and of its draws.
        found = torch.linalg.cholesky_ex(torch.stack([precision, precision.flip(-2, -1)]))
        lost = (found.info != 0).any(0)[..., None, None]
        moved = GaussianBelief(old.loc + change, torch.where(lost, old.precision, precision))
        moved.__dict__["factor"] = torch.where(lost, old.factor, found.L[0])
        return moved

    def turned(self, gradient: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient whose target precision has the absolute eigenvalues, relative to this precision.

        None is below a quarter. A step towards that target goes uphill and has a length.
        """
        slope, curvature = gradient
        target = -2 * symmetrise(or_zeros(curvature, self.precision))
        ratio, basis = torch.linalg.eigh(whiten(self.factor, target))
        lifted = self.factor @ basis
        away = ratio.abs().clamp(min=0.25)
        return [slope, -0.5 * (lifted * away[..., None, :]) @ lifted.mT]

    def direction(self, gradient: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        curvature = symmetrise(or_zeros(gradient[1], self.precision))
        return or_zeros(gradient[0], self.loc), curvature + 0.5 * self.precision

    def inner(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Cov(a^T z + z^T G z, b^T z + z^T H z) = a^T V b + 2 tr(G V H V), z centred; shape (B,)."""
        (a, g), (b, h) = left, right
        linear = (a * matvec(self.cov, b)).sum(-1)
        moved = self.cov @ symmetrise(h) @ self.cov
        return linear + 2 * (symmetrise(g) * moved).sum((-1, -2))

    def _stay_inside(
        self, precision: Tensor, target: Tensor, bad: Tensor, rho: float | Tensor
    ) -> tuple[Tensor, Step]:
        """Shorten or retract the elements whose target is improper; the others are not touched.

        Where the target is not finite, as where a step overflows, there is no direction to go.
        """
        old, factor = self.precision[bad], self.factor[bad]
        size = rho[bad] if isinstance(rho, Tensor) else old.new_full((len(old),), rho)
        direction = target[bad] - old
        finite = direction.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        direction = torch.where(finite, direction, torch.zeros_like(direction))
        least = torch.linalg.eigvalsh(whiten(factor, direction))[..., 0]
        limit = torch.where(least < 0, -0.9 / least, torch.full_like(least, torch.inf))
        inside = old + torch.minimum(limit, size)[..., None, None] * direction
        moved = old + size[..., None, None] * direction
        half = torch.linalg.solve_triangular(factor, moved, upper=False)
        retracted = 0.5 * (old + half.mT @ half)
        tiny = limit < _TINY_STEP * size
        result = precision.clone()
        result[bad] = torch.where(tiny[..., None, None], retracted, inside)
        shortened = int((~tiny & (limit < size)).sum())
        return result, Step(int(bad.sum()), shortened, int(tiny.sum()))

    def kl(self, other: AbstractBelief) -> Tensor:
        return self.kls(other).sum()

    def kls(self, other: AbstractBelief) -> Tensor:
        assert isinstance(other, GaussianBelief)
        return GAUSSIAN.kl(
            from_loc_precision(torch.zeros_like(self.loc), self.precision),
            from_loc_precision(other.loc - self.loc, other.precision),
        )

    def ends(self, gradient: Sequence[Tensor | None], old: AbstractBelief) -> Tensor:
        assert isinstance(old, GaussianBelief)
        slope, curvature = self.direction(gradient)
        step = self.loc - old.loc
        second = self.cov - old.cov - step[..., None] * step[..., None, :]
        return (slope * step).sum(-1) + (curvature * second).sum((-1, -2))

    def marginals(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of every scalar."""
        return self.loc, self.cov.diagonal(dim1=-2, dim2=-1)

    def shift(self, other: AbstractBelief) -> Tensor:
        assert isinstance(other, GaussianBelief)
        return marginal_shift(self.marginals(), other.marginals())


def marginal_shift(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The largest of |m' - m| / sd and |log sd' - log sd| over scalars with these (m, sd^2)."""
    (loc, variance), (to, after) = old, new
    if not loc.numel():
        return loc.new_zeros(())
    mean = ((to - loc).square() / variance).max().sqrt()
    return torch.maximum(mean, 0.5 * (after / variance).log().abs().max())


class FamilyBelief(AbstractBelief):
    """Independent members of one family; leaves are its mean parameters.

    Shapes: as the family's natural parameters, `(*batch, *event)` per statistic.
    """

    def __init__(self, family: AbstractFamily, natural: Natural) -> None:
        self.family, self.natural = family, natural

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.natural

    @property
    def mean(self) -> tuple[Tensor, ...]:
        return self._mean_and_entropy[0]

    @cached_property
    def _mean_and_entropy(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        return self.family.mean_and_entropy(self.natural)

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(m.detach().requires_grad_() for m in self.mean)

    def entropy(self) -> Tensor:
        return self._entropy

    @cached_property
    def _entropy(self) -> Tensor:
        known = self._mean_and_entropy[1]
        if known is None:
            known = self.family.entropy_of_mean(self.mean)
        return (self.family.entropy(self.natural) if known is None else known).sum()

    def is_finite(self) -> bool:
        return all(bool(n.isfinite().all()) for n in self.natural)

    def moved(
        self, gradient: Sequence[Tensor | None], rho: float | Tensor
    ) -> tuple[FamilyBelief, Step]:
        target = tuple(or_zeros(g, n) for g, n in zip(gradient, self.natural, strict=True))
        family = self.family
        proper = family.is_proper(target)
        everywhere = bool(proper.all())
        full = not isinstance(rho, Tensor) and rho == 1
        if everywhere and full:
            return FamilyBelief(family, target), Step()
        direction = tuple(t - n for t, n in zip(target, self.natural, strict=True))
        plain = target if full else family.advance(self.natural, direction, rho)
        if everywhere:
            return FamilyBelief(family, plain), Step()
        limit = 0.9 * family.max_step(self.natural, direction)
        tiny = ~proper & (limit < _TINY_STEP * rho)
        short = family.advance(self.natural, direction, limit.clamp(max=rho))
        retracted = family.retract(self.natural, direction, rho)
        natural = []
        for p, s, r, n in zip(plain, short, retracted, family.event_dims, strict=True):
            lift = (..., *([None] * n))
            natural.append(torch.where(proper[lift], p, torch.where(tiny[lift], r, s)))
        shortened = int((~proper & ~tiny & (limit < rho)).sum())
        return FamilyBelief(family, tuple(natural)), Step(
            int((~proper).sum()), shortened, int(tiny.sum())
        )

    def like(self, tensors: Sequence[Tensor]) -> FamilyBelief | None:
        natural = tuple(tensors)
        return (
            FamilyBelief(self.family, natural)
            if bool(self.family.is_proper(natural).all())
            else None
        )

    def standardised(self, x: AbstractBelief, y: AbstractBelief) -> tuple[Tensor, ...]:
        """d natural, relative to its size: Fisher matrices of these families scale like natural^-2."""
        assert isinstance(x, FamilyBelief) and isinstance(y, FamilyBelief)
        return tuple(
            (b - a) / n.abs().clamp(min=1.0)
            for a, b, n in zip(x.natural, y.natural, self.natural, strict=True)
        )

    def trusted(self, old: AbstractBelief, factor: float) -> AbstractBelief:
        assert isinstance(old, FamilyBelief)
        return FamilyBelief(self.family, self.family.trusted(self.natural, old.natural, factor))

    def direction(self, gradient: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple(or_zeros(g, n) - n for g, n in zip(gradient, self.natural, strict=True))

    def inner(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Cov(<left, T>, <right, T>), from d mean / d natural = F; shape (*batch,)."""
        natural = tuple(n.detach().requires_grad_() for n in self.natural)
        with torch.enable_grad():
            mean = self.family.to_mean(natural)
            along = torch.autograd.grad(mean, natural, tuple(right), allow_unused=True)
        moved = tuple(or_zeros(m, n) for m, n in zip(along, natural, strict=True))
        return self.family.inner(tuple(left), moved)

    def kl(self, other: AbstractBelief) -> Tensor:
        return self.kls(other).sum()

    def kls(self, other: AbstractBelief) -> Tensor:
        assert isinstance(other, FamilyBelief)
        return self.family.kl(self.natural, other.natural)

    def ends(self, gradient: Sequence[Tensor | None], old: AbstractBelief) -> Tensor:
        assert isinstance(old, FamilyBelief)
        change = tuple(a - b for a, b in zip(self.mean, old.mean, strict=True))
        return self.family.inner(self.direction(gradient), change)

    def shift(self, other: AbstractBelief) -> Tensor:
        assert isinstance(other, FamilyBelief)
        each = self.family.kl(self.natural, other.natural)
        return (2 * each.clamp(min=0)).max().sqrt() if each.numel() else each.new_zeros(())


Belief = AbstractBelief


__all__ += ["AbstractBelief"]
