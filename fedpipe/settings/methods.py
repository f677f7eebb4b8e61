"""The entries of `algorithms`, and the sections that name a component."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator

from fedpipe.core.components import registry
from fedpipe.core.components.component import ALGORITHM, MODEL, PARTITION, Component, ComponentKind
from fedpipe.core.errors import SettingsError, find_nearest_name, suggest_name
from fedpipe.settings.base import LABEL_PATTERN, Label, Protocol, Section
from fedpipe.settings.loader import convert_to_mapping

#: Keys of `federation` that a method can't override, because they determine the data
DATA_KEYS = {"federation.clients", "federation.held_out", "federation.drift"}


def _parse_component_if_raw(kind: ComponentKind, value: Any) -> Component:
    return value if isinstance(value, Component) else registry.parse_component(kind, value)


class MethodOptions(Section):
    """Options of an entry of `algorithms` that are not parameters of the algorithm."""

    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of federation, model and transforms with values for this method only, such as "
        "`{federation.learning_rate: 0.05}`.",
    )
    protocol: Protocol | None = Field(
        None, description="Protocol with which tables report this method. By default the study's first."
    )
    title: str | None = Field(
        None,
        description="Name of this method in tables and figures, such as `cwFedAvg (λ = 10)`. By default "
        "its algorithm's name, such as FedALA. If the entry has another name than its algorithm, the entry's name.",
    )

    @field_validator("title")
    @classmethod
    def _check_title(cls, title: str | None) -> str | None:
        if title is not None and (
            not title or not title.isprintable() or title != " ".join(title.split()) or title[0] == "_" or "|" in title
        ):
            raise ValueError(
                f"{title!r} can't be used. Use one line with single spaces, without '|', and without '_' at its start."
            )
        return title

    @field_validator("overrides")
    @classmethod
    def _check_override_keys(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for key in overrides:
            is_data_key = ".".join(key.split(".")[:2]) in DATA_KEYS
            if is_data_key or key.partition(".")[0] not in {"federation", "model", "transforms"}:
                raise ValueError(
                    f"'{key}' can't differ between methods, because they are compared on the same data. Use a key "
                    "of federation (except clients, held_out and drift), model or transforms."
                )
            if key == "federation":
                raise ValueError(
                    "'federation' can't be set as a whole, because its other keys would get their defaults. Set "
                    "single keys, such as federation.learning_rate."
                )
        return overrides


METHOD_KEYS = tuple(MethodOptions.model_fields)


@dataclass(frozen=True)
class Method:
    """A method of a study: an entry of `algorithms`."""

    algorithm: Component
    options: MethodOptions


def parse_method_options(settings: Any, label: str) -> MethodOptions:
    """Parse the options of a method in settings that are not validated yet, such as those of a grid point.

    Raises a SettingsError with one line for each mistake.
    """
    return _parse_method_entry_options(convert_to_mapping(settings.get("algorithms")).get(label), label)


def get_method_title(label: str, method: Method) -> str:
    """Get the name of a method in tables and figures: its `title`, its algorithm's display name, or its label.

    Only an entry with the name of its algorithm has the display name, because several entries may use one algorithm.
    """
    if method.options.title:
        return method.options.title
    if label != registry.get_component_name(ALGORITHM, type(method.algorithm)):
        return label
    return get_algorithm_display_name(method.algorithm) + (" + DW" if getattr(method.algorithm, "dw", None) else "")


def get_algorithm_display_name(algorithm: Component) -> str:
    """Get an algorithm's name in papers, such as FedALA: the first line of its module's docstring, or else its name."""
    docstring = sys.modules[type(algorithm).__module__].__doc__
    return (docstring or registry.get_component_name(ALGORITHM, type(algorithm))).partition("\n")[0].rstrip(".")


def _parse_method_entry_options(entry: Any, label: str) -> MethodOptions:
    method_settings = {name: value for name, value in convert_to_mapping(entry).items() if name in METHOD_KEYS}
    return MethodOptions.from_settings(method_settings, f"algorithms.{label}")


def parse_method(entry: Any, label: str) -> Method:
    """Parse an entry of `algorithms`.

    Raises a SettingsError with one line for each mistake.
    """
    return Method(options=_parse_method_entry_options(entry, label), algorithm=_parse_algorithm_entry(entry, label))


def _parse_algorithm_entry(entry: Any, label: str) -> Component:
    if isinstance(entry, Mapping):
        entry = {name: value for name, value in entry.items() if name not in METHOD_KEYS}
    return registry.parse_component(ALGORITHM, entry, label, METHOD_KEYS)


def parse_algorithm(settings: Mapping[str, Any], label: str, changes: Mapping[str, Any]) -> Component:
    """Parse the algorithm of a method in a YAML file, with changed parameters. Other settings are not validated.

    Raises a SettingsError if the study has no such method, or a parameter is wrong.
    """
    entries = convert_to_mapping(settings.get("algorithms"))
    known_labels = sorted({*entries, *registry.list_components(ALGORITHM)})
    if label not in known_labels:
        raise SettingsError(f"'{label}' is not a method of the study. {suggest_name(label, known_labels)}")
    entry = entries.get(label, {})
    return _parse_algorithm_entry({**entry, **changes} if isinstance(entry, dict) else entry, label)


def reject_display_name_as_label(key: str, name: str) -> None:
    """Raise a ValueError if an algorithm has its name in papers, such as FedProx, instead of that in params.yaml."""
    if re.fullmatch(LABEL_PATTERN, name):
        return
    if match := find_nearest_name(name, registry.list_components(ALGORITHM), cutoff=0.8):
        raise ValueError(f"{key}: unknown algorithm '{name}'. Did you mean '{match}'?")


def _reject_display_names_as_labels(entries: Any) -> Any:
    for label, entry in entries.items() if isinstance(entries, Mapping) else ():
        if not (isinstance(entry, Mapping) and ALGORITHM.selector in entry):
            reject_display_name_as_label(f"algorithms.{label}", str(label))
    return entries


def _parse_methods(entries: dict[str, Any]) -> dict[str, Method]:
    """Parse all entries, and report the mistakes of all at once."""
    methods, mistakes = {}, []
    for label, entry in entries.items():
        try:
            methods[label] = parse_method(entry, label)
        except SettingsError as error:
            mistakes.append(str(error))
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return methods


def _dump_component(kind: ComponentKind, value: Component) -> dict[str, Any]:
    return {kind.selector: registry.get_component_name(kind, type(value)), **dataclasses.asdict(value)}


def _make_component_annotations(kind: ComponentKind) -> tuple[Any, ...]:
    return (
        BeforeValidator(partial(_parse_component_if_raw, kind)),
        PlainSerializer(partial(_dump_component, kind)),
        WithJsonSchema({"type": "object"}),
        Field(default_factory=partial(_parse_component_if_raw, kind, {})),
    )


#: Sections with the name of a component and its parameters.
PartitionSection = Annotated[Any, *_make_component_annotations(PARTITION)]
ModelSection = Annotated[Any, *_make_component_annotations(MODEL)]
#: Entries with an algorithm and its parameters, by label.
AlgorithmSections = Annotated[
    dict[Label, Any],
    BeforeValidator(_reject_display_names_as_labels),
    AfterValidator(_parse_methods),
    PlainSerializer(lambda methods: {label: _dump_component(ALGORITHM, methods[label].algorithm) for label in methods}),
    Field(default_factory=dict),
]
