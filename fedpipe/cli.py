"""The command line: one command a stage, each thin; the rules of the Snakefile call them."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedpipe import artifacts, registry
from fedpipe.artifacts import PARAMS, RunFiles, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError, UserError
from fedpipe.mistakes import nearest

DELETING = ("prune",)  #: no mistake leads there


class Commands(TyperGroup):
    """The commands, of which those that delete are never suggested."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is meant, or one sentence."""
        if args[0] in self.commands or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(args[0], [name for name in self.commands if name not in DELETING], n=1)
        hint = f"did you mean '{close[0]}'?" if close else "`fedpipe --help` lists them; `snakemake all` runs a study."
        raise SettingsError(f"'{args[0]}' is no command; {hint}")

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
    add_completion=False,
    pretty_exceptions_enable=False,
)

StudyFile = Annotated[Path, typer.Option("--params", help="The study.")]
RunPath = Annotated[Path, typer.Argument(help="A run's folder, results/runs/ALGORITHM/KEY.")]
RoundNumber = Annotated[int, typer.Option("--round", min=1, help="The round.")]
Threads = Annotated[int, typer.Option(min=1, help="Cores to use.")]
Device = Annotated[str, typer.Option(envvar="FEDPIPE_DEVICE", help="As execution.device: auto, cpu or cuda.")]
Stack = Annotated[str, typer.Option(envvar="FEDPIPE_STACK", help="As execution.stack: auto, or clients in one call.")]
KeepModels = Annotated[str, typer.Option(envvar="FEDPIPE_KEEP_MODELS", help="As artifacts.keep_models.")]


@app.command()
def plan(
    params: StudyFile = PARAMS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings and show the runs; write nothing.")
    ] = False,
) -> None:
    """Check params.yaml, or another study, and write its plan: runs, keys, jobs."""
    from fedpipe import changes
    from fedpipe import plan as planning

    made = planning.make(params)
    for sentence in changes.told(made):
        typer.echo(f"fedpipe: {sentence}", err=True)
    for warning in made["warnings"]:
        typer.echo(f"fedpipe: warning: {warning}", err=True)
    if dry_run:
        for run in made["runs"]:
            points = [each["grid"] for each in made["cells"] if planning.serves(run, each)]
            told = "; ".join(", ".join(f"{name}={value}" for name, value in point.items()) for point in points)
            typer.echo(f"{run['algorithm']:<16} seed {run['seed']}  {f'{told}  ' if told else ''}{run['key']}")
    else:
        planning.write(made)


@app.command()
def download(
    name: Annotated[str | None, typer.Argument(help="A data set; by default the study's own.")] = None,
    params: StudyFile = PARAMS,
) -> None:
    """Obtain a data set, check it, store it as tensors; declare the SHA-256 of each file that the study names."""
    from fedpipe.data import declare, store

    if name is not None and store.settings_file(name).is_file():
        store.download(name)
    else:
        typer.echo(declare.download(name, params))


@app.command()
def partition(
    key: Annotated[str | None, typer.Argument(help="The partition's key in the plan.")] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Print clients x classes of the study's partitions; write nothing.")
    ] = False,
    params: StudyFile = PARAMS,
) -> None:
    """Deal a data set's samples to clients."""
    from fedpipe.data import stage

    if preview:
        from fedpipe.report import preview as layout

        found = [each for each in stage.preview(params) if key in (None, each[0])]
        if not found:
            raise SettingsError(f"'{key}' is no partition of {params}; without it, all of them are shown.")
        for each in found:
            typer.echo(layout.text(*each))
    elif key is None:
        raise SettingsError("KEY: missing; it should be a partition of the plan (--preview shows them all).")
    else:
        stage.partition(key)


@app.command()
def segment(
    path: RunPath,
    stop: Annotated[int, typer.Option(min=1, help="Run all rounds up to this one that are not complete yet.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    keep_models: KeepModels = "all",
    collected: Annotated[bool, typer.Option("--collect", help="Then collect all rounds.")] = False,
) -> None:
    """Run consecutive rounds: train, aggregate, evaluate; goes on from what it finds; SIGTERM ends it after a round."""
    from fedpipe.engine import collecting, interrupts
    from fedpipe.report import progress

    done: list[int] = []

    def told() -> str:
        if done:
            return f"{path}: SIGTERM; it ends after round {done[-1] + 1}"
        return (
            f"{path}: SIGTERM before a round was done; if this was the end of the job's time, that is shorter than a "
            "round: give the job more, or cut rounds into jobs (execution: {rounds_per_job: 1, clients_per_job: 1})"
        )

    with interrupts.deferred(told) as asked_to_stop:
        run = _open(path, threads, device, stack, keep_models)
        typer.echo(f"{path}: {run.place()}")
        for number in progress.told(path, stop, run.segment(stop)):
            done.append(number)
            if number < stop and asked_to_stop():
                typer.echo(f"{path}: stopped by SIGTERM after round {number}; the same command goes on from there")
                raise typer.Exit(interrupts.STOPPED)
        if collected:
            collecting.collect(run.files, stop, _number(keep_models))


@app.command()
def init(path: RunPath) -> None:
    """Write a run's initial server state (round 0), for the DAG of single rounds."""
    _open(path).initialize()


@app.command()
def train(
    path: RunPath,
    round: RoundNumber,
    block: Annotated[int, typer.Option(min=0, help="Which block of participants.")],
    size: Annotated[int, typer.Option(min=1, help="Participants in a block: execution.clients_per_job.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
) -> None:
    """Train one block of a round's participants."""
    run = _open(path, threads, device, stack)
    ids = run.participants(round)[block * size : (block + 1) * size]
    if not ids:
        raise SettingsError(f"--block: {block} can't be trained; round {round} has no block {block} of {size} clients.")
    artifacts.write_pt(run.files.round(round).block(block), run.train(round, ids).tree())


@app.command()
def aggregate(
    path: RunPath, round: RoundNumber, blocks: Annotated[int, typer.Option(min=1, help="Number of the round's blocks.")]
) -> None:
    """Combine a round's uploads into the next server state."""
    from fedpipe.engine.block import Block

    run = _open(path)
    files = run.files.round(round)
    run.aggregate(round, [Block.of(artifacts.read_pt(files.block(index))) for index in range(blocks)])


@app.command()
def evaluate(
    path: RunPath, round: RoundNumber, threads: Threads = 1, device: Device = "auto", stack: Stack = "auto"
) -> None:
    """Measure a round's models; then the round is complete."""
    _open(path, threads, device, stack).evaluate(round)


@app.command()
def collect(
    path: RunPath,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to join.")],
    keep_models: KeepModels = "all",
) -> None:
    """Join the rounds' metrics, matrices, traffic and times into one file each."""
    from fedpipe.engine import collecting

    collecting.collect(RunFiles(path), rounds, _number(keep_models))


@app.command()
def table(params: StudyFile = PARAMS) -> None:
    """Write the result table, metrics.json, the plots' numbers, and the keys of each algorithm's runs."""
    from fedpipe.report import stage

    stage.write(stage.contents(_plan(params)))


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="curves, matrices or partition.")],
    key: Annotated[str | None, typer.Argument(help="The partition's key.")] = None,
    params: StudyFile = PARAMS,
) -> None:
    """Draw a figure, as SVG and PNG."""
    from fedpipe.report import stage

    if name == "curves":
        stage.write_figure_curves(_plan(params))
    elif name == "matrices":
        stage.write_figure_matrices(_plan(params))
    elif name == "partition" and key is not None:
        stage.write_figure_partition(_plan(params), key)
    else:
        raise SettingsError(f"'{name}' can't be drawn; it should be curves, matrices, or partition with its key.")


@app.command()
def show(params: StudyFile = PARAMS) -> None:
    """Print the result table and where the figures lie; of a study with failed runs, what is complete, and why."""
    from fedpipe.report import stage

    made = _plan(params)
    if partial := stage.partial(made):
        typer.echo(partial)
    typer.echo(stage.show(made))


@app.command()
def status(
    params: StudyFile = PARAMS,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again every two seconds, until all is done.")] = False,
) -> None:
    """Show how far each run has come, how long the rest takes, and the end of each failed job's log."""
    from fedpipe.report import status as progress

    progress.show(_plan(params), watch)


@app.command()
def record(
    algorithm: Annotated[str, typer.Argument(help="An entry of study.algorithms.")], params: StudyFile = PARAMS
) -> None:
    """Check that all runs of an algorithm are complete, in the plan's rounds, for DVC to record."""
    made = _plan(params)
    if algorithm not in made["algorithms"]:
        raise SettingsError(f"'{algorithm}' is not in the study; {nearest(algorithm, made['algorithms'])}")
    for run in made["runs"]:
        if run["algorithm"] == algorithm:
            RunFiles(Path(run["path"])).joined(run["rounds"]).check()


@app.command()
def trace(
    table: Annotated[Path, typer.Argument(help="A study's table, as results/tables/results.md.")],
    cell: Annotated[str, typer.Argument(help="ALGORITHM.PROTOCOL, or ALGORITHM.POINT.PROTOCOL with a grid.")],
) -> None:
    """Print what a table's cell was made of, back to the data file: settings, hashes, versions, device, commit."""
    import yaml

    from fedpipe.lineage import trace as lineage

    typer.echo(yaml.safe_dump(lineage.trace(table, cell), sort_keys=False, width=120), nl=False)


@app.command()
def verify(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs' folders; by default all runs of the study.")] = None,
    rerun: Annotated[int, typer.Option(min=0, help="Runs of which a round, drawn at random, is run again.")] = 1,
    params: StudyFile = PARAMS,
) -> None:
    """Hash all files of runs, make the study's tables again, run a round again, and say whether all agree."""
    import itertools
    import random

    from fedpipe.lineage import study
    from fedpipe.lineage import verify as lineage

    if runs:
        verdicts = lineage.verify(runs, rerun, random.Random())
    else:
        made = _plan(params)
        paths = [Path(run["path"]) for run in made["runs"]]
        verdicts = itertools.chain([study.verify(made)], lineage.verify(paths, rerun, random.Random()))
    holds = True
    for verdict in verdicts:
        typer.echo(verdict.said)
        holds &= verdict.holds
    if not holds:
        raise typer.Exit(1)


@app.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="KEY", help="A run's key, or its beginning.")],
    other: Annotated[str, typer.Argument(metavar="KEY", help="Another's.")],
) -> None:
    """Print which settings differ between two runs, and where their numbers part."""
    from fedpipe.lineage import diff as lineage

    typer.echo(lineage.diff(lineage.find(one), lineage.find(other)))


@app.command()
def prune(yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False) -> None:
    """Remove runs, partitions and data that no study here and no commit needs, after showing what that frees."""
    from fedpipe.lineage import prune as lineage
    from fedpipe.report import tables

    found = lineage.unneeded()
    spare, lost = ([each for each in found if bool(each.uncached) == kind] for kind in (False, True))
    for each in lost:
        typer.echo(f"{each} ({tables.size(each.size)}) is not in DVC's cache and stays; `dvc commit`, or delete it.")
    for each in spare:
        typer.echo(f"{tables.size(each.size):>8}  {each}")
    if not spare:
        typer.echo("Nothing to remove.")
        return
    typer.echo(f"{tables.size(sum(each.size for each in spare)):>8}  in all")
    if yes or typer.confirm("Remove them from this folder?"):
        lineage.remove(spare)
        typer.echo("Removed; `dvc repro` records that, `dvc gc --all-commits --all-experiments` frees the cache.")


@app.command("list")
def list_(kind: Annotated[str, typer.Argument(help="algorithms, datasets, models or partitions.")]) -> None:
    """Print what may be named in params.yaml: a name a line, with a line of what it is."""
    found = _kind(kind)
    names = registry.names(found)
    for name in names:
        typer.echo(f"{name:<{max(map(len, names))}}  {registry.summary(registry.find(found, name))}")


@app.command()
def describe(name: Annotated[str, typer.Argument(help="An algorithm, data set, model or partition scheme.")]) -> None:
    """Print a component's documentation with its parameters and their defaults."""
    from fedpipe import documentation

    kinds = [kind for kind in registry.KINDS if name in registry.names(kind)]
    if not kinds and "." in name:
        kinds = [kind for kind in registry.KINDS if registry.is_a(kind, name)]
    if not kinds:
        known = sorted({each for kind in registry.KINDS for each in registry.names(kind)})
        raise SettingsError(f"'{name}' is unknown; {nearest(name, known)}")
    kind, found = kinds[0], registry.find(kinds[0], name)
    typer.echo(f"{name} ({kind.name})\n\n{inspect.getdoc(found)}\n")
    fields = registry.parameters_of(found)
    if fields:
        typer.echo(f"In params.yaml, under {kind.section}:")
    told = documentation.inherited(found)
    for field in fields:
        meaning = f"    # {told[field.name]}" if field.name in told else ""
        typer.echo(f"  {field.name}: {documentation.default(field)}{meaning}")


@app.command()
def docs(kind: Annotated[str, typer.Argument(help="algorithms, datasets, models or partitions.")]) -> None:
    """Print all components of a kind as a page of Markdown, as docs/algorithms.md."""
    from fedpipe import documentation

    typer.echo(documentation.markdown(_kind(kind), kind), nl=False)


@app.command("new-algorithm")
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


@app.command()
def schema() -> None:
    """Print the JSON Schema of params.yaml, for editors."""
    from fedpipe import config

    typer.echo(json.dumps(config.json_schema(), indent=1))


def _kind(plural: str) -> registry.Kind:
    kinds = {
        "algorithms": registry.ALGORITHM,
        "datasets": registry.DATASET,
        "models": registry.MODEL,
        "partitions": registry.PARTITION,
    }
    if plural not in kinds:
        raise SettingsError(f"'{plural}' can't be listed; {nearest(plural, list(kinds))}")
    return kinds[plural]


def _plan(params: Path) -> dict[str, Any]:
    place = StudyFiles.of(params).plan
    if not place.is_file():
        if not params.is_file():
            raise SettingsError(f"{params}: there is no such file; run from the folder that holds it.")
        raise ArtifactError(f"{place} is missing; run `{artifacts.making(params)}` first.")
    return artifacts.read_plan(place)


def _open(path: Path, threads: int = 1, device: str = "auto", stack: str = "auto", keep_models: str = "all") -> Any:
    from fedpipe.config import Execution
    from fedpipe.engine.run import open_run

    execution = Execution.model_validate({"device": device, "stack": _number(stack)})
    return open_run(path, execution, threads, _number(keep_models))


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
