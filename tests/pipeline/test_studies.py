"""Several studies in one clone: each has its own table and figures, and shares runs with the others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests import studies
from tests.pipeline.conftest import Project, jobs

NOTHING = "Nothing to be done"
OTHER = ("--config", "params=studies/other.yaml")


def test_another_study_shares_runs_and_leaves_the_main_one_as_it_is(project: Project) -> None:
    def report() -> dict[Path, str]:
        """The main study's plan, tables, figures and keys."""
        found = [path for path in (project.folder / "results").rglob("*") if path.is_file()]
        shared = {"runs", "studies", "logs", ".provenance"}
        own = [path for path in found if not shared & set(path.relative_to(project.folder / "results").parts)]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in own}

    studies.write(studies.settings(rounds=2), project.folder)
    project.snakemake()
    project.commit()
    main, bits = report(), project.bits()

    studies.write(studies.settings(("fedavg", "fedprox"), 2, report={"round": "best"}), project.folder)
    (project.folder / "params.yaml").rename(project.folder / "studies/other.yaml")
    project.run("git", "checkout", "-q", "params.yaml")
    ran = jobs(project.snakemake("all", *OTHER))
    assert ran == {"segment": 1, "collect": 1, "table": 1, "curves": 1, "matrices": 1, "partition_figure": 1, "all": 1}
    assert report() == main
    assert bits.items() <= project.bits().items()
    place = project.folder / "results/studies/other"
    assert "| fedprox" in (place / "tables/results.md").read_text()
    drawn = {path.stem.partition("-")[0] for path in (place / "figures").iterdir()}
    assert drawn == {"curves", "matrices", "partition"}
    assert sorted(path.name for path in (place / "keys").iterdir()) == ["fedavg.json", "fedprox.json"]

    assert NOTHING in project.snakemake("-n", "all")
    assert NOTHING in project.snakemake("-n", "all", *OTHER)
    assert NOTHING in project.run("snakemake", "--profile", "slurm", "-n", "all", *OTHER)
    assert project.run("git", "status", "--porcelain").splitlines() == ["?? studies/other.yaml"]
    assert "| fedprox" in project.run("fedpipe", "show", "--params", "studies/other.yaml")
    assert "| fedprox" not in project.run("fedpipe", "show")


def test_a_mistake_in_another_study_is_one_sentence(project: Project) -> None:
    (project.folder / "studies/other.yaml").write_text("federation: {rounds: 0}\n")
    printed = project.snakemake("all", *OTHER, check=False)
    assert printed.count("fedpipe: federation.rounds: 0 can't be used") == 1
    missing = project.snakemake("all", "--config", "params=studies/none.yaml", check=False)
    assert missing.count("fedpipe: studies/none.yaml: there is no such file") == 1
    assert "Traceback" not in printed + missing
    assert not (project.folder / "results/data").exists(), "no job may start"


FAULTY = """
from dataclasses import dataclass
from fedpipe.algorithms.fedavg import FedAvg

@dataclass(frozen=True, kw_only=True)
class Faulty(FedAvg):
    def combine(self, server, uploads):
        raise RuntimeError("a fault of the test")
"""


@pytest.mark.slow
def test_what_a_failed_job_said_is_told(project: Project) -> None:
    params = studies.settings(rounds=1) | {"algorithms": {"fedavg": {}, "faulty": {"algorithm": "own.Faulty"}}}
    studies.write(params | {"study": {"algorithms": ["fedavg", "faulty"]}}, project.folder)
    (project.folder / "own.py").write_text(FAULTY)
    assert "RuntimeError: a fault of the test" in project.snakemake("runs", check=False)
    project.snakemake("runs", "--quiet", "rules", "host", check=False)  # as `make demo` calls it
    said = project.run("fedpipe", "status")
    assert "RuntimeError: a fault of the test" in said
    assert "2 runs (1 done, 1 failed)" in said, "a run that does not depend on it goes on"


@pytest.mark.slow
def test_what_was_deleted_is_made_again(project: Project) -> None:
    studies.write(studies.settings(("fedavg", "scaffold"), 2), project.folder)
    project.snakemake()
    once = project.bits()
    made = {str(path.relative_to(project.folder)) for path in project.folder.glob("results/*/*.*")}
    (run,) = project.folder.glob("results/runs/scaffold/*")
    project.run("rm", "-r", "results/keys", "results/plots/curves.csv", "results/tables", f"{run}/metrics.parquet")
    ran = jobs(project.snakemake())
    assert (ran["segment"], ran["collect"], ran["table"]) == (0, 1, 1)
    project.run("rm", "-r", "results/data", "results/partitions", "results/figures")
    ran = jobs(project.snakemake())
    assert (ran["download"], ran["partition"]) == (1, 1)
    project.run("rm", "-r", str(run))
    (project.folder / "results/plan.json").write_text("{}")
    ran = jobs(project.snakemake())
    assert ran["segment"] == 1
    assert "are as recorded" in project.run("fedpipe", "verify", "--rerun", "0")
    assert project.bits() == once
    assert {str(path.relative_to(project.folder)) for path in project.folder.glob("results/*/*.*")} == made
    assert "Nothing to be done" in project.snakemake("-n", "all")
