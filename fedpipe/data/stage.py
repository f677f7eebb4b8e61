"""The partition stage: from a stored data set to who owns which sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml

from fedpipe import artifacts, registry
from fedpipe.data import heterogeneity, store
from fedpipe.data.assignment import Assignment, assign
from fedpipe.data.partitions.base import Scheme


def partition(key: str) -> Path:
    """Deal the samples as ``partition.yaml`` says; writes the assignment and what it tells of heterogeneity."""
    path = artifacts.assignment_file(key)
    settings: dict[str, Any] = yaml.safe_load(path.with_name("partition.yaml").read_text())
    dataset = settings["dataset"]
    samples = store.load(artifacts.dataset_file(dataset["name"]))
    parameters = {name: value for name, value in settings["partition"].items() if name != "scheme"}
    scheme = cast(Scheme, registry.build(registry.PARTITION, settings["partition"]["scheme"], parameters))
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
    artifacts.write_parquet(path, table)
    return path
