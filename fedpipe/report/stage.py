"""The report stage: from the files of all runs to tables and figures, as the command line calls it."""

from __future__ import annotations

from pathlib import Path

from fedpipe import artifacts
from fedpipe.artifacts import PARAMS, StudyFiles
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.report.results import Plan


def write_tables(plan: Plan) -> None:
    """Write ``results.csv``, ``results.md``, ``times.csv``, ``metrics.json`` and ``curves.csv``."""
    from fedpipe.report import plots, tables

    files, table, times = _files(plan), tables.table(plan), tables.times(plan)
    artifacts.write_bytes(files.tables / "results.csv", tables.csv(table))
    artifacts.write_bytes(files.tables / "results.md", tables.markdown(plan, table, times).encode())
    artifacts.write_bytes(files.tables / "times.csv", tables.csv(times))
    artifacts.write_json(files.metrics, tables.metrics(plan, table))
    artifacts.write_bytes(files.plots / "curves.csv", tables.csv(plots.learning(plan)))


def write_plots(plan: Plan) -> None:
    """Write the numbers of DVC's plots that are too large for git: clients, matrices, partitions."""
    from fedpipe.report import plots, tables

    for name, frame in (
        ("clients", plots.clients(plan)),
        ("matrices", plots.cells(plan)),
        ("partition", plots.partitions(plan)),
    ):
        artifacts.write_bytes(_files(plan).plots / f"{name}.csv", tables.csv(frame))


def write_figure_curves(plan: Plan) -> None:
    """Draw accuracy against round."""
    from fedpipe.report.figures import curves

    curves.draw(plan, _files(plan).figures / "curves")


def write_figure_partition(plan: Plan, key: str) -> None:
    """Draw how many training samples of each class each client has."""
    from fedpipe.report.figures import partition

    if key not in plan["partitions"]:
        raise SettingsError(f"'{key}' can't be drawn; it should be a partition of {plan['params']}.")
    partition.draw(key, plan["partitions"][key], _files(plan).figures / f"partition-{key}")


def write_figure_matrices(plan: Plan) -> None:
    """Draw the soft-label and class-relation matrices of two algorithms."""
    from fedpipe.report.figures import matrices

    matrices.draw(plan, _files(plan).figures / "matrices")


def show(plan: Plan) -> str:
    """The table for people, and where the figures lie.

    Raises
    ------
    ArtifactError
        There is no table yet.
    """
    folder, table = _files(plan).figures, _files(plan).tables / "results.md"
    if not table.is_file():
        named = "" if Path(plan["params"]) == PARAMS else f" --config params={plan['params']}"
        raise ArtifactError(f"{table} is missing; run `snakemake all{named}` to make it.")
    names = ["curves", "matrices", *(f"partition-{key}" for key in plan["partitions"])]
    figures: list[Path] = [path for name in names if (path := folder / f"{name}.svg").is_file()]
    listed = "".join(f"\n  {path}" for path in figures)
    return table.read_text() + (f"\nFigures (PNG beside SVG):{listed}" if figures else "")


def _files(plan: Plan) -> StudyFiles:
    return StudyFiles.of(Path(plan["params"]))
