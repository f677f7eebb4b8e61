"""Reads and writes YAML.

Users' files are read as plain values in bounded time, with one message per mistake. Files of fedpipe are read and
written with the fast parser of libyaml, because a study may have a thousand runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from fedpipe.core.errors import ArtifactError, SettingsError, format_error

MAX_DEPTH = 100  #: maximum nesting of lists and mappings. Settings need about ten
MAX_ALIASED_VALUES = 100_000  #: maximum number of values that aliases repeat
MAX_DIGITS = 100  #: maximum digits of a number, because parsing takes time
AMBIGUOUS_NUMBER = re.compile(r"[-+]?0[0-7_]+$|.*:")  #: such as 050, which YAML 1.1 reads as 40. DVC uses YAML 1.2
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")  #: kinds of values: those of JSON
_FAST_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FAST_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(yaml.SafeLoader):
    """A safe loader of plain values. Dates are text. Duplicate keys and ambiguous numbers are errors."""

    @override
    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level > MAX_DEPTH:  # the scanner's time grows with the square of the depth
            raise RecursionError
        super().fetch_flow_collection_start(token)

    @override
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise SettingsError(f"{key.value}: duplicate key, lines {lines[key.value]} and {line}. Remove one.")
            lines[key.value] = line
        return node

    @override
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if isinstance(node, yaml.ScalarNode) and kind in ("int", "float") and len(node.value) > MAX_DIGITS:
            raise _make_yaml_error(
                f"a number has {len(node.value):,} characters, and at most {MAX_DIGITS} can be used", node
            )
        if isinstance(node, yaml.ScalarNode) and kind in ("int", "float") and AMBIGUOUS_NUMBER.match(node.value):
            raise _make_yaml_error(
                f"'{node.value}' is ambiguous in YAML. Write a number without leading zeros and colons, or a text in "
                "quotes",
                node,
            )
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # such as `!!int ten` and `0x_`
            raise _make_yaml_error(f"'{str(node.value)[:MAX_DIGITS]}' is not a valid {kind}", node) from None


_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in PLAIN
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in (*PLAIN, "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(text: str, name: Path | str) -> Any:
    """Read a text as JSON values. No two values are the same object. Messages begin with ``name``, that of the source.

    Raises an error if it is not YAML, a key appears twice, or aliases contain themselves or repeat too much.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _reject_endless_aliases(node)
        return _copy_without_aliases(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError(f"{name}: not valid YAML ({position}{error.problem}).") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{name}: not valid YAML ({format_error(error)}).") from None
    except RecursionError:
        raise SettingsError(
            f"{name}: lists or mappings are nested too deeply. Use at most {MAX_DEPTH} levels."
        ) from None


def read_generated_yaml(path: Path) -> Any:
    """Read a file that `fedpipe plan` has written. Raises an error if it is missing or damaged."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_FAST_LOADER)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing. Run `fedpipe plan` to write it again.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArtifactError(f"{path} is damaged ({format_error(error)}). Delete it and run `fedpipe plan`.") from None


def read_verified_settings(path: Path, name: str, compute_name: Callable[[Any], str]) -> dict[str, Any]:
    """Read a settings file that `fedpipe plan` has written, whose path contains a hash of the settings.

    ``name`` is this part of the path, and ``compute_name`` computes it from the settings. Raises an error if the file
    is missing, is not YAML, or differs from its name.
    """
    try:
        settings: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=_FAST_LOADER)
        computed_name = compute_name(settings)
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{path} is missing. Run `fedpipe plan` to write it again, or type another name than '{name}'."
        ) from None
    except (AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ArtifactError(f"{path} is damaged ({format_error(error)}). Delete it and run `fedpipe plan`.") from None
    if computed_name != name:
        raise ArtifactError(
            f"{path} was edited: its settings belong to the name '{computed_name}'. Run `fedpipe plan` to write it "
            "again, and change the study's file instead."
        )
    return settings


def format_yaml(value: Any) -> str:
    """Format YAML with keys in their order."""
    return str(yaml.dump(value, Dumper=_FAST_DUMPER, sort_keys=False))


def flatten_mapping(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, nested_value in value.items()
        for name, leaf in flatten_mapping(nested_value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _reject_endless_aliases(root: yaml.Node) -> None:
    """Reject aliases that contain themselves, aliases that repeat too much, and deep nesting."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    ancestors: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, is_counted = stack.pop()
        parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        parts = [] if isinstance(node, yaml.ScalarNode) else parts
        if is_counted:
            ancestors.remove(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
            depths[id(node)] = 1 + max((depths[id(part)] for part in parts), default=0)
        elif id(node) in ancestors:
            raise _make_yaml_error("an alias contains itself", node)
        elif id(node) not in sizes:
            ancestors.add(id(node))
            stack += [(node, True), *((part, False) for part in parts)]
    if sizes[id(root)] - len(sizes) > MAX_ALIASED_VALUES:
        raise _make_yaml_error(f"aliases repeat more than {MAX_ALIASED_VALUES:,} values", root)
    if depths[id(root)] > MAX_DEPTH:
        raise RecursionError


def _copy_without_aliases(value: Any) -> Any:
    """Copy values without aliases, because a change of a shared object would appear at all its positions."""
    if isinstance(value, dict):
        return {key: _copy_without_aliases(part) for key, part in value.items()}
    return [_copy_without_aliases(part) for part in value] if isinstance(value, list) else value


def _make_yaml_error(message: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)
