"""What every test starts from: float64, an empty parameter store, validation, its own seed."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyro
import pytest
import torch

from pyro_cvi.algebra import latent
from pyro_cvi.densities import registry as densities
from pyro_cvi.families import registry as families

ROOT = Path(__file__).resolve().parent.parent
REGISTRIES = (latent._RULES, densities._RULES, families._FAMILIES)


@pytest.fixture(autouse=True)
def clean_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that a test sets in torch or Pyro, or registers, reaches the next one."""
    default_dtype = torch.get_default_dtype()
    registered = [dict(r) for r in REGISTRIES]
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    # The seed follows the test's name, so that it is the same in every selection and order.
    pyro.set_rng_seed(zlib.crc32(request.node.nodeid.encode()))
    with pyro.validation_enabled(True):
        yield
    pyro.clear_param_store()
    torch.set_default_dtype(default_dtype)
    for registry, before in zip(REGISTRIES, registered, strict=True):
        registry.clear()
        registry.update(before)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that this machine has; the others are skipped."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the larger data sets, which the repository does not hold."""
    folder = Path(os.environ.get("PYRO_CVI_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}: set PYRO_CVI_DATA to the folder of the .npz files")
    return folder
