"""Packs the small files of a folder into one ZIP: ``rounds/0001/state.json`` is ``0001/state.json`` in ``rounds.zip``.

Clusters limit the number of files, and cloud storage needs a request for each. Packs are uncompressed ZIP archives
whose bytes depend only on names and contents. They may come from other machines, so a pack with anything except a
round's files, each once, is rejected. This module imports no torch.
"""

from __future__ import annotations

import functools
import io
import os
import re
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

from fedpipe.core.errors import ArtifactError

MEMBER_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  #: time of every member, the earliest possible in ZIP
#: What to type after you deleted damaged files.
RESTORE_ADVICE = "`fedpipe run` computes what is missing, or `dvc checkout PATH` restores what DVC has recorded"
DAMAGE_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
JSON_NAMES, TABLE_NAMES = "state|round|times", "participants|trained|kept|metrics|exchanged|matrices"
#: Files that a pack may contain, without tensors.
MEMBER_PATTERN = re.compile(rf"[0-9]{{4}}/(?:(?:{JSON_NAMES})\.json|(?:{TABLE_NAMES})\.parquet)")


class PackError(ArtifactError):
    """A pack has another format, so that its rounds are unknown."""

    def __init__(self, archive: Path, reason: object) -> None:
        super().__init__(
            f"{archive} is damaged ({reason}). Delete it and {archive.with_name('segments')}. Then {RESTORE_ADVICE}."
        )


def get_pack_path(folder: Path) -> Path:
    """Get the path of a folder's pack."""
    return Path(f"{folder}.zip")


def locate_pack_member(path: Path) -> tuple[Path, str]:
    """Get the pack that may contain a file, and its member name."""
    folder, name = os.path.split(path)  # strings, because each read of a round's file comes here
    parent, round_name = os.path.split(folder)
    return Path(f"{parent}.zip"), f"{round_name}/{name}"


def is_packable(path: Path) -> bool:
    """Whether a pack may contain this file."""
    return bool(MEMBER_PATTERN.fullmatch(f"{path.parent.name}/{path.name}"))


def build_pack(files: Mapping[str, bytes]) -> bytes:
    """Build the bytes of a pack with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, MEMBER_TIMESTAMP), files[name])
    return buffer.getvalue()


def list_pack_members(archive: Path) -> list[str]:
    """List the members of a pack. Empty if there is no pack. Raises a `PackError` if it has another format."""
    try:
        return _open_pack(archive).namelist()
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_pack_intact(archive: Path) -> bool:
    """Whether all members of a pack are intact. True if there is no pack."""
    try:
        return not archive.exists() or _open_pack(archive).testzip() is None
    except DAMAGE_ERRORS:
        return False


def read_pack_member(path: Path) -> bytes:
    """Read a file from its folder's pack.

    Raises
    ------
    FileNotFoundError
        There is no pack, or it does not contain the file.
    zipfile.BadZipFile
        The member is damaged.
    PackError
        The pack is damaged.
    """
    archive, name = locate_pack_member(path)
    zip_file = _open_pack(archive)
    if name not in zip_file.NameToInfo:
        raise FileNotFoundError(path)
    try:
        return zip_file.read(name)
    except DAMAGE_ERRORS as error:
        raise zipfile.BadZipFile(str(error)) from error


def read_pack_members(archive: Path, exclude: Collection[str] = ()) -> dict[str, bytes]:
    """Read all members of a pack except some. Raises a `PackError` if one of them or the pack is damaged."""
    names = [name for name in list_pack_members(archive) if name not in exclude]
    try:
        return {name: _open_pack(archive).read(name) for name in names}
    except DAMAGE_ERRORS as error:
        raise PackError(archive, error) from error


def _open_pack(archive: Path) -> zipfile.ZipFile:
    stat = archive.stat()
    return _open_pack_cached(archive, (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=8)
def _open_pack_cached(archive: Path, stat: tuple[int, ...]) -> zipfile.ZipFile:
    """Open a pack and check its directory. Cached until the file changes."""
    try:
        zip_file = zipfile.ZipFile(archive)
    except FileNotFoundError:
        raise
    except DAMAGE_ERRORS as error:
        raise PackError(archive, error) from error
    assert zip_file.fp is not None
    members, size = zip_file.infolist(), os.fstat(zip_file.fp.fileno()).st_size  # another job may have replaced it
    seen_names: set[str] = set()
    for member in members:
        if not MEMBER_PATTERN.fullmatch(member.orig_filename) or member.orig_filename in seen_names:
            raise PackError(archive, f"{member.orig_filename!r} is not a file of a round, or appears twice")
        is_stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
        if not is_stored or member.compress_size != member.file_size:
            raise PackError(archive, f"{member.orig_filename} is not stored as plain bytes")
        seen_names.add(member.orig_filename)
    if sum(member.file_size for member in members) > size:
        raise PackError(archive, "its members are larger than the file")
    return zip_file
