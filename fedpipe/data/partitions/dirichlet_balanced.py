"""Class proportions drawn from a Dirichlet distribution, with balanced client sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.data.partitions.base import Floats, Integers
from fedpipe.data.partitions.dirichlet import Dirichlet


@dataclass(frozen=True, kw_only=True)
class DirichletBalanced(Dirichlet):
    """Like dirichlet, but a client with n/N samples or more gets none of later classes (PFLlib, NIID-Bench, MOON).

    The classes are divided in order. For each class, the proportions of clients that already have n/N samples are set
    to 0, and the others are scaled to sum to 1. So a client gets at most n/N samples and one more class. The same
    alpha gives other data than with ``dirichlet``. (If rounding leaves a sample of a class, the last client gets it,
    as in these systems.)

    These systems draw again until all clients have ``minimum`` samples, which may never end if alpha is small and
    there are many clients. Here that is done at most 20 times, and then samples move as in ``dirichlet``. If a draw
    gives a class only to clients that are full (there: a division of 0 by 0), the proportions of the other clients
    are drawn among themselves, which is the same distribution.

    Source: the "dir" partition of PFLlib (Zhang et al., 2023), used by cwFedAvg, whose minimum is 40 (a batch of 10
    over the test fraction of 0.25) unless that is more than half of n/N. With minimum 10 it is the partition of
    NIID-Bench (Li et al., ICDE 2022) and MOON (Li et al., CVPR 2021). The draws have the same order as there.

    Parameters
    ----------
    alpha
        Concentration. Close to 0 each class has one client. As it grows, all clients get equal fractions.
    minimum
        Minimum number of samples per client.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    minimum: Annotated[int, Field(ge=1)] = 40

    @override
    def draw_fractions(self, sizes: Integers, num_samples: int, rng: np.random.Generator) -> Floats:
        is_below_average = sizes < num_samples / len(sizes)
        fractions = super().draw_fractions(sizes, num_samples, rng) * is_below_average
        if not fractions.any():
            fractions[is_below_average] = rng.dirichlet(np.full(is_below_average.sum(), self.alpha))
        return np.asarray(fractions / fractions.sum(), dtype=np.float64)
