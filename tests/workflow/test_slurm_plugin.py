"""Snakemake finds the executor and the logger by their names. tests/cluster runs the executor."""

import asyncio
import logging
import os
import signal
import site
import subprocess
import sys
import venv
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from typing_extensions import override

import snakemake_executor_plugin_fedpipe_slurm as plugin
from tests import small_studies as studies
from tests.pipeline.conftest import RunningCommand, wait_until
from tests.small_studies import ROOT

OPTIONS = ("--executor {fedpipe-slurm,", "--logger {fedpipe}", "--fedpipe-slurm-requeue")


def run_snakemake(*arguments: str, folder: Path, python: str = sys.executable, path: str = str(ROOT)) -> str:
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "300"}
    command = [python, "-m", "snakemake", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return result.stdout + result.stderr


@pytest.mark.slow
def test_editable_install_has_plugins_in_any_folder(tmp_path: Path) -> None:
    """Snakemake searches the folders of sys.path, which do not contain setuptools' finder for editable installs."""
    clone = studies.copy_project(tmp_path / "clone")
    venv.create(tmp_path / "venv")
    python, home = tmp_path / "venv/bin/python", next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (home / "shared.pth").write_text("\n".join([*site.getsitepackages(), ""]))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "-e", clone], check=True)
    output = run_snakemake("--help", folder=tmp_path, python=str(python), path="")
    assert all(option in output for option in OPTIONS)


def test_option_of_other_slurm_executor_is_rejected(tmp_path: Path) -> None:
    """The option would have no effect. It may also be in a profile."""
    (tmp_path / "Snakefile").write_text("rule one:\n    output: 'a'\n    shell: 'touch a'\n")
    arguments = ("--executor", "fedpipe-slurm", "--jobs", "1")
    message = "--slurm-{}. Use --fedpipe-slurm-{}, in a profile fedpipe-slurm-{}."
    assert message.replace("{}", "qos") in run_snakemake(*arguments, "--slurm-qos", "long", folder=tmp_path)
    (tmp_path / "config.yaml").write_text("slurm-no-account: true\n")
    output = run_snakemake(*arguments, "--profile", "config.yaml", folder=tmp_path)
    assert message.replace("{}", "no-account") in output
    assert output.count("Using profile") == 1
    output = run_snakemake(*arguments, "--fedpipe-slurm-array-jobs", "all", folder=tmp_path)
    assert "fedpipe: --fedpipe-slurm-array-jobs can't be used" in output
    assert not (tmp_path / "a").exists()


def test_error_before_submission_ends_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread submits the job. If the error were lost there, Snakemake would wait for the job forever."""
    executor, reports = plugin.Executor.__new__(plugin.Executor), list[str]()
    executor._rejected_runtimes, executor._output_times = {}, {}
    monkeypatch.setattr(executor, "_report_job_error_threadsafe", lambda info, message: reports.append(message))
    executor.run_job(type("Job", (), {"output": None})())
    assert reports == ["fedpipe: the job was not submitted (TypeError(\"'NoneType' object is not iterable\"))."]


@pytest.mark.parametrize("event", ["query", "submission"])
def test_interrupt_cancels_all_jobs(event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snakemake has no list of the jobs that it queries or submits. Here a query or a submission outlasts Ctrl-C."""
    commands = {
        "sbatch": "touch submission; echo $$ >> submitted; while [ ! -e ended ]; do sleep 0.1; done; echo $$",
        "squeue": "touch query; for n in $(seq 300); do [ -e cancelled ] || sleep 0.1; done; echo '1|RUNNING None'",
        "scancel": 'echo "$@" >> cancelled',
        "scontrol": '[ "$2" = config ] && echo "MinJobAge = 300 sec"',
        "sinfo": "exit 0",
        "sacct": "exit 1",
    }
    (tmp_path / "bin").mkdir()
    for name, script in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "Snakefile").write_text(
        "rule all:\n    input: expand('job{n}', n=range(9))\n"
        "rule one:\n    output: 'job{n}'\n    shell: 'touch {output}'\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = "all --executor fedpipe-slurm --jobs 9 --fedpipe-slurm-status-command squeue"
    options += " --fedpipe-slurm-init-seconds-before-status-checks 1"
    options += " --quiet rules"  # Snakemake ignores Ctrl-C while it writes a line about a job
    command = [sys.executable, "-m", "snakemake", *options.split()]
    if event == "query":
        (tmp_path / "ended").touch()
    log = tmp_path / "log"
    with (
        log.open("wb") as stream,
        RunningCommand(command, cwd=tmp_path, stdout=stream, stderr=subprocess.STDOUT) as running,
    ):
        try:
            wait_until((tmp_path / event).exists, running, event)
            if event == "query":
                wait_until(lambda: log.read_text().count("has been submitted") == 9, running, "the submissions")
            running.send_signal(signal.SIGINT)
            wait_until(lambda: "Terminating processes" in log.read_text(), running, "the interrupt")
            (tmp_path / "ended").touch()  # ends the submissions
            wait_until((tmp_path / "cancelled").exists, running, "the cancellation")
        finally:
            (tmp_path / "ended").touch()
            (tmp_path / "cancelled").touch()  # ends the query
    assert running.returncode
    *ids, name = (tmp_path / "cancelled").read_text().splitlines()
    submitted_ids = (tmp_path / "submitted").read_text().split()
    assert name.startswith("--name ")
    if event == "query":
        assert len(submitted_ids) == 9
        assert sorted(" ".join(ids).split()) == sorted(submitted_ids)
    else:
        assert len(submitted_ids) <= 4, "jobs were submitted after the interrupt"


class PolledExecutor(plugin.Executor):
    """The executor with jobs in these states, with answers of Slurm from this test."""

    def __init__(self, job_states: dict[str, str], monkeypatch: pytest.MonkeyPatch, requeue: bool = False) -> None:
        self.job_states, self.cancelled_ids, self.errors = job_states, list[str](), dict[str, str]()
        self._ended_job_ids, self._rejected_runtimes, self._submitted_job_clusters = set(), {}, set()
        self.run_uuid, self.logger = "name", logging.getLogger()
        self.workflow = SimpleNamespace(executor_settings=SimpleNamespace(requeue=requeue))
        jobs = {number: type("Job", (), {"resources": {}, "output": ["missing"]})() for number in job_states}
        infos = [SubmittedJobInfo(job, number, {"slurm_logfile": "log"}) for number, job in jobs.items()]
        self._output_times = {job: [None] for job in jobs.values()}
        self._active_infos = {info.external_jobid: info for info in infos}

        async def query(*arguments: object) -> tuple[dict[str, str], float]:
            return self.job_states, 0.0

        async def yield_all(executor: object, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
            for info in active_jobs:
                yield info

        monkeypatch.setattr(plugin, "query_job_status", query)
        monkeypatch.setattr(plugin.plugin.Executor, "check_active_jobs", yield_all)
        monkeypatch.setattr(plugin, "cancel_slurm_jobs", self.cancel_infos)

    def cancel_infos(self, infos: list[SubmittedJobInfo], *arguments: object) -> None:
        self.cancelled_ids += [info.external_jobid for info in infos]

    @override
    def report_job_error(self, job_info: SubmittedJobInfo, msg: str | None = None, **details: object) -> None:
        del self._active_infos[job_info.external_jobid]
        self.errors[job_info.external_jobid] = msg or ""

    def poll(self) -> list[str]:
        """Check all active jobs once. Return the ids of those that have not ended."""

        async def list_jobs() -> list[str]:
            return [info.external_jobid async for info in self.check_active_jobs(list(self._active_infos.values()))]

        return asyncio.run(list_jobs())


def test_unanswered_scancel_keeps_all_jobs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error in the thread that polls would end Snakemake without its jobs. The next poll cancels the job."""
    executor = PolledExecutor({"1": "PENDING PartitionTimeLimit", "2": "RUNNING None"}, monkeypatch)

    def raise_error(*arguments: object) -> None:
        raise WorkflowError("Unable to contact slurm controller")

    with monkeypatch.context() as patch:
        patch.setattr(plugin, "cancel_slurm_jobs", raise_error)
        assert executor.poll() == ["1", "2"]
    assert "Unable to contact slurm controller" in caplog.text
    assert (executor.poll(), executor.cancelled_ids, [*executor.errors]) == (["2"], ["1"], ["1"])


@pytest.mark.parametrize("requeue", [False, True])
def test_preempted_job_ends_if_slurm_does_not_queue_it_again(requeue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer Slurm than 22.05 keeps the state. A queue that has the job again at the next poll keeps the job."""
    executor = PolledExecutor({"1": "PREEMPTED None", "2": "PREEMPTED None"}, monkeypatch, requeue)
    assert executor.poll() == ["1", "2"]
    executor.job_states["2"] = "PENDING BeginTime"
    assert executor.poll() == (["1", "2"] if requeue else ["2"])
    assert executor.errors == ({} if requeue else {"1": plugin.PREEMPTED_MESSAGE})
    assert executor.cancelled_ids == ([] if requeue else ["1"])


@pytest.mark.parametrize(
    ("line", "is_slurms"),
    [
        ("slurmstepd: error: Exceeded job memory limit", True),
        ("slurmstepd-gpu1: error: Detected 1 oom-kill event(s) in StepId=7.batch. Some of your processes ...", True),
        ("[2026-11-29T21:52:34.030] error: Exceeded job memory limit", True),
        ("[2026-11-29T21:52:34.022] error: StepId=7.0 exceeded memory limit (1882816512 > 1572864000), ...", True),
        ("srun: error: gpu1: task 0: Out Of Memory", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("[2026-11-29T21:52:34] error: epoch failed, as PyTorch is out of cores", False),
    ],
)
def test_out_of_memory_lines_of_slurm_are_found(line: str, is_slurms: bool) -> None:
    assert bool(plugin.OUT_OF_MEMORY_PATTERN.search(f"before\n{line}\nafter\n")) == is_slurms


def test_plugins_do_not_import_fedpipe() -> None:
    """Snakemake imports the plugins before the Snakefile, which may belong to another copy of fedpipe."""
    program = (
        "import sys, snakemake_executor_plugin_fedpipe_slurm, snakemake_logger_plugin_fedpipe\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('fedpipe', 'torch')]"
    )
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def test_largest_memory_is_limited_by_requested_partitions_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of another partition may be a part of the requested one's name."""
    (tmp_path / "node").write_text(
        "NodeName=one Gres=(null) RealMemory=64000 MemSpecLimit=1000 Partitions=cpu\n"
        "NodeName=two Gres=gpu:a100:4 RealMemory=256000 Partitions=gpu,gpu-long\n"
    )
    (tmp_path / "partition").write_text(
        "PartitionName=cpu MaxMemPerNode=UNLIMITED\n"
        "PartitionName=gpu MaxMemPerNode=32000\n"
        "PartitionName=gpu-long MaxMemPerNode=UNLIMITED\n"
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ncat "{tmp_path}/$2"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    largest = {
        partitions: plugin._get_largest_memory(SimpleNamespace(resources={"slurm_partition": partitions}))
        for partitions in ("cpu", "gpu", "gpu-long", "cpu,gpu-long")
    }
    assert largest == {"cpu": 63000, "gpu": 32000, "gpu-long": 256000, "cpu,gpu-long": 256000}
