"""to_arviz: draws of a fit, with predictions and log likelihoods, as ArviZ's InferenceData. Needs arviz.

    x_s ~ q,     y_s ~ p(y | x_s),     log p(y_n | x_s),     log p(y, x_s),     log q(x_s)

Install it by `pip install 'pyro_cvi[arviz]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor

from pyro_cvi.errors import CVIError, imported
from pyro_cvi.infer import RunResult
from pyro_cvi.integrate import IntegratedPosterior
from pyro_cvi.modes import public_call

if TYPE_CHECKING:
    from arviz import InferenceData

__all__ = ["to_arviz"]


@public_call
def to_arviz(
    guide: AutoGuide | IntegratedPosterior,
    *args: Any,
    model: Callable[..., Any] | None = None,
    num_samples: int = 1000,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str | None]] | None = None,
    result: RunResult | None = None,
    **kwargs: Any,
) -> InferenceData:
    """Independent draws of the posterior, and what follows from them, as one chain of InferenceData.

    The groups are

    - `posterior`: every latent site in the model's space, and the model's deterministic sites;
    - `posterior_predictive`: every observed site drawn anew, given each draw of the latents. Where the
      model goes on from the data itself and not from what `pyro.sample` returns (`y[:-1]` in a time
      series), these are predictions one step ahead;
    - `log_likelihood`: log p(y_n | x_s) of each observation, given the local latents of the draw,
      without the scales of subsampling; zero where an observation is masked;
    - `observed_data`;
    - `sample_stats`: `lp` is log p(y, x_s), and `log_q` is log q(x_s), which an `IntegratedPosterior`
      does not have. The mean of their difference estimates the bound. The attribute `loss` is the last
      one of `result`.

    Draws are independent, so effective sample sizes and R-hat say nothing about the fit.

    Arguments:
        guide: that of a fit: an `AutoCVI`, a list with one in it (`HybridGuide`), or an
            `IntegratedPosterior`. Pyro's own autoguides serve too.
        args, kwargs: the model's arguments, with its data, as in `run`.
        model: needed for an `IntegratedPosterior`, and for a guide that was unpickled.
        num_samples: how many draws. The model runs twice for each.
        posterior_predictive, log_likelihood: whether these groups are made.
        coords: labels of dims, as in ArviZ.
        dims: names of a site's dims from the left, in the place of those of its plates. A dim has its
            plate's name (`chain_plate` and `draw_plate` for two that ArviZ uses itself), and ArviZ's
            default where it has none.
        result: what `run` returned.

    Shapes:
        `(1, num_samples, *site shape)`, of log likelihoods `(1, num_samples, *batch shape)`.

    Raises:
        CVIError: the model is not there, or `num_samples` is not positive.
        ImportError: arviz is not installed.

    Example:
        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_cvi import CVI, AutoCVI
        >>> from pyro_cvi.export import to_arviz
        >>> def model(x):
        ...     rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        ...     with pyro.plate("rows", len(x)):
        ...         pyro.sample("x", dist.Poisson(rate), obs=x)
        >>> x = torch.tensor([1.0, 3.0])
        >>> cvi = CVI(model, AutoCVI(model))
        >>> result = cvi.run(x)
        >>> data = to_arviz(cvi.guide, x, num_samples=10)
        >>> dict(data.log_likelihood["x"].sizes)
        {'chain': 1, 'draw': 10, 'rows': 2}
    """
    az = imported("arviz", "arviz", "pyro_cvi.export")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise CVIError(f"num_samples is {num_samples!r}; expected a positive integer")
    run = _Runs(_model_of(guide, model), args, kwargs)
    groups: dict[str, dict[str, list[Tensor]]] = {
        g: {} for g in ("posterior", "posterior_predictive", "log_likelihood", "sample_stats")
    }
    with torch.no_grad():
        for _ in range(num_samples):
            drawn = poutine.trace(guide).get_trace(*args, **kwargs)
            given = run(drawn)
            sites = _sites(given)
            data = {n: s for n, s in sites.items() if s["is_observed"] and not _is_deterministic(s)}
            rest = {n: s["value"] for n, s in sites.items() if n not in data}
            _add(groups["posterior"], rest)
            stats = {"lp": given.log_prob_sum()}
            if isinstance(guide, AutoGuide):
                stats["log_q"] = drawn.log_prob_sum()
            _add(groups["sample_stats"], {n: torch.as_tensor(v) for n, v in stats.items()})
            if log_likelihood:
                _add(groups["log_likelihood"], {n: _each(s) for n, s in data.items()})
            if posterior_predictive:
                anew = _sites(run(drawn, anew=True))
                _add(groups["posterior_predictive"], {n: anew[n]["value"] for n in data})
    places = _places(sites) | {n: list(names) for n, names in (dims or {}).items()}
    found: dict[str, Any] = {}
    for group, lists in groups.items():
        if lists:
            values = {n: torch.stack(v).unsqueeze(0) for n, v in lists.items()}
            attrs = {"loss": result.losses[-1]} if result and group == "sample_stats" else {}
            found[group] = _dataset(az, values, places, coords, attrs)
    if data:
        seen = {n: s["value"] for n, s in data.items()}
        found["observed_data"] = _dataset(az, seen, places, coords, {}, default_dims=[])
    return az.InferenceData(**found)


def _dataset(
    az: Any,
    values: Mapping[str, Tensor],
    places: Mapping[str, Sequence[str | None]],
    coords: Mapping[str, Any] | None,
    attrs: Mapping[str, Any],
    **kwargs: Any,
) -> Any:
    """An xarray.Dataset whose variables have the names of `places` for as many dims as they have."""
    lead = len(kwargs.get("default_dims", ("chain", "draw")))
    own = {n: list(places[n][: v.ndim - lead]) for n, v in values.items() if n in places}
    used = {d for names in own.values() for d in names}
    return az.dict_to_dataset(
        {n: v.detach().cpu().numpy() for n, v in values.items()},
        attrs={"inference_library": "pyro_cvi", **attrs},
        coords={d: c for d, c in (coords or {}).items() if d in used},
        dims=own,
        **kwargs,
    )


def _model_of(guide: Any, model: Callable[..., Any] | None) -> Callable[..., Any]:
    if not isinstance(guide, AutoGuide | IntegratedPosterior):
        raise CVIError(
            "to_arviz",
            f"a {type(guide).__name__}",
            "an AutoCVI, HybridGuide or IntegratedPosterior",
            "to_arviz(cvi.guide, *args)",
        )
    if model is not None:
        return model
    if isinstance(guide, IntegratedPosterior):
        raise CVIError(
            "to_arviz",
            "an IntegratedPosterior, which does not hold its model",
            "the model beside it",
            "to_arviz(posterior, *args, model=model)",
        )
    return guide.model


class _Runs:
    """Runs of the model with its latents at a draw of the guide."""

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs

    def __call__(self, drawn: poutine.Trace, *, anew: bool = False) -> poutine.Trace:
        """The trace; with `anew` what is observed is drawn."""
        model = poutine.uncondition(self._model) if anew else self._model
        held = poutine.replay(model, trace=drawn)
        return poutine.trace(held).get_trace(*self._args, **self._kwargs)


def _sites(trace: poutine.Trace) -> dict[str, Any]:
    """The sample sites that stand for something: neither indices of plates, nor factors, nor helpers."""
    return {
        name: node
        for name, node in trace.nodes.items()
        if node["type"] == "sample"
        and not site_is_subsample(node)
        and not site_is_factor(node)
        and not node["infer"].get("is_auxiliary")
    }


def _is_deterministic(node: Any) -> bool:
    return bool(node["infer"].get("_deterministic"))


def _each(node: Any) -> Tensor:
    """log p of each observation, without scale; zero where masked."""
    value: Tensor = node["fn"].log_prob(node["value"])
    mask = node["mask"]
    if mask is None or mask is True:
        return value
    kept = torch.as_tensor(mask, device=value.device)
    return torch.where(kept, value, torch.zeros_like(value))


def _places(nodes: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """The plates along each site's batch dims, from the left; None where there is none."""
    result: dict[str, list[str | None]] = {}
    for name, node in nodes.items():
        names: list[str | None] = [None] * len(node["fn"].batch_shape)
        for frame in node["cond_indep_stack"]:
            if frame.vectorized and -len(names) <= frame.dim:
                plate = frame.name
                names[frame.dim] = f"{plate}_plate" if plate in ("chain", "draw") else plate
        result[name] = names
    return result


def _add(lists: dict[str, list[Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        lists.setdefault(name, []).append(value.detach())
