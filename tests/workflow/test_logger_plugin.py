"""The logger plugin `fedpipe`, with jobs that succeed, fail and are killed."""

import inspect
import io
import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake_interface_logger_plugins.common import LogEvent

import snakemake_logger_plugin_fedpipe as plugin
from snakemake_logger_plugin_fedpipe import progress
from tests.small_studies import ROOT

SNAKEFILE = """
COMMANDS = {"good": "touch good.txt", "bad": "exit 3", "killed": "kill -9 $$", "interrupted": "kill -INT $$"}
rule all:
    input: expand("{name}.txt", name=COMMANDS)
rule work:
    output: "{name}.txt"
    log: "{name}.log"
    params: command=lambda wildcards: COMMANDS[wildcards.name]
    shell: "{params.command} > {log} 2>&1"
"""


def run_snakemake(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snakemake", "--logger", "fedpipe", "--cores", "4", "--keep-going"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def read_files() -> list[list[dict[str, Any]]]:
    return [list(plugin.read_records(path)) for path in sorted(plugin.RECORDS_FOLDER.glob("*"))]


@pytest.fixture(autouse=True)
def write_snakefile(in_empty_folder: Path) -> None:
    (in_empty_folder / "Snakefile").write_text(SNAKEFILE)


def test_snakemake_started_by_logger_plugin_imports_no_pandas() -> None:
    """A plugin that imports pandas later gets the real package."""
    Path("Snakefile").write_text(
        "import sys\n"
        "from snakemake_executor_plugin_slurm import efficiency_report\n"
        "print('pandas' in sys.modules, efficiency_report.parse_reqmem('4G'))\n"
        "import pandas\n"
        "print(pandas.isna is efficiency_report.pd.isna, *sys.argv)\n"
    )
    command = [sys.executable, "-P", "-m", "snakemake_logger_plugin_fedpipe", "-n"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.stdout.splitlines()[:2] == ["False 4096.0", "True snakemake -n"], process.stderr


@pytest.mark.slow
def test_quiet_snakemake_records_end_of_each_job() -> None:
    assert run_snakemake("-n").returncode == 0
    assert not plugin.RECORDS_FOLDER.exists(), "a dry run starts no jobs"
    assert run_snakemake("--quiet", "rules", "host").returncode == 1
    (records,) = read_files()
    jobs = {record["log"][0].removesuffix(".log"): record for record in records if record.get("rule") == "work"}
    assert [(name, record["event"]) for name, record in sorted(jobs.items())] == [
        ("bad", "job_error"),
        ("good", "job_info"),
        ("interrupted", "job_error"),
        ("killed", "job_error"),
    ]
    assert {name: record["error"] for name, record in jobs.items() if name != "good"} == {
        "bad": "returned non-zero exit status 3.",
        "killed": "died with <Signals.SIGKILL: 9>.",
        "interrupted": "died with <Signals.SIGINT: 2>.",
    }
    assert [name for name, record in jobs.items() if record.get("interrupted")] == ["interrupted"]
    assert all((record["output"], record["log"]) == ([f"{name}.txt"], [f"{name}.log"]) for name, record in jobs.items())
    assert jobs["good"]["wildcards"] == {"name": "good"}
    begins = {record["job"]: record["time"] for record in records if record["event"] == "job_info"}
    ends = {record["job"]: record["time"] for record in records if record["event"] != "job_info"}
    assert begins.keys() == ends.keys()
    assert len(ends) == 4
    assert all(ends[job] >= begins[job] for job in ends)


def test_job_records_have_file_per_snakemake_and_limit() -> None:
    plugin.RECORDS_FOLDER.mkdir(parents=True)
    for number in range(plugin.FILE_LIMIT + 20):
        (plugin.RECORDS_FOLDER / f"{number:019}-1.jsonl").write_text(json.dumps({"number": number}))
    run_snakemake("good.txt")
    contents = read_files()
    assert len(contents) == plugin.FILE_LIMIT
    assert contents[0] == [{"number": 21}]
    assert [record["event"] for record in contents[-1]] == ["job_info", "job_finished"]
    assert "Nothing to be done" in run_snakemake("good.txt").stderr
    assert read_files() == contents, "it started no jobs"


def test_records_of_other_machines_and_files_of_users_are_of_no_ended_snakemake() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {
        f"1-{ended.pid}-{platform.node()}": True,
        f"1-{os.getpid()}-{platform.node()}": False,
        f"1-{ended.pid}-other-node": False,
        "copy": False,
        "1-copy": False,
    }
    assert {name: plugin.has_ended(Path(f"{name}.jsonl")) for name in names} == names


def test_snakemake_warns_once_about_unwritable_job_records() -> None:
    Path(".snakemake").mkdir()
    Path(".snakemake/fedpipe").write_text("a file where a folder should be")
    result = run_snakemake("good.txt", "bad.txt", "killed.txt")
    assert result.stderr.count("fedpipe: .snakemake/fedpipe/jobs: ") == 1
    assert "`fedpipe status`" in result.stderr
    assert Path("good.txt").exists()


class Printer(progress.ProgressPrinter):
    """A printer that has received Snakemake's table of jobs. It prints to a text by default."""

    def __init__(self, stream: TextIO | None = None, **stats: int) -> None:
        self.stream = stream or io.StringIO()
        super().__init__(self.stream, is_dry_run=False, is_quiet=False)
        self.print_fields(event=LogEvent.RUN_INFO, stats=stats | {"all": 1, "total": sum(stats.values()) + 1})

    def print_fields(self, **fields: Any) -> None:
        self.print_record(logging.makeLogRecord(fields))

    def begin_job(self, number: int, rule: str, time: float) -> None:
        self.print_fields(event=LogEvent.JOB_INFO, jobid=number, rule_name=rule, wildcards={}, created=time)

    def end_job(self, number: int, time: float) -> None:
        self.print_fields(event=LogEvent.JOB_FINISHED, job_id=number, created=time)

    @property
    def lines(self) -> list[str]:
        assert isinstance(self.stream, io.StringIO)
        return self.stream.getvalue().splitlines()


def test_time_left_depends_on_long_and_parallel_jobs() -> None:
    printer = Printer(partition=1, segment=9, table=1)
    printer.begin_job(1, "partition", 0)
    printer.end_job(1, 1)
    printer.begin_job(2, "segment", 1)
    printer.begin_job(3, "segment", 1)
    printer.end_job(2, 101)
    printer.end_job(3, 201)
    for number in range(4, 11):
        printer.begin_job(number, "segment", 201)
        printer.end_job(number, 201)
    printer.begin_job(11, "table", 201)
    printer.end_job(11, 204)
    assert printer.lines[:4] == [
        "11 jobs",
        " 1 of 11  partition (1 s)",
        " 2 of 11  segment (1 min 40 s, about 6 min 40 s left)",  # eight of 100 s, two at the same time
        " 3 of 11  segment (3 min 20 s, about 17 min 30 s left)",  # seven of 150 s
    ]
    assert printer.lines[-2:] == ["10 of 11  segment (0 s)", "11 of 11  table (3 s)"]


def test_progress_of_search_counts_jobs_that_snakemake_adds() -> None:
    """The time left is unknown, because it is that of the known jobs."""
    printer = Printer(segment=2, rank=1)
    for number, (rule, total) in enumerate((("segment", 4), ("segment", 4), ("rank", 4), ("segment", 7), ("table", 7))):
        printer.begin_job(number, rule, 0)
        printer.end_job(number, 10)
        printer.print_fields(event=LogEvent.PROGRESS, done=number, total=total)
    assert printer.lines == [
        "3 jobs, and more after each rung of tune",
        "1 of 3  segment (10 s)",
        "2 of 3  segment (10 s)",
        "3 of 3  rank (10 s)",
        "4 of 4  segment (10 s)",
        "5 of 6  table (10 s)",
    ]


def test_progress_ignores_failure_of_job_that_succeeds_later() -> None:
    Path("job.log").write_text("fedpipe: model.name: 'x' is unknown.\n")
    printer = Printer(segment=2)
    for number in (1, 2):
        printer.begin_job(number, "segment", 0)
        printer.print_failure(number, "returned non-zero exit status 1.", ["job.log"], is_stopped=False)
    printer.begin_job(1, "segment", 10)
    printer.end_job(1, 20)
    printer.print_fields(msg=f"{progress.LOG_FILE_HINT}{Path('all.log').absolute()}")
    printer.print_end()
    printer.print_end()
    assert printer.lines == [
        *("2 jobs", "failed  segment", "failed  segment", "1 of 2  segment (10 s)"),
        *("1 job failed. Complete log: all.log", "Log of the failed job: job.log"),
        "ERROR segment: model.name: 'x' is unknown.",
    ]


def test_progress_omits_complete_log_that_snakemake_does_not_name() -> None:
    """For example, the disk is full."""
    printer = Printer(segment=1)
    printer.begin_job(1, "segment", 0)
    printer.print_failure(1, "returned non-zero exit status 2.", ["job.log"], is_stopped=False)
    printer.print_end()
    assert printer.lines[2:4] == ["1 job failed.", "Log of the failed job: job.log"]


def test_progress_prints_only_errors_and_warnings_without_job() -> None:
    printer = Printer()
    messages = {
        "Building DAG of jobs...": (logging.INFO, None),
        "LockException:\nDirectory cannot be locked.": (logging.ERROR, LogEvent.ERROR),
        "The disk is slow.": (logging.WARNING, None),
        "Error in rule a": (logging.ERROR, LogEvent.JOB_ERROR),
    }
    for message, (level, event) in messages.items():
        printer.print_fields(msg=message, levelno=level, event=event)
    assert printer.lines == ["LockException:", "Directory cannot be locked.", "The disk is slow."]


def test_closed_pipe_of_output_raises_no_error() -> None:
    """Snakemake's thread of records would end with the error, for example of `fedpipe run | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    printer = Printer(stream, segment=1)
    printer.begin_job(1, "segment", 0)
    printer.end_job(1, 20)
    printer.print_end()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_ctrl_c_message_matches_snakemake() -> None:
    assert f'"{progress.CTRL_C_MESSAGE}' in inspect.getsource(JobScheduler.schedule)
