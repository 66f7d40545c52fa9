"""A structured VAE on pinwheel data: the test ELBO after how much time, and are the arms found?

    w ~ Dirichlet(1), mu_k ~ N(0, 4 I), Lambda_k ~ Wishart(5, I);   c_n ~ Categorical(w),
    z_n ~ N(mu_c, Lambda_c^-1),   x_n ~ N(decoder(z_n))

Five arms of 500 points (M. J. Johnson et al. 2016), 15 components, codes of two dimensions, residual
networks with two hidden layers of 40 on both sides, Adam at 3e-3 for the networks of all methods,
minibatches of 500. The means of the components begin at the same random points.

- CVI, structured: `Recognition`, potentials by the encoder, the rest of q(z) by messages;
- CVI, amortised: the encoder gives q(z) itself, beside the same `AutoCVI` of the mixture;
- SVI, amortised: the same encoder, the mixture a point, c enumerated, Adam on everything.

The score is the ELBO of 2,500 other points in nats each, by four draws of q(z) a row, with c summed
out and the mixture at its posterior mean, or at its point: one code for all, off the clock. An arm is
found if a component has most of its points; purity is the share of points whose component is that of
their arm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from _common import (
    RESULTS,
    Curve,
    Row,
    arguments,
    follow,
    machine,
    report,
    run,
    shuffled,
    warm_up,
)
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

from pyro_cvi import CVI, AutoCVI, HybridGuide, Recognition

ARMS, PER_ARM = 5, 500
K, D, BATCH, RATE = 15, 2, 500, 3e-3
DRAWS = 4
TIMES = (10, 30, 60)
Mixture = tuple[Tensor, Tensor, Tensor]


def pinwheel() -> tuple[Tensor, Tensor]:
    """Points (rows, 2) of unit scale, and the arm of each."""
    arm = torch.arange(ARMS).repeat_interleave(PER_ARM)
    f = torch.randn(len(arm), 2) * torch.tensor([0.3, 0.05]) + torch.tensor([1.0, 0.0])
    angle = 2 * math.pi * arm / ARMS + 0.25 * f[:, 0].exp()
    cos, sin = angle.cos(), angle.sin()
    x = torch.stack([f[:, 0] * cos + f[:, 1] * sin, f[:, 1] * cos - f[:, 0] * sin], -1)
    return x / x.std(), arm


class Net(nn.Module):
    """(loc, log scale): a linear map, the identity at first, and a network on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(D, D)
        nn.init.eye_(self.line.weight)
        nn.init.zeros_(self.line.bias)
        self.net = nn.Sequential(
            nn.Linear(D, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2 * D)
        )
        with torch.no_grad():
            self.net[-1].weight.mul_(0.1)
            self.net[-1].bias[D:] = -1.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = self.net(x).chunk(2, -1)
        return self.line(x) + loc, log_scale.clamp(-6, 3).exp()


class Model:
    """The model, and the encoder that all methods share."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(0)
        self.rows = rows
        self.encoder, self.decoder = Net(), Net()
        self.means = 1.5 * torch.randn(K, D)

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        w = pyro.sample("w", dist.Dirichlet(torch.ones(K)))
        with pyro.plate("components", K):
            mu = pyro.sample("mu", dist.Normal(torch.zeros(D), 2.0).to_event(1))
            lam = pyro.sample("lam", dist.Wishart(torch.tensor(D + 3.0), torch.eye(D)))
        with pyro.plate("points", self.rows, subsample_size=len(x)):
            c = pyro.sample("c", dist.Categorical(w))
            z = pyro.sample("z", dist.MultivariateNormal(mu[c], precision_matrix=lam[c]))
            pyro.sample("x", dist.Normal(*self.decoder(z)).to_event(1), obs=x)

    def recognise(self, x: Tensor) -> dict[str, dist.Distribution]:
        pyro.module("encoder", self.encoder)
        return {"z": dist.Normal(*self.encoder(x)).to_event(1)}

    def encode(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        with pyro.plate("points", self.rows, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(*self.encoder(x)).to_event(1))


@dataclass(frozen=True)
class Method:
    """A step on a minibatch, the mixture now, and what draws the codes of rows."""

    step: Callable[[Tensor], float]
    mixture: Callable[[], Mixture]
    codes: Callable[[Tensor], object]


def with_cvi(m: Model, structured: bool) -> Method:
    own = AutoCVI(
        poutine.block(m.model, hide=["z"]), init_loc_fn=init_to_value(values={"mu": m.means})
    )
    guide = HybridGuide(m.model)
    guide.append(own)
    codes = Recognition(m.model, m.recognise, own) if structured else m.encode
    guide.append(codes)
    cvi = CVI(m.model, guide, optim=pyro.optim.Adam({"lr": RATE}))

    def mixture() -> Mixture:
        w, mu, lam = (own.posterior(n).mean for n in ("w", "mu", "lam"))
        return w, mu, lam

    return Method(cvi.step, mixture, codes)


def with_svi(m: Model) -> Method:
    def points() -> Mixture:
        w = pyro.param("w_", torch.ones(K) / K, constraint=dist.constraints.simplex)
        mu = pyro.param("mu_", m.means)
        tril = pyro.param(
            "tril_", torch.eye(D).repeat(K, 1, 1), constraint=dist.constraints.lower_cholesky
        )
        return w, mu, tril @ tril.mT

    def guide(x: Tensor) -> None:
        m.encode(x)
        w, mu, lam = points()
        pyro.sample("w", dist.Delta(w, event_dim=1))
        with pyro.plate("components", K):
            pyro.sample("mu", dist.Delta(mu, event_dim=1))
            pyro.sample("lam", dist.Delta(lam, event_dim=2))

    loss = TraceEnum_ELBO(max_plate_nesting=1)
    svi = SVI(config_enumerate(m.model), guide, pyro.optim.Adam({"lr": RATE}), loss)
    return Method(svi.step, points, m.encode)


def drawn(codes: Callable[[Tensor], object], x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of rows, and log q of each; the part of a row is that of its vector."""
    trace = poutine.trace(codes).get_trace(x)
    trace.compute_log_prob()
    z = trace.nodes["z"]["value"].detach()
    names = [n for n in ("_Recognition_z", "z") if n in trace.nodes]
    law = trace.nodes[names[0]]
    return z, law["fn"].log_prob(law["value"]).detach().reshape(len(x))


def score(m: Model, method: Method, x: Tensor, arm: Tensor) -> tuple[float, float]:
    """ELBO of a row, and purity."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    w, mu, lam = (t.detach() for t in method.mixture())
    total, votes = 0.0, torch.zeros(len(x), K)
    rows, m.rows = m.rows, len(x)
    for _ in range(DRAWS):
        z, log_q = drawn(method.codes, x)
        with torch.no_grad():
            prior = (
                dist.MultivariateNormal(mu, precision_matrix=lam).log_prob(z.unsqueeze(-2))
                + w.log()
            )
            fit = dist.Normal(*m.decoder(z)).log_prob(x).sum(-1)
            total += float((fit + prior.logsumexp(-1) - log_q).mean()) / DRAWS
            votes += prior.softmax(-1)
    m.rows = rows
    torch.set_rng_state(state)
    c = votes.argmax(-1)
    of_arm = torch.stack([c[arm == a].mode().values for a in range(ARMS)])
    hits = (
        (c == of_arm[arm]).float().mean()
        if len(of_arm.unique()) == ARMS
        else torch.tensor(math.nan)
    )
    return total, float(hits)


def watched(
    name: str, make: Callable[[Model], Method], x: Tensor, test: Tensor, arm: Tensor, cap: float
) -> tuple[Curve, float, Model, Method]:
    """Scores against time; the purity at the end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    m, purity = Model(len(x)), [math.nan]
    start = time.perf_counter()
    method, order = make(m), shuffled(len(x), BATCH)

    def advance() -> int:
        method.step(x[next(order)])
        return 1

    def elbo() -> float:
        found, share = score(m, method, test, arm)
        purity.append(share)
        return found

    curve = follow(name, start, cap, advance, elbo, first=2.0, growth=1.3)
    return curve, purity[-1], m, method


def picture(found: list[tuple[Curve, float, Model, Method]], x: Tensor, arm: Tensor) -> None:
    """Codes in the mixture, and what the mixture makes of itself, for each method."""
    figure, axes = plt.subplots(2, len(found), figsize=(4 * len(found), 8))
    colours = plt.get_cmap("tab20")
    for column, (curve, _, m, method) in zip(axes.T, found, strict=True):
        w, mu, lam = (t.detach() for t in method.mixture())
        z, _ = drawn(method.codes, x)
        column[0].scatter(*z.T, c=arm, s=2, cmap="tab10")
        t = torch.linspace(0, 2 * math.pi, 60)
        circle = torch.stack([t.cos(), t.sin()])
        for k in range(K):
            if w[k] > 0.01:
                edge = mu[k][:, None] + 2 * torch.linalg.cholesky(torch.linalg.inv(lam[k])) @ circle
                column[0].plot(*edge, color=colours(k), lw=2 + 6 * float(w[k]))
        column[0].set_title(f"{curve.name}: codes")
        c = dist.Categorical(w).sample((1500,))
        with torch.no_grad():
            z = dist.MultivariateNormal(mu, precision_matrix=lam).sample((1500,))[
                torch.arange(1500), c
            ]
            y = dist.Normal(*m.decoder(z)).sample()
        column[1].scatter(*y.T, c=[colours(int(k)) for k in c], s=3)
        column[1].set(title="draws of the model", xlim=(-3.5, 3.5), ylim=(-3.5, 3.5))
    figure.tight_layout()
    figure.savefig(RESULTS / "structured_vae.png", dpi=80)
    plt.close(figure)


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = machine()
    warm_up()
    torch.manual_seed(1)
    x, _ = pinwheel()
    test, arm = pinwheel()
    cap = 3.0 if options.small else 62.0
    makers = (
        ("CVI, structured", lambda m: with_cvi(m, structured=True)),
        ("CVI, amortised", lambda m: with_cvi(m, structured=False)),
        ("SVI, amortised", with_svi),
    )
    found = [watched(name, make, x, test, arm, cap) for name, make in makers]
    curves = {curve.name: curve for curve, *_ in found}
    rows = []
    for curve, purity, *_ in found:
        for t in TIMES:
            rows.append(Row(curve.name, f"test ELBO after {t} s, nats a row", curve.at(t)))
        rows.append(Row(curve.name, "purity at the end (nan: an arm has no component)", purity))
        rows.append(Row(curve.name, "steps a second", curve.work / curve.seconds[-1]))
    for t in TIMES:
        apart = curves["CVI, structured"].at(t) - curves["SVI, amortised"].at(t)
        rows.append(
            Row("CVI, structured", f"its test ELBO less SVI's after {t} s", apart, ">=", 0.0)
        )
    if not options.small:
        picture(found, test, arm)
    report(__file__, rows, at, options.small)


if __name__ == "__main__":
    run(main)
