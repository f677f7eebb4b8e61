"""Faults of jobs, Slurm and Snakemake. The same command completes a study with equal bits.

Jobs of faulty_algorithms.py are slow until the test has observed them and calls `clone.skip_delays()`, so the tests do
not depend on the speed of the machine.
"""

import re
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.cluster.conftest import RUNS, STOPPED, Clone, count_submissions, faulty_study, parse_memory

pytestmark = pytest.mark.slow


def test_preempted_cancelled_and_failed_jobs_resume(clone: Clone, reference) -> None:
    """Jobs are preempted, a job is cancelled, another fails, and a node loses power."""
    labels = ("failing", "unlucky")
    params = faulty_study(*labels)
    clone.prepare_study(params)
    clone.set_profile(retries=5)
    running = clone.start(*RUNS)

    def attempt(number: int, ended: Collection[int] = ()) -> dict[str, int]:
        """Return the next job of each algorithm after both have completed a round."""
        clone.wait_until(
            lambda: len(clone.list_started_segments().keys() - ended) == 2, f"both did a round in attempt {number}"
        )
        return {label: job for job, label in clone.list_started_segments().items() if job not in ended}

    first = attempt(1)
    asked = {label: clone.cluster.details(job) for label, job in first.items()}
    gpus = {label: re.search(r"IDX:(\d)", job["GRES"])[1] for label, job in asked.items()}
    assert sorted(gpus.values()) == ["0", "1"]
    for label, gpu in gpus.items():
        environment = Path(f"/proc/{clone.find_training_process(first[label])}/environ").read_text().split("\0")
        assert f"CUDA_VISIBLE_DEVICES={gpu}" in environment
        assert f", GPU {gpu}" in clone.read_log(label)

    done, logs = clone.read_round_times(), [clone.open_log(label) for label in labels]
    clone.cluster.run("sbatch", "-p", "urgent", "--gpus=2", "-o", "/dev/null", "--wrap", "true")
    second = attempt(2, first.values())
    assert all(STOPPED in log.read() for log in logs), "both jobs should be preempted"
    for label, job in second.items():
        assert parse_memory(clone.cluster.details(job)) == parse_memory(asked[label]), (
            "a preempted job should request the same memory"
        )

    done, log = done | clone.read_round_times(), clone.open_log("failing")
    (clone.folder / "fail-once").touch()
    clone.cluster.run("scancel", str(second["unlucky"]))
    attempt(3, second.values())
    assert "a fault of the test" in log.read()

    done |= clone.read_round_times()
    clone.cluster.kill_node("gpu1")
    clone.wait_until(lambda: clone.cluster.state("gpu1")[0] == "DOWN", "Slurm missed the node")
    clone.skip_delays()
    clone.cluster.start_node("gpu1")
    output = clone.wait_for(running)
    assert "'CANCELLED'" in output
    assert "'NODE_FAIL'" in output
    assert clone.hash_runs() == dict.fromkeys(params["algorithms"], reference)
    assert done.items() <= clone.read_round_times().items(), "rounds were repeated"


def test_job_over_time_limit_resumes_in_next_job(clone: Clone, reference) -> None:
    """The profile requests GPUs of a model."""
    params = faulty_study("slow")
    clone.prepare_study(params)
    clone.set_profile(training={"gpu_model": "fake"})
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "a job completed a round")
    ((first, label),) = clone.list_started_segments().items()
    assert clone.cluster.details(first)["TresPerJob"] == "gres/gpu:fake:1"

    log = clone.open_log(label)
    # SIGTERM comes two minutes before the limit. Slurm checks limits every half minute.
    clone.cluster.run("scontrol", "update", f"JobId={first}", "TimeLimit=2")
    clone.wait_until(lambda: clone.list_started_segments().keys() - {first}, "the next did a round")
    assert STOPPED in log.read()
    done = clone.read_round_times()
    clone.skip_delays()
    clone.wait_for(running)
    assert clone.hash_runs() == dict.fromkeys(params["algorithms"], reference)
    assert done.items() <= clone.read_round_times().items()


def test_jobs_survive_slurm_outage_longer_than_its_memory(clone: Clone, reference) -> None:
    """While slurmctld is down, a job ends and another is killed. Slurm forgets both before Snakemake's second query."""
    params = faulty_study("ending", "dying")
    clone.prepare_study(params)
    running = clone.start(*RUNS)
    clone.wait_until(lambda: len(clone.list_started_segments()) == 2, "both did a round")
    jobs = {label: job for job, label in clone.list_started_segments().items()}
    trainers = {label: clone.find_training_process(job) for label, job in jobs.items()}
    clone.cluster.kill_controller()
    clone.cluster.kill(jobs["dying"])
    done = clone.read_round_times()
    clone.skip_delays()
    clone.wait_until(lambda: not Path(f"/proc/{trainers['ending']}").exists(), "the job ended")
    clone.cluster.start_controller(memory=2)
    output = clone.wait_for(running)
    assert output.count("Slurm has no record of this job, and its output files are missing") == 1
    assert count_submissions(output) == 3, "two segments, one of them twice"
    assert done.items() <= clone.read_round_times().items()
    assert clone.hash_runs() == dict.fromkeys(params["algorithms"], reference)
    assert "Nothing to be done" in clone.run_on_slurm("snakemake", "--profile", "slurm", "runs")


def test_job_out_of_memory_requests_more_memory(clone: Clone) -> None:
    """The second attempt requests twice the memory."""
    clone.prepare_study(faulty_study("hungry"))
    clone.set_profile(training={"mem_mb": 1500}, retries=1)
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "a job completed a round with more memory")
    clone.skip_delays()
    output = clone.wait_for(running)
    first, second = (int(job) for job in re.findall(r"rule_segment/hungry_\S+/(\d+)\.log\)", output))
    assert [parse_memory(clone.cluster.details(job)) for job in (first, second)] == [1500, 3000]
    assert "ran out of memory and now requests 3000 MB" in output


def test_runs_resume_after_snakemake_is_interrupted_or_killed(clone: Clone, reference) -> None:
    """SIGINT cancels the jobs of Snakemake. SIGKILL leaves an orphaned job, which continues to write."""
    params = faulty_study("slow")
    clone.prepare_study(params)
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "a round was done")
    cancelled = clone.list_segments()
    running.send_signal(signal.SIGINT)
    clone.wait_for(running, check=False)
    assert running.returncode
    clone.wait_until(lambda: not clone.list_segments(), "SIGINT cancelled the job")
    done = clone.read_round_times()

    running = clone.start(*RUNS)
    clone.wait_until(lambda: clone.list_started_segments().keys() - cancelled, "the next job did a round")
    running.kill()
    clone.wait_for(running, check=False)
    (orphan,) = clone.list_segments()
    done |= clone.read_round_times()
    output = clone.run_on_slurm(*RUNS, check=False)
    assert "Directory cannot be locked" in output
    assert "--unlock" in output
    clone.run("snakemake", "--unlock")
    assert orphan in clone.list_segments(), "the orphaned job should continue"

    running = clone.start(*RUNS)
    clone.wait_until(
        lambda: clone.list_started_segments().keys() - {orphan}, "the next job completes a round next to the first"
    )
    clone.skip_delays()
    clone.wait_for(running)
    assert clone.hash_runs() == dict.fromkeys(params["algorithms"], reference)
    assert done.items() <= clone.read_round_times().items()
    assert "Nothing to be done" in clone.run_on_slurm("snakemake", "--profile", "slurm", "runs")
