"""From runs to the papers' cells: a number, or the reason why there is none.

The names of a cell's row and column are those of the study: a method's label, and values of the study's axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pandas as pd

from fedpipe.algorithms.base import Algorithm
from fedpipe.core.components import component, registry
from fedpipe.papers import comparison
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.papers.layouts import Paper, Table, Text
from fedpipe.papers.published import CellId
from fedpipe.papers.studies import PaperStudy
from fedpipe.planning.plan import Cell
from fedpipe.report import results
from fedpipe.report.contrasts import RunMean

StudyFinder = Callable[[str], PaperStudy | None]  #: a paper's study by its name
NO_STUDY = "its study is not planned at this preset"


def measure_paper_cells(paper: Paper, find_study: StudyFinder) -> dict[CellId, MeasuredCell]:
    """Each cell of a paper's tables, and each number of its text, that is not computed from others."""
    cells = {
        cell_id: _measure_cell(paper, table, cell_id, find_study)
        for name, table in paper.tables.items()
        for cell_id in comparison.list_table_cell_ids(paper, name)
        if not table.rows[cell_id.row].minus
    }
    texts = [text for text in paper.text if not (text.minus or text.largest)]
    return cells | {paper.make_prose_number_id(text): measure_prose_number(text, find_study) for text in texts}


def _measure_cell(paper: Paper, table: Table, cell_id: CellId, find_study: StudyFinder) -> MeasuredCell:
    method, column = table.rows[cell_id.row].method or "", cell_id.column
    if cell_id.metric == "server_memory_million_parameters":
        return MeasuredCell(RunMean(_count_million_server_elements(method, int(column)), runs=1))
    study = find_study(table.study) if table.study else None
    original = paper.find_original_cell(cell_id)
    if original and study and not study.get_cells(method, column):  # a column of another table's study
        other = paper.tables[original.table]
        study, method, column = find_study(other.study or ""), other.rows[original.row].method or "", original.column
    if study is None:
        return MeasuredCell(None, reason=NO_STUDY if table.study else comparison.NOT_RUN)
    parameter = table.parameters.get(cell_id.row, {}).get(column, "")
    if cell_id.metric == "hyperparameter":
        return _read_parameter_value(study, method, parameter, column)
    if cell_id.metric == "communication_cost":
        return _measure_communication_cost(study, method, parameter)
    if cell_id.metric == "time":
        return _measure_mean_over_seeds(study, method, column, lambda cell: study.get_run(cell).epoch_seconds)
    return _measure_accuracy(study, method, column)


def _measure_accuracy(study: PaperStudy, method: str, column: str) -> MeasuredCell:
    measured_cell = _measure_mean_over_seeds(study, method, column, study.get_accuracy)
    if measured_cell.number is None:
        return measured_cell
    first = next(
        cell
        for cell in study.finished_cells
        if cell.algorithm == method and study.get_run(cell).key in measured_cell.keys
    )
    run, protocol = study.get_run(first), study.get_protocol(method)
    point = results.describe_grid_point(results.format_grid_point(study.plan, first))
    name = ".".join(filter(None, (method, point, protocol)))
    table = study.plan.study_files.get_result_table_path("md")
    return replace(
        measured_cell,
        test_samples=run.count_test_samples(protocol),
        classes=run.classes,
        trace_command=f"fedpipe trace '{table}' '{name}'" if first in study.local_cells and table.is_file() else "",
    )


def _measure_mean_over_seeds(
    study: PaperStudy, method: str, column: str, get_value: Callable[[Cell], float | None]
) -> MeasuredCell:
    """A number over seeds. If the study searches parameters, of the best searched values."""
    names = study.plan.report.best_over
    rows = [
        (str([cell.grid.get(name) for name in names]), cell.seed, cell, value)
        for cell in study.get_cells(method, column)
        if cell in study.finished_cells and (value := get_value(cell)) is not None and math.isfinite(value)
    ]
    if not rows:
        return MeasuredCell(None, reason=study.explain_missing_number(method, column))
    frame = pd.DataFrame(rows, columns=["searched", "seed", "cell", "value"])
    selection = frame["cell"].map(study.get_selection_accuracy).groupby(frame["searched"], sort=False).mean()
    best = frame[frame["searched"] == selection.idxmax()]
    number = RunMean.from_values(dict(zip(best["seed"], map(float, best["value"]), strict=True)))
    measured_cell = _make_measured_cell(study, number, list(best["cell"]))
    return replace(measured_cell, is_incomplete=bool(study.get_missing_cells(method, column)))


def _make_measured_cell(study: PaperStudy, number: RunMean, cells: Sequence[Cell]) -> MeasuredCell:
    runs = [study.get_run(cell) for cell in cells]
    return MeasuredCell(
        number,
        keys=tuple(run.key for run in runs),
        origins={run.key: study.describe_origin(cell) for run, cell in zip(runs, cells, strict=True)},
        diverged_runs=sum(run.is_diverged for run in runs),
        is_generated=any(run.is_generated for run in runs),
    )


def _read_parameter_value(study: PaperStudy, method: str, parameter: str, column: str) -> MeasuredCell:
    """A setting of a method, as its runs have it. A column may name data, as in ``k/CIFAR-10``."""
    data = column.partition("/")[2].split(" and ")
    for cell in study.plan.cells:
        cell_data = study.get_column_name(cell).rpartition("/")[2].rstrip("*")
        is_selected = cell.algorithm == method and (data == [""] or cell_data in data)
        if is_selected and (value := study.read_settings(cell)["algorithm"].get(parameter)) is not None:
            return MeasuredCell(RunMean(float(value), runs=1), keys=(cell.key,))
    return MeasuredCell(None, reason=f"not part of preset {study.plan.preset}")


def _measure_communication_cost(study: PaperStudy, method: str, parameter: str) -> MeasuredCell:
    """Communication of a participant in the last round, in units of the model size, which FedAvg sends once."""
    cell = next((cell for cell in study.finished_cells if cell.algorithm == method), None)
    baselines = [base for base in study.finished_cells if cell and (base.algorithm, base.grid) == ("fedavg", cell.grid)]
    if cell is None or not baselines:
        return MeasuredCell(
            None, reason=study.explain_missing_number(method, study.get_column_name(study.plan.cells[0]))
        )
    traffic, baseline_traffic = (study.get_run(each).last_round_traffic for each in (cell, baselines[0]))
    cost = (traffic.down + traffic.up) / baseline_traffic.up
    models = study.read_settings(cell)["algorithm"][parameter] if parameter else 1
    measured_cell = _make_measured_cell(study, RunMean.from_values({cell.seed: cost}), [cell])
    return replace(measured_cell, expected=None if models is None else 1.0 + models)


@functools.cache
def _count_million_server_elements(method_name: str, num_classes: int) -> float:
    """Millions of elements that the server stores for ResNet-18, without those that name classes and distributions."""
    from fedpipe.models.resnet18 import ResNet18
    from fedpipe.papers.server_memory import count_server_elements
    from fedpipe.settings.federation import Federation

    name, parameters = ("fedavg", {}) if method_name == "fedavg" else ("cwfedavg", {"class_wise": method_name})
    method = cast(Algorithm, registry.build_component(component.ALGORITHM, name, parameters))
    federation = Federation(clients=20, buffers="keep")
    elements = count_server_elements(method, ResNet18(), (3, 64, 64), num_classes, federation)
    return sum(count for part, count in elements.items() if part not in {"owned", "distributions"}) / 1e6


def measure_prose_number(text: Text, find_study: StudyFinder) -> MeasuredCell:
    """A number in running text that is in no table."""
    study = find_study(text.study) if text.study else None
    if study is None:
        return MeasuredCell(None, reason=NO_STUDY if text.study else comparison.NOT_RUN)
    if text.metric == "hyperparameter":
        return _read_parameter_value(study, text.method, text.parameter, text.column)
    if text.metric == "counterexamples":
        return _measure_counterexample_percentage(study)
    if text.rival:
        cells = [
            _measure_mean_over_seeds(study, name, text.column, study.get_accuracy) for name in (text.method, text.rival)
        ]
        return cells[0].compute_scaled_difference(cells[1])
    return _find_best_parameter_value(study, text)


def _find_best_parameter_value(study: PaperStudy, text: Text) -> MeasuredCell:
    """The value of a parameter with the highest mean accuracy, after all of the study's values have run."""
    name = f"algorithms.{text.method}.{text.parameter}"
    cells = [cell for cell in study.plan.cells if cell.algorithm == text.method]
    accuracies = [study.get_accuracy(cell) if cell in study.finished_cells else None for cell in cells]
    if None in accuracies:
        column = study.get_column_name(cells[accuracies.index(None)])
        return MeasuredCell(None, reason=study.explain_missing_number(text.method, column))
    frame = pd.DataFrame({"value": [float(cell.grid[name]) for cell in cells], "accuracy": accuracies})
    best: float = frame.groupby("value", sort=False)["accuracy"].mean().idxmax()  # type: ignore[assignment]
    best_cells = [cell for cell in cells if float(cell.grid[name]) == best]
    return _make_measured_cell(study, RunMean(best, runs=len(best_cells)), best_cells)


def _measure_counterexample_percentage(study: PaperStudy) -> MeasuredCell:
    """How many of a hundred clients have a class that contradicts FedDW's claim about norms."""
    tables = [(cell, table) for cell in study.finished_cells for table in study.load_diagnostics("head-norms", cell)]
    if not tables:
        reason = study.explain_missing_number(study.plan.algorithms[0], study.get_column_name(study.plan.cells[0]))
        return MeasuredCell(None, reason=reason)
    clients = [
        bool(mark_contradicting_classes(norms).any()) for _, table in tables for _, norms in table.groupby("owner")
    ]
    number = RunMean(100 * sum(clients) / len(clients), runs=1)
    return _make_measured_cell(study, number, [cell for cell, _ in tables])


def mark_contradicting_classes(norms: pd.DataFrame) -> pd.Series[bool]:
    """The classes of a client whose norm is above that of a class with less than half of their share of samples."""
    share, norm = norms["share"].fillna(0).to_numpy(), norms["norm"].to_numpy()
    is_contradicted = (norm[None, :] < norm[:, None]) & (2 * share[None, :] < share[:, None])
    return pd.Series(is_contradicted.any(axis=1), norms.index)
