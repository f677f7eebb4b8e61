"""A study on a real Slurm, and what breaks there: the same command again completes, with the same bits."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from fedpipe.engine import collecting
from tests import studies
from tests.cluster.conftest import ALL, OFTEN, Clone, own_study, until
from tests.pipeline.conftest import Project, jobs

pytestmark = pytest.mark.slow

RUNS = (*OFTEN, "runs")
STOPPED = "stopped by SIGTERM after round"


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``reference(params)``: the bits of a study's runs, computed here without jobs."""

    def compute(params: dict) -> dict[str, str]:
        folder = tmp_path / "reference"
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(Path(__file__).parent)
        made = studies.prepare(params)
        for run in studies.open_runs(made):
            list(run.segment(made["rounds"]))
            collecting.collect(run.files, made["rounds"], "all")
        return studies.bits(folder / "results/runs")

    return compute


def study(clone: Clone, params: dict) -> None:
    """The study in a clone that has its data and partitions already."""
    studies.write(params, clone.folder)
    clone.snakemake("partitions")


def test_the_literal_command_makes_the_local_table_bit_for_bit(clone: Clone, tmp_path: Path) -> None:
    """With the profile as shipped, on two CPU nodes and a GPU node with two GPUs."""
    params = studies.settings(("fedavg", "feddw"), 3)
    local = Project(studies.copy_project(tmp_path / "local"))
    for each in (local, clone):
        studies.write(params, each.folder)
    local.snakemake()
    said = clone.on_slurm(*ALL)
    assert clone.bits() == local.bits()
    for name in ("results/tables/results.csv", "results/metrics.json", "results/plots/curves.csv"):
        assert (clone.folder / name).read_bytes() == (local.folder / name).read_bytes(), name

    submitted = {int(job) for job in re.findall(r"submitted with SLURM jobid (\d+)", said)}
    placed = [(rule, clone.cluster.details(job)) for job, rule in clone.cluster.jobs("all").items() if job in submitted]
    assert sorted(rule.split("_")[1] for rule, _ in placed) == ["collect"] * 2 + ["partition"] + ["segment"] * 2
    for rule, job in placed:
        training = rule.startswith("rule_segment")
        assert job["Partition"] == ("gpu" if training else "cpu")
        assert job["NumCPUs"] == ("4" if training else "1")
        assert ("TresPerJob" in job) == training
        assert job.get("TresPerJob", "gres:gpu:1") == "gres:gpu:1"
        assert "mem=16000M" in job["TRES"] if training else "mem=4000M" in job["TRES"]
    for label in ("fedavg", "feddw"):
        assert f" {min(4, os.cpu_count() or 1)} threads of " in clone.log(label), "what was granted and is there"
    assert "Nothing to be done" in clone.on_slurm(*ALL)


def training(clone: Clone) -> dict[str, int]:
    """The process that trains, by algorithm, where a segment's job has come so far."""
    found = {}
    for label, job in clone.segments().items():
        for pid in clone.cluster.processes(job):
            with suppress(FileNotFoundError):  # it ended meanwhile
                if b"/fedpipe\0segment\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found[label] = pid
    return found


def test_what_breaks_is_queued_again_and_goes_on(clone: Clone, reference) -> None:
    """Jobs that are preempted, one that is cancelled, one that fails, and a node that dies."""
    labels = ("failing", "unlucky")
    params = own_study(*labels, rounds=10)
    study(clone, params)
    clone.set_profile(retries=5)
    running = clone.begin(*RUNS, seconds=2)
    ended: set[int] = set()  #: processes

    def at_work(rounds: int) -> bool:
        """Whether both train, in new processes, and have done so many rounds."""
        least = min(len(clone.rounds(label)) for label in labels)
        return least >= rounds and len(set(training(clone).values()) - ended) == 2

    until(lambda: at_work(1), running, "both did a round")
    done, given = clone.rounds(), {}
    for label, pid in training(clone).items():
        given[label] = re.search(r"IDX:(\d)", clone.cluster.details(clone.segments()[label])["GRES"])[1]
        assert f"CUDA_VISIBLE_DEVICES={given[label]}" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert f", GPU {given[label]} was granted" in clone.log(label)
    assert sorted(given.values()) == ["0", "1"]

    ended |= {*training(clone).values()}
    clone.cluster.run("sbatch", "-p", "urgent", "--gpus=2", "-o", "/dev/null", "--wrap", "true")
    until(lambda: all(STOPPED in clone.log(label) for label in labels), running, "both were preempted")
    done |= clone.rounds()
    until(lambda: at_work(2), running, "both were begun again")

    ended |= {*training(clone).values()}
    done |= clone.rounds()
    (clone.folder / "fail-once").touch()
    clone.cluster.run("scancel", str(clone.segments()["unlucky"]))
    until(lambda: "a fault of the test" in clone.log("failing"), running, "one failed")
    until(lambda: {*training(clone).values()} - ended, running, "one of them was begun once more")

    done |= clone.rounds()
    clone.cluster.kill_node("gpu1")
    until(lambda: clone.cluster.state("gpu1")[0] == "DOWN", running, "Slurm missed the node")
    clone.cluster.start_node("gpu1")
    said = clone.end(running)
    assert "'CANCELLED'" in said
    assert "'NODE_FAIL'" in said
    assert bits_of_runs(clone) == reference(params)
    assert done.items() <= clone.rounds().items(), "rounds were done twice"


def test_a_job_over_its_time_limit_goes_on_in_the_next(clone: Clone, reference) -> None:
    params = own_study("slow", rounds=11)
    study(clone, params)
    # Slurm looks at limits every half minute: SIGTERM comes when the job is 20 to 50 seconds old.
    clone.set_profile(runtime=1, slurm_extra="'--signal=TERM@25'", retries=9)
    running = clone.begin(*RUNS, seconds=5)
    until(lambda: STOPPED in clone.log("slow"), running, "it was told to stop")
    done = clone.rounds()
    assert 1 <= len(done) < 11
    clone.end(running)
    assert bits_of_runs(clone) == reference(params)
    assert done.items() <= clone.rounds().items()


def test_snakemake_interrupted_and_killed(clone: Clone, reference) -> None:
    """By SIGINT, which cancels its jobs; by SIGKILL, which leaves an orphan that writes on."""
    params = own_study("slow", rounds=14)
    study(clone, params)
    running = clone.begin(*RUNS, seconds=2)
    until(lambda: len(clone.rounds()) >= 2, running, "two rounds were done")
    running.send_signal(signal.SIGINT)
    clone.end(running, check=False)
    done = clone.rounds()
    assert running.returncode

    running = clone.begin(*RUNS, seconds=2)
    until(lambda: len(clone.rounds()) >= len(done) + 2, running, "two more rounds were done")
    running.kill()
    running.wait()
    (orphan,) = clone.segments().values()
    done |= clone.rounds()
    said = clone.on_slurm(*RUNS, check=False)
    unlock, again = (line.strip() for line in said.partition("then type\n")[2].splitlines()[:2])
    assert (unlock, again) == ("snakemake --unlock", "snakemake --profile slurm runs")
    clone.run(*unlock.split())
    assert orphan in clone.segments().values(), "it should write on"
    clone.on_slurm(*RUNS, seconds=2)
    assert bits_of_runs(clone) == reference(params)
    assert done.items() <= clone.rounds().items()
    assert "Nothing to be done" in clone.on_slurm("snakemake", "--profile", "slurm", "runs")


def test_two_studies_at_once_share_what_is_there(clone: Clone, reference) -> None:
    params, other = own_study("one", rounds=3), own_study("two", rounds=3)
    other["algorithms"]["two"]["copy"] = 1
    studies.write(other, clone.folder)
    (clone.folder / "params.yaml").rename(clone.folder / "studies/other.yaml")
    study(clone, params)
    made = {path: path.stat().st_mtime_ns for path in clone.folder.glob("results/partitions/*/*")}
    both = [
        clone.begin(*OFTEN, "all", seconds=1, name="one"),
        clone.begin(*OFTEN, "all", "--config", "params=studies/other.yaml", seconds=1, name="two"),
    ]
    said = [clone.end(running, name=name) for running, name in zip(both, ("one", "two"), strict=True)]
    for each in said:
        assert jobs(each)["segment"] == 1
        assert not jobs(each)["partition"]
        assert "fedpipe:" not in each, "neither locks what the other makes"
    assert "| one " in (clone.folder / "results/tables/results.md").read_text()
    assert "| two " in (clone.folder / "results/studies/other/tables/results.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in made} == made
    params["algorithms"] |= other["algorithms"]
    params["study"]["algorithms"].append("two")
    assert bits_of_runs(clone) == reference(params)


def bits_of_runs(clone: Clone) -> dict[str, str]:
    return studies.bits(clone.folder / "results/runs")
