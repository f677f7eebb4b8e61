"""Reads a study's YAML file before its validation, and overrides values at dotted keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpipe.core.errors import SettingsError
from fedpipe.core.yaml_text import read_yaml


def read_params(path: Path) -> dict[str, Any]:
    """Read the YAML file without validation.

    Raises a SettingsError if the file is missing or is not YAML.
    """
    try:
        settings = read_yaml(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise SettingsError(f"{path}: the file does not exist. Change to the folder that contains it.") from None
    except OSError as error:
        raise SettingsError(f"{path}: can't be read ({error.strerror}). Use a YAML file.") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from None
    if not isinstance(settings, dict):
        raise SettingsError(f"{path}: not a mapping of sections. Use sections such as `federation: {{clients: 10}}`.")
    return settings


def convert_to_mapping(value: Any) -> dict[str, Any]:
    """Copy a mapping. Any other value, which the validation rejects, becomes an empty one."""
    return dict(value) if isinstance(value, Mapping) else {}


def override_settings(settings: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """Copy ``settings`` and set the value at each dotted key. Later changes take precedence."""
    result = copy.deepcopy(settings)
    for key, value in (change for part in changes for change in copy.deepcopy(part).items()):
        set_value(result, key.split("."), value)
    return result


def set_value(settings: dict[str, Any], key_path: Sequence[str], value: Any) -> None:
    """Set the value at a path of keys, and create missing sections. Reject a path through a value that has no keys."""
    *sections, last = key_path
    for section in sections:
        if settings.get(section) is None:
            settings[section] = {}
        settings = settings[section]
        if not isinstance(settings, dict):
            raise SettingsError(
                f"{'.'.join(key_path)}: can't be set, because '{section}' is {settings!r} and has no keys. Set "
                f"'{section}' itself."
            )
    settings[last] = value
