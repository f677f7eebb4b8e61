"""Run a round of FedAvg on 300 samples for each data set and model in the table of docs/custom-data.md.

The samples are real if the mirror of FEDPIPE_MIRROR has the data set. Otherwise they are noise with its shape and
classes, in an .npz or Parquet file of a local mirror (tests/data has files in the published formats).
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchvision.models.vgg import cfgs, make_layers

from fedpipe.core.storage import files
from fedpipe.data.datasets.base import PublishedDataset, PublishedTexts
from fedpipe.data.sources.fetch import MIRROR_VARIABLE
from fedpipe.settings import loader, parser
from tests import small_studies as studies
from tests.pipeline.conftest import TABLE, Project

SUBSET = 300


def list_pairs() -> list[Any]:
    """List the rows of docs/custom-data.md: names of data sets, and names of models."""
    table = (
        (studies.ROOT / "docs/custom-data.md").read_text().split("| data set | samples | models")[1].split("\n\n")[0]
    )
    rows = [[re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return [pytest.param(row[0], row[2], id="-".join(row[0])) for row in rows if row[2]]


def write_small_mirror_file(source: PublishedDataset, path: Path) -> None:
    """Write a mirror file with a few samples of each class, at least 600 in total."""
    random = np.random.default_rng(0)
    y = np.arange(4 * max(source.classes, 150)) % source.classes
    test = np.arange(len(y)) >= len(y) * 3 // 4
    if isinstance(source, PublishedTexts):
        words = [f"word{index}" for index in range(500)]
        texts = [" ".join(random.choice(words, 30)) for _ in y]
        pq.write_table(pa.table({"split": np.where(test, "test", "train"), "label": y, "text": texts}), path)
    else:
        np.savez(path, x=random.integers(0, 256, (len(y), *source.shape), np.uint8), y=y, test=test)


def prepare_dataset(name: str, folder: Path, project: Project) -> dict[str, Any]:
    """Return the section `dataset` after `fedpipe download`. Write a mirror file if the data set is not available."""
    section = parser.parse_dataset({"name": name, "mirror": os.environ.get(MIRROR_VARIABLE)})
    source, holds = section.effective_dataset, section.fetcher.has_file
    if isinstance(source, PublishedDataset) and not (
        holds(source.substitute_name) or all(holds(file.name) for file in source.files)
    ):
        write_small_mirror_file(source, folder / source.substitute_name)
        section = parser.parse_dataset({"name": name, "mirror": str(folder)})
    project.write({"dataset": {"name": name, "subset": SUBSET, "mirror": section.mirror}})
    assert "is stored" in project.fedpipe("download")
    found: dict[str, Any] = loader.read_params(project.folder / "params.yaml")["dataset"]
    return found


def prepare_model(name: str, names: list[str], folder: Path) -> dict[str, Any]:
    """Return the section `model` for these data sets. VGG16 is frozen, with weights from a user file."""
    if name == "feddw_cnn" and "mnist" in names:
        return {"name": name, "channels": [10, 20], "dropout": 0.5}
    if name == "vgg16":
        path = folder / "vgg16.pth"
        torch.save({f"features.{name}": value for name, value in make_layers(cfgs["D"]).state_dict().items()}, path)
        return {"name": name, "weights": str(path), "sha256": files.compute_file_sha256(path)}
    return {"name": name}


@pytest.mark.slow
@pytest.mark.parametrize(("names", "models"), list_pairs())
def test_dag_runs_one_round_for_each_dataset_and_model(
    project: Project, tmp_path: Path, names: list[str], models: list[str]
) -> None:
    datasets = [prepare_dataset(name, tmp_path, project) for name in names]
    networks = [prepare_model(name, names, tmp_path) for name in models]
    params = studies.settings(
        rounds=1,
        dataset=datasets[0],
        partition={"scheme": "dirichlet", "alpha": 1.0},
        federation={"clients": 3, "participation": 1.0, "batch_size": 32, "optimizer": "adam", "learning_rate": 0.001},
        study={"grid": {"dataset": datasets, "model": networks}},
    )
    params["model"] = networks[0]  # the study has to be valid without the grid
    project.write(params)
    project.snakemake(TABLE)
    metrics = project.metrics()["fedavg"]
    assert len(metrics) == len(datasets) * len(networks)
    for found in metrics.values():
        assert 0 <= found <= 100
    assignments = list((project.folder / "results/partitions").glob("*/assignment.parquet"))
    assert [len(pq.read_table(path)) for path in assignments] == [SUBSET] * len(datasets)
