import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedrod import FedRoD
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches, run_fedavg

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized="the balanced softmax depends on the class counts",
)


def test_fedrod_global_model_with_balanced_classes_equals_fedavg(make_trial, make_clients, assert_same):
    clients = make_clients(sizes=[8, 12, 16], labels=lambda client: range(4))
    rod, plain = (make_trial(method, clients=clients, momentum=0.9).run(3) for method in (FedRoD(), FedAvg()))
    assert_same(rod.server, plain.server, tolerance=1e-13)


def test_fedrod_balanced_loss_weights_classes_by_counts(make_trial):
    """By definition, the probabilities are n_c exp(g_c) / sum."""
    trial = make_trial(FedRoD())
    client, (x, y) = trial.start(3), trial.clients.gather_samples(trial.clients.train[3])
    counts = torch.bincount(y, minlength=4)
    g = trial.net(client["model"], x)
    weighted = counts * g.exp()
    balanced = -(weighted[range(len(y)), y] / weighted.sum(-1)).log().mean()
    personal = cross_entropy(2 * g, y)  # the personal head starts as a copy
    found = trial.algorithm.loss(client, Batch(x, y))
    assert float(found) == pytest.approx(float(balanced + personal), abs=1e-12)


def test_fedrod_loss_ignores_padding_with_missing_class(make_trial):
    trial = make_trial(FedRoD())
    client, (x, y) = trial.start(4), trial.clients.gather_samples(trial.clients.train[4])
    missing = next(label for label in range(4) if label not in y)
    padded = Batch(
        torch.cat([x, x[:1]]), torch.cat([y, y.new_tensor([missing])]), torch.ones(len(y) + 1, dtype=x.dtype)
    )
    padded.mask[-1] = 0
    assert float(trial.algorithm.loss(client, padded)) == pytest.approx(
        float(trial.algorithm.loss(client, Batch(x, y)))
    )


def test_fedrod_three_rounds_match_pfllib(make_trial, assert_same):
    """PFLlib's clientROD has one optimizer for the generic model and one for the personal head."""
    trial = make_trial(FedRoD(), learning_rate=0.1)
    net = trial.net
    heads = dict.fromkeys(range(8), trial.server["model"].only(net.head_names))

    def train_client(client, number, server):
        counts = torch.bincount(trial.clients.gather_samples(trial.clients.train[client])[1], minlength=4).double()
        model, head = (part.map(lambda value: value.clone().requires_grad_()) for part in (server, heads[client]))
        optimizer, opt_head = (torch.optim.SGD(part.values(), lr=0.1) for part in (model, head))
        for x, y in list_batches(trial, client, number):
            rep = net.features(model, x)
            out_g = net.classify(model, rep)
            optimizer.zero_grad()
            cross_entropy(out_g + counts.log(), y).backward()
            optimizer.step()
            out_p = net.classify(head, rep.detach())
            opt_head.zero_grad()
            cross_entropy(out_g.detach() + out_p, y).backward()
            opt_head.step()
        heads[client] = head.map(torch.detach)
        return model.map(torch.detach)

    expected = run_fedavg(trial, 3, train_client)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)
    for client, state in trial.client_states.items():
        assert_same(state["head"], heads[client], tolerance=1e-12)
