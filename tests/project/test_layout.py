"""The layout of the package and of its tests. `lint-imports` checks the imports."""

import ast
import tomllib
from collections import Counter

from tests.small_studies import ROOT

PACKAGE = ROOT / "fedpipe"
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_PACKAGES, MAX_LAYERS, MAX_LINES = 13, 8, 500
#: Folders that test several packages: commands, runs, Slurm, pages, and the repository.
OTHER_FOLDERS = {"pipeline", "runs", "cluster", "docs", "project"}
#: Modules that the tests of several folders import.
SHARED_MODULES = {"__init__.py", "browser.py", "conftest.py", "errors.py", "fake_device.py", "small_studies.py"}


def test_top_of_fedpipe_has_only_packages() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert len(PACKAGES) <= MAX_PACKAGES


def test_import_layers_cover_all_packages() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = configuration["tool"]["importlinter"]["contracts"][0]["layers"]
    assert len(layers) <= MAX_LAYERS
    assert sorted(name.strip() for layer in layers for name in layer.split("|")) == [
        f"fedpipe.{name}" for name in PACKAGES
    ]


def test_modules_are_short_and_have_docstrings() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in MODULES}
    assert [name for name, text in texts.items() if text.count("\n") > MAX_LINES] == []
    assert [name for name, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []


def test_architecture_page_contains_all_packages() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    diagram = page.partition("```mermaid")[2].partition("```")[0]
    assert [name for name in PACKAGES if f"{name}[" not in diagram] == []


def test_folders_of_tests_match_packages() -> None:
    paths = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")]
    assert {path.parts[0] for path in paths if len(path.parts) > 1} <= {*PACKAGES, *OTHER_FOLDERS}
    assert {path.name for path in paths if len(path.parts) == 1} == SHARED_MODULES


def test_names_of_test_files_are_unique() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
