"""MOON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    r"""Model-contrastive: features are pulled towards the global model's and away from the client's previous model's.

    Source: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, eq. 3-4, Alg. 1.

    Method: with z, :math:`z_g` and :math:`z_p` a sample's features by the model in training, the downloaded one and the
    client's previous one,

    .. math::
        \min_\theta F_k(\theta) + \mu \, \mathbb{E}_x \ell(x), \qquad
        \ell = -\log \frac{e^{\cos(z, z_g) / \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_p) / \tau}}
             = -\log \sigma \Bigl( \frac{\cos(z, z_g) - \cos(z, z_p)}{\tau} \Bigr).

    The other two models are in evaluation mode. If the client keeps its running statistics (``buffers: keep``), they
    use those from the beginning of the round.

    State: the previous model at the client. Traffic: the model down, the model up. Values used: mu 5 (CIFAR-10),
    1 (CIFAR-100, Tiny ImageNet) in its own paper, 5 in FedDW's code, with tau 0.5.

    Deviations
    ----------
    Features z
        Paper: the output of a projection of two layers between the body and the output layer. Code: FedDW's takes the
        input of the output layer. Here: the input of the output layer of the study's model.
    First participation of a client
        Code: a client that is first sampled in a later round contrasts with a random model that it never had. Here: no
        contrast, because there is no previous model.

    Parameters
    ----------
    mu
        Strength of the contrast.
    temperature
        Temperature tau of the cosines.
    """

    mu: Annotated[float, Field(ge=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 0.5

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model, because there is no previous one."""
        return {"previous": server["model"]}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, the same for the contrast, and the previous model."""
        model = download["model"]
        return {"model": model, "global": model, "previous": state["previous"], "is_first": info.is_first}

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the contrast."""
        z = self.net.features(client["model"], batch.x)
        risk = cross_entropy(self.net.classify(client["model"], z), batch)
        return risk + self.mu * (1 - client["is_first"]) * batch.mean(self.compute_contrastive_loss(client, z, batch.x))

    def compute_contrastive_loss(self, client: State, z: Tensor, x: Tensor) -> Tensor:
        """Eq. 3 for each sample, shape (B,). Its features z have shape (B, d)."""
        global_similarity, previous_similarity = (
            F.cosine_similarity(z, self.net.features(client[part], x, teacher=True), dim=-1)
            for part in ("global", "previous")
        )
        return -F.logsigmoid((global_similarity - previous_similarity) / self.temperature)

    @override
    def keep(self, client: State) -> State:
        """The trained model, which is the previous model of the next round."""
        return {"previous": client["model"]}
