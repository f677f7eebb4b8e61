"""The scheme `flwr-datasets`: equal partitions as in the library, and errors with keys of params.yaml."""

import sys
from typing import Any

import numpy as np
import pytest

from fedpipe.core.errors import SettingsError
from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.partitions.flwr_datasets import FlwrDatasets, Partitioner
from fedpipe.planning import planner
from tests import small_studies as studies
from tests.data.repositories import write_repository

LABELS = np.random.default_rng(0).integers(0, 10, 1200)
TEST = np.arange(1200) >= 1000
DISTRIBUTION = {
    "distribution_array": np.random.default_rng(1).lognormal(0, 2, (10, 2)).tolist(),
    "num_unique_labels_per_partition": 2,
    "preassigned_num_samples_per_label": 5,
}
#: Partitioner, number of clients, and arguments of the library.
CASES: list[tuple[Partitioner, int, dict[str, Any]]] = [
    ("DirichletPartitioner", 8, {"alpha": 0.3, "min_partition_size": 5}),
    ("DirichletPartitioner", 8, {"alpha": [0.5] * 8, "self_balancing": True}),
    ("DistributionPartitioner", 10, DISTRIBUTION),
    ("ExponentialPartitioner", 4, {}),
    ("IidPartitioner", 7, {}),
    ("InnerDirichletPartitioner", 3, {"partition_sizes": [100, 300, 50], "alpha": 0.5}),
    ("LinearPartitioner", 6, {}),
    ("PathologicalPartitioner", 10, {"num_classes_per_partition": 3, "class_assignment_mode": "deterministic"}),
    ("ShardPartitioner", 10, {"num_shards_per_partition": 2}),
    ("SizePartitioner", 3, {"partition_sizes": [500, 20, 100]}),
    ("SquarePartitioner", 6, {}),
]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("partitioner", "clients", "arguments"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_flwr_datasets_partition_equals_library_partition(
    partitioner: Partitioner, clients: int, arguments: dict[str, Any]
) -> None:
    """The training samples of each client equal the partition that FederatedDataset loads with its default seeds."""
    import flwr_datasets
    import flwr_datasets.partitioner

    columns = {"label": LABELS, "row": np.arange(1200)}
    write_repository({name: np.concatenate([values[TEST], values[~TEST]]) for name, values in columns.items()}, 200)
    own_arguments = {"num_partitions": clients} if "partition_sizes" not in arguments else {}
    if partitioner[:4] in ("Diri", "Dist", "Inne", "Path", "Shar"):
        own_arguments["partition_by"] = "label"  # type: ignore[assignment]
    library_arguments = {
        name: np.array(value) if name == "distribution_array" else value for name, value in arguments.items()
    }
    rule = getattr(flwr_datasets.partitioner, partitioner)(**own_arguments, **library_arguments)
    federated = flwr_datasets.FederatedDataset(dataset="repository", partitioners={"train": rule})
    expected = [sorted(federated.load_partition(client)["row"]) for client in range(clients)]
    scheme = FlwrDatasets(partitioner=partitioner, arguments=arguments, library_seed=42)
    assignment = Assignment.from_table(assign_samples(scheme, LABELS, TEST, clients, "official", 0, seed=5))
    assert [part.tolist() for part in assignment.train] == expected
    assert sum(map(len, assignment.test)) <= 200


def test_library_seed_overrides_partition_seed() -> None:
    def draw_owners(seed: int, **parameters: Any) -> list[int]:
        scheme = FlwrDatasets(partitioner="DirichletPartitioner", arguments={"alpha": 0.5}, **parameters)
        return assign_samples(scheme, LABELS, TEST, 5, "pooled", 0.25, seed)["client"].to_pylist()  # type: ignore[no-any-return]

    assert draw_owners(0) == draw_owners(0)
    assert draw_owners(0) != draw_owners(1), "the partition depends on its seed"
    assert draw_owners(0, library_seed=42) == draw_owners(1, library_seed=42) != draw_owners(0, library_seed=43)
    assert draw_owners(0, library_seed=42) != draw_owners(0, library_seed=42, shuffle=False)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"arguments": {"alhpa": 1}}, r"partition.arguments.alhpa: .*'alpha'"),
        ({"arguments": {"num_partitions": 3}}, r"partition.arguments.num_partitions: .*federation.clients"),
        ({"arguments": {"alpha": 1, "seed": 3}}, r"partition.arguments.seed: .*partition.library_seed"),
        ({"arguments": {"partition_by": "writer"}}, r"partition.arguments.partition_by: "),
        ({}, r"partition.arguments: \{\} .*DirichletPartitioner .*alpha"),
        ({"arguments": {"alpha": -1}}, r"partition.arguments: \{'alpha': -1\} .*greater than zero"),
        ({"arguments": {"alpha": [1.0, 2.0]}}, r"partition.arguments: \{'alpha': \[1.0, 2.0\]\} "),
    ],
)
def test_flwr_datasets_rejects_invalid_arguments(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        FlwrDatasets(partitioner="DirichletPartitioner", **parameters).check(5, 10, 1000)


@pytest.mark.parametrize(
    ("partitioner", "clients", "arguments", "message"),
    [
        ("SizePartitioner", 3, {"partition_sizes": [10, 20]}, r"give 2 clients, but federation.clients is 3"),
        ("SizePartitioner", 2, {"partition_sizes": [1000, 1000]}, r"partition.arguments: \{'partition_sizes'"),
        ("ShardPartitioner", 100, {"num_shards_per_partition": 2, "shard_size": 100}, r"'shard_size': 100"),
        ("ExponentialPartitioner", 12, {}, r"ExponentialPartitioner"),
        (
            "DirichletPartitioner",
            60,
            {"alpha": 0.01, "min_partition_size": 0, "self_balancing": False},
            r"^partition.partitioner: DirichletPartitioner gives no samples to client \d+ of 60",
        ),
    ],
)
def test_flwr_datasets_rejects_arguments_that_do_not_fit_samples(
    partitioner: Partitioner, clients: int, arguments: dict[str, Any], message: str
) -> None:
    scheme = FlwrDatasets(partitioner=partitioner, arguments=arguments)
    with pytest.raises(SettingsError, match=message):
        assign_samples(scheme, LABELS, TEST, clients, "official", 0, 0)


@pytest.mark.usefixtures("in_empty_folder")
def test_flwr_datasets_plan_hashes_arguments_and_checks_library(monkeypatch: pytest.MonkeyPatch) -> None:

    def make_plan(arguments: dict[str, Any], **partition: Any) -> planner.NewPlan:
        rule = {"scheme": "flwr-datasets", "partitioner": "DirichletPartitioner", "arguments": arguments}
        return studies.prepare(studies.settings() | {"partition": rule | partition})

    keys = {make_plan({"alpha": alpha}, library_seed=seed).runs[0].key for alpha in (0.5, 0.7) for seed in (1, 2)}
    assert len(keys) == 4
    with pytest.raises(SettingsError, match=r"partition.partitioner: .*NaturalIdPartitioner"):
        make_plan({}, partitioner="NaturalIdPartitioner")
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(SettingsError, match=r"partition.scheme: 'flwr-datasets' .*pip install"):
        make_plan({"alpha": 0.5})
