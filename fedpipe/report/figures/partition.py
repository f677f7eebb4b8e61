"""Heat map of training samples by client and class."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fedpipe.core.storage import files, layout
from fedpipe.data import class_names, heterogeneity
from fedpipe.data.assignment import Assignment
from fedpipe.data.partitions.base import Integers
from fedpipe.report.figures import style


def draw_partition(key: str, settings: dict[str, Any], stem: Path) -> None:
    """Draw the partition with this key and these settings."""
    path = layout.assignment_file(key)
    counts = Assignment.read(path, files.read_recorded_sha256(path)).class_counts
    style.save_figure(build_partition_figure(counts, settings), stem)


@style.apply_style
def build_partition_figure(counts: Integers, settings: dict[str, Any]) -> Figure:
    """Build the figure of counts (N, C): a heat map, the clients' sizes, and the heterogeneity.

    ``settings`` are those of the plan.
    """
    clients = len(counts)
    height = 1.3 + min(max(0.24 * clients, 1.2), 7.5)
    partition_figure = Figure(figsize=(style.PAGE_WIDTH, height))
    cells, bars = partition_figure.subplots(1, 2, sharey=True, width_ratios=[3.2, 1])
    image = _draw_counts(cells, counts)
    style.label_classes(cells.xaxis, class_names.get_class_names(settings["dataset"], counts.shape[1]), 50)
    bars.barh(range(clients), counts.sum(axis=1), color=style.COLORS[0], height=0.75)
    bars.set_xlabel("training samples")
    bars.grid(visible=False, axis="y")
    bars.tick_params(left=False)
    bars.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if not _has_room_for_numbers(counts):
        partition_figure.colorbar(image, ax=[cells, bars], label="training samples of a class", shrink=0.6)
    partition_figure.suptitle(_format_title(settings), x=0.01, ha="left")
    partition_figure.supxlabel(
        str(heterogeneity.HeterogeneitySummary.from_counts(counts)), x=0.01, ha="left", fontsize=8.5
    )
    return partition_figure


def _draw_counts(ax: Axes, counts: Integers) -> AxesImage:
    shade = PowerNorm(0.5, vmin=0, vmax=counts.max())  # few samples are visible next to many, and zero is white
    image = ax.imshow(
        np.ma.masked_equal(counts, 0), cmap=style.COLOR_MAP, norm=shade, aspect="auto", interpolation="nearest"
    )
    ax.set_xlabel("class")
    ax.set_ylabel("client")
    ax.grid(visible=False)
    for axis, size in ((ax.xaxis, counts.shape[1]), (ax.yaxis, counts.shape[0])):
        axis.set_major_locator(MaxNLocator(20 if size <= 100 else 10, integer=True))
    for (client, label), count in np.ndenumerate(counts):
        if count and _has_room_for_numbers(counts):
            color = style.get_text_color(np.sqrt(count / counts.max()))
            ax.text(label, client, str(count), ha="center", va="center", fontsize=7.5, color=color)
    return image


def _has_room_for_numbers(counts: Integers) -> bool:
    """Whether the numbers fit into their cells."""
    clients, classes = counts.shape
    return counts.size <= 300 and clients <= 50 and classes * len(str(counts.max())) <= 60


def _format_title(settings: dict[str, Any]) -> str:
    dataset, partition = settings["dataset"], settings["partition"]
    samples = f" ({dataset['subset']} samples)" if "subset" in dataset else ""
    parameter_texts = [
        f"{name} = {value}" for name, value in partition.items() if name not in {"scheme", "code", "sha256"}
    ]
    parameter_texts += [f"{partition['sha256'][:12]}…"] if "sha256" in partition else []
    parameter_texts += [f"seed {settings['seed']}"] if "seed" in settings else ["split from the file"]
    title = ", ".join([f"{dataset['name']}{samples}: {partition['scheme']}", *parameter_texts])
    return textwrap.fill(title, 90)
