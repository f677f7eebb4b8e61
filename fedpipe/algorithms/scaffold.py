"""SCAFFOLD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    r"""Control variates correct local steps for the difference between a client's gradient and the average one.

    Source: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Alg. 1
    with option II. With :math:`c_k` the client's and :math:`c` the server's control, K local steps of rate
    :math:`\eta` and the server's rate :math:`\eta_g`:

    .. math::
        y &\leftarrow y - \eta \, (\nabla F_k(y) - c_k + c) \\
        c_k^+ &= c_k - c + (\theta^t - y) / (K \eta) \\
        \theta^{t+1} &= \theta^t + \eta_g \tfrac{1}{m} \sum_{k \in S} (y_k - \theta^t), \qquad
        c \leftarrow c + \tfrac{1}{N} \sum_{k \in S} (c_k^+ - c_k)

    K is the number of steps that this client really took, and :math:`\eta` the rate of its round. Averages are uniform,
    by definition of the method; local steps are plain SGD (weight decay is part of the gradient; momentum is refused;
    ``federation.clip_norm`` clips the corrected gradient, so that the control has what was left of it). Controls are of
    parameters only; BatchNorm's running statistics are averaged.

    State: :math:`c_k` at the client, :math:`c` at the server. Traffic: twice the model down, twice up.
    Value of the server's rate used: 1. FedDUAL ran it with Adam, and reports that it did not converge.

    Parameters
    ----------
    server_rate
        The server's step :math:`\eta_g`.
    adam
        Obey ``federation.optimizer: adam``, although the theory needs SGD: Adam follows the corrected gradient, and the
        control is the mean of the gradients met, which is what option II amounts to with SGD.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ("momentum",)

    server_rate: Annotated[float, Field(gt=0)] = 1.0
    adam: bool = False

    @property
    def needs_sgd(self) -> bool:
        """Option II divides by SGD's rate."""
        return not self.adam

    @property
    def corrected_names(self) -> tuple[str, ...]:
        """Names of the parameters that have controls."""
        return self.net.names

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The model and a control of zeros."""
        return {"model": fresh(0), "control": fresh(0).only(self.corrected_names).zeros()}

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """A control of zeros."""
        return {"control": server["control"]}

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the server's control."""
        return {"model": server["model"], "control": server["control"]}, {}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model, both controls, by how much they correct a gradient, and no step taken."""
        return {
            "model": received["model"],
            "anchor": received["model"].only(self.corrected_names),
            "own": kept["control"],
            "all": received["control"],
            "correction": received["control"] - kept["control"],
            "steps": torch.zeros_like(info.size),
        } | ({"met": kept["control"].zeros()} if self.federation.optimizer == "adam" else {})

    def local_passes(self) -> Sequence[Pass]:
        """Corrected steps, then the new control."""
        return (Train(self.loss, step=self.step), Update(self.update_control))

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step: corrected and plain SGD where there are controls, the federation's optimizer elsewhere."""
        federation, g, y = self.federation, gradient(client)[0], client["model"].only(self.corrected_names)
        direction = g | (g.only(y) + client["correction"])
        client = client | {"steps": client["steps"] + 1}
        if federation.optimizer == "adam":
            client = client | {"met": client["met"] + g.only(y)}
        new_client = gradient.descend(client, direction)
        if federation.optimizer == "adam" or not federation.momentum:
            return new_client
        direction = direction.clipped(federation.clip_norm).only(y)
        y = y - federation.learning_rate * (direction + federation.weight_decay * y)
        return new_client | {"model": new_client["model"] | y}

    def update_control(self, client: State) -> State:
        """Option II: the client's new control, and its change."""
        if self.federation.optimizer == "adam":
            mean = client["met"] / client["steps"].clamp(min=1)
            return client | {"own": mean, "change": mean - client["own"]}
        learning_rate_sum = (client["steps"] * self.federation.learning_rate).clamp(
            min=torch.finfo(client["steps"].dtype).tiny
        )
        y = client["model"].only(self.corrected_names)
        change = (client["anchor"] - y) / learning_rate_sum - client["all"]
        return client | {"own": client["own"] + change, "change": change}

    def upload(self, client: State) -> State:
        """The model and the change of the control."""
        return {"model": client["model"], "change": client["change"]}

    def keep(self, client: State) -> State:
        """The client's control."""
        return {"control": client["own"]}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """A step along the mean update; the control moves by what the participants' controls moved."""
        uploads, theta, participation_rate = uploads.uniform(), server["model"], len(uploads) / self.federation.clients
        return {
            "model": theta + self.server_rate * (uploads.mean("model") - theta),
            "control": server["control"] + participation_rate * uploads.mean("change"),
        }
