"""Learning curves: accuracy by round, over seeds."""

from __future__ import annotations

import pandas as pd

from fedpipe.planning.plan import Plan
from fedpipe.report import results, table_parts, tables


def load_curves(plan: Plan) -> pd.DataFrame:
    """Accuracy of every algorithm and grid point by protocol asked for and round, in the average that the table shows.

    Returns
    -------
    pandas.DataFrame
        ``algorithm``, a column a name of the grid, ``protocol``, ``round``; ``mean`` and ``std`` over ``seeds`` of the
        accuracy in percent.
    """
    frame = results.select_study_protocols(results.load_accuracies(plan))
    reported_rows = frame[frame["average"] == plan.report.average]
    return results.average_over_seeds(reported_rows, ["algorithm", *plan.grid, "protocol", "round"])


def load_table_curves(plan: Plan) -> pd.DataFrame:
    """Those of the rows that people's table shows: all, or where `report.best_over` searches, those at the best values.

    What was measured on validation samples to choose them is left out then.
    """
    frame, report = load_curves(plan), plan.report
    if not report.best_over:
        return frame
    table_rows = table_parts.select_table_rows(plan, tables.build_result_table(plan))
    frame = frame[frame[["algorithm", *plan.grid]].apply(tuple, axis=1).isin(table_rows)]
    if report.best_on == "validation":
        frame = frame[~frame["protocol"].str.endswith("-on-validation")]
    return frame.reset_index(drop=True)
