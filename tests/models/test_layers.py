import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from fedpipe.models.layers import CHUNK, BatchNorm, Dropout, Mode, replace_stateful_layers, uniform, uniform_in_chunks
from tests import fake_device


def batchnorm(channels=3, track=True):
    """PyTorch's layer with statistics of its own, and ours in its place."""
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(channels).double()
    with torch.no_grad():
        for value in (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var):
            value.copy_(torch.rand(channels))
    mode = Mode()
    ours = replace_stateful_layers(nn.Sequential(copy.deepcopy(theirs)), mode, track)
    return theirs, ours, mode


def test_evaluation_is_pytorchs():
    theirs, ours, _ = batchnorm()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    assert torch.equal(ours(x), theirs.eval()(x))


def test_training_is_pytorchs_with_its_running_statistics():
    theirs, ours, mode = batchnorm()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    with mode.activate(True) as recorded:
        y = ours(x)
    torch.testing.assert_close(y, theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(recorded["0.running_mean"], theirs.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(recorded["0.running_var"], theirs.running_var, rtol=1e-12, atol=0)


def test_the_gradient_goes_through_the_batchs_statistics():
    theirs, ours, mode = batchnorm()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(theirs(x).square().mul(x).sum(), x)
    with mode.activate(True):
        (found,) = torch.autograd.grad(ours(x).square().mul(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [None, torch.ones(5, dtype=torch.float64)])
def test_a_layer_that_is_called_twice_moves_its_statistics_twice(mask):
    theirs, ours, mode = batchnorm()
    first, second = torch.randn(2, 5, 3, 2, 2, dtype=torch.float64)
    with mode.activate(True, mask) as recorded:
        ours(first), ours(second)
    theirs(first), theirs(second)
    torch.testing.assert_close(recorded["0.running_mean"], theirs.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(recorded["0.running_var"], theirs.running_var, rtol=1e-12, atol=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_padding_counts_for_nothing(samples):
    _, ours, mode = batchnorm()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    mask = (torch.arange(5) < samples).double()
    with mode.activate(True) as wanted_statistics:
        wanted = ours(x[:samples])
    with mode.activate(True, mask) as statistics:
        found = ours(x)[:samples]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for name, value in wanted_statistics.items():
        torch.testing.assert_close(statistics[name], value, rtol=1e-12, atol=1e-12)


def test_a_single_value_becomes_the_bias_and_leaves_no_statistics():
    layer, mode = nn.BatchNorm1d(2).double(), Mode()
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([3.0, -1.0]))
    ours = replace_stateful_layers(nn.Sequential(layer), mode, track=True)
    x = torch.tensor([[5.0, 7.0]], dtype=torch.float64, requires_grad=True)
    with mode.activate(True) as recorded:
        y = ours(x)
    assert y.tolist() == [[3, -1]]
    assert recorded == {}
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    with mode.activate(True, torch.ones(1, dtype=torch.float64)) as recorded:
        ours(x)
    assert recorded["0.running_mean"].tolist() == [0, 0]
    assert recorded["0.running_var"].tolist() == [1, 1]


def test_without_tracking_evaluation_uses_the_batchs_statistics():
    _, ours, mode = batchnorm(track=False)
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    with mode.activate(True):
        wanted = ours(x)
    assert torch.equal(ours(x), wanted)
    assert not list(ours.buffers())


def test_a_teacher_is_still_while_others_train():
    _, ours, mode = batchnorm()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    quiet = ours(x)
    with mode.activate(True) as recorded:
        with mode.eval_mode():
            assert torch.equal(ours(x), quiet)
        assert recorded == {}
        assert not torch.equal(ours(x), quiet)
        assert set(recorded) == {"0.running_mean", "0.running_var"}


def test_layers_are_found_by_type_wherever_they_are():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_of_mine = nn.BatchNorm2d(2)
            self.shortcut = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
            self.drop = nn.ModuleDict({"p": nn.Dropout2d(0.5)})

    module = replace_stateful_layers(Block(), Mode(), track=True)
    kinds = [type(module.get_submodule(name)) for name in ("norm_of_mine", "shortcut.1", "drop.p")]
    assert kinds == [BatchNorm, BatchNorm, Dropout]


def test_uniform_numbers_are_splitmix64s():
    """Against the published algorithm in Python's integers; the state begins at the mixed key."""
    gamma, bits = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
        return z ^ (z >> 31)

    key = 2**62 - 5
    wanted = [(mix(((mix(key) + place) * gamma) & bits) >> 40) / 2**24 for place in range(1, 7)]
    assert uniform(torch.tensor(key), (2, 3)).flatten().tolist() == wanted


@pytest.mark.parametrize("key", [0, 1, -5, 2**62 - 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("shape", [(3,), (7, 5, 1), (CHUNK,), (2, CHUNK + 1)])
def test_uniform_numbers_in_parts_are_the_same(key, shape):
    found, wanted = (draw(torch.tensor(key), shape) for draw in (uniform_in_chunks, uniform))
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_uniform_numbers_are_uniform_and_do_not_repeat():
    draws = torch.stack([uniform(torch.tensor(key), (1000,)) for key in range(50)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws.numpy(), bins=20, range=(0, 1))[0]
    assert np.abs(counts - 2500).max() < 5 * 2500**0.5
    correlations = np.corrcoef(draws.numpy()) - np.eye(50)
    assert np.abs(correlations).max() < 5 / 1000**0.5
    assert draws.unique().numel() > 49_000


@pytest.mark.parametrize(("layer", "varies"), [(nn.Dropout(0.25), 6), (nn.Dropout2d(0.25), 1)])
def test_dropout_is_a_function_of_the_key(layer, varies):
    mode = Mode()
    ours, x = replace_stateful_layers(nn.Sequential(layer), mode, True), torch.ones(2000, 1, 2, 3)
    assert torch.equal(ours(x), x)

    def drawn(key):
        with mode.activate(True, noise_key=torch.tensor(key)):
            return ours(x)

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.04)
    whole = (first.flatten(1) == first.flatten(1)[:, :1]).all(1)
    assert bool(whole.all()) == (varies == 1)


def test_two_dropouts_of_a_network_draw_other_numbers():
    mode = Mode()
    ours = replace_stateful_layers(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), mode, True)
    with mode.activate(True, noise_key=torch.tensor(1)):
        first, second = ours[0](torch.ones(100)), ours[1](torch.ones(100))
    assert not torch.equal(first, second)


def test_no_layer_has_in_a_batch_the_noise_that_another_has_in_the_next():
    """Batches of an epoch have keys in a row, and so do a network's layers within one; transforms draw by the key."""
    mode = Mode()
    ours = replace_stateful_layers(nn.Sequential(*(nn.Dropout(0.5) for _ in range(4))), mode, True)
    seen = []
    for key in map(torch.tensor, range(7, 12)):
        seen.append(uniform(key, (100,)) >= 0.5)
        with mode.activate(True, noise_key=key):
            seen += [layer(torch.ones(100)) > 0 for _ in range(2) for layer in ours]
    assert len({tuple(draws.tolist()) for draws in seen}) == 5 * (1 + 2 * 4)


def test_a_dropout_that_is_called_twice_draws_other_numbers_each_time():
    mode = Mode()
    ours, x = replace_stateful_layers(nn.Sequential(nn.Dropout(0.5)), mode, True), torch.ones(100)
    with mode.activate(True, noise_key=torch.tensor(1)):
        first, second = ours(x), ours(x)
        mode.calls.clear()  # as with another call of the network
        again = ours(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_a_cumulative_mean_is_refused():
    with pytest.raises(NotImplementedError, match="momentum=None"):
        replace_stateful_layers(nn.Sequential(nn.BatchNorm1d(3, momentum=None)), Mode(), True)


def test_dropout_under_vmap_is_dropout_one_by_one():
    mode = Mode()
    ours, x, keys = (
        replace_stateful_layers(nn.Sequential(nn.Dropout(0.5)), mode, True),
        torch.randn(3, 4, 5),
        torch.arange(3),
    )

    def one(x, key):
        with mode.activate(True, noise_key=key):
            return ours(x)

    assert torch.equal(vmap(one)(x, keys), torch.stack([one(*pair) for pair in zip(x, keys, strict=True)]))


def test_dropout_without_a_key_is_a_mistake_of_ours():
    mode = Mode()
    ours = replace_stateful_layers(nn.Sequential(nn.Dropout(0.5)), mode, True)
    with mode.activate(True), pytest.raises(RuntimeError, match="key"):
        ours(torch.ones(3))


@pytest.mark.parametrize("size", [2, (3, 5), (None, 2), (1, 4)])
def test_adaptive_pooling_has_a_deterministic_gradient_on_a_gpu(size):
    """On a device that the CPU plays, which refuses what a GPU refuses; windows overlap where they do not fit."""
    x, wanted = torch.randn(2, 3, 7, 9, dtype=torch.float64, requires_grad=True), nn.AdaptiveAvgPool2d(size)
    ours, weights = replace_stateful_layers(nn.Sequential(wanted), Mode(), True), torch.randn(9, dtype=torch.float64)

    def loss(y):
        return (y.square() * weights.to(y.device)[: y.shape[-1]]).sum()

    loss(wanted(x)).backward()
    assert torch.equal(ours(x), wanted(x))
    with fake_device.at_hand():
        there = x.detach().to(fake_device.DEVICE).requires_grad_()
        y = ours(there)
        loss(y).backward()
        assert torch.allclose(y.detach().to("cpu"), wanted(x), atol=1e-12)
        assert torch.allclose(there.grad.to("cpu"), x.grad, atol=1e-12)
        with pytest.raises(RuntimeError, match="no deterministic kernel"):
            loss(wanted(x.detach().to(fake_device.DEVICE).requires_grad_())).backward()


def test_pooling_to_one_value_is_a_mean_and_stays():
    assert (
        type(replace_stateful_layers(nn.Sequential(nn.AdaptiveAvgPool2d(1)), Mode(), True)[0]) is nn.AdaptiveAvgPool2d
    )
