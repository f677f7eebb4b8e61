"""The section `tune`: ranges, numbers of draws, and errors with key and value."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.errors import SettingsError
from fedpipe.planning import planner
from fedpipe.settings.tune import Range, Tune, count_draws_by_rung
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

RATE, MU = "federation.learning_rate", "algorithms.fedprox.mu"
OVER = {RATE: {"log": [0.01, 1]}, MU: {"log": [0.01, 1]}}
TUNE = {"over": OVER, "draws": 4, "rungs": [1, 2], "by": "personal-on-validation", "seeds": [100]}


def plan_study(tune: dict[str, Any], preset: str = "full", **sections: Any) -> planner.NewPlan:
    sections = {"dataset": {"validation_fraction": 0.2}} | sections
    studies.write(studies.settings(("fedavg", "fedprox"), tune=TUNE | tune, **sections), Path())
    return planner.make_plan(preset=preset)


@pytest.mark.parametrize(
    ("range_settings", "values"),
    [
        ({"linear": [0.0, 1.0]}, [0.0, 0.25, 0.999]),
        ({"log": [0.01, 1.0]}, [0.01, 0.0316, 0.995]),
        ({"linear": [1, 4]}, [1, 2, 4]),
        ({"log": [1, 100]}, [1, 2, 100]),
        ({"log": ["1e-2", 1]}, [0.01, 0.0316, 0.995]),
        ({"choice": [8, "full", 16]}, [8, 8, 16]),
    ],
)
def test_range_interpolates_value_for_fraction(range_settings: dict[str, Any], values: list[Any]) -> None:
    section = Range.model_validate(range_settings)
    found = [section.interpolate_value(fraction) for fraction in (0.0, 0.25, 0.999)]
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


def test_integer_range_draws_each_integer_equally_often() -> None:
    values = [Range(linear=(1, 4)).interpolate_value((index + 0.5) / 400) for index in range(400)]
    assert [values.count(value) for value in (1, 2, 3, 4)] == [100] * 4


def test_draw_counts_keep_best_third_per_rung() -> None:
    for draws, counts in ((27, (27, 9, 3)), (10, (10, 4, 2))):
        tune = Tune.model_validate(TUNE | {"draws": draws, "rungs": [1, 2, 3]})
        assert count_draws_by_rung(tune.new_draw_counts) == counts


def test_tpe_batches_have_similar_numbers_of_rounds() -> None:
    """Batches of 16, 7 and 4 draws train 16, 14 and 12 rounds. A third of 16 draws continues, then a third of 6 + 7."""
    tune = Tune.model_validate(TUNE | {"draws": 27, "rungs": [1, 2, 3], "sampler": "tpe"})
    assert tune.new_draw_counts == (16, 7, 4)
    assert count_draws_by_rung(tune.new_draw_counts) == (16, 6 + 7, 5 + 4)


@pytest.mark.parametrize(("value", "is_near"), [(0.0101, True), (0.0159, False), (0.62, False), (0.64, True)])
def test_value_in_outer_tenth_of_range_is_near_bound(value: float, is_near: bool) -> None:
    assert (Range(log=(0.01, 1)).find_near_bound(value) is not None) == is_near
    assert (Range(linear=(0.0, 10.0)).find_near_bound(10 * math.log(100 * value, 100)) is not None) == is_near


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ((2, 5, 1), [None, (5, 1), (1, -1)]),
        ((0.1, 0.01, 1), [None, (0.01, -1), (1, 1)]),
        ((8, 16, "full"), [None] * 3),
        ((True, False), [None] * 2),
        ((0.1,), [None]),
    ],
)
def test_smallest_and_largest_number_of_choice_are_near_bound(
    values: tuple[Any, ...], bounds: list[tuple[float, int] | None]
) -> None:
    assert [Range(choice=values).find_near_bound(value) for value in values] == bounds


@pytest.mark.parametrize(
    ("tune", "outline"),
    [
        ({"by": "personal-on-local"}, "tune.by: 'personal-on-local' can't be used. Use 'global-on-validation', "),
        ({"by": "trained-on-train"}, "tune.by: 'trained-on-train' "),
        ({"seeds": [1, 0]}, "tune.seeds: 0 is also in study.seeds ... such as 2."),
        ({"seeds": []}, "tune.seeds: [] "),
        ({"rungs": [2, 1]}, "tune.rungs: 1 follows 2"),
        ({"rungs": [1, 1]}, "tune.rungs: 1 follows 1"),
        ({"rungs": [1, 2, 3]}, "tune: 4 draws can't be used with 3 rungs, ... round 3. Use at least 10 draws"),
        ({"rungs": [1, 5]}, "tune.rungs: 5 is more than federation.rounds (4)"),
        ({"draws": 1}, "tune.draws: 1 "),
        ({"sampler": "random"}, "tune.sampler: 'random' "),
        ({"sampler": "tpe", "rungs": [2]}, "tune: sampler tpe can't be used with rungs [2], ... at least two rungs"),
        ({"sampler": "tpe", "draws": 2}, "tune: 2 draws can't be used with sampler tpe and 2 rungs, "),
        (
            {"sampler": "tpe", "over": {"federation.momentum": {"linear": [0, 1.0]}}},
            "federation.momentum: ... (with federation.momentum: 1.0, which tune.over draws for fedavg)",
        ),
        ({"drawz": 1}, "tune.drawz: unknown key. Did you mean 'draws'"),
        ({"over": {}}, "tune.over: {} "),
        ({"over": {"mu": {"linear": [0, 1]}}}, "tune.over: 'mu' ... algorithms.fedprox.mu"),
        ({"over": {"algorithms.moon.mu": {"linear": [0, 1]}}}, "tune.over: 'algorithms.moon.mu' ... 'moon'"),
        ({"over": {"algorithms.fedprox": {"choice": [{}]}}}, "tune.over: 'algorithms.fedprox' ... as a whole"),
        ({"over": {"algorithms.fedprox.title": {"choice": ["x"]}}}, "tune.over: 'algorithms.fedprox.title'"),
        ({"over": {"federation.rounds": {"linear": [1, 4]}}}, "tune.over: 'federation.rounds' ... tune.rungs"),
        ({"over": {"federation.clients": {"linear": [1, 4]}}}, "tune.over: 'federation.clients' "),
        ({"over": {"partition.alpha": {"linear": [0.1, 1]}}}, "tune.over: 'partition.alpha' "),
        ({"over": {"model": {"choice": [{"name": "mlp"}]}}}, "tune.over: 'model' ... as a whole"),
        (
            {"over": {"federation.learnin_rate": {"linear": [0.1, 1]}}},
            "federation.learnin_rate: unknown key. Did you mean 'learning_rate'? (with federation.learnin_rate",
        ),
        (
            {"over": {"federation.momentum": {"linear": [0.5, 1.5]}}},
            "federation.momentum: ... (with federation.momentum: ... which tune.over draws for fedavg)",
        ),
        *[
            ({"over": {RATE: values}}, f"tune.over.{RATE}{rest}")
            for values, rest in (
                ({"log": [-1, 1]}, ".log: [-1, 1] ... -1 has no logarithm"),
                ({"linear": [1, 0.1]}, ".linear: [1, 0.1] is not ascending"),
                ({"linear": [0, 1], "log": [0.1, 1]}, ": it sets log and linear"),
                ([0.1, 1], ": [0.1, 1] can't be used. Use {log: ... or {linear: ... or {choice: [0.1, 1]}"),
                (0.1, ": 0.1 can't be used. Use {log: ... {choice: [A, B]}"),
                ({}, ": it sets nothing"),
                ({"lin": [0, 1]}, ".lin: unknown key. Did you mean 'linear'"),
                ({"linear": [0, 1]}, ".linear: [0, 1] has only integers ... Use [0.0, 1.0], or "),
                ({"log": [math.nan, 1]}, ".log.0: nan can't be used. Use a finite number."),
                ({"log": ["a", 1]}, ".log.0: 'a' can't be used. Use a valid number."),
                ({"choice": [0.1, 0.1]}, ".choice: '0.1' is listed twice"),
            )
        ],
        ({"over": {MU: {"log": [1, 10]}}}, f"tune.over.{MU}.log: [1, 10] "),
        (
            {"over": OVER | {"federation": {"learning_rate": {"choice": [0.1]}}}},
            "tune.over: 'federation' is not a single key ... replace tune.over as a whole",
        ),
    ],
)
def test_plan_rejects_invalid_tune_settings(tune: dict[str, Any], outline: str) -> None:
    with rejects(outline) as error:
        plan_study(tune)
    assert outline == str(error.value) or not outline.endswith("number."), "the message ends with its advice"


def test_tpe_without_optuna_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SettingsError, match=r"^tune\.sampler: 'tpe' .* `pip install 'fedpipe\[optuna\]'`"):
        plan_study({"sampler": "tpe"})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"study": {"grid": {"federation.learning_rate": [0.1]}}}, "'federation.learning_rate' in study.grid sets"),
        ({"study": {"grid": {"tuning": {"a": {"federation.batch_size": 8}}}}}, "study.grid.tuning: "),
        (
            {"algorithms": {"fedprox": {"overrides": {"federation.learning_rate": 0.1}}}},
            "algorithms.fedprox.overrides sets 'federation.learning_rate'",
        ),
        (
            {"preset": "small", "presets": {"small": {"federation.learning_rate": 0.1}}},
            "the preset sets 'federation.learning_rate'",
        ),
        ({"dataset": {}}, "tune.by: personal-on-validation can't be measured"),
        ({"evaluation": {"every": 2}}, "tune.rungs: round 1 is not evaluated"),
        ({"diagnostics": {"norms": {"kind": "head-norms"}}}, "diagnostics: norms can't be used with `tune`"),
    ],
)
def test_plan_rejects_settings_that_conflict_with_tune(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        plan_study({}, **sections)


@pytest.mark.parametrize(
    "tune", [{"rungs": [1, 3]}, {"over": {"federation.momentum": {"linear": [0.9, 1.5]}}, "rungs": [1, 2]}]
)
def test_error_of_tune_names_point_of_grid(tune: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"\(at the point federation\.rounds: 2 of study\.grid[,)]"):
        plan_study(tune, study={"grid": {"federation.rounds": [2, 4]}})


def test_preset_with_key_of_tune_over_is_rejected_with_advice() -> None:
    presets = {"small": {"tune.over.federation.learning_rate": {"choice": [0.1]}}}
    with pytest.raises(SettingsError, match=r"^tune\.over: .* replace tune\.over as a whole"):
        plan_study({}, preset="small", presets=presets)


@pytest.mark.parametrize(
    ("ranges", "draws", "rungs", "count"),
    [
        ({"federation.batch_size": {"choice": [16, 32, 64]}}, 8, [1, 2], 3),
        ({"federation.batch_size": {"choice": [16, 32, 64, 128]}}, 8, [1, 2], None),
        ({"federation.batch_size": {"choice": [16, 32, 64, 128]}}, 28, [1, 2, 3, 4], 4),
        ({"federation.batch_size": {"choice": [16]}}, 4, [2], 1),
    ],
)
def test_plan_warns_if_single_different_draw_reaches_last_rung(
    ranges: dict[str, Any], draws: int, rungs: list[int], count: int | None
) -> None:
    warnings = plan_study({"over": ranges, "draws": draws, "rungs": rungs}).warnings
    found = [warning for warning in warnings if warning.startswith("tune.over: ")]
    assert len(found) == (2 if count else 0)
    if count:
        assert found[0].startswith(f"tune.over: fedavg has {count} different draw")
        assert f" of {draws}, so only one reaches round {rungs[-1]}. " in found[0]


def test_preset_may_shrink_or_remove_tuning() -> None:
    presets = {"small": {"tune.draws": 2, "tune.rungs": [1]}, "none": {"tune": None}}
    small, none = (plan_study({}, preset=preset, presets=presets) for preset in ("small", "none"))
    assert (small.tuning.draws, small.tuning.rungs, none.tuning) == (2, (1,), None)
