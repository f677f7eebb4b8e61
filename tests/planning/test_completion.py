"""The completion mark: it exists only if the tables and figures are those of the plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedpipe.planning import completion, planner
from fedpipe.planning.plan import Plan
from tests import small_studies as studies

MARK = Path("results/complete.txt")


@pytest.fixture
def plan_study(in_empty_folder: Path) -> Callable[..., Plan]:
    """A function that plans a study with these sections."""

    def write_params_and_plan(**sections: dict[str, Any]) -> Plan:
        studies.write(studies.settings(("fedavg",), 1, **sections), in_empty_folder)
        planner.write_plan(planner.make_plan())
        return Plan.read(Path("results/plan.json"))

    return write_params_and_plan


def test_mark_is_missing_under_another_plan_and_restored_under_the_first(plan_study: Callable[..., Plan]) -> None:
    completion.write_completion_mark(plan_study())
    mark = MARK.read_bytes()
    plan_study(federation={"learning_rate": 0.01})
    assert not MARK.exists()
    plan_study()
    assert MARK.read_bytes() == mark


def test_mark_is_missing_under_each_other_plan(plan_study: Callable[..., Plan]) -> None:
    completion.write_completion_mark(plan_study())
    for rate in (0.01, 0.02):
        plan_study(federation={"learning_rate": rate})
        assert not MARK.exists()


def test_mark_stays_if_tables_and_figures_do_not_depend_on_the_edit(plan_study: Callable[..., Plan]) -> None:
    completion.write_completion_mark(plan_study())
    plan_study(execution={"device": "cpu"}, artifacts={"keep_models": "last"})
    assert MARK.exists()


def test_mark_is_not_restored_after_jobs_have_begun(plan_study: Callable[..., Plan]) -> None:
    completion.write_completion_mark(plan_study())
    completion.remove_completion_marks(plan_study(federation={"learning_rate": 0.01}))
    plan_study()
    assert not MARK.exists()


def test_mark_is_not_written_if_the_plan_has_changed_since_snakemake_began(plan_study: Callable[..., Plan]) -> None:
    plan = plan_study()
    plan_study(report={"average": "client"})
    completion.write_completion_mark(plan)
    assert not MARK.exists()
