"""Every model is a body and a head, and a pure function of its parameters."""

from __future__ import annotations

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
from fedpipe.core.errors import SettingsError
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Model, compute_class_relations
from fedpipe.models.purity import require_pure_network

CLASSES = 7
SHAPES = {"bilstm": (6,), "fasttext": (6,), "feddw_resnet18": (3, 6, 5), "resnet18": (3, 6, 5), "vgg16": (3, 32, 33)}
SHAPE = (3, 20, 16)  #: an input that all other families take, its sides unequal
PARAMETERS: dict[str, dict[str, Any]] = {
    "bilstm": {"vocabulary": 30},
    "fasttext": {"vocabulary": 30},
    "vgg16": {"weights": None},  # so frozen, which is quick; test_vgg16.py trains it
}
NAMES = registry.list_components(component.MODEL)
NORMALISED = ("feddw_resnet18", "mobilenet", "resnet18", "shufflenet")
CHAINS = ("cnn", "cnn4", "cnn5", "feddw_cnn", "lenet", "mlp")  #: each layer takes what the one before made
COPIES = 2
MNIST, CIFAR, TINY, IMDB, NEWS = (1, 28, 28), (3, 32, 32), (3, 64, 64), (200,), (200,)


def family(name: str, **parameters: Any) -> Model:
    found = registry.build_component(component.MODEL, name, PARAMETERS.get(name, {}) | parameters)
    assert isinstance(found, Model)
    return found


def shape_for(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, SHAPE)


@functools.cache
def net(name: str, dtype: torch.dtype = torch.float32) -> FunctionalNetwork:
    return FunctionalNetwork(lambda: family(name).build(shape_for(name), CLASSES), dtype)


@functools.cache
def fresh(name: str, entropy: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return net(name, dtype).make_initial_model(entropy)


def inputs(name: str, count: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    shape, source = (count, *shape_for(name)), torch.Generator().manual_seed(3)
    if "vocabulary" in PARAMETERS.get(name, {}):
        return torch.randint(30, shape, generator=source)
    return torch.randn(shape, generator=source, dtype=dtype)


def size(name: str, shape: tuple[int, ...], classes: int, **parameters: Any) -> int:
    made = registry.build_component(component.MODEL, name, parameters)
    assert isinstance(made, Model)
    made.check(shape, classes)
    with torch.device("meta"):
        return sum(tensor.numel() for tensor in made.build(shape, classes).parameters())


@pytest.mark.parametrize(
    ("shape", "classes", "count"),
    [
        ((1, 28, 28), 10, 582_026),
        ((3, 32, 32), 10, 878_538),
        ((3, 32, 32), 100, 924_708),
        ((3, 64, 64), 200, 5_694_600),
    ],
    ids=["mnist", "cifar-10", "cifar-100", "tiny-imagenet"],
)
def test_parameters_of_cnn4(shape: tuple[int, ...], classes: int, count: int) -> None:
    assert size("cnn4", shape, classes) == count


def test_parameters_of_cnn() -> None:
    convolutions = (1 * 9 * 16 + 16) + (16 * 9 * 32 + 32)
    assert size("cnn", (1, 8, 8), 10) == convolutions + (32 * 2 * 2 * 64 + 64) + (64 * 10 + 10) == 13_706
    assert size("cnn", (1, 8, 8), 10, batch_norm=True) == 13_706 + 2 * (16 + 32)
    assert size("cnn", (1, 8, 8), 10, bias=False) == 13_706 - 10


def test_parameters_of_cnn5() -> None:
    assert size("cnn5", CIFAR, 10, batch_norm=True) == 62_006 + 2 * (6 + 16 + 120 + 84)
    plain, normalized = (family("cnn5", batch_norm=batch_norm).build(CIFAR, 10) for batch_norm in (False, True))
    layers = [layer for layer in normalized.body if not isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))]
    assert [type(layer) for layer in plain.body] == [type(layer) for layer in layers]
    before = [type(normalized.body[index - 1]) for index, layer in enumerate(normalized.body) if layer not in layers]
    assert before == [nn.Conv2d, nn.Conv2d, nn.Linear, nn.Linear]


def test_parameters_of_mlp() -> None:
    assert size("mlp", (1, 8, 8), 10) == (64 * 64 + 64) + (64 * 10 + 10) == 4_810
    toy = family("mlp", hidden=[4], biases=False).build((3,), 2)  # the network of cwFedAvg's first figure
    assert [tuple(tensor.shape) for tensor in toy.parameters()] == [(4, 3), (2, 4)]
    count = sum(tensor.numel() for tensor in family("mlp", hidden=[5, 3]).build((2, 4), 6).parameters())
    assert count == (8 * 5 + 5) + (5 * 3 + 3) + (3 * 6 + 6)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("feddw_cnn", CIFAR, 10, 139_714),
        ("lenet", MNIST, 10, 164_116),
        ("cnn5", CIFAR, 10, 62_006),
        ("cnn5", CIFAR, 100, 69_656),
        ("feddw_resnet18", CIFAR, 100, 11_350_756),  # this and the next two: as many as FedDW's code makes
        ("shufflenet", CIFAR, 100, 1_130_424),
        ("mobilenet", CIFAR, 100, 807_660),
        ("resnet18", TINY, 1000, 11_689_512),  # as published by torchvision
        ("resnet18", TINY, 200, 11_279_112),
        ("bilstm", IMDB, 2, 1_593_858),
        ("fasttext", NEWS, 4, 3_157_508),
    ],
)
def test_parameters(name: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    assert size(name, shape, classes) == count


def test_parameters_of_feddws_cnn_for_mnist() -> None:
    assert size("feddw_cnn", MNIST, 10, channels=[10, 20], dropout=0.5) == 121_642


def test_parameters_of_feddws_resnet_are_torchvisions_but_for_what_differs() -> None:
    trunk = size("resnet18", TINY, 1000) - (512 * 1000 + 1000) - (49 - 9) * 3 * 64
    biases = 64 * (1 + 4) + (128 + 256 + 512) * 5
    mapping = (512 * 256 + 256) + (256 * 128 + 128) + (128 * 100 + 100)
    assert size("feddw_resnet18", CIFAR, 100) == trunk + biases + mapping


def test_parameters_of_bilstm() -> None:
    lstm = 2 * 4 * (128 * 128 + 128 * 128 + 128 + 128)
    layers = (256 * 128 + 128) + (128 * 128 + 128) + (128 * 2 + 2)
    assert size("bilstm", IMDB, 2) == 10_000 * 128 + lstm + layers


def test_parameters_of_fasttext() -> None:
    assert size("fasttext", NEWS, 4) == 98_635 * 32 + (32 * 32 + 32) + (32 * 4 + 4)


def test_parameters_of_vgg16() -> None:
    convolutions = 14_714_688
    assert size("vgg16", CIFAR, 10, weights=None, frozen=False) == convolutions + 33_482
    assert size("vgg16", CIFAR, 100, weights=None, frozen=False) == convolutions + 39_332


@pytest.mark.parametrize("name", [name for name in NAMES if "bias" in {f.name for f in fields(family(name))}])
def test_the_output_layer_without_bias(name: str) -> None:
    with torch.device("meta"):
        made = [family(name, bias=bias).build(shape_for(name), CLASSES) for bias in (True, False)]
    assert [network.head.bias is None for network in made] == [False, True]
    sizes = [sum(tensor.numel() for tensor in network.parameters()) for network in made]
    assert sizes[0] - sizes[1] == CLASSES


def test_families_with_feddws_classifier_have_the_setting_of_its_bias() -> None:
    found = {name for name in NAMES if "bias" in {field.name for field in fields(family(name))}}
    assert found == {"bilstm", "cnn", "feddw_cnn", "feddw_resnet18", "mobilenet", "shufflenet"}


@pytest.mark.parametrize("name", NAMES)
def test_a_body_makes_features_and_a_head_logits(name: str) -> None:
    network = family(name).build(shape_for(name), CLASSES).eval()
    assert [part for part, _ in network.named_children()] == ["body", "head"]
    assert isinstance(network.head, nn.Linear)
    for count in (1, 3):
        features = network.body(inputs(name, count))
        assert features.shape == (count, network.head.in_features)
        assert network.head(features).shape == (count, CLASSES)
        assert torch.equal(network(inputs(name, count)), network.head(features))
    normal = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert bool(normal) == bool(list(network.buffers())) == (name in NORMALISED)
    assert not any(getattr(layer, "inplace", False) for layer in network.modules())


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_body_and_head(name: str) -> None:
    made = net(name)
    assert {*made.names, *made.buffer_names} == {*made.body_names, *made.head_names}
    assert made.head_names == ("head.weight", "head.bias")
    assert all(name.startswith("body.") for name in made.body_names)
    assert tuple(fresh(name, 1)) == made.names + made.buffer_names
    assert bool(made.norm_names) == (name in NORMALISED)
    assert all(name in made.norm_names for name in made.buffer_names)


@pytest.mark.parametrize("name", NAMES)
def test_layers_hold_every_tensor_once_and_end_with_the_head(name: str) -> None:
    made = net(name)
    layers = made.layers()
    assert layers[-1] == ("head.weight", "head.bias")
    assert sorted(name for layer in layers for name in layer) == sorted(made.names + made.buffer_names)
    assert all(len({name.rpartition(".")[0] for name in layer}) == 1 for layer in layers)


@pytest.mark.parametrize("name", CHAINS)
def test_layers_go_from_the_input_to_the_output(name: str) -> None:
    made, model, width = net(name), fresh(name, 1), shape_for(name)[0]
    for weight, *_ in made.layers():
        if model[weight].dim() == 4:
            assert model[weight].shape[1] == width
            width = model[weight].shape[0]
    assert made.features(model, inputs(name)).shape[1] == model["head.weight"].shape[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_model_is_a_function_of_the_entropy_alone(name: str) -> None:
    made, large = net(name), 2**127 + 12345
    one = made.make_initial_model(large)
    torch.manual_seed(99)
    torch.randn(10)
    again, other = made.make_initial_model(large), made.make_initial_model(large + 1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if one[name].dim() > 1]  # vectors may be constants, as those of BatchNorm
    assert len(drawn) > 1
    assert all(not torch.equal(one[name], other[name]) for name in drawn)
    double = net(name, torch.float64).make_initial_model(large)
    assert all(torch.equal(one[name].double(), double[name]) for name in one)
    assert all(value.dtype == torch.float64 for value in double.values())
    assert not any(value.requires_grad for value in one.values())


@pytest.mark.parametrize("name", NAMES)
def test_global_generators_are_left_alone(name: str) -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index, union-attr]  # noqa: NPY002
    made = FunctionalNetwork(lambda: family(name).build(shape_for(name), CLASSES))
    made(made.make_initial_model(8), inputs(name))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", NAMES)
def test_features_and_head_are_the_call(name: str) -> None:
    made = net(name, torch.float64)
    model, x = fresh(name, 4, torch.float64), inputs(name, dtype=torch.float64)
    features = made.features(model.only(made.body_names), x)  # the head's tensors need not be given
    logits = features @ model["head.weight"].T + model["head.bias"]
    assert torch.allclose(made(model, x), logits, rtol=1e-12, atol=1e-14)
    assert torch.equal(made.classify(model, made.features(model, x)), made(model, x))


@pytest.mark.parametrize("name", NAMES)
def test_the_call_depends_on_what_is_given_and_changes_nothing(name: str) -> None:
    made, one, other, x = net(name), fresh(name, 1), fresh(name, 2), inputs(name)
    copy, first = one.map(torch.clone), made(one, x)
    assert not torch.equal(made(other, x), first)
    assert torch.equal(made(one, x), first)
    assert all(torch.equal(one[name], copy[name]) for name in one)


@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_meet_in_evaluation(name: str) -> None:
    made, model = net(name, torch.float64), fresh(name, 1, torch.float64)
    x = inputs(name, dtype=torch.float64)
    together, alone = made(model, x), torch.cat([made(model, sample[None]) for sample in x])
    assert torch.allclose(together, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_is_the_same_function_with_a_module_of_its_own(name: str) -> None:
    made, model, x = net(name), fresh(name, 1), inputs(name)
    twin = made.copy_for_thread()
    assert torch.equal(twin(model, x), made(model, x))
    assert torch.equal(twin.features(model, x), made.features(model, x))
    assert twin._module is not made._module
    ours = {parameter.data_ptr() for parameter in made._module.parameters()}
    assert not ours & {parameter.data_ptr() for parameter in twin._module.parameters()}
    again = twin.make_initial_model(1)
    assert all(torch.equal(model[name], again[name]) for name in model)


def loss(made: FunctionalNetwork, x: Tensor) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]:
    def compute_loss(trained: dict[str, Tensor], held: dict[str, Tensor]) -> Tensor:
        return made(Tensors({**trained, **held}), x).square().mean()

    return compute_loss


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_tensor_and_are_those_of_autograd(name: str) -> None:
    made, x = net(name, torch.float64), inputs(name, dtype=torch.float64)
    model = fresh(name, 1, torch.float64)
    held = {name: model[name] for name in made.buffer_names}
    found = torch.func.grad(loss(made, x))({name: model[name] for name in made.names}, held)
    trained = {name: model[name].clone().requires_grad_() for name in made.names}
    wanted = torch.autograd.grad(loss(made, x)(trained, held), list(trained.values()))
    for name, gradient in zip(made.names, wanted, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.abs().sum() > 0, name
        assert torch.allclose(found[name], gradient, rtol=1e-9, atol=1e-15), name


@pytest.mark.parametrize("name", [name for name in NAMES if family(name).is_stackable])
def test_stacked_gradients_are_those_of_each_model(name: str) -> None:
    made, x = net(name, torch.float64), inputs(name, dtype=torch.float64)
    models = [fresh(name, entropy, torch.float64) for entropy in range(COPIES)]
    trained, held = (
        [{name: model[name] for name in names} for model in models] for names in (made.names, made.buffer_names)
    )
    gradient = torch.func.grad(loss(made, x))
    stacked = [{name: torch.stack([one[name] for one in part]) for name in part[0]} for part in (trained, held)]
    found = torch.func.vmap(gradient)(*stacked)
    for index in range(COPIES):
        wanted = gradient(trained[index], held[index])
        assert all(torch.allclose(found[name][index], wanted[name], rtol=1e-9, atol=1e-12) for name in wanted)


def test_only_the_lstm_can_not_be_stacked() -> None:
    assert [name for name in NAMES if not family(name).is_stackable] == ["bilstm"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *[("cnn", shape) for shape in ((1, 3, 8), (64,))],
        *[("cnn4", shape) for shape in ((1, 8, 8), (1, 28, 15), (784,))],
        *[(name, (1, 16, 15)) for name in ("cnn5", "feddw_cnn", "lenet")],
        *[(name, (784,)) for name in ("feddw_resnet18", "mobilenet", "resnet18", "shufflenet", "vgg16")],
        *[(name, (1, 64, 64)) for name in ("resnet18", "vgg16")],
        ("vgg16", (3, 31, 32)),
        *[(name, (1, 28, 28)) for name in ("bilstm", "fasttext")],
    ],
)
def test_a_family_refuses_what_it_can_not_take(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match=rf"^model\.name: '{name}' can't take inputs of shape .*; it needs "):
        family(name).check(shape, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bilstm", (1,)),
        ("cnn", (1, 4, 4)),
        *[(name, (1, 16, 16)) for name in ("cnn4", "cnn5", "feddw_cnn", "lenet")],
        *[(name, (1, 1, 1)) for name in ("feddw_resnet18", "mobilenet", "shufflenet")],
        ("fasttext", (1,)),
        ("mlp", (3,)),
        ("resnet18", (3, 1, 1)),
        ("vgg16", (3, 32, 32)),
    ],
)
def test_a_family_builds_for_the_smallest_inputs_that_it_accepts(name: str, shape: tuple[int, ...]) -> None:
    made = family(name, **({"frozen": False} if name == "vgg16" else {}))
    made.check(shape, 2)
    network = made.build(shape, 2).eval()
    x = torch.zeros(1, *shape, dtype=torch.int64 if len(shape) == 1 and name != "mlp" else torch.float32)
    assert network(x).shape == (1, 2)


def test_lenets_layer_of_120_is_a_dense_layer_on_the_channels() -> None:
    network = family("lenet").build((1, 28, 28), 10).double()
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer = network.body[6]
    dense = torch.einsum("bchw,oc->bhwo", x, layer.weight[:, :, 0, 0]) + layer.bias
    assert torch.allclose(layer(x).permute(0, 2, 3, 1), dense, rtol=1e-12, atol=1e-14)


def test_padding_stays_zero_in_fasttext_but_counts_in_the_mean() -> None:
    made, model = net("fasttext"), fresh("fasttext", 1)
    name = made.names[0]
    assert not model[name][0].any()
    short, padded = torch.tensor([[3, 4]]), torch.tensor([[3, 4, 0, 0]])
    without = made.features(model, short) - model["body.2.bias"]
    assert torch.allclose(made.features(model, padded) - model["body.2.bias"], without / 2, rtol=1e-5)
    trained = {name: value.clone().requires_grad_() for name, value in model.items()}
    (gradient,) = torch.autograd.grad(made(Tensors(trained), padded).square().sum(), [trained[name]])
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == [3, 4]


def test_dropout_of_feddws_cnn_is_a_plain_layer() -> None:
    found = [
        [layer.p for layer in family("feddw_cnn", dropout=p).build(SHAPE, 2).modules() if isinstance(layer, nn.Dropout)]
        for p in (0.0, 0.5)
    ]
    assert found == [[], [0.5]]


def test_class_relations_are_the_softmax_of_the_gram_matrix() -> None:
    omega = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    e = torch.e
    wanted = torch.tensor([[e / (e + 1), 1 / (e + 1)], [1 / (1 + e**4), e**4 / (1 + e**4)]], dtype=torch.float64)
    assert torch.allclose(compute_class_relations(omega), wanted, rtol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_packaged_networks_are_held_to_what_ones_own_are(name: str) -> None:
    """No layer draws numbers that no seed gives, writes into its buffers, or heeds `.train()` by itself."""
    require_pure_network(family(name), shape_for(name), CLASSES)
