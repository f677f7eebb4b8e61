"""Base classes of partition schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from fedpipe.core.components.component import Component
from fedpipe.core.errors import SettingsError, find_nearest_name
from fedpipe.data.samples import Column

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

REDRAWS = 20  # with a small alpha and many clients redrawing may never succeed


class SampleClientPairs(NamedTuple):
    """Pairs of a sample and a client that owns it, in any order."""

    sample: Integers  #: index into the data set, shape (m,)
    client: Integers  #: 0 to N-1, shape (m,)
    split: npt.NDArray[np.str_] | None = None  #: "train", "validation" or "test", if the scheme decides it


@dataclass(frozen=True, kw_only=True)
class Scheme(Component):
    """A rule that assigns samples to clients.

    Most schemes give each sample one client. They define :meth:`assign`. A scheme that can give a sample to several
    clients, or to none, defines :meth:`partition_samples` instead.

    Parameters
    ----------
    seed
        Seed of the partition, the same for all seeds of a study. Without it each seed of the study draws a partition.
    """

    has_overlap: ClassVar[bool] = False  #: samples may have several clients (needs split: official)
    is_index_based: ClassVar[bool] = False  #: refers to samples by their index in the stored data set

    seed: int | None = None

    @property
    def has_validation(self) -> bool:
        """Whether the scheme itself assigns samples to validation."""
        return False

    @property
    def has_fixed_splits(self) -> bool:
        """Whether the scheme itself assigns each sample to training, validation or test."""
        return False

    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Reject impossible settings before any job starts. Schemes add conditions to this one.

        Raises
        ------
        SettingsError
            The message begins with the key of params.yaml.
        """
        if num_clients > num_samples:
            raise SettingsError(
                f"federation.clients: {num_clients} is more than the {num_samples} samples to partition. Use at most "
                f"{num_samples}."
            )

    def partition_samples(
        self, labels: Integers, samples: Integers, num_clients: int, rng: np.random.Generator
    ) -> SampleClientPairs:
        """Assign samples to clients.

        Parameters
        ----------
        labels
            Class of each sample of the data set, shape (n,), values 0 to C-1.
        samples
            The samples to assign, ascending, shape (m,).
        num_clients
            Number of clients N.
        rng
            The only source of randomness.

        Returns
        -------
        SampleClientPairs
            Every client owns at least one sample.
        """
        return SampleClientPairs(samples, self.assign(labels[samples], num_clients, rng))

    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        """Choose one client for each sample.

        Parameters
        ----------
        labels
            Class of each sample to assign, shape (m,), values 0 to C-1.
        num_clients
            Number of clients N.
        rng
            The only source of randomness.

        Returns
        -------
        Integers
            Shape (m,), values 0 to N-1. Every client owns at least one sample.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ColumnScheme(Scheme):
    """A rule that reads a column of the data set, such as the writer of each sample.

    Each client has samples with one value of the column, and its name is this value. Schemes define
    :meth:`assign_values`.

    Parameters
    ----------
    column
        Column of the data set. By default its only one.
    """

    column: str | None = None

    @override
    def get_hashed_parameters(self) -> dict[str, Any]:
        return {
            name: value for name, value in super().get_hashed_parameters().items() if (name, value) != ("column", None)
        }

    def find_column(
        self, columns: Mapping[str, Column], omitted_columns: Mapping[str, str] = MappingProxyType({})
    ) -> Column:
        """Find the scheme's column among those of the data set.

        Parameters
        ----------
        columns
            Columns of the data set by name.
        omitted_columns
            Reasons why other arrays of the user's file are not columns, by name.

        Raises
        ------
        SettingsError
            There is no such column, or a sample has no value in it.
        """
        omitted_name = self.column or ("" if columns else next(iter(omitted_columns), ""))
        if reason := omitted_columns.get(omitted_name):
            raise SettingsError(
                f"partition.column: '{omitted_name}' is not in the stored data set, because {reason}, and run `fedpipe "
                "download`."
            )
        if not columns:
            requested_column = f"'{self.column}' is" if self.column else "missing, because it is"
            raise SettingsError(
                f"partition.column: {requested_column} not in the stored data set, which has only inputs and labels. "
                "Add an array with one value per sample to your .npz file (texts with dtype=str), a column to your "
                "Parquet table, dataset.levels for a folder, or dataset.client for huggingface, and run `fedpipe "
                "download`."
            )
        if self.column is None and len(columns) > 1:
            raise SettingsError(
                f"partition.column: missing, but the data set has several columns. Use one of: {', '.join(columns)}."
            )
        name = next(iter(columns)) if self.column is None else self.column
        if name not in columns:
            nearest_name = find_nearest_name(name, list(columns))
            advice = (
                f"Did you mean '{nearest_name}'?"
                if nearest_name
                else "Use one of these. Inputs and labels can't be used."
            )
            raise SettingsError(
                f"partition.column: '{name}' is not a column of the data set, which has {', '.join(columns)}. {advice}"
            )
        codes = columns[name].codes
        if (codes < 0).any():
            raise SettingsError(
                f"partition.column: '{name}' has no value for {(codes < 0).sum()} of {len(codes)} samples, first for "
                f"sample {(codes < 0).argmax()}. Give each sample a value."
            )
        return columns[name]

    def assign_values(
        self, values: Integers, labels: Integers, num_clients: int, rng: np.random.Generator
    ) -> tuple[Integers, Integers]:
        """Choose the clients of the samples and the value of each client.

        Parameters
        ----------
        values
            Number of each sample's value in the column, shape (m,), at least 0.
        labels
            Class of each sample, shape (m,), values 0 to C-1.
        num_clients
            Number of clients N.
        rng
            The only source of randomness.

        Returns
        -------
        tuple
            The client of each sample, shape (m,), or -1 if it has none, and the number of each client's value, shape
            (N,). Every client owns at least one sample.

        Raises
        ------
        SettingsError
            The column has too few values for the clients.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DirichletBase(Scheme):
    """A rule that draws fractions from a symmetric Dirichlet distribution and gives each client a minimum.

    If a client has fewer than ``minimum`` samples, all clients are drawn again, at most 20 times. After that, random
    samples move one by one from the client that is currently the largest to the clients that are too small. So the
    rule always ends (the usual loop until all clients are large enough may not), and it moves at most N * minimum
    samples.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    minimum: Annotated[int, Field(ge=1)] = 1

    @override
    def check(self, num_clients: int, num_classes: int, num_samples: int) -> None:
        """Require enough samples for the minimum of every client."""
        super().check(num_clients, num_classes, num_samples)
        if num_clients * self.minimum > num_samples:
            max_clients = num_samples // self.minimum
            alternative = f", or federation.clients at most {max_clients}" if max_clients else ""
            raise SettingsError(
                f"partition.minimum: {self.minimum} for each of {num_clients} clients needs "
                f"{num_clients * self.minimum} samples, but there are {num_samples}. Use at most "
                f"{num_samples // num_clients}{alternative}."
            )

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        for _ in range(1 + REDRAWS):
            owner = self.draw_owners(labels, num_clients, rng)
            if np.bincount(owner, minlength=num_clients).min() >= self.minimum:
                return owner
        return top_up_clients(owner, num_clients, self.minimum, rng)

    def draw_owners(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        """Draw the client of each sample once, shape (m,). A client may own less than the minimum."""
        raise NotImplementedError


def top_up_clients(owner: Integers, num_clients: int, minimum: int, rng: np.random.Generator) -> Integers:
    """Move random samples one by one from the largest client to clients with fewer than ``minimum``."""
    owner, sizes = owner.copy(), np.bincount(owner, minlength=num_clients)
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    members = np.split(grouped, np.cumsum(sizes)[:-1])  # of each client, in random order
    for poor in np.flatnonzero(sizes < minimum):
        for _ in range(minimum - sizes[poor]):
            rich = sizes.argmax()
            sizes[rich] -= 1
            sizes[poor] += 1
            owner[members[rich][sizes[rich]]] = poor  # a client that gives samples has never received any
    return owner


def assign_by_fractions(count: int, fractions: Floats) -> Integers:
    r"""Client of each of ``count`` consecutive samples, cut at :math:`\lfloor n \sum_{j \le k} p_j \rfloor`."""
    boundaries = (np.cumsum(fractions)[:-1] * count).astype(np.int64)
    return np.searchsorted(boundaries, np.arange(count), side="right")
