"""The forms of the papers' figures: pure functions from a tidy frame to the text of an SVG.

Labels are taken as they are (a dollar sign is no formula), text stays text, and the same frame gives the same bytes.
Panels, lines and groups come in the order in which they first stand in the frame.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from fedpipe.report.figures import style

_P = ParamSpec("_P")
RC_PARAMS = style.RC_PARAMS | {"svg.fonttype": "none", "text.parse_math": False, "axes.formatter.use_mathtext": False}
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"  #: a browser may lack the font that the layout was measured with
PANEL_HEIGHT = 2.5  #: inches that a panel of several is high
LEGEND_COLUMNS = 4
MIN_ACCURACY_SPAN = 2.0  #: points of accuracy that an axis spans, lest a difference of a few samples look like a result
MAX_NUMBERED_CELLS = 12  #: rows and columns up to which a heat map's cells tell their number
CONTRADICTION_COLOR = "#C0392B"  #: of what contradicts a claim
DIVERGING_COLOR_MAP = "PuOr"  #: a color map with white at zero, which color-blind readers can read


def _render_as_svg(draw: Callable[_P, Figure]) -> Callable[_P, str]:
    """Decorate a function that makes a figure: it returns the text of its SVG instead."""

    @functools.wraps(draw)
    def render_svg(*args: _P.args, **kwargs: _P.kwargs) -> str:
        with mpl.style.context(["default", RC_PARAMS]):
            buffer = io.BytesIO()
            draw(*args, **kwargs).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue().decode().replace("'DejaVu Sans'", FONTS)

    return render_svg


@_render_as_svg
def render_curves(frame: pd.DataFrame, x_label: str = "round", y_label: str = "test accuracy (%)") -> Figure:
    """Curves with bands of one standard deviation, in panels.

    Parameters
    ----------
    frame
        ``panel``, ``line``, ``x``, ``mean`` and, where there are several runs, ``std``. With a column ``measure``, each
        of its values is a row of panels with an axis of its own.
    x_label, y_label
        What the axes show; with ``measure``, its values label the vertical axes.
    """
    return _draw_lines(frame, x_label, y_label, log=False, has_marker_per_point=False)


@_render_as_svg
def render_sweep(frame: pd.DataFrame, x_label: str, y_label: str = "test accuracy (%)", log: bool = False) -> Figure:
    """A quantity against the value of a setting, a marker at each value; columns as those of `render_curves`.

    A value of 0 has a place of its own at the left of a logarithmic axis.
    """
    return _draw_lines(frame, x_label, y_label, log, has_marker_per_point=True)


@_render_as_svg
def render_bars(
    frame: pd.DataFrame, x_label: str = "rounds to the target accuracy", missing: str = "not reached"
) -> Figure:
    """A bar a line, in panels; where there is no number, ``missing`` stands in its place.

    Parameters
    ----------
    frame
        ``panel``, ``line``, ``value`` (NaN where it has none) and, where there are several runs, ``std``.
    x_label
        What the bars show.
    missing
        What no number means.
    """
    frame = _fill_columns(frame, panel="", line="")
    panels, lines = _get_unique_values(frame, "panel"), _get_unique_values(frame, "line")
    bars_figure = Figure(figsize=(style.PAGE_WIDTH, 0.85 + 0.26 * len(lines)))
    axes = bars_figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, panel in zip(axes, panels, strict=True):
        rows = frame[frame["panel"] == panel].set_index("line").reindex(lines)
        values = rows["value"].to_numpy(dtype=float)
        std = rows["std"].to_numpy(dtype=float) if "std" in rows else np.zeros(len(lines))
        ax.barh(range(len(lines)), values, color=style.COLORS[0], height=0.66)
        ax.errorbar(values, range(len(lines)), xerr=std, fmt="none", ecolor="#444444", elinewidth=0.9)
        for bar_index, (value, reach) in enumerate(zip(values, np.nan_to_num(std), strict=True)):
            has_value = np.isfinite(value)
            text, edge = (f"{value:.4g}", value + reach) if has_value else (missing, 0)
            shade = "#222222" if has_value else "#666666"
            ax.annotate(
                text, (edge, bar_index), (4, 0), textcoords="offset points", va="center", fontsize=7.5, color=shade
            )
        ax.set(title=panel, yticks=range(len(lines)), yticklabels=lines, xlabel=x_label, ylim=(len(lines) - 0.5, -0.5))
        ax.set_xlim(0, 1.3 * max(np.nanmax(frame[["value"]].to_numpy(dtype=float), initial=1), 1))
        ax.grid(visible=False, axis="y")
        ax.tick_params(left=False)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    return bars_figure


@_render_as_svg
def render_heatmaps(
    frame: pd.DataFrame, x_label: str = "class", y_label: str = "client", z_label: str = "", columns: int = 3
) -> Figure:
    """Heat maps in panels, light to dark on one scale.

    Parameters
    ----------
    frame
        ``panel``, ``row``, ``column`` and ``value``. With a column ``measure``, panels of each of its values have a
        scale of their own. Where values are negative, white is zero.
    x_label, y_label, z_label
        What columns, rows and shades are.
    columns
        Number of panels beside each other.
    """
    frame = _fill_columns(frame, panel="", measure="")
    panels = _get_unique_values(frame, "panel")
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    aspect_ratio = frame.groupby("panel")["row"].nunique().max() / frame.groupby("panel")["column"].nunique().max()
    width = style.PAGE_WIDTH / columns
    height = width * min(max(0.8 * aspect_ratio, 0.5), 1.5)
    heatmap_figure = Figure(figsize=(style.PAGE_WIDTH, rows * (0.6 + height)))
    axes = heatmap_figure.subplots(rows, columns, squeeze=False)
    shades = {str(name): _choose_color_scale(values) for name, values in frame.groupby("measure")["value"]}
    images_by_measure: dict[str, list[tuple[Axes, AxesImage]]] = {}
    for panel_index, (ax, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        panel_rows = frame[frame["panel"] == panel]
        measure = str(panel_rows["measure"].iloc[0])
        matrix = panel_rows.pivot(index="row", columns="column", values="value")
        color, shade = shades[measure]
        image = ax.imshow(matrix, cmap=color, norm=shade, aspect="auto", interpolation="nearest")
        images_by_measure.setdefault(measure, []).append((ax, image))
        ax.grid(visible=False)
        _name_cells(ax.xaxis, matrix.columns, int(width * 5))
        _name_cells(ax.yaxis, matrix.index, int(height * 8))
        if max(matrix.shape) <= MAX_NUMBERED_CELLS and columns <= 2:
            _write_cell_numbers(ax, matrix.to_numpy(dtype=float), shade)
        ax.set_title(textwrap.fill(panel, int(width * 10)), fontsize=8.5)
        ax.set_xlabel(x_label if panel_index + columns >= len(panels) else "")
        ax.set_ylabel(y_label if panel_index % columns == 0 else "")
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_axis_off()
    for measure, images in images_by_measure.items():
        bar = heatmap_figure.colorbar(images[0][1], ax=[ax for ax, _ in images], shrink=0.7, aspect=30, pad=0.02)
        bar.set_label(measure or z_label)
        bar.outline.set_visible(False)
    return heatmap_figure


@_render_as_svg
def render_circles(frame: pd.DataFrame, y_label: str = "norm of the head's row, relative") -> Figure:
    """A circle a class, as large as its share of the data, at the height of its norm; white where it has no data.

    Parameters
    ----------
    frame
        ``panel``, ``class``, ``share`` (of the samples), ``norm`` and ``contrary``: whether it contradicts what is
        claimed of the two.
    y_label
        What the height is.
    """
    frame = _fill_columns(frame, panel="")
    panels = _get_unique_values(frame, "panel")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    circles_figure = Figure(figsize=(style.PAGE_WIDTH, 0.4 + 1.9 * rows))
    axes = circles_figure.subplots(rows, columns, squeeze=False, sharey="row")
    max_share = frame["share"].max()
    for panel_index, (ax, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        panel_rows = frame[frame["panel"] == panel]
        color = [CONTRADICTION_COLOR if contrary else style.COLORS[0] for contrary in panel_rows["contrary"]]
        fill_colors = [shade if share > 0 else "white" for shade, share in zip(color, panel_rows["share"], strict=True)]
        size = 12 + 300 * panel_rows["share"] / max_share
        ax.scatter(
            panel_rows["class"], panel_rows["norm"], s=size, c=fill_colors, edgecolors=color, linewidths=0.9, alpha=0.85
        )
        for label, share, norm, shade in zip(
            panel_rows["class"], panel_rows["share"], panel_rows["norm"], color, strict=True
        ):
            ax.annotate(
                f"{norm:.3g}".removeprefix("0"),
                (label, norm),
                (0, -4 - 8.6 * np.sqrt(max(share, 0.02) / max_share)),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=6.5,
                color=shade if shade == CONTRADICTION_COLOR else "#222222",
            )
        ax.set(title=panel, xticks=sorted(panel_rows["class"].unique()))
        ax.margins(x=0.09)
        ax.set_xlabel("class" if panel_index + columns >= len(panels) else "")
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_axis_off()
    for row in range(rows):
        norms = frame[frame["panel"].isin(panels[row * columns : (row + 1) * columns])]["norm"]
        span = float(norms.max() - norms.min()) or 1.0
        axes[row, 0].set_ylim(norms.min() - 0.35 * span, norms.max() + 0.2 * span)
    circles_figure.supylabel(y_label, fontsize=9)
    return circles_figure


@_render_as_svg
def render_scatter(frame: pd.DataFrame) -> Figure:
    """Features of samples as dots and rows of the head as crosses, in two dimensions, by class.

    Parameters
    ----------
    frame
        ``x``, ``y``, ``class``, and ``kind``: ``feature`` or ``row``; with ``panel``, in panels.
    """
    frame = _fill_columns(frame, panel="")
    panels, classes = _get_unique_values(frame, "panel"), sorted(frame["class"].unique())
    scatter_figure = Figure(figsize=(style.PAGE_WIDTH, 4.4 if len(panels) == 1 else 3.4))
    axes = scatter_figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        for index, label in enumerate(classes):
            class_rows = frame[(frame["panel"] == panel) & (frame["class"] == label)]
            dots, crosses = (class_rows[class_rows["kind"] == kind] for kind in ("feature", "row"))
            color = style.COLORS[index % len(style.COLORS)]
            ax.scatter(dots["x"], dots["y"], s=7, color=color, alpha=0.55, linewidths=0, label=str(label))
            ax.scatter(crosses["x"], crosses["y"], s=75, marker="X", color=color, edgecolors="white", linewidths=1.1)
            for x, y in zip(crosses["x"], crosses["y"], strict=True):
                ax.annotate(str(label), (x, y), (6, 5), textcoords="offset points", fontsize=8.5, weight="bold")
        ax.set(title=panel, xticks=[], yticks=[], aspect="equal")
        ax.grid(visible=False)
    scatter_figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", title="class", markerscale=2)
    return scatter_figure


@_render_as_svg
def render_surface(frame: pd.DataFrame, z_label: str = "training loss") -> Figure:
    """The loss around a model in two directions, as contours; panels share their levels, and a cross is the model.

    Parameters
    ----------
    frame
        ``panel``, ``x``, ``y`` (steps in the two directions, 0 at the model) and ``value``.
    z_label
        What the levels are.
    """
    frame = _fill_columns(frame, panel="")
    panels = _get_unique_values(frame, "panel")
    finite = frame["value"][np.isfinite(frame["value"])]
    low, high = (finite.min(), np.quantile(finite, 0.95)) if len(finite) else (0.0, 1.0)
    levels = np.linspace(low, high if high > low else low + 1, 15)  # up to the maximum, the corners would take all
    surface_figure = Figure(figsize=(style.PAGE_WIDTH, 0.4 + 0.82 * style.PAGE_WIDTH / max(len(panels), 2)))
    axes = surface_figure.subplots(1, max(len(panels), 2), squeeze=False, sharey=True)[0]
    for ax, panel in zip(axes, panels, strict=False):
        grid = frame[frame["panel"] == panel].pivot(index="y", columns="x", values="value")
        filled_contours = ax.contourf(grid.columns, grid.index, grid, levels=levels, cmap="Blues", extend="max")
        ax.contour(grid.columns, grid.index, grid, levels=levels, colors="#444444", linewidths=0.45)
        ax.plot(0, 0, marker="P", color=style.COLORS[1], markersize=8, markeredgecolor="white")
        ax.set(title=panel, aspect="equal", xlabel="direction 1")
        ax.xaxis.set_major_locator(MaxNLocator(4, prune="both"))
        ax.grid(visible=False)
    axes[0].set_ylabel("direction 2")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    bar = surface_figure.colorbar(
        filled_contours, ax=list(axes[: len(panels)]), label=z_label, shrink=0.75, format="%.3g"
    )
    bar.outline.set_visible(False)
    return surface_figure


@_render_as_svg
def render_layers(frame: pd.DataFrame, y_label: str = "gradient norm") -> Figure:
    """A quantity of each layer, a line a group, from the input to the output.

    Parameters
    ----------
    frame
        ``line``, ``layer`` (in the order of the model), ``mean`` and, where there are several, ``std``; with ``panel``,
        in panels.
    y_label
        What is shown.
    """
    frame = _fill_columns(frame, panel="", line="", layer="")
    panels, lines, names = (_get_unique_values(frame, name) for name in ("panel", "line", "layer"))
    layers_figure = Figure(figsize=(style.PAGE_WIDTH, 3.2))
    axes = layers_figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, panel in zip(axes, panels, strict=True):
        for index, line in enumerate(lines):
            line_rows = frame[(frame["panel"] == panel) & (frame["line"] == line)].set_index("layer").reindex(names)
            mean = line_rows["mean"].to_numpy(dtype=float)
            ax.plot(range(len(names)), mean, label=line, **style.get_line_style(index))
            if "std" in line_rows:
                std = line_rows["std"].fillna(0).to_numpy(dtype=float)
                low, high = mean - std, mean + std
                ax.fill_between(
                    range(len(names)), low, high, color=style.get_line_style(index)["color"], alpha=0.12, linewidth=0
                )
        ax.set(title=panel)
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes[0].set_ylabel(y_label)
    _add_legend(layers_figure, axes, lines)
    return layers_figure


@_render_as_svg
def render_traces(steps: pd.DataFrame, points: pd.DataFrame) -> Figure:
    """Estimates of a client's class distribution by step, a line a class, and at last against the true one.

    Parameters
    ----------
    steps
        ``panel`` (as without and with a regularizer), ``class``, ``step`` and ``value``.
    points
        ``group`` (the same names), ``true`` and ``estimate``.
    """
    steps, points = _fill_columns(steps, panel=""), _fill_columns(points, group="")
    panels, classes = _get_unique_values(steps, "panel"), sorted(steps["class"].unique())
    traces_figure = Figure(figsize=(style.PAGE_WIDTH, 3.1))
    axes = traces_figure.subplots(1, len(panels) + 1)
    shares = steps.groupby("class")["value"].last()
    largest_classes = (
        set(shares.nlargest(len(style.COLORS) - 1).index) if len(classes) > len(style.COLORS) else set(classes)
    )
    for ax, panel in zip(axes, panels, strict=False):
        for label in classes:
            selected_rows = steps[(steps["panel"] == panel) & (steps["class"] == label)]
            is_named = label in largest_classes
            color = style.COLORS[sorted(largest_classes).index(label)] if is_named else "#C8C8C8"
            ax.plot(
                selected_rows["step"],
                selected_rows["value"],
                color=color,
                linewidth=1.3 if is_named else 0.5,
                zorder=2 + is_named,
                label=str(label) if is_named else None,
            )
        ax.set(title=panel, xlabel="step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.set_ylim(0, 1.05 * max(steps["value"].max(), 1e-9))
    axes[0].set_ylabel("estimated share p̃")
    for index, (group, marker) in enumerate(zip(_get_unique_values(points, "group"), "^osDv", strict=False)):
        selected_rows = points[points["group"] == group]
        color = style.COLORS[index]
        axes[-1].scatter(
            selected_rows["true"], selected_rows["estimate"], s=22, marker=marker, color=color, alpha=0.8, label=group
        )
    end = 1.05 * max(points["true"].max(), points["estimate"].max())
    axes[-1].plot([0, end], [0, end], color="#888888", linewidth=0.8, linestyle=(0, (4, 3)))
    axes[-1].set(title="after the epoch", xlabel="true share p", ylabel="estimated share p̃")
    axes[-1].legend(loc="upper left", handletextpad=0.2, fontsize=7.5)
    handles, names = axes[0].get_legend_handles_labels()
    traces_figure.legend(
        handles, names, title="class", loc="outside upper left", ncols=10, handlelength=1.4, columnspacing=1.2
    )
    return traces_figure


def _draw_lines(frame: pd.DataFrame, x_label: str, y_label: str, log: bool, has_marker_per_point: bool) -> Figure:
    """Lines with bands in panels; markers at ``has_marker_per_point`` point, or at a few."""
    frame = _fill_columns(frame, panel="", measure=y_label, line="")
    panels, measures, lines = (_get_unique_values(frame, name) for name in ("panel", "measure", "line"))
    has_several_measures = len(measures) > 1
    columns = len(panels) if has_several_measures else {1: 1, 2: 2, 4: 2}.get(len(panels), 3 if len(panels) <= 9 else 5)
    rows = len(measures) if has_several_measures else -(-len(panels) // columns)
    height = 3.4 if rows * columns == 1 else rows * (PANEL_HEIGHT if columns < 5 else 1.5)
    lines_figure = Figure(figsize=(style.PAGE_WIDTH, height + 0.24 * -(-len(lines) // LEGEND_COLUMNS)))
    axes = lines_figure.subplots(
        rows,
        columns,
        squeeze=False,
        sharex=not has_marker_per_point,
        sharey="row" if has_several_measures else columns < 5,
    )
    cells = [(panel, measure) for measure in measures for panel in panels]
    for panel_index, (ax, (panel, measure)) in enumerate(zip(axes.flat, cells, strict=False)):
        for index, line in enumerate(lines):
            line_rows = frame[(frame["panel"] == panel) & (frame["measure"] == measure) & (frame["line"] == line)]
            get_position = _make_position_function(frame[frame["panel"] == panel]["x"], log)
            x, mean = line_rows["x"].map(get_position).to_numpy(dtype=float), line_rows["mean"].to_numpy(dtype=float)
            gap = 1 if has_marker_per_point else max(1, len(line_rows) // 6)
            line_style = style.get_line_style(index) | {"markevery": (0 if has_marker_per_point else index % gap, gap)}
            if "std" in line_rows and len(line_rows):
                std = line_rows["std"].fillna(0).to_numpy(dtype=float)
                ax.fill_between(x, mean - std, mean + std, color=line_style["color"], alpha=0.12, linewidth=0)
            ax.plot(x, mean, label=line, **line_style)
        ax.set_title(panel, fontsize=9 if columns < 5 else 8)
        _set_x_axis(ax, frame[frame["panel"] == panel]["x"], log, has_marker_per_point)
        ax.set_xlabel(x_label if panel_index + columns >= len(cells) else "")
        ax.set_ylabel(measure if panel_index % columns == 0 else "")
    for ax, (_, measure) in zip(axes.flat, cells, strict=False):
        low, high = ax.get_ylim()
        if measure.endswith("(%)") and high - low < MIN_ACCURACY_SPAN:
            ax.set_ylim((low + high - MIN_ACCURACY_SPAN) / 2, (low + high + MIN_ACCURACY_SPAN) / 2)
    for ax in list(axes.flat)[len(cells) :]:
        ax.set_axis_off()
    _add_legend(lines_figure, axes.flat, lines)
    return lines_figure


def _make_position_function(axis_values: pd.Series[Any], log: bool) -> Callable[[float], float]:
    """Where a value lies on the horizontal axis: see :func:`_compute_zero_position` for a logarithmic one."""
    if not log:
        return float
    zero_position = _compute_zero_position(axis_values)
    return lambda value: float(value) if value > 0 else zero_position


def _compute_zero_position(axis_values: pd.Series[Any]) -> float:
    """The place of 0 on a logarithmic axis: a step below the least value, or 1 where there is no other."""
    values = sorted(float(value) for value in axis_values.unique() if value > 0)
    if not values:
        return 1.0
    return values[0] / (values[1] / values[0] if len(values) > 1 else 10.0)


def _set_x_axis(ax: Axes, values: pd.Series[Any], log: bool, has_tick_per_value: bool) -> None:
    """Ticks at the values of a setting, or at round numbers of a count."""
    if not has_tick_per_value:
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        return
    tick_values = sorted(float(value) for value in values.unique())
    if not log:
        ax.xaxis.set_major_locator(FixedLocator(tick_values) if _has_room_for_labels(tick_values) else MaxNLocator(6))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    ax.set_xscale("log")
    names = {value if value > 0 else _compute_zero_position(values): f"{value:g}" for value in tick_values}
    ax.xaxis.set_major_locator(FixedLocator(list(names)))
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: names[min(names, key=lambda tick_values: abs(tick_values - value))])
    )
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())


def _has_room_for_labels(values: Sequence[float]) -> bool:
    """Whether ticks at all these values have room for their labels."""
    gaps = np.diff(values)
    return len(values) <= 10 and (len(gaps) == 0 or float(gaps.min()) >= 0.07 * (values[-1] - values[0]))


def _choose_color_scale(values: pd.Series[Any]) -> tuple[str, Normalize]:
    low, high = float(values.min()), float(values.max())
    if low < 0:
        reach = max(-low, high)
        return DIVERGING_COLOR_MAP, Normalize(-reach, reach)
    return style.COLOR_MAP, Normalize(0, high or 1)


def _name_cells(axis: Any, names: pd.Index[Any], max_labels: int) -> None:
    """Name the rows or columns of a heat map, as many as there is room for."""
    gap = next(step for step in (1, 2, 5, 10, 20, 50, 100, len(names)) if len(names) / step <= max_labels)
    axis.set_ticks(range(0, len(names), gap), [str(name) for name in names[::gap]])
    axis.set_tick_params(labelsize=7)


def _write_cell_numbers(ax: Axes, matrix: np.ndarray[Any, Any], shade: Normalize) -> None:
    for (row, column), value in np.ndenumerate(matrix):
        dark = abs(float(shade(value)) - (0.5 if shade.vmin and shade.vmin < 0 else 0.0))
        ink = style.get_text_color(dark * (2 if shade.vmin and shade.vmin < 0 else 1))
        text = f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}".replace("0.", ".")
        ax.text(column, row, text, ha="center", va="center", fontsize=5.5, color=ink)


def _add_legend(legend_figure: Figure, axes: Iterable[Axes], lines: Sequence[str]) -> None:
    """One legend for all panels, above them; none for a single line."""
    if len(lines) < 2:
        return
    handles: dict[str, Any] = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    legend_figure.legend(
        [handles[line] for line in lines], lines, loc="outside upper left", ncols=LEGEND_COLUMNS, handlelength=2.8
    )


def _fill_columns(frame: pd.DataFrame, **defaults: str) -> pd.DataFrame:
    """The frame with these columns as text; those that it lacks have one value."""
    return frame.assign(**{name: frame[name].astype(str) if name in frame else defaults[name] for name in defaults})


def _get_unique_values(frame: pd.DataFrame, name: str) -> list[str]:
    return [str(value) for value in frame[name].unique()]
