"""The partition stage: from a stored data set to who owns which sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import yaml

from fedpipe import artifacts, config, plan, registry, streams
from fedpipe.data import heterogeneity, store
from fedpipe.data.assignment import Assignment, apportion, assign
from fedpipe.data.partitions.base import Integers, Scheme
from fedpipe.errors import ArtifactError

if TYPE_CHECKING:
    import pyarrow as pa


def partition(key: str) -> Path:
    """Deal the samples as ``partition.yaml`` says; writes the assignment and what it tells of heterogeneity."""
    path = artifacts.assignment_file(key)
    place = path.with_name("partition.yaml")
    if not place.is_file():
        raise ArtifactError(f"{place} is missing; '{key}' should be a partition of results/plan.json.")
    settings: dict[str, Any] = yaml.safe_load(place.read_text())
    samples = store.load(store.place(settings["dataset"]))
    table = _assigned(settings, samples.y.numpy(), samples.test.numpy())
    counts = Assignment.of(table).class_counts
    tables = {artifacts.heterogeneity_file(key): heterogeneity.summary(counts), path: table}
    hashes = {each.name: artifacts.write_parquet(each, content) for each, content in tables.items()}
    artifacts.write_json(path.with_suffix(".json"), hashes)
    return path


def preview(params: Path) -> Iterator[tuple[str, dict[str, Any], Integers]]:
    """Key, settings and training samples by client and class, shape (N, C), of a study's partitions; writes nothing.

    The data set need not be stored: if it is not, it is read from where `fedpipe download` takes it.
    """
    section = config.parse(config.read(params)).dataset
    for key, settings in plan.make(params)["partitions"].items():
        path = store.place(settings["dataset"])
        if path.is_file() or path != section.file:
            samples = store.load(path)
            table = _assigned(settings, samples.y.numpy(), samples.test.numpy())
        else:
            loaded = section.source.load(section.fetcher)
            table = _assigned(settings, loaded.y, loaded.test)
        yield key, settings, Assignment.of(table).class_counts


def _assigned(settings: dict[str, Any], labels: Integers, test: npt.NDArray[np.bool_]) -> pa.Table:
    import pyarrow as pa

    dataset = settings["dataset"]
    chosen = subset(labels, test, dataset["subset"]) if "subset" in dataset else np.arange(len(labels))
    table = assign(
        cast(Scheme, plan.built(registry.PARTITION, "scheme", settings["partition"])),
        labels[chosen],
        test[chosen],
        settings["clients"],
        dataset["split"],
        dataset.get("test_share", 0.25),
        settings["seed"],
        dataset.get("stratified", False),
        dataset["validation_share"],
    )
    samples = pa.array(chosen[table["sample"].to_numpy()])
    return table.set_column(table.column_names.index("sample"), "sample", samples)


def subset(labels: Integers, test: npt.NDArray[np.bool_], count: int) -> Integers:
    """So many samples, sorted: of each class and part as many as its share, a function of the data set alone."""
    random = streams.generator(0, "subset")
    kinds, kind, sizes = np.unique(2 * labels + test, return_inverse=True, return_counts=True)
    quotas = apportion(count, sizes, random.random(len(kinds)))
    shuffled = random.permutation(len(labels))
    return np.sort(np.concatenate([shuffled[kind[shuffled] == i][:quota] for i, quota in enumerate(quotas)]))
