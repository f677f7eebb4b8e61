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

# You can run this file unchanged: it is FedAvg with a pull of each client towards the model that it trained last.
# Change the hooks that your method changes and delete the others. They are then the same as in FedAvg. The other hooks
# are in fedpipe/algorithms/base.py: send, personal_passes, training_pass, local_passes (Train, Measure and Update
# passes), predict, global_model. Write hooks for one client, as pure functions of tensors without `if` on values. Add
# and scale complete models, such as a + b or a * 0.5. Take norms and distances of self.net.parameters(a), because a
# model may contain BatchNorm's running statistics. The engine averages those over the uploads, whatever `aggregate`
# computes.


@dataclass(frozen=True, kw_only=True)
class Template(FedAvg):
    r"""FedAvg with a pull towards the client's last model.

    Source: authors, title, venue and year, equation.

    Method: client k minimizes, with its last model theta_k,

    .. math:: \min_\theta F_k(\theta) + \frac{\lambda}{2} \lVert \theta - \theta_k \rVert^2.

    State: theta_k at the client. Traffic: the model down, the model up.

    Deviations
    ----------
    First participation of a client
        Paper: what it does. Code: what the authors' code does. Here: a pull to the initial model.

    Parameters
    ----------
    pull
        Strength of the pull, lambda.
    """

    # One hyperparameter per line. Its bounds are checked before any job starts. The docstring above describes it.
    pull: Annotated[float, Field(ge=0)] = 0.01

    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The server's state before round 1. Add what the server needs in later rounds."""
        return {"model": initial_model(0)}

    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """What a client keeps before its first round, with the names and shapes of `keep`."""
        return {"last": self.net.parameters(server["model"])}

    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """A client's tensors in a round: the model that it trains (``model``), and what its loss needs.

        ``info`` has the client's sample counts, the round, and ``is_first``, which is 1 until the client has trained.
        """
        return {"model": download["model"], "last": state["last"]}

    def loss(self, client: State, batch: Batch) -> Tensor:
        """The local objective: the risk, a mean cross-entropy, plus the term of the method."""
        drift = self.net.parameters(client["model"]) - client["last"]
        return self.risk(client, batch) + self.pull / 2 * drift.square_norm()

    def upload(self, client: State) -> State:
        """What travels to the server. Its bytes are counted."""
        return {"model": client["model"]}

    def keep(self, client: State) -> State:
        """What stays at the client until its next round, here without the running statistics of BatchNorm."""
        return {"last": self.net.parameters(client["model"])}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The server's next state. ``uploads["model"]`` is a list in client order, and ``uploads.mean`` averages it."""
        return {"model": uploads.mean("model")}
