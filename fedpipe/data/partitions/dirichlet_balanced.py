"""Class proportions drawn from a Dirichlet distribution, for clients that have not got their fair share yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fedpipe.data.partitions.base import Floats, Integers
from fedpipe.data.partitions.dirichlet import Dirichlet


@dataclass(frozen=True, kw_only=True)
class DirichletBalanced(Dirichlet):
    """As dirichlet, but a client that holds n/N samples or more gets none of later classes (PFLlib, NIID-Bench, MOON).

    The classes are dealt in order. Of each class's proportions over the clients, those of the clients that already
    hold n/N samples are set to 0, and the others are scaled to sum to 1. So no client gets much more than n/N samples
    and one class: the same alpha is another data set than with ``dirichlet``. (The last client takes the sample of a
    class that rounding can leave over, there too.)

    The systems draw everything again until all clients have ``minimum`` samples, without end where alpha is small and
    clients are many. Here that is done at most 20 times; then samples move as in ``dirichlet``. Where all of a draw
    falls on clients that are full (there: a division of 0 by 0), the others' proportions are drawn among themselves,
    which is the same distribution.

    Source: the "dir" partition of PFLlib (Zhang et al., 2023), used by cwFedAvg, whose minimum is 40 (a batch of 10
    over the test share of 0.25) unless that is more than half of n/N; with minimum 10 that of NIID-Bench (Li et al.,
    ICDE 2022) and MOON (Li et al., CVPR 2021). The draws are theirs in their order.

    Parameters
    ----------
    alpha
        Concentration; towards 0 each class goes to one client, towards infinity all clients have the same share.
    minimum
        Samples that every client has at least.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    minimum: Annotated[int, Field(ge=1)] = 40

    def draw_fractions(self, sizes: Integers, samples: int, rng: np.random.Generator) -> Floats:
        """See :class:`~fedpipe.data.partitions.dirichlet.Dirichlet`."""
        is_below_average = sizes < samples / len(sizes)
        fractions = super().draw_fractions(sizes, samples, rng) * is_below_average
        if not fractions.any():
            fractions[is_below_average] = rng.dirichlet(np.full(is_below_average.sum(), self.alpha))
        return np.asarray(fractions / fractions.sum(), dtype=np.float64)
