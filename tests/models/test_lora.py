"""LoRA: clients train and upload only the head and low-rank matrices of frozen layers."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.core.tensors import Tensors
from fedpipe.models.backbone import Backbone
from fedpipe.models.base import FunctionalNetwork
from tests.models import published

SHAPE, CLASSES, RANK, WIDTH, BLOCKS = (3, 32, 32), 3, 2, 64, 6
SECTION = {"name": "timm", "architecture": "test_vit", "weights": "weights.safetensors"}


@pytest.fixture(autouse=True)
def weights(in_empty_folder: Path) -> dict[str, torch.Tensor]:
    path, tensors = published.write_timm_weights(Path())
    path.rename("weights.safetensors")
    return tensors


def build_model(**parameters: Any) -> Backbone:
    sha256 = compute_file_sha256(Path("weights.safetensors"))
    return cast(Backbone, registry.parse_component(component.MODEL, SECTION | {"sha256": sha256} | parameters))


def make_network(**parameters: Any) -> FunctionalNetwork:
    model = build_model(**{"lora": {"layers": ["qkv"], "rank": RANK, "alpha": 6}} | parameters)
    return FunctionalNetwork(lambda: model.build_initial_network(SHAPE, CLASSES), torch.float64)


def test_lora_trains_matrices_and_head() -> None:
    net = make_network()
    sizes = {name: value.numel() for name, value in net.make_initial_model(0).items()}
    expected = {f"body.blocks.{block}.attn.qkv.lora_a": RANK * WIDTH for block in range(BLOCKS)}
    expected |= {f"body.blocks.{block}.attn.qkv.lora_b": RANK * 3 * WIDTH for block in range(BLOCKS)}
    assert sizes == expected | {"head.weight": CLASSES * WIDTH, "head.bias": CLASSES}
    assert not net.norm_names, "normalization layers are frozen"


def test_initial_lora_network_equals_pretrained_network() -> None:
    net, plain = make_network(), make_network(lora=None)
    x = torch.rand(2, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = net.make_initial_model(1)
    torch.testing.assert_close(net.features(model, x), plain.features(plain.make_initial_model(1), x))
    other = net.make_initial_model(2)
    assert not torch.equal(model["body.blocks.0.attn.qkv.lora_a"], other["body.blocks.0.attn.qkv.lora_a"])
    assert not model["body.blocks.0.attn.qkv.lora_b"].any()


def test_lora_adds_product_of_matrices_to_weights() -> None:
    net, plain = make_network(), make_network(lora=None)
    random = torch.Generator().manual_seed(0)
    x = torch.rand(2, *SHAPE, dtype=torch.float64, generator=random)
    model = Tensors(
        (name, value + torch.rand(value.shape, dtype=value.dtype, generator=random) / 10)
        for name, value in net.make_initial_model(1).items()
    )
    merged = dict(plain.make_initial_model(1)) | {name: model[name] for name in ("head.weight", "head.bias")}
    for block in range(BLOCKS):
        layer = f"body.blocks.{block}.attn.qkv"
        merged[f"{layer}.weight"] = (
            merged[f"{layer}.weight"] + 6 / RANK * model[f"{layer}.lora_b"] @ model[f"{layer}.lora_a"]
        )
    torch.testing.assert_close(net(model, x), plain(Tensors(merged), x))


def test_lora_uses_pretrained_batch_norm_statistics() -> None:
    section = {"name": "torchvision", "architecture": "mobilenet_v3_small", "weights": None, "sha256": None}
    tensors = published.randomize(build_model(**section).build(SHAPE, CLASSES))
    torch.save(tensors, "mobilenet.pt")
    section |= {"weights": "mobilenet.pt", "sha256": compute_file_sha256(Path("mobilenet.pt"))}
    lora = {"layers": ["classifier.0"]}
    build_model(**section, lora=lora).check(SHAPE, CLASSES)
    net, reference = make_network(**section, lora=lora), make_network(**section, lora=None)
    assert net.names == ("body.classifier.0.lora_a", "body.classifier.0.lora_b", "head.weight", "head.bias")
    assert not net.buffer_names
    x = torch.rand(2, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(net.make_initial_model(0), x), reference(reference.make_initial_model(0), x))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"lora": {"layers": ["qvk"]}},
            "model.lora.layers: test_vit has no linear layer 'qvk'. Use one of: attn.qkv, attn.proj",
        ),
        (
            {"lora": {"layers": ["fc"]}, "name": "torchvision", "architecture": "resnet18"},
            "model.lora: it can't be used with resnet18, whose body has no linear layer. Remove it",
        ),
        (
            {"lora": {"layers": ["out_proj"]}, "name": "torchvision", "architecture": "vit_b_32"},
            "model.lora.layers: vit_b_32 has no linear layer 'out_proj'. Use one of: mlp.0, mlp.3",
        ),
        ({"lora": {"layers": ["qkv"]}, "frozen": True}, "model.lora: it can't be used with model.frozen"),
        (
            {"lora": {"layers": ["qkv"]}, "name": "torchvision", "architecture": "swin_t"},
            "model.lora.layers: 'features.1.0.attn.qkv' of swin_t can't be adapted",
        ),
        (
            {"lora": {"layers": ["qkv"]}, "weights": None, "sha256": None},
            "model.lora: it can't be used with random weights",
        ),
        ({"lora": {"layers": []}}, "model.lora.layers: "),
        ({"lora": {"layers": ["qkv"], "rank": 0}}, "model.lora.rank: 0 "),
        ({"lora": {"layer": ["qkv"]}}, "model.lora.layer: unknown key. Did you mean 'layers'?"),
        ({"lora": {"rank": 4}}, "model.lora.layers: "),
    ],
)
def test_lora_rejects_invalid_settings(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        build_model(**parameters).check(SHAPE, CLASSES)
    assert message in str(error.value)
