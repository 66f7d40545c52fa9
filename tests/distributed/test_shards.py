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
EXACT = ["logistic", "factors", "mixture", "learnt"]
DRAWN = ["network", "rates", "steps", "shared_guide"]
"""Cases in which both fits draw the same values of the sites that all processes share."""
POINTS = ["hybrid", "points", "wrapped"]
OTHERS = ["sums_of_gammas", "two_modes"]
"""Cases that differ by their draws: for these it is checked that processes agree, and the end."""


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
        refused = ["refused"] if processes > 1 else []
        done = launch(path, processes, *EXACT, *DRAWN, *POINTS, *OTHERS, *refused)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(torch.load(path))
    return found


@pytest.mark.parametrize("case", EXACT + DRAWN + POINTS)
def test_two_processes_are_one(case: str, fits: list[dict[str, Any]]) -> None:
    one, two = (f[case] for f in fits)
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    if case == "hybrid":  # draws of width 1e-6
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
    else:
        for name in ("losses", "run"):
            torch.testing.assert_close(
                torch.tensor(two[name]), torch.tensor(one[name]), **tolerance
            )
    assert one["state"].keys() == two["state"].keys()
    for name, value in one["state"].items():
        torch.testing.assert_close(two["state"][name], value, **tolerance)


def test_local_sites_that_are_sampled_end_at_the_bound_of_one_process(
    fits: list[dict[str, Any]],
) -> None:
    """The losses of the last six steps, each an estimate by draws of its own."""
    one, two = (torch.tensor(f["sums_of_gammas"]["run"]) for f in fits)
    error = float((one.var() / len(one) + two.var() / len(two)).sqrt())
    assert error < 3
    assert abs(float(one.mean() - two.mean())) < 4 * error


def test_restarts_of_a_mixture_end_at_the_optimum_of_one_process(
    fits: list[dict[str, Any]],
) -> None:
    one, two = (f["two_modes"]["run"][-1] for f in fits)
    assert two == pytest.approx(one, rel=1e-6)


def test_what_processes_cannot_share_is_said(fits: list[dict[str, Any]]) -> None:
    said = fits[1]["refused"]
    assert "factor 'total'" in said["joined"] and "inside of the plate" in said["joined"]
    assert "another plan in other processes" in said["other_plan"]
    assert "'shift'" in said["other_shape"] and "event_dim" in said["other_shape"]
    assert "no plate ['rows']" in said["no_plate"]


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


def test_a_fit_of_several_processes_goes_on_in_one(tmp_path: Path) -> None:
    """Here of one process in a group: what is saved does not ask for the group."""

    def model(x: torch.Tensor) -> None:
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("x", dist.Normal((z[0] * z[1] * z[2]).cos(), 1.0), obs=x)

    x, path = torch.randn(10), tmp_path / "fit.pt"
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        cvi = CVI(model, AutoCVI(model), shards=["rows"], seed=0)
        for _ in range(3):
            cvi.step(x)
        cvi.save(path)
        after = cvi.step(x)
    finally:
        torch.distributed.destroy_process_group()
    alone = CVI(model, AutoCVI(model), seed=0)
    alone.load(path)
    assert alone.step(x) == pytest.approx(after, rel=1e-5)
