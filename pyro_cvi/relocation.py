"""Components go where they serve: one is emptied, or takes the place of a part of another.

Coordinate ascent leaves two components in one cluster and one in two, for ever. A *move* takes
component j away from its elements, and gives it the second part of a component k that is split in two:

    t_nk  <-  a_nk,    t_nj  <-  b_nk,    W = softmax t,        or    t_nj  <-  -inf,

with t = E_q log p(x_n | z_n = j) the present table, and a, b those of the two parts. All components are
split at once, each at two of its elements that lie apart and then by what the two parts explain better.
A move is a few sweeps, and is taken back unless its bound is higher: estimates only choose what is
tried. An empty component is often better than two that share a cluster.

References: N. Ueda, R. Nakano, Z. Ghahramani, G. Hinton (2000), SMEM algorithm for mixture models,
Neural Computation 12; P. Fränti (2018), Efficiency of random swap clustering, Journal of Big Data 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.mixing import Mixture, Outlook, sweeps, tops
from pyro_cvi.updates import Belief

__all__ = ["go_to", "relocate"]

_MOST, _PATIENCE = 8, 3
"""Searches for a move that a start makes, or twice the states; those in vain that end it."""
_EMPTIED, _TRIES = 2, 4
"""Components that are tried empty, and elsewhere, before the search for one ends."""
_SWEEPS, _RESTS = 8, 30
"""Of a move, at most, and before moves are tried."""
_QUIET = 0.3
"""Nats that a sweep gains below which moves are tried."""
_GAIN = 0.05
"""Nats by which a move has to be better."""
_TAKEN_OVER = 0.1
"""The part of what a component explains that the others would not, once they have moved."""
_WORTH = 1.5
"""Components that cost so many times their share, in nats, are not emptied."""
_NOISE = 10.0
"""Nats of noise in the choice of moves."""
_FIRST = 4.0
"""Elements that a component sees first which has taken its place elsewhere."""
_OWN = 0.1
"""Least probability of elements that count as a component's own."""
_SHARED, _SHARED_EXACT = 6, 3
"""Rounds in which the two parts of a component share its elements; and where steps are exact."""
_IDLE = 0.5
"""Elements below which a component is free to go where there seems to be nothing to gain."""
_MOST_TAKEN = 0.7
"""Largest logarithm of what the probabilities of others grow by when a component goes."""


class _Split(NamedTuple):
    """Every component as two: their tables, and what each would gain by it."""

    first: Tensor
    second: Tensor
    gains: Tensor


class _Move(NamedTuple):
    """What is tried: a table, and the component that has new elements in it."""

    table: Tensor
    new: int | None = None


class _Outcome(NamedTuple):
    """Whether there may be a move, and the bound after the one that was taken; -inf if none was."""

    hope: bool
    bound: float


def go_to(mixtures: Sequence[Mixture], beliefs: Mapping[str, Belief]) -> None:
    """Take these beliefs, and let nothing be held."""
    evaluator, blocks = mixtures[0].evaluator, {m.block.name for m in mixtures}
    for name, belief in beliefs.items():
        if evaluator.beliefs[name] is not belief or name in blocks:
            evaluator.set(name, belief)


def relocate(mixtures: Sequence[Mixture], bound: float) -> None:
    """Move components of each mixture for as long as the bound, now `bound`, rises by it."""
    for m in mixtures:
        failed = 0
        for _ in range(max(_MOST, 2 * m.states)):
            if not failed:
                bound = _at_rest(mixtures, bound)
            found = _moved(mixtures, m, bound)
            failed = 0 if found.hope and found.bound > bound else failed + 1
            bound = max(bound, found.bound)
            if failed == _PATIENCE or not found.hope:
                break


def _at_rest(mixtures: Sequence[Mixture], bound: float) -> float:
    """The bound where sweeps hardly raise it any more, as far as they show: what a move has to beat.

    A move that comes back to where it was is no better for the sweeps that it took.
    """
    outlook = Outlook(bound)
    for _ in range(_RESTS):
        outlook.see(sweeps(mixtures, 1))
        if outlook.gain < _QUIET:
            break
    return outlook.end


def _moved(mixtures: Sequence[Mixture], m: Mixture, best: float) -> _Outcome:
    """The first move that is better than `best`; as it was if none is that was tried."""
    kept = dict(m.evaluator.beliefs)
    table = m.table()
    hope = bool((m.total(table.softmax(-1)) < _IDLE).any())
    try:
        for move in _moves(m, table, kept):
            hope = True
            bound = _tried(mixtures, m, move, best)
            if bound > best:
                return _Outcome(hope, bound)
            go_to(mixtures, kept)
    except CVIError:  # a component that its elements do not determine
        go_to(mixtures, kept)
    return _Outcome(hope, -math.inf)


def _moves(m: Mixture, table: Tensor, kept: Mapping[str, Belief]) -> Iterator[_Move]:
    """The tables that are to be tried: a component is empty, or has a part of another one."""
    losses = _losses(m, table)
    useless = _useless(m, table, losses)
    yield from (_Move(_without(table, j)) for j in useless[:1])
    split = _split(m, table)
    go_to([m], kept)
    choice = _choice(losses, split.gains)
    half = len(choice) // 2
    yield from (_Move(_with_part(table, split, j, k), j) for j, k in choice[:half])
    yield from (_Move(_without(table, j)) for j in useless[1:])
    yield from (_Move(_with_part(table, split, j, k), j) for j, k in choice[half:])


def _without(table: Tensor, j: int) -> Tensor:
    """The table where component j explains nothing."""
    moved = table.clone()
    moved[:, j] = -torch.inf
    return moved


def _with_part(table: Tensor, split: _Split, j: int, k: int) -> Tensor:
    """The table where component j has left its elements and taken the second part of k's."""
    moved = table.clone()
    moved[:, k], moved[:, j] = split.first[:, k], split.second[:, k]
    return moved


def _losses(m: Mixture, table: Tensor) -> Tensor:
    """What the elements lose without each component, if the others only take over its probability."""
    whole, first = table.logsumexp(-1), table.argmax(-1, keepdim=True)
    r = (table - whole.unsqueeze(-1)).exp()
    losses = -torch.log1p(-r.clamp(max=0.5))
    rest = whole.unsqueeze(-1) - table.scatter(-1, first, -torch.inf).logsumexp(-1, keepdim=True)
    mass = m.total(r)
    taken = (-torch.log1p(-mass / mass.sum())).clamp(max=_MOST_TAKEN)
    return m.total(losses.scatter(-1, first, rest)) - mass.sum() * taken


def _useless(m: Mixture, table: Tensor, losses: Tensor) -> list[int]:
    """Components that do least, if that may be less than they cost."""
    mass = m.total(table.softmax(-1))
    most = _WORTH * m.cost() / (_TAKEN_OVER * m.block.scale)
    order = [j for j in losses.argsort().tolist() if float(mass[j]) > 0.5]
    return [j for j in order[:_EMPTIED] if float(losses[j]) < most]


def _split(m: Mixture, table: Tensor) -> _Split:
    """Every component as two, that begin at two of its elements which lie apart.

    Each pair shares the elements of its component as two components of a mixture would, in a few rounds.
    """
    r, beliefs = table.softmax(-1), dict(m.evaluator.beliefs)
    own = torch.where(r > _OWN, r, torch.zeros_like(r))
    first = _single(m, own)
    a = _part(m, first, m.unit or beliefs)
    top = m.most(torch.where(own > 0, a, -torch.inf))
    second = _single(m, torch.where(own > 0, r * (top - a), 0.0).nan_to_num(0.0, 0.0, 0.0))
    b = _part(m, second, m.unit or beliefs)
    for _ in range(_SHARED_EXACT if m.is_exact else _SHARED):
        s = torch.sigmoid(b - a).nan_to_num(0.5)
        a = _part(m, torch.maximum(first, r * (1 - s)), beliefs)
        b = _part(m, torch.maximum(second, r * s), beliefs)
    gains = r * (torch.logaddexp(a, b) - table)
    return _Split(a, b, m.total(gains.nan_to_num(0.0, 0.0, 0.0)))


def _part(m: Mixture, weights: Tensor, beliefs: Mapping[str, Belief]) -> Tensor:
    """The table of components at their optimum given these weights, as parts of all elements."""
    m.hold(weights)
    m.sharpen(beliefs)
    m.settle(2) if m.is_exact else m.settle()
    share = m.total(weights).sum() / m.total(torch.ones_like(weights[:, :1])).sum()
    return m.table() + share.log()


def _single(m: Mixture, weights: Tensor) -> Tensor:
    """Weights of one for one element of each component, drawn by these weights."""
    rows = tops(m, weights, 1).squeeze(0)
    mine = rows >= 0
    p = torch.zeros_like(weights)
    p[rows[mine], mine.nonzero().squeeze(-1)] = 1.0
    return p


def _choice(losses: Tensor, gains: Tensor) -> list[tuple[int, int]]:
    """Which component gives way to a part of which: the best by estimates with some noise in them."""
    score = gains - _TAKEN_OVER * losses.unsqueeze(-1)
    noise = -torch.empty(score.shape, device="cpu").exponential_().log()
    noisy = torch.where(score > 0, score + _NOISE * noise.to(score), -torch.inf)
    noisy.fill_diagonal_(-torch.inf)
    found: list[tuple[int, int]] = []
    for i in noisy.flatten().argsort(descending=True).tolist():
        j, k = divmod(i, len(gains))
        if len(found) == _TRIES or not float(noisy[j, k]) > -math.inf:
            break
        if all(k != other for _, other in found):
            found.append((j, k))
    return found


def _tried(mixtures: Sequence[Mixture], m: Mixture, move: _Move, best: float) -> float:
    """The bound after a move and some sweeps; -inf as soon as it is not going to be better."""
    try:
        _take(m, move)
        m.release()
        outlook = Outlook(m.evaluator.elbo())
        for i in range(_SWEEPS):
            outlook.see(sweeps(mixtures, 1))
            if not outlook.end > best + _GAIN or (i > 0 and outlook.bound > best + _GAIN):
                break
    except CVIError:  # a component that its elements do not determine
        return -math.inf
    return outlook.bound if outlook.bound > best + _GAIN else -math.inf


def _take(m: Mixture, move: _Move) -> None:
    """Bring the components to their optimum after a move; a new one first sees a few of its elements."""
    weights = move.table.softmax(-1)
    if m.is_exact:
        m.hold(weights)
        m.settle(1)
        return
    m.sharpen(m.evaluator.beliefs)
    if move.new is not None:
        few = weights.clone()
        few[:, move.new] *= (_FIRST / m.total(weights)[move.new]).clamp(max=1.0)
        m.hold(few)
        m.settle()
    m.hold(weights)
    m.settle()
