"""Models of several blocks against coordinate ascent by brute force: sweep by sweep, and at the end."""

from functools import cache

import pyro
import pytest
import torch
from cavi_cases import EXAMPLES, Moments, check_marginals, check_state, read_state
from continuous_examples import LOCATIONS
from discrete_examples import MIXTURES_OF_PAIRS
from pair_cases import CATEGORICAL, close, converged, hows
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value

from pyro_cvi import CVI, AutoCVI

DTYPES = [torch.float64, torch.float32]
SWEEPS_ONLY = MIXTURES_OF_PAIRS | {
    "factor analysis, a precision per column", "probabilistic PCA", "Bayesian PCA",
    "a_scalar_scale_of_effects",  # these take hundreds of sweeps to their fixed points
    "factor analysis, einsum", "factor analysis, sum", "factor analysis, W @ z",
    "chain in loops, gamma", "chain in loops, known", "chain, inverse gamma", "chain, gamma",
    "regression_with_a_precision_per_row_weight", "several_outputs_with_a_noise_each",
    "normal_gamma_prior_of_the_weights", "random_walk_with_two_precisions",
    "a_mixture_scaled_by_row", "a_mixture_scaled_as_a_whole", "mixture, mu[z], v[z]",
    "planar mixture, MultivariateNormal", "mixture, Exponential(rate[z])",
    "gamma_precision_of_a_gamma_scale_mixture_of_effects",
    "mixture, Vindex(mu)[..., z]", "mixture, gather",
    "mixture, one hot", "mixture, Poisson(Vindex(rate)[z])",
    "mixture, Bernoulli(Vindex(theta)[z])", "planar mixture, Vindex",
}  # fmt: skip
"""Models of which each sweep is tested, but not the end: too slow, or much like another one."""


def options(example):
    """No joint block; named starting points, the other sites start at their prior mean."""
    if example.init is None:
        return {"max_joint_dim": 0}
    start = init_to_value(values=dict(example.init), fallback=init_to_mean)
    return {"init_loc_fn": start, "max_joint_dim": 0}


def is_discrete(example):
    return any(b.family is CATEGORICAL for b in example.blocks)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_oracle_is_the_expected_log_joint(name):
    """Equal to the model's log joint at points, and affine in the moments of each block."""
    example = EXAMPLES[name]()
    for _ in range(2):
        with pyro.validation_enabled(False), poutine.block():
            trace = poutine.trace(example.model).get_trace(*example.args)
            log_joint = trace.log_prob_sum()
        values = {n: trace.nodes[n]["value"] for b in example.blocks for n in b.sites}
        point = {b.name: b.statistics(values) for b in example.blocks}
        close(
            example.expected(Moments(example.blocks, point)), log_joint, torch.float64, "log joint"
        )
    one, two = (example.means(example.start(seed)) for seed in (0, 1))
    for b in example.blocks:
        middle = tuple(0.5 * (x + y) for x, y in zip(one[b.name], two[b.name], strict=True))
        at = [one[b.name], two[b.name], middle]
        low, high, between = (
            example.expected(Moments(example.blocks, {**one, b.name: m})) for m in at
        )
        close(between, 0.5 * (low + high), torch.float64, f"affine in '{b.name}'")


def case(name, dtype):
    return pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))


def ends_in(dtype):
    """The models whose end is tested: not all of those that are alike, and fewer in float32."""
    alike = {n for n in LOCATIONS if not n.startswith("groups") and not n.endswith("gamma rsqrt")}
    found = [n for n in EXAMPLES if n not in SWEEPS_ONLY | alike]
    if dtype == torch.float64:
        return found
    return [n for n in found if not n.startswith("mixture") and n not in LOCATIONS]


ALIKE = {*LOCATIONS, *MIXTURES_OF_PAIRS, *ends_in(torch.float32)}
SWEEPS = [case(n, torch.float64) for n in EXAMPLES]
SWEEPS += [case(n, torch.float32) for n in EXAMPLES if n not in ALIKE]
ENDS = [case(n, d) for d in DTYPES for n in ends_in(d)]


@pytest.mark.parametrize(("name", "dtype"), SWEEPS, indirect=["dtype"])
def test_a_sweep_is_coordinate_ascent(name, dtype):
    """Each step moves every block to its optimum given the others, from the guide's own start.

    Where there are discrete sites the first step may choose another start: from the second step on.
    """
    example = EXAMPLES[name]()
    guide = AutoCVI(example.model, **options(example))
    cvi = CVI(example.model, guide)
    guide(*example.args)
    if is_discrete(example):
        cvi.step(*example.args)
    state = read_state(example, guide)
    of_site = {n: b.name for b in example.blocks for n in b.sites}
    for _ in range(2):
        loss = cvi.step(*example.args)
        order = [of_site[b.sites[0]] for b in cvi.explain().blocks]
        state = example.swept(state, list(dict.fromkeys(order)))
        check_state(example, guide, state, dtype)
        close(-loss, example.elbo(state), dtype, "the bound")
    assert hows(cvi) == {"exact"}, cvi.explain()


@cache
def fixed_point(name):
    """The oracle's fixed point, the same from several starts."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        example = EXAMPLES[name]()
        seeds = (0,) if name in LOCATIONS else (0, 1)
        ends = [example.fixed_point(example.start(seed)) for seed in seeds]
    finally:
        torch.set_default_dtype(default)
    for end in ends[1:]:
        for b, natural in end.items():
            for x, y in zip(natural, ends[0][b], strict=True):
                close(x, y, torch.float32, "the oracle has one fixed point")
    return ends[0]


def fitted_to_the_end(example):
    """Guide, CVI, loss at the fixed point, and the state of the oracle after the first step."""
    guide = AutoCVI(example.model, **options(example))
    cvi = CVI(example.model, guide)
    losses = [cvi.step(*example.args)]
    first = read_state(example, guide)
    return guide, cvi, converged(guide, cvi, losses, *example.args), first


@pytest.mark.parametrize(("name", "dtype"), ENDS, indirect=["dtype"])
def test_the_fit_ends_at_the_fixed_point(name, dtype):
    """The same posterior and bound as coordinate ascent from starts of its own.

    Mixtures have many fixed points: there the oracle starts where the first step of the fit ends.
    """
    example = EXAMPLES[name]()
    guide, cvi, loss, first = fitted_to_the_end(example)
    close(-cvi.evaluate_loss(*example.args), -loss, dtype, "evaluate_loss")
    if example.free:  # fixed points form a continuum: this is one of them
        end = example.swept(read_state(example, guide))
    elif is_discrete(example):
        end = example.fixed_point(first)
    else:
        end = fixed_point(name)
    check_state(example, guide, end, dtype)
    check_marginals(example, guide, end, dtype)
    close(-loss, example.elbo(end), dtype, "the bound")


def test_a_start_that_is_named_is_kept():
    """init_to_value(values={"z": labels}) numbers the clusters as the labels do."""
    example = EXAMPLES["mixture, mu[z]"]()
    for seed in range(8):
        pyro.set_rng_seed(seed)
        guide = AutoCVI(example.model, **options(example))
        CVI(example.model, guide).run(num_steps=30)
        means = guide.posterior("mu").mean
        assert bool((means.diff() > 0).all()), f"labels of means -4, 0, 4 are permuted: {means}"
