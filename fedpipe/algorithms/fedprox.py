"""FedProx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Pull, Train


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    r"""FedAvg with a proximal term: local training is pulled towards the global model.

    Source: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, eq. 2.

    Method: client k minimizes

    .. math:: \min_\theta F_k(\theta) + \frac{\mu}{2} \lVert \theta - \theta^t \rVert^2.

    The pull is a term of the loss, so that Adam scales it too.

    State: none. Traffic: the model down, the model up.
    Values used: 0.01 (FedDW's code), {0.001, 0.1, 0.4, 0.7} (tuned in FedDUAL), 0.001 (cwFedAvg).

    Deviations
    ----------
    Slow clients
        Paper: may train for fewer epochs, and their updates count. Here: all train for the federation's epochs.

    Parameters
    ----------
    mu
        Strength of the pull.
    """

    mu: Annotated[float, Field(ge=0)] = 0.01

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, and the same as the target of the pull."""
        return {"model": download["model"], "anchor": self.net.parameters(download["model"])}

    @override
    def training_pass(self) -> Train:
        """Training near the global model."""
        return Train(self.loss, pull=Pull("anchor", self.mu))
