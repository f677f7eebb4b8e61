"""Base classes of data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from fedpipe.core.components import component, pinned_files, registry
from fedpipe.core.components.component import Component
from fedpipe.core.components.pinned_files import PinnedFile, Sha256
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.data.samples import Samples as Samples  # re-exported for files that define a data set
from fedpipe.data.sources import formats, text
from fedpipe.data.sources.fetch import Fetcher, PublishedFile

if TYPE_CHECKING:
    import pyarrow as pa

Vocabulary = Annotated[int, Field(ge=5)]
Length = Annotated[int, Field(ge=1)]
ImageSize = Annotated[int, Field(ge=1)]
Tokens = Literal["words", "characters"]


class DatasetInfo(NamedTuple):
    """Facts of a data set that partition schemes and models need before any job starts."""

    shape: tuple[int, ...]  #: shape of one input, channels first
    classes: int  #: number of classes C
    size: int  #: number of samples n
    tests: int  #: how many of them are the official test set
    vocabulary: int | None = None  #: number of token ids, if the inputs are text


@dataclass(frozen=True, kw_only=True)
class Dataset(Component):
    """A named collection of labeled samples with its official training and test split."""

    shape: ClassVar[tuple[int, ...]]  #: shape of one input, channels first
    classes: ClassVar[int]  #: number of classes C
    size: ClassVar[int]  #: number of samples n
    tests: ClassVar[int]  #: how many of them are the official test set
    checksum: ClassVar[str] = ""  #: of the canonical samples (`fedpipe.data.store.compute_samples_sha256`), if known

    @property
    def expected_checksum(self) -> str:
        """Checksum of the samples after loading. Empty if it is unknown before."""
        return self.checksum

    @property
    def content_digest(self) -> str:
        """Digest of these samples, which enters every run's key as ``sha256``. Empty if it is not known yet."""
        return self.expected_checksum

    @property
    def info(self) -> DatasetInfo | None:
        """Shape, classes and size. None if they are known only once the samples are stored."""
        return DatasetInfo(self.shape, self.classes, self.size, self.tests)

    @override
    def get_hashed_parameters(self) -> dict[str, Any]:
        """Parameters and content digest. The tensors depend only on these and on the code that reads the data set.

        Raises
        ------
        SettingsError
            The content digest is not known yet.
        """
        if not self.content_digest:
            name = registry.get_component_name(component.DATASET, type(self))
            raise SettingsError(
                f"dataset.name: '{name}' has no checksum. Set {type(self).__qualname__}.checksum to the one "
                f"that `fedpipe download {name}` prints."
            )
        parameters = {
            key: value for key, value in super().get_hashed_parameters().items() if key not in {"path", "sha256"}
        }
        return {**parameters, "sha256": self.content_digest}

    def infer_info(self, samples: Samples) -> DatasetInfo:
        """Facts of the loaded samples, which may lack a class or a word."""
        return DatasetInfo(self.shape, self.classes, len(samples.y), int(samples.test.sum()))

    def load(self, fetch: Fetcher) -> Samples:
        """Load the samples from the package, a mirror or the network."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PinnedDataset(Dataset):
    """Samples in a file whose SHA-256 is in params.yaml."""

    sha256: Sha256 | None = None

    @property
    @override
    def info(self) -> DatasetInfo | None:
        return None

    @property
    @override
    def content_digest(self) -> str:
        return self.sha256 or ""

    @override
    def infer_info(self, samples: Samples) -> DatasetInfo:
        """Facts of samples that no class declares. Signed integers with one axis are token ids."""
        has_tokens = samples.x.ndim == 2 and np.issubdtype(samples.x.dtype, np.signedinteger)
        vocabulary = int(samples.x.max()) + 1 if has_tokens else None
        tests = int(samples.test.sum())
        return DatasetInfo(samples.x.shape[1:], int(samples.y.max()) + 1, len(samples.y), tests, vocabulary)

    def compute_unpinned_sha256(self, fetch: Fetcher) -> str | None:
        """SHA-256 that is still missing in params.yaml. None if none is missing.

        Raises
        ------
        ArtifactError
            The file does not exist.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PublishedDataset(PinnedDataset):
    """A published data set. A mirror may have ``<name>.npz`` or ``<name>.parquet`` instead of the published files."""

    files: ClassVar[tuple[PublishedFile, ...]]  #: published files with their checksums
    suffix: ClassVar[str]  #: suffix of the mirror's substitute file

    @property
    @override
    def expected_checksum(self) -> str:
        return "" if self.sha256 else self.checksum

    @property
    @override
    def content_digest(self) -> str:
        """Checksum of the canonical samples if it is known, otherwise a hash of the published files' checksums."""
        lines = "".join(f"{file.name} {file.checksum}\n" for file in self.files)
        return self.sha256 or self.checksum or hashlib.sha256(lines.encode()).hexdigest()

    @property
    @override
    def info(self) -> DatasetInfo | None:
        return None if self.sha256 else self._published_info

    @property
    def _published_info(self) -> DatasetInfo:
        return DatasetInfo(self.shape, self.classes, self.size, self.tests)

    @override
    def infer_info(self, samples: Samples) -> DatasetInfo:
        return self._published_info._replace(size=len(samples.y), tests=int(samples.test.sum()))

    @override
    def compute_unpinned_sha256(self, fetch: Fetcher) -> str | None:
        """SHA-256 of the substitute, if the mirror has it and lacks the published files."""
        if self.sha256 or all(fetch.has_file(file.name) for file in self.files):
            return None
        path = fetch.fetch_unpinned(self.substitute_name)
        return None if path is None else compute_file_sha256(path)

    @property
    def substitute_name(self) -> str:
        """File name of the mirror's substitute."""
        return f"{registry.get_component_name(component.DATASET, type(self))}{self.suffix}"

    @override
    def load(self, fetch: Fetcher) -> Samples:
        if self.sha256:
            return self._read_substitute(fetch.fetch_mirror_file(self.substitute_name, self.sha256))
        return self._read(fetch.fetch(self.files))

    def _read(self, files: Sequence[Path]) -> Samples:
        """Read the samples from the published files."""
        raise NotImplementedError

    def _read_substitute(self, path: Path) -> Samples:
        """Read the samples from the mirror's substitute file."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PublishedImages(PublishedDataset):
    """Published images. The substitute is an ``.npz`` file (`fedpipe.data.sources.formats.read_npz`)."""

    suffix: ClassVar[str] = ".npz"

    @override
    def _read_substitute(self, path: Path) -> Samples:
        return formats.read_npz(path)


@dataclass(frozen=True, kw_only=True)
class PublishedTexts(PublishedDataset):
    """Published texts. The substitute is a Parquet file (`fedpipe.data.sources.formats.convert_table_to_samples`)."""

    suffix: ClassVar[str] = ".parquet"
    vocabulary: Vocabulary
    length: Length

    @property
    @override
    def _published_info(self) -> DatasetInfo:
        return DatasetInfo((self.length,), self.classes, self.size, self.tests, self.vocabulary)

    @override
    def _read_substitute(self, path: Path) -> Samples:
        samples = formats.convert_table_to_samples(formats.load_table(path), str(path))
        if samples.x.dtype != object:
            raise ArtifactError(f"{path} contains images. Use a table with a column text.")
        return self._encode_texts(samples.x.tolist(), samples.y, samples.test)

    def _encode_texts(
        self, texts: Sequence[str], labels: npt.NDArray[np.int64], test: npt.NDArray[np.bool_]
    ) -> Samples:
        """Convert the texts to token ids."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UserDataset(PinnedDataset):
    """A user's samples in a file or folder. Shape, classes and size are known once they are stored."""

    path: str

    @property
    @override
    def pinned_file(self) -> PinnedFile:
        return PinnedFile("path", Path(self.path), self.sha256)

    @override
    def compute_unpinned_sha256(self, fetch: Fetcher) -> str | None:
        return None if self.sha256 else self._compute_sha256()

    @override
    def load(self, fetch: Fetcher) -> Samples:
        if (actual_sha256 := self._compute_sha256()) != self.sha256:
            raise ArtifactError(
                f"dataset.sha256: {self.sha256} is declared, but {self.path} has SHA-256 {actual_sha256}. Restore the "
                "declared file, or set dataset.sha256 to the new value."
            )
        return self._read(Path(self.path))

    def _compute_sha256(self) -> str:
        path = Path(self.path)
        if not path.is_file():
            raise ArtifactError(f"dataset.path: {self.path} is missing. Use an existing file.")
        return pinned_files.compute_content_sha256(path)

    def _read(self, path: Path) -> Samples:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TableDataset(PinnedDataset):
    """Samples in a table: one row per sample, with columns of inputs and labels."""

    input: str | tuple[str, ...] | None = None
    label: str = "label"
    tokens: Tokens = "words"
    vocabulary: Vocabulary = 10_000
    length: Length = 200
    image_size: ImageSize | None = None

    @override
    def infer_info(self, samples: Samples) -> DatasetInfo:
        info = super().infer_info(samples)
        return info if info.vocabulary is None else info._replace(vocabulary=self.vocabulary)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the inputs. Empty for the default, text or image."""
        return (self.input,) if isinstance(self.input, str) else self.input or ()

    def make_samples(self, table: pa.Table, source: str) -> Samples:
        """Convert texts to token ids. Images and numbers stay as they are. ``source`` names the table in errors."""
        samples = formats.convert_table_to_samples(table, source, self.input_columns, self.label, self.image_size)
        if samples.x.dtype != object:
            return samples
        analyze = text.make_word_analyzer() if self.tokens == "words" else list
        x = text.encode_texts(samples.x.tolist(), samples.test, analyze, self.vocabulary, self.length)
        return samples._replace(x=x)
