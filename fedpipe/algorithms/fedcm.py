"""FedCM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Train
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FedCM(FedAvg):
    r"""Client-level momentum: each local step mixes the client's gradient with the last round's mean direction.

    Source: Xu et al., FedCM: Federated Learning with Client-level Momentum, arXiv 2106.10874, 2021, Alg. 2.

    Method: from :math:`\Delta^1 = 0`, with :math:`K_k` the client's steps and :math:`\eta_g` the server's rate,

    .. math::
        y &\leftarrow y - \eta \, (\alpha \nabla F_k(y) + (1 - \alpha) \Delta^t) \\
        \Delta^{t+1} &= \tfrac{1}{m} \sum_{k \in S} (\theta^t - y_k) / (K_k \eta), \qquad
        \theta^{t+1} = \theta^t + \eta_g \tfrac{1}{m} \sum_{k \in S} (y_k - \theta^t).

    The averages are uniform by definition of the method. Steps are plain gradient steps, because the method is the
    momentum, so Adam and momentum are errors. BatchNorm's running statistics are averaged.

    State: Delta at the server. Traffic: twice the parameters down, the model and the number of steps up.
    Values used: alpha 0.1 in its own paper.

    Deviations
    ----------
    Steps of a client
        Paper: the same number K for all clients. Here: Delta divides each client's update by its own number, and the
        model is the mean of the clients' models.
    Server's rate
        Paper: multiplies Delta. Here: multiplies the mean update, so that 1 gives the mean of the models.
    Clipping
        Code: FL-Simulator's clips the mixed direction. Here: ``federation.clip_norm`` clips the client's gradient.
    Weight decay
        Code: FL-Simulator's adds it to the mixed direction. Here: a part of the gradient, to which alpha applies.

    Parameters
    ----------
    alpha
        Weight of the client's gradient. 1 gives FedAvg with equal weights.
    server_rate
        The server's step :math:`\eta_g`.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ("optimizer", "momentum")

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.1
    server_rate: Annotated[float, Field(gt=0)] = 1.0

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model and a direction of zeros."""
        model = initial_model(0)
        return {"model": model, "direction": self.net.parameters(model).zeros()}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the direction."""
        return {"model": server["model"], "direction": server["direction"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, the direction, and the number of steps."""
        return {"model": download["model"], "direction": download["direction"], "steps": torch.zeros_like(info.size)}

    @override
    def training_pass(self) -> Train:
        """Steps along the mixed direction."""
        return Train(self.loss, step=self.step)

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step along the mixture of gradient and direction."""
        g = gradient(client).clipped(self.federation.clip_norm)
        y = self.net.parameters(client["model"])
        v = self.alpha * (g + self.federation.weight_decay * y) + (1 - self.alpha) * client["direction"]
        y = y.add(v, alpha=-self.federation.learning_rate)
        return client | {"model": client["model"] | y, "steps": client["steps"] + 1}

    @override
    def upload(self, client: State) -> State:
        """The model and the number of steps."""
        return {"model": client["model"], "steps": client["steps"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """A step along the mean update, and the mean direction of the clients' steps."""
        uploads, theta = uploads.with_equal_weights(), self.net.parameters(server["model"])
        mean, direction = uploads.mean("model"), theta.zeros()
        for _, weight, upload in uploads:
            length = (upload["steps"] * self.federation.learning_rate).clamp(min=torch.finfo(self.net.dtype).tiny)
            direction = direction + weight / length * (theta - self.net.parameters(upload["model"]))
        model = mean | (theta + self.server_rate * (self.net.parameters(mean) - theta))
        return {"model": model, "direction": direction}
