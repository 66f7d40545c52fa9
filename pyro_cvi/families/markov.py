"""Markov chain over K states, q(x) = exp(sum_t u_t[x_t] + sum_t w_t[x_t, x_t+1] - A), for T steps.

T(x) holds the indicators of every state and of every pair of neighbours; natural = (u, w), of shapes
(*batch, T, K) and (*batch, T - 1, K, K). A and its gradient, the marginals of states and pairs, come
from one pass forward and one backward, O(T K^2). The coordinates are over-complete, as those of
`Categorical`, which is the case T = 1.

Reference: L. R. Rabiner (1989), A tutorial on hidden Markov models, section V.A (scaling).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_cvi.families.categorical import CATEGORICAL
from pyro_cvi.families.family import AbstractFamily, Mean, Natural

__all__ = ["MARKOV_CHAIN", "MarkovChain"]


class _Passes(NamedTuple):
    """Lists over t: filtered states, messages from the right, log normalisers, scaled factors."""

    filtered: list[Tensor]
    future: list[Tensor]
    log_scale: Tensor


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
        return _passes(natural, backward=False).log_scale

    def to_mean(self, natural: Natural) -> Mean:
        """Marginals of states and of pairs of neighbours, by forward-backward."""
        passes = _passes(natural, backward=True)
        alpha, beta = torch.stack(passes.filtered, -2), torch.stack(passes.future, -2)
        state = (alpha + beta).softmax(-1)
        if natural[0].shape[-2] == 1:
            return state, torch.zeros_like(natural[1])
        right = natural[0][..., 1:, :] + beta[..., 1:, :]
        pair = alpha[..., :-1, :, None] + natural[1] + right[..., None, :]
        return state, pair.flatten(-2).softmax(-1).reshape(pair.shape)

    def to_natural(self, mean: Mean) -> Natural:
        """u_1 = log p(x_1), w_t = log p(x_t+1 | x_t), all other u zero; then A = 0."""
        state, pair = mean
        first = state[..., :1, :].log()
        unary = torch.cat([first, torch.zeros_like(state[..., 1:, :])], -2)
        here = pair.sum(-1, keepdim=True)
        return unary, pair.log() - here.log()

    def transitions(self, natural: Natural) -> Tensor:
        """p(x_t+1 = b | x_t = a), shape (*batch, T - 1, K, K): for drawing states in order."""
        beta = torch.stack(_passes(natural, backward=True).future, -2)
        right = natural[0][..., 1:, :] + beta[..., 1:, :]
        logits: Tensor = natural[1] + right[..., None, :]
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


def _passes(natural: Natural, *, backward: bool) -> _Passes:
    """log alpha_t and log beta_t (each up to a constant), and A."""
    unary, pair = natural
    top, wide = unary.amax(-1, keepdim=True), pair.amax((-1, -2), keepdim=True)
    phi = (unary - top).exp().unbind(-2)
    psi = (pair - wide).exp().unbind(-3)
    constant = top.sum((-1, -2)) + wide.sum((-1, -2, -3))
    alpha, scales = [phi[0] / phi[0].sum(-1, keepdim=True)], [phi[0].sum(-1)]
    for p, f in zip(psi, phi[1:], strict=True):
        new = (alpha[-1].unsqueeze(-2) @ p).squeeze(-2) * f
        total = new.sum(-1, keepdim=True)
        alpha.append(new / total)
        scales.append(total.squeeze(-1))
    scale = torch.stack(scales, -1)
    tiny = torch.finfo(unary.dtype).tiny
    if not bool((scale > tiny).all()):  # states that exclude each other to rounding
        return _log_passes(natural, backward)
    beta = [torch.ones_like(phi[-1])]
    if backward:
        for p, f in zip(reversed(psi), reversed(phi[1:]), strict=True):
            new = (p @ (f * beta[-1]).unsqueeze(-1)).squeeze(-1)
            beta.append(new / new.amax(-1, keepdim=True))
        beta.reverse()
    return _Passes(
        [a.log() for a in alpha], [b.log() for b in beta], constant + scale.log().sum(-1)
    )


def _log_passes(natural: Natural, backward: bool) -> _Passes:
    """The same on the log scale: slower, without underflow."""
    unary, pair = (n.clamp(min=torch.finfo(n.dtype).min / 1e6) for n in natural)
    states, moves = unary.unbind(-2), pair.unbind(-3)
    alpha = [states[0]]
    for w, u in zip(moves, states[1:], strict=True):
        alpha.append((alpha[-1].unsqueeze(-1) + w).logsumexp(-2) + u)
    beta = [torch.zeros_like(states[-1])]
    if backward:
        for w, u in zip(reversed(moves), reversed(states[1:]), strict=True):
            beta.append((w + (u + beta[-1]).unsqueeze(-2)).logsumexp(-1))
        beta.reverse()
    return _Passes(alpha, beta, alpha[-1].logsumexp(-1))


MARKOV_CHAIN = MarkovChain()
