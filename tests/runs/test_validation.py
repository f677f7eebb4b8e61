"""Accuracies on the validation samples of clients, and the best grid point by them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedpipe.core.storage import files, layout
from fedpipe.report import tables
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 2
MODELS = ("global", "personal", "trained", "kept", "finetuned", "prototype")


def make_settings(labels: tuple[str, ...] = ("fedavg",), **sections: Any) -> dict[str, Any]:
    protocols = [f"{model}-on-validation" for model in MODELS]
    return studies.settings(
        labels,
        ROUNDS,
        evaluation={"protocols": ["personal-on-local", "global-on-local", *protocols]},
        dataset={"validation_fraction": 0.3},
        **sections,
    )


@pytest.mark.parametrize("stack", [1, 3])
def test_models_are_evaluated_on_validation_samples_of_clients(stack: int) -> None:
    (run,) = studies.open_runs(studies.prepare(make_settings(("fedproto",))), stack=stack)
    studies.finish_run(run, ROUNDS)
    clients, all_clients = run.clients, range(run.federation.clients)
    assert sum(map(len, clients.validation)) > 0
    for client in all_clients:
        assert not set(clients.validation[client]) & {*clients.train[client], *np.concatenate(clients.test)}
    for model in set(MODELS) - {"global"}:  # FedProto's server has no model
        trained = {(number, client) for number in (1, 2) for client in run.select_participants(number)}
        expected_keys = (
            {(number, client) for number in (1, 2) for client in all_clients} if model != "trained" else trained
        )
        assert studies.read_scores(run, ROUNDS, f"{model}-on-validation").keys() == expected_keys, model


@pytest.mark.parametrize("stack", [1, 3])
def test_validation_scores_match_plain_pytorch(stack: int) -> None:
    (run,) = studies.open_runs(studies.prepare(make_settings()), stack=stack)
    studies.finish_run(run, ROUNDS)
    personal, global_scores = (
        studies.read_scores(run, ROUNDS, f"{model}-on-validation") for model in ("personal", "global")
    )
    assert personal.keys() == global_scores.keys()
    for (number, client), score in personal.items():
        x, y = run.clients.gather_samples(run.clients.validation[client])
        with torch.no_grad():
            logits = studies.build_network(run, run.load_server_state(number)["model"])(x)
        expected = (int((logits.argmax(-1) == y).sum()), len(y))
        loss = float(F.cross_entropy(logits, y)) if len(y) else 0.0
        for measured_score in (score, global_scores[number, client]):
            assert measured_score[:2] == expected
            assert measured_score[2] == pytest.approx(loss, rel=1e-4)


def test_best_on_validation_changes_best_grid_point_and_caption() -> None:
    """Counts are set so that the test samples favor one learning rate and the validation samples the other."""
    grid = {"grid": {"federation.learning_rate": [0.01, 0.1]}}
    report = {"best_over": ["federation.learning_rate"], "best_on": "validation"}
    plan = studies.prepare(make_settings(study=grid, report=report))
    correct_by_test = {"local": 1, "validation": 0}, {"local": 0, "validation": 1}
    for run, is_correct in zip(studies.open_runs(plan), correct_by_test, strict=True):
        studies.finish_run(run, ROUNDS)
        merged_files = run.files.get_merged_files(ROUNDS)
        table = layout.read_merged_table(merged_files.metrics)
        correct_counts = [row["total"] * is_correct[row["protocol"].rpartition("-")[2]] for row in table.to_pylist()]
        index = table.column_names.index("correct")
        changed_table = table.set_column(index, table.schema.field(index), [correct_counts])
        marker = files.read_json(merged_files.marker)
        sha256 = files.write_parquet(merged_files.metrics, changed_table)
        files.write_json(merged_files.marker, marker | {merged_files.metrics.name: sha256})
    table = StudyData(plan).score_table
    assert [row[1] for row in StudyData(plan).table_row_keys] == ["0.1"]
    assert "validation samples" in tables.build_table_caption(plan)
    by_test = dataclasses.replace(plan, report=plan.report.model_copy(update=dict(best_on="test")))
    assert [row[1] for row in StudyData(by_test).table_row_keys] == ["0.01"]
    caption = tables.build_table_caption(by_test)
    assert "test samples" in caption
    assert "validation samples" not in caption
