import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedlc import FedLC
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import train_plainly

EXPECTED = Expected(traffic=[({}, lambda n: (n.all, n.all))], centralized={"tau": 0.0})


def compute_fl_bench_loss(logit, y, counts, tau):
    """The function `logit_calibrated_loss` of FL-bench."""
    label_counts = torch.tensor([float(count) or 1e-8 for count in counts], dtype=logit.dtype)
    cal_logit = torch.exp(logit - tau * torch.pow(label_counts, -1 / 4).unsqueeze(0).expand((logit.shape[0], -1)))
    y_logit = torch.gather(cal_logit, dim=-1, index=y.unsqueeze(1))
    return -torch.log(y_logit / cal_logit.sum(dim=-1, keepdim=True)).sum() / logit.shape[0]


def test_fedlc_with_tau_0_equals_fedavg_bit_for_bit(make_trial, assert_same):
    calibrated, plain = (make_trial(method, momentum=0.9).run(3) for method in (FedLC(tau=0.0), FedAvg()))
    assert_same(calibrated.server, plain.server)


def test_fedlc_margins_match_exact_values(make_trial):
    """With 16 samples of the first class and 1 of the second, the margins are 1/2 and 1.

    The loss is then that of a logit of 1/2.
    """
    logits, margins = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    y = torch.tensor([0, 1])
    expected = (torch.log1p(torch.exp(torch.tensor(-0.5))) + torch.log1p(torch.exp(torch.tensor(0.5)))) / 2
    assert float(compute_fl_bench_loss(logits, y, [16, 1], 1.0)) == pytest.approx(float(expected), abs=1e-7)
    assert float(cross_entropy(logits - margins, y)) == pytest.approx(float(expected), abs=1e-7)
    trial = make_trial(FedLC())
    info = trial.clients.get_client_info(0, 1, torch.zeros(()))._replace(class_counts=torch.tensor([16.0, 1, 0, 81]))
    found = trial.algorithm.start({}, {"model": trial.server["model"]}, info)["margins"]
    torch.testing.assert_close(found, torch.tensor([0.5, 1.0, 100.0, 1 / 3]))


@pytest.mark.parametrize("client", range(8))
def test_fedlc_loss_matches_fl_bench(make_trial, client):
    trial = make_trial(FedLC(tau=0.7))
    state, (x, y) = trial.start(client), trial.clients.gather_samples(trial.clients.train[client])
    expected = compute_fl_bench_loss(trial.net(state["model"], x), y, torch.bincount(y, minlength=4), 0.7)
    assert float(trial.algorithm.loss(state, Batch(x, y))) == pytest.approx(float(expected), abs=1e-12)


def test_fedlc_three_rounds_match_fl_bench(make_trial, assert_same):
    trial = make_trial(FedLC(), learning_rate=0.1)

    def compute_loss(client, module, received, x, y):
        counts = torch.bincount(trial.clients.gather_samples(trial.clients.train[client])[1], minlength=4)
        return compute_fl_bench_loss(module(x), y, counts, 1.0)

    expected = train_plainly(trial, compute_loss, 3)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)
