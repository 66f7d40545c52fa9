"""Markov chain over K states, q(x) = exp(sum_t u_t[x_t] + sum_t w_t[x_t, x_t+1] - A), for T steps.

T(x) holds the indicators of every state and of every pair of neighbours; natural = (u, w), of shapes
(*batch, T, K) and (*batch, T - 1, K, K). A and its gradient, the marginals of states and pairs, come
from one pass forward and one backward, O(T K^2). The coordinates are over-complete, as those of
`Categorical`, which is the case T = 1.

Reference: L. R. Rabiner (1989), A tutorial on hidden Markov models, section V.A (scaling).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_cvi.families.categorical import CATEGORICAL
from pyro_cvi.families.family import AbstractFamily, Mean, Natural
from pyro_cvi.linalg import matvec, without_repeats

__all__ = ["MARKOV_CHAIN", "MarkovChain"]


class _Passes(NamedTuple):
    """alpha_t ~ p(u_1 ... u_t, x_t) and gamma_t ~ p(u_t ... u_T | x_t), each (*batch, T, K), and A.

    On the scale of probabilities each alpha_t and gamma_t adds up to one. For t < T, `pair` is exp w_t
    up to a constant, of size one along axes that share it; `from_right` is pair @ gamma_t+1, and
    `overlap` is alpha_t @ from_right.
    """

    alpha: Tensor
    gamma: Tensor
    log_partition: Tensor
    pair: Tensor
    from_right: Tensor
    overlap: Tensor


def _means(passes: _Passes) -> Mean:
    last = passes.alpha[..., -1:, :]
    here = passes.alpha[..., :-1, :] / passes.overlap.unsqueeze(-1)
    state = torch.cat([here * passes.from_right, last], -2)
    pair = (here.unsqueeze(-1) * passes.gamma[..., 1:, None, :]).mul_(passes.pair)
    return state, pair


def _entropy(passes: _Passes, mean: Mean) -> Tensor:
    """H(x_1) - sum_t E log p(x_t+1 | x_t), p(b | a) = exp(w_ab) gamma_b / from_right_a.

    Its summands do not depend on how large the potentials of the states are.
    """
    state, pair = mean
    first = torch.special.entr(state[..., 0, :]).sum(-1)
    moves = passes.pair
    both = pair.sum(-3, keepdim=True) if moves.shape[-3] == 1 else pair
    inside = torch.special.xlogy(both, moves).sum((-1, -2, -3))
    inside = inside + torch.special.xlogy(state[..., 1:, :], passes.gamma[..., 1:, :]).sum((-1, -2))
    inside = inside - torch.special.xlogy(state[..., :-1, :], passes.from_right).sum((-1, -2))
    return first - inside


class _LogPasses(NamedTuple):
    """The same on the log scale, each up to a constant."""

    alpha: Tensor
    gamma: Tensor
    log_partition: Tensor


class MarkovChain(AbstractFamily):
    """q(x_1 ... x_T), the posterior of a discrete chain."""

    name = "MarkovChain"
    statistics = ("indicator", "pair")
    event_dims = (2, 3)
    event_dim = 1

    def sufficient_statistics(self, x: Tensor, *, categories: int | None = None) -> Mean:
        """One-hot states and pairs of integer labels (*batch, T)."""
        if categories is None:
            raise ValueError("MarkovChain.sufficient_statistics: pass categories=K")
        hot = torch.nn.functional.one_hot(x, categories).to(torch.get_default_dtype())
        return hot, hot[..., :-1, :, None] * hot[..., 1:, None, :]

    def log_partition(self, natural: Natural) -> Tensor:
        """A, by the forward pass."""
        return (_passes(natural) or _log_passes(natural)).log_partition

    def to_mean(self, natural: Natural) -> Mean:
        """Marginals of states and of pairs of neighbours, by forward-backward."""
        passes = _passes(natural)
        if passes is None:
            return _means_of_logs(natural, _log_passes(natural))
        return _means(passes)

    def mean_and_entropy(self, natural: Natural) -> tuple[Mean, Tensor | None]:
        """Both from the same passes."""
        passes = _passes(natural)
        if passes is None:
            return _means_of_logs(natural, _log_passes(natural)), None
        mean = _means(passes)
        return mean, _entropy(passes, mean)

    def to_natural(self, mean: Mean) -> Natural:
        """u_1 = log p(x_1), w_t = log p(x_t+1 | x_t), all other u zero; then A = 0."""
        state, pair = mean
        first = state[..., :1, :].log()
        unary = torch.cat([first, torch.zeros_like(state[..., 1:, :])], -2)
        here = pair.sum(-1, keepdim=True)
        return unary, pair.log() - here.log()

    def transitions(self, natural: Natural) -> Tensor:
        """p(x_t+1 = b | x_t = a), shape (*batch, T - 1, K, K): for drawing states in order."""
        passes = _passes(natural)
        right = _log_passes(natural).gamma if passes is None else passes.gamma.log()
        logits: Tensor = natural[1] + right[..., 1:, None, :]
        return logits.softmax(-1)

    def to_distribution(self, natural: Natural) -> Any:
        """There is no torch distribution of chains; `transitions` serves to draw one."""
        raise NotImplementedError("MarkovChain.to_distribution: use to_mean and transitions")

    def natural_of_core(self, core: Any) -> Natural:
        """No prior class stands for a whole chain."""
        raise NotImplementedError("MarkovChain.natural_of_core: a chain is made of several sites")

    def fisher_solve(self, natural: Natural, gradient: Natural) -> Natural:
        """dL/dmean = J^T dL/dnatural, J the Jacobian of `to_natural` at the mean."""
        mean = tuple(m.detach().requires_grad_() for m in self.to_mean(natural))
        with torch.enable_grad():
            again = self.to_natural(mean)
        return tuple(torch.autograd.grad(again, mean, gradient))

    def is_proper(self, natural: Natural) -> Tensor:
        """All potentials finite."""
        unary, pair = natural
        return (unary.sum((-1, -2)) + pair.sum((-1, -2, -3))).isfinite()

    def max_step(self, natural: Natural, direction: Natural) -> Tensor:
        """Infinite."""
        return torch.full_like((natural[0] + direction[0])[..., 0, 0], torch.inf)

    def entropy(self, natural: Natural) -> Tensor:
        """H(x_1) + sum_t H(x_t+1 | x_t), from the marginals: nothing cancels."""
        return self.entropy_of_mean(self.to_mean(natural))

    def entropy_of_mean(self, mean: Mean) -> Tensor:
        """`entropy`, without another pass."""
        state, pair = mean
        total: Tensor = torch.special.entr(state[..., 0, :]).sum(-1)
        here = pair.sum(-1)
        return (
            total
            + torch.special.entr(pair).sum((-1, -2, -3))
            - torch.special.entr(here).sum((-1, -2))
        )

    def kl(self, p: Natural, q: Natural) -> Tensor:
        """KL of the first state and of every transition, weighted by its origin."""
        state, _ = self.to_mean(p)
        left, right = self.transitions(p), self.transitions(q)
        tiny = torch.finfo(left.dtype).tiny
        first = CATEGORICAL.kl(
            (state[..., 0, :].clamp(min=tiny).log(),),
            (self.to_mean(q)[0][..., 0, :].clamp(min=tiny).log(),),
        )
        moves = (left * (left.clamp(min=tiny).log() - right.clamp(min=tiny).log())).sum(-1)
        return first + (state[..., :-1, :] * moves).sum((-1, -2))


def _passes(natural: Natural) -> _Passes | None:
    """Both passes with scaling; None where numbers that count may have underflowed.

    What underflows before alpha_t is divided by its total is less than K tiny / total_t of it, and
    counts for less than K tiny / (total_t overlap_t) of all paths; likewise from the right.
    """
    unary, pair = natural
    *batch, steps, k = unary.shape
    pair = without_repeats(pair, pair.ndim - 2)
    top, wide = unary.amax(-1, keepdim=True), pair.amax((-1, -2), keepdim=True)
    states, moves = (unary - top).exp(), (pair - wide).exp()
    rows = math.prod(batch)
    phi = states.reshape(rows, steps, k).unbind(1)
    psi = _by_step(moves, tuple(batch), steps)
    forward, totals = _one_way(phi, psi)
    backward, totals_back = _one_way(phi[::-1], [p.mT for p in reversed(psi)])
    scale, scale_back = (
        torch.stack(x, -1).reshape(*batch, steps) for x in (totals, totals_back[::-1])
    )
    alpha, gamma = (torch.stack(x, -2).reshape(*batch, steps, k) for x in (forward, backward[::-1]))
    ahead = gamma[..., 1:, :]
    shared = math.prod(moves.shape[:-2]) == 1
    from_right = ahead @ moves.reshape(k, k).mT if shared else matvec(moves, ahead)
    overlap = (alpha[..., :-1, :] * from_right).sum(-1)
    info = torch.finfo(unary.dtype)
    smallest = overlap * torch.minimum(scale[..., :-1], scale_back[..., 1:])
    if not bool((smallest > k * info.tiny / info.eps).all()):
        return None
    shift = wide.squeeze((-1, -2)).expand(*batch, steps - 1).sum(-1)
    log_partition = top.sum((-1, -2)) + shift + scale.log().sum(-1)
    return _Passes(alpha, gamma, log_partition, moves, from_right, overlap)


def _by_step(moves: Tensor, batch: tuple[int, ...], steps: int) -> list[Tensor]:
    """exp w_t for every t: (K, K) where all chains share it, else (rows, K, K)."""
    k = moves.shape[-1]
    if all(n == 1 for n in moves.shape[:-3]):
        each = moves.reshape(-1, k, k).unbind(0)
    else:
        whole = moves.expand(*batch, moves.shape[-3], k, k)
        each = whole.reshape(math.prod(batch), -1, k, k).unbind(1)
    return list(each) * (steps - 1) if len(each) == 1 else list(each)


def _one_way(phi: Sequence[Tensor], psi: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """x_t = (x_t-1 @ psi_t-1) * phi_t, divided by its total; and the totals."""
    totals = [phi[0].sum(-1)]
    result = [phi[0] / totals[0].unsqueeze(-1)]
    for p, f in zip(psi, phi[1:], strict=True):
        last = result[-1]
        new = last @ p if p.ndim == 2 else torch.bmm(last.unsqueeze(1), p).squeeze(1)
        new = new.mul_(f)
        total = new.sum(-1)
        totals.append(total)
        result.append(new / total.unsqueeze(-1))
    return result, totals


def _log_passes(natural: Natural) -> _LogPasses:
    """The same on the log scale: slower, without underflow."""
    unary, pair = _finite(natural)
    states, moves = unary.unbind(-2), pair.unbind(-3)
    alpha, gamma = [states[0]], [states[-1]]
    for w, u in zip(moves, states[1:], strict=True):
        alpha.append((alpha[-1].unsqueeze(-1) + w).logsumexp(-2) + u)
    for w, u in zip(reversed(moves), reversed(states[:-1]), strict=True):
        gamma.append((w + gamma[-1].unsqueeze(-2)).logsumexp(-1) + u)
    gamma.reverse()
    return _LogPasses(torch.stack(alpha, -2), torch.stack(gamma, -2), alpha[-1].logsumexp(-1))


def _means_of_logs(natural: Natural, passes: _LogPasses) -> Mean:
    unary, pair = _finite(natural)
    state = (passes.alpha + passes.gamma - unary).softmax(-1)
    both = passes.alpha[..., :-1, :, None] + pair + passes.gamma[..., 1:, None, :]
    return state, both.flatten(-2).softmax(-1).reshape(both.shape)


def _finite(natural: Natural) -> Natural:
    return tuple(n.clamp(min=torch.finfo(n.dtype).min / 1e6) for n in natural)


MARKOV_CHAIN = MarkovChain()
