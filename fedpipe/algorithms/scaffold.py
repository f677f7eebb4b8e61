"""SCAFFOLD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedpipe.algorithms.base import Batch, Facts, Gradient, Pass, State, Train, Update, Uploads
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    r"""Local steps corrected by control variates, which estimate how a client's gradient differs from all clients'.

    Source: Karimireddy et al., SCAFFOLD, ICML 2020, Alg. 1 with option II. With :math:`c_k` the client's and
    :math:`c` the server's control, K local steps of rate :math:`\eta` and the server's rate :math:`\eta_g`:

    .. math::
        y &\leftarrow y - \eta \, (\nabla F_k(y) - c_k + c) \\
        c_k^+ &= c_k - c + (\theta^t - y) / (K \eta) \\
        \theta^{t+1} &= \theta^t + \eta_g \tfrac{1}{m} \sum_{k \in S} (y_k - \theta^t), \qquad
        c \leftarrow c + \tfrac{1}{N} \sum_{k \in S} (c_k^+ - c_k)

    K is the number of steps that this client really took. Averages are uniform, by definition of the method; local
    steps are plain SGD (weight decay is part of the gradient, momentum is not used).

    State: :math:`c_k` at the client, :math:`c` at the server. Traffic: twice the model down, twice up.

    Parameters
    ----------
    server_rate
        The server's step :math:`\eta_g`.
    """

    needs_sgd: ClassVar[bool] = True
    server_rate: Annotated[float, Field(gt=0)] = 1.0

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The model and a control of zeros."""
        return {"model": fresh(0), "control": fresh(0).zeros()}

    def first(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """A control of zeros."""
        return {"control": server["control"]}

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The model and the server's control."""
        return {"model": server["model"], "control": server["control"]}, {}

    def start(self, kept: State, received: State, facts: Facts) -> State:
        """The global model, both controls, and no step taken."""
        return {
            "model": received["model"],
            "anchor": received["model"],
            "own": kept["control"],
            "all": received["control"],
            "steps": torch.zeros_like(facts.size),
        }

    def work(self) -> Sequence[Pass]:
        """Corrected steps, then the new control."""
        return (Train(self.loss, step=self.step), Update(self.renew))

    def step(self, client: State, batch: Batch, gradient: Gradient) -> State:
        """One corrected step of SGD."""
        y = client["model"]
        g = gradient(client)[0] + self.federation.weight_decay * y
        y = y - self.federation.learning_rate * (g - client["own"] + client["all"])
        return client | {"model": y, "steps": client["steps"] + 1}

    def renew(self, client: State) -> State:
        """Option II: the client's new control, and its change."""
        travelled = (client["steps"] * self.federation.learning_rate).clamp(min=torch.finfo(client["steps"].dtype).tiny)
        change = (client["anchor"] - client["model"]) / travelled - client["all"]
        return client | {"own": client["own"] + change, "change": change}

    def upload(self, client: State) -> State:
        """The model and the change of the control."""
        return {"model": client["model"], "change": client["change"]}

    def keep(self, client: State) -> State:
        """The client's control."""
        return {"control": client["own"]}

    def combine(self, server: State, uploads: Uploads) -> State:
        """A step along the mean update; the control moves by what the participants' controls moved."""
        uploads, theta = uploads.uniform(), server["model"]
        share = len(uploads) / self.federation.clients
        return {
            "model": theta + self.server_rate * (uploads.mean("model") - theta),
            "control": server["control"] + share * uploads.mean("change"),
        }
