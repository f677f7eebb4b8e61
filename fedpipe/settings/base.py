"""Base classes and types of all sections. Unknown keys are errors, and a Boolean is not a number."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from fedpipe.core.errors import SettingsError, format_validation_errors, reject_booleans_and_huge_numbers

Protocol = Literal[
    "global-on-global",
    "global-on-local",
    "global-on-validation",
    "personal-on-local",
    "personal-on-global",
    "personal-on-train",
    "personal-on-validation",
    "trained-on-local",
    "trained-on-global",
    "trained-on-train",
    "trained-on-validation",
    "kept-on-local",
    "kept-on-global",
    "kept-on-validation",
    "finetuned-on-local",
    "finetuned-on-global",
    "finetuned-on-validation",
    "prototype-on-local",
    "prototype-on-global",
    "prototype-on-validation",
]
ValidationProtocol = Literal[
    "global-on-validation",
    "personal-on-validation",
    "trained-on-validation",
    "kept-on-validation",
    "finetuned-on-validation",
    "prototype-on-validation",
]
Metric = Literal["accuracy", "auc", "ece", "nll"]
NEW_CLIENTS_PREFIX = "new-"  #: begins the name of a protocol of new clients, such as ``new-personal-on-local``
LABEL_PATTERN = r"^[a-z][a-z0-9_]{0,99}$"  #: part of names of files
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]
KEY_PATTERN = r"[0-9a-f]{12}"
Key = Annotated[str, Field(pattern=f"^{KEY_PATTERN}$")]  #: of a run, partition or diagnostic
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+-[0-9a-f]{12}$")]  #: of a stored data set
#: JSON Schema of a number of a client or class. Names are numbers after `replace_names_by_numbers`.
NUMBER_OR_NAME = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]})
ClientNumber = Annotated[int, Field(ge=0, strict=True), NUMBER_OR_NAME]


class Section(BaseModel):
    """A part of params.yaml. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _reject_booleans_and_huge_numbers(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        parsed = handler(value)
        reject_booleans_and_huge_numbers(value, parsed)
        return parsed

    @classmethod
    def from_settings(cls, settings: Any, key: str) -> Self:
        """Validate the settings of this section alone. ``key`` is its key for messages.

        Raises a SettingsError with one line for each mistake.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise SettingsError("\n".join(format_validation_errors(error, settings, key, lambda _: []))) from None


def make_field_omitted_at_default(default: Any, **arguments: Any) -> Any:
    """Declare a field that keys omit at its default, so that a later version of fedpipe finds the runs of this one.

    The default must switch the field off, and can never change.
    """
    return Field(default, exclude_if=lambda value: value == default, **arguments)


def require_unique_values(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Raise an error if a value is listed twice."""
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"'{value}' is listed twice. Remove one.")
    return values


def check_and_sort_clients(clients: float | tuple[int, ...], advice: str) -> float | tuple[int, ...]:
    """Sort a list of clients, so that every order has the same key. A fraction stays as it is.

    Reject an empty list, with ``advice``, and a client that is listed twice.
    """
    if not isinstance(clients, tuple):
        return clients
    if not clients:
        raise ValueError(f"[] lists no client. {advice}")
    return tuple(sorted(require_unique_values(clients)))


def convert_to_number(value: Any) -> Any:
    """Convert text to a number. YAML 1.1 reads 1e-3 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Choice(Section):
    """A choice with keys that depend on it. Keys of other choices are None and not written."""

    section: ClassVar[str]  #: dotted key of the section
    selector: ClassVar[str]  #: key with the choice
    #: Keys of each choice with their defaults. `...`: the choice needs the key. None: it has no default.
    choices: ClassVar[dict[str, dict[str, Any]]]

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults_of_choice(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        given_settings = {name: value for name, value in raw.items() if value is not None}
        choice = given_settings.get(cls.selector, cls.model_fields[cls.selector].default)
        defaults = cls.choices.get(str(choice), {})
        return {name: value for name, value in defaults.items() if value not in (None, ...)} | given_settings

    @model_validator(mode="after")
    def _check_keys_of_choice(self) -> Self:
        choice, all_keys = getattr(self, self.selector), {key for keys in self.choices.values() for key in keys}
        common_keys = [key for key in type(self).model_fields if key not in {self.selector, *all_keys}]
        allowed_keys = [*common_keys, *self.choices[choice]]
        for key in sorted(self.model_fields_set - {self.selector, *allowed_keys}):
            raise ValueError(
                f"{self.section}.{key}: {getattr(self, key)} can't be used with {choice}, which has "
                f"{' and '.join(allowed_keys)}. Remove it."
            )
        for key, default in self.choices[choice].items():
            if default is ... and getattr(self, key) is None:
                raise ValueError(f"{self.section}.{key}: missing, but {choice} needs it. Give a value.")
        return self

    @model_serializer(mode="wrap")
    def _omit_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


def convert_to_new_clients_protocol(protocol: str) -> str:
    """Get the name of a protocol of `evaluation.protocols` for new clients."""
    return f"{NEW_CLIENTS_PREFIX}{protocol}"


def convert_to_validation_protocol(protocol: str) -> ValidationProtocol:
    """Get the protocol of the same model on the clients' validation samples."""
    return cast(ValidationProtocol, f"{protocol.partition('-on-')[0]}-on-validation")
