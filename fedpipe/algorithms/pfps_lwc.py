"""PFPS-LWC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Pass, Train
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class PFPSLWC(SharedBody):
    r"""A shared extractor and personal heads. Clients first recall their last extractor, and heads are kept small.

    Source: Liu et al., Personalized Federated Learning with Progressive Local Training Strategy and Lightweight
    Classifier, Appl. Sci. 2025, 15, 2481, eq. 1-10, Alg. 1.

    Method: client k first trains the downloaded extractor :math:`\phi` to imitate the one that it uploaded last,
    :math:`\phi_k` (Progressive Local Training, PLT). The recalled extractor with the client's own head h is its
    personal model (Alg. 1, lines 4-8), from which evaluation and fine-tuning begin too. Then a participant trains
    extractor and head together (lightweight classifier, LWC, eq. 7 and 9):

    .. math::
        \min_\phi \; 1 - \cos(f(\phi_k, x), f(\phi, x)), \qquad
        \min_{\phi, h} \; F_k(\phi, h) + \lambda \lVert h \rVert_2 .

    Before its first participation a client has nothing to recall.

    State: last uploaded extractor and head at the client. Traffic: the extractor down, the extractor up. There is no
    global model. Value of lambda used: 0.02 (stable from 0 to 0.2).

    A client that never participated recalls nothing, so it has the downloaded extractor with the initial head.

    Deviations
    ----------
    Epochs and optimizer of the recall
        Paper: not stated. Here: ``recall_epochs`` (1, as for one reading of eq. 4) with the federation's optimizer, in
        training mode.
    Mode of the teacher :math:`\phi_k`
        Paper: not stated. Here: evaluation mode, with the running statistics of its upload.
    Norm of the head
        Paper: not squared, one norm of weight and bias. Here: the same, or squared with ``squared: true``.
    Evaluated model
        Paper: not stated. Here: the model after the recall.

    Parameters
    ----------
    penalty
        Strength lambda of the head's norm. 0 is the ablation "PLT only".
    recall_epochs
        Epochs of the recall. 0 is the ablation "LWC only" (both 0: FedPer).
    squared
        Penalize the squared norm instead.
    """

    penalty: Annotated[float, Field(ge=0)] = 0.02
    recall_epochs: Annotated[int, Field(ge=0)] = 1
    squared: bool = False

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The common initial head and extractor."""
        return super().init_client(server, initial_model) | {"extractor": server["body"]}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The downloaded extractor with the client's head, and the extractor to recall."""
        return super().start(state, download, info) | {"extractor": state["extractor"], "is_first": info.is_first}

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """The recall, Alg. 1, lines 4-7."""
        recall_pass = Train(
            self.recall_loss,
            only=self.net.body_names,
            epochs=self.recall_epochs,
            when=lambda client: client["is_first"] == 0,
            stream="recall",
        )
        return (recall_pass,)

    def recall_loss(self, client: State, batch: Batch) -> Tensor:
        """Eq. 3: mean cosine distance of the features from those of the last uploaded extractor."""
        teacher = self.net.features(client["extractor"], batch.x, teacher=True)
        return batch.mean(1 - F.cosine_similarity(teacher, self.net.features(client["model"], batch.x), dim=-1))

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """Eq. 7 and 9: the risk and the head's norm."""
        norm = self.net.parameters(client["model"].only(self.net.head_names)).norm()
        return self.risk(client, batch) + self.penalty * (norm.square() if self.squared else norm)

    @override
    def keep(self, client: State) -> State:
        """The head, and the extractor as uploaded."""
        return super().keep(client) | {"extractor": self.upload(client)["body"]}
