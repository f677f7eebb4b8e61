"""Finds the study of a command, and reads its plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedpipe.cli.group import LOCAL_PROFILE
from fedpipe.core.errors import ArtifactError, SettingsError, UserError
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS, StudyFiles

if TYPE_CHECKING:
    from fedpipe.planning.derived_study import DerivedStudy
    from fedpipe.planning.plan import Plan


def read_plan(params: Path, preset: str) -> Plan:
    """Read the plan of a study. Raises an error if it is missing or if `params` is a folder."""
    from fedpipe.planning.plan import Plan  # here, because pydantic takes a third of the time of a help page
    from fedpipe.settings import loader, parser

    require_single_study(params, preset)
    has_plan = False
    with suppress(SettingsError):  # a missing file may have a path that can't be a study's
        has_plan = StudyFiles.from_params(params, preset).plan.is_file()
    if not has_plan:
        require_existing_study(params)
        if preset != FULL_PRESET:  # raises an error if the study has no such preset
            parser.apply_preset(loader.read_params(params), preset)
    return Plan.read_study(params, preset)


def parse_derived_study(params: Path, preset: str, overrides: Sequence[str]) -> DerivedStudy:
    """Parse options `-S`, which derive a study from `params`."""
    from fedpipe.planning.derived_study import DerivedStudy

    require_single_study(params, preset)
    return DerivedStudy.from_options(params, overrides)


def derive_study(params: Path, preset: str, overrides: Sequence[str] | None) -> Path:
    """Get the study's file. With options `-S`, derive it from `params`, and write it if it is missing or outdated."""
    if not overrides:
        return params
    study = parse_derived_study(params, preset, overrides)
    if study.write_study(preset):
        typer.echo(f"fedpipe: {study.path} is {params} with {study.command_options}.", err=True)
    return study.path


def find_derived_study(params: Path, preset: str, overrides: Sequence[str] | None) -> Path:
    """Get the study's file. With options `-S`, it is the file that `run` with these options derives from `params`."""
    if not overrides:
        return params
    study = parse_derived_study(params, preset, overrides)
    command = layout.format_command("run", params, preset, overrides)
    study.require_unedited_file()
    if study.file_state == "missing":
        raise ArtifactError(f"{study.path} does not exist. Type `{command}` first.")
    if study.file_state == "outdated":
        typer.echo(f"fedpipe: {params} has changed since {study.path} was derived. Type `{command}`.", err=True)
    return study.path


def require_single_study(params: Path, preset: str) -> None:
    """Require a single study instead of a folder."""
    if params.is_dir():
        command = shlex.join(["snakemake", *get_snakemake_arguments(params, preset), "--profile", LOCAL_PROFILE])
        raise SettingsError(
            f"--params: {params} is a folder. Use the file of one study. To run all studies in it, type `{command}`. "
            "To see their progress, add `--html FILE` to `fedpipe status`."
        )


def require_existing_study(params: Path) -> None:
    """Require that a study's file exists, or a folder of studies."""
    if not params.exists():
        raise SettingsError(f"{params}: the file does not exist. Change to the folder that contains it.")


def format_study_error(path: Path, error: UserError) -> str:
    """Format the message of an error. Each line begins with the file of its study."""
    return "\n".join(line if line.startswith(f"{path}: ") else f"{path}: {line}" for line in str(error).splitlines())


def get_snakemake_arguments(params: Path, preset: str) -> list[str]:
    """Target and configuration for Snakemake, for a study or for all studies of a folder."""
    config = [] if params == PARAMS else [f"params={params}"]
    config += [] if preset == FULL_PRESET else [f"preset={preset}"]
    return ["all", *(["--config", *config] if config else [])]


def warn_if_stale(plan: Plan) -> None:
    """Print a warning if the settings or code of a study have changed since its table was made."""
    from fedpipe.report import contents

    if warning := contents.get_staleness_warning(plan):
        typer.echo(f"fedpipe: {warning}", err=True)
