"""FedProto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, cross_entropy, one_hot
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Measure, Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedProto(Algorithm):
    r"""Clients keep their models and exchange only class prototypes, towards which features are regularized.

    Source: Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Alg. 1. With
    :math:`f` the extractor (of width d) and :math:`\bar C_j` the global prototype of class j,

    .. math::
        \min_\theta F_k(\theta) + \frac{\lambda}{d} \; mean_x \lVert f(x) - \bar C_{y(x)} \rVert^2, \qquad
        \bar C_j \leftarrow mean_{k \in S: n_{kj} > 0} \; C_{kj}, \quad C_{kj} = mean_{x: y(x) = j} f(x) .

    A client measures its prototypes with the trained model in evaluation mode (paper; the authors' code averages
    features while it trains). A class that has no global prototype yet pulls nothing; one that nobody in the round
    owns keeps its own (the authors' code drops it). The paper's weights normalize twice; here a class's prototypes
    count alike, as in the authors' code, or by samples, as in FedDW's; here f is what enters the output layer.

    FedDW's code differs, and no setting here gives its FedProto: f is what enters the mapping layers; prototypes are
    means over all uploads since round 1, not those of the round; a class that nobody has uploaded yet has, from round 2
    on, a prototype of zeros, to which its samples are pulled; it measures prototypes on images that are changed at
    random; its lambda is 1 whatever the settings say.

    State: the model at the client, prototypes at the server. Traffic: C x d and C flags of classes that have a
    prototype down; C x d and C counts up; there is no global model. The paper classifies by the nearest global
    prototype (protocols ``prototype-on-...``), FedDW's study by the client's own head, in each client's model as it
    was last trained (``kept-on-global``, which here is ``personal-on-global``).
    Values of lambda used: 1 (MNIST), 0.1 (CIFAR-10), 1 (FedDW's code), 0.1 (FedNH's).

    Parameters
    ----------
    penalty
        Strength lambda of the pull.
    prototype_weights
        Weight of a client's prototype of a class: the same for all that own it, or its samples of the class.
    """

    has_prototype_logits: ClassVar[bool] = True

    penalty: Annotated[float, Field(ge=0)] = 1.0
    prototype_weights: Literal["uniform", "count"] = "uniform"

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """No class has a prototype."""
        head = fresh(0)["head.weight"]
        return {"prototypes": torch.zeros_like(head), "known": head.new_zeros(len(head))}

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """The initial model."""
        return {"model": fresh(0)}

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The prototypes, and which there are."""
        return {"prototypes": server["prototypes"], "known": server["known"]}, {}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The client's own model, and the global prototypes."""
        zeros = torch.zeros_like(received["prototypes"])
        return {"model": kept["model"], **received, "own": zeros, "counts": info.classes}

    def local_passes(self) -> Sequence[Pass]:
        """Training, then the client's own prototypes."""
        return (Train(self.loss), Measure(self.sum_features, self.store_prototypes))

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the pull."""
        z = self.net.features(client["model"], batch.x)
        distance = (z - client["prototypes"][batch.y]).square().mean(-1)
        risk = cross_entropy(self.net.classify(client["model"], z), batch)
        return risk + self.penalty * batch.mean(client["known"][batch.y] * distance)

    def sum_features(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums of the features by class."""
        z = self.net.features(client["model"], batch.x)
        return {"sums": sum_by_class(z, batch, len(client["counts"]))}

    def store_prototypes(self, client: State, sums: dict[str, Tensor]) -> State:
        """The client's prototypes, with rows of zeros for classes it does not own."""
        return client | {"own": sums["sums"] / client["counts"].clamp(min=1).unsqueeze(-1)}

    def upload(self, client: State) -> State:
        """The client's prototypes and its class counts."""
        return {"prototypes": client["own"], "counts": client["counts"]}

    def keep(self, client: State) -> State:
        """The model."""
        return {"model": client["model"]}

    def prototype_logits(self, client: State, x: Tensor) -> Tensor:
        """Minus the distance of the features from each class's global prototype, shape (B, C)."""
        z, compute_mode = self.net.features(client["model"], x), "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(z, client["prototypes"], compute_mode=compute_mode)
        return torch.where(client["known"] > 0, -distance, -torch.inf)

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean prototype of each class over those who own it."""
        sums, total = torch.zeros_like(server["prototypes"]), torch.zeros_like(server["known"])
        for _, _, upload in uploads:
            counts = upload["counts"]
            weights = counts if self.prototype_weights == "count" else (counts > 0).to(counts.dtype)
            sums, total = sums + weights.unsqueeze(-1) * upload["prototypes"], total + weights
        means = sums / total.clamp(min=1).unsqueeze(-1)
        return {
            "prototypes": torch.where(total.unsqueeze(-1) > 0, means, server["prototypes"]),
            "known": torch.maximum(server["known"], (total > 0).to(total.dtype)),
        }

    def global_model(self, server: State) -> None:
        """Nothing but prototypes is global."""


def sum_by_class(values: Tensor, batch: Batch, classes: int) -> Tensor:
    """Sums over each class's samples of ``values``, shape (B, d): shape (C, d)."""
    one_hot_labels = one_hot(batch.y, classes, values.dtype)
    if batch.mask is not None:
        one_hot_labels = one_hot_labels * batch.mask.unsqueeze(-1)
    return one_hot_labels.T @ values
