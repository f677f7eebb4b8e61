import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedper import FedPer
from fedpipe.algorithms.fedrep import FedRep
from fedpipe.algorithms.local import Local
from fedpipe.algorithms.pfps_lwc import PFPSLWC
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[
        ({}, lambda n: (n.body, n.body)),
        ({"layers": 2}, lambda n: (0, 0)),
    ],
    centralized={},
)


@pytest.mark.parametrize("weighting", ["count", "uniform"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fedper_without_personal_layers_equals_fedavg_bit_for_bit(make_trial, assert_same, model, weighting):
    settings = {"weighting": weighting, "momentum": 0.9}
    shared, plain = (make_trial(algorithm, model, **settings).run(2) for algorithm in (FedPer(layers=0), FedAvg()))
    assert_same(shared.algorithm.global_model(shared.server), plain.server["model"])


@pytest.mark.parametrize("layers", [2, 9])
@pytest.mark.parametrize("width", [None, 3])
def test_fedper_with_all_layers_personal_equals_local_bit_for_bit(make_trial, assert_same, layers, width):
    personal, local = (make_trial(algorithm, width=width).run(3) for algorithm in (FedPer(layers=layers), Local()))
    assert dict(personal.server["body"]) == {}
    for client in range(len(local.clients)):
        assert_same(personal.client_states[client]["head"], local.client_states[client]["model"])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fedper_equals_pfps_lwc_without_recall_and_penalty(make_trial, assert_same, optimizer):
    both = (FedPer(), PFPSLWC(penalty=0.0, recall_epochs=0))
    fedper, pfps = (make_trial(algorithm, optimizer=optimizer).run(3) for algorithm in both)
    assert_same(fedper.server, pfps.server)
    for client in range(len(fedper.clients)):
        assert_same(fedper.client_states[client]["head"], pfps.client_states[client]["head"])


def test_fedper_counts_personal_layers_from_output(make_trial):
    names = [make_trial(FedPer(layers=layers), "cnn").algorithm.personal_tensor_names for layers in (0, 1, 2)]
    assert names[:2] == [(), ("head.weight", "head.bias")]
    hidden = set(names[2]) - set(names[1])
    assert len(hidden) == 2
    assert all(name.startswith("body.") for name in hidden)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("algorithm", [FedPer(), FedRep()], ids=["fedper", "fedrep"])
def test_clients_share_base_and_keep_own_heads(make_trial, assert_same, algorithm, width):
    trial = make_trial(algorithm, width=width, participation=1.0).run(2)
    models = [trial.start(client)["model"] for client in range(len(trial.clients))]
    for model in models[1:]:
        assert_same(model.only(trial.net.body_names), models[0].only(trial.net.body_names))
        assert not torch.equal(model["head.weight"], models[0]["head.weight"])
    assert trial.algorithm.global_model(trial.server) is None


def test_fedper_absent_client_combines_new_base_with_old_head(make_trial, assert_same):
    trial = make_trial(FedPer()).run(1, ids=[1, 2])
    base, top = trial.server["body"], trial.client_states[1]["head"]
    trial.run(1, ids=[2, 3])
    assert_same(trial.start(1)["model"], trial.server["body"] | top)
    assert not torch.equal(trial.server["body"].flat(), base.flat())
    assert_same(trial.start(7)["model"], trial.server["body"] | trial.initial_client_state["head"])
