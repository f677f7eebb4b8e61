"""The entries of `algorithms`, and the sections that name a component."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
)

from fedpipe.core.components import registry
from fedpipe.core.components.component import ALGORITHM, MODEL, PARTITION, Component, ComponentKind, list_parameters
from fedpipe.core.errors import SettingsError, format_validation_errors, suggest_name
from fedpipe.settings.base import Label, Protocol, Section


def _to_component(kind: ComponentKind, value: Any) -> Component:
    return value if isinstance(value, Component) else registry.parse_component(kind, value)


class MethodOptions(Section):
    """What an entry of `algorithms` says beside the algorithm's parameters."""

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
        description="What tables and figures call this method, as `cwFedAvg (λ = 10)`. By default its algorithm's "
        "name, such as FedALA, if the entry is called like the algorithm, and otherwise its label.",
    )

    @field_validator("title")
    @classmethod
    def _check_title(cls, title: str | None) -> str | None:
        if title is not None and (
            not title or not title.isprintable() or title != " ".join(title.split()) or title[0] == "_" or "|" in title
        ):
            raise ValueError(
                f"{title!r} can't be used; it should be a line of text with single spaces, without '|', and not begin "
                "with '_'."
            )
        return title

    @field_validator("overrides")
    @classmethod
    def _check_override_keys(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for key in overrides:
            if key == "federation.clients" or key.partition(".")[0] not in {"federation", "model", "transforms"}:
                raise ValueError(
                    f"'{key}' is the same for all methods, which are compared on the same data; it should be a key of "
                    "federation (other than clients), model or transforms."
                )
            if key == "federation":
                raise ValueError(
                    "'federation' can't be set as a whole, since all of its keys that are not given would have their "
                    "defaults; name its keys, as federation.learning_rate."
                )
        return overrides


METHOD_KEYS = tuple(MethodOptions.model_fields)


@dataclass(frozen=True)
class Method:
    """A method of a study: an entry of `algorithms`."""

    algorithm: Component
    options: MethodOptions


def parse_options(settings: Any, label: str) -> MethodOptions:
    """The options of a method in settings that are not checked yet, as at a point of the grid.

    Raises
    ------
    SettingsError
        One sentence for each mistake.
    """
    entries = settings.get("algorithms") or {}
    entry = entries.get(label) if isinstance(entries, Mapping) else None
    return _parse_entry_options(entry, label)


def get_title(label: str, method: Method) -> str:
    """What tables and figures call a method: its `title`, else its algorithm's display name, else its label.

    Only an entry that is called like its algorithm has the display name, since several entries may be of one algorithm.
    """
    if method.options.title:
        return method.options.title
    if label != registry.get_component_name(ALGORITHM, type(method.algorithm)):
        return label
    return get_display_name(method.algorithm) + (" + DW" if getattr(method.algorithm, "dw", None) else "")


def get_display_name(algorithm: Component) -> str:
    """The name that papers give one of fedpipe's algorithms, such as FedALA: its module's docstring."""
    return str(sys.modules[type(algorithm).__module__].__doc__).partition("\n")[0].rstrip(".")


def _parse_entry_options(entry: Any, label: str) -> MethodOptions:
    method_settings = (
        {name: value for name, value in entry.items() if name in METHOD_KEYS} if isinstance(entry, Mapping) else {}
    )
    try:
        return MethodOptions.model_validate(method_settings)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(format_validation_errors(error, method_settings, f"algorithms.{label}", lambda _: []))
        ) from None


def parse_method(entry: Any, label: str) -> Method:
    """The method that an entry of `algorithms` describes.

    Raises
    ------
    SettingsError
        One sentence for each mistake.
    """
    return Method(options=_parse_entry_options(entry, label), algorithm=_parse_algorithm_entry(entry, label))


def _parse_algorithm_entry(entry: Any, label: str) -> Component:
    if isinstance(entry, Mapping):
        entry = {name: value for name, value in entry.items() if name not in METHOD_KEYS}
    component = registry.parse_component(ALGORITHM, entry, label, METHOD_KEYS)
    for field in list_parameters(type(component)):
        if field.name in METHOD_KEYS:
            raise SettingsError(
                f"algorithms.{label}.{field.name}: it is a key of every method, so that "
                f"{type(component).__qualname__}'s "
                "field of that name could never be set; the field should have another name."
            )
    return component


def parse_algorithm(settings: Mapping[str, Any], label: str, changes: Mapping[str, Any]) -> Component:
    """The algorithm of a study's method with its parameters, of which some are changed; all else is left unchecked.

    Parameters
    ----------
    settings
        As they stand in the YAML file.
    label
        The method.
    changes
        Parameters with other values.

    Raises
    ------
    SettingsError
        The study has no such method, or a parameter is wrong.
    """
    entries = settings.get("algorithms")
    entries = entries if isinstance(entries, dict) else {}
    known_labels = sorted({*entries, *registry.list_components(ALGORITHM)})
    if label not in known_labels:
        raise SettingsError(f"'{label}' is no method of the study; {suggest_name(label, known_labels)}")
    entry = entries.get(label, {})
    return _parse_algorithm_entry({**entry, **changes} if isinstance(entry, dict) else entry, label)


def _parse_methods(entries: dict[str, Any]) -> dict[str, Method]:
    """The method of each entry; the mistakes of all entries are told at once."""
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


def _component_section(kind: ComponentKind) -> tuple[Any, ...]:
    return (
        BeforeValidator(partial(_to_component, kind)),
        PlainSerializer(partial(_dump_component, kind)),
        WithJsonSchema({"type": "object"}),
        Field(default_factory=partial(_to_component, kind, {})),
    )


#: Sections whose selector names a component and whose other keys are that component's parameters.
PartitionSection = Annotated[Any, *_component_section(PARTITION)]
ModelSection = Annotated[Any, *_component_section(MODEL)]
#: Entries that do so, by label.
AlgorithmSections = Annotated[
    dict[Label, Any],
    AfterValidator(_parse_methods),
    PlainSerializer(lambda found: {label: _dump_component(ALGORITHM, found[label].algorithm) for label in found}),
    Field(default_factory=dict),
]
