"""Studies on a real Slurm have the bits of local ones, also next to other studies and in one job."""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest

from tests import small_studies as studies
from tests.analysis.conftest import finish
from tests.cluster.conftest import (
    ALL,
    FAST_SNAKEMAKE,
    RUNS,
    STOPPED,
    Clone,
    count_submissions,
    faulty_study,
    parse_memory,
)
from tests.pipeline.conftest import Project, count_jobs

pytestmark = pytest.mark.slow


def test_readme_slurm_commands_run(clone: Clone, tmp_path: Path) -> None:
    """Run the README's commands: `fedpipe run`, `snakemake`, and DVC, which records the results.

    The unchanged profile uses two CPU nodes and a GPU node with two GPUs. The results are those of local runs.
    """
    local = tmp_path / "local"
    local.mkdir()
    params = studies.settings(("fedavg", "feddw"), 3)
    with contextlib.chdir(local):
        finish(params)
    clone.run("git", "init", "-q")
    clone.write(params)
    clone.commit()
    output = clone.run_on_slurm("fedpipe", "run", "--profile", "slurm", "-j", "3")
    assert output.startswith("snakemake all --profile slurm --logger-fedpipe-progress --jobs 3\n")
    assert re.search(r"^ *\d+ of \d+  segment FedAvg seed 0 \(", output, flags=re.M)
    bits = clone.hash_results()
    assert bits == studies.hash_results(local / "results")
    for name in ("results/tables/results.csv", "results/metrics.json", "results/plots/curves.csv"):
        assert (clone.folder / name).read_bytes() == (local / name).read_bytes(), name

    submitted = {int(job) for job in re.findall(r"submitted with SLURM jobid (\d+)", read_snakemake_log(clone))}
    placed = [(rule, clone.cluster.details(job)) for job, rule in clone.cluster.jobs("all").items() if job in submitted]
    assert sorted(rule.split("_")[1] for rule, _ in placed) == ["partition"] + ["segment"] * 2
    for rule, job in placed:
        training = rule.startswith("rule_segment")
        assert job["Partition"] == ("gpu" if training else "cpu")
        assert job["NumCPUs"] == ("4" if training else "1")
        assert job.get("TresPerJob") == ("gres/gpu:1" if training else None)
        assert job["TimeLimit"] == ("04:00:00" if training else "01:00:00")
        assert parse_memory(job) == (16000 if training else 4000)
    for label in ("fedavg", "feddw"):
        threads = min(4, len(os.sched_getaffinity(0)))
        assert f" {threads} thread{'s' * (threads > 1)} of " in clone.read_log(label), (
            "granted cores that this machine has"
        )

    assert "Nothing to be done" in clone.run_on_slurm("snakemake", "--profile", "slurm", "all")
    clone.edit(algorithms={"feddw": {"mu": 0.5}})
    output = clone.run_on_slurm("bash", "-c", "FEDPIPE_PROFILE=slurm dvc repro")
    log = read_snakemake_log(clone)
    assert "SLURM run ID" in log, "docs/cluster.md describes this line"
    assert "submitted with SLURM jobid" in log
    assert "Running stage 'train@feddw'" in output
    assert bits.items() < clone.hash_results().items()


def read_snakemake_log(clone: Clone) -> str:
    return max((clone.folder / ".snakemake/log").glob("*.log")).read_text()


def test_search_on_slurm_equals_local_search(clone: Clone, tmp_path: Path) -> None:
    """TPE begins with three draws, and a later draw depends on their results."""
    over = {"federation.learning_rate": {"log": [0.01, 1]}}
    tune = {"over": over, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [7], "sampler": "tpe"}
    local = Project(studies.copy_project(tmp_path / "local"))
    for project in (local, clone):
        project.write(studies.settings(rounds=2, tune=tune, dataset={"validation_fraction": 0.2}))
    local.snakemake("runs")
    output = clone.run_on_slurm(*RUNS)
    assert len(re.findall(r"submitted with SLURM jobid", output)) == 2 + 4 + 1 + 2, (
        "partitions, draws, a draw that continues, default and winner"
    )
    assert clone.hash_results() == local.hash_results()
    rungs = ("results/tables/tuning-0001.json", "results/tables/tuning-0002.json")
    for path in rungs:
        assert (clone.folder / path).read_bytes() == (local.folder / path).read_bytes()
    (result,) = json.loads((clone.folder / rungs[0]).read_text())["searches"]
    assert [new["draw"] for new in result["new_draws"]] == [3]
    assert "the winners of 4 draws are known" in clone.fedpipe("status")
    assert "Nothing to be done" in clone.run_on_slurm(*RUNS)


def test_snakemake_reports_time_limit_shorter_than_round(clone: Clone) -> None:
    """The limit of a partition prevents the job's start. A job that reaches its own limit is not queued again."""
    clone.prepare_study(faulty_study("endless"))
    clone.set_profile(retries=5)
    clone.cluster.run("scontrol", "update", "PartitionName=gpu", "MaxTime=100")
    output = clone.run_on_slurm(*RUNS, check=False)
    assert "It requests more time than its partition allows" in output
    assert not clone.cluster.jobs("PD,R")
    assert count_submissions(output) == 1

    clone.cluster.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
    running = clone.start(*RUNS)
    clone.wait_until(lambda: any(map(clone.find_training_process, clone.list_segments())), "a job trained")
    (job,) = clone.list_segments()
    log = clone.open_log("endless")
    clone.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    output = clone.wait_for(running, check=False)
    assert running.returncode
    assert "SIGTERM before a round was complete" in log.read()
    assert "Its time ended before a round was complete" in output
    assert "The time of a job is `runtime` in the profile" in output
    assert count_submissions(output) == 1


def test_project_folder_with_dollar_is_rejected(clone: Clone) -> None:
    """No job is submitted."""
    clone.prepare_study(studies.settings(rounds=1))
    clone.folder = clone.folder.rename(clone.folder.with_name("a$(touch PWN) {b}"))
    before = clone.cluster.jobs("all")
    output = clone.run_on_slurm(*ALL, check=False)
    assert output.count("a path with $ can't be passed to Slurm's nodes") == 1
    assert "Traceback" not in output
    assert clone.cluster.jobs("all") == before
    assert not list(clone.folder.parent.rglob("PWN"))


def test_concurrent_studies_share_partitions(clone: Clone, reference) -> None:
    params, other = faulty_study("one"), faulty_study("two")
    other["algorithms"]["two"]["copy"] = 1
    clone.write(other, "studies/other.yaml")
    clone.write(params)
    clone.snakemake("partitions")
    modification_times = {path: path.stat().st_mtime_ns for path in clone.folder.glob("results/partitions/*/*")}
    both = [
        clone.start(*FAST_SNAKEMAKE, "all"),
        clone.start(*FAST_SNAKEMAKE, "all", "--config", "params=studies/other.yaml"),
    ]
    clone.wait_until(lambda: len(clone.list_started_segments()) == 2, "both did a round")
    clone.skip_delays()
    for output in map(clone.wait_for, both):
        assert count_jobs(output)["segment"] == 1
        assert not count_jobs(output)["partition"]
        assert "fedpipe: another Snakemake" not in output, "the studies should not lock files of each other"
    assert "| one " in (clone.folder / "results/tables/results.md").read_text()
    assert "| two " in (clone.folder / "results/studies/other/tables/results.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in modification_times} == modification_times
    assert clone.hash_runs() == {"one": reference, "two": reference}


def test_one_job_script_resumes_runs_in_next_job(clone: Clone, reference) -> None:
    """The unchanged script runs a new study: parallel runs, SIGTERM before the time limit, and the next job."""
    params = faulty_study("one", "two", "three")
    clone.write(params)
    output = clone.run_on_slurm("sbatch", "--time=600", "slurm/one-job.sh", "--params", "params.yaml")
    job = re.search(r"Submitted batch job (\d+)", output)[1]

    def log(number: int) -> str:
        path = clone.folder / f"results/one-job-{job}_{number}.log"
        return path.read_text() if path.exists() else ""

    def ended(number: int) -> bool:
        # In state SI Slurm sends a signal to the running job.
        return not clone.cluster.run("squeue", "-h", "-t", "PD,R,CG,SI", "-j", f"{job}_{number}")

    clone.wait_until(
        lambda: len({label for label, _ in clone.read_round_times()}) == 3, "all three did a round at once"
    )
    (running,) = clone.cluster.jobs()
    clone.cluster.run("scontrol", "update", f"JobId={running}", "TimeLimit=2")  # so SIGTERM comes now
    clone.wait_until(lambda: ended(1), "the first job ended")
    assert "Snakemake ended before all jobs were done" in log(1)
    assert all(STOPPED in clone.read_log(label) for label in ("one", "two", "three"))
    done = clone.read_round_times()
    clone.skip_delays()
    clone.wait_until(lambda: ended(3), "the second job did all, and the third had nothing to do")
    assert "Finished" not in log(3)
    assert clone.hash_runs() == dict.fromkeys(params["algorithms"], reference)
    assert done.items() <= clone.read_round_times().items()
    table = (clone.folder / "results/tables/results.md").read_text()
    assert all(f"| {label} " in table for label in params["algorithms"])
