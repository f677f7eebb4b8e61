r"""Renders docstrings and settings as Markdown pages with equations for GitHub.

Equations use $`...`$ and ``math`` fences, because GitHub removes backslashes between plain dollar signs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpipe.cli.docs import equations
from fedpipe.core.components import code_digest, registry
from fedpipe.core.components.component import (
    ALGORITHM,
    COMPONENT_KINDS,
    Component,
    ComponentKind,
    get_docstring_summary,
    list_parameters,
)
from fedpipe.core.components.module_graph import find_source_file
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.settings.diagnostics import DIAGNOSTIC_KINDS
from fedpipe.settings.schema import build_json_schema

COMMANDS_HEAD = """\
# Command line

Generated from the help texts by `fedpipe docs`. `fedpipe COMMAND --help` prints the same text. Type commands in the
folder of params.yaml. After a mistake, a command prints one message and exits with status 2."""
HELP_OPTION = "* `--help`: Show this message and exit.\n"
REQUIRED = "(required)"  #: instead of the default of a key or parameter without one
SECTION_HEADING = re.compile(r"^(\w[\w ]*)\n-+\n", re.M)  #: heading of a numpydoc section
NEW_CLIENT_SENTENCE = re.compile(r"A client that never participated .*?\.(?= |$)")
PICTURES = {  #: pictures of pages of components. `docs/images/draw_partitions.py` draws this one
    "partitions": "The same alpha gives other clients with each scheme:\n\n![Heat maps of the training samples by "
    "client and class, one for each scheme](images/partitions.svg)"
}


def write_docs() -> None:
    """Write all generated files into the clone in the current folder.

    Raises a SettingsError if the current folder is not a clone.
    """
    if not Path("docs").is_dir():
        raise SettingsError("docs: the folder does not exist. Type `fedpipe docs` in the folder of a clone.")
    pages = {f"docs/{kind.plural}.md": render_components_page(kind) for kind in COMPONENT_KINDS}
    pages |= {"docs/settings.md": render_settings_page(), "docs/cli.md": render_commands_page()}
    pages["params.schema.json"] = render_json_schema()
    for path, text in pages.items():
        files.write_bytes(Path(path), text.encode())


def render_commands_page() -> str:
    """Render the page of all commands by the panels of `fedpipe --help`, with Typer's description of each command.

    It has the commands of the modules that :mod:`fedpipe.cli.app` imports.
    """
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_group

    from fedpipe.cli.group import app

    group = get_group(app)
    context = typer.Context(group, info_name="fedpipe")
    panels: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        text = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="fedpipe", indent=2)
        text = text.replace(HELP_OPTION, "").replace("**Options**:\n\n\n", "").replace("```console\n$ ", "```text\n")
        text = text.replace("; ", ", ")  # of defaults and limits
        panels.setdefault(str(getattr(command, "rich_help_panel", "")), []).append(text.strip())
    sections = (text for panel, texts in panels.items() for text in (f"## {panel}", *texts))
    return "\n\n".join([COMMANDS_HEAD, *sections]) + "\n"


def render_json_schema() -> str:
    """Render the JSON Schema of params.yaml."""
    return json.dumps(build_json_schema(), indent=1) + "\n"


def render_components_page(kind: ComponentKind) -> str:
    """Render the page of a kind of components: a table of contents and one section per component."""
    plain_components = {name: registry.find_component(kind, name) for name in registry.list_components(kind)}
    components = {name: registry.add_dw_parameter(kind, component) for name, component in plain_components.items()}
    fields = {name: set(_get_parameter_defaults(component)) for name, component in components.items()}
    plain_fields = {name: set(_get_parameter_defaults(component)) for name, component in plain_components.items()}
    common = set.intersection(*plain_fields.values()).union(*(fields[name] - plain_fields[name] for name in fields))
    first_component = next(iter(components.values()))
    title = kind.plural.replace("datasets", "data sets").capitalize()
    paragraphs = [f"# {title}", "Generated from the docstrings by `fedpipe docs`. Edit the docstrings."]
    if kind is ALGORITHM:
        from fedpipe.cli.docs.overview import render_methods_overview  # imports PyTorch, which other pages do not need

        paragraphs.append(render_methods_overview())
    contents = (
        f"- [{name}](#{name}): {convert_inline_markup_to_markdown(get_docstring_summary(component))}"
        for name, component in components.items()
    )
    paragraphs += ["\n".join(contents), PICTURES.get(kind.plural, "")]
    if common:
        exceptions = " and ".join(name for name in components if not common <= fields[name])
        subject = f"All of them except {exceptions}" if exceptions else "All of them"
        paragraphs += [f"{subject} have", render_parameter_table(first_component, common)]
    for name, component in components.items():
        paragraphs += [
            f"## {name}",
            convert_docstring_to_markdown(SECTION_HEADING.split(inspect.getdoc(component) or "")[0]),
            convert_inline_markup_to_markdown(get_inherited_new_client_sentence(component)),
            render_deviations_table(component),
            render_parameter_table(component, _select_own_parameters(component, common, first_component)),
        ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def render_settings_page() -> str:
    """Render the page of all keys of params.yaml by section, from its JSON Schema."""
    schema = build_json_schema()
    kinds = {kind.section: kind for kind in COMPONENT_KINDS}
    paragraphs = [
        "# params.yaml",
        "Generated from the code by `fedpipe docs`. A file contains only the keys that differ from their defaults. A "
        f"key with `{REQUIRED}` has no default, so set it if you use its section. An unknown key is an error.",
    ]
    for name, entry in schema["properties"].items():
        section, kind = _resolve_schema_reference(entry, schema), kinds.get(name)
        paragraphs += [f"## {name}", convert_inline_markup_to_markdown(section.get("description", ""))]
        common = _get_common_keys(section)
        if kind:
            page = f"{kind.plural}.md"
            subject, default = f"`{kind.selector}`", f"[{kind.default}]({page}#{kind.default})"
            if kind is ALGORITHM:
                subject, default = f"{subject} in an entry", "the one with the entry's name"
            note = f"{subject} names one of [these]({page}), by default {default}. Write its parameters next to it."
            paragraphs.append(note)
            first_component = registry.find_component(kind, registry.list_components(kind)[0])
            parameter_docs = _get_parameter_docs(registry.add_dw_parameter(kind, first_component))
            common = {key: {"description": parameter_docs.get(key, "")} | entry for key, entry in common.items()}
        paragraphs.append(_render_keys_table(section | {"properties": common}, schema))
        for choices in section.get("patternProperties", {}).values():
            for choice in (_resolve_schema_reference(choice, schema) for choice in choices.get("oneOf", ())):
                paragraphs += [
                    f"### {choice['properties']['kind']['const']}",
                    convert_inline_markup_to_markdown(choice.get("description", "")),
                    _render_keys_table(choice, schema),
                ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def get_diagnostic_summary(kind: str) -> str:
    """One-line description of a kind of diagnostic."""
    return _read_diagnostic_docstring(kind).split("\n", 1)[0]


def describe_diagnostic(kind: str) -> str:
    """Describe a kind of diagnostic as plain text: docstring, settings with defaults, and columns of its table."""
    lines = [f"{kind} (diagnostic)", "", equations.render_docstring_equations(_read_diagnostic_docstring(kind)), ""]
    lines += ["In params.yaml, in an entry of diagnostics, whose name you choose:", f"  kind: {kind}"]
    for name, field in DIAGNOSTIC_KINDS[kind].model_fields.items():
        if name != "kind":
            value = json.dumps(field.get_default(call_default_factory=True))
            lines.append(f"  {name}: {value}    # {equations.render_docstring_equations(field.description or '')}")
    schema = re.search(r"^SCHEMA = .*?^\)", _read_diagnostic_source(kind), re.M | re.S)
    lines += ["", f"Columns of its table, results/diagnostics/ALGORITHM/KEY/ROUND/{kind}-KEY.parquet:"]
    for name, meaning in re.findall(r'^ +"(\w+)": pa\..*?,(?:  #: (.*))?$', schema[0] if schema else "", re.M):
        lines.append(f"  {name}    # {meaning}" if meaning else f"  {name}")
    return "\n".join(lines)


def _read_diagnostic_source(kind: str) -> str:
    path = find_source_file(code_digest.DIAGNOSTIC_MODULES[kind])
    assert path
    return path.read_text()


def _read_diagnostic_docstring(kind: str) -> str:
    """Docstring of the diagnostic's module, read without importing it."""
    text = ast.get_docstring(ast.parse(_read_diagnostic_source(kind))) or ""
    return text.replace(f" (`{kind}`)", "", 1)


def _resolve_schema_reference(entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Resolve a reference in a JSON Schema, also that of an optional key. The entry's own values take precedence."""
    references = [choice["$ref"] for choice in (entry, *entry.get("anyOf", ())) if "$ref" in choice]
    definition = schema["$defs"][references[0].rpartition("/")[2]] if len(references) == 1 else {}
    return {**definition, **entry}


def _get_common_keys(section: dict[str, Any]) -> dict[str, Any]:
    """Keys of a section. If it names a component, the keys that all components have."""
    choices = [choice for choice in section.get("anyOf", ()) if choice.get("title", "own") != "own"]
    choices = choices or [entry for entry in section.get("properties", {}).values() if entry.get("properties")]
    if not choices:
        return dict(section.get("properties", {}))
    common = set.intersection(*(set(choice["properties"]) for choice in choices))
    return {name: entry for name, entry in choices[0]["properties"].items() if name in common}


def _render_table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Render a table in Markdown. Empty without rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines]) if lines else ""


def _render_keys_table(section: dict[str, Any], schema: dict[str, Any]) -> str:
    """Render a table of a section's keys with their defaults. Keys of a nested mapping follow it."""
    return _render_table("| key | default | |", _iterate_key_rows(section, schema, ""))


def _iterate_key_rows(section: dict[str, Any], schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, entry in section.get("properties", {}).items():
        if "const" in entry:  # key with a component's name
            continue
        resolved_entry = _resolve_schema_reference(entry, schema)
        default = ""
        if name in section.get("required", ()):
            default = f"`{REQUIRED}`"
        elif "default" in entry and "properties" not in resolved_entry:
            default = f"`{json.dumps(entry['default'])}`"
        description = convert_inline_markup_to_markdown(resolved_entry.get("description", ""))
        yield f"`{prefix}{name}`", default, f"{description} {_describe_allowed_values(resolved_entry)}".strip()
        yield from _iterate_key_rows(resolved_entry, schema, f"{prefix}{name}.")


def _describe_allowed_values(entry: dict[str, Any]) -> str:
    """Describe the choices or the range of a key."""
    choices = [choice for choice in entry.get("anyOf", [entry]) if choice.get("type") != "null"]
    if all("enum" in choice or "const" in choice for choice in choices):
        values = [value for choice in choices for value in choice.get("enum", [choice.get("const")])]
        return f"One of {', '.join(f'`{value}`' for value in values)}."
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {choice[key]:g}" for choice in choices for key, sign in signs.items() if key in choice]
    return f"({', '.join(limits)})" if limits else ""


def format_default(field: dataclasses.Field[Any]) -> str:
    """Format a parameter's default as in params.yaml."""
    return REQUIRED if field.default is dataclasses.MISSING else json.dumps(field.default)


def render_parameter_table(component: type[Component], names: set[str]) -> str:
    """Render a table of parameters in the order of the class. Empty without parameters."""
    docs = _get_parameter_docs(component)
    rows = (
        (f"`{name}`", f"`{value}`", convert_inline_markup_to_markdown(docs.get(name, "")))
        for name, value in _get_parameter_defaults(component).items()
        if name in names
    )
    return _render_table("| parameter | default | |", rows)


def _select_own_parameters(component: type[Component], common: set[str], other: type[Component]) -> set[str]:
    """Select the parameters that not all components have, or that have another meaning than in ``other``."""
    docs, other_docs = _get_parameter_docs(component), _get_parameter_docs(other)
    names = _get_parameter_defaults(component)
    return {name for name in names if name not in common or docs.get(name) != other_docs.get(name)}


def _get_parameter_docs(component: type[Component]) -> dict[str, str]:
    """Documentation of each parameter, from the docstrings of the class and of its bases."""
    parameter_docs: dict[str, str] = {}
    for base in reversed(component.__mro__):
        parameter_docs |= _parse_own_parameter_docs(base)
    return parameter_docs


def get_inherited_parameter_docs(component: type[Component]) -> dict[str, str]:
    """Documentation of inherited parameters, from the docstrings of base classes."""
    own_docs = _parse_own_parameter_docs(component)
    return {name: text for name, text in _get_parameter_docs(component).items() if name not in own_docs}


def get_new_client_sentence(component: type) -> str:
    """The sentence about clients that never participated, from the class's docstring or that of its nearest base."""
    docstrings = (" ".join((vars(base).get("__doc__") or "").split()) for base in component.__mro__)
    return next((found[0] for text in docstrings if (found := NEW_CLIENT_SENTENCE.search(text))), "")


def get_inherited_new_client_sentence(component: type) -> str:
    """The sentence about clients that never participated, if it is not in the class's own docstring."""
    sentence = get_new_client_sentence(component)
    return "" if sentence in " ".join((component.__doc__ or "").split()) else sentence


def convert_docstring_to_markdown(text: str) -> str:
    """Convert paragraphs, displayed equations and literal blocks from reStructuredText to Markdown."""
    converted_blocks = []
    for block in re.split(r"\n\n(?! )", text.strip()):
        paragraph, directive, equation = block.partition(".. math::")
        if paragraph.strip():
            converted_blocks.append(convert_inline_markup_to_markdown(paragraph.strip()))
        if directive:
            lines = [line.strip() for line in equation.strip().splitlines() if line.strip()]
            if re.search(r"(?<!\\)&|\\\\$", "\n".join(lines), re.M):
                lines = [r"\begin{aligned}", *lines, r"\end{aligned}"]
            converted_blocks.append("\n".join(["```math", *lines, "```"]))
    return "\n\n".join(converted_blocks)


def convert_inline_markup_to_markdown(text: str) -> str:
    """Convert roles and literals in running text, and escape Markdown markup."""
    segments = re.split(r"((?::\w+:)?`[^`]+`|``[^`]+``)", text)
    for index, segment in enumerate(segments):
        if segment.startswith(":math:"):
            segments[index] = "$`" + " ".join(segment[7:-1].split()) + "`$"
        elif index % 2:
            literal = segment[segment.index("`") :].strip("`")
            segments[index] = f"`{literal.rpartition('.')[2] if literal.startswith('~') else literal}`"
        else:
            segments[index] = re.sub(r"(?<!\\)([*<])", r"\\\1", segment)
    return "".join(segments)


def render_deviations_table(component: type[Component]) -> str:
    """A table of the deviations of an algorithm: what the paper, the authors' code and fedpipe do."""
    rows = []
    for subject, text in _parse_docstring_section(component, "Deviations").items():
        start, *parts = re.split(r"(?:^|(?<=\.) )(Paper|Code|Here): ", text)
        if start:
            raise ValueError(f"{component.__name__}, {subject}: begin with 'Paper:', 'Code:' or 'Here:'")
        cells = {label: cell[0].upper() + cell[1:] for label, cell in zip(parts[::2], parts[1::2], strict=True)}
        row = [subject, *(cells.get(label, "–") for label in ("Paper", "Code", "Here"))]
        rows.append([convert_inline_markup_to_markdown(cell) for cell in row])
    return _render_table("| deviation | paper | authors' code | fedpipe |", rows)


def _parse_own_parameter_docs(component: type) -> dict[str, str]:
    """One line of documentation per parameter, from the class's own docstring."""
    parameter_docs: dict[str, str] = {}
    for names, text in _parse_docstring_section(component, "Parameters").items():
        parameter_docs |= dict.fromkeys(re.split(r", ?", names.partition(" :")[0]), text)
    return parameter_docs


def _parse_docstring_section(component: type, title: str) -> dict[str, str]:
    """The entries of a section of a class's own docstring by their heads, each text on one line."""
    sections = SECTION_HEADING.split(inspect.cleandoc(vars(component).get("__doc__") or ""))
    section = dict(zip(sections[1::2], sections[2::2], strict=True)).get(title, "")
    return {head: " ".join(text.split()) for head, text in re.findall(r"^(\S.*)\n((?:[ \n].*\n?)*)", section, re.M)}


def _get_parameter_defaults(component: type[Component]) -> dict[str, str]:
    return {field.name: format_default(field) for field in list_parameters(component)}
