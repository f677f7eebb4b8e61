"""The example of custom data and a custom network in docs/custom-data.md, as written, and edits of such data."""

import hashlib

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import files
from fedpipe.core.storage.layout import RunFiles
from tests import small_studies as studies
from tests.pipeline.conftest import Project, count_jobs

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

    protocols = yaml.safe_load(example)["evaluation"]["protocols"]
    assert protocols == ["personal-on-local"]
    project.edit(federation={"rounds": 2}, evaluation={"protocols": [*protocols, "global-on-global"]})
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


@pytest.mark.slow
def test_snakemake_rejects_edited_partition_settings_and_edited_data(project: Project) -> None:
    """Edits after the runs have finished."""
    cells, params = project.folder / "data/cells.npz", project.folder / "params.yaml"
    random = np.random.default_rng(0)
    arrays = {"x": random.integers(0, 256, (120, 8, 8), dtype=np.uint8), "y": np.arange(120) % 3}
    cells.parent.mkdir()
    np.savez(cells, **arrays)
    settings = studies.settings(
        rounds=2, dataset={"name": "npz", "path": "data/cells.npz", "split": "pooled"}, federation={"clients": 4}
    )
    project.write(settings)
    project.run("fedpipe", "download")
    project.snakemake("results/metrics.json")
    (run,) = (project.folder / "results/runs/fedavg").iterdir()
    before = studies.hash_results(run)

    # plan two more rounds, edit the settings of the partition, and delete its assignment
    project.edit(federation={"rounds": 4})
    project.run("fedpipe", "plan")
    (place,) = (project.folder / "results/partitions").glob("*/partition.yaml")
    edited = place.read_text().replace("alpha: 0.3", "alpha: 30.0")
    place.write_text(edited)
    (place.parent / "assignment.parquet").unlink()
    printed = project.snakemake("all", check=False)
    key = compute_json_digest(yaml.safe_load(edited))
    assert f"partition.yaml was edited: its settings belong to the name '{key}'." in printed
    assert "segment" not in count_jobs(printed)
    assert studies.hash_results(run) == before

    # plan again, as the error suggests, so that the run resumes with its original partition
    project.run("fedpipe", "plan")
    project.snakemake("results/metrics.json")
    grown = studies.hash_results(run)
    unchanged = [name for name in before if name.startswith("rounds/")]
    assert unchanged
    assert all(grown[name] == before[name] for name in unchanged)

    # edit the data file after its declaration
    declared = yaml.safe_load(params.read_text())["dataset"]["sha256"]
    np.savez(cells, **arrays | {"y": (np.arange(120) + 1) % 3})
    printed = project.snakemake(check=False)
    assert f"dataset.sha256: {declared} is declared, but data/cells.npz " in printed
    assert "remove dataset.sha256 and run `fedpipe download`" in printed
    assert "Traceback" not in printed
    cells.unlink()
    project.snakemake("results/metrics.json")
    assert studies.hash_results(run) == grown
