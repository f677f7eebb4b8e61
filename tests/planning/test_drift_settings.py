"""`federation.drift`: draws, run keys, and invalid settings."""

from typing import Any

import numpy as np
import pytest

from fedpipe.core import rng
from fedpipe.core.errors import SettingsError
from fedpipe.planning import planner
from fedpipe.planning.planner import NewPlan
from fedpipe.settings.drift import Drift
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")

KEPT = ("kept-on-local",)


def make_plan(drift: Any = None, protocols: tuple[str, ...] = ("personal-on-local",), **sections: Any) -> NewPlan:
    sections["federation"] = {"drift": drift} | sections.get("federation", {})
    return planner.make_plan(settings=studies.settings(evaluation={"protocols": list(protocols)}, **sections))


def test_drift_rotation_needs_images_and_90_degrees_square_images() -> None:
    for shape, angle, key in [
        ((64,), 180, "kind: rotation"),
        ((1, 8, 4), 90, "angle: 90"),
        ((2, 4, 8), 270, "angle: 270"),
    ]:
        with pytest.raises(SettingsError, match=rf"^federation\.drift\.{key} .*\({shape[0]},"):
            Drift(round=2, kind="rotation", angle=angle).check_rounds_and_samples(4, shape, 10)
    Drift(round=2, kind="rotation").check_rounds_and_samples(4, (1, 8, 4), 10)
    Drift(round=2, kind="rotation", angle=90).check_rounds_and_samples(4, (3, 8, 8), 10)
    Drift(round=2).check_rounds_and_samples(4, (64,), 10)


def test_kept_on_local_protocol_with_drift_needs_full_participation() -> None:
    drift = {"round": 2}
    with rejects("evaluation.protocols: kept-on-local ... participation 0.5"):
        make_plan(drift, KEPT)
    make_plan(drift, ("kept-on-global",))
    make_plan(None, KEPT)
    tune = {
        "over": {"federation.learning_rate": {"log": [0.1, 0.2]}},
        "draws": 2,
        "rungs": [2],
        "by": "kept-on-validation",
    }
    sections = {"tune": tune | {"seeds": [7]}, "dataset": {"validation_fraction": 0.2}}
    with rejects("tune.by: kept-on-validation ... participation 0.5"):
        make_plan(drift, **sections)
    make_plan(drift, **sections, federation={"participation": 1.0})
    make_plan(drift, (*KEPT, "personal-on-local"), federation={"participation": 1.0, "held_out": 0.2})


def test_grid_and_preset_can_vary_drift() -> None:
    grid = {"federation.drift.round": [2, 3], "federation.drift.label_map": [{1: 2, 2: 1}, {1: 3, 3: 1}]}
    assert len(make_plan({"round": 2}, study={"grid": grid}).runs) == 4
    presets = {"smoke": {"federation.rounds": 2, "federation.drift.round": 1}}
    params = studies.settings(federation={"drift": {"round": 3}}, presets=presets)
    plan = planner.make_plan(settings=params, preset="smoke")
    (settings,) = plan.run_settings.values()
    assert settings.federation["drift"] == {"round": 1, "clients": 0.5, "kind": "labels"}


def test_drift_draws_depend_only_on_seed() -> None:
    drift = Drift(round=2, clients=0.3)
    assert drift.draw_clients(0, 10) == tuple(sorted(rng.make_generator(0, "drift clients").permutation(10)[:3]))
    assert len({drift.draw_clients(seed, 10) for seed in range(5)}) > 1
    for seed in range(5):
        few, many = (Drift(round=7, clients=part, kind="rotation").draw_clients(seed, 10) for part in (0.1, 0.5))
        assert (len(few), len(many)) == (1, 5)
        assert {*few} < {*drift.draw_clients(seed, 10)} < {*many} < {*range(10)}
        assert drift.draw_label_map(seed, 10) == Drift(round=7, clients=[1]).draw_label_map(seed, 10)
    assert Drift(round=2, clients=[7, 2]).draw_clients(3, 10) == (2, 7)
    assert Drift(round=2, clients=1.0).draw_clients(3, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_drawn_drift_label_map_is_one_cycle_of_all_classes(num_classes: int) -> None:
    for seed in range(5):
        label_map = Drift(round=2).draw_label_map(seed, num_classes)
        label, seen = 0, []
        for _ in range(num_classes):
            label = label_map[label]
            seen.append(label)
        assert sorted(seen) == list(range(num_classes))
        assert seen[-1] == 0
    assert Drift(round=2, label_map={1: 2, 2: 1}).draw_label_map(0, 4) == [0, 2, 1, 3]
    assert not (np.array(Drift(round=2).draw_label_map(1, num_classes)) == np.arange(num_classes)).any()


def test_plan_drift_notes_describe_drift_for_captions() -> None:
    assert make_plan().drift_notes == ()
    labels = {"round": 2, "clients": 0.3, "label_map": {1: 2, 2: 1}}
    (note,) = make_plan(labels).drift_notes
    assert note == "From round 2 on, 3 of 10 clients have a concept drift: permuted classes (1 to 2, 2 to 1)."
    (note,) = make_plan({"round": 2, "clients": [4], "kind": "rotation"}).drift_notes
    assert note == "From round 2 on, 1 of 10 clients has a concept drift: images rotated by 180 degrees."
    notes = make_plan({"round": 2}, study={"grid": {"federation.drift.round": [2, 3]}}).drift_notes
    assert [note.partition(" on,")[0] for note in notes] == [f"In some runs, from round {number}" for number in (2, 3)]
