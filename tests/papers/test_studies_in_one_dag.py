"""A combined plan of studies has each run once with its maximum number of rounds, without unavailable runs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import layout
from fedpipe.planning import planner
from fedpipe.planning.combined import CombinedPlan
from fedpipe.planning.plan import Plan
from fedpipe.settings.execution import Artifacts
from tests import small_studies as studies


@pytest.fixture
def plans(in_empty_folder: Path) -> tuple[Plan, Plan]:
    """Two studies that share a run, with five rounds in one study and two in the other."""
    (in_empty_folder / "studies/a").mkdir(parents=True)

    def plan_study(name: str, rounds: int, **others: Any) -> Plan:
        params = studies.settings(("fedavg", "feddw"), rounds, **others)
        studies.write(params, in_empty_folder)
        (in_empty_folder / "params.yaml").rename(path := Path(f"studies/a/{name}.yaml"))
        planner.write_plan(planner.make_plan(path))
        return Plan.read(layout.StudyFiles.from_params(path).plan)

    return plan_study("long", 5), plan_study("short", 2, study={"algorithms": ["fedavg"]})


def test_combined_plan_has_shared_run_once_with_most_rounds(plans: tuple[Plan, Plan]) -> None:
    long, short = plans
    assert {run.key for run in short.runs} < {run.key for run in long.runs}
    for work in (CombinedPlan(plans), CombinedPlan((short, long))):
        assert len(work.runs) == 2
        assert {run.rounds for run in work.runs.values()} == {5}
        (shared,) = short.runs
        assert work.round_counts_by_run[str(shared.path)] == (2, 5)
        assert {(joined.path.parts[-3], joined.round_count) for joined in work.merged_files} == {
            (shared.key, 2),
            *((run.key, 5) for run in long.runs),
        }
        assert len(work.partitions) == 1


def test_combined_plan_ignores_studies_with_unavailable_runs(plans: tuple[Plan, Plan]) -> None:
    long, short = plans
    (shared,) = short.runs
    other = next(run for run in long.runs if run.key != shared.key)
    work = CombinedPlan(plans, frozenset([str(other.path)]))
    assert [*work.runs] == [str(shared.path)]
    assert work.available_plans == (short,)
    assert {joined.round_count for joined in work.merged_files} == {2, 5}, "both studies use the remaining run"
    assert CombinedPlan(plans).available_plans == plans


def test_combined_plan_rejects_different_artifacts(plans: tuple[Plan, Plan]) -> None:
    long, short = plans
    assert CombinedPlan(plans).execution == long.execution
    with pytest.raises(SettingsError, match=r"studies/a/short\.yaml: artifacts\.keep_models "):
        assert CombinedPlan((long, dataclasses.replace(short, artifacts=Artifacts(keep_models="last")))).execution


def test_list_studies_ignores_dvc_yaml(plans: tuple[Plan, Plan]) -> None:
    Path("studies/a/dvc.yaml").write_text("stages: {}\n")
    paths = [plan.params for plan in plans]
    assert layout.list_studies(Path("studies")) == layout.list_studies(Path("studies/a")) == sorted(paths)
    assert layout.list_studies(paths[0]) == [paths[0]]
    Path("studies/empty").mkdir()
    with pytest.raises(SettingsError, match=r"^studies/empty: "):
        layout.list_studies(Path("studies/empty"))
