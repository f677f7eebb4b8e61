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
from tests.pipeline.conftest import ENVIRONMENT, LOCAL, TABLE, Project, count_jobs, wait_until
from tests.pipeline.test_snakemake import wait_for_round

NOTHING = "Nothing to be done"
OTHER = ("--config", "params=studies/other.yaml")


@pytest.mark.slow
def test_second_study_shares_runs_and_does_not_change_main_study(project: Project) -> None:
    def hash_report() -> dict[Path, str]:
        """Hash the main study's plan, tables, figures and keys."""
        found = [path for path in (project.folder / "results").rglob("*") if path.is_file()]
        shared = {"runs", "studies", "logs", ".provenance"}
        own = [path for path in found if not shared & set(path.relative_to(project.folder / "results").parts)]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in own}

    studies.write(studies.settings(rounds=2), project.folder)
    project.snakemake()
    project.commit()
    main, bits = hash_report(), project.hash_results()

    studies.write(studies.settings(("fedavg", "fedprox"), 2, report={"round": "best"}), project.folder)
    (project.folder / "params.yaml").rename(project.folder / "studies/other.yaml")
    project.run("git", "checkout", "-q", "params.yaml")
    ran = count_jobs(project.snakemake("all", *OTHER))
    assert ran == {"segment": 1, "table": 1, "curves": 1, "matrices": 1, "partition_figure": 1, "all": 1}
    assert hash_report() == main
    assert bits.items() <= project.hash_results().items()
    place = project.folder / "results/studies/other"
    assert "| FedProx" in (place / "tables/results.md").read_text()
    drawn = {path.stem.partition("-")[0] for path in (place / "figures").iterdir()}
    assert drawn == {"curves", "matrices", "partition"}
    assert sorted(path.name for path in (place / "keys").iterdir()) == ["fedavg.json", "fedprox.json"]

    assert NOTHING in project.snakemake("-n", "all")
    assert NOTHING in project.snakemake("-n", "all", *OTHER)
    assert project.run("git", "status", "--porcelain").splitlines() == ["?? studies/other.yaml"]
    assert "| FedProx" in project.run("fedpipe", "show", "--params", "studies/other.yaml")
    assert "| FedProx" not in project.run("fedpipe", "show")


@pytest.mark.slow
def test_preset_has_its_own_table_and_shares_runs_with_study(project: Project) -> None:
    params = studies.settings(("fedavg", "fedprox"), 2, study={"seeds": [0, 1]})
    presets = {"smoke": {"study.seeds": [0], "study.algorithms": ["fedavg"]}, "short": {"federation.rounds": 1}}
    studies.write(params | {"presets": presets}, project.folder)
    (project.folder / "params.yaml").rename(project.folder / "studies/other.yaml")
    smoke = ("--params", "studies/other.yaml", "--preset", "smoke")
    printed = project.run("fedpipe", "run", *smoke)
    assert "snakemake all --config params=studies/other.yaml preset=smoke --profile" in printed
    assert count_jobs(printed)["segment"] == 1
    assert (project.folder / "results/studies/other@smoke/tables/results.md").read_text().startswith("Preset smoke. ")
    assert not (project.folder / "results/studies/other").exists()
    assert "| FedProx" not in project.run("fedpipe", "show", *smoke)
    assert "1 run (1 done)" in project.run("fedpipe", "status", *smoke)
    assert "other@smoke: " in project.run("fedpipe", "verify", "--rerun", "0", *smoke)
    assert len(project.run("fedpipe", "plan", "--dry-run", *smoke).splitlines()) == 1
    assert NOTHING in project.snakemake("-n", "all", *OTHER, "preset=smoke")
    assert count_jobs(project.snakemake("-n", "all", *OTHER))["segment"] == 4 - 1, "the run of the preset is reused"
    message = project.run("fedpipe", "show", "--params", "studies/other.yaml", "--preset", "short", check=False)
    assert "Type `fedpipe run --params studies/other.yaml --preset short` first" in message
    for command in (("fedpipe", "plan", "--preset", "smok", *smoke[:2]), ("snakemake", "-n", *OTHER, "preset=smok")):
        assert "--preset: 'smok' is not a preset of this study. Did you mean 'smoke'?" in project.run(
            *command, check=False
        )


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
    studies.write(
        studies.settings(("waiting",), 1, algorithms={"waiting": {"algorithm": "own.Waiting"}}), project.folder
    )


@pytest.mark.slow
def test_finished_study_keeps_lock_of_running_study(project: Project) -> None:
    studies.write(studies.settings(rounds=1), project.folder)
    project.snakemake("runs")  # both studies use these files, so neither may lock them
    studies.write(studies.settings(rounds=2), project.folder)
    (project.folder / "params.yaml").rename(project.folder / "studies/other.yaml")
    write_waiting_study(project)
    with (project.folder / "waiting").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = ["snakemake", "runs", *LOCAL]
        with subprocess.Popen(command, cwd=project.folder, env=ENVIRONMENT, process_group=0) as running:
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
        running = subprocess.Popen(
            ["snakemake", "all", *LOCAL], cwd=project.folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
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
    project.run("fedpipe", "verify", "--rerun", "0")


SHORT = ("--config", "params=studies/deep/short.yaml")


@pytest.mark.slow
def test_studies_with_different_rounds_share_rounds_but_no_results(project: Project) -> None:
    (project.folder / "studies/deep").mkdir()
    studies.write(studies.settings(("fedavg", "scaffold"), 2, artifacts={"keep_models": "last"}), project.folder)
    (project.folder / "params.yaml").rename(project.folder / "studies/deep/short.yaml")
    studies.write(studies.settings(("fedavg", "scaffold"), 4), project.folder)
    project.snakemake()
    long, states = read_results(project, "results"), set(project.folder.glob("results/runs/*/*/rounds/*/*.pt"))
    ran = count_jobs(project.snakemake("all", *SHORT))
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
    commands = [["snakemake", "all", *options, *LOCAL] for options in ((), SHORT)]
    working = [subprocess.Popen(command, cwd=project.folder, env=ENVIRONMENT) for command in commands]
    assert [segment.wait() for segment in working] == [0, 0]
    assert read_results(project, "results") == long
    assert read_results(project, "results/studies/deep/short") == short
    assert project.hash_results() == bits
    for rounds, params in ((4, "params.yaml"), (2, "studies/deep/short.yaml")):
        assert f"({rounds} rounds)" in project.run("fedpipe", "show", "--params", params)
    project.run("fedpipe", "verify", "--rerun", "0", "--params", "studies/deep/short.yaml")
    project.run("fedpipe", "record", "fedavg", "--params", "studies/deep/short.yaml")
    assert NOTHING in project.snakemake("-n", "all")
    assert NOTHING in project.snakemake("-n", "all", *SHORT)


def read_results(project: Project, place: str) -> dict[str, bytes]:
    """Read the results of a study, except times."""
    names = ("tables/results.csv", "metrics.json", *(f"plots/{name}.csv" for name in ("curves", "clients", "matrices")))
    return {name: (project.folder / place / name).read_bytes() for name in names}


def read_accuracies(project: Project, place: str, round_number: int) -> list[str]:
    """Read the mean accuracies of a round from a study's curves."""
    rows = csv.DictReader((project.folder / place / "plots/curves.csv").open())
    return [row["mean"] for row in rows if row["round"] == str(round_number)]


@pytest.mark.slow
def test_study_path_inside_results_of_other_study_prints_one_error(project: Project) -> None:
    (project.folder / "studies/a").mkdir()
    (project.folder / "params.yaml").rename(project.folder / "studies/a/tables.yaml")
    for command in (["fedpipe", "plan", "--params", "studies/a/tables.yaml"], ["snakemake", "-n", "all", "--config"]):
        given = [*command, "params=studies/a/tables.yaml"] if command[0] == "snakemake" else command
        output = project.run(*given, check=False)
        message = "fedpipe: studies/a/tables.yaml: 'a/tables' is for files of the study 'a'. Rename 'tables'."
        assert output.splitlines()[-1] == message
        assert "Traceback" not in output
    assert not (project.folder / "results/studies").exists()


def test_folder_of_studies_is_one_dag(project: Project) -> None:
    """A shared run is computed once, for both numbers of rounds. A study that needs a download is left out."""
    (project.folder / "studies/a").mkdir()
    for name, labels, rounds, dataset in (
        ("long", ("fedavg",), 2, "digits"),
        ("short", ("fedavg", "fedprox"), 1, "digits"),
        ("far", ("fedavg",), 1, "mnist"),
    ):
        study = studies.settings(labels, 9, dataset={"name": dataset})
        studies.write(study | {"presets": {"smoke": {"federation.rounds": rounds}}}, project.folder)
        (project.folder / "params.yaml").rename(project.folder / f"studies/a/{name}.yaml")
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
def test_invalid_or_missing_study_file_prints_one_error(project: Project) -> None:
    (project.folder / "studies/other.yaml").write_text("federation: {rounds: 0}\n")
    printed = project.snakemake("all", *OTHER, check=False)
    assert printed.count("fedpipe: federation.rounds: 0 ") == 1
    missing = project.snakemake("all", "--config", "params=studies/none.yaml", check=False)
    assert missing.count("fedpipe: studies/none.yaml: the file does not exist") == 1
    assert "Traceback" not in printed + missing
    assert not (project.folder / "results/data").exists(), "no job may start"


FAULTY = """
from dataclasses import dataclass
from fedpipe.algorithms.fedavg import FedAvg

@dataclass(frozen=True, kw_only=True)
class Faulty(FedAvg):
    def aggregate(self, server, uploads):
        raise RuntimeError("a fault of the test")
"""


@pytest.mark.slow
def test_status_and_show_print_error_of_failed_job(project: Project) -> None:
    params = studies.settings(rounds=1) | {"algorithms": {"fedavg": {}, "faulty": {"algorithm": "own.Faulty"}}}
    studies.write(params | {"study": {"algorithms": ["fedavg", "faulty"]}}, project.folder)
    (project.folder / "own.py").write_text(FAULTY)
    assert "RuntimeError: a fault of the test" in project.snakemake("runs", check=False)
    output = project.run("fedpipe", "status")
    assert "RuntimeError: a fault of the test" in output
    assert "2 runs (1 done, 1 failed)" in output, "an independent run continues"

    def list_written_files() -> list[Path]:
        return sorted(path for path in project.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)

    before = list_written_files()
    shown = project.run("fedpipe", "show", check=False)
    (row,) = (line for line in shown.splitlines() if line.startswith("| FedAvg"))
    assert ": 2 runs (1 done, 1 failed)" in shown
    assert "| faulty" not in shown
    (log,) = (project.folder / "results/logs/segment").glob("faulty-*.log")
    (message,) = (line for line in shown.splitlines() if line.startswith("faulty seed 0: segment failed: "))
    assert "(RuntimeError: a fault of the test)" in message
    assert message.endswith(f" ({log.relative_to(project.folder)})")
    last_line = shown.splitlines()[-1]
    assert last_line.startswith("fedpipe: results/tables/results.md is missing")
    assert "`fedpipe run`" in last_line
    assert list_written_files() == before

    # a study without the failed algorithm shows the same row
    project.edit(study={"algorithms": ["fedavg"]})
    project.snakemake(TABLE)
    assert row in project.run("fedpipe", "show").splitlines()

    # show does not print the table of an earlier plan
    project.edit(study={"algorithms": ["fedavg", "faulty"]})
    project.snakemake("all", check=False)
    shown = project.run("fedpipe", "show", check=False)
    assert "PARTIAL" in shown
    assert "results/tables/results.md belongs to an earlier plan. Type `fedpipe run`" in shown


@pytest.mark.slow
def test_snakemake_rebuilds_deleted_files(project: Project) -> None:
    studies.write(studies.settings(("fedavg", "scaffold"), 2), project.folder)
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
    assert "are as recorded" in project.run("fedpipe", "verify", "--rerun", "0")
    assert project.hash_results() == once
    assert {str(path.relative_to(project.folder)) for path in project.folder.glob("results/*/*.*")} == paths
    assert "Nothing to be done" in project.snakemake("-n", "all")
