"""Loads a run's data set and partition as federated data."""

from __future__ import annotations

from pathlib import Path

import torch

from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import read_parquet, read_recorded_sha256
from fedpipe.data import store
from fedpipe.data.assignment import Assignment, compute_assignment_sha256
from fedpipe.engine.clients.corruption import ClientSamples, corrupt_samples
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.dataset import NOISE_KEYS


def get_data_paths(settings: RunSettings) -> dict[str, Path]:
    """Get the paths of a run's data set and partition."""
    partition_path = layout.get_assignment_path(compute_json_digest(settings.partition_settings))
    return {"data set": store.get_stored_dataset_path(settings.dataset), "partition": partition_path}


def load_federated_data(settings: RunSettings, dtype: torch.dtype, device: torch.device) -> FederatedData:
    """Load a run's data set and partition to the device."""
    dataset_path, partition_path = get_data_paths(settings).values()
    samples = store.load_samples(dataset_path, read_recorded_sha256(dataset_path))
    table = read_parquet(partition_path, read_recorded_sha256(partition_path))
    assignment = Assignment.from_table(table)
    classes = store.read_dataset_info(dataset_path).classes
    rows = assignment.train, assignment.test, assignment.validation, assignment.global_test
    noise = {name: value for name, value in settings.dataset.items() if name in NOISE_KEYS}
    clients = corrupt_samples(ClientSamples(samples.x, samples.y, *rows), classes, settings.seed, dtype, **noise)
    return FederatedData(
        clients.x,
        clients.y,
        clients.train,
        clients.test,
        clients.global_test,
        classes,
        settings.seed,
        dtype,
        device,
        validation=clients.validation,
        transforms=settings.build_transforms_settings(),
        data_checksums={
            "data set": store.compute_samples_sha256(samples),
            "partition": compute_assignment_sha256(table),
        },
    )
