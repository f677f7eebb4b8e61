"""params.yaml: what a study is, validated and with its defaults filled in.

One schema serves everybody: the command line and the Snakefile read it through :func:`load`, editors through
:func:`build_json_schema`. Every mistake is one sentence that begins with its key.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from fedpipe import artifacts, callbacks, registry
from fedpipe.artifacts import FULL_SCALE
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, DatasetInfo, PublishedDataset
from fedpipe.data.fetch import MIRROR_VARIABLE, Fetcher
from fedpipe.errors import (
    ArtifactError,
    Location,
    SettingsError,
    format_validation_errors,
    refuse_numbers,
    suggest_name,
)
from fedpipe.pins import PinnedFile
from fedpipe.planned import Statistic
from fedpipe.registry import Component, ComponentKind
from fedpipe.yaml_text import read_yaml

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
KEYWISE_SECTIONS = (
    "federation",
)  #: never set as a whole: all of its keys that are not given would have their defaults
SPLIT_KEYS = (
    "split",
    "test_share",
    "stratified",
    "validation_share",
)  #: keys of `parse_dataset` that say how to split it
GENERATED_DATASET = "generated"  #: the data set that stands in for one that is not at hand
DOWNLOAD_COMMAND = "fedpipe download"  #: what obtains a study's data
DOTTED_PATH_SCHEMA = {"type": "string", "pattern": r"\."}  #: a dotted path, in the JSON Schema
Label = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class Section(BaseModel):
    """A part of params.yaml; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _computable(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        made = handler(value)
        refuse_numbers(value, made)
        return made


def _require_unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    seen = set()
    for value in values:
        if (known := _hashable(value)) in seen:
            raise ValueError(f"'{value}' is listed twice; each may appear once.")
        seen.add(known)
    return values


def _hashable(value: Any) -> Any:
    """What equals another value's if the values are equal, and can be in a set."""
    if isinstance(value, Mapping):
        return "mapping", frozenset((key, _hashable(part)) for key, part in value.items())
    return ("list", *map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def to_number(value: Any) -> Any:
    """The number that a text stands for: YAML 1.1 reads 1e-3 as text, and a quoted number is one to what takes it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _to_component(kind: ComponentKind, value: Any) -> Component:
    return value if isinstance(value, Component) else registry.parse_component(kind, value)


class Method(Section):
    """What an entry of `algorithms` says beside the algorithm's parameters."""

    settings: dict[str, Any] = Field(
        default_factory=dict,
        alias="with",
        description="Keys of federation, model and transforms with the values that they have for this method alone, "
        "as `{federation.learning_rate: 0.05}`.",
    )
    shown: Protocol | None = Field(
        None, description="The protocol by which the table shows this method; the study's first, where none is given."
    )
    title: str | None = Field(
        None,
        description="What tables and figures call this method, as `cwFedAvg (λ = 10)`; by default its label.",
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

    @field_validator("settings")
    @classmethod
    def _check_settings_keys(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for key in settings:
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
        return settings


METHOD_KEYS = tuple(str(field.alias or name) for name, field in Method.model_fields.items())  #: with, shown, title


def parse_method(settings: Any, label: str) -> Method:
    """What settings, as they stand in the YAML file, say of one method beside its algorithm's parameters.

    Raises
    ------
    SettingsError
        One sentence for each mistake.
    """
    entries = settings.get("algorithms") or {}
    entry = entries.get(label) if isinstance(entries, Mapping) else None
    return _parse_method_entry(entry, label)


def _parse_method_entry(entry: Any, label: str) -> Method:
    method_settings = (
        {name: value for name, value in entry.items() if name in METHOD_KEYS} if isinstance(entry, Mapping) else {}
    )
    try:
        return Method.model_validate(method_settings)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(format_validation_errors(error, method_settings, f"algorithms.{label}", lambda _: []))
        ) from None


def _parse_algorithm_entry(entry: Any, label: str) -> Component:
    if isinstance(entry, Component):
        return entry
    if isinstance(entry, Mapping):
        entry = {name: value for name, value in entry.items() if name not in METHOD_KEYS}
    component = registry.parse_component(registry.ALGORITHM, entry, label, METHOD_KEYS)
    for field in registry.list_parameters(type(component)):
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
    known_labels = sorted({*entries, *registry.list_components(registry.ALGORITHM)})
    if label not in known_labels:
        raise SettingsError(f"'{label}' is no method of the study; {suggest_name(label, known_labels)}")
    entry = entries.get(label, {})
    return _parse_algorithm_entry({**entry, **changes} if isinstance(entry, dict) else entry, label)


def _parse_algorithms(entries: dict[str, Any]) -> dict[str, Component]:
    """The algorithm of each entry; the mistakes of all entries are told at once."""
    components, mistakes = {}, []
    for label, value in entries.items():
        try:
            _parse_method_entry(value, label)
            components[label] = _parse_algorithm_entry(value, label)
        except SettingsError as error:
            mistakes.append(str(error))
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return components


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
PartitionSection = Annotated[Any, *_component_section(registry.PARTITION)]
ModelSection = Annotated[Any, *_component_section(registry.MODEL)]
#: Entries that do so, by label.
AlgorithmSections = Annotated[
    dict[Label, Any],
    AfterValidator(_parse_algorithms),
    PlainSerializer(lambda found: {label: _dump_component(registry.ALGORITHM, found[label]) for label in found}),
    Field(default_factory=dict),
]


class Data(Section):
    """The samples; keys that do not stand here are parameters of the data set."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("digits", description="A data set; `fedpipe list datasets` shows them.")
    mirror: str | None = Field(
        None,
        description="A folder or base address (http, https, file) from which files are taken first; "
        "where none is given, the environment variable FEDPIPE_MIRROR names it.",
    )
    absent: Literal["fetch", "generate"] = Field(
        "fetch",
        description="What becomes of a published data set that is not at hand: it is fetched over the network; or, for "
        "a try, noise in its shape is generated in its place, under keys of its own.",
    )
    subset: int | None = Field(
        None,
        ge=1,
        description="Only so many samples, for a quick try: drawn once, with the same shares of classes and tests.",
    )
    split: Literal["official", "pooled"] = Field(
        "official",
        description="official: the data set's own test set, dealt to clients in their own class proportions; "
        "pooled: training and test samples together, then split within each client. Neither, where the partition is a "
        "file that says what each sample is for.",
    )
    test_share: float = Field(0.25, gt=0, lt=1, description="Share of each client's samples kept for testing (pooled).")
    stratified: bool = Field(
        False, description="Whether what a client keeps for testing (pooled) and validation has its class proportions."
    )
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="Share of each client's training samples kept for validation."
    )

    @model_validator(mode="after")
    def _check_source(self) -> Data:
        assert self.effective_dataset
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The data set's parameters, as given."""
        return dict(self.model_extra or {})

    @cached_property
    def named_dataset(self) -> Dataset:
        """The data set that is named, with its parameters."""
        settings = {"name": self.name, **self.parameters}
        return cast(
            Dataset, registry.parse_component(registry.DATASET, settings, other_keys=[*type(self).model_fields])
        )

    @cached_property
    def effective_dataset(self) -> Dataset:
        """The data set that is taken: the one that is named, or what is generated in its place (`absent`)."""
        if self.absent == "fetch" or self.is_available_offline:
            return self.named_dataset
        return cast(Dataset, registry.parse_component(registry.DATASET, {"name": GENERATED_DATASET, "like": self.name}))

    @property
    def is_available_offline(self) -> bool:
        """Whether the data set that is named can be obtained without a network."""
        named_dataset, fetcher = self.named_dataset, self.fetcher
        if not isinstance(named_dataset, PublishedDataset) or named_dataset.sha256:
            return True
        stored_file = store.locate_dataset(registry.component_to_run_settings(registry.DATASET, named_dataset))
        return stored_file.is_file() or all(
            (fetcher.is_local and fetcher.has_file(file.name)) or (fetcher.cache / file.name).is_file()
            for file in named_dataset.files
        )

    @cached_property
    def run_settings(self) -> dict[str, Any]:
        """What keys hold of it."""
        return registry.component_to_run_settings(registry.DATASET, self.effective_dataset)

    @cached_property
    def fetcher(self) -> Fetcher:
        """Where its files come from."""
        return Fetcher(mirror=self.mirror or os.environ.get(MIRROR_VARIABLE))

    @property
    def origin(self) -> dict[str, Any]:
        """All that it takes to obtain it."""
        if self.effective_dataset is not self.named_dataset:
            return {"name": GENERATED_DATASET, "like": self.name}
        return {"name": self.name, **self.parameters, **({"mirror": self.mirror} if self.mirror else {})}

    @property
    def file(self) -> Path:
        """Where its tensors lie."""
        return store.locate_dataset(self.run_settings)

    @property
    def partitioned_size(self) -> int:
        """How many samples the partition scheme deals.

        Raises
        ------
        SettingsError
            The official split is asked for of a data set that has no test set.
        """
        size, tests = self.facts.size, self.facts.tests
        if self.split == "official" and not tests:
            raise SettingsError("dataset.split: 'official' needs a test set, and the data set has none; use 'pooled'.")
        if self.split == "official":
            return (self.subset or size) * (size - tests) // size
        return self.subset or size

    @property
    def facts(self) -> DatasetInfo:
        """Shape, classes and size, all known before any job.

        Raises
        ------
        ArtifactError
            They stand in a file that is not stored.
        """
        declared_facts = self.effective_dataset.info
        return store.read_dataset_info(self.file) if declared_facts is None else declared_facts

    @property
    def has_tokens(self) -> bool | None:
        """Whether inputs are token ids, and not numbers; None if a data set of one's own leaves that open."""
        if self.facts.vocabulary is not None:
            return True
        return False if type(self.effective_dataset).__module__.startswith("fedpipe.") else None

    def explain_missing_data(self, download_command: str) -> str | None:
        """One sentence if its facts are not known yet, with the command that mends that; None if they are."""
        source, fetcher = self.effective_dataset, self.fetcher
        if source.info is None:
            try:
                store.read_dataset_info(self.file)
            except ArtifactError:
                sha256 = getattr(source, "sha256", None)
                return f"dataset.sha256: the file with SHA-256 {sha256} is not stored; run `{download_command}`."
        if not isinstance(source, PublishedDataset) or source.sha256 or not fetcher.is_local or self.file.is_file():
            return None
        if fetcher.has_file(source.substitute_name) and not all(fetcher.has_file(file.name) for file in source.files):
            return (
                f"dataset.sha256: missing; the mirror has no original of '{self.name}' but a {source.substitute_name}, "
                f"which is taken by its SHA-256: run `{download_command}`, which fills it in."
            )
        return None


def _to_list(value: Any) -> Any:
    """A number as a list of one, so that keys are the same for both."""
    number = to_number(value)
    return [number] if isinstance(number, (int, float)) and not isinstance(number, bool) else value


def _per_channel_field(**limits: float) -> tuple[Any, ...]:
    """One number, or a list of numbers."""
    number = {"type": "number", **limits}
    return BeforeValidator(_to_list), WithJsonSchema({"anyOf": [number, {"type": "array", "items": number}]})


class Transforms(Section):
    """What is done to images as they are gathered: all are normalized, those that are trained on change at random."""

    mean: Annotated[tuple[float, ...], *_per_channel_field()] = Field(
        (), description="Subtracted from pixels in [0, 1]: one number, or one a channel."
    )
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], *_per_channel_field(exclusiveMinimum=0)] = Field(
        (), description="Divided out then."
    )
    crop: int = Field(0, ge=0, description="Pixels of zeros put around before a window of the old size is cut out.")
    flip: bool = Field(False, description="Mirror left to right, every second image.")
    rotation: float = Field(0, ge=0, le=180, description="Turn by up to so many degrees either way.")
    on_test: bool = Field(False, description="Change test images too, as FedDW's code does (noisy accuracies).")

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn."""
        return bool(self.crop or self.flip or self.rotation)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise a SettingsError if inputs of this shape can't be treated so."""
        for name in ("mean", "std", "crop", "flip", "rotation"):
            value = getattr(self, name)
            if value and len(shape) != 3:
                raise SettingsError(f"transforms.{name}: {value} is for images, not for inputs of shape {shape}.")
            if name in {"mean", "std"} and len(value) not in {0, 1, shape[0]}:
                counts = "one number" if shape[0] == 1 else f"one number or {shape[0]}, one a channel"
                raise SettingsError(f"transforms.{name}: {list(value)} can't be used; it should be {counts}.")


#: By optimizer of the server, what it takes beside a rate, with its default.
SERVER_OPTIMIZER_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "yogi": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "adagrad": {"beta1": 0.0, "tau": 0.001},
}


class Choice(Section):
    """A choice, and keys of which it takes only some; the others are None and not written."""

    def _reject_other_keys(self, key: str, selector: str, allowed_keys: Sequence[str]) -> None:
        for name in sorted(self.model_fields_set - {selector, *allowed_keys}):
            raise ValueError(
                f"{key}.{name}: {getattr(self, name)} has no meaning for {getattr(self, selector)}, which takes "
                f"{' and '.join(allowed_keys)}; remove it."
            )

    @model_serializer(mode="wrap")
    def _omit_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class Server(Choice):
    """How the server moves its model along the clients' mean update, which stands for a gradient."""

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "sgd",
        description="sgd: FedAvg at rate 1; momentum: FedAvgM; adam, yogi, adagrad: FedAdam, FedYogi, FedAdagrad.",
    )
    learning_rate: float = Field(1.0, ge=0, description="The server's rate, eta.")
    momentum: float | None = Field(None, ge=0, lt=1, description="Share of the last step that goes on (momentum): 0.9.")
    beta1: float | None = Field(None, ge=0, lt=1, description="Of the mean update's moment: 0.9; for adagrad 0.")
    beta2: float | None = Field(None, ge=0, lt=1, description="Of its square's moment (adam, yogi): 0.99.")
    tau: float | None = Field(None, gt=0, description="Added to the root of that (adam, yogi, adagrad): 0.001.")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        raw = {name: value for name, value in raw.items() if value is not None}
        return SERVER_OPTIMIZER_DEFAULTS.get(str(raw.get("optimizer", "sgd")), {}) | raw

    @model_validator(mode="after")
    def _check_keys(self) -> Server:
        allowed_keys = ["learning_rate", *SERVER_OPTIMIZER_DEFAULTS[self.optimizer]]
        self._reject_other_keys("federation.server", "optimizer", allowed_keys)
        return self

    @property
    def is_plain_averaging(self) -> bool:
        """Whether the next model is the mean of the uploads, as without any such optimizer."""
        return self.optimizer == "sgd" and self.learning_rate == 1


#: By name, what a schedule takes beside warm-up rounds, with its default; None: it has to be given.
SCHEDULE_DEFAULTS: dict[str, dict[str, float | None]] = {
    "constant": {},
    "step": {"step_size": None, "gamma": 0.1},
    "exponential": {"gamma": None},
    "cosine": {"period": None, "minimum": 0.0},
}


class Schedule(Choice):
    """The clients' learning rate by round, as torch.optim.lr_scheduler has it by epoch; see :meth:`rate`."""

    name: Literal["constant", "step", "exponential", "cosine"] = Field(
        "constant",
        description="step: StepLR; exponential: ExponentialLR; cosine: CosineAnnealingLR, which rises again behind its "
        "period; constant: none of them.",
    )
    step_size: int | None = Field(None, ge=1, strict=True, description="Rounds from one fall to the next (step).")
    gamma: float | None = Field(None, gt=0, description="Factor of each fall (step: 0.1) or round (exponential).")
    period: int | None = Field(
        None, ge=1, strict=True, description="Rounds until the minimum is reached (cosine), T_max: federation.rounds."
    )
    minimum: float | None = Field(None, ge=0, description="The least rate (cosine), eta_min: 0.")
    warmup: int = Field(
        0, ge=0, strict=True, description="Rounds of linear warm-up before, the w-th at w/warmup of the rate."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        raw = {name: value for name, value in raw.items() if value is not None}
        defaults = SCHEDULE_DEFAULTS.get(str(raw.get("name", "constant")), {})
        return {name: value for name, value in defaults.items() if value is not None} | raw

    @model_validator(mode="after")
    def _check_keys(self) -> Schedule:
        allowed_keys = ["warmup", *SCHEDULE_DEFAULTS[self.name]]
        self._reject_other_keys("federation.schedule", "name", allowed_keys)
        for name in allowed_keys:
            if getattr(self, name) is None:
                raise ValueError(f"federation.schedule.{name}: it is missing; {self.name} needs {name}.")
        return self

    @property
    def is_constant(self) -> bool:
        """Whether every round has the same rate."""
        return self.name == "constant" and not self.warmup

    def compute_learning_rate(self, base: float, round: int) -> float:
        """The learning rate of a round, from 1, where ``base`` is that of the federation."""
        if round <= self.warmup:
            return base * round / self.warmup
        elapsed_rounds = round - 1 - self.warmup
        match self.name:
            case "step":
                return base * float(cast(float, self.gamma) ** (elapsed_rounds // cast(int, self.step_size)))
            case "exponential":
                return base * float(cast(float, self.gamma) ** elapsed_rounds)
            case "cosine":
                minimum, fraction = (
                    cast(float, self.minimum),
                    (1 + math.cos(math.pi * elapsed_rounds / cast(int, self.period))) / 2,
                )
                return minimum + (base - minimum) * fraction
        return base


#: Keys of the federation that came later, each with its value where nothing is asked for. Without those that have it,
#: keys of runs are as they were before.
OMITTED_DEFAULTS: dict[str, Any] = {
    "precision": "full",
    "schedule": {"name": "constant", "warmup": 0},
    "local_epochs": None,
    "local_steps": None,
    "clip_norm": None,
}


class Federation(Section):
    """Who trains, how often, and with which optimizer."""

    clients: int = Field(10, ge=1, strict=True, description="Number of clients N.")
    participation: float = Field(1.0, gt=0, le=1, description="Share of clients in a round: max(1, round(p N)).")
    rounds: int = Field(
        20, ge=1, le=9999, strict=True, description="Communication rounds T; more rounds continue a shorter run."
    )
    local_epochs: int | None = Field(
        1, ge=1, description="Passes over a client's training data in a round; null with local_steps."
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        strict=True,
        description="In place of local_epochs: steps of every client in a round, on batches in the order of epochs.",
    )
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] = Field(
        32, description="Samples in a training step, the last partial batch is kept; or full: all that a client has."
    )
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="Started afresh at every client in every round.")
    learning_rate: float = Field(
        0.05, ge=0, description="The clients' rate, in all steps of a round; `schedule` changes it from round to round."
    )
    schedule: Schedule = Field(
        Schedule(), description="The learning rate by round, as `{name: cosine, period: 100, warmup: 5}`."
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="Gradients of larger norm, over all that a pass trains, are scaled down to it, as by "
        "torch.nn.utils.clip_grad_norm_; before weight decay and momentum.",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="Heavy-ball momentum (sgd).")
    weight_decay: float = Field(0.0, ge=0, description="Added to the gradient as weight_decay * parameter.")
    weighting: Literal["count", "uniform"] = Field(
        "count", description="Weight of a client in averages: its training samples, or the same for all."
    )
    buffers: Literal["average", "keep", "drop"] = Field(
        "average",
        description="Running statistics of BatchNorm: averaged with the model, kept at each client (the global model "
        "then has none and is not measured), or none (every batch is normalized by its own, in evaluation too).",
    )
    server: Server = Field(Server(), description="The server's optimizer, where the method averages models.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of models and data.")
    precision: Literal["full", "bfloat16"] = Field(
        "full",
        description="Of the network's products and convolutions in training: that of dtype, or bfloat16 (autocast). "
        "Weights, their updates, losses and evaluation are of dtype in any case.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_epochs_or_steps(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        epochs, steps = raw.get("local_epochs", 1), raw.get("local_steps")
        if epochs is None and steps is None:
            raise ValueError("federation.local_epochs: null leaves no training; it should be given, or local_steps.")
        if steps is not None and raw.get("local_epochs") is not None:
            raise ValueError(
                f"federation.local_steps: {steps} can't be used beside local_epochs: {epochs}, since both say how long "
                "a client trains; one of them should be null."
            )
        return raw if steps is None else raw | {"local_epochs": None}

    @model_validator(mode="after")
    def _check_schedule_minimum(self) -> Federation:
        minimum = self.schedule.minimum
        if minimum is not None and minimum > self.learning_rate:
            raise ValueError(
                f"federation.schedule.minimum: {minimum} is more than federation.learning_rate ({self.learning_rate}); "
                "it should be less."
            )
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> Federation:
        if self.precision == "bfloat16" and self.dtype != "float32":
            raise ValueError(
                f"federation.precision: bfloat16 is for models of float32, not of {self.dtype}; it should be full, or "
                "federation.dtype float32."
            )
        return self

    @model_serializer(mode="wrap")
    def _omit_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            name: value
            for name, value in handler(self).items()
            if name not in OMITTED_DEFAULTS or value != OMITTED_DEFAULTS[name]
        }

    def with_round_learning_rate(self, number: int) -> Federation:
        """The same settings with the learning rate of a round."""
        if self.schedule.is_constant:
            return self
        learning_rate = self.schedule.compute_learning_rate(self.learning_rate, number)
        return self.model_copy(update={"learning_rate": learning_rate, "schedule": Schedule()})

    def count_epochs(self, samples: int) -> float:
        """How many passes over its data a client of so many samples makes in a round; no whole number by steps."""
        if self.local_epochs is not None:
            return self.local_epochs
        size = samples if self.batch_size == "full" else self.batch_size
        return cast(int, self.local_steps) / max(1, math.ceil(samples / max(1, size)))

    @property
    def compute_dtype(self) -> str:
        """The least precise numbers that it computes with."""
        return self.dtype if self.precision == "full" else self.precision

    @model_validator(mode="after")
    def _check_momentum(self) -> Federation:
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(
                f"federation.momentum: {self.momentum} has no meaning for adam; it should be 0, or the optimizer sgd."
            )
        return self

    @property
    def participants(self) -> int:
        """Number of clients in a round, m."""
        return max(1, round(self.participation * self.clients))


class Evaluation(Section):
    """Which model is measured on which test set, and when (docs/protocols.md tells of protocols)."""

    protocols: tuple[Protocol, ...] = Field(
        ("global-on-global", "personal-on-local"),
        min_length=1,
        description="MODEL-on-TEST. global: the server's model; personal: all clients, after they took the new server "
        "state and before they train; trained: this round's participants, right after training; kept: all clients, "
        "as each was trained last, or initially; finetuned: all clients, a copy after finetune_epochs of training; "
        "prototype: the personal model, read by the nearest class prototype. On train: on the samples that the client "
        "trains on, as they are, for its training loss.",
    )
    every: int = Field(1, ge=1, description="Measure after every k-th round.")
    finetune_epochs: int = Field(1, ge=1, description="Epochs of the finetuned protocols.")

    _require_unique_values = field_validator("protocols")(_require_unique)


#: Columns of a study's tables, which no axis may be called.
TABLE_COLUMNS = (
    *("algorithm", "seed", "key", "protocol", "average", "round", "accuracy", "mean", "std", "seeds", "line"),
    *("partition", "client", "class", "samples", "matrix", "row", "column", "value", "left_out", "diverged"),
    *("bytes_down", "bytes_up", "train", "aggregate", "evaluate", "epoch", "participants", "rounds", "source", "point"),
    *("correct", "total", "loss", "hits", "support", "predicted", "statistic", "half_width", *get_args(Statistic)),
    *("clients", "worst", "bytes", "run", "dataset", "sha256"),
    *("executor", "device", "fedpipe", "shared", "torch", "numpy", "python", "clusters", "mean_norm", "max_norm"),
    *("distance_from_mean", "bytes down", "bytes up", "shown", "std of clients", "worst tenth", "lowest client"),
    *("macro F1", "balanced accuracy"),
)
AxisValue = Annotated[str, Field(pattern=r"^[^|\s]([^|\n]*[^|\s])?$")]
Axis = dict[AxisValue, dict[str, Any]]  #: by the name of each value, the keys that it sets
GridValues = Annotated[
    Annotated[tuple[Any, ...], Tag("list")] | Annotated[Axis, Tag("axis")],
    Discriminator(lambda given: "axis" if isinstance(given, dict) else "list"),
]


class Study(Section):
    """What runs: the product of algorithms, seeds and grid."""

    algorithms: tuple[Label, ...] = Field(
        ("fedavg",), min_length=1, description="Methods to run: names of fedpipe's, entries of `algorithms`."
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="Each drives partition, initial model and training.")
    grid: dict[str, GridValues] = Field(
        default_factory=dict,
        description="Any key to a list of values, as `partition.alpha: [0.1, 0.5]`; or an axis, whose name is your "
        "own: named values, each a mapping of the keys that change together, as "
        "`environment: {mild: {partition.alpha: 0.5}, harsh: {partition.alpha: 0.1, federation.participation: 0.5}}`.",
    )

    _require_unique_values = field_validator("algorithms", "seeds")(_require_unique)

    @field_validator("algorithms", mode="before")
    @classmethod
    def _reject_dotted_paths(cls, algorithms: Any) -> Any:
        path = next((name for name in algorithms if "." in str(name)), None) if isinstance(algorithms, list) else None
        if path:
            entry = f"{str(path).rpartition('.')[2].lower()}: {{algorithm: {path}}}"
            raise ValueError(f"'{path}' needs a name; it should be an entry, as `{entry}` under algorithms.")
        return algorithms

    @field_validator("grid")
    @classmethod
    def _require_unique_grid_values(cls, grid: dict[str, GridValues]) -> dict[str, GridValues]:
        for name, values in grid.items():
            try:
                _require_unique(tuple(values if isinstance(values, dict) else map(to_number, values)))
            except ValueError as error:
                raise ValueError(f"study.grid.{name}: {error}") from None
        return grid

    @field_validator("grid")
    @classmethod
    def _check_axis_names(cls, grid: dict[str, GridValues]) -> dict[str, GridValues]:
        for name in (name for name, values in grid.items() if isinstance(values, dict)):
            if "." in name:
                raise ValueError(
                    f"study.grid.{name}: a key's values should be a list; an axis, whose values are named, has a name "
                    "of its own, without dots."
                )
            if name in TABLE_COLUMNS or not re.fullmatch(r"[A-Za-z][\w -]*", name):
                raise ValueError(
                    f"study.grid.{name}: an axis can't be called so; it should be a word of your own, as environment, "
                    "that is no column of the tables."
                )
        return grid


class Execution(Section):
    """How jobs are cut and where they run. Nothing here changes a result's bits, but for executor and device."""

    rounds_per_job: int | None = Field(None, ge=1, description="Rounds that one job runs; all of them when not given.")
    clients_per_job: int | None = Field(
        None, ge=1, description="Participants that one job trains: the DAG of single rounds (needs rounds_per_job: 1)."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one.")
    stack: int | Literal["auto"] = Field(
        "auto",
        description="Clients that train in one call: 1 is client by client (the loop), n a stack of n, "
        "auto the loop on a CPU and a stack of up to 32 on a GPU.",
    )
    graphs: bool = Field(
        False,
        description="Whether a stack's steps are recorded as CUDA graphs and replayed, which changes no bits; off "
        "until it has been tried on a GPU.",
    )
    callbacks: tuple[str, ...] = Field(
        (),
        description="What looks on while runs go: dvclive, or classes of your own, as own.Board (docs/callbacks.md).",
    )

    @field_validator("callbacks")
    @classmethod
    def _check_callbacks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in _require_unique(names):
            callbacks.find_callback(name)
        return names

    @field_validator("stack")
    @classmethod
    def _check_stack(cls, stack: int | str) -> int | str:
        if isinstance(stack, int) and stack < 1:
            raise ValueError(f"{stack} can't be used; it should be at least 1.")
        return stack

    @model_validator(mode="after")
    def _check_clients_per_job(self) -> Execution:
        if self.clients_per_job is not None and self.rounds_per_job != 1:
            raise ValueError(
                f"execution.clients_per_job: {self.clients_per_job} cuts rounds into blocks of clients, "
                f"which needs execution.rounds_per_job to be 1, not {self.rounds_per_job or 'null'}."
            )
        return self


class Artifacts(Section):
    """What is kept of every run."""

    keep_models: Literal["all", "last"] | Annotated[int, Field(ge=1)] = Field(
        "all",
        description="Server and client states kept: of all rounds, of the last two, or of every k-th and the last two.",
    )


class Report(Section):
    """What the tables show; changing it runs no training."""

    round: Literal["last", "best", "mean-last"] = Field(
        "last", description="Which round's accuracy stands in the table."
    )
    last_k: int = Field(5, ge=1, description="Rounds in the mean of `mean-last`.")
    average: Literal["sample", "client"] = Field(
        "sample", description="Accuracy over all test samples, or the mean of the clients' accuracies."
    )
    best_over: tuple[str, ...] = Field(
        (),
        description="Lists or axes of the grid, as `[federation.learning_rate]`, of which the table shows each "
        "method's best value in each column.",
    )
    best_on: Literal["test", "validation"] = Field(
        "test",
        description="By which samples `best_over` chooses: the test samples themselves, or the clients' validation "
        "samples, for which `evaluation.protocols` holds MODEL-on-validation. The table's caption says which.",
    )

    statistics: tuple[Statistic, ...] = Field(
        (),
        description="Shown below the table, by the first protocol; statistics.csv has all of them, by every protocol. "
        "client_std, worst_tenth, lowest: of the clients' accuracies; macro_f1, balanced_accuracy: over classes; "
        "rounds_to_target, bytes_to_target: until `target` was reached; difference: to `baseline`, paired by seed.",
    )
    target: float | None = Field(None, gt=0, le=1, description="An accuracy over all test samples, as 0.7 for 70 %.")
    baseline: Label | None = Field(None, description="The method of study.algorithms that others are compared with.")

    _require_unique_values = field_validator("best_over", "statistics")(_require_unique)

    @model_validator(mode="after")
    def _check_statistics_inputs(self) -> Report:
        needed_keys = {"rounds_to_target": "target", "bytes_to_target": "target", "difference": "baseline"}
        expected_values = {"target": "a share, as 0.7 for 70 %", "baseline": "a method of study.algorithms"}
        for name in self.statistics:
            if name in needed_keys and getattr(self, needed_keys[name]) is None:
                key = needed_keys[name]
                raise ValueError(
                    f"report.{key}: it is missing, and report.statistics lists {name}; it should be "
                    f"{expected_values[key]}."
                )
        return self


def to_validation_protocol(protocol: str) -> Protocol:
    """The protocol of the same model on the clients' validation samples."""
    return cast(Protocol, f"{protocol.partition('-on-')[0]}-on-validation")


STUDY_WIDE_SECTIONS = (
    "study",
    "execution",
    "artifacts",
    "report",
    "scales",
    "probes",
)  #: sections that are one for the whole study


def _check_scales(scales: dict[str, Any]) -> dict[str, Any]:
    for name, changes in scales.items():
        if name == FULL_SCALE:
            raise ValueError(
                f"scales.{name}: it is the study as it stands in the file; a scale should have another name."
            )
        for key in changes:
            if key.partition(".")[0] == "scales":
                raise ValueError(f"scales.{name}: '{key}' can't be set by a scale.")
            if key in KEYWISE_SECTIONS:
                raise ValueError(f"scales.{name}: '{key}' can't be set as a whole; name its keys, as {key}.rounds.")
    return scales


class _Probe(Section):
    """What is looked at in stored states, and where; it changes no run, and its change runs no training."""

    rounds: tuple[Annotated[int, Field(ge=1, strict=True)] | Literal["last"], ...] = Field(
        ("last",), min_length=1, description="After which rounds; the states of each and of the one before it stay."
    )
    algorithms: tuple[Label, ...] | None = Field(None, min_length=1, description="Of which methods; all by default.")
    seeds: tuple[int, ...] | None = Field(None, min_length=1, description="Of which seeds; all by default.")
    where: dict[str, Any] = Field(
        default_factory=dict,
        description="Of which points of the grid: a value, or a list of values, of any name of study.grid.",
    )

    _require_unique_values = field_validator("rounds", "algorithms", "seeds", "models", "clients", check_fields=False)(
        lambda values: values and _require_unique(values)
    )

    @property
    def settings(self) -> dict[str, Any]:
        """What is looked at, without where."""
        return self.model_dump(mode="json", exclude=set(_Probe.model_fields))


class HeadNorms(_Probe):
    """Norms of the rows of heads, beside the class shares of who owns them."""

    kind: Literal["head-norms"]
    models: tuple[Literal["received", "trained", "finetuned", "class", "global"], ...] = Field(
        ("trained",),
        min_length=1,
        description="trained: the round's participants', right after training; received, finetuned: all clients', as "
        "the next round begins; class: the server's models of classes (cwfedavg); global: the server's model.",
    )
    finetune_epochs: int = Field(1, ge=1, description="Of the fine-tuned ones.")


class Features(_Probe):
    """Features of global test samples and the rows of the head, in two dimensions by t-SNE."""

    kind: Literal["features"]
    samples: int = Field(500, ge=3, description="At most so many of the global test set, drawn once.")
    perplexity: float = Field(30, gt=0, description="Of t-SNE.")
    seed: int = Field(0, ge=0, description="Of samples and of t-SNE.")


class Surface(_Probe):
    """The training loss around the global model, in two filter-normalized random directions."""

    kind: Literal["surface"]
    points: int = Field(21, ge=3, description="Of the grid, along each direction; an odd number has the model itself.")
    radius: float = Field(1.0, gt=0, description="Of the grid, where 1 is as long as the model's own filters.")
    samples: int | None = Field(1000, ge=1, description="At most so many training samples, drawn once; null: all.")
    seed: int = Field(0, ge=0, description="Of samples and directions, the same for all runs.")


class Gradients(_Probe):
    """Norms of each layer's gradient: of each client on its data, and of the global model on all."""

    kind: Literal["gradients"]


class Locals(_Probe):
    """The class shares that the head's norms tell, by step of the participants' training in the round."""

    kind: Literal["locals"]
    clients: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="Of these participants; all by default."
    )


Probe = HeadNorms | Features | Surface | Gradients | Locals
PROBE_KINDS = tuple(get_args(probe.model_fields["kind"].annotation)[0] for probe in get_args(Probe))


def _get_probe_kind(value: Any) -> str:
    """Which kind an entry of `probes` is of."""
    return str(value.get("kind")) if isinstance(value, dict) else str(getattr(value, "kind", value))


def _check_probe_kinds(entries: Any) -> Any:
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, _Probe):
            continue
        if not isinstance(entry, dict) or "kind" not in entry:
            raise ValueError(f"probes.{name}: its kind is missing; it should be one of: {', '.join(PROBE_KINDS)}.")
        if entry["kind"] not in PROBE_KINDS:
            hint = suggest_name(str(entry["kind"]), PROBE_KINDS)
            raise ValueError(f"probes.{name}.kind: there is no probe '{entry['kind']}'; {hint}")
    return entries


#: Entries of `probes`, by names of one's own; what else an entry may hold follows from its kind.
ProbeSections = Annotated[
    dict[
        Label,
        Annotated[
            Annotated[HeadNorms, Tag("head-norms")]
            | Annotated[Features, Tag("features")]
            | Annotated[Surface, Tag("surface")]
            | Annotated[Gradients, Tag("gradients")]
            | Annotated[Locals, Tag("locals")],
            Discriminator(_get_probe_kind),
        ],
    ],
    BeforeValidator(_check_probe_kinds),
    Field(default_factory=dict, description="What is looked at in stored states, by names of your own."),
]


class Params(Section):
    """A whole params.yaml."""

    dataset: Data = Data()
    transforms: Transforms = Transforms()
    partition: PartitionSection
    model: ModelSection
    federation: Federation = Federation()
    evaluation: Evaluation = Evaluation()
    algorithms: AlgorithmSections
    study: Study = Study()
    execution: Execution = Execution()
    artifacts: Artifacts = Artifacts()
    report: Report = Report()
    scales: Annotated[dict[Label, dict[str, Any]], AfterValidator(_check_scales)] = Field(
        default_factory=dict,
        description="Other sizes of the study by name, as `smoke: {federation.rounds: 2, study.seeds: [0]}`: keys that "
        "stand above all else where `--scale NAME` asks for it.",
    )
    probes: ProbeSections

    _ignored_parameters: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def ignored_parameters(self) -> dict[str, str]:
        """What was given and left out, by key, each with a warning; see :func:`find_ignored_parameters`."""
        return self._ignored_parameters

    @property
    def warnings(self) -> list[str]:
        """A sentence each for what is left out, and for what may not be meant."""
        schedule, rounds = self.federation.schedule, self.federation.rounds
        restart_round = schedule.warmup + (schedule.period or rounds)
        rise_warning = (
            f"federation.schedule.period: {schedule.period} ends after round {restart_round} of {rounds}, from where "
            "the "
            "learning rate rises again, as with CosineAnnealingLR."
        )
        return [
            *self.ignored_parameters.values(),
            *([rise_warning] if restart_round < rounds and schedule.name == "cosine" else []),
        ]

    @property
    def pinned_files(self) -> dict[str, PinnedFile]:
        """The user's own files that the study names, by the section that does."""
        components = {"dataset": self.dataset.effective_dataset, "partition": self.partition, "model": self.model}
        return {section: component.pinned_file for section, component in components.items() if component.pinned_file}

    def _check_validation_samples(self) -> None:
        """Refuse to measure on validation samples that no client has."""
        protocol = next((name for name in self.evaluation.protocols if name.endswith("-on-validation")), None)
        if protocol and not (self.dataset.validation_share or self.partition.has_validation):
            raise SettingsError(
                f"evaluation.protocols: {protocol} can't be measured, since no client has validation samples; "
                "dataset.validation_share should be more than 0, as 0.2."
            )

    def _check_declared_files(self, download_command: str | None, obtain_command: str) -> None:
        """Everything that is not declared, stored, or what it was declared as, is said at once."""
        mistakes = {
            section: pin.explain_mismatch(section, download_command) for section, pin in self.pinned_files.items()
        }
        if mistakes.get("dataset") is None:
            mistakes["dataset"] = self.dataset.explain_missing_data(obtain_command)
        if messages := [sentence for sentence in mistakes.values() if sentence]:
            raise SettingsError("\n".join(messages))

    @model_validator(mode="after")
    def _check_consistency(self, info: ValidationInfo) -> Params:
        context = info.context or {}
        labels, raw_settings = context.get("labels"), context.get("settings", {})
        if labels is None:
            labels = [label for label in self.study.algorithms if not parse_method(raw_settings, label).settings]
        for label in self.study.algorithms:
            if label not in self.algorithms:  # one of fedpipe's needs no entry
                known_names = sorted({*self.algorithms, *registry.list_components(registry.ALGORITHM)})
                if label not in known_names:
                    raise SettingsError(
                        f"study.algorithms: unknown algorithm '{label}'; {suggest_name(label, known_names)}"
                    )
                self.algorithms[label] = registry.parse_component(registry.ALGORITHM, {}, label)
        if self.report.baseline not in (None, *self.study.algorithms):
            raise SettingsError(
                f"report.baseline: '{self.report.baseline}' is not in study.algorithms; "
                f"{suggest_name(str(self.report.baseline), self.study.algorithms)}"
            )
        for name in self.report.best_over:
            if name not in self.study.grid:
                known_names = list(self.study.grid)
                raise SettingsError(
                    f"report.best_over: '{name}' is not in study.grid; {suggest_name(name, known_names)}"
                )
        self._check_validation_samples()
        titles = {label: title for label in self.study.algorithms if (title := parse_method(raw_settings, label).title)}
        for (label, title), other in itertools.product(titles.items(), self.study.algorithms):
            if other != label and title == titles.get(other, other):
                raise SettingsError(
                    f"algorithms.{label}.title: {title!r} is what tables call {other}; each method should have another."
                )
        for label in self.study.algorithms:
            shown_protocol = parse_method(raw_settings, label).shown
            selection_protocol = to_validation_protocol(shown_protocol or self.evaluation.protocols[0])
            if self.report.best_on == "validation" and selection_protocol not in self.evaluation.protocols:
                raise SettingsError(
                    f"report.best_on: validation chooses {label}'s best by {selection_protocol}, which is not "
                    "measured; it should "
                    f"be one of evaluation.protocols, {', '.join(self.evaluation.protocols)}."
                )
            if shown_protocol and shown_protocol not in self.evaluation.protocols:
                raise SettingsError(
                    f"algorithms.{label}.shown: {shown_protocol} is not measured; it should be one of "
                    "evaluation.protocols, "
                    f"{', '.join(self.evaluation.protocols)}."
                )
        for label in labels:
            algorithm = self.algorithms[label]
            if algorithm.needs_sgd and self.federation.optimizer != "sgd":
                raise SettingsError(
                    f"federation.optimizer: {self.federation.optimizer} can't be used with {label}, whose theory "
                    f"needs sgd; it should be sgd, or algorithms.{label}.adam true to insist."
                )
            for key in algorithm.unsupported_settings:
                value, default = getattr(self.federation, key), Federation.model_fields[key].default
                if value != default:
                    raise SettingsError(
                        f"federation.{key}: {value} can't be used with {label}, which takes plain gradient steps; "
                        f"it should be {'null' if default is None else default}."
                    )
            if self.federation.local_steps is not None and (reason := algorithm.local_steps_refusal):
                raise SettingsError(
                    f"federation.local_steps: {self.federation.local_steps} can't be used with {label}, {reason}; it "
                    f"should be null, or study.algorithms do without {label}."
                )
            if algorithm.server_optimizer_part is None and not self.federation.server.is_plain_averaging:
                raise SettingsError(
                    f"federation.server: {label} has no averaged model that {self.federation.server.optimizer} could "
                    f"move; it should be left out, or study.algorithms do without {label}."
                )
        self._check_declared_files(context.get("download"), context.get("obtain", DOWNLOAD_COMMAND))
        for label in labels if self.model.has_full_weights else ():
            if self.algorithms[label].needs_several_models:
                raise single_initial_model_error(label)
        facts = self.dataset.facts
        if self.dataset.subset and self.partition.is_index_based:
            raise SettingsError(
                f"dataset.subset: {self.dataset.subset} can't be used with a partition from a file, whose samples are "
                f"those of the whole data set; remove it."
            )
        if (self.dataset.subset or 0) > facts.size:
            raise SettingsError(
                f"dataset.subset: {self.dataset.subset} is more than there are; it should be at most {facts.size}."
            )
        partitioned_size = facts.size if self.partition.has_fixed_splits else self.dataset.partitioned_size
        self.partition.check(self.federation.clients, facts.classes, partitioned_size)
        if self.partition.has_overlap and self.dataset.split == "pooled":
            raise SettingsError(
                "dataset.split: 'pooled' can't be used with a partition in which clients share samples, since one "
                "would train on what another tests on; it should be 'official'."
            )
        if self.partition.has_overlap and self.dataset.validation_share:
            raise SettingsError(
                f"dataset.validation_share: {self.dataset.validation_share} can't be used with a partition in which "
                f"clients share samples, since one would train on what another validates on; it should be 0."
            )
        self.transforms.check(facts.shape)
        if self.model.has_frozen_base and self.transforms.is_random:
            key = next(name for name in ("crop", "flip", "rotation") if getattr(self.transforms, name))
            raise SettingsError(
                f"transforms.{key}: images can't change at random under the frozen base of the model, whose features "
                f"are computed once; leave it out, or set model.frozen to false."
            )
        self.model.check(facts.shape, facts.classes)
        has_tokens = self.dataset.has_tokens
        if not type(self.model).__module__.startswith("fedpipe."):  # packaged ones are steady, which the tests show
            from fedpipe.models._steady import require_pure_network

            require_pure_network(self.model, facts.shape, facts.classes, has_tokens)
        elif has_tokens is not None and has_tokens != hasattr(self.model, "vocabulary"):
            families = {
                name: registry.find_component(registry.MODEL, name) for name in registry.list_components(registry.MODEL)
            }
            default = [name for name, family in families.items() if hasattr(family, "vocabulary") == has_tokens]
            raise SettingsError(
                f"model.name: '{registry.get_component_name(registry.MODEL, type(self.model))}' can't take the "
                f"{'token ids' if has_tokens else 'numbers'} of the data set; it should be one of: "
                f"{', '.join(default)}."
            )
        self.model.check_weights(facts.shape, facts.classes)
        vocabulary = getattr(self.model, "vocabulary", None)
        if vocabulary is not None and facts.vocabulary is not None and vocabulary < facts.vocabulary:
            raise SettingsError(
                f"model.vocabulary: {vocabulary} is less than the {facts.vocabulary} token ids of the data set; "
                f"it should be {facts.vocabulary}."
            )
        if any(protocol.startswith("finetuned") for protocol in self.evaluation.protocols):
            last = self.federation.rounds
            if self.federation.learning_rate and not self.federation.with_round_learning_rate(last + 1).learning_rate:
                raise SettingsError(
                    f"federation.schedule: after round {last} the learning rate is 0, at which the models of finetuned "
                    "protocols would stay as they are; it should have a minimum above 0, or another period."
                )
        if self.federation.rounds % self.evaluation.every:
            raise SettingsError(
                f"evaluation.every: {self.evaluation.every} does not divide federation.rounds "
                f"({self.federation.rounds}), so the last round would not be measured; it should."
            )
        return self


def single_initial_model_error(algorithm: str) -> SettingsError:
    """What to say of an algorithm that begins with several models where a file gives but one."""
    return SettingsError(
        f"model.weights: a file holds one initial model, and {algorithm} begins with several; it should be null, or "
        f"study.algorithms do without {algorithm}."
    )


def format_download_command(path: Path) -> str:
    """The command that obtains a study's data, and declares the files that it names."""
    return DOWNLOAD_COMMAND if path == artifacts.PARAMS else f"{DOWNLOAD_COMMAND} --params {shlex.quote(str(path))}"


def find_ignored_parameters(settings: dict[str, Any]) -> dict[str, str]:
    """The partition's parameters that only other schemes have, by key, each with a warning.

    Where a grid, or `dvc exp run -S`, changes the scheme alone, those of the former one are left behind.
    """
    section = settings.get("partition")
    if not isinstance(section, dict):
        return {}
    scheme = section.get("scheme", registry.PARTITION.default)
    try:
        scheme_parameters = _list_scheme_parameters(str(scheme))
    except SettingsError:  # told where it is built
        return {}
    other_parameters = {
        name for other in registry.list_components(registry.PARTITION) for name in _list_scheme_parameters(other)
    } - scheme_parameters
    return {
        f"partition.{name}": f"partition.{name}: {value} is left out, since the scheme {scheme} has no such parameter."
        for name, value in section.items()
        if name in other_parameters - {"scheme"}
    }


def _list_scheme_parameters(scheme: str) -> set[str]:
    return {field.name for field in registry.list_parameters(registry.find_component(registry.PARTITION, scheme))}


def parse_params(
    settings: Any,
    download_command: str | None = DOWNLOAD_COMMAND,
    labels: Collection[str] | None = None,
    obtain_command: str | None = None,
) -> Params:
    """Settings as they stand in the YAML file, checked and with their defaults filled in.

    Parameters
    ----------
    settings
        All of them, in sections.
    download_command
        The command that declares files in the study's file; None where it can't, as at a point of a grid.
    labels
        The methods that these settings are for; by default those of the study that have none of their own (`with`).
    obtain_command
        The command that obtains the study's data; by default ``format_download_command``.

    Raises
    ------
    SettingsError
        One sentence for each mistake.
    """
    if not isinstance(settings, dict):
        raise SettingsError("params.yaml: it should be a mapping of sections, as `federation: {clients: 10}`.")
    if ignored_parameters := find_ignored_parameters(settings):
        partition = {
            name: value
            for name, value in settings["partition"].items()
            if f"partition.{name}" not in ignored_parameters
        }
        settings = settings | {"partition": partition}
    context = {
        "download": download_command,
        "labels": labels,
        "settings": settings,
        "obtain": obtain_command or download_command or DOWNLOAD_COMMAND,
    }
    try:
        params = Params.model_validate(settings, context=context)
    except ValidationError as error:
        list_known_keys = partial(_list_keys, settings=settings)
        raise SettingsError("\n".join(format_validation_errors(error, settings, "", list_known_keys))) from None
    params._ignored_parameters = ignored_parameters
    return params


def parse_dataset(settings: Any) -> Data:
    """The section `parse_dataset` alone, checked; see :func:`parse_params`."""
    return cast(Data, _section_alone(Data, "dataset", settings))


def parse_federation(settings: Any) -> Federation:
    """The section `federation` alone, checked; see :func:`parse_params`."""
    return cast(Federation, _section_alone(Federation, "federation", settings))


def _section_alone(kind: type[Section], name: str, settings: Any) -> Section:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise SettingsError("\n".join(format_validation_errors(error, settings, name, lambda _: []))) from None


def _list_keys(location: Location, settings: Any) -> list[str]:
    section: Any = Params
    if location[:1] == ("probes",) and len(location) == 2:
        kind = _get_probe_kind(settings["probes"][location[1]])
        section, location = dict(zip(PROBE_KINDS, get_args(Probe), strict=True))[kind], ()
    for part in location:
        section = section.model_fields[str(part)].annotation
    return list(section.model_fields)


def read_params(path: Path) -> dict[str, Any]:
    """The YAML file as it stands, unchecked.

    Raises
    ------
    SettingsError
        The file is missing or is no YAML.
    """
    try:
        settings = read_yaml(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise SettingsError(f"{path}: there is no such file; run from the folder that holds it.") from None
    except OSError as error:
        raise SettingsError(f"{path}: it can't be read ({error.strerror}); it should be a YAML file.") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: it is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    if not isinstance(settings, dict):
        raise SettingsError(f"{path}: it should be a mapping of sections, as `federation: {{clients: 10}}`.")
    return settings


def override_settings(settings: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``settings`` in which the value at each dotted key is replaced; the last changes are made last."""
    result = copy.deepcopy(settings)
    for key, value in (change for part in changes for change in copy.deepcopy(part).items()):
        *sections, last = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise SettingsError(f"study.grid: '{key}' goes through '{section}', which is a value and no section.")
        target[last] = value
    return result


def apply_scale(
    settings: dict[str, Any], scale: str, download_command: str = DOWNLOAD_COMMAND
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings at one of a study's scales, and those of its keys that stand above grid and methods, too.

    ``format_download_command`` is the command that declares files in the study's file.

    Raises
    ------
    SettingsError
        The study has no such scale.
    """
    if scale == FULL_SCALE:
        return settings, {}
    scales = settings.get("scales")
    known_scales = list(scales) if isinstance(scales, Mapping) else []
    if scale not in known_scales:
        raise SettingsError(
            f"--scale: '{scale}' is no scale of this study; {suggest_name(scale, [*known_scales, FULL_SCALE])}"
        )
    changes = parse_params(settings, download_command).scales[scale]
    return override_settings(settings, changes), {
        key: value for key, value in changes.items() if key.partition(".")[0] not in STUDY_WIDE_SECTIONS
    }


def build_json_schema() -> dict[str, Any]:
    """JSON Schema of params.yaml, for editors; components are listed with their parameters."""
    schema = Params.model_json_schema(mode="validation")
    definitions = schema.setdefault("$defs", {})

    def build_options(kind: ComponentKind) -> dict[str, Any]:
        choices, selector = [], kind.selector
        for name in registry.list_components(kind):
            component = registry.add_extension_parameters(kind, registry.find_component(kind, name))
            component_schema = registry.get_type_adapter(cast(Hashable, component)).json_schema(
                ref_template="#/$defs/{model}"
            )
            definitions.update(component_schema.pop("$defs", {}))
            component_schema["title"] = name
            component_schema["description"] = registry.get_docstring_summary(component)
            component_schema["properties"] = {selector: {"const": name}, **component_schema.get("properties", {})}
            component_schema["required"] = [
                *component_schema.get("required", []),
                *([] if name == kind.default else [selector]),
            ]
            choices.append(component_schema)
        custom_class = {
            "title": "own",
            "type": "object",
            "properties": {selector: DOTTED_PATH_SCHEMA},
            "required": [selector],
        }
        return {"anyOf": [*choices, custom_class | {"description": "A class of one's own, as my_module.MyClass."}]}

    properties = schema["properties"]
    properties["partition"] = build_options(registry.PARTITION)
    properties["model"] = build_options(registry.MODEL)
    method_properties = Method.model_json_schema(mode="validation")["properties"]
    properties["algorithms"] = {
        "type": "object",
        "properties": {
            choice["title"]: choice | {"required": [], "properties": choice["properties"] | method_properties}
            for choice in build_options(registry.ALGORITHM)["anyOf"]
            if choice["title"] != "own"
        },
        "additionalProperties": {"type": "object", "properties": method_properties},
    }
    dataset_keys = definitions.pop("Data")["properties"]
    properties["dataset"] = build_options(registry.DATASET)
    for choice in properties["dataset"]["anyOf"]:
        choice["properties"] = dataset_keys | choice["properties"]
    plain_schema: dict[str, Any] = json.loads(json.dumps(schema))
    return plain_schema
