"""docs/tuned-methods.md matches its stored numbers and its study."""

import importlib
from types import ModuleType

import pandas as pd
import pytest

from fedpipe.planning import planner
from tests.small_studies import ROOT


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tuned_methods")


def test_tuned_methods_tables_match_stored_numbers(program: ModuleType) -> None:
    page = program.PAGE.read_text()
    assert program.write_tables(page, pd.read_csv(program.NUMBERS)) == page, "run python benchmarks/tuned_methods.py"


def test_stored_numbers_cover_each_method_seed_and_tuning(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan, numbers = planner.make_plan(program.STUDY.relative_to(ROOT)), pd.read_csv(program.NUMBERS)
    expected = {
        (label, tuning, seed) for label in plan.algorithms for tuning in plan.grid["tuning"] for seed in plan.seeds
    }
    assert {*zip(numbers["algorithm"], numbers["tuning"], numbers["seed"], strict=True)} == expected
    assert numbers["key"].str.fullmatch("[0-9a-f]{12}").all()
    page = program.PAGE.read_text()
    assert f"{plan.tuning.draws} draws" in page
    for key, value_range in plan.tuning.over.items():
        (values,) = value_range.values()
        tuned = numbers.loc[numbers["tuning"] == "tuned", key.rpartition(".")[2]].dropna()
        assert tuned.between(min(values), max(values)).all()
    seen_labels = {key.split(".")[1] for key in plan.tuning.over if key.startswith("algorithms.")}
    assert {name for name in seen_labels if numbers["algorithm"].eq(name).any()} == seen_labels


def make_numbers(accuracies: dict[tuple[str, str], float]) -> pd.DataFrame:
    """Return the numbers of methods by name and tuning. The second seed is one point better."""
    return pd.DataFrame(
        {"algorithm": name, "method": name.upper(), "tuning": tuning, "seed": seed, "accuracy": accuracy + seed}
        for (name, tuning), accuracy in accuracies.items()
        for seed in (0, 1)
    )


def test_accuracy_table_shows_ranks_and_differences(program: ModuleType) -> None:
    accuracies = {("a", "default"): 50, ("a", "tuned"): 60, ("b", "default"): 40, ("b", "tuned"): 70}
    lines = program.render_accuracies(make_numbers(accuracies)).splitlines()
    assert lines[2] == "| B | 40.50 ± 0.71 | 2 | 70.50 ± 0.71 | 1 | +30.00 |"
    assert lines[3] == "| A | 50.50 ± 0.71 | 1 | 60.50 ± 0.71 | 2 | +10.00 |"


def test_accuracy_table_shows_best_rank_of_equal_methods(program: ModuleType) -> None:
    accuracies = {(name, tuning): 50 - 10 * (name == "d") for name in "abcd" for tuning in ("default", "tuned")}
    rows = [line.split(" | ") for line in program.render_accuracies(make_numbers(accuracies)).splitlines()[2:]]
    assert [row[2] for row in rows] == [row[4] for row in rows] == ["1", "1", "1", "4"]
