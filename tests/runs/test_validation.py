"""Accuracies on the samples that clients keep for validation, and the best of a grid that is chosen by them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files, layout
from fedpipe.engine import collect
from fedpipe.planning import planner
from fedpipe.report import tables
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 2
MODELS = ("global", "personal", "trained", "kept", "finetuned", "prototype")


def settings(labels: tuple[str, ...] = ("fedavg",), **sections: Any) -> dict[str, Any]:
    protocols = [f"{model}-on-validation" for model in MODELS]
    return studies.settings(
        labels,
        ROUNDS,
        evaluation={"protocols": ["personal-on-local", "global-on-local", *protocols]},
        dataset={"validation_fraction": 0.3},
        **sections,
    )


@pytest.mark.parametrize("stack", [1, 3])
def test_models_are_measured_on_what_their_clients_keep_from_training(stack: int) -> None:
    (found,) = studies.open_runs(studies.prepare(settings(("fedproto",))), stack=stack)
    list(found.run_segment(ROUNDS))
    collect.collect_rounds(found.files, ROUNDS, "all")
    clients, everyone = found.clients, range(found.federation.clients)
    assert sum(map(len, clients.held_out)) > 0
    for client in everyone:
        assert not set(clients.held_out[client]) & {*clients.train[client], *np.concatenate(clients.test)}
    for model in set(MODELS) - {"global"}:  # FedProto's server has no model
        trained = {(number, client) for number in (1, 2) for client in found.participants(number)}
        measured = {(number, client) for number in (1, 2) for client in everyone} if model != "trained" else trained
        assert studies.measured(found, ROUNDS, f"{model}-on-validation").keys() == measured, model


@pytest.mark.parametrize("stack", [1, 3])
def test_the_numbers_are_those_of_plain_pytorch(stack: int) -> None:
    (found,) = studies.open_runs(studies.prepare(settings()), stack=stack)
    list(found.run_segment(ROUNDS))
    collect.collect_rounds(found.files, ROUNDS, "all")
    personal, deployed = (studies.measured(found, ROUNDS, f"{model}-on-validation") for model in ("personal", "global"))
    assert personal.keys() == deployed.keys()
    for (number, client), score in personal.items():
        network = found.algorithm.net._build()
        network.load_state_dict(found.load_server_state(number)["model"])
        x, y = found.clients.gather(found.clients.held_out[client])
        with torch.no_grad():
            logits = network.eval()(x)
        wanted = (int((logits.argmax(-1) == y).sum()), len(y))
        loss = float(F.cross_entropy(logits, y)) if len(y) else 0.0
        for measured in (score, deployed[number, client]):
            assert measured[:2] == wanted
            assert measured[2] == pytest.approx(loss, rel=1e-4)


def test_where_no_client_has_such_samples_nothing_is_measured_on_others() -> None:
    params = settings()
    params["dataset"].pop("validation_fraction")
    with pytest.raises(SettingsError, match="global-on-validation can't be measured, since no client has validation"):
        studies.prepare(params)


def test_what_would_choose_has_to_be_measured() -> None:
    grid = {"grid": {"federation.learning_rate": [0.01, 0.1]}}
    params = settings(study=grid, report={"best_over": ["federation.learning_rate"], "best_on": "validation"})
    params["evaluation"]["protocols"].remove("personal-on-validation")
    with pytest.raises(SettingsError, match="validation chooses fedavg's best by personal-on-validation, which is not"):
        studies.prepare(params)


def test_the_best_is_chosen_by_validation_and_the_caption_says_so() -> None:
    """Counts are set so that the test samples favor one learning rate and the validation samples the other."""
    grid = {"grid": {"federation.learning_rate": [0.01, 0.1]}}
    report = {"best_over": ["federation.learning_rate"], "best_on": "validation"}
    plan = studies.prepare(settings(study=grid, report=report))
    rights = {"local": 1, "validation": 0}, {"local": 0, "validation": 1}
    for found, right in zip(studies.open_runs(plan), rights, strict=True):
        list(found.run_segment(ROUNDS))
        collect.collect_rounds(found.files, ROUNDS, "all")
        joined = found.files.merged_files(ROUNDS)
        table = layout.read_merged_table(joined.metrics)
        told = [row["total"] * right[row["protocol"].rpartition("-")[2]] for row in table.to_pylist()]
        index = table.column_names.index("correct")
        changed = table.set_column(index, table.schema.field(index), [told])
        marker = files.read_json(joined.marker)
        sha256 = files.write_parquet(joined.metrics, changed)
        files.write_json(joined.marker, marker | {joined.metrics.name: sha256})
    table = StudyData(plan).table
    assert [row[1] for row in StudyData(plan).table_rows] == ["0.1"]
    assert "selected on the clients' validation samples." in tables.build_caption(plan)
    by_test = dataclasses.replace(plan, report=plan.report.model_copy(update=dict(best_on="test")))
    assert [row[1] for row in StudyData(by_test).table_rows] == ["0.01"]
    assert "selected on the test samples." in tables.build_caption(by_test)


def test_a_plan_keeps_by_what_the_best_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = {"grid": {"federation.learning_rate": [0.01, 0.1]}}
    report = {"best_over": ["federation.learning_rate"], "best_on": "validation"}
    studies.write(settings(study=grid, report=report), Path())
    made = planner.make_plan()
    planner.write_plan(made)
    assert planner.Plan.read(made.study_files.plan).report.best_on == "validation"
