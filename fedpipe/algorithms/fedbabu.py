"""FedBABU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedBABU(SharedBody):
    r"""Trains only the body, under a fixed random head. Fine-tuning on local data personalizes the model.

    Source: Oh et al., FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022, Alg. 1.

    Method: with h the head of the common initial model, in all rounds and for all clients:

    .. math:: \phi_k \leftarrow \arg\min_\phi F_k(\phi, h), \qquad \phi^{t+1} = \sum_{k \in S} w_k \phi_k .

    The paper evaluates each client's copy after a few epochs on its own data (5 by default: ``finetuned-on-local`` with
    ``finetune_epochs: 5``). FedDW evaluates the global model with its random head.

    State: the common head, at the server and the clients. Traffic: the body down, the body up.

    A client that never participated receives the body under the common head, as all others do.

    Deviations
    ----------
    Averages
        Code: uniform. Here: ``federation.weighting``.
    Learning rate of fine-tuning
        Code: decreases a hundredfold in training. Here: the federation's. It may be too large for the head, because
        features grow large under small random weights.

    Parameters
    ----------
    finetuned
        What fine-tuning trains: the complete model (as in the paper's main results), or only its head or body.
    """

    finetuned: Literal["model", "head", "body"] = "model"

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The body and the common head."""
        return super().init(initial_model) | {"head": initial_model(0).only(self.personal_tensor_names)}

    @override
    def training_pass(self) -> Train:
        """The body."""
        return Train(self.loss, only=self.net.body_names)

    @override
    def finetune_passes(self, epochs: int) -> Sequence[Pass]:
        """The complete model, or a part of it."""
        names_by_part = {"model": None, "head": self.net.head_names, "body": self.net.body_names}
        return (Train(self.loss, only=names_by_part[self.finetuned], epochs=epochs, stream="finetune"),)

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted mean of the bodies."""
        return super().aggregate(server, uploads) | {"head": server["head"]}

    @override
    def global_model(self, server: State) -> Tensors:
        """The body under the common head."""
        model: Tensors = server["body"] | server["head"]
        return model
