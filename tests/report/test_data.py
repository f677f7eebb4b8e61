"""Commands read each file of a study once."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.storage import files, layout
from fedpipe.report import contents
from fedpipe.settings.report import Report
from tests.report.conftest import PARTITION, Tree, rounds

RECORDS = {"joined.json", "assignment.json", "plan.json", "sources.json"}  #: hashes and settings, not numbers
TABLE_FILES = {"metrics.parquet", "rounds.parquet", "times.json", "heterogeneity.parquet"}


@pytest.fixture
def study(make: Callable[..., Tree]) -> Tree:
    """A study with a searched grid and statistics. FedDW has the same runs at both grid points."""
    tree = make(["fedavg", "feddw"], seeds=[0, 1], grid={"federation.learning_rate": [1, 2]})
    for run in range(len(tree.runs)):
        tree.write(run, rounds([run, 5, run + 1], [[(1, 2), (run, 8)]] * 3))
        tree.write_matrices(run, {"SL": 0.25, "CR": 0.5})
    keys = {cell.seed: cell.key for cell in reversed(tree.plan.cells) if cell.algorithm == "feddw"}
    cells = tuple(
        dataclasses.replace(cell, key=keys[cell.seed]) if cell.algorithm == "feddw" else cell
        for cell in tree.plan.cells
    )
    statistics = ("client_std", "rounds_to_target", "difference")
    tree.change(
        cells=cells,
        runs=tuple(dict.fromkeys(map(tree.plan.get_run, cells))),
        report=Report(best_over=("federation.learning_rate",), statistics=statistics, target=0.5, baseline="fedavg"),
    )
    samples = {"sample": [0, 1, 2], "client": [0, 1, 1], "label": [0, 0, 1], "split": ["train", "train", "test"]}
    tree.write_table(layout.get_assignment_path(PARTITION), pa.table(samples), "assignment.json")
    tree.plan.write()
    return tree


def count_reads(monkeypatch: pytest.MonkeyPatch, *command: str) -> Counter[Path]:
    """Run a command of fedpipe and count how often it reads each file of numbers."""
    counts: Counter[Path] = Counter()
    read_bytes = files.read_bytes

    def count_read(path: Path) -> bytes:
        counts[path] += path.name not in RECORDS
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_bytes", count_read)
        CliRunner().invoke(app.app, command, catch_exceptions=False)
    return +counts


def test_table_command_reads_each_file_once(study: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch, "table")
    assert set(reads.values()) == {1}
    assert {path.name for path in reads} == {*TABLE_FILES, "assignment.parquet", "matrices.parquet"}
    assert sum(path.name == "metrics.parquet" for path in reads) == len(study.runs) == 6
    assert contents.find_outdated_files(contents.build_report_files(study.data)) == []


@pytest.mark.parametrize(
    ("name", "expected_names"),
    [
        ("curves", {"metrics.parquet", "rounds.parquet"}),
        ("matrices", {"metrics.parquet", "rounds.parquet", "matrices.parquet"}),
    ],
)
def test_figure_command_reads_each_file_once(
    study: Tree, monkeypatch: pytest.MonkeyPatch, name: str, expected_names: set[str]
) -> None:
    reads = count_reads(monkeypatch, "figure", name)
    assert (study.plan.study_files.figures_folder / f"{name}.svg").is_file()
    assert set(reads.values()) == {1}
    assert {path.name for path in reads} == expected_names


@pytest.mark.parametrize("form", ["markdown", "latex", "csv"])
def test_show_command_compares_only_shown_file(study: Tree, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    contents.write_report_files(contents.build_table_files(study.data))
    for name in ("results.csv", "results.html", "statistics.csv"):
        (study.plan.study_files.tables_folder / name).write_text("edited")
    reads = count_reads(monkeypatch, "show", "--format", form)
    assert set(reads.values()) == {1}
    assert {path.name for path in reads} == TABLE_FILES


def test_build_report_files_does_not_change_frames(study: Tree) -> None:
    data = study.data
    frames = [data.metrics, data.accuracies, data.round_summaries, data.score_table]
    copies = [frame.copy() for frame in frames]
    contents.build_report_files(data)
    for frame, copy in zip(frames, copies, strict=True):
        assert frame.equals(copy)
