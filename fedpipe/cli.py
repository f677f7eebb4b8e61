"""The command line: commands for people, and one command per stage, which the rules of the Snakefile call; all thin."""

from __future__ import annotations

import difflib
import errno
import inspect
import io
import os
import re
import shlex
import shutil
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from fedpipe import __version__, artifacts
from fedpipe.artifacts import FULL_SCALE, PARAMS, RunFiles, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError, UserError, format_validation_errors, suggest_name
from fedpipe.planned import FORECAST_CORES, Plan

if TYPE_CHECKING:
    from fedpipe import registry
    from fedpipe.config import Section
    from fedpipe.plan import NewPlan

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  #: of a disk, or of a user's share of it
DELETING_COMMANDS = ("prune",)  #: no mistake leads there
PEOPLE_PANEL, STAGES_PANEL, GENERATED_PANEL = (
    "For people",
    "Stages, which Snakemake and DVC call",
    "Generated files, by make docs",
)
PROBE_KIND = "probes"  #: what may be listed, and is no kind of components
LOCAL_PROFILE = "workflow/profiles/local"  #: the profile of `fedpipe run`


class CommandGroup(TyperGroup):
    """The commands, of which those that delete are never suggested."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is meant, or one sentence."""
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close_matches = difflib.get_close_matches(args[0], list(self.commands), n=1)
        is_suggestable = close_matches and close_matches[0] not in DELETING_COMMANDS
        hint = (
            f"did you mean '{close_matches[0]}'?"
            if is_suggestable
            else "`fedpipe --help` lists them; `fedpipe run` runs a study."
        )
        raise SettingsError(f"'{args[0]}' is not a command; {hint}")

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.invoked_subcommand in DELETING_COMMANDS and hasattr(error, "possibilities"):
                error.possibilities = None  # options that it has
            raise


app = typer.Typer(
    cls=CommandGroup,
    help="Federated-learning experiments as one DAG of cached stages, on Snakemake and DVC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

StudyFile = Annotated[Path, typer.Option("--params", help="The study.")]
Scale = Annotated[str, typer.Option("--scale", help="One of the study's scales.")]
PlanFingerprint = Annotated[
    str | None, typer.Option("--said", help="Refuse a plan that says anything else, by its hash.")
]
RunPath = Annotated[Path, typer.Argument(help="A run's folder, results/runs/ALGORITHM/KEY.")]
RoundNumber = Annotated[int, typer.Option("--round", min=1, help="The round.")]
Threads = Annotated[int, typer.Option(min=1, help="Cores to use.")]
Device = Annotated[str, typer.Option(envvar="FEDPIPE_DEVICE", help="As execution.device: auto, cpu or cuda.")]
Stack = Annotated[str, typer.Option(envvar="FEDPIPE_STACK", help="As execution.stack: auto, or clients in one call.")]
Callbacks = Annotated[
    str, typer.Option(envvar="FEDPIPE_CALLBACKS", help="As execution.callbacks, with spaces between.")
]
Graphs = Annotated[bool, typer.Option("--graphs", envvar="FEDPIPE_GRAPHS", help="As execution.graphs.")]
KeepModels = Annotated[str, typer.Option(envvar="FEDPIPE_KEEP_MODELS", help="As artifacts.keep_models.")]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"fedpipe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """Options that come before any command."""


@app.command(rich_help_panel=PEOPLE_PANEL)
def plan(
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings and show the runs; write nothing.")
    ] = False,
    at_once: Annotated[int | None, typer.Option(envvar=FORECAST_CORES, hidden=True)] = None,
) -> None:
    """Check params.yaml, or another study, or all in a folder, and write the plan: runs, keys, jobs."""
    from fedpipe import changes, project
    from fedpipe import plan as planning
    from fedpipe.report import forecast

    if outdated_warning := project.get_outdated_warning(Path()):
        typer.echo(f"fedpipe: {outdated_warning}", err=True)
    study_paths = artifacts.list_studies(params)
    has_several_studies = len(study_paths) > 1
    plans = [_make_plan(path, scale, has_several_studies) for path in study_paths]
    if at_once:
        _require_short_study(plans[0], at_once)
    for study_plan in plans:
        prefix = f"{study_plan.params}: " if has_several_studies else ""
        for sentence in changes.describe_code_changes(study_plan):
            typer.echo(f"fedpipe: {prefix}{sentence}", err=True)
        for warning in study_plan.warnings:
            typer.echo(f"fedpipe: warning: {prefix}{warning}", err=True)
        if dry_run:
            typer.echo("".join(f"{line}\n" for line in study_plan.run_lines), nl=False)
        else:
            planning.write_plan(study_plan)
    remaining_work = forecast.compute_forecast(*plans)
    if has_several_studies:
        unavailable_count = len({path for study_plan in plans for path in study_plan.unavailable_runs})
        unavailable_note = (
            f"; left out are {unavailable_count:,} more, whose data or weights are not here"
            if unavailable_count
            else ""
        )
        run_count = f"{remaining_work.runs:,} run{'' if remaining_work.runs == 1 else 's'} to make"
        typer.echo(
            f"fedpipe: {len(plans)} studies: {run_count}, {remaining_work.rounds:,} rounds in all{unavailable_note}.",
            err=True,
        )
    if remaining_work.known_runs:
        typer.echo(f"fedpipe: {remaining_work}", err=True)
    for sentence in changes.describe_unreadable_plans():
        typer.echo(f"fedpipe: warning: {sentence}", err=True)


@app.command(
    rich_help_panel=PEOPLE_PANEL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF SNAKEMAKE]",
)
def run(
    context: typer.Context,
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
    profile: Annotated[str, typer.Option("--profile", help="Snakemake's profile: a folder, or slurm.")] = LOCAL_PROFILE,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Show the jobs; run nothing.")] = False,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="Jobs at once: cores here, jobs in a cluster's queue.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Start it even if it takes more than a day on this machine.")
    ] = False,
) -> None:
    """Run a whole study: print the snakemake command that does it, and become that command.

    Whatever else stands on the line is passed on to snakemake, as `fedpipe run --quiet rules`.
    """
    _require_single_study(params, scale)
    if not params.is_file():
        raise SettingsError(f"{params}: there is no such file; run from the folder that holds it.")
    StudyFiles.from_params(params, scale)  # a study that has no place is refused
    snakemake_options = list(context.args)
    if snakemake_options and not snakemake_options[0].startswith("-"):
        raise SettingsError(
            f"'{snakemake_options[0]}' can't be run alone, since `fedpipe run` makes all results of a study; "
            f"type `snakemake {shlex.quote(snakemake_options[0])} --profile {shlex.quote(profile)}` for one target, "
            "or --params "
            "for another study."
        )
    if any(word.startswith(("--config", "-C")) for word in snakemake_options):
        raise SettingsError("--config can't be used here; another study is named by --params, and its file says all.")
    snakemake = _find_snakemake()
    if snakemake_options:
        _refuse_unreadable(snakemake_options, params)
    extra_environment = {}
    if not (yes or dry_run) and _is_local_profile(profile):
        cores_option = re.search(r"(?<!\S)(?:--cores|-c)[ =]?(\d+)", " ".join(snakemake_options))
        extra_environment[FORECAST_CORES] = str(
            _count_parallel_runs(profile, int(cores_option[1]) if cores_option else jobs)
        )
    targets = _get_snakemake_targets(artifacts.normalize_study_path(params), scale)
    job_limit = [] if jobs is None else ["--cores" if _is_local_profile(profile) else "--jobs", str(jobs)]
    command = [snakemake, *targets, "--profile", profile, *(["-n"] if dry_run else []), *job_limit, *snakemake_options]
    typer.echo(shlex.join(command), err=True)
    os.execvpe(command[0], command, os.environ | extra_environment)


@app.command(rich_help_panel=PEOPLE_PANEL)
def download(
    name: Annotated[str | None, typer.Argument(help="A data set; by default the study's own.")] = None,
    params: Annotated[Path, typer.Option("--params", help="The study, or a folder of studies.")] = PARAMS,
) -> None:
    """Obtain a data set, check it, store it as tensors; declare the SHA-256 of each file that a study names."""
    from fedpipe.stages import download as stage

    if name is not None and stage.is_planned_dataset(name):
        stage.download_dataset(name)
        return
    failed: list[str] = []
    stored: set[Path] = set()
    for path in artifacts.list_studies(params):
        try:
            typer.echo(stage.declare_dataset(name, path, stored))
        except UserError as error:
            if not params.is_dir():
                raise
            failed.append(f"{path}: {error}")
    if failed:
        raise ArtifactError("\n".join(failed))


@app.command(rich_help_panel=PEOPLE_PANEL)
def partition(
    key: Annotated[str | None, typer.Argument(help="The partition's key in the plan.")] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Print clients x classes of the study's partitions; write nothing.")
    ] = False,
    params: StudyFile = PARAMS,
) -> None:
    """Deal a data set's samples to clients."""
    from fedpipe.stages import partition as stage

    if preview:
        from fedpipe.report.preview import render_preview

        previews = [
            preview_arguments
            for preview_arguments in stage.preview_partitions(params)
            if key in (None, preview_arguments[0])
        ]
        if not previews:
            raise SettingsError(f"'{key}' is not a partition of {params}; without it, all of them are shown.")
        for name, settings, assignment in previews:
            typer.echo(render_preview(name, settings, assignment.class_counts))
            if warning := stage.untested(name, settings, assignment):
                typer.echo(f"fedpipe: warning: {warning}", err=True)
    elif key is None:
        raise SettingsError("KEY: missing; it should be a partition of the plan (--preview shows them all).")
    else:
        stage.partition_dataset(key)


@app.command(rich_help_panel=STAGES_PANEL)
def segment(
    path: RunPath,
    stop: Annotated[int, typer.Option(min=1, help="Run all rounds up to this one that are not complete yet.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = False,
    keep_models: KeepModels = "all",
    callbacks: Callbacks = "",
    needs_collection: Annotated[bool, typer.Option("--collect", help="Then collect all rounds.")] = False,
) -> None:
    """Run consecutive rounds: train, aggregate, evaluate; goes on from what it finds; SIGTERM ends it after a round."""
    from fedpipe.callbacks import CallbackList
    from fedpipe.engine import interrupts
    from fedpipe.report import progress
    from fedpipe.stages import collect as stage

    finished_rounds: list[int] = []

    def explain_sigterm() -> str:
        if finished_rounds:
            return f"{path}: SIGTERM; it ends after round {finished_rounds[-1] + 1}"
        return (
            f"{path}: SIGTERM before a round was done; if this was the end of the job's time, that is shorter than a "
            "round: give the job more, or cut rounds into jobs (execution: {rounds_per_job: 1, clients_per_job: 1})"
        )

    with (
        interrupts.defer_sigterm(explain_sigterm) as has_stop_request,
        CallbackList(callbacks.split(), RunFiles(path), stop) as callback_list,
    ):
        run = _open_run(path, threads, device, stack, graphs, keep_models)
        typer.echo(f"{path}: {run.describe_environment()}")
        for number in progress.track_rounds(path, stop, callback_list.wrap_rounds(run.run_segment(stop))):
            finished_rounds.append(number)
            if number < stop and has_stop_request():
                typer.echo(f"{path}: stopped by SIGTERM after round {number}; the same command goes on from there")
                raise typer.Exit(interrupts.SIGTERM_EXIT_STATUS)
        if needs_collection:
            stage.collect_rounds(run.files, stop, _parse_keep_models(keep_models))


@app.command(rich_help_panel=STAGES_PANEL)
def initialize(path: RunPath) -> None:
    """Write a run's initial server state (round 0), for the DAG of single rounds."""
    _open_run(path, device="cpu").initialize()  # initial models are made on the host: the job asks for no GPU


@app.command(rich_help_panel=STAGES_PANEL)
def train(
    path: RunPath,
    round: RoundNumber,
    block: Annotated[int, typer.Option(min=0, help="Which block of participants.")],
    size: Annotated[int, typer.Option(min=1, help="Participants in a block: execution.clients_per_job.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = False,
) -> None:
    """Train one block of a round's participants."""
    run = _open_run(path, threads, device, stack, graphs)
    ids = run.participants(round)[block * size : (block + 1) * size]
    if not ids:
        raise SettingsError(f"--block: {block} can't be trained; round {round} has no block {block} of {size} clients.")
    artifacts.write_pt(run.files.round(round).block_uploads(block), run.train(round, ids).to_tensors())


@app.command(rich_help_panel=STAGES_PANEL)
def aggregate(
    path: RunPath,
    round: RoundNumber,
    blocks: Annotated[int, typer.Option(min=1, help="Number of the round's blocks.")],
    device: Device = "auto",
) -> None:
    """Combine a round's uploads into the next server state."""
    from fedpipe.engine.block import Block

    run = _open_run(path, device=device)
    files = run.files.round(round)
    run.aggregate(round, [Block.read(files.block_uploads(index)) for index in range(blocks)])


@app.command(rich_help_panel=STAGES_PANEL)
def evaluate(
    path: RunPath,
    round: RoundNumber,
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = False,
    callbacks: Callbacks = "",
) -> None:
    """Measure a round's models; then the round is complete."""
    from fedpipe.callbacks import CallbackList

    run = _open_run(path, threads, device, stack, graphs)
    with CallbackList(callbacks.split(), run.files, round) as callback_list:
        callback_list.call_begin(round - 1)
        run.evaluate(round)
        callback_list.call_round(round)


@app.command(rich_help_panel=STAGES_PANEL)
def collect(
    path: RunPath,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to join.")],
    keep_models: KeepModels = "all",
) -> None:
    """Join the rounds' metrics, matrices, traffic and times into one file each."""
    from fedpipe.stages import collect as stage

    stage.collect_rounds(RunFiles(path), rounds, _parse_keep_models(keep_models))


@app.command(rich_help_panel=STAGES_PANEL)
def probe(
    path: Annotated[Path, typer.Argument(help="A probe's settings, results/probes/ALGORITHM/KEY/ROUND/KIND-KEY.yaml.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
) -> None:
    """Look at what a study's section `probes` asks for in the states of a run; the run stays as it is."""
    from fedpipe.stages import probe as stage

    stage.run_probe(path, _build_execution(device, stack), threads)


@app.command(rich_help_panel=STAGES_PANEL)
def table(params: StudyFile = PARAMS, scale: Scale = FULL_SCALE, plan_fingerprint: PlanFingerprint = None) -> None:
    """Write the result table, metrics.json, the plots' numbers, and the keys of each algorithm's runs."""
    from fedpipe.stages import report as stage

    study_plan = _read_plan(params, scale)
    stage.require_same_plan(study_plan, plan_fingerprint)
    stage.write_files(stage.build_report_files(study_plan))


@app.command(rich_help_panel=STAGES_PANEL)
def figure(
    name: Annotated[str, typer.Argument(help="curves, matrices or partition.")],
    key: Annotated[str | None, typer.Argument(help="The partition's key.")] = None,
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
    plan_fingerprint: PlanFingerprint = None,
) -> None:
    """Draw a figure, as SVG, PDF and PNG."""
    from fedpipe.stages import report as stage

    if name not in ("curves", "matrices", "partition") or (name == "partition" and key is None):
        raise SettingsError(f"'{name}' can't be drawn; it should be curves, matrices, or partition with its key.")
    study_plan = _read_plan(params, scale)
    stage.require_same_plan(study_plan, plan_fingerprint)
    if name == "curves":
        stage.write_figure_curves(study_plan)
    elif name == "matrices":
        stage.write_figure_matrices(study_plan)
    elif key is not None:
        stage.write_figure_partition(study_plan, key)


@app.command(rich_help_panel=PEOPLE_PANEL)
def papers(
    scale: Annotated[str, typer.Option("--scale", help="smoke, reduced or paper.")] = FULL_SCALE,
    plan_fingerprint: PlanFingerprint = None,
) -> None:
    """Write the four papers' pages of what has been run at a scale, published numbers beside measured ones."""
    from fedpipe.papers import make

    make.write_papers(scale, plan_fingerprint)
    typer.echo(f"The pages lie in {make.get_pages_folder(scale) / 'index.html'}")


@app.command(rich_help_panel=PEOPLE_PANEL)
def show(
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
    form: Annotated[
        Literal["markdown", "latex", "csv"],
        typer.Option("--format", help="Or the wide table for a paper, a row a method: LaTeX, or as CSV."),
    ] = "markdown",
) -> None:
    """Print the result table and where the figures lie; of a study with failed runs, what is complete, and why."""
    from fedpipe.stages import report as stage

    study_plan = _read_plan(params, scale)
    _warn_if_stale(study_plan)
    if partial := stage.render_partial_results(study_plan, form):
        typer.echo(partial)
    typer.echo(stage.render_results(study_plan, form))


@app.command(rich_help_panel=PEOPLE_PANEL)
def status(
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again every two seconds, until all is done.")] = False,
) -> None:
    """Show how far each run has come, how long the rest takes, and the end of each failed job's log."""
    from fedpipe.report import status as progress

    progress.show_progress(_read_plan(params, scale), watch)


@app.command(rich_help_panel=STAGES_PANEL)
def record(
    algorithm: Annotated[str, typer.Argument(help="An entry of study.algorithms.")],
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
) -> None:
    """Check that all runs of an algorithm are complete, in the plan's rounds, for DVC to record."""
    study_plan = _read_plan(params, scale)
    if algorithm not in study_plan.algorithms:
        raise SettingsError(f"'{algorithm}' is not in the study; {suggest_name(algorithm, study_plan.algorithms)}")
    for merged_files in dict.fromkeys(cell.merged_files for cell in study_plan.cells if cell.algorithm == algorithm):
        merged_files.check()


@app.command(rich_help_panel=PEOPLE_PANEL)
def trace(
    table: Annotated[Path, typer.Argument(help="A study's table, as results/tables/results.md.")],
    cell: Annotated[str, typer.Argument(help="ALGORITHM.PROTOCOL, or ALGORITHM.POINT.PROTOCOL with a grid.")],
) -> None:
    """Print what a table's cell was made of, back to the data file: settings, hashes, versions, device, commit."""
    import yaml

    from fedpipe.lineage import trace as lineage

    typer.echo(yaml.safe_dump(lineage.trace_cell(table, cell), sort_keys=False, width=120), nl=False)
    _warn_if_stale(Plan.read(table.parent.parent / "plan.json"))


@app.command(rich_help_panel=PEOPLE_PANEL)
def verify(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs' folders; by default all runs of the study.")] = None,
    rerun: Annotated[int, typer.Option(min=0, help="Runs of which a round, drawn at random, is run again.")] = 1,
    params: StudyFile = PARAMS,
    scale: Scale = FULL_SCALE,
) -> None:
    """Hash all files of runs, make the study's tables again, run a round again, and say whether all agree."""
    import itertools
    import random

    from fedpipe.lineage import study
    from fedpipe.lineage import verify as lineage

    if runs:
        verdicts = lineage.verify_runs(runs, rerun, random.Random())
    else:
        study_plan = _read_plan(params, scale)
        paths = [run.path for run in study_plan.runs]
        verdicts = itertools.chain([study.verify_study(study_plan)], lineage.verify_runs(paths, rerun, random.Random()))
    results = []
    for verdict in verdicts:
        typer.echo(verdict.message)
        results.append(verdict)
    typer.echo(lineage.summarize_verification(results))
    if not all(verdict.is_ok for verdict in results):
        raise typer.Exit(1)


@app.command(rich_help_panel=PEOPLE_PANEL)
def diff(
    first: Annotated[str, typer.Argument(metavar="KEY", help="A run's key, or its beginning.")],
    second: Annotated[str, typer.Argument(metavar="KEY", help="Another's.")],
) -> None:
    """Print which settings differ between two runs, and where their numbers part."""
    from fedpipe.lineage import diff as lineage

    typer.echo(lineage.diff_runs(lineage.find_run(first), lineage.find_run(second)))


@app.command(rich_help_panel=PEOPLE_PANEL)
def compare(
    revisions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REV]...", help="Commits, tags or experiments; one alone is compared with what is here."
        ),
    ] = None,
) -> None:
    """Print the tables of commits or experiments side by side: differences by seed, and settings that differ."""
    from fedpipe.lineage import compare as lineage

    told, warnings = lineage.compare_revisions(revisions or [])
    typer.echo(told)
    for warning in warnings:
        typer.echo(f"fedpipe: {warning}", err=True)
    if len(revisions or []) < 2:
        _warn_if_stale(_read_plan(PARAMS, FULL_SCALE))


@app.command(rich_help_panel=PEOPLE_PANEL)
def prune(yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False) -> None:
    """Remove runs, partitions and data that no study here and no commit needs, after showing what that frees."""
    from fedpipe.lineage import prune as lineage
    from fedpipe.report import words

    unneeded_files = lineage.find_unneeded_files()
    removable_files, uncached_files = (
        [files for files in unneeded_files if bool(files.uncached_count) == is_uncached]
        for is_uncached in (False, True)
    )
    for files in uncached_files:
        typer.echo(
            f"{files} ({words.format_bytes(files.size)}) is not in DVC's cache and stays; `dvc commit`, or delete it."
        )
    for files in removable_files:
        typer.echo(f"{words.format_bytes(files.size):>8}  {files}")
    if not removable_files:
        typer.echo("Nothing to remove.")
        return
    typer.echo(f"{words.format_bytes(sum(files.size for files in removable_files)):>8}  in all")
    if yes or typer.confirm("Remove them from this folder?"):
        lineage.remove_files(removable_files)
        typer.echo("Removed; `dvc repro` records that, `dvc gc --all-commits --all-experiments` frees the cache.")


@app.command("list", rich_help_panel=PEOPLE_PANEL)
def list_(
    kind: Annotated[str, typer.Argument(help="algorithms, datasets, models, partitions or probes.")],
) -> None:
    """Print what may be named in params.yaml: a name a line, with a line of what it is."""
    from fedpipe import code, documentation, registry

    if kind == PROBE_KIND:
        summaries = {name: documentation.get_probe_summary(name) for name in code.PROBE_MODULES}
    else:
        component_kind = _find_kind(kind, PROBE_KIND)
        summaries = {
            name: registry.get_docstring_summary(registry.find_component(component_kind, name))
            for name in registry.list_components(component_kind)
        }
    for name, summary in summaries.items():
        typer.echo(f"{name:<{max(map(len, summaries))}}  {summary}")


@app.command(rich_help_panel=PEOPLE_PANEL)
def describe(
    name: Annotated[str, typer.Argument(help="An algorithm, data set, model, partition scheme or probe.")],
) -> None:
    """Print a component's documentation with its parameters and their defaults; of a probe its columns, too."""
    from fedpipe import code, documentation, equations, registry

    kinds = [kind for kind in registry.COMPONENT_KINDS if name in registry.list_components(kind)]
    if not kinds and "." in name:
        kinds = [kind for kind in registry.COMPONENT_KINDS if registry.is_component(kind, name)]
    if not kinds and name in code.PROBE_MODULES:
        typer.echo(documentation.describe_probe(name))
        return
    if not kinds:
        known_names = sorted(
            {component for kind in registry.COMPONENT_KINDS for component in registry.list_components(kind)}
            | {*code.PROBE_MODULES}
        )
        raise SettingsError(f"'{name}' is unknown; {suggest_name(name, known_names)}")
    kind, component_class = (
        kinds[0],
        registry.add_extension_parameters(kinds[0], registry.find_component(kinds[0], name)),
    )
    typer.echo(f"{name} ({kind.name})\n\n{equations.render_docstring(inspect.getdoc(component_class) or '')}\n")
    fields = registry.list_parameters(component_class)
    if fields:
        typer.echo(f"In params.yaml, under {kind.section}:")
    inherited_docs = documentation.get_inherited_docs(component_class)
    for field in fields:
        meaning = (
            f"    # {equations.render_docstring(inherited_docs[field.name])}" if field.name in inherited_docs else ""
        )
        typer.echo(f"  {field.name}: {documentation.format_default(field)}{meaning}")


@app.command(rich_help_panel=GENERATED_PANEL)
def docs(
    page: Annotated[
        str | None, typer.Argument(help="settings, algorithms, datasets, models, partitions or plots.")
    ] = None,
) -> None:
    """Print all keys of params.yaml, or all components of a kind, as a page of Markdown: docs/PAGE.md.

    `plots` is the page of DVC's plots instead, with the libraries that draw them: .dvc/plots/page.html. Without a page
    all of them are written into the clone, and params.schema.json, too.
    """
    from fedpipe import documentation

    if page is None:
        documentation.write_docs()
        return
    pages = {"settings": documentation.render_settings_page, "plots": documentation.render_plots_page}
    typer.echo(pages[page]() if page in pages else documentation.render_components_page(_find_kind(page)), nl=False)


@app.command(rich_help_panel=PEOPLE_PANEL)
def init(
    folder: Annotated[Path, typer.Argument(help="Where; it is made if it is not there.")],
    update: Annotated[
        bool,
        typer.Option("--update", help="Bring the files of a project to this version, but for yours and edited ones."),
    ] = False,
) -> None:
    """Lay out a project of your own: Snakefile and workflow, dvc.yaml, params.yaml, and own.py to begin with."""
    from fedpipe import project

    if not update:
        project.create_project(folder)
        typer.echo(
            f"{folder} is laid out. A study:  cd {shlex.quote(str(folder))} && fedpipe run\n"
            "Its settings stand in params.yaml; own.py has an algorithm to begin with: `prox: {algorithm: own.Prox}`.\n"
            "With DVC:  git init && git add . && git commit -m begin, then dvc repro"
        )
        return
    changed_files, edited_files = project.update_project(folder)
    typer.echo("\n".join(changed_files) if changed_files else "Nothing is new.")
    for name in edited_files:
        typer.echo(f"fedpipe: {name} was edited here and stays; `fedpipe init NEW` has this version's.", err=True)


@app.command("new-algorithm", rich_help_panel=PEOPLE_PANEL)
def new_algorithm(name: Annotated[str, typer.Argument(help="Its name in params.yaml, as my_avg.")]) -> None:
    """Write a commented starting file for an algorithm and its test, in a clone of fedpipe."""
    from fedpipe.new_algorithm import write_algorithm_template

    code, test = write_algorithm_template(name)
    typer.echo(
        f"{code} and {test} are written: FedAvg with a pull, to be changed.\n"
        f"Test it:  pytest {test} tests/algorithms/test_contract.py -k {name}\n"
        f"Run it:   `algorithms: {{{name}: {{}}}}` and `study: {{algorithms: [fedavg, {name}]}}` in params.yaml\n"
        "At last:  make docs"
    )


@app.command(rich_help_panel=PEOPLE_PANEL)
def check(
    name: Annotated[str, typer.Argument(help="An algorithm, as own.Prox or fedavg; with --params a study's method.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter, as mu=0.1; may be repeated.")
    ] = None,
    params: Annotated[
        Path | None, typer.Option("--params", help="A study: NAME is a method of it, with the parameters there.")
    ] = None,
) -> None:
    """Hold an algorithm to the contract; a sentence for each breach, and status 1 where there is one."""
    from fedpipe.testing import command

    sentences = command.run_check(name, set_ or [], params)
    for sentence in sentences:
        typer.echo(sentence)
    if sentences:
        raise typer.Exit(1)
    typer.echo(f"{name} keeps the contract.")


@app.command(rich_help_panel=GENERATED_PANEL)
def schema() -> None:
    """Print the JSON Schema of params.yaml, for editors."""
    from fedpipe import documentation

    typer.echo(documentation.render_schema(), nl=False)


def _find_snakemake() -> str:
    """The snakemake of this environment, which need not be activated, as one would type it."""
    environment_snakemake, path_snakemake = Path(sys.executable).with_name("snakemake"), shutil.which("snakemake")
    if not (path_snakemake or environment_snakemake.is_file()):
        raise SettingsError("snakemake is not installed here; run `make setup`, then `source .venv/bin/activate`.")
    return (
        str(environment_snakemake)
        if environment_snakemake.is_file() and not (path_snakemake and environment_snakemake.samefile(path_snakemake))
        else "snakemake"
    )


def _refuse_unreadable(words: list[str], params: Path) -> None:
    """Refuse what Snakemake can't read: it would print all of its options."""
    from snakemake.cli import get_argument_parser

    def refuse(reason: str) -> NoReturn:
        raise SettingsError(
            f"'{shlex.join(words)}' can't be read by snakemake ({reason}); `fedpipe run --help` and `snakemake --help` "
            f"list the options, and settings belong in {params}."
        )

    parser = get_argument_parser()
    parser.error = refuse
    with suppress(SystemExit), redirect_stdout(io.StringIO()):  # of --help and --version, which snakemake prints later
        parser.parse_args(words)


def _require_short_study(study_plan: NewPlan, parallel_runs: int) -> None:
    """Refuse a study that would keep this machine busy for more than a day."""
    from fedpipe import plan as planning
    from fedpipe.report import forecast

    study_forecast = forecast.compute_forecast(study_plan, cores=parallel_runs)
    if study_forecast.seconds > forecast.DAY:
        other_scales = [
            other_scale
            for other_scale in planning.list_scales(study_plan.params)
            if other_scale not in {study_plan.scale, FULL_SCALE}
        ]
        scale_hint = f", --scale {' or '.join(other_scales)} for a smaller one" if other_scales else ""
        raise SettingsError(
            f"{study_plan.params}: {study_forecast} Type --yes to start it{scale_hint}, or --profile for a cluster."
        )


def _is_local_profile(profile: str) -> bool:
    """Whether jobs under a profile of Snakemake run on this machine, where `cores: all` in it outdoes --jobs."""
    return bool(_read_profile(profile).get("executor", "local") == "local")


def _count_parallel_runs(profile: str, jobs: int | None) -> int:
    """How many runs train at once on this machine: one a core, or a GPU where the profile counts these."""
    limits = (str(limit).partition("=") for limit in _read_profile(profile).get("resources") or ())
    gpus = [int(count) for name, _, count in limits if name == "gpu" and count.isdigit()]
    return min([jobs or os.cpu_count() or 1, *gpus])


def _read_profile(name: str) -> dict[str, Any]:
    """What a profile of Snakemake says; nothing where it can't be read, which snakemake tells."""
    from snakemake.cli import get_profile_dir

    from fedpipe.yaml_text import read_yaml

    profile_dir = get_profile_dir(name)
    try:
        settings = read_yaml(profile_dir[1].read_text(), profile_dir[1]) if profile_dir else None
    except SettingsError:
        settings = None
    return settings if isinstance(settings, dict) else {}


def _find_kind(plural: str, *extra_choices: str) -> registry.ComponentKind:
    """A kind of components by its word; ``extra_choices`` may be asked for, too."""
    from fedpipe import registry

    kinds = {kind.plural: kind for kind in sorted(registry.COMPONENT_KINDS, key=lambda kind: kind.plural)}
    if plural not in kinds:
        raise SettingsError(f"'{plural}' can't be listed; {suggest_name(plural, [*kinds, *extra_choices])}")
    return kinds[plural]


def _make_plan(path: Path, scale: str, has_several_studies: bool) -> NewPlan:
    """The plan of a study; each sentence about a mistake names the study's file, where it is one of several."""
    from fedpipe import plan as planning

    try:
        return planning.make_plan(path, scale)
    except SettingsError as error:
        if not has_several_studies:
            raise
        lines = [line if line.startswith(f"{path}: ") else f"{path}: {line}" for line in str(error).splitlines()]
        raise SettingsError("\n".join(lines)) from None


def _require_single_study(params: Path, scale: str) -> None:
    """Refuse a folder of studies where one is wanted."""
    if params.is_dir():
        command = shlex.join(["snakemake", *_get_snakemake_targets(params, scale), "--profile", LOCAL_PROFILE])
        raise SettingsError(
            f"{params} is a folder, and --params should be one study's file here; `{command}` makes all studies in a "
            "folder."
        )


def _get_snakemake_targets(params: Path, scale: str) -> list[str]:
    """What snakemake is asked for to make a study, or all in a folder."""
    config_arguments = [
        *([] if params == PARAMS else [f"params={params}"]),
        *([] if scale == FULL_SCALE else [f"scale={scale}"]),
    ]
    return ["all", *(["--config", *config_arguments] if config_arguments else [])]


def _read_plan(params: Path, scale: str) -> Plan:
    _require_single_study(params, scale)
    plan_path = StudyFiles.from_params(params, scale).plan
    if not plan_path.is_file():
        if not params.is_file():
            raise SettingsError(f"{params}: there is no such file; run from the folder that holds it.")
        raise ArtifactError(f"{plan_path} is missing; type `{artifacts.format_run_command(params, scale)}` first.")
    return Plan.read(plan_path)


def _warn_if_stale(plan: Plan) -> None:
    """A word to people about a study, or code, that gives other numbers by now than those that they are shown."""
    from fedpipe.stages import report

    if warning := report.get_staleness_warning(plan):
        typer.echo(f"fedpipe: {warning}", err=True)


def _open_run(
    path: Path,
    threads: int = 1,
    device: str = "auto",
    stack: str = "auto",
    graphs: bool = False,
    keep_models: str = "all",
) -> Any:
    from fedpipe.engine.run import open_run

    return open_run(path, _build_execution(device, stack, graphs), threads, _parse_keep_models(keep_models))


def _build_execution(device: str, stack: str, graphs: bool = False) -> Any:
    from fedpipe.config import Execution

    return _build_section(Execution, device=device, stack=_parse_number(stack), graphs=graphs)


def _parse_keep_models(keep_models: str) -> Any:
    from fedpipe.config import Artifacts

    return _build_section(Artifacts, keep_models=_parse_number(keep_models)).keep_models


def _build_section(section: type[Section], **values: Any) -> Any:
    """A section of params.yaml, of which a job is told some by options."""
    from pydantic import ValidationError

    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise SettingsError(
            "\n".join(format_validation_errors(error, values, section.__name__.lower(), lambda _: []))
        ) from None


def _parse_number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def main() -> None:
    """Run the command line; a user's mistake is one sentence and status 2."""
    sys.path.insert(0, str(Path.cwd()))  # own algorithms lie beside params.yaml
    try:
        app()
    except UserError as error:
        typer.echo(f"fedpipe: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        with suppress(OSError):  # both may go to one disk
            typer.echo(f"fedpipe: what it prints can't be written ({error.strerror}).", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it, as Python ends
        sys.exit(2)
