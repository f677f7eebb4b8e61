"""From what was run to the papers' figures: the tidy frame of each, drawn in its form, with its numbers as CSV.

What a figure shows stands in `layouts` by the names of its study's grid; there is a function for each form here, and
none for a single figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedpipe import artifacts
from fedpipe.data.assignment import Assignment
from fedpipe.papers import cells, figures
from fedpipe.papers.layouts import DIAGRAM, Figure, Paper, Part
from fedpipe.papers.measured import NO_STUDY, Studies, contrary
from fedpipe.papers.ran import Study
from fedpipe.papers.svg import Drawn
from fedpipe.planned import Cell

Found = list[tuple[Study, Part, Cell]]  #: the runs of a figure that are done
TRAIN = "personal-on-train"
EXPERIMENTS = 3  #: clients of each data set whose norms are drawn as circles
LABELS = {"accuracy": "test accuracy (%)", "loss": "training loss", "error": "R, mean |p − p̃|"}
TOY = "The toy network's data are not published, so that it was not made."


def drawn(paper: Paper, studies: Studies) -> dict[tuple[str, str], Drawn | str]:
    """All figures of a paper by its name and theirs; where one can't be drawn, the reason."""
    return {(paper.paper, name): _drawn(paper, figure, studies) for name, figure in paper.figures.items()}


def _drawn(paper: Paper, figure: Figure, studies: Studies) -> Drawn | str:
    if figure.form == "diagram":
        return DIAGRAM
    if figure.form == "paths":
        return TOY
    names = _Names(paper, figure)
    found, missing = _found(names, figure, studies)
    if not found:
        return f"Not drawn: {next(iter(missing), cells.NOT_RUN)}."
    made = FORMS[figure.form](names, figure, found)
    if made is None:
        return f"Not drawn: {next(iter(missing), 'its probes were not run')}."
    generated = any(study.is_generated(cell) for study, _, cell in found)
    told = "; ".join(f"{', '.join(dict.fromkeys(which))} ({reason})" for reason, which in missing.items())
    return dataclasses.replace(made, generated=generated, missing=told)


def _found(names: _Names, figure: Figure, studies: Studies) -> tuple[Found, dict[str, list[str]]]:
    """The runs of a figure that are done, and which others are not, by the reason."""
    found: Found = []
    missing: dict[str, list[str]] = {}
    for part in figure.parts:
        study = studies(part.study)
        if study is None:
            missing.setdefault(NO_STUDY, []).append(part.study)
            continue
        wanted = [cell for cell in study.plan.cells if _wanted(part, cell)]
        done = set(map(id, study.done))
        found += [(study, part, cell) for cell in study.done if _wanted(part, cell)]
        for cell in (cell for cell in wanted if id(cell) not in done):
            which = ", ".join(filter(None, (names.method(cell.algorithm), study.column(cell))))
            missing.setdefault(study.missing(cell.algorithm, study.column(cell)), []).append(which)
        if not wanted:
            missing.setdefault(f"not part of scale {study.plan.scale}", []).append(part.study)
    return found, missing


def _wanted(part: Part, cell: Cell) -> bool:
    """Whether a part of a figure has this cell; what does not concern the cell's method can't keep it out."""
    for name, value in part.where.items():
        values = value if isinstance(value, list | tuple) else [value]
        if name in cell.grid and cell.grid[name] not in values:
            return False
    return not part.algorithms or cell.algorithm in part.algorithms


class _Names:
    """Names of methods, panels and lines, as a reader of the paper knows them."""

    def __init__(self, paper: Paper, figure: Figure) -> None:
        self.paper, self.figure = paper, figure
        tables = sorted(paper.tables.values(), key=lambda table: table.study != figure.study)
        self.methods: dict[str, str] = {}
        for name, row in ((name, row) for table in tables for name, row in table.rows.items()):
            self.methods.setdefault(row.method or "", name)

    def method(self, label: str) -> str:
        """A method by its label."""
        return self.methods.get(label, label)

    def value(self, study: Study, cell: Cell, name: str) -> str:
        """The value of one name of the grid, or the method's name."""
        if name == "algorithm":
            return self.method(cell.algorithm)
        if name == "data" and name not in study.plan.grid:  # a study of one data set
            return _dataset(study, cell)
        if name not in cell.grid:
            return ""
        value = cell.grid[name]
        return value if isinstance(value, str) else f"{_symbol(name)} = {value:g}"

    def panel(self, study: Study, cell: Cell) -> str:
        """The panel of a cell."""
        found = [self.value(study, cell, name) for name in self.figure.panels if name != "client"]
        return ", ".join(filter(None, found))

    def line(self, study: Study, cell: Cell) -> str:
        """The line of a cell."""
        return ", ".join(filter(None, (self.value(study, cell, name) for name in self.figure.lines)))


def _symbol(name: str) -> str:
    short = name.rpartition(".")[2]
    return {"alpha": "α", "participation": "P"}.get(short, short)


def _dataset(study: Study, cell: Cell) -> str:
    settings = study.settings(cell)["dataset"]
    name = str(settings.get("like", settings["name"]))
    return {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "FMNIST", "mnist": "MNIST"}.get(name, name)


# -- what is measured ------------------------------------------------------------------------------------------------


def _curve(study: Study, cell: Cell, measure: str, client: int | None = None) -> pd.DataFrame:
    """``x`` (round) and ``value`` of a run."""
    if measure == "accuracy":
        own = study.accuracies
        here = (own["key"] == cell.key) & (own["algorithm"] == cell.algorithm)
        here &= (own["protocol"] == study.protocol(cell.algorithm)) & (own["round"] <= cell.rounds)
        frame = own[here].drop_duplicates("round")
        return pd.DataFrame({"x": frame["round"], "value": 100 * frame["accuracy"]})
    frame = study.metrics(cell)
    frame = frame[(frame["protocol"] == TRAIN) & (frame["total"] > 0)]
    if client is not None:
        frame = frame[frame["client"] == client]
    total = frame.assign(loss=frame["loss"] * frame["total"]).groupby("round")[["loss", "total"]].sum(skipna=False)
    return pd.DataFrame({"x": total.index, "value": total["loss"] / total["total"]})


def _point(study: Study, cell: Cell, measure: str) -> float | None:
    if measure == "accuracy":
        return study.accuracy(cell)
    found = [table for _, table in study.probes("head-norms", cell)]
    return _error(found[0]) if found else None


def _error(table: pd.DataFrame) -> float:
    """Mean over clients of the distance between their class shares and those that the norms tell: R."""
    mine = table[table["model"] == "trained"]
    squares = (mine["share"] - mine["relative"]) ** 2
    return float(squares.groupby(mine["owner"]).sum().pow(0.5).mean())


def _over_seeds(rows: Sequence[Mapping[Any, Any]], keys: Sequence[str]) -> pd.DataFrame:
    """Mean and, where there are several seeds, standard deviation of ``value``."""
    frame = pd.DataFrame(rows)
    found = frame.groupby(list(keys), sort=False)["value"].agg(["mean", "std", "count"]).reset_index()
    return found.drop(columns=["count", "std"] if found["count"].max() < 2 else ["count"])


# -- forms -----------------------------------------------------------------------------------------------------------


def _curves(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    rows = []
    (measure,) = figure.measures
    for study, _, cell in found:
        panel, line = names.panel(study, cell), names.line(study, cell)
        if "client" in figure.panels:
            metrics = study.metrics(cell)
            clients = sorted(metrics[metrics["protocol"] == TRAIN]["client"].unique())
            parts = [(f"client {client}", _curve(study, cell, measure, int(client))) for client in clients]
        else:
            parts = [(panel, _curve(study, cell, measure))]
        for name, frame in parts:
            rows += [{"panel": name, "line": line} | record for record in frame.to_dict("records")]
    if not rows:
        return None
    frame = _over_seeds(rows, ["panel", "line", "x"])
    return _with_numbers(figures.curves(frame, y_label=LABELS[measure]), frame)


def _sweep(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    rows = []
    for measure in figure.measures:
        for study, _, cell in found:
            value = _point(study, cell, measure)
            if value is None or figure.x not in cell.grid:
                continue
            panel, at = names.panel(study, cell), cell.grid[figure.x]
            if isinstance(at, str):  # a column of its own, as `Figure 8a/64`
                panel, _, at = at.rpartition("/")
            entry = {"panel": panel, "line": names.line(study, cell), "x": float(at), "value": value}
            rows.append(entry | ({"measure": LABELS[measure]} if len(figure.measures) > 1 else {}))
    if not rows:
        return None
    keys = [name for name in ("measure", "panel", "line", "x") if name in rows[0]]
    frame = _over_seeds(rows, keys)
    return _with_numbers(figures.sweep(frame, figure.x_label, LABELS[figure.measures[0]], figure.log), frame)


def _bars(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    """Rounds until the accuracy is that which FedAvg has at last: print's targets are not in the text."""
    curves = [(names.panel(study, cell), cell, study, _curve(study, cell, "accuracy")) for study, _, cell in found]
    seeds: dict[tuple[str, str], list[pd.Series[float]]] = {}
    targets: dict[str, pd.Series[float]] = {}
    for panel, cell, study, curve in curves:
        of = seeds.setdefault((panel, names.line(study, cell)), [])
        of.append(curve.set_index("x")["value"])
        if cell.algorithm == "fedavg":
            targets[panel] = _mean(of)
    rows = []
    for (panel, line), of in seeds.items():
        if panel in targets and len(targets[panel]):
            target, mean = targets[panel].iloc[-1], _mean(of)
            reached = mean[mean >= target].index
            value = float(reached.min()) if len(reached) else math.nan
            rows.append({"panel": f"{panel}, target {target:.1f} %", "line": line, "value": value})
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    return _with_numbers(figures.bars(frame, "rounds to the target"), frame)


def _mean(curves: Sequence[pd.Series[float]]) -> pd.Series[float]:
    """The mean over seeds, by round."""
    return pd.concat(curves).groupby(level=0).mean()


def _heatmaps(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    if figure.probe == "head-norms":
        return _norms(names, figure, found)
    if figure.measures == ("matrices",):
        return _matrices(names, found)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for study, _, cell in found:
        key = study.runs[cell.algorithm, cell.key].partition
        if key not in seen:
            seen.add(key)
            named = names.panel(study, cell) or _scheme(study, cell)
            rows += _counts(key, named)
    frame = pd.DataFrame(rows).drop_duplicates(["panel", "row", "column"])
    return _with_numbers(figures.heatmaps(frame, z_label="training samples", columns=2), frame)


def _scheme(study: Study, cell: Cell) -> str:
    partition = study.settings(cell)["partition"]
    told = {"alpha": "α = {}", "shards_per_client": "{} a client"}
    parameters = [text.format(partition[name]) for name, text in told.items() if name in partition]
    return ", ".join([str(partition["scheme"]), *parameters])


def _counts(key: str, panel: str) -> list[dict[str, Any]]:
    path = artifacts.assignment_file(key)
    counts = Assignment.read(path, artifacts.manifest(path)).class_counts
    return [
        {"panel": panel, "row": client, "column": label, "value": float(value)}
        for (client, label), value in np.ndenumerate(counts)
    ]


def _norms(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    """Who has how many samples of each class, then the norms of heads: of local models by client, others by class."""
    rows: list[dict[Any, Any]] = []
    for study, part, cell in found:
        for _, table in study.probes("head-norms", cell):
            for model, norms in table.groupby("model", sort=False):
                if part.models and model not in part.models:
                    continue
                if not rows and model != "class":
                    rows += _panel(norms, "training data", "samples", "samples")
                told = "" if part == figure.parts[0] else f", {_changed(study, cell)}"
                name = f"{names.method(cell.algorithm)}{told}, {model} models"
                rows += _panel(norms, name, "relative", "share of the norms")
    if not rows:
        return None
    frame = pd.DataFrame(rows).drop_duplicates(["panel", "row", "column"])
    return _with_numbers(figures.heatmaps(frame, y_label="client (or class)"), frame)


def _changed(study: Study, cell: Cell) -> str:
    """What a run of another study has of its own."""
    own = [name for name in cell.grid if name.startswith("algorithms.")]
    return ", ".join(f"{_symbol(name)} = {cell.grid[name]:g}" for name in own)


def _panel(norms: pd.DataFrame, name: str, column: str, measure: str) -> list[dict[Any, Any]]:
    places = norms.rename(columns={"owner": "row", "class": "column"})
    places = places.assign(panel=name, value=norms[column].fillna(0).astype(float), measure=measure)
    return [*places[["panel", "row", "column", "value", "measure"]].to_dict("records")]


def _matrices(names: _Names, found: Found) -> Drawn | None:
    """SL and CR of global models, as measured on the global test set in the last round."""
    rows: list[dict[str, Any]] = []
    for study, _, cell in found:
        frame = artifacts.frame(artifacts.read_joined(cell.joined.matrices))
        frame = frame[(frame["source"] == "measured") & (frame["client"] == -1)]
        frame = frame[frame["round"] == frame["round"].max()]
        for kind in ("SL", "CR"):
            part = frame[frame["matrix"] == kind]
            columns = [name for name in part.columns if str(name).isdecimal() and part[name].notna().any()]
            for record in part.to_dict("records"):
                rows += [
                    {
                        "panel": f"{names.panel(study, cell)}, {kind}",
                        "row": record["class"],
                        "column": int(name),
                        "value": float(record[name]),
                        "measure": str(kind),
                    }
                    for name in columns
                ]
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    return _with_numbers(figures.heatmaps(frame, "class", "class", columns=2), frame)


def _circles(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    frames = []
    for study, _, cell in found:
        for _, table in study.probes("head-norms", cell):
            told = [(owner, norms.assign(contrary=contrary(norms))) for owner, norms in table.groupby("owner")]
            told.sort(key=lambda entry: not entry[1]["contrary"].any())  # counterexamples are what print shows, too
            for owner, norms in sorted(told[:EXPERIMENTS], key=lambda entry: str(entry[0]).zfill(4)):
                frames.append(norms.assign(panel=f"{names.value(study, cell, 'data')}, client {owner}"))
    if not frames:
        return None
    frame = pd.concat(frames).drop(columns="norm").rename(columns={"relative": "norm"})
    frame = frame[["panel", "class", "share", "norm", "contrary"]]
    return _with_numbers(figures.circles(frame), frame)


def _scatter(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    """The first run that was looked at."""
    for study, _, cell in found:
        for _, table in study.probes("features", cell):
            frame = table[["kind", "class", "x", "y"]]
            return _with_numbers(figures.scatter(frame), frame)
    return None


def _surface(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    frames = [
        table.assign(panel=names.panel(study, cell)).rename(columns={"loss": "value"})
        for study, _, cell in _first_seeds(found)
        for _, table in study.probes("surface", cell)
    ]
    if not frames:
        return None
    frame = pd.concat(frames)[["panel", "x", "y", "value"]]
    return _with_numbers(figures.surface(frame), frame)


def _layers(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    """Norms of the gradients on each client's data: mean and standard deviation over the clients."""
    frames = []
    for study, _, cell in _first_seeds(found):
        for _, table in study.probes("gradients", cell):
            own = table[table["client"] >= 0]
            norms = own.groupby(["layer", "name"])["norm"].agg(["mean", "std"]).reset_index()
            frames.append(norms.assign(line=names.line(study, cell), layer=norms["name"]).drop(columns="name"))
    if not frames:
        return None
    frame = pd.concat(frames)[["line", "layer", "mean", "std"]]
    return _with_numbers(figures.layers(frame), frame)


def _traces(names: _Names, figure: Figure, found: Found) -> Drawn | None:
    """Of the clients that the probe names, the first: without WDR and with it."""
    frames = []
    for study, _, cell in sorted(_first_seeds(found), key=lambda entry: entry[2].algorithm == "cwfedavg"):
        for _, table in study.probes("locals", cell):
            client = int(table["client"].min())
            panel = "with WDR" if cell.algorithm == "cwfedavg" else "without WDR"
            frames.append(table[table["client"] == client].assign(panel=panel))
    if not frames:
        return None
    frame = pd.concat(frames)
    last = frame[frame["step"] == frame.groupby("panel")["step"].transform("max")]
    steps = frame.rename(columns={"approximate": "value"})[["panel", "client", "class", "step", "value", "share"]]
    points = last.rename(columns={"panel": "group", "share": "true", "approximate": "estimate"})
    return _with_numbers(figures.traces(steps, points), steps)


def _first_seeds(found: Found) -> Iterator[tuple[Study, Part, Cell]]:
    for study, part, cell in found:
        if cell.seed == study.plan.seeds[0]:
            yield study, part, cell


def _with_numbers(svg: str, frame: pd.DataFrame) -> Drawn:
    return Drawn(svg, frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


FORMS: Mapping[str, Callable[[_Names, Figure, Found], Drawn | None]] = {
    "curves": _curves,
    "sweep": _sweep,
    "bars": _bars,
    "heatmaps": _heatmaps,
    "circles": _circles,
    "scatter": _scatter,
    "surface": _surface,
    "layers": _layers,
    "traces": _traces,
}
