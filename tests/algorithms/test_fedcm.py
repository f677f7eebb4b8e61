import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedcm import FedCM
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches

EXPECTED = Expected(
    traffic=[({}, lambda n: (2 * n.all, n.all + 1))],
    centralized={"alpha": 1.0},
    momentum=False,
    no_models=frozenset({"direction"}),
)


def test_fedcm_rounds_match_exact_values_on_quadratic(make_toy, trace_path):
    """The risk is (x - 4)^2 / 2, and a round has one step. The next direction is the mixture of this round."""
    trial, x, direction, points = make_toy(FedCM(alpha=0.25), [(1, 4)]), 0.0, 0.0, []
    for _ in range(3):
        direction = 0.25 * (x - 4) + 0.75 * direction
        x -= 0.1 * direction
        points.append(x)
    assert trace_path(trial, 3) == pytest.approx(points, abs=1e-14)


def test_fedcm_with_alpha_1_equals_uniform_fedavg(make_trial, assert_same):
    cm, plain = (
        make_trial(method, weighting="uniform", weight_decay=0.1).run(3) for method in (FedCM(alpha=1.0), FedAvg())
    )
    assert_same(cm.server["model"], plain.server["model"], tolerance=1e-13)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_fedcm_ignores_optimizer_and_momentum(make_trial, assert_same, settings):
    found, expected = (make_trial(FedCM(), **changes).run(2) for changes in (settings, {}))
    assert_same(found.server, expected.server)


def test_fedcm_clips_gradient_without_weight_decay_and_direction(make_toy, trace_path):
    """At 0 the gradient is -12. At the second point weight decay and the direction are added after clipping.

    PyTorch's clipping adds 1e-6 to the norm.
    """
    trial, x, direction, points = make_toy(FedCM(alpha=0.25), [(1, 12)], clip_norm=1.0, weight_decay=0.5), 0.0, 0.0, []
    for _ in range(2):
        g = (x - 12) / (12 - x + 1e-6)
        direction = 0.25 * (g + 0.5 * x) + 0.75 * direction
        x -= 0.1 * direction
        points.append(x)
    assert trace_path(trial, 2) == pytest.approx(points, abs=1e-14)


@pytest.mark.parametrize("server_rate", [1.0, 0.5])
def test_fedcm_three_rounds_match_pytorch_loop(make_trial, server_rate):
    """Clients take different numbers of steps, and PyTorch's gradient includes weight decay."""
    trial = make_trial(FedCM(alpha=0.3, server_rate=server_rate), learning_rate=0.1, weight_decay=0.01)
    server = trial.server["model"]
    direction = server.zeros()
    for number in (1, 2, 3):
        trial.run()
        ids = [outcome.client for outcome in trial.outcomes]
        models, directions = [], []
        for client in ids:
            y_k, steps = server, 0
            for x, y in list_batches(trial, client, number):
                leaves = y_k.map(lambda value: value.detach().requires_grad_())
                loss = cross_entropy(trial.net(leaves, x), y) + 0.01 / 2 * leaves.square_norm()
                g = Tensors(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
                y_k, steps = y_k - 0.1 * (0.3 * g + 0.7 * direction), steps + 1
            models.append(y_k)
            directions.append((server - y_k) / (0.1 * steps))
        mean = sum(models) / len(models)
        server, direction = server + server_rate * (mean - server), sum(directions) / len(directions)
    torch.testing.assert_close(trial.server["model"].flat(), server.flat(), rtol=0, atol=1e-12)
    torch.testing.assert_close(trial.server["direction"].flat(), direction.flat(), rtol=0, atol=1e-12)


def test_fedcm_averages_running_statistics(make_trial, assert_same):
    trial = make_trial(FedCM(server_rate=0.5), "norm", weighting="uniform").run()
    names = trial.net.buffer_names
    mean = trial.collect_uploads(trial.outcomes).mean("model").only(names)
    assert_same(trial.server["model"].only(names), mean, tolerance=1e-15)
    assert set(trial.server["direction"]) == set(trial.net.names)
