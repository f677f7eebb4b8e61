"""Template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fedpipe.algorithms.base import Batch, ClientInfo, State, Uploads
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.tensors import Tensors

# This file works as it stands: FedAvg, with a pull of each client towards the model that it trained last. Change the
# hooks that your method changes and delete the others (FedAvg's then hold). fedpipe/algorithms/base.py has the rest:
# send, personalize, local_passes (Train, Measure and Update passes), predict, global_model. Everything is written for
# one client, as pure functions of tensors without `if` on values. Models are added and scaled whole, a + b or a * 0.5;
# norms and distances are of self.net.parameters(a), since a model may hold BatchNorm's running statistics too. Those of
# the server's next model are the mean of the uploads' whatever `aggregate` computes.


@dataclass(frozen=True, kw_only=True)
class Template(FedAvg):
    r"""FedAvg with a pull towards the client's own last model.

    Source: authors, title, venue and year, equation:

    .. math:: \min_\theta F_k(\theta) + \frac{\lambda}{2} \lVert \theta - \theta_k \rVert^2.

    State: the client's last model, theta_k. Traffic: the model down, the model up.

    Parameters
    ----------
    pull
        Strength of the pull, lambda.
    """

    # A hyper-parameter a line: its bounds are checked before any job starts; its words stand in the docstring above.
    pull: Annotated[float, Field(ge=0)] = 0.01

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """What the server holds before round 1: add whatever it carries from round to round."""
        return {"model": fresh(0)}

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """What a client keeps before its first round, in the shapes that `keep` returns."""
        return {"last": self.net.parameters(server["model"])}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """What a client has at hand in a round: what it trains (``model``), and what its loss needs."""
        return {"model": received["model"], "last": kept["last"]}

    def loss(self, client: State, batch: Batch) -> Tensor:
        """What a client minimizes: the risk, a mean cross-entropy, and what the method adds to it."""
        drift = self.net.parameters(client["model"]) - client["last"]
        return self.risk(client, batch) + self.pull / 2 * drift.square_norm()

    def upload(self, client: State) -> State:
        """What travels to the server; its bytes are counted."""
        return {"model": client["model"]}

    def keep(self, client: State) -> State:
        """What stays at the client until it takes part again: here without the running statistics of BatchNorm."""
        return {"last": self.net.parameters(client["model"])}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The server's next state: ``uploads`` gives (client, weight, upload) in client order; the weights sum to 1."""
        return {"model": uploads.mean("model")}
