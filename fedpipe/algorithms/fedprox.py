"""FedProx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.passes import Pass, Pull, Train


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    r"""FedAvg with a proximal term: local training is pulled towards the global model.

    Source: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, eq. 2:

    .. math:: \min_\theta F_k(\theta) + \frac{\mu}{2} \lVert \theta - \theta^t \rVert^2.

    State: none. Traffic: the model down, the model up. The pull is a term of the loss, so that Adam scales it too.
    Deviations: in the paper slow clients may do fewer epochs, whose work counts; here all do the federation's.
    Values used: 0.01 (FedDW's code), {0.001, 0.1, 0.4, 0.7} (tuned in FedDUAL), 0.001 (cwFedAvg).

    Parameters
    ----------
    mu
        Strength of the pull.
    """

    mu: Annotated[float, Field(ge=0)] = 0.01

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The global model, twice: to train, and to stay near."""
        return {"model": received["model"], "anchor": self.net.parameters(received["model"])}

    @property
    def _pull(self) -> Pull:
        """Towards the global model."""
        return Pull("anchor", self.mu)

    def local_passes(self) -> Sequence[Pass]:
        """Training near the global model."""
        return (Train(self.loss, pull=self._pull),)

    def finetune(self, epochs: int) -> Sequence[Pass]:
        """The same."""
        return (Train(self.loss, pull=self._pull, epochs=epochs, stream="finetune"),)
