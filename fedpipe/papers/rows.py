"""From what was run to the rows that `fedpipe.papers.cells` takes: one for each cell of the papers' tables.

What a cell is made of follows from the names of its row and column, which are the study's: a method's label, and the
values of the study's axes. Three tables are of other quantities than accuracy; each has a function here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedpipe.papers import cells, layouts
from fedpipe.papers.layouts import Paper, Table, Text
from fedpipe.papers.published import Place
from fedpipe.papers.ran import Study
from fedpipe.planned import Cell
from fedpipe.report import results

Studies = Callable[[str], Study | None]  #: a paper's study by its name
Row = dict[str, Any]
NO_STUDY = "no study of it is planned at this scale"


def measured(paper: Paper, studies: Studies) -> list[Row]:
    """A row for each cell of a paper's tables, and each number of its text, that is measured by itself."""
    rows: list[Row] = []
    for name, table in paper.tables.items():
        for place in cells.of_table(paper, name):
            if not table.rows[place.row].minus:
                rows.append(_row(place, _cell(paper, table, place, studies)))
    for text in paper.text:
        if not (text.minus or text.largest):
            place = Place(paper.paper, layouts.TEXT, text.row, text.column, text.metric)
            rows.append(_row(place, _of_text(text, studies)))
    return rows


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as `fedpipe.papers.cells.measured` takes them."""
    columns = [*cells.REQUIRED, *cells.OPTIONAL]
    return pd.DataFrame([{name: row.get(name) for name in columns} for row in rows], columns=columns).astype(object)


def _row(place: Place, found: Row | str) -> Row:
    """A cell's row: its number, or the reason why it has none."""
    return {**place._asdict(), **(_dash(found) if isinstance(found, str) else found)}


def _dash(reason: str, hours: float = math.nan) -> Row:
    """A cell without a number: why, and the hours that it would take."""
    return {"reason": reason, "keys": [], "settings": {}, "hours": hours}


def _cell(paper: Paper, table: Table, place: Place, studies: Studies) -> Row | str:
    if place.metric == "server_memory_million_parameters":
        return _memory(place)
    if table.study is None:
        return cells.NOT_RUN
    origin = paper.original(place)
    study = studies(table.study)
    other = paper.tables[origin.table] if origin else None
    method = table.rows[place.row].method or ""
    column = place.column
    if origin and other and study and other.study and not study.cells(method, column):
        # a column that is another table's
        study, method, column = studies(other.study), other.rows[origin.row].method or "", origin.column
    if study is None:
        return NO_STUDY
    if place.metric == "hyperparameter":
        return _parameter(study, method, table.parameters.get(place.row, {}).get(column, ""), column)
    if place.metric == "communication_cost":
        return _sent(study, method)
    if place.metric == "time":
        found = _numbers(study, method, column, lambda cell: float(study.seconds(cell)[results.EPOCH].mean()))
    else:
        found = _accuracy(study, method, column)
    return _dash(found, study.hours_left(method, column)) if isinstance(found, str) else found


def _accuracy(study: Study, method: str, column: str) -> Row | str:
    found = _numbers(study, method, column, study.accuracy)
    if isinstance(found, str):
        return found
    first = next(cell for cell in study.done if cell.key in found["keys"] and cell.algorithm == method)
    point = results.label(results.point(study.plan, first))
    cell = ".".join(part for part in (method, point, study.protocol(method)) if part)
    table = study.plan.study.tables / "results.md"
    whole = table.is_file()
    return found | {
        "tests": study.tests(first),
        "classes": study.classes(first),
        "trace": f"fedpipe trace '{table}' '{cell}'" if whole else "",
    }


def _numbers(study: Study, method: str, column: str, of: Callable[[Cell], float | None]) -> Row | str:
    """A number over seeds: of the best value of each grid that the study searches, where it searches one."""
    mine = [cell for cell in study.done if (cell.algorithm, study.column(cell)) == (method, column)]
    by_value: dict[str, dict[int, tuple[Cell, float]]] = {}
    for cell in mine:
        if (value := of(cell)) is not None and math.isfinite(value):
            searched = str([cell.grid.get(name) for name in study.plan.report.best_over])
            by_value.setdefault(searched, {})[cell.seed] = (cell, value)
    if not by_value:
        return study.missing(method, column)
    best = max(by_value.values(), key=lambda found: np.mean([study.merit(cell) for cell, _ in found.values()]))
    return _over_seeds(study, best)


def _over_seeds(study: Study, found: Mapping[int, tuple[Cell, float]]) -> Row:
    values = {seed: value for seed, (_, value) in found.items()}
    made = [cell for cell, _ in found.values()]
    several = len(values) > 1
    return {
        "mean": float(np.mean(list(values.values()))),
        "std": float(np.std(list(values.values()), ddof=1)) if several else None,
        "runs": len(values),
        "values": values,
        "keys": [cell.key for cell in made],
        "settings": study.differing(made[0]),
        "hours": sum(study.hours(cell) for cell in made),
        "diverged": sum(cell.key in study.diverged for cell in made),
        "generated": any(study.is_generated(cell) for cell in made),
    }


def _parameter(study: Study, method: str, parameter: str, column: str) -> Row | str:
    """A setting of a method, as its runs have it; a column may name data, as ``k/CIFAR-10``."""
    data = column.partition("/")[2].split(" and ")
    for cell in study.plan.cells:
        there = study.column(cell).rpartition("/")[2].rstrip("*")
        if cell.algorithm == method and (data == [""] or there in data):
            value = study.settings(cell)["algorithm"].get(parameter)
            if value is not None:
                return {"mean": float(value), "runs": 1, "keys": [cell.key], "settings": {}, "hours": 0.0}
    return f"not part of scale {study.plan.scale}"


def _sent(study: Study, method: str) -> Row | str:
    """What a participant receives and sends in a round, in sizes of the model, which FedAvg sends once."""
    own = next((cell for cell in study.done if cell.algorithm == method), None)
    base = own and next((cell for cell in study.done if cell.algorithm == "fedavg" and cell.grid == own.grid), None)
    if own is None or base is None:
        return study.missing(method, next((study.column(cell) for cell in study.plan.cells), ""))
    size = study.traffic(base)["bytes_up"]
    settings = study.settings(own)["algorithm"]
    models = {"fedfomo": settings.get("downloads"), "ifca": settings.get("clusters")}.get(settings["name"], 1)
    sent = {own.seed: (own, float(study.traffic(own).sum() / size))}
    return _over_seeds(study, sent) | {"expected": None if models is None else 1.0 + models}


@functools.cache
def _held(label: str, classes: int) -> float:
    """Millions of elements that the server holds for ResNet-18, without what tells how its models are mixed."""
    from fedpipe.algorithms.cwfedavg import CwFedAvg
    from fedpipe.algorithms.fedavg import FedAvg
    from fedpipe.config import Federation
    from fedpipe.engine import server_memory
    from fedpipe.models.resnet18 import ResNet18

    method = {"fedavg": FedAvg(), "all": CwFedAvg(class_wise="all"), "output": CwFedAvg()}[label]
    federation = Federation(clients=20, buffers="keep")
    parts = server_memory.elements(method, ResNet18(), (3, 64, 64), classes, federation)
    return sum(count for part, count in parts.items() if part not in {"owned", "distributions"}) / 1e6


def _memory(place: Place) -> Row:
    method = layouts.papers()[place.paper].tables[place.table].rows[place.row].method or ""
    return {"mean": _held(method, int(place.column)), "runs": 1, "keys": [], "settings": {}, "hours": 0.0}


def _of_text(text: Text, studies: Studies) -> Row | str:
    """A number in running text that no table holds."""
    study = studies(text.study) if text.study else None
    if study is None:
        return NO_STUDY if text.study else cells.NOT_RUN
    if text.metric == "hyperparameter":
        return _parameter(study, text.method, text.parameter, text.column)
    if text.metric == "counterexamples":
        return _counterexamples(study)
    if text.than:
        return _gain(study, text)
    return _best(study, text)


def _gain(study: Study, text: Text) -> Row | str:
    """How much higher one method's accuracy is than another's, by seed."""
    one, two = (_numbers(study, method, text.column, study.accuracy) for method in (text.method, text.than))
    if isinstance(one, str) or isinstance(two, str):
        return one if isinstance(one, str) else str(two)
    values = {seed: value - two["values"][seed] for seed, value in one["values"].items() if seed in two["values"]}
    if not values:
        return cells.NOT_RUN
    return one | {
        "mean": float(np.mean(list(values.values()))),
        "std": float(np.std(list(values.values()), ddof=1)) if len(values) > 1 else None,
        "runs": len(values),
        "values": values,
        "keys": [*one["keys"], *two["keys"]],
        "hours": one["hours"] + two["hours"],
        "diverged": one["diverged"] + two["diverged"],
    }


def _best(study: Study, text: Text) -> Row | str:
    """The value of a parameter with the highest mean accuracy."""
    name = f"algorithms.{text.method}.{text.parameter}"
    found: dict[float, list[tuple[Cell, float]]] = {}
    for cell in study.done:
        if cell.algorithm == text.method and (value := study.accuracy(cell)) is not None:
            found.setdefault(float(cell.grid[name]), []).append((cell, value))
    if not found:
        return study.missing(text.method, next((study.column(cell) for cell in study.plan.cells), ""))
    best = max(found, key=lambda value: float(np.mean([accuracy for _, accuracy in found[value]])))
    made = [cell for cell, _ in found[best]]
    return {
        "mean": best,
        "runs": len(made),
        "keys": [cell.key for cell in made],
        "settings": study.differing(made[0]),
        "hours": sum(study.hours(cell) for cells_ in found.values() for cell, _ in cells_),
        "generated": any(study.is_generated(cell) for cell in made),
    }


def _counterexamples(study: Study) -> Row | str:
    """In how many experiments (clients) some class contradicts that norms fall as shares grow; see `contrary`."""
    found = [(cell, table) for cell in study.done for _, table in study.probes("head-norms", cell)]
    if not found:
        return study.missing(study.plan.algorithms[0], study.column(study.plan.cells[0]))
    count = sum(bool(contrary(part).any()) for _, table in found for _, part in table.groupby("owner") if len(part))
    made = [cell for cell, _ in found]
    return {
        "mean": float(count),
        "runs": len(made),
        "keys": [cell.key for cell in made],
        "settings": study.differing(made[0]),
        "hours": sum(study.hours(cell) for cell in made),
        "generated": any(study.is_generated(cell) for cell in made),
    }


def contrary(norms: pd.DataFrame) -> pd.Series[bool]:
    """Which classes of a client contradict that norms fall as shares grow: some other of less than half is below."""
    share, norm = norms["share"].fillna(0).to_numpy(), norms["norm"].to_numpy()
    below = (norm[None, :] < norm[:, None]) & (2 * share[None, :] < share[:, None])
    return pd.Series(below.any(axis=1), norms.index)
