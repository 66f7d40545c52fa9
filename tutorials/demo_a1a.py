"""Bayesian logistic regression on a1a by CVI, and by Pyro's SVI beside it: `make demo`.

The negative bound of a Gaussian q(w) = N(m, V) is KL(q || prior) - sum_n E_q[log p(y_n | w)]. Row n
sees w only through x_n w ~ N(x_n m, x_n V x_n): quadrature in one dimension gives the bound of any
such q, whatever fitted it. Here it judges both.
"""

import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, init_to_mean
from pyro.optim import Adam
from torch.distributions import kl_divergence
from torch.nn.functional import logsigmoid
from tqdm.auto import tqdm

from pyro_cvi import CVI, AutoCVI

SMOKE = "PYRO_CVI_SMOKE" in os.environ
SVI_SECONDS = 1.0 if SMOKE else 60.0
LEARNING_RATE = 0.001  # of 0.001, 0.003, 0.01 and 0.03 the one with the best bound after 60 s
DATA = Path(__file__).resolve().parent / "data" / "a1a.npz"
PICTURE = Path(__file__).resolve().parent.parent / "demo_a1a.png"

# Computed independently of this package: the optimum over all Gaussians, float64.
REFERENCE_BOUND, REFERENCE_BITS = 594.7263, 0.48837


def model(X, y):
    scale = torch.tensor(
        [1e-4] + [2.8072] * (X.shape[1] - 1)
    ).rsqrt()  # precisions; intercept first
    w = pyro.sample("w", dist.Normal(0.0, scale).to_event(1))
    with pyro.plate("rows", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def load(part):
    """The rows of "train" or "test", with a column of ones first."""
    with np.load(DATA, allow_pickle=False) as file:
        X, y = torch.tensor(file[f"X_{part}"]), torch.tensor(file[f"y_{part}"])
    X = torch.cat([torch.ones(len(X), 1), X.to(torch.get_default_dtype())], 1)
    return X, y.to(X.dtype)


def predictors(q, X, order=60):
    """Gauss-Hermite nodes of x_n w under q, one row per x_n, and their weights."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    scale = (X @ q.scale_tril).norm(dim=-1)
    f = (X @ q.loc)[:, None] + scale[:, None] * torch.tensor(nodes)
    return f, torch.tensor(weights / weights.sum())


def negative_bound(q, prior, X, y):
    """KL(q || prior) - sum_n E_q[log p(y_n | w)]."""
    f, weights = predictors(q, X)
    log_likelihood = logsigmoid((2 * y - 1)[:, None] * f) @ weights
    return float(kl_divergence(q, prior) - log_likelihood.sum())


def log_loss_bits(q, X, y):
    """-mean log2 p(y_n), with p the posterior predictive E_q[sigmoid(x_n w)]."""
    f, weights = predictors(q, X)
    p = f.sigmoid() @ weights
    return float(-(y * p.log2() + (1 - y) * (1 - p).log2()).mean())


def make_svi():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoMultivariateNormal(model, init_loc_fn=init_to_mean, init_scale=0.1)
    return SVI(model, guide, Adam({"lr": LEARNING_RATE}), Trace_ELBO())


def run_svi(X, y, bound_of, at_least, goal, seconds):
    """(seconds, steps, bound) along a fit by SVI, from CVI's start, until `goal` or `seconds`.

    The clock stands still while a bound is computed.
    """
    path, spent, steps, due = [], 0.0, 0, 0.0
    start = time.perf_counter()
    svi = make_svi()
    with tqdm(
        total=seconds, desc="SVI", bar_format="{desc}: {bar} {n:.0f}/{total:.0f} s{postfix}"
    ) as bar:
        while True:
            svi.step(X, y)
            steps += 1
            elapsed = spent + time.perf_counter() - start
            if elapsed < min(due, seconds):
                continue
            with torch.no_grad():
                bound = bound_of(svi.guide.get_posterior())
            path.append((elapsed, steps, bound))
            due = elapsed * 1.03
            if elapsed < at_least:
                due = min(due, at_least)  # one bound at the time that CVI took
            bar.set_postfix_str(f"bound {bound:.1f}", refresh=False)
            bar.update(min(elapsed, seconds) - bar.n)
            if elapsed >= seconds or (bound <= goal and elapsed >= at_least):
                return svi, path
            spent, start = elapsed, time.perf_counter()


def draw(cvi_path, svi_path, optimum, title):
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.axhspan(
        optimum, 1.01 * optimum, color="tab:green", alpha=0.35, label="within 1 % of CVI's bound"
    )
    seconds, _, bounds = zip(*svi_path, strict=True)
    axes.plot(
        seconds, bounds, color="tab:orange", label=f"SVI, full Gaussian, Adam {LEARNING_RATE:g}"
    )
    axes.plot(*zip(*cvi_path, strict=True), "o-", color="tab:blue", label="CVI, one mark per step")
    axes.set(xscale="log", xlabel="seconds since the start of the fit (log scale)")
    axes.set(ylabel="negative lower bound (nats)", title=title)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=150)


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a second thread speeds up neither method on a problem of this size
    pyro.set_rng_seed(0)
    X, y = load("train")
    X_test, y_test = load("test")
    prior = dist.MultivariateNormal(
        torch.zeros(X.shape[1]),
        precision_matrix=torch.diag(torch.tensor([1e-4] + [2.8072] * (X.shape[1] - 1))),
    )
    print(f"Bayesian logistic regression on a1a: {len(X):,} rows, {X.shape[1]} weights, "
          f"{len(X_test):,} rows held out\n")  # fmt: skip

    # What torch and Pyro load at first use is on neither clock.
    CVI(model, AutoCVI(model)).run(X[:100], y[:100], num_steps=2)
    make_svi().step(X[:100], y[:100])

    start = time.perf_counter()
    guide = AutoCVI(model)
    cvi = CVI(model, guide)
    before = time.perf_counter() - start
    result = cvi.run(X, y, num_steps=20, progress=True)
    took = time.perf_counter() - start
    times = [before + t for t in result.times]
    optimum, goal = result.losses[-1], 1.01 * result.losses[-1]
    near = next(i for i, loss in enumerate(result.losses) if loss <= goal)
    q = guide.posterior("w")

    print(f"\n{cvi.explain()}\n")
    print(f"CVI stopped after {result.num_steps} steps: {result.reason}")
    print(f"{'':28}{'CVI':>10}{'reference':>12}")
    print(f"{'negative bound (nats)':28}{optimum:10.4f}{REFERENCE_BOUND:12.4f}")
    print(f"{'  the same by quadrature':28}{negative_bound(q, prior, X, y):10.4f}")
    print(
        f"{'test log-loss (bits)':28}{log_loss_bits(q, X_test, y_test):10.5f}{REFERENCE_BITS:12.5f}"
    )
    print(f"{'seconds, with the analysis':28}{took:10.2f}\n")

    svi, path = run_svi(
        X, y, lambda q: negative_bound(q, prior, X, y), took, goal, max(SVI_SECONDS, took)
    )
    same = next(point for point in path if point[0] >= took)
    last = path[-1]
    reached = next((point for point in path if point[2] <= goal), None)
    with torch.no_grad():
        draws = [Trace_ELBO().loss(model, svi.guide, X, y) for _ in range(100)]

    print(
        "\nSVI: AutoMultivariateNormal, Trace_ELBO with one draw a step, Adam with rate "
        f"{LEARNING_RATE:g}.\nIt starts where CVI does: prior mean, standard deviations 0.1. Its "
        "bound is computed by\nquadrature, without sampling noise, and its clock stops meanwhile. "
        "Both use one thread."
    )
    for what, (seconds, steps, bound) in (("in CVI's time", same), ("at its end", last)):
        print(
            f"{what:13}{seconds:8.2f} s {steps:7,} steps   bound {bound:8.2f}, "
            f"{100 * (bound / optimum - 1):5.2f} % above CVI's"
        )
    print(
        "at its end, by Pyro's own estimate over 100 draws: "
        f"{np.mean(draws):.2f}, standard error {np.std(draws) / 10:.2f}"
    )
    cvi_near = f"CVI comes within 1 % of its optimum in {times[near]:.2g} s ({near + 1} steps)"
    if reached:
        factor = reached[0] / times[near]
        print(f"{cvi_near}, SVI in {reached[0]:.2g} s: {factor:.0f} times as long")
        title = f"{cvi_near},\nSVI in {reached[0]:.2g} s ({reached[1]:,} steps)"
    else:
        print(f"{cvi_near}; SVI does not within {last[0]:.0f} s")
        title = f"{cvi_near};\nSVI does not in {last[0]:.0f} s ({last[1]:,} steps)"
    draw(list(zip(times, result.losses, strict=True)), path, optimum, "a1a: " + title)
    print(f"picture: {PICTURE.name}")


if __name__ == "__main__":
    main()
