"""Every model is a body and a head, and a pure function of its parameters."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedpipe import registry
from fedpipe.errors import SettingsError
from fedpipe.models.base import Model, Net, class_relations
from fedpipe.tensors import Tensors

SHAPE, CLASSES = (3, 20, 16), 7  #: an input that every family takes, its sides unequal
NAMES = registry.names(registry.MODEL)


def family(name: str, **parameters: Any) -> Model:
    found = registry.build(registry.MODEL, name, parameters)
    assert isinstance(found, Model)
    return found


def net(name: str, dtype: torch.dtype = torch.float32) -> Net:
    return Net(lambda: family(name).build(SHAPE, CLASSES), dtype)


def inputs(count: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=dtype)


def size(name: str, shape: tuple[int, ...], classes: int) -> int:
    return sum(each.numel() for each in family(name).build(shape, classes).parameters())


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


def test_parameters_of_mlp() -> None:
    assert size("mlp", (1, 8, 8), 10) == (64 * 64 + 64) + (64 * 10 + 10) == 4_810
    count = sum(each.numel() for each in family("mlp", hidden=[5, 3]).build((2, 4), 6).parameters())
    assert count == (8 * 5 + 5) + (5 * 3 + 3) + (3 * 6 + 6)


@pytest.mark.parametrize("name", NAMES)
def test_a_body_makes_features_and_a_head_logits(name: str) -> None:
    network = family(name).build(SHAPE, CLASSES)
    features = network.body(inputs())
    assert features.dim() == 2
    assert features.shape == (5, network.head.in_features)
    assert network.head(features).shape == (5, CLASSES)
    assert [part for part, _ in network.named_children()] == ["body", "head"]
    assert not list(network.buffers())


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_body_and_head(name: str) -> None:
    made = net(name)
    assert made.names == made.body_names + made.head_names
    assert set(made.head_names) == {"head.weight", "head.bias"}
    assert all(each.startswith("body.") for each in made.body_names)
    assert tuple(made.fresh(1)) == made.names


@pytest.mark.parametrize("name", NAMES)
def test_layers_go_from_the_input_to_the_output(name: str) -> None:
    made = net(name)
    layers = made.layers()
    assert layers[-1] == ("head.weight", "head.bias")
    assert tuple(each for layer in layers for each in layer) == made.names
    model, x, width = made.fresh(1), inputs(), SHAPE[0]
    for layer in layers:
        prefixes = {each.rpartition(".")[0] for each in layer}
        assert len(prefixes) == 1
        weight = model[f"{prefixes.pop()}.weight"]
        if weight.dim() == 4:
            assert weight.shape[1] == width
            width = weight.shape[0]
    assert made.features(model, x).shape[1] == model["head.weight"].shape[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_model_is_a_function_of_the_entropy_alone(name: str) -> None:
    one = net(name).fresh(2**127 + 12345)
    torch.manual_seed(99)
    torch.randn(10)
    again, other = net(name).fresh(2**127 + 12345), net(name).fresh(2**127 + 12346)
    assert all(torch.equal(one[each], again[each]) for each in one)
    assert all(not torch.equal(one[each], other[each]) for each in one)
    double = net(name, torch.float64).fresh(2**127 + 12345)
    assert all(torch.equal(one[each].double(), double[each]) for each in one)
    assert all(each.dtype == torch.float64 for each in double.values())
    assert not any(each.requires_grad for each in one.values())


@pytest.mark.parametrize("name", NAMES)
def test_global_generators_are_left_alone(name: str) -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index, union-attr]  # noqa: NPY002
    made = net(name)
    made.fresh(7)
    made(made.fresh(8), inputs())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", NAMES)
def test_features_and_head_are_the_call(name: str) -> None:
    made = net(name, torch.float64)
    model, x = made.fresh(4), inputs(dtype=torch.float64)
    features = made.features(model.only(made.body_names), x)  # the head's tensors need not be given
    logits = features @ model["head.weight"].T + model["head.bias"]
    assert torch.allclose(made(model, x), logits, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_the_call_depends_on_what_is_given_and_changes_nothing(name: str) -> None:
    made = net(name)
    one, other, x = made.fresh(1), made.fresh(2), inputs()
    copy, first = one.map(torch.clone), made(one, x)
    assert not torch.equal(made(other, x), first)
    assert torch.equal(made(one, x), first)
    assert all(torch.equal(one[each], copy[each]) for each in one)


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_is_the_same_function_with_a_module_of_its_own(name: str) -> None:
    made = net(name)
    twin, model, x = made.replica(), made.fresh(1), inputs()
    assert torch.equal(twin(model, x), made(model, x))
    assert torch.equal(twin.features(model, x), made.features(model, x))
    assert twin._module is not made._module
    ours = {each.data_ptr() for each in made._module.parameters()}
    assert not ours & {each.data_ptr() for each in twin._module.parameters()}
    fresh = twin.fresh(1)
    assert all(torch.equal(model[each], fresh[each]) for each in model)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_tensor(name: str) -> None:
    made = net(name)
    model = Tensors((each, value.requires_grad_()) for each, value in made.fresh(1).items())
    gradients = torch.autograd.grad(made(model, inputs()).square().sum(), list(model.values()))
    assert all(each.isfinite().all() and each.abs().sum() > 0 for each in gradients)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (1, 3, 8)), ("cnn", (64,)), ("cnn4", (1, 8, 8)), ("cnn4", (1, 28, 15)), ("cnn4", (784,))],
)
def test_a_family_refuses_what_it_can_not_take(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match=rf"^model\.name: '{name}' can't take inputs of shape"):
        family(name).check(shape, 10)


@pytest.mark.parametrize(("name", "shape"), [("cnn", (1, 4, 4)), ("cnn4", (1, 16, 16)), ("mlp", (3,))])
def test_a_family_builds_for_the_smallest_inputs_that_it_accepts(name: str, shape: tuple[int, ...]) -> None:
    family(name).check(shape, 2)
    made = Net(lambda: family(name).build(shape, 2))
    assert made(made.fresh(0), torch.zeros(1, *shape)).shape == (1, 2)


def test_class_relations_are_the_softmax_of_the_gram_matrix() -> None:
    omega = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    e = torch.e
    wanted = torch.tensor([[e / (e + 1), 1 / (e + 1)], [1 / (1 + e**4), e**4 / (1 + e**4)]], dtype=torch.float64)
    assert torch.allclose(class_relations(omega), wanted, rtol=1e-14)
