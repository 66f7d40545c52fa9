"""Posterior as prior: the model of the next data, given what a fit has learnt from those before.

    p(z | y_1, y_2)  is proportional to  p(y_2 | z) p(z | y_1)   and   q_1(z) stands for p(z | y_1).

Each site gets its marginal law under q_1 for a prior. What a Gaussian block knows of several scalars
together is added as one factor, -1/2 v^T (P - D) v with v the scalars less their means, P their
precision and D that of the marginal laws: the product of all is q_1.

Source: T. Broderick et al. (2013), Streaming variational Bayes, arXiv 1307.6769.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_cvi.errors import CVIError, check_names
from pyro_cvi.graph.plan import Block
from pyro_cvi.guide import AutoCVI
from pyro_cvi.laws import marginal
from pyro_cvi.updates import Belief, GaussianBelief

__all__ = ["posterior_as_prior"]


def posterior_as_prior(
    model: Callable[..., Any], guide: AutoCVI, sites: Sequence[str] | None = None
) -> Callable[..., Any]:
    """The model with the posterior of a fit in the place of its prior.

    The posterior is that of the moment of the call. With conjugate messages, fits of one batch of data
    after the other have the posterior of all of them; else as near as the family of q is to it. Scales
    and masks around the sites were about their prior, and do not count again.

    It is a model to be fitted: what sites of a Gaussian block know together is a `pyro.factor`, which
    draws of the model itself do not see. For predictions give `Predictive` a guide.

    Arguments:
        sites: those that the next data share with the last; without it all latents but those in a
            plate that an observed site is in, too (the rows). Other sites keep their prior.

    Raises:
        CVIError: for a site that is not of the fit; for one whose block has no joint law to carry on: a
            chain or process, discrete sites that are neighbours, elements of a minibatch.

    Example:
        >>> import torch, pyro, pyro.distributions as dist
        >>> from pyro_cvi import CVI, AutoCVI, posterior_as_prior
        >>> def model(x):
        ...     rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        ...     with pyro.plate("rows", len(x)):
        ...         pyro.sample("x", dist.Poisson(rate), obs=x)
        >>> for x in torch.tensor([[3.0, 4.0], [5.0, 2.0], [4.0, 6.0]]):
        ...     guide = AutoCVI(model)
        ...     result = CVI(model, guide).run(x)
        ...     model = posterior_as_prior(model, guide)
        >>> guide.posterior("rate")
        Gamma(concentration: 25.0, rate: 7.0)
    """
    plan = guide.plan.whole
    wanted = _shared(guide) if sites is None else list(sites)
    where = f"posterior_as_prior(sites={wanted})"
    check_names(where, wanted, plan.latents, "no latent site", "name sites of the fitted model")
    laws: dict[str, Any] = {}
    joint: list[_Joint] = []
    for block in plan.blocks:
        inside = [s for s in block.sites if s in wanted]
        if not inside:
            continue
        belief = guide.belief(block)
        _check(block, belief, inside)
        for s in inside:
            laws[s] = marginal(plan.latents[s], block, belief)
        if isinstance(belief, GaussianBelief) and belief.loc.shape[-1] > 1:
            joint.append(_Joint.of(guide, block, belief, laws))
    if isinstance(model, _Model):  # its priors have served: the posterior holds what they said
        laws = {**model.laws, **laws}
        joint += [j for j in model.joint if not set(j.sites) & set(wanted)]
        model = model.model
    return _Model(model, laws, tuple(joint))


def _shared(guide: AutoCVI) -> list[str]:
    """The latents in no plate that an observed site is in."""
    prepared = guide.prepared
    assert prepared is not None
    nodes = prepared.trace.nodes.values()
    seen = {
        f.name
        for s in nodes
        if s["type"] == "sample" and s["is_observed"] and not s["infer"].get("_deterministic")
        for f in s["cond_indep_stack"]
    }
    latents = guide.plan.whole.latents
    return [n for n, x in latents.items() if not seen & {p for p, *_ in x.plates}]


def _check(block: Block, belief: Belief, inside: Sequence[str]) -> None:
    if block.placement is not None:
        found = "it is of single elements of a minibatch"
    elif block.form is not None:
        found = f"its posterior is held as a {block.structure}"
    elif block.is_chain or set(inside) != set(block.sites):
        missing = [s for s in block.sites if s not in inside]
        found = f"its posterior is a joint one with {missing or 'its neighbours'}"
    else:
        return
    raise CVIError(
        f"latent site '{inside[0]}'",
        found,
        "dense Gaussian blocks and sites of their own",
        "name the sites to carry on by `sites=`, whole blocks of explain() at a time",
    )


@dataclass(frozen=True, eq=False)
class _Joint:
    """What a Gaussian block adds to the marginal laws of its scalars.

    `index` (elements, width) are places in the sites' scalars, one site after the other.
    """

    name: str
    sites: tuple[str, ...]
    transforms: dict[str, Any]
    index: Tensor
    loc: Tensor
    beyond: Tensor

    @staticmethod
    def of(guide: AutoCVI, block: Block, belief: GaussianBelief, laws: Mapping[str, Any]) -> _Joint:
        layout, latents = block.layout, guide.plan.whole.latents
        assert layout is not None
        index = torch.zeros(layout.count, layout.width, dtype=torch.long, device=belief.loc.device)
        at = 0
        for s in block.sites:
            n = len(layout.element[s])
            own = torch.arange(at, at + n, device=index.device)
            index[layout.element[s], layout.position[s]] = own
            at += n
        variance = belief.cov.diagonal(dim1=-2, dim2=-1)
        known = torch.zeros_like(belief.precision)
        for s in block.sites:
            core = laws[s] if latents[s].transform is None else laws[s].base_dist
            known = known + _known(block, belief, s, core, variance)
        transforms = {s: latents[s].transform for s in block.sites}
        beyond = belief.precision - known
        return _Joint(block.name, block.sites, transforms, index, belief.loc, beyond)

    def add(self, values: dict[str, Tensor]) -> None:
        """The factor, from the values of the sites in the model."""
        flat = []
        for s in self.sites:
            transform = self.transforms[s]
            u = values[s] if transform is None else transform.inv(values[s])
            flat.append(u.reshape(-1))
        z = torch.cat(flat)[self.index] - self.loc
        squares = (z * (self.beyond @ z.unsqueeze(-1)).squeeze(-1)).sum()
        pyro.factor(f"_before_{self.name}", -0.5 * squares)


def _known(block: Block, belief: GaussianBelief, site: str, core: Any, variance: Tensor) -> Tensor:
    """The precision of a site's own Gaussian `core`, in the places of the block."""
    layout = block.layout
    assert layout is not None
    element, position = layout.element[site], layout.position[site]
    found = torch.zeros_like(belief.precision)
    if isinstance(core, torch.distributions.MultivariateNormal):
        n = core.event_shape[-1]
        rows, places = element.reshape(-1, n), position.reshape(-1, n)
        precision = core.precision_matrix.reshape(-1, n, n)
        found[rows[:, :, None], places[:, :, None], places[:, None, :]] = precision
    else:
        found[element, position, position] = 1 / variance[element, position]
    return found


class _Replaced(Messenger):
    """Sites have other priors, and their values are remembered."""

    def __init__(self, laws: dict[str, Any], wanted: frozenset[str]) -> None:
        super().__init__()
        self.laws, self.wanted = laws, wanted
        self.values: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        law = self.laws.get(msg["name"])
        if law is None or msg["is_observed"]:
            return
        old = msg["fn"]
        if law.event_dim != old.event_dim or law.batch_shape != old.batch_shape:
            raise CVIError(
                f"latent site '{msg['name']}'",
                f"batch shape {tuple(old.batch_shape)}, event shape {tuple(old.event_shape)}",
                f"those of the fit, {tuple(law.batch_shape)} and {tuple(law.event_shape)}",
                "leave the site out of `sites=`, if it is about the rows",
            )
        # Its scale and mask were about the prior, and have had their part in the posterior.
        msg["fn"], msg["scale"], msg["mask"] = law, 1.0, None

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.wanted:
            self.values[msg["name"]] = msg["value"]


@dataclass(frozen=True, eq=False)
class _Model:
    """A model whose priors are what an earlier fit has left."""

    model: Callable[..., Any]
    laws: dict[str, Any]
    joint: tuple[_Joint, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = frozenset(s for j in self.joint for s in j.sites)
        with _Replaced(self.laws, wanted) as replaced:
            result = self.model(*args, **kwargs)
        for j in self.joint:
            j.add(replaced.values)
        return result
