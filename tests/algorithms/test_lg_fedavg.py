import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.lg_fedavg import LGFedAvg
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import copy_parameters, list_batches, load_mlp, run_fedavg, take_steps

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


def test_lg_fedavg_three_rounds_match_pfllib(make_trial, assert_same):
    """PFLlib's clientLG copies the server's head into the client's model with `set_parameters` and trains the model."""
    trial = make_trial(LGFedAvg(), learning_rate=0.1)
    bodies = dict.fromkeys(range(8), trial.initial_model(0).only(trial.net.body_names))

    def train_client(client, number, head):
        module = load_mlp(bodies[client], head)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        take_steps(optimizer, lambda x, y: cross_entropy(module(x), y), list_batches(trial, client, number))
        bodies[client] = copy_parameters(module, "body.")
        return copy_parameters(module, "head.")

    expected = run_fedavg(trial, 3, train_client, "head")
    assert_same(trial.run(3).server["head"], expected, tolerance=1e-12)
    for client, state in trial.client_states.items():
        assert_same(state["body"], bodies[client], tolerance=1e-12)
