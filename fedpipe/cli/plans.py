"""Reads the plan of a study for a command."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedpipe.cli.group import LOCAL_PROFILE
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS, StudyFiles
from fedpipe.planning.plan import Plan


def read_plan(params: Path, preset: str) -> Plan:
    """Read the plan of a study. Raises an error if it is missing or if `params` is a folder."""
    require_single_study(params, preset)
    plan_path = StudyFiles.from_params(params, preset).plan
    if not plan_path.is_file():
        if not params.is_file():
            raise SettingsError(f"{params}: the file does not exist. Change to the folder that contains it.")
        raise ArtifactError(f"{plan_path} is missing. Type `{layout.format_run_command(params, preset)}` first.")
    return Plan.read(plan_path)


def require_single_study(params: Path, preset: str) -> None:
    """Require a single study instead of a folder."""
    if params.is_dir():
        command = shlex.join(["snakemake", *get_snakemake_targets(params, preset), "--profile", LOCAL_PROFILE])
        raise SettingsError(
            f"--params: {params} is a folder. Use the file of one study, or type `{command}` to run all studies in it."
        )


def get_snakemake_targets(params: Path, preset: str) -> list[str]:
    """Snakemake targets of a study, or of all studies in a folder."""
    config_arguments = [
        *([] if params == PARAMS else [f"params={params}"]),
        *([] if preset == FULL_PRESET else [f"preset={preset}"]),
    ]
    return ["all", *(["--config", *config_arguments] if config_arguments else [])]
