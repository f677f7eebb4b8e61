import dataclasses

import pytest
import torch
from torch import nn

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddw import FedDW, compute_regularizer
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.transforms import transform_images
from fedpipe.models.base import Network, compute_class_relations
from fedpipe.models.mlp import MLP
from fedpipe.settings.transforms import Transforms
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all + n.classes**2, n.all + n.classes**2 + n.classes))],
    centralized={"mu": 0.0},
)

f64 = torch.float64


def draw_tensor(*shape, seed=0):
    return torch.randn(*shape, dtype=f64, generator=torch.Generator().manual_seed(seed))


def draw_soft_labels(classes, seed=5):
    return draw_tensor(classes, classes, seed=seed).softmax(-1)


def build_biasless_network():
    network = MLP(hidden=(6,)).build((5,), 4)
    return Network(network.body, nn.Linear(6, 4, bias=False))


def make_upload(rows, counts):
    model = Tensors({"head.weight": torch.zeros(len(counts), 2, dtype=f64)})
    return {"model": model, "omega": torch.tensor(rows, dtype=f64), "counts": torch.tensor(counts, dtype=f64)}


def make_server(classes=2, **more):
    model = Tensors({"head.weight": torch.zeros(classes, 2, dtype=f64)})
    return {"model": model, "omega": torch.eye(classes, dtype=f64)} | more


@pytest.mark.parametrize(("classes", "value"), [(2, 0.25), (10, 0.09), (100, 0.0099)])
def test_regularizer_of_zero_head_matches_exact_value(classes, value):
    omega = torch.zeros(classes, 3, dtype=f64, requires_grad=True)
    found = compute_regularizer(omega, torch.eye(classes, dtype=f64))
    found.backward()
    assert found.item() == pytest.approx(value, abs=1e-15)
    assert torch.equal(omega.grad, torch.zeros_like(omega))


@pytest.mark.parametrize(("scale", "value"), [(1.0, 0.0723295), (2.0, 3.2350e-4)])
def test_regularizer_of_identity_head_matches_exact_value(scale, value):
    eye = torch.eye(2, dtype=f64)
    assert float(compute_regularizer(scale * eye, eye)) == pytest.approx(value, rel=2e-5)
    assert compute_class_relations(eye)[0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


def test_regularizer_of_equal_matrices_is_0():
    omega = draw_tensor(5, 3)
    assert float(compute_regularizer(omega, compute_class_relations(omega))) == 0


@pytest.mark.parametrize("classes", [2, 4, 10])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 50.0])
def test_regularizer_is_between_0_and_2_over_c(classes, scale):
    for seed in range(5):
        value = float(
            compute_regularizer(scale * draw_tensor(classes, 3, seed=seed), torch.eye(classes, dtype=f64).roll(1, 0))
        )
        assert 0 <= value <= 2 / classes


def test_regularizer_reaches_upper_bound():
    omega, swapped = 50 * torch.eye(2, dtype=f64), torch.eye(2, dtype=f64).flip(0)
    assert float(compute_regularizer(omega, swapped)) == pytest.approx(1.0, abs=1e-15)


def test_regularizer_ignores_feature_rotation():
    omega, rotation = draw_tensor(4, 6), torch.linalg.qr(draw_tensor(6, 6, seed=1)).Q
    assert float(compute_regularizer(omega @ rotation, draw_soft_labels(4))) == pytest.approx(
        float(compute_regularizer(omega, draw_soft_labels(4))), rel=1e-13
    )


def test_regularizer_gradient_matches_finite_differences_and_formula():
    omega, target = draw_tensor(3, 4).requires_grad_(), draw_soft_labels(3)
    assert torch.autograd.gradcheck(lambda value: compute_regularizer(value, target), omega)
    (found,) = torch.autograd.grad(compute_regularizer(omega, target), omega)
    with torch.no_grad():
        relations = compute_class_relations(omega)
        error = 2 * (relations - target) / 9
        gram = relations * (error - (error * relations).sum(1, keepdim=True))
        assert torch.allclose(found, (gram + gram.T) @ omega, rtol=1e-13, atol=1e-15)


def test_regularizer_gradient_reaches_head_only(make_trial):
    trial = make_trial(FedDW(mu=3.0))
    client = trial.start(3) | {"omega": draw_soft_labels(4)}
    client["model"] = client["model"].map(lambda value: value.clone().requires_grad_())
    batch = Batch(*trial.clients.gather_samples(trial.clients.train[3]))
    names, leaves = zip(*client["model"].items(), strict=True)
    full, risk = (torch.autograd.grad(f(client, batch), leaves) for f in (trial.algorithm.loss, trial.algorithm.risk))
    head = client["model"]["head.weight"]
    wanted = 3 * torch.autograd.grad(compute_regularizer(head, client["omega"]), head)[0]
    for name, ours, plain in zip(names, full, risk, strict=True):
        extra = wanted if name == "head.weight" else torch.zeros_like(plain)
        assert torch.allclose(ours - plain, extra, rtol=1e-12, atol=1e-15)


def test_feddw_averages_rows_by_class_counts():
    """Class 0 has one sample at (0.6, 0.4) and three at (0.8, 0.2). Only the first client owns class 1."""
    uploads = Uploads(
        [0, 1], [1, 1], [make_upload([[0.6, 0.4], [0.1, 0.9]], [1, 5]), make_upload([[0.8, 0.2], [0, 0]], [3, 0])]
    )
    omega = FedDW().aggregate(make_server(), uploads)["omega"]
    assert omega.flatten().tolist() == pytest.approx([0.75, 0.25, 0.1, 0.9], abs=1e-15)


def test_feddw_class_without_owner_keeps_row():
    before = make_server() | {"omega": torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=f64)}
    uploads = Uploads([0], [1], [make_upload([[0.6, 0.4], [0, 0]], [4, 0])])
    omega = FedDW().aggregate(before, uploads)["omega"]
    assert omega.flatten().tolist() == pytest.approx([0.6, 0.4, 0.3, 0.7], abs=1e-15)


@pytest.mark.parametrize("width", [None, 3])
def test_feddw_client_uploads_mean_softmax_of_its_classes(make_trial, width):
    """Clients measure after training. The client with one sample uploads three rows of zeros."""
    trial = make_trial(FedDW(), width=width)
    for outcome in trial.train([0, 5, 6]):
        x, y = trial.clients.gather_samples(trial.clients.train[outcome.client])
        outputs = trial.net(outcome.upload["model"], x).softmax(-1)
        for label in range(4):
            mine = outputs[y == label]
            wanted = mine.mean(0) if len(mine) else torch.zeros(4, dtype=f64)
            assert torch.allclose(outcome.upload["omega"][label], wanted, rtol=1e-13, atol=1e-15)
        assert torch.equal(outcome.upload["counts"], torch.bincount(y, minlength=4).to(f64))


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("mode", ["paper", "code"])
def test_feddw_code_mode_measures_soft_labels_on_augmented_images(make_clients, make_trial, mode, width):
    transforms = Transforms(crop=1, flip=True)
    trial = make_trial(FedDW(mode=mode), "cnn", make_clients((1, 4, 4), transforms=transforms), width=width)
    (outcome,) = trial.train([5])
    x, y = trial.clients.gather_samples(trial.clients.train[5])
    other = transform_images(transforms, x, torch.tensor(trial.clients.get_noise_key(5, 1, "measure", 0)))
    found = [trial.net(outcome.upload["model"], images).softmax(-1) for images in (x, other)]
    plain, moved = (torch.stack([shares[y == label].mean(0) for label in (1, 2)]) for shares in found)
    assert torch.allclose(outcome.upload["omega"][[1, 2]], moved if mode == "code" else plain, rtol=1e-12, atol=0)
    assert not torch.allclose(plain, moved, atol=1e-4)


def test_feddw_soft_labels_do_not_depend_on_partition(make_trial):
    """With a frozen model, the server's matrix equals that of the pooled samples of all participants."""
    trial = make_trial(FedDW(), participation=1.0, learning_rate=0.0)
    x, y = trial.clients.gather_samples(torch.cat([torch.as_tensor(part) for part in trial.clients.train]))
    outputs = trial.net(trial.server["model"], x).softmax(-1)
    wanted = torch.stack([outputs[y == label].mean(0) for label in range(4)])
    assert torch.allclose(trial.run().server["omega"], wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize("mode", ["paper", "code"])
def test_feddw_soft_labels_sum_to_1(make_trial, mode):
    trial = make_trial(FedDW(mode=mode))
    for _ in range(3):
        rows = trial.run().server["omega"].sum(1)
        assert torch.allclose(rows, torch.ones_like(rows), rtol=1e-13, atol=0)


def test_feddw_initial_soft_labels_are_identity(make_trial):
    assert torch.equal(make_trial(FedDW()).server["omega"], torch.eye(4, dtype=f64))


def test_feddw_removes_head_bias_in_paper_mode_only(make_trial):
    assert "head.bias" not in make_trial(FedDW(mode="paper")).net.names
    assert "head.bias" in make_trial(FedDW(mode="code")).net.names


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_feddw_with_mu_0_equals_fedavg_with_same_head(make_trial, assert_same, settings):
    dw = make_trial(FedDW(mu=0.0), **settings).run(3)
    plain = make_trial(FedAvg(), build_biasless_network, initial_model=dw.initial_model, **settings).run(3)
    assert_same(dw.server["model"], plain.server["model"])


def test_feddw_mu_moves_class_relations_to_soft_labels(make_trial):
    """A larger mu moves the CR matrix nearer to the SL matrix."""
    distances = []
    for mu in (0.0, 10.0, 100.0):
        state = make_trial(FedDW(mu=mu), participation=1.0).run(10).server
        distances.append(float(compute_regularizer(state["model"]["head.weight"], state["omega"])))
    assert distances[1] < 0.8 * distances[0]
    assert distances[2] < 0.5 * distances[1]


def test_feddw_records_soft_labels_and_class_relations(make_trial):
    trial = make_trial(FedDW()).run()
    found = trial.algorithm.matrices(trial.server)
    assert torch.equal(found["SL"], trial.server["omega"])
    assert torch.equal(found["CR"], compute_class_relations(trial.server["model"]["head.weight"]))


@pytest.mark.parametrize(("mode", "decay"), [("paper", [1, 1, 1, 1, 1]), ("code", [1, 0.1, 0.1, 0.01, 0.001])])
def test_feddw_code_mode_lowers_mu_every_ninth_round(make_trial, mode, decay):
    trial = make_trial(FedDW(mu=5.0, mode=mode))
    received = {"model": trial.server["model"], "omega": trial.server["omega"]}
    facts = (trial.clients.get_client_info(1, number, torch.ones(())) for number in (8, 9, 17, 18, 27))
    assert [float(trial.algorithm.start({}, received, info)["mu"]) for info in facts] == pytest.approx(
        [5 * factor for factor in decay], rel=1e-14
    )


def test_feddw_code_mode_moves_rows_half_way_to_mean_of_uploads():
    algorithm = FedDW(mode="code")
    start = make_server(sums=torch.zeros(2, 2, dtype=f64), counts=torch.zeros(2, dtype=f64))
    one = algorithm.aggregate(start, Uploads([0], [1], [make_upload([[0.6, 0.4], [0, 0]], [1, 0])]))
    assert one["omega"].flatten().tolist() == pytest.approx([0.8, 0.2, 0, 1], abs=1e-15)
    two = algorithm.aggregate(one, Uploads([1], [1], [make_upload([[0.8, 0.2], [0.5, 0.5]], [3, 2])]))
    assert two["omega"].flatten().tolist() == pytest.approx([0.775, 0.225, 0.25, 0.75], abs=1e-15)


def test_feddw_modes_differ_after_one_round(make_trial):
    paper = make_trial(FedDW()).run()
    code = make_trial(dataclasses.replace(FedDW(), mode="code")).run()
    assert not torch.allclose(paper.server["omega"], code.server["omega"], atol=1e-3)
