"""Where everything lies, what is in it, and how it is written and read.

Writes are atomic (a temporary name, ``os.replace``), so a file is whole or absent whatever is killed, and a second
writer of the same run writes the same bytes. Reads are checked against the SHA-256 that a manifest recorded. Small
files of rounds may lie in their folder's pack (`fedpipe.archive`); whoever reads them here need not know.

No write waits for the disk. A power failure may take what was written in the last half minute: then it is found by its
SHA-256, and done again, like anything that is damaged. What it must not take is the older files from which that is done
again, so those that replace others are on the disk (`fsync_files`) before the others are deleted.
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
FULL_SCALE = "paper"  #: the scale of a study as it stands in its file
STUDIES = Path("studies")  #: where other studies lie
PAPERS = STUDIES / "papers"  #: those of the four papers
DVC_YAML = "dvc.yaml"  #: beside studies, a file of DVC's own
PACK_LOCK = Path(".snakemake/archive.lock")  #: held while a pack is written; neither git nor DVC looks there
RESTORE_ADVICE = "`dvc checkout` brings back what DVC has recorded, and `fedpipe run` makes the rest again"
WRITE_ATTEMPTS = 5  #: to write a file whose folder other processes sweep
TENSOR_FILES = (
    "server.pt",
    "clients.pt",
)  #: a round's files that no pack takes: they are mapped from files of their own
_T = TypeVar("_T")


@dataclass(frozen=True)
class RoundFiles:
    """The files of one round.

    ``state.json`` is written last by the aggregation: the states are whole. ``round.json`` is written last of all: the
    round is complete. Both hold the SHA-256 of what they vouch for. Times lie beside, vouched for by nobody.
    """

    path: Path

    @property
    def server_state(self) -> Path:
        """Server state after the round's aggregation (round 0: as initialized)."""
        return self.path / "server.pt"

    @property
    def client_states(self) -> Path:
        """What the round's participants keep until their next round, stacked along the first axis."""
        return self.path / "clients.pt"

    @property
    def participants(self) -> Path:
        """One row a participant: weight, bytes down and up."""
        return self.path / "participants.parquet"

    @property
    def trained_accuracies(self) -> Path:
        """Accuracies of the participants right after training."""
        return self.path / "trained.parquet"

    @property
    def kept_accuracies(self) -> Path:
        """The same for the kept protocols of this round and of those that follow until a client trains again."""
        return self.path / "kept.parquet"

    @property
    def metrics(self) -> Path:
        """Accuracies of this round, one row a client and protocol."""
        return self.path / "metrics.parquet"

    @property
    def exchanged_matrices(self) -> Path:
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
    def state_marker(self) -> Path:
        """Marker: the round's states are whole."""
        return self.path / "state.json"

    @property
    def marker(self) -> Path:
        """Marker: the round is complete."""
        return self.path / "round.json"

    def block_uploads(self, index: int) -> Path:
        """What one job's participants upload (only in the DAG of single rounds, until aggregated)."""
        return self.path / f"block-{index:04d}.pt"


@dataclass(frozen=True)
class MergedFiles:
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
    def round_count(self) -> int:
        """The number of rounds."""
        return int(self.path.name)

    def read_recorded_sha256(self, path: Path) -> str:
        """The SHA-256 of one of the files, as recorded.

        Raises
        ------
        ArtifactError
            The record is missing or damaged, or of another number of rounds.
        """
        recorded_sha256 = read_recorded_sha256(path, self.marker.name)
        if (recorded_rounds := read_json(self.marker).get("rounds")) != self.round_count:
            raise ArtifactError(
                f"{self.marker} is of {recorded_rounds} rounds and should be of {self.round_count}; delete "
                f"{self.path} and run again."
            )
        return recorded_sha256

    def check(self) -> None:
        """Hash all files.

        Raises
        ------
        ArtifactError
            One is missing, damaged, or of another number of rounds.
        """
        for path in (self.metrics, self.matrices, self.rounds, self.times):
            _read_verified(path, self.read_recorded_sha256(path))


@dataclass(frozen=True)
class RunFiles:
    """The files of one run, below ``results/runs/<algorithm>/<key>``."""

    path: Path

    @classmethod
    def from_key(cls, label: str, key: str) -> RunFiles:
        """The place of the run with this key."""
        return cls(RESULTS / "runs" / label / key)

    @property
    def settings(self) -> Path:
        """All settings in full, from which the key is computed."""
        return self.path / "run.yaml"

    @property
    def rounds_folder(self) -> Path:
        """The folder of the rounds; a segment's end packs its small files."""
        return self.path / "rounds"

    def round(self, number: int) -> RoundFiles:
        """The files of one round."""
        return RoundFiles(self.rounds_folder / f"{number:04d}")

    def list_complete_rounds(self) -> list[int]:
        """The rounds that are complete, ascending; 0 is one of them."""
        markers = [
            *archive.list_members(archive.pack_path(self.rounds_folder)),
            *map(str, self.rounds_folder.glob("[0-9][0-9][0-9][0-9]/round.json")),
        ]
        return sorted({int(Path(name).parent.name) for name in markers if name.endswith("/round.json")})

    def segment_manifest(self, stop: int) -> Path:
        """Manifest of the segment that ends with round ``stop``."""
        return self.path / "segments" / f"{stop:04d}.json"

    def replay_record(self, number: int, shared: str) -> Path:
        """What came of redoing a round, before the run went on after it by other shared code than had made it."""
        return self.path / "continued" / f"{number:04d}-{shared}.json"

    def list_segment_manifests(self) -> list[Path]:
        """Manifests of all segments, ascending."""
        return sorted(self.path.glob("segments/*.json"))

    def merged_files(self, rounds: int) -> MergedFiles:
        """The files that join the rounds 1 to ``rounds``."""
        return MergedFiles(self.path / "joined" / f"{rounds:04d}")

    def list_merged_files(self) -> list[MergedFiles]:
        """What was joined for studies of any length, ascending."""
        return [MergedFiles(path.parent) for path in sorted(self.path.glob("joined/[0-9]*/joined.json"))]


@dataclass(frozen=True)
class ProbeFiles:
    """The files of one probe, below ``results/probes/<algorithm>/<run's key>/<round>``."""

    path: Path  #: without the ends of the names

    @classmethod
    def from_key(cls, label: str, run: str, number: int, kind: str, key: str) -> ProbeFiles:
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
    def from_params(cls, params: Path, scale: str = FULL_SCALE) -> StudyFiles:
        """The folder of a study's results, without ``results/``.

        At a scale other than the whole study's, ``@`` and its name are put behind.

        Raises
        ------
        SettingsError
            A study there would share its place with another's, or `fedpipe prune` would not find it.
        """
        params = normalize_study_path(params)
        suffix = "" if scale == FULL_SCALE else f"@{scale}"
        if not re.fullmatch("[a-z][a-z0-9_]*", scale):
            raise SettingsError(
                f"'{scale}' is no scale; it should be a name of the study's section scales, or {FULL_SCALE}."
            )
        if params == PARAMS:
            return cls(RESULTS / "studies" / suffix if suffix else RESULTS)
        name = params.name.removesuffix(".yaml")
        parts = (*params.parts[1:-1], name)
        if params.parts[:1] != STUDIES.parts or name == params.name or not all(part.strip(".") for part in parts):
            raise SettingsError(f"{params}: a study is params.yaml, or lies below the folder studies as NAME.yaml.")
        for parent, part in itertools.pairwise(parts):
            if part.lower() in RESERVED_NAMES:
                raise SettingsError(f"{params}: '{parent}/{part}' is for files of a study '{parent}'; rename '{part}'.")
        if invalid_character := re.search(r"[^\w ./+()=-]", str(params)):
            raise SettingsError(
                f"{str(params)!r}: {invalid_character[0]!r} can't be part of a study's path; it should be of letters, "
                "digits, spaces "
                "and ./_-+=()."
            )
        return cls(RESULTS / "studies" / Path(*parts[:-1], f"{name}{suffix}"))

    @property
    def plan(self) -> Path:
        """The study's runs and jobs, which the Snakefile reads."""
        return self.path / "plan.json"

    @property
    def sources(self) -> Path:
        """The files that the plan was made of, in Snakemake's folder, since they are of this clone alone."""
        return Path(".snakemake", "fedpipe", self.path / "sources.json")

    @property
    def unavailable_runs(self) -> Path:
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

    def run_keys(self, label: str) -> Path:
        """Keys of all runs of an algorithm, each with its number of rounds."""
        return self.path / "keys" / f"{label}.json"


#: What lies in a study's folder; no study below it may have such a name.
RESERVED_NAMES = ("plan.json", "metrics.json", "tables", "plots", "figures", "keys", "logs")


def normalize_study_path(params: Path) -> Path:
    """The one name of a study's file: relative to this folder, if it lies in it and ``..`` leads nowhere else."""
    cwd, shell_cwd = Path.cwd(), Path(os.environ.get("PWD", ""))
    for folder in (
        cwd,
        *([shell_cwd] if shell_cwd.is_absolute() and shell_cwd.is_dir() and shell_cwd.samefile(cwd) else []),
    ):
        if ".." not in params.parts and params.is_relative_to(folder):  # the second may lead here through a link
            return params.relative_to(folder)
    return params


def list_studies(params: Path) -> list[Path]:
    """The studies that a file or a folder names: that file, or all below the folder.

    Raises
    ------
    SettingsError
        There is none in the folder.
    """
    if not params.is_dir():
        return [normalize_study_path(params)]
    paths = [normalize_study_path(path) for path in sorted(params.rglob("*.yaml")) if path.name != DVC_YAML]
    if not paths:
        raise SettingsError(f"{params}: there is no study in that folder; it should hold some, as NAME.yaml.")
    return paths


def format_run_command(params: Path, scale: str = FULL_SCALE) -> str:
    """The command that makes a study, as it is typed."""
    return _format_command("run", params, scale)


def format_show_command(params: Path, scale: str = FULL_SCALE) -> str:
    """The command that shows a study's table, as it is typed."""
    return _format_command("show", params, scale)


def _format_command(command: str, params: Path, scale: str) -> str:
    params_option = [] if params == PARAMS else ["--params", str(params)]
    return shlex.join(["fedpipe", command, *params_option, *([] if scale == FULL_SCALE else ["--scale", scale])])


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
        for attempt in range(WRITE_ATTEMPTS):
            try:
                _replace(path, data)
                break
            except FileNotFoundError:  # another process at work on this run has just swept, or packed
                if attempt == WRITE_ATTEMPTS - 1:
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


def fsync_files(*paths: Path) -> None:
    """Wait until what was written is on the disk; files that have lain there for a while cost next to nothing."""
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as stream:
            os.fsync(stream.fileno())


def write_pt(path: Path, tree: Mapping[str, Any]) -> str:
    """Write nested dicts of tensors atomically; the bytes depend on the tensors alone, not on the file's name."""
    import torch

    def to_contiguous(value: Any) -> Any:
        if isinstance(value, Mapping):
            # A pickle refers back to a string object that it has seen: equal names shall be one object, always.
            return {sys.intern(key): to_contiguous(subtree) for key, subtree in value.items()}
        # A view would drag its whole storage into the file; and strides of axes of length 1, which are any, would be
        # bytes of it.
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)

    buffer = io.BytesIO()
    torch.save(to_contiguous(tree), buffer)
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


def pack_folder(folder: Path) -> None:
    """Join the tables and manifests of a folder's folders into its pack, and delete them; tensors stay.

    They take the place of members with their names. Killed at any moment, each is there once or twice; so it is while
    others write, read and pack the same folder.

    Raises
    ------
    ArchiveError
        A member is damaged whose place none takes; nothing is written, and nothing deleted.
    """
    with _lock_packs():
        loose_files = {path: _read_bytes(path) for path in sorted(folder.glob("*/*")) if archive.is_packable(path)}
        if loose_files:
            members = {archive.locate_member(path)[1]: data for path, data in loose_files.items()}
            write_bytes(
                archive.pack_path(folder),
                archive.build_pack(archive.read_members(archive.pack_path(folder), members) | members),
            )
            fsync_files(archive.pack_path(folder))
        for path, data in loose_files.items():
            with suppress(FileNotFoundError):
                _delete_if_unchanged(path, data)
            with suppress(OSError):  # tensors lie there
                path.parent.rmdir()


def _delete_if_unchanged(path: Path, data: bytes) -> None:
    """Delete a file if these are its bytes; who writes it anew at this very moment finds it there afterwards."""
    refuse_elsewhere(path.parent)
    if path.read_bytes() != data:
        return
    renamed_path = path.with_name(f".{path.name}.packed.tmp")
    path.replace(renamed_path)
    if renamed_path.read_bytes() != data:  # written anew between those two lines
        with suppress(FileExistsError):  # or once more since
            path.hardlink_to(renamed_path)
    renamed_path.unlink()


def unpack_folder(folder: Path) -> None:
    """Make files of a pack's members again, as old as the pack was; nothing where the pack is damaged.

    Raises
    ------
    ArchiveError
        The pack is not what we wrote.
    """
    pack_file = archive.pack_path(folder)
    if not pack_file.exists():
        return
    with _lock_packs(), suppress(FileNotFoundError):  # another has just unpacked it
        mtime_ns = pack_file.stat().st_mtime_ns
        for name, data in archive.read_members(pack_file).items():
            path = folder / name
            if not path.exists():
                write_bytes(path, data)
                os.utime(path, ns=(mtime_ns, mtime_ns))
        fsync_files(*(folder / name for name in archive.list_members(pack_file)))
        remove(pack_file)


@contextmanager
def _lock_packs() -> Iterator[None]:
    """While no other process of this clone, on any node, writes a pack: two that read the same one would lose files."""
    from filelock import FileLock

    lock = FileLock(PACK_LOCK)
    try:
        PACK_LOCK.parent.mkdir(exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ArtifactError(f"{PACK_LOCK} can't be locked ({error.strerror}); fix that and run again.") from error
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
        raise _missing_error(path)
    if sha256 is not None and (actual_sha256 := sha256_of(path)) != sha256:
        raise _damaged_error(path, actual_sha256, sha256)
    tree: dict[str, Any] = _decode(path, lambda: torch.load(path, weights_only=True, mmap=True, map_location="cpu"))
    if not isinstance(tree, dict) or not _are_tensors(tree):
        raise _unreadable_error(path, "it holds something else than named tensors")
    return tree


def _are_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or nested dicts of tensors by name."""
    import torch

    if isinstance(value, dict):
        return all(isinstance(name, str) and _are_tensors(part) for name, part in value.items())
    return isinstance(value, torch.Tensor)


def read_json(path: Path, sha256: str | None = None) -> Any:
    """The value in a JSON file, checked."""
    data = _read_verified(path, sha256)
    return _decode(path, lambda: json.loads(data))


def read_parquet(path: Path, sha256: str | None = None) -> pa.Table:
    """The table in a Parquet file, checked."""
    import pyarrow as pa

    data = _read_verified(path, sha256)
    return _decode(path, lambda: decode_parquet(pa.BufferReader(data)))


def decode_parquet(source: Any) -> pa.Table:
    """The table in Parquet data.

    Read by this thread alone, as tables become frames in :func:`table_to_frame`: a process in which Arrow has begun
    threads is
    aborted now and then when it ends.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(source, pre_buffer=False).read(use_threads=False)


def table_to_frame(table: pa.Table) -> pd.DataFrame:
    """A table as a frame of pandas."""
    dataframe: pd.DataFrame = table.to_pandas(use_threads=False)
    return dataframe


def read_merged_table(path: Path) -> pa.Table:
    """A table that joins rounds of a run, checked against ``joined.json`` beside it."""
    return read_parquet(path, MergedFiles(path.parent).read_recorded_sha256(path))


def delete_temporary_files(folder: Path) -> None:
    """Delete half-written files that a killed process left below a folder."""
    for path in folder.rglob(".*.tmp"):
        remove(path)


def is_stored(path: Path) -> bool:
    """Whether a file is there, loose or packed."""
    pack_file, name = archive.locate_member(path)
    return path.is_file() or name in archive.list_members(pack_file)


def display_path(path: Path) -> str:
    """Where a file really lies, in words: at its path, or as a member of its pack."""
    pack_file, name = archive.locate_member(path)
    return f"{pack_file}/{name}" if _is_packed(path) else str(path)


def find_containing_file(path: Path) -> Path:
    """The file that really holds it: itself, or its pack."""
    return archive.locate_member(path)[0] if _is_packed(path) else path


def read_round_digests(files: RoundFiles, record: Path) -> dict[str, str]:
    """The SHA-256 of a round's files by name, as ``state.json`` or ``round.json`` recorded them.

    Raises
    ------
    ArtifactError
        The record is missing or damaged, or speaks of anything else than files of its round.
    """
    content = read_json(record)
    digests = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(digests, dict):
        raise _unreadable_error(record, "it does not record the SHA-256 of its round's files")
    for name, sha256 in digests.items():
        is_round_file = name in TENSOR_FILES or ("/" not in name and archive.is_packable(files.path / name))
        if not is_round_file or not isinstance(sha256, str):
            raise _unreadable_error(record, f"it names {name!r}, which is no file of its round")
    return digests


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        pass
    try:
        return hashlib.sha256(archive.read_member(path)).hexdigest()
    except zipfile.BadZipFile as error:
        raise _unreadable_error(path, error) from error


def read_recorded_sha256(path: Path, record: str | None = None) -> str:
    """The SHA-256 that was recorded when the file was written, in ``record`` beside it (default: its name, .json).

    Raises
    ------
    ArtifactError
        The record is missing, damaged, or does not name the file.
    """
    record_path = path.with_name(record) if record else path.with_suffix(".json")
    try:
        sha256: str = read_json(record_path)[path.name]
    except (LookupError, TypeError):
        raise ArtifactError(
            f"{record_path} does not record the SHA-256 of {path.name}; delete both and run again."
        ) from None
    return sha256


def is_intact(path: Path, sha256: str) -> bool:
    """Whether the file is there with these bytes.

    Raises
    ------
    ArchiveError
        It would lie in a pack that is damaged as a whole.
    """
    try:
        return sha256_of(path) == sha256
    except archive.PackError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ArtifactError):
        return False


def _read_bytes(path: Path) -> bytes:
    for _ in range(2):  # whoever looks in between may see it packed, or unpacked again
        with suppress(FileNotFoundError):
            return path.read_bytes()
        with suppress(FileNotFoundError):
            return archive.read_member(path)
    raise FileNotFoundError(path)


def _read_verified(path: Path, sha256: str | None) -> bytes:
    """A file's bytes, checked."""
    try:
        data = _read_bytes(path)
    except FileNotFoundError:
        raise _missing_error(path) from None
    except (OSError, zipfile.BadZipFile) as error:
        raise _unreadable_error(path, error) from error
    if sha256 is not None and (actual_sha256 := hashlib.sha256(data).hexdigest()) != sha256:
        raise _damaged_error(path, actual_sha256, sha256)
    return data


def _missing_error(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} is missing; type `fedpipe run` to make it again.")


def _damaged_error(path: Path, actual_sha256: str, sha256: str) -> ArtifactError:
    subject = f"{archive.locate_member(path)[1]} in it" if _is_packed(path) else "it"
    reason = f"the SHA-256 of {subject} is {actual_sha256[:12]}… and should be {sha256[:12]}…"
    return ArtifactError(f"{find_containing_file(path)} is damaged: {reason}; {_repair_advice(path)}.")


def _unreadable_error(path: Path, reason: object) -> ArtifactError:
    member_prefix = f"{archive.locate_member(path)[1]}: " if _is_packed(path) else ""
    return ArtifactError(
        f"{find_containing_file(path)} can't be read ({member_prefix}{reason}); {_repair_advice(path)}."
    )


def _is_packed(path: Path) -> bool:
    return archive.is_packable(path) and not path.exists() and archive.locate_member(path)[0].exists()


def _repair_advice(path: Path) -> str:
    """What to do about a file that is damaged."""
    if not _is_packed(path):
        return "delete it and run again"
    run = RunFiles(path.parent.parent.parent)
    return f"delete {run.path / 'segments'} and run again: rounds that are whole are not done again"


def _decode(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:  # each reader has its own kinds; all mean that these bytes are not what we wrote
        reason = str(error).split("\n", 1)[0]
        raise _unreadable_error(path, reason) from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
