"""Adds the samples of a concept drift (`federation.drift`) to the federated data.

They are further rows after those of the data set. So the global test set and the rounds before the drift have the same
rows as without drift, and a sample of two clients drifts only for one of them.
"""

from __future__ import annotations

import numpy as np
import torch

from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.settings.federation import Federation


def add_drift(clients: FederatedData, federation: Federation) -> FederatedData:
    """Add the rows of the clients that drift, and their use from the round of the drift on.

    Without drift, the clients stay as they are.
    """
    drift = federation.drift
    if drift is None:
        return clients
    ids = drift.draw_clients(clients.seed, len(clients))
    parts = [clients.train, clients.test, clients.validation]
    rows = torch.as_tensor(np.concatenate([part[client] for client in ids for part in parts]), device=clients.device)
    x, y = clients.x[rows], clients.y[rows]
    if drift.angle is None:
        y = torch.tensor(drift.draw_label_map(clients.seed, clients.classes), device=clients.device)[y]
    else:
        x = torch.rot90(x, drift.angle // 90, dims=(-2, -1))
    new_parts, first = [list(part) for part in parts], len(clients.y)
    for client in ids:
        for part in new_parts:
            part[client] = np.arange(first, first := first + len(part[client]))
    x, y = torch.cat([clients.x, x]), torch.cat([clients.y, y])
    earlier_clients, later_clients = (clients.replace_samples(x, y, *split) for split in (parts, new_parts))
    earlier_clients.drift = drift.round, later_clients
    return earlier_clients
