"""A frozen base computes its features once. Runs on features equal runs of the complete network."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files
from fedpipe.engine.clients import frozen
from fedpipe.engine.run import Run
from fedpipe.models.vgg16 import VGG16
from fedpipe.planning import download
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

pytestmark = pytest.mark.usefixtures("in_empty_folder", "narrow_vgg16")

IMAGES, CLASSES = 24, 3


@pytest.fixture(autouse=True)
def five_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is called for five batches, the last of which is smaller."""
    monkeypatch.setattr(frozen, "BATCH_SIZE", 5)


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def prepare_study(**sections: Any) -> NewPlan:
    """Plan a study of two clients with the weights of VGG16 in a file."""
    if not Path("vgg.pth").exists():
        random = np.random.default_rng(0)
        x = random.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
        np.savez("images.npz", x=x, y=np.arange(IMAGES) % CLASSES)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = VGG16(weights=None, frozen=False).build((3, 32, 32), CLASSES)
        torch.save(network.state_dict(), "vgg.pth")
    params = studies.settings(
        ("fedavg",),
        2,
        dataset={"name": "npz", "path": "images.npz", "split": "pooled"},
        transforms={"mean": [0.5], "std": [0.5]} | sections.pop("transforms", {}),
        partition={"scheme": "iid"},
        federation={"clients": 2, "participation": 1.0, "batch_size": 5} | sections.pop("federation", {}),
        **sections,
    )
    params["partition"] = {"scheme": "iid"}
    params["model"] = {"name": "vgg16", "weights": "vgg.pth"}
    studies.write(params, Path())
    download.download_and_pin_dataset(None, Path("params.yaml"))
    return studies.prepare(yaml.safe_load(Path("params.yaml").read_text()))


def test_run_on_cached_features_equals_run_of_complete_network(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, calls = prepare_study(), []
    compute_features = frozen.compute_features
    monkeypatch.setattr(frozen, "compute_features", lambda *args: calls.append(args) or compute_features(*args))
    (run,) = studies.open_runs(plan)
    list(run.run_segment(1))
    (reopened_run,) = studies.open_runs(plan, stack=2)
    assert len(calls) == 1, "features are computed once per data set"
    assert torch.equal(run.clients.x, reopened_run.clients.x)
    assert run.clients.x.shape == (IMAGES, 512)

    complete_network = VGG16(weights="vgg.pth", sha256=sha256("vgg.pth")).build_initial_network((3, 32, 32), CLASSES)
    images = torch.as_tensor(np.load("images.npz")["x"])
    x, y = (images.float() / 255 - 0.5) / 0.5, run.clients.y
    with torch.no_grad():
        torch.testing.assert_close(run.clients.x, complete_network.body[:3](x), rtol=1e-4, atol=1e-5)

    # a round of FedAvg in plain PyTorch with the complete network
    sums: dict[str, torch.Tensor] = {}
    for client in range(2):
        net = VGG16(weights="vgg.pth", sha256=sha256("vgg.pth")).build_initial_network((3, 32, 32), CLASSES)
        optimizer = torch.optim.SGD([value for value in net.parameters() if value.requires_grad], lr=0.1)
        order = run.clients.shuffle_indices(client, 1, "batches", 0)
        for first in range(0, len(order), 5):
            rows = torch.as_tensor(order[first : first + 5])
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        share = run.clients.sizes[client] / run.clients.sizes.sum()
        for name, value in net.named_parameters():
            if value.requires_grad:
                sums[name] = sums.get(name, 0) + share * value.detach()
    model = run.load_server_state(1)["model"]
    assert list(model) == list(sums) == ["body.3.weight", "body.3.bias", "head.weight", "head.bias"]
    for name, value in sums.items():
        torch.testing.assert_close(model[name], value, rtol=1e-3, atol=1e-5)
        assert not torch.equal(model[name], run.make_initial_model(0)[name]), "training must change the parameters"


def test_frozen_features_do_not_depend_on_threads() -> None:
    (run,) = studies.open_runs(prepare_study())
    features_path = frozen.get_features_path(run.settings)
    original_bytes = features_path.read_bytes()
    assert files.read_json(features_path.with_suffix(".json"))["made_by"]["torch"] == torch.__version__
    for path in (features_path, features_path.with_suffix(".json")):
        path.unlink()
    studies.open_runs(prepare_study(), threads=2)
    assert features_path.read_bytes() == original_bytes


def test_resumed_run_rejects_changed_or_damaged_features() -> None:
    plan = prepare_study()
    (run,) = studies.open_runs(plan)
    list(run.run_segment(1))
    path = frozen.get_features_path(run.settings)
    manifest = files.read_json(path.with_suffix(".json"))
    other_features = {"features": files.read_pt(path)["features"] + 1}
    manifest[path.name] = files.write_pt(path, other_features)
    files.write_json(path.with_suffix(".json"), manifest)
    (reopened_run,) = studies.open_runs(plan)
    with pytest.raises(ArtifactError, match=rf"{path} has changed since round 0\. The content of the features"):
        list(reopened_run.run_segment(2))
    path.write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=f"{path} is damaged"):
        Run(run.files)


def test_frozen_features_depend_on_transforms_and_reject_augmentation() -> None:
    (first_run,) = studies.open_runs(prepare_study())
    (second_run,) = studies.open_runs(prepare_study(transforms={"std": [0.25]}))
    assert frozen.get_features_path(first_run.settings) != frozen.get_features_path(second_run.settings)
    assert not torch.equal(first_run.clients.x, second_run.clients.x)
    with pytest.raises(SettingsError, match=r"^transforms\.flip: .*model\.frozen: true"):
        prepare_study(transforms={"flip": True})


def test_frozen_features_allow_label_drift_and_reject_rotation_drift() -> None:
    drift = {"round": 2, "clients": [1], "label_map": {0: 1, 1: 0}}
    (plain_run,) = studies.open_runs(prepare_study())
    (run,) = studies.open_runs(prepare_study(federation={"drift": drift}))
    assert frozen.get_features_path(run.settings) == frozen.get_features_path(plain_run.settings)
    list(run.run_segment(2))
    features, (old, new) = plain_run.clients.x, (run.clients.select_round_samples(number) for number in (1, 2))
    assert torch.equal(old.x[:IMAGES], features)
    for part in ("train", "test"):
        old_rows, new_rows = getattr(old, part)[1], getattr(new, part)[1]
        assert torch.equal(new.x[new_rows], features[old_rows])
        assert torch.equal(new.y[new_rows], torch.tensor([1, 0, 2])[old.y[old_rows]])
        assert np.array_equal(getattr(old, part)[0], getattr(new, part)[0])
    with pytest.raises(SettingsError, match=r"^federation\.drift\.kind: rotation .*model\.frozen: true"):
        prepare_study(federation={"drift": {"round": 2, "kind": "rotation"}})
