import pytest
import torch

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedpvr import FedPVR
from fedpipe.algorithms.scaffold import Scaffold
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (2 * n.all, 2 * n.all))],
    centralized={},
    momentum=False,
    no_models=frozenset({"control"}),
)


def list_controls(trial):
    return [float(state["control"]["head.weight"]) for state in trial.client_states.values()]


def test_scaffold_with_one_local_step_equals_gradient_descent(make_toy, trace_path):
    trial = make_toy(Scaffold())
    assert trace_path(trial, 4) == pytest.approx([0.6, 1.08, 1.464, 1.7712], abs=1e-13)


def test_scaffold_control_after_one_step_is_gradient(make_toy):
    assert list_controls(make_toy(Scaffold()).run()) == pytest.approx([0, -12], abs=1e-13)


def test_scaffold_with_two_local_steps_reaches_optimum(make_toy, trace_path):
    trial = make_toy(Scaffold(), local_epochs=2)
    assert trace_path(trial, 3) == pytest.approx([1.02, 1.734, 2.19504], abs=1e-13)
    assert trace_path(trial, 150)[-1] == pytest.approx(3, abs=1e-12)


def test_scaffold_first_round_equals_uniform_fedavg(make_trial, assert_same):
    scaffold, plain = (make_trial(algorithm, weighting="uniform").run() for algorithm in (Scaffold(), FedAvg()))
    assert_same(scaffold.server["model"], plain.server["model"], tolerance=1e-14)


def test_scaffold_with_all_clients_and_one_step_equals_uniform_fedavg(make_trial, assert_same):
    settings = {"participation": 1.0, "local_epochs": 1, "batch_size": 100, "weighting": "uniform"}
    scaffold, plain = (make_trial(algorithm, **settings).run(4) for algorithm in (Scaffold(), FedAvg()))
    assert_same(scaffold.server["model"], plain.server["model"], tolerance=1e-12)


@pytest.mark.parametrize("width", [None, 3])
def test_scaffold_counts_steps_of_each_client(make_toy, width):
    """With constant gradients, option II returns the gradient for any number of steps."""
    gradients, sizes = [2.0, -1.0, 0.5, 4.0], [1, 2, 5, 9]
    settings = {"risk": lambda a, b, x: a * x, "batch_size": 2, "local_epochs": 3, "width": width}
    trial = make_toy(Scaffold(), [(gradient, 0.0) for gradient in gradients], sizes, **settings).run(2)
    assert list_controls(trial) == pytest.approx(gradients, abs=1e-12)
    assert float(trial.server["control"]["head.weight"]) == pytest.approx(sum(gradients) / 4, abs=1e-12)


def test_scaffold_adds_weight_decay_to_gradient(make_toy, trace_path):
    """At x = 2 with decay 0.5 the gradients are 2 + 1 and -6 + 1."""
    trial = make_toy(Scaffold(), start=2.0, weight_decay=0.5)
    assert trace_path(trial, 1) == pytest.approx([2 - 0.1 * (3 - 5) / 2], abs=1e-13)
    assert list_controls(trial) == pytest.approx([3, -5], abs=1e-12)


def test_scaffold_server_rate_scales_mean_step(make_toy, trace_path):
    assert trace_path(make_toy(Scaffold(server_rate=0.5)), 1) == pytest.approx([0.3], abs=1e-14)


@pytest.mark.parametrize("algorithm", [Scaffold(), FedPVR()], ids=["scaffold", "fedpvr"])
def test_server_control_is_mean_of_client_controls(make_trial, assert_same, algorithm):
    """Half of the clients participate in a round, and the controls are not zero."""
    trial = make_trial(algorithm)
    for _ in range(4):
        trial.run()
        every = [state["control"] for state in trial.client_states.values()]
        assert_same(trial.server["control"], sum(every[1:], every[0]) * (1 / len(every)), tolerance=1e-13)
    assert all(trial.client_states[outcome.client]["control"].norm() > 0.1 for outcome in trial.outcomes)


def test_scaffold_controls_with_learning_rate_0_are_0(make_trial):
    trial = make_trial(Scaffold(), learning_rate=0.0).run(2)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in trial.server["control"].values())


def test_scaffold_with_adam_parameter_uses_adam(make_trial, assert_same):
    """Controls are zero in the first round, so it equals uniform FedAvg with Adam. The second round differs."""
    settings = {"optimizer": "adam", "learning_rate": 0.01, "weighting": "uniform", "participation": 1.0}
    assert Scaffold().needs_sgd
    assert not Scaffold(adam=True).needs_sgd
    scaffold, plain = (make_trial(algorithm, **settings).run() for algorithm in (Scaffold(adam=True), FedAvg()))
    assert_same(scaffold.server["model"], plain.server["model"], tolerance=1e-14)
    assert (scaffold.run().server["model"] - plain.run().server["model"]).norm() > 1e-3


def test_scaffold_control_with_adam_is_mean_gradient(make_toy):
    """The gradients are constant, so their mean equals each of them."""
    settings = {"risk": lambda a, b, x: a * x, "batch_size": 2, "optimizer": "adam"}
    trial = make_toy(Scaffold(adam=True), [(2.0, 0.0), (-1.0, 0.0)], [5, 3], **settings).run(2)
    assert list_controls(trial) == pytest.approx([2, -1], abs=1e-14)
    assert float(trial.server["control"]["head.weight"]) == pytest.approx(0.5, abs=1e-14)


def test_scaffold_adam_parameter_does_not_change_sgd(make_trial, assert_same):
    trial, plain = (make_trial(algorithm).run(2) for algorithm in (Scaffold(adam=True), Scaffold()))
    assert_same(trial.server, plain.server)


def test_scaffold_averages_running_statistics_without_control(make_trial, assert_same):
    trial = make_trial(Scaffold(server_rate=0.5), "norm").run(2)
    names = trial.net.buffer_names
    assert tuple(trial.server["control"]) == trial.net.names
    mean = trial.collect_uploads(trial.outcomes).with_equal_weights().mean("model")
    assert_same(trial.server["model"].only(names), mean.only(names))


def test_scaffold_control_is_mean_gradient_at_any_rate(make_toy):
    """Option II divides by K times the rate of the round, so constant gradients do not change."""
    gradients = [2.0, -1.0, 0.5]
    settings = {"risk": lambda a, b, x: a * x, "local_steps": 3, "local_epochs": None}
    trial = make_toy(
        Scaffold(),
        [(each, 0.0) for each in gradients],
        schedule={"name": "cosine", "period": 3, "minimum": 0.01, "warmup": 1},
        **settings,
    )
    for _ in range(4):
        trial.run()
        found = [float(state["control"]["head.weight"]) for state in trial.client_states.values()]
        assert found == pytest.approx(gradients, abs=1e-12)
