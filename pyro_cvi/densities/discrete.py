"""Rules of discrete distributions; the value is data, or an enumerated latent."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.algebra.functions import clamp_link
from pyro_cvi.algebra.latent import LatentTensor, expression_of, plain
from pyro_cvi.densities.registry import density, is_probs, log_density, unexpanded, x_log_y
from pyro_cvi.linalg import broadcast_shapes

softplus = torch.nn.functional.softplus
logsigmoid = torch.nn.functional.logsigmoid


def _guarded(probs: Tensor) -> Tensor:
    """Probabilities kept off 0 and 1 as torch does, where they come through a link."""
    value = plain(probs)
    eps = torch.finfo(value.dtype).eps
    if not isinstance(probs, LatentTensor):
        return probs.clamp(eps, 1 - eps)
    e = clamp_link(expression_of(probs), eps, 1 - eps)
    return LatentTensor.make(value.clamp(eps, 1 - eps), e)


@density(torch.distributions.Bernoulli)
def bernoulli(d: Any, x: Tensor) -> Tensor:
    """x log p + (1 - x) log(1 - p), or x f - log(1 + e^f) in logits f."""
    if is_probs(d):
        p = _guarded(d.probs)
        return x * p.log() + (1 - x) * torch.log1p(-p)
    return x * d.logits - softplus(d.logits)


def _log_choose(n: Tensor, x: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(x + 1) - torch.lgamma(n - x + 1)


@density(torch.distributions.Binomial)
def binomial(d: Any, x: Tensor) -> Tensor:
    """log C(n, x) + x log p + (n - x) log(1 - p)."""
    n = d.total_count
    if is_probs(d):
        p = _guarded(d.probs)
        return _log_choose(n, x) + x * p.log() + (n - x) * torch.log1p(-p)
    return _log_choose(n, x) + x * d.logits - n * softplus(d.logits)


@density(torch.distributions.Geometric)
def geometric(d: Any, x: Tensor) -> Tensor:
    """log p + x log(1 - p)."""
    if "probs" in d.__dict__:
        p = _guarded(d.probs)
        return p.log() + x * torch.log1p(-p)
    return logsigmoid(d.logits) + x * logsigmoid(-d.logits)


@density(torch.distributions.NegativeBinomial)
def negative_binomial(d: Any, x: Tensor) -> Tensor:
    """log C(x + r - 1, x) + r log(1 - p) + x log p."""
    r = d.total_count
    log_choose = torch.lgamma(x + r) - torch.lgamma(x + 1.0) - torch.lgamma(r)
    if is_probs(d):
        p = _guarded(d.probs)
        return log_choose + r * torch.log1p(-p) + x * p.log()
    return log_choose + r * logsigmoid(-d.logits) + x * logsigmoid(d.logits)


def _log_probs(d: Any) -> Tensor:
    """log of normalised probabilities over the last axis."""
    if is_probs(d):
        p = unexpanded(d.probs)
        return p.log() if isinstance(p, LatentTensor) else _guarded(p).log()
    return unexpanded(d.logits)


@density(torch.distributions.Categorical)
def categorical(d: Any, x: Tensor) -> Tensor:
    """log p_x."""
    log_p = _log_probs(d)
    states = _along_dim(x, plain(log_p).shape[-1])
    if states is not None:
        moved = _states_at(log_p, states)
        if moved is not None:
            return moved
    x = x.long()
    shape = broadcast_shapes(x.shape, plain(log_p).shape[:-1])
    index = x.expand(shape).unsqueeze(-1)
    wide = log_p.expand(*shape, plain(log_p).shape[-1])
    return torch.take_along_dim(wide, index, -1).squeeze(-1)


@density(torch.distributions.MixtureSameFamily)
def mixture_same_family(d: Any, x: Tensor) -> Tensor:
    """log sum_k w_k p_k(x)."""
    event = len(d.event_shape)
    at = x.unsqueeze(-1 - event) if event else x.unsqueeze(-1)
    log_p = log_density(d.component_distribution, at) + _log_probs(d.mixture_distribution)
    return torch.logsumexp(log_p, -1)


def _along_dim(x: Tensor, k: int) -> int | None:
    """The dim, counted from the right, along which x is 0, 1, ... k - 1; None if it is anything else."""
    if isinstance(x, LatentTensor) or k < 2 or x.numel() != k or k not in x.shape:
        return None
    every = torch.arange(k, device=x.device, dtype=x.dtype)
    return x.ndim - 1 - x.shape.index(k) if torch.equal(x.reshape(-1), every) else None


def _states_at(log_p: Tensor, dim: int) -> Tensor | None:
    """log_p at every state, these along the batch dim `dim` from the right: no gather is needed."""
    *batch, k = plain(log_p).shape
    if len(batch) <= dim:
        return log_p.reshape(*[1] * (dim - len(batch)), *batch, k).movedim(-1, 0)
    at = len(batch) - 1 - dim
    return log_p.squeeze(at).movedim(-1, at) if batch[at] == 1 else None


@density(dist.OrderedLogistic)
def ordered_logistic(d: Any, x: Tensor) -> Tensor:
    """log(sigma(c_k - f) - sigma(c_(k-1) - f)), with c_(-1) = -inf and c_last = inf.

    = log sigma(c_k - f) + log sigma(f - c_(k-1)) + log(1 - exp(c_(k-1) - c_k)), with f in two sigmoids.
    """
    f, cuts = d.predictor, d.cutpoints
    last = plain(cuts).shape[-1]
    shape = broadcast_shapes(x.shape, plain(f).shape)
    state = x.long().expand(shape)
    wide = cuts.expand(*shape, last)

    def at(index: Tensor) -> Tensor:
        where = index.clamp(0, last - 1).unsqueeze(-1)
        return torch.take_along_dim(wide, where, -1).squeeze(-1)

    upper, lower = at(state), at(state - 1)
    top, bottom = state == last, state == 0
    zero = torch.zeros((), dtype=plain(f).dtype, device=plain(f).device)
    gap = torch.where(top | bottom, zero - 1.0, lower - upper)
    between = torch.where(top | bottom, zero, torch.log(-torch.expm1(gap)))
    below = torch.where(top, zero, logsigmoid(upper - f))
    return below + torch.where(bottom, zero, logsigmoid(f - lower)) + between


@density(dist.ZeroInflatedDistribution)
def zero_inflated(d: Any, x: Tensor) -> Tensor:
    """log(g + (1 - g) p(0)) at zero, log(1 - g) + log p(x) elsewhere."""
    if "gate" in d.__dict__:
        gate = _guarded(d.gate)
        log_gate, log_rest = gate.log(), torch.log1p(-gate)
    else:
        log_gate, log_rest = logsigmoid(d.gate_logits), logsigmoid(-d.gate_logits)
    value: Tensor = log_rest + log_density(d.base_dist, x)
    return torch.where(x == 0, torch.logaddexp(log_gate, value), value)


@density(torch.distributions.OneHotCategorical)
def one_hot_categorical(d: Any, x: Tensor) -> Tensor:
    """sum_k x_k log p_k."""
    return (x * _log_probs(d._categorical)).sum(-1)


@density(torch.distributions.Multinomial)
def multinomial(d: Any, x: Tensor) -> Tensor:
    """log n! - sum_k log x_k! + sum_k x_k log p_k."""
    constant = torch.lgamma(x.sum(-1) + 1) - torch.lgamma(x + 1).sum(-1)
    return constant + (x * _log_probs(d._categorical)).sum(-1)


@density(torch.distributions.Poisson)
def poisson(d: Any, x: Tensor) -> Tensor:
    """x log b - b - log x!."""
    return x_log_y(x, d.rate) - d.rate - torch.lgamma(x + 1)
