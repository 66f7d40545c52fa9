"""Tutorials run from top to bottom, and are committed with what they print."""

import runpy
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


@each_notebook
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYRO_CVI_SMOKE", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures go into the notebook
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(TUTORIALS)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


def test_the_demo_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYRO_CVI_SMOKE", "1")
    demo = runpy.run_path(str(TUTORIALS / "demo_a1a.py"))
    picture = tmp_path / "demo.png"
    monkeypatch.setitem(demo["main"].__globals__, "PICTURE", picture)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        demo["main"]()
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
    assert picture.stat().st_size > 10_000


@each_notebook
def test_notebook_is_committed_with_its_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs, f"{path.name} has no outputs: run all of its cells and save it"
    not_run = [cell.source for cell in cells if cell.source and cell.execution_count is None]
    assert not not_run, f"{path.name} has cells that were not run"
    errors = [output.evalue for output in outputs if output.output_type == "error"]
    assert not errors, f"{path.name} is saved with errors"
    said = [output.text for output in outputs if output.output_type == "stream"]
    assert not [text for text in said if "site-packages" in text], "a path of this machine"
