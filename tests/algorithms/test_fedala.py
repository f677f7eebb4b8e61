import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedala import FedALA, LossWindow
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.tensors import Tensors
from fedpipe.engine.clients.executor import FIRST
from fedpipe.testing.trial import Normalized
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={},
)


@pytest.fixture
def make_mixing(make_toy, scalar):
    """Make a trial on one scalar client after its first mixing. Its local model is 2, the server's model is 5."""

    def make(algorithm, weight, a=1.0, b=4.9, settled=1.0, **settings):
        trial = make_toy(algorithm, [(a, b)], start=5.0, **{"learning_rate": 0.0} | settings)
        one = torch.ones((), dtype=torch.float64)
        trial.client_states[0] = {
            "local": scalar(2),
            "weights": scalar(weight),
            "settled": settled * one,
            FIRST: 0 * one,
        }
        return trial

    return make


@pytest.fixture
def counting_class():
    """FedALA that counts the mixing passes of all clients."""

    class CountingFedALA(FedALA):
        passes_made = 0

        def record_pass_loss(self, client):
            type(self).passes_made += 1
            return super().record_pass_loss(client)

    return CountingFedALA


def get_weight(state, part):
    return float(state[part]["head.weight"])


def test_fedala_model_mixes_local_and_global_by_weight(make_mixing):
    assert get_weight(make_mixing(FedALA(), 0.25).start(0), "model") == 2.75


def test_fedala_weight_step_matches_exact_values(make_mixing):
    """At 5 the gradient is 0.1, and local and global model are 3 apart. W falls from 1 to 0.7."""
    (outcome,) = make_mixing(FedALA(), 1.0).train()
    assert get_weight(outcome.kept_state, "weights") == pytest.approx(0.7, abs=1e-14)
    assert get_weight(outcome.kept_state, "local") == pytest.approx(2 + 3 * 0.7, abs=1e-14)
    assert get_weight(outcome.upload, "model") == pytest.approx(4.1, abs=1e-14)


def test_fedala_rate_scales_weight_step(make_mixing):
    (outcome,) = make_mixing(FedALA(rate=0.5), 1.0).train()
    assert get_weight(outcome.kept_state, "weights") == pytest.approx(0.85, abs=1e-14)


@pytest.mark.parametrize(("b", "weight"), [(-100.0, 0.0), (100.0, 1.0)])
def test_fedala_clips_weights_to_0_and_1(make_mixing, b, weight):
    (outcome,) = make_mixing(FedALA(), 0.5, b=b).train()
    assert get_weight(outcome.kept_state, "weights") == weight


def test_fedala_with_equal_models_keeps_weights_and_model(make_mixing, scalar):
    trial = make_mixing(FedALA(), 0.4)
    trial.server = {"model": scalar(2)}
    (outcome,) = trial.train()
    assert get_weight(outcome.kept_state, "weights") == 0.4
    assert get_weight(outcome.upload, "model") == 2


def test_fedala_trains_from_mixed_model(make_mixing):
    """Training takes one step of rate 0.1 from 4.1 towards 4.9."""
    (outcome,) = make_mixing(FedALA(), 1.0, learning_rate=0.1).train()
    assert get_weight(outcome.upload, "model") == pytest.approx(4.18, abs=1e-14)
    assert get_weight(outcome.kept_state, "local") == pytest.approx(4.18, abs=1e-14)
    assert get_weight(outcome.kept_state, "weights") == pytest.approx(0.7, abs=1e-14)


def test_fedala_with_rate_0_equals_fedavg(make_trial, assert_same):
    still, plain = (make_trial(algorithm, momentum=0.9).run(4) for algorithm in (FedALA(rate=0.0, passes=3), FedAvg()))
    assert_same(still.server["model"], plain.server["model"], tolerance=1e-12)


def test_fedala_first_round_equals_fedavg(make_trial, assert_same):
    assert_same(make_trial(FedALA()).run().server["model"], make_trial(FedAvg()).run().server["model"])


def test_fedala_with_zero_weights_keeps_local_top_layers(make_trial, assert_same):
    trial = make_trial(FedALA(rate=0.0), participation=1.0).run()
    trial.client_states = {
        client: state | {"weights": state["weights"].zeros()} for client, state in trial.client_states.items()
    }
    for client in (0, 3, 7):
        model = trial.start(client)["model"]
        assert_same(model.only(trial.net.head_names), trial.client_states[client]["local"])
        assert_same(model.only(trial.net.body_names), trial.server["model"].only(trial.net.body_names))


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize(("layers", "share"), [(1, 0.8), (2, 0.5)])
def test_fedala_mixing_pass_matches_pytorch_gradients(make_trial, width, layers, share):
    """Compute the weights of a client with several batches in a round after its first mixing."""
    trial = make_trial(FedALA(layers=layers, share=share), participation=1.0, learning_rate=0.3).run(2)
    trial = _copy_trial_state(make_trial(FedALA(layers=layers, share=share), width=width, learning_rate=0.0), trial)
    client, top = 5, trial.net.names[-2 * layers :]
    state, model = trial.client_states[client], trial.server["model"]
    weights, towards = state["weights"], model.only(top) - state["local"]
    order = trial.clients.shuffle_indices(client, 3, "mixing", 0, share)
    assert len(order) == round(16 * share)
    for first in range(0, len(order), 4):
        mixed = (state["local"] + towards * weights).map(lambda value: value.clone().requires_grad_())
        x, y = trial.clients.gather_samples(order[first : first + 4])
        gradient = torch.autograd.grad(cross_entropy(trial.net(model | mixed, x), y), list(mixed.values()))
        for name, g in zip(top, gradient, strict=True):
            weights = weights | {name: (weights[name] - g * towards[name]).clamp(0, 1)}
    (outcome,) = trial.train([client])
    for name in top:
        assert torch.allclose(outcome.kept_state["weights"][name], weights[name], rtol=1e-12, atol=1e-14)
        mixed = state["local"][name] + towards[name] * weights[name]
        assert torch.allclose(outcome.upload["model"][name], mixed, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("width", [None, 3])
def test_fedala_mixes_only_parameters_and_each_pass_updates_running_statistics(make_trial, assert_same, width):
    """Both rates are 0 in the third round, so that only running statistics change."""
    algorithm, client = FedALA(layers=2, rate=0.0, share=0.75), 5
    trial = make_trial(algorithm, "norm", participation=1.0, learning_rate=0.3).run(2)
    trial = _copy_trial_state(make_trial(algorithm, "norm", width=width, learning_rate=0.0), trial)
    trial.client_states[client]["weights"] *= 0.25
    trial.client_states[client]["settled"] = torch.ones(())
    model = trial.start(client)["model"]
    assert not torch.equal(model["body.1.weight"], trial.server["model"]["body.1.weight"])
    assert_same(trial.net.buffers(model), trial.net.buffers(trial.server["model"]))
    network = Normalized().build((5,), 4).double().train()
    network.load_state_dict(model, strict=False)
    order = trial.clients.shuffle_indices(client, 3, "mixing", 0, algorithm.share)
    mixing_batches = [trial.clients.gather_samples(order[first : first + 4]) for first in range(0, len(order), 4)]
    for x, _ in [*mixing_batches, *list_batches(trial, client, 3)]:
        network(x)
    (outcome,) = trial.train([client])
    buffers = {name: value for name, value in network.named_buffers() if name in model}
    assert_same(outcome.upload["model"], model | buffers, tolerance=1e-12)


def test_fedala_caps_passes_of_first_mixing(make_trial, counting_class):
    """A client makes no pass in its first round, the maximum in its second, and one in each later round."""
    trial = make_trial(counting_class(threshold=0.0, passes=25))
    counts = []
    for _ in range(4):
        counting_class.passes_made = 0
        trial.run(1, ids=[3])
        trial.server = {"model": trial.server["model"] * 0.9}  # as if other clients had trained
        counts.append(counting_class.passes_made)
    assert counts == [0, 25, 1, 1]


def test_fedala_first_mixing_needs_at_least_eleven_passes(make_trial, counting_class):
    trial = make_trial(counting_class(threshold=1e9)).run(1, ids=[3])
    assert counting_class.passes_made == 0
    trial.run(1, ids=[3])
    assert counting_class.passes_made == 11


def test_fedala_first_mixing_ends_if_losses_are_constant(make_mixing):
    """Weights that are clipped at 0 keep the loss at 1/2 (2 + 1)^2. Mixing ends after ten such losses."""
    seen = []

    class RecordingFedALA(FedALA):
        def record_pass_loss(self, client):
            seen.append(client["window"]["loss"].item())
            return super().record_pass_loss(client)

    trial = make_mixing(RecordingFedALA(threshold=1e-6), 1.0, b=-1.0, settled=0.0)
    (outcome,) = trial.train()
    assert seen == [18.0] + [4.5] * 10
    assert float(outcome.kept_state["settled"]) == 1


@pytest.mark.parametrize(("passes", "threshold", "is_varying"), [(11, 0.5, True), (11, 0.51, False), (10, 0.51, True)])
def test_fedala_loss_window_uses_population_std_of_ten_losses(passes, threshold, is_varying):
    """Five losses of 0 and five of 1 have the population standard deviation 0.5, as in the authors' code (NumPy's)."""
    number = torch.tensor(float(passes))
    window = Tensors(passes=number, loss=number, losses=torch.tensor([0.0, 1.0] * 5))
    assert bool(LossWindow.is_varying(window, threshold)) == is_varying


def test_fedala_new_client_starts_from_global_model(make_trial, assert_same):
    trial = make_trial(FedALA()).run(2, ids=[0, 1, 3])
    assert_same(trial.start(6)["model"], trial.server["model"])
    assert not torch.equal(trial.start(3)["model"]["head.weight"], trial.server["model"]["head.weight"])


def test_fedala_weights_change_within_bounds(make_trial):
    trial = make_trial(FedALA(), participation=1.0, learning_rate=0.2).run(3)
    weights = torch.stack([state["weights"].flat() for state in trial.client_states.values()])
    assert ((weights >= 0) & (weights <= 1)).all()
    assert (weights < 0.99).any(1).sum() >= 6


def test_fedala_mixing_lowers_training_loss_of_clients(make_trial):
    """The mixed models fit the clients' training data at least as well as the global model."""
    trial = make_trial(FedALA(), participation=1.0, learning_rate=0.2).run(3)
    mixed = _copy_trial_state(make_trial(FedALA(), learning_rate=0.0), trial).train(range(8))
    for outcome in mixed:
        x, y = trial.clients.gather_samples(trial.clients.train[outcome.client])
        own, common = outcome.upload["model"], trial.server["model"]
        assert cross_entropy(trial.net(own, x), y) <= cross_entropy(trial.net(common, x), y)


def _copy_trial_state(trial, other):
    """Copy the server, the client states, and the round of the other trial."""
    trial.server, trial.client_states, trial.rounds = other.server, other.client_states, other.rounds
    return trial
