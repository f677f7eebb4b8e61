"""The Markdown of docstrings and settings, and the generated pages in docs."""

import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from typer.main import get_group

from fedpipe.cli.app import app
from fedpipe.cli.docs import pages
from fedpipe.core.components import component, registry
from fedpipe.core.components.component import PARTITION, Component
from fedpipe.core.errors import SettingsError
from fedpipe.settings import params
from tests.small_studies import ROOT, run_command


@dataclass(frozen=True, kw_only=True)
class Parent(Component):
    """A parent.

    Parameters
    ----------
    rate
        How fast, of 0 | 1.
    """

    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Child(Parent):
    """A child.

    Parameters
    ----------
    first, second
        Two that share
        their words.
    """

    first: int
    second: str = "so"


def test_settings_page_has_every_key() -> None:
    page = pages.render_settings_page()
    for name, field in params.Params.model_fields.items():
        section = page.partition(f"## {field.alias or name}\n")[2].partition("\n## ")[0]
        assert section, name
        for key_name, key in getattr(field.annotation, "model_fields", {}).items():
            is_component = name == "dataset" and key_name == "name"
            line = f"`{key_name}` names one of" if is_component else f"| `{key.alias or key_name}` |"
            assert f"\n{line}" in section, f"{name}.{key_name}"
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


def list_required_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys without a default, also those of nested sections."""
    for name, field in section.model_fields.items():
        if field.is_required():
            yield f"{prefix}{name}"
        for nested in (field.annotation, *get_args(field.annotation)):
            if isinstance(nested, type) and issubclass(nested, BaseModel):
                yield from list_required_keys(nested, f"{prefix}{name}.")


def test_settings_page_marks_required_keys_and_names_default_components() -> None:
    page = pages.render_settings_page()
    marked = [
        f"{section.partition(chr(10))[0]}.{key}"
        for section in page.split("\n## ")
        for key in re.findall(r"^\| `([\w.]+)` \| `\(required\)` \|", section, flags=re.M)
    ]
    assert marked == list(list_required_keys(params.Params))
    assert {"tune.over", "federation.drift.round"} <= set(marked)
    defaults = {kind.plural: kind.default for kind in component.COMPONENT_KINDS if kind.default}
    assert defaults == {"models": "cnn", "partitions": "dirichlet", "datasets": "digits"}
    for plural, default in defaults.items():
        assert f" names one of [these]({plural}.md), by default [{default}]({plural}.md#{default})." in page


def test_commands_page_has_every_option() -> None:
    page = pages.render_commands_page()
    group = get_group(app)
    for name, command in group.commands.items():
        section = page.partition(f"### `fedpipe {name}`\n")[2].partition("\n#")[0]
        assert (command.help or "").splitlines()[0] in section, name
        for parameter in command.params:
            assert getattr(parameter, "help", "") in section, parameter.name
            assert all(
                f"`{option}" in section or f", {option}" in section for option in parameter.opts if "-" in option
            )
    assert "--help`:" not in page


def test_pages_are_those_of_docs_command_which_needs_docs_folder(in_empty_folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"^docs: "):
        run_command("docs")
    (in_empty_folder / "docs").mkdir()
    run_command("docs")
    paths = [path for path in in_empty_folder.rglob("*") if path.is_file()]
    assert len(paths) == 7
    for path in paths:
        assert path.read_bytes() == (ROOT / path.relative_to(in_empty_folder)).read_bytes(), "type `make docs`"


@pytest.mark.parametrize("kind", component.COMPONENT_KINDS, ids=lambda kind: kind.plural)
def test_components_page_has_no_docstring_markup(kind: component.ComponentKind) -> None:
    page = pages.render_components_page(kind)
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == list(registry.list_components(kind))
    for markup in ("::\n", ".. ", ":math:", "``math", "----\n", ":class:"):
        assert markup not in page.replace("```math", "")
    assert page.count("```") == 2 * page.count("```math")


def test_parameter_table_has_inherited_descriptions() -> None:
    assert pages.render_parameter_table(Child, {"first", "second", "rate"}).splitlines() == [
        "| parameter | default | |",
        "|---|---|---|",
        r"| `rate` | `0.5` | How fast, of 0 \| 1. |",
        "| `first` | `(required)` | Two that share their words. |",
        '| `second` | `"so"` | Two that share their words. |',
    ]
    assert pages.render_parameter_table(Child, set()) == ""


class Deviating(Component):
    """A method.

    Deviations
    ----------
    Averages of :math:`w_k`
        Paper: as eq. 3. Code: uniform, e.g. 1 | 2. Here:
        by samples.
    Clipping
        Here: none. As the paper.
    """


def test_deviations_table_compares_paper_code_and_fedpipe() -> None:
    assert pages.render_deviations_table(Deviating).splitlines() == [
        "| deviation | paper | authors' code | fedpipe |",
        "|---|---|---|---|",
        "| Averages of $`w_k`$ | As eq. 3. | Uniform, e.g. 1 \\| 2. | By samples. |",
        "| Clipping | – | – | None. As the paper. |",
    ]
    assert pages.render_deviations_table(Parent) == ""


def test_deviations_table_omits_no_text() -> None:
    class Unlabeled(Component):
        """A method.

        Deviations
        ----------
        Averages
            FL-bench: uniform. Here: by samples.
        """

    with pytest.raises(ValueError, match="Unlabeled, Averages: "):
        pages.render_deviations_table(Unlabeled)


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        (r"With :math:`a_k` and :math:`b" + "\n" + r"\, c`, ``x: 1``", r"With $`a_k`$ and $`b \, c`$, `x: 1`"),
        ("`a * b` and :class:`~fedpipe.core.tensors.Tensors`, :func:`find`", "`a * b` and `Tensors`, `find`"),
        ("a * b < c, ``a * b``", r"a \* b \< c, `a * b`"),
    ],
)
def test_inline_markup_is_converted_to_markdown(text: str, markdown: str) -> None:
    assert pages.convert_inline_markup_to_markdown(text) == markdown


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("One.\n\nTwo\nlines.", "One.\n\nTwo\nlines."),
        (".. math:: a,\n          b\n\nEnd.", "```math\na,\nb\n```\n\nEnd."),
        (
            "So\n\n.. math::\n    a &= b \\\\\n    c &= d\n\nEnd.",
            "So\n\n```math\n\\begin{aligned}\na &= b \\\\\nc &= d\n\\end{aligned}\n```\n\nEnd.",
        ),
        (".. math::\n    a\n\n    b", "```math\na\nb\n```"),
    ],
)
def test_docstring_blocks_are_converted_to_markdown(text: str, markdown: str) -> None:
    assert pages.convert_docstring_to_markdown(text) == markdown


def test_partition_schemes_picture_is_up_to_date() -> None:
    draw = runpy.run_path(str(ROOT / "docs/images/draw_partitions.py"))
    svg = draw["draw_partitions"]()
    assert svg == (ROOT / "docs/images/partitions.svg").read_text(), "run docs/images/draw_partitions.py"
    schemes = {*registry.list_components(PARTITION)} - {"file", "natural", "by-domain", "flwr-datasets"}
    counts = draw["count_samples"]().groupby("panel")["value"].sum()
    assert {*counts.index} == schemes
    assert {*counts[counts.index != "dirichlet-overlap"]} == {1797}, "each sample has one client"
    assert "images/partitions.svg" in (ROOT / "docs/partitions.md").read_text()
