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
    #: The part of the client's state that is trained, or several parts that one step trains. Then trained tensors have
    #: names such as ``personal/head.weight``. Each part receives BatchNorm's running statistics of the calls with
    #: its model, and the first part those of a mixture.
    group: str | tuple[str, ...] = "model"
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

    @property
    def trained_parts(self) -> tuple[str, ...]:
        """Names of the trained parts."""
        return (self.group,) if isinstance(self.group, str) else self.group

    @property
    def first_trained_part(self) -> str:
        """The trained part, or the first of several."""
        return self.trained_parts[0]

    def get_trained_part_tensors(self, client: State) -> Tensors:
        """Tensors of the trained part. With several parts, names have the part as a prefix."""
        if isinstance(self.group, str):
            tensors: Tensors = client[self.group]
            return tensors
        return Tensors((f"{part}/{name}", value) for part in self.group for name, value in client[part].items())

    def replace_trained_tensors(self, client: State, tensors: Tensors) -> State:
        """The client with new values of trained tensors with the names of :meth:`get_trained_part_tensors`."""
        if isinstance(self.group, str):
            return client | {self.group: client[self.group] | tensors}
        parts = {
            part: client[part] | {name: tensors.get(f"{part}/{name}", value) for name, value in client[part].items()}
            for part in self.group
        }
        return client | parts


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
