"""Where everything lies, what is in it, and how it is written and read.

Writes are atomic (a temporary name, ``os.replace``), so a file is whole or absent whatever is killed, and a second
writer of the same run writes the same bytes. Reads are checked against the SHA-256 that a manifest recorded. Small
files of rounds may lie in their folder's pack (`fedpipe.archive`); whoever reads them here need not know.

No write waits for the disk. A power failure may take what was written in the last half minute: then it is found by its
SHA-256, and done again, like anything that is damaged. What it must not take is the older files from which that is done
again, so those that replace others are on the disk (`settle`) before the others are deleted.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedpipe import archive
from fedpipe.errors import ArtifactError, SettingsError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

RESULTS = Path("results")
PARAMS = Path("params.yaml")  #: the main study
PAPER = "paper"  #: the scale of a study as it stands in its file
STUDIES = Path("studies")  #: where other studies lie
PAPERS = STUDIES / "papers"  #: those of the four papers
DVC = "dvc.yaml"  #: beside studies, a file of DVC's own
LOCK = Path(".snakemake/archive.lock")  #: held while a pack is written; neither git nor DVC looks there
RESTORE = "`dvc checkout` brings back what DVC has recorded, and `fedpipe run` makes the rest again"
ATTEMPTS = 5  #: to write a file whose folder other processes sweep
TENSORS = ("server.pt", "clients.pt")  #: a round's files that no pack takes: they are mapped from files of their own
_T = TypeVar("_T")


@dataclass(frozen=True)
class RoundFiles:
    """The files of one round.

    ``state.json`` is written last by the aggregation: the states are whole. ``round.json`` is written last of all: the
    round is complete. Both hold the SHA-256 of what they vouch for. Times lie beside, vouched for by nobody.
    """

    path: Path

    @property
    def server(self) -> Path:
        """Server state after the round's aggregation (round 0: as initialized)."""
        return self.path / "server.pt"

    @property
    def clients(self) -> Path:
        """What the round's participants keep until their next round, stacked along the first axis."""
        return self.path / "clients.pt"

    @property
    def participants(self) -> Path:
        """One row a participant: weight, bytes down and up."""
        return self.path / "participants.parquet"

    @property
    def trained(self) -> Path:
        """Accuracies of the participants right after training."""
        return self.path / "trained.parquet"

    @property
    def kept(self) -> Path:
        """The same for the kept protocols of this round and of those that follow until a client trains again."""
        return self.path / "kept.parquet"

    @property
    def metrics(self) -> Path:
        """Accuracies of this round, one row a client and protocol."""
        return self.path / "metrics.parquet"

    @property
    def exchanged(self) -> Path:
        """Matrices that the algorithm exchanged in this round."""
        return self.path / "exchanged.parquet"

    @property
    def matrices(self) -> Path:
        """SL and CR matrices of this round's global model."""
        return self.path / "matrices.parquet"

    @property
    def times(self) -> Path:
        """Seconds of training, aggregation and evaluation, and of a client's local epoch."""
        return self.path / "times.json"

    @property
    def state(self) -> Path:
        """Marker: the round's states are whole."""
        return self.path / "state.json"

    @property
    def marker(self) -> Path:
        """Marker: the round is complete."""
        return self.path / "round.json"

    def block(self, index: int) -> Path:
        """What one job's participants upload (only in the DAG of single rounds, until aggregated)."""
        return self.path / f"block-{index:04d}.pt"


@dataclass(frozen=True)
class JoinedFiles:
    """A run's first so many rounds as one file of each kind: what a table of that many rounds is made of.

    They lie in a folder whose name is the number of rounds, so that studies of other lengths have their own.
    ``joined.json`` is written last; it holds that number, and the SHA-256 of all others.
    """

    path: Path

    @property
    def metrics(self) -> Path:
        """All rounds' accuracies."""
        return self.path / "metrics.parquet"

    @property
    def matrices(self) -> Path:
        """All rounds' SL and CR matrices."""
        return self.path / "matrices.parquet"

    @property
    def rounds(self) -> Path:
        """One row a round: participants, traffic, what the algorithm observed."""
        return self.path / "rounds.parquet"

    @property
    def times(self) -> Path:
        """Seconds of each round, and what made them."""
        return self.path / "times.json"

    @property
    def marker(self) -> Path:
        """Marker: the files are whole."""
        return self.path / "joined.json"

    @property
    def length(self) -> int:
        """The number of rounds."""
        return int(self.path.name)

    def sha256(self, path: Path) -> str:
        """The SHA-256 of one of the files, as recorded.

        Raises
        ------
        ArtifactError
            The record is missing or damaged, or of another number of rounds.
        """
        recorded = manifest(path, self.marker.name)
        if (found := read_json(self.marker).get("rounds")) != self.length:
            raise ArtifactError(
                f"{self.marker} is of {found} rounds and should be of {self.length}; delete {self.path} and run again."
            )
        return recorded

    def check(self) -> None:
        """Hash all files.

        Raises
        ------
        ArtifactError
            One is missing, damaged, or of another number of rounds.
        """
        for path in (self.metrics, self.matrices, self.rounds, self.times):
            _read(path, self.sha256(path))


@dataclass(frozen=True)
class RunFiles:
    """The files of one run, below ``results/runs/<algorithm>/<key>``."""

    path: Path

    @classmethod
    def of(cls, label: str, key: str) -> RunFiles:
        """The place of the run with this key."""
        return cls(RESULTS / "runs" / label / key)

    @property
    def settings(self) -> Path:
        """All settings in full, from which the key is computed."""
        return self.path / "run.yaml"

    @property
    def history(self) -> Path:
        """The folder of the rounds; a segment's end packs its small files."""
        return self.path / "rounds"

    def round(self, number: int) -> RoundFiles:
        """The files of one round."""
        return RoundFiles(self.history / f"{number:04d}")

    def complete(self) -> list[int]:
        """The rounds that are complete, ascending; 0 is one of them."""
        markers = [
            *archive.names(archive.of(self.history)),
            *map(str, self.history.glob("[0-9][0-9][0-9][0-9]/round.json")),
        ]
        return sorted({int(Path(name).parent.name) for name in markers if name.endswith("/round.json")})

    def segment(self, stop: int) -> Path:
        """Manifest of the segment that ends with round ``stop``."""
        return self.path / "segments" / f"{stop:04d}.json"

    def continued(self, number: int, shared: str) -> Path:
        """What came of redoing a round, before the run went on after it by other shared code than had made it."""
        return self.path / "continued" / f"{number:04d}-{shared}.json"

    def segments(self) -> list[Path]:
        """Manifests of all segments, ascending."""
        return sorted(self.path.glob("segments/*.json"))

    def joined(self, rounds: int) -> JoinedFiles:
        """The files that join the rounds 1 to ``rounds``."""
        return JoinedFiles(self.path / "joined" / f"{rounds:04d}")

    def all_joined(self) -> list[JoinedFiles]:
        """What was joined for studies of any length, ascending."""
        return [JoinedFiles(path.parent) for path in sorted(self.path.glob("joined/[0-9]*/joined.json"))]


@dataclass(frozen=True)
class ProbeFiles:
    """The files of one probe, below ``results/probes/<algorithm>/<run's key>/<round>``."""

    path: Path  #: without the ends of the names

    @classmethod
    def of(cls, label: str, run: str, number: int, kind: str, key: str) -> ProbeFiles:
        """The place of a probe of a round."""
        return cls(RESULTS / "probes" / label / run / f"{number:04d}" / f"{kind}-{key}")

    @property
    def settings(self) -> Path:
        """All that it depends on, from which its key is computed."""
        return self.path.with_suffix(".yaml")

    @property
    def table(self) -> Path:
        """What it found."""
        return self.path.with_suffix(".parquet")

    @property
    def marker(self) -> Path:
        """The SHA-256 of the table, and what made it."""
        return self.path.with_suffix(".json")


@dataclass(frozen=True)
class StudyFiles:
    """The files of one study; runs, partitions and data lie under keys and names that all studies share."""

    path: Path

    @classmethod
    def of(cls, params: Path, scale: str = PAPER) -> StudyFiles:
        """The place of a study: ``results`` for params.yaml, and for others ``results/studies/...`` as in ``studies``.

        At a scale other than the whole study's, ``@`` and its name are put behind.

        Raises
        ------
        SettingsError
            A study there would share its place with another's, or `fedpipe prune` would not find it.
        """
        params = study(params)
        behind = "" if scale == PAPER else f"@{scale}"
        if not re.fullmatch("[a-z][a-z0-9_]*", scale):
            raise SettingsError(
                f"'{scale}' is no scale; it should be a name of the study's section scales, or {PAPER}."
            )
        if params == PARAMS:
            return cls(RESULTS / "studies" / behind if behind else RESULTS)
        name = params.name.removesuffix(".yaml")
        parts = (*params.parts[1:-1], name)
        if params.parts[:1] != STUDIES.parts or name == params.name or not all(part.strip(".") for part in parts):
            raise SettingsError(f"{params}: a study is params.yaml, or lies below the folder studies as NAME.yaml.")
        for above, part in itertools.pairwise(parts):
            if part.lower() in PARTS:
                raise SettingsError(f"{params}: '{above}/{part}' is for files of a study '{above}'; rename '{part}'.")
        if odd := re.search(r"[^\w ./+()=-]", str(params)):
            raise SettingsError(
                f"{str(params)!r}: {odd[0]!r} can't be part of a study's path; it should be of letters, digits, spaces "
                "and ./_-+=()."
            )
        return cls(RESULTS / "studies" / Path(*parts[:-1], f"{name}{behind}"))

    @property
    def plan(self) -> Path:
        """The study's runs and jobs, which the Snakefile reads."""
        return self.path / "plan.json"

    @property
    def sources(self) -> Path:
        """The files that the plan was made of, in Snakemake's folder, since they are of this clone alone."""
        return Path(".snakemake", "fedpipe", self.path / "sources.json")

    @property
    def absent(self) -> Path:
        """Which runs can't be made without a network, and why; beside the sources, since it is of this clone alone."""
        return self.sources.with_name("absent.json")

    @property
    def metrics(self) -> Path:
        """The accuracies that the table shows, for `dvc exp show`."""
        return self.path / "metrics.json"

    @property
    def tables(self) -> Path:
        """The folder of the result table and of the times."""
        return self.path / "tables"

    @property
    def plots(self) -> Path:
        """The folder of the figures' numbers."""
        return self.path / "plots"

    @property
    def figures(self) -> Path:
        """The folder of the figures."""
        return self.path / "figures"

    def keys(self, label: str) -> Path:
        """Keys of all runs of an algorithm, each with its number of rounds."""
        return self.path / "keys" / f"{label}.json"


#: What lies in a study's folder; no study below it may have such a name.
PARTS = ("plan.json", "metrics.json", "tables", "plots", "figures", "keys", "logs")


def study(params: Path) -> Path:
    """The one name of a study's file: relative to this folder, if it lies in it and ``..`` leads nowhere else."""
    here, typed = Path.cwd(), Path(os.environ.get("PWD", ""))
    for folder in (here, *([typed] if typed.is_absolute() and typed.is_dir() and typed.samefile(here) else [])):
        if ".." not in params.parts and params.is_relative_to(folder):  # the second may lead here through a link
            return params.relative_to(folder)
    return params


def studies(params: Path) -> list[Path]:
    """The studies that a file or a folder names: that file, or all below the folder.

    Raises
    ------
    SettingsError
        There is none in the folder.
    """
    if not params.is_dir():
        return [study(params)]
    found = [study(path) for path in sorted(params.rglob("*.yaml")) if path.name != DVC]
    if not found:
        raise SettingsError(f"{params}: there is no study in that folder; it should hold some, as NAME.yaml.")
    return found


def making(params: Path, scale: str = PAPER) -> str:
    """The command that makes a study, as it is typed."""
    return _typed("run", params, scale)


def showing(params: Path, scale: str = PAPER) -> str:
    """The command that shows a study's table, as it is typed."""
    return _typed("show", params, scale)


def _typed(command: str, params: Path, scale: str) -> str:
    study = [] if params == PARAMS else ["--params", str(params)]
    return shlex.join(["fedpipe", command, *study, *([] if scale == PAPER else ["--scale", scale])])


def dataset_file(name: str) -> Path:
    """Where a data set's tensors lie."""
    return RESULTS / "data" / f"{name}.pt"


def assignment_file(key: str) -> Path:
    """Where the partition with this key lies."""
    return RESULTS / "partitions" / key / "assignment.parquet"


def heterogeneity_file(key: str) -> Path:
    """Where it is told how unlike a partition's clients are."""
    return assignment_file(key).with_name("heterogeneity.parquet")


def write_bytes(path: Path, data: bytes | memoryview) -> str:
    """Write a file atomically; returns the SHA-256 of its bytes.

    Raises
    ------
    ArtifactError
        The disk is full, the folder read-only or elsewhere; what was there before is there still.
    """
    refuse_elsewhere(path.parent)
    try:
        for attempt in range(ATTEMPTS):
            try:
                _replace(path, data)
                break
            except FileNotFoundError:  # another process at work on this run has just swept, or packed
                if attempt == ATTEMPTS - 1:
                    raise
    except OSError as error:
        raise ArtifactError(f"{path} can't be written ({error.strerror}); fix that and run again.") from error
    return hashlib.sha256(data).hexdigest()


def _replace(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def refuse_elsewhere(path: Path) -> None:
    """Refuse to write or delete where a link below ``results`` leads out of it; results may come from elsewhere.

    Raises
    ------
    ArtifactError
        There is such a link.
    """
    if path.parts[:1] == RESULTS.parts and not path.resolve().is_relative_to(RESULTS.resolve()):
        raise ArtifactError(
            f"{path} leads out of {RESULTS} through a link, to {path.resolve()}; nothing is written or deleted there. "
            "Delete the link, or put the files themselves in its place."
        )


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there; of a link only the link."""
    refuse_elsewhere(path.parent)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def settle(*paths: Path) -> None:
    """Wait until what was written is on the disk; files that have lain there for a while cost next to nothing."""
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as stream:
            os.fsync(stream.fileno())


def write_pt(path: Path, tree: Mapping[str, Any]) -> str:
    """Write nested dicts of tensors atomically; the bytes depend on the tensors alone, not on the file's name."""
    import torch

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            # A pickle refers back to a string object that it has seen: equal names shall be one object, always.
            return {sys.intern(key): plain(part) for key, part in value.items()}
        # A view would drag its whole storage into the file; and strides of axes of length 1, which are any, would be
        # bytes of it.
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)

    buffer = io.BytesIO()
    torch.save(plain(tree), buffer)
    return write_bytes(path, buffer.getbuffer())


def json_bytes(value: Any) -> bytes:
    """JSON with its keys sorted, so that equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as Parquet."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def write_json(path: Path, value: Any) -> str:
    """Write JSON atomically."""
    return write_bytes(path, json_bytes(value))


def write_parquet(path: Path, table: pa.Table) -> str:
    """Write a table atomically."""
    return write_bytes(path, parquet_bytes(table))


def pack(folder: Path) -> None:
    """Join the tables and manifests of a folder's folders into its pack, and delete them; tensors stay.

    They take the place of members with their names. Killed at any moment, each is there once or twice; so it is while
    others write, read and pack the same folder.

    Raises
    ------
    ArchiveError
        A member is damaged whose place none takes; nothing is written, and nothing deleted.
    """
    with _alone():
        loose = {path: _bytes(path) for path in sorted(folder.glob("*/*")) if archive.takes(path)}
        if loose:
            members = {archive.holding(path)[1]: data for path, data in loose.items()}
            write_bytes(archive.of(folder), archive.join(archive.contents(archive.of(folder), members) | members))
            settle(archive.of(folder))
        for path, data in loose.items():
            with suppress(FileNotFoundError):
                _unlink(path, data)
            with suppress(OSError):  # tensors lie there
                path.parent.rmdir()


def _unlink(path: Path, data: bytes) -> None:
    """Delete a file if these are its bytes; who writes it anew at this very moment finds it there afterwards."""
    refuse_elsewhere(path.parent)
    if path.read_bytes() != data:
        return
    aside = path.with_name(f".{path.name}.packed.tmp")
    path.replace(aside)
    if aside.read_bytes() != data:  # written anew between those two lines
        with suppress(FileExistsError):  # or once more since
            path.hardlink_to(aside)
    aside.unlink()


def unpack(folder: Path) -> None:
    """Make files of a pack's members again, as old as the pack was; nothing where the pack is damaged.

    Raises
    ------
    ArchiveError
        The pack is not what we wrote.
    """
    zipped = archive.of(folder)
    if not zipped.exists():
        return
    with _alone(), suppress(FileNotFoundError):  # another has just unpacked it
        made = zipped.stat().st_mtime_ns
        for name, data in archive.contents(zipped).items():
            path = folder / name
            if not path.exists():
                write_bytes(path, data)
                os.utime(path, ns=(made, made))
        settle(*(folder / name for name in archive.names(zipped)))
        remove(zipped)


@contextmanager
def _alone() -> Iterator[None]:
    """While no other process of this clone, on any node, writes a pack: two that read the same one would lose files."""
    from filelock import FileLock

    lock = FileLock(LOCK)
    try:
        LOCK.parent.mkdir(exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ArtifactError(f"{LOCK} can't be locked ({error.strerror}); fix that and run again.") from error
    try:
        yield
    finally:
        lock.release()


def read_pt(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Nested dicts of tensors, mapped from the file; nothing but tensors is ever unpickled.

    Raises
    ------
    ArtifactError
        The file is missing, damaged, or holds anything else than tensors.
    """
    import torch

    if not path.is_file():
        raise _missing(path)
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise _damaged(path, found, sha256)
    tree: dict[str, Any] = _decode(path, lambda: torch.load(path, weights_only=True, mmap=True, map_location="cpu"))
    if not isinstance(tree, dict) or not _are_tensors(tree):
        raise _unreadable(path, "it holds something else than named tensors")
    return tree


def _are_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or nested dicts of tensors by name."""
    import torch

    if isinstance(value, dict):
        return all(isinstance(name, str) and _are_tensors(part) for name, part in value.items())
    return isinstance(value, torch.Tensor)


def read_json(path: Path, sha256: str | None = None) -> Any:
    """The value in a JSON file, checked."""
    data = _read(path, sha256)
    return _decode(path, lambda: json.loads(data))


def read_parquet(path: Path, sha256: str | None = None) -> pa.Table:
    """The table in a Parquet file, checked."""
    import pyarrow as pa

    data = _read(path, sha256)
    return _decode(path, lambda: parquet(pa.BufferReader(data)))


def parquet(source: Any) -> pa.Table:
    """The table in Parquet data.

    Read by this thread alone, as tables become frames in :func:`frame`: a process in which Arrow has begun threads is
    aborted now and then when it ends.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(source, pre_buffer=False).read(use_threads=False)


def frame(table: pa.Table) -> pd.DataFrame:
    """A table as a frame of pandas."""
    found: pd.DataFrame = table.to_pandas(use_threads=False)
    return found


def read_joined(path: Path) -> pa.Table:
    """A table that joins rounds of a run, checked against ``joined.json`` beside it."""
    return read_parquet(path, JoinedFiles(path.parent).sha256(path))


def sweep(folder: Path) -> None:
    """Delete half-written files that a killed process left below a folder."""
    for path in folder.rglob(".*.tmp"):
        remove(path)


def exists(path: Path) -> bool:
    """Whether a file is there, loose or packed."""
    zipped, name = archive.holding(path)
    return path.is_file() or name in archive.names(zipped)


def place(path: Path) -> str:
    """Where a file really lies, in words: at its path, or as a member of its pack."""
    zipped, name = archive.holding(path)
    return f"{zipped}/{name}" if _packed(path) else str(path)


def holder(path: Path) -> Path:
    """The file that really holds it: itself, or its pack."""
    return archive.holding(path)[0] if _packed(path) else path


def hashes(files: RoundFiles, record: Path) -> dict[str, str]:
    """The SHA-256 of a round's files by name, as ``state.json`` or ``round.json`` recorded them.

    Raises
    ------
    ArtifactError
        The record is missing or damaged, or speaks of anything else than files of its round.
    """
    found = read_json(record)
    recorded = found.get("sha256") if isinstance(found, dict) else None
    if not isinstance(recorded, dict):
        raise _unreadable(record, "it does not record the SHA-256 of its round's files")
    for name, sha256 in recorded.items():
        known = name in TENSORS or ("/" not in name and archive.takes(files.path / name))
        if not known or not isinstance(sha256, str):
            raise _unreadable(record, f"it names {name!r}, which is no file of its round")
    return recorded


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        pass
    try:
        return hashlib.sha256(archive.read(path)).hexdigest()
    except zipfile.BadZipFile as error:
        raise _unreadable(path, error) from error


def manifest(path: Path, record: str | None = None) -> str:
    """The SHA-256 that was recorded when the file was written, in ``record`` beside it (default: its name, .json).

    Raises
    ------
    ArtifactError
        The record is missing, damaged, or does not name the file.
    """
    place = path.with_name(record) if record else path.with_suffix(".json")
    try:
        sha256: str = read_json(place)[path.name]
    except (LookupError, TypeError):
        raise ArtifactError(f"{place} does not record the SHA-256 of {path.name}; delete both and run again.") from None
    return sha256


def intact(path: Path, sha256: str) -> bool:
    """Whether the file is there with these bytes.

    Raises
    ------
    ArchiveError
        It would lie in a pack that is damaged as a whole.
    """
    try:
        return sha256_of(path) == sha256
    except archive.ArchiveError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ArtifactError):
        return False


def _bytes(path: Path) -> bytes:
    for _ in range(2):  # whoever looks in between may see it packed, or unpacked again
        with suppress(FileNotFoundError):
            return path.read_bytes()
        with suppress(FileNotFoundError):
            return archive.read(path)
    raise FileNotFoundError(path)


def _read(path: Path, sha256: str | None) -> bytes:
    """A file's bytes, checked."""
    try:
        data = _bytes(path)
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise _damaged(path, found, sha256)
    return data


def _missing(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is missing; type `fedpipe run` to make it again.")


def _damaged(path: Path, found: str, sha256: str) -> ArtifactError:
    which = f"{archive.holding(path)[1]} in it" if _packed(path) else "it"
    said = f"the SHA-256 of {which} is {found[:12]}… and should be {sha256[:12]}…"
    return ArtifactError(f"{holder(path)} is damaged: {said}; {_mend(path)}.")


def _unreadable(path: Path, reason: object) -> ArtifactError:
    which = f"{archive.holding(path)[1]}: " if _packed(path) else ""
    return ArtifactError(f"{holder(path)} can't be read ({which}{reason}); {_mend(path)}.")


def _packed(path: Path) -> bool:
    return archive.takes(path) and not path.exists() and archive.holding(path)[0].exists()


def _mend(path: Path) -> str:
    """What to do about a file that is damaged."""
    if not _packed(path):
        return "delete it and run again"
    run = RunFiles(path.parent.parent.parent)
    return f"delete {run.path / 'segments'} and run again: rounds that are whole are not done again"


def _decode(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:  # each reader has its own kinds; all mean that these bytes are not what we wrote
        reason = str(error).split("\n", 1)[0]
        raise _unreadable(path, reason) from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
