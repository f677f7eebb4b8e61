"""The documentation as a site: README, the pages of docs, and a table of contents. `make docs-site` builds it."""

import re
import shutil
from pathlib import Path

import fedpipe

#: The tree of pages; README's text does not contain it. docs/README.md is the index for GitHub.
CONTENTS = """
```{toctree}
:hidden:
:caption: Begin

Tour <self>
docs/install
docs/tutorial
```
```{toctree}
:hidden:
:caption: How to

docs/studies
docs/tuning
docs/protocols
docs/custom-data
docs/pretrained
docs/custom-model
docs/custom-algorithm
docs/check-method
docs/diagnostics
docs/papers
docs/dvc
docs/cluster
docs/trackers
docs/callbacks
docs/pfllib
docs/switching
```
```{toctree}
:hidden:
:caption: Reference

docs/settings
docs/cli
docs/outputs
docs/algorithms
docs/all-methods
docs/tuned-methods
docs/readings
docs/datasets
docs/partitions
docs/models
docs/python
```
```{toctree}
:hidden:
:caption: Explanation

docs/concepts
```
```{toctree}
:hidden:
:caption: Project

docs/architecture
docs/upstream
CONTRIBUTING
CHANGELOG
benchmarks/RESULTS
```
"""

PAPERS = Path(__file__).parent / "papers"

project, author, release = "fedpipe", "the fedpipe developers", fedpipe.__version__
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "benchmarks/RESULTS.md"]
exclude_patterns = [".*", "docs/README.md", "results", "site", "tests", "examples", "**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinxcontrib.mermaid",
]
myst_heading_anchors = 4
myst_fence_as_directive = ["math", "mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature's; docstrings give shapes and units
napoleon_google_docstring = False
html_theme = "furo"
html_title = "fedpipe"


def adapt(app, name, source):
    """GitHub's inline mathematics as MyST's; README begins the tree of pages."""
    source[0] = re.sub(r"\$`(.+?)`\$", r"{math}`\1`", source[0], flags=re.S)
    if name == root_doc:  # badges and the index of pages are for GitHub
        text = re.sub(r"^\[!\[.*\n", "", source[0], flags=re.M)
        source[0] = text.replace(", [all pages](docs/README.md)", "") + CONTENTS


def complete(app, exception):
    """A site begins at index.html, and has the papers' pages where they lie in docs: Sphinx does not make them."""
    if not exception:
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))
        shutil.copytree(PAPERS, Path(app.outdir, "docs/papers"), dirs_exist_ok=True)


def setup(app):
    """What Sphinx calls first."""
    app.connect("source-read", adapt)
    app.connect("build-finished", complete)
