"""Ranks of the methods in the columns of a table, and tests of their differences.

Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 2006. The columns, such as data sets, are
the blocks of Friedman's test. Only columns of the study's first metric and protocol count.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedpipe.planning.plan import Plan
from fedpipe.planning.rank_test import MIN_COLUMNS, MIN_METHODS
from fedpipe.planning.rungs import TUNING, UNTUNED
from fedpipe.report import results
from fedpipe.report.data import StudyData
from fedpipe.report.results import FloatArray
from fedpipe.report.table_parts import TextTable
from fedpipe.report.words import METRICS, format_metric_label, get_reported_column_header, join_words
from fedpipe.settings.report import SIGNIFICANCE_LEVEL, RankTest


class RankComparison(NamedTuple):
    """The result of the tests for k methods in N columns."""

    names: tuple[str, ...]  #: the methods, best mean rank first
    mean_ranks: FloatArray  #: mean over columns, shape (k,). 1 is the best
    columns: int
    statistic: float  #: Friedman's chi-squared, corrected for ties
    p_value: float  #: its p-value
    pair_p_values: FloatArray  #: p-values of pairs, corrected for the number of pairs, shape (k, k)
    critical_difference: float | None  #: Nemenyi's, in ranks. None for Wilcoxon's test

    @property
    def is_significant(self) -> bool:
        """Whether Friedman's test finds a difference."""
        return self.p_value < SIGNIFICANCE_LEVEL

    def is_pair_significant(self, first: int, second: int) -> bool:
        """Whether two methods differ. Pairs count only if Friedman's test finds a difference."""
        return self.is_significant and bool(self.pair_p_values[first, second] < SIGNIFICANCE_LEVEL)

    @property
    def indistinguishable_groups(self) -> list[range]:
        """Largest groups of at least two methods with adjacent ranks, of which no two differ."""
        groups: list[range] = []
        for first in range(len(self.names)):
            stop = first + 1
            while stop < len(self.names) and not any(
                self.is_pair_significant(member, stop) for member in range(first, stop)
            ):
                stop += 1
            if stop > first + 1 and not (groups and groups[-1].stop >= stop):
                groups.append(range(first, stop))
        return groups


def compare_ranks(names: Sequence[str], scores: FloatArray, sign: int, rank_test: RankTest) -> RankComparison:
    """Rank the methods in each column, and test their differences.

    ``scores`` of each method in each column have shape (k, N), with at least three methods and two columns. ``sign`` is
    1 if higher scores are better, and -1 if lower scores are. ``nemenyi`` compares mean ranks. ``holm`` compares the
    scores of each pair by Wilcoxon's signed-rank test, and corrects the p-values by Holm's method.
    """
    from scipy import stats  # imported here, because it takes half a second

    scores = np.round(scores, 9)  # means of equal sums differ in the last bits
    ranks = stats.rankdata(-sign * scores, axis=0)
    order = np.argsort(ranks.mean(1), kind="stable")
    ranks, scores = ranks[order], scores[order]
    mean_ranks, (k, columns) = ranks.mean(1), ranks.shape
    if (ranks == ranks[0]).all():  # Friedman's statistic is 0 / 0
        statistic, p_value = 0.0, 1.0
    else:
        statistic, p_value = map(float, stats.friedmanchisquare(*ranks))
    critical_difference = None
    if rank_test == "nemenyi":
        standard_error = math.sqrt(k * (k + 1) / (12 * columns))
        critical_difference = float(stats.studentized_range.isf(SIGNIFICANCE_LEVEL, k, math.inf)) * standard_error
        distances = np.abs(mean_ranks[:, None] - mean_ranks) / standard_error
        pair_p_values = stats.studentized_range.sf(distances, k, math.inf)
    else:
        pairs = list(combinations(range(k), 2))
        with np.errstate(invalid="ignore"):  # equal infinite scores have difference 0
            differences = [np.nan_to_num(scores[i] - scores[j]) for i, j in pairs]
        p_values = [float(stats.wilcoxon(difference, zero_method="zsplit").pvalue) for difference in differences]
        pair_p_values = np.ones((k, k))
        for (i, j), p_value_of_pair in zip(pairs, correct_p_values(p_values), strict=True):
            pair_p_values[i, j] = pair_p_values[j, i] = p_value_of_pair
    sorted_names = tuple(names[index] for index in order)
    return RankComparison(
        sorted_names, mean_ranks, columns, statistic, p_value, np.asarray(pair_p_values), critical_difference
    )


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's method (Scandinavian Journal of Statistics, 1979).

    Examples
    --------
    >>> correct_p_values([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for position, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = largest
    return corrected


class RankedTable(NamedTuple):
    """The scores of a study's methods in the columns of its table."""

    scores: dict[str, list[float]]  #: scores of the columns by method
    titles: dict[str, str]  #: names in tables and figures by method
    omitted_methods: list[str]  #: names of the methods without a score in some column

    def compare_methods(self, plan: Plan) -> RankComparison | None:
        """Compare the methods. None if runs are missing, so that there are too few methods or columns."""
        scores = np.array(list(self.scores.values()))
        if plan.report.rank_test is None or len(scores) < MIN_METHODS or scores.shape[1] < MIN_COLUMNS:
            return None
        return compare_ranks(
            list(self.scores), scores, METRICS[plan.metrics[0]].improvement_sign, plan.report.rank_test
        )


def build_ranked_table(data: StudyData) -> RankedTable:
    """Collect the scores of the first metric by each method's protocol. They are means over seeds."""
    plan = data.plan
    column_names = plan.column_grid_names
    row_names = [name for name in plan.grid if name not in {*column_names, *plan.report.best_over}]
    rows = data.reported_rows[data.reported_rows["metric"] == plan.metrics[0]]
    means = rows.set_index([*plan.row_key_columns, "protocol"])["mean"].to_dict()
    scores: dict[str, dict[tuple[str, ...], float]] = {}
    titles: dict[str, str] = {}
    for key in data.table_row_keys:
        values: dict[Hashable, str] = dict(zip(plan.row_key_columns, map(str, key), strict=True))
        if plan.tuning and values[TUNING] == UNTUNED:  # one column per point, that of the tuned methods
            continue
        label = values["algorithm"]
        row_point = {name: values[name] for name in row_names}
        name = results.describe_configuration(label, row_point)
        titles[name] = results.describe_configuration(plan.get_method_title(label), row_point)
        mean = means[*key, plan.get_method_protocol(label)]
        if not math.isnan(mean):
            scores.setdefault(name, {})[tuple(values[column] for column in column_names)] = mean
    columns = list(dict.fromkeys(column for method_scores in scores.values() for column in method_scores))
    complete = {name: method_scores for name, method_scores in scores.items() if len(method_scores) == len(columns)}
    return RankedTable(
        {name: [method_scores[column] for column in columns] for name, method_scores in complete.items()},
        titles,
        [title for name, title in titles.items() if name not in complete],
    )


def build_rank_section(data: StudyData) -> list[str | TextTable]:
    """Build the sentences and the table of mean ranks. Empty without `report.rank_test`."""
    plan, table = data.plan, build_ranked_table(data) if data.plan.report.rank_test else None
    comparison = table and table.compare_methods(plan)
    if table is None or comparison is None:
        return []
    names = [table.titles[name] for name in comparison.names]
    rows = [
        {
            "algorithm": name,
            "mean rank": f"{comparison.mean_ranks[index]:.2f}",
            "no significant difference to": ", ".join(
                other
                for position, other in enumerate(names)
                if position != index and not comparison.is_pair_significant(index, position)
            ),
        }
        for index, name in enumerate(names)
    ]
    return [
        " ".join(describe_rank_comparison(plan, comparison, table.omitted_methods)),
        TextTable(pd.DataFrame(rows), 3),
    ]


def describe_rank_comparison(plan: Plan, comparison: RankComparison, omitted_methods: Sequence[str]) -> list[str]:
    """Describe the tests and their result, one sentence each."""
    metric = format_metric_label(plan.protocols[0], plan.metrics[0])
    if plan.method_protocols:
        metric = get_reported_column_header(plan.metrics[0])
    sentences = [
        f"Ranks of the methods in {comparison.columns} columns of the table by {metric}. Rank 1 is the best.",
        f"Friedman test: chi-squared({len(comparison.names) - 1}) = {comparison.statistic:.2f}, "
        f"p = {comparison.p_value:.3g}.",
    ]
    if not comparison.is_significant:
        sentences.append(f"It finds no difference at {SIGNIFICANCE_LEVEL:.0%}, so pairs are not compared.")
    elif comparison.critical_difference is not None:
        sentences.append(
            f"Nemenyi test at {SIGNIFICANCE_LEVEL:.0%}: the critical difference of mean ranks is "
            f"{comparison.critical_difference:.2f}."
        )
    else:
        sentences.append(f"Pairs: Wilcoxon signed-rank test with Holm's correction, at {SIGNIFICANCE_LEVEL:.0%}.")
    if omitted_methods:
        verb = "is" if len(omitted_methods) == 1 else "are"
        sentences.append(f"{join_words(omitted_methods)} {verb} omitted, because a column has no number.")
    return sentences


def build_method_pairs_table(data: StudyData) -> pd.DataFrame:
    """Build the ranks and corrected p-values of all pairs, the better method first. Empty if runs are missing.

    The columns are ``method`` (label and grid values), ``mean_rank``, ``other``, ``other_mean_rank`` and ``p``.
    """
    comparison, rows = build_ranked_table(data).compare_methods(data.plan), []
    if comparison:
        names, ranks, p_values = comparison.names, comparison.mean_ranks, comparison.pair_p_values
        pairs = combinations(range(len(names)), 2)
        rows = [(names[i], ranks[i], names[j], ranks[j], p_values[i, j]) for i, j in pairs]
    return pd.DataFrame(rows, columns=["method", "mean_rank", "other", "other_mean_rank", "p"])
