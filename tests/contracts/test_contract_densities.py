"""What a guide's trace is worth: scores, log densities, ELBO classes, particles, importance weights."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from contract_models import CONTINUOUS, NAMES, fitted, scalars, zoo
from pyro import poutine
from pyro.infer import Importance, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.importance import psis_diagnostic, vectorized_importance_weights

from pyro_cvi import CVI, AutoCVI

ELBOS = [Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO]


def estimate(losses, expected, width=4.5):
    losses = torch.as_tensor(losses)
    error = losses.std() / math.sqrt(len(losses)) + 1e-9 * (1 + losses.mean().abs())
    return abs(float(losses.mean()) - expected) < width * float(error)


# --- scores and densities --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_density_of_a_draw_is_that_of_the_blocks(name):
    _, args, guide, _ = fitted(name)
    trace = poutine.trace(guide).get_trace(*args)
    expected = torch.zeros(())
    for block in guide.plan.blocks:
        if block.layout is None or any(guide.plan.latents[s].transform for s in block.sites):
            expected += sum(
                guide.posterior(s).log_prob(trace.nodes[s]["value"]).sum() for s in block.sites
            )
        else:
            z = torch.cat([trace.nodes[s]["value"].reshape(-1) for s in block.sites])
            expected += guide.joint(list(block.sites)).log_prob(z)
    assert float(trace.log_prob_sum()) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_score_parts_belong_to_reparameterised_sites_or_are_densities(name):
    _, args, guide, _ = fitted(name)
    trace = poutine.trace(guide).get_trace(*args)
    trace.compute_score_parts()
    for _, site in trace.iter_stochastic_nodes():
        log_prob, score, entropy = site["score_parts"]
        if site["fn"].has_rsample:
            assert score == 0
            assert entropy is log_prob
        else:
            assert torch.equal(score, log_prob)


def test_no_draw_depends_on_a_parameter():
    _, args, guide, _ = fitted("scalars")
    assert all(not v.requires_grad for v in guide(*args).values())
    assert list(guide.parameters()) == []


def test_a_factor_site_that_is_linear_tilts_the_posterior_exactly():
    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("tilt", 1.5 * z)

    guide = AutoCVI(model)
    loss = CVI(model, guide).step()
    assert float(guide.posterior("z").mean) == pytest.approx(1.5)
    assert loss == pytest.approx(-0.5 * 1.5**2)


def test_a_factor_in_a_plate_counts_once_for_each_element():
    def model():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("data", 3):
            pyro.factor("heads", p.log().expand(3))

    guide = AutoCVI(model)
    loss = CVI(model, guide).step()
    assert float(guide.posterior("p").concentration1) == pytest.approx(4.0)
    assert loss == pytest.approx(math.log(4.0))


def test_a_masked_draw_has_no_density():
    _, args, guide, _ = fitted("scalars")
    with poutine.mask(mask=False):
        trace = poutine.trace(guide).get_trace(*args)
    assert float(trace.log_prob_sum()) == 0


# --- ELBO classes and particles --------------------------------------------------------------------


@pytest.mark.parametrize("elbo", ELBOS)
@pytest.mark.parametrize("name", NAMES)
def test_every_elbo_class_estimates_the_loss(name, elbo):
    if name == "labels" and elbo is TraceMeanField_ELBO:
        pytest.skip("it takes no discrete sites that are not enumerated")
    model, args, guide, cvi = fitted(name)
    options = {"strict_enumeration_warning": False} if elbo is TraceEnum_ELBO else {}
    loss = elbo(num_particles=4, max_plate_nesting=2, **options)
    losses = [loss.loss(model, guide, *args) for _ in range(25)]
    assert estimate(losses, cvi.evaluate_loss(*args))


@pytest.mark.parametrize("nesting", [1, 2, 3, None])
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO, TraceEnum_ELBO])
@pytest.mark.parametrize("name", ["scalars", "families", "nested"])
def test_vectorised_particles(name, elbo, nesting):
    if (name, nesting) == ("nested", 1):
        pytest.skip("the model has two nested plates")
    model, args, guide, cvi = fitted(name)
    options = {"strict_enumeration_warning": False} if elbo is TraceEnum_ELBO else {}
    if nesting is not None:
        options["max_plate_nesting"] = nesting
    loss = elbo(num_particles=60, vectorize_particles=True, **options)
    losses = [loss.loss(model, guide, *args) for _ in range(8)]
    assert estimate(losses, cvi.evaluate_loss(*args), 6)


@pytest.mark.parametrize("name", ["events", "labels"])
def test_vectorised_particles_of_vectors_and_states(name):
    model, args, guide, cvi = fitted(name)
    loss = Trace_ELBO(num_particles=60, vectorize_particles=True, max_plate_nesting=1)
    losses = [loss.loss(model, guide, *args) for _ in range(8)]
    assert estimate(losses, cvi.evaluate_loss(*args), 6)


@pytest.mark.parametrize("name", NAMES)
def test_plates_to_the_left_draw_independent_copies(name):
    _, args, guide, _ = fitted(name)
    single = guide(*args)
    with pyro.plate("chains", 5, dim=-4), pyro.plate("draws", 3, dim=-3):
        trace = poutine.trace(guide).get_trace(*args)
    trace.compute_log_prob()
    for site, value in single.items():
        node = trace.nodes[site]
        batch = node["value"].shape[: node["value"].dim() - node["fn"].event_dim]
        assert batch[:2] == (5, 3)
        assert (
            node["value"].shape[len(batch) :] == value.shape[value.dim() - node["fn"].event_dim :]
        )
        assert node["value"].numel() == 15 * value.numel()
        assert {f.name for f in node["cond_indep_stack"]} >= {"chains", "draws"}
        flat = node["value"].reshape(15, -1)
        assert node["value"].dtype == torch.long or len(flat.unique(dim=0)) == 15


def test_differentiable_loss_and_the_module_form_of_an_elbo():
    model, args, guide, cvi = fitted("scalars")
    loss = cvi.evaluate_loss(*args)
    assert estimate(
        [float(Trace_ELBO().differentiable_loss(model, guide, *args)) for _ in range(20)], loss
    )
    module = Trace_ELBO()(model, guide)
    assert estimate([float(module(*args)) for _ in range(20)], loss)
    assert list(module.parameters()) == []


# --- importance sampling ---------------------------------------------------------------------------


def exact_scalars(x, y):
    design = torch.stack([torch.ones_like(x), x], -1)
    prior = torch.diag(torch.tensor([1.0, 4.0]))
    cov = design @ prior @ design.mT + 0.25 * torch.eye(len(x))
    return float(dist.MultivariateNormal(torch.zeros(len(x)), cov).log_prob(y))


def test_importance_weights_of_an_exact_posterior_are_the_evidence():
    model, args, guide, _ = fitted("scalars")
    weights, _, _ = vectorized_importance_weights(
        model, guide, *args, num_samples=50, max_plate_nesting=1, normalized=False
    )
    expected = exact_scalars(*args)
    assert torch.allclose(weights, torch.tensor(expected))
    assert float(-torch.tensor(CVI(model, guide).evaluate_loss(*args))) == pytest.approx(expected)


def test_importance_weights_of_a_logistic_regression_are_nearly_even():
    """Their tail, exp of a cubic, is what Pareto smoothing measures: it has no bound to test."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w * x), obs=y)

    x = torch.randn(60)
    args = x, torch.bernoulli(torch.sigmoid(x))
    guide = AutoCVI(model)
    CVI(model, guide).run(*args)
    options = {"max_plate_nesting": 1}
    log_w, _, _ = vectorized_importance_weights(
        model, guide, *args, num_samples=1000, normalized=False, **options
    )
    assert float((2 * log_w.softmax(0).log()).exp().sum()) < 1 / 900  # effective draws: 900
    k = psis_diagnostic(model, guide, *args, num_particles=1000, **options)
    assert math.isfinite(k)


def test_importance_draws_with_the_guide_as_proposal():
    model, args = zoo()["scalars"]
    guide = AutoCVI(model)
    CVI(model, guide).step(*args)
    sampler = Importance(scalars, guide=guide, num_samples=20).run(*args)
    assert float(sampler.get_ESS()) == pytest.approx(20.0)
    assert float(sampler.get_log_normalizer()) == pytest.approx(exact_scalars(*args))
