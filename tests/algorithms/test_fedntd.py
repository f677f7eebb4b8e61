import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedntd import FedNTD, compute_not_true_log_softmax
from fedpipe.models.base import FunctionalNetwork, Network
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import train_plainly

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"beta": 0.0},
)

f64 = torch.float64


def test_not_true_log_softmax_matches_exact_values():
    """The logits are log 1, log 2, and log 3. Without the true class 1, the other classes have 1/4 and 3/4."""
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).log().requires_grad_()
    log_q = compute_not_true_log_softmax(logits, torch.tensor([1]))
    assert log_q.exp().tolist()[0] == pytest.approx([0.25, 0, 0.75], abs=1e-15)
    (gradient,) = torch.autograd.grad(log_q[0, 2], logits)
    assert gradient.tolist()[0] == pytest.approx([-0.25, 0, 0.25], abs=1e-15)


def test_fedntd_loss_of_one_sample_matches_exact_value(make_trial):
    """All parameters except the head's bias are zero.

    For the other classes, the teacher has probabilities 1/2 and 1/2, the client 1/4 and 3/4.
    """
    trial = make_trial(FedNTD(beta=2.0))
    zeros = trial.server["model"].zeros()
    bias = torch.tensor([1.0, 3.0, 5.0, 1e-300], dtype=torch.float64).log()
    flat = torch.tensor([1.0, 1.0, 5.0, 1e-300], dtype=torch.float64).log()
    client = {"model": zeros | {"head.bias": bias}, "teacher": zeros | {"head.bias": flat}}
    batch = Batch(torch.zeros(1, 5, dtype=torch.float64), torch.tensor([2]))
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    loss = trial.algorithm.loss(client, batch)
    assert float(loss) == pytest.approx(-math.log(5 / 9) + 2 * divergence, abs=1e-14)


def test_fedntd_with_beta_0_equals_fedavg(make_trial, assert_same):
    ntd, plain = (make_trial(algorithm, momentum=0.9).run(3) for algorithm in (FedNTD(beta=0.0), FedAvg()))
    assert_same(ntd.server["model"], plain.server["model"], tolerance=1e-14)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_fedntd_three_rounds_match_pfllib_loss(make_trial, assert_same, tau):
    """PFLlib removes the true class from the logits and multiplies the divergence by tau squared."""

    def refine_as_not_true(logits, targets):
        classes = torch.arange(logits.shape[1]).repeat(len(logits), 1)
        return logits.gather(1, classes[classes != targets.view(-1, 1)].view(len(logits), -1))

    def compute_loss(client, module, received, x, y):
        logits, received_logits = module(x), received(x)
        log_q = log_softmax(refine_as_not_true(logits, y) / tau, dim=1)
        teacher = softmax(refine_as_not_true(received_logits, y) / tau, dim=1)
        return cross_entropy(logits, y) + 0.7 * tau**2 * kl_div(log_q, teacher, reduction="batchmean")

    trial = make_trial(FedNTD(beta=0.7 * tau**2, tau=tau))
    expected = train_plainly(trial, compute_loss, 3)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)


def test_fedntd_teacher_is_in_evaluation_mode(make_trial):
    """The teacher has no dropout while the client's model trains. Its logits equal the client's without dropout."""
    net = FunctionalNetwork(lambda: Network(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5)), nn.Linear(6, 4)), f64)
    algorithm, model = FedNTD().bind(net, make_trial("fedavg").algorithm.federation), net.make_initial_model(1)
    batch = Batch(torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=f64), torch.tensor([0, 1, 2]))
    with net.mode.activate(True, None, torch.tensor(7)):
        logits = net(model, batch.x)
    with net.mode.activate(True, None, torch.tensor(7)):
        loss = algorithm.loss({"model": model, "teacher": model}, batch)
    log_q, log_teacher = (compute_not_true_log_softmax(z, batch.y) for z in (logits, net(model, batch.x)))
    divergence = kl_div(log_q, log_teacher.exp(), reduction="batchmean")
    assert float(loss) == pytest.approx(float(cross_entropy(logits, batch.y) + divergence), rel=1e-12)
    assert divergence > 1e-3


def test_fedntd_forgets_absent_classes_less_than_fedavg(make_trial, make_clients):
    """The paper claims that a client of one class changes the order of the other classes less than in FedAvg."""
    clients = make_clients(sizes=[20], labels=lambda client: [0])
    x, _ = clients.gather_samples(clients.train[0])
    changes = []
    for algorithm in (FedNTD(beta=5.0), FedAvg()):
        trial = make_trial(algorithm, clients=clients, participation=1.0, local_epochs=10)
        labels = torch.zeros(len(x), dtype=torch.long)
        before = compute_not_true_log_softmax(trial.net(trial.server["model"], x), labels)
        after = compute_not_true_log_softmax(trial.net(trial.run().server["model"], x), labels)
        changes.append(float(kl_div(after, before.exp(), reduction="batchmean").detach()))
    assert changes[0] < 0.2 * changes[1]
