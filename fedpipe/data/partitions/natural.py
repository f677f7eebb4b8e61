"""Clients that the data set names, such as writers, users or hospitals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.data.partitions.base import ColumnScheme, Integers


@dataclass(frozen=True, kw_only=True)
class Natural(ColumnScheme):
    """Each client is a value of a column of the data set, such as a writer, and owns the samples with this value.

    The column is an array of the .npz file, a column of the table, or a level of the folder. Its values can be texts
    or numbers. They are the clients' names in tables and previews. Clients are numbered in the order of the values:
    numbers by size, texts alphabetically, and class names of Hugging Face in the order of the classes. Without
    ``federation.clients``, all of them are clients.

    If ``federation.clients`` is less than the number of values, the seed decides which values become clients. The other
    samples are unused. If ``dataset.split`` is official, a client's test samples are those of the test set with its
    value, and the global test set is complete. If it is pooled, each client sets aside a fraction of its samples.

    Source: the partition by user of LEAF (Caldas et al., LEAF: A Benchmark for Federated Settings, 2018).

    Parameters
    ----------
    column
        Column of the data set. By default its only one.
    minimum
        Minimum number of samples of a client (of training samples, if ``dataset.split`` is official). Clients with
        fewer samples are dropped.
    """

    minimum: Annotated[int, Field(ge=1)] = 1

    @override
    def assign_values(
        self, values: Integers, labels: Integers, num_clients: int, rng: np.random.Generator
    ) -> tuple[Integers, Integers]:
        sizes = np.bincount(values)
        (eligible,) = (sizes >= self.minimum).nonzero()
        if num_clients > len(eligible):
            dropped = np.count_nonzero(sizes) - len(eligible)
            raise SettingsError(
                f"federation.clients: {num_clients} is more than the {len(eligible)} clients of the data set"
                + (f" ({dropped} have fewer than partition.minimum: {self.minimum} samples)" if dropped else "")
                + f". Use at most {len(eligible)}."
            )
        chosen = eligible if num_clients == len(eligible) else np.sort(rng.permutation(eligible)[:num_clients])
        client_of_value = np.full(len(sizes), -1, dtype=np.int64)
        client_of_value[chosen] = np.arange(num_clients)
        return client_of_value[values], chosen
