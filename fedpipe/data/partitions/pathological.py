"""A fixed number of classes for each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.data.partitions.base import Integers, Scheme


@dataclass(frozen=True, kw_only=True)
class Pathological(Scheme):
    """Each client owns exactly k random classes. Each class is divided among its owners.

    Each of the C classes has :math:`N k / C` owners, rounded down or up. Each owner has at least one sample of
    the class. By default all ways to divide the class are equally likely.

    Source: the "pathological" partition of PFLlib (Zhang et al., 2023), used by FedALA and cwFedAvg. Deviation: there
    classes are assigned in order, so that with 20 clients, 10 classes and k = 2 groups of four clients own the same
    two classes (``pathological-ordered``). Here the classes of each client are random. In FL-bench's partition by
    classes, too, but each client draws its own, so that the numbers of owners differ and a class can have none.

    Parameters
    ----------
    classes_per_client
        Number of classes k of each client.
    parts
        How a class is divided among its owners: in parts of random sizes, or of equal sizes (which differ by at most
        one sample).
    """

    classes_per_client: Annotated[int, Field(ge=1)] = 2
    parts: Literal["random", "equal"] = "random"

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Require k classes for every client, an owner for every class, and a sample for every owner."""
        super().check(num_clients, num_classes, num_samples)
        k, key = self.classes_per_client, "partition.classes_per_client"
        if k > num_classes:
            raise SettingsError(
                f"{key}: {k} is more than the {num_classes} classes of the data set. Use at most {num_classes}."
            )
        if num_clients * k < num_classes:
            raise SettingsError(
                f"{key}: {k} for each of {num_clients} clients can't cover the {num_classes} classes of the data set. "
                f"Use at least {-(-num_classes // num_clients)}."
            )
        if num_clients * k > num_samples:
            raise SettingsError(
                f"{key}: {k} for each of {num_clients} clients needs {num_clients * k} samples, but there are "
                f"{num_samples}. "
                f"Use at most {num_samples // num_clients}."
            )

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        """Choose one client for each sample.

        Raises
        ------
        SettingsError
            A class has fewer samples than owners.
        """
        class_labels = np.unique(labels)
        is_owner = self._choose_owners(num_clients, len(class_labels), rng)
        result = np.empty(len(labels), dtype=np.int64)
        for column, label in enumerate(class_labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            owners = rng.permutation(np.flatnonzero(is_owner[:, column]))
            self.require_sample_per_owner(label, num_clients, len(owners), len(members))
            for owner, owner_samples in zip(owners, self._divide_among_owners(members, len(owners), rng), strict=True):
                result[owner_samples] = owner
        return result

    def _divide_among_owners(self, members: Integers, num_parts: int, rng: np.random.Generator) -> list[Integers]:
        if self.parts == "equal":
            return np.array_split(members, num_parts)
        return np.split(members, 1 + np.sort(rng.choice(len(members) - 1, num_parts - 1, replace=False)))

    def require_sample_per_owner(self, label: int, num_clients: int, owners: int, num_samples: int) -> None:
        """Require a sample for every owner of a class."""
        if num_samples < owners:
            raise SettingsError(
                f"partition.classes_per_client: {self.classes_per_client} for each of {num_clients} clients gives "
                f"class {label} to {owners} clients, but it has {num_samples} samples. Use a smaller value, or fewer "
                "federation.clients."
            )

    def _choose_owners(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """Mask of the classes of each client, shape (N, C): k per row and N k / C per column, rounded down or up.

        Each client in turn takes the classes that all remaining clients must own, and then random ones. The owners
        that the classes still need always sum to k times the remaining clients, and no class needs more owners than
        there are remaining clients. So there are always k classes to choose from.
        """
        k = self.classes_per_client
        owners, remainder = divmod(num_clients * k, num_classes)
        remaining_owners = rng.permutation(np.arange(num_classes) < remainder) + owners
        is_owner = np.zeros((num_clients, num_classes), dtype=np.bool_)
        for remaining_clients, client in zip(range(num_clients, 0, -1), rng.permutation(num_clients), strict=True):
            client_classes = np.flatnonzero(remaining_owners == remaining_clients)
            weights = np.where(remaining_owners == remaining_clients, 0, remaining_owners)
            if len(client_classes) < k:
                extra_classes = rng.choice(
                    num_classes, k - len(client_classes), replace=False, p=weights / weights.sum()
                )
                client_classes = np.concatenate([client_classes, extra_classes])
            is_owner[client, client_classes] = True
            remaining_owners = remaining_owners - is_owner[client]
        return is_owner
