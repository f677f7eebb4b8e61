"""Class proportions drawn from a Dirichlet distribution, as in FedDW's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.data.partitions.base import Integers, Scheme, assign_by_fractions


@dataclass(frozen=True, kw_only=True)
class DirichletFedDW(Scheme):
    r"""Like dirichlet, but without a minimum and in stored order. An empty client gets one sample (FedDW's code).

    For each class c, :math:`p_c \sim \mathrm{Dir}_N(\alpha)`, and the samples of c, in the order in which the data set
    stores them, are cut at :math:`\lfloor n_c \sum_{j \le k} p_{c,j} \rfloor`.

    Source: the official code of FedDW, ``dirichlet_split_noniid`` and the start of ``main.py``. Deviation: there, each
    empty client trains on sample 0, which its owner keeps. Here a sample moves to the empty client, so that each
    sample has one client: sample 0 moves to the first empty client, and each further empty client gets the first
    sample whose owner has another one.

    Parameters
    ----------
    alpha
        Concentration (the paper's beta). 0.5 is its "practical" and 0.1 its "pathological" environment.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5

    @override
    def assign(self, labels: Integers, num_clients: int, rng: np.random.Generator) -> Integers:
        owner = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            owner[members] = assign_by_fractions(len(members), rng.dirichlet(np.full(num_clients, self.alpha)))
        sizes = np.bincount(owner, minlength=num_clients)
        for empty in np.flatnonzero(sizes == 0):
            sample = (sizes[owner] > 1).argmax()
            sizes[owner[sample]] -= 1
            sizes[empty] += 1
            owner[sample] = empty
        return owner
