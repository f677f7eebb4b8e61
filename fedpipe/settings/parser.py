"""Validates the content of a YAML file, with one message per mistake."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from fedpipe.core.components import registry
from fedpipe.core.components.component import PARTITION, list_parameters
from fedpipe.core.errors import Location, SettingsError, format_validation_errors, suggest_name
from fedpipe.core.storage.layout import FULL_PRESET
from fedpipe.settings.dataset import DOWNLOAD_COMMAND, Data
from fedpipe.settings.diagnostics import DIAGNOSTIC_KINDS, get_diagnostic_kind
from fedpipe.settings.loader import override_settings
from fedpipe.settings.names import replace_names_by_numbers
from fedpipe.settings.params import STUDY_WIDE_SECTIONS, Params


def find_ignored_partition_parameters(settings: dict[str, Any]) -> dict[str, str]:
    """Find parameters of the partition that only other schemes have, by key, each with a warning.

    If a grid or `dvc exp run -S` changes only the scheme, the parameters of the old scheme remain.
    """
    section = settings.get("partition")
    if not isinstance(section, dict):
        return {}
    scheme = section.get("scheme", PARTITION.default)
    try:
        scheme_parameters = _list_scheme_parameters(str(scheme))
    except SettingsError:  # reported by the validation
        return {}
    other_parameters = {
        name for other in registry.list_components(PARTITION) for name in _list_scheme_parameters(other)
    } - scheme_parameters
    return {
        f"partition.{name}": f"partition.{name}: {value} is ignored, because the scheme {scheme} has no such parameter."
        for name, value in section.items()
        if name in other_parameters - {"scheme"}
    }


def _list_scheme_parameters(scheme: str) -> set[str]:
    return {field.name for field in list_parameters(registry.find_component(PARTITION, scheme))}


def parse_params(
    settings: dict[str, Any],
    download_command: str | None = DOWNLOAD_COMMAND,
    labels: Collection[str] | None = None,
    obtain_command: str | None = None,
) -> Params:
    """Validate the settings of a YAML file, and fill in defaults.

    Parameters
    ----------
    settings
        Settings by section.
    download_command
        Command that declares files in the study's file. None if there is none, for example at a point of a grid.
    labels
        Labels of the methods with these settings. By default the study's methods without `overrides`.
    obtain_command
        Command that obtains the study's data. By default ``download_command``.

    Raises
    ------
    SettingsError
        One line for each mistake.
    """
    if ignored_parameters := find_ignored_partition_parameters(settings):
        ignored = {key.partition(".")[2] for key in ignored_parameters}
        partition = {name: value for name, value in settings["partition"].items() if name not in ignored}
        settings = settings | {"partition": partition}
    settings = replace_names_by_numbers(settings)
    obtain_command = obtain_command or download_command or DOWNLOAD_COMMAND
    context = {"download": download_command, "labels": labels, "obtain": obtain_command}
    try:
        params = Params.model_validate(settings, context=context)
    except ValidationError as error:
        list_known_keys = partial(_list_known_keys, settings=settings)
        message = "\n".join(format_validation_errors(error, settings, "", list_known_keys))
        # Models, data sets and partitions don't know their study's file.
        raise SettingsError(message.replace(f"`{DOWNLOAD_COMMAND}`", f"`{obtain_command}`")) from None
    params._ignored_parameters = ignored_parameters
    return params


def parse_dataset(settings: Any) -> Data:
    """Validate the section `dataset` alone (see :func:`parse_params`)."""
    return Data.from_settings(settings, "dataset")


def _list_known_keys(location: Location, settings: Any) -> list[str]:
    section: Any = Params
    if location[:1] == ("diagnostics",) and len(location) == 2:
        kind = get_diagnostic_kind(settings["diagnostics"][location[1]])
        section, location = DIAGNOSTIC_KINDS[kind], ()
    for part in location:
        if not hasattr(section, "model_fields"):  # the key of a mapping
            section = get_args(section)[1]
            continue
        annotation = section.model_fields[str(part)].annotation
        is_union = get_origin(annotation) in (Union, UnionType)  # an optional section
        section = get_args(annotation)[0] if is_union else annotation
    return list(section.model_fields)


def apply_preset(
    settings: dict[str, Any], preset: str, download_command: str = DOWNLOAD_COMMAND
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Apply a preset. Return the settings, and the keys of the preset that override grid and methods.

    ``download_command`` is the command that declares files in the study's file.

    Raises a SettingsError if the study has no such preset.
    """
    if preset == FULL_PRESET:
        return settings, {}
    presets = parse_params(settings, download_command).presets
    if preset not in presets:
        raise SettingsError(
            f"--preset: '{preset}' is not a preset of this study. {suggest_name(preset, [*presets, FULL_PRESET])}"
        )
    changes = presets[preset]
    return override_settings(settings, changes), {
        key: value for key, value in changes.items() if key.partition(".")[0] not in STUDY_WIDE_SECTIONS
    }
