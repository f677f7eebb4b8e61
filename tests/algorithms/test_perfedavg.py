import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.perfedavg import PerFedAvg
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"variant": "first-order", "alpha": 0.0, "same_batch": True},
    parameters={"variant": "hessian-free", "alpha": 0.1},
    momentum=False,
)


def compute_gradient(trial, model, indices):
    """Compute the gradient of the mean cross-entropy on these samples."""
    x, y = trial.clients.gather_samples(indices)
    leaves = Tensors((name, value.clone().requires_grad_()) for name, value in model.items())
    loss = cross_entropy(trial.net(leaves, x), y)
    return Tensors(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("same_batch", [True, False])
@pytest.mark.parametrize(
    ("variant", "delta", "point"),
    [("first-order", 0.001, 0.08), ("hessian-free", 0.001, 0.064), ("hessian-free", 1.0, 0.064)],
)
def test_perfedavg_step_matches_exact_value_on_quadratic(make_toy, trace_path, variant, delta, point, same_batch):
    """The risk is (w - 1)^2, and w starts at 0. All batches contain the same sample.

    The finite difference is exact for any delta. Each step covers the same fraction of the distance to 1. With separate
    batches for the gradients, there are as many steps as batches.
    """
    algorithm = PerFedAvg(alpha=0.1, variant=variant, delta=delta, same_batch=same_batch)
    trial = make_toy(algorithm, [(2, 1)], learning_rate=0.05)
    assert trace_path(trial, 1) == pytest.approx([1 - (1 - point) ** trial.algorithm.batches_per_step], abs=1e-12)


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_perfedavg_with_alpha_0_and_same_batch_equals_fedavg(make_trial, assert_same, variant):
    algorithm = PerFedAvg(alpha=0.0, variant=variant, same_batch=True)
    per, plain = (make_trial(method, weight_decay=0.1).run(3) for method in (algorithm, FedAvg()))
    assert_same(per.server, plain.server, tolerance=1e-13)


@pytest.mark.parametrize(("variant", "parts"), [("first-order", 2), ("hessian-free", 3)])
def test_perfedavg_uses_separate_batch_for_each_gradient(make_trial, assert_same, variant, parts):
    """Client 5 has 16 samples. FedAvg takes 4 steps in an epoch, but steps with several batches are only 2."""
    trial = make_trial(PerFedAvg(alpha=0.3, variant=variant), local_epochs=1)
    w = trial.server["model"]
    for epoch in range(parts):
        order = trial.clients.shuffle_indices(5, 1, "batches", epoch)
        for begin in range(0, 16, 4 * parts):
            here = order[begin : begin + 4 * parts]
            batches = [here[part::parts] for part in range(parts)]
            v = compute_gradient(trial, w - 0.3 * compute_gradient(trial, w, batches[0]), batches[1])
            if variant == "hessian-free":
                ahead, behind = (compute_gradient(trial, w + sign * 0.001 * v, batches[2]) for sign in (1, -1))
                v = v - 0.3 * ((ahead - behind) / 0.002)
            w = w - 0.05 * v
    assert_same(trial.train([5])[0].upload["model"], w, tolerance=1e-10)


def test_perfedavg_empty_batch_part_reuses_first_part(make_trial, assert_same):
    """Client 0 has a single sample."""
    apart, same = (
        make_trial(PerFedAvg(alpha=0.3, same_batch=same_batch), local_epochs=epochs).train([0])[0].upload
        for same_batch, epochs in ((False, 1), (True, 2))
    )
    assert_same(apart, same, tolerance=1e-15)


@pytest.mark.parametrize("width", [None, 3])
def test_perfedavg_evaluates_model_after_one_personal_step(make_trial, width):
    """The step starts at the received or the trained model and uses a batch of the client's data."""
    trial = make_trial(PerFedAvg(alpha=0.5), width=width).run(2)

    def make_personal_model(model, client, epoch):
        batch = trial.clients.shuffle_indices(client, 3, "personal", epoch)[:4]
        return model - 0.5 * compute_gradient(trial, model, batch)

    def compute_loss(model, client):
        x, y = trial.clients.gather_samples(trial.clients.test[client])
        return float(cross_entropy(trial.net(model, x), y, reduction="sum"))

    received = trial.train([3, 5], ("local",), "receive")
    trained = trial.train([3, 5], ("local",))
    for before, after in zip(received, trained, strict=True):
        client, server = before.client, trial.server["model"]
        assert before.scores["local"].loss == pytest.approx(
            compute_loss(make_personal_model(server, client, 0), client), abs=1e-12
        )
        wanted = compute_loss(make_personal_model(after.upload["model"], client, 1), client)
        assert after.scores["local"].loss == pytest.approx(wanted, abs=1e-12)
    assert trial.algorithm.global_model(trial.server) is trial.server["model"], (
        "the evaluated global model is the server's model"
    )


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_perfedavg_ignores_optimizer_and_momentum(make_trial, assert_same, settings):
    found, wanted = (make_trial(PerFedAvg(), **changes).run(2) for changes in (settings, {}))
    assert_same(found.server, wanted.server)


def test_perfedavg_variants_differ_from_each_other_and_fedavg(make_trial):
    """The second-order term changes the model."""
    algorithms = PerFedAvg(alpha=0.3), PerFedAvg(alpha=0.3, variant="hessian-free"), FedAvg()
    first, free, plain = (make_trial(algorithm, participation=1.0).run(3).server["model"] for algorithm in algorithms)
    assert min((first - free).norm(), (first - plain).norm(), (free - plain).norm()) > 1e-3


def test_perfedavg_fits_better_than_fedavg_after_personal_step(make_trial):
    """Both algorithms take one personal step on all training data of a client."""
    losses = []
    for algorithm in (PerFedAvg(alpha=1.0, same_batch=True), PerFedAvg(alpha=0.0, same_batch=True)):
        trial = make_trial(algorithm, participation=1.0, learning_rate=0.05).run(10)
        models = [trial.server["model"]] * 8
        for client in range(8):
            models[client] = models[client] - 1.0 * compute_gradient(trial, models[client], trial.clients.train[client])
        data = [trial.clients.gather_samples(indices) for indices in trial.clients.train]
        losses.append(
            sum(float(cross_entropy(trial.net(model, x), y)) for model, (x, y) in zip(models, data, strict=True))
        )
    assert losses[0] < losses[1]
