"""Hyperparameter search in the DAG: complete, edited, killed and resumed, and recorded with DVC."""

import json
import re
from typing import Any

import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import LOCAL, TABLE, Project, count_jobs, wait_until

NOTHING = "Nothing to be done"
RUNGS = ("results/tables/tuning-0001.json", "results/tables/tuning-0002.json")
TUNE: dict[str, Any] = {
    "over": {"federation.learning_rate": {"log": [0.01, 1]}, "algorithms.fedprox.mu": {"log": [0.01, 1]}},
    "draws": 4,
    "rungs": [1, 2],
    "by": "personal-on-validation",
    "seeds": [100],
}


def write_study(project: Project, **sections: Any) -> None:
    sections = {"dataset": {"validation_fraction": 0.2}, "tune": TUNE} | sections
    project.write(studies.settings(("fedavg", "fedprox"), 3, **sections))


def read_rungs(project: Project) -> list[dict[str, Any]]:
    return [json.loads((project.folder / path).read_text()) for path in RUNGS]


def kill_search_after_first_rung(project: Project) -> None:
    """Delete the runs of a search, run it again, and kill it when the first rung is ranked."""
    project.run("rm", "-r", "results/runs", "results/tables", "results/.provenance", "results/plan.json")
    with project.start_command("snakemake", "runs", *LOCAL) as killed:
        wait_until((project.folder / RUNGS[0]).exists, killed, f"{RUNGS[0]} existed")
        killed.kill()
    assert "tune: rung 2 of 2, 2 of 4 draws of each method until round 2" in project.fedpipe("status")
    assert "not complete" in project.fedpipe("show", check=False)
    project.snakemake("runs", "--unlock")


@pytest.mark.slow
def test_search_runs_from_draws_to_table(project: Project) -> None:
    write_study(project)
    bound = project.fedpipe("plan", "--dry-run")
    assert "at most 8 runs with 12 rounds for the draws. Runs of the winners: 2" in bound
    # 8 draws, 2 of each method until the second rung, and the default settings and the winner of each method.
    printed = project.snakemake(TABLE)
    assert count_jobs(printed)["segment"] == 8 + 4 + 4
    assert printed.count("checkpoint rank:") == 2
    first, second = read_rungs(project)
    assert [len(found["selected"]) for found in first["searches"]] == [2, 2]
    assert [len(found["selected"]) for found in second["searches"]] == [1, 1]
    assert NOTHING in project.run("snakemake", "--profile", "slurm", "-n", TABLE)
    table = (project.folder / "results/tables/results.md").read_text()
    assert "| FedProx" in table
    assert "the best of 4 draws" in table
    assert set(project.metrics()["fedprox"]) == {"tuning=tuned", "tuning=default"}
    assert "the winners of 4 draws are known" in project.fedpipe("status")
    assert "All verified" in project.fedpipe("verify")
    hashes = project.hash_results()

    project.run("rm", RUNGS[0])
    trace = project.fedpipe("trace", "results/tables/results.md", "fedavg.personal-on-local", check=False)
    assert "the search of `tune` is not complete. Type `fedpipe run`" in trace
    assert count_jobs(project.snakemake(TABLE))["segment"] == 0
    assert read_rungs(project) == [first, second]

    project.edit(tune={"draws": 6})
    segments = count_jobs(project.snakemake("runs"))["segment"]
    assert 4 <= segments <= 4 + 2 * 2 + 2, "two new draws of each method, and their effect on later rungs"
    project.edit(tune={"rungs": [1, 3]})
    segments = count_jobs(project.snakemake("runs"))["segment"]
    assert 4 <= segments <= 4 + 2, "the two best of each method for one more round, and maybe another winner"
    project.edit(tune={"draws": 4, "rungs": [1, 2]}, study={"seeds": [0, 1]})
    assert count_jobs(project.snakemake("runs"))["segment"] == 4, "only default settings and winners with the new seed"
    for before, rung in zip((first, second), read_rungs(project), strict=True):
        for name in ("ranking", "selected"):
            assert [found[name] for found in rung["searches"]] == [found[name] for found in before["searches"]]
    assert hashes.items() <= project.hash_results().items()

    path = project.folder / "fedpipe/algorithms/fedprox.py"
    path.write_text(path.read_text().replace(" = 0.01", " = 0.02"))
    segments = count_jobs(project.snakemake("runs"))["segment"]
    assert segments == 4 + 2 + 2 * 2, "the draws, default settings and winner of FedProx"


@pytest.mark.slow
def test_killed_search_resumes_with_same_winners(project: Project) -> None:
    """With TPE, 3 draws enter the first rung. One of them continues, and a new one is added."""
    write_study(project)
    project.edit(study={"algorithms": ["fedprox"]}, tune={"sampler": "tpe"}, federation={"rounds": 2})
    project.snakemake("runs")
    rungs, hashes = read_rungs(project), project.hash_results()
    project.edit(execution={"rounds_per_job": 1, "clients_per_job": 5})
    kill_search_after_first_rung(project)
    project.snakemake("runs")
    assert read_rungs(project) == rungs
    assert project.hash_results() == hashes
    assert [len(found["new_draws"]) for found in rungs[0]["searches"]] == [1]
    assert NOTHING in project.snakemake("runs")


@pytest.mark.slow
def test_dvc_records_and_restores_search(project: Project) -> None:
    """First with draws of the Sobol sequence, and then with TPE, whose first draws are the same."""
    project.run("rm", "-r", "studies")  # otherwise `fedpipe prune` plans all of them
    write_study(project)
    project.edit(study={"algorithms": ["fedavg"]}, tune={"over": {"federation.learning_rate": {"log": [0.01, 1]}}})
    project.run("dvc", "repro")
    (first, second), hashes = read_rungs(project), project.hash_results()
    assert "didn't change" in project.run("dvc", "repro")
    project.commit()
    assert "Nothing to remove" in project.run("fedpipe", "prune", "--yes")
    project.edit(tune={"sampler": "tpe", "draws": 6})
    project.run("dvc", "repro")
    (result,) = read_rungs(project)[0]["searches"]
    assert [new["draw"] for new in result["new_draws"]] == [4, 5]
    assert hashes.items() < project.hash_results().items(), "an edit only adds files"
    planned = (project.folder / "params.yaml").read_text()
    project.edit(study={"seeds": [0, 1]}, tune={"rungs": [1, 3]})
    pruned = project.run("fedpipe", "prune", check=False)
    assert "can't be planned" not in pruned
    keys = re.findall(r'"([0-9a-f]{12})"', "".join((project.folder / path).read_text() for path in RUNGS))
    assert keys
    assert not [key for key in keys if key in pruned], "the winner and TPE's draws have runs with all seeds"
    (project.folder / "params.yaml").write_text(planned)
    project.run("git", "stash")
    project.run("dvc", "checkout")
    assert read_rungs(project) == [first, second]
    assert NOTHING in project.snakemake()
    assert hashes.items() <= project.hash_results().items()
