"""AutoCVI: the posterior as a Pyro autoguide. It holds the blocks; `CVI` moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_cvi.errors import CVIError, message
from pyro_cvi.graph.initial import initial_beliefs
from pyro_cvi.graph.plan import Block, Plan
from pyro_cvi.graph.prepared import Prepared, prepare
from pyro_cvi.graph.sampling import draw
from pyro_cvi.linalg import broadcast_shapes
from pyro_cvi.updates import Belief, FamilyBelief, GaussianBelief

__all__ = ["AutoCVI"]


class AutoCVI(AutoGuide):
    """q(z) = prod_blocks q_b(z_b): the posterior that `CVI` fits, as an autoguide.

    Gaussian sites that meet in a factor share one block with full covariance; Gamma, Beta, Dirichlet
    and finite discrete sites have a block each. The guide can be called, used in `Predictive`, asked
    for `median` and `quantiles`, saved and loaded, like Pyro's own autoguides.

    Arguments:
        model: a Pyro model.
        max_dense_dim: largest number of scalars of Gaussian sites that share one dense covariance.
        num_samples: draws for factors that neither algebra nor quadrature can average.
        init_loc_fn: where Gaussian sites start, as in Pyro's autoguides; the prior's mean by default.
        create_plates: as in Pyro's autoguides.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import CVI, AutoCVI
        >>> def model(x):
        ...     p = pyro.sample("p", dist.Beta(10.0, 10.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("x", dist.Bernoulli(p), obs=x)
        >>> guide = AutoCVI(model)
        >>> _ = CVI(model, guide).step(torch.tensor([1.0] * 6 + [0.0] * 4))
        >>> q = guide.posterior("p")
        >>> float(q.concentration1), float(q.concentration0)
        (16.0, 14.0)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        max_dense_dim: int = 1000,
        num_samples: int = 16,
        init_loc_fn: Callable[..., Any] | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(max_dense_dim, int) or max_dense_dim < 1:
            raise CVIError(f"max_dense_dim is {max_dense_dim!r}; expected a positive integer")
        if not isinstance(num_samples, int) or num_samples < 2:
            raise CVIError(f"num_samples is {num_samples!r}; expected an integer of at least 2")
        super().__init__(model, create_plates=create_plates)
        self.max_dense_dim = max_dense_dim
        self.num_samples = num_samples
        self.init_loc_fn = init_loc_fn
        self._prepared: Prepared | None = None
        self._beliefs: dict[str, tuple[Belief, tuple[int, ...]]] = {}

    # --- pickling: Pyro's AutoGuide drops the model of the live object; ours keeps it ---------------

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["master"] = None
        state["_prepared"] = None
        state["prototype_trace"] = None
        state["_beliefs"] = {}
        state["_model"] = (None,)
        state["_plan_kept"] = None
        return state

    # --- state -------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the last model and data this guide was fitted to."""
        return self._need("its plan").plan

    def _need(self, what: str) -> Prepared:
        if self._prepared is None:
            raise CVIError(
                message(
                    "AutoCVI",
                    f"{what} was asked for before the guide has seen data",
                    "one call of CVI.step, CVI.run or the guide first",
                    "cvi.step(*args) before this",
                )
            )
        return self._prepared

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        if self._prepared is None:
            with torch.enable_grad():
                self.prepare(self.model, args, kwargs)

    def prepare(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Prepared:
        """Analyse `model` on its arguments, or find that the last analysis still holds."""
        old = self._prepared
        if old is not None and old.still_holds(model, args, kwargs):
            return old
        new = prepare(model, args, kwargs, self.max_dense_dim, old)
        if old is None:
            self._adopt(new)
        self._prepared = new
        return new

    def _adopt(self, new: Prepared) -> None:
        """First sight of the model: prototype, frames and starting beliefs."""
        self.prototype_trace = new.trace
        self._prototype_frames = {}
        for name in new.plan.latents:
            for frame in new.trace.nodes[name]["cond_indep_stack"]:
                if frame.vectorized:  # latents of a sequential plate are sites of their own
                    self._prototype_frames[frame.name] = frame
        beliefs = initial_beliefs(new.plan, self._located(new))
        for i, block in enumerate(new.plan.blocks):
            for j, t in enumerate(beliefs[block.name].tensors):
                self.register_buffer(f"_block_{i}_{j}", t.clone().contiguous())
        self._names = [b.name for b in new.plan.blocks]

    def _located(self, new: Prepared) -> dict[str, Tensor]:
        if self.init_loc_fn is None:
            return {}
        sites = {n: new.trace.nodes[n] for n in new.plan.latents}
        return {n: self.init_loc_fn(s) for n, s in sites.items() if n in new.plan.latents}

    def _buffers_of(self, block: Block) -> tuple[Tensor, ...]:
        i = self._names.index(block.name)
        n = 2 if block.layout is not None else len(block.family.statistics)
        return tuple(getattr(self, f"_block_{i}_{j}") for j in range(n))

    def belief(self, block: Block) -> Belief:
        """The belief held in the block's buffers, with what was derived from it."""
        tensors = self._buffers_of(block)
        version = tuple(t._version for t in tensors) + tuple(id(t) for t in tensors)
        known = self._beliefs.get(block.name)
        if known is not None and known[1] == version:
            return known[0]
        copies = tuple(t.detach().clone() for t in tensors)
        belief: Belief = (
            GaussianBelief(*copies)
            if block.layout is not None
            else FamilyBelief(block.family, copies)
        )
        self._beliefs[block.name] = (belief, version)
        return belief

    def set_belief(self, block: Block, belief: Belief) -> None:
        """Write a belief into the block's buffers, in place."""
        tensors = self._buffers_of(block)
        with torch.no_grad():
            for buffer, value in zip(tensors, belief.tensors, strict=True):
                buffer.copy_(value)
        version = tuple(t._version for t in tensors) + tuple(id(t) for t in tensors)
        self._beliefs[block.name] = (belief, version)

    def beliefs(self) -> dict[str, Belief]:
        """All blocks' beliefs by name."""
        return {b.name: self.belief(b) for b in self.plan.blocks}

    # --- the posterior -----------------------------------------------------------------------------

    def posterior(self, site: str) -> Any:
        """q(z) of one site, a Pyro distribution in the model's space.

        Batch and event shape are those of the site in the model (`to_event` dims included). A dense
        Gaussian site that is a vector comes with its full covariance; one of higher rank, or one in a
        plate, gives its marginals.
        """
        block = self._block(site)
        latent = self.plan.latents[site]
        belief = self.belief(block)
        if isinstance(belief, GaussianBelief):
            return self._gaussian_posterior(block, belief, site)
        assert isinstance(belief, FamilyBelief)
        if latent.enum_dim is not None:
            return self._discrete_posterior(site, belief)
        d: Any = belief.family.to_distribution(belief.natural)
        extra = latent.event_dim - d.event_dim
        return d.to_event(extra) if extra > 0 else d

    def _discrete_posterior(self, site: str, belief: FamilyBelief) -> Any:
        from pyro_cvi.families import peel

        latent = self.plan.latents[site]
        logits = belief.natural[0]
        core = peel(latent.prior)
        if isinstance(core, torch.distributions.Bernoulli):
            return dist.Bernoulli(logits=logits[..., 1] - logits[..., 0])
        if isinstance(core, torch.distributions.OneHotCategorical):
            return dist.OneHotCategorical(logits=logits)
        return dist.Categorical(logits=logits)

    def _gaussian_posterior(self, block: Block, belief: GaussianBelief, site: str) -> Any:
        latent, layout = self.plan.latents[site], block.layout
        assert layout is not None
        element, position = layout.element[site], layout.position[site]
        loc = belief.loc[element, position].reshape(latent.shape)
        event = math.prod(latent.shape[len(latent.shape) - latent.event_dim :])
        if latent.event_dim >= 1 and event > 1 and self._event_in_element(latent, layout, event):
            rows = element.reshape(-1, event)[:, 0]
            places = position.reshape(-1, event)
            cov = belief.cov[rows[:, None, None], places[:, :, None], places[:, None, :]]
            if latent.event_dim == 1:
                return dist.MultivariateNormal(
                    loc, covariance_matrix=cov.reshape(*latent.shape, event)
                )
        scale = belief.cov[element, position, position].sqrt().reshape(latent.shape)
        d = dist.Normal(loc, scale)
        return d.to_event(latent.event_dim) if latent.event_dim else d

    @staticmethod
    def _event_in_element(latent: Any, layout: Any, event: int) -> bool:
        element = layout.element[latent.name].reshape(-1, event)
        return bool((element == element[:, :1]).all()) and layout.width > 1

    def joint(self, sites: Sequence[str]) -> Any:
        """The joint Gaussian of sites of one dense block, flattened and concatenated in this order."""
        blocks = {self._block(s).name for s in sites}
        block = self._block(sites[0])
        if len(blocks) != 1 or block.layout is None or block.layout.count != 1:
            kinds = {s: self._block(s).structure for s in sites}
            raise CVIError(
                message(
                    f"joint({list(sites)!r})",
                    f"these sites have the structures {kinds} in {len(blocks)} blocks",
                    "sites of one dense Gaussian block",
                    "ask for each site's own marginal with posterior(name); explain() lists the blocks",
                )
            )
        belief = self.belief(block)
        assert isinstance(belief, GaussianBelief)
        index = torch.cat([block.layout.position[s] for s in sites])
        return dist.MultivariateNormal(
            belief.loc[0, index], covariance_matrix=belief.cov[0][index[:, None], index]
        )

    def _block(self, site: str) -> Block:
        plan = self._need(f"the posterior of '{site}'").plan
        if site not in plan.latents:
            raise CVIError(
                message(
                    f"site '{site}'",
                    "no such latent",
                    f"one of {sorted(plan.latents)}",
                    "check the name in the model's pyro.sample statements",
                )
            )
        return plan.block_of(site)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The marginal median of every latent (the most probable value of a discrete one)."""
        self._need("median")
        return {n: self._quantile(n, torch.tensor(0.5)) for n in self.plan.latents}

    def quantiles(self, quantiles: Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles of every latent, with a leading quantile dim."""
        self._need("quantiles")
        return {
            n: torch.stack([self._quantile(n, torch.tensor(float(q))) for q in quantiles])
            for n in self.plan.latents
        }

    def _quantile(self, site: str, q: Tensor) -> Tensor:
        latent, block = self.plan.latents[site], self._block(site)
        belief = self.belief(block)
        if isinstance(belief, GaussianBelief):
            assert block.layout is not None
            at = (block.layout.element[site], block.layout.position[site])
            scale = belief.cov[(*at, at[1])].sqrt()
            value = dist.Normal(belief.loc[at], scale).icdf(q.to(belief.loc))
            return value.reshape(latent.shape)
        assert isinstance(belief, FamilyBelief)
        if latent.enum_dim is not None:
            assert latent.support is not None
            cumulative = belief.mean[0].cumsum(-1)
            index = (
                (cumulative < q.to(cumulative) - 1e-12).sum(-1).clamp(max=len(latent.support) - 1)
            )
            return latent.support[index]
        from pyro_cvi.families.quantiles import quantile

        return quantile(belief.family, belief.natural, q)

    # --- sampling ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent, inside its plates; called through `guide(...)`."""
        if self._prepared is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        plan = self.plan
        result: dict[str, Tensor] = {}
        for block in plan.blocks:
            belief = self.belief(block)
            if isinstance(belief, GaussianBelief):
                result.update(self._sample_gaussian(block, belief, plates))
            else:
                result.update(self._sample_family(block, plates))
        return {n: result[n] for n in plan.latents}

    def _in_plates(self, site: str, plates: dict[str, Any], fn: Any) -> Tensor:
        from contextlib import ExitStack

        with ExitStack() as stack:
            for name, *_ in self.plan.latents[site].plates:
                stack.enter_context(plates[name])
            value: Tensor = pyro.sample(site, fn)
        return value

    def _sample_family(self, block: Block, plates: dict[str, Any]) -> dict[str, Tensor]:
        (site,) = block.sites
        return {site: self._in_plates(site, plates, self.posterior(site))}

    def _sample_gaussian(
        self, block: Block, belief: GaussianBelief, plates: dict[str, Any]
    ) -> dict[str, Tensor]:
        layout = block.layout
        assert layout is not None
        joint = dist.MultivariateNormal(belief.loc, scale_tril=belief.scale_tril).to_event(1)
        name = f"_{type(self).__name__}_{block.name}"
        z = pyro.sample(name, joint, infer={"is_auxiliary": True})
        lead = z.shape[:-2]
        result = {}
        for site in block.sites:
            latent = self.plan.latents[site]
            flat = z[..., layout.element[site], layout.position[site]]
            shape = broadcast_shapes(latent.shape, (*lead, *([1] * latent.event_dim)))
            value = flat.reshape(shape)
            if poutine.get_mask() is False:
                log_density: Any = 0.0
            else:
                log_density = value.new_zeros(value.shape[: value.ndim - latent.event_dim])
            fn = dist.Delta(value, log_density=log_density, event_dim=latent.event_dim)
            result[site] = self._in_plates(site, plates, fn)
        return result

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """One draw of all Gaussian blocks, flattened."""
        parts = [
            draw(b, self.belief(b)).reshape(-1) for b in self.plan.blocks if b.layout is not None
        ]
        return torch.cat(parts) if parts else torch.zeros(0)
