"""FedDUAL's adaptive loss: the risk, weighted against the divergence from the global weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Measure, Pass, Train


@dataclass(frozen=True, kw_only=True)
class AdaptiveLoss(FedAvg):
    """Part (i) of FedDUAL, eq. 3-6: FedAvg with a loss whose weight beta is measured before each epoch."""

    adaptive_loss: bool = True

    @property
    def has_adaptive_beta(self) -> bool:
        """Whether beta is measured."""
        return self.adaptive_loss

    @property
    @override
    def local_steps_conflict(self) -> str | None:
        """Beta is measured before each epoch."""
        return "whose beta is measured before each epoch" if self.has_adaptive_beta else None

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, to train and to compare with."""
        anchor, zero = self.net.parameters(download["model"]).flat(), torch.zeros_like(info.size)
        return super().start(state, download, info) | {"anchor": anchor, "global_accuracy": zero, "beta": zero}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """The global accuracy, then for each epoch beta and training."""
        if not self.has_adaptive_beta:
            return super().local_passes()
        epoch = (Measure(self.count_correct, self.store_beta), Train(self.loss, step=self.step, epochs=1))
        epochs = cast(int, self.federation.local_epochs)
        return (Measure(self.count_correct, self.store_global_accuracy), *epoch * epochs)

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk's part of eq. 5. In fine-tuning beta is 0, because it is not measured."""
        return (1 - client["beta"]) * self.risk(client, batch) if self.has_adaptive_beta else self.risk(client, batch)

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """A step of the federation's optimizer along the gradient of eq. 5."""
        g, theta = gradient(client), self.net.parameters(client["model"])
        divergence = client["beta"] * compute_divergence_gradient(theta.flat(), client["anchor"])
        return gradient.descend(client, g + theta.unflat(divergence))

    def count_correct(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Number of correctly classified samples, and of all samples."""
        is_correct = self.net(client["model"], batch.x).argmax(-1) == batch.y
        return {"correct": batch.sum(is_correct.to(client["beta"].dtype)), "all": batch.size()}

    def store_global_accuracy(self, client: State, sums: dict[str, Tensor]) -> State:
        """The global model's accuracy on the client's data."""
        return client | {"global_accuracy": sums["correct"] / sums["all"]}

    def store_beta(self, client: State, sums: dict[str, Tensor]) -> State:
        """Eq. 6: beta from the local model's accuracy."""
        return client | {"beta": torch.sigmoid(sums["correct"] / sums["all"] - client["global_accuracy"])}


def compute_divergence_gradient(local: Tensor, anchor: Tensor) -> Tensor:
    r"""Gradient of eq. 4 in the local weights. Both arguments and the gradient are vectors, shape (L,).

    With d the difference of the two, :math:`\log (p_i / q_i)` is :math:`d_i` up to a constant, and the gradient of
    their divergence is :math:`p_i (d_i - \sum_j p_j d_j)`.
    """
    p, d = local.softmax(0), local - anchor
    return p * (d - p.dot(d))
