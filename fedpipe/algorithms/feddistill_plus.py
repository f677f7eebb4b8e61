"""FedDistill+."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.feddw import FedDW
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network


@dataclass(frozen=True, kw_only=True)
class FedDistillPlus(FedDW):
    r"""FedAvg plus distillation from the mean soft labels of each class over all clients.

    Source: Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
    under Non-IID Private Data, arXiv 1811.11479, 2018 (FedDistill); "+": the models are averaged too, as in FedDW's
    and FedGen's code. Clients measure, and the server averages, the same table of soft labels :math:`\Omega` as in
    FedDW; here row y is the teacher of the outputs p of each sample of class y:

    .. math:: F_k(\theta) + \mu \, KL(\Omega[y] \,\|\, p(x)).

    Before round 1 the table is the identity, as in FedDW's code, and a class that nobody in the round owns keeps its
    row. The divergence from a row of the identity is the cross-entropy once more: in round 1, and later for classes
    that nobody owned so far, clients follow the risk's gradient :math:`1 + \mu` times, with the default mu twice, which
    with SGD is a doubled learning rate. (FedGen's code has no such term before the first table; in ``mode: code`` it is
    :math:`-p_y`, no cross-entropy.)

    - ``mode: kl`` is this.
    - ``mode: paper``: the teacher of client k leaves out what k itself sent in the round before (by counts; Jeong et
      al. have equal clients), and a class that no other client in the round owns keeps its row. Their cross-entropy has
      the gradient of the divergence.
    - ``mode: code`` follows FedDW's code for it: the table is that of FedDW's ``mode: code`` (means over all uploads
      since round 1, smoothed by a half), and the "divergence" is given probabilities instead of their logarithms,
      :math:`\sum_c \Omega[y]_c (\log \Omega[y]_c - p_c)`, which raises :math:`\langle \Omega[y], p \rangle`.

    State: :math:`\Omega` at the server (``paper``: one for each client). Traffic: model and C x C down; model, C x C
    and C counts up. Value of mu used: 1 (FedDW's code).

    Parameters
    ----------
    mu
        Strength of the teaching.
    mode
        Which teacher and which distance; see above.
    """

    dw_refusal: ClassVar[str] = ""

    mu: Annotated[float, Field(ge=0)] = 1.0
    mode: Literal["kl", "paper", "code"] = "kl"  # type: ignore[assignment]

    def adapt(self, network: Network) -> Network:
        """The network as it is: the last layer keeps its bias."""
        return network

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The model, and the identity as table: of each client (paper) or of all."""
        state = super().init(fresh)
        if self.mode == "paper":
            state["omega"] = state["omega"].repeat(self.federation.clients, 1, 1)
        return state

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the table."""
        if self.mode == "paper":
            return {"model": server["model"]}, {"omega": server["omega"][list(ids)]}
        return super().send(server, ids)

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model and the table."""
        return {"model": received["model"], "omega": received["omega"]}

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the distance from the teacher."""
        logits = self.net(client["model"], batch.x)
        divergence_function = wrong_divergence if self.mode == "code" else divergence
        divergences = divergence_function(client["omega"][batch.y], logits.log_softmax(-1))
        return cross_entropy(logits, batch) + self.mu * batch.mean(divergences)

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean model, and the rows' means."""
        if self.mode == "code":
            return super().aggregate(server, uploads)
        uploads_by_client = {client: upload for client, _, upload in uploads}
        model, omega = uploads.mean("model"), server["omega"]
        if self.mode == "kl":
            return {"model": model, "omega": self.average_rows(omega, list(uploads_by_client.values()))}
        uploads_of_others = [
            [upload for other_client, upload in uploads_by_client.items() if other_client != client]
            for client in range(len(omega))
        ]
        rows = [
            self.average_rows(row, other_uploads) if other_uploads else row
            for row, other_uploads in zip(omega, uploads_of_others, strict=True)
        ]
        return {"model": model, "omega": torch.stack(rows)}

    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """The table as it travels, where it is one for all."""
        return {"SL": state["omega"]} if state["omega"].dim() == 2 else {}


def divergence(teacher: Tensor, log_p: Tensor) -> Tensor:
    """Kullback-Leibler divergence of outputs from their teachers, shapes (B, C), for each sample, shape (B,)."""
    return (torch.xlogy(teacher, teacher) - teacher * log_p).sum(-1)


def wrong_divergence(teacher: Tensor, log_p: Tensor) -> Tensor:
    """As FedDW's code computes it: with probabilities where their logarithms belong."""
    return (torch.xlogy(teacher, teacher) - teacher * log_p.exp()).sum(-1)
