"""The passes over a client's data: training, measuring and updates without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from fedpipe.algorithms.batch import Batch, State
from fedpipe.core.tensors import Tensors


class Gradient(Protocol):
    """Gradient of a pass's loss and pull with respect to its trained parameters, clipped to the pass's norm."""

    def __call__(self, client: State, batch: Batch | None = None) -> Tensors:
        """The gradient at this client's tensors, on the batch of the step or another batch."""

    def with_value(self, client: State, batch: Batch | None = None) -> tuple[Tensors, Tensor]:
        """The gradient and the value of the loss."""

    def descend(self, client: State, gradient: Tensors) -> State:
        """The client after a step of the federation's optimizer along this gradient."""


Loss = Callable[[State, Batch], Tensor]
Step = Callable[[State, Batch, Gradient], State]
Condition = Callable[[State], Tensor]


class Pull(NamedTuple):
    """A proximal term: half of a strength times the squared distance from a part of the client's state."""

    to: str  #: part of the state that is the target, with a tensor of the same shape for each trained tensor
    strength: float


@dataclass(frozen=True)
class Train:
    """Epochs of mini-batch steps over the client's training data."""

    loss: Loss  #: (client, batch) -> scalar, a mean over the batch
    group: str = "model"  #: the part of the client's state that is trained
    pull: Pull | None = None  #: added to the gradient, but not to the value of the loss. Cheaper than a term of `loss`
    clip: float | None = None  #: maximum norm of the gradient of loss and pull
    only: tuple[str, ...] | None = None  #: trained tensors of the group. By default all
    epochs: int | None = None  #: maximum number of epochs. By default the federation's local epochs or steps
    step: Step | None = None  #: (client, batch, gradient) -> client. By default the federation's optimizer
    steps: int | None = None  #: maximum number of steps per epoch. By default all batches
    batches: int = 1  #: batches per step, which :meth:`Batch.split` separates
    when: Condition | None = None  #: evaluated before each epoch. The pass ends if it is false
    after: Callable[[State], State] | None = None  #: client -> client, after each epoch. With local steps set `epochs`
    share: float = 1.0  #: fraction of the training data, drawn in each round
    stream: str = "batches"  #: stream of random batches and optimizer state, which passes of one stream continue
    eval_mode: bool = False  #: whether the network is in evaluation mode and images are not augmented


@dataclass(frozen=True)
class Measure:
    """Sums over the client's data without gradient, and a change of the client's tensors that depends on them."""

    sums: Callable[[State, Batch], dict[str, Tensor]]  #: (client, batch) -> sums over the batch's samples
    then: Callable[[State, dict[str, Tensor]], State]  #: (client, sums over all data) -> client
    on: Literal["train", "validation"] = "train"  #: clients without validation data use their training data
    is_augmented: bool = False  #: whether images are augmented as in a Train pass


@dataclass(frozen=True)
class Update:
    """A change of the client's tensors that needs no data."""

    then: Callable[[State], State]  #: client -> client

    @classmethod
    def copy(cls, part: str, to: str) -> Update:
        """The part ``to`` becomes equal to ``part``."""
        return cls(lambda client: client | {to: client[part]})


Pass = Train | Measure | Update
