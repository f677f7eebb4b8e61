"""FedAMP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.model_stack import flatten_models, repeat_model, replace_models
from fedpipe.algorithms.passes import Pass, Pull, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors

CHUNK_COLUMNS = 4096  #: coordinates that are compared at a time, so that those of all points stay in a core's cache


@dataclass(frozen=True, kw_only=True)
class FedAMP(Algorithm):
    r"""Personal models that attract each other, more strongly the closer they are (attentive message passing).

    Source: Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021, Alg. 1, with
    :math:`A(x) = 1 - e^{-x/\sigma}`. The server mixes the clients' models for each client, who stays near the mixture:

    .. math::
        u_i = \Bigl(1 - \sum_{j \ne i} \xi_{ij}\Bigr) w_i + \sum_{j \ne i} \xi_{ij} w_j, \quad
        \xi_{ij} = \frac{\alpha}{\sigma} e^{-\lVert w_i - w_j \rVert^2 / \sigma}, \qquad
        w_i \leftarrow \arg\min_w F_i(w) + \frac{\lambda}{2 \alpha} \lVert w - u_i \rVert^2 .

    The own weight :math:`\xi_{ii}` is what the others leave of 1, and alpha a gradient step on A, which the paper takes
    so small that the mixture is convex. A larger one is lowered where it is too large, for each client by itself, to
    :math:`1 / \sum_j A'(\lVert w_i - w_j \rVert^2)` over all j, i included: then
    :math:`\xi_{ij} \propto e^{-\lVert w_i - w_j \rVert^2 / \sigma}`, no model weighs more than the client's own, and a
    client with nobody near goes on from its own. No step is lowered while :math:`N \alpha \le \sigma`.

    Distances are of trained parameters. Only clients that have uploaded attract, or are attracted, by their last
    uploads. The personal model is :math:`w_i`: it is what evaluation and fine-tuning begin with, and stays as it is
    while its client is not in the round.

    State: :math:`w_i` at the client; all clients' last uploads and :math:`\xi` at the server. Traffic: a model down, a
    model up; there is no global model. Deviations: the paper lowers alpha as rounds go by; here it is constant, and the
    pull's is not lowered. HeurFedAMP, whose :math:`\xi_{ii}` is a setting, is another method.
    Values used: alpha 1000, lambda 1 and sigma 0.1 (cwFedAvg, supplement). The defaults, lambda 1, alpha 1e4 and sigma
    1e6, are unverified: no source was compared for them. They mix almost evenly, 1 % of each other client. The pull is
    weak at either; what acts is that training begins at :math:`u_i`. cwFedAvg's row is another thing: in PFLlib, on
    which that study was built, the pull has no gradient and no model is ever overwritten by its mixture, so that FedAMP
    is local training whatever its values. ``begin_at: own`` with ``attraction: 0`` reproduces that row: it is local
    training to the bit.

    Parameters
    ----------
    alpha
        Step of the attraction, at most.
    sigma
        Squared distance over which attraction falls by e; to tell clients apart, it must be of the order of theirs.
    attraction
        Strength lambda of the pull to the mixture.
    begin_at
        Where training begins: at the mixture u_i, or at the client's own w_i.
    """

    alpha: Annotated[float, Field(gt=0)] = 1e4
    sigma: Annotated[float, Field(gt=0)] = 1e6
    attraction: Annotated[float, Field(ge=0)] = 1.0
    begin_at: Literal["mixture", "own"] = "mixture"

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """Nobody has uploaded, and nobody's model is mixed."""
        model, clients = fresh(0), self.federation.clients
        mixing_weights = torch.eye(clients).to(model["head.weight"])
        return {
            "models": repeat_model(model, clients),
            "mixing": mixing_weights,
            "seen": torch.zeros_like(mixing_weights[0]),
        }

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """The initial model."""
        return {"model": fresh(0)}

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """Each client's mixture u_i."""
        weights = server["mixing"][list(ids)]
        return {}, {"mixture": server["models"].map(lambda value: torch.tensordot(weights, value, 1))}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The personal model and the mixture."""
        return {"model": kept["model"], "mixture": received["mixture"]}

    @property
    def _pull(self) -> Pull:
        """Towards the mixture."""
        return Pull("mixture", self.attraction / self.alpha)

    def local_passes(self) -> Sequence[Pass]:
        """Training near the mixture, from there."""
        start_pass = Update(lambda client: client | {"model": client["mixture"]})
        training_pass = Train(self.loss, pull=self._pull)
        return (start_pass, training_pass) if self.begin_at == "mixture" else (training_pass,)

    def finetune(self, epochs: int) -> Sequence[Pass]:
        """Training near the mixture, from the personal model."""
        return (Train(self.loss, pull=self._pull, epochs=epochs, stream="finetune"),)

    def keep(self, client: State) -> State:
        """The personal model."""
        return {"model": client["model"]}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The last uploads, and how they are mixed."""
        models = replace_models(server["models"], uploads.ids, [upload["model"] for _, _, upload in uploads])
        has_uploaded = server["seen"].index_fill(0, torch.tensor(uploads.ids), 1)
        return {"models": models, "mixing": self.compute_mixing_weights(models, has_uploaded), "seen": has_uploaded}

    def compute_mixing_weights(self, models: Tensors, has_uploaded: Tensor) -> Tensor:
        """Each client's weights of all models, (N, N); ``has_uploaded``, shape (N,), is 1 for clients that uploaded."""
        distances = square_distances(flatten_models(self.net.parameters(models)))
        attention = (
            self.alpha / self.sigma * torch.exp(-distances / self.sigma) * torch.outer(has_uploaded, has_uploaded)
        )
        attention = attention / attention.sum(1, keepdim=True).clamp(min=1)  # a convex mixture, whatever alpha is
        off_diagonal = attention - attention.diag().diag()
        return off_diagonal + (1 - off_diagonal.sum(1)).diag()

    def global_model(self, server: State) -> None:
        """There are personal models only."""


def square_distances(points: Tensor) -> Tensor:
    """Squared Euclidean distances between the rows of ``points``, shape (N, L): a matrix (N, N)."""
    count, length = points.shape
    pairs = torch.stack(
        [F.pdist(points[:, first : first + CHUNK_COLUMNS]).square() for first in range(0, length, CHUNK_COLUMNS)]
    )
    distances = points.new_zeros(count, count)
    distances[*torch.triu_indices(count, count, 1)] = pairs.sum(0)
    return distances + distances.T
