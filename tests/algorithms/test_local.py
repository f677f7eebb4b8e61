import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.local import Local
from fedpipe.testing import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (0, 0))],
    centralized={},
    exceptions={"equal_uploads": "nothing is uploaded"},
)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_each_client_is_a_federation_of_its_own(make_trial, assert_same, settings):
    """Bit by bit FedAvg with this client as the only participant, whose average is its model."""
    alone = make_trial(Local(), participation=1.0, **settings).run(3)
    for client in (0, 3, 6):
        federation = make_trial(FedAvg(), **settings).run(3, ids=[client])
        assert_same(alone.client_states[client]["model"], federation.server["model"])


@pytest.mark.parametrize("width", [None, 3])
def test_other_clients_data_do_not_matter(make_clients, make_trial, assert_same, width):
    changed = make_clients()
    for client in (0, 1, 2, 4, 5, 6, 7):
        changed.x[changed.train[client]] += 1.0
    one, other = (make_trial(Local(), clients=clients, width=width).run(4) for clients in (make_clients(), changed))
    assert_same(one.client_states[3], other.client_states[3])
    assert not torch.equal(one.client_states[4]["model"].flat(), other.client_states[4]["model"].flat())


def test_whoever_is_not_in_a_round_stays(make_trial, assert_same):
    trial = make_trial(Local()).run(1, ids=[1, 2])
    before = dict(trial.client_states)
    trial.run(1, ids=[2, 5])
    assert_same(trial.client_states[1], before[1])
    assert_same(trial.client_states[4]["model"], trial.initial_model(0))
    for client in (2, 5):
        assert not torch.equal(trial.client_states[client]["model"].flat(), before[client]["model"].flat())


def test_nothing_travels(make_trial):
    trial = make_trial(Local()).run(2, tests=("local",))
    assert trial.server == {}
    assert [(outcome.bytes_down, outcome.upload) for outcome in trial.outcomes] == [(0, {})] * 4
    assert trial.algorithm.global_model(trial.server) is None


def test_each_client_finds_its_own_optimum(make_toy):
    """0 and 4 on Q2, where a federation finds 2 (rate 0.3 contracts each by 0.7 and 0.1 a step)."""
    trial = make_toy(Local(), start=1.0, local_epochs=80, learning_rate=0.3).run()
    assert [float(trial.client_states[client]["model"]["head.weight"]) for client in (0, 1)] == pytest.approx(
        [0, 4], abs=1e-11
    )


def test_a_client_of_one_class_knows_no_other(make_clients, make_trial):
    """On the global test set it is right where its own class is, and nowhere else."""
    clients = make_clients(sizes=[16] * 4, labels=lambda client: [client])
    settings = {"participation": 1.0, "learning_rate": 0.5, "local_epochs": 20}
    trial = make_trial(Local(), clients=clients, **settings).run(2, tests=("global",))
    right = [outcome.scores["global"].correct for outcome in trial.outcomes]
    assert right == [int((clients.y[clients.global_test] == client).sum()) for client in range(4)] == [0, 1, 2, 3]
