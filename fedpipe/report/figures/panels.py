"""Panels of lines, bars, heat maps and points, drawn from tidy frames: the text of an SVG.

Panels and lines come in the order of the frame, and the same frame gives the same bytes. Labels are plain text: a
dollar sign starts no formula. A figure is as wide as the text of NeurIPS and at most half a page high.
"""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fedpipe.report.figures import style

_P = ParamSpec("_P")
PAGE = style.PAGES["neurips"]
MAX_HEIGHT = 4.5  #: inches, half a page
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"  #: a reader may lack the font of the layout
MAX_COLORS = 7  #: lines in color. Others are gray
MAX_GRAY_NAMES = 10  #: maximum number of gray lines that are named
GRAY = "#C4C4C4"
DARK_GRAY = "#555555"
WARNING_COLOR = "#C0392B"  #: of points that contradict a claim
DIVERGING_COLOR_MAP = "PuOr"  #: with white at zero
MIN_ACCURACY_SPAN = 2.0  #: points of accuracy on an axis, so that a few samples don't look like a result
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
EXPONENT = re.compile(r"\b(\d+(?:\.\d+)?)e([+-]\d\d)\b")
DATASETS = re.compile(r"CIFAR-\d+|(?:Fashion-|F)?MNIST|IMDB|Tiny ImageNet\*?|AG News")


def format_axis_number(number: float) -> str:
    """Format a number of an axis or a legend.

    Examples
    --------
    >>> [format_axis_number(number) for number in (1e-5, 0.0003, 0.5, 10000)]
    ['10⁻⁵', '0.0003', '0.5', '10,000']
    """
    return typeset_exponents(f"{number:,g}")


def typeset_exponents(text: str) -> str:
    """Replace the exponents of numbers such as 1e-05 in a text by superscripts.

    Examples
    --------
    >>> typeset_exponents("ε = 1e-05"), typeset_exponents("2.5e+07")
    ('ε = 10⁻⁵', '2.5·10⁷')
    """

    def typeset_exponent(match: re.Match[str]) -> str:
        factor = "" if match[1] == "1" else f"{match[1]}·"
        return f"{factor}10{str(int(match[2])).translate(SUPERSCRIPTS)}"

    return EXPONENT.sub(typeset_exponent, text)


def make_svg_renderer(draw: Callable[_P, Figure]) -> Callable[_P, str]:
    """Decorate a function that draws a figure, so that it returns the text of an SVG."""

    @functools.wraps(draw)
    def render_svg(*args: _P.args, **kwargs: _P.kwargs) -> str:
        with style.use_matplotlib_style(PAGE):
            buffer = io.BytesIO()
            draw(*args, **kwargs).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue().decode().replace("'DejaVu Sans'", FONTS)

    return render_svg


def choose_panel_columns(count: int) -> int:
    """The number of columns for this number of panels, which are in one row if they fit."""
    return count if count <= 4 else 4 if count <= 8 else 5


def make_panel_figure(count: int, height: float, columns: int = 0) -> tuple[Figure, list[Axes]]:
    """A figure with this number of panels of this height in inches."""
    columns = columns or choose_panel_columns(count)
    rows = -(-count // columns)
    figure = Figure(figsize=(PAGE.width, min(rows * height + 0.3, MAX_HEIGHT)))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


@make_svg_renderer
def plot_line_panels(
    frame: pd.DataFrame,
    x_label: str,
    y_label: str,
    emphasis: Sequence[str] = (),
    has_tick_per_value: bool = False,
    is_log: bool = False,
    note: str = "",
) -> Figure:
    """Lines with bands of one standard deviation. Panels of one data set share the vertical axis.

    Parameters
    ----------
    frame
        ``panel``, ``line``, ``x``, ``mean``. Optional: ``std``, ``target`` (a mark at the right end), and ``measure``
        (panels of each, with its name at the vertical axis).
    x_label, y_label
        Labels of the axes. Without ``x_label``, a panel's name is its label.
    emphasis
        The lines that are colored in any case.
    has_tick_per_value
        A tick and a marker at each value of x.
    is_log
        The horizontal axis is logarithmic, with 0 at its left end.
    note
        A sentence below the panels.
    """
    frame = _fill_missing_columns(frame, panel="", measure=y_label, line="")
    frame = frame.assign(line=frame["line"].map(typeset_exponents))
    groups = _split_frame_by_panel(frame)
    styles, columns = _choose_line_styles(frame, emphasis), choose_panel_columns(len(groups))
    figure, axes = make_panel_figure(len(groups), 0.78 if len(groups) > 10 else 2.2, columns)
    for index, (ax, ((measure, panel), rows)) in enumerate(zip(axes, groups, strict=True)):
        ticks = sorted(rows["x"].astype(float).unique())
        zero = _compute_zero_position(ticks) if is_log else 0.0
        _plot_lines_and_bands(ax, rows, styles, zero, has_tick_per_value)
        if is_log:
            ax.set_xscale("log")
            ax.xaxis.set_minor_locator(NullLocator())
        labeled_ticks = ticks if is_log else _choose_axis_ticks(ticks, 0.0 if has_tick_per_value else 0.19, columns)
        ax.xaxis.set_major_locator(FixedLocator([tick or zero for tick in labeled_ticks]))
        ax.xaxis.set_ticklabels([format_axis_number(tick) for tick in labeled_ticks])
        has_title = bool(x_label) and frame["panel"].nunique() > 1
        ax.set_title(textwrap.fill(panel.replace(" = ", "\u00a0=\u00a0"), round(70 / columns)) if has_title else "")
        is_bottom, is_first = index + columns >= len(axes), not index or groups[index - 1][0][0] != measure
        ax.set_xlabel((x_label or panel) if is_bottom else "")
        ax.set_ylabel(measure if is_first else "")
        ax.tick_params(labelbottom=is_bottom or bool(not x_label))
    datasets = [(measure, next(iter(DATASETS.findall(panel)), "")) for (measure, panel), _ in groups]
    _share_vertical_axes(axes, datasets, columns)
    gray_entry, gray_note = _describe_gray_lines(styles)
    _add_legend(figure, styles, gray_entry)
    return style.add_notes(figure, [note, gray_note, _describe_equal_lines(frame)])


@make_svg_renderer
def plot_bar_panels(frame: pd.DataFrame, x_label: str, note: str = "") -> Figure:
    """Horizontal bars by ``category``, ``panel`` and, in several colors, ``line``, with ``mean`` and ``std``.

    A text replaces the bar of a row whose mean is not finite. A combination without a row has neither.
    """
    frame = _fill_missing_columns(frame, panel="", line="", category="")
    panels, lines, categories = (list(frame[name].unique()) for name in ("panel", "line", "category"))
    figure, axes = make_panel_figure(len(panels), 0.5 + 0.13 * len(categories) * max(1.6, len(lines)))
    height, size = 0.75 / len(lines), style.get_small_font_size()
    for ax, panel in zip(axes, panels, strict=True):
        for index, line in enumerate(lines):
            rows = frame[(frame["panel"] == panel) & (frame["line"] == line)].set_index("category").reindex(categories)
            y = np.arange(len(categories)) + (index - (len(lines) - 1) / 2) * height
            std = rows["std"].fillna(0) if "std" in rows else None
            color = style.COLORS[index % len(style.COLORS)]
            ax.barh(y, rows["mean"], height, xerr=std, color=color, label=line, error_kw={"elinewidth": 0.8})
            for position in y[rows["panel"].notna() & ~np.isfinite(rows["mean"])]:
                ax.annotate("not reached", (0, position), (3, 0), textcoords="offset points", va="center", size=size)
        ax.set_title(textwrap.fill(panel, 70 // len(panels)))
        ax.set(xlabel=x_label, yticks=range(len(categories)), yticklabels=categories, xlim=(0, None))
        ax.set_ylim(len(categories) - 0.5, -0.5)
        ax.grid(visible=False, axis="y")
    if len(lines) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    return style.add_notes(figure, [note])


@make_svg_renderer
def plot_heatmap_panels(
    frame: pd.DataFrame, x_label: str, y_label: str, z_label: str, gamma: float = 1.0, note: str = ""
) -> Figure:
    """Heat maps with one color scale. Zero is white.

    ``frame`` has ``panel``, ``row``, ``column`` and ``value``. With ``measure``, each is a row of panels with its
    own scale. With ``row_label``, a panel has its own instead of ``y_label``. ``gamma`` below 1 separates small values.
    """
    frame = _fill_missing_columns(frame, panel="", measure=z_label, row_label=y_label)
    measures = list(frame["measure"].unique())
    groups = sorted(_split_frame_by_panel(frame), key=lambda group: measures.index(group[0][0]))
    columns = -(-len(groups) // len(measures)) if len(measures) > 1 else choose_panel_columns(len(groups))
    figure, axes = make_panel_figure(len(groups), 1.75, columns)
    for measure in measures:
        measure_axes = [(ax, rows) for ax, ((name, _), rows) in zip(axes, groups, strict=True) if name == measure]
        values = frame[frame["measure"] == measure]["value"]
        reach = float(values.abs().max()) or 1.0
        scale = Normalize(-reach, reach) if values.min() < 0 else PowerNorm(gamma, 0, reach)
        for ax, rows in measure_axes:
            matrix = rows.pivot(index="row", columns="column", values="value")
            colors = DIVERGING_COLOR_MAP if values.min() < 0 else style.COLOR_MAP
            image = ax.imshow(matrix, cmap=colors, norm=scale, aspect="auto", interpolation="nearest")
            for axis, names in ((ax.xaxis, matrix.columns), (ax.yaxis, matrix.index)):
                gap = next(gap for gap in (1, 2, 5, 10, 20, 50, 100) if len(names) <= 6 * gap or gap == 100)
                axis.set_ticks(range(0, len(names), gap), [str(name) for name in names[::gap]])
        bar = figure.colorbar(image, ax=[ax for ax, _ in measure_axes], label=measure, aspect=30, pad=0.02)
        bar.outline.set_visible(False)
    row_labels = [rows["row_label"].iloc[0] for _, rows in groups]
    for index, (ax, ((_, panel), _)) in enumerate(zip(axes, groups, strict=True)):
        ax.grid(visible=False)
        ax.set_title(textwrap.fill(panel, round(66 / columns)), fontsize=style.get_small_font_size())
        ax.set_xlabel(x_label if index // columns == (len(axes) - 1) // columns else "")
        ax.set_ylabel(row_labels[index] if index % columns == 0 or row_labels[index - 1] != row_labels[index] else "")
    return style.add_notes(figure, [note])


@make_svg_renderer
def plot_point_panels(frame: pd.DataFrame, x_label: str, y_label: str, note: str = "") -> Figure:
    """Points at ``x`` and ``y`` in panels. Those that are ``contrary`` are red."""
    panels = list(frame["panel"].unique())
    figure, axes = make_panel_figure(len(panels), 2.0)
    for ax, panel in zip(axes, panels, strict=True):
        kinds = (False, style.COLORS[0], "as claimed"), (True, WARNING_COLOR, "against the claim")
        for contrary, color, label in kinds:
            rows = frame[(frame["panel"] == panel) & (frame["contrary"] == contrary)]
            ax.scatter(rows["x"], rows["y"], s=16, color=color, alpha=0.7, linewidths=0, label=label, clip_on=False)
        ax.set(title=panel, xlabel=x_label, xlim=(0, None))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].set_ylabel(y_label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return style.add_notes(figure, [note])


@make_svg_renderer
def plot_embedding_panels(frame: pd.DataFrame, note: str = "") -> Figure:
    """Features of samples as dots, and rows of the head as crosses, by class: ``x``, ``y``, ``class`` and ``kind``."""
    figure, (ax,) = make_panel_figure(1, 3.0)
    for index, (label, rows) in enumerate(frame.groupby("class")):
        dots, crosses = (rows[rows["kind"] == kind] for kind in ("feature", "row"))
        color = style.COLORS[index % len(style.COLORS)]
        ax.scatter(dots["x"], dots["y"], s=9, color=color, alpha=0.55, linewidths=0)
        ax.scatter(crosses["x"], crosses["y"], s=60, marker="X", color=color, edgecolors="white", linewidths=0.9)
        for x, y in zip(crosses["x"], crosses["y"], strict=True):
            ax.annotate(str(label), (x, y), (5, 4), textcoords="offset points", weight="bold")
    ax.set(xlabel="t-SNE 1", ylabel="t-SNE 2", xticks=[], yticks=[])
    ax.spines[:].set_visible(True)
    ax.grid(visible=False)
    handles = [Line2D([], [], color=DARK_GRAY, linestyle="", marker=marker) for marker in ("o", "X")]
    texts = ["feature of a sample", "row of the head, with its class"]
    figure.legend(handles, texts, loc="outside upper left", ncols=2)
    return style.add_notes(figure, [note])


@make_svg_renderer
def plot_surface_panels(frame: pd.DataFrame, z_label: str, note: str = "") -> Figure:
    """Contours of ``value`` over ``x`` and ``y``, which are 0 at the model. Panels share their levels."""
    frame = _fill_missing_columns(frame, panel="")
    panels = list(frame["panel"].unique())
    finite = frame["value"][np.isfinite(frame["value"])]
    low, high = (finite.min(), np.quantile(finite, 0.95)) if len(finite) else (0.0, 1.0)  # corners are far above
    levels = MaxNLocator(12).tick_values(low, high if high > low else low + 1)
    figure, axes = make_panel_figure(len(panels), 0.75 * PAGE.width / max(len(panels), 2), max(len(panels), 2))
    for ax, panel in zip(axes, panels, strict=True):
        grid = frame[frame["panel"] == panel].pivot(index="y", columns="x", values="value")
        contours = ax.contourf(grid.columns, grid.index, grid, levels=levels, cmap=style.COLOR_MAP, extend="max")
        ax.contour(grid.columns, grid.index, grid, levels=levels, colors="#444444", linewidths=0.4)
        ax.plot(0, 0, marker="P", color=style.COLORS[1], markersize=7, markeredgecolor="white")
        ax.set(title=panel, xlabel="direction 1", xticks=[-1, -0.5, 0, 0.5], yticks=[-1, -0.5, 0, 0.5, 1])
        ax.grid(visible=False)
    axes[0].set_ylabel("direction 2")
    figure.colorbar(contours, ax=axes, label=z_label, pad=0.02, ticks=levels[::2])
    return style.add_notes(figure, [note])


def _split_frame_by_panel(frame: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    groups = frame.groupby(["measure", "panel"], sort=False)
    return [((str(measure), str(panel)), rows) for (measure, panel), rows in groups]


def _choose_line_styles(frame: pd.DataFrame, emphasis: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choose the style of each line. Lines of ``emphasis`` and then the highest last values have colors.

    A line of ``emphasis`` has the same color in all figures. So has each other line next to it, if figures have the
    same lines.
    """
    lines = [str(line) for line in frame["line"].unique()]
    first = list(emphasis) if any(line in lines for line in emphasis) else []
    others = [line for line in lines if line not in first]
    if first:  # methods, and not values of a parameter
        others.sort(key=str.casefold)
    room = MAX_COLORS - sum(line in lines for line in first)
    if len(others) > room:
        highest = frame[frame["line"].isin(others)].groupby("line")["mean"].last().nlargest(room)
        others = [line for line in others if line in highest.index]
    colored = enumerate([*first, *others])
    styles = {line: style.get_line_style(index) | {"zorder": 4 - index / 10} for index, line in colored}
    return {line: styles.get(line, {"color": GRAY, "linewidth": 0.8, "zorder": 1.5}) for line in lines}


def _plot_lines_and_bands(
    ax: Axes, rows: pd.DataFrame, styles: dict[str, dict[str, Any]], zero: float, has_marker_per_value: bool
) -> None:
    """The lines of a panel, with their bands and targets. ``zero`` is the position of 0 on the horizontal axis."""
    for line, line_rows in rows.groupby("line", sort=False):
        x = line_rows["x"].astype(float).replace(0.0, zero)
        gap = 1 if has_marker_per_value else max(1, len(x) // 5)
        ax.plot(x, line_rows["mean"], label=line, markevery=gap, **styles[str(line)])
        color = styles[str(line)]["color"]
        if "std" in line_rows:
            std = line_rows["std"].fillna(0)
            ax.fill_between(x, line_rows["mean"] - std, line_rows["mean"] + std, color=color, alpha=0.12, lw=0)
        if "target" in line_rows and color != GRAY:
            ax.plot(x.iloc[-1:], line_rows["target"].iloc[-1:], marker="<", color=color, clip_on=False, zorder=5)


def _compute_zero_position(ticks: Sequence[float]) -> float:
    """The position of 0 on a logarithmic axis: one step below the lowest positive value."""
    values = [tick for tick in ticks if tick > 0]
    return values[0] / (values[1] / values[0] if len(values) > 1 else 10.0) if values else 1.0


def _choose_axis_ticks(values: Sequence[float], min_gap: float, columns: int) -> list[float]:
    """Choose values from the last one down, so that labels fit and gaps are at least this fraction of the span."""
    character_width = columns / PAGE.characters_per_line
    chosen_values = [values[-1]]
    for value in values[-2::-1]:
        text = format_axis_number(chosen_values[-1]) + format_axis_number(value)
        gap = max(min_gap, character_width * (len(text) + 1) / 2)
        if chosen_values[-1] - value >= gap * (values[-1] - values[0]):
            chosen_values.append(value)
    return chosen_values[::-1]


def _share_vertical_axes(axes: Sequence[Axes], keys: Sequence[tuple[str, str]], columns: int) -> None:
    """Give panels with the same measure and data set the same limits. Number only the first axis of a row."""
    for key in dict.fromkeys(keys):
        group_axes = [ax for ax, ax_key in zip(axes, keys, strict=True) if ax_key == key]
        low, high = min(ax.get_ylim()[0] for ax in group_axes), max(ax.get_ylim()[1] for ax in group_axes)
        lack = max(0.0, MIN_ACCURACY_SPAN - (high - low)) / 2 if key[0].endswith("(%)") else 0.0
        for ax in group_axes:
            ax.set_ylim(low - lack, high + lack)
    for index, ax in enumerate(axes):
        ax.tick_params(labelleft=index % columns == 0 or keys[index] != keys[index - 1])


def _describe_gray_lines(styles: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The legend's entry for the gray lines, and a note with their names if the entry contains only their number."""
    names = [line for line, line_style in styles.items() if line_style["color"] == GRAY]
    if len(names) < 3:
        return ", ".join(names), ""
    return f"{len(names)} others", f"Gray: {', '.join(names)}." if len(names) <= MAX_GRAY_NAMES else ""


def _add_legend(figure: Figure, styles: dict[str, dict[str, Any]], gray_entry: str) -> None:
    """One legend for all panels. Gray lines share an entry."""
    handles = style.get_legend_handles(figure)
    colored = [line for line in styles if line in handles and styles[line]["color"] != GRAY]
    entries = {line: handles[line] for line in sorted(colored, key=lambda line: -styles[line]["zorder"])}
    if gray_entry:
        entries[gray_entry] = Line2D([], [], color=GRAY)
    if len(entries) > 1:
        style.add_legend(figure, PAGE, [*entries.items()])


def _describe_equal_lines(frame: pd.DataFrame) -> str:
    """A sentence for lines that hide each other, because all their values are equal."""
    values = {str(line): tuple(rows["mean"]) for line, rows in frame.groupby("line", sort=False)}
    groups = [[line for line in values if values[line] == value] for value in dict.fromkeys(values.values())]
    if len(values) > 1 and len(groups) == 1:
        return "All lines have equal values."
    pairs = [(", ".join(lines[:-1]), lines[-1]) for lines in groups if len(lines) > 1]
    return " ".join(f"{first} and {last} have equal values." for first, last in pairs)


def _fill_missing_columns(frame: pd.DataFrame, **defaults: str) -> pd.DataFrame:
    """The frame with these columns as text. Missing ones have one value."""
    return frame.assign(**{name: frame[name].astype(str) if name in frame else defaults[name] for name in defaults})
