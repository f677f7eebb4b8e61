"""Statistics in addition to mean accuracy: fairness, cost to a target, classes, and differences to a baseline.

To add one, follow the comment above `settings.report.Statistic`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd

from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results
from fedpipe.report.words import DASH, METRICS, format_number
from fedpipe.settings.report import Statistic

CONFIDENCE = 0.95  #: confidence level of intervals
EQUALITY_TOLERANCE = 1e-9  #: half-width in points up to which differences are equal except for rounding
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
#: Columns of :func:`compute_fairness`.
FAIRNESS_COLUMNS = {"client_std": "std", "worst_tenth": "worst", "lowest": "lowest"}
CLASS_COLUMNS = {name: name for name in ("macro_f1", "balanced_accuracy")}  #: of :func:`compute_class_statistics`
TARGET_COLUMNS = {"rounds_to_target": "round", "bytes_to_target": "bytes"}  #: columns of :func:`compute_cost_to_target`


class PairedDifference(NamedTuple):
    """Mean of differences paired by seed."""

    mean: float
    std: float  #: standard deviation. This and the next are NaN for one seed, or if the mean is infinite
    half_width: float  #: half-width of the confidence interval (Student's t)
    seeds: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero. False if all differences are equal, because it has no width."""
        return EQUALITY_TOLERANCE < self.half_width < abs(self.mean)

    @property
    def formatted_difference(self) -> str:
        """Text with two decimals, such as ``+1.20 ± 0.45 *``, with a star if it is significant."""
        if math.isnan(self.half_width):
            mean = DASH if math.isnan(self.mean) else format_number(self.mean, "+")
            return f"{mean} (one seed)" if self.seeds == 1 else mean
        star = " *" if self.is_significant else "  "
        return f"{format_number(self.mean, '+')} ± {format_number(self.half_width)}{star}"


#: Explanation below a table with differences.
PAIRED_EXPLANATION = (
    f"paired by seed: mean ± half-width of the {CONFIDENCE:.0%} confidence interval (Student's t). A star marks an "
    "interval that excludes 0. One seed has no interval."
)


def compute_paired_difference(baseline: pd.Series[float], scores: pd.Series[float]) -> PairedDifference | None:
    """Compute scores minus those of a baseline over the common seeds. None without common seeds."""
    from scipy import stats

    paired_differences = (scores - baseline).dropna()
    count = len(paired_differences)
    if not count:
        return None
    with np.errstate(invalid="ignore"):  # infinite differences
        mean, std = float(paired_differences.mean()), float(paired_differences.std()) if count > 1 else math.nan
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    return PairedDifference(mean, std, quantile * std / math.sqrt(count), count)


def get_run_key_columns(plan: Plan) -> list[str]:
    """Get the columns that identify a run and its cell."""
    return [*plan.row_key_columns, "seed", "key"]


def compute_fairness(metrics: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Compute the fairness over clients in the last evaluated round: one row per run and protocol with clients.

    ``mean``, standard deviation ``std`` (over n), ``worst`` (mean of the lowest tenth, at least one client) and
    ``lowest`` of the accuracies of ``clients`` clients. Clients without test samples are omitted.
    """
    client_rows = metrics[(metrics["client"] >= 0) & (metrics["total"] > 0)]
    keys = [*keys, "protocol"]
    client_rows = results.select_last_rounds(client_rows, keys)
    client_rows = client_rows.assign(accuracy=client_rows["correct"] / client_rows["total"])
    by_run = client_rows.groupby(keys, sort=False)["accuracy"]
    fairness = by_run.agg(["mean", "min", "count"]).rename(columns={"min": "lowest", "count": "clients"})
    fairness.insert(1, "std", results.reduce_each_group(by_run, lambda accuracies: accuracies.std(1)))
    fairness.insert(2, "worst", results.reduce_each_group(by_run, results.compute_mean_of_worst_tenth))
    return fairness.reset_index()


def compute_cost_to_target(
    accuracies: pd.DataFrame, traffic: pd.DataFrame, keys: Sequence[str], target: float
) -> pd.DataFrame:
    """Compute the cost to reach an accuracy over all test samples: ``round`` and ``bytes`` per run and protocol.

    The round is the first evaluated one that reaches it, and the bytes are those of all participants until its end.
    Both are NaN if a run never reaches it. ``accuracies`` are like :attr:`fedpipe.report.data.StudyData.accuracies`.
    ``traffic`` contains ``participants`` and mean ``bytes_down`` and ``bytes_up`` of a participant, by run and round.
    ``keys`` are the columns that identify a run. The ``target`` is in (0, 1].
    """
    run_columns, protocol_columns = list(keys), [*keys, "protocol"]
    sample_accuracies = accuracies[accuracies["average"] == "sample"]
    reached = sample_accuracies[sample_accuracies["accuracy"] >= target]
    first_rounds = reached.groupby(protocol_columns, sort=False)["round"].min().reset_index()
    cumulative_traffic = traffic.assign(bytes=traffic["participants"] * (traffic["bytes_down"] + traffic["bytes_up"]))
    cumulative_traffic["bytes"] = cumulative_traffic.groupby(run_columns, sort=False)["bytes"].cumsum()
    runs = sample_accuracies[protocol_columns].drop_duplicates().merge(first_rounds, how="left", on=protocol_columns)
    return runs.merge(cumulative_traffic[[*run_columns, "round", "bytes"]], how="left", on=[*run_columns, "round"])


def compute_class_statistics(metrics: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Compute ``macro_f1`` and ``balanced_accuracy`` in the last evaluated round, per run and protocol.

    Both are over the test samples of all clients, as in scikit-learn: the mean F1 of classes that are present or
    predicted, and the mean recall of classes that are present.
    """
    keys = [*keys, "protocol"]
    if "hits" not in metrics:  # runs of older versions have no class counts
        return pd.DataFrame(columns=[*keys, *CLASS_COLUMNS])
    tested_rows = metrics[(metrics["total"] > 0) & metrics["hits"].notna()]
    last_round_rows = results.select_last_rounds(tested_rows, keys)
    rows = []
    for run, lines in last_round_rows.groupby(keys, sort=False):
        hits, support, predicted = (np.stack(list(lines[name])).sum(0) for name in ("hits", "support", "predicted"))
        is_in_test, is_in_test_or_predicted = support > 0, support + predicted > 0
        f1 = 2 * hits[is_in_test_or_predicted] / (support + predicted)[is_in_test_or_predicted]
        recall = hits[is_in_test] / support[is_in_test]
        rows.append((*run, f1.mean(), recall.mean()))
    return pd.DataFrame(rows, columns=[*keys, *CLASS_COLUMNS])


def build_statistics_table(
    plan: Plan,
    metrics: pd.DataFrame,
    scores: pd.DataFrame,
    rounds: pd.DataFrame,
    table_row_keys: Collection[tuple[Hashable, ...]],
) -> pd.DataFrame:
    """Build all statistics by algorithm, grid point and protocol.

    The columns are ``algorithm``, one per name of the grid, ``protocol``, ``statistic``, ``mean`` and ``std`` over
    ``seeds``, and the ``half_width`` of the confidence interval of differences. Accuracies, F1 and differences are in
    percent, and differences in NLL are in nats. If some seeds do not reach a target, only the others count. Protocols
    without clients have no fairness. Costs and differences need `report.target` and `report.baseline`. Differences are
    in the study's first metric, to the baseline's row of ``table_row_keys`` at the same grid point.
    """
    scores, run_columns = results.select_rows_without_extra_models(plan, scores), get_run_key_columns(plan)
    frames_and_columns = [
        (compute_fairness(metrics, run_columns), FAIRNESS_COLUMNS, 100),
        (compute_class_statistics(metrics, run_columns), CLASS_COLUMNS, 100),
    ]
    if plan.report.target is not None:
        accuracies = scores[scores["metric"] == "accuracy"].rename(columns={"score": "accuracy"})
        frames_and_columns.append(
            (compute_cost_to_target(accuracies, rounds, run_columns, plan.report.target), TARGET_COLUMNS, 1)
        )
    values = [
        frame[[*run_columns, "protocol"]].assign(statistic=name, value=factor * frame[column].astype(float))
        for frame, columns, factor in frames_and_columns
        for name, column in columns.items()
    ]
    cell_columns = [*plan.row_key_columns, "protocol", "statistic"]
    means = pd.concat(values).groupby(cell_columns, sort=False)["value"].agg(["mean", "std", "count"])
    statistics_frame = means.rename(columns={"count": "seeds"}).assign(half_width=math.nan)
    if differences := _compute_differences_to_baseline(plan, scores, table_row_keys):
        statistics_frame = pd.concat([statistics_frame, pd.DataFrame(differences).set_index(cell_columns)])
    row_keys = dict.fromkeys(results.get_row_key(plan, cell) for cell in results.sort_cells(plan))
    order = itertools.product(row_keys, results.list_evaluation_protocols(plan, scores), STATISTICS)
    keys = [key for row_key, *rest in order if (key := (*row_key, *rest)) in statistics_frame.index]
    return statistics_frame.reindex(keys).reset_index().astype({"seeds": int})


def _compute_differences_to_baseline(
    plan: Plan, scores: pd.DataFrame, table_row_keys: Collection[tuple[Hashable, ...]]
) -> list[dict[str, Any]]:
    """Compute the differences of each method to the baseline at the same point of the grid, in the first metric.

    With `report.best_over` the baseline has its best value, which is its row in the table.
    """
    report, rows = plan.report, list[dict[str, Any]]()
    if report.baseline is None:
        return rows
    metric, columns = plan.metrics[0], [*plan.row_key_columns, "protocol"]
    frame = results.compute_reported_scores(scores[scores["metric"] == metric], report.round, report.last_k)
    frame = frame[frame["average"] == report.average]
    by_seed: dict[tuple[Hashable, ...], pd.Series[float]] = {
        key: METRICS[metric].factor * lines.set_index("seed")["score"]
        for key, lines in frame.groupby(columns, sort=False)
    }
    cells_by_row = {results.get_row_key(plan, cell): cell for cell in results.sort_cells(plan)}
    for row_key, cell in cells_by_row.items():
        baseline_key = _find_baseline_row(plan, cell, table_row_keys)
        if baseline_key is None or cell.algorithm == report.baseline:
            continue
        for protocol in dict.fromkeys(scores["protocol"]):
            key = (*row_key, protocol)
            baseline_scores, cell_scores = by_seed.get((*baseline_key, protocol)), by_seed.get(key)
            if baseline_scores is None or cell_scores is None:
                continue
            if difference := compute_paired_difference(baseline_scores, cell_scores):
                labels = dict(zip(columns, key, strict=True))
                rows.append(labels | {"statistic": "difference", **difference._asdict()})
    return rows


def find_significant_differences(plan: Plan, statistics_table: pd.DataFrame) -> set[tuple[Hashable, ...]]:
    """Find the rows and protocols whose difference to the baseline is significant."""
    rows = statistics_table[statistics_table["statistic"] == "difference"].to_dict("records")
    return {
        (*(str(row[name]) for name in plan.row_key_columns), row["protocol"])
        for row in rows
        if PairedDifference(*(row[name] for name in PairedDifference._fields)).is_significant
    }


def _find_baseline_row(
    plan: Plan, cell: Cell, table_row_keys: Collection[tuple[Hashable, ...]]
) -> tuple[Hashable, ...] | None:
    """Find the baseline's row at a cell's grid point. None if there are several."""

    def has_same_grid_values(candidate: Cell) -> bool:
        fixed_values = {name: value for name, value in candidate.grid.items() if name not in plan.report.best_over}
        return all(cell.grid[name] == value for name, value in fixed_values.items() if name in cell.grid)

    baseline_cells = [each for each in plan.cells if each.algorithm == plan.report.baseline]
    row_keys = {results.get_row_key(plan, each) for each in baseline_cells if has_same_grid_values(each)}
    keys = [key for key in table_row_keys if key in row_keys]
    return keys[0] if len(keys) == 1 else None
