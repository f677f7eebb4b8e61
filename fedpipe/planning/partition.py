"""The partition stage: assigns the samples of a stored data set to clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedpipe.core.components import code_digest, component, registry
from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import files, layout
from fedpipe.core.yaml_text import read_verified_settings, read_yaml
from fedpipe.data import heterogeneity, store
from fedpipe.data.assignment import Assignment, assign_samples, compute_assignment_sha256, select_sample_subset
from fedpipe.data.partitions.base import Scheme
from fedpipe.data.samples import Column, Samples

LISTED = 20  #: maximum number of clients in a message

if TYPE_CHECKING:
    import pyarrow as pa


def partition_dataset(key: str) -> Path:
    """Partition the samples with the settings of ``partition.yaml``. Write the assignment and its heterogeneity."""
    path, settings = layout.get_assignment_path(key), read_partition_settings(key)
    dataset_path = store.get_stored_dataset_path(settings["dataset"])
    samples = store.load_samples(dataset_path, files.read_recorded_sha256(dataset_path))
    table = make_assignment_table(settings, samples)
    counts = Assignment.from_table(table).class_counts
    tables = {layout.get_heterogeneity_path(key): heterogeneity.make_heterogeneity_table(counts), path: table}
    hashes = {
        table_path.name: files.write_parquet(table_path, table_content) for table_path, table_content in tables.items()
    }
    files.write_json(path.with_suffix(".json"), hashes)
    return path


def is_partition_reproducible(key: str) -> bool:
    """Whether the current code makes the stored partition of this key again, bit by bit.

    Raises
    ------
    ArtifactError
        The partition comes from another version of its scheme, or a file is damaged.
    """
    path, settings = layout.get_assignment_path(key), read_partition_settings(key)
    scheme_settings = settings["partition"]
    scheme_code = _build_scheme(settings).list_hashed_code()
    if (current_code := code_digest.compute_code_digest(*scheme_code).text) != scheme_settings["code"]:
        raise ArtifactError(
            f"it comes from another version of partition scheme '{scheme_settings['scheme']}' "
            f"({scheme_settings['code']}, now {current_code})."
        )
    dataset_path = store.get_stored_dataset_path(settings["dataset"])
    samples = store.load_samples(dataset_path, files.read_recorded_sha256(dataset_path))
    stored_table = files.read_parquet(path, files.read_recorded_sha256(path))
    return compute_assignment_sha256(stored_table) == compute_assignment_sha256(
        make_assignment_table(settings, samples)
    )


def get_partition_settings_path(key: str) -> Path:
    """Get the file with the settings of a partition."""
    return layout.get_assignment_path(key).with_name("partition.yaml")


def read_partition_settings(key: str) -> dict[str, Any]:
    """Read the settings of a partition, and the path of its scheme's file. They must match the key."""
    return read_verified_settings(
        get_partition_settings_path(key),
        key,
        lambda settings: compute_json_digest({name: value for name, value in settings.items() if name != "origin"}),
    )


def list_partition_warnings(key: str, settings: dict[str, Any], assignment: Assignment) -> list[str]:
    """Warnings about clients that the scheme drops, and about clients without test samples."""
    warnings = []
    if dropped := assignment.dropped_clients:
        warnings.append(
            f"partition.minimum: {settings['partition']['minimum']} leaves out {dropped.clients} of the data set's "
            f"{dropped.all_clients} clients, with {dropped.samples} of {dropped.all_samples} samples (partition {key})."
        )
    untested = [name for name, samples in zip(assignment.names, assignment.test, strict=True) if not len(samples)]
    if untested:
        client_list = ", ".join(untested[:LISTED]) + (", …" if len(untested) > LISTED else "")
        seed = f", seed {settings['seed']}" if "seed" in settings else ""
        warnings.append(
            f"{len(untested)} of {len(assignment.test)} clients have no test sample in partition {key} (scheme "
            f"{settings['partition']['scheme']}{seed}): {client_list}."
        )
    return warnings


def collect_partition_warnings(partitions: dict[str, dict[str, Any]], texts: dict[str, str]) -> Iterator[str]:
    """Collect :func:`list_partition_warnings` for the partitions of a plan whose data are stored.

    For partitions that differ only in their seed, only the first one is checked. ``texts`` are the files of the plan.
    """
    checked_settings = set()
    for key, settings in partitions.items():
        settings_digest = compute_json_digest({name: value for name, value in settings.items() if name != "seed"})
        path = store.get_stored_dataset_path(settings["dataset"])
        if settings_digest in checked_settings or not path.is_file():
            continue
        checked_settings.add(settings_digest)
        settings_path = get_partition_settings_path(key)
        settings = read_yaml(texts[str(settings_path)], settings_path)  # includes the path of its file
        with suppress(ArtifactError):  # jobs report it
            samples = store.load_samples(path)
            table = make_assignment_table(settings, samples)
            yield from list_partition_warnings(key, settings, Assignment.from_table(table))


def _build_scheme(settings: dict[str, Any]) -> Scheme:
    run_settings = settings["partition"] | settings.get("origin", {})
    return cast(Scheme, registry.build_component_from_run_settings(component.PARTITION, run_settings))


def make_assignment_table(settings: dict[str, Any], samples: Samples | store.StoredSamples) -> pa.Table:
    """Compute the assignment of samples to clients as a table."""
    import pyarrow as pa

    dataset, labels, test = settings["dataset"], np.asarray(samples.y), np.asarray(samples.test)
    sample_indices = (
        select_sample_subset(labels, test, dataset["subset"]) if "subset" in dataset else np.arange(len(labels))
    )
    table = assign_samples(
        _build_scheme(settings),
        labels[sample_indices],
        test[sample_indices],
        settings["clients"],
        dataset.get("split", "official"),
        dataset.get("test_fraction", 0.25),
        settings.get("seed", 0),
        dataset.get("stratified", False),
        dataset.get("validation_fraction", 0),
        {name: Column(column.codes[sample_indices], column.names) for name, column in samples.columns.items()},
    )
    stored_indices = pa.array(sample_indices[table["sample"].to_numpy()])
    return table.set_column(table.column_names.index("sample"), "sample", stored_indices)
