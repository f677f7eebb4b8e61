"""The DAG, run with the commands that users type."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedpipe.core.storage.layout import RunFiles
from tests import small_studies as studies
from tests.pipeline.conftest import LOCAL, TABLE, Project, count_jobs, wait_until

NOTHING = "Nothing to be done"


def test_snakemake_runs_study_from_digits_to_table_and_figures(project: Project) -> None:
    labels = ("fedavg", "feddw", "pfps_lwc")
    project.write(studies.settings(labels, 3, study={"seeds": [0, 1]}))
    printed = project.snakemake("all", "--verbose")
    ran = count_jobs(printed)
    assert ran == {
        "download": 1,
        "partition": 2,
        "partition_figure": 2,
        "segment": 6,
        "table": 1,
        "curves": 1,
        "matrices": 1,
        "all": 1,
    }
    choices = printed.count("Resources before job selection")
    assert 0 < choices <= 2 * ran.total(), "Snakemake selects jobs only after a job has ended"
    table = (project.folder / "results/tables/results.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert {"FedAvg", "FedDW", "PFPS-LWC"} <= set(rows)
    assert "–" in rows["PFPS-LWC"], "a method without a global model shows a dash"
    assert set(project.metrics()) == set(labels) - {"pfps_lwc"}, "PFPS-LWC has no accuracy for the first protocol"
    assert "<td>FedDW" in (project.folder / "results/tables/results.html").read_text()
    figures = {path.name for path in (project.folder / "results/figures").iterdir()}
    assert {"partition-dirichlet-0.3-seed0.svg", "partition-dirichlet-0.3-seed1.pdf"} <= figures
    for kind in ("svg", "pdf", "png"):
        assert (project.folder / f"results/figures/curves.{kind}").stat().st_size > 5000
        assert (project.folder / f"results/figures/matrices.{kind}").stat().st_size > 5000
        assert len(list((project.folder / "results/figures").glob(f"partition-*.{kind}"))) == 2
    assert NOTHING in project.snakemake()
    assert NOTHING in project.run("snakemake", "--profile", "slurm", "-n", "all")
    for path in (project.folder / "results/logs/segment").glob("*.log"):
        assert "round 3 of 3" in path.read_text()


def test_slurm_profile_plans_in_fresh_clone(project: Project) -> None:
    planned = project.run("snakemake", "--profile", "slurm", "-n", "all")
    assert f"segment                {3 * len(studies.SHIPPED)}" in planned
    assert not list((project.folder / "results").rglob("rounds*"))


@pytest.mark.slow
def test_single_round_jobs_reuse_segments_and_have_equal_bits(project: Project) -> None:
    labels, rounds = ("scaffold", "fedala", "pfps_lwc"), 2  # states of the server and of clients, and no global model
    protocols = ["global-on-global", "personal-on-local", "kept-on-global", "kept-on-local"]
    project.write(studies.settings(labels, rounds, evaluation={"protocols": protocols}))
    project.snakemake("runs")
    once = project.hash_results()
    assert any("server.pt" in name for name in once)
    project.edit(execution={"rounds_per_job": 1, "clients_per_job": 3})
    ran = count_jobs(project.snakemake("runs"))
    assert not ran.keys() & {"init", "train", "aggregate", "evaluate", "segment"}
    project.run("rm", "-r", "results/runs", "results/.provenance", "results/plan.json")
    ran = count_jobs(project.snakemake("runs"))
    assert ran["train"] == 2 * rounds * len(labels), "five participants are blocks of three and two"
    assert ran["aggregate"] == ran["evaluate"] == rounds * len(labels)
    assert ran["init"] == len(labels)
    assert project.hash_results() == once
    verified = project.fedpipe("verify", "--rerun", "3", check=False)  # it misses the tables
    assert verified.count("are as recorded") == verified.count("all bits agree") == len(labels)
    assert not list((project.folder / "results").rglob("block-*.pt")), "uploads are gone once aggregated"


def wait_for_round(project: Project, round_number: int, running: subprocess.Popen[bytes]) -> None:
    """Wait until a run has completed a round, while the process still runs."""

    def is_complete() -> bool:
        runs = project.folder.glob("results/runs/*/*")
        return any(round_number in RunFiles(run).list_complete_rounds() for run in runs)

    wait_until(is_complete, running, f"round {round_number} was complete")


@pytest.mark.slow
def test_killed_segment_of_snakemake_resumes(project: Project, tmp_path: Path) -> None:
    project.write(studies.settings(("fedala",), 4000))
    with project.start_command("snakemake", "runs", *LOCAL, stdout=subprocess.DEVNULL) as running:
        wait_for_round(project, 4, running)
        subprocess.run(["pkill", "-KILL", "-g", str(running.pid), "-f", "fedpipe segment"], check=True)
        assert running.wait() != 0
    (run,) = project.folder.glob("results/runs/*/*")
    complete = RunFiles(run).list_complete_rounds()[-1]
    assert 4 <= complete < 4000
    params = studies.settings(("fedala",), complete + 1)  # the other rounds would only take time
    project.write(params)
    project.snakemake("runs")
    (log,) = (project.folder / "results/logs/segment").glob(f"*-{complete + 1:04}.log")
    assert f"{complete} of {complete + 1} rounds are complete" in log.read_text()
    expected = studies.compute_reference(params, tmp_path / "reference")
    assert studies.hash_results(project.folder / "results/runs") == expected


OTHER = "studies/other.yaml"
COMMANDS = (
    *(["snakemake", "all", *LOCAL], ["dvc", "repro"], ["snakemake", "-n", "all"], ["fedpipe", "plan"]),
    ["snakemake", "all", "--config", f"params={OTHER}", *LOCAL],
)


@pytest.mark.parametrize("commands", [COMMANDS[:2], pytest.param(COMMANDS[2:], marks=pytest.mark.slow)])
def test_every_command_prints_one_error_for_invalid_settings(project: Project, commands: Sequence[list[str]]) -> None:
    for name in ("params.yaml", OTHER):
        project.write(studies.settings(rounds=2, partition={"alpha": -1}), name)
    project.commit()
    for command in commands:
        printed = project.run(*command, check=False)
        message = "fedpipe: partition.alpha: -1 can't be used. Use a value greater than 0.\n"
        assert printed.count(message) == 1, printed
        assert "Traceback" not in printed
        assert not (project.folder / "results/data").exists(), "no job may start"


@pytest.mark.slow
def test_touched_and_unrecorded_tables_are_made_again(project: Project) -> None:
    """With `--touch`, Snakemake would accept the old table, and with `--drop-metadata` an old record."""
    project.write(studies.settings(("fedavg", "feddw"), 2, evaluation={"protocols": ["personal-on-local"]}))
    assert "fedpipe: done" not in project.snakemake("all", "--until", "partition")
    project.snakemake(TABLE)
    by_sample = project.metrics()
    project.edit(report={"average": "client"})
    assert "fedpipe: done" not in project.snakemake("all", "--touch")
    assert project.metrics() == by_sample
    project.snakemake(TABLE)
    by_client = project.metrics()
    assert by_client != by_sample
    project.edit(report={"average": "sample"})
    project.snakemake(TABLE, "--drop-metadata")
    assert project.metrics() == by_sample
    project.edit(report={"average": "client"})
    project.snakemake(TABLE)
    assert project.metrics() == by_client
    assert "--persistence-backend" in project.snakemake("all", "--persistence-backend", "db", check=False)


@pytest.mark.slow
def test_readme_custom_algorithm_runs_from_one_file(project: Project) -> None:
    """Use the example of the README without changes."""
    readme = (project.folder / "README.md").read_text()
    section = readme[readme.index("## A custom algorithm") :]
    code = section.partition("```python\n")[2].partition("```")[0]
    changes = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    (project.folder / "own.py").write_text(code)
    params = studies.settings(("fedavg", "fedprox"), 2, algorithms={"prox": changes["algorithms"]["prox"]})
    params["algorithms"]["fedprox"] = {"mu": 0.1}
    params["study"]["algorithms"] = [*changes["study"]["algorithms"], "fedprox"]
    project.write(params)
    project.snakemake(TABLE)
    metrics = project.metrics()
    assert set(metrics) == {"fedavg", "prox", "fedprox"}
    assert metrics["prox"] == metrics["fedprox"]
    (run,) = (project.folder / "results/runs/prox").iterdir()
    assert "own.Prox" in (run / "run.yaml").read_text()
    (project.folder / "own.py").write_text(code.replace("self.mu / 2", "self.mu * 2"))
    assert count_jobs(project.snakemake("-n", "all"))["segment"] == 1, "an edit of the file reruns the algorithm"


@pytest.mark.slow
def test_grid_points_have_one_level_in_metrics_and_share_runs(project: Project) -> None:
    params = studies.settings(("fedavg", "fedprox"), 3)
    params["study"]["grid"] = {"partition.alpha": [0.1, 10.0], "algorithms.fedprox.mu": [0.1, 1.0]}
    project.write(params)
    ran = count_jobs(project.snakemake(TABLE))
    assert ran["partition"] == 2
    assert ran["segment"] == 2 + 4, "FedProx's mu does not multiply FedAvg's runs"
    metrics = project.metrics()
    assert set(metrics["fedavg"]) == {"alpha=0.1", "alpha=10.0"}
    assert len(metrics["fedprox"]) == 4
    assert metrics["fedavg"]["alpha=0.1"] != metrics["fedavg"]["alpha=10.0"]

    # one point without a grid is a run of the grid
    project.edit(partition={"alpha": 0.1}, study={"algorithms": ["fedavg"], "grid": {}})
    assert count_jobs(project.snakemake(TABLE)) == {"table": 1}
    alone = metrics["fedavg"]["alpha=0.1"]
    assert project.metrics() == {"fedavg": alone}

    # with the official split, no run depends on the test fraction of the pooled split
    project.edit(study={"grid": {"dataset.test_fraction": [0.2, 0.3]}})
    assert count_jobs(project.snakemake(TABLE)) == {"table": 1}, "no input file of the run has changed"
    assert project.metrics() == {"fedavg": {"test_fraction=0.2": alone, "test_fraction=0.3": alone}}
    rows = [line for line in project.fedpipe("show").splitlines() if line.startswith("| FedAvg")]
    assert [row.split("|")[2].strip() for row in rows] == ["0.2", "0.3"]
    assert "1 run (1 done)" in project.fedpipe("status")


@pytest.mark.slow
def test_grid_over_rounds_is_rows_of_one_run(project: Project) -> None:
    """The short setting equals the first rounds of the long setting for runs, segments and client blocks as jobs."""
    jobs_by_execution: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"rounds_per_job": 1, "clients_per_job": 3}, {"train": 8, "collect": 2}),
        ({"rounds_per_job": 3, "clients_per_job": None}, {"segment": 3, "collect": 2}),
        ({"rounds_per_job": None}, {"segment": 2}),
    ]
    params = studies.settings(rounds=4, artifacts={"keep_models": "last"})
    params["study"]["grid"] = {"length": {"short": {"federation.rounds": 2}, "long": {}}}
    project.write(params)
    bits = None
    for execution, expected in jobs_by_execution:
        project.run("rm", "-rf", "results/runs", "results/.provenance", "results/plan.json")
        project.edit(execution=execution)
        counted = count_jobs(project.snakemake(TABLE))
        assert {rule: counted[rule] for rule in expected} == expected
        frame = pd.read_csv(project.folder / "results/plots/curves.csv")
        frame = frame.set_index(["length", "protocol", "round"])["mean"]
        assert list(frame["short"]["global-on-global"].index) == [1, 2]
        assert list(frame["long"]["global-on-global"].index) == [1, 2, 3, 4]
        assert frame["short"]["global-on-global"].equals(frame["long"]["global-on-global"].loc[:2])
        last = {name: round(frame[name]["global-on-global"].iloc[-1], 2) for name in ("short", "long")}
        shown = project.metrics()["fedavg"]
        assert {name: shown[f"length={name}"] for name in last} == last
        (run,) = (project.folder / "results/runs/fedavg").iterdir()
        kept = sorted(path.parent.name for path in run.glob("rounds/*/server.pt"))
        assert kept == ["0000", "0001", "0002", "0003", "0004"], "the last states of both settings are kept"
        assert NOTHING in project.snakemake(TABLE)
        bits = bits or project.hash_results()
        assert project.hash_results() == bits
    assert "(2 or 4 rounds)" in project.fedpipe("show")
    assert "1 run (1 done), 4 of 4 rounds" in project.fedpipe("status")
    project.fedpipe("record", "fedavg")
    project.fedpipe("verify")


@pytest.mark.slow
def test_execution_and_keep_models_settings_reach_jobs(project: Project) -> None:
    sections = {"execution": {"stack": 4}, "artifacts": {"keep_models": "last"}}
    project.write(studies.settings(("scaffold",), 3, **sections))
    project.snakemake("runs")
    (run,) = (project.folder / "results/runs/scaffold").iterdir()
    (made_by,) = json.loads((run / "joined/0003/times.json").read_text())["made_by"]
    assert made_by["executor"] == "stack of 4"
    assert sorted(path.parent.name for path in run.glob("rounds/*/server.pt")) == ["0000", "0002", "0003"]
    project.edit(execution={"stack": 2})
    assert NOTHING in project.snakemake("runs"), "another executor reruns nothing"


def test_parsing_snakefile_imports_no_torch(project: Project) -> None:
    project.run("fedpipe", "plan")
    poison = project.folder / "poison"
    poison.mkdir()
    (poison / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = project.capture("snakemake", "-n", "all", PYTHONPATH=str(poison))
    assert done.returncode == 0, done.stderr
    assert Path(project.folder, "results/plan.json").exists()
