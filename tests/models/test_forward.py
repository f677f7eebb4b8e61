"""Logits of each network equal those of its description, written here with functions of the tensors in order."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpipe.core.components import component, registry
from fedpipe.models.base import Model
from tests.models.test_models import NAMES

CLASSES = 5
IMAGES, PIXELS, TOKENS = (3, 32, 24), (3, 8, 4), (6,)
TESTED_ELSEWHERE = {"resnet18", "timm", "torchvision", "vgg16"}  #: the networks of torchvision and timm


class TensorReader:
    """Applies layers to an input, each with the network's next tensors."""

    def __init__(self, network: nn.Module) -> None:
        tensors = network.state_dict().items()
        self._tensors = iter([value for name, value in tensors if not name.endswith("num_batches_tracked")])

    def read(self) -> Tensor:
        tensor: Tensor = next(self._tensors)
        return tensor

    def convolve(self, x: Tensor, has_bias: bool = True, **options: Any) -> Tensor:
        y: Tensor = F.conv2d(x, self.read(), self.read() if has_bias else None, **options)
        return y

    def normalize(self, x: Tensor) -> Tensor:
        axes = (..., *[None] * (x.dim() - 2))
        weight, bias, mean, variance = (self.read()[axes] for _ in range(4))
        return weight * (x - mean) / torch.sqrt(variance + 1e-5) + bias

    def multiply(self, x: Tensor) -> Tensor:
        return x @ self.read().T + self.read()

    def map_features(self, x: Tensor) -> Tensor:
        """FedDW's mapping layers and the output layer."""
        return self.multiply(self.multiply(self.multiply(x).relu()))

    def convolve_and_pool_twice(self, x: Tensor, padding: int = 0, has_norm: bool = False) -> Tensor:
        for _ in range(2):
            y = self.convolve(x, padding=padding)
            x = F.max_pool2d((self.normalize(y) if has_norm else y).relu(), 2)
        return x.flatten(1)


def compute_cnn(tensors: TensorReader, x: Tensor, has_norm: bool = False) -> Tensor:
    x = tensors.convolve_and_pool_twice(x, padding=1, has_norm=has_norm)
    return tensors.multiply(tensors.multiply(x).relu())


def compute_cnn4(tensors: TensorReader, x: Tensor) -> Tensor:
    return tensors.multiply(tensors.multiply(tensors.convolve_and_pool_twice(x)).relu())


def compute_cnn5(tensors: TensorReader, x: Tensor, has_norm: bool = False) -> Tensor:
    x = tensors.convolve_and_pool_twice(x, has_norm=has_norm)
    for _ in range(2):
        y = tensors.multiply(x)
        x = (tensors.normalize(y) if has_norm else y).relu()
    return tensors.multiply(x)


def compute_feddw_cnn(tensors: TensorReader, x: Tensor) -> Tensor:
    return tensors.map_features(tensors.convolve_and_pool_twice(x))


def compute_feddw_resnet18(tensors: TensorReader, x: Tensor) -> Tensor:
    x = tensors.normalize(tensors.convolve(x, padding=1)).relu()
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = tensors.normalize(tensors.convolve(x, stride=stride, padding=1)).relu()
            y = tensors.normalize(tensors.convolve(y, padding=1))
            x = (y + (x if stride == 1 else tensors.normalize(tensors.convolve(x, stride=2)))).relu()
    return tensors.map_features(x.mean((2, 3)))


def compute_lenet(tensors: TensorReader, x: Tensor) -> Tensor:
    for _ in range(2):
        x = F.avg_pool2d(tensors.convolve(x).tanh(), 2)
    x = tensors.convolve(x).tanh().flatten(1)
    return tensors.multiply(tensors.multiply(x).tanh())


def compute_mlp(tensors: TensorReader, x: Tensor) -> Tensor:
    x = x.flatten(1)
    for _ in range(2):
        x = tensors.multiply(x).relu()
    return tensors.multiply(x)


def compute_mobilenet(tensors: TensorReader, x: Tensor) -> Tensor:
    x = tensors.normalize(tensors.convolve(x, has_bias=False, padding=1)).relu()
    # MobileNetV2's table 2 with half of its channels. The stage of 24 has stride 1 for 32x32 images.
    table = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, first_stride in table:
        for stride in (first_stride, *[1] * (repeats - 1)):
            inputs, inner = x.shape[1], expansion * x.shape[1]
            y = tensors.normalize(tensors.convolve(x, has_bias=False)).relu()
            y = tensors.normalize(tensors.convolve(y, False, stride=stride, padding=1, groups=inner)).relu()
            y = tensors.normalize(tensors.convolve(y, has_bias=False))
            if stride == 1:
                y = y + (x if inputs == channels // 2 else tensors.normalize(tensors.convolve(x, has_bias=False)))
            x = y
    x = tensors.normalize(tensors.convolve(x, has_bias=False)).relu()
    return tensors.map_features(x.mean((2, 3)))


def compute_shufflenet(tensors: TensorReader, x: Tensor) -> Tensor:
    x = tensors.normalize(tensors.convolve(x, has_bias=False)).relu()
    for stage, units in enumerate((4, 8, 4)):
        for unit in range(units):
            stride = 1 if unit else 2
            groups = 2 if stage or unit else 1  # the paper's first unit has no groups, because its inputs are few
            y = tensors.normalize(tensors.convolve(x, has_bias=False, groups=groups)).relu()
            y = torch.stack(y.chunk(groups, 1), 2).flatten(1, 2)
            y = tensors.normalize(tensors.convolve(y, False, stride=stride, padding=1, groups=y.shape[1])).relu()
            y = tensors.normalize(tensors.convolve(y, has_bias=False, groups=2))
            shortcut = F.avg_pool2d(x, 3, stride=2, padding=1)
            x = (x + y if unit else torch.cat([y, shortcut], 1)).relu()
    return tensors.map_features(x.mean((2, 3)))


def run_lstm_layer(tensors: TensorReader, x: Tensor, *, is_reversed: bool = False) -> Tensor:
    """Outputs (B, length, hidden) of an LSTM with gates in PyTorch's order: input, forget, cell, output."""
    input_weight, hidden_weight, input_bias, hidden_bias = (tensors.read() for _ in range(4))
    hidden = cell = x.new_zeros(len(x), hidden_weight.shape[1])
    outputs = []
    for step in x.flip(1).unbind(1) if is_reversed else x.unbind(1):
        gates = step @ input_weight.T + input_bias + hidden @ hidden_weight.T + hidden_bias
        entry, forget, update, output = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + entry.sigmoid() * update.tanh()
        hidden = output.sigmoid() * cell.tanh()
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if is_reversed else outputs, 1)


def compute_bilstm(tensors: TensorReader, x: Tensor) -> Tensor:
    x = tensors.read()[x]
    outputs = [run_lstm_layer(tensors, x), run_lstm_layer(tensors, x, is_reversed=True)]
    steps = tensors.multiply(torch.cat(outputs, 2)).relu()
    return tensors.multiply(tensors.multiply(steps.mean(1)))


def compute_lstm(tensors: TensorReader, x: Tensor) -> Tensor:
    lengths = (x != 0).sum(1)
    outputs = run_lstm_layer(tensors, run_lstm_layer(tensors, tensors.read()[x]))
    return tensors.multiply(torch.stack([output[length - 1] for output, length in zip(outputs, lengths, strict=True)]))


def compute_fasttext(tensors: TensorReader, x: Tensor) -> Tensor:
    return tensors.multiply(tensors.multiply(tensors.read()[x].mean(1)))


CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any], Callable[[TensorReader, Tensor], Tensor]]] = {
    "bilstm": ("bilstm", TOKENS, {"vocabulary": 30}, compute_bilstm),
    "cnn": ("cnn", PIXELS, {}, compute_cnn),
    "cnn with BatchNorm": ("cnn", PIXELS, {"batch_norm": True}, partial(compute_cnn, has_norm=True)),
    "cnn4": ("cnn4", IMAGES, {}, compute_cnn4),
    "cnn5": ("cnn5", IMAGES, {}, compute_cnn5),
    "cnn5 with BatchNorm": ("cnn5", IMAGES, {"batch_norm": True}, partial(compute_cnn5, has_norm=True)),
    "fasttext": ("fasttext", TOKENS, {"vocabulary": 30}, compute_fasttext),
    "feddw_cnn": ("feddw_cnn", IMAGES, {"dropout": 0.5}, compute_feddw_cnn),
    "feddw_resnet18": ("feddw_resnet18", IMAGES, {}, compute_feddw_resnet18),
    "lenet": ("lenet", IMAGES, {}, compute_lenet),
    "lstm": ("lstm", TOKENS, {"vocabulary": 30}, compute_lstm),
    "mlp": ("mlp", PIXELS, {"hidden": [7, 6]}, compute_mlp),
    "mobilenet": ("mobilenet", IMAGES, {}, compute_mobilenet),
    "shufflenet": ("shufflenet", IMAGES, {}, compute_shufflenet),
}


@pytest.fixture(autouse=True)
def random_numbers() -> Iterator[torch.Generator]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        yield torch.Generator().manual_seed(5)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_description(case: str, random_numbers: torch.Generator) -> None:
    name, shape, parameters, compute_logits = CASES[case]
    model = registry.build_component(component.MODEL, name, parameters)
    assert isinstance(model, Model)
    network = model.build(shape, CLASSES).double().eval()
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # statistics and parameters of a trained network
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                assert tensor is not None
                tensor.data.uniform_(0.5, 1.5, generator=random_numbers)
    x = torch.randn(2, *shape, generator=random_numbers, dtype=torch.float64)
    if shape == TOKENS:
        x = torch.tensor([[1, 5, 9, 2, 29, 7], [3, 8, 4, 1, 0, 0]])
    tensors = TensorReader(network)
    with torch.no_grad():
        expected, logits = compute_logits(tensors, x), network(x)
    with pytest.raises(StopIteration):
        tensors.read()
    assert logits.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-12)


def test_each_network_of_a_paper_has_a_description() -> None:
    assert {name for name, *_ in CASES.values()} | TESTED_ELSEWHERE == set(NAMES)
