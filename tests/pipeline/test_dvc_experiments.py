"""The table of experiments that `dvc exp show` prints of the shipped study."""

import csv
import io
import json
import os
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpipe.core.storage import files
from fedpipe.planning import planner
from fedpipe.report import contents
from tests import small_studies as studies
from tests.docs.page_blocks import commands
from tests.pipeline.conftest import Project, count_jobs, wait_until

WIDTH = 160  #: columns of a terminal


def record(project: Project, metrics: dict[str, float], **changes: Any) -> None:
    """Record the shipped study with DVC: changed settings, plan and keys, and these metrics instead of those of runs.

    No column depends on the other files. The tests of the tutorial use real runs.
    """
    params = yaml.safe_load((studies.ROOT / "params.yaml").read_text())
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = params
        for section in sections:
            place = place[section]
        place[key] = value
    project.write(params)
    new_plan = planner.make_plan()
    planner.write_plan(new_plan)
    contents.write_report_files(contents.build_run_key_files(new_plan))
    files.write_json(new_plan.study_files.metrics, metrics)
    execute = yaml.safe_load((project.folder / "dvc.yaml").read_text())["stages"]["execute"]
    outs = [next(iter(out)) if isinstance(out, dict) else out for out in execute["outs"] + execute["plots"]]
    for place in (Path(out) for out in (*outs, "results/.provenance", *(f"results/runs/{name}" for name in metrics))):
        if not place.exists():
            file = place if place.suffix in (".csv", ".txt") else place / "data"
            files.write_bytes(file, b"something\n")
    project.run("dvc", "commit", "-fq")


@pytest.mark.slow
def test_dvc_exp_show_of_shipped_study_fits_terminal(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """One experiment changes one method, and another experiment changes all methods."""
    monkeypatch.chdir(project.folder)
    shipped = yaml.safe_load((studies.ROOT / "params.yaml").read_text())
    first = {name: 61.25 + index for index, name in enumerate(shipped["study"]["algorithms"])}
    record(project, first)
    project.commit()
    lines = [
        line for page in ("README.md", "docs/dvc.md") for line in commands(page) if line.startswith("dvc exp show")
    ]
    assert len(lines) == 2
    for changes, metrics in (
        ({"algorithms__feddw__mu": 0.1}, first | {"feddw": 12.34}),
        ({"partition__alpha": 0.5}, {name: value + 3.5 for name, value in first.items()}),
    ):
        record(project, metrics, **changes)
        project.run("dvc", "exp", "save", "-n", "tried")
        changed = {name: metrics[name] for name in sorted(metrics) if metrics[name] != first[name]}
        changed |= {name.replace("__", "."): value for name, value in changes.items()}
        for line in lines:
            shown = project.run("env", f"COLUMNS={WIDTH}", "bash", "-c", line).splitlines()
            assert max(map(len, shown)) <= WIDTH, shown
            assert not [row for row in shown if "…" in row], "nothing is cut off"
            (head,) = (row for row in shown if "Experiment" in row)
            assert head.split() == ["Experiment", "Created", *changed], "only what the experiment changed"
            (experiment,) = (row for row in shown if "[tried]" in row)
            assert experiment.split()[-len(changed) :] == [str(value) for value in changed.values()]
        project.run("dvc", "exp", "remove", "tried")


@pytest.mark.slow
def test_dvc_exp_show_omits_failed_queued_experiment(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC shows a failed experiment with the accuracies of its base commit, although it has no runs."""
    monkeypatch.chdir(project.folder)
    shipped = yaml.safe_load((studies.ROOT / "params.yaml").read_text())
    record(project, {name: 61.25 for name in shipped["study"]["algorithms"]})
    project.commit()
    project.run("dvc", "exp", "run", "--queue", "-n", "broken", "-S", "algorithms.feddw.mu=-1.0")
    printed = project.run("dvc", "exp", "run", "--run-all", check=False)
    assert "algorithms.feddw.mu" in printed, printed
    states = list(csv.DictReader(io.StringIO(project.run("dvc", "exp", "show", "--csv"))))
    (failed,) = [row for row in states if row["State"] == "Failed"]
    assert failed["feddw"] == "61.25", "DVC clears the accuracy now, so the option is unnecessary"
    (line,) = [line for line in commands("docs/dvc.md") if line.startswith("dvc exp show")]
    shown = project.run("bash", "-c", line)
    assert "broken" not in shown
    assert "Failed" not in shown


@pytest.mark.slow
def test_dvc_saves_and_commits_only_tables_and_figures_of_the_plan(project: Project) -> None:
    """Both commands record the files as they are. The completion mark is missing if one is of another plan."""
    missing = "output 'results/complete.txt' does not exist"
    figures = project.folder / "results/figures"
    project.write(studies.settings(("fedavg",), 1))
    project.run("dvc", "repro")
    project.commit()
    metrics, curves = project.metrics(), (figures / "curves.svg").read_bytes()
    slower = studies.settings(("fedavg",), 1, federation={"learning_rate": 0.01})
    project.write(slower)
    project.run("fedpipe", "plan")
    assert missing in project.run("dvc", "exp", "save", "-n", "unchanged", check=False)
    project.write(studies.settings(("fedavg",), 1))
    assert "Nothing to be done" in project.run("fedpipe", "run")
    project.run("dvc", "exp", "save", "-n", "unchanged")
    project.write(slower)
    project.run("fedpipe", "plan")
    assert missing in project.run("dvc", "commit", "-f", check=False)
    assert count_jobs(project.run("dvc", "repro"))["segment"] == 1
    assert project.metrics() != metrics
    project.run("dvc", "exp", "save", "-n", "slower")
    project.run("dvc", "exp", "branch", "slower", "branch-of-slower")
    plots = project.run("git", "ls-tree", "--name-only", "branch-of-slower", "results/plots/").split()
    assert plots == ["results/plots/curves.csv"], "only DVC has the others"
    project.write(studies.settings(("fedavg",), 1))
    project.run("snakemake", "results/tables/results.md", "--cores", "2")
    assert project.metrics() == metrics
    assert (figures / "curves.svg").read_bytes() != curves
    assert missing in project.run("dvc", "exp", "save", "-n", "only-table", check=False)
    project.run("fedpipe", "run")
    assert (figures / "curves.svg").read_bytes() == curves
    project.run("dvc", "exp", "save", "-n", "faster")
    assert not count_jobs(project.run("dvc", "repro"))


@pytest.mark.slow
def test_queued_experiment_runs_after_worker_of_dvc_has_ended(tmp_path: Path) -> None:
    """An empty message ends the worker, as in docs/upstream.md. The command then waits until it is interrupted."""
    project, exps = Project(tmp_path), tmp_path / ".dvc/tmp/exps"
    project.run("git", "init", "-q")
    project.run("dvc", "init", "-q")
    project.write({"x": 1})
    (tmp_path / "dvc.yaml").write_text("stages: {train: {cmd: echo trained, params: [x]}}")
    project.run("dvc", "repro", "-q")
    project.commit()
    project.run("dvc", "exp", "run", "--queue", "-n", "larger", "-S", "x=2")
    (exps / "celery/broker/in/0_0.celery.msg").touch()

    def has_worker_ended() -> bool:
        record = exps / "celery/dvc-exp-worker-1.json"
        return record.exists() and json.loads(record.read_text() or "{}").get("returncode") is not None

    with project.start_command("dvc", "exp", "run", "--run-all", stdout=subprocess.PIPE, text=True) as waiting:
        wait_until(has_worker_ended, waiting, "the end of the worker")
        waiting.send_signal(signal.SIGINT)
        assert "Reproducing experiment" not in waiting.stdout.read()
    assert "Reproducing experiment 'larger'" in project.run("dvc", "exp", "run", "--run-all")


@pytest.mark.slow
def test_interrupted_experiment_continues_with_dvc_repro(project: Project) -> None:
    """As docs/dvc.md describes, `dvc exp save` then stores it. Its second round was trained once, at one time."""
    project.write(studies.settings(("fedavg",), 1))
    project.run("dvc", "repro")
    project.commit()
    (run,) = (project.folder / "results/runs/fedavg").iterdir()
    with project.start_command(
        *("dvc", "exp", "run", "-n", "longer", "-S", "federation.rounds=400"), stderr=subprocess.PIPE, text=True
    ) as experiment:
        wait_until((run / "rounds/0003/round.json").is_file, experiment, "round 3")
        times = (run / "rounds/0002/times.json").read_bytes()
        os.killpg(experiment.pid, signal.SIGINT)
        assert "type `dvc repro`, then `dvc exp save -n longer -I results/keys`" in experiment.stderr.read()
    assert count_jobs(project.run("dvc", "repro"))["segment"] == 1
    with zipfile.ZipFile(run / "rounds.zip") as rounds:
        assert rounds.read("0002/times.json") == times
    metrics = project.metrics()
    project.run("dvc", "exp", "save", "-n", "longer", "-I", "results/keys")
    project.run("bash", "-ec", "git checkout -q . && dvc checkout -q")
    assert project.metrics() != metrics
    project.run("dvc", "exp", "apply", "longer")
    assert project.metrics() == metrics
    assert not count_jobs(project.run("dvc", "repro"))
