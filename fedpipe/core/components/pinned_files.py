"""Files of the user's own that a study names, each pinned by its SHA-256: a key holds that, and not where they lie."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from fedpipe.core.storage import files

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
STAT_PREFIX = "stat:"  #: how a stamp begins, where a SHA-256 may stand too


class PinnedFile(NamedTuple):
    """A file, or a folder, that a component is made of."""

    parameter: str  #: the parameter that names it
    path: Path  #: where it lies
    sha256: str | None  #: as declared; of a folder that of the list of its files, each with its own

    def explain_mismatch(self, section: str, download_command: str | None) -> str | None:
        """One sentence if the file is not declared, or is there and another one than was; None where all is well.

        Parameters
        ----------
        section
            The section of the study in which it is named.
        download_command
            The command that declares it; None where no command does.
        """
        if self.sha256 is None and not self.path.exists():
            return f"{section}.{self.parameter}: {self.path} is missing; it should lie there."
        if self.sha256 is None:
            advice = (
                f"run `{download_command}`, which fills it in"
                if download_command
                else f"it should be {compute_content_sha256(self.path)}"
            )
            return f"{section}.sha256: missing for {self.path}; {advice}."
        if self.path.exists() and (actual_sha256 := compute_content_sha256(self.path)) != self.sha256:
            advice = f"remove {section}.sha256 and run `{download_command}`" if download_command else "declare that"
            return (
                f"{section}.sha256: {self.sha256} is declared, but {self.path} is another file, with SHA-256 "
                f"{actual_sha256}; "
                f"put the declared one there, or, if this one is meant, {advice}."
            )
        return None


def compute_content_sha256(path: Path) -> str:
    """SHA-256 of a file, or of the list of a folder's files, each with its own; once as long as nothing changes."""
    return _compute_content_sha256_cached(path, compute_stat_fingerprint(path))


def compute_stat_fingerprint(path: Path) -> str:
    """What changes when a file, or anything in a folder, is written or replaced, by its size and times alone."""
    digest = hashlib.sha256()
    for file in _list_files(path):
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n".encode())
    return f"{STAT_PREFIX}{digest.hexdigest()[:16]}"


def has_changed(path: Path, fingerprint: str) -> bool:
    """Whether a file is another, or gone, since it was marked: with its stamp where it may be large, or its SHA-256."""
    return (
        compute_stat_fingerprint(path) != fingerprint
        if fingerprint.startswith(STAT_PREFIX)
        else not files.is_intact(path, fingerprint)
    )


@functools.cache
def _compute_content_sha256_cached(path: Path, fingerprint: str) -> str:
    if not path.is_dir():
        return files.sha256_of(path)
    lines = (f"{files.sha256_of(file)}  {file.relative_to(path).as_posix()}\n" for file in _list_files(path))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _list_files(path: Path) -> list[Path]:
    """The file, or all of a folder in the order of their names; none where nothing is there."""
    if path.is_dir():
        return sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.as_posix())
    return [path] if path.is_file() else []
