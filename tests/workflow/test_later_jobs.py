"""Jobs that the search of `tune` adds after its rungs. The progress counts them from the start."""

from pathlib import Path
from typing import Any

import pytest

from fedpipe.planning import planner, search
from fedpipe.workflow.dag import Dag
from fedpipe.workflow.selection import StudySelection
from tests import small_studies as studies
from tests.planning.test_search import TUNE, write_result

RULES = {"partition", "segment", "rank"}


@pytest.mark.parametrize(
    ("execution", "of_draw", "of_winner"),
    [
        ({}, {"segment": 1}, {"segment": 1}),
        ({"rounds_per_job": 3}, {"segment": 1, "collect": 1}, {"segment": 2, "collect": 1}),
        (
            {"rounds_per_job": 1, "clients_per_job": 3},
            {"train": 2, "aggregate": 1, "evaluate": 1, "collect": 1},
            {"init": 1, "train": 8, "aggregate": 4, "evaluate": 4, "collect": 1},
        ),
    ],
    ids=["runs", "segments", "rounds"],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_later_jobs_cover_next_rungs_and_winners(
    execution: dict[str, Any], of_draw: dict[str, int], of_winner: dict[str, int]
) -> None:
    """Two of four draws of two methods continue with two seeds until round 2. Each winner runs with one seed."""
    sections = {"dataset": {"validation_fraction": 0.2}, "execution": execution, "tune": TUNE}
    studies.write(studies.settings(("fedavg", "fedprox"), 4, **sections), Path())
    plan = planner.make_plan()
    planner.write_plan(plan)
    graph = Dag.from_selection(StudySelection(Path("params.yaml")))
    winners = {rule: 2 * count for rule, count in of_winner.items()}
    assert graph.count_later_jobs(RULES) == {
        rule: 8 * of_draw.get(rule, 0) + winners.get(rule, 0) for rule in of_draw.keys() | of_winner.keys()
    }
    assert not graph.count_later_jobs({"partition", "segment"}), "no rule computes the search"
    write_result(plan, 1, (2, 1))
    assert graph.count_later_jobs(RULES) == winners
    write_result(plan, 2, (1,))
    search.write_winner_settings(plan)
    assert not graph.count_later_jobs(RULES)
