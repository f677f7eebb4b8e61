"""published.csv contains each published number once and matches the transcript."""

import csv
import os
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from fedpipe.papers import published
from fedpipe.papers.published import CellId
from tests.small_studies import ROOT

SHARED = Path(os.environ.get("FEDPIPE_SHARED", ROOT.parent / "shared"))
COUNTS = {
    "target": 551,
    "failed": 9,
    "absent": 8,
    "suspect": 3,
    "formula": 18,
    "setting": 15,
    "derived": 34,
    "claim": 3,
}


@pytest.fixture
def numbers():
    return published.load_published_numbers()


def test_published_csv_has_641_numbers_by_status(numbers):
    assert len(numbers) == 641
    assert Counter(number.status for number in numbers.values()) == COUNTS


def test_failed_and_absent_numbers_have_no_mean(numbers):
    for number in numbers.values():
        cost = number.cell_id.metric == "communication_cost"  # a formula in words
        assert (number.mean is None) == (number.status in {"failed", "absent"} or cost), number
        assert number.mean is not None or number.std is number.runs is None
        assert number.std is None or (number.std > 0 and number.runs is not None)


def test_targets_are_accuracies_with_published_number_of_runs(numbers):
    targets = [number for number in numbers.values() if number.status == "target"]
    assert {number.cell_id.metric for number in targets} == {"accuracy_pct"}
    assert all(0 < number.mean < 100 for number in targets)
    runs = {(number.cell_id.paper, number.runs, number.std is not None) for number in targets}
    assert runs == {("FedDW", 5, True), ("FedDUAL", 3, True), ("PFPS-LWC", None, False), ("cwFedAvg", 3, True)}


def test_cell_ids_contain_names_of_axis_values(numbers):
    assert numbers[CellId("FedDW", "Table I", "FedDW", "practical/IMDB", "accuracy_pct")].mean == 84.46
    assert numbers[CellId("FedDUAL", "Table 4", "both", "CIFAR-100", "accuracy_pct")].std == 0.24
    assert numbers[CellId("PFPS-LWC", "Table 3", "FedBN", "0.5/0.7", "accuracy_pct")].mean == 32.51
    assert numbers[CellId("PFPS-LWC", "Table 4", "Δ", "CIFAR-10/0.7", "accuracy_gain_points")].mean == 2.22
    assert numbers[CellId("cwFedAvg", "Table 1", "IFCA", "practical/Tiny ImageNet*", "accuracy_pct")].mean == 26.68


def test_three_published_numbers_are_suspect(numbers):
    suspect = [tuple(cell_id)[:4] for cell_id, number in numbers.items() if number.status == "suspect"]
    assert suspect == [
        ("FedDW", "Table II", "Local", "N=50"),
        ("cwFedAvg", "Table 2", "FedNH", "alpha=1.0"),
        ("cwFedAvg", "Table 2", "FedUV", "alpha=1.0"),
    ]


def test_package_data_covers_all_files_of_papers():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "fedpipe" / "papers"
    data = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    shipped = {path.name for pattern in settings["fedpipe.papers"] for path in folder.glob(pattern)}
    assert data == shipped
    assert "published.csv" in shipped


def test_published_numbers_match_transcript(numbers):
    path = SHARED / "spec" / "published_results.csv"
    if not path.exists():
        pytest.skip(f"{path}, the transcript of the papers' numbers, is missing (FEDPIPE_SHARED is its folder)")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(numbers)
    for row, number in zip(rows, numbers.values(), strict=True):
        cell_id = number.cell_id
        assert (row["paper"], row["table"], row["metric"]) == (cell_id.paper, cell_id.table, cell_id.metric)
        assert [row["mean"], row["std"]] == ["", ""] or float(row["mean"]) == number.mean
        assert float(row["std"] or 0) == (number.std or 0)
        assert number.notes.startswith(row["notes"].replace("personalised", "personalized"))
        if cell_id.table in {"Table I", "Table 1"} and cell_id.paper != "PFPS-LWC":
            assert cell_id.row == row["algorithm"]
            assert row["dataset"] in cell_id.column
