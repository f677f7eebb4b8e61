"""FedAS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Gradient, Measure, Pass, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedAS(SharedBody):
    r"""Clients align the shared body with their own features before they train, and informative bodies weigh more.

    Source: Yang, Huang and Ye, FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024, and PFLlib.

    Method: with :math:`C_{kc}` client k's class means of features by the body that it trained last, the client first
    takes steps of rate :math:`\eta_a` from the downloaded body along the gradient of the first loss, and then trains
    body and head. The server weighs the bodies by the trace of the Fisher information, measured after training:

    .. math::
        \sum_{c \in batch} \frac{1}{d} mean_{x: y = c} \lVert f(x) - C_{kc} \rVert^2, \qquad
        \phi^{t+1} = \sum_{k \in S} \frac{T_k}{\sum_j T_j} \phi_k, \qquad
        T_k = \sum_{batches} \lVert \nabla F_k \rVert^2 .

    State: the trained body and the head at the client. Traffic: the body down, the body and :math:`T_k` up. There is no
    global model. BatchNorm's running statistics are averaged with ``federation.weighting``.
    Values used: alignment rate 0.01, for one epoch, in batches of 16 (PFLlib).

    A client that never participated aligns the downloaded body with the class means of its features by this body, and
    has the initial head.

    Deviations
    ----------
    First participation of a client
        Code: class means of the untrained initial body. FL-bench: of the downloaded body. Here: of the downloaded body.
    Alignment
        Code: the authors' clients align one shared body, one after the other. PFLlib's: each its own copy. Here: each
        its own copy, with BatchNorm in training mode (code: in evaluation mode after the first round).
    Distance from a class mean
        Code: the mean over the class's samples of the squared distance. FL-bench: the squared distance of their mean.
        Here: as the code.
    Class means
        Code: in training mode, or in evaluation mode after the first round. Here: in evaluation mode, with the
        BatchNorm statistics of the client's last training (code: the same).
    Evaluated model
        Code: the client's model as it was last trained. Here: the new body, aligned, with the client's head. For the
        code's use ``kept-on-local``.
    Weights of equal bodies
        Here: ``federation.weighting`` if all traces are 0.

    Parameters
    ----------
    alignment_rate
        Learning rate :math:`\eta_a` of the alignment.
    alignment_epochs
        Epochs of the alignment.
    """

    alignment_rate: Annotated[float, Field(ge=0)] = 0.01
    alignment_epochs: Annotated[int, Field(ge=0)] = 1

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The head and the body of the common initial model."""
        return super().init_client(server, initial_model) | {"previous": server["body"]}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The downloaded body with the client's head, and the body that the client trained last."""
        client = super().start(state, download, info)
        previous = Tensors(
            (name, torch.where(info.is_first > 0, client["model"][name], value))
            for name, value in state["previous"].items()
        )
        means = torch.zeros_like(client["model"]["head.weight"])
        return client | {
            "previous": client["model"] | previous,
            "means": means,
            "counts": info.class_counts,
            "fisher": torch.zeros_like(info.size),
        }

    @override
    def personal_passes(self) -> Sequence[Pass]:
        """The class means by the previous body, and the alignment of the downloaded one."""
        alignment = Train(
            self.compute_misalignment,
            only=self.net.body_names,
            epochs=self.alignment_epochs,
            step=self.align_body,
            stream="alignment",
        )
        return (Measure(self.sum_features, self.store_class_means), alignment)

    def sum_features(self, client: State, batch: Batch) -> dict[str, Tensor]:
        """Sums by class of the features by the previous body."""
        z = self.net.features(client["previous"], batch.x)
        return {"sums": batch.class_sums(z, len(client["counts"]))}

    def store_class_means(self, client: State, sums: dict[str, Tensor]) -> State:
        """The class means, with rows of zeros for classes without samples."""
        return client | {"means": sums["sums"] / client["counts"].clamp(min=1).unsqueeze(-1)}

    def compute_misalignment(self, client: State, batch: Batch) -> Tensor:
        """The sum over the batch's classes of the mean distance from the class mean, a scalar."""
        z = self.net.features(client["model"], batch.x)
        counts = batch.class_sums(torch.ones_like(z[:, :1]), len(client["counts"])).clamp(min=1)
        distances = (z - client["means"][batch.y]).square().mean(-1)
        return batch.sum(distances / counts[batch.y, 0])

    def align_body(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """A plain gradient step of the alignment's rate."""
        g = gradient(client)
        return client | {"model": client["model"] | (client["model"].only(g) - self.alignment_rate * g)}

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training of body and head, then the trace of the Fisher information."""
        fisher_pass = Train(self.risk, epochs=1, step=self.accumulate_fisher_trace, stream="fisher", eval_mode=True)
        return (*super().local_passes(), fisher_pass)

    def accumulate_fisher_trace(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """Add the squared norm of the batch's gradient. The model does not change."""
        return client | {"fisher": client["fisher"] + gradient(client).square_norm()}

    @override
    def upload(self, client: State) -> State:
        """The body and the trace."""
        return super().upload(client) | {"fisher": client["fisher"]}

    @override
    def keep(self, client: State) -> State:
        """The head, and the body as trained."""
        return super().keep(client) | {"previous": self.upload(client)["body"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The mean of the bodies, weighted by the traces."""
        traces = [float(trace) for trace in uploads["fisher"]]
        weights = traces if sum(traces) > 0 else uploads.weights
        return super().aggregate(server, Uploads(uploads.ids, weights, uploads.states))
