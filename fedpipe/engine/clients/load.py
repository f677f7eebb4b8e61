"""Loads a run's data set and partition as federated data."""

from __future__ import annotations

from pathlib import Path

import torch

from fedpipe.core.hashing import digest_json
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_parquet, read_recorded_sha256
from fedpipe.data import store
from fedpipe.data.assignment import Assignment, compute_assignment_sha256
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.planning.run_settings import RunSettings


def get_input_paths(settings: RunSettings) -> dict[str, Path]:
    """Get the paths of a run's data set and partition."""
    partition_path = layout.assignment_file(digest_json(settings.partition_settings))
    return {"data set": store.locate_dataset(settings.dataset), "partition": partition_path}


def load_federated_data(settings: RunSettings, dtype: torch.dtype, device: torch.device) -> FederatedData:
    """Load a run's data set and partition to the device."""
    dataset_path, partition_path = get_input_paths(settings).values()
    samples = store.load_samples(dataset_path, read_recorded_sha256(dataset_path))
    table = read_parquet(partition_path, read_recorded_sha256(partition_path))
    assignment = Assignment.from_table(table)
    indices = assignment.train, assignment.test, assignment.global_test
    return FederatedData(
        samples.x,
        samples.y,
        *indices,
        store.read_dataset_info(dataset_path).classes,
        settings.seed,
        dtype,
        device,
        validation=assignment.validation,
        transforms=settings.build_transforms_settings(),
        data_checksums={
            "data set": store.compute_samples_sha256(samples),
            "partition": compute_assignment_sha256(table),
        },
    )
