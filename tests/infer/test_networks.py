"""Networks with Bayesian weights: in the last layer, by exact messages; in all layers, by diagonal ones.

Oracles: Bayesian linear regression on fixed features, autograd of the marginal likelihood and of bounds
in closed form, the trapezoid rule, the mean-field optimum of a linear regression.
"""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_cvi import CVI, AutoCVI, CVIError, explain
from pyro_cvi.updates import GaussianBelief

N, D, H = 40, 3, 5


class Note(torch.optim.SGD):
    """Moves nothing and keeps the last gradients."""

    seen: dict = {}  # noqa: RUF012

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.seen[p] = p.grad.clone()
        return super().step(closure)


class LastLayer(PyroModule):
    """Ordinary features, a Bayesian last layer."""

    def __init__(self, kind, outputs=1, noise=None):
        super().__init__()
        self.kind, self.noise = kind, noise
        self.features = PyroModule[nn.Sequential](
            PyroModule[nn.Linear](D, H), PyroModule[nn.Tanh]()
        )
        self.last = PyroModule[nn.Linear](H, outputs)
        zero = torch.zeros(())
        self.last.weight = PyroSample(dist.Normal(zero, 1.5).expand([outputs, H]).to_event(2))
        self.last.bias = PyroSample(dist.Normal(zero, 2.0).expand([outputs]).to_event(1))

    def forward(self, x, y=None, size=None):
        tau = pyro.sample("tau", dist.Gamma(2.0, 1.0)) if self.noise is None else self.noise**-2
        f = self.last(self.features(x))
        with pyro.plate("rows", size or len(x), subsample_size=len(x)):
            if self.kind == "normal":
                scale = torch.as_tensor(tau).rsqrt()
                return pyro.sample("y", dist.Normal(f.squeeze(-1), scale), obs=y)
            if self.kind == "binary":
                return pyro.sample("y", dist.Bernoulli(logits=f.squeeze(-1)), obs=y)
            return pyro.sample("y", dist.Categorical(logits=f), obs=y)


def rows(kind):
    x = torch.randn(N, D)
    y = (2 * x[:, 0]).sin() + x[:, 1] + 0.3 * torch.randn(N)
    if kind == "normal":
        return x, y
    return x, (y > 0).to(x.dtype) if kind == "binary" else (
        y.clamp(-1, 1) * 1.49
    ).round().long() + 1


def design(net, x):
    """Features and a one, (N, H + 1), and the prior precisions of weights and bias."""
    phi = net.features(x)
    return torch.cat([phi, torch.ones_like(phi[:, :1])], -1), torch.tensor([1.5] * H + [2.0]) ** -2


def fitted(net, *data, steps):
    Note.seen = {}
    guide = AutoCVI(net)
    cvi = CVI(net, guide, optim=pyro.optim.PyroOptim(Note, {"lr": 0.0}))
    loss = [cvi.step(*data) for _ in range(steps)][-1]
    return guide, loss


def gradients_agree(bound, net, rtol):
    """What the optimiser was given for the features is the gradient of this negative bound."""
    parameters = list(net.features.parameters())
    assert set(Note.seen) == set(parameters)
    wanted = torch.autograd.grad(-bound, parameters)
    for p, g in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(Note.seen[p], g, rtol=rtol, atol=rtol * float(g.abs().max()))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-8), (torch.float32, 2e-3)])
def test_with_known_noise_one_step_is_bayesian_linear_regression(dtype, rtol):
    """q is the posterior, the loss minus the evidence, the features' gradient that of the evidence."""
    torch.set_default_dtype(dtype)
    net, (x, y) = LastLayer("normal", noise=0.4), rows("normal")
    guide, loss = fitted(net, x, y, steps=1)
    phi, precision = design(net, x)
    law = dist.MultivariateNormal(torch.zeros(N), phi @ (phi / precision).mT + 0.16 * torch.eye(N))
    evidence = law.log_prob(y)
    assert loss == pytest.approx(-float(evidence.detach()), rel=rtol)
    q = guide.joint(["last.weight", "last.bias"])
    exact = precision.diag() + phi.mT @ phi / 0.16
    torch.testing.assert_close(q.precision_matrix, exact.detach(), rtol=rtol, atol=10 * rtol)
    mean = torch.linalg.solve(exact, phi.mT @ y / 0.16).detach()
    torch.testing.assert_close(q.mean, mean, rtol=rtol, atol=10 * rtol)
    gradients_agree(evidence, net, 10 * rtol)


def test_with_unknown_noise_the_features_climb_the_bound_at_its_optimum():
    """q(w) q(tau) is the fixed point of closed forms; the gradient is that of E_q log p(y | w, tau)."""
    net, (x, y) = LastLayer("normal"), rows("normal")
    guide, _ = fitted(net, x, y, steps=60)
    phi, precision = design(net, x)
    fixed, a, b = phi.detach(), 2.0 + N / 2, 1.0
    for _ in range(200):
        V = torch.linalg.inv(precision.diag() + a / b * fixed.mT @ fixed)
        m = a / b * V @ fixed.mT @ y
        b = 1 + 0.5 * float((y - fixed @ m).square().sum() + (fixed.mT @ fixed * V).sum())
    q, tau = guide.joint(["last.weight", "last.bias"]), guide.posterior("tau")
    torch.testing.assert_close(q.mean, m, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(q.covariance_matrix, V, rtol=1e-7, atol=1e-9)
    assert float(tau.rate) == pytest.approx(b, rel=1e-7)
    square = (y - phi @ m).square().sum() + (phi @ V * phi).sum()
    gradients_agree(-0.5 * a / b * square, net, 1e-6)


def test_a_binary_likelihood_has_the_gradient_of_its_quadrature():
    net, (x, y) = LastLayer("binary", noise=1.0), rows("binary")
    guide, _ = fitted(net, x, y, steps=25)
    q = guide.joint(["last.weight", "last.bias"])
    phi, _ = design(net, x)
    sd = (phi @ q.covariance_matrix * phi).sum(-1).sqrt()
    node = torch.linspace(-8.5, 8.5, 801)
    weight = (-0.5 * node.square()).exp()
    f = (2 * y - 1).unsqueeze(-1) * ((phi @ q.mean).unsqueeze(-1) + sd.unsqueeze(-1) * node)
    bound = (nn.functional.logsigmoid(f) @ weight / weight.sum()).sum()
    gradients_agree(bound, net, 1e-6)
    assert {e.how for e in explain(net, x, y).edges} == {"exact", "quadrature"}


def test_a_softmax_likelihood_has_the_gradient_of_its_average_over_draws():
    net, (x, y) = LastLayer("classes", outputs=3, noise=1.0), rows("classes")
    guide, _ = fitted(net, x, y, steps=20)
    assert [b.structure for b in explain(net, x, y).blocks] == ["dense"]
    q = guide.joint(["last.weight", "last.bias"])
    groups = []
    parameters = list(net.features.parameters())
    for _ in range(20):
        w = q.sample((500,))
        f = net.features(x) @ w[:, : 3 * H].reshape(-1, 3, H).mT + w[:, None, 3 * H :]
        total = -dist.Categorical(logits=f).log_prob(y).sum(-1).mean()
        groups.append(torch.autograd.grad(total, parameters))
    for p, parts in zip(parameters, zip(*groups, strict=True), strict=True):
        g = torch.stack(parts)
        off = (Note.seen[p] - g.mean(0)).abs() / (g.std(0) / math.sqrt(len(g)))
        assert float(off.max()) < 5


def test_minibatches_reach_the_posterior_of_all_rows():
    net, (x, y) = LastLayer("normal"), rows("normal")
    net.features.requires_grad_(False)
    whole = AutoCVI(net)
    CVI(net, whole).run(x, y, tol=1e-12)

    guide = AutoCVI(net)
    cvi = CVI(net, guide, forget=0.9)
    for _ in range(40):
        for index in torch.randperm(N).split(20):
            cvi.step(x[index], y[index], N)
    p, q = (g.joint(["last.weight", "last.bias"]) for g in (whole, guide))
    assert float(torch.distributions.kl_divergence(q, p)) < 0.1


def test_features_that_are_held_stay_so():
    """Pyro's store switches the gradient of a parameter on when it first sees it; here off means off."""
    net, (x, y) = LastLayer("normal"), rows("normal")
    net.features.requires_grad_(False)
    before = copy.deepcopy(net.features.state_dict())
    guide = AutoCVI(net)
    CVI(net, guide).run(x, y)
    assert not any(p.requires_grad for p in net.features.parameters())
    guide(x, y)
    cvi = CVI(net, guide, optim=pyro.optim.Adam({"lr": 0.1}))
    cvi.step(x, y)
    after = net.features.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


# --- all weights -----------------------------------------------------------------------------------


def diagonal(model, start="w"):
    """The model with diagonal posteriors of the sites whose names begin so."""
    return poutine.infer_config(
        model, lambda site: {"posterior": "diagonal"} if site["name"].startswith(start) else {}
    )


def regression(x, y=None, size=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("rows", size or len(x), subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def correlated():
    x = torch.randn(60, 4)
    x[:, 1] = 0.6 * x[:, 0] + 0.8 * x[:, 1]
    return x, x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + 0.5 * torch.randn(60)


@pytest.mark.parametrize(("size", "dtype"), [(60, torch.float64), (20, torch.float32)])
def test_the_diagonal_fit_is_the_mean_field_optimum(size, dtype):
    """Of a Gaussian posterior N(m, S^-1): mean m, precisions diag S."""
    torch.set_default_dtype(dtype)
    x, y = correlated()
    model = diagonal(regression)
    guide = AutoCVI(model)
    cvi = CVI(model, guide, num_samples=2)
    for _ in range(200):
        rows = torch.randperm(60)[:size] if size < 60 else slice(None)
        cvi.step(x[rows], y[rows], 60)
    S = torch.eye(4) + x.mT @ x / 0.25
    q = guide.posterior("w")
    mean = torch.linalg.solve(S, x.mT @ y / 0.25)
    # What is left of the noise of steps of size 0.1 (1 + t / 20)^-0.7, in standard deviations.
    assert float(((q.mean - mean) * S.diagonal().sqrt()).abs().max()) < 0.5
    torch.testing.assert_close(q.variance * S.diagonal(), torch.ones(4), rtol=0.25, atol=0.0)


def test_the_report_says_that_a_posterior_was_asked_for():
    x, y = correlated()
    report = explain(diagonal(regression), x, y)
    assert [(e.factor, e.how) for e in report.edges] == [("w", "exact"), ("y", "sampled")]
    assert report.edges[1].reason == "its posterior is to be diagonal, and its messages are sampled"
    (block,) = report.blocks
    assert (block.structure, block.size, block.reason) == ("diagonal", 4, "as infer asks for")
    assert {e.how for e in explain(regression, x, y).edges} == {"exact"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bent_step_is_its_formula_and_stays_positive(dtype):
    belief = GaussianBelief(torch.zeros(3, 1, dtype=dtype), torch.full((3, 1, 1), 2.0, dtype=dtype))
    target = torch.tensor([2.5, 0.3, -7.0], dtype=dtype)
    slope = torch.tensor([[1.0], [-1.0], [1e6]], dtype=dtype)
    moved, step = belief.bent([slope, -0.5 * target.reshape(3, 1, 1)], 0.3, 4.0)
    change = 0.3 * (target - 2.0)
    precision = 2.0 + change + change.square() / 4
    torch.testing.assert_close(moved.precision.reshape(-1), precision)
    torch.testing.assert_close(moved.loc[:2], 0.3 * slope[:2] / precision[:2, None])
    assert float(moved.loc[2]) == pytest.approx(
        4 / math.sqrt(2)
    )  # at most four standard deviations
    assert step.improper == 1
    wild = belief.bent([slope, torch.full((3, 1, 1), 1e12, dtype=dtype)], 0.3, 4.0)[0]
    assert bool((wild.precision == 8.0).all())


def test_a_step_costs_what_its_draws_do():
    """Runs of the network in a step on a minibatch: one to see it, one to read it, one for each draw."""
    runs = []

    class Counted(nn.Linear):
        def forward(self, x):
            runs.append(len(x))
            return super().forward(x)

    net = PyroModule[Counted](4, 1)
    net.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))
    net.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def model(x, y):
        f = net(x)
        with pyro.plate("rows", 60, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(f.squeeze(-1), 0.5), obs=y)

    model = diagonal(model, start="")
    x, y = correlated()
    cvi = CVI(model, AutoCVI(model), num_samples=2)
    for i in range(
        5
    ):  # the analysis is checked in the first steps, the second, fourth, eighth, ...
        cvi.step(x[10 * i : 10 * i + 10], y[10 * i : 10 * i + 10])
    runs.clear()
    cvi.step(x[50:], y[50:])
    assert len(runs) <= 2 + 2


def test_scales_and_noise_beside_diagonal_weights_have_exact_messages():
    """Given draws of the weights q(noise) is Gamma(a + N / 2, .); weights of the layer share a scale."""
    x, y = correlated()

    def model(x, y):
        scale = pyro.sample("scale", dist.Gamma(3.0, 3.0))
        noise = pyro.sample("noise", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(4), scale.rsqrt()).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal((x @ w).tanh() + x @ w, noise.rsqrt()), obs=y)

    model = diagonal(model)
    guide = AutoCVI(model)
    cvi = CVI(model, guide, num_samples=4)
    for _ in range(80):
        cvi.step(x, y)
    w = guide.posterior("w")
    cvi.step(x, y)
    how = {(e.factor, e.site): e.how for e in cvi.explain().edges}
    assert how["w", "scale"] == how["y", "noise"] == how["w", "w"] == "exact"
    q = guide.posterior("scale")
    expected = 3 + 0.5 * float((w.mean**2 + w.variance).sum())
    assert float(q.concentration) == pytest.approx(5.0)
    assert float(q.rate) == pytest.approx(expected, rel=1e-6)
    assert float(guide.posterior("noise").concentration) == pytest.approx(2 + 30, rel=0.01)


@pytest.mark.parametrize(
    ("prior", "match"),
    [(dist.Gamma(1.0, 1.0), "a Gamma"), (dist.Bernoulli(0.5), "a Bernoulli")],
)
def test_a_diagonal_posterior_needs_a_gaussian_one(prior, match):
    def model():
        w = pyro.sample("w", prior)
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(CVIError, match=f"'w'.*{match}"):
        explain(diagonal(model))


def test_a_diagonal_posterior_is_of_all_elements():
    def model(x):
        with pyro.plate("rows", 10, subsample_size=len(x)):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(w, 1.0), obs=x)

    with pytest.raises(CVIError, match="'w'.*subsampled plate 'rows'"):
        explain(diagonal(model), torch.zeros(5))
