"""The section `dataset`: the samples, where they come from and how they are split."""

from __future__ import annotations

import os
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import (
    ConfigDict,
    Field,
    model_validator,
)

from fedpipe.core.components import registry
from fedpipe.core.components.component import DATASET
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.data import store
from fedpipe.data.datasets.base import Dataset, DatasetInfo, PublishedDataset
from fedpipe.data.sources.fetch import MIRROR_VARIABLE, Fetcher
from fedpipe.settings.base import Section

SPLIT_KEYS = (
    "split",
    "test_fraction",
    "stratified",
    "validation_fraction",
)  #: keys of `parse_dataset` that say how to split it
GENERATED_DATASET = "generated"  #: the data set that stands in for one that is not at hand
DOWNLOAD_COMMAND = "fedpipe download"  #: what obtains a study's data


class Data(Section):
    """The samples; keys that do not stand here are parameters of the data set."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("digits", description="A data set; `fedpipe list datasets` shows them.")
    mirror: str | None = Field(
        None,
        description="A folder or base address (http, https, file) from which files are taken first; "
        "where none is given, the environment variable FEDPIPE_MIRROR names it.",
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
        description="official: the data set's own test set, dealt to clients in their own class proportions; "
        "pooled: training and test samples together, then split within each client. Neither, where the partition is a "
        "file that says what each sample is for.",
    )
    test_fraction: float = Field(
        0.25, gt=0, lt=1, description="Share of each client's samples kept for testing (pooled)."
    )
    stratified: bool = Field(
        False, description="Whether what a client keeps for testing (pooled) and validation has its class proportions."
    )
    validation_fraction: float = Field(
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
        return cast(Dataset, registry.parse_component(DATASET, settings, other_keys=[*type(self).model_fields]))

    @cached_property
    def effective_dataset(self) -> Dataset:
        """The data set that is taken: the one that is named, or what is generated in its place (`on_missing`)."""
        if self.on_missing == "fetch" or self.is_available_offline:
            return self.named_dataset
        return cast(Dataset, registry.parse_component(DATASET, {"name": GENERATED_DATASET, "like": self.name}))

    @property
    def is_available_offline(self) -> bool:
        """Whether the data set that is named can be obtained without a network."""
        named_dataset, fetcher = self.named_dataset, self.fetcher
        if not isinstance(named_dataset, PublishedDataset) or named_dataset.sha256:
            return True
        stored_file = store.locate_dataset(registry.component_to_run_settings(DATASET, named_dataset))
        return stored_file.is_file() or all(
            (fetcher.is_local and fetcher.has_file(file.name)) or (fetcher.cache / file.name).is_file()
            for file in named_dataset.files
        )

    @cached_property
    def run_settings(self) -> dict[str, Any]:
        """What keys hold of it."""
        return registry.component_to_run_settings(DATASET, self.effective_dataset)

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


def format_download_command(path: Path) -> str:
    """The command that obtains a study's data, and declares the files that it names."""
    return DOWNLOAD_COMMAND if path == layout.PARAMS else f"{DOWNLOAD_COMMAND} --params {shlex.quote(str(path))}"
