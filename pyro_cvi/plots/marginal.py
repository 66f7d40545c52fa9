"""Posterior marginals of single scalars, as densities, bars, intervals or histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_cvi.errors import CVIError
from pyro_cvi.guide import AutoCVI
from pyro_cvi.integrate import IntegratedPosterior
from pyro_cvi.laws import Transformed, scalar_transform
from pyro_cvi.mixture import Mixture
from pyro_cvi.plots.palette import COLOURS, pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["marginals"]

_FEW = 8
"""Most elements of a site that are drawn as curves of their own."""
_MOST = 200
"""Most elements of a site that are drawn at all."""
_DRAWS = 4000
_NODES = 200
_BINS = 24


def marginals(
    guide: AutoCVI | IntegratedPosterior,
    sites: str | Sequence[str] | None = None,
    prior: Mapping[str, Any] | None = None,
    ax: Axes | Sequence[Axes] | None = None,
) -> list[Axes]:
    """The posterior marginal of each scalar of some sites, one panel for each site.

    A density where the law has one, else a histogram of 4000 draws; probabilities of discrete sites as
    bars, stacked where the site has several elements. A site of more than eight scalars is drawn as
    medians with intervals of 90 %. Torch's random state stays what it is.

    Arguments:
        guide: that of a fit, an `AutoCVI` or `IntegratedPosterior`.
        sites: their names; all sites of at most eight scalars, if not given.
        prior: for some sites a distribution, or draws `(num_samples, *site shape)` such as those of
            `Predictive(model, num_samples=1000)(*args)`; drawn in grey behind the posterior.
        ax: axes for one site, or as many as there are sites.

    Returns:
        The axes, one for each site.

    Raises:
        CVIError: an unknown site, one of more than 200 scalars, or another number of axes.
        ImportError: matplotlib is not installed.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import CVI, AutoCVI
        >>> from pyro_cvi.plots import marginals
        >>> def model(x):
        ...     p = pyro.sample("p", dist.Beta(1.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("x", dist.Bernoulli(p), obs=x)
        >>> cvi = CVI(model, AutoCVI(model))
        >>> loss = cvi.step(torch.tensor([1.0, 1.0, 0.0]))
        >>> (panel,) = marginals(cvi.guide, "p", prior={"p": dist.Beta(1.0, 1.0)})
        >>> panel.get_title()
        'p'
    """
    known = _sites_of(guide)
    if sites is None:
        names = [s for s in known if math.prod(_shape(guide.posterior(s))) <= _FEW]
    else:
        names = [sites] if isinstance(sites, str) else list(sites)
    if not names:
        raise CVIError(
            "marginals",
            "no site to draw",
            f"names of latent sites, of {known}",
            f"marginals(guide, sites=[...]); without names, sites of at most {_FEW} scalars",
        )
    laws = {name: guide.posterior(name) for name in names}
    for name, law in laws.items():
        if (size := math.prod(_shape(law))) > _MOST:
            raise CVIError(
                f"marginals, site '{name}'",
                f"{size} scalars",
                f"at most {_MOST}",
                "draw what you need of guide.posterior(name)",
            )
    panels = _panels(len(names), ax)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for panel, (name, law) in zip(panels, laws.items(), strict=True):
            _panel(panel, law, None if prior is None else prior.get(name))
            panel.set_title(name)
    return panels


def _sites_of(guide: AutoCVI | IntegratedPosterior) -> list[str]:
    if isinstance(guide, IntegratedPosterior):
        return guide.sites
    if isinstance(guide, AutoCVI):
        return list(guide.plan.whole.latents)
    raise CVIError(
        "marginals", f"a {type(guide).__name__}", "an AutoCVI or IntegratedPosterior", "cvi.guide"
    )


def _shape(law: Any) -> tuple[int, ...]:
    shape = (*law.batch_shape, *law.event_shape)
    return shape[:-1] if isinstance(law, dist.OneHotCategorical) else shape


def _panels(n: int, ax: Any) -> list[Any]:
    plt = pyplot()
    if ax is None:
        columns = min(n, 3)
        rows = -(-n // columns)
        _, grid = plt.subplots(
            rows, columns, figsize=(3.6 * columns, 2.7 * rows), layout="constrained", squeeze=False
        )
        flat = list(grid.reshape(-1))
        for unused in flat[n:]:
            unused.set_visible(False)
        return flat[:n]
    given = [ax] if hasattr(ax, "plot") else [a for a in getattr(ax, "flat", ax)]
    if len(given) != n:
        raise CVIError(f"marginals: {len(given)} axes for {n} sites; expected one for each")
    return given


def _panel(ax: Any, law: Any, prior: Any) -> None:
    probabilities = _probabilities(law)
    if probabilities is not None:
        values, p = probabilities
        _bars(ax, values, p, prior)
        return
    size = math.prod(_shape(law))
    names = [str(list(place)) for place in product(*map(range, _shape(law)))]
    draws = law.sample((_DRAWS,)).reshape(_DRAWS, -1).double().cpu()
    if size > _FEW:
        _intervals(ax, draws)
        return
    grid = _grid(draws)
    density = _density(law, grid)
    if prior is not None:
        _behind(ax, prior, grid)
    for k in range(size):
        colour, label = COLOURS[k], names[k] if size > 1 else "posterior"
        if density is None:
            ax.hist(
                draws[:, k].numpy(), bins=60, density=True, histtype="step", color=colour, label=label
            )  # fmt: skip
        else:
            dashes = "-" if k % 2 == 0 else (0, (4, 1.5))  # curves that coincide are both seen
            ax.plot(
                grid[:, k].numpy(), density[:, k].numpy(), color=colour, linestyle=dashes, label=label
            )  # fmt: skip
    ax.set_ylim(bottom=0)
    ax.set_yticks([])
    if size > 1 or prior is not None:
        ax.legend(frameon=False, fontsize="small", ncols=2 if size > 4 else 1)


def _grid(draws: Tensor) -> Tensor:
    """Between the extreme quantiles of the draws, a little denser where these are: (nodes, scalars)."""
    levels = draws.new_tensor([0.001, 0.999])
    low, high = draws.quantile(levels, dim=0)
    high = torch.maximum(high, low + 1e-12)
    return low + (high - low) * torch.linspace(
        0, 1, _NODES, dtype=draws.dtype, device=draws.device
    ).unsqueeze(-1)


def _density(law: Any, grid: Tensor) -> Tensor | None:
    """p(x_k) at the nodes of every scalar, (nodes, scalars), if the law's marginals have densities."""
    if isinstance(law, Mixture):
        parts = [_density(c, grid) for c in law.components]
        found = [p for p in parts if p is not None]
        if len(found) < len(parts):
            return None
        return torch.tensordot(law.weights.double().cpu(), torch.stack(found), dims=1)
    own = _elementwise(law)
    if own is None:
        return None
    dtype = getattr(law, "mean", grid).dtype if not isinstance(law, Transformed) else None
    try:
        x = grid.reshape(len(grid), *own.batch_shape)
        value = own.log_prob(x.to(dtype or own.base_dist.mean.dtype)).double().cpu().exp()
    except (NotImplementedError, ValueError):
        return None
    return value.reshape(len(grid), -1)


def _elementwise(law: Any) -> Any:
    """A law of independent scalars with the marginals of this one, if there is such in closed form."""
    while isinstance(law, torch.distributions.Independent):
        law = law.base_dist
    if isinstance(law, torch.distributions.MultivariateNormal):
        return dist.Normal(law.mean, law.stddev)
    if isinstance(law, torch.distributions.Dirichlet):
        a = law.concentration
        return dist.Beta(a, a.sum(-1, keepdim=True) - a)
    if isinstance(law, Transformed):
        (transform,) = law.transforms
        scalar, base = scalar_transform(transform), _elementwise(law.base_dist)
        return None if scalar is None or base is None else Transformed(base, [scalar])
    return law if not law.event_shape else None


def _behind(ax: Any, prior: Any, grid: Tensor) -> None:
    """The prior over the range of the posterior, in grey."""
    low, high = float(grid.min()), float(grid.max())
    style = {"color": "0.55", "linewidth": 1.2, "linestyle": "--", "label": "prior"}
    if hasattr(prior, "log_prob"):
        x = torch.linspace(low, high, _NODES, dtype=torch.float64, device="cpu")
        each = x.unsqueeze(-1).expand(-1, max(math.prod(_shape(prior)), 1))
        density = _density(prior, each)
        if density is not None:
            same = bool((density - density[:, :1]).abs().max() < 1e-9 * density.abs().max())
            for k in range(1 if same else density.shape[1]):
                ax.plot(
                    x.numpy(), density[:, k].numpy(), **style | ({} if k == 0 else {"label": None})
                )
            return
        prior = prior.sample((_DRAWS,))
    draws = torch.as_tensor(prior).double().cpu().reshape(-1)
    inside = draws[(draws >= low) & (draws <= high)]
    if len(inside):  # as a share of all draws, not of those in view
        width = (high - low) / _BINS
        heights = torch.histc(inside, _BINS, low, high) / (len(draws) * width)
        edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64, device="cpu")
        ax.stairs(heights.numpy(), edges.numpy(), **style)


def _intervals(ax: Any, draws: Tensor) -> None:
    low, middle, high = draws.quantile(draws.new_tensor([0.05, 0.5, 0.95]), dim=0)
    k = range(draws.shape[1])
    ax.vlines(k, low.numpy(), high.numpy(), color=COLOURS[0], linewidth=1.2)
    ax.plot(k, middle.numpy(), "o", markersize=3, color=COLOURS[0])
    ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.set(xlabel="element", ylabel="median, 90 %")


def _probabilities(law: Any) -> tuple[list[str], Tensor] | None:
    """The values of a discrete law and their probabilities, (elements, values)."""
    while isinstance(law, torch.distributions.Independent):
        law = law.base_dist
    if isinstance(law, torch.distributions.Bernoulli):
        p = torch.stack([1 - law.probs, law.probs], -1)
    elif isinstance(law, torch.distributions.Categorical | torch.distributions.OneHotCategorical):
        p = law.probs
    else:
        return None
    table = p.reshape(-1, p.shape[-1]).double().cpu()
    return [str(k) for k in range(table.shape[1])], table


def _bars(ax: Any, values: list[str], p: Tensor, prior: Any) -> None:
    if len(p) == 1:
        ax.bar(values, p[0].numpy(), color=COLOURS[0], width=0.8)
        q = None if prior is None or not hasattr(prior, "log_prob") else _probabilities(prior)
        if q is not None:
            place = torch.arange(len(values), device="cpu") + 0.0
            ax.hlines(
                q[1][0].numpy(),
                (place - 0.4).numpy(),
                (place + 0.4).numpy(),
                color="0.2",
                label="prior",
            )
            ax.legend(frameon=False, fontsize="small")
        ax.set(ylim=(0, 1), xlabel="value", ylabel="probability")
        return
    colours = (
        COLOURS
        if len(values) <= _FEW
        else [str(0.1 + 0.8 * k / len(values)) for k in range(len(values))]
    )
    floor = torch.zeros(len(p), dtype=p.dtype, device=p.device)
    for k, value in enumerate(values):
        ax.bar(
            range(len(p)), p[:, k].numpy(), bottom=floor.numpy(), width=1.0,
            color=colours[k], label=value,
        )  # fmt: skip
        floor = floor + p[:, k]
    ax.set(ylim=(0, 1), xlim=(-0.5, len(p) - 0.5), xlabel="element", ylabel="probability")
    if len(values) <= _FEW:
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
