"""FedDW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedpipe.algorithms.base import Algorithm, one_hot
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.passes import Measure, Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import Network, compute_class_relations


@dataclass(frozen=True, kw_only=True)
class FedDW(Algorithm):
    r"""Regularizes each client's classification layer towards the soft labels averaged over all clients.

    Source: Liu et al., FedDW: Distilling Weights through Consistency Optimization in Heterogeneous Federated
    Learning, 2024, eq. 4-12, Alg. 1. After training, client n measures its soft-label (SL) matrix, whose row i is the
    mean of the softmax outputs over its samples of class i; the server averages rows by class counts:

    .. math:: \Omega[i] = \sum_n \frac{n_{n,i}}{\sum_l n_{l,i}} \Omega^n[i]

    The class-relation (CR) matrix of a classification layer :math:`\omega \in R^{C \times d}` (without bias) is the
    row softmax of :math:`\omega \omega^T`, and every batch adds, with :math:`\Omega` constant,

    .. math:: \mu L_{reg} = \frac{\mu}{C^2} \lVert \Omega - softmax(\omega \omega^T) \rVert_F^2 .

    State: :math:`\Omega` at the server (the identity before round 1); a class that nobody in the round owns keeps its
    row (of both the paper says nothing). Traffic: model and C x C down; model, C x C and C counts up.

    ``mode: code`` follows the authors' code where it differs from the paper: the last layer keeps its bias; rows are
    means over all uploads since round 1, and :math:`\Omega` moves half-way to them; a class that was never seen has the
    identity's row; mu is divided by 10 at rounds 9, 18, 27 and so on; SL is measured on images that ``transforms`` have
    changed at random, as those that are trained on.
    Values of mu used: 0.1 for CIFAR-10, 10 for CIFAR-100, chosen from {0.01, 0.1, 1, 10, 100}.

    Parameters
    ----------
    mu
        Strength of the regularizer.
    mode
        The paper's definition, or the authors' code.
    """

    server_optimizer_part: ClassVar[str | None] = "model"
    dw_refusal: ClassVar[str] = "FedDW regularizes by itself; set mu instead"

    mu: Annotated[float, Field(ge=0)] = 0.1
    mode: Literal["paper", "code"] = "paper"

    def adapt(self, network: Network) -> Network:
        """The last layer without bias (paper)."""
        if self.mode == "paper" and isinstance(network.head, nn.Linear):
            network.head.register_parameter("bias", None)
        return network

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The model, and the identity as SL matrix."""
        model = fresh(0)
        classes = len(model["head.weight"])
        identity = torch.eye(classes).to(model["head.weight"])
        totals = {"sums": torch.zeros_like(identity), "counts": identity.new_zeros(classes)}
        return {"model": model, "omega": identity} | (totals if self.mode == "code" else {})

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the SL matrix."""
        return {"model": server["model"], "omega": server["omega"]}, {}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model and SL matrix, with this round's mu."""
        decay = torch.floor(info.round / 9) if self.mode == "code" else torch.zeros_like(info.round)
        return {"model": received["model"], "omega": received["omega"], "mu": self.mu * 10**-decay}

    def local_passes(self) -> Sequence[Pass]:
        """Regularized training, then the client's own SL matrix."""
        return (
            Train(self.loss),
            Measure(self.sum_soft_labels, self.store_soft_labels, is_augmented=self.mode == "code"),
        )

    def loss(self, client: State, batch: Batch) -> Tensor:
        """Eq. 12: the risk and the distance of CR from SL."""
        return self.risk(client, batch) + client["mu"] * compute_regularizer(
            client["model"]["head.weight"], client["omega"]
        )

    def sum_soft_labels(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums of the softmax outputs by class, and the classes' counts."""
        return self.sum_outputs_by_class(self.net(client["model"], batch.x), batch)

    def sum_outputs_by_class(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Sums by class of the softmax of ``logits``, shape (B, C), and the classes' counts."""
        outputs = logits.softmax(-1)
        one_hot_labels = one_hot(batch.y, outputs.shape[-1], outputs.dtype)
        return {
            "sums": batch.sum(one_hot_labels.unsqueeze(-1) * outputs.unsqueeze(-2)),
            "counts": batch.sum(one_hot_labels),
        }

    def store_soft_labels(self, client: State, sums: dict[str, Tensor]) -> State:
        """The client's SL matrix, with rows of zeros for classes it does not own."""
        return client | {"own": sums["sums"] / sums["counts"].clamp(min=1).unsqueeze(-1), "counts": sums["counts"]}

    def upload(self, client: State) -> State:
        """The model, the client's SL matrix and the class counts."""
        return {"model": client["model"], "omega": client["own"], "counts": client["counts"]}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean model (eq. 8) and the rows' means (eq. 7)."""
        client_uploads, state = [upload for _, _, upload in uploads], {"model": uploads.mean("model")}
        if self.mode == "paper":
            return state | {"omega": self.average_rows(server["omega"], client_uploads)}
        sums, counts = _sum_uploads(client_uploads)
        sums, counts = server["sums"] + sums, server["counts"] + counts
        rows = _divide_by_counts(sums, counts, default=torch.eye(len(counts)).to(counts))
        return state | {"omega": (rows + server["omega"]) / 2, "sums": sums, "counts": counts}

    def average_rows(self, omega: Tensor, client_uploads: Sequence[State]) -> Tensor:
        """Eq. 7: the uploads' mean of each class's row, by counts; a class that nobody owns keeps its row."""
        return _divide_by_counts(*_sum_uploads(client_uploads), default=omega)

    def matrices(self, state: State) -> Mapping[str, Tensor]:
        """The SL matrix as it travels, and the CR matrix beside it."""
        return {"SL": state["omega"], "CR": compute_class_relations(state["model"]["head.weight"])}


def compute_regularizer(omega: Tensor, soft_labels: Tensor) -> Tensor:
    """Eq. 11: mean square of the entries of SL - CR, a scalar between 0 and 2 / C."""
    return (soft_labels - compute_class_relations(omega)).square().mean()


def _sum_uploads(client_uploads: Sequence[State]) -> tuple[Tensor, Tensor]:
    """Sums of the clients' rows and counts."""
    sums: Tensor = sum(upload["omega"] * upload["counts"].unsqueeze(-1) for upload in client_uploads)
    counts: Tensor = sum(upload["counts"] for upload in client_uploads)
    return sums, counts


def _divide_by_counts(sums: Tensor, counts: Tensor, default: Tensor) -> Tensor:
    return torch.where(counts.unsqueeze(-1) > 0, sums / counts.clamp(min=1).unsqueeze(-1), default)
