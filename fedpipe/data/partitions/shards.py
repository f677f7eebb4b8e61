"""Shards of samples sorted by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.data.partitions.base import Integers, Scheme


@dataclass(frozen=True, kw_only=True)
class Shards(Scheme):
    """Samples are sorted by class and cut into equal shards. Each client receives a few shards at random.

    A shard can contain samples of two or more classes, so the number of classes per client is only close to
    ``shards_per_client``. Shard sizes differ by at most one. The order within a class is random (the paper does not
    specify it).

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    section 3 (MNIST: 200 shards of 300 samples, two for each of 100 clients).

    Parameters
    ----------
    shards_per_client
        Number of shards that each client receives.
    """

    shards_per_client: Annotated[int, Field(ge=1)] = 2

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Require a sample for every shard."""
        super().check(num_clients, num_classes, num_samples)
        if num_clients * self.shards_per_client > num_samples:
            raise SettingsError(
                f"partition.shards_per_client: {self.shards_per_client} for each of {num_clients} clients needs "
                f"{num_clients * self.shards_per_client} samples, but there are {num_samples}. "
                f"Use at most {num_samples // num_clients}."
            )

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        shuffled = rng.permutation(len(labels))
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        owners = rng.permutation(np.repeat(np.arange(num_clients), self.shards_per_client))
        result = np.empty(len(labels), dtype=np.int64)
        for owner, shard in zip(owners, np.array_split(ordered, len(owners)), strict=True):
            result[shard] = owner
        return result
