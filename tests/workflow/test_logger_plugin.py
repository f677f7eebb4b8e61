"""The logger plugin `fedpipe`, with jobs that succeed, fail and are killed."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from snakemake.scheduling.job_scheduler import JobScheduler

import snakemake_logger_plugin_fedpipe as plugin
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
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Snakefile").write_text(SNAKEFILE)


@pytest.mark.slow
def test_a_quiet_snakemake_records_how_each_job_ended() -> None:
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


def test_each_snakemake_has_a_file_and_the_oldest_are_removed() -> None:
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


def test_records_that_cannot_be_written_are_mentioned_once() -> None:
    Path(".snakemake").mkdir()
    Path(".snakemake/fedpipe").write_text("a file where a folder should be")
    result = run_snakemake("good.txt", "bad.txt", "killed.txt")
    assert result.stderr.count("fedpipe: .snakemake/fedpipe/jobs: ") == 1
    assert "`fedpipe status`" in result.stderr
    assert Path("good.txt").exists()


def test_snakemake_still_announces_ctrl_c_by_this_message() -> None:
    assert f'"{plugin.CTRL_C_MESSAGE}' in inspect.getsource(JobScheduler.schedule)
