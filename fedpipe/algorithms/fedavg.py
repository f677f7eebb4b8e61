"""FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    r"""Local training, then the weighted average of the local models.

    Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    Method: client k starts at the global model, minimizes its mean cross-entropy F_k for E epochs, and the server takes

    .. math:: \theta^{t+1} = \sum_{k \in S} w_k \theta_k, \qquad w_k = n_k / \sum_{j \in S} n_j
              \text{ or } 1 / |S|.

    State: none. Traffic: the model down, the model up.
    """

    server_optimizer_part: ClassVar[str | None] = "model"

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted mean of the participants' models."""
        return {"model": uploads.mean("model")}
