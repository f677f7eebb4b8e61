"""Class proportions drawn from a Dirichlet distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedpipe.data.partitions.base import DirichletBase, Floats, Integers, assign_by_fractions


@dataclass(frozen=True, kw_only=True)
class Dirichlet(DirichletBase):
    r"""Each class is divided among the clients in proportions drawn from a symmetric Dirichlet distribution.

    For each class c, :math:`p_c \sim \mathrm{Dir}_N(\alpha)`, and the shuffled samples of c are cut at
    :math:`\lfloor n_c \sum_{j \le k} p_{c,j} \rfloor`. A smaller alpha gives
    more heterogeneous clients. (Because of rounding, the last client has a sample of nearly every class, as in the
    published code.)

    If a client has fewer than ``minimum`` samples, all clients are drawn again, at most 20 times. After that, random
    samples move one by one from the client that is currently the largest to the clients that are too small. So the
    rule always ends (the usual loop until all clients are large enough may not), and it moves at most N * minimum
    samples.

    Source: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019 (proportions over
    clients for each class, as here), and Hsu et al., Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification, 2019 (proportions over classes for each client). NIID-Bench and PFLlib also balance
    the sizes of clients (``dirichlet-balanced``).

    Parameters
    ----------
    alpha
        Concentration. Close to 0 each class has one client. As it grows, all clients get equal fractions.
    minimum
        Minimum number of samples per client.
    """

    @override
    def draw_owners(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        owner, sizes = np.empty(len(labels), dtype=np.int64), np.zeros(num_clients, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            owner[members] = assign_by_fractions(len(members), self.draw_fractions(sizes, len(labels), rng))
            sizes += np.bincount(owner[members], minlength=num_clients)
        return owner

    def draw_fractions(self, sizes: Integers, num_samples: int, rng: np.random.Generator) -> Floats:
        """Draw each client's fraction of the next class, shape (N,).

        Parameters
        ----------
        sizes
            Number of samples of earlier classes that each client has, shape (N,).
        num_samples
            Number of samples of all classes.
        rng
            The source of randomness.
        """
        return rng.dirichlet(np.full(len(sizes), self.alpha))
