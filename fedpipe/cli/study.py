"""Commands for a study: plan, run, show, status, papers, store."""

from __future__ import annotations

import getpass
import io
import itertools
import os
import shlex
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from fedpipe.cli.group import (
    LOCAL_PROFILE,
    USER_PANEL,
    Overrides,
    PlanFingerprint,
    Preset,
    StudyFile,
    app,
    require_study_path,
)
from fedpipe.cli.plans import (
    derive_study,
    find_derived_study,
    format_study_error,
    get_snakemake_arguments,
    parse_derived_study,
    read_plan,
    require_existing_study,
    require_single_study,
    warn_if_stale,
)
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS, StudyFiles

if TYPE_CHECKING:
    from fedpipe.planning.planner import NewPlan

#: Options of Snakemake that print something else than the progress of jobs.
PRINTING_OPTIONS = frozenset({"--delete-all-output", "--delete-temp-output", "--lint", "--report"})


@app.command("plan", rich_help_panel=USER_PANEL)
def plan_studies(
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings and print the runs, and write nothing.")
    ] = False,
) -> None:
    """Check the settings of a study, or of all studies in a folder, and write the plan of its runs and jobs."""
    from fedpipe.cli.scaffold import project
    from fedpipe.planning import code_changes, planner, search
    from fedpipe.report import forecast

    if outdated_warning := project.get_outdated_warning(Path()):
        typer.echo(f"fedpipe: {outdated_warning}", err=True)
    if overrides and dry_run:
        plans = [parse_derived_study(params, preset, overrides).make_plan(preset)]
    else:
        study_paths = layout.list_studies_without_readings(derive_study(params, preset, overrides))
        plans = [_make_plan(path, preset, len(study_paths) > 1) for path in study_paths]
    has_several_studies = len(plans) > 1
    for study_plan in plans:
        prefix = f"{study_plan.params}: " if has_several_studies else ""
        for change in itertools.chain(
            code_changes.describe_invalidated_runs(study_plan), code_changes.describe_runs_from_other_code(study_plan)
        ):
            typer.echo(f"fedpipe: {prefix}{change}", err=True)
        for warning in study_plan.warnings:
            typer.echo(f"fedpipe: warning: {prefix}{warning}", err=True)
        if bound := search.describe_largest_search_size(study_plan):
            typer.echo(f"fedpipe: {prefix}{bound}", err=True)
        if dry_run:
            typer.echo("".join(f"{prefix}{line}\n" for line in study_plan.run_descriptions), nl=False)
        else:
            planner.write_plan(study_plan)
    remaining_work = forecast.forecast_remaining_work(*plans)
    if has_several_studies:
        unavailable_count = len({path for study_plan in plans for path in study_plan.unavailable_runs})
        unavailable_note = (
            f" Skipped runs, because data or weights are missing: {unavailable_count:,}." if unavailable_count else ""
        )
        run_count = f"{remaining_work.runs:,} run{'' if remaining_work.runs == 1 else 's'} to compute"
        typer.echo(
            f"fedpipe: {len(plans)} studies: {run_count}, {remaining_work.rounds:,} rounds in total.{unavailable_note}",
            err=True,
        )
    if remaining_work.known_runs:
        typer.echo(f"fedpipe: {remaining_work}", err=True)
    for warning in code_changes.describe_unreadable_plans():
        typer.echo(f"fedpipe: warning: {warning}", err=True)


@app.command(
    "run",
    rich_help_panel=USER_PANEL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [SNAKEMAKE OPTIONS]",
)
def run_studies(
    context: typer.Context,
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
    overrides: Overrides = None,
    profile: Annotated[str, typer.Option("--profile", help="Snakemake profile: a folder, or slurm.")] = LOCAL_PROFILE,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Print the jobs without running them.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "-j", "--jobs", min=1, help="Parallel jobs: CPU cores on this machine, or jobs in the queue of a cluster."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print Snakemake's output instead of one line per job.")
    ] = False,
) -> None:
    """Run a study. Completed runs are reused, and interrupted runs resume.

    This prints and executes a snakemake command. Other options, such as `--forcerun table`, are passed to Snakemake.
    """
    from fedpipe.cli.scaffold import project

    require_single_study(params, preset)
    require_existing_study(params)
    if not Path("Snakefile").is_file() and not {"-s", "--snakefile"}.intersection(context.args):
        raise SettingsError(
            "Snakefile: this folder has none, so it is not a project. Change to your project, or make this folder one "
            "with `fedpipe init .`, which keeps your params.yaml."
        )
    StudyFiles.from_params(params, preset)  # raises an error if the preset can't be part of a path
    _require_user_name()
    _require_writable_cache_folder()
    if outdated_warning := project.get_outdated_warning(Path()):
        typer.echo(f"fedpipe: {outdated_warning}", err=True)
    snakemake_options = context.args
    if snakemake_options and not snakemake_options[0].startswith("-"):
        raise SettingsError(
            f"'{snakemake_options[0]}' can't be run alone, because `fedpipe run` makes all results of a study. Type "
            f"`snakemake {shlex.quote(snakemake_options[0])} --profile {shlex.quote(profile)}` for one target, or use "
            "--params for another study."
        )
    if any(word.startswith(("--config", "-C")) for word in snakemake_options):
        raise SettingsError("--config can't be used with `fedpipe run`. Use --params for another study.")
    snakemake = _find_snakemake()
    if snakemake_options:
        _check_snakemake_options(snakemake_options, params)
    params = derive_study(params, preset, overrides)
    command = [snakemake, *get_snakemake_arguments(layout.normalize_study_path(params), preset), "--profile", profile]
    has_other_output = not PRINTING_OPTIONS.isdisjoint(word.partition("=")[0] for word in snakemake_options)
    command += [] if verbose or has_other_output else ["--logger-fedpipe-progress"]
    command += ["-n"] if dry_run else []
    command += [] if jobs is None else ["--cores" if _is_local_profile(profile) else "--jobs", str(jobs)]
    command += snakemake_options
    typer.echo(shlex.join(command), err=True)
    if Path(sys.executable).with_name("snakemake").is_file():
        command[:1] = [sys.executable, "-P", "-m", "snakemake_logger_plugin_fedpipe"]  # the same without pandas
    os.execvp(command[0], command)


def _require_user_name() -> None:
    """Reject a user without a name, such as that of `docker run --user 1234`. Snakemake would print a traceback."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        raise SettingsError(
            f"LOGNAME: user {os.getuid()} has no name here, and Snakemake needs one. Set LOGNAME to any name."
        ) from None


def _require_writable_cache_folder() -> None:
    """Reject a home folder in which Snakemake can't make its cache, such as that of another user in a container."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(OSError, RuntimeError):  # RuntimeError without a home folder
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise SettingsError(
            f"HOME: Snakemake can't write its cache to {folder}. Set XDG_CACHE_HOME to a folder that you can write to."
        )


@app.command("papers", rich_help_panel=USER_PANEL)
def write_paper_pages(
    preset: Annotated[str, typer.Option("--preset", help="Preset: full, reduced or smoke.")] = FULL_PRESET,
    plan_fingerprint: PlanFingerprint = None,
) -> None:
    """Write the pages of the four recomputed papers, with published numbers next to measured ones."""
    from fedpipe.papers import make

    make.write_paper_pages(preset, plan_fingerprint)
    typer.echo(f"The pages are in {make.get_pages_folder(preset) / 'index.html'}")


@app.command("store", rich_help_panel=USER_PANEL)
def store_runs(
    params: Annotated[
        Path,
        typer.Option("--params", help="Study file, or a folder with all studies in it.", callback=require_study_path),
    ] = layout.PAPERS,
    preset: Preset = FULL_PRESET,
) -> None:
    """Store the accuracies of finished runs as text next to their studies, so that git can keep them."""
    from fedpipe.papers import recording

    require_existing_study(params)
    recorded_studies = list(recording.record_runs_of_studies(layout.list_studies(params), preset))
    for recorded in recorded_studies:
        typer.echo(recorded.message, err=not recorded.is_current)
    if not all(recorded.is_current for recorded in recorded_studies):
        raise typer.Exit(1)


@app.command("show", rich_help_panel=USER_PANEL)
def show_results(
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
    overrides: Overrides = None,
    output_format: Annotated[
        Literal["markdown", "latex", "csv"],
        typer.Option("--format", help="latex and csv print a table for a paper, with one row per method."),
    ] = "markdown",
) -> None:
    """Print the result table and the paths of the figures. If runs failed, print the complete part and the errors."""
    from fedpipe.report import contents
    from fedpipe.report.data import StudyData

    study_plan = read_plan(find_derived_study(params, preset, overrides), preset)
    warn_if_stale(study_plan)
    if partial := contents.render_partial_results(study_plan, output_format):
        typer.echo(partial)
    typer.echo(contents.render_results(StudyData(study_plan), output_format))


@app.command("status", rich_help_panel=USER_PANEL)
def show_status(
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
    overrides: Overrides = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Refresh every two seconds, and the page of --html every ten, until all runs are complete."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a web page with curves, also for a folder of studies."),
    ] = None,
) -> None:
    """Show the progress of each run, the remaining time, and the end of the log of each failed job."""
    params = find_derived_study(params, preset, overrides)
    study_plan = None if params.is_dir() and html else read_plan(params, preset)  # raises an error if there is no plan
    if study_plan and not watch:
        warn_if_stale(study_plan)
    if html is None:
        from fedpipe.report import status_table

        status_table.show_progress(lambda: read_plan(params, preset), watch)
    else:
        from fedpipe.report import status_page

        status_page.update_status_page(params, preset, html, watch)


def _find_snakemake() -> str:
    """Find the snakemake of this environment, as you would type it. The environment need not be activated."""
    environment_snakemake, path_snakemake = Path(sys.executable).with_name("snakemake"), shutil.which("snakemake")
    if environment_snakemake.is_file() and not (path_snakemake and environment_snakemake.samefile(path_snakemake)):
        return str(environment_snakemake)
    if path_snakemake is None:
        raise SettingsError("snakemake is not installed. Type `make setup`, then `source .venv/bin/activate`.")
    return "snakemake"


def _check_snakemake_options(words: list[str], params: Path) -> None:
    """Raise an error for options that Snakemake can't parse, because Snakemake would print all of its options."""
    from snakemake.cli import get_argument_parser
    from snakemake.exceptions import CliException

    def raise_error(reason: str) -> NoReturn:
        raise SettingsError(
            f"Snakemake can't parse '{shlex.join(words)}' ({reason}). Type `fedpipe run --help` or `snakemake --help` "
            f"to list the options, and change settings in {params}."
        )

    parser = get_argument_parser()
    parser.error = raise_error
    with suppress(SystemExit), redirect_stdout(io.StringIO()):  # of --help and --version, which snakemake prints later
        try:
            parser.parse_args(words)
        except CliException as error:
            raise_error(str(error))


def _is_local_profile(profile: str) -> bool:
    """Whether a profile of Snakemake runs jobs on this machine, where its `cores: all` would override --jobs."""
    from snakemake.cli import get_argument_parser

    with suppress(SystemExit), redirect_stderr(io.StringIO()):  # Snakemake itself reports an unreadable profile
        return get_argument_parser(profiles=[profile]).parse_args([]).executor in (None, "local")
    return True


def _make_plan(path: Path, preset: str, has_several_studies: bool) -> NewPlan:
    """Make the plan of a study. With several studies, each error names the file of its study."""
    from fedpipe.planning import planner

    try:
        return planner.make_plan(path, preset)
    except SettingsError as error:
        if not has_several_studies:
            raise
        raise SettingsError(format_study_error(path, error)) from None
