"""A metric by round: one panel per protocol and one line per algorithm, or one panel per line if there are many."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator

from fedpipe.planning.plan import Plan
from fedpipe.report import results
from fedpipe.report.curves import build_table_curves
from fedpipe.report.data import StudyData
from fedpipe.report.figures import style
from fedpipe.report.words import METRICS, format_metric
from fedpipe.settings.base import Metric

PANEL_COLUMNS = {1: 1, 2: 2, 4: 2}  #: columns by number of protocols, otherwise 3
MIN_LABELED_LINES = 6  #: number of lines from which labels replace the legend
MAX_LINES_PER_PANEL = len(style.COLORS)  #: maximum number of lines in a panel
REFERENCE_ALGORITHM = "fedavg"  #: gray reference in small multiples. Without it, the first line
REFERENCE_STYLE = {"color": "#A8A8A8", "linewidth": 1.0}


def draw_curves(data: StudyData, stem: Path, metric: Metric = "accuracy") -> None:
    """Draw mean curves with bands of one standard deviation over seeds."""
    style.save_figure(build_curves_figure(data.plan, build_table_curves(data, metric), metric), stem)


@style.apply_style
def build_curves_figure(plan: Plan, frame: pd.DataFrame, metric: Metric = "accuracy") -> Figure:
    """Build the figure of `fedpipe.report.curves.build_table_curves`.

    Grid values of all algorithms are panels, and grid values of one algorithm are lines. Values of `best_over` are
    neither. Lines are identified by labels and named by titles. A few lines have a legend, more lines have labels at
    their ends. If there are too many lines for one panel, each line has a panel, whose lines are the protocols.
    """
    varied_names = [name for name in plan.grid if name not in plan.report.best_over]
    line_names = [
        name
        for name in varied_names
        if name.startswith("algorithms.") or not all(name in cell.grid for cell in plan.cells)
    ]
    panel_names = [name for name in varied_names if name not in line_names]
    pairs = list(zip(frame["algorithm"], _get_points(frame, line_names), strict=True))
    names = [results.describe_configuration(label, point) for label, point in pairs]
    lines = dict(
        zip(names, (results.describe_configuration(plan.title(label), point) for label, point in pairs), strict=True)
    )
    sentences = results.describe_overrides(plan)
    frame = frame.assign(point=[results.describe_point(point) for point in _get_points(frame, panel_names)], line=names)
    protocols = [name for name in results.list_protocols(plan, frame) if name in set(frame["protocol"])]
    if len(lines) > MAX_LINES_PER_PANEL:
        return style.add_notes(_build_small_multiples(plan, frame, lines, protocols, metric), sentences)
    panels = list(itertools.product(frame["point"].unique(), protocols))
    has_end_labels = len(lines) >= MIN_LABELED_LINES
    columns = PANEL_COLUMNS.get(len(protocols), 2 if has_end_labels else 3)
    rows = max(1, -(-len(panels) // columns))
    wrapped_titles = [textwrap.fill(title, 40 // columns, break_long_words=False) for title in lines.values()]
    height = 0.14 * sum(text.count("\n") + 1 for text in wrapped_titles) + 0.8 if has_end_labels else 0.0
    curves_figure = Figure(figsize=(style.PAGE_WIDTH + 0.4, rows * max(3.3, height) + 0.4))
    axes = curves_figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax, (point, protocol) in zip(axes.flat, panels, strict=False):
        panel = frame[(frame["point"] == point) & (frame["protocol"] == protocol)]
        for index, name in enumerate(lines):
            line_rows = panel[panel["line"] == name]
            marker_gap = max(1, len(line_rows) // 6)
            line_style = style.get_line_style(index) | {"markevery": (index % marker_gap, marker_gap)}
            _draw_curve(ax, line_rows, name, metric, **line_style)
        ax.set_title(_wrap_title(format_metric(protocol, metric).replace(" (", "\n("), point, 66 // columns))
        coinciding_groups = _find_coinciding_lines(panel)
        if has_end_labels:
            _label_ends(ax, coinciding_groups, lines, 40 // columns)
            continue
        for group_index, group in enumerate(coinciding_groups):
            text = textwrap.fill(" = ".join(lines[name] for name in group), 34)
            ax.text(0.99, 0.02 + 0.09 * group_index, text, transform=ax.transAxes, ha="right", va="bottom", fontsize=7)
    _label_axes(axes, len(panels), protocols, metric)
    if has_end_labels:
        curves_figure.suptitle(_describe_seeds(plan), x=0.01, ha="left", fontsize=8)
        style.add_notes(curves_figure, sentences)
        _spread_labels(curves_figure)
        return curves_figure
    handles = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown_handles = [handles[name] for name in lines]
    legend = curves_figure.legend(shown_handles, [*lines.values()], loc="outside right upper", handlelength=3.4)
    legend.set_title(_describe_seeds(plan))
    return style.add_notes(curves_figure, sentences)


def _label_ends(ax: Axes, coinciding_groups: list[list[str]], lines: dict[str, str], width: int) -> None:
    """Label the right end of each visible line. The label also names lines that it hides."""
    hidden_lines = {name for group in coinciding_groups for name in group[:-1]}
    titles = lines | {group[-1]: " = ".join(lines[name] for name in group) for group in coinciding_groups}
    for line in ax.get_lines():
        if (name := str(line.get_label())) not in hidden_lines:
            ax.annotate(
                textwrap.fill(titles[name], width, break_long_words=False),
                xy=np.column_stack(line.get_data())[-1],
                xytext=(1.08, 0.5),  # _spread_labels sets the height
                textcoords="axes fraction",
                va="center",
                color=line.get_color(),
                fontsize=8,
                arrowprops={
                    "arrowstyle": "-",
                    "color": line.get_color(),
                    "linewidth": 0.6,
                    "relpos": (0, 0.5),
                    "shrinkA": 1,
                    "shrinkB": 0,
                },
            )


def _spread_labels(curves_figure: Figure) -> None:
    """Move labels to the heights of their lines' ends, or as near as possible."""
    curves_figure.draw_without_rendering()  # computes the heights of axes and labels
    for ax in curves_figure.axes:
        labels = [text for text in ax.texts if isinstance(text, Annotation)]
        ends = [ax.transAxes.inverted().transform(ax.transData.transform(label.xy))[1] for label in labels]
        heights = [1.1 * Text.get_window_extent(label).height / ax.bbox.height for label in labels]
        for label, height in zip(labels, spread_heights(ends, heights), strict=True):
            label.xyann = (label.xyann[0], height)


def spread_heights(desired_heights: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Place labels of these heights in [0, 1] without overlaps, in the order of their targets.

    The sum of squared distances from the targets is minimal.
    """
    order = sorted(
        range(len(desired_heights)), key=lambda index: (desired_heights[index], -index)
    )  # at equal heights, the first is on top
    tops = list(itertools.accumulate(heights[index] for index in order))
    stacked_heights = {
        index: top - heights[index] / 2 for index, top in zip(order, tops, strict=True)
    }  # if all are close together
    groups: list[list[float]] = []  # offsets from the target heights, by group of labels that move together
    for index in order:
        offsets = [desired_heights[index] - stacked_heights[index]]
        while groups and fmean(groups[-1]) > fmean(offsets):
            offsets = groups.pop() + offsets
        groups.append(offsets)
    group_offsets = [fmean(offsets) for offsets in groups for _ in offsets]
    free_height = 1 - sum(heights)
    final_heights = {
        index: stacked_heights[index] + min(max(offset, 0), free_height)
        for index, offset in zip(order, group_offsets, strict=True)
    }
    return [final_heights[index] for index in range(len(desired_heights))]


def _build_small_multiples(
    plan: Plan, frame: pd.DataFrame, lines: dict[str, str], protocols: list[str], metric: Metric
) -> Figure:
    """Build one small panel per line and grid point, with the reference's curves in gray."""
    panels = list(itertools.product(frame["point"].unique(), lines))
    reference = REFERENCE_ALGORITHM if REFERENCE_ALGORITHM in lines else next(iter(lines))
    reference_label = f"{lines[reference]} (gray, for comparison)"
    rows = -(-len(panels) // (columns := 5))
    multiples_figure = Figure(figsize=(style.PAGE_WIDTH + 0.8, 1.35 * rows + 0.8))
    axes = multiples_figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    marker = "" if frame["round"].nunique() > 1 else "o"  # one round has no line
    for ax, (point, name) in zip(axes.flat, panels, strict=False):
        point_rows = frame[frame["point"] == point]
        panel, reference_rows = (point_rows[point_rows["line"] == line] for line in (name, reference))
        for index, protocol in enumerate(protocols):
            protocol_rows, reference_curve = (rows[rows["protocol"] == protocol] for rows in (panel, reference_rows))
            line_style = style.get_line_style(index) | {"marker": marker}
            if name != reference and len(protocol_rows):
                ax.plot(
                    reference_curve["round"],
                    reference_curve["mean"],
                    **line_style | REFERENCE_STYLE | {"label": reference_label},
                )
            _draw_curve(ax, protocol_rows, format_metric(protocol, metric), metric, **line_style)
        is_same_as_reference = name != reference and any(
            {name, reference} <= {*group} for group in _find_coinciding_lines(_concatenate_protocols(point_rows))
        )
        title = f"{lines[name]} = {lines[reference]}" if is_same_as_reference else lines[name]
        ax.set_title(_wrap_title(title, point, 20), fontsize=8.5, pad=3)
        ax.tick_params(labelsize=7)
    _label_axes(axes, len(panels), protocols, metric, fontsize=7.5)
    handles = {name: handle for ax in axes.flat for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = sorted(handles, key=[*(format_metric(name, metric) for name in protocols), reference_label].index)
    legend = multiples_figure.legend(
        [handles[name] for name in order], order, loc="outside upper left", ncols=3, handlelength=2.6
    )
    legend.set_title(_describe_seeds(plan))
    return multiples_figure


def _concatenate_protocols(frame: pd.DataFrame) -> pd.DataFrame:
    """Concatenate the protocols of a line, which are compared together."""
    return frame.sort_values(["protocol", "round"]).assign(
        round=lambda rows: rows.groupby("protocol").ngroup() * 10**5 + rows["round"]
    )


def _wrap_title(name: str, point: str, width: int) -> str:
    """Wrap the title of a panel."""
    return "\n".join(textwrap.fill(line, width) for line in (*name.split("\n"), point) if line)


def _find_coinciding_lines(panel: pd.DataFrame) -> list[list[str]]:
    """Find lines of a panel that are equal in every round, so that only the last is visible."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for name, line_rows in panel.groupby("line", sort=False):
        values = line_rows[["round", "mean", "std"]].fillna(0).to_numpy().round(9)
        groups.setdefault(tuple(values.ravel()), []).append(str(name))
    return [names for names in groups.values() if len(names) > 1]


def _label_axes(axes: npt.NDArray[Any], panels: int, protocols: list[str], metric: Metric, **font: float) -> None:
    """Label the outer axes, and hide unused axes."""
    is_test = all(name.endswith(("-on-global", "-on-local")) for name in protocols)
    columns = axes.shape[1]
    for panel_index, ax in enumerate(axes.flat):
        bins = 7 if columns < 5 else 3  # enough room for 4 digits
        ax.xaxis.set_major_locator(MaxNLocator(bins, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if panel_index >= panels:
            ax.set_axis_off()
        elif panel_index + columns >= panels:
            ax.set_xlabel("round", **font)
            ax.tick_params(labelbottom=True)
        if panel_index < panels and panel_index % columns == 0:
            ax.set_ylabel(f"{'test ' if is_test else ''}{METRICS[metric].head}", **font)


def _draw_curve(ax: Axes, line_rows: pd.DataFrame, name: str, metric: Metric, **line_style: Any) -> None:
    if line_rows.empty:
        return
    rounds, mean, std = (line_rows[column].to_numpy() for column in ("round", "mean", "std"))
    maximum = 100 if METRICS[metric].unit == "%" else None
    low, high = np.clip(mean - std, 0, maximum), np.clip(mean + std, 0, maximum)
    ax.fill_between(rounds, low, high, color=line_style["color"], alpha=0.1, linewidth=0)
    ax.plot(rounds, mean, label=name, **line_style)


def _describe_seeds(plan: Plan) -> str:
    """Describe a curve and its band, if there are several seeds."""
    seeds = len(plan.seeds)
    return f"mean ± std, {seeds} seeds" if seeds > 1 else ""


def _get_points(frame: pd.DataFrame, names: list[str]) -> list[dict[str, str]]:
    return [dict(zip(names, point, strict=True)) for point in frame[names].to_numpy()]
