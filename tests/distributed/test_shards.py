"""Data spread over two processes: the fit of one process with all data, up to the order of summation."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed

from pyro_cvi import CVI, AutoCVI, CVIError

SCRIPT = Path(__file__).with_name("two_processes.py")
CASES = ["logistic", "factors", "mixture", "learnt", "hybrid"]


def launch(path: Path, processes: int, *cases: str, **environment: str) -> Any:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [str(SCRIPT), str(path), *cases]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one process, and of two."""
    found = []
    for processes in (1, 2):
        path = tmp_path_factory.mktemp("fits") / "fits.pt"
        done = launch(path, processes, *CASES)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(torch.load(path))
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case: str, fits: list[dict[str, Any]]) -> None:
    one, two = (f[case] for f in fits)
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    if case == "hybrid":  # draws of width 1e-6
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
    else:
        torch.testing.assert_close(
            torch.tensor(two["losses"]), torch.tensor(one["losses"]), **tolerance
        )
    assert one["state"].keys() == two["state"].keys()
    for name, value in one["state"].items():
        torch.testing.assert_close(two["state"][name], value, **tolerance)


def test_a_process_that_dies_is_an_error_for_the_other(tmp_path: Path) -> None:
    start = time.monotonic()
    done = launch(tmp_path / "x.pt", 2, "logistic", DIES="1")
    assert done.returncode != 0
    assert time.monotonic() - start < 60


def test_shards_need_a_process_group() -> None:
    with pytest.raises(CVIError, match="init_process_group"):
        CVI(lambda: None, AutoCVI(lambda: None), shards=["rows"])


def test_moments_of_spread_rows_are_kept_from_step_to_step(tmp_path: Path) -> None:
    """Else each step would begin with the softmax of all rows that the last one ended with."""

    def model(x: torch.Tensor) -> None:
        with pyro.plate("components", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", len(x)):
            c = pyro.sample("c", dist.Categorical(torch.ones(2)))
            pyro.sample("x", dist.Normal(mu[c], 1.0), obs=x)

    x = torch.tensor([-2.0, -1.5, 2.0, 3.0])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        cvi = CVI(model, AutoCVI(model), shards=["rows"])
        cvi.step(x)
        assert cvi._evaluator is not None
        before = cvi._evaluator[1]
        cvi.step(x)
        assert cvi._evaluator[1] is before
        cvi.step(x + 1)  # other data
        assert cvi._evaluator[1] is not before
    finally:
        torch.distributed.destroy_process_group()
