"""`fedpipe trace`: provenance of a table cell, back to the data file."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedpipe.analysis import trace
from fedpipe.analysis.trace import collect_cell_provenance
from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.planning.plan import Plan
from fedpipe.report import contents, results
from fedpipe.report.data import StudyData
from tests import small_studies as studies
from tests.analysis.conftest import finish
from tests.pipeline.conftest import ENVIRONMENT

TABLE = Path("results/tables/results.md")


def test_trace_lists_every_artifact_with_sha256(study: Path) -> None:
    result = collect_cell_provenance(TABLE, "scaffold.global-on-global")
    metrics = files.read_json(Path("results/metrics.json"))
    assert result["accuracy (%)"] == pytest.approx(metrics["scaffold"], abs=0.005)
    assert result["reported"] == "in the last evaluated round, over all test samples, mean over 2 seeds"
    assert result["table"] == {str(TABLE): files.compute_file_sha256(TABLE)}
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    assert sum(run["accuracy (%)"] for run in result["runs"]) / 2 == pytest.approx(result["accuracy (%)"], abs=1e-4)
    for run in result["runs"]:
        settings = read_generated_yaml(Path(run["run"]) / "run.yaml")
        assert result["settings"] | {"seed": run["seed"]} == settings
        assert "settings" not in run
        names = {Path(path).relative_to(run["run"]).as_posix() for path in run["artifacts"]}
        assert {"run.yaml", "joined/0003/metrics.parquet", "rounds/0003/server.pt", "rounds/0003/clients.pt"} < names
        assert f"{run['run']}/rounds.zip/0003/metrics.parquet" in run["artifacts"]
        for path, sha256 in run["artifacts"].items() | (run["data"].items() - {("samples", run["data"]["samples"])}):
            assert files.compute_file_sha256(Path(path.replace("rounds.zip", "rounds"))) == sha256
        ((partition_path, sha256),) = run["partition"].items()
        assert files.compute_file_sha256(Path(partition_path)) == sha256
        assert run["data"]["samples"] == settings["dataset"]["sha256"]
        (made_by,) = run["made by"]
        assert {"executor", "device", "shared", "fedpipe", "torch", "numpy", "python"} == set(made_by)
        assert made_by["shared"] == code_digest.compute_shared_code_digest()
        assert run["first recorded in"].startswith("unknown, because")
    assert yaml.safe_load(yaml.safe_dump(result)) == result


def test_trace_keeps_different_settings_in_each_run() -> None:
    runs = [{"settings": {"seed": seed, "model": {"name": "mlp"}, "federation": {"clients": seed}}} for seed in (4, 5)]
    assert trace._extract_common_settings(runs) == {"model": {"name": "mlp"}}
    assert runs == [{"settings": {"federation": {"clients": seed}}} for seed in (4, 5)]


def test_trace_shows_first_git_commit_of_run(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_git(*words: str) -> str:
        return subprocess.run(("git", *words), check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout

    def read_first_commit() -> str:
        return str(collect_cell_provenance(TABLE, "scaffold.global-on-global")["runs"][0]["first recorded in"])

    run_git("init", "-q")
    assert read_first_commit() == "no commit, because results/keys in git do not contain this run"
    run_git("add", "results/keys")
    run_git("commit", "-qm", "a study")
    run_git("commit", "-qm", "more", "--allow-empty")
    day = run_git("show", "-s", "--format=%as").strip()
    assert read_first_commit() == f"{run_git('rev-parse', '--short', 'HEAD~1').strip()} {day} a study"
    run_git("clone", "-q", "--depth", "1", f"file://{study}", str(tmp_path / "clone"))
    shutil.rmtree(".git")
    (tmp_path / "clone/.git").rename(".git")
    assert (
        read_first_commit()
        == f"{run_git('rev-parse', '--short', 'HEAD').strip()} {day} more, or earlier, because this clone is shallow"
    )
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "true")
        assert read_first_commit().startswith("unknown: fatal: detected dubious ownership")
        patch.setenv("PATH", str(tmp_path / "clone"))
        assert read_first_commit() == "unknown: git can't be run (No such file or directory)"


def test_trace_uses_best_round_of_each_run(study: Path) -> None:
    study_plan = Plan.read(Path("results/plan.json"))
    study_plan = dataclasses.replace(study_plan, report=study_plan.report.model_copy(update={"round": "best"}))
    study_plan.write()
    contents.write_report_files(contents.build_table_files(StudyData(study_plan)))
    result = collect_cell_provenance(TABLE, "fedavg.global-on-global")
    assert result["reported"].startswith("in each run's best round")
    for run in result["runs"]:
        table = files.read_parquet(Path(run["run"]) / "joined/0003/metrics.parquet").to_pandas()
        table = table[table["protocol"] == "global-on-global"].set_index("round")["correct"]
        rounds = {Path(path).parent.name for path in run["artifacts"] if "rounds" in path}
        assert rounds == {f"{table.idxmax():04d}"}


def test_trace_counts_only_seeds_with_score(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, AUC is not defined for test samples of one class."""
    compute = results.compute_reported_scores
    monkeypatch.setattr(
        results,
        "compute_reported_scores",
        lambda *arguments: compute(*arguments).assign(score=lambda frame: frame["score"].where(frame["seed"] == 1)),
    )
    contents.write_report_files(contents.build_table_files(StudyData(Plan.read(Path("results/plan.json")))))
    result = collect_cell_provenance(TABLE, "fedavg.global-on-global")
    assert result["reported"].endswith(", mean over 1 seed")
    assert result["accuracy (%)"] == result["runs"][1]["accuracy (%)"]


@pytest.mark.usefixtures("in_empty_folder")
def test_trace_accepts_grid_points_and_rejects_empty_cell() -> None:
    grid = {"seeds": [0], "grid": {"partition.alpha": [0.1, 1.0]}}
    finish(studies.settings(("fedavg", "local"), 1, study=grid))
    metrics = files.read_json(Path("results/metrics.json"))["fedavg"]
    for point in ("alpha=0.1", "alpha=1.0"):
        result = collect_cell_provenance(TABLE, f"fedavg.{point}.global-on-global")
        assert result["accuracy (%)"] == pytest.approx(metrics[point], abs=0.005)
        assert f"alpha={result['settings']['partition']['alpha']}" == point
    with pytest.raises(SettingsError, match=r"^'local\.alpha=0\.1\.global-on-global' .* results/tables/results\.md"):
        collect_cell_provenance(TABLE, "local.alpha=0.1.global-on-global")


@pytest.mark.usefixtures("in_empty_folder")
def test_trace_accepts_grid_values_in_any_order() -> None:
    grid = {"partition.alpha": [0.1, 1.0], "federation.batch_size": [8, 16]}
    finish(studies.settings(rounds=1, study={"seeds": [0], "grid": grid}))
    stored_plan = Plan.read(Path("results/plan.json"))  # with sorted names
    contents.write_report_files(contents.build_report_files(StudyData(stored_plan)))
    cells = [
        collect_cell_provenance(TABLE, f"fedavg.{point}.global-on-global")
        for point in ("alpha=0.1, batch_size=16", "batch_size=16, alpha=0.1")
    ]
    assert cells[0] == cells[1]
    assert cells[0]["settings"]["partition"]["alpha"] == 0.1
    with pytest.raises(SettingsError, match=r"^'fedavg\.alpha=0\.2, batch_size=8\.global-on-global' .* Did you mean"):
        collect_cell_provenance(TABLE, "fedavg.alpha=0.2, batch_size=8.global-on-global")


@pytest.mark.usefixtures("in_empty_folder")
def test_trace_distinguishes_cells_whose_lists_have_other_order() -> None:
    widths = [[8, 4, 6, 2], [8, 6, 4, 2]]
    grid = {"federation.batch_size": [8, 16], "model.hidden": widths}  # with sorted names
    finish(studies.settings(rounds=1, study={"seeds": [0], "grid": grid}))
    for hidden in widths:
        for point in (f"hidden={hidden}, batch_size=8", f"batch_size=8, hidden={hidden}"):
            settings = collect_cell_provenance(TABLE, f"fedavg.{point}.global-on-global")["settings"]
            assert list(settings["model"]["hidden"]) == hidden


@pytest.mark.parametrize("name", ["result.md", "times.csv", "results.html"])
def test_trace_rejects_other_files_of_tables_folder(study: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=rf"^'results/tables/{name}' .* results/tables/results\.md"):
        collect_cell_provenance(TABLE.with_name(name), "fedavg.global-on-global")


def test_trace_rejects_unknown_table_unknown_cell_and_edited_table(study: Path) -> None:
    with pytest.raises(SettingsError, match=r"^'results/metrics.json' .* results/tables/results.md"):
        collect_cell_provenance(Path("results/metrics.json"), "fedavg.global-on-global")
    with pytest.raises(SettingsError, match=r"^'fedavg\.global' .*'fedavg\.global-on-global'"):
        collect_cell_provenance(TABLE, "fedavg.global")
    csv = TABLE.with_suffix(".csv")
    text = csv.read_text()
    line = next(row for row in text.splitlines() if row.startswith("fedavg,global-on-global,accuracy,sample,last"))
    number = line.split(",")[5]
    csv.write_text(text.replace(line, line.replace(number, str(float(number) + 1), 1)))
    with pytest.raises(ArtifactError, match=r"^results/tables/results\.csv .*runs of params\.yaml"):
        collect_cell_provenance(TABLE, "fedavg.global-on-global")


def test_trace_without_pack_suggests_to_delete_run(study: Path) -> None:
    """`fedpipe run` alone does nothing, because the merged files and the segment's manifest exist."""
    run = next(run for run in Plan.read(Path("results/plan.json")).runs if run.algorithm == "scaffold")
    (run.path / "rounds.zip").unlink()
    with pytest.raises(ArtifactError, match=f"^{run.path}/rounds/0003/round.json is missing. Delete {run.path}. Then "):
        collect_cell_provenance(TABLE, "scaffold.global-on-global")


def test_trace_rejects_damaged_state_file(study: Path) -> None:
    (run,) = {path.parent for path in Path("results/runs/fedavg").glob("*/run.yaml")} - {
        Path(run["run"]) for run in collect_cell_provenance(TABLE, "fedavg.global-on-global")["runs"][1:]
    }
    server = run / "rounds/0003/server.pt"
    server.write_bytes(server.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match=r"rounds/0003/server\.pt is damaged"):
        collect_cell_provenance(TABLE, "fedavg.global-on-global")
