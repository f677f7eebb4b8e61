"""The ranking of draws, and the results of a search in the tables."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedpipe.core.storage.files import write_bytes
from fedpipe.core.yaml_text import read_generated_yaml
from fedpipe.planning import planner, search
from fedpipe.planning.plan import Plan
from fedpipe.planning.rungs import RankedDraw, Rung, RungSearch, encode_rung, select_continuing_draws
from fedpipe.report import forecast, tuning, wide
from fedpipe.report.data import StudyData
from fedpipe.report.table_parts import TextTable
from fedpipe.report.tuning import Measurement, rank_draws
from tests import small_studies as studies


def list_ranked_draws(scores: dict[int, list[Measurement]], improvement_sign: int = 1) -> list[int]:
    return [ranked.draw for ranked in rank_draws(scores, improvement_sign)]


def test_rank_draws_sorts_by_mean_over_seeds() -> None:
    scores = {0: [Measurement(0.9, False), Measurement(0.1, False)], 1: [Measurement(0.6, False)] * 2}
    assert list_ranked_draws(scores) == [1, 0]
    assert list_ranked_draws(scores, improvement_sign=-1) == [0, 1]


def test_rank_draws_sorts_ties_by_draw_number() -> None:
    scores = {draw: [Measurement(0.5, False)] for draw in (3, 1, 2)}
    assert list_ranked_draws(scores) == list_ranked_draws(dict(reversed(scores.items()))) == [1, 2, 3]
    assert list_ranked_draws(scores, improvement_sign=-1) == [1, 2, 3]


@pytest.mark.parametrize("improvement_sign", [1, -1])
def test_rank_draws_sorts_diverged_draws_last(improvement_sign: int) -> None:
    scores = {
        0: [Measurement(math.nan, False)],
        1: [Measurement(0.9, True), Measurement(0.9, False)],
        2: [Measurement(0.5, False)],
        3: [Measurement(math.inf, False)],
        4: [Measurement(0.1, False)],
    }
    order = list_ranked_draws(scores, improvement_sign)
    assert {*order[:2]} == {2, 4}
    assert order[2:] == [1, 0, 3]
    assert [ranked.score for ranked in rank_draws(scores, improvement_sign)][2:] == [0.9, None, None]


@pytest.mark.usefixtures("in_empty_folder")
def test_search_results_are_in_tables_and_draws_frame() -> None:
    """Four draws of two values count as two. FedAvg has no range, so its rows are equal. A weight of 1e30 diverges."""
    over = {"algorithms.fedprox.mu": {"choice": [1e30, 0.1]}}
    tune = {"over": over, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [7]}
    sections = {"dataset": {"validation_fraction": 0.2}, "federation": {"batch_size": 8}}
    settings = studies.settings(("fedavg", "fedprox"), 2, tune=tune, **sections) | {"partition": {"scheme": "iid"}}
    made = studies.prepare(settings)
    for rounds in (1, 2):
        compute_rounds(made, rounds)
        path = made.study_files.get_rung_result_path(rounds)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_rung(tuning.compute_rung_result(made, rounds)))
    search.write_winner_settings(made)
    plan = Plan.read(made.study_files.plan)
    compute_rounds(plan, 2)
    draws = tuning.build_draws_frame(plan)
    values = draws.set_index(["rounds", "rank"])["algorithms.fedprox.mu"]
    assert values.to_dict() == {(1, 1): 0.1, (1, 2): 0.1, (1, 3): 1e30, (1, 4): 1e30, (2, 1): 0.1}
    assert draws["diverged"].tolist() == [False, False, True, True, False]
    assert draws["selected"].tolist() == [True, False, False, False, True]
    assert {*draws["algorithm"]} == {"fedprox"}
    assert tuning.build_rung_files(plan) == {path: path.read_bytes() for path in plan.rung_files}
    sentence, table, bound_note = tuning.build_search_section(plan)
    assert bound_note == "Some winners are near a bound of their range: mu of FedProx. Try a wider range."
    assert "the best of 4 draws" in sentence
    assert "Every method with a range had 4 draws: the best third continued after round 1" in sentence
    assert "Draws with equal values count as one, so FedProx had 2 different draws." in sentence
    assert "with seed 7. " in sentence
    assert "They used no test samples." in sentence
    assert "No range concerns FedAvg" in sentence
    assert table.frame[["algorithm", "mu", "draws"]].to_numpy().tolist() == [
        ["FedAvg", "–", "0"],
        ["FedProx", "0.1", "4 (2 different)"],
    ]
    means = StudyData(plan).score_table.query(
        "protocol == 'personal-on-local' and average == 'sample' and round == 'last'"
    )
    by_row = means.set_index(["algorithm", "tuning"])["mean"]
    assert by_row["fedavg", "tuned"] == by_row["fedavg", "default"]
    latex = wide.render_latex_table(StudyData(plan))
    frame = pd.read_csv(io.StringIO(wide.render_wide_csv(StudyData(plan))))
    _, winners = latex.split("% The winners of the search:")
    assert "algorithm & mu & draws & validation accuracy (\\%) \\\\" in winners
    assert "FedAvg & -- & 0 & -- \\\\" in winners
    assert "\nFedProx & 0.1 & 4 (2 different) & " in winners
    assert latex.count(sentence) == 1
    columns = frame.set_index("algorithm")[["tuned / mu", "tuned / draws"]].astype(str)
    assert columns.to_numpy().tolist() == [["–", "0"], ["0.1", "4 (2 different)"]]
    assert [*frame.columns[-3:-1]] == [*columns]


@pytest.mark.parametrize(
    ("diverged_rungs", "message"),
    [
        ((2,), "Warning: all draws of FedAvg that reached round 2 diverged, .* longer first rung, or a narrower range"),
        ((1, 2), "Warning: all draws of FedAvg diverged, so the winner is arbitrary"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_warning_about_divergence_distinguishes_first_rung(diverged_rungs: tuple[int, ...], message: str) -> None:
    plan = plan_finished_search({"federation.learning_rate": {"log": [0.01, 1]}}, diverged_rungs=diverged_rungs)
    *_, warning = tuning.build_search_section(plan)
    assert re.match(message, warning)


@pytest.mark.parametrize(
    ("key", "range_settings", "is_noted_by_winner"),
    [
        ("federation.local_epochs", {"choice": [1, 2, 5]}, {1: False, 2: False, 5: True}),
        ("federation.local_epochs", {"log": [1, 2]}, {1: False, 2: True}),
        ("federation.momentum", {"choice": [0, 0.5, 0.9]}, {0: False, 0.5: False, 0.9: True}),
        ("federation.participation", {"choice": [0.5, 1.0]}, {0.5: True, 1.0: False}),
        ("algorithms.fedavg.dw.mu", {"choice": [0.0, 1, 2]}, {0.0: False, 1: False, 2: True}),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_note_lists_winner_near_bound_unless_parameter_has_no_value_beyond(
    key: str, range_settings: dict[str, Any], is_noted_by_winner: dict[float, bool]
) -> None:
    for winner, is_noted in is_noted_by_winner.items():
        *_, last = tuning.build_search_section(plan_finished_search({key: range_settings}, winner))
        name = key.rpartition(".")[2]
        expected = f"Some winners are near a bound of their range: {name} of FedAvg. Try a wider range."
        assert (isinstance(last, str) and last == expected) == is_noted, winner


@pytest.mark.usefixtures("in_empty_folder")
def test_search_table_keeps_column_of_grid_with_equal_last_part() -> None:
    """The key of the search and the grid's both end with alpha."""
    grid = {"partition.alpha": [0.1]}
    sections = {"algorithms": {"feddyn": {}}, "study": {"algorithms": ["feddyn"], "grid": grid}}
    plan = plan_finished_search({"algorithms.feddyn.alpha": {"choice": [0.01, 0.1]}}, 0.1, **sections)
    (table,) = [part for part in tuning.build_search_section(plan) if isinstance(part, TextTable)]
    heads = ["algorithm", "partition.alpha", "algorithms.feddyn.alpha"]
    assert table.frame[heads].values.tolist() == [["FedDyn", "0.1", "0.1"]]


def plan_finished_search(
    over: dict[str, Any], winner: Any = None, diverged_rungs: tuple[int, ...] = (), **sections: Any
) -> Plan:
    """Plan a search for FedAvg and write its results.

    Draws rank by number, those with the value ``winner`` first. In ``diverged_rungs`` all draws diverged.
    """
    tune = {"over": over, "draws": 8, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [7]}
    params = studies.settings(rounds=2, tune=tune, dataset={"validation_fraction": 0.2})
    studies.write(params | sections, Path())
    plan = planner.make_plan()
    planner.write_plan(plan)
    (planned,) = plan.tuning.searches
    (key,) = over
    draws: tuple[int, ...] = tuple(sorted(range(8), key=lambda draw: planned.draws[draw].values[key] != winner))
    for rounds in (1, 2):
        is_last, has_diverged = rounds == 2, rounds in diverged_rungs
        ranking = tuple(RankedDraw(draw=draw, score=0.5, diverged=has_diverged) for draw in draws)
        draws = select_continuing_draws(planned.draws, draws, is_last)
        keys = tuple(search.list_winner_keys(plan, planned, draws[0])) if is_last else ()
        result = RungSearch(algorithm=planned.algorithm, grid=planned.grid, ranking=ranking, selected=draws, keys=keys)
        path = plan.study_files.get_rung_result_path(rounds)
        write_bytes(path, encode_rung(Rung(search=plan.search_digest, rounds=rounds, searches=(result,))))
    search.write_winner_settings(plan)
    return Plan.read(plan.study_files.plan)


def test_tpe_search_has_equal_draws_and_winner_in_any_job_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TPE proposes draws 4 and 5, and draw 4 wins. In the second folder, the jobs run in reverse order."""
    over = {
        "federation.learning_rate": {"log": [0.0001, 0.3]},
        "federation.batch_size": {"choice": [20, "full"]},
        "federation.local_epochs": {"linear": [1, 2]},
    }
    tune = {"over": over, "draws": 6, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [5], "sampler": "tpe"}
    settings = studies.settings(rounds=2, tune=tune, dataset={"validation_fraction": 0.2})
    outcomes = []
    for name in ("forwards", "backwards"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        path = studies.prepare(settings).study_files.plan
        for rounds in (1, 2):
            compute_rounds(Plan.read(path), rounds, is_reversed=name == "backwards")
            run_rank(rounds)
        plan = Plan.read(path)
        compute_rounds(plan, 2)
        files = {path: path.read_bytes() for path in plan.rung_files}
        assert tuning.build_rung_files(plan) == files, "`fedpipe verify` recomputes the draws"
        outcomes.append(files)
    assert outcomes[0] == outcomes[1]
    (planned,) = plan.tuning.searches
    draws = tuning.build_draws_frame(plan).query("rounds == 2").set_index("rank")
    assert draws["draw"].tolist()[0] == 4
    assert {*draws["draw"]} > {4, 5}
    values = planned.new_draws[0].values
    assert {key: draws.loc[1, key] for key in over} == values
    sentence, table = tuning.build_search_section(plan)[:2]
    assert "the best of 6 draws" in sentence
    columns = ["learning_rate", "batch_size", "local_epochs", "draws"]
    assert table.frame.loc[0, columns].tolist() == [*(str(values[key]) for key in over), "6"]
    (cell,) = (cell for cell in plan.cells if cell.grid == {"tuning": "tuned"})
    federation = read_generated_yaml(cell.files.settings)["federation"]
    assert {key: federation[key.partition(".")[2]] for key in over} == values

    rung = json.loads(plan.rung_files[0].read_text())
    rung["searches"][0]["new_draws"][0]["values"]["federation.learning_rate"] = 0.5
    plan.rung_files[0].write_text(json.dumps(rung))
    assert tuning.build_rung_files(plan)[plan.rung_files[0]] != plan.rung_files[0].read_bytes()


@pytest.mark.usefixtures("in_empty_folder")
def test_forecast_after_more_draws_is_upper_bound() -> None:
    """The new draws may continue, and one of them may win, although the winner of the earlier draws has trained."""
    over = {"federation.learning_rate": {"log": [0.01, 1]}}
    tune = {"over": over, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [7]}
    settings = studies.settings(rounds=2, tune=tune, dataset={"validation_fraction": 0.2})
    path = studies.prepare(settings).study_files.plan
    for rounds in (1, 2):
        compute_rounds(Plan.read(path), rounds)
        run_rank(rounds)
    compute_rounds(Plan.read(path), 2)
    assert forecast.forecast_remaining_work(planner.make_plan()).runs == 0
    studies.write(settings | {"tune": tune | {"draws": 8}}, Path())
    remaining = forecast.forecast_remaining_work(planner.make_plan())
    # Four new draws for a round, three of them for another one, and two rounds of the winner.
    assert (remaining.runs, remaining.rounds, remaining.is_upper_bound) == (5, 4 + 3 + 2, True)


@pytest.mark.usefixtures("in_empty_folder")
def test_search_section_of_incomplete_search_describes_no_winner_and_needs_no_winner_settings() -> None:
    over = {"federation.local_epochs": {"choice": [1, 2, 5]}}
    plan = plan_finished_search(over, 5)
    for path in Path("results/runs/fedavg").glob("*/run.yaml"):
        if path.parent not in plan.search_run_paths:
            path.unlink()
    complete_section = tuning.build_search_section(plan)
    assert complete_section[-1].startswith("Some winners are near a bound of their range: local_epochs")
    plan.rung_files[-1].unlink()
    (sentence,) = tuning.build_search_section(Plan.read(plan.study_files.plan))
    assert sentence.startswith("The search of `tune` is not complete")


@pytest.mark.parametrize(
    ("dataset", "partition", "has_other_samples"),
    [({}, {}, False), ({"split": "pooled"}, {}, True), ({"split": "pooled"}, {"seed": 3}, False)],
)
def test_search_note_warns_about_test_samples_of_other_seeds(
    in_empty_folder: Path, dataset: dict[str, str], partition: dict[str, int], has_other_samples: bool
) -> None:
    over = {"federation.learning_rate": {"log": [0.01, 1]}}
    tune = {"over": over, "draws": 2, "rungs": [1], "by": "personal-on-validation", "seeds": [7, 8]}
    sections = {"dataset": {"validation_fraction": 0.2} | dataset, "partition": partition}
    studies.write(studies.settings(tune=tune, **sections), in_empty_folder)
    sentence = tuning.describe_hyperparameter_search(planner.make_plan())
    assert ("can be test samples of the study" in sentence) == has_other_samples
    assert ("They used no test samples." in sentence) != has_other_samples
    assert "with seeds 7 and 8. " in sentence


def run_rank(rounds: int) -> None:
    """Run `fedpipe rank` in this process."""
    from fedpipe.cli import stages

    stages.rank_draws(rounds, Path("params.yaml"), "full", None)


def compute_rounds(plan: Plan, rounds: int, is_reversed: bool = False) -> None:
    """Compute the partitions, and the rounds of all planned runs that need them."""
    from fedpipe.engine.run import Run
    from fedpipe.planning import partition
    from fedpipe.settings.execution import Execution

    runs = plan.add_search_results(has_draws=True).runs
    for planned in runs[::-1] if is_reversed else runs:
        if not Path(f"results/partitions/{planned.partition}/assignment.parquet").exists():
            partition.partition_dataset(planned.partition)
        if planned.rounds >= rounds or planned.path not in plan.search_run_paths:
            studies.finish_run(Run(planned.files, Execution(), 1, "all"), rounds)
