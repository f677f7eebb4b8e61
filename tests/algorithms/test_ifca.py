import pytest
import torch
from torch import nn

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.ifca import IFCA
from fedpipe.algorithms.model_stack import select_model
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import make_opposed_clients

EXPECTED = Expected(
    traffic=[({"clusters": 3}, lambda n: (3 * n.all, n.all + 1))],
    centralized={"clusters": 1},
)


def list_chosen_clusters(trial):
    return {outcome.client: int(outcome.upload["cluster"]) for outcome in trial.outcomes}


@pytest.fixture
def make_opposed(make_trial):
    """Make a trial on the clients of :func:`make_opposed_clients`, with linear models.

    A sign of 1 makes an initial model that labels as the first group (clients 0, 2, and 4), -1 one for the second.
    """

    def make(algorithm, signs, **settings):
        clients = make_opposed_clients([3, 8, 1, 5, 12, 6])

        def make_initial_model(index):
            rows = torch.tensor([[0.5, 0.1], [-0.5, 0.0]], dtype=torch.float64) * signs[index]
            return Tensors({"head.weight": rows, "head.bias": torch.zeros(2, dtype=torch.float64)})

        build = lambda: Network(nn.Identity(), nn.Linear(2, 2))  # noqa: E731
        return make_trial(
            algorithm, build, clients, initial_model=make_initial_model, **{"participation": 1.0} | settings
        )

    return make


@pytest.mark.parametrize("weighting", ["count", "uniform"])
def test_ifca_with_one_cluster_equals_fedavg_bit_for_bit(make_trial, assert_same, weighting):
    one, plain = (
        make_trial(algorithm, weighting=weighting, momentum=0.9).run(3) for algorithm in (IFCA(clusters=1), FedAvg())
    )
    assert_same(select_model(one.server["models"], 0), plain.server["model"])


def test_ifca_clients_choose_first_of_equal_models(make_trial, assert_same):
    """Ties select the lowest index, and unchosen models do not change."""
    trial, plain = make_trial("fedavg"), make_trial("fedavg").run()
    same = make_trial(IFCA(clusters=3), initial_model=lambda index: trial.initial_model(0)).run()
    assert set(list_chosen_clusters(same).values()) == {0}
    assert_same(select_model(same.server["models"], 0), plain.server["model"])
    for index in (1, 2):
        assert_same(select_model(same.server["models"], index), trial.initial_model(0))


def test_ifca_clients_choose_lowest_index_of_best_models(make_opposed):
    trial = make_opposed(IFCA(clusters=4), [-1, 1, -1, 1]).run()
    assert list_chosen_clusters(trial) == {0: 1, 1: 0, 2: 1, 3: 0, 4: 1, 5: 0}


@pytest.mark.parametrize("width", [None, 4])
def test_ifca_opposed_groups_choose_different_models(make_opposed, width):
    """The choice is equal in all rounds, and one sample is enough to choose."""
    trial = make_opposed(IFCA(), [1, -1], width=width)
    for _ in range(3):
        assert list_chosen_clusters(trial.run()) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}


def test_ifca_trains_each_group_as_fedavg(make_opposed, assert_same):
    clustered = make_opposed(IFCA(), [1, -1]).run(3)
    for index, members in enumerate(([0, 2, 4], [1, 3, 5])):
        alone = make_opposed(FedAvg(), [[1, -1][index]]).run(3, ids=members)
        assert_same(select_model(clustered.server["models"], index), alone.server["model"], tolerance=1e-14)


def test_ifca_ignores_order_of_initial_models(make_opposed, assert_same):
    one, other = (make_opposed(IFCA(), signs).run(3) for signs in ([1, -1], [-1, 1]))
    assert_same(select_model(one.server["models"], 0), select_model(other.server["models"], 1))
    assert_same(select_model(one.server["models"], 1), select_model(other.server["models"], 0))


def test_ifca_clients_choose_model_of_lowest_training_loss(make_trial):
    trial = make_trial(IFCA(clusters=3), participation=1.0).run()
    server = make_trial(IFCA(clusters=3)).server
    for client, index in list_chosen_clusters(trial).items():
        x, y = trial.clients.gather_samples(trial.clients.train[client])
        logits = [trial.net(select_model(server["models"], cluster), x) for cluster in range(3)]
        losses = [float(nn.functional.cross_entropy(output, y)) for output in logits]
        assert index == losses.index(min(losses))
    assert len(set(list_chosen_clusters(trial).values())) > 1


def test_ifca_initial_models_differ(make_trial, assert_same):
    trial = make_trial(IFCA(clusters=3))
    for index in range(3):
        assert_same(select_model(trial.server["models"], index), trial.initial_model(index))
    assert not torch.equal(trial.initial_model(0).flat(), trial.initial_model(1).flat())


def test_ifca_keeps_unchosen_model(make_opposed, assert_same):
    trial = make_opposed(IFCA(), [1, -1])
    before = trial.server["models"]
    trial.run(1, ids=[0, 4])
    assert_same(select_model(trial.server["models"], 1), select_model(before, 1))
    assert not torch.equal(select_model(trial.server["models"], 0).flat(), select_model(before, 0).flat())


def test_ifca_averages_over_cluster_members():
    def make_upload(value, cluster):
        return {"model": Tensors(x=torch.tensor(float(value))), "cluster": torch.tensor(cluster)}

    server = {"models": Tensors(x=torch.tensor([7.0, 8.0, 9.0]))}
    uploads = Uploads([0, 1, 2], [1, 3, 6], [make_upload(1, 2), make_upload(5, 2), make_upload(4, 0)])
    assert IFCA(clusters=3).aggregate(server, uploads)["models"]["x"].tolist() == [4, 8, 4]


def test_ifca_evaluation_chooses_model_of_lowest_loss(make_opposed):
    """The chosen model classifies the client's data correctly. The other model would be wrong on all samples."""
    trial = make_opposed(IFCA(), [1, -1]).run(10)
    for outcome in trial.train(tests=("local",), phase="receive"):
        score = outcome.scores["local"]
        assert score.correct >= 0.8 * score.total
    assert trial.algorithm.global_model(trial.server) is None
