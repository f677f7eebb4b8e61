"""The diagnostic stage: writes the table of a diagnostic and its record."""

from __future__ import annotations

import importlib
from pathlib import Path

from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import write_json, write_parquet
from fedpipe.core.storage.layout import DiagnosticFiles, RunFiles
from fedpipe.engine.run import Run
from fedpipe.planning import diagnostics
from fedpipe.settings.execution import Execution


def run_diagnostic(path: Path, execution: Execution, threads: int = 1) -> None:
    """Compute a diagnostic from its settings. The run is not changed.

    Raises
    ------
    ArtifactError
        A state is missing or damaged, or its round can't be reproduced.
    SettingsError
        The run's method has no such models.
    """
    files = DiagnosticFiles(path.with_suffix(""))
    settings = diagnostics.read_diagnostic_settings(files)
    key, label = (ancestor.name for ancestor in list(path.parents)[1:3])
    run, number = Run(RunFiles.from_key(label, key), execution, threads), settings["round"]
    if number not in run.files.list_complete_rounds():
        raise ArtifactError(f"{run.files.path}: round {number} is not complete. Type `fedpipe run` to complete it.")
    if not run.files.get_round_files(number).server_state.exists():
        from fedpipe.engine.diagnostics import local_models

        raise local_models.make_pruned_state_error(run, number)
    diagnostic_module = importlib.import_module(code_digest.DIAGNOSTIC_MODULES[settings["kind"]])
    sha256 = write_parquet(files.table, diagnostic_module.compute_table(run, number, settings))
    write_json(files.marker, {files.table.name: sha256, "settings": settings, "made_by": run.get_environment()})
