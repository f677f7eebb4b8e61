"""The console of `fedpipe run`: one line per finished job instead of Snakemake's output.

The last line of a failed run is the error message of its first failed job. Snakemake's complete output is in a file,
whose path is printed after a failure.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake_interface_logger_plugins.common import LogEvent

if TYPE_CHECKING:
    from fedpipe.workflow.dag import Dag

LOG_FILE_HINT = "Complete log(s): "  #: start of Snakemake's message about its log file
#: Start of the message of `JobScheduler.schedule` after Ctrl+C. Later errors are those of jobs that Snakemake ended.
CTRL_C_MESSAGE = "Terminating processes on user request"
SHOWN_MESSAGES = (NOTHING_TO_BE_DONE_MSG, CTRL_C_MESSAGE, "Unlocked working directory.")
#: Errors that this console describes itself: a command that failed, and the end of a run with failed jobs.
JOB_ERRORS = (
    "RuleException:\nCalledProcessError",
    "Exiting because a job execution failed",
    "WorkflowError:\nAt least one job did not complete successfully.",
)
TARGET_RULE = "all"  #: rule without a job, which is not counted
RANK_RULES = "rank"  #: start of the names of the rules that rank draws of `tune`, after which Snakemake adds jobs
LONG_RULES = ("segment", "train", "diagnostic")  #: rules whose jobs take most of the time


study: Dag | None = None  #: DAG of this process. The Snakefile sets it


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    rule: str
    description: str
    start: float  #: seconds since the epoch


class ProgressPrinter:
    """Prints what Snakemake's records say about jobs.

    A dry run prints the jobs to do instead of finished jobs. With ``is_quiet``, only warnings and errors are printed.
    """

    def __init__(self, stream: TextIO, is_dry_run: bool, is_quiet: bool) -> None:
        self._stream = stream
        self._is_dry_run = is_dry_run
        self._is_quiet = is_quiet
        self._total = 0  #: number of known jobs
        self._num_targets = 0  #: number of jobs that are not counted
        self._has_search = False  #: whether `tune` adds jobs
        self._done = 0
        self._remaining: Counter[str] = Counter()  #: number of remaining jobs by rule
        self._running: dict[int, Job] = {}
        self._failures: dict[int, tuple[str, str, str]] = {}  #: description, error and log of each failed job
        self._seconds: dict[str, list[float]] = defaultdict(list)  #: of finished jobs by rule
        self._log_file = ""

    def print_record(self, record: logging.LogRecord) -> None:
        """Print a record that is neither about a failed job nor part of Snakemake's usual output."""
        fields: Any = record
        event, message = getattr(record, "event", None), str(record.msg)
        if event == LogEvent.RUN_INFO and not self._total:
            self._print_work(fields.stats)
        elif event == LogEvent.PROGRESS:
            self._total = max(self._total, fields.total - self._num_targets)
        elif event == LogEvent.JOB_INFO:
            self._begin_job(fields)
        elif event == LogEvent.JOB_FINISHED:
            self._end_job(fields.job_id, fields.created)
        elif message.startswith(LOG_FILE_HINT):
            self._log_file = message.removeprefix(LOG_FILE_HINT)
        elif (
            message.startswith(SHOWN_MESSAGES)
            or (record.levelno >= logging.WARNING and event in (None, LogEvent.ERROR))
        ) and not message.startswith(JOB_ERRORS):
            self._print(message)

    def print_failure(self, number: int, error: str, logs: Sequence[str], is_stopped: bool) -> None:
        """Print that a job failed. ``error`` is its cause if its log is empty."""
        job = self._running.pop(number, None)
        if job is None:
            return
        self._remaining[job.rule] -= 1
        if not is_stopped:
            log, lines = read_log_tail([Path(log) for log in logs], 1, error)
            self._failures[number] = (job.description, lines[-1].strip().removeprefix("fedpipe: "), str(log))
            self._print_job("failed", job.description)

    def print_end(self) -> None:
        """If jobs have failed, print where the logs are, and the error of the first one as the last line."""
        if not self._failures:
            return
        description, error, log = next(iter(self._failures.values()))
        count = len(self._failures)
        self._failures.clear()  # Snakemake and Python both close a logger
        # There is none if the disk is full.
        log_file = f" Complete log: {_shorten_path(self._log_file)}" if self._log_file else ""
        self._print(f"{count} job{'s' if count > 1 else ''} failed.{log_file}")
        self._print(f"Log of the {'first ' if count > 1 else ''}failed job: {_shorten_path(log)}")
        self._print(f"ERROR {description}: {error}")

    def _print_work(self, stats: Mapping[str, int]) -> None:
        self._remaining = Counter({rule: count for rule, count in stats.items() if rule not in ("total", TARGET_RULE)})
        self._total, self._num_targets = self._remaining.total(), stats.get(TARGET_RULE, 0)
        self._has_search = any(rule.startswith(RANK_RULES) for rule in self._remaining)
        work = f"{study.describe_remaining_runs()}, " if study else ""
        later = ", and more after each rung of tune" if self._has_search else ""
        if self._total and not self._is_quiet:
            self._print(f"{work}{self._total} job{'s' if self._total > 1 else ''}{later}")

    def _begin_job(self, fields: Any) -> None:
        if fields.rule_name == TARGET_RULE:
            return
        wildcards = {name: str(value) for name, value in fields.wildcards.items()}
        description = study.describe_job(fields.rule_name, wildcards) if study else fields.rule_name
        if self._failures.pop(fields.jobid, None):
            self._remaining[fields.rule_name] += 1  # another attempt
        self._running[fields.jobid] = Job(fields.rule_name, description, fields.created)
        self._total = max(self._total, self._done + len(self._running))  # if something else adds jobs
        if self._is_dry_run:
            self._end_job(fields.jobid, fields.created)

    def _end_job(self, number: int, time: float) -> None:
        parallel_jobs = len(self._running)
        job = self._running.pop(number, None)
        if job is None:
            return
        self._done += 1
        self._remaining[job.rule] -= 1
        self._seconds[job.rule].append(time - job.start)
        if not self._is_quiet:
            times = "" if self._is_dry_run else self._format_times(time - job.start, parallel_jobs)
            self._print_job(f"{self._done} of {self._total}", f"{job.description}{times}")

    def _print_job(self, state: str, description: str) -> None:
        self._print(f"{state:>{max(len(f'{self._total} of {self._total}'), len('failed'))}}  {description}")

    def _format_times(self, seconds: float, parallel_jobs: int) -> str:
        from fedpipe.report.words import format_duration  # only now, see the package's docstring

        seconds_left = self._estimate_time_left(parallel_jobs)
        time_left = "" if seconds_left is None else f", about {format_duration(seconds_left)} left"
        return f" ({format_duration(seconds)}{time_left})"

    def _estimate_time_left(self, parallel_jobs: int) -> float | None:
        """Estimate the seconds until the end from the mean of the finished jobs of each rule.

        None if no long job remains, before the first job of a long rule has finished, or if `tune` adds jobs.
        """
        rules = [rule for rule in LONG_RULES if self._remaining[rule] > 0]
        if self._has_search or not rules or any(rule not in self._seconds for rule in rules):
            return None
        seconds = sum(self._remaining[rule] * fmean(self._seconds[rule]) for rule in rules)
        return seconds / max(parallel_jobs, 1)

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe, as of `| head`, must not end the records of jobs
            self._stream.write(f"{text}\n")  # one write, because another thread prints the end of the run
            self._stream.flush()


def read_log_tail(logs: Sequence[Path], limit: int, error: str) -> tuple[Path, list[str]]:
    """Read the last lines of the first log that has some, and return them with its path.

    If all logs are empty, the line is the cause of the failure that the executor reports.
    """
    for log in logs:
        try:
            text = log.read_text(errors="replace").strip()
        except FileNotFoundError:
            continue
        if text:
            return log, text.splitlines()[-limit:]
    return logs[0], [f"its log is empty: {error or 'the job was killed or did not start'}"]


def _shorten_path(path: str) -> str:
    """Shorten a path in the current folder."""
    return path.removeprefix(f"{Path.cwd()}/")
