r"""The components' docstrings as Markdown, which GitHub shows with their equations.

Mathematics stands as $`...`$ and in ``math`` fences: between plain dollars GitHub takes a backslash off ``\,`` and
``\\``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from fedpipe import config, registry
from fedpipe.registry import Component, Kind

HEADING = re.compile(r"^(\w[\w ]*)\n-+\n", re.M)  #: of a numpydoc section


def markdown(kind: Kind) -> str:
    """A page of all components of a kind: a list of contents, then a section each."""
    plain = {name: registry.find(kind, name) for name in registry.names(kind)}
    found = {name: registry.documented(kind, component) for name, component in plain.items()}
    fields = {name: set(_defaults(component)) for name, component in found.items()}
    own = {name: set(_defaults(component)) for name, component in plain.items()}
    common = set.intersection(*own.values()).union(*(fields[name] - own[name] for name in found))
    without = [name for name in found if not common <= fields[name]]
    contents = [f"- [{name}](#{name}): {inline(registry.summary(component))}" for name, component in found.items()]
    all_of_them = f"All of them but {' and '.join(without)}" if without else "All of them"
    shared = [f"{all_of_them} have\n\n{table(next(iter(found.values())), common)}"] if common else []
    sections = [
        f"## {name}\n\n"
        + "\n\n".join(filter(None, (_text(component), table(component, set(_defaults(component)) - common))))
        for name, component in found.items()
    ]
    title = kind.plural.replace("datasets", "data sets").capitalize()
    head = [f"# {title}", f"Generated from the docstrings by `fedpipe docs {kind.plural}`; edit those."]
    return "\n\n".join([*head, "\n".join(contents), *shared, *sections]) + "\n"


def settings() -> str:
    """A page of all that params.yaml may hold, by section, made of its JSON Schema."""
    schema = config.json_schema()
    kinds = {kind.section: kind for kind in registry.KINDS}
    parts = [
        "# params.yaml",
        "Generated from the code by `fedpipe docs settings`. Every key has a default, so that a file says only what "
        "differs; an unknown key is refused.",
    ]
    for name, entry in schema["properties"].items():
        section, kind = _resolved(entry, schema), kinds.get(name)
        parts += [f"## {name}", inline(section.get("description", ""))]
        if kind:
            named = "Each entry" if kind is registry.ALGORITHM else f"`{kind.selector}`"
            parts.append(f"{named} names one of [these]({kind.plural}.md), whose parameters stand beside it.")
        parts.append(_keys(_common(section), schema))
        for choices in section.get("patternProperties", {}).values():
            for choice in (_resolved(choice, schema) for choice in choices.get("oneOf", ())):
                parts += [f"### {choice['properties']['kind']['const']}", inline(choice.get("description", ""))]
                parts.append(_keys(choice["properties"], schema))
    return "\n\n".join(filter(None, parts)) + "\n"


def _resolved(entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """An entry of a JSON Schema, or what it refers to, with what the entry itself says on top."""
    found = schema["$defs"][entry["$ref"].rpartition("/")[2]] if "$ref" in entry else {}
    return {**found, **entry}


def _common(section: dict[str, Any]) -> dict[str, Any]:
    """The keys of a section; where it names a component, those that all of them have."""
    choices = [choice for choice in section.get("anyOf", ()) if choice["title"] != "own"]
    choices = choices or [entry for entry in section.get("properties", {}).values() if entry.get("properties")]
    if not choices:
        return dict(section.get("properties", {}))
    common = set.intersection(*(set(choice["properties"]) for choice in choices))
    return {name: entry for name, entry in choices[0]["properties"].items() if name in common}


def _keys(entries: dict[str, Any], schema: dict[str, Any]) -> str:
    """A table of keys with their defaults; those of a mapping within follow it."""
    rows = list(_rows(entries, schema, ""))
    return "\n".join(["| key | default | |", "|---|---|---|", *rows]) if rows else ""


def _rows(entries: dict[str, Any], schema: dict[str, Any], above: str) -> Iterator[str]:
    for name, entry in entries.items():
        if "const" in entry:  # what names a component
            continue
        resolved = _resolved(entry, schema)
        within = resolved.get("properties", {})
        default = f"`{json.dumps(entry['default'])}`" if "default" in entry and not within else ""
        told = " ".join(filter(None, (inline(resolved.get("description", "")), _values(resolved))))
        yield f"| `{above}{name}` | {default} | {told.replace('|', chr(92) + '|')} |"
        yield from _rows(within, schema, f"{above}{name}.")


def _values(entry: dict[str, Any]) -> str:
    """Which values a key may have, where that is a choice or a range."""
    choices = [choice for choice in entry.get("anyOf", [entry]) if choice.get("type") != "null"]
    if all("enum" in choice or "const" in choice for choice in choices):
        values = [value for choice in choices for value in choice.get("enum", [choice.get("const")])]
        return f"One of {', '.join(f'`{value}`' for value in values)}."
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {choice[key]:g}" for choice in choices for key, sign in signs.items() if key in choice]
    return f"({', '.join(limits)})" if limits else ""


def default(field: dataclasses.Field[Any]) -> str:
    """A parameter's default as it would stand in params.yaml."""
    return "(required)" if field.default is dataclasses.MISSING else json.dumps(field.default)


def table(component: type[Component], names: set[str]) -> str:
    """A table of these parameters, in the order of the class; nothing where there are none."""
    told = inherited(component) | _parameters(component)
    rows = [
        f"| `{name}` | `{value}` | {inline(told.get(name, '')).replace('|', chr(92) + '|')} |"
        for name, value in _defaults(component).items()
        if name in names
    ]
    return "\n".join(["| parameter | default | |", "|---|---|---|", *rows]) if rows else ""


def inherited(component: type[Component]) -> dict[str, str]:
    """What is said of each parameter that the component's own docstring does not name, by those it derives from."""
    told: dict[str, str] = {}
    for base in component.__mro__[1:]:
        told = _parameters(base) | told
    own = _parameters(component)
    return {name: text for name, text in told.items() if name not in own}


def blocks(text: str) -> str:
    """Paragraphs, displayed equations and literal blocks of reStructuredText as Markdown."""
    made = []
    for block in re.split(r"\n\n(?! )", text.strip()):
        before, directive, equation = block.partition(".. math::")
        if before.strip():
            made.append(inline(before.strip()))
        if directive:
            lines = [line.strip() for line in equation.strip().splitlines() if line.strip()]
            if re.search(r"(?<!\\)&|\\\\$", "\n".join(lines), re.M):
                lines = [r"\begin{aligned}", *lines, r"\end{aligned}"]
            made.append("\n".join(["```math", *lines, "```"]))
    return "\n\n".join(made)


def inline(text: str) -> str:
    """Running text: roles and literals; what Markdown would take for markup is escaped."""
    parts = re.split(r"((?::\w+:)?`[^`]+`|``[^`]+``)", text)
    for index, part in enumerate(parts):
        if part.startswith(":math:"):
            parts[index] = "$`" + " ".join(part[7:-1].split()) + "`$"
        elif index % 2:
            literal = part[part.index("`") :].strip("`")
            parts[index] = f"`{literal.rpartition('.')[2] if literal.startswith('~') else literal}`"
        else:
            parts[index] = re.sub(r"(?<!\\)([*<])", r"\\\1", part)
    return "".join(parts)


def _text(component: type[Component]) -> str:
    """All of a docstring before its first section."""
    return blocks(HEADING.split(inspect.getdoc(component) or "")[0])


def _parameters(component: type) -> dict[str, str]:
    """What a class's own docstring says of each parameter, on one line."""
    parts = HEADING.split(inspect.cleandoc(vars(component).get("__doc__") or ""))
    section = dict(zip(parts[1::2], parts[2::2], strict=True)).get("Parameters", "")
    told: dict[str, str] = {}
    for names, text in re.findall(r"^(\S.*)\n((?:[ \n].*\n?)*)", section, re.M):
        told |= dict.fromkeys(re.split(r", ?", names.partition(" :")[0]), " ".join(text.split()))
    return told


def _defaults(component: type[Component]) -> dict[str, str]:
    return {field.name: default(field) for field in registry.parameters_of(component)}
