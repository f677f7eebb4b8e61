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

from fedpipe.errors import ArtifactError

MOMENT = (1980, 1, 1, 0, 0, 0)  #: of every member; the earliest that ZIP knows
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
JSON, TABLES = "state|round|times", "participants|trained|kept|metrics|exchanged|matrices"
MEMBER = re.compile(rf"[0-9]{{4}}/(?:(?:{JSON})\.json|(?:{TABLES})\.parquet)")  #: all that a pack takes; no tensors


class ArchiveError(ArtifactError):
    """A pack as a whole is not what we wrote, so that nobody knows which rounds there were."""

    def __init__(self, archive: Path, reason: object) -> None:
        super().__init__(
            f"{archive} is damaged ({reason}); delete it and {archive.with_name('segments')}, then `dvc checkout` "
            "brings back what DVC has recorded, and `fedpipe run` makes the rest again."
        )


def of(folder: Path) -> Path:
    """The pack of a folder."""
    return Path(f"{folder}.zip")


def holding(path: Path) -> tuple[Path, str]:
    """The pack that a file of a folder's folder may lie in, and its name there."""
    return of(path.parent.parent), f"{path.parent.name}/{path.name}"


def takes(path: Path) -> bool:
    """Whether a pack takes this file of a folder's folder."""
    return bool(MEMBER.fullmatch(holding(path)[1]))


def join(files: Mapping[str, bytes]) -> bytes:
    """The bytes of a pack with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, MOMENT), files[name])
    return buffer.getvalue()


def names(archive: Path) -> list[str]:
    """The members of a pack; none where there is no such pack.

    Raises
    ------
    ArchiveError
        It is no pack of ours.
    """
    try:
        return _opened(archive).namelist()
    except (FileNotFoundError, NotADirectoryError):
        return []


def sound(archive: Path) -> bool:
    """Whether all members of a pack are whole, if there is one."""
    try:
        return not archive.exists() or _opened(archive).testzip() is None
    except DAMAGED:
        return False


def read(path: Path) -> bytes:
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
    archive, name = holding(path)
    opened = _opened(archive)
    if name not in opened.NameToInfo:
        raise FileNotFoundError(path)
    try:
        return opened.read(name)
    except DAMAGED as error:
        raise zipfile.BadZipFile(str(error)) from error


def contents(archive: Path, without: Collection[str] = ()) -> dict[str, bytes]:
    """All members of a pack but some.

    Raises
    ------
    ArchiveError
        It is no pack of ours, or one of these members is damaged.
    """
    found = {}
    for name in names(archive):
        if name not in without:
            try:
                found[name] = _opened(archive).read(name)
            except DAMAGED as error:
                raise ArchiveError(archive, error) from error
    return found


def _opened(archive: Path) -> zipfile.ZipFile:
    stat = archive.stat()
    return _open(archive, archive.absolute(), (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=8)
def _open(archive: Path, _: Path, stat: tuple[int, ...]) -> zipfile.ZipFile:
    """A pack's directory, read and checked once for as long as the pack is the same file."""
    try:
        opened = zipfile.ZipFile(archive)
    except FileNotFoundError:
        raise
    except DAMAGED as error:
        raise ArchiveError(archive, error) from error
    members, size = opened.infolist(), stat[-1]
    seen: set[str] = set()
    for member in members:
        if not MEMBER.fullmatch(member.orig_filename) or member.orig_filename in seen:
            raise ArchiveError(archive, f"{member.orig_filename!r} in it is not a file of a round, or appears twice")
        stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
        if not stored or member.compress_size != member.file_size:
            raise ArchiveError(archive, f"{member.orig_filename} in it is not stored as it is")
        seen.add(member.orig_filename)
    if sum(member.file_size for member in members) > size:
        raise ArchiveError(archive, "it tells of more bytes than it has")
    return opened
