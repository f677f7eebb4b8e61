import dataclasses
import math

import numpy as np
import ot
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.adaptive_loss import compute_divergence_gradient
from fedpipe.algorithms.barycenter import compute_barycenter, compute_exact_distances, compute_sinkhorn_distances
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddual import FedDUAL
from fedpipe.algorithms.passes import Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network
from fedpipe.planning.study_facts import build_study_facts
from fedpipe.settings.parser import parse_params
from fedpipe.settings.transforms import Transforms
from tests import small_studies as studies
from tests.algorithms.expected import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all)), ({"vector": "gradient"}, lambda n: (n.all, n.all + n.head))],
    centralized={"adaptive_loss": False},
    parameters={"epsilon": 0.1},  # at 1e-5 the kernel multiplies differences of distances by 1e5
    no_models=frozenset({"effective"}),
)

f64 = torch.float64


class BetaUploadingFedDUAL(FedDUAL):
    """FedDUAL whose clients upload their last beta."""

    def upload(self, client):
        return super().upload(client) | {"beta": client["beta"]}


def make_updates(*rows):
    return torch.tensor(rows, dtype=f64)


def compute_accuracy(trial, model, client):
    x, y = trial.clients.gather_samples(trial.clients.train[client])
    return float((trial.net(model, x).argmax(-1) == y).double().mean())


# -- the barycenter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iterations", "value"), [(1, 1.127668), (2, 0.877757), (3, 0.789144)])
def test_barycenter_iterates_match_exact_values(iterations, value):
    found, _ = compute_barycenter(make_updates([0, 0, 0], [1, 1, 1], [4, 4, 4]), epsilon=1.0, iterations=iterations)
    assert found.tolist() == pytest.approx([value] * 3, abs=1e-6)


def test_sinkhorn_distances_match_limits_of_regularization():
    b, update = make_updates([0, 1, 2, 3])[0], make_updates([0.5, 1.5, 2.5, 3.5])
    assert compute_exact_distances(b, update).tolist() == [0.5]
    assert compute_sinkhorn_distances(b, update, 0.002).tolist() == pytest.approx([0.5], abs=1e-6)
    independent = float((b[:, None] - update[0]).abs().mean())
    assert compute_sinkhorn_distances(b, update, 1e4).tolist() == pytest.approx([independent], rel=1e-4)


def test_sinkhorn_distance_of_two_values_matches_closed_form():
    """The plan of two values has the entries s and 1/2 - s. Here s is proportional to the square root of the kernel."""
    k = math.exp(-1 / 0.3)
    share = k / (1 + k)  # the diagonal plan has cost 0, the other plan cost 1
    distance = compute_sinkhorn_distances(make_updates([0, 1])[0], make_updates([0, 1], [0, 10]), 0.3)
    assert distance[0].item() == pytest.approx(share, abs=1e-9)
    assert distance.dtype == f64


def test_sinkhorn_distance_of_equal_vectors_is_0_in_float32():
    zeros = torch.zeros(2, 3)
    assert compute_sinkhorn_distances(zeros[0], zeros, 0.05).tolist() == [0, 0]


def test_sinkhorn_distances_exceed_exact_distances():
    generator = torch.Generator().manual_seed(0)
    b, vectors = (torch.randn(shape, generator=generator, dtype=f64) for shape in ((30,), (4, 30)))
    exact, sinkhorn = (FedDUAL(distance=distance).compute_distances(b, vectors) for distance in ("exact", "sinkhorn"))
    assert (exact < sinkhorn).all()
    assert (sinkhorn < exact + 0.3).all()


def test_sinkhorn_rejects_large_tensors():
    params = studies.settings(("feddual",), algorithms={"feddual": {"distance": "sinkhorn", "layers": 2}})
    large = parse_params({**params, "model": {"name": "mlp", "hidden": [200]}})
    feddual = large.algorithms["feddual"].algorithm
    with pytest.raises(SettingsError, match=r"^algorithms\.feddual\.distance: 'sinkhorn' .* 12,800 values of body"):
        feddual.warnings(build_study_facts(feddual, large), "algorithms.feddual")


def test_barycenter_with_paper_epsilon_is_vector_nearest_to_mean():
    found, weights = compute_barycenter(make_updates([0, 0], [1, 1], [4, 4]), epsilon=1e-5, iterations=150)
    assert found.tolist() == [1, 1]
    assert weights.tolist() == [0, 1, 0]


def test_barycenter_averages_ties_if_kernel_underflows():
    found, weights = compute_barycenter(make_updates([0, 0], [2, 2]), epsilon=1e-5, iterations=150)
    assert found.tolist() == [1, 1]
    assert weights.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("widths", "share"), [(20, 0.9537), (23, 0.5065), (25, 0.1219), (30, 9.35e-4), (1e5, 0)])
def test_barycenter_in_code_mode_vanishes_with_kernel(widths, share):
    """Both vectors are ``widths`` epsilon from their mean."""
    far = 2 * widths * 1e-5
    found, weights = compute_barycenter(
        make_updates([0, 0], [far, far]), 1e-5, iterations=1, has_underflowing_kernel=True
    )
    assert found.tolist() == pytest.approx([share * far / 2] * 2, rel=5e-4, abs=1e-15)
    assert weights.tolist() == pytest.approx([0.5, 0.5])


def test_barycenter_of_equal_vectors_equals_each_vector():
    found, weights = compute_barycenter(make_updates([3, -1, 2]).repeat(4, 1), epsilon=1e-5, iterations=150)
    assert found.tolist() == pytest.approx([3, -1, 2], abs=1e-15)
    assert weights.tolist() == pytest.approx([0.25] * 4)


def test_barycenter_of_one_vector_equals_vector():
    found, _ = compute_barycenter(make_updates([3, -1, 2]), epsilon=1e-5, iterations=150)
    assert found.tolist() == [3, -1, 2]


def test_barycenter_distances_ignore_positions():
    """All three vectors are equally far from their mean (2/3, 1/3). By positions, (1, 0) would be nearer."""
    _, weights = compute_barycenter(make_updates([1, 0], [1, 0], [0, 1]), epsilon=1e-2, iterations=1)
    assert weights.tolist() == pytest.approx([1 / 3] * 3, abs=1e-13)


def test_barycenter_with_wide_kernel_equals_mean():
    vectors = torch.randn(5, 7, dtype=f64, generator=torch.Generator().manual_seed(0))
    found, _ = compute_barycenter(vectors, epsilon=1e14, iterations=150)
    assert torch.allclose(found, vectors.mean(0), rtol=1e-12, atol=1e-13)


def test_barycenter_weights_match_pot_distances():
    """The authors' code calls POT."""
    vectors = torch.randn(4, 50, dtype=f64, generator=torch.Generator().manual_seed(1))
    distances = ot.wasserstein_1d(vectors.mean(0).unsqueeze(1).expand(-1, 4), vectors.T, p=1)
    _, weights = compute_barycenter(vectors, epsilon=0.01, iterations=1)
    assert weights.tolist() == pytest.approx((-distances / 0.01).softmax(0).tolist(), rel=1e-10)


@pytest.mark.parametrize("epsilon", [1e-2, 0.1, 1.0])
def test_barycenter_iterations_match_equations(epsilon):
    vectors = np.random.default_rng(3).normal(size=(4, 6))
    b = vectors.mean(0)
    for _ in range(5):
        distances = np.abs(np.sort(vectors, axis=1) - np.sort(b)).mean(1)
        kernel = np.exp(-(distances - distances.min()) / epsilon)
        b = kernel @ vectors / kernel.sum()
    found, weights = compute_barycenter(torch.as_tensor(vectors), epsilon, iterations=5)
    assert found.tolist() == pytest.approx(b.tolist(), abs=1e-12)
    assert weights.tolist() == pytest.approx((kernel / kernel.sum()).tolist(), abs=1e-12)


def test_feddual_server_moves_output_layer_by_barycenters(make_trial):
    """The uploads differ from the server's head by 0, 1, and 4, and their bodies are 1, 2, and 6.

    Sample counts have no effect.
    """
    trial = make_trial(FedDUAL(epsilon=1.0, iterations=3))
    theta = trial.server["model"]

    def shift_parameters(body, head):
        return Tensors(
            (n, torch.full_like(v, body) if n in trial.net.body_names else v - head) for n, v in theta.items()
        )

    states = [{"model": shift_parameters(body, head)} for body, head in ((1, 0), (2, 1), (6, 4))]
    state = trial.aggregate(Uploads([0, 1, 2], [1, 5, 20], states))
    for name, value in state["model"].items():
        if name in trial.net.body_names:
            assert torch.allclose(value, torch.full_like(value, 3), rtol=1e-14)
        else:
            assert torch.allclose(theta[name] - value, torch.full_like(value, 0.789144), rtol=0, atol=1e-6)


def test_feddual_records_effective_number_of_clients(make_trial):
    trial = make_trial(FedDUAL(), participation=1.0)
    assert {key: float(value) for key, value in trial.algorithm.metrics(trial.server).items()} == {
        "effective_clients.head.weight": 8,
        "effective_clients.head.bias": 8,
    }
    trial.run()
    winner = trial.server["model"]["head.weight"]
    found = trial.algorithm.metrics(trial.server)
    assert float(found["effective_clients.head.weight"]) == pytest.approx(1, abs=1e-6)
    assert any(torch.allclose(winner, outcome.upload["model"]["head.weight"], atol=1e-6) for outcome in trial.outcomes)
    equal = make_trial(FedDUAL(epsilon=1e14), participation=1.0).run()
    assert float(equal.algorithm.metrics(equal.server)["effective_clients.head.bias"]) == pytest.approx(8, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (("head",), ["head.weight", "head.bias"]),
        (("body.1",), ["body.1.weight", "body.1.bias"]),
        (("head", "body.1"), ["body.1.weight", "body.1.bias", "head.weight", "head.bias"]),
    ],
)
def test_feddual_applies_barycenter_to_layers_by_name(make_trial, assert_same, layers, names):
    """The server combines these layers by the barycenter and averages all others."""
    trial = make_trial(FedDUAL(layers=layers, epsilon=0.01))
    assert list(trial.algorithm.barycenter_parameter_names) == names
    outcomes = trial.train()
    found = trial.aggregate(trial.collect_uploads(outcomes))["model"]
    models = [outcome.upload["model"] for outcome in outcomes]
    for name, before in trial.server["model"].items():
        if name in names:
            moved, _ = compute_barycenter(
                torch.stack([(before - model[name]).flatten() for model in models]), 0.01, 150
            )
            assert_same(found[name], before - moved.reshape(before.shape))
        else:
            assert_same(found[name], torch.stack([model[name] for model in models]).mean(0), tolerance=1e-12)


def test_feddual_rejects_layers_missing_from_network():
    def check_layers(**parameters):
        params = studies.settings(("feddual",), algorithms={"feddual": parameters})
        found = parse_params(params)
        feddual = found.algorithms["feddual"].algorithm
        return feddual.warnings(build_study_facts(feddual, found), "algorithms.feddual")

    assert check_layers(layers=["body.1"]) == ()
    with pytest.raises(SettingsError, match=r"^algorithms\.feddual\.layers: .* 'body\.0'.*'body\.1'"):
        check_layers(layers=["body.0"])
    with pytest.raises(SettingsError, match=r"algorithms\.feddual\.layers"):
        check_layers(layers=[])


@pytest.mark.parametrize(("layers", "count"), [(1, 2), (2, 4)])
def test_feddual_counts_layers_from_output(make_trial, layers, count):
    trial = make_trial(FedDUAL(layers=layers))
    assert trial.algorithm.barycenter_parameter_names == trial.net.names[-count:]
    assert tuple(trial.run().server["effective"]) == trial.net.names[-count:]


# -- reductions ------------------------------------------------------------------------------------------------------


def test_feddual_without_both_parts_equals_uniform_fedavg(make_trial, assert_same):
    neither = make_trial(FedDUAL(adaptive_loss=False, dynamic_aggregation=False), momentum=0.9).run(3)
    plain = make_trial(FedAvg(), weighting="uniform", momentum=0.9).run(3)
    assert_same(neither.server["model"], plain.server["model"])


def test_feddual_with_wide_kernel_equals_uniform_fedavg(make_trial, assert_same):
    wide = make_trial(FedDUAL(adaptive_loss=False, epsilon=1e15)).run(3)
    plain = make_trial(FedAvg(), weighting="uniform").run(3)
    assert_same(wide.server["model"], plain.server["model"], tolerance=1e-12)


def test_feddual_first_step_equals_fedavg_at_half_rate(make_trial, assert_same):
    """In the first step, beta is 1/2 and the divergence has no gradient."""
    settings = {"local_epochs": 1, "batch_size": 100}
    dual = make_trial(FedDUAL(dynamic_aggregation=False), **settings).train()
    plain = make_trial(FedAvg(), learning_rate=0.025, **settings).train()
    for ours, theirs in zip(dual, plain, strict=True):
        assert_same(ours.upload["model"], theirs.upload["model"], tolerance=1e-15)


# -- the adaptive loss -----------------------------------------------------------------------------------------------


def compute_divergence(local, other):
    """Compute Eq. 3 and 4 of the paper for two vectors of weights."""
    p, q = local.softmax(0), other.softmax(0)
    return (p * (p / q).log()).sum()


def differentiate_divergence(local, other):
    """Compute the gradient with respect to the local weights by autograd."""
    (found,) = torch.autograd.grad(compute_divergence(leaf := local.clone().requires_grad_(), other), leaf)
    return found


def test_divergence_gradient_of_two_weights_matches_exact_values():
    """The softmax is 2 : 1, and the anchor's softmax is even. The gradient is 2/9 log 2, away from the anchor."""
    local = torch.tensor([math.log(2), 0], dtype=f64)
    assert float(compute_divergence(local, local * 0)) == pytest.approx(0.0566331, abs=1e-7)
    found = compute_divergence_gradient(local, local * 0)
    assert found.tolist() == pytest.approx([2 / 9 * math.log(2), -2 / 9 * math.log(2)], rel=1e-14)


def test_divergence_gradient_of_equal_models_is_0():
    model = torch.tensor([1e3, -5, 0, 2, 7], dtype=f64)
    assert compute_divergence_gradient(model, model).tolist() == [0] * 5


def test_divergence_gradient_ignores_constant_shift(make_trial):
    trial = make_trial("feddual")
    local, other = trial.initial_model(0).flat(), trial.initial_model(1).flat()
    shifted = compute_divergence_gradient(local + 1000.0, other - 3.0)
    assert torch.allclose(shifted, compute_divergence_gradient(local, other), rtol=1e-9, atol=1e-14)


def test_divergence_gradient_matches_autograd_and_formula(make_trial):
    """The formula of the spec is p_i (log p_i - log q_i - D)."""
    trial = make_trial("feddual")
    local, other = trial.initial_model(0).flat(), trial.initial_model(1).flat()
    found, log_p, log_q = compute_divergence_gradient(local, other), local.log_softmax(0), other.log_softmax(0)
    assert torch.allclose(
        found, log_p.exp() * (log_p - log_q - compute_divergence(local, other)), rtol=1e-10, atol=1e-16
    )
    assert torch.allclose(found, differentiate_divergence(local, other), rtol=1e-10, atol=1e-16)
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("width", [None, 3])
def test_feddual_measures_beta_before_each_epoch(make_trial, width):
    """Beta is 1/2 in the first epoch.

    In the second epoch, it depends on the accuracies of the model after one epoch and of the global model.
    """
    settings = {"learning_rate": 0.5, "participation": 1.0, "width": width}
    one = make_trial(BetaUploadingFedDUAL(), local_epochs=1, **settings)
    two = make_trial(BetaUploadingFedDUAL(), local_epochs=2, **settings)
    differing = 0
    for early, late in zip(one.train(), two.train(), strict=True):
        gap = compute_accuracy(one, early.upload["model"], early.client) - compute_accuracy(
            one, one.server["model"], early.client
        )
        assert float(early.upload["beta"]) == 0.5
        assert float(late.upload["beta"]) == pytest.approx(1 / (1 + math.exp(-gap)), abs=1e-14)
        differing += gap != 0
    assert differing > 2


class FedDUALEquation(FedDUAL):
    """FedDUAL that differentiates Eq. 5 of the paper by autograd, for the weights in ``NAMES``."""

    NAMES = ("body.1.weight", "body.1.bias", "head.weight", "head.bias")

    def local_passes(self):
        return [*map(self.replace_loss, super().local_passes())]

    def finetune_passes(self, epochs):
        return [*map(self.replace_loss, super().finetune_passes(epochs))]

    def replace_loss(self, listed):
        return dataclasses.replace(listed, loss=self.compute_eq_5, step=None) if isinstance(listed, Train) else listed

    def compute_eq_5(self, client, batch):
        weights = torch.cat([client["model"][name].flatten() for name in self.NAMES])
        return (1 - client["beta"]) * self.risk(client, batch) + client["beta"] * compute_divergence(
            weights, client["anchor"]
        )


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_feddual_steps_follow_gradient_of_equation_5(make_trial, assert_same, settings, width):
    """p and q contain only trained weights, without a frozen layer and running statistics."""

    def build_frozen_network():
        body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        body[0].requires_grad_(False)
        return Network(body, nn.Linear(6, 4))

    class FedDUALWithBeta1(FedDUAL):
        """FedDUAL with beta = 1, so that only the divergence has a gradient."""

        def store_beta(self, client, sums):
            return client | {"beta": torch.ones_like(client["beta"])}

    class FedDUALEquationWithBeta1(FedDUALWithBeta1, FedDUALEquation):
        pass

    same = {"local_epochs": 3, "width": width, **settings}
    for mine, theirs in ((FedDUAL, FedDUALEquation), (FedDUALWithBeta1, FedDUALEquationWithBeta1)):
        ours, wanted = (
            make_trial(kind(), build_frozen_network, learning_rate=1.0, **same).train([3]) for kind in (mine, theirs)
        )
        assert_same(ours[0].upload["model"], wanted[0].upload["model"], tolerance=1e-10)
    tuned, wanted = (
        make_trial(kind(), build_frozen_network, **same).run(1, [3]).train([3], ["local"], "finetune")[0]
        for kind in (FedDUAL, FedDUALEquation)
    )
    assert tuned.scores["local"].loss == pytest.approx(wanted.scores["local"].loss, rel=1e-10)


@pytest.mark.parametrize("width", [None, 3])
def test_feddual_code_mode_trains_on_half_risk(make_trial, assert_same, width):
    """Training equals uniform FedAvg at half the rate."""
    code = make_trial(FedDUAL(mode="code", dynamic_aggregation=False), width=width, learning_rate=0.1).run(3)
    plain = make_trial(FedAvg(), width=width, learning_rate=0.05, weighting="uniform").run(3)
    assert_same(code.server["model"], plain.server["model"], tolerance=1e-14)


def test_feddual_code_mode_freezes_output_layer(make_trial, assert_same):
    """At the code's epsilon, all gradients are too far from their mean. The barycenter is then 0."""
    trial = make_trial(FedDUAL(mode="code"), learning_rate=0.05)
    before = trial.server["model"]
    trial.run(1, ids=[3, 5, 7])
    after, (head, body) = trial.server["model"], (trial.net.head_names, trial.net.body_names)
    assert_same(after.only(head), before.only(head))
    assert_same(after.only(body), trial.collect_uploads(trial.outcomes).with_equal_weights().mean("model").only(body))
    assert all(not torch.equal(after[name], before[name]) for name in body)
    log_domain = make_trial(FedDUAL(vector="gradient"), learning_rate=0.05).run(1, ids=[3, 5, 7]).server["model"]
    assert (log_domain.only(head) - before.only(head)).norm() > 0.1


# -- reading G -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 3])
def test_feddual_gradient_is_of_summed_loss_at_trained_model(make_trial, width):
    trial = make_trial(FedDUAL(vector="gradient"), width=width)
    for outcome in trial.train([0, 3, 5]):
        leaves = outcome.upload["model"].map(lambda value: value.clone().requires_grad_())
        x, y = trial.clients.gather_samples(trial.clients.train[outcome.client])
        risk = cross_entropy(trial.net(leaves, x), y, reduction="sum")
        last = ("head.weight", "head.bias")
        wanted = torch.autograd.grad(risk, [leaves[name] for name in last])
        assert tuple(outcome.upload["gradient"]) == last
        for name, value in zip(last, wanted, strict=True):
            assert torch.allclose(outcome.upload["gradient"][name], value, rtol=1e-12, atol=1e-14)


def test_feddual_reading_g_moves_head_by_barycenter_of_gradients(make_trial):
    trial = make_trial(FedDUAL(vector="gradient", epsilon=0.3))
    uploads = trial.collect_uploads(trial.train())
    state = trial.aggregate(uploads)
    gradients = torch.stack([upload["gradient"]["head.weight"].flatten() for _, _, upload in uploads])
    wanted, _ = compute_barycenter(gradients, 0.3, 150)
    moved = trial.server["model"]["head.weight"] - state["model"]["head.weight"]
    assert torch.allclose(moved.flatten(), wanted, rtol=1e-12, atol=1e-14)


def test_feddual_readings_g_and_p_train_equal_models(make_trial, assert_same):
    """The pass that sums gradients does not change the model."""
    by_gradient, by_update = (make_trial(FedDUAL(vector=vector)).train() for vector in ("gradient", "pseudo-gradient"))
    for ours, theirs in zip(by_gradient, by_update, strict=True):
        assert_same(ours.upload["model"], theirs.upload["model"])


def build_varying_network(normalized):
    """Build a network with BatchNorm or dropout."""
    layers = {
        "norm": [nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU()],
        "dropout": [nn.ReLU(), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Dropout(0.5)],
    }
    return Network(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers[normalized]), nn.Linear(6, 4))


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize(("kind", "buffers"), [("norm", "average"), ("norm", "keep"), ("dropout", "average")])
def test_feddual_measures_gradient_in_evaluation_mode(make_clients, make_trial, assert_same, kind, buffers, width):
    """The gradient equals that of PyTorch's module in evaluation mode on images without augmentation.

    Clients that upload the gradient upload the same models and running statistics as clients that do not.
    """

    def run_trial(vector):
        clients = make_clients((1, 4, 4), transforms=Transforms(mean=(0.1,), std=(2.0,), crop=1, flip=True))
        settings = {"participation": 1.0, "learning_rate": 0.2, "width": width, "buffers": buffers}
        return make_trial(FedDUAL(vector=vector), lambda: build_varying_network(kind), clients, **settings).run()

    made, other = run_trial("gradient"), run_trial("pseudo-gradient")
    differing = 0
    for outcome, without in zip(made.outcomes, other.outcomes, strict=True):
        assert_same(outcome.upload["model"], without.upload["model"])
        assert_same(outcome.kept_state, without.kept_state)
        module = build_varying_network(kind).double()
        module.load_state_dict({**outcome.upload["model"], **outcome.kept_state.get("buffers", {})}, strict=False)
        x, y = made.clients.gather_samples(made.clients.train[outcome.client])

        def compute_gradient(module=module, x=x, y=y):
            risk = cross_entropy(module(x), y, reduction="sum")
            names = ("head.weight", "head.bias")
            return Tensors(zip(names, torch.autograd.grad(risk, [*module.head.parameters()]), strict=True))

        at_rest = compute_gradient(module.eval())
        assert_same(outcome.upload["gradient"], at_rest, tolerance=1e-10)
        if len(y) > 1:  # PyTorch cannot normalize a single sample
            differing += float((compute_gradient(module.train()) - at_rest).norm() / at_rest.norm()) > 0.1
    assert differing >= 5, "the gradient in training mode is different"


# -- code mode -------------------------------------------------------------------------------------------------------


def build_feddual(**parameters):
    params = parse_params({"algorithms": {"feddual": parameters}, "study": {"algorithms": ["feddual"]}})
    return params.algorithms["feddual"].algorithm


def test_feddual_modes_set_their_default_parameters():
    assert build_feddual() == FedDUAL(mode="paper", vector="pseudo-gradient", iterations=150, layers=1)
    assert build_feddual(mode="code") == FedDUAL(mode="code", vector="gradient", iterations=1000, layers=1)
    assert build_feddual(mode="code", vector="gradient", epsilon=1e-4, adaptive_loss=False).iterations == 1000
    assert build_feddual(vector="gradient", iterations=7, layers=2).iterations == 7


@pytest.mark.parametrize(
    ("parameters", "conflicts"),
    [
        ({"vector": "pseudo-gradient"}, "vector: pseudo-gradient"),
        ({"iterations": 150}, "iterations: 150"),
        ({"distance": "sinkhorn"}, "distance: sinkhorn"),
        ({"iterations": 999, "layers": 2}, "iterations: 999, layers: 2"),
    ],
)
def test_feddual_code_mode_rejects_conflicting_parameters(parameters, conflicts):
    with pytest.raises(SettingsError) as error:
        build_feddual(mode="code", **parameters)
    message = str(error.value)
    assert message.startswith(f"algorithms.feddual: {conflicts} ")
    assert "mode: code" in message
    assert "vector: gradient, iterations: 1000, layers: 1" in message
    assert message.endswith(f" {', '.join(parameters)}.")
