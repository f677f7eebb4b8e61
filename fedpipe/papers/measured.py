"""From what was run to the papers' cells: a number, or the reason why there is none, for each not made of others.

What a cell is made of follows from the names of its row and column, which are the study's: a method's label, and the
values of the study's axes. Three tables are of other quantities than accuracy; each has a function here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from fedpipe.papers import cells, layouts
from fedpipe.papers.cells import MeasuredCell
from fedpipe.papers.layouts import Paper, Table, Text
from fedpipe.papers.published import CellId
from fedpipe.papers.ran import PaperStudy
from fedpipe.papers.verdicts import Number
from fedpipe.planning.plan import Cell
from fedpipe.report import results

StudyFinder = Callable[[str], PaperStudy | None]  #: a paper's study by its name
NO_STUDY = "no study of it is planned at this scale"


def measure_cells(paper: Paper, find_study: StudyFinder) -> dict[CellId, MeasuredCell]:
    """Each cell of a paper's tables, and each number of its text, that is not made of others."""
    measured_cells: dict[CellId, MeasuredCell] = {}
    for name, table in paper.tables.items():
        for cell_id in cells.get_table_cell_ids(paper, name):
            if not table.rows[cell_id.row].minus:
                measured_cells[cell_id] = _measure_cell(paper, table, cell_id, find_study)
    for text in paper.text:
        if not (text.minus or text.largest):
            cell_id = CellId(paper.paper, layouts.TEXT_TABLE, text.row, text.column, text.metric)
            measured_cells[cell_id] = _measure_text_number(text, find_study)
    return measured_cells


def _make_missing_cell(reason: str) -> MeasuredCell:
    return MeasuredCell(None, reason=reason)


def _measure_cell(paper: Paper, table: Table, cell_id: CellId, find_study: StudyFinder) -> MeasuredCell:
    if cell_id.metric == "server_memory_million_parameters":
        return _measure_server_memory(cell_id)
    if table.study is None:
        return _make_missing_cell(cells.NOT_RUN)
    original_id = paper.find_original(cell_id)
    study = find_study(table.study)
    original_table = paper.tables[original_id.table] if original_id else None
    method = table.rows[cell_id.row].method or ""
    column = cell_id.column
    if original_id and original_table and study and original_table.study and not study.get_cells(method, column):
        # a column that is another table's
        study, method, column = (
            find_study(original_table.study),
            original_table.rows[original_id.row].method or "",
            original_id.column,
        )
    if study is None:
        return _make_missing_cell(NO_STUDY)
    if cell_id.metric == "hyperparameter":
        return _read_parameter(study, method, table.parameters.get(cell_id.row, {}).get(column, ""), column)
    if cell_id.metric == "communication_cost":
        return _measure_communication_cost(study, method)
    if cell_id.metric == "time":
        measured_cell = _measure_over_seeds(
            study, method, column, lambda cell: float(study.load_seconds(cell)[results.EPOCH_COLUMN].mean())
        )
    else:
        measured_cell = _measure_accuracy(study, method, column)
    missing_cells = study.get_missing_cells(method, column)
    if measured_cell.number:
        return (
            replace(measured_cell, missing_hours=study.estimate_hours(missing_cells))
            if missing_cells
            else measured_cell
        )
    return replace(measured_cell, hours=study.estimate_hours(missing_cells) if missing_cells else math.nan)


def _measure_accuracy(study: PaperStudy, method: str, column: str) -> MeasuredCell:
    measured_cell = _measure_over_seeds(study, method, column, study.get_accuracy)
    if measured_cell.number is None:
        return measured_cell
    first = next(cell for cell in study.finished_cells if cell.key in measured_cell.keys and cell.algorithm == method)
    point = results.describe_point(results.format_point(study.plan, first))
    cell = ".".join(name_part for name_part in (method, point, study.get_protocol(method)) if name_part)
    table = study.plan.study_files.result_table("md")
    return replace(
        measured_cell,
        test_samples=study.count_test_samples(first),
        classes=study.count_classes(first),
        trace_command=f"fedpipe trace '{table}' '{cell}'" if table.is_file() else "",
    )


def _measure_over_seeds(
    study: PaperStudy, method: str, column: str, get_value: Callable[[Cell], float | None]
) -> MeasuredCell:
    """A number over seeds: of the best value of each grid that the study searches, where it searches one."""
    finished_cells = [
        cell for cell in study.finished_cells if (cell.algorithm, study.get_column(cell)) == (method, column)
    ]
    by_value: dict[str, dict[int, tuple[Cell, float]]] = {}
    for cell in finished_cells:
        if (value := get_value(cell)) is not None and math.isfinite(value):
            searched_values = str([cell.grid.get(name) for name in study.plan.report.best_over])
            by_value.setdefault(searched_values, {})[cell.seed] = (cell, value)
    if not by_value:
        return _make_missing_cell(study.explain_missing(method, column))
    best = max(
        by_value.values(),
        key=lambda runs_by_seed: np.mean([study.get_selection_accuracy(cell) for cell, _ in runs_by_seed.values()]),
    )
    number = Number.from_values({seed: value for seed, (_, value) in best.items()})
    return _build_measured_cell(study, number, [cell for cell, _ in best.values()])


def _build_measured_cell(study: PaperStudy, number: Number, runs: Sequence[Cell]) -> MeasuredCell:
    """A number, and the runs that it is made of."""
    return MeasuredCell(
        number,
        keys=tuple(cell.key for cell in runs),
        settings=study.get_differing_settings(runs[0]),
        hours=sum(study.compute_hours(cell) for cell in runs),
        diverged_runs=sum(cell.key in study.diverged_keys for cell in runs),
        is_generated=any(study.is_generated(cell) for cell in runs),
    )


def _read_parameter(study: PaperStudy, method: str, parameter: str, column: str) -> MeasuredCell:
    """A setting of a method, as its runs have it; a column may name data, as ``k/CIFAR-10``."""
    data = column.partition("/")[2].split(" and ")
    for cell in study.plan.cells:
        cell_data = study.get_column(cell).rpartition("/")[2].rstrip("*")
        if cell.algorithm == method and (data == [""] or cell_data in data):
            value = study.read_settings(cell)["algorithm"].get(parameter)
            if value is not None:
                return MeasuredCell(Number(float(value), runs=1), keys=(cell.key,), hours=0.0)
    return _make_missing_cell(f"not part of scale {study.plan.scale}")


def _measure_communication_cost(study: PaperStudy, method: str) -> MeasuredCell:
    """What a participant receives and sends in a round, in sizes of the model, which FedAvg sends once."""
    method_cell = next((cell for cell in study.finished_cells if cell.algorithm == method), None)
    baseline_cell = method_cell and next(
        (cell for cell in study.finished_cells if cell.algorithm == "fedavg" and cell.grid == method_cell.grid), None
    )
    if method_cell is None or baseline_cell is None:
        return _make_missing_cell(
            study.explain_missing(method, next((study.get_column(cell) for cell in study.plan.cells), ""))
        )
    size = study.load_traffic(baseline_cell)["bytes_up"]
    settings = study.read_settings(method_cell)["algorithm"]
    models = {"fedfomo": settings.get("downloads"), "ifca": settings.get("clusters")}.get(settings["name"], 1)
    relative_cost = Number.from_values({method_cell.seed: float(study.load_traffic(method_cell).sum() / size)})
    return replace(
        _build_measured_cell(study, relative_cost, [method_cell]), expected=None if models is None else 1.0 + models
    )


@functools.cache
def _count_server_elements(label: str, classes: int) -> float:
    """Millions of elements that the server holds for ResNet-18, without what tells how its models are mixed."""
    from fedpipe.algorithms.cwfedavg import CwFedAvg
    from fedpipe.algorithms.fedavg import FedAvg
    from fedpipe.models.resnet18 import ResNet18
    from fedpipe.papers.server_memory import count_server_elements
    from fedpipe.settings.federation import Federation

    method = {"fedavg": FedAvg(), "all": CwFedAvg(class_wise="all"), "output": CwFedAvg()}[label]
    federation = Federation(clients=20, buffers="keep")
    elements_by_part = count_server_elements(method, ResNet18(), (3, 64, 64), classes, federation)
    return (
        sum(count for part_name, count in elements_by_part.items() if part_name not in {"owned", "distributions"}) / 1e6
    )


def _measure_server_memory(cell_id: CellId) -> MeasuredCell:
    method = layouts.load_papers()[cell_id.paper].tables[cell_id.table].rows[cell_id.row].method or ""
    return MeasuredCell(Number(_count_server_elements(method, int(cell_id.column)), runs=1), hours=0.0)


def _measure_text_number(text: Text, find_study: StudyFinder) -> MeasuredCell:
    """A number in running text that no table holds."""
    study = find_study(text.study) if text.study else None
    if study is None:
        return _make_missing_cell(NO_STUDY if text.study else cells.NOT_RUN)
    if text.metric == "hyperparameter":
        return _read_parameter(study, text.method, text.parameter, text.column)
    if text.metric == "counterexamples":
        return _measure_counterexamples(study)
    if text.than:
        return _measure_gain(study, text)
    return _find_best_parameter(study, text)


def _measure_gain(study: PaperStudy, text: Text) -> MeasuredCell:
    """How much higher one method's accuracy is than another's."""
    first, second = (
        _measure_over_seeds(study, method, text.column, study.get_accuracy) for method in (text.method, text.than)
    )
    if not (first.number and second.number):
        return second if first.number else first
    return replace(
        first,
        number=first.number.subtract(second.number),
        keys=(*first.keys, *second.keys),
        hours=first.hours + second.hours,
        diverged_runs=first.diverged_runs + second.diverged_runs,
        is_generated=first.is_generated or second.is_generated,
    )


def _find_best_parameter(study: PaperStudy, text: Text) -> MeasuredCell:
    """The value of a parameter with the highest mean accuracy, once all of the study's values were run."""
    name = f"algorithms.{text.method}.{text.parameter}"
    planned_cells = [cell for cell in study.plan.cells if cell.algorithm == text.method]
    runs_by_value: dict[float, list[tuple[Cell, float]]] = {}
    for cell in planned_cells:
        value = study.get_accuracy(cell) if cell in study.finished_cells else None
        if value is None:
            return _make_missing_cell(study.explain_missing(text.method, study.get_column(cell)))
        runs_by_value.setdefault(float(cell.grid[name]), []).append((cell, value))
    best = max(runs_by_value, key=lambda value: float(np.mean([accuracy for _, accuracy in runs_by_value[value]])))
    runs = [cell for cell, _ in runs_by_value[best]]
    total_hours = sum(study.compute_hours(cell) for value_runs in runs_by_value.values() for cell, _ in value_runs)
    return replace(_build_measured_cell(study, Number(best, runs=len(runs)), runs), hours=total_hours)


def _measure_counterexamples(study: PaperStudy) -> MeasuredCell:
    """In how many of a hundred experiments (clients) some class contradicts that norms fall as shares grow."""
    probe_tables = [
        (cell, table) for cell in study.finished_cells for _, table in study.load_probes("head-norms", cell)
    ]
    if not probe_tables:
        return _make_missing_cell(
            study.explain_missing(study.plan.algorithms[0], study.get_column(study.plan.cells[0]))
        )
    experiments = [
        bool(find_contradictions(client_norms).any())
        for _, table in probe_tables
        for _, client_norms in table.groupby("owner")
    ]
    return _build_measured_cell(
        study, Number(100 * float(np.mean(experiments)), runs=1), [cell for cell, _ in probe_tables]
    )


def find_contradictions(norms: pd.DataFrame) -> pd.Series[bool]:
    """Which classes of a client contradict that norms fall as shares grow: some other of less than half is below."""
    share, norm = norms["share"].fillna(0).to_numpy(), norms["norm"].to_numpy()
    is_contradicted = (norm[None, :] < norm[:, None]) & (2 * share[None, :] < share[:, None])
    return pd.Series(is_contradicted.any(axis=1), norms.index)
