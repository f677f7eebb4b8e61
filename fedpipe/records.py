"""Snakemake's records of what made each file, and the results that they are of, where DVC linked them to its cache.

DVC versions both, and with `cache.type` symlink or hardlink what it brings here is a link to its cache, which it makes
read-only. Snakemake writes a record in place, which would change the cache; and it makes no file again that is
read-only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snakemake.io import _IOFile
from snakemake.persistence.file import FilePersistence


def mend() -> None:
    """Let Snakemake write a record as a new file, and make results again that share their bytes with another file."""
    write, is_protected = FilePersistence._io_write, _IOFile.protected

    def replace(persistence: FilePersistence, subject: str, value: Any, name: str, *mode: int) -> None:
        # Killed between these two, the output counts as incomplete: its mark goes after its record has come.
        Path(persistence._record_path(subject, name)).unlink(missing_ok=True)
        write(persistence, subject, value, name, *mode)

    async def is_protected_here(file: Any) -> bool:
        return await is_protected(file) and Path(file).stat().st_nlink == 1

    FilePersistence._io_write, _IOFile.protected = replace, is_protected_here
