"""Ditto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.passes import Pass, Pull, Train
from fedpipe.algorithms.personal_model import PersonalModel


@dataclass(frozen=True, kw_only=True)
class Ditto(PersonalModel):
    r"""FedAvg, and a personal model per client that is pulled towards the global one.

    Source: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Alg. 1.

    Method: next to FedAvg's local model, which it uploads, client k continues its personal model :math:`v_k` by steps
    of

    .. math:: \min_{v} F_k(v) + \frac{\lambda}{2} \lVert v - \theta^t \rVert^2,

    with :math:`\theta^t` the downloaded model. Without ``dw``, the global model equals FedAvg's bit for bit.

    State: the personal model at the client. Traffic: the model down, the model up.
    Values used: lambda 1 (the authors' code, FL-bench).

    Deviations
    ----------
    Global model
        Paper: any federated method. Code: the authors' averages uniformly. Here: FedAvg with ``federation.weighting``.
    Pull to the global model
        Code: in the authors' PyTorch version, the norm itself, to a global model that moves in every step. Here: half
        the squared norm, to the downloaded model, as in the paper.
    Choice of lambda
        Code: the authors' can choose it for each client on validation data. Here: one value.
    Length of personal training
        Paper: a number of steps. Code: a separate number of epochs (PFLlib, FL-bench). Here: as that of the local one.
    Optimizer of the personal model
        Paper: SGD. Code: plain steps (PFLlib), or one optimizer for both models (FL-bench). Here: the federation's,
        with its own state, so that momentum of one model does not move the other.
    Clients outside the round
        Here: their personal models do not change, and equal the initial model before a client's first round.

    Parameters
    ----------
    attraction
        Strength lambda of the pull. 0 gives personal models that train alone.
    """

    attraction: Annotated[float, Field(ge=0)] = 1.0

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, the same as the target of the pull, and the personal model."""
        return super().start(state, download, info) | {"anchor": self.net.parameters(download["model"])}

    @property
    def personal_pass(self) -> Train:
        """Training of the personal model near the global one."""
        return Train(self.personal_risk, "personal", pull=Pull("anchor", self.attraction), stream="personal")

    @override
    def local_passes(self) -> Sequence[Pass]:
        """FedAvg's training, then that of the personal model."""
        return (self.training_pass(), self.personal_pass)

    @override
    def finetune_passes(self, epochs: int) -> Sequence[Pass]:
        """More training of the personal model."""
        return (replace(self.personal_pass, epochs=epochs, stream="finetune"),)
