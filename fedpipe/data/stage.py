"""The partition stage: from a stored data set to who owns which sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml

from fedpipe import artifacts, plan, registry
from fedpipe.data import heterogeneity, store
from fedpipe.data.assignment import Assignment, assign
from fedpipe.data.partitions.base import Scheme
from fedpipe.errors import ArtifactError


def partition(key: str) -> Path:
    """Deal the samples as ``partition.yaml`` says; writes the assignment and what it tells of heterogeneity."""
    path = artifacts.assignment_file(key)
    place = path.with_name("partition.yaml")
    if not place.is_file():
        raise ArtifactError(f"{place} is missing; '{key}' should be a partition of results/plan.json.")
    settings: dict[str, Any] = yaml.safe_load(place.read_text())
    dataset = settings["dataset"]
    samples = store.load(artifacts.dataset_file(dataset["name"]))
    scheme = cast(Scheme, plan.built(registry.PARTITION, "scheme", settings["partition"]))
    table = assign(
        scheme,
        samples.y.numpy(),
        samples.test.numpy(),
        settings["clients"],
        dataset["split"],
        dataset.get("test_share", 0.25),
        settings["seed"],
    )
    counts = Assignment.of(table).class_counts
    artifacts.write_parquet(path.with_name("heterogeneity.parquet"), heterogeneity.summary(counts))
    artifacts.write_manifest(path, artifacts.write_parquet(path, table))
    return path
