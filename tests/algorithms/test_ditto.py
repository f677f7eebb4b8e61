import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.ditto import Ditto
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.local import Local
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches, run_fedavg

EXPECTED = Expected(traffic=[({}, lambda n: (n.all, n.all))], centralized={})


def test_ditto_personal_steps_match_exact_values(make_toy):
    """The personal risk is (v - 4)^2 / 2 + (v - w)^2, and both models start at 0.

    The first step leads to v = 0.4 and w = 0.4, the second to v = 0.4 + 0.1 * 3.6.
    """
    trial = make_toy(Ditto(attraction=2.0), [(1, 4)], local_epochs=1).run()
    assert float(trial.client_states[0]["personal"]["head.weight"]) == pytest.approx(0.4, abs=1e-15)
    trial.run()
    assert float(trial.client_states[0]["personal"]["head.weight"]) == pytest.approx(0.76, abs=1e-15)


def test_ditto_pulls_towards_downloaded_model(make_toy):
    """The local model moves in three steps, but the target of the pull does not."""
    trial = make_toy(Ditto(attraction=2.0), [(1, 4)], local_epochs=3).run()
    v = 0.0
    for _ in range(3):
        v -= 0.1 * ((v - 4) + 2 * (v - 0))
    assert float(trial.client_states[0]["personal"]["head.weight"]) == pytest.approx(v, abs=1e-15)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam", "learning_rate": 0.01}])
@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_ditto_global_model_equals_fedavg_bit_for_bit(make_trial, assert_same, model, settings):
    ditto, plain = (make_trial(method, model, **settings).run(3) for method in (Ditto(), FedAvg()))
    assert_same(ditto.server, plain.server)


def test_ditto_without_attraction_equals_local_training(make_trial, assert_same):
    """Batches are full, so their order has no effect."""
    settings = {"batch_size": "full", "local_epochs": 3, "momentum": 0.9}
    ditto, local = (make_trial(method, **settings).run(3) for method in (Ditto(attraction=0.0), Local()))
    for client in range(8):
        assert_same(ditto.client_states[client]["personal"], local.client_states[client]["model"], tolerance=1e-13)


def test_ditto_attraction_keeps_personal_models_near_global_model(make_trial):
    distances = []
    for attraction in (0.0, 1.0, 10.0):
        trial = make_trial(Ditto(attraction=attraction), participation=1.0).run(3)
        states = trial.client_states.values()
        distances.append(float(sum((state["personal"] - trial.server["model"]).norm() for state in states)))
    assert distances == sorted(distances, reverse=True)


def test_ditto_three_rounds_match_pfllib(make_trial, assert_same):
    """PFLlib's clientditto runs `ptrain` with PerturbedGradientDescent, then `train`, with the same batches."""
    trial = make_trial(Ditto(attraction=0.5), learning_rate=0.1)
    personal = dict.fromkeys(range(8), trial.server["model"])

    def train(model, server, mu, batches):
        for x, y in batches:
            leaves = model.map(lambda value: value.detach().requires_grad_())
            g = torch.autograd.grad(cross_entropy(trial.net(leaves, x), y), list(leaves.values()))
            model = model - 0.1 * (Tensors(zip(leaves, g, strict=True)) + mu * (model - server))
        return model

    def train_client(client, number, server):
        personal[client] = train(personal[client], server, 0.5, list_batches(trial, client, number, "personal"))
        return train(server, server, 0.0, list_batches(trial, client, number))

    run_fedavg(trial, 3, train_client)
    for client, state in trial.run(3).client_states.items():
        assert_same(state["personal"], personal[client], tolerance=1e-12)


def test_ditto_keeps_personal_model_and_predicts_with_it(make_trial, assert_same):
    trial = make_trial(Ditto()).run(1, ids=[0, 1])
    state = trial.client_states[0]["personal"]
    trial.run(2, ids=[2, 3])
    assert_same(trial.start(0)["personal"], state)
    x = trial.clients.gather_samples(trial.clients.test[3])[0]
    client = trial.start(3)
    assert torch.equal(trial.algorithm.predict(client, x), trial.net(client["personal"], x))
