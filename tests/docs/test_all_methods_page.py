"""docs/all-methods.md matches its stored numbers, its study, and the registered methods."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

import fedpipe
from fedpipe.core.components import component, registry
from fedpipe.planning import planner
from tests import small_studies as studies
from tests.analysis.conftest import finish
from tests.small_studies import ROOT


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("all_methods")


def test_all_methods_tables_match_stored_numbers(program: ModuleType) -> None:
    page = program.PAGE.read_text()
    assert program.write_tables(page, pd.read_csv(program.NUMBERS)) == page, "run python benchmarks/all_methods.py"


def test_stored_numbers_cover_each_method_and_alpha(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = planner.make_plan(program.STUDY.relative_to(ROOT))
    numbers = pd.read_csv(program.NUMBERS)
    runs = {(cell.algorithm, float(cell.grid[program.GRID])) for cell in plan.cells}
    assert runs == {*zip(numbers["algorithm"], numbers["alpha"], strict=True)}
    assert {*plan.algorithms} == {*registry.list_components(component.ALGORITHM)}
    assert numbers["key"].str.fullmatch("[0-9a-f]{12}").all()
    assert numbers["key"].is_unique
    (count,) = re.findall(r"compare all (\d+) methods", program.PAGE.read_text())
    assert int(count) == len(plan.algorithms)


def test_collected_numbers_match_results(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small study with new clients, from its runs to the tables of the page."""
    monkeypatch.chdir(tmp_path)
    params = studies.settings(
        ("fedavg", "local"),
        2,
        federation={"held_out": 0.2},
        evaluation={"protocols": ["personal-on-local", "finetuned-on-local"], "metrics": ["accuracy", "ece"]},
        report={"clients": "both"},
        study={"seeds": [0], "grid": {program.GRID: [0.1, 1.0]}},
    )
    plan = finish(params)
    monkeypatch.setattr(program, "STUDY", tmp_path / "params.yaml")
    numbers = program.collect_numbers()
    assert [*zip(numbers["method"], numbers["alpha"], strict=True)] == [
        ("FedAvg", 0.1),
        ("FedAvg", 1.0),
        ("Local", 0.1),
        ("Local", 1.0),
    ]
    assert {*numbers["key"]} == {run.key for run in plan.runs}
    accuracies = fedpipe.load(program.STUDY).accuracies
    last = accuracies[(accuracies["round"] == 2) & (accuracies["average"] == "sample")]
    for row in numbers.to_dict("records"):
        rows = last[(last["algorithm"] == row["algorithm"]) & (last[program.GRID].astype(float) == row["alpha"])]
        expected = rows.set_index("protocol")["accuracy"]
        assert row["new-finetuned-on-local accuracy"] == pytest.approx(
            100 * expected["new-finetuned-on-local"], abs=1e-4
        )
        assert row[program.RANKED] == pytest.approx(100 * expected["personal-on-local"], abs=1e-4)
    local = next(row for row in program.render_accuracies(numbers).splitlines() if row.startswith("| Local"))
    assert local.split(" | ")[3] == "–", "a new client of Local has only the initial model"


def test_mean_ranks_share_ties_and_missing_numbers_are_dashes(program: ModuleType) -> None:
    """Ranks are averaged over the values of alpha."""
    numbers = pd.DataFrame(
        {
            "algorithm": ["fedavg", "local", "fedper"] * 2,
            "alpha": [0.1] * 3 + [1.0] * 3,
            program.RANKED: [50.0, 70.0, 70.0, 60.0, 40.0, 70.0],
        }
    )
    assert program.compute_mean_ranks(numbers).to_dict() == {"fedper": 1.25, "local": 2.25, "fedavg": 2.5}
    assert [program.format_number(value) for value in (float("nan"), 12.345)] == ["–", "12.3"]
