"""Freshness of a plan: fresh, stale or unknown."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpipe.core.storage.files import compute_file_sha256, read_json, write_json
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS
from fedpipe.models.mlp import MLP
from fedpipe.planning import freshness, planner
from fedpipe.planning.freshness import Freshness
from fedpipe.planning.plan import Plan
from tests import small_studies as studies
from tests.planning.custom_components import CUSTOM_COMPONENTS

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def write_plan(**sections: object) -> Plan:
    studies.write(studies.settings(**sections), Path())  # type: ignore[arg-type]
    planner.write_plan(planner.make_plan())
    return Plan.read(Path("results/plan.json"))


def edit_params(old: str, new: str) -> None:
    PARAMS.write_text(PARAMS.read_text().replace(old, new))


def test_plan_is_fresh_until_source_changes() -> None:
    plan = write_plan()
    assert freshness.compare_source_hashes(plan) == freshness.compare_plan_with_files(plan) == Freshness("fresh")
    assert not freshness.needs_planning(PARAMS, FULL_PRESET)
    edit_params("study:", "# a comment\nstudy:")
    assert freshness.compare_source_hashes(plan) == Freshness("stale", ("params.yaml",))
    assert freshness.compare_plan_with_files(plan) == Freshness("fresh"), "the edit does not change the plan"
    assert freshness.needs_planning(PARAMS, FULL_PRESET)
    edit_params("learning_rate: 0.1", "learning_rate: 0.2")
    assert freshness.compare_plan_with_files(plan) == Freshness("stale", ("params.yaml",))


def test_plan_is_stale_if_source_was_edited_while_it_was_made(
    own_module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has the settings and the code that it has read, so their hashes must be recorded, too."""
    own_module.write_text(CUSTOM_COMPONENTS)
    studies.write(studies.settings(("own",), algorithms={"own": {"algorithm": "own.Own"}}), Path())
    build_plan, edits = planner._PlanDraft.build_plan, list[tuple[str, str, str]]()

    def edit_and_build(*arguments: Any) -> Any:
        for name, old, new in edits:
            Path(name).write_text(Path(name).read_text().replace(old, new))
        return build_plan(*arguments)

    monkeypatch.setattr(planner._PlanDraft, "build_plan", edit_and_build)
    for edit in (("params.yaml", "learning_rate: 0.1", "learning_rate: 0.2"), ("own.py", "FedAvg by", "fedavg by")):
        edits[:] = [edit]
        planner.write_plan(planner.make_plan())
        plan = Plan.read(Path("results/plan.json"))
        assert freshness.compare_source_hashes(plan) == Freshness("stale", (edit[0],))
        assert freshness.needs_planning(PARAMS, FULL_PRESET)


def test_plan_is_stale_if_other_process_replaces_it_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    old_plan = write_plan()
    edit_params("learning_rate: 0.1", "learning_rate: 0.2")
    new_plan = planner.make_plan()
    monkeypatch.setattr(planner.search, "write_winner_settings", lambda _: old_plan.write())
    planner.write_plan(new_plan)
    assert Plan.read(Path("results/plan.json")).runs == old_plan.runs
    assert freshness.needs_planning(PARAMS, FULL_PRESET)


def test_freshness_compares_only_selected_plan_fields() -> None:
    plan = write_plan()
    studies.write(studies.settings(execution={"stack": 4}), Path())
    assert freshness.compare_plan_with_files(plan) == Freshness("stale", ("params.yaml",))
    assert freshness.compare_plan_with_files(plan, Plan.select_reported_fields) == Freshness("fresh")


def test_freshness_of_invalid_study_is_stale_and_contains_error() -> None:
    plan = write_plan()
    PARAMS.write_text("study: {seeds: []}\n")
    answer = freshness.compare_plan_with_files(plan)
    assert (answer.state, answer.changed_files) == ("stale", ("params.yaml",))
    assert "seeds" in str(answer.error)
    PARAMS.unlink()
    answer = freshness.compare_plan_with_files(plan)
    assert (answer.state, answer.changed_files) == ("stale", ("params.yaml",))
    assert answer.error


def test_pinned_file_with_new_time_is_not_a_changed_file() -> None:
    weights = Path("start.pt")
    network = MLP(hidden=(16,)).build((1, 8, 8), 10)
    torch.save(network.state_dict(), weights)
    plan = write_plan(model={"weights": str(weights), "sha256": compute_file_sha256(weights)})
    os.utime(weights, (1, 1))
    assert freshness.compare_source_hashes(plan) == Freshness("stale", ("start.pt",))
    assert freshness.compare_plan_with_files(plan) == Freshness("fresh")
    edit_params("learning_rate: 0.1", "learning_rate: 0.2")
    assert freshness.compare_plan_with_files(plan) == Freshness("stale", ("params.yaml",))
    weights.write_bytes(b"")
    answer = freshness.compare_plan_with_files(plan)
    assert (answer.state, {*answer.changed_files}) == ("stale", {"params.yaml", "start.pt"})
    assert answer.error


@pytest.mark.parametrize("record", [None, "", "[]", '{"params.yaml": 1}'], ids=["missing", "empty", "list", "number"])
def test_freshness_is_unknown_without_valid_source_hashes(record: str | None) -> None:
    plan = write_plan()
    if record is None:
        plan.study_files.source_hashes.unlink()
    else:
        plan.study_files.source_hashes.write_text(record)
    assert freshness.compare_source_hashes(plan) == Freshness("unknown")
    assert freshness.needs_planning(PARAMS, FULL_PRESET)
    assert freshness.compare_plan_with_files(plan) == Freshness("fresh")
    edit_params("learning_rate: 0.1", "learning_rate: 0.2")
    assert freshness.compare_plan_with_files(plan) == Freshness("stale")
    PARAMS.write_text("study: {seeds: []}\n")
    answer = freshness.compare_plan_with_files(plan)
    assert (answer.state, answer.changed_files) == ("unknown", ())
    assert answer.error


def test_replaced_plan_is_stale_without_changed_files() -> None:
    """For example, DVC checks out plan.json of another commit, or a user edits the file."""
    write_plan()
    write_json(Path("results/plan.json"), read_json(Path("results/plan.json")) | {"seeds": [7]})
    replaced = Plan.read(Path("results/plan.json"))
    assert freshness.compare_source_hashes(replaced) == Freshness("stale")
    assert freshness.compare_plan_with_files(replaced) == Freshness("stale")
    assert freshness.needs_planning(PARAMS, FULL_PRESET)


def test_study_with_custom_modules_always_needs_planning() -> None:
    """Another module with the same name could shadow the custom module."""
    Path("own_fresh.py").write_text(CUSTOM_COMPONENTS)
    plan = write_plan(algorithms={"fedavg": {"algorithm": "own_fresh.Own"}})
    assert freshness.compare_source_hashes(plan) == Freshness("stale")
    assert freshness.needs_planning(PARAMS, FULL_PRESET)
    assert freshness.compare_plan_with_files(plan) == Freshness("fresh")
    Path("own_fresh.py").write_text(f"{CUSTOM_COMPONENTS}# edited\n")
    assert freshness.compare_source_hashes(plan) == Freshness("stale", ("own_fresh.py",))


def test_study_needs_planning_if_plan_file_is_missing_or_invalid() -> None:
    plan = write_plan()
    assert freshness.needs_planning(PARAMS, "smoke")
    assert freshness.needs_planning(Path("studies/other.yaml"), FULL_PRESET)
    plan.runs[0].files.settings.unlink()
    assert freshness.needs_planning(PARAMS, FULL_PRESET)
    planner.write_plan(planner.make_plan())
    assert not freshness.needs_planning(PARAMS, FULL_PRESET)
    plan.study_files.plan.write_text("{}")
    assert freshness.needs_planning(PARAMS, FULL_PRESET)
    plan.study_files.plan.unlink()
    assert freshness.needs_planning(PARAMS, FULL_PRESET)


def test_study_with_generated_data_always_needs_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    plan = write_plan(dataset={"name": "mnist", "on_missing": "generate"})
    assert all(run.dataset.startswith("generated-") for run in plan.runs)
    assert freshness.compare_source_hashes(plan) == Freshness("fresh")
    assert freshness.needs_planning(PARAMS, FULL_PRESET)
