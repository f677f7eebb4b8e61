"""Partial sharing: one part of the model is averaged over clients, and the rest is personal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import ClientInfo, State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class SharedBody(Algorithm):
    """A body that clients upload and the server averages. Personal tensors, by default the head, stay at the client.

    A client that never participated receives the shared tensors and has the initial personal ones.
    """

    shared_part: ClassVar[str] = "body"  #: name of the shared tensors in states
    personal_part: ClassVar[str] = "head"  #: name of the personal tensors in states
    server_optimizer_part: ClassVar[str | None] = "body"

    @property
    def personal_tensor_names(self) -> tuple[str, ...]:
        """Names of the personal tensors."""
        return self.net.head_names

    @override
    def init(self, initial_model: Callable[[int], Tensors]) -> State:
        """The shared tensors."""
        return {self.shared_part: initial_model(0).without(self.personal_tensor_names)}

    @override
    def init_client(self, server: State, initial_model: Callable[[int], Tensors]) -> State:
        """The personal tensors of the common initial model."""
        return {self.personal_part: initial_model(0).only(self.personal_tensor_names)}

    @override
    def send(self, server: State, ids: Sequence[int]) -> tuple[State, State]:
        """The shared tensors."""
        return {self.shared_part: server[self.shared_part]}, {}

    @override
    def start(self, state: State, download: State, info: ClientInfo) -> State:
        """The downloaded tensors with the client's personal ones."""
        return {"model": self.net.to_model(download[self.shared_part] | state[self.personal_part])}

    @override
    def upload(self, client: State) -> State:
        """The shared tensors."""
        return {self.shared_part: client["model"].without(self.personal_tensor_names)}

    @override
    def keep(self, client: State) -> State:
        """The personal tensors."""
        return {self.personal_part: client["model"].only(self.personal_tensor_names)}

    @override
    def aggregate(self, server: State, uploads: Uploads) -> State:
        """The weighted mean of the shared tensors."""
        return {self.shared_part: uploads.mean(self.shared_part)}

    @override
    def global_model(self, server: State) -> Tensors | None:
        """The shared tensors if they are the complete model, otherwise None."""
        return None if self.personal_tensor_names else server[self.shared_part]
