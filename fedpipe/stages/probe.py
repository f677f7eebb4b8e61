"""The probe stage: what a study looks at in the states of a run, as a table beside what vouches for it."""

from __future__ import annotations

import importlib
from pathlib import Path

from fedpipe import artifacts, code, probing
from fedpipe.artifacts import ProbeFiles, RunFiles
from fedpipe.config import Execution
from fedpipe.engine.run import Run
from fedpipe.errors import ArtifactError


def run_probe(path: Path, execution: Execution, threads: int = 1) -> None:
    """Compute what a probe's settings ask for; the run itself is not changed.

    Raises
    ------
    ArtifactError
        A state that it needs is gone or damaged, or its round can't be done again as it was.
    SettingsError
        The run's method has no such models.
    """
    files = ProbeFiles(path.with_suffix(""))
    settings = probing.read_probe_settings(files)
    key, label = (ancestor.name for ancestor in list(path.parents)[1:3])
    run, number = Run(RunFiles.from_key(label, key), execution, threads), settings["round"]
    if number not in run.files.list_complete_rounds():
        raise ArtifactError(f"{run.files.path}: round {number} is not complete; type `fedpipe run` to make it.")
    if not run.files.round(number).server_state.exists():
        from fedpipe.probes import models

        raise models.make_pruned_state_error(run, number)
    probe_module = importlib.import_module(code.PROBE_MODULES[settings["kind"]])
    sha256 = artifacts.write_parquet(files.table, probe_module.compute_table(run, number, settings))
    artifacts.write_json(
        files.marker, {files.table.name: sha256, "settings": settings, "made_by": run.get_environment()}
    )
