"""A step on a minibatch, or after parameters were learnt, runs the model once, on symbols.

The oracle is the same fit with every step analysed from an ordinary run on: one posterior, one error.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_cvi import CVI, AutoCVI, CVIError, HybridGuide, Recognition
from pyro_cvi.graph import prepared

STEPS = 14
"""Analyses are checked at steps 0, 1, 2, 4, 8: most of these are not."""


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Case(NamedTuple):
    """A model, the arguments of each step, the sites to compare, and what an error says."""

    model: Callable[..., Any]
    batches: Callable[[int], tuple[Any, ...]]
    sites: tuple[str, ...]
    error: str = ""


X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2).sin()
Y = X[:, 0] - 0.4 * X[:, 1] + 0.3 * torch.linspace(-3, 3, 12, dtype=torch.float64).cos()


def _rows(step: int) -> Tensor:
    return (torch.arange(4) * 3 + step) % 12


def learnt_scale() -> Case:
    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    return Case(model, lambda step: (X, Y), ("w",))


def local_sites_below_others() -> Case:
    """Rows that no batch held before start at a prior that hangs on a site and on a parameter."""

    def model(i: Tensor) -> None:
        shift = pyro.param("shift", torch.tensor(0.2))
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        tau = pyro.sample("tau", dist.Gamma(3.0, 1.0))
        with pyro.plate("rows", 12, subsample=i):
            b = pyro.sample("b", dist.Normal(mu + shift, tau.rsqrt()))
            rate = pyro.sample("rate", dist.Gamma(tau + 1.0, 2.0))
            pyro.sample("y", dist.Normal(b, 0.5), obs=Y[i])
            pyro.sample("n", dist.Poisson(rate), obs=Y[i].abs().round())

    return Case(model, lambda step: (_rows(step),), ("mu", "tau", "b", "rate"))


def bounds_that_are_learnt() -> Case:
    """The bijection of the site is another one at each step."""

    def model() -> None:
        top = pyro.param("top", torch.tensor(2.0), constraint=dist.constraints.positive)
        u = pyro.sample("u", dist.Uniform(0.0, top))
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(u, 1.0), obs=Y)

    return Case(model, lambda step: (), ("u",))


def bijections_of_vectors() -> Case:
    def model(i: Tensor) -> None:
        s = pyro.sample("s", dist.HalfCauchy(torch.ones(2)).to_event(1))
        u = pyro.sample("u", dist.Uniform(torch.zeros(2) - 1.0, 3.0).to_event(1))
        with pyro.plate("rows", 12, subsample=i):
            pyro.sample("y", dist.Normal(u[0], 1.0), obs=Y[i])
            pyro.sample("x", dist.Normal(u[1], 1.0), obs=X[i, 0])
            pyro.sample("n", dist.Normal(0.0, s).to_event(1), obs=X[i])

    return Case(model, lambda step: (_rows(step),), ("s", "u"))


def prior_of_another_family() -> Case:
    def model(step: int) -> None:
        shift = pyro.param("shift", torch.tensor(0.1))
        law = dist.Normal(0.0, 1.0) if step < 6 else dist.Laplace(0.0, 0.2)
        z = pyro.sample("z", law)
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=Y)

    return Case(model, lambda step: (step,), ("z",))


def priors_that_change() -> Case:
    """A constant that is another one, in place, and a weight that is annealed."""
    loc = torch.zeros(2)

    def model(step: int) -> None:
        shift = pyro.param("shift", torch.tensor(0.1))
        loc.fill_(0.1 * step)
        a = pyro.sample("a", dist.Normal(loc, 1.0).to_event(1))
        b = pyro.sample("b", dist.Gamma(2.0 + step, 1.0))
        with poutine.scale(scale=0.1 * (step + 1)):
            c = pyro.sample("c", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(X @ a + c + shift, 1.0), obs=Y)
            pyro.sample("n", dist.Poisson(b), obs=Y.abs().round())

    return Case(model, lambda step: (step,), ("a", "b", "c"))


def a_factor_more() -> Case:
    def model(step: int) -> None:
        shift = pyro.param("shift", torch.tensor(0.1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=Y)
        if step > 6:
            pyro.sample("again", dist.Normal(z, 0.1), obs=torch.tensor(2.0))

    return Case(model, lambda step: (step,), ("z",))


def batches_of_several_sizes() -> Case:
    def model(i: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", 12, subsample=i):
            pyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=(Y[i] > 0).double())

    return Case(
        model, lambda step: (torch.arange(5 * (step % 3), min(5 * (step % 3) + 5, 12)),), ("w",)
    )


def masked_local_sites() -> Case:
    def model(i: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", 12, subsample=i), poutine.mask(mask=i != 5):
            b = pyro.sample("b", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(b, 0.5), obs=Y[i])

    return Case(model, lambda step: (_rows(step),), ("mu", "b"))


def data_that_are_not_finite() -> Case:
    def model(i: Tensor, y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", 12, subsample=i):
            pyro.sample("y", dist.Normal(mu, 0.5), obs=y[i])

    def batch(step: int) -> tuple[Any, ...]:
        return _rows(step), Y if step < 10 else torch.full_like(Y, torch.nan)

    return Case(model, batch, ("mu",), "NaN or infinite")


def states_more() -> Case:
    def model(step: int) -> None:
        shift = pyro.param("shift", torch.tensor(0.1))
        with pyro.plate("rows", 12):
            c = pyro.sample("c", dist.Categorical(torch.ones(2 if step < 6 else 3)))
            pyro.sample("y", dist.Normal(c + shift, 1.0), obs=Y)

    return Case(model, lambda step: (step,), (), "3 states")


def a_latent_that_is_observed_now() -> Case:
    def model(step: int) -> None:
        shift = pyro.param("shift", torch.tensor(0.1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("w", dist.Normal(z, 1.0), obs=None if step < 6 else torch.tensor(1.0))
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=Y)

    return Case(model, lambda step: (step,), ("z",), "gone: ['w']")


def a_site_that_is_observed_no_more() -> Case:
    def model(step: int) -> None:
        shift = pyro.param("shift", torch.tensor(0.1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 12):
            pyro.sample("y", dist.Normal(z + shift, 1.0), obs=Y if step < 6 else None)

    return Case(model, lambda step: (step,), ("z",), "new: ['y']")


def other_data_for_all_rows() -> Case:
    """Whole data after minibatches: the plan of one must not be taken for that of the other."""

    def model(y: Tensor, i: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", 12, subsample=i):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])

    def batch(step: int) -> tuple[Any, ...]:
        return (Y, _rows(step)) if step < 9 else (Y + 5 * (step % 2), torch.arange(12))

    return Case(model, batch, ("mu",))


def a_model_that_cannot_run_on_symbols() -> Case:
    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        if type(w) is not Tensor:
            raise TypeError("not a plain tensor")
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    return Case(model, lambda step: (X, Y), ())


CASES = [
    learnt_scale, local_sites_below_others, bounds_that_are_learnt, bijections_of_vectors,
    prior_of_another_family,
    priors_that_change, a_factor_more, batches_of_several_sizes, masked_local_sites,
    data_that_are_not_finite, states_more, a_latent_that_is_observed_now,
    a_site_that_is_observed_no_more, other_data_for_all_rows, a_model_that_cannot_run_on_symbols,
]  # fmt: skip


def _fit(case: Case) -> tuple[list[Tensor], list[float], str]:
    """Posterior and parameters, the losses, and the error that ended the fit."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    cvi = CVI(case.model, AutoCVI(case.model), optim=pyro.optim.Adam({"lr": 0.05}))
    losses, said = [], ""
    try:
        for step in range(STEPS):
            losses.append(cvi.step(*case.batches(step)))
    except CVIError as error:
        said = str(error)
    found = [x for n in case.sites for x in _moments(cvi.guide, n)]
    return [*found, *(p.detach() for _, p in sorted(pyro.get_param_store().items()))], losses, said


def _moments(guide: Any, site: str) -> list[Tensor]:
    law = guide.posterior(site)
    return [law.mean, law.variance]


@pytest.mark.filterwarnings("ignore::pyro_cvi.CVIWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_symbolic_run_alone_gives_what_an_ordinary_one_gives(
    case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, losses, said = _fit(case())
    monkeypatch.setattr(prepared, "_prepared_like", lambda *args: None)
    wanted, known, error = _fit(case())
    assert said == error
    assert case().error in said if case().error else not said
    assert len(losses) == len(known)
    if not case().sites:  # draws, or random starts, whose numbers are others
        return
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(known), rtol=1e-9, atol=1e-9)
    for x, y in zip(values, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "case", [learnt_scale, local_sites_below_others, bijections_of_vectors],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_an_analysis_that_repeats_runs_the_model_once(case: Callable[[], Case]) -> None:
    model, batches, *_ = case()
    runs = [0]

    def counted(*args: Any) -> None:
        runs[0] += 1
        model(*args)

    pyro.clear_param_store()
    cvi = CVI(counted, AutoCVI(counted), optim=pyro.optim.Adam({"lr": 0.05}))
    for step in range(9):
        cvi.step(*batches(step))
    for step in (9, 10, 11):
        before = runs[0]
        cvi.step(*batches(step))
        assert runs[0] == before + 1


def test_recognition_of_batch_after_batch_runs_the_surrogate_on_symbols_alone() -> None:
    runs = [0]

    def model(x: Tensor) -> None:
        runs[0] += 1
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("rows", 12, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(z, 0.1), obs=x)

    own, guide = AutoCVI(poutine.block(model, hide=["z"])), HybridGuide(model)
    guide.append(own)
    guide.append(Recognition(model, lambda x: {"z": dist.Normal(x, 0.3)}, own))
    cvi = CVI(model, guide)
    for _ in range(9):
        cvi.step(Y[:4])
    before = runs[0]
    cvi.step(Y[:4])
    assert runs[0] == before + 3  # the plates of the rows, the surrogate, the model given the draw


def test_whole_data_by_turns_have_the_posterior_of_each() -> None:
    model, *_ = other_data_for_all_rows()
    every, cvi = torch.arange(12), CVI(model, AutoCVI(model))
    for step in range(9):
        cvi.step(Y, _rows(step))
    for shift in (0.0, 5.0, 0.0, 5.0, 0.0):
        cvi.step(Y + shift, every)
        wanted = (Y + shift).sum() / (12 + 1 / 9)
        torch.testing.assert_close(cvi.guide.posterior("mu").mean, wanted)


def test_support_and_pickle_after_a_fit_is_loaded() -> None:
    class Local(dist.Normal):
        """A law that no module has at its top level."""

    def model(i: Tensor) -> None:
        s = pyro.sample("s", dist.HalfCauchy(1.0))
        u = pyro.sample("u", dist.Uniform(0.0, 3.0))
        with pyro.plate("rows", 12, subsample=i):
            pyro.sample("y", Local(u, 1.0), obs=Y[i])
            pyro.sample("n", dist.Normal(0.0, s), obs=Y[i])

    cvi = CVI(model, AutoCVI(model))
    for step in range(5):
        cvi.step(_rows(step))
    supports = [cvi.guide.posterior(n).support for n in ("s", "u")]
    pickle.dumps(cvi.guide)
    file = io.BytesIO()
    cvi.save(file)
    file.seek(0)
    again = CVI(model, AutoCVI(model))
    again.load(file)
    again.step(_rows(5))
    assert [repr(again.guide.posterior(n).support) for n in ("s", "u")] == [
        repr(x) for x in supports
    ]
