"""What a partition scheme is, and what several of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedpipe.core.components.component import Component
from fedpipe.core.errors import SettingsError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

REDRAWS = 20  # with a small alpha and many clients no number of redraws would do


class SampleClientPairs(NamedTuple):
    """Who owns what: a row for each pair of a sample and a client that owns it, in any order."""

    sample: Integers  #: index into the data set, shape (m,)
    client: Integers  #: 0 to N-1, shape (m,)
    split: npt.NDArray[np.str_] | None = None  #: "train", "validation" or "test", where the scheme itself decides that


@dataclass(frozen=True, kw_only=True)
class Scheme(Component):
    """A rule that deals samples to clients.

    Most schemes are partitions, and define :meth:`assign`. One that can give a sample to several clients, or to none,
    defines :meth:`deal` instead.

    Parameters
    ----------
    seed
        Fixes the partition for all seeds of a study; without it each seed deals anew.
    """

    has_overlap: ClassVar[bool] = False  #: whether samples have several clients, which the pooled split can't do with
    is_index_based: ClassVar[bool] = False  #: whether it names samples of the data set as it is stored, whole

    seed: int | None = None

    @property
    def has_validation(self) -> bool:
        """Whether it says by itself which samples are for validation."""
        return False

    @property
    def has_fixed_splits(self) -> bool:
        """Whether it says itself what each sample is for, so that nothing is split, and nothing is drawn."""
        return False

    def check(self, clients: int, classes: int, samples: int) -> None:
        """Refuse what can't be done, before any job starts; schemes add their own conditions to this one.

        Raises
        ------
        SettingsError
            One sentence that begins with the key of params.yaml.
        """
        if clients > samples:
            raise SettingsError(
                f"federation.clients: {clients} is more than the {samples} samples to deal; "
                f"it should be at most {samples}."
            )

    def partition_samples(
        self, labels: Integers, samples: Integers, clients: int, rng: np.random.Generator
    ) -> SampleClientPairs:
        """Who owns which of the samples.

        Parameters
        ----------
        labels
            Class of each sample of the data set, shape (n,), values 0 to C-1.
        samples
            The samples to deal, ascending, shape (m,).
        clients
            Number of clients N.
        rng
            The only source of randomness.

        Returns
        -------
        Pairs
            Every client owns at least one sample.
        """
        return SampleClientPairs(samples, self.assign(labels[samples], clients, rng))

    def assign(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """The client of each sample.

        Parameters
        ----------
        labels
            Class of each sample that is dealt, shape (m,), values 0 to C-1.
        clients
            Number of clients N.
        rng
            The only source of randomness.

        Returns
        -------
        Integers
            Shape (m,), values 0 to N-1; every client owns at least one sample.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DirichletBase(Scheme):
    """A rule that draws shares from a symmetric Dirichlet distribution, which may leave a client with too few samples.

    If a client has fewer than ``minimum`` samples, everything is drawn again, at most 20 times; then random samples
    of the client that is largest at that moment move, one by one, to those that lack them. So it always ends (the
    usual loop until all clients are large enough does not), and at most N * minimum samples stray from the draw.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    minimum: Annotated[int, Field(ge=1)] = 1

    def check(self, clients: int, classes: int, samples: int) -> None:
        """There have to be enough samples for everybody's minimum."""
        super().check(clients, classes, samples)
        if clients * self.minimum > samples:
            max_clients = samples // self.minimum
            alternative = f", or federation.clients at most {max_clients}" if max_clients else ""
            raise SettingsError(
                f"partition.minimum: {self.minimum} for each of {clients} clients is more than the {samples} samples; "
                f"it should be at most {samples // clients}{alternative}."
            )

    def assign(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """See :class:`Scheme`."""
        for _ in range(1 + REDRAWS):
            owner = self.draw_owners(labels, clients, rng)
            if np.bincount(owner, minlength=clients).min() >= self.minimum:
                return owner
        return top_up_clients(owner, clients, self.minimum, rng)

    def draw_owners(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """The client of each sample by one draw, shape (m,); a client may own less than the minimum, or nothing."""
        raise NotImplementedError


def top_up_clients(owner: Integers, clients: int, minimum: int, rng: np.random.Generator) -> Integers:
    """Move random samples of whoever is largest, one by one, to clients that have fewer than ``minimum``."""
    owner, sizes = owner.copy(), np.bincount(owner, minlength=clients)
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    members = np.split(grouped, np.cumsum(sizes)[:-1])  # of each client, in random order
    for poor in np.flatnonzero(sizes < minimum):
        for _ in range(minimum - sizes[poor]):
            rich = sizes.argmax()
            sizes[rich] -= 1
            sizes[poor] += 1
            owner[members[rich][sizes[rich]]] = poor  # a client that gives has never received
    return owner


def assign_by_fractions(count: int, fractions: Floats) -> Integers:
    r"""The client of each of ``count`` samples in a row, cut at :math:`\lfloor n \sum_{j \le k} p_j \rfloor`."""
    boundaries = (np.cumsum(fractions)[:-1] * count).astype(np.int64)
    return np.searchsorted(boundaries, np.arange(count), side="right")
