"""Code edits rerun only what depends on the edited code."""

import json
import os
import re
from collections import Counter
from typing import Any

import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import TABLE, Project, count_jobs, list_stages

pytestmark = pytest.mark.slow

NOTHING = "Nothing to be done"

OWN = """
from dataclasses import dataclass
import helper
from fedpipe.algorithms.fedprox import FedProx

@dataclass(frozen=True, kw_only=True)
class Near(FedProx):
    '''FedProx, whose risk counts for more.'''

    def loss(self, client, batch):
        return helper.FACTOR * super().loss(client, batch)
"""
HELPER = "FACTOR = 1.5\nUNUSED = 1\n"
OPTIONAL = "try:\n    from local_settings import FACTOR\nexcept ImportError:\n    FACTOR = 1.5\n"


def write_study(project: Project, rounds: int = 2, own: bool = True) -> None:
    """Write a study of FedAvg, FedProx, and a custom method that derives from FedProx and imports a second module."""
    labels = ("fedavg", "fedprox", *(("near",) if own else ()))
    params = studies.settings(labels, rounds)
    if own:
        params["algorithms"]["near"] = {"algorithm": "own.Near", "mu": 0.5}
        (project.folder / "own.py").write_text(OWN)
        (project.folder / "helper.py").write_text(HELPER)
    project.write(params)


def replace(project: Project, name: str, old: str, new: str) -> None:
    path = project.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def read_keys(project: Project) -> dict[str, str]:
    """Read the run key of each algorithm from the output of `fedpipe plan`."""
    listed = re.findall(r"^(\w+) .*\b([0-9a-f]{12})\b", project.run("fedpipe", "plan", "--dry-run"), flags=re.M)
    return dict(listed)


def list_changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {label for label in before if after[label] != before[label]}


def count_segments(printed: str) -> Counter[str]:
    """Count the segments that each algorithm ran."""
    return Counter(re.findall(r"^    output: results/runs/(\w+)/\w+/segments/", printed, flags=re.M))


FEDAVG, FEDPROX = "fedpipe/algorithms/fedavg.py", "fedpipe/algorithms/fedprox.py"
PULL = "self.mu)"  #: part of the proximal term of FedProx


def test_run_keys_depend_on_code_of_components(project: Project) -> None:
    write_study(project)
    first = read_keys(project)
    replace(project, "fedpipe/algorithms/feddw.py", "@dataclass", "LIMIT = 3\n\n\n@dataclass")
    replace(project, "helper.py", "UNUSED = 1", "UNUSED = 2  # unused")
    (project.folder / "other.py").write_text("FACTOR = 3\n")
    assert read_keys(project) == first
    replace(project, FEDAVG, 'uploads.mean("model")', 'uploads.with_equal_weights().mean("model")')
    second = read_keys(project)
    assert list_changed(first, second) == {"fedavg", "fedprox", "near"}
    replace(project, "fedpipe/models/mlp.py", "nn.ReLU()", "nn.Tanh()")
    assert list_changed(second, read_keys(project)) == {"fedavg", "fedprox", "near"}


def test_code_edit_reruns_only_runs_that_depend_on_it(project: Project) -> None:
    write_study(project)
    (project.folder / "helper.py").write_text(OPTIONAL)
    assert count_segments(project.snakemake("runs")) == {"fedavg": 1, "fedprox": 1, "near": 1}
    bits = project.hash_results()
    replace(project, FEDPROX, "from __future__", "# a comment\nfrom __future__")
    assert NOTHING in project.snakemake("runs")

    # edit a constant in a module that the custom module imports
    replace(project, "helper.py", "FACTOR = 1.5", "FACTOR = 2.5")
    printed = project.snakemake("runs")
    assert count_segments(printed) == {"near": 1}
    assert "1 run will be recomputed, because the code of algorithm 'own.Near' has changed" in printed
    assert bits.items() < project.hash_results().items(), "the earlier results are kept"

    # edit FedProx, from which the custom method derives
    replace(project, FEDPROX, PULL, f"100 * {PULL}")
    assert count_segments(project.snakemake("runs")) == {"fedprox": 1, "near": 1}

    # revert the edits, so that the earlier runs are reused
    replace(project, FEDPROX, f"100 * {PULL}", PULL)
    replace(project, "helper.py", "FACTOR = 2.5", "FACTOR = 1.5")
    assert NOTHING in project.snakemake("runs")

    # add a module that the custom module tries to import: no source file of the plan has changed
    (project.folder / "local_settings.py").write_text("FACTOR = 2.5\n")
    assert count_segments(project.snakemake("-n", "runs")) == {"near": 1}
    (project.folder / "local_settings.py").unlink()

    # edit and add rounds: no run mixes two versions of an algorithm
    replace(project, FEDPROX, PULL, f"3 * {PULL}")
    project.edit(federation={"rounds": 3})
    project.snakemake(TABLE)
    for label, rounds in (("fedavg", [2, 3]), ("fedprox", [2, 2, 3])):
        segments = (project.folder / "results/runs" / label).glob("*/segments/*.json")
        assert sorted(path.name for path in segments) == [f"{number:04}.json" for number in rounds]
    (log,) = (project.folder / "results/logs/segment").glob("fedavg-*-0003.log")
    lines = [line.partition(": ")[2] for line in log.read_text().splitlines()]
    assert lines[1:] == ["2 of 3 rounds are complete", "round 3 of 3"]
    assert project.run("fedpipe", "verify", "--rerun", "3").count("all bits agree") == 3


def test_readme_steps_for_new_algorithm_use_edited_code(project: Project) -> None:
    """Run a new algorithm with snakemake and `dvc repro`, and edit it and a module that another method imports."""
    project.run("fedpipe", "new-algorithm", "my_avg")
    params = studies.settings(("my_avg", "near"), 2, federation={"learning_rate": 0.05})
    params["algorithms"]["near"] = {"algorithm": "own.Near", "mu": 0.5}
    for name, text in (("own.py", OWN), ("helper.py", HELPER)):
        (project.folder / name).write_text(text)
    project.write(params)
    project.commit()
    project.snakemake(TABLE)
    first = project.metrics()
    code = "fedpipe/algorithms/my_avg.py"
    replace(project, code, 'return {"model": uploads.mean("model")}', 'return {"model": uploads.mean("model") * 0.5}')
    assert {"train@my_avg", "train@near"} <= set(list_stages(project.run("dvc", "repro")))
    second = project.metrics()
    assert list_changed(first, second) == {"my_avg"}

    replace(project, code, 'uploads.mean("model") * 0.5', 'uploads.with_equal_weights().mean("model")')
    printed = project.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 1
    assert [stage for stage in list_stages(printed) if "@" in stage] == ["train@my_avg"]
    third = project.metrics()
    assert list_changed(second, third) == {"my_avg"}

    replace(project, code, "from __future__", "# a comment\nfrom __future__")
    replace(project, "helper.py", "UNUSED = 1", "UNUSED = 2")
    printed = project.run("dvc", "repro")
    assert list_stages(printed) == ["plan"]
    assert not count_jobs(printed)

    replace(project, "helper.py", "FACTOR = 1.5", "FACTOR = 25")
    printed = project.run("dvc", "repro")
    assert count_jobs(printed)["segment"] == 1
    assert [stage for stage in list_stages(printed) if "@" in stage] == ["train@near"]
    assert list_changed(third, project.metrics()) == {"near"}


def test_segment_rejects_code_that_changed_after_planning(project: Project) -> None:
    """The user edits code while jobs wait in a queue."""
    write_study(project, own=False)
    project.snakemake("partitions")
    plan = json.loads((project.folder / "results/plan.json").read_text())
    replace(project, FEDPROX, PULL, f"100 * {PULL}")
    for run in plan["runs"]:
        printed = project.run("fedpipe", "segment", run["path"], "--stop", "1", check=run["algorithm"] == "fedavg")
        message = f"run {run['key']} belongs to another version of algorithm 'fedprox'"
        assert (message in printed) == (run["algorithm"] == "fedprox")
        assert (project.folder / run["path"] / "rounds.zip").exists() == (run["algorithm"] == "fedavg")


OPTIMIZERS, PARTITIONS = "fedpipe/engine/clients/optimizers.py", "fedpipe/data/partitions/base.py"
STEP = "alpha=-self.learning_rate"  #: part of the SGD step
CUTS = 'return np.searchsorted(boundaries, np.arange(count), side="right")'  #: assigns samples to clients
OTHER_CUTS = "return np.arange(count) % len(fractions)"


def test_runs_resume_after_shared_code_edit_only_if_bits_are_equal(project: Project) -> None:
    write_study(project, own=False)
    project.snakemake(TABLE)
    bits = project.hash_results()
    table = project.folder / "results/tables/results.md"
    assert "other shared code" not in table.read_text()

    # a refactoring: only the table is rebuilt with a note, and runs resume with more rounds
    replace(project, OPTIMIZERS, STEP, "alpha=-1 * self.learning_rate")
    printed = project.snakemake(TABLE)
    assert count_jobs(printed)["segment"] == 0
    assert "2 of 2 runs come from other shared code" in printed
    assert "2 of 2 runs come from other shared code" in table.read_text()
    verified = project.run("fedpipe", "verify")
    assert verified.count("all bits agree") == 2, "one round of each run"
    assert verified.count("the same samples") == 1
    project.edit(federation={"rounds": 3})
    project.snakemake(TABLE)
    records = list((project.folder / "results/runs").glob("*/*/continued/0002-*.json"))
    assert [json.loads(path.read_text())["agrees"] for path in records] == ["bits", "bits"]
    assert "other shared code" not in table.read_text(), "the last round comes from the current code"
    assert {name for name in bits if project.hash_results()[name] == bits[name]} > {
        name for name in bits if "/rounds/" in name
    }

    # a change of behavior: runs do not resume, and verify reports finished runs and their partition
    before = project.hash_results()
    replace(project, OPTIMIZERS, "alpha=-1 * self.learning_rate", "alpha=-2 * self.learning_rate")
    replace(project, PARTITIONS, CUTS, OTHER_CUTS)
    verified = project.run("fedpipe", "verify", check=False)
    replace(project, PARTITIONS, OTHER_CUTS, CUTS)
    assert verified.count("bits differ in ") == 2
    assert re.search("results/partitions/.*: .*other samples.* delete results/partitions/", verified)
    for grain in ({}, {"rounds_per_job": 1, "clients_per_job": 3}):
        project.edit(federation={"rounds": 4}, execution=grain)
        printed = project.snakemake("runs", check=False)
        assert "can't be resumed. The code that all runs share has changed since round 3" in printed
        assert {name: sha256 for name, sha256 in project.hash_results().items() if name in before} == before
    replace(project, OPTIMIZERS, "alpha=-2 * self.learning_rate", STEP)
    project.edit(execution={"rounds_per_job": None, "clients_per_job": None})
    assert count_jobs(project.snakemake("runs"))["segment"] == 2


def test_package_module_imported_by_method_is_shared_code(project: Project) -> None:
    (project.folder / "fedpipe/losses.py").write_text("FACTOR = 1.0\n")
    project.run("fedpipe", "new-algorithm", "my_avg")
    code, imported = "fedpipe/algorithms/my_avg.py", "from fedpipe.algorithms.base"
    replace(project, code, imported, f"from fedpipe.losses import FACTOR\n{imported}")
    replace(project, code, 'uploads.mean("model")', 'uploads.mean("model") * FACTOR')
    project.write(studies.settings(("my_avg",), 2))
    project.snakemake(TABLE)
    replace(project, "fedpipe/losses.py", "1.0", "0.0")
    assert "1 of 1 run comes from other shared code" in project.snakemake(TABLE)
    project.edit(federation={"rounds": 3})
    assert "can't be resumed. The code that all runs share has changed" in project.snakemake("runs", check=False)


def test_plan_rejects_outdated_or_damaged_bytecode(project: Project) -> None:
    """Python uses old bytecode if the source has the same time and size as before, for example after `cp -p`."""
    write_study(project)
    command = ("env", "-u", "PYTHONDONTWRITEBYTECODE", "fedpipe", "plan", "--dry-run")
    helper = project.folder / "helper.py"
    stamp = helper.stat().st_mtime_ns
    project.run(*command)
    assert list((project.folder / "__pycache__").glob("helper.*.pyc"))
    replace(project, "helper.py", "FACTOR = 1.5", "FACTOR = 3.5")
    os.utime(helper, ns=(stamp, stamp))
    printed = project.run(*command, check=False)
    assert "contains an earlier helper.py" in printed
    assert "Traceback" not in printed
    (compiled,) = (project.folder / "__pycache__").glob("helper.*.pyc")
    compiled.write_bytes(compiled.read_bytes()[:30])
    printed = project.run(*command, check=False)
    assert "'own.Near' can't be imported (EOFError: marshal data too short, own.py, line 3)" in printed
    assert "Traceback" not in printed
    compiled.unlink()
    project.run(*command)
    compileall = ("python", "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash", "helper.py")
    project.run(*compileall)
    project.run(*command)
    replace(project, "helper.py", "FACTOR = 3.5", "FACTOR = 40.5")
    assert "contains an earlier helper.py" in project.run(*command, check=False)


def test_commands_warn_about_results_of_other_commit(project: Project) -> None:
    """The user types `git checkout` without `dvc checkout`."""
    project.write(studies.settings(("fedavg",), 2))
    project.commit("before")
    for tag, rate in (("one", 0.1), ("two", 0.5)):
        project.edit(federation={"learning_rate": rate})
        project.run("dvc", "repro")
        project.commit(tag)
        project.run("git", "tag", tag)
    second = project.metrics()
    project.run("git", "checkout", "-q", "one")
    project.run("dvc", "checkout", "-q")
    project.run("git", "checkout", "-q", "two")
    overtaken = "params.yaml or code has changed since these results were made"
    assert overtaken in project.fedpipe("show")
    assert overtaken in project.fedpipe("trace", "results/tables/results.md", "fedavg.global-on-global")
    assert overtaken in project.fedpipe("compare", "two")
    loading = ("python", "-c", "import fedpipe; fedpipe.load('params.yaml')")
    assert "params.yaml" in project.run(*loading, check=False).splitlines()[-1]
    assert NOTHING not in project.run("fedpipe", "run")
    assert project.metrics() == second
    assert overtaken not in project.fedpipe("show")
