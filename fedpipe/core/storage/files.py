"""Atomic writes and checked reads of all files.

Writes are atomic (a temporary name and ``os.replace``), so a file is complete or missing if a process is killed. A
second writer of the same run writes the same bytes. Reads are checked against the SHA-256 in a manifest. Small files of
rounds may be in their folder's pack (`fedpipe.core.storage.archive`), which the functions here read too.

Writes do not wait for the disk. A power failure may lose the files of the last half minute. Then the SHA-256 detects
it, and they are recomputed. Older files must not be lost, so new files are on the disk (`fsync_files`) before the files
that they replace are deleted.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

RESULTS = Path("results")
WRITE_ATTEMPTS = 6  #: attempts to write a file, because its folder may be missing, or other processes clean it
TENSOR_FILES = ("server.pt", "clients.pt")  #: files of a round that are memory-mapped, so packs do not contain them
_T = TypeVar("_T")


def write_bytes(path: Path, data: bytes | memoryview) -> str:
    """Write a file atomically. Return the SHA-256 of its bytes.

    The old file remains if the disk is full, or if the folder is read-only or outside the project, which are errors.
    """
    reject_outside_links(path.parent)
    try:
        for attempt in range(WRITE_ATTEMPTS):
            try:
                if attempt:
                    path.parent.mkdir(parents=True, exist_ok=True)
                _replace_file(path, data)
                break
            except FileNotFoundError:  # a new folder, or another process has just cleaned or packed it
                if attempt == WRITE_ATTEMPTS - 1:
                    raise
    except OSError as error:
        raise ArtifactError(f"{path} can't be written ({error.strerror}). Fix this and run again.") from error
    return hashlib.sha256(data).hexdigest()


def _replace_file(path: Path, data: bytes | memoryview) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def reject_outside_links(path: Path) -> None:
    """Reject paths with a link below ``results`` to a folder outside it, because results may come from others."""
    if path.parts[:1] != RESULTS.parts or not _has_link_or_dots(path):
        return
    results = os.path.realpath(RESULTS)
    if os.path.commonpath([results, os.path.realpath(path)]) != results:
        raise ArtifactError(
            f"{path} is outside {RESULTS}, because a link resolves it to {path.resolve()}. "
            "Delete the link, or replace it by the files."
        )


def _has_link_or_dots(path: Path) -> bool:
    """Whether a folder below ``results`` is a link or ``..``. This is fast, because each write checks it."""
    folders = itertools.accumulate(path.parts, os.path.join)
    next(folders)  # `results` may be a link
    return ".." in path.parts or any(map(os.path.islink, folders))


def remove_path(path: Path) -> None:
    """Delete a file or folder if it exists. Of a link only the link."""
    reject_outside_links(path.parent)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync_files(*paths: Path) -> None:
    """Wait until files are on the disk. This is fast for old files."""
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as stream:
            os.fsync(stream.fileno())


def write_pt(path: Path, tree: Mapping[str, Any]) -> str:
    """Write nested dicts of tensors atomically. The bytes depend only on the tensors."""
    import torch

    def to_contiguous(value: Any) -> Any:
        if isinstance(value, Mapping):
            # A pickle refers back to string objects, so equal names must be one object.
            return {sys.intern(key): to_contiguous(subtree) for key, subtree in value.items()}
        # A view would write its complete storage. Strides of axes of length 1 are arbitrary and would be written too.
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)

    buffer = io.BytesIO()
    torch.save(to_contiguous(tree), buffer)
    return write_bytes(path, buffer.getbuffer())


def encode_json(value: Any) -> bytes:
    """Encode JSON with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def encode_parquet(table: pa.Table) -> bytes:
    """Encode a table as Parquet."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def is_same_table(first: pa.Table, second: pa.Table) -> bool:
    """Whether two tables are equal, with equal NaNs. Other versions of fedpipe or Arrow may have written their files.

    The chunks of a table change the pages of its file, but not its values.
    """
    return encode_parquet(first.combine_chunks()) == encode_parquet(second.combine_chunks())


def write_json(path: Path, value: Any) -> str:
    """Write JSON atomically."""
    return write_bytes(path, encode_json(value))


def write_parquet(path: Path, table: pa.Table) -> str:
    """Write a table atomically."""
    return write_bytes(path, encode_parquet(table))


def read_pt(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Read nested dicts of memory-mapped tensors. Only tensors are unpickled. Anything else in the file is an error."""
    import torch

    def is_tensor_tree(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(name, str) and is_tensor_tree(part) for name, part in value.items())
        return isinstance(value, torch.Tensor)

    if not path.is_file():
        raise make_missing_file_error(path)
    if sha256 is not None and (actual_sha256 := compute_file_sha256(path)) != sha256:
        raise _make_damaged_file_error(path, actual_sha256, sha256)
    tree: dict[str, Any] = _call_file_reader(
        path, lambda: torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    )
    if not isinstance(tree, dict) or not is_tensor_tree(tree):
        raise make_unreadable_file_error(path, "not a dictionary of tensors")
    return tree


def read_json(path: Path, sha256: str | None = None) -> Any:
    """Read a JSON file, checked."""
    data = read_verified_bytes(path, sha256)
    return _call_file_reader(path, lambda: json.loads(data))


def read_parquet(path: Path, sha256: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file, checked, or some columns of it."""
    import pyarrow as pa

    data = read_verified_bytes(path, sha256)
    return _call_file_reader(path, lambda: decode_parquet(pa.BufferReader(data), columns))


def decode_parquet(source: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """Decode Parquet data, or some columns, in this thread only.

    A process in which Arrow has started threads sometimes aborts at its end (see also :func:`table_to_frame`).
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(source, pre_buffer=False).read(columns, use_threads=False)


def read_column_names(path: Path) -> list[str]:
    """Read the names of the columns of a Parquet file. Empty if it can't be read."""
    import pyarrow.parquet as pq

    with suppress(Exception):  # any error of Arrow or the system
        return list(pq.ParquetFile(path, pre_buffer=False).schema_arrow.names)
    return []


def table_to_frame(table: pa.Table) -> pd.DataFrame:
    """Convert a table to a pandas frame."""
    return table.to_pandas(use_threads=False)


def is_stored(path: Path) -> bool:
    """Whether a file exists, loose or packed."""
    pack_file, name = archive.locate_pack_member(path)
    return path.is_file() or name in archive.list_pack_members(pack_file)


def format_display_path(path: Path) -> str:
    """Describe the location of a file: its path, or a member of its pack."""
    pack_file, name = archive.locate_pack_member(path)
    return f"{pack_file}/{name}" if _is_packed(path) else str(path)


def find_file_or_pack(path: Path) -> Path:
    """Find the file that contains it: itself or its pack."""
    return archive.locate_pack_member(path)[0] if _is_packed(path) else path


def compute_file_sha256(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        pass
    try:
        return hashlib.sha256(archive.read_pack_member(path)).hexdigest()
    except zipfile.BadZipFile as error:
        raise make_unreadable_file_error(path, error) from error


def read_recorded_sha256(path: Path, record: str | None = None) -> str:
    """Read the SHA-256 in the file's ``record`` (default: its name with .json), which must name the file."""
    record_path = path.with_name(record) if record else path.with_suffix(".json")
    try:
        sha256: str = read_hash_record(record_path)[path.name]
    except (LookupError, TypeError):
        raise ArtifactError(
            f"{record_path} does not record the SHA-256 of {path.name}. Delete both and run again."
        ) from None
    return sha256


def read_hash_record(path: Path) -> Any:
    """Read a JSON file that records several files. Cached until it changes, because each file is looked up in it."""
    try:
        stat = path.stat()
    except OSError:
        return read_json(path)  # raises the error
    return _read_record_cached(path, (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.cache
def _read_record_cached(path: Path, stat: tuple[int, ...]) -> Any:
    return read_json(path)


def is_intact(path: Path, sha256: str) -> bool:
    """Whether the file exists with this SHA-256. Raises a `PackError` if its pack is damaged."""
    try:
        return compute_file_sha256(path) == sha256
    except archive.PackError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ArtifactError):
        return False


def read_bytes(path: Path) -> bytes:
    """Read a file, which may be in a pack."""
    for _ in range(2):  # it may be packed or unpacked in between
        with suppress(FileNotFoundError):
            return path.read_bytes()
        with suppress(FileNotFoundError):
            return archive.read_pack_member(path)
    raise FileNotFoundError(path)


def read_verified_bytes(path: Path, sha256: str | None) -> bytes:
    """Read a file and check its SHA-256."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise make_missing_file_error(path) from None
    except (OSError, zipfile.BadZipFile) as error:
        raise make_unreadable_file_error(path, error) from error
    if sha256 is not None and (actual_sha256 := hashlib.sha256(data).hexdigest()) != sha256:
        raise _make_damaged_file_error(path, actual_sha256, sha256)
    return data


def make_missing_file_error(path: Path) -> ArtifactError:
    """Make the error about a missing file."""
    segments = path.parent.parent.parent / "segments"
    is_lost = path.parent.parent.name == "rounds" and segments.is_dir()  # Snakemake looks only at segments
    advice = f"Delete {segments}, and run its study" if is_lost else "Run its study"
    return ArtifactError(f"{path} is missing. {advice} (`fedpipe run`).")


def _make_damaged_file_error(path: Path, actual_sha256: str, sha256: str) -> ArtifactError:
    subject = f"the SHA-256 of {archive.locate_pack_member(path)[1]}" if _is_packed(path) else "its SHA-256"
    reason = f"{subject} begins with {actual_sha256[:12]} instead of {sha256[:12]}"
    return ArtifactError(f"{find_file_or_pack(path)} is damaged: {reason}. {_format_repair_advice(path)}.")


def make_unreadable_file_error(path: Path, reason: object) -> ArtifactError:
    """Make the error about a file that can't be read."""
    member_prefix = f"{archive.locate_pack_member(path)[1]}: " if _is_packed(path) else ""
    return ArtifactError(
        f"{find_file_or_pack(path)} can't be read ({member_prefix}{reason}). {_format_repair_advice(path)}."
    )


def _is_packed(path: Path) -> bool:
    return archive.is_packable(path) and not path.exists() and archive.locate_pack_member(path)[0].exists()


def _format_repair_advice(path: Path) -> str:
    """Advice for a damaged file."""
    run = path.parent.parent.parent
    if path.name in TENSOR_FILES and path.parent.parent.name == "rounds":  # the rounds after it have been computed
        return f"Delete {run} and run again"
    if not _is_packed(path):
        return "Delete it and run again"
    return f"Delete {run / 'segments'} and run again. Complete rounds are not recomputed"


def _call_file_reader(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:  # any error of a reader means that the file is damaged
        reason = str(error).split("\n", 1)[0]
        raise make_unreadable_file_error(path, reason) from error
