"""A custom model is a class or a function in a custom module."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedpipe.core.components import code_digest, component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.models import purity
from fedpipe.models.base import FunctionalNetwork, Model, Network
from fedpipe.planning import run_settings
from fedpipe.settings import parser
from tests.errors import rejects

CUSTOM_MODULE = '''
import random
from dataclasses import dataclass
from math import prod
from typing import Annotated

import numpy as np
from pydantic import Field
from torch import nn

from fedpipe.models.base import Model, Network


def make(shape, classes):
    """Two layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 5), nn.Tanh()), nn.Linear(5, classes)


def network(shape, classes):
    return Network(*make(shape, classes))


def head_only(shape, classes):
    return nn.Linear(prod(shape), classes)


def failing(shape, classes):
    raise ValueError("too few pixels")


def other_classes(shape, classes):
    return nn.Flatten(), nn.Linear(prod(shape), 3)


def other_features(shape, classes):
    return nn.Flatten(), nn.Linear(7, classes)


def embed_tokens(shape, classes):
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten()), nn.Linear(4 * shape[0], classes)


def embed_other_length(shape, classes):
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten()), nn.Linear(9, classes)


def sized(shape, classes, width: Annotated[int, Field(gt=0)] = 8, *, act="relu", p=0.0):
    """A layer with parameters."""
    hidden = nn.Linear(prod(shape), width), {"relu": nn.ReLU, "tanh": nn.Tanh}[act](), nn.Dropout(p)
    return nn.Sequential(nn.Flatten(), *hidden), nn.Linear(width, classes)


def needed(shape, classes, width: int):
    return sized(shape, classes, width)


def weighted(shape, classes, weights=3):
    return make(shape, classes)


def mutable(shape, classes, widths=[5]):
    return make(shape, classes)


def misspelled(shape, classes, width: "itn" = 5):
    return make(shape, classes)


def listed(shape, classes, widths: list[int] = (5,)):
    sizes = [prod(shape), *widths]
    return nn.Sequential(nn.Flatten(), *map(nn.Linear, sizes, widths)), nn.Linear(sizes[-1], classes)


@dataclass(frozen=True, kw_only=True)
class Listed(Model):
    """Layers of several widths."""

    widths: list[int]

    def build(self, shape, classes):
        return Network(*listed(shape, classes, self.widths))


class Plain:
    pass


class Bare(Model):
    width: int = 5


@dataclass(frozen=True, kw_only=True)
class Family(Model):
    """A family.

    Parameters
    ----------
    width
        Width of the hidden layer.
    """

    width: int = 5

    def build(self, shape, classes):
        return network(shape, classes)


class Noise(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class RareNoise(nn.Module):
    def forward(self, x):
        return -x if random.random() < 1e-9 else x


class ArrayNoise(nn.Module):
    def forward(self, x):
        return -x if np.random.rand() < 1e-9 else x


class Louder(nn.Module):
    def forward(self, x):
        return 2 * x if self.training else x


def make_attention(dropout):
    layer = nn.TransformerEncoderLayer(5, 1, 6, dropout=dropout, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), layer, nn.Flatten())


def make_usual():
    drop = nn.Dropout(0.5)
    images = nn.Unflatten(1, (1, 5)), nn.GroupNorm(1, 1), nn.Flatten()
    return nn.Sequential(nn.BatchNorm1d(5), drop, nn.LayerNorm(5), nn.Linear(5, 5), drop, *images)


INSTANCES = nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
LAYERS = {
    "noise": Noise,
    "rare_noise": RareNoise,
    "array_noise": ArrayNoise,
    "rrelu": nn.RReLU,
    "attention": lambda: make_attention(0.1),
    "still_attention": lambda: make_attention(0.0),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)),
    "converged": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5), n_power_iterations=1000),
    "instances": lambda: nn.Sequential(*INSTANCES),
    "louder": Louder,
    "cumulative": lambda: nn.BatchNorm1d(5, momentum=None),
    "usual": make_usual,
}


def wrap(shape, classes, layer: str):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), LAYERS[layer]()), nn.Linear(5, classes)


def unseeded(shape, classes):
    body, head = make(shape, classes)
    nn.init.constant_(head.weight, random.random())
    return body, head


def unseeded_constant(shape, classes):
    body, head = make(shape, classes)
    body.register_buffer("constant", head.weight.detach() * random.random(), persistent=False)
    return body, head


def unseeded_names(shape, classes):
    body, head = make(shape, classes)
    body.register_buffer(f"constant{random.getrandbits(60)}", head.bias.detach())
    return body, head


def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.LazyBatchNorm1d()), nn.LazyLinear(classes)


anonymous = lambda shape, classes: make(shape, classes)
'''


@pytest.fixture(autouse=True)
def custom_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "own_models.py"
    path.write_text(CUSTOM_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield path
    sys.modules.pop("own_models", None)


def build_model(name: str, **parameters: Any) -> Model:
    model = registry.build_component(component.MODEL, f"own_models.{name}", parameters)
    assert isinstance(model, Model)
    return model


@pytest.mark.parametrize("name", ["make", "network", "Family"])
def test_custom_model_builds_network_of_its_code(name: str) -> None:
    family = build_model(name)
    family.check((1, 2, 3), 4)
    net = FunctionalNetwork(lambda: family.build((1, 2, 3), 4))
    assert isinstance(family.build((1, 2, 3), 4), Network)
    assert net.names == ("body.1.weight", "body.1.bias", "head.weight", "head.bias")
    model, x = net.make_initial_model(1), torch.ones(2, 1, 2, 3)
    features = (x.flatten(1) @ model["body.1.weight"].T + model["body.1.bias"]).tanh()
    assert torch.allclose(net.features(model, x), features)
    assert torch.allclose(net(model, x), features @ model["head.weight"].T + model["head.bias"])


@pytest.mark.parametrize("name", ["make", "Family"])
def test_custom_model_is_built_from_run_settings(name: str) -> None:
    raw = {"model": {"name": f"own_models.{name}"}}
    params = parser.parse_params(raw)
    assert params.model == build_model(name)
    assert params.model_dump(mode="json")["model"]["name"] == f"own_models.{name}"
    settings = run_settings.RunSettings.from_params(params, params.study.algorithms[0], 0)
    assert settings.build_model() == params.model


@pytest.mark.parametrize("name", ["make", "Family"])
def test_code_digest_depends_on_source_of_custom_model(name: str, custom_models: Path) -> None:
    digest = code_digest.compute_code_digest(*build_model(name).list_hashed_code())
    assert custom_models in digest.files
    custom_models.write_text(CUSTOM_MODULE.replace("Tanh", "ReLU"))
    code_digest.compute_code_digest.cache_clear()
    assert code_digest.compute_code_digest(*build_model(name).list_hashed_code()).text != digest.text


def test_custom_function_has_summary_and_parameters() -> None:
    assert component.get_docstring_summary(type(build_model("make"))) == "Two layers."
    assert [field.name for field in component.list_parameters(type(build_model("make")))] == ["weights", "sha256"]
    assert registry.is_component(component.MODEL, "own_models.make")
    assert not registry.is_component(component.ALGORITHM, "own_models.make")


@pytest.mark.parametrize("name", ["Plain", "anonymous", "NUMBER"])
def test_model_name_rejects_object_that_is_not_model(name: str, custom_models: Path) -> None:
    custom_models.write_text(CUSTOM_MODULE + "NUMBER = 3\n")
    with pytest.raises(SettingsError, match=rf"^model\.name: 'own_models\.{name}' is not a model"):
        registry.find_component(component.MODEL, f"own_models.{name}", "model.name")


def test_function_without_shape_argument_is_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's functions would use the shape as `pretrained` and download weights."""
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *_, **__: pytest.fail("a download"))
    with pytest.raises(SettingsError, match=r"^model\.name: 'torchvision\.models\.resnet18' is not a model"):
        parser.parse_params({"model": {"name": "torchvision.models.resnet18"}})


def test_custom_model_is_checked_with_inputs_of_data_set() -> None:
    """Jobs with token ids would fail if the check used only floating-point inputs."""
    text = {"dataset": {"name": "imdb", "length": 8}, "study": {"algorithms": ["fedavg"]}}
    with pytest.raises(SettingsError, match=r"^model\.name: .*'own_models\.make' .*token ids of shape \(8,"):
        parser.parse_params(text | {"model": {"name": "own_models.make"}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("head_only", "'own_models.head_only' returns Linear"),
        ("failing", r"'own_models\.failing' fails .*\(1, 8, 8\) .*10 classes \(ValueError: too few pixels\)"),
        ("other_classes", r".*'own_models\.other_classes' .*\(2, 3\) .*\(2, 10\)"),
        ("other_features", r".*'own_models\.other_features' .* on numbers of shape \(1, 8, 8\) \(.* 7x10\)\)"),
    ],
)
def test_custom_function_with_wrong_result_or_exception_is_rejected(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"^model\.name: {message}"):
        parser.parse_params({"model": {"name": f"own_models.{name}"}})


def test_embedding_is_checked_with_token_ids_if_kind_of_inputs_is_unknown() -> None:
    build_model("embed_tokens").check((6,), 4)


@pytest.mark.parametrize(
    ("name", "has_tokens", "message"),
    [
        ("other_features", False, r"numbers of shape \(6,\) \(.* \(2x6 and 7x4\)\)"),
        ("other_features", True, r"token ids of shape \(6,\) \(.* same dtype.*\)"),
        ("other_features", None, r"inputs of shape \(6,\) \(.* \(2x6 and 7x4\)\)"),
        ("embed_other_length", True, r"token ids of shape \(6,\) \(.* \(2x24 and 9x4\)\)"),
        ("embed_other_length", None, r"inputs of shape \(6,\) \(.* \(2x24 and 9x4\)\)"),
    ],
)
def test_error_of_flat_inputs_is_that_of_their_kind(name: str, has_tokens: bool | None, message: str) -> None:
    """If the kind is unknown, it is the kind that the network takes."""
    with pytest.raises(SettingsError, match=rf"^model\.name: .*'own_models\.{name}' can't be trained on {message}\.$"):
        purity.require_pure_network(build_model(name), (6,), 4, has_tokens)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unseeded", r"draws 'head\.weight' with random numbers that do not depend on"),
        ("unseeded_constant", r"draws 'body\.constant' with random numbers"),
        ("unseeded_names", r"draws 'body\.constant\d+' with random numbers"),
    ],
)
def test_unseeded_tensors_of_custom_model_are_rejected(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"^model\.name: 'own_models\.{name}' {message}"):
        parser.parse_params({"model": {"name": f"own_models.{name}"}})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("noise", r"the layer 'body\.3' \(Noise\) of MODEL draws random numbers .*nn\.Dropout"),
        ("rare_noise", r"the layer 'body\.3' \(RareNoise\) of MODEL draws random numbers"),
        ("array_noise", r"the layer 'body\.3' \(ArrayNoise\) of MODEL draws random numbers"),
        ("rrelu", r"the layer 'body\.3' \(RReLU\) of MODEL draws random numbers"),
        ("attention", r"the layer 'body\.3\.1\.self_attn' \(MultiheadAttention\) of MODEL draws random numbers"),
        ("spectral", r"MODEL changes its buffer 'body\.3\.parametrizations\.weight\.0\._[uv]'"),
        ("converged", r"MODEL changes its buffer 'body\.3\.parametrizations\.weight\.0\._[uv]'"),
        ("instances", r"MODEL changes its buffer 'body\.3\.1\.running_mean'"),
        ("louder", r"MODEL .*train mode .*eval mode"),
        ("cumulative", r"the network of MODEL can't be trained .* momentum=None"),
    ],
)
def test_impure_layers_of_custom_model_are_rejected(layer: str, message: str) -> None:
    """Runs with the same key would have different results, and evaluation would use dropout."""
    with pytest.raises(SettingsError, match=r"^model\.name: " + message.replace("MODEL", r"'own_models\.wrap'")):
        parser.parse_params({"model": {"name": "own_models.wrap", "layer": layer}})


@pytest.mark.parametrize("layer", ["usual", "still_attention"])
def test_common_layers_of_custom_model_are_accepted(layer: str) -> None:
    parser.parse_params({"model": {"name": "own_models.wrap", "layer": layer}})


def test_lazy_layers_have_sizes_in_initial_model() -> None:
    parser.parse_params({"model": {"name": "own_models.lazy"}})
    net = FunctionalNetwork(lambda: build_model("lazy").build((1, 8, 8), 10))
    model = net.make_initial_model(1)
    assert {name: tuple(value.shape) for name, value in model.items()} == {
        "body.1.weight": (5, 64),
        "body.1.bias": (5,),
        "body.2.weight": (5,),
        "body.2.bias": (5,),
        "head.weight": (10, 5),
        "head.bias": (10,),
        "body.2.running_mean": (5,),
        "body.2.running_var": (5,),
    }
    assert torch.equal(model["body.1.weight"], net.make_initial_model(1)["body.1.weight"])
    assert not torch.equal(model["body.1.weight"], net.make_initial_model(2)["body.1.weight"])
    assert torch.equal(model["body.2.running_mean"], torch.zeros(5))


def test_shared_dropout_layer_is_replaced_at_each_use() -> None:
    net = FunctionalNetwork(lambda: build_model("wrap", layer="usual").build((1, 8, 8), 10))
    assert net.has_dropout
    assert not [layer for layer in net._module.modules() if type(layer) is torch.nn.Dropout]
    model, x = net.make_initial_model(1), torch.ones(50, 1, 8, 8)

    def compute_logits(key: int) -> torch.Tensor:
        with net.mode.activate(True, noise_key=torch.tensor(key)):
            return net(model, x)

    assert torch.equal(compute_logits(1), compute_logits(1))
    assert not torch.equal(compute_logits(1), compute_logits(2))


def test_model_class_without_dataclass_decorator_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r"^model: 'own_models\.Bare' has fields\. .*@dataclass"):
        build_model("Bare")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nn_of_mine\n", "No module named 'nn_of_mine', own_models.py, line 1"),
        ("def make(:\n", "SyntaxError: invalid syntax, own_models.py, line 1: `def make(:`"),
        ("\nx = y\n", "NameError: name 'y' is not defined, own_models.py, line 2"),
    ],
)
def test_import_error_of_custom_module_has_single_line(text: str, reason: str, custom_models: Path) -> None:
    custom_models.write_text(text)
    with rejects(f"model: 'own_models.make' can't be imported ({reason})"):
        build_model("make")


def test_extra_function_arguments_are_model_parameters() -> None:
    wide, usual = build_model("sized", width=3, act="tanh"), build_model("sized")
    body = wide.build((9,), 2).body
    assert [tuple(value.shape) for value in body.state_dict().values()] == [(3, 9), (3,)]
    assert isinstance(body[2], torch.nn.Tanh)
    one, other = (registry.get_component_key_settings(component.MODEL, model) for model in (wide, usual))
    assert other.items() >= {"width": 8, "act": "relu", "p": 0.0}.items()
    assert one == other | {"width": 3, "act": "tanh"}
    assert registry.build_component_from_run_settings(component.MODEL, one) == wide


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sized", "width": "wide"}, "model.width: 'wide' can't be used. Use a valid integer"),
        ({"name": "sized", "width": 0}, "model.width: 0 can't be used"),
        ({"name": "sized", "p": True}, "model.p: true can't be used"),
        ({"name": "sized", "witdh": 3}, "model.witdh: unknown key. Did you mean 'width'?"),
        ({"name": "make", "width": 64}, "model.width: unknown key. Did you mean 'weights'?"),
        ({"name": "needed"}, "model.width: missing"),
        ({"name": "weighted"}, "model.name: 'own_models.weighted' has a parameter 'weights'"),
        ({"name": "mutable"}, "model.name: 'own_models.mutable' has a parameter 'widths' whose default is a list"),
        (
            {"name": "misspelled"},
            "model.name: the annotations of 'own_models.misspelled' can't be read (name 'itn' is not defined)",
        ),
    ],
)
def test_invalid_function_parameters_are_rejected_in_single_line(settings: dict[str, Any], message: str) -> None:
    with rejects(message):
        parser.parse_params({"model": settings | {"name": f"own_models.{settings['name']}"}})


@pytest.mark.parametrize("name", ["listed", "Listed"])
def test_custom_model_accepts_list_parameters(name: str) -> None:
    params = parser.parse_params({"model": {"name": f"own_models.{name}", "widths": [5, 6]}})
    shapes = [tuple(value.shape) for value in params.model.build((9,), 2).state_dict().values()]
    assert shapes == [(5, 9), (5,), (6, 5), (6,), (2, 6), (2,)]


def test_model_check_keeps_global_generator_state() -> None:
    state = torch.get_rng_state()
    build_model("make").check((9,), 2)
    assert torch.equal(torch.get_rng_state(), state)
