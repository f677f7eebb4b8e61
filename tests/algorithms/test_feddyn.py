import pytest
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.extensions.dw import DW, add_dw_mixin
from fedpipe.algorithms.feddyn import FedDyn
from fedpipe.algorithms.fedprox import FedProx
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.engine.clients import evaluation
from fedpipe.settings.evaluation import Evaluation
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized="what it adds divides by its strength, which is never 0",
    no_models=frozenset({"h"}),
    exceptions={"equal_uploads": "the server moves beyond the mean model"},
)


def make_exact_settings(alpha, **parameters):
    """Solve Q2's subproblems up to rounding. The rate 1 / (2 + alpha) is the fastest for both clients."""
    settings = {"local_epochs": 30, "learning_rate": 1 / (2 + alpha)}
    return FedDyn(**{"alpha": alpha, "clip": None} | parameters), settings


def list_linear_terms(trial):
    return [float(state["g"]["head.weight"]) for state in trial.client_states.values()]


def measure_protocols(trial, *protocols):
    """Return the rows of the metrics after the rounds so far."""
    settings, kept = Evaluation(protocols=protocols), trial.client_states.__getitem__
    found = evaluation.evaluate_round(
        settings, trial.executor, trial.algorithm, trial.clients, trial.server, trial.send, kept, trial.rounds
    )
    return found.metrics.to_pylist()


@pytest.mark.parametrize("alpha", [0.01, 0.7])
def test_feddyn_first_round_doubles_mean_update(make_trial, assert_same, alpha):
    trial = make_trial(FedDyn(alpha=alpha), participation=1.0)
    theta = trial.server["model"]
    mean = trial.collect_uploads(trial.train()).with_equal_weights().mean("model")
    assert_same(trial.run().server["model"], 2 * mean - theta, tolerance=1e-13)


@pytest.mark.parametrize(
    ("alpha", "points"),
    [
        (1.0, [3, 3, 3]),
        (0.5, [3.428571, 2.857143, 2.775510, 2.802721]),
        (0.1, [3.870968, 2.287390, 2.236307, 2.278102]),
        (10.0, [0.923077, 1.300699, 1.591178, 1.828842]),
    ],
)
def test_feddyn_with_exact_solves_matches_exact_values_on_q2(make_toy, trace_path, alpha, points):
    algorithm, settings = make_exact_settings(alpha)
    assert trace_path(make_toy(algorithm, **settings), len(points)) == pytest.approx(points, abs=1e-6)


def test_feddyn_converges_to_global_optimum(make_toy, trace_path):
    """FedAvg and FedProx converge to other points. The linear terms converge to the gradients at the optimum."""
    algorithm, settings = make_exact_settings(2.0)
    trial = make_toy(algorithm, **settings | {"local_epochs": 12})
    assert trace_path(trial, 25)[-1] == pytest.approx(3, abs=1e-5)
    assert list_linear_terms(trial) == pytest.approx([3, -3], abs=1e-5)


def test_feddyn_with_one_client_reaches_its_optimum(make_toy, trace_path):
    """The client's minimizer of (x - 4)^2 / 2 + x^2 / 2 is 2. The server moves to 4 and stays there."""
    algorithm, settings = make_exact_settings(1.0)
    trial = make_toy(algorithm, [(1, 4)], **settings | {"learning_rate": 0.3})
    assert trace_path(trial, 3) == pytest.approx([4, 4, 4], abs=1e-9)
    assert list_linear_terms(trial) == pytest.approx([-0.5], abs=1e-9), "the linear term halves in each round"


def test_feddyn_equal_clients_have_equal_linear_terms(make_toy, trace_path):
    algorithm, settings = make_exact_settings(2.0)
    trial = make_toy(algorithm, [(1, 4), (1, 4), (1, 4)], **settings | {"local_epochs": 12})
    assert trace_path(trial, 20)[-1] == pytest.approx(4, abs=0.01)
    first, *others = list_linear_terms(trial)
    assert others == pytest.approx([first] * 2, abs=1e-14)


def test_feddyn_server_h_is_mean_of_client_linear_terms(make_trial, assert_same):
    """Half of the clients participate in a round. Absent clients keep their linear terms."""
    trial = make_trial(FedDyn(alpha=0.1))
    for _ in range(4):
        before = trial.client_states
        trial.run()
        every = [state["g"] for state in trial.client_states.values()]
        assert_same(trial.server["h"], sum(every[1:], every[0]) * (1 / len(every)), tolerance=1e-13)
        away = set(trial.client_states) - {outcome.client for outcome in trial.outcomes}
        assert all(trial.client_states[client] is before[client] for client in away)
    assert all(outcome.kept_state["g"].norm() > 1e-3 for outcome in trial.outcomes)


def test_feddyn_rejects_alpha_0():
    with pytest.raises(SettingsError, match=r"^algorithms.alpha: 0"):
        registry.build_component(component.ALGORITHM, "feddyn", {"alpha": 0})


def test_feddyn_clips_gradients(make_toy, trace_path):
    """At 0 the gradients are 0 and -12. The clipped step is 0.1 instead of 1.2, and the server takes twice the mean.

    PyTorch's clipping adds 1e-6 to the norm.
    """
    assert trace_path(make_toy(FedDyn(alpha=1.0, clip=1.0)), 1) == pytest.approx([1.2 / (12 + 1e-6)], abs=1e-14)
    assert trace_path(make_toy(FedDyn(alpha=1.0, clip=13.0)), 1) == pytest.approx([1.2], abs=1e-14)


def test_feddyn_clips_risk_and_penalty_but_not_weight_decay(make_toy):
    """The gradient at 0 is -100. At the second step the risk has -99 and the penalty 8. Both steps are clipped to 10.

    Weight decay adds 0.5 to the second step after clipping.
    """
    trial = make_toy(FedDyn(alpha=8.0, clip=10.0), [(1.0, 100.0)], local_epochs=2, weight_decay=0.5).run()
    (outcome,) = trial.outcomes
    first = 0.1 * 100 * 10 / (100 + 1e-6)
    second = (100 - first - 8 * first) * 10 / (100 - 9 * first + 1e-6)
    found = float(outcome.upload["model"]["head.weight"])
    assert found == pytest.approx(first + 0.1 * (second - 0.5 * first), abs=1e-14)
    assert found == pytest.approx(1 + 0.1 * (10 - 0.5), abs=1e-6)


def test_feddyn_global_model_is_participant_mean_or_server_model(make_trial, assert_same):
    """The distance between the mean and the server's model is a metric."""
    trial = make_trial(FedDyn(alpha=0.1, evaluated="mean"), "norm").run(3)
    mean = trial.collect_uploads(trial.outcomes).with_equal_weights().mean("model")
    assert_same(trial.algorithm.global_model(trial.server), mean, tolerance=1e-13)
    cloud = make_trial(FedDyn(alpha=0.1), "norm").run(3)
    assert_same(cloud.algorithm.global_model(cloud.server), trial.server["model"])
    distance = (trial.server["model"] - mean).norm()
    assert float(trial.algorithm.metrics(trial.server)["distance_from_mean"]) == pytest.approx(float(distance))
    assert distance > 0.01


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize(("evaluated", "other"), [("cloud", "mean"), ("mean", "cloud")])
def test_feddyn_evaluates_both_models_on_global_test_set(make_trial, evaluated, other, width):
    trial = make_trial(FedDyn(alpha=0.1, evaluated=evaluated), "norm", width=width).run(3)
    models = {
        "cloud": trial.server["model"],
        "mean": trial.collect_uploads(trial.outcomes).with_equal_weights().mean("model"),
    }
    x, y = trial.clients.gather_samples(trial.clients.global_test)
    rows = measure_protocols(trial, "global-on-global")
    assert [(row["protocol"], row["client"], row["round"]) for row in rows] == [
        ("global-on-global", -1, 3),
        (f"{other}-on-global", -1, 3),
    ]
    for row, name in zip(rows, (evaluated, other), strict=True):
        logits = trial.net(models[name], x)
        assert (row["correct"], row["total"]) == (int((logits.argmax(-1) == y).sum()), len(y))
        assert row["loss"] == pytest.approx(float(cross_entropy(logits, y)), rel=1e-12)
    assert rows[0]["loss"] != rows[1]["loss"]


def test_feddyn_evaluates_mean_model_only_with_global_on_global(make_trial):
    trial = make_trial(FedDyn()).run()
    assert {row["protocol"] for row in measure_protocols(trial, "personal-on-local", "global-on-local")} == {
        "global-on-local",
        "personal-on-local",
    }
    kept = make_trial(FedDyn(), "norm", buffers="keep").run()
    assert measure_protocols(kept, "global-on-global") == [], "the server's models have no running statistics"


def test_feddyn_with_dw_evaluates_both_models(make_trial):
    rows = measure_protocols(make_trial(add_dw_mixin(FedDyn)(dw=DW(mu=0.1))).run(), "global-on-global")
    assert [row["protocol"] for row in rows] == ["global-on-global", "mean-on-global"]


def test_feddyn_averages_running_statistics_without_linear_term(make_trial, assert_same):
    trial = make_trial(FedDyn(), "norm").run(2)
    names = trial.net.buffer_names
    assert tuple(trial.server["h"]) == trial.net.names
    mean = trial.collect_uploads(trial.outcomes).with_equal_weights().mean("model")
    assert_same(trial.server["model"].only(names), mean.only(names))


def test_feddyn_with_adam_parameter_uses_adam(make_trial, assert_same):
    """The linear terms are zero in the first round, so clients train as in FedProx with Adam."""
    assert FedDyn().needs_sgd
    assert not FedDyn(adam=True).needs_sgd
    feddyn, fedprox = (
        make_trial(algorithm, optimizer="adam", learning_rate=0.01).train()[1].upload["model"]
        for algorithm in (FedDyn(alpha=0.3, clip=None, adam=True), FedProx(mu=0.3))
    )
    assert_same(feddyn, fedprox, tolerance=1e-13)
