import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedpipe.algorithms.base import Batch
from fedpipe.algorithms.pfps_lwc import PFPSLWC
from fedpipe.models.base import Net, Network
from fedpipe.models.mlp import MLP
from fedpipe.tensors import Tensors

f64 = torch.float64
OFF = {"penalty": 0.0, "recall_epochs": 0}


class Recalling(PFPSLWC):
    """The recall alone."""

    def work(self):
        return super().work()[:1]


def bound(algorithm, make_trial, body, head):
    """The algorithm on a network of these modules, for one input."""
    trial = make_trial("fedavg")
    return algorithm.bind(Net(lambda: Network(body, head), f64), trial.algorithm.federation)


def tensors(**values):
    return Tensors({name.replace("_", "."): torch.tensor(value, dtype=f64) for name, value in values.items()})


def features_loss(trial, teacher, student, client):
    x = trial.clients.gather(trial.clients.train[client])[0]
    return float((1 - cosine_similarity(trial.net.features(teacher, x), trial.net.features(student, x))).mean())


def test_the_recall_measures_the_angle_of_features(make_trial):
    """Of (1, 0) and (1, 1), whatever their lengths."""
    algorithm = bound(PFPSLWC(), make_trial, nn.Linear(1, 2, bias=False), nn.Linear(2, 2))
    batch = Batch(torch.ones(3, 1, dtype=f64), torch.zeros(3, dtype=torch.long))
    for scale in (1.0, 7.0):
        client = {
            "extractor": tensors(body_weight=[[1.0], [0.0]]),
            "model": tensors(body_weight=[[scale], [scale]]),
        }
        assert float(algorithm.recall(client, batch)) == pytest.approx(0.292893, abs=1e-6)


def test_the_penalty_is_the_joint_norm_of_the_head(make_trial):
    """Weight 3 and bias 4: a penalty of 5 with gradient (0.6, 0.8), for any strength lambda."""
    algorithm = bound(PFPSLWC(penalty=0.1), make_trial, nn.Identity(), nn.Linear(1, 1))
    weight, bias = (torch.tensor(value, dtype=f64, requires_grad=True) for value in ([[3.0]], [4.0]))
    client = {"model": Tensors({"head.weight": weight, "head.bias": bias})}
    batch = Batch(torch.ones(2, 1, dtype=f64), torch.zeros(2, dtype=torch.long))
    loss = algorithm.loss(client, batch)  # with one class, the risk is 0
    assert loss.item() == pytest.approx(0.5, abs=1e-15)
    gradient = torch.autograd.grad(loss, (weight, bias))
    assert [each.item() for each in gradient] == pytest.approx([0.06, 0.08], abs=1e-15)


def test_the_squared_penalty(make_trial):
    algorithm = bound(PFPSLWC(penalty=0.1, squared=True), make_trial, nn.Identity(), nn.Linear(1, 1))
    client = {"model": tensors(head_weight=[[3.0]], head_bias=[4.0])}
    batch = Batch(torch.ones(2, 1, dtype=f64), torch.zeros(2, dtype=torch.long))
    assert float(algorithm.loss(client, batch)) == pytest.approx(2.5, abs=1e-14)


def test_a_head_of_zeros_has_a_finite_gradient(make_trial):
    algorithm = bound(PFPSLWC(), make_trial, nn.Identity(), nn.Linear(1, 1))
    weight, bias = (torch.zeros(shape, dtype=f64, requires_grad=True) for shape in ((1, 1), (1,)))
    batch = Batch(torch.ones(2, 1, dtype=f64), torch.zeros(2, dtype=torch.long))
    loss = algorithm.loss({"model": Tensors({"head.weight": weight, "head.bias": bias})}, batch)
    assert [each.item() for each in torch.autograd.grad(loss, (weight, bias))] == [0, 0]


@pytest.mark.parametrize("width", [None, 3])
def test_features_of_zero_make_no_nan(make_trial, width):
    """Every ReLU of the extractor is off."""

    def dead(index):
        model = trial.net.fresh(index)
        return model | {"body.1.bias": torch.full_like(model["body.1.bias"], -1e3)}

    trial = make_trial(PFPSLWC())
    trial = make_trial(PFPSLWC(), width=width, fresh=dead, participation=1.0).run(2)
    for outcome in trial.outcomes:
        assert all(value.isfinite().all() for value in (outcome.upload["body"] | outcome.keep["head"]).values())


def test_with_both_parts_off_it_is_fedper(make_trial, assert_same):
    """Extractors averaged by count, heads personal: written out with PyTorch's own optimiser."""
    trial = make_trial(PFPSLWC(**OFF), momentum=0.9)
    body = dict(trial.server["body"])
    heads = {client: dict(trial.first["head"]) for client in range(len(trial.clients))}
    for number in (1, 2, 3):
        sent = {}
        for client in trial.participants(number):
            module = MLP(hidden=(6,)).build((5,), 4).double()
            module.load_state_dict(body | heads[client])
            rule = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
            for epoch in (0, 1):
                order = trial.clients.order(client, number, "batches", epoch)
                for first in range(0, len(order), 4):
                    x, y = trial.clients.gather(order[first : first + 4])
                    rule.zero_grad()
                    cross_entropy(module(x), y).backward()
                    rule.step()
            trained = {name: value.detach() for name, value in module.named_parameters()}
            sent[client] = {name: trained[name] for name in body}
            heads[client] = {name: trained[name] for name in heads[client]}
        total = sum(trial.clients.sizes[client] for client in sent)
        body = {
            name: sum(each[name] * (trial.clients.sizes[client] / total) for client, each in sent.items())
            for name in body
        }
    trial.run(3)
    assert_same(dict(trial.server["body"]), body, within=1e-12)
    for client, head in heads.items():
        assert_same(dict(trial.kept[client]["head"]), head, within=1e-12)


def test_nobody_recalls_in_the_first_round(make_trial, assert_same):
    recalling, forgetful = (make_trial(PFPSLWC(recall_epochs=epochs)).run() for epochs in (3, 0))
    assert_same(recalling.server, forgetful.server)
    assert_same(recalling.kept, forgetful.kept)


@pytest.mark.parametrize("width", [None, 3])
def test_whoever_was_there_recalls_and_newcomers_do_not(make_trial, assert_same, width):
    recalling, forgetful = (
        make_trial(PFPSLWC(recall_epochs=epochs), width=width).run(1, ids=[0, 1, 5]).train([1, 4, 5])
        for epochs in (2, 0)
    )
    same = [
        torch.equal(ours.upload["body"].flat(), theirs.upload["body"].flat())
        for ours, theirs in zip(recalling, forgetful, strict=True)
    ]
    assert same == [False, True, False]


def test_a_client_alone_has_nothing_to_recall(make_clients, make_trial, assert_same):
    """The downloaded extractor is the one it uploaded."""
    clients = make_clients(sizes=[15], labels=lambda client: range(4))
    recalling, forgetful = (
        make_trial(PFPSLWC(recall_epochs=epochs), clients=clients, participation=1.0).run(3) for epochs in (3, 0)
    )
    assert_same(recalling.server, forgetful.server, within=1e-12)


def test_the_recall_brings_the_extractor_back_and_leaves_the_head(make_trial, assert_same):
    """Its mechanism acts: the features point nearer to those of the last uploaded extractor, for every client."""
    trial = make_trial(PFPSLWC(), participation=1.0, local_epochs=5).run(2)
    settings = {"participation": 1.0, "learning_rate": 0.02, "weight_decay": 0.01}  # which would shrink the head
    alone = make_trial(Recalling(recall_epochs=5), **settings)
    alone.server, alone.kept, alone.rounds = trial.server, trial.kept, trial.rounds
    for outcome in alone.train():
        kept = trial.kept[outcome.client]
        before = features_loss(trial, kept["extractor"], trial.server["body"], outcome.client)
        after = features_loss(trial, kept["extractor"], outcome.upload["body"], outcome.client)
        assert after < 0.98 * before
        assert_same(outcome.keep["head"], kept["head"])


def test_the_penalty_shrinks_heads(make_trial):
    """Its mechanism acts: each client's head is smaller, the more so the stronger it is."""
    norms = []
    for penalty in (0.0, 0.1, 0.5):
        trial = make_trial(PFPSLWC(penalty=penalty, recall_epochs=0), participation=1.0).run(3)
        norms.append([float(state["head"].norm()) for state in trial.kept.values()])
    assert all(none > weak > strong for none, weak, strong in zip(*norms, strict=True))


def test_clients_keep_the_extractor_that_they_uploaded(make_trial, assert_same):
    trial = make_trial(PFPSLWC()).run(2)
    for outcome in trial.outcomes:
        assert_same(trial.kept[outcome.client]["extractor"], outcome.upload["body"])
        assert float(trial.kept[outcome.client]["seen"]) == 1
    assert trial.algorithm.deploy(trial.server) is None


def test_the_received_model_is_the_shared_extractor_with_the_own_head(make_trial, assert_same):
    trial = make_trial(PFPSLWC(), participation=1.0).run(2)
    assert not trial.algorithm.prepare(), "it is measured before the recall, as FedPer is"
    for client in (0, 3):
        wanted = trial.server["body"] | trial.kept[client]["head"]
        assert_same(trial.begin(client)["model"], wanted)


def test_the_old_extractor_teaches_in_evaluation_mode(make_trial):
    """Its own running statistics; the student is normalised by the batch's."""
    trial = make_trial(PFPSLWC(), "norm", participation=1.0).run()
    client = trial.begin(5)
    x, y = trial.clients.gather(trial.clients.train[5])
    with trial.net.mode.of(training=True):
        found = trial.algorithm.recall(client, Batch(x, y))
        student = trial.net.features(client["model"], x)
    teacher = trial.net.features(client["extractor"], x)
    assert float(found) == pytest.approx(float((1 - cosine_similarity(teacher, student)).mean()), abs=1e-15)
