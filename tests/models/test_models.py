"""Every model is a body and a head, and a pure function of its parameters."""

import functools
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedpipe.core.components import component, registry
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Model, Network, compute_class_relations
from fedpipe.models.purity import require_pure_network
from tests.errors import rejects

CLASSES = 7
TOKEN_FAMILIES = ("bilstm", "fasttext", "lstm")
SHAPES = dict.fromkeys(TOKEN_FAMILIES, (6,)) | {
    "feddw_resnet18": (3, 6, 5),
    "resnet18": (3, 6, 5),
    "timm": (3, 32, 16),
    "torchvision": (3, 33, 32),
    "vgg16": (3, 32, 33),
}
SHAPE = (3, 20, 16)  #: an input with unequal sides for all other families
PARAMETERS: dict[str, dict[str, Any]] = {
    "bilstm": {"vocabulary": 30},
    "fasttext": {"vocabulary": 30},
    "lstm": {"vocabulary": 30},
    "timm": {"architecture": "test_vit"},
    "torchvision": {"architecture": "shufflenet_v2_x0_5"},
    "vgg16": {"weights": None},  # frozen, which is fast. test_vgg16.py trains it
}
NAMES = registry.list_components(component.MODEL)
BIASED = ("bilstm", "cnn", "feddw_cnn", "feddw_resnet18", "mobilenet", "shufflenet")  #: with FedDW's classifier
NORMALISED = ("feddw_resnet18", "mobilenet", "resnet18", "shufflenet", "torchvision")
CHAINS = ("cnn", "cnn4", "cnn5", "feddw_cnn", "lenet", "mlp")  #: each layer's input is the output of the previous one
COPIES = 2
MNIST, CIFAR, TINY, IMDB, NEWS = (1, 28, 28), (3, 32, 32), (3, 64, 64), (200,), (200,)


def build_model(name: str, **parameters: Any) -> Model:
    model = registry.build_component(component.MODEL, name, PARAMETERS.get(name, {}) | parameters)
    assert isinstance(model, Model)
    return model


def get_shape(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, SHAPE)


@functools.cache
def make_network(name: str, dtype: torch.dtype = torch.float32) -> FunctionalNetwork:
    return FunctionalNetwork(lambda: build_model(name).build(get_shape(name), CLASSES), dtype)


@functools.cache
def make_initial_model(name: str, entropy: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return make_network(name, dtype).make_initial_model(entropy)


def make_inputs(name: str, count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    shape, source = (count, *get_shape(name)), torch.Generator().manual_seed(3)
    if "vocabulary" in PARAMETERS.get(name, {}):
        return torch.randint(30, shape, generator=source)
    return torch.randn(shape, generator=source, dtype=dtype)


def count_parameters(name: str, shape: tuple[int, ...], num_classes: int, **parameters: Any) -> int:
    model = registry.build_component(component.MODEL, name, parameters)
    assert isinstance(model, Model)
    model.check(shape, num_classes)
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in model.build(shape, num_classes).parameters())


def test_cnn_has_expected_parameter_count() -> None:
    convolutions = (1 * 9 * 16 + 16) + (16 * 9 * 32 + 32)
    assert count_parameters("cnn", (1, 8, 8), 10) == convolutions + (32 * 2 * 2 * 64 + 64) + (64 * 10 + 10) == 13_706
    assert count_parameters("cnn", (1, 8, 8), 10, batch_norm=True) == 13_706 + 2 * (16 + 32)
    assert count_parameters("cnn", (1, 8, 8), 10, bias=False) == 13_706 - 10


def test_cnn5_has_expected_parameter_count_and_batch_norm_layers() -> None:
    assert count_parameters("cnn5", CIFAR, 10, batch_norm=True) == 62_006 + 2 * (6 + 16 + 120 + 84)
    assert count_parameters("cnn5", CIFAR, 10, batch_norm="convolutions") == 62_006 + 2 * (6 + 16)
    plain, normalized = (build_model("cnn5", batch_norm=batch_norm).build(CIFAR, 10) for batch_norm in (False, True))
    layers = [layer for layer in normalized.body if not isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))]  # type: ignore[attr-defined]
    assert [type(layer) for layer in plain.body] == [type(layer) for layer in layers]  # type: ignore[attr-defined]
    previous_layers = [
        type(normalized.body[index - 1]) for index, layer in enumerate(normalized.body) if layer not in layers
    ]
    assert previous_layers == [nn.Conv2d, nn.Conv2d, nn.Linear, nn.Linear]


def test_mlp_has_expected_parameter_count() -> None:
    assert count_parameters("mlp", (1, 8, 8), 10) == (64 * 64 + 64) + (64 * 10 + 10) == 4_810
    toy = build_model("mlp", hidden=[4], biases=False).build((3,), 2)  # the network of cwFedAvg's first figure
    assert [tuple(tensor.shape) for tensor in toy.parameters()] == [(4, 3), (2, 4)]
    count = sum(tensor.numel() for tensor in build_model("mlp", hidden=[5, 3]).build((2, 4), 6).parameters())
    assert count == (8 * 5 + 5) + (5 * 3 + 3) + (3 * 6 + 6)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("cnn4", (1, 28, 28), 10, 582_026),
        ("cnn4", CIFAR, 10, 878_538),
        ("cnn4", CIFAR, 100, 924_708),
        ("cnn4", (3, 64, 64), 200, 5_694_600),
        ("feddw_cnn", CIFAR, 10, 139_714),
        ("lenet", MNIST, 10, 164_116),
        ("cnn5", CIFAR, 10, 62_006),
        ("cnn5", CIFAR, 100, 69_656),
        ("feddw_resnet18", CIFAR, 100, 11_350_756),  # this and the next two: the counts of FedDW's code
        ("shufflenet", CIFAR, 100, 1_130_424),
        ("mobilenet", CIFAR, 100, 807_660),
        ("resnet18", TINY, 1000, 11_689_512),  # as published by torchvision
        ("resnet18", TINY, 200, 11_279_112),
        ("bilstm", IMDB, 2, 1_593_858),  # 10,000 x 128 + 2 x 4 x (2 x 128² + 2 x 128) + layers of 256, 128, 128 and 2
        ("fasttext", NEWS, 4, 3_157_508),  # 98,635 x 32 + (32 x 32 + 32) + (32 x 4 + 4)
        ("lstm", (81,), 80, 820_000),  # 90 x 8 + 4 x 256 x (8 + 256 + 2 + 256 + 256 + 2) + (256 x 80 + 80)
    ],
)
def test_models_have_expected_parameter_counts(name: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    assert count_parameters(name, shape, classes) == count


def test_feddw_cnn_for_mnist_has_expected_parameter_count() -> None:
    assert count_parameters("feddw_cnn", MNIST, 10, channels=[10, 20], dropout=0.5) == 121_642


def test_feddw_resnet18_parameter_count_follows_from_torchvision() -> None:
    trunk = count_parameters("resnet18", TINY, 1000) - (512 * 1000 + 1000) - (49 - 9) * 3 * 64
    biases = 64 * (1 + 4) + (128 + 256 + 512) * 5
    mapping = (512 * 256 + 256) + (256 * 128 + 128) + (128 * 100 + 100)
    assert count_parameters("feddw_resnet18", CIFAR, 100) == trunk + biases + mapping


def test_lstm_reads_last_token_before_padding() -> None:
    network = build_model("lstm").build((6,), CLASSES)
    short, padded = torch.tensor([[1, 5, 9]]), torch.tensor([[1, 5, 9, 0, 0, 0]])
    assert torch.allclose(network(short), network(padded), rtol=1e-5)
    assert not torch.allclose(network(short), network(torch.tensor([[1, 5, 9, 4, 0, 0]])), rtol=1e-3)


@pytest.mark.parametrize("name", BIASED)
def test_bias_setting_removes_bias_of_output_layer(name: str) -> None:
    with torch.device("meta"):
        networks = [build_model(name, bias=bias).build(get_shape(name), CLASSES) for bias in (True, False)]
    assert [network.head.bias is None for network in networks] == [False, True]
    sizes = [sum(tensor.numel() for tensor in network.parameters()) for network in networks]
    assert sizes[0] - sizes[1] == CLASSES


def test_models_with_feddw_classifier_have_bias_setting() -> None:
    names = [name for name in NAMES if "bias" in {field.name for field in fields(build_model(name))}]
    assert names == sorted(BIASED)


@pytest.mark.parametrize("name", NAMES)
def test_body_computes_features_and_head_computes_logits(name: str) -> None:
    network = build_model(name).build(get_shape(name), CLASSES).eval()
    assert [part for part, _ in network.named_children()] == ["body", "head"]
    assert isinstance(network.head, nn.Linear)
    for count in (1, 3):
        features = network.body(make_inputs(name, count))
        assert features.shape == (count, network.head.in_features)
        assert network.head(features).shape == (count, CLASSES)
        assert torch.equal(network(make_inputs(name, count)), network.head(features))
    norm_layers = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert bool(norm_layers) == bool(list(network.buffers())) == (name in NORMALISED)
    assert not any(getattr(layer, "inplace", False) for layer in network.modules())


@pytest.mark.parametrize("name", NAMES)
def test_tensor_names_are_split_into_body_and_head(name: str) -> None:
    network = make_network(name)
    assert {*network.names, *network.buffer_names} == {*network.body_names, *network.head_names}
    assert network.head_names == ("head.weight", "head.bias")
    assert all(name.startswith("body.") for name in network.body_names)
    assert tuple(make_initial_model(name, 1)) == network.names + network.buffer_names
    assert bool(network.norm_names) == (name in (*NORMALISED, "timm"))
    assert all(name in network.norm_names for name in network.buffer_names)


@pytest.mark.parametrize("name", NAMES)
def test_layers_contain_every_tensor_once_and_end_with_head(name: str) -> None:
    network = make_network(name)
    layers = network.layers()
    assert layers[-1] == ("head.weight", "head.bias")
    assert sorted(name for layer in layers for name in layer) == sorted(network.names + network.buffer_names)
    assert all(len({name.rpartition(".")[0] for name in layer}) == 1 for layer in layers)


def test_buffers_without_parameters_belong_to_layer_before_them() -> None:
    """Those of the first layer belong to the layer after it. The last layer is the head, not a BatchNorm."""

    def build_network() -> Network:
        body = [nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Linear(4, 3)]
        return Network(nn.Sequential(nn.BatchNorm1d(5, affine=False), *body), nn.Linear(3, CLASSES))

    network = FunctionalNetwork(build_network)
    statistics = [f"body.{index}.{name}" for index in (0, 2) for name in ("running_mean", "running_var")]
    assert network.layers() == [
        ("body.1.weight", "body.1.bias", *statistics),
        ("body.4.weight", "body.4.bias"),
        ("head.weight", "head.bias"),
    ]
    assert network.last_layer_names(1) == ("head.weight", "head.bias")


@pytest.mark.parametrize("name", CHAINS)
def test_layers_are_ordered_from_input_to_output(name: str) -> None:
    network, model, width = make_network(name), make_initial_model(name, 1), get_shape(name)[0]
    for weight, *_ in network.layers():
        if model[weight].dim() == 4:
            assert model[weight].shape[1] == width
            width = model[weight].shape[0]
    assert network.features(model, make_inputs(name)).shape[1] == model["head.weight"].shape[1]


@pytest.mark.parametrize("name", NAMES)
def test_initial_model_depends_only_on_entropy(name: str) -> None:
    network, entropy = make_network(name), 2**127 + 12345
    model = network.make_initial_model(entropy)
    torch.manual_seed(99)
    torch.randn(10)
    copy, other = network.make_initial_model(entropy), network.make_initial_model(entropy + 1)
    assert all(torch.equal(model[name], copy[name]) for name in model)
    weights = [name for name in model if model[name].dim() > 1]  # vectors may be constants, like those of BatchNorm
    assert len(weights) > 1
    assert all(not torch.equal(model[name], other[name]) for name in weights)
    double = make_network(name, torch.float64).make_initial_model(entropy)
    assert all(torch.equal(model[name].double(), double[name]) for name in model)
    assert all(value.dtype == torch.float64 for value in double.values())
    assert not any(value.requires_grad for value in model.values())


@pytest.mark.parametrize("name", NAMES)
def test_network_keeps_states_of_global_generators(name: str) -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index, union-attr]  # noqa: NPY002
    network = FunctionalNetwork(lambda: build_model(name).build(get_shape(name), CLASSES))
    network(network.make_initial_model(8), make_inputs(name))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == states[2]


@pytest.mark.parametrize("name", NAMES)
def test_network_output_equals_head_applied_to_features(name: str) -> None:
    network = make_network(name, torch.float64)
    model, x = make_initial_model(name, 4, torch.float64), make_inputs(name, dtype=torch.float64)
    features = network.features(model.only(network.body_names), x)  # works without the head's tensors
    logits = features @ model["head.weight"].T + model["head.bias"]
    assert torch.allclose(network(model, x), logits, rtol=1e-12, atol=1e-14)
    assert torch.equal(network.classify(model, network.features(model, x)), network(model, x))


@pytest.mark.parametrize("name", NAMES)
def test_network_call_is_pure_function_of_its_arguments(name: str) -> None:
    network, x = make_network(name), make_inputs(name)
    one, other = (make_initial_model(name, entropy) for entropy in (1, 2))
    copy, first = one.map(torch.clone), network(one, x)
    assert not torch.equal(network(other, x), first)
    assert torch.equal(network(one, x), first)
    assert all(torch.equal(one[name], copy[name]) for name in one)


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_independent_of_batch_in_evaluation(name: str) -> None:
    network, model = make_network(name, torch.float64), make_initial_model(name, 1, torch.float64)
    x = make_inputs(name, dtype=torch.float64)
    logits, single_logits = network(model, x), torch.cat([network(model, sample[None]) for sample in x])
    assert torch.allclose(logits, single_logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_copy_for_thread_computes_equal_results_with_separate_module(name: str) -> None:
    network, model, x = make_network(name), make_initial_model(name, 1), make_inputs(name)
    twin = network.copy_for_thread()
    assert torch.equal(twin(model, x), network(model, x))
    assert torch.equal(twin.features(model, x), network.features(model, x))
    assert twin._module is not network._module
    pointers = {parameter.data_ptr() for parameter in network._module.parameters()}
    assert not pointers & {parameter.data_ptr() for parameter in twin._module.parameters()}
    initial_model = twin.make_initial_model(1)
    assert all(torch.equal(model[name], initial_model[name]) for name in model)


def make_loss(network: FunctionalNetwork, x: Tensor) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]:
    def compute_loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return network(Tensors({**parameters, **buffers}), x).square().mean()

    return compute_loss


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_autograd_and_reach_every_tensor(name: str) -> None:
    network, x = make_network(name, torch.float64), make_inputs(name, dtype=torch.float64)
    model = make_initial_model(name, 1, torch.float64)
    buffers = {name: model[name] for name in network.buffer_names}
    gradients = torch.func.grad(make_loss(network, x))({name: model[name] for name in network.names}, buffers)
    parameters = {name: model[name].clone().requires_grad_() for name in network.names}
    expected = torch.autograd.grad(make_loss(network, x)(parameters, buffers), list(parameters.values()))
    for name, gradient in zip(network.names, expected, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.abs().sum() > 0, name
        assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-15), name


@pytest.mark.parametrize("name", [name for name in NAMES if build_model(name).is_stackable])
def test_stacked_gradients_equal_gradients_of_each_model(name: str) -> None:
    network, x = make_network(name, torch.float64), make_inputs(name, dtype=torch.float64)
    models = [make_initial_model(name, entropy, torch.float64) for entropy in range(COPIES)]
    parameters, buffers = (
        [{name: model[name] for name in names} for model in models] for names in (network.names, network.buffer_names)
    )
    gradient = torch.func.grad(make_loss(network, x))
    stacked = [{name: torch.stack([one[name] for one in part]) for name in part[0]} for part in (parameters, buffers)]
    gradients = torch.func.vmap(gradient)(*stacked)
    for index in range(COPIES):
        expected = gradient(parameters[index], buffers[index])
        assert all(torch.allclose(gradients[name][index], expected[name], rtol=1e-9, atol=1e-12) for name in expected)


def test_only_lstm_models_are_not_stackable() -> None:
    assert [name for name in NAMES if not build_model(name).is_stackable] == ["bilstm", "lstm"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *[("cnn", shape) for shape in ((1, 3, 8), (64,))],
        *[("cnn4", shape) for shape in ((1, 8, 8), (1, 28, 15), (784,))],
        *[(name, (1, 16, 15)) for name in ("cnn5", "feddw_cnn", "lenet")],
        *[(name, (784,)) for name in ("feddw_resnet18", "mobilenet", "resnet18", "shufflenet", "vgg16")],
        *[(name, (1, 64, 64)) for name in ("resnet18", "vgg16")],
        ("vgg16", (3, 31, 32)),
        *[(name, (1, 28, 28)) for name in TOKEN_FAMILIES],
    ],
)
def test_model_rejects_unsupported_input_shapes(name: str, shape: tuple[int, ...]) -> None:
    with rejects(f"model.name: '{name}' can't take inputs of shape {shape}"):
        build_model(name).check(shape, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bilstm", (1,)),
        ("cnn", (1, 4, 4)),
        *[(name, (1, 16, 16)) for name in ("cnn4", "cnn5", "feddw_cnn", "lenet")],
        *[(name, (1, 1, 1)) for name in ("feddw_resnet18", "mobilenet", "shufflenet")],
        ("fasttext", (1,)),
        ("lstm", (1,)),
        ("mlp", (3,)),
        ("resnet18", (3, 1, 1)),
        ("vgg16", (3, 32, 32)),
    ],
)
def test_model_accepts_its_smallest_inputs(name: str, shape: tuple[int, ...]) -> None:
    network = build_model(name, **({"frozen": False} if name == "vgg16" else {}))
    network.check(shape, 2)
    network = network.build(shape, 2).eval()
    x = torch.zeros(1, *shape, dtype=torch.int64 if len(shape) == 1 and name != "mlp" else torch.float32)
    assert network(x).shape == (1, 2)


def test_lenet_layer_of_120_is_dense_layer_on_channels() -> None:
    network = build_model("lenet").build((1, 28, 28), 10).double()
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = network.body[6]
    dense = torch.einsum("bchw,oc->bhwo", x, layer.weight[:, :, 0, 0]) + layer.bias
    assert torch.allclose(layer(x).permute(0, 2, 3, 1), dense, rtol=1e-12, atol=1e-14)


def test_fasttext_padding_embedding_stays_zero_but_counts_in_mean() -> None:
    network, model = make_network("fasttext"), make_initial_model("fasttext", 1)
    name = network.names[0]
    assert not model[name][0].any()
    short, padded = torch.tensor([[3, 4]]), torch.tensor([[3, 4, 0, 0]])
    mean = network.features(model, short) - model["body.2.bias"]
    assert torch.allclose(network.features(model, padded) - model["body.2.bias"], mean / 2, rtol=1e-5)
    parameters = {name: value.clone().requires_grad_() for name, value in model.items()}
    (gradient,) = torch.autograd.grad(network(Tensors(parameters), padded).square().sum(), [parameters[name]])
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [3, 4]


def test_feddw_cnn_has_dropout_layer_only_for_positive_rate() -> None:
    for rate, expected in ((0.0, []), (0.5, [0.5])):
        network = build_model("feddw_cnn", dropout=rate).build(SHAPE, 2)
        assert [layer.p for layer in network.modules() if isinstance(layer, nn.Dropout)] == expected


def test_class_relations_are_softmax_of_gram_matrix() -> None:
    omega = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    e = torch.e
    expected = torch.tensor([[e / (e + 1), 1 / (e + 1)], [1 / (1 + e**4), e**4 / (1 + e**4)]], dtype=torch.float64)
    assert torch.allclose(compute_class_relations(omega), expected, rtol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_packaged_networks_pass_purity_check(name: str) -> None:
    """No layer draws numbers that do not depend on a seed, changes its buffers, or depends on `.train()`."""
    require_pure_network(build_model(name), get_shape(name), CLASSES)
