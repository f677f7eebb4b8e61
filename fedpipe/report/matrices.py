"""SL and CR matrices of the global models in figures and plots."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from fedpipe.core.storage.layout import MergedRoundFiles
from fedpipe.data.class_names import read_class_names_or_numbers
from fedpipe.planning.plan import Cell
from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.report.results import FloatArray

PREFERRED_ALGORITHMS = ("fedavg", "feddw")


class ModelMatrices(NamedTuple):
    """Matrices (C, C) of a run's global model after its last round, by name."""

    cell: Cell
    matrices: dict[str, FloatArray]
    class_names: tuple[str, ...]  #: names of the classes


def read_figure_matrices(data: StudyData) -> dict[str, ModelMatrices]:
    """Select two algorithms with a global model, `PREFERRED_ALGORITHMS` first, or those of `report.figure_algorithms`.

    Each has its first run, with `report.best_over` at the best values.
    """
    plan = data.plan
    preferred_names = [label for label in PREFERRED_ALGORITHMS if label in plan.algorithms]
    names = plan.report.figure_algorithms or [*preferred_names, *plan.algorithms]
    selected_matrices: dict[str, ModelMatrices] = {}
    for name in dict.fromkeys(names):
        if len(selected_matrices) == 2:
            break
        cells = [cell for cell in plan.cells if cell.algorithm == name]
        if plan.report.best_over:
            cells = [cell for cell in cells if results.get_row_key(plan, cell) in data.table_row_keys]
        cell, matrices_by_name = cells[0], _read_model_matrices(cells[0].merged_files)
        if matrices_by_name:
            class_names = read_class_names_or_numbers(plan.get_run(cell).dataset, len(matrices_by_name["SL"]))
            configuration = results.describe_configuration(name, results.format_grid_point(plan, cell))
            selected_matrices[configuration] = ModelMatrices(cell, matrices_by_name, class_names)
    return selected_matrices


def read_last_measured_matrices(files: MergedRoundFiles) -> pd.DataFrame:
    """Read the matrices of the last round's global model on the global test set. Empty for a method without one."""
    frame = results.read_merged_frame(files.matrices)
    if "source" in frame:
        frame = frame[(frame["source"] == "measured") & (frame["client"] == -1)]
        frame = frame[frame["round"] == frame["round"].max()]
    return frame


def _read_model_matrices(files: MergedRoundFiles) -> dict[str, FloatArray]:
    """Read SL and CR of the last round's global model. Empty for a method without one."""
    frame = read_last_measured_matrices(files)
    if frame.empty:
        return {}
    frame = frame.sort_values("class")
    columns = [str(number) for number in range(frame["class"].nunique())]
    return {str(name): rows[columns].to_numpy() for name, rows in frame.groupby("matrix")}
