"""The jobs of all Snakemakes in this folder, from the records of the logger plugin `fedpipe`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from snakemake_logger_plugin_fedpipe import RECORDS_FOLDER, has_ended, read_records

ROUND_RULES = ("segment", "init", "train", "aggregate", "evaluate")  #: rules that compute rounds of a run
SNAKEMAKE_FOLDER = Path(".snakemake")
STOPPED_PATTERN = r": stopped by SIGTERM after round \d+\b[^\n]*\s*\Z"  #: end of a segment's log that is not a failure


@dataclass(frozen=True)
class LoggedJob:
    """The last record of a job."""

    rule: str
    has_failed: bool
    outputs: list[Path]
    logs: list[Path]  #: log of the job, then Slurm's
    timestamp: float  #: time of the record in seconds since the epoch
    submit_time: float = 0.0  #: time of submission
    is_finished: bool = False
    error: str = ""  #: reason of the failure, from the executor
    is_interrupted: bool = False  #: ended by Ctrl+C

    @cached_property
    def outputs_and_parent_folders(self) -> set[Path]:
        """Its outputs and the folders that contain them."""
        return {ancestor for path in self.outputs for ancestor in (path, *path.parents)}

    @property
    def run_folder(self) -> Path | None:
        """Folder of the run whose rounds it computes, if it does."""
        return Path(*self.outputs[0].parts[:4]) if self.rule in ROUND_RULES else None

    @property
    def has_started(self) -> bool:
        """Whether it has written to its log since its submission."""
        # File systems may round times down to seconds.
        return any(time >= math.floor(self.timestamp) for time in get_modification_times(self.logs[:1]))

    def is_newer_than(self, snakemake_start: float | None) -> bool:
        """Whether its record is from a Snakemake that runs since ``snakemake_start``."""
        return snakemake_start is not None and self.timestamp >= math.floor(snakemake_start)

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl+C ended it, or SIGTERM ended a segment after a round, which its log's last line shows.

        False for a segment without its own log, because the log belongs to the previous job.
        """
        if self.is_interrupted:
            return True
        with suppress(FileNotFoundError):
            is_current_log = self.logs[0].stat().st_mtime >= math.floor(self.submit_time)
            return (
                self.has_failed
                and is_current_log
                and bool(re.search(STOPPED_PATTERN, self.logs[0].read_text(errors="replace")))
            )
        return False


def read_last_job_records() -> list[LoggedJob]:
    """Read the last record of each job of all Snakemakes, in order of time."""
    jobs: list[LoggedJob] = []
    for path in RECORDS_FOLDER.glob("*.jsonl"):
        with suppress(FileNotFoundError):  # a starting snakemake deletes the oldest records
            jobs += _read_logged_jobs_of_file(path, path.stat().st_size)
    return [*{job.logs[0]: job for job in _drop_replaced_jobs(sorted(jobs, key=lambda job: job.timestamp))}.values()]


def find_snakemake_start() -> float | None:
    """Find when the running Snakemake locked its outputs. None if none runs, or if it was killed on this machine."""
    lock_times = get_modification_times((SNAKEMAKE_FOLDER / "locks").glob("*"))
    if not lock_times:
        return None
    record_times = {path: time for path in RECORDS_FOLDER.glob("*.jsonl") for time in get_modification_times([path])}
    recent_records = [path for path, time in record_times.items() if time >= min(lock_times)]
    # If a lock is newer than all records, its Snakemake may not have begun a job, and has no record yet.
    has_record = bool(recent_records) and max(lock_times) <= max(record_times.values())
    return None if has_record and all(map(has_ended, recent_records)) else min(lock_times)


def get_modification_times(paths: Iterable[Path]) -> list[float]:
    """Get the modification times of files. Snakemake may delete one meanwhile."""
    modification_times = []
    for path in paths:
        with suppress(FileNotFoundError):
            modification_times.append(path.stat().st_mtime)
    return modification_times


@functools.cache
def _read_logged_jobs_of_file(path: Path, file_size: int) -> list[LoggedJob]:
    """Parse the jobs in a file of records. Its size is in the key of the cache, because Snakemake appends to it."""
    jobs: list[LoggedJob] = []
    submit_times: dict[int, float] = {}  #: by number of the job
    last_jobs: dict[int, LoggedJob] = {}
    for record in read_records(path):
        with suppress(LookupError, TypeError, ValueError):  # a damaged line, or an unknown job
            if record["event"] == "job_finished":
                jobs.append(replace(last_jobs[record["job"]], timestamp=float(record["time"]), is_finished=True))
                continue
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
                    error=record.get("error", ""),
                    is_interrupted=record.get("interrupted", False),
                )
            )
            last_jobs[record["job"]] = jobs[-1]
    return jobs


def _drop_replaced_jobs(jobs: list[LoggedJob]) -> list[LoggedJob]:
    """Drop the jobs of a run that another division of its rounds into jobs has replaced.

    Segments of a run follow one another, so an earlier one with another last round belongs to an earlier study. And a
    run is computed either by segments or by jobs of single rounds.
    """
    last_jobs = {job.run_folder: job for job in jobs}
    return [
        job
        for job in jobs
        if job.run_folder is None
        or job.outputs == last_jobs[job.run_folder].outputs
        or "segment" not in (job.rule, last_jobs[job.run_folder].rule)
    ]
