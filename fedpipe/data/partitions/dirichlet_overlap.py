"""Overlapping clients, as in FedDUAL's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.data.partitions.base import Integers, SampleClientPairs, Scheme


@dataclass(frozen=True, kw_only=True)
class DirichletOverlap(Scheme):
    r"""Each client draws samples of each class independently, so that clients overlap (FedDUAL's code).

    For each class c, :math:`p_c \sim \mathrm{Dir}_N(\alpha)`, and client k draws
    :math:`\max(1, \lfloor p_{c,k} n_c \rfloor)` samples of c without replacement, independently of the others. So
    clients share samples, some samples have no client, and every client owns every class. This is less heterogeneous
    than ``dirichlet`` with the same alpha. It needs ``dataset.split: official`` and no
    ``dataset.validation_fraction``, because otherwise a client could train on test samples of another.

    Source: the official code of FedDUAL, ``Data Prepration.py`` (alpha 0.01, 100 clients, seed 42).

    Parameters
    ----------
    alpha
        Concentration of the proportions.
    """

    has_overlap: ClassVar[bool] = True

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Accept any number of clients."""
        if not num_samples:
            raise SettingsError("dataset.name: the data set has no samples to partition. Use a data set with samples.")

    @override
    def partition_samples(
        self, labels: Integers, samples: Integers, num_clients: int, rng: np.random.Generator
    ) -> SampleClientPairs:
        members = [samples[labels[samples] == label] for label in np.unique(labels[samples])]
        fractions = rng.dirichlet(np.full(num_clients, self.alpha), len(members))
        draws = [
            (rng.choice(class_samples, count, replace=False), client)
            for class_samples, class_fractions in zip(members, fractions, strict=True)
            for client, count in enumerate(np.maximum(1, (class_fractions * len(class_samples)).astype(np.int64)))
        ]
        return SampleClientPairs(
            np.concatenate([sample for sample, _ in draws]),
            np.repeat([client for _, client in draws], [len(sample) for sample, _ in draws]),
        )
