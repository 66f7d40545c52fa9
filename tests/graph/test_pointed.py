"""Averages over fixed points: values, gradients, weights, vectorised or not, and refinement."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_cvi.estimators.nodes import fixed_nodes
from pyro_cvi.graph import Evaluator
from pyro_cvi.graph.pointed import LogDensity, PointFactor, refine
from pyro_cvi.graph.prepared import prepare
from pyro_cvi.updates import GaussianBelief

X = torch.linspace(-1, 1, 7, dtype=torch.float64)


def opaque(x):
    """A function that has no rule: nothing but its values and gradients are known."""
    return torch.special.log_ndtr(x) + torch.sinc(x)


def vectorised(y, scale=1.0, mask=True):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(y)), poutine.scale(scale=scale), poutine.mask(mask=mask):
        pyro.sample("y", dist.Normal(opaque(a * X), 0.5 + s), obs=y)


def indexed(y):
    """Event elements one by one, as users write it, and a site per row."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    for i in range(len(y)):
        pyro.sample(f"y_{i}", dist.Normal(opaque(w[0] * X[i]) + w[1] ** 2, 0.5), obs=y[i])


def branching(y):
    """What torch.vmap cannot run: a write into a tensor that was not made of the sites."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    mean = torch.zeros(len(y))
    for i in range(len(y)):
        mean[i] = opaque(w[0] * X[i]) + w[1]
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def evaluator_of(model, *args, **kwargs):
    prepared = prepare(model, args, kwargs, 1000)
    plan = prepared.plan
    assert not plan.sampled_sites()
    (block,) = plan.blocks
    d = block.layout.width
    g = torch.Generator().manual_seed(3)
    root = 0.3 * torch.randn(d, d, generator=g) + torch.eye(d)
    belief = GaussianBelief(0.3 * torch.randn(1, d, generator=g), (root @ root.mT)[None])
    return Evaluator(plan, {block.name: belief}), block, belief


def log_joint(model, values, args, kwargs):
    """Of an ordinary run at the sites' values, observed sites only; Pyro's own arithmetic."""
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args, **kwargs)
    trace.compute_log_prob(lambda name, site: name.startswith("y"))
    return sum(s["log_prob_sum"] for n, s in trace.nodes.items() if n.startswith("y"))


def by_hand(model, evaluator, block, belief, args, kwargs):
    """sum_s w_s log p at the nodes, point by point."""
    (f,) = (f for f in evaluator.plan.factors if isinstance(f, PointFactor))
    x, w = fixed_nodes(f.dims, f.level, f.seed, few=f.few)
    latents = evaluator.plan.latents
    at = torch.cat([block.layout.position[s].reshape(-1) for s in f.sites])
    tril = torch.linalg.cholesky(belief.cov[0][at[:, None], at])
    total = 0.0
    for point, weight in zip(x, w, strict=True):
        z = belief.loc[0, at] + tril @ point
        values, start = {}, 0
        for s in f.sites:
            n = block.layout.position[s].numel()
            values[s] = latents[s].constrained(z[start : start + n].reshape(latents[s].shape))
            start += n
        total += float(weight) * float(log_joint(model, values, args, kwargs))
    return f, total


CASES = {
    "plate": (vectorised, {}),
    "scaled": (vectorised, {"scale": 3.0}),
    "masked": (vectorised, {"mask": torch.arange(7) % 3 > 0}),
    "all masked": (vectorised, {"mask": torch.zeros(7, dtype=torch.bool)}),
    "indexed": (indexed, {}),
    "written": (branching, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_value_is_the_sum_over_runs_of_the_model(name):
    model, kwargs = CASES[name]
    args = (torch.sin(3 * X),)
    evaluator, block, belief = evaluator_of(model, *args, **kwargs)
    f, wanted = by_hand(model, evaluator, block, belief, args, kwargs)
    assert float(evaluator.factor(f).detach()) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["plate", "indexed", "written"])
def test_messages_are_the_gradients_of_the_value(name):
    model, kwargs = CASES[name]
    evaluator, block, belief = evaluator_of(model, torch.sin(3 * X), **kwargs)
    g_loc, g_cov = evaluator.message(block)

    def expected(loc, cov):
        evaluator.set(block.name, GaussianBelief(loc, torch.linalg.inv(cov)))
        return float(evaluator.expected(block))

    step = 1e-5
    for i in range(belief.loc.shape[-1]):
        e = torch.zeros_like(belief.loc)
        e[0, i] = step
        slope = (expected(belief.loc + e, belief.cov) - expected(belief.loc - e, belief.cov)) / 2
        assert float(g_loc[0, i]) == pytest.approx(slope / step, rel=1e-5, abs=1e-6)
    c = torch.ones_like(belief.cov) + torch.eye(belief.loc.shape[-1])
    slope = (
        expected(belief.loc, belief.cov + step * c) - expected(belief.loc, belief.cov - step * c)
    ) / (2 * step)
    assert float((g_cov * c).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_models_that_vmap_cannot_run_are_run_point_by_point():
    for model, vectorises in ((vectorised, True), (indexed, True), (branching, False)):
        evaluator, _, _ = evaluator_of(model, torch.sin(3 * X))
        (f,) = (f for f in evaluator.plan.factors if isinstance(f, PointFactor))
        evaluator.factor(f)
        assert f.density._vectorises is vectorises


def test_float32_is_near_float64():
    y = torch.sin(3 * X)
    evaluator, block, _ = evaluator_of(vectorised, y)
    wanted = float(evaluator.expected(block))
    torch.set_default_dtype(torch.float32)
    evaluator, block, belief = evaluator_of(lambda y: indexed_like(y), y.float())
    assert belief.loc.dtype is torch.float32
    assert math.isfinite(float(evaluator.expected(block)))
    assert math.isfinite(wanted)


def indexed_like(y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    s = pyro.sample("s", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(opaque(a * X.float()), 0.5 + s), obs=y)


def test_other_points_tell_how_good_the_average_is():
    evaluator, _, _ = evaluator_of(indexed, torch.sin(3 * X))
    (f,) = (f for f in evaluator.plan.factors if isinstance(f, PointFactor))
    found = refine(evaluator)
    more = sum(float(f.checked()(*evaluator.moments).detach()) for _ in range(1))
    assert found.error == pytest.approx(abs(float(evaluator.factor(f).detach()) - more), abs=1e-9)
    assert f.refined().count > f.count
    assert f.checked().count > f.count


def test_an_exact_plan_needs_no_refinement():
    def model(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    evaluator, _, _ = evaluator_of(model, torch.tensor(1.0))
    assert refine(evaluator) is None


def test_the_density_of_many_points_is_that_of_each():
    prepared = prepare(indexed, (torch.sin(3 * X),), {}, 1000)
    density = LogDensity(prepared.call, frozenset(f"y_{i}" for i in range(7)))
    w = torch.randn(5, 2)
    together = density({"w": w})
    torch.testing.assert_close(together, torch.stack([density.at({"w": v}) for v in w]))
