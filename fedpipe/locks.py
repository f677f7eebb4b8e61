"""Several snakemakes at work in one folder: each leaves the locks of the others where they are.

Snakemake locks what a study makes and reads, so that studies that share nothing unfinished can run at the same time.
When it ends it deletes the whole folder of locks, those of the others too, and fails if another does so at that moment.
"""

from __future__ import annotations

from pathlib import Path

from snakemake.persistence.file import FilePersistence


def patch_locks() -> None:
    """Let Snakemake delete its own locks only; not for ``snakemake --unlock``, which deletes all."""
    FilePersistence._delete_locks = _delete_own_locks


def _delete_own_locks(persistence: FilePersistence) -> None:
    for lock in persistence._lockfile.values():
        Path(lock).unlink(missing_ok=True)
    persistence._lockfile.clear()
