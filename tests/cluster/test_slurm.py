"""Studies on a real Slurm, also with faults. The same command completes a study with equal bits.

Jobs of faulty_algorithms.py are slow until the test has observed them and calls `clone.skip_delays()`, so the tests do
not depend on the speed of the machine.
"""

import json
import os
import re
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from tests import small_studies as studies
from tests.cluster.conftest import ALL, FAST_SNAKEMAKE, Clone, faulty_study
from tests.pipeline.conftest import Project, count_jobs

pytestmark = pytest.mark.slow

RUNS = (*FAST_SNAKEMAKE, "runs")
STOPPED = "stopped by SIGTERM after round"


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``reference(params)`` computes the bits of a study's runs without jobs."""

    def compute(params: dict) -> dict[str, str]:
        folder = tmp_path / "reference"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(Path(__file__).parent)
        (folder / "hurry").touch()
        new_plan = studies.prepare(params)
        for planned, run in zip(new_plan.runs, studies.open_runs(new_plan), strict=True):
            studies.finish_run(run, planned.rounds)
        return studies.hash_results(folder / "results/runs")

    return compute


def test_slurm_results_equal_local_results_bit_for_bit(clone: Clone, tmp_path: Path) -> None:
    """Use the unchanged profile on two CPU nodes and a GPU node with two GPUs."""
    params = studies.settings(("fedavg", "feddw"), 3)
    local = Project(studies.copy_project(tmp_path / "local"))
    for project in (local, clone):
        studies.write(params, project.folder)
    local.snakemake()
    output = clone.run_on_slurm(*ALL)
    assert clone.hash_results() == local.hash_results()
    for name in ("results/tables/results.csv", "results/metrics.json", "results/plots/curves.csv"):
        assert (clone.folder / name).read_bytes() == (local.folder / name).read_bytes(), name

    submitted = {int(job) for job in re.findall(r"submitted with SLURM jobid (\d+)", output)}
    placed = [(rule, clone.cluster.details(job)) for job, rule in clone.cluster.jobs("all").items() if job in submitted]
    assert sorted(rule.split("_")[1] for rule, _ in placed) == ["partition"] + ["segment"] * 2
    for rule, job in placed:
        training = rule.startswith("rule_segment")
        assert job["Partition"] == ("gpu" if training else "cpu")
        assert job["NumCPUs"] == ("4" if training else "1")
        assert job.get("TresPerJob") == ("gres:gpu:1" if training else None)
        assert job["TimeLimit"] == ("04:00:00" if training else "01:00:00")
        assert parse_memory(job) == (16000 if training else 4000)
    for label in ("fedavg", "feddw"):
        threads = min(4, len(os.sched_getaffinity(0)))
        assert f" {threads} threads of " in clone.read_log(label), "granted cores that this machine has"
    assert "Nothing to be done" in clone.run_on_slurm(*ALL)


def test_search_on_slurm_equals_local_search(clone: Clone, tmp_path: Path) -> None:
    """TPE begins with the first draws of the Sobol sequence, so it reuses their runs."""
    over = {"federation.learning_rate": {"log": [0.01, 1]}}
    tune = {"over": over, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [7]}
    local = Project(studies.copy_project(tmp_path / "local"))
    for project in (local, clone):
        studies.write(studies.settings(rounds=2, tune=tune, dataset={"validation_fraction": 0.2}), project.folder)
    local.snakemake("runs")
    output = clone.run_on_slurm(*RUNS)
    assert len(re.findall(r"submitted with SLURM jobid", output)) == 2 + 4 + 2 + 2, (
        "partitions, draws, default and winner"
    )
    assert clone.hash_results() == local.hash_results()
    rungs = ("results/tables/tuning-0001.json", "results/tables/tuning-0002.json")
    for path in rungs:
        assert (clone.folder / path).read_bytes() == (local.folder / path).read_bytes()
    assert "Nothing to be done" in clone.run_on_slurm(*RUNS)
    for project in (local, clone):
        project.edit(tune={"sampler": "tpe"})
    local.snakemake("runs")
    output = clone.run_on_slurm(*RUNS)
    assert 1 <= len(re.findall(r"submitted with SLURM jobid", output)) <= 2, "the new draw, and maybe another winner"
    assert clone.hash_results() == local.hash_results()
    for path in rungs:
        assert (clone.folder / path).read_bytes() == (local.folder / path).read_bytes()
    (result,) = json.loads((clone.folder / rungs[0]).read_text())["searches"]
    assert [new["draw"] for new in result["new_draws"]] == [3]
    assert "the winners of 4 draws are known" in clone.run_on_slurm("fedpipe", "status")
    assert "Nothing to be done" in clone.run_on_slurm(*RUNS)


def test_readme_slurm_commands_run(clone: Clone) -> None:
    """Run the README's commands: `fedpipe run`, `snakemake`, and DVC, which records the results."""
    clone.run("git", "init", "-q")
    studies.write(studies.settings(rounds=1), clone.folder)
    clone.commit()
    output = clone.run_on_slurm("fedpipe", "run", "--profile", "slurm", "-j", "3")
    assert output.startswith("snakemake all --profile slurm --logger-fedpipe-progress --jobs 3\n")
    assert re.search(r"^ *\d+ of \d+  segment FedAvg seed 0 \(", output, flags=re.M)
    assert "Nothing to be done" in clone.run_on_slurm("snakemake", "--profile", "slurm", "all")
    bits = clone.hash_results()
    clone.edit(federation={"learning_rate": 0.05})
    output = clone.run_on_slurm("bash", "-c", "FEDPIPE_PROFILE=slurm dvc repro")
    log = max((clone.folder / ".snakemake/log").glob("*.log")).read_text()
    assert "SLURM run ID" in log, "docs/cluster.md describes this line"
    assert "submitted with SLURM jobid" in log
    assert "Running stage 'train@fedavg'" in output
    assert bits.items() < clone.hash_results().items()


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
    assert clone.hash_runs() == reference(params)
    assert done.items() <= clone.read_round_times().items(), "rounds were repeated"


def test_job_over_time_limit_resumes_in_next_job(clone: Clone, reference) -> None:
    """The profile requests GPUs of a model."""
    params = faulty_study("slow")
    clone.prepare_study(params)
    clone.set_profile(training={"gpu_model": "fake"})
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "a job completed a round")
    ((first, label),) = clone.list_started_segments().items()
    assert clone.cluster.details(first)["TresPerJob"] == "gres:gpu:fake:1"

    log = clone.open_log(label)
    # SIGTERM comes two minutes before the limit. Slurm checks limits every half minute.
    clone.cluster.run("scontrol", "update", f"JobId={first}", "TimeLimit=2")
    clone.wait_until(lambda: clone.list_started_segments().keys() - {first}, "the next did a round")
    assert STOPPED in log.read()
    done = clone.read_round_times()
    clone.skip_delays()
    clone.wait_for(running)
    assert clone.hash_runs() == reference(params)
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
    assert clone.hash_runs() == reference(params)
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
    unlock, again = (line.strip() for line in output.partition("killed, type\n")[2].splitlines()[:2])
    assert (unlock, again) == ("snakemake --unlock", "snakemake --profile slurm runs")
    clone.run(*unlock.split())
    assert orphan in clone.list_segments(), "the orphaned job should continue"

    running = clone.start(*RUNS)
    clone.wait_until(
        lambda: clone.list_started_segments().keys() - {orphan},
        "the next job completes a round next to the first",
    )
    clone.skip_delays()
    clone.wait_for(running)
    assert clone.hash_runs() == reference(params)
    assert done.items() <= clone.read_round_times().items()
    assert "Nothing to be done" in clone.run_on_slurm("snakemake", "--profile", "slurm", "runs")


def test_concurrent_studies_share_partitions(clone: Clone, reference) -> None:
    params, other = faulty_study("one"), faulty_study("two")
    other["algorithms"]["two"]["copy"] = 1
    studies.write(other, clone.folder)
    (clone.folder / "params.yaml").rename(clone.folder / "studies/other.yaml")
    clone.prepare_study(params)
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
    params["algorithms"] |= other["algorithms"]
    params["study"]["algorithms"].append("two")
    assert clone.hash_runs() == reference(params)


def test_one_job_script_resumes_runs_in_next_job(clone: Clone, reference) -> None:
    """The unchanged script runs a new study: parallel runs, SIGTERM before the time limit, and the next job."""
    params = faulty_study("one", "two", "three")
    studies.write(params, clone.folder)
    output = clone.run_on_slurm("sbatch", "--time=600", "slurm/one-job.sh", "--params", "params.yaml")
    job = re.search(r"Submitted batch job (\d+)", output)[1]

    def log(number: int) -> str:
        path = clone.folder / f"results/one-job-{job}_{number}.log"
        return path.read_text() if path.exists() else ""

    def ended(number: int) -> bool:
        return not clone.cluster.run("squeue", "-h", "-t", "PD,R,CG", "-j", f"{job}_{number}")

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
    assert clone.hash_runs() == reference(params)
    assert done.items() <= clone.read_round_times().items()
    table = (clone.folder / "results/tables/results.md").read_text()
    assert all(f"| {label} " in table for label in params["algorithms"])


def count_submissions(output: str) -> int:
    return len(re.findall(r"has been submitted with SLURM jobid", output))


def parse_memory(job: dict[str, str]) -> int:
    """Return the MB of memory that a job requested."""
    return int(re.search(r"mem=(\d+)M", job["TRES"])[1])
