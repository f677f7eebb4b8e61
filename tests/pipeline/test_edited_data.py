"""Edited data and edited partition settings of finished runs are rejected."""

import numpy as np
import pytest
import yaml

from fedpipe.core.hashing import compute_json_digest
from tests import small_studies as studies
from tests.pipeline.conftest import Project, count_jobs


@pytest.mark.slow
def test_snakemake_rejects_edited_partition_settings_and_edited_data(project: Project) -> None:
    cells, params = project.folder / "data/cells.npz", project.folder / "params.yaml"
    random = np.random.default_rng(0)
    arrays = {"x": random.integers(0, 256, (120, 8, 8), dtype=np.uint8), "y": np.arange(120) % 3}
    cells.parent.mkdir()
    np.savez(cells, **arrays)
    settings = studies.settings(
        rounds=2, dataset={"name": "npz", "path": "data/cells.npz", "split": "pooled"}, federation={"clients": 4}
    )
    studies.write(settings, project.folder)
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
