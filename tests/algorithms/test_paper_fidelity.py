"""Fidelity as a user meets it: what the plan refuses, and what a study's files say after its rounds."""

import sys

import pandas as pd
import pytest

from fedpipe.cli import app
from fedpipe.engine.collect import collect_rounds
from tests import small_studies as studies

ALONE = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def planned(monkeypatch, capsys, in_empty_folder):
    """``planned(settings)``: what `fedpipe plan` says on standard error, and its exit status."""

    def plan(settings):
        studies.write(settings, in_empty_folder)
        monkeypatch.setattr(sys, "argv", ["fedpipe", "plan"])
        with pytest.raises(SystemExit) as end:
            app.main()
        return capsys.readouterr().err, end.value.code

    return plan


@pytest.mark.parametrize(
    ("setting", "right"),
    [({"optimizer": "adam"}, "sgd"), ({"momentum": 0.9}, "0.0"), ({"weight_decay": 0.001}, "0.0")],
)
def test_pfedme_refuses_what_it_would_pass_over(planned, setting, right):
    (key, value), labels = *setting.items(), ("fedavg", "pfedme")
    told, status = planned(studies.settings(labels, federation=setting))
    assert status == 2
    assert told == (
        f"fedpipe: federation.{key}: {value} can't be used with pfedme, which takes plain gradient steps. "
        f"Use {right}.\n"
    )
    assert planned(studies.settings(labels, federation=ALONE))[1] in (0, None)
    assert planned(studies.settings(("fedavg",), federation=setting))[1] in (0, None)


@pytest.mark.parametrize(
    ("name", "setting", "right"),
    [
        ("scaffold", {"momentum": 0.9}, "0.0"),
        ("perfedavg", {"momentum": 0.9}, "0.0"),
        ("perfedavg", {"optimizer": "adam"}, "sgd"),
    ],
)
def test_momentum_and_adam_are_refused_where_no_step_takes_them(planned, name, setting, right):
    (key, value), labels = *setting.items(), ("fedavg", name)
    told, status = planned(studies.settings(labels, federation=setting))
    assert status == 2
    assert told == (
        f"fedpipe: federation.{key}: {value} can't be used with {name}, which takes plain gradient steps. "
        f"Use {right}.\n"
    )
    assert planned(studies.settings(labels, federation=ALONE | {"weight_decay": 0.01}))[1] in (0, None)


def test_momentum_of_fedpvr_acts_outside_the_corrected_layers_and_a_warning_says_where_there_are_none(planned):
    for layers, warned in ((1, False), (2, True), (3, True)):
        settings = studies.settings(
            ("fedpvr",), algorithms={"fedpvr": {"layers": layers}}, federation={"momentum": 0.9}
        )
        told, status = planned(settings)
        assert status in (0, None)
        sentence = f"fedpvr.layers: {layers} corrects all layers, so that federation.momentum (0.9) acts nowhere."
        assert (sentence in told) is warned
    settings["federation"]["momentum"] = 0.0
    assert "acts nowhere" not in planned(settings)[0]


def test_a_hybrid_of_feddual_is_refused_and_its_codes_mode_is_whole(planned):
    told, status = planned(studies.settings(("feddual",), algorithms={"feddual": {"mode": "code", "iterations": 150}}))
    assert status == 2
    assert told == (
        "fedpipe: algorithms.feddual: iterations: 150 can't be used with mode: code, "
        "which is vector: gradient, iterations: 1000, layers: 1; leave it to the mode.\n"
    )
    assert planned(studies.settings(("feddual",), algorithms={"feddual": {"mode": "code"}}))[1] in (0, None)


def results_of(settings, **execution):
    """By label, after all rounds: each round's participants, the table of rounds, and that of accuracies."""
    made, tables = studies.prepare(settings), {}
    for planned, run in zip(made.runs, studies.open_runs(made, **execution), strict=True):
        *_, done = run.run_segment(planned.rounds)
        collect_rounds(run.files, done, "all")
        ids = [set(run.participants(number)) for number in range(1, done + 1)]
        joined = run.files.merged_files(done)
        tables[planned.algorithm] = ids, pd.read_parquet(joined.rounds), pd.read_parquet(joined.metrics)
    return tables


@pytest.mark.parametrize("stack", [1, 4])
def test_fedfomos_traffic_is_of_models_that_were_uploaded(stack):
    """Five of ten clients in a round: in the second, five models for a newcomer and four for the others; its means."""
    participants, rounds, _ = results_of(studies.settings(("fedfomo",), rounds=2), stack=stack)["fedfomo"]
    model = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    found = [5 - (client in participants[0]) for client in participants[1]]
    assert 0 < len(participants[0] & participants[1]) < 5
    assert rounds["bytes_down"].tolist() == [0, sum(found) / 5 * model]
    assert rounds["bytes_up"].tolist() == [model, model + 4 * sum(found) / 5]


def test_the_recall_is_in_pfps_lwcs_personal_accuracies():
    """Its ablation trains in round 1 as it does, and measures other losses after it, of the participants alone."""
    algorithms = {"pfps_lwc": {}, "lwc": {"algorithm": "pfps_lwc", "recall_epochs": 0}}
    settings = studies.settings(tuple(algorithms), rounds=1, algorithms=algorithms)
    tables = results_of(settings)
    losses = {}
    for label, (*_, metrics) in tables.items():
        personal = metrics[metrics["protocol"] == "personal-on-local"]
        losses[label] = personal.set_index("client")["loss"].sort_index()
    differing = losses["pfps_lwc"] != losses["lwc"]
    assert set(losses["lwc"].index[differing]) == tables["lwc"][0][0]
