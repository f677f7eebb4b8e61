"""Learning curves: a metric by round, over seeds."""

from __future__ import annotations

import pandas as pd

from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.settings.base import NEW_CLIENTS_PREFIX, Metric


def build_metric_curves(data: StudyData, metric: Metric = "accuracy") -> pd.DataFrame:
    """Build a metric by algorithm, grid point, protocol and round, in the average of the table.

    The columns are ``algorithm``, one per name of the grid, ``protocol``, ``round``, and ``mean`` and ``std`` over
    ``seeds`` of the metric (in percent, NLL in nats).
    """
    frame = results.select_rows_without_extra_models(data.plan, data.scores)
    frame = frame[(frame["average"] == data.plan.report.average) & (frame["metric"] == metric)]
    return results.average_over_seeds(frame, [*data.plan.row_key_columns, "protocol", "round"])


def build_figure_curves(data: StudyData, metric: Metric = "accuracy") -> pd.DataFrame:
    """Build the curves of the figure: of the table's rows that `report.figure_algorithms` and `figure_protocols` name.

    With `report.best_over` each method has its curve at the best values, and protocols on validation samples are
    omitted.
    """
    frame, report = build_metric_curves(data, metric), data.plan.report
    if report.figure_algorithms:
        frame = frame[frame["algorithm"].isin(report.figure_algorithms)]
    if report.figure_protocols:
        frame = frame[frame["protocol"].str.removeprefix(NEW_CLIENTS_PREFIX).isin(report.figure_protocols)]
    if not report.best_over:
        return frame
    frame = frame[frame[data.plan.row_key_columns].apply(tuple, axis=1).isin(data.table_row_keys)]
    if report.best_on == "validation":
        frame = frame[~frame["protocol"].str.endswith("-on-validation")]
    return frame.reset_index(drop=True)
