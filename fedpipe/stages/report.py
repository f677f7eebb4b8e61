"""The report stage: from the files of all runs to tables and figures, as the command line calls it.

All numbers that people or DVC read are a pure function of the plan and of its runs' files (:func:`contents`), so that
it can be told whether a file is what the runs give.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from fedpipe import artifacts
from fedpipe.errors import ArtifactError, SettingsError, UserError
from fedpipe.planned import Cell, Plan

Contents = dict[Path, bytes]  #: files with what shall stand in them
Form = Literal["markdown", "latex", "csv"]  #: of the table that `fedpipe show` prints
COMMENTS = {"latex": "%", "csv": "#"}  #: what a line of comment begins with
UNSAID = {"shared", "files", "execution", "artifacts", "probes"}  #: of a plan, what no table or figure says


def contents(plan: Plan) -> Contents:
    """All files of numbers that the runs give: tables, metrics.json, plots' numbers and keys."""
    return tables(plan) | plots(plan) | keys(plan)


def tables(plan: Plan) -> Contents:
    """The tables (``results`` as CSV, Markdown and HTML, statistics, times), ``metrics.json`` and ``curves.csv``."""
    from fedpipe.report import plots, statistics, tables

    files, table, times = plan.study, tables.table(plan), tables.times(plan)
    return {
        files.tables / "results.csv": tables.csv(table),
        files.tables / "results.html": tables.html(plan, table).encode(),
        files.tables / "results.md": tables.markdown(plan, table).encode(),
        files.tables / "statistics.csv": tables.csv(statistics.table(plan)),
        files.tables / "times.csv": tables.csv(times),
        files.metrics: artifacts.json_bytes(tables.metrics(plan, table)),
        files.plots / "curves.csv": plots.csv(plots.learning(plan)),
    }


def plots(plan: Plan) -> Contents:
    """The numbers of DVC's plots that are too large for git: clients, matrices, partitions."""
    from fedpipe.report import plots

    frames = {"clients": plots.clients(plan), "matrices": plots.cells(plan), "partition": plots.partitions(plan)}
    return {plan.study.plots / f"{name}.csv": plots.csv(frame) for name, frame in frames.items()}


def keys(plan: Plan) -> Contents:
    """The keys of each algorithm's runs with their numbers of rounds: what a commit needs of what studies share."""
    found = {}
    for label in plan.algorithms:
        rounds = {run.key: run.rounds for run in plan.runs if run.algorithm == label}
        found[plan.study.keys(label)] = artifacts.json_bytes({"keys": rounds})
    return found


def write(made: Mapping[Path, bytes]) -> None:
    """Write files as :func:`contents` gives them."""
    for path, data in made.items():
        artifacts.write_bytes(path, data)


def differing(made: Mapping[Path, bytes]) -> list[Path]:
    """The files that are not as :func:`contents` gives them, or not there."""
    return [path for path, data in made.items() if not path.is_file() or path.read_bytes() != data]


def write_figure_curves(plan: Plan) -> None:
    """Draw accuracy against round."""
    from fedpipe.report.figures import curves

    curves.draw(plan, plan.study.figures / "curves")


def write_figure_partition(plan: Plan, key: str) -> None:
    """Draw how many training samples of each class each client has."""
    from fedpipe.report.figures import partition

    if key not in plan.partitions:
        raise SettingsError(f"'{key}' can't be drawn; it should be a partition of {plan.params}.")
    stem = plan.study.figures / f"partition-{plan.partition_names[key]}"
    partition.draw(key, plan.partitions[key], stem)


def write_figure_matrices(plan: Plan) -> None:
    """Draw the soft-label and class-relation matrices of two algorithms."""
    from fedpipe.report.figures import matrices

    matrices.draw(plan, plan.study.figures / "matrices")


def show(plan: Plan, form: Form = "markdown") -> str:
    """The table for people, and where the figures lie; or the wide table, as papers have it.

    Raises
    ------
    ArtifactError
        There is no table yet, or it is not what the runs give.
    """
    folder, table = plan.study.figures, plan.study.tables / "results.md"
    if table.is_file() and len(_complete(plan)) < len(plan.cells):
        raise ArtifactError(f"{table} is of an earlier plan; type `{command(plan)}` to make the runs of this one.")
    check(plan, table.name)
    if form != "markdown":
        from fedpipe.report import tables, wide

        return wide.FORMS[form](plan, tables.table(plan), None).rstrip("\n")
    names = ["curves", "matrices", *(f"partition-{name}" for name in plan.partition_names.values())]
    figures: list[Path] = [path for name in names if (path := folder / f"{name}.svg").is_file()]
    listed = "".join(f"\n  {path}" for path in figures)
    return table.read_text(encoding="utf-8") + (f"\nFigures (PDF and PNG beside SVG):{listed}" if figures else "")


def says(plan: Plan) -> dict[str, Any]:
    """What a study's tables and figures say besides numbers: they are made again where it has changed."""
    return {name: value for name, value in plan.held().items() if name not in UNSAID}


def said(plan: Plan) -> str:
    """A hash of what they say."""
    return hashlib.sha256(json.dumps(says(plan), sort_keys=True).encode()).hexdigest()


def held(plans: Iterable[Plan]) -> str:
    """A hash of all that several plans hold, for pages, which tell of probes and code, too."""
    return hashlib.sha256(json.dumps([plan.held() for plan in plans], sort_keys=True).encode()).hexdigest()


def refuse_another(plan: Plan, wanted: str | None) -> None:
    """Refuse to make, for a snakemake that began with one plan, the tables of another that has taken its place.

    Raises
    ------
    ArtifactError
        The study was planned anew meanwhile.
    """
    if wanted is not None and said(plan) != wanted:
        raise ArtifactError(
            f"{plan.study.plan} is another plan than this snakemake began with, since {plan.params} was edited "
            f"meanwhile; type `{command(plan)}` again."
        )


def overtaken(plan: Plan) -> str | None:
    """One sentence where the study's file, or code, gives other tables by now; None where it does not."""
    from fedpipe import pins

    place = plan.study.sources
    sources = artifacts.read_json(place) if place.is_file() else None
    if sources is not None and not any(pins.changed(Path(path), mark) for path, mark in sources.items()):
        return None
    from fedpipe import plan as planning

    try:
        asked = planning.make(plan.params, plan.scale)
    except UserError:
        if sources is None:  # a clone may lack what it takes to plan
            return None
    else:
        if artifacts.json_bytes(says(asked)) == artifacts.json_bytes(says(plan)):
            return None
    return (
        f"{plan.params} or code has changed since this was made, and gives another table; `{command(plan)}` makes it."
    )


def check(plan: Plan, *names: str) -> None:
    """Compare tables of a study, as ``results.md``, with what its runs give.

    Raises
    ------
    ArtifactError
        One is missing, or says something else.
    """
    for path in (plan.study.tables / name for name in names):
        if not path.is_file():
            raise ArtifactError(f"{path} is missing; type `{command(plan)}` to make it.")
    for path in differing(tables(plan)):
        if path.name in names:
            raise ArtifactError(
                f"{path} is not what the runs of {plan.params} give; delete it and type `{command(plan)}`."
            )


def partial(plan: Plan, form: Form = "markdown") -> str:
    """While runs are missing: the table of those that are complete, marked so, and why others failed; or nothing.

    In other formats than Markdown all but the table stands in comments.
    """
    from fedpipe.report import status, tables, wide

    complete = _complete(plan)
    if len(complete) == len(plan.cells):
        return ""
    runs, failures = status.progress(plan)
    said = [failure.told() for failure in failures]
    if form != "markdown":
        said = [f"{COMMENTS[form]} {line}" for told in said for line in told.splitlines()]
    if not complete:
        return "\n".join(said)
    there = tuple(run for run in plan.runs if any(run.serves(cell) for cell in complete))
    shown = dataclasses.replace(plan, cells=complete, runs=there)
    head = f"PARTIAL, and written nowhere: {status.summary(runs)}"
    if form != "markdown":
        return "\n".join(
            [f"{COMMENTS[form]} {head}", *said, wide.FORMS[form](shown, tables.table(shown), plan).rstrip("\n")]
        )
    table = tables.markdown(shown, tables.table(shown))
    return "\n".join([head, "", table, *said])


def command(plan: Plan) -> str:
    """What makes the study's table."""
    return artifacts.making(plan.params, plan.scale)


def _complete(plan: Plan) -> tuple[Cell, ...]:
    return tuple(cell for cell in plan.cells if cell.joined.marker.is_file())
