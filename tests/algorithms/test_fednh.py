import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fednh import CLIP_NORM, FedNH, PrototypeHead
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.models.mlp import MLP
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import copy_parameters, list_batches, make_dead_initial_model, run_fedavg

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all + n.classes))],
    centralized="its head holds prototypes, which follow class means and no gradient",
    exceptions={"no_learning_rate": "prototypes follow the class means, whatever the learning rate"},
)

f64 = torch.float64


def get_head(trial):
    return trial.server["model"]["head.weight"]


def make_precise_initial_model(make_trial):
    """Return a function that makes initial models whose prototypes have norm 1 in float64, not only in float32."""
    fresh = make_trial(FedNH()).initial_model
    return lambda index: fresh(index) | {"head.weight": normalize(fresh(index)["head.weight"], dim=-1)}


def compute_norms(rows):
    return torch.linalg.vector_norm(rows, dim=-1).tolist()


def compute_prototypes(trial, model, client):
    """Compute the normalized class means of a client's normalized features."""
    x, y = trial.clients.gather_samples(trial.clients.train[client])
    z = normalize(trial.net.features(model, x), dim=-1)
    means = [z[y == label].mean(0) if (y == label).any() else torch.zeros(6, dtype=f64) for label in range(4)]
    return normalize(torch.stack(means), dim=-1)


def aggregate_prototypes(rho, weight, sent):
    """Return the prototypes after uploads of (prototypes, counts)."""
    model = Tensors({"body.weight": torch.zeros(1), "head.weight": torch.tensor(weight, dtype=f64)})
    uploads = [
        {
            "model": model.only(["body.weight"]),
            "prototypes": torch.tensor(prototypes, dtype=f64),
            "counts": torch.tensor(counts, dtype=f64),
        }
        for prototypes, counts in sent
    ]
    server = FedNH(rho=rho).aggregate({"model": model}, Uploads(range(len(sent)), [1] * len(sent), uploads))
    return server["model"]["head.weight"].tolist()


def test_fednh_initial_prototypes_are_orthonormal(make_trial):
    rows = get_head(make_trial(FedNH()))
    assert torch.allclose(rows @ rows.T, torch.eye(4, dtype=f64), atol=1e-6)


def test_prototype_head_with_few_features_has_unit_rows():
    rows = PrototypeHead(3, 8, 1.0).weight
    assert compute_norms(rows) == pytest.approx([1] * 8, abs=1e-6)


def test_prototype_head_logits_are_scaled_cosines():
    layer = PrototypeHead(2, 2, 5.0)
    layer.load_state_dict({"weight": torch.eye(2), "scale": torch.tensor(5.0)})
    for length in (1.0, 0.1, 70.0):  # the length of the features has no effect
        assert layer(length * torch.tensor([[3.0, 4.0]])).tolist() == [pytest.approx([3, 4])]
    assert layer(torch.zeros(1, 2)).tolist() == [[0, 0]]


@pytest.mark.parametrize("width", [None, 3])
def test_fednh_clients_train_body_and_scale_only(make_trial, assert_same, width):
    trial = make_trial(FedNH(rho=1.0), width=width, initial_model=make_precise_initial_model(make_trial))
    before = trial.server["model"]
    after = trial.run(3).server["model"]
    assert_same(after["head.weight"], before["head.weight"], tolerance=1e-15)
    moved = [name for name in before if (after[name] - before[name]).abs().max() > 1e-6]
    assert moved == [name for name in trial.net.names if name != "head.weight"]
    assert all("head.weight" not in outcome.upload["model"] for outcome in trial.outcomes)


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize(("scale", "clipped"), [(1.0, False), (40.0, True)])
def test_fednh_with_rho_1_matches_fedavg_loop_with_fixed_head(make_trial, assert_same, scale, clipped, width):
    """Train with PyTorch's optimizer and gradient clipping."""
    trial = make_trial(
        FedNH(rho=1.0, scale=scale), momentum=0.9, initial_model=make_precise_initial_model(make_trial), width=width
    )
    trial.server["model"]["head.scale"] = torch.full_like(trial.server["model"]["head.scale"], scale)
    norms = []

    def train_client(client, number, model):
        module = FedNH().adapt(MLP(hidden=(6,)).build((5,), 4)).double()
        module.load_state_dict(model)
        module.head.weight.requires_grad_(False)
        rule = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
        for x, y in list_batches(trial, client, number):
            rule.zero_grad()
            cross_entropy(module(x), y).backward()
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)))
            rule.step()
        return copy_parameters(module)

    expected = run_fedavg(trial, 3, train_client)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)
    assert (max(norms) > CLIP_NORM > min(norms)) == clipped


def test_fednh_clients_upload_normalized_means_of_features(make_trial, assert_same):
    trial = make_trial(FedNH(), participation=1.0)
    before = trial.server["model"]
    for outcome in trial.run().outcomes:
        model = before | outcome.upload["model"]
        assert_same(outcome.upload["prototypes"], compute_prototypes(trial, model, outcome.client), tolerance=1e-13)
        assert outcome.upload["counts"].tolist() == trial.clients.class_counts[outcome.client].tolist()


def test_fednh_averages_prototypes_by_counts_and_smooths_them():
    """Three samples at (1, 0) and four at (0, 1) have a mean with direction (0.6, 0.8)."""
    sent = [([[1.0, 0.0]], [3.0]), ([[0.0, 1.0]], [4.0])]
    assert aggregate_prototypes(0.0, [[1.0, 0.0]], sent) == [pytest.approx([0.6, 0.8])]
    smoothed = torch.tensor([0.9 + 0.1 * 0.6, 0.1 * 0.8], dtype=f64)
    assert aggregate_prototypes(0.9, [[1.0, 0.0]], sent) == [pytest.approx((smoothed / smoothed.norm()).tolist())]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 1.0])
def test_fednh_class_without_owner_keeps_prototype(rho):
    weight = [[0.6, 0.8], [0.0, 1.0]]
    assert aggregate_prototypes(rho, weight, [([[1.0, 0.0], [0.0, 0.0]], [2.0, 0.0])])[1] == weight[1]


def test_fednh_keeps_prototype_if_class_means_cancel():
    assert aggregate_prototypes(0.0, [[0.6, 0.8]], [([[1.0, 0.0]], [2.0]), ([[-1.0, 0.0]], [2.0])]) == [[0.6, 0.8]]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_fednh_prototypes_have_unit_norm(make_trial, rho):
    trial = make_trial(FedNH(rho=rho))
    for _ in range(3):
        assert compute_norms(get_head(trial.run())) == pytest.approx([1] * 4, abs=1e-6)


def test_fednh_with_one_client_and_rho_0_uses_its_class_means(make_clients, make_trial, assert_same):
    clients = make_clients(sizes=[15], labels=lambda client: range(4))
    trial = make_trial(FedNH(rho=0.0), clients=clients, participation=1.0).run(2)
    assert_same(get_head(trial), compute_prototypes(trial, trial.server["model"], 0), tolerance=1e-13)


def test_fednh_with_learning_rate_0_changes_prototypes_only(make_trial, assert_same):
    trial = make_trial(FedNH(), learning_rate=0.0)
    before = trial.server["model"]
    after = trial.run(2).server["model"]
    others = [name for name in before if name != "head.weight"]
    assert_same(after.only(others), before.only(others), tolerance=1e-14)
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_fednh_moves_prototypes_to_class_means(make_trial):
    """A smaller rho moves the prototypes faster."""
    found = []
    for rho in (1.0, 0.9, 0.5):
        trial = make_trial(FedNH(rho=rho), participation=1.0).run(4)
        x, y = trial.clients.gather_samples(trial.clients.global_test)
        z = normalize(trial.net.features(trial.server["model"], x), dim=-1)
        found.append(float((z * get_head(trial)[y]).sum(-1).mean()))
    assert found[0] < found[1] < found[2]


def test_fednh_fine_tuning_excludes_head(make_trial):
    algorithm = make_trial(FedNH()).algorithm
    (step,) = algorithm.finetune_passes(3)
    assert "head.weight" not in step.only
    assert step.epochs == 3


def test_fednh_with_single_sample_and_zero_features_is_finite(make_trial):
    """Every ReLU of the body is off, so logits are zero and prototypes do not change."""
    trial = make_trial(FedNH(), initial_model=make_dead_initial_model(FedNH()), participation=1.0)
    before = get_head(trial)
    trial.run(2)
    assert torch.equal(get_head(trial), before)
    assert all(value.isfinite().all() for value in trial.server["model"].values())


def test_fednh_rejects_head_that_is_not_linear():
    network = Network(nn.Identity(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(SettingsError, match=r"model\.name: FedNH can't replace the head Sequential"):
        FedNH().adapt(network)


def test_fednh_adapted_network_computes_scaled_cosines(make_trial):
    algorithm = registry.build_component(component.ALGORITHM, "fednh", {"scale": 20.0})
    net = FunctionalNetwork(lambda: algorithm.adapt(Network(nn.Identity(), nn.Linear(2, 3))), f64)  # type: ignore[attr-defined]
    model = net.make_initial_model(0)
    assert float(model["head.scale"]) == 20
    batch = Batch(torch.ones(3, 2, dtype=f64), torch.tensor([0, 1, 2]))
    assert torch.allclose(net(model, batch.x), 20 * normalize(batch.x, dim=-1) @ model["head.weight"].T)
