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
from fedpipe.artifacts import PAPER, PARAMS, RunFiles, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError, UserError, nearest, sentences
from fedpipe.planned import AT_ONCE, Plan

if TYPE_CHECKING:
    from fedpipe import registry
    from fedpipe.config import Section
    from fedpipe.plan import NewPlan

FULL = (errno.ENOSPC, errno.EDQUOT)  #: of a disk, or of a user's share of it
DELETING = ("prune",)  #: no mistake leads there
PEOPLE, STAGES, GENERATED = "For people", "Stages, which Snakemake and DVC call", "Generated files, by make docs"
PROBES = "probes"  #: what may be listed, and is no kind of components
LOCAL = "workflow/profiles/local"  #: the profile of `fedpipe run`


class Commands(TyperGroup):
    """The commands, of which those that delete are never suggested."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is meant, or one sentence."""
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(args[0], list(self.commands), n=1)
        meant = close and close[0] not in DELETING
        hint = f"did you mean '{close[0]}'?" if meant else "`fedpipe --help` lists them; `fedpipe run` runs a study."
        raise SettingsError(f"'{args[0]}' is not a command; {hint}")

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.invoked_subcommand in DELETING and hasattr(error, "possibilities"):
                error.possibilities = None  # options that it has
            raise


app = typer.Typer(
    cls=Commands,
    help="Federated-learning experiments as one DAG of cached stages, on Snakemake and DVC.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

StudyFile = Annotated[Path, typer.Option("--params", help="The study.")]
Scale = Annotated[str, typer.Option("--scale", help="One of the study's scales.")]
Said = Annotated[str | None, typer.Option("--said", help="Refuse a plan that says anything else, by its hash.")]
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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedpipe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """Options that come before any command."""


@app.command(rich_help_panel=PEOPLE)
def plan(
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings and show the runs; write nothing.")
    ] = False,
    at_once: Annotated[int | None, typer.Option(envvar=AT_ONCE, hidden=True)] = None,
) -> None:
    """Check params.yaml, or another study, or all in a folder, and write the plan: runs, keys, jobs."""
    from fedpipe import changes, project
    from fedpipe import plan as planning
    from fedpipe.report import forecast

    if outdated := project.outdated(Path()):
        typer.echo(f"fedpipe: {outdated}", err=True)
    found = artifacts.studies(params)
    several = len(found) > 1
    plans = [_planned(path, scale, several) for path in found]
    if at_once:
        _refuse_long(plans[0], at_once)
    for made in plans:
        which = f"{made.params}: " if several else ""
        for sentence in changes.told(made):
            typer.echo(f"fedpipe: {which}{sentence}", err=True)
        for warning in made.warnings:
            typer.echo(f"fedpipe: warning: {which}{warning}", err=True)
        if dry_run:
            typer.echo("".join(f"{line}\n" for line in made.listed), nl=False)
        else:
            planning.write(made)
    left = forecast.forecast(*plans)
    if several:
        absent = len({path for made in plans for path in made.absent})
        others = f"; left out are {absent:,} more, whose data or weights are not here" if absent else ""
        runs = f"{left.runs:,} run{'' if left.runs == 1 else 's'} to make"
        typer.echo(f"fedpipe: {len(plans)} studies: {runs}, {left.rounds:,} rounds in all{others}.", err=True)
    if left.known:
        typer.echo(f"fedpipe: {left}", err=True)
    for sentence in changes.unread():
        typer.echo(f"fedpipe: warning: {sentence}", err=True)


@app.command(
    rich_help_panel=PEOPLE,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF SNAKEMAKE]",
)
def run(
    context: typer.Context,
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
    profile: Annotated[str, typer.Option("--profile", help="Snakemake's profile: a folder, or slurm.")] = LOCAL,
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
    _refuse_folder(params, scale)
    if not params.is_file():
        raise SettingsError(f"{params}: there is no such file; run from the folder that holds it.")
    StudyFiles.of(params, scale)  # a study that has no place is refused
    further = list(context.args)
    if further and not further[0].startswith("-"):
        raise SettingsError(
            f"'{further[0]}' can't be run alone, since `fedpipe run` makes all results of a study; "
            f"type `snakemake {shlex.quote(further[0])} --profile {shlex.quote(profile)}` for one target, or --params "
            "for another study."
        )
    if any(word.startswith(("--config", "-C")) for word in further):
        raise SettingsError("--config can't be used here; another study is named by --params, and its file says all.")
    snakemake = _snakemake()
    if further:
        _refuse_unreadable(further, params)
    told = {}
    if not (yes or dry_run) and _runs_here(profile):
        cores = re.search(r"(?<!\S)(?:--cores|-c)[ =]?(\d+)", " ".join(further))
        told[AT_ONCE] = str(_at_once(profile, int(cores[1]) if cores else jobs))
    all_of_it = _everything(artifacts.study(params), scale)
    limit = [] if jobs is None else ["--cores" if _runs_here(profile) else "--jobs", str(jobs)]
    command = [snakemake, *all_of_it, "--profile", profile, *(["-n"] if dry_run else []), *limit, *further]
    typer.echo(shlex.join(command), err=True)
    os.execvpe(command[0], command, os.environ | told)


@app.command(rich_help_panel=PEOPLE)
def download(
    name: Annotated[str | None, typer.Argument(help="A data set; by default the study's own.")] = None,
    params: Annotated[Path, typer.Option("--params", help="The study, or a folder of studies.")] = PARAMS,
) -> None:
    """Obtain a data set, check it, store it as tensors; declare the SHA-256 of each file that a study names."""
    from fedpipe.stages import download as stage

    if name is not None and stage.is_planned(name):
        stage.download(name)
        return
    failed: list[str] = []
    stored: set[Path] = set()
    for path in artifacts.studies(params):
        try:
            typer.echo(stage.declare(name, path, stored))
        except UserError as error:
            if not params.is_dir():
                raise
            failed.append(f"{path}: {error}")
    if failed:
        raise ArtifactError("\n".join(failed))


@app.command(rich_help_panel=PEOPLE)
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
        from fedpipe.report import preview as layout

        found = [dealt for dealt in stage.preview(params) if key in (None, dealt[0])]
        if not found:
            raise SettingsError(f"'{key}' is not a partition of {params}; without it, all of them are shown.")
        for name, settings, dealt in found:
            typer.echo(layout.text(name, settings, dealt.class_counts))
            if warning := stage.untested(name, settings, dealt):
                typer.echo(f"fedpipe: warning: {warning}", err=True)
    elif key is None:
        raise SettingsError("KEY: missing; it should be a partition of the plan (--preview shows them all).")
    else:
        stage.partition(key)


@app.command(rich_help_panel=STAGES)
def segment(
    path: RunPath,
    stop: Annotated[int, typer.Option(min=1, help="Run all rounds up to this one that are not complete yet.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = False,
    keep_models: KeepModels = "all",
    callbacks: Callbacks = "",
    collected: Annotated[bool, typer.Option("--collect", help="Then collect all rounds.")] = False,
) -> None:
    """Run consecutive rounds: train, aggregate, evaluate; goes on from what it finds; SIGTERM ends it after a round."""
    from fedpipe.callbacks import Watch
    from fedpipe.engine import interrupts
    from fedpipe.report import progress
    from fedpipe.stages import collect as stage

    done: list[int] = []

    def told() -> str:
        if done:
            return f"{path}: SIGTERM; it ends after round {done[-1] + 1}"
        return (
            f"{path}: SIGTERM before a round was done; if this was the end of the job's time, that is shorter than a "
            "round: give the job more, or cut rounds into jobs (execution: {rounds_per_job: 1, clients_per_job: 1})"
        )

    with interrupts.deferred(told) as asked_to_stop, Watch(callbacks.split(), RunFiles(path), stop) as watch:
        run = _open(path, threads, device, stack, graphs, keep_models)
        typer.echo(f"{path}: {run.place()}")
        for number in progress.told(path, stop, watch.rounds(run.segment(stop))):
            done.append(number)
            if number < stop and asked_to_stop():
                typer.echo(f"{path}: stopped by SIGTERM after round {number}; the same command goes on from there")
                raise typer.Exit(interrupts.STOPPED)
        if collected:
            stage.collect(run.files, stop, _kept(keep_models))


@app.command(rich_help_panel=STAGES)
def initialize(path: RunPath) -> None:
    """Write a run's initial server state (round 0), for the DAG of single rounds."""
    _open(path, device="cpu").initialize()  # initial models are made on the host: the job asks for no GPU


@app.command(rich_help_panel=STAGES)
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
    run = _open(path, threads, device, stack, graphs)
    ids = run.participants(round)[block * size : (block + 1) * size]
    if not ids:
        raise SettingsError(f"--block: {block} can't be trained; round {round} has no block {block} of {size} clients.")
    artifacts.write_pt(run.files.round(round).block(block), run.train(round, ids).tree())


@app.command(rich_help_panel=STAGES)
def aggregate(
    path: RunPath,
    round: RoundNumber,
    blocks: Annotated[int, typer.Option(min=1, help="Number of the round's blocks.")],
    device: Device = "auto",
) -> None:
    """Combine a round's uploads into the next server state."""
    from fedpipe.engine.block import Block

    run = _open(path, device=device)
    files = run.files.round(round)
    run.aggregate(round, [Block.read(files.block(index)) for index in range(blocks)])


@app.command(rich_help_panel=STAGES)
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
    from fedpipe.callbacks import Watch

    run = _open(path, threads, device, stack, graphs)
    with Watch(callbacks.split(), run.files, round) as watch:
        watch.begin(round - 1)
        run.evaluate(round)
        watch.round(round)


@app.command(rich_help_panel=STAGES)
def collect(
    path: RunPath,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to join.")],
    keep_models: KeepModels = "all",
) -> None:
    """Join the rounds' metrics, matrices, traffic and times into one file each."""
    from fedpipe.stages import collect as stage

    stage.collect(RunFiles(path), rounds, _kept(keep_models))


@app.command(rich_help_panel=STAGES)
def probe(
    path: Annotated[Path, typer.Argument(help="A probe's settings, results/probes/ALGORITHM/KEY/ROUND/KIND-KEY.yaml.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
) -> None:
    """Look at what a study's section `probes` asks for in the states of a run; the run stays as it is."""
    from fedpipe.stages import probe as stage

    stage.probe(path, _execution(device, stack), threads)


@app.command(rich_help_panel=STAGES)
def table(params: StudyFile = PARAMS, scale: Scale = PAPER, said: Said = None) -> None:
    """Write the result table, metrics.json, the plots' numbers, and the keys of each algorithm's runs."""
    from fedpipe.stages import report as stage

    made = _plan(params, scale)
    stage.refuse_another(made, said)
    stage.write(stage.contents(made))


@app.command(rich_help_panel=STAGES)
def figure(
    name: Annotated[str, typer.Argument(help="curves, matrices or partition.")],
    key: Annotated[str | None, typer.Argument(help="The partition's key.")] = None,
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
    said: Said = None,
) -> None:
    """Draw a figure, as SVG, PDF and PNG."""
    from fedpipe.stages import report as stage

    if name not in ("curves", "matrices", "partition") or (name == "partition" and key is None):
        raise SettingsError(f"'{name}' can't be drawn; it should be curves, matrices, or partition with its key.")
    made = _plan(params, scale)
    stage.refuse_another(made, said)
    if name == "curves":
        stage.write_figure_curves(made)
    elif name == "matrices":
        stage.write_figure_matrices(made)
    elif key is not None:
        stage.write_figure_partition(made, key)


@app.command(rich_help_panel=PEOPLE)
def papers(
    scale: Annotated[str, typer.Option("--scale", help="smoke, reduced or paper.")] = PAPER, said: Said = None
) -> None:
    """Write the four papers' pages of what has been run at a scale, published numbers beside measured ones."""
    from fedpipe.papers import make

    make.write(scale, said)
    typer.echo(f"The pages lie in {make.place(scale) / 'index.html'}")


@app.command(rich_help_panel=PEOPLE)
def show(
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
    form: Annotated[
        Literal["markdown", "latex", "csv"],
        typer.Option("--format", help="Or the wide table for a paper, a row a method: LaTeX, or as CSV."),
    ] = "markdown",
) -> None:
    """Print the result table and where the figures lie; of a study with failed runs, what is complete, and why."""
    from fedpipe.stages import report as stage

    made = _plan(params, scale)
    _tell_overtaken(made)
    if partial := stage.partial(made, form):
        typer.echo(partial)
    typer.echo(stage.show(made, form))


@app.command(rich_help_panel=PEOPLE)
def status(
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again every two seconds, until all is done.")] = False,
) -> None:
    """Show how far each run has come, how long the rest takes, and the end of each failed job's log."""
    from fedpipe.report import status as progress

    progress.show(_plan(params, scale), watch)


@app.command(rich_help_panel=STAGES)
def record(
    algorithm: Annotated[str, typer.Argument(help="An entry of study.algorithms.")],
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
) -> None:
    """Check that all runs of an algorithm are complete, in the plan's rounds, for DVC to record."""
    made = _plan(params, scale)
    if algorithm not in made.algorithms:
        raise SettingsError(f"'{algorithm}' is not in the study; {nearest(algorithm, made.algorithms)}")
    for joined in dict.fromkeys(cell.joined for cell in made.cells if cell.algorithm == algorithm):
        joined.check()


@app.command(rich_help_panel=PEOPLE)
def trace(
    table: Annotated[Path, typer.Argument(help="A study's table, as results/tables/results.md.")],
    cell: Annotated[str, typer.Argument(help="ALGORITHM.PROTOCOL, or ALGORITHM.POINT.PROTOCOL with a grid.")],
) -> None:
    """Print what a table's cell was made of, back to the data file: settings, hashes, versions, device, commit."""
    import yaml

    from fedpipe.lineage import trace as lineage

    typer.echo(yaml.safe_dump(lineage.trace(table, cell), sort_keys=False, width=120), nl=False)
    _tell_overtaken(Plan.read(table.parent.parent / "plan.json"))


@app.command(rich_help_panel=PEOPLE)
def verify(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs' folders; by default all runs of the study.")] = None,
    rerun: Annotated[int, typer.Option(min=0, help="Runs of which a round, drawn at random, is run again.")] = 1,
    params: StudyFile = PARAMS,
    scale: Scale = PAPER,
) -> None:
    """Hash all files of runs, make the study's tables again, run a round again, and say whether all agree."""
    import itertools
    import random

    from fedpipe.lineage import study
    from fedpipe.lineage import verify as lineage

    if runs:
        verdicts = lineage.verify(runs, rerun, random.Random())
    else:
        made = _plan(params, scale)
        paths = [run.path for run in made.runs]
        verdicts = itertools.chain([study.verify(made)], lineage.verify(paths, rerun, random.Random()))
    found = []
    for verdict in verdicts:
        typer.echo(verdict.said)
        found.append(verdict)
    typer.echo(lineage.summary(found))
    if not all(verdict.holds for verdict in found):
        raise typer.Exit(1)


@app.command(rich_help_panel=PEOPLE)
def diff(
    one: Annotated[str, typer.Argument(metavar="KEY", help="A run's key, or its beginning.")],
    other: Annotated[str, typer.Argument(metavar="KEY", help="Another's.")],
) -> None:
    """Print which settings differ between two runs, and where their numbers part."""
    from fedpipe.lineage import diff as lineage

    typer.echo(lineage.diff(lineage.find(one), lineage.find(other)))


@app.command(rich_help_panel=PEOPLE)
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

    told, warnings = lineage.compare(revisions or [])
    typer.echo(told)
    for warning in warnings:
        typer.echo(f"fedpipe: {warning}", err=True)
    if len(revisions or []) < 2:
        _tell_overtaken(_plan(PARAMS, PAPER))


@app.command(rich_help_panel=PEOPLE)
def prune(yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False) -> None:
    """Remove runs, partitions and data that no study here and no commit needs, after showing what that frees."""
    from fedpipe.lineage import prune as lineage
    from fedpipe.report import words

    found = lineage.unneeded()
    spare, lost = ([part for part in found if bool(part.uncached) == kind] for kind in (False, True))
    for part in lost:
        typer.echo(f"{part} ({words.size(part.size)}) is not in DVC's cache and stays; `dvc commit`, or delete it.")
    for part in spare:
        typer.echo(f"{words.size(part.size):>8}  {part}")
    if not spare:
        typer.echo("Nothing to remove.")
        return
    typer.echo(f"{words.size(sum(part.size for part in spare)):>8}  in all")
    if yes or typer.confirm("Remove them from this folder?"):
        lineage.remove(spare)
        typer.echo("Removed; `dvc repro` records that, `dvc gc --all-commits --all-experiments` frees the cache.")


@app.command("list", rich_help_panel=PEOPLE)
def list_(
    kind: Annotated[str, typer.Argument(help="algorithms, datasets, models, partitions or probes.")],
) -> None:
    """Print what may be named in params.yaml: a name a line, with a line of what it is."""
    from fedpipe import code, documentation, registry

    if kind == PROBES:
        told = {name: documentation.probe_summary(name) for name in code.PROBES}
    else:
        found = _kind(kind, PROBES)
        told = {name: registry.summary(registry.find(found, name)) for name in registry.names(found)}
    for name, summary in told.items():
        typer.echo(f"{name:<{max(map(len, told))}}  {summary}")


@app.command(rich_help_panel=PEOPLE)
def describe(
    name: Annotated[str, typer.Argument(help="An algorithm, data set, model, partition scheme or probe.")],
) -> None:
    """Print a component's documentation with its parameters and their defaults; of a probe its columns, too."""
    from fedpipe import code, documentation, equations, registry

    kinds = [kind for kind in registry.KINDS if name in registry.names(kind)]
    if not kinds and "." in name:
        kinds = [kind for kind in registry.KINDS if registry.is_a(kind, name)]
    if not kinds and name in code.PROBES:
        typer.echo(documentation.probe(name))
        return
    if not kinds:
        known = sorted({component for kind in registry.KINDS for component in registry.names(kind)} | {*code.PROBES})
        raise SettingsError(f"'{name}' is unknown; {nearest(name, known)}")
    kind, found = kinds[0], registry.documented(kinds[0], registry.find(kinds[0], name))
    typer.echo(f"{name} ({kind.name})\n\n{equations.plain(inspect.getdoc(found) or '')}\n")
    fields = registry.parameters_of(found)
    if fields:
        typer.echo(f"In params.yaml, under {kind.section}:")
    told = documentation.inherited(found)
    for field in fields:
        meaning = f"    # {equations.plain(told[field.name])}" if field.name in told else ""
        typer.echo(f"  {field.name}: {documentation.default(field)}{meaning}")


@app.command(rich_help_panel=GENERATED)
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
        documentation.write()
        return
    pages = {"settings": documentation.settings, "plots": documentation.plots_page}
    typer.echo(pages[page]() if page in pages else documentation.markdown(_kind(page)), nl=False)


@app.command(rich_help_panel=PEOPLE)
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
        project.init(folder)
        typer.echo(
            f"{folder} is laid out. A study:  cd {shlex.quote(str(folder))} && fedpipe run\n"
            "Its settings stand in params.yaml; own.py has an algorithm to begin with: `prox: {algorithm: own.Prox}`.\n"
            "With DVC:  git init && git add . && git commit -m begin, then dvc repro"
        )
        return
    changed, kept = project.update(folder)
    typer.echo("\n".join(changed) if changed else "Nothing is new.")
    for name in kept:
        typer.echo(f"fedpipe: {name} was edited here and stays; `fedpipe init NEW` has this version's.", err=True)


@app.command("new-algorithm", rich_help_panel=PEOPLE)
def new_algorithm(name: Annotated[str, typer.Argument(help="Its name in params.yaml, as my_avg.")]) -> None:
    """Write a commented starting file for an algorithm and its test, in a clone of fedpipe."""
    from fedpipe import new_algorithm as starting

    code, test = starting.write(name)
    typer.echo(
        f"{code} and {test} are written: FedAvg with a pull, to be changed.\n"
        f"Test it:  pytest {test} tests/algorithms/test_contract.py -k {name}\n"
        f"Run it:   `algorithms: {{{name}: {{}}}}` and `study: {{algorithms: [fedavg, {name}]}}` in params.yaml\n"
        "At last:  make docs"
    )


@app.command(rich_help_panel=PEOPLE)
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

    sentences = command.check(name, set_ or [], params)
    for sentence in sentences:
        typer.echo(sentence)
    if sentences:
        raise typer.Exit(1)
    typer.echo(f"{name} keeps the contract.")


@app.command(rich_help_panel=GENERATED)
def schema() -> None:
    """Print the JSON Schema of params.yaml, for editors."""
    from fedpipe import documentation

    typer.echo(documentation.schema(), nl=False)


def _snakemake() -> str:
    """The snakemake of this environment, which need not be activated, as one would type it."""
    beside, found = Path(sys.executable).with_name("snakemake"), shutil.which("snakemake")
    if not (found or beside.is_file()):
        raise SettingsError("snakemake is not installed here; run `make setup`, then `source .venv/bin/activate`.")
    return str(beside) if beside.is_file() and not (found and beside.samefile(found)) else "snakemake"


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


def _refuse_long(made: NewPlan, at_once: int) -> None:
    """Refuse a study that would keep this machine busy for more than a day."""
    from fedpipe import plan as planning
    from fedpipe.report import forecast

    found = forecast.forecast(made, cores=at_once)
    if found.seconds > forecast.DAY:
        others = [other for other in planning.scales(made.params) if other not in {made.scale, PAPER}]
        smaller = f", --scale {' or '.join(others)} for a smaller one" if others else ""
        raise SettingsError(f"{made.params}: {found} Type --yes to start it{smaller}, or --profile for a cluster.")


def _runs_here(profile: str) -> bool:
    """Whether jobs under a profile of Snakemake run on this machine, where `cores: all` in it outdoes --jobs."""
    return bool(_profile(profile).get("executor", "local") == "local")


def _at_once(profile: str, jobs: int | None) -> int:
    """How many runs train at once on this machine: one a core, or a GPU where the profile counts these."""
    limits = (str(limit).partition("=") for limit in _profile(profile).get("resources") or ())
    gpus = [int(count) for name, _, count in limits if name == "gpu" and count.isdigit()]
    return min([jobs or os.cpu_count() or 1, *gpus])


def _profile(name: str) -> dict[str, Any]:
    """What a profile of Snakemake says; nothing where it can't be read, which snakemake tells."""
    from snakemake.cli import get_profile_dir

    from fedpipe.yaml_text import read_yaml

    found = get_profile_dir(name)
    try:
        settings = read_yaml(found[1].read_text(), found[1]) if found else None
    except SettingsError:
        settings = None
    return settings if isinstance(settings, dict) else {}


def _kind(plural: str, *others: str) -> registry.Kind:
    """A kind of components by its word; ``others`` may be asked for, too."""
    from fedpipe import registry

    kinds = {kind.plural: kind for kind in sorted(registry.KINDS, key=lambda kind: kind.plural)}
    if plural not in kinds:
        raise SettingsError(f"'{plural}' can't be listed; {nearest(plural, [*kinds, *others])}")
    return kinds[plural]


def _planned(path: Path, scale: str, several: bool) -> NewPlan:
    """The plan of a study; each sentence about a mistake names the study's file, where it is one of several."""
    from fedpipe import plan as planning

    try:
        return planning.make(path, scale)
    except SettingsError as error:
        if not several:
            raise
        told = [line if line.startswith(f"{path}: ") else f"{path}: {line}" for line in str(error).splitlines()]
        raise SettingsError("\n".join(told)) from None


def _refuse_folder(params: Path, scale: str) -> None:
    """Refuse a folder of studies where one is wanted."""
    if params.is_dir():
        command = shlex.join(["snakemake", *_everything(params, scale), "--profile", LOCAL])
        raise SettingsError(
            f"{params} is a folder, and --params should be one study's file here; `{command}` makes all studies in a "
            "folder."
        )


def _everything(params: Path, scale: str) -> list[str]:
    """What snakemake is asked for to make a study, or all in a folder."""
    asked = [*([] if params == PARAMS else [f"params={params}"]), *([] if scale == PAPER else [f"scale={scale}"])]
    return ["all", *(["--config", *asked] if asked else [])]


def _plan(params: Path, scale: str) -> Plan:
    _refuse_folder(params, scale)
    place = StudyFiles.of(params, scale).plan
    if not place.is_file():
        if not params.is_file():
            raise SettingsError(f"{params}: there is no such file; run from the folder that holds it.")
        raise ArtifactError(f"{place} is missing; type `{artifacts.making(params, scale)}` first.")
    return Plan.read(place)


def _tell_overtaken(plan: Plan) -> None:
    """A word to people about a study, or code, that gives other numbers by now than those that they are shown."""
    from fedpipe.stages import report

    if told := report.overtaken(plan):
        typer.echo(f"fedpipe: {told}", err=True)


def _open(
    path: Path,
    threads: int = 1,
    device: str = "auto",
    stack: str = "auto",
    graphs: bool = False,
    keep_models: str = "all",
) -> Any:
    from fedpipe.engine.run import open_run

    return open_run(path, _execution(device, stack, graphs), threads, _kept(keep_models))


def _execution(device: str, stack: str, graphs: bool = False) -> Any:
    from fedpipe.config import Execution

    return _section(Execution, device=device, stack=_number(stack), graphs=graphs)


def _kept(keep_models: str) -> Any:
    from fedpipe.config import Artifacts

    return _section(Artifacts, keep_models=_number(keep_models)).keep_models


def _section(section: type[Section], **told: Any) -> Any:
    """A section of params.yaml, of which a job is told some by options."""
    from pydantic import ValidationError

    try:
        return section.model_validate(told)
    except ValidationError as error:
        raise SettingsError("\n".join(sentences(error, told, section.__name__.lower(), lambda _: []))) from None


def _number(text: str) -> int | str:
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
        if error.errno not in FULL:
            raise
        with suppress(OSError):  # both may go to one disk
            typer.echo(f"fedpipe: what it prints can't be written ({error.strerror}).", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it, as Python ends
        sys.exit(2)
