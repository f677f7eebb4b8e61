"""BatchNorm, dropout and transforms have equal results alone and in a stack, for all values of `buffers`."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.fedsam import FedSAM
from fedpipe.core import rng
from fedpipe.engine.clients.executor import BUFFERS
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.clients.transforms import transform_images
from fedpipe.engine.torch_env.trees import count_bytes
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.settings.transforms import Transforms
from tests.algorithms.oracles import list_batches, take_steps

CHANGES = Transforms(mean=(0.1,), std=(2.0,), crop=1, flip=True, rotation=40)


def build_network(dropout=0.5):
    body = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(dropout),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Dropout(dropout),
    )
    return Network(body, nn.Linear(6, 4))


def list_uploads(outcomes):
    return [
        (outcome.upload, outcome.kept_state, {test: tuple(score) for test, score in outcome.scores.items()})
        for outcome in outcomes
    ]


@pytest.fixture
def trial(make_clients, make_trial):
    def make(width=None, transforms=CHANGES, threads=1, algorithm=None, **settings):
        clients = make_clients((1, 4, 4), transforms=transforms)
        settings = {"participation": 1.0, "width": width, "threads": threads} | settings
        return make_trial(algorithm or FedAvg(), build_network, clients, **settings)

    return make


@pytest.mark.parametrize("buffers", ["average", "keep", "drop"])
def test_stack_with_batch_norm_dropout_and_transforms_equals_loop(trial, assert_same, buffers):
    loop, stack = (trial(width, buffers=buffers).run(2, tests=("local",)) for width in (None, 3))
    assert_same(list_uploads(stack.outcomes), list_uploads(loop.outcomes), tolerance=1e-10)
    assert_same(stack.server, loop.server, tolerance=1e-10)


@pytest.mark.parametrize("width", [None, 3])
def test_client_bits_do_not_depend_on_other_clients(trial, assert_same, width):
    run_trial = trial(width).run()
    outcomes_together = list_uploads(run_trial.train([1, 4, 7], tests=("local",)))
    assert_same(list_uploads(run_trial.train([4], tests=("local",))), outcomes_together[1:2])
    assert_same(
        list_uploads(trial(width, threads=2).run().train([1, 7], tests=("local",))),
        [outcomes_together[0], outcomes_together[2]],
    )


def test_noise_keys_differ_between_clients_rounds_streams_and_epochs(trial):
    clients = trial().clients
    keys = {
        clients.get_noise_key(client, round, stream, epoch)
        for client in (0, 1)
        for round in (1, 2)
        for stream in ("batches", "recall")
        for epoch in (0, 1)
    }
    assert len(keys) == 16
    assert all(0 <= key < 2**62 for key in keys)


def test_network_in_evaluation_matches_pytorch_eval_mode(trial):
    run_trial = trial(transforms=Transforms())
    model, x = run_trial.server["model"], run_trial.clients.gather_samples(run_trial.clients.test[7])[0]
    module = run_trial.net.copy_for_thread()
    assert torch.equal(module(model, x), run_trial.net(model, x))
    plain = build_network().double().eval()
    plain.load_state_dict(model, strict=False)
    torch.testing.assert_close(run_trial.net(model, x), plain(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [None, 3])
def test_client_test_images_are_augmented_only_with_on_test(trial, width):
    first, same, other = (
        [
            outcome.scores["global"].loss
            for outcome in trial(width, changes).train(range(8), ["global"], phase="receive")
        ]
        for changes in (Transforms(), Transforms(crop=1, flip=True), Transforms(crop=1, flip=True, on_test=True))
    )
    assert same == pytest.approx(first, rel=1e-12)
    assert all(abs(changed - plain) > 1e-6 for changed, plain in zip(other, first, strict=True))


@pytest.mark.parametrize("width", [None, 3])
def test_server_test_images_are_augmented_only_with_on_test(trial, width, assert_same):
    trials = [
        trial(width, transforms)
        for transforms in (Transforms(), Transforms(flip=True), Transforms(flip=True, on_test=True))
    ]
    indices = trials[0].clients.global_test
    plain, same, other = (
        one_trial.executor.compute_logits(one_trial.server["model"], indices, 1) for one_trial in trials
    )
    assert_same(same, plain)
    x, _ = trials[2].clients.gather_samples(indices)
    key = torch.tensor(trials[2].clients.get_noise_key(-1, 1, "test", 0))
    expected = trials[2].net(trials[2].server["model"], transform_images(trials[2].clients.transforms, x, key))
    assert_same(other, expected, tolerance=1e-12)
    assert (other - plain).abs().amax(1).count_nonzero() > len(indices) / 4
    next_round_logits = trials[2].executor.compute_logits(trials[2].server["model"], indices, 2)
    assert not torch.equal(other, next_round_logits), "each round has different augmentation"


def test_training_images_are_augmented(trial, assert_same):
    plain, changed = (trial(transforms=transforms).train() for transforms in (Transforms(), Transforms(crop=1)))
    with pytest.raises(AssertionError):
        assert_same(list_uploads(plain), list_uploads(changed), tolerance=1e-6)


def test_averaged_running_statistics_are_mean_of_clients(trial):
    run_trial = trial()
    uploads = run_trial.collect_uploads(run_trial.train())
    run_trial.run()
    for name in ("body.1.running_mean", "body.6.running_var"):
        mean = sum(weight * upload["model"][name] for _, weight, upload in uploads)
        torch.testing.assert_close(run_trial.server["model"][name], mean, rtol=1e-12, atol=0)
        assert not torch.equal(mean, run_trial.initial_model(0)[name])


def test_client_training_with_batch_norm_matches_pytorch(trial):
    """Without dropout, parameters and running statistics equal those of a PyTorch module in training mode."""
    run_trial = trial(transforms=Transforms())
    run_trial.net._module.get_submodule("body.3").p = run_trial.net._module.get_submodule("body.8").p = 0
    run_trial.executor._idle_workers = [run_trial.algorithm]
    module = build_network(0.0).double().train()
    module.load_state_dict(run_trial.server["model"], strict=False)
    rule = torch.optim.SGD(module.parameters(), run_trial.algorithm.federation.learning_rate)
    take_steps(rule, lambda x, y: nn.functional.cross_entropy(module(x), y), list_batches(run_trial, 3, 1))
    (outcome,) = run_trial.train([3])
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in outcome.upload["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("width", [None, 3])
def test_running_statistics_of_fedsam_are_those_of_second_gradient(trial, width):
    run_trial = trial(width, Transforms(), algorithm=FedSAM(rho=0.5))
    run_trial.net._module.get_submodule("body.3").p = run_trial.net._module.get_submodule("body.8").p = 0
    run_trial.executor._idle_workers = [run_trial.algorithm]
    module = build_network(0.0).double().train()
    module.load_state_dict(run_trial.server["model"], strict=False)
    parameters = list(module.parameters())
    for x, y in list_batches(run_trial, 3, 1):
        theta = [value.detach().clone() for value in parameters]
        statistics = copy.deepcopy(dict(module.named_buffers()))
        gradients = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        norm = torch.cat([value.flatten() for value in gradients]).norm()
        module.load_state_dict(statistics, strict=False)
        with torch.no_grad():
            for value, gradient in zip(parameters, gradients, strict=True):
                value += 0.5 * gradient / (norm + 1e-12)
        gradients = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
        with torch.no_grad():
            for value, old, gradient in zip(parameters, theta, gradients, strict=True):
                value.copy_(old - run_trial.algorithm.federation.learning_rate * gradient)
    (outcome,) = run_trial.train([3])
    expected = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in outcome.upload["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("width", [None, 3])
def test_kept_running_statistics_are_not_uploaded(trial, assert_same, width):
    run_trial = trial(width, buffers="keep", participation=0.5).run(2)
    sizes = {count_bytes(outcome.upload) for outcome in run_trial.outcomes}
    parameters = sum(value.numel() for value in build_network().parameters())
    assert sizes == {8 * parameters}
    assert not any("running" in name for name in run_trial.server["model"])
    absent_client = next(
        client
        for client in range(8)
        if client not in run_trial.select_participants(1) + run_trial.select_participants(2)
    )
    assert_same(run_trial.client_states[absent_client][BUFFERS], run_trial.net.client_buffers)
    means = [run_trial.client_states[outcome.client][BUFFERS]["body.1.running_mean"] for outcome in run_trial.outcomes]
    assert len({tuple(state.tolist()) for state in means}) == len(means)


@pytest.mark.parametrize("width", [None, 3])
def test_personal_model_is_evaluated_with_running_statistics_of_client(trial, width):
    run_trial = trial(width, buffers="keep", transforms=Transforms()).run(2)
    client = 7
    (outcome,) = run_trial.train([client], tests=("local",), phase="receive")
    x, y = run_trial.clients.gather_samples(run_trial.clients.test[client])
    logits = run_trial.net(run_trial.server["model"] | run_trial.client_states[client][BUFFERS], x)
    loss = float(nn.functional.cross_entropy(logits, y, reduction="sum"))
    assert outcome.scores["local"].loss == pytest.approx(loss, rel=1e-9)
    other_logits = run_trial.net(run_trial.server["model"] | run_trial.client_states[6][BUFFERS], x)
    assert not torch.allclose(other_logits, logits)


def test_dropped_running_statistics_are_not_stored(trial):
    run_trial = trial(buffers="drop").run()
    assert not any("running" in name for name in run_trial.server["model"])
    assert run_trial.net.client_buffers == {}


def test_frozen_parameters_are_neither_trained_nor_uploaded(make_clients, make_trial):
    def frozen():
        torch.manual_seed(1)
        body = nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        for value in body.parameters():
            value.requires_grad_(False)
        return Network(body, nn.Linear(6, 4))

    run_trial = make_trial(FedAvg(), frozen, participation=1.0)
    assert set(run_trial.server["model"]) == {"head.weight", "head.bias"}
    x = run_trial.clients.gather_samples(np.arange(3))[0]
    features_before = run_trial.net.features({}, x)
    run_trial.run(2)
    assert torch.equal(run_trial.net.features({}, x), features_before)
    assert run_trial.outcomes[0].upload["model"].keys() == {"head.weight", "head.bias"}


def test_image_bytes_become_fractions_and_token_ids_stay_integers():
    y, parts = torch.zeros(2, dtype=torch.long), [np.array([0, 1])]
    images = torch.tensor([[[[0, 255]]], [[[51, 102]]]], dtype=torch.uint8)
    clients = FederatedData(images, y, parts, parts, parts[0], 1, 0, torch.float64)
    assert clients.x.dtype == torch.uint8
    assert clients.gather_samples(np.array([1]))[0].flatten().tolist() == [0.2, 0.4]
    tokens = torch.tensor([[3, 70_000], [1, 2]], dtype=torch.int32)
    gathered = FederatedData(tokens, y, parts, parts, parts[0], 1, 0).gather_samples(np.array([0]))[0]
    assert gathered.dtype == torch.int64
    assert gathered.tolist() == [[3, 70_000]]


def test_normalization_layers_are_found_by_type():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.calm = nn.BatchNorm1d(3)
            self.group = nn.GroupNorm(1, 3)

        def forward(self, x):
            return self.group(self.calm(x))

    net = FunctionalNetwork(lambda: Network(nn.Sequential(nn.Linear(2, 3), Block()), nn.Linear(3, 2)))
    assert {name.rpartition(".")[0] for name in net.norm_names} == {"body.1.calm", "body.1.group"}
    assert len(net.norm_names) == 6
    assert net.buffer_names == ("body.1.calm.running_mean", "body.1.calm.running_var")


def test_initial_model_contains_parameters_and_buffers(trial):
    net = trial().net
    model = net.make_initial_model(rng.derive_entropy(0, "init/0"))
    assert tuple(model) == net.names + net.buffer_names
    assert float(model["body.1.running_var"].mean()) == 1
