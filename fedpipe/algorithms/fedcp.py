"""FedCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.extra_layers import apply_layer_norm, apply_linear, init_layer
from fedpipe.algorithms.partial_sharing import SharedBody
from fedpipe.algorithms.passes import Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)  #: of the kernels (authors' code)


@dataclass(frozen=True, kw_only=True)
class FedCP(SharedBody):
    r"""A shared policy network splits the features of each sample between the global head and the client's own head.

    Source: Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
    Policy, KDD 2023, and the authors' code.

    Method: with z the features of width d, h client k's head, :math:`v_k` the sum of its rows when the round begins, g
    the downloaded head and :math:`\hat z` the features by the downloaded body, both constant, client k minimizes

    .. math::
        F_k \bigl( g(r \odot z) + h(s \odot z) \bigr) + \lambda \, MMD^2(z, \hat z), \qquad
        (r_i, s_i) = softmax(a_{d+i}, a_i), \quad
        a = ReLU(LN(\Theta (z \odot v_k / \lVert v_k \rVert)))

    over body, h and the policy network :math:`\Theta`. The server averages the bodies, the heads (g + h) / 2 and the
    policy networks.

    State: the head at the client. Traffic: the model and the policy network down and up. There is no global model.
    Values of lambda used: 5 (CNN, authors' code), 1 (PFLlib).

    Deviations
    ----------
    Policy
        Code: with Gumbel noise, also in tests. Here: without noise.
    First participation of a client
        Code: v is random. Here: v of the initial head.
    Clients that were not in the last round
        Code: they are evaluated, and next time trained, with the new body and the old head and policy. Here: with the
        new ones.
    Features of the downloaded body
        Code: in training mode. Here: in evaluation mode.

    Parameters
    ----------
    penalty
        Strength lambda of the pull to the features of the downloaded body.
    """

    penalty: Annotated[float, Field(ge=0)] = 5.0

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The body, the global head and a random policy network."""
        head = initial_model(0).only(self.personal_tensor_names)
        rows = head["head.weight"]
        policy = init_layer(self.server_noise_key, "policy", 2 * rows.shape[1], rows)
        return super().init(initial_model) | {"head": head, "policy": policy}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The body, the global head and the policy network."""
        return {name: server[name] for name in ("body", "head", "policy")}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The personal model, the policy network, and the constant parts."""
        v = F.normalize(state["head"]["head.weight"].sum(0), dim=0)
        constants = {"global_head": download["head"], "global_body": download["body"], "v": v}
        return super().start(state, download, info) | {"policy": download["policy"]} | constants

    @override
    def training_pass(self) -> Train:
        """Training of body, head and policy network."""
        return Train(self.loss, group=("model", "policy"))

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """The risk and the distance from the features of the downloaded body."""
        z = self.net.features(client["model"], batch.x)
        previous = self.net.features(client["global_body"], batch.x, teacher=True)
        risk = cross_entropy(self.classify(client, z), batch)
        return risk + self.penalty * compute_squared_mmd(z, previous, batch)

    def classify(self, client: State, z: Tensor) -> Tensor:
        """Logits of both heads, shape (B, C)."""
        a = F.relu(apply_layer_norm(client["policy"], apply_linear(client["policy"], z * client["v"])))
        own, other = a.chunk(2, -1)
        s = (own - other).sigmoid()  # a softmax of both. For equal heads its gradient is exactly 0
        return self.net.classify(client["global_head"], (1 - s) * z) + self.net.classify(client["model"], s * z)

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """Logits of both heads."""
        return self.classify(client, self.net.features(client["model"], x))

    @override
    def upload(self, client: State) -> State:
        """The body, the mean of both heads, and the policy network."""
        head = (client["model"].only(client["global_head"]) + client["global_head"]) / 2
        return super().upload(client) | {"head": head, "policy": client["policy"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The means of bodies, heads and policy networks."""
        means = {name: uploads.mean(name) for name in ("head", "policy")}
        return super().aggregate(server, uploads) | means

    @override
    def global_model(self, server: State) -> None:
        """A client classifies with its own head, too."""


def compute_squared_mmd(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
    """The squared maximum mean discrepancy of a batch's features, each of shape (B, d), with Gaussian kernels."""
    points = torch.cat([x, y])
    weights = torch.ones_like(x[:, 0]) if batch.mask is None else batch.mask.to(x.dtype)
    signs = torch.cat([weights, -weights])
    squares = points.square().sum(-1)
    distances = squares.unsqueeze(-1) + squares - 2 * points @ points.mT
    kernels = sum((distances / (-2 * width)).exp() for width in BANDWIDTHS)
    return signs @ kernels @ signs / batch.size().clamp(min=1) ** 2
