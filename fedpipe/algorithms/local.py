"""Local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    r"""Each client trains alone: the baseline that a federation has to beat.

    Source: a baseline of the papers, without its own paper.

    Method: from a common initial model, client k minimizes its mean cross-entropy :math:`F_k` for E epochs in every
    round in which it is a participant, with a new optimizer. In other rounds its model does not change. The personal
    model is the one that the client trained last, so FedDW's protocol ``kept-on-global`` gives the same.

    State: the model at the client. Traffic: none. There is no global model.

    A client that never participated has the initial model, so its personal model is evaluated only after fine-tuning.

    Deviations
    ----------
    Length of training
        Code: E epochs in total (NIID-Bench), or E epochs in each round (FedDW). Here: E epochs in each round, so that
        all methods of a study take as many steps.
    """

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The server has no state."""
        return {}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The common initial model."""
        return {"model": initial_model(0)}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """Nothing."""
        return {}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The client's model."""
        return {"model": state["model"]}

    @override
    def upload(self, client: State) -> State:
        """Nothing."""
        return {}

    @override
    def keep(self, client: State) -> State:
        """The model."""
        return {"model": client["model"]}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The server's state does not change."""
        return server

    @override
    def global_model(self, server: State) -> None:
        """There is no global model."""
