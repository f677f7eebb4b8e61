"""A complete personal model at each client, next to the global one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Pass, Train
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class PersonalModel(FedAvg):
    """FedAvg, and a model that the client keeps and is evaluated with. It begins as the initial model.

    A client that never participated has the initial model, so its personal model is evaluated only after fine-tuning.
    """

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The initial model."""
        return {"personal": server["model"]}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, and the client's personal one."""
        return {"model": download["model"], "personal": state["personal"]}

    @override
    def finetune_passes(self, epochs: int) -> Sequence[Pass]:
        """Steps of the personal model itself."""
        return (Train(self.personal_risk, group="personal", epochs=epochs, stream="finetune"),)

    def personal_risk(self, client: State, batch: Batch) -> Tensor:
        """The personal model's risk."""
        return self.risk(client | {"model": client["personal"]}, batch)

    @override
    def keep(self, client: State) -> State:
        """The personal model."""
        return {"personal": client["personal"]}

    @override
    def predict(self, client: State, x: Tensor) -> Tensor:
        """The personal model's logits."""
        return self.net(client["personal"], x)
