"""A folder's small files as one file: what ``rounds.zip`` holds as ``0001/state.json`` is ``rounds/0001/state.json``.

File systems of clusters limit the number of files, and a store in the cloud answers a request for each. Packs are plain
ZIP archives without compression, whose bytes depend on names and contents alone. They come from other machines too: one
that holds anything else than a round's files, each once and as it is, is refused as a whole. Imports no torch.
"""

from __future__ import annotations

import functools
import io
import re
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

from fedpipe.core.errors import ArtifactError

MEMBER_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  #: of every member; the earliest that ZIP knows
DAMAGE_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
JSON_NAMES, TABLE_NAMES = "state|round|times", "participants|trained|kept|metrics|exchanged|matrices"
MEMBER_PATTERN = re.compile(
    rf"[0-9]{{4}}/(?:(?:{JSON_NAMES})\.json|(?:{TABLE_NAMES})\.parquet)"
)  #: all that a pack takes; no tensors


class PackError(ArtifactError):
    """A pack as a whole is not what we wrote, so that nobody knows which rounds there were."""

    def __init__(self, archive: Path, reason: object) -> None:
        super().__init__(
            f"{archive} is damaged ({reason}); delete it and {archive.with_name('segments')}, then `dvc checkout` "
            "brings back what DVC has recorded, and `fedpipe run` makes the rest again."
        )


def pack_path(folder: Path) -> Path:
    """The pack of a folder."""
    return Path(f"{folder}.zip")


def locate_member(path: Path) -> tuple[Path, str]:
    """The pack that a file of a folder's folder may lie in, and its name there."""
    return pack_path(path.parent.parent), f"{path.parent.name}/{path.name}"


def is_packable(path: Path) -> bool:
    """Whether a pack takes this file of a folder's folder."""
    return bool(MEMBER_PATTERN.fullmatch(locate_member(path)[1]))


def build_pack(files: Mapping[str, bytes]) -> bytes:
    """The bytes of a pack with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, MEMBER_TIMESTAMP), files[name])
    return buffer.getvalue()


def list_members(archive: Path) -> list[str]:
    """The members of a pack; none where there is no such pack.

    Raises
    ------
    ArchiveError
        It is no pack of ours.
    """
    try:
        return _open_pack(archive).namelist()
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_pack_intact(archive: Path) -> bool:
    """Whether all members of a pack are whole, if there is one."""
    try:
        return not archive.exists() or _open_pack(archive).testzip() is None
    except DAMAGE_ERRORS:
        return False


def read_member(path: Path) -> bytes:
    """The bytes of a file that lies in its folder's pack.

    Raises
    ------
    FileNotFoundError
        There is no pack, or it does not hold the file.
    zipfile.BadZipFile
        This member of the pack is damaged.
    ArchiveError
        The pack is.
    """
    archive, name = locate_member(path)
    zip_file = _open_pack(archive)
    if name not in zip_file.NameToInfo:
        raise FileNotFoundError(path)
    try:
        return zip_file.read(name)
    except DAMAGE_ERRORS as error:
        raise zipfile.BadZipFile(str(error)) from error


def read_members(archive: Path, exclude: Collection[str] = ()) -> dict[str, bytes]:
    """All members of a pack but some.

    Raises
    ------
    ArchiveError
        It is no pack of ours, or one of these members is damaged.
    """
    members = {}
    for name in list_members(archive):
        if name not in exclude:
            try:
                members[name] = _open_pack(archive).read(name)
            except DAMAGE_ERRORS as error:
                raise PackError(archive, error) from error
    return members


def _open_pack(archive: Path) -> zipfile.ZipFile:
    stat = archive.stat()
    return _open_pack_cached(archive, archive.absolute(), (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=8)
def _open_pack_cached(archive: Path, _: Path, stat: tuple[int, ...]) -> zipfile.ZipFile:
    """A pack's directory, read and checked once for as long as the pack is the same file."""
    try:
        zip_file = zipfile.ZipFile(archive)
    except FileNotFoundError:
        raise
    except DAMAGE_ERRORS as error:
        raise PackError(archive, error) from error
    members, size = zip_file.infolist(), stat[-1]
    seen_names: set[str] = set()
    for member in members:
        if not MEMBER_PATTERN.fullmatch(member.orig_filename) or member.orig_filename in seen_names:
            raise PackError(archive, f"{member.orig_filename!r} in it is not a file of a round, or appears twice")
        is_stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
        if not is_stored or member.compress_size != member.file_size:
            raise PackError(archive, f"{member.orig_filename} in it is not stored as it is")
        seen_names.add(member.orig_filename)
    if sum(member.file_size for member in members) > size:
        raise PackError(archive, "it tells of more bytes than it has")
    return zip_file
