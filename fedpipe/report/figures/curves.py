"""A metric by round: one panel per protocol and one line per algorithm, or one panel per line if there are many."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fedpipe.planning.plan import Plan
from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.report.figures import style
from fedpipe.report.words import METRICS, format_metric_label
from fedpipe.settings.base import Metric

MAX_LINES_PER_PANEL = 6  #: with more lines, each has its own panel
REFERENCE_ALGORITHM = "fedavg"  #: gray reference in small multiples. Without it, the first line
MIN_TITLE_WIDTH = 8.0  #: in em. Titles of narrower panels are smaller
MIN_BROKEN_WIDTH = 12  #: in letters. Names are not wrapped within words in narrower panels
REFERENCE_STYLE = {"color": "#A8A8A8", "zorder": 1.5}


def write_curves_figure(data: StudyData, name: str = "curves") -> None:
    """Draw a metric against round: the first of the study, or the one of the figure's name."""
    plan, metric = data.plan, data.plan.metrics_by_figure[name]
    figure = build_curves_figure(plan, data.build_figure_curves(metric), metric)
    style.save_figure(figure, plan.study_files.figures_folder / name, style.PAGES[plan.report.figure_width])


def build_curves_figure(plan: Plan, frame: pd.DataFrame, metric: Metric = "accuracy") -> Figure:
    """Build the figure of :meth:`fedpipe.report.data.StudyData.build_figure_curves`.

    Grid values of all algorithms are panels, and grid values of one algorithm are lines. Values of `best_over` are
    neither. Lines are identified by labels and named by titles. If there are too many lines for one panel, each line
    has a panel, whose lines are the protocols.
    """
    varied_names = [name for name in plan.grid if name not in plan.report.best_over]
    line_names = [
        name
        for name in varied_names
        if name.startswith("algorithms.") or not all(name in cell.grid for cell in plan.cells)
    ]
    panel_names = [name for name in varied_names if name not in line_names]
    pairs = list(zip(frame["algorithm"], _get_grid_points(frame, line_names), strict=True))
    names = [results.describe_configuration(label, point) for label, point in pairs]
    titles = (results.describe_configuration(plan.get_method_title(label), point) for label, point in pairs)
    lines = dict(zip(names, titles, strict=True))
    frame = frame.assign(
        point=[results.describe_grid_point(point) for point in _get_grid_points(frame, panel_names)], line=names
    )
    protocols = [name for name in results.list_evaluation_protocols(plan, frame) if name in set(frame["protocol"])]
    drawn_algorithms = {*frame["algorithm"]}
    drawn_cells = tuple(cell for cell in plan.cells if cell.algorithm in drawn_algorithms)
    overrides = results.describe_method_overrides(dataclasses.replace(plan, cells=drawn_cells))
    page = style.PAGES[plan.report.figure_width]
    build = _build_small_multiples if len(lines) > MAX_LINES_PER_PANEL else _build_curve_panels
    with style.use_matplotlib_style(page):
        seeds = len(plan.seeds)
        mean_note = f"Mean of {seeds} seeds. Band: one standard deviation." if seeds > 1 else "One seed."
        if frame.empty:
            note = "No method has a model of these protocols, so there are no curves."
            return style.add_notes(Figure(figsize=(page.width, 5 * page.em_in_inches)), [note])
        sentences = [mean_note, *plan.held_out_notes, *plan.drift_notes, *overrides]
        return style.add_notes(build(page, frame, lines, protocols, metric), sentences)


def _build_curve_panels(
    page: style.Page, frame: pd.DataFrame, lines: dict[str, str], protocols: list[str], metric: Metric
) -> Figure:
    """Build one panel per protocol and grid point, and a legend."""
    panels = list(itertools.product(frame["point"].unique(), protocols))
    max_columns = int(page.width / page.em_in_inches / 21)
    columns = len(protocols) if 1 < len(protocols) <= max_columns else max_columns
    rows, columns, height = page.compute_panel_layout(len(panels), columns, 22, 6)
    figure = Figure(figsize=(page.width, height))
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax, (point, protocol) in zip(axes.flat, panels, strict=False):
        panel = frame[(frame["point"] == point) & (frame["protocol"] == protocol)]
        for index, name in enumerate(lines):
            line_rows = panel[panel["line"] == name]
            marker_gap = max(1, len(line_rows) // 6)
            line_style = style.get_line_style(index) | {"markevery": (index % marker_gap, marker_gap)}
            _plot_curve(ax, line_rows, name, metric, **line_style)
        title = format_metric_label(protocol, metric).replace(" (", "\n(")
        ax.set_title(_wrap_title(title, point, page.characters_per_line // columns - 4))
        equal_titles = [" = ".join(lines[name] for name in group) for group in _find_equal_lines(panel)]
        if equal_titles:
            text = "\n".join(textwrap.fill(title, 34) for title in equal_titles)
            ax.text(0.99, 0.02, text, transform=ax.transAxes, ha="right", va="bottom", fontsize="small")
    _format_axes(page, figure, axes, len(panels), protocols, frame["round"], metric)
    handles = style.get_legend_handles(figure)
    if len(lines) > 1:
        style.add_legend(figure, page, [(lines[name], handles[name]) for name in lines])
    return figure


def _build_small_multiples(
    page: style.Page, frame: pd.DataFrame, lines: dict[str, str], protocols: list[str], metric: Metric
) -> Figure:
    """Build one small panel per line and grid point, with the reference's curves in gray."""
    panels = list(itertools.product(frame["point"].unique(), lines))
    reference = REFERENCE_ALGORITHM if REFERENCE_ALGORITHM in lines else next(iter(lines))
    reference_label = f"{lines[reference]} (gray, for comparison)"
    rows, columns, height = page.compute_panel_layout(len(panels), int(page.width / page.em_in_inches / 9), 11, 8)
    figure = Figure(figsize=(page.width, height))
    axes = figure.subplots(rows, columns, squeeze=False)
    marker = "" if frame["round"].nunique() > 1 else "o"  # one round has no line
    curves = dict(iter(frame.groupby(["point", "line", "protocol"], sort=False)))
    rounded_values = {key: _compute_rounded_values(line_rows) for key, line_rows in curves.items()}
    for ax, (point, name) in zip(axes.flat, panels, strict=False):
        for index, protocol in enumerate(protocols):
            protocol_rows, reference_curve = (
                curves.get((point, line, protocol), frame.iloc[:0]) for line in (name, reference)
            )
            line_style = style.get_line_style(index) | {"marker": marker}
            if name != reference and len(protocol_rows):
                gray_style = line_style | REFERENCE_STYLE | {"label": reference_label}
                ax.plot(reference_curve["round"], reference_curve["mean"], **gray_style)
            _plot_curve(ax, protocol_rows, format_metric_label(protocol, metric), metric, **line_style)
        values, reference_values = (
            [rounded_values.get((point, line, protocol)) for protocol in protocols] for line in (name, reference)
        )
        is_same_as_reference = name != reference and any(values) and values == reference_values
        title = f"{lines[name]} = {lines[reference]}" if is_same_as_reference else lines[name]
        size = style.get_small_font_size() * min(1, page.get_panel_width_in_em(columns) / MIN_TITLE_WIDTH)
        size = max(size, style.MIN_FONT_SIZE)
        ax.set_title(_wrap_title(title, point, page.characters_per_line // columns - 1), pad=3, fontsize=size)
    _format_axes(page, figure, axes, len(panels), protocols, frame["round"], metric)
    handles = style.get_legend_handles(figure)
    names = [*(format_metric_label(name, metric) for name in protocols), reference_label]
    style.add_legend(figure, page, [(name, handles[name]) for name in names if name in handles])
    return figure


def _wrap_title(name: str, point: str, width: int) -> str:
    """Wrap the title of a panel. In a narrow panel, only the grid point is wrapped within words."""
    width = max(1, width)  # in a figure with hundreds of panels
    lines = [textwrap.fill(line, width, break_long_words=width >= MIN_BROKEN_WIDTH) for line in name.split("\n")]
    return "\n".join([*lines, *textwrap.wrap(point, width)])


def _find_equal_lines(panel: pd.DataFrame) -> list[list[str]]:
    """Find lines of a panel that are equal in every round, so that only the last is visible."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, line_rows in panel.groupby("line", sort=False):
        groups.setdefault(_compute_rounded_values(line_rows), []).append(str(name))
    return [names for names in groups.values() if len(names) > 1]


def _compute_rounded_values(line_rows: pd.DataFrame) -> tuple[float, ...]:
    """Round the numbers of a line, so that lines that look equal have equal numbers."""
    return tuple(line_rows[["round", "mean", "std"]].fillna(0).to_numpy().round(9).ravel())


def _format_axes(
    page: style.Page,
    figure: Figure,
    axes: npt.NDArray[Any],
    panels: int,
    protocols: list[str],
    rounds: pd.Series,
    metric: Metric,
) -> None:
    """Label the outer axes, with enough room for rounds of four digits, and hide unused axes."""
    is_test = all(name.endswith(("-on-global", "-on-local")) for name in protocols)
    columns = axes.shape[1]
    max_ticks = 5 if columns <= 3 else 3 if page.get_panel_width_in_em(columns) >= MIN_TITLE_WIDTH else 2
    ticks = style.choose_round_ticks(rounds, max_ticks)
    if panels:
        _set_equal_axis_limits(axes.flat[:panels])
    for index, ax in enumerate(axes.flat[:panels]):
        is_lowest = index >= panels - columns
        ax.set_xticks(ticks)
        ax.tick_params(labelbottom=is_lowest, labelleft=index % columns == 0)
        if index // columns == (panels - 1) // columns:
            ax.set_xlabel("round")
    for ax in axes.flat[panels:]:
        ax.set_axis_off()
    label = f"{'test ' if is_test else ''}{METRICS[metric].name_with_unit}"
    figure.supylabel(label, fontsize=mpl.rcParams["axes.labelsize"])


def _set_equal_axis_limits(axes: npt.NDArray[Any]) -> None:
    """Give all panels the limits of all data. matplotlib's shared axes take minutes for a hundred panels."""
    first = axes[0]
    boxes = [ax.dataLim for ax in axes if np.isfinite(ax.dataLim.get_points()).all()]  # others have no finite values
    first.dataLim.set(Bbox.union(boxes or [first.dataLim]))
    first.autoscale_view()
    for ax in axes:
        ax.set(xlim=first.get_xlim(), ylim=first.get_ylim())


def _plot_curve(ax: Axes, line_rows: pd.DataFrame, name: str, metric: Metric, **line_style: Any) -> None:
    if line_rows.empty:
        return
    rounds, mean, std = (line_rows[column].to_numpy() for column in ("round", "mean", "std"))
    maximum = 100 if METRICS[metric].unit == "%" else None
    low, high = np.clip(mean - std, 0, maximum), np.clip(mean + std, 0, maximum)
    ax.fill_between(rounds, low, high, color=line_style["color"], alpha=0.15, linewidth=0)
    ax.plot(rounds, mean, label=name, **line_style)


def _get_grid_points(frame: pd.DataFrame, names: list[str]) -> list[dict[str, str]]:
    return [dict(zip(names, point, strict=True)) for point in frame[names].to_numpy()]
