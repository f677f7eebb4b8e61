"""Which client trains and tests on which sample."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from fedpipe import artifacts, registry, streams
from fedpipe.data.partitions.base import Integers, Scheme
from fedpipe.errors import SettingsError

if TYPE_CHECKING:
    import pyarrow as pa

NOBODY = -1  #: the client of a sample that belongs to the global test set alone


def assign(
    scheme: Scheme,
    labels: Integers,
    test: npt.NDArray[np.bool_],
    clients: int,
    split: Literal["official", "pooled"],
    test_share: float,
    seed: int,
) -> pa.Table:
    """Deal all samples of a data set to clients, for training or testing.

    With the ``official`` split the scheme deals the official training samples. The official test samples of each
    class follow in proportion to how many training samples of it each client has (largest remainder, ties at random),
    so that local test sets have their client's class proportions. Those of a class that nobody trains on belong to
    no client.

    With the ``pooled`` split the scheme deals training and test samples together, and each client keeps a random
    share of its own for testing, rounded down: a client with one sample trains on it.

    Parameters
    ----------
    scheme
        How to deal; its seed, if it has one, stands in for ``seed``.
    labels
        Class of each sample, shape (n,), values 0 to C-1.
    test
        Whether a sample belongs to the official test set, shape (n,).
    clients
        Number of clients N.
    split
        Which rule makes the local test sets.
    test_share
        Share of a client's samples kept for testing, in (0, 1); for the pooled split.
    seed
        What all draws depend on.

    Returns
    -------
    pyarrow.Table
        One row for each sample of the data set, sorted by ``sample``: ``sample`` (int64, index into the data set),
        ``client`` (int32, -1: none), ``label`` (int64), ``split`` ("train" or "test"). The global test set is all rows
        of "test".

    Raises
    ------
    SettingsError
        The scheme can't deal these samples, or there is no official test set.
    """
    import pyarrow as pa

    seed = seed if scheme.seed is None else scheme.seed
    if split == "official" and not test.any():
        raise SettingsError("dataset.split: 'official' needs a test set, and the data set has none; use 'pooled'.")
    if split == "official":
        for_test = test.astype(np.bool_)
        owner = np.full(len(labels), NOBODY, dtype=np.int64)
        owner[~for_test] = _deal(scheme, labels[~for_test], clients, seed)
        owner[for_test] = _follow(labels[for_test], labels[~for_test], owner[~for_test], clients, seed)
    else:
        owner = _deal(scheme, labels, clients, seed)
        for_test = _hold_out(owner, clients, test_share, seed)
    return pa.table(
        {
            "sample": pa.array(np.arange(len(labels)), pa.int64()),
            "client": pa.array(owner, pa.int32()),
            "label": pa.array(labels, pa.int64()),
            "split": pa.array(np.where(for_test, "test", "train"), pa.string()),
        }
    )


@dataclass(frozen=True)
class Assignment:
    """Who owns what: the table that :func:`assign` made, by client. Sample indices are sorted."""

    train: list[Integers]  #: training samples of each client, N arrays
    test: list[Integers]  #: local test samples of each client, N arrays, some perhaps empty
    global_test: Integers  #: all test samples, those of no client included
    class_counts: Integers  #: training samples of each client and class, shape (N, C)

    @classmethod
    def read(cls, path: Path, sha256: str | None = None) -> Assignment:
        """Read the table from its file, and check it as `fedpipe.artifacts.read_parquet` does."""
        return cls.of(artifacts.read_parquet(path, sha256))

    @classmethod
    def of(cls, table: pa.Table) -> Assignment:
        """Take the table apart; the number of classes is that of all rows, of "test" too."""
        sample, client, label = (table[name].to_numpy() for name in ("sample", "client", "label"))
        for_test = table["split"].to_numpy() == "test"
        clients = int(client.max()) + 1
        counts = np.zeros((clients, int(label.max()) + 1), dtype=np.int64)
        np.add.at(counts, (client[~for_test], label[~for_test]), 1)
        return cls(
            train=_by_client(sample[~for_test], client[~for_test], clients),
            test=_by_client(sample[for_test], client[for_test], clients),
            global_test=np.sort(sample[for_test]),
            class_counts=counts,
        )

    @property
    def sizes(self) -> Integers:
        """Number of training samples of each client, shape (N,)."""
        return np.asarray(self.class_counts.sum(axis=1), dtype=np.int64)


def _deal(scheme: Scheme, labels: Integers, clients: int, seed: int) -> Integers:
    """The client of each sample by the scheme, which may be anybody's: what it promises is checked."""
    scheme.check(clients, len(np.unique(labels)), len(labels))
    owner = np.asarray(scheme.assign(labels, clients, streams.generator(seed, "partition")))
    dealt = owner.shape == labels.shape and np.isin(owner, np.arange(clients)).all()
    if not dealt or len(np.unique(owner)) < clients:
        raise SettingsError(
            f"partition.scheme: '{registry.name_of(registry.PARTITION, type(scheme))}' did not give every sample one "
            f"of {clients} clients and every client a sample; it should."
        )
    return owner.astype(np.int64)


def _follow(labels: Integers, train_labels: Integers, train_owner: Integers, clients: int, seed: int) -> Integers:
    """The client of each test sample, in proportion to the training samples of its class."""
    rng = streams.generator(seed, "deal")
    owner = np.full(len(labels), NOBODY, dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        counts = np.bincount(train_owner[train_labels == label], minlength=clients)
        ties = rng.random(clients)
        if counts.any():
            quota, remainder = np.divmod(len(members) * counts, counts.sum())
            largest = np.lexsort((ties, -remainder))
            quota[largest[: len(members) - quota.sum()]] += 1
            owner[members] = np.repeat(np.arange(clients), quota)
    return owner


def _hold_out(owner: Integers, clients: int, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which samples are for testing, a random share of each client's."""
    exact = Fraction(str(share))  # as written in params.yaml: 0.29 of 100 is 29, in binary it would be 28
    held_out = np.zeros(len(owner), dtype=np.bool_)
    for client, members in enumerate(_by_client(np.arange(len(owner)), owner, clients)):
        count = math.floor(exact * len(members))
        held_out[streams.generator(seed, "split", client=client).permutation(members)[:count]] = True
    return held_out


def _by_client(samples: Integers, client: Integers, clients: int) -> list[Integers]:
    order = np.lexsort((samples, client))
    ends = np.searchsorted(client[order], np.arange(clients + 1))
    return [samples[order[start:end]] for start, end in itertools.pairwise(ends)]
