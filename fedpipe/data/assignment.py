"""Assigns each sample to a client for training, validation or testing."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedpipe.core import rng
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.core.hashing import compute_arrays_sha256
from fedpipe.core.storage import files
from fedpipe.data.partitions.base import ColumnScheme, Integers, SampleClientPairs, Scheme
from fedpipe.data.samples import Column

if TYPE_CHECKING:
    import pyarrow as pa

NO_CLIENT = -1  #: client id of a sample that is only in the global test set
NAMES_METADATA = b"client_names"  #: metadata of an assignment's table with the clients' names, if they have names
DROPPED_METADATA = b"dropped_clients"  #: metadata with the `DroppedClients`, if there are any


class DroppedClients(NamedTuple):
    """Clients of the data set that have fewer samples than the scheme's minimum."""

    clients: int
    samples: int  #: their samples, without the official test set
    all_clients: int  #: clients of the data set
    all_samples: int  #: samples of all of them


def assign_samples(
    scheme: Scheme,
    labels: Integers,
    test: npt.NDArray[np.bool_],
    num_clients: int,
    split: Literal["official", "pooled"],
    test_fraction: float,
    seed: int,
    stratified: bool = False,
    validation_fraction: float = 0,
    columns: Mapping[str, Column] = MappingProxyType({}),
) -> pa.Table:
    """Assign all samples of a data set to clients, for training, validation or testing.

    With ``split="official"`` the scheme partitions the official training samples. The official test samples of each
    class are then distributed in proportion to the clients' training samples of that class (largest remainder, ties
    at random), so that a local test set has the class proportions of its client. If no client trains on a class, its
    test samples belong to no client. If the scheme reads a column of the data set, each test sample goes to a client
    with its value (in the same way, if there are several).

    With ``split="pooled"`` the scheme partitions training and test samples together. Each client then sets aside a
    random fraction of its samples for testing, rounded down, so that a client with one sample trains on it.

    In both cases each client sets aside its validation samples from its training samples in the same way.

    A scheme with fixed splits (a ``file`` with a column split) already assigns each sample to a split. Then ``split``,
    the fractions and the seed have no effect.

    Parameters
    ----------
    scheme
        The partition scheme. If it has a seed, that seed replaces ``seed``.
    labels
        Class of each sample, shape (n,), values 0 to C-1.
    test
        Whether a sample belongs to the official test set, shape (n,).
    num_clients
        Number of clients N.
    split
        The rule for local test sets, see above.
    test_fraction
        Fraction of a client's samples for testing, in (0, 1), for ``split="pooled"``.
    seed
        Seed of all draws.
    stratified
        If true, a client's test and validation samples have its class proportions (largest remainder, ties at
        random).
    validation_fraction
        Fraction of a client's training samples for validation, in [0, 1).
    columns
        Further columns of the samples by name, each with n values.

    Returns
    -------
    pyarrow.Table
        One row for each pair of a sample and its client, sorted by both: ``sample`` (int64, index into the data set),
        ``client`` (int32, -1 for a test sample of no client), ``label`` (int64), ``split`` ("train", "validation" or
        "test"). A sample has one row, except if the scheme overlaps. The global test set is all samples of "test". If
        the scheme reads a column, the metadata contains the clients' names and how many clients it drops.

    Raises
    ------
    SettingsError
        The scheme can't partition these samples, or there is no official test set.
    """
    import pyarrow as pa

    seed = seed if scheme.seed is None else scheme.seed
    is_official = split == "official" and not scheme.has_fixed_splits
    if is_official and not test.any():
        raise SettingsError(
            f"dataset.split: 'official' needs a test set, but the {len(test)} samples contain no test sample. Use "
            "'pooled', or a larger dataset.subset if the data set has a test set."
        )
    samples = _select_partitioned_samples(test, "official" if is_official else "pooled")
    column = scheme.find_column(columns) if isinstance(scheme, ColumnScheme) else None
    (sample, client, sample_split), client_values = _partition_samples(
        scheme, column, labels, samples, num_clients, seed
    )
    if sample_split is None:
        sample_split = np.full(len(sample), "train", dtype="<U10")
        groups = labels[sample] if stratified else np.zeros_like(sample)
        if is_official:
            test_indices = np.flatnonzero(test)
            if column is None:
                test_client = _assign_test_samples(
                    labels[test_indices], labels[sample], client, num_clients, rng.make_generator(seed, "deal")
                )
            else:
                test_client = _assign_test_samples_by_value(
                    labels[test_indices], column.codes[test_indices], labels[sample], client, client_values, seed
                )
        else:
            _require_disjoint_clients(sample, "dataset.split: 'pooled'", "tests", "'official'")
            test_indices = test_client = np.empty(0, dtype=np.int64)
            sample_split[_draw_evaluation_sample_mask(client, groups, num_clients, test_fraction, seed, "split")] = (
                "test"
            )
        if validation_fraction:
            _require_disjoint_clients(sample, f"dataset.validation_fraction: {validation_fraction}", "validates", "0")
        (train,) = (sample_split == "train").nonzero()
        is_validation = _draw_evaluation_sample_mask(
            client[train], groups[train], num_clients, validation_fraction, seed, "validation"
        )
        sample_split[train[is_validation]] = "validation"
        sample, client = np.concatenate([sample, test_indices]), np.concatenate([client, test_client])
        sample_split = np.concatenate([sample_split, np.full(len(test_indices), "test")])
    order = np.lexsort((client, sample))
    metadata: dict[bytes, str] = {}
    if isinstance(scheme, ColumnScheme) and column is not None:
        metadata[NAMES_METADATA] = json.dumps(
            make_unique_client_names([column.names[value] for value in client_values])
        )
        if dropped_clients := _count_dropped_clients(scheme, column.codes[samples], client_values):
            metadata[DROPPED_METADATA] = json.dumps(dropped_clients._asdict())
    return pa.table(
        {
            "sample": pa.array(sample[order], pa.int64()),
            "client": pa.array(client[order], pa.int32()),
            "label": pa.array(labels[sample[order]], pa.int64()),
            "split": pa.array(sample_split[order], pa.string()),
        },
        metadata=metadata or None,
    )


def list_client_column_values(
    scheme: ColumnScheme,
    labels: Integers,
    test: npt.NDArray[np.bool_],
    num_clients: int,
    split: str,
    seed: int,
    columns: Mapping[str, Column],
) -> list[str]:
    """List the value of each client in the scheme's column, in the order of the clients' numbers.

    Parameters and errors are those of :func:`assign_samples`.
    """
    column = scheme.find_column(columns)
    samples = _select_partitioned_samples(test, split)
    seed = seed if scheme.seed is None else scheme.seed
    _, client_values = _partition_samples(scheme, column, labels, samples, num_clients, seed)
    return [column.names[value] for value in client_values]


def count_samples_by_value(
    scheme: ColumnScheme, test: npt.NDArray[np.bool_], split: str, columns: Mapping[str, Column]
) -> dict[str, int]:
    """Count the samples to partition for each value in the scheme's column.

    The parameters are arguments of :func:`assign_samples`.
    """
    column = scheme.find_column(columns)
    sizes = np.bincount(column.codes[_select_partitioned_samples(test, split)], minlength=len(column.names))
    return dict(zip(column.names, sizes.tolist(), strict=True))


def compute_assignment_sha256(table: pa.Table) -> str:
    """SHA-256 of an assignment's columns in canonical dtypes, independent of the file format's version."""
    dtypes = {"sample": "<i8", "client": "<i4", "label": "<i8", "split": "S10"}
    return compute_arrays_sha256({name: np.asarray(table[name], dtype=dtype) for name, dtype in dtypes.items()})


@dataclass(frozen=True)
class Assignment:
    """The table of :func:`assign_samples`, grouped by client. Sample indices are sorted."""

    train: list[Integers]  #: training samples of each client, N arrays
    validation: list[Integers]  #: validation samples of each client, N arrays, empty if the study has no validation
    test: list[Integers]  #: local test samples of each client, N arrays, which may be empty
    global_test: Integers  #: all test samples, including those of no client
    class_counts: Integers  #: training samples of each client and class, shape (N, C)
    names: tuple[str, ...]  #: names of the N clients: values of the scheme's column, or numbers from 0
    dropped_clients: DroppedClients | None = None  #: None without any

    @classmethod
    def read(cls, path: Path, sha256: str | None = None) -> Assignment:
        """Read the table from its file and check it (`fedpipe.core.storage.files.read_parquet`)."""
        return cls.from_table(files.read_parquet(path, sha256))

    @classmethod
    def from_table(cls, table: pa.Table) -> Assignment:
        """Group the table by client. The number of classes is counted over all splits, including "test"."""
        sample, client, label = (table[name].to_numpy() for name in ("sample", "client", "label"))
        sample_split = table["split"].to_numpy()
        clients = int(client.max()) + 1
        train, validation, test = (
            _group_by_client(sample[sample_split == split], client[sample_split == split], clients)
            for split in ("train", "validation", "test")
        )
        counts = np.zeros((clients, int(label.max()) + 1), dtype=np.int64)
        np.add.at(counts, (client[sample_split == "train"], label[sample_split == "train"]), 1)
        metadata = table.schema.metadata or {}
        names = tuple(json.loads(metadata[NAMES_METADATA]) if NAMES_METADATA in metadata else map(str, range(clients)))
        dropped = metadata.get(DROPPED_METADATA)
        dropped_clients = None if dropped is None else DroppedClients(**json.loads(dropped))
        return cls(train, validation, test, np.unique(sample[sample_split == "test"]), counts, names, dropped_clients)


def _partition_samples(
    scheme: Scheme, column: Column | None, labels: Integers, samples: Integers, num_clients: int, seed: int
) -> tuple[SampleClientPairs, Integers]:
    """Pairs of the scheme, sorted by sample and client, and the number of each client's value, shape (N,).

    The pairs are checked, because the scheme may be custom.
    """
    scheme.check(num_clients, len(np.unique(labels[samples])), len(samples))
    name = registry.get_component_name(component.PARTITION, type(scheme))
    sample, client, sample_split, client_values = _call_scheme(scheme, column, labels, samples, num_clients, seed)
    is_valid = client.shape == sample.shape and (
        sample_split is not None or np.isin(client, np.arange(num_clients)).all()
    )
    if not is_valid or len(np.setdiff1d(np.arange(num_clients), client)):
        raise SettingsError(
            f"partition.scheme: '{name}' returned an invalid assignment. Give every sample one of the {num_clients} "
            "clients, and every client at least one sample."
        )
    if "." in name:  # a user's
        second_result = _call_scheme(scheme, column, labels, samples, num_clients, seed)
        if not all(map(np.array_equal, (sample, client, sample_split, client_values), second_result)):
            raise SettingsError(
                f"partition.scheme: '{name}' returned different assignments in two calls with the same arguments. Draw "
                "all random numbers from `rng`."
            )
    order = np.lexsort((client, sample))
    pairs = SampleClientPairs(
        sample[order], client[order].astype(np.int64), None if sample_split is None else sample_split[order]
    )
    return pairs, client_values


def _call_scheme(
    scheme: Scheme, column: Column | None, labels: Integers, samples: Integers, num_clients: int, seed: int
) -> tuple[Integers, Integers, Any, Integers]:
    """Sample, client and split of the scheme's pairs, and the number of each client's value."""
    generator = rng.make_generator(seed, "partition")
    if isinstance(scheme, ColumnScheme) and column is not None:
        client, client_values = scheme.assign_values(column.codes[samples], labels[samples], num_clients, generator)
        has_client = np.asarray(client) != NO_CLIENT
        return samples[has_client], client[has_client], None, client_values
    sample, client, sample_split = scheme.partition_samples(labels, samples, num_clients, generator)
    return sample, np.asarray(client), sample_split, np.empty(0, dtype=np.int64)


def _select_partitioned_samples(test: npt.NDArray[np.bool_], split: str) -> Integers:
    """Select the samples that a scheme partitions: those outside the official test set, or all of them."""
    return np.flatnonzero(~test) if split == "official" else np.arange(len(test))


def _count_dropped_clients(scheme: ColumnScheme, values: Integers, client_values: Integers) -> DroppedClients | None:
    """Count the values of samples that have too few samples to be clients. None if there are none."""
    sizes = np.bincount(values)
    is_dropped = (sizes > 0) & (sizes < getattr(scheme, "minimum", 1)) & ~np.isin(np.arange(len(sizes)), client_values)
    if not is_dropped.any():
        return None
    return DroppedClients(int(is_dropped.sum()), int(sizes[is_dropped].sum()), int((sizes > 0).sum()), len(values))


def make_unique_client_names(values: Sequence[str]) -> list[str]:
    """Names of the clients: their values, with a number from 1 if several clients have the same value."""
    count, seen = Counter(values), Counter[str]()
    names = []
    for value in values:
        seen[value] += 1
        names.append(value if count[value] == 1 else f"{value} {seen[value]}")
    return names


def _require_disjoint_clients(sample: Integers, setting: str, verb: str, alternative: str) -> None:
    if len(np.unique(sample)) < len(sample):
        raise SettingsError(
            f"{setting} can't be used with a partition in which clients share samples, because a client could train on "
            f"samples that another client {verb} on. Use {alternative}."
        )


def _assign_test_samples(
    labels: Integers, train_labels: Integers, train_owner: Integers, num_clients: int, generator: np.random.Generator
) -> Integers:
    """Client of each test sample, in proportion to the clients' training samples of its class."""
    owner = np.full(len(labels), NO_CLIENT, dtype=np.int64)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        counts = np.bincount(train_owner[train_labels == label], minlength=num_clients)
        ties = generator.random(num_clients)
        if counts.any():
            owner[members] = np.repeat(np.arange(num_clients), apportion_count(len(members), counts, ties))
    return owner


def _assign_test_samples_by_value(
    labels: Integers,
    values: Integers,
    train_labels: Integers,
    train_owner: Integers,
    client_values: Integers,
    seed: int,
) -> Integers:
    """Client of each test sample, by its value. If several clients have it, in proportion to their classes."""
    clients_per_value = np.bincount(client_values, minlength=values.max(initial=0) + 1)
    client_of_value = np.full(len(clients_per_value), NO_CLIENT, dtype=np.int64)
    client_of_value[client_values] = np.arange(len(client_values))
    owner = client_of_value[values]
    for value in np.flatnonzero(clients_per_value > 1):
        (clients,) = (client_values == value).nonzero()
        is_own = np.isin(train_owner, clients)
        (members,) = (values == value).nonzero()
        index = _assign_test_samples(
            labels[members],
            train_labels[is_own],
            np.searchsorted(clients, train_owner[is_own]),
            len(clients),
            rng.make_generator(seed, "deal", client=int(value)),
        )
        owner[members] = np.where(index == NO_CLIENT, NO_CLIENT, clients[index])
    return owner


def _draw_evaluation_sample_mask(
    client: Integers, groups: Integers, num_clients: int, fraction: float, seed: int, purpose: str
) -> npt.NDArray[np.bool_]:
    """Mask of the samples that each client sets aside: a random fraction, in proportion to its groups."""
    exact_fraction = Fraction(str(fraction))  # exact: 0.29 of 100 is 29, but 28 with binary floats
    is_evaluation_sample = np.zeros(len(client), dtype=np.bool_)
    for number, members in enumerate(_group_by_client(np.arange(len(client)), client, num_clients)):
        generator = rng.make_generator(seed, purpose, client=number)
        shuffled = generator.permutation(members)
        group_labels, group = np.unique(groups[shuffled], return_inverse=True)
        counts = np.bincount(group, minlength=len(group_labels))
        quotas = apportion_count(math.floor(exact_fraction * len(members)), counts, generator.random(len(group_labels)))
        for index, quota in enumerate(quotas):
            is_evaluation_sample[shuffled[group == index][:quota]] = True
    return is_evaluation_sample


def select_sample_subset(labels: Integers, test: npt.NDArray[np.bool_], count: int) -> Integers:
    """Select samples in proportion to classes and splits, and sort them. All seeds get the same samples."""
    random = rng.make_generator(0, "subset")
    kinds, kind, sizes = np.unique(2 * labels + test, return_inverse=True, return_counts=True)
    quotas = apportion_count(count, sizes, random.random(len(kinds)))
    shuffled = random.permutation(len(labels))
    return np.sort(np.concatenate([shuffled[kind[shuffled] == i][:quota] for i, quota in enumerate(quotas)]))


def apportion_count(count: int, weights: Integers, ties: npt.NDArray[np.float64]) -> Integers:
    """Integers that sum to ``count``, in proportion to the weights (largest remainder, smallest tie value first)."""
    quotas, remainders = np.divmod(count * weights, weights.sum())
    largest = np.lexsort((ties, -remainders))
    quotas[largest[: count - quotas.sum()]] += 1
    return np.asarray(quotas, dtype=np.int64)


def _group_by_client(samples: Integers, client: Integers, num_clients: int) -> list[Integers]:
    order = np.lexsort((samples, client))
    ends = np.searchsorted(client[order], np.arange(num_clients + 1))
    return [samples[order[start:end]] for start, end in itertools.pairwise(ends)]
