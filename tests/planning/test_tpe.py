"""Draws of Optuna's TPE depend on ranking and seed, extend the plan after each rung, and respect its upper bound."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage.files import write_bytes
from fedpipe.planning import freshness, planner, search, tpe
from fedpipe.planning.plan import Plan
from fedpipe.planning.planner import NewPlan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.planning.rungs import Rung, RungSearch, encode_rung, select_continuing_draws
from fedpipe.report import forecast, status
from fedpipe.report.tuning import Measurement, describe_hyperparameter_search, rank_draws
from fedpipe.settings.tune import Range, Tune
from fedpipe.workflow.dag import Dag
from fedpipe.workflow.selection import StudySelection
from tests import small_studies as studies
from tests.planning.custom_components import CUSTOM_COMPONENTS

pytestmark = pytest.mark.usefixtures("in_empty_folder")

OVER = {"federation.learning_rate": {"log": [0.01, 1]}, "algorithms.fedprox.mu": {"log": [0.01, 1]}}
#: Batches of 8, 4 and 2 draws.
TUNE = {"over": OVER, "draws": 14, "rungs": [1, 2, 4], "by": "personal-on-validation", "seeds": [100, 101]}
RANGES = {
    "log": Range(log=(0.001, 1)),
    "linear": Range(linear=(0.0, 1.0)),
    "integer": Range(linear=(1, 5)),
    "log integer": Range(log=(1, 500)),
    "choice": Range(choice=([8], "full", None)),
    "constant": Range(choice=(3,)),
}


def plan_study(**tune: Any) -> NewPlan:
    settings = {"dataset": {"validation_fraction": 0.2}, "study": {"seeds": [0, 1]}}
    studies.write(studies.settings(("fedavg", "fedprox"), tune=TUNE | {"sampler": "tpe"} | tune, **settings), Path())
    plan = planner.make_plan()
    planner.write_plan(plan)
    return plan


def finish_rung(target: float) -> Rung:
    """Finish the next rung as `fedpipe rank` does. The best learning rate is the nearest to a target."""
    plan = planner.make_plan()
    rungs, tuning = plan.read_rungs(), plan.add_search_results().tuning
    number, found = len(rungs), []
    for index, planned in enumerate(tuning.searches):
        draws = tuning.list_rung_draws(planned, number, rungs[-1].searches[index].selected if rungs else ())
        rates = {draw: planned.draws[draw].values["federation.learning_rate"] for draw in draws}
        scores = {draw: [Measurement(abs(math.log(rate / target)), False)] for draw, rate in rates.items()}
        ranking, is_last = rank_draws(scores, -1), number + 1 == len(tuning.rungs)
        selected = select_continuing_draws(planned.draws, [ranked.draw for ranked in ranking], is_last)
        keys = tuple(search.list_winner_keys(plan, planned, selected[0])) if is_last else ()
        found.append(RungSearch(algorithm=planned.algorithm, grid={}, ranking=ranking, selected=selected, keys=keys))
    rung = Rung(search=plan.search_digest, rounds=tuning.rungs[number], searches=tuple(found))
    rung = tpe.add_draws_of_next_rung(tuning, [*rungs, rung], plan.draw_planners)
    write_bytes(plan.study_files.get_rung_result_path(rung.rounds), encode_rung(rung))
    planner.write_plan(planner.make_plan())
    return rung


# -- values ------------------------------------------------------------------------------------------------------------


def draw(count: int = 6, seed: int = 1, order: int = 1) -> list[dict[str, Any]]:
    values = {
        number: {key: one.interpolate_value((number + 0.5) / 12) for key, one in RANGES.items()}
        for number in range(12)[::order]
    }
    return tpe.draw_tpe_values(RANGES, values, count, seed)


def test_tpe_samples_depend_on_ranking_and_seed() -> None:
    drawn = draw()
    assert draw() == drawn
    assert draw(3) == drawn[:3]
    assert draw(seed=2) != drawn
    assert draw(order=-1) != drawn


def test_tpe_samples_are_in_their_ranges() -> None:
    for values in draw(20):
        assert values.keys() == RANGES.keys()
        assert 0.001 <= values["log"] <= 1
        assert 0 <= values["linear"] <= 1
        assert all(float(f"{values[key]:.3g}") == values[key] for key in ("log", "linear"))
        assert values["integer"] in range(1, 6)
        assert values["log integer"] in range(1, 501)
        assert all(isinstance(values[key], int) for key in ("integer", "log integer"))
        assert values["choice"] in ([8], "full", None)
        assert values["constant"] == 3


def test_tpe_samples_are_near_best_draws() -> None:
    over = {"federation.learning_rate": {"log": [0.001, 10]}}
    settings = TUNE | {"over": over, "draws": 16}
    sobol = Tune.model_validate(settings).draw_values(["fedavg"])["fedavg"]

    def get_distance(values: dict[str, Any]) -> float:
        return abs(math.log10(values["federation.learning_rate"] / 0.1))

    ranking = sorted(range(16), key=lambda number: get_distance(sobol[number]))
    ranges = {key: Range.model_validate(one) for key, one in over.items()}
    drawn = tpe.draw_tpe_values(ranges, {number: sobol[number] for number in ranking}, 8, seed=0)
    assert sum(map(get_distance, drawn)) / 8 < sum(map(get_distance, sobol)) / 16 / 2


# -- plan --------------------------------------------------------------------------------------------------------------


def test_tpe_plan_has_first_batch_and_upper_bound_of_runs() -> None:
    sobol, plan = plan_study(sampler="sobol"), plan_study()
    assert plan.tuning.new_draw_counts == (8, 4, 2)
    assert plan.tuning.searches == sobol.tuning.searches, "all methods share the values of the first batch"
    assert plan.search_digest != sobol.search_digest
    draws = [run for run in plan.add_search_results(has_draws=True).runs if run.path in plan.search_run_paths]
    assert len(draws) == 2 * 8 * 2
    assert sum(str(path / "run.yaml") in plan.file_texts for path in plan.search_run_paths) == len(draws)
    # 8 draws of each method until round 1, then 3 of them and 4 new ones, and then 3 of these and 2 new ones.
    rounds = 8 + 3 + 4 * 2 + 3 * 2 + 2 * 4
    assert f"at most 56 runs with {4 * rounds} rounds for the draws" in search.describe_largest_search_size(plan)
    remaining = forecast.forecast_remaining_work(plan)
    assert (remaining.runs, remaining.rounds) == (56 + 8, 4 * rounds + 8 * 4), "two settings, methods and seeds"
    # Later draws of TPE, and winners, with two methods and seeds. Plan, jobs and status print the same number.
    later_runs = "at most 28 later runs"
    assert f". {later_runs.capitalize()} " in search.describe_largest_search_size(plan)
    progress = status.describe_search_progress(plan)
    assert progress == ["tune: rung 1 of 3, 8 of 14 draws of each method until round 1", f"tune: {later_runs}"]
    graph = Dag.from_selection(StudySelection.from_config({}))
    assert graph.describe_remaining_runs() == f"36 of 36 runs to do, {later_runs}"
    sentence = "Optuna's TPE drew 4 after round 1 and 2 after round 2 from the ranking until then, and the others are"
    assert sentence in describe_hyperparameter_search(plan)


def test_tpe_adds_batch_after_each_rung_until_winners_run() -> None:
    plan = plan_study()
    content = plan.study_files.plan.read_bytes()
    first = finish_rung(target=0.1)
    fedavg, fedprox = first.searches
    assert [new.draw for new in fedavg.new_draws] == [new.draw for new in fedprox.new_draws] == [8, 9, 10, 11]
    assert fedavg.new_draws != fedprox.new_draws
    resolved = Plan.read(plan.study_files.plan)
    rounds = {cell.grid["tuning"]: cell.rounds for cell in resolved.add_search_results(has_draws=True).cells}
    assert {int(name[5:]) for name, last in rounds.items() if last == 2} == {
        *(draw for result in first.searches for draw in result.selected),
        *(8, 9, 10, 11),
    }
    line, _ = status.describe_search_progress(resolved)
    assert line == "tune: rung 2 of 3, 7 of 14 draws of each method until round 2"
    for new in fedprox.new_draws:
        settings = RunSettings.read(Path("results/runs/fedprox", new.keys[1], "run.yaml"))
        assert settings.federation["learning_rate"] == new.values["federation.learning_rate"]
        assert settings.algorithm["mu"] == new.values["algorithms.fedprox.mu"]
        assert (settings.seed, settings.evaluation["protocols"]) == (101, ["personal-on-validation"])
    finish_rung(target=0.1)
    last = finish_rung(target=0.1)
    assert not any(result.new_draws for result in last.searches)
    assert forecast.forecast_remaining_work(planner.make_plan()).runs == 56 + 8, "also the winners among TPE's draws"
    resolved = Plan.read(plan.study_files.plan)
    assert not resolved.is_searching
    assert [len(planned.draws) for planned in resolved.tuning.searches] == [14, 14]
    assert "later runs" not in search.describe_largest_search_size(resolved)
    new_draws = [line for line in resolved.run_descriptions if "tuning=draw 13" in line]
    assert len(new_draws) == 4
    assert all("federation.learning_rate=" in line for line in new_draws), "also the values of TPE's draws"
    assert plan.study_files.plan.read_bytes() == content, "plan.json does not depend on the results"
    assert resolved.search_digest == plan.search_digest
    assert not freshness.needs_planning(Path("params.yaml"), "full")
    Path("results/runs/fedprox", fedprox.new_draws[0].keys[0], "run.yaml").unlink()
    assert freshness.needs_planning(Path("params.yaml"), "full")


def test_tpe_draws_depend_on_ranking_and_first_seed() -> None:
    plan_study()
    first, again = finish_rung(target=0.1), planner.make_plan()
    again.study_files.get_rung_result_path(1).unlink()
    assert finish_rung(target=0.1) == first
    again.study_files.get_rung_result_path(1).unlink()
    assert finish_rung(target=0.5) != first
    plan_study(seeds=[100, 102])
    values = [[new.values for new in result.new_draws] for result in first.searches]
    assert [[new.values for new in result.new_draws] for result in finish_rung(target=0.1).searches] == values


def test_tpe_ranks_draws_of_later_rungs_first_and_diverged_draws_last() -> None:
    plan = plan_study()
    planned = plan.tuning.searches[0]

    def make_result(*scores: tuple[int, bool]) -> RungSearch:
        measurements = {number: [Measurement(-position, bad)] for position, (number, bad) in enumerate(scores)}
        ranking = rank_draws(measurements, 1)
        return RungSearch(algorithm="fedavg", grid={}, ranking=ranking, selected=(), keys=())

    results = [make_result((2, False), (1, False), (0, True)), make_result((4, False), (1, False), (3, True))]
    assert tpe.rank_all_draws(planned, results) == [4, 1, 2, 3, 0]


def test_models_of_tpe_draws_are_sources_of_plan() -> None:
    models = [f"own_{number}.Layers" for number in range(40)]
    for name in models:
        Path(name).with_suffix(".py").write_text(CUSTOM_COMPONENTS)

    def list_modules(plan: NewPlan) -> set[str]:
        names = {settings.model["name"] for settings in plan.run_settings.values()}
        return {str(Path(name).with_suffix(".py")) for name in names & {*models}}

    first_plan = plan_study(over={"model.name": {"choice": models}, "federation.learning_rate": {"log": [0.01, 1]}})
    first_modules = list_modules(first_plan)
    finish_rung(target=0.1)
    plan = planner.make_plan()
    assert first_modules < list_modules(plan) <= plan.source_hashes.keys()


def test_planning_removes_rung_result_with_wrong_key_of_tpe_draw() -> None:
    plan = plan_study()
    finish_rung(target=0.1)
    path = plan.study_files.get_rung_result_path(1)
    content = json.loads(path.read_text())
    content["searches"][0]["new_draws"][0]["keys"][0] = "0" * 12
    path.write_text(json.dumps(content))
    assert len(Plan.read(plan.study_files.plan).read_rungs()) == 1
    edited = planner.make_plan()
    assert edited.read_rungs() == ()
    assert forecast.forecast_remaining_work(edited).runs == 56 + 8
    path.parent.rename("outside")
    path.parent.symlink_to(Path("outside").absolute())
    with pytest.raises(ArtifactError, match=rf"^{path.parent} is outside results, because a link"):
        planner.write_plan(edited)
    assert path.exists()
    path.parent.unlink()
    Path("outside").rename(path.parent)
    planner.write_plan(edited)
    assert not path.exists()
