import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedala import FedALA
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.engine.clients.executor import FIRST
from fedpipe.testing import Expected

EXPECTED = Expected(
    traffic=[({}, lambda n: (n.all, n.all))],
    centralized={},
)


@pytest.fixture
def make_mixing(make_toy, scalar):
    """One scalar client whose local model is 2, while the server's is 5; it has mixed before."""

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
    """FedALA that counts its passes over the data, all clients together."""

    class Counting(FedALA):
        passes_made = 0

        def record_pass_loss(self, client):
            type(self).passes_made += 1
            return super().record_pass_loss(client)

    return Counting


def get_weight(state, part):
    return float(state[part]["head.weight"])


def test_a_quarter_of_the_way(make_mixing):
    assert get_weight(make_mixing(FedALA(), 0.25).start(0), "model") == 2.75


def test_a_step_of_the_weights(make_mixing):
    """At 5 the gradient is 0.1, and the way from local to global 3 long: W falls from 1 to 0.7."""
    (outcome,) = make_mixing(FedALA(), 1.0).train()
    assert get_weight(outcome.kept_state, "weights") == pytest.approx(0.7, abs=1e-14)
    assert get_weight(outcome.kept_state, "local") == pytest.approx(2 + 3 * 0.7, abs=1e-14)
    assert get_weight(outcome.upload, "model") == pytest.approx(4.1, abs=1e-14)


def test_the_rate_scales_the_step(make_mixing):
    (outcome,) = make_mixing(FedALA(rate=0.5), 1.0).train()
    assert get_weight(outcome.kept_state, "weights") == pytest.approx(0.85, abs=1e-14)


@pytest.mark.parametrize(("b", "weight"), [(-100.0, 0.0), (100.0, 1.0)])
def test_weights_stay_between_0_and_1(make_mixing, b, weight):
    (outcome,) = make_mixing(FedALA(), 0.5, b=b).train()
    assert get_weight(outcome.kept_state, "weights") == weight


def test_equal_models_change_neither_weights_nor_model(make_mixing, scalar):
    trial = make_mixing(FedALA(), 0.4)
    trial.server = {"model": scalar(2)}
    (outcome,) = trial.train()
    assert get_weight(outcome.kept_state, "weights") == 0.4
    assert get_weight(outcome.upload, "model") == 2


def test_training_follows_the_mixing(make_mixing):
    """From 4.1 one step of 0.1 towards 4.9."""
    (outcome,) = make_mixing(FedALA(), 1.0, learning_rate=0.1).train()
    assert get_weight(outcome.upload, "model") == pytest.approx(4.18, abs=1e-14)
    assert get_weight(outcome.kept_state, "local") == pytest.approx(4.18, abs=1e-14)
    assert get_weight(outcome.kept_state, "weights") == pytest.approx(0.7, abs=1e-14)


def test_without_a_rate_it_is_fedavg_up_to_rounding(make_trial, assert_same):
    still, plain = (make_trial(algorithm, momentum=0.9).run(4) for algorithm in (FedALA(rate=0.0, passes=3), FedAvg()))
    assert_same(still.server["model"], plain.server["model"], tolerance=1e-12)


def test_its_first_round_is_fedavgs(make_trial, assert_same):
    assert_same(make_trial(FedALA()).run().server["model"], make_trial(FedAvg()).run().server["model"])


def test_weights_of_zero_keep_the_top_local(make_trial, assert_same):
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
def test_a_pass_over_batches(make_trial, width, layers, share):
    """The rule written out, for a client of several batches in a round after its first mixing."""
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


def test_passes_in_the_first_mixing_are_capped(make_trial, counting_class):
    """Nothing in the first round, in the second as many as allowed, then one: here for a single client."""
    trial = make_trial(counting_class(threshold=0.0, passes=25))
    counts = []
    for _ in range(4):
        counting_class.passes_made = 0
        trial.run(1, ids=[3])
        trial.server = {"model": trial.server["model"] * 0.9}  # what other clients would do
        counts.append(counting_class.passes_made)
    assert counts == [0, 25, 1, 1]


def test_the_first_mixing_settles_after_eleven_passes_at_the_earliest(make_trial, counting_class):
    trial = make_trial(counting_class(threshold=1e9)).run(1, ids=[3])
    assert counting_class.passes_made == 0
    trial.run(1, ids=[3])
    assert counting_class.passes_made == 11


def test_the_first_mixing_ends_when_losses_stand_still(make_mixing):
    """Weights that are clipped at 0 leave the loss at 1/2 (2 + 1)^2; ten such losses are needed after the first."""
    seen = []

    class Watching(FedALA):
        def record_pass_loss(self, client):
            seen.append(client["window"]["loss"].item())
            return super().record_pass_loss(client)

    trial = make_mixing(Watching(threshold=1e-6), 1.0, b=-1.0, settled=0.0)
    (outcome,) = trial.train()
    assert seen == [18.0] + [4.5] * 10
    assert float(outcome.kept_state["settled"]) == 1


def test_newcomers_take_the_global_model(make_trial, assert_same):
    trial = make_trial(FedALA()).run(2, ids=[0, 1, 3])
    assert_same(trial.start(6)["model"], trial.server["model"])
    assert not torch.equal(trial.start(3)["model"]["head.weight"], trial.server["model"]["head.weight"])


def test_weights_leave_one_and_stay_in_bounds(make_trial):
    """Its mechanism acts."""
    trial = make_trial(FedALA(), participation=1.0, learning_rate=0.2).run(3)
    weights = torch.stack([state["weights"].flat() for state in trial.client_states.values()])
    assert ((weights >= 0) & (weights <= 1)).all()
    assert (weights < 0.99).any(1).sum() >= 6


def test_mixing_helps_on_the_clients_data(make_trial):
    """The received personal models fit the training data better than the global model does."""
    trial = make_trial(FedALA(), participation=1.0, learning_rate=0.2).run(3)
    mixed = _copy_trial_state(make_trial(FedALA(), learning_rate=0.0), trial).train(range(8))
    for outcome in mixed:
        x, y = trial.clients.gather_samples(trial.clients.train[outcome.client])
        own, common = outcome.upload["model"], trial.server["model"]
        assert cross_entropy(trial.net(own, x), y) <= cross_entropy(trial.net(common, x), y)


def _copy_trial_state(trial, other):
    """The trial in the other one's place."""
    trial.server, trial.client_states, trial.rounds = other.server, other.client_states, other.rounds
    return trial
