"""The example of custom data and a custom network in docs/custom-data.md, as written."""

import hashlib

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from fedpipe.core.storage import files
from fedpipe.core.storage.layout import RunFiles
from tests.pipeline.conftest import Project

OWN = """
from torch import nn


def network(shape, classes):
    body = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return body, nn.Linear(16, classes)
"""


@pytest.mark.slow
def test_custom_data_page_example_runs_with_custom_network(project: Project) -> None:
    page = (project.folder / "docs/custom-data.md").read_text()
    section = page[page.index("## Custom data") :]
    example = section.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(example)["model"] == {"name": "own.network"}
    params, cells = project.folder / "params.yaml", project.folder / "data/cells.npz"
    params.write_text(example)
    (project.folder / "own.py").write_text(OWN)
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 800)
    x = (random.normal(60 * y[:, None, None], 20, (800, 12, 12)) + 40).clip(0, 255).astype(np.uint8)
    cells.parent.mkdir()
    np.savez(cells, x_train=x[:600], y_train=y[:600], x_test=x[600:], y_test=y[600:])

    project.run("fedpipe", "download")
    sha256 = hashlib.sha256(cells.read_bytes()).hexdigest()
    filled = params.read_text()
    assert filled.replace(f"  sha256: {sha256}\n", "") == example
    assert yaml.safe_load(filled)["dataset"]["sha256"] == sha256

    project.edit(federation={"rounds": 2})
    project.snakemake("results/metrics.json")
    (run,) = (project.folder / "results/runs/fedavg").iterdir()
    settings = yaml.safe_load((run / "run.yaml").read_text())
    assert settings["dataset"]["sha256"] == sha256
    assert settings["model"]["name"] == "own.network"
    (assignment,) = (project.folder / "results/partitions").glob("*/assignment.parquet")
    owned = pq.read_table(assignment).to_pandas().groupby("client").size()
    assert owned.sum() == len(y)
    assert owned.min() >= 40
    kept = files.read_pt(RunFiles(run).get_round_files(2).client_states)["kept"]["buffers"]
    (means,) = (value for name, value in kept.items() if name.endswith("running_mean"))
    assert len(means.unique(dim=0)) == len(owned), "each client has its own statistics"
    message = (project.folder / "results/tables/results.csv").read_text()
    assert "fedavg,personal-on-local," in message
    assert "fedavg,global-on-global,accuracy,sample,last,,,0," in message, "without a global model, the mean is empty"
