"""What both executors share: the phases of a client's round, and what comes out of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fedpipe.algorithms.base import Algorithm, Batch, ClientInfo, Pass, State, Train, one_hot
from fedpipe.config import Transforms
from fedpipe.engine import contract
from fedpipe.engine.clients import Integers
from fedpipe.engine.optimizers import optimizer
from fedpipe.tensors import Tensors

#: train: everything up to the upload; receive: what is due before training; finetune: that, and a few epochs on top;
#: prototype: as receive, but classes are read off the nearest prototype; begin: nothing at all.
Phase = Literal["train", "receive", "finetune", "prototype", "begin"]
#: A client's own test samples, all of the server's, what it trains on, or what it keeps for validation.
Test = Literal["local", "global", "train", "validation"]

BUFFERS = "buffers"  #: part of a client's state: the running statistics that it keeps to itself
BEGAN = "buffers/began"  #: those with which it began, which its teachers keep
MEASURE_BATCH = 250  #: samples in one call where nothing is trained; a fixed number, since bits may depend on it


class Score(NamedTuple):
    """A model on a test set."""

    correct: int
    total: int
    loss: float  #: sum of the cross-entropies
    classes: tuple[tuple[int, ...], ...]  #: three counts by class: those told right, those there are, those told so

    @classmethod
    def of(cls, classes: Tensor, loss: float) -> Score:
        """From :func:`class_counts`, and the sum of the losses."""
        counts = classes.tolist()
        return cls(sum(counts[0]), sum(counts[1]), loss, tuple(map(tuple, counts)))


def class_counts(logits: Tensor, batch: Batch) -> Tensor:
    """How many samples of a batch are told right, are, and are told to be of each class, shape (3, C)."""
    classes = logits.shape[-1]
    are, told = (one_hot(labels, classes, logits.dtype) for labels in (batch.y, logits.argmax(-1)))
    return batch.sum(torch.stack([are * told, are, told], 1)).long()


class Outcome(NamedTuple):
    """One client's phase."""

    client: int
    down: int  #: bytes received
    up: int  #: bytes sent
    upload: State  #: empty unless trained
    keep: State  #: empty unless trained
    scores: dict[Test, Score]
    seconds: float = 0.0  #: of its passes, where it trained; a client of a stack has its share of them


class Executor(Protocol):
    """Runs a phase for some clients."""

    name: str  #: how artifacts record it: where it and the versions are equal, the bits are

    def run(
        self,
        phase: Phase,
        round: int,
        ids: Sequence[int],
        kept: Callable[[int], State],
        send: Callable[[Sequence[int]], tuple[State, State]],
        tests: Sequence[Test] = (),
        among: Sequence[int] | None = None,
        again: Collection[int] = (),
    ) -> Iterator[Outcome]:
        """Outcomes in the order of ``ids``.

        Parameters
        ----------
        phase
            Which passes run.
        round
            The round that begins, which seeds the order of samples.
        ids
            Clients.
        kept
            A client's kept state.
        send
            What some clients receive, as :meth:`~fedpipe.algorithms.base.Algorithm.send`.
        tests
            Test sets on which the resulting models are measured.
        among
            Everyone who is at work in this phase, in any job; all clients by default.
        again
            Clients that are asked for again from the same states, in the same round: what `personalize` makes of them
            may be held until then.
        """

    def stacks(self, among: Sequence[int]) -> list[dict[str, Any]]:
        """Which of a round's participants are computed in one call, and at which widths; empty where none are."""

    def logits(self, model: Tensors, indices: Integers, round: int) -> Tensor:
        """Logits of the server's model after a round on many test samples, shape (n, C)."""


def seconds_since(begin: float, device: torch.device) -> float:
    """Seconds since ``time.perf_counter`` said so, with what the device has still to compute."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def personal_passes(algorithm: Algorithm) -> list[Pass]:
    """Those with which all phases but ``begin`` begin."""
    return contract.passes(algorithm, "personalize", algorithm.personalize())


def passes(algorithm: Algorithm, phase: Phase, finetune_epochs: int) -> list[Pass]:
    """The passes of a phase, in order."""
    listed = personal_passes(algorithm) if phase != "begin" else []
    if phase == "train":
        listed += contract.passes(algorithm, "local_passes", algorithm.local_passes())
    elif phase == "finetune":
        listed += contract.passes(algorithm, "finetune", algorithm.finetune(finetune_epochs))
    return listed


def init_client(algorithm: Algorithm, server: State, fresh: Callable[[int], Tensors]) -> State:
    """What a client keeps before its first round: the algorithm's parts, and buffers of its own where it has them."""
    first = contract.state(algorithm, "init_client", algorithm.init_client(server, fresh))
    return first | ({BUFFERS: algorithm.net.own} if algorithm.net.own else {})


def start_client(algorithm: Algorithm, kept: State, received: State, info: ClientInfo) -> State:
    """One client's tensors as it begins."""
    own = {BUFFERS: kept[BUFFERS], BEGAN: kept[BUFFERS]} if BUFFERS in kept else {}
    return contract.state(algorithm, "start", algorithm.start(kept, received, info)) | own


def keep(algorithm: Algorithm, state: State) -> State:
    """What stays at one client."""
    kept = contract.state(algorithm, "keep", algorithm.keep(state))
    return kept | {part: state[part] for part in (BUFFERS,) if part in state}


def upload(algorithm: Algorithm, state: State) -> State:
    """What one client sends."""
    return contract.state(algorithm, "upload", algorithm.upload(state))


def eval_mode(
    algorithm: Algorithm, state: State, mask: Tensor | None = None, lowered: bool = False
) -> AbstractContextManager[Any]:
    """Calls of the network within are in evaluation mode, for this client."""
    return algorithm.net.mode.of(False, mask, None, state.get(BUFFERS), state.get(BEGAN), lowered)


def train_mode(
    algorithm: Algorithm, training: Train, state: State, batch: Batch
) -> AbstractContextManager[dict[str, Tensor]]:
    """Calls of the network within are in the pass's mode, for this client; gives the statistics that they record."""
    lowered = algorithm.net.lowered
    if training.eval_mode:
        return eval_mode(algorithm, state, batch.mask, lowered)
    return algorithm.net.mode.of(True, batch.mask, batch.key, state.get(BUFFERS), state.get(BEGAN), lowered)


def noisy(algorithm: Algorithm, training: Train, transforms: Transforms) -> bool:
    """Whether a pass's batches need a key, for dropout or for changes of images."""
    return not training.eval_mode and (algorithm.net.random or transforms.random)


def readout(algorithm: Algorithm, phase: Phase) -> Callable[[State, Tensor], Tensor]:
    """How a phase's models tell classes."""
    return algorithm.prototype_logits if phase == "prototype" else algorithm.predict


def span(algorithm: Algorithm, training: Train) -> tuple[int, int | None]:
    """How many epochs a pass goes through at most, and its steps where the federation fixes them."""
    federation = algorithm.federation
    epochs = federation.local_epochs if training.epochs is None else training.epochs
    if epochs is not None:
        return epochs, None
    steps = cast(int, federation.local_steps)
    return steps, steps  # an epoch has one at least


def trained_names(algorithm: Algorithm, training: Train, state: State) -> tuple[str, ...]:
    """The names of the parameters that a pass trains, all of which its pull has a target for."""
    held = set(algorithm.net.buffer_names)
    names = tuple(name for name in training.only or state[training.group] if name not in held)
    contract.pull(algorithm, training, names, state)
    return names


def gradient_of(training: Train, client: State, gradient: Tensors, donated: bool = False) -> Tensors:
    """What a pass makes of the gradient of one client's loss; one that is ``donated`` is changed in place."""
    if training.pull is not None and training.pull.strength:
        theta, target = client[training.group], client[training.pull.to]
        place = gradient if donated else {}
        terms = (
            (name, torch.add(g, theta[name] - target[name], alpha=training.pull.strength, out=place.get(name)))
            for name, g in gradient.items()
        )
        gradient = Tensors(terms)
    return gradient.clipped(training.clip, donated)


def with_optimizer_state(algorithm: Algorithm, training: Train, state: State) -> State:
    """One client's tensors with the slots of a pass's optimizer."""
    if _slots(training) in state:
        return state
    parameters = state[training.group].only(trained_names(algorithm, training, state))
    return state | {_slots(training): optimizer(algorithm.federation).init(parameters)}


def descend(algorithm: Algorithm, training: Train, client: State, gradient: Tensors, donated: bool = False) -> State:
    """One client after a step of the federation's optimizer on what a pass trains.

    A gradient that is ``donated``, which has memory of its own and nobody reads again, may give it to what comes out.
    """
    group, slots, limit = client[training.group], _slots(training), algorithm.federation.clip_norm
    rule = optimizer(algorithm.federation)
    gradient = gradient.clipped(limit, donated)
    parameters, moved = rule.update(group.only(gradient), gradient, client[slots], donated)
    return client | {training.group: group | parameters, slots: moved}


def with_batch_stats(training: Train, client: State, statistics: dict[str, Tensor]) -> State:
    """One client with the running statistics that a step recorded, in its buffers or in the model that it trains."""
    part = BUFFERS if BUFFERS in client else training.group
    known = {name: value for name, value in statistics.items() if name in client[part]}
    return client | {part: client[part] | known}


def _slots(training: Train) -> str:
    """The part of a client's state that holds the optimizer of a pass's stream."""
    return f"optimizer/{training.stream}"
