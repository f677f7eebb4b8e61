"""Which client trains and tests on which sample."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from fedpipe.core import rng
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.data.partitions.base import Integers, SampleClientPairs, Scheme

if TYPE_CHECKING:
    import pyarrow as pa

NO_CLIENT = -1  #: the client of a sample that belongs to the global test set alone


def assign_samples(
    scheme: Scheme,
    labels: Integers,
    test: npt.NDArray[np.bool_],
    clients: int,
    split: Literal["official", "pooled"],
    test_share: float,
    seed: int,
    stratified: bool = False,
    validation_share: float = 0,
) -> pa.Table:
    """Deal all samples of a data set to clients, for training, validation or testing.

    With the ``is_official`` split the scheme deals the official training samples. The official test samples of each
    class follow in proportion to how many training samples of it each client has (largest remainder, ties at random),
    so that local test sets have their client's class proportions. Those of a class that nobody trains on belong to
    no client.

    With the ``pooled`` split the scheme deals training and test samples together, and each client keeps a random
    share of its own for testing, rounded down: a client with one sample trains on it. A validation part is kept from
    the client's training samples in the same way.

    A scheme that says itself what each sample is for (a ``file`` with a column split) is taken at its word: neither
    rule, no share and no seed has any effect.

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
    stratified
        Whether the samples that a client keeps for testing and validation have its class proportions (largest
        remainder, ties at random).
    validation_share
        Share of a client's training samples kept for validation, in [0, 1).

    Returns
    -------
    pyarrow.Table
        One row for each pair of a sample and its client, sorted by both: ``sample`` (int64, index into the data set),
        ``client`` (int32; -1: none, for test samples), ``label`` (int64), ``split`` ("train", "validation" or
        "test"). A sample has one row, unless the scheme overlaps. The global test set is all samples of "test".

    Raises
    ------
    SettingsError
        The scheme can't deal these samples, or there is no official test set.
    """
    import pyarrow as pa

    seed = seed if scheme.seed is None else scheme.seed
    is_official = split == "official" and not scheme.has_fixed_splits
    if is_official and not test.any():
        raise SettingsError(
            f"dataset.split: 'official' needs a test set, and none of the {len(test)} samples is in one; use 'pooled', "
            f"or a larger dataset.subset where there is one."
        )
    samples = np.flatnonzero(~test) if is_official else np.arange(len(labels))
    sample, client, sample_split = _partition_samples(scheme, labels, samples, clients, seed)
    if sample_split is None:
        sample_split = np.full(len(sample), "train", dtype="<U10")
        groups = labels[sample] if stratified else np.zeros_like(sample)
        if is_official:
            test_indices = np.flatnonzero(test)
            test_client = _assign_test_samples(labels[test_indices], labels[sample], client, clients, seed)
        else:
            _require_disjoint_clients(sample, "dataset.split: 'pooled'", "tests", "'official'")
            test_indices = test_client = np.empty(0, dtype=np.int64)
            sample_split[_hold_out(client, groups, clients, test_share, seed, "split")] = "test"
        if validation_share:
            _require_disjoint_clients(sample, f"dataset.validation_share: {validation_share}", "validates", "0")
        (train,) = (sample_split == "train").nonzero()
        sample_split[train[_hold_out(client[train], groups[train], clients, validation_share, seed, "validation")]] = (
            "validation"
        )
        sample, client = np.concatenate([sample, test_indices]), np.concatenate([client, test_client])
        sample_split = np.concatenate([sample_split, np.full(len(test_indices), "test")])
    order = np.lexsort((client, sample))
    return pa.table(
        {
            "sample": pa.array(sample[order], pa.int64()),
            "client": pa.array(client[order], pa.int32()),
            "label": pa.array(labels[sample[order]], pa.int64()),
            "split": pa.array(sample_split[order], pa.string()),
        }
    )


def compute_assignment_sha256(table: pa.Table) -> str:
    """SHA-256 of an assignment's canonical bytes, the same for every version of the file format.

    For each column a line with name, dtype and length is hashed, then the values, little-endian.
    """
    digest = hashlib.sha256()
    for name, dtype in (("sample", "<i8"), ("client", "<i4"), ("label", "<i8"), ("split", "S10")):
        column = np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=dtype)
        digest.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
        digest.update(column.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Assignment:
    """Who owns what: the table that :func:`assign_samples` made, by client. Sample indices are sorted."""

    train: list[Integers]  #: training samples of each client, N arrays
    validation: list[Integers]  #: validation samples of each client, N arrays, empty ones unless the study has some
    test: list[Integers]  #: local test samples of each client, N arrays, some perhaps empty
    global_test: Integers  #: all test samples, those of no client included
    class_counts: Integers  #: training samples of each client and class, shape (N, C)

    @classmethod
    def read(cls, path: Path, sha256: str | None = None) -> Assignment:
        """Read the table from its file, and check it as `fedpipe.core.storage.files.read_parquet` does."""
        return cls.from_table(files.read_parquet(path, sha256))

    @classmethod
    def from_table(cls, table: pa.Table) -> Assignment:
        """Take the table apart; the number of classes is that of all rows, of "test" too."""
        sample, client, label = (table[name].to_numpy() for name in ("sample", "client", "label"))
        sample_split = table["split"].to_numpy()
        clients = int(client.max()) + 1
        train, validation, test = (
            _group_by_client(sample[sample_split == split], client[sample_split == split], clients)
            for split in ("train", "validation", "test")
        )
        counts = np.zeros((clients, int(label.max()) + 1), dtype=np.int64)
        np.add.at(counts, (client[sample_split == "train"], label[sample_split == "train"]), 1)
        return cls(train, validation, test, np.unique(sample[sample_split == "test"]), counts)

    @property
    def sizes(self) -> Integers:
        """Number of training samples of each client, shape (N,)."""
        return np.asarray(self.class_counts.sum(axis=1), dtype=np.int64)


def _partition_samples(
    scheme: Scheme, labels: Integers, samples: Integers, clients: int, seed: int
) -> SampleClientPairs:
    """What the scheme deals, by sample and client; it may be anybody's, so what it promises is checked."""
    scheme.check(clients, len(np.unique(labels[samples])), len(samples))
    sample, client, sample_split = scheme.partition_samples(labels, samples, clients, rng.generator(seed, "partition"))
    client = np.asarray(client)
    is_valid = client.shape == sample.shape and (sample_split is not None or np.isin(client, np.arange(clients)).all())
    if not is_valid or len(np.setdiff1d(np.arange(clients), client)):
        raise SettingsError(
            f"partition.scheme: '{registry.get_component_name(component.PARTITION, type(scheme))}' did not give every "
            "sample one "
            f"of {clients} clients and every client a sample; it should."
        )
    order = np.lexsort((client, sample))
    return SampleClientPairs(
        sample[order], client[order].astype(np.int64), None if sample_split is None else sample_split[order]
    )


def _require_disjoint_clients(sample: Integers, setting: str, verb: str, alternative: str) -> None:
    if len(np.unique(sample)) < len(sample):
        raise SettingsError(
            f"{setting} can't be used with a partition in which clients share samples, since one would train on what "
            f"another {verb} on; it should be {alternative}."
        )


def _assign_test_samples(
    labels: Integers, train_labels: Integers, train_owner: Integers, clients: int, seed: int
) -> Integers:
    """The client of each test sample, in proportion to the training samples of its class."""
    generator = rng.generator(seed, "deal")
    owner = np.full(len(labels), NO_CLIENT, dtype=np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        counts = np.bincount(train_owner[train_labels == label], minlength=clients)
        ties = generator.random(clients)
        if counts.any():
            owner[members] = np.repeat(np.arange(clients), apportion_count(len(members), counts, ties))
    return owner


def _hold_out(
    client: Integers, groups: Integers, clients: int, share: float, seed: int, purpose: str
) -> npt.NDArray[np.bool_]:
    """Which samples each client keeps from training: a random share of its own, in proportion to its groups."""
    exact_fraction = Fraction(str(share))  # as written in params.yaml: 0.29 of 100 is 29, in binary it would be 28
    held_out = np.zeros(len(client), dtype=np.bool_)
    for number, members in enumerate(_group_by_client(np.arange(len(client)), client, clients)):
        generator = rng.generator(seed, purpose, client=number)
        shuffled = generator.permutation(members)
        group_labels, group = np.unique(groups[shuffled], return_inverse=True)
        counts = np.bincount(group, minlength=len(group_labels))
        quotas = apportion_count(math.floor(exact_fraction * len(members)), counts, generator.random(len(group_labels)))
        for index, quota in enumerate(quotas):
            held_out[shuffled[group == index][:quota]] = True
    return held_out


def apportion_count(count: int, weights: Integers, ties: npt.NDArray[np.float64]) -> Integers:
    """Whole numbers that sum to ``count``, in proportion to the weights: largest remainder, the least tie first."""
    quotas, remainders = np.divmod(count * weights, weights.sum())
    largest = np.lexsort((ties, -remainders))
    quotas[largest[: count - quotas.sum()]] += 1
    return np.asarray(quotas, dtype=np.int64)


def _group_by_client(samples: Integers, client: Integers, clients: int) -> list[Integers]:
    order = np.lexsort((samples, client))
    ends = np.searchsorted(client[order], np.arange(clients + 1))
    return [samples[order[start:end]] for start, end in itertools.pairwise(ends)]
