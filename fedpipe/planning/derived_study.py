"""Derives a study from another one with `-S KEY=VALUE`: a file in `studies` that is named after the changed keys.

The derived file has the settings of the base with the new values. Its first two lines name the base and the options,
and contain a hash of the rest, so that an edit by the user is noticed and never overwritten.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.hashing import DIGEST_LENGTH, compute_json_digest
from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import PARAMS, STUDIES, StudyFiles
from fedpipe.core.yaml_text import read_yaml
from fedpipe.planning import grid, planner
from fedpipe.settings import loader, parser
from fedpipe.settings.dataset import format_download_command
from fedpipe.settings.loader import convert_to_mapping
from fedpipe.settings.params import KEYWISE_SECTIONS, Params

VALUE_ADVICE = "Use a value such as 0.1, null, '' or [64, 32]."
MAX_NAME_LENGTH = 80  #: characters of a derived file's name. A longer one ends with a hash
#: Replacements in file names for commas, colons, brackets and braces. Quotes and spaces are deleted.
NAME_CHARACTERS = str.maketrans({",": "+", ":": "=", "[": "(", "]": ")", "{": "(", "}": ")"} | dict.fromkeys("\"' "))
AMBIGUOUS_CHARACTERS = re.compile("[+=()\"' ]")  #: two values with these characters could get the same file name
ORIGIN_PATTERN = "# fedpipe derived this study from (.*?) with (-S .*)"  #: first line of a derived file
SCHEMA_COMMENT = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.M)


@dataclass(frozen=True, order=True)
class Override:
    """One option `-S KEY=VALUE`."""

    key: str  #: dotted key of params.yaml
    text: str  #: value as YAML, or several values separated by commas

    @classmethod
    def from_option(cls, option: str) -> Override:
        """Parse an option: KEY=VALUE, with a value in YAML and a key that can be set.

        Raises a SettingsError if it is not KEY=VALUE, the value is not YAML, or the key can't be set.
        """
        key, sign, text = (part.strip() for part in option.partition("="))
        if not sign or not text or not all(key.split(".")):
            raise SettingsError(f"-S: '{option}' is not KEY=VALUE. Use for example -S federation.rounds=10.")
        if not option.isprintable():
            raise SettingsError(f"-S {key}: {text!r} contains a line break or a control character. Remove it.")
        if key in KEYWISE_SECTIONS:
            raise SettingsError(f"-S {key}: can't be set as a whole. Set single keys, such as {key}.rounds.")
        override = cls(key, text)
        try:
            values = override.parse_values()
        except SettingsError as error:
            problem = str(error).removeprefix("-S: ").rstrip(".")
            raise SettingsError(f"-S {key}: '{text}' is {problem}. {VALUE_ADVICE}") from None
        if not values or not isinstance(values, list):
            raise SettingsError(f"-S {key}: '{text}' is not a value. {VALUE_ADVICE}")
        if override._has_list_key and len(values) > 1 and any(isinstance(value, list) for value in values):
            raise SettingsError(
                f"-S {key}: '{text}' has several lists, and {key} is one list. Use one, such as [1, 2]."
            )
        return override

    @property
    def is_grid(self) -> bool:
        """Whether the option has several values, but the key takes only one."""
        return not self._has_list_key and len(self.parse_values()) > 1

    @property
    def _has_list_key(self) -> bool:
        """Whether the key is a list in params.yaml, such as study.seeds."""
        section_name, _, name = self.key.partition(".")
        field = Params.model_fields.get(section_name)
        section = next(iter(get_args(field.annotation)), field.annotation) if field else None  # it may be optional
        keys = getattr(section, "model_fields", {})
        return name in keys and get_origin(keys[name].annotation) is tuple

    @property
    def file_name_part(self) -> str:
        """The key and the values in the name of a file."""
        return f"{self.key.removeprefix('algorithms.')}={self.text}".translate(NAME_CHARACTERS)

    def parse_values(self) -> Any:
        """Parse the values as a list."""
        return read_yaml(f"[{self.text}]", "-S")

    def parse_value(self) -> Any:
        """Parse the value of the key: a list if the key is one."""
        values = self.parse_values()
        return values if self._has_list_key and not isinstance(values[0], list) else values[0]

    def __str__(self) -> str:
        """The option, as you type it."""
        return f"-S {shlex.quote(f'{self.key}={self.text}')}"


@dataclass(frozen=True)
class DerivedStudy:
    """A study with some keys of another one changed."""

    base: Path
    overrides: tuple[Override, ...]

    @classmethod
    def from_options(cls, base: Path, options: Sequence[str]) -> DerivedStudy:
        """Derive a study. The order of the options has no effect.

        Raises a SettingsError if an option is not KEY=VALUE, a key is set twice, or the base is not a study.
        """
        base = layout.normalize_study_path(base)
        StudyFiles.from_params(base)  # raises an error if it is outside the project
        overrides = tuple(sorted(map(Override.from_option, options)))
        for override, other in itertools.pairwise(overrides):
            if grid.is_key_within_section(other.key, override.key):
                raise SettingsError(f"-S {other.key}: {override} sets it, too. Set each key once.")
        return cls(base, overrides)

    @cached_property
    def path(self) -> Path:
        """The derived file, next to the base or in `studies`."""
        folder = STUDIES if self.base == PARAMS else self.base.parent
        name = "-".join([self.base.stem, *(override.file_name_part for override in self.overrides)])
        simple_name = re.sub(r"[^A-Za-z0-9_.+()=-]", "_", name)
        is_ambiguous = any(AMBIGUOUS_CHARACTERS.search(override.text) for override in self.overrides)
        if simple_name != name or is_ambiguous or len(name) > MAX_NAME_LENGTH:
            digest = compute_json_digest([str(override) for override in self.overrides])
            simple_name = f"{simple_name[: MAX_NAME_LENGTH - DIGEST_LENGTH - 1]}-{digest}"
        return folder / f"{simple_name}.yaml"

    @property
    def command_options(self) -> str:
        """The options, as you type them."""
        return " ".join(map(str, self.overrides))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the base with the new values.

        Raises a SettingsError if the base can't be read, or a key can't be set in it.
        """
        settings = loader.read_params(self.base)
        presets_by_name = convert_to_mapping(settings.get("presets"))
        presets = [changes for changes in presets_by_name.values() if isinstance(changes, dict)]
        for override in sorted(self.overrides, key=lambda override: override.is_grid):
            _remove_key_from_grids_and_presets(settings, presets, override.key)
            _apply_override(settings, presets, override)
        return settings

    @cached_property
    def study_text(self) -> str:
        """Content of the derived file."""
        body = str(yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True, width=120))
        if comment := SCHEMA_COMMENT.search(self.base.read_text(encoding="utf-8")):
            schema_path = os.path.relpath(self.base.parent / comment[1], self.path.parent)
            body = f"# yaml-language-server: $schema={schema_path}\n{body}"
        return self._prepend_origin(body)

    @property
    def file_state(self) -> Literal["missing", "current", "outdated", "edited"]:
        """Whether the file exists, and has the settings of the base. An outdated file has not been edited."""
        if not self.path.is_file():
            return "missing"
        text = self.path.read_text(encoding="utf-8")
        if text == self.study_text:
            return "current"
        body = text.split("\n", 2)[-1]  # below the head
        return "outdated" if text == self._prepend_origin(body) else "edited"

    def make_plan(self, preset: str) -> planner.NewPlan:
        """Plan the study without writing anything, except its file if the command in an error reads the file."""
        try:
            self._reject_overrides_without_effect(preset)
            return planner.make_plan(self.path, preset, self.settings)
        except SettingsError as error:
            if format_download_command(self.path) in str(error) and self.file_state in ("missing", "outdated"):
                files.write_bytes(self.path, self.study_text.encode())
            suffix = f"(with {self.command_options})"
            lines = str(error).splitlines()
            raise SettingsError(
                "\n".join(line if self.command_options in line else f"{line} {suffix}" for line in lines)
            ) from None

    def write_study(self, preset: str) -> bool:
        """Check the study, and write its file if it is missing or outdated. Return whether it was.

        Raises a SettingsError if the study is invalid, or the user has edited its file.
        """
        self.require_unedited_file()
        if self.file_state == "current":
            return False
        self.make_plan(preset)
        files.write_bytes(self.path, self.study_text.encode())
        return True

    def require_unedited_file(self) -> None:
        """Reject a file that the user has edited, or that is derived from another study."""
        if self.file_state != "edited":
            return
        head = self.path.read_text(encoding="utf-8").partition("\n")[0]
        origin = re.fullmatch(ORIGIN_PATTERN, head)
        if origin and origin.groups() != (str(self.base), self.command_options):
            raise SettingsError(
                f"{self.path}: is derived from {origin[1]} with {origin[2]}, and has the name of the study that "
                f"{self.command_options} derives from {self.base}. Type `{layout.format_command('run', self.path)}` to "
                "run the existing study, or delete it to derive the other one."
            )
        raise SettingsError(
            f"{self.path}: differs from the study that {self.command_options} derives from {self.base}, because it "
            f"was edited. Type `{layout.format_command('run', self.path)}` to run it, or delete it to derive it again."
        )

    # -- content -------------------------------------------------------------------------------------------------------

    def _prepend_origin(self, body: str) -> str:
        """Add the two lines with the origin of the settings and their hash."""
        digest = hashlib.sha256(body.encode()).hexdigest()[:DIGEST_LENGTH]
        return (
            f"# fedpipe derived this study from {self.base} with {self.command_options}\n"
            f"# The same option derives it again after {self.base} has changed, but never if you edited the lines "
            f"below: {digest}\n{body}"
        )

    def _reject_overrides_without_effect(self, preset: str) -> None:
        """Require that each new value has an effect."""
        settings, _ = parser.apply_preset(self.settings, preset, format_download_command(self.path))
        base, path = loader.read_params(self.base), self.base
        if any(grid.is_key_within_section(override.key, "dataset") for override in self.overrides):
            base, path = base | {"dataset": self.settings.get("dataset") or {}}, self.path  # the base may lack data
        params = parser.parse_params(base, None, (), format_download_command(path))  # the names in its messages
        study = convert_to_mapping(settings.get("study"))
        grid_lists = convert_to_mapping(study.get("grid"))
        labels = study.get("algorithms", params.study.algorithms)
        if not isinstance(labels, (list, tuple)) or not all(isinstance(label, str) for label in labels):
            return  # the plan rejects the labels
        methods = {label: params.algorithms[label] for label in labels if label in params.algorithms}
        for override in self.overrides:
            grid.reject_unknown_key("-S", override.key, params)
            section, _, name = override.key.partition(".")
            label = name.partition(".")[0]
            if section == "algorithms" and label and label not in labels:
                raise SettingsError(
                    f"{override}: '{label}' is not in study.algorithms. {suggest_name(label, list(labels))}"
                )
            if override.is_grid:
                if override.key not in grid_lists:
                    raise SettingsError(
                        f"{override} has no effect, because the preset {preset} sets study. Use another preset."
                    )
                continue
            for label, method in methods.items():
                if key := _find_overlapping_key(override, [method.options.overrides]):
                    raise SettingsError(
                        f"{override} has no effect on {label}, because algorithms.{label}.overrides sets '{key}'. "
                        f"Change it in {self.base}."
                    )
            for name, values in grid_lists.items():
                if key := _find_overlapping_key(override, grid.list_axis_changes(name, values)):
                    raise SettingsError(
                        f"{override} does not apply, because '{name}' in study.grid sets {key}. Edit the grid of "
                        f"{self.base}, or remove it with -S 'study.grid={{}}'."
                    )


def _remove_key_from_grids_and_presets(settings: Any, presets: Sequence[Any], key: str) -> None:
    """Remove a key, and the keys in it, from presets and from grids. An axis of a grid keeps it."""
    for grid_lists in _list_grids(settings, presets):
        for name in [name for name in grid_lists if grid.is_key_within_section(name, key)]:
            if not isinstance(grid_lists[name], dict):
                del grid_lists[name]
    for changes in presets:
        for name in [name for name in changes if grid.is_key_within_section(name, key)]:
            del changes[name]


def _apply_override(settings: Any, presets: Sequence[Any], override: Override) -> None:
    """Set the value of an option in the settings, and in presets that set the grid or the key's section."""
    if override.is_grid:
        key_path, parse = ["study", "grid", override.key], override.parse_values
        targets = [changes["study.grid"] for changes in presets if isinstance(changes.get("study.grid"), dict)]
    else:
        key_path, parse = override.key.split("."), override.parse_value
        targets = [  # a preset's section is set before
            changes for changes in presets if any(grid.is_key_within_section(override.key, key) for key in changes)
        ]
    loader.set_value(settings, key_path, parse())
    for target in targets:
        target[override.key] = parse()  # parse again, because YAML writes a list that occurs twice as an alias


def _list_grids(settings: Any, presets: Sequence[Any]) -> list[Any]:
    """List the grid of the study, and the grids that presets set instead."""
    study = settings.get("study")
    grids = [
        study.get("grid") if isinstance(study, dict) else None,
        *(changes.get("study.grid") for changes in presets),
    ]
    return [entry for entry in grids if isinstance(entry, dict)]


def _find_overlapping_key(override: Override, changes: Sequence[dict[str, Any]]) -> str | None:
    """Find the first key in these mappings that overlaps the key of an option."""
    return next((key for part in changes for key in part if grid.has_overlap(key, override.key)), None)
