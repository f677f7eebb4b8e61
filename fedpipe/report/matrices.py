"""SL and CR matrices of the global models that figure and plot show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedpipe import artifacts
from fedpipe.artifacts import JoinedFiles
from fedpipe.data import classes
from fedpipe.planned import Cell, Plan
from fedpipe.report import results, tables

Floats = npt.NDArray[np.float64]

PREFERRED = ("fedavg", "feddw")


class Chosen(NamedTuple):
    """The matrices (C, C) of a run's global model after its last round, by name."""

    cell: Cell
    matrices: dict[str, Floats]
    classes: tuple[str, ...]  #: their names


def chosen(plan: Plan) -> dict[str, Chosen]:
    """Those of two algorithms that have a global model, of `PREFERRED` before others.

    Of each it is the first run, at the best values where `report.best_over` searches.
    """
    names = [*(label for label in PREFERRED if label in plan.algorithms), *plan.algorithms]
    found: dict[str, Chosen] = {}
    kept = tables.best(plan, tables.table(plan)) if plan.report.best_over else None
    for name in dict.fromkeys(names):
        own = (cell for cell in plan.cells if cell.algorithm == name)
        cell = next(cell for cell in own if kept is None or (name, *results.point(plan, cell).values()) in kept)
        measured = _measured(cell.joined)
        if measured and len(found) < 2:
            (partition,) = {run.partition for run in plan.runs if run.serves(cell)}
            called = classes.names(plan.partitions[partition]["dataset"], len(measured["SL"]))
            found[results.line(name, results.point(plan, cell))] = Chosen(cell, measured, called)
    return found


def _measured(files: JoinedFiles) -> dict[str, Floats]:
    """SL and CR of the last round's global model; nothing for a method without one."""
    table = artifacts.read_joined(files.matrices)
    if "source" not in table.column_names:
        return {}
    frame = artifacts.frame(table)
    frame = frame[(frame["source"] == "measured") & (frame["client"] == -1)]
    frame = frame[frame["round"] == frame["round"].max()].sort_values("class")
    columns = [str(number) for number in range(frame["class"].nunique())]
    return {str(name): rows[columns].to_numpy() for name, rows in frame.groupby("matrix")}
