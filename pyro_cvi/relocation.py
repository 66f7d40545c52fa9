"""Components go where they serve: one is emptied, or takes the place of a part of another.

Coordinate ascent leaves two components in one cluster and one in two, for ever. A *move* takes
component j away from its elements, and gives it those that a new component k explains better than all
present ones:

    t_nj  <-  c_nk,      W = softmax t,        or    t_nj  <-  -inf,

with t = E_q log p(x_n | z_n = j) the present table. The new components are as many as there are states,
one from a part of each present one, and are found together, each from a single element and then from the
elements that it explains better. A move is a few sweeps, and is taken back unless its bound is higher:
estimates only choose what is tried. An empty component is often better than two that share a cluster.

References: N. Ueda, R. Nakano, Z. Ghahramani, G. Hinton (2000), SMEM algorithm for mixture models,
Neural Computation 12; P. Fränti (2018), Efficiency of random swap clustering, Journal of Big Data 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyro_cvi.errors import CVIError
from pyro_cvi.mixing import Mixture, Outlook, sweeps, tops
from pyro_cvi.updates import Belief

__all__ = ["go_to", "relocate"]

_MOST = 8
"""Moves that a start makes."""
_EMPTIED, _TRIES = 2, 4
"""Components that are tried empty, and elsewhere, before the search for one ends."""
_SWEEPS, _RESTS = 8, 30
"""Of a move, at most, and before moves are tried."""
_SETTLING = 5
"""Rounds in which components come near their optimum, in an offer and after a move."""
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
_OWN = 0.1
"""Least probability of elements that count as a component's own."""


class _Offer(NamedTuple):
    """New components: their table, and what each would gain beside the present ones."""

    table: Tensor
    gains: Tensor


def go_to(mixtures: Sequence[Mixture], beliefs: Mapping[str, Belief]) -> None:
    """Take these beliefs, and let nothing be held."""
    evaluator, blocks = mixtures[0].evaluator, {m.block.name for m in mixtures}
    for name, belief in beliefs.items():
        if evaluator.beliefs[name] is not belief or name in blocks:
            evaluator.set(name, belief)


def relocate(mixtures: Sequence[Mixture], bound: float) -> None:
    """Move components of each mixture for as long as the bound, now `bound`, rises by it."""
    for m in mixtures:
        for _ in range(_MOST):
            bound = _at_rest(mixtures, bound)
            found = _moved(mixtures, m, bound)
            if found is None:
                break
            bound = found


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


def _moved(mixtures: Sequence[Mixture], m: Mixture, best: float) -> float | None:
    """The bound after the first move that is better than `best`; None if none is that was tried."""
    kept = dict(m.evaluator.beliefs)
    table = m.table()
    try:
        for j, new in _moves(m, table, kept):
            bound = _tried(mixtures, m, table, j, new, best)
            if bound > best:
                return bound
            go_to(mixtures, kept)
    except CVIError:  # a component that its elements do not determine
        go_to(mixtures, kept)
    return None


def _moves(
    m: Mixture, table: Tensor, kept: Mapping[str, Belief]
) -> Iterator[tuple[int, Tensor | None]]:
    """What is to be tried: a component, and the table of the one in its place, None if empty."""
    losses = _losses(m, table)
    useless = _useless(m, table, losses)
    yield from ((j, None) for j in useless[:1])
    offer = _offer(m, table)
    go_to([m], kept)
    choice = _choice(losses, offer.gains)
    half = len(choice) // 2
    yield from ((j, offer.table[:, k]) for j, k in choice[:half])
    yield from ((j, None) for j in useless[1:])
    yield from ((j, offer.table[:, k]) for j, k in choice[half:])


def _losses(m: Mixture, table: Tensor) -> Tensor:
    """What the elements lose without each component, if the others stay as they are."""
    whole, first = table.logsumexp(-1), table.argmax(-1, keepdim=True)
    r = (table - whole.unsqueeze(-1)).exp()
    losses = -torch.log1p(-r.clamp(max=0.5))
    rest = whole.unsqueeze(-1) - table.scatter(-1, first, -torch.inf).logsumexp(-1, keepdim=True)
    return m.total(losses.scatter(-1, first, rest))


def _useless(m: Mixture, table: Tensor, losses: Tensor) -> list[int]:
    """Components that do least, if that may be less than they cost."""
    mass = m.total(table.softmax(-1))
    most = _WORTH * m.cost() / (_TAKEN_OVER * m.block.scale)
    order = [j for j in losses.argsort().tolist() if float(mass[j]) > 0.5]
    return [j for j in order[:_EMPTIED] if float(losses[j]) < most]


def _offer(m: Mixture, table: Tensor) -> _Offer:
    """New components, each from one element of a present one and the elements around it."""
    whole, r = table.logsumexp(-1, keepdim=True), table.softmax(-1)
    own = r > _OWN
    top = m.most(torch.where(own, table, -torch.inf))
    far = torch.where(own, r * (top - table), torch.zeros_like(r)).nan_to_num(0.0, 0.0, 0.0)
    rows = tops(m, far, 1).squeeze(0)
    mine = rows >= 0
    p = torch.zeros_like(table)
    p[rows[mine], mine.nonzero().squeeze(-1)] = 1.0
    seeds, beliefs = p, dict(m.evaluator.beliefs)
    for _ in range(2):
        m.hold(p)
        m.sharpen(beliefs)
        m.settle(_SETTLING)
        new = m.table()
        p = torch.maximum(seeds, torch.sigmoid(new - whole))
    return _Offer(new, m.total(softplus(new - whole)))


def _choice(losses: Tensor, gains: Tensor) -> list[tuple[int, int]]:
    """Which component gives way to which new one: the best by estimates with some noise in them."""
    score = gains - _TAKEN_OVER * losses.unsqueeze(-1)
    noise = -torch.empty(score.shape, device="cpu").exponential_().log()
    noisy = torch.where(score > 0, score + _NOISE * noise.to(score), -torch.inf)
    found: list[tuple[int, int]] = []
    for i in noisy.flatten().argsort(descending=True).tolist():
        j, k = divmod(i, len(gains))
        if len(found) == _TRIES or not float(noisy[j, k]) > -math.inf:
            break
        if all(k != other for _, other in found):
            found.append((j, k))
    return found


def _tried(
    mixtures: Sequence[Mixture], m: Mixture, table: Tensor, j: int, new: Tensor | None, best: float
) -> float:
    """The bound after a move and some sweeps; -inf as soon as it is not going to be better."""
    moved = table.clone()
    moved[:, j] = -torch.inf if new is None else new
    try:
        m.hold(moved.softmax(-1))
        m.sharpen(m.evaluator.beliefs)
        m.settle(1 if m.is_exact else _SETTLING)
        m.release()
        outlook = Outlook(m.evaluator.elbo())
        for i in range(_SWEEPS):
            outlook.see(sweeps(mixtures, 1))
            if not outlook.end > best + _GAIN or (i > 0 and outlook.bound > best + _GAIN):
                break
    except CVIError:  # a component that its elements do not determine
        return -math.inf
    return outlook.bound if outlook.bound > best + _GAIN else -math.inf
