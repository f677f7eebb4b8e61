"""If all clients predict with the global model, its logits are computed once. The metrics do not change."""

from dataclasses import dataclass

import pytest

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.local import Local
from fedpipe.core.components import component, registry
from fedpipe.engine.clients import evaluation
from fedpipe.settings.evaluation import Evaluation
from fedpipe.settings.transforms import Transforms

NAMES = registry.list_components(component.ALGORITHM)
#: Methods whose clients predict with the global model. They include FedBN, because this network has no BatchNorm.
GLOBAL = {
    *("fedavg", "fedbn", "fedcm", "feddecorr", "feddistill_plus", "feddual", "feddw", "feddyn", "fedlc", "fednh"),
    *("fednova", "fedntd", "fedprox", "fedpvr", "fedsam", "feduv", "moon", "scaffold"),
}
PROTOCOLS = ("global-on-global", "global-on-local")
PERSONAL_PROTOCOLS = ("personal-on-local", "personal-on-train", "personal-on-global")


@dataclass(frozen=True, kw_only=True)
class Alternating(FedAvg):
    """Trained clients predict with the model of their last training."""

    def keep(self, client):
        return {"model": client["model"]}

    def init_client(self, server, initial_model):
        return {"model": initial_model(0)}

    def start(self, state, download, info):
        mix = 1 - info.is_first
        return {"model": state["model"] * mix + download["model"] * (1 - mix)}


@dataclass(frozen=True, kw_only=True)
class Silent(FedAvg):
    """A server without a global model, whose hook must not be called for personal protocols."""

    def global_model(self, server):
        raise AssertionError


def evaluate_trial(trial, protocols=PROTOCOLS + PERSONAL_PROTOCOLS):
    """Return the counts and the losses by protocol and client."""
    result = evaluation.evaluate_round(
        Evaluation(protocols=protocols),
        trial.executor,
        trial.algorithm,
        trial.clients,
        trial.server,
        trial.send,
        trial.client_states.__getitem__,
        trial.rounds,
    )
    rows = {(row.pop("protocol"), row.pop("client")): row for row in result.metrics.to_pylist()}
    return rows, {key: row.pop("loss") for key, row in rows.items()}


def record_client_runs(trial, monkeypatch):
    """Record the clients that the executor evaluates separately."""
    clients, run = [], trial.executor.run

    def record(task):
        clients.extend(task.ids)
        return run(task)

    monkeypatch.setattr(trial.executor, "run", record)
    return clients


@pytest.mark.parametrize(
    ("name", "width"), [*((name, None) for name in NAMES), ("fedavg", 3), ("scaffold", 3), ("fedper", 3)]
)
def test_metrics_of_common_model_equal_separate_evaluation(make_trial, monkeypatch, name, width):
    trial = make_trial(name, width=width).run(2)
    clients = record_client_runs(trial, monkeypatch)
    rows, losses = evaluate_trial(trial)
    assert clients == ([] if name in GLOBAL else [*range(len(trial.clients))])
    monkeypatch.setattr(evaluation, "is_personal_model_global", lambda *_: False)
    expected_rows, expected_losses = evaluate_trial(trial)
    assert rows == expected_rows
    assert losses == pytest.approx(expected_losses, rel=1e-12, nan_ok=True)
    if name in GLOBAL:
        pairs = [(losses["personal-on-local", i], losses["global-on-local", i]) for i in range(len(trial.clients))]
        assert all(one == other for one, other in pairs), "losses of equal models must have equal bits"


@pytest.mark.parametrize("algorithm", [Alternating(), Local()], ids=["alternating", "local"])
def test_clients_with_different_models_are_evaluated_separately(make_trial, monkeypatch, algorithm):
    trial = make_trial(algorithm).run(1)
    clients = record_client_runs(trial, monkeypatch)
    rows, _ = evaluate_trial(trial)
    assert clients == [*range(len(trial.clients))]
    if isinstance(algorithm, Alternating):
        counts = [[rows[f"{model}-on-local", i]["predicted"] for i in clients] for model in ("personal", "global")]
        assert counts[0] != counts[1]


def test_personal_protocols_need_no_global_model(make_trial):
    rows, _ = evaluate_trial(make_trial(Silent()).run(1), PERSONAL_PROTOCOLS)
    assert len(rows) == 3 * 8


@pytest.mark.parametrize("width", [None, 3])
def test_global_model_is_normalized_by_statistics_of_clients_own_samples(make_trial, width):
    """Without running statistics, the global model has the same result on a client's samples as its personal copy."""
    trial = make_trial("fedavg", "norm", buffers="drop", width=width).run(2)
    trial.clients.test[2] = trial.clients.test[2][:0]
    _, losses = evaluate_trial(trial)
    for client in range(len(trial.clients)):
        assert losses["global-on-local", client] == pytest.approx(losses["personal-on-local", client], rel=1e-12)


def test_batch_statistics_and_test_noise_need_separate_evaluation(make_trial, make_clients, monkeypatch):
    dropped = make_trial("fedavg", "norm", buffers="drop").run(1)
    noisy = make_trial(
        "fedavg",
        "cnn",
        make_clients((1, 4, 4), transforms=Transforms(mean=(0.5,), std=(0.5,), flip=True, on_test=True)),
    ).run(1)
    for trial in (dropped, noisy):
        clients = record_client_runs(trial, monkeypatch)
        evaluate_trial(trial)
        assert clients == [*range(len(trial.clients))]
