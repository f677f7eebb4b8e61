import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={},
)


@pytest.mark.parametrize(("weighting", "mean"), [("count", 3.25), ("uniform", 2.5)])
def test_fedavg_averages_by_counts_or_uniformly(make_toy, trace_path, weighting, mean):
    """One client is at 1 with one sample, the other at 4 with three."""
    trial = make_toy(FedAvg(), [(1, 1), (1, 4)], sizes=[1, 3], learning_rate=1.0, weighting=weighting)
    assert trace_path(trial, 1) == [mean]


def test_fedavg_normalizes_weights_over_participants(make_trial):
    trial = make_trial("fedavg")
    uploads = trial.collect_uploads(trial.train([0, 1, 7]))
    assert uploads.weights == pytest.approx((1 / 26, 5 / 26, 20 / 26))


def test_fedavg_with_one_local_step_reaches_optimum(make_toy, trace_path):
    trial = make_toy(FedAvg())
    assert trace_path(trial, 4) == pytest.approx([0.6, 1.08, 1.464, 1.7712], abs=1e-14)
    assert trace_path(trial, 150)[-1] == pytest.approx(3, abs=1e-12)


def test_fedavg_with_two_local_steps_drifts_from_optimum(make_toy, trace_path):
    """The limit is 4 (1 - 0.7^2) / ((1 - 0.9^2) + (1 - 0.7^2)) = 2.9142857."""
    assert trace_path(make_toy(FedAvg(), local_epochs=2), 100)[-1] == pytest.approx(2.04 / 0.7, abs=1e-12)


def test_fedavg_with_exact_local_solves_averages_client_optima(make_toy, trace_path):
    assert trace_path(make_toy(FedAvg(), local_epochs=60, learning_rate=0.5), 1)[0] == pytest.approx(2, abs=1e-14)


def test_fedavg_with_full_batches_equals_gradient_step_on_pooled_data(make_trial, assert_same):
    trial = make_trial("fedavg", participation=1.0, local_epochs=1, batch_size=100, learning_rate=0.3)
    theta = trial.server["model"].map(lambda value: value.clone().requires_grad_())
    x, y = trial.clients.gather_samples(torch.cat([torch.as_tensor(part) for part in trial.clients.train]))
    gradient = torch.autograd.grad(torch.nn.functional.cross_entropy(trial.net(theta, x), y), list(theta.values()))
    stepped = {name: value - 0.3 * g for (name, value), g in zip(trial.server["model"].items(), gradient, strict=True)}
    assert_same(dict(trial.run().server["model"]), stepped, tolerance=1e-14)


def test_fedavg_ignores_clients_outside_round(make_clients, make_trial, assert_same):
    """Train the same participants on the same samples, among eight clients and among ten."""
    clients = make_clients(), make_clients(sizes=(1, 5, 9, 12, 7, 16, 3, 20, 11, 4))
    few, many = (make_trial("fedavg", clients=dealt).run(2, ids=[0, 3, 5]) for dealt in clients)
    assert torch.equal(clients[0].x, clients[1].x[: len(clients[0].x)])
    assert_same(many.server, few.server)
