"""A VAE whose prior is a learnt mixture of Gaussians: the test ELBO after how much time?

    w ~ Dirichlet(500), mu_k ~ N(0, I), tau_kd ~ Gamma(2, 1);   c_n ~ Categorical(w),
    z_n ~ N(mu_c, 1/tau_c),   x_n ~ Bernoulli(logits = decoder(z_n))

MNIST, 60,000 binary images in minibatches of 200 (a shuffled loader), 20 components, 10 dimensions,
one hidden layer of 400 on both sides, Adam at 1e-3 for the networks of both methods.

- CVI: a `HybridGuide` of the encoder and an `AutoCVI` of w, mu, tau and c, which exact messages move;
- Adam on everything: w, mu and tau are points (their prior counts), c is enumerated (`TraceEnum_ELBO`).

The score is the ELBO of the 10,000 test images in nats each, by one draw of the encoder a row, with c
summed out and the mixture at its posterior mean, or at its points: one code for both, off the clock.
Cluster accuracy: the label of a component is that of most of its images. Float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from _common import (
    RESULTS,
    Curve,
    Row,
    arguments,
    arrays,
    follow,
    machine,
    report,
    run,
    shuffled,
    warm_up,
)
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from torch import Tensor, nn

from pyro_cvi import CVI, AutoCVI, HybridGuide

D, HIDDEN, K, BATCH = 10, 400, 20, 200
ALPHA = 500.0
RATE = 1e-3
TIMES = (15, 30, 60, 120)
Mixture = tuple[Tensor, Tensor, Tensor]


class Nets:
    """Encoder, decoder, and what both methods share of the model."""

    def __init__(self, pixels: int, rows: int) -> None:
        torch.manual_seed(0)
        self.rows = rows
        self.encoder = nn.Sequential(nn.Linear(pixels, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * D))
        self.decoder = nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, pixels))

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale of z_n."""
        loc, log_variance = self.encoder(x).chunk(2, -1)
        return loc, (0.5 * log_variance).clamp(-5, 5).exp()

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        w = pyro.sample("w", dist.Dirichlet(torch.full((K,), ALPHA)))
        with pyro.plate("components", K):
            mu = pyro.sample("mu", dist.Normal(torch.zeros(D), 1.0).to_event(1))
            tau = pyro.sample("tau", dist.Gamma(torch.full((D,), 2.0), 1.0).to_event(1))
        with pyro.plate("images", self.rows, subsample_size=len(x)):
            c = pyro.sample("c", dist.Categorical(w))
            z = pyro.sample("z", dist.Normal(mu[c], tau[c].rsqrt()).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def encode(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        loc, scale = self.codes(x)
        with pyro.plate("images", self.rows, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(loc, scale).to_event(1))

    @torch.no_grad()
    def score(self, x: Tensor, y: Tensor, mixture: Mixture) -> tuple[float, float]:
        """ELBO an image, and cluster accuracy."""
        w, mu, tau = mixture
        loc, scale = self.codes(x)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        z = loc + scale * torch.randn_like(loc)
        torch.set_rng_state(state)
        log_p = _log_mixture(z, w, mu, tau).logsumexp(-1)
        log_q = dist.Normal(loc, scale).log_prob(z).sum(-1)
        fit = dist.Bernoulli(logits=self.decoder(z)).log_prob(x).sum(-1)
        c = _log_mixture(loc, w, mu, tau).argmax(-1)
        hits = [y[c == k].bincount().max() for k in c.unique().tolist()]
        return float((fit + log_p - log_q).mean()), float(torch.stack(hits).sum()) / len(y)


def _log_mixture(z: Tensor, w: Tensor, mu: Tensor, tau: Tensor) -> Tensor:
    parts = dist.Normal(mu, tau.rsqrt()).log_prob(z.unsqueeze(-2)).sum(-1)
    return w.log() + parts


def with_cvi(nets: Nets) -> tuple[Callable[[Tensor], float], Callable[[], Mixture]]:
    """A step, and the mixture now."""
    guide = HybridGuide(nets.model)
    guide.append(AutoCVI(poutine.block(nets.model, hide=["z"])))
    guide.append(nets.encode)
    cvi = CVI(nets.model, guide, optim=pyro.optim.Adam({"lr": RATE}))

    def mixture() -> Mixture:
        w, mu, tau = (guide[0].posterior(n).mean for n in ("w", "mu", "tau"))
        return w, mu, tau

    return cvi.step, mixture


def with_adam(nets: Nets) -> tuple[Callable[[Tensor], float], Callable[[], Mixture]]:
    """A step, and the mixture now."""
    start = 0.5 * torch.randn(K, D)

    def points() -> Mixture:
        w = pyro.param("w_", torch.ones(K) / K, constraint=dist.constraints.simplex)
        mu = pyro.param("mu_", start)
        tau = pyro.param("tau_", torch.ones(K, D), constraint=dist.constraints.positive)
        return w, mu, tau

    def guide(x: Tensor) -> None:
        nets.encode(x)
        w, mu, tau = points()
        pyro.sample("w", dist.Delta(w, event_dim=1))
        with pyro.plate("components", K):
            pyro.sample("mu", dist.Delta(mu, event_dim=1))
            pyro.sample("tau", dist.Delta(tau, event_dim=1))

    loss = TraceEnum_ELBO(max_plate_nesting=1)
    svi = SVI(config_enumerate(nets.model), guide, pyro.optim.Adam({"lr": RATE}), loss)
    return svi.step, points


def watched(
    name: str, make: Callable[[Nets], tuple[Callable[[Tensor], float], Callable[[], Mixture]]],
    x: Tensor, test: Tensor, labels: Tensor, cap: float,
) -> tuple[Curve, float, Nets, Mixture]:  # fmt: skip
    """Scores against time, the accuracy at the end, and what was learnt."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    nets, accuracy = Nets(x.shape[1], len(x)), [math.nan]
    start = time.perf_counter()
    (step, mixture), order = make(nets), shuffled(len(x), BATCH)

    def advance() -> int:
        step(x[next(order)])
        return 1

    def elbo() -> float:
        found, share = nets.score(test, labels, mixture())
        accuracy.append(share)
        return found

    curve = follow(name, start, cap, advance, elbo, first=2.0, growth=1.3)
    return curve, accuracy[-1], nets, mixture()


@torch.no_grad()
def picture(nets: Nets, mixture: Mixture) -> None:
    """The mean image of each component, the most probable first, and seven draws of it."""
    w, mu, tau = mixture
    order = w.argsort(descending=True)
    figure, axes = plt.subplots(8, K, figsize=(K * 0.6, 5.2))
    for column, k in zip(axes.T, order.tolist(), strict=True):
        z = torch.cat([mu[k, None], dist.Normal(mu[k], tau[k].rsqrt()).sample((7,))])
        for panel, image in zip(column, nets.decoder(z).sigmoid(), strict=True):
            panel.imshow(image.reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
        column[0].set_title(f"{float(w[k]):.0%}", fontsize=8)
    figure.tight_layout(pad=0.2)
    figure.savefig(RESULTS / "mixture_vae.png", dpi=90)
    plt.close(figure)


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = machine()
    warm_up()
    d = arrays("mnist")
    torch.manual_seed(0)
    x, test = (torch.from_numpy(d[n]).float().div(255).bernoulli() for n in ("X_train", "X_test"))
    labels = torch.from_numpy(d["y_test"]).long()
    cap = 125.0
    if options.small:
        x, test, labels, cap = x[:2000, ::4], test[:500, ::4], labels[:500], 4.0
    rows = []
    found = {}
    for name, make in (("CVI", with_cvi), ("Adam on everything", with_adam)):
        curve, accuracy, nets, mixture = watched(name, make, x, test, labels, cap)
        if name == "CVI" and not options.small:
            picture(nets, mixture)
        found[name] = curve
        for t in TIMES:
            rows.append(Row(name, f"test ELBO after {t} s, nats an image", curve.at(t)))
        rows.append(Row(name, "cluster accuracy at the end", accuracy))
        rows.append(Row(name, "steps a second", curve.work / curve.seconds[-1]))
    for t in TIMES:
        apart = found["CVI"].at(t) - found["Adam on everything"].at(t)
        rows.append(Row("CVI", f"its test ELBO less Adam's after {t} s", apart, ">=", 0.0))
    report(__file__, rows, at, options.small)


if __name__ == "__main__":
    run(main)
