import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedfomo import EPSILON, FedFomo
from fedpipe.algorithms.model_stack import select_model
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.federated_data import FederatedData
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (0, n.all))],  # in the first round, see below for later rounds
    centralized={},
    exceptions={"equal_uploads": "a client's model is its own until it has mixed it"},
)

f64 = torch.float64


def mix_models(make_toy, scalar, losses, own=0.0, others=()):
    """Mix scalar models at a client with baseline 0. ``losses`` are of the baseline, own, and other models."""
    algorithm = make_toy(FedFomo(), [(1.0, 0.0)] * (1 + len(others))).algorithm
    candidates = Tensors({"head.weight": torch.tensor(others, dtype=f64).reshape(-1, 1, 1)})
    client = {"model": scalar(own), "previous": scalar(0), "others": candidates, "found": torch.tensor(len(others))}
    sums = {"loss": torch.tensor(losses, dtype=f64) * 4, "size": torch.tensor(4.0, dtype=f64)}
    after = algorithm.mix_models(client, sums)
    return float(after["model"]["head.weight"]), after["gains"].tolist()


def test_fedfomo_weights_are_gains_divided_by_distance(make_toy, scalar):
    """Losses 0.5 and 0.8 against 1, both at distance 1, give weights 0.714286 and 0.285714."""
    model, gains = mix_models(make_toy, scalar, [1.0, 1.0, 0.5, 0.8], others=[1.0, -1.0])
    assert model == pytest.approx(0.714286 - 0.285714, abs=1e-6)
    assert gains == pytest.approx([0.5, 0.2], rel=2 * EPSILON)
    model, gains = mix_models(make_toy, scalar, [1.0, 1.0, 0.5, 0.5], others=[1.0, -4.0])
    assert model == pytest.approx(0.8 - 0.2 * 4, abs=1e-4), "four times the distance gives a quarter of the weight"


def test_fedfomo_uses_only_better_model(make_toy, scalar):
    assert mix_models(make_toy, scalar, [1.0, 1.1, 0.9, 3.0], own=0.1, others=[0.3, 0.7])[0] == 0.3


def test_fedfomo_own_trained_model_is_candidate(make_toy, scalar):
    assert mix_models(make_toy, scalar, [1.0, 0.4, 2.0], own=0.3, others=[0.7])[0] == 0.3
    assert mix_models(make_toy, scalar, [1.0, 0.5, 0.5], own=0.25, others=[-0.25])[0] == pytest.approx(0, abs=1e-17)


def test_fedfomo_keeps_trained_model_if_no_candidate_is_better(make_toy, scalar):
    model, gains = mix_models(make_toy, scalar, [1.0, 1.5, 2.0, 1.2], own=0.3, others=[0.5, -0.5])
    assert model == 0.3
    assert gains == pytest.approx([-2, -0.4], rel=3 * EPSILON)


def test_fedfomo_gain_at_distance_0_is_0(make_toy, scalar):
    assert mix_models(make_toy, scalar, [1.0, 1.0, 1.0], own=0.0, others=[0.0]) == (0, [0])


def test_fedfomo_first_round_equals_local_training(make_trial, assert_same):
    """In the first round, no client has uploaded a model that the server could send."""
    ours, plain = (make_trial(algorithm, participation=1.0).run() for algorithm in (FedFomo(), FedAvg()))
    assert_same(
        [outcome.upload["model"] for outcome in ours.outcomes], [outcome.upload["model"] for outcome in plain.outcomes]
    )
    assert not ours.server["affinity"].any()


def test_fedfomo_selects_candidates_of_highest_affinity(make_trial):
    """Sort by affinity, then by index. Exclude the client's own model and models of clients without upload."""
    algorithm = make_trial(FedFomo(downloads=4)).algorithm
    affinity = torch.tensor([[9.0, 0.0, 3.0, -1.0, 0.0, 3.0, 8.0, 0.0]]).expand(8, 8)
    server = {"affinity": affinity, "seen": torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1])}
    assert algorithm.select_candidates(server, 0).tolist() == [2, 5, 1, 4]
    assert algorithm.select_candidates(server, 2).tolist() == [0, 5, 1, 4]
    algorithm = make_trial(FedFomo(downloads=20)).algorithm
    assert algorithm.select_candidates(server, 5).tolist() == [0, 2, 1, 4, 7, 3]
    assert algorithm.select_candidates(server, 6).tolist() == [0, 2, 5, 1, 4, 7, 3]
    assert algorithm.select_candidates(server | {"seen": torch.zeros(8)}, 5).tolist() == []


@pytest.mark.parametrize("width", [None, 3])
def test_fedfomo_traffic_counts_uploaded_models_only(make_trial, width):
    """A model has 64 numbers of 8 bytes, and M is 2. Clients download nothing in round 1.

    In round 2, each of the two past participants downloads one model and each new client two.
    """
    trial = make_trial(FedFomo(downloads=2), width=width)
    model = 8 * (5 * 6 + 6 + 6 * 4 + 4)
    rounds = [[1, 4], [1, 4, 6, 7], [2, 6]]
    counts = [[0, 0], [1, 1, 2, 2], [2, 2]]
    for ids, found in zip(rounds, counts, strict=True):
        trial.run(1, ids=ids)
        assert [outcome.bytes_down for outcome in trial.outcomes] == [count * model for count in found]
        assert [outcome.bytes_up for outcome in trial.outcomes] == [model + count * 8 for count in found]


@pytest.mark.parametrize("width", [None, 3])
def test_fedfomo_ignores_empty_slots(make_trial, assert_same, width):
    """The server's models of clients without upload have no effect."""
    trial = make_trial(FedFomo(downloads=3), width=width).run(1, ids=[1, 4])
    other = make_trial(FedFomo(downloads=3), width=width).run(1, ids=[1, 4])
    strangers = torch.tensor([0, 2, 3, 5, 6, 7])
    other.server["models"] = other.server["models"].map(lambda value: value.index_fill(0, strangers, 7.0))
    _, own = other.send([1, 6])
    assert own["found"].tolist() == [1, 2]
    assert not own["others"]["head.weight"][0, 1:].any()
    assert not own["others"]["head.weight"][1, 2:].any()
    for run in (trial, other):
        run.run(2, ids=[1, 4])
    sent, others = ([outcome._replace(seconds=0.0) for outcome in run.outcomes] for run in (trial, other))
    assert_same(others, sent)
    assert_same(other.server["affinity"], trial.server["affinity"])
    assert not trial.server["affinity"][:, strangers].any()
    assert trial.server["affinity"][1, 4] != 0


def test_fedfomo_sends_models_of_candidates(make_trial, assert_same):
    trial = make_trial(FedFomo(downloads=3)).run(2)
    _, own = trial.send([4, 1])
    for row, client in enumerate((4, 1)):
        for place, other in enumerate(trial.algorithm.select_candidates(trial.server, client).tolist()):
            sent = own["others"].map(lambda value, at=(row, place): value[at])
            assert_same(sent, select_model(trial.server["models"], other))


def test_fedfomo_adds_gains_to_affinity(make_trial):
    """The gains belong to the candidates of this round, not to those of the next."""
    algorithm = make_trial(FedFomo(downloads=2)).algorithm
    model = algorithm.net.make_initial_model(0)
    server = algorithm.init(lambda index: model)
    server |= {"affinity": torch.arange(8.0, dtype=f64).expand(8, 8), "seen": torch.ones(8, dtype=f64)}
    sent = {"model": model, "gains": torch.tensor([-20.0, 0.5], dtype=f64)}
    after = algorithm.aggregate(server, Uploads([7, 3], [1, 1], [sent, sent]))["affinity"]
    assert after[7].tolist() == [0, 1, 2, 3, 4, 5.5, -14, 7]
    assert after[3].tolist() == [0, 1, 2, 3, 4, 5, 6.5, -13]
    assert after[0].tolist() == list(range(8))


def test_fedfomo_gains_use_validation_data(make_clients, make_trial):
    """Clients without validation data use their training data. The baseline is the model before the last training."""
    all_of = make_clients()
    train, held = zip(
        *((samples[len(samples) // 4 :], samples[: len(samples) // 4]) for samples in all_of.train), strict=True
    )
    assert [len(samples) for samples in held] == [0, 1, 2, 3, 1, 4, 0, 5]
    clients = FederatedData(all_of.x, all_of.y, train, all_of.test, all_of.global_test, 4, 0, f64, validation=held)
    trial = make_trial(FedFomo(downloads=2), clients=clients, participation=1.0).run(2)
    before, state = trial.server, dict(trial.client_states)
    trial.run()
    for outcome in trial.outcomes:
        client = outcome.client
        x, y = clients.gather_samples(held[client] if len(held[client]) else train[client])

        def compute_loss(model, x=x, y=y):
            return float(cross_entropy(trial.net(model, x), y))

        baseline = state[client]["previous"]
        for other, gain in zip(
            trial.algorithm.select_candidates(before, client).tolist(), outcome.upload["gains"].tolist(), strict=True
        ):
            model = select_model(before["models"], other)
            distance = float((model - baseline).norm()) + EPSILON
            assert gain == pytest.approx((compute_loss(baseline) - compute_loss(model)) / distance, abs=1e-10)


def test_fedfomo_baseline_is_model_before_last_training(make_trial, assert_same):
    """The baseline is the mixed model, which is also the model that evaluation uses."""
    trial = make_trial(FedFomo(), participation=1.0, learning_rate=0.0).run(2)
    assert_same(trial.client_states[5]["previous"], trial.client_states[5]["model"])
    trial = make_trial(FedFomo(), participation=1.0).run(2)
    assert not torch.equal(trial.client_states[5]["previous"].flat(), trial.client_states[5]["model"].flat())


def test_fedfomo_absent_client_keeps_its_state(make_trial, assert_same):
    trial = make_trial(FedFomo()).run(1, ids=[1, 3, 5])
    before = trial.client_states[1], select_model(trial.server["models"], 1), trial.server["affinity"][1]
    assert_same(before[1], before[0]["model"])
    trial.run(1, ids=[3, 5])
    assert_same((trial.client_states[1], select_model(trial.server["models"], 1), trial.server["affinity"][1]), before)
    assert trial.server["seen"].tolist() == [0, 1, 0, 1, 0, 1, 0, 0]
    assert trial.algorithm.global_model(trial.server) is None


@pytest.mark.parametrize("loss", [0.5, 2.0])
def test_fedfomo_mixture_of_equal_models_equals_model(make_toy, scalar, loss):
    """The models are better or worse than the baseline."""
    assert mix_models(make_toy, scalar, [1.0, loss, loss, loss], own=0.3, others=[0.3, 0.3])[0] == pytest.approx(0.3)


def test_fedfomo_mixes_clients_with_equal_classes(make_clients, make_trial):
    """Even clients have the classes 0 and 1, odd ones 2 and 3."""
    clients = make_clients(sizes=[12] * 6, labels=lambda client: [client % 2 * 2, client % 2 * 2 + 1])
    trial = make_trial(FedFomo(downloads=2), clients=clients, participation=1.0).run(6)
    affinity = trial.server["affinity"].numpy()
    other_group = np.add.outer(np.arange(6), np.arange(6)) % 2 == 1
    assert affinity[other_group].max() <= 0 < affinity[~other_group].max()
    for client in range(6):
        alike = set(range(client % 2, 6, 2)) - {client}
        assert set(trial.algorithm.select_candidates(trial.server, client).tolist()) == alike
