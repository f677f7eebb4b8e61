"""What the methods have in common whose clients keep the top of the model to themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class SharedBody(Algorithm):
    """A body that travels and is averaged, under a head that stays at the client."""

    server_optimizer_part: ClassVar[str | None] = "body"

    @property
    def personal_names(self) -> tuple[str, ...]:
        """Names of the head's tensors."""
        return self.net.head_names

    def init(self, fresh: Callable[[int], Tensors]) -> State:
        """The body."""
        return {"body": fresh(0).without(self.personal_names)}

    def init_client(self, server: State, fresh: Callable[[int], Tensors]) -> State:
        """The common initial head."""
        return {"head": fresh(0).only(self.personal_names)}

    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The body."""
        return {"body": server["body"]}, {}

    def start(self, kept: State, received: State, info: ClientInfo) -> State:
        """The downloaded body with the client's own head."""
        return {"model": received["body"] | kept["head"]}

    def upload(self, client: State) -> State:
        """The body."""
        return {"body": client["model"].without(self.personal_names)}

    def keep(self, client: State) -> State:
        """The head."""
        return {"head": client["model"].only(self.personal_names)}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted mean of the bodies."""
        return {"body": uploads.mean("body")}

    def global_model(self, server: State) -> Tensors | None:
        """There is no global head, hence no global model."""
        return None
