"""The probe stage: what a study looks at in the states of a run, as a table beside what vouches for it."""

from __future__ import annotations

import importlib
from pathlib import Path

from fedpipe import artifacts, code, probing
from fedpipe.artifacts import ProbeFiles, RunFiles
from fedpipe.config import Execution
from fedpipe.engine.run import Run
from fedpipe.errors import ArtifactError


def probe(path: Path, execution: Execution, threads: int = 1) -> None:
    """Compute what a probe's settings ask for; the run itself is not changed.

    Raises
    ------
    ArtifactError
        A state that it needs is gone or damaged, or its round can't be done again as it was.
    SettingsError
        The run's method has no such models.
    """
    files = ProbeFiles(path.with_suffix(""))
    settings = probing.read(files)
    key, label = (above.name for above in list(path.parents)[1:3])
    run, number = Run(RunFiles.of(label, key), execution, threads), settings["round"]
    if number not in run.files.complete():
        raise ArtifactError(f"{run.files.path}: round {number} is not complete; type `fedpipe run` to make it.")
    if not run.files.round(number).server.exists():
        from fedpipe.probes import models

        raise models.gone(run, number)
    kind = importlib.import_module(code.PROBES[settings["kind"]])
    sha256 = artifacts.write_parquet(files.table, kind.probe(run, number, settings))
    artifacts.write_json(files.marker, {files.table.name: sha256, "settings": settings, "made_by": run.made_by()})
