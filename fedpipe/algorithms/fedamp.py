"""FedAMP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.model_stack import flatten_models, repeat_model, replace_models
from fedpipe.algorithms.passes import Pass, Pull, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors

CHUNK_COLUMNS = 4096  #: coordinates per comparison, so that those of all points fit in a core's cache


@dataclass(frozen=True, kw_only=True)
class FedAMP(Algorithm):
    r"""Personal models that attract each other, more strongly the closer they are (attentive message passing).

    Source: Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021, Alg. 1.

    Method: the server computes a mixture of all clients' models for each client, whose training stays near it. With
    :math:`A(x) = 1 - e^{-x/\sigma}`:

    .. math::
        u_i = \Bigl(1 - \sum_{j \ne i} \xi_{ij}\Bigr) w_i + \sum_{j \ne i} \xi_{ij} w_j, \quad
        \xi_{ij} = \frac{\alpha}{\sigma} e^{-\lVert w_i - w_j \rVert^2 / \sigma}, \qquad
        w_i \leftarrow \arg\min_w F_i(w) + \frac{\lambda}{2 \alpha} \lVert w - u_i \rVert^2 .

    Distances are of trained parameters. The personal model is :math:`w_i`, from which evaluation and fine-tuning begin.

    State: :math:`w_i` at the client, all clients' last uploads and :math:`\xi` at the server. Traffic: a model down, a
    model up. There is no global model.
    Values used: alpha 1000, lambda 1 and sigma 0.1 (cwFedAvg, supplement). The defaults, lambda 1, alpha 1e4 and sigma
    1e6, are unverified: no source was compared for them. They mix almost evenly, 1 % of each other client. With
    both sets of values the pull is weak. The effect comes from training, which begins at :math:`u_i`.

    A client that never participated has the initial model, because no model attracts it, so its personal model is
    evaluated only after fine-tuning.

    Deviations
    ----------
    Own weight :math:`\xi_{ii}`
        Paper: 1 minus the others, with alpha so small that it is not negative. Code: not clipped. Here: if alpha is too
        large for a client, it is reduced for this client to :math:`1 / \sum_j A'(\lVert w_i - w_j \rVert^2)` over all j
        including i. Then :math:`\xi_{ij} \propto e^{-\lVert w_i - w_j \rVert^2 / \sigma}`, no model has a larger weight
        than the client's own, and a client without neighbors continues from its own. Alpha is never reduced if
        :math:`N \alpha \le \sigma`.
    Alpha over rounds
        Paper: decreases. Here: constant, and never reduced in the pull.
    Clients outside the round
        Here: they attract by their last uploads, and their personal models do not change. Clients that have never
        uploaded do not attract and are not attracted.
    Training
        Paper: begins at the mixture and is pulled to it. Code: in PFLlib, on which cwFedAvg's study was built, the pull
        has no gradient and no model is overwritten by its mixture, so that FedAMP is local training with any values.
        Here: as the paper. ``begin_at: own`` with ``attraction: 0`` reproduces cwFedAvg's reported values: it equals
        local training bit for bit.
    HeurFedAMP
        Paper: a variant in which :math:`\xi_{ii}` is a setting. Here: not included.

    Parameters
    ----------
    alpha
        Maximum step of the attraction.
    sigma
        Squared distance over which the attraction decreases by a factor e. To distinguish clients, it must be of the
        order of their squared distances.
    attraction
        Strength lambda of the pull to the mixture.
    begin_at
        Where training begins: at the mixture u_i, or at the client's own w_i.
    """

    alpha: Annotated[float, Field(gt=0)] = 1e4
    sigma: Annotated[float, Field(gt=0)] = 1e6
    attraction: Annotated[float, Field(ge=0)] = 1.0
    begin_at: Literal["mixture", "own"] = "mixture"

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """No client has uploaded, and no models are mixed."""
        model, clients = initial_model(0), self.federation.clients
        mixing_weights = torch.eye(clients).to(model["head.weight"])
        return {
            "models": repeat_model(model, clients),
            "mixing": mixing_weights,
            "seen": torch.zeros_like(mixing_weights[0]),
        }

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model."""
        return {"model": initial_model(0)}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """Each client's mixture u_i."""
        weights = server["mixing"][list(ids)]
        return {}, {"mixture": server["models"].map(lambda value: torch.tensordot(weights, value, 1))}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The personal model and the mixture."""
        return {"model": state["model"], "mixture": download["mixture"]}

    @override
    def training_pass(self) -> Train:
        """Training near the mixture."""
        return Train(self.loss, pull=Pull("mixture", self.attraction / self.alpha))

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Training near the mixture, from the mixture or from the personal model."""
        start = (Update.copy("mixture", to="model"),) if self.begin_at == "mixture" else ()
        return (*start, self.training_pass())

    @override
    def keep(self, client: State) -> State:
        """The personal model."""
        return {"model": client["model"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The last uploads, and how they are mixed."""
        models = replace_models(server["models"], uploads.ids, uploads["model"])
        has_uploaded = uploads.mark(server["seen"])
        return {"models": models, "mixing": self.compute_mixing_weights(models, has_uploaded), "seen": has_uploaded}

    def compute_mixing_weights(self, models: Tensors, has_uploaded: Tensor) -> Tensor:
        """Each client's weights of all models, (N, N). ``has_uploaded``, shape (N,), is 1 for clients that uploaded."""
        distances = compute_square_distances(flatten_models(self.net.parameters(models)))
        attention = (
            self.alpha / self.sigma * torch.exp(-distances / self.sigma) * torch.outer(has_uploaded, has_uploaded)
        )
        attention = attention / attention.sum(1, keepdim=True).clamp(min=1)  # a convex mixture for any alpha
        off_diagonal = attention - attention.diag().diag()
        return off_diagonal + (1 - off_diagonal.sum(1)).diag()

    @override
    def global_model(self, server: State) -> None:
        """There are personal models only."""


def compute_square_distances(points: Tensor) -> Tensor:
    """Squared Euclidean distances between the rows of ``points``, shape (N, L): a matrix (N, N)."""
    count, length = points.shape
    pairs = torch.stack(
        [F.pdist(points[:, first : first + CHUNK_COLUMNS]).square() for first in range(0, length, CHUNK_COLUMNS)]
    )
    distances = points.new_zeros(count, count)
    distances[*torch.triu_indices(count, count, 1)] = pairs.sum(0)
    return distances + distances.T
