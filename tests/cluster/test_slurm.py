"""A study on a real Slurm, and what breaks there: the same command again completes, with the same bits.

Jobs of faulty_algorithms.py are slow until the test has observed them and calls `clone.skip_delays()`. So
nothing depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from fedpipe.engine import collect
from tests import small_studies as studies
from tests.cluster.conftest import ALL, FAST_SNAKEMAKE, Clone, faulty_study
from tests.pipeline.conftest import Project, count_jobs

pytestmark = pytest.mark.slow

RUNS = (*FAST_SNAKEMAKE, "runs")
STOPPED = "stopped by SIGTERM after round"


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``reference(params)``: the bits of a study's runs, computed here without jobs."""

    def compute(params: dict) -> dict[str, str]:
        folder = tmp_path / "reference"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(Path(__file__).parent)
        (folder / "hurry").touch()
        new_plan = studies.prepare(params)
        for planned, run in zip(new_plan.runs, studies.open_runs(new_plan), strict=True):
            list(run.run_segment(planned.rounds))
            collect.collect_rounds(run.files, planned.rounds, "all")
        return studies.hash_results(folder / "results/runs")

    return compute


def test_the_literal_command_makes_the_local_table_bit_for_bit(clone: Clone, tmp_path: Path) -> None:
    """With the profile as shipped, on two CPU nodes and a GPU node with two GPUs."""
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
        assert memory(job) == (16000 if training else 4000)
    for label in ("fedavg", "feddw"):
        threads = min(4, len(os.sched_getaffinity(0)))
        assert f" {threads} threads of " in clone.read_log(label), "what was granted and is there"
    assert "Nothing to be done" in clone.run_on_slurm(*ALL)


def test_a_search_selects_the_same_draws_on_slurm(clone: Clone, tmp_path: Path) -> None:
    """Also TPE's draws. Its first batch are the first draws of the Sobol sequence, whose runs are reused."""
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


def test_the_words_of_the_readme_run_on_slurm(clone: Clone) -> None:
    """Run them as written: `fedpipe run`, `snakemake`, and DVC, which records the results."""
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
    assert "SLURM run ID" in log, "as docs/cluster.md says"
    assert "submitted with SLURM jobid" in log
    assert "Running stage 'train@fedavg'" in output
    assert bits.items() < clone.hash_results().items()


def test_what_breaks_is_queued_again_and_goes_on(clone: Clone, reference) -> None:
    """Jobs that are preempted, one that is cancelled, one that fails, and a node that dies."""
    labels = ("failing", "unlucky")
    params = faulty_study(*labels)
    clone.prepare_study(params)
    clone.set_profile(retries=5)
    running = clone.start(*RUNS)

    def attempt(number: int, ended: Collection[int] = ()) -> dict[str, int]:
        """The next job of each algorithm, once both have done a round."""
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
    assert all(STOPPED in log.read() for log in logs), "both were preempted"
    for label, job in second.items():
        assert memory(clone.cluster.details(job)) == memory(asked[label]), "it did not run out of memory"

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
    assert done.items() <= clone.read_round_times().items(), "rounds were done twice"


def test_a_job_over_its_time_limit_goes_on_in_the_next(clone: Clone, reference) -> None:
    """On GPUs of a model that the profile names."""
    params = faulty_study("slow")
    clone.prepare_study(params)
    clone.set_profile(training={"gpu_model": "fake"})
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "it did a round")
    ((first, label),) = clone.list_started_segments().items()
    assert clone.cluster.details(first)["TresPerJob"] == "gres:gpu:fake:1"

    log = clone.open_log(label)
    # Hours become the two minutes before which SIGTERM comes; Slurm looks at limits every half minute.
    clone.cluster.run("scontrol", "update", f"JobId={first}", "TimeLimit=2")
    clone.wait_until(lambda: clone.list_started_segments().keys() - {first}, "the next did a round")
    assert STOPPED in log.read()
    done = clone.read_round_times()
    clone.skip_delays()
    clone.wait_for(running)
    assert clone.hash_runs() == reference(params)
    assert done.items() <= clone.read_round_times().items()


def test_an_outage_longer_than_slurms_memory(clone: Clone, reference) -> None:
    """While slurmctld is down one job ends and another dies; both are forgotten before Snakemake has asked twice."""
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
    assert submissions(output) == 3, "two segments, one of them twice"
    assert done.items() <= clone.read_round_times().items()
    assert clone.hash_runs() == reference(params)
    assert "Nothing to be done" in clone.run_on_slurm("snakemake", "--profile", "slurm", "runs")


def test_memory_grows_after_running_out_of_it(clone: Clone) -> None:
    """Up to what the largest node has, never beyond."""
    clone.prepare_study(faulty_study("hungry"))
    clone.set_profile(training={"mem_mb": 1500}, retries=1)
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "it did a round with more memory")
    clone.skip_delays()
    output = clone.wait_for(running)
    first, second = (int(job) for job in re.findall(r"rule_segment/hungry_\S+/(\d+)\.log\)", output))
    assert [memory(clone.cluster.details(job)) for job in (first, second)] == [1500, 3000]
    assert "ran out of memory and now requests 3000 MB" in output


def test_a_time_limit_shorter_than_a_round_is_told(clone: Clone) -> None:
    """By the partition, which would never start the job; by the job that is not queued again."""
    clone.prepare_study(faulty_study("endless"))
    clone.set_profile(retries=5)
    clone.cluster.run("scontrol", "update", "PartitionName=gpu", "MaxTime=100")
    output = clone.run_on_slurm(*RUNS, check=False)
    assert "It requests more time than its partition allows" in output
    assert not clone.cluster.jobs("PD,R")
    assert submissions(output) == 1

    clone.cluster.run("scontrol", "update", "PartitionName=gpu", "MaxTime=INFINITE")
    running = clone.start(*RUNS)
    clone.wait_until(lambda: any(map(clone.find_training_process, clone.list_segments())), "it trains")
    (job,) = clone.list_segments()
    log = clone.open_log("endless")
    clone.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    output = clone.wait_for(running, check=False)
    assert running.returncode
    assert "SIGTERM before a round was complete" in log.read()
    assert "Its time ended before a round was complete" in output
    assert "The time of a job is `runtime` in the profile" in output
    assert submissions(output) == 1


def test_a_path_that_gets_lost_on_the_way_is_refused(clone: Clone) -> None:
    """Before any job is submitted."""
    clone.prepare_study(studies.settings(rounds=1))
    clone.folder = clone.folder.rename(clone.folder.with_name("a$(touch PWN) {b}"))
    before = clone.cluster.jobs("all")
    output = clone.run_on_slurm(*ALL, check=False)
    assert output.count("a path with $ can't be passed to Slurm's nodes") == 1
    assert "Traceback" not in output
    assert clone.cluster.jobs("all") == before
    assert not list(clone.folder.parent.rglob("PWN"))


def test_snakemake_interrupted_and_killed(clone: Clone, reference) -> None:
    """By SIGINT, which cancels its jobs; by SIGKILL, which leaves an orphan that writes on."""
    params = faulty_study("slow")
    clone.prepare_study(params)
    running = clone.start(*RUNS)
    clone.wait_until(clone.list_started_segments, "a round was done")
    cancelled = clone.list_segments()
    running.send_signal(signal.SIGINT)
    clone.wait_for(running, check=False)
    assert running.returncode
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
    assert orphan in clone.list_segments(), "it should write on"

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


def test_two_studies_at_once_share_what_is_there(clone: Clone, reference) -> None:
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
        assert "fedpipe: another Snakemake" not in output, "neither locks what the other makes"
    assert "| one " in (clone.folder / "results/tables/results.md").read_text()
    assert "| two " in (clone.folder / "results/studies/other/tables/results.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in modification_times} == modification_times
    params["algorithms"] |= other["algorithms"]
    params["study"]["algorithms"].append("two")
    assert clone.hash_runs() == reference(params)


def test_many_runs_in_one_job_go_on_in_the_next(clone: Clone, reference) -> None:
    """The script as shipped, where nothing was made: runs side by side, SIGTERM as at the end, the next job."""
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
    clone.cluster.run("scontrol", "update", f"JobId={running}", "TimeLimit=2")  # two minutes before the end are now
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


def submissions(output: str) -> int:
    return len(re.findall(r"has been submitted with SLURM jobid", output))


def memory(job: dict[str, str]) -> int:
    """MB of memory that a job asked for."""
    return int(re.search(r"mem=(\d+)M", job["TRES"])[1])
