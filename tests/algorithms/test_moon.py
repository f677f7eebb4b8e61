import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy, logsigmoid

from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.moon import MOON
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Network
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches, make_dead_initial_model

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={"mu": 0.0},
)

f64 = torch.float64


def make_body(*rows):
    return Tensors({"body.weight": torch.tensor([[float(row)] for row in rows], dtype=f64)})


@pytest.fixture
def make_linear(make_trial):
    """Make MOON on a linear body from one input to two features, with a head that has no risk."""

    def make(**parameters):
        net = FunctionalNetwork(lambda: Network(nn.Linear(1, 2, bias=False), nn.Linear(2, 1)), f64)
        return MOON(**parameters).bind(net, make_trial("fedavg").algorithm.federation)

    return make


def make_client(model, other, previous):
    head = {"head.weight": torch.zeros(1, 2, dtype=f64), "head.bias": torch.zeros(1, dtype=f64)}
    return {"model": model | head, "global": other, "previous": previous, "is_first": torch.zeros((), dtype=f64)}


BATCH = Batch(torch.ones(3, 1, dtype=f64), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("previous", "temperature", "value"),
    [
        ((1, 0), 0.5, math.log(2)),
        ((0, 7), 0.5, 0.126928),
        ((-1, 0), 0.5, math.log(1 + math.exp(-4))),
        ((0, 1), 1.0, math.log(1 + math.exp(-1))),
    ],
)
def test_moon_contrastive_loss_matches_exact_values(make_linear, previous, temperature, value):
    """The client's features are (2, 0) and the global model's (5, 0). The cosine is 1 for any lengths."""
    algorithm = make_linear(mu=3.0, temperature=temperature)
    client = make_client(make_body(2, 0), make_body(5, 0), make_body(*previous))
    assert float(algorithm.loss(client, BATCH)) == pytest.approx(3 * value, abs=3e-6)


def test_moon_contrastive_gradient_of_equal_models_is_0(make_linear):
    weight = torch.tensor([[2.0], [1.0]], dtype=f64, requires_grad=True)
    client = make_client(Tensors({"body.weight": weight}), make_body(1, 3), make_body(1, 3))
    (gradient,) = torch.autograd.grad(make_linear(mu=5.0).loss(client, BATCH), weight)
    assert gradient.abs().max() < 1e-15


def test_moon_contrastive_gradient_points_to_global_model(make_linear):
    """The client's model is at (1, 0), the global model at (0, 1), and the previous model at (1, 0)."""
    weight = torch.tensor([[1.0], [0.0]], dtype=f64, requires_grad=True)
    client = make_client(Tensors({"body.weight": weight}), make_body(0, 1), make_body(1, 0))
    (gradient,) = torch.autograd.grad(make_linear().loss(client, BATCH), weight)
    share = 1 / (1 + math.exp(-2))  # softmax of the previous model
    assert gradient.flatten().tolist() == pytest.approx([0, -2 * share], abs=1e-15)


def test_moon_other_models_are_in_evaluation_mode(make_trial):
    """The global and previous models have no dropout while the client's model trains."""
    net = FunctionalNetwork(lambda: Network(nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5)), nn.Linear(6, 4)), f64)
    algorithm = MOON().bind(net, make_trial("fedavg").algorithm.federation)
    x, z = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=f64), torch.ones(3, 6, dtype=f64)
    client = {"global": net.make_initial_model(1), "previous": net.make_initial_model(2)}
    calm = algorithm.compute_contrastive_loss(client, z, x[0])
    with net.mode.activate(True, None, torch.tensor(7)):
        assert not torch.equal(net.features(client["global"], x[0]), net.features(client["global"], x[0], teacher=True))
        assert torch.equal(algorithm.compute_contrastive_loss(client, z, x[0]), calm)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_moon_with_mu_0_equals_fedavg_bit_for_bit(make_trial, assert_same, settings):
    moon, plain = (make_trial(algorithm, **settings).run(3) for algorithm in (MOON(mu=0.0), FedAvg()))
    assert_same(moon.server, plain.server)


@pytest.mark.parametrize("width", [None, 3])
def test_moon_contrastive_loss_needs_previous_participation(make_trial, width):
    """The first round equals FedAvg bit for bit, and so does a new client's upload in the second."""
    moon, plain = (make_trial(algorithm, width=width).run(1, ids=[0, 1, 5]) for algorithm in (MOON(mu=5.0), FedAvg()))
    assert torch.equal(moon.server["model"].flat(), plain.server["model"].flat())
    both = zip(moon.train([1, 4, 5]), plain.train([1, 4, 5]), strict=True)
    assert [torch.equal(a.upload["model"].flat(), b.upload["model"].flat()) for a, b in both] == [False, True, False]


def test_moon_with_one_client_equals_fedavg(make_clients, make_trial, assert_same):
    """The global model equals the previous model, so the contrastive loss has no gradient."""
    clients = make_clients(sizes=[15], labels=lambda client: range(4))
    moon, plain = (
        make_trial(algorithm, clients=clients, participation=1.0).run(3) for algorithm in (MOON(mu=5.0), FedAvg())
    )
    assert_same(moon.server, plain.server, tolerance=1e-12)


def test_moon_clients_keep_uploaded_model(make_trial, assert_same):
    trial = make_trial(MOON()).run(1, ids=[1, 2])
    sent = {outcome.client: outcome.upload["model"] for outcome in trial.outcomes}
    trial.run(1, ids=[2, 3])
    assert_same(trial.start(1)["previous"], sent[1])
    assert_same(trial.start(2)["previous"], trial.outcomes[0].upload["model"])
    assert_same(trial.start(1)["global"], trial.server["model"])


def test_moon_moves_features_from_previous_to_global_model(make_trial):
    """A larger mu increases the difference of the cosines for every client."""
    margins = []
    for mu in (0.0, 2.0, 20.0):
        trial = make_trial(MOON(mu=mu), participation=1.0, local_epochs=5, learning_rate=0.02)
        before = make_trial(MOON(mu=0.0), participation=1.0, local_epochs=5).run(2)
        trial.server, trial.client_states, trial.rounds = before.server, before.client_states, before.rounds
        margins.append([compute_margin(trial, outcome) for outcome in trial.train()])
    assert all(none < weak < strong for none, weak, strong in zip(*margins, strict=True))


def compute_margin(trial, outcome):
    x = trial.clients.gather_samples(trial.clients.train[outcome.client])[0]
    models = outcome.upload["model"], trial.server["model"], trial.client_states[outcome.client]["previous"]
    z, near, far = (trial.net.features(model, x) for model in models)
    return float((cosine_similarity(z, near) - cosine_similarity(z, far)).mean())


@pytest.mark.parametrize("width", [None, 3])
def test_moon_with_zero_features_is_finite(make_trial, width):
    """Every ReLU of the body is off."""
    trial = make_trial(MOON(), width=width, initial_model=make_dead_initial_model(MOON()), participation=1.0).run(2)
    assert all(outcome.upload["model"].flat().isfinite().all() for outcome in trial.outcomes)


def build_norm_network():
    return Network(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 4)).double()


@pytest.mark.parametrize("width", [None, 3])
def test_moon_other_models_use_initial_client_statistics(make_trial, assert_same, width):
    """The running statistics of the trained model change, although the client has only one set of them."""
    settings = {"buffers": "keep", "learning_rate": 0.2, "momentum": 0.9, "width": width}
    trial = make_trial(MOON(mu=2.0), "norm", **settings).run(2, ids=[3, 5, 7])
    for outcome in trial.train([3, 5]):
        state = trial.client_states[outcome.client]
        student, near, far = build_norm_network().train(), build_norm_network().eval(), build_norm_network().eval()
        for module, model in (
            (student, trial.server["model"]),
            (near, trial.server["model"]),
            (far, state["previous"]),
        ):
            module.load_state_dict({**model, **state["buffers"]}, strict=False)
        rule = torch.optim.SGD(student.parameters(), 0.2, momentum=0.9)
        for x, y in list_batches(trial, outcome.client, 3):
            z = student.body(x)
            margin = cosine_similarity(z, near.body(x).detach()) - cosine_similarity(z, far.body(x).detach())
            rule.zero_grad()
            (cross_entropy(student.head(z), y) - 2.0 * logsigmoid(margin / 0.5).mean()).backward()
            rule.step()
        sent = outcome.upload["model"] | outcome.kept_state["buffers"]
        wanted = {name: value.detach() for name, value in student.state_dict().items()}
        assert_same(dict(sent), {name: wanted[name] for name in sent}, tolerance=1e-10)
