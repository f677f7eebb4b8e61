"""The logger `fedpipe`: the start and end of each job, as lines of JSON that `fedpipe status` reads.

Snakemake finds this package by its name, and profiles/default names it. Each Snakemake that starts jobs writes one file
in `.snakemake/fedpipe/jobs`, and the newest `FILE_LIMIT` files are kept. A line has the event (`job_info` for a
submitted job, `job_finished`, `job_error`), its time in seconds since the epoch and the number of the job. Lines of
`job_info` and `job_error` also have its rule, outputs and logs. A `job_info` has its wildcards, and a `job_error` has
its cause and whether Ctrl+C ended the job.

With the option `--logger-fedpipe-progress` of `fedpipe run`, the logger also prints one line per job instead of
Snakemake's output (`progress.py`).

Snakemake imports this package before it reads a Snakefile. So nothing here imports fedpipe: the Snakefile would get
that fedpipe, and not the one of its own folder.
"""

# Without `from __future__ import annotations`, because Snakemake reads the types of the fields of LogHandlerSettings.
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from logging import LogRecord
from pathlib import Path
from typing import Any, TextIO

from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import LogHandlerSettingsBase
from typing_extensions import override

from snakemake_logger_plugin_fedpipe.progress import CTRL_C_MESSAGE, ProgressPrinter

__all__ = ["LogHandler", "LogHandlerSettings", "has_ended", "read_records"]

RECORDS_FOLDER = Path(".snakemake/fedpipe/jobs")
FILE_LIMIT = 100
#: End of subprocess.CalledProcessError if Ctrl+C ended the command, perhaps before Snakemake noticed it.
INTERRUPTS = ("returned non-zero exit status 130.", "died with <Signals.SIGINT: 2>.")


@dataclass
class LogHandlerSettings(LogHandlerSettingsBase):
    """Options of the logger on Snakemake's command line."""

    progress: bool = field(
        default=False, metadata={"help": "Print one line per finished job instead of Snakemake's output."}
    )


class LogHandler(LogHandlerBase):
    """Writes a line for each job that is submitted, is finished or fails."""

    def __post_init__(self) -> None:
        self._file: TextIO | None = None
        self._has_failed = False  #: whether writing failed, which is reported once
        self._was_interrupted = False
        self._error_messages: list[str] = []  #: messages about commands. Snakemake names their jobs next
        self._printer: ProgressPrinter | None = None
        if isinstance(self.settings, LogHandlerSettings) and self.settings.progress:
            stream = sys.stdout if self.common_settings.stdout else sys.stderr
            is_quiet = not {Quietness.PROGRESS, Quietness.ALL}.isdisjoint(self.common_settings.quiet or ())
            self._printer = ProgressPrinter(stream, self.common_settings.dryrun, is_quiet)

    @override
    def emit(self, record: Any) -> None:
        """Write a line if the record is about a job. Print the progress."""
        if self._printer:
            self._printer.print_record(record)
        event, message = getattr(record, "event", None), str(record.msg)
        if message.startswith(CTRL_C_MESSAGE):
            self._was_interrupted = True
        elif event == LogEvent.ERROR:
            self._error_messages.append(message)
        elif event == LogEvent.JOB_INFO:
            wildcards = {name: str(value) for name, value in record.wildcards.items()}
            self._write(record, event, record.jobid, _describe_job(record) | {"wildcards": wildcards})
        elif event == LogEvent.JOB_FINISHED:
            self._write(record, event, record.job_id, {})
        elif event == LogEvent.JOB_ERROR:
            error = self._describe_error(record)
            job = _describe_job(record)
            self._write(record, event, record.jobid, job | error)
            if self._printer:
                self._printer.print_failure(record.jobid, error["error"], job["log"], error["interrupted"])

    def _describe_error(self, record: Any) -> dict[str, Any]:
        """Get the cause of a failed job: the message of its executor, or the end of its command's message."""
        separator = f"{record.shellcmd}' "
        endings = [text.partition(separator)[2].partition("\n")[0] for text in self._error_messages]
        self._error_messages = [text for text in self._error_messages if separator not in text]
        error = record.rule_msg or next(filter(None, endings), "")
        return {"error": error, "interrupted": self._was_interrupted or error in INTERRUPTS}

    def _write(self, record: LogRecord, event: LogEvent, job: int, fields: dict[str, Any]) -> None:
        if self.common_settings.dryrun or self._has_failed:
            return
        try:
            self._file = self._file or _open_file()
            self._file.write(json.dumps({"event": str(event), "time": record.created, "job": job} | fields) + "\n")
            self._file.flush()
        except OSError as error:
            self._has_failed = True
            print(f"fedpipe: {RECORDS_FOLDER}: {error.strerror}. `fedpipe status` lacks these jobs.", file=sys.stderr)

    def close(self) -> None:
        """Close the file, and print the end of the progress."""
        if self._printer:
            self._printer.print_end()
        if self._file:
            self._file.close()
        super().close()

    @property
    @override
    def writes_to_stream(self) -> bool:
        """Whether this logger replaces Snakemake's output."""
        return self._printer is not None

    writes_to_file = False  # for log files whose path Snakemake prints at its end
    has_filter = True  # so that --quiet has no effect on records
    has_formatter = True
    needs_rulegraph = False


def has_ended(path: Path) -> bool:
    """Whether the Snakemake that wrote this file ran on this machine and has ended."""
    import psutil

    process_id, _, machine = path.stem.partition("-")[2].partition("-")
    return machine == platform.node() and process_id.isdecimal() and not psutil.pid_exists(int(process_id))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a file, except damaged ones, because Snakemake may have been killed while it wrote."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _describe_job(record: Any) -> dict[str, Any]:
    return {
        "rule": record.rule_name,
        "output": [str(path) for path in record.output],
        "log": [str(path) for path in record.log],
    }


def _open_file() -> TextIO:
    """Open a new file and remove the oldest ones."""
    RECORDS_FOLDER.mkdir(parents=True, exist_ok=True)
    for path in sorted(RECORDS_FOLDER.glob("*.jsonl"))[: 1 - FILE_LIMIT]:
        path.unlink(missing_ok=True)
    return (RECORDS_FOLDER / f"{time.time_ns()}-{os.getpid()}-{platform.node()}.jsonl").open("x")
