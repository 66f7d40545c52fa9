"""When a fit is at its optimum: less than `tol` nats is left to gain, and no mean has far to go.

Let g_t be what sweep t gained. Where g_t = r g_{t-1} from here on, what is left is

    g_{t+1} + g_{t+2} + ...  =  g_t r / (1 - r),

and the distance that is left is that of the last sweep times s / (1 - s), s = sqrt(r). So a sweep that
gains little because it creeps (r near one) is not the end, and one that gains little after one that
gained much is. The ratio is the largest that sweeps in succession have shown lately: a mixture of
sweeps (`Anderson`) removes what creeps from the gain, and not from what is left. So a run that needed
several mixtures ends only after another one, which sees what sweeps of a few 1e-3 standard deviations
would still add up to, has moved no mean by more than `tol` either. And a mean that has just gone further
in one sweep than in the one before has no ratio: steps that are lengthened and shortened in turns creep.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Progress"]

_RECENT = 10
"""Sweeps whose ratios count."""
_SLOWEST = 0.9999
"""Ratio beyond which none can be told from one."""
_NOISE = 10.0
"""Gains of so many floors and less have no ratio."""
_PATIENCE = 8
"""Sweeps without a gain after which means may move by what rounding hides."""
_TO_AND_FRO = 3.0
"""Length of a way in units of its ends' distance from which on it leads nowhere."""
_TINY = 1e-12
_UNKNOWN = 0.9
"""Contraction of a mean that was measured once."""
_CLOSE = 10.0
"""Gain of a mixture, in units of what does not count, below which the end may be near."""
_SHORT = 0.1
"""A move in units of `tol` that ends a run at once; of longer ones, two in succession have to."""
_NEARLY = 3.0
"""What the first of the two may leave, in the same units."""
_FEW = 3
"""Mixtures that a run may take and not count as one that creeps."""


@dataclass
class Progress:
    """The bounds of the sweeps of one run, and what they say of its end.

    `floor` is the rounding of the present bound, in nats; `moves` are how far sweeps moved the mean that
    they moved most, in standard deviations, or infinity where that was not measured. A bound below the
    `least` is that of no fit, however little a sweep changes it. `places` are the last ones where moves
    were measured, in any form, and `walked` is how far from the oldest a mean now is at most. Of the run
    so far `mixtures` were better than their sweeps; where it `asks_for_mixture`, the next sweep is to be
    mixed with those before it, whatever that gains, and `tried` says that the last one was.
    """

    tol: float
    bounds: list[float] = field(default_factory=list)
    plain: list[bool] = field(default_factory=list)
    floor: float = 0.0
    moves: list[float] = field(default_factory=list)
    least: float = -math.inf
    walked: float = math.inf
    places: deque[Any] = field(default_factory=lambda: deque(maxlen=_PATIENCE))
    mixtures: int = 0
    asks_for_mixture: bool = False
    tried: bool = False

    def add(self, loss: float, *, plain: bool = True) -> None:
        """Take note of the loss after a sweep, or after a mixture of sweeps (not `plain`)."""
        self.mixtures += not plain
        self.tried, self.asks_for_mixture = self.asks_for_mixture, False
        self.bounds.append(-loss)
        self.plain.append(plain)
        self.moves.append(math.inf)

    @property
    def moved(self) -> float:
        """How far the last sweep moved the mean that it moved most; infinity if not measured."""
        return self.moves[-1] if self.moves else math.inf

    @moved.setter
    def moved(self, shift: float) -> None:
        self.moves[-1] = shift

    def restart(self) -> None:
        """Forget what sweeps have shown: another start, or another objective."""
        self.bounds.clear()
        self.plain.clear()
        self.moves.clear()
        self.places.clear()
        self.tried = self.asks_for_mixture = False

    @property
    def gains(self) -> list[float]:
        """What each sweep but the first gained."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def ratio(self) -> float:
        """The contraction r: the largest that the last sweeps have shown, since gains last grew."""
        gains, plain = self.gains, self.plain[1:]
        largest, known = 0.0, False
        for i in range(len(gains) - 1, max(0, len(gains) - 1 - _RECENT), -1):
            if not (plain[i] and plain[i - 1]):
                continue
            if abs(gains[i - 1]) <= _NOISE * self.floor:  # a ratio of roundings says nothing
                known = True
                continue
            r = max(gains[i], 0.0) / gains[i - 1]
            if (
                gains[i - 1] < 0 or r >= 1
            ):  # a way off a plateau, or back from a loss: what was before is over
                return largest if known else _SLOWEST
            largest, known = max(largest, r), True
        return min(largest, _SLOWEST) if known else _SLOWEST

    @property
    def left(self) -> float:
        """Nats that are left to gain, as far as the last gains and their contraction tell."""
        gains = self.gains
        if not gains:
            return math.inf
        last = max(gains[-1], 0.0)
        if len(gains) == 1:  # one gain has no ratio: only none at all is the end
            return last if last <= self.floor else math.inf
        return last * self.ratio / (1 - self.ratio)

    @property
    def left_to_move(self) -> float:
        """Standard deviations that the mean which moved most has still to go.

        Its own contraction counts as well: a mean that hardly matters to the bound may creep where all
        that does has settled. Long and short sweeps may alternate, so that two and two are compared.
        """
        seen = self._measured
        if not seen or self.moved == 0:
            return 0.0 if seen else math.inf
        if self.moved <= _SHORT * self.tol:
            return self._left_after(seen)
        return max(self._left_after(seen[:-1]) / _NEARLY, self._left_after(seen))

    def _left_after(self, seen: list[float]) -> float:
        """The same, from how far the last sweeps moved."""
        if not seen:
            return math.inf
        last = max(seen[-2:]) if len(seen) > 2 else seen[-1]
        s = math.sqrt(self.ratio) if len(self.bounds) > 2 else 0.5
        if len(seen) > 3:
            s = max(s, math.sqrt(last / max(seen[-4:-2])))
        elif len(seen) > 1:
            s = max(s, last / seen[0])
        else:
            s = max(s, _UNKNOWN)
        s = max(s, self._slowest_move)
        s = min(s, _SLOWEST)
        return last * s / (1 - s)

    @property
    def _slowest_move(self) -> float:
        """The largest ratio below one of how far plain sweeps in succession moved lately."""
        moves, plain = self.moves[-_RECENT:], self.plain[-_RECENT:]
        found = [0.0]
        for i in range(1, len(moves)):
            if plain[i] and plain[i - 1] and 0 < moves[i] < moves[i - 1] < math.inf:
                found.append(moves[i] / moves[i - 1])
        return max(found)

    @property
    def _measured(self) -> list[float]:
        """How far the last plain sweeps in succession moved, as far as it was measured."""
        found: list[float] = []
        for moved, plain in zip(reversed(self.moves), reversed(self.plain), strict=True):
            if moved == math.inf or not plain or len(found) == 4:
                break
            found.insert(0, max(moved, _TINY))
        return found

    @property
    def asks_for_plain(self) -> bool:
        """Whether a mixture of sweeps gained so little that plain ones are to tell what is left."""
        gains = self.gains
        close = bool(gains) and gains[-1] <= _CLOSE * self.allowed
        return close and not (self.plain[-1] and self.plain[-2])

    @property
    def allowed(self) -> float:
        """Nats below which what is left does not count: `tol`, or what rounding hides."""
        return max(self.tol, self.floor)

    @property
    def is_near(self) -> bool:
        """Whether the gains say that the end is near: then it is asked how far means have moved."""
        close = bool(self.gains) and self.gains[-1] <= _CLOSE * self.allowed
        return self.tol > 0 and close and (self.plain[-1] or self.tried)

    @property
    def may_end(self) -> bool:
        """Whether the gains say that it is the end."""
        return self.is_near and self.plain[-1] and self.left <= self.allowed

    @property
    def is_absurd(self) -> bool:
        """Whether the present bound is that of no fit."""
        return bool(self.bounds) and not self.bounds[-1] >= self.least

    def is_end(self) -> bool:
        """Whether less than `tol` nats are left, and of each mean less than `tol` sd.

        To be asked once after each sweep: of a run that creeps it may ask for a mixture first.
        """
        if self.tried and not self.plain[-1]:
            return self.gains[-1] <= self.allowed and self.moved <= self.tol
        if not self.may_end:
            return False
        if self._is_noise:
            return True
        if self._has_surged or self.left_to_move > self.tol:
            return False
        self.asks_for_mixture = self.mixtures > _FEW and not self.tried
        return not self.asks_for_mixture

    @property
    def _has_surged(self) -> bool:
        """Whether a mean went further than `tol` lately, and twice as far as in the sweep before."""
        moves, plain = self.moves[-_PATIENCE:], self.plain[-_PATIENCE:]
        pairs = zip(moves, moves[1:], plain, plain[1:], strict=False)
        return any(p and q and max(2 * a, self.tol) < b < math.inf for a, b, p, q in pairs)

    @property
    def _is_noise(self) -> bool:
        """Whether all that sweeps still do is rounding: means that no gain can tell apart.

        Or they go to and fro: over many sweeps they gain nothing and come back to where they were.
        """
        last, moves = self.gains[-_PATIENCE:], self.moves[-_PATIENCE:]
        if len(last) < _PATIENCE:
            return False
        if all(abs(g) <= self.floor for g in last) and self.moved <= math.sqrt(2 * self.floor):
            return True
        comes_back = _TO_AND_FRO * self.walked <= sum(moves) < math.inf
        return comes_back and self.walked <= self.tol and sum(last) <= self.floor
