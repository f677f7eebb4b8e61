"""Expands a study's grid: the keys that each point sets, and the settings of each method there."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from fedpipe.core.errors import SettingsError, find_key_by_other_name, suggest_key
from fedpipe.settings import loader, methods, parser
from fedpipe.settings.params import KEYWISE_SECTIONS, STUDY_WIDE_SECTIONS, Params


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid: the value of each list or axis, and the keys that it sets."""

    values: dict[str, Any]
    changes: dict[str, Any]

    @property
    def locations(self) -> list[str]:
        """Text about the point for messages. Empty without a grid."""
        values = ", ".join(f"{name}: {value}" for name, value in self.values.items())
        return [f"at the point {values} of study.grid"] if values else []


def collect_grid_keys(study_params: Params, preset_changes: dict[str, Any]) -> dict[str, list[str]]:
    """Collect the keys that each list or axis of the grid sets. ``preset_changes`` are the keys of the preset.

    Reject a key that can't be varied, has no effect, or is set twice.
    """
    keys_by_name: dict[str, list[str]] = {}
    for name, values in study_params.study.grid.items():
        if not values:
            problem = "the axis has no values" if isinstance(values, dict) else "the list is empty"
            raise SettingsError(f"study.grid.{name}: {problem}. Use at least one value.")
        keys_by_name[name] = list(dict.fromkeys(itertools.chain.from_iterable(list_axis_changes(name, values))))
        for key in keys_by_name[name]:
            _check_grid_key(name, key, study_params)
        if not keys_by_name[name]:
            raise SettingsError(f"study.grid.{name}: its values set no keys. Set a key in at least one of them.")
        if not any(has_effect_on_algorithm(keys_by_name[name], label) for label in study_params.study.algorithms):
            raise SettingsError(
                f"study.grid: '{name}' has no effect, because its algorithm is not in study.algorithms. Add the "
                "algorithm, or remove it from the grid."
            )
    for (name, key), (other, other_key) in _iterate_key_pairs_of_points(study_params, keys_by_name):
        if has_overlap(key, other_key):
            setters = f"'{name}' and '{other}' set" if name != other else f"'{name}' sets"
            keys_text = f"'{key}'" if key == other_key else f"'{key}' and '{other_key}', which overlap"
            raise SettingsError(f"study.grid: {setters} {keys_text}. Set each key once.")
    for name in (name for name, values in study_params.study.grid.items() if not isinstance(values, dict)):
        if preset_key := next((key for key in preset_changes if is_key_within_section(name, key)), None):
            raise SettingsError(
                f"study.grid: '{name}' has no effect, because the preset sets '{preset_key}'. Remove one of them."
            )
    return keys_by_name


def _iterate_key_pairs_of_points(
    study_params: Params, keys: dict[str, list[str]]
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Iterate over pairs of keys that one point may set, each with its name."""
    for name, values in study_params.study.grid.items():
        for changes in list_axis_changes(name, values):
            for key, other_key in itertools.combinations(changes, 2):
                yield (name, key), (name, other_key)
    for name, other in itertools.combinations(keys, 2):
        for key, other_key in itertools.product(keys[name], keys[other]):
            yield (name, key), (other, other_key)


def iterate_grid_points(study_params: Params) -> Iterator[GridPoint]:
    """Iterate over all points. The values of the last name change fastest."""
    grid = study_params.study.grid
    axes = [zip(values, list_axis_changes(name, values), strict=True) for name, values in grid.items()]
    for point in itertools.product(*axes):
        values = {name: value for name, (value, _) in zip(grid, point, strict=True)}
        yield GridPoint(values, {key: value for _, changes in point for key, value in changes.items()})


def list_axis_changes(name: str, values: Any) -> list[dict[str, Any]]:
    """List the keys that each value of a list or an axis sets. Anything else, which the plan rejects, sets none."""
    if isinstance(values, (list, tuple)):
        return [{name: value} for value in values]
    return [loader.convert_to_mapping(changes) for changes in loader.convert_to_mapping(values).values()]


def build_grid_point_params(
    raw: dict[str, Any], study_params: Params, point: GridPoint, preset_changes: dict[str, Any], obtain_command: str
) -> Iterator[tuple[Params, list[str], dict[str, Any]]]:
    """Resolve the settings at a point. Yields settings, the methods that have them, and their overrides by key.

    The order of precedence is: preset, overrides of the method, grid, study. Keys of the preset are not among the
    overrides. ``obtain_command`` is the command that obtains the study's data.

    Raises a SettingsError, which names the point, if its settings are invalid.
    """
    with add_location_to_errors(point.locations):
        point_settings = loader.override_settings(raw, point.changes, preset_changes)
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for label in study_params.study.algorithms:
        overrides = methods.parse_method_options(point_settings, label).overrides
        groups.setdefault(json.dumps(overrides, default=str), (overrides, []))[1].append(label)
    for overrides, labels in groups.values():
        if not (point.changes or overrides):
            yield study_params, labels, {}
            continue
        with add_location_to_errors(
            [*point.locations, *([f"with algorithms.{labels[0]}.overrides"] if overrides else [])]
        ):
            whole = loader.override_settings(point_settings, overrides, preset_changes)
            params = parser.parse_params(whole, None, labels, obtain_command)
        keys = list(overrides)
        void = {
            key
            for position, key in enumerate(keys)
            if any(is_key_within_section(key, one) for one in (*keys[position + 1 :], *preset_changes))
        }
        yield params, labels, {key: reduce(getitem, key.split("."), whole) for key in keys if key not in void}


def build_draw_params(
    raw: dict[str, Any],
    point: GridPoint,
    preset_changes: dict[str, Any],
    obtain_command: str,
    label: str,
    values: dict[str, Any],
) -> Params:
    """Resolve the settings of a method at a point with the drawn values of `tune`, which no other key overlaps.

    Raises a SettingsError, which names the point and the draw, if a drawn value is invalid.
    """
    drawn_values = ", ".join(f"{key}: {value}" for key, value in values.items())
    locations = [*point.locations, f"with {drawn_values}, which tune.over draws for {label}"]
    with add_location_to_errors(locations):
        point_settings = loader.override_settings(raw, point.changes, preset_changes)
        overrides = methods.parse_method_options(point_settings, label).overrides
        whole = loader.override_settings(point_settings, overrides, values, preset_changes)
        return parser.parse_params(whole, None, [label], obtain_command)


@contextmanager
def add_location_to_errors(locations: list[str]) -> Iterator[None]:
    """Add the location to each message about invalid settings."""
    try:
        yield
    except SettingsError as error:
        suffix = f" ({', '.join(locations)})" if locations else ""
        raise SettingsError("\n".join(f"{line}{suffix}" for line in str(error).splitlines())) from None


def has_effect_on_algorithm(keys: list[str], label: str) -> bool:
    """Whether any of these keys has an effect on an algorithm."""
    return any(not is_key_within_section(key, "algorithms") or has_overlap(key, f"algorithms.{label}") for key in keys)


def is_key_within_section(key: str, section: str) -> bool:
    """Whether a dotted key is a section or in it."""
    return f"{key}.".startswith(f"{section}.")


def has_overlap(key: str, other: str) -> bool:
    """Whether two dotted keys are equal, or one is a section that contains the other."""
    return is_key_within_section(key, other) or is_key_within_section(other, key)


def _check_grid_key(name: str, key: str, study_params: Params) -> None:
    axis = study_params.study.grid[name]
    location = f"study.grid.{name}" if isinstance(axis, dict) else "study.grid"
    values = [changes.get(key) for changes in list_axis_changes(name, axis)]
    reject_unknown_key(location, key, study_params)
    for section in (*STUDY_WIDE_SECTIONS, "evaluation.protocols", "evaluation.metrics"):  # those of all tables
        if has_overlap(key, section):
            raise SettingsError(
                f"{location}: '{key}' can't be varied, because {section} applies to the whole study. Remove it."
            )
    for option_key in (key, *(f"{key}.{option}" for value in values if isinstance(value, dict) for option in value)):
        if option_key.split(".")[::2] in (["algorithms", "protocol"], ["algorithms", "title"]):
            raise SettingsError(
                f"{location}: '{option_key}' can't be varied, because a table shows one protocol and one title per "
                "method. Remove it."
            )
    if key in KEYWISE_SECTIONS:
        raise SettingsError(
            f"{location}: '{key}' can't be varied as a whole, because its other keys would have their defaults. "
            f"Vary single keys, such as {key}.rounds."
        )
    for label in study_params.study.algorithms:
        for method_key in study_params.algorithms[label].options.overrides:
            if is_key_within_section(key, method_key):
                raise SettingsError(
                    f"{location}: '{key}' has no effect on {label}, because algorithms.{label}.overrides sets "
                    f"'{method_key}'. Remove one of them."
                )


def reject_unknown_key(location: str, key: str, study_params: Params) -> None:
    """Reject a key without a section, such as `mu`. The message has the full keys that end in it."""
    if key.partition(".")[0] in Params.model_fields:
        return
    components = {
        **{f"algorithms.{label}": study_params.algorithms[label].algorithm for label in study_params.study.algorithms},
        "partition": study_params.partition,
        "model": study_params.model,
        "dataset": study_params.dataset.effective_dataset,
    }
    known_keys = [
        f"{prefix}.{field.name}" for prefix, component in components.items() for field in dataclasses.fields(component)
    ]
    for section in ("dataset", "transforms", "federation", "evaluation"):
        known_keys += [f"{section}.{field}" for field in type(getattr(study_params, section)).model_fields]
    matches = [full for full in known_keys if full.endswith(f".{key}")]
    if common_key := find_key_by_other_name(key):
        matches = list(dict.fromkeys([common_key, *matches]))
    quoted_matches = " or ".join(f"'{match}'" for match in matches)
    hint = f"Did you mean {quoted_matches}?" if matches else suggest_key(key, [*Params.model_fields])
    raise SettingsError(f"{location}: '{key}' is not a key of params.yaml. {hint}")
