import math

import pytest
import torch

from fedpipe.algorithms.fedamp import CHUNK_COLUMNS, FedAMP, compute_square_distances
from fedpipe.algorithms.model_stack import select_model
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"attraction": 0.0},
    exceptions={"equal_uploads": "a client's model is its own, only the mixture is equal"},
)


def compute_weights(make_toy, points, seen=None, **parameters):
    """Compute the mixing weights of scalar models at ``points``."""
    algorithm = make_toy(FedAMP(**parameters), [(1.0, 0.0)] * len(points)).algorithm
    models = Tensors({"head.weight": torch.tensor(points, dtype=torch.float64).reshape(-1, 1, 1)})
    seen = torch.tensor(seen or [1.0] * len(points), dtype=torch.float64)
    return algorithm.compute_mixing_weights(models, seen)


def list_models(trial):
    return [float(state["model"]["head.weight"]) for state in trial.client_states.values()]


@pytest.mark.parametrize(("distance", "weight"), [(0.0, 0.5), (math.log(2), 0.25), (1e4, 0.0)])
def test_fedamp_weight_falls_with_squared_distance(make_toy, distance, weight):
    found = compute_weights(make_toy, [0.0, math.sqrt(distance)], sigma=1.0, alpha=0.5)
    assert found.tolist() == [pytest.approx([1 - weight, weight]), pytest.approx([weight, 1 - weight])]


def test_fedamp_weights_are_not_negative(make_toy):
    """With cwFedAvg's values, each equal model would weigh 1e4. No model is near the last one."""
    found = compute_weights(make_toy, [0.0, 0.0, 0.0, 50.0], sigma=0.1, alpha=1000.0)
    third = pytest.approx([1 / 3] * 3, abs=1e-15)
    assert [row[:3] for row in found.tolist()] == [third, third, third, [0, 0, 0]]
    assert found[:, 3].tolist() == [0, 0, 0, 1]


def test_fedamp_lowers_too_large_step_of_one_client_only(make_toy):
    """The squared distances from the first model are 0, log(2), and 2 log(2).

    With alpha = sigma, the first client's step is divided by 1 + 1/2 + 1/4.
    """
    root = math.sqrt(math.log(2))
    found = compute_weights(make_toy, [0.0, root, -math.sqrt(2) * root], sigma=1.0, alpha=1.0)
    assert found[0].tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-15)
    between = math.exp(-((1 + math.sqrt(2)) ** 2) * math.log(2))
    assert found[1].tolist() == pytest.approx([0.5 / (1.5 + between), 1 / (1.5 + between), between / (1.5 + between)])
    found = compute_weights(make_toy, [0.0, root, -math.sqrt(2) * root], sigma=1.0, alpha=0.5)
    assert found[0].tolist() == pytest.approx([1 - 0.375, 0.25, 0.125], abs=1e-15), "half the step is small enough"


@pytest.mark.parametrize("width", [None, 3])
def test_fedamp_with_cwfedavg_values_gives_own_model_largest_weight(make_trial, width):
    trial = make_trial(FedAMP(alpha=1000.0, sigma=0.1), width=width, participation=1.0).run(4)
    mixing = trial.server["mixing"]
    assert bool((mixing >= 0).all())
    assert mixing.sum(1).tolist() == pytest.approx([1] * 8, abs=1e-14)
    assert torch.equal(mixing.diag(), mixing.amax(1))
    assert float((mixing - mixing.diag().diag()).amax()) > 0.01, "the nearest models attract each other"


@pytest.mark.parametrize("width", [None, 3])
def test_fedamp_with_cwfedavg_setting_equals_local_training(make_trial, assert_same, width):
    """Compare the client states and the scores of all clients after each round, including absent ones."""
    settings = {"width": width, "momentum": 0.9}
    row = make_trial(FedAMP(alpha=1000.0, sigma=0.1, begin_at="own", attraction=0.0), **settings)
    local = make_trial("local", **settings)
    for ids in ([0, 1, 4], [1, 6], [4, 6]):
        row.run(1, ids=ids)
        local.run(1, ids=ids)
        assert_same(row.client_states, local.client_states)
        scores = [trial.train(range(8), ("local", "global"), "receive") for trial in (row, local)]
        assert [outcome.scores for outcome in scores[0]] == [outcome.scores for outcome in scores[1]]


def test_fedamp_mixing_rows_sum_to_1(make_toy):
    for alpha in (0.1, 1.0, 10.0):
        rows = compute_weights(make_toy, [0.3, -0.2, 1.0, 0.9, 0.0], sigma=1.0, alpha=alpha)
        assert rows.sum(1).tolist() == pytest.approx([1] * 5, abs=1e-15)
        assert bool((rows >= 0).all())


def test_fedamp_mixing_ignores_clients_without_upload(make_toy):
    found = compute_weights(make_toy, [0.0, 0.0, 0.0], seen=[1.0, 0.0, 1.0], sigma=1.0, alpha=0.25)
    assert found.tolist() == [[0.75, 0, 0.25], [0, 1, 0], [0.25, 0, 0.75]]


def test_fedamp_training_starts_at_mixture(make_toy):
    """On Q2 the models after round 1 are 0 and 1.2 with weight 1/4 for each other, so the mixtures are 0.3 and 0.9."""
    sigma = 1.44 / math.log(2)
    trial = make_toy(FedAMP(sigma=sigma, alpha=sigma / 2)).run()
    assert list_models(trial) == pytest.approx([0, 1.2], abs=1e-14)
    mixtures = [float(trial.start(client)["mixture"]["head.weight"]) for client in (0, 1)]
    assert mixtures == pytest.approx([0.3, 0.9], abs=1e-14)
    assert list_models(trial.run()) == pytest.approx([0.27, 1.83], abs=1e-14)


def test_fedamp_training_with_begin_at_own_starts_at_own_model(make_toy):
    """Training starts at 1.2 and pulls towards 0.9 with strength lambda / alpha = 1."""
    sigma = 1.44 / math.log(2)
    parameters = {"sigma": sigma, "alpha": sigma / 2, "attraction": sigma / 2, "begin_at": "own"}
    trial = make_toy(FedAMP(**parameters)).run(2)
    assert list_models(trial) == pytest.approx([0.1 * 0.3, 1.2 - 0.1 * (3 * (1.2 - 4) + 0.3)], abs=1e-14)


def test_fedamp_attraction_step_matches_exact_values(make_toy):
    """The second step pulls towards 0 with strength lambda / alpha = 1: 1.2 - 0.1 (3 (1.2 - 4) + 1.2)."""
    trial = make_toy(FedAMP(alpha=2.0, attraction=2.0), local_epochs=2).run()
    assert list_models(trial) == pytest.approx([0, 1.92], abs=1e-14)


def test_fedamp_mixture_of_single_client_equals_its_model(make_toy):
    trial = make_toy(FedAMP(), [(3.0, 4.0)])
    for _ in range(3):
        trial.run()
        assert float(trial.start(0)["mixture"]["head.weight"]) == list_models(trial)[0]


def test_fedamp_equal_uploads_become_mixtures(make_trial, assert_same):
    trial = make_trial(FedAMP(alpha=1.0, sigma=1.0)).run()
    sent = trial.outcomes[0].upload
    ids = [outcome.client for outcome in trial.outcomes]
    trial.server = trial.aggregate(Uploads(ids, [1, 2, 3, 4], [sent] * 4))
    for client in ids:
        assert_same(trial.start(client)["mixture"], sent["model"], tolerance=1e-14)


def test_fedamp_absent_client_keeps_model_and_attraction(make_trial, assert_same):
    trial = make_trial(FedAMP()).run(1, ids=[1, 3, 5])
    before = trial.client_states[1], select_model(trial.server["models"], 1)
    assert_same(before[1], before[0]["model"])
    trial.run(1, ids=[3, 5])
    assert_same((trial.client_states[1], select_model(trial.server["models"], 1)), before)
    assert float(trial.server["mixing"][3, 1]) > 0
    assert trial.server["mixing"][:, 2].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_fedamp_received_model_equals_own_model(make_trial, assert_same):
    trial = make_trial(FedAMP(), participation=1.0).run(2)
    assert_same(trial.start(4)["model"], trial.client_states[4]["model"])
    assert trial.algorithm.global_model(trial.server) is None


def test_fedamp_attracts_similar_clients_only(make_toy):
    """Clients with minima at 0 and 1 attract each other, as do those at 8 and 9. The pairs do not interact."""
    trial = make_toy(
        FedAMP(alpha=1.0, sigma=2.0), [(1.0, minimum) for minimum in (0.0, 1.0, 8.0, 9.0)], local_epochs=5
    ).run(50)
    mixing = trial.server["mixing"]
    assert min(mixing[0, 1], mixing[2, 3]) > 0.3
    assert mixing[:2, 2:].max() < 1e-6
    low, high, other, highest = list_models(trial)
    assert high - low < 0.6
    assert highest - other < 0.6
    assert low + high == pytest.approx(1, abs=1e-3)
    assert other + highest == pytest.approx(17, abs=1e-3)


def test_square_distances_match_cdist_across_chunks():
    """The number of coordinates is larger than a chunk and not a multiple of it."""
    points = torch.randn(5, 2 * CHUNK_COLUMNS + 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = compute_square_distances(points)
    assert torch.allclose(found, torch.cdist(points, points).square(), rtol=1e-12, atol=1e-9)
    assert torch.equal(found, found.T)
    assert found.diag().tolist() == [0] * 5
