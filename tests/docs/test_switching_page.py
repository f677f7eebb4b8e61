"""Each setting, parameter and hook that docs/switching.md offers as a replacement exists in fedpipe."""

import dataclasses
import re
from typing import Any

import pytest

from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import component, registry
from fedpipe.settings.schema import build_json_schema
from fedpipe.settings.transforms import Transforms
from tests.docs.page_blocks import read


def read_rows() -> list[tuple[str, list[str]]]:
    """Return the first cell, and the code in the last cell, of each row of the page's tables."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", read("docs/switching.md"), flags=re.M)
    return [(first, re.findall(r"`([^`]+)`", last)) for first, last in rows if first not in ("PFLlib", "Flower")]


ROWS = read_rows()
CODES = [code for _, codes in ROWS for code in codes]


def find_setting(path: str) -> dict[str, Any]:
    """Return the schema of a key such as federation.server.optimizer."""
    schema = build_json_schema()
    definitions, node = schema["$defs"], schema
    for part in path.split("."):
        node = node["properties"][part]
        reference = node.get("$ref") or next((case["$ref"] for case in node.get("anyOf", []) if "$ref" in case), None)
        node = definitions[reference.rsplit("/", 1)[-1]] if reference else node
    return node


SECTIONS = ("federation", "evaluation", "execution", "study")
SETTINGS = [code.partition(":")[0] for code in CODES if code.startswith(tuple(f"{name}." for name in SECTIONS))]
METHODS = [match for code in CODES if (match := re.fullmatch(r"(\w+): \{(.+)\}", code))]
HOOKS = [code for code in CODES if re.fullmatch(r"[a-z_]+", code)]


@pytest.mark.parametrize("path", sorted(set(SETTINGS)))
def test_setting_of_switching_page_exists(path: str) -> None:
    assert find_setting(path)


@pytest.mark.parametrize("match", [m for m in METHODS if m[1] not in ("dataset", "partition", "model", "study")])
def test_parameter_of_switching_page_exists(match: re.Match[str]) -> None:
    if match[1] == "transforms":
        names = {*Transforms.model_fields}
    else:
        names = {field.name for field in dataclasses.fields(registry.find_component(component.ALGORITHM, match[1]))}
    assert {name.partition(":")[0] for name in match[2].split(", ")} <= names


@pytest.mark.parametrize(("kind", "section", "key"), [("PARTITION", "partition", "scheme"), ("MODEL", "model", "name")])
def test_component_of_switching_page_exists(kind: str, section: str, key: str) -> None:
    values = re.findall(rf"{section}: \{{{key}: ([\w-]+)", "\n".join(CODES))
    assert values
    assert set(values) <= set(registry.list_components(getattr(component, kind)))


def test_hooks_and_algorithms_of_switching_page_exist() -> None:
    others = {"layers", "execution"}  # a parameter and a section
    assert len(HOOKS) > 20
    assert set(HOOKS) - others <= set(dir(Algorithm)) | set(registry.list_components(component.ALGORITHM))
