"""Documentation runs: the Python blocks of the Markdown pages and the doctests of the modules."""

import doctest
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch

import pyro_cvi
from pyro_cvi import export, gp, plots

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """The line before each block fenced as python, and the block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


def all_doctests() -> list[doctest.DocTest]:
    names = [found.name for found in pkgutil.walk_packages(pyro_cvi.__path__, "pyro_cvi.")]
    modules = [importlib.import_module(name) for name in ["pyro_cvi", *names]]
    found = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    return [test for test in found if test.examples]


@pytest.fixture(autouse=True)
def as_a_reader_runs_them(clean_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the top of the repository, with torch's own default dtype, in smoke mode."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYRO_CVI_SMOKE", "1")
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.exists() and blocks_of(page)],
    ids=lambda page: page.name,
)
def test_blocks_of_a_page_run_in_order(page: Path) -> None:
    namespace = {"__name__": "__main__"}
    for line, source in blocks_of(page):
        # Leading newlines give a traceback the line numbers of the page.
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


@pytest.mark.parametrize("example", all_doctests(), ids=lambda example: example.name)
def test_docstring_examples_give_what_they_show(example: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(
        re.findall(r"auto(?:class|function|exception):: (?:pyro_cvi\.)?([\w.]+)", text)
    )
    public = {name for name in vars(pyro_cvi) if not name.startswith("_")}
    modules = {name.split(".")[1] for name in sys.modules if name.startswith("pyro_cvi.")}
    # A function may have the name of the module that it is in.
    shadowed = {name for name in modules if callable(getattr(pyro_cvi, name, None))}
    assert public - (modules - shadowed) <= documented
    beside = {"plots": plots, "export": export, "gp": gp}
    for module, found in beside.items():
        names = getattr(found, "__all__", None) or ["bound", "marginals", "report"]
        assert {f"{module}.{name}" for name in names} <= documented
