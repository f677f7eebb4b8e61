"""Files of the user's own that a study names, each pinned by its SHA-256: a key holds that, and not where they lie."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from fedpipe import artifacts

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
STAMP = "stat:"  #: how a stamp begins, where a SHA-256 may stand too


class Pin(NamedTuple):
    """A file, or a folder, that a component is made of."""

    field: str  #: the parameter that names it
    path: Path  #: where it lies
    sha256: str | None  #: as declared; of a folder that of the list of its files, each with its own

    def mistake(self, section: str, download: str | None) -> str | None:
        """One sentence if the file is not declared, or is there and another one than was; None where all is well.

        Parameters
        ----------
        section
            The section of the study in which it is named.
        download
            The command that declares it; None where no command does.
        """
        if self.sha256 is None and not self.path.exists():
            return f"{section}.{self.field}: {self.path} is missing; it should lie there."
        if self.sha256 is None:
            mend = f"run `{download}`, which fills it in" if download else f"it should be {content(self.path)}"
            return f"{section}.sha256: missing for {self.path}; {mend}."
        if self.path.exists() and (found := content(self.path)) != self.sha256:
            mend = f"remove {section}.sha256 and run `{download}`" if download else "declare that"
            return (
                f"{section}.sha256: {self.sha256} is declared, but {self.path} is another file, with SHA-256 {found}; "
                f"put the declared one there, or, if this one is meant, {mend}."
            )
        return None


def content(path: Path) -> str:
    """SHA-256 of a file, or of the list of a folder's files, each with its own; once as long as nothing changes."""
    return _content(path, stamp(path))


def stamp(path: Path) -> str:
    """What changes when a file, or anything in a folder, is written or replaced, by its size and times alone."""
    held = hashlib.sha256()
    for file in _files(path):
        found = file.stat()
        held.update(f"{file} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}\n".encode())
    return f"{STAMP}{held.hexdigest()[:16]}"


def changed(path: Path, mark: str) -> bool:
    """Whether a file is another, or gone, since it was marked: with its stamp where it may be large, or its SHA-256."""
    return stamp(path) != mark if mark.startswith(STAMP) else not artifacts.intact(path, mark)


@functools.cache
def _content(path: Path, stamp: str) -> str:
    if not path.is_dir():
        return artifacts.sha256_of(path)
    lines = (f"{artifacts.sha256_of(file)}  {file.relative_to(path).as_posix()}\n" for file in _files(path))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    """The file, or all of a folder in the order of their names; none where nothing is there."""
    if path.is_dir():
        return sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.as_posix())
    return [path] if path.is_file() else []
