"""q(x | theta) for every theta, from fits at some: what a draw of the hyperparameters takes along.

    Gaussian blocks      z | theta  =  sum_k a_k(theta) (m_k + L_k e),    e ~ N(0, I) the same for all k
    other families       natural(theta)  =  sum_k a_k(theta) natural_k

with a_k of `Between`: mean and Cholesky factor are interpolated. A linear combination of factors keeps
what they have in common: a combination of the scalars that the data fix at every point is fixed between
them too. A draw of theta with z from the fit at a point near it is no draw of f(theta, z) where z turns
with theta: a whitened process was twice to four times too wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_cvi.graph.plan import Block
from pyro_cvi.graph.sampling import scatter
from pyro_cvi.graph.symbolic import Latent
from pyro_cvi.guide import AutoCVI
from pyro_cvi.interpolation import Between
from pyro_cvi.laws import draw_chain, marginal
from pyro_cvi.structured import StructuredBelief
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["Conditional"]

_NEGLIGIBLE = 1e-6
"""Points with a smaller |a_k| are left out of a draw."""


class Conditional:
    """The law of all other sites given the hyperparameters.

    Arguments:
        fits: at the points of `between`, in this order.
        between: how to go between them.
    """

    def __init__(self, fits: Sequence[AutoCVI], between: Between) -> None:
        self._fits, self._between = list(fits), between
        self._marginals: dict[str, tuple[Tensor, Tensor]] = {}

    def draw(self, at: Tensor) -> dict[str, Tensor]:
        """One draw of every site for each of the points (n, d), `(n, *site shape)`."""
        result: dict[str, Tensor] = {}
        a, plan = self._between(at), self._fits[0].plan.whole
        for block in plan.blocks:
            latents = {s: plan.latents[s] for s in block.sites}
            beliefs = [f.belief(f.plan.whole.block_of(block.sites[0])) for f in self._fits]
            own = a.to(dtype=beliefs[0].tensors[0].dtype, device=beliefs[0].tensors[0].device)
            if block.layout is None:
                result |= _family_draw(block, latents, beliefs, own)
                continue
            if isinstance(beliefs[0], StructuredBelief):
                z = self._structured_draw(block.name, beliefs, own, self._between.nearest(at))
            else:
                z = _gaussian_draw(beliefs, own)
            for site, u in scatter(block, z).items():
                result[site] = latents[site].constrained(u.to(latents[site].value.dtype))
        return result

    def _structured_draw(
        self, name: str, beliefs: Sequence[Belief], a: Tensor, nearest: Tensor
    ) -> Tensor:
        """z = m + s (z_k - m_k) / s_k, (n, 1, D): factors of these are not formed.

        Means and standard deviations m, s are interpolated; only correlations are the nearest fit's.
        """
        known = _structured(beliefs)
        if name not in self._marginals:
            means, variances = (
                torch.stack(x) for x in zip(*[b.marginals() for b in known], strict=True)
            )
            tiny = torch.finfo(variances.dtype).tiny
            self._marginals[name] = means, 0.5 * variances.clamp(min=tiny).log()
        means, logs = self._marginals[name]
        change = torch.stack([known[k].draw() - means[k] for k in nearest.tolist()])
        near = nearest.to(logs.device)
        return (a @ means + (a @ logs - logs[near]).exp() * change).unsqueeze(-2)


def _structured(beliefs: Sequence[Belief]) -> list[StructuredBelief]:
    return [b for b in beliefs if isinstance(b, StructuredBelief)]


def _gaussian_draw(beliefs: Sequence[Belief], a: Tensor) -> Tensor:
    """Of dense blocks, (n, B, d)."""
    noise = torch.randn(len(a), *beliefs[0].tensors[0].shape, dtype=a.dtype, device=a.device)
    result = torch.zeros_like(noise)
    for belief, share in zip(beliefs, a.unbind(1), strict=True):
        assert isinstance(belief, GaussianBelief)
        rows = (share.abs() > _NEGLIGIBLE).nonzero().squeeze(1)
        if len(rows):
            z = belief.loc + torch.einsum("bij,nbj->nbi", belief.scale_tril, noise[rows])
            result.index_add_(0, rows, share[rows, None, None] * z)
    return result


def _family_draw(
    block: Block, latents: Mapping[str, Latent], beliefs: Sequence[Belief], a: Tensor
) -> dict[str, Tensor]:
    """Of a block of another family; by the nearest fit where what lies between is improper."""
    family = block.family
    stacks = [torch.stack(n) for n in zip(*[b.tensors for b in beliefs], strict=True)]
    natural = tuple(
        _combined(a, x, by_logarithm=dims == 0 and not block.is_discrete)
        for x, dims in zip(stacks, family.event_dims, strict=True)
    )
    largest = tuple(x[a.argmax(1)] for x in stacks)
    belief = FamilyBelief(family, family.keep_proper(natural, largest))
    if block.is_chain:
        return draw_chain(latents, block, belief, lambda site, law: law.sample())
    (site,) = block.sites
    law: Any = marginal(latents[site], block, belief)
    return {site: law.sample()}


def _combined(a: Tensor, x: Tensor, *, by_logarithm: bool) -> Tensor:
    """sum_k a_k x_k, (n, K) and (K, *) to (n, *); of log |x_k| where the sign is one, as of rates."""
    result = torch.tensordot(a, x, dims=1)
    if not by_logarithm:
        return result
    sign = x.sign()
    kept = (sign == sign[:1]).all(0) & (sign[0] != 0)
    logs = torch.where(kept, x.abs(), torch.ones_like(x)).log()
    return torch.where(kept, sign[0] * torch.tensordot(a, logs, dims=1).exp(), result)
