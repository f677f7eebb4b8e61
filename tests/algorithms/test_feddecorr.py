import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddecorr import FedDecorr, compute_correlation_penalty
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import train_plainly

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"beta": 0.0},
)

f64 = torch.float64


def make_batch(z, real=None):
    mask = None if real is None else (torch.arange(len(z)) < real).to(f64)
    return Batch(z, torch.zeros(len(z), dtype=torch.long), mask)


def draw_features(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=f64)


@pytest.mark.parametrize(("second", "correlation"), [([1, -1, 1, -1], 0), ([1, 1, -1, -1], 1), ([-2, -2, 2, 2], -1)])
def test_correlation_penalty_of_two_features_matches_exact_value(second, correlation):
    """The penalty is the squared correlation times (B - 1)^2 / B."""
    z = torch.tensor([[1.0, 1.0, -1.0, -1.0], second], dtype=f64).T
    assert float(compute_correlation_penalty(z, make_batch(z))) == pytest.approx(9 / 4 * correlation**2, abs=1e-7)


def test_correlation_penalty_matches_corrcoef():
    z = draw_features(9, 4)
    correlations = torch.corrcoef(z.T)
    off_diagonal = (correlations.square().sum() - 4) / 12
    assert float(compute_correlation_penalty(z, make_batch(z))) == pytest.approx(float(off_diagonal) * 64 / 9, rel=1e-7)


def test_correlation_penalty_ignores_padding():
    z = draw_features(5, 3)
    padded = torch.cat([z, 7 + draw_features(4, 3)])
    penalty = compute_correlation_penalty(padded, make_batch(padded, real=5))
    assert float(penalty) == pytest.approx(float(compute_correlation_penalty(z, make_batch(z))), abs=1e-14)


@pytest.mark.parametrize(
    "z", [draw_features(1, 3), torch.ones(6, 3, dtype=f64), draw_features(6, 1)], ids=["sample", "equal", "width"]
)
def test_correlation_penalty_without_correlations_is_0(z):
    z.requires_grad_()
    penalty = compute_correlation_penalty(z, make_batch(z))
    (gradient,) = torch.autograd.grad(penalty, z)
    assert float(penalty.detach()) == 0
    assert not gradient.any()


def test_feddecorr_with_beta_0_equals_fedavg(make_trial, assert_same):
    decorr, plain = (make_trial(algorithm, momentum=0.9).run(3) for algorithm in (FedDecorr(beta=0.0), FedAvg()))
    assert_same(decorr.server["model"], plain.server["model"], tolerance=1e-14)


def test_feddecorr_three_rounds_match_authors_loss(make_trial, assert_same):
    def compute_loss(client, module, received, x, y):
        features = module.body(x)
        risk, (size, width) = cross_entropy(module.head(features), y), features.shape
        if size == 1:
            return risk
        z = features - features.mean(dim=0, keepdim=True)
        z = z / torch.sqrt(1e-8 + z.var(dim=0, keepdim=True))
        matrix = torch.matmul(z.t(), z)
        off_diagonal = matrix.flatten()[:-1].view(width - 1, width + 1)[:, 1:].flatten()
        return risk + 0.1 * off_diagonal.pow(2).mean() / size

    trial = make_trial(FedDecorr())
    expected = train_plainly(trial, compute_loss, 3)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-9)


def test_feddecorr_lowers_feature_correlation(make_trial, make_clients):
    """The paper claims that more dimensions of the features vary."""
    clients = make_clients(sizes=[30, 30], labels=lambda client: [client])
    penalties = []
    for algorithm in (FedDecorr(beta=1.0), FedAvg()):
        trial = make_trial(algorithm, clients=clients, participation=1.0, batch_size=10, local_epochs=5).run(3)
        z = trial.net.features(
            trial.server["model"], torch.cat([clients.gather_samples(i)[0] for i in clients.train])
        ).detach()
        penalties.append(float(compute_correlation_penalty(z, make_batch(z))))
    assert penalties[0] < 0.8 * penalties[1]
