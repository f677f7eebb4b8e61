"""Domains of the data set, each divided among several clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from typing_extensions import override

from fedpipe.core.errors import SettingsError
from fedpipe.data.partitions.base import ColumnScheme, Integers
from fedpipe.data.partitions.dirichlet import Dirichlet


@dataclass(frozen=True, kw_only=True)
class ByDomain(ColumnScheme):
    """Each domain, such as a camera or a style, has the same number of clients, which share its samples by Dirichlet.

    The domain is a column of the data set: an array of the .npz file, a column of the table, or a level of the folder.
    With as many clients as domains, each client owns a domain. Otherwise the samples of each domain are divided among
    its clients as in ``dirichlet``. The name of a client is its domain and a number, such as ``sketch 2``.

    If ``dataset.split`` is official, the test samples of a domain are distributed to its clients in their class
    proportions.

    Source: FedBN (Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021)
    for one client per domain.

    Parameters
    ----------
    column
        Column of the data set. By default its only one.
    alpha
        Concentration of the Dirichlet distribution within a domain. Close to 0 each class of a domain has one client.
    minimum
        Minimum number of samples per client.
    """

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    minimum: Annotated[int, Field(ge=1)] = 1

    @override
    def assign_values(
        self, values: Integers, labels: Integers, num_clients: int, rng: np.random.Generator
    ) -> tuple[Integers, Integers]:
        domains, sizes = np.unique(values, return_counts=True)
        clients_per_domain, remainder = divmod(num_clients, len(domains))
        if remainder or not clients_per_domain:
            multiples = sorted({max(clients_per_domain, 1) * len(domains), (clients_per_domain + 1) * len(domains)})
            raise SettingsError(
                f"federation.clients: {num_clients} can't be divided by the {len(domains)} domains of the data set. "
                f"Use {' or '.join(map(str, multiples))}."
            )
        if sizes.min() < clients_per_domain * self.minimum:
            raise SettingsError(
                f"partition.minimum: {self.minimum} for each of {clients_per_domain} clients is more than the "
                f"{sizes.min()} samples of the smallest domain. Use fewer clients or a smaller minimum."
            )
        rule = Dirichlet(alpha=self.alpha, minimum=self.minimum)
        client = np.empty(len(values), dtype=np.int64)
        for index, domain in enumerate(domains):
            (members,) = (values == domain).nonzero()
            client[members] = index * clients_per_domain + rule.assign(labels[members], clients_per_domain, rng)
        return client, np.repeat(domains, clients_per_domain)
