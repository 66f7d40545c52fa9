"""A file of a fit is whole: what interrupts `save` leaves the one before, and nothing beside it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_cvi import CVI, AutoCVI

PROGRAM = textwrap.dedent(
    """
    import sys
    import torch
    from pyro_cvi.saving import write

    for i in range(10**6):
        write({"i": i, "x": torch.full((50_000,), float(i))}, sys.argv[1])
        print(i, flush=True)
    """
)


def model(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.fixture
def saved(tmp_path):
    y = torch.tensor([1.0, 2.0])
    cvi = CVI(model, AutoCVI(model))
    cvi.step(y)
    cvi.save(tmp_path / "fit.pt")
    return cvi, y, tmp_path / "fit.pt"


def test_a_write_that_fails_leaves_the_file_before(saved, monkeypatch):
    cvi, y, path = saved
    before = path.read_bytes()

    def torn(state, file):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="no space"):
        cvi.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["fit.pt"]


def test_the_file_keeps_its_permissions_and_a_link_is_followed(saved):
    cvi, y, path = saved
    path.chmod(0o640)
    link = path.parent / "latest.pt"
    link.symlink_to(path)
    cvi.step(y)
    cvi.save(link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    again = CVI(model, AutoCVI(model))
    again.load(str(path))
    assert again.guide.posterior("mu").mean == cvi.guide.posterior("mu").mean


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_process_that_is_killed_while_it_writes(tmp_path):
    path = tmp_path / "fit.pt"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for _ in range(5):
            child.stdout.readline()
        time.sleep(0.013)
        os.kill(child.pid, signal.SIGKILL)
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["x"], torch.full((50_000,), float(found["i"])))


def test_a_run_that_is_interrupted_keeps_what_it_has():
    calls = []

    def slow(y):
        calls.append(1)
        if len(calls) == 40:
            raise KeyboardInterrupt
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.StudentT(3.0, w.tanh() * v.sin() * (w + v).cos(), 1.0), obs=y)

    cvi = CVI(slow, AutoCVI(slow, max_joint_dim=0))
    with pytest.raises(KeyboardInterrupt) as stop:
        cvi.run(torch.randn(20))
    losses = stop.value.result.losses
    assert losses
    assert all(torch.tensor(losses).isfinite())
    assert cvi.guide.posterior("w").mean.isfinite()
    cvi.step(torch.randn(20))
