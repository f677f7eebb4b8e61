"""Heat map of training samples by client and class."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.storage import files, layout
from fedpipe.data import heterogeneity
from fedpipe.data.assignment import Assignment
from fedpipe.data.class_names import read_class_names_or_numbers
from fedpipe.data.partitions.base import Integers
from fedpipe.planning.plan import Plan
from fedpipe.report.figures import style

CELLS_FRACTION = 0.66  #: fraction of the figure's width that the heat map's cells have, next to labels and sizes
OUTER_HEIGHT = 9.0  #: height of the texts around the cells in em
HELD_OUT_COLOR = "#999999"  #: gray for sizes of held-out clients
MIN_ROW_HEIGHT = 1.25  #: height of a row with numbers in em


def write_partition_figure(plan: Plan, key: str) -> None:
    """Draw how many training samples of each class each client has. Clients that are held out are marked."""
    if key not in plan.partitions:
        raise SettingsError(f"'{key}' is not a partition of {plan.params}. {suggest_name(key, list(plan.partitions))}")
    path, dataset = layout.get_assignment_path(key), next(run.dataset for run in plan.runs if run.partition == key)
    assignment = Assignment.read(path, files.read_recorded_sha256(path))
    page, counts = style.PAGES[plan.report.figure_width], assignment.class_counts
    figure = build_partition_figure(
        counts,
        plan.get_partition_settings_to_describe(key),
        page,
        client_names=assignment.names,
        class_names=read_class_names_or_numbers(dataset, counts.shape[1]),
        held_out=plan.held_out.get(key, ()),
        notes=plan.drift_notes,
    )
    style.save_figure(figure, plan.study_files.get_partition_figure_path(plan.partition_names[key]), page)


def build_partition_figure(
    counts: Integers,
    settings: dict[str, Any],
    page: style.Page,
    client_names: Sequence[str] = (),
    held_out: Sequence[int] = (),
    class_names: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Figure:
    """Build the figure of counts (N, C): a heat map, the clients' sizes, and the heterogeneity.

    ``settings`` are those of the plan. If there are few clients or classes, they have their names. Sizes of the clients
    ``held_out`` are gray. ``notes`` are further sentences below the figure.
    """
    clients = len(counts)
    name_length = min(style.MAX_NAME_LENGTH, max(map(len, class_names), default=1))
    outer_height = OUTER_HEIGHT + 0.55 * name_length  # names of classes may be rotated
    max_row_height = (page.max_height / page.em_in_inches - outer_height) / clients
    cells_width = page.characters_per_line * CELLS_FRACTION
    has_numbers = max_row_height >= MIN_ROW_HEIGHT and counts.shape[1] * (len(str(counts.max())) + 1) <= cells_width
    row_height = min(max_row_height, 1.7 if has_numbers else max(0.5, 20 / clients))
    height = min(max(row_height * clients, 10) + outer_height, page.max_height / page.em_in_inches)
    max_ticks = int(cells_width / 4), int((height - outer_height) / MIN_ROW_HEIGHT)
    with style.use_matplotlib_style(page):
        figure = Figure(figsize=(page.width, height * page.em_in_inches))
        cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
        image = plot_count_heatmap(cells, counts, max_ticks, has_numbers)
        style.label_axis_with_names(cells.xaxis, class_names, int(cells_width))
        style.label_axis_with_names(cells.yaxis, client_names, page.characters_per_line, max_names=max_ticks[1])
        colors = [HELD_OUT_COLOR if client in held_out else style.COLORS[0] for client in range(clients)]
        bar_height = 0.75 if row_height >= 1 else 1  # narrow bars have no gaps, and stay visible without snapping
        bars.barh(range(clients), counts.sum(axis=1), color=colors, height=bar_height, snap=False)
        bars.set_xlabel("samples")
        bars.grid(visible=False, axis="y")
        bars.tick_params(left=False)
        bars.xaxis.set_major_locator(MaxNLocator(2, integer=True))
        if not has_numbers:
            figure.colorbar(image, ax=[cells, bars], label="samples of a class", aspect=30, pad=0.02)
        figure.suptitle(textwrap.fill(_format_title(settings), page.characters_per_line), x=0.01, ha="left")
        summary = _join_heterogeneity_measures(str(heterogeneity.HeterogeneitySummary.from_counts(counts)))
        note = "Clients with a gray bar are held out, so they never train." if held_out else ""
        return style.add_notes(figure, [f"Training samples of each client. {note}".rstrip(), *notes, summary])


def plot_count_heatmap(ax: Axes, counts: Integers, max_ticks: tuple[int, int], has_numbers: bool = False) -> AxesImage:
    """Draw counts (N, C) as a heat map with at most so many ticks at the horizontal and vertical axis."""
    shade = PowerNorm(0.5, vmin=0, vmax=float(counts.max()))  # few samples are visible next to many, and zero is white
    image = ax.imshow(
        np.ma.masked_equal(counts, 0), cmap=style.COLOR_MAP, norm=shade, aspect="auto", interpolation="nearest"
    )
    ax.set_xlabel("class")
    ax.set_ylabel("client")
    ax.grid(visible=False)
    for axis, limit in zip((ax.xaxis, ax.yaxis), max_ticks, strict=True):
        axis.set_major_locator(MaxNLocator(min(20, max(1, limit)), integer=True))
    for (client, label), count in np.ndenumerate(counts):
        if count and has_numbers:
            color = "white" if np.sqrt(count / counts.max()) > 0.55 else "#222222"  # the shade is the root
            ax.text(
                label, client, str(count), ha="center", va="center", fontsize=style.get_small_font_size(), color=color
            )
    return image


def _join_heterogeneity_measures(line: str) -> str:
    """Join the measures of heterogeneity, so that a line break is only between two of them."""
    measures = [measure.strip().replace(" ", "\u00a0") for measure in line.split("·")]
    return f"{measures[0][:1].upper()}{', '.join(measures)[1:]}."


def _format_title(settings: dict[str, Any]) -> str:
    dataset, partition = settings["dataset"], settings["partition"]
    samples = f" ({dataset['subset']} samples)" if "subset" in dataset else ""
    parameter_texts = [
        f"{name} = {value}" for name, value in partition.items() if name not in {"scheme", "code", "sha256"}
    ]
    parameter_texts += [f"{partition['sha256'][:12]}…"] if "sha256" in partition else []
    parameter_texts += [f"seed {settings['seed']}"] if "seed" in settings else ["split from the file"]
    return ", ".join([f"{dataset['name']}{samples}: {partition['scheme']}", *parameter_texts])
