"""Fits that are asked in `torch.inference_mode`, as loops of training do, go on as if by `no_grad`."""

import io
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from test_resume import FITS

from pyro_cvi import CVI, AutoCVI


def evaluated(cvi: CVI, args: tuple[Any, ...]) -> list[float]:
    return [cvi.evaluate_loss(*args)]


def asked(cvi: CVI, args: tuple[Any, ...]) -> list[float]:
    """All that a guide can be asked, of a fit that was loaded and holds nothing made before."""
    file = io.BytesIO()
    cvi.save(file)
    file.seek(0)
    cvi.load(file)
    found = list(cvi.guide(*args).values())
    own = cvi.guide if isinstance(cvi.guide, AutoCVI) else cvi.guide[0]
    found += [own.posterior(s).sample() for s in own.plan.latents]
    if own is cvi.guide:
        found += [*own.median().values(), *own.quantiles([0.1]).values()]
    return [float(x.double().sum()) for x in found]


@pytest.mark.filterwarnings("ignore:.*have been in no minibatch yet")
@pytest.mark.parametrize("ask", [evaluated, asked])
@pytest.mark.parametrize("name", FITS)
def test_a_fit_goes_on(name: str, ask: Callable[..., list[float]]) -> None:
    make, args = FITS[name]
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        cvi, values = make(), []
        with mode():  # the first sight of the model too
            values += evaluated(cvi, args)
        for _ in range(2):
            values.append(cvi.step(*args))
            with mode():
                values += ask(cvi, args)
        found.append([*values, cvi.step(*args)])
    assert found[0] == found[1]


def test_data_may_be_made_in_it_too() -> None:
    """As batches of a DataLoader are: the loss, the posterior and steps are those of the same data."""

    def model(rows: dict[str, torch.Tensor]) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(rows["x"])):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(w * rows["x"] + z, 1.0), obs=rows["y"])

    rows, found = {"x": torch.randn(20), "y": torch.randn(20)}, []
    for mode in (torch.no_grad, torch.inference_mode):
        pyro.set_rng_seed(1)
        cvi = CVI(model, AutoCVI(model))
        with mode():
            made = {n: v + 0.0 for n, v in rows.items()}
            assert made["x"].is_inference() == (mode is torch.inference_mode)
            values = [*cvi.run(made, num_steps=3).losses, cvi.evaluate_loss(made)]
            new = cvi.local_posteriors(made, plates=["rows"])
            values += new.posterior("z").probs.reshape(-1).tolist()
        found.append([*values, cvi.step(rows)])
    assert found[0] == found[1]
