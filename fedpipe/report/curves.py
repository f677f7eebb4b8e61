"""Learning curves: accuracy by round, over seeds."""

from __future__ import annotations

import pandas as pd

from fedpipe.report import results
from fedpipe.report.data import StudyData


def build_curves(data: StudyData) -> pd.DataFrame:
    """Accuracy of every algorithm and grid point by protocol asked for and round, in the average that the table shows.

    Returns
    -------
    pandas.DataFrame
        ``algorithm``, a column a name of the grid, ``protocol``, ``round``; ``mean`` and ``std`` over ``seeds`` of the
        accuracy in percent.
    """
    frame = results.select_study_protocols(data.accuracies)
    frame = frame[frame["average"] == data.plan.report.average]
    return results.average_over_seeds(frame, [*data.row_columns, "protocol", "round"])


def build_table_curves(data: StudyData) -> pd.DataFrame:
    """Those of the rows that people's table shows: all, or where `report.best_over` searches, those at the best values.

    What was measured on validation samples to choose them is left out then.
    """
    frame, report = build_curves(data), data.plan.report
    if not report.best_over:
        return frame
    frame = frame[frame[data.row_columns].apply(tuple, axis=1).isin(data.table_rows)]
    if report.best_on == "validation":
        frame = frame[~frame["protocol"].str.endswith("-on-validation")]
    return frame.reset_index(drop=True)
