import pytest

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedexp import FedExP
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={},
)

PROBLEMS = [(1.0, 2.0), (1.0, -1.0)]  #: a step of rate 1 from 0 ends at 2 and -1


def make_two_client_trial(make_toy, algorithm, **settings):
    return make_toy(algorithm, PROBLEMS, **{"learning_rate": 1.0} | settings)


def test_fedexp_extrapolated_step_matches_exact_values(make_toy, trace_path):
    """The updates are 2 and -1, with mean 1/2 and mean square 5/2.

    The server's rate is 5/2 / (2 (1/4 + 1/4)) = 2.5, so the model moves to 1.25.
    """
    trial = make_two_client_trial(make_toy, FedExP(epsilon=0.25))
    assert trace_path(trial, 1) == pytest.approx([1.25], abs=1e-14)
    assert float(trial.algorithm.metrics(trial.server)["server_rate"]) == pytest.approx(2.5, abs=1e-14)
    models = {"mean": trial.algorithm.global_model(trial.server), **trial.algorithm.extra_models(trial.server)}
    values = {name: float(model["head.weight"]) for name, model in models.items()}
    assert values == pytest.approx({"mean": 0.625, "last": 1.25}, abs=1e-14)


def test_fedexp_weights_clients_by_samples(make_toy, trace_path):
    """With weights 3/4 and 1/4, the updates have mean 5/4 and mean square 13/4.

    The server's rate is 13/4 / (2 (25/16 + 1/16)) = 1.
    """
    assert trace_path(make_two_client_trial(make_toy, FedExP(epsilon=1 / 16), sizes=[3, 1]), 1) == pytest.approx(
        [1.25], abs=1e-14
    )
    assert trace_path(make_two_client_trial(make_toy, FedExP(epsilon=1e-9), sizes=[3, 1]), 1) == pytest.approx(
        [1.3], abs=1e-8
    )


def test_fedexp_with_equal_updates_equals_fedavg(make_toy, trace_path):
    """The mean square equals the square of the mean, and half of it gives a rate below 1."""
    problems = [(1.0, 2.0), (1.0, 2.0)]
    exp, plain = (trace_path(make_toy(algorithm, problems), 3) for algorithm in (FedExP(), FedAvg()))
    assert exp == pytest.approx(plain, abs=1e-14)


def test_fedexp_with_large_epsilon_equals_fedavg(make_trial, assert_same):
    exp, plain = (make_trial(algorithm).run(3) for algorithm in (FedExP(epsilon=1e9, evaluated="last"), FedAvg()))
    model = exp.algorithm.global_model(exp.server)
    assert_same(model, plain.server["model"], tolerance=1e-14)


@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedexp_three_rounds_match_authors_code(make_trial, assert_same, model):
    """The authors' main.py uses flat vectors and weights by samples.

    It multiplies epsilon by the number of participants.
    """
    epsilon = 0.01
    trial = make_trial(FedExP(epsilon=4 * epsilon), model)
    for _ in range(3):
        outcomes, theta = trial.train(), trial.net.parameters(trial.server["model"]).flat()
        assert len(outcomes) == 4
        sizes = [float(trial.clients.sizes[outcome.client]) for outcome in outcomes]
        updates = [trial.net.parameters(outcome.upload["model"]).flat() - theta for outcome in outcomes]
        average = sum(size * update for size, update in zip(sizes, updates, strict=True)) / sum(sizes)
        squares = sum(size * update.norm() ** 2 for size, update in zip(sizes, updates, strict=True)) / sum(sizes)
        rate = max(1, 0.5 * squares / (average.norm() ** 2 + 4 * epsilon))
        trial.run()
        assert_same(trial.net.parameters(trial.server["model"]).flat(), theta + rate * average, tolerance=1e-12)
        mean = trial.net.parameters(trial.algorithm.global_model(trial.server)).flat()
        assert_same(mean, theta + rate * average / 2, tolerance=1e-12)


def test_fedexp_rejects_epsilon_0():
    with pytest.raises(SettingsError, match=r"epsilon.*0"):
        registry.build_component(component.ALGORITHM, "fedexp", {"epsilon": 0})
