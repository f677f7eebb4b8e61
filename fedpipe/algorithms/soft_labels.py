"""Soft labels: clients measure their mean softmax output for each class, and the server averages it over clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm, one_hot
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.class_means import compute_class_means, divide_by_class_count, sum_class_rows
from fedpipe.algorithms.passes import Measure, Pass
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class SoftLabels(Algorithm):
    r"""FedAvg plus a table of soft labels :math:`\Omega`, shape (C, C), which begins as the identity.

    Row i of a client's table is the mean of the softmax outputs over its samples of class i. The server takes the mean
    of each row over the clients, weighted by their samples of the class.
    """

    server_optimizer_part: ClassVar[str | None] = "model"

    @property
    def has_running_means(self) -> bool:
        """Whether the table follows FedDW's code: it moves half-way to the means over all uploads since round 1."""
        return False

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model and the identity."""
        model = initial_model(0)
        omega = make_initial_soft_labels(model)
        totals = {"sums": torch.zeros_like(omega), "counts": torch.zeros_like(omega[0])}
        return {"model": model, "omega": omega} | (totals if self.has_running_means else {})

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the table."""
        return {"model": server["model"], "omega": server["omega"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model and the table."""
        return {"model": download["model"], "omega": download["omega"]}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training, then the client's table, which FedDW's code measures on augmented images."""
        measure = Measure(self.sum_soft_labels, self.store_soft_labels, is_augmented=self.has_running_means)
        return (self.training_pass(), measure)

    def sum_soft_labels(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """See :func:`sum_soft_labels`."""
        return sum_soft_labels(self.net(client["model"], batch.x), batch)

    def store_soft_labels(self, client: State, sums: dict[str, Tensor]) -> State:
        """The client's table and class counts."""
        return client | {"own": compute_soft_labels(sums), "counts": sums["counts"]}

    @override
    def upload(self, client: State) -> State:
        """The model, the client's table and its class counts."""
        return {"model": client["model"], "omega": client["own"], "counts": client["counts"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean model and the mean rows."""
        state, omega = {"model": uploads.mean("model")}, server["omega"]
        if not self.has_running_means:
            return state | {"omega": compute_class_means(uploads["omega"], uploads["counts"], default=omega)}
        sums, counts = sum_class_rows(uploads["omega"], uploads["counts"])
        sums, counts = server["sums"] + sums, server["counts"] + counts
        rows = divide_by_class_count(sums, counts, default=torch.eye(len(counts)).to(counts))
        return state | {"omega": (rows + omega) / 2, "sums": sums, "counts": counts}


def make_initial_soft_labels(model: Tensors) -> Tensor:
    """The identity, shape (C, C), for the classes of a model."""
    head: Tensor = model["head.weight"]
    return torch.eye(len(head)).to(head)


def sum_soft_labels(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Sums by class of the softmax of ``logits``, shape (B, C), and the classes' counts."""
    outputs = logits.softmax(-1)
    labels = one_hot(batch.y, outputs.shape[-1], outputs.dtype)
    # `batch.class_sums` has the same sums, but rounds them differently.
    return {"sums": batch.sum(labels.unsqueeze(-1) * outputs.unsqueeze(-2)), "counts": batch.sum(labels)}


def compute_soft_labels(sums: dict[str, Tensor]) -> Tensor:
    """A client's table from its sums, with rows of zeros for classes of which it has no samples."""
    return sums["sums"] / sums["counts"].clamp(min=1).unsqueeze(-1)
