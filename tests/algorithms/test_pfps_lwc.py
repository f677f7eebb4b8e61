import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.pfps_lwc import PFPSLWC
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.evaluation import evaluate_round
from fedpipe.engine.clients.executor import FIRST
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.models.mlp import MLP
from fedpipe.settings.evaluation import Evaluation
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import (
    copy_parameters,
    list_batches,
    load_mlp,
    make_dead_initial_model,
    run_fedavg,
    take_steps,
)

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.body, n.body))],
    centralized={"penalty": 0.0, "recall_epochs": 0},
)

f64 = torch.float64
OFF = {"penalty": 0.0, "recall_epochs": 0}


class RecallOnly(PFPSLWC):
    """PFPS-LWC without local training, so that clients upload the recalled model."""

    def local_passes(self):
        return ()


def bind_algorithm(algorithm, make_trial, body, head):
    """Bind the algorithm to a network of these modules."""
    trial = make_trial("fedavg")
    return algorithm.bind(FunctionalNetwork(lambda: Network(body, head), f64), trial.algorithm.federation)


def make_tensors(**values):
    return Tensors({name.replace("_", "."): torch.tensor(value, dtype=f64) for name, value in values.items()})


def compute_recall_loss(trial, teacher, student, client):
    x = trial.clients.gather_samples(trial.clients.train[client])[0]
    return float((1 - cosine_similarity(trial.net.features(teacher, x), trial.net.features(student, x))).mean())


def test_recall_loss_is_cosine_distance_of_features(make_trial):
    """The angle between (1, 0) and (1, 1) does not depend on their lengths."""
    algorithm = bind_algorithm(PFPSLWC(), make_trial, nn.Linear(1, 2, bias=False), nn.Linear(2, 2))
    batch = Batch(torch.ones(3, 1, dtype=f64), torch.zeros(3, dtype=torch.long))
    for scale in (1.0, 7.0):
        client = {
            "extractor": make_tensors(body_weight=[[1.0], [0.0]]),
            "model": make_tensors(body_weight=[[scale], [scale]]),
        }
        assert float(algorithm.recall_loss(client, batch)) == pytest.approx(0.292893, abs=1e-6)


def test_pfps_lwc_penalty_is_joint_norm_of_head(make_trial):
    """Weight 3 and bias 4 have norm 5 with gradient (0.6, 0.8), both multiplied by lambda."""
    algorithm = bind_algorithm(PFPSLWC(penalty=0.1), make_trial, nn.Identity(), nn.Linear(1, 1))
    weight, bias = (torch.tensor(value, dtype=f64, requires_grad=True) for value in ([[3.0]], [4.0]))
    client = {"model": Tensors({"head.weight": weight, "head.bias": bias})}
    batch = Batch(torch.ones(2, 1, dtype=f64), torch.zeros(2, dtype=torch.long))
    loss = algorithm.loss(client, batch)  # with one class, the risk is 0
    assert loss.item() == pytest.approx(0.5, abs=1e-15)
    gradient = torch.autograd.grad(loss, (weight, bias))
    assert [value.item() for value in gradient] == pytest.approx([0.06, 0.08], abs=1e-15)


def test_pfps_lwc_squared_penalty_matches_exact_value(make_trial):
    algorithm = bind_algorithm(PFPSLWC(penalty=0.1, squared=True), make_trial, nn.Identity(), nn.Linear(1, 1))
    client = {"model": make_tensors(head_weight=[[3.0]], head_bias=[4.0])}
    batch = Batch(torch.ones(2, 1, dtype=f64), torch.zeros(2, dtype=torch.long))
    assert float(algorithm.loss(client, batch)) == pytest.approx(2.5, abs=1e-14)


def test_pfps_lwc_gradient_of_zero_head_is_0(make_trial):
    algorithm = bind_algorithm(PFPSLWC(), make_trial, nn.Identity(), nn.Linear(1, 1))
    weight, bias = (torch.zeros(shape, dtype=f64, requires_grad=True) for shape in ((1, 1), (1,)))
    batch = Batch(torch.ones(2, 1, dtype=f64), torch.zeros(2, dtype=torch.long))
    loss = algorithm.loss({"model": Tensors({"head.weight": weight, "head.bias": bias})}, batch)
    assert [value.item() for value in torch.autograd.grad(loss, (weight, bias))] == [0, 0]


@pytest.mark.parametrize("width", [None, 3])
def test_pfps_lwc_with_zero_features_is_finite(make_trial, width):
    """Every ReLU of the extractor is off."""
    settings = {"width": width, "initial_model": make_dead_initial_model(PFPSLWC()), "participation": 1.0}
    trial = make_trial(PFPSLWC(), **settings).run(2)
    for outcome in trial.outcomes:
        assert all(value.isfinite().all() for value in (outcome.upload["body"] | outcome.kept_state["head"]).values())


def test_pfps_lwc_without_recall_and_penalty_matches_fedper_loop(make_trial, assert_same):
    """Average bodies by count and keep heads personal, with PyTorch's optimizer."""
    trial = make_trial(PFPSLWC(**OFF), momentum=0.9)
    heads = dict.fromkeys(range(len(trial.clients)), trial.initial_client_state["head"])

    def train_client(client, number, body):
        module = load_mlp(body, heads[client])
        rule = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
        take_steps(rule, lambda x, y: cross_entropy(module(x), y), list_batches(trial, client, number))
        heads[client] = copy_parameters(module, "head.")
        return copy_parameters(module, "body.")

    expected = run_fedavg(trial, 3, train_client, "body")
    assert_same(trial.run(3).server["body"], expected, tolerance=1e-12)
    for client, head in heads.items():
        assert_same(trial.client_states[client]["head"], head, tolerance=1e-12)


def test_pfps_lwc_first_round_has_no_recall(make_trial, assert_same):
    recalling, forgetful = (make_trial(PFPSLWC(recall_epochs=epochs)).run() for epochs in (3, 0))
    assert_same(recalling.server, forgetful.server)
    assert_same(recalling.client_states, forgetful.client_states)


@pytest.mark.parametrize("width", [None, 3])
def test_pfps_lwc_recall_needs_previous_participation(make_trial, assert_same, width):
    recalling, forgetful = (
        make_trial(PFPSLWC(recall_epochs=epochs), width=width).run(1, ids=[0, 1, 5]).train([1, 4, 5])
        for epochs in (2, 0)
    )
    same = [
        torch.equal(ours.upload["body"].flat(), theirs.upload["body"].flat())
        for ours, theirs in zip(recalling, forgetful, strict=True)
    ]
    assert same == [False, True, False]


def test_pfps_lwc_recall_with_one_client_changes_no_model(make_clients, make_trial, assert_same):
    """The downloaded extractor equals the one that the client uploaded."""
    clients = make_clients(sizes=[15], labels=lambda client: range(4))
    recalling, forgetful = (
        make_trial(PFPSLWC(recall_epochs=epochs), clients=clients, participation=1.0).run(3) for epochs in (3, 0)
    )
    assert_same(recalling.server, forgetful.server, tolerance=1e-12)


def test_pfps_lwc_recall_restores_extractor_features_and_keeps_head(make_trial, assert_same):
    """Recall moves the features of every client nearer to those of its last uploaded extractor."""
    trial = make_trial(PFPSLWC(), participation=1.0, local_epochs=5).run(2)
    settings = {"participation": 1.0, "learning_rate": 0.02, "weight_decay": 0.01}  # weight decay would shrink the head
    alone = make_trial(RecallOnly(recall_epochs=5), **settings)
    alone.server, alone.client_states, alone.rounds = trial.server, trial.client_states, trial.rounds
    for outcome in alone.train():
        state = trial.client_states[outcome.client]
        before = compute_recall_loss(trial, state["extractor"], trial.server["body"], outcome.client)
        after = compute_recall_loss(trial, state["extractor"], outcome.upload["body"], outcome.client)
        assert after < 0.98 * before
        assert_same(outcome.kept_state["head"], state["head"])


def test_pfps_lwc_penalty_shrinks_heads(make_trial):
    """A larger penalty shrinks every client's head more."""
    norms = []
    for penalty in (0.0, 0.1, 0.5):
        trial = make_trial(PFPSLWC(penalty=penalty, recall_epochs=0), participation=1.0).run(3)
        norms.append([float(state["head"].norm()) for state in trial.client_states.values()])
    assert all(none > weak > strong for none, weak, strong in zip(*norms, strict=True))


def test_pfps_lwc_clients_keep_uploaded_extractor(make_trial, assert_same):
    trial = make_trial(PFPSLWC()).run(2)
    for outcome in trial.outcomes:
        assert_same(trial.client_states[outcome.client]["extractor"], outcome.upload["body"])
    assert trial.algorithm.global_model(trial.server) is None


def test_pfps_lwc_downloaded_model_has_shared_extractor_and_own_head(make_trial, assert_same):
    trial = make_trial(PFPSLWC(), participation=1.0).run(2)
    for client in (0, 3):
        wanted = trial.server["body"] | trial.client_states[client]["head"]
        assert_same(trial.start(client)["model"], wanted)


def train_with_pytorch(
    trial, client, recall_epochs, epochs=0, penalty=0.0, build=lambda: MLP(hidden=(6,)).build((5,), 4)
):
    """Train a client's model for the next round, as in Alg. 1, lines 4-11, with PyTorch's modules and optimizers."""
    federation, state = trial.algorithm.federation, trial.client_states[client]
    teacher, student = build().double().eval(), build().double().train()
    own = dict(state.get("buffers", {}))
    teacher.load_state_dict({**state["head"], **state["extractor"], **own}, strict=False)
    student.load_state_dict({**state["head"], **trial.server["body"], **own}, strict=False)

    def run_steps(stream, count, parameters, loss):
        rule = torch.optim.SGD(parameters, federation.learning_rate, federation.momentum)
        take_steps(rule, loss, list_batches(trial, client, trial.rounds + 1, stream, count))

    def compute_recall(x, y):
        with torch.no_grad():
            wanted = teacher.body(x)
        return (1 - cosine_similarity(wanted, student.body(x))).mean()

    def compute_local_loss(x, y):
        norm = torch.cat([value.flatten() for value in student.head.parameters()]).norm()
        return cross_entropy(student(x), y) + penalty * norm

    run_steps("recall", 0 if float(state[FIRST]) else recall_epochs, student.body.parameters(), compute_recall)
    run_steps("batches", epochs, student.parameters(), compute_local_loss)
    return student.eval()


@pytest.mark.parametrize("width", [None, 3])
def test_pfps_lwc_evaluates_recalled_model(make_trial, width):
    """Apply Alg. 1, lines 4-8, at all clients. Clients that have never participated recall nothing."""
    trial = make_trial(PFPSLWC(recall_epochs=2), width=width, momentum=0.9).run(2, ids=[0, 3, 5])
    for outcome in trial.train(range(8), ("local", "global"), "receive"):
        recalled, downloaded = (train_with_pytorch(trial, outcome.client, epochs) for epochs in (2, 0))
        for test, rows in (("local", trial.clients.test[outcome.client]), ("global", trial.clients.global_test)):
            x, y = trial.clients.gather_samples(rows)
            after, before = (cross_entropy(model(x), y, reduction="sum").item() for model in (recalled, downloaded))
            score = outcome.scores[test]
            assert score.loss == pytest.approx(after, rel=1e-11)
            assert score.correct == int((recalled(x).argmax(-1) == y).sum())
            recalls = len(rows) > 0 and outcome.client in (0, 3, 5)
            assert abs(after - before) > 1e-4 * before if recalls else after == before


@pytest.mark.parametrize("width", [None, 3])
def test_pfps_lwc_training_starts_from_evaluated_model(make_trial, assert_same, width):
    """Evaluation after a round and training in the next round use a model with equal bits."""
    trial = make_trial(RecallOnly(recall_epochs=2), width=width, momentum=0.9)
    before = make_trial(PFPSLWC(recall_epochs=2), width=width, momentum=0.9).run(2, ids=[0, 3, 5])
    trial.server, trial.client_states, trial.rounds = before.server, before.client_states, before.rounds
    begun = trial.train([0, 1, 3, 5], ("local", "global"), "train")
    measured = trial.train([0, 1, 3, 5], ("local", "global"), "receive")
    assert [outcome.scores for outcome in begun] == [outcome.scores for outcome in measured]
    for outcome in begun:
        recalled = train_with_pytorch(trial, outcome.client, 2)
        assert_same(outcome.upload["body"], copy_parameters(recalled, "body."), tolerance=1e-12)


@pytest.mark.parametrize("width", [None, 3])
def test_pfps_lwc_round_matches_pytorch_recall_and_training(make_trial, assert_same, width):
    """Momentum starts at zero after the recall."""
    algorithm = PFPSLWC(recall_epochs=2, penalty=0.1)
    trial = make_trial(algorithm, width=width, momentum=0.9).run(1, ids=[3, 5])
    for outcome in trial.train([1, 3, 5]):
        trained = train_with_pytorch(trial, outcome.client, 2, epochs=2, penalty=0.1)
        assert_same(outcome.upload["body"], copy_parameters(trained, "body."), tolerance=1e-11)
        assert_same(outcome.kept_state["head"], copy_parameters(trained, "head."), tolerance=1e-11)


@pytest.mark.parametrize("protocol", ["personal-on-local", "finetuned-on-local"])
def test_pfps_lwc_recall_changes_losses_of_past_participants_only(make_trial, protocol):
    """Compare with the ablation without recall after the same rounds."""
    losses = []
    for epochs in (1, 0):
        trial = make_trial(PFPSLWC(recall_epochs=0)).run(2, ids=[3, 5, 7])
        other = make_trial(PFPSLWC(recall_epochs=epochs))
        found = evaluate_round(
            Evaluation(protocols=(protocol,)),
            other.executor,
            other.algorithm,
            other.clients,
            trial.server,
            trial.send,
            trial.client_states.__getitem__,
            2,
        )
        losses.append(found.metrics.column("loss").to_pylist())
    differing = [client for client, (with_it, without) in enumerate(zip(*losses, strict=True)) if with_it != without]
    assert differing == [3, 5, 7]


def build_norm_network():
    return Network(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 4))


@pytest.mark.parametrize("buffers", ["keep", "average"])
@pytest.mark.parametrize("width", [None, 3])
def test_pfps_lwc_recall_teacher_uses_own_running_statistics(make_trial, assert_same, width, buffers):
    """The student's running statistics change, even if both use the client's own set."""
    trial = make_trial(RecallOnly(recall_epochs=3), "norm", width=width, buffers=buffers, learning_rate=0.2)
    before = make_trial(PFPSLWC(), "norm", buffers=buffers).run(2, ids=[3, 5, 7])
    trial.server, trial.client_states, trial.rounds = before.server, before.client_states, before.rounds
    for outcome in trial.train([3, 5]):
        student = train_with_pytorch(trial, outcome.client, 3, build=build_norm_network)
        sent = outcome.upload["body"] | outcome.kept_state.get("buffers", {})
        wanted = copy_parameters(student, "body.") | dict(student.named_buffers())
        assert_same(dict(sent), {name: wanted[name] for name in sent}, tolerance=1e-10)


def test_pfps_lwc_recall_teacher_is_in_evaluation_mode(make_trial):
    """The teacher uses its running statistics, and the student the batch's."""
    trial = make_trial(PFPSLWC(), "norm", participation=1.0).run()
    client = trial.start(5)
    x, y = trial.clients.gather_samples(trial.clients.train[5])
    with trial.net.mode.activate(training=True):
        found = trial.algorithm.recall_loss(client, Batch(x, y))
        student = trial.net.features(client["model"], x)
    teacher = trial.net.features(client["extractor"], x)
    assert float(found) == pytest.approx(float((1 - cosine_similarity(teacher, student)).mean()), abs=1e-15)
