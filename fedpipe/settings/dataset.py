"""The section `dataset`: the samples, their origin and their split."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedpipe.core.components import registry
from fedpipe.core.components.component import DATASET
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files, layout
from fedpipe.data import class_names, store
from fedpipe.data.datasets.base import Dataset, DatasetInfo, PinnedDataset, PublishedDataset
from fedpipe.data.datasets.huggingface import HuggingFace
from fedpipe.data.datasets.parquet import Parquet
from fedpipe.data.samples import Column
from fedpipe.data.sources import formats
from fedpipe.data.sources.fetch import MIRROR_VARIABLE, Fetcher
from fedpipe.settings.base import Section, make_field_omitted_at_default

SPLIT_KEYS = ("split", "test_fraction", "stratified", "validation_fraction")  #: keys about the split
TEXT_KEYS = ("tokens", "vocabulary", "length")  #: parameters of tables that only texts use
NOISE_KEYS = ("feature_noise", "label_noise", "label_noise_kind")  #: keys about noise in the clients' samples
GENERATED_DATASET = "generated"  #: synthetic data set that replaces a missing one
DOWNLOAD_COMMAND = "fedpipe download"  #: command that obtains a study's data


LabelNoiseKind = Literal["symmetric", "pairwise"]
Rate = Annotated[float, Field(ge=0, le=1)]


class Data(Section):
    """The samples. All other keys are parameters of the data set."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("digits", description="Name of the data set. `fedpipe list datasets` prints all.")
    mirror: str | None = Field(
        None,
        description="Folder or base address (http, https, file) to search for files first. By default the environment "
        "variable FEDPIPE_MIRROR.",
    )
    on_missing: Literal["fetch", "generate"] = Field(
        "fetch",
        description="If a published data set is missing, `fetch` downloads it. For a smoke test, `generate` replaces "
        "it by synthetic samples of its shape, with other keys.",
    )
    subset: int | None = Field(
        None,
        ge=1,
        description="Number of samples for a smoke test, drawn once with the same fractions of classes and tests.",
    )
    split: Literal["official", "pooled"] = Field(
        "official",
        description="official: the data set's test set, distributed to clients in their class proportions. "
        "pooled: training and test samples are partitioned together and then split within each client. A partition "
        "file with a column split needs neither.",
    )
    test_fraction: float = Field(
        0.25, gt=0, lt=1, description="Fraction of each client's samples for testing (pooled), rounded down."
    )
    stratified: bool = Field(
        False, description="If true, a client's test (pooled) and validation samples have its class proportions."
    )
    validation_fraction: float = Field(
        0.0, ge=0, lt=1, description="Fraction of each client's training samples for validation."
    )

    feature_noise: float = make_field_omitted_at_default(
        0.0,
        ge=0,
        description="Variance of the Gaussian noise in the inputs of client N, also of its test samples. "
        "Client i of N has i / N of this variance (NIID-Bench). The global test set has no noise.",
    )
    label_noise: Rate | tuple[Rate, ...] = make_field_omitted_at_default(
        0.0,
        description="Probability with which a training or validation sample has a wrong class: one for all clients, or "
        "a list of one per client. Test samples have their true classes.",
    )
    label_noise_kind: LabelNoiseKind = make_field_omitted_at_default(
        "symmetric", description="symmetric: any other class, with equal probabilities. pairwise: the next class."
    )

    @field_validator("label_noise")
    @classmethod
    def _merge_equal_rates(cls, rates: float | tuple[float, ...]) -> float | tuple[float, ...]:
        """Merge equal rates, so that both spellings have the same key."""
        return rates[0] if isinstance(rates, tuple) and len(set(rates)) == 1 else rates

    @model_validator(mode="after")
    def _check_effective_dataset(self) -> Data:
        if f".{self.name.lower()}" in formats.CSV_SEPARATORS:
            path = Path(str(self.parameters.get("path", f"FILE.{self.name}")))
            raise SettingsError(
                f"dataset.name: '{self.name}' can't be used. Use parquet. {formats.format_csv_advice(path)}"
            )
        assert self.effective_dataset
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the data set."""
        return dict(self.model_extra or {})

    @cached_property
    def configured_dataset(self) -> Dataset:
        """The data set in params.yaml, with its parameters."""
        settings = {"name": self.name, **self.parameters}
        return cast(Dataset, registry.parse_component(DATASET, settings, other_keys=[*type(self).model_fields]))

    @cached_property
    def effective_dataset(self) -> Dataset:
        """The data set in params.yaml, or the synthetic one that replaces it (`on_missing`)."""
        if self.on_missing == "fetch" or self.is_available_offline:
            return self.configured_dataset
        return cast(Dataset, registry.parse_component(DATASET, {"name": GENERATED_DATASET, "like": self.name}))

    @property
    def is_available_offline(self) -> bool:
        """Whether the data set can be obtained without a network."""
        configured_dataset, fetcher = self.configured_dataset, self.fetcher
        if not isinstance(configured_dataset, PublishedDataset) or configured_dataset.sha256:
            return True
        stored_file = store.get_stored_dataset_path(registry.get_component_key_settings(DATASET, configured_dataset))
        return stored_file.is_file() or all(
            (fetcher.is_mirror_local and fetcher.has_file(file.name)) or (fetcher.cache / file.name).is_file()
            for file in configured_dataset.files
        )

    @cached_property
    def key_settings(self) -> dict[str, Any]:
        """Settings that enter keys."""
        return registry.get_component_key_settings(DATASET, self.effective_dataset)

    @cached_property
    def fetcher(self) -> Fetcher:
        """Source of its files."""
        return Fetcher(mirror=self.mirror or os.environ.get(MIRROR_VARIABLE))

    @property
    def origin(self) -> dict[str, Any]:
        """Everything that is needed to obtain it."""
        if self.effective_dataset is not self.configured_dataset:
            return {"name": GENERATED_DATASET, "like": self.name}
        return {"name": self.name, **self.parameters, **({"mirror": self.mirror} if self.mirror else {})}

    @property
    def dataset_path(self) -> Path:
        """File with its tensors."""
        return store.get_stored_dataset_path(self.key_settings)

    @property
    def noise_setting_name(self) -> str | None:
        """Name of the setting that adds noise: ``feature_noise`` or ``label_noise``. None without noise."""
        return "feature_noise" if self.feature_noise else "label_noise" if self.label_noise else None

    @property
    def num_partitioned_samples(self) -> int:
        """Number of samples that the scheme partitions. An official split needs a test set."""
        size, tests = self.dataset_info.size, self.dataset_info.tests
        if self.split == "official" and not tests:
            raise SettingsError("dataset.split: 'official' needs a test set, but the data set has none. Use 'pooled'.")
        if self.split == "official":
            return (self.subset or size) * (size - tests) // size
        return self.subset or size

    @property
    def dataset_info(self) -> DatasetInfo:
        """Shape, classes and size. An ArtifactError if they are in a file that is not stored yet."""
        declared_info = self.effective_dataset.info
        return store.read_dataset_info(self.dataset_path) if declared_info is None else declared_info

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names or numbers of its classes."""
        component_name = registry.get_component_name(DATASET, type(self.effective_dataset))
        own_names = store.read_class_names(self.dataset_path)
        return class_names.select_class_names(component_name, self.dataset_info.classes, own_names)

    @property
    def repository(self) -> str:
        """Repository of the samples and its revision, such as ``flwrlabs/femnist at 0123456789ab``. Empty without one.

        A commit has its first twelve digits.
        """
        if not isinstance(self.effective_dataset, HuggingFace):
            return ""
        path, revision = self.effective_dataset.path, self.effective_dataset.revision or ""
        commit = revision[:12] if re.fullmatch("[0-9a-f]{40}", revision) else revision
        return f"{path} at {commit}" if commit else path

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """Its keys that have no effect, because the inputs are not texts."""
        has_texts = self.dataset_info.vocabulary is not None
        return () if has_texts else tuple(key for key in TEXT_KEYS if key in self.key_settings)

    @property
    def extra_columns(self) -> Mapping[str, Column]:
        """Columns of its samples besides inputs and labels, by name. The data set must be stored."""
        if not self.dataset_path.is_file():
            raise SettingsError(
                f"dataset.name: '{self.name}' is not stored yet, but the partition reads one of its columns. Run "
                f"`{DOWNLOAD_COMMAND}`."
            )
        return store.load_samples(self.dataset_path).columns

    @property
    def omitted_columns(self) -> dict[str, str]:
        """Reasons why arrays or columns of the user's file are not among :attr:`extra_columns`, by name."""
        return store.read_omitted_columns(self.dataset_path)

    @property
    def has_tokens(self) -> bool | None:
        """Whether inputs are token ids. None if a user's data set may have either."""
        if self.dataset_info.vocabulary is not None:
            return True
        return False if type(self.effective_dataset).__module__.startswith("fedpipe.") else None

    def explain_missing_data(self, download_command: str) -> str | None:
        """Message with the command to type if its facts are not known yet. None if they are."""
        source, fetcher = self.effective_dataset, self.fetcher
        if source.info is None and isinstance(source, PinnedDataset) and not source.sha256:
            subject = self.parameters.get("path", self.name)
            return f"dataset.sha256: missing for {subject}. Run `{download_command}`, which fills it in."
        if source.info is None:
            try:
                store.read_dataset_info(self.dataset_path)
            except ArtifactError:
                if problem := self._explain_missing_column():
                    return problem
                sha256 = getattr(source, "sha256", None)
                return f"dataset.sha256: the file with SHA-256 {sha256} is not stored. Run `{download_command}`."
        if (
            isinstance(source, PublishedDataset)
            and not (source.sha256 or self.dataset_path.is_file())
            and fetcher.is_mirror_local
            and fetcher.has_file(source.substitute_name)
            and not all(fetcher.has_file(file.name) for file in source.files)
        ):
            return (
                f"dataset.sha256: missing for {source.substitute_name}, which the mirror has instead of the original "
                f"files of '{self.name}'. Run `{download_command}`, which fills it in."
            )
        return None

    def _explain_missing_column(self) -> str | None:
        """Message about a column that the user's Parquet file lacks. None if it has all, or can't be read."""
        source = self.effective_dataset
        if isinstance(source, Parquet) and (names := files.read_column_names(Path(source.path))):
            for key, columns in (("input", source.input_columns), ("label", (source.label,))):
                if problem := formats.explain_missing_column(source.path, names, columns):
                    return f"dataset.{key}: {problem}"
        return None


def format_download_command(path: Path) -> str:
    """Format the command that obtains a study's data and declares its files."""
    return DOWNLOAD_COMMAND if path == layout.PARAMS else f"{DOWNLOAD_COMMAND} --params {shlex.quote(str(path))}"
