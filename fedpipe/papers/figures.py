"""The papers' figures: a tidy frame of each from its runs, its SVG, and its numbers as CSV.

Each form of `fedpipe.papers.layouts` has a function for its frame. All figures of a form share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from fedpipe.core.storage import files, layout
from fedpipe.data.assignment import Assignment
from fedpipe.papers import comparison
from fedpipe.papers.layouts import Figure, Paper, RunSelection
from fedpipe.papers.measurements import NO_STUDY, StudyFinder, mark_contradicting_classes
from fedpipe.papers.studies import PaperStudy
from fedpipe.planning.plan import Cell
from fedpipe.report import results
from fedpipe.report.figures import panels
from fedpipe.report.matrices import read_last_measured_matrices

MAX_CLIENTS = 3  #: clients of each run whose norms are drawn against their shares
MEASURE_LABELS = {"accuracy": "test accuracy (%)", "loss": "training loss", "error": "R, mean |p − p̃|"}
TARGET_FRACTIONS = {"FedAvg's last accuracy": 1.0, "90% of it": 0.9, "80% of it": 0.8}  #: target accuracies
SYMBOLS = {"alpha": "α", "participation": "P", "epsilon": "ε", "wdr": "λ", "layers": "last layers"}
AVERAGED_FORMS = ("curves", "sweep", "bars")  #: forms with means over seeds. Others have the runs of the first seed
DATASET_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "FMNIST", "mnist": "MNIST"}


class SvgFigure(NamedTuple):
    """A figure: SVG, numbers as CSV, whether its data are generated, missing runs, and origin of stored runs."""

    svg: str
    csv: str
    is_generated: bool = False
    missing: str = ""
    origin: str = ""


class FigureRun(NamedTuple):
    """A finished run of a figure, with the names by which the figure shows it."""

    study: PaperStudy
    selection: RunSelection
    cell: Cell
    method: str
    panel: str
    line: str


def plot_figures(paper: Paper, find_study: StudyFinder) -> dict[tuple[str, str], SvgFigure | str]:
    """All figures of a paper by names of paper and figure. A reason replaces a figure that is not drawn."""
    return {(paper.paper, name): _plot_figure(paper, figure, find_study) for name, figure in paper.figures.items()}


def render_figure(paper: Paper, figure: Figure, frame: pd.DataFrame) -> str:
    """The SVG of a figure, from the frame that its CSV file contains."""
    if "panel" in frame:  # an empty name is missing in a CSV
        frame = frame.assign(panel=frame["panel"].astype(object).fillna(""))
    y_label = MEASURE_LABELS[figure.measures[0]]
    note = "One seed."
    if "seeds" in frame:
        limit = "up to " if frame["seeds"].nunique() > 1 else ""
        statistics = "Mean and standard deviation" if "std" in frame else "Mean accuracy"
        note = f"{statistics} of {limit}{frame['seeds'].max():.0f} seeds."
    x_label = figure.x_label if isinstance(figure.x_label, str) else ""
    emphasis = ("FedAvg", paper.paper)
    match figure.form:
        case "curves":
            return panels.plot_line_panels(frame, "round", y_label, emphasis, note=note)
        case "sweep":
            return panels.plot_line_panels(frame, x_label, y_label, emphasis, True, figure.log, note)
        case "traces":
            frame = frame.assign(line="class " + frame["class"].astype(str))
            frame = frame.rename(columns={"step": "x", "value": "mean", "share": "target"})
            note = f"◂: true class fraction p. {note}"
            return panels.plot_line_panels(frame, "step of the first epoch", "estimated class fraction p̃", note=note)
        case "bars":
            frame = frame.rename(columns={"line": "category", "target": "line", "value": "mean"})
            return panels.plot_bar_panels(frame, "rounds to the target", note=note)
        case "layers":
            names = {name: f"layer {index + 1}" for index, name in enumerate(frame["layer"].unique())}
            frame = frame.assign(category=frame["layer"].map(names))
            note = f"Mean and standard deviation over clients. Layers are counted from the input. {note}"
            return panels.plot_bar_panels(frame, "gradient norm", note=note)
        case "counts":
            return panels.plot_heatmap_panels(frame, "class", "client", "training samples", 0.5, note)
        case "norms":
            row_labels = frame["panel"].str.endswith("class models").map({True: "class model", False: "client"})
            frame = frame.assign(row_label=row_labels)
            note = f"Fraction of the samples, or of the sum of the norms, of each class. {note}"
            return panels.plot_heatmap_panels(frame, "class", "client", "fraction", 0.5, note)
        case "matrices":
            note = f"SL: mean soft label of each class. CR: relation of classes in the head. {note}"
            return panels.plot_heatmap_panels(frame, "class", "class", "", note=note)
        case "shares":
            frame = frame.assign(panel=frame["panel"].str.replace(r", client \d+", "", regex=True))
            frame = frame.rename(columns={"share": "x", "norm": "y"})
            contrary = "against the claim if its norm is above that of a class with less than half as many samples"
            note = f"A point is a class of a client. It is {contrary}. {note}"
            return panels.plot_point_panels(frame, "fraction of the samples", "relative norm of the row", note)
        case "features":
            return panels.plot_embedding_panels(frame, note)
    return panels.plot_surface_panels(frame, "training loss", note)


def _plot_figure(paper: Paper, figure: Figure, find_study: StudyFinder) -> SvgFigure | str:
    if figure.form == "none":
        return figure.reason
    runs, missing = _select_figure_runs(paper, figure, find_study)
    frame = FRAME_BUILDERS[figure.form](figure, runs) if runs else pd.DataFrame()
    if frame.empty:
        reason = comparison.NOT_RUN if not runs else "its diagnostics have not run"
        return f"Not drawn: {next(iter(missing), reason)}."
    texts = [f"{', '.join(dict.fromkeys(names))} ({reason})" for reason, names in missing.items()]
    csv = frame.to_csv(index=False, lineterminator="\n", float_format="%.6g")
    is_generated = any(run.study.get_run(run.cell).is_generated for run in runs)
    stored_count = sum(run.cell not in run.study.local_cells for run in runs)
    origin = f"{stored_count} of {len(runs)} runs are stored" if stored_count else ""
    return SvgFigure(render_figure(paper, figure, frame), csv, is_generated, "; ".join(texts), origin)


def _select_figure_runs(
    paper: Paper, figure: Figure, find_study: StudyFinder
) -> tuple[list[FigureRun], dict[str, list[str]]]:
    """The finished runs of a figure, and the names of the others by the reason why they are missing.

    Runs of further seeds count only if the figure averages over seeds.
    """
    tables = sorted([*paper.tables.values()][::-1], key=lambda table: table.study == figure.study)  # own names win
    titles = {row.method: name for table in tables for name, row in [*table.rows.items()][::-1] if row.method}
    runs: list[FigureRun] = []
    missing: dict[str, list[str]] = {}
    is_averaged = figure.form in AVERAGED_FORMS
    needs_only_accuracies = is_averaged and (figure.form != "curves" or figure.measures == ("accuracy",))
    for selection in figure.run_selections:
        study = find_study(selection.study or "")
        if study is None:
            missing.setdefault(NO_STUDY, []).append(selection.study or "")
            continue
        cells = [cell for cell in results.sort_cells(study.plan) if _is_cell_selected(selection, cell)]
        if not cells:
            missing.setdefault(f"not part of preset {study.plan.preset}", []).append(selection.study or "")
        for cell in cells if is_averaged else [cell for cell in cells if cell.seed == study.plan.seeds[0]]:
            title, column = titles.get(cell.algorithm, cell.algorithm), study.get_column_name(cell)
            labels = [_format_grid_values(study, cell, title, names) for names in (figure.panels, figure.lines)]
            if cell in (study.finished_cells if needs_only_accuracies else study.local_cells):
                runs.append(FigureRun(study, selection, cell, title, *labels))
            else:
                name = ", ".join(filter(None, (title, column)))
                missing.setdefault(study.explain_missing_number(cell.algorithm, column), []).append(name)
    return runs, missing


def _is_cell_selected(selection: RunSelection, cell: Cell) -> bool:
    """Whether a selection contains a cell. Names of the grid that don't concern the cell's method are ignored."""
    for name, value in selection.where.items():
        if name in cell.grid and cell.grid[name] not in (value if isinstance(value, list | tuple) else [value]):
            return False
    return not selection.algorithms or cell.algorithm in selection.algorithms


def _format_grid_values(study: PaperStudy, cell: Cell, title: str, names: Iterable[str]) -> str:
    """The values of some names of the grid, as a reader of the paper writes them."""
    values = []
    for name in names:
        value = title if name == "algorithm" else cell.grid.get(name, "")
        if name == "data" and name not in study.plan.grid:  # a study of one data set
            settings = study.read_settings(cell)["dataset"]
            value = DATASET_TITLES.get(settings.get("like", settings["name"]), settings["name"])
        values.append(
            value.replace("alpha=", "α = ") if isinstance(value, str) else f"{_get_parameter_symbol(name)} = {value:g}"
        )
    return ", ".join(filter(None, values))


def _get_parameter_symbol(name: str) -> str:
    last_part = name.rpartition(".")[2]
    return SYMBOLS.get(last_part, last_part)


def _average_over_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and, if there are several seeds, standard deviation of ``value`` and their number."""
    if rows.empty:
        return rows
    keys = [name for name in rows if name != "value"]
    frame = rows.groupby(keys, sort=False)["value"].agg(["mean", "std", "count"]).reset_index()
    frame = frame.rename(columns={"count": "seeds"})
    return frame.drop(columns=["std", "seeds"]) if frame["seeds"].max() < 2 else frame


def _build_curves_data(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    build_curve = _get_accuracy_curve if figure.measures == ("accuracy",) else _compute_training_loss
    frames = [build_curve(figure, run).assign(line=run.line) for run in runs]
    return _average_over_seeds(pd.concat(frames)[["panel", "line", "x", "value"]])


def _get_accuracy_curve(figure: Figure, run: FigureRun) -> pd.DataFrame:
    return run.study.get_accuracy_curve(run.cell).assign(panel=run.panel)


def _compute_training_loss(figure: Figure, run: FigureRun) -> pd.DataFrame:
    """The training loss by round, over all samples, or in panels over those of each client."""
    metrics = run.study.get_local_run(run.cell).metrics
    metrics = metrics[(metrics["protocol"] == "personal-on-train") & (metrics["total"] > 0)]
    keys = ["client", "round"] if "client" in figure.panels else ["round"]
    sums = metrics.assign(loss=metrics["loss"] * metrics["total"]).groupby(keys)[["loss", "total"]].sum(skipna=False)
    sums = sums.reset_index()
    panel = "client " + sums["client"].astype(str) if "client" in keys else run.panel
    return pd.DataFrame({"panel": panel, "x": sums["round"], "value": sums["loss"] / sums["total"]})


def _build_sweep_data(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    from fedpipe.engine.diagnostics import head_norms  # with torch

    rows = []
    for measure in figure.measures:
        for run in runs:
            tables = run.study.load_diagnostics("head-norms", run.cell) if measure == "error" else []
            value = run.study.get_accuracy(run.cell) if measure == "accuracy" else None
            value = (
                head_norms.compute_class_fraction_estimate_error(pa.Table.from_pandas(tables[0])) if tables else value
            )
            if value is None or figure.x not in run.cell.grid:
                continue
            panel, x = run.panel, run.cell.grid[figure.x]
            if isinstance(x, str):  # a separate column, such as `Figure 8a/64`
                panel, _, x = x.rpartition("/")
                panel = figure.x_label[panel] if isinstance(figure.x_label, Mapping) else panel
            entry = {"measure": MEASURE_LABELS[measure]} if len(figure.measures) > 1 else {}
            rows.append(entry | {"panel": panel, "line": run.line, "x": float(x), "value": value})
    return _average_over_seeds(pd.DataFrame(rows))


def _build_rounds_to_targets_data(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    frame = pd.concat([run.study.get_accuracy_curve(run.cell).assign(panel=run.panel, line=run.line) for run in runs])
    return compute_rounds_to_targets(frame)


def compute_rounds_to_targets(frame: pd.DataFrame) -> pd.DataFrame:
    """Rounds until the mean over seeds has a fraction of FedAvg's last accuracy, or NaN if it is never reached.

    The paper's targets are not in its text. ``frame`` has accuracies in percent as ``value`` by ``panel``, ``line`` and
    round (``x``).
    """
    rows = []
    for panel, curves in frame.groupby("panel", sort=False):
        groups = curves.groupby(["line", "x"], sort=False)["value"]
        means, seeds = groups.mean(), groups.count()
        if "FedAvg" not in means:
            continue
        last = means["FedAvg"].iloc[-1]
        for (name, fraction), line in itertools.product(TARGET_FRACTIONS.items(), curves["line"].unique()):
            value = float(means[line][means[line] >= fraction * last].index.min())  # NaN if it is empty
            labels = {"panel": f"{panel}, FedAvg's last: {last:.1f} %", "target": name, "line": line}
            rows.append(labels | {"value": value, "seeds": seeds[line].max()})
    rounds = pd.DataFrame(rows, columns=["panel", "target", "line", "value", "seeds"])
    return rounds if rounds["seeds"].max() > 1 else rounds.drop(columns="seeds")


def _count_samples_by_client_and_class(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    """The number of each client's training samples of each class, in the first run of each panel."""
    frames: dict[str, pd.DataFrame] = {}
    for run in runs:
        settings = run.study.read_settings(run.cell)["partition"]
        formats = {"scheme": "{}", "alpha": "α = {}", "shards_per_client": "{} per client"}
        parts = [text.format(settings[name]) for name, text in formats.items() if name in settings]
        panel = run.panel or ", ".join(parts)
        if panel not in frames:
            path = layout.get_assignment_path(run.study.plan.get_run(run.cell).partition)
            counts = Assignment.read(path, files.read_recorded_sha256(path)).class_counts
            long = pd.DataFrame(counts).rename_axis("row").reset_index().melt("row", var_name="column")
            frames[panel] = long.assign(panel=panel)[["panel", "row", "column", "value"]]
    return pd.concat(frames.values())


def _build_head_norms_data(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    """Class fractions of clients, then relative norms of heads: local models by client, other models by class."""
    frames: list[pd.DataFrame] = []
    for run, model, norms in _iterate_head_norms(runs):
        if not frames and model != "class":
            shares = norms["samples"] / norms.groupby("owner")["samples"].transform("sum")
            frames.append(norms.assign(panel="training data", value=shares))
        changes = [
            f"{_get_parameter_symbol(name)} = {value:g}"
            for name, value in run.cell.grid.items()
            if name.startswith("algorithms.") and run.selection is not figure
        ]
        panel = ", ".join([run.method, *changes, f"{model} models"])
        frames.append(norms.assign(panel=panel, value=norms["relative"]))
    if not frames:
        return pd.DataFrame()
    frame = pd.concat(frames).fillna({"value": 0.0}).rename(columns={"owner": "row", "class": "column"})
    return frame[["panel", "row", "column", "value"]].drop_duplicates(["panel", "row", "column"])


def _iterate_head_norms(runs: Iterable[FigureRun]) -> Iterator[tuple[FigureRun, str, pd.DataFrame]]:
    """The norms of the heads of each run's selected models, with the run and the kind of models."""
    for run in runs:
        models = run.selection.models
        for table in run.study.load_diagnostics("head-norms", run.cell):
            groups = table.groupby("model", sort=False)
            yield from ((run, str(model), norms) for model, norms in groups if not models or model in models)


def _build_matrices_data(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    """Soft labels (SL) and class relations (CR) of global models on the global test set after the last round."""
    frame = pd.concat(read_last_measured_matrices(run.cell.merged_files).assign(panel=run.panel) for run in runs)
    classes = [name for name in frame if str(name).isdecimal()]
    long = frame.melt(["panel", "matrix", "class"], classes, "column").dropna(subset="value")
    long = long[long["matrix"].isin(["SL", "CR"])].sort_values("matrix", ascending=False, kind="stable")
    long = long.assign(panel=long["panel"] + ", " + long["matrix"], column=long["column"].astype(int))
    long = long.rename(columns={"class": "row", "matrix": "measure"})
    return pd.DataFrame(long, columns=["panel", "row", "column", "value", "measure"])


def _build_diagnostics_data(figure: Figure, runs: Sequence[FigureRun]) -> pd.DataFrame:
    """Rows of the form's diagnostic."""
    kind, build_rows = DIAGNOSTICS[figure.form]
    tables = [
        table.assign(panel=run.panel, line=run.line, method=run.cell.algorithm)
        for run in runs
        for table in run.study.load_diagnostics(kind, run.cell)
    ]
    return build_rows(tables) if tables else pd.DataFrame()


def _build_class_fractions_and_norms_data(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Class fractions and norms of a few clients, beginning with counterexamples, which the paper also shows."""
    frames = []
    for table in tables:
        clients = [
            norms.assign(contrary=mark_contradicting_classes(norms), panel=f"{norms['panel'].iloc[0]}, client {owner}")
            for owner, norms in table.groupby("owner")
        ]
        frames += sorted(clients, key=lambda norms: not norms["contrary"].any())[:MAX_CLIENTS]
    return pd.concat(frames).assign(norm=lambda rows: rows["relative"])[["panel", "class", "share", "norm", "contrary"]]


def _build_surface_data(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(tables).rename(columns={"loss": "value"})[["panel", "x", "y", "value"]]


def _build_layer_gradient_norms_data(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Norms of the gradients on each client's data: mean and standard deviation over the clients."""
    frame = pd.concat(tables).query("client >= 0").rename(columns={"layer": "position", "name": "layer"})
    norms = frame.groupby(["line", "position", "layer"], sort=False)["norm"].agg(["mean", "std"])
    return norms.reset_index().drop(columns="position")


def _build_class_share_curves_data(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The estimated class shares of the first client by step, without WDR and with it."""
    frame = pd.concat([table[table["client"] == table["client"].min()] for table in tables])
    frame = frame.assign(panel=np.where(frame["method"] == "cwfedavg", "with WDR", "without WDR"))
    frame = frame.sort_values("panel", ascending=False, kind="stable").rename(columns={"approximate": "value"})
    return pd.DataFrame(frame, columns=["panel", "client", "class", "step", "value", "share"])


#: Kind of diagnostic of each form, and the rows of its tables.
DIAGNOSTICS: Mapping[str, tuple[str, Callable[[Sequence[pd.DataFrame]], pd.DataFrame]]] = {
    "shares": ("head-norms", _build_class_fractions_and_norms_data),
    "features": ("features", lambda tables: tables[0][["kind", "class", "x", "y"]]),
    "surface": ("surface", _build_surface_data),
    "layers": ("gradients", _build_layer_gradient_norms_data),
    "traces": ("locals", _build_class_share_curves_data),
}
FRAME_BUILDERS: Mapping[str, Callable[[Figure, Sequence[FigureRun]], pd.DataFrame]] = {
    "curves": _build_curves_data,
    "sweep": _build_sweep_data,
    "bars": _build_rounds_to_targets_data,
    "counts": _count_samples_by_client_and_class,
    "norms": _build_head_norms_data,
    "matrices": _build_matrices_data,
} | dict.fromkeys(DIAGNOSTICS, _build_diagnostics_data)
