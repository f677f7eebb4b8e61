"""Clients of unequal size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.data.partitions.base import DirichletBase, Integers, assign_by_fractions


@dataclass(frozen=True, kw_only=True)
class Quantity(DirichletBase):
    r"""Client sizes are drawn from a symmetric Dirichlet distribution, independently of the classes.

    With :math:`p \sim \mathrm{Dir}_N(\alpha)` the shuffled samples are cut at
    :math:`\lfloor n \sum_{j \le k} p_j \rfloor`. The minimum works as in ``dirichlet``.

    Source: the "iid-diff-quantity" partition of NIID-Bench (Li et al., Federated Learning on Non-IID Data Silos: An
    Experimental Study, ICDE 2022), whose minimum is 10.

    Parameters
    ----------
    alpha
        Concentration. Close to 0 one client has nearly all samples. As it grows, all clients get the same number.
    minimum
        Minimum number of samples per client.
    """

    minimum: Annotated[int, Field(ge=1)] = 10

    @override
    def draw_owners(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        owner = np.empty(len(labels), dtype=np.int64)
        owner[rng.permutation(len(labels))] = assign_by_fractions(
            len(labels), rng.dirichlet(np.full(num_clients, self.alpha))
        )
        return owner
