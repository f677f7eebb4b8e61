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

from fedpipe import artifacts, pins, registry
from fedpipe.data import formats
from fedpipe.data.fetch import Fetcher, File
from fedpipe.data.samples import Samples as Samples  # those who write a data set find it here
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.pins import Pin, Sha256
from fedpipe.registry import Component

Vocabulary = Annotated[int, Field(ge=5)]
Length = Annotated[int, Field(ge=1)]


class Facts(NamedTuple):
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
    checksum: ClassVar[str] = ""  #: of the canonical samples (`fedpipe.data.store.checksum`), where that is known

    @property
    def expected(self) -> str:
        """The checksum that the loaded samples should have; empty if it is not known before."""
        return self.checksum

    @property
    def identity(self) -> str:
        """What stands for these samples in every run's key, as ``sha256``; empty if it is not known yet."""
        return self.expected

    @property
    def facts(self) -> Facts | None:
        """Shape, classes and size; None if only the stored samples tell."""
        return Facts(self.shape, self.classes, self.size, self.tests)

    def keyed(self) -> dict[str, Any]:
        """Its parameters and its identity, which are all that its tensors depend on beside the code that reads it.

        Raises
        ------
        SettingsError
            Its identity is not known yet.
        """
        if not self.identity:
            name = registry.name_of(registry.DATASET, type(self))
            raise SettingsError(
                f"dataset.name: '{name}' has no checksum; set {type(self).__qualname__}.checksum to the one "
                f"that `fedpipe download {name}` prints."
            )
        parameters = {key: value for key, value in super().keyed().items() if key not in {"path", "sha256"}}
        return {**parameters, "sha256": self.identity}

    def measure(self, samples: Samples) -> Facts:
        """The facts of loaded samples, in which a class or a word may be missing."""
        return Facts(self.shape, self.classes, len(samples.y), int(samples.test.sum()))

    def load(self, fetch: Fetcher) -> Samples:
        """Obtain the samples, from the package, a mirror or the network."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Declared(Dataset):
    """Samples in a file that params.yaml declares, by its SHA-256."""

    sha256: Sha256 | None = None

    @property
    def facts(self) -> Facts | None:
        """See :class:`Dataset`."""
        return None

    @property
    def identity(self) -> str:
        """See :class:`Dataset`."""
        return self.sha256 or ""

    def undeclared(self, fetch: Fetcher) -> str | None:
        """The SHA-256 of the file that params.yaml should declare, and does not yet; None if it need not.

        Raises
        ------
        ArtifactError
            There is no such file.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Published(Declared):
    """A data set that somebody publishes; a mirror's ``<name>.npz`` or ``<name>.parquet`` may stand in for it."""

    files: ClassVar[tuple[File, ...]]  #: as published, with their checksums
    suffix: ClassVar[str]  #: of the file that may stand in

    @property
    def expected(self) -> str:
        """See :class:`Dataset`."""
        return "" if self.sha256 else self.checksum

    @property
    def identity(self) -> str:
        """The canonical samples' checksum where it is known, else a hash of the published files' checksums."""
        lines = "".join(f"{file.name} {file.checksum}\n" for file in self.files)
        return self.sha256 or self.checksum or hashlib.sha256(lines.encode()).hexdigest()

    @property
    def facts(self) -> Facts | None:
        """See :class:`Dataset`."""
        return None if self.sha256 else self._facts(self.size, self.tests)

    def measure(self, samples: Samples) -> Facts:
        """See :class:`Dataset`."""
        return self._facts(len(samples.y), int(samples.test.sum()))

    def undeclared(self, fetch: Fetcher) -> str | None:
        """See :class:`Declared`: the published files come first."""
        if self.sha256 or all(fetch.holds(file.name) for file in self.files):
            return None
        found = fetch.undeclared(self.stand_in)
        return None if found is None else artifacts.sha256_of(found)

    @property
    def stand_in(self) -> str:
        """The name of the mirror's file that may stand in."""
        return f"{registry.name_of(registry.DATASET, type(self))}{self.suffix}"

    def load(self, fetch: Fetcher) -> Samples:
        """See :class:`Dataset`."""
        if self.sha256:
            return self._read_declared(fetch.declared(self.stand_in, self.sha256))
        return self._read(fetch.fetch(self.files))

    def _facts(self, size: int, tests: int) -> Facts:
        return Facts(self.shape, self.classes, size, tests)

    def _read(self, files: Sequence[Path]) -> Samples:
        """The samples in the published files."""
        raise NotImplementedError

    def _read_declared(self, path: Path) -> Samples:
        """The samples in the file that stands in."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Images(Published):
    """Published images; an ``.npz`` may stand in (`fedpipe.data.formats.read_npz`)."""

    suffix: ClassVar[str] = ".npz"

    def _read_declared(self, path: Path) -> Samples:
        return formats.read_npz(path)


@dataclass(frozen=True, kw_only=True)
class Texts(Published):
    """Published texts; a Parquet file may stand in (`fedpipe.data.formats.read_parquet`)."""

    suffix: ClassVar[str] = ".parquet"
    vocabulary: Vocabulary
    length: Length

    def _facts(self, size: int, tests: int) -> Facts:
        return Facts((self.length,), self.classes, size, tests, self.vocabulary)

    def _read_declared(self, path: Path) -> Samples:
        table = formats.read_parquet(path)
        if table.texts is None:
            raise ArtifactError(f"{path} holds images; it should hold text.")
        return self._encoded(table.texts, table.labels, table.test)

    def _encoded(self, texts: Sequence[str], labels: npt.NDArray[np.int64], test: npt.NDArray[np.bool_]) -> Samples:
        """The texts as token ids."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Own(Declared):
    """The user's own samples, in a file or folder; its shape, classes and size are known once it is stored."""

    path: str

    @property
    def pin(self) -> Pin:
        """See :class:`~fedpipe.registry.Component`."""
        return Pin("path", Path(self.path), self.sha256)

    def undeclared(self, fetch: Fetcher) -> str | None:
        """See :class:`Declared`."""
        return None if self.sha256 else self._hash()

    def load(self, fetch: Fetcher) -> Samples:
        """See :class:`Dataset`."""
        if (found := self._hash()) != self.sha256:
            raise ArtifactError(
                f"dataset.sha256: {self.path} is another file than declared, with SHA-256 {found}; the declared one, "
                f"{self.sha256}, should lie there, or the study declare that."
            )
        return self._read(Path(self.path))

    def measure(self, samples: Samples) -> Facts:
        """See :class:`Dataset`."""
        tokens = samples.x.ndim == 2 and np.issubdtype(samples.x.dtype, np.signedinteger)
        vocabulary = int(samples.x.max()) + 1 if tokens else None
        tests = int(samples.test.sum())
        return Facts(samples.x.shape[1:], int(samples.y.max()) + 1, len(samples.y), tests, vocabulary)

    def _hash(self) -> str:
        path = Path(self.path)
        if not path.is_file():
            raise ArtifactError(f"dataset.path: {self.path} is missing; it should be a file.")
        return pins.content(path)

    def _read(self, path: Path) -> Samples:
        raise NotImplementedError
