"""Reads the plan of a study for a command."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedpipe.cli.group import LOCAL_PROFILE
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import FULL_SCALE, PARAMS, StudyFiles
from fedpipe.planning.plan import Plan


def read_plan(params: Path, scale: str) -> Plan:
    """Read the plan of a study. Raises an error if it is missing or if `params` is a folder."""
    require_single_study(params, scale)
    plan_path = StudyFiles.from_params(params, scale).plan
    if not plan_path.is_file():
        if not params.is_file():
            raise SettingsError(f"{params}: there is no such file; run from the folder that holds it.")
        raise ArtifactError(f"{plan_path} is missing; type `{layout.format_run_command(params, scale)}` first.")
    return Plan.read(plan_path)


def require_single_study(params: Path, scale: str) -> None:
    """Require a single study instead of a folder."""
    if params.is_dir():
        command = shlex.join(["snakemake", *get_snakemake_targets(params, scale), "--profile", LOCAL_PROFILE])
        raise SettingsError(
            f"{params} is a folder, and --params should be one study's file here; `{command}` makes all studies in a "
            "folder."
        )


def get_snakemake_targets(params: Path, scale: str) -> list[str]:
    """Snakemake targets of a study, or of all studies in a folder."""
    config_arguments = [
        *([] if params == PARAMS else [f"params={params}"]),
        *([] if scale == FULL_SCALE else [f"scale={scale}"]),
    ]
    return ["all", *(["--config", *config_arguments] if config_arguments else [])]
