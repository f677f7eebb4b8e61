"""Class proportions drawn from a Dirichlet distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedpipe.data.partitions.base import Integers, Scheme
from fedpipe.errors import SettingsError

REDRAWS = 20  # with a small alpha and many clients no number of redraws would do


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Scheme):
    r"""Each class is dealt to the clients in proportions drawn from a symmetric Dirichlet distribution.

    For each class c, :math:`p_c \sim \mathrm{Dir}_N(\alpha)`, and the shuffled samples of c are cut at
    :math:`\lfloor n_c \sum_{j \le k} p_{c,j} \rfloor`. The smaller alpha, the fewer clients share a class.

    If a client has fewer than ``minimum`` samples, everything is drawn again, at most 20 times; then random samples
    of the client that is largest at that moment move, one by one, to those that lack them. So it always ends (the
    usual loop until all clients are large enough does not), and at most N * minimum samples stray from the draw.

    Source: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
    2019, and Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019 (proportions
    over clients for each class, as here). Nothing balances the sizes of clients, unlike in NIID-Bench and PFLlib.

    Parameters
    ----------
    alpha
        Concentration; towards 0 each class goes to one client, towards infinity all clients have the same share.
    minimum
        Samples that every client has at least.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    minimum: Annotated[int, Field(ge=1)] = 1

    def check(self, clients: int, classes: int, samples: int) -> None:
        """There have to be enough samples for everybody's minimum."""
        super().check(clients, classes, samples)
        if clients * self.minimum > samples:
            raise SettingsError(
                f"partition.minimum: {self.minimum} for each of {clients} clients is more than the {samples} samples; "
                f"it should be at most {samples // clients}, or federation.clients at most {samples // self.minimum}."
            )

    def assign(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """See :class:`~fedpipe.data.partitions.base.Scheme`."""
        for _ in range(1 + REDRAWS):
            owner = self._draw(labels, clients, rng)
            if np.bincount(owner, minlength=clients).min() >= self.minimum:
                return owner
        return self._repair(owner, clients, rng)

    def _draw(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        owner = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, self.alpha))
            cuts = (len(members) * np.cumsum(shares)[:-1]).astype(np.int64)
            owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        return owner

    def _repair(self, owner: Integers, clients: int, rng: np.random.Generator) -> Integers:
        owner, sizes = owner.copy(), np.bincount(owner, minlength=clients)
        shuffled = rng.permutation(len(owner))
        grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
        members = np.split(grouped, np.cumsum(sizes)[:-1])  # of each client, in random order
        for poor in np.flatnonzero(sizes < self.minimum):
            for _ in range(self.minimum - sizes[poor]):
                rich = sizes.argmax()
                sizes[rich] -= 1
                sizes[poor] += 1
                owner[members[rich][sizes[rich]]] = poor  # a client that gives has never received
        return owner
