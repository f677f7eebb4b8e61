"""params.yaml: what a study is, validated and with its defaults filled in.

One schema serves everybody: the command line and the Snakefile read it through :func:`load`, editors through
:func:`json_schema`. Every mistake is one sentence that begins with its key.
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
from fedpipe.artifacts import PAPER
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, Facts, Published
from fedpipe.data.fetch import ENVIRONMENT, Fetcher
from fedpipe.errors import ArtifactError, Location, SettingsError, nearest, refuse_numbers, sentences
from fedpipe.pins import Pin
from fedpipe.planned import Statistic
from fedpipe.registry import Component, Kind
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
WHOLE = ("federation",)  #: never set as a whole: all of its keys that are not given would have their defaults
SPLITTING = ("split", "test_share", "stratified", "validation_share")  #: keys of `dataset` that say how to split it
GENERATED = "generated"  #: the data set that stands in for one that is not at hand
DOWNLOAD = "fedpipe download"  #: what obtains a study's data
OWN = {"type": "string", "pattern": r"\."}  #: a dotted path, in the JSON Schema
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


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
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


def as_number(value: Any) -> Any:
    """The number that a text stands for: YAML 1.1 reads 1e-3 as text, and a quoted number is one to what takes it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _component(kind: Kind, value: Any) -> Component:
    return value if isinstance(value, Component) else registry.parsed(kind, value)


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
    def _a_line(cls, title: str | None) -> str | None:
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
    def _its_own(cls, settings: dict[str, Any]) -> dict[str, Any]:
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


OF_METHODS = tuple(str(field.alias or name) for name, field in Method.model_fields.items())  #: with, shown, title


def method(settings: Any, label: str) -> Method:
    """What settings, as they stand in the YAML file, say of one method beside its algorithm's parameters.

    Raises
    ------
    SettingsError
        One sentence for each mistake.
    """
    entries = settings.get("algorithms") or {}
    entry = entries.get(label) if isinstance(entries, Mapping) else None
    return _method(entry, label)


def _method(entry: Any, label: str) -> Method:
    given = {name: value for name, value in entry.items() if name in OF_METHODS} if isinstance(entry, Mapping) else {}
    try:
        return Method.model_validate(given)
    except ValidationError as error:
        raise SettingsError("\n".join(sentences(error, given, f"algorithms.{label}", lambda _: []))) from None


def _algorithm(entry: Any, label: str) -> Component:
    if isinstance(entry, Component):
        return entry
    if isinstance(entry, Mapping):
        entry = {name: value for name, value in entry.items() if name not in OF_METHODS}
    made = registry.parsed(registry.ALGORITHM, entry, label, OF_METHODS)
    for field in registry.parameters_of(type(made)):
        if field.name in OF_METHODS:
            raise SettingsError(
                f"algorithms.{label}.{field.name}: it is a key of every method, so that {type(made).__qualname__}'s "
                "field of that name could never be set; the field should have another name."
            )
    return made


def algorithm(settings: Mapping[str, Any], label: str, changes: Mapping[str, Any]) -> Component:
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
    known = sorted({*entries, *registry.names(registry.ALGORITHM)})
    if label not in known:
        raise SettingsError(f"'{label}' is no method of the study; {nearest(label, known)}")
    entry = entries.get(label, {})
    return _algorithm({**entry, **changes} if isinstance(entry, dict) else entry, label)


def _entries(entries: dict[str, Any]) -> dict[str, Component]:
    """The algorithm of each entry; the mistakes of all entries are told at once."""
    found, mistakes = {}, []
    for label, value in entries.items():
        try:
            _method(value, label)
            found[label] = _algorithm(value, label)
        except SettingsError as error:
            mistakes.append(str(error))
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return found


def _dump(kind: Kind, value: Component) -> dict[str, Any]:
    return {kind.selector: registry.name_of(kind, type(value)), **dataclasses.asdict(value)}


def _section(kind: Kind) -> tuple[Any, ...]:
    return (
        BeforeValidator(partial(_component, kind)),
        PlainSerializer(partial(_dump, kind)),
        WithJsonSchema({"type": "object"}),
        Field(default_factory=partial(_component, kind, {})),
    )


#: Sections whose selector names a component and whose other keys are that component's parameters.
PartitionSection = Annotated[Any, *_section(registry.PARTITION)]
ModelSection = Annotated[Any, *_section(registry.MODEL)]
#: Entries that do so, by label.
AlgorithmSections = Annotated[
    dict[Label, Any],
    AfterValidator(_entries),
    PlainSerializer(lambda found: {label: _dump(registry.ALGORITHM, found[label]) for label in found}),
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
    def _known(self) -> Data:
        assert self.source
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The data set's parameters, as given."""
        return dict(self.model_extra or {})

    @cached_property
    def named(self) -> Dataset:
        """The data set that is named, with its parameters."""
        settings = {"name": self.name, **self.parameters}
        return cast(Dataset, registry.parsed(registry.DATASET, settings, beside=[*type(self).model_fields]))

    @cached_property
    def source(self) -> Dataset:
        """The data set that is taken: the one that is named, or what is generated in its place (`absent`)."""
        if self.absent == "fetch" or self.at_hand:
            return self.named
        return cast(Dataset, registry.parsed(registry.DATASET, {"name": GENERATED, "like": self.name}))

    @property
    def at_hand(self) -> bool:
        """Whether the data set that is named can be obtained without a network."""
        named, here = self.named, self.fetcher
        if not isinstance(named, Published) or named.sha256:
            return True
        stored = store.place(registry.described(registry.DATASET, named))
        return stored.is_file() or all(
            (here.is_local and here.holds(file.name)) or (here.cache / file.name).is_file() for file in named.files
        )

    @cached_property
    def described(self) -> dict[str, Any]:
        """What keys hold of it."""
        return registry.described(registry.DATASET, self.source)

    @cached_property
    def fetcher(self) -> Fetcher:
        """Where its files come from."""
        return Fetcher(mirror=self.mirror or os.environ.get(ENVIRONMENT))

    @property
    def origin(self) -> dict[str, Any]:
        """All that it takes to obtain it."""
        if self.source is not self.named:
            return {"name": GENERATED, "like": self.name}
        return {"name": self.name, **self.parameters, **({"mirror": self.mirror} if self.mirror else {})}

    @property
    def file(self) -> Path:
        """Where its tensors lie."""
        return store.place(self.described)

    @property
    def dealt(self) -> int:
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
    def facts(self) -> Facts:
        """Shape, classes and size, all known before any job.

        Raises
        ------
        ArtifactError
            They stand in a file that is not stored.
        """
        known = self.source.facts
        return store.facts(self.file) if known is None else known

    @property
    def has_tokens(self) -> bool | None:
        """Whether inputs are token ids, and not numbers; None if a data set of one's own leaves that open."""
        if self.facts.vocabulary is not None:
            return True
        return False if type(self.source).__module__.startswith("fedpipe.") else None

    def lacking(self, download: str) -> str | None:
        """One sentence if its facts are not known yet, with the command that mends that; None if they are."""
        source, here = self.source, self.fetcher
        if source.facts is None:
            try:
                store.facts(self.file)
            except ArtifactError:
                sha256 = getattr(source, "sha256", None)
                return f"dataset.sha256: the file with SHA-256 {sha256} is not stored; run `{download}`."
        if not isinstance(source, Published) or source.sha256 or not here.is_local or self.file.is_file():
            return None
        if here.holds(source.stand_in) and not all(here.holds(file.name) for file in source.files):
            return (
                f"dataset.sha256: missing; the mirror has no original of '{self.name}' but a {source.stand_in}, "
                f"which is taken by its SHA-256: run `{download}`, which fills it in."
            )
        return None


def _listed(value: Any) -> Any:
    """A number as a list of one, so that keys are the same for both."""
    number = as_number(value)
    return [number] if isinstance(number, (int, float)) and not isinstance(number, bool) else value


def _by_channel(**limits: float) -> tuple[Any, ...]:
    """One number, or a list of numbers."""
    number = {"type": "number", **limits}
    return BeforeValidator(_listed), WithJsonSchema({"anyOf": [number, {"type": "array", "items": number}]})


class Transforms(Section):
    """What is done to images as they are gathered: all are normalized, those that are trained on change at random."""

    mean: Annotated[tuple[float, ...], *_by_channel()] = Field(
        (), description="Subtracted from pixels in [0, 1]: one number, or one a channel."
    )
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], *_by_channel(exclusiveMinimum=0)] = Field(
        (), description="Divided out then."
    )
    crop: int = Field(0, ge=0, description="Pixels of zeros put around before a window of the old size is cut out.")
    flip: bool = Field(False, description="Mirror left to right, every second image.")
    rotation: float = Field(0, ge=0, le=180, description="Turn by up to so many degrees either way.")
    on_test: bool = Field(False, description="Change test images too, as FedDW's code does (noisy accuracies).")

    @property
    def random(self) -> bool:
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
STEPS: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "yogi": {"beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "adagrad": {"beta1": 0.0, "tau": 0.001},
}


class Choice(Section):
    """A choice, and keys of which it takes only some; the others are None and not written."""

    def _refuse_others(self, key: str, selector: str, takes: Sequence[str]) -> None:
        for name in sorted(self.model_fields_set - {selector, *takes}):
            raise ValueError(
                f"{key}.{name}: {getattr(self, name)} has no meaning for {getattr(self, selector)}, which takes "
                f"{' and '.join(takes)}; remove it."
            )

    @model_serializer(mode="wrap")
    def _without_others(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
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
    def _filled(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        return STEPS.get(str(given.get("optimizer", "sgd")), {}) | given

    @model_validator(mode="after")
    def _its_own(self) -> Server:
        takes = ["learning_rate", *STEPS[self.optimizer]]
        self._refuse_others("federation.server", "optimizer", takes)
        return self

    @property
    def takes_the_mean(self) -> bool:
        """Whether the next model is the mean of the uploads, as without any such optimizer."""
        return self.optimizer == "sgd" and self.learning_rate == 1


#: By name, what a schedule takes beside warm-up rounds, with its default; None: it has to be given.
SCHEDULES: dict[str, dict[str, float | None]] = {
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
    def _filled(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        defaults = SCHEDULES.get(str(given.get("name", "constant")), {})
        return {name: value for name, value in defaults.items() if value is not None} | given

    @model_validator(mode="after")
    def _its_own(self) -> Schedule:
        takes = ["warmup", *SCHEDULES[self.name]]
        self._refuse_others("federation.schedule", "name", takes)
        for name in takes:
            if getattr(self, name) is None:
                raise ValueError(f"federation.schedule.{name}: it is missing; {self.name} needs {name}.")
        return self

    @property
    def is_flat(self) -> bool:
        """Whether every round has the same rate."""
        return self.name == "constant" and not self.warmup

    def rate(self, base: float, round: int) -> float:
        """The learning rate of a round, from 1, where ``base`` is that of the federation."""
        if round <= self.warmup:
            return base * round / self.warmup
        after = round - 1 - self.warmup
        match self.name:
            case "step":
                return base * float(cast(float, self.gamma) ** (after // cast(int, self.step_size)))
            case "exponential":
                return base * float(cast(float, self.gamma) ** after)
            case "cosine":
                least, share = cast(float, self.minimum), (1 + math.cos(math.pi * after / cast(int, self.period))) / 2
                return least + (base - least) * share
        return base


#: Keys of the federation that came later, each with its value where nothing is asked for. Without those that have it,
#: keys of runs are as they were before.
UNASKED: dict[str, Any] = {
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
    def _epochs_or_steps(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        epochs, steps = given.get("local_epochs", 1), given.get("local_steps")
        if epochs is None and steps is None:
            raise ValueError("federation.local_epochs: null leaves no training; it should be given, or local_steps.")
        if steps is not None and given.get("local_epochs") is not None:
            raise ValueError(
                f"federation.local_steps: {steps} can't be used beside local_epochs: {epochs}, since both say how long "
                "a client trains; one of them should be null."
            )
        return given if steps is None else given | {"local_epochs": None}

    @model_validator(mode="after")
    def _falls(self) -> Federation:
        least = self.schedule.minimum
        if least is not None and least > self.learning_rate:
            raise ValueError(
                f"federation.schedule.minimum: {least} is more than federation.learning_rate ({self.learning_rate}); "
                "it should be less."
            )
        return self

    @model_validator(mode="after")
    def _lower_than_float32(self) -> Federation:
        if self.precision == "bfloat16" and self.dtype != "float32":
            raise ValueError(
                f"federation.precision: bfloat16 is for models of float32, not of {self.dtype}; it should be full, or "
                "federation.dtype float32."
            )
        return self

    @model_serializer(mode="wrap")
    def _asked(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name not in UNASKED or value != UNASKED[name]}

    def in_round(self, number: int) -> Federation:
        """The same settings with the learning rate of a round."""
        if self.schedule.is_flat:
            return self
        rate = self.schedule.rate(self.learning_rate, number)
        return self.model_copy(update={"learning_rate": rate, "schedule": Schedule()})

    def epochs(self, samples: int) -> float:
        """How many passes over its data a client of so many samples makes in a round; no whole number by steps."""
        if self.local_epochs is not None:
            return self.local_epochs
        size = samples if self.batch_size == "full" else self.batch_size
        return cast(int, self.local_steps) / max(1, math.ceil(samples / max(1, size)))

    @property
    def arithmetic(self) -> str:
        """The least precise numbers that it computes with."""
        return self.dtype if self.precision == "full" else self.precision

    @model_validator(mode="after")
    def _momentum_is_sgds(self) -> Federation:
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

    _no_value_twice = field_validator("protocols")(_once)


#: Columns of a study's tables, which no axis may be called.
COLUMNS = (
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
Varied = Annotated[
    Annotated[tuple[Any, ...], Tag("list")] | Annotated[Axis, Tag("axis")],
    Discriminator(lambda given: "axis" if isinstance(given, dict) else "list"),
]


class Study(Section):
    """What runs: the product of algorithms, seeds and grid."""

    algorithms: tuple[Label, ...] = Field(
        ("fedavg",), min_length=1, description="Methods to run: names of fedpipe's, entries of `algorithms`."
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="Each drives partition, initial model and training.")
    grid: dict[str, Varied] = Field(
        default_factory=dict,
        description="Any key to a list of values, as `partition.alpha: [0.1, 0.5]`; or an axis, whose name is your "
        "own: named values, each a mapping of the keys that change together, as "
        "`environment: {mild: {partition.alpha: 0.5}, harsh: {partition.alpha: 0.1, federation.participation: 0.5}}`.",
    )

    _no_value_twice = field_validator("algorithms", "seeds")(_once)

    @field_validator("algorithms", mode="before")
    @classmethod
    def _no_paths(cls, algorithms: Any) -> Any:
        path = next((name for name in algorithms if "." in str(name)), None) if isinstance(algorithms, list) else None
        if path:
            entry = f"{str(path).rpartition('.')[2].lower()}: {{algorithm: {path}}}"
            raise ValueError(f"'{path}' needs a name; it should be an entry, as `{entry}` under algorithms.")
        return algorithms

    @field_validator("grid")
    @classmethod
    def _points_once(cls, grid: dict[str, Varied]) -> dict[str, Varied]:
        for name, values in grid.items():
            try:
                _once(tuple(values if isinstance(values, dict) else map(as_number, values)))
            except ValueError as error:
                raise ValueError(f"study.grid.{name}: {error}") from None
        return grid

    @field_validator("grid")
    @classmethod
    def _names(cls, grid: dict[str, Varied]) -> dict[str, Varied]:
        for name in (name for name, values in grid.items() if isinstance(values, dict)):
            if "." in name:
                raise ValueError(
                    f"study.grid.{name}: a key's values should be a list; an axis, whose values are named, has a name "
                    "of its own, without dots."
                )
            if name in COLUMNS or not re.fullmatch(r"[A-Za-z][\w -]*", name):
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
    def _found(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in _once(names):
            callbacks.find(name)
        return names

    @field_validator("stack")
    @classmethod
    def _positive(cls, stack: int | str) -> int | str:
        if isinstance(stack, int) and stack < 1:
            raise ValueError(f"{stack} can't be used; it should be at least 1.")
        return stack

    @model_validator(mode="after")
    def _grain(self) -> Execution:
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

    _no_value_twice = field_validator("best_over", "statistics")(_once)

    @model_validator(mode="after")
    def _what_they_need(self) -> Report:
        needed = {"rounds_to_target": "target", "bytes_to_target": "target", "difference": "baseline"}
        right = {"target": "a share, as 0.7 for 70 %", "baseline": "a method of study.algorithms"}
        for name in self.statistics:
            if name in needed and getattr(self, needed[name]) is None:
                key = needed[name]
                raise ValueError(
                    f"report.{key}: it is missing, and report.statistics lists {name}; it should be {right[key]}."
                )
        return self


def validating(protocol: str) -> Protocol:
    """The protocol of the same model on the clients' validation samples."""
    return cast(Protocol, f"{protocol.partition('-on-')[0]}-on-validation")


FIXED = ("study", "execution", "artifacts", "report", "scales", "probes")  #: sections that are one for the whole study


def _no_paper(scales: dict[str, Any]) -> dict[str, Any]:
    for name, changes in scales.items():
        if name == PAPER:
            raise ValueError(
                f"scales.{name}: it is the study as it stands in the file; a scale should have another name."
            )
        for key in changes:
            if key.partition(".")[0] == "scales":
                raise ValueError(f"scales.{name}: '{key}' can't be set by a scale.")
            if key in WHOLE:
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

    _no_value_twice = field_validator("rounds", "algorithms", "seeds", "models", "clients", check_fields=False)(
        lambda values: values and _once(values)
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
KINDS = tuple(get_args(probe.model_fields["kind"].annotation)[0] for probe in get_args(Probe))


def _kind(value: Any) -> str:
    """Which kind an entry of `probes` is of."""
    return str(value.get("kind")) if isinstance(value, dict) else str(getattr(value, "kind", value))


def _kinds_known(entries: Any) -> Any:
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, _Probe):
            continue
        if not isinstance(entry, dict) or "kind" not in entry:
            raise ValueError(f"probes.{name}: its kind is missing; it should be one of: {', '.join(KINDS)}.")
        if entry["kind"] not in KINDS:
            told = nearest(str(entry["kind"]), KINDS)
            raise ValueError(f"probes.{name}.kind: there is no probe '{entry['kind']}'; {told}")
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
            Discriminator(_kind),
        ],
    ],
    BeforeValidator(_kinds_known),
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
    scales: Annotated[dict[Label, dict[str, Any]], AfterValidator(_no_paper)] = Field(
        default_factory=dict,
        description="Other sizes of the study by name, as `smoke: {federation.rounds: 2, study.seeds: [0]}`: keys that "
        "stand above all else where `--scale NAME` asks for it.",
    )
    probes: ProbeSections

    _left_out: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """What was given and left out, by key, each with a warning; see :func:`unheard`."""
        return self._left_out

    @property
    def warnings(self) -> list[str]:
        """A sentence each for what is left out, and for what may not be meant."""
        schedule, rounds = self.federation.schedule, self.federation.rounds
        turns = schedule.warmup + (schedule.period or rounds)
        rises = (
            f"federation.schedule.period: {schedule.period} ends after round {turns} of {rounds}, from where the "
            "learning rate rises again, as with CosineAnnealingLR."
        )
        return [*self.left_out.values(), *([rises] if turns < rounds and schedule.name == "cosine" else [])]

    @property
    def pins(self) -> dict[str, Pin]:
        """The user's own files that the study names, by the section that does."""
        components = {"dataset": self.dataset.source, "partition": self.partition, "model": self.model}
        return {section: component.pin for section, component in components.items() if component.pin}

    def _validated(self) -> None:
        """Refuse to measure on validation samples that no client has."""
        protocol = next((name for name in self.evaluation.protocols if name.endswith("-on-validation")), None)
        if protocol and not (self.dataset.validation_share or self.partition.validates):
            raise SettingsError(
                f"evaluation.protocols: {protocol} can't be measured, since no client has validation samples; "
                "dataset.validation_share should be more than 0, as 0.2."
            )

    def _there(self, download: str | None, obtain: str) -> None:
        """Everything that is not declared, stored, or what it was declared as, is said at once."""
        found = {section: pin.mistake(section, download) for section, pin in self.pins.items()}
        if found.get("dataset") is None:
            found["dataset"] = self.dataset.lacking(obtain)
        if told := [sentence for sentence in found.values() if sentence]:
            raise SettingsError("\n".join(told))

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Params:
        context = info.context or {}
        labels, given = context.get("labels"), context.get("settings", {})
        if labels is None:
            labels = [label for label in self.study.algorithms if not method(given, label).settings]
        for label in self.study.algorithms:
            if label not in self.algorithms:  # one of fedpipe's needs no entry
                known = sorted({*self.algorithms, *registry.names(registry.ALGORITHM)})
                if label not in known:
                    raise SettingsError(f"study.algorithms: unknown algorithm '{label}'; {nearest(label, known)}")
                self.algorithms[label] = registry.parsed(registry.ALGORITHM, {}, label)
        if self.report.baseline not in (None, *self.study.algorithms):
            raise SettingsError(
                f"report.baseline: '{self.report.baseline}' is not in study.algorithms; "
                f"{nearest(str(self.report.baseline), self.study.algorithms)}"
            )
        for name in self.report.best_over:
            if name not in self.study.grid:
                known = list(self.study.grid)
                raise SettingsError(f"report.best_over: '{name}' is not in study.grid; {nearest(name, known)}")
        self._validated()
        titles = {label: title for label in self.study.algorithms if (title := method(given, label).title)}
        for (label, title), other in itertools.product(titles.items(), self.study.algorithms):
            if other != label and title == titles.get(other, other):
                raise SettingsError(
                    f"algorithms.{label}.title: {title!r} is what tables call {other}; each method should have another."
                )
        for label in self.study.algorithms:
            shown = method(given, label).shown
            chosen = validating(shown or self.evaluation.protocols[0])
            if self.report.best_on == "validation" and chosen not in self.evaluation.protocols:
                raise SettingsError(
                    f"report.best_on: validation chooses {label}'s best by {chosen}, which is not measured; it should "
                    f"be one of evaluation.protocols, {', '.join(self.evaluation.protocols)}."
                )
            if shown and shown not in self.evaluation.protocols:
                raise SettingsError(
                    f"algorithms.{label}.shown: {shown} is not measured; it should be one of evaluation.protocols, "
                    f"{', '.join(self.evaluation.protocols)}."
                )
        for label in labels:
            algorithm = self.algorithms[label]
            if algorithm.needs_sgd and self.federation.optimizer != "sgd":
                raise SettingsError(
                    f"federation.optimizer: {self.federation.optimizer} can't be used with {label}, whose theory "
                    f"needs sgd; it should be sgd, or algorithms.{label}.adam true to insist."
                )
            for key in algorithm.ignores:
                value, right = getattr(self.federation, key), Federation.model_fields[key].default
                if value != right:
                    raise SettingsError(
                        f"federation.{key}: {value} can't be used with {label}, which takes plain gradient steps; "
                        f"it should be {'null' if right is None else right}."
                    )
            if self.federation.local_steps is not None and (reason := algorithm.needs_epochs):
                raise SettingsError(
                    f"federation.local_steps: {self.federation.local_steps} can't be used with {label}, {reason}; it "
                    f"should be null, or study.algorithms do without {label}."
                )
            if algorithm.averaged is None and not self.federation.server.takes_the_mean:
                raise SettingsError(
                    f"federation.server: {label} has no averaged model that {self.federation.server.optimizer} could "
                    f"move; it should be left out, or study.algorithms do without {label}."
                )
        self._there(context.get("download"), context.get("obtain", DOWNLOAD))
        for label in labels if self.model.whole else ():
            if self.algorithms[label].several:
                raise several(label)
        facts = self.dataset.facts
        if self.dataset.subset and self.partition.by_index:
            raise SettingsError(
                f"dataset.subset: {self.dataset.subset} can't be used with a partition from a file, whose samples are "
                f"those of the whole data set; remove it."
            )
        if (self.dataset.subset or 0) > facts.size:
            raise SettingsError(
                f"dataset.subset: {self.dataset.subset} is more than there are; it should be at most {facts.size}."
            )
        dealt = facts.size if self.partition.splits else self.dataset.dealt
        self.partition.check(self.federation.clients, facts.classes, dealt)
        if self.partition.overlaps and self.dataset.split == "pooled":
            raise SettingsError(
                "dataset.split: 'pooled' can't be used with a partition in which clients share samples, since one "
                "would train on what another tests on; it should be 'official'."
            )
        if self.partition.overlaps and self.dataset.validation_share:
            raise SettingsError(
                f"dataset.validation_share: {self.dataset.validation_share} can't be used with a partition in which "
                f"clients share samples, since one would train on what another validates on; it should be 0."
            )
        self.transforms.check(facts.shape)
        if self.model.frozen_base and self.transforms.random:
            key = next(name for name in ("crop", "flip", "rotation") if getattr(self.transforms, name))
            raise SettingsError(
                f"transforms.{key}: images can't change at random under the frozen base of the model, whose features "
                f"are computed once; leave it out, or set model.frozen to false."
            )
        self.model.check(facts.shape, facts.classes)
        has_tokens = self.dataset.has_tokens
        if not type(self.model).__module__.startswith("fedpipe."):  # packaged ones are steady, which the tests show
            from fedpipe.models._steady import refuse_unsteady

            refuse_unsteady(self.model, facts.shape, facts.classes, has_tokens)
        elif has_tokens is not None and has_tokens != hasattr(self.model, "vocabulary"):
            families = {name: registry.find(registry.MODEL, name) for name in registry.names(registry.MODEL)}
            right = [name for name, family in families.items() if hasattr(family, "vocabulary") == has_tokens]
            raise SettingsError(
                f"model.name: '{registry.name_of(registry.MODEL, type(self.model))}' can't take the "
                f"{'token ids' if has_tokens else 'numbers'} of the data set; it should be one of: {', '.join(right)}."
            )
        self.model.check_weights(facts.shape, facts.classes)
        words = getattr(self.model, "vocabulary", None)
        if words is not None and facts.vocabulary is not None and words < facts.vocabulary:
            raise SettingsError(
                f"model.vocabulary: {words} is less than the {facts.vocabulary} token ids of the data set; "
                f"it should be {facts.vocabulary}."
            )
        if any(protocol.startswith("finetuned") for protocol in self.evaluation.protocols):
            last = self.federation.rounds
            if self.federation.learning_rate and not self.federation.in_round(last + 1).learning_rate:
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


def several(algorithm: str) -> SettingsError:
    """What to say of an algorithm that begins with several models where a file gives but one."""
    return SettingsError(
        f"model.weights: a file holds one initial model, and {algorithm} begins with several; it should be null, or "
        f"study.algorithms do without {algorithm}."
    )


def download(path: Path) -> str:
    """The command that obtains a study's data, and declares the files that it names."""
    return DOWNLOAD if path == artifacts.PARAMS else f"{DOWNLOAD} --params {shlex.quote(str(path))}"


def unheard(settings: dict[str, Any]) -> dict[str, str]:
    """The partition's parameters that only other schemes have, by key, each with a warning.

    Where a grid, or `dvc exp run -S`, changes the scheme alone, those of the former one are left behind.
    """
    section = settings.get("partition")
    if not isinstance(section, dict):
        return {}
    scheme = section.get("scheme", registry.PARTITION.default)
    try:
        taken = _parameters(str(scheme))
    except SettingsError:  # told where it is built
        return {}
    others = {name for other in registry.names(registry.PARTITION) for name in _parameters(other)} - taken
    return {
        f"partition.{name}": f"partition.{name}: {value} is left out, since the scheme {scheme} has no such parameter."
        for name, value in section.items()
        if name in others - {"scheme"}
    }


def _parameters(scheme: str) -> set[str]:
    return {field.name for field in registry.parameters_of(registry.find(registry.PARTITION, scheme))}


def parse(
    settings: Any,
    download: str | None = DOWNLOAD,
    labels: Collection[str] | None = None,
    obtain: str | None = None,
) -> Params:
    """Settings as they stand in the YAML file, checked and with their defaults filled in.

    Parameters
    ----------
    settings
        All of them, in sections.
    download
        The command that declares files in the study's file; None where it can't, as at a point of a grid.
    labels
        The methods that these settings are for; by default those of the study that have none of their own (`with`).
    obtain
        The command that obtains the study's data; by default ``download``.

    Raises
    ------
    SettingsError
        One sentence for each mistake.
    """
    if not isinstance(settings, dict):
        raise SettingsError("params.yaml: it should be a mapping of sections, as `federation: {clients: 10}`.")
    if left_out := unheard(settings):
        kept = {name: value for name, value in settings["partition"].items() if f"partition.{name}" not in left_out}
        settings = settings | {"partition": kept}
    context = {"download": download, "labels": labels, "settings": settings, "obtain": obtain or download or DOWNLOAD}
    try:
        made = Params.model_validate(settings, context=context)
    except ValidationError as error:
        known = partial(_keys, settings=settings)
        raise SettingsError("\n".join(sentences(error, settings, "", known))) from None
    made._left_out = left_out
    return made


def dataset(settings: Any) -> Data:
    """The section `dataset` alone, checked; see :func:`parse`."""
    return cast(Data, _section_alone(Data, "dataset", settings))


def parse_federation(settings: Any) -> Federation:
    """The section `federation` alone, checked; see :func:`parse`."""
    return cast(Federation, _section_alone(Federation, "federation", settings))


def _section_alone(kind: type[Section], name: str, settings: Any) -> Section:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise SettingsError("\n".join(sentences(error, settings, name, lambda _: []))) from None


def _keys(location: Location, settings: Any) -> list[str]:
    section: Any = Params
    if location[:1] == ("probes",) and len(location) == 2:
        kind = _kind(settings["probes"][location[1]])
        section, location = dict(zip(KINDS, get_args(Probe), strict=True))[kind], ()
    for part in location:
        section = section.model_fields[str(part)].annotation
    return list(section.model_fields)


def read(path: Path) -> dict[str, Any]:
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


def override(settings: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``settings`` in which the value at each dotted key is replaced; the last changes are made last."""
    changed = copy.deepcopy(settings)
    for key, value in (change for part in changes for change in copy.deepcopy(part).items()):
        *sections, last = key.split(".")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise SettingsError(f"study.grid: '{key}' goes through '{section}', which is a value and no section.")
        place[last] = value
    return changed


def at_scale(settings: dict[str, Any], scale: str, download: str = DOWNLOAD) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings at one of a study's scales, and those of its keys that stand above grid and methods, too.

    ``download`` is the command that declares files in the study's file.

    Raises
    ------
    SettingsError
        The study has no such scale.
    """
    if scale == PAPER:
        return settings, {}
    scales = settings.get("scales")
    known = list(scales) if isinstance(scales, Mapping) else []
    if scale not in known:
        raise SettingsError(f"--scale: '{scale}' is no scale of this study; {nearest(scale, [*known, PAPER])}")
    parsed = parse(settings, download).scales[scale]
    return override(settings, parsed), {
        key: value for key, value in parsed.items() if key.partition(".")[0] not in FIXED
    }


def json_schema() -> dict[str, Any]:
    """JSON Schema of params.yaml, for editors; components are listed with their parameters."""
    schema = Params.model_json_schema(mode="validation")
    definitions = schema.setdefault("$defs", {})

    def options(kind: Kind) -> dict[str, Any]:
        choices, selector = [], kind.selector
        for name in registry.names(kind):
            component = registry.documented(kind, registry.find(kind, name))
            described = registry.adapter(cast(Hashable, component)).json_schema(ref_template="#/$defs/{model}")
            definitions.update(described.pop("$defs", {}))
            described["title"] = name
            described["description"] = registry.summary(component)
            described["properties"] = {selector: {"const": name}, **described.get("properties", {})}
            described["required"] = [*described.get("required", []), *([] if name == kind.default else [selector])]
            choices.append(described)
        own = {"title": "own", "type": "object", "properties": {selector: OWN}, "required": [selector]}
        return {"anyOf": [*choices, own | {"description": "A class of one's own, as my_module.MyClass."}]}

    properties = schema["properties"]
    properties["partition"] = options(registry.PARTITION)
    properties["model"] = options(registry.MODEL)
    of_methods = Method.model_json_schema(mode="validation")["properties"]
    properties["algorithms"] = {
        "type": "object",
        "properties": {
            choice["title"]: choice | {"required": [], "properties": choice["properties"] | of_methods}
            for choice in options(registry.ALGORITHM)["anyOf"]
            if choice["title"] != "own"
        },
        "additionalProperties": {"type": "object", "properties": of_methods},
    }
    own_keys = definitions.pop("Data")["properties"]
    properties["dataset"] = options(registry.DATASET)
    for choice in properties["dataset"]["anyOf"]:
        choice["properties"] = own_keys | choice["properties"]
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    return plain
