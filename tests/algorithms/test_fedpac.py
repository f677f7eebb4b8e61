import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedpac import FedPAC, compute_head_weights, minimize_on_simplex
from fedpipe.algorithms.fedrep import FedRep
from fedpipe.algorithms.model_stack import select_model
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import average_models, copy_parameters, list_batches, load_mlp, take_steps

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all + n.classes * (n.features + 1), n.all + n.classes * (2 * n.features + 1) + 1))],
    centralized="head and body train one after the other",
)

f64 = torch.float64


def make_matrix(*rows):
    return torch.tensor(rows, dtype=f64)


@pytest.mark.parametrize(
    ("matrix", "alpha"),
    [
        (make_matrix([1, 0], [0, 3]), [0.75, 0.25]),
        (make_matrix([1, 2], [2, 5]), [1, 0]),
        (make_matrix([0, 0], [0, 3]), [1, 0]),
        (make_matrix([0, 0], [0, 0]), [0.5, 0.5]),
        (make_matrix([2, -1], [-1, 2]), [0.5, 0.5]),
    ],
)
def test_minimize_on_simplex_matches_exact_values(matrix, alpha):
    assert minimize_on_simplex(matrix).tolist() == pytest.approx(alpha, abs=1e-9)


def solve_exactly(matrix):
    """Find the best minimizer on all faces of the simplex.

    The matrix needs a ridge because V is 0 for a client with one sample.
    """
    best, size = None, len(matrix)
    matrix = matrix + 1e-12 * matrix.trace() * torch.eye(size, dtype=f64)
    for count in range(1, size + 1):
        for face in map(list, itertools.combinations(range(size), count)):
            beta = torch.linalg.solve(matrix[face][:, face], torch.ones(count, dtype=f64))
            alpha = torch.zeros(size, dtype=f64)
            alpha[face] = beta / beta.sum()
            if alpha.min() >= 0 and (best is None or alpha @ matrix @ alpha < best @ matrix @ best):
                best = alpha
    return best


def extract_statistics(module, x, y):
    """Compute the statistics as in the authors' code."""
    features, classes = module.body(x).detach(), range(4)
    variance, h = 0.0, torch.zeros(4, features.shape[1], dtype=f64)
    for k in classes:
        feat_k = features[y == k]
        if len(feat_k):
            py, mu = len(feat_k) / len(y), feat_k.mean(0)
            h[k] = py * mu
            variance += py * torch.trace(feat_k.T @ feat_k / len(feat_k)) - (py**2 * mu * mu).sum()
    return float(variance) / len(y), h


def test_head_weights_match_authors_code():
    """The authors' matrix sums traces of outer products by class."""
    random = torch.Generator().manual_seed(1)
    phi, v = torch.randn(5, 3, 4, generator=random, dtype=f64), torch.rand(5, generator=random, dtype=f64)
    rows = []
    for i in range(5):
        dist = torch.zeros(5, 5, dtype=f64)
        for j1, j2 in itertools.product(range(5), repeat=2):
            dist[j1, j2] = sum(
                torch.trace(torch.outer(phi[i, k] - phi[j1, k], phi[i, k] - phi[j2, k])) for k in range(3)
            )
        rows.append(solve_exactly(torch.diag(v) + dist))
    assert compute_head_weights(phi, v).flatten().tolist() == pytest.approx(
        torch.stack(rows).flatten().tolist(), abs=1e-9
    )


def test_head_weights_combine_clients_with_equal_features_only():
    phi = torch.zeros(3, 1, 2, dtype=f64)
    phi[2] = 1e3
    weights = compute_head_weights(phi, torch.tensor([1.0, 1.0, 1.0], dtype=f64))
    expected = torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], dtype=f64)
    assert weights.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-5)


def test_head_weights_isolate_client_with_nan_statistics():
    phi = torch.zeros(2, 1, 2, dtype=f64)
    phi[1] = torch.nan
    assert compute_head_weights(phi, torch.ones(2, dtype=f64)).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("width", [None, 3])
def test_fedpac_three_rounds_match_authors_code(make_trial, assert_same, width):
    """Use an exact solver and equal rates. As in PFLlib, classes without a global prototype have no penalty."""
    trial = make_trial(FedPAC(penalty=0.8), width=width, learning_rate=0.1)
    clients, body = trial.clients, trial.server["body"]
    heads = [trial.initial_model(0).only(trial.net.head_names)] * len(clients)
    prototypes = {}
    for number in (1, 2, 3):
        ids, modules, statistics, own = trial.select_participants(number), [], [], []
        for client in ids:
            module = load_mlp(body, heads[client])
            x, y = clients.gather_samples(clients.train[client])
            statistics.append(extract_statistics(module, x, y))

            def align(x, y, module=module):
                rep = module.body(x)
                new = rep.detach().clone()
                for i, label in enumerate(y.tolist()):
                    new[i] = prototypes.get(label, new[i])
                pull = torch.nn.functional.mse_loss(new, rep)
                return cross_entropy(module.head(rep), y) + 0.8 * pull

            take_steps(
                torch.optim.SGD(module.head.parameters(), 0.1),
                lambda x, y, module=module: cross_entropy(module(x), y),
                list_batches(trial, client, number, "head", epochs=1),
            )
            take_steps(torch.optim.SGD(module.body.parameters(), 0.1), align, list_batches(trial, client, number))
            modules.append(copy_parameters(module))
            own.append({c: (module.body(x[y == c]).detach().mean(0), int((y == c).sum())) for c in set(y.tolist())})
        for c in range(4):
            sent = [entry[c] for entry in own if c in entry]
            if sent:
                prototypes[c] = sum(count * mean for mean, count in sent) / sum(count for _, count in sent)
        body = average_models([model.only(body) for model in modules], clients.sizes[ids])
        v = torch.tensor([variance for variance, _ in statistics], dtype=f64)
        for client, (_, h_ref) in zip(ids, statistics, strict=True):
            differences = torch.stack([(h_ref - h).flatten() for _, h in statistics])
            alpha = solve_exactly(torch.diag(v) + differences @ differences.T)
            heads[client] = average_models([model.only(trial.net.head_names) for model in modules], alpha)
    trial.run(3)
    assert_same(trial.server["body"], body, tolerance=1e-6)
    for client, head in enumerate(heads):
        assert_same(select_model(trial.server["heads"], client), head, tolerance=1e-6)


def test_fedpac_class_without_prototype_has_no_penalty(make_trial, make_clients, assert_same):
    """Client 0 has a sample of class 0. Client 1 has class 1, which the server does not know in the second round."""
    clients = make_clients(sizes=[1, 9], labels=lambda client: [client])
    trials = [make_trial(FedPAC(penalty=penalty), clients=clients).run(1, ids=[0]) for penalty in (50.0, 0.0)]
    assert [trial.server["known"].tolist() for trial in trials] == [[1, 0, 0, 0]] * 2
    pulled, free = (trial.run(1, ids=[1]).server for trial in trials)
    assert_same(pulled["body"], free["body"])
    assert pulled["known"].tolist() == [1, 1, 0, 0]


def test_fedpac_with_one_client_and_no_penalty_equals_fedrep(make_trial, make_clients, assert_same):
    """The head weight of a single client is 1."""
    clients = make_clients(sizes=[17])
    pac, rep = (
        make_trial(algorithm, clients=clients, participation=1.0, momentum=0.9).run(3)
        for algorithm in (FedPAC(penalty=0.0), FedRep(head_epochs=1, body_epochs=2))
    )
    assert_same(pac.start(0)["model"], rep.start(0)["model"], tolerance=1e-12)
