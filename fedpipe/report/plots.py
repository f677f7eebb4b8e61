"""Numbers of the plots that DVC draws and compares across commits and experiments: one tidy CSV a plot.

Templates of the plots lie in ``.dvc/plots``. A column ``line`` names algorithm and grid point, since no template knows
a study's grid. It has the method's label, which stays the same from commit to commit, and not its title.
"""

from __future__ import annotations

import pandas as pd

from fedpipe.core.storage import files, layout
from fedpipe.data.assignment import Assignment
from fedpipe.planning.plan import Plan, widen_tags
from fedpipe.report import curves, matrices, results, statistics, table_notes, table_parts, tables
from fedpipe.report.data import StudyData


def csv(frame: pd.DataFrame) -> bytes:
    """A frame as CSV for DVC, which writes its text into a script of a page as it is."""
    return tables.encode_csv(frame, lambda text: tables.plain(widen_tags(text)))


def build_learning_curves(data: StudyData) -> pd.DataFrame:
    """Learning curves.

    Returns
    -------
    pandas.DataFrame
        ``line`` before the columns of :func:`fedpipe.report.curves.build_curves`.
    """
    frame = curves.build_curves(data)
    frame.insert(0, "line", _describe_lines(data, frame))
    return frame


def build_client_accuracies(data: StudyData) -> pd.DataFrame:
    """Accuracy of every client in the last round measured.

    Returns
    -------
    pandas.DataFrame
        ``line``, ``seed``, ``protocol``, ``client``, ``samples`` (test samples) and ``accuracy`` in percent; clients
        without test samples, and models that are no client's, are left out.
    """
    frame = data.metrics
    frame = frame[(frame["client"] >= 0) & (frame["total"] > 0)]
    frame = results.select_last_rounds(frame, [*statistics.get_run_columns(data.plan), "protocol"])
    frame = frame.assign(
        line=_describe_lines(data, frame), samples=frame["total"], accuracy=100 * frame["correct"] / frame["total"]
    )
    frame = frame[["line", "seed", "protocol", "client", "samples", "accuracy"]]
    return frame.sort_values(["line", "seed", "protocol", "client"], kind="stable")


def build_matrix_cells(data: StudyData) -> pd.DataFrame:
    """SL and CR matrices of the global models that the figure shows.

    Returns
    -------
    pandas.DataFrame
        ``line``, ``matrix`` (SL or CR), ``row``, ``column``, ``value``.
    """
    rows = [
        {"line": name, "matrix": kind, "row": row, "column": column, "value": round(float(value), 6)}
        for name, model_matrices in matrices.select_model_matrices(data).items()
        for kind, matrix in model_matrices.matrices.items()
        for row, values in enumerate(matrix)
        for column, value in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=["line", "matrix", "row", "column", "value"])


def build_partition_counts(plan: Plan) -> pd.DataFrame:
    """Training samples of each client and class.

    Returns
    -------
    pandas.DataFrame
        ``partition`` (data set, scheme and seed), ``client``, ``class``, ``samples``; without the cells that are empty.
    """
    rows, descriptions = [], table_notes.describe_partitions(plan)
    for key, settings in table_parts.get_partitions(plan).items():
        name = table_notes.describe_partition_with_seed(settings, descriptions[key])
        path = layout.assignment_file(key)
        counts = Assignment.read(path, files.read_recorded_sha256(path)).class_counts
        for client, classes in enumerate(counts):
            for label, samples in enumerate(classes):
                if samples:
                    rows.append({"partition": name, "client": client, "class": label, "samples": int(samples)})
    return pd.DataFrame(rows)


def _describe_lines(data: StudyData, frame: pd.DataFrame) -> list[str]:
    """The algorithm and grid point of each row of a frame in words."""
    return [
        results.describe_configuration(algorithm, dict(zip(data.plan.grid, map(str, point), strict=True)))
        for algorithm, *point in frame[data.row_columns].to_numpy()
    ]
