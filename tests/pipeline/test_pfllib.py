"""docs/pfllib.md, block by block, with a folder in the format of PFLlib."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from fedpipe.core.storage import files
from fedpipe.core.storage.layout import RunFiles
from tests.pipeline.conftest import Project

CLIENTS, CLASSES = 4, 10
PFLLIB = {
    "conv1.0": (32, 1, 5, 5),
    "conv2.0": (64, 32, 5, 5),
    "fc1.0": (512, 1024),
    "fc": (10, 512),
}  # FedAvgCNN of PFLlib


def write_pfllib_folder(folder: Path) -> dict[tuple[str, int], Any]:
    """Write a folder in the format of PFLlib. Return the arrays by part and client."""
    random, found = np.random.default_rng(0), {}
    for part, sizes in (("train", (12, 30, 21, 9)), ("test", (4, 10, 7, 3))):
        (folder / part).mkdir(parents=True)
        for client, size in enumerate(sizes):
            data = {
                "x": random.normal(size=(size, 1, 28, 28)).astype(np.float32),
                "y": random.permutation((np.arange(size) + client) % CLASSES),
            }
            with (folder / part / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data=np.array(data))
            found[part, client] = data
    return found


def write_start_weights(path: Path) -> dict[str, torch.Tensor]:
    """Write and return a state dict with the parameter names of PFLlib's CNN."""
    random = torch.Generator().manual_seed(0)
    state = {}
    for layer, shape in PFLLIB.items():
        state[f"{layer}.weight"] = torch.randn(shape, generator=random) / 50
        state[f"{layer}.bias"] = torch.randn(shape[0], generator=random) / 50
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    return state


@pytest.mark.slow
def test_pfllib_page_blocks_run(project: Project) -> None:
    theirs = write_pfllib_folder(project.folder / "../PFLlib/dataset/MNIST")
    weights = write_start_weights(project.folder / "../PFLlib/system/start.pt")
    params, page = project.folder / "params.yaml", (project.folder / "docs/pfllib.md").read_text()
    params.write_text("study: {algorithms: [fedavg], seeds: [0, 1]}\n")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S):
        if language == "python":
            (project.folder / block.split("\n", 1)[0].removeprefix("# ")).write_text(block)
        elif language == "yaml":
            params.write_text(params.read_text() + block.replace("clients: 20", f"clients: {CLIENTS}"))
        else:
            printed = [project.run(*command.split()) for command in block.splitlines()]
            if "--preview" in block:
                assert f"split from the file), {CLIENTS} clients" in printed[-1]
                assert ", all seeds: " in printed[-1]
                assert not re.search("pooled|official|share", printed[-1])
    (assignment,) = (project.folder / "results/partitions").glob("*/assignment.parquet")
    table = pq.read_table(assignment).to_pandas()
    (data,) = (project.folder / "results/data").glob("npz-*.pt")
    samples = files.read_pt(data)
    assert len(table) == len(samples["y"]) == sum(len(arrays["y"]) for arrays in theirs.values())
    for (part, client), arrays in theirs.items():
        mine = table[(table["split"] == part) & (table["client"] == client)]["sample"].to_numpy()
        assert np.array_equal(samples["x"].numpy()[mine], arrays["x"]), "each client has its samples in the same order"
        assert np.array_equal(samples["y"].numpy()[mine], arrays["y"])
    runs = [RunFiles(path) for path in (project.folder / "results/runs/fedavg").iterdir()]
    assert len(runs) == 2
    for run in runs:
        begun = files.read_pt(run.get_round_files(0).server_state)["model"]
        assert all(torch.equal(*pair) for pair in zip(begun.values(), weights.values(), strict=True)), (
            "all seeds start with the weights of the file"
        )
        settings = yaml.safe_load(run.settings.read_text())
        assert not {"split", "test_fraction", "stratified", "validation_fraction"} & set(settings["dataset"])
        assert settings["origin"] == {"model": {"weights": "data/start.pt"}}
    message = (project.folder / "results/tables/results.md").read_text()
    assert "split from the file" in message
    assert 0 < project.metrics()["fedavg"] <= 100
