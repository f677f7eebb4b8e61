"""`federation.schedule`, `local_steps` and `clip_norm` of a run: its key, its rounds in any cut, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import read_json, write_pt
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine.blocks import Block
from fedpipe.engine.run import Run
from fedpipe.planning import planner, run_settings
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.base import late_field
from fedpipe.settings.federation import Federation, Schedule
from tests import small_studies as studies

FALLING = {"name": "cosine", "period": 4, "minimum": 0.01, "warmup": 1}
ASKED: dict[str, Any] = {"schedule": FALLING, "local_steps": 7, "clip_norm": 0.5}


def key(**federation: Any) -> str:
    """The key of the tests' run with these settings of the federation."""
    studies.write(studies.settings(federation=federation), Path())
    (run,) = planner.make_plan().runs
    return run.key


def test_each_value_is_another_key_and_a_default_that_is_spelled_out_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = key()
    nothing = {"schedule": {"name": "constant"}, "local_steps": None, "clip_norm": None, "local_epochs": 1}
    assert key(**nothing) == plain
    assert key(schedule={"name": "constant", "warmup": 0}) == plain
    others = [
        key(schedule={"warmup": 2}),
        key(schedule={"name": "step", "step_size": 3}),
        key(schedule={"name": "step", "step_size": 3, "gamma": 0.5}),
        key(schedule={"name": "exponential", "gamma": 0.5}),
        key(schedule={"name": "cosine", "period": 9}),
        key(local_steps=5),
        key(clip_norm=1.0),
    ]
    assert len({plain, *others}) == len(others) + 1
    assert key(schedule={"name": "step", "step_size": 3, "gamma": 0.1}) == others[1], "a default spelled out"
    assert key(rounds=40, schedule={"name": "cosine", "period": 9}) == others[4], "more rounds go on with the same"


def test_a_late_field_is_in_no_key_while_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of runs that a later version does not change stay, and their run.yaml can still be read."""

    class LaterFederation(Federation):
        prox: float = late_field(0.0, ge=0)
        server_schedule: Schedule = late_field(Schedule())

    assert set(Federation().model_dump(mode="json")) == set(Federation.model_fields), "all of today's are in keys"
    assert LaterFederation().model_dump(mode="json") == Federation().model_dump(mode="json")
    assert LaterFederation(prox=0, server_schedule={"name": "constant"}).model_dump() == Federation().model_dump()
    on = LaterFederation(prox=0.5, server_schedule={"name": "exponential", "gamma": 0.9}).model_dump(mode="json")
    assert on == Federation().model_dump(mode="json") | {
        "prox": 0.5,
        "server_schedule": {"name": "exponential", "gamma": 0.9, "warmup": 0},
    }
    monkeypatch.chdir(tmp_path)
    plain = key()
    files = RunFiles.from_key("fedavg", plain)
    planner.write_plan(planner.make_plan())
    monkeypatch.setattr(run_settings, "Federation", LaterFederation)
    assert RunSettings.read(files.settings).build_federation().prox == 0


def states(run: Run) -> dict[str, str]:
    """The hashes of what a run left, by file."""
    return {name: sha256 for name, sha256 in studies.bits(run.files.path).items() if "/rounds/" in f"/{name}"}


@pytest.mark.parametrize("stack", [1, 4], ids=["loop", "stack"])
def test_rounds_have_the_same_bits_in_any_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: int) -> None:
    """The rate is a function of the round alone: in one job, in two, and in jobs of single rounds and clients."""
    found = []
    for cut in ("whole", "halves", "blocks"):
        (tmp_path / cut).mkdir()
        monkeypatch.chdir(tmp_path / cut)
        made = studies.prepare(studies.settings(("scaffold",), federation=ASKED))

        def fresh(made: planner.NewPlan = made) -> Run:
            return studies.open_runs(made, stack=stack, device="cpu")[0]

        if cut == "blocks":
            fresh().initialize()
            for number in range(1, 5):
                files, blocks = fresh().files.round(number), []
                for index, client in enumerate(fresh().participants(number)):
                    write_pt(files.block_uploads(index), fresh().train(number, [client]).to_tensors())
                    blocks.append(Block.read(files.block_uploads(index)))
                fresh().aggregate(number, blocks)
                fresh().evaluate(number)
        else:
            for stop in (4,) if cut == "whole" else (2, 4):
                list(fresh().run_segment(stop))
        found.append(states(fresh()))
    assert found[0] == found[1] == found[2]
    assert "rounds/0004/server.pt" in found[0]


def test_a_local_epoch_takes_its_share_of_a_round_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """times.json tells seconds of a pass over a client's data, whatever training is counted by; bytes stay."""
    monkeypatch.chdir(tmp_path)
    spent, sent = [], []
    for settings in ({"local_steps": 7}, {"local_epochs": 2}):
        made = studies.prepare(studies.settings(federation=settings))
        (run,) = studies.open_runs(made, device="cpu")
        run.initialize()
        block = run.train(1, run.participants(1))
        block.client_seconds = [3.0] * len(block.ids)
        run.aggregate(1, [block])
        spent.append(read_json(run.files.round(1).times)["epoch"])
        sizes = run.clients.sizes[block.ids]
        sent.append((block.bytes_down, block.bytes_up))
    passes = [7 / math.ceil(size / 40) for size in sizes]
    assert len(set(passes)) > 1
    assert spent[0] == pytest.approx(sum(3 / count for count in passes) / len(passes))
    assert spent[1] == pytest.approx(1.5)
    assert sent[0] == sent[1]


def refused(settings: dict[str, Any]) -> str:
    studies.write(settings, Path())
    with pytest.raises(SettingsError) as refusal:
        planner.make_plan()
    return str(refusal.value)


REFUSED = [
    (
        {"schedule": {"name": "cosine"}},
        "federation.schedule.period: it is missing; cosine needs period.",
    ),
    (
        {"schedule": {"name": "exponential"}},
        "federation.schedule.gamma: it is missing; exponential needs gamma.",
    ),
    (
        {"schedule": {"name": "cosine", "period": 5, "gamma": 0.5}},
        "federation.schedule.gamma: 0.5 has no meaning for cosine, which takes warmup and period and minimum; "
        "remove it.",
    ),
    (
        {"schedule": {"name": "cosine", "period": 5, "minimum": 0.2}},
        "federation.schedule.minimum: 0.2 is more than federation.learning_rate (0.1). Use less.",
    ),
    (
        {"schedule": {"name": "cosin", "period": 5}},
        "federation.schedule.name: 'cosin' can't be used. Use 'constant', 'step', 'exponential' or 'cosine'.",
    ),
    ({"schedule": {"steps": 5}}, "federation.schedule.steps: unknown key. Did you mean 'step_size'?"),
    (
        {"local_steps": 5, "local_epochs": 1},
        "federation.local_steps: 5 can't be used beside local_epochs: 1, since both say how long a client trains; one "
        "of them should be null.",
    ),
    (
        {"local_epochs": None},
        "federation.local_epochs: null leaves no training. Use given, or local_steps.",
    ),
    ({"clip_norm": 0}, "federation.clip_norm: 0 can't be used. Use a value greater than 0."),
]


@pytest.mark.parametrize(
    ("federation", "sentence"), REFUSED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_mistake_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(studies.settings(federation=federation)) == sentence


def test_methods_that_contradict_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for label, reason in {
        "fedrep": "whose length of training is set by head_epochs and body_epochs",
        "feddual": "whose beta is measured before each epoch",
    }.items():
        assert refused(studies.settings((label,), federation={"local_steps": 5})) == (
            f"federation.local_steps: 5 can't be used with {label}, {reason}. Use null, or study.algorithms "
            f"do without {label}."
        )
    for label in ("pfedme", "perfedavg"):
        assert refused(studies.settings((label,), federation={"clip_norm": 5.0})) == (
            f"federation.clip_norm: 5.0 can't be used with {label}, which takes plain gradient steps. Use null."
        )
    alone = studies.settings(("fedavg", "fedrep"), federation={"local_steps": 5})
    alone["algorithms"]["fedrep"] = {"overrides": {"federation.local_steps": None, "federation.local_epochs": 1}}
    studies.write(alone, Path())
    assert len(planner.make_plan().runs) == 2, "a method may have epochs of its own"


def test_a_rate_of_zero_fine_tunes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = studies.settings(
        federation={"schedule": {"name": "cosine", "period": 4}}, evaluation={"protocols": ["finetuned-on-local"]}
    )
    assert refused(settings) == (
        "federation.schedule: after round 4 the learning rate is 0, at which the models of finetuned protocols would "
        "stay as they are. It must have a minimum above 0, or another period."
    )
    settings["federation"]["schedule"]["minimum"] = 0.01
    studies.write(settings, Path())
    assert planner.make_plan().warnings == ()


def test_a_rate_that_rises_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    studies.write(studies.settings(federation={"schedule": {"name": "cosine", "period": 2, "warmup": 1}}), Path())
    assert planner.make_plan().warnings == (
        "federation.schedule.period: 2 ends after round 3 of 4, from where the learning rate rises again, as with "
        "CosineAnnealingLR.",
    )


def test_a_grid_varies_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = studies.settings(federation={"schedule": {"name": "step", "step_size": 2}})
    settings["study"]["grid"] = {
        "federation.schedule.gamma": [0.1, 0.5],
        "training": {"epochs": {}, "steps": {"federation.local_epochs": None, "federation.local_steps": 3}},
    }
    studies.write(settings, Path())
    assert len({run.key for run in planner.make_plan().runs}) == 4
