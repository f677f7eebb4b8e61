"""Numbers of DVC's plots, which compare commits and experiments: one tidy CSV per plot.

The templates of the plots are in ``.dvc/plots``. A column ``line`` has the algorithm and grid point, because a template
can't contain a study's grid. It uses the method's label instead of its title, so that commits are comparable.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedpipe.planning.partition_names import replace_html_tag_brackets
from fedpipe.report import matrices, results, statistics, table_notes, table_parts, tables
from fedpipe.report.data import StudyData


def encode_plot_csv(frame: pd.DataFrame) -> bytes:
    """Encode a frame as CSV for DVC, which copies its text into a script."""
    return tables.encode_table_csv(
        frame, lambda text: tables.escape_spreadsheet_formula(replace_html_tag_brackets(text))
    )


def build_learning_curves(data: StudyData) -> pd.DataFrame:
    """Build the learning curves: ``line`` before the columns of :meth:`StudyData.build_metric_curves`."""
    frame = data.build_metric_curves()
    frame.insert(0, "line", _describe_configurations(data, frame))
    return frame


def build_client_accuracies(data: StudyData) -> pd.DataFrame:
    """Build the accuracies of every client in the last evaluated round.

    The columns are ``line``, ``seed``, ``protocol``, ``client``, ``samples`` (test samples), ``accuracy`` in percent
    and ``client_name`` (its value in the partition's column, or its number). Clients without test samples and models of
    the server are omitted.
    """
    frame = data.metrics
    frame = frame[(frame["client"] >= 0) & (frame["total"] > 0)]
    frame = results.select_last_rounds(frame, [*statistics.get_run_key_columns(data.plan), "protocol"])
    frame = frame.assign(
        line=_describe_configurations(data, frame),
        samples=frame["total"],
        accuracy=100 * frame["correct"] / frame["total"],
        client_name=data.name_clients(frame),
    )
    frame = frame[["line", "seed", "protocol", "client", "samples", "accuracy", "client_name"]]
    return frame.sort_values(["line", "seed", "protocol", "client"], kind="stable")


def build_matrix_entries(data: StudyData) -> pd.DataFrame:
    """Build the SL and CR matrices of the figure: ``line``, ``matrix`` (SL or CR), ``row``, ``column``, ``value``."""
    rows = [
        {"line": name, "matrix": kind, "row": row, "column": column, "value": round(float(value), 6)}
        for name, model_matrices in matrices.read_figure_matrices(data).items()
        for kind, matrix in model_matrices.matrices.items()
        for row, values in enumerate(matrix)
        for column, value in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=["line", "matrix", "row", "column", "value"])


def build_partition_counts(data: StudyData) -> pd.DataFrame:
    """Build the training samples of each client and class, without empty cells.

    The columns are ``partition`` (data set, scheme and seed), ``client``, ``class`` and ``samples``.
    """
    rows, descriptions = [], table_notes.describe_partitions(data.plan)
    for key, settings in table_parts.get_partition_settings_by_key(data.plan).items():
        name = table_notes.append_partition_seed(settings, descriptions[key])
        assignment = data.assignments[key]
        for (client, label), samples in np.ndenumerate(assignment.class_counts):
            if samples:
                labels = {"partition": name, "client": assignment.names[client], "class": label}
                rows.append(labels | {"samples": int(samples)})
    return pd.DataFrame(rows)


def _describe_configurations(data: StudyData, frame: pd.DataFrame) -> list[str]:
    return [
        results.describe_configuration(algorithm, dict(zip(data.plan.grid, map(str, point), strict=True)))
        for algorithm, *point in frame[data.plan.row_key_columns].to_numpy()
    ]
