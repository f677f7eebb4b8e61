"""The passes over a client's data: training, measuring and updates without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from fedpipe.algorithms.batch import Batch, State
from fedpipe.core.tensors import Tensors


class Gradient(Protocol):
    """Gradient of a pass's loss and pull in the parameters that it trains, clipped to the pass's norm."""

    def __call__(self, client: State, batch: Batch | None = None) -> Tensors:
        """The gradient at this client's tensors, on the batch of the step or on another one."""

    def with_value(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        """The gradient and the value of the loss."""

    def descend(self, client: State, gradient: Tensors) -> State:
        """The client after a step of the federation's optimizer along this gradient."""


Loss = Callable[[State, Batch], Tensor]
Step = Callable[[State, Batch, Gradient], State]
Condition = Callable[[State], Tensor]


class Pull(NamedTuple):
    """A proximal term: half of a strength times the squared distance from a part of the client's state."""

    to: str  #: the part that is pulled to: it holds a tensor of the same shape for each one that is trained
    strength: float


@dataclass(frozen=True)
class Train:
    """Epochs of mini-batch steps over the client's training data."""

    loss: Loss  #: (client, batch) -> scalar, a mean over the batch
    group: str = "model"  #: the part of the client's state that is trained
    pull: Pull | None = None  #: added to the loss, whose value leaves it out: cheaper than as a term of `loss`
    clip: float | None = None  #: the gradient of both is scaled down to this norm where it is longer
    only: tuple[str, ...] | None = None  #: the tensors of the group that are trained; all of them by default
    epochs: int | None = None  #: at most; by default the federation's local epochs or steps
    step: Step | None = None  #: (client, batch, gradient) -> client; by default the federation's optimizer
    steps: int | None = None  #: at most, in each epoch; by default as many as the data give
    batches: int = 1  #: batches that go into one step, which :meth:`Batch.split` gives apart
    when: Condition | None = None  #: asked before each epoch; the pass ends where it is false
    after: Callable[[State], State] | None = None  #: follows each epoch: client -> client; both need `epochs` by steps
    share: float = 1.0  #: share of the training data that is used, chosen at random in each round
    stream: str = "batches"  #: random stream and optimizer state; passes of one stream go on where the last one ended
    eval_mode: bool = False  #: the network is in evaluation mode, and images are as they are


@dataclass(frozen=True)
class Measure:
    """Sums over the client's data, without gradient, and what follows from them."""

    sums: Callable[[State, Batch], dict[str, Tensor]]  #: (client, batch) -> sums over the batch's samples
    then: Callable[[State, dict[str, Tensor]], State]  #: (client, sums over all data) -> client
    on: Literal["train", "validation"] = "train"  #: validation: where a client has no such part, its training data
    is_augmented: bool = False  #: whether images are changed at random, as those are that a Train pass sees


@dataclass(frozen=True)
class Update:
    """A change of the client's tensors that needs no data."""

    then: Callable[[State], State]  #: client -> client

    @classmethod
    def copy(cls, part: str, to: str) -> Update:
        """The part ``to`` becomes equal to ``part``."""
        return cls(lambda client: client | {to: client[part]})


Pass = Train | Measure | Update
