"""Gaussian mixtures: is the fit right, and is a sweep as fast as an iteration of scikit-learn?

Model, with the default priors of scikit-learn's BayesianGaussianMixture ("dirichlet_distribution";
reg_covar=0):

    pi ~ Dirichlet(1/K);  z_n ~ Categorical(pi);  x_n ~ N(mu[z_n], P[z_n]^-1)
    P_k ~ Wishart(D, cov(x)^-1), or diag(tau_k) with tau_kd ~ Gamma(D/2, var(x_d)/2)
    mu_k ~ N(mean(x), P_k^-1)

What can be compared. Model and priors are the same. The posterior is not: scikit-learn has the joint
q(mu, P), this package q(mu) q(P), so the bounds differ and scikit-learn's is the higher ("a joint
q(mu, P) would gain"). For given responsibilities both have the same means and the same E P (see
_oracle.py), so assignments must agree, and the plug-in predictive density
sum_k E[pi_k] N(x; E mu_k, (E P_k)^-1). That the fit is right is seen from its bound, sweep by sweep,
beside numpy's coordinate ascent of the same factorised posterior in the same order of blocks, from the
same responsibilities (0.9 on the cluster of k-means, 0.1 spread over all) and the means of these. The
same oracle with a joint posterior must give scikit-learn's responsibilities. It does for full
covariances. For diagonal ones scikit-learn (1.9) takes E log |P_k| from the Wishart of D dimensions, a
sum of digamma((nu - i)/2) over i = 0..D-1, where D Gammas have D digamma(nu/2); its diagonal fit is
therefore the optimum of no bound, and only nearly comparable.

All in float64, both from the same start. An iteration of scikit-learn is timed inside its own `fit`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import (
    Fit,
    Row,
    arguments,
    arrays,
    fit,
    is_settled,
    machine,
    report,
    run,
    sweep_seconds,
    versions,
    warm_up,
)
from _oracle import LOG_2PI, Array, Dirichlets, Emissions, Mixture
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value
from scipy.optimize import linear_sum_assignment
from scipy.special import logsumexp
from torch import Tensor

KINDS = ("diag", "full")
SETTLED = 1e-10
SWEEPS = 500
BIG_SWEEPS = 30


@dataclass(frozen=True)
class Problem:
    """Rows to fit and rows held out; K components; the covariance's kind."""

    name: str
    x: Array
    held_out: Array
    K: int
    kind: str

    @property
    def D(self) -> int:
        return self.x.shape[1]

    @property
    def scale(self) -> Array:
        """Of the prior of precisions: variances, or the covariance matrix."""
        return self.x.var(0, ddof=1) if self.kind == "diag" else np.cov(self.x.T)

    def grouped(self, x: Array) -> Array:
        """(N, G, d), as the oracle has it."""
        return x[:, :, None] if self.kind == "diag" else x[:, None, :]

    def grouped_scale(self) -> Array:
        """(G, d, d)."""
        return self.scale[:, None, None] if self.kind == "diag" else self.scale[None]


def model_of(p: Problem) -> Callable[[Tensor], None]:
    """The model of the docstring."""
    weights = torch.full((p.K,), 1 / p.K, dtype=torch.float64)
    center = torch.from_numpy(p.x.mean(0))
    dof = torch.tensor(float(p.D), dtype=torch.float64)
    scale = torch.from_numpy(p.scale)
    inverse = torch.linalg.inv(scale) if p.kind == "full" else scale

    def diag(x: Tensor) -> None:
        pi = pyro.sample("pi", dist.Dirichlet(weights))
        with pyro.plate("components", p.K):
            tau = pyro.sample("tau", dist.Gamma(dof / 2, scale / 2).to_event(1))
            mu = pyro.sample("mu", dist.Normal(center, tau.rsqrt()).to_event(1))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("x", dist.Normal(mu[z], tau[z].rsqrt()).to_event(1), obs=x)

    def full(x: Tensor) -> None:
        pi = pyro.sample("pi", dist.Dirichlet(weights))
        with pyro.plate("components", p.K):
            P = pyro.sample("P", dist.Wishart(dof, inverse))
            mu = pyro.sample("mu", dist.MultivariateNormal(center, precision_matrix=P))
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Categorical(pi))
            pyro.sample("x", dist.MultivariateNormal(mu[z], precision_matrix=P[z]), obs=x)

    return diag if p.kind == "diag" else full


@dataclass
class Fitted:
    """Weights, means, expected precisions (K, D, D), and responsibilities of the rows."""

    weights: Array
    means: Array
    precisions: Array
    r: Array

    def log_density(self, x: Array) -> float:
        """Mean log plug-in density of rows."""
        each = np.empty((len(x), len(self.weights)))
        for k, (m, P) in enumerate(zip(self.means, self.precisions, strict=True)):
            square = np.einsum("nd,de,ne->n", x - m, P, x - m, optimize=True)
            each[:, k] = 0.5 * (np.linalg.slogdet(P)[1] - len(m) * LOG_2PI - square)
        with np.errstate(divide="ignore"):
            return float(logsumexp(each + np.log(self.weights), axis=1).mean())


# --- the three fits ---------------------------------------------------------------------------


def start_labels(p: Problem) -> Array:
    from sklearn.cluster import KMeans

    return KMeans(p.K, n_init=1, random_state=0).fit_predict(p.x)


def softened(labels: Array, K: int) -> Array:
    """The responsibilities with which a guide starts that `init_to_value` gave these labels."""
    return 0.9 * np.eye(K)[labels] + 0.1 / K


def with_cvi(p: Problem, labels: Array, sweeps: int) -> tuple[Fit, Mixture, list[str]]:
    """The fit, and the oracle as it was before its first sweep."""
    x = torch.from_numpy(p.x)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    r = softened(labels, p.K)
    # A sweep moves precisions before means: with all means at their prior's it would lose the start.
    means = torch.from_numpy(r.T @ p.x / r.sum(0)[:, None])
    values = {"z": torch.from_numpy(labels).long(), "mu": means}
    start = init_to_value(values=values, fallback=init_to_mean)
    model = model_of(p)
    untouched = fit((x,), 0, model, init_loc_fn=start)
    untouched.guide(x)
    oracle, order = oracle_of(p, untouched, r)
    result = fit((x,), sweeps, model, SETTLED, untouched.guide.state_dict())
    return result, oracle, order


def matched(r: Array, like: Array) -> Array:
    """The components of `r` in the order in which they agree best with those of `like`."""
    _, order = linear_sum_assignment(-(like.T @ r))
    result: Array = r[:, order]
    return result


def oracle_of(p: Problem, f: Fit, r: Array) -> tuple[Mixture, list[str]]:
    """Coordinate ascent from the beliefs that the guide starts with; the order of its blocks."""
    q = f.guide.posterior
    center = p.x.mean(0).reshape(p.grouped(p.x).shape[1:])
    emissions = Emissions(center, 1.0, p.D, p.grouped_scale(), p.K)
    mu = q("mu")
    emissions.loc = mu.mean.numpy().reshape(emissions.loc.shape).copy()
    variance = mu.variance.numpy().reshape(emissions.loc.shape)
    emissions.cov = variance[..., None] * np.eye(emissions.d)
    if p.kind == "diag":
        tau = q("tau").base_dist
        emissions.nu = 2 * tau.concentration[:, 0].numpy()
        emissions.S = 2 * tau.rate.numpy()[..., None, None]
    else:
        P = q("P")
        emissions.nu = P.df.expand(p.K).numpy().copy()
        emissions.S = P.precision_matrix.numpy()[:, None].copy()
    weights = Dirichlets(np.full(p.K, 1 / p.K), q("pi").concentration.numpy())
    names = {"pi": "weights", "mu": "means", "tau": "precisions", "P": "precisions", "z": "states"}
    order = [names[site] for block in f.guide.plan.blocks for site in block.sites]
    return Mixture(weights, emissions, p.grouped(p.x), r), order


def fitted_cvi(p: Problem, f: Fit) -> Fitted:
    q = f.guide.posterior
    if p.kind == "diag":
        precisions = torch.diag_embed(q("tau").mean).numpy()
    else:
        precisions = q("P").mean.numpy()
    return Fitted(q("pi").mean.numpy(), q("mu").mean.numpy(), precisions, q("z").probs.numpy())


def with_sklearn(p: Problem, labels: Array, sweeps: int) -> tuple[Fitted, list[float]]:
    """scikit-learn's own `fit`, started from given responsibilities, with a clock in it."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import BayesianGaussianMixture

    times: list[float] = []

    class Timed(BayesianGaussianMixture):
        def _initialize_parameters(self, X: Array, *args: Any, **kwargs: Any) -> None:
            self._initialize(X, softened(labels, p.K))
            times.append(time.perf_counter())

        def _compute_lower_bound(self, *args: Any) -> float:
            bound = super()._compute_lower_bound(*args)
            times.append(time.perf_counter())
            return bound

    m = Timed(
        n_components=p.K, covariance_type=p.kind, weight_concentration_prior=1 / p.K,
        weight_concentration_prior_type="dirichlet_distribution",
        mean_prior=p.x.mean(0), mean_precision_prior=1.0,
        degrees_of_freedom_prior=p.D, covariance_prior=p.scale, reg_covar=0.0, max_iter=sweeps,
        tol=1e-9,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        m.fit(p.x)
    precisions = m.precisions_ if p.kind == "full" else m.precisions_[:, :, None] * np.eye(p.D)
    r = m.predict_proba(p.x)
    return Fitted(m.weights_, m.means_, precisions, r), list(np.diff(times))


def with_joint_oracle(p: Problem, labels: Array, sweeps: int) -> tuple[Array, Mixture]:
    """The posterior of scikit-learn, in numpy: responsibilities after its sweeps, and once settled."""
    shape = p.grouped(p.x).shape[1:]
    emissions = Emissions(p.x.mean(0).reshape(shape), 1.0, p.D, p.grouped_scale(), p.K, joint=True)
    prior = np.full(p.K, 1 / p.K)
    m = Mixture(Dirichlets(prior, prior), emissions, p.grouped(p.x), softened(labels, p.K))
    order = ("weights", "means", "precisions", "states")
    bounds = [m.sweep(order) for _ in range(sweeps + 1)]
    r = m.r
    while len(bounds) < 10 * SWEEPS and not is_settled(bounds, SETTLED):
        bounds.append(m.sweep(order))
    return r, m


# --- the comparison ---------------------------------------------------------------------------


def compare(p: Problem, sweeps: int, timed: int, with_joint: bool) -> dict[str, float]:
    """All figures of one case."""
    labels = start_labels(p)
    ours, oracle, order = with_cvi(p, labels, sweeps)
    exact = [oracle.sweep(order) for _ in ours.losses]
    errors = [abs(a / b - 1) for a, b in zip(ours.losses, exact, strict=True)]
    settled = (n for n in range(2, len(exact) + 1) if is_settled(ours.losses[:n], SETTLED))
    a, (b, seconds) = fitted_cvi(p, ours), with_sklearn(p, labels, sweeps)
    r = matched(a.r, b.r)
    theirs = float(np.median(seconds))
    sweep = sweep_seconds(ours, (torch.from_numpy(p.x),), timed)
    figures = {
        "sweeps": next(settled, len(exact)),
        "their_sweeps": len(seconds),
        "negative_bound": ours.losses[-1],
        "error": errors[-1],
        "largest_error": max(errors),
        "agreement": float((r.argmax(1) == b.r.argmax(1)).mean()),
        "responsibilities": float(np.abs(r - b.r).max()),
        "log_density": a.log_density(p.held_out),
        "their_log_density": b.log_density(p.held_out),
        "plan": ours.plan_seconds,
        "step": ours.step_seconds,
        "sweep": sweep,
        "their_sweep": theirs,
        "ratio": sweep / theirs,
    }
    if with_joint:
        same, joint = with_joint_oracle(p, labels, len(seconds))
        figures["gain"] = joint.bound() + ours.losses[-1]
        figures["joint_error"] = float(np.abs(matched(same, b.r) - b.r).max())
        r = matched(a.r, joint.r)
        figures["joint_agreement"] = float((r.argmax(1) == joint.r.argmax(1)).mean())
    return figures


def rows_of(case: str, found: list[dict[str, float]]) -> list[Row]:
    """The worst of the figures."""
    apart = [abs(f["log_density"] - f["their_log_density"]) for f in found]
    slowest = max(found, key=lambda f: f["ratio"])
    rows = [
        Row(case, "sweeps until the bound settles (1e-10)", max(f["sweeps"] for f in found)),
        Row(
            case, "bound: relative difference from the oracle's, any sweep",
            max(f["largest_error"] for f in found), "<=", 1e-6,
        ),
        Row(
            case, "rows assigned as by scikit-learn (components matched)",
            min(f["agreement"] for f in found), ">=", 0.99,
        ),
        Row(case, "held-out log density per row: difference from its", max(apart), "<=", 0.01),
    ]  # fmt: skip
    if "gain" in found[0]:
        rows += [
            Row(case, "a joint q(mu, P) would gain, nats", max(f["gain"] for f in found)),
            Row(
                case, "rows assigned as by the joint oracle (components matched)",
                min(f["joint_agreement"] for f in found), ">=", 0.99,
            ),
            Row(
                case, "responsibilities: scikit-learn's from the joint oracle's",
                max(f["joint_error"] for f in found),
            ),
        ]  # fmt: skip
    return [
        *rows,
        Row(case, "plan, ms", 1e3 * slowest["plan"]),
        Row(case, "step(), ms", 1e3 * slowest["step"]),
        Row(case, "sweep inside of run(), ms", 1e3 * slowest["sweep"]),
        Row(case, "iteration of scikit-learn, ms", 1e3 * slowest["their_sweep"]),
        Row(case, "sweep / iteration", slowest["ratio"], "<=", 2.0),
    ]


def faithful() -> tuple[Array, Array]:
    """Four fifths to fit, one fifth held out."""
    d = arrays("old_faithful")
    x = np.stack([d["eruptions"], d["waiting"]], 1)
    order = np.random.default_rng(0).permutation(len(x))
    cut = len(x) * 4 // 5
    return x[order[:cut]], x[order[cut:]]


def synthetic(rows: int, D: int, K: int) -> tuple[Array, Array]:
    """K well-separated clusters, each with a covariance of its own; a tenth more rows held out."""
    rng = np.random.default_rng(20)
    means = rng.normal(0, 4, (K, D))
    roots = np.eye(D) + 0.3 * rng.normal(size=(K, D, D))
    z = rng.integers(K, size=rows + rows // 10)
    x = means[z] + np.einsum("nij,nj->ni", roots[z], rng.normal(size=(len(z), D)))
    return x[:rows], x[rows:]


def main() -> None:
    options = arguments(__doc__).parse_args()
    small = options.small
    at = machine()
    warm_up()
    x, held_out = faithful()
    sizes = (2, 3) if small else (2, 3, 4, 5, 6)
    big = (2000, 4, 3) if small else (100_000, 10, 20)
    X, X_held_out = synthetic(*big)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    for kind in KINDS:
        compare(Problem("", x, held_out, 2, kind), 3, 2, False)  # first use of each family
        case = f"Old Faithful, {kind}, worst of K = {sizes[0]}..{sizes[-1]}"
        found = [
            compare(Problem("faithful", x, held_out, K, kind), SWEEPS, 64, True) for K in sizes
        ]
        rows += rows_of(case, found)
        details[case] = dict(zip(map(str, sizes), found, strict=True))
    for kind in KINDS:
        p = Problem("synthetic", X, X_held_out, big[2], kind)
        case = f"{big[0]} x {big[1]}, K = {big[2]}, {kind}"
        found = [compare(p, BIG_SWEEPS, 10, False)]
        rows += rows_of(case, found)
        details[case] = found[0]
    report(__file__, rows, at, small, versions=versions("scikit-learn"), **details)


if __name__ == "__main__":
    run(main)
