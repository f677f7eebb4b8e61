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

from fedpipe.core.storage import files, layout
from fedpipe.data.assignment import Assignment
from fedpipe.papers import cells, figures
from fedpipe.papers.layouts import DIAGRAM_REASON, Figure, Paper, RunSelection
from fedpipe.papers.measured import NO_STUDY, StudyFinder, find_contradictions
from fedpipe.papers.ran import PaperStudy
from fedpipe.papers.svg import SvgFigure
from fedpipe.planning.plan import Cell

FigureRuns = list[tuple[PaperStudy, RunSelection, Cell]]  #: the runs of a figure that are done
TRAIN_PROTOCOL = "personal-on-train"
MAX_CIRCLE_CLIENTS = 3  #: clients of each data set whose norms are drawn as circles
MEASURE_LABELS = {"accuracy": "test accuracy (%)", "loss": "training loss", "error": "R, mean |p − p̃|"}
TOY_REASON = "The toy network's data are not published, so that it was not made."


def draw_figures(paper: Paper, find_study: StudyFinder) -> dict[tuple[str, str], SvgFigure | str]:
    """All figures of a paper by its name and theirs; where one can't be drawn, the reason."""
    return {(paper.paper, name): _draw_figure(paper, figure, find_study) for name, figure in paper.figures.items()}


def _draw_figure(paper: Paper, figure: Figure, find_study: StudyFinder) -> SvgFigure | str:
    if figure.form == "diagram":
        return DIAGRAM_REASON
    if figure.form == "paths":
        return TOY_REASON
    names = _DisplayNames(paper, figure)
    figure_runs, missing_runs = _select_runs(names, figure, find_study)
    if not figure_runs:
        return f"Not drawn: {next(iter(missing_runs), cells.NOT_RUN)}."
    svg_figure = DRAW_FUNCTIONS[figure.form](names, figure, figure_runs)
    if svg_figure is None:
        return f"Not drawn: {next(iter(missing_runs), 'its probes were not run')}."
    is_generated = any(study.is_generated(cell) for study, _, cell in figure_runs)
    missing_text = "; ".join(
        f"{', '.join(dict.fromkeys(run_names))} ({reason})" for reason, run_names in missing_runs.items()
    )
    return dataclasses.replace(svg_figure, is_generated=is_generated, missing=missing_text)


def _select_runs(
    names: _DisplayNames, figure: Figure, find_study: StudyFinder
) -> tuple[FigureRuns, dict[str, list[str]]]:
    """The runs of a figure that are done, and which others are not, by the reason."""
    figure_runs: FigureRuns = []
    missing_runs: dict[str, list[str]] = {}
    for selection in figure.run_selections:
        study = find_study(selection.study)
        if study is None:
            missing_runs.setdefault(NO_STUDY, []).append(selection.study)
            continue
        selected_cells = [cell for cell in study.plan.cells if _is_selected(selection, cell)]
        finished_ids = set(map(id, study.finished_cells))
        figure_runs += [(study, selection, cell) for cell in study.finished_cells if _is_selected(selection, cell)]
        for cell in (cell for cell in selected_cells if id(cell) not in finished_ids):
            run_name = ", ".join(filter(None, (names.get_method_name(cell.algorithm), study.get_column(cell))))
            missing_runs.setdefault(study.explain_missing(cell.algorithm, study.get_column(cell)), []).append(run_name)
        if not selected_cells:
            missing_runs.setdefault(f"not part of scale {study.plan.scale}", []).append(selection.study)
    return figure_runs, missing_runs


def _is_selected(selection: RunSelection, cell: Cell) -> bool:
    """Whether a part of a figure has this cell; what does not concern the cell's method can't keep it out."""
    for name, value in selection.where.items():
        values = value if isinstance(value, list | tuple) else [value]
        if name in cell.grid and cell.grid[name] not in values:
            return False
    return not selection.algorithms or cell.algorithm in selection.algorithms


class _DisplayNames:
    """Names of methods, panels and lines, as a reader of the paper knows them."""

    def __init__(self, paper: Paper, figure: Figure) -> None:
        self.paper, self.figure = paper, figure
        tables = sorted(paper.tables.values(), key=lambda table: table.study != figure.study)
        self.methods: dict[str, str] = {}
        for name, row in ((name, row) for table in tables for name, row in table.rows.items()):
            self.methods.setdefault(row.method or "", name)

    def get_method_name(self, label: str) -> str:
        """A method by its label."""
        return self.methods.get(label, label)

    def format_value(self, study: PaperStudy, cell: Cell, name: str) -> str:
        """The value of one name of the grid, or the method's name."""
        if name == "algorithm":
            return self.get_method_name(cell.algorithm)
        if name == "data" and name not in study.plan.grid:  # a study of one data set
            return _get_dataset_title(study, cell)
        if name not in cell.grid:
            return ""
        value = cell.grid[name]
        return value if isinstance(value, str) else f"{_get_symbol(name)} = {value:g}"

    def get_panel_name(self, study: PaperStudy, cell: Cell) -> str:
        """The panel of a cell."""
        panel_values = [self.format_value(study, cell, name) for name in self.figure.panels if name != "client"]
        return ", ".join(filter(None, panel_values))

    def get_line_name(self, study: PaperStudy, cell: Cell) -> str:
        """The line of a cell."""
        return ", ".join(filter(None, (self.format_value(study, cell, name) for name in self.figure.lines)))


def _get_symbol(name: str) -> str:
    last_part = name.rpartition(".")[2]
    return {"alpha": "α", "participation": "P"}.get(last_part, last_part)


def _get_dataset_title(study: PaperStudy, cell: Cell) -> str:
    settings = study.read_settings(cell)["dataset"]
    name = str(settings.get("like", settings["name"]))
    return {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "FMNIST", "mnist": "MNIST"}.get(name, name)


# -- what is measured ------------------------------------------------------------------------------------------------


def _load_curve(study: PaperStudy, cell: Cell, measure: str, client: int | None = None) -> pd.DataFrame:
    """``x`` (round) and ``value`` of a run."""
    if measure == "accuracy":
        study_accuracies = study.accuracies
        is_selected = (study_accuracies["key"] == cell.key) & (study_accuracies["algorithm"] == cell.algorithm)
        is_selected &= (study_accuracies["protocol"] == study.get_protocol(cell.algorithm)) & (
            study_accuracies["round"] <= cell.rounds
        )
        frame = study_accuracies[is_selected].drop_duplicates("round")
        return pd.DataFrame({"x": frame["round"], "value": 100 * frame["accuracy"]})
    frame = study.load_metrics(cell)
    frame = frame[(frame["protocol"] == TRAIN_PROTOCOL) & (frame["total"] > 0)]
    if client is not None:
        frame = frame[frame["client"] == client]
    total = frame.assign(loss=frame["loss"] * frame["total"]).groupby("round")[["loss", "total"]].sum(skipna=False)
    return pd.DataFrame({"x": total.index, "value": total["loss"] / total["total"]})


def _load_point(study: PaperStudy, cell: Cell, measure: str) -> float | None:
    if measure == "accuracy":
        return study.get_accuracy(cell)
    probe_tables = [table for _, table in study.load_probes("head-norms", cell)]
    return _compute_distribution_error(probe_tables[0]) if probe_tables else None


def _compute_distribution_error(table: pd.DataFrame) -> float:
    """Mean over clients of the distance between their class shares and those that the norms tell: R."""
    trained_rows = table[table["model"] == "trained"]
    squares = (trained_rows["share"] - trained_rows["relative"]) ** 2
    return float(squares.groupby(trained_rows["owner"]).sum().pow(0.5).mean())


def _average_over_seeds(rows: Sequence[Mapping[Any, Any]], keys: Sequence[str]) -> pd.DataFrame:
    """Mean and, where there are several seeds, standard deviation of ``value``."""
    frame = pd.DataFrame(rows)
    seed_statistics = frame.groupby(list(keys), sort=False)["value"].agg(["mean", "std", "count"]).reset_index()
    return seed_statistics.drop(columns=["count", "std"] if seed_statistics["count"].max() < 2 else ["count"])


# -- forms -----------------------------------------------------------------------------------------------------------


def _draw_curves(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    rows = []
    (measure,) = figure.measures
    for study, _, cell in figure_runs:
        panel, line = names.get_panel_name(study, cell), names.get_line_name(study, cell)
        if "client" in figure.panels:
            metrics = study.load_metrics(cell)
            clients = sorted(metrics[metrics["protocol"] == TRAIN_PROTOCOL]["client"].unique())
            panel_curves = [(f"client {client}", _load_curve(study, cell, measure, int(client))) for client in clients]
        else:
            panel_curves = [(panel, _load_curve(study, cell, measure))]
        for name, frame in panel_curves:
            rows += [{"panel": name, "line": line} | record for record in frame.to_dict("records")]
    if not rows:
        return None
    frame = _average_over_seeds(rows, ["panel", "line", "x"])
    return _attach_csv(figures.render_curves(frame, y_label=MEASURE_LABELS[measure]), frame)


def _draw_sweep(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    rows = []
    for measure in figure.measures:
        for study, _, cell in figure_runs:
            value = _load_point(study, cell, measure)
            if value is None or figure.x not in cell.grid:
                continue
            panel, x_value = names.get_panel_name(study, cell), cell.grid[figure.x]
            if isinstance(x_value, str):  # a column of its own, as `Figure 8a/64`
                panel, _, x_value = x_value.rpartition("/")
            entry = {"panel": panel, "line": names.get_line_name(study, cell), "x": float(x_value), "value": value}
            rows.append(entry | ({"measure": MEASURE_LABELS[measure]} if len(figure.measures) > 1 else {}))
    if not rows:
        return None
    keys = [name for name in ("measure", "panel", "line", "x") if name in rows[0]]
    frame = _average_over_seeds(rows, keys)
    return _attach_csv(
        figures.render_sweep(frame, figure.x_label, MEASURE_LABELS[figure.measures[0]], figure.log), frame
    )


def _draw_bars(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    """Rounds until the accuracy is that which FedAvg has at last: print's targets are not in the text."""
    curves = [
        (names.get_panel_name(study, cell), cell, study, _load_curve(study, cell, "accuracy"))
        for study, _, cell in figure_runs
    ]
    seeds: dict[tuple[str, str], list[pd.Series[float]]] = {}
    targets: dict[str, pd.Series[float]] = {}
    for panel, cell, study, curve in curves:
        seed_curves = seeds.setdefault((panel, names.get_line_name(study, cell)), [])
        seed_curves.append(curve.set_index("x")["value"])
        if cell.algorithm == "fedavg":
            targets[panel] = _average_curves(seed_curves)
    rows = []
    for (panel, line), seed_curves in seeds.items():
        if panel in targets and len(targets[panel]):
            target, mean = targets[panel].iloc[-1], _average_curves(seed_curves)
            rounds_at_target = mean[mean >= target].index
            value = float(rounds_at_target.min()) if len(rounds_at_target) else math.nan
            rows.append({"panel": f"{panel}, target {target:.1f} %", "line": line, "value": value})
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    return _attach_csv(figures.render_bars(frame, "rounds to the target"), frame)


def _average_curves(curves: Sequence[pd.Series[float]]) -> pd.Series[float]:
    """The mean over seeds, by round."""
    return pd.concat(curves).groupby(level=0).mean()


def _draw_heatmaps(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    if figure.probe == "head-norms":
        return _draw_norms(names, figure, figure_runs)
    if figure.measures == ("matrices",):
        return _draw_matrices(names, figure_runs)
    rows: list[dict[str, Any]] = []
    seen_partitions: set[str] = set()
    for study, _, cell in figure_runs:
        key = study.runs[cell.algorithm, cell.key].partition
        if key not in seen_partitions:
            seen_partitions.add(key)
            panel_name = names.get_panel_name(study, cell) or _describe_scheme(study, cell)
            rows += _load_class_counts(key, panel_name)
    frame = pd.DataFrame(rows).drop_duplicates(["panel", "row", "column"])
    return _attach_csv(figures.render_heatmaps(frame, z_label="training samples", columns=2), frame)


def _describe_scheme(study: PaperStudy, cell: Cell) -> str:
    partition = study.read_settings(cell)["partition"]
    parameter_formats = {"alpha": "α = {}", "shards_per_client": "{} a client"}
    parameters = [text.format(partition[name]) for name, text in parameter_formats.items() if name in partition]
    return ", ".join([str(partition["scheme"]), *parameters])


def _load_class_counts(key: str, panel: str) -> list[dict[str, Any]]:
    path = layout.assignment_file(key)
    counts = Assignment.read(path, files.read_recorded_sha256(path)).class_counts
    return [
        {"panel": panel, "row": client, "column": label, "value": float(value)}
        for (client, label), value in np.ndenumerate(counts)
    ]


def _draw_norms(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    """Who has how many samples of each class, then the norms of heads: of local models by client, others by class."""
    rows: list[dict[Any, Any]] = []
    for study, selection, cell in figure_runs:
        for _, table in study.load_probes("head-norms", cell):
            for model, norms in table.groupby("model", sort=False):
                if selection.models and model not in selection.models:
                    continue
                if not rows and model != "class":
                    rows += _build_panel_rows(norms, "training data", "samples", "samples")
                changes_text = "" if selection == figure.run_selections[0] else f", {_describe_changes(study, cell)}"
                name = f"{names.get_method_name(cell.algorithm)}{changes_text}, {model} models"
                rows += _build_panel_rows(norms, name, "relative", "share of the norms")
    if not rows:
        return None
    frame = pd.DataFrame(rows).drop_duplicates(["panel", "row", "column"])
    return _attach_csv(figures.render_heatmaps(frame, y_label="client (or class)"), frame)


def _describe_changes(study: PaperStudy, cell: Cell) -> str:
    """What a run of another study has of its own."""
    algorithm_parameters = [name for name in cell.grid if name.startswith("algorithms.")]
    return ", ".join(f"{_get_symbol(name)} = {cell.grid[name]:g}" for name in algorithm_parameters)


def _build_panel_rows(norms: pd.DataFrame, name: str, column: str, measure: str) -> list[dict[Any, Any]]:
    panel_cells = norms.rename(columns={"owner": "row", "class": "column"})
    panel_cells = panel_cells.assign(panel=name, value=norms[column].fillna(0).astype(float), measure=measure)
    return [*panel_cells[["panel", "row", "column", "value", "measure"]].to_dict("records")]


def _draw_matrices(names: _DisplayNames, figure_runs: FigureRuns) -> SvgFigure | None:
    """SL and CR of global models, as measured on the global test set in the last round."""
    rows: list[dict[str, Any]] = []
    for study, _, cell in figure_runs:
        frame = files.table_to_frame(layout.read_merged_table(cell.merged_files.matrices))
        frame = frame[(frame["source"] == "measured") & (frame["client"] == -1)]
        frame = frame[frame["round"] == frame["round"].max()]
        for kind in ("SL", "CR"):
            kind_rows = frame[frame["matrix"] == kind]
            columns = [name for name in kind_rows.columns if str(name).isdecimal() and kind_rows[name].notna().any()]
            for record in kind_rows.to_dict("records"):
                rows += [
                    {
                        "panel": f"{names.get_panel_name(study, cell)}, {kind}",
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
    return _attach_csv(figures.render_heatmaps(frame, "class", "class", columns=2), frame)


def _draw_circles(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    frames = []
    for study, _, cell in figure_runs:
        for _, table in study.load_probes("head-norms", cell):
            norms_by_client = [
                (owner, norms.assign(contrary=find_contradictions(norms))) for owner, norms in table.groupby("owner")
            ]
            norms_by_client.sort(
                key=lambda entry: not entry[1]["contrary"].any()
            )  # counterexamples are what print shows, too
            for owner, norms in sorted(norms_by_client[:MAX_CIRCLE_CLIENTS], key=lambda entry: str(entry[0]).zfill(4)):
                frames.append(norms.assign(panel=f"{names.format_value(study, cell, 'data')}, client {owner}"))
    if not frames:
        return None
    frame = pd.concat(frames).drop(columns="norm").rename(columns={"relative": "norm"})
    frame = frame[["panel", "class", "share", "norm", "contrary"]]
    return _attach_csv(figures.render_circles(frame), frame)


def _draw_scatter(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    """The first run that was looked at."""
    for study, _, cell in figure_runs:
        for _, table in study.load_probes("features", cell):
            frame = table[["kind", "class", "x", "y"]]
            return _attach_csv(figures.render_scatter(frame), frame)
    return None


def _draw_surface(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    frames = [
        table.assign(panel=names.get_panel_name(study, cell)).rename(columns={"loss": "value"})
        for study, _, cell in _select_first_seed(figure_runs)
        for _, table in study.load_probes("surface", cell)
    ]
    if not frames:
        return None
    frame = pd.concat(frames)[["panel", "x", "y", "value"]]
    return _attach_csv(figures.render_surface(frame), frame)


def _draw_layers(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    """Norms of the gradients on each client's data: mean and standard deviation over the clients."""
    frames = []
    for study, _, cell in _select_first_seed(figure_runs):
        for _, table in study.load_probes("gradients", cell):
            client_rows = table[table["client"] >= 0]
            norms = client_rows.groupby(["layer", "name"])["norm"].agg(["mean", "std"]).reset_index()
            frames.append(norms.assign(line=names.get_line_name(study, cell), layer=norms["name"]).drop(columns="name"))
    if not frames:
        return None
    frame = pd.concat(frames)[["line", "layer", "mean", "std"]]
    return _attach_csv(figures.render_layers(frame), frame)


def _draw_traces(names: _DisplayNames, figure: Figure, figure_runs: FigureRuns) -> SvgFigure | None:
    """Of the clients that the probe names, the first: without WDR and with it."""
    frames = []
    for study, _, cell in sorted(_select_first_seed(figure_runs), key=lambda entry: entry[2].algorithm == "cwfedavg"):
        for _, table in study.load_probes("locals", cell):
            client = int(table["client"].min())
            panel = "with WDR" if cell.algorithm == "cwfedavg" else "without WDR"
            frames.append(table[table["client"] == client].assign(panel=panel))
    if not frames:
        return None
    frame = pd.concat(frames)
    last = frame[frame["step"] == frame.groupby("panel")["step"].transform("max")]
    steps = frame.rename(columns={"approximate": "value"})[["panel", "client", "class", "step", "value", "share"]]
    points = last.rename(columns={"panel": "group", "share": "true", "approximate": "estimate"})
    return _attach_csv(figures.render_traces(steps, points), steps)


def _select_first_seed(figure_runs: FigureRuns) -> Iterator[tuple[PaperStudy, RunSelection, Cell]]:
    for study, selection, cell in figure_runs:
        if cell.seed == study.plan.seeds[0]:
            yield study, selection, cell


def _attach_csv(svg: str, frame: pd.DataFrame) -> SvgFigure:
    return SvgFigure(svg, frame.to_csv(index=False, lineterminator="\n", float_format="%.6g"))


DRAW_FUNCTIONS: Mapping[str, Callable[[_DisplayNames, Figure, FigureRuns], SvgFigure | None]] = {
    "curves": _draw_curves,
    "sweep": _draw_sweep,
    "bars": _draw_bars,
    "heatmaps": _draw_heatmaps,
    "circles": _draw_circles,
    "scatter": _draw_scatter,
    "surface": _draw_surface,
    "layers": _draw_layers,
    "traces": _draw_traces,
}
