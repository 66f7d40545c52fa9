"""Poisson-Gamma matrix factorisation of MNIST: how good are the parts after how much time?

Model (paper, appendix "Details of the Gamma Matrix Factorization" and its table of settings), K = 100:

    w_kv ~ Gamma(0.1, 0.3);    z_nk ~ Gamma(0.1, 0.1);    x_nv ~ Poisson(sum_k z_nk w_kv)

for 60,000 images of 784 pixels, in minibatches over images. Both methods have the posterior of
independent Gammas for W and for the z of every image. CVI: `subsample_size`, the defaults except for
`num_samples`. SVI: Adam, one draw a step, means and shapes through softplus, four rates; its local
parameters are kept for every image, as CVI keeps them. Its shapes are kept above 0.1, for its draws
become zero and its gradients NaN otherwise; a rate at which that happens all the same ends there.

Score: reconstruction of 2,000 test images. With W at the posterior mean, their z come from 100
multiplicative updates (Lee and Seung) for the Kullback-Leibler loss, from ones; the loss is that
divergence per pixel, of the pixels' values in 0 ... 255. One code scores all methods, from their W
alone, off the clock. scikit-learn's NMF with the same loss (no prior, no posterior) is there for
orientation. Float32.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _common import Curve, Row, arguments, arrays, follow, machine, report, run, versions, warm_up
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor
from torch.nn.functional import softplus

from pyro_cvi import CVI, AutoCVI

W_PRIOR, Z_PRIOR = (0.1, 0.3), (0.1, 0.1)
BATCH = 600
RATES = (0.003, 0.01, 0.03, 0.1)
SAMPLES = 4
UPDATES = 100
POINTS = {"first": 5.0, "growth": 1.2}
FLOOR = 0.1
"""Of the shapes of SVI's guide, as Pyro's own example of Gamma guides clips them."""
TIMES = (30, 60, 120, 180, 240)


def loss_of(W: Tensor, x: Tensor) -> float:
    """Mean KL(x || z W) a pixel, with the best z that multiplicative updates find."""
    W = W.clamp(min=1e-8)
    z = torch.ones(len(x), len(W))
    total = W.sum(1)
    for _ in range(UPDATES):
        z = z * ((x / (z @ W).clamp(min=1e-8)) @ W.mT) / total
    rate = (z @ W).clamp(min=1e-8)
    return float((torch.special.xlogy(x, x / rate) - x + rate).mean())


def model(x: Tensor, K: int, size: int) -> None:
    with pyro.plate("parts", K, dim=-1):
        W = pyro.sample("W", dist.Gamma(*x.new_tensor(W_PRIOR)).expand([x.shape[1]]).to_event(1))
    with pyro.plate("images", len(x), subsample_size=size, dim=-1) as index:
        z = pyro.sample("z", dist.Gamma(*x.new_tensor(Z_PRIOR)).expand([K]).to_event(1))
        pyro.sample("x", dist.Poisson(z @ W).to_event(1), obs=x[index])


def with_cvi(x: Tensor, test: Tensor, K: int, size: int, cap: float) -> tuple[Curve, CVI]:
    pyro.set_rng_seed(0)
    start = time.perf_counter()
    guide = AutoCVI(model)
    cvi = CVI(model, guide, num_samples=SAMPLES)

    def advance() -> int:
        cvi.step(x, K, size)
        return size

    def loss() -> float:
        return loss_of(guide.posterior("W").mean, test)

    curve = follow("CVI", start, cap, advance, loss, **POINTS)
    return curve, cvi


def with_svi(x: Tensor, test: Tensor, K: int, size: int, cap: float, rate: float) -> Curve:
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    start = time.perf_counter()

    def noise(prior: tuple[float, float], *shape: int) -> Tensor:
        return torch._standard_gamma(torch.full(shape, 4.0)) / 4 * prior[0] / prior[1]

    def gamma(name: str, start: Tensor, index: Tensor | None = None) -> Any:
        mean = pyro.param(f"{name}_mean", start.expm1().log())
        shape = pyro.param(f"{name}_shape", torch.full_like(start, 3.0))
        if index is not None:
            mean, shape = mean[index], shape[index]
        mean = softplus(mean) + 1e-6
        shape = softplus(shape) + FLOOR
        return dist.Gamma(shape, shape / mean).to_event(1)

    first_w, first_z = noise(W_PRIOR, K, x.shape[1]), noise(Z_PRIOR, len(x), K)

    def guide(x: Tensor, K: int, size: int) -> None:
        with pyro.plate("parts", K, dim=-1):
            pyro.sample("W", gamma("W", first_w))
        with pyro.plate("images", len(x), subsample_size=size, dim=-1) as index:
            pyro.sample("z", gamma("z", first_z, index))

    svi = SVI(model, guide, Adam({"lr": rate}), Trace_ELBO())

    def advance() -> int:
        svi.step(x, K, size)
        return size

    def loss() -> float:
        return loss_of(softplus(pyro.param("W_mean")).detach() + 1e-6, test)

    return follow(f"Adam, rate {rate:g}", start, cap, advance, loss, **POINTS)


def with_sklearn(x: Tensor, test: Tensor, K: int, iterations: int) -> tuple[float, float]:
    """Seconds and loss of NMF with the Kullback-Leibler loss."""
    from sklearn.decomposition import NMF

    begin = time.perf_counter()
    m = NMF(
        K, solver="mu", beta_loss="kullback-leibler", init="random", random_state=0,
        max_iter=iterations, tol=0.0,
    )  # fmt: skip
    m.fit(x.numpy())
    seconds = time.perf_counter() - begin
    return seconds, loss_of(torch.from_numpy(m.components_).float(), test)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cap", type=float, default=240.0, help="seconds a method")
    parser.add_argument("--rates", type=int, default=4, help="how many of SVI's rates")
    options = parser.parse_args()
    at = machine()
    warm_up()
    d = arrays("mnist")
    x, test = (torch.from_numpy(d[n]).float() for n in ("X_train", "X_test"))
    K, size, cap = 100, BATCH, options.cap
    if options.small:
        x, K, size, cap = x[:1000], 5, 100, 6.0
    test = test[:2000] if not options.small else test[:100]
    ours, _ = with_cvi(x, test, K, size, cap)
    rates = RATES[-options.rates :] if not options.small else RATES[-1:]
    theirs = [with_svi(x, test, K, size, cap, rate) for rate in rates]
    case = f"{len(x)} x {x.shape[1]}, K = {K}"
    rows = [
        Row(case, "CVI: seconds of a pass", ours.seconds[-1] / ours.work * len(x), "<=", 300.0),
        Row(case, "SVI: seconds of a pass", theirs[0].seconds[-1] / theirs[0].work * len(x)),
    ]
    for t in (*TIMES, cap):
        if t <= cap:
            best = min(c.at(t) for c in theirs if not math.isnan(c.at(t)))
            rows += [
                Row(case, f"loss after {t:g} s, CVI", ours.at(t)),
                Row(case, f"loss after {t:g} s, the best of Adam's", best),
                Row(case, f"CVI / Adam after {t:g} s", ours.at(t) / best, "<=", 1.0),
            ]
    seconds, loss = with_sklearn(x, test, K, 5 if options.small else 40)
    rows += [
        Row(case, "scikit-learn's NMF, 40 iterations: seconds", seconds),
        Row(case, "scikit-learn's NMF: loss", loss),
    ]
    curves = {
        c.name: {"seconds": c.seconds, "losses": c.scores, "failed": c.failed}
        for c in (ours, *theirs)
    }
    report(__file__, rows, at, options.small, versions=versions("scikit-learn"), curves=curves)


if __name__ == "__main__":
    run(main)
