import math

import pytest
import torch
from torch import nn

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.cwfedavg import CwFedAvg, approximate_class_distribution
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.settings.federation import Federation
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[
        ({}, lambda n: (n.all, n.all)),
        ({"distribution": "empirical"}, lambda n: (n.all, n.all + n.classes)),
    ],
    centralized={"wdr": 0.0},
)

f64 = torch.float64


def bind_algorithm(algorithm, clients, classes, width=3):
    """Bind an algorithm to a network with a linear body and a head, for this number of clients."""
    net = FunctionalNetwork(lambda: Network(nn.Linear(2, width), nn.Linear(width, classes)), f64)
    return algorithm.bind(net, Federation(clients=clients, dtype="float64"))


def make_models(algorithm, count):
    return [algorithm.net.make_initial_model(index) for index in range(count)]


def aggregate_uploads(algorithm, uploads):
    """Return the server state after the uploads, and the personal model of every client."""
    server = algorithm.init(algorithm.net.make_initial_model)
    state = algorithm.aggregate(server, uploads)
    base, own = algorithm.send(state, range(algorithm.federation.clients))
    personal = [
        base["base"] | own["upper"].map(lambda value, row=row: value[row])
        for row in range(algorithm.federation.clients)
    ]
    return state, [model.only(algorithm.net.names) for model in personal]


def make_counted_uploads(trained, counts):
    counts = torch.tensor(counts, dtype=f64)
    states = [{"model": model, "counts": row} for model, row in zip(trained, counts, strict=True)]
    return Uploads(range(len(states)), counts.sum(1).tolist(), states)


def make_uploads(trained, weights):
    return Uploads(range(len(trained)), weights, [{"model": model} for model in trained])


def test_cwfedavg_models_of_two_clients_match_exact_values():
    """The uploads are models of zeros and ones, from clients with class counts (9, 1) and (1, 9)."""
    algorithm = bind_algorithm(CwFedAvg(distribution="empirical", class_wise="all"), 2, 2)
    zero = algorithm.net.make_initial_model(0).zeros()
    state, personal = aggregate_uploads(algorithm, make_counted_uploads([zero, zero.ones()], [[9, 1], [1, 9]]))
    for value in state["classes"].values():
        assert torch.allclose(value[0], torch.full_like(value[0], 0.1), rtol=1e-14)
        assert torch.allclose(value[1], torch.full_like(value[1], 0.9), rtol=1e-14)
    assert personal[0].flat().tolist() == pytest.approx([0.18] * len(personal[0].flat()), abs=1e-14)
    assert personal[1].flat().tolist() == pytest.approx([0.82] * len(personal[1].flat()), abs=1e-14)


def test_cwfedavg_aggregation_with_equal_distributions_equals_fedavg(assert_same):
    algorithm = bind_algorithm(CwFedAvg(distribution="empirical", class_wise="all"), 3, 4)
    trained = make_models(algorithm, 3)
    uploads = make_counted_uploads(trained, [[1, 2, 3, 4], [2, 4, 6, 8], [5, 10, 15, 20]])
    state, personal = aggregate_uploads(algorithm, uploads)
    for index in range(4):
        assert_same(
            state["classes"].map(lambda value, index=index: value[index]), uploads.mean("model"), tolerance=1e-14
        )
    for model in personal:
        assert_same(model, uploads.mean("model"), tolerance=1e-14)


def test_cwfedavg_training_with_equal_distributions_equals_fedavg(make_clients, make_trial, assert_same):
    clients = make_clients(sizes=(4, 8, 12, 20), labels=lambda client: range(4))
    settings = {"clients": clients, "participation": 0.5}
    class_wise = make_trial(CwFedAvg(wdr=0.0, distribution="empirical"), **settings).run(3)
    plain = make_trial(FedAvg(), **settings).run(3)
    for client in plain.select_participants(3):
        assert_same(class_wise.start(client)["model"], plain.server["model"], tolerance=1e-12)


@pytest.mark.parametrize("width", [None, 3])
def test_cwfedavg_without_class_wise_layers_equals_fedavg_bit_for_bit(make_trial, assert_same, width):
    class_wise = make_trial(CwFedAvg(wdr=0.0, class_wise=0), width=width).run(3)
    plain = make_trial(FedAvg(), width=width).run(3)
    assert_same(class_wise.server["base"], plain.server["model"])
    assert_same(class_wise.start(2)["model"], plain.server["model"])


def test_cwfedavg_with_one_class_per_client_averages_class_owners(assert_same):
    algorithm = bind_algorithm(CwFedAvg(distribution="empirical"), 4, 3)
    trained = make_models(algorithm, 4)
    uploads = make_counted_uploads(trained, [[2, 0, 0], [6, 0, 0], [0, 5, 0], [0, 0, 1]])
    _, personal = aggregate_uploads(algorithm, uploads)
    owners = trained[0] * 0.25 + trained[1] * 0.75
    head, body = algorithm.net.head_names, algorithm.net.body_names
    for client, wanted in ((0, owners), (1, owners), (2, trained[2]), (3, trained[3])):
        assert_same(personal[client].only(head), wanted.only(head), tolerance=1e-14)
        assert_same(personal[client].only(body), uploads.mean("model").only(body), tolerance=1e-14)


def test_cwfedavg_with_one_class_equals_fedavg(assert_same):
    algorithm = bind_algorithm(CwFedAvg(class_wise="all"), 3, 1)
    uploads = make_uploads(make_models(algorithm, 3), [1, 4, 5])
    for model in aggregate_uploads(algorithm, uploads)[1]:
        assert_same(model, uploads.mean("model"), tolerance=1e-14)


@pytest.mark.parametrize("distribution", ["approximate", "empirical"])
@pytest.mark.parametrize("class_wise", ["all", "output", 2])
def test_cwfedavg_weighted_mean_of_models_equals_fedavg(assert_same, distribution, class_wise):
    algorithm = bind_algorithm(CwFedAvg(distribution=distribution, class_wise=class_wise), 3, 4)
    uploads = make_counted_uploads(make_models(algorithm, 3), [[7, 1, 0, 2], [0, 3, 1, 0], [2, 2, 2, 9]])
    _, personal = aggregate_uploads(algorithm, uploads)
    total = sum((weight * model for weight, model in zip(uploads.weights, personal, strict=True)), 0.0 * personal[0])
    assert_same(total, uploads.mean("model"), tolerance=1e-14)


def test_cwfedavg_models_equal_mixing_matrix_times_uploads(assert_same):
    """Compute M = P Q^T directly, without class models. The rows of M sum to 1."""
    algorithm = bind_algorithm(CwFedAvg(class_wise="all"), 3, 4)
    trained = make_models(algorithm, 3)
    uploads = make_uploads(trained, [5, 1, 14])
    p = torch.stack([model["head.weight"].norm(dim=1) / model["head.weight"].norm(dim=1).sum() for model in trained])
    q = torch.tensor(uploads.weights, dtype=f64).unsqueeze(1) * p
    mixing = p @ (q / q.sum(0)).T
    assert torch.allclose(mixing.sum(1), torch.ones(3, dtype=f64))
    for row, model in zip(mixing, aggregate_uploads(algorithm, uploads)[1], strict=True):
        wanted = trained[0] * row[0] + trained[1] * row[1] + trained[2] * row[2]
        assert_same(model, wanted, tolerance=1e-14)


def test_cwfedavg_equal_uploads_are_fixed_point(assert_same):
    algorithm = bind_algorithm(CwFedAvg(class_wise="all"), 3, 4)
    (model,) = make_models(algorithm, 1)
    for personal in aggregate_uploads(algorithm, make_uploads([model] * 3, [5, 1, 14]))[1]:
        assert_same(personal, model, tolerance=1e-14)


def test_cwfedavg_ignores_class_without_owner():
    """No participant owns class 2. The model of the absent client 2 uses the rest of its distribution."""
    algorithm = bind_algorithm(CwFedAvg(distribution="empirical"), 3, 3)
    trained = make_models(algorithm, 2)
    server = algorithm.init(algorithm.net.make_initial_model)
    server["distributions"][2] = torch.tensor([0.0, 0.2, 0.8], dtype=f64)
    state = algorithm.aggregate(server, make_counted_uploads(trained, [[3, 1, 0], [0, 4, 0]]))
    assert state["owned"].tolist() == [1, 1, 0]
    own = algorithm.send(state, [0, 1, 2])[1]["upper"]
    assert own.flat().isfinite().all()
    second = state["classes"]["head.weight"][1]
    assert torch.allclose(second, 0.2 * trained[0]["head.weight"] + 0.8 * trained[1]["head.weight"], rtol=1e-14)
    assert torch.allclose(own["head.weight"][2], second, rtol=1e-14)


def test_cwfedavg_training_with_unowned_class_is_finite(make_clients, make_trial):
    clients = make_clients(labels=lambda client: [0, client % 3])
    trial = make_trial(CwFedAvg(distribution="empirical"), clients=clients).run(3)
    assert float(trial.server["owned"][3]) == 0
    assert all(trial.start(client)["model"].flat().isfinite().all() for client in range(8))


def test_cwfedavg_client_of_unowned_class_gets_nonzero_model(make_clients, make_trial):
    """Each client owns one class. Class 1 has an owner in the first round and none in the second."""
    clients = make_clients(sizes=(6, 9, 7), labels=lambda client: [client])
    trial = make_trial(CwFedAvg(distribution="empirical"), clients=clients).run(1, ids=[0, 1]).run(1, ids=[0, 2])
    assert trial.server["owned"].tolist() == [1, 0, 1, 0]
    for client in (0, 1, 2):
        assert trial.start(client)["model"]["head.weight"].norm() > 0.1


def test_cwfedavg_absent_clients_keep_their_distribution(make_trial):
    trial = make_trial(CwFedAvg())
    assert torch.equal(trial.server["distributions"], torch.full((8, 4), 0.25, dtype=f64))
    trial.run(1, ids=[0, 1])
    heads = {
        outcome.client: approximate_class_distribution(outcome.upload["model"]["head.weight"])
        for outcome in trial.outcomes
    }
    trial.run(1, ids=[4, 5])
    assert torch.equal(trial.server["distributions"][0], heads[0])
    assert torch.equal(trial.server["distributions"][1], heads[1])
    assert torch.equal(trial.server["distributions"][7], torch.full((4,), 0.25, dtype=f64))


def test_cwfedavg_initial_models_are_equal(make_trial, assert_same):
    trial = make_trial(CwFedAvg(class_wise="all"))
    for client in (0, 5):
        assert_same(trial.start(client)["model"], trial.initial_model(0), tolerance=1e-15)


@pytest.mark.parametrize(("class_wise", "count"), [("output", 2), (1, 2), (2, 4), ("all", 8)])
def test_cwfedavg_counts_class_wise_layers_from_output(make_trial, class_wise, count):
    trial = make_trial(CwFedAvg(class_wise=class_wise), "cnn")
    assert tuple(trial.server["classes"]) == trial.net.names[-count:]
    assert tuple(trial.server["base"]) == trial.net.names[:-count]


def test_cwfedavg_other_layers_equal_fedavg(make_trial, assert_same):
    """In the first round all clients start with equal models. Without WDR, they train as in FedAvg."""
    class_wise, plain = (make_trial(algorithm).run() for algorithm in (CwFedAvg(wdr=0.0), FedAvg()))
    body = plain.net.body_names
    assert_same(class_wise.server["base"].only(body), plain.server["model"].only(body), tolerance=1e-14)


# -- the regularizer -------------------------------------------------------------------------------------------------


def compute_wdr(algorithm, head, p):
    """Compute the loss without the risk."""

    class RegularizerOnly(type(algorithm)):
        def risk(self, client, batch):
            return torch.zeros((), dtype=f64)

    alone = RegularizerOnly(wdr=algorithm.wdr, wdr_factor=algorithm.wdr_factor)
    return alone.loss({"model": Tensors({"head.weight": head}), "p": p}, Batch(torch.zeros(1), torch.zeros(1)))


def test_wdr_of_equal_rows_matches_exact_values():
    head, p = torch.ones(2, 3, dtype=f64), torch.tensor([1.0, 0.0], dtype=f64)
    assert float(compute_wdr(CwFedAvg(wdr=1.0, wdr_factor=1.0), head, p)) == pytest.approx(math.sqrt(0.5), abs=1e-15)
    assert float(compute_wdr(CwFedAvg(wdr=10.0), head, p)) == pytest.approx(5 * math.sqrt(0.5), abs=1e-14)


def test_approximate_class_distribution_ignores_head_scale():
    head = torch.randn(4, 5, dtype=f64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(approximate_class_distribution(17 * head), approximate_class_distribution(head), rtol=1e-14)
    assert float(approximate_class_distribution(head).sum()) == pytest.approx(1, abs=1e-15)


def test_wdr_gradient_matches_finite_differences_and_formula():
    head = torch.randn(4, 5, dtype=f64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    p = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=f64)
    algorithm = CwFedAvg(wdr=3.0, wdr_factor=1.0)
    assert torch.autograd.gradcheck(lambda value: compute_wdr(algorithm, value, p), head)
    (found,) = torch.autograd.grad(compute_wdr(algorithm, head, p), head)
    with torch.no_grad():
        norms = head.norm(dim=1)
        share = norms / norms.sum()
        gap = share - p
        by_norm = (gap - (share * gap).sum()) / norms.sum() / gap.norm()
        assert torch.allclose(found, 3 * by_norm.unsqueeze(1) * head / norms.unsqueeze(1), rtol=1e-12)
        assert float((by_norm * norms).sum()) == pytest.approx(0, abs=1e-15)


def test_wdr_of_matching_head_has_finite_gradient():
    head = torch.ones(2, 3, dtype=f64, requires_grad=True)
    loss = compute_wdr(CwFedAvg(), head, torch.tensor([0.5, 0.5], dtype=f64))
    (found,) = torch.autograd.grad(loss, head)
    assert loss.item() == 0
    assert found.isfinite().all()


def test_wdr_of_zero_head_is_finite():
    head = torch.zeros(3, 2, dtype=f64, requires_grad=True)
    loss = compute_wdr(CwFedAvg(), head, torch.tensor([0.5, 0.5, 0.0], dtype=f64))
    (found,) = torch.autograd.grad(loss, head)
    assert loss.isfinite()
    assert found.isfinite().all()


@pytest.mark.parametrize("width", [None, 3])
def test_cwfedavg_clients_use_their_empirical_distribution(make_trial, width):
    trial = make_trial(CwFedAvg(distribution="empirical"), width=width)
    assert trial.start(0)["p"].tolist() == [1, 0, 0, 0]
    assert trial.start(1)["p"].tolist() == pytest.approx([0, 0.6, 0.4, 0])
    assert trial.train([1])[0].upload["counts"].tolist() == [0, 3, 2, 0]


def test_wdr_moves_heads_to_true_distributions(make_trial):
    """With WDR, the norms of the uploaded rows match the class distribution of each client better."""
    gaps = []
    for strength in (0.0, 10.0):
        trial = make_trial(CwFedAvg(wdr=strength), participation=1.0).run(5)
        true = trial.clients.class_counts / trial.clients.class_counts.sum(1, keepdim=True)
        gaps.append(float((trial.server["distributions"] - true).norm(dim=1).mean()))
    assert gaps[1] < 0.6 * gaps[0]
