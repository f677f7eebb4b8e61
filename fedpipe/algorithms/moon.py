"""MOON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    r"""Model-contrastive: features are pulled towards the global model's and away from the client's previous model's.

    Source: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021, eq. 3-4, Alg. 1. With z, :math:`z_g` and
    :math:`z_p` a sample's features by the model in training, the downloaded one and the client's previous one,

    .. math::
        \min_\theta F_k(\theta) + \mu \, \mathbb{E}_x \ell(x), \qquad
        \ell = -\log \frac{e^{\cos(z, z_g) / \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_p) / \tau}}
             = -\log \sigma \Bigl( \frac{\cos(z, z_g) - \cos(z, z_p)}{\tau} \Bigr).

    The other two models are in evaluation mode; where running statistics are the client's own (``buffers: keep``), with
    those that it had as the round began. At a client's first participation there is no previous model and no
    contrast (in the authors' code a client that first comes later contrasts with a random model that it never had).

    State: the previous model at the client. Traffic: the model down, the model up. Deviations: the authors put a
    projection of two layers between the body and the output layer; here z is what enters the output layer of the
    study's own model, whatever that is, as in FedDW's code. Values used: mu 5 (CIFAR-10), 1 (CIFAR-100, Tiny ImageNet)
    in its own paper, 5 in FedDW's code, with tau 0.5.

    Parameters
    ----------
    mu
        Strength of the contrast.
    temperature
        Temperature tau of the cosines.
    """

    mu: Annotated[float, Field(ge=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 0.5

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """No previous model yet."""
        model = server["model"]
        return {"previous": model, "seen": next(iter(model.values())).new_zeros(())}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model, twice, and the previous one."""
        model = received["model"]
        return {"model": model, "global": model, "previous": kept["previous"], "seen": kept["seen"]}

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the contrast."""
        z = self.net.features(client["model"], batch.x)
        risk = cross_entropy(self.net.classify(client["model"], z), batch)
        return risk + self.mu * client["seen"] * batch.mean(self.compute_contrast(client, z, batch.x))

    def compute_contrast(self, client: State, z: Tensor, x: Tensor) -> Tensor:
        """Eq. 3 for each sample, shape (B,); z are its features, shape (B, d)."""
        global_similarity, previous_similarity = (
            F.cosine_similarity(z, self.net.features(client[part], x, teacher=True), dim=-1)
            for part in ("global", "previous")
        )
        return -F.logsigmoid((global_similarity - previous_similarity) / self.temperature)

    def keep(self, client: State) -> State:
        """The trained model, which is the previous one next time."""
        return {"previous": client["model"], "seen": torch.ones_like(client["seen"])}
