"""Hyperparameter search in the plan: values of the draws, one run per draw and seed, and the plan after each rung."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import archive
from fedpipe.core.storage.files import encode_json, write_bytes
from fedpipe.planning import freshness, planner, search
from fedpipe.planning.plan import Plan
from fedpipe.planning.run_settings import RunSettings
from fedpipe.planning.rungs import RankedDraw, Rung, RungSearch, select_continuing_draws
from fedpipe.report import forecast
from fedpipe.settings.tune import Tune
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

OVER = {"federation.learning_rate": {"log": [0.01, 1]}, "algorithms.fedprox.mu": {"log": [0.01, 1]}}
EXACT_RATES = [{"federation.learning_rate": rate} for rate in (0.0392, 0.2, 0.566, 0.0128)]
EXACT_MUS = [0.0486, 0.425, 0.0114, 0.101]
TUNE = {"over": OVER, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [100, 101]}


def plan_study(tune: dict[str, Any] | None = None, **sections: Any) -> planner.NewPlan:
    sections = {"dataset": {"validation_fraction": 0.2}, "study": {"seeds": [0, 1]}} | sections
    studies.write(studies.settings(("fedavg", "fedprox"), tune=TUNE | (tune or {}), **sections), Path())
    plan = planner.make_plan()
    planner.write_plan(plan)
    return plan


def write_result(plan: Plan, rounds: int, selected: tuple[int, ...]) -> None:
    """Write the result of a rung in which these draws are the best of each method."""
    found, rungs = [], plan.read_rungs()
    for index, planned in enumerate(plan.tuning.searches):
        draws = rungs[-1].searches[index].selected if rungs else range(plan.tuning.draws)
        order = [*selected, *(draw for draw in draws if draw not in selected)]
        ranking = tuple(RankedDraw(draw=draw, score=0.5, diverged=False) for draw in order)
        is_last = rounds == plan.tuning.rungs[-1]
        keys = tuple(search.list_winner_keys(plan, planned, selected[0])) if is_last else ()
        label, grid = planned.algorithm, planned.grid
        found.append(RungSearch(algorithm=label, grid=grid, ranking=ranking, selected=selected, keys=keys))
    rung = Rung(search=plan.search_digest, rounds=rounds, searches=tuple(found))
    write_bytes(plan.study_files.get_rung_result_path(rounds), encode_json(asdict(rung)))


def test_plan_of_complete_search_forecasts_winners(run_fedpipe: studies.RunFedpipe) -> None:
    """The winners are known, and none of their runs has begun."""
    plan = plan_study()
    write_result(plan, 1, (0, 1))
    write_result(plan, 2, (1,))
    status, _, errors = run_fedpipe("plan")
    assert (status, "Traceback" in errors) == (0, False)
    planned = planner.make_plan()
    remaining = forecast.forecast_remaining_work(planned)
    assert remaining.runs == len(planned.add_search_results(has_draws=True).runs) == 2 * 4 * 2 + 2 * 2 + 2 * 2


# -- draws -------------------------------------------------------------------------------------------------------------


def draw(draws: int = 4, seed: int = 100, over: dict[str, Any] = OVER) -> dict[str, list[dict[str, Any]]]:
    settings = TUNE | {"over": over, "draws": draws, "rungs": [1], "seeds": [seed, 7]}
    return Tune.model_validate(settings).draw_values(["fedavg", "fedprox"])


def test_search_draws_depend_only_on_seed_range_and_number() -> None:
    draws = draw()
    assert draws == {
        "fedavg": EXACT_RATES,
        "fedprox": [rate | {"algorithms.fedprox.mu": mu} for rate, mu in zip(EXACT_RATES, EXACT_MUS, strict=True)],
    }
    assert draw(over=dict(reversed(OVER.items()))) == draws
    assert {label: values[:4] for label, values in draw(11).items()} == draws
    assert draw(3) == {label: values[:3] for label, values in draws.items()}
    assert draw(seed=101) != draws
    assert draw(over={"algorithms.fedprox.mu": OVER["algorithms.fedprox.mu"]})["fedavg"] == []


def test_search_draws_of_common_keys_are_equal_for_all_methods() -> None:
    over = OVER | {"algorithms.fedavg.mu": {"linear": [0.0, 1.0]}}
    fedavg, fedprox = draw(over=over).values()
    for one, other in zip(fedavg, fedprox, strict=True):
        assert one["federation.learning_rate"] == other["federation.learning_rate"]
    settings = TUNE | {"over": {"federation.learning_rate": OVER["federation.learning_rate"]}}
    assert len({str(values) for values in Tune.model_validate(settings).draw_values(["a", "b"]).values()}) == 1


def test_search_draws_cover_range_evenly() -> None:
    values = draw(8, 3, {"federation.learning_rate": {"linear": [0.0, 8.0]}})["fedavg"]
    assert sorted(int(value["federation.learning_rate"]) for value in values) == [*range(8)]


# -- plan --------------------------------------------------------------------------------------------------------------


def test_search_by_finetuned_models_needs_learning_rate_after_each_rung() -> None:
    """With rate 0, fine-tuning would change nothing, so that draws would be ranked by their personal models."""
    federation = {"rounds": 4, "schedule": {"name": "cosine", "period": 2}}
    plan_study({"by": "finetuned-on-validation", "rungs": [1, 3]}, federation=federation)
    with rejects("federation.schedule: after round 2 the learning rate is 0, so finetuned models would not change"):
        plan_study({"by": "finetuned-on-validation", "rungs": [1, 2]}, federation=federation)
    plan_study({"rungs": [1, 2]}, federation=federation)


def test_search_needs_learning_rate_of_personal_passes_after_each_rung() -> None:
    """With rate 0, draws would be ranked by the models that the clients receive."""

    def plan_rungs(*rungs: int) -> None:
        settings = studies.settings(
            ("pfps_lwc",),
            tune=TUNE | {"over": {"federation.learning_rate": OVER["federation.learning_rate"]}, "rungs": [*rungs]},
            federation={"rounds": 4, "schedule": {"name": "cosine", "period": 2}},
            evaluation={"protocols": ["global-on-global"]},
            dataset={"validation_fraction": 0.2},
        )
        studies.write(settings, Path())
        planner.make_plan()

    plan_rungs(1, 3)
    with rejects("federation.schedule: after round 2 the learning rate is 0 ... personal models of pfps_lwc ... above"):
        plan_rungs(1, 2)


def test_search_has_same_number_of_draws_for_each_method() -> None:
    plan = plan_study()
    fedavg, fedprox = plan.tuning.searches
    assert (fedavg.algorithm, len(fedavg.candidates)) == ("fedavg", 4)
    assert (fedprox.algorithm, len(fedprox.candidates)) == ("fedprox", 4)
    assert {key for one in fedavg.candidates for key in one.values} == {"federation.learning_rate"}
    assert {key for one in fedprox.candidates for key in one.values} == {*OVER}
    assert len(plan.search_run_paths) == 2 * 4 * 2
    assert [cell.grid for cell in plan.cells] == [{"tuning": "default"}] * 4
    assert plan.grid == {"tuning": ["tuned", "default"]}
    for path in plan.search_run_paths:
        settings = RunSettings.read(path / "run.yaml")
        assert settings.evaluation["protocols"] == ["personal-on-validation"], "no draw is tested on test samples"
        assert settings.seed in (100, 101)
    assert "Runs of the winners: 4" in search.describe_largest_search_size(plan)
    # 4 draws, and 2 of them one round more.
    assert "at most 16 runs with 24 rounds" in search.describe_largest_search_size(plan)


def test_search_ranks_method_by_its_own_protocol() -> None:
    plan = plan_study(
        algorithms={"fedavg": {"protocol": "finetuned-on-local"}},
        evaluation={"protocols": ["personal-on-local", "finetuned-on-local"]},
    )
    protocols = [planned.protocol for planned in plan.tuning.searches]
    assert protocols == ["finetuned-on-validation", "personal-on-validation"]
    settings = RunSettings.read(next(path for path in plan.search_run_paths if "fedavg" in str(path)) / "run.yaml")
    assert settings.evaluation["finetune_epochs"] == 1


def test_each_grid_point_has_its_own_search() -> None:
    plan = plan_study(study={"seeds": [0], "grid": {"partition.alpha": [0.1, 0.5]}})
    first = plan.tuning.searches[0]
    assert (first.algorithm, first.grid) == ("fedavg", {"partition.alpha": 0.1})
    assert len({key for planned in plan.tuning.searches for one in planned.candidates for key in one.keys}) == 4 * 4 * 2


def test_more_draws_rungs_or_study_seeds_keep_run_keys_of_draws() -> None:
    paths = plan_study().search_run_paths
    assert plan_study({"rungs": [3, 4]}).search_run_paths == paths
    assert plan_study(study={"seeds": [5]}).search_run_paths == paths
    assert plan_study(evaluation={"protocols": ["global-on-global"]}).search_run_paths == paths
    assert plan_study({"draws": 7}).search_run_paths > paths
    assert plan_study({"seeds": [101]}).search_run_paths.isdisjoint(paths), "the first seed also seeds the draws"


def test_plan_for_single_rounds_unpacks_rounds_of_draws() -> None:
    """The rules of single rounds need loose files. They would train the complete rounds again without them."""
    plan = plan_study()
    draw = next(run for run in plan.add_search_results(has_draws=True).runs if run not in plan.runs)
    pack_file = archive.get_pack_path(draw.files.rounds_folder)
    write_bytes(pack_file, archive.build_pack({"0000/state.json": b"{}"}))
    plan_study(execution={"rounds_per_job": 1, "clients_per_job": 2})
    assert draw.files.get_round_files(0).complete_states_marker.read_bytes() == b"{}"
    assert not pack_file.exists()


def test_plan_without_tune_section_contains_no_tuning() -> None:
    studies.write(studies.settings(("fedavg",)), Path())
    content = planner.make_plan().to_dict()
    assert "tuning" not in content
    assert content["grid"] == {}


def test_search_counts_draws_with_equal_values_once() -> None:
    plan = plan_study({"over": {"federation.batch_size": {"choice": [16, 32, 64]}}, "draws": 8, "rungs": [1, 2]})
    candidates = plan.tuning.searches[0].candidates
    sizes = [candidate.values["federation.batch_size"] for candidate in candidates]
    ranking = sorted(range(8), key=lambda draw: (sizes[draw], draw))
    assert select_continuing_draws(candidates, ranking, is_last=False) == (sizes.index(16),), "a third of three"
    assert select_continuing_draws(candidates, ranking[::-1], is_last=True) == (7 - sizes[::-1].index(64),)
    assert select_continuing_draws(candidates, [], is_last=True) == ()


# -- results of rungs --------------------------------------------------------------------------------------------------


def get_rounds_of_draws(plan: Plan) -> dict[str, int]:
    resolved = plan.add_search_results(has_draws=True)
    cells = [cell for cell in resolved.cells if cell.algorithm == "fedprox" and cell.seed == 100]
    return {cell.grid["tuning"]: max(one.rounds for one in cells if one.grid == cell.grid) for cell in cells}


def test_plan_follows_rung_results_until_winners_run() -> None:
    made = plan_study()
    path = made.study_files.plan
    bytes_before = path.read_bytes()
    assert get_rounds_of_draws(Plan.read(path)) == {f"draw {draw}": 1 for draw in range(4)}
    write_result(made, 1, (2, 1))
    plan = Plan.read(path)
    assert plan.is_searching
    assert get_rounds_of_draws(plan) == {"draw 0": 1, "draw 1": 2, "draw 2": 2, "draw 3": 1}
    with pytest.raises(ArtifactError, match=r"tuning-0002\.json is missing or outdated.*fedpipe run"):
        plan.require_finished_search()
    write_result(made, 2, (1,))
    search.write_winner_settings(made)
    plan = Plan.read(path)
    assert not plan.is_searching
    assert [(cell.algorithm, cell.grid["tuning"], cell.seed) for cell in plan.cells] == [
        (label, tuning, seed) for label in plan.algorithms for tuning in ("tuned", "default") for seed in (0, 1)
    ]
    values = made.tuning.searches[1].candidates[1].values
    winner = plan.cells[4]
    settings, default = RunSettings.read(winner.files.settings), RunSettings.read(plan.cells[6].files.settings)
    assert settings.federation == default.federation | {"learning_rate": values["federation.learning_rate"]}
    assert settings.algorithm == default.algorithm | {"mu": values["algorithms.fedprox.mu"]}
    assert (settings.seed, settings.evaluation, winner.rounds) == (0, default.evaluation, 4)
    assert plan.to_dict() == made.to_dict(), "plan.json does not depend on the results"
    result = made.study_files.get_rung_result_path(2)
    intact = result.read_bytes()
    result.write_bytes(intact.replace(winner.key.encode(), winner.key[::-1].encode()))
    with pytest.raises(ArtifactError, match=rf"^{result} is damaged: the runs of fedprox's winner .* Delete it"):
        planner.write_plan(planner.make_plan())
    result.write_bytes(intact)
    planner.write_plan(planner.make_plan())
    assert path.read_bytes() == bytes_before
    assert not freshness.needs_planning(Path("params.yaml"), "full")
    winner.files.settings.unlink()
    assert freshness.needs_planning(Path("params.yaml"), "full")
    planner.write_plan(planner.make_plan())
    assert winner.files.settings.is_file()


@pytest.mark.parametrize(
    "change", [{"search": "0" * 12}, {"rounds": 2}, {"searches": []}, {"searches": [{"algorithm": "fedavg"}]}]
)
def test_rung_result_of_other_search_counts_as_missing(change: dict[str, Any]) -> None:
    plan = plan_study()
    write_result(plan, 1, (2, 1))
    path = plan.study_files.get_rung_result_path(1)
    assert len(plan.read_rungs()) == 1
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert plan.read_rungs() == ()


def test_changed_search_ignores_earlier_rung_results() -> None:
    write_result(plan_study(), 1, (2, 1))
    for tune, sections in (({"draws": 5}, {}), ({"rungs": [1, 3]}, {}), ({}, {"study": {"seeds": [0, 2]}})):
        assert plan_study(tune, **sections).read_rungs() == ()
    assert len(plan_study().read_rungs()) == 1


def test_method_without_search_range_has_no_draws() -> None:
    plan = plan_study({"over": {"algorithms.fedprox.mu": {"log": [0.01, 1]}}})
    assert [len(planned.candidates) for planned in plan.tuning.searches] == [0, 4]


@pytest.mark.parametrize(
    ("by", "algorithm"), [("global-on-validation", "local"), ("prototype-on-validation", "fedavg")]
)
def test_plan_rejects_ranking_protocol_whose_model_a_method_lacks(by: str, algorithm: str) -> None:
    tune = {"over": {"federation.learning_rate": {"log": [0.01, 1]}}, "by": by}
    with pytest.raises(SettingsError, match=rf"^tune\.by: {by} .* {algorithm}, .*algorithms\.{algorithm}\.protocol"):
        plan_study(tune, study={"algorithms": ["fedproto", algorithm] if by.startswith("p") else [algorithm]})
