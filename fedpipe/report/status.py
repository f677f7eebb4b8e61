"""The progress of a study, read from the files of its runs and the records of its jobs.

The logger plugin `fedpipe` writes the records. A stage that you type by hand has no record, so only its files count.
This module writes no file and imports no torch.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedpipe.core import callbacks
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import is_stored, read_json
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning.plan import Plan, PlannedRun
from fedpipe.report import results
from fedpipe.report.tables import DASH
from fedpipe.report.words import format_duration, format_metric
from snakemake_logger_plugin_fedpipe import RECORDS_FOLDER, read_records

#: States in the order of the display.
RunState = Literal["failed", "running", "queued", "stopped", "waiting", "done"]
RUN_STATES: tuple[RunState, ...] = ("failed", "running", "queued", "stopped", "waiting", "done")
STYLES = {"failed": "bold red", "running": "green", "queued": "cyan", "stopped": "yellow", "waiting": "dim", "done": ""}
RECENT_ROUNDS = 5  #: rounds for the mean rate
LOG_LINES = 5  #: printed lines of a failed job's log
REFRESH_SECONDS = 2  #: seconds between two updates

SNAKEMAKE_FOLDER = Path(".snakemake")
STOPPED_PATTERN = r": stopped by SIGTERM after round \d+\b[^\n]*\s*\Z"  #: end of a segment's log that is not a failure


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run.

    Parameters
    ----------
    name
        Description of algorithm, grid point and seed.
    state
        ``failed``: its last job failed. ``running``: a job writes its log. ``queued``: a job is submitted.
        ``stopped``: it has begun, but Snakemake is not running, or Ctrl+C or SIGTERM ended its last job.
        ``waiting``: it has not begun. ``done``: all rounds are complete.
    rounds, total
        Complete rounds, and rounds of the study.
    accuracy
        Accuracy in [0, 1] over all test samples in the last evaluated round, by the study's first protocol. NaN if the
        method has no such model, None before the first evaluation.
    seconds
        Mean seconds of the last rounds.
    """

    name: str
    state: RunState
    rounds: int
    total: int
    accuracy: float | None
    seconds: float | None

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds, if it runs without pause."""
        return None if self.seconds is None else self.seconds * (self.total - self.rounds)


@dataclass(frozen=True)
class Failure:
    """A failed job that has not been started again.

    Parameters
    ----------
    run
        Description of its run. Empty if it belongs to several runs.
    rule
        Rule of the job.
    log
        Log of the job.
    lines
        Last lines of the log, or of Slurm's log if the job has written none.
    """

    run: str
    rule: str
    log: Path
    lines: list[str]

    def describe(self) -> str:
        """Describe the failure in one line, with the last line of its log."""
        return f"{f'{self.run}: ' if self.run else ''}{self.rule} failed: {self.lines[-1].strip()} ({self.log})"


@dataclass(frozen=True)
class LoggedJob:
    """The last record of a job."""

    rule: str
    has_failed: bool
    outputs: list[Path]
    logs: list[Path]  #: log of the job, then Slurm's
    timestamp: float  #: time of the record in seconds since the epoch
    submit_time: float = 0.0  #: time of submission
    error: str = ""  #: reason of the failure, from the executor
    interrupted: bool = False  #: ended by Ctrl+C

    @property
    def has_started(self) -> bool:
        """Whether it has written to its log since its submission."""
        # File systems may round times down to seconds.
        return any(time >= math.floor(self.timestamp) for time in _get_modification_times(self.logs[:1]))

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl+C ended it, or SIGTERM ended a segment after a round, which its log's last line shows.

        False for a segment without its own log, because the log belongs to the previous job.
        """
        if self.interrupted:
            return True
        with suppress(FileNotFoundError):
            is_current_log = self.logs[0].stat().st_mtime >= math.floor(self.submit_time)
            return (
                self.has_failed
                and is_current_log
                and bool(re.search(STOPPED_PATTERN, self.logs[0].read_text(errors="replace")))
            )
        return False


def load_progress(plan: Plan) -> tuple[list[RunProgress], list[Failure]]:
    """Load the progress of all runs in the plan's order, and the failed jobs."""
    jobs = {job.logs[0]: job for job in _read_logged_jobs()}  # last record of each job
    sorted_runs = sorted(plan.runs, key=lambda run: plan.algorithms.index(run.algorithm))
    markers_by_run = {run.path: run.merged_files.marker for run in sorted_runs}
    unfinished_jobs = [
        job for job in jobs.values() if not all(markers_by_run.get(path, path).exists() for path in job.outputs)
    ]
    locks = _get_modification_times((SNAKEMAKE_FOLDER / "locks").glob("*"))
    runs = [_get_run_progress(plan, run, unfinished_jobs, min(locks, default=None)) for run in sorted_runs]
    partitions = {layout.assignment_file(key).parent for key in plan.partitions}
    study_paths = {plan.study_files.tables, plan.study_files.figures, *markers_by_run, *partitions}
    study_paths |= {layout.dataset_file(run.dataset) for run in sorted_runs} | {
        diagnostic.files.table for diagnostic in plan.diagnostics
    }
    failed_jobs = [job for job in unfinished_jobs if job.has_failed and not job.is_stopped]
    study_failures = [job for job in failed_jobs if any(study_paths & {path, *path.parents} for path in job.outputs)]
    names = dict(zip(markers_by_run, (run.name for run in runs), strict=True))
    return runs, [
        Failure(_find_run_name(names, job), job.rule, job.logs[0], _read_log_tail(job)) for job in study_failures
    ]


def render_progress(
    runs: list[RunProgress], failures: list[Failure], protocol: str, height: int | None = None
) -> RenderableType:
    """Render the progress for a terminal. With a height, as many runs as fit, active runs first."""
    sorted_runs = sorted(runs, key=lambda run: RUN_STATES.index(run.state))
    failure_lines = [line for failure in failures for line in _render_failure(failure)]
    visible_runs = len(sorted_runs) if height is None else max(height - len(failure_lines) - 6, 1)
    right_column = functools.partial(Column, justify="right")
    columns = (
        "run",
        "",
        right_column("rounds"),
        right_column("accuracy"),
        right_column("s/round"),
        right_column("time left"),
        "state",
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for run in sorted_runs[:visible_runs]:
        table.add_row(
            run.name,
            ProgressBar(run.total, run.rounds, width=20),
            f"{run.rounds}/{run.total}",
            "" if run.accuracy is None else DASH if math.isnan(run.accuracy) else f"{100 * run.accuracy:.2f} %",
            "" if run.seconds is None else f"{run.seconds:.2f}",
            "" if run.seconds_left is None or run.state == "done" else format_duration(run.seconds_left),
            Text(run.state, STYLES[run.state]),
        )
    hidden_note = (
        [Text(f"… and {len(sorted_runs) - visible_runs} more", "dim")] if len(sorted_runs) > visible_runs else []
    )
    return Group(
        Text(summarize_progress(runs)),
        Text(f"accuracy: {format_metric(protocol)}"),
        table,
        *hidden_note,
        *failure_lines,
    )


def show_progress(plan: Plan, watch: bool = False) -> None:
    """Print the progress, or update it until all runs are done or Ctrl+C."""
    console = Console()
    if not watch:
        console.print(render_progress(*load_progress(plan), plan.protocols[0]))
        return
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            runs, failures = load_progress(plan)
            live.update(render_progress(runs, failures, plan.protocols[0], console.height), refresh=True)
            if all(run.state == "done" for run in runs):
                return
            time.sleep(REFRESH_SECONDS)


def summarize_progress(runs: list[RunProgress]) -> str:
    """Summarize the study in one line."""
    state_counts = {state: sum(run.state == state for run in runs) for state in RUN_STATES}
    states = ", ".join(f"{state_counts[state]} {state}" for state in reversed(RUN_STATES) if state_counts[state])
    rounds = f"{sum(run.rounds for run in runs)} of {sum(run.total for run in runs)} rounds"
    seconds_left = estimate_time_left(runs)
    time_left_note = (
        ""
        if seconds_left is None or state_counts["done"] == len(runs)
        else f", about {format_duration(seconds_left)} left"
    )
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''} ({states}), {rounds}{time_left_note}"


def estimate_time_left(runs: list[RunProgress]) -> float | None:
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


def _get_run_progress(
    plan: Plan, run: PlannedRun, unfinished_jobs: list[LoggedJob], snakemake_start: float | None
) -> RunProgress:
    """Get the progress of a run. ``snakemake_start`` is the start of a running Snakemake, if any."""
    files, total_rounds = run.files, run.rounds
    complete_rounds = _count_complete_rounds(files, total_rounds)
    jobs = [job for job in unfinished_jobs if any(files.path in {path, *path.parents} for path in job.outputs)]
    state: RunState
    if run.merged_files.marker.exists() and complete_rounds == total_rounds:
        state = "done"
    elif any(job.has_failed and not job.is_stopped for job in jobs):
        state = "failed"
    elif jobs and all(job.has_failed for job in jobs):
        state = "stopped"
    elif snakemake_start is not None and (
        jobs or _has_written_log(files, snakemake_start)
    ):  # no jobs: this snakemake writes no records
        state = "running" if not jobs or any(job.has_started for job in jobs) else "queued"
    else:
        state = "stopped" if complete_rounds or jobs else "waiting"
    accuracy = _read_accuracy(plan.protocols[0], files, complete_rounds)
    return RunProgress(
        _describe_run(plan, run),
        state,
        complete_rounds,
        total_rounds,
        accuracy,
        _read_round_seconds(files, complete_rounds),
    )


def _describe_run(plan: Plan, run: PlannedRun) -> str:
    """Describe a run with all its grid points."""
    cells = [cell for cell in plan.cells if run.has_cell(cell)]
    points = "; ".join(filter(None, (results.describe_point(results.format_point(plan, cell)) for cell in cells)))
    return " ".join(filter(None, (plan.title(run.algorithm), points, f"seed {run.seed}")))


def _find_run_name(names: dict[Path, str], job: LoggedJob) -> str:
    """Find the description of a job's run."""
    output_ancestors = {ancestor for path in job.outputs for ancestor in (path, *path.parents)}
    return next((name for path, name in names.items() if path in output_ancestors), "")


def _has_written_log(files: RunFiles, start_time: float) -> bool:
    """Whether a job of the run has written its log since then."""
    logs = Path("results/logs").glob(f"*/{files.path.parent.name}-{files.path.name}*.log")
    return any(modification_time >= start_time for modification_time in _get_modification_times(logs))


def _count_complete_rounds(files: RunFiles, total_rounds: int) -> int:
    complete_count = 0
    while complete_count < total_rounds and is_stored(files.round(complete_count + 1).marker):
        complete_count += 1
    return complete_count


def _read_accuracy(protocol: str, files: RunFiles, complete_rounds: int) -> float | None:
    for number in range(complete_rounds, 0, -1):
        if is_stored(files.round(number).metrics):  # an evaluated round
            return callbacks.read_accuracies(files, number).get(protocol, math.nan)
    return None


def _read_round_seconds(files: RunFiles, complete_rounds: int) -> float | None:
    round_seconds: list[float] = []
    for number in range(max(complete_rounds - RECENT_ROUNDS, 0) + 1, complete_rounds + 1):
        try:
            times = read_json(files.round(number).times)
            round_seconds.append(sum(times.get(name, 0) for name in results.TIMED_PHASES))
        except ArtifactError:  # times have no checksum
            continue
    return sum(round_seconds) / len(round_seconds) if round_seconds else None


def _read_logged_jobs() -> list[LoggedJob]:
    """Read the records of all snakemakes' jobs in order of time."""
    jobs = []
    for path in RECORDS_FOLDER.glob("*.jsonl"):
        with suppress(FileNotFoundError):  # a starting snakemake deletes the oldest records
            jobs += _read_logged_jobs_of_file(path, path.stat().st_size)
    return sorted(jobs, key=lambda job: job.timestamp)


@functools.cache
def _read_logged_jobs_of_file(path: Path, file_size: int) -> list[LoggedJob]:
    """Parse the jobs in a file of records. Its size is in the key of the cache, because Snakemake appends to it."""
    jobs = []
    submit_times: dict[int, float] = {}  #: by number of the job
    for record in read_records(path):
        with suppress(LookupError, TypeError, ValueError):  # a damaged line, or an unknown job
            if not record["log"]:
                continue
            if record["event"] == "job_info":
                submit_times[record["job"]] = record["time"]
            jobs.append(
                LoggedJob(
                    record["rule"],
                    record["event"] == "job_error",
                    [Path(output) for output in record["output"]],
                    [Path(log) for log in record["log"]],
                    float(record["time"]),
                    submit_times.get(record["job"], 0.0),
                    record.get("error", ""),
                    record.get("interrupted", False),
                )
            )
    return jobs


def _get_modification_times(paths: Iterable[Path]) -> list[float]:
    """Get the modification times of files. Snakemake may delete one meanwhile."""
    modification_times = []
    for path in paths:
        with suppress(FileNotFoundError):
            modification_times.append(path.stat().st_mtime)
    return modification_times


def _read_log_tail(job: LoggedJob) -> list[str]:
    for log in job.logs:
        with suppress(FileNotFoundError):
            if text := log.read_text(errors="replace").strip():
                return text.splitlines()[-LOG_LINES:]
    return [f"its log is empty: {job.error or 'the job was killed or did not start'}"]


def _render_failure(failure: Failure) -> list[Text]:
    head = Text(f"\n{failure.rule} failed: {failure.log}", STYLES["failed"])
    return [head, *(Text(f"  {line}") for line in failure.lines)]
