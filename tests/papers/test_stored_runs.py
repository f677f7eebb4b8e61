"""Stored runs of small studies on digits: recording, damaged files, merges, pages and verification."""

import dataclasses
import re
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.cli.app import app
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import write_bytes
from fedpipe.papers import figures, layouts, make, measurements, recording, stored_runs
from fedpipe.papers.comparison import MeasuredCell
from fedpipe.papers.published import CellId
from fedpipe.papers.stored_runs import AccuracyCurve, RunStore, StoredRun
from fedpipe.papers.studies import HERE, PaperStudy
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.rungs import encode_rung
from fedpipe.report import tuning
from fedpipe.report.data import StudyData
from tests import small_studies as studies

PFPS = layouts.load_papers()["PFPS-LWC"]
STUDY = Path("studies/papers/pfps_lwc/table2.yaml")
READING = Path("studies/papers/pfps_lwc/readings/p2.yaml")


def plan_study(path: Path = STUDY, rounds: int = 2, **sections: Any) -> NewPlan:
    """Write and plan a study of two methods and two fractions of participants."""
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = ("fedavg", "fedper")
    settings = studies.settings(labels, rounds, model={"name": "mlp", "hidden": [8]})
    settings["evaluation"] = {"protocols": ["personal-on-local", "trained-on-local"]}
    settings["study"]["grid"] = {"partition.alpha": [0.3], "federation.participation": [0.3, 0.5]}
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    planner.write_plan(plan := planner.make_plan(path))
    return plan


def run_study(plan: Plan) -> None:
    studies.prepare_data(plan)
    studies.finish_study(plan)


def record_study(*paths: Path) -> list[str]:
    return [recorded.message for recorded in recording.record_runs_of_studies(list(paths or [STUDY]), "full")]


@pytest.fixture(scope="module")
def stored_study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPlan]:
    """A study of four runs and its store, in the current folder, which is a git repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stored"))
        for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
            patch.setenv(name, "somebody")
        Path("own.py").write_text("# custom code\n")
        Path(".gitattributes").write_text((studies.ROOT / ".gitattributes").read_text())
        run_git("init", "-q", "-b", "main")
        run_git("add", "own.py", ".gitattributes")
        run_git("commit", "-q", "-m", "begin")
        run_study(plan := plan_study())
        record_study()
        yield plan


@pytest.fixture
def files(stored_study: NewPlan) -> Iterator[tuple[Path, Path]]:
    """The two files of the store, which are restored afterwards."""
    paths = stored_runs.get_stored_runs_path(STUDY), stored_runs.get_stored_accuracies_path(STUDY)
    contents = [path.read_bytes() for path in paths]
    yield paths
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)


def change_accuracies(run: StoredRun, **fields: str) -> StoredRun:
    """Change a run's accuracies of its first protocol to 50 and 25 %, and other fields."""
    (curve, *curves) = run.curves
    frame = curve.to_frame().assign(accuracy=[0.5, 0.25])
    other_curve = AccuracyCurve.from_accuracies(curve.protocol, curve.average, curve.test_samples, frame)
    return dataclasses.replace(run, curves=(other_curve, *curves), **fields)


def run_git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def test_stored_runs_match_accuracies_of_study(stored_study: NewPlan) -> None:
    run_store = RunStore.read(STUDY)
    assert {(each.algorithm, each.point) for each in run_store.runs} == {
        (label, f"participation={fraction}, alpha=0.3") for label in ("fedavg", "fedper") for fraction in (0.3, 0.5)
    }
    data = StudyData(stored_study)
    expected = data.accuracies.query("average == 'sample'").set_index(["key", "protocol", "round"])["accuracy"]
    stored = pd.concat([each.accuracies_by_round.assign(key=each.key) for each in run_store.runs])
    stored = stored.set_index(["key", "protocol", "round"])["accuracy"]
    assert len(stored) == len(expected) == 4 * 2 * 2
    assert dict(stored) == pytest.approx(dict(expected), rel=5e-6)
    first_commit = run_git("rev-list", "--max-parents=0", "HEAD")[:10]  # other tests of this file may have made more
    for each in run_store.runs:
        assert (each.preset, each.rounds, each.seed, each.classes) == ("full", 2, 0, 10)
        assert each.commit == first_commit
        assert each.settings == stored_runs.compute_settings_digest(
            yaml.safe_load(stored_study.file_texts[f"results/runs/{each.algorithm}/{each.key}/run.yaml"])
        )
        assert each.curves[0].test_samples > 100


def test_repeated_recording_changes_no_file(files: tuple[Path, Path]) -> None:
    before = [path.read_bytes() for path in files]
    assert record_study() == [f"{files[0]}: 0 added, 4 stored"]
    assert [path.read_bytes() for path in files] == before
    assert before[0].count(b"\n") == 5
    assert before[1].count(b"\n") == 9
    assert b"\r" not in b"".join(before)


def test_recording_keeps_stored_runs_without_local_files(stored_study: NewPlan, files: tuple[Path, Path]) -> None:
    before = files[0].read_bytes()
    marker = stored_study.runs[0].merged_files.marker
    content = marker.read_bytes()
    marker.unlink()
    assert record_study() == [f"{files[0]}: 0 added, 4 stored"]
    marker.write_bytes(content)
    assert files[0].read_bytes() == before


def test_store_reads_names_with_line_separators_and_long_curves(files: tuple[Path, Path]) -> None:
    """A word processor's line break is allowed in the name of a grid value. A curve may have 20,000 rounds."""
    run_store = RunStore.read(STUDY)
    frame = pd.DataFrame({"round": range(1, 20_001), "accuracy": 0.123456})
    curve = AccuracyCurve.from_accuracies("trained-on-local", "sample", 100, frame)
    run = dataclasses.replace(run_store.runs[0], point="size=\u2028two\x85lines\v", curves=(curve,), rounds=20_000)
    assert run_store.add_run(run)
    run_store.write()
    assert RunStore.read(STUDY).runs == run_store.runs
    assert run in RunStore.read(STUDY).runs


def test_store_keeps_different_results_of_same_run(files: tuple[Path, Path]) -> None:
    """Other shared code or another machine may compute other accuracies for the same key."""
    run_store = RunStore.read(STUDY)
    first = run_store.runs[0]
    other = change_accuracies(first, commit="0123456789", date="2020-01-01")
    assert run_store.add_run(other)
    assert not run_store.add_run(other)
    run_store.write()
    assert record_study() == [f"{files[0]}: 0 added, 5 stored"]
    found = RunStore.read(STUDY).find_runs(first.settings, 2, "sample")
    assert [each.commit for each in found] == [first.commit, "0123456789"]
    assert RunStore.read(STUDY).find_runs(first.settings, 3, "sample") == []
    assert RunStore.read(STUDY).find_runs(first.settings, 2, "client") == []


def test_stored_run_marks_commit_with_changed_code(stored_study: NewPlan, files: tuple[Path, Path]) -> None:
    commit = run_git("rev-parse", "--short=10", "HEAD").strip()
    for path in files:
        path.unlink()
    Path("own.py").write_text("# edited\n")
    record_study()
    assert {each.commit for each in RunStore.read(STUDY).runs} == {f"{commit}-dirty"}
    run_git("checkout", "-q", "own.py")
    times = stored_study.runs[0].merged_files.times
    cell = stored_study.cells[0]
    assert times == cell.merged_files.times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpipe.core.components.code_digest.compute_shared_code_digest", lambda: "0" * 12)
        assert recording.make_stored_run(stored_study, [cell], commit).commit == f"{commit}-other"


def test_edited_study_is_not_recorded(stored_study: NewPlan, files: tuple[Path, Path]) -> None:
    text = STUDY.read_text()
    STUDY.write_text(text.replace("learning_rate: 0.1", "learning_rate: 0.2"))
    (message,) = record_study()
    STUDY.write_text(text)
    assert message.startswith(f"{STUDY}: skipped")
    assert f"`fedpipe plan --params {STUDY} --preset full`" in message


def test_recording_rejects_preset_without_finished_runs(stored_study: NewPlan) -> None:
    with pytest.raises(SettingsError, match=r"--preset: .*table2.yaml .* preset smoke"):
        list(recording.record_runs_of_studies([STUDY], "smoke"))


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
def test_damaged_store_raises_error_with_line(
    files: tuple[Path, Path], number: int, old: str, new: str, message: str
) -> None:
    text = files[number].read_text()
    assert old in text
    files[number].write_text(text.replace(old, new, 1))
    with pytest.raises(ArtifactError, match=message):
        RunStore.read(STUDY)


def test_store_of_other_encoding_raises_error(files: tuple[Path, Path]) -> None:
    """An editor has saved it as UTF-16."""
    files[0].write_text(files[0].read_text(), encoding="utf-16")
    with pytest.raises(ArtifactError, match=r"table2\.runs\.csv is damaged: it is not text\. Restore .* git"):
        RunStore.read(STUDY)


@pytest.mark.parametrize(("number", "message"), [(0, r"accuracies\.csv, line \d+: .*has no run"), (1, "no accuracies")])
def test_store_rejects_run_in_only_one_file(files: tuple[Path, Path], number: int, message: str) -> None:
    lines = files[number].read_text().splitlines(keepends=True)
    files[number].write_text(lines[0])
    with pytest.raises(ArtifactError, match=message):
        RunStore.read(STUDY)


def test_git_merges_stored_runs_of_two_machines(stored_study: NewPlan, files: tuple[Path, Path]) -> None:
    runs = RunStore.read(STUDY).runs
    for path in files:
        path.unlink()

    def commit_runs(*selected: StoredRun) -> None:
        RunStore(STUDY, selected).write()
        run_git("add", str(STUDY.parent))
        run_git("commit", "-q", "-m", "runs")

    commit_runs(runs[0])
    run_git("checkout", "-q", "-b", "other")
    commit_runs(runs[0], runs[1], runs[2])
    run_git("checkout", "-q", "main")
    commit_runs(runs[0], runs[1], runs[3])
    run_git("merge", "-q", "other")
    assert RunStore.read(STUDY).runs == runs
    run_git("branch", "-q", "-D", "other")
    run_git("rm", "-q", "--cached", *map(str, files))
    run_git("commit", "-q", "-m", "without runs")


def test_readings_run_only_if_selected(stored_study: NewPlan) -> None:
    plan = plan_study(READING, 1, study={"grid": {}})
    assert (
        layout.list_studies_without_readings(layout.PAPERS)
        == layout.list_studies_without_readings(Path.cwd() / layout.PAPERS)
        == [STUDY]
    )
    assert (
        layout.list_studies_without_readings(READING)
        == layout.list_studies_without_readings(READING.parent)
        == [READING]
    )
    assert layout.list_studies(layout.PAPERS) == [READING, STUDY]
    run_study(plan)
    assert record_study(READING) == [f"{READING.parent}/measured/p2.runs.csv: 2 added, 2 stored"]
    assert Plan.read(plan.study_files.plan).params == READING
    assert {each.rounds for each in RunStore.read(READING).runs} == {1}
    READING.unlink()


@pytest.fixture
def source(files: tuple[Path, Path]) -> Path:
    """The folder with the results."""
    return Path.cwd()


@pytest.fixture
def clone(source: Path, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The study, its store and its plan in another folder without results."""
    shutil.copytree("studies", tmp_path / "studies")
    monkeypatch.chdir(tmp_path)
    planner.write_plan(planner.make_plan(STUDY))
    return tmp_path


def change_store(*changed_runs: StoredRun) -> None:
    RunStore(STUDY, changed_runs).write()


def measure_cell(method: str = "FedPer", column: str = "0.3/0.5") -> MeasuredCell:
    """Measure a cell of PFPS-LWC's Table 2."""
    cells = measurements.measure_paper_cells(PFPS, lambda name: PaperStudy.find_planned_study(PFPS.stem, name, "full"))
    return cells[CellId("PFPS-LWC", "Table 2", method, column, "accuracy_pct")]


def test_cell_without_local_runs_uses_stored_runs(source: Path, clone: Path) -> None:
    stored = measure_cell()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(source)
        local = measure_cell()
    assert stored.number.mean == pytest.approx(local.number.mean, abs=1e-3)
    for name in ("keys", "test_samples", "classes", "diverged_runs", "is_generated", "is_incomplete"):
        assert getattr(stored, name) == getattr(local, name)
    commit = RunStore.read(STUDY).runs[0].commit
    assert {*local.origins.values()} == {HERE}
    (origin,) = stored.origins.values()
    assert re.fullmatch(rf"stored, computed on [\d-]+ [\d:]+ by the code of commit {commit}", origin)


def test_study_with_local_and_stored_runs_uses_both(source: Path, clone: Path) -> None:
    stored = measure_cell("FedAvg"), measure_cell("FedPer")
    for folder in ("data", "partitions", "runs/fedavg"):
        shutil.copytree(source / "results" / folder, clone / "results" / folder, dirs_exist_ok=True)
    fedavg, fedper = measure_cell("FedAvg"), measure_cell("FedPer")
    assert ({*fedavg.origins.values()}, fedper.origins) == ({HERE}, stored[1].origins)
    assert fedper.number == stored[1].number
    assert fedavg.number.mean == pytest.approx(stored[0].number.mean, abs=1e-3)


def test_pages_mark_stored_cells_and_draw_curves(clone: Path) -> None:
    make.write_paper_pages("full")
    folder = make.get_pages_folder("full")
    cells = pd.read_csv(folder / "cells.csv").query("table == 'Table 2' and paper == 'PFPS-LWC'")
    cells = cells[cells["measured_mean"].notna()]
    assert {*zip(cells["row"], cells["column"], strict=True)} == {
        (row, column) for row in ("FedAvg", "FedPer") for column in ("0.3/0.3", "0.3/0.5")
    }
    assert cells["origin"].str.startswith("stored, computed on ").all()
    page = (folder / "pfps_lwc.html").read_text()
    assert page.count(f"<li>{cells['origin'].iloc[0]}</li>") == 1, "a note of the table"
    assert "fedpipe verify --stored" in page
    assert "2 of 2 runs are stored.</p>" in page, "the note of Figure 5"
    curves = pd.read_csv(folder / "figures/pfps_lwc-figure-5.csv")
    assert {*curves["line"]} == {"FedAvg", "FedPer"}
    assert {*curves["x"]} == {1, 2}


def test_figure_that_needs_run_files_is_not_drawn(clone: Path) -> None:
    study = PaperStudy.find_planned_study(PFPS.stem, "table2", "full")
    assert study
    figure = layouts.Figure(study="table2", form="counts", statement="Samples by client and class.")
    drawing = figures.plot_figures(PFPS.model_copy(update={"figures": {"F": figure}}), {"table2": study}.get)
    assert drawing == {("PFPS-LWC", "F"): "Not drawn: only its accuracies are stored."}


def test_edited_study_ignores_stored_runs(clone: Path) -> None:
    for old, new in (("learning_rate: 0.1", "learning_rate: 0.2"), ("rounds: 2", "rounds: 3"), ("- 8", "- 9")):
        text = STUDY.read_text()
        assert old in text
        STUDY.write_text(text.replace(old, new))
        planner.write_plan(planner.make_plan(STUDY))
        cell = measure_cell()
        assert (cell.number, cell.reason) == (None, "not run")
        STUDY.write_text(text)


def test_preset_uses_only_stored_runs_with_its_settings(clone: Path) -> None:
    presets = {"smoke": {"federation.rounds": 1}, "reduced": {"study.algorithms": ["fedper"]}}
    STUDY.write_text(f"{STUDY.read_text()}\npresets: {presets}\n")
    for preset in presets:
        planner.write_plan(planner.make_plan(STUDY, preset))
    smoke, reduced = (PaperStudy.find_planned_study(PFPS.stem, "table2", preset) for preset in presets)
    assert smoke.finished_cells == ()
    assert [cell.algorithm for cell in reduced.finished_cells] == ["fedper", "fedper"]


def test_changes_of_preset_omit_hashes_of_files(clone: Path) -> None:
    text = STUDY.read_text()
    STUDY.write_text(f"{text}\npresets: {{smoke: {{federation.rounds: 1}}}}\n")
    planner.write_plan(planner.make_plan(STUDY, "smoke"))
    study = PaperStudy.find_planned_study(PFPS.stem, "table2", "smoke")
    STUDY.write_text(f"{text}\npresets: {{smoke: {{federation.rounds: 1, dataset.sha256: abc, dataset.subset: 9}}}}\n")
    assert study.preset_description == "federation.rounds 1; dataset.subset 9"


def test_cell_uses_stored_run_of_current_code(clone: Path) -> None:
    run = next(run for run in RunStore.read(STUDY).runs if (run.algorithm, "0.5" in run.point) == ("fedper", True))
    newer = change_accuracies(run, commit="0123456789", date="2099-01-01", algorithm_code="0" * 12, key="1" * 12)
    change_store(newer)
    cell = measure_cell()
    assert (cell.number and cell.number.mean, cell.keys) == (25, ("1" * 12,))
    (origin,) = cell.origins.values()
    assert origin.endswith("by the code of commit 0123456789. Different now: algorithm")
    change_store(dataclasses.replace(run, samples="1" * 12))
    (origin,) = measure_cell().origins.values()
    assert origin.endswith("Different now: samples (another copy of the data set)")
    change_store(newer, run)
    cell = measure_cell()
    assert cell.keys == (run.key,)
    (origin,) = cell.origins.values()
    assert re.search(r"differs by up to [\d.]+ points from the stored run of commit 0123456789, 2099-01-01$", origin)


def test_runs_without_common_round_have_no_difference() -> None:
    accuracies = {"protocol": ["personal-on-local"] * 2, "accuracy": [0.5, 0.6]}
    runs: list[Any] = [
        types.SimpleNamespace(accuracies_by_round=pd.DataFrame(accuracies | {"round": rounds}))
        for rounds in ([1, 2], [3, 4])
    ]
    assert stored_runs.compute_largest_accuracy_difference(*runs) == 0


def test_cell_uses_local_run_and_shows_difference_to_stored_run(files: tuple[Path, Path]) -> None:
    before = measure_cell()
    change_store(*(change_accuracies(run, commit="0123456789") for run in RunStore.read(STUDY).runs))
    cell = measure_cell()
    assert cell.number == before.number
    (origin,) = cell.origins.values()
    assert re.match(rf"{HERE}; differs by up to [\d.]+ points from the stored run of commit 0123456789", origin)


def test_papers_pages_reject_damaged_store(clone: Path) -> None:
    path = stored_runs.get_stored_accuracies_path(STUDY)
    path.write_text(path.read_text().replace(" 0.", " 0.0", 1))
    with pytest.raises(ArtifactError, match=r"runs\.csv, line \d: .*was edited"):
        make.write_paper_pages("full")


def run_verify(*words: str) -> tuple[int, str]:
    """Run `fedpipe verify --stored`. Return its exit status and output."""
    result = CliRunner().invoke(app, ["verify", "--stored", "--seed", "1", *words])
    return result.exit_code, f"{result.stdout}{result.exception or ''}"


def test_verify_recomputes_round_of_stored_run(clone: Path) -> None:
    assert run_verify("--rerun", "2") == run_verify("--rerun", "2", "--params", str(STUDY))
    status, output = run_verify("--rerun", "2")
    lines = output.splitlines()
    pattern = rf"{STUDY}, fed\w+ \(.*alpha=0.3\), seed 0, \w+, round [12]: recomputed with the same accuracies \(pers"
    assert all(re.match(pattern, line) for line in lines[:2])
    assert lines[2:] == ["All verified: 2 recomputed rounds"]
    assert status == 0
    assert not list(Path("results/runs").glob("*/*/rounds")), "the runs are trained in a temporary folder"


@pytest.mark.parametrize("sampler", ["sobol", "tpe"])
def test_verify_recomputes_round_of_tuned_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    """The winner of `tune` is found among the draws, also without the results of the search (except TPE's draws)."""
    monkeypatch.chdir(tmp_path)
    over = {"federation.learning_rate": {"log": [0.01, 1]}}
    tune = {"over": over, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [100]}
    plan = plan_study(
        dataset={"validation_fraction": 0.2},
        evaluation={"protocols": ["personal-on-local"]},
        study={"algorithms": ["fedavg"], "grid": {}},
        tune=tune | {"sampler": sampler},
    )
    for rounds in (1, 2):
        run_study(plan.add_search_results(has_draws=True))
        rung = tuning.compute_rung_result(plan, rounds, plan.draw_planners)
        write_bytes(plan.study_files.get_rung_result_path(rounds), encode_rung(rung))
        planner.write_plan(plan := planner.make_plan(STUDY))
    run_study(plan.add_search_results())
    record_study()
    stored = {run.point: run for run in RunStore.read(STUDY).runs}
    assert set(stored) == {"tuning=tuned", "tuning=default"}
    change_store(stored["tuning=tuned"])
    if sampler == "sobol":
        shutil.rmtree("results")
    status, output = run_verify()
    assert "fedavg (tuning=tuned), seed 0" in output
    assert (status, "recomputed with the same accuracies (personal-on-local)" in output) == (0, True)


def test_verify_rejects_other_accuracies_of_same_code(clone: Path) -> None:
    change_store(*map(change_accuracies, RunStore.read(STUDY).runs))
    status, output = run_verify()
    assert status == 1
    assert "although code, device and libraries are the same" in output
    assert re.search(r"personal-on-local (50|25)\.00 \(now \d", output)


def test_verify_shows_changed_code_for_other_accuracies(clone: Path) -> None:
    code = {"algorithm_code": "0" * 12, "shared_code": "1" * 12, "torch": "1.0"}
    runs = RunStore.read(STUDY).runs
    change_store(*(dataclasses.replace(run, **code) for run in runs))
    status, output = run_verify()
    assert (status, "the same accuracies" in output) == (0, True)
    change_store(*(change_accuracies(run, **code) for run in runs))
    status, output = run_verify()
    assert status == 1, "50 % differs too much"
    assert "Changed since then: algorithm, shared code, torch 1.0 (now " in output


def test_verify_rejects_stored_run_with_other_settings(clone: Path) -> None:
    STUDY.write_text(STUDY.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    status, output = run_verify()
    assert status == 1
    assert f"{STUDY} has other settings now. Type `git checkout " in output


def test_verify_needs_stored_run(clone: Path) -> None:
    error = run_verify("--preset", "smoke")[1]
    assert re.search(rf"--stored: {STUDY}: no stored run at preset smoke\. Use --preset full", error)
    shutil.rmtree(STUDY.parent / "measured")
    assert re.search(rf"--stored: {STUDY}: no stored run at preset full", run_verify()[1])


def test_store_command_adds_runs_and_prints_count(files: tuple[Path, Path]) -> None:
    files[0].unlink()
    files[1].unlink()
    for added in (4, 0):
        result = CliRunner().invoke(app, ["store"])
        assert (result.exit_code, result.stdout) == (0, f"{files[0]}: {added} added, 4 stored\n")


def test_parse_rounds_inverts_format_rounds() -> None:
    for rounds, text in (([1, 2, 3], "1-3"), ([5, 10, 15], "5-15/5"), ([7], "7"), ([1, 2, 4], "1 2 4")):
        assert stored_runs.format_rounds(rounds) == text
        assert stored_runs.parse_rounds(text) == rounds
