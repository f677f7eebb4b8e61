"""Optional metrics of a study in files, keys, tables and single rounds, and metrics that an algorithm records."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.storage import layout
from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 2
PROTOCOLS = ("global-on-global", "kept-on-local", "personal-on-local", "trained-on-local")


def prepare_study(*metrics: str, protocols: tuple[str, ...] = PROTOCOLS) -> NewPlan:
    evaluation: dict[str, Any] = {"protocols": list(protocols)}
    if metrics:
        evaluation["metrics"] = list(metrics)
    params = studies.settings(("fedavg",), ROUNDS, evaluation=evaluation)
    params["federation"] |= {"participation": 0.5}
    return studies.prepare(params)


def run_study(plan: NewPlan) -> Run:
    run = studies.open_runs(plan, stack=2)[0]
    studies.finish_run(run, ROUNDS, plan.keep_models)
    return run


def read_rows(run: Run) -> list[dict[str, Any]]:
    return layout.read_merged_table(run.files.list_merged_files()[-1].metrics).to_pylist()


def test_run_records_only_listed_metrics() -> None:
    plain, measured = run_study(prepare_study()), run_study(prepare_study("accuracy", "auc", "ece", "nll"))
    plain_rows, rows = read_rows(plain), read_rows(measured)
    recorded = {"auc", "bin_samples", "bin_hits", "bin_confidences"}
    assert rows[0].keys() - plain_rows[0].keys() == recorded
    assert [{name: row[name] for name in plain_rows[0]} for row in rows] == plain_rows
    for number in range(1, ROUNDS + 1):
        for folder in (plain, measured):
            assert folder.files.get_round_files(number).server_state.is_file()
        states = [
            torch.load(run.files.get_round_files(number).server_state, weights_only=True) for run in (plain, measured)
        ]
        assert all(torch.equal(one, states[1]["model"][name]) for name, one in states[0]["model"].items())


def test_metrics_of_global_model_match_scikit_learn() -> None:
    run = run_study(prepare_study("nll", "auc", "ece"))
    (row,) = [row for row in read_rows(run) if row["round"] == ROUNDS and row["client"] == -1]
    x, y = run.clients.gather_samples(run.clients.global_test)
    with torch.no_grad():
        probabilities = run.algorithm.net(run.load_server_state(ROUNDS)["model"], x).double().softmax(-1).numpy()
    assert row["auc"] == pytest.approx(roc_auc_score(y, probabilities, multi_class="ovr"), rel=1e-6)
    assert row["loss"] == pytest.approx(log_loss(y, probabilities), rel=1e-6)
    confidences, hits = probabilities.max(1), probabilities.argmax(1) == y.numpy()
    bins = np.ceil(15 * confidences)
    expected = sum(
        np.mean(bins == number) * abs(hits[bins == number].mean() - confidences[bins == number].mean())
        for number in np.unique(bins)
    )
    assert sum(row["bin_samples"]) == len(y)
    error = np.abs(np.subtract(row["bin_hits"], row["bin_confidences"])).sum() / len(y)
    assert error == pytest.approx(expected, rel=1e-6)


def test_key_depends_only_on_recorded_metrics() -> None:
    """Accuracy and NLL are always recorded."""
    groups: list[list[tuple[str, ...]]] = [
        [(), ("accuracy",), ("nll", "accuracy"), ("nll",)],
        [("auc",), ("accuracy", "auc", "nll")],
        [("ece",)],
        [("auc", "ece"), ("ece", "accuracy", "auc")],
    ]
    keys = [{prepare_study(*metrics).runs[0].key for metrics in group} for group in groups]
    assert [len(group) for group in keys] == [1] * len(groups)
    assert len(set.union(*keys)) == len(groups)


def test_single_rounds_with_metrics_have_equal_bits() -> None:
    studies.require_equal_bits(prepare_study("accuracy", "auc", "ece"), ROUNDS, stack=2)


def test_study_table_matches_recorded_metrics() -> None:
    plan = prepare_study("accuracy", "auc", "ece", "nll", protocols=("personal-on-local",))
    rows = [row for row in read_rows(run_study(plan)) if row["round"] == ROUNDS and row["total"]]
    table = StudyData(plan).score_table.query("average == 'sample' and round == 'last'").set_index("metric")["mean"]
    total = sum(row["total"] for row in rows)
    defined = [row for row in rows if row["auc"] is not None]
    areas = sum(row["auc"] * row["total"] for row in defined) / sum(row["total"] for row in defined)
    assert table["auc"] == pytest.approx(100 * areas)
    assert table["nll"] == pytest.approx(sum(row["loss"] * row["total"] for row in rows) / total)
    hits, confidences = (np.sum([row[name] for row in rows], 0) for name in ("bin_hits", "bin_confidences"))
    assert table["ece"] == pytest.approx(100 * np.abs(hits - confidences).sum() / total)
    assert table["accuracy"] == pytest.approx(100 * sum(row["correct"] for row in rows) / total)


@dataclass(frozen=True, kw_only=True)
class LateMetrics(FedAvg):
    """FedAvg that counts rounds, with a metric from the second round on."""

    def init(self, initial_model):
        return super().init(initial_model) | {"rounds": initial_model(0)["head.bias"].sum() * 0}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        return super().aggregate(server, uploads) | {"rounds": server["rounds"] + 1}

    def metrics(self, server: State) -> dict[str, Tensor]:
        return {"late": server["rounds"]} if server["rounds"] > 1 else {}


def test_run_records_algorithm_metric_that_begins_in_round_2() -> None:
    entries = {"late": {"algorithm": "tests.runs.test_recorded_metrics.LateMetrics"}}
    plan = studies.prepare(studies.settings(("late",), 3, algorithms=entries))
    (run,) = studies.open_runs(plan)
    studies.finish_run(run, 3, plan.keep_models)
    assert layout.read_merged_table(run.files.get_merged_files(3).rounds)["late"].to_pylist() == [None, 2.0, 3.0]
