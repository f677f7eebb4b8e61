"""FedNH."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.class_means import sum_class_rows
from fedpipe.algorithms.passes import Measure, Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError
from fedpipe.models.base import Network

CLIP_NORM = 10.0  #: largest norm of a gradient (authors' code)


@dataclass(frozen=True, kw_only=True)
class FedNH(Algorithm):
    r"""A head of class prototypes on the unit sphere, which clients do not train and the server smooths over rounds.

    Source: Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023, Alg. 1.

    Method: with features z, prototypes :math:`W_c` of norm 1 that are orthogonal at first (as far as the width allows),
    and a trained scale s, the logits are :math:`s \, W z / \lVert z \rVert`. Clients train the body and s on the
    cross-entropy, with gradients clipped to norm 10. Then they measure their class means :math:`\mu_{kc}` of the
    normalized features, and normalize them. The server averages the bodies and updates the prototypes:

    .. math::
        \mu_c = normalize \Bigl( \sum_{k \in S} n_{kc} \mu_{kc} \Bigr), \qquad
        W_c \leftarrow normalize (\rho W_c + (1 - \rho) \mu_c) .

    State: none at the client. Traffic: the model down. Body, s, C prototypes of width d and C counts up.
    Values used: rho 0.9, s 1 for a small network and 20 for ResNet (authors' code), rho 0.9 (cwFedAvg).

    Deviations
    ----------
    Classes without samples in a round
        Code: the prototype becomes zero if rho is 0. Here: it does not change.
    Measured class means
        Code: of augmented images. Here: without augmentation.
    Initial prototypes if classes outnumber features
        Code: shorter than 1. Here: of norm 1.
    Averages of bodies
        Code: uniform. Here: ``federation.weighting``.
    Learning rate
        Here: only ``federation.schedule`` changes it.

    Parameters
    ----------
    rho
        Momentum of the prototypes. With 1 the head never changes.
    scale
        Initial scale s.
    """

    dw_conflict: ClassVar[str] = "FedNH does not train a classification layer. Remove dw"

    rho: Annotated[float, Field(ge=0, le=1)] = 0.9
    scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def trained_tensor_names(self) -> tuple[str, ...]:
        """Names of the trained tensors: all except the prototypes."""
        return tuple(name for name in self.net.names if name != "head.weight")

    @override
    def adapt(self, network: Network) -> Network:
        """The network with prototypes as its head.

        Raises
        ------
        SettingsError
            The model's head is not a linear layer.
        """
        head = network.head
        if not isinstance(head, nn.Linear):
            raise SettingsError(
                f"model.name: FedNH can't replace the head {type(head).__name__}. Use a model with a Linear head."
            )
        network.head = PrototypeHead(head.in_features, head.out_features, self.scale)
        return network

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model."""
        model = download["model"]
        return {"model": model, "own": torch.zeros_like(model["head.weight"]), "counts": info.class_counts}

    @override
    def training_pass(self) -> Train:
        """Training under fixed prototypes."""
        return Train(self.loss, only=self.trained_tensor_names, clip=CLIP_NORM)

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training, then the client's prototypes."""
        return (self.training_pass(), Measure(self.sum_features, self.store_prototypes))

    def sum_features(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums of the normalized features by class."""
        z = F.normalize(self.net.features(client["model"], batch.x), dim=-1)
        return {"sums": batch.class_sums(z, len(client["counts"]))}

    def store_prototypes(self, client: State, sums: dict[str, Tensor]) -> State:
        """The client's prototypes, with rows of zeros for classes without samples."""
        return client | {"own": F.normalize(sums["sums"], dim=-1)}

    @override
    def upload(self, client: State) -> State:
        """The trained tensors, the client's prototypes and its class counts."""
        model = client["model"].without(["head.weight"])
        return {"model": model, "prototypes": client["own"], "counts": client["counts"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean of the trained tensors, and the smoothed prototypes."""
        weight = server["model"]["head.weight"]
        sums, _ = sum_class_rows(uploads["prototypes"], uploads["counts"])
        smoothed_prototypes = F.normalize(self.rho * weight + (1 - self.rho) * F.normalize(sums, dim=-1), dim=-1)
        has_samples = torch.linalg.vector_norm(sums, dim=-1, keepdim=True) > 0
        return {
            "model": server["model"]
            | uploads.mean("model")
            | {"head.weight": torch.where(has_samples, smoothed_prototypes, weight)}
        }


class PrototypeHead(nn.Module):
    """A head without bias whose rows are on the unit sphere, and orthogonal if the width allows it."""

    def __init__(self, features: int, num_classes: int, scale: float) -> None:
        super().__init__()
        rows = nn.init.orthogonal_(torch.empty(num_classes, features))
        self.weight = nn.Parameter(F.normalize(rows, dim=-1))
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, z: Tensor) -> Tensor:
        """Logits, shape (B, C), for features of shape (B, d)."""
        return self.scale * F.linear(F.normalize(z, dim=-1), self.weight)
