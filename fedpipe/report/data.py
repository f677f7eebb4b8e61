"""A study's numbers for tables and figures: each file of its runs is read once.

:class:`StudyData` is the input of tables, statistics, plots, figures and :func:`fedpipe.load`. It reads a file, and
checks its SHA-256, when you first use one of its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from typing import Any

import pandas as pd

from fedpipe.core.storage import files, layout
from fedpipe.core.storage.layout import MergedRoundFiles
from fedpipe.data.assignment import NO_CLIENT, Assignment
from fedpipe.data.heterogeneity import HeterogeneitySummary
from fedpipe.planning import code_changes
from fedpipe.planning.plan import Cell, Plan
from fedpipe.report import results, statistics
from fedpipe.report.results import AVERAGES, EPOCH_COLUMN, REPORTED_ROUNDS, TIMED_PHASES
from fedpipe.settings.base import NEW_CLIENTS_PREFIX, Metric

TRAFFIC_COLUMNS = ["bytes_down", "bytes_up"]


class StudyData:
    """A study's plan and the numbers of its runs.

    Frames of several runs begin with the columns of :func:`fedpipe.report.results.add_cell_columns`. Copy a frame
    before you change it, because all callers share it. Every property raises ArtifactError if a file of a run that it
    needs is missing or damaged.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    # -- frames of runs ----------------------------------------------------------------------------------------------

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Rows of ``metrics.parquet`` of all cells. Client -1 is a model of the server."""
        return self.concatenate_cell_frames(lambda cell: self._metrics_by_run[cell.merged_files])

    @cached_property
    def accuracies(self) -> pd.DataFrame:
        """Accuracies of all cells.

        One row per cell, protocol, round and average: ``algorithm``, one column per name of the grid (text), ``seed``,
        ``key``, ``protocol``, ``round``, ``average`` and ``accuracy`` in [0, 1]. Average ``sample`` is over all test
        samples. ``client`` is the mean of the clients' accuracies, and ``worst`` is the mean of their lowest tenth (at
        least one client). Clients without test samples are omitted. Rounds ascend within a run.
        """
        scores = self.scores[self.scores["metric"] == "accuracy"].drop(columns="metric")
        return scores.rename(columns={"score": "accuracy"}).reset_index(drop=True)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Scores of all cells by the study's metrics, and by accuracy.

        Like :attr:`accuracies`, with ``metric`` and ``score``. Accuracy, AUC and ECE are in [0, 1], and NLL is in nats.
        """
        names: list[Metric] = [*self.plan.metrics, "accuracy"]
        runs, frames = zip(*self._metrics_by_run.items(), strict=True)
        scores_by_run = dict(zip(runs, results.compute_scores_of_runs(frames, names), strict=True))
        return self.concatenate_cell_frames(lambda cell: scores_by_run[cell.merged_files])

    @cached_property
    def round_summaries(self) -> pd.DataFrame:
        """Traffic by round: ``participants``, ``left_out`` updates, mean bytes of one, and the methods' own metrics."""
        return self.concatenate_cell_frames(lambda cell: self._round_summaries_by_run[cell.merged_files])

    @cached_property
    def mean_traffic(self) -> pd.DataFrame:
        """Mean bytes that a participant receives and sends in a round, one row per cell."""
        return self.build_frame_with_cell_rows(
            lambda cell: {
                name: self._round_summaries_by_run[cell.merged_files][name].mean() for name in TRAFFIC_COLUMNS
            }
        )

    @cached_property
    def divergence_by_cell(self) -> pd.DataFrame:
        """Updates that were not finite, one row per cell.

        ``left_out``: number of omitted updates. ``diverged``: first round without a finite update, 0 if there is none.
        """

        def summarize_divergence(cell: Cell) -> dict[str, int]:
            rounds = self._round_summaries_by_run[cell.merged_files]
            diverged = rounds["round"][rounds["left_out"] == rounds["participants"]]
            return {"left_out": int(rounds["left_out"].sum()), "diverged": int(min(diverged, default=0))}

        return self.build_frame_with_cell_rows(summarize_divergence)

    @cached_property
    def round_times(self) -> pd.DataFrame:
        """Seconds by ``round``: ``train``, ``aggregate`` and ``evaluate``. They depend on the machine."""
        return self.concatenate_cell_frames(lambda cell: pd.DataFrame(self.get_run_times(cell)["rounds"]))

    @cached_property
    def total_times(self) -> pd.DataFrame:
        """Seconds, one row per cell. NaN if a round's times are lost.

        ``train``, ``aggregate`` and ``evaluate``: sums over rounds. ``epoch``: mean seconds of a client's local epoch,
        over participants and rounds, without evaluation.
        """

        def sum_seconds(cell: Cell) -> dict[str, float]:
            rounds = self.get_run_times(cell)["rounds"]
            sums = {
                name: sum(float(seconds.get(name, math.nan)) for seconds in rounds)
                for name in (*TIMED_PHASES, EPOCH_COLUMN)
            }
            sums[EPOCH_COLUMN] /= len(rounds)
            return sums

        return self.build_frame_with_cell_rows(sum_seconds)

    @cached_property
    def environments(self) -> list[dict[str, str]]:
        """Distinct environments of the runs: executor, device and versions."""
        made_by = [maker for cell in results.sort_cells(self.plan) for maker in self.get_run_times(cell)["made_by"]]
        distinct = dict.fromkeys(
            tuple(item for item in sorted(maker.items()) if item[0] != "code") for maker in made_by
        )
        return [dict(items) for items in distinct]

    @cached_property
    def heterogeneity(self) -> dict[str, HeterogeneitySummary]:
        """Heterogeneity of the clients by key of the partition, in the order of the runs."""
        summaries = {}
        for key in dict.fromkeys(run.partition for run in self.plan.runs):
            path = layout.get_heterogeneity_path(key)
            table = files.read_parquet(path, files.read_recorded_sha256(path, "assignment.json"))
            summaries[key] = HeterogeneitySummary.from_table(table)
        return summaries

    @cached_property
    def assignments(self) -> dict[str, Assignment]:
        """The samples of each client, by key of the partition, in the order of the runs."""
        keys = dict.fromkeys(run.partition for run in self.plan.runs)
        paths = {key: layout.get_assignment_path(key) for key in keys}
        return {key: Assignment.read(path, files.read_recorded_sha256(path)) for key, path in paths.items()}

    @cached_property
    def client_names_by_partition(self) -> dict[str, dict[int, str]]:
        """Name of each client by number, by key of the partition. Client -1 is the server."""
        return {
            key: {NO_CLIENT: "server", **dict(enumerate(assignment.names))}
            for key, assignment in self.assignments.items()
        }

    def name_clients(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Name the client of each row, given the columns ``key`` of its run and ``client``."""
        names = {run.key: self.client_names_by_partition[run.partition] for run in self.plan.runs}
        client_names = [names[key][client] for key, client in zip(frame["key"], frame["client"], strict=True)]
        return pd.Series(pd.Categorical(client_names), index=frame.index)

    @cached_property
    def shared_code_notes(self) -> list[str]:
        """Note about runs from other shared code than the plan's."""
        return [*code_changes.describe_runs_from_other_code(self.plan, self._times_by_run)]

    # -- the study's tables ------------------------------------------------------------------------------------------

    @cached_property
    def score_table(self) -> pd.DataFrame:
        """Scores of every algorithm and grid point by every protocol, metric, average and reported round.

        ``algorithm``, one column per name of the grid, ``protocol``, ``metric``, ``average``, ``round``, ``mean`` and
        ``std`` over ``seeds`` of the score (in percent, NLL in nats), ``bytes_down`` and ``bytes_up`` of a participant
        in a round (mean over rounds and seeds), ``left_out`` (updates that were not finite), and ``diverged`` (runs
        with a round without a finite update). A protocol that an algorithm lacks has no mean and 0 seeds. Further
        protocols of methods are included, although the pivoted table omits them. Times are not included, so that the
        same runs give the same bytes.
        """
        rows = self.plan.row_key_columns
        cell_columns = [*rows, "protocol", "metric", "average"]
        last_k = self.plan.report.last_k
        seed_means = pd.concat(
            results.average_over_seeds(
                results.compute_reported_scores(self.scores, round, last_k), cell_columns
            ).assign(round=round)
            for round in REPORTED_ROUNDS
        )
        row_keys = dict.fromkeys(results.get_row_key(self.plan, cell) for cell in results.sort_cells(self.plan))
        cells = pd.DataFrame(list(row_keys), columns=rows)
        for name, values in (
            ("protocol", results.list_evaluation_protocols(self.plan, self.scores)),
            ("metric", self.plan.metrics),
            ("average", AVERAGES),
            ("round", REPORTED_ROUNDS),
        ):
            cells = cells.merge(pd.DataFrame({name: list(values)}), how="cross")
        bytes_sent = self.mean_traffic.groupby(rows, sort=False)[TRAFFIC_COLUMNS].mean().reset_index()
        divergence_by_cell = self.divergence_by_cell.assign(diverged=lambda frame: frame["diverged"] > 0)
        failure_counts = divergence_by_cell.groupby(rows, sort=False)[["left_out", "diverged"]].sum().reset_index()
        table = cells.merge(seed_means, how="left", on=[*cell_columns, "round"])
        table = table.merge(bytes_sent, how="left", on=rows).merge(failure_counts, how="left", on=rows)
        return table.assign(seeds=table["seeds"].fillna(0).astype(int))

    @cached_property
    def reported_rows(self) -> pd.DataFrame:
        """Rows with the reported round and average, and a standard protocol."""
        return results.select_rows_without_extra_models(self.plan, self._reported_round_rows)

    @cached_property
    def table_row_keys(self) -> list[tuple[Hashable, ...]]:
        """Rows of the pivoted table, as algorithm and grid values: all, or the best of some lists.

        See :func:`fedpipe.report.results.select_table_row_keys`.
        """
        return results.select_table_row_keys(self.plan, self._reported_round_rows)

    @property
    def _reported_round_rows(self) -> pd.DataFrame:
        report, table = self.plan.report, self.score_table
        return table[(table["round"] == report.round) & (table["average"] == report.average)]

    @cached_property
    def mean_run_times(self) -> pd.DataFrame:
        """Mean of :attr:`total_times` over seeds, by algorithm and grid point."""
        by_row = self.total_times.groupby(self.plan.row_key_columns, sort=False)[[*TIMED_PHASES, EPOCH_COLUMN]]
        return by_row.mean().reset_index()

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """Table of :func:`fedpipe.report.statistics.build_statistics_table`."""
        return statistics.build_statistics_table(
            self.plan, self.metrics, self.scores, self.round_summaries, self.table_row_keys
        )

    # -- curves ------------------------------------------------------------------------------------------------------

    def build_metric_curves(self, metric: Metric = "accuracy") -> pd.DataFrame:
        """Build a metric by algorithm, grid point, protocol and round, in the average of the table.

        The columns are ``algorithm``, one per name of the grid, ``protocol``, ``round``, and ``mean`` and ``std`` over
        ``seeds`` of the metric (in percent, NLL in nats).
        """
        frame = results.select_rows_without_extra_models(self.plan, self.scores)
        frame = frame[(frame["average"] == self.plan.report.average) & (frame["metric"] == metric)]
        return results.average_over_seeds(frame, [*self.plan.row_key_columns, "protocol", "round"])

    def build_figure_curves(self, metric: Metric = "accuracy") -> pd.DataFrame:
        """Build the curves of the figure: of the rows that `report.figure_algorithms` and `figure_protocols` name.

        With `report.best_over` each method has its curve at the best values, and protocols on validation samples are
        omitted.
        """
        frame, report = self.build_metric_curves(metric), self.plan.report
        if report.figure_algorithms:
            frame = frame[frame["algorithm"].isin(report.figure_algorithms)]
        if report.figure_protocols:
            frame = frame[frame["protocol"].str.removeprefix(NEW_CLIENTS_PREFIX).isin(report.figure_protocols)]
        if not report.best_over:
            return frame
        frame = frame[frame[self.plan.row_key_columns].apply(tuple, axis=1).isin(self.table_row_keys)]
        if report.best_on == "validation":
            frame = frame[~frame["protocol"].str.endswith("-on-validation")]
        return frame.reset_index(drop=True)

    # -- files -------------------------------------------------------------------------------------------------------

    def get_run_times(self, cell: Cell) -> dict[str, Any]:
        """Get the seconds of each round of a cell (``rounds``) and the environment (``made_by``)."""
        return self._times_by_run[cell.merged_files]

    def concatenate_cell_frames(self, get_frame: Callable[[Cell], pd.DataFrame]) -> pd.DataFrame:
        """Concatenate a frame of each cell, with columns that identify the cell."""
        cells = results.sort_cells(self.plan)
        frames = [get_frame(cell) for cell in cells]
        frame = pd.concat(frames, ignore_index=True)
        return results.add_cell_columns(self.plan, cells, [len(frame) for frame in frames], frame)

    def build_frame_with_cell_rows(self, get_row: Callable[[Cell], Mapping[str, Any]]) -> pd.DataFrame:
        """Make a frame with a row of each cell, with columns that identify the cell."""
        cells = results.sort_cells(self.plan)
        return results.add_cell_columns(
            self.plan, cells, [1] * len(cells), pd.DataFrame([{**get_row(cell)} for cell in cells])
        )

    @cached_property
    def _metrics_by_run(self) -> dict[MergedRoundFiles, pd.DataFrame]:
        return self._read_distinct_runs(lambda cell: results.read_merged_frame(cell.merged_files.metrics))

    @cached_property
    def _round_summaries_by_run(self) -> dict[MergedRoundFiles, pd.DataFrame]:
        return self._read_distinct_runs(lambda cell: results.read_merged_frame(cell.merged_files.rounds))

    @cached_property
    def _times_by_run(self) -> dict[MergedRoundFiles, dict[str, Any]]:
        return self._read_distinct_runs(results.read_run_times)

    def _read_distinct_runs(self, read: Callable[[Cell], Any]) -> dict[MergedRoundFiles, Any]:
        """Read each run once. Cells that differ only in settings of other methods share a run."""
        cells = {cell.merged_files: cell for cell in results.sort_cells(self.plan)}
        return {merged_files: read(cell) for merged_files, cell in cells.items()}
