"""Class proportions drawn from a Dirichlet distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedpipe.data.partitions.base import DirichletBase, Floats, Integers, assign_by_fractions


@dataclass(frozen=True, kw_only=True)
class Dirichlet(DirichletBase):
    r"""Each class is dealt to the clients in proportions drawn from a symmetric Dirichlet distribution.

    For each class c, :math:`p_c \sim \mathrm{Dir}_N(\alpha)`, and the shuffled samples of c are cut at
    :math:`\lfloor n_c \sum_{j \le k} p_{c,j} \rfloor`. The smaller alpha, the fewer clients share a class.
    (Rounding down leaves the last client a sample of nearly every class, in the published code too.)

    If a client has fewer than ``minimum`` samples, everything is drawn again, at most 20 times; then random samples
    of the client that is largest at that moment move, one by one, to those that lack them. So it always ends (the
    usual loop until all clients are large enough does not), and at most N * minimum samples stray from the draw.

    Source: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
    2019, and Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019 (proportions
    over clients for each class, as here). Nothing balances the sizes of clients, unlike in NIID-Bench and PFLlib
    (``dirichlet-balanced``).

    Parameters
    ----------
    alpha
        Concentration; towards 0 each class goes to one client, towards infinity all clients have the same share.
    minimum
        Samples that every client has at least.
    """

    def draw_owners(self, labels: Integers, clients: int, rng: np.random.Generator) -> Integers:
        """See :class:`~fedpipe.data.partitions.base.DirichletBase`."""
        owner, sizes = np.empty(len(labels), dtype=np.int64), np.zeros(clients, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            owner[members] = assign_by_fractions(len(members), self.draw_fractions(sizes, len(labels), rng))
            sizes += np.bincount(owner[members], minlength=clients)
        return owner

    def draw_fractions(self, sizes: Integers, samples: int, rng: np.random.Generator) -> Floats:
        """Each client's share of the next class, shape (N,).

        Parameters
        ----------
        sizes
            Samples that each client has of the classes before, shape (N,).
        samples
            Number of samples of all classes.
        rng
            The source of randomness.
        """
        return rng.dirichlet(np.full(len(sizes), self.alpha))
