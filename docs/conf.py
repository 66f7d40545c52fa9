"""The Sphinx site: `make docs` builds it into docs/_build, with warnings as errors and no network."""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from pyro_cvi import __version__  # noqa: E402

project = "pyro_cvi"
author = "The pyro_cvi developers"
copyright = author
release = version = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"pyro_cvi {__version__}"
html_static_path: list[str] = []
default_role = "code"
smartquotes = False  # a quote in a formula is a prime

# Pages are Markdown, and headings can be linked to.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Notebooks are shown with the outputs that they are committed with.
nb_execution_mode = "off"


def copy_tutorials() -> None:
    """Sphinx reads below docs/ only; a copy that is as old as its notebook is left alone."""
    target = HERE / "tutorials"
    target.mkdir(exist_ok=True)
    sources = {path.name: path for path in sorted((ROOT / "tutorials").glob("*.ipynb"))}
    for old in target.glob("*.ipynb"):
        if old.name not in sources:
            old.unlink()
    for name, path in sources.items():
        copy = target / name
        if not copy.exists() or copy.stat().st_mtime != path.stat().st_mtime:
            shutil.copy2(path, copy)


copy_tutorials()

# Docstrings have Google's sections, and state shapes.
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shapes"]
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90

# Links into the documentation of others need the network: PYRO_CVI_INTERSPHINX=1 asks for them.
if "PYRO_CVI_INTERSPHINX" in os.environ:
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://pytorch.org/docs/stable", None),
        "pyro": ("https://docs.pyro.ai/en/stable", None),
    }
nitpick_ignore_regex = [
    ("py:.*", r"(torch|pyro|collections|typing|abc|matplotlib|arviz)(\..*)?"),
    ("py:.*", r"(Any|Callable|Iterator|Mapping|Sequence|Literal|Tensor|PyroOptim|ELBO|optional)"),
    ("py:.*", r"(Axes|InferenceData|AutoGuide|contextlib.ExitStack)"),
    (
        "py:class",
        r"pyro_cvi\.(graph|mixture|conditional|algebra\.expression|families\.registry)\..*",
    ),
]
