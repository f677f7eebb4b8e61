"""Stored runs: what is recorded of small studies on digits, and what the files in the repository survive."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.engine import collect
from fedpipe.engine.run import Run
from fedpipe.papers import recording, stored_runs
from fedpipe.papers.stored_runs import Curve, RunStore, StoredRun
from fedpipe.planning import download, partition, planner
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.report.data import StudyData
from fedpipe.settings.execution import Execution
from tests import small_studies as studies

STUDY = Path("studies/papers/pfps_lwc/table2.yaml")
READING = Path("studies/papers/pfps_lwc/readings/p2.yaml")


def plan_study(path: Path = STUDY, rounds: int = 2, **sections: Any) -> NewPlan:
    """Write a study of two methods and two values of alpha, and plan it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = ("fedavg", "fedper")
    settings = studies.settings(labels, rounds, model={"name": "mlp", "hidden": [8]})
    settings["evaluation"] = {"protocols": ["personal-on-local", "trained-on-local"]}
    settings["study"]["grid"] = {"partition.alpha": [0.3, 0.5]}
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    planner.write_plan(plan := planner.make_plan(path))
    return plan


def run(plan: NewPlan, count: int | None = None) -> None:
    """Run the first ``count`` runs of a study, by default all."""
    for name in {planned.dataset for planned in plan.runs}:
        if not layout.get_dataset_path(name).exists():
            download.download_dataset(name)
    for key in plan.partitions:
        partition.partition_dataset(key)
    for planned in plan.runs[:count]:
        for _ in Run(planned.files, Execution(), 1, plan.keep_models).run_segment(planned.rounds):
            pass
        collect.collect_rounds(planned.files, planned.rounds, plan.keep_models)


def record(*paths: Path) -> list[str]:
    return [recorded.message for recorded in recording.record_studies(list(paths or [STUDY]), "full")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPlan]:
    """A study of four runs and its store, in the current folder, which is a git repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stored"))
        for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
            patch.setenv(name, "somebody")
        Path("own.py").write_text("# custom code\n")
        Path(".gitattributes").write_text((studies.ROOT / ".gitattributes").read_text())
        git("init", "-q", "-b", "main")
        git("add", "own.py", ".gitattributes")
        git("commit", "-q", "-m", "begin")
        run(plan := plan_study())
        record()
        yield plan


@pytest.fixture
def files(ran: NewPlan) -> Iterator[tuple[Path, Path]]:
    """The two files of the store, which are restored afterwards."""
    paths = stored_runs.get_runs_path(STUDY), stored_runs.get_accuracies_path(STUDY)
    contents = [path.read_bytes() for path in paths]
    yield paths
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def test_a_stored_run_has_the_studys_numbers(ran: NewPlan) -> None:
    run_store = RunStore.read(STUDY)
    assert {(each.algorithm, each.point) for each in run_store.runs} == {
        (label, f"alpha={alpha}") for label in ("fedavg", "fedper") for alpha in (0.3, 0.5)
    }
    data = StudyData(ran)
    expected = data.accuracies.query("average == 'sample'").set_index(["key", "protocol", "round"])["accuracy"]
    stored = pd.concat([each.accuracies.assign(key=each.key) for each in run_store.runs])
    stored = stored.set_index(["key", "protocol", "round"])["accuracy"]
    assert len(stored) == len(expected) == 4 * 2 * 2
    assert dict(stored) == pytest.approx(dict(expected), rel=5e-6)
    for each in run_store.runs:
        assert (each.preset, each.rounds, each.seed, each.classes) == ("full", 2, 0, 10)
        assert each.commit == git("rev-parse", "--short=10", "HEAD").strip()
        assert each.settings == stored_runs.digest_settings(
            yaml.safe_load(ran.file_texts[f"results/runs/{each.algorithm}/{each.key}/run.yaml"])
        )
        assert each.curves[0].test_samples > 100


def test_recording_again_changes_nothing(files: tuple[Path, Path]) -> None:
    before = [path.read_bytes() for path in files]
    assert record() == [f"{files[0]}: 0 added, 4 stored"]
    assert [path.read_bytes() for path in files] == before
    assert before[0].count(b"\n") == 5
    assert before[1].count(b"\n") == 9
    assert b"\r" not in b"".join(before)


def test_runs_that_are_not_on_this_machine_stay(ran: NewPlan, files: tuple[Path, Path]) -> None:
    before = files[0].read_bytes()
    marker = ran.runs[0].merged_files.marker
    content = marker.read_bytes()
    marker.unlink()
    assert record() == [f"{files[0]}: 0 added, 4 stored"]
    marker.write_bytes(content)
    assert files[0].read_bytes() == before


def test_other_numbers_of_the_same_run_are_stored_next_to_the_old_ones(files: tuple[Path, Path]) -> None:
    """Other shared code or another machine computed them: the key is the same."""
    run_store = RunStore.read(STUDY)
    first = run_store.runs[0]
    fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
    (curve, *curves) = first.curves
    other_curve = Curve.from_values(
        curve.protocol, curve.average, curve.test_samples, curve.to_frame().assign(accuracy=[0.5, 0.25])
    )
    other = StoredRun(**fields | {"curves": (other_curve, *curves), "commit": "0123456789", "date": "2020-01-01"})
    assert run_store.add(other)
    assert not run_store.add(other)
    run_store.write()
    assert record() == [f"{files[0]}: 0 added, 5 stored"]
    found = RunStore.read(STUDY).find(first.settings, 2, "sample")
    assert [each.commit for each in found] == [first.commit, "0123456789"]
    assert RunStore.read(STUDY).find(first.settings, 3, "sample") == []
    assert RunStore.read(STUDY).find(first.settings, 2, "client") == []


def test_code_that_is_not_committed_is_named(ran: NewPlan, files: tuple[Path, Path]) -> None:
    commit = git("rev-parse", "--short=10", "HEAD").strip()
    for path in files:
        path.unlink()
    Path("own.py").write_text("# edited\n")
    record()
    assert {each.commit for each in RunStore.read(STUDY).runs} == {f"{commit}-dirty"}
    git("checkout", "-q", "own.py")
    times = ran.runs[0].merged_files.times
    cell = ran.cells[0]
    assert times == cell.merged_files.times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpipe.core.components.code_digest.compute_shared_code_digest", lambda: "0" * 12)
        assert recording.describe_run(ran, [cell], commit).commit == f"{commit}-other"


def test_an_edited_study_is_not_recorded(ran: NewPlan, files: tuple[Path, Path]) -> None:
    text = STUDY.read_text()
    STUDY.write_text(text.replace("learning_rate: 0.1", "learning_rate: 0.2"))
    (message,) = record()
    STUDY.write_text(text)
    assert message.startswith(f"{STUDY}: skipped")
    assert f"`fedpipe plan --params {STUDY}`" in message


def test_a_study_without_finished_runs_is_an_error(ran: NewPlan) -> None:
    with pytest.raises(SettingsError, match=r"--preset: .*table2.yaml .* preset smoke"):
        list(recording.record_studies([STUDY], "smoke"))


@pytest.mark.parametrize(
    ("number", "old", "new", "message"),
    [
        (0, ",fedper,", ",fedavg,", r"table2\.runs\.csv, line \d: run \w+ was edited"),
        (1, " 0.", " 0.1", r"table2\.runs\.csv, line 2: run \w+ .*accuracies\.csv, line \d, \d\."),
        (0, "preset", "presets", r"runs\.csv, line 1: the columns are not id, preset, "),
        (0, "\n", "\n<<<<<<< HEAD\n", r"runs\.csv, line 2: 1 values instead of \d+"),
        (1, ",sample,", ",", r"accuracies\.csv, line 2: 5 values instead of 6"),
    ],
)
def test_damage_is_an_error_with_its_line(
    files: tuple[Path, Path], number: int, old: str, new: str, message: str
) -> None:
    text = files[number].read_text()
    assert old in text
    files[number].write_text(text.replace(old, new, 1))
    with pytest.raises(ArtifactError, match=message):
        RunStore.read(STUDY)


@pytest.mark.parametrize(("number", "message"), [(0, r"accuracies\.csv, line \d+: .*has no run"), (1, "no accuracies")])
def test_a_run_in_only_one_of_the_files_is_an_error(files: tuple[Path, Path], number: int, message: str) -> None:
    lines = files[number].read_text().splitlines(keepends=True)
    files[number].write_text(lines[0])
    with pytest.raises(ArtifactError, match=message):
        RunStore.read(STUDY)


def test_git_merges_what_two_machines_record(ran: NewPlan, files: tuple[Path, Path]) -> None:
    runs = RunStore.read(STUDY).runs
    for path in files:
        path.unlink()

    def commit_runs(*selected: StoredRun) -> None:
        RunStore(STUDY, selected).write()
        git("add", str(STUDY.parent))
        git("commit", "-q", "-m", "runs")

    commit_runs(runs[0])
    git("checkout", "-q", "-b", "other")
    commit_runs(runs[0], runs[1], runs[2])
    git("checkout", "-q", "main")
    commit_runs(runs[0], runs[1], runs[3])
    git("merge", "-q", "other")
    assert RunStore.read(STUDY).runs == runs
    git("branch", "-q", "-D", "other")
    git("rm", "-q", "--cached", *map(str, files))
    git("commit", "-q", "-m", "without runs")


def test_studies_of_a_folder_readings_run_only_if_it_is_selected(ran: NewPlan) -> None:
    plan = plan_study(READING, 1, study={"grid": {}})
    assert layout.list_studies(layout.PAPERS) == layout.list_studies(Path.cwd() / layout.PAPERS) == [STUDY]
    assert layout.list_studies(READING) == layout.list_studies(READING.parent) == [READING]
    assert layout.list_all_studies(layout.PAPERS) == [READING, STUDY]
    run(plan)
    assert record(READING) == [f"{READING.parent}/measured/p2.runs.csv: 2 added, 2 stored"]
    assert Plan.read(plan.study_files.plan).params == READING
    assert {each.rounds for each in RunStore.read(READING).runs} == {1}
    READING.unlink()


def test_rounds_are_written_briefly() -> None:
    for rounds, text in (([1, 2, 3], "1-3"), ([5, 10, 15], "5-15/5"), ([7], "7"), ([1, 2, 4], "1 2 4")):
        assert stored_runs.format_rounds(rounds) == text
        assert stored_runs.parse_rounds(text) == rounds
