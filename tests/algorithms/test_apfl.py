import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.apfl import APFL
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.local import Local
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches, run_fedavg

EXPECTED = Expected(traffic=[({}, lambda n: (n.all, n.all))], centralized={})


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_steps_match_exact_values_on_quadratic(make_toy, adaptive):
    """The risk is (x - 4)^2 / 2. Start at w = v = 0 and alpha 1/2. Alpha moves along (v - w) (mixture - 4)."""
    trial = make_toy(APFL(alpha=0.5, adaptive=adaptive), [(1, 4)], local_epochs=3).run()
    w = v = 0.0
    alpha = 0.5
    for _ in range(3):
        slope = alpha * v + (1 - alpha) * w - 4
        change = (v - w) * slope if adaptive else 0.0
        w, v, alpha = w - 0.1 * (w - 4), v - 0.1 * alpha * slope, min(max(alpha - 0.1 * change, 0), 1)
    state = trial.client_states[0]
    assert float(trial.server["model"]["head.weight"]) == pytest.approx(w, abs=1e-14)
    assert float(state["own"]["head.weight"]) == pytest.approx(v, abs=1e-14)
    assert float(state["mixing"]["alpha"]) == pytest.approx(alpha, abs=1e-14)
    assert (alpha != 0.5) is adaptive


@pytest.mark.parametrize("model", ["mlp", "norm"])
@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_global_model_equals_fedavg(make_trial, assert_same, adaptive, width, model):
    """Running statistics of BatchNorm are those of the global model, not of the mixture."""
    apfl, plain = (
        make_trial(method, model, width=width, momentum=0.9).run(3) for method in (APFL(adaptive=adaptive), FedAvg())
    )
    assert_same(apfl.server, plain.server, tolerance=1e-13)


def test_apfl_keeps_running_statistics_of_global_model_at_clients(make_trial, assert_same):
    apfl, plain = (make_trial(method, "norm", buffers="keep").run(3) for method in (APFL(), FedAvg()))
    for client in range(8):
        assert_same(apfl.client_states[client]["buffers"], plain.client_states[client]["buffers"], tolerance=1e-13)


def test_apfl_mixture_with_alpha_0_equals_global_model(make_trial, assert_same):
    trial = make_trial(APFL(alpha=0.0, adaptive=False)).run(3)
    client = trial.start(3)
    assert_same(trial.algorithm.mix_with_local_model(client, client["model"]), trial.server["model"])
    for state in trial.client_states.values():
        assert_same(state["own"], trial.initial_client_state["own"])


def test_apfl_own_model_with_alpha_1_equals_local_training(make_trial, assert_same):
    apfl, local = (make_trial(method, momentum=0.9).run(3) for method in (APFL(alpha=1.0, adaptive=False), Local()))
    for client in range(8):
        assert_same(apfl.client_states[client]["own"], local.client_states[client]["model"], tolerance=1e-13)


def test_apfl_clips_alpha_to_0_and_1(make_toy):
    """Take a large step with an own model that fits worse than the global one, then with one that fits better."""
    for own, bound in ((-50.0, 0.0), (4.0, 1.0)):
        trial = make_toy(APFL(alpha=0.9), [(1, 4)])
        trial.client_states[0]["own"] = Tensors({"head.weight": torch.tensor([[own]], dtype=torch.float64)})
        trial.run()
        assert float(trial.client_states[0]["mixing"]["alpha"]) == bound


def test_apfl_three_rounds_match_pytorch_loop(make_trial, assert_same):
    """Differentiate through the mixture, with one optimizer for the own model and alpha."""
    trial = make_trial(APFL(alpha=0.3), learning_rate=0.1)
    net, own = trial.net, dict.fromkeys(range(8), trial.server["model"])
    alphas = dict.fromkeys(range(8), torch.tensor(0.3, dtype=torch.float64))

    def train_client(client, number, server):
        w, v = (part.map(lambda value: value.clone().requires_grad_()) for part in (server, own[client]))
        alpha = alphas[client].clone().requires_grad_()
        optimizer = torch.optim.SGD([*w.values(), *v.values(), alpha], lr=0.1)
        for x, y in list_batches(trial, client, number):
            mixture = Tensors((name, alpha * v[name] + (1 - alpha) * w[name].detach()) for name in w)
            optimizer.zero_grad()
            (cross_entropy(net(w, x), y) + cross_entropy(net(mixture, x), y)).backward()
            optimizer.step()
            alpha.data.clamp_(0, 1)
        own[client], alphas[client] = v.map(torch.detach), alpha.detach()
        return w.map(torch.detach)

    expected = run_fedavg(trial, 3, train_client)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)
    for client, state in trial.client_states.items():
        torch.testing.assert_close(state["own"].flat(), own[client].flat(), rtol=0, atol=1e-12)
        torch.testing.assert_close(state["mixing"]["alpha"], alphas[client], rtol=0, atol=1e-12)
    assert len({float(alpha) for alpha in alphas.values()}) > 2
