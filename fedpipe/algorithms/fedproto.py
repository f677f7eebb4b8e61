"""FedProto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.class_means import compute_class_means
from fedpipe.algorithms.passes import Measure, Pass
from fedpipe.algorithms.prototypes import compute_prototype_loss, store_prototypes
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedProto(Algorithm):
    r"""Clients keep their models and exchange only class prototypes, towards which features are regularized.

    Source: Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Alg. 1.

    Method: with :math:`f` the extractor (of width d) and :math:`\bar C_j` the global prototype of class j,

    .. math::
        \min_\theta F_k(\theta) + \frac{\lambda}{d} \; mean_x \lVert f(x) - \bar C_{y(x)} \rVert^2, \qquad
        \bar C_j \leftarrow mean_{k \in S: n_{kj} > 0} \; C_{kj}, \quad C_{kj} = mean_{x: y(x) = j} f(x) .

    A class without a global prototype has no pull.

    State: the model at the client, prototypes at the server. Traffic: C x d and C flags of classes that have a
    prototype down. C x d and C counts up. There is no global model.
    Values of lambda used: 1 (MNIST), 0.1 (CIFAR-10), 1 (FedDW's code), 0.1 (FedNH's).

    A client that never participated has the initial model, so its personal model is evaluated only after fine-tuning.

    Deviations
    ----------
    Initial models
        Code: each client draws its own. FedDW's: one for all clients. Here: one for all clients.
    Pull
        Paper: of the client's class means. Code: of the features of each sample. Here: as the code.
    Measured prototypes
        Paper: with the trained model in evaluation mode. Code: averages of the features during training, in the last
        epoch. FedDW's: on augmented images. Here: as the paper.
    Weights of the prototypes of a class
        Paper: normalized twice. Code: uniform. FedDW's: by sample counts. Here: ``prototype_weights``.
    Classes without samples in a round
        Code: their prototypes are dropped. FedDW's: the mean over all uploads since round 1. Here: their prototypes do
        not change.
    Classes that no client has uploaded
        Code: FedDW's has prototypes of zeros from round 2, to which samples are pulled. Here: no pull.
    Features f
        Code: FedDW's takes the input of the mapping layers. Here: the input of the output layer.
    Lambda
        Code: FedDW's is 1 with any settings. Here: ``penalty``.
    Classification
        Paper: by the nearest global prototype. Code: by the nearest one of the client's own classes (authors), or of
        all classes (PFLlib). FedDW's by the client's head, in each client's model as it was last trained. Here: by the
        nearest one of all classes and by the head, as the protocols ``prototype-on-...`` and ``kept-on-global``, which
        equals ``personal-on-global``. If clients have few classes, the authors' rule gives higher accuracies.
    FedDW's FedProto
        Code: the differences above. Here: no setting gives it.

    Parameters
    ----------
    penalty
        Strength lambda of the pull.
    prototype_weights
        Weight of a client's prototype of a class: uniform over clients with such samples, or their count.
    """

    has_prototype_logits: ClassVar[bool] = True

    penalty: Annotated[float, Field(ge=0)] = 1.0
    prototype_weights: Literal["uniform", "count"] = "uniform"

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """No class has a prototype."""
        head = initial_model(0)["head.weight"]
        return {"prototypes": torch.zeros_like(head), "known": head.new_zeros(len(head))}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model."""
        return {"model": initial_model(0)}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The prototypes, and flags of classes that have one."""
        return {"prototypes": server["prototypes"], "known": server["known"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The client's model and the global prototypes."""
        zeros = torch.zeros_like(download["prototypes"])
        return {"model": state["model"], **download, "own": zeros, "counts": info.class_counts}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training, then the client's prototypes."""
        return (self.training_pass(), Measure(self.sum_features, store_prototypes))

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the pull."""
        return compute_prototype_loss(self.net, client, batch, self.penalty)

    def sum_features(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums of the features by class."""
        z = self.net.features(client["model"], batch.x)
        return {"sums": batch.class_sums(z, len(client["counts"]))}

    @override
    def upload(self, client: State) -> State:
        """The client's prototypes and its class counts."""
        return {"prototypes": client["own"], "counts": client["counts"]}

    @override
    def keep(self, client: State) -> State:
        """The model."""
        return {"model": client["model"]}

    @override
    def prototype_logits(self, client: State, x: Tensor) -> Tensor:
        """Minus the distance of the features from each class's global prototype, shape (B, C)."""
        z, compute_mode = self.net.features(client["model"], x), "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(z, client["prototypes"], compute_mode=compute_mode)
        return torch.where(client["known"] > 0, -distance, -torch.inf)

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean prototype of each class over the clients that have samples of it."""
        weights = uploads["counts"]
        if self.prototype_weights == "uniform":
            weights = [(counts > 0).to(counts.dtype) for counts in weights]
        is_owned = (sum(weights) > 0).to(server["known"].dtype)
        return {
            "prototypes": compute_class_means(uploads["prototypes"], weights, default=server["prototypes"]),
            "known": torch.maximum(server["known"], is_owned),
        }

    @override
    def global_model(self, server: State) -> None:
        """There is no global model, only global prototypes."""
