"""SL and CR matrices of two global models, side by side: what FedDW draws its knowledge from."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fedpipe.planned import Plan
from fedpipe.report import results
from fedpipe.report.figures import style
from fedpipe.report.matrices import Chosen, Floats, chosen

LABELS = {  #: what a matrix holds, its rows and its columns
    "SL": ("mean soft label of each class", "true class", "predicted class"),
    "CR": ("relations of the classes in the head", "class", "class"),
}
TITLE = 36  #: letters in a line of a panel's title
NUMBERS = 10  #: classes up to which each cell shows its number


def draw(plan: Plan, stem: Path) -> None:
    """Draw the matrices of FedAvg and FedDW, or of the first algorithms that have a global model.

    Those of the first seed and grid point, in the last round, measured on the global test set for both.
    """
    found = chosen(plan)
    rounds = " and ".join(dict.fromkeys(str(one.cell.rounds) for one in found.values()))
    title = f"Global models after round {rounds}, seed {plan.seeds[0]}"
    lines = [results.line(plan.title(one.cell.algorithm), results.point(plan, one.cell)) for one in found.values()]
    shown = dataclasses.replace(plan, cells=tuple(one.cell for one in found.values()))
    style.save(figure(dict(zip(lines, found.values(), strict=True)), title, results.own_settings(shown)), stem)


@style.figure
def figure(found: dict[str, Chosen], title: str, sentences: Sequence[str] = ()) -> Figure:
    """The figure of SL and CR matrices by algorithm, with sentences below it; one that says so where there are none."""
    if not found:
        made = Figure(figsize=(style.WIDTH, 1.0))
        made.text(0.5, 0.5, "No algorithm of this study has a global model, so there are no matrices.", ha="center")
        return made
    made = Figure(figsize=(style.WIDTH, 3.25 * len(found) + 0.35))
    axes = made.subplots(len(found), len(LABELS), squeeze=False)
    made.suptitle(title, x=0.01, ha="left")
    for column, (name, (holds, rows, columns)) in enumerate(LABELS.items()):
        top = max(one.matrices[name].max() for one in found.values())  # one scale, so that algorithms compare
        for row, (algorithm, one) in enumerate(found.items()):
            image = _cells(axes[row, column], one.matrices[name], one.classes, top)
            axes[row, column].set(title=textwrap.fill(f"{algorithm}, {name}", TITLE), xlabel=columns, ylabel=rows)
        bar = made.colorbar(image, ax=list(axes[:, column]), orientation="horizontal", aspect=28, shrink=0.75, pad=0.02)
        bar.set_label(f"{name}: {holds}")
        bar.outline.set_visible(False)
    return style.note(made, sentences)


def _cells(ax: Axes, matrix: Floats, classes: Sequence[str], top: float) -> AxesImage:
    image = ax.imshow(matrix, cmap=style.MAP, vmin=0, vmax=top, interpolation="nearest")
    ax.grid(visible=False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True))
        style.label_classes(axis, classes, 24)
    if len(matrix) <= NUMBERS:
        for (row, column), value in np.ndenumerate(matrix):
            told = f"{value:.2f}".removeprefix("0")
            ax.text(column, row, told, ha="center", va="center", fontsize=6, color=style.ink(value / top))
    return image
