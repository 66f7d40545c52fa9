"""Hidden Markov models: is the fit right, and is a sweep as fast as an iteration of hmmlearn?

Model, with the default priors of hmmlearn's VariationalGaussianHMM, for scalars x and a loop of
`pyro.markov` inside a plate of sequences:

    start ~ Dirichlet(1/K);  A_k ~ Dirichlet(1/K)
    tau_k ~ Gamma(nu0/2, S0/2), nu0 = 1, S0 = 1e-3;  mu_k ~ N(mean(x), 1/(beta0 tau_k)), beta0 = 1
    z_0 ~ Categorical(start);  z_t ~ Categorical(A[z_{t-1}]);  x_t ~ N(mu[z_t], 1/tau[z_t])

What can be compared. All priors are matched: hmmlearn's Wishart with scale S0 and nu0 degrees of freedom
is this Gamma for scalars, and its beta is a factor on tau. The posterior of states, q(z) with all
correlations within a sequence, is the same. That of emissions is not: hmmlearn has the joint
q(mu, tau), this package q(mu) q(tau). As in mixtures.py, both have the same means and the same E tau for
given states, and differ by about 1/n_k^2 in E log tau; so the states' marginals must agree nearly, and
hmmlearn's bound is the higher. That the fit is right is seen beside numpy's own forward-backward: with
the factorised posterior from the guide's start, sweep by sweep; the same oracle with the joint posterior
must give hmmlearn's bound (which leaves out log(2 pi) / 2 for each x).

All in float64. Both start from the same states (0.9 on the cluster of k-means, 0.1 spread over all,
independent of each other) and the means of these: hmmlearn, which starts from parameters, from those of
the first half sweep.
An iteration of hmmlearn is timed by its monitor inside of `fit`, for both of its implementations.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _common import Fit, Row, arguments, fit, machine, report, run, sweep_seconds, versions, warm_up
from _oracle import LOG_2PI, Array, Chains, Dirichlets, Emissions
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value
from torch import Tensor

SWEEPS = 15
BETA0, NU0, S0 = 1.0, 1.0, 1e-3
NAMES = {"start": "start", "A": "moves", "mu": "means", "tau": "precisions"}


def data(sequences: int, length: int, K: int) -> Array:
    """Sticky chains, components 2.5 standard deviations apart."""
    rng = np.random.default_rng(3)
    z = np.empty((sequences, length), dtype=int)
    z[:, 0] = rng.integers(K, size=sequences)
    for t in range(1, length):
        stays = rng.random(sequences) < 0.9
        z[:, t] = np.where(stays, z[:, t - 1], rng.integers(K, size=sequences))
    return 2.5 * z + rng.normal(size=z.shape)


def model(x: Tensor, K: int, center: Tensor) -> None:
    sequences, length = x.shape
    weights = x.new_full((K,), 1 / K)
    start = pyro.sample("start", dist.Dirichlet(weights))
    with pyro.plate("states", K):
        A = pyro.sample("A", dist.Dirichlet(weights))
        tau = pyro.sample("tau", dist.Gamma(x.new_tensor(NU0 / 2), x.new_tensor(S0 / 2)))
        mu = pyro.sample("mu", dist.Normal(center, (BETA0 * tau).rsqrt()))
    with pyro.plate("sequences", sequences, dim=-1):
        z: Any = None
        for t in pyro.markov(range(length)):
            z = pyro.sample(f"z_{t}", dist.Categorical(start if t == 0 else A[z]))
            pyro.sample(f"x_{t}", dist.Normal(mu[z], tau[z].rsqrt()), obs=x[:, t])


# --- the fits ---------------------------------------------------------------------------------


def emissions_of(x: Array, K: int, joint: bool) -> Emissions:
    return Emissions(np.full((1, 1), x.mean()), BETA0, NU0, np.full((1, 1, 1), S0), K, joint)


def oracle_of(x: Array, K: int, r: Array, guide: Any) -> tuple[Chains, list[str]]:
    """Coordinate ascent from the beliefs that the guide starts with; the order of its blocks."""
    q = guide.posterior
    emissions = emissions_of(x, K, joint=False)
    emissions.loc = q("mu").mean.numpy().reshape(K, 1, 1).copy()
    emissions.cov = q("mu").variance.numpy().reshape(K, 1, 1, 1).copy()
    emissions.nu = 2 * q("tau").concentration.numpy()
    emissions.S = 2 * q("tau").rate.numpy().reshape(K, 1, 1, 1)
    prior = np.full(K, 1 / K)
    start = Dirichlets(prior, q("start").concentration.numpy())
    moves = Dirichlets(prior, q("A").concentration.numpy())
    sites = [block.sites[0] for block in guide.plan.blocks]
    return Chains(start, moves, emissions, x, r), [NAMES.get(s, "states") for s in sites]


def with_cvi(x: Array, K: int, labels: Array, sweeps: int) -> tuple[Fit, Chains, list[str]]:
    """The fit, and the oracle as it was before its first sweep."""
    pyro.set_rng_seed(0)
    args = (torch.from_numpy(x), K, torch.tensor(x.mean()))
    values = {f"z_{t}": torch.from_numpy(labels[:, t]).long() for t in range(x.shape[1])}
    # A sweep moves tau before mu: with all means at their prior's it would lose the start.
    values["mu"] = torch.from_numpy(joint_oracle(x, K, labels).emissions.loc[:, 0, 0])
    start = init_to_value(values=values, fallback=init_to_mean)
    untouched = fit(args, 0, model, init_loc_fn=start)
    untouched.guide(*args)
    oracle, order = oracle_of(x, K, softened(labels, K), untouched.guide)
    return fit(args, sweeps, model, state=untouched.guide.state_dict()), oracle, order


def softened(labels: Array, K: int) -> Array:
    """The states with which a guide starts that `init_to_value` gave these labels."""
    return 0.9 * np.eye(K)[labels] + 0.1 / K


def joint_oracle(x: Array, K: int, labels: Array) -> Chains:
    """With the posterior of hmmlearn, after the first half sweep."""
    prior = np.full(K, 1 / K)
    start, moves = Dirichlets(prior, prior), Dirichlets(prior, np.tile(prior, (K, 1)))
    chains = Chains(start, moves, emissions_of(x, K, joint=True), x, softened(labels, K))
    chains.sweep(("start", "moves", "means", "precisions"))
    return chains


def with_hmmlearn(
    x: Array, K: int, begin: Chains, sweeps: int, implementation: str
) -> tuple[Any, list[float], list[float]]:
    """The fitted model, negative bounds, seconds of each iteration."""
    from hmmlearn.base import ConvergenceMonitor
    from hmmlearn.vhmm import VariationalGaussianHMM

    times: list[float] = []

    class Clock(ConvergenceMonitor):
        def report(self, log_prob: float) -> None:
            times.append(time.perf_counter())
            super().report(log_prob)

    m = VariationalGaussianHMM(
        K, covariance_type="diag", n_iter=sweeps, tol=-np.inf, init_params="", random_state=0,
        implementation=implementation,
    )  # fmt: skip
    m.monitor_ = Clock(m.tol, m.n_iter, m.verbose)
    e = begin.emissions
    m.n_features = 1
    m.startprob_prior_ = begin.start.prior
    m.startprob_posterior_ = begin.start.concentration.copy()
    m.transmat_prior_ = np.tile(begin.moves.prior, (K, 1))
    m.transmat_posterior_ = begin.moves.concentration.copy()
    m.startprob_, m.transmat_ = begin.start.mean, begin.moves.mean
    m.means_prior_, m.beta_prior_ = np.full((K, 1), x.mean()), np.full(K, BETA0)
    m.means_posterior_, m.beta_posterior_ = e.loc[:, 0].copy(), e.beta.copy()
    m.dof_prior_, m.scale_prior_ = np.full(K, NU0), np.full((K, 1), S0)
    m.dof_posterior_, m.scale_posterior_ = e.nu.copy(), e.S[:, 0, 0].copy()
    m._covars_ = m.scale_posterior_ / m.dof_posterior_[:, None]
    m.fit(x.reshape(-1, 1), [x.shape[1]] * len(x))
    bounds = [-b + 0.5 * LOG_2PI * x.size for b in m.monitor_.history]
    return m, bounds, list(np.diff(times))


# --- the comparison ---------------------------------------------------------------------------


def compare(x: Array, K: int, sweeps: int, timed: int) -> tuple[list[Row], dict[str, Any]]:
    from sklearn.cluster import KMeans

    labels = KMeans(K, n_init=1, random_state=0).fit_predict(x.reshape(-1, 1)).reshape(x.shape)
    ours, oracle, order = with_cvi(x, K, labels, sweeps)
    exact = [oracle.sweep(order) for _ in ours.losses]
    errors = [abs(a / b - 1) for a, b in zip(ours.losses, exact, strict=True)]
    some = np.unique(np.linspace(0, x.shape[1] - 1, 20).astype(int))
    q = ours.guide.posterior
    r = np.stack([q(f"z_{t}").probs.numpy() for t in some], 1)
    means = q("mu").mean.numpy()

    begin = joint_oracle(x, K, labels)
    runs = {name: with_hmmlearn(x, K, begin, sweeps, name) for name in ("log", "scaling")}
    m, theirs, _ = runs["scaling"]
    joint = joint_oracle(x, K, labels)
    bounds = []
    for _ in range(sweeps):
        bounds.append(joint.sweep(("states",)))
        joint.sweep(("start", "moves", "means", "precisions"))
    same = max(abs(a / b - 1) for a, b in zip(theirs, bounds, strict=True))
    their_r = m.predict_proba(x.reshape(-1, 1), [x.shape[1]] * len(x)).reshape(*x.shape, K)
    seconds = {name: float(np.median(s)) for name, (_, _, s) in runs.items()}
    args = (torch.from_numpy(x), K, torch.tensor(x.mean()))
    sweep = sweep_seconds(ours, args, timed)
    case = f"{len(x)} x {x.shape[1]}, K = {K}"
    rows = [
        Row(case, "bound: largest relative difference from the oracle's", max(errors), "<=", 1e-6),
        Row(
            case, "states' marginals: largest difference from the oracle's",
            float(np.abs(r - oracle.r[:, some]).max()), "<=", 1e-6,
        ),
        Row(
            case, "states' marginals: largest difference from hmmlearn's",
            float(np.abs(r - their_r[:, some]).max()),
        ),
        Row(
            case, "states assigned as by hmmlearn",
            float((r.argmax(-1) == their_r[:, some].argmax(-1)).mean()), ">=", 0.99,
        ),
        Row(
            case, "means: largest difference from hmmlearn's",
            float(np.abs(means - m.means_posterior_[:, 0]).max()),
        ),
        Row(case, "negative bound", ours.losses[-1]),
        Row(case, "hmmlearn's bound from the joint oracle's, relative", same),
        Row(case, "a joint q(mu, tau) would gain, nats", ours.losses[-1] + joint.bound()),
        Row(case, "plan, seconds", ours.plan_seconds),
        Row(case, "step(), seconds", ours.step_seconds),
        Row(case, "sweep inside of run(), seconds", sweep),
        *(Row(case, f"iteration of hmmlearn ({n}), seconds", s) for n, s in seconds.items()),
        Row(case, "sweep / iteration of hmmlearn (log, its default)", sweep / seconds["log"], "<=", 2.0),
        Row(case, "sweep / iteration of hmmlearn (scaling)", sweep / seconds["scaling"]),
    ]  # fmt: skip
    return rows, {"losses": ours.losses, "oracle": exact, "hmmlearn": theirs, "seconds": seconds}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--components", type=int)
    options = parser.parse_args()
    small = options.small
    at = machine()
    warm_up()
    sequences = options.sequences or (8 if small else 50)
    length = options.length or (5 if small else 1000)
    K = options.components or (3 if small else 10)
    compare(data(6, 4, 2), 2, 3, 2)  # what the first use costs
    rows, details = compare(
        data(sequences, length, K), K, 6 if small else SWEEPS, 4 if small else 20
    )
    own = any((options.sequences, options.length, options.components))
    report(__file__, rows, at, small or own, versions=versions("hmmlearn"), **details)


if __name__ == "__main__":
    run(main)
