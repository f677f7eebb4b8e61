"""GPFL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy, draw_normal
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.extra_layers import apply_layer_norm, apply_linear, init_layer
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors

SHARED_PARTS = ("embeddings", "gamma", "beta")


@dataclass(frozen=True, kw_only=True)
class GPFL(SharedBody):
    r"""Shared class embeddings guide one route of the features, and the client's own head classifies the other route.

    Source: Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
    Federated Learning, ICCV 2023, and the authors' code.

    Method: with features z, class embeddings C (downloaded: :math:`\hat C`), and the conditional valve
    :math:`V(z, u) = ReLU(z \odot (1 + \gamma(u)) + \beta(u))` with layers :math:`\gamma, \beta = LN(ReLU(linear))`,

    .. math::
        z_G = V(z, mean_c \, \hat C_c), \qquad z_P = V(z, \textstyle \sum_c p_{kc} \hat C_c), \qquad
        F_k(h(z_P)) + CE(\cos(z_G, C), y) + \lambda \lVert z_G - \hat C_y \rVert + \frac{\mu}{2} \lVert C, V \rVert^2,

    with h client k's head and :math:`p_{kc}` its fraction of class c. The server averages bodies, C and V.

    State: the head at the client. Traffic: the body, C x d and the valve down and up. There is no global model.
    Values used: lambda 0.01 and mu 0.1 (CNN and MLP), 0.0001 and 0 (ResNet-18, fastText).

    Deviations
    ----------
    Inputs of the valve
        Code: from the client's embeddings after its last training, or from its previous download if it was not in the
        last round, and zeros in the first round. FLGo: from the downloaded embeddings, with the personal input divided
        by C. Here: from the downloaded embeddings, without this division.
    Distance from the embeddings
        Paper: the norm of a sample's difference. Code: the norm of all differences of a batch. Here: as the code.
    Optimizer
        Code: three of the same learning rate. Here: one. ``federation.clip_norm`` clips all gradients together.

    Parameters
    ----------
    penalty
        Strength lambda of the pull to the downloaded embeddings.
    decay
        Weight decay mu of embeddings and valve.
    """

    penalty: Annotated[float, Field(ge=0)] = 0.01
    decay: Annotated[float, Field(ge=0)] = 0.1

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The body, random embeddings and a random valve."""
        rows, key = initial_model(0)["head.weight"], self.server_noise_key
        valve = {name: init_layer(key, name, rows.shape[1], rows) for name in ("gamma", "beta")}
        embeddings = Tensors(embeddings=draw_normal(key, "embeddings", torch.zeros_like(rows)))
        return super().init(initial_model) | {"embeddings": embeddings} | valve

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The body, the embeddings and the valve."""
        return {name: server[name] for name in ("body", *SHARED_PARTS)}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The personal model, embeddings and valve, the downloaded embeddings, and the valve's inputs."""
        embeddings = download["embeddings"]["embeddings"]
        inputs = {"global_input": embeddings.mean(0), "personal_input": info.class_counts @ embeddings / info.size}
        shared = {name: download[name] for name in SHARED_PARTS}
        return super().start(state, download, info) | shared | {"guide": embeddings} | inputs

    @override
    def training_pass(self) -> Train:
        """Training of the personal model, the embeddings and the valve."""
        return Train(self.loss, group=("model", *SHARED_PARTS))

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk, the guidance by embeddings, and weight decay."""
        z = self.net.features(client["model"], batch.x)
        embeddings = client["embeddings"]["embeddings"]
        z_global = apply_valve(client, z, client["global_input"])
        cosines = F.normalize(z_global, dim=-1) @ F.normalize(embeddings, dim=-1).mT
        differences = z_global - client["guide"][batch.y]
        if batch.mask is not None:
            differences = differences * batch.mask.unsqueeze(-1)
        distance = torch.linalg.vector_norm(differences)  # with a gradient of 0 at 0
        sizes = sum(client[name].square_norm() for name in SHARED_PARTS)
        return (
            cross_entropy(self.classify(client, z), batch)
            + cross_entropy(cosines, batch)
            + self.penalty * distance
            + self.decay / 2 * sizes
        )

    def classify(self, client: State, z: Tensor) -> Tensor:
        """Logits of the personal features, shape (B, C)."""
        return self.net.classify(client["model"], apply_valve(client, z, client["personal_input"]))

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """Logits of the personal features."""
        return self.classify(client, self.net.features(client["model"], x))

    @override
    def upload(self, client: State) -> State:
        """The body, the embeddings and the valve."""
        return super().upload(client) | {name: client[name] for name in SHARED_PARTS}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The means of bodies, embeddings and valves."""
        return super().aggregate(server, uploads) | {name: uploads.mean(name) for name in SHARED_PARTS}

    @override
    def global_model(self, server: State) -> None:
        """Each client has its own head."""


def apply_valve(client: State, z: Tensor, u: Tensor) -> Tensor:
    """Features transformed by the valve with one input for all samples, shape (B, d)."""
    gamma, beta = (apply_layer_norm(client[name], F.relu(apply_linear(client[name], u))) for name in ("gamma", "beta"))
    return F.relu(z * (1 + gamma) + beta)
