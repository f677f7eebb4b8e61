"""Snakemake's records of what made each file, and the results that they are of, as DVC brings them.

DVC versions both. With `cache.type` symlink or hardlink they are links to its cache, and read-only. Snakemake writes a
record in place, which would change the cache, and it makes no file again that is read-only. After a `dvc pull`
that was cut short, a table may be there without its record, and Snakemake would take it for that of any settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snakemake.io import _IOFile
from snakemake.persistence import ParamsChange
from snakemake.persistence.file import FilePersistence


def mend() -> None:
    """Let Snakemake write records as new files, make linked results again, and trust none that lacks its record."""
    write, changed, is_protected = FilePersistence._io_write, FilePersistence.params_changed, _IOFile.protected

    def replace(persistence: FilePersistence, subject: str, value: Any, name: str, *mode: int) -> None:
        # Killed between these two, the output counts as incomplete: its mark goes after its record has come.
        Path(persistence._record_path(subject, name)).unlink(missing_ok=True)
        write(persistence, subject, value, name, *mode)

    def has_changed(persistence: FilePersistence, job: Any, file: Any = None) -> Any:
        found = changed(persistence, job, file)
        if "scale" not in job.params.keys():  # noqa: SIM118  # its files are under keys, which are of their settings
            return found
        unknown = {output for output in job.output if persistence.metadata(output) is None}
        return found | ParamsChange(only_new={"no record"} if unknown else set(), files=unknown)

    async def is_protected_here(file: Any) -> bool:
        return await is_protected(file) and Path(file).stat().st_nlink == 1

    FilePersistence._io_write, _IOFile.protected = replace, is_protected_here
    FilePersistence.has_metadata, FilePersistence.params_changed = lambda *_: True, has_changed
