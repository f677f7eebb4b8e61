"""A folder's small files as one file: what ``rounds.zip`` holds as ``0001/state.json`` is ``rounds/0001/state.json``.

File systems of clusters limit the number of files, and a store in the cloud answers a request for each. Packs are plain
ZIP archives without compression, whose bytes depend on names and contents alone. Imports no torch.
"""

from __future__ import annotations

import functools
import io
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MOMENT = (1980, 1, 1, 0, 0, 0)  #: of every member; the earliest that ZIP knows
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)  #: what a harmed archive raises


def of(folder: Path) -> Path:
    """The pack of a folder."""
    return Path(f"{folder}.zip")


def holding(path: Path) -> tuple[Path, str]:
    """The pack that a file of a folder's folder may lie in, and its name there."""
    return of(path.parent.parent), f"{path.parent.name}/{path.name}"


def join(files: Mapping[str, bytes]) -> bytes:
    """The bytes of a pack with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, MOMENT), files[name])
    return buffer.getvalue()


def names(archive: Path) -> list[str]:
    """The members of a pack; none where there is no such pack, or a harmed one."""
    with suppress(FileNotFoundError, *DAMAGED):
        return _opened(archive).namelist()
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
        The pack is damaged, or this member of it.
    """
    archive, name = holding(path)
    try:
        return _opened(archive).read(name)
    except KeyError:
        raise FileNotFoundError(path) from None
    except DAMAGED as error:
        raise zipfile.BadZipFile(str(error)) from error


def contents(archive: Path) -> dict[str, bytes]:
    """All members of a pack but those that are damaged."""
    found = {}
    for name in names(archive):
        with suppress(FileNotFoundError, *DAMAGED):
            found[name] = _opened(archive).read(name)
    return found


def _opened(archive: Path) -> zipfile.ZipFile:
    stat = archive.stat()
    return _open(archive.absolute(), (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=8)
def _open(archive: Path, _: tuple[int, ...]) -> zipfile.ZipFile:
    """A pack's directory, read once for as long as the pack is the same file."""
    return zipfile.ZipFile(archive)
