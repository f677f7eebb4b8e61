import pytest
import torch

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddistill_plus import FedDistillPlus, compute_kl_divergence, compute_wrong_kl_divergence
from fedpipe.algorithms.feddw import FedDW
from fedpipe.algorithms.uploads import Uploads
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[
        ({}, lambda n: (n.all + n.classes**2, n.all + n.classes**2 + n.classes)),
        ({"mode": "paper"}, lambda n: (n.all + n.classes**2, n.all + n.classes**2 + n.classes)),
    ],
    centralized={"mu": 0.0},
)

f64 = torch.float64
MODES = ("kl", "paper", "code")


def make_table(*rows):
    """Make a 4 x 4 table that begins with these rows. The other rows are zero, as for classes without samples."""
    full = torch.zeros(4, 4, dtype=f64)
    for index, row in enumerate(rows):
        full[index, : len(row)] = torch.tensor(row, dtype=f64)
    return full


def make_uploads(trial, tables, counts):
    """Make the uploads of clients 0, 1, ..."""
    model = trial.server["model"]
    sent = [
        {"model": model, "omega": table, "counts": torch.tensor(count, dtype=f64)}
        for table, count in zip(tables, counts, strict=True)
    ]
    return Uploads(range(len(sent)), [1.0] * len(sent), sent)


def gather_batch(trial, client):
    return Batch(*trial.clients.gather_samples(trial.clients.train[client]))


@pytest.mark.parametrize("mode", MODES)
def test_feddistill_plus_with_mu_0_equals_fedavg_bit_for_bit(make_trial, assert_same, mode):
    plus, plain = (
        make_trial(algorithm, momentum=0.9).run(3) for algorithm in (FedDistillPlus(mu=0.0, mode=mode), FedAvg())
    )
    assert_same(plus.server["model"], plain.server["model"])


@pytest.mark.parametrize(
    ("teacher", "output", "right", "wrong"),
    [
        ([1.0, 0.0], [1.0, 0.0], 0.0, -1.0),
        ([0.5, 0.5], [0.5, 0.5], 0.0, -1.193147),
        ([1.0, 0.0], [0.25, 0.75], 1.386294, -0.25),
        ([0.5, 0.5], [0.25, 0.75], 0.143841, -1.193147),
    ],
)
def test_kl_divergence_and_wrong_kl_divergence_match_exact_values(teacher, output, right, wrong):
    """A zero of the teacher adds nothing. Outputs of 0 affect only their logarithm."""
    log_p = torch.tensor([output], dtype=f64).clamp(min=1e-300).log()
    q = torch.tensor([teacher], dtype=f64)
    assert compute_kl_divergence(q, log_p).item() == pytest.approx(right, abs=1e-6)
    assert compute_wrong_kl_divergence(q, log_p).item() == pytest.approx(wrong, abs=1e-6)


def test_wrong_kl_divergence_gradient_is_minus_teacher():
    """The gradient with respect to the outputs raises their inner product with the teacher."""
    q = torch.tensor([[0.7, 0.2, 0.1]], dtype=f64)
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=f64, requires_grad=True)
    (gradient,) = torch.autograd.grad(compute_wrong_kl_divergence(q, p.log()).sum(), p)
    assert torch.allclose(gradient, -q, atol=1e-15)


@pytest.mark.parametrize("mode", ["kl", "paper"])
def test_feddistill_plus_first_teacher_is_label(make_trial, mode):
    """The divergence from a row of the identity equals the cross-entropy."""
    trial = make_trial(FedDistillPlus(mu=0.5, mode=mode))
    client, batch = trial.start(3), gather_batch(trial, 3)
    with torch.no_grad():
        assert float(trial.algorithm.loss(client, batch)) == pytest.approx(
            1.5 * float(trial.algorithm.risk(client, batch)), rel=1e-12
        )


@pytest.mark.parametrize(("mode", "names"), [("kl", ["SL"]), ("code", ["SL"]), ("paper", [])])
def test_feddistill_plus_records_table_that_all_clients_receive(make_trial, mode, names):
    """With `paper` each client receives another table."""
    trial = make_trial(FedDistillPlus(mode=mode)).run()
    assert list(trial.algorithm.matrices(trial.server)) == names


def test_feddistill_plus_teacher_is_row_of_sample_class(make_trial):
    trial = make_trial(FedDistillPlus(mu=2.0))
    client, batch = trial.start(3), gather_batch(trial, 3)
    client["omega"] = torch.rand(4, 4, generator=torch.Generator().manual_seed(1), dtype=f64).softmax(-1)
    with torch.no_grad():
        log_p = trial.net(client["model"], batch.x).log_softmax(-1)
        rows = [
            torch.nn.functional.kl_div(log, client["omega"][y], reduction="sum")
            for log, y in zip(log_p, batch.y, strict=True)
        ]
        taught = trial.algorithm.loss(client, batch) - trial.algorithm.risk(client, batch)
    assert float(taught) == pytest.approx(2 * float(sum(rows)) / len(rows), rel=1e-12)


def test_feddistill_plus_paper_mode_excludes_own_outputs(make_trial):
    """Three clients have outputs (2, 0), (0, 2), and (4, 4) for class 0, with ten samples each.

    The mode kl includes the outputs of all clients.
    """
    tables, counts = [make_table((2, 0)), make_table((0, 2)), make_table((4, 4))], [[10, 0, 0, 0]] * 3
    shared = make_trial(FedDistillPlus())
    found = shared.aggregate(make_uploads(shared, tables, counts))["omega"]
    assert found[0].tolist() == pytest.approx([2, 2, 0, 0])
    apart = make_trial(FedDistillPlus(mode="paper"))
    apart.server = apart.aggregate(make_uploads(apart, tables, counts))
    first = [apart.start(client)["omega"][0, :2].tolist() for client in (0, 1, 2, 7)]
    assert first == [pytest.approx(row) for row in ([2, 3], [3, 2], [1, 1], [2, 2])]  # client 7 is absent


def test_feddistill_plus_averages_rows_by_counts(make_trial):
    trial = make_trial(FedDistillPlus())
    found = trial.aggregate(make_uploads(trial, [make_table((1, 0)), make_table((0, 1))], [[3, 0, 0, 0], [1, 0, 0, 0]]))
    assert found["omega"][0].tolist() == pytest.approx([0.75, 0.25, 0, 0])


@pytest.mark.parametrize("mode", ["kl", "paper"])
def test_feddistill_plus_keeps_row_of_class_without_other_owner(make_trial, mode):
    """Class 2 has no owner, and only client 0 owns class 1. A single participant has no outputs of other clients."""
    trial = make_trial(FedDistillPlus(mode=mode))
    tables = [make_table((0.5, 0.5), (0.2, 0.8)), make_table((0.9, 0.1))]
    trial.server = trial.aggregate(make_uploads(trial, tables, [[1, 1, 0, 0], [1, 0, 0, 0]]))
    own, other = trial.start(0)["omega"], trial.start(1)["omega"]
    assert own[2].tolist() == other[2].tolist() == [0, 0, 1, 0]
    assert other[1].tolist() == pytest.approx([0.2, 0.8, 0, 0])
    assert own[1].tolist() == pytest.approx([0, 1, 0, 0] if mode == "paper" else [0.2, 0.8, 0, 0])
    alone = trial.aggregate(make_uploads(trial, tables[:1], [[1, 1, 0, 0]]))["omega"]
    assert torch.equal(alone[0], trial.server["omega"][0]) == (mode == "paper")
    assert alone.isfinite().all()


def test_feddistill_plus_code_mode_table_equals_feddw(make_trial, assert_same):
    """The table is the smoothed history of all rounds. Unlike in FedDW, mu is constant and the head has a bias."""
    plus, dw = (make_trial(algorithm) for algorithm in (FedDistillPlus(mode="code"), FedDW(mode="code")))
    for tables in ([make_table((1, 0)), make_table((0, 1))], [make_table((0.5, 0.5)), make_table((0.2, 0.8))]):
        for trial in (plus, dw):
            trial.server = trial.aggregate(make_uploads(trial, tables, [[3, 0, 0, 0], [1, 0, 0, 0]]))
    assert_same(plus.server["omega"], dw.server["omega"])
    plus.rounds = 90
    assert "mu" not in plus.start(0)
    assert "head.bias" in plus.server["model"]


@pytest.mark.parametrize("mode", ["kl", "paper"])
def test_feddistill_plus_moves_outputs_to_teachers(make_trial, mode):
    """A larger mu moves the mean outputs of the clients nearer to their teachers."""
    distances = []
    for mu in (0.0, 1.0, 10.0):
        plain = make_trial(FedDistillPlus(mu=1.0, mode=mode), participation=1.0, learning_rate=0.02).run(5)
        trial = make_trial(FedDistillPlus(mu=mu, mode=mode), participation=1.0, learning_rate=0.02, local_epochs=5)
        trial.server, trial.rounds = plain.server, plain.rounds
        total = 0.0
        for outcome in trial.train():
            teacher, own = trial.start(outcome.client)["omega"], outcome.upload["counts"] > 0
            total += float(compute_kl_divergence(teacher[own], outcome.upload["omega"][own].log()).sum())
        distances.append(total)
    assert distances[0] > 1.05 * distances[1] > 1.05 * distances[2]


@pytest.mark.parametrize("mode", ["kl", "paper"])
@pytest.mark.parametrize("mu", [1.0, 0.5])
def test_feddistill_plus_first_round_equals_fedavg_at_higher_rate(make_trial, assert_same, mode, mu):
    """The divergence from the identity equals the cross-entropy, which multiplies the rate by 1 + mu."""
    plus = make_trial(FedDistillPlus(mu=mu, mode=mode), learning_rate=0.05).run()
    plain = make_trial(FedAvg(), learning_rate=0.05 * (1 + mu)).run()
    assert_same(plus.server["model"], plain.server["model"], tolerance=1e-13)
