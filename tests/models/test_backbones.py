"""Networks of torchvision and timm are split into body and head, and compute the logits of their library."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models as library

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.models.backbone import Backbone
from fedpipe.models.base import FunctionalNetwork, seed_generator
from fedpipe.models.conversion import FrozenBatchNorm, make_group_norm
from fedpipe.models.layers import SampleDropout
from tests.errors import rejects
from tests.models.published import randomize

CLASSES = 7
#: The smallest network of each family of torchvision, with the side of small images.
SMALLEST = dict.fromkeys(
    [
        *("convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v2"),
        *("mobilenet_v3_small", "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5"),
        *("squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vit_b_32", "wide_resnet50_2"),
    ],
    32,
) | {"alexnet": 64, "inception_v3": 75, "maxvit_t": 224}
FAST = ("googlenet", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1")
FAMILIES = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SMALLEST]


def build_model(name: str = "torchvision", **parameters: Any) -> Backbone:
    model = registry.build_component(component.MODEL, name, parameters)
    assert isinstance(model, Backbone)
    return model


def make_inputs(shape: tuple[int, ...], count: int = 2) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def test_smallest_networks_cover_all_torchvision_families() -> None:
    modules = {library.get_model_builder(name).__module__ for name in SMALLEST}
    assert modules == {library.get_model_builder(name).__module__ for name in library.list_models(module=library)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_body_and_head_match_logits_of_torchvision(architecture: str) -> None:
    shape = (3, SMALLEST[architecture], SMALLEST[architecture])
    model = build_model(architecture=architecture)
    model.check(shape, CLASSES)
    arguments: dict[str, Any] = {}
    if architecture in ("googlenet", "inception_v3"):
        arguments = {"aux_logits": False, "init_weights": True, "transform_input": False}
    elif architecture.startswith(("vit", "maxvit")):
        arguments = {"image_size": shape[1]} if architecture.startswith("vit") else {"input_size": shape[1:]}
    with seed_generator(0):
        network = model.build(shape, CLASSES).eval()
    with seed_generator(0):
        reference = library.get_model(architecture, weights=None, num_classes=CLASSES, **arguments).eval()
    if isinstance(reference, library.SqueezeNet):
        reference.classifier[2] = nn.Identity()  # without its last ReLU
    with torch.no_grad():
        features, x = network.body(make_inputs(shape)), make_inputs(shape)
        assert isinstance(network.head, nn.Linear)
        assert features.shape == (2, network.head.in_features)
        if architecture.startswith("vit"):
            nn.init.normal_(network.head.weight)  # torchvision begins with zeros
            reference.heads.head.weight.copy_(network.head.weight)
        torch.testing.assert_close(network(x), reference(x), rtol=1e-4, atol=1e-5)
        assert network(x).abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", library.list_models(module=library)[::3])  # a check takes half a second
def test_every_torchvision_network_accepts_its_image_size(architecture: str) -> None:
    model = build_model(architecture=architecture)
    entries = model._list_weights_entries()  # type: ignore[attr-defined]
    side = max(224 if architecture.startswith("maxvit") else 76, *(entry.meta["min_size"][0] for entry in entries))
    model.check((3, side, side), CLASSES)
    assert [entry.name for entry in entries] == model.list_weights() != []


def test_network_without_weights_has_names_and_shapes_of_real_network() -> None:
    model = build_model(architecture="mobilenet_v3_small", norm="group")
    empty, real = model.build_without_weights((3, 32, 32), 3), model.build((3, 32, 32), 3)
    assert all(value.is_meta for value in empty.state_dict().values())
    assert {name: value.shape for name, value in empty.named_parameters()} == {
        name: value.shape for name, value in real.named_parameters()
    }


def test_position_index_tables_are_neither_parameters_nor_buffers() -> None:
    net = FunctionalNetwork(
        lambda: build_model(architecture="swin_t").build_without_weights((3, 32, 32), 3), device="meta"
    )
    assert not net.buffer_names
    assert not any("relative_position_index" in name for name in net.names)
    assert any("relative_position_bias_table" in name for name in net.names)


def test_stochastic_depth_drops_samples() -> None:
    layers = [layer for layer in build_model(architecture="efficientnet_b0").build((3, 32, 32), 3).modules()]
    assert max(layer.p for layer in layers if isinstance(layer, SampleDropout)) > 0.1
    dropout = SampleDropout(0.5)
    x = torch.ones(64, 2, 3, 3)
    with seed_generator(0):
        y = dropout(x)
    assert sorted(set(y.flatten(1).sum(1).tolist())) == [0, 36]
    assert torch.equal(dropout.eval()(x), x)


# -- normalization -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "groups"), [(64, 32), (24, 24), (40, 20), (37, 1), (58, 29), (7, 7)])
def test_group_norm_groups_divide_channels(channels: int, groups: int) -> None:
    layer = make_group_norm(nn.BatchNorm2d(channels, eps=1e-3))
    assert (layer.num_groups, layer.num_channels, layer.eps) == (groups, channels, 1e-3)


def test_group_norm_replaces_batch_norm() -> None:
    network = build_model(architecture="resnet18", norm="group").build((3, 32, 32), 3)
    kinds = [type(layer) for layer in network.modules()]
    assert kinds.count(nn.GroupNorm) == 20
    assert nn.BatchNorm2d not in kinds
    assert not list(network.buffers())


def test_frozen_batch_norm_equals_batch_norm_in_evaluation() -> None:
    layer = nn.BatchNorm2d(3, eps=0.1)
    layer.load_state_dict(randomize(layer))
    x = make_inputs((3, 4, 4))
    frozen = FrozenBatchNorm(layer)
    torch.testing.assert_close(frozen(x), layer.eval()(x))
    assert not any(value.requires_grad for value in frozen.parameters())
    assert frozen.state_dict().keys() == layer.state_dict().keys() - {"num_batches_tracked"}


# -- timm --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("test_vit", (1, 32, 32)),
        pytest.param("test_vit2", (3, 32, 48), marks=pytest.mark.slow),
        pytest.param("test_resnet", (3, 32, 32), marks=pytest.mark.slow),
        ("test_efficientnet", (3, 32, 32)),
        ("test_convnext", (2, 32, 32)),
        pytest.param("test_nfnet", (3, 32, 32), marks=pytest.mark.slow),
        pytest.param("test_mambaout", (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_body_and_head_match_logits_of_timm(architecture: str, shape: tuple[int, ...]) -> None:
    import timm

    model = build_model("timm", architecture=architecture)
    model.check(shape, CLASSES)
    arguments = {"img_size": shape[1:]} if "vit" in architecture else {}
    with seed_generator(0):
        network = model.build(shape, CLASSES).eval()
    with seed_generator(0):
        reference = timm.create_model(architecture, num_classes=CLASSES, in_chans=shape[0], **arguments).eval()
    x = make_inputs(shape)
    with torch.no_grad():
        torch.testing.assert_close(network(x), reference(x), rtol=1e-4, atol=1e-5)
        assert network.body(x).shape == (2, network.head.in_features)


# -- errors before any job ---------------------------------------------------------------------------------------------


IMAGENET = {"weights": "IMAGENET1K_V1", "sha256": "0" * 64}
#: Settings of a model of 32x32 images, and the start of the message. `name` is torchvision.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"architecture": "resnet81"},
        "model.architecture: unknown architecture 'resnet81' of torchvision. Did you mean 'resnet18'",
    ),
    (
        {"architecture": "own"},
        "model.architecture: unknown architecture 'own' of torchvision. Use one such as alexnet.",
    ),
    ({"name": "timm", "architecture": "vit_tiny"}, "model.architecture: unknown architecture 'vit_tiny' of timm"),
    (
        {"architecture": "resnet18", "weights": "IMAGENET1K_V3"},
        "model.weights: unknown weights 'IMAGENET1K_V3' of resnet18. Did you mean 'IMAGENET1K_V1'?",
    ),
    (
        {"architecture": "resnet18", "weights": "ResNet18_Weights.IMAGENET1K_V1"},
        "model.weights: unknown weights 'ResNet18_Weights.IMAGENET1K_V1'. Did you mean 'IMAGENET1K_V1'?",
    ),
    ({"name": "timm", "architecture": "test_vit", "weights": "imagenet"}, "model.weights: unknown weights"),
    ({"name": "timm", "architecture": "test_vit4", "weights": "pretrained"}, "model.weights: timm has no weights"),
    ({"architecture": "resnet18", "shape": (1, 32, 32)}, "model.name: 'torchvision' can't take inputs of shape"),
    ({"architecture": "resnet18", "shape": (64,)}, "model.name: 'torchvision' can't take inputs of shape (64,)"),
    (
        {"name": "timm", "architecture": "resnetv2_18"},
        "model.architecture: resnetv2_18 can't be used, because its classifier is Conv2d instead of a linear layer",
    ),
    *[
        ({"architecture": name, "shape": shape}, f"model.architecture: {name} can't take inputs of shape {shape}")
        for name, shape in (("alexnet", (3, 16, 16)), ("vit_b_16", (3, 40, 40)))
    ],
    (
        {"architecture": "vit_b_16"} | IMAGENET,
        "model.weights: IMAGENET1K_V1 of vit_b_16 needs images of 224x224 pixels",
    ),
    (
        {"architecture": "resnet18", "norm": "group"} | IMAGENET,
        "model.norm: group can't be used with the weights IMAGENET1K_V1",
    ),
    ({"architecture": "swin_t", "norm": "group"}, "model.norm: group can't be used"),
    ({"architecture": "resnet18", "frozen": True}, "model.frozen: it can't be used with"),
    (
        {"architecture": "resnet18", "weights": "IMAGENET1K_V1"},
        "model.sha256: missing for IMAGENET1K_V1 of resnet18. Run `fedpipe download`",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_backbone_rejects_invalid_settings(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    shape, parameters = settings.get("shape", (3, 32, 32)), {key: settings[key] for key in settings if key != "shape"}
    with rejects(message):
        build_model(**parameters).check(shape, 10)


def test_backbone_with_unseeded_noise_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """DenseNet calls `F.dropout` if its rate is positive."""
    get_model = library.get_model
    monkeypatch.setattr(library, "get_model", lambda *args, **kwargs: get_model(*args, **kwargs, drop_rate=0.1))
    message = r"^model\.architecture: densenet169 can't be used, .*(native_dropout|bernoulli)"
    with pytest.raises(SettingsError, match=message):
        build_model(architecture="densenet169").check((3, 32, 32), 10)


@pytest.mark.parametrize(
    ("name", "architecture", "shape", "read_size", "right_size"),
    [
        ("timm", "vit_tiny_patch16_224", (1, 28, 28), "16x16 of 28x28", "32x32"),
        ("timm", "deit_tiny_patch16_224", (3, 32, 40), "32x32 of 32x40", "32x48"),
        ("timm", "test_convnext", (3, 34, 40), "32x40 of 34x40", "36x40"),
        ("timm", "pit_ti_224", (3, 28, 28), "24x24 of 28x28", "32x32"),
        ("torchvision", "convnext_tiny", (3, 34, 34), "32x32 of 34x34", "36x36"),
    ],
)
def test_backbone_rejects_image_size_that_patch_size_does_not_divide(
    name: str, architecture: str, shape: tuple[int, ...], read_size: str, right_size: str
) -> None:
    advice = f"Use images of {right_size} pixels (dataset.image_size"
    with rejects(f"model.architecture: {architecture} would read only {read_size} pixels ... {advice}"):
        build_model(name, architecture=architecture).check(shape, 10)
    height, width = map(int, right_size.split("x"))
    build_model(name, architecture=architecture).check((shape[0], height, width), 10)


def test_tnt_rejects_image_size_that_patch_size_does_not_divide() -> None:
    with pytest.raises(SettingsError, match=r"image sizes must be multiples of 16.*dataset\.image_size"):
        build_model("timm", architecture="tnt_s_patch16_224").check((3, 40, 40), 10)
    build_model("timm", architecture="tnt_s_patch16_224").check((3, 48, 48), 10)


@pytest.mark.parametrize("architecture", ["test_vit", "pit_ti_224", "test_efficientnet"])
def test_all_pixels_of_accepted_images_influence_timm_features(architecture: str) -> None:
    model, x = build_model("timm", architecture=architecture), make_inputs((1, 48, 48)).requires_grad_()
    model.check((1, 48, 48), 10)
    model.build((1, 48, 48), 10).eval().body(x).square().sum().backward()
    assert x.grad.ne(0).any(0).all()


def test_missing_timm_error_contains_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedpipe.models import timm as module

    module._list_architectures.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(SettingsError, match=r"^model\.name: 'timm' needs .*`pip install 'fedpipe\[timm\]'`"):
        build_model("timm", architecture="test_vit").check((3, 32, 32), 10)
