import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feduv import FedUV, compute_uniformity_loss, compute_variance_deficit
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import make_dead_initial_model

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"variance": 0.0, "uniformity": 0.0},
)

f64 = torch.float64
TERMS = {"V": compute_variance_deficit, "U": compute_uniformity_loss}


def make_batch(values, real=None):
    """Make a batch with this number of samples. With ``real``, samples from this index on are padding."""
    x = torch.zeros(len(values), 1, dtype=f64)
    mask = None if real is None else (torch.arange(len(values)) < real).to(f64)
    return Batch(x, torch.zeros(len(values), dtype=torch.long), mask)


def pad_values(values, rows=4):
    """Append rows of other numbers to the values. Return them and their batch."""
    noise = torch.randn(rows, values.shape[1], generator=torch.Generator().manual_seed(9), dtype=f64)
    whole = torch.cat([values, noise.softmax(-1)])
    return whole, make_batch(whole, real=len(values))


def make_points(*values):
    return torch.tensor([[float(value)] for value in values], dtype=f64)


def compute_value_and_gradient(term, values, batch):
    values = values.clone().requires_grad_()
    value = term(values, batch)
    return value.detach(), torch.autograd.grad(value, values)[0]


@pytest.mark.parametrize(("classes", "value"), [(2, 0.707107), (10, 0.316228), (100, 0.1)])
def test_variance_deficit_of_constant_predictions_matches_exact_value(classes, value):
    """V is the standard deviation of a column of the identity, 1 / sqrt(C), and its gradient is 0."""
    for share in (1 / classes, 0.3):
        p = torch.full((7, classes), share, dtype=f64)
        found, gradient = compute_value_and_gradient(compute_variance_deficit, p, make_batch(p))
        assert float(found) == pytest.approx(value, abs=1e-6)
        assert not gradient.any()
    assert float(torch.eye(classes, dtype=f64).std(0).mean()) == pytest.approx(value, abs=1e-6)


def test_variance_deficit_of_one_hot_predictions_matches_exact_values():
    """V is 0 if each class occurs once. It is larger if each class occurs twice, because the deviation is unbiased."""
    once = torch.eye(10, dtype=f64)
    assert float(compute_variance_deficit(once, make_batch(once))) == pytest.approx(0, abs=1e-15)
    twice = once.repeat(2, 1)
    assert float(compute_variance_deficit(twice, make_batch(twice))) == pytest.approx(0.00843, abs=1e-5)


@pytest.mark.parametrize("distance", [1e-3, 1.0, 50.0])
def test_uniformity_loss_of_two_points_ignores_their_distance(distance):
    """U is 1 / e, and its gradient is 0 because the median moves with the distance."""
    z = make_points(3.0, 3.0 + distance)
    found, gradient = compute_value_and_gradient(compute_uniformity_loss, z, make_batch(z))
    assert float(found) == pytest.approx(0.367879, abs=1e-6)
    assert gradient.abs().max() <= 1e-12 / distance


def test_uniformity_loss_uses_lower_median():
    """The median of 1, 4, 9, 16, 36, and 49 is 9."""
    z = make_points(0, 1, 3, 7)
    wanted = sum(math.exp(-square / 9) for square in (1, 4, 9, 16, 36, 49)) / 6
    assert float(compute_uniformity_loss(z, make_batch(z))) == pytest.approx(wanted, rel=1e-14)


def test_uniformity_loss_median_ignores_zero_distances():
    z = make_points(0, 0, 0, 2)
    assert float(compute_uniformity_loss(z, make_batch(z))) == pytest.approx((3 + 3 / math.e) / 6, rel=1e-14)


def test_uniformity_loss_with_tied_median_ignores_padding(assert_same):
    """The gradient through the median belongs to one pair, with and without padding."""
    z = make_points(0, 2, 4, 5, 7, 9)  # two of the fifteen pairs have the median distance 4
    _, alone = compute_value_and_gradient(compute_uniformity_loss, z, make_batch(z))
    _, padding = compute_value_and_gradient(compute_uniformity_loss, *pad_values(z))
    assert alone.abs().max() > 0.01
    assert_same(padding[: len(z)], alone, tolerance=1e-15)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 12])
def test_feduv_terms_match_pytorch(assert_same, size, masked):
    """Compare values and gradients, including the gradient through the median. Padding has no effect."""
    values = torch.randn(size, 5, generator=torch.Generator().manual_seed(size), dtype=f64).softmax(-1)

    def compute_variance(p, _):
        return (5**-0.5 - p.std(0)).clamp(min=0).mean()

    def compute_uniformity(z, _):
        squares = torch.pdist(z).square()
        return (-squares / squares[squares > 0].median()).exp().mean()

    for term, plain in ((compute_variance_deficit, compute_variance), (compute_uniformity_loss, compute_uniformity)):
        wanted, theirs = compute_value_and_gradient(plain, values, None)
        found, ours = compute_value_and_gradient(
            term, *(pad_values(values) if masked else (values, make_batch(values)))
        )
        assert_same(found, wanted, tolerance=1e-14)
        assert_same(ours[:size], theirs, tolerance=1e-13)
        assert not ours[size:].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("term", TERMS)
def test_feduv_terms_of_one_sample_are_0(term, masked):
    values = torch.tensor([[0.2, 0.5, 0.3]], dtype=f64)
    found, gradient = compute_value_and_gradient(
        TERMS[term], *(pad_values(values) if masked else (values, make_batch(values)))
    )
    assert float(found) == 0
    assert not gradient.any()


@pytest.mark.parametrize("masked", [False, True])
def test_uniformity_loss_of_equal_features_is_0(masked):
    z = torch.full((7, 3), 0.3, dtype=f64)
    found, gradient = compute_value_and_gradient(
        compute_uniformity_loss, *(pad_values(z) if masked else (z, make_batch(z)))
    )
    assert float(found) == 0
    assert not gradient.any()


@pytest.mark.parametrize("term", TERMS)
def test_feduv_terms_of_padding_only_are_finite(term):
    values = torch.full((4, 3), 0.3, dtype=f64)
    found, gradient = compute_value_and_gradient(TERMS[term], values, make_batch(values, real=0))
    assert found.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("variance", "strength"), [(2.5, 2.5), (0.7, 0.7), ("C/4", 1.0)])
def test_feduv_loss_adds_both_terms(make_trial, variance, strength):
    """With four classes, C/4 is 1."""
    trial = make_trial(FedUV(variance=variance, uniformity=0.3))
    client, (x, y) = trial.start(7), trial.clients.gather_samples(trial.clients.train[7])
    batch, logits = Batch(x, y), trial.net(client["model"], x)
    v, u = (
        compute_variance_deficit(logits.softmax(-1), batch),
        compute_uniformity_loss(trial.net.features(client["model"], x), batch),
    )
    wanted = cross_entropy(logits, y) + strength * v + 0.3 * u
    assert float(trial.algorithm.loss(client, batch)) == pytest.approx(float(wanted), rel=1e-14)
    assert v > 0.1
    assert u > 0.1


def test_feduv_rejects_variance_c_over_5():
    with pytest.raises(SettingsError, match=r"algorithms.variance: 'C/5' can't be used"):
        registry.build_component(component.ALGORITHM, "feduv", {"variance": "C/5"})


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_feduv_without_both_terms_equals_fedavg_bit_for_bit(make_trial, assert_same, settings):
    algorithms = (FedUV(variance=0.0, uniformity=0.0), FedAvg())
    off, plain = (make_trial(algorithm, **settings).run(3) for algorithm in algorithms)
    assert_same(off.server, plain.server)


@pytest.mark.parametrize("width", [None, 3])
def test_feduv_with_zero_features_equals_fedavg(make_trial, width):
    """Every ReLU of the body is off, so all features and predictions of a batch are equal."""
    settings = {"width": width, "initial_model": make_dead_initial_model(FedUV()), "participation": 1.0}
    uv, plain = (make_trial(algorithm, **settings).run(2) for algorithm in (FedUV(), FedAvg()))
    assert torch.equal(uv.server["model"].flat(), plain.server["model"].flat())


def test_feduv_with_batch_size_1_equals_fedavg(make_trial, assert_same):
    """A batch of one sample has neither a deviation nor a pair."""
    uv, plain = (make_trial(algorithm, batch_size=1).run(2) for algorithm in (FedUV(), FedAvg()))
    assert_same(uv.server, plain.server)


@pytest.mark.parametrize(("parameters", "term"), [({"uniformity": 0.0}, "V"), ({"variance": 0.0}, "U")])
def test_feduv_training_lowers_each_term(make_trial, parameters, term):
    """On the batch that a client trained on, each term is lower than after FedAvg's training."""
    found = []
    for algorithm in (FedAvg(), FedUV(**parameters)):
        trial = make_trial(algorithm, participation=1.0, local_epochs=20, batch_size=20)
        found.append([measure_term(trial, outcome, term) for outcome in trial.train()[1:]])  # the first has one sample
    assert all(with_term < without for without, with_term in zip(*found, strict=True))


def measure_term(trial, outcome, term):
    x = trial.clients.gather_samples(trial.clients.train[outcome.client])[0]
    model = outcome.upload["model"]
    values = trial.net(model, x).softmax(-1) if term == "V" else trial.net.features(model, x)
    return float(TERMS[term](values, make_batch(values)))
