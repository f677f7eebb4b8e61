"""FedNTD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy, one_hot
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedNTD(FedAvg):
    r"""Distills the global model's outputs for all classes except the true one, so that clients forget less.

    Source: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
    NeurIPS 2022, eq. 2-4.

    Method: with z and :math:`z^g` the logits of the model in training and of the downloaded one, client k minimizes

    .. math::
        F_k(\theta) + \beta \, mean_x \sum_{c \ne y} \tilde q^g_c \log \frac{\tilde q^g_c}{\tilde q_c}, \qquad
        \tilde q_c = \frac{e^{z_c / \tau}}{\sum_{j \ne y} e^{z_j / \tau}} \quad (c \ne y).

    The downloaded model is in evaluation mode and has no gradient.

    State: none. Traffic: the model down, the model up. Values used: beta 1 and tau 1 (its own paper).

    Deviations
    ----------
    Factor of the divergence
        Paper: none. Code: :math:`\tau^2` in its last version and in PFLlib, none before. Here: as the paper, which is
        the same for tau 1. For the factor, multiply beta by it.
    Mode of the downloaded model
        Code: in evaluation mode, except for the first client of the first round. Here: in evaluation mode.

    Parameters
    ----------
    beta
        Strength of the distillation.
    tau
        Temperature of the softmax.
    """

    beta: Annotated[float, Field(ge=0)] = 1.0
    tau: Annotated[float, Field(gt=0)] = 1.0

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, and the same as the teacher."""
        return {"model": download["model"], "teacher": download["model"]}

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the divergence from the teacher."""
        logits, teacher = (
            self.net(client["model"], batch.x),
            self.net(client["teacher"], batch.x, teacher=True),
        )
        log_q, log_teacher = (compute_not_true_log_softmax(z / self.tau, batch.y) for z in (logits, teacher))
        divergence = F.kl_div(log_q, log_teacher.exp(), reduction="none").sum(-1)
        return cross_entropy(logits, batch) + self.beta * batch.mean(divergence)


def compute_not_true_log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Logarithms of the softmax over all classes except the true one, whose value is very negative, shape (B, C)."""
    is_true = one_hot(labels, logits.shape[-1], torch.bool)
    return logits.masked_fill(is_true, torch.finfo(logits.dtype).min).log_softmax(-1)
