import math

import pytest
import torch
from torch import nn

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedproto import FedProto
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Network
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.classes * n.features + n.classes, n.classes * n.features + n.classes))],
    centralized={"penalty": 0.0},
    exceptions={"equal_uploads": "prototypes are uploaded, no models"},
)

f64 = torch.float64


def make_vector(*values):
    return torch.tensor(values, dtype=f64)


def bind_algorithm(algorithm, make_trial):
    """Bind the algorithm to a network whose features are its two inputs and whose logits are zero."""
    net = FunctionalNetwork(lambda: Network(nn.Identity(), nn.Linear(2, 3)), f64)
    return algorithm.bind(net, make_trial("fedavg").algorithm.federation)


def make_zero_head():
    return Tensors({"head.weight": torch.zeros(3, 2, dtype=f64), "head.bias": torch.zeros(3, dtype=f64)})


def compute_features(trial, model, client):
    """Compute the features of a client's training samples. Return them and the classes."""
    x, y = trial.clients.gather_samples(trial.clients.train[client])
    return trial.net.features(model, x), y


def compute_distance(trial, prototypes, outcome):
    """Compute the mean squared distance of a trained client's features from the prototypes of their classes."""
    z, y = compute_features(trial, outcome.kept_state["model"], outcome.client)
    return float((z - prototypes[y]).square().mean())


@pytest.mark.parametrize(("weights", "wanted"), [("uniform", [2, 2]), ("count", [2.5, 2.5])])
def test_fedproto_averages_prototypes_over_class_owners(weights, wanted):
    """The owners have 1 and 3 samples of the class. The third client has none and no effect."""

    def make_upload(value, count):
        return {"prototypes": torch.full((1, 2), float(value)), "counts": torch.tensor([float(count)])}

    server = {"prototypes": torch.zeros(1, 2), "known": torch.zeros(1)}
    uploads = Uploads([0, 1, 2], [1, 3, 6], [make_upload(1, 1), make_upload(3, 3), make_upload(0, 0)])
    combined = FedProto(prototype_weights=weights).aggregate(server, uploads)
    assert combined["prototypes"].tolist() == [wanted]
    assert combined["known"].tolist() == [1]


def test_fedproto_penalty_is_mean_squared_distance(make_trial):
    """Features (0, 0) and the prototype (2, 0) give 2. A class without a prototype adds nothing."""
    algorithm = bind_algorithm(FedProto(penalty=0.5), make_trial)
    client = {
        "model": make_zero_head(),
        "prototypes": torch.stack([make_vector(2, 0), make_vector(9, 9), make_vector(0, 0)]),
        "known": make_vector(1, 0, 0),
    }
    x = torch.zeros(4, 2, dtype=f64)
    for labels, pull in (([0, 0, 0, 0], 2.0), ([0, 1, 1, 1], 0.5), ([1, 1, 2, 2], 0.0)):
        loss = algorithm.loss(client, Batch(x, torch.tensor(labels)))
        assert float(loss) == pytest.approx(math.log(3) + 0.5 * pull, abs=1e-14)


def test_fedproto_logits_are_negative_prototype_distances(make_trial):
    """The distances are 5 and 0. A class without a prototype has logit -inf, although its row of zeros is nearer."""
    algorithm = bind_algorithm(FedProto(), make_trial)
    prototypes = torch.stack([make_vector(3, 4), make_vector(0, 0), make_vector(0, 0.1)])
    client = {"model": make_zero_head(), "prototypes": prototypes, "known": make_vector(1, 0, 1)}
    scores = algorithm.prototype_logits(client, torch.stack([make_vector(0, 0), make_vector(3, 4)]))
    assert scores[0].tolist() == [-5, -math.inf, -0.1]
    assert scores[1].tolist() == pytest.approx([0, -math.inf, -math.hypot(3, 3.9)])


def test_fedproto_prototypes_are_mean_features_of_trained_model(make_trial, assert_same):
    trial = make_trial(FedProto(), participation=1.0).run(2)
    for outcome in trial.outcomes:
        z, y = compute_features(trial, outcome.kept_state["model"], outcome.client)
        for label in range(4):
            own = z[y == label].mean(0) if (y == label).any() else torch.zeros(6, dtype=f64)
            assert_same(outcome.upload["prototypes"][label], own, tolerance=1e-13)
        assert outcome.upload["counts"].tolist() == torch.bincount(y, minlength=4).tolist()


def test_fedproto_only_class_owner_sets_prototype(make_trial, assert_same):
    """Client 5 owns the classes 1 and 2, and client 0 owns class 0 with one sample. No participant has class 3."""
    trial = make_trial(FedProto()).run(1, ids=[0, 5])
    single, pair = trial.outcomes
    assert_same(trial.server["prototypes"][0], single.upload["prototypes"][0])
    assert_same(trial.server["prototypes"][1:3], pair.upload["prototypes"][1:3])
    assert trial.server["known"].tolist() == [1, 1, 1, 0]
    assert trial.server["prototypes"][3].tolist() == [0] * 6


def test_fedproto_class_without_owner_keeps_prototype(make_trial, assert_same):
    trial = make_trial(FedProto()).run(1, ids=[5])
    before = trial.server["prototypes"]
    trial.run(1, ids=[0])
    assert_same(trial.server["prototypes"][1:3], before[1:3])
    assert trial.server["known"].tolist() == [1, 1, 1, 0]


def test_fedproto_equal_uploads_become_prototypes(make_trial, assert_same):
    trial = make_trial(FedProto(), participation=1.0).run()
    sent = next(outcome.upload for outcome in trial.outcomes if outcome.client == 3)  # client 3 owns all classes
    for weights in ("uniform", "count"):
        uploads = Uploads([1, 2, 3], [1, 2, 3], [sent] * 3)
        combined = FedProto(prototype_weights=weights).aggregate(trial.server, uploads)
        assert_same(combined["prototypes"], sent["prototypes"], tolerance=1e-15)


def test_fedproto_first_round_ignores_penalty(make_trial, assert_same):
    pulled, free = (make_trial(FedProto(penalty=penalty), participation=1.0).run() for penalty in (5.0, 0.0))
    assert_same(pulled.client_states, free.client_states)
    assert not torch.equal(pulled.run().client_states[7]["model"].flat(), free.run().client_states[7]["model"].flat())


def test_fedproto_moves_features_to_prototypes(make_trial):
    """A larger penalty moves features nearer to the prototypes, for every client with more than a few samples."""
    found = []
    for penalty in (0.0, 1.0, 4.0):
        trial = make_trial(FedProto(penalty=penalty), participation=1.0).run()
        prototypes = trial.server["prototypes"]
        found.append(
            [compute_distance(trial, prototypes, outcome) for outcome in trial.train() if outcome.client in (3, 5, 7)]
        )
    assert all(none > weak > strong for none, weak, strong in zip(*found, strict=True))


@pytest.mark.parametrize("ids", [[5], range(8)])
def test_fedproto_protocol_predicts_class_of_nearest_prototype(make_trial, assert_same, ids):
    """Loop and stack agree. With client 5 as the only participant, two classes have no prototype.

    A test sample of a class without a prototype is never correct, and its loss is infinite.
    """
    loop, stack = (make_trial(FedProto(), width=width).run(2, ids=ids) for width in (None, 3))
    scores = [
        [
            (outcome.scores["local"], outcome.scores["global"])
            for outcome in trial.train(range(8), ("local", "global"), "prototype")
        ]
        for trial in (loop, stack)
    ]
    for ours, theirs in zip(*scores, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one[:2] == other[:2]
            assert one.loss == pytest.approx(other.loss, rel=1e-12)
    known = [label for label in range(4) if loop.server["known"][label]]
    x, y = loop.clients.gather_samples(loop.clients.global_test)
    for client, (_, on_global) in enumerate(scores[0]):
        z = loop.net.features(loop.client_states[client]["model"], x)
        apart = torch.stack([(z - loop.server["prototypes"][label]).norm(dim=-1) for label in known])
        guess = torch.tensor(known)[apart.argmin(0)]
        assert on_global.correct == int((guess == y).sum())
    assert loop.algorithm.global_model(loop.server) is None
