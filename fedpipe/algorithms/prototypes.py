"""Prototypes: mean features of each class, to which clients pull their features."""

from __future__ import annotations

from torch import Tensor

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, State
from fedpipe.models.base import FunctionalNetwork


def compute_prototype_loss(net: FunctionalNetwork, client: State, batch: Batch, penalty: float) -> Tensor:
    """The risk, and the mean squared distance of features from the prototypes of their classes times a penalty.

    The client has the parts ``prototypes``, shape (C, d), and ``known``, 1 for classes that have a prototype.
    """
    z = net.features(client["model"], batch.x)
    distance = (z - client["prototypes"][batch.y]).square().mean(-1)
    risk = cross_entropy(net.classify(client["model"], z), batch)
    return risk + penalty * batch.mean(client["known"][batch.y] * distance)


def store_prototypes(client: State, sums: dict[str, Tensor]) -> State:
    """The client with its prototypes as ``own``, with rows of zeros for classes without samples."""
    return client | {"own": sums["sums"] / client["counts"].clamp(min=1).unsqueeze(-1)}
