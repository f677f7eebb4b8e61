"""Commands that trace, verify and compare results, and prune them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpipe.cli.group import USER_PANEL, Preset, app, require_study_path
from fedpipe.cli.plans import read_plan, warn_if_stale
from fedpipe.core.errors import UserError
from fedpipe.core.storage import layout
from fedpipe.core.storage.layout import FULL_PRESET, PAPERS, PARAMS

if TYPE_CHECKING:
    import random

    from fedpipe.analysis.verify import VerificationResult


@app.command("trace", rich_help_panel=USER_PANEL)
def trace_cell(
    table: Annotated[Path, typer.Argument(help="Table of a study, such as results/tables/results.md.")],
    cell: Annotated[str, typer.Argument(help="ALGORITHM.PROTOCOL. With a grid, ALGORITHM.POINT.PROTOCOL.")],
) -> None:
    """Trace a cell of a table to its data, settings, hashes, versions, device and commit."""
    import yaml

    from fedpipe.analysis import trace
    from fedpipe.planning.plan import Plan

    typer.echo(yaml.safe_dump(trace.collect_cell_provenance(table, cell), sort_keys=False, width=120), nl=False)
    warn_if_stale(Plan.read(table.parent.parent / "plan.json"))


@app.command("verify", rich_help_panel=USER_PANEL)
def verify_results(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs. By default, all runs of the study.")
    ] = None,
    rerun: Annotated[int, typer.Option(min=0, help="Number of random runs of which a random round is repeated.")] = 1,
    params: Annotated[
        Path | None,
        typer.Option(
            "--params",
            help="Study file. By default params.yaml, and with --stored the folder studies/papers.",
            callback=require_study_path,
        ),
    ] = None,
    preset: Preset = FULL_PRESET,
    is_stored: Annotated[
        bool,
        typer.Option(
            "--stored",
            help="Train a random stored run of the papers (or of --params) again up to a random round, and compare its "
            "accuracies.",
        ),
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the random runs and rounds.")] = None,
) -> None:
    """Check results: hash all files, recompute the tables and partitions, and repeat rounds."""
    import itertools
    import random

    from fedpipe.analysis import verify

    verdicts: Iterable[VerificationResult]
    if is_stored:
        verdicts = _verify_stored_runs(params or PAPERS, preset, rerun, random.Random(seed))
    elif runs:
        verdicts = verify.verify_runs(runs, rerun, random.Random(seed))
    else:
        study_plan = read_plan(params or PARAMS, preset)
        paths = [run.path for run in study_plan.add_search_results(has_draws=True).runs]
        verdicts = itertools.chain(
            [verify.verify_study(study_plan)],
            verify.verify_runs(paths, rerun, random.Random(seed), study_plan.keep_models),
        )
    results = []
    for verdict in verdicts:
        typer.echo(verdict.message)
        results.append(verdict)
    typer.echo(verify.summarize_verification(results))
    if not all(verdict.is_ok for verdict in results):
        raise typer.Exit(1)


def _verify_stored_runs(params: Path, preset: str, count: int, rng: random.Random) -> Iterator[VerificationResult]:
    """Recompute random rounds of stored runs."""
    from fedpipe.analysis.verify import VerificationResult
    from fedpipe.papers import recompute

    for drawn in recompute.draw_random_rounds(layout.list_studies(params), preset, count, rng):
        typer.echo(f"fedpipe: trains {drawn}.", err=True)
        try:
            recomputation = recompute.recompute_round(drawn)
            yield VerificationResult(recomputation.message, recomputation.is_reproduced, "stored")
        except UserError as error:
            yield VerificationResult(str(error), False)


@app.command("diff", rich_help_panel=USER_PANEL)
def diff_runs(
    first: Annotated[str, typer.Argument(metavar="KEY", help="Key of a run, or its beginning.")],
    second: Annotated[str, typer.Argument(metavar="KEY", help="Key of another run, or its beginning.")],
) -> None:
    """Compare two runs: print the settings that differ and the first round with different numbers."""
    from fedpipe.analysis import diff

    typer.echo(diff.diff_runs(diff.find_run(first), diff.find_run(second)))


@app.command("compare", rich_help_panel=USER_PANEL)
def compare_revisions(
    revisions: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REV]...",
            help="Commits, tags or experiments. A single one is compared with the workspace. By default, HEAD.",
        ),
    ] = None,
    has_only_changes: Annotated[
        bool, typer.Option("--changed", help="Print only the methods and grid points whose runs differ.")
    ] = False,
) -> None:
    """Compare the tables of commits or experiments, with differences paired by seed and changed settings."""
    from fedpipe.analysis import compare

    comparison, warnings = compare.compare_revisions(revisions or [], has_only_changes)
    typer.echo(comparison)
    for warning in warnings:
        typer.echo(f"fedpipe: {warning}", err=True)
    if len(revisions or []) < 2:
        warn_if_stale(read_plan(PARAMS, FULL_PRESET))


@app.command("prune", rich_help_panel=USER_PANEL)
def prune_files(yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False) -> None:
    """Remove runs, partitions and data that no study or commit needs, after showing the freed space."""
    from fedpipe.analysis import prune
    from fedpipe.report import words

    typer.echo("fedpipe: plans all studies to find what they need.", err=True)
    unneeded_files = prune.find_unneeded_files()
    removable_files = [files for files in unneeded_files if not files.uncached_count]
    uncached_files = [files for files in unneeded_files if files.uncached_count]
    for files in uncached_files:
        advice = "Type `dvc commit`, or delete it" if prune.is_recorded_by_dvc(files.paths[0]) else "You can delete it"
        typer.echo(f"{files} ({words.format_bytes(files.size)}) is not in DVC's cache, so it is kept. {advice}.")
    for path, params in prune.find_plans_of_missing_studies().items():
        typer.echo(
            f"{path}: {params} does not exist, but runs keep the states that it needs. If no branch contains it, "
            f"delete {path}."
        )
    for files in removable_files:
        typer.echo(f"{words.format_bytes(files.size):>8}  {files}")
    if not removable_files:
        typer.echo("Nothing to remove.")
        return
    typer.echo(f"{words.format_bytes(sum(files.size for files in removable_files)):>8}  in total")
    if yes or typer.confirm("Remove them from this folder?"):
        prune.remove_files(removable_files)
        typer.echo(
            "Removed. Type `dvc repro` to record that, and `dvc gc -q --all-commits --all-experiments` to free the "
            "cache."
        )
