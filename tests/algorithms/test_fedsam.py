import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedsam import FedSAM
from fedpipe.core.tensors import Tensors
from tests.algorithms.expected import Expected
from tests.algorithms.oracles import list_batches, run_fedavg

EXPECTED = Expected(traffic=[({}, lambda n: (n.all, n.all))], centralized={"rho": 0.0})


def test_fedsam_two_steps_match_exact_values_on_quadratic(make_toy, trace_path):
    """The risk is (x - 4)^2 / 2. The gradient at x is negative, so each step uses the slope at x - rho."""
    x = 0.0
    for _ in range(2):
        x -= 0.1 * ((x - 0.5) - 4)
    assert trace_path(make_toy(FedSAM(rho=0.5), [(1, 4)], local_epochs=2), 1) == pytest.approx([x], abs=1e-12)


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}])
@pytest.mark.parametrize("model", ["mlp", "norm"])
def test_fedsam_with_rho_0_equals_fedavg_bit_for_bit(make_trial, assert_same, model, settings):
    sam, plain = (make_trial(method, model, **settings).run(3) for method in (FedSAM(rho=0.0), FedAvg()))
    parameters = plain.net.names
    assert_same(sam.server["model"].only(parameters), plain.server["model"].only(parameters))


def test_fedsam_three_rounds_match_pytorch_loop(make_trial, assert_same):
    """Apply SAM's `first_step` and `second_step` with PyTorch's SGD."""
    trial = make_trial(FedSAM(rho=0.1), learning_rate=0.1, momentum=0.9, weight_decay=0.01)

    def train_client(client, number, server):
        model = {name: value.clone().requires_grad_() for name, value in server.items()}
        optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for x, y in list_batches(trial, client, number):
            optimizer.zero_grad()
            cross_entropy(trial.net(Tensors(model), x), y).backward()
            old = {name: value.detach().clone() for name, value in model.items()}
            norm = torch.cat([value.grad.flatten() for value in model.values()]).norm()
            for value in model.values():
                value.data.add_(value.grad * (0.1 / (norm + 1e-12)))
            optimizer.zero_grad()
            cross_entropy(trial.net(Tensors(model), x), y).backward()
            for name, value in model.items():
                value.data.copy_(old[name])
            optimizer.step()
        return Tensors(model).map(torch.detach)

    expected = run_fedavg(trial, 3, train_client)
    assert_same(trial.run(3).server["model"], expected, tolerance=1e-12)


def test_fedsam_finds_flatter_minima_than_fedavg(make_trial):
    """The loss increases less at the same distance along the gradient."""
    increases = []
    for rho in (0.0, 0.5):
        trial = make_trial(FedSAM(rho=rho), participation=1.0, learning_rate=0.2).run(30)
        x, y = trial.clients.gather_samples(np.concatenate(trial.clients.train))
        leaves = Tensors(trial.server["model"].map(lambda value: value.clone().requires_grad_()))
        loss = cross_entropy(trial.net(leaves, x), y)
        g = Tensors(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        moved = trial.server["model"] + 0.5 / g.norm() * g
        increases.append(float((cross_entropy(trial.net(moved, x), y) - loss).detach()))
    assert increases[1] < increases[0]
