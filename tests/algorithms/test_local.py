import pytest
import torch

from fedpipe.algorithms.fedamp import FedAMP
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedfomo import FedFomo
from fedpipe.algorithms.fedproto import FedProto
from fedpipe.algorithms.local import Local
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (0, 0))],
    centralized={},
    exceptions={"equal_uploads": "nothing is uploaded"},
)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_local_client_equals_fedavg_with_one_participant(make_trial, assert_same, settings):
    """The bits are equal because the average of one model is that model."""
    alone = make_trial(Local(), participation=1.0, **settings).run(3)
    for client in (0, 3, 6):
        federation = make_trial(FedAvg(), **settings).run(3, ids=[client])
        assert_same(alone.client_states[client]["model"], federation.server["model"])


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize(
    "algorithm",
    [FedAMP(attraction=0.0, begin_at="own"), FedFomo(downloads=0), FedProto(penalty=0.0)],
    ids=["fedamp", "fedfomo", "fedproto"],
)
def test_method_without_exchange_equals_local_training(make_trial, assert_same, algorithm, width):
    """The models have equal bits for any other participants. An absent client keeps its model."""
    trial = make_trial(algorithm, width=width, momentum=0.9).run(3, ids=[0, 1, 4, 6])
    for client in (0, 1, 4, 6):
        alone = make_trial(FedAvg(), width=width, momentum=0.9).run(3, ids=[client])
        assert_same(trial.client_states[client]["model"], alone.server["model"], tolerance=1e-14 if width else 0)
    assert_same(trial.client_states[2]["model"], trial.initial_model(0))


@pytest.mark.parametrize("width", [None, 3])
def test_local_client_ignores_data_of_other_clients(make_clients, make_trial, assert_same, width):
    changed = make_clients()
    for client in (0, 1, 2, 4, 5, 6, 7):
        changed.x[changed.train[client]] += 1.0
    one, other = (make_trial(Local(), clients=clients, width=width).run(4) for clients in (make_clients(), changed))
    assert_same(one.client_states[3], other.client_states[3])
    assert not torch.equal(one.client_states[4]["model"].flat(), other.client_states[4]["model"].flat())


def test_local_absent_client_keeps_model(make_trial, assert_same):
    trial = make_trial(Local()).run(1, ids=[1, 2])
    before = dict(trial.client_states)
    trial.run(1, ids=[2, 5])
    assert_same(trial.client_states[1], before[1])
    assert_same(trial.client_states[4]["model"], trial.initial_model(0))
    for client in (2, 5):
        assert not torch.equal(trial.client_states[client]["model"].flat(), before[client]["model"].flat())


def test_local_has_no_traffic(make_trial):
    trial = make_trial(Local()).run(2, tests=("local",))
    assert trial.server == {}
    assert [(outcome.bytes_down, outcome.upload) for outcome in trial.outcomes] == [(0, {})] * 4
    assert trial.algorithm.global_model(trial.server) is None


def test_local_client_reaches_its_own_optimum(make_toy):
    """On Q2 the optima are 0 and 4, and FedAvg converges to 2. Rate 0.3 contracts by 0.7 and 0.1 in each step."""
    trial = make_toy(Local(), start=1.0, local_epochs=80, learning_rate=0.3).run()
    assert [float(trial.client_states[client]["model"]["head.weight"]) for client in (0, 1)] == pytest.approx(
        [0, 4], abs=1e-11
    )


def test_local_client_of_one_class_predicts_its_class_only(make_clients, make_trial):
    """On the global test set, only predictions for samples of the client's class are correct."""
    clients = make_clients(sizes=[16] * 4, labels=lambda client: [client])
    settings = {"participation": 1.0, "learning_rate": 0.5, "local_epochs": 20}
    trial = make_trial(Local(), clients=clients, **settings).run(2, tests=("global",))
    right = [outcome.scores["global"].correct for outcome in trial.outcomes]
    assert right == [int((clients.y[clients.global_test] == client).sum()) for client in range(4)] == [0, 1, 2, 3]
