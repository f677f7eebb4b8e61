"""A fixed number of classes for each client, assigned in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.data.partitions.base import Integers
from fedpipe.data.partitions.pathological import Pathological


@dataclass(frozen=True, kw_only=True)
class PathologicalOrdered(Pathological):
    r"""Each client owns k classes, assigned in order, so that neighbors own the same ones (PFLlib's rule).

    Class by class, the first :math:`m = \lceil N k / C \rceil` clients that own fewer than k classes share the class.
    With :math:`n_c` samples, all of them but the last get a random number from
    :math:`\lfloor n_c / 10 m \rfloor` to :math:`\lfloor n_c / m \rfloor - 1`, at least 1, and the last gets the rest,
    at least an equal fraction. Samples are taken in stored order. With 20 clients, 10 classes and k = 2, groups of
    four clients own the same two classes. The groups are even if k divides C and C / k divides N. Otherwise the last
    clients can own fewer than k classes.

    Source: the "pat" partition of PFLlib (Zhang et al., 2023), used by cwFedAvg. Deviations: settings that
    leave the last class without a client (there: a division by 0) are rejected, and an owner has at least one sample
    (there: at least 1/C of the smaller of 40 and n / 2N, which is more only for small data sets and large k).

    Parameters
    ----------
    classes_per_client
        Number of classes k of each client.
    parts
        How a class is divided among its owners: in parts of random sizes as above, or of equal sizes (which differ by
        at most one sample).
    """

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Require that no class is left when all clients own k."""
        super().check(num_clients, num_classes, num_samples)
        unowned_classes = [
            label for label, owners in enumerate(self._list_class_owners(num_clients, num_classes)) if not len(owners)
        ]
        if unowned_classes:
            raise SettingsError(
                f"partition.classes_per_client: {self.classes_per_client} for each of {num_clients} clients leaves "
                "class "
                f"{unowned_classes[0]} without a client. Use a value whose product with federation.clients is a "
                f"multiple of the {num_classes} classes, or the scheme 'pathological'."
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
        result = np.empty(len(labels), dtype=np.int64)
        for label, owners in zip(class_labels, self._list_class_owners(num_clients, len(class_labels)), strict=True):
            members = np.flatnonzero(labels == label)
            self.require_sample_per_owner(label, num_clients, len(owners), len(members))
            for owner, owner_samples in zip(owners, self._divide_among_owners(members, len(owners), rng), strict=True):
                result[owner_samples] = owner
        return result

    @override
    def _divide_among_owners(self, members: Integers, num_parts: int, rng: np.random.Generator) -> list[Integers]:
        if self.parts == "equal":
            return super()._divide_among_owners(members, num_parts, rng)
        min_count, equal_count = max(1, len(members) // (10 * num_parts)), len(members) // num_parts
        return np.split(members, rng.integers(min_count, max(equal_count, min_count + 1), num_parts - 1).cumsum())

    def _list_class_owners(self, num_clients: int, num_classes: int) -> list[Integers]:
        """Owners of each class."""
        class_counts, max_owners = (
            np.zeros(num_clients, dtype=np.int64),
            -(-num_clients * self.classes_per_client // num_classes),
        )
        owners = []
        for _ in range(num_classes):
            owners.append(np.flatnonzero(class_counts < self.classes_per_client)[:max_owners])
            class_counts[owners[-1]] += 1
        return owners
