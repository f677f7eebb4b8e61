import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fednova import FedNova
from fedpipe.algorithms.uploads import Uploads
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all + 1))],
    centralized={},
)


def compute_risk(a, b, x):
    """Compute a risk with the constant gradient a."""
    return a * x


def list_weight_sums(trial):
    return [float(outcome.upload["a"]) for outcome in trial.outcomes]


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"weight_decay": 0.1}])
def test_fednova_with_equal_steps_equals_fedavg(make_clients, make_trial, assert_same, settings):
    clients = make_clients(sizes=[9, 10, 12])
    nova, plain = (
        make_trial(algorithm, clients=clients, participation=1.0, **settings).run(3)
        for algorithm in (FedNova(), FedAvg())
    )
    assert_same(nova.server, plain.server, tolerance=1e-12)


def test_fednova_with_unequal_steps_matches_exact_values(make_toy, trace_path):
    """One step of 2 and four of 1 give d = 2 and 1, with 2.5 steps on average. FedAvg takes the mean of -2 and -4."""
    settings = {"risk": compute_risk, "batch_size": 1, "weighting": "uniform"}
    problems, sizes = [(20.0, 0.0), (10.0, 0.0)], [1, 4]
    trial = make_toy(FedNova(), problems, sizes, **settings)
    assert trace_path(trial, 1) == pytest.approx([-3.75], abs=1e-14)
    assert list_weight_sums(trial) == [1, 4]
    assert trace_path(make_toy(FedAvg(), problems, sizes, **settings), 1) == pytest.approx([-3], abs=1e-14)


def test_fednova_weights_clients_by_samples(make_toy, trace_path):
    """With p = 1/5 and 4/5, the server takes 3.4 steps of 6/5."""
    settings = {"risk": compute_risk, "batch_size": 1}
    trial = make_toy(FedNova(), [(20.0, 0.0), (10.0, 0.0)], [1, 4], **settings)
    assert trace_path(trial, 1) == pytest.approx([-3.4 * 1.2], abs=1e-14)


@pytest.mark.parametrize(
    ("steps", "momentum", "mu", "a"),
    [
        (3, 0.0, 0.0, 3),
        (2, 0.9, 0.0, 2.9),
        (3, 0.9, 0.0, 5.61),
        (2, 0.0, 1.0, 1.9),
        (3, 0.0, 1.0, 2.71),
        (3, 0.9, 1.0, 5.14),
    ],
)
def test_fednova_gradient_weights_include_momentum_and_mu(make_toy, trace_path, steps, momentum, mu, a):
    """If all gradients are 1, the client moves by eta * a."""
    settings = {"risk": compute_risk, "local_epochs": steps, "momentum": momentum}
    trial = make_toy(FedNova(mu=mu), [(1.0, 0.0)], **settings)
    assert trace_path(trial, 1) == pytest.approx([-0.1 * a], abs=1e-14)
    assert list_weight_sums(trial) == pytest.approx([a], abs=1e-13)
    assert float(trial.outcomes[0].upload["model"]["head.weight"]) == pytest.approx(-0.1 * a, abs=1e-14)


def test_fednova_fixed_point_with_unequal_steps_is_near_optimum(make_toy, trace_path):
    """The optimum is 3. FedAvg's fixed point is far from it, on the side of the client with five steps."""
    settings = {"learning_rate": 0.01, "batch_size": 1, "weighting": "uniform", "sizes": [1, 5]}
    near, far = 0.01, 1 - 0.97**5  # fraction of the way to the optima 0 and 4
    nova, plain = 4 * far / 5 / (near + far / 5), 4 * far / (near + far)
    assert trace_path(make_toy(FedNova(), start=nova, **settings), 1) == pytest.approx([nova], abs=1e-12)
    assert trace_path(make_toy(FedAvg(), start=plain, **settings), 1) == pytest.approx([plain], abs=1e-12)
    assert abs(nova - 3) < 0.05 < 0.7 < abs(plain - 3)


def test_fednova_ignores_client_without_steps(make_trial, assert_same):
    trial = make_trial(FedNova()).run()
    uploads = trial.collect_uploads(trial.train())
    states = [upload for _, _, upload in uploads]
    idle = {"model": trial.server["model"], "a": torch.zeros_like(states[0]["a"])}
    found = trial.aggregate(Uploads([*uploads.ids, 99], [*uploads.weights, 0.7], [*states, idle]))
    assert_same(found, trial.aggregate(uploads), tolerance=1e-14)
    assert_same(trial.aggregate(Uploads([99], [1.0], [idle])), trial.server)


def test_fednova_with_adam_counts_steps(make_trial):
    """Adam's steps include neither momentum nor the proximal term."""
    assert FedNova().needs_sgd
    trial = make_trial(FedNova(mu=0.5, adam=True), optimizer="adam", participation=1.0).run()
    assert not trial.algorithm.needs_sgd
    assert list_weight_sums(trial) == [2 * -(-size // 4) for size in trial.clients.sizes]


def test_fednova_averages_running_statistics(make_trial, assert_same):
    trial = make_trial(FedNova(), "norm").run(2)
    names = trial.net.buffer_names
    mean = trial.collect_uploads(trial.outcomes).mean("model")
    assert_same(trial.server["model"].only(names), mean.only(names))


def test_fednova_gradient_weights_use_rate_and_steps_of_round(make_toy):
    """With mu, a_k is the path of steps with gradient 1 at this rate, divided by the rate."""
    trial = make_toy(FedNova(mu=2.0), schedule={"name": "exponential", "gamma": 0.5}, local_steps=3, local_epochs=None)
    for rate in (0.1, 0.05, 0.025):
        trial.run()
        shrink = 1 - 2.0 * rate
        for outcome in trial.outcomes:
            assert float(outcome.upload["a"]) == pytest.approx(1 + shrink + shrink**2, rel=1e-12)
