"""Custom algorithms: classes that params.yaml names, such as ``prox: {algorithm: own.Prox}`` under `algorithms`."""

from dataclasses import dataclass

from torch import Tensor

from fedpipe.algorithms.base import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Prox(FedAvg):
    """FedAvg with a proximal term: local training is pulled towards the global model.

    `fedpipe check own.Prox` tests it and prints one message per problem.
    """

    mu: float = 0.01  #: strength of the pull, which params.yaml can set

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The client's tensors: the global model to train, and its parameters as the target of the pull."""
        return {"model": download["model"], "anchor": self.net.parameters(download["model"])}

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The local objective: mean cross-entropy plus the pull."""
        drift = self.net.parameters(client["model"]) - client["anchor"]
        return self.risk(client, batch) + self.mu / 2 * drift.square_norm()
