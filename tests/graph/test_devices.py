"""Every tensor that the package makes says where: torch's default device need not be that of the data.

No machine that tests the package has a second device, so this is read off the source: a factory of torch
without `device=` gives a tensor on the default device, and this meets tensors on another one.
"""

import ast
import contextlib
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_cvi
from pyro_cvi import CVI, AutoCVI

FACTORIES = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint",
    "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
FOLDER = Path(pyro_cvi.__file__).parent


def homeless(source: str) -> list[int]:
    """The lines on which a factory of torch is called without a device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and "device" not in {k.arg for k in node.keywords}
    ]


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda p: str(p.relative_to(FOLDER))
)
def test_every_tensor_says_where_it_is(path):
    assert homeless(path.read_text(encoding="utf-8")) == []


def test_a_tensor_without_a_place_is_found():
    assert homeless("x = torch.zeros(3)\ny = torch.zeros(3, device=x.device)\n") == [1]


def test_a_default_device_changes_nothing():
    """torch then puts a mode around all its functions, on latents of the algebra too."""
    values = []
    for device in (None, torch.device("cpu")):
        pyro.set_rng_seed(1)
        with device or contextlib.nullcontext():
            cvi = CVI(model, AutoCVI(model))
            values.append([cvi.step(torch.ones(6)) for _ in range(3)])
            values[-1] += cvi.guide(torch.ones(6))["w"].tolist()
        assert not any(e.how == "sampled" for e in cvi.explain().edges)
    assert values[0] == values[1]


def model(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", 12, subsample_size=len(y)) as i:
        z = pyro.sample("z", dist.Bernoulli(0.3))
        rate = (w[0] + w[1] * (i > 3) + z).exp()
        pyro.sample("y", dist.Poisson(rate), obs=y)
