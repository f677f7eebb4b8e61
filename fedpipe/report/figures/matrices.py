"""SL and CR matrices of two global models side by side (FedDW's knowledge)."""

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

from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.report.figures import style
from fedpipe.report.matrices import Floats, ModelMatrices, select_model_matrices

MATRIX_LABELS = {  #: content, rows and columns of each matrix
    "SL": ("mean soft label of each class", "true class", "predicted class"),
    "CR": ("relations of the classes in the head", "class", "class"),
}
TITLE_WIDTH = 36  #: characters per line of a panel's title
MAX_NUMBERED_CLASSES = 10  #: maximum number of classes with numbers in cells


def draw_matrices(data: StudyData, stem: Path) -> None:
    """Draw the matrices of FedAvg and FedDW, or of the first algorithms with a global model.

    They are of the first seed and grid point in the last round, on the global test set.
    """
    plan, selected_matrices = data.plan, select_model_matrices(data)
    rounds = " and ".join(
        dict.fromkeys(str(model_matrices.cell.rounds) for model_matrices in selected_matrices.values())
    )
    title = f"Global models after round {rounds}, seed {plan.seeds[0]}"
    lines = [
        results.describe_configuration(
            plan.title(model_matrices.cell.algorithm), results.format_point(plan, model_matrices.cell)
        )
        for model_matrices in selected_matrices.values()
    ]
    reduced_plan = dataclasses.replace(
        plan, cells=tuple(model_matrices.cell for model_matrices in selected_matrices.values())
    )
    style.save_figure(
        build_matrices_figure(
            dict(zip(lines, selected_matrices.values(), strict=True)), title, results.describe_overrides(reduced_plan)
        ),
        stem,
    )


@style.apply_style
def build_matrices_figure(
    selected_matrices: dict[str, ModelMatrices], title: str, sentences: Sequence[str] = ()
) -> Figure:
    """Build the figure of SL and CR matrices by algorithm, with notes. A note if there are none."""
    if not selected_matrices:
        matrices_figure = Figure(figsize=(style.PAGE_WIDTH, 1.0))
        matrices_figure.text(
            0.5, 0.5, "No algorithm of this study has a global model, so there are no matrices.", ha="center"
        )
        return matrices_figure
    matrices_figure = Figure(figsize=(style.PAGE_WIDTH, 3.25 * len(selected_matrices) + 0.35))
    axes = matrices_figure.subplots(len(selected_matrices), len(MATRIX_LABELS), squeeze=False)
    matrices_figure.suptitle(title, x=0.01, ha="left")
    for column, (name, (description, rows, columns)) in enumerate(MATRIX_LABELS.items()):
        max_value = max(
            model_matrices.matrices[name].max() for model_matrices in selected_matrices.values()
        )  # one scale for all algorithms
        for row, (algorithm, model_matrices) in enumerate(selected_matrices.items()):
            image = _draw_matrix(
                axes[row, column], model_matrices.matrices[name], model_matrices.class_names, max_value
            )
            axes[row, column].set(title=textwrap.fill(f"{algorithm}, {name}", TITLE_WIDTH), xlabel=columns, ylabel=rows)
        color_bar = matrices_figure.colorbar(
            image, ax=list(axes[:, column]), orientation="horizontal", aspect=28, shrink=0.75, pad=0.02
        )
        color_bar.set_label(f"{name}: {description}")
        color_bar.outline.set_visible(False)
    return style.add_notes(matrices_figure, sentences)


def _draw_matrix(ax: Axes, matrix: Floats, classes: Sequence[str], max_value: float) -> AxesImage:
    image = ax.imshow(matrix, cmap=style.COLOR_MAP, vmin=0, vmax=max_value, interpolation="nearest")
    ax.grid(visible=False)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True))
        style.label_classes(axis, classes, 24)
    if len(matrix) <= MAX_NUMBERED_CLASSES:
        for (row, column), value in np.ndenumerate(matrix):
            value_text = f"{value:.2f}".removeprefix("0")
            ax.text(
                column,
                row,
                value_text,
                ha="center",
                va="center",
                fontsize=6,
                in_layout=False,  # it is inside its cell
                color=style.get_text_color(value / max_value),
            )
    return image
