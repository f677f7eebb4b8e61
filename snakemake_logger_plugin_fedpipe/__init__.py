"""The logger `fedpipe`: what happens to each job, as lines of JSON that `fedpipe status` reads.

Snakemake finds this package by its name, and profiles/default names it. Each snakemake that starts jobs writes a file
of its own in `.snakemake/fedpipe/jobs`, and the newest `FILE_LIMIT` files are kept. A line has the event (`job_info`: a
job was submitted, `job_finished`, `job_error`), its time in seconds since the epoch and the number of the job. The
first and the last also have its rule, outputs and logs. The first has its wildcards, the last its cause and whether
Ctrl+C ended the job.

Snakemake imports this package before it reads a Snakefile. So nothing here imports fedpipe: the Snakefile would get
that fedpipe, and not the one of its own folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from logging import LogRecord
from pathlib import Path
from typing import Any, TextIO

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

RECORDS_FOLDER = Path(".snakemake/fedpipe/jobs")
FILE_LIMIT = 100
#: How `JobScheduler.schedule` begins its message after Ctrl+C. From then on errors are of jobs that Snakemake ended.
CTRL_C_MESSAGE = "Terminating processes on user request"
#: How subprocess.CalledProcessError ends if the command died of Ctrl+C, perhaps before Snakemake noticed it.
INTERRUPTS = ("returned non-zero exit status 130.", "died with <Signals.SIGINT: 2>.")


class LogHandler(LogHandlerBase):
    """Writes a line for each job that is submitted, is finished or fails."""

    def __post_init__(self) -> None:
        self._file: TextIO | None = None
        self._has_failed = False  #: to write, which is reported once
        self._was_interrupted = False
        self._error_messages: list[str] = []  #: of commands. Snakemake names their jobs next

    def emit(self, record: Any) -> None:
        """Write a line if the record is about a job."""
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
            self._write(record, event, record.jobid, _describe_job(record) | self._describe_error(record))

    def _describe_error(self, record: Any) -> dict[str, Any]:
        """Why a job failed: the message of its executor, or how its command ended."""
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
            print(f"fedpipe: {RECORDS_FOLDER}: {error.strerror}; `fedpipe status` misses jobs.", file=sys.stderr)

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
        super().close()

    writes_to_stream = False
    writes_to_file = False  # of the kind whose path Snakemake prints at its end
    has_filter = True  # so that --quiet hides nothing
    has_formatter = True
    needs_rulegraph = False


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, except damaged ones: Snakemake may have been killed while it wrote."""
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
    """A new file; the oldest are removed."""
    RECORDS_FOLDER.mkdir(parents=True, exist_ok=True)
    for path in sorted(RECORDS_FOLDER.glob("*.jsonl"))[: 1 - FILE_LIMIT]:
        path.unlink(missing_ok=True)
    return (RECORDS_FOLDER / f"{time.time_ns()}-{os.getpid()}.jsonl").open("x")
