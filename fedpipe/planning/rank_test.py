"""Checks of the tests in section `report`: the size of the table that `rank_test` needs, and rows of the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedpipe.core.errors import SettingsError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.planning.plan import Cell, Plan
from fedpipe.settings.report import SIGNIFICANCE_LEVEL, RankTest, Report

MIN_METHODS, MIN_COLUMNS = 3, 2  #: numbers from which Friedman's test is defined
NEMENYI_COLUMNS = 3  #: with two, the critical difference is larger than any difference of mean ranks


def check_rank_test(plan: Plan) -> None:
    """Raise a SettingsError if the table is so small that its rank test never finds a difference."""
    if plan.report.rank_test is None:
        return
    methods, columns = count_rows_and_columns(plan)
    needed_methods = max(methods, MIN_METHODS)
    needed_columns = count_columns_for_significance(plan.report.rank_test, needed_methods)
    if methods < needed_methods or columns < needed_columns:
        raise SettingsError(
            f"report.rank_test: {plan.report.rank_test} can't find a difference in a table of size {methods} x "
            f"{columns}. Use at least {needed_methods} methods and {needed_columns} columns, which are the values of "
            "study.grid that all methods have, or remove it."
        )


def count_rows_and_columns(plan: Plan) -> tuple[int, int]:
    """Count the rows and columns of the table, with one protocol and metric."""
    row_names = plan.grid.keys() - {*plan.column_grid_names, *plan.report.best_over}
    rows = {(cell.algorithm, *(str(cell.grid.get(name)) for name in sorted(row_names))) for cell in plan.cells}
    columns = {tuple(str(cell.grid[name]) for name in plan.column_grid_names) for cell in plan.cells}
    return len(rows), len(columns)


def count_columns_for_significance(rank_test: RankTest, methods: int) -> int:
    """Number of columns from which a test finds a difference if the order of the methods is the same in all columns."""
    if rank_test == "holm":  # the smallest p-value of a signed-rank test of N columns is 2 / 2^N
        return math.floor(math.log2(2 * math.comb(methods, 2) / SIGNIFICANCE_LEVEL)) + 1
    return NEMENYI_COLUMNS  # Friedman's test is significant, too: its statistic is N (k - 1), which is 6 or more


def list_warnings_about_several_baselines(report: Report, cells: Sequence[Cell]) -> Iterator[str]:
    """List warnings about methods without differences, because the grid has several rows of the baseline for each."""
    baseline_cells = [cell for cell in cells if cell.algorithm == report.baseline]
    if "difference" not in report.statistics:
        return
    for name in dict.fromkeys(name for cell in baseline_cells for name in cell.grid if name not in report.best_over):
        values = {compute_json_digest(cell.grid[name]) for cell in baseline_cells if name in cell.grid}
        if len(values) > 1 and any(name not in cell.grid for cell in cells):
            yield (
                f"report.baseline: the grid varies {name} of {report.baseline}, so methods without it have no "
                "difference. List it in report.best_over."
            )
