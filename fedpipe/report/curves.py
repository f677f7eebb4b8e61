"""Learning curves: accuracy by round, over seeds."""

from __future__ import annotations

import pandas as pd

from fedpipe.planned import Plan
from fedpipe.report import results


def curves(plan: Plan) -> pd.DataFrame:
    """Accuracy of every algorithm and grid point by protocol asked for and round, in the average that the table shows.

    Returns
    -------
    pandas.DataFrame
        ``algorithm``, a column a name of the grid, ``protocol``, ``round``; ``mean`` and ``std`` over ``seeds`` of the
        accuracy in percent.
    """
    frame = results.asked(results.load(plan))
    shown = frame[frame["average"] == plan.report.average]
    return results.over_seeds(shown, ["algorithm", *plan.grid, "protocol", "round"])
