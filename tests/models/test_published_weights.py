"""Weights of torchvision and timm: downloaded by `fedpipe download`, pinned in the key, and read offline."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml

import fedpipe
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import compute_file_sha256
from fedpipe.models.backbone import Backbone
from fedpipe.planning import download, planner
from tests import small_studies as studies
from tests.errors import rejects
from tests.models import published

ARCHITECTURE = "shufflenet_v2_x0_5"
TORCHVISION = {"name": "torchvision", "architecture": ARCHITECTURE, "weights": "IMAGENET1K_V1"}
TIMM = {"name": "timm", "architecture": "test_vit", "weights": "pretrained"}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder with empty caches of the libraries, and without the hub."""
    import huggingface_hub.constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def write_study(model: dict[str, Any], **sections: Any) -> None:
    random = np.random.default_rng(0)
    np.savez("images.npz", x=random.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8), y=np.arange(24) % 3)
    params = studies.settings(
        ("fedavg",),
        1,
        dataset={"name": "npz", "path": "images.npz", "split": "pooled"} | sections.pop("dataset", {}),
        transforms={"mean": [0.5], "std": [0.5]},
        federation={"clients": 2, "participation": 1.0, "batch_size": 5},
        **sections,
    )
    studies.write(params | {"partition": {"scheme": "iid"}, "model": model}, Path())


def write_study_and_download(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Write a study and run `fedpipe download`. Return the section of the model."""
    write_study(model, **sections)
    download.download_and_pin_dataset(None, Path("params.yaml"))
    return cast(dict[str, Any], yaml.safe_load(Path("params.yaml").read_text())["model"])


def open_run() -> Any:
    (run,) = studies.open_runs(studies.prepare(yaml.safe_load(Path("params.yaml").read_text())))
    return run


def build_model(**parameters: Any) -> Backbone:
    return cast(Backbone, registry.parse_component(component.MODEL, parameters))


def save_weights(value: Any, **section: Any) -> dict[str, Any]:
    """Write a file of weights, and return the section of its model."""
    torch.save(value, "weights.pth")
    return section | {"weights": "weights.pth", "sha256": compute_file_sha256(Path("weights.pth"))}


def test_torchvision_weights_are_downloaded_once_and_initialize_run(monkeypatch: pytest.MonkeyPatch) -> None:
    path, tensors = published.write_torchvision_weights(ARCHITECTURE, Path("publisher"))
    with published.serve(Path("publisher")) as address:
        published.publish(monkeypatch, f"{address}/{path.name}")
        section = write_study_and_download(TORCHVISION)
    assert section["sha256"] == compute_file_sha256(path)
    assert write_study_and_download(section) == section, "the second download must work offline"
    run = open_run()
    model = run.load_server_state(0)["model"] if run.write_initial_round() is None else {}
    body = {name: value for name, value in tensors.items() if not name.startswith("fc.") and "num_batches" not in name}
    assert model.keys() == {f"body.{name}" for name in body} | {"head.weight", "head.bias"}
    assert all(torch.equal(model[f"body.{name}"], value) for name, value in body.items())
    assert model["head.weight"].shape == (3, 1024)
    assert not torch.equal(model["head.weight"], run.make_initial_model(1)["head.weight"]), "drawn from the seed"


def test_download_copies_torchvision_weights_from_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = published.write_torchvision_weights(ARCHITECTURE, Path("mirror/torchvision"))
    published.publish(monkeypatch, f"http://127.0.0.1:9/{path.name}")
    section = write_study_and_download(TORCHVISION, dataset={"mirror": "mirror"})
    assert section["sha256"] == compute_file_sha256(path)
    assert build_model(**section).weights_file() == Path("torch/hub/checkpoints", path.name).absolute()


@pytest.mark.parametrize("source", ["cache", "mirror"])
def test_timm_weights_initialize_network(source: str) -> None:
    if source == "cache":
        path, tensors = published.write_timm_cache(Path("hub"))
    else:
        written, tensors = published.write_timm_weights(Path("mirror/timm"))
        path = written.rename(f"mirror/{published.TIMM_REPOSITORY}.safetensors")
    section = write_study_and_download(TIMM, dataset={} if source == "cache" else {"mirror": "mirror"})
    assert section["sha256"] == compute_file_sha256(path)
    model = build_model(**section)
    network = model.build_initial_network((3, 160, 160), 10)
    body = network.body.state_dict()
    assert all(torch.equal(body[name], value) for name, value in tensors.items() if not name.startswith("head."))
    small = model.build_initial_network((1, 32, 32), 10).body.state_dict()
    assert small["pos_embed"].shape == (1, 5, 64), "resized"
    assert small["patch_embed.proj.weight"].shape == (64, 1, 16, 16), "summed over colors"


def test_planning_does_not_download_and_job_rejects_missing_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    published.publish(monkeypatch, "http://127.0.0.1:9/shufflenet-01234567.pth")
    write_study({"name": "mlp"})
    download.download_and_pin_dataset(None, Path("params.yaml"))
    settings = yaml.safe_load(Path("params.yaml").read_text())
    studies.write(settings | {"model": TORCHVISION | {"sha256": "0" * 64}}, Path())
    plan = planner.make_plan(Path("params.yaml"))
    assert set(plan.unavailable_runs.values()) == {"weights not here"}
    assert not Path("torch").exists()
    with pytest.raises(SettingsError, match=r"^model\.weights: IMAGENET1K_V1 of .* can't be downloaded from http"):
        download.download_and_pin_dataset(None, Path("params.yaml"))
    with rejects("model.weights: ... not on this machine. Run `fedpipe download` ... 01234567"):
        build_model(**TORCHVISION, sha256="0" * 64).build_initial_network((3, 32, 32), 3)


def test_run_key_contains_sha256_and_name_of_weights() -> None:
    models = [build_model(**TORCHVISION, sha256=digit * 64) for digit in "01"]
    keys = [model.get_hashed_parameters() for model in models]
    assert keys[0] | {"sha256": "1" * 64} == keys[1]
    assert keys[0]["weights"] == "IMAGENET1K_V1"


def test_different_or_damaged_weights_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = published.write_torchvision_weights(ARCHITECTURE, Path("torch/hub/checkpoints"))
    published.publish(monkeypatch, f"http://127.0.0.1:9/{path.name}")
    model = build_model(**TORCHVISION, sha256="0" * 64)
    with pytest.raises(SettingsError, match=rf"^model\.sha256: 0+ is declared, but .*{path.name} has"):
        model.check((3, 32, 32), 3)
    path.write_bytes(b"damaged")
    with pytest.raises(SettingsError, match=rf"^model\.weights: .*{path.name} is damaged or another file"):
        model.check((3, 32, 32), 3)


# -- files -------------------------------------------------------------------------------------------------------------


def test_library_state_dict_from_file_initializes_network() -> None:
    path, tensors = published.write_torchvision_weights(ARCHITECTURE, Path("own"))
    section = write_study_and_download(TORCHVISION | {"weights": str(path)})
    network = build_model(**section).build_initial_network((3, 32, 32), 3)
    assert torch.equal(network.body.state_dict()["conv1.0.weight"], tensors["conv1.0.weight"])


@pytest.mark.slow
def test_file_with_all_tensors_initializes_complete_network() -> None:
    section = {"name": "torchvision", "architecture": "swin_t"}  # with tables of integers
    tensors = published.randomize(build_model(**section).build((3, 32, 32), 3))
    model = build_model(**save_weights(tensors, **section))
    assert model.has_full_weights
    network = model.build_initial_network((3, 32, 32), 3)
    assert all(torch.equal(value, tensors[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    "architecture",
    [
        "mnasnet0_5",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("densenet121", "squeezenet1_1")),
    ],
)
def test_published_weight_formats_are_read(architecture: str) -> None:
    """Old names of DenseNet, versions of MNASNet, and heads of 1000 classes."""
    from torchvision import models

    tensors = published.randomize(models.get_model(architecture, weights=None))
    old = {name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2."): value for name, value in tensors.items()}
    section = save_weights(old if architecture == "densenet121" else tensors, architecture=architecture)
    network = build_model(name="torchvision", **section).build_initial_network((3, 32, 32), 3)
    body = network.body.state_dict()
    assert all(torch.equal(value, tensors[name]) for name, value in body.items())


@pytest.mark.slow
def test_published_weights_of_googlenet_lose_auxiliary_heads_and_transform_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchvision import models

    reference = models.get_model("googlenet", weights=None, init_weights=False, transform_input=True)
    path, tensors = published.write_torchvision_weights("googlenet", Path("publisher"))
    reference.load_state_dict(tensors)
    with published.serve(Path("publisher")) as address:
        published.publish(monkeypatch, f"{address}/{path.name}")
        section = write_study_and_download(TORCHVISION | {"architecture": "googlenet"})
    network = build_model(**section).build_initial_network((3, 32, 32), 3).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    reference.fc, reference.dropout = torch.nn.Identity(), torch.nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(network.body(x), reference.eval()(x))


def test_file_of_network_that_may_transform_its_inputs_is_rejected() -> None:
    """Its tensors are the same with and without the transform."""
    section = save_weights({"conv1.weight": torch.zeros(1)}, name="torchvision", architecture="googlenet")
    with rejects("model.weights: weights.pth can't be used for googlenet ... does not record"):
        build_model(**section).check((3, 32, 32), 3)


@pytest.mark.parametrize("num_classes", [0, 10, 1000])
@pytest.mark.parametrize("architecture", ["test_vit", "test_resnet"])
def test_timm_state_dict_of_any_number_of_classes_initializes_network(architecture: str, num_classes: int) -> None:
    import timm

    tensors = published.randomize(timm.create_model(architecture, num_classes=num_classes))
    section = save_weights(tensors, name="timm", architecture=architecture)
    network = build_model(**section).build_initial_network((3, 160, 160), 3)
    body = network.body.state_dict()
    assert all(torch.equal(value, tensors[name]) for name, value in body.items() if name in tensors)
    assert len(body.keys() & tensors.keys()) > 20
    assert network.head.weight.shape[0] == 3


@pytest.mark.parametrize(("name", "architecture"), [("torchvision", "resnet18"), ("timm", "test_resnet")])
def test_group_norm_network_rejects_batch_norm_file(name: str, architecture: str) -> None:
    import timm
    from torchvision import models

    library_network = timm.create_model(architecture) if name == "timm" else models.get_model(architecture)
    own_network = build_model(name=name, architecture=architecture).build((3, 32, 32), 3)
    for network in (library_network, own_network):
        section = save_weights(network.state_dict(), name=name, architecture=architecture)
        build_model(**section).check_weights_file((3, 32, 32), 3)
        with pytest.raises(SettingsError, match=r"^model\.norm: group can't be used with the weights weights\.pth"):
            build_model(**section, norm="group").check_weights_file((3, 32, 32), 3)


def test_group_norm_file_initializes_group_norm_network() -> None:
    from torchvision import models

    def make_group_norm(channels: int) -> torch.nn.Module:
        return torch.nn.GroupNorm(32, channels)

    tensors = published.randomize(models.resnet18(norm_layer=make_group_norm))
    section = {"name": "torchvision", "architecture": "resnet18", "norm": "group"}
    network = build_model(**save_weights(tensors, **section)).build_initial_network((3, 32, 32), 3)
    body = network.body.state_dict()
    assert {f"{name}" for name in tensors if not name.startswith("fc.")} == body.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in body.items())

    own_tensors = published.randomize(build_model(**section).build((3, 32, 32), 3))
    network = build_model(**save_weights(own_tensors, **section)).build_initial_network((3, 32, 32), 3)
    assert all(torch.equal(value, own_tensors[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("section", [TORCHVISION, TIMM], ids=["torchvision", "timm"])
def test_error_of_different_network_lists_three_missing_names(section: dict[str, Any]) -> None:
    model = build_model(**save_weights({"conv1.weight": torch.zeros(1)}, **section))
    names = r"\(Missing key\(s\) in state_dict: '[^']+', '[^']+', '[^']+' and \d+ more\)"
    message = rf"^model\.weights: weights\.pth does not fit {section['architecture']} .*{names}"
    with pytest.raises(SettingsError, match=message):
        model.check_weights_file((3, 32, 32), 3)


def test_file_whose_missing_tensors_timm_would_draw_at_random_is_rejected() -> None:
    import timm

    tensors = timm.create_model("test_resnet", num_classes=0).state_dict()
    model = build_model(**save_weights(tensors, name="timm", architecture="inception_v3"))
    names = r"\(Missing key\(s\) in state_dict: 'Conv2d_1a_3x3\.conv\.weight', '[^']+', '[^']+' and \d+ more\)"
    with pytest.raises(SettingsError, match=rf"^model\.weights: weights\.pth does not fit inception_v3 .*{names}"):
        model.check_weights_file((3, 75, 75), 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [0, 3])
def test_timm_names_that_begin_as_those_of_fedpipe_are_read(num_classes: int) -> None:
    import timm

    tensors = published.randomize(timm.create_model("tresnet_m", num_classes=num_classes))
    model = build_model(**save_weights(tensors, name="timm", architecture="tresnet_m"))
    body = model.build_initial_network((3, 64, 64), 3).body.state_dict()
    convolutions = [name for name in tensors if name.endswith(".conv.weight")]
    assert "body.conv1.conv.weight" in convolutions
    assert all(torch.equal(body[name], tensors[name]) for name in convolutions)


@pytest.mark.parametrize("section", [TORCHVISION, TIMM], ids=["torchvision", "timm"])
def test_error_contains_prefix_of_all_tensor_names(section: dict[str, Any]) -> None:
    network, _ = build_model(**section | {"weights": None}).build_library_network((3, 32, 32), 3, None)
    model = build_model(
        **save_weights({f"module.{key}": value for key, value in network.state_dict().items()}, **section)
    )
    with pytest.raises(SettingsError, match=r"\(all its names begin with 'module\.'\. Remove this prefix\)"):
        model.check_weights_file((3, 32, 32), 3)


def test_complete_model_file_error_contains_cure() -> None:
    section = save_weights(torch.nn.Linear(2, 2), name="torchvision", architecture="resnet18")
    with rejects("model.weights: weights.pth can't be read ( ... Save model.state_dict()") as error:
        build_model(**section).check_weights_file((3, 32, 32), 3)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(("is_offline", "tries"), [(True, 1), (False, 2)])
def test_timm_download_tries_other_file_name_only_with_network(
    monkeypatch: pytest.MonkeyPatch, is_offline: bool, tries: int
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    names = []

    def download(repository: str, name: str, revision: str | None) -> None:
        names.append(name)
        raise (LocalEntryNotFoundError if is_offline else EntryNotFoundError)("missing")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(EntryNotFoundError):
        build_model(**TIMM).download_weights()
    assert len(names) == tries


# -- frozen ------------------------------------------------------------------------------------------------------------


def test_frozen_body_computes_features_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = published.write_torchvision_weights(ARCHITECTURE, Path("own"))
    section = write_study_and_download(TORCHVISION | {"weights": str(path), "frozen": True})
    run = open_run()
    studies.finish_run(run, 1)
    assert run.clients.x.shape == (24, 1024)
    images = (torch.as_tensor(np.load("images.npz")["x"]).float() / 255 - 0.5) / 0.5
    network = build_model(**section).build_initial_network((3, 32, 32), 3)
    with torch.no_grad():
        torch.testing.assert_close(run.clients.x, network.eval().body(images), rtol=1e-4, atol=1e-5)
    model = run.load_server_state(1)["model"]
    assert list(model) == ["head.weight", "head.bias"]
    results = fedpipe.load()
    inputs, labels = results.test("fedavg")
    assert inputs.shape[1:] == results.samples("fedavg")[0].shape[1:] == (3, 32, 32)
    with torch.no_grad():
        accuracy = (results.model("fedavg")(inputs).argmax(1) == labels).double().mean()
    correct, total, _ = studies.read_scores(run, 1, "global-on-global")[1, -1]
    assert accuracy == correct / total
    (features,) = Path("results/features").glob("*.pt")
    written = features.stat().st_mtime_ns
    assert torch.equal(open_run().clients.x, run.clients.x)
    assert features.stat().st_mtime_ns == written


def test_methods_with_body_only_training_reject_frozen_body() -> None:
    """The plan accepts methods that can train with an empty body."""
    path, _ = published.write_torchvision_weights(ARCHITECTURE, Path("own"))
    write_study_and_download(TORCHVISION | {"weights": str(path), "frozen": True})
    params = yaml.safe_load(Path("params.yaml").read_text())

    def plan(label: str, **options: Any) -> planner.NewPlan:
        changes = {"algorithms": {label: options}, "study": {"algorithms": [label], "seeds": [0]}}
        return planner.make_plan(Path("params.yaml"), settings=params | changes)

    for label in ("fedas", "fedbabu", "fedpac", "fedrep", "pfps_lwc"):
        with pytest.raises(SettingsError, match=rf"^model\.frozen: true can't be used with {label},"):
            plan(label)
    assert plan("fedper").runs
    assert plan("pfps_lwc", recall_epochs=0).runs, "the ablation without recall does not train the body alone"
    params["model"]["frozen"] = False
    assert plan("fedrep").runs
