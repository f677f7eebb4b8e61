"""User files in params.yaml, each pinned by its SHA-256. A key contains the SHA-256 and not the path."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from fedpipe.core.storage import files

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
STAT_PREFIX = "stat:"  #: prefix of a stat fingerprint, which may replace a SHA-256


class PinnedFile(NamedTuple):
    """A file or folder that a component reads."""

    parameter: str  #: parameter with the path
    path: Path  #: path of the file or folder
    sha256: str | None  #: declared SHA-256, for a folder that of the list of its files and their hashes

    def explain_mismatch(self, section: str, download_command: str | None) -> str | None:
        """Message if the SHA-256 is not declared or the file differs from it. None if the file matches.

        ``section`` of params.yaml names the file. ``download_command`` declares the SHA-256, if there is one.
        """
        if self.sha256 is None and not self.path.exists():
            return f"{section}.{self.parameter}: {self.path} is missing. Put it there, or change the path."
        if self.sha256 is None:
            advice = (
                f"Run `{download_command}`, which fills it in"
                if download_command
                else f"Use {compute_content_sha256(self.path)}"
            )
            return f"{section}.sha256: missing for {self.path}. {advice}."
        if self.path.exists() and (actual_sha256 := compute_content_sha256(self.path)) != self.sha256:
            advice = (
                f"remove {section}.sha256 and run `{download_command}`" if download_command else "declare this SHA-256"
            )
            return (
                f"{section}.sha256: {self.sha256} is declared, but {self.path} has the SHA-256 {actual_sha256}. "
                f"Restore the declared file, or {advice}."
            )
        return None


def compute_content_sha256(path: Path) -> str:
    """SHA-256 of a file, or of the list of a folder's files and their hashes. Cached until something changes."""
    return _compute_content_sha256_cached(path, compute_stat_fingerprint(path))


def compute_stat_fingerprint(path: Path) -> str:
    """Hash of size and times, which changes if the file or any file of the folder is written or replaced."""
    digest = hashlib.sha256()
    for file in list_files(path):
        stat = file.stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n".encode())
    return f"{STAT_PREFIX}{digest.hexdigest()[:16]}"


def has_file_changed(path: Path, fingerprint: str) -> bool:
    """Whether a file has changed or is missing, compared with its stat fingerprint or its SHA-256."""
    return (
        compute_stat_fingerprint(path) != fingerprint
        if fingerprint.startswith(STAT_PREFIX)
        else not files.is_intact(path, fingerprint)
    )


@functools.cache
def _compute_content_sha256_cached(path: Path, fingerprint: str) -> str:
    if not path.is_dir():
        return files.compute_file_sha256(path)
    lines = (f"{files.compute_file_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in list_files(path))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def list_files(path: Path) -> list[Path]:
    """List the file, or all files of a folder and of linked folders, sorted by name. Empty if it does not exist."""
    if path.is_dir():
        walk = os.walk(path, followlinks=True)
        paths = (Path(folder, name) for folder, _, names in walk for name in names)
        return sorted((path for path in paths if path.is_file()), key=lambda file: file.as_posix())
    return [path] if path.is_file() else []
