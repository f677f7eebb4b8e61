import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.ccvr import CCVR
from fedpipe.algorithms.fedavg import FedAvg
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all + n.classes * (n.features + n.features**2 + 1)))],
    centralized={},
    parameters={"samples": 20},
)

f64 = torch.float64


def gather_samples(trial, ids):
    samples = [trial.clients.gather_samples(trial.clients.train[client]) for client in ids]
    return torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])


def test_ccvr_uncalibrated_model_equals_fedavg(make_trial, assert_same):
    """Clients train as in FedAvg. Without epochs, the calibrated model equals FedAvg's of the previous round."""
    calibrated, plain = make_trial(CCVR(epochs=0), momentum=0.9), make_trial(FedAvg(), momentum=0.9)
    for _ in range(3):
        assert_same(calibrated.run().algorithm.global_model(calibrated.server), plain.server["model"])
        plain.run()
        assert_same(calibrated.algorithm.extra_models(calibrated.server)["uncalibrated"], plain.server["model"])


@pytest.mark.parametrize("width", [None, 3])
def test_ccvr_draws_match_class_means_and_covariances(make_trial, width):
    """The mean and covariance of many draws match the pooled features of all clients."""
    trial = make_trial(CCVR(), width=width, participation=1.0)
    x, y = gather_samples(trial, range(len(trial.clients)))
    z = trial.net.features(trial.server["model"], x).detach()
    server = trial.run().server
    sums = {part: server[part] for part in ("sums", "products", "counts")}
    draws = (
        CCVR(samples=20_000).bind(trial.net, trial.algorithm.federation).bind_round(1, 0).draw_virtual_features(sums)
    )
    for c in range(4):
        assert server["counts"][c] == (y == c).sum()
        torch.testing.assert_close(draws[c].mean(0), z[y == c].mean(0), atol=0.05, rtol=0)
        covariance = z[y == c].T.cov()
        torch.testing.assert_close(draws[c].T.cov(), covariance, atol=0.03 * float(covariance.abs().max()), rtol=0)


@pytest.mark.parametrize("batch_size", [28, "full"])
def test_ccvr_head_matches_sgd_step_on_virtual_features(make_trial, assert_same, batch_size):
    """One batch contains all draws, so PyTorch's SGD takes one step."""
    trial = make_trial(CCVR(samples=7), batch_size=batch_size, participation=1.0, learning_rate=0.3)
    head = torch.nn.Linear(6, 4).double()
    head.load_state_dict({name[5:]: value for name, value in trial.server["model"].only(trial.net.head_names).items()})
    server = trial.run().server
    sums = {part: server[part] for part in ("sums", "products", "counts")}
    z = trial.algorithm.bind_round(1, trial.clients.seed).draw_virtual_features(sums).flatten(0, 1)
    rule = torch.optim.SGD(head.parameters(), 0.3)
    cross_entropy(head(z), torch.arange(4).repeat_interleave(7)).backward()
    rule.step()
    calibrated = trial.algorithm.global_model(server)
    assert_same(calibrated["head.weight"], head.weight.detach(), tolerance=1e-12)
    assert_same(calibrated["head.bias"], head.bias.detach(), tolerance=1e-12)


def test_ccvr_absent_classes_keep_their_sums(make_trial, make_clients, assert_same):
    """Client 0 has only class 0, and client 1 only class 1. The calibration ignores the other classes."""
    clients = make_clients(sizes=[9, 9], labels=lambda client: [client])
    trial = make_trial(CCVR(samples=5), clients=clients).run(1, ids=[0])
    first = trial.server
    trial.run(1, ids=[1])
    assert first["counts"].tolist() == [9, 0, 0, 0]
    assert trial.server["counts"].tolist() == [9, 9, 0, 0]
    assert_same(trial.server["products"][0], first["products"][0])
    assert all(value.isfinite().all() for value in trial.algorithm.global_model(trial.server).values())


def test_ccvr_calibrates_classes_with_two_samples_or_more(make_trial, make_clients):
    """The covariance of a class divides by its number of samples minus 1."""
    clients = make_clients(sizes=[2, 1], labels=lambda client: [client])
    trial = make_trial(CCVR(samples=5), clients=clients, participation=1.0).run()
    assert trial.server["counts"].tolist() == [2, 0, 0, 0]
    calibrated = trial.algorithm.global_model(trial.server)
    assert all(value.isfinite().all() for value in calibrated.values())
    assert not torch.equal(calibrated["head.weight"], trial.server["model"]["head.weight"])
