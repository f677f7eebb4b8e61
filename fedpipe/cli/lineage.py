"""Commands that trace, verify and compare results, and prune them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedpipe.cli.group import PEOPLE_PANEL, Preset, StudyFile, app
from fedpipe.cli.plans import read_plan
from fedpipe.cli.study import warn_if_stale
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS
from fedpipe.planning.plan import Plan


@app.command(rich_help_panel=PEOPLE_PANEL)
def trace(
    table: Annotated[Path, typer.Argument(help="A study's table, as results/tables/results.md.")],
    cell: Annotated[str, typer.Argument(help="ALGORITHM.PROTOCOL, or ALGORITHM.POINT.PROTOCOL with a grid.")],
) -> None:
    """Trace a cell of a table back to its data: settings, hashes, versions, device and commit."""
    import yaml

    from fedpipe.analysis import trace as lineage

    typer.echo(yaml.safe_dump(lineage.trace_cell(table, cell), sort_keys=False, width=120), nl=False)
    warn_if_stale(Plan.read(table.parent.parent / "plan.json"))


@app.command(rich_help_panel=PEOPLE_PANEL)
def verify(
    runs: Annotated[list[Path] | None, typer.Argument(help="Runs' folders; by default all runs of the study.")] = None,
    rerun: Annotated[int, typer.Option(min=0, help="Runs of which a round, drawn at random, is run again.")] = 1,
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
) -> None:
    """Check results: hash all files, recompute the tables and partitions, and repeat rounds."""
    import itertools
    import random

    from fedpipe.analysis import verify as lineage
    from fedpipe.analysis import verify_study

    if runs:
        verdicts = lineage.verify_runs(runs, rerun, random.Random())
    else:
        study_plan = read_plan(params, preset)
        paths = [run.path for run in study_plan.runs]
        verdicts = itertools.chain(
            [verify_study.verify_study(study_plan)], lineage.verify_runs(paths, rerun, random.Random())
        )
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
    """Compare two runs: print the settings that differ and the first round with different numbers."""
    from fedpipe.analysis import diff as lineage

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
    """Compare the tables of commits or experiments, with differences paired by seed and changed settings."""
    from fedpipe.analysis import compare as lineage

    told, warnings = lineage.compare_revisions(revisions or [])
    typer.echo(told)
    for warning in warnings:
        typer.echo(f"fedpipe: {warning}", err=True)
    if len(revisions or []) < 2:
        warn_if_stale(read_plan(PARAMS, FULL_PRESET))


@app.command(rich_help_panel=PEOPLE_PANEL)
def prune(yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False) -> None:
    """Remove runs, partitions and data that no study and no commit needs, after showing the freed space."""
    from fedpipe.analysis import prune as lineage
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
