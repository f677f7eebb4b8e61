"""FedDistill+."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, State
from fedpipe.algorithms.class_means import compute_class_means
from fedpipe.algorithms.soft_labels import SoftLabels
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedDistillPlus(SoftLabels):
    r"""FedAvg plus distillation from the mean soft labels of each class over all clients.

    Source: Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
    under Non-IID Private Data, arXiv 1811.11479, 2018 (FedDistill). "+": the models are averaged too, as in FedDW's
    and FedGen's code.

    Method: clients measure, and the server averages, the same table of soft labels :math:`\Omega` as in FedDW. Row y is
    the teacher of the outputs p of each sample of class y, so that client k minimizes

    .. math:: F_k(\theta) + \mu \, KL(\Omega[y] \,\|\, p(x)).

    With a row of the identity the divergence equals the cross-entropy. So in round 1, and later for classes that no
    client has had so far, the gradient of the risk is scaled by :math:`1 + \mu`. With the default mu and SGD that
    doubles the learning rate.

    State: :math:`\Omega` at the server (``mode: paper``: one for each client). Traffic: model and C x C down. Model,
    C x C and C counts up. Value of mu used: 1 (FedDW's code).

    A client that never participated receives the global model, and with ``mode: paper`` the initial table, which only
    fine-tuning reads.

    Deviations
    ----------
    Averaged models
        Paper: none, only soft labels travel. Code: FedDW's and FedGen's average the models. Here: averaged.
    Teacher of client k
        Paper: the mean over the other clients, which all have as many samples. Code: FedDW's has all uploads since
        round 1, smoothed by a half, as in FedDW's ``mode: code``. Here: all clients of the last round, by counts. With
        ``mode: paper`` without what k uploaded in that round, by counts. With ``mode: code`` as FedDW's code.
    FedGen's teacher
        Code: the softmax of the mean logits during training, with all samples since round 1, averaged uniformly over
        clients, with zeros for classes that a client lacks. Here: no setting gives it.
    Classes without samples in a round
        Code: the mean over earlier rounds. Here: the row does not change. With ``mode: paper`` it does not change for
        client k if no other client in the round has samples of the class.
    Distance
        Paper: the cross-entropy, whose gradient is that of the divergence. Code: FedDW's uses probabilities instead of
        their logarithms, :math:`\sum_c \Omega[y]_c (\log \Omega[y]_c - p_c)`, which increases
        :math:`\langle \Omega[y], p \rangle`. Here: the divergence. As the code with ``mode: code``.
    Before the first table
        Code: FedDW's begins with the identity, FedGen's has no distillation term. Here: the identity. With
        ``mode: code`` the term is :math:`-p_y`, not a cross-entropy.

    Parameters
    ----------
    mu
        Strength of the distillation.
    mode
        kl: as above. paper: the teacher leaves out the client's own soft labels. code: the table and the distance of
        FedDW's code. See the deviations.
    """

    mu: Annotated[float, Field(ge=0)] = 1.0
    mode: Literal["kl", "paper", "code"] = "kl"

    @property
    @override
    def has_running_means(self) -> bool:
        """As in FedDW's code."""
        return self.mode == "code"

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model and the identity, with ``mode: paper`` for each client."""
        state = super().init(initial_model)
        if self.mode == "paper":
            state["omega"] = state["omega"].repeat(self.federation.clients, 1, 1)
        return state

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the table, with ``mode: paper`` that of each client."""
        if self.mode == "paper":
            return {"model": server["model"]}, {"omega": server["omega"][list(ids)]}
        return super().send(server, ids)

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the distance from the teacher."""
        logits = self.net(client["model"], batch.x)
        divergence_function = compute_wrong_kl_divergence if self.mode == "code" else compute_kl_divergence
        divergences = divergence_function(client["omega"][batch.y], logits.log_softmax(-1))
        return cross_entropy(logits, batch) + self.mu * batch.mean(divergences)

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean model and the mean rows, with ``mode: paper`` for each client over the others."""
        if self.mode != "paper":
            return super().aggregate(server, uploads)
        tables = [average_soft_labels_of_others(uploads, client, omega) for client, omega in enumerate(server["omega"])]
        return {"model": uploads.mean("model"), "omega": torch.stack(tables)}

    @override
    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """The table as it travels, if it is the same for all clients."""
        return {"SL": state["omega"]} if state["omega"].dim() == 2 else {}


def average_soft_labels_of_others(uploads: Uploads, client: int, omega: Tensor) -> Tensor:
    """The mean rows of all uploads except the client's, or the rows of ``omega`` if there are none."""
    others = [upload for other, _, upload in uploads if other != client]
    if not others:
        return omega
    return compute_class_means(
        [upload["omega"] for upload in others], [upload["counts"] for upload in others], default=omega
    )


def compute_kl_divergence(teacher: Tensor, log_p: Tensor) -> Tensor:
    """Kullback-Leibler divergence of outputs from their teachers, shapes (B, C), for each sample, shape (B,)."""
    return (torch.xlogy(teacher, teacher) - teacher * log_p).sum(-1)


def compute_wrong_kl_divergence(teacher: Tensor, log_p: Tensor) -> Tensor:
    """As FedDW's code computes it: with probabilities instead of their logarithms."""
    return (torch.xlogy(teacher, teacher) - teacher * log_p.exp()).sum(-1)
