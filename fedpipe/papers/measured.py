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
from fedpipe.papers.cells import Measured
from fedpipe.papers.layouts import Paper, Table, Text
from fedpipe.papers.published import Place
from fedpipe.papers.ran import Study
from fedpipe.papers.verdicts import Number
from fedpipe.planned import Cell
from fedpipe.report import results

Studies = Callable[[str], Study | None]  #: a paper's study by its name
NO_STUDY = "no study of it is planned at this scale"


def of(paper: Paper, studies: Studies) -> dict[Place, Measured]:
    """Each cell of a paper's tables, and each number of its text, that is not made of others."""
    found: dict[Place, Measured] = {}
    for name, table in paper.tables.items():
        for place in cells.of_table(paper, name):
            if not table.rows[place.row].minus:
                found[place] = _cell(paper, table, place, studies)
    for text in paper.text:
        if not (text.minus or text.largest):
            place = Place(paper.paper, layouts.TEXT, text.row, text.column, text.metric)
            found[place] = _of_text(text, studies)
    return found


def _dash(reason: str) -> Measured:
    return Measured(None, reason=reason)


def _cell(paper: Paper, table: Table, place: Place, studies: Studies) -> Measured:
    if place.metric == "server_memory_million_parameters":
        return _memory(place)
    if table.study is None:
        return _dash(cells.NOT_RUN)
    origin = paper.original(place)
    study = studies(table.study)
    other = paper.tables[origin.table] if origin else None
    method = table.rows[place.row].method or ""
    column = place.column
    if origin and other and study and other.study and not study.cells(method, column):
        # a column that is another table's
        study, method, column = studies(other.study), other.rows[origin.row].method or "", origin.column
    if study is None:
        return _dash(NO_STUDY)
    if place.metric == "hyperparameter":
        return _parameter(study, method, table.parameters.get(place.row, {}).get(column, ""), column)
    if place.metric == "communication_cost":
        return _sent(study, method)
    if place.metric == "time":
        found = _over_seeds(study, method, column, lambda cell: float(study.seconds(cell)[results.EPOCH].mean()))
    else:
        found = _accuracy(study, method, column)
    left = study.left(method, column)
    if found.number:
        return replace(found, lacking=study.hours_of(left)) if left else found
    return replace(found, hours=study.hours_of(left) if left else math.nan)


def _accuracy(study: Study, method: str, column: str) -> Measured:
    found = _over_seeds(study, method, column, study.accuracy)
    if found.number is None:
        return found
    first = next(cell for cell in study.done if cell.key in found.keys and cell.algorithm == method)
    point = results.label(results.point(study.plan, first))
    cell = ".".join(part for part in (method, point, study.protocol(method)) if part)
    table = study.plan.study.tables / "results.md"
    return replace(
        found,
        tests=study.tests(first),
        classes=study.classes(first),
        trace=f"fedpipe trace '{table}' '{cell}'" if table.is_file() else "",
    )


def _over_seeds(study: Study, method: str, column: str, of: Callable[[Cell], float | None]) -> Measured:
    """A number over seeds: of the best value of each grid that the study searches, where it searches one."""
    mine = [cell for cell in study.done if (cell.algorithm, study.column(cell)) == (method, column)]
    by_value: dict[str, dict[int, tuple[Cell, float]]] = {}
    for cell in mine:
        if (value := of(cell)) is not None and math.isfinite(value):
            searched = str([cell.grid.get(name) for name in study.plan.report.best_over])
            by_value.setdefault(searched, {})[cell.seed] = (cell, value)
    if not by_value:
        return _dash(study.missing(method, column))
    best = max(by_value.values(), key=lambda found: np.mean([study.merit(cell) for cell, _ in found.values()]))
    number = Number.of({seed: value for seed, (_, value) in best.items()})
    return _made(study, number, [cell for cell, _ in best.values()])


def _made(study: Study, number: Number, runs: Sequence[Cell]) -> Measured:
    """A number, and the runs that it is made of."""
    return Measured(
        number,
        keys=tuple(cell.key for cell in runs),
        settings=study.differing(runs[0]),
        hours=sum(study.hours(cell) for cell in runs),
        diverged=sum(cell.key in study.diverged for cell in runs),
        generated=any(study.is_generated(cell) for cell in runs),
    )


def _parameter(study: Study, method: str, parameter: str, column: str) -> Measured:
    """A setting of a method, as its runs have it; a column may name data, as ``k/CIFAR-10``."""
    data = column.partition("/")[2].split(" and ")
    for cell in study.plan.cells:
        there = study.column(cell).rpartition("/")[2].rstrip("*")
        if cell.algorithm == method and (data == [""] or there in data):
            value = study.settings(cell)["algorithm"].get(parameter)
            if value is not None:
                return Measured(Number(float(value), runs=1), keys=(cell.key,), hours=0.0)
    return _dash(f"not part of scale {study.plan.scale}")


def _sent(study: Study, method: str) -> Measured:
    """What a participant receives and sends in a round, in sizes of the model, which FedAvg sends once."""
    own = next((cell for cell in study.done if cell.algorithm == method), None)
    base = own and next((cell for cell in study.done if cell.algorithm == "fedavg" and cell.grid == own.grid), None)
    if own is None or base is None:
        return _dash(study.missing(method, next((study.column(cell) for cell in study.plan.cells), "")))
    size = study.traffic(base)["bytes_up"]
    settings = study.settings(own)["algorithm"]
    models = {"fedfomo": settings.get("downloads"), "ifca": settings.get("clusters")}.get(settings["name"], 1)
    sent = Number.of({own.seed: float(study.traffic(own).sum() / size)})
    return replace(_made(study, sent, [own]), expected=None if models is None else 1.0 + models)


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


def _memory(place: Place) -> Measured:
    method = layouts.papers()[place.paper].tables[place.table].rows[place.row].method or ""
    return Measured(Number(_held(method, int(place.column)), runs=1), hours=0.0)


def _of_text(text: Text, studies: Studies) -> Measured:
    """A number in running text that no table holds."""
    study = studies(text.study) if text.study else None
    if study is None:
        return _dash(NO_STUDY if text.study else cells.NOT_RUN)
    if text.metric == "hyperparameter":
        return _parameter(study, text.method, text.parameter, text.column)
    if text.metric == "counterexamples":
        return _counterexamples(study)
    if text.than:
        return _gain(study, text)
    return _best(study, text)


def _gain(study: Study, text: Text) -> Measured:
    """How much higher one method's accuracy is than another's."""
    one, two = (_over_seeds(study, method, text.column, study.accuracy) for method in (text.method, text.than))
    if not (one.number and two.number):
        return two if one.number else one
    return replace(
        one,
        number=one.number.minus(two.number),
        keys=(*one.keys, *two.keys),
        hours=one.hours + two.hours,
        diverged=one.diverged + two.diverged,
        generated=one.generated or two.generated,
    )


def _best(study: Study, text: Text) -> Measured:
    """The value of a parameter with the highest mean accuracy, once all of the study's values were run."""
    name = f"algorithms.{text.method}.{text.parameter}"
    planned = [cell for cell in study.plan.cells if cell.algorithm == text.method]
    found: dict[float, list[tuple[Cell, float]]] = {}
    for cell in planned:
        value = study.accuracy(cell) if cell in study.done else None
        if value is None:
            return _dash(study.missing(text.method, study.column(cell)))
        found.setdefault(float(cell.grid[name]), []).append((cell, value))
    best = max(found, key=lambda value: float(np.mean([accuracy for _, accuracy in found[value]])))
    runs = [cell for cell, _ in found[best]]
    tried = sum(study.hours(cell) for several in found.values() for cell, _ in several)
    return replace(_made(study, Number(best, runs=len(runs)), runs), hours=tried)


def _counterexamples(study: Study) -> Measured:
    """In how many of a hundred experiments (clients) some class contradicts that norms fall as shares grow."""
    found = [(cell, table) for cell in study.done for _, table in study.probes("head-norms", cell)]
    if not found:
        return _dash(study.missing(study.plan.algorithms[0], study.column(study.plan.cells[0])))
    experiments = [bool(contrary(part).any()) for _, table in found for _, part in table.groupby("owner")]
    return _made(study, Number(100 * float(np.mean(experiments)), runs=1), [cell for cell, _ in found])


def contrary(norms: pd.DataFrame) -> pd.Series[bool]:
    """Which classes of a client contradict that norms fall as shares grow: some other of less than half is below."""
    share, norm = norms["share"].fillna(0).to_numpy(), norms["norm"].to_numpy()
    below = (norm[None, :] < norm[:, None]) & (2 * share[None, :] < share[:, None])
    return pd.Series(below.any(axis=1), norms.index)
