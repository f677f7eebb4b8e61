"""SL and CR matrices of two global models side by side (FedDW's knowledge)."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.report.figures import style
from fedpipe.report.matrices import ModelMatrices, read_figure_matrices
from fedpipe.report.results import FloatArray

MATRIX_LABELS = {  #: content, rows and columns of each matrix
    "SL": ("SL: mean soft label", "true class", "predicted class"),
    "CR": ("CR: relation of classes", "class", "class"),
}
MIN_NAMED_SIZE = 13  #: minimum size of a matrix with the names of classes, in em


def write_matrices_figure(data: StudyData) -> None:
    """Draw the matrices of FedAvg and FedDW, or of the first algorithms with a global model.

    They are of the first seed and grid point in the last round, on the global test set.
    """
    plan, selected_matrices = data.plan, read_figure_matrices(data)
    cells = tuple(model_matrices.cell for model_matrices in selected_matrices.values())
    rounds = " and ".join(dict.fromkeys(str(cell.rounds) for cell in cells))
    names = [
        results.describe_configuration(plan.get_method_title(cell.algorithm), results.format_grid_point(plan, cell))
        for cell in cells
    ]
    sentences = [
        f"Global models after round {rounds}, seed {plan.seeds[0]}.",
        *plan.held_out_notes,
        *plan.drift_notes,
        *results.describe_method_overrides(dataclasses.replace(plan, cells=cells)),
    ]
    page = style.PAGES[plan.report.figure_width]
    figure = build_matrices_figure(dict(zip(names, selected_matrices.values(), strict=True)), sentences, page)
    style.save_figure(figure, plan.study_files.figures_folder / "matrices", page)


def build_matrices_figure(
    selected_matrices: dict[str, ModelMatrices], sentences: Sequence[str], page: style.Page
) -> Figure:
    """Build the figure of SL and CR matrices by algorithm, with notes. A note if there are none."""
    with style.use_matplotlib_style(page):
        if not selected_matrices:
            figure = Figure(figsize=(page.width, 5 * page.em_in_inches))
            return style.add_notes(figure, ["No algorithm of this study has a global model, so there are no matrices."])
        count, page_width = len(selected_matrices), page.width / page.em_in_inches
        has_one_row = count == 1 or page.max_height < 0.75 * page.width
        rows, columns = (1, 2 * count) if has_one_row else (2, count)
        size = (page_width - 6 - 16 / rows) / columns  # without the labels and color bars
        has_names = size >= MIN_NAMED_SIZE
        height = rows * (size + (9 if has_names else 6)) + 2
        figure = Figure(figsize=(page.width, min(height * page.em_in_inches, page.max_height)))
        axes = figure.subplots(rows, columns, squeeze=False).reshape(2, count)
        for matrix_axes, name in zip(axes, MATRIX_LABELS, strict=True):
            matrices = {algorithm: each.matrices[name] for algorithm, each in selected_matrices.items()}
            image = _plot_matrices(list(matrix_axes), name, matrices, int(1.7 * size))
            color_bar = figure.colorbar(image, ax=list(matrix_axes), aspect=30, pad=0.02)
            color_bar.set_label(MATRIX_LABELS[name][0])
            color_bar.outline.set_visible(False)
        for ax, each in zip(axes.flat, [*selected_matrices.values()] * 2, strict=True):
            _label_classes(ax, each.class_names if has_names else (), size)
        for ax in axes[:, 1:].flat:
            ax.tick_params(labelleft=False)
        return style.add_notes(figure, sentences)


def _label_classes(ax: Axes, class_names: Sequence[str], size: float) -> None:
    """Label rows and columns of a matrix of this size in em with some numbers of classes, or with names."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(min(10, int(size / 2.2)), integer=True))
        if class_names:
            style.label_axis_with_names(axis, class_names, int(1.7 * size))


def _plot_matrices(axes: Sequence[Axes], name: str, matrices: dict[str, FloatArray], title_width: int) -> AxesImage:
    """Draw a matrix of each algorithm with one scale, and return the last image."""
    _, rows, columns = MATRIX_LABELS[name]
    max_value = max(matrix.max() for matrix in matrices.values())
    for ax, (algorithm, matrix) in zip(axes, matrices.items(), strict=True):
        image = ax.imshow(matrix, cmap=style.COLOR_MAP, vmin=0, vmax=max_value, interpolation="nearest", aspect="auto")
        ax.set(title=textwrap.fill(f"{algorithm}, {name}", title_width), xlabel=columns)
        ax.grid(visible=False)
    axes[0].set_ylabel(rows)
    return image
