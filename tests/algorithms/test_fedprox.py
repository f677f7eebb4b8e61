import pytest

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedprox import FedProx
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"mu": 0.0},
)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_fedprox_with_mu_0_equals_fedavg_bit_for_bit(make_trial, assert_same, settings):
    prox, plain = (make_trial(algorithm, **settings).run(3) for algorithm in (FedProx(mu=0.0), FedAvg()))
    assert_same(prox.server, plain.server)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fedprox_with_one_local_step_equals_fedavg(make_trial, assert_same, optimizer):
    """The gradient of the penalty is 0 at the start of training."""
    settings = {"optimizer": optimizer, "local_epochs": 1, "batch_size": 100}
    prox, plain = (make_trial(algorithm, **settings).run(3) for algorithm in (FedProx(mu=50.0), FedAvg()))
    assert_same(prox.server, plain.server)


def test_fedprox_with_one_client_reaches_exact_minimizer(make_toy, trace_path):
    """The minimizer of (x - 4)^2 / 2 + x^2 / 2 is 2."""
    assert trace_path(make_toy(FedProx(mu=1.0), [(1, 4)], local_epochs=60, learning_rate=0.3), 1) == pytest.approx([2])


@pytest.mark.parametrize(
    ("mu", "steps", "rounds", "point"),
    [(0.0, 60, 1, 2.0), (1.0, 30, 40, 2.4), (10.0, 12, 180, 66 / 23)],
)
def test_fedprox_with_exact_solves_reaches_fixed_points(make_toy, trace_path, mu, steps, rounds, point):
    """The rate 2 / (1 + 3 + 2 mu) is the fastest for both clients."""
    trial = make_toy(FedProx(mu=mu), local_epochs=steps, learning_rate=1 / (2 + mu))
    assert trace_path(trial, rounds)[-1] == pytest.approx(point, abs=1e-10)


class FedProxEquation(FedAvg):
    """The loss of Eq. 2 of the paper, differentiated by autograd. The distance excludes running statistics."""

    def start(self, state, download, info):
        return {"model": download["model"], "anchor": download["model"]}

    def loss(self, client, batch):
        distances = [(client["model"][name] - client["anchor"][name]).square().sum() for name in self.net.names]
        return self.risk(client, batch) + 0.35 * sum(distances)


@pytest.mark.parametrize(
    ("model", "settings"),
    [("norm", {}), ("norm", {"momentum": 0.9, "weight_decay": 0.1}), ("mlp", {"optimizer": "adam"})],
)
@pytest.mark.parametrize("width", [None, 3])
def test_fedprox_penalty_is_half_mu_times_squared_distance(make_trial, assert_same, model, settings, width):
    """The penalty is a part of the loss, so momentum, Adam, and fine-tuning include it."""
    prox, written = (
        make_trial(algorithm, model, local_epochs=3, width=width, **settings).run(2)
        for algorithm in (FedProx(mu=0.7), FedProxEquation())
    )
    assert_same(prox.server, written.server, tolerance=1e-12)
    tuned, wanted = (trial.train([1], ["local"], "finetune")[0] for trial in (prox, written))
    assert tuned.scores["local"].loss == pytest.approx(wanted.scores["local"].loss, rel=1e-11)


def test_fedprox_penalty_lowers_client_drift(make_trial):
    """A larger mu keeps every client nearer to the global model."""
    drifts = []
    for mu in (0.0, 1.0, 10.0):
        trial = make_trial(FedProx(mu=mu), local_epochs=5)
        drifts.append([float((outcome.upload["model"] - trial.server["model"]).norm()) for outcome in trial.train()])
    assert all(none > weak > strong > 0 for none, weak, strong in zip(*drifts, strict=True))
