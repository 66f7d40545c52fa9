"""All models that CVI and SVI are compared on, by name."""

from __future__ import annotations

from importlib import import_module

import drop_in
import posteriordb
import pyro
import torch
from _common import DataMissingError
from _problem import REGISTRY, Builder, Problem

for _kind in ("cases", "regression", "hierarchical", "curves", "series", "latent"):
    import_module(f"_models_{_kind}")  # each enters its own

POSTERIORS = (
    "earnings-earn_height", "kidiq-kidscore_interaction", "mesquite-logmesquite", "sblri-blr",
    "kilpisjarvi_mod-kilpisjarvi", "arK-arK", "arma-arma11", "gp_pois_regr-gp_regr",
    "eight_schools-eight_schools_noncentered", "eight_schools-eight_schools_centered",
    "gp_pois_regr-gp_pois_regr", "gp_pois_regr-gp_pois_regr/centred",
    "low_dim_gauss_mix-low_dim_gauss_mix", "low_dim_gauss_mix-low_dim_gauss_mix/marginal",
    "hmm_example-hmm_example", "hmm_example-hmm_example/forward", "hudson_lynx_hare-lotka_volterra",
)  # fmt: skip
DISCRETE = {"low_dim_gauss_mix-low_dim_gauss_mix": (("z",), 1)}
TUTORIALS = (
    "coin", "linear regression, scalars", "linear regression, PyroModule", "mixture tutorial",
    "LDA example", "eight schools", "sparse gamma DEF", "random walk of contrib.forecast",
    "Gaussian chain", "Gaussian pyramid", "elections", "logistic regression", "Poisson regression",
    "hierarchical normal", "baseball", "baseball by logits", "capture-recapture",
    "Bayesian neural network", "HMM example, model_1",
)  # fmt: skip


def _tutorial(name: str) -> Builder:
    def build() -> Problem:
        with torch.random.fork_rng():
            pyro.set_rng_seed(0)
            case = next(c for c in drop_in.cases(False) if c.name == name)
        return Problem(case.model, case.args, case.discrete, case.nesting, case.hidden, case.learns)

    return build


def _posterior(name: str) -> Builder:
    def build() -> Problem:
        dtype = torch.get_default_dtype()
        module = posteriordb.load(dtype)
        args = posteriordb.arguments_of(module, name, dtype)
        discrete, nesting = DISCRETE.get(name, ((), None))
        if name == "hmm_example-hmm_example":
            discrete, nesting = tuple(f"z_{t}" for t in range(len(args[0]))), 1
        return Problem(module.POSTERIORS[name].model, args, discrete, nesting)

    return build


def everything() -> dict[str, Builder]:
    """Builders by name; those of posteriordb only where it is at hand."""
    found = dict(REGISTRY)
    found |= {f"tutorial: {n}": _tutorial(n) for n in TUTORIALS}
    try:
        posteriordb.load(torch.get_default_dtype())
    except DataMissingError as e:
        print(f"left out: {e}")
    else:
        found |= {f"posteriordb: {n}": _posterior(n) for n in POSTERIORS}
    return found
