"""Weights of VGG16 come from a file that is checked. Frozen weights do not change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.vgg import cfgs, make_layers

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.models import vgg16
from fedpipe.models.base import FunctionalNetwork, Network
from fedpipe.models.vgg16 import IMAGENET_SHA256, VGG16
from tests.errors import rejects
from tests.models import published

SHAPE = (3, 32, 32)
OTHER = "0" * 64


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Weights like in torchvision's state dict: the convolutional base, and a classifier that is not used."""
    source = torch.Generator().manual_seed(4)
    with torch.device("meta"):
        base = make_layers(cfgs["D"]).state_dict()
    base_weights = {f"features.{name}": torch.rand(value.shape, generator=source) - 0.5 for name, value in base.items()}
    return base_weights | {"classifier.6.bias": torch.zeros(1000)}


@pytest.fixture(scope="module")
def file(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "vgg16-own.pth"
    torch.save(weights, path)
    return path


def build_model(file: Path, **parameters: Any) -> VGG16:
    settings = {"weights": str(file), "sha256": compute_file_sha256(file) if file.is_file() else OTHER} | parameters
    model = registry.build_component(component.MODEL, "vgg16", settings)
    assert isinstance(model, VGG16)
    model.check(SHAPE, 10)
    model.check_weights_file(SHAPE, 10)
    return model


def count_trained_parameters(network: Network) -> int:
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(("classes", "count"), [(10, 33_482), (100, 39_332)])
def test_frozen_vgg16_has_trained_parameter_count_of_feddual(file: Path, classes: int, count: int) -> None:
    network = build_model(file).build_initial_network(SHAPE, classes)
    assert count_trained_parameters(network) == count
    frozen = [parameter.numel() for parameter in network.body[0].parameters() if not parameter.requires_grad]
    assert sum(frozen) == 14_714_688


def test_frozen_weights_match_file_and_are_not_in_initial_model(file: Path, weights: dict[str, Tensor]) -> None:
    net = FunctionalNetwork(lambda: build_model(file).build_initial_network(SHAPE, 10))
    assert net.names == ("body.3.weight", "body.3.bias", "head.weight", "head.bias")
    one, other = net.make_initial_model(1), net.make_initial_model(2)
    assert tuple(one) == net.names
    assert not any(torch.equal(one[name], other[name]) for name in one)
    x = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(1))
    net(one, x)
    for name, value in net._module.body[0].named_parameters():
        assert torch.equal(value, weights[f"features.{name}"])


def test_features_match_convolutional_base_of_file(file: Path, weights: dict[str, Tensor]) -> None:
    net = FunctionalNetwork(lambda: build_model(file).build_initial_network(SHAPE, 10))
    model, x = net.make_initial_model(1), torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    base = make_layers(cfgs["D"])
    base.load_state_dict({name[9:]: value for name, value in weights.items() if name.startswith("features.")})
    pooled = base(x).mean((2, 3))
    features = (pooled @ model["body.3.weight"].T + model["body.3.bias"]).relu()
    assert features.shape == (2, 64)
    assert features.any()
    assert torch.allclose(net.features(model, x), features, rtol=1e-4)


def test_unfrozen_vgg16_trains_all_layers_from_file_weights(file: Path, weights: dict[str, Tensor]) -> None:
    net = FunctionalNetwork(lambda: build_model(file, frozen=False).build_initial_network(SHAPE, 10))
    model = net.make_initial_model(1)
    base = {name: value for name, value in weights.items() if name.startswith("features.")}
    assert len(model) == len(base) + 4
    assert all(torch.equal(model[f"body.0.{name[9:]}"], value) for name, value in base.items())
    copy = net.make_initial_model(1)
    model["body.0.0.weight"].zero_()
    assert copy["body.0.0.weight"].any()
    x = torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(1))
    gradients = torch.func.grad(lambda model: net(model, x).square().mean())(copy)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


def test_weights_file_in_old_pytorch_format_is_read(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    base = build_model(tmp_path / "old.pth").build_initial_network(SHAPE, 10).body[0]
    assert torch.equal(base[0].weight, weights["features.0.weight"])


def test_weights_without_sha256_are_rejected_when_network_is_built(file: Path) -> None:
    with pytest.raises(SettingsError, match=rf"^model\.sha256: missing for {file}\. .*{compute_file_sha256(file)}"):
        VGG16(weights=str(file)).build_initial_network(SHAPE, 10)


def test_changed_weights_file_is_rejected(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(weights, path)
    model = build_model(path)
    model.build_initial_network(SHAPE, 10)
    with path.open("r+b") as stream:
        stream.seek(-1000, 2)
        stream.write(b"tampered")
    with pytest.raises(SettingsError, match=rf"^model\.sha256: .* is declared, but {path}"):
        model.build_initial_network(SHAPE, 10)


def test_missing_weights_file_is_rejected_when_network_is_built(tmp_path: Path) -> None:
    model = build_model(tmp_path / "absent.pth")
    with pytest.raises(SettingsError, match=rf"^model\.weights: .*absent\.pth is missing\. .*{OTHER}"):
        model.build_initial_network(SHAPE, 10)


def test_code_in_weights_file_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"features.0.weight": published.MaliciousPickle()}, "weights.pth")
    with pytest.raises(SettingsError, match=r"^model\.weights: weights\.pth can't be read \("):
        build_model(Path("weights.pth")).build_initial_network(SHAPE, 10)
    assert not Path("mischief").exists()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"features.0.weight": torch.zeros(1)}, "contains another network.*torchvision's VGG16"),
        ({"body.weight": torch.zeros(1)}, r"has no tensor 'body\.0\.0\.weight'.* 30 tensors"),
    ],
)
def test_weights_file_of_different_network_is_rejected(
    tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    torch.save(tensors, tmp_path / "other.pth")
    with pytest.raises(SettingsError, match=rf"^model\.weights: .*other\.pth {message}"):
        build_model(tmp_path / "other.pth")


def test_file_with_all_tensors_initializes_complete_network(file: Path, tmp_path: Path) -> None:
    model = build_model(file)
    assert not model.has_full_weights
    network = model.build_initial_network(SHAPE, 10)
    torch.save(network.state_dict(), tmp_path / "all.pth")
    full_model = build_model(tmp_path / "all.pth")
    assert full_model.has_full_weights
    full_network = full_model.build_initial_network(SHAPE, 10)
    tensors = network.state_dict()
    assert all(torch.equal(value, tensors[name]) for name, value in full_network.state_dict().items())
    assert count_trained_parameters(full_network) == 33_482


def test_run_keys_differ_between_imagenet_random_and_file_weights(file: Path) -> None:
    key_parameters = [
        VGG16().get_hashed_parameters(),
        VGG16(weights=None, frozen=False).get_hashed_parameters(),
        build_model(file).get_hashed_parameters(),
    ]
    assert key_parameters == [
        {"weights": "imagenet", "sha256": IMAGENET_SHA256, "frozen": True},
        {"weights": None, "sha256": None, "frozen": False},
        {"sha256": compute_file_sha256(file), "frozen": True},
    ]
    assert build_model(file).path_parameters == {"weights": str(file)}
    assert not VGG16().path_parameters


def test_frozen_base_with_random_weights_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r"^model\.frozen: true can't be used with random weights"):
        VGG16(weights=None).check(SHAPE, 10)
    VGG16(weights=None, frozen=False).check(SHAPE, 10)


@pytest.fixture
def server(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VGG16]:
    """The model, with the URL of torchvision's weights changed to a local server of the file's folder."""
    with published.serve(file.parent) as address:
        monkeypatch.setattr(vgg16, "WEIGHTS_URL", f"{address}/{file.name}")
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        monkeypatch.setattr(torch.hub, "_hub_dir", None)
        yield VGG16(sha256=compute_file_sha256(file))


def test_imagenet_weights_url_contains_start_of_sha256() -> None:
    assert vgg16.WEIGHTS_URL.endswith(f"/vgg16-{IMAGENET_SHA256[:8]}.pth")


def test_imagenet_weights_are_downloaded_once(server: VGG16, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    assert server.imagenet_weights_path == tmp_path / "hub" / "checkpoints" / "vgg16-own.pth"
    server.check(SHAPE, 10)
    assert not server.imagenet_weights_path.exists()
    base = server.build_initial_network(SHAPE, 10).body[0]
    assert torch.equal(base[0].weight, weights["features.0.weight"])
    mtime_ns = server.imagenet_weights_path.stat().st_mtime_ns
    server.weights_file()
    assert server.imagenet_weights_path.stat().st_mtime_ns == mtime_ns


def test_damaged_imagenet_weights_in_cache_are_rejected(server: VGG16) -> None:
    server.weights_file().write_bytes(b"damaged")
    for use_weights in (server.weights_file, lambda: server.check(SHAPE, 10)):
        with rejects(f"model.sha256: {server.sha256} is declared, but {server.imagenet_weights_path} has"):
            use_weights()


def test_download_with_wrong_sha256_is_rejected_and_deleted(server: VGG16) -> None:
    with pytest.raises(SettingsError, match=r"^model\.weights: imagenet can't be downloaded from http"):
        VGG16().weights_file()
    assert not list(server.imagenet_weights_path.parent.iterdir())


def test_failed_download_error_contains_path_of_file(server: VGG16, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vgg16, "WEIGHTS_URL", vgg16.WEIGHTS_URL.replace("own", "absent"))
    with pytest.raises(SettingsError, match=rf"404.* {server.imagenet_weights_path.parent}/vgg16-absent\.pth"):
        server.weights_file()
