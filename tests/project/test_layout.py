"""The layout of the package and of its tests. `lint-imports` checks who imports whom."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.small_studies import ROOT

PACKAGE = ROOT / "fedpipe"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_ROOMS, MAX_FLOORS, MAX_LINES = 13, 8, 500
#: Folders of tests that are of no room: typed commands, runs in process, Slurm, pages, and the repository's own files.
OTHER_FOLDERS = {"pipeline", "runs", "cluster", "docs", "project"}
#: What the tests of several folders import.
SHARED_MODULES = {"__init__.py", "conftest.py", "fake_device.py", "small_studies.py"}


def test_the_top_of_the_package_has_rooms_only() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert len(ROOMS) <= MAX_ROOMS


def test_every_room_is_on_a_floor_of_the_contract() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = configuration["tool"]["importlinter"]["contracts"][0]["layers"]
    assert len(layers) <= MAX_FLOORS
    assert sorted(room.strip() for floor in layers for room in floor.split("|")) == [
        f"fedpipe.{name}" for name in ROOMS
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_describes_itself(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    assert ast.get_docstring(ast.parse(text))


def test_the_page_of_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    picture = page.partition("```mermaid")[2].partition("```")[0]
    assert [name for name in ROOMS if f"{name}[" not in picture] == []


def test_the_folders_of_tests_mirror_the_rooms() -> None:
    tracked = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")]
    assert {path.parts[0] for path in tracked if len(path.parts) > 1} <= {*ROOMS, *OTHER_FOLDERS}
    assert {path.name for path in tracked if len(path.parts) == 1} == SHARED_MODULES


def test_a_test_file_has_a_name_of_its_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
