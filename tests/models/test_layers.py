import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedpipe.core.noise import CHUNK, generate_uniform, generate_uniform_in_chunks
from fedpipe.models.layers import BatchNorm, BufferRecord, Dropout, Mode, replace_stateful_layers
from tests import fake_device


def make_batch_norms(channels=3, track=True):
    """PyTorch's layer with random statistics, and our replacement."""
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(channels).double()
    with torch.no_grad():
        for value in (theirs.weight, theirs.bias, theirs.running_mean, theirs.running_var):
            value.copy_(torch.rand(channels))
    mode = Mode()
    ours = replace_stateful_layers(nn.Sequential(copy.deepcopy(theirs)), mode, track)
    return theirs, ours, mode


def test_batch_norm_in_evaluation_equals_pytorch():
    theirs, ours, _ = make_batch_norms()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    assert torch.equal(ours(x), theirs.eval()(x))


def get_statistics(records: list[BufferRecord]) -> dict[str, Tensor]:
    """Get the running statistics after all calls, by name."""
    return {record.name: record.new for record in records}


def assert_equal_statistics(records: list[BufferRecord], theirs: nn.BatchNorm2d) -> None:
    """Compare the running statistics after all calls with those of PyTorch's layer."""
    statistics = get_statistics(records)
    torch.testing.assert_close(statistics["0.running_mean"], theirs.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(statistics["0.running_var"], theirs.running_var, rtol=1e-12, atol=0)


def replace_layers(*layers):
    """Replace layers of a network, and return the network and its mode."""
    mode = Mode()
    return replace_stateful_layers(nn.Sequential(*layers), mode, True), mode


def test_batch_norm_training_and_running_statistics_match_pytorch():
    theirs, ours, mode = make_batch_norms()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    with mode.activate(True) as records:
        y = ours(x)
    torch.testing.assert_close(y, theirs(x), rtol=1e-12, atol=1e-12)
    assert_equal_statistics(records, theirs)


def test_batch_norm_gradient_includes_batch_statistics():
    theirs, ours, mode = make_batch_norms()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(theirs(x).square().mul(x).sum(), x)
    with mode.activate(True):
        (gradient,) = torch.autograd.grad(ours(x).square().mul(x).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [3, 8, 17])
def test_batch_norm_keeps_channels_last_layout_and_results(channels):
    """With 3 channels, the layer computes by rows."""
    theirs, ours, mode = make_batch_norms(channels)
    x = torch.randn(5, channels, 4, 4, dtype=torch.float64)
    last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    torch.testing.assert_close(ours(last), copy.deepcopy(theirs).eval()(x), rtol=1e-12, atol=1e-12)
    with mode.activate(True) as records:
        y = ours(last)
    (gradient,) = torch.autograd.grad(y.square().mul(x).sum(), last)
    x.requires_grad_()
    expected = theirs(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected.square().mul(x.detach()).sum(), x))
    assert_equal_statistics(records, theirs)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mask", [None, torch.ones(5, dtype=torch.float64)])
def test_batch_norm_called_twice_updates_statistics_twice(mask):
    theirs, ours, mode = make_batch_norms()
    first, second = torch.randn(2, 5, 3, 2, 2, dtype=torch.float64)
    with mode.activate(True, mask) as records:
        ours(first), ours(second)
    theirs(first), theirs(second)
    assert_equal_statistics(records, theirs)


@pytest.mark.parametrize("samples", [1, 3])
def test_batch_norm_ignores_padding(samples):
    _, ours, mode = make_batch_norms()
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    mask = (torch.arange(5) < samples).double()
    with mode.activate(True) as expected_records:
        expected = ours(x[:samples])
    with mode.activate(True, mask) as records:
        y = ours(x)[:samples]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for name, value in get_statistics(expected_records).items():
        torch.testing.assert_close(get_statistics(records)[name], value, rtol=1e-12, atol=1e-12)


def test_batch_norm_of_single_value_returns_bias_and_keeps_statistics():
    layer = nn.BatchNorm1d(2).double()
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([3.0, -1.0]))
    ours, mode = replace_layers(layer)
    x = torch.tensor([[5.0, 7.0]], dtype=torch.float64, requires_grad=True)
    for mask in (None, torch.ones(1, dtype=torch.float64)):
        with mode.activate(True, mask) as records:
            y = ours(x)
        assert y.tolist() == [[3, -1]]
        assert get_statistics(records)["0.running_mean"].tolist() == [0, 0]
        assert get_statistics(records)["0.running_var"].tolist() == [1, 1]
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_batch_norm_without_tracking_uses_batch_statistics_in_evaluation():
    _, ours, mode = make_batch_norms(track=False)
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    with mode.activate(True):
        y = ours(x)
    assert torch.equal(ours(x), y)
    assert not list(ours.buffers())


def test_teacher_uses_evaluation_mode_during_training():
    _, ours, mode = make_batch_norms()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    evaluated = ours(x)
    with mode.activate(True) as records:
        with mode.evaluate_teacher():
            assert torch.equal(ours(x), evaluated)
        assert not records
        assert not torch.equal(ours(x), evaluated)
        assert set(get_statistics(records)) == {"0.running_mean", "0.running_var"}


def test_stateful_layers_are_replaced_by_type_at_any_depth():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.custom_norm = nn.BatchNorm2d(2)
            self.shortcut = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
            self.drop = nn.ModuleDict({"p": nn.Dropout2d(0.5)})

    module = replace_stateful_layers(Block(), Mode(), track=True)
    kinds = [type(module.get_submodule(name)) for name in ("custom_norm", "shortcut.1", "drop.p")]
    assert kinds == [BatchNorm, BatchNorm, Dropout]


def test_uniform_numbers_match_splitmix64():
    """Compared with the published algorithm in Python's integers. The state begins at the mixed key."""
    gamma, bits = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
        return z ^ (z >> 31)

    key = 2**62 - 5
    expected = [(mix(((mix(key) + index) * gamma) & bits) >> 40) / 2**24 for index in range(1, 7)]
    assert generate_uniform(torch.tensor(key), (2, 3)).flatten().tolist() == expected


@pytest.mark.parametrize("key", [0, 1, -5, 2**62 - 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("shape", [(3,), (7, 5, 1), (CHUNK,), (2, CHUNK + 1)])
def test_uniform_numbers_in_chunks_have_equal_bits(key, shape):
    chunked, expected = (draw(torch.tensor(key), shape) for draw in (generate_uniform_in_chunks, generate_uniform))
    assert chunked.dtype == expected.dtype
    assert torch.equal(chunked, expected)


def test_uniform_numbers_are_uniform_and_do_not_repeat():
    draws = torch.stack([generate_uniform(torch.tensor(key), (1000,)) for key in range(50)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws.numpy(), bins=20, range=(0, 1))[0]
    assert np.abs(counts - 2500).max() < 5 * 2500**0.5
    correlations = np.corrcoef(draws.numpy()) - np.eye(50)
    assert np.abs(correlations).max() < 5 / 1000**0.5
    assert draws.unique().numel() > 49_000


@pytest.mark.parametrize(("layer", "is_channelwise"), [(nn.Dropout(0.25), False), (nn.Dropout2d(0.25), True)])
def test_dropout_depends_only_on_noise_key(layer, is_channelwise):
    (ours, mode), x = replace_layers(layer), torch.ones(2000, 1, 2, 3)
    assert torch.equal(ours(x), x)

    def apply_dropout(key):
        with mode.activate(True, noise_key=torch.tensor(key)):
            return ours(x)

    first, repeated, other = apply_dropout(1), apply_dropout(1), apply_dropout(2)
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
    assert first.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.04)
    has_one_value = (first.flatten(1) == first.flatten(1)[:, :1]).all(1)
    assert bool(has_one_value.all()) == is_channelwise


def test_noise_differs_between_layers_and_consecutive_batches():
    """The keys of an epoch's batches and of a network's layers are consecutive. Transforms use the key."""
    ours, mode = replace_layers(*(nn.Dropout(0.5) for _ in range(4)))
    noises = []
    for key in map(torch.tensor, range(7, 12)):
        noises.append(generate_uniform(key, (100,)) >= 0.5)
        with mode.activate(True, noise_key=key):
            noises += [layer(torch.ones(100)) > 0 for _ in range(2) for layer in ours]  # type: ignore[attr-defined]
    assert len({tuple(draws.tolist()) for draws in noises}) == 5 * (1 + 2 * 4)


def test_dropout_called_twice_draws_different_numbers():
    (ours, mode), x = replace_layers(nn.Dropout(0.5)), torch.ones(100)
    with mode.activate(True, noise_key=torch.tensor(1)):
        first, second = ours(x), ours(x)
        mode.calls.clear()  # like another call of the network
        repeated = ours(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, repeated)


def test_batch_norm_with_cumulative_mean_is_rejected():
    with pytest.raises(NotImplementedError, match="momentum=None"):
        replace_layers(nn.BatchNorm1d(3, momentum=None))


def test_dropout_under_vmap_equals_dropout_of_each_sample():
    ours, mode = replace_layers(nn.Dropout(0.5))
    x, keys = torch.randn(3, 4, 5), torch.arange(3)

    def apply_one(x, key):
        with mode.activate(True, noise_key=key):
            return ours(x)

    assert torch.equal(vmap(apply_one)(x, keys), torch.stack([apply_one(*pair) for pair in zip(x, keys, strict=True)]))


def test_dropout_without_noise_key_raises():
    ours, mode = replace_layers(nn.Dropout(0.5))
    with mode.activate(True), pytest.raises(RuntimeError, match="key"):
        ours(torch.ones(3))


@pytest.mark.parametrize("size", [2, (3, 5), (None, 2), (1, 4)])
def test_adaptive_pooling_has_deterministic_gradient_on_gpu(size):
    """The CPU simulates a GPU, which rejects some kernels. Windows overlap if sizes are not divisible."""
    x, theirs = torch.randn(2, 3, 7, 9, dtype=torch.float64, requires_grad=True), nn.AdaptiveAvgPool2d(size)
    (ours, _), weights = replace_layers(theirs), torch.randn(9, dtype=torch.float64)

    def loss(y):
        return (y.square() * weights.to(y.device)[: y.shape[-1]]).sum()

    loss(theirs(x)).backward()
    assert torch.equal(ours(x), theirs(x))
    with fake_device.use_device():
        device_x = x.detach().to(fake_device.DEVICE).requires_grad_()
        y = ours(device_x)
        loss(y).backward()
        assert torch.allclose(y.detach().to("cpu"), theirs(x), atol=1e-12)
        assert torch.allclose(device_x.grad.to("cpu"), x.grad, atol=1e-12)
        with pytest.raises(RuntimeError, match="no deterministic kernel"):
            loss(theirs(x.detach().to(fake_device.DEVICE).requires_grad_())).backward()


def test_pooling_to_one_value_is_not_replaced():
    ours, _ = replace_layers(nn.AdaptiveAvgPool2d(1))
    assert type(ours[0]) is nn.AdaptiveAvgPool2d
