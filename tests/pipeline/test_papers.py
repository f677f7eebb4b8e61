"""Every data set of the papers with its models: a round of FedAvg on 300 samples, through the DAG.

The samples are real where FEDPIPE_MIRROR names a mirror that holds the data set; otherwise files stand in that have
its format, its shape and its classes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import studies
from tests.pipeline.conftest import Project

SHAPES = {
    "mnist": (10, (28, 28)),
    "fashion_mnist": (10, (28, 28)),
    "cifar10": (10, (32, 32, 3)),
    "cifar100": (100, (32, 32, 3)),
    "tiny_imagenet": (200, (64, 64, 3)),
}
WORDS = {"imdb": 2, "ag_news": 4}
MODELS: dict[str, list[dict[str, Any]]] = {
    "digits": [{"name": "cnn"}, {"name": "mlp"}],
    "mnist": [{"name": "cnn4"}, {"name": "feddw_cnn", "channels": [10, 20], "dropout": 0.5}],
    "fashion_mnist": [{"name": "lenet"}, {"name": "feddw_cnn", "channels": [10, 20], "dropout": 0.5}],
    "cifar10": [{"name": "cnn4"}, {"name": "feddw_cnn"}, {"name": "cnn5"}, {"name": "mobilenet"}],
    "cifar100": [{"name": "cnn4"}, {"name": "feddw_resnet18"}, {"name": "shufflenet"}, {"name": "cnn5"}],
    "tiny_imagenet": [{"name": "cnn4"}, {"name": "resnet18"}],
    "imdb": [{"name": "bilstm"}],
    "ag_news": [{"name": "fasttext"}],
}
#: VGG16's ImageNet weights are no file that a test may count on: random ones, and so all layers train.
for name in ("cifar10", "cifar100"):
    MODELS[name].append({"name": "vgg16", "weights": None, "frozen": False})


def stand_in(name: str, mirror: Path) -> None:
    """A mirror's file of a few samples in each class, 600 at least."""
    random = np.random.default_rng(0)
    if name in WORDS:
        words = [f"word{index}" for index in range(500)]
        labels = np.arange(600) % WORDS[name]
        texts = [" ".join(random.choice(words, 30)) for _ in labels]
        split = np.where(np.arange(600) < 450, "train", "test")
        pq.write_table(pa.table({"split": split, "label": labels, "text": texts}), mirror / f"{name}.parquet")
        return
    classes, shape = SHAPES[name]
    arrays = {}
    for part, count in (("train", 3), ("test", 1)):
        y = np.arange(max(classes, 150) * count) % classes
        arrays |= {f"x_{part}": random.integers(0, 256, (len(y), *shape), np.uint8), f"y_{part}": y}
    np.savez(mirror / f"{name}.npz", **arrays)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_round_through_the_dag(project: Project, tmp_path: Path, name: str) -> None:
    mirror = Path(os.environ.get("FEDPIPE_MIRROR", ""))
    if name != "digits" and not any(mirror.glob(f"{name.replace('fashion_', 'fashion-')}*")):
        mirror = tmp_path / "mirror"
        mirror.mkdir()
        stand_in(name, mirror)
    dataset = {"name": name, "subset": 300, **({"mirror": str(mirror)} if name != "digits" else {})}
    params = studies.settings(
        rounds=1,
        dataset=dataset,
        partition={"scheme": "dirichlet", "alpha": 1.0},
        federation={"clients": 3, "participation": 1.0, "batch_size": 32, "optimizer": "adam", "learning_rate": 0.001},
        study={"grid": {"model": MODELS[name]}},
    )
    params["model"] = MODELS[name][0]  # what the grid varies has to make sense by itself
    studies.write(params, project.folder)
    printed = project.run("fedpipe", "download")
    assert "is stored" in printed
    project.snakemake()
    metrics = project.metrics()["fedavg"]
    assert len(metrics) == len(MODELS[name])
    for found in metrics.values():
        assert 0 <= found["global-on-global"] <= 1
    (dealt,) = (project.folder / "results/partitions").glob("*/assignment.parquet")
    assert len(pq.read_table(dealt)) == 300
