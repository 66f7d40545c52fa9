"""Sparse Gaussian process classification of 100,000 rows in minibatches: how good after how much time?

Covtype (class 2 against the rest, 54 columns, standardised), 100,000 training and 20,000 test rows; 200
inducing inputs, rows at random; RBF kernel with one lengthscale for each column, which all methods learn
with the inducing inputs by Adam at 0.01, in minibatches of 1,000 rows. Only q(u) is fitted differently:

- CVI: `pyro_cvi.gp.GaussianProcess` over Pyro's own `VariationalSparseGP`, the defaults;
- Pyro: the same `VariationalSparseGP`, whitened, with Adam on everything, at two rates;
- GPyTorch: natural gradients for q(u) at two rates, whitened.

The score is the log-loss of the test rows in nats, by 20-point Gauss-Hermite quadrature of the
predictive moments, which each package's own prediction gives; off the clock. Float32. All methods
start at the same kernel and inducing inputs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyro
import pyro.contrib.gp as gp
import torch
from _common import Curve, Row, arguments, follow, load, machine, report, run, versions, warm_up
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyro_cvi import CVI, AutoCVI
from pyro_cvi.gp import GaussianProcess

ROWS, TEST, INDUCING, BATCH = 100_000, 20_000, 200, 1000
RATE = 0.01
TIMES = (10, 30, 60)
LENGTHSCALE = 5.0


def log_loss(f: Tensor, variance: Tensor, y: Tensor) -> float:
    """-mean log E sigmoid(+-f), in nats."""
    x, w = np.polynomial.hermite_e.hermegauss(20)
    nodes, weights = torch.tensor(x, dtype=f.dtype), torch.tensor(w / w.sum(), dtype=f.dtype)
    z = f[:, None] + variance.clamp(min=0).sqrt()[:, None] * nodes
    p = torch.where(y[:, None] > 0, z, -z).sigmoid() @ weights
    return -float(p.log().mean())


class Data:
    """Standardised rows, and inducing inputs."""

    def __init__(self, rows: int, test: int, inducing: int) -> None:
        p = load("covtype")
        X = p.X[:, 1:].float()
        mean, sd = X.mean(0), X.std(0).clamp(min=1e-3)
        self.X, self.y = ((X - mean) / sd)[:rows], p.y[:rows].float()
        self.test = ((p.X_test[:test, 1:].float() - mean) / sd)[:test]
        self.y_test = p.y_test[:test].float()
        torch.manual_seed(0)
        self.inducing = self.X[torch.randperm(rows)[:inducing]].clone()

    def kernel(self) -> Any:
        """Pyro's, at the common start."""
        D = self.X.shape[1]
        return gp.kernels.RBF(D, lengthscale=torch.full((D,), LENGTHSCALE))

    def sparse(self, X: Tensor, y: Tensor) -> Any:
        """Pyro's model for some rows of all."""
        likelihood = gp.likelihoods.Binary()
        return gp.models.VariationalSparseGP(
            X, y, self.kernel(), self.inducing.clone(), likelihood,
            num_data=len(self.X), whiten=True, jitter=1e-4,
        )  # fmt: skip


@torch.no_grad()
def score(data: Data, process: Any) -> float:
    parts = [process(x) for x in data.test.split(2000)]
    f, v = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    return log_loss(f, v, data.y_test)


def with_cvi(data: Data, cap: float, size: int) -> Curve:
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    start = time.perf_counter()
    process = data.sparse(data.X, data.y)
    model = GaussianProcess(process, batch_size=size)
    cvi = CVI(model, AutoCVI(model), optim=pyro.optim.Adam({"lr": RATE}))

    def advance() -> int:
        cvi.step()
        return 1

    def loss() -> float:
        model.store(cvi.guide)
        return score(data, process)

    return follow("CVI", start, cap, advance, loss, first=4.0, growth=1.5)


def with_pyro(data: Data, cap: float, size: int, rate: float) -> Curve:
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    start = time.perf_counter()
    process = data.sparse(data.X[:size], data.y[:size])
    optimiser = torch.optim.Adam(process.parameters(), lr=rate)
    objective = TraceMeanField_ELBO().differentiable_loss

    def advance() -> int:
        index = torch.randint(len(data.X), (size,))
        process.set_data(data.X[index], data.y[index])
        optimiser.zero_grad()
        objective(process.model, process.guide).backward()
        optimiser.step()
        return 1

    name = f"Pyro, Adam at {rate:g}"
    return follow(name, start, cap, advance, lambda: score(data, process), first=4.0, growth=1.5)


def with_gpytorch(data: Data, cap: float, size: int, rate: float) -> Curve:
    import gpytorch

    class Logit(gpytorch.likelihoods.likelihood._OneDimensionalLikelihood):
        def forward(self, f: Tensor, *args: object, **kwargs: object) -> object:
            return torch.distributions.Bernoulli(logits=f)

        def expected_log_prob(self, y: Tensor, q: Any, *args: object, **kwargs: object) -> Tensor:
            sign = 2 * y - 1
            return self.quadrature(lambda f: logsigmoid(sign * f), q)

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(data.inducing))
            strategy = gpytorch.variational.VariationalStrategy(
                self, data.inducing.clone(), q, learn_inducing_locations=True
            )
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.RBFKernel(ard_num_dims=data.X.shape[1])
            base.lengthscale = LENGTHSCALE
            self.covar_module = gpytorch.kernels.ScaleKernel(base)
            self.covar_module.outputscale = 1.0

        def forward(self, x: Tensor) -> object:
            kernel = self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), kernel)

    torch.manual_seed(0)
    start = time.perf_counter()
    model, likelihood = Model(), Logit()
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(data.X))
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(data.X), lr=rate)
    others = torch.optim.Adam(model.hyperparameters(), lr=RATE)

    def advance() -> int:
        index = torch.randint(len(data.X), (size,))
        for optimiser in (natural, others):
            optimiser.zero_grad()
        loss = -objective(model(data.X[index]), data.y[index])
        loss.backward()
        for optimiser in (natural, others):
            optimiser.step()
        return 1

    @torch.no_grad()
    def loss() -> float:
        model.eval()
        parts = [model(x) for x in data.test.split(2000)]
        f = torch.cat([p.mean for p in parts])
        v = torch.cat([p.variance for p in parts])
        model.train()
        return log_loss(f, v, data.y_test)

    name = f"GPyTorch, NGD at {rate:g}"
    return follow(name, start, cap, advance, loss, first=4.0, growth=1.5)


def main() -> None:
    options = arguments(__doc__).parse_args()
    at = machine()
    warm_up()
    sizes, cap, size = (ROWS, TEST, INDUCING), 65.0, BATCH
    rates: tuple[float, ...] = (0.01, 0.003)
    natural: tuple[float, ...] = (0.1, 0.03)
    if options.small:
        sizes, cap, size, rates, natural = (2000, 500, 20), 5.0, 200, rates[:1], natural[:1]
    data = Data(*sizes)
    curves = [with_cvi(data, cap, size)]
    curves += [with_pyro(data, cap, size, rate) for rate in rates]
    curves += [with_gpytorch(data, cap, size, rate) for rate in natural]
    rows = []
    for c in curves:
        for t in TIMES:
            rows.append(Row(c.name, f"test log-loss after {t} s, nats", c.at(t)))
        rows.append(Row(c.name, "steps a second", c.work / c.seconds[-1] if c.seconds else None))
    for t in TIMES:
        best = min(c.at(t) for c in curves[1:])
        apart = curves[0].at(t) - best
        rows.append(Row("CVI", f"its log-loss less the best other's after {t} s", apart, "<=", 0.0))
    report(__file__, rows, at, options.small, versions=versions("gpytorch"))


if __name__ == "__main__":
    run(main)
