"""The points of a study's grid: which keys each of them sets, and the settings there, of each method."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fedpipe import config
from fedpipe.config import FIXED, WHOLE, Params
from fedpipe.errors import SettingsError, nearest


@dataclass(frozen=True)
class Point:
    """A point of the grid: by the name of each list or axis the value, and by key what is set there."""

    values: dict[str, Any]
    changes: dict[str, Any]

    def at(self, label: str, keys: dict[str, list[str]]) -> dict[str, Any]:
        """The part that concerns an algorithm; ``keys`` are those that each name sets."""
        return {name: value for name, value in self.values.items() if concerns(keys[name], label)}


def keys(raw: dict[str, Any], study: Params, above: dict[str, Any]) -> dict[str, list[str]]:
    """The keys that each list or axis of a study's grid sets; ``above`` are those that the scale sets.

    Raises
    ------
    SettingsError
        One can't be varied, varies nothing, or is set twice.
    """
    found: dict[str, list[str]] = {}
    for name, values in study.study.grid.items():
        if not values:
            kind = "axis has no values; it should have" if isinstance(values, dict) else "list is empty; it should hold"
            raise SettingsError(f"study.grid.{name}: its {kind} at least one value.")
        axis = values.values() if isinstance(values, dict) else [[name]]
        found[name] = list(dict.fromkeys(key for part in axis for key in part))
        for key in found[name]:
            _check(name, key, raw, study)
        if not found[name]:
            raise SettingsError(f"study.grid.{name}: its values set no keys; at least one of them should.")
        if not any(concerns(found[name], label) for label in study.study.algorithms):
            raise SettingsError(f"study.grid: '{name}' varies nothing, since its algorithm is not in study.algorithms.")
    for (name, key), (other, twice) in _set_at_once(study, found):
        if within(key, twice) or within(twice, key):
            both = f"'{name}' and '{other}' set" if name != other else f"'{name}' sets"
            what = f"'{key}'" if key == twice else f"'{key}' and '{twice}', of which one is in the other"
            raise SettingsError(f"study.grid: {both} {what}; a key should be set once.")
    for name in (name for name, values in study.study.grid.items() if not isinstance(values, dict)):
        if higher := next((key for key in above if within(name, key)), None):
            raise SettingsError(f"study.grid: '{name}' varies nothing, since the scale sets '{higher}'.")
    return found


def _set_at_once(study: Params, keys: dict[str, list[str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of keys that one point may set, each with the name that sets it."""
    for name, values in study.study.grid.items():
        for part in values.values() if isinstance(values, dict) else ():
            for key, twice in itertools.combinations(part, 2):
                yield (name, key), (name, twice)
    for name, other in itertools.combinations(keys, 2):
        for key, twice in itertools.product(keys[name], keys[other]):
            yield (name, key), (other, twice)


def points(study: Params) -> Iterator[Point]:
    """All points, the last name's values changing fastest."""
    grid = study.study.grid
    for chosen in itertools.product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        changes: dict[str, Any] = {}
        for name, value in values.items():
            axis = grid[name]
            changes |= axis[value] if isinstance(axis, dict) else {name: value}
        yield Point(values, changes)


def settings(
    raw: dict[str, Any], study: Params, point: Point, above: dict[str, Any], obtain: str
) -> Iterator[tuple[Params, list[str], dict[str, Any]]]:
    """The settings at a point, with the methods that have them and what these set for themselves alone, by key.

    What the scale sets is not among it, since that is the same for all. The grid's keys stand above the study's, a
    method's own above these, and those of the scale above all. ``obtain`` is the command that obtains the study's data.

    Raises
    ------
    SettingsError
        They can't be; each sentence says where.
    """
    values = ", ".join(f"{name}: {value}" for name, value in point.values.items())
    at = [f"at the point {values} of study.grid"] if values else []
    with _saying_where(at):
        there = config.override(raw, point.changes, above)
    groups: dict[str, list[str]] = {}
    own: dict[str, dict[str, Any]] = {}
    for label in study.study.algorithms:
        changes = config.method(there, label).settings
        name = json.dumps(changes, sort_keys=True, default=str)
        groups.setdefault(name, []).append(label)
        own[name] = changes
    for name, labels in groups.items():
        if not (point.changes or own[name]):
            yield study, labels, {}
            continue
        with _saying_where([*at, *([f"with algorithms.{labels[0]}.with"] if own[name] else [])]):
            whole = config.override(there, own[name], above)
            params = config.parse(whole, None, labels, obtain)
        keys = list(own[name])
        void = {key for place, key in enumerate(keys) if any(within(key, one) for one in (*keys[place + 1 :], *above))}
        yield params, labels, {key: _value(whole, key) for key in keys if key not in void}


def _value(settings: dict[str, Any], key: str) -> Any:
    """The value at a dotted key."""
    found: Any = settings
    for part in key.split("."):
        found = found[part]
    return found


@contextmanager
def _saying_where(places: list[str]) -> Iterator[None]:
    """Add to each sentence about wrong settings where in the study they are."""
    try:
        yield
    except SettingsError as error:
        behind = f" ({', '.join(places)})" if places else ""
        raise SettingsError("\n".join(f"{line}{behind}" for line in str(error).splitlines())) from None


def concerns(keys: list[str], label: str) -> bool:
    """Whether any of these keys makes a difference to an algorithm."""
    return any(
        not within(key, "algorithms") or key == "algorithms" or within(key, f"algorithms.{label}") for key in keys
    )


def within(key: str, section: str) -> bool:
    """Whether a dotted key is a section or stands in it."""
    return f"{key}.".startswith(f"{section}.")


def _check(name: str, key: str, raw: dict[str, Any], study: Params) -> None:
    where = f"study.grid.{name}" if isinstance(study.study.grid[name], dict) else "study.grid"
    _refuse_unknown(where, key, study)
    fixed = next((section for section in FIXED if within(key, section) or within(section, key)), None)
    if fixed:
        raise SettingsError(f"{where}: '{key}' can't be varied, since {fixed} is one for the whole study.")
    if within(key, "algorithms") and key.endswith((".shown", ".title")):
        raise SettingsError(
            f"{where}: '{key}' can't be varied, since a table shows a method by one protocol and under one title."
        )
    if key in WHOLE:
        raise SettingsError(
            f"{where}: '{key}' can't be varied as a whole, since all of its keys that are not given would have their "
            f"defaults; name its keys, as {key}.rounds."
        )
    for label in study.study.algorithms:
        own = next((one for one in config.method(raw, label).settings if within(key, one)), None)
        if own:
            raise SettingsError(
                f"{where}: '{key}' varies nothing for {label}, since algorithms.{label}.with sets '{own}'."
            )


def _refuse_unknown(where: str, key: str, study: Params) -> None:
    """Refuse a key that begins with no section, as `mu`; the sentence names the full keys that end in it."""
    if key.partition(".")[0] in Params.model_fields:
        return
    components = {f"algorithms.{label}": study.algorithms[label] for label in study.study.algorithms}
    components |= {"partition": study.partition, "model": study.model, "dataset": study.dataset.source}
    known = [f"{place}.{field.name}" for place, found in components.items() for field in dataclasses.fields(found)]
    for section in ("dataset", "transforms", "federation", "evaluation"):
        known += [f"{section}.{field}" for field in type(getattr(study, section)).model_fields]
    meant = [full for full in known if full.endswith(f".{key}")]
    hint = f"did you mean {' or '.join(meant)}?" if meant else nearest(key, [*Params.model_fields])
    raise SettingsError(f"{where}: '{key}' is no key of params.yaml; {hint}")
