import math

import pytest
import torch
from torch import nn

from fedpipe.algorithms.cfl import CFL
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.model_stack import select_model
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import make_opposed_clients

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={},
    parameters={"after": 0, "eps1": 1.0, "eps2": 0.01},  # splits as early as possible
)

f64 = torch.float64
EXAMPLE = [(1.0, 0.0), (0.9, 0.1), (-1.0, 0.0)]


@pytest.fixture
def make_server(make_clients, make_trial):
    """Make an algorithm and its server state. The clients' models are points of the plane that start at the origin."""

    def make(clients, **parameters):
        trial = make_trial(
            CFL(**{"eps1": 0.4, "eps2": 0.9, "after": 0} | parameters),
            lambda: Network(nn.Identity(), nn.Linear(2, 1, bias=False)),
            make_clients(shape=(2,), sizes=[1] * clients),
            initial_model=lambda index: Tensors({"head.weight": torch.zeros(1, 2, dtype=f64)}),
        )
        return trial.algorithm, trial.server

    return make


def aggregate_updates(algorithm, server, updates, weights=None):
    """Return the server state after a round in which the clients made these updates."""
    _, own = algorithm.send(server, list(updates))
    models = [own["model"].map(lambda value, at=row: value[at]) for row in range(len(updates))]
    moved = [model + torch.tensor([update], dtype=f64) for model, update in zip(models, updates.values(), strict=True)]
    sent = [{"model": model} for model in moved]
    return algorithm.aggregate(server, Uploads(list(updates), weights or [1.0] * len(updates), sent))


def read_weights(server, client):
    return select_model(server["models"], int(server["cluster"][client]))["head.weight"].flatten().tolist()


def make_vector(angle):
    return math.cos(math.radians(angle)), math.sin(math.radians(angle))


def test_cfl_splits_opposed_update_into_new_cluster(make_server):
    algorithm, server = make_server(3)
    server = aggregate_updates(algorithm, server, dict(enumerate(EXAMPLE)))
    assert server["norms"].tolist() == pytest.approx([0.301846, 1], abs=1e-6)
    assert server["cluster"].tolist() == [0, 0, 2]
    assert [read_weights(server, client) for client in range(3)] == [[0.95, 0.05], [0.95, 0.05], [-1, 0]]
    assert {name: float(value) for name, value in algorithm.metrics(server).items()}["clusters"] == 2


@pytest.mark.parametrize("parameters", [{"eps1": 0.3}, {"eps2": 1.0}, {"gamma": 0.999}, {"after": 1}])
def test_cfl_unmet_split_condition_keeps_one_cluster(make_server, parameters):
    """The separation is sqrt((1 + 0.993884) / 2) = 0.99847."""
    algorithm, server = make_server(3, **parameters)
    server = aggregate_updates(algorithm, server, dict(enumerate(EXAMPLE)))
    assert server["cluster"].tolist() == [0, 0, 0]
    assert read_weights(server, 2) == pytest.approx([0.3, 0.1 / 3])


def test_cfl_splits_if_separation_exceeds_gamma(make_server):
    algorithm, server = make_server(3, gamma=0.998)
    assert aggregate_updates(algorithm, server, dict(enumerate(EXAMPLE)))["cluster"].tolist() == [0, 0, 2]


def test_cfl_separation_ignores_clients_that_never_trained(make_server):
    """Client 3 has no update, whose cosine with the others would be 0."""
    algorithm, server = make_server(4, gamma=0.8)
    server = aggregate_updates(algorithm, server, dict(enumerate(EXAMPLE)))
    assert server["cluster"].tolist() == [0, 0, 2, 0]


def test_cfl_keeps_clusters_of_one_or_two_clients(make_server):
    algorithm, server = make_server(2)
    assert aggregate_updates(algorithm, server, {0: (1.0, 0.0), 1: (-1.0, 0.0)})["cluster"].tolist() == [0, 0]
    algorithm, server = make_server(1, eps1=5.0)
    assert aggregate_updates(algorithm, server, {0: (1.0, 0.0)})["cluster"].tolist() == [0]


def test_cfl_mean_update_is_weighted(make_server):
    """With 3/4 of the weight on the first client, the mean update is longer than eps1."""
    algorithm, server = make_server(3)
    server = aggregate_updates(algorithm, server, dict(enumerate(EXAMPLE)), [6, 1, 1])
    assert server["norms"][0] == pytest.approx(math.hypot(5.9, 0.1) / 8)
    assert server["cluster"].tolist() == [0, 0, 0]


def test_cfl_split_uses_complete_linkage(make_server):
    """The directions are 0, 55, 105, and 145 degrees. Single linkage would separate the first from the others."""
    algorithm, server = make_server(4, eps1=10.0)
    server = aggregate_updates(
        algorithm, server, {client: make_vector(angle) for client, angle in enumerate((0, 55, 105, 145))}
    )
    assert server["cluster"].tolist() == [0, 0, 2, 2]


def test_cfl_splits_cluster_again(make_server):
    algorithm, server = make_server(6, eps1=10.0)
    angles = (0, 180, 5, 100, 8, 190)
    server = aggregate_updates(algorithm, server, {client: make_vector(angle) for client, angle in enumerate(angles)})
    assert server["cluster"].tolist() == [0, 1, 0, 1, 0, 1]
    server = aggregate_updates(algorithm, server, {client: make_vector(angle) for client, angle in enumerate(angles)})
    assert server["cluster"].tolist() == [0, 1, 2, 3, 2, 1]
    server = aggregate_updates(algorithm, server, {2: make_vector(0), 4: make_vector(180)})
    assert server["cluster"].tolist() == [0, 1, 2, 3, 2, 1]


def test_cfl_splits_absent_clients_by_last_update(make_server):
    """Client 4 is absent and last moved like client 3. Client 1 has never participated and stays with client 0."""
    algorithm, server = make_server(5, eps1=1.0, after=1)
    server = aggregate_updates(algorithm, server, {0: (1.0, 0.0), 2: (1.0, 0.1), 3: (-1.0, 0.0), 4: (-1.0, 0.1)})
    before = read_weights(server, 0)
    server = aggregate_updates(algorithm, server, {0: (1.0, 0.0), 2: (1.0, 0.1), 3: (-1.0, 0.0)})
    assert server["cluster"].tolist() == [0, 0, 0, 3, 3]
    assert read_weights(server, 4) == pytest.approx([before[0] - 1, before[1]])
    assert read_weights(server, 1) == pytest.approx([before[0] + 1, before[1] + 0.05])


def test_cfl_cluster_without_participants_keeps_model(make_server):
    algorithm, server = make_server(5, eps1=10.0, after=1)
    server = aggregate_updates(
        algorithm, server, {0: (1.0, 0.0), 1: (1.0, 0.1), 2: (-1.0, 0.0), 3: (-1.0, 0.1), 4: (-1.0, 0.2)}
    )
    before = read_weights(server, 0)
    server = aggregate_updates(algorithm, server, {0: (1.0, 0.0), 1: (1.0, 0.1)})
    assert server["cluster"].tolist() == [0, 0, 2, 2, 2]
    assert read_weights(server, 2) == before
    assert read_weights(server, 0) == pytest.approx([before[0] + 1, before[1] + 0.05])


def test_cfl_splits_cluster_with_zero_updates(make_server):
    algorithm, server = make_server(4, eps1=10.0)
    server = aggregate_updates(algorithm, server, {0: (0.0, 0.0), 1: (1.0, 0.0), 2: (1.0, 0.1), 3: (0.0, 0.0)})
    assert server["cluster"][1] == server["cluster"][2]
    assert len(set(server["cluster"].tolist())) == 2


@pytest.mark.parametrize("weighting", ["count", "uniform"])
@pytest.mark.parametrize("parameters", [{"eps1": 0.0, "after": 0}, {"eps2": 1e9, "after": 0}, {}])
def test_cfl_without_split_equals_fedavg(make_trial, assert_same, parameters, weighting):
    ours, plain = (
        make_trial(algorithm, weighting=weighting, momentum=0.9) for algorithm in (CFL(**parameters), FedAvg())
    )
    for _ in range(3):
        assert_same(ours.start(2)["model"], plain.start(2)["model"], tolerance=1e-14)
        assert_same(ours.train()[0].upload, plain.train()[0].upload, tolerance=1e-14)
        ours.run()
        plain.run()


def test_cfl_equal_uploads_become_model_of_each_cluster(make_server):
    algorithm, server = make_server(4, eps1=10.0)
    server = aggregate_updates(
        algorithm, server, {client: make_vector(angle) for client, angle in enumerate((0, 5, 180, 185))}
    )
    sent = [{"model": Tensors({"head.weight": torch.tensor([[7.0, 8.0]], dtype=f64)})}] * 4
    server = algorithm.aggregate(server, Uploads(range(4), [1, 2, 3, 4], sent))
    assert [read_weights(server, client) for client in range(4)] == [pytest.approx([7, 8], abs=1e-14)] * 4


@pytest.fixture
def make_opposed(make_trial):
    """Make a trial on the clients of :func:`make_opposed_clients`."""

    def make(algorithm, **settings):
        clients = make_opposed_clients([30, 20, 25, 30, 20, 25])
        build = lambda: Network(nn.Identity(), nn.Linear(2, 2))  # noqa: E731
        return make_trial(algorithm, build, clients, participation=1.0, **settings)

    return make


@pytest.mark.parametrize("width", [None, 4])
def test_cfl_separates_clients_with_opposed_labels(make_opposed, assert_same, width):
    """After the split, each cluster trains as its own FedAvg and classifies its members' data correctly."""
    algorithm = CFL(eps1=0.2, eps2=0.2, gamma=0.7, after=3)
    trial = make_opposed(algorithm, width=width).run(3)
    assert trial.server["cluster"].tolist() == [0] * 6
    while len(set(trial.server["cluster"].tolist())) == 1:
        trial.run()
        assert trial.rounds < 20
    assert trial.server["cluster"].tolist() == [0, 1, 0, 1, 0, 1]
    split, rounds = trial.server["models"], trial.rounds
    trial.run(3)
    for members in ([0, 2, 4], [1, 3, 5]):
        plain = make_opposed(FedAvg(), width=width)
        plain.server, plain.rounds = {"model": select_model(split, members[0])}, rounds
        plain.run(3, ids=members)
        assert_same(select_model(trial.server["models"], members[0]), plain.server["model"], tolerance=1e-13)
    for outcome in trial.run(5).train(tests=("local",), phase="receive"):
        score = outcome.scores["local"]
        assert score.correct >= 0.8 * score.total
    assert trial.server["cluster"].tolist() == [0, 1, 0, 1, 0, 1]
    assert trial.algorithm.global_model(trial.server) is None
