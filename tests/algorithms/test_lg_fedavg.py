import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.lg_fedavg import LGFedAvg
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.head, n.head)), ({"layers": 2}, lambda n: (n.all, n.all))],
    centralized={},
    exceptions={"equal_uploads": "it uploads the head, and the body stays at the client"},
)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_lg_fedavg_with_all_layers_shared_equals_fedavg_bit_for_bit(make_trial, assert_same, model):
    shared, plain = (make_trial(method, model, momentum=0.9).run(3) for method in (LGFedAvg(layers=3), FedAvg()))
    assert_same(shared.algorithm.global_model(shared.server), plain.server["model"])


@pytest.mark.parametrize("layers", [1, 2])
def test_lg_fedavg_averages_top_layers_and_keeps_lower_layers(make_trial, assert_same, layers):
    trial = make_trial(LGFedAvg(layers=layers), "norm").run(2)
    personal = [name for name in trial.initial_model(0) if name not in trial.server["head"]]
    expected_layers = ["body.0", "body.1", "head"]
    assert {name.rpartition(".")[0] for name in personal} == set(expected_layers[: 3 - layers])
    assert trial.algorithm.global_model(trial.server) is None
    assert_same(trial.server["head"], trial.collect_uploads(trial.outcomes).mean("head"))
    for outcome in trial.outcomes:
        assert set(outcome.kept_state["body"]) == set(personal)
        assert_same(trial.start(outcome.client)["model"].only(personal), outcome.kept_state["body"].only(personal))


def test_lg_fedavg_three_rounds_match_pfllib(make_trial, list_batches):
    """PFLlib's clientLG copies the server's head into the client's model with `set_parameters` and trains the model."""
    trial = make_trial(LGFedAvg(), learning_rate=0.1)
    net, head = trial.net, trial.server["head"]
    models = dict.fromkeys(range(8), trial.initial_model(0))
    for number in (1, 2, 3):
        trial.run()
        ids = [outcome.client for outcome in trial.outcomes]
        for client in ids:
            model = {name: value.clone().requires_grad_() for name, value in (models[client] | head).items()}
            optimizer = torch.optim.SGD(model.values(), lr=0.1)
            for x, y in list_batches(trial, client, number):
                optimizer.zero_grad()
                cross_entropy(net(Tensors(model), x), y).backward()
                optimizer.step()
            models[client] = Tensors(model).map(torch.detach)
        sizes = trial.clients.sizes[ids] / trial.clients.sizes[ids].sum()
        head = sum(float(size) * models[client].only(net.head_names) for size, client in zip(sizes, ids, strict=True))
    torch.testing.assert_close(trial.server["head"].flat(), head.flat(), rtol=0, atol=1e-12)
    for client in range(8):
        body = models[client].only(net.body_names)
        torch.testing.assert_close(trial.client_states[client]["body"].flat(), body.flat(), rtol=0, atol=1e-12)
