"""Pruning of a run's states if several studies share the run."""

from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.storage import files
from fedpipe.engine import collect, pruning
from fedpipe.engine.pruning import prune_states
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from tests import small_studies as studies

ROUNDS = 6


@pytest.fixture
def run(in_empty_folder: Path) -> Any:
    """A run of six rounds with the states of all rounds."""
    (run,) = studies.open_runs(studies.prepare(studies.settings(("scaffold",), ROUNDS)))
    list(run.run_segment(ROUNDS))
    return run


def plan_other_study(name: str, rounds: int, keep_models: str | int) -> None:
    """Plan another study with the same run."""
    Path("studies").mkdir(exist_ok=True)
    studies.write(studies.settings(("scaffold",), rounds, artifacts={"keep_models": keep_models}), Path("studies"))
    path = Path("studies/params.yaml").rename(f"studies/{name}.yaml")
    planner.write_plan(planner.make_plan(path))


def list_server_rounds(run: Any) -> list[int]:
    return [number for number in range(ROUNDS + 1) if run.files.get_round_files(number).server_state.exists()]


def test_collect_of_shorter_study_keeps_states_of_longer_study(run: Any) -> None:
    plan_other_study("short", 4, "last")
    collect.collect_rounds(run.files, 4, "last")
    assert list_server_rounds(run) == list(range(ROUNDS + 1))


def test_pruning_for_longer_study_keeps_states_of_shorter_study(run: Any) -> None:
    plan_other_study("short", 4, 2)
    studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": "last"}))
    prune_states(run.files, ROUNDS, "last")
    assert {2, 4, ROUNDS} <= set(list_server_rounds(run))
    assert 1 not in list_server_rounds(run)
    for end in (4, ROUNDS):  # each study can resume from its last round with all kept states
        for last in set(files.read_json(run.files.get_round_files(end).complete_states_marker)["last"]) - {-1}:
            assert run.files.get_round_files(last).client_states.exists()


@pytest.mark.usefixtures("in_empty_folder")
def test_study_planned_during_run_keeps_rounds_and_plans_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = studies.open_runs(
        studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": "last"}))
    )
    read_paths: list[Path] = []
    read = Plan.read
    monkeypatch.setattr(Plan, "read", lambda path: read_paths.append(path) or read(path))
    for number in run.run_segment(ROUNDS):
        if number == 2:
            plan_other_study("late", ROUNDS + 1, 3)
    assert list_server_rounds(run) == [0, 3, ROUNDS - 1, ROUNDS]
    assert sorted(map(str, read_paths)) == ["results/plan.json", "results/studies/late/plan.json"]


def test_unreadable_plan_prevents_pruning(run: Any) -> None:
    studies.prepare(studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": "last"}))
    files.write_bytes(Path("results/studies/a/b/plan.json"), b"{}")
    prune_states(run.files, ROUNDS, "last")
    assert list_server_rounds(run) == list(range(ROUNDS + 1))
    Path("results/studies/a/b/plan.json").unlink()
    prune_states(run.files, ROUNDS, "last")
    assert 1 not in list_server_rounds(run)


@pytest.mark.parametrize("keep_models", ["last", 3])
@pytest.mark.usefixtures("in_empty_folder")
def test_segment_removes_each_state_once(monkeypatch: pytest.MonkeyPatch, keep_models: str | int) -> None:
    """Therefore the time of a run grows linearly with its rounds. A complete search finds no other states to delete."""
    settings = studies.settings(("scaffold",), ROUNDS, artifacts={"keep_models": keep_models})
    (run,) = studies.open_runs(studies.prepare(settings))
    removed_paths: list[Path] = []
    remove_path = pruning.remove_path
    monkeypatch.setattr(pruning, "remove_path", lambda path: removed_paths.append(path) or remove_path(path))
    list(run.run_segment(ROUNDS))
    assert len(removed_paths) == len(set(removed_paths)) >= 3
    states = sorted(run.files.rounds_folder.glob("*/*.pt"))
    prune_states(run.files, ROUNDS, keep_models)
    assert sorted(run.files.rounds_folder.glob("*/*.pt")) == states


def test_resumed_run_deletes_states_of_killed_process(run: Any) -> None:
    """The next process lists all states again, including those of earlier rounds."""
    (resumed,) = studies.open_runs(
        studies.prepare(studies.settings(("scaffold",), ROUNDS + 1, artifacts={"keep_models": "last"}))
    )
    list(resumed.run_segment(ROUNDS + 1))
    assert list_server_rounds(run) == [0, ROUNDS]
