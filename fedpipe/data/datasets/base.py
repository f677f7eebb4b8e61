"""What a data set is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedpipe.core.components import component, pinned_files, registry
from fedpipe.core.components.component import Component
from fedpipe.core.components.pinned_files import PinnedFile, Sha256
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage.files import sha256_of
from fedpipe.data.samples import Samples as Samples  # those who write a data set find it here
from fedpipe.data.sources import formats
from fedpipe.data.sources.fetch import Fetcher, PublishedFile

Vocabulary = Annotated[int, Field(ge=5)]
Length = Annotated[int, Field(ge=1)]


class DatasetInfo(NamedTuple):
    """What partition schemes and models have to know before any job starts."""

    shape: tuple[int, ...]  #: shape of one input, channels first
    classes: int  #: number of classes C
    size: int  #: number of samples n
    tests: int  #: how many of them are the official test set
    vocabulary: int | None = None  #: number of token ids, where the inputs are text


@dataclass(frozen=True, kw_only=True)
class Dataset(Component):
    """A named collection of labeled samples, with the official split that belongs to it."""

    shape: ClassVar[tuple[int, ...]]  #: shape of one input, channels first
    classes: ClassVar[int]  #: number of classes C
    size: ClassVar[int]  #: number of samples n
    tests: ClassVar[int]  #: how many of them are the official test set
    checksum: ClassVar[str] = (
        ""  #: of the canonical samples (`fedpipe.data.store.compute_samples_sha256`), where that is known
    )

    @property
    def expected_checksum(self) -> str:
        """The checksum that the loaded samples should have; empty if it is not known before."""
        return self.checksum

    @property
    def content_digest(self) -> str:
        """What stands for these samples in every run's key, as ``sha256``; empty if it is not known yet."""
        return self.expected_checksum

    @property
    def info(self) -> DatasetInfo | None:
        """Shape, classes and size; None if only the stored samples tell."""
        return DatasetInfo(self.shape, self.classes, self.size, self.tests)

    def key_parameters(self) -> dict[str, Any]:
        """Its parameters and its identity, which are all that its tensors depend on beside the code that reads it.

        Raises
        ------
        SettingsError
            Its identity is not known yet.
        """
        if not self.content_digest:
            name = registry.get_component_name(component.DATASET, type(self))
            raise SettingsError(
                f"dataset.name: '{name}' has no checksum; set {type(self).__qualname__}.checksum to the one "
                f"that `fedpipe download {name}` prints."
            )
        parameters = {key: value for key, value in super().key_parameters().items() if key not in {"path", "sha256"}}
        return {**parameters, "sha256": self.content_digest}

    def infer_info(self, samples: Samples) -> DatasetInfo:
        """The facts of loaded samples, in which a class or a word may be missing."""
        return DatasetInfo(self.shape, self.classes, len(samples.y), int(samples.test.sum()))

    def load(self, fetch: Fetcher) -> Samples:
        """Obtain the samples, from the package, a mirror or the network."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PinnedDataset(Dataset):
    """Samples in a file that params.yaml declares, by its SHA-256."""

    sha256: Sha256 | None = None

    @property
    def info(self) -> DatasetInfo | None:
        """See :class:`Dataset`."""
        return None

    @property
    def content_digest(self) -> str:
        """See :class:`Dataset`."""
        return self.sha256 or ""

    def find_missing_sha256(self, fetch: Fetcher) -> str | None:
        """The SHA-256 of the file that params.yaml should declare, and does not yet; None if it need not.

        Raises
        ------
        ArtifactError
            There is no such file.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PublishedDataset(PinnedDataset):
    """A data set that somebody publishes; a mirror's ``<name>.npz`` or ``<name>.parquet`` may stand in for it."""

    files: ClassVar[tuple[PublishedFile, ...]]  #: as published, with their checksums
    suffix: ClassVar[str]  #: of the file that may stand in

    @property
    def expected_checksum(self) -> str:
        """See :class:`Dataset`."""
        return "" if self.sha256 else self.checksum

    @property
    def content_digest(self) -> str:
        """The canonical samples' checksum where it is known, else a hash of the published files' checksums."""
        lines = "".join(f"{file.name} {file.checksum}\n" for file in self.files)
        return self.sha256 or self.checksum or hashlib.sha256(lines.encode()).hexdigest()

    @property
    def info(self) -> DatasetInfo | None:
        """See :class:`Dataset`."""
        return None if self.sha256 else self._make_info(self.size, self.tests)

    def infer_info(self, samples: Samples) -> DatasetInfo:
        """See :class:`Dataset`."""
        return self._make_info(len(samples.y), int(samples.test.sum()))

    def find_missing_sha256(self, fetch: Fetcher) -> str | None:
        """See :class:`PinnedDataset`: the published files come first."""
        if self.sha256 or all(fetch.has_file(file.name) for file in self.files):
            return None
        path = fetch.fetch_unpinned(self.substitute_name)
        return None if path is None else sha256_of(path)

    @property
    def substitute_name(self) -> str:
        """The name of the mirror's file that may stand in."""
        return f"{registry.get_component_name(component.DATASET, type(self))}{self.suffix}"

    def load(self, fetch: Fetcher) -> Samples:
        """See :class:`Dataset`."""
        if self.sha256:
            return self._read_substitute(fetch.fetch_pinned(self.substitute_name, self.sha256))
        return self._read(fetch.fetch(self.files))

    def _make_info(self, size: int, tests: int) -> DatasetInfo:
        return DatasetInfo(self.shape, self.classes, size, tests)

    def _read(self, files: Sequence[Path]) -> Samples:
        """The samples in the published files."""
        raise NotImplementedError

    def _read_substitute(self, path: Path) -> Samples:
        """The samples in the file that stands in."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PublishedImages(PublishedDataset):
    """Published images; an ``.npz`` may stand in (`fedpipe.data.sources.formats.read_npz`)."""

    suffix: ClassVar[str] = ".npz"

    def _read_substitute(self, path: Path) -> Samples:
        return formats.read_npz(path)


@dataclass(frozen=True, kw_only=True)
class PublishedTexts(PublishedDataset):
    """Published texts; a Parquet file may stand in (`fedpipe.data.sources.formats.read_parquet`)."""

    suffix: ClassVar[str] = ".parquet"
    vocabulary: Vocabulary
    length: Length

    def _make_info(self, size: int, tests: int) -> DatasetInfo:
        return DatasetInfo((self.length,), self.classes, size, tests, self.vocabulary)

    def _read_substitute(self, path: Path) -> Samples:
        table = formats.read_parquet(path)
        if table.texts is None:
            raise ArtifactError(f"{path} holds images; it should hold text.")
        return self._encode_texts(table.texts, table.labels, table.test)

    def _encode_texts(
        self, texts: Sequence[str], labels: npt.NDArray[np.int64], test: npt.NDArray[np.bool_]
    ) -> Samples:
        """The texts as token ids."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UserDataset(PinnedDataset):
    """The user's own samples, in a file or folder; its shape, classes and size are known once it is stored."""

    path: str

    @property
    def pinned_file(self) -> PinnedFile:
        """See :class:`~fedpipe.core.components.component.Component`."""
        return PinnedFile("path", Path(self.path), self.sha256)

    def find_missing_sha256(self, fetch: Fetcher) -> str | None:
        """See :class:`PinnedDataset`."""
        return None if self.sha256 else self._compute_sha256()

    def load(self, fetch: Fetcher) -> Samples:
        """See :class:`Dataset`."""
        if (actual_sha256 := self._compute_sha256()) != self.sha256:
            raise ArtifactError(
                f"dataset.sha256: {self.path} is another file than declared, with SHA-256 {actual_sha256}; the "
                "declared one, "
                f"{self.sha256}, should lie there, or the study declare that."
            )
        return self._read(Path(self.path))

    def infer_info(self, samples: Samples) -> DatasetInfo:
        """See :class:`Dataset`."""
        has_tokens = samples.x.ndim == 2 and np.issubdtype(samples.x.dtype, np.signedinteger)
        vocabulary = int(samples.x.max()) + 1 if has_tokens else None
        tests = int(samples.test.sum())
        return DatasetInfo(samples.x.shape[1:], int(samples.y.max()) + 1, len(samples.y), tests, vocabulary)

    def _compute_sha256(self) -> str:
        path = Path(self.path)
        if not path.is_file():
            raise ArtifactError(f"dataset.path: {self.path} is missing; it should be a file.")
        return pinned_files.compute_content_sha256(path)

    def _read(self, path: Path) -> Samples:
        raise NotImplementedError
