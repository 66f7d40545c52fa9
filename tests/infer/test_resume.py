"""A fit that is saved, killed and resumed at a random step is the uninterrupted one, to the last bit."""

import io
import random
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_cvi import CVI, AutoCVI, CVIError, HybridGuide

X = torch.randn(60, 3, dtype=torch.float64)
Y = (X[:, 0] - X[:, 1] + 0.3 * X[:, 2] > 0).double()


def logistic(size: int | None = None, plate: str = "data") -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate(plate, 60, subsample_size=size) as i:
        pyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=Y[i])


def mixture(size: int | None = None) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    with pyro.plate("components", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with pyro.plate("data", 60, subsample_size=size) as i:
        z = pyro.sample("z", dist.Categorical(p))
        pyro.sample("x", dist.Normal(mu[z], 1.0), obs=3 * Y[i] + X[i, 0])


def sampled(size: int | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", 60):
        pyro.sample(
            "y", dist.Normal(torch.tanh(torch.outer(X[:, 0], w)).prod(-1), 0.3), obs=X[:, 1]
        )


def gammas(size: int | None = None) -> None:
    with pyro.plate("parts", 3):
        w = pyro.sample("w", dist.Gamma(2.0, 2.0))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Poisson((w * X.abs()).sum(-1)), obs=(2 * X[:, 0].abs()).floor())


def learnt(size: int | None = None) -> None:
    scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
    t = torch.linspace(0, 1, 60)
    kernel = torch.exp(-0.5 * (t[:, None] - t) ** 2 / scale**2) + 1e-4 * torch.eye(60)
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(60), kernel))
    with pyro.plate("data", 60):
        pyro.sample("y", dist.Bernoulli(logits=f), obs=Y)


def alone(model: Callable[..., None], **options: Any) -> Callable[[], CVI]:
    return lambda: CVI(model, AutoCVI(model), pyro.optim.Adam({"lr": 0.05}), **options)


def hybrid() -> CVI:
    encoder = torch.nn.Linear(3, 2)

    def model(size: int | None = None) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 60, subsample_size=20) as i:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=X[i, 0])

    def encode(size: int | None = None) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("data", 60, subsample_size=20) as i:
            loc, log_scale = encoder(X[i]).unbind(-1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()))

    guide = HybridGuide(model)
    guide.append(AutoCVI(poutine.block(model, hide=["z"])))
    guide.append(encode)
    return CVI(model, guide, pyro.optim.Adam({"lr": 0.05}))


FITS: dict[str, tuple[Callable[[], CVI], tuple[Any, ...]]] = {
    "quadrature": (alone(logistic), ()),
    "stored minibatches": (alone(logistic), (20,)),
    "stochastic minibatches": (alone(logistic, minibatch="stochastic"), (20,)),
    "mixture": (alone(mixture), ()),
    "mixture in minibatches": (alone(mixture), (20,)),
    "sampled": (alone(sampled), ()),
    "sampled with a seed": (alone(sampled, seed=3), ()),
    "gammas": (alone(gammas), ()),
    "learnt parameters": (alone(learnt), ()),
    "beside another guide": (hybrid, ()),
}


def state(cvi: CVI) -> dict[str, torch.Tensor]:
    found = {n: t.clone() for n, t in cvi.guide.state_dict().items()}
    store = pyro.get_param_store()
    return found | {n: store[n].detach().clone() for n in store}


@pytest.mark.parametrize("name", FITS)
def test_a_resumed_fit_is_the_uninterrupted_one(name: str) -> None:
    make, args = FITS[name]
    kills = random.Random(0).sample(range(1, 12), 2)

    def fresh() -> CVI:
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        return make()

    whole = fresh()
    losses = [whole.step(*args) for _ in range(12)]
    wanted = state(whole)
    for kill in kills:
        first = fresh()
        for _ in range(kill):
            first.step(*args)
        file = io.BytesIO()
        first.save(file)
        file.seek(0)
        pyro.clear_param_store()
        pyro.set_rng_seed(77)
        second = make()
        second.load(file)
        again = [second.step(*args) for _ in range(12 - kill)]
        assert again == losses[kill:]
        found = state(second)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def factors(x: torch.Tensor) -> None:
    tau = pyro.sample("tau", dist.Gamma(1.0, 1.0))
    with pyro.plate("columns", 6, dim=-1):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", 100, dim=-2):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("cells", 6, dim=-1):
            pyro.sample("x", dist.Normal((z * w).sum(-1), tau.rsqrt()), obs=x)


def test_a_run_after_single_steps_goes_on_as_one_that_was_saved_between_them() -> None:
    """Single steps are not mixed with later sweeps: what a file does not hold is not remembered."""
    torch.manual_seed(0)
    x = torch.randn(100, 2) @ torch.randn(2, 6) + 0.5 * torch.randn(100, 6)
    file = io.BytesIO()
    one = CVI(factors, AutoCVI(factors), seed=0)
    for _ in range(6):
        one.step(x)
    one.save(file)
    file.seek(0)
    other = CVI(factors, AutoCVI(factors), seed=0)
    other.load(file)
    losses = [c.run(x, num_steps=12, tol=0.0).losses for c in (one, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_a_loaded_guide_answers_before_it_has_seen_data() -> None:
    cvi = CVI(logistic, AutoCVI(logistic))
    cvi.run()
    file = io.BytesIO()
    cvi.save(file)
    file.seek(0)
    new = CVI(logistic, AutoCVI(logistic))
    new.load(file)
    assert set(new.guide.state_dict()) == set(cvi.guide.state_dict())
    assert new.evaluate_loss() == cvi.evaluate_loss()
    torch.testing.assert_close(new.guide.median()["w"], cvi.guide.median()["w"])


def test_what_cannot_be_loaded_is_said() -> None:
    file = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, file)
    file.seek(0)
    with pytest.raises(CVIError, match=r"CVI\.save"):
        CVI(logistic, AutoCVI(logistic)).load(file)
    fitted = CVI(learnt, AutoCVI(learnt), pyro.optim.Adam({"lr": 0.1}))
    fitted.step()
    file = io.BytesIO()
    fitted.save(file)
    file.seek(0)
    other = CVI(logistic, AutoCVI(logistic), pyro.optim.Adam({"lr": 0.1}))
    other.load(file)
    with pytest.raises(CVIError, match="'scale'"):
        other.step()
