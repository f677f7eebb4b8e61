"""Several studies in one clone: each has its own table and figures, and shares runs with the others."""

import csv
import fcntl
import hashlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import LOCAL, TABLE, Project, count_jobs, wait_until
from tests.pipeline.test_snakemake import wait_for_round

NOTHING = "Nothing to be done"
OTHER = ("--config", "params=studies/other.yaml")


@pytest.mark.slow
def test_other_study_and_its_preset_share_runs_and_do_not_change_main_study(project: Project) -> None:
    def hash_report() -> dict[Path, str]:
        """Hash the main study's plan, tables, figures and keys."""
        found = [path for path in (project.folder / "results").rglob("*") if path.is_file()]
        shared = {"runs", "studies", "logs", ".provenance"}
        own = [path for path in found if not shared & set(path.relative_to(project.folder / "results").parts)]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in own}

    project.write(studies.settings(rounds=2))
    project.snakemake()
    project.commit()
    main, bits = hash_report(), project.hash_results()
    params = studies.settings(("fedavg", "fedprox"), 2, report={"round": "best"})
    params["presets"] = {"smoke": {"study.algorithms": ["fedprox"]}, "short": {"federation.rounds": 1}}
    project.write(params, "studies/other.yaml")

    smoke = ("--params", "studies/other.yaml", "--preset", "smoke")
    printed = project.run("fedpipe", "run", *smoke)
    assert "snakemake all --config params=studies/other.yaml preset=smoke --profile" in printed
    assert count_jobs(printed)["segment"] == 1
    place = project.folder / "results/studies/other"
    assert place.with_name("other@smoke").joinpath("tables/results.md").read_text().startswith("Preset smoke. ")
    assert not place.exists()
    assert "| FedAvg" not in project.fedpipe("show", *smoke)
    assert "1 run (1 done)" in project.fedpipe("status", *smoke)
    assert "other@smoke: " in project.fedpipe("verify", "--rerun", "0", *smoke)
    assert len(project.fedpipe("plan", "--dry-run", *smoke).splitlines()) == 1
    assert NOTHING in project.snakemake("-n", "all", *OTHER, "preset=smoke")
    message = project.fedpipe("show", "--params", "studies/other.yaml", "--preset", "short", check=False)
    assert "Type `fedpipe run --params studies/other.yaml --preset short` first" in message
    for command in (("fedpipe", "plan", "--preset", "smok", *smoke[:2]), ("snakemake", "-n", *OTHER, "preset=smok")):
        assert "--preset: 'smok' is not a preset of this study. Did you mean 'smoke'?" in project.run(
            *command, check=False
        )

    ran = count_jobs(project.snakemake("all", *OTHER))
    assert ran == {"table": 1, "curves": 1, "matrices": 1, "partition_figure": 1, "all": 1}
    assert hash_report() == main
    assert bits.items() <= project.hash_results().items()
    assert "| FedProx" in (place / "tables/results.md").read_text()
    drawn = {path.stem.partition("-")[0] for path in (place / "figures").iterdir()}
    assert drawn == {"curves", "matrices", "partition"}
    assert sorted(path.name for path in (place / "keys").iterdir()) == ["fedavg.json", "fedprox.json"]
    assert NOTHING in project.snakemake("-n", "all")
    assert NOTHING in project.snakemake("-n", "all", *OTHER)
    assert project.run("git", "status", "--porcelain").splitlines() == ["?? studies/other.yaml"]
    assert "| FedProx" in project.fedpipe("show", "--params", "studies/other.yaml")
    assert "| FedProx" not in project.fedpipe("show")


WAITING = """
import fcntl
from pathlib import Path

from fedpipe.algorithms.fedavg import FedAvg


class Waiting(FedAvg):
    \"\"\"FedAvg that waits in each round until the file is unlocked.\"\"\"

    def send(self, server, ids):
        with Path("waiting").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        return super().send(server, ids)
"""


def write_waiting_study(project: Project) -> None:
    """Write a study with one round of `Waiting`."""
    (project.folder / "own.py").write_text(WAITING)
    project.write(studies.settings(("waiting",), 1, algorithms={"waiting": {"algorithm": "own.Waiting"}}))


@pytest.mark.slow
def test_finished_study_keeps_lock_of_running_study(project: Project) -> None:
    project.write(studies.settings(rounds=1))
    project.snakemake("runs")  # both studies use these files, so neither may lock them
    project.write(studies.settings(rounds=2), "studies/other.yaml")
    write_waiting_study(project)
    with (project.folder / "waiting").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with project.start_command("snakemake", "runs", *LOCAL) as running:
            try:
                markers = "results/runs/waiting/*/rounds/0000/round.json"
                wait_until(lambda: any(project.folder.glob(markers)), running, "round 0 was complete")
                project.snakemake("runs", *OTHER)
                assert "Directory cannot be locked" in project.snakemake("runs", check=False)
            finally:
                os.killpg(running.pid, signal.SIGKILL)
    assert "--unlock" in project.snakemake("runs", check=False)
    project.snakemake("runs", "--unloc")  # an abbreviation that Snakemake accepts
    assert not list((project.folder / ".snakemake/locks").glob("*.lock"))


@pytest.mark.slow
def test_running_snakemake_writes_no_table_after_plan_changes(project: Project) -> None:
    write_waiting_study(project)
    first, table = (project.folder / "params.yaml").read_text(), project.folder / "results/tables/results.md"
    with (project.folder / "waiting").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        running = project.start_command("snakemake", "all", *LOCAL, stderr=subprocess.PIPE, text=True)
        wait_for_round(project, 0, running)
        project.edit(report={"average": "client"})
        project.run("fedpipe", "run", "-n")
    _, output = running.communicate()
    assert running.returncode == 1
    assert "results/plan.json has changed since this Snakemake began, because params.yaml was edited" in output
    assert not table.exists()
    assert count_jobs(project.snakemake())["segment"] == 0
    assert "as the mean of the clients' values" in table.read_text()
    (project.folder / "params.yaml").write_text(first)
    ran = count_jobs(project.snakemake())
    assert (ran["segment"], ran["table"], ran["curves"]) == (0, 1, 1)
    assert "over all test samples" in table.read_text()
    project.fedpipe("verify", "--rerun", "0")


SHORT = ("results/studies/deep/short/metrics.json", "--config", "params=studies/deep/short.yaml")


@pytest.mark.slow
def test_studies_with_different_rounds_share_rounds_but_no_results(project: Project) -> None:
    short_study = studies.settings(("fedavg", "scaffold"), 2, artifacts={"keep_models": "last"})
    project.write(short_study, "studies/deep/short.yaml")
    project.write(studies.settings(("fedavg", "scaffold"), 4))
    project.snakemake(TABLE)
    long, states = read_results(project, "results"), set(project.folder.glob("results/runs/*/*/rounds/*/*.pt"))
    ran = count_jobs(project.snakemake(*SHORT))
    assert (ran["segment"], ran["table"]) == (2, 1)
    (log,) = (project.folder / "results/logs/segment").glob("fedavg-*-0002.log")
    assert "2 of 2 rounds are complete" in log.read_text(), "the rounds of the longer study are reused"
    assert read_results(project, "results") == long
    assert set(project.folder.glob("results/runs/*/*/rounds/*/*.pt")) == states, "the longer study needs all states"
    short, bits = read_results(project, "results/studies/deep/short"), project.hash_results()
    assert read_accuracies(project, "results/studies/deep/short", 2) == read_accuracies(project, "results", 2)
    assert read_accuracies(project, "results", 4) != read_accuracies(project, "results", 2)

    # run both studies at the same time, with existing data and partitions
    project.run("rm", "-r", "results/runs", "results/tables", "results/metrics.json", "results/studies")
    working = [project.start_command("snakemake", *targets, *LOCAL) for targets in ((TABLE,), SHORT)]
    assert [segment.wait() for segment in working] == [0, 0]
    assert read_results(project, "results") == long
    assert read_results(project, "results/studies/deep/short") == short
    assert project.hash_results() == bits
    for rounds, params in ((4, "params.yaml"), (2, "studies/deep/short.yaml")):
        assert f"({rounds} rounds)" in project.fedpipe("show", "--params", params)
    project.fedpipe("verify", "--rerun", "0", "--params", "studies/deep/short.yaml")
    project.fedpipe("record", "fedavg", "--params", "studies/deep/short.yaml")
    assert NOTHING in project.snakemake("-n", TABLE)
    assert NOTHING in project.snakemake("-n", *SHORT)


def read_results(project: Project, place: str) -> dict[str, bytes]:
    """Read the results of a study, except times."""
    names = ("tables/results.csv", "metrics.json", *(f"plots/{name}.csv" for name in ("curves", "clients", "matrices")))
    return {name: (project.folder / place / name).read_bytes() for name in names}


def read_accuracies(project: Project, place: str, round_number: int) -> list[str]:
    """Read the mean accuracies of a round from a study's curves."""
    rows = csv.DictReader((project.folder / place / "plots/curves.csv").open())
    return [row["mean"] for row in rows if row["round"] == str(round_number)]


@pytest.mark.slow
def test_wrong_study_path_prints_one_error(project: Project) -> None:
    """A study whose results would be files of another study, and a study that does not exist."""
    inside = "fedpipe: studies/a/tables.yaml: 'a/tables' is for files of the study 'a'. Rename 'tables'."
    missing = "fedpipe: studies/none.yaml: the file does not exist. Change to the folder that contains it."
    project.write(studies.settings(), "studies/a/tables.yaml")
    for command, message in (
        (["fedpipe", "plan", "--params", "studies/a/tables.yaml"], inside),
        (["snakemake", "-n", "all", "--config", "params=studies/a/tables.yaml"], inside),
        (["snakemake", "all", "--config", "params=studies/none.yaml", *LOCAL], missing),
    ):
        output = project.run(*command, check=False)
        assert output.splitlines()[-1] == message
        assert output.count("fedpipe: ") == 1
        assert "Traceback" not in output
    assert not (project.folder / "results/studies").exists()
    assert not (project.folder / "results/data").exists(), "no job may start"


def test_folder_of_studies_is_one_dag(project: Project) -> None:
    """A shared run is computed once, for both numbers of rounds. A study that needs a download is left out."""
    for name, labels, rounds, dataset in (
        ("long", ("fedavg",), 2, "digits"),
        ("short", ("fedavg", "fedprox"), 1, "digits"),
        ("far", ("fedavg",), 1, "mnist"),
    ):
        study = studies.settings(labels, 9, dataset={"name": dataset})
        presets = {"smoke": {"federation.rounds": rounds}}
        project.write(study | {"presets": presets}, f"studies/a/{name}.yaml")
    command = ["snakemake", "all", "--config", "params=studies/a", "preset=smoke", *LOCAL]
    planned = project.run("env", "-u", "FEDPIPE_MIRROR", f"XDG_CACHE_HOME={project.folder}", *command, "-n")
    ran = count_jobs(planned)
    assert (ran["download"], ran["partition"]) == (1, 1)
    segments = re.findall(r"^    output: results/runs/(\w+)/(\w+)/segments/(\d+)\.json", planned, flags=re.M)
    assert sorted((label, stop) for label, _, stop in segments) == [
        ("fedavg", "0001"),
        ("fedavg", "0002"),
        ("fedprox", "0001"),
    ]
    assert len({key for label, key, _ in segments if label == "fedavg"}) == 1
    tables = {rule for rule in ran if rule.startswith("table")}
    assert tables == {f"table_results_studies_a_{name}_smoke" for name in ("long", "short")}


@pytest.mark.slow
def test_snakemake_rebuilds_deleted_files(project: Project) -> None:
    project.write(studies.settings(("fedavg", "scaffold"), 2))
    project.snakemake()
    once = project.hash_results()
    paths = {str(path.relative_to(project.folder)) for path in project.folder.glob("results/*/*.*")}
    (run,) = project.folder.glob("results/runs/scaffold/*")
    trained = studies.read_round_times(run)
    project.run("rm", f"{run}/joined/0002/times.json")
    ran = count_jobs(project.snakemake())
    assert (ran["segment"], ran["partition"]) == (1, 0), "although all tables exist"
    project.run("bash", "-c", "rm -r results/keys results/plots/curves.csv results/tables results/partitions/*/het*")
    ran = count_jobs(project.snakemake())
    assert (ran["partition"], ran["table"]) == (1, 1)
    assert studies.read_round_times(run) == trained, "missing tables are collected without training"
    project.run("bash", "-c", "rm results/partitions/*/*.json results/data/*.json")
    ran = count_jobs(project.snakemake())
    assert (ran["download"], ran["partition"]) == (1, 1), "records of SHA-256, which `show` and new rounds read"
    assert studies.read_round_times(run) == trained
    project.run("rm", "-r", "results/data", "results/partitions", "results/figures")
    ran = count_jobs(project.snakemake())
    assert (ran["download"], ran["partition"]) == (1, 1)
    project.run("rm", "-r", str(run))
    (project.folder / "results/plan.json").write_text("{}")
    ran = count_jobs(project.snakemake())
    assert ran["segment"] == 1
    assert "are as recorded" in project.fedpipe("verify", "--rerun", "0")
    assert project.hash_results() == once
    assert {str(path.relative_to(project.folder)) for path in project.folder.glob("results/*/*.*")} == paths
    assert "Nothing to be done" in project.snakemake("-n", "all")
