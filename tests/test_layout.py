"""The layout of the package. `lint-imports` checks who imports whom; this checks sizes and descriptions."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.studies import ROOT

PACKAGE = ROOT / "fedpipe"
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_ROOMS, MAX_FLOORS, MAX_LINES = 13, 8, 500


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
