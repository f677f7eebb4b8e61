"""All runs of a plan in tidy frames: accuracy by run, protocol and round, bytes, and seconds."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files, layout
from fedpipe.planning.new_clients import list_reported_protocols
from fedpipe.planning.plan import Cell, Plan
from fedpipe.planning.rungs import PlannedSearch
from fedpipe.report.words import DASH, METRICS, get_reported_column_header
from fedpipe.settings.base import NEW_CLIENTS_PREFIX, Metric, Protocol, convert_to_validation_protocol
from fedpipe.settings.report import ReportedRound

if TYPE_CHECKING:
    from pandas.api.typing import SeriesGroupBy

AVERAGES = ("sample", "client", "worst")  #: over test samples, over clients, over the worst tenth of the clients
#: Columns of ``metrics.parquet`` that a metric needs.
METRIC_COLUMNS: dict[Metric, tuple[str, ...]] = {
    "accuracy": ("correct",),
    "auc": ("auc",),
    "ece": ("bin_samples", "bin_hits", "bin_confidences"),
    "nll": ("loss",),
}
FloatArray = npt.NDArray[np.float64]
RUNS_PER_CALL = 100  #: runs whose accuracies are computed in one call of pandas
REPORTED_ROUNDS: tuple[ReportedRound, ...] = get_args(ReportedRound)
TIMED_PHASES = ("train", "aggregate", "evaluate")  #: phases of a complete round
EPOCH_COLUMN = "epoch"  #: seconds of a client's epoch
#: Heads of pivoted tables, in addition to those of the grid.
RESERVED_HEADS = (
    "algorithm",
    "protocol",
    "seeds",
    "seed",
    "run",
    "metric",
    "draws",
    *map(get_reported_column_header, METRICS),
)


def sort_cells(plan: Plan) -> list[Cell]:
    """Sort cells by algorithm, grid point and seed, each in the order of params.yaml.

    Several cells may report one run, if their points do not concern it.
    """
    return sorted(plan.cells, key=lambda cell: plan.algorithms.index(cell.algorithm))


def format_grid_point(plan: Plan, cell: Cell | PlannedSearch) -> dict[str, str]:
    """Format a cell's grid values as text by name. Empty if a name does not concern the algorithm."""
    return {name: _format_grid_value(cell.grid[name]) if name in cell.grid else "" for name in plan.grid}


def get_row_key(plan: Plan, cell: Cell | PlannedSearch) -> tuple[str, ...]:
    """Get the algorithm and the grid values as text, which identify the table's row of a cell."""
    return cell.algorithm, *format_grid_point(plan, cell).values()


def count_runs_by_row(plan: Plan) -> Counter[tuple[Hashable, ...]]:
    """Count the runs of each row of the table, one per seed."""
    return Counter(get_row_key(plan, cell) for cell in plan.cells)


def format_row_labels(plan: Plan, row_key: Iterable[Hashable]) -> dict[str, str]:
    """Format the first cells of a table's row by their heads: the method's name and the grid values."""
    algorithm, *point = map(str, row_key)
    values = zip(shorten_dotted_keys(plan.grid).values(), point, strict=True)
    return {"algorithm": plan.get_method_title(algorithm), **{head: value or DASH for head, value in values}}


def shorten_dotted_keys(names: Iterable[str]) -> dict[str, str]:
    """Shorten dotted keys to their last part, by key, unless it is ambiguous or the name of another column."""
    last_parts = {name: name.rpartition(".")[2] for name in names}
    all_heads = [*last_parts.values(), *RESERVED_HEADS]
    return {name: part if all_heads.count(part) == 1 else name for name, part in last_parts.items()}


def describe_grid_point(point: Mapping[str, str]) -> str:
    """Describe a grid point, such as ``alpha=0.1, mu=1``, without values that do not concern the algorithm."""
    short_names = shorten_dotted_keys(point)
    return ", ".join(f"{short_names[name]}={value}" for name, value in point.items() if value)


def describe_configuration(name: str, point: Mapping[str, str]) -> str:
    """Describe algorithm and grid point, such as ``feddw (alpha=0.1)``."""
    point_text = describe_grid_point(point)
    return f"{name} ({point_text})" if point_text else name


def describe_method_overrides(plan: Plan) -> list[str]:
    """Describe the overrides of methods (and grid points). Methods with the same overrides share a sentence.

    Examples
    --------
    >>> describe_method_overrides(plan)  # doctest: +SKIP
    ['Overrides of scaffold: federation.optimizer=sgd, federation.learning_rate=0.05.']
    """
    points_by_algorithm: dict[str, dict[str, list[str]]] = {}
    for cell in sort_cells(plan):
        points_by_overrides = points_by_algorithm.setdefault(cell.algorithm, {})
        points_by_overrides.setdefault(format_method_overrides(cell), []).append(
            describe_grid_point(format_grid_point(plan, cell))
        )
    names_by_overrides: dict[str, list[str]] = {}
    for algorithm, points_by_overrides in points_by_algorithm.items():
        for overrides, points in points_by_overrides.items():
            points_text = "; ".join(dict.fromkeys(points)) if len(points_by_overrides) > 1 else ""
            title = plan.get_method_title(algorithm)
            names_by_overrides.setdefault(overrides, []).append(f"{title} ({points_text})" if points_text else title)
    names_by_overrides.pop("", None)
    return [f"Overrides of {', '.join(names)}: {overrides}." for overrides, names in names_by_overrides.items()]


def format_method_overrides(cell: Cell) -> str:
    """Format the overrides of a cell's method, such as ``federation.local_epochs=15``."""
    return ", ".join(f"{key}={_format_grid_value(value)}" for key, value in cell.own.items())


def list_evaluation_protocols(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """List the study's protocols, then those of grid points and further ones of methods."""
    return list(dict.fromkeys([*plan.protocols, *frame["protocol"]]))


def select_rows_without_extra_models(plan: Plan, frame: pd.DataFrame) -> pd.DataFrame:
    """Select rows with standard protocols for the clients of `report.clients`, without further ones of methods."""
    protocols = list_reported_protocols(get_args(Protocol), plan.report.clients)
    return frame[frame["protocol"].isin(protocols)]


def compute_reported_scores(frame: pd.DataFrame, round: ReportedRound, last_k: int) -> pd.DataFrame:
    """Compute the reported score of each run, metric, protocol and average.

    ``frame`` is like :attr:`fedpipe.report.data.StudyData.scores`. ``last`` is the score of the last evaluated round,
    ``best`` the best one of all rounds, and ``mean-last`` the mean of the last ``last_k`` evaluated rounds.
    """
    keys = [name for name in frame.columns if name not in {"round", "score"}]
    signed_scores = frame.assign(score=_get_score_signs(frame) * frame["score"])
    by_run = signed_scores.groupby(keys, sort=False)["score"]  # rounds ascend within a run
    if round == "best":
        reported_scores = by_run.max().reset_index()
    elif round == "last":
        reported_scores = by_run.last(skipna=False).reset_index()
    else:
        means = reduce_each_group(by_run, lambda scores: scores[:, -last_k:].mean(1))
        reported_scores = means.rename("score").reset_index()
    return reported_scores.assign(score=_get_score_signs(reported_scores) * reported_scores["score"])


def average_over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Compute mean, standard deviation (over n - 1, NaN for one seed) and number of seeds, in the metric's unit."""
    factors = frame["metric"].map(lambda metric: METRICS[metric].factor).astype(float)  # text if there are no rows
    by_row = frame.assign(score=factors * frame["score"]).groupby(list(keys), sort=False)["score"]
    return by_row.agg(["mean", "std", "count"]).rename(columns={"count": "seeds"}).reset_index()


def compute_accuracies(metrics: pd.DataFrame) -> pd.DataFrame:
    """Compute a run's accuracies by ``average``, ``protocol`` and ``round`` from its ``metrics.parquet``."""
    return compute_scores(metrics, ["accuracy"]).drop(columns="metric").rename(columns={"score": "accuracy"})


def compute_scores(metrics: pd.DataFrame, names: Iterable[Metric], keys: Sequence[str] = ()) -> pd.DataFrame:
    """Compute a run's scores by ``metric``, ``average``, ``protocol`` and ``round`` from its ``metrics.parquet``.

    Average ``sample`` is over all test samples, ``client`` over the clients, and ``worst`` over the worst tenth of the
    clients. The calibration error over all samples sums the bins of all clients. The area under the ROC curve over all
    samples is the clients' mean, weighted by their test samples, and omits clients for which it is undefined. A loss
    that is not a number counts as infinite. Metrics that the run does not record are omitted. For the metrics of
    several runs, ``keys`` are the columns that identify a run.
    """
    tested_rows, keys = metrics[metrics["total"] > 0], [*keys, "protocol", "round"]
    scores = {
        metric: _compute_averages(tested_rows, metric, keys)
        for metric in names
        if {*METRIC_COLUMNS[metric]} <= {*metrics.columns}
    }
    return pd.concat(scores, names=["metric"]).rename("score").reset_index()


def compute_scores_of_runs(metrics: Sequence[pd.DataFrame], names: Collection[Metric]) -> list[pd.DataFrame]:
    """Compute the scores of several runs. For accuracy alone, a call of pandas computes many of them."""
    scores_by_run: list[pd.DataFrame] = []
    runs_per_call = RUNS_PER_CALL if {*names} == {"accuracy"} else 1
    for _, equal_frames in itertools.groupby(metrics, key=lambda frame: [*frame.dtypes.items()]):
        frames = list(equal_frames)
        for first in range(0, len(frames), runs_per_call):
            part = frames[first : first + runs_per_call]
            runs = np.repeat(np.arange(len(part)), [len(frame) for frame in part])
            scores = compute_scores(pd.concat(part, ignore_index=True).assign(run=runs), names, ["run"])
            rows = scores.pop("run").to_numpy()
            scores_by_run += [scores.iloc[np.flatnonzero(rows == run)] for run in range(len(part))]
    return scores_by_run


def _compute_averages(tested_rows: pd.DataFrame, metric: Metric, keys: list[str]) -> pd.Series[float]:
    rows, sign = tested_rows.assign(score=_compute_client_scores(tested_rows, metric)), METRICS[metric].improvement_sign
    by_round = rows.groupby(keys)
    if metric == "accuracy":
        sums = by_round[["correct", "total"]].sum()
        sample_average = sums["correct"] / sums["total"]
    elif metric == "ece":
        sample_average = by_round[[*METRIC_COLUMNS["ece"], "total"]].apply(_pool_calibration_error).astype(float)
    else:
        defined_rows = rows[rows["score"].notna()]
        defined_rows = defined_rows.assign(score=defined_rows["score"] * defined_rows["total"])
        sums = defined_rows.groupby(keys)[["score", "total"]].sum()
        sample_average = (sums["score"] / sums["total"]).reindex(by_round["score"].count().index)
    by_round_with_score = rows[rows["score"].notna()].groupby(keys)["score"]
    worst_average = reduce_each_group(
        by_round_with_score, lambda scores: sign * compute_mean_of_worst_tenth(sign * scores)
    )
    averages = {
        "sample": sample_average,
        "client": _average_over_clients(rows, keys),
        "worst": worst_average.reindex(by_round["score"].count().index),
    }
    return pd.concat(averages, names=["average"])


def _average_over_clients(rows: pd.DataFrame, keys: list[str]) -> pd.Series[float]:
    """Average the scores of several runs by ``keys``. The bits equal those of one call per run.

    Pandas rounds differently if the rows are in the order of the groups, so a second call averages the runs whose rows
    are in another order. The last two of ``keys`` are the protocol and the round.
    """
    order, run_columns = rows.groupby(keys).ngroup(), keys[:-2]
    if order.is_monotonic_increasing or not run_columns:
        return rows.groupby(keys)["score"].mean()
    is_ordered = (order.diff().fillna(0) >= 0).groupby([rows[name] for name in run_columns]).transform("all")
    parts = [rows[is_ordered], rows[~is_ordered]]
    means: pd.Series[float] = pd.concat([part.groupby(keys)["score"].mean() for part in parts if len(part)])
    return means.sort_index()


def reduce_each_group(groups: SeriesGroupBy[Any, Any], reduce: Callable[[FloatArray], FloatArray]) -> pd.Series[float]:
    """Reduce each group to a number.

    ``reduce`` gets all groups of one size as a matrix, shape (groups, size), in the order of the rows. This is faster
    than a call per group and gives the same bits.
    """
    values, group_of_row = groups.obj.to_numpy(dtype=float), groups.ngroup().to_numpy()
    index, order = groups.size().index, np.argsort(group_of_row, kind="stable")
    sizes = np.bincount(group_of_row, minlength=len(index))
    first_rows, numbers = np.cumsum(sizes) - sizes, np.empty(len(index))
    for size in np.unique(sizes):
        selected = np.flatnonzero(sizes == size)
        numbers[selected] = reduce(values[order[first_rows[selected, None] + np.arange(size)]])
    return pd.Series(numbers, index)


def _compute_client_scores(rows: pd.DataFrame, metric: Metric) -> pd.Series[float]:
    """Compute a metric of each row of ``metrics.parquet``."""
    if metric == "accuracy":
        return rows["correct"] / rows["total"]
    if metric == "auc":
        return rows["auc"].astype(float)
    if metric == "nll":
        return rows["loss"].fillna(math.inf)
    bins = (np.array(rows[name].to_list()).reshape(len(rows), -1) for name in METRIC_COLUMNS["ece"])
    return pd.Series(compute_calibration_error(*bins), rows.index)


def _pool_calibration_error(rows: pd.DataFrame) -> float:
    return float(compute_calibration_error(*(np.stack(list(rows[name])).sum(0) for name in METRIC_COLUMNS["ece"])))


def compute_mean_of_worst_tenth(accuracies: FloatArray) -> FloatArray:
    """Compute the mean of the lowest tenth along the last axis, at least one."""
    return np.sort(accuracies)[..., : max(1, accuracies.shape[-1] // 10)].mean(-1)


def _get_score_signs(frame: pd.DataFrame) -> pd.Series[float]:
    return frame["metric"].map(lambda metric: METRICS[metric].improvement_sign).astype(float)


def compute_calibration_error(samples: FloatArray, hits: FloatArray, confidences: FloatArray) -> FloatArray:
    """Compute the expected calibration error from sums by bin along the last axis.

    It is the mean distance of a bin's accuracy to its mean confidence, weighted by samples (Guo et al., ICML 2017).
    """
    return np.abs(hits - confidences).sum(-1) / samples.sum(-1)


def select_last_rounds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Select the rows of the last evaluated round of each group with equal ``keys``."""
    return frame[frame["round"] == frame.groupby(list(keys))["round"].transform("max")]


def add_cell_columns(plan: Plan, cells: Sequence[Cell], row_counts: Sequence[int], frame: pd.DataFrame) -> pd.DataFrame:
    """Add columns to a frame with some rows of each cell: ``algorithm``, the grid, ``seed``, ``key``."""
    points = [format_grid_point(plan, cell) for cell in cells]
    columns: dict[str, list[Any]] = {
        "algorithm": [cell.algorithm for cell in cells],
        **{name: [point[name] for point in points] for name in plan.grid},
        "seed": [cell.seed for cell in cells],
        "key": [cell.key for cell in cells],
    }
    cell_of_row = np.repeat(np.arange(len(cells)), row_counts)
    for name in columns.keys() & {*frame.columns}:
        algorithm = cells[cell_of_row[int(frame[name].notna().to_numpy().argmax())]].algorithm
        raise SettingsError(
            f"study.grid.{name}: {algorithm} records a metric with this name. Rename the axis. Your runs stay valid."
        )
    return pd.concat([pd.DataFrame(columns).take(cell_of_row).reset_index(drop=True), frame], axis=1)


def select_table_row_keys(plan: Plan, means: pd.DataFrame) -> list[tuple[Hashable, ...]]:
    """Select the rows of a table as algorithm and grid values: all, or the best of `report.best_over`.

    The best row has the best mean of the study's first metric. It is that of the method's protocol, or of the study's
    first protocol that has values. With ``report.best_on: validation`` it is that of the same model on the clients'
    validation samples. ``means`` are the rows of the table by protocol and metric with ``mean`` and ``seeds``, in the
    reported round and average.
    """
    means = means[means["metric"] == plan.metrics[0]]
    row, searched_names, report = plan.row_key_columns, plan.report.best_over, plan.report
    rows: list[tuple[Hashable, ...]] = [key for key, _ in means.groupby(row, sort=False)]
    if not searched_names:
        return rows
    best_keys = []
    for key, cells in means.groupby([name for name in row if name not in searched_names], sort=False):
        protocols = [plan.get_method_protocol(str(key[0])), *plan.protocols]
        protocols = [name.removeprefix(NEW_CLIENTS_PREFIX) for name in protocols]  # seen clients select
        protocol = next((name for name in protocols if cells[cells["protocol"] == name]["seeds"].any()), protocols[0])
        protocol = convert_to_validation_protocol(protocol) if report.best_on == "validation" else protocol
        is_ascending = METRICS[plan.metrics[0]].is_lower_better
        ranked_rows = cells[cells["protocol"] == protocol].sort_values("mean", ascending=is_ascending, kind="stable")
        best_keys.append(tuple(ranked_rows.iloc[0][row]))
    return [key for key in rows if key in best_keys]


def read_merged_frame(path: Path) -> pd.DataFrame:
    """Read a merged table of a run, checked against its recorded SHA-256."""
    return files.table_to_frame(layout.read_merged_table(path))


def read_run_times(cell: Cell) -> dict[str, Any]:
    """Read the seconds of each round of a cell (``rounds``) and the environment (``made_by``)."""
    merged_files = cell.merged_files
    return files.read_json(merged_files.times, merged_files.read_recorded_sha256(merged_files.times))


def join_environments(environments: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Join the environments of a run's rounds, with `; ` between different values."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    return {
        name: "; ".join(dict.fromkeys(str(environment[name]) for environment in environments if name in environment))
        for name in names
    }


def _format_grid_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
