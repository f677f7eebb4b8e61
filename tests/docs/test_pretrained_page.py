"""Run the studies of docs/pretrained.md with a local repository of Hugging Face's library and generated weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedpipe
from fedpipe.core.storage import layout
from fedpipe.models.torchvision import Torchvision
from fedpipe.planning import planner
from tests import small_studies as studies
from tests.data.conftest import offline  # noqa: F401
from tests.data.repositories import encode_image, write_repository
from tests.docs.page_blocks import blocks
from tests.models import published
from tests.small_studies import run_command

PAGE = "docs/pretrained.md"
STUDY, TORCHVISION = (yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml")
WRITERS = 4


@pytest.fixture(autouse=True)
def caches(offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    import huggingface_hub.constants

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_study_of_pretrained_page_has_ten_lines() -> None:
    study = next(block for block in blocks(PAGE) if block.language == "yaml")
    assert len(study.lines) == 10


def test_lora_study_sends_low_rank_matrices_and_shared_head() -> None:
    import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (100, 28, 28), dtype=np.uint8)
    columns = {
        "image": [{"bytes": encode_image(image), "path": None} for image in pixels],
        "character": [number % 3 for number in range(100)],
        "writer_id": [f"f{number % WRITERS:03}" for number in range(100)],
    }
    features = {"image": datasets.Image(), "character": datasets.ClassLabel(names=["a", "b", "c"])}
    write_repository(columns, features=features)
    published.write_timm_cache(Path("hub"))
    study = STUDY | {
        "dataset": STUDY["dataset"] | {"path": "repository"},
        "partition": {"scheme": "natural", "minimum": 20},
        "model": STUDY["model"] | {"architecture": "test_vit"},
        "federation": STUDY["federation"] | {"clients": WRITERS, "participation": 0.5, "rounds": 1},
    }
    studies.write(study, Path())
    output = run_command("download")
    assert "params.yaml now contains dataset.sha256" in output
    assert "params.yaml now contains model.sha256" in output
    plan = studies.prepare(yaml.safe_load(Path("params.yaml").read_text()))
    assert "f003" in run_command("partition", "--preview")
    matrices = 6 * (8 * 64 + 192 * 8)
    for run, head in zip(studies.open_runs(plan), (64 * 3 + 3, 0), strict=True):  # FedPer's clients keep the head
        studies.finish_run(run, 1, plan.keep_models)
        (row,) = layout.read_merged_table(run.files.get_merged_files(1).rounds).to_pylist()
        assert row["bytes_up"] == row["bytes_down"] == 4 * (matrices + head), "float32, per participant"
    network = fedpipe.load().model("fedavg")
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


def test_torchvision_study_uses_downloaded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    path, tensors = published.write_torchvision_weights("resnet18", Path("publisher"))
    np.savez("images.npz", x=np.zeros((20, 3, 32, 32), np.uint8), y=np.arange(20) % 2)
    study: dict[str, Any] = studies.settings(rounds=1, dataset={"name": "npz", "path": "images.npz", "split": "pooled"})
    with published.serve(Path("publisher")) as address:
        published.publish(monkeypatch, f"{address}/{path.name}")
        studies.write(study | TORCHVISION, Path())
        run_command("download")
    model = planner.loader.read_params(Path("params.yaml"))["model"]
    network = Torchvision(**{key: value for key, value in model.items() if key != "name"}).build((3, 32, 32), 2)
    assert torch.equal(network.body.state_dict()["conv1.weight"], tensors["conv1.weight"])
