"""The rooms of the package: who may import whom. No import turns back, and no modules need each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The house, from the top floor down: a room may import those below it, and no other on its floor. A room is a package,
#: or modules that belong together.
HOUSE = (
    ("cli, __main__, local",),
    ("new_algorithm, project, templates",),
    ("lineage", "testing", "documentation", "papers", "loaded, fitted"),
    ("stages",),
    ("report", "probes"),
    ("engine",),
    ("plan, changes, grid, probing",),
    ("algorithms",),
    ("config",),
    ("data", "models", "callbacks"),
    ("registry",),
    ("slurm, locks, records, scheduling", "planned, pins", "layers"),
    ("artifacts, archive", "code, syntax", "tensors", "rng", "equations", "__init__"),
    ("errors",),
)
#: The front door: `fedpipe.load` is found there. It names the room that it leads to for types alone.
DOOR = ("fedpipe", "fedpipe.loaded")
FLOOR = {name: number for number, floor in enumerate(HOUSE) for room in floor for name in room.split(", ")}
ROOM = {name: room for floor in HOUSE for room in floor for name in room.split(", ")}

#: Modules of the room `stages`, as the rules of the Snakefile are called; the engine is the fifth.
STAGES = {"download", "partition", "collect", "probe", "report"}


def modules(root: Path) -> dict[str, ast.Module]:
    """All modules of a package ``fedpipe``, by dotted name, taken apart."""
    paths = {path: path.relative_to(root).with_suffix("").parts for path in sorted(root.glob("fedpipe/**/*.py"))}
    names = {path: ".".join(parts).removesuffix(".__init__") for path, parts in paths.items()}
    return {names[path]: ast.parse(path.read_bytes(), str(path)) for path in paths}


def is_for_types(node: ast.AST) -> bool:
    """Whether it is ``if TYPE_CHECKING:``, which never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, known: set[str], types: bool) -> Iterator[str]:
    """The modules of the package that are imported anywhere in a tree, in functions too; for ``types`` alone, if asked.

    `fedpipe.registry` finds components at run time by the names of their packages: that is no import.
    """
    for child in ast.iter_child_nodes(node):
        if is_for_types(child) and not types:
            continue
        if isinstance(child, ast.Import):
            targets = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            members = [f"{child.module}.{alias.name}" for alias in child.names]
            targets = [member if member in known else str(child.module) for member in members]
        else:
            yield from imports(child, known, types)
            continue
        for target in targets:
            if target.partition(".")[0] == "fedpipe":
                assert target in known, f"{target} is not a module of the package"
                yield target


def graph(root: Path, types: bool) -> dict[str, set[str]]:
    """What each module imports of the package."""
    trees = modules(root)
    return {name: set(imports(tree, set(trees), types)) - {name} for name, tree in trees.items()}


def part(module: str) -> str:
    """The name in `HOUSE` that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def turning_back(root: Path) -> list[str]:
    """Imports that do not lead down: also those for types alone, since what is known is known."""
    return [
        f"{module} imports {target}"
        for module, targets in graph(root, types=True).items()
        for target in sorted(targets)
        if ROOM[part(module)] != ROOM[part(target)] and FLOOR[part(module)] >= FLOOR[part(target)]
        if (module, target) != DOOR
    ]


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle, within a room too; those for types alone never run, and make none."""
    try:
        TopologicalSorter(graph(root, types=False)).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_every_module_has_its_room() -> None:
    assert [module for module in modules(ROOT) if part(module) not in FLOOR] == []


def test_no_import_turns_back() -> None:
    assert turning_back(ROOT) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(ROOT) == []


def test_the_command_line_calls_stages_by_the_names_of_their_rules() -> None:
    """It opens no room below the stages but the engine; plans, components and settings are what people ask for."""
    found = graph(ROOT, types=True)
    assert {module.rpartition(".")[2] for module in found if module.startswith("fedpipe.stages.")} == STAGES
    rules = {line.split()[1][:-1] for path in ROOT.glob("workflow/rules/*.smk") for line in _rules(path)}
    assert rules >= STAGES - {"report"}  # whose rules are named by what they write: table, curves, ...
    assert not [target for target in found["fedpipe.cli"] if part(target) in {"data", "algorithms", "models"}]


def _rules(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip().startswith("rule ")]


@pytest.mark.parametrize(
    ("module", "text", "told"),
    [
        ("config", "def f():\n    from fedpipe.engine import run\n", "fedpipe.config imports fedpipe.engine.run"),
        ("data/store", "import fedpipe.models.base\n", "fedpipe.data.store imports fedpipe.models.base"),
        (
            "registry",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedpipe.plan import Plan\n",
            "fedpipe.registry imports fedpipe.plan",
        ),
    ],
    ids=["in-a-function", "same-floor", "for-types"],
)
def test_an_import_that_turns_back_is_found(tmp_path: Path, module: str, text: str, told: str) -> None:
    for name in ("config", "data/store", "registry", "plan", "engine/run", "models/base"):
        path = tmp_path / f"fedpipe/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if name == module else "")
    assert turning_back(tmp_path) == [told]


def test_a_circle_is_found_in_functions_and_not_in_types(tmp_path: Path) -> None:
    (tmp_path / "fedpipe/engine").mkdir(parents=True)
    one, other = tmp_path / "fedpipe/engine/one.py", tmp_path / "fedpipe/engine/other.py"
    one.write_text("from fedpipe.engine.other import b\n")
    other.write_text("def f():\n    from fedpipe.engine import one\n")
    assert set(circle(tmp_path)) == {"fedpipe.engine.one", "fedpipe.engine.other"}
    other.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedpipe.engine import one\n")
    assert circle(tmp_path) == []


def test_the_page_of_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    picture = page.partition("```mermaid")[2].partition("```")[0]
    assert [name for name in FLOOR if not name.startswith("__") and name not in picture] == []
