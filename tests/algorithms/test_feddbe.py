import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddbe import FedDBE
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import copy_parameters, list_batches, load_mlp, run_fedavg

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all + n.features + 1, n.all + n.features))],
    centralized="the personal vector trains from round 2 on",
)


def test_feddbe_first_round_equals_fedavg(make_trial, assert_same):
    dbe, plain = (make_trial(algorithm, momentum=0.9).run() for algorithm in (FedDBE(kappa=3.0), FedAvg()))
    assert_same(dbe.server["model"], plain.server["model"])
    assert not any(state["vector"].any() for state in dbe.client_states.values())


def test_feddbe_running_mean_matches_exact_values(make_trial, assert_same):
    """With rate 0 and one full batch in each epoch, the running mean depends only on mu.

    After one epoch it is mu times the batch mean, after two mu (1 - mu) + mu times the batch mean.
    """
    trial = make_trial(FedDBE(mu=0.25), learning_rate=0.0, local_epochs=1, batch_size=100, participation=1.0)
    module, sizes = load_mlp(trial.server["model"]), torch.as_tensor(trial.clients.sizes, dtype=torch.float64)
    means = [module.body(trial.clients.gather_samples(indices)[0]).mean(0).detach() for indices in trial.clients.train]
    trial.run()
    for outcome, mean in zip(trial.outcomes, means, strict=True):
        assert_same(outcome.upload["running"], 0.25 * mean, tolerance=1e-14)
    expected = 0.25 * (sizes @ torch.stack(means)) / sizes.sum()
    assert_same(trial.server["mean"], expected, tolerance=1e-14)
    assert_same(trial.run(2).server["mean"], expected, tolerance=1e-14)

    trial = make_trial(FedDBE(mu=0.25), learning_rate=0.0, local_epochs=2, batch_size=100, participation=1.0).run()
    for outcome, mean in zip(trial.outcomes, means, strict=True):
        assert_same(outcome.upload["running"], (0.25 * 0.75 + 0.25) * mean, tolerance=1e-14)


@pytest.mark.parametrize("width", [None, 3])
def test_feddbe_two_rounds_match_pfllib_after_initialization(make_trial, assert_same, width):
    """The model and the personal vector each have an optimizer."""
    mu, kappa, rate = 0.3, 2.0, 0.1
    trial = make_trial(FedDBE(mu=mu, kappa=kappa), width=width, learning_rate=rate).run()
    consensus = trial.server["mean"]
    vectors = {client: torch.zeros(6, dtype=torch.float64) for client in range(len(trial.clients))}

    def train_client(client, number, model):
        module, vector = load_mlp(model), vectors[client].clone().requires_grad_()
        rules = [torch.optim.SGD(values, rate) for values in (module.parameters(), [vector])]
        running = torch.zeros(6, dtype=torch.float64)
        for x, y in list_batches(trial, client, number):
            rep = module.body(x)
            running = (1 - mu) * running + mu * rep.mean(dim=0)
            loss = cross_entropy(module.head(rep + vector), y)
            loss = loss + kappa * torch.mean(0.5 * (running - consensus) ** 2)
            for rule in rules:
                rule.zero_grad()
            loss.backward()
            for rule in rules:
                rule.step()
            running = running.detach()
        vectors[client] = vector.detach()
        return copy_parameters(module)

    expected = run_fedavg(trial, 2, train_client)
    assert_same(trial.run(2).server["model"], expected, tolerance=1e-12)
    for client, vector in vectors.items():
        assert_same(trial.client_states[client]["vector"], vector, tolerance=1e-12)


def test_feddbe_predictions_add_personal_vector(make_trial, assert_same):
    trial = make_trial(FedDBE(), participation=1.0).run(2)
    client = trial.start(5)
    x, _ = trial.clients.gather_samples(trial.clients.train[5])
    module, vector = load_mlp(trial.server["model"]), trial.client_states[5]["vector"]
    assert vector.abs().min() > 0
    assert_same(trial.algorithm.predict(client, x), module.head(module.body(x) + vector).detach(), tolerance=1e-14)
