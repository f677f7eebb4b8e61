"""Several jobs on one machine use different GPUs."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpipe.engine.torch_env import gpus

JOB = (
    "import sys; from fedpipe.engine.torch_env import gpus;"
    "print(gpus.acquire_gpu(['0', '1']), flush=True); sys.stdin.read()"
)


@contextmanager
def start_job(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a job on a machine with two GPUs. Yield the process and the index of its GPU."""
    command, environment = [sys.executable, "-c", JOB], {"TMPDIR": str(folder), "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_jobs_acquire_different_gpus_and_killed_job_releases_its_gpu(tmp_path: Path) -> None:
    with start_job(tmp_path) as (_, first_gpu), start_job(tmp_path) as (killed_job, second_gpu):
        assert {first_gpu, second_gpu} == {0, 1}
        with start_job(tmp_path) as (_, third_gpu), start_job(tmp_path) as (_, fourth_gpu):
            assert {third_gpu, fourth_gpu} == {0, 1}, "four jobs share two GPUs evenly"
        killed_job.kill()
        killed_job.wait()
        with start_job(tmp_path) as (_, next_gpu):
            assert next_gpu == second_gpu


def test_gpu_names_match_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.get_visible_gpu_ids(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert gpus.get_visible_gpu_ids(2) == ["2", "3"]
    assert gpus.get_visible_gpu_ids(1) == ["2"]
