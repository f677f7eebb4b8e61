"""SCAFFOLD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Gradient, Pass, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    r"""Control variates correct local steps for the difference between a client's gradient and the average one.

    Source: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Alg. 1
    with option II.

    Method: with :math:`c_k` the client's and :math:`c` the server's control, K local steps of rate :math:`\eta` and the
    server's rate :math:`\eta_g`:

    .. math::
        y &\leftarrow y - \eta \, (\nabla F_k(y) - c_k + c) \\
        c_k^+ &= c_k - c + (\theta^t - y) / (K \eta) \\
        \theta^{t+1} &= \theta^t + \eta_g \tfrac{1}{m} \sum_{k \in S} (y_k - \theta^t), \qquad
        c \leftarrow c + \tfrac{1}{N} \sum_{k \in S} (c_k^+ - c_k)

    K is the number of steps that the client took, and :math:`\eta` the learning rate of the round. The averages are
    uniform by definition of the method. Controls are of parameters only, and BatchNorm's running statistics are
    averaged.

    State: :math:`c_k` at the client, :math:`c` at the server. Traffic: twice the model down, twice up.
    Value of the server's rate used: 1. FedDUAL ran it with Adam, and reports that it did not converge.

    Deviations
    ----------
    Local optimizer
        Paper: plain SGD. Here: plain SGD, or Adam with ``adam: true``. Weight decay is part of the gradient, and
        momentum is an error.
    Clipping
        Here: ``federation.clip_norm`` clips the corrected gradient, so that the control contains the clipped one.

    Parameters
    ----------
    server_rate
        The server's step :math:`\eta_g`.
    adam
        Use ``federation.optimizer: adam``, although the theory needs SGD. Adam follows the corrected gradient. The new
        control is the mean of the gradients of the round, which is what option II computes with SGD.
    """

    unsupported_settings: ClassVar[tuple[str, ...]] = ("momentum",)

    server_rate: Annotated[float, Field(gt=0)] = 1.0
    adam: bool = False

    @property
    @override
    def needs_sgd(self) -> bool:
        """Option II divides by SGD's learning rate."""
        return not self.adam

    @property
    def corrected_parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters that have controls."""
        return self.net.names

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The model and a control of zeros."""
        return {"model": initial_model(0), "control": initial_model(0).only(self.corrected_parameter_names).zeros()}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """A control of zeros."""
        return {"control": server["control"]}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the server's control."""
        return {"model": server["model"], "control": server["control"]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, both controls, their difference, and the number of steps."""
        return {
            "model": download["model"],
            "anchor": download["model"].only(self.corrected_parameter_names),
            "own": state["control"],
            "all": download["control"],
            "correction": download["control"] - state["control"],
            "steps": torch.zeros_like(info.size),
        } | (start_gradient_sum(state["control"]) if self.federation.optimizer == "adam" else {})

    @override
    def local_passes(self) -> Sequence[Pass]:
        """Corrected steps, then the new control."""
        return (Train(self.loss, step=self.step), Update(self.update_control_variate))

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One step along the corrected gradient."""
        g = gradient(client)
        client = add_to_gradient_sum(client, g) | {"steps": client["steps"] + 1}
        return self.descend(client, g | (g.only(client["correction"]) + client["correction"]), gradient)

    def descend(self, client: State, direction: Tensors, gradient: Gradient) -> State:
        """The client after a step of the federation's optimizer along ``direction``."""
        return gradient.descend(client, direction)

    def update_control_variate(self, client: State) -> State:
        """Option II: the client's new control, and its change."""
        if self.federation.optimizer == "adam":
            control = compute_mean_step_gradient(client)
            return client | {"own": control, "change": control - client["own"]}
        learning_rate_sum = (client["steps"] * self.federation.learning_rate).clamp(
            min=torch.finfo(client["steps"].dtype).tiny
        )
        y = client["model"].only(self.corrected_parameter_names)
        change = (client["anchor"] - y) / learning_rate_sum - client["all"]
        return client | {"own": client["own"] + change, "change": change}

    @override
    def upload(self, client: State) -> State:
        """The model and the change of the control."""
        return {"model": client["model"], "change": client["change"]}

    @override
    def keep(self, client: State) -> State:
        """The client's control."""
        return {"control": client["own"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """A step along the mean update. The control changes by the mean change of the controls, times m / N."""
        uploads, theta, participation_rate = (
            uploads.with_equal_weights(),
            server["model"],
            len(uploads) / self.federation.clients,
        )
        return {
            "model": theta + self.server_rate * (uploads.mean("model") - theta),
            "control": server["control"] + participation_rate * uploads.mean("change"),
        }


# -- with Adam: the control is the mean of the gradients of a round --------------------------------------------------


def start_gradient_sum(control: Tensors) -> State:
    """A sum of the gradients that have a control."""
    return {"gradients": control.zeros()}


def add_to_gradient_sum(client: State, g: Tensors) -> State:
    """The client with one more gradient in its sum, if it has one."""
    if "gradients" not in client:
        return client
    return client | {"gradients": client["gradients"] + g.only(client["gradients"])}


def compute_mean_step_gradient(client: State) -> Tensors:
    """The mean of the gradients of the client's steps."""
    mean: Tensors = client["gradients"] / client["steps"].clamp(min=1)
    return mean
