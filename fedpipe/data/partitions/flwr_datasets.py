"""Partitioners of Flower's library flwr-datasets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.core.errors import SettingsError, format_error, suggest_name
from fedpipe.core.optional_libraries import import_optional_library
from fedpipe.data.partitions.base import Integers, SampleClientPairs, Scheme

#: Partitioners that need only labels and sizes. The scheme ``natural`` replaces those that read another column.
Partitioner = Literal[
    "DirichletPartitioner",
    "DistributionPartitioner",
    "ExponentialPartitioner",
    "IidPartitioner",
    "InnerDirichletPartitioner",
    "LinearPartitioner",
    "PathologicalPartitioner",
    "ShardPartitioner",
    "SizePartitioner",
    "SquarePartitioner",
]
LABEL, SAMPLE = "label", "sample"  #: columns of the table that the library partitions
#: Arguments that other keys of params.yaml set, with the advice for them.
OWN_ARGUMENTS = {
    "num_partitions": "Set federation.clients instead.",
    "partition_by": "Remove it, because classes are used.",
    "seed": "Set partition.library_seed instead.",
}


@dataclass(frozen=True, kw_only=True)
class FlwrDatasets(Scheme):
    """A partitioner of Flower's library flwr-datasets, which gives the same clients as that library.

    Install the library with ``pip install 'fedpipe[flwr-datasets]'``. For example, with 100 clients,
    ``{scheme: flwr-datasets, partitioner: DirichletPartitioner, arguments: {alpha: 0.3}, library_seed: 42}`` has the
    clients of ``DirichletPartitioner(num_partitions=100, partition_by="label", alpha=0.3)`` in a ``FederatedDataset``,
    whose seeds are 42 by default.

    The library partitions the samples in stored order: the training samples, if ``dataset.split`` is official, and
    otherwise all. It partitions only these. Test samples are distributed as in the other schemes. Samples that the
    partitioner assigns to no client are unused.

    Source: https://flower.ai/docs/datasets, the package ``flwr_datasets.partitioner``.

    Parameters
    ----------
    partitioner
        Class of the library. Instead of NaturalIdPartitioner, use the scheme ``natural``.
    arguments
        Arguments of the class except num_partitions, partition_by and seed. Lists such as partition_sizes have an entry
        for each client.
    shuffle
        Whether the samples are shuffled first, as FederatedDataset does by default.
    library_seed
        Seed of the library, for FederatedDataset and the partitioner. By default a number that is drawn with the seed
        of the partition.
    """

    partitioner: Partitioner
    arguments: dict[str, Any] = field(default_factory=dict)
    shuffle: bool = True
    library_seed: Annotated[int, Field(ge=0)] | None = None

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Require the library, and arguments that its class accepts."""
        super().check(num_clients, num_classes, num_samples)
        self._make_partitioner(num_clients, 0)

    @override
    def partition_samples(
        self, labels: Integers, samples: Integers, num_clients: int, rng: np.random.Generator
    ) -> SampleClientPairs:
        seed = int(rng.integers(2**32)) if self.library_seed is None else self.library_seed
        partitioner = self._make_partitioner(num_clients, seed)
        import datasets  # after the error for a missing library

        table = datasets.Dataset.from_dict({LABEL: labels[samples], SAMPLE: samples})
        try:
            partitioner.dataset = table.shuffle(seed=seed) if self.shuffle else table
            parts = [
                np.asarray(partitioner.load_partition(client).with_format("numpy")[:][SAMPLE], dtype=np.int64)
                for client in range(partitioner.num_partitions)
            ]
        except Exception as error:  # any error of the library
            raise self._make_error(error) from error
        if len(parts) != num_clients:
            raise SettingsError(
                f"partition.arguments: {self.arguments} give {len(parts)} clients, but federation.clients is "
                f"{num_clients}. Use the same number."
            )
        if empty_clients := [client for client, part in enumerate(parts) if not len(part)]:
            raise SettingsError(
                f"partition.partitioner: {self.partitioner} gives no samples to client {empty_clients[0]} of "
                f"{num_clients}. Use other arguments, another seed, or fewer clients."
            )
        return SampleClientPairs(
            np.concatenate(parts), np.repeat(np.arange(num_clients), [len(part) for part in parts])
        )

    def _make_partitioner(self, num_clients: int, seed: int) -> Any:
        """Make the library's object.

        Raises
        ------
        SettingsError
            The library is not installed, or rejects the arguments.
        """
        library = import_optional_library("flwr_datasets", "partition.scheme", "flwr-datasets")
        partitioner_class = getattr(library.partitioner, self.partitioner)
        names = [*inspect.signature(partitioner_class).parameters]
        allowed_names = [name for name in names if name not in OWN_ARGUMENTS]
        for name in self.arguments:
            if name not in allowed_names:
                advice = OWN_ARGUMENTS.get(name) or suggest_name(name, allowed_names)
                raise SettingsError(f"partition.arguments.{name}: {self.partitioner} can't have it here. {advice}")
        arguments = {name: value for name, value in self.arguments.items() if value is not None}
        if "distribution_array" in arguments:
            arguments["distribution_array"] = np.asarray(arguments["distribution_array"], dtype=np.float64)
        values = {"num_partitions": num_clients, "partition_by": LABEL, "seed": seed} | arguments
        try:
            return partitioner_class(**{name: value for name, value in values.items() if name in names})
        except Exception as error:  # a missing argument, or any error of the library
            raise self._make_error(error) from error

    def _make_error(self, error: Exception) -> SettingsError:
        return SettingsError(
            f"partition.arguments: {self.arguments} can't be used with {self.partitioner} ({format_error(error)}). Use "
            "other arguments."
        )
