"""If all clients predict with the global model, its logits are computed once, with the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.local import Local
from fedpipe.core.components import component, registry
from fedpipe.engine.clients import evaluation
from fedpipe.settings.evaluation import Evaluation
from fedpipe.settings.transforms import Transforms

NAMES = registry.list_components(component.ALGORITHM)
#: Methods whose clients predict with the global model. FedBN's do here, because this network has no BatchNorm.
GLOBAL = {
    *("fedavg", "fedbn", "fedcm", "feddecorr", "feddistill_plus", "feddual", "feddw", "feddyn", "fedlc", "fednh"),
    *("fednova", "fedntd", "fedprox", "fedpvr", "fedsam", "feduv", "moon", "scaffold"),
}
PROTOCOLS = ("global-on-global", "global-on-local")
PERSONAL_PROTOCOLS = ("personal-on-local", "personal-on-train", "personal-on-global")


@dataclass(frozen=True, kw_only=True)
class Alternating(FedAvg):
    """Clients that have trained predict with the model of their last training."""

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


def evaluate(trial, protocols=PROTOCOLS + PERSONAL_PROTOCOLS):
    """Rows of the metrics by protocol and client: counts, and the loss."""
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


def count_client_runs(trial, monkeypatch):
    """Clients whose model the executor evaluates by itself."""
    clients, run = [], trial.executor.run

    def record(task):
        clients.extend(task.ids)
        return run(task)

    monkeypatch.setattr(trial.executor, "run", record)
    return clients


@pytest.mark.parametrize(
    ("name", "width"), [*((name, None) for name in NAMES), ("fedavg", 3), ("scaffold", 3), ("fedper", 3)]
)
def test_the_numbers_are_those_of_each_client(make_trial, monkeypatch, name, width):
    trial = make_trial(name, width=width).run(2)
    clients = count_client_runs(trial, monkeypatch)
    rows, losses = evaluate(trial)
    assert clients == ([] if name in GLOBAL else [*range(len(trial.clients))])
    monkeypatch.setattr(evaluation, "has_common_model", lambda *_: False)
    expected_rows, expected_losses = evaluate(trial)
    assert rows == expected_rows
    assert losses == pytest.approx(expected_losses, rel=1e-12, nan_ok=True)
    if name in GLOBAL:
        pairs = [(losses["personal-on-local", i], losses["global-on-local", i]) for i in range(len(trial.clients))]
        assert all(one == other for one, other in pairs), "the same numbers have the same bits"


@pytest.mark.parametrize("algorithm", [Alternating(), Local()], ids=["alternating", "local"])
def test_clients_with_other_models_are_evaluated_by_themselves(make_trial, monkeypatch, algorithm):
    trial = make_trial(algorithm).run(1)
    clients = count_client_runs(trial, monkeypatch)
    rows, _ = evaluate(trial)
    assert clients == [*range(len(trial.clients))]
    if isinstance(algorithm, Alternating):
        counts = [[rows[f"{model}-on-local", i]["predicted"] for i in clients] for model in ("personal", "global")]
        assert counts[0] != counts[1]


def test_personal_protocols_alone_do_not_need_a_global_model(make_trial):
    rows, _ = evaluate(make_trial(Silent()).run(1), PERSONAL_PROTOCOLS)
    assert len(rows) == 3 * 8


def test_batch_statistics_and_noise_are_each_clients_own(make_trial, make_clients, monkeypatch):
    dropped = make_trial("fedavg", "norm", buffers="drop").run(1)
    noisy = make_trial(
        "fedavg",
        "cnn",
        make_clients((1, 4, 4), transforms=Transforms(mean=(0.5,), std=(0.5,), flip=True, on_test=True)),
    ).run(1)
    for trial in (dropped, noisy):
        clients = count_client_runs(trial, monkeypatch)
        evaluate(trial)
        assert clients == [*range(len(trial.clients))]
