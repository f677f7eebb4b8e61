"""The progress of a study, read from the files of its runs and the records of its jobs.

The logger plugin `fedpipe` writes the records. A stage that you type by hand has no record, so only its files count.
This module writes no file and imports no torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

from fedpipe.core import callbacks
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import is_stored, make_missing_file_error, make_unreadable_file_error, read_json
from fedpipe.core.storage.layout import MergedRoundFiles, RunFiles
from fedpipe.planning.plan import Plan, PlannedRun
from fedpipe.report import logged_jobs, results
from fedpipe.report.logged_jobs import LoggedJob
from fedpipe.report.words import format_duration, format_metric_label
from snakemake_logger_plugin_fedpipe.progress import read_log_tail

#: States in the order of the display.
RunState = Literal["damaged", "failed", "running", "queued", "stopped", "waiting", "done"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
RECENT_ROUNDS = 5  #: rounds for the mean rate
LOG_LINES = 20  #: lines to read of a failed job's log


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run.

    ``state`` is ``damaged`` if one of its files can't be read, ``failed`` if its last job failed, ``running`` if a job
    writes its log, and ``queued`` if a job is submitted. A ``stopped`` run has begun, but no Snakemake runs its study,
    or Ctrl+C or SIGTERM ended its last job. A ``waiting`` run has not begun, or Snakemake will continue it. All rounds
    of a ``done`` run are complete.

    ``accuracy`` in [0, 1] is over all test samples in the last evaluated round, by the protocol with which the table
    reports the method. It is NaN if the method has no such model, and None before the first evaluation.
    """

    name: str  #: description of algorithm, grid point and seed
    state: RunState
    rounds: int  #: complete rounds
    total: int  #: rounds of the study
    accuracy: float | None
    seconds: float | None  #: mean seconds of the last rounds. An evaluation counts once per `evaluation.every` rounds
    #: Accuracies in [0, 1] by evaluated round and protocol, if they were loaded.
    curves: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    damage: str = ""  #: message about the damaged file

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds, if it runs without pause."""
        return None if self.seconds is None else self.seconds * (self.total - self.rounds)


@dataclass(frozen=True)
class Failure:
    """A failed job that has not been started again."""

    run: str  #: description of its run. Empty if it belongs to several runs
    rule: str
    log: Path  #: log of the job, or Slurm's log if the job has written none
    lines: list[str]  #: last lines of the log

    def format_line(self) -> str:
        """Describe the failure in one line, with the last line of its log."""
        return f"{f'{self.run}: ' if self.run else ''}{self.rule} failed: {self.lines[-1].strip()} ({self.log})"


def load_progress_and_failures(plan: Plan, has_curves: bool = False) -> tuple[list[RunProgress], list[Failure]]:
    """Load the progress of all runs in the order of :func:`sort_runs`, and the failed jobs.

    With ``has_curves``, load the accuracies of all evaluated rounds, otherwise of the last one. With `tune`, the plan
    is that of ``plan.add_search_results(has_draws=True)``.
    """
    jobs = logged_jobs.read_last_job_records()
    sorted_runs = sort_runs(plan)
    markers_by_run = {run.path: run.merged_files.marker for run in sorted_runs}
    unfinished_jobs = [
        job
        for job in jobs
        if not job.is_finished and not all(markers_by_run.get(path, path).exists() for path in job.outputs)
    ]
    jobs_by_path: dict[Path, list[LoggedJob]] = {}
    for job in unfinished_jobs:
        for path in job.outputs_and_parent_folders:
            jobs_by_path.setdefault(path, []).append(job)
    snakemake_start = logged_jobs.find_snakemake_start()
    run_folders = {run.path for run in sorted_runs}
    is_study_running = any(job.run_folder in run_folders and job.is_newer_than(snakemake_start) for job in jobs)
    runs = []
    for run, name in zip(sorted_runs, format_run_names(plan).values(), strict=True):
        run_jobs = jobs_by_path.get(run.path, [])
        try:
            progress = _read_run_progress(plan, run, name, run_jobs, snakemake_start, has_curves)
        except ArtifactError as error:
            progress = RunProgress(name, "damaged", 0, run.rounds, None, None, damage=str(error))
        has_new_job = any(job.is_newer_than(snakemake_start) for job in run_jobs)
        will_continue = progress.state == "stopped" and is_study_running and not has_new_job
        runs.append(replace(progress, state="waiting") if will_continue else progress)
    partitions = {layout.get_assignment_path(run.partition).parent for run in plan.runs}
    study_paths = {plan.study_files.tables_folder, plan.study_files.figures_folder, *markers_by_run, *partitions}
    study_paths |= {layout.get_dataset_path(run.dataset) for run in sorted_runs} | {
        diagnostic.files.table for diagnostic in plan.diagnostics
    }
    names = dict(zip(markers_by_run, (run.name for run in runs), strict=True))
    done_runs = {path for path, run in zip(markers_by_run, runs, strict=True) if run.state == "done"}
    failed_jobs = [job for job in unfinished_jobs if job.has_failed and not job.is_stopped]
    return runs, [
        Failure(
            next((names[path] for path in job.outputs_and_parent_folders if path in names), ""),
            job.rule,
            *read_log_tail(job.logs, LOG_LINES, job.error),
        )
        for job in failed_jobs
        if not study_paths.isdisjoint(job.outputs_and_parent_folders)
        and done_runs.isdisjoint(job.outputs_and_parent_folders)
    ]


def has_runs_to_do(plan: Plan, runs: Iterable[RunProgress]) -> bool:
    """Whether runs of the study are neither complete nor damaged."""
    return plan.is_searching or any(run.state not in ("done", "damaged") for run in runs)


def require_intact_runs(runs: Iterable[RunProgress]) -> None:
    """Raise an ArtifactError with the messages about all damaged runs, if there are any."""
    if messages := [run.damage for run in runs if run.damage]:
        raise ArtifactError("\n".join(dict.fromkeys(messages)))


def sort_runs(plan: Plan) -> list[PlannedRun]:
    """Sort the runs by algorithm, in the order of params.yaml."""
    return sorted(plan.runs, key=lambda run: plan.algorithms.index(run.algorithm))


def format_run_labels(plan: Plan) -> list[dict[str, str]]:
    """Describe each run of :func:`sort_runs` by its algorithm, and by the grid values and the seed that differ."""
    runs = _list_runs_with_grid_points(plan)
    descriptions = [
        {name: _join_distinct_texts(point[name] for point in points) for name in plan.grid} | {"seed": str(run.seed)}
        for run, points in runs
    ]
    heads = results.shorten_dotted_keys(plan.grid) | {"seed": "seed"}
    varied = [name for name in heads if len({description[name] for description in descriptions}) > 1]
    return [
        {"run": plan.get_method_title(run.algorithm)} | {heads[name]: description[name] for name in varied}
        for (run, _), description in zip(runs, descriptions, strict=True)
    ]


def describe_run_configurations(plan: Plan) -> list[str]:
    """Describe algorithm and all grid points of each run of :func:`sort_runs`."""
    configurations = []
    for run, points in _list_runs_with_grid_points(plan):
        points_text = _join_distinct_texts(map(results.describe_grid_point, points))
        configurations.append(" ".join(filter(None, (plan.get_method_title(run.algorithm), points_text))))
    return configurations


def describe_reported_metrics(plan: Plan) -> str:
    """Describe the study's first metric, followed by the methods that the table reports with another one."""
    titles_by_protocol: dict[str, list[str]] = {plan.protocols[0]: []}
    for label in plan.algorithms:
        titles_by_protocol.setdefault(plan.get_method_protocol(label), []).append(plan.get_method_title(label))
    (first_protocol, _), *others = titles_by_protocol.items()
    notes = [f"{', '.join(titles)}: {format_metric_label(protocol)}" for protocol, titles in others]
    return ". ".join([format_metric_label(first_protocol), *notes])


def format_run_names(plan: Plan) -> dict[Path, str]:
    """Name each run of :func:`sort_runs` by its configuration and seed, by path."""
    configurations = zip(sort_runs(plan), describe_run_configurations(plan), strict=True)
    return {run.path: f"{configuration} seed {run.seed}" for run, configuration in configurations}


def count_runs_by_state(runs: Iterable[RunProgress]) -> dict[RunState, int]:
    """Count the runs in each state, complete runs first, without states of no run."""
    counts = Counter(run.state for run in runs)
    return {state: counts[state] for state in reversed(RUN_STATES) if counts[state]}


def summarize_progress(runs: list[RunProgress], width: int | None = None) -> list[str]:
    """Summarize the study in one line, or in two if it is wider than ``width`` characters."""
    state_counts = count_runs_by_state(runs)
    states = ", ".join(f"{count} {state}" for state, count in state_counts.items())
    rounds = f"{sum(run.rounds for run in runs)} of {sum(run.total for run in runs)} rounds"
    seconds_left = estimate_seconds_left(runs)
    if seconds_left is not None and state_counts.keys() != {"done"}:
        rounds += f", about {format_duration(seconds_left)} left"
    lines = [f"{len(runs)} run{'s' if len(runs) > 1 else ''} ({states})", rounds]
    return [", ".join(lines)] if width is None or len(", ".join(lines)) <= width else lines


def describe_search_progress(plan: Plan) -> list[str]:
    """Describe the rung of `tune` that is computed now, and count the runs that follow. Empty without `tune`."""
    tuning, rungs = plan.tuning, plan.read_rungs()
    number = len(rungs)
    if tuning is None:
        return []
    if number == len(tuning.rungs):
        return [f"tune: the winners of {tuning.draws} draws are known"]
    selected = max(len(result.selected) for result in rungs[-1].searches) if rungs else 0
    draws = selected + len(tuning.get_new_draw_numbers(number))
    later_runs = tuning.count_later_runs(number, len(plan.seeds))
    return [
        f"tune: rung {number + 1} of {len(tuning.rungs)}, {draws} of {tuning.draws} draws of each method until round "
        f"{tuning.rungs[number]}",
        f"tune: at most {later_runs} later runs",
    ]


def estimate_seconds_left(runs: list[RunProgress]) -> float | None:
    """Estimate the seconds until all runs are done, with the current number of parallel runs.

    A run without a complete round is assumed to be average. None if no run has a complete round.
    """
    known_seconds = [run.seconds for run in runs if run.seconds is not None]
    if not known_seconds:
        return None
    mean_seconds = sum(known_seconds) / len(known_seconds)
    remaining_seconds = [
        (mean_seconds if run.seconds is None else run.seconds) * (run.total - run.rounds) for run in runs
    ]
    running_count = max(sum(run.state == "running" for run in runs), 1)
    return max(sum(remaining_seconds) / running_count, *remaining_seconds)


def _read_run_progress(
    plan: Plan, run: PlannedRun, name: str, jobs: list[LoggedJob], snakemake_start: float | None, has_curves: bool
) -> RunProgress:
    """Get the progress of a run from its unfinished jobs. ``snakemake_start`` is the start of a running Snakemake."""
    files, merged_files = run.files, run.merged_files
    is_merged = merged_files.marker.exists()  # first, because a job may complete the run between the two lines
    is_up_to_date = is_merged and files.get_segment_manifest_path(run.rounds).exists()
    complete_rounds = _count_complete_rounds(files, run.rounds)
    if is_up_to_date and complete_rounds < run.rounds:
        raise make_missing_file_error(files.get_round_files(complete_rounds + 1).marker)
    if is_merged and complete_rounds == run.rounds:  # merged files are faster to read than a pack
        state: RunState = "done"
        modification_time = merged_files.marker.stat().st_mtime_ns
        curves = _read_merged_accuracy_curves(merged_files, merged_files.marker.absolute(), modification_time)
        try:
            times = dict(enumerate(read_json(merged_files.times)["rounds"][: run.rounds], start=1))
            evaluated_rounds = [number for number in reversed(times) if "evaluate" in times[number]]
            seconds = _average_round_seconds(times, evaluated_rounds)
        except (LookupError, TypeError, AttributeError):
            raise make_unreadable_file_error(merged_files.times, "its field rounds is missing or damaged") from None
    else:
        state = _get_state_of_incomplete_run(files, complete_rounds, jobs, snakemake_start)
        curves = _read_accuracy_curves(files, complete_rounds, None if has_curves else 1)
        seconds = _read_mean_round_seconds(files, complete_rounds)
    accuracy = _get_last_accuracy(plan, run, curves)
    return RunProgress(name, state, complete_rounds, run.rounds, accuracy, seconds, curves if has_curves else {})


def _get_state_of_incomplete_run(
    files: RunFiles, complete_rounds: int, jobs: list[LoggedJob], snakemake_start: float | None
) -> RunState:
    if any(job.has_failed and not job.is_stopped for job in jobs):
        return "failed"
    if jobs and all(job.has_failed for job in jobs):
        return "stopped"
    if snakemake_start is not None and (jobs or _has_written_log(files, snakemake_start)):
        # Without jobs, this snakemake writes no records.
        return "running" if not jobs or any(job.has_started for job in jobs) else "queued"
    return "stopped" if complete_rounds or jobs else "waiting"


def _get_last_accuracy(plan: Plan, run: PlannedRun, curves: Mapping[int, Mapping[str, float]]) -> float | None:
    if not curves or run.path in plan.search_run_paths:
        return None
    return curves[max(curves)].get(plan.get_method_protocol(run.algorithm), math.nan)


def _list_runs_with_grid_points(plan: Plan) -> list[tuple[PlannedRun, list[dict[str, str]]]]:
    """List the runs of :func:`sort_runs` with the grid points of the cells that report them."""
    points: dict[tuple[str, str], list[dict[str, str]]] = {}
    for cell in plan.cells:
        points.setdefault((cell.algorithm, cell.key), []).append(results.format_grid_point(plan, cell))
    return [(run, points[run.algorithm, run.key]) for run in sort_runs(plan)]


def _join_distinct_texts(texts: Iterable[str]) -> str:
    """Join distinct texts that are not empty."""
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _has_written_log(files: RunFiles, start_time: float) -> bool:
    """Whether a job of the run has written its log since then."""
    logs = Path("results/logs").glob(f"*/{files.path.parent.name}-{files.path.name}*.log")
    return any(modification_time >= start_time for modification_time in logged_jobs.get_modification_times(logs))


def _count_complete_rounds(files: RunFiles, total_rounds: int) -> int:
    complete_rounds = set(files.list_complete_rounds())
    return len([*itertools.takewhile(complete_rounds.__contains__, range(1, total_rounds + 1))])


def _iterate_evaluated_rounds(files: RunFiles, complete_rounds: int) -> Iterator[int]:
    """Iterate over the evaluated rounds, newest first."""
    return (number for number in range(complete_rounds, 0, -1) if is_stored(files.get_round_files(number).metrics))


def _read_accuracy_curves(files: RunFiles, complete_rounds: int, limit: int | None) -> dict[int, dict[str, float]]:
    """Read the accuracies by protocol of the evaluated rounds, or of the last ``limit`` of them."""
    evaluated_rounds = itertools.islice(_iterate_evaluated_rounds(files, complete_rounds), limit)
    return {number: callbacks.read_round_accuracies(files, number) for number in evaluated_rounds}


@functools.cache
def _read_merged_accuracy_curves(
    files: MergedRoundFiles, _: Path, modification_time: int
) -> dict[int, dict[str, float]]:
    """Read the accuracies by round and protocol of a complete run. Cached until its files change."""
    columns = ["round", "protocol", "correct", "total"]  # reading all columns takes twice as long
    table = layout.read_merged_table(files.metrics, columns)
    sums = table.group_by(["round", "protocol"], use_threads=False).aggregate([("correct", "sum"), ("total", "sum")])
    curves: dict[int, dict[str, float]] = {}
    for row in sums.to_pylist():
        accuracies = curves.setdefault(row["round"], {})
        if row["total_sum"]:
            accuracies[row["protocol"]] = row["correct_sum"] / row["total_sum"]
    return curves


def _read_mean_round_seconds(files: RunFiles, complete_rounds: int) -> float | None:
    """Read the mean seconds of an incomplete run's last rounds."""
    evaluated_rounds = [*itertools.islice(_iterate_evaluated_rounds(files, complete_rounds), 2)]
    recent_rounds = range(max(complete_rounds - RECENT_ROUNDS, 0) + 1, complete_rounds + 1)
    times = {}
    for number in sorted({*recent_rounds, *evaluated_rounds}):
        with suppress(ArtifactError):  # times have no checksum
            times[number] = read_json(files.get_round_files(number).times)
    return _average_round_seconds(times, evaluated_rounds)


def _average_round_seconds(times: Mapping[int, Mapping[str, float]], evaluated_rounds: Sequence[int]) -> float | None:
    """Average the seconds of the last rounds, with the part of an evaluation that a round has. None without times.

    ``times`` by round are in ascending order, and ``evaluated_rounds`` are the last ones, newest first.
    """
    recent_times = [*times.values()][-RECENT_ROUNDS:]
    if not recent_times:
        return None
    seconds = fmean(
        sum(round_times.get(phase, 0) for phase in results.TIMED_PHASES if phase != "evaluate")
        for round_times in recent_times
    )
    evaluations = [round_times["evaluate"] for round_times in times.values() if "evaluate" in round_times]
    if evaluations and evaluated_rounds:
        last, previous = [*evaluated_rounds, 0][:2]  # evaluation.every is the distance
        seconds += fmean(evaluations[-RECENT_ROUNDS:]) / (last - previous)
    return seconds
