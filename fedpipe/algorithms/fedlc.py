"""FedLC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedpipe.algorithms.base import cross_entropy
from fedpipe.algorithms.batch import Batch, ClientInfo, State
from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedLC(FedAvg):
    r"""FedAvg with calibrated logits: a margin for each class, which is larger if a client has few of its samples.

    Source: Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022, eq. 8-9.

    Method: with f the logits and :math:`n_{kc}` client k's samples of class c, the client minimizes

    .. math::
        \mathbb{E} \Bigl[ -\log \frac{e^{f_y - \tau n_{ky}^{-1/4}}}{\sum_c e^{f_c - \tau n_{kc}^{-1/4}}} \Bigr].

    State: none. Traffic: the model down, the model up.
    Values used: tau 1 (FL-bench, PFLlib), 0.1 (FedDecorr's code, fluke).

    Deviations
    ----------
    Denominator
        Paper: the sum over the other classes, whose loss has no minimum. Code: the sum over all classes (PFLlib, and
        FL-bench, whose training diverged otherwise). Here: as the codes.
    Classes without samples
        Paper: divides by 0. Code: as if there were 1e-8 samples (FL-bench), so the margin is 100 tau. Here: the same.
    Class counts
        Code: PFLlib sums those of all clients, once before round 1. Here: the client's, as in the paper and FL-bench.

    Parameters
    ----------
    tau
        Strength of the calibration. 0 gives FedAvg.
    """

    tau: Annotated[float, Field(ge=0)] = 1.0

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The global model, and the margin of each class."""
        return {"model": download["model"], "margins": self.tau * info.class_counts.clamp(min=1e-8) ** -0.25}

    @override
    def loss(self, client: State, batch: Batch) -> Tensor:
        """Cross-entropy of the calibrated logits."""
        return cross_entropy(self.net(client["model"], batch.x) - client["margins"], batch)
